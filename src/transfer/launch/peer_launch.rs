//! The part of a launch that concerns one peer: one group of the link, its limits, and the guards of its bytes.
//!
//! It does not know how bytes move. Begin at [`PeerLaunch`]; [`give_up`] is how every failure of this side reaches the
//! peer.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::gate::AccessGate;
use super::io_lists::{IoLists, LaunchBytes};
use super::outcome::{Launch, LaunchPart};
use super::session_handle::{Carrier, POLL_INTERVAL, SessionHandle};
use crate::base::error::{MemoryError, TransferError};
use crate::base::identity::Member;
use crate::base::sync::{AtomicBool, AtomicU64, Mutex, OnceLock, fence, fence_after_rmw, lock};
use crate::base::transport::TransportKind;
use crate::memory::{Reservation, Use};
use crate::protocol::link::{Class, GroupId};

/// Limits of a launch, and how urgent it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LaunchLimits {
    /// When it must be done.
    pub deadline: Option<Instant>,
    /// How long nothing may move once both sides have launched, and how long the peer may be silent.
    pub stall: Duration,
    /// How urgent it is.
    pub class: Class,
}

/// A launch's part with one peer: one group of the link.
pub struct PeerLaunch {
    launch: Arc<Launch>,
    carrier: Carrier,
    /// Which bytes.
    pub lists: Arc<IoLists>,
    /// Limits.
    pub limits: LaunchLimits,
    group: OnceLock<GroupId>,
    gate: AccessGate,
    failure: OnceLock<TransferError>,
    is_resolved: AtomicBool,
    is_peer_quiet: AtomicBool,
    is_proven: AtomicBool,
    /// Bytes of each receive that are still to come.
    missing: Box<[AtomicU64]>,
    reserved: Mutex<Vec<Option<Reservation>>>,
    is_matched: AtomicBool,
    moved: AtomicU64,
    /// Whether the session counts it among those that wait for what they send.
    has_send_waiter: AtomicBool,
    /// When something last moved, in microseconds since the launch.
    progress: AtomicU64,
}

/// Leave to use the bytes of a launch, until it is dropped.
pub struct AccessGuard<'a>(&'a Arc<PeerLaunch>);

/// Leave to use the bytes of a launch, kept beyond one call. A lane keeps it from the first byte of a chunk that it
/// sends to the last: a frame that has begun ends with the bytes that it began with, or the peer would take others for
/// them. Once it [`is_closing`](Self::is_closing), the lane copies what is left of the chunk and drops this.
pub struct OwnedAccessGuard(Arc<PeerLaunch>);

impl<'a> AccessGuard<'a> {
    /// Returns the bytes that it guards.
    pub fn bytes(&self) -> LaunchBytes<'_> {
        LaunchBytes::guarded(&self.0.lists)
    }
}

impl Drop for AccessGuard<'_> {
    fn drop(&mut self) {
        if self.0.gate.leave() {
            self.0.on_quiet();
        }
    }
}

impl OwnedAccessGuard {
    /// Returns the launch.
    pub const fn launch(&self) -> &Arc<PeerLaunch> {
        &self.0
    }

    /// Returns the bytes that it guards.
    pub fn bytes(&self) -> LaunchBytes<'_> {
        LaunchBytes::guarded(&self.0.lists)
    }

    /// Returns whether the launch was given up, and waits for this guard to be dropped.
    pub fn is_closing(&self) -> bool {
        self.0.gate.is_closed()
    }
}

impl Drop for OwnedAccessGuard {
    fn drop(&mut self) {
        if self.0.gate.leave() {
            self.0.on_quiet();
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
    /// Makes one whose bytes are not yet [reserved](Self::reserve).
    pub fn new(
        launch: &Arc<Launch>,
        carrier: Carrier,
        lists: &Arc<IoLists>,
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
        // Its limits wait, and have to know how it stands.
        if limits.deadline.is_some() || limits.stall < 20 * POLL_INTERVAL {
            peer_launch.wait_for_send();
        }
        peer_launch
    }

    fn session(&self) -> Option<Arc<dyn SessionHandle>> {
        self.carrier.session()
    }

    /// Counts it among the launches that wait to hear at once that the peer has what they send.
    pub fn wait_for_send(&self) {
        if self.lists.outbound.total() == 0 || self.has_send_waiter.load(Ordering::SeqCst) {
            return;
        }
        let Some(session) = self.session() else { return };
        // Counted before it is marked: the thread that finds the mark takes away what has been added.
        session.add_send_waiter();
        if self.has_send_waiter.swap(true, Ordering::SeqCst) {
            session.remove_send_waiter();
        }
    }

    fn stop_waiting_for_send(&self) {
        if self.has_send_waiter.swap(false, Ordering::SeqCst)
            && let Some(session) = self.session()
        {
            session.remove_send_waiter();
        }
    }

    /// Reserves its bytes: those of the sends first, then those of the receives. It does nothing if the launch was given up
    /// by now: the program may have been told that they are free.
    ///
    /// # Errors
    /// If something else uses any of them.
    pub fn reserve(self: &Arc<Self>) -> Result<(), MemoryError> {
        // While it is guarded, nothing takes the bytes for free.
        let Some(_guard) = self.access() else { return Ok(()) };
        let spans = self.lists.outbound.spans.iter().map(|span| (span, Use::Read));
        let spans = spans.chain(self.lists.inbound.spans.iter().map(|span| (span, Use::Write)));
        let reserved = spans.map(|(span, how)| span.reserve(how).map(Some)).collect::<Result<_, _>>()?;
        *lock(&self.reserved) = reserved;
        Ok(())
    }

    /// Returns its group, once it is launched.
    pub fn group(&self) -> Option<GroupId> {
        self.group.get().copied()
    }

    /// Says that it became this group.
    pub fn set_group(&self, at: GroupId) {
        let _once = self.group.set(at);
    }

    /// Gives leave to use its bytes; none once it has failed or was given up.
    pub fn access(self: &Arc<Self>) -> Option<AccessGuard<'_>> {
        let may_stay = self.gate.enter();
        let guard = AccessGuard(self);
        may_stay.then_some(guard)
    }

    /// Gives leave to use its bytes beyond this call; none once it has failed or was given up.
    pub fn access_owned(self: &Arc<Self>) -> Option<OwnedAccessGuard> {
        let may_stay = self.gate.enter();
        let guard = OwnedAccessGuard(Arc::clone(self));
        may_stay.then_some(guard)
    }

    /// Says that both sides have launched it.
    pub fn mark_matched(&self) {
        self.is_matched.store(true, Ordering::Release);
        let now = self.launch.mark_matched();
        self.progress.store(now, Ordering::Relaxed);
        // A receive without bytes is complete already.
        let spans = self.lists.inbound.spans.iter().enumerate();
        let empty: Vec<usize> = spans.filter(|(_, span)| span.is_empty()).map(|(at, _)| at).collect();
        self.complete_receives(&empty);
    }

    /// Counts bytes of it that a transport took.
    pub fn add_progress(&self, bytes: u64) {
        self.moved.fetch_add(bytes, Ordering::Relaxed);
        self.progress.store(self.launch.age_us(), Ordering::Relaxed);
    }

    /// Says by which transport its bytes move.
    pub fn set_transport(&self, kind: TransportKind) {
        self.launch.set_transport(kind);
    }

    /// Returns its bytes that are still to move, and how urgent they are.
    pub fn in_flight(&self) -> (Class, u64) {
        (self.limits.class, self.lists.total().saturating_sub(self.moved.load(Ordering::Relaxed)))
    }

    /// Says that the bytes `start..start + len` of what is received are in place.
    pub fn add_arrived(&self, start: u64, len: u64) {
        self.add_progress(len);
        let mut complete = Vec::new();
        self.lists.inbound.each(start, len, |at, _, bytes| {
            let bytes = bytes as u64;
            if self.missing[at].fetch_sub(bytes, Ordering::AcqRel) == bytes {
                complete.push(at);
            }
        });
        self.complete_receives(&complete);
    }

    /// Completes these receives. Their buffers are free before any waiter hears of it.
    fn complete_receives(&self, receives: &[usize]) {
        let sends = self.lists.outbound.spans.len();
        self.release(receives.iter().map(|at| sends + at));
        for at in receives {
            self.launch.resolve(self.lists.inbound.specs[*at], true);
        }
    }

    /// Says that the peer has all that was sent.
    pub fn mark_sent(&self) {
        self.stop_waiting_for_send();
        self.release(0..self.lists.outbound.spans.len());
        for spec in &self.lists.outbound.specs {
            self.launch.resolve(*spec, true);
        }
    }

    fn release_from(&self, at: usize) {
        let mut reserved = lock(&self.reserved);
        let kept = at.min(reserved.len());
        let released = reserved.split_off(kept);
        drop(reserved);
        drop(released);
    }

    fn release(&self, which: impl ExactSizeIterator<Item = usize>) {
        if which.len() == 0 {
            return;
        }
        let mut reserved = lock(&self.reserved);
        let released: Vec<_> = which.filter_map(|at| reserved.get_mut(at)?.take()).collect();
        drop(reserved);
        drop(released);
    }

    /// Fails what is not complete, for this reason unless there was one before. Returns whether it is the first.
    pub fn fail(self: &Arc<Self>, error: TransferError) -> bool {
        let first = self.failure.set(error).is_ok();
        if self.gate.close() {
            if self.gate.is_quiet() {
                self.on_quiet();
            } else if let Some(session) = self.session() {
                // A lane that waits in the middle of a chunk has to drop its guard.
                session.wake_lanes();
            }
        }
        first
    }

    /// Gives the group up if the launch failed before it became one.
    pub fn stop_if_failed(self: &Arc<Self>) {
        // Here the group is set before the failure is read; `give_up` fails it before it reads the group. One of the two
        // sees the other.
        fence(Ordering::SeqCst);
        let (Some(error), Some(at)) = (self.failure.get(), self.group()) else { return };
        match self.session() {
            Some(session) if session.stop(at, &reason_for_peer(error)) => {
                if self.is_resolved.load(Ordering::Acquire) {
                    session.mark_quiesced(at);
                }
            }
            _ => self.mark_peer_quiet(),
        }
    }

    /// Says once that nothing can land any more.
    fn on_quiet(self: &Arc<Self>) {
        if !self.gate.is_quiet() || self.is_resolved.swap(true, Ordering::SeqCst) {
            return;
        }
        // Before the group and the quiet of the peer are read: `stop_if_failed` and `mark_peer_quiet` have the other fences.
        fence_after_rmw();
        // The peer may still read what it fetches, until it says otherwise.
        let kept = if self.carrier.fetches { self.lists.outbound.spans.len() } else { 0 };
        self.release_from(kept);
        let error = self.failure.get().cloned().unwrap_or(TransferError::Closed);
        self.launch.resolve_failed(self.lists.specs(), &error);
        if let Some(at) = self.group()
            && let Some(session) = self.session()
        {
            session.mark_quiesced(at);
        }
        self.check_proof();
    }

    /// Says that nothing can land at the peer any more, or that there is no peer.
    pub fn mark_peer_quiet(&self) {
        self.is_peer_quiet.swap(true, Ordering::SeqCst);
        fence_after_rmw();
        self.check_proof();
    }

    /// Tells the launch once nothing can land on either side.
    fn check_proof(&self) {
        let quiet = self.is_resolved.load(Ordering::SeqCst) && self.is_peer_quiet.load(Ordering::SeqCst);
        if quiet && !self.is_proven.swap(true, Ordering::AcqRel) {
            self.release_from(0);
            self.launch.mark_part_proven();
        }
    }

    /// Returns why it is over by its limits at `now`, or when to look again.
    ///
    /// # Errors
    /// With the limit that it has passed.
    pub fn check_limits(
        &self,
        now: Instant,
        peer_silent: Duration,
    ) -> Result<Option<Instant>, TransferError> {
        if self.is_settled() || self.failure.get().is_some() {
            return Ok(None);
        }
        let (moved, total) = (self.moved.load(Ordering::Relaxed), self.lists.total());
        if self.limits.deadline.is_some_and(|deadline| now >= deadline) {
            return Err(TransferError::Deadline { moved, total });
        }
        let last = self.launch.began() + Duration::from_micros(self.progress.load(Ordering::Relaxed));
        let idle = now.saturating_duration_since(last);
        let stall = self.limits.stall;
        let waits = if self.is_matched.load(Ordering::Acquire) { idle } else { idle.min(peer_silent) };
        if waits >= stall {
            return Err(TransferError::Stalled { idle: waits, moved, total });
        }
        let next = now + (stall - waits);
        Ok(Some(self.limits.deadline.map_or(next, |deadline| deadline.min(next))))
    }

    /// Returns itself as the launch knows it.
    pub fn as_part(self: &Arc<Self>) -> Weak<dyn LaunchPart> {
        let part: Weak<Self> = Arc::downgrade(self);
        part
    }
}

impl LaunchPart for PeerLaunch {
    fn peer(&self) -> Member {
        self.carrier.peer
    }

    fn session(&self) -> Option<Arc<dyn SessionHandle>> {
        self.carrier.session()
    }

    fn wait_for_send(&self) {
        Self::wait_for_send(self);
    }

    fn is_settled(&self) -> bool {
        self.lists.specs().all(|spec| self.launch.has_outcome(spec))
    }

    fn is_proven(&self) -> bool {
        self.is_proven.load(Ordering::Acquire)
    }

    fn give_up(self: Arc<Self>, error: TransferError) {
        give_up(&self, error);
    }
}

impl Drop for PeerLaunch {
    /// Counts it as proven: the link has forgotten it and nothing guards it, so nothing can land.
    fn drop(&mut self) {
        self.stop_waiting_for_send();
        if !self.is_proven.load(Ordering::Acquire) {
            self.launch.mark_part_proven();
        }
    }
}

/// Returns what the peer is told. It adds by itself which task gave the launch up.
fn reason_for_peer(error: &TransferError) -> String {
    match error {
        TransferError::Cancelled { reason, .. } => reason.clone(),
        other => other.to_string(),
    }
}

/// Fails a launch and tells the peer.
pub fn give_up(launch: &Arc<PeerLaunch>, error: TransferError) {
    let Some(at) = launch.group() else {
        // It is being launched at this moment, and the thread that launches it may have looked already.
        launch.fail(error);
        return launch.stop_if_failed();
    };
    let stopped = launch.session().is_some_and(|session| session.stop(at, &reason_for_peer(&error)));
    if !stopped {
        // The peer has nothing under way for it.
        launch.mark_peer_quiet();
    }
    launch.fail(error);
}
