//! The layer that moves bytes: wires, lanes over wires, rings in shared memory, and the threads that serve them.
//!
//! Sessions decide which bytes are sent and where received bytes are written. Begin at [`lane`] and [`wire`].

pub mod clique;
mod contiguous_runs;
mod device_fetch;
pub mod device_runs;
pub(crate) mod exclusive_work;
mod fabric_fetch;
pub mod fabric_reads;
pub mod fetch;
pub mod fetch_host;
pub mod gpu_copies;
pub mod lane;
pub mod local_copy;
pub mod peer_memory;
pub mod reactor;
pub mod ring;
pub mod staging;
pub mod sys;
pub mod threads;
pub mod wire;
