//! The outcomes of a launch's transfers, and the threads, futures and callbacks that wait for them.
//!
//! This module does not depend on how bytes move. It calls the parts of the launch (one for each peer) only through
//! [`LaunchPart`]. Begin at [`Launch::record_transfer_outcome`], which records every outcome, and
//! [`Launch::block_until`], by which threads wait.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError, Weak};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use muster_clock as clock;

use super::session_handle::SessionHandle;
use crate::base::error::TransferError;
use crate::base::launch_metrics::{LaunchMetrics, LaunchStage};
use crate::base::membership::{MemberId, PeerTask, TaskId};
use crate::base::sync::{
    AtomicU8, AtomicU64, AtomicUsize, Condvar, Mutex, OnceLock, fence, fence_after_read_modify_write, lock,
};
use crate::base::transport::TransportKind;

/// The statistics of a completed launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LaunchStats {
    /// The bytes sent.
    pub sent: u64,
    /// The bytes received.
    pub received: u64,
    /// The time from the launch until all received bytes were in place and the peers had acknowledged all
    /// sent bytes.
    pub elapsed: Duration,
}

const PENDING: u8 = 0;
const DONE: u8 = 1;
const FAILED: u8 = 2;

/// The most bytes of a launch that usually completes sooner than a sleeping thread wakes up, if both sides
/// have launched.
const SMALL: u64 = 64 << 10;

/// No thread, task or callback waits.
const NO_WAITER: u8 = 0;
/// A waiter waits for the whole launch; the single transfers of a batch do not wake it.
const WHOLE: u8 = 1;
/// A waiter waits for a single transfer.
const EACH: u8 = 2;

/// A callback that is called once with the outcome of a transfer, on the thread that resolves it.
type OutcomeCallback = Box<dyn FnOnce(Result<(), TransferError>) + Send>;

/// The part of a launch that concerns one peer, as the launch sees it.
pub trait LaunchPart: Send + Sync {
    /// Returns the peer.
    fn peer(&self) -> MemberId;

    /// Returns the session that carries the part, or none if the session is gone.
    fn session(&self) -> Option<Arc<dyn SessionHandle>>;

    /// Registers the program as a waiter for the peer's acknowledgement of the sent bytes.
    fn register_send_waiter(&self);

    /// Returns whether every transfer of the part has its outcome.
    fn is_settled(&self) -> bool;

    /// Returns whether no byte of the part can land on either side any more.
    fn is_proven_quiescent(&self) -> bool;

    /// Cancels the part, and tells the peer.
    fn fail_and_tell_peer(self: Arc<Self>, error: TransferError);
}

/// The outcomes of a launch's transfers.
pub struct Launch {
    launch_metrics: Arc<LaunchMetrics>,
    began: OnceLock<Instant>,
    /// The times at which the launch was launched, its dependencies were complete, both sides had launched
    /// it, and it was cancelled, in microseconds since it began; 0 if that has not happened.
    launched_us: AtomicU64,
    ready_us: AtomicU64,
    matched_us: AtomicU64,
    given_up_us: AtomicU64,
    /// The transport that last moved bytes; `u8::MAX` before.
    by: AtomicU8,
    /// The task of the peer, or of one of several.
    with: OnceLock<PeerTask>,
    outcomes: Box<[AtomicU8]>,
    left: AtomicUsize,
    elapsed_us: AtomicU64,
    sent: u64,
    received: u64,
    failures: Mutex<Vec<(u32, TransferError)>>,
    /// The parts in flight. They are weak references because a part owns its launch.
    parts: OnceLock<Vec<Weak<dyn LaunchPart>>>,
    unproven: AtomicUsize,
    given_up: Mutex<Option<(PeerTask, String)>>,
    /// The kind of waiters: `NO_WAITER`, `WHOLE` or `EACH`.
    watched: AtomicU8,
    watchers: Mutex<OutcomeWaiters>,
    changed: Condvar,
}

/// The waiters that do not read the ring themselves.
#[derive(Default)]
struct OutcomeWaiters {
    wakers: Vec<(AwaitedLaunchState, Waker)>,
    /// Callbacks for single transfers, by their indexes.
    callbacks: BTreeMap<u32, Vec<OutcomeCallback>>,
    /// The number of sleeping threads.
    asleep: usize,
}

/// The state that a waiter waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AwaitedLaunchState {
    /// The outcome of one transfer.
    One(u32),
    /// The outcomes of all transfers.
    All,
    /// The proof that nothing lands any more.
    Proof,
}

impl Launch {
    /// Creates a launch of `count` transfers, with the bytes that they send and receive.
    pub fn new(launch_metrics: &Arc<LaunchMetrics>, count: usize, sent: u64, received: u64) -> Arc<Self> {
        Arc::new(Self {
            launch_metrics: Arc::clone(launch_metrics),
            began: OnceLock::new(),
            launched_us: AtomicU64::new(0),
            ready_us: AtomicU64::new(0),
            matched_us: AtomicU64::new(0),
            given_up_us: AtomicU64::new(0),
            by: AtomicU8::new(u8::MAX),
            with: OnceLock::new(),
            outcomes: (0..count).map(|_| AtomicU8::new(PENDING)).collect(),
            left: AtomicUsize::new(count),
            elapsed_us: AtomicU64::new(0),
            sent,
            received,
            failures: Mutex::default(),
            parts: OnceLock::new(),
            unproven: AtomicUsize::new(usize::MAX),
            given_up: Mutex::default(),
            watched: AtomicU8::new(NO_WAITER),
            watchers: Mutex::default(),
            changed: Condvar::new(),
        })
    }

    /// Starts the clock of the launch.
    pub fn start_clock(&self) {
        let _once = self.began.set(clock::monotonic());
    }

    /// Sets the peer; one of them, if there are several.
    pub fn set_peer_for_metrics(&self, peer: PeerTask) {
        let _once = self.with.set(peer);
    }

    /// Returns when the launch began; now, if it has not begun.
    pub fn start_time(&self) -> Instant {
        self.began.get().copied().unwrap_or_else(clock::monotonic)
    }

    /// Returns the time since the launch began, in microseconds.
    pub fn age_us(&self) -> u64 {
        u64::try_from(clock::monotonic().saturating_duration_since(self.start_time()).as_micros())
            .unwrap_or(u64::MAX)
    }

    /// Attaches the parts. Returns the task that cancelled the launch before, if any, and the reason.
    pub fn attach_parts(&self, parts: Vec<Weak<dyn LaunchPart>>) -> Option<(PeerTask, String)> {
        self.launched_us.store(self.age_us(), Ordering::Relaxed);
        if let Some(part) = parts.first().and_then(Weak::upgrade) {
            self.set_peer_for_metrics(part.peer().peer_task());
        }
        let given_up = lock(&self.given_up);
        self.unproven.store(parts.len(), Ordering::Release);
        let _once = self.parts.set(parts);
        fence(Ordering::SeqCst);
        if self.watched.load(Ordering::SeqCst) != NO_WAITER {
            self.parts_in_flight().for_each(|part| part.register_send_waiter());
        }
        given_up.clone()
    }

    /// Returns whether the launch waits for its connections.
    pub fn awaits_connections(&self) -> bool {
        self.parts.get().is_none() && self.left.load(Ordering::SeqCst) > 0
    }

    /// Fails the launch, after its deadline has passed, if it still waits for its connections. Once it has
    /// parts, they check the deadline.
    pub fn on_deadline(&self, here: TaskId) {
        let mut given_up = lock(&self.given_up);
        if self.awaits_connections() {
            given_up.get_or_insert_with(|| {
                (here.into(), "its deadline passed before its peers were reached".to_owned())
            });
            self.fail_all(&TransferError::Deadline { moved: 0, total: self.sent + self.received });
        }
    }

    /// Returns the parts that are in flight.
    fn parts_in_flight(&self) -> impl Iterator<Item = Arc<dyn LaunchPart>> {
        self.parts.get().into_iter().flatten().filter_map(Weak::upgrade)
    }

    /// Fails all transfers of a launch that has no parts yet.
    pub fn fail_all(&self, error: &TransferError) {
        if self.outcomes.is_empty() {
            // A refused request may name no transfers. Then the failure is that of the launch, not of a transfer.
            lock(&self.failures).push((0, error.clone()));
            self.record_metrics(self.age_us());
        }
        self.fail_unresolved_transfers(0..self.outcomes.len() as u32, error);
        self.unproven.swap(0, Ordering::AcqRel);
        fence_after_read_modify_write();
        self.wake_waiters(0..self.outcomes.len() as u32, |_| true);
    }

    /// Records the outcome of a transfer, unless it has one.
    pub fn record_transfer_outcome(&self, spec: u32, ok: bool) {
        let outcome = if ok { DONE } else { FAILED };
        let slot = &self.outcomes[spec as usize];
        if slot.compare_exchange(PENDING, outcome, Ordering::SeqCst, Ordering::SeqCst).is_err() {
            return;
        }
        let last = self.left.fetch_sub(1, Ordering::SeqCst) == 1;
        // Before `watched` is read, here and in `notify`. A waiter has the other fence, in `register_waiter`.
        fence_after_read_modify_write();
        if last {
            let now = self.age_us();
            self.elapsed_us.store(now, Ordering::Release);
            self.record_metrics(now);
        }
        if last || self.watched.load(Ordering::SeqCst) == EACH {
            self.wake_waiters(spec..spec + 1, |wanted| {
                wanted == AwaitedLaunchState::One(spec) || last && wanted == AwaitedLaunchState::All
            });
        }
    }

    /// Records that the dependencies of the launch are complete.
    pub fn record_ready_time(&self) {
        self.ready_us.store(self.age_us(), Ordering::Relaxed);
    }

    /// Records that both sides have launched a part. Returns the age of the launch in microseconds.
    pub fn record_match_time(&self) -> u64 {
        let now = self.age_us();
        self.matched_us.fetch_max(now, Ordering::Relaxed);
        now
    }

    /// Records the transport that moves bytes of the launch.
    pub fn set_transport(&self, kind: TransportKind) {
        self.by.store(kind as u8, Ordering::Relaxed);
    }

    /// Records the stages and the outcome of a launch once every transfer has its outcome. A launch that
    /// never began is not measured.
    fn record_metrics(&self, now: u64) {
        if self.began.get().is_none() {
            return;
        }
        let of = |moment: &AtomicU64| moment.load(Ordering::Relaxed);
        let (launched, ready, matched) = (of(&self.launched_us), of(&self.ready_us), of(&self.matched_us));
        if ready > 0 {
            self.launch_metrics.record_stage_us(LaunchStage::Dependencies, ready.saturating_sub(launched));
        }
        if matched > 0 {
            self.launch_metrics.record_stage_us(LaunchStage::Match, matched.saturating_sub(launched));
        }
        let failed = lock(&self.failures).first().map(|(_, error)| error.clone());
        match failed {
            None => {
                self.launch_metrics
                    .record_stage_us(LaunchStage::Move, now.saturating_sub(matched.max(ready)));
                let by = TransportKind::ALL.get(usize::from(self.by.load(Ordering::Relaxed))).copied();
                self.launch_metrics.count_completed(by, self.sent + self.received, now);
            }
            Some(error) => {
                self.launch_metrics.count_failed(self.with.get().copied(), &error);
            }
        }
    }

    /// Fails those of `specs` that have no outcome.
    pub fn fail_unresolved_transfers(&self, specs: impl Iterator<Item = u32>, error: &TransferError) {
        for spec in specs {
            if self.outcomes[spec as usize].load(Ordering::Acquire) == PENDING {
                lock(&self.failures).push((spec, error.clone()));
                self.record_transfer_outcome(spec, false);
            }
        }
    }

    /// Counts a part of which no byte can land any more.
    pub fn mark_part_quiescent(&self) {
        let last = self.unproven.fetch_sub(1, Ordering::SeqCst) == 1;
        fence_after_read_modify_write();
        if last {
            let given_up = self.given_up_us.load(Ordering::Relaxed);
            if given_up > 0 {
                self.launch_metrics
                    .record_stage_us(LaunchStage::Quiesce, self.age_us().saturating_sub(given_up));
            }
            self.wake_waiters(0..0, |wanted| wanted == AwaitedLaunchState::Proof);
        }
    }

    /// Registers a waiter. The caller must do so before it reads the state, or it may miss the wake-up.
    fn register_waiter(&self, wanted: AwaitedLaunchState) {
        let how = if matches!(wanted, AwaitedLaunchState::One(_)) { EACH } else { WHOLE };
        self.watched.fetch_max(how, Ordering::SeqCst);
        // A thread that brings about an outcome sees that there is a waiter, or the waiter sees the outcome; likewise with
        // the parts, in `attach_parts`.
        fence_after_read_modify_write();
        if self.sent > 0 {
            self.parts_in_flight().for_each(|part| part.register_send_waiter());
        }
    }

    /// Wakes the waiters whose wanted state is `chosen`, and calls the callbacks of the transfers with these indexes.
    fn wake_waiters(&self, resolved: Range<u32>, chosen: impl Fn(AwaitedLaunchState) -> bool) {
        if self.watched.load(Ordering::SeqCst) == NO_WAITER {
            return;
        }
        let mut watchers = lock(&self.watchers);
        let woken: Vec<_> = watchers.wakers.extract_if(.., |(wanted, _)| chosen(*wanted)).collect();
        let called: Vec<_> = resolved.filter_map(|number| watchers.callbacks.remove_entry(&number)).collect();
        // A thread that polls the session does not sleep on the condition variable, and costs no system call.
        let asleep = watchers.asleep > 0;
        drop(watchers);
        if asleep {
            self.changed.notify_all();
        }
        for session in self.parts_in_flight().filter_map(|part| part.session()) {
            session.wake_poller();
        }
        woken.into_iter().for_each(|(_, waker)| waker.wake());
        for (number, callbacks) in called {
            for callback in callbacks {
                callback(self.outcome(number).unwrap_or(Err(TransferError::Closed)));
            }
        }
    }

    /// Calls `callback` with the outcome of one transfer: on the thread that resolves it, or on this one if
    /// it has its outcome already.
    pub fn add_outcome_callback(&self, number: u32, callback: OutcomeCallback) {
        lock(&self.watchers).callbacks.entry(number).or_default().push(callback);
        self.register_waiter(AwaitedLaunchState::One(number));
        if self.has_outcome_of(number) {
            self.wake_waiters(number..number + 1, |wanted| wanted == AwaitedLaunchState::One(number));
        }
    }

    /// Returns whether a transfer has its outcome.
    pub fn has_outcome_of(&self, spec: u32) -> bool {
        self.outcomes[spec as usize].load(Ordering::SeqCst) != PENDING
    }

    /// Returns the outcome of one transfer, or none while it is pending.
    pub fn outcome(&self, spec: u32) -> Option<Result<(), TransferError>> {
        match self.outcomes[spec as usize].load(Ordering::SeqCst) {
            PENDING => None,
            DONE => Some(Ok(())),
            _ => Some(Err(lock(&self.failures)
                .iter()
                .find(|(failed, _)| *failed == spec)
                .map_or(TransferError::Closed, |(_, error)| error.clone()))),
        }
    }

    /// Returns the outcome of the launch, or none while a transfer is pending: the first failure, if there is
    /// one.
    pub fn overall_outcome(&self) -> Option<Result<LaunchStats, TransferError>> {
        if self.left.load(Ordering::SeqCst) > 0 {
            return None;
        }
        if let Some((_, error)) = lock(&self.failures).first() {
            return Some(Err(error.clone()));
        }
        let elapsed = Duration::from_micros(self.elapsed_us.load(Ordering::Acquire));
        Some(Ok(LaunchStats { sent: self.sent, received: self.received, elapsed }))
    }

    /// Returns `Some` once no byte of the launch can land any more.
    pub fn check_quiescence(&self) -> Option<()> {
        let over = self.left.load(Ordering::SeqCst) == 0;
        let failed = !lock(&self.failures).is_empty();
        (over && (!failed || self.unproven.load(Ordering::SeqCst) == 0)).then_some(())
    }

    /// Polls for a state on behalf of a future.
    pub fn poll_with_waker<R>(
        &self,
        wanted: AwaitedLaunchState,
        cx: &Context<'_>,
        state: impl Fn(&Self) -> Option<R>,
    ) -> Poll<R> {
        if let Some(known) = state(self) {
            return Poll::Ready(known);
        }
        let mut watchers = lock(&self.watchers);
        if !watchers.wakers.iter().any(|(what, waker)| *what == wanted && waker.will_wake(cx.waker())) {
            watchers.wakers.push((wanted, cx.waker().clone()));
        }
        drop(watchers);
        self.register_waiter(wanted);
        state(self).map_or(Poll::Pending, Poll::Ready)
    }

    /// Blocks this thread until `state` returns a value, or `until` has passed.
    pub fn block_until<R>(
        &self,
        wanted: AwaitedLaunchState,
        until: Option<Instant>,
        state: impl Fn(&Self) -> Option<R>,
    ) -> Option<R> {
        if let Some(known) = state(self) {
            return Some(known);
        }
        self.register_waiter(wanted);
        let soon = self.sent + self.received <= SMALL;
        let session = self.parts_in_flight().find(|part| !part.is_settled()).and_then(|part| part.session());
        if let Some(session) = session
            && session.poll_ring_on_this_thread(until, soon, &|| state(self).is_some())
            && let Some(known) = state(self)
        {
            return Some(known);
        }
        let mut guard = lock(&self.watchers);
        loop {
            if let Some(known) = state(self) {
                return Some(known);
            }
            let left = match until {
                None => Duration::MAX,
                Some(until) => until.checked_duration_since(clock::monotonic())?,
            };
            guard.asleep += 1;
            guard = self.changed.wait_timeout(guard, left).unwrap_or_else(PoisonError::into_inner).0;
            guard.asleep -= 1;
        }
    }

    /// Returns the number of transfers.
    pub fn len(&self) -> usize {
        self.outcomes.len()
    }

    /// Returns the number of transfers without an outcome.
    pub fn pending_count(&self) -> usize {
        self.left.load(Ordering::SeqCst)
    }

    /// Cancels the transfers that are not complete, on behalf of the program of task `here`.
    pub fn cancel(&self, here: TaskId, reason: &str) {
        let error = || TransferError::Cancelled { by: here.into(), reason: reason.to_owned() };
        let parts: Vec<_> = {
            let mut given_up = lock(&self.given_up);
            given_up.get_or_insert_with(|| (here.into(), reason.to_owned()));
            // At least 1, because 0 means that it was not cancelled.
            let now = self.age_us().max(1);
            let _first = self.given_up_us.compare_exchange(0, now, Ordering::Relaxed, Ordering::Relaxed);
            if self.parts.get().is_none() {
                // The launch still waits for its connections; when it gets them, its parts are cancelled at
                // once.
                self.fail_all(&error());
            }
            self.parts_in_flight().collect()
        };
        parts.into_iter().for_each(|part| part.fail_and_tell_peer(error()));
    }

    /// Ends the sessions with the peers that have not confirmed the cancellation, and returns those peers.
    /// Their bytes cannot land once the session is over, so the proof needs no confirmation from them.
    pub fn disconnect_unquiesced_peers(&self, why: &str) -> Vec<MemberId> {
        let unproven = self.parts_in_flight().filter(|part| !part.is_proven_quiescent());
        let peers = unproven.map(|part| {
            let member = part.peer();
            if let Some(session) = part.session() {
                session.end_session(TransferError::PeerDead { member, how: why.to_owned() });
            }
            member
        });
        peers.collect()
    }
}
