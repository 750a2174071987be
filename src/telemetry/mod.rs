//! What is written about the server's life: logs for now, as projections of its events.

pub mod events;
pub mod log;
