//! Tests of exclusions and drains.

use std::time::Duration;

use bytes::Bytes;
use muster::coordination::{
    Code, CommandOutcome, CommandRefusal, ErrorDelivery, EventKind, ExclusionEndKind, ExclusionId,
    ExclusionTarget, Failure, JobSettings, OperatorCommand, Reply, Request, RunOutcome, RunState,
    SettingsChange, TaskId, TaskPhase, TaskSet,
};

use crate::coordinator::{JOB, SimulatedCoordinator, named_host, test_operator, test_reason};
use crate::rules::{SimulatedJob, id_of_task};

fn exclude_task(job: &mut SimulatedJob, task: usize) -> Result<CommandOutcome, CommandRefusal> {
    job.coordinator.perform_operator_command(OperatorCommand::Exclude {
        target: ExclusionTarget::Task(id_of_task(task)),
        expires_in: None,
        end_run: false,
    })
}

fn expect_refusal_by_exclusion(job: &SimulatedJob, call: muster::coordination::CallId) -> Failure {
    let failure = job.expect_failure(call).clone();
    assert_eq!(failure.code, Code::PermissionDenied, "{failure}");
    assert!(failure.service_error.is_some(), "without the service's own mark clients would try again");
    failure
}

fn call_live_set(job: &mut SimulatedJob, task: usize) -> muster::coordination::CallId {
    let all = TaskSet::new((0..job.lives.len()).map(id_of_task).collect());
    job.call(task, Request::LiveSet { task: id_of_task(task), tasks: all })
}

#[test]
fn an_excluded_task_does_not_keep_a_restarted_one_out_of_step() {
    let mut job = SimulatedJob::recoverable(3);
    exclude_task(&mut job, 2).expect("excluded");
    job.kill_task(1);
    job.coordinator.advance_time(Duration::from_secs(5));
    job.restart_task(1);
    assert!(job.coordinator.job_view().run.tasks[1].unsynced);
    let step = [job.call_barrier(0, "step", 0), job.call_barrier(1, "step", 0)];
    assert!(step.iter().all(|call| job.counter_of_passed_barrier(*call) == Some(0)));
    assert!(!job.coordinator.job_view().run.tasks[1].unsynced);
}

#[test]
fn an_excluded_task_is_out_at_once_and_the_others_go_on() {
    let mut job = SimulatedJob::recoverable(3);
    let (ours, theirs) = (job.call_barrier(0, "step", 0), job.call_barrier(2, "step", 0));
    let (asked, waited) = (call_live_set(&mut job, 0), call_live_set(&mut job, 2));
    let read = job.call(2, Request::Get { key: Bytes::from_static(b"k") });
    let other = call_live_set(&mut job, 1);
    assert!(!job.is_waiting(asked), "all three have asked");
    let (asked, waited_again) = (call_live_set(&mut job, 0), call_live_set(&mut job, 1));
    let watch = job.call(0, Request::Watch { version: -1 });
    let Ok(Reply::States(states)) = &job.coordinator.answers[&watch] else { panic!("no states") };
    let version = states.version;
    let watch = job.call(0, Request::Watch { version });

    assert_eq!(exclude_task(&mut job, 2), Ok(CommandOutcome::Excluded(ExclusionId(1))));

    // Its own calls get the operator and the reason.
    for call in [theirs, read] {
        let failure = expect_refusal_by_exclusion(&job, call);
        assert!(failure.message.contains("Task 2 of job default is excluded"), "{failure}");
        assert!(failure.message.contains("alice (by the command line)"), "{failure}");
        assert!(failure.message.contains("it was seen to misbehave"), "{failure}");
    }
    assert!(job.coordinator.answers[&waited].is_ok() && job.coordinator.answers[&other].is_ok());
    // The others' live-set requests are answered without it, watchers see it, and barriers no longer wait for
    // it.
    for call in [asked, waited_again] {
        let Ok(Reply::LiveSet(live)) = &job.coordinator.answers[&call] else { panic!("no live set") };
        assert_eq!(live.iter().map(|(task, _)| task.0).collect::<Vec<_>>(), [0, 1]);
    }
    assert!(!job.is_waiting(watch));
    assert!(job.is_waiting(ours), "task 1 has not come");
    let last = job.call_barrier(1, "step", 0);
    assert_eq!(
        (job.counter_of_passed_barrier(ours), job.counter_of_passed_barrier(last)),
        (Some(0), Some(0))
    );
    for counter in 1..4 {
        let (a, b) = (job.call_barrier(0, "step", counter), job.call_barrier(1, "step", counter));
        assert_eq!(
            (job.counter_of_passed_barrier(a), job.counter_of_passed_barrier(b)),
            (Some(counter), Some(counter))
        );
    }

    // Its next call gets the exclusion, whatever it is, and it cannot return.
    let heartbeat = job.call_heartbeat(2);
    expect_refusal_by_exclusion(&job, heartbeat);
    let barrier = job.call_barrier(2, "step", 4);
    expect_refusal_by_exclusion(&job, barrier);
    let write =
        job.call(2, Request::Insert { key: "x".into(), value: Bytes::from_static(b"v"), overwrite: false });
    expect_refusal_by_exclusion(&job, write);
    let call = job.restart_task(2);
    let failure = expect_refusal_by_exclusion(&job, call);
    assert!(failure.message.contains("muster readmit --job default 1"), "{failure}");
    let again = job.restart_task(2);
    expect_refusal_by_exclusion(&job, again);

    let view = job.coordinator.job_view();
    let exclusion = &view.exclusions[0];
    assert_eq!((exclusion.id, exclusion.tasks.as_slice()), (ExclusionId(1), &[TaskId(2)][..]));
    assert_eq!(exclusion.refused, 2);
    assert_eq!(view.run.tasks[2].excluded.as_ref().map(|by| by.exclusion), Some(ExclusionId(1)));
    let said =
        job.coordinator.events.iter().filter(|e| matches!(e.what, EventKind::RegistrationRefused { .. }));
    assert_eq!(said.count(), 1, "said once");
}

#[test]
fn barriers_do_not_wait_for_a_readmitted_task_until_it_registers() {
    let mut job = SimulatedJob::recoverable(3);
    exclude_task(&mut job, 2).expect("excluded");
    let readmit = OperatorCommand::Readmit { exclusion: ExclusionId(1) };
    assert_eq!(job.coordinator.perform_operator_command(readmit.clone()), Ok(CommandOutcome::Readmitted));
    assert_eq!(
        job.coordinator.perform_operator_command(readmit),
        Err(CommandRefusal::AlreadyOver(ExclusionId(1)))
    );
    // Its old incarnation stays fenced, whatever became of the exclusion.
    let old = job.call_heartbeat(2);
    expect_refusal_by_exclusion(&job, old);
    let (a, b) = (job.call_barrier(0, "step", 0), job.call_barrier(1, "step", 0));
    assert_eq!((job.counter_of_passed_barrier(a), job.counter_of_passed_barrier(b)), (Some(0), Some(0)));
    let call = job.restart_task(2);
    assert!(job.coordinator.answers[&call].is_ok());
    let (a, b) = (job.call_barrier(0, "step", 1), job.call_barrier(1, "step", 1));
    assert!(job.is_waiting(a) && job.is_waiting(b), "it takes part again");
    let c = job.call_barrier(2, "step", 0);
    assert_eq!(
        (
            job.counter_of_passed_barrier(a),
            job.counter_of_passed_barrier(b),
            job.counter_of_passed_barrier(c)
        ),
        (Some(1), Some(1), Some(1))
    );
}

#[test]
fn an_exclusion_ends_exactly_when_its_time_is_over() {
    let mut job = SimulatedJob::recoverable(2);
    let expires_in = Some(Duration::from_secs(600));
    job.coordinator
        .perform_operator_command(OperatorCommand::Exclude {
            target: ExclusionTarget::Task(id_of_task(1)),
            expires_in,
            end_run: false,
        })
        .expect("excluded");
    let keep = |job: &mut SimulatedJob| {
        for _ in 0..60 {
            job.call_heartbeat(0);
            job.coordinator.advance_time(Duration::from_micros(9_999_999));
        }
    };
    keep(&mut job);
    let call = job.restart_task(1);
    let failure = expect_refusal_by_exclusion(&job, call);
    assert!(failure.message.contains("takes no part until 1970-01-01T00:10:01Z"), "{failure}");
    job.coordinator.advance_time(Duration::from_micros(59));
    assert_eq!(job.coordinator.job_view().exclusions.len(), 1);
    job.coordinator.advance_time(Duration::from_micros(1));
    assert!(job.coordinator.job_view().exclusions.is_empty());
    let over = job.coordinator.core.job(JOB).expect("it is there").exclusions().remove(0);
    assert_eq!(over.ended.map(|ended| ended.how), Some(ExclusionEndKind::Expired));
    let call = job.restart_task(1);
    assert!(job.coordinator.answers[&call].is_ok(), "{:?}", job.coordinator.answers[&call]);
    assert!(job.coordinator.events.iter().any(|event| event.reason == "expired"));
}

#[test]
fn a_run_whose_tasks_share_their_fate_is_ended_only_on_request() {
    let mut job = SimulatedJob::fate_sharing(3);
    let polls: Vec<_> = (0..3).map(|task| job.poll_for_error(task)).collect();
    let refusal = exclude_task(&mut job, 1).expect_err("it would end the run");
    assert_eq!(refusal.kind(), "ends-run");
    assert!(refusal.to_string().contains("its tasks share their fate"), "{refusal}");
    assert_eq!(job.coordinator.job_view().run.live, 3);

    let act = OperatorCommand::Exclude {
        target: ExclusionTarget::Task(id_of_task(1)),
        expires_in: None,
        end_run: true,
    };
    job.coordinator.perform_operator_command(act).expect("asked for");
    let run = job.coordinator.job_view().run;
    assert_eq!(run.state, RunState::Failed);
    let cause = run.first_cause.expect("a first cause");
    assert_eq!(cause.task, Some(id_of_task(1)));
    assert!(
        cause.error.contains("excluded by alice") && cause.error.contains("misbehave"),
        "{}",
        cause.error
    );
    expect_refusal_by_exclusion(&job, polls[1]);
    for poll in [polls[0], polls[2]] {
        assert!(
            job.expect_failure(poll).message.contains("The run was ended: task 1"),
            "{}",
            job.expect_failure(poll)
        );
    }
    // It does not open the next run; the others do, and wait for it.
    let call = job.restart_task(1);
    expect_refusal_by_exclusion(&job, call);
    assert_eq!(job.coordinator.job_view().run.number.0, 1);
    let waiting = [job.restart_task(0), job.restart_task(2)];
    assert!(waiting.iter().all(|call| job.is_waiting(*call)), "three are needed");
    assert_eq!(job.coordinator.job_view().run.number.0, 2);
    job.coordinator
        .perform_operator_command(OperatorCommand::Readmit { exclusion: ExclusionId(1) })
        .expect("in force");
    let call = job.restart_task(1);
    assert!(job.coordinator.answers[&call].is_ok());
    assert_eq!(job.coordinator.job_view().run.live, 3);
}

#[test]
fn the_last_live_task_is_excluded_only_on_request() {
    let mut job = SimulatedJob::recoverable(2);
    exclude_task(&mut job, 0).expect("one is left");
    let refusal = exclude_task(&mut job, 1).expect_err("nobody would be left");
    assert!(refusal.to_string().contains("nobody would be left"), "{refusal}");
    let act = OperatorCommand::Exclude {
        target: ExclusionTarget::Task(id_of_task(1)),
        expires_in: None,
        end_run: true,
    };
    job.coordinator.perform_operator_command(act).expect("asked for");
    assert_eq!(job.coordinator.job_view().run.state, RunState::Abandoned);
}

#[test]
fn a_recoverable_run_starts_without_those_who_are_excluded_and_takes_them_in_later() {
    let mut settings = JobSettings::new(3);
    settings.recoverable = true;
    let mut job = SimulatedJob {
        coordinator: SimulatedCoordinator::new(settings, 1),
        connections: Vec::new(),
        lives: Vec::new(),
    };
    for _ in 0..3 {
        job.connections.push(job.coordinator.connect());
        job.lives.push(job.coordinator.draw_task_incarnation());
    }
    let (first, second) = (job.register_task(0), job.register_task(1));
    assert!(job.is_waiting(first) && job.is_waiting(second));
    let preview = job.coordinator.core.preview_exclusion(
        job.coordinator.now,
        JOB,
        &test_operator(),
        &test_reason(),
        &ExclusionTarget::Task(id_of_task(2)),
    );
    assert!(preview.expect("it may be excluded").starts_run);
    exclude_task(&mut job, 2).expect("it is not there yet");
    assert!(job.coordinator.answers[&first].is_ok() && job.coordinator.answers[&second].is_ok());
    let view = job.coordinator.job_view();
    assert_eq!((view.run.state, view.run.live), (RunState::Running, 2));
    assert_eq!(view.run.tasks[2].standing, TaskPhase::Missing);

    // It connects late, while the other tasks are further on in their round.
    let (a, b) = (job.call_barrier(0, "begin", 0), job.call_barrier(1, "begin", 0));
    assert_eq!((job.counter_of_passed_barrier(a), job.counter_of_passed_barrier(b)), (Some(0), Some(0)));
    job.coordinator
        .perform_operator_command(OperatorCommand::Readmit { exclusion: ExclusionId(1) })
        .expect("in force");
    let late = job.register_task(2);
    assert!(job.coordinator.answers[&late].is_ok());
    let begins = job.call_barrier(2, "begin", 0);
    let (a, b) = (job.call_barrier(0, "end", 0), job.call_barrier(1, "end", 0));
    assert_eq!(
        (job.counter_of_passed_barrier(a), job.counter_of_passed_barrier(b)),
        (Some(0), Some(0)),
        "they do not wait for one who waits for them"
    );
    let (a, b) = (job.call_barrier(0, "begin", 1), job.call_barrier(1, "begin", 1));
    assert_eq!(
        (
            job.counter_of_passed_barrier(a),
            job.counter_of_passed_barrier(b),
            job.counter_of_passed_barrier(begins)
        ),
        (Some(1), Some(1), Some(1))
    );
}

#[test]
fn a_run_that_forms_waits_again_for_a_task_whose_exclusion_is_lifted() {
    let mut settings = JobSettings::new(3);
    settings.recoverable = true;
    let mut job = SimulatedJob {
        coordinator: SimulatedCoordinator::new(settings, 1),
        connections: Vec::new(),
        lives: Vec::new(),
    };
    for _ in 0..3 {
        job.connections.push(job.coordinator.connect());
        job.lives.push(job.coordinator.draw_task_incarnation());
    }
    exclude_task(&mut job, 2).expect("it is not there yet");
    let first = job.register_task(0);
    job.coordinator
        .perform_operator_command(OperatorCommand::Readmit { exclusion: ExclusionId(1) })
        .expect("in force");
    let second = job.register_task(1);
    assert!(job.is_waiting(first) && job.is_waiting(second), "task 2 is waited for again");
    let third = job.register_task(2);
    assert!([first, second, third].iter().all(|call| job.coordinator.answers[call].is_ok()));
}

#[test]
fn a_host_is_excluded_and_readmitted_by_its_name() {
    let mut job = SimulatedJob::recoverable(4);
    job.connections[1] = job.coordinator.connect_from_host(7);
    job.lives[1] = job.coordinator.draw_task_incarnation();
    job.register_task(1);
    exclude_task(&mut job, 2).expect("excluded");
    let target = named_host("node-a", &["10.0.0.7"], &[2, 3]);
    let exclude = OperatorCommand::Exclude { target, expires_in: None, end_run: false };
    job.coordinator.perform_operator_command(exclude.clone()).expect("one of its tasks is not excluded yet");
    let view = job.coordinator.job_view();
    let host = &view.exclusions[1];
    assert_eq!(
        (host.tasks.clone(), host.target.to_string()),
        ([1, 2, 3].map(id_of_task).to_vec(), "host node-a".into())
    );
    assert_eq!(view.run.live, 1);
    let again = job.coordinator.perform_operator_command(exclude);
    assert!(matches!(again, Err(CommandRefusal::AlreadyExcluded { .. })), "{again:?}");

    // Task 2 stays out as long as one of its two exclusions is in force.
    let readmit = |exclusion| OperatorCommand::Readmit { exclusion: ExclusionId(exclusion) };
    job.coordinator.perform_operator_command(readmit(2)).expect("readmitted");
    for (task, host, out) in [(1, 7, false), (2, 2, true), (3, 3, false)] {
        job.lives[task] = job.coordinator.draw_task_incarnation();
        job.connections[task] = job.coordinator.connect_from_host(host);
        let call = job.register_task(task);
        assert_eq!(job.coordinator.answers[&call].is_err(), out, "task {task}");
    }
    job.coordinator.perform_operator_command(readmit(1)).expect("readmitted");
    job.connections[2] = job.coordinator.connect_from_host(2);
    let call = job.register_task(2);
    assert!(job.coordinator.answers[&call].is_ok());
    assert_eq!(job.coordinator.job_view().run.live, 4);
}

#[test]
fn a_task_of_an_excluded_host_may_register_from_another_host() {
    let mut job = SimulatedJob::recoverable(3);
    job.connections[1] = job.coordinator.connect_from_host(7);
    job.lives[1] = job.coordinator.draw_task_incarnation();
    job.register_task(1);
    let target = ExclusionTarget::host([10, 0, 0, 7].into());
    job.coordinator
        .perform_operator_command(OperatorCommand::Exclude { target, expires_in: None, end_run: false })
        .expect("excluded");
    assert_eq!(job.coordinator.job_view().exclusions[0].tasks, [id_of_task(1)]);
    assert_eq!(job.coordinator.job_view().run.live, 2);
    job.connections[1] = job.coordinator.connect_from_host(7);
    let call = job.register_task(1);
    assert!(expect_refusal_by_exclusion(&job, call).message.contains("10.0.0.7, a host that is excluded"));
    job.lives[1] = job.coordinator.draw_task_incarnation();
    job.connections[1] = job.coordinator.connect_from_host(8);
    let call = job.register_task(1);
    assert!(job.coordinator.answers[&call].is_ok());
    assert_eq!(job.coordinator.job_view().run.live, 3);
    assert!(job.coordinator.job_view().exclusions[0].tasks.is_empty(), "it runs elsewhere now");
}

#[test]
fn exclusions_hold_for_the_runs_that_follow() {
    let mut job = SimulatedJob::recoverable(2);
    exclude_task(&mut job, 1).expect("excluded");
    let call = job.call(0, Request::Shutdown { task: id_of_task(0) });
    assert!(job.coordinator.answers[&call].is_ok());
    assert_eq!(job.coordinator.job_view().run.state, RunState::Completed);
    let call = job.restart_task(1);
    expect_refusal_by_exclusion(&job, call);
    let call = job.restart_task(0);
    assert!(job.coordinator.answers[&call].is_ok(), "the second run starts without the excluded task");
    assert_eq!(job.coordinator.job_view().run.number.0, 2);
}

#[test]
fn an_impossible_exclusion_is_refused_with_the_reason() {
    let mut job = SimulatedJob::recoverable(3);
    let refusal = exclude_task(&mut job, 3).expect_err("there are three");
    assert_eq!(refusal, CommandRefusal::NoSuchTask { task: id_of_task(3), last: 2 });
    exclude_task(&mut job, 2).expect("excluded");
    let refusal = exclude_task(&mut job, 2).expect_err("it is already");
    assert!(refusal.to_string().contains("by exclusion 1 of alice"), "{refusal}");
    let refusal =
        job.coordinator.perform_operator_command(OperatorCommand::Readmit { exclusion: ExclusionId(9) });
    assert_eq!(refusal, Err(CommandRefusal::NoSuchExclusion(ExclusionId(9))));
}

#[test]
fn exclusions_are_bounded_in_number_and_in_memory() {
    let mut settings = JobSettings::new(8);
    settings.recoverable = true;
    settings.bounds.exclusions = 2;
    settings.bounds.exclusions_kept = 1;
    let mut job = SimulatedJob::with_settings(settings);
    for task in 0..2 {
        exclude_task(&mut job, task).expect("there is room");
    }
    assert_eq!(exclude_task(&mut job, 2), Err(CommandRefusal::TooManyExclusions(2)));
    for exclusion in 1..3 {
        job.coordinator
            .perform_operator_command(OperatorCommand::Readmit { exclusion: ExclusionId(exclusion) })
            .expect("in force");
    }
    assert_eq!(
        job.coordinator.core.job(JOB).expect("it is there").exclusions().len(),
        1,
        "one is remembered"
    );
    exclude_task(&mut job, 2).expect("there is room again");
}

#[test]
fn an_error_that_an_excluded_task_reported_itself_does_not_heal() {
    let mut job = SimulatedJob::recoverable(2);
    job.call(1, Request::ReportError { task: id_of_task(1), code: 13, message: "broken".into() });
    exclude_task(&mut job, 1).expect("excluded");
    let (a, read) = (job.call_barrier(0, "b", 0), job.coordinator.job_view().run.tasks[1].error.clone());
    assert_eq!(job.counter_of_passed_barrier(a), Some(0), "nobody waits for it");
    assert!(read.is_some_and(|error| error.contains("broken")), "its own error stays");
    job.coordinator
        .perform_operator_command(OperatorCommand::Readmit { exclusion: ExclusionId(1) })
        .expect("in force");
    let call = job.restart_task(1);
    assert_eq!(job.expect_failure(call).code, Code::Aborted);
}

#[test]
fn a_drain_leaves_the_notice_that_jax_waits_for_once_a_run() {
    let mut job = SimulatedJob::fate_sharing(2);
    let notice = job.call(0, Request::Get { key: Bytes::from_static(b"RECEIVED_PREEMPTION_NOTICE") });
    assert_eq!(
        job.coordinator.perform_operator_command(OperatorCommand::Drain { at: None }),
        Ok(CommandOutcome::DrainRequested)
    );
    let Ok(Reply::Value(value)) = &job.coordinator.answers[&notice] else { panic!("no notice") };
    assert_eq!(value, "1970-01-01T00:00:01+00:00");
    let preemption = job.coordinator.job_view().run.preemption.expect("under way");
    let requested = preemption.requested.expect("an operator asked");
    assert_eq!((&*requested.actor.who, requested.reason.as_str()), ("alice", "it was seen to misbehave"));
    assert_eq!(
        job.coordinator
            .perform_operator_command(OperatorCommand::Drain { at: None })
            .expect_err("once")
            .kind(),
        "drain-under-way"
    );
}

#[test]
fn only_a_run_that_is_running_can_be_drained() {
    let mut world = SimulatedCoordinator::new(JobSettings::new(2), 1);
    let refusal =
        world.perform_operator_command(OperatorCommand::Drain { at: None }).expect_err("nobody is there");
    assert!(refusal.to_string().contains("still waits for its tasks"), "{refusal}");
    let mut job = SimulatedJob::fate_sharing(1);
    job.call(0, Request::Shutdown { task: id_of_task(0) });
    let refusal = job
        .coordinator
        .perform_operator_command(OperatorCommand::Drain { at: None })
        .expect_err("it is over");
    assert!(refusal.to_string().contains("is over (completed)"), "{refusal}");
}

#[test]
fn a_shorter_heartbeat_timeout_holds_at_once_and_exactly() {
    let mut job = SimulatedJob::recoverable(2);
    job.coordinator.advance_time(Duration::from_secs(10));
    job.call_heartbeat(0);
    let change =
        SettingsChange { heartbeat_timeout: Some(Duration::from_secs(20)), ..SettingsChange::default() };
    job.coordinator.perform_operator_command(OperatorCommand::Configure(Box::new(change))).expect("changed");
    job.coordinator.advance_time(Duration::from_micros(9_999_999));
    assert_eq!(job.task_phase(1), TaskPhase::Connected);
    job.coordinator.advance_time(Duration::from_micros(1));
    assert_eq!((job.task_phase(1), job.task_phase(0)), (TaskPhase::Failed, TaskPhase::Connected));
    let said = job.coordinator.events.iter().find_map(|event| match &event.what {
        EventKind::SettingsChanged { settings, .. } => Some(settings.clone()),
        _ => None,
    });
    assert_eq!(said.expect("an event"), ["heartbeat-timeout"]);
}

#[test]
fn settings_that_a_run_in_progress_depends_on_do_not_change() {
    let mut job = SimulatedJob::recoverable(2);
    let mut change = |change: SettingsChange| {
        job.coordinator.perform_operator_command(OperatorCommand::Configure(Box::new(change)))
    };
    let none = SettingsChange::default;
    for refused in [
        SettingsChange { tasks: Some(3), ..none() },
        SettingsChange { recoverable: Some(false), ..none() },
        SettingsChange { error_delivery: Some(ErrorDelivery::Hold), ..none() },
    ] {
        assert_eq!(change(refused).expect_err("in progress").kind(), "run-in-progress");
    }
    assert_eq!(change(SettingsChange { tasks: Some(0), ..none() }).expect_err("none").kind(), "bad-setting");
    for task in 0..2 {
        job.call(task, Request::Shutdown { task: id_of_task(task) });
    }
    let act = OperatorCommand::Configure(Box::new(SettingsChange { tasks: Some(3), ..none() }));
    job.coordinator.perform_operator_command(act).expect("the run is over");
    let view = job.coordinator.job_view();
    assert_eq!((view.run.number.0, view.run.tasks.len(), view.settings.tasks), (2, 3, 3));
    let ended = view.history.first().map(|run| run.outcome);
    assert_eq!(ended, Some(RunOutcome::Completed));
}

#[test]
fn a_stray_process_of_an_excused_task_blocks_no_barrier() {
    let mut job = SimulatedJob::recoverable(3);
    job.connections[1] = job.coordinator.connect_from_host(7);
    job.lives[1] = job.coordinator.draw_task_incarnation();
    job.register_task(1);
    job.kill_task(1);
    job.coordinator.advance_time(Duration::from_secs(1));
    let target = ExclusionTarget::host([10, 0, 0, 7].into());
    job.coordinator
        .perform_operator_command(OperatorCommand::Exclude { target, expires_in: None, end_run: false })
        .expect("excluded");
    let first = job.call_barrier(0, "b", 0);
    // It comes from a host that is not excluded, and has not registered there.
    job.connections[1] = job.coordinator.connect_from_host(8);
    let stray = job.call_barrier(1, "b", 0);
    job.coordinator.hang_up(stray);
    let last = job.call_barrier(2, "b", 0);
    assert_eq!(
        (job.counter_of_passed_barrier(first), job.counter_of_passed_barrier(last)),
        (Some(0), Some(0))
    );
}
