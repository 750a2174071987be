//! Muster: the coordination and transfer plane for multi-controller training and inference.
//!
//! | room | its reason to exist |
//! | --- | --- |
//! | [`coordination`] | the state machine: every rule, no IO |
//! | [`engine`] | the driver: feeds inputs and time to the state machine and performs its effects |
//! | [`grpc`] | the wire edge, for JAX clients of both generations |
//! | [`http`] | the web edge, for people and tools |
//! | [`cli`], [`config`] | the command line, and one typed configuration |
//! | [`tls`] | TLS for both edges, and why a handshake failed |
//! | [`telemetry`] | what is told of all this: projections of effects |
//! | [`agent`] | the native worker: a task of a job that owns a transfer engine |
//! | [`transfer`] | the transfer engine: moves buffers between tasks; a library of its own |
//! | [`doctor`] | what a host offers for fast transfers, and what it lacks |
//! | [`findings`] | what is concluded from what is measured |
//! | [`reports`] | what native workers report of their transfers |
//! | [`proto`] | the wire messages |
//! | `fuzzing` | what must hold of everything that is read from outside; no part of the product |
//! | `cow` | tables whose copies are cheap, so that readers need no lock |
//! | [`clock`] | the only reader of clock and entropy |
//! | [`meter`] | what hot paths count and time of themselves |
pub mod agent;
pub mod cli;
pub mod config;
mod contents;
pub mod coordination;
mod cow;
pub mod doctor;
pub mod engine;
mod file_watch;
pub mod findings;
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub mod fuzzing;
pub mod grpc;
pub mod http;
mod http2;
pub mod meter;
mod private_file;
pub mod proto;
pub mod reports;
pub mod telemetry;
pub mod text;
pub mod tls;

pub use muster_clock as clock;
pub use muster_transfer as transfer;
