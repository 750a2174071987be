//! Closed by default: every route asks who comes and whether they may, and no listener is open that nobody opened.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on has failed")]

mod audit;
mod house;
mod login;
#[allow(dead_code, unused_imports, reason = "shared with the tests of the command line")]
#[path = "../cli/process.rs"]
mod process;
mod starting;
mod tls;
mod walk;
