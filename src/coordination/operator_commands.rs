//! The dispatch of an operator's command to its rule.
//!
//! Tasks send requests, operators send commands. A command is one input
//! ([`Input::Command`](super::input::Input::Command): actor, reason, command) with one answer
//! ([`Effect::CommandDone`]). A refused command changes nothing. A performed command makes an event with the
//! actor and the reason; `http` writes the audit line of both. Begin at `Job::act`.

use super::actor::{Actor, Reason};
use super::command::{CommandOutcome, CommandRefusal, OperatorCommand};
use super::event::EventKind;
use super::ids::Timestamp;
use super::input::Effect;
use super::job::{Job, with_run};
use super::run::Run;
use super::store::{display_key, normalise};
use super::view::RunState;

impl Job {
    /// Performs a command, except the deletion of the job, which the coordinator does.
    pub fn act(
        &mut self,
        now: Timestamp,
        effects: &mut Vec<Effect>,
        actor: Actor,
        reason: Reason,
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
                let written = run.insert(cx, &key, value, overwrite, None).map_err(CommandRefusal::Store);
                written.map(|_| {
                    let key = display_key(normalise(&key).as_ref()).into_owned();
                    let text = format!("{key} was written by {actor}: {reason}");
                    cx.emit(EventKind::KeyWritten { key, actor }, text);
                    CommandOutcome::KeyWritten
                })
            }),
            OperatorCommand::DeleteKey { key } => with_run!(self, now, effects, |run, cx| {
                cx.discard(run.store.delete(&key));
                let key = display_key(normalise(&key).as_ref()).into_owned();
                let text = format!("{key} was removed by {actor}: {reason}");
                cx.emit(EventKind::KeyDeleted { key, actor }, text);
                Ok(CommandOutcome::KeyDeleted)
            }),
            OperatorCommand::Configure(change) => self.configure(now, effects, actor, &reason, *change),
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

impl Run {
    /// Returns why there is no run to drain, if there is none.
    pub(super) fn not_running_reason(&self) -> Option<String> {
        match self.state() {
            RunState::Running => None,
            RunState::Forming => Some(format!("run {} still waits for its tasks to register", self.number)),
            state => Some(format!("run {} is over ({state})", self.number)),
        }
    }
}
