//! The drain: the preemption notice by which unmodified JAX programs agree on a step and save.
//!
//! This module only writes the notice. `views/preemption.rs` reads the progress of the agreement from the store and
//! from the barrier. Begin at `Run::request_drain`.

use bytes::Bytes;

use super::actor::{Actor, CommandReason};
use super::command::{CommandRefusal, DrainRequest};
use super::context::TransitionContext;
use super::event::EventKind;
use super::ids::Timestamp;
use super::run::Run;
use super::store_calls::PREEMPTION_NOTICE;

impl Run {
    /// Writes the preemption notice for all tasks. `at`: the time at which the machines will be gone.
    pub(super) fn request_drain(
        &mut self,
        cx: &mut TransitionContext<'_>,
        actor: Actor,
        reason: &CommandReason,
        at: Option<Timestamp>,
    ) -> Result<(), CommandRefusal> {
        if let Some(why) = self.not_running_reason() {
            return Err(CommandRefusal::NotRunning(why));
        }
        if let Some(notice) = self.store.get(PREEMPTION_NOTICE) {
            return Err(CommandRefusal::DrainUnderWay(notice.at));
        }
        // JAX reads the time in this form: RFC 3339 with a numeric offset.
        let at = at.unwrap_or(cx.now).to_string().replace('Z', "+00:00");
        self.insert_store_value(cx, PREEMPTION_NOTICE, Bytes::from(at), false, None)
            .map_err(CommandRefusal::Store)?;
        cx.emit_event(
            EventKind::DrainRequested { actor: actor.clone() },
            format!("requested by {actor}: {reason}"),
        );
        self.drain = Some(DrainRequest { actor, reason: reason.clone() });
        Ok(())
    }
}
