//! Tests of transfers between tasks of two jobs of one server. The settings of both jobs must allow them.

use std::process::Command;
use std::time::Duration;

use muster::agent::{Agent, AgentConfig, AgentError};
use muster::transfer::{
    Buffer, DeviceId, LaunchOptions, LaunchStats, PeerJob, PeerTask, TaskId, TransferError, TransferHandle,
    TransferKey, TransferSpec,
};

use crate::harness::{MusterServer, Process, Signal, test_arguments};

const PATIENCE: Duration = Duration::from_secs(60);
const BYTES: usize = 100_000;
const SERVICE: &str = "MUSTER_TEST_PEER_SERVICE";

fn two_job_server() -> MusterServer {
    MusterServer::start(&[
        "--job",
        "train=1",
        "--job",
        "serve=1",
        "--recoverable",
        "--disconnect-grace",
        "200ms",
    ])
}

fn config_for_job(grpc: &str, job: &str) -> AgentConfig {
    let authority = Some(format!("{job}.localhost:8476"));
    AgentConfig { authority, ..AgentConfig::new(grpc, 0) }
}

async fn join(server: &MusterServer, job: &str) -> Agent {
    Agent::join(config_for_job(&server.grpc.to_string(), job)).await.unwrap()
}

/// Sets which jobs `job` may exchange transfers with.
fn set_permitted_peer_jobs(server: &MusterServer, job: &str, with: &[&str]) {
    let body = serde_json::json!({"settings": {"transfers_with": with}, "reason": "a test"}).to_string();
    let set = server.send("PATCH", &format!("/api/v1/jobs/{job}"), &body);
    assert_eq!(set.json()["transfers_with"], serde_json::json!(with), "{set:?}");
}

fn task_0_of_job(job: &str) -> PeerTask {
    PeerTask { job: PeerJob::named(job).unwrap(), task: TaskId(0) }
}

/// Begins to send or to receive `BYTES` bytes, as task 0 of one job with task 0 of `job`; both have device 0.
fn begin_transfer(agent: &Agent, job: &str, buffer: &Buffer, outgoing: bool, key: u64) -> TransferHandle {
    let make = if outgoing { TransferSpec::send } else { TransferSpec::receive };
    let spec =
        make(buffer.full_span(), DeviceId(0), DeviceId(0), TransferKey(key)).with_job(task_0_of_job(job).job);
    // A channel for each key: launches of one side alone must not meet.
    agent.engine().transfer(
        &[],
        vec![spec],
        LaunchOptions { channel: key as u32, ..LaunchOptions::default() },
    )
}

async fn wait_for_outcome(transfer: TransferHandle) -> Result<LaunchStats, TransferError> {
    tokio::time::timeout(PATIENCE, transfer).await.expect("it has an outcome")
}

async fn wait_for_peer_job(agent: &Agent, job: &str) -> Result<(), AgentError> {
    agent.host().wait_for_peers(&[task_0_of_job(job)], PATIENCE).await
}

async fn wait_for_each_other(train: &Agent, serve: &Agent) {
    let (there, back) = tokio::join!(wait_for_peer_job(train, "serve"), wait_for_peer_job(serve, "train"));
    assert_eq!((there, back), (Ok(()), Ok(())));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn jobs_that_name_each_other_exchange_transfers_and_pages_name_the_other_job() {
    let two_job_server = two_job_server();
    set_permitted_peer_jobs(&two_job_server, "train", &["serve"]);
    set_permitted_peer_jobs(&two_job_server, "serve", &["train"]);
    let (train, serve) = tokio::join!(join(&two_job_server, "train"), join(&two_job_server, "serve"));
    wait_for_each_other(&train, &serve).await;
    let (source, target) = (Buffer::foreign(vec![7; BYTES]), Buffer::foreign(vec![0; BYTES]));
    for key in 1..4 {
        let sent = begin_transfer(&train, "serve", &source, true, key);
        let received = begin_transfer(&serve, "train", &target, false, key);
        assert_eq!(wait_for_outcome(sent).await.unwrap().sent, BYTES as u64);
        assert_eq!(wait_for_outcome(received).await.unwrap().received, BYTES as u64);
        assert!(target.with_bytes(|bytes| bytes.iter().all(|byte| *byte == 7)).unwrap());
        target.fill(0).unwrap();
    }
    // The other way, over the same connection.
    let back = [
        begin_transfer(&serve, "train", &source, true, 9),
        begin_transfer(&train, "serve", &target, false, 9),
    ];
    for side in back {
        wait_for_outcome(side).await.unwrap();
    }
    assert_eq!((train.engine().links().len(), train.engine().links()[0].peer.job.name()), (1, Some("serve")));
    // A task of the own job has the same number and the same device: it is another one.
    assert_eq!(
        train.engine().membership().current_member(TaskId(0)).map(|member| member.job),
        Some(PeerJob::OWN)
    );
    let (train_bytes, serve_bytes) = (3 * BYTES as u64, BYTES as u64);
    train.leave().await.unwrap();
    serve.leave().await.unwrap();
    let pairs = two_job_server.get("/api/v1/jobs/train/transfers").json()["peer_jobs"].clone();
    let pair = &pairs.as_array().unwrap()[0];
    assert_eq!(
        (&pair["task"], &pair["job"], &pair["peer"]),
        (&0.into(), &"serve".into(), &0.into()),
        "{pairs}"
    );
    assert_eq!(
        (pair["sent"].as_u64(), pair["received"].as_u64()),
        (Some(train_bytes), Some(serve_bytes)),
        "{pairs}"
    );
    let settings = two_job_server.get("/jobs/train");
    assert!(settings.body.contains("<dt>Transfers with</dt>"), "the job's page shows the setting");
    let page = two_job_server.get("/jobs/train/transfers");
    assert!(page.body.contains("task 0 of serve"), "the page names the other job");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_job_that_one_side_does_not_name_is_refused_with_the_setting_that_is_missing() {
    let two_job_server = two_job_server();
    let (train, serve) = tokio::join!(join(&two_job_server, "train"), join(&two_job_server, "serve"));
    for (train_lists, serve_lists, missing) in [
        (
            &[][..],
            &[][..],
            vec![
                "muster job set train --transfers-with serve",
                "muster job set serve --transfers-with train",
            ],
        ),
        (&["serve"][..], &[][..], vec!["muster job set serve --transfers-with train"]),
        (&[][..], &["train"][..], vec!["muster job set train --transfers-with serve"]),
    ] {
        set_permitted_peer_jobs(&two_job_server, "train", train_lists);
        set_permitted_peer_jobs(&two_job_server, "serve", serve_lists);
        for (agent, other) in [(&train, "serve"), (&serve, "train")] {
            let refused = wait_for_peer_job(agent, other).await.unwrap_err();
            let AgentError::PeerJobRefused { job, why } = &refused else { panic!("{refused:?}") };
            assert_eq!(job.name(), Some(other));
            assert!(missing.iter().all(|text| why.contains(text)), "{why}");
            assert_eq!(why.matches("does not name").count(), missing.len(), "{why}");
            let buffer = Buffer::foreign(vec![0; BYTES]);
            let failed = wait_for_outcome(begin_transfer(agent, other, &buffer, true, 1)).await.unwrap_err();
            assert!(
                matches!(&failed, TransferError::JobRefused { why: told, .. } if told == why),
                "{failed:?}"
            );
            assert_eq!(failed.reason_label(), "job_refused");
        }
    }
    let absent = train.host().wait_for_peers(&[task_0_of_job("nowhere")], PATIENCE).await.unwrap_err();
    assert!(matches!(&absent, AgentError::NoSuchPeerJob { why, .. } if why.contains("nowhere")), "{absent}");
    let own = train.host().wait_for_peers(&[task_0_of_job("train")], PATIENCE).await.unwrap_err();
    assert!(matches!(&own, AgentError::Settings(why) if why.contains("without a job")), "{own}");
    // As soon as both allow it, it works, without a restart of either.
    set_permitted_peer_jobs(&two_job_server, "train", &["serve"]);
    set_permitted_peer_jobs(&two_job_server, "serve", &["train"]);
    wait_for_each_other(&train, &serve).await;
    let gone = PeerTask { job: task_0_of_job("serve").job, task: TaskId(5) };
    let missing = train.host().wait_for_peers(&[gone], Duration::from_millis(100)).await.unwrap_err();
    let text = missing.to_string();
    assert!(text.contains("of job serve") && text.contains("task 5 is not connected"), "{text}");
    train.stop_without_leaving().await;
    serve.stop_without_leaving().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn transfers_in_flight_fail_when_a_setting_is_withdrawn() {
    let two_job_server = two_job_server();
    let (train, serve) = tokio::join!(join(&two_job_server, "train"), join(&two_job_server, "serve"));
    for withdraws in ["train", "serve"] {
        set_permitted_peer_jobs(&two_job_server, "train", &["serve"]);
        set_permitted_peer_jobs(&two_job_server, "serve", &["train"]);
        wait_for_each_other(&train, &serve).await;
        let source = Buffer::foreign(vec![7; BYTES]);
        let target = Buffer::foreign(vec![0; BYTES]);
        let done = [
            begin_transfer(&train, "serve", &source, true, 1),
            begin_transfer(&serve, "train", &target, false, 1),
        ];
        for side in done {
            wait_for_outcome(side).await.unwrap();
        }
        // The receivers never launch these.
        let pending = [
            begin_transfer(&train, "serve", &source, true, 2),
            begin_transfer(&serve, "train", &source, true, 3),
        ];
        set_permitted_peer_jobs(&two_job_server, withdraws, &[]);
        for side in pending {
            let failed = wait_for_outcome(side).await.unwrap_err();
            let TransferError::JobRefused { why, .. } = &failed else { panic!("{failed:?}") };
            assert!(why.contains(&format!("transfers-with of job {withdraws} does not name")), "{why}");
        }
        for (agent, other) in [(&train, "serve"), (&serve, "train")] {
            let membership = agent.engine().membership();
            assert_eq!(
                membership.current_member(task_0_of_job(other)),
                None,
                "the members of the other job vanish"
            );
            let until = tokio::time::Instant::now() + PATIENCE;
            while !agent.engine().links().is_empty() {
                assert!(tokio::time::Instant::now() < until, "its connections end");
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            assert!(agent.host().incarnation_end_reason().is_none(), "its own job goes on");
        }
    }
    train.stop_without_leaving().await;
    serve.stop_without_leaving().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_task_of_the_other_job_fails_its_transfers_and_is_a_peer_again_when_it_is_back() {
    let two_job_server = two_job_server();
    set_permitted_peer_jobs(&two_job_server, "train", &["serve"]);
    set_permitted_peer_jobs(&two_job_server, "serve", &["train"]);
    let mut other = receiving_process(&two_job_server);
    let train = join(&two_job_server, "train").await;
    other.out_line("receives");
    wait_for_peer_job(&train, "serve").await.unwrap();
    let first = train.engine().membership().current_member(task_0_of_job("serve")).unwrap();
    let source = Buffer::foreign(vec![7; BYTES]);
    wait_for_outcome(begin_transfer(&train, "serve", &source, true, 1)).await.unwrap();
    other.out_line("received");
    let pending = begin_transfer(&train, "serve", &source, true, 5);
    other.signal(Signal::KILL);
    let failed = wait_for_outcome(pending).await.unwrap_err();
    let is_loss = matches!(
        &failed,
        TransferError::PeerDead { member, .. } | TransferError::StaleIncarnation { member, .. } if *member == first
    );
    assert!(is_loss && failed.to_string().contains("of job serve"), "{failed}");
    let mut back = receiving_process(&two_job_server);
    back.out_line("receives");
    let until = tokio::time::Instant::now() + PATIENCE;
    let again = loop {
        wait_for_peer_job(&train, "serve").await.unwrap();
        let member = train.engine().membership().current_member(task_0_of_job("serve"));
        if let Some(member) = member.filter(|member| *member != first) {
            break member;
        }
        assert!(tokio::time::Instant::now() < until, "the new incarnation becomes known");
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    wait_for_outcome(begin_transfer(&train, "serve", &source, true, 1)).await.unwrap();
    back.out_line("received");
    assert_eq!(train.engine().links()[0].peer, again);
    train.stop_without_leaving().await;
}

/// Starts task 0 of job `serve` in a process of its own.
fn receiving_process(server: &MusterServer) -> Process {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(test_arguments("peer_jobs::task_of_the_other_job")).env(SERVICE, server.grpc.to_string());
    Process::start(&mut command)
}

/// Receives one transfer of task 0 of job `train`, and then none.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a process of another test"]
async fn task_of_the_other_job() {
    let Ok(grpc) = std::env::var(SERVICE) else { return };
    let serve = Agent::join(config_for_job(&grpc, "serve")).await.unwrap();
    println!("\nreceives");
    wait_for_peer_job(&serve, "train").await.unwrap();
    let target = Buffer::foreign(vec![0; BYTES]);
    wait_for_outcome(begin_transfer(&serve, "train", &target, false, 1)).await.unwrap();
    assert!(target.with_bytes(|bytes| bytes.iter().all(|byte| *byte == 7)).unwrap());
    println!("\nreceived");
    // Until the test kills it.
    std::future::pending::<()>().await;
}
