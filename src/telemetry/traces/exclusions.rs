//! Creates the span of each exclusion when the exclusion ends, because its effects are known only then.
//!
//! The span is a child of the `traceparent` of the request, which becomes known after the event. Begin at
//! [`ExclusionSpans`].

use std::collections::HashMap;
use std::sync::Arc;
use std::time::SystemTime;

use opentelemetry::trace::{
    Event as Happening, Span as _, SpanBuilder, SpanContext, TraceContextExt as _, Tracer as _,
};
use opentelemetry::{Context, KeyValue};
use opentelemetry_sdk::trace::SdkTracer;

use super::{BARRIER_EVENTS_MAX, JobNames, number, time};
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
pub(super) struct ExclusionSpans {
    tracer: SdkTracer,
    names: Arc<JobNames>,
    open: HashMap<(JobId, ExclusionId), OpenExclusion>,
}

impl ExclusionSpans {
    pub fn new(tracer: SdkTracer, names: Arc<JobNames>) -> Self {
        Self { tracer, names, open: HashMap::new() }
    }

    pub fn event(&mut self, event: &JobEvent) {
        match &event.what {
            EventKind::Excluded { exclusion, target, tasks, actor } if self.open.len() < OPEN_MAX => {
                let open = self.began(event, *exclusion, *target, tasks, actor);
                self.open.insert((event.job, *exclusion), open);
            }
            EventKind::RegistrationRefused { exclusion, task, peer } => {
                if let Some(open) = self.open.get_mut(&(event.job, *exclusion)) {
                    let mut about = vec![of_task(*task)];
                    about.extend(
                        peer.map(|peer| KeyValue::new("network.peer.address", peer.ip().to_string())),
                    );
                    open.events.push(Happening::new("registration refused", time(event.at), about, 0));
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
                self.ended(open, end, time(event.at));
            }
            EventKind::JobDeleted { .. } => {
                let of_job = self.open.extract_if(|(job, _), _| *job == event.job);
                let of_job: Vec<OpenExclusion> = of_job.map(|(_, open)| open).collect();
                for open in of_job {
                    self.ended(
                        open,
                        vec![KeyValue::new("muster.exclusion.end", "job-deleted")],
                        time(event.at),
                    );
                }
            }
            _ => {}
        }
    }

    /// Sets the parent span of an exclusion: that of the request that asked for it.
    pub fn link(&mut self, job: JobId, exclusion: ExclusionId, parent: SpanContext) {
        if let Some(open) = self.open.get_mut(&(job, exclusion)) {
            open.parent = Some(parent);
        }
    }

    /// Ends the spans of exclusions that are still in force. Called when the server stops.
    pub fn end_all(&mut self) {
        let open: Vec<OpenExclusion> = self.open.drain().map(|(_, open)| open).collect();
        for open in open {
            let builder = open.builder(vec![KeyValue::new("muster.exclusion.end", "in-force")]);
            // Dropping a span ends it now.
            drop(self.tracer.build_with_context(builder.0, &builder.1));
        }
    }

    fn began(
        &self,
        event: &JobEvent,
        exclusion: ExclusionId,
        target: ExclusionTarget,
        tasks: &[TaskId],
        actor: &Actor,
    ) -> OpenExclusion {
        let mut attributes = vec![
            KeyValue::new("muster.job", self.names.of(event.job).to_string()),
            KeyValue::new("muster.run", number(event.run.0)),
            KeyValue::new("muster.exclusion.id", number(exclusion.0)),
            KeyValue::new("muster.exclusion.target", target.to_string()),
            KeyValue::new("muster.exclusion.reason", event.reason.clone()),
            KeyValue::new("muster.exclusion.tasks", i64::try_from(tasks.len()).unwrap_or(i64::MAX)),
            KeyValue::new("muster.actor", actor.who.to_string()),
            KeyValue::new("muster.actor.means", actor.means.to_string()),
        ];
        attributes.extend(actor.address.map(|from| KeyValue::new("client.address", from.ip().to_string())));
        let out = |task: &TaskId| Happening::new("taken out", time(event.at), vec![of_task(*task)], 0);
        let events = tasks.iter().take(BARRIER_EVENTS_MAX as usize - 1).map(out).collect();
        OpenExclusion { since: time(event.at), attributes, events, parent: None }
    }

    fn ended(&self, open: OpenExclusion, end: Vec<KeyValue>, at: SystemTime) {
        let (builder, parent) = open.builder(end);
        self.tracer.build_with_context(builder, &parent).end_with_timestamp(at);
    }
}

impl OpenExclusion {
    fn builder(mut self, end: Vec<KeyValue>) -> (SpanBuilder, Context) {
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

fn of_task(task: TaskId) -> KeyValue {
    KeyValue::new("muster.task", i64::from(task.0))
}
