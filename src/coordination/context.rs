//! The context of a transition of one run: the time, the settings, the list of effects, and the queue of events.
//!
//! This module has no rule. Begin at [`TransitionContext`].

use std::collections::VecDeque;

use super::deferred_free::DeferredFree;
use super::event::{EventKind, JobEvent};
use super::ids::{CallId, JobId, RunNumber, TaskId, TaskIncarnation, Timestamp};
use super::input::Effect;
use super::request_reply::CallOutcome;
use super::settings::JobSettings;
use super::unpublished_events::{TaskChange, UnpublishedEvents};

/// The context of one transition of one run.
pub(super) struct TransitionContext<'a> {
    pub now: Timestamp,
    pub job: JobId,
    pub run: RunNumber,
    pub settings: &'a JobSettings,
    pub effects: &'a mut Vec<Effect>,
    pub event_queue: &'a mut UnpublishedEvents,
}

impl TransitionContext<'_> {
    pub fn reply_to_call(&mut self, call: CallId, outcome: CallOutcome) {
        self.effects.push(Effect::Reply(call, outcome));
    }

    pub fn defer_free(&mut self, discarded: DeferredFree) {
        if !discarded.is_empty() {
            self.effects.push(Effect::FreeLater(discarded));
        }
    }

    pub fn emit_event(&mut self, what: EventKind, reason: impl Into<String>) {
        // The history keeps many events, and an error may be long. The whole text stays with the failed task.
        const MOST: usize = 1 << 10;
        let mut reason: String = reason.into();
        if reason.len() > MOST {
            reason.truncate(reason.floor_char_boundary(MOST));
            reason.push('…');
        }
        let (at, job, run) = (self.now, self.job, self.run);
        let event = JobEvent { at, job, run, what, reason };
        if self.event_queue.is_empty() {
            self.effects.push(Effect::Event(event));
        } else {
            self.event_queue.push(event);
        }
    }

    /// Queues an event for each of `tasks`, which are given with their present incarnations; they are
    /// published a few at a time.
    pub fn emit_event_for_each_task(
        &mut self,
        change: TaskChange,
        reason: &str,
        tasks: VecDeque<(TaskId, TaskIncarnation)>,
    ) {
        if !tasks.is_empty() {
            self.event_queue.push_for_each_task(self.now, self.run, change, reason, tasks);
        }
    }

    /// Publishes the oldest queued event; returns whether there was one.
    pub fn publish_next_event(&mut self) -> bool {
        let Some(event) = self.event_queue.pop(self.job) else { return false };
        self.effects.push(Effect::Event(event));
        true
    }
}
