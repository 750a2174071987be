//! The framing of gRPC messages: each request and each reply is one message with a length prefix.
//!
//! `gzip.rs` inflates messages; `generation_a.rs` and `generation_c.rs` decode them. Begin at
//! [`MessagePrefix::parse`] and [`MessageBuilder`].

use std::borrow::Cow;

use bytes::{BufMut, Bytes, BytesMut};
use prost::DecodeError;

use super::cached_task_set::MessageWithCachedSet;
use crate::coordination::{Code, Failure};

/// The length of the prefix: a compression flag and the length of the message.
pub(super) const PREFIX_LEN: usize = 5;

/// The length up to which a message is decoded in the buffer into which it was read. For a longer one there may be no
/// memory, so [`RequestBody`](super::request_body::RequestBody) copies it.
const DECODED_IN_PLACE_MAX: usize = 4 << 10;

/// One request message.
#[derive(Debug, Clone)]
pub(super) enum RequestMessage<'a> {
    /// A short message, in the buffer into which it was read.
    Received(&'a [u8]),
    Whole(Bytes),
    /// A message that ends in a cached set of tasks, whose memory is shared.
    Cached(MessageWithCachedSet),
}

impl<'a> RequestMessage<'a> {
    pub(super) fn new(bytes: Vec<u8>) -> Self {
        Self::Whole(bytes.into())
    }

    /// Returns the message of a complete body, if it is short, valid and not compressed. Most requests arrive so, and are
    /// decoded without a copy. [`RequestBody`](super::request_body::RequestBody) receives every other body.
    pub(super) fn of_short_body(body: &'a [u8], most: usize) -> Option<Self> {
        let (prefix, message) = body.split_first_chunk::<PREFIX_LEN>()?;
        if message.len() > DECODED_IN_PLACE_MAX {
            return None;
        }
        let prefix = MessagePrefix::parse(*prefix, most).ok()?;
        (!prefix.compressed && prefix.length == message.len()).then_some(Self::Received(message))
    }

    /// Returns the contents of a message that was assembled.
    pub(super) fn assembled_bytes(&self) -> Option<&[u8]> {
        match self {
            Self::Whole(bytes) => Some(bytes),
            _ => None,
        }
    }

    /// Returns the message in shared memory, so that parts of it can be kept.
    pub(super) fn bytes(&self) -> Bytes {
        match self {
            Self::Received(bytes) => Bytes::copy_from_slice(bytes),
            Self::Whole(bytes) => bytes.clone(),
            Self::Cached(recalled) => recalled.bytes(),
        }
    }

    /// Returns the message for reading: where it is, if it is in one place.
    pub(super) fn contents(&self) -> Cow<'_, [u8]> {
        match self {
            Self::Received(bytes) => Cow::Borrowed(bytes),
            Self::Whole(bytes) => Cow::Borrowed(bytes),
            Self::Cached(recalled) => Cow::Owned(recalled.bytes().into()),
        }
    }

    /// Returns a part of the message to keep: the part itself if it keeps little other memory alive,
    /// otherwise a copy.
    pub(super) fn detach_part(&self, part: Bytes) -> Bytes {
        if part.len() >= self.contents().len() / 4 { part } else { Bytes::copy_from_slice(&part) }
    }
}

/// Returns the failure of a request that is not a message of its method.
pub(super) fn decode_failure(error: &DecodeError) -> Failure {
    Failure::without_details(Code::InvalidArgument, format!("the request cannot be read: {error}"))
}

/// The prefix of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct MessagePrefix {
    pub(super) compressed: bool,
    pub(super) length: usize,
}

impl MessagePrefix {
    /// Reads a prefix; a message of more than `most` bytes is a failure.
    pub(super) fn parse(prefix: [u8; PREFIX_LEN], most: usize) -> Result<Self, Failure> {
        let [flag, l0, l1, l2, l3] = prefix;
        let length = u32::from_be_bytes([l0, l1, l2, l3]) as usize;
        if flag > 1 {
            let text = format!("the request's first byte must be 0 or 1 (compressed), it is {flag}");
            return Err(Failure::without_details(Code::Internal, text));
        }
        if length > most {
            return Err(message_too_long_failure(length, most));
        }
        Ok(Self { compressed: flag == 1, length })
    }
}

/// Returns the failure of a message that is too long.
pub(super) fn message_too_long_failure(length: usize, most: usize) -> Failure {
    let text = format!("the message has {length} bytes, this server takes {most} at most");
    Failure::without_details(Code::ResourceExhausted, text)
}

/// Builds a response message: small parts are copied together, large ones are shared.
pub(super) struct MessageBuilder {
    done: Vec<Bytes>,
    gathering: BytesMut,
}

/// The length beyond which a part is shared and not copied.
pub(super) const COPY_MAX: usize = 8 << 10;

impl MessageBuilder {
    /// Returns a builder for a message of `length` bytes.
    pub(super) fn new(length: usize) -> Self {
        let mut gathering = BytesMut::with_capacity(PREFIX_LEN + length.min(COPY_MAX));
        gathering.put_u8(0);
        // Longer messages are refused before.
        gathering.put_u32(u32::try_from(length).unwrap_or(u32::MAX));
        Self { done: Vec::new(), gathering }
    }

    /// Returns the buffer for small parts.
    pub(super) fn small_parts_buffer(&mut self) -> &mut BytesMut {
        &mut self.gathering
    }

    /// Appends bytes.
    pub(super) fn put(&mut self, part: &Bytes) {
        if part.len() <= COPY_MAX {
            self.gathering.extend_from_slice(part);
        } else {
            self.done.push(self.gathering.split().freeze());
            self.done.push(part.clone());
        }
    }

    /// Returns the parts, in order.
    pub(super) fn finish(mut self) -> MessageChunks {
        if self.done.is_empty() {
            return MessageChunks::One(self.gathering.freeze());
        }
        if !self.gathering.is_empty() {
            self.done.push(self.gathering.freeze());
        }
        MessageChunks::Many(self.done)
    }
}

/// The body of a response.
#[derive(Debug)]
pub(super) enum MessageChunks {
    /// A message of a few bytes, without memory of its own.
    Short(ShortMessage),
    /// One piece.
    One(Bytes),
    /// Several pieces.
    Many(Vec<Bytes>),
}

/// Encodes a whole message with its prefix.
pub(super) fn encode_framed_message(message: &impl prost::Message) -> Bytes {
    let length = message.encoded_len();
    let mut framed = BytesMut::with_capacity(PREFIX_LEN + length);
    framed.put_u8(0);
    framed.put_u32(u32::try_from(length).unwrap_or(u32::MAX));
    message.encode_raw(&mut framed);
    framed.freeze()
}

/// A framed message with one number: every reply to a heartbeat, a registration or a barrier is one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ShortMessage {
    bytes: [u8; Self::LONGEST],
    length: usize,
}

impl ShortMessage {
    /// The length of the prefix, a tag, and the longest varint.
    const LONGEST: usize = PREFIX_LEN + 11;

    pub(super) fn bytes(&self) -> &[u8] {
        self.bytes.get(..self.length).unwrap_or_default()
    }
}

/// Returns a message with its prefix, without memory of its own if it is short.
pub(super) fn encode_short_framed_message(message: &impl prost::Message) -> MessageChunks {
    let length = message.encoded_len();
    let mut bytes = [0; ShortMessage::LONGEST];
    let Some(mut contents) = bytes.get_mut(PREFIX_LEN..PREFIX_LEN + length) else {
        return MessageChunks::One(encode_framed_message(message));
    };
    message.encode_raw(&mut contents);
    // The length fits into the last byte of the prefix.
    bytes[PREFIX_LEN - 1] = u8::try_from(length).unwrap_or(u8::MAX);
    MessageChunks::Short(ShortMessage { bytes, length: PREFIX_LEN + length })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_message_is_the_same_bytes() {
        for counter in [0, 1, 127, 128, i64::MAX, -1] {
            let message = crate::proto::xla::coordination::BarrierResponse { counter };
            let MessageChunks::Short(short) = encode_short_framed_message(&message) else {
                panic!("{counter}")
            };
            assert_eq!(short.bytes(), encode_framed_message(&message), "{counter}");
        }
        let long = crate::proto::xla::coordination::BarrierRequest {
            barrier_id: "b".repeat(64),
            ..Default::default()
        };
        let MessageChunks::One(framed) = encode_short_framed_message(&long) else {
            panic!("it is not short")
        };
        assert_eq!(framed, encode_framed_message(&long));
    }

    #[test]
    fn prefixes() {
        assert_eq!(MessagePrefix::parse([0; 5], 0), Ok(MessagePrefix { compressed: false, length: 0 }));
        assert_eq!(
            MessagePrefix::parse([1, 0, 1, 2, 3], 1 << 20),
            Ok(MessagePrefix { compressed: true, length: 0x01_02_03 })
        );
        assert_eq!(MessagePrefix::parse([2, 0, 0, 0, 0], 9).map_err(|f| f.code), Err(Code::Internal));
        assert_eq!(
            MessagePrefix::parse([0, 0, 0, 0, 10], 9).map_err(|f| f.code),
            Err(Code::ResourceExhausted)
        );
        assert_eq!(
            MessagePrefix::parse([0, 255, 255, 255, 255], 9).map_err(|f| f.code),
            Err(Code::ResourceExhausted)
        );
    }

    #[test]
    fn a_short_body_that_is_whole_and_valid_is_read_in_place() {
        let framed = |flag: u8, length: usize| {
            let prefix = u32::try_from(length).expect("short").to_be_bytes();
            [&[flag][..], &prefix, &vec![7; length]].concat()
        };
        for length in [0, 1, DECODED_IN_PLACE_MAX] {
            let body = framed(0, length);
            let message = RequestMessage::of_short_body(&body, length).expect("a whole body");
            assert_eq!(message.contents().as_ptr_range(), body[PREFIX_LEN..].as_ptr_range());
            assert_eq!((&*message.bytes(), &*message.contents()), (&body[PREFIX_LEN..], &body[PREFIX_LEN..]));
        }
        let refused = |body: &[u8], most| RequestMessage::of_short_body(body, most).is_none();
        let body = framed(0, 10);
        assert!(refused(&body, 9), "longer than permitted");
        assert!((0..body.len()).all(|cut| refused(&body[..cut], 10)), "a part of it");
        assert!(refused(&[&body[..], b"x"].concat(), 100), "more than one message");
        assert!(
            refused(&framed(1, 10), 10) && refused(&framed(2, 10), 10),
            "compressed, and an unknown flag"
        );
        assert!(
            refused(&framed(0, DECODED_IN_PLACE_MAX + 1), usize::MAX),
            "too long to be copied by the decoder"
        );
    }

    #[test]
    fn small_parts_are_gathered_and_large_ones_passed_on() {
        let large = Bytes::from(vec![1; COPY_MAX + 1]);
        let mut answer = MessageBuilder::new(4 + large.len());
        answer.small_parts_buffer().extend_from_slice(b"ab");
        answer.put(&Bytes::from_static(b"c"));
        answer.put(&large);
        answer.put(&Bytes::from_static(b"d"));
        let MessageChunks::Many(parts) = answer.finish() else { panic!("in one piece") };
        assert_eq!(parts.len(), 3);
        assert_eq!(parts[0][PREFIX_LEN..], *b"abc");
        assert_eq!(parts[1].as_ptr(), large.as_ptr());
        assert_eq!(parts[2], b"d"[..]);
        let length = u32::from_be_bytes(parts[0][1..PREFIX_LEN].try_into().unwrap()) as usize;
        assert_eq!(length + PREFIX_LEN, parts.iter().map(Bytes::len).sum::<usize>());
    }

    #[test]
    fn a_value_is_copied_where_it_would_pin_much_more_than_itself() {
        let owned = RequestMessage::new(vec![0; 1000]);
        assert_eq!(owned.detach_part(owned.bytes().slice(0..900)).as_ptr(), owned.bytes().as_ptr());
        assert_ne!(owned.detach_part(owned.bytes().slice(0..100)).as_ptr(), owned.bytes().as_ptr());
    }
}
