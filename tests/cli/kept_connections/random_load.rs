//! The random load: clients of both generations make calls of all kinds, while the core is killed again and again.
//!
//! Tasks `0..TASKS_OF_C` speak generation C. Their calls are checked by themselves ([`Activity`]). The other tasks, and
//! some clients that are no tasks, are [`RawSession`]s. The calls of all of them on shared keys, and at barriers, are
//! recorded, and their histories are checked. Begin at [`RandomLoad`].

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::join_all;
use muster::proto::xla::coordination as wire;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tonic::Code;

use super::client::{SingleConnectionClient, register_tasks};
use super::linearizability::KeyOperation;
use super::raw_session::RawSession;
use super::shared_barrier::SharedBarrier;
use super::shared_keys::SharedKeys;
use super::{
    CoreKiller, MIB, PATIENCE, SETTLE, in_time, parse_number, random_length, random_pause, value_of,
};

/// The tasks of generation C, each with its own connection. The number is even: pairs of tasks share barriers.
const TASKS_OF_C: i32 = 8;
/// All tasks.
pub const TASKS: i32 = 11;
/// The clients that are no tasks, and reset their connections.
const FURTHER_CLIENTS: u64 = 3;
/// The callers on each connection of generation C that make calls of any kind.
const RANDOM_CALLERS: usize = 2;
/// The counters that all callers increment.
const COUNTERS: usize = 4;

/// The results of all increments, by counter.
type CounterResults = [Mutex<Vec<i64>>; COUNTERS];

/// An activity of a task of generation C in the random load, which makes calls until `stop` is true.
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

    /// Lets two tasks use a barrier: some rounds are cancelled by one of them, and some arrivals are given up and
    /// repeated.
    async fn use_barrier_of_pair(self, barrier: Arc<SharedBarrier>) {
        let Self { client, next, mut rng, stop } = self;
        let mut round = 0;
        while !*stop.borrow() {
            let delays = [rng.u64(0..60), rng.u64(0..60)].map(Duration::from_millis);
            match rng.u8(0..10) {
                0 => {
                    barrier.record_arrival(client.task, round);
                    let arriving = timeout(PATIENCE, client.arrive(&barrier.id, round, &barrier.members));
                    let cancelling = async {
                        sleep(delays[0]).await;
                        barrier.record_cancellation(next.task, round);
                        // It is refused until the arrival is there.
                        while let Err(refusal) = next.cancel_barrier(&barrier.id, round).await {
                            let (code, name) = (refusal.code(), &next.name);
                            assert_eq!(code, Code::FailedPrecondition, "{name}: {refusal:?}");
                            sleep(Duration::from_millis(5)).await;
                        }
                    };
                    let cancelling = timeout(PATIENCE, cancelling);
                    let (arrived, cancelled) = tokio::join!(arriving, cancelling);
                    cancelled.expect("the round can be cancelled");
                    let failure = arrived.expect("an answer to the arrival").expect_err("a cancelled round");
                    assert_eq!(failure.code(), Code::Cancelled, "{}: {failure:?}", client.name);
                    barrier.record_cancelled_round(client.task, round);
                    // The other task counts the round too, and its arrival gets the same result.
                    barrier.record_arrival(next.task, round);
                    let arriving = timeout(PATIENCE, next.arrive(&barrier.id, round, &barrier.members));
                    let failure = arriving.await.expect("an answer").expect_err("a cancelled round");
                    assert_eq!(failure.code(), Code::Cancelled, "{}: {failure:?}", next.name);
                    barrier.record_cancelled_round(next.task, round);
                }
                kind => {
                    let first = async {
                        if kind < 3 {
                            client.give_up_arrival(&barrier, round, delays[0]).await;
                        }
                        client.pass_shared_barrier(&barrier, round, delays[0]).await;
                    };
                    tokio::join!(first, next.pass_shared_barrier(&barrier, round, delays[1]));
                }
            }
            round += 1;
        }
        let passes = barrier.check();
        println!("barrier {:?} has passed {passes} times", barrier.id);
        assert!(passes > 0, "barrier {:?} has never passed", barrier.id);
    }

    /// Passes a barrier of tasks of both generations, whose members do not wait for each other otherwise.
    async fn use_barrier_of_both_generations(self, barrier: Arc<SharedBarrier>) {
        let Self { client, mut rng, mut stop, .. } = self;
        let passing = async {
            for round in 0.. {
                let delay = Duration::from_millis(rng.u64(0..60));
                client.pass_shared_barrier(&barrier, round, delay).await;
            }
        };
        tokio::select! {
            () = passing => {}
            _ = stop.wait_for(|stop| *stop) => {}
        }
    }

    /// Makes recorded calls on the keys that all clients share, and gives some of them up.
    async fn use_shared_keys(self, keys: Arc<SharedKeys>) {
        let Self { client, mut rng, stop, .. } = self;
        while !*stop.borrow() {
            let (key, operation) = keys.choose(&mut rng);
            let gives_up = operation == KeyOperation::Get || rng.u8(0..20) == 0;
            let limit = if gives_up { Duration::from_millis(rng.u64(0..200)) } else { PATIENCE };
            let open = key.begin(&client.name, operation);
            match timeout(limit, client.operate(&key.name, operation)).await {
                Ok(Ok(value)) => open.complete(Ok(&value)),
                Ok(Err(failure)) => open.complete(Err(failure.code())),
                Err(_) => assert!(gives_up, "{}: {operation:?} of {:?} was lost", client.name, key.name),
            }
            random_pause(&mut rng, 20).await;
        }
    }

    /// Checks and deletes shared keys that are used no more.
    async fn check_shared_keys(self, keys: Arc<SharedKeys>) {
        let Self { client, stop, .. } = self;
        while !*stop.borrow() {
            let checking = Arc::clone(&keys);
            let checked = tokio::task::spawn_blocking(move || checking.check_retired()).await;
            for key in checked.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic())) {
                client.delete(&key).await;
            }
            sleep(Duration::from_millis(100)).await;
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
                33 => client.check_tasks(TASKS).await,
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

/// The clients of the random test.
pub struct RandomLoad {
    server: SocketAddr,
    rng: fastrand::Rng,
    clients: Vec<SingleConnectionClient>,
    sessions: Vec<RawSession>,
    keys: Arc<SharedKeys>,
    barrier: Arc<SharedBarrier>,
}

impl RandomLoad {
    /// Connects the clients, and registers the tasks.
    pub async fn connect(server: SocketAddr, mut rng: fastrand::Rng) -> Self {
        let keys = Arc::new(SharedKeys::new());
        let members = [0, 3].into_iter().chain(TASKS_OF_C..TASKS).collect();
        let barrier = Arc::new(SharedBarrier::new("both-generations".into(), members));
        let sessions = (TASKS_OF_C..TASKS).map(|task| {
            let (rng, keys, barrier) = (rng.fork(), &keys, &barrier);
            async move {
                let mut session = RawSession::connect(server, format!("task {task}"), keys, rng).await;
                session.register(task, barrier).await;
                session
            }
        });
        let (sessions, clients) =
            tokio::join!(join_all(sessions.collect::<Vec<_>>()), register_tasks(server, TASKS_OF_C));
        Self { server, rng, clients, sessions, keys, barrier }
    }

    /// Makes calls until `stop` is true, and checks the histories.
    pub async fn run(&mut self, stop: watch::Receiver<bool>) {
        let Self { server, rng, clients, keys, barrier, .. } = self;
        let server = *server;
        let results = Arc::<CounterResults>::default();
        let mut activities = JoinSet::new();
        let mut sessions = JoinSet::new();
        for session in self.sessions.drain(..) {
            sessions.spawn(session.run(stop.clone()));
        }
        for number in 0..FURTHER_CLIENTS {
            let name = format!("further client {number}");
            let session = RawSession::connect(server, name, keys, rng.fork()).await;
            // One of them speaks generation C, in the name of a task.
            let incarnations = if number == 0 { clients[0].incarnations() } else { None };
            let running = session.with_incarnations(incarnations).run(stop.clone());
            activities.spawn(async { drop(running.await) });
        }
        for (client, next) in clients.iter().zip(clients.iter().cycle().skip(1)) {
            let mut activity = || Activity {
                client: client.clone(),
                next: next.clone(),
                rng: rng.fork(),
                stop: stop.clone(),
            };
            activities.spawn(client.clone().poll_for_error(stop.clone()));
            activities.spawn(activity().hand_over_keys());
            activities.spawn(activity().use_shared_keys(Arc::clone(keys)));
            for number in 0..RANDOM_CALLERS {
                let parent = format!("caller-{}-{number}", client.task);
                activities.spawn(activity().call_at_random(parent, Arc::clone(&results)));
            }
            if client.task == 0 {
                activities.spawn(activity().open_short_connections(server));
                activities.spawn(activity().check_shared_keys(Arc::clone(keys)));
            }
            if client.task % 2 == 0 {
                let id = format!("pair/{}", client.task);
                let pair = SharedBarrier::new(id, vec![client.task, next.task]);
                activities.spawn(activity().use_barrier_of_pair(Arc::new(pair)));
            }
            if barrier.members.contains(&client.task) {
                activities.spawn(activity().use_barrier_of_both_generations(Arc::clone(barrier)));
            }
        }
        while let Some(ended) = activities.join_next().await {
            ended.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()));
        }
        while let Some(ended) = sessions.join_next().await {
            self.sessions.push(ended.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic())));
        }
        check_counters(&self.clients[0], &results).await;
    }

    /// Checks what is left after the kills: the shared keys are as their histories say, and all waiting calls still
    /// wait. Then all tasks shut down together, with one more kill while they wait for the last one.
    pub async fn finish(mut self, killer: &mut CoreKiller<'_>) {
        let reader = &self.clients[0];
        for key in self.keys.retire_all() {
            let open = key.begin(&reader.name, KeyOperation::TryGet);
            let answer = reader.operate(&key.name, KeyOperation::TryGet).await;
            open.complete(answer.as_deref().map_err(tonic::Status::code));
        }
        self.keys.check_rest();
        println!("{}", self.keys.describe_checks());
        let passes = self.barrier.check();
        println!("the barrier of both generations has passed {passes} times");
        assert!(passes > 0, "the barrier of both generations has never passed");
        for client in &self.clients {
            client.send_heartbeat().await;
            client.check_tasks(TASKS).await;
        }
        self.sessions[0].exchange_in_place_of(0..TASKS_OF_C).await;
        join_all(self.sessions.iter_mut().map(|session| session.receive_exchange(TASKS))).await;
        let (last, others) = self.clients.split_first().expect("a client");
        let ending = async {
            sleep(SETTLE).await;
            killer.kill().await;
            last.shut_down().await;
        };
        let others = join_all(others.iter().map(SingleConnectionClient::shut_down));
        let sessions = join_all(self.sessions.iter_mut().map(RawSession::shut_down));
        tokio::join!(ending, others, sessions);
    }
}

/// Checks that no increment was lost or made twice.
async fn check_counters(client: &SingleConnectionClient, results: &CounterResults) {
    for (counter, results) in results.iter().enumerate() {
        let mut results = results.lock().expect("no holder panics").clone();
        results.sort_unstable();
        let wrong = (1..).zip(&results).find(|(expected, result)| expected != *result);
        assert_eq!(
            wrong, None,
            "counter {counter}: no client got this result, but the other one in its place"
        );
        let (value, increments) = (client.read(&format!("counter/{counter}")).await, results.len());
        assert_eq!(parse_number(&value), increments as i64, "counter {counter}: value and increments");
    }
}
