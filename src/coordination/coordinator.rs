//! The whole state: every job, and every connection that speaks to them.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::actor::{Actor, Reason};
use super::exclusion::Target;
use super::failure::{Code, Failure};
use super::ids::{ConnectionId, JobId, JobName, Timestamp};
use super::input::{Effect, Ending, Input};
use super::job::Job;
use super::steering::{Act, Done, ExclusionPreview, Refusal};
use super::view::JobView;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Connection {
    peer: SocketAddr,
    /// The jobs that it has spoken to.
    jobs: BTreeSet<JobId>,
}

/// The state machine. It does no IO, reads no clock and draws no randomness: the same inputs at the same times make the
/// same state and the same effects.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Coordinator {
    jobs: BTreeMap<JobId, Job>,
    names: BTreeMap<JobName, JobId>,
    next_job: u32,
    connections: BTreeMap<ConnectionId, Connection>,
    /// The next deadline of every job that has one.
    wakes: BTreeSet<(Timestamp, JobId)>,
    /// The service is on its way out, until it resumes: no call waits any more, and nobody is to blame for a lost
    /// connection or for silence.
    stopping: bool,
}

impl Coordinator {
    /// Takes one input at `now` and appends what follows from it to `effects`. Total: no input is an error.
    pub fn apply(&mut self, now: Timestamp, input: Input, effects: &mut Vec<Effect>) {
        match input {
            Input::DeclareJob { job, name, settings, incarnation, actor } => {
                self.next_job = self.next_job.max(job.0.saturating_add(1));
                self.names.insert(name.clone(), job);
                let declared = Job::new(job, name, settings, (incarnation, actor), now, effects);
                self.jobs.insert(job, declared);
            }
            Input::SpareIncarnation { job, incarnation } => {
                self.with(job, |job| job.give_spare(incarnation));
            }
            Input::ConnectionOpened { connection, peer } => {
                self.connections.insert(connection, Connection { peer, jobs: BTreeSet::new() });
            }
            Input::ConnectionClosed { connection, ending } => {
                self.connection_closed(now, effects, connection, &ending);
            }
            Input::Call { job, call, caller, request } => {
                if let Err(failure) = self.introduce(caller.connection, job) {
                    return effects.push(Effect::Reply(call, Err(Arc::new(failure))));
                }
                let stopping = self.stopping;
                self.with(job, |job| {
                    job.call(now, effects, call, caller, request);
                    if stopping {
                        job.stop(now, effects);
                    }
                });
            }
            Input::CallGone { job, call } => self.with(job, |job| job.call_gone(now, effects, call)),
            Input::Noted { job, note } => self.with(job, |job| job.note(now, effects, note)),
            Input::TransferFailed { job, note } => {
                self.with(job, |job| job.note_transfer(now, effects, note));
            }
            Input::Act { job, actor, reason, act } => self.act(now, effects, job, actor, reason, act),
            Input::Tick => self.tick(now, effects),
            Input::Stop => {
                self.stopping = true;
                self.each(|job| job.stop(now, effects));
            }
            Input::Lagged => self.each(|job| job.forgive_silence(now)),
            Input::Resumed => {
                self.stopping = false;
                self.connections.clear();
                self.each(|job| job.resume(now, effects));
            }
        }
    }

    /// When the state machine wants a [`Input::Tick`] next.
    #[must_use]
    pub fn next_wake(&self) -> Option<Timestamp> {
        self.wakes.first().filter(|_| !self.stopping).map(|(at, _)| *at)
    }

    /// The job of this name.
    #[must_use]
    pub fn job_named(&self, name: &str) -> Option<JobId> {
        self.names.get(name).copied()
    }

    /// The job that callers reach who name none: `default`, or the only one there is.
    #[must_use]
    pub fn default_job(&self) -> Option<JobId> {
        self.job_named(JobName::DEFAULT).or_else(|| match self.names.len() {
            1 => self.names.values().next().copied(),
            _ => None,
        })
    }

    /// Every job, by name.
    pub fn jobs(&self) -> impl Iterator<Item = (JobId, &JobName)> {
        self.names.iter().map(|(name, id)| (*id, name))
    }

    /// The name of a job.
    #[must_use]
    pub fn job_name(&self, job: JobId) -> Option<&JobName> {
        self.jobs.get(&job).map(|job| &job.name)
    }

    /// The number for the next job that is declared.
    #[must_use]
    pub fn next_job(&self) -> JobId {
        JobId(self.next_job)
    }

    /// How many calls wait for an answer, in all jobs.
    #[must_use]
    pub fn waiting_calls(&self) -> usize {
        self.jobs.values().map(|job| job.run.waiters.len()).sum()
    }

    /// A job as people see it.
    #[must_use]
    pub fn job_view(&self, job: JobId, now: Timestamp) -> Option<JobView> {
        let job = self.jobs.get(&job)?;
        Some(JobView {
            name: job.name.clone(),
            settings: job.settings.clone(),
            seen_at: now,
            run: job.run_view(),
            history: job.history().cloned().collect(),
            exclusions: job.exclusion_views(false),
        })
    }

    /// What an exclusion would do, were it made now.
    ///
    /// # Errors
    /// If it would be refused, for any reason but that it ends the run.
    pub fn would_exclude(
        &self,
        now: Timestamp,
        job: JobId,
        actor: &Actor,
        reason: &Reason,
        target: Target,
    ) -> Result<ExclusionPreview, Refusal> {
        let job = self.jobs.get(&job).ok_or(Refusal::NoSuchJob)?;
        job.would_exclude(now, actor, reason, target)
    }

    pub(super) fn job_of(&self, job: JobId) -> Option<&Job> {
        self.jobs.get(&job)
    }

    pub(super) fn every_job(&self) -> impl Iterator<Item = &Job> {
        self.jobs.values()
    }

    /// The table of deadlines says what the jobs say.
    pub(super) fn audit_wakes(&self) -> Result<(), String> {
        let due = |(id, job): (&JobId, &Job)| job.next_wake().map(|at| (at, *id));
        let expected: BTreeSet<(Timestamp, JobId)> = self.jobs.iter().filter_map(due).collect();
        if expected == self.wakes { Ok(()) } else { Err("the table of deadlines is out of date".to_owned()) }
    }

    fn with(&mut self, id: JobId, act: impl FnOnce(&mut Job)) {
        let Some(job) = self.jobs.get_mut(&id) else { return };
        let before = job.next_wake();
        act(job);
        let after = job.next_wake();
        if before != after {
            if let Some(at) = before {
                self.wakes.remove(&(at, id));
            }
            if let Some(at) = after {
                self.wakes.insert((at, id));
            }
        }
    }

    fn each(&mut self, mut act: impl FnMut(&mut Job)) {
        let ids: Vec<JobId> = self.jobs.keys().copied().collect();
        for id in ids {
            self.with(id, &mut act);
        }
    }

    fn act(
        &mut self,
        now: Timestamp,
        effects: &mut Vec<Effect>,
        id: JobId,
        actor: Actor,
        reason: Reason,
        act: Act,
    ) {
        let mut answer = Err(Refusal::NoSuchJob);
        let by = actor.clone();
        let why = reason.clone();
        self.with(id, |job| answer = job.act(now, effects, actor, reason, act));
        if answer == Ok(Done::JobDeleted) {
            self.delete(now, effects, id, by, &why);
        }
        effects.push(Effect::Acted(answer));
    }

    /// Takes a job away: whatever waits is answered, and nothing of it is left.
    fn delete(
        &mut self,
        now: Timestamp,
        effects: &mut Vec<Effect>,
        id: JobId,
        actor: Actor,
        reason: &Reason,
    ) {
        self.with(id, |job| job.dismiss(now, effects, actor, reason));
        if let Some(job) = self.jobs.remove(&id) {
            self.names.remove(&job.name);
            self.wakes.retain(|(_, job)| *job != id);
        }
        for connection in self.connections.values_mut() {
            connection.jobs.remove(&id);
        }
    }

    fn tick(&mut self, now: Timestamp, effects: &mut Vec<Effect>) {
        while let Some((at, id)) = self.wakes.first().copied().filter(|_| !self.stopping) {
            if at > now {
                break;
            }
            self.with(id, |job| job.tick(now, effects));
        }
    }

    /// Makes a connection known to a job that it speaks to for the first time.
    fn introduce(&mut self, connection: ConnectionId, id: JobId) -> Result<(), Failure> {
        let Some(job) = self.jobs.get_mut(&id) else {
            return Err(no_such_job());
        };
        if job.knows(connection) {
            return Ok(());
        }
        let Some(known) = self.connections.get_mut(&connection) else {
            return Err(Failure::plain(Code::Unavailable, "The connection of this call is gone."));
        };
        known.jobs.insert(id);
        job.meet_connection(connection, known.peer);
        Ok(())
    }

    fn connection_closed(
        &mut self,
        now: Timestamp,
        effects: &mut Vec<Effect>,
        connection: ConnectionId,
        ending: &Ending,
    ) {
        let Some(known) = self.connections.remove(&connection) else { return };
        let blame = Some(ending).filter(|_| !self.stopping);
        for id in known.jobs {
            self.with(id, |job| job.connection_closed(now, effects, connection, blame));
        }
    }
}

/// What every call to a job is answered that is no more.
pub(super) fn no_such_job() -> Failure {
    Failure::service(Code::NotFound, "There is no such job any more.")
}
