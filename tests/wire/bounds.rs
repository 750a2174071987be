//! Tests that input beyond a bound is refused before it costs memory.

use std::io::Write as _;

use flate2::Compression;
use flate2::write::GzEncoder;
use muster::proto::tensorflow as a;
use prost::Message as _;
use prost::bytes::Bytes;

use crate::raw::{GENERATION_A, RawClient, grpc_framed, message_with_prefix, receive_response};
use crate::second_client::SecondClient;
use crate::support::MusterServer;

const RESOURCE_EXHAUSTED: Option<i32> = Some(8);
const MIB: u64 = 1 << 20;

async fn start_server_and_second_client(further: &[&str]) -> (MusterServer, SecondClient, RawClient) {
    let arguments = [&["--job", "witness=2", "--job", "target=3", "--log", "error"], further].concat();
    let server = MusterServer::patient(&arguments);
    let witness = SecondClient::register(&server, "witness").await;
    let raw = RawClient::connect(server.grpc, "target").await;
    (server, witness, raw)
}

fn insert_path() -> String {
    format!("{GENERATION_A}/InsertKeyValue")
}

/// Returns the bytes of an insert up to its value, which has this length.
fn insert_up_to_value(value_bytes: u64) -> Vec<u8> {
    let mut kv = a::KeyValueEntry { key: "k".into(), value: Bytes::new() }.encode_to_vec();
    kv.push(0x12);
    prost::encoding::encode_varint(value_bytes, &mut kv);
    let mut message = vec![0x0A];
    prost::encoding::encode_varint(kv.len() as u64 + value_bytes, &mut message);
    message.extend(kv);
    message
}

#[tokio::test(flavor = "multi_thread")]
async fn a_value_of_a_gibibyte_is_refused_without_being_taken() {
    let (server, witness, mut raw) = start_server_and_second_client(&[]).await;
    let before = server.resident_bytes();
    let head = insert_up_to_value(1 << 30);
    let length = u32::try_from(head.len() + (1 << 30)).expect("it fits a prefix");
    let (response, mut stream) = raw.begin_request(raw.request(&insert_path())).await.expect("a stream");
    stream.send_data(Bytes::from(message_with_prefix(0, length, &head)), false).expect("an open stream");
    let sending = tokio::spawn(async move {
        // As much as the server accepts.
        let chunk = Bytes::from(vec![7u8; 1 << 20]);
        for _ in 0..1 << 10 {
            stream.reserve_capacity(chunk.len());
            match std::future::poll_fn(|cx| stream.poll_capacity(cx)).await {
                Some(Ok(room)) if stream.send_data(chunk.slice(..room), false).is_ok() => {}
                _ => return,
            }
        }
    });
    let back = receive_response(response).await.expect("an answer, not a reset");
    assert_eq!(back.code, RESOURCE_EXHAUSTED, "{back:?}");
    sending.abort();
    witness.assert_served().await;
    let moved = server.peak_resident_bytes().saturating_sub(before);
    assert!(moved < 64 * MIB, "it took {} MiB", moved / MIB);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_small_message_that_inflates_beyond_the_bound_is_refused() {
    let (server, witness, mut raw) =
        start_server_and_second_client(&["--grpc-message-bytes", "16777216"]).await;
    let before = server.resident_bytes();
    let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
    encoder.write_all(&insert_up_to_value(1 << 30)).expect("memory takes it");
    let zeros = vec![0u8; 1 << 20];
    for _ in 0..1 << 10 {
        encoder.write_all(&zeros).expect("memory takes it");
    }
    let bomb = encoder.finish().expect("memory takes it");
    assert!(bomb.len() < 2 << 20, "a small message");
    let length = u32::try_from(bomb.len()).expect("a small message");
    let request = raw.request(&insert_path()).header("grpc-encoding", "gzip");
    let back = raw.send_body(request, message_with_prefix(1, length, &bomb)).await.expect("an answer");
    assert_eq!(back.code, RESOURCE_EXHAUSTED, "{back:?}");
    witness.assert_served().await;
    let moved = server.peak_resident_bytes().saturating_sub(before);
    assert!(moved < 64 * MIB, "it took {} MiB", moved / MIB);
}

#[tokio::test(flavor = "multi_thread")]
async fn every_store_bound_is_enforced_and_named_in_the_error() {
    let config = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("bounds-of-the-store.toml");
    let bounds = "[bounds]\nkeys = 50\nkey-bytes = 100\nvalue-bytes = 1000\nstore-bytes = 20000\n";
    std::fs::write(&config, bounds).expect("a writable directory");
    let (_server, witness, mut raw) =
        start_server_and_second_client(&["--config", config.to_str().expect("a plain path")]).await;
    let path = insert_path();
    let insert = |key: String, value: usize| {
        let kv = Some(a::KeyValueEntry { key, value: vec![0u8; value].into() });
        a::InsertKeyValueRequest { kv, allow_overwrite: true }
    };
    assert_eq!(raw.call(&path, &insert("k".repeat(100), 1)).await.code, Some(0));
    assert_eq!(raw.call(&path, &insert("k".repeat(101), 1)).await.code, RESOURCE_EXHAUSTED);
    assert_eq!(raw.call(&path, &insert("v".into(), 1000)).await.code, Some(0));
    assert_eq!(raw.call(&path, &insert("v".into(), 1001)).await.code, RESOURCE_EXHAUSTED);
    // Up to the bound on keys, and then up to the bound on bytes.
    let mut codes = Vec::new();
    for n in 0..60 {
        codes.push(raw.call(&path, &insert(format!("n{n}"), 1)).await.code);
    }
    assert_eq!(codes.iter().filter(|code| **code == Some(0)).count(), 48, "{codes:?}");
    assert!(codes.iter().all(|code| *code == Some(0) || *code == RESOURCE_EXHAUSTED), "{codes:?}");
    let mut codes = Vec::new();
    for n in 0..40 {
        codes.push(raw.call(&path, &insert(format!("n{n}"), 1000)).await.code);
    }
    assert!(codes.contains(&Some(0)) && codes.contains(&RESOURCE_EXHAUSTED), "{codes:?}");
    // An existing value can still be replaced by a shorter one, and a deletion makes room.
    assert_eq!(raw.call(&path, &insert("n0".into(), 1)).await.code, Some(0));
    let delete = a::DeleteKeyValueRequest { key: "n1".into(), is_directory: true };
    assert_eq!(raw.call(&format!("{GENERATION_A}/DeleteKeyValue"), &delete).await.code, Some(0));
    assert_eq!(raw.call(&path, &insert("new".into(), 1)).await.code, Some(0));
    witness.assert_served().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reader_that_takes_nothing_costs_little() {
    let (server, witness, mut raw) = start_server_and_second_client(&[]).await;
    let kv = Some(a::KeyValueEntry { key: "large".into(), value: vec![1u8; 4 << 20].into() });
    let request = a::InsertKeyValueRequest { kv, allow_overwrite: false };
    assert_eq!(raw.call(&insert_path(), &request).await.code, Some(0));
    let before = server.resident_bytes();
    // Two thousand answers of 4 MiB are requested, and none is read.
    let get = grpc_framed(&a::GetKeyValueRequest { key: "large".into() }.encode_to_vec());
    let mut unread = Vec::new();
    for _ in 0..2000 {
        let (response, mut stream) =
            raw.begin_request(raw.request(&format!("{GENERATION_A}/GetKeyValue"))).await.expect("a stream");
        stream.send_data(Bytes::from(get.clone()), true).expect("an open stream");
        unread.push(response);
    }
    for _ in 0..5 {
        witness.assert_served().await;
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    let moved = server.resident_bytes().saturating_sub(before);
    assert!(moved < 64 * MIB, "it took {} MiB", moved / MIB);
    drop(unread);
}
