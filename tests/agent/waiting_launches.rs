//! Tests of launches that are requested before the engines of their peers are members.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use muster::agent::{Agent, AgentConfig, AgentError, AttachedEngine, EngineHost, PendingLaunch};
use muster::transfer::{
    Buffer, DeviceId, LaunchOptions, LaunchStats, PeerTask, TaskId, TransferError, TransferHandle,
    TransferKey, TransferSpec,
};

use crate::attachment::{OTHER, PATIENCE, attach_engine, register_task_1, start_job_with_registered_client};
use crate::harness::MusterServer;

const BYTES: usize = 1000;

fn peers() -> Vec<PeerTask> {
    vec![TaskId(1).into()]
}

fn options(deadline: Duration) -> LaunchOptions {
    LaunchOptions { deadline: Some(deadline), ..LaunchOptions::default() }
}

/// Requests a launch of one buffer, sent to task 1.
fn reserve(host: &Arc<EngineHost>, deadline: Duration) -> Result<PendingLaunch, AgentError> {
    host.reserve_launch(peers(), NonZeroUsize::MIN, (BYTES as u64, 0), options(deadline), |_| 0)
}

/// Names the buffer: bytes of this value, under this key.
fn name(host: &EngineHost, launch: PendingLaunch, key: u8) -> TransferHandle {
    let transfer = launch.transfer().clone();
    launch.launch(host.engine(), move |_| {
        let source = Buffer::foreign(vec![key; BYTES]);
        Ok(vec![TransferSpec::send(source.full_span(), DeviceId(0), OTHER, TransferKey(key.into()))])
    });
    transfer
}

/// Receives what task 0 sends next, which is expected under this key.
async fn receive(attached: &AttachedEngine, key: u8) -> Result<LaunchStats, TransferError> {
    let target = Buffer::foreign(vec![0; BYTES]);
    let spec = TransferSpec::receive(target.full_span(), DeviceId(0), OTHER, TransferKey(key.into()));
    let received = attached.host().engine().transfer(&[], vec![spec], LaunchOptions::default());
    let outcome = tokio::time::timeout(PATIENCE, received).await.expect("it has an outcome");
    if outcome.is_ok() {
        assert!(target.with_bytes(|bytes| bytes.iter().all(|byte| *byte == key)).unwrap(), "{key}");
    }
    outcome
}

/// Attaches the engine of task 1, and waits until it knows that of task 0.
async fn attach_task_1(server: &MusterServer) -> AttachedEngine {
    let attached = attach_engine(server, 77).await.unwrap();
    attached.host().wait_for_engines(&[TaskId(0)], PATIENCE).await.unwrap();
    attached
}

async fn outcome(transfer: TransferHandle) -> Result<LaunchStats, TransferError> {
    tokio::time::timeout(PATIENCE, transfer).await.expect("it has an outcome")
}

async fn wait_for_engine(agent: &Agent) {
    agent.host().wait_for_engines(&[TaskId(1)], PATIENCE).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn launches_take_their_places_in_the_order_of_the_requests_when_the_peer_has_attached() {
    let (server, agent, _client) = start_job_with_registered_client().await;
    let host = agent.host();
    assert!(!host.can_launch_with(&peers()));
    let first = name(host, reserve(host, PATIENCE).unwrap(), 1);
    let late = reserve(host, Duration::from_millis(50)).unwrap();
    let status = late.wait_status();
    let late = name(host, late, 2);
    assert!(matches!(outcome(late).await, Err(TransferError::Deadline { moved: 0, total: 1000 })));
    let missing = host.missing_peers_error(&status.missing_peers(), Duration::from_millis(50));
    assert!(
        matches!(&missing, Some(AgentError::EnginesMissing { connected, .. }) if connected == &[1]),
        "{missing:?}"
    );
    let cancelled = name(host, reserve(host, PATIENCE).unwrap(), 3);
    let proof = cancelled.cancel("not wanted");
    assert!(proof.wait_for(PATIENCE), "nothing of it can land");
    let dropped = reserve(host, PATIENCE).unwrap();
    let transfer = dropped.transfer().clone();
    drop(dropped);
    assert_eq!(outcome(transfer).await, Err(TransferError::Dropped));
    let unnamed = reserve(host, PATIENCE).unwrap();
    assert!(first.outcome().is_none());

    let attached = attach_task_1(&server).await;
    assert_eq!(receive(&attached, 1).await.map(|moved| moved.received), Ok(BYTES as u64));
    assert_eq!(outcome(first).await.map(|moved| moved.sent), Ok(BYTES as u64));
    for gone in [2, 3, 4] {
        receive(&attached, gone).await.expect_err("the launch is over");
    }
    wait_for_engine(&agent).await;
    // Its place is before those that are requested now.
    let last = name(host, reserve(host, PATIENCE).unwrap(), 6);
    let unnamed = name(host, unnamed, 5);
    for (key, transfer) in [(5, unnamed), (6, last)] {
        receive(&attached, key).await.unwrap();
        outcome(transfer).await.unwrap();
    }
    agent.stop_without_leaving().await;
}

/// The end of a launch that waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Launched,
    /// Launched, then cancelled before the peer has attached.
    Cancelled,
    Dropped,
    /// Too late before the peer has attached.
    Late,
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whatever_becomes_of_launches_that_wait_those_after_them_keep_their_numbers() {
    const FATES: [Fate; 4] = [Fate::Launched, Fate::Cancelled, Fate::Dropped, Fate::Late];
    let seed = std::env::var("MUSTER_SEED")
        .map_or_else(|_| muster::clock::random_u64(), |seed| seed.parse().unwrap());
    let (server, agent, _client) = start_job_with_registered_client().await;
    let host = agent.host();
    let mut random = seed;
    let fates: Vec<Fate> = (0..60)
        .map(|_| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            FATES[(random >> 33) as usize % FATES.len()]
        })
        .collect();
    let mut transfers = Vec::new();
    for (key, fate) in (1_u8..).zip(&fates) {
        let deadline = if *fate == Fate::Late { Duration::from_millis(1) } else { PATIENCE };
        let launch = reserve(host, deadline).unwrap();
        let transfer = launch.transfer().clone();
        match fate {
            Fate::Launched | Fate::Late => _ = name(host, launch, key),
            Fate::Cancelled => _ = name(host, launch, key).cancel("a test"),
            Fate::Dropped => drop(launch),
        }
        transfers.push(transfer);
    }
    for (transfer, _) in transfers.iter().zip(&fates).filter(|(_, fate)| **fate == Fate::Late) {
        outcome(transfer.clone()).await.expect_err("it is late");
    }
    let attached = attach_task_1(&server).await;
    for ((key, fate), transfer) in (1_u8..).zip(&fates).zip(transfers) {
        let received = receive(&attached, key).await;
        let expected = *fate == Fate::Launched;
        let told = format!("seed {seed}, launch {key}, {fate:?}");
        assert_eq!(received.is_ok(), expected, "{told}: {received:?}");
        assert_eq!(outcome(transfer).await.is_ok(), expected, "{told}");
    }
    agent.stop_without_leaving().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn launches_that_wait_are_bounded_and_end_with_the_engine() {
    let (_server, agent, _client) = start_job_with_registered_client().await;
    let host = agent.host();
    let waiting: Vec<_> =
        (0..4096).map(|_| name(host, reserve(host, Duration::from_secs(3600)).unwrap(), 1)).collect();
    let refused = reserve(host, PATIENCE).unwrap_err();
    assert!(refused.to_string().contains("4096 launches wait for tasks that have not attached"), "{refused}");
    agent.stop_without_leaving().await;
    for transfer in waiting {
        outcome(transfer).await.expect_err("the engine is gone");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn several_transfers_to_one_absent_peer_have_one_place() {
    let (server, agent, _client) = start_job_with_registered_client().await;
    let host = agent.host();
    let twice = [peers(), peers()].concat();
    let two = NonZeroUsize::new(2).unwrap();
    let both = host.reserve_launch(twice, two, (2 * BYTES as u64, 0), options(PATIENCE), |_| 0).unwrap();
    let transfer = both.transfer().clone();
    both.launch(host.engine(), |_| {
        let source = Buffer::foreign(vec![1; BYTES]);
        let send = |key| TransferSpec::send(source.full_span(), DeviceId(0), OTHER, TransferKey(key));
        Ok(vec![send(1), send(2)])
    });
    let next = name(host, reserve(host, PATIENCE).unwrap(), 3);
    let attached = attach_task_1(&server).await;
    let targets = [1, 2].map(|key| (key, Buffer::foreign(vec![0; BYTES])));
    let receive_both = targets.iter().map(|(key, target)| {
        TransferSpec::receive(target.full_span(), DeviceId(0), OTHER, TransferKey(*key))
    });
    let received = attached.host().engine().transfer(&[], receive_both.collect(), LaunchOptions::default());
    outcome(received).await.unwrap();
    outcome(transfer).await.unwrap();
    receive(&attached, 3).await.unwrap();
    outcome(next).await.unwrap();
    agent.stop_without_leaving().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_absent_peer_delays_no_launch_with_another_one() {
    let server = MusterServer::start(&["--tasks", "3", "--recoverable"]);
    let (first, second, _client) = tokio::join!(
        Agent::join(AgentConfig::new(server.grpc.to_string(), 0)),
        Agent::join(AgentConfig::new(server.grpc.to_string(), 2)),
        register_task_1(&server, 77),
    );
    let (first, second) = (first.unwrap(), second.unwrap());
    let (host, live) = (first.host(), PeerTask::from(TaskId(2)));
    host.wait_for_engines(&[TaskId(2)], PATIENCE).await.unwrap();
    second.host().wait_for_engines(&[TaskId(0)], PATIENCE).await.unwrap();
    let device = muster::agent::device_id_of_task(TaskId(2), 0);
    let two = NonZeroUsize::new(2).unwrap();
    let both = vec![TaskId(1).into(), live];
    let limit = options(Duration::from_millis(100));
    let late = host.reserve_launch(both, two, (2 * BYTES as u64, 0), limit, |_| 0).unwrap();
    assert!(host.can_launch_with(&[live]), "its place is taken");
    let transfer = late.transfer().clone();
    late.launch(host.engine(), move |_| {
        let send = |to, key| {
            let source = Buffer::foreign(vec![0; BYTES]);
            TransferSpec::send(source.full_span(), DeviceId(0), to, TransferKey(key))
        };
        Ok(vec![send(OTHER, 1), send(device, 2)])
    });
    outcome(transfer).await.expect_err("task 1 does not attach");
    // The launch after it finds its match, and the one that matches the late one is told.
    let source = Buffer::foreign(vec![7; BYTES]);
    let send = TransferSpec::send(source.full_span(), DeviceId(0), device, TransferKey(3));
    let sent = host.engine().transfer(&[], vec![send], LaunchOptions::default());
    let receive = |key| {
        let target = Buffer::foreign(vec![0; BYTES]);
        let spec = TransferSpec::receive(target.full_span(), DeviceId(0), device, TransferKey(key));
        second.engine().transfer(&[], vec![spec], LaunchOptions::default())
    };
    outcome(receive(2)).await.expect_err("its match does not come");
    outcome(receive(3)).await.unwrap();
    outcome(sent).await.unwrap();
    first.stop_without_leaving().await;
    second.stop_without_leaving().await;
}
