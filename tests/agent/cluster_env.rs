//! Tests of how a worker detects its task number and its service before it starts.

use std::net::TcpListener;

use crate::harness::{MusterServer, Process, Signal, muster, run};
use crate::worker::start_worker_at;

#[test]
fn a_worker_that_does_not_know_its_place_says_what_to_set() {
    let refused = |arguments: &[&str], variables: &[(&str, &str)], said: &[&str]| {
        let mut command = muster([&["worker"], arguments].concat());
        command.env_clear().envs(variables.iter().copied());
        let ended = run(&mut command);
        assert_eq!(ended.code, Some(1), "{ended:?}");
        for part in said {
            assert!(ended.err.contains(part), "{part:?} is not in {ended:?}");
        }
    };
    refused(&[], &[], &["--task", "MUSTER_PROCESS_ID"]);
    refused(&["--task", "1"], &[], &["--service", "JAX_COORDINATOR_ADDRESS"]);
    let ranks = [
        ("OMPI_COMM_WORLD_RANK", "1"),
        ("SLURM_JOB_ID", "9"),
        ("SLURM_STEP_ID", "0"),
        ("SLURM_PROCID", "0"),
        ("SLURM_NTASKS", "2"),
    ];
    refused(&[], &ranks, &["SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "--task"]);
    let place = ["--task", "0", "--service", "127.0.0.1:9"];
    // A value given by a flag is read from no variable: these commands get as far as the service, which does
    // not exist.
    let at_once = [&place[..], &["--register-timeout", "200ms"]].concat();
    let garbage = [("SLURM_JOB_ID", "1"), ("SLURM_STEP_ID", "0"), ("SLURM_PROCID", "garbage")];
    refused(&at_once, &garbage, &["127.0.0.1:9", "refused"]);
    refused(&at_once, &[("JOB_COMPLETION_INDEX", "abc")], &["127.0.0.1:9", "refused"]);
    refused(
        &[&place[..], &["--listen", "0.0.0.0:0"]].concat(),
        &[],
        &["--token-file", "--transfer-cert", "--insecure-transfers"],
    );
    let half = ["--transfer-cert", "server.pem", "--transfer-key", "server-key.pem"];
    let missing = [&half[..], &["--transfer-ca", "ca.pem"]].concat();
    refused(&[&place[..], &missing].concat(), &[], &["cannot read server.pem"]);
    let open = ["--listen", "0.0.0.0:0", "--insecure-transfers"];
    refused(&[&place[..], &open].concat(), &[], &["--advertise"]);
    refused(&[&place[..], &["--register-timeout", "200ms"]].concat(), &[], &["127.0.0.1:9", "refused"]);
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = taken.local_addr().unwrap().to_string();
    refused(
        &[&place[..], &["--listen", &taken]].concat(),
        &[],
        &[&taken, "--listen", "Address already in use", "0 for a free one"],
    );
}

#[test]
fn a_worker_that_is_sent_to_the_port_for_browsers_says_so() {
    let server = MusterServer::start(&["--tasks", "1"]);
    let mut lost = start_worker_at(server.http, 0, &["--register-timeout", "3s"]);
    lost.err_line("does not look like the gRPC port");
    let ended = lost.end();
    assert_eq!(ended.code, Some(1), "{ended:?}");
    let last = ended.err.lines().last().unwrap();
    assert!(last.contains(&server.http.to_string()) && last.contains("--service"), "{last}");
}

/// Workers on "hosts" that do not know their numbers; returns the place that each printed, once all are registered.
fn workers_of_hosts(server: &MusterServer, hosts: &[&str]) -> Vec<Process> {
    let workers: Vec<Process> = hosts
        .iter()
        .map(|host| {
            let service = server.grpc.to_string();
            Process::start(&mut muster([
                "worker",
                "--service",
                &service,
                "--task",
                "auto",
                "--host-id",
                host,
                "--log",
                "warn",
            ]))
        })
        .collect();
    workers
        .into_iter()
        .map(|mut worker| {
            worker.out_line("Registered");
            worker
        })
        .collect()
}

#[test]
fn workers_that_do_not_know_their_numbers_get_those_of_their_hosts() {
    let server = MusterServer::start(&["--tasks", "2"]);
    for (hosts, numbers) in [(["b", "a"], [1, 0]), (["a", "b"], [0, 1]), (["0-new", "b"], [0, 1])] {
        let workers = workers_of_hosts(&server, &hosts);
        for ((host, number), worker) in hosts.iter().zip(numbers).zip(&workers) {
            let said = worker.said();
            let place = format!("task     {number} (from the service, for {host}, from --host-id)");
            assert!(said.contains(&place), "{place:?} is not in {said}");
        }
        let devices = server.get("/api/v1/jobs/default/devices").json();
        let of: Vec<&str> = devices["devices"]
            .as_array()
            .unwrap()
            .iter()
            .filter_map(|device| device["identity"]["host"].as_str())
            .collect();
        let mut ordered: Vec<(u32, &str)> = numbers.into_iter().zip(hosts).collect();
        ordered.sort_unstable();
        assert_eq!(of, ordered.iter().map(|(_, host)| *host).collect::<Vec<_>>(), "{devices}");
        workers.iter().for_each(|worker| _ = worker.signal(Signal::TERM));
        workers.iter().for_each(|worker| assert_eq!(worker.end().code, Some(0), "{}", worker.said()));
    }
    let map = server.get("/api/v1/jobs/default/devices/map?run=2&before=1").json();
    let fates: Vec<_> = map["places"].as_array().unwrap().iter().map(|place| place["fate"].clone()).collect();
    assert_eq!((fates, &map["runs"]), (vec!["same".into(), "same".into()], &serde_json::json!([3, 2, 1])));
    let map = server.get("/api/v1/jobs/default/devices/map?before=1").json();
    let came = map["places"].as_array().unwrap().iter().find(|place| place["fate"] == "came").unwrap();
    assert_eq!((&came["identity"]["host"], &map["previous"]), (&"0-new".into(), &1.into()), "{map}");
    assert_eq!(server.get("/api/v1/jobs/default/devices/map?run=9").status, 404);
    assert_eq!(server.get("/api/v1/jobs/default/devices/map?run=1&before=2").status, 404);
}
