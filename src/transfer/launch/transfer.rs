//! The handle of a launch for programs.
//!
//! It only waits: outcomes are in [`outcome`](super::outcome). Begin at [`Transfer`].

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use muster_clock as clock;

use super::outcome::{AwaitedOutcome, Launch, Stats};
use crate::base::error::TransferError;
use crate::base::identity::{Member, TaskId};

/// A handle of transfers in flight. It is a future of the outcome of all; [`wait`](Transfer::wait) waits
/// without a runtime.
///
/// Dropping it does not cancel anything.
#[derive(Clone)]
pub struct Transfer {
    launch: Arc<Launch>,
    here: TaskId,
}

impl std::fmt::Debug for Transfer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Transfer").field("left", &self.launch.left()).finish_non_exhaustive()
    }
}

impl Transfer {
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
    pub fn outcome(&self) -> Option<Result<Stats, TransferError>> {
        self.launch.whole()
    }

    /// Returns the outcome of the transfer with this index in the request, or none while it is pending.
    #[must_use]
    pub fn outcome_of(&self, number: usize) -> Option<Result<(), TransferError>> {
        self.launch.outcome(u32::try_from(number).ok()?)
    }

    /// Returns a future of the outcome of the transfer with this index in the request.
    #[must_use]
    pub fn one(&self, number: usize) -> Completion {
        Completion { launch: Arc::clone(&self.launch), number: number as u32 }
    }

    /// Blocks this thread until all transfers have their outcome.
    ///
    /// # Errors
    /// Returns the error of the first transfer that failed.
    pub fn wait(&self) -> Result<Stats, TransferError> {
        self.launch.block(AwaitedOutcome::All, None, Launch::whole).unwrap_or(Err(TransferError::Closed))
    }

    /// Blocks this thread until all transfers have their outcome; none if `time` passes before.
    #[must_use]
    pub fn wait_for(&self, time: Duration) -> Option<Result<Stats, TransferError>> {
        self.launch.block(AwaitedOutcome::All, Some(clock::monotonic() + time), Launch::whole)
    }

    /// Cancels the transfers that are not complete. The returned future resolves when no byte can land any
    /// more, neither here nor at the peers: it is a proof, not a request.
    pub fn cancel(&self, reason: &str) -> Quiesced {
        self.launch.cancel(self.here, reason);
        Quiesced { launch: Arc::clone(&self.launch) }
    }

    /// Ends the connections with the peers that have not confirmed the cancellation, and returns those peers.
    /// Their bytes cannot land once the connection is over, so the proof needs no confirmation from them.
    pub(crate) fn cut_off(&self, why: &str) -> Vec<Member> {
        self.launch.cut_off(why)
    }

    /// Calls `callback` with the outcome of the transfer with this index: on the thread that resolves it, or
    /// on this one if it has its outcome already.
    pub(crate) fn on_outcome(
        &self,
        number: usize,
        callback: impl FnOnce(Result<(), TransferError>) + Send + 'static,
    ) {
        self.launch.on_outcome(number as u32, Box::new(callback));
    }
}

impl Future for Transfer {
    type Output = Result<Stats, TransferError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.launch.poll(AwaitedOutcome::All, cx, Launch::whole)
    }
}

/// A future of the outcome of one transfer.
#[derive(Clone)]
pub struct Completion {
    launch: Arc<Launch>,
    number: u32,
}

impl Completion {
    /// Blocks this thread until the transfer has its outcome.
    ///
    /// # Errors
    /// Returns the error of the transfer if it failed.
    pub fn wait(&self) -> Result<(), TransferError> {
        self.launch
            .block(AwaitedOutcome::One(self.number), None, |launch| launch.outcome(self.number))
            .unwrap_or(Err(TransferError::Closed))
    }

    /// Blocks this thread until the transfer has its outcome; none if `time` passes before.
    #[must_use]
    pub fn wait_for(&self, time: Duration) -> Option<Result<(), TransferError>> {
        self.launch.block(AwaitedOutcome::One(self.number), Some(clock::monotonic() + time), |launch| {
            launch.outcome(self.number)
        })
    }
}

impl Future for Completion {
    type Output = Result<(), TransferError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let number = self.number;
        self.launch.poll(AwaitedOutcome::One(number), cx, |launch| launch.outcome(number))
    }
}

/// A future that resolves when no byte of a cancelled transfer can land any more.
#[derive(Clone)]
#[must_use = "the cancellation is proven only when this resolves"]
pub struct Quiesced {
    launch: Arc<Launch>,
}

impl Quiesced {
    /// Blocks this thread until the cancellation is proven.
    pub fn wait(&self) {
        self.launch.block(AwaitedOutcome::Proof, None, Launch::proof);
    }

    /// Blocks this thread until the cancellation is proven or `time` passes. Returns whether it is proven.
    #[must_use]
    pub fn wait_for(&self, time: Duration) -> bool {
        self.launch.block(AwaitedOutcome::Proof, Some(clock::monotonic() + time), Launch::proof).is_some()
    }
}

impl Future for Quiesced {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        self.launch.poll(AwaitedOutcome::Proof, cx, Launch::proof)
    }
}
