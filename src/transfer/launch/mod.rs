//! A launch: what becomes of each of its transfers, and who waits to know.
//!
//! The rule that cancellation rests on: bytes of a launch's buffers are read or written only inside of a [`Visit`], no
//! visit begins after the part's pad is closed, and a part that failed says so only when the last visit has ended. So
//! whoever hears of a failure knows that no byte can land any more, whichever thread was at work.

mod access;
pub mod outcome;
pub mod peer_launch;
pub mod transfer;
