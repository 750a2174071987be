//! Changes of a job's settings while the job exists.
//!
//! It does not validate single values: `SettingsChange::apply_to` does. Begin at `Job::configure`.
//!
//! - The number of tasks and their kind change only between runs, because the tables of a run are made for its
//!   tasks.
//! - The heartbeat timeout changes at once; other timeouts apply to what begins afterwards.
//! - Error polls that were answered with CANCELLED cannot be held again while a run is in progress. Clients poll
//!   once, so its tasks would hear of no error, neither by poll nor by heartbeat.
//! - A bound below what the job already holds is refused.

use std::sync::Arc;

use super::actor::{Actor, Reason};
use super::command::{CommandOutcome, CommandRefusal};
use super::event::EventKind;
use super::failure::{Code, Failure};
use super::ids::Timestamp;
use super::input::Effect;
use super::job::{Job, with_run};
use super::run::Run;
use super::settings::{JobSettings, SettingsChange};

impl Job {
    /// Changes the settings of the job. New timeouts apply to what begins afterwards, the heartbeat timeout
    /// at once.
    pub(super) fn configure(
        &mut self,
        now: Timestamp,
        effects: &mut Vec<Effect>,
        actor: Actor,
        reason: &Reason,
        change: SettingsChange,
    ) -> Result<CommandOutcome, CommandRefusal> {
        let next = change.apply_to(&self.settings).map_err(CommandRefusal::BadSetting)?;
        let changed = next.changed_settings(&self.settings);
        self.check_settings(&next)?;
        let reshaped = next.tasks != self.settings.tasks || next.recoverable != self.settings.recoverable;
        let silenced = self.settings.holds_polls() && !next.holds_polls();
        let beats = next.heartbeat_timeout != self.settings.heartbeat_timeout;
        self.settings = next.clone();
        self.trim_to_bounds();
        with_run!(self, now, effects, |run, cx| {
            let text = format!("{} changed by {actor}: {reason}", changed.join(", "));
            cx.emit(EventKind::SettingsChanged { settings: changed, actor }, text);
            if beats {
                run.rearm_heartbeats();
            }
            if silenced {
                run.answer_polls();
            }
        });
        if reshaped {
            self.reshape(now, effects);
        }
        Ok(CommandOutcome::Configured(Box::new(next)))
    }

    fn check_settings(&self, next: &JobSettings) -> Result<(), CommandRefusal> {
        let present = &self.settings;
        let in_progress =
            self.run.ended.is_none() && (self.run.started_at.is_some() || self.run.waiters.len() > 0);
        let refuse = |setting, why| Err(CommandRefusal::RunInProgress { setting, run: self.run.number, why });
        let shape = "it was begun with so many tasks, of this kind; wait for its end";
        if in_progress && next.tasks != present.tasks {
            return refuse("the number of tasks", shape);
        }
        if in_progress && next.recoverable != present.recoverable {
            return refuse("whether tasks are recoverable", shape);
        }
        if in_progress && next.holds_polls() && !present.holds_polls() {
            return refuse(
                "error-delivery",
                "its tasks have stopped polling for errors, and would never hear of one",
            );
        }
        if next.bounds != present.bounds {
            let exclusions = self.exclusions.len();
            if exclusions > next.bounds.exclusions {
                return Err(CommandRefusal::BoundsTooLow(format!("{exclusions} exclusions are in force")));
            }
            self.run.check_bounds(next).map_err(CommandRefusal::BoundsTooLow)?;
        }
        Ok(())
    }

    /// Applies a change of the number or the kind of the tasks: a run without tasks begins anew.
    fn reshape(&mut self, now: Timestamp, effects: &mut Vec<Effect>) {
        if self.run.ended.is_some() && self.open_next_run(now, effects).is_ok() {
            return;
        }
        if self.run.ended.is_none() {
            self.run = Run::new(self.run.number, self.run.incarnation, &self.settings, self.run.opened_at);
            self.exempt_excluded_tasks();
        }
    }
}

impl Run {
    /// Checks that the run holds no more than the new bounds allow; the error says what exceeds them.
    fn check_bounds(&self, settings: &JobSettings) -> Result<(), String> {
        let bounds = &settings.bounds;
        let table = [
            ("bytes in the store", self.store.bytes(), bounds.store_bytes),
            ("keys", self.store.len(), bounds.keys),
            ("waiting calls", self.waiters.len(), bounds.waiters),
            ("bytes of keys that are waited for", self.store.waited_bytes(), bounds.waited_key_bytes),
            ("bytes of ended barriers", self.barriers.retained_bytes(), bounds.barrier_memory_bytes),
            ("live-set questions", self.live_set_requests.len(), bounds.live_sets_in_progress),
        ];
        match table.into_iter().find(|(_, there, bound)| there > bound) {
            Some((what, there, bound)) => Err(format!("{there} {what}; {bound} would be allowed")),
            None => Ok(()),
        }
    }

    /// Sets every heartbeat timer again by the present timeout.
    fn rearm_heartbeats(&mut self) {
        self.timers.clear_heartbeats();
        self.tasks_without_timer.clear();
        for id in self.task_ids() {
            let task = self.expect_task_mut(id);
            task.has_heartbeat_timer = task.is_connected();
            if task.has_heartbeat_timer {
                self.tasks_without_timer.push_back(id);
            }
        }
    }

    /// Answers all held polls, because the job no longer holds them.
    fn answer_polls(&mut self) {
        let text = "Errors of this job are delivered with heartbeats from now on; no need to poll.";
        let failure = Arc::new(Failure::without_details(Code::Cancelled, text));
        self.answer_all_polls(failure);
    }
}
