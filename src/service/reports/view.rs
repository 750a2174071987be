//! Builds the views of reports that pages, REST and metrics share.
//!
//! Begin at `TransfersView`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::byte_series::{STEP_SECONDS, StepSeries};
use super::parse::{ClockReading, LifeTotals, TransportTotals};
use super::store::{self, Gauges, JobReports, ReportStore, TaskReports};
use super::vocabulary::{ReportedTransport, TransferCounter, TransferOutcome};
use crate::coordination::{JobId, RunNumber, TaskId, TaskIncarnations, Timestamp};
use crate::transfer::{Stage, Times, size_classes};

/// The bytes of one transport.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TransferBytes {
    /// The transport.
    pub transport: ReportedTransport,
    /// Bytes that the tasks have sent.
    pub sent: u64,
    /// Bytes that they have received.
    pub received: u64,
}

/// Launches with one outcome.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct OutcomeView {
    /// `completed`, or the reason of the failure.
    #[schema(value_type = String)]
    pub outcome: TransferOutcome,
    /// The number of launches.
    pub launches: u64,
}

/// The counters since the run began, over all lives of its tasks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TotalsView {
    /// Bytes by transport; transports without bytes are left out.
    pub bytes: Vec<TransferBytes>,
    /// Launches by outcome; outcomes that did not occur are left out.
    pub launches: Vec<OutcomeView>,
    /// Cliques found in the cache.
    pub cache_hits: u64,
    /// Cliques that had to be created.
    pub cache_misses: u64,
    /// Cliques evicted for others.
    pub cache_evictions: u64,
    /// Frames of other lives of tasks, which were rejected.
    pub fenced_frames: u64,
    /// Chunks that arrived damaged and were sent again.
    pub damaged_chunks: u64,
    /// Lost lanes.
    pub lanes_lost: u64,
    /// Lanes that were established again.
    pub lanes_made: u64,
    /// Fetches that were replaced by pushes.
    pub fetch_fallbacks: u64,
    /// Durations of launches by stage; stages without launches are left out.
    pub stages: Vec<StageView>,
    /// Durations of complete launches, by transport and size class; classes without launches are left out.
    pub durations: Vec<DurationView>,
    /// Connections that ended while they were needed, by reason; reasons that did not occur are left out.
    pub aborts: Vec<AbortView>,
}

/// Connections that ended while they were needed, for one reason.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AbortView {
    /// The reason.
    #[schema(value_type = String)]
    pub reason: TransferOutcome,
    /// The number of connections, as each side counts them.
    pub connections: u64,
}

/// The durations of launches of one size class over one transport.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DurationView {
    /// The transport of the bytes, or of the last bytes.
    pub transport: ReportedTransport,
    /// The maximum number of bytes of the class: `4KiB`, `64KiB`, `1MiB`, `16MiB`, `256MiB`, `more`.
    pub size_class: String,
    /// The number of launches.
    pub launches: u64,
    /// The sum of their durations, in microseconds.
    pub sum_us: u64,
    /// The numbers of launches by duration, with the bounds of the stages.
    pub counts: Vec<u64>,
}

impl DurationView {
    /// Returns the mean duration, in microseconds.
    #[must_use]
    pub fn mean_us(&self) -> u64 {
        self.sum_us / self.launches.max(1)
    }

    /// Returns a label: transport and size class.
    #[must_use]
    pub fn label(&self) -> String {
        let size = match self.size_class.strip_suffix("iB") {
            Some(number) => {
                format!("up to {} {}iB", &number[..number.len() - 1], &number[number.len() - 1..])
            }
            None => "of more".to_owned(),
        };
        format!("{size} by {}", self.transport)
    }
}

/// Returns the number of timed launches.
fn timed(times: &Times) -> u64 {
    times.counts.iter().copied().fold(0, u64::saturating_add)
}

/// The durations of launches in one stage.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct StageView {
    /// `prepare`: until the connections exist; `dependencies`: until the dependencies are complete; `match`:
    /// until both sides have launched; `move`: until the last byte is in place; `quiesce`: from a
    /// cancellation to its proof; `connect`: until a connection was made.
    pub stage: String,
    /// The number of launches.
    pub launches: u64,
    /// The sum of their durations, in microseconds.
    pub sum_us: u64,
    /// The numbers of launches up to 10, 30, 100, 300 microseconds, 1, 3, 10, 30, 100, 300 milliseconds, 1,
    /// 3, 10 seconds, and longer.
    pub counts: Vec<u64>,
}

impl StageView {
    fn of(stage: Stage, times: &Times) -> Option<Self> {
        let launches = timed(times);
        let (stage, counts) = (stage.name().to_owned(), times.counts.to_vec());
        (launches > 0).then_some(Self { stage, launches, sum_us: times.sum_us, counts })
    }

    /// Returns the mean duration, in microseconds.
    #[must_use]
    pub fn mean_us(&self) -> u64 {
        self.sum_us / self.launches.max(1)
    }

    /// Returns a description of the stage for people.
    #[must_use]
    pub fn stage_names(&self) -> &str {
        match self.stage.as_str() {
            "prepare" => "preparing",
            "dependencies" => "waiting for dependencies",
            "match" => "waiting for the peer to launch",
            "move" => "moving bytes",
            "quiesce" => "cancelling",
            "connect" => "connecting",
            other => other,
        }
    }
}

impl TotalsView {
    fn of(totals: &LifeTotals) -> Self {
        let bytes = ReportedTransport::ALL.into_iter().zip(totals.bytes);
        let bytes = bytes.map(|(transport, [sent, received])| TransferBytes { transport, sent, received });
        let launches = TransferOutcome::all().zip(totals.outcomes);
        let counter = |which: TransferCounter| totals.counters[which as usize];
        Self {
            bytes: bytes.filter(|of| of.sent > 0 || of.received > 0).collect(),
            launches: launches
                .filter(|(_, launches)| *launches > 0)
                .map(|(outcome, launches)| OutcomeView { outcome, launches })
                .collect(),
            cache_hits: counter(TransferCounter::CacheHits),
            cache_misses: counter(TransferCounter::CacheMisses),
            cache_evictions: counter(TransferCounter::CacheEvictions),
            fenced_frames: counter(TransferCounter::FencedFrames),
            damaged_chunks: counter(TransferCounter::DamagedChunks),
            lanes_lost: counter(TransferCounter::LanesLost),
            lanes_made: counter(TransferCounter::LanesMade),
            fetch_fallbacks: counter(TransferCounter::FetchFallbacks),
            stages: Stage::ALL
                .into_iter()
                .zip(&totals.stages)
                .filter_map(|(s, t)| StageView::of(s, t))
                .collect(),
            durations: totals
                .durations
                .iter()
                .map(|((transport, size), times)| DurationView {
                    transport: *transport,
                    size_class: size_classes().nth(usize::from(*size)).unwrap_or_default().to_owned(),
                    launches: timed(times),
                    sum_us: times.sum_us,
                    counts: times.counts.to_vec(),
                })
                .collect(),
            aborts: TransferOutcome::all()
                .zip(totals.aborts)
                .filter(|(_, connections)| *connections > 0)
                .map(|(reason, connections)| AbortView { reason, connections })
                .collect(),
        }
    }

    /// Returns the bytes sent over all transports.
    #[must_use]
    pub fn sent(&self) -> u64 {
        self.bytes.iter().fold(0, |sum, of| sum.saturating_add(of.sent))
    }

    /// Returns the bytes received over all transports.
    #[must_use]
    pub fn received(&self) -> u64 {
        self.bytes.iter().fold(0, |sum, of| sum.saturating_add(of.received))
    }

    /// Returns the number of launches with this outcome.
    #[must_use]
    pub fn ended(&self, outcome: TransferOutcome) -> u64 {
        self.launches.iter().find(|of| of.outcome == outcome).map_or(0, |of| of.launches)
    }

    /// Returns the number of launches that did not complete.
    #[must_use]
    pub fn failed(&self) -> u64 {
        let failed = self.launches.iter().filter(|of| of.outcome != TransferOutcome::COMPLETED);
        failed.fold(0, |sum, of| sum.saturating_add(of.launches))
    }
}

/// The present connections of one kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LinksView {
    /// The transport of their lanes.
    pub transport: ReportedTransport,
    /// The number of connection ends: a connection that both its tasks report counts twice.
    pub connections: u64,
    /// The number of live lanes, counted likewise.
    pub lanes: u64,
    /// Launches in progress, as the tasks count them.
    pub launches: u64,
}

fn links_of(links: &[TransportTotals; ReportedTransport::ALL.len()]) -> Vec<LinksView> {
    let view = |(transport, links): (ReportedTransport, &TransportTotals)| LinksView {
        transport,
        connections: links.connections,
        lanes: links.lanes,
        launches: links.launches,
    };
    ReportedTransport::ALL.into_iter().zip(links).map(view).filter(|links| links.connections > 0).collect()
}

/// One connection, as one of its tasks reports it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ConnectionView {
    /// The task that reports it.
    pub task: TaskId,
    /// The task at its other end.
    pub peer: TaskId,
    /// The incarnation of the peer, in hexadecimal.
    pub peer_incarnation: String,
    /// The transport of its lanes.
    pub transport: ReportedTransport,
    /// The number of live lanes.
    pub lanes: u32,
    /// Launches in progress.
    pub launches: u32,
}

/// A failed launch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FailureView {
    /// The time, by the worker's clock.
    pub at: Timestamp,
    /// The task that reports it.
    pub task: TaskId,
    /// The task on the other side.
    pub peer: TaskId,
    /// The reason.
    #[schema(value_type = String)]
    pub reason: TransferOutcome,
    /// The text of the worker.
    pub text: String,
}

impl FailureView {
    fn of(failure: &store::TaskFailure) -> Self {
        let store::TaskFailure { task, failed } = failure;
        let (at, peer, reason) = (failed.at, failed.peer, failed.reason);
        Self { at, task: *task, peer, reason, text: failed.text.to_string() }
    }
}

/// The failures for one reason.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ReasonView {
    /// The reason.
    #[schema(value_type = String)]
    pub reason: TransferOutcome,
    /// The meaning of the reason.
    pub means: String,
    /// Launches with this outcome, over all tasks.
    pub launches: u64,
    /// The first failure in this run.
    pub first: Option<FailureView>,
    /// The newest failures, the latest first.
    pub newest: Vec<FailureView>,
}

/// Bytes sent, second by second.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Series {
    /// The transport.
    pub transport: ReportedTransport,
    /// Bytes of each second, the oldest first.
    pub sent: Vec<u64>,
}

/// Bytes that one task sent to another, second by second.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PairSeries {
    /// The sending task.
    pub from: TaskId,
    /// The receiving task.
    pub to: TaskId,
    /// The transport.
    pub transport: ReportedTransport,
    /// Bytes of each second, the oldest first.
    pub sent: Vec<u64>,
}

/// Bytes over time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Throughput {
    /// The end of the last second of every list. Later seconds are not yet reported by all tasks.
    pub ends_at: Timestamp,
    /// The length of each list in seconds: the requested number, or the seconds since the first report.
    pub seconds: usize,
    /// All tasks, by transport; transports without bytes are left out.
    pub transports: Vec<Series>,
    /// Single pairs: the first ones of the run that moved bytes, 64 at most.
    pub pairs: Vec<PairSeries>,
    /// All other pairs together.
    pub others: Vec<u64>,
}

/// The bytes from one task to another by one transport.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PairView {
    /// The sending task.
    pub from: TaskId,
    /// The receiving task.
    pub to: TaskId,
    /// The transport.
    pub transport: ReportedTransport,
    /// Bytes sent, as `from` reports them; none if it has not reported the pair.
    pub sent: Option<u64>,
    /// Bytes received, as `to` reports them; none if it has not reported the pair.
    pub received: Option<u64>,
    /// Bytes a second, over the ten seconds before `rate_until` of the summary: as `from` reports them, or as
    /// `to` does if `from` has not reported the pair.
    pub rate: u64,
}

impl PairView {
    /// Returns the bytes that moved: the larger of the counts of both sides.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.sent.unwrap_or(0).max(self.received.unwrap_or(0))
    }
}

/// The reported transfers of one task.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TaskTransfers {
    /// The task.
    pub task: TaskId,
    /// The incarnation of the last report, in hexadecimal.
    pub incarnation: String,
    /// The number of lives that have reported in this run.
    pub lives: u32,
    /// The time of the last report.
    pub reported_at: Timestamp,
    /// The reporting life has ended: it failed, left or restarted. Its counts stay.
    pub stale: bool,
    /// Its counters in this run.
    pub totals: TotalsView,
    /// Bytes sent a second, over the ten seconds before `rate_until` of the summary.
    pub sent_rate: u64,
    /// Bytes received a second.
    pub received_rate: u64,
    /// The end of the ten seconds over which its rates are measured.
    #[serde(default)]
    pub rate_until: Timestamp,
    /// Its connections, by kind.
    pub links: Vec<LinksView>,
    /// Cliques in its cache; none if the life has ended.
    pub cliques: u64,
    /// Memory registered for transfers, in bytes; none if the life has ended.
    pub registered_bytes: u64,
    /// Bytes that launches in progress still have to move, by class: latency, normal, bulk.
    pub in_flight_bytes: [u64; 3],
    /// The offset of its clock; none before it is reported, and none if the life has ended.
    pub clock: Option<ClockReading>,
    /// Its last failures, the latest first.
    pub failures: Vec<FailureView>,
}

impl TaskTransfers {
    fn of(task: TaskId, of_task: &TaskReports, roster: &TaskIncarnations, window: RateWindow) -> Self {
        let failures = of_task.failures.iter().rev();
        let gauges = of_task.gauges(roster.incarnation_of(task));
        let held = |gauge: fn(&Gauges) -> u64| gauges.map_or(0, gauge);
        Self {
            task,
            incarnation: of_task.incarnation.to_string(),
            lives: of_task.lives,
            reported_at: of_task.at,
            stale: gauges.is_none(),
            totals: TotalsView::of(&of_task.totals()),
            sent_rate: window.rate(&of_task.steps[0]),
            received_rate: window.rate(&of_task.steps[1]),
            rate_until: window.until(),
            links: gauges.map_or_else(Vec::new, |gauges| links_of(&gauges.links)),
            cliques: held(|gauges| gauges.cliques),
            registered_bytes: held(|gauges| gauges.registered_bytes),
            in_flight_bytes: gauges.map_or([0; 3], |gauges| gauges.in_flight),
            clock: gauges.and_then(|gauges| gauges.clock),
            failures: failures
                .map(|failed| FailureView::of(&store::TaskFailure { task, failed: failed.clone() }))
                .collect(),
        }
    }

    /// Returns the number of launches in progress.
    #[must_use]
    pub fn in_flight(&self) -> u64 {
        self.links.iter().map(|links| links.launches).sum()
    }

    /// Returns the number of its connections.
    #[must_use]
    pub fn connections(&self) -> u64 {
        self.links.iter().map(|links| links.connections).sum()
    }
}

/// The totals of the transfers in a job's present run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TransfersView {
    /// The time of this view.
    pub seen_at: Timestamp,
    /// The run.
    pub run: RunNumber,
    /// The number of tasks of the job.
    pub tasks: usize,
    /// The number of tasks whose present life has reported.
    pub reporting: usize,
    /// The number of tasks whose reporting life has ended.
    pub stale: usize,
    /// The time of the last report; none without a report.
    pub reported_at: Option<Timestamp>,
    /// The interval between reports of one task, in milliseconds.
    pub interval_ms: u32,
    /// The number of accepted reports.
    pub taken: u64,
    /// The number of reports without news.
    pub repeated: u64,
    /// The number of refused reports.
    pub refused: u64,
    /// The counters of all tasks.
    pub totals: TotalsView,
    /// Bytes sent a second by all tasks, over the last complete ten seconds that all have reported. The rates
    /// of the tasks add up to it, and so do those of the pairs if all pairs are kept.
    pub rate: u64,
    /// The end of the ten seconds over which every rate is measured; none without a report.
    #[serde(default)]
    pub rate_until: Option<Timestamp>,
    /// The present connections, by kind.
    pub links: Vec<LinksView>,
    /// Cliques in the caches of the tasks.
    pub cliques: u64,
    /// Memory registered by the tasks for transfers, in bytes.
    pub registered_bytes: u64,
    /// Bytes that launches in progress still have to move, as both sides count them, by class: latency,
    /// normal, bulk.
    pub in_flight_bytes: [u64; 3],
    /// The reported clock that is furthest from the service's.
    pub clock: Option<ClockReading>,
    /// Failures by reason; the reason that occurred first in the run comes first.
    pub failures: Vec<ReasonView>,
}

impl TransfersView {
    fn empty(roster: &TaskIncarnations, now: Timestamp) -> Self {
        Self {
            seen_at: now,
            run: roster.run,
            tasks: roster.incarnations.len(),
            reporting: 0,
            stale: 0,
            reported_at: None,
            interval_ms: store::interval_ms(roster.incarnations.len()),
            taken: 0,
            repeated: 0,
            refused: 0,
            totals: TotalsView::of(&LifeTotals::default()),
            rate: 0,
            rate_until: None,
            links: Vec::new(),
            cliques: 0,
            registered_bytes: 0,
            in_flight_bytes: [0; 3],
            clock: None,
            failures: Vec::new(),
        }
    }

    fn of(of_job: &JobReports, roster: &TaskIncarnations, now: Timestamp) -> Self {
        let mut view = Self::empty(roster, now);
        let mut totals = LifeTotals::default();
        let mut links = [TransportTotals::default(); ReportedTransport::ALL.len()];
        for (task, of_task) in &of_job.tasks {
            totals.add(&of_task.totals());
            let Some(gauges) = of_task.gauges(roster.incarnation_of(*task)) else {
                view.stale += 1;
                continue;
            };
            view.reporting += 1;
            for (sum, links) in links.iter_mut().zip(&gauges.links) {
                sum.add(links);
            }
            view.cliques = view.cliques.saturating_add(gauges.cliques);
            view.registered_bytes = view.registered_bytes.saturating_add(gauges.registered_bytes);
            for (sum, bytes) in view.in_flight_bytes.iter_mut().zip(gauges.in_flight) {
                *sum = sum.saturating_add(bytes);
            }
            view.clock = ClockReading::furthest(view.clock.into_iter().chain(gauges.clock));
        }
        let window = RateWindow::of(of_job, roster);
        let moved = of_job.tasks.values().map(|of_task| of_task.steps[0].point(window.0));
        view.rate = moved.fold(0, u64::saturating_add) / STEP_SECONDS;
        view.rate_until = Some(window.until()).filter(|_| of_job.at.0 > 0);
        view.reported_at = Some(of_job.at).filter(|at| at.0 > 0);
        (view.taken, view.repeated, view.refused) = (of_job.taken, of_job.repeated, of_job.rejected);
        view.totals = TotalsView::of(&totals);
        view.links = links_of(&links);
        view.failures = reasons(of_job, &view.totals);
        view
    }

    /// Returns the UTC times of day between which every rate is measured.
    #[must_use]
    pub fn rate_window(&self) -> Option<(String, String)> {
        self.rate_until.map(rate_window)
    }

    /// Returns the number of present connections.
    #[must_use]
    pub fn connections(&self) -> u64 {
        self.links.iter().map(|links| links.connections).sum()
    }

    /// Returns the number of launches in progress.
    #[must_use]
    pub fn in_flight(&self) -> u64 {
        self.links.iter().map(|links| links.launches).sum()
    }

    /// Returns the bytes that launches in progress still have to move.
    #[must_use]
    pub fn bytes_in_flight(&self) -> u64 {
        self.in_flight_bytes.iter().copied().fold(0, u64::saturating_add)
    }
}

/// Returns the failures by reason: the first cause first, reasons with counts alone last.
fn reasons(of_job: &JobReports, totals: &TotalsView) -> Vec<ReasonView> {
    let mut reasons: BTreeMap<TransferOutcome, ReasonView> = BTreeMap::new();
    let failed =
        totals.launches.iter().map(|of| of.outcome).filter(|outcome| *outcome != TransferOutcome::COMPLETED);
    for reason in failed.chain(of_job.reasons.keys().copied()) {
        let known = of_job.reasons.get(&reason);
        reasons.insert(
            reason,
            ReasonView {
                reason,
                means: reason.means().to_owned(),
                launches: totals.ended(reason),
                first: known.and_then(|known| known.first.as_ref()).map(FailureView::of),
                newest: known
                    .map_or_else(Vec::new, |it| it.newest.iter().rev().map(FailureView::of).collect()),
            },
        );
    }
    let mut reasons: Vec<ReasonView> = reasons.into_values().collect();
    reasons.sort_by_key(|it| it.first.as_ref().map_or(Timestamp(u64::MAX), |first| first.at));
    reasons
}

/// Returns the present state of the present lives, by task.
fn present<'a>(
    of_job: &'a JobReports,
    roster: &'a TaskIncarnations,
) -> impl Iterator<Item = (TaskId, &'a Gauges)> {
    let tasks = of_job.tasks.iter();
    tasks.filter_map(|(task, of_task)| Some((*task, of_task.gauges(roster.incarnation_of(*task))?)))
}

/// Returns the last second that every punctual task has reported.
fn last_second(of_job: &JobReports, interval_ms: u32) -> u64 {
    let behind = Timestamp(of_job.at.0.saturating_sub(u64::from(interval_ms) * 1000));
    (behind.0 / 1_000_000).saturating_sub(1)
}

/// Returns the UTC times of day between which a rate with this end is measured.
pub(crate) fn rate_window(until: Timestamp) -> (String, String) {
    let time = |at: Timestamp| {
        let stamp = at.to_string();
        stamp.split_once('T').map_or_else(String::new, |(_, time)| time.chars().take(8).collect())
    };
    (time(Timestamp(until.0.saturating_sub(STEP_SECONDS * 1_000_000))), time(until))
}

/// The ten seconds over which every rate is measured: the last step of [`StepSeries`] that every punctual
/// task has reported completely.
#[derive(Debug, Clone, Copy)]
struct RateWindow(u64);

impl RateWindow {
    fn of(of_job: &JobReports, roster: &TaskIncarnations) -> Self {
        let last = last_second(of_job, store::interval_ms(roster.incarnations.len()));
        Self(((last + 1) / STEP_SECONDS).saturating_sub(1))
    }

    fn until(self) -> Timestamp {
        Timestamp((self.0 + 1) * STEP_SECONDS * 1_000_000)
    }

    /// Returns the rate in bytes per second.
    fn rate(self, steps: &StepSeries) -> u64 {
        steps.point(self.0) / STEP_SECONDS
    }
}

impl ReportStore {
    /// Returns whether any task of the job has reported in this run.
    #[must_use]
    pub fn has(&self, job: JobId, run: RunNumber) -> bool {
        self.with(job, run, |of_job| !of_job.tasks.is_empty()).unwrap_or_default()
    }

    /// Returns the summary of a job's transfers.
    #[must_use]
    pub fn summary(&self, job: JobId, roster: &TaskIncarnations, now: Timestamp) -> TransfersView {
        let seen = self.with(job, roster.run, |of_job| TransfersView::of(of_job, roster, now));
        seen.unwrap_or_else(|| TransfersView::empty(roster, now))
    }

    /// Returns the bytes of the last `seconds` seconds: at most [`super::POINTS`], and none before the first
    /// report.
    #[must_use]
    pub fn throughput(&self, job: JobId, roster: &TaskIncarnations, seconds: usize) -> Throughput {
        let seconds = seconds.clamp(1, super::POINTS);
        let nothing = Throughput {
            ends_at: Timestamp(0),
            seconds,
            transports: Vec::new(),
            pairs: Vec::new(),
            others: Vec::new(),
        };
        let view = |of_job: &JobReports| {
            let last = last_second(of_job, store::interval_ms(roster.incarnations.len()));
            let known = (last + 1).saturating_sub(of_job.since.0 / 1_000_000);
            let seconds = seconds.min(usize::try_from(known).unwrap_or(usize::MAX));
            let transports = ReportedTransport::ALL.into_iter().zip(&of_job.series);
            let transports =
                transports.map(|(transport, ring)| Series { transport, sent: ring.window(last, seconds) });
            let pairs = of_job.pairs.iter().map(|((from, to, transport), ring)| PairSeries {
                from: *from,
                to: *to,
                transport: *transport,
                sent: ring.window(last, seconds),
            });
            Throughput {
                ends_at: Timestamp((last + 1) * 1_000_000),
                seconds,
                transports: transports.filter(|it| it.sent.iter().any(|sent| *sent > 0)).collect(),
                pairs: pairs.collect(),
                others: of_job.others.window(last, seconds),
            }
        };
        self.with(job, roster.run, view).unwrap_or(nothing)
    }

    /// Returns the stored pairs by task, optionally of one task and one transport.
    #[must_use]
    pub fn pairs(
        &self,
        job: JobId,
        roster: &TaskIncarnations,
        task: Option<TaskId>,
        transport: Option<ReportedTransport>,
    ) -> Vec<PairView> {
        let rows: Vec<_> = self
            .with(job, roster.run, |of_job| {
                let window = RateWindow::of(of_job, roster);
                let rows = of_job.tasks.iter().flat_map(|(one, of_task)| {
                    of_task.rows.iter().map(move |((peer, by), row)| {
                        let rates = [0, 1].map(|way: usize| window.rate(&row.steps[way]));
                        (*one, *peer, *by, row.bytes(), rates)
                    })
                });
                let wanted = rows.filter(|(one, peer, by, ..)| {
                    task.is_none_or(|task| task == *one || task == *peer)
                        && transport.is_none_or(|transport| transport == *by)
                });
                wanted.collect()
            })
            .unwrap_or_default();
        let mut pairs: BTreeMap<(TaskId, TaskId, ReportedTransport), PairView> = BTreeMap::new();
        let mut side = |from, to, transport, sent: bool, bytes: u64, rate: u64| {
            if bytes == 0 {
                return;
            }
            let nothing = PairView { from, to, transport, sent: None, received: None, rate: 0 };
            let pair = pairs.entry((from, to, transport)).or_insert(nothing);
            *(if sent { &mut pair.sent } else { &mut pair.received }) = Some(bytes);
            if sent || pair.sent.is_none() {
                pair.rate = rate;
            }
        };
        for (task, peer, transport, [sent, received], [sends, receives]) in rows {
            side(task, peer, transport, true, sent, sends);
            side(peer, task, transport, false, received, receives);
        }
        pairs.into_values().collect()
    }

    /// Returns the stored single connections of tasks whose life is present.
    #[must_use]
    pub fn connections(
        &self,
        job: JobId,
        roster: &TaskIncarnations,
        task: Option<TaskId>,
        transport: Option<ReportedTransport>,
    ) -> Vec<ConnectionView> {
        let view = |of_job: &JobReports| {
            let all = present(of_job, roster)
                .flat_map(|(one, gauges)| gauges.connections.iter().map(move |link| (one, link)));
            let wanted = all.filter(|(one, link)| {
                task.is_none_or(|task| task == *one)
                    && transport.is_none_or(|transport| transport == link.transport)
            });
            let view = |(task, link): (TaskId, &super::parse::ReportedConnection)| ConnectionView {
                task,
                peer: link.peer,
                peer_incarnation: link.peer_incarnation.to_string(),
                transport: link.transport,
                lanes: link.lanes,
                launches: link.launches,
            };
            wanted.map(view).collect()
        };
        self.with(job, roster.run, view).unwrap_or_default()
    }

    /// Returns the transfers of every task that has reported, by number.
    #[must_use]
    pub fn tasks(&self, job: JobId, roster: &TaskIncarnations) -> Vec<TaskTransfers> {
        let view = |of_job: &JobReports| {
            let tasks = of_job.tasks.iter();
            let window = RateWindow::of(of_job, roster);
            let view =
                |(task, of_task): (&TaskId, &TaskReports)| TaskTransfers::of(*task, of_task, roster, window);
            tasks.map(view).collect()
        };
        self.with(job, roster.run, view).unwrap_or_default()
    }

    /// Returns the reported clocks of tasks whose life is present.
    #[must_use]
    pub fn clocks(&self, job: JobId, roster: &TaskIncarnations) -> Vec<(TaskId, ClockReading)> {
        let view = |of_job: &JobReports| {
            present(of_job, roster).filter_map(|(task, gauges)| Some((task, gauges.clock?))).collect()
        };
        self.with(job, roster.run, view).unwrap_or_default()
    }

    /// Returns the transfers of one task, if it has reported.
    #[must_use]
    pub fn task(&self, job: JobId, roster: &TaskIncarnations, task: TaskId) -> Option<TaskTransfers> {
        let view = |of_job: &JobReports| {
            let of_task = of_job.tasks.get(&task)?;
            Some(TaskTransfers::of(task, of_task, roster, RateWindow::of(of_job, roster)))
        };
        self.with(job, roster.run, view).flatten()
    }
}
