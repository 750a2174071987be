//! The engine: what programs call, and what one consists of.

pub mod accept;
pub mod cliques;
pub mod config;
pub mod dial;
pub mod handle;
pub mod handshake_limits;
pub mod path_backoff;
pub mod prepared;
pub mod request;
pub mod resharding;
pub mod shared;
pub mod thread_pool;
