//! The errors of preparations, of memory and of transfers.
//!
//! An error names the failure, and the peer if one peer caused it. Other crates translate the errors to exceptions
//! and status codes. Begin at [`TransferError`], [`PrepareError`] and [`MemoryError`].

use std::time::Duration;

use muster_gpu::GpuError;

use super::key::TransferKey;
use crate::base::membership::{DeviceId, Incarnation, MemberId, Membership, PeerTask, TaskId};
use crate::base::peer_job::PeerJob;
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
    /// No live task of another job owns the device.
    #[error(
        "device {device}{job} belongs to no task that lives and is known: wait until the engine of the task is known"
    )]
    UnknownPeerDevice {
        /// The other job.
        job: PeerJob,
        /// The device.
        device: DeviceId,
    },
    /// The settings of the two jobs do not allow transfers between them.
    #[error("{why}")]
    JobRefused {
        /// The other job.
        job: PeerJob,
        /// The missing setting, and how to set it.
        why: String,
    },
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
    /// Both devices of a transfer belong to this task, and the request has only its send, or only its receive.
    #[error(
        "devices {source_device} and {destination} are both of this task, and the request has only the {named} of key {key}: name the send and the receive in one request"
    )]
    SameTask {
        /// The key of the transfer.
        key: TransferKey,
        /// The device that sends.
        source_device: DeviceId,
        /// The device that receives.
        destination: DeviceId,
        /// The side that the request has: `send` or `receive`.
        named: &'static str,
    },
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
    /// A reserved launch was given another number of transfers.
    #[error("{given} transfers were given to a launch that was reserved for {reserved}: give as many")]
    Reserved {
        /// The number of transfers given.
        given: usize,
        /// The number of transfers reserved.
        reserved: usize,
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
        member: MemberId,
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
    /// The memory is only read.
    #[error("the memory is read-only, so nothing can be received into it: receive into a buffer of an arena")]
    ReadOnly,
    /// The memory belongs to a GPU, and the host cannot touch its bytes.
    #[error(
        "the buffer is memory of GPU {gpu}, which the host cannot touch: use read_contents and write_contents, or a \
         copy of the GPU"
    )]
    OnDevice {
        /// The number of the GPU.
        gpu: u32,
    },
    /// A GPU refused or failed.
    #[error("GPU {gpu}: {error}")]
    Gpu {
        /// The number of the GPU.
        gpu: u32,
        /// The error of its driver.
        error: GpuError,
    },
    /// A program keeps the address of the bytes.
    #[error(
        "a program holds {exports} exports of the buffer, so nothing may write it: drop the arrays and views of it"
    )]
    Exported {
        /// The number of exports that live.
        exports: u32,
    },
    /// Memory of a program cannot be used.
    #[error("memory of {len} bytes at {address:#x} cannot be used: {why}")]
    Foreign {
        /// The address that was given.
        address: usize,
        /// The length in bytes that was given.
        len: usize,
        /// The reason.
        why: &'static str,
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
        member: MemberId,
        /// How the failure was detected.
        how: String,
    },
    /// The peer's incarnation is not the one in the membership.
    #[error("{member} is not current{}", current.map_or_else(String::new, |now| format!(": its incarnation is {now}")))]
    StaleIncarnation {
        /// The incarnation that the transfer was prepared for.
        member: MemberId,
        /// The incarnation in the membership, if the task is in it.
        current: Option<Incarnation>,
    },
    /// The settings of the two jobs do not allow transfers between them, or do not any more.
    #[error("{why}")]
    JobRefused {
        /// The other job.
        job: PeerJob,
        /// The missing setting, and how to set it.
        why: String,
    },
    /// The program of one side cancelled it.
    #[error("cancelled by task {by}: {reason}")]
    Cancelled {
        /// The task whose program cancelled it.
        by: PeerTask,
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
        member: MemberId,
    },
    /// A GPU failed to copy the bytes.
    #[error("GPU {gpu} of {task} failed: {error}")]
    Gpu {
        /// The task of the GPU.
        task: PeerTask,
        /// The number of the GPU in its process.
        gpu: u32,
        /// The error of its driver.
        error: GpuError,
    },
    /// A transport failed, and no other transport could take over.
    #[error("{transport} to {member} failed: {why}")]
    Transport {
        /// The transport that failed.
        transport: TransportKind,
        /// The peer that it led to.
        member: MemberId,
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
        member: MemberId,
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
    /// Returns the reason as a metric's label: one of [`Self::REASON_LABELS`].
    #[must_use]
    pub const fn reason_label(&self) -> &'static str {
        match self {
            Self::PeerDead { .. } => "peer_dead",
            Self::StaleIncarnation { .. } => "stale_incarnation",
            Self::JobRefused { .. } => "job_refused",
            Self::Cancelled { .. } => "cancelled",
            Self::Deadline { .. } => "deadline",
            Self::Stalled { .. } => "stalled",
            Self::LayoutMismatch { .. } => "layout_mismatch",
            Self::OrderMismatch { .. } => "order_mismatch",
            Self::Integrity { .. } => "integrity",
            Self::Gpu { .. } => "gpu",
            Self::Transport { .. } => "transport",
            Self::Dependency(_) => "dependency",
            Self::Dropped => "dropped",
            Self::Memory(_) => "memory",
            Self::Overloaded { .. } => "overloaded",
            Self::Prepare(_) => "refused",
            Self::Closed => "closed",
        }
    }

    /// Every value that [`reason_label`](Self::reason_label) returns.
    pub const REASON_LABELS: [&'static str; 17] = [
        "peer_dead",
        "stale_incarnation",
        "job_refused",
        "cancelled",
        "deadline",
        "stalled",
        "layout_mismatch",
        "order_mismatch",
        "integrity",
        "gpu",
        "transport",
        "dependency",
        "dropped",
        "memory",
        "overloaded",
        "refused",
        "closed",
    ];

    /// Returns the error of a transfer with a member that is not in the membership.
    pub(crate) fn of_absent_member(member: MemberId, membership: &Membership) -> Self {
        if let Some(why) = membership.job_refusal(member.job) {
            return Self::JobRefused { job: member.job, why: why.to_owned() };
        }
        let current = membership.current_member(member.peer_task()).map(|member| member.incarnation);
        Self::StaleIncarnation { member, current }
    }

    /// Returns the peer that the error names, if it names one.
    #[must_use]
    pub fn member(&self) -> Option<MemberId> {
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
            PrepareError::JobRefused { job, why } => Self::JobRefused { job, why },
            error => Self::Prepare(Box::new(error)),
        }
    }
}
