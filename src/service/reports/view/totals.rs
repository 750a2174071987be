//! The view of the counters of a run: bytes, launches and durations, broken down by transport, outcome, stage and
//! size class.
//!
//! `ReportedTotals` computes the sums. Begin at [`TotalsView`].

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::service::reports::parse::ReportedTotals;
use crate::service::reports::vocabulary::{ReportedTransport, TransferCounter, TransferOutcome};
use crate::transfer::{LaunchStage, TimeHistogram, size_class_names};

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
    pub fn size_and_transport_label(&self) -> String {
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
fn timed_launch_count(times: &TimeHistogram) -> u64 {
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
    fn from_histogram(stage: LaunchStage, times: &TimeHistogram) -> Option<Self> {
        let launches = timed_launch_count(times);
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
    pub fn label(&self) -> &str {
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
    pub(super) fn from_counters(totals: &ReportedTotals) -> Self {
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
            stages: LaunchStage::ALL
                .into_iter()
                .zip(&totals.stages)
                .filter_map(|(s, t)| StageView::from_histogram(s, t))
                .collect(),
            durations: totals
                .durations
                .iter()
                .map(|((transport, size), times)| DurationView {
                    transport: *transport,
                    size_class: size_class_names().nth(usize::from(*size)).unwrap_or_default().to_owned(),
                    launches: timed_launch_count(times),
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
    pub fn sent_bytes(&self) -> u64 {
        self.bytes.iter().fold(0, |sum, of| sum.saturating_add(of.sent))
    }

    /// Returns the bytes received over all transports.
    #[must_use]
    pub fn received_bytes(&self) -> u64 {
        self.bytes.iter().fold(0, |sum, of| sum.saturating_add(of.received))
    }

    /// Returns the number of launches with this outcome.
    #[must_use]
    pub fn launches_with_outcome(&self, outcome: TransferOutcome) -> u64 {
        self.launches.iter().find(|of| of.outcome == outcome).map_or(0, |of| of.launches)
    }

    /// Returns the number of launches that did not complete.
    #[must_use]
    pub fn failed_launches(&self) -> u64 {
        let failed = self.launches.iter().filter(|of| of.outcome != TransferOutcome::COMPLETED);
        failed.fold(0, |sum, of| sum.saturating_add(of.launches))
    }
}
