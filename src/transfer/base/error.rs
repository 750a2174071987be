//! The errors of a preparation and of a transfer.
//!
//! It says what failed and with which peer; it maps nothing to other protocols. Begin at [`TransferError`].

use std::time::Duration;

use super::key::TransferKey;
use crate::base::identity::{DeviceId, Incarnation, Member, TaskId};
use crate::base::transport::TransportKind;

/// What is wrong with a request. Nothing has moved.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PrepareError {
    /// There is nothing to do.
    #[error("no transfers were given: name at least one send or receive")]
    Empty,
    /// The task has none to send from.
    #[error(
        "task {here} has no devices, so there is none to send from: start its engine with the devices that it owns"
    )]
    NoDevice {
        /// This task.
        here: TaskId,
    },
    /// More than one request may hold.
    #[error("{given} transfers in one request; at most {bound} fit: split them")]
    TooMany {
        /// How many were given.
        given: usize,
        /// How many fit.
        bound: usize,
    },
    /// No task of the membership owns the device.
    #[error("device {0} belongs to no live task: it may have left, or the membership is not yet known")]
    UnknownDevice(DeviceId),
    /// The local end is not on a device of this task.
    #[error("device {device} is not addressable here: it belongs to task {owner}, and this is task {here}")]
    NotAddressable {
        /// The device that was named.
        device: DeviceId,
        /// Its owner.
        owner: TaskId,
        /// This task.
        here: TaskId,
    },
    /// Both ends are on this task.
    #[error("devices {0} and {1} are both of this task: copy between its buffers instead")]
    SameTask(DeviceId, DeviceId),
    /// Two transfers of one request cannot be told apart.
    #[error(
        "key {key} is used twice from device {source_device} to device {destination}: give each transfer its own"
    )]
    DuplicateKey {
        /// The key.
        key: TransferKey,
        /// From where.
        source_device: DeviceId,
        /// To where.
        destination: DeviceId,
    },
    /// Two receives, or a send and a receive, of one request share bytes.
    #[error("key {key} uses bytes {start}..{end} of a buffer that another transfer of the request writes")]
    Overlap {
        /// The later one of the two.
        key: TransferKey,
        /// First byte of its range.
        start: usize,
        /// The byte after its last.
        end: usize,
    },
    /// A range reaches beyond its buffer.
    #[error("bytes {start}..{end} were named of a buffer of {len}")]
    OutOfRange {
        /// First byte.
        start: usize,
        /// The byte after the last.
        end: usize,
        /// The buffer's length.
        len: usize,
    },
    /// The layout needs another number of bytes than the buffer has.
    #[error("key {key}: its layout takes {layout} bytes, its buffer has {buffer}")]
    WrongSize {
        /// The transfer.
        key: TransferKey,
        /// Bytes that the layout takes.
        layout: u64,
        /// Bytes that were given.
        buffer: u64,
    },
    /// Lists that belong together differ in length.
    #[error(
        "{buffers} buffers, {devices} devices and {keys} keys were given: one of each for every transfer"
    )]
    Uneven {
        /// How many buffers or layouts.
        buffers: usize,
        /// How many devices.
        devices: usize,
        /// How many keys.
        keys: usize,
    },
    /// There is no room for a receive buffer.
    #[error("{0}")]
    Memory(#[from] MemoryError),
    /// The peer cannot be reached, or is gone.
    #[error("the connection to {member} cannot be prepared: {error}")]
    Clique {
        /// The peer.
        member: Member,
        /// What happened.
        error: TransferError,
    },
    /// The engine has been shut down.
    #[error("the engine has been shut down")]
    Closed,
}

/// What is wrong with a use of memory.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// The arena has no stretch of that size left.
    #[error("{wanted} bytes do not fit: the arena has {free} of {size} left, {largest} in one piece")]
    Full {
        /// What was asked for.
        wanted: usize,
        /// What is left in all.
        free: usize,
        /// The largest stretch.
        largest: usize,
        /// The whole arena.
        size: usize,
    },
    /// A transfer uses the bytes now.
    #[error("bytes {start}..{end} are in use by a transfer: wait for it, or cancel it")]
    Busy {
        /// First byte.
        start: usize,
        /// The byte after the last.
        end: usize,
    },
    /// The range reaches beyond the buffer.
    #[error("bytes {start}..{end} were named of a buffer of {len}")]
    OutOfRange {
        /// First byte.
        start: usize,
        /// The byte after the last.
        end: usize,
        /// The buffer's length.
        len: usize,
    },
    /// The operating system gave none.
    #[error("no shared memory of {bytes} bytes: {why}")]
    System {
        /// How much was asked for.
        bytes: usize,
        /// What it said.
        why: String,
    },
}

/// How a transfer failed. When a future resolves with it, no byte can land in its buffers any more.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TransferError {
    /// The peer's process or host is gone.
    #[error("{member} is gone: {how}")]
    PeerDead {
        /// The peer.
        member: Member,
        /// How it was found out.
        how: String,
    },
    /// The peer's life that was meant is not the one that counts.
    #[error("{member} is not current{}", current.map_or_else(String::new, |now| format!(": its incarnation is {now}")))]
    StaleIncarnation {
        /// The life that was meant.
        member: Member,
        /// The one that counts, where it is known.
        current: Option<Incarnation>,
    },
    /// A program gave it up.
    #[error("cancelled by task {by}: {reason}")]
    Cancelled {
        /// Whose program.
        by: TaskId,
        /// What it said.
        reason: String,
    },
    /// Its deadline passed.
    #[error("the deadline passed after {moved} of {total} bytes")]
    Deadline {
        /// Bytes that had arrived.
        moved: u64,
        /// Bytes in all.
        total: u64,
    },
    /// Nothing moved for too long.
    #[error("nothing moved for {idle:?} after {moved} of {total} bytes")]
    Stalled {
        /// For how long.
        idle: Duration,
        /// Bytes that had arrived.
        moved: u64,
        /// Bytes in all.
        total: u64,
    },
    /// Both sides named a key, with different layouts.
    #[error("key {key}: the layouts differ: {here} here, {there} there")]
    LayoutMismatch {
        /// The transfer.
        key: TransferKey,
        /// Fingerprint and bytes on this side.
        here: String,
        /// The same of the other side.
        there: String,
    },
    /// The sides launched different transfers as the same group.
    #[error(
        "group {sequence} of channel {channel} is {here} here and {there} there: launch the same transfers in the same order on both sides"
    )]
    OrderMismatch {
        /// The channel.
        channel: u32,
        /// The number of the group on it.
        sequence: u64,
        /// Keys of this side.
        here: String,
        /// Keys of the other side.
        there: String,
    },
    /// A chunk arrived damaged twice.
    #[error("chunk {chunk} arrived damaged twice: the path to {member} corrupts data")]
    Integrity {
        /// Which chunk of the group.
        chunk: u32,
        /// The other side.
        member: Member,
    },
    /// A transport failed in a way that no other could make good.
    #[error("{transport} to {member} failed: {why}")]
    Transport {
        /// Which one.
        transport: TransportKind,
        /// To whom.
        member: Member,
        /// What it said.
        why: String,
    },
    /// What it depends on failed.
    #[error("what it depends on failed: {0}")]
    Dependency(String),
    /// It was dropped before it was launched.
    #[error("dropped before it was launched")]
    Dropped,
    /// Its memory is used by something else.
    #[error("{0}")]
    Memory(#[from] MemoryError),
    /// Too many are under way.
    #[error("{bound} launches to {member} are under way, which is the bound: wait for some")]
    Overloaded {
        /// To whom.
        member: Member,
        /// The bound.
        bound: usize,
    },
    /// The request was refused.
    #[error("{0}")]
    Prepare(Box<PrepareError>),
    /// The engine has been shut down.
    #[error("the engine has been shut down")]
    Closed,
}

impl TransferError {
    /// Returns its name as a metric's label: one of a fixed few.
    #[must_use]
    pub const fn reason(&self) -> &'static str {
        match self {
            Self::PeerDead { .. } => "peer_dead",
            Self::StaleIncarnation { .. } => "stale_incarnation",
            Self::Cancelled { .. } => "cancelled",
            Self::Deadline { .. } => "deadline",
            Self::Stalled { .. } => "stalled",
            Self::LayoutMismatch { .. } => "layout_mismatch",
            Self::OrderMismatch { .. } => "order_mismatch",
            Self::Integrity { .. } => "integrity",
            Self::Transport { .. } => "transport",
            Self::Dependency(_) => "dependency",
            Self::Dropped => "dropped",
            Self::Memory(_) => "memory",
            Self::Overloaded { .. } => "overloaded",
            Self::Prepare(_) => "refused",
            Self::Closed => "closed",
        }
    }

    /// Every [`reason`](Self::reason) that there is.
    pub const REASONS: [&'static str; 15] = [
        "peer_dead",
        "stale_incarnation",
        "cancelled",
        "deadline",
        "stalled",
        "layout_mismatch",
        "order_mismatch",
        "integrity",
        "transport",
        "dependency",
        "dropped",
        "memory",
        "overloaded",
        "refused",
        "closed",
    ];

    /// Returns the peer that it is about, where it says so.
    #[must_use]
    pub fn member(&self) -> Option<Member> {
        match self {
            Self::PeerDead { member, .. }
            | Self::StaleIncarnation { member, .. }
            | Self::Integrity { member, .. }
            | Self::Transport { member, .. }
            | Self::Overloaded { member, .. } => Some(*member),
            Self::Prepare(error) => match &**error {
                PrepareError::Clique { member, .. } => Some(*member),
                _ => None,
            },
            _ => None,
        }
    }
}

impl From<PrepareError> for TransferError {
    fn from(error: PrepareError) -> Self {
        match error {
            PrepareError::Closed => Self::Closed,
            PrepareError::Clique { error, .. } => error,
            error => Self::Prepare(Box::new(error)),
        }
    }
}
