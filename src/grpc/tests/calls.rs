//! Tests calls of both wire generations, calls that wait, and the end of the server.

use super::*;

#[tokio::test]
async fn both_generations_meet_on_one_port() {
    let rig = TestServer::start(GrpcLimits::default());
    let (mut one, mut other) = (rig.connect_client().await, rig.connect_client().await);
    let service_incarnation = register_two_tasks(&mut one, &mut other).await;

    let claim = c::Incarnations { service_incarnation, task_incarnation: 8, task_id: 0 };
    let beat = c::HeartbeatRequest { incarnations: Some(claim), incarnation: 8, source_task_id: 1 };
    let back = other.call_generation_c("Heartbeat", &beat).await.decode_message::<c::HeartbeatResponse>();
    assert_eq!(back.service_incarnation, service_incarnation);
    let unclaimed =
        other.call_generation_c("Heartbeat", &c::HeartbeatRequest { incarnations: None, ..beat }).await;
    assert_eq!(unclaimed.status, "13");
    assert!(unclaimed.headers.contains_key("grpc-status-details-bin"));

    assert_eq!(one.call_generation_a("InsertKeyValue", &insert_request("a/b", "v")).await.status, "0");
    let asked = c::GetKeyValueRequest { incarnations: Some(claim), key: "//a/b/".into() };
    let kv = other
        .call_generation_c("GetKeyValue", &asked)
        .await
        .decode_message::<c::GetKeyValueResponse>()
        .kv
        .expect("an entry");
    assert_eq!((&*kv.key, &*kv.value), ("//a/b/", &b"v"[..]));
    assert_eq!(one.call_generation_a("NoSuchMethod", &get_request("")).await.status, "12");
    assert_eq!(
        one.call_generation_a("ReportErrorToTask", &a::ReportErrorToTaskRequest::default()).await.status,
        "12"
    );
    assert_eq!(one.call("some.Service/Method", &get_request("")).await.status, "12");
}

#[tokio::test]
async fn callers_that_stop_waiting_are_forgotten() {
    let rig = TestServer::start(GrpcLimits::default());
    let mut client = rig.connect_client().await;

    let (response, mut stream) = client.open_request(GET, &[("grpc-timeout", "30m")]);
    stream.send_data(encode_framed_message(&get_request("never")), true).expect("the stream is there");
    let late = receive_response(response).await;
    assert_eq!(late.status, "4");
    assert!(!late.headers.contains_key("grpc-status-details-bin"));
    rig.wait_for_waiting_calls(0).await;

    let (_response, mut stream) = client.start_call(GET, &get_request("never"));
    rig.wait_for_waiting_calls(1).await;
    stream.send_reset(Reason::CANCEL);
    rig.wait_for_waiting_calls(0).await;

    let (_response, mut stream) = client.open_request(GET, &[("grpc-timeout", "1H")]);
    stream.send_data(encode_framed_message(&get_request("never")), true).expect("the stream is there");
    rig.wait_for_waiting_calls(1).await;
    client.task.abort();
    rig.wait_for_waiting_calls(0).await;
}

#[tokio::test]
async fn a_waiting_call_is_answered_by_another_connection() {
    let rig = TestServer::start(GrpcLimits::default());
    let (mut one, mut other) = (rig.connect_client().await, rig.connect_client().await);
    let asked: Vec<_> = (0..50).map(|_| one.start_call(GET, &get_request("k")).0).collect();
    rig.wait_for_waiting_calls(50).await;
    assert_eq!(other.call_generation_a("InsertKeyValue", &insert_request("k", "v")).await.status, "0");
    for response in asked {
        let back = receive_response(response).await.decode_message::<a::GetKeyValueResponse>();
        assert_eq!(back.kv.expect("an entry").value, "v");
    }
}

#[tokio::test]
async fn calls_without_end_have_a_bound() {
    let rig = TestServer::start(GrpcLimits { streams_per_connection: 100, ..GrpcLimits::default() });
    let mut client = rig.connect_client().await;
    assert_eq!(client.call_generation_a("InsertKeyValue", &insert_request("k", "v")).await.status, "0");
    let mut asked = Vec::new();
    for _ in 0..100 {
        asked.push(client.start_call(GET, &get_request("never")));
    }
    rig.wait_for_waiting_calls(100).await;
    let mut other = rig.connect_client().await;
    assert_eq!(other.call_generation_a("GetKeyValue", &get_request("k")).await.status, "0");
    drop(asked);
    rig.wait_for_waiting_calls(0).await;
}

#[tokio::test]
async fn the_memory_of_requests_comes_back() {
    let rig = TestServer::start(GrpcLimits::default());
    for _ in 0..3 {
        let mut client = rig.connect_client().await;
        let mut waiting = Vec::new();
        for n in 0..500 {
            waiting.push(client.start_call(GET, &get_request(&format!("never/{n}"))));
        }
        rig.wait_for_waiting_calls(500).await;
        assert!(rig.server.counters().state_bytes > 256 << 10);
        for (_, mut stream) in waiting.drain(..250) {
            stream.send_reset(Reason::CANCEL);
        }
        rig.wait_for_waiting_calls(250).await;
        client.task.abort();
        rig.wait_for_waiting_calls(0).await;
        wait_until("all of it comes back", || rig.server.counters().state_bytes == 0).await;
    }
}

#[tokio::test]
async fn health_and_reflection() {
    let rig = TestServer::start(GrpcLimits::default());
    let endpoint = tonic::transport::Endpoint::new(format!("http://{}", rig.address)).expect("an endpoint");
    let channel = endpoint.connect().await.expect("it listens");
    let mut health = tonic_health::pb::health_client::HealthClient::new(channel.clone());
    for service in ["", GENERATION_A_SERVICE, GENERATION_C_SERVICE] {
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
    for service in ["grpc.health.v1.Health", GENERATION_A_SERVICE, GENERATION_C_SERVICE] {
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
    let (mut one, mut other) = (rig.connect_client().await, rig.connect_client().await);
    register_two_tasks(&mut one, &mut other).await;
    let source_task = Some(CoordinatedTask::default());
    let (response, mut stream) = one.open_request("tensorflow.CoordinationService/PollForError", &[]);
    let poll = encode_framed_message(&a::PollForErrorRequest { source_task });
    stream.send_data(poll, true).expect("the stream is there");
    rig.wait_for_waiting_calls(1).await;
    let _silent = TcpStream::connect(rig.address).await.expect("it listens");
    rig.engine.stop();
    rig.stop.send(true).expect("it is served");
    assert_eq!(receive_response(response).await.status, "1");
    timeout(Duration::from_secs(3), rig.serving).await.expect("it ends").expect("no panic");
    assert_eq!(rig.server.counters().connections, 0);
}
