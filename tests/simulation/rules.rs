//! Tests of the rules of the state machine, one test for each rule.

use std::time::Duration;

use bytes::Bytes;
use muster::coordination::{
    CallId, Code, CommandOutcome, CommandRefusal, ConnectionEnd, ConnectionId, Effect, ErrorDelivery,
    EventKind, Failure, Input, JobSettings, OperatorCommand, Reply, Request, RunOutcome, RunState,
    StatedIncarnations, TaskId, TaskIncarnation, TaskPhase, TaskSet,
};

use crate::coordinator::{JOB, SimulatedCoordinator, test_operator, test_reason};

/// A job whose tasks have all registered, each on its own connection.
pub struct SimulatedJob {
    pub coordinator: SimulatedCoordinator,
    pub connections: Vec<ConnectionId>,
    pub lives: Vec<TaskIncarnation>,
}

pub fn id_of_task(task: usize) -> TaskId {
    TaskId(i32::try_from(task).expect("a task id"))
}

impl SimulatedJob {
    pub fn with_settings(settings: JobSettings) -> Self {
        let tasks = settings.tasks as usize;
        let mut job = Self {
            coordinator: SimulatedCoordinator::new(settings, 1),
            connections: Vec::new(),
            lives: Vec::new(),
        };
        for task in 0..tasks {
            let connection = job.coordinator.connect();
            job.connections.push(connection);
            let life = job.coordinator.draw_task_incarnation();
            job.lives.push(life);
            job.register_task(task);
        }
        assert_eq!(job.coordinator.job_view().run.live, tasks);
        job
    }

    pub fn fate_sharing(tasks: u32) -> Self {
        Self::with_settings(JobSettings::new(tasks))
    }

    pub fn recoverable(tasks: u32) -> Self {
        let mut settings = JobSettings::new(tasks);
        settings.recoverable = true;
        Self::with_settings(settings)
    }

    pub fn register_task(&mut self, task: usize) -> CallId {
        let request =
            Request::Register { task: id_of_task(task), incarnation: self.lives[task], recoverable: false };
        self.coordinator.call(self.connections[task], request)
    }

    /// Restarts a task's process: a new connection, a new incarnation.
    pub fn restart_task(&mut self, task: usize) -> CallId {
        self.connections[task] = self.coordinator.connect();
        self.lives[task] = self.coordinator.draw_task_incarnation();
        self.register_task(task)
    }

    pub fn kill_task(&mut self, task: usize) {
        self.coordinator.close_connection(self.connections[task], ConnectionEnd::Reset);
    }

    pub fn call(&mut self, task: usize, request: Request) -> CallId {
        self.coordinator.call(self.connections[task], request)
    }

    pub fn call_barrier(&mut self, task: usize, name: &str, counter: i64) -> CallId {
        let request = Request::Barrier {
            id: name.to_owned(),
            counter,
            timeout_ms: 60_000,
            members: None,
            task: id_of_task(task),
        };
        self.call(task, request)
    }

    pub fn poll_for_error(&mut self, task: usize) -> CallId {
        self.call(task, Request::PollForError { task: id_of_task(task) })
    }

    pub fn call_heartbeat(&mut self, task: usize) -> CallId {
        self.call(task, Request::Heartbeat { task: id_of_task(task), incarnation: self.lives[task] })
    }

    pub fn is_waiting(&self, call: CallId) -> bool {
        self.coordinator.asked.contains_key(&call)
    }

    pub fn counter_of_passed_barrier(&self, call: CallId) -> Option<i64> {
        match self.coordinator.answers.get(&call)? {
            Ok(Reply::BarrierPassed(counter)) => Some(*counter),
            other => panic!("expected a passed barrier, found {other:?}"),
        }
    }

    pub fn expect_failure(&self, call: CallId) -> &Failure {
        match self.coordinator.answers.get(&call) {
            Some(Err(failure)) => failure,
            other => panic!("expected a failure, found {other:?}"),
        }
    }

    pub fn task_phase(&self, task: usize) -> TaskPhase {
        self.coordinator.job_view().run.tasks[task].standing
    }
}

#[test]
fn the_others_pass_the_end_of_a_round_that_a_restarted_task_missed() {
    // Rule 1: task 2 restarts during the steps, while the others already wait at the end.
    let mut job = SimulatedJob::recoverable(3);
    let begin: Vec<CallId> = (0..3).map(|task| job.call_barrier(task, "begin", 0)).collect();
    assert!(begin.iter().all(|call| job.counter_of_passed_barrier(*call) == Some(0)));
    let end = [job.call_barrier(0, "end", 0), job.call_barrier(1, "end", 0)];
    job.kill_task(2);
    assert!(job.is_waiting(end[0]), "a dead task is waited for");
    job.restart_task(2);
    assert!(
        end.iter().all(|call| job.counter_of_passed_barrier(*call) == Some(0)),
        "what began before it came back does not wait for it"
    );
    // They meet again at the next begin barrier, where the restarted task counts from 0 again.
    let begin =
        [job.call_barrier(2, "begin", 0), job.call_barrier(0, "begin", 1), job.call_barrier(1, "begin", 1)];
    assert!(begin.iter().all(|call| job.counter_of_passed_barrier(*call) == Some(1)));
    assert!(!job.coordinator.job_view().run.tasks[2].unsynced, "all are in step");
}

#[test]
fn an_outage_is_not_lateness() {
    let mut job = SimulatedJob::recoverable(4);
    let steps = |job: &SimulatedJob, task: usize| {
        let view = job.coordinator.job_view();
        let it = view.run.tasks[task].straggling.clone();
        it.map(|it| (it.taken_part, it.lateness_us, it.held_up_us))
    };
    (0..4).for_each(|task| _ = job.call_barrier(task, "step", 0));
    assert_eq!(steps(&job, 3), Some((1, 0, 0)));
    // Task 3 comes half a minute late to the second step, because it restarts. The others go on without it.
    (0..3).for_each(|task| _ = job.call_barrier(task, "step", 1));
    job.kill_task(3);
    job.coordinator.advance_time(Duration::from_secs(30));
    job.restart_task(3);
    // It is the first at the third step, and the others, which work, come two seconds later.
    job.call_barrier(3, "step", 0);
    job.coordinator.advance_time(Duration::from_secs(2));
    (0..3).for_each(|task| _ = job.call_barrier(task, "step", 2));
    assert_eq!(steps(&job, 0), Some((3, 0, 0)), "the others came together each time");
    assert_eq!(steps(&job, 3), Some((1, 0, 0)), "it was out of step at two of them");
    assert!(!job.coordinator.job_view().run.tasks[3].unsynced);
    // In step again, it counts like the others.
    (0..3).for_each(|task| _ = job.call_barrier(task, "step", 3));
    job.coordinator.advance_time(Duration::from_secs(2));
    job.call_barrier(3, "step", 3);
    // The first step of a run counts in the average only until there is a second one.
    assert_eq!(steps(&job, 3), Some((2, 2_000_000, 2_000_000)));
}

#[test]
fn the_others_pass_the_end_without_a_restarted_task_that_waits_at_the_beginning() {
    // Rule 2: task 2 is back before the others arrive at the end.
    let mut job = SimulatedJob::recoverable(3);
    for task in 0..3 {
        job.call_barrier(task, "begin", 0);
    }
    job.kill_task(2);
    job.restart_task(2);
    let end = job.call_barrier(0, "end", 0);
    let restarted = job.call_barrier(2, "begin", 0);
    assert!(job.is_waiting(end) && job.is_waiting(restarted), "a task that is in step is still on its way");
    let last = job.call_barrier(1, "end", 0);
    assert_eq!((job.counter_of_passed_barrier(end), job.counter_of_passed_barrier(last)), (Some(0), Some(0)));
    assert!(job.is_waiting(restarted), "the beginning waits for those who are in step");
    let passed_without = |event: &muster::coordination::JobEvent| matches!(&event.what, EventKind::BarrierPassed { without, .. } if *without == [TaskId(2)]);
    assert!(job.coordinator.events.iter().any(passed_without), "the decision is an event");
    job.call_barrier(0, "begin", 1);
    job.call_barrier(1, "begin", 1);
    assert_eq!(job.counter_of_passed_barrier(restarted), Some(1));
}

#[test]
fn a_restarted_task_that_waits_nowhere_yet_is_waited_for() {
    let mut job = SimulatedJob::recoverable(2);
    job.kill_task(1);
    job.restart_task(1);
    let end = job.call_barrier(0, "end", 0);
    assert!(job.is_waiting(end), "it may be on its way to this very barrier");
    job.call_barrier(1, "end", 0);
    assert_eq!(job.counter_of_passed_barrier(end), Some(0));
}

#[test]
fn a_lost_poll_fails_a_fate_sharing_run_at_once_with_task_and_cause() {
    let mut job = SimulatedJob::fate_sharing(3);
    let polls: Vec<CallId> = (0..3).map(|task| job.poll_for_error(task)).collect();
    let waiting = job.call_barrier(0, "b", 0);
    job.kill_task(1);
    for poll in [polls[0], polls[2]] {
        let failure = job.expect_failure(poll);
        assert_eq!(failure.code, Code::Unavailable);
        assert!(
            failure.message.contains("task 1 at 10.0.0.1") && failure.message.contains("was reset"),
            "{failure}"
        );
    }
    assert_eq!(job.expect_failure(waiting).code, Code::Internal);
    let view = job.coordinator.job_view();
    assert_eq!(view.run.state, RunState::Failed);
    assert_eq!(view.run.first_cause.and_then(|cause| cause.task), Some(TaskId(1)));
}

#[test]
fn after_a_failure_new_lives_open_the_next_run_with_nothing_left_of_the_last() {
    let mut job = SimulatedJob::fate_sharing(2);
    let first = job.coordinator.current_service_incarnation();
    let zombie = (job.connections[0], job.lives[0]);
    job.call(0, Request::Insert { key: Bytes::from("k"), value: Bytes::from("v"), overwrite: false });
    job.call_barrier(0, "b", 0);
    job.poll_for_error(0);
    job.poll_for_error(1);
    job.kill_task(1);
    job.restart_task(1);
    assert_eq!(job.coordinator.job_view().run.number.0, 2);
    job.restart_task(0);
    let view = job.coordinator.job_view();
    assert_eq!((view.run.state, view.run.live, view.run.keys), (RunState::Running, 2, 0));
    assert_ne!(job.coordinator.current_service_incarnation(), first);
    assert_eq!(view.history[0].outcome, RunOutcome::Failed);
    // A process of the first run wakes: every call of it is fenced, and the second run continues.
    let (connection, life) = zombie;
    let calls = [
        job.coordinator.call(connection, Request::Heartbeat { task: TaskId(0), incarnation: life }),
        job.coordinator.call(connection, Request::PollForError { task: TaskId(0) }),
        job.coordinator.call(
            connection,
            Request::Insert { key: Bytes::from("z"), value: Bytes::new(), overwrite: true },
        ),
        job.coordinator
            .call(connection, Request::Register { task: TaskId(0), incarnation: life, recoverable: false }),
    ];
    for call in calls {
        let failure = job.expect_failure(call);
        assert!(failure.message.contains("Fenced") && failure.message.contains("run 1"), "{failure}");
    }
    let claim = StatedIncarnations { service: first, task: life };
    let call = job.coordinator.call_as(connection, Some(claim), Request::Get { key: Bytes::from("k") });
    assert_eq!(
        job.expect_failure(call).service_mismatch,
        Some(job.coordinator.current_service_incarnation())
    );
    let view = job.coordinator.job_view();
    assert_eq!((view.run.number.0, view.run.live, view.run.keys), (2, 2, 0));
}

#[test]
fn a_restart_in_a_fate_sharing_run_is_refused_once_and_then_opens_the_next_run() {
    let mut job = SimulatedJob::fate_sharing(2);
    let poll = job.poll_for_error(0);
    let refused = job.restart_task(1);
    assert_eq!(job.expect_failure(refused).code, Code::Aborted, "clients try again after this code");
    assert_eq!(job.expect_failure(poll).code, Code::Aborted);
    job.register_task(1);
    assert_eq!(job.task_phase(1), TaskPhase::Registering);
    assert_eq!(job.coordinator.job_view().run.number.0, 2);
}

#[test]
fn of_two_processes_that_claim_one_task_the_newest_wins_and_both_are_named() {
    let mut world = SimulatedCoordinator::new(JobSettings::new(2), 1);
    let (old, new) = (world.connect(), world.connect());
    let register = |incarnation| Request::Register { task: TaskId(0), incarnation, recoverable: false };
    let lives = [world.draw_task_incarnation(), world.draw_task_incarnation()];
    let first = world.call(old, register(lives[0]));
    let second = world.call(new, register(lives[1]));
    let Some(Err(failure)) = world.answers.get(&first) else { panic!("the older one is turned away") };
    assert_eq!(failure.code, Code::AlreadyExists);
    assert!(world.asked.contains_key(&second));
    let named = |event: &muster::coordination::JobEvent| {
        matches!(&event.what, EventKind::TaskSuperseded { old, new, old_peer: Some(_), new_peer: Some(_), .. }
            if *old == lives[0] && *new == lives[1])
    };
    assert!(world.events.iter().any(named), "both incarnations and addresses are told");
    // The older incarnation may not take the task back.
    let again = world.call(old, register(lives[0]));
    assert!(matches!(world.answers.get(&again), Some(Err(failure)) if failure.code == Code::AlreadyExists));
}

#[test]
fn a_process_that_dies_while_it_waits_to_register_is_missing_again() {
    let mut world = SimulatedCoordinator::new(JobSettings::new(2), 1);
    let connections = [world.connect(), world.connect()];
    for (task, connection) in connections.into_iter().enumerate() {
        if task == 1 {
            world.close_connection(connections[0], ConnectionEnd::Reset);
        }
        let incarnation = world.draw_task_incarnation();
        world.call(connection, Request::Register { task: id_of_task(task), incarnation, recoverable: false });
    }
    let view = world.job_view();
    assert_eq!(view.run.state, RunState::Forming);
    assert_eq!(view.run.barriers[0].missing, [TaskId(0)]);
}

#[test]
fn silence_is_noticed_exactly_at_the_heartbeat_timeout() {
    let mut settings = JobSettings::new(2);
    settings.heartbeat_timeout = Duration::from_secs(7);
    let mut job = SimulatedJob::with_settings(settings);
    let poll = job.poll_for_error(0);
    job.coordinator.advance_time(Duration::from_secs(4));
    job.call_heartbeat(0);
    job.coordinator.advance_time(Duration::from_micros(2_999_999));
    assert!(job.is_waiting(poll));
    job.coordinator.advance_time(Duration::from_micros(1));
    assert_eq!(job.expect_failure(poll).code, Code::Unavailable);
    assert!(job.expect_failure(poll).message.contains("stopped sending heartbeats"));
    // It wakes, and its call is refused.
    let late = job.call_heartbeat(1);
    assert_eq!(job.expect_failure(late).code, Code::Aborted);
}

#[test]
fn a_heartbeat_within_the_grace_forgives_a_lost_connection() {
    let mut job = SimulatedJob::recoverable(2);
    job.kill_task(1);
    assert_eq!(job.task_phase(1), TaskPhase::Suspect);
    job.coordinator.advance_time(Duration::from_millis(499));
    job.connections[1] = job.coordinator.connect();
    job.call_heartbeat(1);
    assert_eq!(job.task_phase(1), TaskPhase::Connected);
    job.coordinator.advance_time(Duration::from_secs(5));
    assert_eq!(job.task_phase(1), TaskPhase::Connected);
    job.kill_task(1);
    job.coordinator.advance_time(Duration::from_millis(500));
    assert_eq!(job.task_phase(1), TaskPhase::Failed);
}

#[test]
fn a_live_set_shrinks_when_a_task_dies_and_grows_when_it_is_back() {
    let mut job = SimulatedJob::recoverable(3);
    let everyone = TaskSet::new((0..3).map(TaskId).collect());
    let ask = |job: &mut SimulatedJob, task| {
        job.call(task, Request::LiveSet { task: id_of_task(task), tasks: everyone.clone() })
    };
    let live = |job: &SimulatedJob, call| match &job.coordinator.answers[&call] {
        Ok(Reply::LiveSet(live)) => live.iter().map(|(task, _)| task.0).collect::<Vec<i32>>(),
        other => panic!("{other:?}"),
    };
    let first = [ask(&mut job, 0), ask(&mut job, 1)];
    assert!(job.is_waiting(first[0]));
    job.kill_task(2);
    job.coordinator.advance_time(Duration::from_millis(500));
    assert_eq!(live(&job, first[0]), [0, 1]);
    job.restart_task(2);
    let second = [ask(&mut job, 0), ask(&mut job, 1), ask(&mut job, 2)];
    assert_eq!(live(&job, second[2]), [0, 1, 2]);
}

#[test]
fn calls_of_an_old_incarnation_do_not_count_for_the_new_one() {
    let mut job = SimulatedJob::recoverable(2);
    let everyone = TaskSet::new(vec![TaskId(0), TaskId(1)]);
    let old = job.call(1, Request::LiveSet { task: TaskId(1), tasks: everyone.clone() });
    let meeting = job.call_barrier(1, "b", 0);
    job.restart_task(1);
    assert_eq!(job.expect_failure(old).code, Code::Aborted);
    assert_eq!(job.expect_failure(meeting).code, Code::Cancelled);
    let other = job.call(0, Request::LiveSet { task: TaskId(0), tasks: everyone });
    assert!(job.is_waiting(other), "the new life has not asked");
}

#[test]
fn tasks_shut_down_together_and_the_next_registration_opens_the_next_run() {
    let mut job = SimulatedJob::fate_sharing(2);
    let poll = job.poll_for_error(0);
    let first = job.call(0, Request::Shutdown { task: TaskId(0) });
    assert!(job.is_waiting(first));
    let second = job.call(1, Request::Shutdown { task: TaskId(1) });
    for call in [first, second] {
        assert_eq!(job.coordinator.answers[&call], Ok(Reply::Done));
    }
    assert_eq!(job.expect_failure(poll).code, Code::Cancelled);
    assert_eq!(job.coordinator.job_view().run.state, RunState::Completed);
    job.restart_task(0);
    assert_eq!(job.coordinator.job_view().run.number.0, 2);
}

#[test]
fn a_task_that_does_not_come_to_the_shutdown_fails_it_for_all() {
    let mut settings = JobSettings::new(2);
    settings.shutdown_timeout = Duration::from_secs(10);
    let mut job = SimulatedJob::with_settings(settings);
    let polls = [job.poll_for_error(0), job.poll_for_error(1)];
    let call = job.call(0, Request::Shutdown { task: TaskId(0) });
    job.coordinator.advance_time(Duration::from_secs(10));
    assert_eq!(job.expect_failure(call).code, Code::Internal);
    assert!(job.expect_failure(call).message.contains("Shutdown barrier has failed"));
    assert_eq!(job.expect_failure(polls[1]).code, Code::Internal);
}

#[test]
fn registration_that_lacks_a_task_names_it_and_the_job_can_form_again() {
    let mut settings = JobSettings::new(3);
    settings.register_timeout = Duration::from_secs(30);
    let mut world = SimulatedCoordinator::new(settings, 1);
    let connection = world.connect();
    let incarnation = world.draw_task_incarnation();
    let call = world.call(connection, Request::Register { task: TaskId(1), incarnation, recoverable: false });
    world.advance_time(Duration::from_secs(30));
    let Some(Err(failure)) = world.answers.get(&call) else { panic!("it is over") };
    assert_eq!(failure.code, Code::DeadlineExceeded);
    assert!(failure.message.contains("task 0, task 2"), "{failure}");
    assert_eq!(world.job_view().run.state, RunState::Failed);
    let incarnation = world.draw_task_incarnation();
    world.call(connection, Request::Register { task: TaskId(1), incarnation, recoverable: false });
    assert_eq!(world.job_view().run.number.0, 2);
}

#[test]
fn a_caller_that_hangs_up_is_waited_for_again() {
    let mut job = SimulatedJob::fate_sharing(2);
    let gone = job.call_barrier(0, "b", 0);
    job.coordinator.hang_up(gone);
    assert!(job.coordinator.job_view().run.barriers.is_empty(), "an instance that nobody waits at is none");
    let other = job.call_barrier(1, "b", 0);
    assert!(job.is_waiting(other));
    job.call_barrier(0, "b", 0);
    assert_eq!(job.counter_of_passed_barrier(other), Some(0));
}

#[test]
fn invalid_calls_on_a_new_barrier_leave_no_state() {
    let mut job = SimulatedJob::fate_sharing(2);
    let early = job.call_barrier(0, "b", 3);
    assert_eq!(
        job.expect_failure(early).barrier.as_ref().map(|b| b.counter),
        Some(-1),
        "the next use is number 0"
    );
    let cancel = job.call(0, Request::CancelBarrier { id: "b".into(), counter: 0, task: TaskId(0) });
    assert_eq!(job.expect_failure(cancel).code, Code::FailedPrecondition);
    let calls = [job.call_barrier(0, "b", 0), job.call_barrier(1, "b", 0)];
    assert!(calls.iter().all(|call| job.counter_of_passed_barrier(*call) == Some(0)));
}

/// In JAX's own test of `wait_at_barrier` the non-participants arrive first, and the participants see why the
/// barrier cannot pass.
#[test]
fn a_non_participant_that_comes_first_fails_the_use_for_the_members_and_an_id_outside_of_the_job_does_not() {
    let mut job = SimulatedJob::fate_sharing(3);
    let call = |job: &mut SimulatedJob, task: usize, caller: i32, counter| {
        let members = Some(TaskSet::new(vec![TaskId(0), TaskId(1)]));
        let task_id = TaskId(caller);
        let request =
            Request::Barrier { id: "b".into(), counter, timeout_ms: 60_000, members, task: task_id };
        job.call(task, request)
    };
    let stranger = call(&mut job, 2, 7, 0);
    assert_eq!(job.expect_failure(stranger).code, Code::InvalidArgument);
    let waits = call(&mut job, 0, 0, 0);
    assert!(job.is_waiting(waits), "an id outside of the job fails nothing");
    call(&mut job, 1, 1, 0);
    assert_eq!(job.counter_of_passed_barrier(waits), Some(0));

    for caller in [2, 2, 0, 1, 2] {
        let refused = call(&mut job, usize::try_from(caller).expect("a task"), caller, 1);
        let failure = job.expect_failure(refused);
        assert_eq!(failure.code, Code::InvalidArgument);
        assert!(failure.message.contains("A non-participating task (2)"), "{failure}");
        assert_eq!(failure.barrier.as_ref().map(|barrier| barrier.counter), Some(1));
    }
    let next = [call(&mut job, 0, 0, 2), call(&mut job, 1, 1, 2)];
    assert!(next.iter().all(|call| job.counter_of_passed_barrier(*call) == Some(2)), "the next use is free");
}

#[test]
fn a_watch_of_a_future_version_gets_the_present_state() {
    let mut job = SimulatedJob::fate_sharing(1);
    let future = job.call(0, Request::Watch { version: 999 });
    let Ok(Reply::States(states)) = &job.coordinator.answers[&future] else { panic!("it is told at once") };
    let version = states.version;
    let next = job.call(0, Request::Watch { version });
    assert!(job.is_waiting(next));
    job.kill_task(0);
    assert!(!job.is_waiting(next));
}

#[test]
fn with_polls_cancelled_errors_arrive_with_the_next_heartbeat() {
    let mut settings = JobSettings::new(2);
    settings.error_delivery = ErrorDelivery::Cancel;
    let mut job = SimulatedJob::with_settings(settings);
    let poll = job.poll_for_error(0);
    assert_eq!(
        (job.expect_failure(poll).code, job.expect_failure(poll).service_error),
        (Code::Cancelled, None)
    );
    job.kill_task(1);
    job.coordinator.advance_time(Duration::from_millis(500));
    let heartbeat = job.call_heartbeat(0);
    assert_eq!(job.expect_failure(heartbeat).code, Code::Aborted, "a code that clients do not retry");
    assert!(job.expect_failure(heartbeat).message.contains("connection lost"));
}

#[test]
fn when_the_last_live_task_of_a_recoverable_run_is_lost_the_run_is_over() {
    let mut job = SimulatedJob::recoverable(2);
    job.kill_task(0);
    job.kill_task(1);
    job.coordinator.advance_time(Duration::from_secs(1));
    let run = job.coordinator.job_view().run;
    assert_eq!(run.state, RunState::Abandoned);
    let reason = run.end_reason.expect("it has ended");
    assert!(reason.contains("last live task"), "{reason}");
    job.restart_task(0);
    let view = job.coordinator.job_view();
    assert_eq!((view.run.number.0, view.run.end_reason), (2, None));
    assert_eq!(view.history[0].end_reason, reason);
}

#[test]
fn a_stopping_service_releases_all_calls_without_blaming_a_task() {
    let mut job = SimulatedJob::fate_sharing(3);
    let early = job.poll_for_error(0);
    job.coordinator.apply_input(Input::Stop);
    assert_eq!(job.expect_failure(early).code, Code::Cancelled);
    // The poll was on its way when the service was stopped.
    let late = job.poll_for_error(1);
    assert_eq!(
        job.expect_failure(late).code,
        Code::Cancelled,
        "a held poll would end the client with the connection"
    );
    let barrier = job.call_barrier(2, "step", 0);
    assert_eq!(job.expect_failure(barrier).code, Code::Unavailable);
    let heartbeat = job.call_heartbeat(2);
    assert!(
        matches!(job.coordinator.answers.get(&heartbeat), Some(Ok(_))),
        "what can be answered at once is"
    );

    for task in 0..3 {
        job.kill_task(task);
    }
    job.coordinator.advance_time(Duration::from_secs(1000));
    let run = job.coordinator.job_view().run;
    assert_eq!(
        (run.state, run.live),
        (RunState::Running, 3),
        "the connections ended because the service stops"
    );

    job.coordinator.apply_input(Input::Resumed { after: None, kept: Vec::new() });
    job.coordinator.advance_time(Duration::from_secs(1000));
    assert_eq!(job.coordinator.job_view().run.state, RunState::Failed, "from then on silence counts again");
}

#[test]
fn an_error_with_code_zero_is_none_and_one_with_an_unknown_code_is_kept() {
    let mut job = SimulatedJob::fate_sharing(2);
    let poll = job.poll_for_error(0);
    let report = |code| Request::ReportError { task: TaskId(1), code, message: "stop".into() };
    let refused = job.call(1, report(0));
    assert_eq!(job.expect_failure(refused).code, Code::InvalidArgument);
    job.call(1, report(77));
    assert_eq!(job.expect_failure(poll).code, Code::Other(77));
    let source = job.expect_failure(poll).service_error.expect("the service's own word");
    assert_eq!((source.reported, source.source), (true, Some(TaskId(1))));
}

/// The form of a task in the key of its step: up to release 0.8.3, and later.
#[test]
fn a_save_that_all_agree_on_is_seen() {
    check_save_that_all_agree_on("/job:jax_worker/task:");
    check_save_that_all_agree_on("");
}

fn check_save_that_all_agree_on(prefix: &str) {
    let mut job = SimulatedJob::fate_sharing(2);
    let waiting = job.call(1, Request::Get { key: Bytes::from("RECEIVED_PREEMPTION_NOTICE") });
    let notice = Bytes::from("2026-01-01T00:00:00Z");
    job.call(
        0,
        Request::Insert { key: Bytes::from("RECEIVED_PREEMPTION_NOTICE"), value: notice, overwrite: false },
    );
    assert!(!job.is_waiting(waiting));
    for (task, step) in [(0, "7"), (1, "9")] {
        let key = Bytes::from(format!("PREEMPTION_CURRENT_COUNTER/{prefix}{task}"));
        job.call(task, Request::Insert { key, value: Bytes::from(step), overwrite: false });
        assert_eq!(job.coordinator.job_view().run.preemption.and_then(|p| p.agreed_step), None);
        job.call_barrier(task, "PREEMPTION_SYNC_BARRIER", 0);
    }
    let preemption = job.coordinator.job_view().run.preemption.expect("a notice");
    assert_eq!(preemption.acknowledged, [(TaskId(0), 7), (TaskId(1), 9)]);
    assert_eq!(preemption.agreed_step, Some(10));
}

#[test]
fn a_save_is_seen_on_which_those_who_live_agree_while_others_are_lost() {
    let mut job = SimulatedJob::recoverable(3);
    let insert = |job: &mut SimulatedJob, task: usize, key: String, value: &'static str| {
        let value = Bytes::from(value);
        job.call(task, Request::Insert { key: Bytes::from(key), value, overwrite: false });
    };
    insert(&mut job, 0, "RECEIVED_PREEMPTION_NOTICE".to_owned(), "2026-01-01T00:00:00Z");
    let preemption = |job: &SimulatedJob| job.coordinator.job_view().run.preemption.expect("a notice");
    for (task, step) in [(2, "99"), (0, "7"), (1, "9")] {
        insert(&mut job, task, format!("PREEMPTION_CURRENT_COUNTER/{task}"), step);
    }
    // A barrier of another name, which comes between those of the agreement, is none of them.
    for task in 0..3 {
        job.call_barrier(task, "PREEMPTION_SYNC_BARRIER-2", 0);
    }
    assert_eq!(preemption(&job).agreed_step, None);
    // All three were to meet; one is lost, and the others give that barrier up.
    job.call_barrier(0, "PREEMPTION_SYNC_BARRIER", 0);
    job.kill_task(2);
    let id = "PREEMPTION_SYNC_BARRIER".to_owned();
    job.call(1, Request::CancelBarrier { id, counter: 0, task: TaskId(1) });
    assert!(!preemption(&job).failed, "they meet at another one");
    for task in [0, 1] {
        let found = preemption(&job);
        assert_eq!((found.agreed_step, found.failed, found.arrived), (None, false, task as usize));
        let members = Some(TaskSet::new(vec![TaskId(0), TaskId(1)]));
        let (id, task_id) = ("PREEMPTION_SYNC_BARRIER/00c0ffee00c0ffee".to_owned(), TaskId(task));
        job.call(
            task as usize,
            Request::Barrier { id, counter: 0, timeout_ms: 60_000, members, task: task_id },
        );
    }
    let found = preemption(&job);
    assert_eq!((found.agreed_step, found.failed, found.awaited), (Some(10), false, vec![]));
    // A barrier of another name is none of these.
    let mut job = SimulatedJob::recoverable(2);
    insert(&mut job, 0, "RECEIVED_PREEMPTION_NOTICE".to_owned(), "2026-01-01T00:00:00Z");
    for task in [0, 1] {
        job.call_barrier(task, "PREEMPTION_SYNC_BARRIERS", 0);
    }
    assert_eq!(preemption(&job).agreed_step, None);
}

#[test]
fn the_first_step_of_a_run_is_the_common_one_if_the_notice_came_before_it() {
    for (steps, agreed) in [(["0", "0"], [1, 5000]), (["4999", "0"], [5000, 5000]), (["7", "0"], [8, 8])] {
        let mut job = SimulatedJob::fate_sharing(2);
        let insert = |job: &mut SimulatedJob, task: u32, key: &str, value: &'static str| {
            let (key, value) = (Bytes::from(key.to_owned()), Bytes::from(value));
            job.call(task as usize, Request::Insert { key, value, overwrite: false });
        };
        insert(&mut job, 0, "RECEIVED_PREEMPTION_NOTICE", "2026-01-01T00:00:00Z");
        for (task, step) in (0..).zip(steps) {
            insert(&mut job, task, &format!("PREEMPTION_CURRENT_COUNTER/{task}"), step);
            job.call_barrier(task as usize, "PREEMPTION_SYNC_BARRIER", 0);
        }
        let agreed_step =
            |job: &SimulatedJob| job.coordinator.job_view().run.preemption.and_then(|it| it.agreed_step);
        assert_eq!(agreed_step(&job), Some(agreed[0]), "{steps:?}");
        insert(&mut job, 1, "muster/preemption/first_step", "5000");
        assert_eq!(agreed_step(&job), Some(agreed[1]), "{steps:?}");
    }
}

#[test]
fn a_deleted_job_takes_no_part_in_anything_while_its_calls_are_answered() {
    let mut job = SimulatedJob::recoverable(2);
    for _ in 0..10 {
        job.coordinator.call(job.connections[0], Request::Get { key: Bytes::from_static(b"never") });
    }
    let (core, now) = (&mut job.coordinator.core, job.coordinator.now);
    core.set_work_budget(1);
    let delete = || Input::Command {
        job: JOB,
        actor: test_operator(),
        reason: test_reason(),
        act: OperatorCommand::DeleteJob { force: true },
    };
    let mut effects = Vec::new();
    core.apply(now, delete(), &mut effects);
    assert!(effects.contains(&Effect::CommandDone(Ok(CommandOutcome::JobDeleted))));
    assert!(core.has_pending_work(), "calls of it wait for their answers");

    effects.clear();
    core.apply(now, delete(), &mut effects);
    let [connection, _] = job.connections[..] else { panic!("two tasks") };
    core.apply(now, Input::ConnectionClosed { connection, ending: ConnectionEnd::Reset }, &mut effects);
    while core.has_pending_work() {
        core.apply(now, Input::Tick, &mut effects);
    }
    assert!(effects.contains(&Effect::CommandDone(Err(CommandRefusal::NoSuchJob))));
    let events = effects.iter().filter(|effect| matches!(effect, Effect::Event(_)));
    assert_eq!(events.count(), 0, "{effects:?}");
}

/// A connection puts many calls before others get their turn, so each does little of the work that a closed
/// connection leaves.
#[test]
fn an_input_does_little_of_the_work_that_earlier_ones_left_over_and_a_tick_does_much() {
    let mut job = SimulatedJob::recoverable(2);
    for _ in 0..1_000 {
        job.coordinator.call(job.connections[0], Request::Get { key: Bytes::from_static(b"never") });
    }
    let (core, now) = (&mut job.coordinator.core, job.coordinator.now);
    let [connection, _] = job.connections[..] else { panic!("two tasks") };
    let mut effects = Vec::new();
    core.apply(now, Input::ConnectionClosed { connection, ending: ConnectionEnd::Reset }, &mut effects);
    let peer = "192.0.2.1:1".parse().expect("an address");
    for n in 1_000..1_090 {
        assert!(core.has_pending_work(), "{n}: a connection's calls are taken out bit by bit");
        core.apply(now, Input::ConnectionOpened { connection: ConnectionId(n), peer }, &mut effects);
    }
    let mut ticks = 0;
    while core.has_pending_work() {
        core.apply(now, Input::Tick, &mut effects);
        ticks += 1;
    }
    assert!((1..=5).contains(&ticks), "{ticks} ticks");
}
