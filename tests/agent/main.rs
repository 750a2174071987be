//! Native workers as processes and as a library, against a real server.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on has failed")]

mod clocks;
mod cluster_env;
mod demo;
mod fencing;
mod metrics;
#[allow(dead_code, reason = "it is shared with other tests")]
#[path = "../cli/process.rs"]
mod process;
mod reconnect;
mod steps;
#[allow(dead_code, reason = "it is shared with other tests")]
#[path = "../cli/web.rs"]
mod web;
mod worker;
