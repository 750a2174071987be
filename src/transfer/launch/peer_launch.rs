//! The part of a launch that concerns one peer, or the copies within this task: its number, its limits, the reservations of its
//! memory, and the guards of its bytes.
//!
//! This module does not depend on how bytes move. Every failure of this side reaches the peer through
//! [`fail_and_tell_peer`]. Begin at [`PeerLaunch`].

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::access_gate::AccessGate;
use super::launch_spans::{LaunchBytes, LaunchSpans};
use super::outcome::{Launch, LaunchPart};
use super::session_handle::{LaunchSession, POLL_INTERVAL, SessionHandle};
use crate::base::error::{MemoryError, TransferError};
use crate::base::membership::MemberId;
use crate::base::sync::{AtomicBool, AtomicU64, Mutex, OnceLock, fence, fence_after_read_modify_write, lock};
use crate::base::transport::TransportKind;
use crate::memory::{AccessKind, Reservation};
use crate::protocol::link::{GroupId, PriorityClass};

/// The limits of a launch, and its priority class.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LaunchLimits {
    /// The time by which the launch must be complete.
    pub deadline: Option<Instant>,
    /// The longest time without progress once both sides have launched. Before that, the longest silence of the
    /// peer.
    pub stall: Duration,
    /// The priority class.
    pub class: PriorityClass,
}

/// The part of a launch that concerns one peer, which is one group of the link; or the copies within this task, which are no group.
pub struct PeerLaunch {
    launch: Arc<Launch>,
    carrier: LaunchSession,
    /// The spans of both directions.
    pub lists: Arc<LaunchSpans>,
    /// The limits.
    pub limits: LaunchLimits,
    group: OnceLock<GroupId>,
    gate: AccessGate,
    failure: OnceLock<TransferError>,
    is_resolved: AtomicBool,
    is_peer_quiet: AtomicBool,
    is_proven: AtomicBool,
    /// The bytes of each receive that have not arrived.
    missing: Box<[AtomicU64]>,
    reserved: Mutex<Vec<Option<Reservation>>>,
    is_matched: AtomicBool,
    moved: AtomicU64,
    /// Whether the session counts this part among the waiters for the acknowledgement of sent bytes.
    has_send_waiter: AtomicBool,
    /// The time of the last progress, in microseconds since the launch.
    progress: AtomicU64,
}

/// The permission to use the bytes of a launch, until it is dropped.
pub struct AccessGuard<'a>(&'a Arc<PeerLaunch>);

/// The permission to use the bytes of a launch beyond one call. A lane holds it from the first byte of a
/// chunk that it sends to the last, because a frame whose header has left must be completed with the bytes
/// that it announced. Once it [is closing](PeerLaunch::is_closing), the lane copies the rest of the chunk and
/// drops this guard.
pub struct OwnedAccessGuard(Arc<PeerLaunch>);

impl<'a> AccessGuard<'a> {
    /// Returns access to the bytes of the launch.
    pub fn bytes(&self) -> LaunchBytes<'_> {
        LaunchBytes::guarded(&self.0.lists)
    }
}

impl Drop for AccessGuard<'_> {
    fn drop(&mut self) {
        if self.0.gate.leave() {
            self.0.resolve_failed_if_quiet();
        }
    }
}

impl OwnedAccessGuard {
    /// Returns the launch.
    pub const fn launch(&self) -> &Arc<PeerLaunch> {
        &self.0
    }

    /// Returns access to the bytes of the launch.
    pub fn bytes(&self) -> LaunchBytes<'_> {
        LaunchBytes::guarded(&self.0.lists)
    }
}

impl Drop for OwnedAccessGuard {
    fn drop(&mut self) {
        if self.0.gate.leave() {
            self.0.resolve_failed_if_quiet();
        }
    }
}

impl PartialEq for PeerLaunch {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self, other)
    }
}

impl std::fmt::Debug for PeerLaunch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PeerLaunch").field("group", &self.group).finish_non_exhaustive()
    }
}

impl PeerLaunch {
    /// Makes one whose bytes are not yet [reserved](Self::reserve_memory).
    pub fn new(
        launch: &Arc<Launch>,
        carrier: LaunchSession,
        lists: &Arc<LaunchSpans>,
        limits: LaunchLimits,
    ) -> Arc<Self> {
        let peer_launch = Arc::new(Self {
            launch: Arc::clone(launch),
            carrier,
            lists: Arc::clone(lists),
            limits,
            group: OnceLock::new(),
            gate: AccessGate::default(),
            failure: OnceLock::new(),
            is_resolved: AtomicBool::new(false),
            is_peer_quiet: AtomicBool::new(false),
            is_proven: AtomicBool::new(false),
            missing: lists.inbound.spans.iter().map(|span| AtomicU64::new(span.len() as u64)).collect(),
            reserved: Mutex::default(),
            is_matched: AtomicBool::new(false),
            moved: AtomicU64::new(0),
            has_send_waiter: AtomicBool::new(false),
            progress: AtomicU64::new(0),
        });
        // The check of its limits needs the peer's acknowledgement without delay.
        if limits.deadline.is_some() || limits.stall < 20 * POLL_INTERVAL {
            peer_launch.register_send_waiter();
        }
        peer_launch
    }

    fn session(&self) -> Option<Arc<dyn SessionHandle>> {
        self.carrier.session()
    }

    /// Registers the part with its session as a waiter for the acknowledgement of sent bytes.
    pub fn register_send_waiter(&self) {
        if self.lists.outbound.total() == 0 || self.has_send_waiter.load(Ordering::SeqCst) {
            return;
        }
        let Some(session) = self.session() else { return };
        // The count comes before the flag: a thread that finds the flag set subtracts from the count.
        session.add_send_waiter();
        if self.has_send_waiter.swap(true, Ordering::SeqCst) {
            session.remove_send_waiter();
        }
    }

    fn unregister_send_waiter(&self) {
        if self.has_send_waiter.swap(false, Ordering::SeqCst)
            && let Some(session) = self.session()
        {
            session.remove_send_waiter();
        }
    }

    /// Reserves the bytes: those of the sends first, then those of the receives. It does nothing if the
    /// launch was cancelled before, because the program may know already that the bytes are free.
    ///
    /// # Errors
    /// Returns [`MemoryError::Busy`] if another transfer or the program uses any of them in a conflicting
    /// way.
    pub fn reserve_memory(self: &Arc<Self>) -> Result<(), MemoryError> {
        // While this guard is held, the launch does not resolve, so no program takes the bytes for free.
        let Some(_guard) = self.access() else { return Ok(()) };
        let spans = self.lists.outbound.spans.iter().map(|span| (span, AccessKind::Read));
        let spans = spans.chain(self.lists.inbound.spans.iter().map(|span| (span, AccessKind::Write)));
        let reserved = spans.map(|(span, how)| span.reserve(how).map(Some)).collect::<Result<_, _>>()?;
        *lock(&self.reserved) = reserved;
        Ok(())
    }

    /// Returns the group, or none before the launch.
    pub fn group_id(&self) -> Option<GroupId> {
        self.group.get().copied()
    }

    /// Sets the group that the launch became.
    pub fn set_group_id(&self, at: GroupId) {
        let _once = self.group.set(at);
    }

    /// Returns a guard of the bytes; none once the launch has failed or was cancelled.
    pub fn access(self: &Arc<Self>) -> Option<AccessGuard<'_>> {
        let may_stay = self.gate.enter();
        let guard = AccessGuard(self);
        may_stay.then_some(guard)
    }

    /// Returns a guard of the bytes that outlives this call; none once the launch has failed or was
    /// cancelled.
    pub fn access_owned(self: &Arc<Self>) -> Option<OwnedAccessGuard> {
        self.try_access_owned().ok()
    }

    /// Returns a guard, as [`access_owned`](Self::access_owned) does. A refused one may be the last that the failed launch waits for: the
    /// caller drops it where a program's callback may run.
    ///
    /// # Errors
    /// Returns the refused guard once the launch has failed or was cancelled.
    pub fn try_access_owned(self: &Arc<Self>) -> Result<OwnedAccessGuard, OwnedAccessGuard> {
        let may_stay = self.gate.enter();
        let guard = OwnedAccessGuard(Arc::clone(self));
        if may_stay { Ok(guard) } else { Err(guard) }
    }

    /// Returns whether the launch has failed or was cancelled: it gives no guard any more.
    pub fn is_closing(&self) -> bool {
        self.gate.is_closed()
    }

    /// Records that both sides have launched it, or that the copies within this task begin.
    pub fn mark_matched(&self) {
        self.is_matched.store(true, Ordering::Release);
        // Copies within this task match nothing.
        let has_peer = self.carrier.session.is_some();
        let now = if has_peer { self.launch.record_match_time() } else { self.launch.age_us() };
        self.progress.store(now, Ordering::Relaxed);
        // A receive without bytes is complete already.
        let spans = self.lists.inbound.spans.iter().enumerate();
        let empty: Vec<usize> = spans.filter(|(_, span)| span.is_empty()).map(|(at, _)| at).collect();
        self.complete_receives(&empty);
    }

    /// Adds bytes that a transport moved.
    pub fn add_progress(&self, bytes: u64) {
        self.moved.fetch_add(bytes, Ordering::Relaxed);
        self.progress.store(self.launch.age_us(), Ordering::Relaxed);
    }

    /// Records the transport that moves its bytes.
    pub fn set_transport(&self, kind: TransportKind) {
        self.launch.set_transport(kind);
    }

    /// Returns the priority class, and the bytes that have not moved yet.
    pub fn class_and_bytes_left(&self) -> (PriorityClass, u64) {
        (self.limits.class, self.lists.total_bytes().saturating_sub(self.moved.load(Ordering::Relaxed)))
    }

    /// Returns whether both sides have launched it.
    pub fn is_matched(&self) -> bool {
        self.is_matched.load(Ordering::Acquire)
    }

    /// Returns the time since the launch.
    pub fn age(&self) -> Duration {
        Duration::from_micros(self.launch.age_us())
    }

    /// Records that the bytes `start..start + len` of the inbound stream are in place.
    pub fn record_arrived_bytes(&self, start: u64, len: u64) {
        self.add_progress(len);
        let mut complete = Vec::new();
        self.lists.inbound.for_each_piece(start, len, |at, _, bytes| {
            let bytes = bytes as u64;
            if self.missing[at].fetch_sub(bytes, Ordering::AcqRel) == bytes {
                complete.push(at);
            }
        });
        self.complete_receives(&complete);
    }

    /// Completes these receives. Their buffers are released before any waiter learns of it.
    fn complete_receives(&self, receives: &[usize]) {
        let sends = self.lists.outbound.spans.len();
        self.release_reservations(receives.iter().map(|at| sends + at));
        for at in receives {
            self.launch.record_transfer_outcome(self.lists.inbound.specs[*at], true);
        }
    }

    /// Completes the sends: the peer has all bytes.
    pub fn complete_sends(&self) {
        self.unregister_send_waiter();
        self.release_reservations(0..self.lists.outbound.spans.len());
        for spec in &self.lists.outbound.specs {
            self.launch.record_transfer_outcome(*spec, true);
        }
    }

    fn release_reservations_from(&self, at: usize) {
        let mut reserved = lock(&self.reserved);
        let kept = at.min(reserved.len());
        let released = reserved.split_off(kept);
        drop(reserved);
        drop(released);
    }

    fn release_reservations(&self, which: impl ExactSizeIterator<Item = usize>) {
        if which.len() == 0 {
            return;
        }
        let mut reserved = lock(&self.reserved);
        let released: Vec<_> = which.filter_map(|at| reserved.get_mut(at)?.take()).collect();
        drop(reserved);
        drop(released);
    }

    /// Fails the transfers that are not complete, with this error unless an earlier one is recorded. Returns
    /// whether it is the first.
    pub fn fail_locally(self: &Arc<Self>, error: TransferError) -> bool {
        let first = self.failure.set(error).is_ok();
        if self.gate.close() {
            let is_empty = self.gate.is_closed_and_empty();
            if is_empty {
                self.resolve_failed_if_quiet();
            }
            // A lane that waits in the middle of a chunk must wake up to drop its guard, or the slot of bytes of a GPU.
            if (!is_empty || self.lists.has_bytes_of_gpus())
                && let Some(session) = self.session()
            {
                session.wake_lanes();
            }
        }
        first
    }

    /// Stops the group if the launch failed before it became one.
    pub fn stop_group_if_launch_failed(self: &Arc<Self>) {
        // This thread sets the group and then reads the failure; `fail_and_tell_peer` sets the failure and then reads
        // the group. At least one of the two sees the other's write.
        fence(Ordering::SeqCst);
        let (Some(error), Some(at)) = (self.failure.get(), self.group_id()) else { return };
        match self.session() {
            Some(session) if session.stop_group_of_launch(at, &reason_for_peer(error)) => {
                if self.is_resolved.load(Ordering::Acquire) {
                    session.announce_quiescence(at);
                }
            }
            _ => self.mark_peer_quiescent(),
        }
    }

    /// Resolves the part as failed, once, when no guard is left.
    fn resolve_failed_if_quiet(self: &Arc<Self>) {
        if !self.gate.is_closed_and_empty() || self.is_resolved.swap(true, Ordering::SeqCst) {
            return;
        }
        // Before the group and the quiescence of the peer are read: `stop_group_if_launch_failed` and `mark_peer_quiescent` have the
        // other fences.
        fence_after_read_modify_write();
        // The peer may still read what it fetches, until it says otherwise.
        let kept = if self.carrier.fetches { self.lists.outbound.spans.len() } else { 0 };
        self.release_reservations_from(kept);
        let error = self.failure.get().cloned().unwrap_or(TransferError::Closed);
        self.launch.fail_unresolved_transfers(self.lists.transfer_numbers(), &error);
        if let Some(at) = self.group_id()
            && let Some(session) = self.session()
        {
            session.announce_quiescence(at);
        }
        self.report_quiescence_if_proven();
    }

    /// Records that no byte can land at the peer any more, or that there is no peer.
    pub fn mark_peer_quiescent(&self) {
        self.is_peer_quiet.swap(true, Ordering::SeqCst);
        fence_after_read_modify_write();
        self.report_quiescence_if_proven();
    }

    /// Tells the launch once no byte can land on either side.
    fn report_quiescence_if_proven(&self) {
        let quiet = self.is_resolved.load(Ordering::SeqCst) && self.is_peer_quiet.load(Ordering::SeqCst);
        if quiet && !self.is_proven.swap(true, Ordering::AcqRel) {
            self.release_reservations_from(0);
            self.launch.mark_part_quiescent();
        }
    }

    /// Returns the next time at which to check the limits; none if the part is over.
    ///
    /// # Errors
    /// Returns [`TransferError::Deadline`] or [`TransferError::Stalled`] if that limit has passed at `now`.
    pub fn check_limits(
        &self,
        now: Instant,
        peer_silent: Duration,
    ) -> Result<Option<Instant>, TransferError> {
        if self.is_settled() || self.failure.get().is_some() {
            return Ok(None);
        }
        let (moved, total) = (self.moved.load(Ordering::Relaxed), self.lists.total_bytes());
        if self.limits.deadline.is_some_and(|deadline| now >= deadline) {
            return Err(TransferError::Deadline { moved, total });
        }
        let last = self.launch.start_time() + Duration::from_micros(self.progress.load(Ordering::Relaxed));
        let idle = now.saturating_duration_since(last);
        let stall = self.limits.stall;
        let waits = if self.is_matched.load(Ordering::Acquire) { idle } else { idle.min(peer_silent) };
        if waits >= stall {
            return Err(TransferError::Stalled { idle: waits, moved, total });
        }
        let next = now + (stall - waits);
        Ok(Some(self.limits.deadline.map_or(next, |deadline| deadline.min(next))))
    }

    /// Returns this part as the launch sees it.
    pub fn as_weak_launch_part(self: &Arc<Self>) -> Weak<dyn LaunchPart> {
        let part: Weak<Self> = Arc::downgrade(self);
        part
    }
}

impl LaunchPart for PeerLaunch {
    fn peer(&self) -> MemberId {
        self.carrier.peer
    }

    fn session(&self) -> Option<Arc<dyn SessionHandle>> {
        self.carrier.session()
    }

    fn register_send_waiter(&self) {
        Self::register_send_waiter(self);
    }

    fn is_settled(&self) -> bool {
        self.lists.transfer_numbers().all(|spec| self.launch.has_outcome_of(spec))
    }

    fn is_proven_quiescent(&self) -> bool {
        self.is_proven.load(Ordering::Acquire)
    }

    fn fail_and_tell_peer(self: Arc<Self>, error: TransferError) {
        fail_and_tell_peer(&self, error);
    }
}

impl Drop for PeerLaunch {
    /// Counts the part as proven: the link has forgotten it and no guard exists, so no byte can land.
    fn drop(&mut self) {
        self.unregister_send_waiter();
        if !self.is_proven.load(Ordering::Acquire) {
            self.launch.mark_part_quiescent();
        }
    }
}

/// Returns the reason that the peer is told. The peer knows by itself which task cancelled the launch.
fn reason_for_peer(error: &TransferError) -> String {
    match error {
        TransferError::Cancelled { reason, .. } => reason.clone(),
        other => other.to_string(),
    }
}

/// Fails a launch and tells the peer.
pub fn fail_and_tell_peer(launch: &Arc<PeerLaunch>, error: TransferError) {
    let Some(at) = launch.group_id() else {
        // Another thread is launching it now and may have checked for a failure already.
        launch.fail_locally(error);
        return launch.stop_group_if_launch_failed();
    };
    let stopped =
        launch.session().is_some_and(|session| session.stop_group_of_launch(at, &reason_for_peer(&error)));
    if !stopped {
        // The peer has no group in flight for it.
        launch.mark_peer_quiescent();
    }
    launch.fail_locally(error);
}
