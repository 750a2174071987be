//! Code that is shared by the tests and benchmarks that start processes: a process with its output lines, the
//! servers under test, an HTTP client, and frames of HTTP/2.
//!
//! Each target includes this folder by path. There are two reasons why the folder is not a crate. Only the tests
//! and benchmarks of a package know where its program was built (`CARGO_BIN_EXE_muster`), and a target adds its own
//! methods to these types.

#![allow(dead_code, unused_imports, reason = "every target uses its own part of it")]

pub mod frames;
pub mod http;
pub mod process;
pub mod server;
pub mod temp_folder;
pub mod time;

pub use http::HttpResponse;
pub use process::{
    CommandOutput, Process, is_alive, muster, run, run_ignored_test, run_with_input, signal, test_arguments,
};
pub use rustix::process::Signal;
pub use server::{Cxx, JobOptions, MusterServer, jax_environment};
pub use temp_folder::TempFolder;
pub use time::{PATIENCE, TestInstant, wait_for, wait_until};
