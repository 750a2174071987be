//! The invariants of the state, checked from scratch, for tests and simulations. A check reads the whole state; no
//! server calls it.
//!
//! It repairs nothing. Begin at [`Coordinator::audit`].

use std::collections::BTreeSet;

use super::barrier::{BarrierKey, Slot};
use super::coordinator::Coordinator;
use super::ids::{CallId, TaskId};
use super::job::Job;
use super::run::Run;
use super::settings::JobSettings;
use super::store::Store;
use super::timers::Timer;
use super::waiters::Place;

/// What is wrong with the state, in a sentence.
type Finding = Result<(), String>;

macro_rules! ensure {
    ($holds:expr, $($text:tt)+) => {
        if !$holds {
            return Err(format!($($text)+));
        }
    };
}

impl Coordinator {
    /// Checks every invariant of the state.
    ///
    /// # Errors
    /// With the first invariant that does not hold, in a sentence.
    pub fn audit(&self) -> Result<(), String> {
        self.audit_wakes()?;
        for job in self.every_job() {
            let name = &job.name;
            job.audit().map_err(|found| format!("job {name}, run {}: {found}", job.run.number))?;
        }
        Ok(())
    }
}

impl Job {
    fn audit(&self) -> Finding {
        let run = &self.run;
        for (call, _) in run.waiters.all() {
            let connection = run.waiters.connection(call);
            let known = connection.is_some_and(|c| self.knows(c) || self.is_closing(c));
            ensure!(known, "{call:?} waits on a connection that is gone");
        }
        self.audit_spoken_on()?;
        self.exclusions.audit(&self.settings.bounds)?;
        self.audit_excluded()?;
        run.audit(&self.settings)
    }

    /// Every task that has spoken on a connection is found by both.
    fn audit_spoken_on(&self) -> Finding {
        // A few say as much as all.
        for (connection, task) in self.spoken().take(64) {
            ensure!(
                self.has_spoken_on(task, connection),
                "task {task} is not known to speak on {connection:?}"
            );
        }
        let (all, most) = self.count_spoken();
        ensure!(all == most, "{all} connections of tasks are kept, {most} are there");
        Ok(())
    }

    /// Who is excluded takes no part, and stops nobody.
    fn audit_excluded(&self) -> Finding {
        let decided = self.run.waiters.decided();
        for exclusion in self.exclusions.in_force() {
            for id in self.taken_out_by(exclusion.target) {
                let task = self.run.own(id);
                if self.is_being_expelled(id) {
                    continue;
                }
                ensure!(!task.is_connected(), "task {id} is excluded and connected");
                ensure!(task.poll.is_none(), "task {id} is excluded and its poll waits");
            }
            let Some(id) = exclusion.task().filter(|id| self.run.task(*id).is_some()) else { continue };
            if self.is_being_expelled(id) {
                continue;
            }
            let waits =
                |(call, place): (CallId, &Place)| place.task() == Some(id) && !decided.contains(&call);
            ensure!(!self.run.waiters.all().any(waits), "task {id} is excluded and waits");
            let may_miss = self.settings.recoverable;
            ensure!(!may_miss || self.run.own(id).excused, "task {id} is excluded and waited for");
        }
        Ok(())
    }
}

impl Run {
    pub(super) fn audit(&self, settings: &JobSettings) -> Finding {
        let tables = [self.waiters.is_sound(), self.timers.is_sound(), self.store.is_sound()];
        ensure!(!tables.contains(&false), "a table is not in order");
        self.audit_waiters(settings)?;
        self.audit_tasks()?;
        self.audit_barriers(settings)?;
        self.audit_questions(settings)?;
        self.store.audit(settings)?;
        ensure!(self.told == self.version, "watchers were not told of version {}", self.version);
        ensure!(self.remembers_states(), "the states that are remembered are not those of the tasks");
        Ok(())
    }

    /// Who waits is found where it waits, and the other way round.
    fn audit_waiters(&self, settings: &JobSettings) -> Finding {
        let mut found: BTreeSet<CallId> = BTreeSet::new();
        for (key, instance) in self.barriers.in_progress() {
            for (task, arrival) in instance.arrivals() {
                let place = Place::Barrier(key.clone(), task);
                let known = self.waiters.place(arrival.call) == Some(&place);
                ensure!(known, "{:?} of task {task} at {key:?} is not among the waiters", arrival.call);
                found.insert(arrival.call);
            }
        }
        for id in self.ids() {
            if let Some(call) = self.own(id).poll {
                let known = self.waiters.place(call) == Some(&Place::Poll(id));
                ensure!(known, "the poll {call:?} of task {id} is not among the waiters");
                found.insert(call);
            }
        }
        for (set, question) in &self.questions {
            for (task, calls) in question.asked.iter() {
                for call in calls {
                    let place = Place::LiveSet(set.clone(), *task);
                    let known = self.waiters.place(*call) == Some(&place);
                    ensure!(known, "the live-set call {call:?} of task {task} is not among the waiters");
                    found.insert(*call);
                }
            }
        }
        for (key, call) in self.store.waiting() {
            let known = matches!(self.waiters.place(call), Some(Place::Key(waited, _)) if waited == key);
            ensure!(known, "the reader {call:?} of a key is not among the waiters");
            found.insert(call);
        }
        found.extend(self.waiters.watching());
        found.extend(self.waiters.decided());
        let (all, most) = (self.waiters.len(), settings.bounds.waiters);
        ensure!(found.len() == all, "{all} calls wait, {} of them somewhere", found.len());
        ensure!(all <= most, "{all} calls wait, {most} are allowed");
        Ok(())
    }

    fn audit_tasks(&self) -> Finding {
        let connected = self.tasks.iter().filter(|task| task.is_connected()).count();
        ensure!(connected == self.connected, "{connected} tasks are connected, {} counted", self.connected);
        let unsynced = self.tasks.iter().filter(|task| task.unsynced).count();
        ensure!(unsynced == self.unsynced, "{unsynced} tasks are unsynced, {} counted", self.unsynced);
        let started = self.started_at.is_some();
        for id in self.ids() {
            let task = self.own(id);
            ensure!(task.pulse.is_within_bounds(), "too many gaps of task {id} are kept");
            ensure!(started || !task.is_connected(), "task {id} is connected before all have registered");
            ensure!(!(task.excused && task.is_connected()), "task {id} is excused and connected");
            ensure!(task.watched || !task.is_connected(), "nobody watches the heartbeats of task {id}");
            let named = self.barriers.in_progress().filter(|(key, _)| key.is_named());
            let here = named.filter(|(_, i)| matches!(i.slot(id), Some(Slot::Arrived(_)))).count();
            ensure!(
                here == self.waits_at(id) as usize,
                "task {id} waits at {here} barriers, {} counted",
                self.waits_at(id)
            );
            task.straggling.audit().map_err(|found| format!("task {id} {found}"))?;
            if let Some(suspicion) = &task.suspicion {
                ensure!(task.is_connected(), "task {id} is suspected but not connected");
                let stands = self.timers.stands(suspicion.until, &Timer::Grace(id));
                ensure!(stands, "no timer ends the grace of task {id}");
            }
        }
        let most = 2 * self.tasks.len() + self.barriers.in_progress_len();
        ensure!(self.timers.len() <= most, "{} timers stand, {most} can have a reason", self.timers.len());
        Ok(())
    }

    fn audit_barriers(&self, settings: &JobSettings) -> Finding {
        for (key, instance) in self.barriers.in_progress() {
            ensure!(instance.arrived() > 0, "{key:?} is in progress and nobody waits at it");
            ensure!(instance.missing() > 0, "{key:?} is in progress and nobody is missing");
            let early = instance.arrivals().find(|(_, arrival)| arrival.at < instance.began);
            ensure!(early.is_none(), "{key:?} began after {early:?}");
            let (mut missing, mut arrived) = (0, 0);
            for position in 0..instance.members.len() {
                let task = instance.members.at(position);
                match instance.slot(task) {
                    Some(Slot::Missing) => {
                        ensure!(!self.own(task).excused, "{key:?} waits for task {task}, which is excused");
                        missing += 1;
                    }
                    Some(Slot::Arrived(_)) => arrived += 1,
                    Some(Slot::Released) => {
                        ensure!(
                            self.own(task).was_connected || self.own(task).excused,
                            "{key:?} released task {task}, which never came"
                        );
                    }
                    None => return Err(format!("{key:?} has no slot for its member {task}")),
                }
            }
            let counted = (instance.missing(), instance.arrived());
            ensure!(
                counted == (missing, arrived),
                "{key:?} counts {counted:?}, has {:?}",
                (missing, arrived)
            );
            let stands = self.timers.stands(instance.deadline, &Timer::Barrier(key.clone()));
            ensure!(stands, "no timer ends {key:?}");
            let follows = self.barriers.ended(key).is_none_or(|ended| ended.counter < instance.counter);
            ensure!(follows, "{key:?} counts backwards");
            ensure!(!self.blocks_for_ever(key), "{key:?} waits only for tasks that cannot come (rule 2)");
        }
        ensure!(self.recent.len() <= settings.bounds.barriers_recent, "too many records of barriers");
        ensure!(self.recent.iter().is_sorted_by_key(|record| record.ended), "records out of order");
        let members: usize = self.barriers.in_progress().map(|(_, instance)| instance.members.len()).sum();
        let counted = self.barriers.members_in_progress();
        ensure!(members == counted, "barriers in progress have {members} members, {counted} counted");
        self.barriers.audit(settings.bounds.barrier_memory_bytes)
    }

    fn blocks_for_ever(&self, key: &BarrierKey) -> bool {
        let stuck = |id: TaskId| {
            let task = self.own(id);
            task.unsynced && task.is_connected() && self.waits_at(id) > 0
        };
        key.is_named() && self.barriers.instance(key).is_some_and(|i| i.missing_tasks().all(stuck))
    }

    fn audit_questions(&self, settings: &JobSettings) -> Finding {
        for (set, question) in &self.questions {
            ensure!(!question.asked.is_empty(), "a live-set question that nobody asked");
            ensure!(question.asked.values().all(|calls| !calls.is_empty()), "a task asked without a call");
            let awaits = |id: &&TaskId| self.own(**id).is_connected() && !question.asked.contains_key(id);
            let awaited = set.ids().iter().filter(awaits).count();
            ensure!(awaited == question.awaited, "a question awaits {awaited}, counts {}", question.awaited);
            ensure!(awaited > 0, "a live-set question that all have asked stands unanswered");
        }
        ensure!(self.questions.len() <= settings.bounds.live_sets_in_progress, "too many live-set questions");
        Ok(())
    }
}

impl Store {
    fn audit(&self, settings: &JobSettings) -> Finding {
        let bytes: usize = self.sizes().map(|(key, value)| key + value).sum();
        ensure!(bytes == self.bytes(), "the store holds {bytes} bytes, {} counted", self.bytes());
        ensure!(bytes <= settings.bounds.store_bytes, "the store is over its bound");
        ensure!(self.len() <= settings.bounds.keys, "the store has too many keys");
        let waited: usize = self.waiting().map(|(key, _)| key.len()).sum();
        ensure!(
            waited == self.waited_bytes(),
            "waited keys have {waited} bytes, {} counted",
            self.waited_bytes()
        );
        for key in self.waited() {
            ensure!(self.get(key).is_none(), "a call waits for a key that is there");
        }
        Ok(())
    }
}
