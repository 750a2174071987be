//! The measurements of an engine's launches: how they end, and where their time goes.
//!
//! A few relaxed counters a launch, none a chunk; a lock only where a launch fails.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::Duration;

use crate::base::error::TransferError;
use crate::base::identity::TaskId;
use crate::base::sync::lock;
use crate::base::transport::TransportKind;
use muster_clock as clock;

/// Where the time of a launch goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// From the request until its connections are there and its peers know what will be moved.
    Prepare,
    /// From the launch until everything has happened that it depends on; only where something had not.
    Dependencies,
    /// From the launch until both sides have launched.
    Match,
    /// From then until the last byte is in place.
    Move,
    /// From a cancellation until it is proven that nothing lands any more.
    Quiesce,
    /// From the wish for a connection until it is there; only where this side had to make it.
    Connect,
}

impl Stage {
    /// All of them.
    pub const ALL: [Self; 6] =
        [Self::Prepare, Self::Dependencies, Self::Match, Self::Move, Self::Quiesce, Self::Connect];

    /// Returns its name as a metric's label.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Prepare => "prepare",
            Self::Dependencies => "dependencies",
            Self::Match => "match",
            Self::Move => "move",
            Self::Quiesce => "quiesce",
            Self::Connect => "connect",
        }
    }
}

/// The classes of size by which whole launches are timed: how many bytes at most, and the name as a metric's label.
const SIZES: [(u64, &str); 6] = [
    (4 << 10, "4KiB"),
    (64 << 10, "64KiB"),
    (1 << 20, "1MiB"),
    (16 << 20, "16MiB"),
    (256 << 20, "256MiB"),
    (u64::MAX, "more"),
];

/// Returns the names of the classes of size, the smallest first.
pub fn size_classes() -> impl Iterator<Item = &'static str> {
    SIZES.into_iter().map(|(_, name)| name)
}

/// The upper bounds by which times are counted, in microseconds; longer ones are counted last.
pub const TIMES_US: [u64; 13] =
    [10, 30, 100, 300, 1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000, 3_000_000, 10_000_000];

/// Times of one stage, by how long they were.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Times {
    /// How many were within each bound and not within the one before; the last count is of longer ones.
    pub counts: [u64; TIMES_US.len() + 1],
    /// All of them together, in microseconds.
    pub sum_us: u64,
}

#[derive(Debug, Default)]
struct Timing {
    counts: [AtomicU64; TIMES_US.len() + 1],
    sum_us: AtomicU64,
}

impl Timing {
    fn observe(&self, us: u64) {
        let place = TIMES_US.partition_point(|bound| *bound < us);
        self.counts[place].fetch_add(1, Ordering::Relaxed);
        self.sum_us.fetch_add(us, Ordering::Relaxed);
    }

    fn read(&self) -> Times {
        let counts = std::array::from_fn(|at| self.counts[at].load(Ordering::Relaxed));
        Times { counts, sum_us: self.sum_us.load(Ordering::Relaxed) }
    }
}

/// A launch that failed, or a request that came to none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failed {
    /// When, by this host's clock, in microseconds since the Unix epoch.
    pub at_us: u64,
    /// With whom, as far as that is known; else this task.
    pub peer: TaskId,
    /// Why.
    pub error: TransferError,
}

/// Returns the place of an error's reason among all.
fn place(error: &TransferError) -> Option<usize> {
    TransferError::REASONS.iter().position(|reason| *reason == error.reason())
}

/// How many failures are kept until they are taken.
const FAILURES_KEPT: usize = 64;

/// What an engine measures of its launches.
pub struct Meters {
    here: TaskId,
    stages: [Timing; Stage::ALL.len()],
    /// Of launches that completed, by transport and class of size.
    durations: [[Timing; SIZES.len()]; TransportKind::ALL.len()],
    /// Connections that ended while they were needed, by [`TransferError::REASONS`].
    aborts: [AtomicU64; TransferError::REASONS.len()],
    /// Completed ones first, then by [`TransferError::REASONS`].
    ended: [AtomicU64; TransferError::REASONS.len() + 1],
    failures: Mutex<VecDeque<Failed>>,
    on_failure: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

impl std::fmt::Debug for Meters {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Meters").field("ended", &self.ended).finish_non_exhaustive()
    }
}

impl Meters {
    pub(crate) fn new(here: TaskId) -> Self {
        Self {
            here,
            stages: Default::default(),
            durations: Default::default(),
            aborts: Default::default(),
            ended: Default::default(),
            failures: Mutex::default(),
            on_failure: OnceLock::new(),
        }
    }

    /// Counts a stage that took so long.
    pub(crate) fn observe(&self, stage: Stage, us: u64) {
        self.stages[stage as usize].observe(us);
    }

    /// Counts a stage whose time was measured elsewhere.
    pub(crate) fn observe_time(&self, stage: Stage, time: Duration) {
        self.observe(stage, u64::try_from(time.as_micros()).unwrap_or(u64::MAX));
    }

    /// Counts a launch that moved everything: so many bytes, by this transport or by it last, in so long.
    pub(crate) fn completed(&self, by: Option<TransportKind>, bytes: u64, us: u64) {
        self.ended[0].fetch_add(1, Ordering::Relaxed);
        if let Some(by) = by {
            let size = SIZES.partition_point(|(most, _)| *most < bytes);
            self.durations[by as usize][size].observe(us);
        }
    }

    /// Counts a connection that ended while it was needed.
    pub(crate) fn aborted(&self, error: &TransferError) {
        if let Some(place) = place(error) {
            self.aborts[place].fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Counts a launch that failed, or a request that came to none; `peer` is with whom, where the error does not say.
    pub(crate) fn failed(&self, peer: Option<TaskId>, error: &TransferError) {
        if let Some(place) = place(error) {
            self.ended[place + 1].fetch_add(1, Ordering::Relaxed);
        }
        let peer = error.member().map(|member| member.task).or(peer).unwrap_or(self.here);
        let failed = Failed { at_us: clock::wall_time().0, peer, error: error.clone() };
        {
            let mut failures = lock(&self.failures);
            if failures.len() == FAILURES_KEPT {
                failures.pop_front();
            }
            failures.push_back(failed);
        }
        if let Some(hook) = self.on_failure.get() {
            hook();
        }
    }

    /// Calls `hook` after each failure, on the thread that saw it. The first hook stays.
    pub fn on_failure(&self, hook: impl Fn() + Send + Sync + 'static) {
        let _first = self.on_failure.set(Box::new(hook));
    }

    /// Returns the times of a stage since the engine's start.
    #[must_use]
    pub fn times(&self, stage: Stage) -> Times {
        self.stages[stage as usize].read()
    }

    /// Returns how long launches took that moved everything, by transport and class of size; those that none were of
    /// are left out.
    pub fn durations(&self) -> impl Iterator<Item = (TransportKind, &'static str, Times)> + '_ {
        let by_kind = TransportKind::ALL.into_iter().zip(&self.durations);
        by_kind.flat_map(|(kind, sizes)| {
            let timed = size_classes().zip(sizes).map(move |(size, timing)| (kind, size, timing.read()));
            timed.filter(|(.., times)| times.counts.iter().any(|count| *count > 0))
        })
    }

    /// Connections that ended while they were needed since the engine's start, by why.
    pub fn aborts(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        TransferError::REASONS.into_iter().zip(self.aborts.iter().map(|count| count.load(Ordering::Relaxed)))
    }

    /// Returns the launches that ended since the engine's start, by how: `completed`, or the reason.
    pub fn ended(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        let names = std::iter::once("completed").chain(TransferError::REASONS);
        names.zip(self.ended.iter().map(|count| count.load(Ordering::Relaxed)))
    }

    /// Takes the failures that were not taken yet, the newest 64 at most.
    #[must_use]
    pub fn take_failures(&self) -> Vec<Failed> {
        lock(&self.failures).drain(..).collect()
    }
}
