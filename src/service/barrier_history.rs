//! The latest ended barriers of each job with every arrival, for pictures and REST.
//!
//! The run of a job keeps the records of its latest barriers without the arrivals; there are as many arrivals as tasks.
//! The barriers of ended runs stay while there is room.
//! [`BarrierHistory`] is an [`Observer`]: the driver passes each ended barrier to it, in shared memory. Begin at
//! [`BarrierHistory::latest_first`].

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::records_by_run::{BoundedRecord, RecordBounds, RecordsByRun};
use super::saved_contents;
use crate::coordination::{BarrierRecord, BarrierRecordWithArrivals, EventKind, JobEvent, JobId, RunNumber};
use crate::engine::{ContentsSerialiser, Observer, PersistentObserver};

type EndedBarriers = RecordsByRun<Arc<BarrierRecordWithArrivals>>;

impl BoundedRecord for Arc<BarrierRecordWithArrivals> {
    const BOUNDS: RecordBounds = RecordBounds { records_of_run: 64, weight: 1 << 16 };

    /// A barrier weighs as much as its arrivals, of 16 bytes each, and its record, which takes as much as 16 of them.
    fn weight(&self) -> usize {
        16 + self.arrivals.len()
    }
}

/// Returns whether a restored record is one that the state machine can have made.
fn is_valid_record(job: JobId, run: RunNumber, ended: &BarrierRecordWithArrivals) -> bool {
    let record = &ended.record;
    let listed = record.without.len().max(record.latest.len());
    (ended.job, ended.run) == (job, run) && listed <= BarrierRecord::LISTED_MAX
}

/// The ended barriers of all jobs.
///
/// As saved contents, the barriers of a job take up to 0.7 MiB for their arrivals, and up to 200 bytes and the id for
/// each barrier.
#[derive(Debug, Default)]
pub struct BarrierHistory(Mutex<BTreeMap<JobId, EndedBarriers>>);

impl BarrierHistory {
    fn lock_barriers(&self) -> MutexGuard<'_, BTreeMap<JobId, EndedBarriers>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the latest ended barriers of a job, of all its runs, the newest first.
    #[must_use]
    pub fn latest_first(&self, job: JobId) -> Vec<Arc<BarrierRecordWithArrivals>> {
        let jobs = self.lock_barriers();
        jobs.get(&job).map_or_else(Vec::new, |ended| ended.latest_first().cloned().collect())
    }

    /// Returns the latest ended barriers of a run, the newest first.
    #[must_use]
    pub fn latest_of_run(&self, job: JobId, run: RunNumber) -> Vec<Arc<BarrierRecordWithArrivals>> {
        let jobs = self.lock_barriers();
        let of_run = jobs.get(&job).and_then(|ended| ended.of_run(run));
        of_run.map_or_else(Vec::new, |of_run| of_run.records.iter().rev().cloned().collect())
    }
}

impl Observer for BarrierHistory {
    fn on_event(&self, event: &JobEvent) {
        match event.what {
            EventKind::JobDeclared { .. } => {
                self.lock_barriers().entry(event.job).or_default();
            }
            EventKind::JobDeleted { .. } => {
                self.lock_barriers().remove(&event.job);
            }
            _ => {}
        }
    }

    fn on_barrier_ended(&self, ending: &Arc<BarrierRecordWithArrivals>) {
        // The barriers of a deleted job may be measured after its deletion.
        if let Some(ended) = self.lock_barriers().get_mut(&ending.job) {
            ended.add(ending.run, Arc::clone(ending));
        }
    }
}

impl PersistentObserver for BarrierHistory {
    fn name(&self) -> &'static str {
        "barriers"
    }

    fn copy_contents(&self) -> ContentsSerialiser {
        saved_contents::serialise_later(self.lock_barriers().clone())
    }

    fn restore(&self, bytes: &[u8]) -> Result<(), String> {
        let is_valid = |job, barriers: &EndedBarriers| {
            barriers.with_runs().all(|(run, ended)| is_valid_record(job, run, ended))
        };
        let jobs = saved_contents::restore_jobs(bytes, is_valid)?;
        *self.lock_barriers() = jobs;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::coordination::{
        Actor, ActorOrigin, BarrierArrival, BarrierKind, BarrierOutcome, TaskId, Timestamp,
    };

    const WEIGHT_MAX: usize = <Arc<BarrierRecordWithArrivals> as BoundedRecord>::BOUNDS.weight;

    fn ended_barrier(counter: i64, arrivals: usize) -> Arc<BarrierRecordWithArrivals> {
        let arrival = BarrierArrival { task: TaskId(0), at: Timestamp(1) };
        let record = BarrierRecord {
            id: "step".into(),
            counter,
            kind: BarrierKind::Client,
            began: Timestamp(1),
            ended: Timestamp(2),
            members: arrivals,
            arrived: arrivals,
            first: None,
            last: None,
            skew_us: 0,
            waited_us: 0,
            outcome: BarrierOutcome::Passed,
            without: Vec::new(),
            latest: Vec::new(),
        };
        let (job, run) = (JobId(3), RunNumber(1));
        Arc::new(BarrierRecordWithArrivals { job, run, record, arrivals: vec![arrival; arrivals] })
    }

    #[test]
    fn the_number_of_barriers_and_of_arrivals_is_bounded() {
        let history = BarrierHistory::default();
        let event = |what| JobEvent {
            at: Timestamp(1),
            job: JobId(3),
            run: RunNumber(1),
            what,
            reason: String::new(),
        };
        history.on_event(&event(EventKind::JobDeclared { actor: None }));
        let counters =
            || -> Vec<i64> { history.latest_first(JobId(3)).iter().map(|it| it.record.counter).collect() };
        for counter in 0..100 {
            history.on_barrier_ended(&ended_barrier(counter, 2));
        }
        assert_eq!(counters(), (36..100).rev().collect::<Vec<_>>());
        history.on_barrier_ended(&ended_barrier(100, WEIGHT_MAX / 2 - 16));
        history.on_barrier_ended(&ended_barrier(101, WEIGHT_MAX / 2 - 16));
        assert_eq!(counters(), [101, 100]);
        history.on_barrier_ended(&ended_barrier(102, 2 * WEIGHT_MAX));
        assert_eq!(counters(), [102], "one is kept, however large");
        let actor = Actor { who: "ops".into(), address: None, means: ActorOrigin::Cli };
        history.on_event(&event(EventKind::JobDeleted { actor }));
        history.on_barrier_ended(&ended_barrier(103, 2));
        assert_eq!(counters(), [0; 0], "its last barriers are measured after the deletion of a job");
    }

    #[test]
    fn restored_barriers_are_those_of_their_job_and_run() {
        let restore = |job, run, ended| {
            let mut barriers = EndedBarriers::default();
            barriers.add(RunNumber(run), ended);
            let bytes = postcard::to_stdvec(&BTreeMap::from([(JobId(job), barriers)])).unwrap();
            BarrierHistory::default().restore(&bytes)
        };
        assert_eq!(restore(3, 1, ended_barrier(0, 2)), Ok(()));
        assert!(restore(4, 1, ended_barrier(0, 2)).is_err(), "another job");
        assert!(restore(3, 2, ended_barrier(0, 2)).is_err(), "another run");
        let mut ended = ended_barrier(0, 2);
        Arc::make_mut(&mut ended).record.without = vec![TaskId(0); BarrierRecord::LISTED_MAX + 1];
        assert!(restore(3, 1, ended).is_err(), "too many absent members");
    }
}
