//! The transfer report of an engine: its totals, and the failures that the service has not accepted yet.
//!
//! `transfer_reports.rs` sends the reports. Begin at [`ReportState`].

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, PoisonError};

use super::clock_offset::ClockSamples;
use crate::proto::muster::v1::{self as pb};
use crate::proto::report_limits::{CONNECTIONS_MAX, FAILURES_MAX, LOST_GPUS_MAX, PAIRS_MAX};
use crate::transfer::{
    FailedLaunch, LaunchStage, PeerJob, TimeHistogram, TransferEngine, lost_gpus, registered_bytes,
    registered_device_bytes,
};

/// The sums over the life of a worker.
#[derive(Debug, Default)]
pub(super) struct ReportState {
    /// The failures that are not reported yet.
    pub(super) failures: VecDeque<FailedLaunch>,
    /// The number of failures before the first of them.
    pub(super) confirmed: u64,
    sequence: u64,
    /// The sequence number of the report that told the checks of the host last.
    host_checks_told_at: Option<u64>,
    pub(super) clock: ClockSamples,
}

/// Returns the name of another job; nothing for this one.
fn job_name_or_empty(job: PeerJob) -> String {
    job.name().unwrap_or_default().to_owned()
}

/// Returns the present connections.
fn connections(engine: &TransferEngine) -> Vec<pb::Connection> {
    let links = engine.links();
    let connections = links.iter().take(CONNECTIONS_MAX).map(|link| pb::Connection {
        peer: link.peer.task.0,
        peer_incarnation: link.peer.incarnation.get(),
        transport: link.kind.name().to_owned(),
        lanes: link.lanes as u32,
        launches: link.launched as u32,
        peer_job: job_name_or_empty(link.peer.job),
    });
    connections.collect()
}

/// Returns the bytes by peer and transport since the start of this incarnation.
pub(super) fn bytes_by_peer_and_transport(engine: &TransferEngine) -> Vec<pb::PairTotals> {
    let moved = engine.bytes_by_task();
    let all = moved.iter().flat_map(|(peer, moved)| moved.iter().map(move |moved| (peer, moved)));
    let pairs = all.filter(|(_, (_, (sent, received)))| *sent > 0 || *received > 0).take(PAIRS_MAX).map(
        |(peer, (kind, (sent, received)))| pb::PairTotals {
            peer: peer.task.0,
            peer_job: job_name_or_empty(peer.job),
            transport: kind.name().to_owned(),
            sent_bytes: *sent,
            received_bytes: *received,
        },
    );
    pairs.collect()
}

impl ReportState {
    /// Returns the offset of this host's clock from the service's.
    pub fn clock_offset(&self) -> Option<pb::ClockReading> {
        self.clock.shortest_round_trip_sample()
    }

    /// Adds failures to report; the newest are kept.
    fn add_failures(&mut self, more: Vec<FailedLaunch>) {
        self.failures.extend(more);
        self.remove_confirmed_failures(
            self.confirmed + self.failures.len().saturating_sub(FAILURES_MAX) as u64,
        );
    }

    /// Removes the first `settled` of all failures ever, because they were reported.
    pub(super) fn remove_confirmed_failures(&mut self, settled: u64) {
        while self.confirmed < settled && self.failures.pop_front().is_some() {
            self.confirmed += 1;
        }
    }

    /// Returns the checks of the host if it is time to tell them: they are told again now and then, because a report may
    /// be lost.
    fn host_checks_to_tell(&mut self, checks: Option<&pb::HostChecks>) -> Option<pb::HostChecks> {
        const TOLD_EVERY: u64 = 64;
        let sequence = self.sequence;
        let is_due = self.host_checks_told_at.is_none_or(|told| sequence - told >= TOLD_EVERY);
        let checks = checks.filter(|_| is_due)?;
        self.host_checks_told_at = Some(sequence);
        Some(checks.clone())
    }

    /// Returns the present report. Its failures are repeated until the service has accepted them.
    pub(super) fn next_report(
        &mut self,
        engine: &TransferEngine,
        host_checks: Option<&pb::HostChecks>,
    ) -> pb::TransferReport {
        let (size, hits, misses, evictions) = engine.clique_cache_stats();
        let counts = engine.counts();
        self.sequence += 1;
        let launch_metrics = engine.launch_metrics();
        self.add_failures(launch_metrics.take_recent_failures());
        let failures = self.failures.iter().map(|failed| pb::Failure {
            at: failed.at_us,
            peer: failed.peer.task.0,
            peer_job: job_name_or_empty(failed.peer.job),
            reason: failed.error.reason_label().to_owned(),
            text: crate::text::escape_to_one_line(&failed.error.to_string()).into_owned(),
        });
        let failures = failures.collect();
        let outcomes = launch_metrics.outcome_counts().filter(|(_, launches)| *launches > 0);
        let outcomes =
            outcomes.map(|(outcome, launches)| pb::OutcomeTotals { outcome: outcome.to_owned(), launches });
        let stages = LaunchStage::ALL.into_iter().map(|stage| {
            let TimeHistogram { counts, sum_us } = launch_metrics.stage_times(stage);
            pb::StageTimes { stage: stage.name().to_owned(), counts: counts.to_vec(), sum_us }
        });
        let durations = launch_metrics.durations().map(|(kind, size, TimeHistogram { counts, sum_us })| {
            pb::DurationTimes {
                transport: kind.name().to_owned(),
                size_class: size.to_owned(),
                counts: counts.to_vec(),
                sum_us,
            }
        });
        let aborts = launch_metrics.connection_aborts().filter(|(_, connections)| *connections > 0);
        let aborts =
            aborts.map(|(reason, connections)| pb::AbortTotals { reason: reason.to_owned(), connections });
        let [latency_bytes, normal_bytes, bulk_bytes] = engine.bytes_in_flight().map(|(_, bytes)| bytes);
        pb::TransferReport {
            task: engine.here().task.0,
            incarnation: engine.here().incarnation.get(),
            sequence: self.sequence,
            pairs: bytes_by_peer_and_transport(engine),
            connections: connections(engine),
            outcomes: outcomes.collect(),
            stages: stages.collect(),
            durations: durations.collect(),
            aborts: aborts.collect(),
            in_flight: Some(pb::InFlight { latency_bytes, normal_bytes, bulk_bytes }),
            cliques: Some(pb::CliqueCache { size: size as u64, hits, misses, evictions }),
            totals: Some(pb::EngineTotals {
                fenced_frames: counts.fenced.load(Ordering::Relaxed),
                damaged_chunks: counts.damaged.load(Ordering::Relaxed),
                lanes_lost: counts.lanes_lost.load(Ordering::Relaxed),
                lanes_made: counts.lanes_made.load(Ordering::Relaxed),
                fetch_fallbacks: counts.fallbacks.load(Ordering::Relaxed),
                registered_bytes: registered_bytes(),
                registered_device_bytes: registered_device_bytes(),
            }),
            failures,
            clock: self.clock.shortest_round_trip_sample(),
            host_checks: self.host_checks_to_tell(host_checks),
            lost_gpus: lost_gpus()
                .into_iter()
                .take(LOST_GPUS_MAX)
                .map(|(gpu, error)| pb::LostGpu { gpu, error: error.to_string() })
                .collect(),
        }
    }
}

pub(super) fn with_locked_report_state<R>(
    tally: &Mutex<ReportState>,
    act: impl FnOnce(&mut ReportState) -> R,
) -> R {
    act(&mut tally.lock().unwrap_or_else(PoisonError::into_inner))
}
