//! The limits of a clique, and how it ends. Begin at [`CliqueOptions`].

use std::time::Duration;

/// How the operations of a clique that has failed are stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum StopMethod {
    /// The communicators are aborted.
    Abort,
    /// The communicators are revoked, if this NCCL can (since 2.28.7) and their calls do not block, and then aborted: a revocation
    /// returns once the operations have stopped.
    #[default]
    RevokeThenAbort,
}

/// The settings of a clique.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CliqueOptions {
    /// The longest time from the join of this process until all members have joined.
    pub start_timeout: Duration,
    /// The longest time that a step of the end may take (a revocation, the orderly end of an unused communicator) before the abort.
    pub end_timeout: Duration,
    /// How operations are stopped.
    pub stop_method: StopMethod,
    /// Whether calls of NCCL block. A blocking start cannot be interrupted: if a member never joins, its thread stays. Cliques that
    /// share devices must then begin their batches in one order in all processes. It is for versions of NCCL in which calls that do
    /// not block misbehave.
    pub is_blocking: bool,
    /// Whether a clique serves more than one batch. If not, it ends in order after the first.
    pub is_reused: bool,
}

impl Default for CliqueOptions {
    fn default() -> Self {
        Self {
            start_timeout: Duration::from_secs(30),
            end_timeout: Duration::from_secs(2),
            stop_method: StopMethod::default(),
            is_blocking: false,
            is_reused: true,
        }
    }
}
