//! gRPC framing: a length-prefixed message in each direction.
//!
//! It does not inflate (`gzip.rs`) or decode (`generation_a.rs`, `generation_c.rs`) messages. Begin at
//! [`MessagePrefix::read`] and [`MessageBuilder`].

use bytes::{BufMut, Bytes, BytesMut};

use super::task_set_cache::CachedMessage;
use crate::coordination::{Code, Failure};

/// The length of the prefix: a compression flag and the length of the message.
pub(super) const PREFIX_LEN: usize = 5;

/// One request message.
#[derive(Debug, Clone)]
pub(super) enum Message {
    Whole(Bytes),
    /// A message that ends in a cached set of tasks, whose memory is shared.
    Cached(CachedMessage),
}

impl Message {
    pub(super) fn new(bytes: Vec<u8>) -> Self {
        Self::Whole(bytes.into())
    }

    /// Returns the message.
    pub(super) fn bytes(&self) -> Bytes {
        match self {
            Self::Whole(bytes) => bytes.clone(),
            Self::Cached(recalled) => recalled.bytes(),
        }
    }

    /// Returns a part of the message to keep: the part itself if it keeps little other memory alive,
    /// otherwise a copy.
    pub(super) fn detach(&self, part: Bytes) -> Bytes {
        let length = match self {
            Self::Whole(bytes) => bytes.len(),
            Self::Cached(recalled) => recalled.bytes().len(),
        };
        if part.len() >= length / 4 { part } else { Bytes::copy_from_slice(&part) }
    }
}

/// The prefix of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct MessagePrefix {
    pub(super) compressed: bool,
    pub(super) length: usize,
}

impl MessagePrefix {
    /// Reads a prefix; a message of more than `most` bytes is a failure.
    pub(super) fn read(prefix: [u8; PREFIX_LEN], most: usize) -> Result<Self, Failure> {
        let [flag, l0, l1, l2, l3] = prefix;
        let length = u32::from_be_bytes([l0, l1, l2, l3]) as usize;
        if flag > 1 {
            let text = format!("the request's first byte must be 0 or 1 (compressed), it is {flag}");
            return Err(Failure::without_details(Code::Internal, text));
        }
        if length > most {
            return Err(message_too_long(length, most));
        }
        Ok(Self { compressed: flag == 1, length })
    }
}

/// Returns the failure of a message that is too long.
pub(super) fn message_too_long(length: usize, most: usize) -> Failure {
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
    pub(super) fn buffer(&mut self) -> &mut BytesMut {
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
    /// One piece.
    One(Bytes),
    /// Several pieces.
    Many(Vec<Bytes>),
}

/// Encodes a whole message with its prefix.
pub(super) fn encode_framed(message: &impl prost::Message) -> Bytes {
    let length = message.encoded_len();
    let mut framed = BytesMut::with_capacity(PREFIX_LEN + length);
    framed.put_u8(0);
    framed.put_u32(u32::try_from(length).unwrap_or(u32::MAX));
    message.encode_raw(&mut framed);
    framed.freeze()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefixes() {
        assert_eq!(MessagePrefix::read([0; 5], 0), Ok(MessagePrefix { compressed: false, length: 0 }));
        assert_eq!(
            MessagePrefix::read([1, 0, 1, 2, 3], 1 << 20),
            Ok(MessagePrefix { compressed: true, length: 0x01_02_03 })
        );
        assert_eq!(MessagePrefix::read([2, 0, 0, 0, 0], 9).map_err(|f| f.code), Err(Code::Internal));
        assert_eq!(
            MessagePrefix::read([0, 0, 0, 0, 10], 9).map_err(|f| f.code),
            Err(Code::ResourceExhausted)
        );
        assert_eq!(
            MessagePrefix::read([0, 255, 255, 255, 255], 9).map_err(|f| f.code),
            Err(Code::ResourceExhausted)
        );
    }

    #[test]
    fn small_parts_are_gathered_and_large_ones_passed_on() {
        let large = Bytes::from(vec![1; COPY_MAX + 1]);
        let mut answer = MessageBuilder::new(4 + large.len());
        answer.buffer().extend_from_slice(b"ab");
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
        let owned = Message::new(vec![0; 1000]);
        assert_eq!(owned.detach(owned.bytes().slice(0..900)).as_ptr(), owned.bytes().as_ptr());
        assert_ne!(owned.detach(owned.bytes().slice(0..100)).as_ptr(), owned.bytes().as_ptr());
    }
}
