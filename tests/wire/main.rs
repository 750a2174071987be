//! Tests of a running server with raw gRPC, HTTP/2 and TCP: the bytes that clients read, and hostile or broken
//! peers, which must not harm other clients.
//!
//! After every hostile act, a well-behaved job must still work on the same server.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on has failed")]

mod bounds;
mod broken_messages;
mod broken_transport;
mod conformance;
mod delivery;
mod flood;
mod frames;
mod gpu_clients;
mod invalid_calls;
mod payloads;
mod peers;
mod poisoning;
mod raw;
mod reports;
mod resource_limits;
mod routing;
mod second_client;
mod services;
mod stacks;
#[path = "../support/mod.rs"]
mod support;
