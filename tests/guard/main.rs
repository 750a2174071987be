//! Access control of the HTTP port: every route checks identity and role, and no listener is open by default.
//! Hostile clients, slow disks and operations must not delay other clients.

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
