//! The messages of two engines about their clique of GPUs: which pieces of receives its batches move, and in which order.
//!
//! One side *leads*: it begins cliques, and orders their batches. The other one follows: it joins, runs every batch in the order
//! of its frames, and asks for the pieces that it wants to receive. `io/clique` does both. A message is the payload of a
//! frame of kind `Clique`; numbers are little endian. Begin at [`CliqueMessage`].

use super::frame::{read_u32_at, read_u64_at};
use super::link::GroupId;

/// The bytes of a clique's id, as of NCCL.
pub const ID: usize = 128;
/// The most GPUs of one side.
pub const GPUS_MAX: usize = 64;
/// The most pieces of one batch or of one request.
pub const PIECES_MAX: usize = 64;
/// The most bytes of a piece.
pub const PIECE_MAX: u32 = 4 << 20;
/// The bytes of a piece in a message.
const PIECE: usize = 40;

/// Bytes of one receive that one operation on each side moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CliquePiece {
    /// The group of the receive.
    pub group: GroupId,
    /// Whether the leading side receives.
    pub is_to_leader: bool,
    /// The index of the receive among those of the group, which is that of the send on the other side.
    pub receive: u32,
    /// The first byte in the receive.
    pub from: u64,
    /// The number of bytes, at most [`PIECE_MAX`].
    pub len: u32,
    /// The GPU of the sender, by its number in the sender's process.
    pub sender_gpu: u32,
    /// The GPU of the receiver, by its number in the receiver's process.
    pub receiver_gpu: u32,
}

/// A message about cliques.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CliqueMessage {
    /// The leader begins a clique, which later batches use: join it.
    Begin {
        /// NCCL's id.
        id: [u8; ID],
        /// The GPUs of the leader and of the follower, by their numbers in their processes.
        gpus: [Vec<u32>; 2],
    },
    /// The follower wants to receive these pieces.
    Request(Vec<CliquePiece>),
    /// The leader runs this batch: run it too.
    Batch {
        /// Its number: each is one more than that before.
        number: u64,
        /// Its pieces.
        pieces: Vec<CliquePiece>,
    },
    /// The sender of this message sends the batch's pieces whose bits are set from the memory of launches. For its others a launch was
    /// cancelled, and the bytes mean nothing.
    Sent {
        /// The number of the batch.
        number: u64,
        /// A bit for each piece, the lowest for the first one.
        pieces: u64,
    },
    /// The sender uses no clique on this connection any more.
    Failed(String),
}

impl CliqueMessage {
    /// Encodes the message.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        match self {
            Self::Begin { id, gpus } => {
                bytes.push(1);
                bytes.extend_from_slice(id);
                for side in gpus {
                    bytes.push(side.len() as u8);
                    side.iter().for_each(|gpu| bytes.extend_from_slice(&gpu.to_le_bytes()));
                }
            }
            Self::Request(pieces) => {
                bytes.push(2);
                pieces.iter().for_each(|piece| piece.append_to(&mut bytes));
            }
            Self::Batch { number, pieces } => {
                bytes.push(3);
                bytes.extend_from_slice(&number.to_le_bytes());
                pieces.iter().for_each(|piece| piece.append_to(&mut bytes));
            }
            Self::Sent { number, pieces } => {
                bytes.push(4);
                bytes.extend_from_slice(&number.to_le_bytes());
                bytes.extend_from_slice(&pieces.to_le_bytes());
            }
            Self::Failed(why) => {
                bytes.push(5);
                bytes.extend_from_slice(why.as_bytes());
            }
        }
        bytes
    }

    /// Decodes a message; none if the bytes are no message.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let (kind, rest) = bytes.split_first()?;
        match kind {
            1 => {
                let (id, rest) = rest.split_first_chunk()?;
                let (leader, rest) = decode_gpus(rest)?;
                let (follower, rest) = decode_gpus(rest)?;
                rest.is_empty().then_some(Self::Begin { id: *id, gpus: [leader, follower] })
            }
            2 => decode_pieces(rest).map(Self::Request),
            3 => {
                let (number, rest) = rest.split_first_chunk()?;
                Some(Self::Batch { number: u64::from_le_bytes(*number), pieces: decode_pieces(rest)? })
            }
            4 if rest.len() == 16 => {
                Some(Self::Sent { number: read_u64_at(rest, 0), pieces: read_u64_at(rest, 8) })
            }
            5 => Some(Self::Failed(String::from_utf8_lossy(rest).into_owned())),
            _ => None,
        }
    }
}

impl CliquePiece {
    /// Returns the GPU of the leading or of the following side, and that of the other one.
    pub const fn gpus(&self, leads: bool) -> (u32, u32) {
        if self.is_to_leader == leads {
            (self.receiver_gpu, self.sender_gpu)
        } else {
            (self.sender_gpu, self.receiver_gpu)
        }
    }

    fn append_to(&self, bytes: &mut Vec<u8>) {
        bytes.extend_from_slice(&self.group.0.to_le_bytes());
        bytes.extend_from_slice(&u32::from(self.is_to_leader).to_le_bytes());
        bytes.extend_from_slice(&self.group.1.to_le_bytes());
        bytes.extend_from_slice(&self.from.to_le_bytes());
        for word in [self.receive, self.len, self.sender_gpu, self.receiver_gpu] {
            bytes.extend_from_slice(&word.to_le_bytes());
        }
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let is_to_leader = match read_u32_at(bytes, 4) {
            0 => false,
            1 => true,
            _ => return None,
        };
        let piece = Self {
            group: (read_u32_at(bytes, 0), read_u64_at(bytes, 8)),
            is_to_leader,
            receive: read_u32_at(bytes, 24),
            from: read_u64_at(bytes, 16),
            len: read_u32_at(bytes, 28),
            sender_gpu: read_u32_at(bytes, 32),
            receiver_gpu: read_u32_at(bytes, 36),
        };
        (1..=PIECE_MAX).contains(&piece.len).then_some(piece)
    }
}

/// Decodes 1 to [`PIECES_MAX`] pieces.
fn decode_pieces(bytes: &[u8]) -> Option<Vec<CliquePiece>> {
    let is_list = bytes.len().is_multiple_of(PIECE) && (1..=PIECES_MAX).contains(&(bytes.len() / PIECE));
    is_list.then(|| bytes.chunks_exact(PIECE).map(CliquePiece::decode).collect())?
}

/// Decodes 1 to [`GPUS_MAX`] ascending numbers of GPUs; returns the bytes after them too.
fn decode_gpus(bytes: &[u8]) -> Option<(Vec<u32>, &[u8])> {
    let (count, rest) = bytes.split_first()?;
    let (gpus, rest) = rest.split_at_checked(4 * usize::from(*count))?;
    let gpus: Vec<u32> = gpus.chunks_exact(4).map(|word| read_u32_at(word, 0)).collect();
    let is_valid = (1..=GPUS_MAX).contains(&gpus.len()) && gpus.is_sorted_by(|one, next| one < next);
    is_valid.then_some((gpus, rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(receive: u32) -> CliquePiece {
        CliquePiece {
            group: (7, u64::MAX),
            is_to_leader: receive.is_multiple_of(2),
            receive,
            from: 1 << 40,
            len: PIECE_MAX,
            sender_gpu: 3,
            receiver_gpu: 5,
        }
    }

    fn all() -> [CliqueMessage; 5] {
        let pieces: Vec<_> = (0..PIECES_MAX as u32).map(piece).collect();
        [
            CliqueMessage::Begin { id: [9; ID], gpus: [vec![0, 3], vec![1]] },
            CliqueMessage::Request(pieces.clone()),
            CliqueMessage::Batch { number: 4, pieces },
            CliqueMessage::Sent { number: 5, pieces: 6 },
            CliqueMessage::Failed("no reason".to_owned()),
        ]
    }

    #[test]
    fn messages_come_back_as_they_were() {
        for message in all() {
            assert_eq!(CliqueMessage::decode(&message.encode()), Some(message));
        }
    }

    #[test]
    fn what_is_no_message_is_refused() {
        for message in &all()[..4] {
            let bytes = message.encode();
            let longer = [&bytes[..], &[0]].concat();
            for wrong in [&bytes[..bytes.len() - 1], &longer, &bytes[..1], &[]] {
                assert_eq!(CliqueMessage::decode(wrong), None, "{message:?}");
            }
        }
        let with = |change: fn(&mut CliquePiece)| {
            let mut wrong = piece(0);
            change(&mut wrong);
            CliqueMessage::decode(&CliqueMessage::Request(vec![wrong]).encode())
        };
        assert!(with(|_| {}).is_some());
        assert_eq!(with(|piece| piece.len = 0), None);
        assert_eq!(with(|piece| piece.len = PIECE_MAX + 1), None);
        for gpus in [[vec![], vec![1]], [vec![1, 1], vec![1]], [vec![2, 1], vec![1]]] {
            assert_eq!(CliqueMessage::decode(&CliqueMessage::Begin { id: [0; ID], gpus }.encode()), None);
        }
        let many = CliqueMessage::Request((0..=PIECES_MAX as u32).map(piece).collect());
        assert_eq!(CliqueMessage::decode(&many.encode()), None);
        assert_eq!(CliqueMessage::decode(&[6, 0]), None);
    }
}
