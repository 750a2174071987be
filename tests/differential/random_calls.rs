//! Makes random calls to both services. After every call, both must have answered the same calls in the same way.
//!
//! Most of the time, the callers behave as JAX's agents do: they register before other calls, and count barriers.
//! Now and then a caller makes a mistake. The random calls leave out deliberate differences between the services,
//! and calls that crash the C++ service. Scripts cover these.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::Path;
use std::time::Duration;

use fastrand::Rng;

use crate::expect::describe_answer;
use crate::script::{CallerSpec, Release, ScriptCall, TaskStatesVersion, incarnation, observer, t};
use crate::service::ServiceUnderTest;
use crate::support::{Body, Call, Generation, JobOptions};

/// The timeout of their agreement. The C++ service checks its timeouts once a second.
const AGREEMENT_LIMIT: Duration = Duration::from_secs(20);

const TASKS: i32 = 3;
/// The barriers, each with its members (none: all tasks).
const BARRIERS: [(&str, &[i32]); 4] = [("all", &[]), ("front", &[0, 1]), ("back", &[1, 2]), ("one", &[2])];
const KEYS: [&str; 6] = ["k", "d/x", "d/y", "d/y/z", "/d//x/", "n"];
const DIRECTORIES: [&str; 4] = ["d", "d/y", "", "k"];
const SETS: [&[i32]; 3] = [&[0, 1, 2], &[0, 1], &[2]];

/// Makes `steps` random calls to both services.
///
/// # Errors
/// In words, with all calls so far, if the services differ.
pub async fn compare_with_random_calls(
    release: Release,
    environment: &Path,
    recoverable: bool,
    seed: u64,
    steps: usize,
) -> Result<(), String> {
    let job = JobOptions { recoverable, ..JobOptions::new(TASKS.unsigned_abs()) };
    let mut pair = ServicePair {
        sides: [
            ServiceUnderTest::cxx(environment, release, &job),
            ServiceUnderTest::muster(release, &job, false),
        ],
        compared: BTreeSet::new(),
        transcript: String::new(),
        calls: 0,
        blur_the_living: false,
    };
    let mut world = CallerStates::new(release, recoverable, seed);
    let told = async {
        for task in 0..TASKS {
            pair.call(t(task), register_call(task, 0)).await?;
        }
        for _ in 0..steps {
            world.make_random_step(&mut pair).await?;
        }
        pair.call(observer(), ScriptCall::Watch(TaskStatesVersion::None)).await
    };
    match told.await {
        Ok(_) => Ok(()),
        Err(why) => Err(format!(
            "{why}\nReplay with MUSTER_DIFFERENTIAL_SEED={seed}. The calls:\n{}",
            pair.transcript
        )),
    }
}

/// Both services, with the same calls.
struct ServicePair {
    sides: [ServiceUnderTest; 2],
    /// The calls whose answers have been compared.
    compared: BTreeSet<String>,
    transcript: String,
    calls: usize,
    /// Whether live sets are no longer compared: when all tasks fail at once, the C++ service fails them in
    /// the order of a hash table, and answers a live-set call in between.
    blur_the_living: bool,
}

impl ServicePair {
    /// Makes a call to both services; returns its handle and whether it was answered.
    async fn call(&mut self, who: CallerSpec, ask: impl Into<ScriptCall>) -> Result<(String, bool), String> {
        let ask = ask.into();
        self.calls += 1;
        let handle = format!("{:04}", self.calls);
        let _ = writeln!(self.transcript, "{handle} task {} life {:?}: {ask:?}", who.task, who.life);
        let [cxx, muster] = &mut self.sides;
        tokio::join!(cxx.start_call(&handle, who, &ask), muster.start_call(&handle, who, &ask));
        self.compare_new_answers().await?;
        let answered = self.compared.contains(&handle);
        Ok((handle, answered))
    }

    /// Waits until both services have answered the same calls, and compares the answers.
    async fn compare_new_answers(&mut self) -> Result<(), String> {
        let deadline = tokio::time::Instant::now() + AGREEMENT_LIMIT;
        loop {
            let [theirs, ours] = [self.sides[0].answered_calls(), self.sides[1].answered_calls()];
            if theirs.keys().eq(ours.keys()) {
                break;
            }
            if tokio::time::Instant::now() > deadline {
                let only = |one: &BTreeMap<String, _>, other: &BTreeMap<String, _>| {
                    one.keys().filter(|key| !other.contains_key(*key)).cloned().collect::<Vec<_>>()
                };
                let (cxx, muster) = (only(&theirs, &ours), only(&ours, &theirs));
                return Err(format!("only jaxlib answered {cxx:?}, only Muster answered {muster:?}"));
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let fresh: Vec<String> = self.sides[0]
            .answered_calls()
            .into_keys()
            .filter(|handle| !self.compared.contains(handle))
            .collect();
        for handle in fresh {
            let [theirs, ours] = self.sides.each_mut().map(|side| {
                let mut answer = side.pending_call(&handle).answer().expect("it is answered");
                if let Body::Alive(alive) = &mut answer.body
                    && self.blur_the_living
                {
                    alive.clear();
                }
                (describe_answer(&answer), side.without_random_parts(answer))
            });
            if theirs.1 != ours.1 {
                return Err(format!(
                    "call {handle} was answered differently\n  jaxlib: {}\n  muster: {}",
                    theirs.0, ours.0
                ));
            }
            let _ = writeln!(self.transcript, "     {handle} -> {}", ours.0.replace('\n', " "));
            self.compared.insert(handle);
        }
        Ok(())
    }

    /// Waits until both services have answered a call.
    async fn wait_for_both_answers(&mut self, handle: &str) -> Result<(), String> {
        for side in &self.sides {
            side.pending_call(handle)
                .within(AGREEMENT_LIMIT)
                .await
                .ok_or("a timed call is never answered")?;
        }
        self.compare_new_answers().await
    }

    fn is_answered(&self, handle: &str) -> bool {
        self.compared.contains(handle)
    }
}

/// The state of the callers.
struct CallerStates {
    rng: Rng,
    release: Release,
    recoverable: bool,
    /// The life of each task.
    lives: [usize; TASKS as usize],
    /// The counter of its last instance of each barrier, as an agent keeps it.
    counters: BTreeMap<(i32, &'static str), i64>,
    /// The barrier calls that may still wait: handle, task, barrier, counter.
    meetings: Vec<(String, i32, &'static str, i64)>,
    /// The last instance of each barrier of which a caller has been told.
    told: BTreeMap<&'static str, i64>,
    /// Other calls that may wait until an event of their task, by task.
    open: Vec<(String, i32)>,
    /// Whether the run has ended, so that no task registers any more.
    over: bool,
}

impl CallerStates {
    fn new(release: Release, recoverable: bool, seed: u64) -> Self {
        Self {
            rng: Rng::with_seed(seed),
            release,
            recoverable,
            lives: [0; TASKS as usize],
            counters: BTreeMap::new(),
            meetings: Vec::new(),
            told: BTreeMap::new(),
            open: Vec::new(),
            over: false,
        }
    }

    async fn make_random_step(&mut self, pair: &mut ServicePair) -> Result<(), String> {
        self.update_counters_from_answers(pair);
        let task = self.rng.i32(0..TASKS);
        let who = self.caller_of_task(task);
        match self.rng.u32(0..100) {
            0..=34 => return self.arrive_at_random_barrier(pair, task).await,
            35..=39 => return self.disturb_waiting_barrier(pair, task).await,
            40..=64 => drop(pair.call(who, self.random_key_value_call()).await?),
            65..=74 => {
                let set = SETS[self.rng.usize(0..SETS.len())];
                let (handle, _) = pair.call(who, Call::alive(set)).await?;
                self.open.push((handle, task));
            }
            75..=79 => drop(pair.call(observer(), ScriptCall::Watch(TaskStatesVersion::None)).await?),
            // In recoverable jobs polls are never answered, and one task stays without a poll so that it can
            // restart.
            80..=84 if !self.recoverable || task > 0 => {
                let (handle, _) = pair.call(who, Call::PollForError).await?;
                self.open.push((handle, task));
            }
            85..=92 => {
                let incarnation = incarnation(task, self.current_life(task));
                drop(pair.call(who, Call::Heartbeat { incarnation }).await?);
            }
            93..=94 => drop(pair.call(t(TASKS + 4), Call::PollForError).await?),
            // A task that waits at a barrier and registers again leaves it; the rest of that barrier then
            // differs.
            95..=96 if !self.over && !self.meetings.iter().any(|(_, who, _, _)| *who == task) => {
                drop(pair.call(who, register_call(task, self.current_life(task))).await?)
            }
            97..=98 => return self.let_task_leave_or_fail(pair, task).await,
            _ if self.recoverable => return self.restart(pair, task).await,
            _ => {}
        }
        Ok(())
    }

    fn random_key_value_call(&mut self) -> Call {
        let key = KEYS[self.rng.usize(0..KEYS.len())];
        let value = format!("v{}", self.rng.u8(0..4));
        match self.rng.u32(0..7) {
            0 => Call::insert(key, value),
            1 => Call::overwrite(key, value),
            2 => Call::get(key),
            3 => Call::try_get(key),
            4 => Call::increment("n", self.rng.i64(-9..9)),
            5 => Call::list(DIRECTORIES[self.rng.usize(0..DIRECTORIES.len())]),
            _ => Call::delete(key),
        }
    }

    /// Lets a task arrive at a barrier as its agent would, or repeat its last instance.
    async fn arrive_at_random_barrier(&mut self, pair: &mut ServicePair, task: i32) -> Result<(), String> {
        let (id, members) = BARRIERS[self.rng.usize(0..BARRIERS.len())];
        // Agents begin no instance of a barrier while their last one waits. A task that is no member is rare.
        let waiting = self.meetings.iter().find(|(_, who, name, _)| *who == task && *name == id);
        let waiting = waiting.map(|(_, _, _, counter)| *counter);
        let member = members.is_empty() || members.contains(&task);
        if waiting.is_some() && self.rng.u8(0..10) > 0 || !member && self.rng.u8(0..6) > 0 {
            return Ok(());
        }
        let last = self.counters.get(&(task, id)).copied().unwrap_or(-1);
        let again = last >= 0 && self.rng.u8(0..8) == 0;
        let counter = waiting.unwrap_or(if again { last } else { last + 1 });
        // A task behind an ended instance would spoil its result in one service only.
        let over = !self.meetings.iter().any(|(_, _, name, _)| *name == id);
        if over && self.told.get(id).is_some_and(|last| counter < *last) {
            self.counters.insert((task, id), self.told[id]);
            return Ok(());
        }
        let timed = waiting.is_none() && self.rng.u8(0..20) == 0;
        let call = Call::barrier_of(id, counter, members).within_ms(if timed { 200 } else { 600_000 });
        let (handle, answered) = pair.call(self.caller_of_task(task), call).await?;
        self.meetings.push((handle.clone(), task, id, counter));
        // Only the first caller's timeout counts. A caller that begins the instance must not stay in it,
        // because its timeout may be late by a second in one service.
        if timed && !answered && self.meetings.iter().filter(|(_, _, name, _)| *name == id).count() == 1 {
            pair.wait_for_both_answers(&handle).await?;
        }
        Ok(())
    }

    /// Makes a mistake at a barrier at which a task waits, or cancels it.
    async fn disturb_waiting_barrier(&mut self, pair: &mut ServicePair, task: i32) -> Result<(), String> {
        let Some((_, _, id, counter)) = self.rng.choice(&self.meetings).cloned() else {
            let Some(id) = self.rng.choice(self.told.keys().copied().collect::<Vec<_>>()) else {
                return Ok(());
            };
            // The barrier has already ended, so there is nothing to cancel.
            return pair.call(self.caller_of_task(task), Call::cancel(id, 0)).await.map(drop);
        };
        // Agents do not arrive twice at the same instance. The services then answer the older call
        // differently.
        if self.meetings.iter().any(|(_, who, name, _)| *who == task && *name == id) {
            return Ok(());
        }
        let members =
            BARRIERS.iter().find(|(name, _)| *name == id).map_or(&[] as &[i32], |(_, members)| *members);
        let call = match self.rng.u8(0..5) {
            0 => Call::barrier_of(id, counter + 1 + self.rng.i64(0..3), members),
            1 => Call::barrier_of(id, counter, &[0, 2]),
            2 => Call::barrier_of(id, counter, members),
            3 => Call::cancel(id, counter + self.rng.i64(0..2)),
            _ => Call::cancel(id, counter),
        };
        let meets = matches!(call, Call::Barrier { .. });
        let (handle, _) = pair.call(self.caller_of_task(task), call).await?;
        if meets {
            self.meetings.push((handle, task, id, counter));
        }
        Ok(())
    }

    /// Lets a task leave or fail, which may end the run.
    async fn let_task_leave_or_fail(&mut self, pair: &mut ServicePair, task: i32) -> Result<(), String> {
        let reports = self.release.reports_errors();
        let call = match self.rng.u8(0..4) {
            0 => Call::Shutdown,
            1 if !self.recoverable => Call::Heartbeat { incarnation: 4711 },
            2 if !self.recoverable && reports => Call::report(self.rng.i32(1..17), "it went wrong"),
            3 if self.release.generation() == Generation::A && !self.recoverable => Call::Reset,
            _ => return Ok(()),
        };
        if self.recoverable {
            // The last task to leave would end the run.
            return self.leave_and_return(pair, task).await;
        }
        self.over = true;
        pair.blur_the_living = true;
        pair.call(self.caller_of_task(task), call).await.map(drop)
    }

    async fn leave_and_return(&mut self, pair: &mut ServicePair, task: i32) -> Result<(), String> {
        if !self.can_be_replaced(pair, task) {
            return Ok(());
        }
        pair.call(self.caller_of_task(task), Call::Shutdown).await?;
        pair.call(observer(), ScriptCall::Watch(TaskStatesVersion::None)).await?;
        self.restart(pair, task).await
    }

    /// Replaces a task's process while no task waits at a barrier, and lets all tasks meet once so that it is
    /// in step.
    async fn restart(&mut self, pair: &mut ServicePair, task: i32) -> Result<(), String> {
        if !self.can_be_replaced(pair, task) {
            return Ok(());
        }
        self.lives[task.unsigned_abs() as usize] += 1;
        self.counters.retain(|(who, _), _| *who != task);
        pair.call(self.caller_of_task(task), register_call(task, self.current_life(task))).await?;
        for other in 0..TASKS {
            let counter = self.counters.get(&(other, "in step")).copied().unwrap_or(-1) + 1;
            let (handle, _) =
                pair.call(self.caller_of_task(other), Call::barrier("in step", counter)).await?;
            self.meetings.push((handle, other, "in step", counter));
        }
        self.update_counters_from_answers(pair);
        Ok(())
    }

    /// Returns whether a task can be replaced: waiting calls of an older life end with it in one service
    /// only.
    fn can_be_replaced(&self, pair: &ServicePair, task: i32) -> bool {
        let waits = self.open.iter().any(|(handle, who)| *who == task && !pair.is_answered(handle));
        !waits && self.meetings.is_empty() && !self.over
    }

    /// Takes the callers' counters from the answers, as agents do.
    fn update_counters_from_answers(&mut self, pair: &ServicePair) {
        let (counters, told) = (&mut self.counters, &mut self.told);
        self.meetings.retain(|(handle, task, id, _)| {
            if !pair.is_answered(handle) {
                return true;
            }
            if let Some(answer) = pair.sides[1].pending_call(handle).answer() {
                let counter = match (&answer.body, &answer.payloads.barrier) {
                    (Body::Barrier(counter), _) => Some(*counter),
                    (_, Some((_, counter))) => Some(*counter),
                    _ => None,
                };
                if let Some(counter) = counter {
                    counters.insert((*task, id), counter);
                    let last = told.entry(id).or_insert(counter);
                    *last = counter.max(*last);
                }
            }
            false
        });
    }

    fn current_life(&self, task: i32) -> usize {
        self.lives[task.unsigned_abs() as usize]
    }

    fn caller_of_task(&self, task: i32) -> CallerSpec {
        t(task).life(self.current_life(task))
    }
}

fn register_call(task: i32, life: usize) -> Call {
    Call::Register { incarnation: incarnation(task, life), recoverable: false }
}
