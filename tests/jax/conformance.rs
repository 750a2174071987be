//! Tests everything that a JAX program uses of its coordination service, with every tested release.

use std::collections::BTreeSet;

use muster::coordination::{RunState, TaskId, TaskPhase};

use super::fixture::JaxFixture;
use super::process::Process;
use super::server::DEFAULT;
use super::{RunSet, Test};

pub const TESTS: &[Test] = &[
    (RunSet::All, "two_processes_conform_with_environment_variables_alone", |scene| conform(scene, 2, &[])),
    (RunSet::All, "three_processes_conform_with_a_bind_address", |scene| {
        conform(scene, 3, &["--bind", "127.0.0.1:0"])
    }),
];

/// The number of devices of each process in `conformance.py`.
const DEVICES: usize = 2;

fn conform(scene: &JaxFixture, count: usize, arguments: &[&str]) {
    scene.serve(&["--tasks", &count.to_string()]);
    let program = [&["conformance.py"], arguments].concat();
    let tasks = scene.start_all(count, &program);
    check(scene, DEFAULT, &tasks);
}

/// Checks that all processes of a job have conformed, and that the server saw a job without an error.
pub fn check(scene: &JaxFixture, job: &str, tasks: &[Process]) {
    tasks.iter().for_each(Process::succeed);
    let names = |task: &Process, kind: &str| -> BTreeSet<String> {
        task.records(kind).iter().map(|line| line.text("name").to_owned()).collect()
    };
    let checked = names(&tasks[0], "check");
    // The list is compared at both ends, so that a shorter list fails.
    for expected in
        ["topology", "psum", "key_value_set_twice", "barrier_of_all", "get_live_nodes", "live_devices"]
    {
        assert!(checked.contains(expected), "{expected} was not checked");
    }
    for task in tasks {
        assert_eq!(names(task, "check"), checked);
        let skipped = names(task, "skipped");
        let lacks_increment = !scene.release.is_at_least(0, 7);
        assert_eq!(skipped, lacks_increment.then(|| "key_value_increment".to_owned()).into_iter().collect());
    }

    let view = scene.server().view(job);
    let run = &view.run;
    assert_eq!((run.number.0, run.state, &run.first_cause), (1, RunState::Completed, &None));
    assert_eq!(run.tasks.len(), tasks.len());
    for task in &run.tasks {
        assert_eq!((task.standing, &task.error, task.lives.len()), (TaskPhase::Disconnected, &None, 1));
    }

    // JAX numbers CPU devices by process, with a stride that depends on the release.
    let stride = if scene.release.is_at_least(0, 8) { 2048 } else { 131_072 };
    let expected = (0..i32::try_from(tasks.len()).unwrap())
        .flat_map(|task| (0..i32::try_from(DEVICES).unwrap()).map(move |local| (TaskId(task), local)));
    let expected: Vec<_> = expected.map(|(task, local)| (task, local, task.0 * stride + local)).collect();
    let devices: Vec<_> = run.devices.iter().map(|d| (d.task, d.local_id, d.global_id)).collect();
    assert_eq!(devices, expected);
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").expect("Linux names its boots");
    for device in run.devices.iter() {
        assert_eq!((device.platform.as_str(), device.kind.as_str()), ("cpu", "cpu"), "{device:?}");
        assert_eq!(device.boot_id, boot.trim());
        assert_eq!(device.partition, Some(0), "one machine is one partition");
    }
}
