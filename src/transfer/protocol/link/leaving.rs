//! Whether a connection may end because nobody uses it. Nothing is lost by it, so nobody ends it alone.
//!
//! ```text
//!  asks ── Leave ──► asked                 asks: nothing is under way here, may it end?
//!       ◄── Agree ── or Refuse             agrees: nor here, and nothing will be until I hear of you again
//!       ── Gone ──►  or Stay               decides: it is over, or it was used meanwhile and stays
//!       ◄── Gone ──                        then both close it
//! ```
//!
//! Whoever asked goes on using the connection as before, and looks once more when it decides. Whoever agreed uses it no
//! more: what is asked for meanwhile waits for the decision, and goes on this connection or on a new one. So a question
//! that is never answered changes nothing, and a launch is never on one connection here and on another one there.
//! Numbers of launches need not be told: a number that is taken and not launched is launched on whatever connection there
//! is by then, and one that was launched is a group, with which no side agrees or decides to go.
//!
//! Both may ask at once. Each answers the other's question and decides about its own, as if it were the only one.
//!
//! Invariants:
//! 1. A side that agreed, or said that it is gone, launches and defines nothing: [`Link::keep`] refuses.
//! 2. When a side says that it is gone, neither side has anything under way or defined, and neither will have.
//! 3. A question has one answer, and an agreement one decision. There is one question of each side at most.

use crate::protocol::frame::Kind;
use crate::protocol::link::{Link, Output, Violation};

/// Who uses a link, and what was said about its end.
#[derive(Debug, Default)]
pub struct Leaving {
    /// How many are about to prepare something on it.
    kept: usize,
    /// This side asked, and has no answer.
    asked: bool,
    /// This side agreed, and knows of no decision.
    agreed: bool,
    /// This side has said that it is over.
    gone: bool,
}

impl<T: Clone> Link<T> {
    /// Somebody is about to prepare something: it does not end until [`Link::release`]. Whether that is so: not once
    /// this side has agreed to its end.
    pub const fn keep(&mut self) -> bool {
        let usable = !self.leaving.agreed && !self.leaving.gone;
        self.leaving.kept += usable as usize;
        usable
    }

    /// Whoever kept it has prepared what they wanted to.
    pub const fn release(&mut self) {
        self.leaving.kept -= 1;
    }

    /// Whether nobody uses it or is about to, as far as this side knows.
    pub fn is_unused(&self) -> bool {
        self.leaving.kept == 0 && self.is_idle()
    }

    /// Whether this side has asked whether it may end, and has no answer.
    pub const fn is_asked(&self) -> bool {
        self.leaving.asked
    }

    /// Whether this side has said that it is over.
    pub const fn is_gone(&self) -> bool {
        self.leaving.gone
    }

    /// Asks whether it may end, if nobody uses it and that is not asked already. [`Output::Refused`] or
    /// [`Output::Left`] follows, or nothing: then it was used meanwhile, or the peer is silent.
    pub fn ask_to_leave(&mut self) {
        if self.keep() {
            self.release();
            if !self.leaving.asked && self.is_unused() {
                self.leaving.asked = true;
                self.tell(self.header(Kind::Leave), Vec::new());
            }
        }
    }

    /// The peer asks whether it may end.
    pub(crate) fn on_leave(&mut self) -> Result<(), Violation> {
        if self.leaving.agreed || self.leaving.gone {
            return Err(Violation("it asks again to leave, before it has decided"));
        }
        self.leaving.agreed = self.is_unused();
        let answer = if self.leaving.agreed { Kind::Agree } else { Kind::Refuse };
        self.tell(self.header(answer), Vec::new());
        Ok(())
    }

    /// The peer agrees that it ends.
    pub(crate) fn on_agree(&mut self) -> Result<(), Violation> {
        self.answered()?;
        self.leaving.gone = self.is_unused();
        let decision = if self.leaving.gone { Kind::Gone } else { Kind::Stay };
        self.tell(self.header(decision), Vec::new());
        if self.leaving.gone {
            self.outputs.push(Output::Left);
        }
        Ok(())
    }

    /// The peer uses it.
    pub(crate) fn on_refuse(&mut self) -> Result<(), Violation> {
        self.answered()?;
        self.outputs.push(Output::Refused);
        Ok(())
    }

    fn answered(&mut self) -> Result<(), Violation> {
        if std::mem::take(&mut self.leaving.asked) && !self.leaving.gone {
            Ok(())
        } else {
            Err(Violation("it answers what was not asked"))
        }
    }

    /// The peer has decided to stay.
    pub(crate) fn on_stay(&mut self) -> Result<(), Violation> {
        if !std::mem::take(&mut self.leaving.agreed) {
            return Err(Violation("it decides what nobody agreed to"));
        }
        // Unless it is over by this side's own question.
        if !self.leaving.gone {
            self.outputs.push(Output::Stays);
        }
        Ok(())
    }

    /// The peer has let go of it, and so does this side.
    pub(crate) fn on_gone(&mut self) -> Result<(), Violation> {
        if !self.leaving.agreed && !self.leaving.gone {
            return Err(Violation("it leaves without having asked"));
        }
        if !std::mem::replace(&mut self.leaving.gone, true) {
            self.tell(self.header(Kind::Gone), Vec::new());
        }
        self.outputs.push(Output::Ended);
        Ok(())
    }

    /// Whether nothing is under way or defined here, for when one side is gone.
    #[cfg(test)]
    pub fn leaving_is_sound(&self) -> bool {
        let launched = self.groups.values().any(|group| group.local.is_some());
        (self.leaving.agreed || self.leaving.gone) && self.definitions.is_empty() && !launched
    }

    /// Checks what must always hold.
    #[cfg(test)]
    pub fn audit_leaving(&self) {
        let Leaving { kept, agreed, gone, .. } = self.leaving;
        if agreed || gone {
            assert!(kept == 0 && self.leaving_is_sound(), "it is used after it was let go of");
        }
    }
}
