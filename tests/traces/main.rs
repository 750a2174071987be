//! Traces, as a collector receives them over gRPC and over HTTP.

mod collector;
#[path = "../support/mod.rs"]
mod support;

use std::time::Duration;

use muster::proto::xla::coordination as pb;
use muster::proto::xla::coordination::coordination_service_client::CoordinationServiceClient;
use opentelemetry_proto::tonic::trace::v1::Span;

use collector::{Collector, text, whole};
use support::{Body, Call, Caller, Client, Generation, Muster};

const PATIENCE: Duration = Duration::from_secs(60);
const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const PARENT: &str = "b7ad6b7169203331";

/// Two tasks register, meet, and shut down; one call says whose child it is.
async fn job(server: &Muster) {
    let clients = [Generation::A, Generation::C].map(|generation| Client::new(generation, server.grpc()));
    let mut callers = [Caller::new(0, 0xA, 0), Caller::new(1, 0xC, 0)];
    let registered = clients.iter().zip(callers).map(|(client, caller)| {
        let call = Call::Register { incarnation: caller.incarnation, recoverable: false };
        client.start(caller, call, |_| {})
    });
    for (pending, caller) in registered.collect::<Vec<_>>().iter().zip(&mut callers) {
        let Body::Service(service) = pending.within(PATIENCE).await.expect("it registers").body else {
            panic!("no service")
        };
        caller.service = Some(service);
    }
    let mut stub = CoordinationServiceClient::new(clients[1].channel());
    let incarnations = Some(pb::Incarnations {
        service_incarnation: callers[1].service.expect("it is there"),
        task_incarnation: 0xC,
        task_id: 1,
    });
    let beat = pb::HeartbeatRequest { incarnations, incarnation: 0xC, source_task_id: 1 };
    let mut request = tonic::Request::new(beat);
    let parent = format!("00-{TRACE}-{PARENT}-01").parse().expect("it is ASCII");
    request.metadata_mut().insert("traceparent", parent);
    stub.heartbeat(request).await.expect("it is heard");
    assert!(!clients[1].ask(&callers[1], &Call::try_get("nothing")).await.is_ok());
    for call in [Call::barrier("step", 0), Call::Shutdown] {
        let first = clients[0].start(callers[0], call.clone(), |_| {});
        tokio::time::sleep(Duration::from_millis(50)).await;
        let second = clients[1].start(callers[1], call, |_| {});
        for pending in [first, second] {
            assert!(pending.within(PATIENCE).await.is_some_and(|answer| answer.is_ok()));
        }
    }
}

async fn spans_of_a_job(collector: &Collector, protocol: &str) -> Vec<Span> {
    let endpoint = collector.endpoint();
    let arguments = ["--tasks", "2", "--otlp-endpoint", &endpoint, "--otlp-protocol", protocol];
    let mut server = Muster::serve(&arguments);
    job(&server).await;
    server.terminate();
    // What is left is sent on the way out.
    while server.is_running() {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    collector.spans()
}

#[track_caller]
fn check(spans: &[Span]) {
    let named = |name: &str| -> Vec<&Span> { spans.iter().filter(|span| span.name == name).collect() };
    let run = named("run")[0];
    assert_eq!(text(run, "muster.outcome"), "completed");
    let barriers = named("barrier");
    let ids: Vec<String> = barriers.iter().map(|span| text(span, "muster.barrier.id")).collect();
    assert!(ids.contains(&"step".to_owned()) && barriers.len() == 3, "{ids:?}");
    let step = barriers.iter().find(|span| text(span, "muster.barrier.id") == "step").expect("it is there");
    assert_eq!(
        (&step.trace_id, &step.parent_span_id),
        (&run.trace_id, &run.span_id),
        "a barrier is its run's"
    );
    assert!(run.start_time_unix_nano <= step.start_time_unix_nano);
    assert!(step.end_time_unix_nano <= run.end_time_unix_nano);
    let mut arrivals: Vec<(u64, i64)> = step
        .events
        .iter()
        .map(|event| (event.time_unix_nano, whole(&event.attributes, "muster.task")))
        .collect();
    arrivals.sort_unstable();
    assert_eq!(arrivals.iter().map(|(_, task)| *task).collect::<Vec<_>>(), [0, 1], "who came, in order");
    assert!(arrivals[1].0 - arrivals[0].0 >= 20_000_000, "when they came: {arrivals:?}");

    let beat = named("xla.coordination.CoordinationService/Heartbeat")[0];
    assert_eq!((hex(&beat.trace_id).as_str(), hex(&beat.parent_span_id).as_str()), (TRACE, PARENT));
    assert_eq!(whole(&beat.attributes, "rpc.grpc.status_code"), 0);
    assert_eq!((text(beat, "muster.job"), whole(&beat.attributes, "muster.task")), ("default".into(), 1));
    let missing = named("xla.coordination.CoordinationService/TryGetKeyValue")[0];
    assert_eq!(whole(&missing.attributes, "rpc.grpc.status_code"), 5);
    assert!(missing.parent_span_id.is_empty(), "it stands alone");
    // The one that came first waited.
    let met = named("tensorflow.CoordinationService/Barrier")[0];
    assert!(met.end_time_unix_nano - met.start_time_unix_nano >= 20_000_000);
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_collector_that_speaks_grpc_gets_every_span() {
    let collector = Collector::grpc().await;
    check(&spans_of_a_job(&collector, "grpc").await);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_collector_that_speaks_http_gets_every_span() {
    let collector = Collector::http().await;
    check(&spans_of_a_job(&collector, "http").await);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_collector_that_is_not_there_harms_nobody() {
    let nobody = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    let endpoint = format!("http://{}", nobody.local_addr().expect("it is bound"));
    drop(nobody);
    let mut server = Muster::serve(&["--tasks", "2", "--otlp-endpoint", &endpoint]);
    job(&server).await;
    server.terminate();
    let ended = tokio::time::timeout(PATIENCE, async {
        while server.is_running() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    });
    assert!(ended.await.is_ok(), "it stops all the same");
}
