//! The sequence of a job's runs: opens the next run, turns the ended run into a record, and stops and resumes the
//! job with the service.
//!
//! The rules of registration, failure and shutdown decide when a run ends. After its end, the next run opens when a
//! task registers with a new incarnation, or when an operator changes how many tasks the job has or whether they are
//! recoverable. Until then the ended run stays, and its tasks get the answers that jaxlib's C++ service would give.
//! The next run has its own service incarnation and tables. When it opens, all calls of the ended run that still
//! wait, error polls included, are answered. Begin at `Job::open_next_run`.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::actor::{Actor, CommandReason};
use super::deferred_free::DeferredFree;
use super::event::{EventKind, RunOutcome};
use super::failure::{Code, Failure};
use super::ids::{CallId, ConnectionId, RunNumber, ServiceIncarnation, Timestamp};
use super::input::Effect;
use super::job::{EndedRunCalls, Job, with_run};
use super::past_runs::EndedRunState;
use super::run::Run;
use super::run_state::{RunInterval, RunSummary};
use super::shared_failures::job_deleted_failure;

impl Job {
    pub(super) fn set_incarnation_of_next_run(&mut self, incarnation: ServiceIncarnation) {
        self.next_incarnation = Some(incarnation);
    }

    pub(super) fn open_next_run(&mut self, now: Timestamp, effects: &mut Vec<Effect>) -> Result<(), Failure> {
        let Some(incarnation) = self.next_incarnation.take() else {
            let text = format!(
                "Run {} of job {} has ended and the next is being prepared.",
                self.run.number, self.name
            );
            return Err(Failure::from_service(Code::Aborted, text));
        };
        let number = RunNumber(self.run.number.0 + 1);
        let text = format!(
            "Run {} of job {} has ended ({}), and run {number} has begun. This call belongs to the ended run.",
            self.run.number,
            self.name,
            self.describe_first_cause(),
        );
        let over = Arc::new(Failure::from_service(Code::Aborted, text));
        with_run!(self, now, effects, |run, cx| run.measure_all_unmeasured_barriers(cx));
        self.pending_evictions.clear();
        self.move_calls_to_ended_run(&over);
        let next = Run::new(number, incarnation, &self.settings, now);
        let ended = std::mem::replace(&mut self.run, next);
        effects.push(Effect::FreeLater(self.archive_run(ended)));
        self.excuse_excluded_tasks();
        with_run!(self, now, effects, |_run, cx| {
            cx.emit_event(EventKind::RunOpened, "a new process registered after the last run had ended");
        });
        effects.push(Effect::RequestIncarnation(self.id));
        Ok(())
    }

    /// Adds a run to the ended ones, and returns what is not kept of it and of older runs.
    fn archive_run(&mut self, run: Run) -> DeferredFree {
        let (summary, topology) = (run.summary(), run.store.topology_values().clone());
        let mut state = EndedRunState {
            run,
            settings: self.settings.clone(),
            exclusions: Arc::clone(&self.exclusions),
            task_owners: Arc::clone(&self.task_owners),
        };
        let mut freed = state.remove_callers_tables();
        freed.add(self.past.add(summary, topology, state, self.settings.bounds.runs_kept));
        freed
    }

    fn describe_first_cause(&self) -> String {
        match (&self.run.first_cause, self.run.ended) {
            (Some(cause), _) => cause.error.clone(),
            (None, Some((RunOutcome::Completed, _))) => "all its tasks had shut down".to_owned(),
            (None, _) => "all its live tasks were lost".to_owned(),
        }
    }

    /// Restarts the heartbeat timeout of every task, because the service itself did not run.
    pub(super) fn restart_heartbeat_timeouts(&mut self, now: Timestamp) {
        for id in self.run.task_ids() {
            let task = self.run.expect_task_mut(id);
            if task.is_connected() {
                task.last_heartbeat = Some(now);
                task.heartbeat_stats.skip_next_gap();
            }
        }
    }

    /// Answers waiting calls within `budget`, because the service stops.
    pub(super) fn fail_waiting_calls_for_stop(
        &mut self,
        now: Timestamp,
        effects: &mut Vec<Effect>,
        budget: &mut usize,
    ) {
        // Without the mark of the service's own statements: registering clients take it for a transport
        // failure and retry.
        let stopping =
            Arc::new(Failure::without_details(Code::Unavailable, "The coordination service is stopping."));
        let text = "The coordination service is stopping. Cancelling PollForError.";
        let poll = Arc::new(Failure::without_details(Code::Cancelled, text));
        with_run!(self, now, effects, |run, cx| {
            // Calls whose answer is decided get that answer.
            run.run_pending_work(cx, budget);
            run.fail_waiting_calls(cx, &stopping, &poll, budget);
        });
    }

    /// Continues after a restart of the service, which lost all connections but those in `kept`, with every call that waits
    /// on them. `after` says how its former process ended.
    pub(super) fn resume_after_restart(
        &mut self,
        now: Timestamp,
        effects: &mut Vec<Effect>,
        after: Option<&str>,
        kept: &BTreeSet<ConnectionId>,
    ) {
        let (connections, calls) = (self.connections.len(), self.waiting_call_count());
        let is_kept = |connection: &ConnectionId| kept.contains(connection);
        self.connections.retain(|connection, _| is_kept(connection));
        self.task_connections.retain(|(_, connection), ()| is_kept(connection));
        self.closing.clear();
        if kept.is_empty() {
            self.ended_run_calls.clear();
        }
        let lost_calls: Vec<CallId> = {
            let calls = self.run.waiters.first_waiting_calls(usize::MAX).into_iter().map(|(call, _)| call);
            calls
                .filter(|call| !self.run.waiters.connection_of(*call).is_some_and(|on| is_kept(&on)))
                .collect()
        };
        let lost = connections - self.connections.len();
        let continued = match self.connections.len() {
            0 => String::new(),
            kept => format!(
                ", {kept} connection(s) and {} waiting call(s) go on",
                calls.saturating_sub(lost_calls.len())
            ),
        };
        with_run!(self, now, effects, |run, cx| {
            let reason = format!(
                "the service started again{}; {lost} connection(s) and {} waiting call(s) of its former process ended{continued}. \
                 The silence since then fails no task",
                after.map(|after| format!(": {after}")).unwrap_or_default(),
                lost_calls.len()
            );
            cx.emit_event(EventKind::ServiceRestarted, reason);
            for call in lost_calls {
                run.withdraw_call(cx, call);
            }
            for id in run.task_ids() {
                if run.expect_task(id).suspicion.is_some() {
                    let reason = "the service restarted, and does not count the silence before";
                    cx.emit_event(EventKind::TaskReturned { task: id }, reason);
                }
                run.clear_suspicion(id);
                let task = run.expect_task_mut(id);
                task.connection = task.connection.filter(is_kept);
            }
        });
        self.restart_heartbeat_timeouts(now);
    }

    /// Announces the deletion of the job: every waiting call gets the answer that later calls get.
    pub(super) fn fail_calls_and_announce_deletion(
        &mut self,
        now: Timestamp,
        effects: &mut Vec<Effect>,
        actor: Actor,
        reason: &CommandReason,
    ) {
        let gone = Arc::new(job_deleted_failure());
        self.move_calls_to_ended_run(&gone);
        with_run!(self, now, effects, |_run, cx| {
            let text = format!("deleted by {actor}: {reason}");
            cx.emit_event(EventKind::JobDeleted { actor }, text);
        });
    }

    /// Moves all waiting calls of the present run aside, to be answered with `failure`.
    fn move_calls_to_ended_run(&mut self, failure: &Arc<Failure>) {
        let waiters = std::mem::take(&mut self.run.waiters);
        if waiters.len() > 0 {
            let (failure, poll) = (Arc::clone(failure), Arc::clone(failure));
            self.ended_run_calls.push_back(EndedRunCalls { waiters, failure, poll });
        }
    }
}

impl Run {
    /// Returns the summary of the run, without its devices.
    fn summary(&self) -> RunSummary {
        let (outcome, ended_at) = self.ended.unwrap_or((RunOutcome::Abandoned, self.opened_at));
        let length_us = RunInterval::new(self.opened_at, self.started_at, Some(ended_at)).final_duration_us();
        RunSummary {
            number: self.number,
            incarnation: self.incarnation.to_string(),
            outcome,
            opened_at: self.opened_at,
            started_at: self.started_at,
            ended_at,
            length_us: length_us.unwrap_or_default(),
            end_reason: self.end_reason.clone(),
            first_cause: self.first_cause.clone(),
            tasks: self.tasks.len(),
            keys: self.store.len(),
            store_bytes: self.store.total_bytes(),
            devices: Vec::new(),
        }
    }
}
