//! Reports transfers to the service about once a second, and when the engine ends.
//!
//! The transfer engine measures the transfers, and this module sends the measurements. Begin at
//! `report_periodically`, then `ReportState`.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tonic::Code;
use tonic::transport::Channel;

use super::clock_offset::ClockSamples;
use super::engine_host::EngineHost;
use crate::clock;
use crate::coordination::Timestamp;
use crate::proto::muster::v1::transfers_client::TransfersClient;
use crate::proto::muster::v1::{self as pb};
use crate::proto::report_limits::{CONNECTIONS_MAX, FAILURES_MAX, PAIRS_MAX};
use crate::transfer::{FailedLaunch, LaunchStage, PeerJob, TimeHistogram, TransferEngine, registered_bytes};

/// The interval of reports, unless the service sets another.
const INTERVAL: Duration = Duration::from_secs(1);
/// The bounds of the interval that the service may set.
const INTERVAL_BOUNDS: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(60));
/// The pause before the next attempt at a service that accepts no reports.
const UNSUPPORTED_PAUSE: Duration = Duration::from_secs(60);
const CALL_TIMEOUT: Duration = Duration::from_secs(5);

/// The sums over the life of a worker.
#[derive(Debug, Default)]
pub(super) struct ReportState {
    /// The failures that are not reported yet.
    failures: VecDeque<FailedLaunch>,
    /// The number of failures before the first of them.
    confirmed: u64,
    sequence: u64,
    clock: ClockSamples,
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
        self.clock.best()
    }

    /// Adds failures to report; the newest are kept.
    fn add_failures(&mut self, more: Vec<FailedLaunch>) {
        self.failures.extend(more);
        self.remove_confirmed_failures(
            self.confirmed + self.failures.len().saturating_sub(FAILURES_MAX) as u64,
        );
    }

    /// Removes the first `settled` of all failures ever, because they were reported.
    fn remove_confirmed_failures(&mut self, settled: u64) {
        while self.confirmed < settled && self.failures.pop_front().is_some() {
            self.confirmed += 1;
        }
    }

    /// Returns the present report. Its failures are repeated until the service has accepted them.
    fn next_report(&mut self, engine: &TransferEngine) -> pb::TransferReport {
        let (size, hits, misses, evictions) = engine.clique_cache_stats();
        let counts = engine.counts();
        self.sequence += 1;
        let launch_metrics = engine.launch_metrics();
        self.add_failures(launch_metrics.take_failures());
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
            }),
            failures,
            clock: self.clock.best(),
        }
    }
}

pub(super) fn with_report_state<R>(tally: &Mutex<ReportState>, act: impl FnOnce(&mut ReportState) -> R) -> R {
    act(&mut tally.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Reports until the worker ends.
pub(super) async fn report_periodically(host: Arc<EngineHost>, channel: Channel) {
    loop {
        let pause = send_report(&host, channel.clone()).await;
        let hurry = host.report_soon.notified();
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            // A failure is reported soon, but many of them in one report.
            () = hurry => tokio::time::sleep(INTERVAL_BOUNDS.0.min(pause)).await,
        }
    }
}

/// Reports once; returns the pause before the next report.
pub(super) async fn send_report(host: &EngineHost, channel: Channel) -> Duration {
    let (report, told) = with_report_state(&host.report_state, |tally| {
        let report = tally.next_report(&host.engine);
        (report, tally.confirmed + tally.failures.len() as u64)
    });
    let mut client = TransfersClient::new(channel);
    let (asked, began) = (clock::wall_time(), clock::monotonic());
    let why = match tokio::time::timeout(CALL_TIMEOUT, client.report(report)).await {
        Ok(Ok(answer)) => {
            let (answer, took) = (answer.into_inner(), began.elapsed());
            with_report_state(&host.report_state, |tally| {
                tally.remove_confirmed_failures(told);
                // A service that does not state its time sends 0.
                if answer.now_us > 0 {
                    tally.clock.add_sample(asked, took, Timestamp(answer.now_us));
                }
            });
            let wanted = u64::from(answer.interval_ms);
            return Duration::from_millis(wanted).clamp(INTERVAL_BOUNDS.0, INTERVAL_BOUNDS.1);
        }
        Ok(Err(status)) if status.code() == Code::Unimplemented => return UNSUPPORTED_PAUSE,
        Ok(Err(status)) => status.to_string(),
        Err(_) => "no answer in time".to_owned(),
    };
    tracing::debug!(why, "a report of transfers was not taken");
    INTERVAL
}
