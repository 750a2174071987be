//! The lowest layer of the engine: types and locks that the other layers share. This layer imports no other layer.
//!
//! Begin at [`membership::Membership`] and [`error::TransferError`].

pub mod buffer_definition;
pub mod client_subnet;
pub mod counters;
pub mod error;
pub mod key;
pub mod launch_metrics;
pub mod layout;
pub mod membership;
pub mod peer_job;
pub mod sync;
pub mod transport;
pub mod weak_list;
