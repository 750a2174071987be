//! Code that is shared by the tests against running services: a client that makes the same calls in either
//! generation of the protocol, and the processes of [`harness`].

#![allow(dead_code, unused_imports, reason = "every target uses its own part of it")]

pub mod answer;
pub mod call;
pub mod client;
mod generation_a;
mod generation_c;
#[path = "../harness/mod.rs"]
pub mod harness;
pub mod reporter;
pub mod skip;

pub use answer::{Answer, Body, Payloads, TaskState};
pub use call::{Call, Caller, Generation};
pub use client::{Client, Pending};
pub use harness::{Cxx, JobOptions, MusterServer, Signal};
pub use reporter::Reporter;
