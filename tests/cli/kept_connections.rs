//! Plaintext gRPC connections survive the death of the core: the next core continues on them. No connection breaks,
//! and each call is answered once.
//!
//! The tests kill the core with SIGKILL, and check what clients see on real sockets. `KEPT_KILLS` sets the number of
//! random kills. `KEPT_SEED` repeats the random choices of a run, but not its timing. `keeper.rs` tests the keeper
//! itself. Begin at [`SingleConnectionClient`] and [`CoreKiller`].

use std::collections::{BTreeMap, HashMap};
use std::fmt::Debug;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::join_all;
use hyper_util::rt::TokioIo;
use muster::proto::{tensorflow, xla::coordination as wire};
use prost::Message;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tonic::transport::{Channel, Endpoint, Uri};
use wire::coordination_service_client::CoordinationServiceClient;

use crate::harness::{MusterServer, PATIENCE, TempFolder, frames, muster};

/// The tasks of the random test, each with its own connection. The number is even: pairs of tasks share barriers.
const TASKS: i32 = 8;
/// The callers on each of these connections that make calls of any kind.
const RANDOM_CALLERS: usize = 2;
/// The default number of random kills.
const KILLS: u64 = 25;
/// The counters that all callers increment.
const COUNTERS: usize = 4;
const MIB: usize = 1 << 20;
/// The time in which the core surely receives what a test has sent.
const SETTLE: Duration = Duration::from_millis(200);
/// The kills in a row after which a core may serve for [`REST`]. The keeper gives up after ten cores in a row that
/// served for less than a second, and it pauses for longer before each of them.
const EARLY_KILLS_MAX: u32 = 5;
/// The time that resets this count of the keeper, with a margin.
const REST: Duration = Duration::from_millis(1500);
/// An empty message with gRPC's prefix.
const EMPTY_MESSAGE: [u8; 5] = [0; 5];

fn number_from_environment(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().expect("a number"))
}

/// Returns the random numbers of a test. The output of a failed test has their seed.
fn random_numbers() -> fastrand::Rng {
    let seed = number_from_environment("KEPT_SEED").unwrap_or_else(|| fastrand::u64(..));
    println!("repeat the random choices with KEPT_SEED={seed}");
    fastrand::Rng::with_seed(seed)
}

async fn random_pause(rng: &mut fastrand::Rng, below_ms: u64) {
    sleep(Duration::from_millis(rng.u64(0..below_ms))).await;
}

/// Returns the length of a value: zero, short, or so long that the value arrives in several reads.
fn random_length(rng: &mut fastrand::Rng) -> usize {
    match rng.u8(0..100) {
        0..5 => 0,
        5..80 => rng.usize(1..200),
        80..95 => rng.usize(200..20_000),
        _ => rng.usize(20_000..=200 << 10),
    }
}

/// Returns the value of a key: different bytes for each key and length.
fn value_of(key: &str, length: usize) -> Bytes {
    let mix = |hash: u64, byte: u8| hash.wrapping_mul(31).wrapping_add(byte.into());
    let mut value = vec![0; length];
    fastrand::Rng::with_seed(key.bytes().fold(length as u64, mix)).fill(&mut value);
    value.into()
}

#[track_caller]
fn check_value(what: &str, value: &Bytes, key: &str, length: usize) {
    let (is_same, found) = (*value == value_of(key, length), value.len());
    assert!(is_same, "{what}: the {found} bytes of {key:?} are not the {length} inserted ones");
}

fn parse_number(value: &Bytes) -> i64 {
    let number = std::str::from_utf8(value).ok().and_then(|text| text.parse::<i64>().ok());
    number.unwrap_or_else(|| panic!("the value of a counter is {value:?}"))
}

/// Returns the result of an operation, which must succeed in time.
async fn in_time<T, E: Debug>(what: &str, operation: impl Future<Output = Result<T, E>>) -> T {
    match timeout(PATIENCE, operation).await {
        Ok(Ok(result)) => result,
        Ok(Err(error)) => panic!("{what} failed: {error:?}"),
        Err(_) => panic!("{what} was lost: it did not complete within {PATIENCE:?}"),
    }
}

/// Starts a server with a keeper. It holds error polls, so the end of a task's connection would fail the run.
fn serve_tasks(folder: &TempFolder, tasks: i32) -> MusterServer {
    serve_durably(folder, tasks, "process")
}

/// Does what [`serve_tasks`] does, with answers that survive what `durability` says.
fn serve_durably(folder: &TempFolder, tasks: i32, durability: &str) -> MusterServer {
    let (journal, tasks) = (folder.path("journal"), tasks.to_string());
    let own =
        ["--data-dir", &journal, "--tasks", &tasks, "--error-delivery", "hold", "--durability", durability];
    MusterServer::patient(&own)
}

/// Kills the cores of a server.
struct CoreKiller<'a> {
    server: &'a MusterServer,
    /// The kills since the last rest.
    early_kills: u32,
}

impl CoreKiller<'_> {
    /// Kills the core, and returns once the process of the next one exists. That may not serve yet.
    async fn kill(&mut self) {
        if self.early_kills == EARLY_KILLS_MAX {
            let probe = self.server.get("/healthz/live");
            assert_eq!(probe.status, 200, "a core must serve after the kills: {probe:?}");
            sleep(REST).await;
            self.early_kills = 0;
        }
        let core = self.server.kill_core();
        let next_core = async {
            while self.server.first_child().is_none_or(|present| present == core) {
                sleep(Duration::from_millis(1)).await;
            }
        };
        timeout(PATIENCE, next_core).await.expect("the keeper starts another core after a kill");
        self.early_kills += 1;
    }
}

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
struct SingleConnectionClient {
    /// The name in failures.
    name: String,
    task: i32,
    /// The incarnation of the run, after registration.
    service: u64,
    grpc: CoordinationServiceClient<Channel>,
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
    async fn connect(server: SocketAddr, name: String, task: i32) -> Self {
        let endpoint = Endpoint::from_shared(format!("http://{server}")).expect("an address is a URI");
        let connecting = endpoint.connect_with_connector(SingleConnector { server, has_connected: false });
        let channel = in_time(&format!("{name}: the connection"), connecting).await;
        let grpc = CoordinationServiceClient::new(channel).max_decoding_message_size(usize::MAX);
        Self { name, task, service: 0, grpc }
    }

    fn incarnation(&self) -> u64 {
        1000 + u64::from(self.task.unsigned_abs())
    }

    fn incarnations(&self) -> Option<wire::Incarnations> {
        let (task_incarnation, service_incarnation) = (self.incarnation(), self.service);
        Some(wire::Incarnations { task_id: 0, task_incarnation, service_incarnation })
    }

    async fn register(&mut self) {
        let (incarnation, source_task_id) = (self.incarnation(), self.task);
        let request = wire::RegisterTaskRequest { incarnation, source_task_id };
        let what = format!("{}: the registration", self.name);
        let answer = in_time(&what, self.grpc.clone().register_task(request)).await;
        self.service = answer.into_inner().service_incarnation;
    }

    async fn send_heartbeat(&self) {
        let (incarnation, source_task_id) = (self.incarnation(), self.task);
        let answer =
            call!(self, heartbeat of source_task_id, HeartbeatRequest { incarnation, source_task_id });
        assert_eq!(answer.service_incarnation, self.service, "{}: the run was lost", self.name);
    }

    /// Inserts a key that does not exist. A call that was executed twice would fail with ALREADY_EXISTS.
    async fn insert(&self, key: &str, length: usize) {
        let kv = Some(wire::KeyValueEntry { key: key.into(), value: value_of(key, length) });
        call!(self, insert_key_value of key, InsertKeyValueRequest { kv, allow_overwrite: false });
    }

    /// Waits for a key whose value has this length.
    async fn get(&self, key: &str, length: usize) {
        let answer = call!(self, get_key_value of key, GetKeyValueRequest { key: key.into() });
        check_value(&self.name, &answer.kv.unwrap_or_default().value, key, length);
    }

    /// Reads a key that must be there with a value of this length.
    async fn try_get(&self, key: &str, length: usize) {
        check_value(&self.name, &self.read(key).await, key, length);
    }

    async fn read(&self, key: &str) -> Bytes {
        let answer = call!(self, try_get_key_value of key, TryGetKeyValueRequest { key: key.into() });
        answer.kv.unwrap_or_default().value
    }

    /// Waits for a key that is never inserted, and cancels the call.
    async fn cancel_get(&self, key: &str, after: Duration) {
        let request = wire::GetKeyValueRequest { incarnations: self.incarnations(), key: key.into() };
        if let Ok(answer) = timeout(after, self.grpc.clone().get_key_value(request)).await {
            panic!("{}: get_key_value of {key:?}, which is never inserted, ended: {answer:?}", self.name);
        }
    }

    async fn increment(&self, key: &str) -> i64 {
        let (key, increment) = (key.to_owned(), 1);
        let answer = call!(self, increment_key_value of key, IncrementKeyValueRequest { key, increment });
        parse_number(&answer.kv.unwrap_or_default().value)
    }

    /// Checks that a directory contains exactly these keys, with values of these lengths.
    async fn check_directory(&self, directory: &str, lengths: &BTreeMap<String, usize>) {
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
    async fn delete(&self, key: &str) {
        let (key, is_directory) = (key.to_owned(), true);
        call!(self, delete_key_value of key, DeleteKeyValueRequest { key, is_directory });
    }

    /// Arrives at a barrier of these tasks after a delay, and waits until it passes.
    async fn pass_barrier(&self, id: &str, round: i64, members: [i32; 2], delay: Duration) {
        sleep(delay).await;
        let request = wire::BarrierRequest {
            incarnations: self.incarnations(),
            barrier_id: id.into(),
            barrier_timeout_in_ms: 600_000,
            task_ids: members.into(),
            source_task_id: self.task,
            counter: round,
        };
        let what = format!("{}: round {round} of barrier {id:?}", self.name);
        let answer = in_time(&what, self.grpc.clone().barrier(request)).await.into_inner();
        assert_eq!(answer.counter, round, "{what}: the counter");
    }

    /// Checks that all tasks of the random test are connected.
    async fn check_tasks(&self) {
        let answer = call!(self, watch_tasks of "all", WatchTasksRequest { version_number: -1 });
        let state = |info: &wire::TaskInfo| (info.task_id, info.state);
        let mut states: Vec<_> = answer.task_state.iter().map(state).collect();
        states.sort_unstable();
        let connected: Vec<_> = (0..TASKS).map(|task| (task, wire::TaskState::Connected as i32)).collect();
        assert_eq!(states, connected, "{}: a task has lost its state: {answer:?}", self.name);
    }

    /// Polls for an error until the end of the test. The poll must not be answered before.
    async fn poll_for_error(self, mut stop: watch::Receiver<bool>) {
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
async fn register_tasks(server: SocketAddr, tasks: i32) -> Vec<SingleConnectionClient> {
    let clients = (0..tasks).map(|task| async move {
        let mut client = SingleConnectionClient::connect(server, format!("task {task}"), task).await;
        client.register().await;
        client
    });
    join_all(clients).await
}

/// The results of all increments, by counter.
type CounterResults = [Mutex<Vec<i64>>; COUNTERS];

/// An activity of the random test, which makes calls until `stop` is true.
struct Activity {
    client: SingleConnectionClient,
    /// The client of the next task.
    next: SingleConnectionClient,
    rng: fastrand::Rng,
    stop: watch::Receiver<bool>,
}

impl Activity {
    /// Lets two clients wait for keys that one of them inserts a moment later.
    async fn hand_over_keys(self) {
        let Self { client, next, mut rng, stop } = self;
        let mut number = 0;
        while !*stop.borrow() {
            let key = format!("handed-over/{}/{number}", client.task);
            let length = random_length(&mut rng);
            let writing = async {
                random_pause(&mut rng, 150).await;
                next.insert(&key, length).await;
            };
            tokio::join!(client.get(&key, length), next.get(&key, length), writing);
            next.delete(&key).await;
            number += 1;
        }
    }

    /// Lets two tasks pass barriers.
    async fn pass_barriers(self) {
        let Self { client, next, mut rng, stop } = self;
        let (id, members) = (format!("pair/{}", client.task), [client.task, next.task]);
        let mut round = 0;
        while !*stop.borrow() {
            let delays = [rng.u64(0..60), rng.u64(0..60)].map(Duration::from_millis);
            tokio::join!(
                client.pass_barrier(&id, round, members, delays[0]),
                next.pass_barrier(&id, round, members, delays[1])
            );
            round += 1;
        }
    }

    /// Opens connections at any time, also while no core serves. Each makes a few calls.
    async fn open_short_connections(self, server: SocketAddr) {
        let Self { client: registered, mut rng, stop, .. } = self;
        let (mut number, mut reset) = (0, 0);
        while !*stop.borrow() {
            let name = format!("short connection {number}");
            let mut client = SingleConnectionClient::connect(server, name, registered.task).await;
            client.service = registered.service;
            let (key, length) = (format!("short/{number}"), random_length(&mut rng));
            number += 1;
            // A core that is killed within microseconds of an accept takes the connection with it, before anything was read.
            let kv = Some(wire::KeyValueEntry { key: key.clone(), value: value_of(&key, length) });
            let first = wire::InsertKeyValueRequest {
                kv,
                allow_overwrite: false,
                incarnations: client.incarnations(),
            };
            if let Err(failure) = in_time(&client.name, async {
                Ok::<_, ()>(client.grpc.clone().insert_key_value(first).await)
            })
            .await
            {
                assert_eq!(failure.message(), "transport error", "{}: {failure:?}", client.name);
                reset += 1;
                assert!(100 * reset <= number + 300, "{reset} of {number} new connections were reset");
                continue;
            }
            random_pause(&mut rng, 30).await;
            client.try_get(&key, length).await;
            client.delete(&key).await;
        }
    }

    /// Makes calls of any kind, one after the other. Only this activity inserts keys below `parent`.
    async fn call_at_random(self, parent: String, results: Arc<CounterResults>) {
        let Self { client, mut rng, stop, .. } = self;
        let mut last_results = [0; COUNTERS];
        // The keys of the present directory, with the lengths of their values.
        let (mut directory, mut lengths) = (format!("{parent}/0"), BTreeMap::new());
        let mut number = 0;
        while !*stop.borrow() {
            number += 1;
            match rng.u8(0..40) {
                0..12 => {
                    let (key, length) = (format!("{directory}/{number:08}"), random_length(&mut rng));
                    client.insert(&key, length).await;
                    lengths.insert(key, length);
                }
                12..22 => {
                    let counter = rng.usize(0..COUNTERS);
                    let result = client.increment(&format!("counter/{counter}")).await;
                    let last = std::mem::replace(&mut last_results[counter], result);
                    assert!(result > last, "{parent}: counter {counter} went from {last} to {result}");
                    results[counter].lock().expect("no holder panics").push(result);
                }
                22..32 => {
                    if let Some((key, length)) = rng.choice(&lengths) {
                        client.try_get(key, *length).await;
                    }
                }
                32 => client.send_heartbeat().await,
                33 => client.check_tasks().await,
                34 => {
                    client.check_directory(&directory, &lengths).await;
                    if lengths.values().sum::<usize>() > MIB {
                        client.delete(&directory).await;
                        lengths.clear();
                        client.check_directory(&directory, &lengths).await;
                        directory = format!("{parent}/{number}");
                    }
                }
                _ => {
                    let after = Duration::from_millis(rng.u64(0..30));
                    client.cancel_get(&format!("absent/{parent}/{number}"), after).await;
                }
            }
            random_pause(&mut rng, 10).await;
        }
        client.check_directory(&directory, &lengths).await;
    }
}

/// Registers the tasks, and makes calls on their connections until `stop` is true.
async fn run_clients(server: SocketAddr, mut rng: fastrand::Rng, stop: watch::Receiver<bool>) {
    let clients = register_tasks(server, TASKS).await;
    let results = Arc::<CounterResults>::default();
    let mut activities = JoinSet::new();
    for (client, next) in clients.iter().zip(clients.iter().cycle().skip(1)) {
        let mut activity =
            || Activity { client: client.clone(), next: next.clone(), rng: rng.fork(), stop: stop.clone() };
        activities.spawn(client.clone().poll_for_error(stop.clone()));
        activities.spawn(activity().hand_over_keys());
        for number in 0..RANDOM_CALLERS {
            let parent = format!("caller-{}-{number}", client.task);
            activities.spawn(activity().call_at_random(parent, Arc::clone(&results)));
        }
        if client.task == 0 {
            activities.spawn(activity().open_short_connections(server));
        }
        if client.task % 2 == 0 {
            activities.spawn(activity().pass_barriers());
        }
    }
    while let Some(ended) = activities.join_next().await {
        if let Err(error) = ended {
            std::panic::resume_unwind(error.into_panic());
        }
    }
    for (counter, results) in results.iter().enumerate() {
        let mut results = results.lock().expect("no holder panics").clone();
        results.sort_unstable();
        let wrong = (1..).zip(&results).find(|(expected, result)| expected != *result);
        assert_eq!(
            wrong, None,
            "counter {counter}: no client got this result, but the other one in its place"
        );
        let (value, increments) = (clients[0].read(&format!("counter/{counter}")).await, results.len());
        assert_eq!(parse_number(&value), increments as i64, "counter {counter}: value and increments");
    }
    for client in &clients {
        client.send_heartbeat().await;
        client.check_tasks().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn connections_survive_random_kills() {
    let kills = number_from_environment("KEPT_KILLS").unwrap_or(KILLS);
    survive_random_kills(kills, "process").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn connections_survive_random_kills_while_answers_wait_for_the_disk() {
    survive_random_kills(KILLS / 2, "host").await;
}

async fn survive_random_kills(kills: u64, durability: &str) {
    let mut rng = random_numbers();
    let folder = TempFolder::new(&format!("kept-random-{durability}"));
    let server = serve_durably(&folder, TASKS, durability);
    let (stopping, stop) = watch::channel(false);
    let clients = run_clients(server.grpc, rng.fork(), stop);
    let killing = async {
        let mut killer = CoreKiller { server: &server, early_kills: 0 };
        for _ in 0..kills {
            // One core in five is killed while it starts.
            let below_ms = if rng.u8(0..5) == 0 { 30 } else { 700 };
            random_pause(&mut rng, below_ms).await;
            killer.kill().await;
        }
        sleep(REST).await;
        stopping.send_replace(true);
    };
    tokio::join!(clients, killing);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_waiting_call_is_answered_after_a_kill() {
    let folder = TempFolder::new("kept-waiting");
    let server = serve_tasks(&folder, 3);
    let clients = register_tasks(server.grpc, 3).await;
    let [waiter, writer, idle] = &clients[..] else { panic!("three clients") };
    let mut killer = CoreKiller { server: &server, early_kills: 0 };
    tokio::join!(waiter.get("awaited", 1000), async {
        sleep(SETTLE).await;
        killer.kill().await;
        writer.insert("awaited", 1000).await;
    });
    let members = [waiter.task, writer.task];
    tokio::join!(waiter.pass_barrier("halved", 0, members, Duration::ZERO), async {
        sleep(SETTLE).await;
        killer.kill().await;
        writer.pass_barrier("halved", 0, members, Duration::ZERO).await;
    });
    killer.kill().await;
    idle.send_heartbeat().await;
    idle.try_get("awaited", 1000).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn waiting_calls_and_connections_go_on_over_an_upgrade() {
    let folder = TempFolder::new("kept-upgrade");
    let server = serve_tasks(&folder, 2);
    let clients = register_tasks(server.grpc, 2).await;
    let [waiter, writer] = &clients[..] else { panic!("two clients") };
    let (journal, other) = (folder.path("journal"), folder.path("other-muster"));
    std::fs::copy(env!("CARGO_BIN_EXE_muster"), &other).expect("a copy");
    tokio::join!(waiter.get("awaited", 1000), async {
        sleep(SETTLE).await;
        let upgrade = move || crate::harness::run(&mut muster(["upgrade", "--data-dir", &journal, &other]));
        let done = tokio::task::spawn_blocking(upgrade).await.expect("it does not panic");
        assert_eq!(done.code, Some(0), "{done:?}");
        assert!(done.out.contains("its connections go on"), "{done:?}");
        writer.insert("awaited", 1000).await;
    });
    let state = server.get("/api/v1/journal").json();
    assert_eq!(
        (&state["continued_connections"], &state["lost_connections"]),
        (&2.into(), &0.into()),
        "{state}"
    );
    assert!(server.get("/").body.contains("2 connections went on"));
}

/// A connection of single frames. It does not acknowledge the server's SETTINGS, so that its requests may refer to the
/// table of header compression. Its small receive buffer keeps unread answers in the server.
struct RawConnection {
    /// The name in failures.
    name: String,
    socket: TcpStream,
    /// The responses, by stream.
    responses: HashMap<u32, StreamResponse>,
}

/// What has arrived of a response.
#[derive(Default)]
struct StreamResponse {
    headers: String,
    body: Vec<u8>,
    has_ended: bool,
}

impl RawConnection {
    async fn connect(server: SocketAddr, name: String) -> Self {
        let socket = TcpSocket::new_v4().expect("a socket");
        socket.set_recv_buffer_size(64 << 10).expect("a TCP socket");
        let socket = in_time(&format!("{name}: the connection"), socket.connect(server)).await;
        socket.set_nodelay(true).expect("a TCP socket");
        Self { name, socket, responses: HashMap::new() }
    }

    async fn send(&mut self, bytes: &[u8]) {
        in_time(&format!("{}: a write", self.name), self.socket.write_all(bytes)).await;
    }

    async fn receive_frame(&mut self) {
        let what = format!("{}: the next frame", self.name);
        let mut header = [0; 9];
        in_time(&what, self.socket.read_exact(&mut header)).await;
        let [high, middle, low, kind, flags, stream @ ..] = header;
        let mut payload = vec![0; u32::from_be_bytes([0, high, middle, low]) as usize];
        in_time(&what, self.socket.read_exact(&mut payload)).await;
        let response = self.responses.entry(u32::from_be_bytes(stream)).or_default();
        match kind {
            frames::DATA => response.body.extend_from_slice(&payload),
            frames::HEADERS => response.headers.push_str(&String::from_utf8_lossy(&payload)),
            frames::RST_STREAM | frames::GOAWAY => {
                let text = String::from_utf8_lossy(&payload);
                panic!("{}: the server sent frame {kind} on stream {stream:?}: {text:?}", self.name)
            }
            _ => return,
        }
        response.has_ended |= flags & frames::END_STREAM != 0;
    }

    /// Returns the body of a successful response, which contains one message.
    async fn receive_body(&mut self, stream: u32) -> Vec<u8> {
        while !self.responses.get(&stream).is_some_and(|response| response.has_ended) {
            self.receive_frame().await;
        }
        let StreamResponse { headers, body, .. } = self.responses.remove(&stream).unwrap_or_default();
        assert!(!body.is_empty(), "{}: the call on stream {stream} failed: {headers:?}", self.name);
        body
    }
}

/// Encodes the beginning of a connection, with windows for all answers.
fn opening() -> Vec<u8> {
    let mut bytes = frames::PREFACE.to_vec();
    frames::settings(&mut bytes, &[(frames::INITIAL_WINDOW_SIZE, 16 << 20)]);
    frames::number(&mut bytes, frames::WINDOW_UPDATE, 0, 64 << 20);
    bytes
}

/// Encodes the headers of a request of generation A. Each enters the table of header compression.
fn header_block(method: &str) -> Vec<u8> {
    let path = format!("/tensorflow.CoordinationService/{method}");
    let mut block = Vec::new();
    for (name, value) in [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path.as_str()),
        (":authority", "muster.example:8476"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    ] {
        block.push(0x40);
        frames::string(&mut block, name.as_bytes());
        frames::string(&mut block, value.as_bytes());
    }
    block
}

/// The headers of the last request, as references to the six newest entries of the table.
const SAME_HEADERS: [u8; 6] = [0x80 | 67, 0x80 | 66, 0x80 | 65, 0x80 | 64, 0x80 | 63, 0x80 | 62];

fn encode_request(stream: u32, headers: &[u8], message: &impl Message) -> Vec<u8> {
    let mut bytes = Vec::new();
    frames::frame(&mut bytes, frames::HEADERS, frames::END_HEADERS, stream, headers);
    let message = message.encode_to_vec();
    let length = u32::try_from(message.len()).expect("a short message").to_be_bytes();
    let body = [&[0_u8][..], &length[..], &message[..]].concat();
    let mut pieces = body.chunks(16 << 10).peekable();
    while let Some(piece) = pieces.next() {
        let flags = if pieces.peek().is_none() { frames::END_STREAM } else { 0 };
        frames::frame(&mut bytes, frames::DATA, flags, stream, piece);
    }
    bytes
}

fn insertion(key: &str, length: usize) -> tensorflow::InsertKeyValueRequest {
    let kv = Some(tensorflow::KeyValueEntry { key: key.into(), value: value_of(key, length) });
    tensorflow::InsertKeyValueRequest { kv, allow_overwrite: false }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_is_cut_by_a_kill_is_answered() {
    const LENGTH: usize = 30_000;
    let folder = TempFolder::new("kept-cut");
    let server = serve_tasks(&folder, 1);
    let clients = register_tasks(server.grpc, 1).await;
    let mut killer = CoreKiller { server: &server, early_kills: 0 };
    let headers = header_block("InsertKeyValue");
    let (preface, request) = (frames::PREFACE.len(), opening().len());
    let data = request + 9 + headers.len();
    let mut connections = Vec::new();
    // The cuts are in the preface, around and in SETTINGS, HEADERS and DATA, in gRPC's prefix, and in the value.
    let early = [10, preface, preface + 4, request, request + 4, request + 40];
    let late = [data, data + 4, data + 11, data + 10_000, data + 9 + (16 << 10), data + 25_000];
    for cut in early.into_iter().chain(late) {
        let key = format!("cut-at-{cut}");
        let bytes = [opening(), encode_request(1, &headers, &insertion(&key, LENGTH))].concat();
        let mut connection = RawConnection::connect(server.grpc, format!("request {key}")).await;
        connection.send(&bytes[..cut]).await;
        connections.push((connection, key, bytes[cut..].to_vec()));
    }
    sleep(SETTLE).await;
    killer.kill().await;
    for (connection, key, rest) in &mut connections {
        connection.send(rest).await;
        assert_eq!(connection.receive_body(1).await, EMPTY_MESSAGE, "{key}");
        clients[0].try_get(key, LENGTH).await;
    }
    killer.kill().await;
    for (connection, key, _) in &mut connections {
        let key = format!("{key}/with-the-same-headers");
        connection.send(&encode_request(3, &SAME_HEADERS, &insertion(&key, 100))).await;
        assert_eq!(connection.receive_body(3).await, EMPTY_MESSAGE, "{key}");
        clients[0].try_get(&key, 100).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn slow_readers_and_bytewise_writers_survive() {
    let mut rng = random_numbers();
    let folder = TempFolder::new("kept-slow");
    let server = serve_tasks(&folder, 1);
    let clients = register_tasks(server.grpc, 1).await;
    let mut killer = CoreKiller { server: &server, early_kills: 0 };
    let streams = || (1_u32..).step_by(2);

    let keys: Vec<_> = (0..6).map(|number| format!("bytewise/{number}")).collect();
    let mut bytes = opening();
    for (stream, key) in streams().zip(&keys) {
        bytes.extend(encode_request(stream, &header_block("InsertKeyValue"), &insertion(key, 100)));
    }
    let mut writer = RawConnection::connect(server.grpc, "bytewise writer".into()).await;
    let writing = async {
        for byte in &bytes {
            writer.send(std::slice::from_ref(byte)).await;
            sleep(Duration::from_millis(1)).await;
        }
    };
    let killing = async {
        for _ in 0..4 {
            random_pause(&mut rng, 700).await;
            killer.kill().await;
        }
    };
    tokio::join!(writing, killing);
    for (stream, key) in streams().zip(&keys) {
        assert_eq!(writer.receive_body(stream).await, EMPTY_MESSAGE, "{key}");
        clients[0].try_get(key, 100).await;
    }

    // The socket buffers take less than all answers, so cores die with answers that are not sent.
    let keys: Vec<_> = (0..4).map(|number| format!("unread/{number}")).collect();
    let mut bytes = opening();
    for key in &keys {
        clients[0].insert(key, MIB).await;
    }
    let calls: Vec<_> = streams().zip(keys.iter().cycle()).take(12).collect();
    for (stream, key) in &calls {
        let message = tensorflow::GetKeyValueRequest { key: (*key).clone() };
        bytes.extend(encode_request(*stream, &header_block("GetKeyValue"), &message));
    }
    let mut reader = RawConnection::connect(server.grpc, "slow reader".into()).await;
    reader.send(&bytes).await;
    sleep(SETTLE).await;
    killer.kill().await;
    killer.kill().await;
    for (stream, key) in calls {
        let body = reader.receive_body(stream).await;
        let answer =
            tensorflow::GetKeyValueResponse::decode(&body[EMPTY_MESSAGE.len()..]).expect("a message");
        check_value("slow reader", &answer.kv.unwrap_or_default().value, key, MIB);
        if stream % 8 == 7 {
            killer.kill().await;
        }
    }
}
