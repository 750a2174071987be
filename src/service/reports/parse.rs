//! Decodes and checks a report: every list within its bound, every name in the vocabulary.
//!
//! It merges nothing: `store.rs` does. Begin at `Report::read`.

use std::collections::BTreeMap;

use prost::Message as _;
use prost::bytes::Buf as _;
use prost::encoding::{DecodeContext, decode_key, skip_field};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::vocabulary::{ReportedTransport, TransferCounter, TransferOutcome};
use crate::coordination::{Code, Failure, TaskId, TaskIncarnation, Timestamp};
use crate::proto::muster::v1 as wire;
pub use crate::proto::report_limits::{CONNECTIONS_MAX, FAILURES_MAX, PAIRS_MAX};
use crate::text::one_line;
use crate::transfer::{Stage, TIMES_US, Times, size_classes};

/// The maximum length of a report, in bytes. A report with every list full and the longest numbers has two
/// thirds of it.
pub const BYTES_MAX: usize = 1 << 20;
/// Rows of outcomes in one report.
pub const OUTCOMES_MAX: usize = 64;
/// Rows of stages in one report.
pub const STAGES_MAX: usize = 16;
/// Rows of durations in one report.
pub const DURATIONS_MAX: usize = 64;
/// The maximum length of a failure's text, in bytes.
const TEXT_KEPT: usize = 300;

/// The lists of a report, by their number in the message.
const LISTS: [(u32, &str, usize); 7] = [
    (4, "pairs", PAIRS_MAX),
    (5, "connections", CONNECTIONS_MAX),
    (6, "outcomes", OUTCOMES_MAX),
    (9, "failures", FAILURES_MAX),
    (11, "stages", STAGES_MAX),
    (12, "durations", DURATIONS_MAX),
    (13, "aborts", OUTCOMES_MAX),
];

/// The reason why a report is refused. A refused report changes nothing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReportError {
    /// It exceeds the maximum length.
    #[error("a report of {0} bytes: {BYTES_MAX} is the most")]
    TooLong(usize),
    /// It is no valid message.
    #[error("the report cannot be read: {0}")]
    Unreadable(String),
    /// A list in it is too long.
    #[error("the report has more than {most} {what}")]
    TooMany {
        /// The list.
        what: &'static str,
        /// Its maximum length.
        most: usize,
    },
    /// The job does not exist.
    #[error("there is no such job any more")]
    NoSuchJob,
    /// The job has no such task.
    #[error("there is no task {0}: the job has {1}")]
    NoSuchTask(u32, usize),
    /// The job has no such peer.
    #[error("the report tells of a peer {0}, and the job has {1} tasks")]
    NoSuchPeer(u32, usize),
    /// The report is from an incarnation that is not the present one.
    #[error("task {task} is in its life {known}, and the report is of {given}: it has restarted since")]
    StaleIncarnation {
        /// The task.
        task: TaskId,
        /// The incarnation of the report.
        given: TaskIncarnation,
        /// The present incarnation.
        known: TaskIncarnation,
    },
    /// The task is not connected.
    #[error("task {0} is not connected: it must register before it reports")]
    NotConnected(TaskId),
}

impl From<ReportError> for Failure {
    fn from(refusal: ReportError) -> Self {
        let code = match &refusal {
            ReportError::TooLong(_) | ReportError::TooMany { .. } => Code::ResourceExhausted,
            ReportError::Unreadable(_) | ReportError::NoSuchTask(..) | ReportError::NoSuchPeer(..) => {
                Code::InvalidArgument
            }
            ReportError::NoSuchJob => Code::NotFound,
            ReportError::StaleIncarnation { .. } => Code::Aborted,
            ReportError::NotConnected(_) => Code::FailedPrecondition,
        };
        Self::without_details(code, refusal.to_string())
    }
}

/// Counters: all since the start of one life, or the sums of earlier lives.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct LifeTotals {
    /// By transport: sent, received.
    pub bytes: [[u64; 2]; ReportedTransport::ALL.len()],
    /// Ended launches, by outcome.
    pub outcomes: [u64; TransferOutcome::COUNT],
    /// By [`TransferCounter`].
    pub counters: [u64; TransferCounter::COUNT],
    /// Durations of launches, by stage.
    pub stages: [Times; Stage::ALL.len()],
    /// Connections that ended while they were needed, by reason.
    pub aborts: [u64; TransferOutcome::COUNT],
    /// Durations of complete launches, by transport and index of the size class. Most tasks have few entries.
    pub durations: BTreeMap<(ReportedTransport, u8), Times>,
}

fn merge_times(mine: &mut Times, theirs: &Times, by: fn(u64, u64) -> u64) {
    mine.sum_us = by(mine.sum_us, theirs.sum_us);
    for (mine, theirs) in mine.counts.iter_mut().zip(&theirs.counts) {
        *mine = by(*mine, *theirs);
    }
}

/// Adds the counts and the sum of a reported histogram.
fn add_times(times: &mut Times, counts: &[u64], sum_us: u64) {
    times.sum_us = times.sum_us.saturating_add(sum_us);
    for (at, count) in counts.iter().enumerate() {
        let place = &mut times.counts[at.min(TIMES_US.len())];
        *place = place.saturating_add(*count);
    }
}

impl LifeTotals {
    fn merge(&mut self, other: &Self, by: fn(u64, u64) -> u64) {
        let mine = self.bytes.iter_mut().flatten().chain(&mut self.outcomes).chain(&mut self.counters);
        let theirs = other.bytes.iter().flatten().chain(&other.outcomes).chain(&other.counters);
        let (mine, theirs) = (mine.chain(&mut self.aborts), theirs.chain(&other.aborts));
        for (mine, theirs) in mine.zip(theirs) {
            *mine = by(*mine, *theirs);
        }
        for (mine, theirs) in self.stages.iter_mut().zip(&other.stages) {
            merge_times(mine, theirs, by);
        }
        for (of, theirs) in &other.durations {
            merge_times(self.durations.entry(*of).or_default(), theirs, by);
        }
    }

    /// Adds the counters of `other`.
    pub fn add(&mut self, other: &Self) {
        self.merge(other, u64::saturating_add);
    }

    /// Raises each counter to that of `other` if it is larger: a counter never goes back.
    pub fn rise_to(&mut self, other: &Self) {
        self.merge(other, u64::max);
    }
}

/// The connections of one transport.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct TransportTotals {
    pub connections: u64,
    pub lanes: u64,
    pub launches: u64,
}

impl TransportTotals {
    pub fn add(&mut self, other: &Self) {
        self.connections += other.connections;
        self.lanes = self.lanes.saturating_add(other.lanes);
        self.launches = self.launches.saturating_add(other.launches);
    }
}

/// One reported connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ReportedConnection {
    pub peer: TaskId,
    pub peer_incarnation: TaskIncarnation,
    pub transport: ReportedTransport,
    pub lanes: u32,
    pub launches: u32,
}

/// The offset of a worker's clock from the service's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ClockReading {
    /// The offset in microseconds; positive if the worker's clock is ahead.
    pub ahead_us: i64,
    /// The uncertainty in microseconds: half of the round trip of the measurement.
    pub within_us: u64,
}

impl From<wire::ClockReading> for ClockReading {
    fn from(clock: wire::ClockReading) -> Self {
        Self { ahead_us: clock.ahead_us, within_us: clock.within_us }
    }
}

impl ClockReading {
    /// Returns how far the worker's clock is ahead, in seconds.
    #[must_use]
    pub fn ahead_seconds(&self) -> f64 {
        wire::ClockReading { ahead_us: self.ahead_us, within_us: self.within_us }.ahead_seconds()
    }

    /// Returns the reading that is furthest from the service's clock; the first one if several are.
    pub fn furthest(readings: impl IntoIterator<Item = Self>) -> Option<Self> {
        let further = |one: Self, other: Self| if other.apart_us() > one.apart_us() { other } else { one };
        readings.into_iter().reduce(further)
    }

    /// Returns the minimum distance between the two clocks, in microseconds, given the uncertainty.
    #[must_use]
    pub fn apart_us(&self) -> u64 {
        self.ahead_us.unsigned_abs().saturating_sub(self.within_us)
    }
}

/// A reported failure.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ReportedFailure {
    /// The time by the worker's clock. The store moves it into the run if the clock is off.
    pub at: Timestamp,
    pub peer: TaskId,
    pub reason: TransferOutcome,
    pub text: Box<str>,
}

/// A checked report.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Report {
    pub task: TaskId,
    pub incarnation: TaskIncarnation,
    pub sequence: u64,
    pub totals: LifeTotals,
    /// Bytes sent and received, by peer and transport.
    pub pairs: BTreeMap<(TaskId, ReportedTransport), [u64; 2]>,
    pub links: [TransportTotals; ReportedTransport::ALL.len()],
    pub connections: Vec<ReportedConnection>,
    pub cliques: u64,
    pub registered_bytes: u64,
    /// Bytes that are still to move, by class in order of urgency.
    pub in_flight: [u64; 3],
    pub clock: Option<ClockReading>,
    pub failures: Vec<ReportedFailure>,
}

/// Counts the rows before memory is allocated for them: an empty row takes two bytes of a message.
fn check_lists(mut bytes: &[u8]) -> Result<(), ReportError> {
    let unreadable = |error: prost::DecodeError| ReportError::Unreadable(error.to_string());
    let mut counts = [0_usize; LISTS.len()];
    while bytes.has_remaining() {
        let (tag, kind) = decode_key(&mut bytes).map_err(unreadable)?;
        for (count, (of, what, most)) in counts.iter_mut().zip(LISTS) {
            *count += usize::from(of == tag);
            if *count > most {
                return Err(ReportError::TooMany { what, most });
            }
        }
        skip_field(kind, tag, &mut bytes, DecodeContext::default()).map_err(unreadable)?;
    }
    Ok(())
}

impl Report {
    /// Parses a report to a job with this many tasks.
    pub fn read(bytes: &[u8], tasks: usize) -> Result<Self, ReportError> {
        if bytes.len() > BYTES_MAX {
            return Err(ReportError::TooLong(bytes.len()));
        }
        check_lists(bytes)?;
        let given = wire::TransferReport::decode(bytes)
            .map_err(|error| ReportError::Unreadable(error.to_string()))?;
        let known = |number: u32| {
            let id = i32::try_from(number).ok().filter(|id| usize::try_from(*id).is_ok_and(|id| id < tasks));
            id.map(TaskId)
        };
        let peer = |number: u32| known(number).ok_or(ReportError::NoSuchPeer(number, tasks));
        let task = known(given.task).ok_or(ReportError::NoSuchTask(given.task, tasks))?;

        let mut totals = LifeTotals::default();
        let mut pairs: BTreeMap<_, [u64; 2]> = BTreeMap::new();
        for row in &given.pairs {
            let transport = ReportedTransport::of(&row.transport);
            let moved = [row.sent_bytes, row.received_bytes];
            let pair = pairs.entry((peer(row.peer)?, transport)).or_default();
            for (sum, bytes) in
                pair.iter_mut().zip(moved).chain(totals.bytes[transport as usize].iter_mut().zip(moved))
            {
                *sum = sum.saturating_add(bytes);
            }
        }
        for row in &given.outcomes {
            let sum = &mut totals.outcomes[TransferOutcome::of(&row.outcome).place()];
            *sum = sum.saturating_add(row.launches);
        }
        let cache = given.cliques.unwrap_or_default();
        let engine = given.totals.unwrap_or_default();
        for (counter, value) in [
            (TransferCounter::CacheHits, cache.hits),
            (TransferCounter::CacheMisses, cache.misses),
            (TransferCounter::CacheEvictions, cache.evictions),
            (TransferCounter::FencedFrames, engine.fenced_frames),
            (TransferCounter::DamagedChunks, engine.damaged_chunks),
            (TransferCounter::LanesLost, engine.lanes_lost),
            (TransferCounter::LanesMade, engine.lanes_made),
            (TransferCounter::FetchFallbacks, engine.fetch_fallbacks),
        ] {
            totals.counters[counter as usize] = value;
        }
        // A sum of durations without a count is meaningless.
        let any = |counts: &[u64]| counts.iter().any(|count| *count > 0);
        for row in given.stages.iter().filter(|row| any(&row.counts)) {
            let Some(stage) = Stage::ALL.into_iter().find(|stage| stage.name() == row.stage) else {
                continue;
            };
            add_times(&mut totals.stages[stage as usize], &row.counts, row.sum_us);
        }
        for row in given.durations.iter().filter(|row| any(&row.counts)) {
            let Some(size) = (0..).zip(size_classes()).find(|(_, name)| *name == row.size_class) else {
                continue;
            };
            let of = (ReportedTransport::of(&row.transport), size.0);
            add_times(totals.durations.entry(of).or_default(), &row.counts, row.sum_us);
        }
        for row in &given.aborts {
            let sum = &mut totals.aborts[TransferOutcome::of(&row.reason).place()];
            *sum = sum.saturating_add(row.connections);
        }
        let in_flight = given.in_flight.unwrap_or_default();
        let mut links = [TransportTotals::default(); ReportedTransport::ALL.len()];
        let mut connections = Vec::with_capacity(given.connections.len());
        for row in &given.connections {
            let transport = ReportedTransport::of(&row.transport);
            let one =
                TransportTotals { connections: 1, lanes: row.lanes.into(), launches: row.launches.into() };
            links[transport as usize].add(&one);
            connections.push(ReportedConnection {
                peer: peer(row.peer)?,
                peer_incarnation: TaskIncarnation(row.peer_incarnation),
                transport,
                lanes: row.lanes,
                launches: row.launches,
            });
        }
        let mut failures = Vec::with_capacity(given.failures.len());
        for row in &given.failures {
            let cut = row.text.get(..row.text.floor_char_boundary(TEXT_KEPT)).unwrap_or_default();
            failures.push(ReportedFailure {
                at: Timestamp(row.at),
                peer: peer(row.peer)?,
                reason: TransferOutcome::of(&row.reason),
                text: one_line(cut).into(),
            });
        }
        Ok(Self {
            task,
            incarnation: TaskIncarnation(given.incarnation),
            sequence: given.sequence,
            totals,
            pairs,
            links,
            connections,
            cliques: cache.size,
            registered_bytes: engine.registered_bytes,
            in_flight: [in_flight.latency_bytes, in_flight.normal_bytes, in_flight.bulk_bytes],
            clock: given.clock.map(ClockReading::from),
            failures,
        })
    }
}
