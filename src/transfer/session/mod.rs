//! One connection to one life of one peer: its lanes, its ring, its launches and its end.
//!
//! | file | what it has |
//! | --- | --- |
//! | `connection.rs` | what a connection is, what the engine asks of it, and its end |
//! | `lanes.rs` | what lanes ask and tell, and what becomes of a connection that loses one |
//! | `launches.rs` | what launches and the threads that fetch ask |
//! | `control_ring.rs` | control frames by shared memory |
//! | `ring_session.rs` | when threads read the ring, sleep, and leave it to one another |
//! | `spin_wait.rs` | how long such a thread looks before it sleeps |
//! | `perform.rs` | what is done because the link says so, and how what there is to say leaves |
//! | `handshake.rs` | the handshake of two engines, before there is a connection |

pub mod connection;
mod control_ring;
pub mod handshake;
mod lanes;
mod launches;
mod perform;
pub mod ring_session;
pub mod spin_wait;
