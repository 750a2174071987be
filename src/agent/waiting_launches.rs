//! Accepts launches before the engines of their peers are members. A program may send to a task that has not attached
//! its engine yet.
//!
//! The *place* of a launch with a peer is the number of the launch on the channel with this peer. A launch takes its
//! places with members at once, and each other place when that peer becomes a member. No thread waits for that. Begin
//! at [`EngineHost::reserve_launch`].
//!
//! - The launches with a peer take their places with it in the order in which they were requested, on all channels.
//!   An absent peer delays no place with another peer.
//! - A launch that fails or is cancelled gives up its places at once. When a peer for which it has waited becomes a
//!   member, the launch takes the place there too, and the engine tells the peer that the launch does not come. So
//!   both sides count the same launches.
//! - At most [`WAITING_MAX`] launches of an engine wait. Launches that are over count too, as long as one of their
//!   peers is absent. All waits end with the agent or attachment of the engine.

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::sync::watch;

use super::engine_host::EngineHost;
use super::error::AgentError;
use super::pending_launch::{PendingLaunch, PendingState, WaitStatus, lock};
use crate::transfer::{LaunchOptions, Membership, PeerTask, TransferError};

/// The most launches of an engine that wait for their peers.
pub const WAITING_MAX: usize = 4096;

/// The time after which a wait for a peer begins anew.
const WAIT_AT_A_TIME: Duration = Duration::from_secs(3600);

/// The channel of a launch, when its peers are members.
type ChannelNumber = dyn Fn(&Membership) -> u32 + Send + Sync;

impl EngineHost {
    /// Returns whether a launch with these peers has its places at once: they are members, and no earlier launch waits for a
    /// place with one of them.
    #[must_use]
    pub fn can_launch_with(&self, peers: &[PeerTask]) -> bool {
        self.absent_peers(peers).is_empty()
    }

    /// Returns those of these peers that are not members, or with which an earlier launch waits for a place.
    fn absent_peers(&self, peers: &[PeerTask]) -> Vec<PeerTask> {
        let own = self.here().peer_task();
        let mut absent: Vec<PeerTask> = self.engine.with_membership(|membership| {
            let is_absent = |peer: &&PeerTask| **peer != own && membership.current_member(**peer).is_none();
            peers.iter().filter(is_absent).copied().collect()
        });
        if !self.waiting_launches.is_empty() {
            let queue = lock(&self.waiting_launches.queue);
            absent.extend(peers.iter().filter(|peer| queue.is_waited_for(**peer)));
            absent.sort_unstable();
            absent.dedup();
        }
        absent
    }

    /// Requests a launch of `count` transfers, which sends and receives so many bytes, with `peers`. It returns at once. The
    /// launch takes its places on the channel that `channel` returns. Its deadline runs from now.
    ///
    /// # Errors
    /// If too many launches wait, or this incarnation or its engine has ended.
    pub fn reserve_launch(
        self: &Arc<Self>,
        mut peers: Vec<PeerTask>,
        count: NonZeroUsize,
        bytes: (u64, u64),
        options: LaunchOptions,
        channel: impl Fn(&Membership) -> u32 + Send + Sync + 'static,
    ) -> Result<PendingLaunch, AgentError> {
        if let Some(error) = self.incarnation_end_reason() {
            return Err(error);
        }
        let own = self.here().peer_task();
        peers.retain(|peer| *peer != own);
        // A launch has one place with a peer, however many of its transfers go there.
        peers.sort_unstable();
        peers.dedup();
        let absent = self.absent_peers(&peers);
        let options = LaunchOptions { channel: self.engine.with_membership(&channel), ..options };
        let first = peers.first().copied();
        peers.retain(|peer| !absent.contains(peer));
        let reserve = || {
            let reserved = self.engine.reserve(&peers, count, bytes, options);
            if let Some(peer) = first {
                reserved.set_peer_for_metrics(peer);
            }
            PendingLaunch::new(reserved, &absent)
        };
        if absent.is_empty() {
            return Ok(reserve());
        }
        let slot = WaitingSlot::take(&self.waiting_launches.count)?;
        let mut queue = lock(&self.waiting_launches.queue);
        if queue.is_closed {
            let why = "its transfer engine was closed".to_owned();
            return Err(AgentError::LifeEnded { task: own.task.0, why });
        }
        queue.forget_settled_launches();
        let launch = reserve();
        queue.launches.push(Arc::downgrade(launch.state()));
        let runtime = self.peer_jobs.runtime.clone();
        let (slot, channel): (_, Arc<ChannelNumber>) = (Arc::new(slot), Arc::new(channel));
        for peer in absent {
            let (settled, last) = watch::channel(());
            let place = MissingPlace {
                host: Arc::clone(self),
                launch: Arc::clone(launch.state()),
                peer,
                channel: Arc::clone(&channel),
                earlier: queue.last.insert(peer, last),
                _slot: Arc::clone(&slot),
                _settled: settled,
            };
            queue.tasks.spawn_on(place.take(), &runtime);
        }
        let state = Arc::clone(launch.state());
        let releasing = async move {
            let _outcome = state.transfer().clone().await;
            state.release_memory();
        };
        queue.tasks.spawn_on(releasing, &runtime);
        Ok(launch)
    }

    /// Returns the wait of a launch of this engine, which has this deadline, for its peers.
    #[must_use]
    pub fn peer_wait(self: &Arc<Self>, launch: &PendingLaunch, deadline: Option<Duration>) -> PeerWait {
        PeerWait { host: Arc::downgrade(self), status: launch.wait_status(), deadline }
    }

    /// Returns when the launches that wait now for places with these peers have them.
    pub async fn wait_for_earlier_launches(&self, peers: &[PeerTask]) {
        let earlier: Vec<_> = {
            let queue = lock(&self.waiting_launches.queue);
            peers.iter().filter_map(|peer| queue.last.get(peer).cloned()).collect()
        };
        for launch in earlier {
            wait_until_settled(launch).await;
        }
    }

    /// Returns the error for the deadline of a launch that has no places with these peers.
    #[must_use]
    pub fn missing_peers_error(&self, peers: &[PeerTask], limit: Duration) -> Option<AgentError> {
        let job = peers.first()?.job;
        let tasks: Vec<_> = peers.iter().filter(|peer| peer.job == job).map(|peer| peer.task).collect();
        Some(self.engines_missing(job, &tasks, limit))
    }
}

/// The wait of a launch for its peers: whom it waits for, and whether that is why it failed. It keeps neither the launch nor the
/// engine.
#[derive(Clone)]
pub struct PeerWait {
    host: Weak<EngineHost>,
    status: WaitStatus,
    deadline: Option<Duration>,
}

impl PeerWait {
    /// Returns why the peers of the launch were not there, if the launch failed with `error` for that.
    #[must_use]
    pub fn reason(&self, error: &TransferError) -> Option<AgentError> {
        match error {
            TransferError::Cancelled { .. } => None,
            TransferError::Deadline { .. } => {
                self.host.upgrade()?.missing_peers_error(&self.missing_peers(), self.deadline?)
            }
            _ => self.status.failure(),
        }
    }

    /// Returns the peers with which the launch has no place yet.
    #[must_use]
    pub fn missing_peers(&self) -> Vec<PeerTask> {
        self.status.missing_peers()
    }
}

/// One of the launches that may wait; another may take its place when it is dropped.
struct WaitingSlot(Arc<AtomicUsize>);

impl WaitingSlot {
    fn take(count: &Arc<AtomicUsize>) -> Result<Self, AgentError> {
        let slot = Self(Arc::clone(count));
        if slot.0.fetch_add(1, Ordering::AcqRel) >= WAITING_MAX {
            return Err(AgentError::TooManyWaitingLaunches { bound: WAITING_MAX });
        }
        Ok(slot)
    }
}

impl Drop for WaitingSlot {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// The place of a launch with a peer that is absent, or with which an earlier launch waits for a place.
struct MissingPlace {
    host: Arc<EngineHost>,
    launch: Arc<PendingState>,
    peer: PeerTask,
    channel: Arc<ChannelNumber>,
    /// The launch that takes its place with the peer before.
    earlier: Option<watch::Receiver<()>>,
    _slot: Arc<WaitingSlot>,
    /// Tells the next launch when it is dropped.
    _settled: watch::Sender<()>,
}

impl MissingPlace {
    /// Waits for the peer, and takes the place.
    async fn take(mut self) {
        if let Some(earlier) = self.earlier.take() {
            wait_until_settled(earlier).await;
        }
        loop {
            match self.host.wait_for_peers(&[self.peer], WAIT_AT_A_TIME).await {
                Ok(()) => break,
                Err(AgentError::EnginesMissing { .. }) => {}
                Err(error) => return self.launch.fail_wait(error),
            }
        }
        let channel = self.host.engine.with_membership(&*self.channel);
        self.launch.add_place(&self.host.engine, self.peer, channel);
    }
}

/// Returns when the channel of a launch is closed.
async fn wait_until_settled(mut launch: watch::Receiver<()>) {
    while launch.changed().await.is_ok() {}
}
