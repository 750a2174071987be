//! Native workers: real processes, and the library, against a real server.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on has failed")]

mod clocks;
mod demo;
mod fencing;
mod placing;
#[allow(dead_code, reason = "it is shared with other tests")]
#[path = "../cli/process.rs"]
mod process;
mod scraped;
mod stepping;
mod waiting;
#[allow(dead_code, reason = "it is shared with other tests")]
#[path = "../cli/web.rs"]
mod web;
mod worker;
