//! The latest operations of a communicator, each with its times. Begin at [`OperationEntry`].

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicI32, AtomicU8, AtomicU32, AtomicU64, fence};

use crate::collective_function::CollectiveFunction;
use crate::data_type::DataType;

/// The number of collectives of a communicator that are in its ring. A process may enqueue hundreds before the first has ended.
pub const COLLECTIVES_KEPT: usize = 512;
/// The number of sends and receives in their ring.
pub(crate) const POINT_TO_POINT_KEPT: usize = 64;

/// A collective as a process enqueues it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Collective {
    /// The function.
    pub function: CollectiveFunction,
    /// The type of the elements.
    pub data_type: DataType,
    /// The number of elements.
    pub count: u64,
    /// The root, or the peer of a send or receive.
    pub root: i32,
    /// The number of channels of the GPU on which it runs; at least 1.
    pub channels: u8,
}

impl Collective {
    /// Returns the chain with this collective: a number over all collectives of a communicator up to this one. Two ranks that
    /// have equal chains at a number have enqueued equal collectives up to it.
    #[must_use]
    #[inline]
    pub fn chain(&self, before: u64) -> u64 {
        let kind = u64::from(self.function as u8) << 40 | u64::from(self.data_type as u8) << 32;
        let mix = |chain: u64, value: u64| {
            let mixed = (chain ^ value).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            mixed ^ (mixed >> 29)
        };
        mix(mix(before, kind | u64::from(self.root.cast_unsigned())), self.count)
    }

    /// Returns its bytes: the count times the size of an element.
    #[must_use]
    #[inline]
    pub fn bytes(&self) -> u64 {
        self.count.saturating_mul(self.data_type.bytes())
    }
}

/// Names an operation to the writer. It is a number, so a stale or forged one has no effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OperationHandle(u64);

const NUMBER_BITS: u32 = 48;
const SLOT_BITS: u32 = 8;
const POINT_TO_POINT: u64 = 1 << (NUMBER_BITS + SLOT_BITS);

impl OperationHandle {
    #[inline]
    pub(crate) fn new(slot: usize, is_point_to_point: bool, number: u64) -> Self {
        let number = (number + 1) & ((1 << NUMBER_BITS) - 1);
        let kind = if is_point_to_point { POINT_TO_POINT } else { 0 };
        Self(kind | (slot as u64) << NUMBER_BITS | number)
    }

    /// Returns the handle as a number that is not 0 and has its upper 7 bits free.
    #[must_use]
    #[inline]
    pub fn to_bits(self) -> u64 {
        self.0
    }

    /// Returns the handle of a number.
    #[must_use]
    #[inline]
    pub fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// Returns the slot, whether it is a send or receive, and one more than its number.
    #[inline]
    pub(crate) fn parts(self) -> (usize, bool, u64) {
        let slot = (self.0 >> NUMBER_BITS) as usize & ((1 << SLOT_BITS) - 1);
        (slot, self.0 & POINT_TO_POINT != 0, self.0 & ((1 << NUMBER_BITS) - 1))
    }
}

/// One operation. Times are nanoseconds of the host's monotonic clock; 0 if it has not happened or is not known.
#[repr(C)]
pub(crate) struct OperationEntry {
    /// One more than its number; 0 while the entry is written.
    pub ordinal: AtomicU64,
    pub function: AtomicU8,
    pub data_type: AtomicU8,
    pub channels: AtomicU8,
    /// 1 if the plug-in asked for the times on the GPU when it was enqueued.
    pub is_timed: AtomicU8,
    pub root: AtomicI32,
    pub count: AtomicU64,
    pub chain: AtomicU64,
    /// The number of the operation among those of its function.
    pub function_number: AtomicU64,
    pub enqueued_ns: AtomicU64,
    pub begun_ns: AtomicU64,
    pub ended_ns: AtomicU64,
    /// The earliest begin of a channel by the clock of the GPU.
    pub gpu_began: AtomicU64,
    pub channels_begun: AtomicU32,
    pub channels_ended: AtomicU32,
}

/// The parts of an entry that do not change.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NewEntry {
    pub number: u64,
    pub function_number: u64,
    pub chain: u64,
    pub enqueued_ns: u64,
    pub is_timed: bool,
}

/// An entry as it was read.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ReadEntry {
    pub new: NewEntry,
    pub operation: Collective,
    pub begun_ns: u64,
    pub ended_ns: u64,
}

impl OperationEntry {
    /// Writes an operation over the one that the entry had.
    #[inline]
    pub fn write(&self, operation: &Collective, new: NewEntry) {
        self.ordinal.store(0, Relaxed);
        fence(Release);
        self.function.store(operation.function as u8, Relaxed);
        self.data_type.store(operation.data_type as u8, Relaxed);
        self.channels.store(operation.channels.max(1), Relaxed);
        self.is_timed.store(u8::from(new.is_timed), Relaxed);
        self.root.store(operation.root, Relaxed);
        self.count.store(operation.count, Relaxed);
        self.chain.store(new.chain, Relaxed);
        self.function_number.store(new.function_number, Relaxed);
        self.enqueued_ns.store(new.enqueued_ns, Relaxed);
        self.begun_ns.store(0, Relaxed);
        self.ended_ns.store(0, Relaxed);
        self.gpu_began.store(0, Relaxed);
        self.channels_begun.store(0, Relaxed);
        self.channels_ended.store(0, Relaxed);
        self.ordinal.store(new.number + 1, Release);
    }

    /// Returns whether the entry has this operation.
    #[inline]
    pub fn has_ordinal(&self, ordinal: u64) -> bool {
        self.ordinal.load(Acquire) == ordinal
    }

    /// Returns the operation with this number, if the entry has it and nothing replaced it meanwhile.
    pub fn read(&self, number: u64) -> Option<ReadEntry> {
        if !self.has_ordinal(number + 1) {
            return None;
        }
        let operation = Collective {
            function: CollectiveFunction::from_number(self.function.load(Relaxed)),
            data_type: DataType::from_number(self.data_type.load(Relaxed)),
            count: self.count.load(Relaxed),
            root: self.root.load(Relaxed),
            channels: self.channels.load(Relaxed),
        };
        let new = NewEntry {
            number,
            function_number: self.function_number.load(Relaxed),
            chain: self.chain.load(Relaxed),
            enqueued_ns: self.enqueued_ns.load(Relaxed),
            is_timed: self.is_timed.load(Relaxed) != 0,
        };
        let (begun_ns, ended_ns) = (self.begun_ns.load(Relaxed), self.ended_ns.load(Relaxed));
        fence(Acquire);
        (self.ordinal.load(Relaxed) == number + 1).then_some(ReadEntry { new, operation, begun_ns, ended_ns })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_has_its_parts_and_is_never_null() {
        for (slot, is_point_to_point, number) in [(0, false, 0), (127, true, 5), (255, false, 1 << 40)] {
            let handle = OperationHandle::new(slot, is_point_to_point, number);
            assert_ne!(handle.to_bits(), 0);
            assert_eq!(handle.to_bits() >> 57, 0);
            let again = OperationHandle::from_bits(handle.to_bits());
            assert_eq!(again.parts(), (slot, is_point_to_point, number + 1));
        }
    }

    #[test]
    fn chains_differ_where_programs_do() {
        let base = Collective {
            function: CollectiveFunction::AllReduce,
            data_type: DataType::Float32,
            count: 100,
            root: 0,
            channels: 2,
        };
        let chain = base.chain(7);
        assert_eq!(Collective { channels: 4, ..base }.chain(7), chain, "channels are the rank's own matter");
        for other in [
            Collective { function: CollectiveFunction::AllGather, ..base },
            Collective { data_type: DataType::Int32, ..base },
            Collective { count: 101, ..base },
            Collective { root: 1, ..base },
        ] {
            assert_ne!(other.chain(7), chain, "{other:?}");
        }
        assert_ne!(base.chain(8), chain);
        let other = Collective { count: 5, ..base };
        assert_ne!(base.chain(other.chain(7)), other.chain(base.chain(7)), "the order counts");
    }
}
