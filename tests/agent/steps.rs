//! Tests of workers that perform training steps together, lose one worker, and readmit it.

use crate::harness::{MusterServer, Process, Signal, TempFolder, wait_until};
use crate::worker::{start_stepping_worker, worker};

/// Ends a worker by SIGTERM; it must succeed.
fn end_worker(worker: Process) {
    worker.signal(Signal::TERM);
    let ended = worker.end();
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(ended.out.contains("left in good order") && ended.out.contains("0 fault(s)"), "{ended:?}");
}

fn event_kinds(server: &MusterServer) -> Vec<String> {
    let events = server.get("/api/v1/jobs/default/events?limit=1000").json();
    let events = events["events"].as_array().expect("a list").clone();
    events.iter().filter_map(|event| Some(event["kind"].as_str()?.to_owned())).collect()
}

#[test]
fn the_others_step_on_without_a_killed_worker_and_take_it_back() {
    let server = MusterServer::start(&["--tasks", "3", "--recoverable"]);
    let mut workers: Vec<_> = (0..3).map(|task| start_stepping_worker(&server, task)).collect();
    for worker in &mut workers {
        worker.out_line(": tasks 0 1 2;");
    }
    wait_until("the service has heard of their transfers", || {
        let transfers = server.get("/api/v1/jobs/default/transfers");
        let registered = transfers.json()["registered_bytes"].as_u64();
        transfers.json()["reporting"] == 3
            && transfers.body.contains("\"completed\"")
            && registered.is_some_and(|bytes| bytes > 3 << 20)
    });
    let lost = workers.pop().expect("there are three");
    lost.signal(Signal::KILL);
    drop(lost.end());
    workers[0].out_line(": tasks 0 1;");
    workers[1].out_line(": tasks 0 1;");
    let mut back = start_stepping_worker(&server, 2);
    back.out_line(": tasks 0 1 2;");
    workers[0].out_line(": tasks 0 1 2;");
    workers.push(back);
    workers.into_iter().for_each(end_worker);
    let job = server.get("/api/v1/jobs/default").json();
    assert_eq!(job["run"]["state"], "completed", "{job}");
}

#[test]
fn a_terminated_worker_shuts_down_cleanly_and_the_others_continue() {
    let server = MusterServer::start(&["--tasks", "2", "--recoverable"]);
    let mut workers: Vec<_> = (0..2).map(|task| start_stepping_worker(&server, task)).collect();
    workers[1].out_line(": tasks 0 1;");
    let leaving = workers.pop().expect("there are two");
    end_worker(leaving);
    workers[0].out_line(": tasks 0;");
    let event_kinds = event_kinds(&server);
    assert!(
        !event_kinds.iter().any(|kind| kind.contains("failed") || kind.contains("suspect")),
        "{event_kinds:?}"
    );
    let task = server.get("/api/v1/jobs/default/tasks/1").json();
    assert_eq!(task["standing"], "disconnected", "{task}");
    workers.into_iter().for_each(end_worker);
}

#[test]
fn in_a_fate_sharing_job_a_terminated_worker_ends_all_at_one_step() {
    let server = MusterServer::start(&["--tasks", "2"]);
    let mut workers: Vec<_> = (0..2).map(|task| start_stepping_worker(&server, task)).collect();
    workers[0].out_line(": tasks 0 1;");
    workers[0].signal(Signal::TERM);
    for worker in workers {
        let ended = worker.end();
        assert_eq!(ended.code, Some(0), "{ended:?}");
        assert!(ended.out.contains("as they agreed"), "{ended:?}");
    }
    let job = server.get("/api/v1/jobs/default").json();
    assert_eq!(job["run"]["state"], "completed", "{job}");
}

#[test]
fn idle_workers_end_together_at_a_drain() {
    let server = MusterServer::start(&["--tasks", "2"]);
    let mut workers: Vec<_> = (0..2).map(|task| worker(&server, task, &["--devices", "2"])).collect();
    for worker in &mut workers {
        worker.out_line("engine ");
    }
    let devices = server.get("/api/v1/jobs/default/devices").json();
    let ids: Vec<_> =
        devices["devices"].as_array().expect("a list").iter().map(|d| d["global_id"].clone()).collect();
    assert_eq!(ids, [0, 1, 2048, 2049], "{devices}");
    let drained = server.send("POST", "/api/v1/jobs/default/drain", r#"{"reason": "kernel update"}"#);
    assert!(drained.status < 300, "{drained:?}");
    for worker in workers {
        let ended = worker.end();
        assert_eq!(ended.code, Some(0), "{ended:?}");
        assert!(ended.out.contains("preemption notice"), "{ended:?}");
    }
}

#[test]
fn a_drain_after_a_loss_is_agreed_on_by_those_who_live() {
    let server = MusterServer::start(&["--tasks", "3", "--recoverable"]);
    let mut workers: Vec<_> = (0..3).map(|task| start_stepping_worker(&server, task)).collect();
    workers[0].out_line(": tasks 0 1 2;");
    workers[2].signal(Signal::KILL);
    let drained = server.send("POST", "/api/v1/jobs/default/drain", r#"{"reason": "kernel update"}"#);
    assert!(drained.status < 300, "{drained:?}");
    workers.truncate(2);
    for worker in workers {
        let ended = worker.end();
        assert_eq!(ended.code, Some(0), "{ended:?}");
        assert!(ended.out.contains("as they agreed"), "{ended:?}");
    }
}

#[test]
fn a_leave_whose_answer_comes_late_is_a_leave_and_no_drain() {
    let server = MusterServer::start(&["--tasks", "2", "--recoverable"]);
    let mut workers: Vec<_> = (0..2).map(|task| start_stepping_worker(&server, task)).collect();
    workers[1].out_line(": tasks 0 1;");
    let leaving = workers.pop().expect("there are two");
    // Longer than a worker waits for its shutdown, and shorter than the heartbeat timeout.
    server.signal(Signal::STOP);
    leaving.signal(Signal::TERM);
    std::thread::sleep(std::time::Duration::from_secs(6));
    server.signal(Signal::CONT);
    let left = leaving.end();
    assert_eq!(left.code, Some(0), "{left:?}");
    workers[0].out_line(": tasks 0;");
    workers[0].signal(Signal::TERM);
    let ended = workers.remove(0).end();
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(!ended.out.contains("preemption notice"), "{ended:?}");
}

#[test]
fn so_many_steps_are_made_and_then_all_leave_together() {
    let server = MusterServer::start(&["--tasks", "2"]);
    for transport in ["auto", "shm", "pvm", "unix", "tcp"] {
        let arguments = ["--program", "exercise", "--steps", "7", "--devices", "2", "--transport", transport];
        let workers: Vec<_> = (0..2).map(|task| worker(&server, task, &arguments)).collect();
        for worker in workers {
            let ended = worker.end();
            assert_eq!(ended.code, Some(0), "{transport}: {ended:?}");
            assert!(ended.out.contains("7 steps: 35 buffers checked"), "{transport}: {ended:?}");
        }
        wait_until("the run has ended", || {
            server.get("/api/v1/jobs/default").json()["run"]["state"] == "completed"
        });
    }
}

#[test]
fn workers_step_over_tls() {
    let folder = TempFolder::new("worker-tls");
    muster::tls::certificate_authority::write_trial_certificates(
        folder.path("certs").as_ref(),
        &["workers".to_owned()],
    )
    .unwrap();
    let [cert, key, ca] =
        ["server", "server-key", "ca"].map(|name| folder.path(&format!("certs/{name}.pem")));
    let server = MusterServer::start(&["--tasks", "2"]);
    let common =
        ["--program", "exercise", "--steps", "5", "--transport", "tcp", "--transfer-name", "workers"];
    let files = ["--transfer-cert", &cert, "--transfer-key", &key, "--transfer-ca", &ca];
    let arguments = [&common[..], &files].concat();
    let workers: Vec<_> = (0..2).map(|task| worker(&server, task, &arguments)).collect();
    for worker in workers {
        let ended = worker.end();
        assert_eq!(ended.code, Some(0), "{ended:?}");
        assert!(ended.out.contains("5 steps:") && ended.out.contains("0 fault(s)"), "{ended:?}");
    }
}
