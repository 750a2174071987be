//! JAX programs under `muster launch`.

use muster::coordination::{RunOutcome, RunState};

use super::fixture::JaxFixture;
use super::{RunSet, Test};

pub const TESTS: &[Test] = &[
    (RunSet::All, "a_launched_program_trains", train),
    (RunSet::Both, "a_launched_job_begins_again_when_a_task_fails", begin_again),
    (RunSet::Both, "a_launched_recoverable_job_takes_back_a_task_that_failed", take_back),
];

fn train(scene: &JaxFixture) {
    let launch = scene.launch(&["-n", "2"], &["train.py", "--steps", "200"]);
    launch.succeed();
    for task in 0..2 {
        let done = launch.text(&format!("[{task}] [process {task}] done: the loss went from "));
        let mut losses = done.split("from ").nth(1).unwrap().split(" to ");
        let mut next =
            || -> f64 { losses.next().unwrap().split(' ').next().unwrap().parse().expect("a loss") };
        let (first, last) = (next(), next());
        assert!(last < first / 2.0, "{done}");
    }
}

fn begin_again(scene: &JaxFixture) {
    let server = scene.serve(&["--tasks", "3"]);
    let url = format!("http://{}", server.about.http);
    let died = scene.file("died");
    let program = ["worker.py", "steps", "--steps", "5", "--die-once", &died];
    let launch = scene.launch(&["-n", "3", "--max-restarts", "1", "--server", &url], &program);
    launch.succeed();
    launch.text("2 run(s), 1 restart(s)");

    let view = server.until_run(2, RunState::Completed);
    assert_eq!(view.run.first_cause, None);
    assert_eq!(view.history[0].outcome, RunOutcome::Failed);
    let dead = launch.records("dying")[0].number("task");
    let cause = view.history[0].first_cause.as_ref().expect("why the first run failed");
    assert_eq!(cause.task.map(|task| task.0), Some(dead));
    assert_eq!(launch.records("shutdown").len(), 3);
}

fn take_back(scene: &JaxFixture) {
    let died = scene.file("died");
    let program = ["worker.py", "rounds", "--recoverable", "--rounds", "4", "--die-once", &died];
    let launch = scene.launch(&["-n", "3", "--max-restarts", "1", "--recoverable"], &program);
    launch.succeed();
    launch.text("1 run(s), 1 restart(s)");
    assert_eq!(launch.records("registered").len(), 4, "only the one that failed was started again");
    assert_eq!(launch.records("shutdown").len(), 3);
}
