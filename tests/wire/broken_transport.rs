//! Tests of peers that do not speak HTTP/2, violate it, or abuse it. None of them may harm other clients.

use std::net::SocketAddr;
use std::time::Duration;

use fastrand::Rng;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::frames::*;
use crate::raw::PATIENCE;
use crate::second_client::SecondClient;
use crate::support::MusterServer;

const MIB: u64 = 1 << 20;

struct TransportFixture {
    server: MusterServer,
    second_client: SecondClient,
    before: u64,
}

impl TransportFixture {
    async fn start() -> Self {
        let server = MusterServer::patient(&["--job", "witness=2", "--job", "target=3", "--log", "error"]);
        let witness = SecondClient::register(&server, "witness").await;
        let before = server.resident_bytes();
        Self { server, second_client: witness, before }
    }

    fn address(&self) -> SocketAddr {
        self.server.grpc
    }

    async fn connect(&self) -> TcpStream {
        let socket = TcpStream::connect(self.address()).await.expect("the server listens");
        socket.set_nodelay(true).expect("a TCP socket");
        socket
    }

    /// Sends bytes over a new connection, reads the answer for a moment, and closes it.
    async fn send_and_read_briefly(&self, bytes: &[u8]) -> Vec<u8> {
        let mut socket = self.connect().await;
        // The server may close the connection before the end.
        let _ = socket.write_all(bytes).await;
        let mut heard = Vec::new();
        let _ = tokio::time::timeout(Duration::from_millis(20), socket.read_to_end(&mut heard)).await;
        heard
    }

    /// Checks that the other client is served and no memory has been lost.
    async fn assert_unharmed(&mut self) {
        self.second_client.assert_served().await;
        assert!(self.server.is_running(), "{}", self.server.said());
        let moved = self.server.peak_resident_bytes().saturating_sub(self.before);
        assert!(moved < 64 * MIB, "it took {} MiB", moved / MIB);
    }
}

/// Reads until the server closes the connection, which it must do.
async fn wait_until_closed(socket: &mut TcpStream) {
    let mut buffer = [0; 4096];
    let closed = async { while socket.read(&mut buffer).await.is_ok_and(|count| count > 0) {} };
    tokio::time::timeout(PATIENCE, closed).await.expect("the server closes the connection");
}

/// Writes until everything is sent or the server closes the connection, and reads meanwhile.
async fn write_while_reading(socket: TcpStream, pieces: impl Iterator<Item = Vec<u8>>) {
    let (mut reader, mut writer) = socket.into_split();
    let reading = tokio::spawn(async move {
        let mut buffer = [0; 65536];
        while reader.read(&mut buffer).await.is_ok_and(|count| count > 0) {}
    });
    let pouring = async {
        for piece in pieces {
            if writer.write_all(&piece).await.is_err() {
                return;
            }
        }
    };
    tokio::time::timeout(PATIENCE, pouring).await.expect("the server reads, or closes");
    drop(writer);
    reading.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_in_plain_bytes_is_answered() {
    // Checks that the bytes which the tests below damage are valid.
    let rig = TransportFixture::start().await;
    let mut socket = rig.connect().await;
    socket
        .write_all(&[connection_opening(), complete_request(1)].concat())
        .await
        .expect("an open connection");
    let mut heard = Vec::new();
    let answered = async {
        while !heard.windows(2).any(|pair| pair == [HEADERS, END_STREAM | END_HEADERS]) {
            let mut buffer = [0; 4096];
            let count = socket.read(&mut buffer).await.expect("an open connection");
            assert!(count > 0, "closed after {heard:x?}");
            heard.extend_from_slice(&buffer[..count]);
        }
    };
    tokio::time::timeout(PATIENCE, answered).await.expect("an answer");
}

#[tokio::test(flavor = "multi_thread")]
async fn peers_that_do_not_speak_http2_are_shown_out() {
    let mut rig = TransportFixture::start().await;
    let spoilt = PREFACE.iter().map(|byte| byte ^ 1).collect();
    let hellos: [Vec<u8>; 5] = [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".to_vec(),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\x00".to_vec(),
        // The beginning of a TLS handshake.
        vec![0x16, 3, 1, 2, 0, 1, 0, 1, 0xFC, 3, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        vec![0; 10_000],
        spoilt,
    ];
    for hello in hellos {
        let mut socket = rig.connect().await;
        let _ = socket.write_all(&hello).await;
        wait_until_closed(&mut socket).await;
        rig.assert_unharmed().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn random_bytes_are_no_more_than_noise() {
    let mut rig = TransportFixture::start().await;
    let mut rng = Rng::with_seed(3);
    for _ in 0..40 {
        let noise: Vec<u8> = (0..rng.usize(1..30_000)).map(|_| rng.u8(..)).collect();
        rig.send_and_read_briefly(&noise).await;
        rig.send_and_read_briefly(&[PREFACE, &noise].concat()).await;
        rig.send_and_read_briefly(&[connection_opening(), noise].concat()).await;
    }
    rig.assert_unharmed().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn random_frames_are_no_more_than_noise() {
    let mut rig = TransportFixture::start().await;
    let mut rng = Rng::with_seed(4);
    for _ in 0..60 {
        let mut bytes = connection_opening();
        for _ in 0..rng.usize(1..40) {
            let payload: Vec<u8> = (0..rng.usize(0..60)).map(|_| rng.u8(..)).collect();
            let stream = if rng.bool() { rng.u32(0..6) } else { rng.u32(..) };
            bytes.extend(http2_frame(rng.u8(0..12), rng.u8(..), stream, &payload));
            if rng.u8(0..4) == 0 {
                bytes.extend(complete_request(rng.u32(0..9)));
            }
        }
        rig.send_and_read_briefly(&bytes).await;
    }
    rig.assert_unharmed().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_conversation_may_break_off_anywhere() {
    let mut rig = TransportFixture::start().await;
    let whole = [connection_opening(), complete_request(1)].concat();
    for end in 0..whole.len() {
        let mut socket = rig.connect().await;
        socket.write_all(&whole[..end]).await.expect("an open connection");
        if end % 2 == 0 {
            // Ends with a reset instead of a close.
            socket.set_zero_linger().expect("a TCP socket");
        }
    }
    rig.assert_unharmed().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_that_are_reset_as_soon_as_they_begin_exhaust_nothing() {
    let mut rig = TransportFixture::start().await;
    for waits in [false, true] {
        let mut fields = request_fields();
        if waits {
            fields[2].1 = "/tensorflow.CoordinationService/GetKeyValue";
        }
        let head = header_block(&fields);
        let message = [0, 0, 0, 0, 3, 0x0A, 1, b'k'];
        let rounds = (0..30_000u32).map(|n| {
            let stream = 2 * n + 1;
            [
                http2_frame(HEADERS, END_HEADERS, stream, &head),
                http2_frame(DATA, END_STREAM, stream, &message),
                http2_frame(RST_STREAM, 0, stream, &8u32.to_be_bytes()),
            ]
            .concat()
        });
        write_while_reading(rig.connect().await, std::iter::once(connection_opening()).chain(rounds)).await;
        rig.assert_unharmed().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn headers_without_end_are_cut_off() {
    let mut rig = TransportFixture::start().await;
    // One field that is far too long, many fields, and fields without an end.
    let long = "x".repeat(4 << 20);
    let one = header_block(&[&request_fields()[..], &[("x-long", &long)]].concat());
    let many = header_block(&vec![("x-one-of-many", "value"); 100_000]);
    for block in [one, many] {
        let pieces: Vec<&[u8]> = block.chunks(16_000).collect();
        let frames = pieces.iter().enumerate().map(|(n, piece)| {
            let kind = if n == 0 { HEADERS } else { CONTINUATION };
            let last = n + 1 == pieces.len();
            http2_frame(kind, if last { END_HEADERS } else { 0 }, 1, piece)
        });
        write_while_reading(rig.connect().await, std::iter::once(connection_opening()).chain(frames)).await;
        rig.assert_unharmed().await;
    }
    let endless = (0..8_000).map(|n| {
        let piece = header_block(&[("x-another", &"y".repeat(10_000))]);
        http2_frame(if n == 0 { HEADERS } else { CONTINUATION }, 0, 1, &piece)
    });
    write_while_reading(rig.connect().await, std::iter::once(connection_opening()).chain(endless)).await;
    // Empty CONTINUATION frames cost the sender next to nothing.
    let empty = (0..200_000).map(|n| http2_frame(if n == 0 { HEADERS } else { CONTINUATION }, 0, 1, &[]));
    write_while_reading(rig.connect().await, std::iter::once(connection_opening()).chain(empty)).await;
    rig.assert_unharmed().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn floods_of_frames_that_ask_for_nothing_are_borne() {
    let mut rig = TransportFixture::start().await;
    let floods = [
        http2_frame(SETTINGS, 0, 0, &[]),
        http2_frame(PING, 0, 0, &[0; 8]),
        http2_frame(WINDOW_UPDATE, 0, 0, &1u32.to_be_bytes()),
        http2_frame(PRIORITY, 0, 3, &[0, 0, 0, 0, 1]),
        http2_frame(DATA, 0, 1, &[]),
        // An unknown frame type, which must be ignored.
        http2_frame(0x77, 0, 0, &[0; 100]),
    ];
    for frame in floods {
        let head = http2_frame(HEADERS, END_HEADERS, 1, &header_block(&request_fields()));
        let flood = frame.repeat(1000);
        let pieces = [connection_opening(), head].into_iter().chain(std::iter::repeat_n(flood, 200));
        write_while_reading(rig.connect().await, pieces).await;
        rig.assert_unharmed().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn unread_responses_of_a_flood_are_bounded() {
    let mut rig = TransportFixture::start().await;
    let mut socket = rig.connect().await;
    socket.write_all(&connection_opening()).await.expect("an open connection");
    let flood = http2_frame(PING, 0, 0, &[0; 8]).repeat(1000);
    // Nothing is read: at some point the server must stop reading, or close.
    let pouring = async {
        for _ in 0..10_000 {
            if socket.write_all(&flood).await.is_err() {
                return;
            }
        }
    };
    let _ = tokio::time::timeout(Duration::from_secs(2), pouring).await;
    rig.assert_unharmed().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn slow_peers_delay_no_other_peer() {
    let mut rig = TransportFixture::start().await;
    let whole = [connection_opening(), complete_request(1)].concat();
    let silent = rig.connect().await;
    let mut slow = Vec::new();
    for n in 0..200 {
        let mut socket = rig.connect().await;
        socket.write_all(&whole[..n % whole.len()]).await.expect("an open connection");
        slow.push(socket);
    }
    for _ in 0..5 {
        rig.assert_unharmed().await;
        for (n, socket) in slow.iter_mut().enumerate() {
            if let Some(byte) = whole.get(n) {
                // The server may have closed slow connections.
                let _ = socket.write_all(&[*byte]).await;
            }
        }
    }
    // A connection without any input is closed in the end.
    let mut silent = silent;
    wait_until_closed(&mut silent).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn hundreds_of_idle_connections_cost_little() {
    let mut rig = TransportFixture::start().await;
    let mut idle = Vec::new();
    for _ in 0..800 {
        let mut socket = rig.connect().await;
        socket.write_all(&connection_opening()).await.expect("an open connection");
        idle.push(socket);
    }
    rig.assert_unharmed().await;
    drop(idle);
    rig.assert_unharmed().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_beyond_the_bound_are_closed_and_others_live() {
    let server = MusterServer::patient(&["--tasks", "2", "--grpc-connections", "20", "--log", "error"]);
    let witness = SecondClient::register(&server, "default").await;
    let mut kept = Vec::new();
    for _ in 0..60 {
        let mut socket = TcpStream::connect(server.grpc).await.expect("the server listens");
        // It may be closed by now.
        let _ = socket.write_all(&connection_opening()).await;
        kept.push(socket);
    }
    let last = kept.last_mut().expect("there are some");
    wait_until_closed(last).await;
    witness.assert_served().await;
    drop(kept);
    // A closed connection makes room.
    let deadline = tokio::time::Instant::now() + PATIENCE;
    loop {
        let mut socket = TcpStream::connect(server.grpc).await.expect("the server listens");
        let _ = socket.write_all(&connection_opening()).await;
        let mut byte = [0];
        if socket.read(&mut byte).await.is_ok_and(|count| count == 1) {
            break;
        }
        assert!(tokio::time::Instant::now() < deadline, "no room comes back");
    }
    witness.assert_served().await;
}
