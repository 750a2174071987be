//! The connections that go on when the process dies, as takers of answers. What they have taken up is in their logs. Begin at
//! [`AnswerTakers`].

use std::convert::Infallible;
use std::sync::mpsc;

/// Held by a connection that has been asked to take up answers, and dropped when it has.
#[derive(Debug, Clone)]
pub struct AnswersTaken {
    _taken: mpsc::Sender<Infallible>,
}

/// The connections that go on when this process dies.
pub trait AnswerTakers: Send + Sync {
    /// Asks every connection to take up the answers that were delivered to it. Each keeps a copy of `taken` until it has.
    fn request_uptake(&self, taken: AnswersTaken);
}

/// Waits until `takers` have taken up all answers that were delivered to them.
pub(super) fn wait_until_taken(takers: &dyn AnswerTakers) {
    let (taken, all_taken) = mpsc::channel::<Infallible>();
    takers.request_uptake(AnswersTaken { _taken: taken });
    // Nothing is ever sent: the channel ends when the last copy is dropped.
    let _ = all_taken.recv();
}
