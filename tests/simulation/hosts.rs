//! Tests of the hosts on which tasks are: by what the tasks published, and by their addresses.

use std::time::Duration;

use bytes::Bytes;
use muster::coordination::{ExclusionTarget, HostIdSource, OperatorCommand, ProcessIdentity, Request};

use crate::coordinator::JOB;
use crate::rules::{SimulatedJob, id_of_task};

/// Registers a new life of a task from the address 10.0.0.`host`.
fn register_from(job: &mut SimulatedJob, task: usize, host: u8) {
    job.coordinator.advance_time(Duration::from_millis(1));
    job.connections[task] = job.coordinator.connect_from_host(host);
    job.lives[task] = job.coordinator.draw_task_incarnation();
    let call = job.register_task(task);
    assert!(job.coordinator.answers.get(&call).is_none_or(Result::is_ok), "task {task} registers");
}

/// Publishes the identity of a task's process.
fn publish_identity(job: &mut SimulatedJob, task: usize, host: &str) {
    let identity = ProcessIdentity::new(host, 0).expect("an identity");
    let key = Bytes::from(ProcessIdentity::store_key(u32::try_from(task).expect("few tasks")));
    let value = Bytes::from(identity.to_store_value());
    job.call(task, Request::Insert { key, value, overwrite: true });
}

/// Returns the name of each task's host.
fn host_names(job: &SimulatedJob) -> Vec<String> {
    let view = job.coordinator.job_view();
    view.run
        .tasks
        .iter()
        .map(|task| task.host.as_ref().map_or_else(String::new, ToString::to_string))
        .collect()
}

#[test]
fn an_identity_names_the_host_as_long_as_the_task_stays_at_its_address() {
    let mut job = SimulatedJob::recoverable(3);
    for (task, host) in [(0, 7), (1, 7), (2, 8)] {
        register_from(&mut job, task, host);
    }
    assert_eq!(host_names(&job), ["10.0.0.7", "10.0.0.7", "10.0.0.8"]);
    publish_identity(&mut job, 0, "node-a");
    assert_eq!(host_names(&job), ["node-a", "node-a", "10.0.0.8"], "they share the address");
    // The process restarts on its host and publishes nothing again.
    register_from(&mut job, 0, 7);
    assert_eq!(host_names(&job), ["node-a", "node-a", "10.0.0.8"]);
    // It restarts on another host.
    register_from(&mut job, 0, 8);
    assert_eq!(host_names(&job), ["10.0.0.8", "10.0.0.7", "10.0.0.8"]);
    let hosts = job.coordinator.core.job(JOB).expect("the job").hosts();
    assert!(hosts.iter().all(|host| host.named_by == HostIdSource::Address), "{hosts:?}");
    assert_eq!(hosts[0].tasks, [0, 2].map(id_of_task));
    publish_identity(&mut job, 0, "node-b");
    assert_eq!(host_names(&job), ["node-b", "10.0.0.7", "node-b"]);
}

#[test]
fn a_host_is_excluded_by_its_own_addresses_or_else_by_the_numbers_of_its_tasks() {
    let mut job = SimulatedJob::recoverable(4);
    for (task, host) in [(0, 7), (1, 7), (2, 8), (3, 9)] {
        register_from(&mut job, task, host);
    }
    for (task, host) in [(0, "node-a"), (1, "node-b"), (2, "node-b"), (3, "node-c")] {
        publish_identity(&mut job, task, host);
    }
    let excluded = |job: &SimulatedJob, name: &str| {
        let host = job.coordinator.core.job(JOB).expect("the job").excluded_host(name).expect("a host");
        serde_json::to_value(ExclusionTarget::NamedHost(host.into())).expect("JSON")
    };
    assert_eq!(excluded(&job, "node-a"), serde_json::json!({"host": "node-a", "host_tasks": [0]}));
    let mixed = serde_json::json!({"host": "node-b", "host_addresses": ["10.0.0.8"], "host_tasks": [1]});
    assert_eq!(excluded(&job, "node-b"), mixed);
    let own = serde_json::json!({"host": "node-c", "host_addresses": ["10.0.0.9"]});
    assert_eq!(excluded(&job, "node-c"), own);
    assert!(job.coordinator.core.job(JOB).expect("the job").excluded_host("node-d").is_none());

    let target = serde_json::from_value(mixed).expect("a target");
    let act = OperatorCommand::Exclude { target, expires_in: None, end_run: false };
    job.coordinator.perform_operator_command(act).expect("excluded");
    assert_eq!(job.coordinator.job_view().exclusions[0].tasks, [1, 2].map(id_of_task), "and not task 0");
}
