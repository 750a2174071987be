//! Performs commands upon jobs, for operators and for rules alike: one step under the engine's lock, one line of the
//! audit, a link to the trace of the request.
//!
//! It contains no rule of coordination: the state machine refuses. Begin at [`Operations::act`].

use std::sync::Arc;

use super::findings::Remedy;
use super::{ActorContext, AuditLog, AuditOutcome};
use crate::coordination::{
    Actor, ActorOrigin, CommandOutcome, CommandRefusal, ExclusionTarget, JobId, JobName, JobReader,
    JobSettings, OperatorCommand, Reason,
};
use crate::engine::{DeclareError, Engine};
use crate::telemetry::traces::Traces;
use crate::text::is_safe_to_show;

/// One command upon a job.
pub struct Operation<'a> {
    /// The job.
    pub job: JobId,
    /// Its name, for the audit.
    pub name: &'a JobName,
    /// The author.
    pub by: &'a ActorContext,
    /// Why.
    pub reason: Reason,
    /// What.
    pub command: OperatorCommand,
    /// Upon what, for the audit, where the command alone does not say it as its author does.
    pub subject: Option<String>,
}

/// What changes jobs, and writes down who did.
pub struct Operations {
    /// The state.
    pub engine: Arc<Engine>,
    /// Who did what.
    pub audit: Arc<AuditLog>,
    /// Where traces go, if somebody wants them.
    pub traces: Option<Arc<Traces>>,
}

impl Operations {
    /// Acts upon a job, writes down what came of it, and returns what `view` reads of it. `view` sees the job as the
    /// command left it, whatever happens to it later; `None` if the command deleted it.
    ///
    /// # Errors
    /// If the command is refused; nothing has changed then.
    pub fn act<T>(
        &self,
        operation: Operation<'_>,
        view: impl FnOnce(Option<JobReader<'_>>, CommandOutcome) -> T,
    ) -> Result<T, CommandRefusal> {
        let Operation { job, name, by, reason, command, subject } = operation;
        let (verb, of_command) = (verb(&command), command.clone());
        let actor = by.actor.clone();
        self.engine.act_and_read(job, actor, reason.clone(), command, |core, done| {
            if let (Some(traces), Some(parent), Ok(CommandOutcome::Excluded(id))) =
                (&self.traces, &by.parent, &done)
            {
                traces.link_exclusion(job, *id, parent.clone());
            }
            let (outcome, detail) = match &done {
                Ok(CommandOutcome::Excluded(id)) => (AuditOutcome::Done, format!("exclusion {id}")),
                Ok(_) => (AuditOutcome::Done, String::new()),
                Err(refusal) => (AuditOutcome::Refused, refusal.to_string()),
            };
            let subject = subject.unwrap_or_else(|| subject_of(&of_command, name, core.job(job)));
            let entry = by.audit_entry(Some(name.clone()), verb, subject, Some(reason));
            self.audit.record(self.engine.clock().now(), entry, outcome, detail);
            Ok(view(core.job(job), done?))
        })
    }

    /// Makes a job, writes that down, and returns what `view` reads of the new job.
    ///
    /// # Errors
    /// If there is a job of that name, or there are too many.
    pub fn create_job<T>(
        &self,
        name: &JobName,
        settings: JobSettings,
        by: &ActorContext,
        reason: Reason,
        view: impl FnOnce(Option<JobReader<'_>>) -> T,
    ) -> Result<T, DeclareError> {
        let tasks = settings.tasks;
        let made = self
            .engine
            .declare_and_read(name.clone(), settings, by.actor.clone(), |core, job| view(core.job(job)));
        let (outcome, detail) = match &made {
            Ok(_) => (AuditOutcome::Done, format!("{tasks} tasks")),
            Err(refusal) => (AuditOutcome::Refused, refusal.to_string()),
        };
        let entry = by.audit_entry(Some(name.clone()), "create-job", format!("job {name}"), Some(reason));
        self.audit.record(self.engine.clock().now(), entry, outcome, detail);
        made
    }

    /// Does what a rule of a job asks for, and writes down what came of it.
    pub fn apply_remedy(&self, remedy: Remedy) {
        let Remedy { job, name, rule, task, expires_in, reason } = remedy;
        let actor = Actor { who: rule.name().into(), address: None, means: ActorOrigin::Rule };
        let Ok(reason) = Reason::try_from(reason_from_text(&reason)) else { return };
        let command = OperatorCommand::Exclude {
            target: ExclusionTarget::Task(task),
            expires_in: Some(expires_in),
            end_run: false,
        };
        let by = &ActorContext::new(actor, None, None);
        // A refusal is in the audit.
        let _ = self.act(Operation { job, name: &name, by, reason, command, subject: None }, |_, _| ());
    }
}

/// What a command does, in the word of the audit.
fn verb(command: &OperatorCommand) -> &'static str {
    match command {
        OperatorCommand::Exclude { .. } => "exclude",
        OperatorCommand::Readmit { .. } => "readmit",
        OperatorCommand::Drain { .. } => "drain",
        OperatorCommand::PutKey { .. } => "put-key",
        OperatorCommand::DeleteKey { .. } => "delete-key",
        OperatorCommand::Configure(_) => "change-settings",
        OperatorCommand::DeleteJob { .. } => "delete-job",
    }
}

/// Upon what a command is, in the words of the audit; `after` is the job as the command left it.
fn subject_of(command: &OperatorCommand, name: &JobName, after: Option<JobReader<'_>>) -> String {
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
        OperatorCommand::Configure(_) => format!("job {name}"),
        OperatorCommand::DeleteJob { force } => {
            format!("job {name}{}", if *force { " by force" } else { "" })
        }
    }
}

/// What was found, as the reason of an act: one line of limited length.
fn reason_from_text(text: &str) -> String {
    let safe = |letter: char| is_safe_to_show(letter.encode_utf8(&mut [0; 4]));
    let line: String = text.chars().map(|letter| if safe(letter) { letter } else { '?' }).collect();
    line.get(..line.floor_char_boundary(Reason::BYTES_MAX)).unwrap_or_default().to_owned()
}
