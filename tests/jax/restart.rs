//! Tests of a service that is killed and started again from its journal while real JAX processes train.
//!
//! Between a kill and the start of the next process nothing listens at the port, so the test starts it at once: a heartbeat
//! that is due meanwhile would end a JAX process.

use std::time::Duration;

use rustix::process::Signal;

use super::fixture::JaxFixture;
use super::server::Server;
use super::{RunSet, Test};
use muster::coordination::EventKind;

pub const TESTS: &[Test] = &[
    (RunSet::All, "a_job_trains_on_while_its_service_is_killed_and_restored", |scene| {
        train(scene, &["--error-delivery", "cancel"]);
    }),
    (RunSet::Both, "a_recoverable_job_trains_on_while_its_service_is_killed_and_restored", |scene| {
        train(scene, &["--recoverable"]);
    }),
];

const KILLS: usize = 6;
const TASKS: usize = 3;
const STEPS: &str = "1000";

fn train(scene: &JaxFixture, settings: &[&str]) {
    let journal = scene.file("journal");
    let tasks = TASKS.to_string();
    let further: Vec<&str> =
        [&["--tasks", &tasks, "--data-dir", &journal, "--heartbeat-timeout", "60s"], settings].concat();
    let mut server = Server::start(&further);
    let address = server.grpc().to_string();
    let program = ["train.py", "--steps", STEPS, "--step-ms", "10"];
    let processes: Vec<_> = (0..TASKS).map(|task| scene.start_at(&address, task, TASKS, &program)).collect();
    processes[0].text("step  100 ");

    let before = server.view("default").run;
    let mut random = fastrand::Rng::new();
    for kill in 1..=KILLS {
        server.process.signal(Signal::KILL);
        server.process.end();
        server = Server::start_at(&address, &further);
        let after = server.view("default").run;
        assert_eq!(
            (after.number, &after.incarnation),
            (before.number, &before.incarnation),
            "after kill {kill}"
        );
        for (after, before) in after.tasks.iter().zip(&before.tasks) {
            assert_eq!(
                after.lives.last().map(|life| &life.incarnation),
                before.lives.last().map(|life| &life.incarnation)
            );
        }
        std::thread::sleep(Duration::from_millis(random.u64(100..700)));
    }
    let restarts =
        server.events("default").iter().filter(|event| event.what == EventKind::ServiceRestarted).count();
    assert_eq!(restarts, KILLS);
    for process in &processes {
        process.succeed();
    }
    assert_eq!(server.view("default").run.number, before.number, "one run from begin to end");
}
