//! Handles the inputs of a job: calls, cancelled calls, findings, transfer failures, and ticks.
//!
//! This module contains no rule. It passes a call to the run (`call_dispatch.rs`) if `exclusion_rules.rs` and
//! `fencing.rs` admit the call. It also does the queued work of the job, within a budget. Begin at
//! `Job::handle_call`.

use std::sync::Arc;

use super::event::EventKind;
use super::ids::{CallId, Timestamp};
use super::input::{Effect, FindingChange, TransferFailure};
use super::job::{Job, with_run};
use super::request_reply::{Caller, Request};

impl Job {
    pub(super) fn handle_call(
        &mut self,
        now: Timestamp,
        effects: &mut Vec<Effect>,
        call: CallId,
        caller: Caller,
        request: Request,
    ) {
        let presence = self.connections.get(&caller.connection);
        let peer = presence.map(|presence| presence.peer);
        let writer = presence
            .filter(|presence| presence.known_incarnations.len() == 1)
            .and_then(|presence| presence.known_incarnations.keys().next().copied());
        if let Request::Register { task, incarnation, .. } = &request {
            let (task, incarnation) = (*task, *incarnation);
            if let Some(failure) = self.refuse_excluded_registration(now, effects, task, peer) {
                return effects.push(Effect::Reply(call, Err(Arc::new(failure))));
            }
            if let Err(failure) = self.admit_registration(now, effects, task, incarnation) {
                return effects.push(Effect::Reply(call, Err(Arc::new(failure))));
            }
            // Bound before the registration completes, so that the end of the connection fails the task even
            // while it waits.
            self.bind_connection_to_incarnation(caller.connection, task, incarnation);
        } else if let Some(failure) =
            request.task().or(writer).and_then(|id| self.exclusion_refusal(id, peer))
        {
            return effects.push(Effect::Reply(call, Err(Arc::new(failure))));
        } else if let Err(failure) = self.admit_call(now, effects, caller, &request) {
            return effects.push(Effect::Reply(call, Err(Arc::new(failure))));
        }
        with_run!(self, now, effects, |run, cx| run.dispatch_call(cx, call, caller, peer, writer, request));
    }

    pub(super) fn cancel_call(&mut self, now: Timestamp, effects: &mut Vec<Effect>, call: CallId) {
        if !self.ended_run_calls.iter_mut().any(|stale| stale.waiters.remove(call).is_some()) {
            with_run!(self, now, effects, |run, cx| run.withdraw_call(cx, call));
        }
    }

    /// Records that an observer opened or closed a finding.
    pub(super) fn record_finding(&mut self, now: Timestamp, effects: &mut Vec<Effect>, note: FindingChange) {
        let FindingChange { finding, open, tasks, reason } = note;
        let change = if open {
            EventKind::FindingOpened { finding, tasks }
        } else {
            EventKind::FindingClosed { finding, tasks }
        };
        with_run!(self, now, effects, |_run, cx| cx.emit_event(change, reason));
    }

    /// Records a worker's report of failed transfers.
    pub(super) fn record_transfer_failure(
        &mut self,
        now: Timestamp,
        effects: &mut Vec<Effect>,
        note: TransferFailure,
    ) {
        let TransferFailure { task, with, error, count, reason } = note;
        let change = EventKind::TransferFailed { task, with, error, count };
        with_run!(self, now, effects, |_run, cx| cx.emit_event(change, reason));
    }

    /// Does pending work within `budget`.
    pub(super) fn run_pending_work(&mut self, now: Timestamp, effects: &mut Vec<Effect>, budget: &mut usize) {
        // Calls of closed connections count against the bounds, so they go first, with at most half of the
        // budget.
        let mut part = budget.div_ceil(2);
        *budget -= part;
        while part > 0 && !self.closing.is_empty() {
            self.withdraw_calls_of_closed_connections(now, effects, &mut part);
        }
        *budget += part;
        while *budget > 0 && !self.pending_evictions.is_empty() {
            self.evict_next_task(now, effects, budget);
        }
        with_run!(self, now, effects, |run, cx| {
            // Events are published before the answers that they explain.
            while *budget > 0 && cx.publish_next_event() {
                *budget -= 1;
            }
            run.run_pending_work(cx, budget);
        });
        while *budget > 0
            && let Some(stale) = self.ended_run_calls.front_mut()
        {
            while *budget > 0
                && let Some((call, answer)) = stale.waiters.pop_queued_answer()
            {
                *budget -= 1;
                if stale.waiters.remove(call).is_some() {
                    effects.push(Effect::Reply(call, answer.into()));
                }
            }
            for (call, is_poll) in stale.waiters.first_waiting_calls(*budget) {
                *budget -= 1;
                stale.waiters.remove(call);
                let failure = if is_poll { &stale.poll } else { &stale.failure };
                effects.push(Effect::Reply(call, Err(Arc::clone(failure))));
            }
            if stale.waiters.len() == 0 {
                self.ended_run_calls.pop_front();
            }
        }
        while *budget > 0 && !self.closing.is_empty() {
            self.withdraw_calls_of_closed_connections(now, effects, budget);
        }
    }

    pub(super) fn tick(&mut self, now: Timestamp, effects: &mut Vec<Effect>, budget: &mut usize) {
        self.expire_exclusions(now, effects);
        with_run!(self, now, effects, |run, cx| run.fire_timers(cx, budget));
    }
}
