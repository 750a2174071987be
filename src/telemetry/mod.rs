//! What is written about the server's life: logs, metrics and traces, as projections of its effects.

pub mod events;
pub mod line_limit;
pub mod log;
pub mod metrics;
pub mod traces;
