//! Passes each command of an operator to the function that performs it. The deletion of a job is only checked here;
//! `coordinator.rs` performs it.
//!
//! A command is one input ([`Input::Command`](super::input::Input::Command)) with an actor and a reason, and gets one
//! answer ([`Effect::CommandDone`]). A refused command changes nothing. A performed command causes an event with the
//! actor and the reason. `service::AuditedOperations` writes an audit line for every command, performed or refused.
//! Begin at `Job::perform_command`.

use super::actor::{Actor, CommandReason};
use super::command::{CommandOutcome, CommandRefusal, OperatorCommand};
use super::event::EventKind;
use super::ids::Timestamp;
use super::input::Effect;
use super::job::{Job, with_run};
use super::key_value_store::{display_key, normalise_key};

impl Job {
    /// Performs a command, except the deletion of the job, which the coordinator does.
    pub fn perform_command(
        &mut self,
        now: Timestamp,
        effects: &mut Vec<Effect>,
        actor: Actor,
        reason: CommandReason,
        act: OperatorCommand,
    ) -> Result<CommandOutcome, CommandRefusal> {
        match act {
            OperatorCommand::Exclude { target, expires_in, end_run } => self
                .exclude(now, effects, actor, reason, target, expires_in, end_run)
                .map(CommandOutcome::Excluded),
            OperatorCommand::Readmit { exclusion } => {
                self.readmit(now, effects, actor, reason, exclusion).map(|()| CommandOutcome::Readmitted)
            }
            OperatorCommand::Drain { at } => {
                let asked =
                    with_run!(self, now, effects, |run, cx| run.request_drain(cx, actor, &reason, at));
                asked.map(|()| CommandOutcome::DrainRequested)
            }
            OperatorCommand::PutKey { key, value, overwrite } => with_run!(self, now, effects, |run, cx| {
                let written =
                    run.insert_store_value(cx, &key, value, overwrite, None).map_err(CommandRefusal::Store);
                written.map(|_| {
                    let key = display_key(normalise_key(&key).as_ref()).into_owned();
                    let text = format!("{key} was written by {actor}: {reason}");
                    cx.emit_event(EventKind::KeyWritten { key, actor }, text);
                    CommandOutcome::KeyWritten
                })
            }),
            OperatorCommand::DeleteKey { key } => with_run!(self, now, effects, |run, cx| {
                cx.defer_free(run.store.delete_subtree(&key));
                let key = display_key(normalise_key(&key).as_ref()).into_owned();
                let text = format!("{key} was removed by {actor}: {reason}");
                cx.emit_event(EventKind::KeyDeleted { key, actor }, text);
                Ok(CommandOutcome::KeyDeleted)
            }),
            OperatorCommand::ForgetTaskOwners { task } => self
                .forget_task_owners(now, effects, actor, &reason, task)
                .map(CommandOutcome::TaskOwnersForgotten),
            OperatorCommand::Configure(change) => self.change_settings(now, effects, actor, &reason, *change),
            OperatorCommand::DeleteJob { force } => {
                self.check_deletion(force).map(|()| CommandOutcome::JobDeleted)
            }
        }
    }

    /// Checks whether the job may be deleted.
    fn check_deletion(&self, force: bool) -> Result<(), CommandRefusal> {
        match self.run.connected_tasks {
            0 => Ok(()),
            _ if force => Ok(()),
            connected => Err(CommandRefusal::TasksConnected(connected)),
        }
    }
}
