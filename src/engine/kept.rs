//! The retained events: one ring of notable events for each job, one ring of routine events for all jobs.
//!
//! It publishes nothing. A barrier that began or passed is routine: there may be thousands a second, and they push
//! out only one another. Notable events of one job never push out those of another. Begin at [`Kept::push`].

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ops::Bound;
use std::sync::Arc;

use super::Numbered;
use crate::coordination::{Change, Event, JobId};
use crate::cow::CowMap;

/// How many events are kept that are not routine. They are shared out among the jobs that have any.
const TELLING: usize = 1 << 14;
/// However many jobs there are, each may have so many.
const TELLING_MIN: usize = 1 << 8;
/// How many routine events are kept, of all jobs.
const ROUTINE: usize = 1 << 13;

/// What is kept of one job.
#[derive(Debug, Default, Clone)]
pub(super) struct OfJob {
    /// Those that are not routine, by their numbers.
    telling: Ring,
    /// The number of the last event of this job that is kept no more.
    lost: u64,
}

impl OfJob {
    /// Keeps the latest `most`; returns the number of the last event that is kept no more.
    fn trim(&mut self, most: usize) -> u64 {
        while self.telling.len() > most
            && let Some((gone, _)) = self.telling.pop_first()
        {
            self.lost = self.lost.max(gone);
        }
        self.lost
    }
}

/// Events by their numbers.
type Ring = CowMap<u64, Arc<Event>>;

/// The events that are kept. A copy of them costs a pointer for many of them.
#[derive(Debug, Default, Clone)]
pub(super) struct Kept {
    jobs: HashMap<JobId, OfJob>,
    routine: Ring,
    /// The number of the last event of any job that is kept no more.
    lost: u64,
}

/// Some of the events that are kept.
#[derive(Debug, Clone, Default)]
pub struct Past {
    /// The events, the latest last.
    pub events: Vec<Numbered>,
    /// How far back they are whole: events with this number or a lower one may be missing.
    pub whole_after: u64,
}

impl Past {
    /// Whether events are missing that came after the one with this number.
    #[must_use]
    pub fn lacks(&self, after: u64) -> bool {
        after < self.whole_after
    }
}

/// Whether an event is one of those that come and go with every barrier.
fn is_routine(what: &Change) -> bool {
    match what {
        Change::BarrierStarted { .. } => true,
        Change::BarrierPassed { without, .. } => without.is_empty(),
        _ => false,
    }
}

impl Kept {
    /// How many there are.
    pub fn len(&self) -> usize {
        self.routine.len() + self.jobs.values().map(|of| of.telling.len()).sum::<usize>()
    }

    /// How many there may be.
    pub fn most(&self) -> usize {
        ROUTINE + self.jobs.len().max(1) * self.share()
    }

    /// How many a job may have that are not routine.
    fn share(&self) -> usize {
        (TELLING / self.jobs.len().max(1)).max(TELLING_MIN)
    }

    /// Keeps one more; those that make room for it are lost. Returns those of a job that is gone, which are to be freed.
    pub fn push(&mut self, numbered: Numbered) -> Option<OfJob> {
        let job = numbered.event.job;
        if matches!(numbered.event.what, Change::JobDeleted { .. }) {
            // Nobody can ask for the events of a job that is gone; whoever follows all jobs hears that it is.
            self.routine.retain(|_, of| of.job != job);
            let gone = self.jobs.remove(&job);
            self.push_routine(numbered);
            return gone;
        }
        if let Entry::Vacant(vacant) = self.jobs.entry(job) {
            // What is shared out is shared with one more from now on.
            vacant.insert(OfJob::default());
            let share = self.share();
            self.lost = self.jobs.values_mut().map(|of| of.trim(share)).fold(self.lost, u64::max);
        }
        if is_routine(&numbered.event.what) {
            self.push_routine(numbered);
            return None;
        }
        let share = self.share();
        if let Some(of_job) = self.jobs.get_mut(&job) {
            of_job.telling.insert(numbered.number, numbered.event);
            self.lost = self.lost.max(of_job.trim(share));
        }
        None
    }

    fn push_routine(&mut self, numbered: Numbered) {
        if self.routine.len() == ROUTINE
            && let Some((gone, event)) = self.routine.pop_first()
        {
            self.lose(gone, event.job);
        }
        self.routine.insert(numbered.number, numbered.event);
    }

    fn lose(&mut self, gone: u64, job: JobId) {
        self.lost = self.lost.max(gone);
        if let Some(of_job) = self.jobs.get_mut(&job) {
            of_job.lost = of_job.lost.max(gone);
        }
    }

    /// Those of all jobs after number `after`.
    pub fn after(&self, after: u64) -> Past {
        let telling = self.jobs.values().flat_map(|of| from(&of.telling, after));
        Past { events: in_order(telling.chain(from(&self.routine, after))), whole_after: self.lost }
    }

    /// Those of one job after number `after`.
    pub fn of(&self, job: JobId, after: u64) -> Past {
        let Some(of_job) = self.jobs.get(&job) else { return Past::default() };
        let routine = from(&self.routine, after).filter(|numbered| numbered.event.job == job);
        Past { events: in_order(from(&of_job.telling, after).chain(routine)), whole_after: of_job.lost }
    }
}

/// Those of a ring after number `after`.
fn from(ring: &Ring, after: u64) -> impl Iterator<Item = Numbered> + '_ {
    let later = ring.range_from(Bound::Excluded(&after));
    later.map(|(number, event)| Numbered { number: *number, event: Arc::clone(event) })
}

fn in_order(events: impl Iterator<Item = Numbered>) -> Vec<Numbered> {
    let mut events: Vec<Numbered> = events.collect();
    events.sort_by_key(|numbered| numbered.number);
    events
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::coordination::{Actor, Event, Means, RunNumber, TaskId, Timestamp};

    #[derive(Default)]
    struct World {
        kept: Kept,
        number: u64,
    }

    impl World {
        fn push(&mut self, job: u32, what: Change) -> u64 {
            self.number += 1;
            let event = Event {
                at: Timestamp(self.number),
                job: JobId(job),
                run: RunNumber(1),
                what,
                reason: String::new(),
            };
            self.kept.push(Numbered { number: self.number, event: Arc::new(event) });
            self.number
        }

        fn barrier(&mut self, job: u32) -> u64 {
            self.push(job, Change::BarrierStarted { barrier: "step".into(), counter: 1 })
        }

        fn failure(&mut self, job: u32) -> u64 {
            self.push(job, Change::FirstCause { task: Some(TaskId(0)) })
        }
    }

    fn numbers(past: &Past) -> Vec<u64> {
        past.events.iter().map(|numbered| numbered.number).collect()
    }

    #[test]
    fn routine_pushes_out_routine_only_and_no_job_what_another_has_told() {
        let mut world = World::default();
        let told = world.failure(1);
        let began = world.barrier(1);
        for _ in 0..3 * ROUTINE {
            world.barrier(2);
        }
        let quiet = world.kept.of(JobId(1), 0);
        assert_eq!((numbers(&quiet), quiet.whole_after), (vec![told], began));
        assert!(quiet.lacks(0) && !quiet.lacks(began));
        for _ in 0..3 * TELLING {
            world.failure(2);
        }
        assert_eq!(numbers(&world.kept.of(JobId(1), 0)), [told]);
        assert!(world.kept.len() <= world.kept.most());
        let storm = world.kept.of(JobId(2), 0);
        assert!(storm.lacks(0) && storm.events.len() >= TELLING / 2);
    }

    #[test]
    fn events_come_in_their_order_and_after_the_one_that_is_known() {
        let mut world = World::default();
        for _ in 0..3 {
            world.barrier(1);
            world.failure(1);
            world.failure(2);
        }
        assert_eq!(numbers(&world.kept.of(JobId(1), 0)), [1, 2, 4, 5, 7, 8]);
        assert_eq!(numbers(&world.kept.of(JobId(1), 4)), [5, 7, 8]);
        let all = world.kept.after(6);
        assert_eq!((numbers(&all), all.lacks(0)), (vec![7, 8, 9], false));
        assert!(world.kept.of(JobId(9), 0).events.is_empty());
    }

    #[test]
    fn however_many_jobs_come_there_are_never_more_than_there_may_be() {
        let mut world = World::default();
        for job in 0..200 {
            for _ in 0..TELLING / 8 {
                world.failure(job);
                assert!(world.kept.len() <= world.kept.most());
            }
        }
        assert!(world.kept.of(JobId(0), 0).lacks(0) && world.kept.after(0).lacks(0));
        assert_eq!(world.kept.of(JobId(0), 0).events.len(), TELLING_MIN);
    }

    #[test]
    fn a_deleted_job_leaves_nothing() {
        let mut world = World::default();
        world.barrier(1);
        world.failure(1);
        world.failure(2);
        let actor = Actor { who: Actor::ANONYMOUS.into(), address: None, means: Means::Api };
        let deleted = world.push(1, Change::JobDeleted { actor });
        assert!(world.kept.of(JobId(1), 0).events.is_empty());
        assert_eq!(numbers(&world.kept.after(0)), [3, deleted], "whoever follows all hears of it");
    }
}
