//! The two streams of a group: which chunks were sent by which lane, and which have landed.
//!
//! `stream.rs` decides which chunk is sent next. Begin at [`Outbound`] and [`Inbound`].

/// No lane.
pub const NONE: u16 = u16::MAX;
/// What this side sends in a group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outbound {
    /// It cannot be sent yet, or is to be fetched by the peer.
    Waiting,
    /// The peer cannot fetch it and asked for it.
    Wanted,
    /// It went with the launch.
    Inline,
    /// It is being sent.
    Pushing(Box<Pushing>),
    /// The peer has it.
    Done,
}

/// A stream that is being sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pushing {
    /// Its bytes.
    pub total: u64,
    /// The first chunk that was never sent.
    pub next: u32,
    /// Chunks to be sent again.
    pub again: Vec<u32>,
    /// Which lane each chunk was given to last.
    pub lanes: Vec<u16>,
}

/// What this side receives in a group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Inbound {
    /// It cannot come yet.
    Waiting,
    /// The caller puts it in place.
    Fetching,
    /// It comes in chunks.
    Landing(Box<Chunks>),
    /// It is here.
    Done,
}

/// A stream that comes in chunks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chunks {
    /// Its bytes.
    pub total: u64,
    /// The chunks that are in place.
    pub landed: Bits,
    /// The chunks that are coming.
    pub landing: Bits,
    /// The chunks that came damaged once.
    pub damaged: Bits,
    /// How many are not in place.
    pub left: u32,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bits(pub Vec<u64>);

impl Bits {
    /// Makes so many that are unset.
    fn new(count: u32) -> Self {
        Self(vec![0; (count as usize).div_ceil(64)])
    }

    /// Returns whether a bit is set.
    pub fn has(&self, at: u32) -> bool {
        self.0.get(at as usize / 64).is_some_and(|word| word >> (at % 64) & 1 != 0)
    }

    /// Sets a bit, and returns whether it was unset.
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

/// Returns how many chunks so many bytes are.
pub fn chunks(total: u64, chunk: u32) -> u32 {
    u32::try_from(total.div_ceil(u64::from(chunk))).unwrap_or(u32::MAX)
}

/// Returns how many bytes a chunk has.
pub fn length(total: u64, chunk: u32, index: u32) -> u32 {
    let start = u64::from(index) * u64::from(chunk);
    u32::try_from(total.saturating_sub(start).min(u64::from(chunk))).unwrap_or(chunk)
}

impl Outbound {
    /// Makes a stream of which nothing was sent.
    pub fn pushing(total: u64, chunk: u32) -> Self {
        let lanes = vec![NONE; chunks(total, chunk) as usize];
        Self::Pushing(Box::new(Pushing { total, next: 0, again: Vec::new(), lanes }))
    }
}

impl Inbound {
    /// Makes a stream of which nothing came.
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
