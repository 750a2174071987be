//! `muster.v1.Transfers`: what native workers report of their transfers. Told apart by job like every other call.

/// The service's name on the wire.
pub(super) const SERVICE: &str = "muster.v1.Transfers";
/// Its only method.
pub(super) const METHOD: &str = "Report";
