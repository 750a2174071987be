//! The histories that observers of the driver keep, and their restoration from saved bytes.

use muster::coordination::{Effect, JobId, RunNumber, TaskIncarnations, Timestamp};
use muster::engine::PersistentObserver;
use muster::service::reports::TransferReportStore;
use muster::service::{ActivityHistory, BarrierHistory, StateHistory, Timelines};

/// Every history, of all jobs.
#[derive(Default)]
pub struct Histories {
    pub states: StateHistory,
    timelines: Timelines,
    barriers: BarrierHistory,
    activity: ActivityHistory,
}

impl Histories {
    fn all(&self) -> [&dyn PersistentObserver; 4] {
        [&self.states, &self.timelines, &self.barriers, &self.activity]
    }

    pub fn on_effect(&self, effect: &Effect) {
        match effect {
            Effect::Event(event) => self.all().iter().for_each(|history| history.on_event(event)),
            Effect::BarrierEnded(ending) => {
                self.all().iter().for_each(|history| history.on_barrier_ended(ending));
            }
            _ => {}
        }
    }

    pub fn save(&self) -> [Vec<u8>; 4] {
        self.all().map(PersistentObserver::save)
    }

    pub fn restored(saved: &[Vec<u8>; 4]) -> Self {
        let histories = Self::default();
        for (history, bytes) in histories.all().into_iter().zip(saved) {
            history.restore(bytes).unwrap_or_else(|why| panic!("{}: {why}", history.name()));
        }
        histories
    }

    /// Checks that others give the same answers about a job as these.
    pub fn check_same_answers(&self, others: &Self, job: JobId, newest: RunNumber, now: Timestamp) {
        assert_eq!(self.save(), others.save());
        assert_eq!(self.timelines.timeline_of(job), others.timelines.timeline_of(job));
        assert_eq!(self.barriers.latest_first(job), others.barriers.latest_first(job));
        let (reports, roster) =
            (TransferReportStore::default(), TaskIncarnations { run: newest, incarnations: Vec::new() });
        assert_eq!(
            self.activity.recent_activity(job, now, &reports, &roster),
            others.activity.recent_activity(job, now, &reports, &roster)
        );
        for run in (1..=newest.0).map(RunNumber) {
            assert_eq!(
                self.timelines.timeline_of(job).of_run(run),
                others.timelines.timeline_of(job).of_run(run)
            );
            assert_eq!(self.barriers.latest_of_run(job, run), others.barriers.latest_of_run(job, run));
            assert_eq!(self.states.of_run(job, run), others.states.of_run(job, run));
        }
    }
}
