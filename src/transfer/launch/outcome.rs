//! The outcomes of a launch's transfers, and the threads, tasks and callbacks that wait for them.
//!
//! It does not know how bytes move, and knows its parts by [`LaunchPart`] only. Begin at [`Launch::resolve`], by which
//! every outcome comes, and [`Launch::block`], by which threads wait.

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError, Weak};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use muster_clock as clock;

use super::session_handle::SessionHandle;
use crate::base::error::TransferError;
use crate::base::identity::{Member, TaskId};
use crate::base::meters::{Meters, Stage};
use crate::base::sync::{
    AtomicU8, AtomicU64, AtomicUsize, Condvar, Mutex, OnceLock, fence, fence_after_rmw, lock,
};
use crate::base::transport::TransportKind;

/// How a whole launch went.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stats {
    /// Bytes sent.
    pub sent: u64,
    /// Bytes received.
    pub received: u64,
    /// From the launch until the last byte was in place here, and known to be in place there.
    pub elapsed: Duration,
}

const PENDING: u8 = 0;
const DONE: u8 = 1;
const FAILED: u8 = 2;

/// Launches that move no more than this are over sooner than a thread is woken, if both sides are there.
const SMALL: u64 = 64 << 10;

/// Nothing waits.
const NO_WAITER: u8 = 0;
/// A waiter waits for the whole. A batch does not wake it for each of its transfers.
const WHOLE: u8 = 1;
/// A waiter waits for a single transfer.
const EACH: u8 = 2;

/// Called once with the outcome of a transfer, on the thread that brings it about.
type Callback = Box<dyn FnOnce(Result<(), TransferError>) + Send>;

/// A launch's part with one peer, as the launch knows it.
pub trait LaunchPart: Send + Sync {
    /// Returns the life that it is with.
    fn peer(&self) -> Member;

    /// Returns the session that carries it, if there still is one.
    fn session(&self) -> Option<Arc<dyn SessionHandle>>;

    /// Says that the program waits to hear that the peer has what is sent.
    fn wait_for_send(&self);

    /// Returns whether every transfer of it has its outcome.
    fn is_settled(&self) -> bool;

    /// Returns whether nothing of it can land on either side.
    fn is_proven(&self) -> bool;

    /// Gives it up, and tells the peer.
    fn give_up(self: Arc<Self>, error: TransferError);
}

/// The outcomes of a launch's transfers.
pub struct Launch {
    meters: Arc<Meters>,
    began: OnceLock<Instant>,
    /// When it was launched, when what it depends on had happened, when both sides had launched it, and when it was given
    /// up, in microseconds since it began; 0 where that has not been.
    launched_us: AtomicU64,
    ready_us: AtomicU64,
    matched_us: AtomicU64,
    given_up_us: AtomicU64,
    /// By which transport bytes last moved; none before.
    by: AtomicU8,
    /// The peer, or one of several.
    with: OnceLock<TaskId>,
    outcomes: Box<[AtomicU8]>,
    left: AtomicUsize,
    elapsed_us: AtomicU64,
    sent: u64,
    received: u64,
    failures: Mutex<Vec<(u32, TransferError)>>,
    /// As long as they are under way; parts own their launch.
    parts: OnceLock<Vec<Weak<dyn LaunchPart>>>,
    unproven: AtomicUsize,
    given_up: Mutex<Option<(TaskId, String)>>,
    /// Whether there are waiters, and for what: see `NO_WAITER` and the following.
    watched: AtomicU8,
    watchers: Mutex<Watchers>,
    changed: Condvar,
}

/// What waits, and cannot read what the peer says by itself.
#[derive(Default)]
struct Watchers {
    wakers: Vec<(AwaitedOutcome, Waker)>,
    /// Called with the outcome of one transfer.
    callbacks: Vec<(u32, Callback)>,
    /// How many threads sleep.
    asleep: usize,
}

/// What a waiter waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AwaitedOutcome {
    /// One transfer.
    One(u32),
    /// All of them.
    All,
    /// The proof of a cancellation.
    Proof,
}

impl Launch {
    /// Makes a launch of so many transfers, which send and receive so many bytes.
    pub fn new(meters: &Arc<Meters>, count: usize, sent: u64, received: u64) -> Arc<Self> {
        Arc::new(Self {
            meters: Arc::clone(meters),
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

    /// Starts its time.
    pub fn begin(&self) {
        let _once = self.began.set(clock::monotonic());
    }

    /// Names its peer, or one of several.
    pub fn set_peer(&self, task: TaskId) {
        let _once = self.with.set(task);
    }

    /// Returns when its time began to run.
    pub fn began(&self) -> Instant {
        self.began.get().copied().unwrap_or_else(clock::monotonic)
    }

    /// Returns how long its time has run, in microseconds.
    pub fn age_us(&self) -> u64 {
        u64::try_from(clock::monotonic().saturating_duration_since(self.began()).as_micros())
            .unwrap_or(u64::MAX)
    }

    /// Takes its parts. Returns which task gave it up meanwhile, and why.
    pub fn attach(&self, parts: Vec<Weak<dyn LaunchPart>>) -> Option<(TaskId, String)> {
        self.launched_us.store(self.age_us(), Ordering::Relaxed);
        if let Some(part) = parts.first().and_then(Weak::upgrade) {
            self.set_peer(part.peer().task);
        }
        let given_up = lock(&self.given_up);
        self.unproven.store(parts.len(), Ordering::Release);
        let _once = self.parts.set(parts);
        fence(Ordering::SeqCst);
        if self.watched.load(Ordering::SeqCst) != NO_WAITER {
            self.parts().for_each(|part| part.wait_for_send());
        }
        given_up.clone()
    }

    /// Returns whether it waits for its connections.
    pub fn awaits_connections(&self) -> bool {
        self.parts.get().is_none() && self.left.load(Ordering::SeqCst) > 0
    }

    /// Fails it if its deadline has passed while it waits for its connections. Later its parts see to it.
    pub fn on_deadline(&self, here: TaskId) {
        let mut given_up = lock(&self.given_up);
        if self.awaits_connections() {
            given_up.get_or_insert_with(|| {
                (here, "its deadline passed before its peers were reached".to_owned())
            });
            self.fail_all(&TransferError::Deadline { moved: 0, total: self.sent + self.received });
        }
    }

    /// Returns its parts that are under way.
    fn parts(&self) -> impl Iterator<Item = Arc<dyn LaunchPart>> {
        self.parts.get().into_iter().flatten().filter_map(Weak::upgrade)
    }

    /// Fails all of it, before it has parts.
    pub fn fail_all(&self, error: &TransferError) {
        self.resolve_failed(0..self.outcomes.len() as u32, error);
        self.unproven.swap(0, Ordering::AcqRel);
        fence_after_rmw();
        self.notify(|_| true);
    }

    /// Gives a transfer its outcome, unless it has one.
    pub fn resolve(&self, spec: u32, ok: bool) {
        let outcome = if ok { DONE } else { FAILED };
        let slot = &self.outcomes[spec as usize];
        if slot.compare_exchange(PENDING, outcome, Ordering::SeqCst, Ordering::SeqCst).is_err() {
            return;
        }
        let last = self.left.fetch_sub(1, Ordering::SeqCst) == 1;
        // Before `watched` is read, here and in `notify`. A waiter has the other fence, in `watch`.
        fence_after_rmw();
        if last {
            let now = self.age_us();
            self.elapsed_us.store(now, Ordering::Release);
            self.measure(now);
        }
        if last || self.watched.load(Ordering::SeqCst) == EACH {
            self.notify(|wanted| {
                wanted == AwaitedOutcome::One(spec) || last && wanted == AwaitedOutcome::All
            });
        }
    }

    /// Says that what it depends on has happened.
    pub fn mark_ready(&self) {
        self.ready_us.store(self.age_us(), Ordering::Relaxed);
    }

    /// Says that both sides have launched a part of it. Returns its age.
    pub fn mark_matched(&self) -> u64 {
        let now = self.age_us();
        self.matched_us.fetch_max(now, Ordering::Relaxed);
        now
    }

    /// Says by which transport bytes of it move.
    pub fn set_transport(&self, kind: TransportKind) {
        self.by.store(kind as u8, Ordering::Relaxed);
    }

    /// Counts how it went, when every transfer has its outcome. A launch that never began was never asked for.
    fn measure(&self, now: u64) {
        if self.began.get().is_none() {
            return;
        }
        let of = |moment: &AtomicU64| moment.load(Ordering::Relaxed);
        let (launched, ready, matched) = (of(&self.launched_us), of(&self.ready_us), of(&self.matched_us));
        if ready > 0 {
            self.meters.observe(Stage::Dependencies, ready.saturating_sub(launched));
        }
        if matched > 0 {
            self.meters.observe(Stage::Match, matched.saturating_sub(launched));
        }
        let failed = lock(&self.failures).first().map(|(_, error)| error.clone());
        match failed {
            None => {
                self.meters.observe(Stage::Move, now.saturating_sub(matched.max(ready)));
                let by = TransportKind::ALL.get(usize::from(self.by.load(Ordering::Relaxed))).copied();
                self.meters.completed(by, self.sent + self.received, now);
            }
            Some(error) => {
                self.meters.failed(self.with.get().copied(), &error);
            }
        }
    }

    /// Fails those of the transfers that have no outcome.
    pub fn resolve_failed(&self, specs: impl Iterator<Item = u32>, error: &TransferError) {
        for spec in specs {
            if self.outcomes[spec as usize].load(Ordering::Acquire) == PENDING {
                lock(&self.failures).push((spec, error.clone()));
                self.resolve(spec, false);
            }
        }
    }

    /// Counts a part of which nothing can land any more.
    pub fn mark_part_proven(&self) {
        let last = self.unproven.fetch_sub(1, Ordering::SeqCst) == 1;
        fence_after_rmw();
        if last {
            let given_up = self.given_up_us.load(Ordering::Relaxed);
            if given_up > 0 {
                self.meters.observe(Stage::Quiesce, self.age_us().saturating_sub(given_up));
            }
            self.notify(|wanted| wanted == AwaitedOutcome::Proof);
        }
    }

    /// Says that there is a waiter. The caller says so before it looks at the state.
    fn watch(&self, wanted: AwaitedOutcome) {
        let how = if matches!(wanted, AwaitedOutcome::One(_)) { EACH } else { WHOLE };
        self.watched.fetch_max(how, Ordering::SeqCst);
        // A thread that brings about an outcome sees that there is a waiter, or the waiter sees the outcome; likewise with
        // the parts, in `attach`.
        fence_after_rmw();
        if self.sent > 0 {
            self.parts().for_each(|part| part.wait_for_send());
        }
    }

    /// Wakes the waiters that wait for what is chosen.
    fn notify(&self, chosen: impl Fn(AwaitedOutcome) -> bool) {
        if self.watched.load(Ordering::SeqCst) == NO_WAITER {
            return;
        }
        let mut watchers = lock(&self.watchers);
        let woken: Vec<_> = watchers.wakers.extract_if(.., |(wanted, _)| chosen(*wanted)).collect();
        let called: Vec<_> =
            watchers.callbacks.extract_if(.., |(number, _)| chosen(AwaitedOutcome::One(*number))).collect();
        // A thread that polls the session does not sleep here, and costs no system call.
        let asleep = watchers.asleep > 0;
        drop(watchers);
        if asleep {
            self.changed.notify_all();
        }
        for session in self.parts().filter_map(|part| part.session()) {
            session.wake_poller();
        }
        woken.into_iter().for_each(|(_, waker)| waker.wake());
        for (number, callback) in called {
            callback(self.outcome(number).unwrap_or(Err(TransferError::Closed)));
        }
    }

    /// Calls `callback` with the outcome of one transfer: on the thread that brings it about, or on this one if there is an
    /// outcome already.
    pub fn on_outcome(&self, number: u32, callback: Callback) {
        lock(&self.watchers).callbacks.push((number, callback));
        self.watch(AwaitedOutcome::One(number));
        if self.has_outcome(number) {
            self.notify(|wanted| wanted == AwaitedOutcome::One(number));
        }
    }

    /// Returns whether a transfer has its outcome.
    pub fn has_outcome(&self, spec: u32) -> bool {
        self.outcomes[spec as usize].load(Ordering::SeqCst) != PENDING
    }

    /// Returns the outcome of one transfer, once it has one.
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

    /// Returns the outcome of all, once all have one: the first failure, if there is any.
    pub fn whole(&self) -> Option<Result<Stats, TransferError>> {
        if self.left.load(Ordering::SeqCst) > 0 {
            return None;
        }
        if let Some((_, error)) = lock(&self.failures).first() {
            return Some(Err(error.clone()));
        }
        let elapsed = Duration::from_micros(self.elapsed_us.load(Ordering::Acquire));
        Some(Ok(Stats { sent: self.sent, received: self.received, elapsed }))
    }

    /// Returns something once nothing of it can land any more.
    pub fn proof(&self) -> Option<()> {
        let over = self.left.load(Ordering::SeqCst) == 0;
        let failed = !lock(&self.failures).is_empty();
        (over && (!failed || self.unproven.load(Ordering::SeqCst) == 0)).then_some(())
    }

    /// Polls for a state on behalf of a future.
    pub fn poll<R>(
        &self,
        wanted: AwaitedOutcome,
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
        self.watch(wanted);
        state(self).map_or(Poll::Pending, Poll::Ready)
    }

    /// Blocks this thread until a state is there, or the time is over.
    pub fn block<R>(
        &self,
        wanted: AwaitedOutcome,
        until: Option<Instant>,
        state: impl Fn(&Self) -> Option<R>,
    ) -> Option<R> {
        if let Some(known) = state(self) {
            return Some(known);
        }
        self.watch(wanted);
        let soon = self.sent + self.received <= SMALL;
        let session = self.parts().find(|part| !part.is_settled()).and_then(|part| part.session());
        if let Some(session) = session
            && session.poll_until(until, soon, &|| state(self).is_some())
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

    /// Returns how many transfers it has.
    pub fn len(&self) -> usize {
        self.outcomes.len()
    }

    /// Returns how many transfers have no outcome.
    pub fn left(&self) -> usize {
        self.left.load(Ordering::SeqCst)
    }

    /// Gives up what is not complete, on behalf of the program of `here`.
    pub fn cancel(&self, here: TaskId, reason: &str) {
        let error = || TransferError::Cancelled { by: here, reason: reason.to_owned() };
        let parts: Vec<_> = {
            let mut given_up = lock(&self.given_up);
            given_up.get_or_insert_with(|| (here, reason.to_owned()));
            // At least 1: 0 says that it was not given up.
            let now = self.age_us().max(1);
            let _first = self.given_up_us.compare_exchange(0, now, Ordering::Relaxed, Ordering::Relaxed);
            if self.parts.get().is_none() {
                // Whatever it waits for, it will be launched only to be given up.
                self.fail_all(&error());
            }
            self.parts().collect()
        };
        parts.into_iter().for_each(|part| part.give_up(error()));
    }

    /// Ends the sessions with the peers that have not said, since it was given up, that nothing can land there any more.
    /// Returns those peers: nothing of them counts any more, and the proof needs no word of theirs.
    pub fn cut_off(&self, why: &str) -> Vec<Member> {
        let unproven = self.parts().filter(|part| !part.is_proven());
        let peers = unproven.map(|part| {
            let member = part.peer();
            if let Some(session) = part.session() {
                session.end(TransferError::PeerDead { member, how: why.to_owned() });
            }
            member
        });
        peers.collect()
    }
}
