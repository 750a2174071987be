//! Tests request bodies: bodies in pieces of any size, compressed ones, bodies that are too large or too slow, and
//! more bodies than there is memory for.

use super::*;

#[tokio::test]
async fn bodies_arrive_in_any_pieces() {
    let rig = TestServer::start(GrpcLimits::default());
    let mut client = rig.connect_client().await;
    let message = encode_framed_message(&insert_request("k", "value"));
    let bytes: Vec<&[u8]> = message.chunks(1).collect();
    assert_eq!(client.send_insert_in_pieces(&bytes).await.status, "0");
    assert_eq!(client.send_insert_in_pieces(&[&message]).await.status, "0");
    assert_eq!(client.send_insert_in_pieces(&[&message[..5], &message[5..]]).await.status, "0");

    for broken in [&[][..], &[&message[..3]], &[&message[..9]], &[&message[..], b"x"], &[&message, &message]]
    {
        let back = client.send_insert_in_pieces(broken).await;
        assert_eq!(back.status, "13", "{broken:?}");
        assert!(back.headers.contains_key("grpc-message"));
    }
    let wrong_flag = client.send_insert_in_pieces(&[&[2, 0, 0, 0, 0]]).await;
    assert_eq!(wrong_flag.status, "13");
    let unreadable = client.send_insert_in_pieces(&[&[0, 0, 0, 0, 2, 0xff, 0xff]]).await;
    assert_eq!(unreadable.status, "3");
    assert_eq!(client.call_generation_a("GetKeyValue", &get_request("k")).await.status, "0");
    assert_eq!(rig.server.counters().bodies_in_flight_bytes, 0);
}

#[tokio::test]
async fn large_values_go_in_and_come_out() {
    let rig = TestServer::start(GrpcLimits { bodies_in_flight_bytes: 7 << 20, ..GrpcLimits::default() });
    let value: Vec<u8> = (0..5_000_000_u32).map(|n| (n / 7) as u8).collect();
    let mut clients = Vec::new();
    for n in 0..3 {
        let (mut client, value) = (rig.connect_client().await, value.clone());
        clients.push(tokio::spawn(async move {
            let key = format!("large/{n}");
            assert_eq!(
                client.call_generation_a("InsertKeyValue", &insert_request(&key, value.clone())).await.status,
                "0"
            );
            let back = client.call_generation_a("GetKeyValue", &get_request(&key)).await;
            assert!(back.decode_message::<a::GetKeyValueResponse>().kv.expect("an entry").value == value);
        }));
    }
    for client in clients {
        client.await.expect("no panic");
    }
    let mut client = rig.connect_client().await;
    let asked = a::GetKeyValueDirRequest { directory_key: "large".into() };
    let all = client
        .call_generation_a("GetKeyValueDir", &asked)
        .await
        .decode_message::<a::GetKeyValueDirResponse>();
    assert_eq!(all.kv.iter().map(|kv| kv.value.len()).sum::<usize>(), 3 * value.len());
    assert_eq!(rig.server.counters().bodies_in_flight_bytes, 0);
}

#[tokio::test]
async fn compressed_messages_are_inflated_within_bounds() {
    let rig = TestServer::start(GrpcLimits { message_bytes: 3 << 20, ..GrpcLimits::default() });
    let mut client = rig.connect_client().await;
    let flagged = |message: &[u8]| {
        let length = u32::try_from(message.len()).expect("short").to_be_bytes();
        [&[1][..], &length, message].concat()
    };
    for size in [0, 100, 2 << 20] {
        let file = flagged(&compress(&insert_request("k", vec![7; size]).encode_to_vec()));
        assert_eq!(client.send_insert_in_pieces(&[&file]).await.status, "0", "{size}");
        let back = client
            .call_generation_a("GetKeyValue", &get_request("k"))
            .await
            .decode_message::<a::GetKeyValueResponse>();
        assert_eq!(back.kv.expect("an entry").value.len(), size);
    }
    let bomb = flagged(&compress(&vec![0; 4 << 20]));
    assert_eq!(client.send_insert_in_pieces(&[&bomb]).await.status, "8");
    assert_eq!(client.send_insert_in_pieces(&[&flagged(b"no gzip")]).await.status, "13");
    for (encoding, status) in [("snappy", "12"), ("identity", "13")] {
        let (response, mut stream) = client.open_request(INSERT, &[("grpc-encoding", encoding)]);
        let file = flagged(&compress(&insert_request("k", "v").encode_to_vec()));
        stream.send_data(file.into(), true).expect("the stream is there");
        assert_eq!(receive_response(response).await.status, status, "{encoding}");
    }
}

#[tokio::test]
async fn what_is_too_large_is_refused_by_its_prefix() {
    let rig = TestServer::start(GrpcLimits::default());
    let mut client = rig.connect_client().await;
    let (response, mut stream) = client.open_request(INSERT, &[]);
    let length = (1_u32 << 30).to_be_bytes();
    stream.send_data([&[0][..], &length, &[0; 100]].concat().into(), false).expect("the stream is there");
    let back = receive_response(response).await;
    assert_eq!(back.status, "8");
    assert_eq!(rig.server.counters().bodies_in_flight_bytes, 0);
}

#[tokio::test]
async fn a_body_that_stalls_is_dropped() {
    let rig =
        TestServer::start(GrpcLimits { body_stall: Duration::from_millis(50), ..GrpcLimits::default() });
    let mut client = rig.connect_client().await;
    let (response, mut stream) = client.open_request(INSERT, &[]);
    stream.send_data(Bytes::from_static(&[0, 0, 1, 0, 0, 1]), false).expect("the stream is there");
    assert_eq!(receive_response(response).await.status, "4");
    assert_eq!(rig.server.counters().bodies_in_flight_bytes, 0);
}

#[tokio::test]
async fn a_body_that_dribbles_is_dropped_though_it_never_stands_still() {
    let rig =
        TestServer::start(GrpcLimits { body_stall: Duration::from_millis(300), ..GrpcLimits::default() });
    let mut client = rig.connect_client().await;
    let (mut response, mut stream) = client.open_request(INSERT, &[]);
    let message = encode_framed_message(&insert_request("k", vec![0; 10_000]));
    let mut sent = 0;
    let answer = loop {
        let piece = message.slice(sent..sent + 1);
        sent += 1;
        let _ = stream.send_data(piece, false);
        if let Ok(answer) = timeout(Duration::from_millis(5), &mut response).await {
            break answer.expect("an answer");
        }
        assert!(sent < message.len(), "it was taken to the end");
    };
    assert_eq!(answer.headers()["grpc-status"], "4");
    assert_eq!(rig.server.counters().bodies_in_flight_bytes, 0);
}

#[tokio::test]
async fn a_message_that_is_there_must_be_followed_by_the_end_of_its_request() {
    let limits = GrpcLimits { handshake: Duration::from_millis(300), ..GrpcLimits::default() };
    let rig = TestServer::start(limits);
    let mut client = rig.connect_client().await;
    for length in [10, 100_000, 3 << 20] {
        let (response, mut stream) = client.open_request(INSERT, &[]);
        stream
            .send_data(encode_framed_message(&insert_request("k", vec![0; length])), false)
            .expect("the stream is there");
        let told = receive_response(response).await;
        let why = told.headers["grpc-message"].to_str().expect("text");
        assert!(told.status == "4" && why.contains("did not end within"), "{length}: {why}");
    }
    assert_eq!(rig.server.counters().bodies_in_flight_bytes, 0);
    // It is charged meanwhile, however short it is.
    let (response, mut stream) = client.open_request(INSERT, &[]);
    stream
        .send_data(encode_framed_message(&insert_request("k", vec![0; 10_000])), false)
        .expect("the stream is there");
    wait_until("it takes memory of the pool", || rig.server.counters().bodies_in_flight_bytes > 0).await;
    stream.send_data(Bytes::new(), true).expect("the stream is there");
    assert_eq!(receive_response(response).await.status, "0");
}

/// The window that a body has used is returned once, not twice, when the body is refused in the middle.
#[tokio::test]
async fn a_body_that_is_refused_gives_back_what_it_took() {
    const STREAMS: u32 = 60;
    const EXCESS: usize = 100 << 10;
    let rig = TestServer::start(GrpcLimits::default());
    let mut socket = open_raw_connection(&rig, &SETTINGS).await;
    let request = encode_raw_request(&format!("/{INSERT}"), &insert_request("k", "v"));
    let block = &request[9..9 + usize::from(request[2])];
    let mut given = 0;
    let mut heard = Vec::new();
    for n in 0..STREAMS {
        let stream = 2 * n + 1;
        let begun = [encode_frame(1, 4, stream, block), encode_frame(0, 0, stream, &[0; 3])].concat();
        socket.write_all(&begun).await.expect("it is open");
        sleep(Duration::from_millis(2)).await;
        // The rest of a prefix that announces an empty message, and many bytes beyond it.
        socket.write_all(&encode_frame(0, 0, stream, &vec![0; EXCESS])).await.expect("it is open");
        let mut answered = false;
        while !answered {
            let count =
                timeout(PATIENCE, socket.read_buf(&mut heard)).await.expect("in time").expect("it is open");
            assert!(count > 0, "it was closed");
            while let Some(head) = heard.first_chunk::<9>() {
                let [l0, l1, l2, kind, _, s0, s1, s2, s3] = *head;
                let length = u32::from_be_bytes([0, l0, l1, l2]) as usize;
                if heard.len() < 9 + length {
                    break;
                }
                let of = u32::from_be_bytes([s0, s1, s2, s3]);
                if (kind, of) == (8, 0) {
                    given += u64::from(u32::from_be_bytes([heard[9], heard[10], heard[11], heard[12]]));
                }
                answered |= kind == 1 && of == stream;
                heard.drain(..9 + length);
            }
        }
    }
    // The first update opens the window to its size; the others return used bytes.
    let opened = (4 << 20) - 65_535;
    let sent = u64::from(STREAMS) * (EXCESS as u64 + 3);
    assert!(given - opened <= sent, "{} of {sent} bytes given back", given - opened);
    assert!(given - opened + (1 << 20) > sent, "{} of {sent} bytes given back", given - opened);
}

#[tokio::test]
async fn a_slow_body_loses_contended_memory() {
    let rig = TestServer::start(GrpcLimits { bodies_in_flight_bytes: 16 << 20, ..GrpcLimits::default() });
    let (mut greedy, mut honest) = (rig.connect_client().await, rig.connect_client().await);
    let message = encode_framed_message(&insert_request("greedy", vec![0; 12 << 20]));
    let (response, mut stream) = greedy.open_request(INSERT, &[]);
    stream.send_data(message.slice(..1 << 20), false).expect("the stream is there");
    wait_until("it has all that is kept for those who wait", || {
        rig.server.counters().bodies_in_flight_bytes >= 8 << 20
    })
    .await;
    // As long as no other body waits, it may arrive slowly.
    assert_eq!(honest.call_generation_a("InsertKeyValue", &insert_request("small", "v")).await.status, "0");
    let six = insert_request("honest", vec![1; 6 << 20]);
    let waits = honest.call_generation_a("InsertKeyValue", &six);
    assert_eq!(timeout(PATIENCE, waits).await.expect("it is served").status, "0");
    let told = receive_response(response).await;
    assert_eq!(told.status, "8");
    let why = told.headers["grpc-message"].to_str().expect("text");
    assert!(why.contains("too slowly while others wait"), "{why}");
    assert_eq!(rig.server.counters().bodies_in_flight_bytes, 0);
}

/// Sixty-four messages that are sent at the same time over one connection need far more memory than it may
/// have. Each is stored or refused, and none waits for another that cannot continue.
#[tokio::test(flavor = "multi_thread")]
async fn bodies_of_one_connection_do_not_keep_each_other_from_coming_to_an_end() {
    const BODIES: usize = 64;
    let rig = TestServer::start(GrpcLimits { bodies_in_flight_bytes: 64 << 20, ..GrpcLimits::default() });
    let (mut greedy, mut honest) = (rig.connect_client().await, rig.connect_client().await);
    let answers: Vec<_> = (0..BODIES)
        .map(|n| {
            let (response, mut stream) = greedy.open_request(INSERT, &[]);
            let message =
                encode_framed_message(&insert_request(&format!("large/{n}"), vec![n as u8; 2 << 20]));
            stream.send_data(message, true).expect("the stream is there");
            tokio::spawn(receive_response(response))
        })
        .collect();
    let beats = tokio::spawn(async move {
        loop {
            assert_eq!(
                honest.call_generation_a("InsertKeyValue", &insert_request("small", "v")).await.status,
                "0"
            );
            sleep(Duration::from_millis(5)).await;
        }
    });
    let mut stored = 0;
    for answer in answers {
        let told = answer.await.expect("an answer within the patience of a test");
        match &*told.status {
            "0" => stored += 1,
            "8" => assert!(told.headers.contains_key("grpc-message"), "{:?}", told.headers),
            status => panic!("status {status}: {:?}", told.headers),
        }
    }
    assert!(stored > 0, "at least those whose turn it was are stored");
    assert!(!beats.is_finished(), "others went on");
    beats.abort();
    assert_eq!(rig.server.counters().bodies_in_flight_bytes, 0);
    // The windows are open again: every byte was returned.
    let large = insert_request("after", vec![7; 8 << 20]);
    assert_eq!(greedy.call_generation_a("InsertKeyValue", &large).await.status, "0");
}

/// The body that holds the reserve must keep arriving while other bodies of its connection wait for theirs.
#[tokio::test]
async fn a_body_that_stops_does_not_keep_others_of_its_connection_waiting() {
    let rig = TestServer::start(GrpcLimits { bodies_in_flight_bytes: 16 << 20, ..GrpcLimits::default() });
    let mut client = rig.connect_client().await;
    let (response, mut stream) = client.open_request(INSERT, &[]);
    let message = encode_framed_message(&insert_request("stopped", vec![0; 4 << 20]));
    stream.send_data(message.slice(..1 << 20), false).expect("the stream is there");
    wait_until("it has its part of the reserve", || rig.server.counters().bodies_in_flight_bytes >= 4 << 20)
        .await;
    assert_eq!(
        client.call_generation_a("InsertKeyValue", &insert_request("next", vec![1; 3 << 20])).await.status,
        "0"
    );
    let told = receive_response(response).await;
    assert!(
        told.headers["grpc-message"].to_str().expect("text").contains("too slowly"),
        "{:?}",
        told.headers
    );
}
