//! Tests of the access control of the HTTP port: every route checks identity and role, and by default no listener
//! is open to other machines. Hostile clients, slow disks and operations must not delay other clients.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on has failed")]

mod audit;
mod bodies;
mod endurance;
mod every_route;
mod hosts;
mod in_process_http_port;
mod login;
mod service;
mod stacks;
mod startup;
#[path = "../support/mod.rs"]
mod support;
mod tls;

use support::harness;
