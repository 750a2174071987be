//! The future by which a program waits for a preparation. Dropping the future cancels the preparation.
//!
//! [`prepare`](super::prepare) does the work. Begin at [`PrepareFuture::new`].

use std::future::Future;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::task::Poll;
use std::time::Duration;

use muster_clock as clock;

use super::clique_cache::IsRequestWanted;
use super::prepared_transfers::PreparedTransfers;
use crate::base::error::PrepareError;
use crate::base::launch_metrics::LaunchMetrics;
use crate::base::sync::lock;

struct PendingPreparation {
    result: Option<Result<PreparedTransfers, PrepareError>>,
    waker: Option<std::task::Waker>,
}

/// A preparation in progress. Dropping it cancels it: connections that no other request waits for are not
/// made.
#[must_use = "nothing is launched by preparing it"]
pub struct PrepareFuture {
    slot: Arc<Mutex<PendingPreparation>>,
    changed: Arc<Condvar>,
    wanted: Arc<AtomicBool>,
}

impl Drop for PrepareFuture {
    fn drop(&mut self) {
        self.wanted.store(false, Ordering::Release);
    }
}

impl PrepareFuture {
    /// Creates a pending preparation, the check whether it still exists, and the function that completes it.
    pub(super) fn new(
        launch_metrics: &Arc<LaunchMetrics>,
    ) -> (Self, IsRequestWanted, impl FnOnce(Result<PreparedTransfers, PrepareError>) + Send + 'static) {
        let wanted = Arc::new(AtomicBool::new(true));
        let asked = Arc::clone(&wanted);
        let slot = Arc::new(Mutex::new(PendingPreparation { result: None, waker: None }));
        let (done, changed) = (Arc::clone(&slot), Arc::new(Condvar::new()));
        let (signal, launch_metrics) = (Arc::clone(&changed), Arc::clone(launch_metrics));
        let finish = move |result: Result<PreparedTransfers, PrepareError>| {
            if let Err(error) = &result {
                launch_metrics.count_failed(None, &error.clone().into());
            }
            let mut slot = lock(&done);
            slot.result = Some(result);
            let waker = slot.waker.take();
            drop(slot);
            signal.notify_all();
            if let Some(waker) = waker {
                waker.wake();
            }
        };
        (Self { slot, changed, wanted }, Arc::new(move || asked.load(Ordering::Acquire)), finish)
    }

    /// Blocks this thread until the preparation is complete.
    ///
    /// # Errors
    /// Returns an error if the request is invalid, or a peer cannot be reached.
    pub fn wait(self) -> Result<PreparedTransfers, PrepareError> {
        let mut slot = lock(&self.slot);
        loop {
            if let Some(result) = slot.result.take() {
                return result;
            }
            slot = self.changed.wait(slot).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Blocks this thread until the preparation is complete; none if `time` passes before. The preparation
    /// goes on until this is dropped.
    ///
    /// # Errors
    /// Returns the errors of [`wait`](Self::wait).
    pub fn wait_for(&mut self, time: Duration) -> Option<Result<PreparedTransfers, PrepareError>> {
        let until = clock::monotonic() + time;
        let mut slot = lock(&self.slot);
        loop {
            if let Some(result) = slot.result.take() {
                return Some(result);
            }
            let left = until.checked_duration_since(clock::monotonic())?;
            slot = self.changed.wait_timeout(slot, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Future for PrepareFuture {
    type Output = Result<PreparedTransfers, PrepareError>;

    fn poll(self: std::pin::Pin<&mut Self>, cx: &mut std::task::Context<'_>) -> Poll<Self::Output> {
        let mut slot = lock(&self.slot);
        if let Some(result) = slot.result.take() {
            return Poll::Ready(result);
        }
        slot.waker = Some(cx.waker().clone());
        Poll::Pending
    }
}
