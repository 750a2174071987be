//! The two byte streams of a group: which chunks each lane has sent, and which chunks have landed (are in place).
//!
//! `chunk_flow.rs` changes the state of the streams. Begin at [`OutboundStream`] and [`InboundStream`].

/// The value for no lane.
pub const NONE: u16 = u16::MAX;
/// The stream that this side sends in a group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OutboundStream {
    /// It cannot be sent yet, or the peer is to fetch it.
    Waiting,
    /// The peer could not fetch it and asked for a push.
    Wanted,
    /// It went with the launch frame.
    Inline,
    /// It is being sent in chunks.
    Pushing(Box<ChunkedSendState>),
    /// The peer has all of it.
    Done,
}

/// A stream that is being sent in chunks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChunkedSendState {
    /// The bytes of the stream.
    pub total: u64,
    /// The first chunk that was never sent.
    pub next: u32,
    /// Chunks to be sent again.
    pub again: Vec<u32>,
    /// The lane to which each chunk was given last.
    pub lanes: Vec<u16>,
}

/// The stream that this side receives in a group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum InboundStream {
    /// It cannot arrive yet.
    Waiting,
    /// The caller fetches it, or copies it from the launch frame.
    Fetching,
    /// It arrives in chunks.
    Landing(Box<ChunkedReceiveState>),
    /// All of it is in place.
    Done,
}

/// A stream that arrives in chunks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChunkedReceiveState {
    /// The bytes of the stream.
    pub total: u64,
    /// The chunks that are in place.
    pub landed: ChunkBitmap,
    /// The chunks that are being received.
    pub landing: ChunkBitmap,
    /// The chunks that arrived damaged once.
    pub damaged: ChunkBitmap,
    /// The number of chunks that are not in place.
    pub left: u32,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChunkBitmap(pub Vec<u64>);

impl ChunkBitmap {
    /// Creates `count` bits that are unset.
    fn new(count: u32) -> Self {
        Self(vec![0; (count as usize).div_ceil(64)])
    }

    /// Returns whether a bit is set.
    pub fn has(&self, at: u32) -> bool {
        self.0.get(at as usize / 64).is_some_and(|word| word >> (at % 64) & 1 != 0)
    }

    /// Sets a bit. Returns whether it was unset.
    pub fn set(&mut self, at: u32) -> bool {
        let word = &mut self.0[at as usize / 64];
        let before = *word;
        *word |= 1 << (at % 64);
        before != *word
    }

    /// Unsets a bit.
    pub fn unset(&mut self, at: u32) {
        self.0[at as usize / 64] &= !(1 << (at % 64));
    }
}

/// Returns the number of chunks of `total` bytes.
pub fn chunk_count(total: u64, chunk: u32) -> u32 {
    u32::try_from(total.div_ceil(u64::from(chunk))).unwrap_or(u32::MAX)
}

/// Returns the bytes of the chunk with this index.
pub fn chunk_len(total: u64, chunk: u32, index: u32) -> u32 {
    let start = u64::from(index) * u64::from(chunk);
    u32::try_from(total.saturating_sub(start).min(u64::from(chunk))).unwrap_or(chunk)
}

impl OutboundStream {
    /// Creates a stream of which no chunk was sent.
    pub fn new_chunked_send(total: u64, chunk: u32) -> Self {
        let lanes = vec![NONE; chunk_count(total, chunk) as usize];
        Self::Pushing(Box::new(ChunkedSendState { total, next: 0, again: Vec::new(), lanes }))
    }
}

impl InboundStream {
    /// Creates a stream of which no chunk has arrived.
    pub fn new_chunked_receive(total: u64, chunk: u32) -> Self {
        let count = chunk_count(total, chunk);
        let bits = ChunkBitmap::new(count);
        Self::Landing(Box::new(ChunkedReceiveState {
            total,
            landed: bits.clone(),
            landing: bits.clone(),
            damaged: bits,
            left: count,
        }))
    }
}
