//! Tests GPUs over the simulated driver. Each test has a process of its own: an error may end the use of the driver.
#![allow(unsafe_code, reason = "asks for copies")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod copies;
mod copying;
mod drivers;
#[path = "../../../tests/support/gpu_driver.rs"]
mod gpu_driver;
#[path = "../../../tests/support/isolated_test.rs"]
mod isolated_test;
mod sharing;
#[path = "../../../tests/support/skip.rs"]
mod skip;
