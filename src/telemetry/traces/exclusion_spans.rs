//! Creates the span of each exclusion when the exclusion ends, because not all of its effects are known earlier.
//!
//! The span is a child of the span that the `traceparent` of the request names. The recorder receives this
//! `traceparent` after the event of the exclusion. Begin at [`ExclusionSpanRecorder`].

use std::collections::HashMap;
use std::sync::Arc;
use std::time::SystemTime;

use opentelemetry::trace::{
    Event as Happening, Span as _, SpanBuilder, SpanContext, TraceContextExt as _, Tracer as _,
};
use opentelemetry::{Context, KeyValue};
use opentelemetry_sdk::trace::SdkTracer;

use super::span_conversions::{BARRIER_EVENTS_MAX, JobNameCache, saturating_i64, to_system_time};
use crate::coordination::{Actor, EventKind, ExclusionId, ExclusionTarget, JobEvent, JobId, TaskId};

/// The maximum number of exclusions that are followed at once; each job bounds its own.
const OPEN_MAX: usize = 1 << 16;

/// An exclusion in force.
struct OpenExclusion {
    since: SystemTime,
    attributes: Vec<KeyValue>,
    events: Vec<Happening>,
    parent: Option<SpanContext>,
}

/// The exclusions in force, of all jobs.
pub(super) struct ExclusionSpanRecorder {
    tracer: SdkTracer,
    names: Arc<JobNameCache>,
    open: HashMap<(JobId, ExclusionId), OpenExclusion>,
}

impl ExclusionSpanRecorder {
    pub fn new(tracer: SdkTracer, names: Arc<JobNameCache>) -> Self {
        Self { tracer, names, open: HashMap::new() }
    }

    pub fn record_event(&mut self, event: &JobEvent) {
        match &event.what {
            EventKind::Excluded { exclusion, target, tasks, actor } if self.open.len() < OPEN_MAX => {
                let open = self.new_open_exclusion(event, *exclusion, target, tasks, actor);
                self.open.insert((event.job, *exclusion), open);
            }
            EventKind::RegistrationRefused { exclusion, task, peer } => {
                if let Some(open) = self.open.get_mut(&(event.job, *exclusion)) {
                    let mut about = vec![task_attribute(*task)];
                    about.extend(
                        peer.map(|peer| KeyValue::new("network.peer.address", peer.ip().to_string())),
                    );
                    open.events.push(Happening::new(
                        "registration refused",
                        to_system_time(event.at),
                        about,
                        0,
                    ));
                }
            }
            EventKind::Readmitted { exclusion, actor, .. } => {
                let Some(open) = self.open.remove(&(event.job, *exclusion)) else { return };
                let mut end = vec![KeyValue::new(
                    "muster.exclusion.end",
                    if actor.is_some() { "lifted" } else { "expired" },
                )];
                if let Some(actor) = actor {
                    end.push(KeyValue::new("muster.exclusion.lifted_by", actor.who.to_string()));
                    end.push(KeyValue::new("muster.exclusion.lift_reason", event.reason.clone()));
                }
                self.end_span(open, end, to_system_time(event.at));
            }
            EventKind::JobDeleted { .. } => {
                let of_job = self.open.extract_if(|(job, _), _| *job == event.job);
                let of_job: Vec<OpenExclusion> = of_job.map(|(_, open)| open).collect();
                for open in of_job {
                    self.end_span(
                        open,
                        vec![KeyValue::new("muster.exclusion.end", "job-deleted")],
                        to_system_time(event.at),
                    );
                }
            }
            _ => {}
        }
    }

    /// Sets the parent span of an exclusion: that of the request that asked for it.
    pub fn set_parent_span(&mut self, job: JobId, exclusion: ExclusionId, parent: SpanContext) {
        if let Some(open) = self.open.get_mut(&(job, exclusion)) {
            open.parent = Some(parent);
        }
    }

    /// Ends the spans of exclusions that are still in force. Called when the server stops.
    pub fn end_all_spans(&mut self) {
        let open: Vec<OpenExclusion> = self.open.drain().map(|(_, open)| open).collect();
        for open in open {
            let builder = open.span_builder(vec![KeyValue::new("muster.exclusion.end", "in-force")]);
            // Dropping a span ends it now.
            drop(self.tracer.build_with_context(builder.0, &builder.1));
        }
    }

    fn new_open_exclusion(
        &self,
        event: &JobEvent,
        exclusion: ExclusionId,
        target: &ExclusionTarget,
        tasks: &[TaskId],
        actor: &Actor,
    ) -> OpenExclusion {
        let mut attributes = vec![
            KeyValue::new("muster.job", self.names.name_of(event.job).to_string()),
            KeyValue::new("muster.run", saturating_i64(event.run.0)),
            KeyValue::new("muster.exclusion.id", saturating_i64(exclusion.0)),
            KeyValue::new("muster.exclusion.target", target.to_string()),
            KeyValue::new("muster.exclusion.reason", event.reason.clone()),
            KeyValue::new("muster.exclusion.tasks", i64::try_from(tasks.len()).unwrap_or(i64::MAX)),
            KeyValue::new("muster.actor", actor.who.to_string()),
            KeyValue::new("muster.actor.means", actor.means.to_string()),
        ];
        attributes.extend(actor.address.map(|from| KeyValue::new("client.address", from.ip().to_string())));
        let out = |task: &TaskId| {
            Happening::new("taken out", to_system_time(event.at), vec![task_attribute(*task)], 0)
        };
        let events = tasks.iter().take(BARRIER_EVENTS_MAX as usize - 1).map(out).collect();
        OpenExclusion { since: to_system_time(event.at), attributes, events, parent: None }
    }

    fn end_span(&self, open: OpenExclusion, end: Vec<KeyValue>, at: SystemTime) {
        let (builder, parent) = open.span_builder(end);
        self.tracer.build_with_context(builder, &parent).end_with_timestamp(at);
    }
}

impl OpenExclusion {
    fn span_builder(mut self, end: Vec<KeyValue>) -> (SpanBuilder, Context) {
        self.attributes.extend(end);
        let builder = SpanBuilder::from_name("exclusion")
            .with_start_time(self.since)
            .with_attributes(self.attributes)
            .with_events(self.events);
        let nothing = Context::new();
        let parent = self.parent.map(|parent| nothing.with_remote_span_context(parent));
        (builder, parent.unwrap_or(nothing))
    }
}

fn task_attribute(task: TaskId) -> KeyValue {
    KeyValue::new("muster.task", i64::from(task.0))
}
