//! Tests of the transfer engine as a program uses it, over real sockets, shared memory and processes.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on has failed")]
#![allow(clippy::disallowed_methods, reason = "real sockets and processes take real time")]

mod calls;
mod cancel;
mod cliques;
mod cluster;
mod contents;
mod end_of_connection;
mod events;
mod fabric;
#[path = "../support/fabric_provider.rs"]
mod fabric_provider;
mod gpu_cluster;
#[path = "../support/gpu_driver.rs"]
mod gpu_driver;
mod gpu_memory;
mod gpu_to_gpu;
#[path = "../harness/mod.rs"]
mod harness;
mod hostile;
#[path = "../support/isolated_test.rs"]
mod isolated_test;
mod local;
mod measures;
mod network;
mod order;
mod peer_failures;
mod prepare;
mod processes;
mod requests;
mod resharding;
mod resharding_on_gpu;
mod secure;
#[path = "../support/skip.rs"]
mod skip;
mod wires;
