//! Performs commands on jobs, for operators and for automatic rules. For each command, this module takes the lock of
//! the state machine once and writes one line of the audit. It also links the span of an exclusion to the trace of
//! the request.
//!
//! The state machine decides whether a command is refused. Begin at [`AuditedOperations::perform_audited`].

use std::sync::Arc;

use super::findings::AutomaticExclusion;
use super::{ActorContext, AuditLog, AuditOutcome};
use crate::coordination::{
    Actor, ActorOrigin, CommandOutcome, CommandReason, CommandRefusal, ExclusionTarget, JobId, JobName,
    JobReader, JobSettings, OperatorCommand,
};
use crate::engine::{DeclareError, Engine};
use crate::telemetry::traces::Traces;
use crate::text::is_safe_single_line;

/// One command upon a job.
pub struct JobOperation<'a> {
    /// The job.
    pub job: JobId,
    /// Its name, for the audit.
    pub name: &'a JobName,
    /// The author.
    pub by: &'a ActorContext,
    /// The reason that the author gave.
    pub reason: CommandReason,
    /// The command.
    pub command: OperatorCommand,
    /// The subject of the audit line. `None`: derived from the command and the job.
    pub subject: Option<String>,
}

/// The commands upon jobs, with their audit and traces.
pub struct AuditedOperations {
    /// The engine, which holds the state of all jobs.
    pub engine: Arc<Engine>,
    /// The audit log.
    pub audit: Arc<AuditLog>,
    /// The traces, if they are exported.
    pub traces: Option<Arc<Traces>>,
}

impl AuditedOperations {
    /// Applies a command to a job, records its outcome in the audit, and returns what `view` reads of the job. `view`
    /// sees the job as the command left it, whatever happens to it later; `None` if the command deleted it.
    ///
    /// # Errors
    /// Returns the refusal if the state machine refuses the command; then nothing has changed.
    pub fn perform_audited<T>(
        &self,
        operation: JobOperation<'_>,
        view: impl FnOnce(Option<JobReader<'_>>, CommandOutcome) -> T,
    ) -> Result<T, CommandRefusal> {
        let JobOperation { job, name, by, reason, command, subject } = operation;
        let (verb, of_command) = (audit_verb(&command), command.clone());
        let actor = by.actor.clone();
        self.engine.perform_command_and_read(job, actor, reason.clone(), command, |core, done| {
            if let (Some(traces), Some(parent), Ok(CommandOutcome::Excluded(id))) =
                (&self.traces, &by.parent, &done)
            {
                traces.set_parent_span_of_exclusion(job, *id, parent.clone());
            }
            let (outcome, detail) = match &done {
                Ok(CommandOutcome::Excluded(id)) => (AuditOutcome::Done, format!("exclusion {id}")),
                Ok(_) => (AuditOutcome::Done, String::new()),
                Err(refusal) => (AuditOutcome::Refused, refusal.to_string()),
            };
            let subject = subject.unwrap_or_else(|| audit_subject(&of_command, name, core.job(job)));
            let entry = by.create_audit_entry(Some(name.clone()), verb, subject, Some(reason));
            self.audit.record(self.engine.clock().now(), entry, outcome, detail);
            Ok(view(core.job(job), done?))
        })
    }

    /// Creates a job, records that in the audit, and returns what `view` reads of the new job.
    ///
    /// # Errors
    /// Returns [`DeclareError`] if a job of that name exists or there are too many jobs.
    pub fn create_job<T>(
        &self,
        name: &JobName,
        settings: JobSettings,
        by: &ActorContext,
        reason: CommandReason,
        view: impl FnOnce(Option<JobReader<'_>>) -> T,
    ) -> Result<T, DeclareError> {
        let tasks = settings.tasks;
        let made = self
            .engine
            .declare_job_and_read(name.clone(), settings, by.actor.clone(), |core, job| view(core.job(job)));
        let (outcome, detail) = match &made {
            Ok(_) => (AuditOutcome::Done, format!("{tasks} tasks")),
            Err(refusal) => (AuditOutcome::Refused, refusal.to_string()),
        };
        let entry =
            by.create_audit_entry(Some(name.clone()), "create-job", format!("job {name}"), Some(reason));
        self.audit.record(self.engine.clock().now(), entry, outcome, detail);
        made
    }

    /// Applies the exclusion that a rule of a job asks for, and records its outcome in the audit.
    pub fn apply_automatic_exclusion(&self, remedy: AutomaticExclusion) {
        let AutomaticExclusion { job, name, rule, task, expires_in, reason } = remedy;
        let actor = Actor { who: rule.name().into(), address: None, means: ActorOrigin::Rule };
        let Ok(reason) = CommandReason::try_from(reason_from_finding_summary(&reason)) else { return };
        let command = OperatorCommand::Exclude {
            target: ExclusionTarget::Task(task),
            expires_in: Some(expires_in),
            end_run: false,
        };
        let by = &ActorContext::new(actor, None, None);
        // A refusal is in the audit.
        let _ = self.perform_audited(
            JobOperation { job, name: &name, by, reason, command, subject: None },
            |_, _| (),
        );
    }
}

/// Returns the verb of a command in the audit.
fn audit_verb(command: &OperatorCommand) -> &'static str {
    match command {
        OperatorCommand::Exclude { .. } => "exclude",
        OperatorCommand::Readmit { .. } => "readmit",
        OperatorCommand::Drain { .. } => "drain",
        OperatorCommand::PutKey { .. } => "put-key",
        OperatorCommand::DeleteKey { .. } => "delete-key",
        OperatorCommand::ForgetTaskOwners { .. } => "forget-task-owners",
        OperatorCommand::Configure(_) => "change-settings",
        OperatorCommand::DeleteJob { .. } => "delete-job",
    }
}

/// Returns the subject of a command in the audit; `after` is the job as the command left it.
fn audit_subject(command: &OperatorCommand, name: &JobName, after: Option<JobReader<'_>>) -> String {
    match command {
        OperatorCommand::Exclude { target, .. } => target.to_string(),
        OperatorCommand::Readmit { exclusion: id } => {
            let all = after.map(|job| job.exclusions()).unwrap_or_default();
            let found = all.iter().find(|exclusion| exclusion.id == *id);
            let target = found.map_or_else(String::new, |exclusion| format!(" ({})", exclusion.target));
            format!("exclusion {id}{target}")
        }
        OperatorCommand::Drain { at } => at.map_or_else(|| "at once".to_owned(), |at| format!("before {at}")),
        OperatorCommand::PutKey { key, .. } | OperatorCommand::DeleteKey { key } => {
            format!("key {}", String::from_utf8_lossy(key))
        }
        OperatorCommand::ForgetTaskOwners { task } => task
            .map_or_else(|| "owners of all task ids".to_owned(), |task| format!("owner of task id {task}")),
        OperatorCommand::Configure(_) => format!("job {name}"),
        OperatorCommand::DeleteJob { force } => {
            format!("job {name}{}", if *force { " by force" } else { "" })
        }
    }
}

/// Returns the summary of a finding as a reason: one line of limited length.
pub(super) fn reason_from_finding_summary(text: &str) -> String {
    let safe = |letter: char| is_safe_single_line(letter.encode_utf8(&mut [0; 4]));
    let line: String = text.chars().map(|letter| if safe(letter) { letter } else { '?' }).collect();
    line.get(..line.floor_char_boundary(CommandReason::BYTES_MAX)).unwrap_or_default().to_owned()
}
