//! Tests of peers that use more than their share of memory or processor time. Each peer is told which bound it has
//! exceeded, and other clients notice nothing.

use std::time::Duration;

use muster::proto::tensorflow as a;
use prost::bytes::Bytes;

use crate::frames::*;
use crate::raw::{GENERATION_A, PATIENCE, RawClient, grpc_framed, message_with_prefix};
use crate::second_client::SecondClient;
use crate::support::MusterServer;

const MIB: u64 = 1 << 20;

async fn start_server_and_second_client(further: &[&str]) -> (MusterServer, SecondClient) {
    let arguments = [&["--job", "witness=2", "--job", "target=3", "--log", "error"], further].concat();
    let server = MusterServer::patient(&arguments);
    let witness = SecondClient::register(&server, "witness").await;
    (server, witness)
}

/// Stores a value of this length under the key `k`.
async fn store_value_of_length(server: &MusterServer, length: usize) {
    let mut raw = RawClient::connect(server.grpc, "target").await;
    let kv = Some(a::KeyValueEntry { key: "k".into(), value: vec![1; length].into() });
    let message = a::InsertKeyValueRequest { kv, allow_overwrite: true };
    assert_eq!(raw.call(&format!("{GENERATION_A}/InsertKeyValue"), &message).await.code, Some(0));
}

/// Returns a peer that reads no answers and has so many of them that its further requests are deferred.
async fn backpressured_peer(server: &MusterServer) -> FramePeer {
    store_value_of_length(server, 17 << 20).await;
    let mut peer = FramePeer::connect(server.grpc).await;
    let get = complete_request_with_fields(1, &request_fields_of_method("GetKeyValue"));
    peer.say(&[PREFACE, &settings_frame(&[(INITIAL_WINDOW_SIZE, 0)]), &get].concat()).await;
    let answered = peer.receive_until(|frame| frame.kind == HEADERS && frame.stream == 1).await;
    assert!(answered.is_some(), "its first call is answered");
    peer
}

/// Returns header fields of the greatest length.
fn longest_request_fields(path: &'static str) -> Vec<(&'static str, &'static str)> {
    let mut fields = request_fields();
    fields[2].1 = path;
    fields.push(("x-long", Box::leak("y".repeat(15_000).into_boxed_str())));
    fields
}

#[tokio::test(flavor = "multi_thread")]
async fn the_heads_of_requests_that_wait_cost_little() {
    let (server, witness) = start_server_and_second_client(&[]).await;
    let mut peer = backpressured_peer(&server).await;
    let before = server.resident_bytes();
    let fields = longest_request_fields("/tensorflow.CoordinationService/GetKeyValue");
    for n in 1..16_000_u32 {
        // Each is different, so that no two share a cached head.
        let number = format!("{n}");
        let mut fields = fields.clone();
        fields.push(("x-number", &number));
        assert!(peer.say(&complete_request_with_fields(2 * n + 1, &fields)).await, "the connection stays");
    }
    peer.say(&http2_frame(PING, 0, 0, &[9; 8])).await;
    assert!(peer.receive_until(|frame| frame.kind == PING).await.is_some());
    let moved = server.resident_bytes().saturating_sub(before);
    assert!(moved < 48 * MIB, "{} MiB are held for 16,000 requests that wait", moved / MIB);
    witness.assert_served().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_over_its_memory_quota_gets_resource_exhausted() {
    for (flags, whose) in [
        (
            &["--grpc-connection-state-bytes", "4000000"][..],
            "on this connection take more than its 4000000 bytes",
        ),
        (&["--grpc-state-bytes", "4000000"], "on all connections take the server's 4000000 bytes"),
    ] {
        let (server, witness) = start_server_and_second_client(flags).await;
        let mut peer = backpressured_peer(&server).await;
        let before = server.resident_bytes();
        let fields = longest_request_fields("/grpc.health.v1.Health/Check");
        for n in 1..1_000_u32 {
            peer.say(&complete_request_with_fields(2 * n + 1, &fields)).await;
        }
        let refused = peer
            .receive_until(|frame| frame.kind == HEADERS && frame.has_flag(END_STREAM))
            .await
            .expect("some are refused");
        let said = String::from_utf8_lossy(&refused.payload).into_owned();
        assert!(said.contains(whose) && said.contains("grpc-status\u{1}8"), "{said:?}");
        let moved = server.resident_bytes().saturating_sub(before);
        assert!(moved < 24 * MIB, "{} MiB", moved / MIB);
        witness.assert_served().await;
        // The memory of cancelled requests is free again.
        let given_up: Vec<u8> = (1..1_000_u32).flat_map(|n| reset_frame(2 * n + 1)).collect();
        peer.say(&given_up).await;
        peer.say(&complete_request_with_fields(2_001, &fields)).await;
        peer.say(&http2_frame(PING, 0, 0, &[9; 8])).await;
        let mut refused_again = false;
        let pong = peer.receive_until(|frame| {
            refused_again |= frame.stream == 2_001;
            frame.kind == PING
        });
        assert!(pong.await.is_some() && !refused_again);
        witness.assert_served().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_announcement_takes_nothing_from_an_honest_insertion() {
    let (server, witness) = start_server_and_second_client(&[]).await;
    let path = format!("{GENERATION_A}/InsertKeyValue");
    let mut greedy = Vec::new();
    // Two bodies of nearly the whole memory, and a hundred that get theirs in advance.
    for length in [476_u32 << 20; 2].into_iter().chain([4 << 20; 100]) {
        let mut raw = RawClient::connect(server.grpc, "target").await;
        let (response, mut stream) = raw.begin_request(raw.request(&path)).await.expect("a stream");
        stream
            .send_data(Bytes::from(message_with_prefix(0, length, &[0; 1000])), false)
            .expect("an open stream");
        greedy.push((raw, response, stream));
    }
    witness.assert_served().await;
    // The greedy bodies stall for a minute: a later answer means that the honest one had to wait for them.
    let honest = tokio::time::timeout(Duration::from_secs(30), store_value_of_length(&server, 20 << 20));
    honest.await.expect("the honest one is not kept waiting");
    witness.assert_served().await;
}

/// Returns a peer with many waiting calls.
async fn peer_with_waiting_calls(server: &MusterServer) -> FramePeer {
    let mut peer = FramePeer::open(server.grpc).await;
    let mut last = 0;
    for chunk in 0..16_u32 {
        let calls: Vec<u8> = (0..1_000)
            .flat_map(|n| {
                last = 2 * (chunk * 1_000 + n) + 1;
                complete_request_with_fields(last, &request_fields_of_method("GetKeyValue"))
            })
            .collect();
        peer.say(&calls).await;
    }
    peer.say(&http2_frame(PING, 0, 0, &[9; 8])).await;
    assert!(peer.receive_until(|frame| frame.kind == PING).await.is_some());
    peer
}

#[tokio::test(flavor = "multi_thread")]
async fn settings_that_change_all_the_time_cost_little_and_end_the_connection() {
    let (server, witness) = start_server_and_second_client(&[]).await;
    let mut peers = [peer_with_waiting_calls(&server).await, peer_with_waiting_calls(&server).await];
    let entries: Vec<(u16, u32)> = (0..682).map(|n| (INITIAL_WINDOW_SIZE, 65_535 + n % 2)).collect();
    let churn = settings_frame(&entries);
    let before = server.cpu();
    for _ in 0..200 {
        for peer in &mut peers {
            peer.say(&churn).await;
        }
    }
    witness.assert_served().await;
    let spent = server.cpu().saturating_sub(before);
    // It was 23 ms a frame: nine seconds for these.
    assert!(spent < Duration::from_secs(3), "{spent:?} for 400 frames");
    for peer in &mut peers {
        let mut flips = 0;
        // One change in each frame, which affects every stream.
        while peer.say(&settings_frame(&[(INITIAL_WINDOW_SIZE, flips % 2)]).repeat(20)).await && flips < 1_000
        {
            flips += 1;
        }
        let (code, said) = peer.receive_goaway().await;
        assert_eq!(code, ENHANCE_YOUR_CALM, "{said}");
        assert!(said.contains("frames that ask for nothing"), "{said}");
    }
    witness.assert_served().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn references_to_a_long_name_are_cut_off() {
    let (server, witness) = start_server_and_second_client(&[]).await;
    let mut peer = FramePeer::open(server.grpc).await;
    let mut first = header_block(&request_fields());
    first.push(0x40);
    string(&mut first, &[b'n'; 4_000]);
    first.extend([1, b'v']);
    let before = server.cpu();
    peer.say(&http2_frame(HEADERS, END_HEADERS | END_STREAM, 1, &first)).await;
    // A literal without indexing with the name of the entry and an empty value.
    let references = [0x0f, 62 - 15, 0].repeat(21_000);
    peer.say(&http2_frame(HEADERS, END_HEADERS | END_STREAM, 3, &references)).await;
    let (code, said) = peer.receive_goaway().await;
    assert_eq!((code, &*said), (ENHANCE_YOUR_CALM, "a header list without end"));
    assert!(server.cpu().saturating_sub(before) < Duration::from_secs(1));
    witness.assert_served().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn frames_that_ask_for_nothing_end_the_connection_when_they_become_many() {
    let (server, witness) = start_server_and_second_client(&[]).await;
    let too_long = {
        let fields =
            [&request_fields()[..], &[("x-long", Box::leak("y".repeat(17_000).into_boxed_str()) as &str)]]
                .concat();
        move |n: u32| headers_frame(2 * n + 3, END_STREAM, &fields)
    };
    let malformed = |n: u32| headers_frame(2 * n + 3, END_STREAM, &[(":method", "POST")]);
    let rapid_reset = |n: u32| {
        [
            complete_request_with_fields(2 * n + 3, &request_fields_of_method("GetKeyValue")),
            reset_frame(2 * n + 3),
        ]
        .concat()
    };
    let same = |frame: Vec<u8>| move |_: u32| frame.clone();
    type Flood = Box<dyn Fn(u32) -> Vec<u8> + Send>;
    let floods: [(&str, Flood); 9] = [
        ("settings", Box::new(same(settings_frame(&[])))),
        ("pings", Box::new(same(http2_frame(PING, 0, 0, &[0; 8])))),
        ("window updates", Box::new(same(window_update_frame(0, 1)))),
        ("priorities", Box::new(same(http2_frame(PRIORITY, 0, 3, &[0, 0, 0, 0, 1])))),
        ("empty data", Box::new(same(http2_frame(DATA, 0, 1, &[])))),
        ("unknown frames", Box::new(same(http2_frame(0x77, 0, 0, &[])))),
        ("resets", Box::new(rapid_reset)),
        ("malformed heads", Box::new(malformed)),
        ("long heads", Box::new(too_long)),
    ];
    for (name, flood) in floods {
        let mut peer = FramePeer::open(server.grpc).await;
        peer.say(&headers_frame(1, 0, &request_fields())).await;
        let pour = async {
            for round in 0..2_000 {
                let piece: Vec<u8> = (0..100).flat_map(|n| flood(100 * round + n)).collect();
                // The answers are read meanwhile.
                let mut buffer = [0; 1 << 16];
                while let Ok(1..) = peer.socket.try_read(&mut buffer) {
                    if buffer.windows(8).any(|some| some == b"too many") {
                        return true;
                    }
                }
                if !peer.say(&piece).await {
                    break;
                }
            }
            // GOAWAY may be the last output.
            let mut rest = Vec::new();
            let _ = tokio::io::AsyncReadExt::read_to_end(&mut peer.socket, &mut rest).await;
            rest.windows(8).any(|some| some == b"too many")
        };
        let told = tokio::time::timeout(PATIENCE, pour).await.expect("the server reads, or closes");
        assert!(told, "{name}: it is not told that it is too much");
        witness.assert_served().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn cancelling_all_calls_at_once_is_no_abuse() {
    let (server, witness) = start_server_and_second_client(&[]).await;
    let mut peer = peer_with_waiting_calls(&server).await;
    let resets: Vec<u8> = (0..16_000).flat_map(|n| reset_frame(2 * n + 1)).collect();
    peer.say(&resets).await;
    peer.say(&complete_request(40_001)).await;
    let answer = peer.receive_until(|frame| frame.stream == 40_001).await;
    assert!(answer.is_some_and(|answer| answer.kind == HEADERS), "the connection goes on");
    witness.assert_served().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_to_auxiliary_services_in_tiny_pieces_cost_little() {
    let (server, witness) = start_server_and_second_client(&[]).await;
    let before = server.resident_bytes();
    let mut peer = FramePeer::open(server.grpc).await;
    let mut fields = request_fields();
    fields[2].1 = "/grpc.health.v1.Health/Check";
    let body = grpc_framed(&[0; 60_000]);
    for n in 0..30_u32 {
        let pieces: Vec<u8> =
            body.iter().flat_map(|byte| http2_frame(DATA, 0, 2 * n + 1, &[*byte])).collect();
        peer.say(&[headers_frame(2 * n + 1, 0, &fields), pieces].concat()).await;
    }
    peer.say(&http2_frame(PING, 0, 0, &[9; 8])).await;
    assert!(peer.receive_until(|frame| frame.kind == PING).await.is_some());
    let moved = server.resident_bytes().saturating_sub(before);
    assert!(moved < 24 * MIB, "{} MiB", moved / MIB);
    witness.assert_served().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn unread_listings_are_bounded() {
    let (server, witness) = start_server_and_second_client(&["--grpc-state-bytes", "30000000"]).await;
    let mut raw = RawClient::connect(server.grpc, "target").await;
    for n in 0..3_000 {
        let kv = Some(a::KeyValueEntry { key: format!("d/{n}"), value: vec![1; 4_000].into() });
        let message = a::InsertKeyValueRequest { kv, allow_overwrite: true };
        assert_eq!(raw.call(&format!("{GENERATION_A}/InsertKeyValue"), &message).await.code, Some(0));
    }
    let before = server.resident_bytes();
    let mut fields = request_fields();
    fields[2].1 = "/tensorflow.CoordinationService/GetKeyValueDir";
    let body = grpc_framed(b"\x0a\x01d");
    let list = [headers_frame(1, 0, &fields), http2_frame(DATA, END_STREAM, 1, &body)].concat();
    let mut refused = 0;
    let mut peers = Vec::new();
    for _ in 0..10 {
        let mut peer = FramePeer::connect(server.grpc).await;
        peer.say(&[PREFACE, &settings_frame(&[(INITIAL_WINDOW_SIZE, 0)]), &list].concat()).await;
        let answer = peer.receive_until(|frame| frame.kind == HEADERS).await.expect("an answer");
        if answer.has_flag(END_STREAM) {
            let said = String::from_utf8_lossy(&answer.payload).into_owned();
            assert!(said.contains("answers in progress on all connections"), "{said:?}");
            refused += 1;
        }
        peers.push(peer);
    }
    assert_eq!(refused, 8, "two of twelve megabytes have room");
    assert!(server.resident_bytes().saturating_sub(before) < 40 * MIB);
    witness.assert_served().await;
    drop(peers);
    // The server frees their answers when it notices that they are gone, perhaps after the next request.
    let message = a::GetKeyValueDirRequest { directory_key: "d".into() };
    let path = format!("{GENERATION_A}/GetKeyValueDir");
    let freed = async {
        while raw.call(&path, &message).await.code != Some(0) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, freed).await.expect("answers of peers that have gone are freed");
    // A client that reads its answer gets it.
    for _ in 0..5 {
        let back = raw.call(&path, &message).await;
        assert_eq!(back.decode::<a::GetKeyValueDirResponse>().kv.len(), 3_000);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flood_of_registrations_writes_few_lines() {
    let server = MusterServer::patient(&["--job", "witness=2", "--job", "target=3", "--log", "info"]);
    let witness = SecondClient::register(&server, "witness").await;
    let mut raw = RawClient::connect(server.grpc, "target").await;
    let path = format!("{GENERATION_A}/RegisterTask");
    let mut asked = Vec::new();
    for incarnation in 1..=5_000 {
        let source_task = Some(muster::proto::CoordinatedTask { named: true, ..Default::default() });
        let message = a::RegisterTaskRequest { incarnation, source_task };
        let (response, mut stream) = raw.begin_request(raw.request(&path)).await.expect("a stream");
        let body = grpc_framed(&prost::Message::encode_to_vec(&message));
        stream.send_data(Bytes::from(body), true).expect("an open stream");
        asked.push(response);
    }
    witness.assert_served().await;
    // Each call before the last one was answered as superseded.
    let told = tokio::time::timeout(PATIENCE, asked.swap_remove(0)).await.expect("an answer in time");
    assert!(told.expect("an answer").headers().contains_key("grpc-status"));
    let said = async {
        while !server.said().contains("further events of this kind were not logged one by one") {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(PATIENCE, said).await.expect("they are counted");
    let lines = server.said().lines().count();
    assert!(lines < 1_000, "{lines} lines for 5,000 registrations");
    witness.assert_served().await;
}
