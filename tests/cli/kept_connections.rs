//! Plaintext gRPC connections survive the death of the core: the next core continues on them. No connection breaks,
//! and each call is answered once.
//!
//! The tests kill the core with SIGKILL, and check what clients see on real sockets. `KEPT_KILLS` sets the number of
//! random kills. `KEPT_SEED` repeats the random choices of a run, but not its timing. `keeper.rs` tests the keeper
//! itself. Begin at [`CoreKiller`], and for the random kills at [`RandomLoad`].

mod barrier_history;
mod client;
mod linearizability;
mod random_load;
mod raw_calls;
mod raw_connection;
mod raw_session;
mod shared_barrier;
mod shared_keys;

use std::fmt::Debug;
use std::time::Duration;

use bytes::Bytes;
use muster::proto::tensorflow;
use prost::Message as _;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use self::client::register_tasks;
use self::random_load::{RandomLoad, TASKS};
use self::raw_connection::{
    GENERATION_A, RawConnection, SAME_HEADERS, encode_request, header_block, insertion, opening,
};
use crate::harness::{MusterServer, PATIENCE, Signal, TempFolder, frames, muster, run};

/// The default number of random kills.
const KILLS: u64 = 25;
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
    let mut killer = CoreKiller { server: &server, early_kills: 0 };
    let (stopping, stop) = watch::channel(false);
    let mut load = RandomLoad::connect(server.grpc, rng.fork()).await;
    let killing = async {
        for _ in 0..kills {
            // One core in five is killed while it starts.
            let below_ms = if rng.u8(0..5) == 0 { 30 } else { 700 };
            random_pause(&mut rng, below_ms).await;
            killer.kill().await;
        }
        sleep(REST).await;
        stopping.send_replace(true);
    };
    tokio::join!(load.run(stop), killing);
    let before = timeout(PATIENCE, settled_state(&server)).await.expect("no client makes calls");
    killer.kill().await;
    assert_eq!(recorded_state(&server), before, "the recovered state");
    load.finish(&mut killer).await;
    // The whole service dies with its keeper, so the journal ends with inputs.
    server.signal(Signal::KILL);
    server.end();
    let checked = run(&mut muster(["journal", "check", &folder.path("journal"), "--json"]));
    let contents: Value = serde_json::from_str(&checked.out).unwrap_or_else(|_| panic!("{checked:?}"));
    assert_eq!(
        (&contents["jobs"], &contents["damaged_snapshots"], &contents["set_aside"]),
        (&1.into(), &json!([]), &json!([])),
        "{contents}"
    );
}

/// Returns the state once the core has noticed that the clients have stopped.
async fn settled_state(server: &MusterServer) -> Value {
    let mut state = recorded_state(server);
    loop {
        sleep(SETTLE).await;
        let last = std::mem::replace(&mut state, recorded_state(server));
        if state == last {
            return state;
        }
    }
}

/// Returns what must be the same in a core and in the next one, while no client makes calls. The next one counts the time
/// without heartbeats from its own start.
fn recorded_state(server: &MusterServer) -> Value {
    let read = |path: &str| server.get(&format!("/api/v1/jobs/default{path}")).json();
    let mut tasks = read("/tasks?limit=1000");
    for task in tasks["tasks"].as_array_mut().expect("a list of tasks") {
        assert!(task["last_heartbeat"].take().is_number(), "{task}");
    }
    json!({ "run": read("/runs/1"), "keys": read("/keys?limit=1000"), "tasks": tasks })
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
        let upgrade = move || run(&mut muster(["upgrade", "--data-dir", &journal, &other]));
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
#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_is_cut_by_a_kill_is_answered() {
    const LENGTH: usize = 30_000;
    let folder = TempFolder::new("kept-cut");
    let server = serve_tasks(&folder, 1);
    let clients = register_tasks(server.grpc, 1).await;
    let mut killer = CoreKiller { server: &server, early_kills: 0 };
    let headers = header_block(GENERATION_A, "InsertKeyValue");
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
        bytes.extend(encode_request(
            stream,
            &header_block(GENERATION_A, "InsertKeyValue"),
            &insertion(key, 100),
        ));
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
        bytes.extend(encode_request(*stream, &header_block(GENERATION_A, "GetKeyValue"), &message));
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
