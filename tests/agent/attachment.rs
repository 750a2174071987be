//! Tests of a transfer engine that is attached to a task which another client has registered, as in a JAX process.

use std::time::Duration;

use muster::agent::{Agent, AgentConfig, AgentError, AttachedEngine};
use muster::proto::xla::coordination as pb;
use muster::proto::xla::coordination::coordination_service_client::CoordinationServiceClient;
use muster::transfer::{
    Buffer, DeviceId, Incarnation, LaunchOptions, TaskId, TransferError, TransferKey, TransferSpec,
};
use tonic::transport::{Channel, Endpoint};

use crate::harness::{MusterServer, http};

pub const PATIENCE: Duration = Duration::from_secs(30);
/// The device of the attached task, numbered as JAX 0.6.2 does.
pub const OTHER: DeviceId = DeviceId(131_072);

fn agent_config(server: &MusterServer, task: u32) -> AgentConfig {
    AgentConfig { patience: Duration::from_millis(500), ..AgentConfig::new(server.grpc.to_string(), task) }
}

/// Registers task 1, as JAX's client does.
pub async fn register_task_1(server: &MusterServer, incarnation: u64) -> CoordinationServiceClient<Channel> {
    let channel = Endpoint::from_shared(format!("http://{}", server.grpc)).unwrap().connect_lazy();
    let mut client = CoordinationServiceClient::new(channel);
    let request = pb::RegisterTaskRequest { incarnation, source_task_id: 1 };
    client.register_task(request).await.unwrap();
    client
}

pub async fn attach_engine(server: &MusterServer, incarnation: u64) -> Result<AttachedEngine, AgentError> {
    AttachedEngine::open(agent_config(server, 1), Incarnation::new(incarnation).unwrap(), vec![OTHER]).await
}

/// Starts a recoverable job of an agent and a client that has registered as incarnation 77 of task 1.
pub async fn start_job_with_registered_client() -> (MusterServer, Agent, CoordinationServiceClient<Channel>) {
    let server = MusterServer::start(&["--tasks", "2", "--recoverable"]);
    let (agent, client) = tokio::join!(Agent::join(agent_config(&server, 0)), register_task_1(&server, 77));
    (server, agent.unwrap(), client)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_attached_engine_moves_bytes_and_reports_them_without_a_registration() {
    let (server, agent, _client) = start_job_with_registered_client().await;
    let attached = attach_engine(&server, 77).await.unwrap();
    for (host, other) in [(agent.host(), TaskId(1)), (attached.host(), TaskId(0))] {
        host.wait_for_engines(&[other], PATIENCE).await.unwrap();
    }
    let (source, target) = (Buffer::foreign(vec![7; 100_000]), Buffer::foreign(vec![0; 100_000]));
    let send = TransferSpec::send(source.full_span(), OTHER, DeviceId(0), TransferKey(1));
    let receive = TransferSpec::receive(target.full_span(), OTHER, DeviceId(0), TransferKey(1));
    let sent = attached.host().engine().transfer(&[], vec![send], LaunchOptions::default());
    let received = agent.engine().transfer(&[], vec![receive], LaunchOptions::default());
    let both = async { (sent.await, received.await) };
    let (sent, received) = tokio::time::timeout(PATIENCE, both).await.expect("it has an outcome");
    assert_eq!((sent.err(), received.err()), (None, None));
    assert!(target.with_bytes(|bytes| bytes.iter().all(|byte| *byte == 7)).unwrap());
    // Its last report arrives although it has no registration of its own, and the task stays registered.
    attached.close().await;
    let answer = http::get(server.http, "/api/v1/jobs/default/transfers/tasks").unwrap().json();
    let reported = answer["tasks"].as_array().unwrap().iter().find(|task| task["task"] == 1).unwrap();
    assert_eq!(reported["incarnation"], "000000000000004d");
    let sent =
        reported["totals"]["bytes"].as_array().unwrap().iter().map(|bytes| bytes["sent"].as_u64().unwrap());
    assert_eq!(sent.sum::<u64>(), 100_000, "{answer}");
    assert_eq!(agent.roster().borrow().lives[&TaskId(1)].get(), 77);
    let again = attach_engine(&server, 77).await.unwrap_err();
    assert!(
        matches!(again, AgentError::EngineExists { task: 1, .. }),
        "its peers know the first one: {again}"
    );
    agent.stop_without_leaving().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_attached_engine_ends_with_its_incarnation() {
    let (server, agent, _client) = start_job_with_registered_client().await;
    for (incarnation, says) in [(78, "incarnation 000000000000004d counts now"), (5, "counts now")] {
        let refused = attach_engine(&server, incarnation).await.unwrap_err();
        assert!(
            matches!(&refused, AgentError::LifeEnded { task: 1, why } if why.contains(says)),
            "{refused}"
        );
    }
    let attached = attach_engine(&server, 77).await.unwrap();
    attached.host().wait_for_engines(&[TaskId(0)], PATIENCE).await.unwrap();
    let target = Buffer::foreign(vec![0; 10]);
    let receive = TransferSpec::receive(target.full_span(), DeviceId(0), OTHER, TransferKey(1));
    let pending = attached.host().engine().transfer(&[], vec![receive], LaunchOptions::default());
    let _next = register_task_1(&server, 79).await;
    let ended = tokio::time::timeout(PATIENCE, attached.host().wait_for_end()).await.expect("it ends");
    assert!(matches!(&ended, AgentError::LifeEnded { task: 1, why } if why.contains("004f")), "{ended}");
    let failed = tokio::time::timeout(PATIENCE, pending).await.expect("it has an outcome").unwrap_err();
    // Task 0 may hear of the next incarnation first, and closes the connections with this one.
    assert!(
        matches!(failed, TransferError::StaleIncarnation { .. } | TransferError::PeerDead { .. }),
        "{failed}"
    );
    let refused = attached.host().wait_for_engines(&[TaskId(0)], PATIENCE).await.unwrap_err();
    assert_eq!(refused, ended);
    // The next incarnation has an engine of its own.
    let next = attach_engine(&server, 79).await.unwrap();
    next.host().wait_for_engines(&[TaskId(0)], PATIENCE).await.unwrap();
    agent.stop_without_leaving().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_attached_engine_ends_when_the_service_is_gone_for_good() {
    let (server, agent, _client) = start_job_with_registered_client().await;
    let attached = attach_engine(&server, 77).await.unwrap();
    let absent = attached.host().wait_for_engines(&[TaskId(5)], Duration::from_millis(50)).await.unwrap_err();
    assert!(
        matches!(&absent, AgentError::EnginesMissing { connected, gone, .. } if connected.is_empty() && gone == &[5]),
        "{absent}"
    );
    drop(server);
    let ended = tokio::time::timeout(PATIENCE, attached.host().wait_for_end()).await.expect("it ends");
    assert!(matches!(ended, AgentError::Unreachable { .. }), "{ended}");
    agent.stop_without_leaving().await;
}
