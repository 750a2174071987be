//! Tests of exclusions and drains.

use std::time::Duration;

use bytes::Bytes;
use muster::coordination::{
    Code, CommandOutcome, CommandRefusal, ErrorDelivery, EventKind, ExclusionEndKind, ExclusionId,
    ExclusionTarget, Failure, JobSettings, OperatorCommand, Reply, Request, RunOutcome, RunState,
    SettingsChange, TaskId, TaskPhase, TaskSet,
};

use crate::coordinator::{JOB, SimulatedCoordinator, operator, reason};
use crate::rules::{Job, id};

fn exclude(job: &mut Job, task: usize) -> Result<CommandOutcome, CommandRefusal> {
    job.coordinator.act(OperatorCommand::Exclude {
        target: ExclusionTarget::Task(id(task)),
        expires_in: None,
        end_run: false,
    })
}

fn refused(job: &Job, call: muster::coordination::CallId) -> Failure {
    let failure = job.failure(call).clone();
    assert_eq!(failure.code, Code::PermissionDenied, "{failure}");
    assert!(failure.service_error.is_some(), "without the service's own mark clients would try again");
    failure
}

fn live_set(job: &mut Job, task: usize) -> muster::coordination::CallId {
    let all = TaskSet::new((0..job.lives.len()).map(id).collect());
    job.ask(task, Request::LiveSet { task: id(task), tasks: all })
}

#[test]
fn an_excluded_task_is_out_at_once_and_the_others_go_on() {
    let mut job = Job::recoverable(3);
    let (ours, theirs) = (job.barrier(0, "step", 0), job.barrier(2, "step", 0));
    let (asked, waited) = (live_set(&mut job, 0), live_set(&mut job, 2));
    let read = job.ask(2, Request::Get { key: Bytes::from_static(b"k") });
    let other = live_set(&mut job, 1);
    assert!(!job.waits(asked), "all three have asked");
    let (asked, waited_again) = (live_set(&mut job, 0), live_set(&mut job, 1));
    let watch = job.ask(0, Request::Watch { version: -1 });
    let Ok(Reply::States(states)) = &job.coordinator.answers[&watch] else { panic!("no states") };
    let version = states.version;
    let watch = job.ask(0, Request::Watch { version });

    assert_eq!(exclude(&mut job, 2), Ok(CommandOutcome::Excluded(ExclusionId(1))));

    // Its own calls get the operator and the reason.
    for call in [theirs, read] {
        let failure = refused(&job, call);
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
    assert!(!job.waits(watch));
    assert!(job.waits(ours), "task 1 has not come");
    let last = job.barrier(1, "step", 0);
    assert_eq!((job.passed(ours), job.passed(last)), (Some(0), Some(0)));
    for counter in 1..4 {
        let (a, b) = (job.barrier(0, "step", counter), job.barrier(1, "step", counter));
        assert_eq!((job.passed(a), job.passed(b)), (Some(counter), Some(counter)));
    }

    // Its next call gets the exclusion, whatever it is, and it cannot return.
    let heartbeat = job.heartbeat(2);
    refused(&job, heartbeat);
    let barrier = job.barrier(2, "step", 4);
    refused(&job, barrier);
    let write =
        job.ask(2, Request::Insert { key: "x".into(), value: Bytes::from_static(b"v"), overwrite: false });
    refused(&job, write);
    let call = job.restart(2);
    let failure = refused(&job, call);
    assert!(failure.message.contains("muster readmit --job default 1"), "{failure}");
    let again = job.restart(2);
    refused(&job, again);

    let view = job.coordinator.view();
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
    let mut job = Job::recoverable(3);
    exclude(&mut job, 2).expect("excluded");
    let readmit = OperatorCommand::Readmit { exclusion: ExclusionId(1) };
    assert_eq!(job.coordinator.act(readmit.clone()), Ok(CommandOutcome::Readmitted));
    assert_eq!(job.coordinator.act(readmit), Err(CommandRefusal::AlreadyOver(ExclusionId(1))));
    // Its old incarnation stays fenced, whatever became of the exclusion.
    let old = job.heartbeat(2);
    refused(&job, old);
    let (a, b) = (job.barrier(0, "step", 0), job.barrier(1, "step", 0));
    assert_eq!((job.passed(a), job.passed(b)), (Some(0), Some(0)));
    let call = job.restart(2);
    assert!(job.coordinator.answers[&call].is_ok());
    let (a, b) = (job.barrier(0, "step", 1), job.barrier(1, "step", 1));
    assert!(job.waits(a) && job.waits(b), "it takes part again");
    let c = job.barrier(2, "step", 0);
    assert_eq!((job.passed(a), job.passed(b), job.passed(c)), (Some(1), Some(1), Some(1)));
}

#[test]
fn an_exclusion_ends_exactly_when_its_time_is_over() {
    let mut job = Job::recoverable(2);
    let expires_in = Some(Duration::from_secs(600));
    job.coordinator
        .act(OperatorCommand::Exclude { target: ExclusionTarget::Task(id(1)), expires_in, end_run: false })
        .expect("excluded");
    let keep = |job: &mut Job| {
        for _ in 0..60 {
            job.heartbeat(0);
            job.coordinator.advance(Duration::from_micros(9_999_999));
        }
    };
    keep(&mut job);
    let call = job.restart(1);
    let failure = refused(&job, call);
    assert!(failure.message.contains("takes no part until 1970-01-01T00:10:01Z"), "{failure}");
    job.coordinator.advance(Duration::from_micros(59));
    assert_eq!(job.coordinator.view().exclusions.len(), 1);
    job.coordinator.advance(Duration::from_micros(1));
    assert!(job.coordinator.view().exclusions.is_empty());
    let over = job.coordinator.core.job(JOB).expect("it is there").exclusions().remove(0);
    assert_eq!(over.ended.map(|ended| ended.how), Some(ExclusionEndKind::Expired));
    let call = job.restart(1);
    assert!(job.coordinator.answers[&call].is_ok(), "{:?}", job.coordinator.answers[&call]);
    assert!(job.coordinator.events.iter().any(|event| event.reason == "expired"));
}

#[test]
fn a_run_whose_tasks_share_their_fate_is_ended_only_on_request() {
    let mut job = Job::fate_sharing(3);
    let polls: Vec<_> = (0..3).map(|task| job.poll(task)).collect();
    let refusal = exclude(&mut job, 1).expect_err("it would end the run");
    assert_eq!(refusal.kind(), "ends-run");
    assert!(refusal.to_string().contains("its tasks share their fate"), "{refusal}");
    assert_eq!(job.coordinator.view().run.live, 3);

    let act =
        OperatorCommand::Exclude { target: ExclusionTarget::Task(id(1)), expires_in: None, end_run: true };
    job.coordinator.act(act).expect("asked for");
    let run = job.coordinator.view().run;
    assert_eq!(run.state, RunState::Failed);
    let cause = run.first_cause.expect("a first cause");
    assert_eq!(cause.task, Some(id(1)));
    assert!(
        cause.error.contains("excluded by alice") && cause.error.contains("misbehave"),
        "{}",
        cause.error
    );
    refused(&job, polls[1]);
    for poll in [polls[0], polls[2]] {
        assert!(job.failure(poll).message.contains("The run was ended: task 1"), "{}", job.failure(poll));
    }
    // It does not open the next run; the others do, and wait for it.
    let call = job.restart(1);
    refused(&job, call);
    assert_eq!(job.coordinator.view().run.number.0, 1);
    let waiting = [job.restart(0), job.restart(2)];
    assert!(waiting.iter().all(|call| job.waits(*call)), "three are needed");
    assert_eq!(job.coordinator.view().run.number.0, 2);
    job.coordinator.act(OperatorCommand::Readmit { exclusion: ExclusionId(1) }).expect("in force");
    let call = job.restart(1);
    assert!(job.coordinator.answers[&call].is_ok());
    assert_eq!(job.coordinator.view().run.live, 3);
}

#[test]
fn the_last_live_task_is_excluded_only_on_request() {
    let mut job = Job::recoverable(2);
    exclude(&mut job, 0).expect("one is left");
    let refusal = exclude(&mut job, 1).expect_err("nobody would be left");
    assert!(refusal.to_string().contains("nobody would be left"), "{refusal}");
    let act =
        OperatorCommand::Exclude { target: ExclusionTarget::Task(id(1)), expires_in: None, end_run: true };
    job.coordinator.act(act).expect("asked for");
    assert_eq!(job.coordinator.view().run.state, RunState::Abandoned);
}

#[test]
fn a_recoverable_run_starts_without_those_who_are_excluded_and_takes_them_in_later() {
    let mut settings = JobSettings::new(3);
    settings.recoverable = true;
    let mut job = Job {
        coordinator: SimulatedCoordinator::new(settings, 1),
        connections: Vec::new(),
        lives: Vec::new(),
    };
    for _ in 0..3 {
        job.connections.push(job.coordinator.connect());
        job.lives.push(job.coordinator.fresh_life());
    }
    let (first, second) = (job.register(0), job.register(1));
    assert!(job.waits(first) && job.waits(second));
    let preview = job.coordinator.core.preview_exclusion(
        job.coordinator.now,
        JOB,
        &operator(),
        &reason(),
        ExclusionTarget::Task(id(2)),
    );
    assert!(preview.expect("it may be excluded").starts_run);
    exclude(&mut job, 2).expect("it is not there yet");
    assert!(job.coordinator.answers[&first].is_ok() && job.coordinator.answers[&second].is_ok());
    let view = job.coordinator.view();
    assert_eq!((view.run.state, view.run.live), (RunState::Running, 2));
    assert_eq!(view.run.tasks[2].standing, TaskPhase::Missing);

    // It connects late, while the other tasks are further on in their round.
    let (a, b) = (job.barrier(0, "begin", 0), job.barrier(1, "begin", 0));
    assert_eq!((job.passed(a), job.passed(b)), (Some(0), Some(0)));
    job.coordinator.act(OperatorCommand::Readmit { exclusion: ExclusionId(1) }).expect("in force");
    let late = job.register(2);
    assert!(job.coordinator.answers[&late].is_ok());
    let begins = job.barrier(2, "begin", 0);
    let (a, b) = (job.barrier(0, "end", 0), job.barrier(1, "end", 0));
    assert_eq!(
        (job.passed(a), job.passed(b)),
        (Some(0), Some(0)),
        "they do not wait for one who waits for them"
    );
    let (a, b) = (job.barrier(0, "begin", 1), job.barrier(1, "begin", 1));
    assert_eq!((job.passed(a), job.passed(b), job.passed(begins)), (Some(1), Some(1), Some(1)));
}

#[test]
fn a_run_that_forms_waits_again_for_a_task_whose_exclusion_is_lifted() {
    let mut settings = JobSettings::new(3);
    settings.recoverable = true;
    let mut job = Job {
        coordinator: SimulatedCoordinator::new(settings, 1),
        connections: Vec::new(),
        lives: Vec::new(),
    };
    for _ in 0..3 {
        job.connections.push(job.coordinator.connect());
        job.lives.push(job.coordinator.fresh_life());
    }
    exclude(&mut job, 2).expect("it is not there yet");
    let first = job.register(0);
    job.coordinator.act(OperatorCommand::Readmit { exclusion: ExclusionId(1) }).expect("in force");
    let second = job.register(1);
    assert!(job.waits(first) && job.waits(second), "task 2 is waited for again");
    let third = job.register(2);
    assert!([first, second, third].iter().all(|call| job.coordinator.answers[call].is_ok()));
}

#[test]
fn a_task_of_an_excluded_host_may_register_from_another_host() {
    let mut job = Job::recoverable(3);
    job.connections[1] = job.coordinator.connect_from(7);
    job.lives[1] = job.coordinator.fresh_life();
    job.register(1);
    let target = ExclusionTarget::host([10, 0, 0, 7].into());
    job.coordinator
        .act(OperatorCommand::Exclude { target, expires_in: None, end_run: false })
        .expect("excluded");
    assert_eq!(job.coordinator.view().exclusions[0].tasks, [id(1)]);
    assert_eq!(job.coordinator.view().run.live, 2);
    job.connections[1] = job.coordinator.connect_from(7);
    let call = job.register(1);
    assert!(refused(&job, call).message.contains("10.0.0.7, a host that is excluded"));
    job.lives[1] = job.coordinator.fresh_life();
    job.connections[1] = job.coordinator.connect_from(8);
    let call = job.register(1);
    assert!(job.coordinator.answers[&call].is_ok());
    assert_eq!(job.coordinator.view().run.live, 3);
    assert!(job.coordinator.view().exclusions[0].tasks.is_empty(), "it runs elsewhere now");
}

#[test]
fn exclusions_hold_for_the_runs_that_follow() {
    let mut job = Job::recoverable(2);
    exclude(&mut job, 1).expect("excluded");
    let call = job.ask(0, Request::Shutdown { task: id(0) });
    assert!(job.coordinator.answers[&call].is_ok());
    assert_eq!(job.coordinator.view().run.state, RunState::Completed);
    let call = job.restart(1);
    refused(&job, call);
    let call = job.restart(0);
    assert!(job.coordinator.answers[&call].is_ok(), "the second run starts without the excluded task");
    assert_eq!(job.coordinator.view().run.number.0, 2);
}

#[test]
fn an_impossible_exclusion_is_refused_with_the_reason() {
    let mut job = Job::recoverable(3);
    let refusal = exclude(&mut job, 3).expect_err("there are three");
    assert_eq!(refusal, CommandRefusal::NoSuchTask { task: id(3), last: 2 });
    exclude(&mut job, 2).expect("excluded");
    let refusal = exclude(&mut job, 2).expect_err("it is already");
    assert!(refusal.to_string().contains("by exclusion 1 of alice"), "{refusal}");
    let refusal = job.coordinator.act(OperatorCommand::Readmit { exclusion: ExclusionId(9) });
    assert_eq!(refusal, Err(CommandRefusal::NoSuchExclusion(ExclusionId(9))));
}

#[test]
fn exclusions_are_bounded_in_number_and_in_memory() {
    let mut settings = JobSettings::new(8);
    settings.recoverable = true;
    settings.bounds.exclusions = 2;
    settings.bounds.exclusions_kept = 1;
    let mut job = Job::of(settings);
    for task in 0..2 {
        exclude(&mut job, task).expect("there is room");
    }
    assert_eq!(exclude(&mut job, 2), Err(CommandRefusal::TooManyExclusions(2)));
    for exclusion in 1..3 {
        job.coordinator
            .act(OperatorCommand::Readmit { exclusion: ExclusionId(exclusion) })
            .expect("in force");
    }
    assert_eq!(
        job.coordinator.core.job(JOB).expect("it is there").exclusions().len(),
        1,
        "one is remembered"
    );
    exclude(&mut job, 2).expect("there is room again");
}

#[test]
fn an_error_that_an_excluded_task_reported_itself_does_not_heal() {
    let mut job = Job::recoverable(2);
    job.ask(1, Request::ReportError { task: id(1), code: 13, message: "broken".into() });
    exclude(&mut job, 1).expect("excluded");
    let (a, read) = (job.barrier(0, "b", 0), job.coordinator.view().run.tasks[1].error.clone());
    assert_eq!(job.passed(a), Some(0), "nobody waits for it");
    assert!(read.is_some_and(|error| error.contains("broken")), "its own error stays");
    job.coordinator.act(OperatorCommand::Readmit { exclusion: ExclusionId(1) }).expect("in force");
    let call = job.restart(1);
    assert_eq!(job.failure(call).code, Code::Aborted);
}

#[test]
fn a_drain_leaves_the_notice_that_jax_waits_for_once_a_run() {
    let mut job = Job::fate_sharing(2);
    let notice = job.ask(0, Request::Get { key: Bytes::from_static(b"RECEIVED_PREEMPTION_NOTICE") });
    assert_eq!(job.coordinator.act(OperatorCommand::Drain { at: None }), Ok(CommandOutcome::DrainRequested));
    let Ok(Reply::Value(value)) = &job.coordinator.answers[&notice] else { panic!("no notice") };
    assert_eq!(value, "1970-01-01T00:00:01+00:00");
    let preemption = job.coordinator.view().run.preemption.expect("under way");
    let requested = preemption.requested.expect("an operator asked");
    assert_eq!((&*requested.actor.who, requested.reason.as_str()), ("alice", "it was seen to misbehave"));
    assert_eq!(
        job.coordinator.act(OperatorCommand::Drain { at: None }).expect_err("once").kind(),
        "drain-under-way"
    );
}

#[test]
fn only_a_run_that_is_running_can_be_drained() {
    let mut world = SimulatedCoordinator::new(JobSettings::new(2), 1);
    let refusal = world.act(OperatorCommand::Drain { at: None }).expect_err("nobody is there");
    assert!(refusal.to_string().contains("still waits for its tasks"), "{refusal}");
    let mut job = Job::fate_sharing(1);
    job.ask(0, Request::Shutdown { task: id(0) });
    let refusal = job.coordinator.act(OperatorCommand::Drain { at: None }).expect_err("it is over");
    assert!(refusal.to_string().contains("is over (completed)"), "{refusal}");
}

#[test]
fn a_shorter_heartbeat_timeout_holds_at_once_and_exactly() {
    let mut job = Job::recoverable(2);
    job.coordinator.advance(Duration::from_secs(10));
    job.heartbeat(0);
    let change =
        SettingsChange { heartbeat_timeout: Some(Duration::from_secs(20)), ..SettingsChange::default() };
    job.coordinator.act(OperatorCommand::Configure(Box::new(change))).expect("changed");
    job.coordinator.advance(Duration::from_micros(9_999_999));
    assert_eq!(job.standing(1), TaskPhase::Connected);
    job.coordinator.advance(Duration::from_micros(1));
    assert_eq!((job.standing(1), job.standing(0)), (TaskPhase::Failed, TaskPhase::Connected));
    let said = job.coordinator.events.iter().find_map(|event| match &event.what {
        EventKind::SettingsChanged { settings, .. } => Some(settings.clone()),
        _ => None,
    });
    assert_eq!(said.expect("an event"), ["heartbeat-timeout"]);
}

#[test]
fn settings_that_a_run_in_progress_depends_on_do_not_change() {
    let mut job = Job::recoverable(2);
    let mut change =
        |change: SettingsChange| job.coordinator.act(OperatorCommand::Configure(Box::new(change)));
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
        job.ask(task, Request::Shutdown { task: id(task) });
    }
    let act = OperatorCommand::Configure(Box::new(SettingsChange { tasks: Some(3), ..none() }));
    job.coordinator.act(act).expect("the run is over");
    let view = job.coordinator.view();
    assert_eq!((view.run.number.0, view.run.tasks.len(), view.settings.tasks), (2, 3, 3));
    let ended = view.history.first().map(|run| run.outcome);
    assert_eq!(ended, Some(RunOutcome::Completed));
}

#[test]
fn a_stray_process_of_an_excused_task_blocks_no_barrier() {
    let mut job = Job::recoverable(3);
    job.connections[1] = job.coordinator.connect_from(7);
    job.lives[1] = job.coordinator.fresh_life();
    job.register(1);
    job.kill(1);
    job.coordinator.advance(Duration::from_secs(1));
    let target = ExclusionTarget::host([10, 0, 0, 7].into());
    job.coordinator
        .act(OperatorCommand::Exclude { target, expires_in: None, end_run: false })
        .expect("excluded");
    let first = job.barrier(0, "b", 0);
    // It comes from a host that is not excluded, and has not registered there.
    job.connections[1] = job.coordinator.connect_from(8);
    let stray = job.barrier(1, "b", 0);
    job.coordinator.hang_up(stray);
    let last = job.barrier(2, "b", 0);
    assert_eq!((job.passed(first), job.passed(last)), (Some(0), Some(0)));
}
