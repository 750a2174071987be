//! The retained events: a table of notable events for each job, and one table of routine events for all jobs. Begin
//! at [`EventHistory::push`].
//!
//! An event is routine if it reports that a barrier began, that it passed with all members, or that a job was
//! deleted. Other events are notable. All jobs together may cause thousands of routine events a second, so a routine
//! event removes only older routine events. All jobs have equal shares of the space for notable events. A notable
//! event removes only older ones of its own job. A new job makes the share of each job smaller, but no share is
//! smaller than 256 events.
//!
//! Invariant: Recording an event takes a bounded number of steps. To keep this bound, the deletion of a job removes
//! its events, but leaves their numbers in the queue of routine events. Such a number is removed when it is the
//! oldest.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ops::Bound;
use std::sync::Arc;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::coordination::{EventKind, JobEvent, JobId};
use crate::cow::CowMap;

/// The greatest number of notable events. It is divided evenly among the jobs that have any.
const NOTABLE_EVENTS: usize = 1 << 14;
/// The least share of a job, however many jobs there are.
const NOTABLE_EVENTS_PER_JOB_MIN: usize = 1 << 8;
/// The greatest number of routine events, over all jobs.
const ROUTINE_EVENTS: usize = 1 << 13;

/// An event with its number in the order of all events of this server, from 1.
#[derive(Debug, Clone)]
pub struct NumberedEvent {
    /// The number.
    pub number: u64,
    /// The event.
    pub event: Arc<JobEvent>,
}

/// The retained events of one job.
#[derive(Debug, Default, Clone, Serialize, Deserialize)]
pub(super) struct RetainedJobEvents {
    /// The notable events, by number.
    #[serde(serialize_with = "serialize_events", deserialize_with = "deserialize_events")]
    notable: EventsByNumber,
    /// The routine events, by number.
    #[serde(serialize_with = "serialize_events", deserialize_with = "deserialize_events")]
    routine: EventsByNumber,
    /// The greatest number of an evicted event of this job.
    evicted_up_to: u64,
}

impl RetainedJobEvents {
    /// Keeps the latest `most` notable events and returns the others. `of_all`: as for [`Self::mark_evicted`].
    fn evict_notable_events_beyond(&mut self, most: usize, of_all: &mut u64) -> EventsByNumber {
        let excess = self.notable.len().saturating_sub(most);
        let bounds =
            |ring: &EventsByNumber| Some((*ring.keys().next()?, *ring.keys().nth(excess.checked_sub(1)?)?));
        let Some((first, last)) = bounds(&self.notable) else { return EventsByNumber::default() };
        self.mark_evicted(last, of_all);
        self.notable.remove_range(&first, &(last + 1))
    }

    /// Records that the event `number` of this job is evicted; `of_all` is the greatest such number of all jobs.
    fn mark_evicted(&mut self, number: u64, of_all: &mut u64) {
        self.evicted_up_to = self.evicted_up_to.max(number);
        *of_all = number.max(*of_all);
    }
}

/// Events, by number.
pub(super) type EventsByNumber = CowMap<u64, Arc<JobEvent>>;

/// The retained events. A copy costs one pointer for many of them.
#[derive(Debug, Default, Clone, Serialize, Deserialize)]
pub(super) struct EventHistory {
    jobs: BTreeMap<JobId, RetainedJobEvents>,
    /// The deletion events of deleted jobs. They count as routine.
    #[serde(serialize_with = "serialize_events", deserialize_with = "deserialize_events")]
    deletions: EventsByNumber,
    /// The numbers of routine events, the oldest first, at most `ROUTINE_EVENTS`. Some belong to deleted
    /// jobs.
    routine: CowMap<u64, JobId>,
    /// The greatest number of an evicted event of any job.
    evicted_up_to: u64,
}

/// Serialises events as JSON: they name their kind in a field, which only self-describing formats can restore.
fn serialize_events<S: Serializer>(events: &EventsByNumber, serializer: S) -> Result<S::Ok, S::Error> {
    let as_json = events.iter().map(|(number, event)| Ok((number, serde_json::to_string(event)?)));
    let as_json: Result<Vec<(&u64, String)>, serde_json::Error> = as_json.collect();
    as_json.map_err(serde::ser::Error::custom)?.serialize(serializer)
}

fn deserialize_events<'de, D: Deserializer<'de>>(deserializer: D) -> Result<EventsByNumber, D::Error> {
    let mut events = EventsByNumber::default();
    for (number, text) in Vec::<(u64, String)>::deserialize(deserializer)? {
        events.insert(number, Arc::new(serde_json::from_str(&text).map_err(serde::de::Error::custom)?));
    }
    Ok(events)
}

/// Some of the retained events.
#[derive(Debug, Clone, Default)]
pub struct EventHistoryExcerpt {
    /// The events, the latest last.
    pub events: Vec<NumberedEvent>,
    /// The number after which no event is missing; events up to this number may be.
    pub complete_after: u64,
}

impl EventHistoryExcerpt {
    /// Returns whether an event after number `after` may be missing.
    #[must_use]
    pub fn may_miss_events_after(&self, after: u64) -> bool {
        after < self.complete_after
    }
}

/// Returns whether an event is routine: it occurs with every barrier.
fn is_routine_event(what: &EventKind) -> bool {
    match what {
        EventKind::BarrierStarted { .. } => true,
        EventKind::BarrierPassed { without, .. } => without.is_empty(),
        _ => false,
    }
}

impl EventHistory {
    /// Returns the number of retained events.
    pub fn len(&self) -> usize {
        let of_jobs = self.jobs.values().map(|of| of.notable.len() + of.routine.len());
        self.deletions.len() + of_jobs.sum::<usize>()
    }

    /// Returns the greatest number of retained events.
    pub fn capacity(&self) -> usize {
        ROUTINE_EVENTS + self.jobs.len().max(1) * self.notable_limit_per_job()
    }

    /// Returns the greatest number of notable events of one job.
    fn notable_limit_per_job(&self) -> usize {
        (NOTABLE_EVENTS / self.jobs.len().max(1)).max(NOTABLE_EVENTS_PER_JOB_MIN)
    }

    /// Adds an event and evicts older ones to make room. Events of a deleted job, and many events that are
    /// evicted at once, are added to `gone`, to be freed without the lock.
    pub fn push(&mut self, numbered: NumberedEvent, gone: &mut Vec<EventsByNumber>) {
        let job = numbered.event.job;
        if matches!(numbered.event.what, EventKind::JobDeleted { .. }) {
            // The events of a deleted job cannot be read; a follower of all jobs sees the deletion.
            self.make_room_for_routine_event();
            self.routine.insert(numbered.number, job);
            self.deletions.insert(numbered.number, numbered.event);
            gone.extend(self.jobs.remove(&job).into_iter().flat_map(|of| [of.notable, of.routine]));
            return;
        }
        if let Entry::Vacant(vacant) = self.jobs.entry(job) {
            // The new job makes the share of every job smaller.
            vacant.insert(RetainedJobEvents::default());
            let share = self.notable_limit_per_job();
            for of_job in self.jobs.values_mut().filter(|of_job| of_job.notable.len() > share) {
                gone.push(of_job.evict_notable_events_beyond(share, &mut self.evicted_up_to));
            }
        }
        let routine = is_routine_event(&numbered.event.what);
        if routine {
            self.make_room_for_routine_event();
            self.routine.insert(numbered.number, job);
        }
        let share = self.notable_limit_per_job();
        if let Some(of_job) = self.jobs.get_mut(&job) {
            if routine {
                of_job.routine.insert(numbered.number, numbered.event);
            } else {
                of_job.notable.insert(numbered.number, numbered.event);
                while of_job.notable.len() > share
                    && let Some((number, _)) = of_job.notable.pop_first()
                {
                    of_job.mark_evicted(number, &mut self.evicted_up_to);
                }
            }
        }
    }

    /// Evicts the oldest routine event if the bound is reached.
    fn make_room_for_routine_event(&mut self) {
        if self.routine.len() < ROUTINE_EVENTS {
            return;
        }
        let Some((number, job)) = self.routine.pop_first() else { return };
        if let Some(of_job) = self.jobs.get_mut(&job) {
            of_job.routine.remove(&number);
            of_job.mark_evicted(number, &mut self.evicted_up_to);
        } else if self.deletions.remove(&number).is_some() {
            self.evicted_up_to = self.evicted_up_to.max(number);
        }
    }

    /// Returns the events of all jobs after number `after`.
    pub fn events_of_all_jobs_after(&self, after: u64) -> EventHistoryExcerpt {
        let of_jobs = self
            .jobs
            .values()
            .flat_map(|of| events_after(&of.notable, after).chain(events_after(&of.routine, after)));
        EventHistoryExcerpt {
            events: sort_by_number(of_jobs.chain(events_after(&self.deletions, after))),
            complete_after: self.evicted_up_to,
        }
    }

    /// Returns the events of one job after number `after`.
    pub fn events_of_job_after(&self, job: JobId, after: u64) -> EventHistoryExcerpt {
        let Some(of_job) = self.jobs.get(&job) else { return EventHistoryExcerpt::default() };
        let events = events_after(&of_job.notable, after).chain(events_after(&of_job.routine, after));
        EventHistoryExcerpt { events: sort_by_number(events), complete_after: of_job.evicted_up_to }
    }
}

/// Returns the events of a ring after number `after`.
fn events_after(ring: &EventsByNumber, after: u64) -> impl Iterator<Item = NumberedEvent> + '_ {
    let later = ring.range_from(Bound::Excluded(&after));
    later.map(|(number, event)| NumberedEvent { number: *number, event: Arc::clone(event) })
}

fn sort_by_number(events: impl Iterator<Item = NumberedEvent>) -> Vec<NumberedEvent> {
    let mut events: Vec<NumberedEvent> = events.collect();
    events.sort_by_key(|numbered| numbered.number);
    events
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::coordination::{Actor, ActorOrigin, JobEvent, RunNumber, TaskId, Timestamp};

    #[derive(Default)]
    struct HistoryUnderTest {
        history: EventHistory,
        number: u64,
    }

    impl HistoryUnderTest {
        fn push(&mut self, job: u32, what: EventKind) -> u64 {
            self.number += 1;
            let event = JobEvent {
                at: Timestamp(self.number),
                job: JobId(job),
                run: RunNumber(1),
                what,
                reason: String::new(),
            };
            self.history.push(NumberedEvent { number: self.number, event: Arc::new(event) }, &mut Vec::new());
            self.number
        }

        fn push_barrier_event(&mut self, job: u32) -> u64 {
            self.push(job, EventKind::BarrierStarted { barrier: "step".into(), counter: 1 })
        }

        fn push_failure_event(&mut self, job: u32) -> u64 {
            self.push(job, EventKind::FirstCause { task: Some(TaskId(0)) })
        }
    }

    fn numbers_of_events(past: &EventHistoryExcerpt) -> Vec<u64> {
        past.events.iter().map(|numbered| numbered.number).collect()
    }

    #[test]
    fn routine_events_evict_only_routine_events_and_no_job_evicts_anothers() {
        let mut world = HistoryUnderTest::default();
        let told = world.push_failure_event(1);
        let began = world.push_barrier_event(1);
        for _ in 0..3 * ROUTINE_EVENTS {
            world.push_barrier_event(2);
        }
        let quiet = world.history.events_of_job_after(JobId(1), 0);
        assert_eq!((numbers_of_events(&quiet), quiet.complete_after), (vec![told], began));
        assert!(quiet.may_miss_events_after(0) && !quiet.may_miss_events_after(began));
        for _ in 0..3 * NOTABLE_EVENTS {
            world.push_failure_event(2);
        }
        assert_eq!(numbers_of_events(&world.history.events_of_job_after(JobId(1), 0)), [told]);
        assert!(world.history.len() <= world.history.capacity());
        let storm = world.history.events_of_job_after(JobId(2), 0);
        assert!(storm.may_miss_events_after(0) && storm.events.len() >= NOTABLE_EVENTS / 2);
    }

    #[test]
    fn events_come_in_their_order_and_after_the_one_that_is_known() {
        let mut world = HistoryUnderTest::default();
        for _ in 0..3 {
            world.push_barrier_event(1);
            world.push_failure_event(1);
            world.push_failure_event(2);
        }
        assert_eq!(numbers_of_events(&world.history.events_of_job_after(JobId(1), 0)), [1, 2, 4, 5, 7, 8]);
        assert_eq!(numbers_of_events(&world.history.events_of_job_after(JobId(1), 4)), [5, 7, 8]);
        let all = world.history.events_of_all_jobs_after(6);
        assert_eq!((numbers_of_events(&all), all.may_miss_events_after(0)), (vec![7, 8, 9], false));
        assert!(world.history.events_of_job_after(JobId(9), 0).events.is_empty());
    }

    #[test]
    fn the_history_stays_within_its_capacity_for_any_number_of_jobs() {
        let mut world = HistoryUnderTest::default();
        for job in 0..200 {
            for _ in 0..NOTABLE_EVENTS / 8 {
                world.push_failure_event(job);
                assert!(world.history.len() <= world.history.capacity());
            }
        }
        assert!(
            world.history.events_of_job_after(JobId(0), 0).may_miss_events_after(0)
                && world.history.events_of_all_jobs_after(0).may_miss_events_after(0)
        );
        assert_eq!(world.history.events_of_job_after(JobId(0), 0).events.len(), NOTABLE_EVENTS_PER_JOB_MIN);
    }

    #[test]
    fn a_deleted_job_leaves_nothing() {
        let mut world = HistoryUnderTest::default();
        world.push_barrier_event(1);
        world.push_failure_event(1);
        world.push_barrier_event(2);
        let actor = Actor { who: Actor::ANONYMOUS.into(), address: None, means: ActorOrigin::Api };
        let deleted = world.push(1, EventKind::JobDeleted { actor });
        assert!(world.history.events_of_job_after(JobId(1), 0).events.is_empty());
        assert_eq!(
            numbers_of_events(&world.history.events_of_all_jobs_after(0)),
            [3, deleted],
            "whoever follows all hears of it"
        );
        // The numbers of the deleted job are evicted without a loss for any reader, and then the deletion
        // event.
        (0..ROUTINE_EVENTS - 3).for_each(|_| {
            world.push_barrier_event(2);
        });
        assert_eq!(world.history.len(), ROUTINE_EVENTS - 1);
        world.push_barrier_event(2);
        assert_eq!(
            (world.history.len(), world.history.events_of_all_jobs_after(0).complete_after),
            (ROUTINE_EVENTS, 0)
        );
        world.push_barrier_event(2);
        assert_eq!(
            (world.history.events_of_job_after(JobId(2), 0).complete_after, world.history.len()),
            (3, ROUTINE_EVENTS)
        );
        world.push_barrier_event(2);
        let all = world.history.events_of_all_jobs_after(0);
        assert_eq!((all.complete_after, all.events.len()), (deleted, ROUTINE_EVENTS));
    }

    #[test]
    fn a_job_that_comes_takes_its_share_from_one_that_had_all() {
        let mut world = HistoryUnderTest::default();
        (0..NOTABLE_EVENTS).for_each(|_| {
            world.push_failure_event(1);
        });
        assert_eq!(world.history.events_of_job_after(JobId(1), 0).events.len(), NOTABLE_EVENTS);
        world.push_failure_event(2);
        let first = world.history.events_of_job_after(JobId(1), 0);
        let half = NOTABLE_EVENTS as u64 / 2;
        assert_eq!(numbers_of_events(&first), (half + 1..=2 * half).collect::<Vec<_>>());
        assert_eq!(
            (first.complete_after, world.history.events_of_all_jobs_after(0).complete_after),
            (half, half)
        );
    }
}
