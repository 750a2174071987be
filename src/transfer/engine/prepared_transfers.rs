//! Prepared transfers, and their launches. The preparation does the slow work, such as making connections. A launch
//! only reserves memory and queues frames.
//!
//! From the second launch on, the only system calls are those that move bytes, wait for events or wake threads
//! (`tests/transfer/calls.rs` observes each one). Begin at [`PreparedTransfers::launch`].
//!
//! - A launch takes its number when it is requested. So the launches of a task are numbered in the order of its
//!   calls, even if they become ready in another order. The dependencies of a launch delay its bytes, not its number.
//! - A launch that this side refuses still takes its number, and the peer is told to stop its launch of that number.
//!   The peer counts launches too. If the refused launch took no number, the peer's count would stay one higher for
//!   ever.
//! - The memory of a launch is reserved when all dependencies of the launch have completed. Before that, an earlier
//!   transfer may still write to this memory.

use std::sync::{Arc, Weak};
use std::time::Duration;

use super::local_transfers::LocalTransfers;
use super::reserved_launch_number::ReservedLaunchNumber;
use super::shared::EngineShared;
use crate::base::buffer_definition::BufferDefinitionEvent;
use crate::base::error::TransferError;
use crate::base::key::TransferKey;
use crate::base::layout::BufferLayout;
use crate::base::membership::DeviceId;
use crate::base::peer_job::PeerJob;
use crate::launch::launch_spans::LaunchSpans;
use crate::launch::outcome::{Launch, LaunchPart};
use crate::launch::peer_launch::{LaunchLimits, PeerLaunch, fail_and_tell_peer};
use crate::launch::transfer::TransferHandle;
use crate::memory::Span;
use crate::protocol::link::PriorityClass;
use crate::protocol::link::launch_definition::{DefinitionEntry, FetchSource};
use crate::session::connection::Connection;

/// A request of one transfer.
#[derive(Debug, Clone)]
pub struct TransferSpec {
    pub(super) outgoing: bool,
    /// The job of the other task.
    pub(super) job: PeerJob,
    pub(super) from: DeviceId,
    pub(super) to: DeviceId,
    pub(super) key: TransferKey,
    pub(super) span: Span,
    pub(super) layout: BufferLayout,
}

impl TransferSpec {
    /// Returns the bytes that these transfers send, and those that they receive.
    #[must_use]
    pub fn sent_and_received(specs: &[Self]) -> (u64, u64) {
        specs.iter().fold((0, 0), |(sent, received), spec| {
            let bytes = spec.span.len() as u64;
            if spec.outgoing { (sent + bytes, received) } else { (sent, received + bytes) }
        })
    }

    /// Returns the device of this task, and that of the other task.
    pub(super) fn near_and_far(&self) -> (DeviceId, DeviceId) {
        if self.outgoing { (self.from, self.to) } else { (self.to, self.from) }
    }

    /// Returns it as an entry of a definition, without a source for fetches.
    pub(super) fn definition_entry(&self) -> DefinitionEntry {
        DefinitionEntry {
            key: self.key,
            from: self.from,
            to: self.to,
            bytes: self.span.len() as u64,
            fingerprint: self.layout.fingerprint(),
            outgoing: self.outgoing,
            source: FetchSource::None,
        }
    }

    /// Creates a send of a span from a device of this task to another device, with the span's layout. If the other device is of
    /// this task too, the request must also have the receive of the same key and devices: the engine copies the bytes.
    #[must_use]
    pub fn send(span: Span, from: DeviceId, to: DeviceId, key: TransferKey) -> Self {
        let layout = span.layout();
        Self { outgoing: true, job: PeerJob::OWN, from, to, key, span, layout }
    }

    /// Creates a receive into a span of a device of this task from another device, with the span's layout. If the other device is
    /// of this task too, the request must also have the send.
    #[must_use]
    pub fn receive(span: Span, from: DeviceId, to: DeviceId, key: TransferKey) -> Self {
        let layout = span.layout();
        Self { outgoing: false, job: PeerJob::OWN, from, to, key, span, layout }
    }

    /// Sets the job of the other task, whose device the spec names; without it, it is this task's own.
    #[must_use]
    pub const fn with_job(mut self, job: PeerJob) -> Self {
        self.job = job;
        self
    }

    /// Sets the layout of the bytes. The other side must set the same one, and its size must be the span's.
    #[must_use]
    pub fn with_layout(mut self, layout: BufferLayout) -> Self {
        self.layout = layout;
        self
    }
}

/// The options of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LaunchOptions {
    /// The channel. Launches are matched by their order on a channel; threads that launch independently need
    /// channels of their own.
    pub channel: u32,
    /// The priority class. Copies within this task have none: they are made in the order of their launches.
    pub class: PriorityClass,
    /// The time after the launch by which it must be complete; else it fails.
    pub deadline: Option<Duration>,
    /// The longest time without progress after both sides have launched, and the longest silence of the peer.
    /// If it passes, the launch fails.
    pub stall: Duration,
}

impl Default for LaunchOptions {
    fn default() -> Self {
        Self { channel: 0, class: PriorityClass::Normal, deadline: None, stall: Duration::from_secs(30) }
    }
}

/// The part of a prepared transfer that concerns one peer.
pub struct PreparedPeer {
    /// The connection.
    pub connection: Arc<Connection>,
    /// The number of its definition.
    pub definition: u32,
    /// The spans of both directions.
    pub lists: Arc<LaunchSpans>,
}

/// Prepared transfers, which can be launched any number of times.
///
/// Dropping it fails the transfers whose handle [`next_launch_handle`](PreparedTransfers::next_launch_handle)
/// returned, if they were never launched.
pub struct PreparedTransfers {
    shared: Arc<EngineShared>,
    peers: Vec<PreparedPeer>,
    local: Option<LocalTransfers>,
    options: LaunchOptions,
    count: usize,
    sent: u64,
    received: u64,
    next: Arc<Launch>,
}

impl std::fmt::Debug for PreparedTransfers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Prepared").field("count", &self.count).finish_non_exhaustive()
    }
}

impl PreparedTransfers {
    pub(super) fn new(
        shared: &Arc<EngineShared>,
        peers: Vec<PreparedPeer>,
        local: Option<LocalTransfers>,
        options: LaunchOptions,
        count: usize,
    ) -> Self {
        let lists = || peers.iter().map(|peer| &peer.lists).chain(local.as_ref().map(LocalTransfers::lists));
        let total = |of: fn(&LaunchSpans) -> u64| lists().map(|lists| of(lists)).sum();
        let (sent, received) = (total(|lists| lists.outbound.total()), total(|lists| lists.inbound.total()));
        let next = Launch::new(&shared.launch_metrics, count, sent, received);
        Self { shared: Arc::clone(shared), peers, local, options, count, sent, received, next }
    }

    /// Returns the number of transfers.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.count
    }

    /// Returns whether there are no transfers.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Returns the handle of the next launch. If there is no next launch, its transfers fail.
    #[must_use]
    pub fn next_launch_handle(&self) -> TransferHandle {
        TransferHandle::new(Arc::clone(&self.next), self.shared.here().task)
    }

    /// Launches the transfers. The launch takes its place in the order of its channel now, and begins when
    /// all `dependencies` have completed: until then its memory may be used otherwise. It does not block.
    pub fn launch(&mut self, dependencies: &[BufferDefinitionEvent]) -> TransferHandle {
        let following = Launch::new(&self.shared.launch_metrics, self.count, self.sent, self.received);
        let launch = std::mem::replace(&mut self.next, following);
        self.launch_with_numbers(launch, dependencies, Vec::new())
    }

    /// Launches the transfers as `launch`, with the numbers that `tickets` hold; a missing number is taken
    /// now.
    pub(super) fn launch_with_numbers(
        &self,
        launch: Arc<Launch>,
        dependencies: &[BufferDefinitionEvent],
        mut tickets: Vec<ReservedLaunchNumber>,
    ) -> TransferHandle {
        launch.start_clock();
        let deadline = self.options.deadline.map(|after| launch.start_time() + after);
        let limits = LaunchLimits { deadline, stall: self.options.stall, class: self.options.class };
        let peer_launch = |peer: &PreparedPeer| {
            PeerLaunch::new(&launch, peer.connection.launch_session(), &peer.lists, limits)
        };
        let launches: Vec<_> = self.peers.iter().map(peer_launch).collect();
        let local = self.local.as_ref().map(|local| local.new_part(self.shared.here(), &launch, limits));
        let all = || launches.iter().chain(&local);
        let waits: Vec<_> =
            dependencies.iter().filter(|event| event.outcome() != Some(Ok(()))).cloned().collect();
        let given_up = launch.attach_parts(all().map(PeerLaunch::as_weak_launch_part).collect());
        if let (Some(transfers), Some(part)) = (&self.local, &local) {
            transfers.register_part(&self.shared, part);
        }
        let refused = match given_up {
            // The launch was cancelled already, so the caller may use its bytes.
            Some((by, reason)) => Some(TransferError::Cancelled { by, reason }),
            None if waits.is_empty() => {
                all().find_map(|launch| launch.reserve_memory().err()).map(TransferError::Memory)
            }
            // Until the dependencies complete, the memory belongs to its producer, for example another
            // transfer that receives into it.
            None => None,
        };
        let ready = refused.is_none() && waits.is_empty();
        for (peer, peer_launch) in self.peers.iter().zip(&launches) {
            let ticket = tickets.iter().position(|ticket| ticket.peer() == peer.connection.peer);
            let number = ticket.and_then(|ticket| tickets.swap_remove(ticket).take_launch_number());
            let at = number.unwrap_or_else(|| peer.connection.take_launch_number(self.options.channel));
            // A refused launch takes its number too: the peer counts launches as well, and is told that this
            // one is over.
            let launched =
                peer.connection.launch(peer_launch, peer.definition, at, self.options.class, ready);
            if let Err(error) = launched {
                peer_launch.mark_peer_quiescent();
                peer_launch.fail_locally(error);
            } else if let Some(error) = &refused {
                fail_and_tell_peer(peer_launch, error.clone());
            } else {
                peer_launch.stop_group_if_launch_failed();
            }
        }
        self.shared.schedule_limit_check(&limits);
        if let Some(local) = &local {
            match &refused {
                Some(error) => fail_and_tell_peer(local, error.clone()),
                None if ready => self.shared.start_local_copy(local),
                None => {}
            }
        }
        if !ready && refused.is_none() {
            let parts = LaunchParts { launch: Arc::clone(&launch), peers: launches, local };
            mark_ready_when(waits, self.shared.weak(), parts);
        }
        TransferHandle::new(launch, self.shared.here().task)
    }
}

/// The parts of a launch that waits for its dependencies.
struct LaunchParts {
    launch: Arc<Launch>,
    peers: Vec<Arc<PeerLaunch>>,
    local: Option<Arc<PeerLaunch>>,
}

/// Marks the parts of a launch ready when all events have completed, or cancels them with the first one that failed.
fn mark_ready_when(mut waits: Vec<BufferDefinitionEvent>, shared: Weak<EngineShared>, parts: LaunchParts) {
    let Some(event) = waits.pop() else {
        parts.launch.record_ready_time();
        for peer_launch in parts.peers {
            match (peer_launch.reserve_memory(), peer_launch.group_id()) {
                (Ok(()), Some(at)) => {
                    if let Some(session) = peer_launch.session() {
                        session.announce_group_ready(at);
                    }
                }
                (Ok(()), None) => {}
                (Err(error), _) => fail_and_tell_peer(&peer_launch, error.into()),
            }
        }
        if let (Some(local), Some(shared)) = (&parts.local, shared.upgrade()) {
            match local.reserve_memory() {
                Ok(()) => shared.start_local_copy(local),
                Err(error) => fail_and_tell_peer(local, error.into()),
            }
        }
        return;
    };
    event.add_outcome_listener(move |outcome| match outcome {
        Ok(()) => mark_ready_when(waits, shared, parts),
        Err(why) => {
            for peer_launch in parts.peers.iter().chain(&parts.local) {
                fail_and_tell_peer(peer_launch, TransferError::Dependency(why.clone()));
            }
        }
    });
}

impl Drop for PreparedTransfers {
    fn drop(&mut self) {
        self.next.fail_all(&TransferError::Dropped);
        for peer in &self.peers {
            peer.connection.withdraw_definition(peer.definition);
        }
    }
}
