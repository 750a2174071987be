//! Launches: what becomes of each transfer, which bytes may be used, and what waits for the outcome.
//!
//! The rule that cancellation rests on: the bytes of a launch are read or written only by holders of an
//! [`AccessGuard`](peer_launch::AccessGuard), no guard is given once the [gate](gate::AccessGate) is closed, and a
//! launch that failed says so only when its last guard is gone. So a caller that hears of a failure knows that no byte
//! can land any more, whichever thread was at work. Begin at [`outcome::Launch`]; it knows its session by a trait only.

pub mod gate;
pub mod io_lists;
pub mod outcome;
pub mod peer_launch;
pub mod session_handle;
pub mod transfer;
