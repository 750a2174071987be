//! Tests the port over real sockets with a bare HTTP/2 client.

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

use super::frame::encode_framed;
use super::gzip::compress;
use super::{GrpcLimits, Routing, Server, bind, generation_a, generation_c};
use crate::clock::Clock;
use crate::coordination::{JobName, JobSettings};
use crate::engine::Engine;
use crate::proto::CoordinatedTask;
use crate::proto::tensorflow as a;
use crate::proto::xla::coordination as c;

const PATIENCE: Duration = Duration::from_secs(10);

/// A server with one job of two tasks.
struct TestServer {
    engine: Arc<Engine>,
    server: Arc<Server>,
    address: std::net::SocketAddr,
    stop: watch::Sender<bool>,
    serving: JoinHandle<()>,
}

impl TestServer {
    fn start(limits: GrpcLimits) -> Self {
        let engine = Engine::new(Clock::start());
        engine.declare(JobName::default(), JobSettings::new(2)).expect("the first job");
        tokio::spawn(Arc::clone(&engine).run_timers());
        let server = Server::new(Arc::clone(&engine), limits);
        let listener = bind("127.0.0.1:0".parse().expect("an address")).expect("a free port");
        let address = listener.local_addr().expect("it is bound");
        let (stop, stopped) = watch::channel(false);
        let serving = tokio::spawn(Arc::clone(&server).serve(listener, Routing::ByAuthority(None), stopped));
        Self { engine, server, address, stop, serving }
    }

    async fn client(&self) -> Client {
        let socket = TcpStream::connect(self.address).await.expect("it listens");
        let (send, connection) = h2::client::Builder::new()
            .initial_window_size(1 << 20)
            .initial_connection_window_size(1 << 20)
            .handshake(socket)
            .await
            .expect("it speaks HTTP/2");
        Client { send, task: tokio::spawn(async move { drop(connection.await) }) }
    }

    async fn waiting(&self, expected: usize) {
        let all = async {
            while self.engine.waiting_calls() != expected {
                sleep(Duration::from_millis(2)).await;
            }
        };
        let now = || format!("{} calls wait, not {expected}", self.engine.waiting_calls());
        timeout(PATIENCE, all).await.unwrap_or_else(|_| panic!("{}", now()));
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
    fn message<M: prost::Message + Default>(&self) -> M {
        assert_eq!(self.status, "0", "{:?}", self.headers);
        M::decode(&self.body[5..]).expect("a message")
    }
}

impl Client {
    fn open(&mut self, path: &str, headers: &[(&str, &str)]) -> (ResponseFuture, SendStream<Bytes>) {
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

    async fn call(&mut self, path: &str, message: &impl prost::Message) -> Response {
        let (response, mut stream) = self.open(path, &[]);
        stream.send_data(encode_framed(message), true).expect("the stream is there");
        back(response).await
    }

    async fn a(&mut self, method: &str, message: &impl prost::Message) -> Response {
        self.call(&format!("{}/{method}", generation_a::SERVICE), message).await
    }

    async fn c(&mut self, method: &str, message: &impl prost::Message) -> Response {
        self.call(&format!("{}/{method}", generation_c::SERVICE), message).await
    }

    async fn bytes(&mut self, pieces: &[&[u8]]) -> Response {
        let (response, mut stream) = self.open(INSERT, &[]);
        for piece in pieces {
            stream.send_data(Bytes::copy_from_slice(piece), false).expect("the stream is there");
            sleep(Duration::from_millis(1)).await;
        }
        // The server may have refused the stream already.
        let _ = stream.send_data(Bytes::new(), true);
        back(response).await
    }
}

const INSERT: &str = "tensorflow.CoordinationService/InsertKeyValue";
const GET: &str = "tensorflow.CoordinationService/GetKeyValue";

async fn back(response: ResponseFuture) -> Response {
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

fn insert(key: &str, value: impl Into<Bytes>) -> a::InsertKeyValueRequest {
    let kv = a::KeyValueEntry { key: key.into(), value: value.into() };
    a::InsertKeyValueRequest { kv: Some(kv), allow_overwrite: true }
}

fn get(key: &str) -> a::GetKeyValueRequest {
    a::GetKeyValueRequest { key: key.into() }
}

/// Registers task 0 in generation A and task 1 in generation C; returns the run's incarnation.
async fn register(one: &mut Client, other: &mut Client) -> u64 {
    let source_task = Some(CoordinatedTask { named: true, ..CoordinatedTask::default() });
    let asked = a::RegisterTaskRequest { incarnation: 7, source_task };
    let asked_too = c::RegisterTaskRequest { incarnation: 8, source_task_id: 1 };
    let (here, there) = tokio::join!(one.a("RegisterTask", &asked), other.c("RegisterTask", &asked_too));
    let here = here.message::<a::RegisterTaskResponse>().leader_incarnation;
    assert_eq!(here, there.message::<c::RegisterTaskResponse>().service_incarnation);
    here
}

#[tokio::test]
async fn both_generations_meet_on_one_port() {
    let rig = TestServer::start(GrpcLimits::default());
    let (mut one, mut other) = (rig.client().await, rig.client().await);
    let service_incarnation = register(&mut one, &mut other).await;

    let claim = c::Incarnations { service_incarnation, task_incarnation: 8, task_id: 0 };
    let beat = c::HeartbeatRequest { incarnations: Some(claim), incarnation: 8, source_task_id: 1 };
    let back = other.c("Heartbeat", &beat).await.message::<c::HeartbeatResponse>();
    assert_eq!(back.service_incarnation, service_incarnation);
    let unclaimed = other.c("Heartbeat", &c::HeartbeatRequest { incarnations: None, ..beat }).await;
    assert_eq!(unclaimed.status, "13");
    assert!(unclaimed.headers.contains_key("grpc-status-details-bin"));

    assert_eq!(one.a("InsertKeyValue", &insert("a/b", "v")).await.status, "0");
    let asked = c::GetKeyValueRequest { incarnations: Some(claim), key: "//a/b/".into() };
    let kv = other.c("GetKeyValue", &asked).await.message::<c::GetKeyValueResponse>().kv.expect("an entry");
    assert_eq!((&*kv.key, &*kv.value), ("//a/b/", &b"v"[..]));
    assert_eq!(one.a("NoSuchMethod", &get("")).await.status, "12");
    assert_eq!(one.a("ReportErrorToTask", &a::ReportErrorToTaskRequest::default()).await.status, "12");
    assert_eq!(one.call("some.Service/Method", &get("")).await.status, "12");
}

#[tokio::test]
async fn bodies_arrive_in_any_pieces() {
    let rig = TestServer::start(GrpcLimits::default());
    let mut client = rig.client().await;
    let message = encode_framed(&insert("k", "value"));
    let bytes: Vec<&[u8]> = message.chunks(1).collect();
    assert_eq!(client.bytes(&bytes).await.status, "0");
    assert_eq!(client.bytes(&[&message]).await.status, "0");
    assert_eq!(client.bytes(&[&message[..5], &message[5..]]).await.status, "0");

    for broken in [&[][..], &[&message[..3]], &[&message[..9]], &[&message[..], b"x"], &[&message, &message]]
    {
        let back = client.bytes(broken).await;
        assert_eq!(back.status, "13", "{broken:?}");
        assert!(back.headers.contains_key("grpc-message"));
    }
    let wrong_flag = client.bytes(&[&[2, 0, 0, 0, 0]]).await;
    assert_eq!(wrong_flag.status, "13");
    let unreadable = client.bytes(&[&[0, 0, 0, 0, 2, 0xff, 0xff]]).await;
    assert_eq!(unreadable.status, "3");
    assert_eq!(client.a("GetKeyValue", &get("k")).await.status, "0");
    assert_eq!(rig.server.counters().bodies_in_flight_bytes, 0);
}

#[tokio::test]
async fn large_values_go_in_and_come_out() {
    let rig = TestServer::start(GrpcLimits { bodies_in_flight_bytes: 7 << 20, ..GrpcLimits::default() });
    let value: Vec<u8> = (0..5_000_000_u32).map(|n| (n / 7) as u8).collect();
    let mut clients = Vec::new();
    for n in 0..3 {
        let (mut client, value) = (rig.client().await, value.clone());
        clients.push(tokio::spawn(async move {
            let key = format!("large/{n}");
            assert_eq!(client.a("InsertKeyValue", &insert(&key, value.clone())).await.status, "0");
            let back = client.a("GetKeyValue", &get(&key)).await;
            assert!(back.message::<a::GetKeyValueResponse>().kv.expect("an entry").value == value);
        }));
    }
    for client in clients {
        client.await.expect("no panic");
    }
    let mut client = rig.client().await;
    let asked = a::GetKeyValueDirRequest { directory_key: "large".into() };
    let all = client.a("GetKeyValueDir", &asked).await.message::<a::GetKeyValueDirResponse>();
    assert_eq!(all.kv.iter().map(|kv| kv.value.len()).sum::<usize>(), 3 * value.len());
    assert_eq!(rig.server.counters().bodies_in_flight_bytes, 0);
}

#[tokio::test]
async fn compressed_messages_are_inflated_within_bounds() {
    let rig = TestServer::start(GrpcLimits { message_bytes: 3 << 20, ..GrpcLimits::default() });
    let mut client = rig.client().await;
    let flagged = |message: &[u8]| {
        let length = u32::try_from(message.len()).expect("short").to_be_bytes();
        [&[1][..], &length, message].concat()
    };
    for size in [0, 100, 2 << 20] {
        let file = flagged(&compress(&insert("k", vec![7; size]).encode_to_vec()));
        assert_eq!(client.bytes(&[&file]).await.status, "0", "{size}");
        let back = client.a("GetKeyValue", &get("k")).await.message::<a::GetKeyValueResponse>();
        assert_eq!(back.kv.expect("an entry").value.len(), size);
    }
    let bomb = flagged(&compress(&vec![0; 4 << 20]));
    assert_eq!(client.bytes(&[&bomb]).await.status, "8");
    assert_eq!(client.bytes(&[&flagged(b"no gzip")]).await.status, "13");
    for (encoding, status) in [("snappy", "12"), ("identity", "13")] {
        let (response, mut stream) = client.open(INSERT, &[("grpc-encoding", encoding)]);
        let file = flagged(&compress(&insert("k", "v").encode_to_vec()));
        stream.send_data(file.into(), true).expect("the stream is there");
        assert_eq!(back(response).await.status, status, "{encoding}");
    }
}

#[tokio::test]
async fn what_is_too_large_is_refused_by_its_prefix() {
    let rig = TestServer::start(GrpcLimits::default());
    let mut client = rig.client().await;
    let (response, mut stream) = client.open(INSERT, &[]);
    let length = (1_u32 << 30).to_be_bytes();
    stream.send_data([&[0][..], &length, &[0; 100]].concat().into(), false).expect("the stream is there");
    let back = back(response).await;
    assert_eq!(back.status, "8");
    assert_eq!(rig.server.counters().bodies_in_flight_bytes, 0);
}

#[tokio::test]
async fn a_body_that_stalls_is_dropped() {
    let rig =
        TestServer::start(GrpcLimits { body_stall: Duration::from_millis(50), ..GrpcLimits::default() });
    let mut client = rig.client().await;
    let (response, mut stream) = client.open(INSERT, &[]);
    stream.send_data(Bytes::from_static(&[0, 0, 1, 0, 0, 1]), false).expect("the stream is there");
    assert_eq!(back(response).await.status, "4");
    assert_eq!(rig.server.counters().bodies_in_flight_bytes, 0);
}

#[tokio::test]
async fn callers_that_stop_waiting_are_forgotten() {
    let rig = TestServer::start(GrpcLimits::default());
    let mut client = rig.client().await;

    let (response, mut stream) = client.open(GET, &[("grpc-timeout", "30m")]);
    stream.send_data(encode_framed(&get("never")), true).expect("the stream is there");
    let late = back(response).await;
    assert_eq!(late.status, "4");
    assert!(!late.headers.contains_key("grpc-status-details-bin"));
    rig.waiting(0).await;

    let (_response, mut stream) = client.open(GET, &[]);
    stream.send_data(encode_framed(&get("never")), true).expect("the stream is there");
    rig.waiting(1).await;
    stream.send_reset(Reason::CANCEL);
    rig.waiting(0).await;

    let (_response, mut stream) = client.open(GET, &[("grpc-timeout", "1H")]);
    stream.send_data(encode_framed(&get("never")), true).expect("the stream is there");
    rig.waiting(1).await;
    client.task.abort();
    rig.waiting(0).await;
}

#[tokio::test]
async fn a_waiting_call_is_answered_by_another_connection() {
    let rig = TestServer::start(GrpcLimits::default());
    let (mut one, mut other) = (rig.client().await, rig.client().await);
    let asked: Vec<_> = (0..50)
        .map(|_| {
            let (response, mut stream) = one.open(GET, &[]);
            stream.send_data(encode_framed(&get("k")), true).expect("the stream is there");
            response
        })
        .collect();
    rig.waiting(50).await;
    assert_eq!(other.a("InsertKeyValue", &insert("k", "v")).await.status, "0");
    for response in asked {
        let back = back(response).await.message::<a::GetKeyValueResponse>();
        assert_eq!(back.kv.expect("an entry").value, "v");
    }
}

#[tokio::test]
async fn replies_to_a_peer_that_does_not_read_are_bounded() {
    let limits = GrpcLimits { unsent_bytes_per_connection: 2 << 20, ..GrpcLimits::default() };
    let rig = TestServer::start(limits);
    let (mut slow, mut other) = (rig.client().await, rig.client().await);
    assert_eq!(other.a("InsertKeyValue", &insert("k", vec![0; 1 << 20])).await.status, "0");
    let calls = rig.server.counters().calls;
    let mut asked = Vec::new();
    for _ in 0..40 {
        let (response, mut stream) = slow.open(GET, &[]);
        stream.send_data(encode_framed(&get("k")), true).expect("the stream is there");
        asked.push(response);
    }
    sleep(Duration::from_millis(200)).await;
    let taken = rig.server.counters().calls - calls;
    assert!((1..=6).contains(&taken), "{taken} of 40 calls were taken");
    assert_eq!(other.a("GetKeyValue", &get("k")).await.status, "0");
    // All at once: a single stream may have nothing to read before others are read.
    let answers: Vec<_> = asked.into_iter().map(|response| tokio::spawn(back(response))).collect();
    for answer in answers {
        assert_eq!(answer.await.expect("no panic").status, "0");
    }
}

#[tokio::test]
async fn a_connection_without_http2_preface_is_closed() {
    let rig =
        TestServer::start(GrpcLimits { handshake: Duration::from_millis(100), ..GrpcLimits::default() });
    let mut client = rig.client().await;
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    let long_frame = [&preface[..], &[0xff, 0xff, 0xff, 0, 0, 0, 0, 0, 1]].concat();
    let no_frame = [&preface[..], &[0xaa; 1000]].concat();
    for bytes in
        [&b""[..], b"GET / HTTP/1.1\r\n\r\n", b"PRI * HT", &[0x16, 3, 1, 0, 5], &long_frame, &no_frame]
    {
        let mut socket = TcpStream::connect(rig.address).await.expect("it listens");
        socket.write_all(bytes).await.expect("it is open");
        let closed = timeout(PATIENCE, socket.read_to_end(&mut Vec::new())).await;
        assert!(closed.is_ok(), "{bytes:?} is still connected");
    }
    assert_eq!(client.a("InsertKeyValue", &insert("k", "v")).await.status, "0");
    assert_eq!(rig.server.counters().not_http2, 4);
}

#[tokio::test]
async fn connections_have_a_bound() {
    let rig = TestServer::start(GrpcLimits { connections: 1, ..GrpcLimits::default() });
    let mut client = rig.client().await;
    assert_eq!(client.a("InsertKeyValue", &insert("k", "v")).await.status, "0");
    let mut socket = TcpStream::connect(rig.address).await.expect("it listens");
    let closed = timeout(PATIENCE, socket.read_to_end(&mut Vec::new())).await.expect("closed at once");
    assert!(closed.is_err() || closed.is_ok_and(|read| read == 0));
    assert_eq!(client.a("InsertKeyValue", &insert("k", "v")).await.status, "0");
    assert_eq!(rig.server.counters().connections_refused, 1);
}

#[tokio::test]
async fn health_and_reflection() {
    let rig = TestServer::start(GrpcLimits::default());
    let endpoint = tonic::transport::Endpoint::new(format!("http://{}", rig.address)).expect("an endpoint");
    let channel = endpoint.connect().await.expect("it listens");
    let mut health = tonic_health::pb::health_client::HealthClient::new(channel.clone());
    for service in ["", generation_a::SERVICE, generation_c::SERVICE] {
        let asked = tonic_health::pb::HealthCheckRequest { service: service.into() };
        assert_eq!(health.check(asked).await.expect("known").into_inner().status, 1, "{service}");
    }
    let asked = tonic_health::pb::HealthCheckRequest { service: "none".into() };
    assert_eq!(health.check(asked).await.expect_err("unknown").code(), tonic::Code::NotFound);

    use tonic_reflection::pb::v1::{self, server_reflection_client::ServerReflectionClient};
    use v1::server_reflection_request::MessageRequest;
    let asked = v1::ServerReflectionRequest {
        host: String::new(),
        message_request: Some(MessageRequest::ListServices(String::new())),
    };
    let (feed, requests) = tokio::sync::mpsc::channel(1);
    feed.send(asked).await.expect("room");
    let requests = tokio_stream_of(requests);
    let mut answers = ServerReflectionClient::new(channel)
        .server_reflection_info(requests)
        .await
        .expect("known")
        .into_inner();
    let answer = format!("{:?}", answers.message().await.expect("an answer"));
    for service in ["grpc.health.v1.Health", generation_a::SERVICE, generation_c::SERVICE] {
        assert!(answer.contains(service), "{answer}");
    }
}

/// A channel as a stream.
fn tokio_stream_of<T: Send + 'static>(
    mut channel: tokio::sync::mpsc::Receiver<T>,
) -> impl tonic::codegen::tokio_stream::Stream<Item = T> + Send + 'static {
    struct Stream<F>(F);
    impl<T, F: FnMut(&mut std::task::Context<'_>) -> std::task::Poll<Option<T>> + Unpin>
        tonic::codegen::tokio_stream::Stream for Stream<F>
    {
        type Item = T;
        fn poll_next(
            mut self: std::pin::Pin<&mut Self>,
            cx: &mut std::task::Context<'_>,
        ) -> std::task::Poll<Option<T>> {
            (self.0)(cx)
        }
    }
    Stream(move |cx: &mut std::task::Context<'_>| channel.poll_recv(cx))
}

#[tokio::test]
async fn stopping_answers_polls_and_ends() {
    let rig = TestServer::start(GrpcLimits::default());
    let (mut one, mut other) = (rig.client().await, rig.client().await);
    register(&mut one, &mut other).await;
    let source_task = Some(CoordinatedTask::default());
    let (response, mut stream) = one.open("tensorflow.CoordinationService/PollForError", &[]);
    let poll = encode_framed(&a::PollForErrorRequest { source_task });
    stream.send_data(poll, true).expect("the stream is there");
    rig.waiting(1).await;
    let _silent = TcpStream::connect(rig.address).await.expect("it listens");
    rig.engine.stop();
    rig.stop.send(true).expect("it is served");
    assert_eq!(back(response).await.status, "1");
    timeout(Duration::from_secs(3), rig.serving).await.expect("it ends").expect("no panic");
    assert_eq!(rig.server.counters().connections, 0);
}

/// A sequence of pseudo-random numbers, the same in every run.
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }

    /// Returns a random frame, mostly with a valid length.
    fn frame(&mut self) -> Vec<u8> {
        let length = [0, 4, 5, 8, 6, 64, 300][(self.next() % 7) as usize];
        let (kind, flags) = ((self.next() % 11) as u8, (self.next() % 64) as u8);
        let stream = [0, 1, 3, 5, 7, 2, 1 << 30][(self.next() % 7) as usize] as u32;
        let mut frame = vec![0, 0, length as u8 | (length >> 8) as u8, kind, flags];
        frame[1] = (length >> 8) as u8;
        frame[2] = length as u8;
        frame.extend(stream.to_be_bytes());
        // Headers that are sometimes valid: indexed fields and short literals.
        frame.extend(
            (0..length).map(|_| if self.next().is_multiple_of(3) { 0x82 } else { self.next() as u8 }),
        );
        frame
    }
}

#[tokio::test]
async fn random_frames_do_not_affect_other_connections() {
    let rig =
        TestServer::start(GrpcLimits { handshake: Duration::from_millis(100), ..GrpcLimits::default() });
    let mut client = rig.client().await;
    let mut noise = Noise(1);
    for _ in 0..400 {
        let mut bytes = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0".to_vec();
        for _ in 0..noise.next() % 20 {
            bytes.extend(noise.frame());
        }
        bytes.truncate(bytes.len() - (noise.next() % 3) as usize);
        let mut socket = TcpStream::connect(rig.address).await.expect("it listens");
        // The server may have closed the connection before all was written.
        let _ = socket.write_all(&bytes).await;
        let _ = socket.shutdown().await;
        let read = timeout(PATIENCE, socket.read_to_end(&mut Vec::new())).await;
        assert!(read.is_ok(), "it was not closed");
    }
    assert_eq!(client.a("InsertKeyValue", &insert("k", "v")).await.status, "0");
    rig.waiting(0).await;
}

#[tokio::test]
async fn calls_without_end_have_a_bound() {
    let rig = TestServer::start(GrpcLimits { streams_per_connection: 100, ..GrpcLimits::default() });
    let mut client = rig.client().await;
    assert_eq!(client.a("InsertKeyValue", &insert("k", "v")).await.status, "0");
    let mut asked = Vec::new();
    for _ in 0..100 {
        let (response, mut stream) = client.open(GET, &[]);
        stream.send_data(encode_framed(&get("never")), true).expect("the stream is there");
        asked.push((response, stream));
    }
    rig.waiting(100).await;
    let mut other = rig.client().await;
    assert_eq!(other.a("GetKeyValue", &get("k")).await.status, "0");
    drop(asked);
    rig.waiting(0).await;
}

#[tokio::test]
async fn endless_resets_close_only_their_connection() {
    let rig = TestServer::start(GrpcLimits::default());
    let (hostile, mut other) = (rig.client().await, rig.client().await);
    for _ in 0..20_000 {
        let Ok(mut ready) = hostile.send.clone().ready().await else { break };
        let request = Request::post(format!("http://x/{GET}")).header("content-type", "application/grpc");
        let Ok((_, mut stream)) = ready.send_request(request.body(()).expect("a request"), false) else {
            break;
        };
        let _ = stream.send_data(encode_framed(&get("never")), true);
        stream.send_reset(Reason::CANCEL);
    }
    assert_eq!(other.a("InsertKeyValue", &insert("k", "v")).await.status, "0");
    drop(hostile);
    rig.waiting(0).await;
}

/// Encodes a request without an HTTP/2 library: its header as literals, its message in one frame.
fn raw_request(path: &str, message: &impl prost::Message) -> Vec<u8> {
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
    let message = encode_framed(message);
    let frame = |kind: u8, flags: u8, contents: &[u8]| {
        [&(contents.len() as u32).to_be_bytes()[1..], &[kind, flags, 0, 0, 0, 1], contents].concat()
    };
    [frame(1, 4, &block), frame(0, 1, &message)].concat()
}

/// A stopped client reads nothing, but its host responds: the connection must survive until it continues.
#[tokio::test]
async fn a_stopped_process_is_not_given_up() {
    let rig =
        TestServer::start(GrpcLimits { unacknowledged: Duration::from_millis(300), ..GrpcLimits::default() });
    let mut client = rig.client().await;
    let size = 20 << 20;
    assert_eq!(client.a("InsertKeyValue", &insert("k", vec![0; size])).await.status, "0");

    let mut socket = TcpStream::connect(rig.address).await.expect("it listens");
    let windows = [
        &b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[..],
        &[0, 0, 6, 4, 0, 0, 0, 0, 0, 0, 4, 0x7f, 0xff, 0xff, 0xff],
        &[0, 0, 4, 8, 0, 0, 0, 0, 0, 0x7f, 0, 0, 0],
        &raw_request(&format!("/{GET}"), &get("k")),
    ];
    socket.write_all(&windows.concat()).await.expect("it is open");
    sleep(Duration::from_millis(2500)).await;
    let mut read = 0;
    let mut buffer = vec![0; 1 << 20];
    while read < size {
        let more = timeout(PATIENCE, socket.read(&mut buffer)).await.expect("in time").expect("it is open");
        assert!(more > 0, "closed after {read} bytes");
        read += more;
    }
}

/// The window that a body has used is returned once, not twice, when the body is refused in the middle.
#[tokio::test]
async fn a_body_that_is_refused_gives_back_what_it_took() {
    const STREAMS: u32 = 60;
    const EXCESS: usize = 100 << 10;
    let rig = TestServer::start(GrpcLimits::default());
    let mut socket = TcpStream::connect(rig.address).await.expect("it listens");
    let frame = |kind: u8, flags: u8, stream: u32, contents: &[u8]| {
        let length = (contents.len() as u32).to_be_bytes();
        [&length[1..], &[kind, flags], &stream.to_be_bytes(), contents].concat()
    };
    socket.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").await.expect("it is open");
    let request = raw_request(&format!("/{INSERT}"), &insert("k", "v"));
    let block = &request[9..9 + usize::from(request[2])];
    let mut given = 0;
    let mut heard = Vec::new();
    for n in 0..STREAMS {
        let stream = 2 * n + 1;
        let begun = [frame(1, 4, stream, block), frame(0, 0, stream, &[0; 3])].concat();
        socket.write_all(&begun).await.expect("it is open");
        sleep(Duration::from_millis(2)).await;
        // The rest of a prefix that announces an empty message, and many bytes beyond it.
        socket.write_all(&frame(0, 0, stream, &vec![0; EXCESS])).await.expect("it is open");
        let mut answered = false;
        while !answered {
            let count =
                timeout(PATIENCE, socket.read_buf(&mut heard)).await.expect("in time").expect("it is open");
            assert!(count > 0, "it was closed");
            while let Some(head) = heard.first_chunk::<9>() {
                let [l0, l1, l2, kind, _, s0, s1, s2, s3] = *head;
                let length = u32::from_be_bytes([0, l0, l1, l2]) as usize;
                if heard.len() < 9 + length {
                    break;
                }
                let of = u32::from_be_bytes([s0, s1, s2, s3]);
                if (kind, of) == (8, 0) {
                    given += u64::from(u32::from_be_bytes([heard[9], heard[10], heard[11], heard[12]]));
                }
                answered |= kind == 1 && of == stream;
                heard.drain(..9 + length);
            }
        }
    }
    // The first update opens the window to its size; the others return used bytes.
    let opened = (4 << 20) - 65_535;
    let sent = u64::from(STREAMS) * (EXCESS as u64 + 3);
    assert!(given - opened <= sent, "{} of {sent} bytes given back", given - opened);
    assert!(given - opened + (1 << 20) > sent, "{} of {sent} bytes given back", given - opened);
}

/// Opens a raw HTTP/2 connection and sends the preface and these bytes.
async fn raw(rig: &TestServer, bytes: &[u8]) -> TcpStream {
    let mut socket = TcpStream::connect(rig.address).await.expect("it listens");
    socket.set_nodelay(true).expect("a TCP socket");
    socket.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.expect("it is open");
    socket.write_all(bytes).await.expect("it is open");
    socket
}

/// Reads until GOAWAY, which must state this reason.
async fn goodbye(socket: &mut TcpStream, says: &str) {
    let mut heard = Vec::new();
    let closed = timeout(PATIENCE, socket.read_to_end(&mut heard)).await;
    assert!(closed.is_ok(), "it is still connected, and heard {heard:?}");
    let heard = String::from_utf8_lossy(&heard);
    assert!(heard.ends_with(says), "{heard:?} does not end with {says:?}");
}

const SETTINGS: [u8; 9] = [0, 0, 0, 4, 0, 0, 0, 0, 0];

#[tokio::test]
async fn incomplete_input_is_closed_after_its_timeout() {
    let short = Duration::from_millis(300);
    let rig = TestServer::start(GrpcLimits { handshake: short, unread: short, ..GrpcLimits::default() });
    let mut client = rig.client().await;
    let headers_begun = [0, 0, 5, 1, 0, 0, 0, 0, 1, 0x83, 0x86, 0x84, 0x41, 0];
    let frame = "a frame or a header block was not completed in time";
    for (begun, says) in [
        (vec![], "its settings did not come in time"),
        (SETTINGS[..5].to_vec(), "its settings did not come in time"),
        ([&SETTINGS[..], &[0, 0]].concat(), frame),
        ([&SETTINGS[..], &[0, 0, 8, 6, 0, 0, 0, 0, 0, 1]].concat(), frame),
        ([&SETTINGS[..], &headers_begun[..11]].concat(), frame),
        ([&SETTINGS[..], &headers_begun].concat(), frame),
        (
            [&SETTINGS[..], &[0, 1, 0, 0x42, 0, 0, 0, 0, 0, 1]].concat(),
            "data that was begun was not completed in time",
        ),
    ] {
        let mut socket = raw(&rig, &begun).await;
        goodbye(&mut socket, says).await;
    }
    // The fragments of an incomplete header block are no progress either.
    let mut dribble = raw(&rig, &[&SETTINGS[..], &headers_begun].concat()).await;
    let dribbling = async {
        while dribble.write_all(&[0, 0, 0, 9, 0, 0, 0, 0, 1]).await.is_ok() {
            sleep(Duration::from_millis(20)).await;
            let mut heard = [0; 200];
            if dribble.try_read(&mut heard).is_ok_and(|read| heard[..read].ends_with(frame.as_bytes())) {
                return;
            }
        }
    };
    timeout(PATIENCE, dribbling).await.expect("it is cut off");
    // A connection without incomplete input has no deadline.
    let mut idle = raw(&rig, &SETTINGS).await;
    sleep(2 * short).await;
    idle.write_all(&[0, 0, 8, 6, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8]).await.expect("it is open");
    let pong = async {
        let mut heard = Vec::new();
        while !heard.ends_with(&[1, 2, 3, 4, 5, 6, 7, 8]) {
            assert!(idle.read_buf(&mut heard).await.expect("it is open") > 0, "{heard:?}");
        }
    };
    timeout(PATIENCE, pong).await.expect("it answers");
    assert_eq!(client.a("InsertKeyValue", &insert("k", "v")).await.status, "0");
}

#[tokio::test]
async fn answers_that_are_not_taken_end_the_connection_in_time() {
    let rig = TestServer::start(GrpcLimits { unread: Duration::from_millis(300), ..GrpcLimits::default() });
    let mut client = rig.client().await;
    assert_eq!(client.a("InsertKeyValue", &insert("k", vec![7; 100_000])).await.status, "0");
    // Its windows have room for 65,535 bytes and are not opened further; but it pings, and reads the
    // acknowledgements.
    let (mut send, connection) = h2::client::Builder::new()
        .handshake::<_, Bytes>(TcpStream::connect(rig.address).await.expect("it listens"))
        .await
        .expect("it speaks HTTP/2");
    let connection = tokio::spawn(connection);
    let request = Request::post(format!("http://muster.test:1/{GET}"))
        .header("content-type", "application/grpc")
        .body(())
        .expect("a request");
    let (response, mut stream) = send.send_request(request, false).expect("the connection is there");
    stream.send_data(encode_framed(&get("k")), true).expect("the stream is there");
    let answer = response.await.expect("an answer");
    let ended = timeout(PATIENCE, connection).await.expect("it ends in time").expect("no panic");
    let why = ended.expect_err("the server ends it");
    assert_eq!(why.reason(), Some(Reason::ENHANCE_YOUR_CALM), "{why:?}");
    drop(answer);
    assert_eq!(client.a("InsertKeyValue", &insert("k", "v")).await.status, "0");
}

#[tokio::test]
async fn a_body_that_dribbles_is_dropped_though_it_never_stands_still() {
    let rig =
        TestServer::start(GrpcLimits { body_stall: Duration::from_millis(300), ..GrpcLimits::default() });
    let mut client = rig.client().await;
    let (mut response, mut stream) = client.open(INSERT, &[]);
    let message = encode_framed(&insert("k", vec![0; 10_000]));
    let mut sent = 0;
    let answer = loop {
        let piece = message.slice(sent..sent + 1);
        sent += 1;
        let _ = stream.send_data(piece, false);
        if let Ok(answer) = timeout(Duration::from_millis(5), &mut response).await {
            break answer.expect("an answer");
        }
        assert!(sent < message.len(), "it was taken to the end");
    };
    assert_eq!(answer.headers()["grpc-status"], "4");
    assert_eq!(rig.server.counters().bodies_in_flight_bytes, 0);
}

#[tokio::test]
async fn a_slow_body_loses_contended_memory() {
    let rig = TestServer::start(GrpcLimits { bodies_in_flight_bytes: 16 << 20, ..GrpcLimits::default() });
    let (mut greedy, mut honest) = (rig.client().await, rig.client().await);
    let message = encode_framed(&insert("greedy", vec![0; 12 << 20]));
    let (response, mut stream) = greedy.open(INSERT, &[]);
    stream.send_data(message.slice(..1 << 20), false).expect("the stream is there");
    let held = async {
        while rig.server.counters().bodies_in_flight_bytes < 8 << 20 {
            sleep(Duration::from_millis(2)).await;
        }
    };
    timeout(PATIENCE, held).await.expect("it has all that is kept for those who wait");
    // As long as no other body waits, it may arrive slowly.
    assert_eq!(honest.a("InsertKeyValue", &insert("small", "v")).await.status, "0");
    let six = insert("honest", vec![1; 6 << 20]);
    let waits = honest.a("InsertKeyValue", &six);
    assert_eq!(timeout(PATIENCE, waits).await.expect("it is served").status, "0");
    let told = back(response).await;
    assert_eq!(told.status, "8");
    let why = told.headers["grpc-message"].to_str().expect("text");
    assert!(why.contains("too slowly while others wait"), "{why}");
    assert_eq!(rig.server.counters().bodies_in_flight_bytes, 0);
}

#[tokio::test]
async fn the_memory_of_requests_comes_back() {
    let rig = TestServer::start(GrpcLimits::default());
    for _ in 0..3 {
        let mut client = rig.client().await;
        let mut waiting = Vec::new();
        for n in 0..500 {
            let (response, mut stream) = client.open(GET, &[]);
            stream.send_data(encode_framed(&get(&format!("never/{n}"))), true).expect("the stream is there");
            waiting.push((response, stream));
        }
        rig.waiting(500).await;
        assert!(rig.server.counters().state_bytes > 256 << 10);
        for (_, mut stream) in waiting.drain(..250) {
            stream.send_reset(Reason::CANCEL);
        }
        rig.waiting(250).await;
        client.task.abort();
        rig.waiting(0).await;
        let gone = async {
            while rig.server.counters().state_bytes > 0 {
                sleep(Duration::from_millis(2)).await;
            }
        };
        timeout(PATIENCE, gone).await.expect("all of it comes back");
    }
}

/// Sixty-four messages that are sent at the same time over one connection need far more memory than it may
/// have. Each is stored or refused, and none waits for another that cannot continue.
#[tokio::test(flavor = "multi_thread")]
async fn bodies_of_one_connection_do_not_keep_each_other_from_coming_to_an_end() {
    const BODIES: usize = 64;
    let rig = TestServer::start(GrpcLimits { bodies_in_flight_bytes: 64 << 20, ..GrpcLimits::default() });
    let (mut greedy, mut honest) = (rig.client().await, rig.client().await);
    let answers: Vec<_> = (0..BODIES)
        .map(|n| {
            let (response, mut stream) = greedy.open(INSERT, &[]);
            let message = encode_framed(&insert(&format!("large/{n}"), vec![n as u8; 2 << 20]));
            stream.send_data(message, true).expect("the stream is there");
            tokio::spawn(back(response))
        })
        .collect();
    let beats = tokio::spawn(async move {
        loop {
            assert_eq!(honest.a("InsertKeyValue", &insert("small", "v")).await.status, "0");
            sleep(Duration::from_millis(5)).await;
        }
    });
    let mut stored = 0;
    for answer in answers {
        let told = answer.await.expect("an answer within the patience of a test");
        match &*told.status {
            "0" => stored += 1,
            "8" => assert!(told.headers.contains_key("grpc-message"), "{:?}", told.headers),
            status => panic!("status {status}: {:?}", told.headers),
        }
    }
    assert!(stored > 0, "at least those whose turn it was are stored");
    assert!(!beats.is_finished(), "others went on");
    beats.abort();
    assert_eq!(rig.server.counters().bodies_in_flight_bytes, 0);
    // The windows are open again: every byte was returned.
    let large = insert("after", vec![7; 8 << 20]);
    assert_eq!(greedy.a("InsertKeyValue", &large).await.status, "0");
}

/// The body that holds the reserve must keep arriving while other bodies of its connection wait for theirs.
#[tokio::test]
async fn a_body_that_stops_does_not_keep_others_of_its_connection_waiting() {
    let rig = TestServer::start(GrpcLimits { bodies_in_flight_bytes: 16 << 20, ..GrpcLimits::default() });
    let mut client = rig.client().await;
    let (response, mut stream) = client.open(INSERT, &[]);
    let message = encode_framed(&insert("stopped", vec![0; 4 << 20]));
    stream.send_data(message.slice(..1 << 20), false).expect("the stream is there");
    let held = async {
        while rig.server.counters().bodies_in_flight_bytes < 4 << 20 {
            sleep(Duration::from_millis(2)).await;
        }
    };
    timeout(PATIENCE, held).await.expect("it has its part of the reserve");
    assert_eq!(client.a("InsertKeyValue", &insert("next", vec![1; 3 << 20])).await.status, "0");
    let told = back(response).await;
    assert!(
        told.headers["grpc-message"].to_str().expect("text").contains("too slowly"),
        "{:?}",
        told.headers
    );
}

#[tokio::test]
async fn a_message_that_is_there_must_be_followed_by_the_end_of_its_request() {
    let limits = GrpcLimits { handshake: Duration::from_millis(300), ..GrpcLimits::default() };
    let rig = TestServer::start(limits);
    let mut client = rig.client().await;
    for length in [10, 100_000, 3 << 20] {
        let (response, mut stream) = client.open(INSERT, &[]);
        stream.send_data(encode_framed(&insert("k", vec![0; length])), false).expect("the stream is there");
        let told = back(response).await;
        let why = told.headers["grpc-message"].to_str().expect("text");
        assert!(told.status == "4" && why.contains("did not end within"), "{length}: {why}");
    }
    assert_eq!(rig.server.counters().bodies_in_flight_bytes, 0);
    // It is charged meanwhile, however short it is.
    let (response, mut stream) = client.open(INSERT, &[]);
    stream.send_data(encode_framed(&insert("k", vec![0; 10_000])), false).expect("the stream is there");
    let charged = async {
        while rig.server.counters().bodies_in_flight_bytes == 0 {
            sleep(Duration::from_millis(2)).await;
        }
    };
    timeout(PATIENCE, charged).await.expect("it takes memory of the pool");
    stream.send_data(Bytes::new(), true).expect("the stream is there");
    assert_eq!(back(response).await.status, "0");
}

/// The deadline of an incomplete frame does not count the time during which the server did not read.
#[tokio::test]
async fn the_time_during_which_the_server_does_not_read_is_not_the_peers() {
    let short = Duration::from_millis(400);
    let rig = TestServer::start(GrpcLimits {
        handshake: short,
        unsent_bytes_per_connection: 1 << 20,
        ..GrpcLimits::default()
    });
    let mut client = rig.client().await;
    assert_eq!(client.a("InsertKeyValue", &insert("k", vec![7; 32 << 20])).await.status, "0");
    let settings = [0, 0, 6, 4, 0, 0, 0, 0, 0, 0, 4, 0x7f, 0xff, 0xff, 0xff];
    let update = [0, 0, 4, 8, 0, 0, 0, 0, 0, 0x7f, 0, 0, 0];
    let request = raw_request(&format!("/{GET}"), &get("k"));
    let ping = [0, 0, 8, 6, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8];
    // It requests more than its host has room for, begins a frame, and reads nothing for a while.
    let mut socket = raw(&rig, &[&settings[..], &update, &request, &ping[..12]].concat()).await;
    sleep(3 * short).await;
    let (mut from, mut to) = socket.split();
    let reading = async {
        let (mut last, mut read) = (Vec::new(), vec![0; 1 << 20]);
        while !last.ends_with(&ping[9..]) {
            let count = from.read(&mut read).await.expect("it is open");
            assert!(count > 0, "the peer was cut: {:?}", String::from_utf8_lossy(&last));
            last.extend_from_slice(&read[..count]);
            last.drain(..last.len().saturating_sub(100));
        }
    };
    // Then it reads its answer, and completes the frame.
    let rest = async {
        sleep(short / 4).await;
        to.write_all(&ping[12..]).await.expect("it is open");
    };
    timeout(PATIENCE, async { tokio::join!(reading, rest) }).await.expect("its ping is answered");
    // Once the server reads again, the deadline counts.
    to.write_all(&ping[..12]).await.expect("it is open");
    let mut heard = Vec::new();
    timeout(PATIENCE, from.read_to_end(&mut heard)).await.expect("it is cut").expect("it is closed in order");
    assert!(String::from_utf8_lossy(&heard).ends_with("was not completed in time"), "{heard:?}");
}
