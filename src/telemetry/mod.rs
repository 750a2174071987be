//! What is written about the server's life: logs and metrics, as projections of its effects.

pub mod events;
pub mod log;
pub mod metrics;
