//! Tests over a provider of the real libfabric that needs no network card.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on has failed")]
#![allow(clippy::disallowed_methods, reason = "processes and sockets take real time")]

#[path = "../../../tests/support/fabric_provider.rs"]
mod fabric_provider;
mod layouts;
mod memory;
mod processes;
mod reads;
#[path = "../../../tests/support/skip.rs"]
mod skip;
