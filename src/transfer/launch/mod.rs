//! Launches: the outcome of each transfer, the access to its bytes, and the waiters for the outcome.
//!
//! Cancellation rests on one rule: only holders of an [`AccessGuard`](peer_launch::AccessGuard) read or write
//! the bytes of a launch, no guard is given once the [gate](gate::AccessGate) is closed, and a launch
//! resolves as failed only when its last guard is gone. A failed future or a confirmed cancellation therefore
//! proves that no byte can land any more, whichever thread moved bytes. Begin at [`outcome::Launch`]; it
//! knows its session by a trait only.

pub mod gate;
pub mod io_lists;
pub mod outcome;
pub mod peer_launch;
pub mod session_handle;
pub mod transfer;
