//! Logs, metrics and traces: projections of the engine's effects and of observations.
//!
//! They decide nothing; without them the server does the same. Begin at `event_log.rs`, `metrics/mod.rs` and
//! `traces/mod.rs`.
//!
//! - Statistics of tasks and barriers are part of the state (such as `coordination/straggler_stats.rs`), so a
//!   replay computes the same.
//! - `metrics::EventCounters` counts events; the engine calls it under its lock. Traces are assembled
//!   from the same events on a thread of their own.
//! - Hot paths count and time through [`meter`](crate::meter): each thread adds to its own memory, and a connection
//!   reads the clock once a turn and once for each call that is answered in it. Without the cargo feature `metrics`
//!   these types are empty.
//! - Everything else is read at the scrape: `Coordinator::observe` makes a `JobObservation` in one pass over a
//!   job's tasks, for metrics and for detectors alike. The layers above (findings, transfer reports, the ports) write their own
//!   samples (`metrics::MetricSource`): this module imports none of them.
//! - An HTTP request is timed up to the head of its answer, so a stream of events does not count as a request of
//!   minutes.

pub mod event_log;
pub mod log;
pub mod log_limit;
pub mod metrics;
pub mod traces;
