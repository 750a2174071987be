//! The activity of each job over the last ten minutes, in steps of ten seconds: live tasks, and the skew of barriers.
//!
//! Live tasks are sampled once a second. [`ActivityHistory`] is an [`Observer`], which receives every ended barrier.
//! The rates of transfers come from `reports/`, which keep their bytes by second. Begin at
//! [`ActivityHistory::recent_activity`].

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::coordination::{
    BarrierKind, BarrierOutcome, BarrierRecordWithArrivals, EventKind, JobEvent, JobId, TaskIncarnations,
    Timestamp,
};
use crate::engine::{ContentsSerialiser, Engine, Observer, PersistentObserver};
use crate::service::reports::TransferReportStore;
use crate::service::saved_contents;

/// The number of steps that are shown: ten minutes. The step in progress is kept besides.
pub const ACTIVITY_STEPS: usize = 60;
/// The length of a step in seconds.
const STEP_SECONDS: u64 = 10;
const STEP_US: u64 = STEP_SECONDS * 1_000_000;
/// The interval at which live tasks are counted.
const SAMPLE_INTERVAL: Duration = Duration::from_secs(1);

/// The activity of a job over the last minutes.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct JobActivity {
    /// The length of a step in seconds.
    pub step_seconds: u64,
    /// The finished steps of the last ten minutes, the oldest first.
    pub steps: Vec<ActivityStep>,
}

/// The activity of a job in one step.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ActivityStep {
    /// The begin of the step.
    pub at: Timestamp,
    /// The lowest number of live tasks, which are counted once a second; none if they were not counted.
    pub live: Option<usize>,
    /// The number of tasks of the run.
    pub tasks: usize,
    /// The number of barriers of programs that passed.
    pub barriers: u64,
    /// The longest time from the first arrival to the last at one of these barriers, in microseconds.
    pub skew_us: Option<u64>,
    /// Bytes a second that all tasks sent; none if the step is not reported completely.
    pub sent_rate: Option<u64>,
}

/// The steps of one job, the newest last. The begins are multiples of the length of a step.
#[derive(Debug, Default, Clone, Serialize, Deserialize)]
struct JobSteps(VecDeque<ActivityStep>);

impl JobSteps {
    /// Returns whether restored steps keep their bounds and their order.
    fn is_valid(&self) -> bool {
        self.0.len() <= ACTIVITY_STEPS + 1
            && self.0.iter().all(|step| step.at.0.is_multiple_of(STEP_US))
            && self.0.iter().is_sorted_by(|older, newer| older.at < newer.at)
    }

    /// Returns the step of a time. Adds it if it is the newest; returns nothing for an older one that is not kept.
    fn step_of(&mut self, at: Timestamp) -> Option<&mut ActivityStep> {
        let begin = Timestamp(at.0 - at.0 % STEP_US);
        if self.0.back().is_none_or(|newest| newest.at < begin) {
            self.0.push_back(ActivityStep { at: begin, ..ActivityStep::default() });
            if self.0.len() > ACTIVITY_STEPS + 1 {
                self.0.pop_front();
            }
        }
        self.0.iter_mut().rev().find(|step| step.at == begin)
    }

    /// Returns the finished steps of the last ten minutes. A step without measurements is there, too.
    fn finished_steps(&self, now: Timestamp) -> Vec<ActivityStep> {
        let end = now.0 / STEP_US;
        let first = self.0.front().map_or(end, |first| first.at.0 / STEP_US);
        let begins = first.max(end.saturating_sub(ACTIVITY_STEPS as u64))..end;
        let mut known = self.0.iter().peekable();
        let mut steps = Vec::with_capacity(ACTIVITY_STEPS);
        for begin in begins.map(|step| Timestamp(step * STEP_US)) {
            while known.next_if(|step| step.at < begin).is_some() {}
            let step = known.next_if(|step| step.at == begin).copied();
            steps.push(step.unwrap_or(ActivityStep { at: begin, ..ActivityStep::default() }));
        }
        steps
    }
}

/// The activity of all jobs over the last minutes.
///
/// As saved contents, the steps of a job take about 1 KiB.
#[derive(Debug, Default)]
pub struct ActivityHistory(Mutex<BTreeMap<JobId, JobSteps>>);

impl ActivityHistory {
    fn lock_jobs(&self) -> MutexGuard<'_, BTreeMap<JobId, JobSteps>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns what a job did, with the transfers that the tasks of its present run report.
    #[must_use]
    pub fn recent_activity(
        &self,
        job: JobId,
        now: Timestamp,
        reports: &TransferReportStore,
        roster: &TaskIncarnations,
    ) -> JobActivity {
        let steps = self.lock_jobs().get(&job).map(|steps| steps.finished_steps(now));
        let mut steps = steps.unwrap_or_default();
        let begins: Vec<Timestamp> = steps.iter().map(|step| step.at).collect();
        let rates = reports.sending_rates(job, roster, &begins, STEP_SECONDS);
        for (step, rate) in steps.iter_mut().zip(rates) {
            step.sent_rate = rate;
        }
        JobActivity { step_seconds: STEP_SECONDS, steps }
    }

    /// Counts the live tasks of each job.
    fn record_live_tasks(&self, engine: &Engine) {
        let (counts, now) = engine.read(|core, now| {
            let jobs = core.jobs().filter_map(|(id, _)| Some((id, core.job(id)?.summary())));
            let counts: Vec<_> = jobs.map(|(id, job)| (id, job.live, job.tasks)).collect();
            (counts, now)
        });
        let mut jobs = self.lock_jobs();
        for (id, live, tasks) in counts {
            if let Some(step) = jobs.get_mut(&id).and_then(|steps| steps.step_of(now)) {
                step.live = Some(step.live.map_or(live, |lowest| lowest.min(live)));
                step.tasks = tasks;
            }
        }
    }

    /// Counts the live tasks of each job once a second, for as long as it is polled.
    pub async fn sample_periodically(self: Arc<Self>, engine: Arc<Engine>) {
        loop {
            self.record_live_tasks(&engine);
            tokio::time::sleep(SAMPLE_INTERVAL).await;
        }
    }
}

impl Observer for ActivityHistory {
    fn on_event(&self, event: &JobEvent) {
        match event.what {
            EventKind::JobDeclared { .. } => {
                self.lock_jobs().entry(event.job).or_default();
            }
            EventKind::JobDeleted { .. } => {
                self.lock_jobs().remove(&event.job);
            }
            _ => {}
        }
    }

    fn on_barrier_ended(&self, ending: &Arc<BarrierRecordWithArrivals>) {
        let record = &ending.record;
        if record.kind != BarrierKind::Client || record.outcome != BarrierOutcome::Passed {
            return;
        }
        // The barriers of a deleted job may be measured after its deletion.
        if let Some(step) =
            self.lock_jobs().get_mut(&ending.job).and_then(|steps| steps.step_of(record.ended))
        {
            // A restored count may be any number.
            step.barriers = step.barriers.saturating_add(1);
            step.skew_us = Some(step.skew_us.unwrap_or_default().max(record.skew_us));
        }
    }
}

impl PersistentObserver for ActivityHistory {
    fn name(&self) -> &'static str {
        "activity"
    }

    fn copy_contents(&self) -> ContentsSerialiser {
        saved_contents::serialise_later(self.lock_jobs().clone())
    }

    fn restore(&self, bytes: &[u8]) -> Result<(), String> {
        let jobs = saved_contents::restore_jobs(bytes, |_, steps: &JobSteps| steps.is_valid())?;
        *self.lock_jobs() = jobs;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn seconds(seconds: u64) -> Timestamp {
        Timestamp(seconds * 1_000_000)
    }

    #[test]
    fn finished_steps_are_kept_for_ten_minutes_and_have_no_gap() {
        let mut steps = JobSteps::default();
        steps.step_of(seconds(1005)).unwrap().live = Some(4);
        assert_eq!(steps.finished_steps(seconds(1009)), [], "the step is in progress");
        steps.step_of(seconds(1031)).unwrap().live = Some(3);
        // A barrier may be measured after the next step has begun.
        steps.step_of(seconds(1009)).unwrap().barriers = 2;
        let shown: Vec<_> = steps
            .finished_steps(seconds(1044))
            .iter()
            .map(|step| (step.at.0 / 1_000_000, step.live, step.barriers))
            .collect();
        assert_eq!(shown, [(1000, Some(4), 2), (1010, None, 0), (1020, None, 0), (1030, Some(3), 0)]);
        assert!(steps.step_of(seconds(1025)).is_none(), "it is neither kept nor the newest");
        for second in 1044..3000 {
            steps.step_of(seconds(second)).unwrap().live = Some(1);
        }
        assert_eq!(steps.0.len(), ACTIVITY_STEPS + 1);
        let shown = steps.finished_steps(seconds(2999));
        assert_eq!((shown.len(), shown[0].at, shown[59].at), (60, seconds(2390), seconds(2980)));
        assert!(steps.finished_steps(seconds(9000)).iter().all(|step| step.live.is_none()));
    }

    #[test]
    fn restored_steps_are_whole_steps_in_order_and_no_more_than_are_kept() {
        let restore = |begins: Vec<u64>| {
            let step = |at| ActivityStep { at: seconds(at), live: Some(4), ..ActivityStep::default() };
            let steps = JobSteps(begins.into_iter().map(step).collect());
            let bytes = postcard::to_stdvec(&BTreeMap::from([(JobId(0), steps)])).unwrap();
            let history = ActivityHistory::default();
            history.restore(&bytes).map(|()| assert_eq!(history.save(), bytes))
        };
        assert_eq!(restore((1..62).map(|step| step * 10).collect()), Ok(()));
        assert!(restore((1..63).map(|step| step * 10).collect()).is_err(), "too many");
        assert!(restore(vec![10, 25]).is_err(), "not the begin of a step");
        assert!(restore(vec![20, 10]).is_err(), "not in order");
    }
}
