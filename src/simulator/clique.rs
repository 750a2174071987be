//! The collectives of a simulated job: one clique of all tasks, in which each has one GPU.
//!
//! A step begins with a barrier, and then each task calls the collectives of the step and waits for their end. When a task leaves, the
//! step has no further collectives, as JAX ends those that wait for a lost task; the next step is in a new communicator of those that are
//! there. A task that comes back is in the communicator of the step after its first one.
//!
//! A collective ends at one moment on all GPUs: some time after the last of them has begun it. A GPU begins a collective when its
//! program has called it and the one before has ended. The calls of all ranks decide everything, and each rank tells the
//! service the part of it that NCCL's profiler plug-in would see. Begin at [`SimulatedClique`].

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

use super::story::{COLLECTIVES_MAX, StoryCollectives};
use crate::clock;
use crate::proto::muster::v1 as pb;

/// The steps of which a rank knows when it called their collectives.
const STEPS_KEPT: usize = 8;
/// The collectives of which the end is known: all of a step, since those may be in the future.
const ENDS_KEPT: usize = COLLECTIVES_MAX as usize;
/// The most collectives that a report names because they have not ended, and because the service asked for them.
const UNENDED_MAX: u64 = 8;
const WANTED_MAX: u64 = 16;
const FUNCTION: &str = "AllReduce";

/// Calls of one rank at one moment.
#[derive(Debug, Clone, Copy)]
struct CalledStep {
    first: u64,
    count: u64,
    at: Instant,
    is_timed: bool,
}

/// The progress of one task in the present communicator.
#[derive(Debug, Clone, Default)]
struct SimulatedRank {
    steps: VecDeque<CalledStep>,
    called: u64,
    /// The first collective that its GPU does not begin.
    held_from: Option<u64>,
    /// The first collective that its GPU began after it was held, and when it could.
    released: Option<(u64, Instant)>,
    /// Of the collectives that have ended and were timed: how many, and their time on the GPU.
    timed: u64,
    on_gpu: Duration,
}

impl SimulatedRank {
    /// Returns the number of collectives that its GPU can begin.
    fn ready(&self) -> u64 {
        self.held_from.map_or(self.called, |held| held.min(self.called))
    }

    fn call_of(&self, number: u64) -> Option<CalledStep> {
        self.steps.iter().rev().find(|step| (step.first..step.first + step.count).contains(&number)).copied()
    }
}

/// A task, in whatever communicator.
#[derive(Debug, Clone, Default)]
struct CliqueTask {
    /// Its progress in the present communicator, if it is in it.
    rank: Option<Box<SimulatedRank>>,
    /// It will be in the next communicator.
    has_come: bool,
    /// The number of the hold of its GPU, if it is held; and of the last one.
    hold: Option<u64>,
    last_hold: u64,
}

#[derive(Debug)]
struct CliqueState {
    tasks: Vec<CliqueTask>,
    hash: u64,
    /// The tasks of the communicator, in the order of their ranks.
    members: Vec<u32>,
    /// The latest step whose collectives were called. The collectives of steps up to `skipped` are not called any more.
    step: i64,
    skipped: i64,
    /// Tasks have come or left since the communicator was made.
    is_outdated: bool,
    /// The members that are not ready for the collective after those that have ended.
    not_ready: usize,
    /// The ends of the latest collectives, the last one at the back. An end may be in the future.
    ends: VecDeque<Instant>,
    /// The number of collectives whose end is known.
    ended: u64,
}

impl CliqueState {
    /// Begins with a communicator of all tasks.
    fn begin(tasks: usize) -> Self {
        let all = CliqueTask { has_come: true, ..CliqueTask::default() };
        let mut state = Self {
            tasks: vec![all; tasks],
            hash: 0,
            members: Vec::new(),
            step: -1,
            skipped: -1,
            is_outdated: false,
            not_ready: 0,
            ends: VecDeque::new(),
            ended: 0,
        };
        state.make_communicator();
        state
    }

    /// Makes a communicator of all tasks that are there.
    fn make_communicator(&mut self) {
        self.hash = clock::random_u64();
        self.members.clear();
        for (number, task) in (0..).zip(&mut self.tasks) {
            if std::mem::take(&mut task.has_come) || task.rank.is_some() {
                let held_from = task.hold.map(|_| 0);
                task.rank = Some(Box::new(SimulatedRank { held_from, ..SimulatedRank::default() }));
                self.members.push(number);
            }
        }
        (self.is_outdated, self.not_ready, self.ended) = (false, self.members.len(), 0);
        self.ends.clear();
    }

    fn ranks(&self) -> impl Iterator<Item = &SimulatedRank> {
        self.members.iter().filter_map(|task| self.tasks[*task as usize].rank.as_deref())
    }

    fn end_of(&self, number: u64) -> Option<Instant> {
        let from_last = self.ended.checked_sub(number + 1)?;
        let place = (self.ends.len() as u64).checked_sub(from_last + 1)?;
        self.ends.get(place as usize).copied()
    }

    /// Returns when the GPU of a rank has begun a collective, which was called at `called`.
    fn begin_of(&self, rank: &SimulatedRank, number: u64, called: Instant) -> Option<Instant> {
        if rank.held_from.is_some_and(|held| number >= held) {
            return None;
        }
        let released = rank.released.filter(|(first, _)| number >= *first).map(|(_, at)| at);
        let ready = released.into_iter().fold(called, Instant::max);
        let Some(before) = number.checked_sub(1) else { return Some(ready) };
        self.end_of(before).map(|end| end.max(ready))
    }

    /// Ends the collectives that all GPUs have begun.
    fn advance(&mut self, time: Duration) {
        let ready = self.ranks().map(SimulatedRank::ready).min().unwrap_or_default();
        while self.ended < ready {
            let number = self.ended;
            let begun_at = |rank: &SimulatedRank| {
                let call = rank.call_of(number)?;
                Some((self.begin_of(rank, number, call.at)?, call.is_timed))
            };
            let begun: Vec<Option<(Instant, bool)>> = self.ranks().map(begun_at).collect();
            let Some(last) = begun.iter().flatten().map(|(at, _)| *at).max() else { break };
            let end = last + time;
            for (task, begun) in self.members.iter().zip(begun) {
                let rank = self.tasks[*task as usize].rank.as_deref_mut();
                if let (Some(rank), Some((at, true))) = (rank, begun) {
                    rank.timed += 1;
                    rank.on_gpu += end - at;
                }
            }
            self.ends.push_back(end);
            self.ended += 1;
            if self.ends.len() > ENDS_KEPT {
                self.ends.pop_front();
            }
        }
        let ended = self.ended;
        self.not_ready = self.ranks().filter(|rank| rank.ready() <= ended).count();
    }
}

/// The clique of all tasks.
#[derive(Debug)]
pub struct SimulatedClique {
    settings: StoryCollectives,
    state: Mutex<CliqueState>,
    changed: Notify,
}

impl SimulatedClique {
    /// Begins a clique of so many tasks.
    pub fn new(tasks: u32, settings: StoryCollectives) -> Self {
        let state = Mutex::new(CliqueState::begin(tasks as usize));
        Self { settings, state, changed: Notify::new() }
    }

    fn lock(&self) -> MutexGuard<'_, CliqueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the part of a task whose life has ended. The others wait for nothing any more.
    pub fn leave(&self, task: u32) {
        let mut state = self.lock();
        let left = &mut state.tasks[task as usize];
        (left.has_come, left.hold) = (false, None);
        if left.rank.take().is_none() {
            return;
        }
        (state.is_outdated, state.skipped) = (true, state.step);
        // All have left: another run begins with its first step.
        if state.tasks.iter().all(|task| task.rank.is_none()) {
            *state = CliqueState::begin(state.tasks.len());
        }
        drop(state);
        self.changed.notify_waiters();
    }

    /// Calls the collectives of a step, and waits until they have ended. Returns at once if a task has left since the step began, or if
    /// this task is in the communicator of the next step only.
    pub async fn run_step(&self, task: u32, step: i64, is_timed: bool) {
        let Some((hash, last)) = self.call(task, step, is_timed) else { return };
        loop {
            let changed = self.changed.notified();
            let end = {
                let state = self.lock();
                if state.hash != hash || state.skipped >= step {
                    return;
                }
                // The end of an old one is not known any more.
                (state.ended > last).then(|| state.end_of(last).unwrap_or_else(Instant::now))
            };
            match end {
                Some(end) => return sleep_until(end).await,
                None => changed.await,
            }
        }
    }

    /// Calls the collectives of a step. Returns the communicator, and the number of the last one.
    fn call(&self, task: u32, step: i64, is_timed: bool) -> Option<(u64, u64)> {
        let mut state = self.lock();
        if step <= state.skipped {
            return None;
        }
        if step > state.step {
            state.step = step;
            if state.is_outdated {
                state.make_communicator();
            }
        }
        let called = self.change_rank(&mut state, task, |rank, _| {
            let (first, count) = (rank.called, u64::from(self.settings.each_step));
            rank.steps.push_back(CalledStep { first, count, at: Instant::now(), is_timed });
            if rank.steps.len() > STEPS_KEPT {
                rank.steps.pop_front();
            }
            rank.called += count;
            rank.called - 1
        });
        let Some(last) = called else {
            (state.tasks[task as usize].has_come, state.is_outdated) = (true, true);
            return None;
        };
        Some((state.hash, last))
    }

    /// Changes what a task has done in the communicator, if it is in it, and ends the collectives that all GPUs have begun by that. `change`
    /// gets the number of those that have ended.
    fn change_rank<T>(
        &self,
        state: &mut CliqueState,
        task: u32,
        change: impl FnOnce(&mut SimulatedRank, u64) -> T,
    ) -> Option<T> {
        let ended = state.ended;
        let rank = state.tasks[task as usize].rank.as_deref_mut()?;
        let was_ready = rank.ready() > ended;
        let changed = change(rank, ended);
        match (was_ready, rank.ready() > ended) {
            (false, true) => state.not_ready -= 1,
            (true, false) => state.not_ready += 1,
            _ => {}
        }
        if state.not_ready == 0 {
            state.advance(self.settings.time.0);
            self.changed.notify_waiters();
        }
        Some(changed)
    }

    /// Lets the GPU of a task begin no further collective. Returns the number of this hold.
    pub fn hold_gpu(&self, task: u32) -> u64 {
        let mut state = self.lock();
        let held = &mut state.tasks[task as usize];
        held.last_hold += 1;
        let hold = held.last_hold;
        held.hold = Some(hold);
        self.change_rank(&mut state, task, |rank, ended| {
            rank.held_from.get_or_insert(ended);
        });
        hold
    }

    /// Lets the GPU of a task go on, if this hold is its last one.
    pub fn release_gpu(&self, task: u32, hold: u64) {
        let mut state = self.lock();
        let held = &mut state.tasks[task as usize];
        if held.hold != Some(hold) {
            return;
        }
        held.hold = None;
        self.change_rank(&mut state, task, |rank, _| {
            rank.released = rank.held_from.take().map(|first| (first, Instant::now()));
        });
    }

    /// Returns whether NCCL is asked for times from the start.
    pub fn is_always_timed(&self) -> bool {
        self.settings.timed
    }

    /// Returns what a task tells of its communicator, if it has one. `wanted` is what the service asked for.
    pub fn describe(
        &self,
        task: u32,
        hosts: u32,
        wanted: &[pb::WantedCollectives],
    ) -> Option<pb::CommunicatorReport> {
        let (state, now) = (self.lock(), Instant::now());
        let rank = state.tasks[task as usize].rank.as_deref()?;
        let number_of_rank = u32::try_from(state.members.binary_search(&task).ok()?).ok()?;
        let has_ended = |number: u64| state.end_of(number).is_none_or(|end| end <= now);
        let mut ended = state.ended.min(rank.called);
        while ended > 0 && !has_ended(ended - 1) {
            ended -= 1;
        }
        let unended = ended..rank.called.min(ended + UNENDED_MAX);
        let asked = wanted.iter().filter(|wanted| (wanted.hash, wanted.rank) == (state.hash, number_of_rank));
        let asked =
            asked.flat_map(|wanted| wanted.first..rank.called.min(wanted.first.saturating_add(WANTED_MAX)));
        let latest = ended.checked_sub(1).into_iter().chain(rank.called.checked_sub(1));
        let mut numbers: Vec<u64> = latest.chain(unended).chain(asked).collect();
        numbers.sort_unstable();
        numbers.dedup();
        let age =
            |at: Instant| u64::try_from(now.saturating_duration_since(at).as_micros()).unwrap_or(u64::MAX);
        let begun_at = |number: u64, step: &CalledStep| {
            state.begin_of(rank, number, step.at).filter(|begun| *begun <= now)
        };
        let operations = numbers.iter().filter_map(|number| {
            let step = rank.call_of(*number)?;
            let timed = |at: Option<Instant>| at.filter(|_| step.is_timed).map(age);
            Some(pb::CollectiveReport {
                number: *number,
                function: FUNCTION.to_owned(),
                data_type: "float32".to_owned(),
                count: self.settings.bytes / 4,
                root: 0,
                // Equal on all ranks.
                chain: (number + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15),
                timed: step.is_timed,
                enqueued_us: age(step.at),
                begun_us: timed(begun_at(*number, &step)),
                ended_us: timed(state.end_of(*number).filter(|end| *end <= now)),
            })
        });
        let begun = rank.call_of(ended).and_then(|step| begun_at(ended, &step)).map_or(ended, |_| ended + 1);
        let is_known = rank.timed > 0;
        Some(pb::CommunicatorReport {
            hash: state.hash,
            rank: number_of_rank,
            ranks: u32::try_from(state.members.len()).unwrap_or(u32::MAX),
            nodes: hosts,
            name: String::new(),
            changed_us: rank.steps.back().map_or(0, |step| age(step.at)),
            collectives: rank.called,
            operations: operations.collect(),
            functions: vec![pb::FunctionReport {
                function: FUNCTION.to_owned(),
                enqueued: rank.called,
                begun: if is_known { begun } else { 0 },
                ended: if is_known { ended } else { 0 },
                bytes: rank.called.saturating_mul(self.settings.bytes),
                timed: rank.timed,
                timed_bytes: rank.timed.saturating_mul(self.settings.bytes),
                gpu_ns: u64::try_from(rank.on_gpu.as_nanos()).unwrap_or(u64::MAX),
            }],
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIME: Duration = Duration::from_millis(2);

    fn clique(tasks: u32) -> SimulatedClique {
        SimulatedClique::new(tasks, StoryCollectives { each_step: 3, ..StoryCollectives::default() })
    }

    fn describe(clique: &SimulatedClique, task: u32) -> pb::CommunicatorReport {
        clique.describe(task, 1, &[]).expect("the task is in a communicator")
    }

    /// Returns what a task tells: how many it has called, begun and ended, and the numbers of its collectives.
    fn told(clique: &SimulatedClique, task: u32) -> (u64, u64, u64, Vec<u64>) {
        let told = describe(clique, task);
        let function = &told.functions[0];
        let numbers = told.operations.iter().map(|operation| operation.number).collect();
        (told.collectives, function.begun, function.ended, numbers)
    }

    #[tokio::test(start_paused = true)]
    async fn a_collective_ends_for_all_when_the_last_gpu_has_begun_it() {
        let clique = clique(2);
        clique.call(0, 0, true);
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(
            told(&clique, 0),
            (3, 0, 0, vec![0, 1, 2]),
            "totals of times are known from the first end on"
        );
        assert_eq!(describe(&clique, 0).operations[0].begun_us, Some(1_000_000));
        clique.run_step(1, 0, true).await;
        assert_eq!(told(&clique, 0), (3, 3, 3, vec![2]));
        let on_gpu = [0, 1].map(|task| describe(&clique, task).functions[0].gpu_ns / 1_000_000);
        assert_eq!(on_gpu, [1006, 6], "the GPU of the task that came first has waited");
        let chains = [0, 1].map(|task| describe(&clique, task).operations[0].chain);
        assert_eq!(chains[0], chains[1]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_held_gpu_begins_nothing_until_its_last_hold_ends() {
        let clique = clique(2);
        let first = clique.hold_gpu(1);
        clique.call(0, 0, true);
        clique.call(1, 0, true);
        let second = clique.hold_gpu(1);
        tokio::time::advance(Duration::from_secs(1)).await;
        clique.release_gpu(1, first);
        let begun = |task| describe(&clique, task).operations[0].begun_us;
        assert_eq!((begun(0), begun(1)), (Some(1_000_000), None));
        clique.release_gpu(1, second);
        tokio::time::advance(4 * TIME).await;
        assert_eq!((told(&clique, 0).2, told(&clique, 1).2), (3, 3));
        let on_gpu = [0, 1].map(|task| describe(&clique, task).functions[0].gpu_ns / 1_000_000);
        assert_eq!(on_gpu, [1006, 6], "the GPU that was held has waited for nobody");
    }

    #[tokio::test(start_paused = true)]
    async fn when_a_task_leaves_the_step_is_over_and_the_next_is_without_it() {
        let clique = clique(3);
        let before = describe(&clique, 0).hash;
        let leaves = async {
            tokio::task::yield_now().await;
            clique.leave(1);
        };
        tokio::join!(clique.run_step(0, 0, false), leaves);
        // A task that comes to this step later does not wait either.
        clique.run_step(2, 0, false).await;
        assert!(clique.describe(1, 1, &[]).is_none());
        tokio::join!(clique.run_step(0, 1, false), clique.run_step(2, 1, false));
        let after = describe(&clique, 2);
        assert_eq!((after.rank, after.ranks, after.collectives), (1, 2, 3));
        assert_ne!(after.hash, before);
    }

    #[tokio::test(start_paused = true)]
    async fn a_task_that_comes_back_is_in_the_communicator_of_the_step_after_its_first_one() {
        let clique = clique(2);
        clique.hold_gpu(1);
        clique.leave(1);
        clique.run_step(0, 0, false).await;
        // It comes while the other one is between two steps, and calls before it.
        clique.run_step(1, 1, false).await;
        assert!(clique.describe(1, 1, &[]).is_none());
        clique.run_step(0, 1, false).await;
        tokio::join!(clique.run_step(0, 2, false), clique.run_step(1, 2, false));
        assert_eq!(
            (describe(&clique, 1).ranks, told(&clique, 1).0),
            (2, 3),
            "another process has no held GPU"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn when_all_have_left_another_run_begins_with_its_first_step() {
        let clique = clique(2);
        tokio::join!(clique.run_step(0, 7, false), clique.run_step(1, 7, false));
        clique.leave(0);
        clique.leave(1);
        tokio::join!(clique.run_step(0, 0, false), clique.run_step(1, 0, false));
        assert_eq!(told(&clique, 0).0, 3);
    }

    #[tokio::test(start_paused = true)]
    async fn a_report_has_what_the_service_asked_for_as_far_as_it_is_known() {
        let clique = clique(1);
        for step in 0..20 {
            clique.run_step(0, step, false).await;
        }
        let hash = describe(&clique, 0).hash;
        let asked = |first| vec![pb::WantedCollectives { hash, rank: 0, first }];
        let numbers = |wanted: &[pb::WantedCollectives]| -> Vec<u64> {
            let told = clique.describe(0, 1, wanted).unwrap();
            told.operations.iter().map(|operation| operation.number).collect()
        };
        assert_eq!(numbers(&asked(50)), (50..60).collect::<Vec<_>>());
        assert_eq!(numbers(&asked(0)), [59], "the oldest are not known any more");
        assert_eq!(numbers(&asked(u64::MAX)), [59]);
        let operation = &describe(&clique, 0).operations[0];
        assert_eq!((operation.timed, operation.begun_us, operation.ended_us), (false, None, None));
    }

    #[tokio::test(start_paused = true)]
    async fn of_the_longest_step_every_end_is_known() {
        let settings = StoryCollectives { each_step: COLLECTIVES_MAX, ..StoryCollectives::default() };
        let clique = SimulatedClique::new(1, settings);
        clique.call(0, 0, true);
        assert_eq!(told(&clique, 0).2, 0, "all ends are in the future");
    }
}
