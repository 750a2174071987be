//! The collectives of a simulated job: one clique of all tasks, in which each has one GPU.
//!
//! A collective ends at one moment on all GPUs: some time after the last of them has begun it. A GPU begins a collective when its
//! program has called it and the one before has ended. So what all ranks have called decides everything, and each rank tells the
//! service the part of it that NCCL's profiler plug-in would see. Begin at [`SimulatedClique`].

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

use super::story::StoryCollectives;
use crate::clock;
use crate::proto::muster::v1 as pb;

/// The steps of which a rank knows when it called their collectives.
const STEPS_KEPT: usize = 8;
/// The ended collectives of which the end is known.
const ENDS_KEPT: usize = 256;
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

/// What one rank has done in the present communicator.
#[derive(Debug, Clone, Default)]
struct SimulatedRank {
    has_joined: bool,
    steps: VecDeque<CalledStep>,
    called: u64,
    /// The first collective that its GPU does not begin.
    held_from: Option<u64>,
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

#[derive(Debug)]
struct CliqueState {
    hash: u64,
    ranks: Vec<SimulatedRank>,
    /// The ranks that are not ready for the collective after those that have ended.
    not_ready: usize,
    /// The ends of the latest collectives, the last one at the back. An end may be in the future.
    ends: VecDeque<Instant>,
    /// The number of collectives whose end is known.
    ended: u64,
    changed_at: Instant,
}

impl CliqueState {
    fn begin(ranks: usize, now: Instant) -> Self {
        Self {
            hash: clock::random_u64(),
            ranks: vec![SimulatedRank::default(); ranks],
            not_ready: ranks,
            ends: VecDeque::new(),
            ended: 0,
            changed_at: now,
        }
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
        let Some(before) = number.checked_sub(1) else { return Some(called) };
        self.end_of(before).map(|end| end.max(called))
    }

    /// Ends the collectives that all GPUs have begun.
    fn advance(&mut self, time: Duration, now: Instant) {
        let ready = self.ranks.iter().map(SimulatedRank::ready).min().unwrap_or_default();
        while self.ended < ready {
            let number = self.ended;
            let last_call =
                self.ranks.iter().filter_map(|rank| rank.call_of(number)).map(|step| step.at).max();
            let begun = self.ends.back().copied().into_iter().chain(last_call).max().unwrap_or(now);
            let end = begun.max(self.changed_at) + time;
            for at in 0..self.ranks.len() {
                let call = self.ranks[at].call_of(number).filter(|step| step.is_timed);
                let begun = call.and_then(|step| self.begin_of(&self.ranks[at], number, step.at));
                if let Some(begun) = begun {
                    self.ranks[at].timed += 1;
                    self.ranks[at].on_gpu += end - begun;
                }
            }
            self.ends.push_back(end);
            self.ended += 1;
            if self.ends.len() > ENDS_KEPT {
                self.ends.pop_front();
            }
        }
        let ended = self.ended;
        self.not_ready = self.ranks.iter().filter(|rank| rank.ready() <= ended).count();
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
    /// Begins a clique of so many ranks.
    pub fn new(ranks: u32, settings: StoryCollectives) -> Self {
        let state = Mutex::new(CliqueState::begin(ranks as usize, Instant::now()));
        Self { settings, state, changed: Notify::new() }
    }

    fn lock(&self) -> MutexGuard<'_, CliqueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Joins with a new life of a task. If it was there before, all ranks go on in a new communicator, as JAX makes one.
    pub fn join(&self, task: u32) {
        let mut state = self.lock();
        if state.ranks[task as usize].has_joined {
            *state = CliqueState::begin(state.ranks.len(), Instant::now());
            for rank in &mut state.ranks {
                rank.has_joined = true;
            }
            self.changed.notify_waiters();
        }
        state.ranks[task as usize].has_joined = true;
    }

    /// Calls the collectives of a step, and waits until they have ended, or until the communicator is replaced.
    pub async fn run_step(&self, task: u32, is_timed: bool) {
        let (hash, last) = self.call(task, is_timed);
        loop {
            let changed = self.changed.notified();
            let end = {
                let state = self.lock();
                if state.hash != hash {
                    return;
                }
                // The end of an old one is not known any more.
                if state.ended > last { Some(state.end_of(last).unwrap_or_else(Instant::now)) } else { None }
            };
            match end {
                Some(end) => return sleep_until(end).await,
                None => changed.await,
            }
        }
    }

    /// Calls the collectives of a step. Returns the communicator, and the number of the last one.
    fn call(&self, task: u32, is_timed: bool) -> (u64, u64) {
        let mut state = self.lock();
        let (now, count, before) = (Instant::now(), u64::from(self.settings.each_step), state.ended);
        let rank = &mut state.ranks[task as usize];
        let was_ready = rank.ready() > before;
        rank.steps.push_back(CalledStep { first: rank.called, count, at: now, is_timed });
        if rank.steps.len() > STEPS_KEPT {
            rank.steps.pop_front();
        }
        rank.called += count;
        let (last, is_ready) = (rank.called - 1, rank.ready() > before);
        state.changed_at = now;
        self.advance_if_ready(&mut state, was_ready, is_ready);
        (state.hash, last)
    }

    fn advance_if_ready(&self, state: &mut CliqueState, was_ready: bool, is_ready: bool) {
        match (was_ready, is_ready) {
            (false, true) => state.not_ready -= 1,
            (true, false) => state.not_ready += 1,
            _ => {}
        }
        if state.not_ready == 0 {
            state.advance(self.settings.time.0, Instant::now());
            self.changed.notify_waiters();
        }
    }

    /// Lets the GPU of a task begin no further collective, or again.
    pub fn hold_gpu(&self, task: u32, is_held: bool) {
        let mut state = self.lock();
        let ended = state.ended;
        let rank = &mut state.ranks[task as usize];
        let was_ready = rank.ready() > ended;
        rank.held_from = is_held.then_some(ended);
        let is_ready = rank.ready() > ended;
        if !is_held {
            state.changed_at = Instant::now();
        }
        self.advance_if_ready(&mut state, was_ready, is_ready);
    }

    /// Returns whether NCCL is asked for times from the start.
    pub fn is_always_timed(&self) -> bool {
        self.settings.timed
    }

    /// Returns what a task tells of its communicator. `wanted` is what the service asked for.
    pub fn describe(
        &self,
        task: u32,
        hosts: u32,
        wanted: &[pb::WantedCollectives],
    ) -> pb::CommunicatorReport {
        let (state, now) = (self.lock(), Instant::now());
        let rank = &state.ranks[task as usize];
        let has_ended = |number: u64| state.end_of(number).is_none_or(|end| end <= now);
        let mut ended = state.ended.min(rank.called);
        while ended > 0 && !has_ended(ended - 1) {
            ended -= 1;
        }
        let unended = ended..rank.called.min(ended + UNENDED_MAX);
        let asked = wanted.iter().filter(|wanted| (wanted.hash, wanted.rank) == (state.hash, task));
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
        pb::CommunicatorReport {
            hash: state.hash,
            rank: task,
            ranks: u32::try_from(state.ranks.len()).unwrap_or(u32::MAX),
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
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIME: Duration = Duration::from_millis(2);

    fn clique(ranks: u32) -> SimulatedClique {
        let clique =
            SimulatedClique::new(ranks, StoryCollectives { each_step: 3, ..StoryCollectives::default() });
        (0..ranks).for_each(|task| clique.join(task));
        clique
    }

    /// Returns what a task tells: how many it has called, begun and ended, and the numbers of its collectives.
    fn told(clique: &SimulatedClique, task: u32) -> (u64, u64, u64, Vec<u64>) {
        let told = clique.describe(task, 1, &[]);
        let function = &told.functions[0];
        let numbers = told.operations.iter().map(|operation| operation.number).collect();
        (told.collectives, function.begun, function.ended, numbers)
    }

    #[tokio::test(start_paused = true)]
    async fn a_collective_ends_for_all_when_the_last_gpu_has_begun_it() {
        let clique = clique(2);
        clique.call(0, true);
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(told(&clique, 0), (3, 0, 0, vec![0, 1, 2]), "times are known from the first end on");
        assert_eq!(clique.describe(0, 1, &[]).operations[0].begun_us, Some(1_000_000));
        tokio::join!(clique.run_step(1, true), tokio::time::advance(TIME));
        tokio::time::advance(3 * TIME).await;
        assert_eq!(told(&clique, 0), (3, 3, 3, vec![2]));
        let on_gpu = [0, 1].map(|task| clique.describe(task, 1, &[]).functions[0].gpu_ns / 1_000_000);
        assert_eq!(on_gpu, [1006, 6], "the GPU of the task that came first has waited");
        let chains = [0, 1].map(|task| clique.describe(task, 1, &[]).operations[0].chain);
        assert_eq!(chains[0], chains[1]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_held_gpu_begins_nothing_until_it_goes_on() {
        let clique = clique(2);
        clique.hold_gpu(1, true);
        clique.call(0, true);
        clique.call(1, true);
        tokio::time::advance(Duration::from_secs(1)).await;
        let begun = |task| clique.describe(task, 1, &[]).operations[0].begun_us;
        assert_eq!((begun(0), begun(1)), (Some(1_000_000), None));
        clique.hold_gpu(1, false);
        tokio::time::advance(4 * TIME).await;
        assert_eq!((told(&clique, 0).2, told(&clique, 1).2), (3, 3));
    }

    #[tokio::test(start_paused = true)]
    async fn a_task_that_starts_again_ends_the_waits_of_the_others() {
        let clique = clique(3);
        let before = clique.describe(0, 1, &[]).hash;
        let waiting = clique.run_step(0, false);
        let again = async {
            tokio::task::yield_now().await;
            clique.join(1);
        };
        tokio::join!(waiting, again);
        assert_ne!(clique.describe(0, 1, &[]).hash, before);
        assert_eq!(told(&clique, 0).0, 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_report_has_what_the_service_asked_for_as_far_as_it_is_known() {
        let clique = clique(1);
        for _ in 0..20 {
            clique.run_step(0, false).await;
        }
        let hash = clique.describe(0, 1, &[]).hash;
        let asked = |first| vec![pb::WantedCollectives { hash, rank: 0, first }];
        let numbers = |wanted: &[pb::WantedCollectives]| -> Vec<u64> {
            clique.describe(0, 1, wanted).operations.iter().map(|operation| operation.number).collect()
        };
        assert_eq!(numbers(&asked(50)), (50..60).collect::<Vec<_>>());
        assert_eq!(numbers(&asked(0)), [59], "the oldest are not known any more");
        assert_eq!(numbers(&asked(u64::MAX)), [59]);
        let operation = &clique.describe(0, 1, &[]).operations[0];
        assert_eq!((operation.timed, operation.begun_us, operation.ended_us), (false, None, None));
    }
}
