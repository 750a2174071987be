//! Tests of valid and invalid answers of workers to requests for stacks.

use muster::proto::muster::v1 as wire;
use prost::Message as _;
use serde_json::json;

use crate::raw::{RawClient, RawResponse, grpc_framed};
use crate::second_client::SecondClient;
use crate::support::{MusterServer, Reporter};

const PATH: &str = "/muster.v1.Stacks/Answer";
const STACKS: &str = "/api/v1/jobs/witness/stacks";

/// Returns an answer of the second client's first task with its present incarnation.
fn answer(request: u64) -> wire::StackAnswer {
    let thread = wire::StackThread {
        name: "program".into(),
        main: true,
        frames: vec!["step 3".into(), "waits at barrier a".into()],
        for_ms: Some(2_000),
    };
    wire::StackAnswer { request, task: 0, incarnation: 0xAAAA, threads: vec![thread] }
}

async fn send_answer(raw: &mut RawClient, bytes: Vec<u8>) -> RawResponse {
    raw.send_body(raw.request(PATH), grpc_framed(&bytes)).await.expect("an answer")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_learns_of_a_request_by_its_report_and_answers_once() {
    let server = MusterServer::patient(&["--job", "witness=2", "--log", "error"]);
    let witness = SecondClient::register(&server, "witness").await;
    let mut raw = RawClient::connect(server.grpc, "witness").await;
    let (client, caller) = witness.task(0);
    let mut worker = Reporter::new(client, 0, caller.incarnation);
    assert_eq!(worker.say().await.expect("it is taken").stacks_request, 0);
    assert_eq!(send_answer(&mut raw, answer(1).encode_to_vec()).await.code, Some(5), "nobody has asked");
    assert_eq!(server.send("POST", STACKS, r#"{"tasks": "0", "reason": "a test"}"#).status, 202);
    assert_eq!(worker.say().await.expect("it is taken").stacks_request, 1);
    let rows = |count: usize| [answer(1).encode_to_vec(), [4 << 3 | 2, 0].repeat(count)].concat();
    let deep = |count: usize| {
        let thread = wire::StackThread { frames: vec![String::new(); count], ..wire::StackThread::default() };
        wire::StackAnswer { threads: vec![thread], ..answer(1) }.encode_to_vec()
    };
    let before = server.peak_resident_bytes();
    for (code, bytes) in [
        (3, vec![0xFF; 100]),
        (3, vec![0x22, 0x04, 0x0A, 0x02, 0xC3, 0x28]),
        (3, rows(256)),
        (3, rows(100_000)),
        (3, deep(129)),
        (3, deep(100_000)),
        (8, vec![0; (256 << 10) + 1]),
        (5, answer(2).encode_to_vec()),
        (5, wire::StackAnswer { task: 7, ..answer(1) }.encode_to_vec()),
        (5, wire::StackAnswer { task: u32::MAX, ..answer(1) }.encode_to_vec()),
        (9, wire::StackAnswer { task: 1, ..answer(1) }.encode_to_vec()),
        (10, wire::StackAnswer { incarnation: 0xBBBB, ..answer(1) }.encode_to_vec()),
    ] {
        for _ in 0..20 {
            let back = send_answer(&mut raw, bytes.clone()).await;
            assert_eq!(back.code, Some(code), "{} bytes: {back:?}", bytes.len());
        }
    }
    let more = server.peak_resident_bytes().saturating_sub(before);
    assert!(more < 32 << 20, "{more} bytes more than before");
    send_answer(&mut raw, answer(1).encode_to_vec()).await.decode::<wire::StackAnswerAck>();
    let again = send_answer(&mut raw, answer(1).encode_to_vec()).await;
    assert_eq!(again.code, Some(6), "{again:?}");
    assert_eq!(worker.say().await.expect("it is taken").stacks_request, 0);
    let view = server.get(STACKS).json();
    assert_eq!(view["answered"], json!([{"first": 0, "last": 0}]), "{view}");
    let group = &view["groups"][0];
    let (source, innermost) = (&group["source"], &group["frames"][1]["function"]);
    assert_eq!((source, innermost), (&"worker".into(), &"waits at barrier a".into()), "{view}");
    assert!(group["since"].is_u64(), "{view}");
    witness.assert_served().await;
}
