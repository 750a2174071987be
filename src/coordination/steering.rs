//! The dispatch of an operator's command to its rule.
//!
//! Tasks send requests, operators send commands. A command is one input ([`Input::Act`](super::input::Input::Act):
//! actor, reason, command) with one answer ([`Effect::Acted`]). A refused command changes nothing. A command that
//! is done makes an event with the actor and the reason; `http` writes the audit line of both. Begin at `Job::act`.

use super::actor::{Actor, Reason};
use super::command::{Act, Done, Refusal};
use super::event::Change;
use super::ids::Timestamp;
use super::input::Effect;
use super::job::{Job, within};
use super::run::Run;
use super::store::{normalise, shown};
use super::view::RunState;

impl Job {
    /// Performs an act, except the end of the job itself, which is the coordinator's.
    pub fn act(
        &mut self,
        now: Timestamp,
        effects: &mut Vec<Effect>,
        actor: Actor,
        reason: Reason,
        act: Act,
    ) -> Result<Done, Refusal> {
        match act {
            Act::Exclude { target, expires_in, end_run } => {
                self.exclude(now, effects, actor, reason, target, expires_in, end_run).map(Done::Excluded)
            }
            Act::Readmit { exclusion } => {
                self.readmit(now, effects, actor, reason, exclusion).map(|()| Done::Readmitted)
            }
            Act::Drain { at } => {
                let asked = within!(self, now, effects, |run, cx| run.drain(cx, actor, &reason, at));
                asked.map(|()| Done::DrainRequested)
            }
            Act::PutKey { key, value, overwrite } => within!(self, now, effects, |run, cx| {
                let written = run.insert(cx, &key, value, overwrite, None).map_err(Refusal::Store);
                written.map(|_| {
                    let key = shown(normalise(&key).as_ref()).into_owned();
                    let text = format!("{key} was written by {actor}: {reason}");
                    cx.event(Change::KeyWritten { key, actor }, text);
                    Done::KeyWritten
                })
            }),
            Act::DeleteKey { key } => within!(self, now, effects, |run, cx| {
                cx.discard(run.store.delete(&key));
                let key = shown(normalise(&key).as_ref()).into_owned();
                let text = format!("{key} was removed by {actor}: {reason}");
                cx.event(Change::KeyDeleted { key, actor }, text);
                Ok(Done::KeyDeleted)
            }),
            Act::Configure(change) => self.configure(now, effects, actor, &reason, *change),
            Act::DeleteJob { force } => self.check_deletion(force).map(|()| Done::JobDeleted),
        }
    }

    /// Whether the job may be deleted.
    fn check_deletion(&self, force: bool) -> Result<(), Refusal> {
        match self.run.connected {
            0 => Ok(()),
            _ if force => Ok(()),
            connected => Err(Refusal::TasksConnected(connected)),
        }
    }
}

impl Run {
    /// Why there is nothing to drain, if there is nothing.
    pub(super) fn not_running(&self) -> Option<String> {
        match self.state() {
            RunState::Running => None,
            RunState::Forming => Some(format!("run {} still waits for its tasks to register", self.number)),
            state => Some(format!("run {} is over ({state})", self.number)),
        }
    }
}
