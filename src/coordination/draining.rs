//! The drain: the preemption notice by which unmodified JAX programs agree on a step and save.
//!
//! It does not follow the agreement: the views read it from the store and its barrier. Begin at `Run::drain`.

use bytes::Bytes;

use super::actor::{Actor, Reason};
use super::command::{DrainRequest, Refusal};
use super::context::Cx;
use super::event::Change;
use super::ids::Timestamp;
use super::run::{PREEMPTION_NOTICE, Run};

impl Run {
    /// Leaves the notice for all tasks. `at`: when the machines will be gone.
    pub(super) fn drain(
        &mut self,
        cx: &mut Cx<'_>,
        actor: Actor,
        reason: &Reason,
        at: Option<Timestamp>,
    ) -> Result<(), Refusal> {
        if let Some(why) = self.not_running() {
            return Err(Refusal::NotRunning(why));
        }
        if let Some(notice) = self.store.get(PREEMPTION_NOTICE) {
            return Err(Refusal::DrainUnderWay(notice.at));
        }
        // The form in which JAX reads a time: RFC 3339 with an offset in figures.
        let at = at.unwrap_or(cx.now).to_string().replace('Z', "+00:00");
        self.insert(cx, PREEMPTION_NOTICE, Bytes::from(at), false, None).map_err(Refusal::Store)?;
        cx.event(Change::DrainRequested { actor: actor.clone() }, format!("requested by {actor}: {reason}"));
        self.drain = Some(DrainRequest { actor, reason: reason.clone() });
        Ok(())
    }
}
