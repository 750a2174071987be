//! The handshake by which two sides end an unused connection. Neither side ends it alone, so no request is lost.
//!
//! ```text
//!  asks ── Leave ──► asked        asks: nothing is in flight here, may the connection end?
//!       ◄── Agree ── or Refuse    agrees: nothing is in flight here, and nothing will be until you decide
//!       ── Gone ──►  or Stay      decides: it ends; or it was used meanwhile, and stays
//!       ◄── Gone ──               confirms: then both sides close it
//! ```
//!
//! While the side that asked waits for the answer, it uses the connection as before. So a question that is never
//! answered changes nothing. When the answer arrives, the side checks again whether the connection is unused, and
//! decides. The side that agreed does not use the connection until the decision: its new requests wait, and then use
//! this connection or a new one.
//!
//! The two parts of a group never go to different connections, although the sides exchange no numbers of launches
//! here. If a part has its number but is not launched yet, it uses the connection that exists when it is launched. If
//! a part is launched, its side keeps the group, even before the other part is launched. A side that keeps a group
//! neither agrees to end the connection nor decides to end it.
//!
//! Both sides may ask at the same time. Each then answers the other side's question, and decides about its own
//! question as if there were no other. The clique cache decides when to ask. Begin at [`LinkSide::request_leave`].
//!
//! Invariants:
//! 1. A side that has agreed or has sent `Gone` launches nothing and defines no list of transfers:
//!    [`LinkSide::try_lease`] refuses.
//! 2. When a side sends `Gone`, neither side has a launch in flight or a list of transfers, and neither will have one
//!    on this connection.
//! 3. A question has one answer, and an agreement one decision. Each side has one open question at most.

use super::interface::{LinkOutput, ProtocolViolation};
use super::link_side::LinkSide;
use crate::protocol::frame::FrameKind;

impl<T: Clone> LinkSide<T> {
    /// Prevents the end of the connection until [`LinkSide::release_lease`], because a request is about to prepare
    /// something. Returns false, and does nothing, if this side has agreed to the end.
    pub const fn try_lease(&mut self) -> bool {
        let usable = !self.departure.agreed && !self.departure.gone;
        self.departure.kept += usable as usize;
        usable
    }

    /// Releases one [`try_lease`](Self::try_lease).
    pub const fn release_lease(&mut self) {
        self.departure.kept -= 1;
    }

    /// Returns whether the connection is unused, and not about to be used, as far as this side knows.
    pub fn is_unused(&self) -> bool {
        // Nothing is defined and no group exists, on either side.
        let idle = self.definitions.is_empty() && self.remote.is_empty() && self.groups.is_empty();
        self.departure.kept == 0 && idle
    }

    /// Returns whether this side has asked to end the connection, and has no answer yet.
    pub const fn has_requested_leave(&self) -> bool {
        self.departure.asked
    }

    /// Returns whether this side has sent `Gone`.
    pub const fn has_left(&self) -> bool {
        self.departure.gone
    }

    /// Asks the peer whether the connection may end, if it is unused and this side has no open question.
    /// [`LinkOutput::Refused`] or [`LinkOutput::Left`] follows; neither does if the connection was used meanwhile or
    /// the peer does not answer.
    pub fn request_leave(&mut self) {
        if self.try_lease() {
            self.release_lease();
            if !self.departure.asked && self.is_unused() {
                self.departure.asked = true;
                self.queue_control_frame(self.new_header(FrameKind::Leave), Vec::new());
            }
        }
    }

    /// Answers the peer's question whether the connection may end.
    pub(super) fn on_leave(&mut self) -> Result<(), ProtocolViolation> {
        if self.departure.agreed || self.departure.gone {
            return Err(ProtocolViolation("it asks again to leave, before it has decided"));
        }
        self.departure.agreed = self.is_unused();
        let answer = if self.departure.agreed { FrameKind::Agree } else { FrameKind::Refuse };
        self.queue_control_frame(self.new_header(answer), Vec::new());
        Ok(())
    }

    /// Decides, after the peer has agreed.
    pub(super) fn on_leave_agreed(&mut self) -> Result<(), ProtocolViolation> {
        self.clear_leave_request()?;
        self.departure.gone = self.is_unused();
        let decision = if self.departure.gone { FrameKind::Gone } else { FrameKind::Stay };
        self.queue_control_frame(self.new_header(decision), Vec::new());
        if self.departure.gone {
            self.outputs.push(LinkOutput::Left);
        }
        Ok(())
    }

    /// Reports that the peer uses the connection.
    pub(super) fn on_leave_refused(&mut self) -> Result<(), ProtocolViolation> {
        self.clear_leave_request()?;
        self.outputs.push(LinkOutput::Refused);
        Ok(())
    }

    fn clear_leave_request(&mut self) -> Result<(), ProtocolViolation> {
        if std::mem::take(&mut self.departure.asked) && !self.departure.gone {
            Ok(())
        } else {
            Err(ProtocolViolation("it answers what was not asked"))
        }
    }

    /// Ends this side's agreement: the peer has decided that the connection stays.
    pub(super) fn on_leave_withdrawn(&mut self) -> Result<(), ProtocolViolation> {
        if !std::mem::take(&mut self.departure.agreed) {
            return Err(ProtocolViolation("it decides what was not agreed to"));
        }
        // This side's own question may have ended the connection already.
        if !self.departure.gone {
            self.outputs.push(LinkOutput::Stays);
        }
        Ok(())
    }

    /// Ends the connection: the peer has sent `Gone`.
    pub(super) fn on_peer_left(&mut self) -> Result<(), ProtocolViolation> {
        if !self.departure.agreed && !self.departure.gone {
            return Err(ProtocolViolation("it leaves without having asked"));
        }
        if !std::mem::replace(&mut self.departure.gone, true) {
            self.queue_control_frame(self.new_header(FrameKind::Gone), Vec::new());
        }
        self.outputs.push(LinkOutput::Ended);
        Ok(())
    }

    /// Returns whether nothing is in flight or defined here, as must hold once a side has sent `Gone`.
    #[cfg(any(test, feature = "fuzzing"))]
    pub fn is_idle_while_leaving(&self) -> bool {
        let launched = self.groups.values().any(|group| group.local.is_some());
        (self.departure.agreed || self.departure.gone) && self.definitions.is_empty() && !launched
    }

    /// Asserts the invariants of this module.
    #[cfg(any(test, feature = "fuzzing"))]
    pub fn assert_leave_invariants(&self) {
        let super::link_side::LeaveState { kept, agreed, gone, .. } = self.departure;
        if agreed || gone {
            assert!(kept == 0 && self.is_idle_while_leaving(), "it is used after it was let go of");
        }
    }
}
