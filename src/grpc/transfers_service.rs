//! The names of the service and the method of `muster.v1.Transfers`, with which native workers report their
//! transfers.
//!
//! A report is routed to its job like every other call; `call_table/engine_calls.rs` hands it to `reports`.

/// The service's name on the wire.
pub(super) const SERVICE: &str = "muster.v1.Transfers";
/// Its only method.
pub(super) const METHOD: &str = "Report";
