//! Tests what follows for the other tasks, and how soon, when a task is killed.

use muster::coordination::{EventKind, JobView, RunOutcome, RunState, TaskId, TaskPhase};
use muster::http::api::EventLine;
use rustix::process::Signal;

use super::fixture::JaxFixture;
use super::process::Process;
use super::server::Server;
use super::{RunSet, Test};

pub const TESTS: &[Test] = &[
    (RunSet::All, "a_killed_task_ends_the_others_within_a_second_and_all_can_begin_again", |scene| {
        fate_shared(scene, 1)
    }),
    (RunSet::One, "the_death_of_process_0_is_like_any_other", |scene| fate_shared(scene, 0)),
    (RunSet::All, "a_killed_task_of_a_recoverable_job_leaves_the_live_set_and_comes_back", recoverable),
];

/// The time in seconds within which the server must detect a killed task: JAX's own service takes 100 s at
/// default settings.
const NEWS: f64 = 1.0;
/// The time in seconds within which the other processes must have ended. The error reaches them within
/// milliseconds, but the abort of a process takes its time on a busy machine.
const END: f64 = 5.0;

fn fate_shared(scene: &JaxFixture, victim: usize) {
    let server = scene.serve(&["--tasks", "3"]);
    // With a backend, so that the run leaves keys behind.
    let tasks = scene.start_all(3, &["worker.py", "steps", "--backend"]);
    tasks.iter().for_each(|task| _ = task.line("step", |line| line.number::<u64>("n") >= 2));
    let peer = peer_of(&server.view("default"), victim);
    let clock = server.clock();

    let killed = tasks[victim].signal(Signal::KILL);

    let failure = server.failure(id(victim), 1);
    let news = clock.moment(failure.at) - killed;
    assert!(news < NEWS, "the server learned of it after {news:.3} s");
    assert!(failure.reason.contains(&peer), "{}", failure.reason);
    let mut last = 0.0_f64;
    for (_, other) in tasks.iter().enumerate().filter(|(task, _)| *task != victim) {
        let end = other.fail();
        last = last.max(end.at - killed);
        names_the_dead(other, victim, &peer);
    }
    assert!(last < END, "the last of the others ended after {last:.3} s");
    scene.figure("kill -9 known to the server after", news);
    scene.figure("the others ended after", last);

    // The same tasks again, on the same server. Without a backend, whose keys would be taken for leftovers.
    let first = server.until_run(1, RunState::Failed).run;
    assert!(first.keys > 0);
    let tasks = scene.start_all(3, &["worker.py", "steps", "--steps", "3"]);
    tasks[0].line("step", |line| line.number::<u64>("n") >= 1);
    let second = server.until_run(2, RunState::Running).run;
    assert_eq!(second.keys, 0, "keys of the first run are left");
    assert_ne!(second.incarnation, first.incarnation);
    tasks.iter().for_each(Process::succeed);

    let view = server.until_run(2, RunState::Completed);
    assert_eq!(view.run.first_cause, None);
    let begun = server.events("default").into_iter().find_map(|event| match event.what {
        EventKind::BarrierStarted { barrier, counter } if event.run.0 == 2 && &*barrier == "step" => {
            Some(counter)
        }
        _ => None,
    });
    assert_eq!(begun, Some(0), "the barrier goes on where the first run left it");
    let history = &view.history[0];
    assert_eq!((history.number.0, history.outcome), (1, RunOutcome::Failed));
    let cause = history.first_cause.as_ref().expect("why it failed");
    assert_eq!(cause.task, Some(TaskId(id(victim))));
    assert!(cause.error.contains(&peer), "{}", cause.error);
}

/// Checks that the last output of a process names the lost task, its address, and how the loss was detected.
fn names_the_dead(other: &Process, victim: usize, peer: &str) {
    let said = other.unstructured();
    assert!(said.contains("connection lost"), "no cause: {said}");
    assert!(said.contains(&format!("task {victim} at {peer}")), "no address: {said}");
}

fn recoverable(scene: &JaxFixture) {
    let server = scene.serve(&["--tasks", "3", "--recoverable"]);
    let program = ["worker.py", "live", "--recoverable"];
    let mut tasks = scene.start_all(3, &program);
    let everybody = "0,1,2";
    tasks.iter().for_each(|task| _ = task.line("live", |line| line.text("members") == everybody));
    let clock = server.clock();
    let marks: Vec<usize> = tasks.iter().map(Process::mark).collect();

    let killed = tasks[1].signal(Signal::KILL);

    let news = clock.moment(server.failure(1, 1).at) - killed;
    assert!(news < NEWS, "the server learned of it after {news:.3} s");
    let mut shrunk = 0.0_f64;
    for other in [0, 2] {
        let line = tasks[other].line_after(marks[other], "live", |line| line.text("members") == "0,2");
        shrunk = shrunk.max(line.at - killed);
    }
    scene.figure("kill -9 known to the server after", news);
    scene.figure("the live set of the others shrank after", shrunk);

    let marks: Vec<usize> = tasks.iter().map(Process::mark).collect();
    tasks[1] = scene.start(1, 3, &program);
    tasks[1].line("live", |line| line.text("members") == everybody);
    for other in [0, 2] {
        tasks[other].line_after(marks[other], "live", |line| line.text("members") == everybody);
    }
    let view = server.until_run(1, RunState::Running);
    let task = &view.run.tasks[1];
    assert_eq!((task.standing, task.lives.len()), (TaskPhase::Connected, 2));
    assert!(
        task.lives[1].ended.as_ref().is_some_and(|why| why.contains("connection")),
        "{:?}",
        task.lives[1]
    );

    for task in &tasks {
        task.signal(Signal::INT);
    }
    tasks.iter().for_each(Process::succeed);
    server.until_run(1, RunState::Completed);
    assert_eq!(failed_tasks(server), [1], "nobody else died");
}

/// Returns the failed tasks, in order.
pub fn failed_tasks(server: &Server) -> Vec<i32> {
    let failed = |event: EventLine| match event.what {
        EventKind::TaskFailed { task, .. } => Some(task.0),
        _ => None,
    };
    server.events("default").into_iter().filter_map(failed).collect()
}

/// Returns the address from which a task registered.
fn peer_of(view: &JobView, task: usize) -> String {
    view.run.tasks[task].lives[0].peer.expect("it has registered").to_string()
}

/// Returns a task's number in the server's type.
fn id(task: usize) -> i32 {
    i32::try_from(task).expect("tests have few tasks")
}
