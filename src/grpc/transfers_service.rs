//! The names of the gRPC service `muster.v1.Transfers` and of its method, by which workers send transfer reports.
//!
//! A report is routed to its job like every other call. `call_table/engine_calls.rs` passes it to
//! `service::reports`. Begin at [`METHOD`].

/// The service's name on the wire.
pub(super) const SERVICE: &str = "muster.v1.Transfers";
/// Its only method.
pub(super) const METHOD: &str = "Report";
