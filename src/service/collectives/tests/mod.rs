//! Tests the analysis with invented ranks, and the store with an engine and encoded reports.
//!
//! `tests/collectives` has the same stories with real processes. Begin at `waits.rs`.

mod reports;
mod several_cliques;
mod waits;
