//! Decodes and checks a report: refuses lists that are too long, and maps every name to the vocabulary.
//!
//! `report_store.rs` merges reports. Begin at `CheckedReport::parse`.

use std::collections::BTreeMap;

use prost::Message as _;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::vocabulary::{ReportedTransport, TransferCounter, TransferOutcome};
use crate::coordination::{Code, Failure, InvalidJobName, JobName, TaskId, TaskIncarnation, Timestamp};
use crate::proto::MessageFields;
use crate::proto::muster::v1 as wire;
pub use crate::proto::report_limits::{CONNECTIONS_MAX, FAILURES_MAX, LOST_GPUS_MAX, PAIRS_MAX};
use crate::text::{escape_to_one_line, truncate_text};
use crate::transfer::{LaunchStage, TIMES_US, TimeHistogram, size_class_names};

/// The maximum length of a report, in bytes. A report with every list full and the longest numbers has two
/// thirds of it.
pub const BYTES_MAX: usize = 1 << 20;
/// Rows of outcomes in one report.
pub const OUTCOMES_MAX: usize = 64;
/// Rows of stages in one report.
pub const STAGES_MAX: usize = 16;
/// Rows of durations in one report.
pub const DURATIONS_MAX: usize = 64;
/// The maximum number of checks of a host that are kept.
pub const HOST_CHECKS_MAX: usize = 32;
/// The maximum length of a text, in bytes.
const TEXT_KEPT: usize = 300;

/// The lists of a report, by their number in the message.
const LISTS: [(u32, &str, usize); 8] = [
    (4, "pairs", PAIRS_MAX),
    (5, "connections", CONNECTIONS_MAX),
    (6, "outcomes", OUTCOMES_MAX),
    (9, "failures", FAILURES_MAX),
    (11, "stages", STAGES_MAX),
    (12, "durations", DURATIONS_MAX),
    (13, "aborts", OUTCOMES_MAX),
    (16, "lost GPUs", LOST_GPUS_MAX),
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
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct ReportedTotals {
    /// By transport: sent, received.
    #[serde(with = "super::serialised_forms::by_transport")]
    pub bytes: [[u64; 2]; ReportedTransport::ALL.len()],
    /// Ended launches, by outcome.
    #[serde(with = "super::serialised_forms::by_outcome")]
    pub outcomes: [u64; TransferOutcome::COUNT],
    /// By [`TransferCounter`].
    #[serde(with = "super::serialised_forms::growing_array")]
    pub counters: [u64; TransferCounter::COUNT],
    /// Durations of launches, by stage.
    #[serde(with = "super::serialised_forms::growing_array")]
    pub stages: [TimeHistogram; LaunchStage::ALL.len()],
    /// Connections that ended while they were needed, by reason.
    #[serde(with = "super::serialised_forms::by_outcome")]
    pub aborts: [u64; TransferOutcome::COUNT],
    /// Durations of complete launches, by transport and index of the size class. Most tasks have few entries.
    #[serde(with = "super::serialised_forms::entries")]
    pub durations: BTreeMap<(ReportedTransport, u8), TimeHistogram>,
}

fn merge_histograms(mine: &mut TimeHistogram, theirs: &TimeHistogram, by: fn(u64, u64) -> u64) {
    mine.sum_us = by(mine.sum_us, theirs.sum_us);
    for (mine, theirs) in mine.counts.iter_mut().zip(&theirs.counts) {
        *mine = by(*mine, *theirs);
    }
}

/// Adds the counts and the sum of a reported histogram.
fn add_reported_histogram(times: &mut TimeHistogram, counts: &[u64], sum_us: u64) {
    times.sum_us = times.sum_us.saturating_add(sum_us);
    for (at, count) in counts.iter().enumerate() {
        let place = &mut times.counts[at.min(TIMES_US.len())];
        *place = place.saturating_add(*count);
    }
}

impl ReportedTotals {
    fn combine_counters_by(&mut self, other: &Self, by: fn(u64, u64) -> u64) {
        let mine = self.bytes.iter_mut().flatten().chain(&mut self.outcomes).chain(&mut self.counters);
        let theirs = other.bytes.iter().flatten().chain(&other.outcomes).chain(&other.counters);
        let (mine, theirs) = (mine.chain(&mut self.aborts), theirs.chain(&other.aborts));
        for (mine, theirs) in mine.zip(theirs) {
            *mine = by(*mine, *theirs);
        }
        for (mine, theirs) in self.stages.iter_mut().zip(&other.stages) {
            merge_histograms(mine, theirs, by);
        }
        for (of, theirs) in &other.durations {
            merge_histograms(self.durations.entry(*of).or_default(), theirs, by);
        }
    }

    /// Adds the counters of `other`.
    pub fn add(&mut self, other: &Self) {
        self.combine_counters_by(other, u64::saturating_add);
    }

    /// Raises each counter to that of `other` if it is larger: a counter never goes back.
    pub fn raise_counters_to(&mut self, other: &Self) {
        self.combine_counters_by(other, u64::max);
    }
}

/// The connections of one transport.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct TransportConnectionCounts {
    pub connections: u64,
    pub lanes: u64,
    pub launches: u64,
}

impl TransportConnectionCounts {
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

/// Returns a reported text on one line, at most [`TEXT_KEPT`] bytes of it.
fn shorten_text(text: &str) -> String {
    truncate_text(&escape_to_one_line(text), TEXT_KEPT, "…")
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
    pub fn furthest_from_service(readings: impl IntoIterator<Item = Self>) -> Option<Self> {
        let further = |one: Self, other: Self| {
            if other.min_clock_distance_us() > one.min_clock_distance_us() { other } else { one }
        };
        readings.into_iter().reduce(further)
    }

    /// Returns the minimum distance between the two clocks, in microseconds, given the uncertainty.
    #[must_use]
    pub fn min_clock_distance_us(&self) -> u64 {
        self.ahead_us.unsigned_abs().saturating_sub(self.within_us)
    }
}

/// The state of a check of a host that found something.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum HostCheckState {
    /// It works, but not as fast or as safely as possible.
    CouldBeBetter,
    /// It is missing.
    Missing,
}

impl HostCheckState {
    /// Returns the state in words.
    #[must_use]
    pub fn words(self) -> &'static str {
        match self {
            Self::CouldBeBetter => "could be better",
            Self::Missing => "missing",
        }
    }
}

/// A check of a worker's host that found something, as `muster doctor` prints it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HostCheckView {
    /// The stable identifier for programs.
    pub id: String,
    /// The title for people.
    pub title: String,
    /// The state.
    pub state: HostCheckState,
    /// The observed value.
    pub found: String,
    /// The command that improves it, if there is one.
    pub fix: Option<String>,
}

/// The checks of a worker's host for fast transfers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HostChecksView {
    /// The number of checks that found nothing to do.
    pub good: u32,
    /// The others.
    pub found: Vec<HostCheckView>,
}

impl From<wire::HostChecks> for HostChecksView {
    fn from(given: wire::HostChecks) -> Self {
        let check = |row: &wire::HostCheck| {
            Some(HostCheckView {
                id: shorten_text(&row.id),
                title: shorten_text(&row.title),
                state: match row.state.as_str() {
                    "could_be_better" => HostCheckState::CouldBeBetter,
                    "missing" => HostCheckState::Missing,
                    _ => return None,
                },
                found: shorten_text(&row.found),
                fix: (!row.fix.is_empty()).then(|| shorten_text(&row.fix)),
            })
        };
        Self { good: given.good, found: given.found.iter().filter_map(check).take(HOST_CHECKS_MAX).collect() }
    }
}

/// A GPU that the driver has lost to a worker's process. Only another process can use it again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LostGpuView {
    /// The GPU, as the process numbers it.
    pub gpu: u32,
    /// The driver's error.
    pub error: String,
    /// When it was first reported.
    pub reported_at: Timestamp,
}

/// A reported failure.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ReportedFailure {
    /// The time by the worker's clock. The store moves it into the run if the clock is off.
    pub at: Timestamp,
    pub peer: TaskId,
    /// The job of the peer, if it is another one.
    pub peer_job: Option<JobName>,
    pub reason: TransferOutcome,
    pub text: Box<str>,
}

/// A task of another job, and a transport.
pub(super) type PeerJobPair = (JobName, TaskId, ReportedTransport);

/// A checked report.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct CheckedReport {
    pub task: TaskId,
    pub incarnation: TaskIncarnation,
    pub sequence: u64,
    pub totals: ReportedTotals,
    /// Bytes sent and received, by peer and transport.
    pub pairs: BTreeMap<(TaskId, ReportedTransport), [u64; 2]>,
    /// Bytes sent to and received from tasks of other jobs.
    pub peer_jobs: BTreeMap<PeerJobPair, [u64; 2]>,
    pub links: [TransportConnectionCounts; ReportedTransport::ALL.len()],
    pub connections: Vec<ReportedConnection>,
    pub cliques: u64,
    pub registered_bytes: u64,
    pub registered_device_bytes: u64,
    /// Bytes that are still to move, by class in order of urgency.
    pub in_flight: [u64; 3],
    pub clock: Option<ClockReading>,
    pub failures: Vec<ReportedFailure>,
    /// The lost GPUs, each with the driver's error.
    pub lost_gpus: Vec<(u32, String)>,
    /// The checks of the host, if the report has them.
    pub host_checks: Option<HostChecksView>,
}

/// Counts the rows before memory is allocated for them: an empty row takes two bytes of a message.
fn check_row_counts(bytes: &[u8]) -> Result<(), ReportError> {
    let mut counts = [0_usize; LISTS.len()];
    for field in MessageFields::new(bytes) {
        let field = field.map_err(|error| ReportError::Unreadable(error.to_string()))?;
        for (count, (of, what, most)) in counts.iter_mut().zip(LISTS) {
            *count += usize::from(of == field.tag);
            if *count > most {
                return Err(ReportError::TooMany { what, most });
            }
        }
    }
    Ok(())
}

/// The number of tasks of the job: a report names no others.
#[derive(Clone, Copy)]
struct JobTaskCount(usize);

impl JobTaskCount {
    fn task_id(self, number: u32) -> Option<TaskId> {
        let id = i32::try_from(number).ok()?;
        usize::try_from(id).is_ok_and(|id| id < self.0).then_some(TaskId(id))
    }

    fn peer_task_id(self, number: u32) -> Result<TaskId, ReportError> {
        self.task_id(number).ok_or(ReportError::NoSuchPeer(number, self.0))
    }
}

impl CheckedReport {
    /// Parses a report to a job with this many tasks.
    pub fn parse(bytes: &[u8], tasks: usize) -> Result<Self, ReportError> {
        if bytes.len() > BYTES_MAX {
            return Err(ReportError::TooLong(bytes.len()));
        }
        check_row_counts(bytes)?;
        let given = wire::TransferReport::decode(bytes)
            .map_err(|error| ReportError::Unreadable(error.to_string()))?;
        let tasks = JobTaskCount(tasks);
        let task = tasks.task_id(given.task).ok_or(ReportError::NoSuchTask(given.task, tasks.0))?;
        let mut totals = collect_totals_without_bytes(&given);
        let (pairs, peer_jobs) = collect_pairs_and_add_to_totals(&given.pairs, tasks, &mut totals)?;
        let mut links = [TransportConnectionCounts::default(); ReportedTransport::ALL.len()];
        let mut connections = Vec::with_capacity(given.connections.len());
        for row in &given.connections {
            let (lanes, launches) = (row.lanes.into(), row.launches.into());
            let of_transport = &mut links[ReportedTransport::from_name(&row.transport) as usize];
            of_transport.add(&TransportConnectionCounts { connections: 1, lanes, launches });
            // Those with other jobs are in the sums only.
            if parse_peer_job_name(&row.peer_job)?.is_none() {
                connections.push(read_connection(row, tasks)?);
            }
        }
        let failures = given.failures.iter().map(|row| read_failure(row, tasks)).collect::<Result<_, _>>()?;
        let in_flight = given.in_flight.unwrap_or_default();
        Ok(Self {
            task,
            incarnation: TaskIncarnation(given.incarnation),
            sequence: given.sequence,
            totals,
            pairs,
            peer_jobs,
            links,
            connections,
            cliques: given.cliques.unwrap_or_default().size,
            registered_bytes: given.totals.unwrap_or_default().registered_bytes,
            registered_device_bytes: given.totals.unwrap_or_default().registered_device_bytes,
            in_flight: [in_flight.latency_bytes, in_flight.normal_bytes, in_flight.bulk_bytes],
            clock: given.clock.map(ClockReading::from),
            failures,
            lost_gpus: read_lost_gpus(&given.lost_gpus),
            host_checks: given.host_checks.map(HostChecksView::from),
        })
    }
}

/// Reads the lost GPUs, each once.
fn read_lost_gpus(rows: &[wire::LostGpu]) -> Vec<(u32, String)> {
    let mut lost: Vec<(u32, String)> = Vec::with_capacity(rows.len());
    for row in rows {
        if lost.iter().all(|(gpu, _)| *gpu != row.gpu) {
            lost.push((row.gpu, shorten_text(&row.error)));
        }
    }
    lost
}

/// Reads every counter but the bytes, which are counted with the pairs.
fn collect_totals_without_bytes(given: &wire::TransferReport) -> ReportedTotals {
    let mut totals = ReportedTotals::default();
    let add = |sum: &mut u64, count: u64| *sum = sum.saturating_add(count);
    for row in &given.outcomes {
        add(&mut totals.outcomes[TransferOutcome::from_name(&row.outcome).index()], row.launches);
    }
    for row in &given.aborts {
        add(&mut totals.aborts[TransferOutcome::from_name(&row.reason).index()], row.connections);
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
        if let Some(stage) = LaunchStage::ALL.into_iter().find(|stage| stage.name() == row.stage) {
            add_reported_histogram(&mut totals.stages[stage as usize], &row.counts, row.sum_us);
        }
    }
    for row in given.durations.iter().filter(|row| any(&row.counts)) {
        if let Some((size, _)) = (0..).zip(size_class_names()).find(|(_, name)| *name == row.size_class) {
            let of = (ReportedTransport::from_name(&row.transport), size);
            add_reported_histogram(totals.durations.entry(of).or_default(), &row.counts, row.sum_us);
        }
    }
    totals
}

/// Bytes by task of the job, and by task of other jobs.
type PairBytes = (BTreeMap<(TaskId, ReportedTransport), [u64; 2]>, BTreeMap<PeerJobPair, [u64; 2]>);

/// Returns the job of a peer, if it is another one.
fn parse_peer_job_name(name: &str) -> Result<Option<JobName>, ReportError> {
    if name.is_empty() {
        return Ok(None);
    }
    name.parse().map(Some).map_err(|error: InvalidJobName| ReportError::Unreadable(error.to_string()))
}

/// Returns the task of another job. How many that job has is not known here.
fn parse_task_id_of_other_job(number: u32) -> Result<TaskId, ReportError> {
    i32::try_from(number)
        .map(TaskId)
        .map_err(|_| ReportError::Unreadable(format!("there is no task {number}")))
}

/// Reads the bytes by pair, and adds them to the totals.
fn collect_pairs_and_add_to_totals(
    rows: &[wire::PairTotals],
    tasks: JobTaskCount,
    totals: &mut ReportedTotals,
) -> Result<PairBytes, ReportError> {
    let (mut pairs, mut peer_jobs) = PairBytes::default();
    for row in rows {
        let transport = ReportedTransport::from_name(&row.transport);
        let moved = [row.sent_bytes, row.received_bytes];
        let pair = match parse_peer_job_name(&row.peer_job)? {
            None => pairs.entry((tasks.peer_task_id(row.peer)?, transport)).or_default(),
            Some(job) => {
                peer_jobs.entry((job, parse_task_id_of_other_job(row.peer)?, transport)).or_default()
            }
        };
        for (sum, bytes) in
            pair.iter_mut().zip(moved).chain(totals.bytes[transport as usize].iter_mut().zip(moved))
        {
            *sum = sum.saturating_add(bytes);
        }
    }
    Ok((pairs, peer_jobs))
}

fn read_connection(row: &wire::Connection, tasks: JobTaskCount) -> Result<ReportedConnection, ReportError> {
    Ok(ReportedConnection {
        peer: tasks.peer_task_id(row.peer)?,
        peer_incarnation: TaskIncarnation(row.peer_incarnation),
        transport: ReportedTransport::from_name(&row.transport),
        lanes: row.lanes,
        launches: row.launches,
    })
}

fn read_failure(row: &wire::Failure, tasks: JobTaskCount) -> Result<ReportedFailure, ReportError> {
    let peer_job = parse_peer_job_name(&row.peer_job)?;
    let cut = row.text.get(..row.text.floor_char_boundary(TEXT_KEPT)).unwrap_or_default();
    Ok(ReportedFailure {
        at: Timestamp(row.at),
        peer: if peer_job.is_some() {
            parse_task_id_of_other_job(row.peer)?
        } else {
            tasks.peer_task_id(row.peer)?
        },
        peer_job,
        reason: TransferOutcome::from_name(&row.reason),
        text: escape_to_one_line(cut).into(),
    })
}
