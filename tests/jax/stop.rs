//! Tests of a server that is stopped while a job runs.

use std::time::Duration;

use muster::coordination::JobView;
use rustix::process::Signal;

use super::fixture::JaxFixture;
use super::process::Process;
use super::{RunSet, Test};

pub const TESTS: &[Test] = &[
    (RunSet::Both, "clients_survive_a_stop_of_the_server_when_errors_come_with_heartbeats", |scene| {
        stop(scene, &["--error-delivery", "cancel"]);
    }),
    (RunSet::Both, "clients_survive_a_stop_of_the_server_at_default_settings", |scene| stop(scene, &[])),
];

/// The time for which clients are watched: shorter than the time to their next heartbeat, 50 s at default
/// settings.
const OUTAGE: Duration = Duration::from_secs(3);

/// Checks that a client whose error poll has been answered tolerates a lost connection until its next call.
fn stop(scene: &JaxFixture, settings: &[&str]) {
    let server = scene.serve(&[&["--tasks", "2", "--stop-timeout", "1s"], settings].concat());
    let tasks = scene.start_all(2, &["worker.py", "register", "--seconds", "600"]);
    tasks.iter().for_each(|task| _ = task.line("registered", |_| true));
    // Up to and including 0.9, the first heartbeat follows the registration at once. A client ends if it meets an unserved port.
    if scene.release.name.starts_with("0.6.") || scene.release.name.starts_with("0.9.") {
        let are_heard =
            |view: &JobView| view.run.tasks.iter().all(|task| task.last_heartbeat > task.live_since);
        server.until("the first heartbeats", |view| are_heard(view).then_some(()));
    }

    let told = server.process.signal(Signal::TERM);
    let end = server.process.end();
    assert!(end.status.success(), "the server ended with {}", end.status);
    scene.figure("the server stopped after", end.at - told);

    std::thread::sleep(OUTAGE);
    assert!(tasks.iter().all(Process::is_running), "a client did not survive");
}
