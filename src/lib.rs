//! Muster: the coordination and transfer plane for multi-controller training and inference. `ARCHITECTURE.md` has a
//! map of the code, the flows and the invariants. Begin there.
//!
//! | module | what it owns |
//! | --- | --- |
//! | [`coordination`] | the state machine: all rules of coordination, without IO |
//! | [`engine`] | the driver of the state machine: one lock, the clock, events |
//! | [`grpc`] | the gRPC port, for JAX clients of both wire generations |
//! | `http2` | HTTP/2 for servers, without IO |
//! | [`http`] | the HTTP port, for people and tools |
//! | [`cli`], [`config`] | the command line, and one typed configuration |
//! | [`tls`] | TLS for both ports, and the reasons of failed handshakes |
//! | [`telemetry`] | logs, metrics and traces, written from effects and from measurements |
//! | [`agent`] | runs a transfer engine: in a native worker, or for a task that another client has registered |
//! | [`transfer`] | the transfer engine: moves buffers between tasks; it is a crate of its own |
//! | [`simulator`] | simulated tasks: many real clients of the protocol in one process |
//! | [`host_checks`] | checks of a host for fast transfers |
//! | [`service::findings`] | detectors: conclusions from measurements |
//! | [`service::reports`] | transfer reports of native workers |
//! | [`service`] | the parts of the server that use no port: operations, audit, findings, reports |
//! | [`proto`] | the wire messages |
//! | `fuzzing` | the properties that decoders of untrusted input must have; only for tests and fuzzing |
//! | `cow` | copy-on-write tables, so that readers need no lock |
//! | [`clock`] | the only code that reads the system's clocks and draws random numbers |
//! | [`text`] | escaping of text from outside; durations and numbers for people |
//! | `file_permissions`, `file_watch` | checks of the permissions of private files; checks for changed files |
//! | [`meter`], [`sample_range`] | counters and timings of hot paths; medians of benchmarks |
//! | `test_pattern` | reproducible bytes by which transfers are checked |
#![warn(clippy::too_many_lines)]

pub mod agent;
pub mod cli;
pub mod config;
pub mod coordination;
mod cow;
pub mod engine;
mod file_permissions;
mod file_watch;
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub mod fuzzing;
pub mod grpc;
pub mod host_checks;
pub mod http;
mod http2;
#[cfg(test)]
#[path = "../tests/support/isolated_test.rs"]
mod isolated_test;
pub mod meter;
pub mod proto;
pub mod sample_range;
pub mod service;
pub mod simulator;
pub mod telemetry;
mod test_pattern;
pub mod text;
pub mod tls;

pub use muster_clock as clock;
pub use muster_transfer as transfer;
