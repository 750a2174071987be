//! One connection to one life of one peer.

pub mod connection;
pub mod control_ring;
mod lanes;
pub mod perform;
mod spin_wait;
