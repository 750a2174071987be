//! Logs, metrics and traces, written from the effects of the state machine and from measurements.
//!
//! Without telemetry, the server answers every call in the same way. Begin at `event_log.rs`, `metrics/mod.rs` and
//! `traces/mod.rs`.
//!
//! - Statistics of tasks and barriers (for example `coordination/straggler_stats.rs`) are part of the state
//!   machine, so a replay computes the same values.
//! - `metrics::EventCounters` counts events; the driver (`engine`) calls it under the lock of the state machine. A
//!   separate thread makes the spans of runs, barriers and exclusions from the same events.
//! - Hot paths count and measure with the types of [`meter`](crate::meter). For these measurements, a gRPC connection
//!   reads the clock once in each turn, and once for each call that it answers in the turn. Without the cargo feature
//!   `metrics` these types are empty.
//! - Every other value is read at a scrape. `Coordinator::observe_job` makes a `JobObservation` in one pass over a
//!   job's tasks. Metrics and detectors both use it. The layers above (findings, transfer reports, the ports) write
//!   their own samples through the trait `metrics::MetricSource`. This module imports none of these layers.
//! - The measured time of an HTTP request ends when the head of its answer is ready. So a stream of events does not
//!   count as a request that takes minutes.

pub mod event_log;
pub mod log;
pub mod log_rate_limit;
pub mod metrics;
pub mod traces;
