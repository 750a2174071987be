//! Muster: the coordination and transfer plane for multi-controller training and inference. `ARCHITECTURE.md` has
//! the map, the flows and the invariants.
//!
//! | module | what it owns |
//! | --- | --- |
//! | [`coordination`] | the state machine: every rule, no IO |
//! | [`engine`] | the driver of the state machine: one lock, the clock, events |
//! | [`grpc`] | the gRPC port, for JAX clients of both wire generations |
//! | [`http`] | the HTTP port, for people and tools |
//! | [`cli`], [`config`] | the command line, and one typed configuration |
//! | [`tls`] | TLS for both ports, and why a handshake failed |
//! | [`telemetry`] | logs, metrics and traces: projections of effects |
//! | [`agent`] | the native worker: a task of a job that owns a transfer engine |
//! | [`transfer`] | the transfer engine: moves buffers between tasks; a library of its own |
//! | [`doctor`] | checks of a host for fast transfers |
//! | [`findings`] | detectors: conclusions from measurements |
//! | [`reports`] | transfer reports of native workers |
//! | [`service`] | what the server is beside the wire: operations, audit, findings, reports |
//! | [`proto`] | the wire messages |
//! | `fuzzing` | the property of each decoder of outside input; no part of the product |
//! | `cow` | copy-on-write tables, so that readers need no lock |
//! | [`clock`] | the only reader of clocks and randomness |
//! | [`meter`] | counters and timings of hot paths |
pub mod agent;
pub mod cli;
pub mod config;
pub mod coordination;
mod cow;
pub mod doctor;
pub mod engine;
mod file_permissions;
mod file_watch;
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub mod fuzzing;
pub mod grpc;
pub mod http;
mod http2;
pub mod meter;
pub mod proto;
pub mod service;
pub mod telemetry;
mod test_pattern;
pub mod text;
pub mod tls;

pub use service::{findings, reports};

pub use muster_clock as clock;
pub use muster_transfer as transfer;
