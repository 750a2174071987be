//! Tests of the simulated driver. Their caller of the driver is cudarc, as it would be of a real one.
//!
//! Faults and sticky errors belong to a process, so each test runs in a process of its own (`isolation.rs`).
//! `conformance/` is the program whose answers are kept in a file.

#![allow(unsafe_code, reason = "the calls of the driver are C calls")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on has failed")]
#![allow(clippy::disallowed_methods, reason = "limits of waits are real time")]

mod bindings;
mod collectives;
mod communicators;
mod conformance;
mod driver;
mod events;
mod faults;
mod isolation;
mod memory;
mod nccl;
mod peers;
mod plugin_libraries;
mod plugin_recorder;
mod profiler;
mod profiler_hangs;
mod profiler_rules;
mod rank_processes;
mod ranks;
mod sharing;
#[path = "../../support/skip.rs"]
mod skip;
mod streams;
