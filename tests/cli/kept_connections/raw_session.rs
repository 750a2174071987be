//! A client on single frames that makes recorded calls as no library does: several requests in one write, requests cut
//! anywhere, answers read late or through small windows, and resets of streams and connections. Begin at
//! [`RawSession::run`].

use std::collections::{HashMap, HashSet};
use std::io;
use std::net::SocketAddr;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use muster::proto::tensorflow;
use prost::Message as _;
use tokio::sync::watch;
use tokio::time::{Instant, timeout, timeout_at};
use tonic::Code;

use super::linearizability::KeyOperation;
use super::raw_calls::{
    RawIncarnations, ResponseCheck, coordinated_task, encode_exchange, encode_operation,
    encode_random_call_of_task, encode_registration,
};
use super::raw_connection::{
    GENERATION_A, GENERATION_C, RawConnection, SAME_HEADERS, StreamResponse, encode_encoded_request,
    header_block, opening_with_window,
};
use super::shared_barrier::SharedBarrier;
use super::shared_keys::{OpenOperation, SharedKeys};
use super::{PATIENCE, random_pause};
use crate::harness::frames;

/// The requests that are sent together at most.
const PIPELINED_MAX: usize = 6;
/// The windows of streams. Answers are up to 200 KiB.
const WINDOWS: [u32; 3] = [3_000, 65_535, 16 << 20];
/// The received bytes after which the window of the connection is enlarged.
const CREDIT_MIN: usize = 1 << 20;
/// The error code of HTTP/2 with which a client cancels a call.
const CANCEL: u32 = 8;

/// A call that has no response yet.
enum OpenCall {
    Key(OpenOperation),
    /// The arrival at a round of the session's barrier.
    Arrival(i64),
    /// A call that is not answered before the end of the load.
    Waiting,
    /// A call whose maker takes the response.
    Direct,
    Other(ResponseCheck),
}

/// A client on one connection. A client that is no task resets its connection now and then and opens another one.
pub struct RawSession {
    server: SocketAddr,
    connection: RawConnection,
    /// The task of generation A that registers on this connection.
    task: Option<i32>,
    /// The incarnations with which the session calls generation C; without them it calls generation A.
    incarnations: RawIncarnations,
    /// The incarnation of the run, after registration.
    leader: u64,
    keys: Arc<SharedKeys>,
    barrier: Option<Arc<SharedBarrier>>,
    rng: fastrand::Rng,
    next_stream: u32,
    last_method: &'static str,
    /// The received bytes by which the window of the connection is not enlarged yet.
    uncredited: usize,
    calls: HashMap<u32, OpenCall>,
    /// The streams that this client has reset. Frames may still arrive in them.
    reset_streams: HashSet<u32>,
    /// Whether anything was received on this connection.
    has_received: bool,
    round: i64,
    /// The stream of the exchange of devices, which waits for all tasks.
    exchange: Option<u32>,
    connections: u32,
    /// The connections that were reset before anything was received.
    lost_connections: u32,
}

impl RawSession {
    pub async fn connect(
        server: SocketAddr,
        name: String,
        keys: &Arc<SharedKeys>,
        rng: fastrand::Rng,
    ) -> Self {
        let connection = RawConnection::connect(server, name).await;
        let mut session = Self {
            server,
            connection,
            task: None,
            incarnations: None,
            leader: 0,
            keys: Arc::clone(keys),
            barrier: None,
            rng,
            next_stream: 1,
            last_method: "",
            uncredited: 0,
            calls: HashMap::new(),
            reset_streams: HashSet::new(),
            has_received: false,
            round: 0,
            exchange: None,
            connections: 1,
            lost_connections: 0,
        };
        session.open().await;
        session
    }

    /// Lets the session call generation C.
    pub fn with_incarnations(mut self, incarnations: RawIncarnations) -> Self {
        self.incarnations = incarnations;
        self
    }

    /// Registers a task of generation A, which then takes part in a barrier. Begins the calls that wait until the end.
    pub async fn register(&mut self, task: i32, barrier: &Arc<SharedBarrier>) {
        self.task = Some(task);
        self.barrier = Some(Arc::clone(barrier));
        let request = encode_registration(task);
        let message = self.call("RegisterTask", &request).await;
        let answer = tensorflow::RegisterTaskResponse::decode(&*message).expect("a message");
        self.leader = answer.leader_incarnation;
        assert_ne!(self.leader, 0, "{}: the incarnation of the run", self.connection.name);
        let poll = tensorflow::PollForErrorRequest { source_task: Some(coordinated_task(task)) };
        let mut bytes = self.encode_call("PollForError", &poll.encode_to_vec(), OpenCall::Waiting);
        self.exchange = Some(self.next_stream);
        bytes.extend(self.encode_call("WaitForAllTasks", &encode_exchange(task), OpenCall::Waiting));
        self.send(&bytes).await.expect("the server reads");
    }

    /// Begins the connection, with windows of a random size.
    async fn open(&mut self) {
        let window = WINDOWS[self.rng.usize(0..WINDOWS.len())];
        // A connection may be reset before the server has read anything. The next write or read tells.
        _ = self.send(&opening_with_window(window)).await;
        // From the first frame of the server on, the connection must go on.
        let first = timeout(PATIENCE, self.connection.try_receive_frame()).await;
        let first =
            first.unwrap_or_else(|_| panic!("{}: the server sends no SETTINGS", self.connection.name));
        self.has_received = first.is_ok();
    }

    /// Resets the connection and opens another one. No call on the old one returns.
    async fn reset_connection(&mut self) {
        let connection = RawConnection::connect(self.server, self.connection.name.clone()).await;
        std::mem::replace(&mut self.connection, connection).reset();
        (self.next_stream, self.last_method, self.uncredited, self.has_received) = (1, "", 0, false);
        self.calls.clear();
        self.reset_streams.clear();
        self.connections += 1;
        self.open().await;
    }

    async fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        let sending = timeout(PATIENCE, self.connection.try_send(bytes)).await;
        sending.unwrap_or_else(|_| panic!("{}: the server reads no more", self.connection.name))
    }

    /// Makes calls until `stop` is true. Returns itself with its connection, if it is that of a task.
    pub async fn run(mut self, stop: watch::Receiver<bool>) -> Self {
        while !*stop.borrow() {
            match self.make_calls().await {
                Ok(true) => {}
                Ok(false) => self.reset_connection().await,
                // A core that is killed within microseconds of an accept takes the connection with it, before
                // anything was read.
                Err(error) => {
                    let name = &self.connection.name;
                    assert!(
                        self.task.is_none() && !self.has_received,
                        "{name}: the connection ended: {error}"
                    );
                    self.lost_connections += 1;
                    let (lost, all) = (self.lost_connections, self.connections);
                    assert!(100 * lost <= all + 300, "{name}: {lost} of {all} new connections were reset");
                    self.reset_connection().await;
                }
            }
            random_pause(&mut self.rng, 20).await;
        }
        self
    }

    /// Makes several calls, which are sent together. Returns false if the connection is to be reset now.
    async fn make_calls(&mut self) -> io::Result<bool> {
        let mut bytes = Vec::new();
        let first = self.next_stream;
        for _ in 0..self.rng.usize(1..=PIPELINED_MAX) {
            bytes.extend(self.encode_random_call());
        }
        if let Some(barrier) = self.barrier.clone()
            && !self.calls.values().any(|call| matches!(call, OpenCall::Arrival(_)))
        {
            bytes.extend(self.encode_arrival(&barrier));
        }
        // Whether the connection is reset in the middle of the calls, and when.
        let reset_at = if self.task.is_none() { self.rng.u8(0..20) } else { u8::MAX };
        if !self.send_in_pieces(&bytes, reset_at == 0).await? || reset_at == 1 {
            return Ok(false);
        }
        if self.rng.u8(0..4) == 0 {
            random_pause(&mut self.rng, 30).await;
            let choice: Vec<u32> = self.calls_since(first, |_| true).collect();
            if let Some(stream) = self.rng.choice(choice) {
                self.reset_stream(stream).await?;
            }
        }
        if self.rng.u8(0..4) == 0 {
            // The answers fill the buffers meanwhile.
            random_pause(&mut self.rng, 400).await;
        }
        if reset_at == 2 {
            return Ok(false);
        }
        self.receive_answers(first).await?;
        Ok(reset_at != 3)
    }

    /// Returns the open calls since a stream which are of a kind, without the arrival at the barrier.
    fn calls_since(&self, first: u32, is_kind: fn(&OpenCall) -> bool) -> impl Iterator<Item = u32> {
        let calls = self.calls.iter().filter(move |(stream, call)| {
            **stream >= first && !matches!(call, OpenCall::Arrival(_)) && is_kind(call)
        });
        calls.map(|(stream, _)| *stream)
    }

    /// Sends calls: at once, in two parts, or in many. Sends only a part if `is_cut`, and returns false then.
    async fn send_in_pieces(&mut self, bytes: &[u8], is_cut: bool) -> io::Result<bool> {
        let cut = self.rng.usize(0..bytes.len());
        match self.rng.u8(0..10) {
            _ if is_cut => {
                self.send(&bytes[..cut]).await?;
                random_pause(&mut self.rng, 100).await;
                return Ok(false);
            }
            0..5 => self.send(bytes).await?,
            5..8 => {
                self.send(&bytes[..cut]).await?;
                random_pause(&mut self.rng, 300).await;
                self.send(&bytes[cut..]).await?;
            }
            8 => {
                let length = bytes.len().div_ceil(20);
                for piece in bytes.chunks(length) {
                    self.send(piece).await?;
                    random_pause(&mut self.rng, 10).await;
                }
            }
            // Behind the calls there is one whose message does not end, and is given up.
            _ => {
                let (key, _) = self.keys.choose(&mut self.rng);
                let operation = KeyOperation::Insert { number: 0, overwrites: true };
                let (method, message) = encode_operation(self.incarnations, &key.name, operation);
                let stream = self.next_stream;
                let whole = self.encode_call(method, &message, OpenCall::Waiting);
                let headers = 9 + usize::from(u16::from_be_bytes([whole[1], whole[2]]));
                let mut bytes = [bytes, &whole[..headers]].concat();
                frames::frame(&mut bytes, frames::DATA, 0, stream, &[0, 0, 0, 1, 0, 1, 2, 3]);
                self.send(&bytes).await?;
                random_pause(&mut self.rng, 100).await;
                self.reset_stream(stream).await?;
            }
        }
        Ok(true)
    }

    /// Receives the answers to the calls since a stream. Calls that wait for a key are cancelled after a while.
    async fn receive_answers(&mut self, first: u32) -> io::Result<()> {
        let is_get = |call: &OpenCall| {
            matches!(call, OpenCall::Key(OpenOperation { operation: KeyOperation::Get, .. }))
        };
        let deadline = Instant::now() + Duration::from_millis(self.rng.u64(0..300));
        while self.calls_since(first, |_| true).next().is_some() {
            let waits_only =
                self.calls_since(first, |_| true).count() == self.calls_since(first, is_get).count();
            if !self.receive(waits_only.then_some(deadline)).await? {
                let waiting: Vec<u32> = self.calls_since(first, is_get).collect();
                for stream in waiting {
                    self.reset_stream(stream).await?;
                }
            }
        }
        Ok(())
    }

    async fn reset_stream(&mut self, stream: u32) -> io::Result<()> {
        let mut bytes = Vec::new();
        frames::number(&mut bytes, frames::RST_STREAM, stream, CANCEL);
        self.calls.remove(&stream);
        self.reset_streams.insert(stream);
        self.send(&bytes).await
    }

    /// Receives a frame, and completes the call whose answer it ends. Returns false if the deadline passed before.
    async fn receive(&mut self, deadline: Option<Instant>) -> io::Result<bool> {
        let limit = deadline.unwrap_or_else(|| Instant::now() + PATIENCE);
        let Ok(received) = timeout_at(limit, self.connection.try_receive_frame()).await else {
            let open: Vec<_> = self.calls.keys().collect();
            let name = &self.connection.name;
            assert!(
                deadline.is_some(),
                "{name}: no answer within {PATIENCE:?} on one of the streams {open:?}"
            );
            return Ok(false);
        };
        let (stream, kind, length) = received?;
        self.has_received = true;
        if kind == frames::DATA {
            self.uncredited += length;
            let mut bytes = Vec::new();
            if self.uncredited >= CREDIT_MIN {
                frames::number(
                    &mut bytes,
                    frames::WINDOW_UPDATE,
                    0,
                    std::mem::take(&mut self.uncredited) as u32,
                );
            }
            if self.calls.contains_key(&stream) && length > 0 {
                frames::number(&mut bytes, frames::WINDOW_UPDATE, stream, length as u32);
            }
            self.send(&bytes).await?;
        }
        if self.reset_streams.contains(&stream) {
            self.connection.take_response(stream);
        } else if let frames::DATA | frames::HEADERS = kind {
            let name = &self.connection.name;
            let Some(call) = self.calls.get(&stream) else {
                panic!("{name}: a frame on stream {stream}, where no call is open")
            };
            if !matches!(call, OpenCall::Direct)
                && let Some(response) = self.connection.take_response(stream)
            {
                self.complete(stream, &response);
            }
        }
        Ok(true)
    }

    fn complete(&mut self, stream: u32, response: &StreamResponse) {
        let name = &self.connection.name;
        let code = response.status().map(Code::from_i32);
        let code = code.unwrap_or_else(|| panic!("{name}: no status on stream {stream}: {response:?}"));
        match self.calls.remove(&stream) {
            Some(OpenCall::Key(operation)) => {
                // The answers of all methods with a value have it in the same field.
                let answer = tensorflow::GetKeyValueResponse::decode(response.message()).expect("a message");
                let value = answer.kv.unwrap_or_default().value;
                operation.complete(if code == Code::Ok { Ok(&value) } else { Err(code) });
            }
            Some(OpenCall::Arrival(round)) => {
                assert_eq!(code, Code::Ok, "{name}: round {round} of the barrier: {response:?}");
                let answer = tensorflow::BarrierResponse::decode(response.message()).expect("a message");
                let (task, barrier) = (self.task.expect("a task"), self.barrier.as_ref().expect("a barrier"));
                barrier.record_pass(task, round, answer.counter);
                self.round = round + 1;
            }
            Some(OpenCall::Other(check)) => check(response),
            Some(OpenCall::Waiting | OpenCall::Direct) | None => {
                panic!("{name}: an answer on stream {stream}: {response:?}")
            }
        }
    }

    /// Encodes a call on the next stream.
    fn encode_call(&mut self, method: &'static str, message: &[u8], call: OpenCall) -> Vec<u8> {
        let stream = self.next_stream;
        self.next_stream += 2;
        let service = if self.incarnations.is_some() { GENERATION_C } else { GENERATION_A };
        let headers =
            if self.last_method == method { SAME_HEADERS.to_vec() } else { header_block(service, method) };
        self.last_method = method;
        self.calls.insert(stream, call);
        encode_encoded_request(stream, &headers, message)
    }

    fn encode_arrival(&mut self, barrier: &SharedBarrier) -> Vec<u8> {
        let task = self.task.expect("only tasks have barriers");
        let request = tensorflow::BarrierRequest {
            barrier_id: barrier.id.clone(),
            barrier_timeout_in_ms: 600_000,
            tasks: barrier.members.iter().copied().map(coordinated_task).collect(),
            source_task: Some(coordinated_task(task)),
            counter: self.round,
        };
        barrier.record_arrival(task, self.round);
        self.encode_call("Barrier", &request.encode_to_vec(), OpenCall::Arrival(self.round))
    }

    fn encode_random_call(&mut self) -> Vec<u8> {
        if let Some(task) = self.task
            && self.rng.u8(0..6) == 0
        {
            let (method, message, check) = encode_random_call_of_task(task, self.leader, &mut self.rng);
            return self.encode_call(method, &message, OpenCall::Other(check));
        }
        let (key, operation) = self.keys.choose(&mut self.rng);
        let (method, message) = encode_operation(self.incarnations, &key.name, operation);
        let open = key.begin(&self.connection.name, operation);
        self.encode_call(method, &message, OpenCall::Key(open))
    }

    /// Makes a call outside the load, and returns the message of the successful answer.
    async fn call(&mut self, method: &'static str, message: &[u8]) -> Vec<u8> {
        let stream = self.next_stream;
        let bytes = self.encode_call(method, message, OpenCall::Direct);
        self.send(&bytes).await.expect("the server reads");
        self.receive_message(stream).await
    }

    /// Receives the message of a successful answer.
    async fn receive_message(&mut self, stream: u32) -> Vec<u8> {
        let response = loop {
            if let Some(response) = self.connection.take_response(stream) {
                break response;
            }
            self.receive(None).await.expect("the server answers");
        };
        self.calls.remove(&stream);
        assert_eq!(response.status(), Some(0), "{}, stream {stream}: {response:?}", self.connection.name);
        response.message().to_vec()
    }

    /// Makes the exchange of devices in place of tasks which cannot do so themselves. So it completes if the other
    /// tasks still wait for it.
    pub async fn exchange_in_place_of(&mut self, tasks: Range<i32>) {
        let (first, mut bytes) = (self.next_stream, Vec::new());
        for task in tasks {
            bytes.extend(self.encode_call("WaitForAllTasks", &encode_exchange(task), OpenCall::Direct));
        }
        let end = self.next_stream;
        if let Some(own) = self.exchange {
            self.calls.insert(own, OpenCall::Direct);
        }
        self.send(&bytes).await.expect("the server reads");
        for stream in (first..end).step_by(2) {
            self.receive_message(stream).await;
        }
    }

    /// Checks that the exchange of devices is complete, and has those of the tasks `0..tasks` in their order.
    pub async fn receive_exchange(&mut self, tasks: i32) {
        let stream = self.exchange.take().expect("it was begun");
        self.calls.insert(stream, OpenCall::Direct);
        let message = self.receive_message(stream).await;
        let answer = tensorflow::WaitForAllTasksResponse::decode(&*message).expect("a message");
        let devices = answer.device_info.unwrap_or_default().device;
        let found: Vec<_> = devices.iter().map(|device| device.value.clone()).collect();
        let expected: Vec<_> = (0..tasks).map(|task| task.to_be_bytes().to_vec()).collect();
        assert_eq!(found, expected, "{}: the devices of all tasks", self.connection.name);
        assert_eq!(answer.leader_incarnation, self.leader, "{}", self.connection.name);
    }

    /// Ends the calls that wait until the end of the load, and shuts the task down.
    pub async fn shut_down(&mut self) {
        let open: Vec<u32> = self.calls.keys().copied().collect();
        for stream in open {
            self.reset_stream(stream).await.expect("the server reads");
        }
        let source_task = self.task.map(coordinated_task);
        let request = tensorflow::ShutdownTaskRequest { source_task }.encode_to_vec();
        self.call("ShutdownTask", &request).await;
    }
}
