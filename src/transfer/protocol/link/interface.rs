//! The types of a link's inputs and outputs. They have no behaviour.
//!
//! Begin at [`LinkOutput`].

use std::sync::Arc;

use super::chunk_scheduler::{GroupId, PriorityClass};
use super::launch_definition::LaunchDefinition;
use crate::base::key::TransferKey;
use crate::protocol::frame::Header;

/// A breach of the protocol by the peer, after which the link cannot go on.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the peer broke the protocol: {0}")]
pub struct ProtocolViolation(pub &'static str);

/// An action or event for the caller, in order. `T` is the caller's identifier of its launch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LinkOutput<T> {
    /// Both sides have launched the same transfers.
    Matched(T),
    /// All bytes to be received in the group; call `LinkSide::announce_received` when they are in place.
    Inline(T, Vec<u8>),
    /// The inbound bytes may be fetched from the sources that the definition names; then call
    /// `LinkSide::announce_received`, or `LinkSide::request_push`.
    Fetch(T, Arc<LaunchDefinition>),
    /// The peer has fetched so many more of the bytes to be sent.
    Progress(T, u64),
    /// The peer has all bytes that were sent; the flag says whether it fetched them.
    Sent(T, bool),
    /// The peer cancelled the group, for this reason, and no byte can land there any more. Stop all landing
    /// here too, then call `LinkSide::announce_group_quiescence`.
    StoppedByPeer(T, String),
    /// No byte can land at the peer any more.
    StopConfirmed(T),
    /// The lists differ: the group is over, and no byte has moved.
    Differ(T, DefinitionMismatch),
    /// The group is over: no further output names it.
    Over(T),
    /// The peer has lost this lane: close it, stop all landing from it, then call `LinkSide::report_received_chunks`.
    CloseLane(u16),
    /// A chunk arrived damaged for the second time: the group cannot be completed.
    Damaged(T, u32),
    /// The peer has withdrawn this region.
    Unregion(u32),
    /// The peer's further control frames are in the ring.
    Switched,
    /// The peer refuses to end the connection, because it uses it.
    Refused,
    /// Both sides have agreed, and this side has decided that the connection ends. The peer closes it.
    Left,
    /// The connection stays, although this side had agreed to its end: it may be used again.
    Stays,
    /// Both sides have decided that the connection ends: send the queued frames, and close it.
    Ended,
}

/// The difference between the lists of the two sides.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DefinitionMismatch {
    /// A transfer has different layouts: its key, and the fingerprint and bytes on both sides.
    Layout {
        /// The key of the transfer.
        key: TransferKey,
        /// The layout on this side.
        here: String,
        /// The layout on the other side.
        there: String,
    },
    /// The transfers or their order differ.
    Order {
        /// The keys of this side.
        here: String,
        /// The keys of the other side.
        there: String,
    },
}

/// The terms of a link, equal on both sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinkTerms {
    /// The bytes of a chunk.
    pub chunk: u32,
    /// Whether the receiver fetches the bytes; else the sender pushes them.
    pub fetch: bool,
    /// Whether a group is pushed at once if the sender's list names no place to fetch from; else the receiver asks for the push.
    pub pushes_unsourced: bool,
    /// Whether the control lane cannot be replaced when it is lost, so that unacknowledged frames need not be
    /// kept.
    pub lasting: bool,
}

/// The parameters of a launch.
#[derive(Debug)]
pub struct LaunchParameters<T> {
    /// The caller's identifier of the launch.
    pub token: T,
    /// The number of its definition.
    pub definition: u32,
    /// The group number that was taken for it.
    pub at: GroupId,
    /// The priority class.
    pub class: PriorityClass,
    /// Whether the bytes to be sent are defined.
    pub source: bool,
    /// Whether the bytes to be received may be written.
    pub destination: bool,
    /// All bytes to be sent, if they are defined and `LinkSide::should_inline` allows it.
    pub inline: Option<Vec<u8>>,
}

/// A chunk to send.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OutgoingChunk<T> {
    /// The launch.
    pub token: T,
    /// The header, without checksum and acknowledgement.
    pub header: Header,
    /// The first byte in the group's stream.
    pub start: u64,
}

/// The destination of a chunk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ChunkDestination<T> {
    /// This launch, from this byte of the group's stream on.
    At(T, u64),
    /// Not yet known: the chunk overtook the peer's `Go`, which arrives on another lane. Ask again after
    /// [`LinkOutput::Matched`].
    Early,
    /// None, or none any more: discard the chunk.
    Nowhere,
}

/// A control frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ControlFrame {
    /// Its header.
    pub header: Header,
    /// Its payload.
    pub payload: Vec<u8>,
}

/// The waiters that a frame must wake at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum WaitersToWake {
    /// None: a thread that polls the ring for another frame finds it soon enough.
    Lazy,
    /// The launches that wait for the acknowledgement of sent bytes.
    SendWaiters,
    /// All waiters.
    Everyone,
}
