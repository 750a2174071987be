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

/// The bounds of one report of transfers: workers leave out more, and the service refuses it.
pub mod report_limits {
    /// The pairs of tasks.
    pub const PAIRS_MAX: usize = 16_384;
    /// The connections.
    pub const CONNECTIONS_MAX: usize = 4_096;
    /// The failures.
    pub const FAILURES_MAX: usize = 64;
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
