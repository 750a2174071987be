//! The two streams of a group: the chunks that were sent, by lane, and the chunks that have landed.
//!
//! `stream.rs` chooses the next chunk. Begin at [`Outbound`] and [`Inbound`].

/// The value for no lane.
pub const NONE: u16 = u16::MAX;
/// The stream that this side sends in a group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outbound {
    /// It cannot be sent yet, or the peer is to fetch it.
    Waiting,
    /// The peer could not fetch it and asked for a push.
    Wanted,
    /// It went with the launch frame.
    Inline,
    /// It is being sent in chunks.
    Pushing(Box<Pushing>),
    /// The peer has all of it.
    Done,
}

/// A stream that is being sent in chunks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pushing {
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
pub enum Inbound {
    /// It cannot arrive yet.
    Waiting,
    /// The caller fetches it, or copies it from the launch frame.
    Fetching,
    /// It arrives in chunks.
    Landing(Box<Chunks>),
    /// All of it is in place.
    Done,
}

/// A stream that arrives in chunks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chunks {
    /// The bytes of the stream.
    pub total: u64,
    /// The chunks that are in place.
    pub landed: Bits,
    /// The chunks that are being received.
    pub landing: Bits,
    /// The chunks that arrived damaged once.
    pub damaged: Bits,
    /// The number of chunks that are not in place.
    pub left: u32,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bits(pub Vec<u64>);

impl Bits {
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
pub fn chunks(total: u64, chunk: u32) -> u32 {
    u32::try_from(total.div_ceil(u64::from(chunk))).unwrap_or(u32::MAX)
}

/// Returns the bytes of the chunk with this index.
pub fn length(total: u64, chunk: u32, index: u32) -> u32 {
    let start = u64::from(index) * u64::from(chunk);
    u32::try_from(total.saturating_sub(start).min(u64::from(chunk))).unwrap_or(chunk)
}

impl Outbound {
    /// Creates a stream of which no chunk was sent.
    pub fn pushing(total: u64, chunk: u32) -> Self {
        let lanes = vec![NONE; chunks(total, chunk) as usize];
        Self::Pushing(Box::new(Pushing { total, next: 0, again: Vec::new(), lanes }))
    }
}

impl Inbound {
    /// Creates a stream of which no chunk has arrived.
    pub fn landing(total: u64, chunk: u32) -> Self {
        let count = chunks(total, chunk);
        let bits = Bits::new(count);
        Self::Landing(Box::new(Chunks {
            total,
            landed: bits.clone(),
            landing: bits.clone(),
            damaged: bits,
            left: count,
        }))
    }
}
