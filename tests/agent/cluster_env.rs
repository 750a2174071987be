//! The place that a worker detects before it starts.

use std::net::TcpListener;

use crate::process::{muster, run};
use crate::web::Server;
use crate::worker::worker_at;

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
    let server = Server::start(&["--tasks", "1"]);
    let mut lost = worker_at(&server.http, 0, &["--register-timeout", "3s"]);
    lost.err_line("does not look like the gRPC port");
    let ended = lost.end();
    assert_eq!(ended.code, Some(1), "{ended:?}");
    let last = ended.err.lines().last().unwrap();
    assert!(last.contains(&server.http) && last.contains("--service"), "{last}");
}
