//! Closed by default: every route asks who comes and whether they may, and no listener is open that nobody opened. What hostile clients, slow
//! disks and operators do to a running service holds up nobody else.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on has failed")]

mod audit;
mod bodies;
mod endurance;
mod every_route;
mod hosts;
mod in_process;
mod login;
#[allow(dead_code, unused_imports, reason = "shared with the tests of the command line")]
#[path = "../cli/process.rs"]
mod process;
mod service;
mod startup;
#[path = "../support/mod.rs"]
mod support;
mod tls;
