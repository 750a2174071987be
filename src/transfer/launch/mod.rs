//! Launches: the outcome of each transfer, which bytes may be used, and the waiters for the outcome.
//!
//! The rule that cancellation rests on: the bytes of a launch are read or written only by holders of an
//! [`AccessGuard`](peer_launch::AccessGuard), no guard is given once the [gate](gate::AccessGate) is closed, and a
//! launch that failed says so only when its last guard is gone. So a failed future or a confirmed cancellation
//! proves that no byte can land any more, whichever thread was at work. Begin at [`outcome::Launch`]; it knows its
//! session by a trait only.

pub mod gate;
pub mod io_lists;
pub mod outcome;
pub mod peer_launch;
pub mod session_handle;
pub mod transfer;
