//! Schedules of realistic programs: an elastic loop (begin barrier, steps, end barrier, checkpoint) whose tasks are
//! killed and restarted at the worst moments. The other tasks must never wait for ever, and no task may pass a
//! barrier early. The simulated coordinator checks the second rule after every input.

use std::time::Duration;

use muster::coordination::{
    CallId, Code, ConnectionEnd, ConnectionId, ExclusionTarget, JobSettings, OperatorCommand, Reply, Request,
    StatedIncarnations, TaskId, TaskIncarnation, Timestamp,
};

use crate::coordinator::SimulatedCoordinator;
use crate::for_every_seed;

#[derive(Debug, Clone, Copy)]
enum WorkerPhase {
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
    phase: WorkerPhase,
    /// The agent's counters of the two barriers.
    counters: [i64; 2],
    heartbeat_at: Timestamp,
    rounds: u32,
}

struct ElasticProgram {
    rng: fastrand::Rng,
    coordinator: SimulatedCoordinator,
    workers: Vec<Worker>,
}

const BARRIERS: [&str; 2] = ["begin", "end"];

impl ElasticProgram {
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
                let life = world.draw_task_incarnation();
                let dead = WorkerPhase::Dead(world.now);
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

    fn random_time_within(&mut self, most_ms: u64) -> Timestamp {
        self.coordinator.now.after(Duration::from_millis(self.rng.u64(1..most_ms)))
    }

    fn stated_incarnations(&self, index: usize) -> StatedIncarnations {
        StatedIncarnations {
            service: self.coordinator.current_service_incarnation(),
            task: self.workers[index].life,
        }
    }

    fn start_worker(&mut self, index: usize) {
        let connection = self.coordinator.connect();
        let life = self.coordinator.draw_task_incarnation();
        let task = self.workers[index].task;
        let request = Request::Register { task, incarnation: life, recoverable: false };
        let call = self.coordinator.call(connection, request);
        let worker = &mut self.workers[index];
        worker.connection = connection;
        worker.life = life;
        worker.counters = [-1; 2];
        worker.heartbeat_at = self.coordinator.now.after(Duration::from_secs(5));
        worker.phase = WorkerPhase::Registering(call);
    }

    fn kill_worker(&mut self, index: usize) {
        self.coordinator.close_connection(self.workers[index].connection, ConnectionEnd::Reset);
        // Some return before their loss is detected, some long after.
        let most = if self.rng.bool() { 300 } else { 30_000 };
        let back = self.random_time_within(most);
        self.workers[index].phase = WorkerPhase::Dead(back);
    }

    /// Excludes the worker for a while; meanwhile its supervisor restarts it repeatedly.
    fn exclude_worker(&mut self, index: usize) {
        let target = ExclusionTarget::Task(self.workers[index].task);
        let expires_in = Some(Duration::from_millis(self.rng.u64(1..20_000)));
        if self
            .coordinator
            .perform_operator_command(OperatorCommand::Exclude { target, expires_in, end_run: false })
            .is_ok()
        {
            self.kill_worker(index);
        }
    }

    fn call_barrier(&mut self, index: usize, which: usize) -> CallId {
        let claim = self.stated_incarnations(index);
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
    fn has_passed_barrier(&mut self, index: usize, call: CallId, which: usize) -> bool {
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
            WorkerPhase::Dead(until) if now >= until => self.start_worker(index),
            WorkerPhase::Registering(call) => {
                let answer = self.coordinator.answers.get(&call);
                let excluded = answer.and_then(|answer| answer.as_ref().err());
                if excluded.is_some_and(|failure| failure.code == Code::PermissionDenied) {
                    self.kill_worker(index);
                } else if let Some(answer) = answer {
                    assert!(answer.is_ok(), "task {index} cannot register: {answer:?}");
                    let call = self.call_barrier(index, 0);
                    self.workers[index].phase = WorkerPhase::AtBegin(call);
                }
            }
            WorkerPhase::AtBegin(call) if self.has_passed_barrier(index, call, 0) => {
                let until = self.random_time_within(3_000);
                self.workers[index].phase = WorkerPhase::Stepping(until);
            }
            WorkerPhase::Stepping(until) if now >= until => {
                let call = self.call_barrier(index, 1);
                self.workers[index].phase = WorkerPhase::AtEnd(call);
            }
            WorkerPhase::AtEnd(call) if self.has_passed_barrier(index, call, 1) => {
                let until = self.random_time_within(1_000);
                self.workers[index].phase = WorkerPhase::Saving(until);
            }
            WorkerPhase::Saving(until) if now >= until => {
                self.workers[index].rounds += 1;
                let call = self.call_barrier(index, 0);
                self.workers[index].phase = WorkerPhase::AtBegin(call);
            }
            _ => {}
        }
        let worker = &mut self.workers[index];
        let alive = !matches!(worker.phase, WorkerPhase::Dead(_) | WorkerPhase::Registering(_));
        if alive && now >= worker.heartbeat_at {
            worker.heartbeat_at = now.after(Duration::from_secs(5));
            let (connection, task, incarnation) = (worker.connection, worker.task, worker.life);
            let claim = self.stated_incarnations(index);
            let call =
                self.coordinator.call_as(connection, Some(claim), Request::Heartbeat { task, incarnation });
            let answer = &self.coordinator.answers[&call];
            assert!(answer.is_ok(), "a live task's heartbeat: {answer:?}");
        }
    }

    fn run_steps(&mut self, steps: u32, kills: bool) {
        for _ in 0..steps {
            // A restart of every task is another run, which other tests cover.
            let dead = self.workers.iter().filter(|w| matches!(w.phase, WorkerPhase::Dead(_))).count();
            if kills && self.rng.u8(0..60) == 0 && dead + 1 < self.workers.len() && self.has_run_started() {
                let victim = self.rng.usize(0..self.workers.len());
                if !matches!(self.workers[victim].phase, WorkerPhase::Dead(_) | WorkerPhase::Registering(_)) {
                    if self.rng.u8(0..3) == 0 {
                        self.exclude_worker(victim);
                    } else {
                        self.kill_worker(victim);
                    }
                }
            }
            let first = self.rng.usize(0..self.workers.len());
            for offset in 0..self.workers.len() {
                self.advance_worker((first + offset) % self.workers.len());
            }
            self.coordinator.advance_time(Duration::from_millis(self.rng.u64(1..200)));
        }
    }

    fn has_run_started(&self) -> bool {
        self.coordinator.job_view().run.started_at.is_some()
    }
}

#[test]
fn a_restarted_task_never_deadlocks_its_peers_whenever_it_restarts() {
    for_every_seed("a_restarted_task", 4, |seed| {
        let mut program = ElasticProgram::new(seed);
        program.run_steps(50, false);
        program.coordinator.record_start_of_replay();
        program.run_steps(600, true);
        // The dead tasks restart, and from now on every round must complete.
        program.run_steps(400, false);
        let before: Vec<u32> = program.workers.iter().map(|worker| worker.rounds).collect();
        program.run_steps(400, false);
        for (worker, before) in program.workers.iter().zip(before) {
            let stuck = || {
                format!(
                    "task {} is stuck in {:?}: {:#?}",
                    worker.task,
                    worker.phase,
                    program.coordinator.job_view().run.barriers
                )
            };
            assert!(worker.rounds > before + 1, "{}", stuck());
        }
        program.coordinator.close_all_and_check();
    });
}
