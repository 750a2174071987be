//! Traces for OpenTelemetry: a span for each call, barrier instance, run and exclusion. Tracing is off unless an
//! endpoint is configured.
//!
//! `export.rs` sends the spans. Begin at `Traces::start`.
//!
//! - The span of a call is a child of the span that the caller's `traceparent` names. Without a `traceparent` it is a
//!   root span.
//! - The span of a barrier instance is a child of its run's span, with an event for each arrival.
//! - The span of a run lasts from its opening to its end.
//! - The span of an exclusion lasts from the command to the end of the exclusion. It has an event for each evicted
//!   task and for the first refused registration. Its parent is the span that the `traceparent` of the command's
//!   request names.
//!
//! The thread that answers a call makes the span of the call. A separate thread makes all other spans from the
//! events, without the lock of the state machine. If the queue of this thread is full, spans are dropped and counted.
//! Spans that the collector does not accept are counted too. While tracing is off, it costs each call one check.

mod exclusion_spans;
mod export;
mod lost_span_counts;
mod span_conversions;

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use http::HeaderMap;
use opentelemetry::propagation::TextMapPropagator as _;
use opentelemetry::trace::{
    Event as Happening, Span as _, SpanBuilder, SpanContext, SpanKind, Status, TraceContextExt as _,
    Tracer as _, TracerProvider as _,
};
use opentelemetry::{Context, KeyValue};
use opentelemetry_http::HeaderExtractor;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::{SdkTracer, SdkTracerProvider, Span};

use crate::coordination::{
    BarrierOutcome, BarrierRecordWithArrivals, EventKind, ExclusionId, JobEvent, JobId, RunNumber,
    RunOutcome, TaskId, Timestamp,
};
use crate::engine::{Engine, Observer};
use crate::telemetry::metrics::{MetricSource, ScrapeOutput, catalogue as metric};
use exclusion_spans::ExclusionSpanRecorder;
pub use export::{CollectorTls, OtlpProtocol, check_collector_endpoint};
use lost_span_counts::{CountingSpanProcessor, LostSpanCounts};
use span_conversions::{BARRIER_EVENTS_MAX, JobNameCache, saturating_i64, to_system_time};

/// The maximum number of queued messages.
const QUEUE: usize = 1 << 12;
/// A message from the engine to the tracing thread.
enum TraceMessage {
    Event(Box<JobEvent>),
    Barrier(Arc<BarrierRecordWithArrivals>),
    Parent(JobId, ExclusionId, TraceParent),
    Stop,
}

/// The parent span of a request, as its caller sent it.
#[derive(Debug, Clone)]
pub struct TraceParent(SpanContext);

impl TraceParent {
    /// Returns the context of the header `traceparent`, if the header is valid.
    #[must_use]
    pub fn from_headers(headers: &HeaderMap) -> Option<Self> {
        let parent = parent_context(headers).span().span_context().clone();
        parent.is_valid().then_some(Self(parent))
    }
}

/// Returns the context of the header `traceparent`; an empty one without a valid header.
fn parent_context(headers: &HeaderMap) -> Context {
    let nothing = Context::new();
    match headers.contains_key("traceparent") {
        true => TraceContextPropagator::new().extract_with_context(&nothing, &HeaderExtractor(headers)),
        false => nothing,
    }
}

/// A call in progress.
#[derive(Debug)]
pub struct CallSpan {
    parent: Context,
    began: Timestamp,
}

/// The end of a call.
#[derive(Debug, Clone, Copy)]
pub struct CallEnd {
    /// The job of the call.
    pub job: JobId,
    /// The name of the service on the wire.
    pub service: &'static str,
    /// The name of the method on the wire.
    pub method: &'static str,
    /// The gRPC status code; 0 for success.
    pub code: i32,
    /// The time of the end.
    pub at: Timestamp,
}

/// The tracer of a server.
pub struct Traces {
    tracer: SdkTracer,
    provider: SdkTracerProvider,
    message_tx: SyncSender<TraceMessage>,
    thread: Mutex<Option<JoinHandle<()>>>,
    names: Arc<JobNameCache>,
    counts: Arc<LostSpanCounts>,
}

impl Traces {
    /// Starts to export traces to an endpoint, over TLS if its scheme is `https`. It must be called within a
    /// tokio runtime, which sends them.
    ///
    /// # Errors
    /// If the endpoint is invalid or a certificate cannot be read.
    pub fn start(
        engine: &Arc<Engine>,
        endpoint: &str,
        protocol: OtlpProtocol,
        trust: &CollectorTls,
    ) -> Result<Arc<Self>, String> {
        let exporter = export::build_exporter(endpoint, protocol, trust)?;
        let counts = LostSpanCounts::new(*engine.clock());
        let provider = SdkTracerProvider::builder()
            .with_span_processor(CountingSpanProcessor::new(exporter, &counts))
            .with_max_events_per_span(BARRIER_EVENTS_MAX)
            .with_resource(
                opentelemetry_sdk::Resource::builder()
                    .with_service_name("muster")
                    .with_attribute(KeyValue::new("service.version", env!("CARGO_PKG_VERSION")))
                    .build(),
            )
            .build();
        let tracer = provider.tracer("muster");
        let (told, coming) = sync_channel(QUEUE);
        let names = Arc::new(JobNameCache::new(Arc::downgrade(engine)));
        let exclusions = ExclusionSpanRecorder::new(tracer.clone(), Arc::clone(&names));
        let runs = SpanRecorder {
            tracer: tracer.clone(),
            names: Arc::clone(&names),
            open: HashMap::new(),
            exclusions,
        };
        let thread = std::thread::Builder::new()
            .name("muster-traces".into())
            .spawn(move || runs.run(&coming))
            .map_err(|error| error.to_string())?;
        Ok(Arc::new(Self {
            tracer,
            provider,
            message_tx: told,
            thread: Mutex::new(Some(thread)),
            names,
            counts,
        }))
    }

    /// Begins the span of a call.
    #[must_use]
    pub fn begin_call_span(&self, headers: &HeaderMap, now: Timestamp) -> CallSpan {
        CallSpan { parent: parent_context(headers), began: now }
    }

    /// Ends the span of a call.
    pub fn end_call_span(&self, call: &CallSpan, task: Option<TaskId>, end: &CallEnd) {
        let CallEnd { job, service, method, code, at } = *end;
        let mut attributes = vec![
            KeyValue::new("rpc.system", "grpc"),
            KeyValue::new("rpc.service", service),
            KeyValue::new("rpc.method", method),
            KeyValue::new("rpc.grpc.status_code", i64::from(code)),
            KeyValue::new("muster.job", self.names.name_of(job).to_string()),
        ];
        attributes.extend(task.map(|task| KeyValue::new("muster.task", i64::from(task.0))));
        let builder = SpanBuilder::from_name(format!("{service}/{method}"))
            .with_kind(SpanKind::Server)
            .with_start_time(to_system_time(call.began))
            .with_attributes(attributes);
        let mut span = self.tracer.build_with_context(builder, &call.parent);
        // The codes that the OpenTelemetry conventions for gRPC servers count as server errors.
        if matches!(code, 2 | 4 | 12 | 13 | 14 | 15) {
            span.set_status(Status::error(""));
        }
        span.end_with_timestamp(to_system_time(at));
    }

    /// Sets the parent span of an exclusion.
    pub fn set_parent_span_of_exclusion(&self, job: JobId, exclusion: ExclusionId, parent: TraceParent) {
        self.send_message(TraceMessage::Parent(job, exclusion, parent));
    }

    /// Sends the remaining spans and ends the thread. Blocks until that is done.
    pub fn stop(&self) {
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            // The thread runs until it receives this message.
            let _ = self.message_tx.send(TraceMessage::Stop);
            let _ = thread.join();
        }
        if let Err(error) = self.provider.shutdown() {
            tracing::warn!(%error, "the last traces could not be sent");
        }
        self.counts.log_remaining_failures();
    }

    fn send_message(&self, told: TraceMessage) {
        if self.message_tx.try_send(told).is_err() {
            self.counts.count_dropped_span();
        }
    }
}

impl MetricSource for Traces {
    fn write_samples(&self, page: &mut ScrapeOutput) {
        page.add_integer_sample(&metric::SPANS_LEFT_OUT, &[], self.counts.suppressed.load(Ordering::Relaxed));
        page.add_integer_sample(&metric::SPANS_FAILED, &[], self.counts.failed.load(Ordering::Relaxed));
    }
}

impl Observer for Traces {
    fn on_event(&self, event: &JobEvent) {
        let told = matches!(
            event.what,
            EventKind::RunOpened
                | EventKind::RunEnded { .. }
                | EventKind::FirstCause { .. }
                | EventKind::Excluded { .. }
                | EventKind::Readmitted { .. }
                | EventKind::RegistrationRefused { .. }
                | EventKind::JobDeleted { .. }
        );
        if told {
            self.send_message(TraceMessage::Event(Box::new(event.clone())));
        }
    }

    fn on_barrier_ended(&self, ending: &Arc<BarrierRecordWithArrivals>) {
        self.send_message(TraceMessage::Barrier(Arc::clone(ending)));
    }
}

/// The state of the tracing thread: the spans of open runs.
struct SpanRecorder {
    tracer: SdkTracer,
    names: Arc<JobNameCache>,
    open: HashMap<JobId, (RunNumber, Span)>,
    exclusions: ExclusionSpanRecorder,
}

impl SpanRecorder {
    fn run(mut self, coming: &Receiver<TraceMessage>) {
        for told in coming {
            match told {
                TraceMessage::Event(event) => {
                    self.exclusions.record_event(&event);
                    self.record_event(&event);
                }
                TraceMessage::Parent(job, exclusion, parent) => {
                    self.exclusions.set_parent_span(job, exclusion, parent.0)
                }
                TraceMessage::Barrier(ending) => self.record_barrier(&ending),
                TraceMessage::Stop => break,
            }
        }
        // Spans of open runs end with the server; dropping a span ends it.
        self.exclusions.end_all_spans();
    }

    fn record_event(&mut self, event: &JobEvent) {
        let at = to_system_time(event.at);
        match &event.what {
            EventKind::RunOpened => {
                let name = self.names.name_of(event.job);
                let attributes = [
                    KeyValue::new("muster.job", name.to_string()),
                    KeyValue::new("muster.run", saturating_i64(event.run.0)),
                ];
                let builder = SpanBuilder::from_name("run").with_start_time(at).with_attributes(attributes);
                let span = self.tracer.build_with_context(builder, &Context::new());
                self.open.insert(event.job, (event.run, span));
            }
            EventKind::FirstCause { task } => {
                let Some((_, span)) = self.open.get_mut(&event.job) else { return };
                let task = task.map(|task| KeyValue::new("muster.task", i64::from(task.0)));
                let error = KeyValue::new("error.message", event.reason.clone());
                span.add_event_with_timestamp("first cause", at, task.into_iter().chain([error]).collect());
            }
            EventKind::RunEnded { outcome } => {
                let Some((_, mut span)) = self.open.remove(&event.job) else { return };
                span.set_attribute(KeyValue::new("muster.outcome", outcome.name()));
                if *outcome != RunOutcome::Completed {
                    span.set_status(Status::error(event.reason.clone()));
                }
                span.end_with_timestamp(at);
            }
            _ => {}
        }
    }

    fn record_barrier(&self, ending: &BarrierRecordWithArrivals) {
        let record = &ending.record;
        let run = self.open.get(&ending.job).filter(|(run, _)| *run == ending.run);
        let parent = match run {
            Some((_, span)) => Context::new().with_remote_span_context(span.span_context().clone()),
            None => Context::new(),
        };
        let size = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
        let attributes = [
            KeyValue::new("muster.job", self.names.name_of(ending.job).to_string()),
            KeyValue::new("muster.run", saturating_i64(ending.run.0)),
            KeyValue::new("muster.barrier.id", record.id.to_string()),
            KeyValue::new("muster.barrier.counter", record.counter),
            KeyValue::new("muster.barrier.kind", record.kind.name()),
            KeyValue::new("muster.barrier.outcome", record.outcome.name()),
            KeyValue::new("muster.barrier.members", size(record.members)),
            KeyValue::new("muster.barrier.arrived", size(record.arrived)),
            KeyValue::new("muster.barrier.skew_us", saturating_i64(record.skew_us)),
        ];
        let arrivals = ending.arrivals.iter().take(BARRIER_EVENTS_MAX as usize).map(|arrival| {
            let task = KeyValue::new("muster.task", i64::from(arrival.task.0));
            Happening::new("arrival", to_system_time(arrival.at), vec![task], 0)
        });
        let builder = SpanBuilder::from_name("barrier")
            .with_start_time(to_system_time(record.began))
            .with_attributes(attributes)
            .with_events(arrivals.collect());
        let mut span = self.tracer.build_with_context(builder, &parent);
        if record.outcome == BarrierOutcome::Failed {
            span.set_status(Status::error(""));
        }
        span.end_with_timestamp(to_system_time(record.ended));
    }
}
