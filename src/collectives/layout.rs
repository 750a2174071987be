//! The layout of a record. Everything is an atomic number, little endian as on the hosts that have GPUs.
//!
//! `record.rs` writes it and `snapshot.rs` reads it, in this process or in another. Begin at [`RecordLayout`].

use std::sync::atomic::Ordering::Acquire;
use std::sync::atomic::{AtomicI32, AtomicU8, AtomicU32, AtomicU64};

use crate::collective_function::CollectiveFunction;
use crate::operation_ring::{COLLECTIVES_KEPT, OperationEntry, POINT_TO_POINT_KEPT};

/// The first bytes of a record.
pub(crate) const MAGIC: u64 = u64::from_le_bytes(*b"MUSTERCR");
/// The version of the layout. A reader refuses another one.
pub const LAYOUT_VERSION: u32 = 2;
/// The number of communicators in a record. A further one takes the slot of the one that ended first; if none has ended, it
/// is counted and not recorded.
pub const COMMUNICATORS_MAX: usize = 128;
/// The bytes of a name.
pub(crate) const NAME_BYTES: usize = 64;
/// The number of functions.
pub(crate) const FUNCTIONS: usize = CollectiveFunction::ALL.len();

/// The whole record.
#[repr(C)]
pub(crate) struct RecordLayout {
    /// [`MAGIC`], written last.
    pub magic: AtomicU64,
    pub version: AtomicU32,
    pub pid: AtomicU32,
    /// The start of the record, in microseconds since the Unix epoch and in nanoseconds of the monotonic clock.
    pub started_unix_us: AtomicU64,
    pub started_ns: AtomicU64,
    /// The number of the task, if the environment tells it; else -1.
    pub task: AtomicI32,
    /// 1 while the process asks NCCL for the times on the GPU.
    pub is_timed: AtomicU32,
    /// The number of communicators that had no slot.
    pub communicators_not_recorded: AtomicU64,
    pub job: [AtomicU8; NAME_BYTES],
    /// The number of slots that ever had a communicator. The memory of the others is not there: no code touches it.
    pub slots_used: AtomicU32,
    pub unused: AtomicU32,
    pub communicators: [CommunicatorSlot; COMMUNICATORS_MAX],
}

impl RecordLayout {
    /// Returns the slots that ever had a communicator.
    pub fn used_slots(&self) -> &[CommunicatorSlot] {
        let used = self.slots_used.load(Acquire) as usize;
        &self.communicators[..used.min(COMMUNICATORS_MAX)]
    }
}

/// One communicator.
#[repr(C)]
pub(crate) struct CommunicatorSlot {
    /// Odd while the slot gets a new communicator; 0 if it never had one.
    pub generation: AtomicU32,
    /// 1 when the communicator has ended.
    pub is_ended: AtomicU32,
    pub hash: AtomicU64,
    pub rank: AtomicU32,
    pub ranks: AtomicU32,
    pub nodes: AtomicU32,
    pub unused: AtomicU32,
    pub opened_ns: AtomicU64,
    /// When an operation was enqueued, began or ended last.
    pub changed_ns: AtomicU64,
    /// The number of collectives that were enqueued: the number of the next one.
    pub collectives: AtomicU64,
    /// The chain of the latest collective (see [`crate::Collective::chain`]).
    pub chain: AtomicU64,
    /// The number of sends and receives that were enqueued.
    pub point_to_point: AtomicU64,
    pub name: [AtomicU8; NAME_BYTES],
    pub functions: [FunctionSlot; FUNCTIONS],
    pub collective_ring: [OperationEntry; COLLECTIVES_KEPT],
    pub point_to_point_ring: [OperationEntry; POINT_TO_POINT_KEPT],
}

/// The totals of one function on one communicator.
#[repr(C)]
pub(crate) struct FunctionSlot {
    pub enqueued: AtomicU64,
    pub begun: AtomicU64,
    pub ended: AtomicU64,
    /// The bytes of all enqueued operations: count times the size of an element.
    pub bytes: AtomicU64,
    /// The number and the bytes of those whose time on the GPU is known, and this time in nanoseconds.
    pub timed: AtomicU64,
    pub timed_bytes: AtomicU64,
    pub gpu_ns: AtomicU64,
}
