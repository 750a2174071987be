//! Launches that are requested before the engines of their peers are members.
//!
//! A program may send to a task that has not attached its engine yet. The launch then waits, and takes its place in the
//! order of its channel when its peers are members. No thread waits for that. Begin at [`EngineHost::reserve_launch`].
//!
//! - The launches with a peer take their places in the order in which they were requested. So a launch also waits while
//!   an earlier one with the same peer waits.
//! - A launch that fails or is cancelled while it waits still takes its place later, and its peers are told that it does
//!   not come. So both sides count the same launches. It lets go of its memory at once.
//! - At most [`WAITING_MAX`] launches of an engine wait. They end with the engine's agent or attachment.

use std::num::NonZeroUsize;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

use super::engine_host::EngineHost;
use super::error::AgentError;
use super::launch_queue::lock;
use crate::transfer::{
    DeferredLaunch, LaunchOptions, Membership, PeerTask, ReservedLaunch, TransferError, TransferHandle,
    TransferSpec,
};

/// The most launches of an engine that wait for their peers.
pub const WAITING_MAX: usize = 4096;

/// How long a launch without a deadline, and one that is over, waits for its peers at a time.
const WAIT_AT_A_TIME: Duration = Duration::from_secs(3600);

/// The transfers of a launch, as soon as it is known which devices its peers have.
type NamedTransfers = Box<dyn FnOnce(&Membership) -> Result<Vec<TransferSpec>, String> + Send>;

/// A launch whose transfers are named later, when the memory that they send is known, and which may wait for its peers.
/// If it is dropped before that, it fails.
#[must_use = "the launch fails when this is dropped"]
pub struct PendingLaunch {
    transfer: TransferHandle,
    state: Arc<PendingState>,
}

/// A launch, as the program and the task that waits for its peers share it.
#[derive(Default)]
struct PendingState {
    parts: Mutex<PendingParts>,
    failure: OnceLock<AgentError>,
}

#[derive(Default)]
struct PendingParts {
    /// The launch, until its peers are members.
    deferred: Option<DeferredLaunch>,
    /// The launch, from then on until its transfers are named.
    reserved: Option<ReservedLaunch>,
    /// Its transfers, if they are named before its peers are members.
    named: Option<NamedTransfers>,
}

impl std::fmt::Debug for PendingLaunch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PendingLaunch").field("transfer", &self.transfer).finish_non_exhaustive()
    }
}

impl EngineHost {
    /// Returns whether a launch with these peers can take its place now: they are members, and no earlier launch waits for
    /// one of them.
    #[must_use]
    pub fn can_launch_with(&self, peers: &[PeerTask]) -> bool {
        if self.waiting_launches.count.load(Ordering::Acquire) > 0 {
            let queue = lock(&self.waiting_launches.queue);
            if peers.iter().any(|peer| queue.is_waited_for(peer)) {
                return false;
            }
        }
        let own = self.here().peer_task();
        self.engine.with_membership(|membership| {
            peers.iter().all(|peer| *peer == own || membership.current_member(*peer).is_some())
        })
    }

    /// Requests a launch of `count` transfers with `peers`, which send and receive so many bytes. It returns at once. The
    /// launch takes its place in the order of its channel when its peers are members; `channel` returns the channel then.
    /// Its deadline runs from now.
    ///
    /// # Errors
    /// If too many launches wait, or this incarnation has ended.
    pub fn reserve_launch(
        self: &Arc<Self>,
        mut peers: Vec<PeerTask>,
        count: NonZeroUsize,
        bytes: (u64, u64),
        options: LaunchOptions,
        channel: impl FnOnce(&Membership) -> u32 + Send + 'static,
    ) -> Result<PendingLaunch, AgentError> {
        if let Some(error) = self.incarnation_end_reason() {
            return Err(error);
        }
        let own = self.here().peer_task();
        peers.retain(|peer| *peer != own);
        peers.sort_unstable();
        peers.dedup();
        if self.can_launch_with(&peers) {
            let options = LaunchOptions { channel: self.engine.with_membership(channel), ..options };
            let reserved = self.engine.reserve(&peers, count, bytes, options);
            let transfer = reserved.transfer();
            let parts = PendingParts { reserved: Some(reserved), ..PendingParts::default() };
            let state = PendingState { parts: Mutex::new(parts), ..PendingState::default() };
            return Ok(PendingLaunch { transfer, state: Arc::new(state) });
        }
        if self.waiting_launches.count.fetch_add(1, Ordering::AcqRel) >= WAITING_MAX {
            self.waiting_launches.count.fetch_sub(1, Ordering::AcqRel);
            let why = format!(
                "{WAITING_MAX} launches wait for tasks that have not attached their engines, the most at a time: wait \
                 until they have"
            );
            return Err(AgentError::Engine(why));
        }
        let deferred = self.engine.defer(count, bytes);
        let transfer = deferred.transfer();
        let parts = PendingParts { deferred: Some(deferred), ..PendingParts::default() };
        let state = Arc::new(PendingState { parts: Mutex::new(parts), ..PendingState::default() });
        let mut queue = lock(&self.waiting_launches.queue);
        while queue.tasks.try_join_next().is_some() {}
        queue.last.retain(|_, last| last.has_changed().is_ok());
        let earlier = peers.iter().filter_map(|peer| queue.last.get(peer).cloned()).collect();
        let (done, last) = watch::channel(());
        queue.last.extend(peers.iter().map(|peer| (*peer, last.clone())));
        let waiting = WaitingLaunch {
            host: Arc::clone(self),
            peers,
            earlier,
            options,
            state: Arc::clone(&state),
            transfer: transfer.clone(),
            until: options.deadline.map(|limit| Instant::now() + limit),
            total: bytes.0.saturating_add(bytes.1),
            _done: done,
        };
        queue.tasks.spawn_on(waiting.take_place(Box::new(channel)), &self.peer_jobs.runtime);
        Ok(PendingLaunch { transfer, state })
    }
}

impl PendingLaunch {
    /// Returns the handle of the transfers.
    #[must_use]
    pub fn transfer(&self) -> &TransferHandle {
        &self.transfer
    }

    /// Returns a function that says why the peers could not be waited for, if that has failed the transfers.
    pub fn wait_failure(&self) -> impl Fn() -> Option<AgentError> + Send + Sync + use<> {
        let state = Arc::clone(&self.state);
        move || state.failure.get().cloned()
    }

    /// Launches the transfers that `named` returns, as many as were requested, as soon as the peers are members. If it
    /// returns an error, the transfers fail with that.
    pub fn launch(
        self,
        host: &EngineHost,
        named: impl FnOnce(&Membership) -> Result<Vec<TransferSpec>, String> + Send + 'static,
    ) {
        let mut parts = lock(&self.state.parts);
        let Some(reserved) = parts.reserved.take() else {
            parts.named = Some(Box::new(named));
            return;
        };
        drop(parts);
        launch_named(host, reserved, Box::new(named));
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

impl PendingState {
    /// Fails the transfers, unless they are launched. What waits goes on to take its place.
    fn fail(&self, error: &TransferError) {
        let mut parts = lock(&self.parts);
        let (reserved, named) = (parts.reserved.take(), parts.named.take());
        if let Some(deferred) = &parts.deferred {
            deferred.fail(error);
        }
        drop(parts);
        // The memory of the transfers is released without the lock.
        drop(named);
        if let Some(reserved) = reserved {
            reserved.fail(error);
        }
    }
}

fn launch_named(host: &EngineHost, reserved: ReservedLaunch, named: NamedTransfers) {
    match host.engine.with_membership(named) {
        Ok(specs) => reserved.launch(&[], specs),
        Err(why) => reserved.fail(&TransferError::Dependency(why)),
    }
}

/// A launch that waits for its peers.
struct WaitingLaunch {
    host: Arc<EngineHost>,
    peers: Vec<PeerTask>,
    /// The earlier launches that wait for one of them.
    earlier: Vec<watch::Receiver<()>>,
    options: LaunchOptions,
    state: Arc<PendingState>,
    transfer: TransferHandle,
    /// When its deadline passes.
    until: Option<Instant>,
    /// The bytes that it moves.
    total: u64,
    /// Tells the next launch when it is dropped.
    _done: watch::Sender<()>,
}

impl WaitingLaunch {
    /// Waits for the peers, then takes the place of the launch, and launches it if its transfers are named.
    async fn take_place(mut self, channel: Box<dyn FnOnce(&Membership) -> u32 + Send>) {
        if !self.wait_for_peers().await {
            return;
        }
        let Some(deferred) = lock(&self.state.parts).deferred.take() else { return };
        let channel = self.host.engine.with_membership(channel);
        let reserved = deferred.reserve(&self.peers, LaunchOptions { channel, ..self.options });
        let mut parts = lock(&self.state.parts);
        match parts.named.take() {
            None => parts.reserved = Some(reserved),
            Some(named) => {
                drop(parts);
                launch_named(&self.host, reserved, named);
            }
        }
    }

    /// Returns whether the peers are members and the earlier launches have their places; false if that cannot be any more.
    async fn wait_for_peers(&mut self) -> bool {
        let limit = self.options.deadline.unwrap_or(WAIT_AT_A_TIME);
        let mut attached = false;
        let over = self.transfer.clone();
        tokio::select! {
            biased;
            // It was cancelled.
            _outcome = over => {}
            known = self.host.wait_for_peers(&self.peers, limit) => match known {
                Ok(()) => attached = true,
                Err(error) => self.fail(error),
            },
        }
        if attached {
            let passed = async {
                match self.until {
                    Some(until) => tokio::time::sleep_until(until).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                () = wait_for_earlier(&mut self.earlier) => return true,
                _outcome = self.transfer.clone() => {}
                () = passed => {}
            }
            // Without effect if it was cancelled.
            self.state.fail(&TransferError::Deadline { moved: 0, total: self.total });
        }
        // It is over, and lets go of its memory. Its place is still to be taken.
        drop(lock(&self.state.parts).named.take());
        wait_for_earlier(&mut self.earlier).await;
        loop {
            match self.host.wait_for_peers(&self.peers, WAIT_AT_A_TIME).await {
                Ok(()) => return true,
                Err(AgentError::EnginesMissing { .. }) => {}
                Err(_) => return false,
            }
        }
    }

    /// Fails the transfers, because its peers are not members.
    fn fail(&self, error: AgentError) {
        let failure = match &error {
            AgentError::EnginesMissing { .. } => TransferError::Deadline { moved: 0, total: self.total },
            AgentError::PeerJobRefused { job, why } => {
                TransferError::JobRefused { job: *job, why: why.clone() }
            }
            error => TransferError::Dependency(error.to_string()),
        };
        // The reason is there before the outcome, which wakes those who read both.
        let _first = self.state.failure.set(error);
        self.state.fail(&failure);
    }
}

impl Drop for WaitingLaunch {
    fn drop(&mut self) {
        let (deferred, named) = {
            let mut parts = lock(&self.state.parts);
            let deferred = parts.deferred.take();
            let named = if deferred.is_some() { parts.named.take() } else { None };
            (deferred, named)
        };
        // The engine ends, or the launch has failed and can have no place.
        if let Some(deferred) = deferred {
            deferred.fail(&TransferError::Closed);
        }
        drop(named);
        self.host.waiting_launches.count.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Returns when the channels of these launches are closed.
async fn wait_for_earlier(earlier: &mut [watch::Receiver<()>]) {
    for launch in earlier {
        while launch.changed().await.is_ok() {}
    }
}
