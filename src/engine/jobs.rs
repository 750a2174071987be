//! Declares jobs within a bound on their number, performs the commands of operators, answers the claims of processes on task
//! ids, and records what observers report.
//!
//! The state machine decides whether a command is permitted. Begin at [`Engine::declare_job`] and
//! [`Engine::perform_command_and_read`].

use std::sync::atomic::Ordering;

use super::Engine;
use crate::clock;
use crate::coordination::{
    Actor, ActorOrigin, ClaimAnswer, ClaimRefusal, CommandOutcome, CommandReason, CommandRefusal,
    Coordinator, FindingChange, Input, JobId, JobName, JobSettings, OperatorCommand, ServiceIncarnation,
    SettingsChange, TaskClaim, TransferFailure,
};

/// The reason for which a job cannot be declared.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DeclareError {
    /// A job with that name exists.
    #[error("there is a job named {0} already")]
    Exists(JobName),
    /// The bound on jobs is reached.
    #[error("there are {0} jobs, the most that this server may have (setting jobs-max): delete one first")]
    TooMany(usize),
    /// The journal cannot be written.
    #[error("{0}")]
    NotRecordable(String),
}

/// The outcome of the declaration of a configured job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DeclaredJob {
    /// The job is new.
    New,
    /// The journal has restored it.
    Restored,
    /// The journal has restored it, and its settings have changed as the configuration says.
    Changed,
    /// The journal has restored it, and its settings cannot change now as the configuration says.
    Kept(CommandRefusal),
}

impl Engine {
    /// The default of the greatest number of jobs.
    pub const JOBS_MAX: usize = 1024;

    /// Bounds the number of jobs; existing jobs stay.
    pub fn set_job_limit(&self, most: usize) {
        self.jobs_max.store(most, Ordering::Relaxed);
    }

    /// Declares a job of the server's configuration.
    ///
    /// # Errors
    /// If there is a job of that name, or there are too many jobs.
    pub fn declare_job(&self, name: JobName, settings: JobSettings) -> Result<JobId, DeclareError> {
        self.declare_job_and_capture(name, settings, None, |_| ()).map(|(job, ())| job)
    }

    /// Declares a job of the server's configuration that the journal may have restored. A restored job keeps its present
    /// settings; if the configuration has changed since it last declared the job, the changes are applied.
    ///
    /// # Errors
    /// If there are too many jobs.
    pub fn declare_configured_job(
        &self,
        name: &JobName,
        settings: &JobSettings,
    ) -> Result<DeclaredJob, DeclareError> {
        let known = {
            let state = self.lock();
            state
                .durable
                .coordinator
                .job_named(name.as_str())
                .map(|job| (job, state.durable.declared.get(name).cloned()))
        };
        let Some((job, before)) = known else {
            self.declare_job(name.clone(), settings.clone())?;
            return Ok(DeclaredJob::New);
        };
        if before.as_ref() == Some(settings) {
            return Ok(DeclaredJob::Restored);
        }
        {
            let mut state = self.lock();
            state.durable.declared.insert(name.clone(), settings.clone());
            if let Some(recorder) = &mut state.recorder {
                recorder.record_declaration(name, settings);
            }
        }
        let change = SettingsChange::between(before.as_ref(), settings);
        let actor = Actor { who: "the configuration".into(), address: None, means: ActorOrigin::Cli };
        let reason = CommandReason::try_from("the configuration has changed since the last start".to_owned());
        let Ok(reason) = reason else { return Ok(DeclaredJob::Restored) };
        match self.perform_command(job, actor, reason, OperatorCommand::Configure(Box::new(change))) {
            Ok(_) => Ok(DeclaredJob::Changed),
            Err(refusal) => Ok(DeclaredJob::Kept(refusal)),
        }
    }

    /// Declares a job for an operator.
    ///
    /// # Errors
    /// As [`Engine::declare_job`].
    pub fn declare_job_and_read<T>(
        &self,
        name: JobName,
        settings: JobSettings,
        actor: Actor,
        look: impl FnOnce(&Coordinator, JobId) -> T,
    ) -> Result<T, DeclareError> {
        let (job, copy) = self.declare_job_and_capture(name, settings, Some(actor), Coordinator::snapshot)?;
        Ok(look(&copy, job))
    }

    /// Declares a job, and takes something of the state in the same step.
    fn declare_job_and_capture<C>(
        &self,
        name: JobName,
        settings: JobSettings,
        actor: Option<Actor>,
        take: impl FnOnce(&Coordinator) -> C,
    ) -> Result<(JobId, C), DeclareError> {
        let mut state = self.lock();
        if let Some(why) = state.change_refusal() {
            return Err(DeclareError::NotRecordable(why));
        }
        if state.durable.coordinator.job_named(name.as_str()).is_some() {
            return Err(DeclareError::Exists(name));
        }
        let most = self.jobs_max.load(Ordering::Relaxed);
        if state.durable.coordinator.jobs().count() >= most {
            return Err(DeclareError::TooMany(most));
        }
        let job = state.durable.coordinator.next_job_id();
        let incarnation = ServiceIncarnation(clock::random_nonzero().get());
        if actor.is_none() {
            state.durable.declared.insert(name.clone(), settings.clone());
        }
        let settings = Box::new(settings);
        let input = Input::DeclareJob { job, name, settings, incarnation, actor };
        let applied = self.apply(&mut state, input, None);
        if state.durable.coordinator.job_name(job).is_none() {
            let why = state.change_refusal().unwrap_or_else(|| "The journal has no room.".to_owned());
            return Err(DeclareError::NotRecordable(why));
        }
        let (taken, held_until) = (take(&state.durable.coordinator), state.held_until());
        self.unlock_and_deliver(state, applied);
        self.wait_for_disk(held_until);
        self.job_changes.fetch_add(1, Ordering::Release);
        Ok((job, taken))
    }

    /// Returns the number of times that a job was created or deleted. A lookup of a job by name stays valid
    /// while it does not change.
    #[must_use]
    pub fn job_table_version(&self) -> u64 {
        self.job_changes.load(Ordering::Acquire)
    }

    /// Performs a command on a job.
    ///
    /// # Errors
    /// If the command is refused; nothing has changed then.
    pub fn perform_command(
        &self,
        job: JobId,
        actor: Actor,
        reason: CommandReason,
        act: OperatorCommand,
    ) -> Result<CommandOutcome, CommandRefusal> {
        self.perform_command_and_read(job, actor, reason, act, |_, acted| acted)
    }

    /// Performs a command on a job, and runs `look` on a copy of the jobs as they are right after the command or its
    /// refusal. No other input comes between the command and the copy. The lock is free while `look` runs.
    pub fn perform_command_and_read<T>(
        &self,
        job: JobId,
        actor: Actor,
        reason: CommandReason,
        act: OperatorCommand,
        look: impl FnOnce(&Coordinator, Result<CommandOutcome, CommandRefusal>) -> T,
    ) -> T {
        // A value that is refused is freed after the lock is.
        let _value = match &act {
            OperatorCommand::PutKey { value, .. } => Some(value.clone()),
            _ => None,
        };
        let mut state = self.lock_for_bulk_work();
        if let Some(why) = state.change_refusal() {
            let copy = state.durable.coordinator.snapshot();
            drop(state);
            return look(&copy, Err(CommandRefusal::NotRecordable(why)));
        }
        let mut applied = self.apply(&mut state, Input::Command { job, actor, reason, act }, None);
        let acted = applied.acted.take().unwrap_or(Err(CommandRefusal::NoSuchJob));
        let (copy, held_until) = (state.durable.coordinator.snapshot(), state.held_until());
        self.unlock_and_deliver(state, applied);
        self.wait_for_disk(held_until);
        if acted == Ok(CommandOutcome::JobDeleted) {
            self.job_changes.fetch_add(1, Ordering::Release);
        }
        look(&copy, acted)
    }

    /// Puts a finding of an observer into the order of events.
    pub fn record_finding(&self, job: JobId, note: FindingChange) {
        self.apply_input(self.lock(), Input::FindingChanged { job, note });
    }

    /// Puts a worker's report of failed transfers into the order of events.
    pub fn record_transfer_failure(&self, job: JobId, note: TransferFailure) {
        self.apply_input(self.lock(), Input::TransferFailed { job, note });
    }

    /// Answers the claim of a process on the task id of its identity.
    ///
    /// # Errors
    /// If the job is deleted, or too many claims wait.
    pub fn claim_task_id(&self, job: JobId, claim: TaskClaim) -> Result<ClaimAnswer, ClaimRefusal> {
        let mut state = self.lock();
        if let Some(why) = state.change_refusal() {
            return Err(ClaimRefusal::NotRecordable(why));
        }
        let mut applied = self.apply(&mut state, Input::ClaimTask { job, claim }, None);
        let (answer, held_until) = (applied.claimed.take(), state.held_until());
        self.unlock_and_deliver(state, applied);
        self.wait_for_disk(held_until);
        answer.unwrap_or(Err(ClaimRefusal::NoSuchJob))
    }

    /// Waits until all records below a number are on the disk, if answers must.
    fn wait_for_disk(&self, held_until: Option<u64>) {
        let (Some(until), Some(held)) = (held_until, self.held_answers.get()) else { return };
        let flavor = tokio::runtime::Handle::try_current().map(|runtime| runtime.runtime_flavor());
        if matches!(flavor, Ok(tokio::runtime::RuntimeFlavor::MultiThread)) {
            // Other tasks of this thread go on elsewhere.
            tokio::task::block_in_place(|| held.wait(until));
        } else {
            held.wait(until);
        }
    }
}
