//! The wire messages, generated from `proto/`, and one hand-written message that is decoded without allocating.
//!
//! `grpc` and `coordination` interpret the messages. [`CoordinatedTask`] is the hand-written one. A request about
//! 4,096 tasks contains the same job name 4,096 times. Only the presence of the name matters, so `CoordinatedTask`
//! keeps no string. Begin at [`CoordinatedTask`].

use prost::bytes::{Buf, BufMut};
use prost::encoding::{self, DecodeContext, WireType};
use prost::{DecodeError, Message};

/// The file descriptors of every `.proto` file, for server reflection.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));

/// Wire generation A (jaxlib 0.4.30 to 0.9.2).
#[allow(missing_docs, clippy::all, unused_qualifications)]
pub mod tensorflow {
    tonic::include_proto!("tensorflow");

    /// The container of status payloads.
    pub mod distributed_runtime {
        tonic::include_proto!("tensorflow.distributed_runtime");
    }
}

/// Wire generation C (jaxlib 0.10.0 to 0.12.0), and the topology values.
#[allow(missing_docs, clippy::all, unused_qualifications)]
pub mod xla {
    tonic::include_proto!("xla");

    /// The coordination service.
    pub mod coordination {
        tonic::include_proto!("xla.coordination");
    }
}

/// The project's own messages.
#[allow(missing_docs, clippy::all, unused_qualifications)]
pub mod muster {
    /// Reports of native workers about their transfer engines.
    pub mod v1 {
        tonic::include_proto!("muster.v1");
    }
}

/// A field of an encoded message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MessageField<'a> {
    /// Its number in the message.
    pub tag: u32,
    /// The contents of a text, of bytes or of a nested message; `None` for a number.
    pub contents: Option<&'a [u8]>,
}

/// The fields of an encoded message, in their order. Receivers count rows with it before they allocate memory for them. The
/// first error is the last item.
#[derive(Debug, Clone)]
pub struct MessageFields<'a>(&'a [u8]);

impl<'a> MessageFields<'a> {
    /// Returns the fields of a message.
    #[must_use]
    pub fn new(message: &'a [u8]) -> Self {
        Self(message)
    }

    fn read_field(&mut self) -> Result<MessageField<'a>, DecodeError> {
        let (tag, wire_type) = encoding::decode_key(&mut self.0)?;
        let whole = self.0;
        encoding::skip_field(wire_type, tag, &mut self.0, DecodeContext::default())?;
        if wire_type != WireType::LengthDelimited {
            return Ok(MessageField { tag, contents: None });
        }
        let mut contents = &whole[..whole.len() - self.0.len()];
        encoding::decode_varint(&mut contents)?;
        Ok(MessageField { tag, contents: Some(contents) })
    }
}

impl<'a> Iterator for MessageFields<'a> {
    type Item = Result<MessageField<'a>, DecodeError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() {
            return None;
        }
        let field = self.read_field();
        if field.is_err() {
            self.0 = &[];
        }
        Some(field)
    }
}

/// The bounds of one report of transfers: workers leave out more, and the service refuses it.
pub mod report_limits {
    /// The pairs of tasks.
    pub const PAIRS_MAX: usize = 16_384;
    /// The connections.
    pub const CONNECTIONS_MAX: usize = 4_096;
    /// The failures.
    pub const FAILURES_MAX: usize = 64;
    /// The lost GPUs.
    pub const LOST_GPUS_MAX: usize = 64;
}

impl muster::v1::ClockReading {
    /// Returns how far the worker's clock is ahead of the service's, in seconds.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "microseconds of a century fit")]
    pub fn ahead_seconds(&self) -> f64 {
        self.ahead_us as f64 / 1e6
    }
}

/// `tensorflow.CoordinatedTask`, without a string.
///
/// A request over a whole cluster repeats the same job name for every task. Only its presence matters (later
/// clients leave it out), so only that is kept.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CoordinatedTask {
    /// Whether the client gave a job name (always `jax_worker`).
    pub named: bool,
    /// The task's number.
    pub task_id: i32,
    /// Whether the client asks to be recoverable.
    pub recoverable: bool,
}

/// The only job name that JAX clients have ever used.
const JOB_NAME: &str = "jax_worker";

impl Message for CoordinatedTask {
    fn encode_raw(&self, buf: &mut impl BufMut) {
        if self.named {
            encoding::encode_key(1, WireType::LengthDelimited, buf);
            encoding::encode_varint(JOB_NAME.len() as u64, buf);
            buf.put_slice(JOB_NAME.as_bytes());
        }
        if self.task_id != 0 {
            encoding::int32::encode(2, &self.task_id, buf);
        }
        if self.recoverable {
            encoding::bool::encode(3, &self.recoverable, buf);
        }
    }

    fn merge_field(
        &mut self,
        tag: u32,
        wire_type: WireType,
        buf: &mut impl Buf,
        ctx: DecodeContext,
    ) -> Result<(), DecodeError> {
        match tag {
            1 => {
                encoding::check_wire_type(WireType::LengthDelimited, wire_type)?;
                let length = encoding::decode_varint(buf)?;
                match usize::try_from(length) {
                    Ok(length) if length <= buf.remaining() => {
                        self.named = length > 0;
                        buf.advance(length);
                        Ok(())
                    }
                    // The field is shorter than its length says: the decoder words the underflow.
                    _ => encoding::skip_field(WireType::SixtyFourBit, tag, &mut [].as_slice(), ctx),
                }
            }
            2 => encoding::int32::merge(wire_type, &mut self.task_id, buf, ctx),
            3 => encoding::bool::merge(wire_type, &mut self.recoverable, buf, ctx),
            _ => encoding::skip_field(wire_type, tag, buf, ctx),
        }
    }

    fn encoded_len(&self) -> usize {
        let name = if self.named { 2 + JOB_NAME.len() } else { 0 };
        let id = if self.task_id == 0 { 0 } else { encoding::int32::encoded_len(2, &self.task_id) };
        name + id + if self.recoverable { 2 } else { 0 }
    }

    fn clear(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_read_in_their_order_up_to_the_first_error() {
        let thread = muster::v1::StackThread { name: "a".into(), main: true, ..Default::default() };
        let answer = muster::v1::StackAnswer {
            request: 300,
            incarnation: 5,
            threads: vec![thread],
            ..Default::default()
        };
        let bytes = answer.encode_to_vec();
        let fields: Vec<MessageField<'_>> = MessageFields::new(&bytes).map(Result::unwrap).collect();
        let number = |tag| MessageField { tag, contents: None };
        let nested = MessageField { tag: 4, contents: Some(&[0x0A, 1, b'a', 0x10, 1][..]) };
        assert_eq!(fields, [number(1), number(3), nested]);
        for cut in 1..bytes.len() {
            let read: Vec<_> = MessageFields::new(&bytes[..cut]).collect();
            assert!(read.iter().rev().skip(1).all(Result::is_ok), "{cut}");
            let is_whole = [3, 12].contains(&cut);
            assert_eq!(read.iter().all(Result::is_ok), is_whole, "{cut}");
        }
        assert_eq!(MessageFields::new(&[]).count(), 0);
    }
}
