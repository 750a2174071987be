//! Changes the settings of a job while the job exists.
//!
//! `SettingsChange::apply_to` checks each new value by itself. This module checks whether the job may take the values
//! now. Begin at `Job::change_settings`.
//!
//! - The number of tasks, and whether they are recoverable, can change only while no run is in progress, because the
//!   tables of a run are made for its tasks. A run that has not started counts as in progress while a call waits in
//!   it.
//! - A new heartbeat timeout applies at once. Other new timeouts apply to waits that begin later.
//! - A setting decides how tasks learn of errors (`error_polls.rs`). Either the service holds a task's error poll
//!   until there is an error, or it answers the poll with CANCELLED at once and reports errors in the answers to
//!   heartbeats. During a run, a job cannot change to holding polls. A client whose poll was answered with CANCELLED
//!   does not poll again, and heartbeats would no longer report errors to it.
//! - If the job already holds more data, waiting calls, live-set requests or exclusions than a new bound allows, the
//!   change is refused. If the job holds more records than a new bound allows, the oldest records are dropped.

use std::sync::Arc;

use super::actor::{Actor, CommandReason};
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
    pub(super) fn change_settings(
        &mut self,
        now: Timestamp,
        effects: &mut Vec<Effect>,
        actor: Actor,
        reason: &CommandReason,
        change: SettingsChange,
    ) -> Result<CommandOutcome, CommandRefusal> {
        let next = change.apply_to(&self.settings).map_err(CommandRefusal::BadSetting)?;
        let changed = next.changed_setting_names(&self.settings);
        self.check_settings(&next)?;
        let reshaped = next.tasks != self.settings.tasks || next.recoverable != self.settings.recoverable;
        let silenced = self.settings.holds_error_polls() && !next.holds_error_polls();
        let beats = next.heartbeat_timeout != self.settings.heartbeat_timeout;
        self.settings = next.clone();
        effects.push(Effect::FreeLater(self.drop_records_beyond_bounds()));
        with_run!(self, now, effects, |run, cx| {
            let text = format!("{} changed by {actor}: {reason}", changed.join(", "));
            cx.emit_event(EventKind::SettingsChanged { settings: changed, actor }, text);
            if beats {
                run.rearm_heartbeat_timers();
            }
            if silenced {
                run.answer_held_error_polls();
            }
        });
        if reshaped {
            self.reset_run_if_empty(now, effects);
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
        if in_progress && next.holds_error_polls() && !present.holds_error_polls() {
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
            self.run.check_fits_bounds(next).map_err(CommandRefusal::BoundsTooLow)?;
        }
        Ok(())
    }

    /// Applies a change of the number or the kind of the tasks: a run without tasks begins anew.
    fn reset_run_if_empty(&mut self, now: Timestamp, effects: &mut Vec<Effect>) {
        // The ended run is kept with the owners that it had.
        let is_opened = self.run.ended.is_some() && self.open_next_run(now, effects).is_ok();
        Arc::make_mut(&mut self.task_owners).remove_owners_of_ids_from(self.settings.tasks);
        if !is_opened && self.run.ended.is_none() {
            self.run = Run::new(self.run.number, self.run.incarnation, &self.settings, self.run.opened_at);
            self.excuse_excluded_tasks();
        }
    }
}

impl Run {
    /// Checks that the run holds no more than the new bounds allow; the error says what exceeds them.
    fn check_fits_bounds(&self, settings: &JobSettings) -> Result<(), String> {
        let bounds = &settings.bounds;
        let table = [
            ("bytes in the store", self.store.total_bytes(), bounds.store_bytes),
            ("keys", self.store.len(), bounds.keys),
            ("waiting calls", self.waiters.len(), bounds.waiters),
            ("bytes of keys that are waited for", self.store.waited_key_bytes(), bounds.waited_key_bytes),
            ("bytes of ended barriers", self.barriers.retained_result_bytes(), bounds.barrier_memory_bytes),
            ("live-set questions", self.live_set_requests.len(), bounds.live_sets_in_progress),
        ];
        match table.into_iter().find(|(_, there, bound)| there > bound) {
            Some((what, there, bound)) => Err(format!("{there} {what}; {bound} would be allowed")),
            None => Ok(()),
        }
    }

    /// Sets every heartbeat timer again by the present timeout.
    fn rearm_heartbeat_timers(&mut self) {
        self.timers.clear_heartbeat_timers();
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
    fn answer_held_error_polls(&mut self) {
        let text = "Errors of this job are delivered with heartbeats from now on; no need to poll.";
        let failure = Arc::new(Failure::without_details(Code::Cancelled, text));
        self.answer_all_error_polls(failure);
    }
}
