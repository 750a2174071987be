//! Checks the invariants of the state for tests and simulations, by recomputing its counts and tables. A check reads
//! the whole state, so a server never runs it.
//!
//! The check changes nothing. Begin at [`Coordinator::check_invariants`].

use std::collections::BTreeSet;

use super::barrier_table::{BarrierKey, MemberState};
use super::coordinator::Coordinator;
use super::ids::{CallId, TaskId};
use super::job::Job;
use super::key_value_store::KeyValueStore;
use super::peer_jobs::peer_job_refusal;
use super::run::Run;
use super::settings::JobSettings;
use super::timers::Timer;
use super::waiters::WaitTarget;

/// The result of a check; an error says in a sentence which invariant does not hold.
type CheckResult = Result<(), String>;

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
    pub fn check_invariants(&self) -> Result<(), String> {
        self.check_wakeup_table_matches_jobs()?;
        for job in self.job_states() {
            let name = &job.name;
            job.check_invariants().map_err(|found| format!("job {name}, run {}: {found}", job.run.number))?;
            let decided = job.run.waiters.calls_with_decided_answer();
            for (call, from) in
                job.run.waiters.waiting_calls_of_peer_jobs().filter(|(call, _)| !decided.contains(call))
            {
                let refused = self.job_state(from).is_none_or(|from| peer_job_refusal(from, job).is_some());
                ensure!(
                    !refused,
                    "job {name}: {call:?} of {from:?} waits, and the two may not exchange transfers"
                );
            }
        }
        Ok(())
    }
}

impl Job {
    fn check_invariants(&self) -> CheckResult {
        let run = &self.run;
        for (call, _) in run.waiters.iter() {
            let connection = run.waiters.connection_of(call);
            let known = connection.is_some_and(|c| self.has_connection(c) || self.is_connection_closing(c));
            ensure!(known, "{call:?} waits on a connection that is gone");
        }
        self.check_task_connections()?;
        self.exclusions.check_invariants(&self.settings.bounds)?;
        self.task_owners.check_invariants(self.settings.tasks)?;
        self.check_excluded_tasks()?;
        self.past.check_invariants(self.settings.bounds.runs_kept)?;
        run.check_invariants(&self.settings)
    }

    /// Checks that the tables of connections by task and of tasks by connection agree.
    fn check_task_connections(&self) -> CheckResult {
        // A sample is enough.
        for (connection, task) in self.task_connections().take(64) {
            ensure!(
                self.has_task_connection(task, connection),
                "task {task} is not known to speak on {connection:?}"
            );
        }
        let (all, most) = self.actual_and_expected_task_connection_counts();
        ensure!(all == most, "{all} connections of tasks are kept, {most} are there");
        Ok(())
    }

    /// Checks that an excluded task is not connected and blocks no other task.
    fn check_excluded_tasks(&self) -> CheckResult {
        let decided = self.run.waiters.calls_with_decided_answer();
        for exclusion in self.exclusions.in_force() {
            for id in self.tasks_excluded_by(&exclusion.target) {
                let task = self.run.expect_task(id);
                if self.is_eviction_pending(id) {
                    continue;
                }
                ensure!(!task.is_connected(), "task {id} is excluded and connected");
                ensure!(task.poll.is_none(), "task {id} is excluded and its poll waits");
            }
            let by_number = exclusion.target.tasks().filter(|id| self.run.task(*id).is_some());
            for id in by_number.filter(|id| !self.is_eviction_pending(*id)) {
                let waits = |(call, place): (CallId, &WaitTarget)| {
                    place.task() == Some(id) && !decided.contains(&call)
                };
                ensure!(!self.run.waiters.iter().any(waits), "task {id} is excluded and waits");
                let may_miss = self.settings.recoverable;
                ensure!(
                    !may_miss || self.run.expect_task(id).is_excused,
                    "task {id} is excluded and waited for"
                );
            }
        }
        Ok(())
    }
}

impl Run {
    pub(super) fn check_invariants(&self, settings: &JobSettings) -> CheckResult {
        let tables = [self.waiters.is_consistent(), self.timers.is_consistent(), self.store.is_consistent()];
        ensure!(!tables.contains(&false), "a table is not in order");
        self.check_waiters(settings)?;
        self.check_tasks()?;
        self.check_barriers(settings)?;
        self.check_live_set_requests(settings)?;
        self.store.check_invariants(settings)?;
        ensure!(self.notified_version == self.version, "watchers were not told of version {}", self.version);
        ensure!(self.is_state_cache_valid(), "the states that are remembered are not those of the tasks");
        Ok(())
    }

    /// Checks that every waiting call is in the table of the place where it waits, and the reverse.
    fn check_waiters(&self, settings: &JobSettings) -> CheckResult {
        let mut found: BTreeSet<CallId> = BTreeSet::new();
        for (key, instance) in self.barriers.in_progress() {
            for (task, arrival) in instance.arrivals() {
                let place = WaitTarget::Barrier(key.clone(), task);
                let known = self.waiters.wait_target(arrival.call) == Some(&place);
                ensure!(known, "{:?} of task {task} at {key:?} is not among the waiters", arrival.call);
                found.insert(arrival.call);
            }
        }
        for id in self.task_ids() {
            if let Some(call) = self.expect_task(id).poll {
                let known = self.waiters.wait_target(call) == Some(&WaitTarget::Poll(id));
                ensure!(known, "the poll {call:?} of task {id} is not among the waiters");
                found.insert(call);
            }
        }
        for (set, question) in &self.live_set_requests {
            for (task, calls) in question.callers.iter() {
                for call in calls {
                    let place = WaitTarget::LiveSet(set.clone(), *task);
                    let known = self.waiters.wait_target(*call) == Some(&place);
                    ensure!(known, "the live-set call {call:?} of task {task} is not among the waiters");
                    found.insert(*call);
                }
            }
        }
        for (key, call) in self.store.waiting_calls() {
            let known =
                matches!(self.waiters.wait_target(call), Some(WaitTarget::Key(waited, _)) if waited == key);
            ensure!(known, "the reader {call:?} of a key is not among the waiters");
            found.insert(call);
        }
        found.extend(self.waiters.watchers());
        found.extend(self.waiters.calls_with_decided_answer());
        let (all, most) = (self.waiters.len(), settings.bounds.waiters);
        ensure!(found.len() == all, "{all} calls wait, {} of them somewhere", found.len());
        ensure!(all <= most, "{all} calls wait, {most} are allowed");
        Ok(())
    }

    fn check_tasks(&self) -> CheckResult {
        let connected = self.tasks.iter().filter(|task| task.is_connected()).count();
        ensure!(
            connected == self.connected_tasks,
            "{connected} tasks are connected, {} counted",
            self.connected_tasks
        );
        let unsynced = self.tasks.iter().filter(|task| task.unsynced).count();
        ensure!(
            unsynced == self.unsynced_tasks,
            "{unsynced} tasks are unsynced, {} counted",
            self.unsynced_tasks
        );
        let started = self.started_at.is_some();
        for id in self.task_ids() {
            let task = self.expect_task(id);
            ensure!(task.heartbeat_stats.is_within_bounds(), "too many gaps of task {id} are kept");
            ensure!(started || !task.is_connected(), "task {id} is connected before all have registered");
            ensure!(!(task.is_excused && task.is_connected()), "task {id} is excused and connected");
            ensure!(
                task.has_heartbeat_timer || !task.is_connected(),
                "nobody watches the heartbeats of task {id}"
            );
            let named = self.barriers.in_progress().filter(|(key, _)| key.is_client_barrier());
            let here =
                named.filter(|(_, i)| matches!(i.member_state(id), Some(MemberState::Arrived(_)))).count();
            ensure!(
                here == self.barrier_wait_count(id) as usize,
                "task {id} waits at {here} barriers, {} counted",
                self.barrier_wait_count(id)
            );
            task.straggling.check_invariants().map_err(|found| format!("task {id} {found}"))?;
            if let Some(suspicion) = &task.suspicion {
                ensure!(task.is_connected(), "task {id} is suspected but not connected");
                let stands = self.timers.is_set(suspicion.until, &Timer::Grace(id));
                ensure!(stands, "no timer ends the grace of task {id}");
            }
        }
        let most = 2 * self.tasks.len() + self.barriers.in_progress_count();
        ensure!(self.timers.len() <= most, "{} timers stand, {most} can have a reason", self.timers.len());
        Ok(())
    }

    fn check_barriers(&self, settings: &JobSettings) -> CheckResult {
        for (key, instance) in self.barriers.in_progress() {
            ensure!(instance.arrived_count() > 0, "{key:?} is in progress and nobody waits at it");
            ensure!(instance.missing_count() > 0, "{key:?} is in progress and nobody is missing");
            let early = instance.arrivals().find(|(_, arrival)| arrival.at < instance.began);
            ensure!(early.is_none(), "{key:?} began after {early:?}");
            let (mut missing, mut arrived) = (0, 0);
            for position in 0..instance.members.len() {
                let task = instance.members.task_at(position);
                match instance.member_state(task) {
                    Some(MemberState::Missing) => {
                        ensure!(
                            !self.expect_task(task).is_excused,
                            "{key:?} waits for task {task}, which is excused"
                        );
                        missing += 1;
                    }
                    Some(MemberState::Arrived(_)) => arrived += 1,
                    Some(MemberState::NotRequired) => {
                        ensure!(
                            self.expect_task(task).was_connected || self.expect_task(task).is_excused,
                            "{key:?} does not require task {task}, which was never connected"
                        );
                    }
                    None => return Err(format!("{key:?} has no slot for its member {task}")),
                }
            }
            let counted = (instance.missing_count(), instance.arrived_count());
            ensure!(
                counted == (missing, arrived),
                "{key:?} counts {counted:?}, has {:?}",
                (missing, arrived)
            );
            let stands = self.timers.is_set(instance.deadline, &Timer::Barrier(key.clone()));
            ensure!(stands, "no timer ends {key:?}");
            let follows = self.barriers.last_ended(key).is_none_or(|ended| ended.counter < instance.counter);
            ensure!(follows, "{key:?} counts backwards");
            ensure!(
                !self.is_barrier_deadlocked(key),
                "{key:?} waits only for tasks that cannot come (rule 2)"
            );
        }
        ensure!(self.recent.len() <= settings.bounds.barriers_recent, "too many records of barriers");
        ensure!(self.recent.iter().is_sorted_by_key(|record| record.ended), "records out of order");
        let members: usize = self.barriers.in_progress().map(|(_, instance)| instance.members.len()).sum();
        let counted = self.barriers.member_count_in_progress();
        ensure!(members == counted, "barriers in progress have {members} members, {counted} counted");
        self.barriers.check_invariants(settings.bounds.barrier_memory_bytes)
    }

    fn is_barrier_deadlocked(&self, key: &BarrierKey) -> bool {
        let stuck = |id: TaskId| {
            let task = self.expect_task(id);
            task.unsynced && task.is_connected() && self.barrier_wait_count(id) > 0
        };
        key.is_client_barrier() && self.barriers.instance(key).is_some_and(|i| i.missing_tasks().all(stuck))
    }

    fn check_live_set_requests(&self, settings: &JobSettings) -> CheckResult {
        for (set, question) in &self.live_set_requests {
            ensure!(!question.callers.is_empty(), "a live-set question that nobody asked");
            ensure!(question.callers.values().all(|calls| !calls.is_empty()), "a task asked without a call");
            let awaits =
                |id: &&TaskId| self.expect_task(**id).is_connected() && !question.callers.contains_key(id);
            let awaited = set.ids().iter().filter(awaits).count();
            ensure!(awaited == question.awaited, "a question awaits {awaited}, counts {}", question.awaited);
            ensure!(awaited > 0, "a live-set question that all have asked stands unanswered");
        }
        ensure!(
            self.live_set_requests.len() <= settings.bounds.live_sets_in_progress,
            "too many live-set questions"
        );
        Ok(())
    }
}

impl KeyValueStore {
    fn check_invariants(&self, settings: &JobSettings) -> CheckResult {
        let bytes: usize = self.key_and_value_lengths().map(|(key, value)| key + value).sum();
        ensure!(bytes == self.total_bytes(), "the store holds {bytes} bytes, {} counted", self.total_bytes());
        ensure!(bytes <= settings.bounds.store_bytes, "the store is over its bound");
        ensure!(self.len() <= settings.bounds.keys, "the store has too many keys");
        let waited: usize = self.waiting_calls().map(|(key, _)| key.len()).sum();
        ensure!(
            waited == self.waited_key_bytes(),
            "waited keys have {waited} bytes, {} counted",
            self.waited_key_bytes()
        );
        for key in self.waited_keys() {
            ensure!(self.get(key).is_none(), "a call waits for a key that is there");
        }
        Ok(())
    }
}
