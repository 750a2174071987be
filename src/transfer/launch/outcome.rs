//! The outcomes of a launch's transfers, and who waits for them.

use std::sync::atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError, Weak};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use muster_clock as clock;

use super::peer_launch::Part;
use crate::base::error::TransferError;
use crate::base::identity::TaskId;
use crate::base::meters::{Meters, Stage};
use crate::base::sync::lock;
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

/// Nobody waits.
const NOBODY: u8 = 0;
/// Somebody waits for the whole. A batch does not wake them for each of its transfers.
const WHOLE: u8 = 1;
/// Somebody waits for a single transfer.
const EACH: u8 = 2;

/// The outcomes of a launch's transfers.
pub struct Launch {
    pub(super) meters: Arc<Meters>,
    pub(super) began: OnceLock<Instant>,
    /// When it was launched, when what it depends on had happened, when both sides had launched it, and when it was given
    /// up, in microseconds since it began; 0 where that has not been.
    pub(super) launched_us: AtomicU64,
    pub(super) ready_us: AtomicU64,
    pub(super) matched_us: AtomicU64,
    pub(super) given_up_us: AtomicU64,
    /// By which transport bytes last moved; none before.
    pub(super) by: AtomicU8,
    /// With whom, or with whom among others.
    pub(super) with: OnceLock<TaskId>,
    pub(super) outcomes: Box<[AtomicU8]>,
    pub(super) left: AtomicUsize,
    pub(super) elapsed_us: AtomicU64,
    pub(super) sent: u64,
    pub(super) received: u64,
    pub(super) failures: Mutex<Vec<(u32, TransferError)>>,
    /// As long as they are under way; parts know their launch.
    pub(super) parts: OnceLock<Vec<Weak<Part>>>,
    pub(super) unproven: AtomicUsize,
    pub(super) given_up: Mutex<Option<(TaskId, String)>>,
    /// Whether anybody waits, and for what: see `NOBODY` and the following.
    pub(super) watched: AtomicU8,
    pub(super) watchers: Mutex<Watchers>,
    pub(super) changed: Condvar,
}

/// Who waits, and cannot read what the peer says by itself.
#[derive(Debug, Default)]
pub(super) struct Watchers {
    wakers: Vec<(Wanted, Waker)>,
    /// How many threads sleep.
    asleep: usize,
}

/// What somebody waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wanted {
    /// One transfer.
    One(u32),
    /// All of them.
    All,
    /// The proof of a cancellation.
    Proof,
}

impl Launch {
    /// Of so many transfers, which send and receive so many bytes.
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
            watched: AtomicU8::new(NOBODY),
            watchers: Mutex::default(),
            changed: Condvar::new(),
        })
    }

    /// Its time runs from now.
    pub fn begin(&self) {
        let _once = self.began.set(clock::monotonic());
    }

    /// It is with this task, or with it among others.
    pub fn is_with(&self, task: TaskId) {
        let _once = self.with.set(task);
    }

    /// When its time began to run.
    pub fn began(&self) -> Instant {
        self.began.get().copied().unwrap_or_else(clock::monotonic)
    }

    pub(super) fn age_us(&self) -> u64 {
        u64::try_from(clock::monotonic().saturating_duration_since(self.began()).as_micros())
            .unwrap_or(u64::MAX)
    }

    /// It consists of these parts. Returns who gave it up meanwhile, and why.
    pub fn attach(&self, parts: &[Arc<Part>]) -> Option<(TaskId, String)> {
        self.launched_us.store(self.age_us(), Ordering::Relaxed);
        if let Some(part) = parts.first() {
            self.is_with(part.connection.peer.task);
        }
        let given_up = lock(&self.given_up);
        self.unproven.store(parts.len(), Ordering::Release);
        let _once = self.parts.set(parts.iter().map(Arc::downgrade).collect());
        fence(Ordering::SeqCst);
        if self.watched.load(Ordering::SeqCst) != NOBODY {
            parts.iter().for_each(|part| part.heed());
        }
        given_up.clone()
    }

    /// Whether it waits for its connections.
    pub fn waits(&self) -> bool {
        self.parts.get().is_none() && self.left.load(Ordering::SeqCst) > 0
    }

    /// Its deadline has passed. If it waits for its connections, it is over; else its parts see to it.
    pub fn is_late(&self, here: TaskId) {
        let mut given_up = lock(&self.given_up);
        if self.waits() {
            given_up.get_or_insert_with(|| {
                (here, "its deadline passed before its peers were reached".to_owned())
            });
            self.fail_all(&TransferError::Deadline { moved: 0, total: self.sent + self.received });
        }
    }

    /// Its parts that are under way.
    pub(super) fn parts(&self) -> impl Iterator<Item = Arc<Part>> {
        self.parts.get().into_iter().flatten().filter_map(Weak::upgrade)
    }

    /// It was over before it had parts.
    pub fn fail_all(&self, error: &TransferError) {
        self.settle_failed(0..self.outcomes.len() as u32, error);
        self.unproven.store(0, Ordering::Release);
        self.notify(|_| true);
    }

    pub(super) fn settle(&self, spec: u32, ok: bool) {
        let outcome = if ok { DONE } else { FAILED };
        let slot = &self.outcomes[spec as usize];
        if slot.compare_exchange(PENDING, outcome, Ordering::SeqCst, Ordering::SeqCst).is_err() {
            return;
        }
        let last = self.left.fetch_sub(1, Ordering::SeqCst) == 1;
        if last {
            let now = self.age_us();
            self.elapsed_us.store(now, Ordering::Release);
            self.measure(now);
        }
        if last || self.watched.load(Ordering::SeqCst) == EACH {
            self.notify(|wanted| wanted == Wanted::One(spec) || last && wanted == Wanted::All);
        }
    }

    /// What it depends on has happened.
    pub fn is_ready(&self) {
        self.ready_us.store(self.age_us(), Ordering::Relaxed);
    }

    /// Every transfer of it has its outcome: counts how it went. What never began, nobody asked for.
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

    pub(super) fn settle_failed(&self, specs: impl Iterator<Item = u32>, error: &TransferError) {
        for spec in specs {
            if self.outcomes[spec as usize].load(Ordering::Acquire) == PENDING {
                lock(&self.failures).push((spec, error.clone()));
                self.settle(spec, false);
            }
        }
    }

    pub(super) fn part_proven(&self) {
        if self.unproven.fetch_sub(1, Ordering::SeqCst) == 1 {
            let given_up = self.given_up_us.load(Ordering::Relaxed);
            if given_up > 0 {
                self.meters.observe(Stage::Quiesce, self.age_us().saturating_sub(given_up));
            }
            self.notify(|wanted| wanted == Wanted::Proof);
        }
    }

    /// Somebody waits. Said first; then they look whether what they wait for is there.
    pub(super) fn watch(&self, wanted: Wanted) {
        let how = if matches!(wanted, Wanted::One(_)) { EACH } else { WHOLE };
        self.watched.fetch_max(how, Ordering::SeqCst);
        if self.sent > 0 {
            fence(Ordering::SeqCst);
            self.parts().for_each(|part| part.heed());
        }
    }

    fn notify(&self, whom: impl Fn(Wanted) -> bool) {
        if self.watched.load(Ordering::SeqCst) == NOBODY {
            return;
        }
        let mut watchers = lock(&self.watchers);
        let mut woken = Vec::new();
        watchers.wakers.retain(|(wanted, waker)| {
            let now = whom(*wanted);
            if now {
                woken.push(waker.clone());
            }
            !now
        });
        // Nobody is told by the system in vain: a thread that follows the connection is not among those.
        let asleep = watchers.asleep > 0;
        drop(watchers);
        if asleep {
            self.changed.notify_all();
        }
        for part in self.parts() {
            part.connection.wake_follower();
        }
        woken.into_iter().for_each(Waker::wake);
    }

    /// The outcome of one transfer, once it has one.
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

    /// The outcome of all, once all have one: the first failure, if there is any.
    pub(super) fn whole(&self) -> Option<Result<Stats, TransferError>> {
        if self.left.load(Ordering::SeqCst) > 0 {
            return None;
        }
        if let Some((_, error)) = lock(&self.failures).first() {
            return Some(Err(error.clone()));
        }
        let elapsed = Duration::from_micros(self.elapsed_us.load(Ordering::Acquire));
        Some(Ok(Stats { sent: self.sent, received: self.received, elapsed }))
    }

    pub(super) fn proof(&self) -> Option<()> {
        let over = self.left.load(Ordering::SeqCst) == 0;
        let failed = !lock(&self.failures).is_empty();
        (over && (!failed || self.unproven.load(Ordering::SeqCst) == 0)).then_some(())
    }

    pub(super) fn poll<R>(
        &self,
        wanted: Wanted,
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

    pub(super) fn block<R>(
        &self,
        wanted: Wanted,
        until: Option<Instant>,
        state: impl Fn(&Self) -> Option<R>,
    ) -> Option<R> {
        if let Some(known) = state(self) {
            return Some(known);
        }
        self.watch(wanted);
        let soon = self.sent + self.received <= SMALL;
        let unsettled = self.parts().find(|part| !part.is_settled());
        if let Some(part) = unsettled
            && part.connection.follow(until, soon, || state(self).is_some())
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
}
