//! Tests of hundreds of thousands of waiting calls: they are bounded, refused beyond the bound, and removed when
//! their callers vanish.

use h2::client::ResponseFuture;
use muster::proto::tensorflow as a;
use prost::Message as _;
use prost::bytes::Bytes;

use crate::raw::{GENERATION_A, RawClient, grpc_framed, output_if_ready, receive_response};
use crate::second_client::SecondClient;
use crate::support::MusterServer;

/// The default bound on waiting calls of a job.
const WAITERS: usize = 1 << 18;
const CONNECTIONS: usize = 30;
const CALLS_EACH: usize = 10_000;
const MIB: u64 = 1 << 20;

/// Fills a job with calls that wait for keys which are never written. Returns the number of refused calls.
async fn fill_job_with_waiting_calls(
    server: &MusterServer,
) -> (Vec<(RawClient, Vec<ResponseFuture>)>, usize) {
    let mut connections = Vec::new();
    let mut refused = 0;
    for _ in 0..CONNECTIONS {
        let mut raw = RawClient::connect(server.grpc, "target").await;
        let mut waiting = Vec::new();
        for n in 0..CALLS_EACH {
            let message = a::GetKeyValueRequest { key: format!("never/{}", n % 1000) };
            let (response, mut stream) = raw
                .begin_request(raw.request(&format!("{GENERATION_A}/GetKeyValue")))
                .await
                .expect("a stream");
            let _ = stream.send_data(Bytes::from(grpc_framed(&message.encode_to_vec())), true);
            waiting.push(response);
        }
        // The calls of one connection are processed in order: once this one is answered, all before it have
        // been processed.
        let sentinel = a::TryGetKeyValueRequest { key: "sentinel".into() };
        let back = raw.call(&format!("{GENERATION_A}/TryGetKeyValue"), &sentinel).await;
        assert_eq!(back.code, Some(5), "{back:?}");
        let mut still = Vec::new();
        for mut response in waiting {
            match status_if_answered(&mut response) {
                Some(code) => {
                    assert_eq!(code, 8, "more than may wait are refused");
                    refused += 1;
                }
                None => still.push(response),
            }
        }
        connections.push((raw, still));
    }
    (connections, refused)
}

/// Returns the status of the answer, if it has arrived. Refusals are trailers only.
fn status_if_answered(response: &mut ResponseFuture) -> Option<i32> {
    let answer = output_if_ready(response)?.expect("an answer, not a reset");
    answer.headers().get("grpc-status")?.to_str().ok()?.parse().ok()
}

#[tokio::test(flavor = "multi_thread")]
async fn hundreds_of_thousands_of_waiting_calls_are_bounded_and_end_with_their_callers() {
    let server = MusterServer::patient(&["--job", "witness=2", "--job", "target=3", "--log", "error"]);
    let witness = SecondClient::register(&server, "witness").await;
    let before = server.resident_bytes();

    let (connections, refused) = fill_job_with_waiting_calls(&server).await;
    let waiting: usize = connections.iter().map(|(_, still)| still.len()).sum();
    assert_eq!((waiting, refused), (WAITERS, CONNECTIONS * CALLS_EACH - WAITERS));
    witness.assert_served().await;
    let full = server.resident_bytes();
    assert!(full - before < 1024 * MIB, "{} MiB for {waiting} calls", (full - before) / MIB);

    // All clients disconnect: there is room for as many again, which reuse the memory of the first.
    drop(connections);
    let mut raw = RawClient::connect(server.grpc, "target").await;
    let probe = a::GetKeyValueRequest { key: "never".into() };
    loop {
        let (mut response, mut stream) =
            raw.begin_request(raw.request(&format!("{GENERATION_A}/GetKeyValue"))).await.expect("a stream");
        let _ = stream.send_data(Bytes::from(grpc_framed(&probe.encode_to_vec())), true);
        let sentinel = a::TryGetKeyValueRequest { key: "sentinel".into() };
        raw.call(&format!("{GENERATION_A}/TryGetKeyValue"), &sentinel).await;
        if status_if_answered(&mut response).is_none() {
            break;
        }
    }
    raw.hang_up();
    let (connections, refused) = fill_job_with_waiting_calls(&server).await;
    let waiting: usize = connections.iter().map(|(_, still)| still.len()).sum();
    assert_eq!(waiting + refused, CONNECTIONS * CALLS_EACH);
    assert!(waiting > WAITERS / 2, "those of the first round have gone, only {waiting} found room");
    witness.assert_served().await;
    let again = server.resident_bytes();
    assert!(again < full + 128 * MIB, "{} MiB, {} MiB the second time", full / MIB, again / MIB);
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_beyond_the_streams_of_a_connection_wait_for_those_before() {
    let server = MusterServer::patient(&["--job", "witness=2", "--job", "target=3", "--grpc-streams", "100"]);
    let witness = SecondClient::register(&server, "witness").await;
    let mut raw = RawClient::connect(server.grpc, "target").await;
    let mut waiting = Vec::new();
    for _ in 0..100 {
        let message = a::GetKeyValueRequest { key: "never".into() };
        let (response, mut stream) =
            raw.begin_request(raw.request(&format!("{GENERATION_A}/GetKeyValue"))).await.expect("a stream");
        let _ = stream.send_data(Bytes::from(grpc_framed(&message.encode_to_vec())), true);
        waiting.push(response);
    }
    witness.assert_served().await;
    // A cancelled call makes room.
    drop(waiting.pop());
    let request = raw.request(&format!("{GENERATION_A}/TryGetKeyValue"));
    let (response, mut stream) = raw.begin_request(request).await.expect("a stream, once there is room");
    let message = a::TryGetKeyValueRequest { key: "none".into() };
    let _ = stream.send_data(Bytes::from(grpc_framed(&message.encode_to_vec())), true);
    assert_eq!(receive_response(response).await.expect("an answer").code, Some(5));
    witness.assert_served().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_caller_that_waits_for_everything_leaves_room_for_the_tasks_of_its_own_job() {
    let config = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("few-waiters.toml");
    std::fs::write(&config, "[bounds]\nwaiters = 2000\n").expect("a writable directory");
    let config = config.to_str().expect("a plain path");
    let server = MusterServer::patient(&["--tasks", "2", "--log", "error", "--config", config]);
    let witness = SecondClient::register(&server, "default").await;
    let mut raw = RawClient::connect(server.grpc, "default").await;
    let mut waiting = Vec::new();
    for n in 0..3000 {
        let message = a::GetKeyValueRequest { key: format!("never/{n}") };
        let (response, mut stream) =
            raw.begin_request(raw.request(&format!("{GENERATION_A}/GetKeyValue"))).await.expect("a stream");
        let _ = stream.send_data(Bytes::from(grpc_framed(&message.encode_to_vec())), true);
        waiting.push(response);
    }
    let sentinel = a::TryGetKeyValueRequest { key: "sentinel".into() };
    assert_eq!(raw.call(&format!("{GENERATION_A}/TryGetKeyValue"), &sentinel).await.code, Some(5));
    let refused = waiting.iter_mut().filter_map(status_if_answered).filter(|code| *code == 8).count();
    assert!(refused >= 1000, "{refused} of 3000 were refused");
    witness.assert_served().await;
}
