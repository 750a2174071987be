//! Models of the engine's concurrent code for loom (`base/sync.rs` says how to run them).
//!
//! Begin at `models`.

#![allow(clippy::unwrap_used, reason = "a model that cannot go on has failed")]

mod models;
