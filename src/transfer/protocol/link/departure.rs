//! The handshake by which two sides end an unused connection. Neither side ends it alone, so no request is
//! lost by it.
//!
//! ```text
//!  asks ── Leave ──► asked                 asks: nothing is in flight here, may the connection end?
//!       ◄── Agree ── or Refuse             agrees: nor here, and nothing will be until your decision
//!       ── Gone ──►  or Stay               decides: it ends, or it was used meanwhile and stays
//!       ◄── Gone ──                        then both close it
//! ```
//!
//! The side that asked goes on using the connection as before, and checks again when it decides. The side
//! that agreed does not use it: requests of that time wait for the decision, and go on with this connection
//! or a new one. A question that is never answered therefore changes nothing, and a launch is never on
//! different connections on the two sides. The sides need not exchange numbers of launches: a number that is
//! taken and not launched is launched on the connection that exists by then, and one that was launched is a
//! group, and a side with a group neither agrees nor decides to end.
//!
//! Both sides may ask at once. Each answers the other's question and decides about its own, as if it were the
//! only one.
//!
//! Invariants:
//! 1. A side that agreed, or has sent `Gone`, launches and defines nothing: [`Link::keep`] refuses.
//! 2. When a side sends `Gone`, neither side has anything in flight or defined, and neither will have.
//! 3. A question has one answer, and an agreement one decision. Each side has one open question at most.

use super::message::{Output, Violation};
use super::state::Link;
use crate::protocol::frame::Kind;

impl<T: Clone> Link<T> {
    /// Prevents the end of the connection until [`Link::release`], because a request is about to prepare
    /// something. Returns false, and does nothing, if this side has agreed to the end.
    pub const fn keep(&mut self) -> bool {
        let usable = !self.departure.agreed && !self.departure.gone;
        self.departure.kept += usable as usize;
        usable
    }

    /// Releases one [`keep`](Self::keep).
    pub const fn release(&mut self) {
        self.departure.kept -= 1;
    }

    /// Returns whether the connection is unused, and not about to be used, as far as this side knows.
    pub fn is_unused(&self) -> bool {
        self.departure.kept == 0 && self.is_idle()
    }

    /// Returns whether this side has asked to end the connection, and has no answer yet.
    pub const fn is_asked(&self) -> bool {
        self.departure.asked
    }

    /// Returns whether this side has sent `Gone`.
    pub const fn is_gone(&self) -> bool {
        self.departure.gone
    }

    /// Asks the peer whether the connection may end, if it is unused and this side has no open question.
    /// [`Output::Refused`] or [`Output::Left`] follows; neither does if the connection was used meanwhile or
    /// the peer does not answer.
    pub fn ask_to_leave(&mut self) {
        if self.keep() {
            self.release();
            if !self.departure.asked && self.is_unused() {
                self.departure.asked = true;
                self.send(self.header(Kind::Leave), Vec::new());
            }
        }
    }

    /// Answers the peer's question whether the connection may end.
    pub(super) fn on_leave(&mut self) -> Result<(), Violation> {
        if self.departure.agreed || self.departure.gone {
            return Err(Violation("it asks again to leave, before it has decided"));
        }
        self.departure.agreed = self.is_unused();
        let answer = if self.departure.agreed { Kind::Agree } else { Kind::Refuse };
        self.send(self.header(answer), Vec::new());
        Ok(())
    }

    /// Decides, after the peer has agreed.
    pub(super) fn on_agree(&mut self) -> Result<(), Violation> {
        self.answered()?;
        self.departure.gone = self.is_unused();
        let decision = if self.departure.gone { Kind::Gone } else { Kind::Stay };
        self.send(self.header(decision), Vec::new());
        if self.departure.gone {
            self.outputs.push(Output::Left);
        }
        Ok(())
    }

    /// Reports that the peer uses the connection.
    pub(super) fn on_refuse(&mut self) -> Result<(), Violation> {
        self.answered()?;
        self.outputs.push(Output::Refused);
        Ok(())
    }

    fn answered(&mut self) -> Result<(), Violation> {
        if std::mem::take(&mut self.departure.asked) && !self.departure.gone {
            Ok(())
        } else {
            Err(Violation("it answers what was not asked"))
        }
    }

    /// Ends this side's agreement: the peer has decided that the connection stays.
    pub(super) fn on_stay(&mut self) -> Result<(), Violation> {
        if !std::mem::take(&mut self.departure.agreed) {
            return Err(Violation("it decides what was not agreed to"));
        }
        // This side's own question may have ended the connection already.
        if !self.departure.gone {
            self.outputs.push(Output::Stays);
        }
        Ok(())
    }

    /// Ends the connection: the peer has sent `Gone`.
    pub(super) fn on_gone(&mut self) -> Result<(), Violation> {
        if !self.departure.agreed && !self.departure.gone {
            return Err(Violation("it leaves without having asked"));
        }
        if !std::mem::replace(&mut self.departure.gone, true) {
            self.send(self.header(Kind::Gone), Vec::new());
        }
        self.outputs.push(Output::Ended);
        Ok(())
    }

    /// Returns whether nothing is in flight or defined here, as must hold once a side has sent `Gone`.
    #[cfg(any(test, feature = "fuzzing"))]
    pub fn departure_is_sound(&self) -> bool {
        let launched = self.groups.values().any(|group| group.local.is_some());
        (self.departure.agreed || self.departure.gone) && self.definitions.is_empty() && !launched
    }

    /// Asserts the invariants of this module.
    #[cfg(any(test, feature = "fuzzing"))]
    pub fn audit_departure(&self) {
        let super::state::Departure { kept, agreed, gone, .. } = self.departure;
        if agreed || gone {
            assert!(kept == 0 && self.departure_is_sound(), "it is used after it was let go of");
        }
    }
}
