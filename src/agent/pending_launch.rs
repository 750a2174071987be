//! The state of one launch that may wait for its peers. The program may name the transfers of the launch later. The
//! program and the tokio tasks that wait for the peers share this state.
//!
//! The launch begins when it has its transfers and a place (`launch_queue.rs`) with each peer, whichever comes last.
//! Begin at [`PendingLaunch`].

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use super::error::AgentError;
use crate::transfer::{
    Membership, PeerTask, ReservedLaunch, TransferEngine, TransferError, TransferHandle, TransferSpec,
};

/// The transfers of a launch, as soon as it is known which devices its peers have.
type NamedTransfers = Box<dyn FnOnce(&Membership) -> Result<Vec<TransferSpec>, String> + Send>;

/// A launch whose transfers are named later, when the memory that they send is known, and which may wait for its peers. If it
/// is dropped before they are named, it fails.
#[must_use = "the launch fails when this is dropped"]
pub struct PendingLaunch {
    state: Arc<PendingState>,
}

/// The state of a launch.
pub(super) struct PendingState {
    transfer: TransferHandle,
    parts: Mutex<PendingParts>,
    /// Why its peers cannot be waited for.
    failure: OnceLock<AgentError>,
}

struct PendingParts {
    /// The launch; none once it is launched or has failed here.
    reserved: Option<ReservedLaunch>,
    /// Its transfers, if they are named before it has all places.
    named: Option<NamedTransfers>,
    /// The peers with which it has no place yet.
    missing: BTreeSet<PeerTask>,
}

impl std::fmt::Debug for PendingLaunch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PendingLaunch").field("transfer", &self.state.transfer).finish_non_exhaustive()
    }
}

impl PendingLaunch {
    /// Creates a launch that has a place with each of its peers but these.
    pub(super) fn new(reserved: ReservedLaunch, missing: &[PeerTask]) -> Self {
        let transfer = reserved.transfer();
        let missing = missing.iter().copied().collect();
        let parts = Mutex::new(PendingParts { reserved: Some(reserved), named: None, missing });
        Self { state: Arc::new(PendingState { transfer, parts, failure: OnceLock::new() }) }
    }

    pub(super) fn state(&self) -> &Arc<PendingState> {
        &self.state
    }

    /// Returns the handle of the transfers.
    #[must_use]
    pub fn transfer(&self) -> &TransferHandle {
        &self.state.transfer
    }

    /// Returns how far the wait for the peers has come, now and later. It outlives this.
    #[must_use]
    pub fn wait_status(&self) -> WaitStatus {
        WaitStatus(Arc::clone(&self.state))
    }

    /// Launches the transfers that `named` returns, as many as were requested, as soon as there is a place with each peer. If
    /// it returns an error, the transfers fail with that.
    pub fn launch(
        self,
        engine: &TransferEngine,
        named: impl FnOnce(&Membership) -> Result<Vec<TransferSpec>, String> + Send + 'static,
    ) {
        self.state.set_named(engine, Box::new(named));
    }

    /// Fails the transfers.
    pub fn fail(self, error: &TransferError) {
        self.state.fail(error);
    }
}

impl Drop for PendingLaunch {
    fn drop(&mut self) {
        let is_named = lock(&self.state.parts).named.is_some();
        if !is_named {
            // Without effect if it was launched.
            self.state.fail(&TransferError::Dropped);
        }
    }
}

/// The wait of a launch for its peers, as far as it has come.
#[derive(Clone)]
pub struct WaitStatus(Arc<PendingState>);

impl WaitStatus {
    /// Returns why the peers cannot be waited for, if that has failed the transfers.
    #[must_use]
    pub fn failure(&self) -> Option<AgentError> {
        self.0.failure.get().cloned()
    }

    /// Returns the peers with which the launch has no place yet.
    #[must_use]
    pub fn missing_peers(&self) -> Vec<PeerTask> {
        lock(&self.0.parts).missing.iter().copied().collect()
    }
}

impl PendingState {
    pub(super) fn transfer(&self) -> &TransferHandle {
        &self.transfer
    }

    fn set_named(&self, engine: &TransferEngine, named: NamedTransfers) {
        let mut parts = lock(&self.parts);
        if self.transfer.outcome().is_some() || parts.reserved.is_none() {
            // It is over, and its memory is released without the lock.
            drop(parts);
            return drop(named);
        }
        parts.named = Some(named);
        self.launch_if_complete(engine, parts);
    }

    /// Takes the place with a peer, which is a member now. If the launch is over, the peer is told that it does not come.
    pub(super) fn add_place(&self, engine: &TransferEngine, peer: PeerTask, channel: u32) {
        let mut parts = lock(&self.parts);
        parts.missing.remove(&peer);
        match &mut parts.reserved {
            Some(reserved) => reserved.add_place(peer, channel),
            None => engine.skip_launch(peer, channel),
        }
        self.launch_if_complete(engine, parts);
    }

    fn launch_if_complete(&self, engine: &TransferEngine, mut parts: MutexGuard<'_, PendingParts>) {
        if !parts.missing.is_empty() || parts.named.is_none() {
            return;
        }
        let (reserved, named) = (parts.reserved.take(), parts.named.take());
        drop(parts);
        if let (Some(reserved), Some(named)) = (reserved, named) {
            match engine.with_membership(named) {
                Ok(specs) => reserved.launch(&[], specs),
                Err(why) => {
                    let _first = self.failure.set(AgentError::Settings(why.clone()));
                    reserved.fail(&TransferError::Dependency(why));
                }
            }
        }
    }

    /// Fails the transfers, unless they are launched. The places that are missing are still to be taken.
    pub(super) fn fail(&self, error: &TransferError) {
        let mut parts = lock(&self.parts);
        let (reserved, named) = (parts.reserved.take(), parts.named.take());
        drop(parts);
        if let Some(reserved) = reserved {
            reserved.fail(error);
        }
        // The memory of the transfers is released without the lock.
        drop(named);
    }

    /// Fails the transfers, because a peer cannot be waited for.
    pub(super) fn fail_wait(&self, error: AgentError) {
        let failure = match &error {
            AgentError::PeerJobRefused { job, why } | AgentError::NoSuchPeerJob { job, why } => {
                TransferError::JobRefused { job: *job, why: why.clone() }
            }
            AgentError::LifeEnded { .. } => TransferError::Closed,
            error => TransferError::Dependency(error.to_string()),
        };
        if self.transfer.outcome().is_none() {
            // The reason is there before the outcome, which wakes those who read both.
            let _first = self.failure.set(error);
        }
        self.fail(&failure);
    }

    /// Lets go of the memory of a launch that is over.
    pub(super) fn release_memory(&self) {
        let named = lock(&self.parts).named.take();
        drop(named);
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
