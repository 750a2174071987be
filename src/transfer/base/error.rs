//! The errors of a preparation and of a transfer.
//!
//! It says what failed and with which peer; it maps nothing to other protocols. Begin at [`TransferError`].

use std::time::Duration;

use super::key::TransferKey;
use crate::base::identity::{DeviceId, Incarnation, Member, TaskId};
use crate::base::transport::TransportKind;

/// The reason why a request was refused. No byte has moved.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PrepareError {
    /// The request names no transfer.
    #[error("no transfers were given: name at least one send or receive")]
    Empty,
    /// The task owns no device to send from.
    #[error(
        "task {here} has no devices, so there is none to send from: start its engine with the devices that it owns"
    )]
    NoDevice {
        /// This task.
        here: TaskId,
    },
    /// The request holds more transfers than it may.
    #[error("{given} transfers in one request; at most {bound} fit: split them")]
    TooMany {
        /// The number of transfers given.
        given: usize,
        /// The most transfers that a request may hold.
        bound: usize,
    },
    /// No task of the membership owns the device.
    #[error("device {0} belongs to no live task: it may have left, or the membership is not yet known")]
    UnknownDevice(DeviceId),
    /// The local device of a transfer belongs to another task.
    #[error("device {device} is not addressable here: it belongs to task {owner}, and this is task {here}")]
    NotAddressable {
        /// The local device that the request names.
        device: DeviceId,
        /// The task that owns it.
        owner: TaskId,
        /// This task.
        here: TaskId,
    },
    /// Both devices of a transfer belong to this task.
    #[error("devices {0} and {1} are both of this task: copy between its buffers instead")]
    SameTask(DeviceId, DeviceId),
    /// Two transfers of one request have the same key and the same devices.
    #[error(
        "key {key} is used twice from device {source_device} to device {destination}: give each transfer its own"
    )]
    DuplicateKey {
        /// The key that is used twice.
        key: TransferKey,
        /// The device that both send from.
        source_device: DeviceId,
        /// The device that both send to.
        destination: DeviceId,
    },
    /// Two transfers of one request use the same bytes, and at least one of them writes those.
    #[error("key {key} uses bytes {start}..{end} of a buffer that another transfer of the request writes")]
    Overlap {
        /// The key of the later transfer.
        key: TransferKey,
        /// The first byte of its range.
        start: usize,
        /// The byte after the last of its range.
        end: usize,
    },
    /// A range reaches beyond its buffer.
    #[error("bytes {start}..{end} were named of a buffer of {len}")]
    OutOfRange {
        /// The first byte of the range.
        start: usize,
        /// The byte after the last of the range.
        end: usize,
        /// The length of the buffer in bytes.
        len: usize,
    },
    /// The layout and the buffer differ in their number of bytes.
    #[error("key {key}: its layout takes {layout} bytes, its buffer has {buffer}")]
    WrongSize {
        /// The key of the transfer.
        key: TransferKey,
        /// The bytes that the layout takes.
        layout: u64,
        /// The bytes of the buffer.
        buffer: u64,
    },
    /// The lists of a request differ in length.
    #[error(
        "{buffers} buffers, {devices} devices and {keys} keys were given: one of each for every transfer"
    )]
    Uneven {
        /// The number of buffers or layouts.
        buffers: usize,
        /// The number of devices.
        devices: usize,
        /// The number of keys.
        keys: usize,
    },
    /// A receive buffer could not be allocated.
    #[error("{0}")]
    Memory(#[from] MemoryError),
    /// The connection to a peer could not be made, or the peer is gone.
    #[error("the connection to {member} cannot be prepared: {error}")]
    Clique {
        /// The peer.
        member: Member,
        /// The error of the connection.
        error: TransferError,
    },
    /// The engine has been shut down.
    #[error("the engine has been shut down")]
    Closed,
}

/// The reason why memory could not be allocated or accessed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// The arena has no free range of that size.
    #[error("{wanted} bytes do not fit: the arena has {free} of {size} left, {largest} in one piece")]
    Full {
        /// The bytes that were requested.
        wanted: usize,
        /// The free bytes of the arena.
        free: usize,
        /// The bytes of its largest free range.
        largest: usize,
        /// The size of the arena in bytes.
        size: usize,
    },
    /// A transfer uses some of the bytes now.
    #[error("bytes {start}..{end} are in use by a transfer: wait for it, or cancel it")]
    Busy {
        /// The first byte of the range.
        start: usize,
        /// The byte after the last of the range.
        end: usize,
    },
    /// The range reaches beyond the buffer.
    #[error("bytes {start}..{end} were named of a buffer of {len}")]
    OutOfRange {
        /// The first byte of the range.
        start: usize,
        /// The byte after the last of the range.
        end: usize,
        /// The length of the buffer in bytes.
        len: usize,
    },
    /// The operating system refused the memory.
    #[error("no shared memory of {bytes} bytes: {why}")]
    System {
        /// The bytes that were requested.
        bytes: usize,
        /// The error of the operating system.
        why: String,
    },
}

/// The reason why a transfer failed. Once a future has resolved with it, no byte lands in the transfer's
/// buffers any more.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TransferError {
    /// The peer's process or host is gone.
    #[error("{member} is gone: {how}")]
    PeerDead {
        /// The peer.
        member: Member,
        /// How the failure was detected.
        how: String,
    },
    /// The peer's incarnation is not the one in the membership.
    #[error("{member} is not current{}", current.map_or_else(String::new, |now| format!(": its incarnation is {now}")))]
    StaleIncarnation {
        /// The incarnation that the transfer was prepared for.
        member: Member,
        /// The incarnation in the membership, if the task is in it.
        current: Option<Incarnation>,
    },
    /// The program of one side cancelled it.
    #[error("cancelled by task {by}: {reason}")]
    Cancelled {
        /// The task whose program cancelled it.
        by: TaskId,
        /// The reason that the program gave.
        reason: String,
    },
    /// Its deadline passed.
    #[error("the deadline passed after {moved} of {total} bytes")]
    Deadline {
        /// The bytes that had arrived.
        moved: u64,
        /// The bytes of the whole transfer.
        total: u64,
    },
    /// No byte moved for longer than the limit.
    #[error("nothing moved for {idle:?} after {moved} of {total} bytes")]
    Stalled {
        /// How long no byte moved.
        idle: Duration,
        /// The bytes that had arrived.
        moved: u64,
        /// The bytes of the whole transfer.
        total: u64,
    },
    /// Both sides prepared the key, with different layouts.
    #[error("key {key}: the layouts differ: {here} here, {there} there")]
    LayoutMismatch {
        /// The key of the transfer.
        key: TransferKey,
        /// The fingerprint and the bytes of this side's layout.
        here: String,
        /// The fingerprint and the bytes of the other side's layout.
        there: String,
    },
    /// The sides launched different transfers as the same group.
    #[error(
        "group {sequence} of channel {channel} is {here} here and {there} there: launch the same transfers in the same order on both sides"
    )]
    OrderMismatch {
        /// The channel.
        channel: u32,
        /// The number of the group on the channel.
        sequence: u64,
        /// The keys that this side launched.
        here: String,
        /// The keys that the other side launched.
        there: String,
    },
    /// A chunk arrived damaged twice.
    #[error("chunk {chunk} arrived damaged twice: the path to {member} corrupts data")]
    Integrity {
        /// The number of the chunk within the group.
        chunk: u32,
        /// The other side.
        member: Member,
    },
    /// A transport failed, and no other transport could take over.
    #[error("{transport} to {member} failed: {why}")]
    Transport {
        /// The transport that failed.
        transport: TransportKind,
        /// The peer that it led to.
        member: Member,
        /// The error of the transport.
        why: String,
    },
    /// An event or a transfer that the launch depends on failed.
    #[error("what it depends on failed: {0}")]
    Dependency(String),
    /// The prepared transfer was dropped before it was launched.
    #[error("dropped before it was launched")]
    Dropped,
    /// The memory of the transfer is in use, or could not be allocated.
    #[error("{0}")]
    Memory(#[from] MemoryError),
    /// Too many launches to one peer are in flight.
    #[error("{bound} launches to {member} are under way, which is the bound: wait for some")]
    Overloaded {
        /// The peer.
        member: Member,
        /// The most launches to a peer that may be in flight.
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
    /// Returns the reason as a metric's label: one of [`Self::REASONS`].
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

    /// Every value that [`reason`](Self::reason) returns.
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

    /// Returns the peer that the error names, if it names one.
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
