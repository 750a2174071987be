//! The retained events: one ring of notable events for each job, one ring of routine events for all jobs.
//!
//! It publishes nothing. A barrier that began or passed is routine: there may be thousands a second, and they push out only one
//! another, over all jobs. Notable events of one job never push out those of another.
//!
//! Invariant: every event takes a bounded number of steps, whatever it is. The events of a job that is deleted leave with it in
//! one piece; their numbers stay in the order of routine events until it is their turn to be pushed out. Begin at [`Kept::push`].

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
    /// Those that are routine.
    routine: Ring,
    /// The number of the last event of this job that is kept no more.
    lost: u64,
}

impl OfJob {
    /// Keeps the latest `most` that are not routine and returns the others.
    fn trim(&mut self, most: usize) -> Ring {
        let excess = self.telling.len().saturating_sub(most);
        let bounds = |ring: &Ring| Some((*ring.keys().next()?, *ring.keys().nth(excess.checked_sub(1)?)?));
        let Some((first, last)) = bounds(&self.telling) else { return Ring::default() };
        self.lost = self.lost.max(last);
        self.telling.remove_range(&first, &(last + 1))
    }
}

/// Events by their numbers.
pub(super) type Ring = CowMap<u64, Arc<Event>>;

/// The events that are kept. A copy of them costs a pointer for many of them.
#[derive(Debug, Default, Clone)]
pub(super) struct Kept {
    jobs: HashMap<JobId, OfJob>,
    /// The last events of jobs that are gone: that they were deleted. They count as routine.
    deletions: Ring,
    /// The numbers of routine events, the oldest first, at most `ROUTINE`. Some belong to jobs that are gone.
    routine: CowMap<u64, JobId>,
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
        let of_jobs = self.jobs.values().map(|of| of.telling.len() + of.routine.len());
        self.deletions.len() + of_jobs.sum::<usize>()
    }

    /// How many there may be.
    pub fn most(&self) -> usize {
        ROUTINE + self.jobs.len().max(1) * self.share()
    }

    /// How many a job may have that are not routine.
    fn share(&self) -> usize {
        (TELLING / self.jobs.len().max(1)).max(TELLING_MIN)
    }

    /// Keeps one more. Those that make room for it are lost; many at once, and those of a job that is gone, are added to
    /// `gone`, to be freed without the lock.
    pub fn push(&mut self, numbered: Numbered, gone: &mut Vec<Ring>) {
        let job = numbered.event.job;
        if matches!(numbered.event.what, Change::JobDeleted { .. }) {
            // Nobody can ask for the events of a job that is gone; whoever follows all jobs hears that it is.
            self.make_room_for_routine();
            self.routine.insert(numbered.number, job);
            self.deletions.insert(numbered.number, numbered.event);
            gone.extend(self.jobs.remove(&job).into_iter().flat_map(|of| [of.telling, of.routine]));
            return;
        }
        if let Entry::Vacant(vacant) = self.jobs.entry(job) {
            // What is shared out is shared with one more from now on.
            vacant.insert(OfJob::default());
            let share = self.share();
            for of_job in self.jobs.values_mut().filter(|of_job| of_job.telling.len() > share) {
                gone.push(of_job.trim(share));
                self.lost = self.lost.max(of_job.lost);
            }
        }
        let routine = is_routine(&numbered.event.what);
        if routine {
            self.make_room_for_routine();
            self.routine.insert(numbered.number, job);
        }
        let share = self.share();
        if let Some(of_job) = self.jobs.get_mut(&job) {
            if routine {
                of_job.routine.insert(numbered.number, numbered.event);
            } else {
                of_job.telling.insert(numbered.number, numbered.event);
                while of_job.telling.len() > share
                    && let Some((number, _)) = of_job.telling.pop_first()
                {
                    of_job.lost = of_job.lost.max(number);
                    self.lost = self.lost.max(number);
                }
            }
        }
    }

    /// Pushes out the oldest routine event if there are as many as there may be.
    fn make_room_for_routine(&mut self) {
        if self.routine.len() < ROUTINE {
            return;
        }
        let Some((number, job)) = self.routine.pop_first() else { return };
        if let Some(of_job) = self.jobs.get_mut(&job) {
            of_job.routine.remove(&number);
            of_job.lost = of_job.lost.max(number);
            self.lost = self.lost.max(number);
        } else if self.deletions.remove(&number).is_some() {
            self.lost = self.lost.max(number);
        }
    }

    /// Those of all jobs after number `after`.
    pub fn after(&self, after: u64) -> Past {
        let of_jobs =
            self.jobs.values().flat_map(|of| from(&of.telling, after).chain(from(&of.routine, after)));
        Past { events: in_order(of_jobs.chain(from(&self.deletions, after))), whole_after: self.lost }
    }

    /// Those of one job after number `after`.
    pub fn of(&self, job: JobId, after: u64) -> Past {
        let Some(of_job) = self.jobs.get(&job) else { return Past::default() };
        let events = from(&of_job.telling, after).chain(from(&of_job.routine, after));
        Past { events: in_order(events), whole_after: of_job.lost }
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
            self.kept.push(Numbered { number: self.number, event: Arc::new(event) }, &mut Vec::new());
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
        world.barrier(2);
        let actor = Actor { who: Actor::ANONYMOUS.into(), address: None, means: Means::Api };
        let deleted = world.push(1, Change::JobDeleted { actor });
        assert!(world.kept.of(JobId(1), 0).events.is_empty());
        assert_eq!(numbers(&world.kept.after(0)), [3, deleted], "whoever follows all hears of it");
        // Its numbers leave the order of routine events, and lose nobody anything; then that it was deleted leaves.
        (0..ROUTINE - 3).for_each(|_| drop(world.barrier(2)));
        assert_eq!(world.kept.len(), ROUTINE - 1);
        world.barrier(2);
        assert_eq!((world.kept.len(), world.kept.after(0).whole_after), (ROUTINE, 0));
        world.barrier(2);
        assert_eq!((world.kept.of(JobId(2), 0).whole_after, world.kept.len()), (3, ROUTINE));
        world.barrier(2);
        let all = world.kept.after(0);
        assert_eq!((all.whole_after, all.events.len()), (deleted, ROUTINE));
    }

    #[test]
    fn a_job_that_comes_takes_its_share_from_one_that_had_all() {
        let mut world = World::default();
        (0..TELLING).for_each(|_| drop(world.failure(1)));
        assert_eq!(world.kept.of(JobId(1), 0).events.len(), TELLING);
        world.failure(2);
        let first = world.kept.of(JobId(1), 0);
        let half = TELLING as u64 / 2;
        assert_eq!(numbers(&first), (half + 1..=2 * half).collect::<Vec<_>>());
        assert_eq!((first.whole_after, world.kept.after(0).whole_after), (half, half));
    }
}
