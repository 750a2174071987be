//! The views of the bytes that were moved: over time, and between each pair of tasks.
//!
//! Begin at [`Throughput`] and [`PairView`].

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::rates::{RateWindow, last_second_reported_by_all};
use crate::coordination::{JobId, JobName, TaskId, TaskIncarnations, Timestamp};
use crate::service::reports::POINTS;
use crate::service::reports::job_reports::JobReports;
use crate::service::reports::report_store::TransferReportStore;
use crate::service::reports::vocabulary::ReportedTransport;

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

/// The bytes between a task and one of another job by one transport, as the task of this job reports them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PeerJobView {
    /// The task.
    pub task: TaskId,
    /// The other job.
    pub job: JobName,
    /// The task of the other job.
    pub peer: TaskId,
    /// The transport.
    pub transport: ReportedTransport,
    /// Bytes sent to the other job.
    pub sent: u64,
    /// Bytes received from it.
    pub received: u64,
}

impl PairView {
    /// Returns the bytes that moved: the larger of the counts of both sides.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.sent.unwrap_or(0).max(self.received.unwrap_or(0))
    }
}

impl TransferReportStore {
    /// Returns the bytes of the last `seconds` seconds: at most [`POINTS`], and none before the first
    /// report.
    #[must_use]
    pub fn throughput(&self, job: JobId, roster: &TaskIncarnations, seconds: usize) -> Throughput {
        let seconds = seconds.clamp(1, POINTS);
        let nothing = Throughput {
            ends_at: Timestamp(0),
            seconds,
            transports: Vec::new(),
            pairs: Vec::new(),
            others: Vec::new(),
        };
        let view = |of_job: &JobReports| {
            let last = last_second_reported_by_all(of_job, roster);
            let known = (last + 1).saturating_sub(of_job.since.0 / 1_000_000);
            let seconds = seconds.min(usize::try_from(known).unwrap_or(usize::MAX));
            let transports = ReportedTransport::ALL.into_iter().zip(&of_job.series);
            let transports = transports
                .map(|(transport, ring)| Series { transport, sent: ring.bytes_of_last_steps(last, seconds) });
            let pairs = of_job.pairs.iter().map(|((from, to, transport), ring)| PairSeries {
                from: *from,
                to: *to,
                transport: *transport,
                sent: ring.bytes_of_last_steps(last, seconds),
            });
            Throughput {
                ends_at: Timestamp((last + 1) * 1_000_000),
                seconds,
                transports: transports.filter(|it| it.sent.iter().any(|sent| *sent > 0)).collect(),
                pairs: pairs.collect(),
                others: of_job.others.bytes_of_last_steps(last, seconds),
            }
        };
        self.with_run_reports(job, roster.run, view).unwrap_or(nothing)
    }

    /// Returns the bytes a second that all tasks sent in the steps of `step_seconds` seconds with these begins, which
    /// are whole seconds; `None` for a step that is not reported completely.
    #[must_use]
    pub fn sending_rates(
        &self,
        job: JobId,
        roster: &TaskIncarnations,
        begins: &[Timestamp],
        step_seconds: u64,
    ) -> Vec<Option<u64>> {
        let view = |of_job: &JobReports| {
            let last = last_second_reported_by_all(of_job, roster);
            let since = of_job.since.0 / 1_000_000;
            let rate = |begin: &Timestamp| {
                let first = begin.0 / 1_000_000;
                let seconds = first..first + step_seconds;
                let is_known = first >= since && seconds.end <= last + 1 && last - first < POINTS as u64;
                let bytes = |second| of_job.series.iter().map(move |series| series.bytes_of_step(second));
                is_known.then(|| seconds.flat_map(bytes).fold(0, u64::saturating_add) / step_seconds.max(1))
            };
            begins.iter().map(rate).collect()
        };
        self.with_run_reports(job, roster.run, view).unwrap_or_default()
    }

    /// Returns the bytes with tasks of other jobs, by task; optionally of one task and one transport.
    #[must_use]
    pub fn peer_jobs(
        &self,
        job: JobId,
        roster: &TaskIncarnations,
        task: Option<TaskId>,
        transport: Option<ReportedTransport>,
    ) -> Vec<PeerJobView> {
        let view = |of_job: &JobReports| {
            let rows = of_job.tasks.iter().flat_map(|(one, of_task)| {
                of_task.peer_jobs.iter().map(move |((job, peer, transport), row)| {
                    let [sent, received] = row.bytes();
                    let (job, transport) = (job.clone(), *transport);
                    PeerJobView { task: *one, job, peer: *peer, transport, sent, received }
                })
            });
            let wanted = rows.filter(|row| {
                task.is_none_or(|task| task == row.task)
                    && transport.is_none_or(|transport| transport == row.transport)
            });
            wanted.collect()
        };
        self.with_run_reports(job, roster.run, view).unwrap_or_default()
    }

    /// Returns the stored pairs by task, optionally of one task and one transport.
    #[must_use]
    pub fn pair_views(
        &self,
        job: JobId,
        roster: &TaskIncarnations,
        task: Option<TaskId>,
        transport: Option<ReportedTransport>,
    ) -> Vec<PairView> {
        let rows: Vec<_> = self
            .with_run_reports(job, roster.run, |of_job| {
                let window = RateWindow::of_reports(of_job, roster);
                let rows = of_job.tasks.iter().flat_map(|(one, of_task)| {
                    of_task.rows.iter().map(move |((peer, by), row)| {
                        let rates = [0, 1].map(|way: usize| window.rate_of(&row.steps[way]));
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
}
