//! The whole state of the state machine: every job and connection, the deadlines of jobs, and the set of jobs with
//! queued work.
//!
//! [`Coordinator`] passes each input to the job that it concerns, and contains no rule of a job. Begin at
//! [`Coordinator::apply`].
//!
//! After its own transition, an input does at most `work_budget` units of queued work. Sending an answer is one unit.
//! If work of earlier inputs is still queued, an input other than a tick does at most 4 units. The bound is more than
//! one, so that no peer adds work faster than its own inputs remove it. The bound is small, because a connection
//! makes many calls before other connections get their turn. All jobs with queued work get equal parts of the budget.
//!
//! [`Coordinator::snapshot`] copies one pointer for each job. While a snapshot is held, an input copies the parts of
//! the state that it changes. No input makes `Coordinator` fail: an invalid input is answered with a typed error.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::actor::{Actor, CommandReason};
use super::command::{CommandOutcome, CommandRefusal, ExclusionPreview, OperatorCommand};
use super::deferred_free::DeferredFree;
use super::exclusion::ExclusionTarget;
use super::failure::{Code, Failure};
use super::ids::{CallId, ConnectionId, JobId, JobName, TaskId, Timestamp};
use super::input::{ConnectionEnd, Effect, Input};
use super::job::Job;
use super::peer_jobs::{no_such_peer_job_failure, peer_job_refusal};
use super::request_reply::{Request, StatedIncarnations};
use super::shared_failures::job_deleted_failure;
use super::task_owner_table::ClaimRefusal;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct ConnectionEntry {
    peer: SocketAddr,
    /// The jobs that received calls on this connection.
    jobs: BTreeSet<JobId>,
}

/// The state machine. It does no IO, reads no clock and draws no randomness: the same inputs at the same times make the
/// same state and the same effects.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Coordinator {
    jobs: BTreeMap<JobId, Arc<Job>>,
    /// Deleted jobs whose calls are still being answered.
    deleted: BTreeMap<JobId, Arc<Job>>,
    names: Arc<BTreeMap<JobName, JobId>>,
    next_job: u32,
    connections: BTreeMap<ConnectionId, ConnectionEntry>,
    /// The next deadline of every job that has one.
    wakeups: BTreeSet<(Timestamp, JobId)>,
    /// Whether the service is stopping, until it resumes. Meanwhile no call waits, and a lost connection or
    /// silence fails no task.
    stopping: bool,
    /// The jobs with pending work.
    jobs_with_work: BTreeSet<JobId>,
    pending_since: Option<Timestamp>,
    /// The job that last did pending work.
    worked_last: Option<JobId>,
    /// The bound on the work that an input does besides its own.
    work_budget: WorkBudget,
}

/// A bound on the work of one input, in answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct WorkBudget(usize);

impl Default for WorkBudget {
    fn default() -> Self {
        // An answer costs about a microsecond.
        Self(128)
    }
}

/// The number of answers of pending work that an input other than a tick gives. It is more than one, so that
/// no peer adds work faster than its own inputs remove it, and small, because a connection puts many calls
/// before others get their turn.
const LEFT_OVER_AT_ONCE: usize = 4;

impl Coordinator {
    /// Applies one input at `now` and appends its effects to `effects`. No input is an error.
    ///
    /// An input that affects very many calls or keys (readers of one written key, calls of a closed
    /// connection, a deleted directory) decides everything at once and does a bounded part of the work.
    /// Ticks, which the state machine requests at once, do the rest; other inputs may come in between and do
    /// a little of it.
    pub fn apply(&mut self, now: Timestamp, input: Input, effects: &mut Vec<Effect>) {
        let mut budget = self.work_budget.0;
        if self.has_pending_work() && !matches!(input, Input::Tick) {
            budget = budget.min(LEFT_OVER_AT_ONCE);
        }
        self.handle_input(now, input, effects, &mut budget);
        self.run_pending_work(now, effects, &mut budget);
    }

    /// Sets the bound on the work that an input does besides its own, in answers; the default is 128.
    pub fn set_work_budget(&mut self, most: usize) {
        self.work_budget = WorkBudget(most.max(1));
    }

    /// Returns whether work is pending; the next tick continues it.
    #[must_use]
    pub fn has_pending_work(&self) -> bool {
        !self.jobs_with_work.is_empty()
    }

    /// Returns a copy of the jobs for reading. It costs one pointer for each job; a later input copies what
    /// it changes while the copy is held.
    #[must_use]
    pub fn snapshot(&self) -> Self {
        Self {
            jobs: self.jobs.clone(),
            names: Arc::clone(&self.names),
            next_job: self.next_job,
            stopping: self.stopping,
            ..Self::default()
        }
    }

    fn run_pending_work(&mut self, now: Timestamp, effects: &mut Vec<Effect>, budget: &mut usize) {
        let stopping = self.stopping;
        if self.jobs_with_work.is_empty() {
            self.pending_since = None;
            return;
        }
        // The budget is divided among the jobs, so that no job waits until another has done all its work.
        let jobs: Vec<JobId> = self.jobs_with_work.iter().copied().collect();
        let part = budget.div_ceil(jobs.len());
        let first = jobs.partition_point(|id| Some(*id) <= self.worked_last) % jobs.len();
        for id in jobs[first..].iter().chain(&jobs[..first]).copied() {
            if *budget == 0 {
                break;
            }
            self.worked_last = Some(id);
            let mut left = part.min(*budget);
            *budget -= left;
            self.update_job(id, |job| {
                job.run_pending_work(now, effects, &mut left);
                if stopping {
                    job.fail_waiting_calls_for_stop(now, effects, &mut left);
                }
            });
            *budget += left;
            if !self.jobs_with_work.contains(&id)
                && let Some(job) = self.deleted.remove(&id)
            {
                let weight = job.run.approximate_allocations();
                effects.push(Effect::FreeLater(DeferredFree::of_value_with_weight(job, weight)));
            }
        }
        self.pending_since = Some(now).filter(|_| !self.jobs_with_work.is_empty());
    }

    fn handle_input(&mut self, now: Timestamp, input: Input, effects: &mut Vec<Effect>, budget: &mut usize) {
        match input {
            Input::DeclareJob { job, name, settings, incarnation, actor } => {
                self.next_job = self.next_job.max(job.0.saturating_add(1));
                Arc::make_mut(&mut self.names).insert(name.clone(), job);
                let declared = Job::new(job, name, *settings, (incarnation, actor), now, effects);
                self.jobs.insert(job, Arc::new(declared));
            }
            Input::NextIncarnation { job, incarnation } => {
                self.update_job(job, |job| job.set_incarnation_of_next_run(incarnation));
            }
            Input::ConnectionOpened { connection, peer } => {
                self.connections.insert(connection, ConnectionEntry { peer, jobs: BTreeSet::new() });
            }
            Input::ConnectionClosed { connection, ending } => {
                self.record_connection_closed(connection, &ending)
            }
            Input::Call { job, call, caller, request } => {
                let admitted = match &request {
                    Request::FromPeerJob { from, .. } => self.check_jobs_may_exchange_transfers(*from, job),
                    _ => Ok(()),
                };
                let attached = admitted.and_then(|()| self.attach_connection_to_job(caller.connection, job));
                if let Err(failure) = attached {
                    return effects.push(Effect::Reply(call, Err(Arc::new(failure))));
                }
                let stopping = self.stopping;
                self.update_job(job, |job| {
                    job.handle_call(now, effects, call, caller, request);
                    if stopping {
                        job.fail_waiting_calls_for_stop(now, effects, budget);
                    }
                });
            }
            Input::CallCancelled { job, call } => {
                self.update_job(job, |job| job.cancel_call(now, effects, call))
            }
            // A deleted job takes no inputs, though calls of it may still be pending.
            Input::FindingChanged { job, .. } | Input::TransferFailed { job, .. }
                if !self.jobs.contains_key(&job) => {}
            Input::FindingChanged { job, note } => {
                self.update_job(job, |job| job.record_finding(now, effects, note))
            }
            Input::TransferFailed { job, note } => {
                self.update_job(job, |job| job.record_transfer_failure(now, effects, note));
            }
            Input::ClaimTask { job, claim } => {
                let known = claim.connection.and_then(|connection| self.connections.get(&connection));
                let address = known.map(|known| known.peer.ip().to_canonical());
                let mut answer = Err(ClaimRefusal::NoSuchJob);
                if self.jobs.contains_key(&job) {
                    self.update_job(job, |job| answer = job.claim_task_id(now, effects, &claim, address));
                }
                effects.push(Effect::ClaimAnswered(answer));
            }
            Input::Command { job, actor, reason, act } => {
                self.perform_operator_command(now, effects, job, actor, reason, act)
            }
            Input::Tick => self.tick(now, effects, budget),
            Input::Stop => {
                self.stopping = true;
                self.update_every_job(|job| job.fail_waiting_calls_for_stop(now, effects, budget));
            }
            Input::DriverLagged => self.update_every_job(|job| job.restart_heartbeat_timeouts(now)),
            Input::Resumed { after, kept } => {
                self.stopping = false;
                let kept: BTreeSet<ConnectionId> = kept.into_iter().collect();
                self.connections.retain(|connection, _| kept.contains(connection));
                // A connection whose end is recorded does not go on.
                let kept: BTreeSet<ConnectionId> = self.connections.keys().copied().collect();
                if kept.is_empty() {
                    self.deleted.clear();
                    self.jobs_with_work.clear();
                }
                self.update_every_job(|job| job.resume_after_restart(now, effects, after.as_deref(), &kept));
            }
        }
    }

    /// Returns the time of the next [`Input::Tick`] that the state machine needs.
    #[must_use]
    pub fn next_wakeup(&self) -> Option<Timestamp> {
        let deadline = self.wakeups.first().filter(|_| !self.stopping).map(|(at, _)| *at);
        [self.pending_since, deadline].into_iter().flatten().min()
    }

    /// Returns the job with this name.
    #[must_use]
    pub fn job_named(&self, name: &str) -> Option<JobId> {
        self.names.get(name).copied()
    }

    /// Returns the job of callers that name none: `default`, or the only job.
    #[must_use]
    pub fn default_job(&self) -> Option<JobId> {
        self.job_named(JobName::DEFAULT).or_else(|| match self.names.len() {
            1 => self.names.values().next().copied(),
            _ => None,
        })
    }

    /// Returns the job named `name`, if tasks of job `from` may exchange transfers with its tasks.
    ///
    /// # Errors
    /// If there is no such job, or the setting of one of the two does not allow it.
    pub fn find_permitted_peer_job(&self, from: JobId, name: &str) -> Result<JobId, Failure> {
        let to = self.job_named(name).ok_or_else(|| no_such_peer_job_failure(name))?;
        self.check_jobs_may_exchange_transfers(from, to).map(|()| to)
    }

    fn check_jobs_may_exchange_transfers(&self, from: JobId, to: JobId) -> Result<(), Failure> {
        let (Some(from), Some(to)) = (self.jobs.get(&from), self.jobs.get(&to)) else {
            return Err(job_deleted_failure());
        };
        peer_job_refusal(from, to).map_or(Ok(()), Err)
    }

    /// Ends the calls between a job and those of `listed` with which it may exchange transfers no more.
    fn end_calls_of_former_peer_jobs(
        &mut self,
        now: Timestamp,
        effects: &mut Vec<Effect>,
        id: JobId,
        listed: &BTreeSet<JobName>,
    ) {
        for other in listed.iter().filter_map(|name| self.job_named(name.as_str())).collect::<Vec<_>>() {
            if let Err(failure) = self.check_jobs_may_exchange_transfers(id, other) {
                let failure = Arc::new(failure);
                self.update_job(other, |job| job.refuse_calls_of_peer_job(now, effects, id, &failure));
                // The calls of a deleted job have their answer.
                if self.jobs.contains_key(&id) {
                    self.update_job(id, |job| job.refuse_calls_of_peer_job(now, effects, other, &failure));
                }
            }
        }
    }

    /// Returns whether a connection has made a call to a job before, so that a read on it attaches it to nothing.
    #[must_use]
    pub fn is_connection_known_to_job(&self, job: JobId, connection: ConnectionId) -> bool {
        self.jobs.get(&job).is_some_and(|job| job.has_connection(connection))
    }

    /// Reads what writes to a key-value store among these inputs will search, so that the caches of the processor have it. Of
    /// several jobs, only the first one that writes gets this help.
    pub fn prefetch_written_keys<'a>(&self, inputs: impl IntoIterator<Item = &'a Input>) {
        let writes = inputs.into_iter().filter_map(|input| match input {
            Input::Call {
                job,
                request: Request::Insert { key, .. } | Request::Increment { key, .. },
                ..
            } => Some((*job, key)),
            _ => None,
        });
        let writes: Vec<(JobId, &Bytes)> = writes.collect();
        let Some((written, _)) = writes.first() else { return };
        let Some(job) = self.jobs.get(written) else { return };
        let keys: Vec<&Bytes> =
            writes.iter().filter(|(job, _)| job == written).map(|(_, key)| *key).collect();
        job.run.store.prefetch(&keys);
    }

    /// Returns whether a connection is open.
    #[must_use]
    pub fn has_connection(&self, connection: ConnectionId) -> bool {
        self.connections.contains_key(&connection)
    }

    /// Returns whether a call waits on a connection.
    #[must_use]
    pub fn has_waiting_call(&self, job: JobId, connection: ConnectionId, call: CallId) -> bool {
        let job = self.jobs.get(&job).or_else(|| self.deleted.get(&job));
        job.is_some_and(|job| job.connection_of_waiting_call(call) == Some(connection))
    }

    /// Returns the incarnations that a call of this task states; `None` if the present run knows no incarnation of it.
    #[must_use]
    pub fn present_incarnations(&self, job: JobId, task: TaskId) -> Option<StatedIncarnations> {
        self.jobs.get(&job)?.present_incarnations(task)
    }

    /// Returns every job, by name.
    pub fn jobs(&self) -> impl Iterator<Item = (JobId, &JobName)> {
        self.names.iter().map(|(name, id)| (*id, name))
    }

    /// Returns the name of a job.
    #[must_use]
    pub fn job_name(&self, job: JobId) -> Option<&JobName> {
        self.jobs.get(&job).map(|job| &job.name)
    }

    /// Returns the number for the next declared job.
    #[must_use]
    pub fn next_job_id(&self) -> JobId {
        JobId(self.next_job)
    }

    /// Returns the number of waiting calls in all jobs.
    #[must_use]
    pub fn waiting_call_count(&self) -> usize {
        self.jobs.values().chain(self.deleted.values()).map(|job| job.waiting_call_count()).sum()
    }

    /// Returns the effects that an exclusion would have now.
    ///
    /// # Errors
    /// If the exclusion would be refused for any reason except that it ends the run.
    pub fn preview_exclusion(
        &self,
        now: Timestamp,
        job: JobId,
        actor: &Actor,
        reason: &CommandReason,
        target: &ExclusionTarget,
    ) -> Result<ExclusionPreview, CommandRefusal> {
        let job = self.jobs.get(&job).ok_or(CommandRefusal::NoSuchJob)?;
        job.preview_exclusion(now, actor, reason, target)
    }

    pub(super) fn job_state(&self, job: JobId) -> Option<&Job> {
        self.jobs.get(&job).map(Arc::as_ref)
    }

    pub(super) fn job_states(&self) -> impl Iterator<Item = &Job> {
        self.jobs.values().map(Arc::as_ref)
    }

    /// Checks that the table of wakeups agrees with the jobs.
    pub(super) fn check_wakeup_table_matches_jobs(&self) -> Result<(), String> {
        let due = |(id, job): (&JobId, &Arc<Job>)| job.next_wakeup().map(|at| (at, *id));
        let expected: BTreeSet<(Timestamp, JobId)> = self.jobs.iter().filter_map(due).collect();
        if expected != self.wakeups {
            return Err("the table of deadlines is out of date".to_owned());
        }
        let busy =
            self.jobs.iter().chain(&self.deleted).filter(|(_, job)| job_has_pending_work(job, self.stopping));
        let busy: BTreeSet<JobId> = busy.map(|(id, _)| *id).collect();
        if busy != self.jobs_with_work || self.jobs_with_work.is_empty() != self.pending_since.is_none() {
            return Err("the table of jobs with work to do is out of date".to_owned());
        }
        if self.deleted.keys().any(|id| !self.jobs_with_work.contains(id)) {
            return Err("a deleted job is kept for nothing".to_owned());
        }
        Ok(())
    }

    fn update_job(&mut self, id: JobId, act: impl FnOnce(&mut Job)) {
        let (job, listed) = match self.jobs.get_mut(&id) {
            Some(job) => (job, true),
            None => match self.deleted.get_mut(&id) {
                Some(job) => (job, false),
                None => return,
            },
        };
        let job = Arc::make_mut(job);
        let before = job.next_wakeup();
        act(job);
        let after = job.next_wakeup();
        let busy = job_has_pending_work(job, self.stopping);
        if busy != self.jobs_with_work.contains(&id) {
            if busy {
                self.jobs_with_work.insert(id);
            } else {
                self.jobs_with_work.remove(&id);
            }
        }
        if !listed {
            return;
        }
        if before != after {
            if let Some(at) = before {
                self.wakeups.remove(&(at, id));
            }
            if let Some(at) = after {
                self.wakeups.insert((at, id));
            }
        }
    }

    fn update_every_job(&mut self, mut act: impl FnMut(&mut Job)) {
        let ids: Vec<JobId> = self.jobs.keys().copied().collect();
        for id in ids {
            self.update_job(id, &mut act);
        }
    }

    fn perform_operator_command(
        &mut self,
        now: Timestamp,
        effects: &mut Vec<Effect>,
        id: JobId,
        actor: Actor,
        reason: CommandReason,
        act: OperatorCommand,
    ) {
        let mut answer = Err(CommandRefusal::NoSuchJob);
        let by = actor.clone();
        let why = reason.clone();
        let listed = self.jobs.get(&id).map(|job| job.settings.transfers_with.clone()).unwrap_or_default();
        if self.jobs.contains_key(&id) {
            self.update_job(id, |job| answer = job.perform_command(now, effects, actor, reason, act));
        }
        if answer == Ok(CommandOutcome::JobDeleted) {
            self.delete_job(now, effects, id, by, &why);
        }
        self.end_calls_of_former_peer_jobs(now, effects, id, &listed);
        effects.push(Effect::CommandDone(answer));
    }

    /// Deletes a job: its waiting calls are answered and its state is dropped.
    fn delete_job(
        &mut self,
        now: Timestamp,
        effects: &mut Vec<Effect>,
        id: JobId,
        actor: Actor,
        reason: &CommandReason,
    ) {
        self.update_job(id, |job| job.fail_calls_and_announce_deletion(now, effects, actor, reason));
        if let Some(job) = self.jobs.remove(&id) {
            Arc::make_mut(&mut self.names).remove(&job.name);
            self.wakeups.retain(|(_, job)| *job != id);
            self.jobs_with_work.insert(id);
            self.deleted.insert(id, job);
        }
    }

    fn tick(&mut self, now: Timestamp, effects: &mut Vec<Effect>, budget: &mut usize) {
        while *budget > 0
            && let Some((at, id)) = self.wakeups.first().copied().filter(|_| !self.stopping)
        {
            if at > now {
                break;
            }
            self.update_job(id, |job| job.tick(now, effects, budget));
        }
    }

    /// Attaches a connection to a job at its first call to that job.
    fn attach_connection_to_job(&mut self, connection: ConnectionId, id: JobId) -> Result<(), Failure> {
        let Some(job) = self.jobs.get_mut(&id) else {
            return Err(job_deleted_failure());
        };
        if job.has_connection(connection) {
            return Ok(());
        }
        let job = Arc::make_mut(job);
        let Some(known) = self.connections.get_mut(&connection) else {
            return Err(Failure::without_details(Code::Unavailable, "The connection of this call is gone."));
        };
        known.jobs.insert(id);
        job.add_connection(connection, known.peer);
        Ok(())
    }

    fn record_connection_closed(&mut self, connection: ConnectionId, ending: &ConnectionEnd) {
        let Some(known) = self.connections.remove(&connection) else { return };
        for id in known.jobs {
            // A deleted job emits no more events.
            let blame = Some(ending).filter(|_| !self.stopping && self.jobs.contains_key(&id));
            self.update_job(id, |job| job.record_connection_closed(connection, blame));
        }
    }
}

/// Returns whether a job has pending work.
fn job_has_pending_work(job: &Job, stopping: bool) -> bool {
    job.has_pending_work() || (stopping && job.run.waiters.len() > 0)
}
