//! The frames of a connection: a header of 64 bytes, then a payload. Numbers are little endian.
//!
//! | bytes | field |
//! | --- | --- |
//! | 0..2 | magic, 0x4d58 |
//! | 2 | version |
//! | 3 | kind |
//! | 4 | flags |
//! | 5 | class |
//! | 6..8 | lane, in `Lost` and `Have` |
//! | 8..16 | incarnation of the sender |
//! | 16..24 | incarnation of the receiver |
//! | 24..28 | channel |
//! | 28..32 | chunk, or the number of a definition or region |
//! | 32..40 | sequence of the group on its channel, or the length of a region |
//! | 40..44 | number of this control frame; 0 for data, `Ack` and `Descriptor` |
//! | 44..48 | the last control frame that the sender has received |
//! | 48..52 | length of the payload |
//! | 52..56 | CRC32C of the payload, if the flag `CHECKED` is set |
//! | 56..60 | zero |
//! | 60..64 | CRC32C of bytes 0..60 |
//!
//! Every frame carries both incarnations, so the receiver recognises a frame of another incarnation on any
//! connection. `link` interprets the frames. Begin at [`Header::decode`].

use crate::base::membership::MemberId;

/// The bytes of a header.
pub const HEADER: usize = 64;
/// The largest payload of a control frame. A larger one is refused before it is read.
pub const CONTROL_MAX: usize = 64 << 10;
/// The largest payload of a data frame.
pub const CHUNK_MAX: usize = 4 << 20;

const MAGIC: u16 = 0x4d58;
const VERSION: u8 = 1;

/// The kind of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum FrameKind {
    /// A part of the list of transfers of a prepared launch.
    Define = 1,
    /// The list is withdrawn.
    Undefine = 2,
    /// A launch: the next group of its channel.
    Go = 3,
    /// Further buffers of a launch are ready.
    Ready = 4,
    /// The group was cancelled, and no byte of it can land at the sender any more; the payload has the
    /// reason.
    Stop = 5,
    /// No byte of the group can land at the sender any more.
    Stopped = 6,
    /// All bytes of the group have arrived.
    Done = 7,
    /// A chunk arrived damaged and must be sent again.
    Damaged = 8,
    /// The sender has lost a lane.
    Lost = 9,
    /// The chunks of a group that have arrived: a bitmap that begins at the chunk in the header.
    Have = 10,
    /// Asks whether the peer is alive.
    Ping = 11,
    /// Answers `Ping`.
    Pong = 12,
    /// A chunk of a group's bytes.
    Data = 13,
    /// Carries an acknowledgement and nothing else.
    Ack = 14,
    /// Shared memory that the receiver may map; its descriptor comes with the frame.
    Region = 15,
    /// The shared memory is withdrawn.
    Unregion = 16,
    /// The bytes cannot be fetched: the peer must push them.
    Push = 17,
    /// A ring for the peer's control frames; its memory and its bell come with the frame.
    Ring = 18,
    /// The last control frame on the socket: later ones are in the ring.
    Switch = 19,
    /// The descriptor of a region whose `Region` frame is in the ring; it comes on the socket.
    Descriptor = 20,
    /// Asks whether the connection may end: the sender has nothing in flight.
    Leave = 21,
    /// Agrees: the sender has nothing in flight either, and begins nothing.
    Agree = 22,
    /// Refuses: the sender uses the connection.
    Refuse = 23,
    /// Decides, after `Agree`, that the connection ends.
    Gone = 24,
    /// Decides, after `Agree`, that the connection stays, because it was used meanwhile.
    Stay = 25,
    /// The sender's endpoint of the fabric. The payload has the key and the address of a word of its memory that holds its incarnation,
    /// 8 bytes each, and the address of the endpoint.
    FabricAddress = 26,
    /// Memory that the receiver may read over the fabric: the payload has its key and the address of its first byte, 8 bytes each.
    /// `Unregion` withdraws it.
    FabricRegion = 27,
    /// The sender has fetched more bytes of the group: the payload has their number, 8 bytes. It is sent now and then while a fetch
    /// takes long.
    Progress = 28,
    /// The sender, which dialled the connection, has read the receiver's incarnation over the fabric: both may use it.
    FabricReady = 29,
    /// A message about the clique of GPUs of the two engines (`clique_message.rs`).
    Clique = 30,
}

impl FrameKind {
    pub(super) const fn from_byte(byte: u8) -> Option<Self> {
        Some(match byte {
            1 => Self::Define,
            2 => Self::Undefine,
            3 => Self::Go,
            4 => Self::Ready,
            5 => Self::Stop,
            6 => Self::Stopped,
            7 => Self::Done,
            8 => Self::Damaged,
            9 => Self::Lost,
            10 => Self::Have,
            11 => Self::Ping,
            12 => Self::Pong,
            13 => Self::Data,
            14 => Self::Ack,
            15 => Self::Region,
            16 => Self::Unregion,
            17 => Self::Push,
            18 => Self::Ring,
            19 => Self::Switch,
            20 => Self::Descriptor,
            21 => Self::Leave,
            22 => Self::Agree,
            23 => Self::Refuse,
            24 => Self::Gone,
            25 => Self::Stay,
            26 => Self::FabricAddress,
            27 => Self::FabricRegion,
            28 => Self::Progress,
            29 => Self::FabricReady,
            30 => Self::Clique,
            _ => return None,
        })
    }
}

/// The flags of a frame.
pub mod flag {
    /// `Go`, `Ready`: the bytes to be sent are defined.
    pub const SOURCE: u8 = 1;
    /// `Go`, `Ready`: the bytes to be received may be written.
    pub const DESTINATION: u8 = 2;
    /// `Go`: the payload is all bytes that the sender sends in the group.
    pub const INLINE: u8 = 4;
    /// The header has the CRC of the payload.
    pub const CHECKED: u8 = 8;
    /// `Define`: further parts of the same definition follow.
    pub const MORE: u8 = 16;
    /// `Region`, `Descriptor`: the region is memory of a GPU.
    pub const DEVICE: u8 = 32;
}

/// The header of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// The kind.
    pub kind: FrameKind,
    /// The flags, of [`flag`].
    pub flags: u8,
    /// The priority class of a launch.
    pub class: u8,
    /// A lane, in `Lost` and `Have`.
    pub lane: u16,
    /// The sender's incarnation.
    pub source: u64,
    /// The receiver's incarnation.
    pub destination: u64,
    /// The channel of a group.
    pub channel: u32,
    /// The chunk of a group, or the number of a definition or region.
    pub index: u32,
    /// The number of a group.
    pub sequence: u64,
    /// The number of this control frame; 0 for data, and for frames that need not arrive.
    pub control: u32,
    /// The last control frame that the sender has received.
    pub ack: u32,
    /// The bytes of the payload.
    pub len: u32,
    /// The CRC32C of the payload, if [`flag::CHECKED`] is set.
    pub payload_crc: u32,
}

/// The reason why a header was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// The magic is wrong: another protocol, or bytes were lost.
    #[error("this is no frame: it begins with {0:04x}")]
    Magic(u16),
    /// Another version of the protocol.
    #[error("version {0} of the protocol is not spoken here; version {VERSION} is")]
    Version(u8),
    /// The checksum of the header is wrong.
    #[error("the header is damaged")]
    Damaged,
    /// A kind that this version does not know.
    #[error("frames of kind {0} are not known")]
    Kind(u8),
    /// The payload is longer than its kind allows.
    #[error("{len} bytes of payload in a {kind:?} frame; at most {bound} may come")]
    TooLong {
        /// The kind of the frame.
        kind: FrameKind,
        /// The announced bytes of the payload.
        len: u32,
        /// The most bytes of that kind.
        bound: usize,
    },
}

impl Header {
    /// Creates a header with its kind and the two incarnations; all else is zero.
    pub const fn new(kind: FrameKind, from: MemberId, to: MemberId) -> Self {
        Self {
            kind,
            flags: 0,
            class: 0,
            lane: 0,
            source: from.incarnation.get(),
            destination: to.incarnation.get(),
            channel: 0,
            index: 0,
            sequence: 0,
            control: 0,
            ack: 0,
            len: 0,
            payload_crc: 0,
        }
    }

    /// Encodes the header.
    pub fn encode(&self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        bytes[0..2].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[2] = VERSION;
        bytes[3] = self.kind as u8;
        bytes[4] = self.flags;
        bytes[5] = self.class;
        bytes[6..8].copy_from_slice(&self.lane.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.source.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.destination.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.channel.to_le_bytes());
        bytes[28..32].copy_from_slice(&self.index.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[40..44].copy_from_slice(&self.control.to_le_bytes());
        bytes[44..48].copy_from_slice(&self.ack.to_le_bytes());
        bytes[48..52].copy_from_slice(&self.len.to_le_bytes());
        bytes[52..56].copy_from_slice(&self.payload_crc.to_le_bytes());
        let crc32c_of = crc32c_of(&bytes[..60]);
        bytes[60..64].copy_from_slice(&crc32c_of.to_le_bytes());
        bytes
    }

    /// Decodes a header.
    ///
    /// # Errors
    /// Returns the reason if the bytes are no header, or if it announces more bytes than its kind allows.
    pub fn decode(bytes: &[u8; HEADER]) -> Result<Self, FrameError> {
        let magic = u16::from_le_bytes([bytes[0], bytes[1]]);
        if magic != MAGIC {
            return Err(FrameError::Magic(magic));
        }
        if bytes[2] != VERSION {
            return Err(FrameError::Version(bytes[2]));
        }
        if read_u32_at(bytes, 60) != crc32c_of(&bytes[..60]) {
            return Err(FrameError::Damaged);
        }
        let kind = FrameKind::from_byte(bytes[3]).ok_or(FrameError::Kind(bytes[3]))?;
        let len = read_u32_at(bytes, 48);
        let bound = if kind == FrameKind::Data { CHUNK_MAX } else { CONTROL_MAX };
        if len as usize > bound {
            return Err(FrameError::TooLong { kind, len, bound });
        }
        Ok(Self {
            kind,
            flags: bytes[4],
            class: bytes[5],
            lane: u16::from_le_bytes([bytes[6], bytes[7]]),
            source: read_u64_at(bytes, 8),
            destination: read_u64_at(bytes, 16),
            channel: read_u32_at(bytes, 24),
            index: read_u32_at(bytes, 28),
            sequence: read_u64_at(bytes, 32),
            control: read_u32_at(bytes, 40),
            ack: read_u32_at(bytes, 44),
            len,
            payload_crc: read_u32_at(bytes, 52),
        })
    }

    /// Returns whether `flag` is set.
    pub const fn has(&self, flag: u8) -> bool {
        self.flags & flag != 0
    }
}

pub fn read_u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(word)
}

pub fn read_u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}

/// Returns the CRC32C of `bytes`.
pub fn crc32c_of(bytes: &[u8]) -> u32 {
    // The library returns the 32-bit checksum in 64 bits.
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, bytes) as u32
}

/// The CRC32C of bytes that come in pieces.
pub struct Crc32c(crc_fast::Digest);

impl Crc32c {
    /// Creates the checksum of no bytes.
    pub fn new() -> Self {
        Self(crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi))
    }

    /// Adds bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// Returns the checksum of all bytes so far.
    pub fn value(&self) -> u32 {
        self.0.finalize() as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::membership::{Incarnation, TaskId};

    fn header() -> Header {
        let member = |task, n| MemberId::of_own_job(TaskId(task), Incarnation::new(n).unwrap());
        let mut header = Header::new(FrameKind::Data, member(0, 7), member(1, 9));
        header.flags = flag::CHECKED;
        header.channel = 3;
        header.sequence = u64::MAX;
        header.len = 4096;
        header.lane = 513;
        header
    }

    #[test]
    fn a_header_comes_back_as_it_was() {
        assert_eq!(Header::decode(&header().encode()), Ok(header()));
    }

    #[test]
    fn every_damaged_bit_is_noticed() {
        let bytes = header().encode();
        for bit in 0..HEADER * 8 {
            let mut damaged = bytes;
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert!(Header::decode(&damaged).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn absurd_lengths_are_refused() {
        let long = Header { len: CHUNK_MAX as u32 + 1, ..header() };
        assert!(matches!(Header::decode(&long.encode()), Err(FrameError::TooLong { .. })));
        let long = Header { kind: FrameKind::Go, len: CONTROL_MAX as u32 + 1, ..header() };
        assert!(matches!(Header::decode(&long.encode()), Err(FrameError::TooLong { .. })));
    }
}
