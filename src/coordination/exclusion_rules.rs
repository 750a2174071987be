//! Carries out exclusions on the tasks of a job. `exclusion.rs` has the table of exclusions, and
//! `exclusion_preview.rs` the dry run. Begin at `Job::exclude`.
//!
//! - *Eviction.* A connected task that is excluded enters the failed state and leaves the live set, as a lost task
//!   does. The waiting calls of an excluded task are answered with PERMISSION_DENIED. If the target is a host with
//!   many tasks, the input of the command evicts only the first few of them, within its budget of work. Later ticks
//!   evict the others.
//! - *Refusal.* While the exclusion is in force, the service refuses the task's registrations and calls with
//!   PERMISSION_DENIED. Clients retry ABORTED, INTERNAL and transport errors until their own timeout. After
//!   PERMISSION_DENIED they exit and show the message, which states the operator, the reason, the expiry, and how to
//!   lift the exclusion.
//! - *Excused.* A recoverable task that was evicted is excused until it registers again: nothing waits for this task.
//!   So neither the exclusion nor its end blocks the other tasks. A task that is not recoverable is never excused,
//!   because the run needs all its tasks.
//! - *Before a run starts.* A run of a recoverable job does not wait for a task whose id is excluded. If the
//!   exclusion ends before the run starts, the run waits for the task again. A fate-sharing job needs all N tasks, so
//!   its run waits for an excluded task. If a host is excluded by an address, its tasks may be started on another
//!   host, so the run waits for those tasks. If it is excluded by the numbers of its tasks, because it shares its
//!   address, these tasks are excluded wherever they run. If a run has started without a task and the task registers later, this task is unsynced.
//! - *Ending the run.* In a fate-sharing run, the exclusion of a connected task would end the run. The exclusion of
//!   the last live task would end any run. Such an exclusion is refused unless `end_run` is given.
//!   `Run::run_outcome_without` checks this before anything changes.
//! - *Afterwards.* When an exclusion ends, the evicted process still cannot return, because its calls have failed and
//!   barriers have passed without it. A new process of the task may register.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use super::actor::{Actor, CommandReason};
use super::barrier_table::MemberState;
use super::command::CommandRefusal;
use super::context::TransitionContext;
use super::event::{EventKind, FailureClass, RunOutcome};
use super::exclusion::{
    Exclusion, ExclusionEndKind, ExclusionEndRecord, ExclusionKey, ExclusionTarget, PendingEviction,
};
use super::failure::{Code, Failure};
use super::ids::{ConnectionId, ExclusionId, TaskId, Timestamp};
use super::input::Effect;
use super::job::{Job, with_run};
use super::run::Run;
use super::waiters::{CallSelection, SharedAnswer};

impl Job {
    /// Excludes a task or a host.
    #[expect(clippy::too_many_arguments, reason = "what an exclusion is made of")]
    pub(super) fn exclude(
        &mut self,
        now: Timestamp,
        effects: &mut Vec<Effect>,
        actor: Actor,
        reason: CommandReason,
        target: ExclusionTarget,
        expires_in: Option<Duration>,
        end_run: bool,
    ) -> Result<ExclusionId, CommandRefusal> {
        self.check_exclusion(&target)?;
        let tasks = self.tasks_excluded_by(&target);
        if !end_run && let Some(outcome) = self.run.run_outcome_without(&tasks) {
            let why = match outcome {
                RunOutcome::Failed => "its tasks share their fate, and it needs all of them",
                _ => "nobody would be left in it",
            };
            return Err(CommandRefusal::EndsRun { target, run: self.run.number, why });
        }
        let expires_at = expires_in.map(|by| now.after(by));
        let id = Arc::make_mut(&mut self.exclusions).add(target, actor, reason, now, expires_at);
        self.begin_evictions_of_exclusion(now, effects, id, tasks);
        Ok(id)
    }

    /// Checks whether the exclusion may be added to the table.
    pub(super) fn check_exclusion(&self, target: &ExclusionTarget) -> Result<(), CommandRefusal> {
        let mut known = None;
        let mut adds_something = false;
        for key in target.keys() {
            if let ExclusionKey::Task(task) = key
                && self.run.task(task).is_none()
            {
                return Err(CommandRefusal::NoSuchTask { task, last: self.settings.tasks.saturating_sub(1) });
            }
            let found = self.exclusions.find_for_key(key);
            adds_something |= found.is_none();
            known = known.or(found);
        }
        if let Some(known) = known.filter(|_| !adds_something) {
            let (target, by) = (target.clone(), Box::new(known.actor.clone()));
            return Err(CommandRefusal::AlreadyExcluded { target, exclusion: known.id, by });
        }
        let bound = self.settings.bounds.exclusions;
        if self.exclusions.len() >= bound {
            return Err(CommandRefusal::TooManyExclusions(bound));
        }
        Ok(())
    }

    /// Returns the tasks of the present run that an exclusion affects: those that it names, and those whose present or
    /// last incarnation registered from an address that it names.
    pub(super) fn tasks_excluded_by(&self, target: &ExclusionTarget) -> Vec<TaskId> {
        match target {
            ExclusionTarget::Task(task) => self.run.task(*task).map(|_| *task).into_iter().collect(),
            ExclusionTarget::Host(_) | ExclusionTarget::NamedHost(_) => {
                let address = |id| self.run.expect_task(id).peer.map(|peer| peer.ip());
                self.run.task_ids().filter(|id| target.covers(*id, address(*id))).collect()
            }
        }
    }

    /// Begins to apply an exclusion of the table to the present run; [`Self::evict_next_task`] continues.
    pub(super) fn begin_evictions_of_exclusion(
        &mut self,
        now: Timestamp,
        effects: &mut Vec<Effect>,
        id: ExclusionId,
        tasks: Vec<TaskId>,
    ) {
        let Some(exclusion) = self.exclusions.get(id).cloned() else { return };
        let Exclusion { target, actor, reason, .. } = &exclusion;
        let expulsion = PendingEviction { exclusion: id, tasks: tasks.iter().copied().collect() };
        let text = format!("{target} is excluded by {actor}: {reason}");
        with_run!(self, now, effects, |_run, cx| {
            let (target, actor) = (target.clone(), actor.clone());
            let change = EventKind::Excluded { exclusion: id, target, tasks, actor };
            cx.emit_event(change, text);
        });
        self.pending_evictions.push_back(expulsion);
        if self.pending_evictions.len() == 1 {
            // A single task is evicted with the command itself.
            self.evict_next_task(now, effects, &mut 1);
        }
    }

    /// Removes the next task of a pending eviction from the run.
    pub(super) fn evict_next_task(&mut self, now: Timestamp, effects: &mut Vec<Effect>, budget: &mut usize) {
        // The cost of an eviction, in answers.
        const COST: usize = 16;
        *budget = budget.saturating_sub(COST);
        let Some(expulsion) = self.pending_evictions.front_mut() else { return };
        let exclusion = self.exclusions.get(expulsion.exclusion).cloned();
        let (Some(exclusion), Some(task)) = (exclusion, expulsion.tasks.pop_front()) else {
            // The eviction is complete, or the exclusion ended first.
            self.pending_evictions.pop_front();
            return;
        };
        if expulsion.tasks.is_empty() {
            self.pending_evictions.pop_front();
        }
        let Exclusion { target, actor, reason, .. } = &exclusion;
        if !target.covers(task, self.run.expect_task(task).peer.map(|peer| peer.ip())) {
            return;
        }
        let why = format!("excluded by {actor}: {reason}");
        let failure = Arc::new(exclusion.refusal(self.name.as_str(), task).with_cause(&why));
        let own = self.exclusive_connections_of(task);
        with_run!(self, now, effects, |run, cx| {
            run.evict_task(cx, task, &failure, &why, &own);
            run.mark_task_excused(cx, task, target.covers_number(task));
        });
    }

    /// Returns whether a pending eviction will remove the task from the run.
    pub(super) fn is_eviction_pending(&self, id: TaskId) -> bool {
        self.pending_evictions.iter().any(|expulsion| expulsion.tasks.binary_search(&id).is_ok())
    }

    /// Ends an exclusion on an operator's command.
    pub(super) fn readmit(
        &mut self,
        now: Timestamp,
        effects: &mut Vec<Effect>,
        actor: Actor,
        reason: CommandReason,
        id: ExclusionId,
    ) -> Result<(), CommandRefusal> {
        if self.exclusions.get(id).is_none() {
            let numbered = self.exclusions.has_issued_id(id);
            return Err(if numbered {
                CommandRefusal::AlreadyOver(id)
            } else {
                CommandRefusal::NoSuchExclusion(id)
            });
        }
        let (actor, reason) = (Some(actor), Some(reason));
        let ended = ExclusionEndRecord { at: now, how: ExclusionEndKind::Lifted, actor, reason };
        self.end_exclusion(now, effects, id, ended);
        Ok(())
    }

    /// Ends every exclusion that has expired.
    pub(super) fn expire_exclusions(&mut self, now: Timestamp, effects: &mut Vec<Effect>) {
        while let Some(id) = self.exclusions.first_expired(now) {
            let ended =
                ExclusionEndRecord { at: now, how: ExclusionEndKind::Expired, actor: None, reason: None };
            self.end_exclusion(now, effects, id, ended);
        }
    }

    fn end_exclusion(
        &mut self,
        now: Timestamp,
        effects: &mut Vec<Effect>,
        id: ExclusionId,
        ended: ExclusionEndRecord,
    ) {
        let actor = ended.actor.clone();
        let reason = match (&ended.actor, &ended.reason) {
            (Some(actor), Some(reason)) => format!("lifted by {actor}: {reason}"),
            _ => "expired".to_owned(),
        };
        let Some(exclusion) = Arc::make_mut(&mut self.exclusions).end(id, ended, &self.settings.bounds)
        else {
            return;
        };
        let Exclusion { target, .. } = exclusion;
        let is_readmitted = |task: &TaskId| self.exclusions.find_for_key(ExclusionKey::Task(*task)).is_none();
        let readmitted: Vec<TaskId> = target.tasks().filter(is_readmitted).collect();
        with_run!(self, now, effects, |run, cx| {
            cx.emit_event(EventKind::Readmitted { exclusion: id, target, actor }, reason);
            for task in readmitted {
                run.wait_again_for_readmitted_task(task);
            }
        });
    }

    /// Returns the refusal of a registration of an excluded task or from an excluded host.
    pub(super) fn refuse_excluded_registration(
        &mut self,
        now: Timestamp,
        effects: &mut Vec<Effect>,
        task: TaskId,
        peer: Option<SocketAddr>,
    ) -> Option<Failure> {
        let exclusion = self.exclusions.find_matching(task, peer.map(|peer| peer.ip()))?;
        let (id, failure) = (exclusion.id, exclusion.refusal(self.name.as_str(), task));
        if Arc::make_mut(&mut self.exclusions).record_refusal(id, now) {
            let from = peer.map_or_else(String::new, |peer| format!(" from {peer}"));
            let reason = format!("registration of task {task}{from} refused: {}", failure.message);
            with_run!(self, now, effects, |_run, cx| {
                cx.emit_event(EventKind::RegistrationRefused { exclusion: id, task, peer }, reason);
            });
        }
        Some(failure)
    }

    /// Returns the refusal of any other call of an excluded task. It holds even after the exclusion, because
    /// the exclusion ended that incarnation.
    pub(super) fn exclusion_refusal(&self, task: TaskId, peer: Option<SocketAddr>) -> Option<Failure> {
        if let Some(exclusion) = self.exclusions.find_matching(task, peer.map(|peer| peer.ip())) {
            return Some(exclusion.refusal(self.name.as_str(), task));
        }
        let failure = self.run.task(task)?.failure().filter(|failure| failure.is_exclusion())?;
        Some(failure.as_ref().clone())
    }

    /// Marks the tasks of a new run whose numbers are excluded as excused.
    pub(super) fn excuse_excluded_tasks(&mut self) {
        if !self.settings.recoverable {
            return;
        }
        let excluded: Vec<TaskId> =
            self.exclusions.in_force().flat_map(|exclusion| exclusion.target.tasks()).collect();
        for task in excluded {
            if self.run.task(task).is_some() {
                self.run.expect_task_mut(task).is_excused = true;
            }
        }
    }
}

impl Exclusion {
    /// Returns the refusal for a process of the task. It is final: the client shows it and exits.
    fn refusal(&self, job: &str, task: TaskId) -> Failure {
        let whom = match &self.target {
            ExclusionTarget::Task(_) => format!("Task {task} of job {job} is excluded"),
            host if host.covers_number(task) => {
                format!(
                    "Task {task} of job {job} was on {}, a host that is excluded with its tasks",
                    host.host_text()
                )
            }
            host => format!("Task {task} of job {job} runs on {}, a host that is excluded", host.host_text()),
        };
        let until = match self.expires_at {
            Some(at) => format!("until {at}"),
            None => "until that is lifted".to_owned(),
        };
        let text = format!(
            "{whom} since {} and takes no part {until}, by decision of {}: {}. (Exclusion {id}; to lift it: muster readmit \
             --job {job} {id} --reason TEXT.) End this process.",
            self.since,
            self.actor,
            self.reason,
            id = self.id,
        );
        Failure::from_service(Code::PermissionDenied, text)
    }
}

impl Run {
    /// Evicts a task: answers its calls, and fails it if it is connected.
    fn evict_task(
        &mut self,
        cx: &mut TransitionContext<'_>,
        id: TaskId,
        failure: &Arc<Failure>,
        why: &str,
        own: &[ConnectionId],
    ) {
        if !self.expect_task(id).is_connected() {
            return self.fail_waiting_calls_of_task(cx, id, failure, own);
        }
        let text = format!("The run was ended: {} was {why}", self.describe_task(id));
        let told = Arc::new(Failure::from_service(Code::Aborted, text).with_cause(why));
        if !self.expect_task(id).recoverable && self.ended.is_none() {
            // Recorded before any consequence of the eviction fails.
            self.record_first_cause(cx, Some(id), &told);
        }
        self.fail_waiting_calls_of_task(cx, id, failure, own);
        self.fail_task(cx, id, failure, FailureClass::Excluded, why);
        self.propagate_error(cx, Some(id), &told);
    }

    /// Answers every waiting call of a task, and all calls on connections that only this task uses.
    fn fail_waiting_calls_of_task(
        &mut self,
        cx: &mut TransitionContext<'_>,
        id: TaskId,
        failure: &Arc<Failure>,
        own: &[ConnectionId],
    ) {
        let at_barriers =
            self.barriers.in_progress().filter_map(|(key, instance)| match instance.member_state(id) {
                Some(MemberState::Arrived(arrival)) => Some((key.clone(), instance.counter, arrival.call)),
                _ => None,
            });
        for (key, counter, call) in at_barriers.collect::<Vec<_>>() {
            let failure =
                failure.as_ref().clone().with_barrier(&self.id_of_barrier_for_clients(&key), counter);
            self.withdraw_call(cx, call);
            cx.reply_to_call(call, Err(Arc::new(failure)));
        }
        self.cancel_live_set_calls_of(id, failure);
        self.answer_error_poll(cx, id, failure);
        for connection in own.iter().copied() {
            // Later calls are refused as long as the exclusion is in force.
            if let Some(last) = self
                .waiters
                .greatest_waiting_call_id()
                .filter(|_| self.waiters.count_calls_on_connection(connection) > 0)
            {
                let calls = CallSelection::OnConnection(connection, last);
                self.waiters.queue_answer(calls, SharedAnswer::Failed(Arc::clone(failure)));
            }
        }
    }

    /// Returns how the run would end without these tasks; `None` if it would go on or has ended.
    fn run_outcome_without(&self, tasks: &[TaskId]) -> Option<RunOutcome> {
        let connected = tasks.iter().map(|id| self.expect_task(*id)).filter(|task| task.is_connected());
        let (mut lost, mut needed) = (0, false);
        for task in connected {
            lost += 1;
            needed |= !task.recoverable;
        }
        if self.ended.is_some() || lost == 0 {
            None
        } else if needed {
            Some(RunOutcome::Failed)
        } else {
            Some(RunOutcome::Abandoned).filter(|_| lost == self.connected_tasks)
        }
    }

    /// Marks the task as excused: nothing waits for it until it registers again. `by_number`: the exclusion holds for
    /// every host.
    fn mark_task_excused(&mut self, cx: &mut TransitionContext<'_>, id: TaskId, by_number: bool) {
        let may_miss = match self.started_at {
            Some(_) => self.expect_task(id).recoverable,
            None => by_number && cx.settings.recoverable,
        };
        if may_miss && !std::mem::replace(&mut self.expect_task_mut(id).is_excused, true) {
            self.mark_not_required_at_barriers(cx, id);
        }
    }

    /// Handles the end of an exclusion by number: a run that still forms waits for the task again.
    fn wait_again_for_readmitted_task(&mut self, id: TaskId) {
        if self.started_at.is_some() || self.task(id).is_none() {
            return;
        }
        self.expect_task_mut(id).is_excused = false;
        let keys: Vec<_> = self.barriers.in_progress().map(|(key, _)| key.clone()).collect();
        for key in keys {
            if let Some(instance) = self.barriers.instance_mut(&key)
                && instance.member_state(id) == Some(MemberState::NotRequired)
            {
                instance.set_member_state(id, MemberState::Missing);
            }
        }
    }
}
