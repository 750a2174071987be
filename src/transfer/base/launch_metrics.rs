//! The measurements of an engine's launches: their outcomes, the time of each stage, and the total times by transport
//! and size.
//!
//! A measured launch costs a few relaxed atomic additions. Only a failure takes a lock. Chunks are not measured here.
//! Begin at [`LaunchMetrics`].

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::Duration;

use crate::base::error::TransferError;
use crate::base::membership::{MemberId, PeerTask, TaskId};
use crate::base::sync::lock;
use crate::base::transport::TransportKind;
use muster_clock as clock;

/// The stages of a launch, by which its time is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LaunchStage {
    /// From the request until its connections are made and its peers know its definition.
    Prepare,
    /// From the launch until its dependencies are complete; measured only if one was pending.
    Dependencies,
    /// From the launch until both sides have launched.
    Match,
    /// From the launch on both sides until the last byte is in place.
    Move,
    /// From a cancellation until the engine has confirmed that no byte lands any more.
    Quiesce,
    /// From the request for a connection until it is made; measured only if this side dialled.
    Connect,
}

impl LaunchStage {
    /// All stages.
    pub const ALL: [Self; 6] =
        [Self::Prepare, Self::Dependencies, Self::Match, Self::Move, Self::Quiesce, Self::Connect];

    /// Returns the name as a metric's label.
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

/// The size classes by which whole launches are timed: the most bytes of each, and its name as a metric's
/// label.
const SIZES: [(u64, &str); 6] = [
    (4 << 10, "4KiB"),
    (64 << 10, "64KiB"),
    (1 << 20, "1MiB"),
    (16 << 20, "16MiB"),
    (256 << 20, "256MiB"),
    (u64::MAX, "more"),
];

/// Returns the names of the size classes, the smallest first.
pub fn size_class_names() -> impl Iterator<Item = &'static str> {
    SIZES.into_iter().map(|(_, name)| name)
}

/// The upper bounds of the time histograms, in microseconds. A further bucket counts longer times.
pub const TIMES_US: [u64; 13] =
    [10, 30, 100, 300, 1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000, 3_000_000, 10_000_000];

/// A histogram of times.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
pub struct TimeHistogram {
    /// The number of times in each bucket of [`TIMES_US`]; the last bucket counts longer ones.
    pub counts: [u64; TIMES_US.len() + 1],
    /// The sum of all times, in microseconds.
    pub sum_us: u64,
}

#[derive(Debug, Default)]
struct AtomicTimeHistogram {
    counts: [AtomicU64; TIMES_US.len() + 1],
    sum_us: AtomicU64,
}

impl AtomicTimeHistogram {
    fn add_time(&self, us: u64) {
        let place = TIMES_US.partition_point(|bound| *bound < us);
        self.counts[place].fetch_add(1, Ordering::Relaxed);
        self.sum_us.fetch_add(us, Ordering::Relaxed);
    }

    fn snapshot(&self) -> TimeHistogram {
        let counts = std::array::from_fn(|at| self.counts[at].load(Ordering::Relaxed));
        TimeHistogram { counts, sum_us: self.sum_us.load(Ordering::Relaxed) }
    }
}

/// A failed launch, or a failed request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FailedLaunch {
    /// The time of the failure by this host's wall clock, in microseconds since the Unix epoch.
    pub at_us: u64,
    /// The task of the peer if it is known, else this task.
    pub peer: PeerTask,
    /// The error.
    pub error: TransferError,
}

/// Returns the index of an error's reason in [`TransferError::REASON_LABELS`].
fn reason_index(error: &TransferError) -> Option<usize> {
    TransferError::REASON_LABELS.iter().position(|reason| *reason == error.reason_label())
}

/// The most failures that are kept until [`LaunchMetrics::take_recent_failures`] takes them.
const FAILURES_KEPT: usize = 64;

/// The measurements of an engine's launches.
pub struct LaunchMetrics {
    here: TaskId,
    stages: [AtomicTimeHistogram; LaunchStage::ALL.len()],
    /// Times of completed launches, by transport and size class.
    durations: [[AtomicTimeHistogram; SIZES.len()]; TransportKind::ALL.len()],
    /// Connections that failed while they were needed, by [`TransferError::REASON_LABELS`].
    aborts: [AtomicU64; TransferError::REASON_LABELS.len()],
    /// Ended launches: the completed ones first, then by [`TransferError::REASON_LABELS`].
    ended: [AtomicU64; TransferError::REASON_LABELS.len() + 1],
    failures: Mutex<VecDeque<FailedLaunch>>,
    on_failure: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

impl std::fmt::Debug for LaunchMetrics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Meters").field("ended", &self.ended).finish_non_exhaustive()
    }
}

impl LaunchMetrics {
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

    /// Records the time of a stage, in microseconds.
    pub(crate) fn record_stage_us(&self, stage: LaunchStage, us: u64) {
        self.stages[stage as usize].add_time(us);
    }

    /// Records the time of a stage.
    pub(crate) fn record_stage_time(&self, stage: LaunchStage, time: Duration) {
        self.record_stage_us(stage, u64::try_from(time.as_micros()).unwrap_or(u64::MAX));
    }

    /// Counts a launch that completed: its last transport, its bytes, and its time in microseconds.
    pub(crate) fn count_completed(&self, by: Option<TransportKind>, bytes: u64, us: u64) {
        self.ended[0].fetch_add(1, Ordering::Relaxed);
        if let Some(by) = by {
            let size = SIZES.partition_point(|(most, _)| *most < bytes);
            self.durations[by as usize][size].add_time(us);
        }
    }

    /// Counts a connection that failed while it was needed.
    pub(crate) fn count_connection_abort(&self, error: &TransferError) {
        if let Some(place) = reason_index(error) {
            self.aborts[place].fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Counts a failed launch or request; `peer` is its peer if the error names none.
    pub(crate) fn count_failed(&self, peer: Option<PeerTask>, error: &TransferError) {
        if let Some(place) = reason_index(error) {
            self.ended[place + 1].fetch_add(1, Ordering::Relaxed);
        }
        let peer = error.member().map(MemberId::peer_task).or(peer).unwrap_or_else(|| self.here.into());
        let failed = FailedLaunch { at_us: clock::wall_time().0, peer, error: error.clone() };
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

    /// Sets the hook that is called after each failure, on the thread that detected it. Later calls change
    /// nothing.
    pub fn set_failure_hook(&self, hook: impl Fn() + Send + Sync + 'static) {
        let _first = self.on_failure.set(Box::new(hook));
    }

    /// Returns the times of a stage since the engine's start.
    #[must_use]
    pub fn stage_times(&self, stage: LaunchStage) -> TimeHistogram {
        self.stages[stage as usize].snapshot()
    }

    /// Returns the times of completed launches, by transport and size class, without the classes that have
    /// none.
    pub fn durations(&self) -> impl Iterator<Item = (TransportKind, &'static str, TimeHistogram)> + '_ {
        let by_kind = TransportKind::ALL.into_iter().zip(&self.durations);
        by_kind.flat_map(|(kind, sizes)| {
            let timed =
                size_class_names().zip(sizes).map(move |(size, timing)| (kind, size, timing.snapshot()));
            timed.filter(|(.., times)| times.counts.iter().any(|count| *count > 0))
        })
    }

    /// Returns the connections that failed while they were needed since the engine's start, by reason.
    pub fn connection_aborts(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        TransferError::REASON_LABELS
            .into_iter()
            .zip(self.aborts.iter().map(|count| count.load(Ordering::Relaxed)))
    }

    /// Returns the launches that ended since the engine's start, by outcome: `completed`, or the reason of
    /// the failure.
    pub fn outcome_counts(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        let names = std::iter::once("completed").chain(TransferError::REASON_LABELS);
        names.zip(self.ended.iter().map(|count| count.load(Ordering::Relaxed)))
    }

    /// Removes and returns the failures since the last call, the newest 64 at most.
    #[must_use]
    pub fn take_recent_failures(&self) -> Vec<FailedLaunch> {
        lock(&self.failures).drain(..).collect()
    }
}
