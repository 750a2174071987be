//! The end of an unused connection. Neither side ends it alone, so no request is lost by it.
//!
//! ```text
//!  asks ── Leave ──► asked                 asks: nothing is under way here, may it end?
//!       ◄── Agree ── or Refuse             agrees: nor here, and nothing will be until I hear of you again
//!       ── Gone ──►  or Stay               decides: it is over, or it was used meanwhile and stays
//!       ◄── Gone ──                        then both close it
//! ```
//!
//! The side that asked goes on using the connection as before, and looks once more when it decides. The side that
//! agreed uses it no more: requests of that time wait for the decision, and go on this connection or on a new one. So a
//! question that is never answered changes nothing, and a launch is never on one connection here and on another one
//! there. Numbers of launches need not be told: a number that is taken and not launched is launched on whatever
//! connection there is by then, and one that was launched is a group, with which no side agrees or decides to go.
//!
//! Both may ask at once. Each answers the other's question and decides about its own, as if it were the only one.
//!
//! Invariants:
//! 1. A side that agreed, or said that it is gone, launches and defines nothing: [`Link::keep`] refuses.
//! 2. When a side says that it is gone, neither side has anything under way or defined, and neither will have.
//! 3. A question has one answer, and an agreement one decision. There is one question of each side at most.

use super::message::{Output, Violation};
use super::state::Link;
use crate::protocol::frame::Kind;

impl<T: Clone> Link<T> {
    /// Keeps it from ending until [`Link::release`]: a request is about to prepare something. Returns whether that is
    /// so: not once this side has agreed to its end.
    pub const fn keep(&mut self) -> bool {
        let usable = !self.departure.agreed && !self.departure.gone;
        self.departure.kept += usable as usize;
        usable
    }

    /// Lets it end again, for one that [kept](Self::keep) it.
    pub const fn release(&mut self) {
        self.departure.kept -= 1;
    }

    /// Returns whether it is unused, and not about to be used, as far as this side knows.
    pub fn is_unused(&self) -> bool {
        self.departure.kept == 0 && self.is_idle()
    }

    /// Returns whether this side has asked whether it may end, and has no answer.
    pub const fn is_asked(&self) -> bool {
        self.departure.asked
    }

    /// Returns whether this side has said that it is over.
    pub const fn is_gone(&self) -> bool {
        self.departure.gone
    }

    /// Asks whether it may end, if it is unused and that is not asked already. [`Output::Refused`] or
    /// [`Output::Left`] follows, or nothing: then it was used meanwhile, or the peer is silent.
    pub fn ask_to_leave(&mut self) {
        if self.keep() {
            self.release();
            if !self.departure.asked && self.is_unused() {
                self.departure.asked = true;
                self.send(self.header(Kind::Leave), Vec::new());
            }
        }
    }

    /// Answers the peer, which asks whether it may end.
    pub(super) fn on_leave(&mut self) -> Result<(), Violation> {
        if self.departure.agreed || self.departure.gone {
            return Err(Violation("it asks again to leave, before it has decided"));
        }
        self.departure.agreed = self.is_unused();
        let answer = if self.departure.agreed { Kind::Agree } else { Kind::Refuse };
        self.send(self.header(answer), Vec::new());
        Ok(())
    }

    /// Decides, now that the peer agrees that it ends.
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

    /// Notes that the peer uses it.
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

    /// Notes that the peer has decided to stay.
    pub(super) fn on_stay(&mut self) -> Result<(), Violation> {
        if !std::mem::take(&mut self.departure.agreed) {
            return Err(Violation("it decides what was not agreed to"));
        }
        // Unless it is over by this side's own question.
        if !self.departure.gone {
            self.outputs.push(Output::Stays);
        }
        Ok(())
    }

    /// Gives it up, as the peer has.
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

    /// Returns whether nothing is under way or defined here, for when one side is gone.
    #[cfg(any(test, feature = "fuzzing"))]
    pub fn departure_is_sound(&self) -> bool {
        let launched = self.groups.values().any(|group| group.local.is_some());
        (self.departure.agreed || self.departure.gone) && self.definitions.is_empty() && !launched
    }

    /// Checks what must always hold.
    #[cfg(any(test, feature = "fuzzing"))]
    pub fn audit_departure(&self) {
        let super::state::Departure { kept, agreed, gone, .. } = self.departure;
        if agreed || gone {
            assert!(kept == 0 && self.departure_is_sound(), "it is used after it was let go of");
        }
    }
}
