//! Tests both halves against a peer that is simulated frame by frame.

use std::collections::BTreeMap;
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use fastrand::Rng;

use super::frame::{FRAME_HEADER_LEN, FrameHeader, INITIAL_WINDOW, flag, kind, put_frame_header, setting};
use super::*;

const SETTINGS: Settings = Settings {
    streams: 8,
    frame: 1 << 20,
    stream_window: 1 << 20,
    connection_window: 2 << 20,
    header_list: 16 << 10,
    state_bytes: 1 << 20,
};

fn frame(kind: u8, flags: u8, stream: StreamId, payload: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    put_frame_header(&mut bytes, payload.len(), kind, flags, stream);
    bytes.extend_from_slice(payload);
    bytes
}

/// `:method: POST`, a path of one letter, and a field.
fn head(letter: u8) -> Vec<u8> {
    [&[0x83, 0x86, 0x04, 2, b'/', letter][..], b"\x00\x01x\x01y"].concat()
}

fn settings(pairs: &[(u16, u32)]) -> Vec<u8> {
    let payload: Vec<u8> =
        pairs.iter().flat_map(|(id, value)| [&id.to_be_bytes()[..], &value.to_be_bytes()].concat()).collect();
    frame(kind::SETTINGS, 0, 0, &payload)
}

fn sent(sender: &mut Sender) -> Vec<u8> {
    struct All(Vec<u8>);
    impl tokio::io::AsyncWrite for All {
        fn poll_write(
            mut self: std::pin::Pin<&mut Self>,
            _: &mut Context<'_>,
            bytes: &[u8],
        ) -> Poll<std::io::Result<usize>> {
            self.0.extend_from_slice(bytes);
            Poll::Ready(Ok(bytes.len()))
        }
        fn poll_flush(self: std::pin::Pin<&mut Self>, _: &mut Context<'_>) -> Poll<std::io::Result<()>> {
            Poll::Ready(Ok(()))
        }
        fn poll_shutdown(self: std::pin::Pin<&mut Self>, _: &mut Context<'_>) -> Poll<std::io::Result<()>> {
            Poll::Ready(Ok(()))
        }
    }
    let mut all = All(Vec::new());
    loop {
        sender.end_batch();
        assert!(sender.output.poll_send(&mut Context::from_waker(Waker::noop()), &mut all).is_ready());
        sender.resume();
        if sender.output.is_empty() && !sender.can_resume() {
            return all.0;
        }
    }
}

fn frames(mut bytes: &[u8]) -> Vec<(FrameHeader, Vec<u8>)> {
    let mut all = Vec::new();
    while let Some((head, rest)) = bytes.split_first_chunk::<FRAME_HEADER_LEN>() {
        let head = FrameHeader::read(*head);
        let (payload, rest) = rest.split_at(head.length);
        all.push((head, payload.to_vec()));
        bytes = rest;
    }
    assert!(bytes.is_empty(), "only whole frames are sent");
    all
}

struct TestPeer {
    receiver: Receiver,
    sender: Sender,
    cache: HeaderBlockCache<RequestHead>,
    /// The events, with the data of each stream put together.
    told: Vec<String>,
}

impl TestPeer {
    fn new() -> Self {
        Self {
            receiver: Receiver::new(),
            sender: Sender::new(SETTINGS, StatePool::new(1 << 30)),
            cache: HeaderBlockCache::new(),
            told: Vec::new(),
        }
    }

    fn receive(&mut self, mut input: &[u8]) -> Result<(), ConnectionError> {
        while let Some(event) = self.receiver.next(&mut input, &mut self.sender, &mut self.cache)? {
            match event {
                ReceiveEvent::Request { stream, head, ended } => {
                    self.told.push(format!("{stream}: {} {} {ended} ", head.method, head.path));
                }
                ReceiveEvent::Data { stream, bytes, ended } => {
                    let mark = format!("{stream}: ");
                    let line = self.told.iter_mut().rfind(|line| line.starts_with(&mark)).expect("a request");
                    line.extend(bytes.iter().map(|byte| char::from(*byte)));
                    if ended {
                        line.push('.');
                    }
                    self.sender.release(stream, bytes.len());
                }
                ReceiveEvent::Reset { stream, .. } => self.told.push(format!("{stream} reset")),
                ReceiveEvent::GoAway => self.told.push("left".into()),
            }
        }
        assert!(input.is_empty(), "everything is taken");
        Ok(())
    }
}

fn conversation() -> Vec<u8> {
    let padded = [&[3][..], b"padded", &[0; 3]].concat();
    let with_priority = [&[0, 0, 0, 0, 16][..], &head(b'p')].concat();
    let split = head(b's');
    [
        settings(&[(setting::INITIAL_WINDOW_SIZE, 1000), (99, 7)]),
        frame(kind::HEADERS, flag::END_HEADERS, 1, &[&[0x20][..], &head(b'a')].concat()),
        frame(kind::DATA, 0, 1, b"one "),
        frame(kind::HEADERS, flag::END_HEADERS | flag::END_STREAM, 3, &head(b'a')),
        frame(kind::DATA, flag::PADDED, 1, &padded),
        frame(kind::PING, 0, 0, b"pingpong"),
        frame(kind::DATA, 0, 1, b""),
        frame(77, 0xff, 1, b"nobody knows"),
        frame(kind::DATA, flag::END_STREAM, 1, b" more"),
        frame(kind::HEADERS, flag::END_HEADERS | flag::PRIORITY, 5, &with_priority),
        frame(kind::RST_STREAM, 0, 5, &8_u32.to_be_bytes()),
        frame(kind::DATA, 0, 5, b"too late"),
        frame(kind::HEADERS, 0, 7, &split[..3]),
        frame(kind::CONTINUATION, 0, 7, &split[3..5]),
        frame(kind::CONTINUATION, flag::END_HEADERS, 7, &split[5..]),
        frame(kind::HEADERS, flag::END_HEADERS | flag::END_STREAM, 7, b"\x00\x01t\x01v"),
        frame(kind::HEADERS, flag::END_HEADERS, 9, b"\x83\x00\x01A\x01y"),
        frame(kind::GOAWAY, 0, 0, &[0; 30]),
    ]
    .concat()
}

#[test]
fn a_conversation_means_the_same_however_it_is_cut() {
    let whole = conversation();
    let mut rng = Rng::with_seed(5);
    let mut first = None;
    for round in 0..400 {
        let mut rig = TestPeer::new();
        let mut left = whole.as_slice();
        while !left.is_empty() {
            let piece = match round {
                0 => left.len(),
                1 => 1,
                _ => rng.usize(1..=left.len().min(60)),
            };
            let (piece, rest) = left.split_at(piece);
            rig.receive(piece).expect("it is in order");
            left = rest;
        }
        let said = sent(&mut rig.sender);
        let expected = first.get_or_insert_with(|| (rig.told.clone(), said.clone()));
        assert_eq!((&rig.told, &said), (&expected.0, &expected.1), "round {round}");
    }
    let (told, said) = first.expect("it was heard");
    assert_eq!(
        told,
        [
            "1: POST /a false one padded more.",
            "3: POST /a true ",
            "5: POST /p false ",
            "5 reset",
            "7: POST /s false .",
            "left"
        ]
    );
    let said = frames(&said);
    let kinds: Vec<u8> = said.iter().map(|(head, _)| head.kind).collect();
    assert_eq!(
        kinds,
        [kind::SETTINGS, kind::WINDOW_UPDATE, kind::SETTINGS, kind::PING, kind::RST_STREAM, kind::RST_STREAM],
        "data on a stream that the peer has reset, and the malformed request, are refused"
    );
    assert!(said[3].0.has(flag::ACK) && said[3].1 == b"pingpong");
}

#[test]
fn protocol_errors_are_named() {
    let open = [settings(&[]), frame(kind::HEADERS, flag::END_HEADERS, 1, &head(b'a'))].concat();
    let too_much = vec![frame(kind::DATA, 0, 1, &vec![0; 1 << 19]); 3].concat();
    let cases: [(&str, Vec<u8>); 14] = [
        ("an even stream", frame(kind::HEADERS, flag::END_HEADERS, 2, &head(b'a'))),
        ("data on nothing", frame(kind::DATA, 0, 9, b"x")),
        ("data on the connection", frame(kind::DATA, 0, 0, b"x")),
        ("more than the window", too_much),
        ("a window of nothing", frame(kind::WINDOW_UPDATE, 0, 0, &[0; 4])),
        ("a window beyond all", frame(kind::WINDOW_UPDATE, 0, 0, &0x7fff_ffff_u32.to_be_bytes())),
        ("a frame too large", frame(kind::DATA, 0, 1, &vec![0; (1 << 20) + 1])),
        ("a continuation of nothing", frame(kind::CONTINUATION, flag::END_HEADERS, 1, b"")),
        ("an interrupted head", [frame(kind::HEADERS, 0, 3, b""), frame(kind::PING, 0, 0, &[0; 8])].concat()),
        ("a garbled head", frame(kind::HEADERS, flag::END_HEADERS, 3, &[0xff])),
        ("a short ping", frame(kind::PING, 0, 0, &[0; 7])),
        ("a push", frame(kind::PUSH_PROMISE, 0, 1, &[0; 8])),
        ("cut settings", frame(kind::SETTINGS, 0, 0, &[0; 5])),
        ("a tiny frame size", settings(&[(setting::MAX_FRAME_SIZE, 100)])),
    ];
    for (name, bytes) in cases {
        let mut rig = TestPeer::new();
        rig.receive(&open).expect("it begins in order");
        // Consumed bytes are not returned here, so that windows run out.
        let mut input = bytes.as_slice();
        let fault = loop {
            match rig.receiver.next(&mut input, &mut rig.sender, &mut rig.cache) {
                Ok(Some(_)) => {}
                Ok(None) => break None,
                Err(fault) => break Some(fault),
            }
        };
        let fault = fault.unwrap_or_else(|| panic!("{name} is borne"));
        rig.sender.send_goaway(fault);
        let said = sent(&mut rig.sender);
        assert_eq!(frames(&said).last().expect("a goodbye").0.kind, kind::GOAWAY, "{name}");
    }
    let mut early = TestPeer::new();
    assert!(early.receive(&frame(kind::PING, 0, 0, &[0; 8])).is_err(), "settings come first");
}

#[test]
fn noise_never_panics() {
    let mut rng = Rng::with_seed(6);
    for _ in 0..3000 {
        let mut bytes = conversation();
        for _ in 0..rng.usize(1..6) {
            let place = rng.usize(..bytes.len());
            bytes[place] = rng.u8(..);
        }
        let mut rig = TestPeer::new();
        let mut input = bytes.as_slice();
        while let Ok(Some(_)) = rig.receiver.next(&mut input, &mut rig.sender, &mut rig.cache) {}
    }
}

/// A peer that tracks its windows, and opens them at random.
#[test]
fn everything_arrives_and_no_window_is_ever_overdrawn() {
    for seed in 0..200 {
        let mut rng = Rng::with_seed(seed);
        let mut rig = TestPeer::new();
        let mut initial = rng.i64(0..3000);
        let mut hello = settings(&[(setting::INITIAL_WINDOW_SIZE, initial as u32)]);
        let streams: Vec<StreamId> = (0..rng.u32(1..8)).map(|n| 2 * n + 1).collect();
        for stream in &streams {
            hello.extend(frame(kind::HEADERS, flag::END_HEADERS | flag::END_STREAM, *stream, &head(b'a')));
        }
        rig.receive(&hello).expect("it is in order");
        let mut windows: BTreeMap<StreamId, i64> = streams.iter().map(|id| (*id, initial)).collect();
        let mut connection = INITIAL_WINDOW;
        let mut expected: BTreeMap<StreamId, Vec<u8>> = BTreeMap::new();
        for stream in &streams {
            let parts: Vec<Bytes> =
                (0..rng.usize(0..5)).map(|_| vec![rng.u8(..); rng.usize(0..40_000)].into()).collect();
            expected.insert(*stream, parts.concat());
            rig.sender.answer(*stream, &GRPC_RESPONSE_HEADERS, parts, &GRPC_OK_TRAILERS);
        }
        let mut arrived: BTreeMap<StreamId, Vec<u8>> = streams.iter().map(|id| (*id, Vec::new())).collect();
        let mut ended = Vec::new();
        for _ in 0..100_000 {
            for (head, payload) in frames(&sent(&mut rig.sender)) {
                match head.kind {
                    kind::DATA => {
                        assert!(!ended.contains(&head.stream));
                        connection -= head.length as i64;
                        let window = windows.get_mut(&head.stream).expect("a stream of ours");
                        *window -= head.length as i64;
                        assert!(*window >= 0 && connection >= 0, "overdrawn by seed {seed}");
                        arrived.get_mut(&head.stream).expect("one of ours").extend(payload);
                    }
                    kind::HEADERS if head.has(flag::END_STREAM) => ended.push(head.stream),
                    _ => {}
                }
            }
            if ended.len() == streams.len() {
                break;
            }
            let more = rng.u32(1..20_000);
            let stream = streams[rng.usize(..streams.len())];
            let opened = match rng.u8(0..5) {
                0 => {
                    let next = rng.i64(0..5000);
                    windows.values_mut().for_each(|window| *window += next - initial);
                    initial = next;
                    settings(&[(setting::INITIAL_WINDOW_SIZE, initial as u32)])
                }
                1 | 2 => {
                    connection += i64::from(more);
                    frame(kind::WINDOW_UPDATE, 0, 0, &more.to_be_bytes())
                }
                _ => {
                    *windows.get_mut(&stream).expect("one of ours") += i64::from(more);
                    frame(kind::WINDOW_UPDATE, 0, stream, &more.to_be_bytes())
                }
            };
            rig.receive(&opened).expect("it is in order");
        }
        assert_eq!(arrived, expected, "seed {seed}");
        assert_eq!((rig.sender.unsent(), rig.sender.streams()), (0, 0));
    }
}

#[test]
fn a_graceful_shutdown_accepts_requests_in_flight() {
    let mut rig = TestPeer::new();
    rig.receive(&settings(&[])).expect("it is in order");
    sent(&mut rig.sender);
    rig.sender.begin_shutdown();
    let said = frames(&sent(&mut rig.sender));
    let (ping, payload) = &said[1];
    assert_eq!((said[0].0.kind, ping.kind), (kind::GOAWAY, kind::PING));
    assert_eq!(said[0].1[..4], 0x7fff_ffff_u32.to_be_bytes());
    rig.receive(&frame(kind::HEADERS, flag::END_HEADERS | flag::END_STREAM, 1, &head(b'a')))
        .expect("in order");
    rig.receive(&frame(kind::PING, flag::ACK, 0, payload)).expect("in order");
    rig.receive(&frame(kind::HEADERS, flag::END_HEADERS | flag::END_STREAM, 3, &head(b'a')))
        .expect("in order");
    assert_eq!(rig.told, ["1: POST /a true "], "what came after the last goodbye is not taken");
    assert!(!rig.sender.is_shut_down());
    let said = frames(&sent(&mut rig.sender));
    assert_eq!(said[0].1[..4], 1_u32.to_be_bytes());
    rig.sender.end(1);
    assert!(rig.sender.is_shut_down());
}

#[test]
fn streams_have_a_bound_and_those_given_up_leave_nothing() {
    let mut rig = TestPeer::new();
    rig.receive(&settings(&[(setting::INITIAL_WINDOW_SIZE, 0)])).expect("it is in order");
    for n in 0..10_000_u32 {
        let stream = 2 * n + 1;
        rig.receive(&frame(kind::HEADERS, flag::END_HEADERS | flag::END_STREAM, stream, &head(b'a')))
            .expect("in order");
        rig.sender.answer(stream, &GRPC_RESPONSE_HEADERS, [Bytes::from_static(&[0; 100])], &GRPC_OK_TRAILERS);
        assert!(rig.sender.streams() <= SETTINGS.streams as usize);
        if n % 8 == 7 {
            for stream in (0..8).map(|k| 2 * (n - k) + 1) {
                rig.receive(&frame(kind::RST_STREAM, 0, stream, &[0; 4])).expect("in order");
            }
            assert_eq!((rig.sender.streams(), rig.sender.unsent() - rig.sender.output.len()), (0, 0));
        }
        sent(&mut rig.sender);
    }
}

#[test]
fn a_busy_peer_yields_to_others() {
    let open: Vec<u8> = (0..8)
        .flat_map(|n| frame(kind::HEADERS, flag::END_HEADERS | flag::END_STREAM, 2 * n + 1, &head(b'a')))
        .collect();
    let idle =
        [settings(&[(setting::INITIAL_WINDOW_SIZE, 1)]), settings(&[(setting::INITIAL_WINDOW_SIZE, 0)])];
    for flood in [frame(kind::PING, 0, 0, &[0; 8]).repeat(20_000), idle.concat().repeat(20_000)] {
        let mut rig = TestPeer::new();
        rig.receive(&[settings(&[]), open.clone()].concat()).expect("it is in order");
        let (mut input, mut turns) = (flood.as_slice(), 0);
        while !input.is_empty() {
            let event =
                rig.receiver.next(&mut input, &mut rig.sender, &mut rig.cache).expect("it is in order");
            assert!(event.is_none());
            assert!(rig.sender.output.len() < 200 << 10);
            sent(&mut rig.sender);
            turns += 1;
        }
        assert!(turns > 2, "{turns}");
    }
}

#[test]
fn the_end_of_a_request_is_told_though_nothing_more_comes() {
    let mut owed = 0;
    // The last frame of the input completes the work of a turn.
    for done in 1..64 {
        let mut rig = TestPeer::new();
        let open = frame(kind::HEADERS, flag::END_HEADERS, 1, &head(b'a'));
        rig.receive(&[settings(&[]), open].concat()).expect("it is in order");
        rig.sender.end_batch();
        let mut steps = 0;
        while !rig.sender.should_yield() {
            rig.sender.count_work(1);
            steps += 1;
        }
        rig.sender.end_batch();
        rig.sender.count_work(steps - done);
        rig.receive(&frame(kind::DATA, flag::END_STREAM, 1, &[])).expect("it is in order");
        while rig.receiver.owes_event() {
            assert!(rig.sender.should_yield());
            owed += 1;
            rig.sender.end_batch();
            rig.receive(&[]).expect("it is in order");
        }
        assert_eq!(rig.told, ["1: POST /a false ."], "{done} steps before the end of a turn");
    }
    assert!(owed > 0, "the end of a turn came between a frame and its event");
}
