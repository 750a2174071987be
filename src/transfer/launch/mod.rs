//! Launches: the outcome of each transfer, the access to its bytes, and the waiters for the outcome.
//!
//! Three rules make cancellation safe. First, only holders of an [`AccessGuard`](peer_launch::AccessGuard) read or
//! write the bytes of a launch. Second, no guard is given after the [`AccessGate`](access_gate::AccessGate) has
//! closed. Third, a launch resolves as failed only when its last guard is dropped. So after a future has failed, no
//! thread of this process can write to the destination. A cancellation is confirmed when, for each peer, the peer has
//! announced that no byte can land in its own memory any more, or the connection with this peer has ended. A launch calls its session (the connection
//! that carries it) only through the trait [`SessionHandle`](session_handle::SessionHandle). Begin at
//! [`outcome::Launch`].

pub mod access_gate;
pub mod launch_spans;
pub mod outcome;
pub mod peer_launch;
pub mod session_handle;
pub mod transfer;
