//! Declares jobs within a bound on their number, and performs the commands of operators.
//!
//! The state machine decides whether a command is permitted. Begin at [`Engine::declare_job`] and
//! [`Engine::perform_command_and_read`].

use std::sync::atomic::Ordering;

use super::Engine;
use crate::clock;
use crate::coordination::{
    Actor, CommandOutcome, CommandReason, CommandRefusal, Coordinator, Input, JobId, JobName, JobSettings,
    OperatorCommand, ServiceIncarnation,
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
        if state.coordinator.job_named(name.as_str()).is_some() {
            return Err(DeclareError::Exists(name));
        }
        let most = self.jobs_max.load(Ordering::Relaxed);
        if state.coordinator.jobs().count() >= most {
            return Err(DeclareError::TooMany(most));
        }
        let job = state.coordinator.next_job_id();
        let incarnation = ServiceIncarnation(clock::random_nonzero().get());
        let settings = Box::new(settings);
        let input = Input::DeclareJob { job, name, settings, incarnation, actor };
        let applied = self.apply(&mut state, input, None);
        let taken = take(&state.coordinator);
        self.unlock_and_deliver(state, applied);
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
        let mut applied = self.apply(&mut state, Input::Command { job, actor, reason, act }, None);
        let acted = applied.acted.take().unwrap_or(Err(CommandRefusal::NoSuchJob));
        let copy = state.coordinator.snapshot();
        self.unlock_and_deliver(state, applied);
        if acted == Ok(CommandOutcome::JobDeleted) {
            self.job_changes.fetch_add(1, Ordering::Release);
        }
        look(&copy, acted)
    }
}
