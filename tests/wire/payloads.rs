//! Tests of the bytes that clients read from `grpc-status-details-bin`: a map of payloads by type name, with the
//! same names in both generations.

use muster::proto::CoordinatedTask;
use muster::proto::tensorflow as a;
use muster::proto::xla::coordination as c;
use prost::Message as _;

use crate::raw::{GENERATION_A, GENERATION_C, RawClient, RawResponse, grpc_framed, receive_response};
use crate::second_client::SecondClient;
use crate::support::MusterServer;
use crate::support::answer::{BARRIER_ERROR, MISMATCH_ERROR, SERVICE_ERROR};

/// Returns one entry of the map: field 1 of the container, with the key as its field 1 and the value as its
/// field 2. An empty value is encoded too.
fn details_entry(name: &str, value: &[u8]) -> Vec<u8> {
    let short = |bytes: &[u8]| u8::try_from(bytes.len()).ok().filter(|&n| n < 0x80).expect("a short field");
    let mut inner = vec![0x0A, short(name.as_bytes())];
    inner.extend(name.as_bytes());
    inner.extend([0x12, short(value)]);
    inner.extend(value);
    let mut entry = vec![0x0A, short(&inner)];
    entry.extend(inner);
    entry
}

/// Asserts that the details consist of these entries, in any order.
fn assert_details(back: &RawResponse, entries: &[Vec<u8>]) {
    let details = back.details.as_deref().unwrap_or_else(|| panic!("no details: {back:?}"));
    assert_eq!(details.len(), entries.iter().map(Vec::len).sum::<usize>(), "{details:x?}");
    let mut rest = details;
    while let [_, length, ..] = rest {
        let (one, further) = rest.split_at(usize::from(*length) + 2);
        assert!(entries.iter().any(|entry| entry == one), "{one:x?} is none of {entries:x?}");
        rest = further;
    }
}

struct PayloadFixture {
    server: MusterServer,
    service: u64,
}

impl PayloadFixture {
    async fn start() -> (Self, RawClient) {
        let server = MusterServer::patient(&["--tasks", "2", "--log", "error"]);
        let service = SecondClient::register(&server, "default").await.service_incarnation();
        let raw = RawClient::connect(server.grpc, "default").await;
        (Self { server, service }, raw)
    }

    fn incarnations(&self) -> Option<c::Incarnations> {
        Some(c::Incarnations { service_incarnation: self.service, ..Default::default() })
    }
}

fn coordinated_task(named: bool, task_id: i32) -> Option<CoordinatedTask> {
    Some(CoordinatedTask { named, task_id, recoverable: false })
}

#[tokio::test(flavor = "multi_thread")]
async fn the_services_own_word_is_an_empty_payload_that_is_there() {
    let (rig, mut raw) = PayloadFixture::start().await;
    let expected = [details_entry("type.googleapis.com/tensorflow.CoordinationServiceError", b"")];
    let request = a::TryGetKeyValueRequest { key: "none".into() };
    let back = raw.call(&format!("{GENERATION_A}/TryGetKeyValue"), &request).await;
    assert_eq!((back.http, back.code), (200, Some(5)), "{back:?}");
    assert_details(&back, &expected);
    let request = c::TryGetKeyValueRequest { incarnations: rig.incarnations(), key: "none".into() };
    let back = raw.call(&format!("{GENERATION_C}/TryGetKeyValue"), &request).await;
    assert_eq!((back.http, back.code), (200, Some(5)), "{back:?}");
    assert_details(&back, &expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn already_exists_has_no_details() {
    let (rig, mut raw) = PayloadFixture::start().await;
    let kv = || Some(c::KeyValueEntry { key: "k".into(), value: "v".into() });
    let insert =
        || c::InsertKeyValueRequest { incarnations: rig.incarnations(), kv: kv(), allow_overwrite: false };
    let path = format!("{GENERATION_C}/InsertKeyValue");
    assert_eq!(raw.call(&path, &insert()).await.code, Some(0));
    let back = raw.call(&path, &insert()).await;
    assert_eq!((back.code, back.details), (Some(6), None));
    let kv = Some(a::KeyValueEntry { key: "k".into(), value: "v".into() });
    let request = a::InsertKeyValueRequest { kv, allow_overwrite: false };
    let back = raw.call(&format!("{GENERATION_A}/InsertKeyValue"), &request).await;
    assert_eq!((back.code, back.details), (Some(6), None));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_barrier_is_named_with_its_counter() {
    let (rig, mut raw) = PayloadFixture::start().await;
    let own_word = details_entry(SERVICE_ERROR, b"");
    let barrier = |counter| c::BarrierRequest {
        incarnations: rig.incarnations(),
        barrier_id: "step".into(),
        barrier_timeout_in_ms: 1,
        counter,
        ..Default::default()
    };
    let path = format!("{GENERATION_C}/Barrier");
    // A counter of 0 is omitted.
    let back = raw.call(&path, &barrier(0)).await;
    assert_eq!(back.code, Some(4), "{back:?}");
    assert_details(&back, &[own_word.clone(), details_entry(BARRIER_ERROR, b"\x0A\x04step")]);
    let back = raw.call(&path, &barrier(1)).await;
    assert_eq!(back.code, Some(4), "{back:?}");
    assert_details(&back, &[own_word.clone(), details_entry(BARRIER_ERROR, b"\x0A\x04step\x10\x01")]);
    let request = a::BarrierRequest {
        barrier_id: "step".into(),
        barrier_timeout_in_ms: 1,
        source_task: coordinated_task(false, 0),
        counter: 2,
        ..Default::default()
    };
    let back = raw.call(&format!("{GENERATION_A}/Barrier"), &request).await;
    assert_eq!(back.code, Some(4), "{back:?}");
    assert_details(&back, &[own_word, details_entry(BARRIER_ERROR, b"\x0A\x04step\x10\x02")]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_mismatch_tells_the_service_incarnation_in_eight_bytes() {
    let (rig, mut raw) = PayloadFixture::start().await;
    let mut value = vec![0x09];
    value.extend(rig.service.to_le_bytes());
    let expected = [details_entry(SERVICE_ERROR, b""), details_entry(MISMATCH_ERROR, &value)];
    let wrong = c::Incarnations { service_incarnation: rig.service ^ 1, ..Default::default() };
    for incarnations in [None, Some(wrong)] {
        let request = c::HeartbeatRequest { incarnations, incarnation: 0xAAAA, source_task_id: 0 };
        let back = raw.call(&format!("{GENERATION_C}/Heartbeat"), &request).await;
        assert_eq!(back.code, Some(13), "{back:?}");
        assert_details(&back, &expected);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reported_error_names_its_task_as_the_generation_of_the_reader_does() {
    let (rig, mut raw) = PayloadFixture::start().await;
    // A poll must be held: an error without a poll fails every task.
    let poll = a::PollForErrorRequest { source_task: coordinated_task(false, 0) };
    let request = raw.request(&format!("{GENERATION_A}/PollForError"));
    let (listening, mut stream) = raw.begin_request(request).await.expect("a stream");
    stream.send_data(grpc_framed(&poll.encode_to_vec()).into(), true).expect("an open stream");
    let report = a::ReportErrorToServiceRequest {
        error_code: 10,
        error_message: "operator says stop".into(),
        error_origin: coordinated_task(false, 1),
    };
    let back = raw.call(&format!("{GENERATION_A}/ReportErrorToService"), &report).await;
    assert_eq!(back.code, Some(0), "{back:?}");
    // `reported` is field 3; the task is field 4.
    let back = receive_response(listening).await.expect("an answer");
    assert_eq!((back.code, back.message.as_str()), (Some(10), "operator says stop"));
    assert_details(&back, &[details_entry(SERVICE_ERROR, b"\x18\x01\x22\x02\x10\x01")]);
    let poll = c::PollForErrorRequest { incarnations: rig.incarnations(), source_task_id: 0 };
    let back = raw.call(&format!("{GENERATION_C}/PollForError"), &poll).await;
    assert_eq!((back.code, back.message.as_str()), (Some(10), "operator says stop"));
    assert_details(&back, &[details_entry(SERVICE_ERROR, b"\x18\x01\x20\x01")]);
    let path = format!("{GENERATION_A}/PollForError");
    let back = raw.call(&path, &a::PollForErrorRequest { source_task: coordinated_task(false, 0) }).await;
    assert_details(&back, &[details_entry(SERVICE_ERROR, b"\x18\x01\x22\x02\x10\x01")]);
    // A client that names its job reads names.
    let back = raw.call(&path, &a::PollForErrorRequest { source_task: coordinated_task(true, 0) }).await;
    assert_details(&back, &[details_entry(SERVICE_ERROR, b"\x18\x01\x22\x0E\x0A\x0Ajax_worker\x10\x01")]);
    drop(rig.server);
}
