//! Counts the events of the state machine.
//!
//! `Metrics` collects the counts at a scrape. Begin at `EventCounters::on_event`.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::catalogue as metric;
use super::text_format::{ExportedHistogram, ScrapeOutput};
use crate::coordination::{
    BarrierKind, BarrierOutcome, BarrierRecordWithArrivals, EventKind, FailureClass, JobEvent, JobId,
    RunOutcome,
};
use crate::engine::Observer;
use crate::text::micros_to_seconds;

/// Bucket bounds in seconds: barriers take from a fraction of a millisecond to hours.
static BARRIER_BUCKETS: [f64; 17] = [
    0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 1_800.0,
    7_200.0,
];
/// Bucket bounds in seconds: timers are late by fractions of a millisecond, unless something is wrong.
static LAG_BUCKETS: [f64; 8] = [0.001, 0.002, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0];

const OUTCOMES: [(RunOutcome, &str); 3] = [
    (RunOutcome::Completed, "completed"),
    (RunOutcome::Failed, "failed"),
    (RunOutcome::Abandoned, "abandoned"),
];

/// The counters of barriers of one kind.
#[derive(Debug, Clone)]
struct BarrierCounters {
    passed: u64,
    failed: u64,
    duration: ExportedHistogram,
    skew: ExportedHistogram,
    blocked_us: u64,
}

impl Default for BarrierCounters {
    fn default() -> Self {
        let histogram = || ExportedHistogram::new(&BARRIER_BUCKETS);
        Self { passed: 0, failed: 0, duration: histogram(), skew: histogram(), blocked_us: 0 }
    }
}

/// The counters of one job.
#[derive(Debug, Default, Clone)]
struct JobCounters {
    runs: [u64; OUTCOMES.len()],
    registrations: u64,
    registrations_again: u64,
    failures: [u64; FailureClass::ALL.len()],
    departures: u64,
    suspicions: u64,
    returns: u64,
    fenced: u64,
    superseded: u64,
    preemptions: u64,
    without: u64,
    barriers: BTreeMap<BarrierKind, BarrierCounters>,
    findings: BTreeMap<Arc<str>, u64>,
}

#[derive(Debug)]
struct CounterState {
    jobs: BTreeMap<JobId, JobCounters>,
    lag: ExportedHistogram,
}

/// The counters of all jobs. Those of a deleted job are dropped.
#[derive(Debug)]
pub struct EventCounters {
    state: Mutex<CounterState>,
    /// The names of the findings that are shown.
    findings: Vec<&'static str>,
}

impl EventCounters {
    /// Counts nothing yet; `findings` names the findings that are shown, those that never opened too.
    #[must_use]
    pub fn new(findings: impl IntoIterator<Item = &'static str>) -> Self {
        let state = CounterState { jobs: BTreeMap::new(), lag: ExportedHistogram::new(&LAG_BUCKETS) };
        Self { state: Mutex::new(state), findings: findings.into_iter().collect() }
    }

    fn lock(&self) -> MutexGuard<'_, CounterState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records by how much a timer was late.
    pub fn record_timer_lag(&self, by: Duration) {
        self.lock().lag.observe(by.as_secs_f64());
    }

    /// Drops the counters of deleted jobs.
    pub(super) fn retain_jobs(&self, there: impl Fn(JobId) -> bool) {
        self.lock().jobs.retain(|job, _| there(*job));
    }

    pub(super) fn write_timer_lag(&self, page: &mut ScrapeOutput) {
        page.add_histogram(&metric::LOOP_LAG, &[], &self.lock().lag);
    }

    /// Writes the counters of a job. Counters of events that have not happened are 0, so that the first event
    /// shows as an increase.
    pub(super) fn write_job_counters(&self, job: JobId, name: &str, page: &mut ScrapeOutput) {
        let tally = self.lock().jobs.get(&job).cloned().unwrap_or_default();
        for ((_, outcome), count) in OUTCOMES.iter().zip(tally.runs) {
            page.add_integer_sample(&metric::RUNS, &[name, outcome], count);
        }
        page.add_integer_sample(&metric::REGISTRATIONS, &[name, "first"], tally.registrations);
        page.add_integer_sample(&metric::REGISTRATIONS, &[name, "again"], tally.registrations_again);
        for (class, count) in FailureClass::ALL.iter().zip(tally.failures) {
            page.add_integer_sample(&metric::TASK_FAILURES, &[name, class.name()], count);
        }
        for (metric, count) in [
            (&metric::TASK_DEPARTURES, tally.departures),
            (&metric::SUSPICIONS, tally.suspicions),
            (&metric::RETURNS, tally.returns),
            (&metric::FENCED, tally.fenced),
            (&metric::SUPERSEDED, tally.superseded),
            (&metric::PREEMPTIONS, tally.preemptions),
            (&metric::BARRIERS_WITHOUT, tally.without),
        ] {
            page.add_integer_sample(metric, &[name], count);
        }
        for finding in &self.findings {
            let count = tally.findings.get(*finding).copied().unwrap_or_default();
            page.add_integer_sample(&metric::FINDINGS_OPENED, &[name, finding], count);
        }
        let mut barriers = tally.barriers;
        for kind in [BarrierKind::Registration, BarrierKind::Shutdown, BarrierKind::Client] {
            barriers.entry(kind).or_default();
        }
        for (kind, barriers) in barriers {
            let labels = [name, kind.name()];
            let passed = BarrierOutcome::Passed.name();
            page.add_integer_sample(&metric::BARRIERS, &[name, kind.name(), passed], barriers.passed);
            let failed = BarrierOutcome::Failed.name();
            page.add_integer_sample(&metric::BARRIERS, &[name, kind.name(), failed], barriers.failed);
            page.add_histogram(&metric::BARRIER_DURATION, &labels, &barriers.duration);
            page.add_histogram(&metric::BARRIER_SKEW, &labels, &barriers.skew);
            page.add_sample(&metric::BARRIER_BLOCKED, &labels, micros_to_seconds(barriers.blocked_us));
        }
    }
}

impl Observer for EventCounters {
    fn on_event(&self, event: &JobEvent) {
        // Most events are not counted and take no lock.
        let count = |add: &dyn Fn(&mut JobCounters)| add(self.lock().jobs.entry(event.job).or_default());
        match &event.what {
            EventKind::RunEnded { outcome } => count(&|tally| {
                for ((known, _), count) in OUTCOMES.iter().zip(&mut tally.runs) {
                    *count += u64::from(known == outcome);
                }
            }),
            EventKind::TaskConnected { again: false, .. } => count(&|tally| tally.registrations += 1),
            EventKind::TaskConnected { again: true, .. } => count(&|tally| tally.registrations_again += 1),
            EventKind::TaskFailed { class, .. } => count(&|tally| {
                for (known, count) in FailureClass::ALL.iter().zip(&mut tally.failures) {
                    *count += u64::from(known == class);
                }
            }),
            EventKind::TaskDisconnected { .. } => count(&|tally| tally.departures += 1),
            EventKind::TaskSuspected { .. } => count(&|tally| tally.suspicions += 1),
            EventKind::TaskReturned { .. } => count(&|tally| tally.returns += 1),
            EventKind::Fenced { .. } => count(&|tally| tally.fenced += 1),
            EventKind::TaskSuperseded { .. } => count(&|tally| tally.superseded += 1),
            EventKind::PreemptionNoticed => count(&|tally| tally.preemptions += 1),
            EventKind::BarrierPassed { without, .. } if !without.is_empty() => {
                count(&|tally| tally.without += 1)
            }
            EventKind::FindingOpened { finding, .. } => {
                count(&|tally| *tally.findings.entry(Arc::clone(finding)).or_default() += 1);
            }
            _ => {}
        }
    }

    fn on_barrier_ended(&self, ending: &Arc<BarrierRecordWithArrivals>) {
        let record = &ending.record;
        let mut counts = self.lock();
        let tally = counts.jobs.entry(ending.job).or_default();
        let barriers = tally.barriers.entry(record.kind).or_default();
        match record.outcome {
            BarrierOutcome::Passed => barriers.passed += 1,
            BarrierOutcome::Failed => barriers.failed += 1,
        }
        barriers.duration.observe(record.ended.since(record.began).as_secs_f64());
        barriers.skew.observe(micros_to_seconds(record.skew_us));
        barriers.blocked_us = barriers.blocked_us.saturating_add(record.waited_us);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::coordination::{RunNumber, TaskId, Timestamp};

    fn record_event(tally: &EventCounters, job: u32, what: EventKind) {
        let (at, run, reason) = (Timestamp(1), RunNumber(1), String::new());
        tally.on_event(&JobEvent { at, job: JobId(job), run, what, reason });
    }

    fn job_counters_text(tally: &EventCounters, job: u32) -> String {
        let mut page = ScrapeOutput::default();
        tally.write_job_counters(JobId(job), "j", &mut page);
        page.to_text(super::super::catalogue::CATALOGUE)
    }

    #[test]
    fn counters_are_kept_by_job_and_deleted_with_it() {
        let tally = EventCounters::new([]);
        record_event(&tally, 1, EventKind::RunEnded { outcome: RunOutcome::Failed });
        let task = TaskId(0);
        record_event(&tally, 1, EventKind::TaskFailed { task, class: FailureClass::ConnectionLost });
        record_event(&tally, 2, EventKind::TaskSuspected { task });
        for line in [
            "muster_runs_total{muster_job=\"j\",outcome=\"failed\"} 1",
            "muster_runs_total{muster_job=\"j\",outcome=\"completed\"} 0",
            "muster_task_failures_total{muster_job=\"j\",class=\"connection-lost\"} 1",
            "muster_suspicions_total{muster_job=\"j\"} 0",
        ] {
            assert!(job_counters_text(&tally, 1).lines().any(|found| found == line), "no {line}");
        }
        assert!(job_counters_text(&tally, 2).contains("muster_suspicions_total{muster_job=\"j\"} 1"));
        tally.retain_jobs(|job| job == JobId(2));
        assert!(
            job_counters_text(&tally, 1).contains("muster_runs_total{muster_job=\"j\",outcome=\"failed\"} 0")
        );
    }
}
