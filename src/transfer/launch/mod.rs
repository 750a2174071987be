//! Launches: the outcome of each transfer, the access to its bytes, and the waiters for the outcome.
//!
//! Three rules make cancellation safe. Only holders of an [`AccessGuard`](peer_launch::AccessGuard) read or write the
//! bytes of a launch. No guard is given after the [access_gate](access_gate::AccessGate) has closed. A launch resolves as failed
//! only when its last guard is dropped. So after a future has failed, no thread of this process can write to the
//! destination. A cancellation is confirmed when every peer has announced the same of its side, or its connection has
//! ended. A launch calls its session only through a trait. Begin at [`outcome::Launch`].

pub mod access_gate;
pub mod launch_spans;
pub mod outcome;
pub mod peer_launch;
pub mod session_handle;
pub mod transfer;
