//! Tests the gRPC port over real sockets, with the client of the crate `h2` and with raw frames.
//!
//! This file has the server and the client for the tests. The tests are in the other files of this folder, by
//! subject. Begin at [`TestServer`].

mod bodies;
mod calls;
mod hostile_peers;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use h2::client::{ResponseFuture, SendRequest};
use h2::{Reason, SendStream};
use http::{HeaderMap, Request};
use prost::Message as _;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

use super::dialect::{GENERATION_A_SERVICE, GENERATION_C_SERVICE};
use super::frame::encode_framed_message;
use super::gzip::compress;
use super::{GrpcLimits, GrpcServer, ListenerJobRule, bind_listener};
use crate::clock::Clock;
use crate::coordination::{JobName, JobSettings};
use crate::engine::Engine;
use crate::http2::PREFACE;
use crate::proto::CoordinatedTask;
use crate::proto::tensorflow as a;
use crate::proto::xla::coordination as c;

const PATIENCE: Duration = Duration::from_secs(10);

/// A server with one job of two tasks.
struct TestServer {
    engine: Arc<Engine>,
    server: Arc<GrpcServer>,
    address: std::net::SocketAddr,
    stop: watch::Sender<bool>,
    serving: JoinHandle<()>,
}

impl TestServer {
    fn start(limits: GrpcLimits) -> Self {
        let engine = Engine::new(Clock::start());
        engine.declare_job(JobName::default(), JobSettings::new(2)).expect("the first job");
        tokio::spawn(Arc::clone(&engine).run_timers());
        let server = GrpcServer::new(Arc::clone(&engine), limits);
        let listener = bind_listener("127.0.0.1:0".parse().expect("an address")).expect("a free port");
        let address = listener.local_addr().expect("it is bound");
        let listener = tokio::net::TcpListener::from_std(listener).expect("a runtime runs");
        let (stop, stopped) = watch::channel(false);
        let serving = tokio::spawn(Arc::clone(&server).serve(
            listener,
            ListenerJobRule::ByAuthority(None),
            stopped,
            None,
        ));
        Self { engine, server, address, stop, serving }
    }

    async fn connect_client(&self) -> Client {
        let socket = TcpStream::connect(self.address).await.expect("it listens");
        let (send, connection) = h2::client::Builder::new()
            .initial_window_size(1 << 20)
            .initial_connection_window_size(1 << 20)
            .handshake(socket)
            .await
            .expect("it speaks HTTP/2");
        Client { send, task: tokio::spawn(async move { drop(connection.await) }) }
    }

    async fn wait_for_waiting_calls(&self, expected: usize) {
        wait_until(&format!("{expected} calls wait"), || self.engine.waiting_call_count() == expected).await;
    }
}

struct Client {
    send: SendRequest<Bytes>,
    task: JoinHandle<()>,
}

/// A response.
#[derive(Debug)]
struct Response {
    status: String,
    headers: HeaderMap,
    body: Vec<u8>,
}

impl Response {
    fn decode_message<M: prost::Message + Default>(&self) -> M {
        assert_eq!(self.status, "0", "{:?}", self.headers);
        M::decode(&self.body[5..]).expect("a message")
    }
}

impl Client {
    fn open_request(&mut self, path: &str, headers: &[(&str, &str)]) -> (ResponseFuture, SendStream<Bytes>) {
        let request = Request::post(format!("http://muster.test:1/{path}"))
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .header("grpc-encoding", "gzip");
        let mut request = request.body(()).expect("a request");
        for (name, value) in headers {
            let name = http::HeaderName::from_bytes(name.as_bytes()).expect("a name");
            request.headers_mut().insert(name, value.parse().expect("a value"));
        }
        self.send.send_request(request, false).expect("the connection is there")
    }

    /// Sends a request with its whole message.
    fn start_call(
        &mut self,
        path: &str,
        message: &impl prost::Message,
    ) -> (ResponseFuture, SendStream<Bytes>) {
        let (response, mut stream) = self.open_request(path, &[]);
        stream.send_data(encode_framed_message(message), true).expect("the stream is there");
        (response, stream)
    }

    async fn call(&mut self, path: &str, message: &impl prost::Message) -> Response {
        receive_response(self.start_call(path, message).0).await
    }

    async fn call_generation_a(&mut self, method: &str, message: &impl prost::Message) -> Response {
        self.call(&format!("{}/{method}", GENERATION_A_SERVICE), message).await
    }

    async fn call_generation_c(&mut self, method: &str, message: &impl prost::Message) -> Response {
        self.call(&format!("{}/{method}", GENERATION_C_SERVICE), message).await
    }

    async fn send_insert_in_pieces(&mut self, pieces: &[&[u8]]) -> Response {
        let (response, mut stream) = self.open_request(INSERT, &[]);
        for piece in pieces {
            stream.send_data(Bytes::copy_from_slice(piece), false).expect("the stream is there");
            sleep(Duration::from_millis(1)).await;
        }
        // The server may have refused the stream already.
        let _ = stream.send_data(Bytes::new(), true);
        receive_response(response).await
    }
}

const INSERT: &str = "tensorflow.CoordinationService/InsertKeyValue";

const GET: &str = "tensorflow.CoordinationService/GetKeyValue";

async fn receive_response(response: ResponseFuture) -> Response {
    let answer = async {
        let (head, mut stream) = response.await.expect("an answer").into_parts();
        let mut body = Vec::new();
        while let Some(piece) = stream.data().await {
            let piece = piece.expect("the body");
            stream.flow_control().release_capacity(piece.len()).expect("the stream is there");
            body.extend_from_slice(&piece);
        }
        let headers = stream.trailers().await.expect("the trailers").unwrap_or(head.headers);
        let status =
            headers.get("grpc-status").map_or("none", |status| status.to_str().expect("text")).into();
        Response { status, headers, body }
    };
    timeout(PATIENCE, answer).await.expect("an answer in time")
}

fn insert_request(key: &str, value: impl Into<Bytes>) -> a::InsertKeyValueRequest {
    let kv = a::KeyValueEntry { key: key.into(), value: value.into() };
    a::InsertKeyValueRequest { kv: Some(kv), allow_overwrite: true }
}

fn get_request(key: &str) -> a::GetKeyValueRequest {
    a::GetKeyValueRequest { key: key.into() }
}

/// Registers task 0 in generation A and task 1 in generation C; returns the run's incarnation.
async fn register_two_tasks(one: &mut Client, other: &mut Client) -> u64 {
    let source_task = Some(CoordinatedTask { named: true, ..CoordinatedTask::default() });
    let asked = a::RegisterTaskRequest { incarnation: 7, source_task };
    let asked_too = c::RegisterTaskRequest { incarnation: 8, source_task_id: 1 };
    let (here, there) = tokio::join!(
        one.call_generation_a("RegisterTask", &asked),
        other.call_generation_c("RegisterTask", &asked_too)
    );
    let here = here.decode_message::<a::RegisterTaskResponse>().leader_incarnation;
    assert_eq!(here, there.decode_message::<c::RegisterTaskResponse>().service_incarnation);
    here
}

/// Waits until a condition holds.
async fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let holds = async {
        while !condition() {
            sleep(Duration::from_millis(2)).await;
        }
    };
    timeout(PATIENCE, holds).await.unwrap_or_else(|_| panic!("not in time: {what}"));
}

/// Encodes a frame.
fn encode_frame(kind: u8, flags: u8, stream: u32, contents: &[u8]) -> Vec<u8> {
    let length = (contents.len() as u32).to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), contents].concat()
}

/// Encodes a request without an HTTP/2 library: its header as literals, its message in one frame.
fn encode_raw_request(path: &str, message: &impl prost::Message) -> Vec<u8> {
    let mut block = Vec::new();
    let headers =
        [(":method", "POST"), (":scheme", "http"), (":path", path), ("content-type", "application/grpc")];
    for text in headers.iter().flat_map(|(name, value)| [name, value]) {
        if text.starts_with(':') || *text == "content-type" {
            block.push(0);
        }
        block.push(text.len() as u8);
        block.extend(text.as_bytes());
    }
    [encode_frame(1, 4, 1, &block), encode_frame(0, 1, 1, &encode_framed_message(message))].concat()
}

/// An empty SETTINGS frame.
const SETTINGS: [u8; 9] = [0, 0, 0, 4, 0, 0, 0, 0, 0];

/// Opens a raw HTTP/2 connection and sends the preface and these bytes.
async fn open_raw_connection(rig: &TestServer, bytes: &[u8]) -> TcpStream {
    let mut socket = TcpStream::connect(rig.address).await.expect("it listens");
    socket.set_nodelay(true).expect("a TCP socket");
    socket.write_all(PREFACE).await.expect("it is open");
    socket.write_all(bytes).await.expect("it is open");
    socket
}
