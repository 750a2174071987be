//! Tests peers that violate HTTP/2, flood the server, stop in the middle of a frame, or read no answers.

use super::*;

#[tokio::test]
async fn a_connection_without_http2_preface_is_closed() {
    let rig =
        TestServer::start(GrpcLimits { handshake: Duration::from_millis(100), ..GrpcLimits::default() });
    let mut client = rig.connect_client().await;
    let long_frame = [PREFACE, &[0xff, 0xff, 0xff, 0, 0, 0, 0, 0, 1][..]].concat();
    let no_frame = [PREFACE, &[0xaa; 1000][..]].concat();
    for bytes in
        [&b""[..], b"GET / HTTP/1.1\r\n\r\n", b"PRI * HT", &[0x16, 3, 1, 0, 5], &long_frame, &no_frame]
    {
        let mut socket = TcpStream::connect(rig.address).await.expect("it listens");
        socket.write_all(bytes).await.expect("it is open");
        let closed = timeout(PATIENCE, socket.read_to_end(&mut Vec::new())).await;
        assert!(closed.is_ok(), "{bytes:?} is still connected");
    }
    assert_eq!(client.call_generation_a("InsertKeyValue", &insert_request("k", "v")).await.status, "0");
    assert_eq!(rig.server.counters().not_http2, 4);
}

#[tokio::test]
async fn connections_have_a_bound() {
    let rig = TestServer::start(GrpcLimits { connections: 1, ..GrpcLimits::default() });
    let mut client = rig.connect_client().await;
    assert_eq!(client.call_generation_a("InsertKeyValue", &insert_request("k", "v")).await.status, "0");
    let mut socket = TcpStream::connect(rig.address).await.expect("it listens");
    let closed = timeout(PATIENCE, socket.read_to_end(&mut Vec::new())).await.expect("closed at once");
    assert!(closed.is_err() || closed.is_ok_and(|read| read == 0));
    assert_eq!(client.call_generation_a("InsertKeyValue", &insert_request("k", "v")).await.status, "0");
    assert_eq!(rig.server.counters().connections_refused, 1);
}

/// A sequence of pseudo-random numbers, the same in every run.
struct RandomFrames(u64);

impl RandomFrames {
    fn next_number(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }

    /// Returns a random frame, mostly with a valid length.
    fn random_frame(&mut self) -> Vec<u8> {
        let length = [0, 4, 5, 8, 6, 64, 300][(self.next_number() % 7) as usize];
        let (kind, flags) = ((self.next_number() % 11) as u8, (self.next_number() % 64) as u8);
        let stream = [0, 1, 3, 5, 7, 2, 1 << 30][(self.next_number() % 7) as usize] as u32;
        let mut frame = vec![0, 0, length as u8 | (length >> 8) as u8, kind, flags];
        frame[1] = (length >> 8) as u8;
        frame[2] = length as u8;
        frame.extend(stream.to_be_bytes());
        // Headers that are sometimes valid: indexed fields and short literals.
        frame.extend(
            (0..length)
                .map(|_| if self.next_number().is_multiple_of(3) { 0x82 } else { self.next_number() as u8 }),
        );
        frame
    }
}

#[tokio::test]
async fn random_frames_do_not_affect_other_connections() {
    let rig =
        TestServer::start(GrpcLimits { handshake: Duration::from_millis(100), ..GrpcLimits::default() });
    let mut client = rig.connect_client().await;
    let mut noise = RandomFrames(1);
    for _ in 0..400 {
        let mut bytes = [PREFACE, &SETTINGS[..]].concat();
        for _ in 0..noise.next_number() % 20 {
            bytes.extend(noise.random_frame());
        }
        bytes.truncate(bytes.len() - (noise.next_number() % 3) as usize);
        let mut socket = TcpStream::connect(rig.address).await.expect("it listens");
        // The server may have closed the connection before all was written.
        let _ = socket.write_all(&bytes).await;
        let _ = socket.shutdown().await;
        let read = timeout(PATIENCE, socket.read_to_end(&mut Vec::new())).await;
        assert!(read.is_ok(), "it was not closed");
    }
    assert_eq!(client.call_generation_a("InsertKeyValue", &insert_request("k", "v")).await.status, "0");
    rig.wait_for_waiting_calls(0).await;
}

#[tokio::test]
async fn endless_resets_close_only_their_connection() {
    let rig = TestServer::start(GrpcLimits::default());
    let (hostile, mut other) = (rig.connect_client().await, rig.connect_client().await);
    for _ in 0..20_000 {
        let Ok(mut ready) = hostile.send.clone().ready().await else { break };
        let request = Request::post(format!("http://x/{GET}")).header("content-type", "application/grpc");
        let Ok((_, mut stream)) = ready.send_request(request.body(()).expect("a request"), false) else {
            break;
        };
        let _ = stream.send_data(encode_framed_message(&get_request("never")), true);
        stream.send_reset(Reason::CANCEL);
    }
    assert_eq!(other.call_generation_a("InsertKeyValue", &insert_request("k", "v")).await.status, "0");
    drop(hostile);
    rig.wait_for_waiting_calls(0).await;
}

/// Reads until GOAWAY, which must state this reason.
async fn assert_goaway_reason(socket: &mut TcpStream, says: &str) {
    let mut heard = Vec::new();
    let closed = timeout(PATIENCE, socket.read_to_end(&mut heard)).await;
    assert!(closed.is_ok(), "it is still connected, and heard {heard:?}");
    let heard = String::from_utf8_lossy(&heard);
    assert!(heard.ends_with(says), "{heard:?} does not end with {says:?}");
}

#[tokio::test]
async fn incomplete_input_is_closed_after_its_timeout() {
    let short = Duration::from_millis(300);
    let rig = TestServer::start(GrpcLimits { handshake: short, unread: short, ..GrpcLimits::default() });
    let mut client = rig.connect_client().await;
    let headers_begun = [0, 0, 5, 1, 0, 0, 0, 0, 1, 0x83, 0x86, 0x84, 0x41, 0];
    let frame = "a frame or a header block was not completed in time";
    for (begun, says) in [
        (vec![], "its settings did not come in time"),
        (SETTINGS[..5].to_vec(), "its settings did not come in time"),
        ([&SETTINGS[..], &[0, 0]].concat(), frame),
        ([&SETTINGS[..], &[0, 0, 8, 6, 0, 0, 0, 0, 0, 1]].concat(), frame),
        ([&SETTINGS[..], &headers_begun[..11]].concat(), frame),
        ([&SETTINGS[..], &headers_begun].concat(), frame),
        (
            [&SETTINGS[..], &[0, 1, 0, 0x42, 0, 0, 0, 0, 0, 1]].concat(),
            "data that was begun was not completed in time",
        ),
    ] {
        let mut socket = open_raw_connection(&rig, &begun).await;
        assert_goaway_reason(&mut socket, says).await;
    }
    // The fragments of an incomplete header block are no progress either.
    let mut dribble = open_raw_connection(&rig, &[&SETTINGS[..], &headers_begun].concat()).await;
    let dribbling = async {
        while dribble.write_all(&[0, 0, 0, 9, 0, 0, 0, 0, 1]).await.is_ok() {
            sleep(Duration::from_millis(20)).await;
            let mut heard = [0; 200];
            if dribble.try_read(&mut heard).is_ok_and(|read| heard[..read].ends_with(frame.as_bytes())) {
                return;
            }
        }
    };
    timeout(PATIENCE, dribbling).await.expect("it is cut off");
    // A connection without incomplete input has no deadline.
    let mut idle = open_raw_connection(&rig, &SETTINGS).await;
    sleep(2 * short).await;
    idle.write_all(&[0, 0, 8, 6, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8]).await.expect("it is open");
    let pong = async {
        let mut heard = Vec::new();
        while !heard.ends_with(&[1, 2, 3, 4, 5, 6, 7, 8]) {
            assert!(idle.read_buf(&mut heard).await.expect("it is open") > 0, "{heard:?}");
        }
    };
    timeout(PATIENCE, pong).await.expect("it answers");
    assert_eq!(client.call_generation_a("InsertKeyValue", &insert_request("k", "v")).await.status, "0");
}

#[tokio::test]
async fn answers_that_are_not_taken_end_the_connection_in_time() {
    let rig = TestServer::start(GrpcLimits { unread: Duration::from_millis(300), ..GrpcLimits::default() });
    let mut client = rig.connect_client().await;
    assert_eq!(
        client.call_generation_a("InsertKeyValue", &insert_request("k", vec![7; 100_000])).await.status,
        "0"
    );
    // Its windows have room for 65,535 bytes and are not opened further; but it pings, and reads the
    // acknowledgements.
    let (mut send, connection) = h2::client::Builder::new()
        .handshake::<_, Bytes>(TcpStream::connect(rig.address).await.expect("it listens"))
        .await
        .expect("it speaks HTTP/2");
    let connection = tokio::spawn(connection);
    let request = Request::post(format!("http://muster.test:1/{GET}"))
        .header("content-type", "application/grpc")
        .body(())
        .expect("a request");
    let (response, mut stream) = send.send_request(request, false).expect("the connection is there");
    stream.send_data(encode_framed_message(&get_request("k")), true).expect("the stream is there");
    let answer = response.await.expect("an answer");
    let ended = timeout(PATIENCE, connection).await.expect("it ends in time").expect("no panic");
    let why = ended.expect_err("the server ends it");
    assert_eq!(why.reason(), Some(Reason::ENHANCE_YOUR_CALM), "{why:?}");
    drop(answer);
    assert_eq!(client.call_generation_a("InsertKeyValue", &insert_request("k", "v")).await.status, "0");
}

#[tokio::test]
async fn replies_to_a_peer_that_does_not_read_are_bounded() {
    let limits = GrpcLimits { unsent_bytes_per_connection: 2 << 20, ..GrpcLimits::default() };
    let rig = TestServer::start(limits);
    let (mut slow, mut other) = (rig.connect_client().await, rig.connect_client().await);
    assert_eq!(
        other.call_generation_a("InsertKeyValue", &insert_request("k", vec![0; 1 << 20])).await.status,
        "0"
    );
    let calls = rig.server.counters().calls;
    let mut asked = Vec::new();
    for _ in 0..40 {
        asked.push(slow.start_call(GET, &get_request("k")).0);
    }
    sleep(Duration::from_millis(200)).await;
    let taken = rig.server.counters().calls - calls;
    assert!((1..=6).contains(&taken), "{taken} of 40 calls were taken");
    assert_eq!(other.call_generation_a("GetKeyValue", &get_request("k")).await.status, "0");
    // All at once: a single stream may have nothing to read before others are read.
    let answers: Vec<_> =
        asked.into_iter().map(|response| tokio::spawn(receive_response(response))).collect();
    for answer in answers {
        assert_eq!(answer.await.expect("no panic").status, "0");
    }
}

/// A stopped client reads nothing, but its host responds: the connection must survive until it continues.
#[tokio::test]
async fn a_stopped_process_is_not_given_up() {
    let rig =
        TestServer::start(GrpcLimits { unacknowledged: Duration::from_millis(300), ..GrpcLimits::default() });
    let mut client = rig.connect_client().await;
    let size = 20 << 20;
    assert_eq!(
        client.call_generation_a("InsertKeyValue", &insert_request("k", vec![0; size])).await.status,
        "0"
    );

    let windows = [
        &[0, 0, 6, 4, 0, 0, 0, 0, 0, 0, 4, 0x7f, 0xff, 0xff, 0xff][..],
        &[0, 0, 4, 8, 0, 0, 0, 0, 0, 0x7f, 0, 0, 0],
        &encode_raw_request(&format!("/{GET}"), &get_request("k")),
    ];
    let mut socket = open_raw_connection(&rig, &windows.concat()).await;
    sleep(Duration::from_millis(2500)).await;
    let mut read = 0;
    let mut buffer = vec![0; 1 << 20];
    while read < size {
        let more = timeout(PATIENCE, socket.read(&mut buffer)).await.expect("in time").expect("it is open");
        assert!(more > 0, "closed after {read} bytes");
        read += more;
    }
}

/// The deadline of an incomplete frame does not count the time during which the server did not read.
#[tokio::test]
async fn the_time_during_which_the_server_does_not_read_is_not_the_peers() {
    let short = Duration::from_millis(400);
    let rig = TestServer::start(GrpcLimits {
        handshake: short,
        unsent_bytes_per_connection: 1 << 20,
        ..GrpcLimits::default()
    });
    let mut client = rig.connect_client().await;
    assert_eq!(
        client.call_generation_a("InsertKeyValue", &insert_request("k", vec![7; 32 << 20])).await.status,
        "0"
    );
    let settings = [0, 0, 6, 4, 0, 0, 0, 0, 0, 0, 4, 0x7f, 0xff, 0xff, 0xff];
    let update = [0, 0, 4, 8, 0, 0, 0, 0, 0, 0x7f, 0, 0, 0];
    let request = encode_raw_request(&format!("/{GET}"), &get_request("k"));
    let ping = [0, 0, 8, 6, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8];
    // It requests more than its host has room for, begins a frame, and reads nothing for a while.
    let mut socket =
        open_raw_connection(&rig, &[&settings[..], &update, &request, &ping[..12]].concat()).await;
    sleep(3 * short).await;
    let (mut from, mut to) = socket.split();
    let reading = async {
        let (mut last, mut read) = (Vec::new(), vec![0; 1 << 20]);
        while !last.ends_with(&ping[9..]) {
            let count = from.read(&mut read).await.expect("it is open");
            assert!(count > 0, "the peer was cut: {:?}", String::from_utf8_lossy(&last));
            last.extend_from_slice(&read[..count]);
            last.drain(..last.len().saturating_sub(100));
        }
    };
    // Then it reads its answer, and completes the frame.
    let rest = async {
        sleep(short / 4).await;
        to.write_all(&ping[12..]).await.expect("it is open");
    };
    timeout(PATIENCE, async { tokio::join!(reading, rest) }).await.expect("its ping is answered");
    // Once the server reads again, the deadline counts.
    to.write_all(&ping[..12]).await.expect("it is open");
    let mut heard = Vec::new();
    timeout(PATIENCE, from.read_to_end(&mut heard)).await.expect("it is cut").expect("it is closed in order");
    assert!(String::from_utf8_lossy(&heard).ends_with("was not completed in time"), "{heard:?}");
}
