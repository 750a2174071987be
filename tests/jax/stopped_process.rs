//! Tests of tasks that are silent for longer than the heartbeat timeout, and then continue.

use muster::coordination::{EventKind, RunOutcome, RunState, TaskPhase};
use muster::http::api::EventLine;
use rustix::process::Signal;

use super::death::failed_tasks;
use super::fixture::JaxFixture;
use super::process::Process;
use super::server::Server;
use super::{RunSet, Test};

pub const TESTS: &[Test] = &[
    (
        RunSet::Both,
        "a_frozen_task_ends_the_others_at_its_heartbeat_timeout_and_itself_when_it_wakes",
        fate_shared,
    ),
    (
        RunSet::Both,
        "a_frozen_task_of_a_recoverable_job_is_missed_at_its_heartbeat_timeout_and_replaced",
        recoverable,
    ),
    (RunSet::Both, "a_task_of_a_failed_run_that_wakes_in_the_next_ends_and_changes_nothing", zombie_held),
    (RunSet::Both, "a_task_of_a_failed_run_that_speaks_in_the_next_is_fenced", zombie_cancelled),
];

/// The heartbeat timeout of these tests, on both sides, in seconds. Clients send two heartbeats within it.
const TIMEOUT: &str = "3";
/// The delay in seconds that the server may have. It has no tick, but the machine may be busy.
const LATE: f64 = 0.5;

/// Stops a task right after a heartbeat, waits until the server has declared it lost, and checks the time.
fn freeze(scene: &JaxFixture, server: &Server, tasks: &[Process], task: i32) -> EventLine {
    server.heartbeat(task);
    let index = usize::try_from(task).unwrap();
    tasks[index].signal(Signal::STOP);
    let failure = server.failure(task, 1);
    let last = server.view("default").run.tasks[index].last_heartbeat.expect("it was heard");
    let silent = failure.at.since(last).as_secs_f64();
    let timeout: f64 = TIMEOUT.parse().unwrap();
    assert!((timeout..timeout + LATE).contains(&silent), "given up after {silent:.3} s of silence");
    assert!(failure.reason.contains("no heartbeat for 3 s"), "{}", failure.reason);
    scene.figure(&format!("with a timeout of {TIMEOUT} s given up after"), silent);
    failure
}

fn fate_shared(scene: &JaxFixture) {
    let server = scene.serve(&["--tasks", "3", "--heartbeat-timeout", &format!("{TIMEOUT}s")]);
    let tasks = scene.start_all(3, &["worker.py", "steps", "--heartbeat-timeout", TIMEOUT]);
    tasks.iter().for_each(|task| _ = task.line("step", |line| line.number::<u64>("n") >= 2));
    let peer = server.view("default").run.tasks[1].lives[0].peer.expect("it has registered");

    freeze(scene, server, &tasks, 1);

    for other in [0, 2] {
        tasks[other].fail();
        let said = tasks[other].unstructured();
        assert!(said.contains(&format!("task 1 at {peer}")), "no address: {said}");
        assert!(said.contains("heartbeat"), "no cause: {said}");
    }
    assert!(tasks[1].is_running(), "it sleeps");
    let woken = tasks[1].signal(Signal::CONT);
    scene.figure("woken, it ended after", tasks[1].fail().at - woken);
    let run = server.until_run(1, RunState::Failed).run;
    assert_eq!(run.first_cause.and_then(|cause| cause.task).map(|task| task.0), Some(1));
}

fn recoverable(scene: &JaxFixture) {
    let server =
        scene.serve(&["--tasks", "3", "--recoverable", "--heartbeat-timeout", &format!("{TIMEOUT}s")]);
    let program = ["worker.py", "live", "--recoverable", "--heartbeat-timeout", TIMEOUT];
    let mut tasks = scene.start_all(3, &program);
    tasks.iter().for_each(|task| _ = task.line("live", |line| line.text("members") == "0,1,2"));
    let marks: Vec<usize> = tasks.iter().map(Process::mark).collect();

    freeze(scene, server, &tasks, 1);

    for other in [0, 2] {
        tasks[other].line_after(marks[other], "live", |line| line.text("members") == "0,2");
    }
    let woken = tasks[1].signal(Signal::CONT);
    scene.figure("woken, it ended after", tasks[1].fail().at - woken);
    let said = tasks[1].unstructured();
    assert!(said.contains("heartbeat timeout"), "it was not told why: {said}");

    let marks: Vec<usize> = tasks.iter().map(Process::mark).collect();
    tasks[1] = scene.start(1, 3, &program);
    for other in [0, 2] {
        tasks[other].line_after(marks[other], "live", |line| line.text("members") == "0,1,2");
    }
    tasks[1].line("live", |line| line.text("members") == "0,1,2");
    assert_eq!(server.view("default").run.tasks[1].standing, TaskPhase::Connected);
    for task in &tasks {
        task.signal(Signal::INT);
    }
    tasks.iter().for_each(Process::succeed);
    server.until_run(1, RunState::Completed);
    assert_eq!(failed_tasks(server), [1], "nobody else died");
}

/// Lets the run fail while a task is stopped; all tasks are restarted, and the stopped one continues among
/// them.
fn zombie(scene: &JaxFixture, server: &Server, program: &[&str]) -> Process {
    let mut tasks = scene.start_all(3, program);
    tasks.iter().for_each(|task| _ = task.line("registered", |_| true));
    server.heartbeat(2);
    tasks[2].signal(Signal::STOP);
    tasks[1].signal(Signal::KILL);
    server.until_run(1, RunState::Failed);
    tasks[0].fail();
    let zombie = tasks.pop().expect("three of them");

    let tasks = scene.start_all(3, &["worker.py", "steps", "--steps", "50"]);
    tasks.iter().for_each(|task| _ = task.line("step", |line| line.number::<u64>("n") >= 2));
    let woken = zombie.signal(Signal::CONT);
    scene.figure("woken, it ended after", zombie.fail().at - woken);
    tasks.iter().for_each(Process::succeed);

    let view = server.until_run(2, RunState::Completed);
    assert_eq!(view.run.first_cause, None);
    assert_eq!(view.history[0].outcome, RunOutcome::Failed);
    let touched = server.events("default").into_iter().find(|event| {
        let troubles = matches!(event.what, EventKind::TaskFailed { .. } | EventKind::TaskSuspected { .. });
        event.run.0 == 2 && troubles
    });
    assert_eq!(touched, None);
    zombie
}

fn zombie_held(scene: &JaxFixture) {
    let server = scene.serve(&["--tasks", "3"]);
    // Its error poll was answered while it was stopped: it makes no further call.
    let zombie = zombie(scene, server, &["worker.py", "steps", "--heartbeat-timeout", "4"]);
    let said = zombie.unstructured();
    assert!(said.contains("task 1 at "), "it was not told why: {said}");
}

fn zombie_cancelled(scene: &JaxFixture) {
    let server = scene.serve(&["--tasks", "3", "--error-delivery", "cancel"]);
    // Its next heartbeat is due, and no answer has told it anything.
    let zombie =
        zombie(scene, server, &["worker.py", "register", "--seconds", "600", "--heartbeat-timeout", "4"]);
    let fenced = server.event("it is fenced", |event| matches!(event.what, EventKind::Fenced { .. }));
    assert_eq!(fenced.run.0, 2);
    for told in [&fenced.reason, &zombie.unstructured()] {
        assert!(told.contains("belongs to run 1 of job default, which is over"), "{told}");
    }
}
