//! Tests the receiving and the sending half against a peer that is simulated frame by frame.
//!
//! Begin at `TestPeer`.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use fastrand::Rng;

use super::frame::{INITIAL_WINDOW, flag, kind, put_frame_header, setting};
use super::sender::STREAM_BYTES;
use super::test_support::{TestSocket, drain_output, parse_frames};
use super::*;

const SETTINGS: AnnouncedSettings = AnnouncedSettings {
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
fn request_header_block(letter: u8) -> Vec<u8> {
    [&[0x83, 0x86, 0x04, 2, b'/', letter][..], b"\x00\x01x\x01y"].concat()
}

fn settings_frame(pairs: &[(u16, u32)]) -> Vec<u8> {
    let payload: Vec<u8> =
        pairs.iter().flat_map(|(id, value)| [&id.to_be_bytes()[..], &value.to_be_bytes()].concat()).collect();
    frame(kind::SETTINGS, 0, 0, &payload)
}

struct TestPeer {
    receiver: Http2Receiver,
    sender: Http2Sender,
    cache: HeaderBlockCache<RequestHead>,
    /// The events, with the data of each stream put together.
    told: Vec<String>,
}

impl TestPeer {
    fn new() -> Self {
        Self::with_pool(&StateMemoryPool::new(1 << 30))
    }

    fn with_pool(pool: &Arc<StateMemoryPool>) -> Self {
        Self {
            receiver: Http2Receiver::default(),
            sender: Http2Sender::new(SETTINGS, Arc::clone(pool)),
            cache: HeaderBlockCache::new(),
            told: Vec::new(),
        }
    }

    fn receive(&mut self, mut input: &[u8]) -> Result<(), ConnectionError> {
        while let Some(event) = self.receiver.next_event(&mut input, &mut self.sender, &mut self.cache)? {
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
                    self.sender.release_windows(stream, bytes.len());
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
    let with_priority = [&[0, 0, 0, 0, 16][..], &request_header_block(b'p')].concat();
    let split = request_header_block(b's');
    [
        settings_frame(&[(setting::INITIAL_WINDOW_SIZE, 1000), (99, 7)]),
        frame(kind::HEADERS, flag::END_HEADERS, 1, &[&[0x20][..], &request_header_block(b'a')].concat()),
        frame(kind::DATA, 0, 1, b"one "),
        frame(kind::HEADERS, flag::END_HEADERS | flag::END_STREAM, 3, &request_header_block(b'a')),
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
        let said = drain_output(&mut rig.sender);
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
    let said = parse_frames(&said);
    let kinds: Vec<u8> = said.iter().map(|(head, _)| head.kind).collect();
    assert_eq!(
        kinds,
        [kind::SETTINGS, kind::WINDOW_UPDATE, kind::SETTINGS, kind::PING, kind::RST_STREAM, kind::RST_STREAM],
        "data on a stream that the peer has reset, and the malformed request, are refused"
    );
    assert!(said[3].0.has_flag(flag::ACK) && said[3].1 == b"pingpong");
}

#[test]
fn protocol_errors_are_named() {
    let open = [settings_frame(&[]), frame(kind::HEADERS, flag::END_HEADERS, 1, &request_header_block(b'a'))]
        .concat();
    let too_much = vec![frame(kind::DATA, 0, 1, &vec![0; 1 << 19]); 3].concat();
    let cases: [(&str, Vec<u8>); 14] = [
        ("an even stream", frame(kind::HEADERS, flag::END_HEADERS, 2, &request_header_block(b'a'))),
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
        ("a tiny frame size", settings_frame(&[(setting::MAX_FRAME_SIZE, 100)])),
    ];
    for (name, bytes) in cases {
        let mut rig = TestPeer::new();
        rig.receive(&open).expect("it begins in order");
        // Consumed bytes are not returned here, so that windows run out.
        let mut input = bytes.as_slice();
        let fault = loop {
            match rig.receiver.next_event(&mut input, &mut rig.sender, &mut rig.cache) {
                Ok(Some(_)) => {}
                Ok(None) => break None,
                Err(fault) => break Some(fault),
            }
        };
        let fault = fault.unwrap_or_else(|| panic!("{name} is borne"));
        rig.sender.send_goaway(fault);
        let said = drain_output(&mut rig.sender);
        assert_eq!(parse_frames(&said).last().expect("a goodbye").0.kind, kind::GOAWAY, "{name}");
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
        while let Ok(Some(_)) = rig.receiver.next_event(&mut input, &mut rig.sender, &mut rig.cache) {}
    }
}

/// A peer that tracks its windows, and opens them at random.
#[test]
fn everything_arrives_and_no_window_is_ever_overdrawn() {
    for seed in 0..200 {
        let mut rng = Rng::with_seed(seed);
        let mut rig = TestPeer::new();
        // Every eighth peer opens no window at first.
        let mut initial = if seed % 8 == 0 { 0 } else { rng.i64(0..3000) };
        let mut hello = settings_frame(&[(setting::INITIAL_WINDOW_SIZE, initial as u32)]);
        let streams: Vec<StreamId> = (0..rng.u32(1..8)).map(|n| 2 * n + 1).collect();
        for stream in &streams {
            hello.extend(frame(
                kind::HEADERS,
                flag::END_HEADERS | flag::END_STREAM,
                *stream,
                &request_header_block(b'a'),
            ));
        }
        rig.receive(&hello).expect("it is in order");
        let mut windows: BTreeMap<StreamId, i64> = streams.iter().map(|id| (*id, initial)).collect();
        let mut connection = INITIAL_WINDOW;
        let mut expected: BTreeMap<StreamId, Vec<u8>> = BTreeMap::new();
        for stream in &streams {
            if stream.is_multiple_of(3) {
                let data = vec![0xa5; *stream as usize];
                rig.sender.send_short_response(*stream, &GRPC_RESPONSE_HEADERS, &data, &GRPC_OK_TRAILERS);
                expected.insert(*stream, data);
                continue;
            }
            let parts: Vec<Bytes> =
                (0..rng.usize(0..5)).map(|_| vec![rng.u8(..); rng.usize(0..40_000)].into()).collect();
            expected.insert(*stream, parts.concat());
            rig.sender.send_response(*stream, &GRPC_RESPONSE_HEADERS, parts, &GRPC_OK_TRAILERS);
        }
        let mut arrived: BTreeMap<StreamId, Vec<u8>> = streams.iter().map(|id| (*id, Vec::new())).collect();
        let mut ended = Vec::new();
        for _ in 0..100_000 {
            for (head, payload) in parse_frames(&drain_output(&mut rig.sender)) {
                match head.kind {
                    kind::DATA => {
                        assert!(!ended.contains(&head.stream));
                        connection -= head.length as i64;
                        let window = windows.get_mut(&head.stream).expect("a stream of ours");
                        *window -= head.length as i64;
                        assert!(*window >= 0 && connection >= 0, "overdrawn by seed {seed}");
                        arrived.get_mut(&head.stream).expect("one of ours").extend(payload);
                    }
                    kind::HEADERS if head.has_flag(flag::END_STREAM) => ended.push(head.stream),
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
                    settings_frame(&[(setting::INITIAL_WINDOW_SIZE, initial as u32)])
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
        assert_eq!((rig.sender.unsent_bytes(), rig.sender.stream_count()), (0, 0));
    }
}

#[test]
fn a_graceful_shutdown_accepts_requests_in_flight() {
    let mut rig = TestPeer::new();
    rig.receive(&settings_frame(&[])).expect("it is in order");
    drain_output(&mut rig.sender);
    rig.sender.begin_shutdown();
    let said = parse_frames(&drain_output(&mut rig.sender));
    let (ping, payload) = &said[1];
    assert_eq!((said[0].0.kind, ping.kind), (kind::GOAWAY, kind::PING));
    assert_eq!(said[0].1[..4], 0x7fff_ffff_u32.to_be_bytes());
    rig.receive(&frame(kind::HEADERS, flag::END_HEADERS | flag::END_STREAM, 1, &request_header_block(b'a')))
        .expect("in order");
    rig.receive(&frame(kind::PING, flag::ACK, 0, payload)).expect("in order");
    rig.receive(&frame(kind::HEADERS, flag::END_HEADERS | flag::END_STREAM, 3, &request_header_block(b'a')))
        .expect("in order");
    assert_eq!(rig.told, ["1: POST /a true "], "what came after the last goodbye is not taken");
    assert!(!rig.sender.is_shut_down());
    let said = parse_frames(&drain_output(&mut rig.sender));
    assert_eq!(said[0].1[..4], 1_u32.to_be_bytes());
    rig.sender.end_stream(1);
    assert!(rig.sender.is_shut_down());
}

#[test]
fn streams_have_a_bound_and_those_given_up_leave_nothing() {
    let mut rig = TestPeer::new();
    rig.receive(&settings_frame(&[(setting::INITIAL_WINDOW_SIZE, 0)])).expect("it is in order");
    for n in 0..10_000_u32 {
        let stream = 2 * n + 1;
        rig.receive(&frame(
            kind::HEADERS,
            flag::END_HEADERS | flag::END_STREAM,
            stream,
            &request_header_block(b'a'),
        ))
        .expect("in order");
        rig.sender.send_response(
            stream,
            &GRPC_RESPONSE_HEADERS,
            [Bytes::from_static(&[0; 100])],
            &GRPC_OK_TRAILERS,
        );
        assert!(rig.sender.stream_count() <= SETTINGS.streams as usize);
        if n % 8 == 7 {
            for stream in (0..8).map(|k| 2 * (n - k) + 1) {
                rig.receive(&frame(kind::RST_STREAM, 0, stream, &[0; 4])).expect("in order");
            }
            assert_eq!(
                (rig.sender.stream_count(), rig.sender.unsent_bytes() - rig.sender.output.len()),
                (0, 0)
            );
        }
        drain_output(&mut rig.sender);
    }
}

#[test]
fn an_incomplete_frame_takes_its_memory_from_the_pool() {
    // A header block whose second half does not come: on its own, and after a piece that is kept.
    let padding = vec![b'v'; 12 << 10];
    let block = [&request_header_block(b'a')[..], b"\x00\x01x\x7f\x81\x5f", &padding].concat();
    let (piece, rest) = block.split_at(4 << 10);
    let whole = frame(kind::HEADERS, flag::END_HEADERS, 1, &block);
    let pieces =
        [frame(kind::HEADERS, 0, 1, piece), frame(kind::CONTINUATION, flag::END_HEADERS, 1, rest)].concat();
    for bytes in [whole, pieces] {
        let pool = StateMemoryPool::with_frame_limit(1 << 20, 64 << 10);
        let (first, second) = bytes.split_at(bytes.len() - 10);
        let mut peer = TestPeer::with_pool(&pool);
        peer.receive(&settings_frame(&[])).expect("settings");
        peer.receive(first).expect("there is room");
        assert!(pool.taken_bytes() > 0, "what exceeds the allowance");
        peer.receive(second).expect("the rest of the block");
        assert_eq!(peer.told, ["1: POST /a false "]);
        drop(peer);
        assert_eq!(pool.taken_bytes(), 0, "all of it comes back");

        let pool = StateMemoryPool::with_frame_limit(0, 0);
        let mut peer = TestPeer::with_pool(&pool);
        peer.receive(&settings_frame(&[])).expect("settings");
        let refused = peer.receive(first).expect_err("the allowance does not hold it");
        assert_eq!(refused.reason, ErrorCode::EnhanceYourCalm, "{}", refused.what);
    }
}

#[test]
fn a_busy_peer_yields_to_others() {
    let open: Vec<u8> = (0..8)
        .flat_map(|n| {
            frame(kind::HEADERS, flag::END_HEADERS | flag::END_STREAM, 2 * n + 1, &request_header_block(b'a'))
        })
        .collect();
    let idle = [
        settings_frame(&[(setting::INITIAL_WINDOW_SIZE, 1)]),
        settings_frame(&[(setting::INITIAL_WINDOW_SIZE, 0)]),
    ];
    for flood in [frame(kind::PING, 0, 0, &[0; 8]).repeat(20_000), idle.concat().repeat(20_000)] {
        let mut rig = TestPeer::new();
        rig.receive(&[settings_frame(&[]), open.clone()].concat()).expect("it is in order");
        let (mut input, mut turns) = (flood.as_slice(), 0);
        while !input.is_empty() {
            let event =
                rig.receiver.next_event(&mut input, &mut rig.sender, &mut rig.cache).expect("it is in order");
            assert!(event.is_none());
            assert!(rig.sender.output.len() < 200 << 10);
            drain_output(&mut rig.sender);
            turns += 1;
        }
        assert!(turns > 2, "{turns}");
    }
}

#[test]
fn nothing_is_processed_after_the_end_of_a_turn_until_the_next_begins() {
    let requests = |ids: [u32; 3]| {
        let open =
            |id| frame(kind::HEADERS, flag::END_HEADERS | flag::END_STREAM, id, &request_header_block(b'a'));
        ids.map(open).concat()
    };
    let mut rig = TestPeer::new();
    rig.receive(&settings_frame(&[])).expect("it is in order");
    let bytes = requests([1, 3, 5]);
    let mut input = bytes.as_slice();
    let mut next = |rig: &mut TestPeer| {
        let event =
            rig.receiver.next_event(&mut input, &mut rig.sender, &mut rig.cache).expect("it is in order");
        (event.is_some(), input.len())
    };
    assert!(next(&mut rig).0);
    rig.sender.end_turn();
    let (told, left) = next(&mut rig);
    assert!(!told && left > 0);
    // To send the answers ends a batch, and no turn.
    rig.sender.end_batch();
    assert!(rig.sender.is_turn_over());
    assert_eq!(next(&mut rig), (false, left));
    rig.sender.begin_turn();
    assert!(next(&mut rig).0);
    assert!(next(&mut rig).0);
    assert_eq!(next(&mut rig), (false, 0));
}

#[test]
fn the_end_of_a_request_is_told_though_nothing_more_comes() {
    let mut owed = 0;
    // The last frame of the input completes the work of a turn.
    for done in 1..64 {
        let mut rig = TestPeer::new();
        let open = frame(kind::HEADERS, flag::END_HEADERS, 1, &request_header_block(b'a'));
        rig.receive(&[settings_frame(&[]), open].concat()).expect("it is in order");
        rig.sender.end_batch();
        let mut steps = 0;
        while !rig.sender.should_yield() {
            rig.sender.count_work(1);
            steps += 1;
        }
        rig.sender.end_batch();
        rig.sender.count_work(steps - done);
        rig.receive(&frame(kind::DATA, flag::END_STREAM, 1, &[])).expect("it is in order");
        while rig.receiver.has_pending_event() {
            assert!(rig.sender.should_yield());
            owed += 1;
            rig.sender.end_batch();
            rig.receive(&[]).expect("it is in order");
        }
        assert_eq!(rig.told, ["1: POST /a false ."], "{done} steps before the end of a turn");
    }
    assert!(owed > 0, "the end of a turn came between a frame and its event");
}

/// The memory of an answer, which reports when it is freed.
struct DropFlaggedAnswer(Vec<u8>, Arc<AtomicBool>);

impl AsRef<[u8]> for DropFlaggedAnswer {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl Drop for DropFlaggedAnswer {
    fn drop(&mut self) {
        self.1.store(true, Ordering::Relaxed);
    }
}

/// An answer stays charged while its memory is held. The charge is released, once, when all of the answer
/// has been sent, whatever comes after it in the output.
#[test]
fn the_charge_of_an_answer_is_given_back_when_the_answer_has_left() {
    let settings = AnnouncedSettings { streams: 1_000, ..SETTINGS };
    for seed in 0..100 {
        let mut rng = Rng::with_seed(seed);
        let pool = StateMemoryPool::new(1 << 40);
        let mut sender = Http2Sender::new(settings, Arc::clone(&pool));
        // Each answer: its stream, its charge, whether its memory is free, and the end of the output at
        // its end.
        let mut answers: Vec<(StreamId, usize, Arc<AtomicBool>, Option<u64>)> = Vec::new();
        let mut released_early = 0;
        for step in 0..400 {
            match rng.u8(0..8) {
                0 | 1 => {
                    let id = 2 * answers.len() as StreamId + 1;
                    let length = rng.usize(1..200_000);
                    sender.open_stream(id, true, None).expect("the pool is large");
                    // Only answers are counted here.
                    sender.budget.release(STREAM_BYTES);
                    sender.charge_answer(id, length).expect("the pool is large");
                    let freed = Arc::new(AtomicBool::new(false));
                    let body = Bytes::from_owner(DropFlaggedAnswer(vec![0; length], Arc::clone(&freed)));
                    let cut = rng.usize(0..length);
                    sender.send_response(id, b"head", [body.slice(..cut), body.slice(cut..)], b"trailers");
                    answers.push((id, length, freed, None));
                }
                2 => {
                    let id = 2 * rng.u32(0..answers.len() as u32 + 1) + 1;
                    sender.reset_stream(id, ErrorCode::RefusedStream);
                }
                3 => sender.on_window_update(None, rng.u32(1..200_000)).expect("no overflow"),
                4 => {
                    let id = 2 * rng.u32(0..answers.len() as u32 + 1) + 1;
                    sender.on_window_update(Some(id), rng.u32(1..200_000)).expect("no overflow");
                }
                _ => {
                    let mut socket =
                        TestSocket { capacity_left: rng.usize(1..100_000), ..TestSocket::default() };
                    socket.accept_output(&mut sender.output);
                    if rng.bool() {
                        sender.output.take_sent_bytes();
                    }
                }
            }
            sender.end_batch();
            sender.resume_sending();
            sender.release_sent_answers();
            for (id, .., end) in &mut answers {
                if end.is_none() && !sender.streams.contains(*id) {
                    *end = Some(sender.output.offset_after_last_waiting_byte());
                }
            }
            let sum = |counts: &dyn Fn(&AtomicBool, Option<u64>) -> bool| -> usize {
                let of = answers.iter().filter(|(.., freed, end)| counts(freed, *end));
                of.map(|(_, charge, ..)| charge).sum()
            };
            let held = sum(&|freed, _| !freed.load(Ordering::Relaxed));
            let waiting =
                sum(&|_, end| end.is_none_or(|end| end > sender.output.offset_of_first_waiting_byte()));
            let charged = pool.taken_bytes();
            assert!(
                (held..=waiting).contains(&charged),
                "seed {seed}, step {step}: {held}, {charged}, {waiting}"
            );
            released_early += usize::from(
                charged < answers.iter().map(|(_, charge, ..)| charge).sum() && !sender.output.is_empty(),
            );
        }
        assert!(released_early > 0, "seed {seed}: something is given back while other output waits");
        drop(sender);
        assert_eq!(pool.taken_bytes(), 0);
    }
}
