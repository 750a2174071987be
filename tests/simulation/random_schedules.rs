//! Random schedules: any call, with any argument, at any time, from clients that connect, leave, restart and
//! fall silent.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use muster::coordination::{
    AutoExcludeRule, CallId, CallOutcome, Code, CommandOutcome, CommandRefusal, ConnectionEnd, ConnectionId,
    ErrorDelivery, ExclusionId, ExclusionTarget, Input, JobBounds, JobSettings, OperatorCommand, Request,
    ServiceIncarnation, SettingsChange, StatedIncarnations, TaskId, TaskIncarnation, TaskSet,
};

use crate::coordinator::{SimulatedCoordinator, named_host};
use crate::for_every_seed;

/// A simulated client process.
struct SimulatedClient {
    connection: ConnectionId,
    task: TaskId,
    life: TaskIncarnation,
    service: ServiceIncarnation,
    /// Whether it states its incarnation, as generation C does.
    claims: bool,
}

struct RandomSchedule {
    rng: fastrand::Rng,
    coordinator: SimulatedCoordinator,
    tasks: u32,
    clients: Vec<SimulatedClient>,
    gone: Vec<SimulatedClient>,
}

fn random_job_settings(rng: &mut fastrand::Rng, tasks: u32) -> JobSettings {
    let mut settings = JobSettings::new(tasks);
    settings.recoverable = rng.bool();
    settings.heartbeat_timeout = Duration::from_secs(rng.u64(2..20));
    settings.register_timeout = Duration::from_secs(rng.u64(10..200));
    settings.shutdown_timeout = Duration::from_secs(rng.u64(0..60));
    settings.disconnect_grace = rng.bool().then(|| Duration::from_millis(rng.u64(0..2_000)));
    settings.error_delivery =
        [ErrorDelivery::Auto, ErrorDelivery::Hold, ErrorDelivery::Cancel][rng.usize(0..3)];
    let bounds = &mut settings.bounds;
    if rng.u8(0..4) == 0 {
        bounds.waiters = rng.usize(1..30);
        bounds.waited_key_bytes = rng.usize(0..8);
        bounds.exchanged_device_bytes = rng.usize(0..400);
        bounds.barrier_members_in_progress = rng.usize(0..20);
        bounds.barriers_in_progress = rng.usize(1..5);
        bounds.barrier_memory_bytes = rng.usize(0..8_000);
        bounds.live_sets_in_progress = rng.usize(1..3);
        bounds.keys = rng.usize(1..10);
        bounds.store_bytes = rng.usize(0..200);
        bounds.incarnations_kept = rng.usize(0..3);
        bounds.runs_kept = rng.usize(0..3);
    }
    settings
}

impl RandomSchedule {
    fn new(seed: u64) -> Self {
        let mut rng = fastrand::Rng::with_seed(seed);
        // Usually few tasks, so that their calls interact; sometimes many.
        let tasks = match rng.u8(0..100) {
            0 => rng.u32(500..2_000),
            1..20 => rng.u32(8..40),
            _ => rng.u32(1..6),
        };
        let mut world = SimulatedCoordinator::new(random_job_settings(&mut rng, tasks), seed);
        // A small budget defers work even for two calls.
        if rng.u8(0..3) == 0 {
            let most = if tasks > 100 { 256 } else { 4 };
            world.core.set_work_budget(rng.usize(1..most));
        }
        Self { rng, coordinator: world, tasks, clients: Vec::new(), gone: Vec::new() }
    }

    fn start_client(&mut self, task: TaskId) {
        let connection = if self.rng.u8(0..8) == 0 && !self.clients.is_empty() {
            self.clients[self.rng.usize(0..self.clients.len())].connection
        } else {
            // A few hosts, some of which several tasks share.
            let host = self.rng.u8(1..5);
            self.coordinator.connect_from_host(host)
        };
        let life = self.coordinator.draw_task_incarnation();
        let claims = self.rng.bool();
        let recoverable = self.rng.u8(0..8) == 0;
        self.coordinator.call(connection, Request::Register { task, incarnation: life, recoverable });
        let service = self.coordinator.current_service_incarnation();
        self.clients.push(SimulatedClient { connection, task, life, service, claims });
    }

    fn random_task(&mut self) -> TaskId {
        match self.rng.u8(0..40) {
            0 => TaskId(-1),
            1 => TaskId(i32::MAX),
            _ => TaskId(self.rng.i32(0..i32::try_from(self.tasks).expect("few tasks"))),
        }
    }

    fn random_task_set(&mut self, with: TaskId) -> TaskSet {
        if self.rng.bool() {
            return TaskSet::new((0..self.tasks.cast_signed()).map(TaskId).collect());
        }
        let size = self.rng.usize(0..5);
        let mut ids: Vec<TaskId> = (0..size).map(|_| self.random_task()).collect();
        ids.push(with);
        TaskSet::new(ids)
    }

    fn random_key(&mut self) -> Bytes {
        let keys = [
            "",
            "/",
            "a",
            "/a/",
            "a/b",
            "a//c",
            "n",
            "cpu:local_topology/cpu/0",
            "RECEIVED_PREEMPTION_NOTICE",
        ];
        Bytes::from_static(keys[self.rng.usize(0..keys.len())].as_bytes())
    }

    fn random_request(&mut self, task: TaskId, life: TaskIncarnation) -> Request {
        let id = ["x", "y", "z"][self.rng.usize(0..3)].to_owned();
        let counter = match self.rng.u8(0..20) {
            0 => -1,
            1 => i64::MAX,
            2 => i64::MIN,
            _ => self.rng.i64(0..4),
        };
        match self.rng.u8(0..24) {
            0..4 => Request::Heartbeat { task, incarnation: life },
            4 | 5 => Request::PollForError { task },
            6 => Request::Shutdown { task },
            7 => Request::Reset { task },
            8 => Request::ReportError { task, code: self.rng.i32(-2..20), message: "ill".repeat(3) },
            9 => Request::WaitForAllTasks { task, devices: vec![Bytes::from_static(b"d")] },
            10 => Request::TaskStates { tasks: vec![task] },
            11 => Request::Watch { version: self.rng.i64(-2..30) },
            12 => Request::Insert {
                key: self.random_key(),
                value: Bytes::from_static(b"7"),
                overwrite: self.rng.bool(),
            },
            13 => Request::Get { key: self.random_key() },
            14 => Request::Increment { key: self.random_key(), by: self.rng.i64(..) },
            15 => Request::List { directory: self.random_key() },
            16 => Request::Delete { key: self.random_key() },
            17 => Request::CancelBarrier { id, counter, task },
            18 | 19 => Request::LiveSet { task, tasks: self.random_task_set(task) },
            _ => {
                let members = if self.rng.u8(0..4) == 0 { Some(self.random_task_set(task)) } else { None };
                let timeout_ms = if self.rng.u8(0..10) == 0 { -5 } else { self.rng.i64(0..60_000) };
                Request::Barrier { id, counter, timeout_ms, members, task }
            }
        }
    }

    fn make_random_call(&mut self, client: usize) {
        let (connection, mut task, mut life, service, claims) = {
            let client = &self.clients[client];
            (client.connection, client.task, client.life, client.service, client.claims)
        };
        if self.rng.u8(0..30) == 0 {
            task = self.random_task();
        }
        if self.rng.u8(0..30) == 0 {
            life = TaskIncarnation(self.rng.u64(..));
        }
        let claim = claims.then_some(StatedIncarnations { service, task: life });
        let request = self.random_request(task, life);
        self.coordinator.call_as(connection, claim, request);
    }

    /// Issues an operator's command, sensible or not.
    fn perform_random_operator_command(&mut self) {
        let act = match self.rng.u8(0..12) {
            0..5 => {
                let target = match self.rng.u8(0..4) {
                    0 => match self.rng.u8(1..5) {
                        4 => named_host("node-d", &["10.0.0.4"], &[0, 2]),
                        last => ExclusionTarget::Host([10, 0, 0, last].into()),
                    },
                    _ => ExclusionTarget::Task(self.random_task()),
                };
                let expires_in = self.rng.bool().then(|| Duration::from_millis(self.rng.u64(0..60_000)));
                OperatorCommand::Exclude { target, expires_in, end_run: self.rng.u8(0..3) == 0 }
            }
            5..8 => OperatorCommand::Readmit { exclusion: ExclusionId(self.rng.u64(0..8)) },
            8 => OperatorCommand::Drain { at: None },
            9 => OperatorCommand::PutKey {
                key: self.random_key(),
                value: Bytes::from_static(b"8"),
                overwrite: self.rng.bool(),
            },
            10 => OperatorCommand::DeleteKey { key: self.random_key() },
            _ => OperatorCommand::Configure(Box::new(self.random_settings_change())),
        };
        // A refused command is as good as any.
        let _ = self.coordinator.perform_operator_command(act);
    }

    fn random_settings_change(&mut self) -> SettingsChange {
        let rng = &mut self.rng;
        let bounds = JobBounds {
            barriers_recent: rng.usize(0..4),
            exclusions: rng.usize(0..4),
            exclusions_kept: rng.usize(0..4),
            keys: rng.usize(0..10),
            ..JobBounds::default()
        };
        SettingsChange {
            tasks: None,
            recoverable: (rng.u8(0..4) == 0).then(|| rng.bool()),
            heartbeat_timeout: rng.bool().then(|| Duration::from_secs(rng.u64(0..20))),
            register_timeout: rng.bool().then(|| Duration::from_secs(rng.u64(1..20))),
            shutdown_timeout: rng.bool().then(|| Duration::from_secs(rng.u64(0..20))),
            disconnect_grace: rng
                .bool()
                .then(|| rng.bool().then(|| Duration::from_millis(rng.u64(0..2_000)))),
            error_delivery: rng
                .bool()
                .then(|| [ErrorDelivery::Auto, ErrorDelivery::Hold, ErrorDelivery::Cancel][rng.usize(0..3)]),
            auto_exclude: rng
                .bool()
                .then(|| AutoExcludeRule::ALL.into_iter().filter(|_| rng.bool()).collect()),
            auto_exclude_for: rng.bool().then(|| Duration::from_secs(rng.u64(0..20))),
            transfers_with: None,
            bounds: rng.bool().then_some(bounds),
        }
    }

    fn restart_service(&mut self) {
        self.coordinator.asked.clear();
        self.clients.clear();
        self.coordinator.apply_input(Input::Resumed { after: None, kept: Vec::new() });
        self.coordinator.complete_pending_work();
    }

    /// Deletes the job; later calls to it are refused.
    fn delete_job_and_check(&mut self) {
        let live = self.coordinator.job_view().run.live;
        if live > 0 {
            let refused =
                self.coordinator.perform_operator_command(OperatorCommand::DeleteJob { force: false });
            assert_eq!(refused, Err(CommandRefusal::TasksConnected(live)));
        }
        assert_eq!(
            self.coordinator.perform_operator_command(OperatorCommand::DeleteJob { force: true }),
            Ok(CommandOutcome::JobDeleted)
        );
        assert!(self.coordinator.asked.is_empty(), "whoever waited is answered");
        let client = self.coordinator.connect();
        let call = self.coordinator.call(client, Request::JobState);
        let answer = &self.coordinator.answers[&call];
        assert!(answer.as_ref().is_err_and(|failure| failure.code == Code::NotFound), "{answer:?}");
    }

    fn take_random_step(&mut self) {
        let choice = self.rng.u8(0..100);
        if self.clients.is_empty() || choice < 12 {
            let task = self.random_task();
            return self.start_client(task);
        }
        let client = self.rng.usize(0..self.clients.len());
        match choice {
            12..70 => self.make_random_call(client),
            70..80 => self.coordinator.advance_time(Duration::from_millis(self.rng.u64(0..4_000))),
            80..85 => {
                let calls: Vec<CallId> = self.coordinator.asked.keys().copied().collect();
                if !calls.is_empty() {
                    self.coordinator.hang_up(calls[self.rng.usize(0..calls.len())]);
                }
            }
            85..90 => {
                let client = self.clients.swap_remove(client);
                let ending = [ConnectionEnd::Closed, ConnectionEnd::Reset, ConnectionEnd::TimedOut]
                    [self.rng.usize(0..3)]
                .clone();
                self.coordinator.close_connection(client.connection, ending);
                self.gone.push(client);
            }
            90..93 => {
                // A process that lost its connection calls again on another one.
                if let Some(mut client) = self.gone.pop() {
                    client.connection = self.coordinator.connect();
                    self.clients.push(client);
                }
            }
            93 => self.perform_random_operator_command(),
            94 | 95 => {
                let task = self.clients[client].task;
                self.start_client(task);
            }
            96 => self.coordinator.advance_time(Duration::from_secs(self.rng.u64(0..120))),
            97 if self.rng.bool() => self.coordinator.apply_input(Input::DriverLagged),
            97 => self.perform_random_operator_command(),
            98 => {
                let everyone: Vec<TaskId> = (0..self.tasks.cast_signed()).map(TaskId).collect();
                for task in everyone {
                    self.start_client(task);
                }
            }
            _ => match self.rng.u8(0..10) {
                0 => self.restart_service(),
                1 => {
                    // A planned restart: calls that still arrive are answered at once.
                    self.coordinator.apply_input(Input::Stop);
                    self.coordinator.complete_pending_work();
                    for _ in 0..self.rng.usize(0..8) {
                        match (self.clients.len(), self.rng.u8(0..4)) {
                            (0, _) | (_, 0) => {
                                self.coordinator.advance_time(Duration::from_secs(self.rng.u64(0..200)))
                            }
                            (1.., 1) => {
                                let client = self.clients.pop().expect("there is one");
                                self.coordinator.close_connection(client.connection, ConnectionEnd::Closed);
                            }
                            (count, _) => {
                                let client = self.rng.usize(0..count);
                                self.make_random_call(client);
                            }
                        }
                        self.coordinator.complete_pending_work();
                        assert!(self.coordinator.asked.is_empty(), "nobody waits for a service that stops");
                    }
                    self.restart_service();
                }
                _ => self.coordinator.apply_input(Input::Tick),
            },
        }
    }
}

/// Returns the state after a schedule, and every answer.
fn state_and_answers_after_schedule(
    seed: u64,
    work_at_once: usize,
) -> (Vec<u8>, BTreeMap<CallId, CallOutcome>) {
    let mut chaos = RandomSchedule::new(seed);
    chaos.coordinator.core.set_work_budget(work_at_once);
    chaos.coordinator.finishes = true;
    for _ in 0..if chaos.tasks > 100 { 40 } else { 200 } {
        chaos.take_random_step();
    }
    chaos.coordinator.core.set_work_budget(1);
    (
        postcard::to_stdvec(&chaos.coordinator.core).expect("the state can be serialised"),
        chaos.coordinator.answers,
    )
}

#[test]
fn incremental_and_batch_application_give_equal_states() {
    for_every_seed("what_is_done_bit_by_bit", 8, |seed| {
        let whole = state_and_answers_after_schedule(seed, usize::MAX);
        for work_at_once in [1, 3] {
            let parts = state_and_answers_after_schedule(seed, work_at_once);
            for (call, outcome) in &whole.1 {
                assert_eq!(Some(outcome), parts.1.get(call), "{call:?} has the same answer");
            }
            assert_eq!(whole.1.len(), parts.1.len(), "the same calls are answered");
            assert_eq!(whole.0, parts.0, "the states are the same");
        }
    });
}

#[test]
fn every_invariant_holds_after_every_input_of_any_schedule() {
    for_every_seed("every_invariant", 1, |seed| {
        let mut chaos = RandomSchedule::new(seed);
        // A check of the invariants reads the whole state, so many tasks get fewer steps.
        let steps = if chaos.tasks > 100 { 60 } else { 400 };
        let snapshot_at = chaos.rng.usize(0..steps);
        for step in 0..steps {
            if step == snapshot_at {
                chaos.coordinator.record_start_of_replay();
            }
            chaos.take_random_step();
        }
        if seed % 8 == 0 {
            chaos.delete_job_and_check();
        }
        chaos.coordinator.close_all_and_check();
    });
}
