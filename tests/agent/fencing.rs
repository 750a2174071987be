//! Tests that a lost, excluded or restarted task is fenced at once, and that transfers between the other tasks
//! continue.

use std::time::Duration;

use muster::agent::{Agent, AgentConfig, AgentError};
use muster::clock::monotonic;
use muster::proto::xla::coordination as pb;
use muster::proto::xla::coordination::coordination_service_client::CoordinationServiceClient;
use muster::transfer::{
    Arena, Buffer, DeviceId, LaunchOptions, MemberId, TaskId, TransferError, TransferHandle, TransferKey,
    TransferSpec,
};

use crate::harness::{MusterServer, Process, Signal};
use crate::worker::worker;

const PATIENCE: Duration = Duration::from_secs(30);
/// The time within which a transfer with a lost task must fail.
const SOON: Duration = Duration::from_secs(1);

fn first_device_of_task(task: u32) -> DeviceId {
    DeviceId(task * 2048)
}

/// Two tasks in this process and a third one in its own.
struct ThreeAgents {
    near: [Agent; 2],
    far: Option<Process>,
    lost: MemberId,
    arena: Arena,
}

async fn join(server: &MusterServer, task: u32) -> Agent {
    let config = AgentConfig {
        patience: Duration::from_millis(500),
        ..AgentConfig::new(server.grpc.to_string(), task)
    };
    Agent::join(config).await.unwrap()
}

impl ThreeAgents {
    async fn new(server: &MusterServer) -> Self {
        let far = worker(server, 2, &[]);
        let (a, b) = tokio::join!(join(server, 0), join(server, 1));
        let mut roster = a.roster();
        let known = roster.wait_for(|roster| roster.membership.peers.len() == 3);
        tokio::time::timeout(PATIENCE, known).await.expect("all are known").unwrap();
        let mut other = b.roster();
        let known = other.wait_for(|roster| roster.membership.peers.len() == 3);
        tokio::time::timeout(PATIENCE, known).await.expect("all are known").unwrap();
        let lost = a.engine().membership().current_member(TaskId(2)).unwrap();
        Self { near: [a, b], far: Some(far), lost, arena: Arena::new(4 << 20).unwrap() }
    }

    fn filled_buffer(&self, byte: u8) -> Buffer {
        let buffer = self.arena.allocate(100_000).unwrap();
        buffer.fill(byte).unwrap();
        buffer
    }

    /// Returns a receive from task 2 that is never sent.
    async fn unmatched_receive(&self) -> TransferHandle {
        let spec = TransferSpec::receive(
            self.filled_buffer(0).full_span(),
            first_device_of_task(2),
            first_device_of_task(0),
            TransferKey(7),
        );
        let mut prepared = self.near[0].engine().prepare(vec![spec], LaunchOptions::default()).await.unwrap();
        prepared.launch(&[])
    }

    /// Asserts that a transfer with task 2 fails in time and names it.
    async fn assert_transfer_fails_in_time(&self, waiting: TransferHandle) {
        let began = monotonic();
        let error = tokio::time::timeout(PATIENCE, waiting).await.expect("it has an outcome").unwrap_err();
        let took = monotonic() - began;
        assert!(took < SOON, "{took:?}: {error}");
        let named = match &error {
            TransferError::PeerDead { member, .. }
            | TransferError::StaleIncarnation { member, .. }
            | TransferError::Transport { member, .. } => *member == self.lost,
            _ => false,
        };
        assert!(named, "{error}");
    }

    /// Asserts that the other two tasks still move data.
    async fn assert_other_tasks_transfer(&self) {
        let [a, b] = &self.near;
        let (source, target) = (self.filled_buffer(5), self.filled_buffer(0));
        let send = TransferSpec::send(
            source.full_span(),
            first_device_of_task(0),
            first_device_of_task(1),
            TransferKey(9),
        );
        let receive = TransferSpec::receive(
            target.full_span(),
            first_device_of_task(0),
            first_device_of_task(1),
            TransferKey(9),
        );
        let sent = a.engine().transfer(&[], vec![send], LaunchOptions::default());
        let received = b.engine().transfer(&[], vec![receive], LaunchOptions::default());
        let both = async { (sent.await, received.await) };
        let (sent, received) = tokio::time::timeout(PATIENCE, both).await.expect("it has an outcome");
        assert_eq!((sent.err(), received.err()), (None, None));
        assert!(target.with_bytes(|bytes| bytes.iter().all(|byte| *byte == 5)).unwrap());
    }

    async fn assert_task_2_left(&self) {
        let mut roster = self.near[1].roster();
        let gone = roster.wait_for(|roster| !roster.lives.contains_key(&TaskId(2)));
        tokio::time::timeout(PATIENCE, gone).await.expect("it is gone").unwrap();
        assert_eq!(self.near[1].engine().membership().current_member(TaskId(2)), None);
    }

    async fn leave_all(self) {
        for agent in self.near {
            agent.leave().await.unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn transfers_with_a_killed_worker_fail_by_its_name_within_a_second_and_it_may_come_back() {
    let server = MusterServer::start(&["--tasks", "3", "--recoverable"]);
    let mut trio = ThreeAgents::new(&server).await;
    let unmatched_receive = trio.unmatched_receive().await;
    trio.assert_other_tasks_transfer().await;
    trio.far.as_ref().unwrap().signal(Signal::KILL);
    trio.assert_transfer_fails_in_time(unmatched_receive).await;
    trio.assert_other_tasks_transfer().await;
    trio.assert_task_2_left().await;
    drop(trio.far.take());
    trio.far = Some(worker(&server, 2, &[]));
    let mut roster = trio.near[0].roster();
    let lost = trio.lost;
    let back = roster.wait_for(|roster| {
        roster
            .membership
            .current_member(TaskId(2))
            .is_some_and(|member| member.incarnation != lost.incarnation)
    });
    tokio::time::timeout(PATIENCE, back).await.expect("it is back").unwrap();
    let unmatched_receive = trio.unmatched_receive().await;
    assert_eq!(unmatched_receive.outcome(), None, "it has a connection again");
    trio.leave_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_exclusion_fences_the_transfers_of_a_worker_that_lives() {
    let server = MusterServer::start(&["--tasks", "3", "--recoverable"]);
    let mut trio = ThreeAgents::new(&server).await;
    let unmatched_receive = trio.unmatched_receive().await;
    let made =
        server.send("POST", "/api/v1/jobs/default/exclusions", r#"{"task": 2, "reason": "flaky NIC"}"#);
    assert_eq!(made.status, 201, "{made:?}");
    trio.assert_transfer_fails_in_time(unmatched_receive).await;
    trio.assert_other_tasks_transfer().await;
    trio.assert_task_2_left().await;
    let ended = trio.far.take().unwrap().end();
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(ended.err.contains("flaky NIC"), "it says why: {ended:?}");
    trio.leave_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_life_of_a_task_ends_the_first() {
    let server = MusterServer::start(&["--tasks", "1", "--recoverable"]);
    let first = join(&server, 0).await;
    let second = join(&server, 0).await;
    let error = tokio::time::timeout(PATIENCE, first.wait_for_end()).await.expect("it hears of it");
    // Any of its calls may report it.
    let told =
        matches!(error, AgentError::LifeEnded { .. } | AgentError::Refused { .. } | AgentError::Ended { .. });
    assert!(told && error.to_string().contains("incarnation"), "{error}");
    assert_eq!(first.engine().membership(), Default::default(), "nothing of it moves any more");
    assert!(first.leave().await.is_err());
    second.leave().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_invalid_engine_record_is_refused_by_task() {
    let server = MusterServer::start(&["--tasks", "2", "--recoverable"]);
    let channel =
        tonic::transport::Endpoint::from_shared(format!("http://{}", server.grpc)).unwrap().connect_lazy();
    let mut stranger = CoordinationServiceClient::new(channel);
    let request = pb::RegisterTaskRequest { incarnation: 77, source_task_id: 1 };
    let (agent, registered) = tokio::join!(join(&server, 0), stranger.register_task(request));
    let service_incarnation = registered.unwrap().into_inner().service_incarnation;
    let incarnations = pb::Incarnations { task_id: 0, task_incarnation: 77, service_incarnation };
    let kv = pb::KeyValueEntry {
        key: "muster/transfer/1/000000000000004d".to_owned(),
        value: vec![b'['; 100_000].into(),
    };
    let insert =
        pb::InsertKeyValueRequest { incarnations: Some(incarnations), kv: Some(kv), allow_overwrite: false };
    stranger.insert_key_value(insert).await.unwrap();
    let mut roster = agent.roster();
    let refused = roster.wait_for(|roster| roster.unusable.contains_key(&TaskId(1)));
    let refused = tokio::time::timeout(PATIENCE, refused).await.expect("it is looked at").unwrap().clone();
    assert!(refused.unusable[&TaskId(1)].contains("more than 65536 bytes"), "{refused:?}");
    assert!(refused.lives.contains_key(&TaskId(1)) && !refused.membership.peers.contains_key(&TaskId(1)));
    agent.leave().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_service_that_is_gone_ends_this_life_and_every_wait_in_it() {
    let server = MusterServer::start(&["--tasks", "2", "--recoverable"]);
    let (agent, other) = tokio::join!(join(&server, 0), join(&server, 1));
    let barrier = agent.barrier("never", &[], PATIENCE);
    let value = agent.get("nobody/writes/it", PATIENCE);
    let killed = async {
        server.signal(Signal::KILL);
        agent.wait_for_end().await
    };
    let all = async { tokio::join!(barrier, value, killed) };
    let (barrier, value, over) = tokio::time::timeout(PATIENCE, all).await.expect("no wait goes on");
    assert!(barrier.is_err() && value.is_err());
    assert!(matches!(over, AgentError::Unreachable { .. }), "{over}");
    other.stop_without_leaving().await;
    agent.stop_without_leaving().await;
}
