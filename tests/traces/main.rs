//! Tests of traces as a collector receives them over gRPC and over HTTP.

mod collector;
#[path = "../support/mod.rs"]
mod support;

use std::time::Duration;

use muster::proto::xla::coordination as pb;
use muster::proto::xla::coordination::coordination_service_client::CoordinationServiceClient;
use opentelemetry_proto::tonic::trace::v1::Span;

use collector::{Collector, CollectorIdentity, integer_attribute, text_attribute};
use support::harness::http::{JSON, send};
use support::{Body, Call, Caller, Client, Generation, MusterServer, Signal};

const PATIENCE: Duration = Duration::from_secs(60);
const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const PARENT: &str = "b7ad6b7169203331";

/// Runs a job: two tasks register, meet, and shut down; one call has a parent span.
async fn run_job(server: &MusterServer) {
    let clients = [Generation::A, Generation::C].map(|generation| Client::new(generation, server.grpc));
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

/// The variable for the collector's CA certificate.
const CERTIFICATE: &str = "OTEL_EXPORTER_OTLP_CERTIFICATE";

async fn spans_of_a_job(collector: &Collector, protocol: &str, variables: &[(&str, &str)]) -> Vec<Span> {
    let endpoint = collector.endpoint();
    let arguments = ["--tasks", "2", "--otlp-endpoint", &endpoint, "--otlp-protocol", protocol];
    let mut server = MusterServer::patient_with(&arguments, variables);
    run_job(&server).await;
    stop_server_and_wait(&mut server).await;
    collector.spans()
}

/// Stops a server; it exports the remaining spans.
async fn stop_server_and_wait(server: &mut MusterServer) {
    server.signal(Signal::TERM);
    while server.is_running() {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[track_caller]
fn assert_spans_of_job(spans: &[Span]) {
    let named = |name: &str| -> Vec<&Span> { spans.iter().filter(|span| span.name == name).collect() };
    let run = named("run")[0];
    assert_eq!(text_attribute(run, "muster.outcome"), "completed");
    let barriers = named("barrier");
    let ids: Vec<String> = barriers.iter().map(|span| text_attribute(span, "muster.barrier.id")).collect();
    assert!(ids.contains(&"step".to_owned()) && barriers.len() == 3, "{ids:?}");
    let step = barriers
        .iter()
        .find(|span| text_attribute(span, "muster.barrier.id") == "step")
        .expect("it is there");
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
        .map(|event| (event.time_unix_nano, integer_attribute(&event.attributes, "muster.task")))
        .collect();
    arrivals.sort_unstable();
    assert_eq!(arrivals.iter().map(|(_, task)| *task).collect::<Vec<_>>(), [0, 1], "who came, in order");
    assert!(arrivals[1].0 - arrivals[0].0 >= 20_000_000, "when they came: {arrivals:?}");

    let beat = named("xla.coordination.CoordinationService/Heartbeat")[0];
    assert_eq!((hex(&beat.trace_id).as_str(), hex(&beat.parent_span_id).as_str()), (TRACE, PARENT));
    assert_eq!(integer_attribute(&beat.attributes, "rpc.grpc.status_code"), 0);
    assert_eq!(
        (text_attribute(beat, "muster.job"), integer_attribute(&beat.attributes, "muster.task")),
        ("default".into(), 1)
    );
    let missing = named("xla.coordination.CoordinationService/TryGetKeyValue")[0];
    assert_eq!(integer_attribute(&missing.attributes, "rpc.grpc.status_code"), 5);
    assert!(missing.parent_span_id.is_empty(), "it stands alone");
    // The span of the first arrival lasts until the barrier passes.
    let met = named("tensorflow.CoordinationService/Barrier")[0];
    assert!(met.end_time_unix_nano - met.start_time_unix_nano >= 20_000_000);
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_collector_that_speaks_grpc_gets_every_span() {
    let collector = Collector::start_grpc(None).await;
    assert_spans_of_job(&spans_of_a_job(&collector, "grpc", &[]).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_collector_that_speaks_http_gets_every_span() {
    let collector = Collector::start_http(None).await;
    assert_spans_of_job(&spans_of_a_job(&collector, "http", &[]).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_collector_behind_tls_gets_every_span_if_its_authority_is_trusted() {
    for (protocol, spoken) in [("grpc", "h2"), ("http", "http/1.1")] {
        let identity = CollectorIdentity::new(&format!("collector-{protocol}"), spoken);
        let collector = match protocol {
            "grpc" => Collector::start_grpc(Some(&identity)).await,
            _ => Collector::start_http(Some(&identity)).await,
        };
        let ca = identity.ca.display().to_string();
        assert_spans_of_job(&spans_of_a_job(&collector, protocol, &[(CERTIFICATE, &ca)]).await);

        let stranger =
            CollectorIdentity::new(&format!("another-{protocol}"), spoken).ca.display().to_string();
        let before = collector.spans().len();
        let spans = spans_of_a_job(&collector, protocol, &[(CERTIFICATE, &stranger)]).await;
        assert_eq!(spans.len(), before, "a collector that is not trusted gets nothing");
    }
}

/// Sends a request to a server and returns the response.
fn send_http_request(
    server: &MusterServer,
    method: &str,
    path: &str,
    headers: &[&str],
    body: &str,
) -> String {
    let headers = [&[JSON], headers].concat();
    send(server.http, method, path, &headers, body).expect("it is answered").text()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_exclusion_is_a_span_from_the_act_to_its_end() {
    let collector = Collector::start_grpc(None).await;
    let endpoint = collector.endpoint();
    let arguments = ["--tasks", "3", "--recoverable", "--otlp-endpoint", &endpoint];
    let mut server = MusterServer::patient(&arguments);
    let register = |task: i32, incarnation: u64| {
        let client = Client::new(Generation::C, server.grpc);
        let caller = Caller::new(task, incarnation, 0);
        let call = Call::Register { incarnation, recoverable: true };
        (client.start(caller, call, |_| {}), client)
    };
    let tasks: Vec<_> = (0..3).map(|task| register(task, 0xA0 + task.unsigned_abs() as u64)).collect();
    for (registered, _) in &tasks {
        assert!(registered.within(PATIENCE).await.is_some_and(|answer| answer.is_ok()));
    }
    let exclude = |headers: &[&str], body: &str| {
        let answer = send_http_request(&server, "POST", "/api/v1/jobs/default/exclusions", headers, body);
        assert!(answer.contains(" 201 "), "{answer}");
    };
    let parent = format!("traceparent: 00-{TRACE}-{PARENT}-01");
    exclude(&[&parent], r#"{"task": 2, "reason": "flaky NIC"}"#);
    let (refused, _client) = register(2, 0xB2);
    assert!(refused.within(PATIENCE).await.is_some_and(|answer| !answer.is_ok()));
    tokio::time::sleep(Duration::from_millis(50)).await;
    let lifted =
        send_http_request(&server, "DELETE", "/api/v1/jobs/default/exclusions/1?reason=replaced", &[], "");
    assert!(lifted.contains(" 200 "), "{lifted}");
    exclude(&[], r#"{"host": "192.0.2.7", "reason": "short", "expires_in_seconds": 1}"#);
    exclude(&[], r#"{"task": 1, "reason": "for good"}"#);
    tokio::time::sleep(Duration::from_millis(1_300)).await;
    stop_server_and_wait(&mut server).await;

    let spans = collector.spans();
    let exclusion = |number: i64| {
        let mut found = spans.iter().filter(|span| {
            span.name == "exclusion" && integer_attribute(&span.attributes, "muster.exclusion.id") == number
        });
        let span = found.next().unwrap_or_else(|| panic!("no exclusion {number} in {spans:?}"));
        assert!(found.next().is_none(), "exclusion {number} is there once");
        span
    };
    let first = exclusion(1);
    assert_eq!((hex(&first.trace_id).as_str(), hex(&first.parent_span_id).as_str()), (TRACE, PARENT));
    for (key, value) in [
        ("muster.job", "default"),
        ("muster.actor", "anonymous"),
        ("muster.exclusion.target", "task 2"),
        ("muster.exclusion.end", "lifted"),
        ("muster.exclusion.lifted_by", "anonymous"),
    ] {
        assert_eq!(text_attribute(first, key), value, "{key}");
    }
    assert!(text_attribute(first, "muster.exclusion.reason").contains("flaky NIC"));
    assert!(text_attribute(first, "muster.exclusion.lift_reason").contains("replaced"));
    let events: Vec<(&str, i64)> = first
        .events
        .iter()
        .map(|event| (event.name.as_str(), integer_attribute(&event.attributes, "muster.task")))
        .collect();
    assert_eq!(events, [("taken out", 2), ("registration refused", 2)]);
    assert!(first.end_time_unix_nano - first.start_time_unix_nano >= 50_000_000, "{first:?}");
    let second = exclusion(2);
    assert!(second.parent_span_id.is_empty(), "it stands alone");
    assert_eq!((text_attribute(second, "muster.exclusion.end"), second.events.len()), ("expired".into(), 0));
    let took = second.end_time_unix_nano - second.start_time_unix_nano;
    assert!((1_000_000_000..60_000_000_000).contains(&took), "{took} ns");
    assert_eq!(text_attribute(exclusion(3), "muster.exclusion.end"), "in-force");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_absent_collector_affects_no_call() {
    // An address that no other test uses, so that the port stays closed.
    let nobody = std::net::TcpListener::bind("127.0.0.2:0").expect("a free port");
    let endpoint = format!("http://{}", nobody.local_addr().expect("it is bound"));
    drop(nobody);
    // Many batches, so that export fails often.
    let often = [("OTEL_BSP_SCHEDULE_DELAY", "50")];
    let server = MusterServer::patient_with(&["--tasks", "2", "--otlp-endpoint", &endpoint], &often);
    run_job(&server).await;
    let lost = || {
        let scrape = send_http_request(&server, "GET", "/metrics", &[], "");
        let line = scrape.lines().find_map(|line| line.strip_prefix("muster_trace_spans_failed_total "));
        line.and_then(|count| count.parse::<u64>().ok()).unwrap_or_else(|| panic!("{scrape}"))
    };
    let began = tokio::time::Instant::now();
    while lost() < 10 {
        assert!(began.elapsed() < PATIENCE, "{} spans are lost", lost());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    server.signal(Signal::TERM);
    let ended = tokio::time::timeout(PATIENCE, async {
        while server.is_running() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    });
    assert!(ended.await.is_ok(), "it stops all the same");
    let said = server.said();
    let lines: Vec<&str> = said.lines().filter(|line| line.contains("could not be sent")).collect();
    assert!(matches!(lines[..], [_] | [_, _]), "one line a minute, and one at the end:\n{said}");
    assert!(!said.contains("BatchSpanProcessor") && !said.contains("opentelemetry"), "{said}");
}
