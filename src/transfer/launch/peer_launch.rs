//! A launch's part with one peer.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use super::access::Pad;
use super::outcome::Launch;
use crate::base::error::{MemoryError, TransferError};
use crate::base::sync::lock;
use crate::base::transport::TransportKind;
use crate::memory::stream::Stream;
use crate::memory::{Reservation, Use};
use crate::protocol::link::{Class, GroupId};
use crate::session::connection::Connection;
use crate::session::control_ring::LOOK_AGAIN;

/// What a prepared launch does with one peer. The same for every launch of it.
#[derive(Debug, Default)]
pub struct Work {
    /// What is sent.
    pub out: Stream,
    /// What is received.
    pub inbound: Stream,
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
    pub(super) launch: Arc<Launch>,
    /// With whom.
    pub connection: Arc<Connection>,
    /// Which bytes.
    pub work: Arc<Work>,
    /// Limits.
    pub limits: Limits,
    pub(super) at: OnceLock<GroupId>,
    pub(super) pad: Pad,
    pub(super) failure: OnceLock<TransferError>,
    pub(super) resolved: AtomicBool,
    pub(super) peer_quiet: AtomicBool,
    pub(super) proven: AtomicBool,
    /// Bytes of each receive that are still to come.
    pub(super) missing: Box<[AtomicU64]>,
    pub(super) reserved: Mutex<Vec<Option<Reservation>>>,
    pub(super) matched: AtomicBool,
    pub(super) moved: AtomicU64,
    /// Whether its connection knows that somebody waits for what it sends.
    pub(super) heeded: AtomicBool,
    /// When something last moved, in microseconds since the launch.
    pub(super) progress: AtomicU64,
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

/// What the peer is told: it adds by itself who gave it up.
fn told(error: &TransferError) -> String {
    match error {
        TransferError::Cancelled { reason, .. } => reason.clone(),
        other => other.to_string(),
    }
}

/// Fails a part and tells the peer.
pub(crate) fn give_up(part: &Arc<Part>, error: TransferError) {
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
