//! Tests of the C library with programs in C and C++ against a real server. gcc and clang compile the programs with
//! warnings as errors. The programs run with AddressSanitizer, LeakSanitizer and UndefinedBehaviorSanitizer.
//!
//! The programs are beside this file. Begin at `scenarios.rs`.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on has failed")]

#[path = "../harness/mod.rs"]
mod harness;
mod header;
mod language_table;
mod programs;
mod readme;
mod scenarios;
#[path = "../support/skip.rs"]
mod skip;
