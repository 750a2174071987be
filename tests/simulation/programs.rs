//! Schedules of realistic programs: an elastic loop (begin barrier, steps, end barrier, checkpoint) whose tasks are
//! killed and restarted at the worst moments. The other tasks must never wait for ever, and no task may pass a
//! barrier early. The simulated coordinator checks the second rule after every input.

use std::time::Duration;

use muster::coordination::{
    CallId, ClaimedIncarnations, Code, ConnectionEnd, ConnectionId, ExclusionTarget, JobSettings,
    OperatorCommand, Reply, Request, TaskId, TaskIncarnation, Timestamp,
};

use crate::coordinator::SimulatedCoordinator;
use crate::for_every_seed;

#[derive(Debug, Clone, Copy)]
enum Phase {
    Registering(CallId),
    AtBegin(CallId),
    Stepping(Timestamp),
    AtEnd(CallId),
    Saving(Timestamp),
    Dead(Timestamp),
}

struct Worker {
    task: TaskId,
    connection: ConnectionId,
    life: TaskIncarnation,
    phase: Phase,
    /// The agent's counters of the two barriers.
    counters: [i64; 2],
    heartbeat_at: Timestamp,
    rounds: u32,
}

struct Program {
    rng: fastrand::Rng,
    coordinator: SimulatedCoordinator,
    workers: Vec<Worker>,
}

const BARRIERS: [&str; 2] = ["begin", "end"];

impl Program {
    fn new(seed: u64) -> Self {
        let mut rng = fastrand::Rng::with_seed(seed);
        let tasks = rng.u32(2..7);
        let mut settings = JobSettings::new(tasks);
        settings.recoverable = true;
        settings.heartbeat_timeout = Duration::from_secs(10);
        if rng.bool() {
            settings.disconnect_grace = None;
        }
        let mut world = SimulatedCoordinator::new(settings, seed);
        let workers = (0..tasks.cast_signed())
            .map(|task| {
                let connection = world.connect();
                let life = world.fresh_life();
                let dead = Phase::Dead(world.now);
                let heartbeat_at = world.now;
                Worker {
                    task: TaskId(task),
                    connection,
                    life,
                    phase: dead,
                    counters: [-1; 2],
                    heartbeat_at,
                    rounds: 0,
                }
            })
            .collect();
        Self { rng, coordinator: world, workers }
    }

    fn some_time(&mut self, most_ms: u64) -> Timestamp {
        self.coordinator.now.after(Duration::from_millis(self.rng.u64(1..most_ms)))
    }

    fn claim(&self, index: usize) -> ClaimedIncarnations {
        ClaimedIncarnations { service: self.coordinator.service(), task: self.workers[index].life }
    }

    fn start(&mut self, index: usize) {
        let connection = self.coordinator.connect();
        let life = self.coordinator.fresh_life();
        let task = self.workers[index].task;
        let request = Request::Register { task, incarnation: life, recoverable: false };
        let call = self.coordinator.call(connection, request);
        let worker = &mut self.workers[index];
        worker.connection = connection;
        worker.life = life;
        worker.counters = [-1; 2];
        worker.heartbeat_at = self.coordinator.now.after(Duration::from_secs(5));
        worker.phase = Phase::Registering(call);
    }

    fn kill(&mut self, index: usize) {
        self.coordinator.close(self.workers[index].connection, ConnectionEnd::Reset);
        // Some return before their loss is detected, some long after.
        let most = if self.rng.bool() { 300 } else { 30_000 };
        let back = self.some_time(most);
        self.workers[index].phase = Phase::Dead(back);
    }

    /// Excludes the worker for a while; meanwhile its supervisor restarts it repeatedly.
    fn exclude(&mut self, index: usize) {
        let target = ExclusionTarget::Task(self.workers[index].task);
        let expires_in = Some(Duration::from_millis(self.rng.u64(1..20_000)));
        if self.coordinator.act(OperatorCommand::Exclude { target, expires_in, end_run: false }).is_ok() {
            self.kill(index);
        }
    }

    fn wait_at(&mut self, index: usize, which: usize) -> CallId {
        let claim = self.claim(index);
        let worker = &self.workers[index];
        let request = Request::Barrier {
            id: BARRIERS[which].to_owned(),
            counter: worker.counters[which] + 1,
            timeout_ms: 1_000_000_000,
            members: None,
            task: worker.task,
        };
        self.coordinator.call_as(worker.connection, Some(claim), request)
    }

    /// Returns whether the barrier at which the worker waits has passed; an error ends the process.
    fn passed(&mut self, index: usize, call: CallId, which: usize) -> bool {
        match self.coordinator.answers.get(&call) {
            None => false,
            Some(Ok(Reply::BarrierPassed(counter))) => {
                self.workers[index].counters[which] = *counter;
                true
            }
            Some(other) => panic!("task {} at {}: {other:?}", self.workers[index].task, BARRIERS[which]),
        }
    }

    fn advance_worker(&mut self, index: usize) {
        let now = self.coordinator.now;
        let phase = self.workers[index].phase;
        match phase {
            Phase::Dead(until) if now >= until => self.start(index),
            Phase::Registering(call) => {
                let answer = self.coordinator.answers.get(&call);
                let excluded = answer.and_then(|answer| answer.as_ref().err());
                if excluded.is_some_and(|failure| failure.code == Code::PermissionDenied) {
                    self.kill(index);
                } else if let Some(answer) = answer {
                    assert!(answer.is_ok(), "task {index} cannot register: {answer:?}");
                    let call = self.wait_at(index, 0);
                    self.workers[index].phase = Phase::AtBegin(call);
                }
            }
            Phase::AtBegin(call) if self.passed(index, call, 0) => {
                let until = self.some_time(3_000);
                self.workers[index].phase = Phase::Stepping(until);
            }
            Phase::Stepping(until) if now >= until => {
                let call = self.wait_at(index, 1);
                self.workers[index].phase = Phase::AtEnd(call);
            }
            Phase::AtEnd(call) if self.passed(index, call, 1) => {
                let until = self.some_time(1_000);
                self.workers[index].phase = Phase::Saving(until);
            }
            Phase::Saving(until) if now >= until => {
                self.workers[index].rounds += 1;
                let call = self.wait_at(index, 0);
                self.workers[index].phase = Phase::AtBegin(call);
            }
            _ => {}
        }
        let worker = &mut self.workers[index];
        let alive = !matches!(worker.phase, Phase::Dead(_) | Phase::Registering(_));
        if alive && now >= worker.heartbeat_at {
            worker.heartbeat_at = now.after(Duration::from_secs(5));
            let (connection, task, incarnation) = (worker.connection, worker.task, worker.life);
            let claim = self.claim(index);
            let call =
                self.coordinator.call_as(connection, Some(claim), Request::Heartbeat { task, incarnation });
            let answer = &self.coordinator.answers[&call];
            assert!(answer.is_ok(), "a live task's heartbeat: {answer:?}");
        }
    }

    fn run_for(&mut self, steps: u32, kills: bool) {
        for _ in 0..steps {
            // A restart of every task is another run, which other tests cover.
            let dead = self.workers.iter().filter(|w| matches!(w.phase, Phase::Dead(_))).count();
            if kills && self.rng.u8(0..60) == 0 && dead + 1 < self.workers.len() && self.all_were_in() {
                let victim = self.rng.usize(0..self.workers.len());
                if !matches!(self.workers[victim].phase, Phase::Dead(_) | Phase::Registering(_)) {
                    if self.rng.u8(0..3) == 0 {
                        self.exclude(victim);
                    } else {
                        self.kill(victim);
                    }
                }
            }
            let first = self.rng.usize(0..self.workers.len());
            for offset in 0..self.workers.len() {
                self.advance_worker((first + offset) % self.workers.len());
            }
            self.coordinator.advance(Duration::from_millis(self.rng.u64(1..200)));
        }
    }

    fn all_were_in(&self) -> bool {
        self.coordinator.view().run.started_at.is_some()
    }
}

#[test]
fn a_restarted_task_never_deadlocks_its_peers_whenever_it_restarts() {
    for_every_seed("a_restarted_task", 4, |seed| {
        let mut program = Program::new(seed);
        program.run_for(50, false);
        program.coordinator.snapshot();
        program.run_for(600, true);
        // The dead tasks restart, and from now on every round must complete.
        program.run_for(400, false);
        let before: Vec<u32> = program.workers.iter().map(|worker| worker.rounds).collect();
        program.run_for(400, false);
        for (worker, before) in program.workers.iter().zip(before) {
            let stuck = || {
                format!(
                    "task {} is stuck in {:?}: {:#?}",
                    worker.task,
                    worker.phase,
                    program.coordinator.view().run.barriers
                )
            };
            assert!(worker.rounds > before + 1, "{}", stuck());
        }
        program.coordinator.end();
    });
}
