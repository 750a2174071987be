//! One connection to one incarnation of one peer: its lanes, its ring, its launches and its end.
//!
//! | file | what it owns |
//! | --- | --- |
//! | `connection.rs` | the connection, its interface to the engine, and its end |
//! | `lanes.rs` | its interface to lanes, and the consequences of a lost lane |
//! | `launches.rs` | its interface to launches and to fetching threads |
//! | `control_ring.rs` | control frames in shared memory, and threads that poll for them |
//! | `spin_wait.rs` | how long such a thread polls before it sleeps |
//! | `perform.rs` | the outputs of the link, performed; frames and chunks sent |
//! | `handshake.rs` | the handshake of two engines, before there is a connection |

pub mod connection;
mod control_ring;
pub mod handshake;
mod lanes;
mod launches;
mod perform;
pub mod ring_session;
pub mod spin_wait;
