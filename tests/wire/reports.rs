//! Tests of valid and invalid transfer reports.

use muster::proto::muster::v1 as wire;
use prost::Message as _;
use serde_json::Value;

use crate::raw::{RawClient, RawResponse, grpc_framed};
use crate::second_client::SecondClient;
use crate::support::{MusterServer, Reporter};

const PATH: &str = "/muster.v1.Transfers/Report";

async fn start_server_and_second_client() -> (MusterServer, SecondClient, RawClient) {
    let server = MusterServer::patient(&["--job", "witness=2", "--job", "other=2", "--log", "error"]);
    let witness = SecondClient::register(&server, "witness").await;
    let raw = RawClient::connect(server.grpc, "witness").await;
    (server, witness, raw)
}

/// Returns a report of the second client's first task with its present incarnation.
fn empty_report(sequence: u64) -> wire::TransferReport {
    wire::TransferReport { task: 0, incarnation: 0xAAAA, sequence, ..wire::TransferReport::default() }
}

async fn send_report(raw: &mut RawClient, bytes: Vec<u8>) -> RawResponse {
    raw.send_body(raw.request(PATH), grpc_framed(&bytes)).await.expect("an answer")
}

/// Returns the server's view of a job.
fn get_json(server: &MusterServer, path: &str) -> Value {
    server.get(path).json()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transfer_report_is_shown_with_its_first_cause_and_becomes_an_event() {
    let (server, witness, _) = start_server_and_second_client().await;
    let nothing = get_json(&server, "/api/v1/jobs/witness/transfers");
    assert_eq!((&nothing["reporting"], &nothing["reported_at"]), (&0.into(), &Value::Null), "{nothing}");
    let (client, caller) = witness.task(0);
    let mut worker = Reporter::new(client, 0, caller.incarnation);
    worker.move_bytes(1, "shm", 1000, 30);
    worker.connect(1, "unix", 4, 3);
    worker.end("completed", 5);
    worker.fail(1, "stalled", "nothing moved for 5 s", 0);
    let ack = worker.say().await.expect("it is taken");
    assert_eq!(ack.interval_ms, 1000);
    let (_, other) = witness.task(1);
    let mut second = Reporter::new(witness.task(1).0, 1, other.incarnation);
    second.move_bytes(0, "shm", 30, 990);
    second.say().await.expect("it is taken");

    let page = get_json(&server, "/api/v1/jobs/witness/transfers");
    assert_eq!((&page["reporting"], &page["taken"]), (&2.into(), &2.into()), "{page}");
    let pair = &page["pairs"][0];
    assert_eq!(
        (&pair["from"], &pair["to"], &pair["transport"]),
        (&0.into(), &1.into(), &"shm".into()),
        "{page}"
    );
    assert_eq!(
        (&pair["sent"], &pair["received"]),
        (&1000.into(), &990.into()),
        "each side says what it knows"
    );
    let connection = &page["connections"][0];
    assert_eq!((&connection["lanes"], &connection["launches"]), (&4.into(), &3.into()), "{page}");
    let failure = &page["failures"][0];
    assert_eq!((&failure["reason"], &failure["launches"]), (&"stalled".into(), &1.into()), "{page}");
    assert_eq!(failure["first"]["text"], "nothing moved for 5 s", "{page}");
    let first = get_json(&server, "/api/v1/jobs/witness/transfers?task=0&transport=shm&limit=1");
    assert_eq!((first["pairs"].as_array().map(Vec::len), first["next"].is_u64()), (Some(1), true), "{first}");
    let rest = get_json(&server, &format!("/api/v1/jobs/witness/transfers?after={}", first["next"]));
    assert_eq!((&rest["pairs"][0]["from"], &rest["next"]), (&1.into(), &Value::Null), "{rest}");
    let tasks = get_json(&server, "/api/v1/jobs/witness/transfers/tasks?failed=true");
    assert_eq!((&tasks["tasks"][0]["task"], &tasks["tasks"][1]), (&0.into(), &Value::Null), "{tasks}");
    let events = get_json(&server, "/api/v1/jobs/witness/events");
    let told = |event: &&Value| event["kind"] == "transfer-failed" && event["error"] == "stalled";
    let told = events["events"].as_array().into_iter().flatten().find(told).expect("it is told of");
    assert_eq!((&told["task"], &told["with"], &told["count"]), (&0.into(), &1.into(), &1.into()), "{told}");
    assert_eq!(get_json(&server, "/api/v1/jobs/other/transfers")["reporting"], 0, "each job has its own");
    witness.assert_served().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn reports_of_anybody_else_are_refused_with_the_reason_and_change_nothing() {
    let (server, witness, mut raw) = start_server_and_second_client().await;
    let pairs = |peer| vec![wire::PairTotals { peer, sent_bytes: 1, ..wire::PairTotals::default() }];
    let cases = [
        (10, "it has restarted", wire::TransferReport { incarnation: 0xBBBB, ..empty_report(1) }),
        (10, "it has restarted", wire::TransferReport { task: 1, ..empty_report(1) }),
        (3, "there is no task", wire::TransferReport { task: 2, ..empty_report(1) }),
        (3, "there is no task", wire::TransferReport { task: u32::MAX, ..empty_report(1) }),
        (3, "a peer 2", wire::TransferReport { pairs: pairs(2), ..empty_report(1) }),
        (3, "a peer 4294967295", wire::TransferReport { pairs: pairs(u32::MAX), ..empty_report(1) }),
    ];
    for (code, why, report) in cases {
        let back = send_report(&mut raw, report.encode_to_vec()).await;
        assert_eq!(back.code, Some(code), "{back:?}");
        assert!(back.message.contains(why), "{back:?}");
    }
    let mut stranger = RawClient::connect(server.grpc, "other").await;
    let back = send_report(&mut stranger, empty_report(1).encode_to_vec()).await;
    assert_eq!(back.code, Some(9), "its task has not registered: {back:?}");
    let mut nowhere = RawClient::connect(server.grpc, "nowhere").await;
    assert_eq!(send_report(&mut nowhere, empty_report(1).encode_to_vec()).await.code, Some(9));
    let page = get_json(&server, "/api/v1/jobs/witness/transfers");
    assert_eq!((&page["reporting"], &page["pairs"][0]), (&0.into(), &Value::Null), "{page}");
    witness.assert_served().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn reports_that_are_none_or_that_ask_for_memory_are_refused_before_they_get_any() {
    let (server, witness, mut raw) = start_server_and_second_client().await;
    // Two bytes for each row, which would be dozens in memory.
    let rows = |field: u8, count: usize| {
        [empty_report(1).encode_to_vec(), [field << 3 | 2, 0].repeat(count)].concat()
    };
    let before = server.peak_resident_bytes();
    for (bytes, code) in [
        (vec![0xFF; 100], 3),
        (vec![0x08], 3),
        (vec![0x22, 0x7F, 0x01], 3),
        // A transport that is no valid text.
        (vec![0x22, 0x04, 0x12, 0x02, 0xC3, 0x28], 3),
        (rows(4, 16_385), 8),
        (rows(5, 4_097), 8),
        (rows(6, 65), 8),
        (rows(9, 65), 8),
        (vec![0; (1 << 20) + 1], 8),
        (rows(4, 300_000), 8),
    ] {
        let length = bytes.len();
        for _ in 0..20 {
            let back = send_report(&mut raw, bytes.clone()).await;
            assert_eq!(back.code, Some(code), "{length} bytes: {back:?}");
        }
    }
    let more = server.peak_resident_bytes().saturating_sub(before);
    assert!(more < 32 << 20, "{more} bytes more than before");
    let odd = wire::PairTotals {
        peer: 1,
        transport: "\u{1b}[31m".into(),
        sent_bytes: u64::MAX,
        received_bytes: 7,
        ..wire::PairTotals::default()
    };
    let outcome = wire::OutcomeTotals { outcome: "x".repeat(100_000), launches: 2 };
    let failure = wire::Failure {
        at: u64::MAX,
        peer: 1,
        reason: "?".into(),
        text: "\u{1b}[2J<script>\n".repeat(9999),
        ..wire::Failure::default()
    };
    let strange = wire::TransferReport {
        pairs: vec![odd.clone(), odd],
        outcomes: vec![outcome],
        failures: vec![failure],
        ..empty_report(2)
    };
    for answer in 0..2 {
        // The second report is not newer: it is answered too, and changes nothing.
        let ack: wire::TransferReportAck = send_report(&mut raw, strange.encode_to_vec()).await.decode();
        assert_eq!(ack.interval_ms, 1000, "{answer}");
    }
    let page = get_json(&server, "/api/v1/jobs/witness/transfers");
    assert_eq!((&page["taken"], &page["repeated"]), (&1.into(), &1.into()), "{page}");
    assert_eq!(
        (&page["pairs"][0]["transport"], &page["pairs"][0]["sent"]),
        (&"other".into(), &u64::MAX.into())
    );
    assert_eq!(
        (&page["failures"][0]["reason"], &page["failures"][0]["launches"]),
        (&"other".into(), &2.into())
    );
    let text = page["failures"][0]["first"]["text"].as_str().expect("a text");
    assert!(text.len() < 2000 && !text.contains(['\u{1b}', '\n']), "{text}");
    witness.assert_served().await;
}
