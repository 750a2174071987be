//! The handle by which a program waits for a launch, or cancels it.
//!
//! [`outcome`](super::outcome) records the outcomes. Begin at [`TransferHandle`].

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use muster_clock as clock;

use super::outcome::{AwaitedLaunchState, Launch, LaunchStats};
use crate::base::error::TransferError;
use crate::base::membership::{MemberId, TaskId};

/// A handle of transfers in flight. It is a future of the outcome of all; [`wait`](TransferHandle::wait) waits
/// without a runtime.
///
/// Dropping it does not cancel anything.
#[derive(Clone)]
pub struct TransferHandle {
    launch: Arc<Launch>,
    here: TaskId,
}

impl std::fmt::Debug for TransferHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Transfer").field("left", &self.launch.pending_count()).finish_non_exhaustive()
    }
}

impl TransferHandle {
    pub(crate) const fn new(launch: Arc<Launch>, here: TaskId) -> Self {
        Self { launch, here }
    }

    /// Returns the number of transfers.
    #[must_use]
    pub fn len(&self) -> usize {
        self.launch.len()
    }

    /// Returns whether there are no transfers.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.launch.len() == 0
    }

    /// Returns the outcome, or none while a transfer is pending.
    #[must_use]
    pub fn outcome(&self) -> Option<Result<LaunchStats, TransferError>> {
        self.launch.overall_outcome()
    }

    /// Returns the outcome of the transfer with this index in the request, or none while it is pending.
    #[must_use]
    pub fn outcome_of(&self, number: usize) -> Option<Result<(), TransferError>> {
        self.launch.outcome(u32::try_from(number).ok()?)
    }

    /// Blocks this thread until all transfers have their outcome.
    ///
    /// # Errors
    /// Returns the error of the first transfer that failed.
    pub fn wait(&self) -> Result<LaunchStats, TransferError> {
        self.launch
            .block_until(AwaitedLaunchState::All, None, Launch::overall_outcome)
            .unwrap_or(Err(TransferError::Closed))
    }

    /// Blocks this thread until all transfers have their outcome; none if `time` passes before.
    #[must_use]
    pub fn wait_for(&self, time: Duration) -> Option<Result<LaunchStats, TransferError>> {
        self.launch.block_until(
            AwaitedLaunchState::All,
            Some(clock::monotonic() + time),
            Launch::overall_outcome,
        )
    }

    /// Cancels the transfers that are not complete. The returned future resolves when no byte can land any
    /// more, neither here nor at the peers: it is a proof, not a request.
    pub fn cancel(&self, reason: &str) -> QuiescenceFuture {
        self.launch.cancel(self.here, reason);
        QuiescenceFuture { launch: Arc::clone(&self.launch) }
    }

    /// Ends the connections with the peers that have not confirmed the cancellation, and returns those peers.
    /// Their bytes cannot land once the connection is over, so the proof needs no confirmation from them.
    pub(crate) fn disconnect_unquiesced_peers(&self, why: &str) -> Vec<MemberId> {
        self.launch.disconnect_unquiesced_peers(why)
    }

    /// Calls `callback` with the outcome of the transfer with this index: on the thread that resolves it, or
    /// on this one if it has its outcome already.
    pub(crate) fn add_outcome_callback(
        &self,
        number: usize,
        callback: impl FnOnce(Result<(), TransferError>) + Send + 'static,
    ) {
        self.launch.add_outcome_callback(number as u32, Box::new(callback));
    }
}

impl Future for TransferHandle {
    type Output = Result<LaunchStats, TransferError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.launch.poll_with_waker(AwaitedLaunchState::All, cx, Launch::overall_outcome)
    }
}

/// A future that resolves when no byte of a cancelled transfer can land any more.
#[derive(Clone)]
#[must_use = "the cancellation is proven only when this resolves"]
pub struct QuiescenceFuture {
    launch: Arc<Launch>,
}

impl QuiescenceFuture {
    /// Blocks this thread until the cancellation is proven.
    pub fn wait(&self) {
        self.launch.block_until(AwaitedLaunchState::Proof, None, Launch::check_quiescence);
    }

    /// Blocks this thread until the cancellation is proven or `time` passes. Returns whether it is proven.
    #[must_use]
    pub fn wait_for(&self, time: Duration) -> bool {
        self.launch
            .block_until(AwaitedLaunchState::Proof, Some(clock::monotonic() + time), Launch::check_quiescence)
            .is_some()
    }
}

impl Future for QuiescenceFuture {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        self.launch.poll_with_waker(AwaitedLaunchState::Proof, cx, Launch::check_quiescence)
    }
}
