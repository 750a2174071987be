//! Checks properties of header blocks and connections that hold for every input.
//!
//! The fuzz targets and the tests run these checks (`src/fuzzing.rs`). Begin at [`check_header_blocks`] and
//! [`check_connection`].

use bytes::Bytes;

use super::frame::{FrameHeader, kind};
use super::hpack::HpackDecoder;
use super::test_support::{drain_output, parse_frames};
use super::*;

/// The bounds of the connection: small, so that short inputs reach them.
const SETTINGS: AnnouncedSettings = AnnouncedSettings {
    streams: 4,
    frame: 16 << 10,
    stream_window: 64 << 10,
    connection_window: 128 << 10,
    header_list: 1 << 10,
    state_bytes: 32 << 10,
};
/// The most turns that the receiver may ask for to take in one input.
const TURNS_MAX: usize = 1 << 16;

/// Takes header blocks of one connection, each behind its length in two bytes. The first byte says how long a header list may
/// be, and after which block the table is forbidden.
///
/// The table keeps to its limit, and fields that were read are read again from what is written of them.
pub(crate) fn check_header_blocks(input: &[u8]) {
    let Some((&first, mut input)) = input.split_first() else { return };
    let most = 64 << (first & 7);
    let forbidden = usize::from(first >> 3 & 7);
    let mut decoder = HpackDecoder::default();
    for number in 0.. {
        let Some((length, rest)) = input.split_first_chunk() else { return };
        let (coded, rest) = rest.split_at(rest.len().min(u16::from_le_bytes(*length).into()));
        input = rest;
        if number == forbidden {
            decoder.disable_dynamic_table();
        }
        let read = decoder.decode_block(coded, most);
        decoder.assert_table_invariants();
        let Ok(read) = read else { return };
        let head = read.finish_trailers();
        let fields: usize = head.fields.iter().map(|(name, value)| name.as_str().len() + value.len()).sum();
        assert!(fields <= most, "{fields} bytes of fields are kept of a list of {most}");
        let again = HpackDecoder::default()
            .decode_block(&encode_header_block(None, &head.fields), 2 * most + (1 << 10));
        let again = again.expect("a block that the server wrote is in order").finish_trailers();
        assert_eq!((again.fields, again.error), (head.fields, None));
    }
}

impl FromRequestHead for RequestHead {
    fn content_length(&self) -> Option<u64> {
        self.content_length
    }
}

/// A connection and what a peer has caused on it.
struct FuzzedConnection {
    receiver: Http2Receiver,
    sender: Http2Sender,
    cache: HeaderBlockCache<RequestHead>,
    /// One entry for each event; the data of one stream that came together in one entry.
    events: Vec<(StreamId, String)>,
    /// The bytes that were read.
    data: usize,
    fault: Option<ConnectionError>,
}

impl FuzzedConnection {
    fn new() -> Self {
        Self {
            receiver: Http2Receiver::default(),
            sender: Http2Sender::new(SETTINGS, StateMemoryPool::new(1 << 20)),
            cache: HeaderBlockCache::new(),
            events: Vec::new(),
            data: 0,
            fault: None,
        }
    }

    /// Takes a piece of what the peer sends.
    fn receive_input(&mut self, mut input: &[u8]) {
        let mut turns = 0;
        while self.fault.is_none() {
            turns += 1;
            assert!(turns < TURNS_MAX, "the receiver makes no progress");
            let event = match self.receiver.next_event(&mut input, &mut self.sender, &mut self.cache) {
                Ok(Some(event)) => event,
                Ok(None) if input.is_empty() && !self.sender.should_yield() => return,
                Ok(None) => {
                    self.sender.end_batch();
                    continue;
                }
                Err(fault) => {
                    self.fault = Some(fault);
                    return;
                }
            };
            match event {
                ReceiveEvent::Request { stream, head, ended } => {
                    let said = format!("{} {} {:?} {ended}", head.method, head.path, head.fields);
                    self.events.push((stream, said));
                    if self.sender.streams.contains(stream) {
                        self.sender.assign_slot(stream, u64::from(stream));
                    }
                    if head.path.len() % 2 == 0 {
                        let data = Bytes::from(vec![7; 40 * head.path.len()]);
                        self.sender.send_response(stream, &GRPC_RESPONSE_HEADERS, [data], &GRPC_OK_TRAILERS);
                    }
                }
                ReceiveEvent::Data { stream, bytes, ended } => {
                    self.data += bytes.len();
                    match self.events.last_mut() {
                        Some((last, data)) if *last == stream && data.starts_with("data ") => {
                            data.extend(bytes.iter().map(|byte| char::from(*byte)));
                        }
                        _ => {
                            let data = bytes.iter().map(|byte| char::from(*byte)).collect::<String>();
                            self.events.push((stream, format!("data {data}")));
                        }
                    }
                    if ended {
                        self.events.push((stream, "ended".to_owned()));
                    }
                }
                ReceiveEvent::Reset { stream, slot } => self.events.push((stream, format!("reset {slot:?}"))),
                ReceiveEvent::GoAway => self.events.push((0, "left".to_owned())),
            }
            assert!(
                self.sender.stream_count() <= 2 * SETTINGS.streams as usize,
                "{} streams",
                self.sender.stream_count()
            );
        }
    }

    /// Returns what was told. How much of a body was told before its stream was reset depends on the pieces.
    fn comparable_events(&self) -> Vec<(StreamId, String)> {
        let is_reset =
            |stream| self.events.iter().any(|(at, said)| *at == stream && said.starts_with("reset"));
        let mut told: Vec<(StreamId, String)> = Vec::new();
        for (stream, said) in &self.events {
            match (said.strip_prefix("data "), told.last_mut()) {
                (Some(_), _) if is_reset(*stream) => {}
                (Some(more), Some((last, data))) if last == stream && data.starts_with("data ") => {
                    data.push_str(more)
                }
                _ => told.push((*stream, said.clone())),
            }
        }
        told
    }

    /// Returns the frames that are sent, as to a peer that takes everything, but those that depend on the pieces: one
    /// window update may stand for several.
    fn comparable_sent_frames(&mut self) -> Vec<(FrameHeader, Vec<u8>)> {
        let all = parse_frames(&drain_output(&mut self.sender)).into_iter();
        all.filter(|(head, _)| head.kind != kind::WINDOW_UPDATE).collect()
    }
}

/// Takes all that a peer sends on one connection, after its preface. The first four bytes say where it is cut.
///
/// However it is cut, it means the same: the same events, the same end, the same frames in answer. The output is whole
/// frames, and no more streams are kept than may be open.
pub(crate) fn check_connection(input: &[u8]) {
    let Some((seed, input)) = input.split_first_chunk() else { return };
    let mut whole = FuzzedConnection::new();
    whole.receive_input(input);
    assert!(whole.data <= input.len());
    let mut pieces = FuzzedConnection::new();
    let (mut dice, mut left) = (u32::from_le_bytes(*seed) | 1, input);
    while !left.is_empty() && pieces.fault.is_none() {
        dice = dice.wrapping_mul(0x9e37_79b1).rotate_left(15);
        let length = if dice & 1 == 0 { 1 } else { 1 + (dice >> 8) as usize % 40 };
        let (piece, rest) = left.split_at(length.min(left.len()));
        pieces.receive_input(piece);
        left = rest;
    }
    assert_eq!(whole.comparable_events(), pieces.comparable_events());
    assert_eq!(whole.fault, pieces.fault);
    assert_eq!(whole.comparable_sent_frames(), pieces.comparable_sent_frames());
}
