//! Tests of the other gRPC services of the port (health, reflection), and of unknown services.

use tonic::codegen::tokio_stream;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;
use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;
use tonic_reflection::pb::v1::{ListServiceResponse, ServerReflectionRequest};

use crate::raw::{GENERATION_A, GENERATION_C, RawClient, grpc_framed};
use crate::second_client::SecondClient;
use crate::support::{Client, Generation, MusterServer};

const SERVICES: [&str; 2] = ["tensorflow.CoordinationService", "xla.coordination.CoordinationService"];

async fn start_server_and_second_client() -> (MusterServer, SecondClient) {
    let server = MusterServer::patient(&["--tasks", "2", "--log", "error"]);
    let witness = SecondClient::register(&server, "default").await;
    (server, witness)
}

#[tokio::test(flavor = "multi_thread")]
async fn health_is_served_for_the_server_and_for_each_service() {
    let (server, witness) = start_server_and_second_client().await;
    let mut health = HealthClient::new(Client::new(Generation::C, server.grpc).channel());
    for service in [
        "",
        SERVICES[0],
        SERVICES[1],
        "muster.v1.TaskClaims",
        "muster.v1.PeerJobs",
        "muster.v1.Transfers",
        "muster.v1.Stacks",
    ] {
        let answer = health.check(HealthCheckRequest { service: service.into() }).await.expect(service);
        assert_eq!(answer.into_inner().status().as_str_name(), "SERVING", "{service:?}");
    }
    let unknown = health.check(HealthCheckRequest { service: "no.such.Service".into() }).await;
    assert_eq!(unknown.expect_err("nobody knows it").code(), tonic::Code::NotFound);
    witness.assert_served().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn reflection_lists_the_services_and_describes_them() {
    let (server, witness) = start_server_and_second_client().await;
    let mut client = ServerReflectionClient::new(Client::new(Generation::C, server.grpc).channel());
    let ask = |message_request| ServerReflectionRequest {
        host: String::new(),
        message_request: Some(message_request),
    };
    let requests = [
        ask(MessageRequest::ListServices(String::new())),
        ask(MessageRequest::FileContainingSymbol(format!("{}.Barrier", SERVICES[1]))),
    ];
    let mut answers =
        client.server_reflection_info(tokio_stream::iter(requests)).await.expect("it reflects").into_inner();
    let first = answers.message().await.expect("an answer").expect("the first");
    let Some(MessageResponse::ListServicesResponse(ListServiceResponse { service })) = first.message_response
    else {
        panic!("{first:?}");
    };
    for name in SERVICES.into_iter().chain([
        "muster.v1.TaskClaims",
        "muster.v1.PeerJobs",
        "muster.v1.Transfers",
        "muster.v1.Stacks",
    ]) {
        assert!(service.iter().any(|listed| listed.name == name), "{name} is not among {service:?}");
    }
    let second = answers.message().await.expect("an answer").expect("the second");
    assert!(
        matches!(second.message_response, Some(MessageResponse::FileDescriptorResponse(_))),
        "{second:?}"
    );
    witness.assert_served().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn unknown_methods_are_unimplemented() {
    let (server, witness) = start_server_and_second_client().await;
    let mut raw = RawClient::connect(server.grpc, "default").await;
    let paths = [
        format!("{GENERATION_A}/NoSuchMethod"),
        format!("{GENERATION_C}/NoSuchMethod"),
        // Each generation has calls that the other lacks.
        format!("{GENERATION_C}/ResetTask"),
        format!("{GENERATION_A}/WatchTasks"),
        format!("{GENERATION_A}/ReportErrorToTask"),
        format!("{GENERATION_A}/"),
        format!("{GENERATION_A}/Heartbeat/"),
        format!("{GENERATION_A}/heartbeat"),
        GENERATION_C.to_owned(),
        "/no.such.Service/Method".to_owned(),
        "/".to_owned(),
        "//".to_owned(),
        format!("/{}", "x".repeat(4000)),
    ];
    for path in paths {
        let back = raw.send_body(raw.request(&path), grpc_framed(b"")).await.expect("an answer");
        assert_eq!((back.http, back.code), (200, Some(12)), "{path}: {back:?}");
        assert!(back.message.len() < 4096, "{path}");
    }
    witness.assert_served().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_that_are_no_calls_are_refused() {
    let (server, witness) = start_server_and_second_client().await;
    let mut raw = RawClient::connect(server.grpc, "default").await;
    let path = format!("{GENERATION_C}/TryGetKeyValue");
    let no_calls = [
        raw.request(&path).method("GET"),
        raw.request(&path).method("PUT"),
        raw.request(&path).method("OPTIONS"),
        http::Request::builder().method("POST").uri(format!("http://x{path}")),
        http::Request::builder()
            .method("POST")
            .uri(format!("http://x{path}"))
            .header("content-type", "text/html"),
        raw.request(&path).header("grpc-timeout", "soon"),
        raw.request(&path).header("grpc-timeout", "99999999999999999999H"),
        raw.request(&path).header("grpc-encoding", "snappy"),
    ];
    for request in no_calls {
        let asked = format!("{:?}", request.headers_ref());
        match raw.send_body(request, grpc_framed(b"")).await {
            Ok(back) => assert!(back.http != 200 || back.code.is_some(), "{asked}: {back:?}"),
            Err(reset) => assert!(reset.is_reset(), "{asked}: {reset}"),
        }
        witness.assert_served().await;
    }
}
