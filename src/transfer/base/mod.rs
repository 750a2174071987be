//! The types and the locks that every other layer uses. This layer imports no other layer.

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
