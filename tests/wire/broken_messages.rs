//! Tests of malformed messages: cut off, random, wrongly framed, or wrongly compressed. The server must answer each
//! with a status, and continue.

use fastrand::Rng;
use h2::client::ResponseFuture;
use muster::proto::{CoordinatedTask, tensorflow as a, xla::coordination as c};
use prost::Message as _;
use prost::bytes::Bytes;

use crate::raw::{
    GENERATION_A, GENERATION_C, RawClient, RawResponse, grpc_framed, gzip, message_with_prefix,
    output_if_ready, receive_response,
};
use crate::second_client::SecondClient;
use crate::support::MusterServer;

/// Starts a server with the second client's job and another one.
async fn start_server_and_second_client() -> (MusterServer, SecondClient, RawClient) {
    let server = MusterServer::patient(&["--job", "witness=2", "--job", "target=3", "--log", "error"]);
    let witness = SecondClient::register(&server, "witness").await;
    let raw = RawClient::connect(server.grpc, "target").await;
    (server, witness, raw)
}

/// Returns a valid message of every method of both generations, with every field set.
fn sample_requests() -> Vec<(String, Vec<u8>)> {
    let task = |task_id| Some(CoordinatedTask { named: true, task_id, recoverable: true });
    let kv = Some(a::KeyValueEntry { key: "k".into(), value: "v".into() });
    let device = vec![prost_types::Any { type_url: "x".into(), value: vec![1, 2, 3] }];
    let key = || "some/key".to_owned();
    let of_a: Vec<(&str, Vec<u8>)> = vec![
        ("RegisterTask", a::RegisterTaskRequest { incarnation: 7, source_task: task(2) }.encode_to_vec()),
        ("Heartbeat", a::HeartbeatRequest { incarnation: 7, source_task: task(2) }.encode_to_vec()),
        ("PollForError", a::PollForErrorRequest { source_task: task(2) }.encode_to_vec()),
        ("ShutdownTask", a::ShutdownTaskRequest { source_task: task(2) }.encode_to_vec()),
        ("ResetTask", a::ResetTaskRequest { source_task: task(2) }.encode_to_vec()),
        (
            "WaitForAllTasks",
            a::WaitForAllTasksRequest { source_task: task(2), device_info: Some(a::DeviceInfo { device }) }
                .encode_to_vec(),
        ),
        (
            "ReportErrorToService",
            a::ReportErrorToServiceRequest { error_code: 3, error_message: key(), error_origin: task(2) }
                .encode_to_vec(),
        ),
        ("ReportErrorToTask", a::ReportErrorToTaskRequest::default().encode_to_vec()),
        (
            "GetTaskState",
            a::GetTaskStateRequest { source_task: vec![CoordinatedTask::default(); 3] }.encode_to_vec(),
        ),
        ("GetJobState", a::GetJobStateRequest { job_name: key() }.encode_to_vec()),
        (
            "WatchJobState",
            a::WatchJobStateRequest { job_name: key(), version_number: 1 << 40 }.encode_to_vec(),
        ),
        ("InsertKeyValue", a::InsertKeyValueRequest { kv, allow_overwrite: true }.encode_to_vec()),
        ("GetKeyValue", a::GetKeyValueRequest { key: key() }.encode_to_vec()),
        ("TryGetKeyValue", a::TryGetKeyValueRequest { key: key() }.encode_to_vec()),
        ("IncrementKeyValue", a::IncrementKeyValueRequest { key: key(), increment: -1 }.encode_to_vec()),
        ("GetKeyValueDir", a::GetKeyValueDirRequest { directory_key: key() }.encode_to_vec()),
        ("DeleteKeyValue", a::DeleteKeyValueRequest { key: key(), is_directory: true }.encode_to_vec()),
        (
            "Barrier",
            a::BarrierRequest {
                barrier_id: key(),
                barrier_timeout_in_ms: 50,
                tasks: vec![CoordinatedTask::default(); 3],
                source_task: task(1),
                counter: 1 << 33,
            }
            .encode_to_vec(),
        ),
        (
            "CancelBarrier",
            a::CancelBarrierRequest { barrier_id: key(), source_task: task(1), counter: 9 }.encode_to_vec(),
        ),
        (
            "GetAliveTasks",
            a::GetAliveTasksRequest { requesting_task: task(1), tasks: vec![CoordinatedTask::default(); 2] }
                .encode_to_vec(),
        ),
    ];
    let incarnations = Some(c::Incarnations { task_id: 1, task_incarnation: 7, service_incarnation: 8 });
    let kv = Some(c::KeyValueEntry { key: "k".into(), value: "v".into() });
    let of_c: Vec<(&str, Vec<u8>)> = vec![
        ("RegisterTask", c::RegisterTaskRequest { incarnation: 7, source_task_id: 2 }.encode_to_vec()),
        (
            "Heartbeat",
            c::HeartbeatRequest { incarnations, incarnation: 7, source_task_id: 2 }.encode_to_vec(),
        ),
        ("PollForError", c::PollForErrorRequest { incarnations, source_task_id: 2 }.encode_to_vec()),
        ("ShutdownTask", c::ShutdownTaskRequest { incarnations, source_task_id: 2 }.encode_to_vec()),
        (
            "ReportErrorToService",
            c::ReportErrorToServiceRequest {
                incarnations,
                source_task_id: 2,
                error_code: 3,
                error_message: key(),
            }
            .encode_to_vec(),
        ),
        ("WatchTasks", c::WatchTasksRequest { incarnations, version_number: 1 << 40 }.encode_to_vec()),
        (
            "InsertKeyValue",
            c::InsertKeyValueRequest { incarnations, kv, allow_overwrite: true }.encode_to_vec(),
        ),
        ("GetKeyValue", c::GetKeyValueRequest { incarnations, key: key() }.encode_to_vec()),
        ("TryGetKeyValue", c::TryGetKeyValueRequest { incarnations, key: key() }.encode_to_vec()),
        (
            "IncrementKeyValue",
            c::IncrementKeyValueRequest { incarnations, key: key(), increment: -1 }.encode_to_vec(),
        ),
        ("GetKeyValueDir", c::GetKeyValueDirRequest { incarnations, directory_key: key() }.encode_to_vec()),
        (
            "DeleteKeyValue",
            c::DeleteKeyValueRequest { incarnations, key: key(), is_directory: true }.encode_to_vec(),
        ),
        (
            "Barrier",
            c::BarrierRequest {
                incarnations,
                barrier_id: key(),
                barrier_timeout_in_ms: 50,
                task_ids: vec![0, 1, 2],
                source_task_id: 1,
                counter: 1 << 33,
            }
            .encode_to_vec(),
        ),
        (
            "CancelBarrier",
            c::CancelBarrierRequest { incarnations, barrier_id: key(), counter: 9, source_task_id: 1 }
                .encode_to_vec(),
        ),
        (
            "GetAliveTasks",
            c::GetAliveTasksRequest { incarnations, requesting_task_id: 1, task_ids: vec![0, 1] }
                .encode_to_vec(),
        ),
    ];
    let path = |generation: &'static str| move |(name, message)| (format!("{generation}/{name}"), message);
    of_a.into_iter().map(path(GENERATION_A)).chain(of_c.into_iter().map(path(GENERATION_C))).collect()
}

/// The methods in which a random message may be a call that waits.
const MAY_WAIT: [&str; 9] = [
    "RegisterTask",
    "PollForError",
    "ShutdownTask",
    "WaitForAllTasks",
    "WatchJobState",
    "WatchTasks",
    "GetKeyValue",
    "Barrier",
    "GetAliveTasks",
];

/// Sends bodies all at once. Every one is answered with a status, unless it is by chance a call that waits.
async fn send_all_and_check_answers(
    raw: &mut RawClient,
    bodies: impl IntoIterator<Item = (String, Vec<u8>)>,
) {
    let mut answers: Vec<(String, Vec<u8>, ResponseFuture)> = Vec::new();
    for (path, body) in bodies {
        let (response, mut stream) =
            raw.begin_request(raw.request(&path)).await.expect("the connection lives");
        let _ = stream.send_data(Bytes::from(body.clone()), true);
        answers.push((path, body, response));
    }
    // The calls of one connection are processed in order: once this one is answered, every call before it
    // that does not wait is answered too.
    let sentinel = a::TryGetKeyValueRequest { key: "sentinel".into() };
    let back = raw.call(&format!("{GENERATION_A}/TryGetKeyValue"), &sentinel).await;
    assert_eq!(back.code, Some(5), "{back:?}");
    for (path, body, response) in answers {
        let may_wait = path.rsplit_once('/').is_some_and(|(_, method)| MAY_WAIT.contains(&method));
        let answer = if may_wait {
            output_if_ready(receive_response(response))
        } else {
            Some(receive_response(response).await)
        };
        if let Some(back) = answer {
            let back = back.unwrap_or_else(|error| panic!("{path} with {} bytes: {error}", body.len()));
            assert!(back.http == 200 && back.code.is_some(), "{path} with {} bytes: {back:?}", body.len());
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_that_are_cut_off_anywhere_are_answered() {
    let (server, witness, mut raw) = start_server_and_second_client().await;
    for (path, message) in sample_requests() {
        let cut = (0..=message.len()).map(|end| (path.clone(), grpc_framed(&message[..end])));
        send_all_and_check_answers(&mut raw, cut).await;
    }
    raw.hang_up();
    witness.assert_served().await;
    assert!(server.is_running());
}

#[tokio::test(flavor = "multi_thread")]
async fn random_messages_are_answered() {
    let (server, witness, mut raw) = start_server_and_second_client().await;
    let mut rng = Rng::with_seed(1);
    for (path, message) in sample_requests() {
        let mut bodies = Vec::new();
        for _ in 0..100 {
            // Entirely random, or a valid one with a few changed bytes, which gets further.
            let mut bytes: Vec<u8> = (0..rng.usize(0..80)).map(|_| rng.u8(..)).collect();
            if rng.bool() && !message.is_empty() {
                bytes = message.clone();
                for _ in 0..rng.usize(1..4) {
                    let place = rng.usize(0..bytes.len());
                    bytes[place] = rng.u8(..);
                }
            }
            bodies.push((path.clone(), grpc_framed(&bytes)));
        }
        send_all_and_check_answers(&mut raw, bodies).await;
    }
    raw.hang_up();
    witness.assert_served().await;
    assert!(server.is_running());
}

#[tokio::test(flavor = "multi_thread")]
async fn fields_of_any_type_and_absurd_lengths_are_answered() {
    let (server, witness, mut raw) = start_server_and_second_client().await;
    // Every field number of the methods, as every wire type, with impossible lengths.
    let fields: Vec<Vec<u8>> = (0..=8u8)
        .flat_map(|field| (0..8u8).map(move |wire_type| field << 3 | wire_type))
        .flat_map(|tag| {
            [
                vec![tag],
                vec![tag, 0x00],
                vec![tag, 0x7F, 0x01],
                vec![tag, 0xFF, 0xFF, 0xFF, 0xFF, 0x0F],
                vec![tag, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0x01],
                vec![tag, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x01],
            ]
        })
        .collect();
    // Deeply nested groups and messages.
    let deep = [vec![0x0B; 100_000], [0x0A, 0x7F].repeat(50_000)];
    for (path, _) in sample_requests() {
        send_all_and_check_answers(&mut raw, fields.iter().map(|bytes| (path.clone(), grpc_framed(bytes))))
            .await;
        for bytes in &deep {
            send_all_and_check_answers(&mut raw, [(path.clone(), grpc_framed(bytes))]).await;
        }
    }
    raw.hang_up();
    witness.assert_served().await;
    assert!(server.is_running());
}

fn insert_path() -> String {
    format!("{GENERATION_A}/InsertKeyValue")
}

fn encode_insert_request(value: &[u8]) -> Vec<u8> {
    let kv = Some(a::KeyValueEntry { key: "k".into(), value: Bytes::copy_from_slice(value) });
    a::InsertKeyValueRequest { kv, allow_overwrite: true }.encode_to_vec()
}

async fn send_insert(raw: &mut RawClient, encoding: Option<&str>, body: Vec<u8>) -> RawResponse {
    let mut request = raw.request(&insert_path());
    if let Some(encoding) = encoding {
        request = request.header("grpc-encoding", encoding);
    }
    raw.send_body(request, body).await.expect("an answer")
}

#[tokio::test(flavor = "multi_thread")]
async fn framing_that_is_wrong_is_answered() {
    let (_server, witness, mut raw) = start_server_and_second_client().await;
    let message = encode_insert_request(b"v");
    let length = u32::try_from(message.len()).expect("a short message");
    let wrong = [
        Vec::new(),
        vec![0],
        vec![0, 0, 0, 0],
        message_with_prefix(0, length + 1, &message),
        message_with_prefix(0, length - 1, &message),
        message_with_prefix(0, 0, &message),
        message_with_prefix(0, u32::MAX, &message),
        message_with_prefix(2, length, &message),
        message_with_prefix(255, length, &message),
        // The flag says compressed, but no header names the compression.
        message_with_prefix(1, length, &message),
        [grpc_framed(&message), grpc_framed(&message)].concat(),
        [grpc_framed(&message), vec![0]].concat(),
    ];
    for body in wrong {
        let back = send_insert(&mut raw, None, body.clone()).await;
        assert!(back.code.is_some_and(|code| code != 0), "{body:x?}: {back:?}");
    }
    assert_eq!(send_insert(&mut raw, None, grpc_framed(&message)).await.code, Some(0));
    witness.assert_served().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn gzip_is_inflated_and_what_only_looks_like_it_is_refused() {
    let (_server, witness, mut raw) = start_server_and_second_client().await;
    // No repetitions, in which damage could go unnoticed.
    let mut rng = Rng::with_seed(2);
    let value: Vec<u8> = (0..100_000).map(|_| rng.u8(0..16)).collect();
    let message = encode_insert_request(&value);
    let compressed = gzip(&message);
    let length = |bytes: &[u8]| u32::try_from(bytes.len()).expect("a short message");
    let whole = message_with_prefix(1, length(&compressed), &compressed);
    assert_eq!(send_insert(&mut raw, Some("gzip"), whole.clone()).await.code, Some(0));
    // The header announces compression for messages with the flag; others are read as they are.
    assert_eq!(send_insert(&mut raw, Some("gzip"), grpc_framed(&message)).await.code, Some(0));
    let garbage: Vec<u8> = (0..200u8).collect();
    let cut = &compressed[..compressed.len() - 9];
    let mut damaged = compressed.clone();
    damaged[compressed.len() / 2] ^= 0x55;
    for bytes in [&garbage[..], cut, &damaged, b"", &compressed[..5]] {
        let back = send_insert(&mut raw, Some("gzip"), message_with_prefix(1, length(bytes), bytes)).await;
        assert!(
            back.code.is_some_and(|code| code != 0),
            "{} bytes {:x?}...: {back:?}",
            bytes.len(),
            bytes.first()
        );
    }
    assert!(send_insert(&mut raw, Some("identity"), whole).await.code.is_some_and(|code| code != 0));
    witness.assert_served().await;
}
