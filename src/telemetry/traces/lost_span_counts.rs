//! Counts two kinds of lost spans: those that are dropped because a queue is full, and those that the exporter fails
//! to send. Failures are logged at most once a minute.
//!
//! The SDK does not expose the number of dropped spans. The SDK also logs a line for every failed batch, which would
//! fill the log while the collector is unreachable. So the log lines of the SDK are compiled out. Begin at
//! [`CountingSpanProcessor`] and [`CountingExporter`].

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use opentelemetry::Context;
use opentelemetry_otlp::SpanExporter as Exporter;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{
    BatchConfigBuilder, BatchSpanProcessor, Span, SpanData, SpanExporter, SpanProcessor,
};

use crate::clock::Clock;
use crate::coordination::Timestamp;

/// The maximum number of spans that wait for the collector.
const PENDING_SPANS_MAX: usize = 1 << 11;
/// The minimum time between two log lines about failed spans.
const FAILURE_LOG_INTERVAL: Duration = Duration::from_secs(60);

/// The counters of spans.
#[derive(Debug)]
pub(super) struct LostSpanCounts {
    clock: Clock,
    /// Spans that have ended and are not handed to the collector yet.
    waiting: AtomicUsize,
    pub suppressed: AtomicU64,
    pub failed: AtomicU64,
    failure_log: Mutex<FailureLogState>,
}

/// The state of log lines about failures.
#[derive(Debug, Default)]
struct FailureLogState {
    last: Option<Timestamp>,
    /// Spans that failed since the last line.
    unreported: usize,
}

impl LostSpanCounts {
    pub fn new(clock: Clock) -> Arc<Self> {
        let (left_out, failed) = (AtomicU64::new(0), AtomicU64::new(0));
        Arc::new(Self {
            clock,
            waiting: AtomicUsize::new(0),
            suppressed: left_out,
            failed,
            failure_log: Mutex::default(),
        })
    }

    /// Counts a span that was dropped because there were too many.
    pub fn count_dropped_span(&self) {
        self.suppressed.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts failed spans. Returns the number to log now, if a line is due.
    fn count_failed_spans(&self, spans: usize, now: Timestamp) -> Option<usize> {
        self.failed.fetch_add(spans as u64, Ordering::Relaxed);
        let mut said = self.failure_log.lock().unwrap_or_else(PoisonError::into_inner);
        said.unreported += spans;
        if said.last.is_some_and(|last| now.since(last) < FAILURE_LOG_INTERVAL) {
            return None;
        }
        said.last = Some(now);
        Some(std::mem::take(&mut said.unreported))
    }

    /// Logs the failures that no line has reported. Called at the end.
    pub fn log_remaining_failures(&self) {
        let unsaid =
            std::mem::take(&mut self.failure_log.lock().unwrap_or_else(PoisonError::into_inner).unreported);
        if unsaid > 0 {
            tracing::warn!(spans = unsaid, "further spans could not be sent to the collector, and are lost");
        }
        let left_out = self.suppressed.load(Ordering::Relaxed);
        if left_out > 0 {
            tracing::warn!(left_out, "some spans were left out: there were too many at once");
        }
    }
}

/// A span processor that counts spans and sends them in batches.
#[derive(Debug)]
pub(super) struct CountingSpanProcessor {
    batches: BatchSpanProcessor,
    counts: Arc<LostSpanCounts>,
}

impl CountingSpanProcessor {
    pub fn new(exporter: Exporter, counts: &Arc<LostSpanCounts>) -> Self {
        let config = BatchConfigBuilder::default().with_max_queue_size(PENDING_SPANS_MAX).build();
        let sending = CountingExporter { exporter, counts: Arc::clone(counts) };
        let batches = BatchSpanProcessor::builder(sending).with_batch_config(config).build();
        Self { batches, counts: Arc::clone(counts) }
    }
}

impl SpanProcessor for CountingSpanProcessor {
    fn on_start(&self, span: &mut Span, context: &Context) {
        self.batches.on_start(span, context);
    }

    fn on_end(&self, span: SpanData) {
        // This bound is that of the SDK's queue, so that the queue itself drops none.
        if self.counts.waiting.fetch_add(1, Ordering::Relaxed) >= PENDING_SPANS_MAX {
            self.counts.waiting.fetch_sub(1, Ordering::Relaxed);
            self.counts.count_dropped_span();
            return;
        }
        self.batches.on_end(span);
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.batches.force_flush()
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.batches.shutdown_with_timeout(timeout)
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.batches.set_resource(resource);
    }
}

/// An exporter that counts failed spans.
#[derive(Debug)]
struct CountingExporter {
    exporter: Exporter,
    counts: Arc<LostSpanCounts>,
}

impl SpanExporter for CountingExporter {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let spans = batch.len();
        self.counts.waiting.fetch_sub(spans, Ordering::Relaxed);
        if let Err(error) = self.exporter.export(batch).await
            && let Some(spans) = self.counts.count_failed_spans(spans, self.counts.clock.now())
        {
            tracing::warn!(
                spans,
                %error,
                "spans could not be sent to the collector, and are lost; the log hears of more of them once a minute"
            );
        }
        // The failure is counted and logged, so the SDK need not log it again.
        Ok(())
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.exporter.shutdown_with_timeout(timeout)
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.exporter.force_flush()
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.exporter.set_resource(resource);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_are_logged_once_a_minute_with_their_number() {
        let counts = LostSpanCounts::new(Clock::start());
        let start = Timestamp(1_000_000);
        let at = |seconds| start.after(Duration::from_secs(seconds));
        assert_eq!(counts.count_failed_spans(3, at(0)), Some(3));
        assert_eq!([counts.count_failed_spans(5, at(5)), counts.count_failed_spans(7, at(59))], [None, None]);
        assert_eq!(counts.count_failed_spans(1, at(60)), Some(13));
        assert_eq!(counts.count_failed_spans(1, at(61)), None);
        assert_eq!(counts.failed.load(Ordering::Relaxed), 17);
    }
}
