//! Tests cliques over simulated NCCL: members in one process, and in several. Each test has a process of its own.
#![allow(unsafe_code, reason = "runs operations")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod batches;
mod cache;
#[path = "../../gpu/tests/copying.rs"]
#[allow(dead_code, reason = "written for the tests of copies")]
mod copying;
mod ends;
#[path = "../../../tests/support/gpu_driver.rs"]
mod gpu_driver;
#[path = "../../../tests/support/isolated_test.rs"]
mod isolated_test;
mod members;
mod processes;
#[path = "../../../tests/support/skip.rs"]
mod skip;
mod starts;
