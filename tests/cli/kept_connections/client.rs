//! A client of generation C on one connection. Begin at [`SingleConnectionClient`].

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::join_all;
use hyper_util::rt::TokioIo;
use muster::proto::xla::coordination as wire;
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tonic::transport::{Channel, Endpoint, Uri};
use tonic::{Code, Status};
use wire::coordination_service_client::CoordinationServiceClient;

use super::linearizability::KeyOperation;
use super::shared_barrier::SharedBarrier;
use super::shared_keys::encode_number;
use super::{PATIENCE, check_value, in_time, parse_number, value_of};

/// The connector of a channel with one connection: it refuses to connect a second time.
struct SingleConnector {
    server: SocketAddr,
    has_connected: bool,
}

impl tower_service::Service<Uri> for SingleConnector {
    type Response = TokioIo<TcpStream>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<TokioIo<TcpStream>>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Uri) -> Self::Future {
        let (server, is_second) = (self.server, std::mem::replace(&mut self.has_connected, true));
        Box::pin(async move {
            if is_second {
                return Err(io::Error::other("the only connection of this client has ended"));
            }
            let socket = TcpStream::connect(server).await?;
            socket.set_nodelay(true)?;
            Ok(TokioIo::new(socket))
        })
    }
}

/// A client of generation C that makes all calls on one connection. Each call must succeed in time.
#[derive(Clone)]
pub struct SingleConnectionClient {
    /// The name in failures.
    pub name: String,
    pub task: i32,
    /// The incarnation of the run, after registration.
    pub service: u64,
    pub grpc: CoordinationServiceClient<Channel>,
}

/// Makes a call with the incarnations of a client, and returns the answer.
macro_rules! call {
    ($client:expr, $method:ident of $subject:expr, $request:ident { $($fields:tt)* }) => {{
        let what = format!("{}: {} of {:?}", $client.name, stringify!($method), $subject);
        let request = wire::$request { incarnations: $client.incarnations(), $($fields)* };
        in_time(&what, $client.grpc.clone().$method(request)).await.into_inner()
    }};
}

impl SingleConnectionClient {
    pub async fn connect(server: SocketAddr, name: String, task: i32) -> Self {
        let endpoint = Endpoint::from_shared(format!("http://{server}")).expect("an address is a URI");
        let connecting = endpoint.connect_with_connector(SingleConnector { server, has_connected: false });
        let channel = in_time(&format!("{name}: the connection"), connecting).await;
        let grpc = CoordinationServiceClient::new(channel).max_decoding_message_size(usize::MAX);
        Self { name, task, service: 0, grpc }
    }

    fn incarnation(&self) -> u64 {
        1000 + u64::from(self.task.unsigned_abs())
    }

    pub fn incarnations(&self) -> Option<wire::Incarnations> {
        let (task_incarnation, service_incarnation) = (self.incarnation(), self.service);
        Some(wire::Incarnations { task_id: 0, task_incarnation, service_incarnation })
    }

    pub async fn register(&mut self) {
        let (incarnation, source_task_id) = (self.incarnation(), self.task);
        let request = wire::RegisterTaskRequest { incarnation, source_task_id };
        let what = format!("{}: the registration", self.name);
        let answer = in_time(&what, self.grpc.clone().register_task(request)).await;
        self.service = answer.into_inner().service_incarnation;
    }

    pub async fn send_heartbeat(&self) {
        let (incarnation, source_task_id) = (self.incarnation(), self.task);
        let answer =
            call!(self, heartbeat of source_task_id, HeartbeatRequest { incarnation, source_task_id });
        assert_eq!(answer.service_incarnation, self.service, "{}: the run was lost", self.name);
    }

    /// Inserts a key that does not exist. A call that was executed twice would fail with ALREADY_EXISTS.
    pub async fn insert(&self, key: &str, length: usize) {
        let kv = Some(wire::KeyValueEntry { key: key.into(), value: value_of(key, length) });
        call!(self, insert_key_value of key, InsertKeyValueRequest { kv, allow_overwrite: false });
    }

    /// Waits for a key whose value has this length.
    pub async fn get(&self, key: &str, length: usize) {
        let answer = call!(self, get_key_value of key, GetKeyValueRequest { key: key.into() });
        check_value(&self.name, &answer.kv.unwrap_or_default().value, key, length);
    }

    /// Reads a key that must be there with a value of this length.
    pub async fn try_get(&self, key: &str, length: usize) {
        check_value(&self.name, &self.read(key).await, key, length);
    }

    pub async fn read(&self, key: &str) -> Bytes {
        let answer = call!(self, try_get_key_value of key, TryGetKeyValueRequest { key: key.into() });
        answer.kv.unwrap_or_default().value
    }

    /// Waits for a key that is never inserted, and cancels the call.
    pub async fn cancel_get(&self, key: &str, after: Duration) {
        let request = wire::GetKeyValueRequest { incarnations: self.incarnations(), key: key.into() };
        if let Ok(answer) = timeout(after, self.grpc.clone().get_key_value(request)).await {
            panic!("{}: get_key_value of {key:?}, which is never inserted, ended: {answer:?}", self.name);
        }
    }

    pub async fn increment(&self, key: &str) -> i64 {
        let (key, increment) = (key.to_owned(), 1);
        let answer = call!(self, increment_key_value of key, IncrementKeyValueRequest { key, increment });
        parse_number(&answer.kv.unwrap_or_default().value)
    }

    /// Checks that a directory contains exactly these keys, with values of these lengths.
    pub async fn check_directory(&self, directory: &str, lengths: &BTreeMap<String, usize>) {
        let directory_key = directory.into();
        let answer = call!(self, get_key_value_dir of directory, GetKeyValueDirRequest { directory_key });
        let found: Vec<_> = answer.kv.iter().map(|entry| &entry.key).collect();
        let inserted: Vec<_> = lengths.keys().collect();
        assert_eq!(found, inserted, "{}: the keys of directory {directory:?}", self.name);
        for (entry, (key, length)) in answer.kv.iter().zip(lengths) {
            check_value(&self.name, &entry.value, key, *length);
        }
    }

    /// Deletes a key, and all keys below it.
    pub async fn delete(&self, key: &str) {
        let (key, is_directory) = (key.to_owned(), true);
        call!(self, delete_key_value of key, DeleteKeyValueRequest { key, is_directory });
    }

    /// Arrives at a barrier of these tasks after a delay, and waits until it passes.
    pub async fn pass_barrier(&self, id: &str, round: i64, members: [i32; 2], delay: Duration) {
        sleep(delay).await;
        let what = format!("{}: round {round} of barrier {id:?}", self.name);
        let counter = in_time(&what, self.arrive(id, round, &members)).await;
        assert_eq!(counter, round, "{what}: the counter");
    }

    /// Arrives at a round of a barrier of these tasks, and returns the counter in the answer.
    pub async fn arrive(&self, id: &str, round: i64, members: &[i32]) -> Result<i64, Status> {
        let request = wire::BarrierRequest {
            incarnations: self.incarnations(),
            barrier_id: id.into(),
            barrier_timeout_in_ms: 600_000,
            task_ids: members.into(),
            source_task_id: self.task,
            counter: round,
        };
        Ok(self.grpc.clone().barrier(request).await?.into_inner().counter)
    }

    /// Cancels a round of a barrier. This is refused if no task has arrived at it.
    pub async fn cancel_barrier(&self, id: &str, round: i64) -> Result<(), Status> {
        let request = wire::CancelBarrierRequest {
            incarnations: self.incarnations(),
            barrier_id: id.into(),
            counter: round,
            source_task_id: self.task,
        };
        self.grpc.clone().cancel_barrier(request).await.map(|_| ())
    }

    /// Makes a call on a key, and returns the value in the answer. Numbers are encoded as the shared keys have them.
    pub async fn operate(&self, key: &str, operation: KeyOperation) -> Result<Bytes, Status> {
        let (key, incarnations, mut grpc) = (key.to_owned(), self.incarnations(), self.grpc.clone());
        let entry = match operation {
            KeyOperation::Insert { number, overwrites } => {
                let kv = Some(wire::KeyValueEntry { key, value: encode_number(number) });
                let request = wire::InsertKeyValueRequest { incarnations, kv, allow_overwrite: overwrites };
                grpc.insert_key_value(request).await?;
                None
            }
            KeyOperation::Get => {
                grpc.get_key_value(wire::GetKeyValueRequest { incarnations, key }).await?.into_inner().kv
            }
            KeyOperation::TryGet => {
                grpc.try_get_key_value(wire::TryGetKeyValueRequest { incarnations, key })
                    .await?
                    .into_inner()
                    .kv
            }
            KeyOperation::Increment => {
                let request = wire::IncrementKeyValueRequest { incarnations, key, increment: 1 };
                grpc.increment_key_value(request).await?.into_inner().kv
            }
            KeyOperation::Delete => {
                let request = wire::DeleteKeyValueRequest { incarnations, key, is_directory: true };
                grpc.delete_key_value(request).await?;
                None
            }
        };
        Ok(entry.unwrap_or_default().value)
    }

    /// Arrives at a round of a shared barrier after a delay, and waits until it passes.
    pub async fn pass_shared_barrier(&self, barrier: &SharedBarrier, round: i64, delay: Duration) {
        sleep(delay).await;
        let what = format!("{}: round {round} of barrier {:?}", self.name, barrier.id);
        barrier.record_arrival(self.task, round);
        let counter = in_time(&what, self.arrive(&barrier.id, round, &barrier.members)).await;
        barrier.record_pass(self.task, round, counter);
    }

    /// Arrives at a round of a shared barrier, gives the call up after a while, and arrives again. The round may pass
    /// meanwhile: the next arrival then gets the result again.
    pub async fn give_up_arrival(&self, barrier: &SharedBarrier, round: i64, after: Duration) {
        barrier.record_arrival(self.task, round);
        _ = timeout(after, self.arrive(&barrier.id, round, &barrier.members)).await;
        // The client library may send the given-up call after the next one, and the service then cancels that one.
        let arriving = timeout(PATIENCE, self.arrive(&barrier.id, round, &barrier.members)).await;
        if let Err(refusal) = arriving.expect("an answer to the arrival") {
            let is_replaced = refusal.code() == Code::Cancelled && refusal.message().contains("more recent");
            assert!(is_replaced, "{}: round {round} of barrier {:?}: {refusal:?}", self.name, barrier.id);
        }
    }

    /// Shuts the task down together with all others.
    pub async fn shut_down(&self) {
        let source_task_id = self.task;
        call!(self, shutdown_task of source_task_id, ShutdownTaskRequest { source_task_id });
    }

    /// Checks that the tasks `0..tasks` are connected, and no others.
    pub async fn check_tasks(&self, tasks: i32) {
        let answer = call!(self, watch_tasks of "all", WatchTasksRequest { version_number: -1 });
        let state = |info: &wire::TaskInfo| (info.task_id, info.state);
        let mut states: Vec<_> = answer.task_state.iter().map(state).collect();
        states.sort_unstable();
        let connected: Vec<_> = (0..tasks).map(|task| (task, wire::TaskState::Connected as i32)).collect();
        assert_eq!(states, connected, "{}: a task has lost its state: {answer:?}", self.name);
    }

    /// Polls for an error until the end of the test. The poll must not be answered before.
    pub async fn poll_for_error(self, mut stop: watch::Receiver<bool>) {
        let (incarnations, source_task_id) = (self.incarnations(), self.task);
        let request = wire::PollForErrorRequest { incarnations, source_task_id };
        let mut grpc = self.grpc.clone();
        let stopped = async { _ = stop.wait_for(|stop| *stop).await };
        tokio::select! {
            answer = grpc.poll_for_error(request) => panic!("{}: the error poll ended: {answer:?}", self.name),
            () = stopped => {}
        }
    }
}

/// Connects a client for each task, and registers all tasks at once.
pub async fn register_tasks(server: SocketAddr, tasks: i32) -> Vec<SingleConnectionClient> {
    let clients = (0..tasks).map(|task| async move {
        let mut client = SingleConnectionClient::connect(server, format!("task {task}"), task).await;
        client.register().await;
        client
    });
    join_all(clients).await
}
