//! The messages of the handshake of two engines on a new wire. They state who the engines are, whether the engines
//! may connect, and on what terms.
//!
//! | message | from | holds |
//! | --- | --- | --- |
//! | opening | dialler | the version, a nonce |
//! | challenge | acceptor | the version, a nonce |
//! | hello | dialler | both identities, the terms, the dialler's proof |
//! | answer | acceptor | the verdict, the acceptor's proof |
//! | confirmation | dialler | a second proof: the dialler has accepted the answer |
//!
//! All messages have a fixed length and end with a checksum. One time limit covers all reads of the handshake.
//!
//! With a cluster token, a proof is an HMAC of the sender's role and of every message so far, including both nonces
//! and both identities. The dialler proves first. Until the acceptor has verified this proof, it sends only its
//! version, a nonce and, if it refuses, a refusal that is the same for every dialler. These depend neither on the
//! token nor on the acceptor's identity. A proof cannot be replayed, because the other side draws a new nonce for
//! each handshake. It cannot be reflected, because roles and identities differ. Every later refusal carries a proof
//! too, so no other process can make a dialler give up on its peer.
//!
//! Two attacks remain, as with every symmetric secret. First, a process that has the peer's address, or can write the
//! peer's engine record, can make an engine dial it instead of the peer. It then receives a proof, and can test
//! guesses of the token against the proof offline. Each guess costs `ITERATIONS` hashes (`proof.rs`), and a token of
//! 128 random bits cannot be guessed. Second, a process between two engines can relay their handshake, and then read
//! and change the bytes that follow. TLS prevents that.
//!
//! If neither side has a token, the proofs are empty. `session/handshake.rs` sends the messages. Begin at [`Hello`]
//! and [`HelloAnswer`].

use super::frame::{crc32c_of, read_u32_at, read_u64_at};
use crate::base::membership::{Incarnation, MemberId, TaskId};

pub const MAGIC: &[u8; 7] = b"MUSTERX";
/// The version of this handshake, as the byte after [`MAGIC`].
pub const VERSION: u8 = b'3';
/// The length of an opening or a challenge: magic, version, which of the two it is, the nonce, a checksum.
pub const NONCE_MESSAGE: usize = 48;
pub const NONCE: usize = 32;
pub const OPENING: u8 = 1;
pub const CHALLENGE: u8 = 2;
/// The length of a hello without its proof and its checksum.
pub const HELLO_TERMS: usize = 56;
pub const ANSWER_TERMS: usize = 24;
pub const PROOF: usize = 32;
pub const CHECKSUM: usize = 4;
pub const HELLO: usize = HELLO_TERMS + PROOF + CHECKSUM;
pub const ANSWER: usize = ANSWER_TERMS + PROOF + CHECKSUM;
pub const CONFIRMATION: usize = PROOF + CHECKSUM;
/// A nonce, drawn for one handshake.
pub type Nonce = [u8; NONCE];

/// The dialler's description of itself and of the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hello {
    /// The dialler.
    pub from: MemberId,
    /// The incarnation that it dials.
    pub to: MemberId,
    /// Whether the two are of different jobs. An engine that does not know the flag takes the dialler for a stranger.
    pub across_jobs: bool,
    /// The number that distinguishes the connection from others between the two.
    pub nonce: u64,
    /// The number of this lane.
    pub lane: u16,
    /// Whether the lane carries control frames.
    pub control: bool,
    /// Whether the lane begins a connection; else it joins an existing one.
    pub begins: bool,
    /// Whether receivers are to fetch.
    pub fetch: bool,
    /// Whether the dialler wants checksums. Chunks carry them if either side wants them.
    pub checks: bool,
    /// The bytes of a chunk.
    pub chunk: u32,
    /// The number of the last control frame that the dialler has received.
    pub heard: u32,
    /// The [hash](hash_of_fabric) of the fabric over which the dialler reads memory of peers, and lets them read its own; 0 for
    /// none. An acceptor in the same fabric may agree.
    pub fabric: u32,
    /// Whether the dialler moves bytes between GPUs through a clique. An acceptor that does so too may agree.
    pub cliques: bool,
    /// The address of a word of the dialler's memory that holds its incarnation. An acceptor that can read it
    /// there can fetch from the dialler.
    pub probe: u64,
}

/// The acceptor's answer to a hello.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HelloAnswer {
    /// Whether the acceptor accepts the hello.
    pub verdict: HelloVerdict,
    /// The number of the last control frame that the acceptor has received.
    pub heard: u32,
    /// The address of a word of the acceptor's memory, as in the hello.
    pub probe: u64,
    /// Whether the acceptor wants checksums.
    pub checks: bool,
    /// Whether the acceptor agrees to reads over the dialler's fabric.
    pub fabric: bool,
    /// Whether the acceptor agrees to cliques of GPUs.
    pub cliques: bool,
}

/// The decision about a hello.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HelloVerdict {
    /// The hello is accepted.
    Welcome,
    /// The dialled task has another incarnation now.
    StaleTarget(Option<Incarnation>),
    /// The dialler's incarnation is not the current one.
    StaleDialler(Option<Incarnation>),
    /// The acceptor is dialling as well, and its connection takes precedence.
    Busy,
    /// The proof of the token is missing, unexpected or wrong.
    Token,
    /// The lane belongs to no connection.
    UnknownConnection,
    /// The acceptor has too many connections.
    Full,
    /// The dialler is of another job, and the acceptor's program has not named it, or the service does not allow it.
    UnknownJob,
}

/// The reason why a message is no opening or challenge.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NonceError {
    /// It belongs to another protocol, or is damaged.
    Protocol,
    /// It has another version.
    Version(u8),
}

/// Returns the number by which two engines recognise that they are in one fabric, from the names that its provider has of both; not 0.
pub fn hash_of_fabric(provider: &str, fabric: &str) -> u32 {
    crc32c_of(&[provider.as_bytes(), fabric.as_bytes()].join(&0)).max(1)
}

/// Returns the text of a refusal.
pub fn refusal_text(verdict: HelloVerdict) -> String {
    let now = |current: Option<Incarnation>| {
        current.map_or_else(String::new, |now| format!(": the incarnation that counts is {now}"))
    };
    match verdict {
        HelloVerdict::Welcome => "accepted".to_owned(),
        HelloVerdict::StaleTarget(current) => format!("the task has been restarted{}", now(current)),
        HelloVerdict::StaleDialler(current) => {
            format!("this task's incarnation does not count there{}", now(current))
        }
        HelloVerdict::Busy => "it is dialling as well".to_owned(),
        HelloVerdict::Token => {
            "the cluster tokens differ: give every engine the same one, or none".to_owned()
        }
        HelloVerdict::UnknownConnection => "the connection is not known there any more".to_owned(),
        HelloVerdict::Full => "it has as many connections as it takes".to_owned(),
        HelloVerdict::UnknownJob => "it has not named this task of another job as its peer".to_owned(),
    }
}

/// Writes the checksum of all bytes before it into the last bytes.
pub fn write_checksum(bytes: &mut [u8]) {
    if let Some((said, checksum)) = bytes.split_last_chunk_mut::<CHECKSUM>() {
        *checksum = crc32c_of(said).to_le_bytes();
    }
}

/// Returns whether the checksum in the last bytes is right.
pub fn is_checksum_valid(bytes: &[u8]) -> bool {
    bytes
        .split_last_chunk::<CHECKSUM>()
        .is_some_and(|(said, checksum)| *checksum == crc32c_of(said).to_le_bytes())
}

/// Encodes an opening or a challenge.
pub fn encode_nonce_message(which: u8, nonce: &Nonce) -> [u8; NONCE_MESSAGE] {
    let mut bytes = [0; NONCE_MESSAGE];
    bytes[0..7].copy_from_slice(MAGIC);
    bytes[7] = VERSION;
    bytes[8] = which;
    bytes[12..44].copy_from_slice(nonce);
    write_checksum(&mut bytes);
    bytes
}

/// Checks that a message is an opening or a challenge, as `which` says.
pub fn check_nonce_message(which: u8, bytes: &[u8; NONCE_MESSAGE]) -> Result<(), NonceError> {
    if bytes[0..7] != MAGIC[..] {
        return Err(NonceError::Protocol);
    }
    if bytes[7] != VERSION {
        return Err(if bytes[7].is_ascii_digit() {
            NonceError::Version(bytes[7])
        } else {
            NonceError::Protocol
        });
    }
    if bytes[8] != which || !is_checksum_valid(bytes) {
        return Err(NonceError::Protocol);
    }
    Ok(())
}

impl Hello {
    /// Encodes the hello without its proof. `token` says whether the dialler has one.
    pub fn encode_without_proof(&self, token: bool) -> [u8; HELLO_TERMS] {
        let mut bytes = [0; HELLO_TERMS];
        bytes[0..4].copy_from_slice(&self.from.task.0.to_le_bytes());
        bytes[4..12].copy_from_slice(&self.from.incarnation.get().to_le_bytes());
        bytes[12..16].copy_from_slice(&self.to.task.0.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.to.incarnation.get().to_le_bytes());
        bytes[24..32].copy_from_slice(&self.nonce.to_le_bytes());
        bytes[32..34].copy_from_slice(&self.lane.to_le_bytes());
        let flags =
            [self.control, self.begins, self.fetch, self.checks, token, self.across_jobs, self.cliques];
        bytes[34] = flags.iter().enumerate().fold(0, |bits, (at, set)| bits | u8::from(*set) << at);
        bytes[36..40].copy_from_slice(&self.chunk.to_le_bytes());
        bytes[40..44].copy_from_slice(&self.heard.to_le_bytes());
        bytes[44..48].copy_from_slice(&self.fabric.to_le_bytes());
        bytes[48..56].copy_from_slice(&self.probe.to_le_bytes());
        bytes
    }

    /// Decodes a hello, and whether the dialler has a token. None if an incarnation is zero.
    pub fn decode(bytes: &[u8]) -> Option<(Self, bool)> {
        let member = |task, incarnation| {
            let incarnation = Incarnation::new(read_u64_at(bytes, incarnation))?;
            Some(MemberId::of_own_job(TaskId(read_u32_at(bytes, task)), incarnation))
        };
        let flag = |at: u8| bytes[34] >> at & 1 != 0;
        let hello = Self {
            from: member(0, 4)?,
            to: member(12, 16)?,
            across_jobs: flag(5),
            nonce: read_u64_at(bytes, 24),
            lane: u16::from_le_bytes([bytes[32], bytes[33]]),
            control: flag(0),
            begins: flag(1),
            fetch: flag(2),
            checks: flag(3),
            chunk: read_u32_at(bytes, 36),
            heard: read_u32_at(bytes, 40),
            fabric: read_u32_at(bytes, 44),
            cliques: flag(6),
            probe: read_u64_at(bytes, 48),
        };
        Some((hello, flag(4)))
    }
}

impl HelloAnswer {
    /// The refusal of a dialler without a valid proof: the same for all of them.
    pub const UNPROVEN: Self = Self {
        verdict: HelloVerdict::Token,
        heard: 0,
        probe: 0,
        checks: false,
        fabric: false,
        cliques: false,
    };

    pub fn encode_without_proof(&self) -> [u8; ANSWER_TERMS] {
        let (code, detail) = match self.verdict {
            HelloVerdict::Welcome => (0, 0),
            HelloVerdict::StaleTarget(now) => (1, now.map_or(0, Incarnation::get)),
            HelloVerdict::StaleDialler(now) => (2, now.map_or(0, Incarnation::get)),
            HelloVerdict::Busy => (3, 0),
            HelloVerdict::Token => (4, 0),
            HelloVerdict::UnknownConnection => (5, 0),
            HelloVerdict::Full => (6, 0),
            HelloVerdict::UnknownJob => (7, 0),
        };
        let mut bytes = [0; ANSWER_TERMS];
        bytes[0] = code;
        bytes[1] = u8::from(self.checks) | u8::from(self.fabric) << 1 | u8::from(self.cliques) << 2;
        bytes[4..8].copy_from_slice(&self.heard.to_le_bytes());
        bytes[8..16].copy_from_slice(&detail.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.probe.to_le_bytes());
        bytes
    }

    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let detail = Incarnation::new(read_u64_at(bytes, 8));
        let verdict = match bytes[0] {
            0 => HelloVerdict::Welcome,
            1 => HelloVerdict::StaleTarget(detail),
            2 => HelloVerdict::StaleDialler(detail),
            3 => HelloVerdict::Busy,
            4 => HelloVerdict::Token,
            5 => HelloVerdict::UnknownConnection,
            6 => HelloVerdict::Full,
            7 => HelloVerdict::UnknownJob,
            _ => return None,
        };
        Some(Self {
            verdict,
            heard: read_u32_at(bytes, 4),
            probe: read_u64_at(bytes, 16),
            checks: bytes[1] & 1 != 0,
            fabric: bytes[1] & 2 != 0,
            cliques: bytes[1] & 4 != 0,
        })
    }
}
