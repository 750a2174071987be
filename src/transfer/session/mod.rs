//! One connection to one incarnation of one peer: its lanes, its ring, its launches and its end. Lower layers call a
//! connection a *session*, and know it only through their own traits.
//!
//! | file | what it owns |
//! | --- | --- |
//! | `connection.rs` | the connection and its end |
//! | `api_for_engine.rs` | the connection's interface to the engine |
//! | `lanes.rs` | the connection's interface to lanes, and the consequences of a lost lane |
//! | `api_for_launches_and_fetches.rs` | the connection's interface to launches and to fetches |
//! | `control_ring.rs` | control frames in shared memory |
//! | `ring_session.rs` | which thread reads the ring, and when it sleeps |
//! | `spin_wait.rs` | how long a waiting thread polls the ring before it sleeps |
//! | `link_outputs.rs` | performs the outputs of the link, and sends frames and chunks |
//! | `handshake.rs` | the handshake of two engines, before there is a connection |
//!
//! Begin at [`connection::Connection`].

pub mod api_for_engine;
mod api_for_launches_and_fetches;
pub mod connection;
mod control_ring;
pub mod handshake;
mod lanes;
mod link_outputs;
pub mod ring_session;
pub mod spin_wait;
