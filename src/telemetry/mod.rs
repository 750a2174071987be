//! Logs, metrics and traces, written from the engine's effects and from measurements.
//!
//! The server behaves in the same way without them. Begin at `event_log.rs`, `metrics/mod.rs` and `traces/mod.rs`.
//!
//! - Statistics of tasks and barriers (for example `coordination/straggler_stats.rs`) are part of the state
//!   machine, so a replay computes the same values.
//! - `metrics::EventCounters` counts events; the engine calls it under its lock. Traces are assembled from the same
//!   events on a separate thread.
//! - Hot paths count and measure with the types of [`meter`](crate::meter), which are sharded by thread. A
//!   connection reads the clock once in each turn, and once for each call that it answers in the turn. Without the
//!   cargo feature `metrics` these types are empty.
//! - Every other value is read at a scrape. `Coordinator::observe_job` makes a `JobObservation` in one pass over a
//!   job's tasks, for metrics and for detectors. The layers above (findings, transfer reports, the ports) write
//!   their own samples through the trait `metrics::MetricSource`. This module imports none of these layers.
//! - The measured time of an HTTP request ends with the head of its answer. So a stream of events does not count as
//!   a request that takes minutes.

pub mod event_log;
pub mod log;
pub mod log_limit;
pub mod metrics;
pub mod traces;
