//! The inputs and outputs of a link.
//!
//! It has no behaviour. Begin at [`Output`].

use std::sync::Arc;

use super::definition::Definition;
use super::schedule::{Class, GroupId};
use crate::base::key::TransferKey;
use crate::protocol::frame::Header;

/// The peer broke the rules; the link cannot go on.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the peer broke the protocol: {0}")]
pub struct Violation(pub &'static str);

/// What the caller has to do or to know, in order. `T` is the caller's name for its launch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Output<T> {
    /// Both sides have launched the same transfers.
    Matched(T),
    /// All that is received in the group; call `Link::received` when it is in place.
    Inline(T, Vec<u8>),
    /// What is received may be fetched, from the sources that the definition names; then call `Link::received`, or
    /// `Link::push_instead`.
    Fetch(T, Arc<Definition>),
    /// The peer has all that was sent; whether it has fetched it.
    Sent(T, bool),
    /// The peer gave the group up, for this reason, and nothing can land there any more. Let nothing land here either,
    /// then call `Link::quiesced`.
    StoppedByPeer(T, String),
    /// Nothing can land at the peer any more.
    StopConfirmed(T),
    /// The lists differ; the group is over, and nothing has moved.
    Differ(T, Difference),
    /// Nothing more will be said of it.
    Over(T),
    /// The peer has lost this lane: close it, let nothing land from it any more, then call `Link::lane_closed`.
    CloseLane(u16),
    /// A chunk came damaged for the second time: the group cannot be completed.
    Damaged(T, u32),
    /// The peer does so no more.
    Unregion(u32),
    /// The peer's further control frames are in the ring.
    Switched,
    /// The peer uses the connection that this side asked to end.
    Refused,
    /// Both sides have agreed, and this one has let go of the connection. The peer closes it.
    Left,
    /// The connection that this side agreed to end stays: it may be used again.
    Stays,
    /// Both sides have let go of the connection: send what there is, and close it.
    Ended,
}

/// How the lists of the two sides differ.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Difference {
    /// The same transfer has two layouts: its key, and fingerprint and bytes on both sides.
    Layout {
        /// Its key.
        key: TransferKey,
        /// On this side.
        here: String,
        /// On the other side.
        there: String,
    },
    /// Other transfers, or another order.
    Order {
        /// The keys of this side.
        here: String,
        /// The keys of the other side.
        there: String,
    },
}

/// How a link works; the same on both sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Terms {
    /// Bytes of a chunk.
    pub chunk: u32,
    /// The receiver fetches what is sent; else the sender sends it.
    pub fetch: bool,
    /// The control connection cannot be replaced when it is lost: nothing is kept to be sent again.
    pub lasting: bool,
}

/// What a launch is made of.
#[derive(Debug)]
pub struct Launching<T> {
    /// The caller's name for it.
    pub token: T,
    /// Which definition.
    pub definition: u32,
    /// The number that was taken for it.
    pub at: GroupId,
    /// How urgent.
    pub class: Class,
    /// Whether what is sent is defined.
    pub source: bool,
    /// Whether what is received into may be written.
    pub destination: bool,
    /// All that is sent, if it is small, defined, and `Link::inlines`.
    pub inline: Option<Vec<u8>>,
}

/// A chunk to be sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Push<T> {
    /// Of which launch.
    pub token: T,
    /// Its header, but for checksum and acknowledgement.
    pub header: Header,
    /// Its first byte in the group's stream.
    pub start: u64,
}

/// Where a chunk belongs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Landing<T> {
    /// To this launch, from this byte of the group's stream on.
    At(T, u64),
    /// It overtook the peer's `Go`, which comes by another lane: ask again when [`Output::Matched`] was told.
    Early,
    /// Nowhere (any more).
    Nowhere,
}

/// A control frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    /// Its header.
    pub header: Header,
    /// Its payload.
    pub payload: Vec<u8>,
}

/// Which waiters have to hear of a frame at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Urgency {
    /// None: a thread that polls the ring until something else comes finds it soon enough.
    Lazy,
    /// The launches that wait to hear that the peer has what they sent.
    SendWaiters,
    /// All of them.
    Everyone,
}
