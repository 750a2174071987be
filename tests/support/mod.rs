//! Shared by the tests against running services: servers that end with their guards, and a client that speaks
//! either wire generation through one set of calls.

#![allow(dead_code, unused_imports, reason = "every target uses its own part of it")]

pub mod answer;
pub mod call;
pub mod client;
mod generation_a;
mod generation_c;
pub mod reporter;
pub mod server;
pub mod skip;

pub use answer::{Answer, Body, Payloads, TaskState};
pub use call::{Call, Caller, Generation};
pub use client::{Client, Pending};
pub use reporter::Reporter;
pub use server::{Cxx, JobOptions, Muster};
