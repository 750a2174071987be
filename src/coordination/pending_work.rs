//! Does the work of a run that does not fit into the input that caused it: sends queued answers, sets first heartbeat
//! timers, continues the measurement of ended barriers, and handles due timers.
//!
//! The rules decide answers and queue them in `waiters.rs`. This module sends the queued answers within a budget, so
//! that an input that affects many calls does not delay other inputs. `Run::withdraw_call` removes a waiting call
//! without an answer. Begin at `Run::run_pending_work`.

use std::sync::Arc;

use super::context::TransitionContext;
use super::failure::Failure;
use super::ids::CallId;
use super::request_reply::Reply;
use super::run::Run;
use super::timers::Timer;
use super::waiters::{SharedAnswer, WaitTarget};

impl Run {
    /// Returns whether work is pending.
    pub(super) fn has_pending_work(&self) -> bool {
        self.store.has_woken_calls()
            || self.waiters.has_queued_answers()
            || self.waiters.has_woken_watchers()
            || !self.tasks_without_timer.is_empty()
            || !self.pending_barrier_stats.is_empty()
    }

    /// Does pending work within `budget`: answers calls whose wait has ended.
    pub(super) fn run_pending_work(&mut self, cx: &mut TransitionContext<'_>, budget: &mut usize) {
        while *budget > 0 {
            if let Some((call, answer)) = self.waiters.pop_queued_answer() {
                *budget -= 1;
                self.send_answer(cx, call, answer);
            } else if let Some((call, value)) = self.store.pop_woken_call() {
                *budget -= 1;
                self.waiters.remove(call);
                cx.reply_to_call(call, Ok(Reply::Value(value)));
            } else if let Some(call) = self.waiters.pop_woken_watcher() {
                *budget -= 1;
                cx.reply_to_call(call, Ok(Reply::States(self.shared_task_states())));
            } else if let Some(task) = self.tasks_without_timer.pop_front() {
                *budget -= 1;
                self.set_heartbeat_timer(cx, task);
            } else if !self.pending_barrier_stats.is_empty() {
                self.measure_oldest_unmeasured_barrier(cx, budget);
            } else {
                return;
            }
        }
    }

    /// Sends a call its decided answer, unless the call was withdrawn or its task has been excluded since.
    fn send_answer(&mut self, cx: &mut TransitionContext<'_>, call: CallId, answer: SharedAnswer) {
        let Some(place) = self.waiters.wait_target(call) else { return };
        let excluded =
            place.task().and_then(|id| self.task(id)?.failure()).filter(|e| e.is_exclusion()).cloned();
        self.withdraw_call(cx, call);
        cx.reply_to_call(call, excluded.map_or_else(|| answer.into(), Err));
    }

    /// Removes a call from the place where it waits, because its caller is gone.
    pub(super) fn withdraw_call(&mut self, cx: &mut TransitionContext<'_>, call: CallId) {
        match self.waiters.remove(call) {
            None | Some(WaitTarget::Watch) => {}
            Some(WaitTarget::Key(key, _)) => self.store.remove_waiter(&key, call),
            Some(WaitTarget::Poll(task)) => {
                let task = self.expect_task_mut(task);
                if task.poll == Some(call) {
                    task.poll = None;
                }
            }
            Some(WaitTarget::LiveSet(set, task)) => self.withdraw_live_set_call(&set, task, call),
            Some(WaitTarget::Barrier(key, task)) => self.remove_barrier_arrival(cx, &key, task, call),
        }
    }

    /// Answers waiting calls with `failure`, and polls with `poll`, within `budget`.
    pub(super) fn fail_waiting_calls(
        &mut self,
        cx: &mut TransitionContext<'_>,
        failure: &Arc<Failure>,
        poll: &Arc<Failure>,
        budget: &mut usize,
    ) {
        for (call, is_poll) in self.waiters.first_waiting_calls(*budget) {
            *budget -= 1;
            self.withdraw_call(cx, call);
            cx.reply_to_call(call, Err(Arc::clone(if is_poll { poll } else { failure })));
        }
    }

    /// Handles due timers within `budget`.
    pub(super) fn fire_timers(&mut self, cx: &mut TransitionContext<'_>, budget: &mut usize) {
        while *budget > 0
            && let Some(timer) = self.timers.pop_due(cx.now)
        {
            *budget -= 1;
            match timer {
                Timer::Heartbeat(task) => self.on_heartbeat_timer(cx, task),
                Timer::Grace(task) => self.on_disconnect_grace_expired(cx, task),
                Timer::Barrier(key) => self.on_barrier_timeout(cx, &key),
            }
        }
    }
}
