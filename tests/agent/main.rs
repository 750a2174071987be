//! Tests of native workers, as processes and as a library, against a real server.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on has failed")]

mod attachment;
mod clocks;
mod cluster_env;
mod demo;
mod fencing;
#[path = "../harness/mod.rs"]
mod harness;
#[path = "../support/isolated_test.rs"]
mod isolated_test;
mod lost_gpu;
mod metrics;
mod peer_jobs;
mod reconnect;
mod stacks;
mod steps;
mod waiting_launches;
mod worker;
