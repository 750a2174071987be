//! A launch: what became of each of its transfers, and who waits to know.
//!
//! The rule that cancellation rests on: bytes of a launch's buffers are read or written only inside of a [`Visit`], no
//! visit begins after the part's pad is closed, and a part that failed says so only when the last visit has ended. So
//! whoever hears of a failure knows that no byte can land any more, whichever thread was at work.

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError, Weak};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use super::connection::{Connection, LOOK_AGAIN};
use super::error::{MemoryError, TransferError};
use super::identity::{Member, TaskId};
use super::link::{Class, GroupId};
use super::memory::raw::Piece;
use super::memory::{Reservation, Span, Use};
use super::meters::{Meters, Stage};
use super::sync::lock;
use super::transport::TransportKind;
use muster_clock as clock;

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

/// The bytes of one direction, as one stream in the order of the definition.
#[derive(Debug, Default)]
pub struct Stream {
    /// The spans, in order.
    pub spans: Vec<Span>,
    /// Where each begins in the stream; one more for the end.
    starts: Vec<u64>,
    /// The number of each within the launch.
    pub specs: Vec<u32>,
    /// Whether each goes on in memory where the one before it ends: small buffers that were allocated one after the
    /// other are one stretch for the kernel, and for checksums.
    joined: Vec<bool>,
}

impl Stream {
    /// Of spans with their numbers.
    pub fn new(parts: impl IntoIterator<Item = (u32, Span)>) -> Self {
        let mut stream = Self { starts: vec![0], ..Self::default() };
        let mut end = 0;
        for (spec, span) in parts {
            end += span.len() as u64;
            stream.joined.push(stream.spans.last().is_some_and(|last: &Span| last.goes_on_in(&span)));
            stream.starts.push(end);
            stream.specs.push(spec);
            stream.spans.push(span);
        }
        stream
    }

    /// Bytes in all.
    pub fn total(&self) -> u64 {
        self.starts.last().copied().unwrap_or(0)
    }

    /// Where a span begins in the stream.
    pub fn start(&self, at: usize) -> u64 {
        self.starts[at]
    }

    /// Whether a span goes on in memory where the one before it in the list ends.
    pub fn is_joined(&self, at: usize) -> bool {
        self.joined[at]
    }

    /// Calls `with` for each span that has bytes of `start..start + len`: its place in the list, its first byte of
    /// them, and how many.
    pub fn each(&self, start: u64, len: u64, mut with: impl FnMut(usize, usize, usize)) {
        let end = start + len;
        let mut at = self.starts.partition_point(|begin| *begin <= start).saturating_sub(1);
        while at < self.spans.len() && self.starts[at] < end {
            let from = start.max(self.starts[at]);
            let to = end.min(self.starts[at + 1]);
            if from < to {
                with(at, (from - self.starts[at]) as usize, (to - from) as usize);
            }
            at += 1;
        }
    }

    /// The bytes `start..start + len` as pieces, as few as they are, until `into` has `most`.
    pub fn pieces<'a>(&'a self, start: u64, len: u64, most: usize, into: &mut Vec<Piece<'a>>) {
        let end = start + len;
        let mut at = self.starts.partition_point(|begin| *begin <= start).saturating_sub(1);
        while at < self.spans.len() && self.starts[at] < end && into.len() < most {
            let (first, from) = (at, start.max(self.starts[at]));
            at += 1;
            while at < self.spans.len() && self.joined[at] && self.starts[at] < end {
                at += 1;
            }
            let to = end.min(self.starts[at]);
            if from < to {
                let span = &self.spans[first];
                into.push(span.piece_across((from - self.starts[first]) as usize, (to - from) as usize));
            }
        }
    }

    /// Appends the bytes `start..start + len`. The caller holds a visit.
    pub fn copy_out(&self, start: u64, len: u64, into: &mut Vec<u8>) {
        let mut pieces = Vec::new();
        self.pieces(start, len, usize::MAX, &mut pieces);
        for piece in pieces {
            piece.read(|bytes| into.extend_from_slice(bytes));
        }
    }

    /// Puts `bytes` in place from `start` on. The caller holds a visit.
    pub fn copy_in(&self, start: u64, mut bytes: &[u8]) {
        let mut pieces = Vec::new();
        self.pieces(start, bytes.len() as u64, usize::MAX, &mut pieces);
        for piece in pieces {
            let (here, rest) = bytes.split_at(piece.len());
            piece.copy_from(&Piece::of(here));
            bytes = rest;
        }
    }
}

/// What a prepared launch does with one peer. The same for every launch of it.
#[derive(Debug, Default)]
pub struct Work {
    /// What is sent.
    pub out: Stream,
    /// What is received.
    pub inbound: Stream,
}

/// Says who may use the bytes of a part: visits are counted until it is closed.
#[derive(Debug, Default)]
struct Pad(AtomicU32);

const CLOSED: u32 = 1 << 31;

impl Pad {
    /// Begins a visit; whether it may go on. It is to be ended either way.
    fn enter(&self) -> bool {
        // Counted first, then looked at: a closing that comes between sees the visit and waits for it. So whoever is
        // turned away has to leave like all others: they may be the last.
        self.0.fetch_add(1, Ordering::AcqRel) & CLOSED == 0
    }

    /// Ends a visit. Whether it was the last one of a closed pad.
    fn leave(&self) -> bool {
        self.0.fetch_sub(1, Ordering::AcqRel) == CLOSED | 1
    }

    /// Whether this call closed it.
    fn close(&self) -> bool {
        self.0.fetch_or(CLOSED, Ordering::AcqRel) & CLOSED == 0
    }

    fn is_quiet(&self) -> bool {
        self.0.load(Ordering::Acquire) == CLOSED
    }

    fn is_closed(&self) -> bool {
        self.0.load(Ordering::Acquire) & CLOSED != 0
    }
}

/// Leave to read or write the bytes of a part, until it is dropped.
pub struct Visit<'a>(&'a Arc<Part>);

impl Drop for Visit<'_> {
    fn drop(&mut self) {
        if self.0.pad.leave() {
            self.0.quiet();
        }
    }
}

/// Leave to use the bytes of a part, kept beyond one call. Of a chunk that is sent it is kept from its first byte to its
/// last: a frame that has begun ends with the bytes that it began with, or the peer would take others for them. Once
/// [`is_closing`](Stay::is_closing), what is left of the chunk is copied and this is let go.
pub struct Stay(Arc<Part>);

impl Stay {
    /// The part.
    pub const fn part(&self) -> &Arc<Part> {
        &self.0
    }

    /// Whether somebody waits for the bytes to be left alone.
    pub fn is_closing(&self) -> bool {
        self.0.pad.is_closed()
    }
}

impl Drop for Stay {
    fn drop(&mut self) {
        if self.0.pad.leave() {
            self.0.quiet();
        }
    }
}

/// Limits of a launch, and how urgent it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// When it must be done.
    pub deadline: Option<Instant>,
    /// How long nothing may move once both sides have launched, and how long the peer may be silent.
    pub stall: Duration,
    /// How urgent it is.
    pub class: Class,
}

/// A launch's part with one peer: one group of the link.
pub struct Part {
    /// The launch.
    launch: Arc<Launch>,
    /// With whom.
    pub connection: Arc<Connection>,
    /// Which bytes.
    pub work: Arc<Work>,
    /// Limits.
    pub limits: Limits,
    at: OnceLock<GroupId>,
    pad: Pad,
    failure: OnceLock<TransferError>,
    resolved: AtomicBool,
    peer_quiet: AtomicBool,
    proven: AtomicBool,
    /// Bytes of each receive that are still to come.
    missing: Box<[AtomicU64]>,
    reserved: Mutex<Vec<Option<Reservation>>>,
    matched: AtomicBool,
    moved: AtomicU64,
    /// Whether its connection knows that somebody waits for what it sends.
    heeded: AtomicBool,
    /// When something last moved, in microseconds since the launch.
    progress: AtomicU64,
}

impl PartialEq for Part {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self, other)
    }
}

impl std::fmt::Debug for Part {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Part").field("at", &self.at).finish_non_exhaustive()
    }
}

impl Part {
    /// A part whose bytes are not yet [reserved](Self::reserve).
    pub fn new(
        launch: &Arc<Launch>,
        connection: &Arc<Connection>,
        work: &Arc<Work>,
        limits: Limits,
    ) -> Arc<Self> {
        let part = Arc::new(Self {
            launch: Arc::clone(launch),
            connection: Arc::clone(connection),
            work: Arc::clone(work),
            limits,
            at: OnceLock::new(),
            pad: Pad::default(),
            failure: OnceLock::new(),
            resolved: AtomicBool::new(false),
            peer_quiet: AtomicBool::new(false),
            proven: AtomicBool::new(false),
            missing: work.inbound.spans.iter().map(|span| AtomicU64::new(span.len() as u64)).collect(),
            reserved: Mutex::default(),
            matched: AtomicBool::new(false),
            moved: AtomicU64::new(0),
            heeded: AtomicBool::new(false),
            progress: AtomicU64::new(0),
        });
        // Its limits wait, and have to know how it stands.
        if limits.deadline.is_some() || limits.stall < 20 * LOOK_AGAIN {
            part.heed();
        }
        part
    }

    /// From here on somebody waits for it: that the peer has what it sends is to be heard at once.
    pub fn heed(&self) {
        if self.work.out.total() == 0 || self.heeded.load(Ordering::SeqCst) {
            return;
        }
        // Counted first: whoever finds the mark takes away what has been added.
        self.connection.heed();
        if self.heeded.swap(true, Ordering::SeqCst) {
            self.connection.heed_no_more();
        }
    }

    fn heed_no_more(&self) {
        if self.heeded.swap(false, Ordering::SeqCst) {
            self.connection.heed_no_more();
        }
    }

    /// Takes its bytes into use: those of the sends first, then those of the receives. Not if it was given up by now: whoever
    /// did so may have been told that they are free.
    ///
    /// # Errors
    /// If something else uses any of them.
    pub fn reserve(self: &Arc<Self>) -> Result<(), MemoryError> {
        // While it is visited, nobody takes them for left alone.
        let Some(_visit) = self.visit() else { return Ok(()) };
        let spans = self.work.out.spans.iter().map(|span| (span, Use::Read));
        let spans = spans.chain(self.work.inbound.spans.iter().map(|span| (span, Use::Write)));
        let reserved = spans.map(|(span, how)| span.reserve(how).map(Some)).collect::<Result<_, _>>()?;
        *lock(&self.reserved) = reserved;
        Ok(())
    }

    /// Its group, once it is launched.
    pub fn at(&self) -> Option<GroupId> {
        self.at.get().copied()
    }

    /// It became this group.
    pub fn is_at(&self, at: GroupId) {
        let _once = self.at.set(at);
    }

    /// Leave to use its bytes; none once it has failed or was given up.
    pub fn visit(self: &Arc<Self>) -> Option<Visit<'_>> {
        let visit = self.pad.enter();
        let visitor = Visit(self);
        visit.then_some(visitor)
    }

    /// Leave to use its bytes for longer; none once it has failed or was given up.
    pub fn stay(self: &Arc<Self>) -> Option<Stay> {
        let visit = self.pad.enter();
        let visitor = Stay(Arc::clone(self));
        visit.then_some(visitor)
    }

    /// Both sides have launched it.
    pub fn match_found(&self) {
        self.matched.store(true, Ordering::Release);
        let now = self.launch.age_us();
        self.progress.store(now, Ordering::Relaxed);
        self.launch.matched_us.fetch_max(now, Ordering::Relaxed);
        // What has no bytes is there already.
        let spans = self.work.inbound.spans.iter().enumerate();
        let empty: Vec<usize> = spans.filter(|(_, span)| span.is_empty()).map(|(at, _)| at).collect();
        self.complete_receives(&empty);
    }

    fn touch(&self) {
        self.progress.store(self.launch.age_us(), Ordering::Relaxed);
    }

    /// Bytes of it were taken by a transport.
    pub fn progressed(&self, bytes: u64) {
        self.moved.fetch_add(bytes, Ordering::Relaxed);
        self.touch();
    }

    /// Bytes of it move by this transport.
    pub fn moves_by(&self, kind: TransportKind) {
        self.launch.by.store(kind as u8, Ordering::Relaxed);
    }

    /// Bytes of it that are still to move, and how urgent they are.
    pub fn in_flight(&self) -> (Class, u64) {
        let total = self.work.out.total() + self.work.inbound.total();
        (self.limits.class, total.saturating_sub(self.moved.load(Ordering::Relaxed)))
    }

    /// The bytes `start..start + len` of what is received are in place.
    pub fn arrived(&self, start: u64, len: u64) {
        self.progressed(len);
        let mut complete = Vec::new();
        self.work.inbound.each(start, len, |at, _, bytes| {
            let bytes = bytes as u64;
            if self.missing[at].fetch_sub(bytes, Ordering::AcqRel) == bytes {
                complete.push(at);
            }
        });
        self.complete_receives(&complete);
    }

    /// These receives are here. Their buffers are free before anybody hears of it.
    fn complete_receives(&self, receives: &[usize]) {
        let sends = self.work.out.spans.len();
        self.release(receives.iter().map(|at| sends + at));
        for at in receives {
            self.launch.settle(self.work.inbound.specs[*at], true);
        }
    }

    /// The peer has all that was sent.
    pub fn sent(&self) {
        self.heed_no_more();
        self.release(0..self.work.out.spans.len());
        for spec in &self.work.out.specs {
            self.launch.settle(*spec, true);
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

    /// Fails what is not complete, for this reason unless there was one before. Whether it is the first.
    pub fn fail(self: &Arc<Self>, error: TransferError) -> bool {
        let first = self.failure.set(error).is_ok();
        if self.pad.close() {
            if self.pad.is_quiet() {
                self.quiet();
            } else {
                // A lane that waits in the middle of a chunk has to let go of it.
                self.connection.hurry();
            }
        }
        first
    }

    /// It has become a group. If it had failed by then, the group is given up.
    pub fn has_begun(self: &Arc<Self>) {
        // Here it is first known and then asked; in `give_up` it first fails and then asks. One of the two sees the other.
        fence(Ordering::SeqCst);
        let (Some(error), Some(at)) = (self.failure.get(), self.at()) else { return };
        if !self.connection.stop(at, &told(error)) {
            self.peer_is_quiet();
        } else if self.resolved.load(Ordering::Acquire) {
            self.connection.quiesced(at);
        }
    }

    /// Nothing can land any more: says so, once.
    fn quiet(self: &Arc<Self>) {
        if !self.pad.is_quiet() || self.resolved.swap(true, Ordering::SeqCst) {
            return;
        }
        // What a peer fetches it may still read, until it says otherwise.
        let kept = if self.connection.fetches { self.work.out.spans.len() } else { 0 };
        self.release_from(kept);
        let error = self.failure.get().cloned().unwrap_or(TransferError::Closed);
        self.launch
            .settle_failed(self.work.out.specs.iter().chain(&self.work.inbound.specs).copied(), &error);
        if let Some(at) = self.at() {
            self.connection.quiesced(at);
        }
        self.prove();
    }

    /// Nothing can land at the peer any more, or there is no peer.
    pub fn peer_is_quiet(&self) {
        self.peer_quiet.store(true, Ordering::SeqCst);
        self.prove();
    }

    /// If nothing can land on either side, whoever cancelled is told.
    fn prove(&self) {
        let quiet = self.resolved.load(Ordering::SeqCst) && self.peer_quiet.load(Ordering::SeqCst);
        if quiet && !self.proven.swap(true, Ordering::AcqRel) {
            self.release_from(0);
            self.launch.part_proven();
        }
    }

    /// Whether every transfer of it has its outcome.
    pub fn is_settled(&self) -> bool {
        let specs = self.work.out.specs.iter().chain(&self.work.inbound.specs);
        specs.copied().all(|spec| self.launch.outcome(spec).is_some())
    }

    /// Why it is over by its limits at `now`; or when to look again.
    pub fn overdue(&self, now: Instant, peer_silent: Duration) -> Result<Option<Instant>, TransferError> {
        if self.is_settled() || self.failure.get().is_some() {
            return Ok(None);
        }
        let (moved, total) =
            (self.moved.load(Ordering::Relaxed), self.work.out.total() + self.work.inbound.total());
        if self.limits.deadline.is_some_and(|deadline| now >= deadline) {
            return Err(TransferError::Deadline { moved, total });
        }
        let last = self.launch.began() + Duration::from_micros(self.progress.load(Ordering::Relaxed));
        let idle = now.saturating_duration_since(last);
        let stall = self.limits.stall;
        let waits = if self.matched.load(Ordering::Acquire) { idle } else { idle.min(peer_silent) };
        if waits >= stall {
            return Err(TransferError::Stalled { idle: waits, moved, total });
        }
        let next = now + (stall - waits);
        Ok(Some(self.limits.deadline.map_or(next, |deadline| deadline.min(next))))
    }
}

impl Drop for Part {
    /// The link has forgotten it and nobody visits it: nothing can land.
    fn drop(&mut self) {
        self.heed_no_more();
        if !*self.proven.get_mut() {
            self.launch.part_proven();
        }
    }
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
    /// With whom, or with whom among others.
    with: OnceLock<TaskId>,
    outcomes: Box<[AtomicU8]>,
    left: AtomicUsize,
    elapsed_us: AtomicU64,
    sent: u64,
    received: u64,
    failures: Mutex<Vec<(u32, TransferError)>>,
    /// As long as they are under way; parts know their launch.
    parts: OnceLock<Vec<Weak<Part>>>,
    unproven: AtomicUsize,
    given_up: Mutex<Option<(TaskId, String)>>,
    /// Whether anybody waits, and for what: see `NOBODY` and the following.
    watched: AtomicU8,
    watchers: Mutex<Watchers>,
    changed: Condvar,
}

/// Who waits, and cannot read what the peer says by itself.
#[derive(Debug, Default)]
struct Watchers {
    wakers: Vec<(Wanted, Waker)>,
    /// How many threads sleep.
    asleep: usize,
}

/// What somebody waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wanted {
    One(u32),
    All,
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

    fn age_us(&self) -> u64 {
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
    fn parts(&self) -> impl Iterator<Item = Arc<Part>> {
        self.parts.get().into_iter().flatten().filter_map(Weak::upgrade)
    }

    /// It was over before it had parts.
    pub fn fail_all(&self, error: &TransferError) {
        self.settle_failed(0..self.outcomes.len() as u32, error);
        self.unproven.store(0, Ordering::Release);
        self.notify(|_| true);
    }

    fn settle(&self, spec: u32, ok: bool) {
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

    fn settle_failed(&self, specs: impl Iterator<Item = u32>, error: &TransferError) {
        for spec in specs {
            if self.outcomes[spec as usize].load(Ordering::Acquire) == PENDING {
                lock(&self.failures).push((spec, error.clone()));
                self.settle(spec, false);
            }
        }
    }

    fn part_proven(&self) {
        if self.unproven.fetch_sub(1, Ordering::SeqCst) == 1 {
            let given_up = self.given_up_us.load(Ordering::Relaxed);
            if given_up > 0 {
                self.meters.observe(Stage::Quiesce, self.age_us().saturating_sub(given_up));
            }
            self.notify(|wanted| wanted == Wanted::Proof);
        }
    }

    /// Somebody waits. Said first; then they look whether what they wait for is there.
    fn watch(&self, wanted: Wanted) {
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
    fn whole(&self) -> Option<Result<Stats, TransferError>> {
        if self.left.load(Ordering::SeqCst) > 0 {
            return None;
        }
        if let Some((_, error)) = lock(&self.failures).first() {
            return Some(Err(error.clone()));
        }
        let elapsed = Duration::from_micros(self.elapsed_us.load(Ordering::Acquire));
        Some(Ok(Stats { sent: self.sent, received: self.received, elapsed }))
    }

    fn proof(&self) -> Option<()> {
        let over = self.left.load(Ordering::SeqCst) == 0;
        let failed = !lock(&self.failures).is_empty();
        (over && (!failed || self.unproven.load(Ordering::SeqCst) == 0)).then_some(())
    }

    fn poll<R>(&self, wanted: Wanted, cx: &Context<'_>, state: impl Fn(&Self) -> Option<R>) -> Poll<R> {
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

    fn block<R>(
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

/// Transfers under way. A future of the outcome of all; to wait without a runtime, [`wait`](Transfer::wait).
///
/// Dropping it does not cancel anything.
#[derive(Clone)]
pub struct Transfer {
    launch: Arc<Launch>,
    here: TaskId,
}

impl std::fmt::Debug for Transfer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Transfer").field("left", &self.launch.left).finish_non_exhaustive()
    }
}

impl Transfer {
    pub(super) const fn new(launch: Arc<Launch>, here: TaskId) -> Self {
        Self { launch, here }
    }

    /// How many transfers it has.
    #[must_use]
    pub fn len(&self) -> usize {
        self.launch.outcomes.len()
    }

    /// Whether it has none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.launch.outcomes.is_empty()
    }

    /// The outcome, if it is known.
    #[must_use]
    pub fn outcome(&self) -> Option<Result<Stats, TransferError>> {
        self.launch.whole()
    }

    /// The outcome of the transfer with this number in the request, if it is known.
    #[must_use]
    pub fn outcome_of(&self, number: usize) -> Option<Result<(), TransferError>> {
        self.launch.outcome(u32::try_from(number).ok()?)
    }

    /// A future of the outcome of the transfer with this number in the request.
    #[must_use]
    pub fn one(&self, number: usize) -> Completion {
        Completion { launch: Arc::clone(&self.launch), number: number as u32 }
    }

    /// Waits for the outcome on this thread.
    ///
    /// # Errors
    /// Of the first transfer that failed, when all have their outcome.
    pub fn wait(&self) -> Result<Stats, TransferError> {
        self.launch.block(Wanted::All, None, Launch::whole).unwrap_or(Err(TransferError::Closed))
    }

    /// Waits so long; none if it is not known by then.
    #[must_use]
    pub fn wait_for(&self, time: Duration) -> Option<Result<Stats, TransferError>> {
        self.launch.block(Wanted::All, Some(clock::monotonic() + time), Launch::whole)
    }

    /// Gives up what is not complete. What is returned resolves when no byte can land any more, neither here nor at
    /// the peers: it is a proof, not a request.
    pub fn cancel(&self, reason: &str) -> Quiesced {
        let parts = {
            let mut given_up = lock(&self.launch.given_up);
            given_up.get_or_insert_with(|| (self.here, reason.to_owned()));
            // At least 1: 0 says that nobody has.
            let now = self.launch.age_us().max(1);
            let _first =
                self.launch.given_up_us.compare_exchange(0, now, Ordering::Relaxed, Ordering::Relaxed);
            if self.launch.parts.get().is_none() {
                // Whatever it waits for, it will be launched only to be given up.
                self.launch.fail_all(&TransferError::Cancelled { by: self.here, reason: reason.to_owned() });
            }
            self.launch.parts()
        };
        for part in parts {
            give_up(&part, TransferError::Cancelled { by: self.here, reason: reason.to_owned() });
        }
        Quiesced { launch: Arc::clone(&self.launch) }
    }

    /// Ends the connections with the peers that have not said, since it was given up, that nothing can land there any more.
    /// Returns with whom: nothing of them counts any more, and what is proven needs no word of theirs.
    pub(super) fn cut_off(&self, why: &str) -> Vec<Member> {
        let unproven = self.launch.parts().filter(|part| !part.proven.load(Ordering::Acquire));
        let peers = unproven.map(|part| {
            let member = part.connection.peer;
            part.connection.end(TransferError::PeerDead { member, how: why.to_owned() });
            member
        });
        peers.collect()
    }
}

/// What the peer is told: it adds by itself who gave it up.
fn told(error: &TransferError) -> String {
    match error {
        TransferError::Cancelled { reason, .. } => reason.clone(),
        other => other.to_string(),
    }
}

/// Fails a part and tells the peer.
pub(super) fn give_up(part: &Arc<Part>, error: TransferError) {
    match part.at() {
        Some(at) => {
            if !part.connection.stop(at, &told(&error)) {
                // The peer has nothing under way for it.
                part.peer_is_quiet();
            }
            part.fail(error);
        }
        // It is being launched at this moment: whoever does so may have looked already.
        None => {
            part.fail(error);
            part.has_begun();
        }
    }
}

impl Future for Transfer {
    type Output = Result<Stats, TransferError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.launch.poll(Wanted::All, cx, Launch::whole)
    }
}

/// A future of the outcome of one transfer.
#[derive(Clone)]
pub struct Completion {
    launch: Arc<Launch>,
    number: u32,
}

impl Completion {
    /// Waits for it on this thread.
    ///
    /// # Errors
    /// If the transfer failed.
    pub fn wait(&self) -> Result<(), TransferError> {
        self.launch
            .block(Wanted::One(self.number), None, |launch| launch.outcome(self.number))
            .unwrap_or(Err(TransferError::Closed))
    }

    /// Waits so long; none if it is not known by then.
    #[must_use]
    pub fn wait_for(&self, time: Duration) -> Option<Result<(), TransferError>> {
        self.launch.block(Wanted::One(self.number), Some(clock::monotonic() + time), |launch| {
            launch.outcome(self.number)
        })
    }
}

impl Future for Completion {
    type Output = Result<(), TransferError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let number = self.number;
        self.launch.poll(Wanted::One(number), cx, |launch| launch.outcome(number))
    }
}

/// Resolves when no byte of a cancelled transfer can land any more.
#[derive(Clone)]
#[must_use = "the cancellation is proven only when this resolves"]
pub struct Quiesced {
    launch: Arc<Launch>,
}

impl Quiesced {
    /// Waits for it on this thread.
    pub fn wait(&self) {
        self.launch.block(Wanted::Proof, None, Launch::proof);
    }

    /// Waits so long; whether it is proven by then.
    #[must_use]
    pub fn wait_for(&self, time: Duration) -> bool {
        self.launch.block(Wanted::Proof, Some(clock::monotonic() + time), Launch::proof).is_some()
    }
}

impl Future for Quiesced {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        self.launch.poll(Wanted::Proof, cx, Launch::proof)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{Arena, Buffer};

    #[test]
    fn what_lies_together_is_one_piece_and_nothing_else_is() {
        let arena = Arena::new(1 << 20).unwrap();
        let buffers: Vec<_> = (0..4).map(|_| arena.allocate(4096).unwrap()).collect();
        for (n, buffer) in buffers.iter().enumerate() {
            buffer.fill(n as u8 + 1).unwrap();
        }
        let foreign = Buffer::foreign(vec![9; 100]);
        let empty = foreign.range(50..50).unwrap();
        let spans = [
            buffers[0].span(),
            buffers[1].span(),
            empty,
            buffers[2].range(0..4095).unwrap(),
            buffers[3].span(),
            foreign.span(),
            buffers[0].range(0..7).unwrap(),
        ];
        let bytes: Vec<u8> = spans.iter().flat_map(|span| span.piece().read(<[u8]>::to_vec)).collect();
        let stream = Stream::new(spans.into_iter().zip(0..).map(|(span, spec)| (spec, span)));
        assert_eq!(stream.total(), bytes.len() as u64);
        let adjoin = buffers[1].span().offset() == buffers[0].span().offset() + 4096;
        assert!(adjoin, "an arena gives out what is next to the last");
        for (start, len, pieces) in [
            (0, 8192, 1),
            (1, 8190, 1),
            (4096, 4096, 1),
            (0, 0, 0),
            (8192, 4095, 1),
            (8191, 4097, 3),
            (0, bytes.len(), 5),
            (bytes.len() - 8, 8, 2),
        ] {
            let mut found = Vec::new();
            stream.pieces(start as u64, len as u64, usize::MAX, &mut found);
            let joined: Vec<u8> = found.iter().flat_map(|piece| piece.read(<[u8]>::to_vec)).collect();
            assert_eq!(joined, &bytes[start..start + len], "{len} from {start}");
            assert_eq!(found.len(), pieces, "{len} from {start}");
        }
    }

    #[test]
    fn whoever_is_turned_away_may_be_the_last_to_leave() {
        let pad = Pad::default();
        assert!(pad.enter());
        assert!(pad.close() && !pad.is_quiet());
        // Turned away while the first is still there: one of the two is the last, whichever leaves first.
        assert!(!pad.enter());
        assert!(!pad.leave());
        assert!(pad.leave() && pad.is_quiet());
    }
}
