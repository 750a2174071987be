//! The writer of a record. Begin at [`Record::open_communicator`], then [`Record::enqueue`].
//!
//! The events of one communicator may come from several threads: those that enqueue, and the one that reports the GPU.

use std::mem::offset_of;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::AtomicU8;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

use crate::layout::{
    COMMUNICATORS_MAX, CommunicatorSlot, FunctionSlot, LAYOUT_VERSION, MAGIC, NAME_BYTES, RecordLayout,
};
use crate::mapped_record::{MappedRecord, RecordError};
use crate::monotonic_nanos;
use crate::operation_ring::{
    COLLECTIVES_KEPT, Collective, NewEntry, OperationEntry, OperationHandle, POINT_TO_POINT_KEPT,
};

/// A communicator as a rank opens it.
#[derive(Debug, Clone, Copy)]
pub struct NewCommunicator<'a> {
    /// NCCL's hash of the unique id.
    pub hash: u64,
    /// The rank of this process's device.
    pub rank: u32,
    /// The number of ranks.
    pub ranks: u32,
    /// The number of hosts.
    pub nodes: u32,
    /// The name that the program gave it; often empty.
    pub name: &'a [u8],
}

/// The record of this process.
pub struct Record {
    memory: MappedRecord,
    /// Taken where communicators are opened, never where operations are recorded.
    opening: Mutex<()>,
}

impl std::fmt::Debug for Record {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Record").field("memory", &self.memory).finish_non_exhaustive()
    }
}

impl Record {
    /// Starts the record of this process in `memory`. The environment may name the job and the task.
    ///
    /// # Errors
    /// If the memory is too short.
    pub(crate) fn start(
        memory: MappedRecord,
        job: Option<&str>,
        task: Option<u32>,
    ) -> Result<Self, RecordError> {
        let layout = memory.layout()?;
        layout.version.store(LAYOUT_VERSION, Relaxed);
        layout.pid.store(std::process::id(), Relaxed);
        layout.started_unix_us.store(unix_micros(), Relaxed);
        layout.started_ns.store(monotonic_nanos(), Relaxed);
        layout.task.store(task.and_then(|task| i32::try_from(task).ok()).unwrap_or(-1), Relaxed);
        write_name(&layout.job, job.unwrap_or_default().as_bytes());
        layout.magic.store(MAGIC, Release);
        Ok(Self { memory, opening: Mutex::new(()) })
    }

    #[inline]
    pub(crate) fn layout(&self) -> &RecordLayout {
        self.memory.layout_of_own()
    }

    /// Records whether the process asks NCCL for the times on the GPU.
    pub fn set_timed(&self, is_timed: bool) {
        self.layout().is_timed.store(u32::from(is_timed), Relaxed);
    }

    /// Starts a record that only this process can read, for when no file can be used.
    ///
    /// # Errors
    /// If there is no memory.
    pub fn in_memory(job: Option<&str>, task: Option<u32>) -> Result<Self, RecordError> {
        Self::start(MappedRecord::map_anonymous()?, job, task)
    }

    /// Gives a communicator a slot, and returns its index; `None` if all slots have communicators that have not ended, or the
    /// memory of a further slot is not there.
    pub fn open_communicator(&self, new: &NewCommunicator<'_>) -> Option<usize> {
        let _one_at_a_time = self.opening.lock().unwrap_or_else(PoisonError::into_inner);
        let layout = self.layout();
        let Some(index) = self.unused_slot().or_else(|| self.ended_slot()) else {
            layout.communicators_not_recorded.fetch_add(1, Relaxed);
            return None;
        };
        let slot = &layout.communicators[index];
        let changing = slot.generation.load(Relaxed).wrapping_add(1) | 1;
        slot.generation.store(changing, Release);
        std::sync::atomic::fence(AcqRel);
        let now = monotonic_nanos();
        slot.hash.store(new.hash, Relaxed);
        slot.rank.store(new.rank, Relaxed);
        slot.ranks.store(new.ranks, Relaxed);
        slot.nodes.store(new.nodes, Relaxed);
        slot.opened_ns.store(now, Relaxed);
        slot.changed_ns.store(now, Relaxed);
        slot.collectives.store(0, Relaxed);
        slot.chain.store(0, Relaxed);
        slot.point_to_point.store(0, Relaxed);
        write_name(&slot.name, new.name);
        for function in &slot.functions {
            let FunctionSlot { enqueued, begun, ended, bytes, timed, timed_bytes, gpu_ns } = function;
            for number in [enqueued, begun, ended, bytes, timed, timed_bytes, gpu_ns] {
                number.store(0, Relaxed);
            }
        }
        for entry in slot.collective_ring.iter().chain(&slot.point_to_point_ring) {
            // Entries that were never used stay untouched, and take no memory.
            if entry.ordinal.load(Relaxed) != 0 {
                entry.ordinal.store(0, Relaxed);
            }
        }
        slot.is_ended.store(0, Relaxed);
        slot.generation.store(changing.wrapping_add(1).max(2), Release);
        self.touch();
        Some(index)
    }

    /// Returns the index of a slot that was never used, after its memory was reserved. A page that is not reserved would end the
    /// process at the first store if the file system is full.
    fn unused_slot(&self) -> Option<usize> {
        let layout = self.layout();
        let used = layout.used_slots();
        let (index, offset) = (used.len(), offset_of!(RecordLayout, communicators) + size_of_val(used));
        if index >= COMMUNICATORS_MAX || self.memory.reserve(offset, size_of::<CommunicatorSlot>()).is_err() {
            return None;
        }
        layout.slots_used.store(index as u32 + 1, Release);
        Some(index)
    }

    /// Returns the index of the slot whose communicator ended first.
    fn ended_slot(&self) -> Option<usize> {
        let slots = self.layout().used_slots().iter().enumerate();
        let ended = slots.filter(|(_, slot)| slot.is_ended.load(Acquire) != 0);
        ended.min_by_key(|(_, slot)| slot.changed_ns.load(Relaxed)).map(|(index, _)| index)
    }

    /// Sets the time of the file's last change to now: stores into mapped memory do not. It is a system call.
    pub fn touch(&self) {
        self.memory.touch();
    }

    /// Marks a communicator as ended. Its slot stays readable until another communicator needs it.
    pub fn end_communicator(&self, index: usize) {
        if let Some(slot) = self.layout().communicators.get(index) {
            slot.changed_ns.store(monotonic_nanos(), Relaxed);
            slot.is_ended.store(1, Release);
            self.touch();
        }
    }

    /// Records that an operation was enqueued on the communicator with this index. `function_number` is its number among those
    /// of its function, if NCCL counts them.
    #[inline]
    pub fn enqueue(
        &self,
        index: usize,
        operation: &Collective,
        function_number: Option<u64>,
        is_timed: bool,
    ) -> Option<OperationHandle> {
        let slot = self.layout().communicators.get(index)?;
        let function = &slot.functions[operation.function as usize];
        let now = monotonic_nanos();
        let function_number = match function_number {
            Some(number) => {
                function.enqueued.store(number.saturating_add(1), Relaxed);
                number
            }
            None => function.enqueued.fetch_add(1, Relaxed),
        };
        function.bytes.fetch_add(operation.bytes(), Relaxed);
        let is_point_to_point = operation.function.is_point_to_point();
        let (number, chain) = if is_point_to_point {
            (slot.point_to_point.fetch_add(1, Relaxed), 0)
        } else {
            // NCCL calls for the operations of a communicator one after the other.
            let chain = operation.chain(slot.chain.load(Relaxed));
            slot.chain.store(chain, Relaxed);
            (slot.collectives.load(Relaxed), chain)
        };
        let new = NewEntry { number, function_number, chain, enqueued_ns: now, is_timed };
        entry_of(slot, is_point_to_point, number).write(operation, new);
        slot.changed_ns.store(now, Relaxed);
        if !is_point_to_point {
            slot.collectives.store(number + 1, Release);
        }
        Some(OperationHandle::new(index, is_point_to_point, number))
    }

    /// Records that a channel of the GPU began an operation, at a time of the GPU's clock.
    #[inline]
    pub fn channel_began(&self, handle: OperationHandle, gpu_time: u64) {
        let Some((slot, entry)) = self.find(handle) else { return };
        if entry.channels_begun.fetch_add(1, AcqRel) != 0 {
            return;
        }
        let now = monotonic_nanos();
        let function = function_of(slot, entry);
        entry.gpu_began.store(gpu_time, Relaxed);
        entry.begun_ns.store(now, Relaxed);
        function.begun.fetch_max(entry.function_number.load(Relaxed).saturating_add(1), Relaxed);
        slot.changed_ns.store(now, Release);
    }

    /// Records that a channel of the GPU ended an operation. The operation has ended with its last channel.
    #[inline]
    pub fn channel_ended(&self, handle: OperationHandle, gpu_time: u64) {
        let Some((slot, entry)) = self.find(handle) else { return };
        if entry.channels_ended.fetch_add(1, AcqRel) + 1 != u32::from(entry.channels.load(Relaxed)) {
            return;
        }
        let now = monotonic_nanos();
        let function = function_of(slot, entry);
        let took = gpu_time.saturating_sub(entry.gpu_began.load(Relaxed));
        if took > 0 && gpu_time > 0 {
            let bytes = crate::data_type::DataType::from_number(entry.data_type.load(Relaxed)).bytes();
            function.timed.fetch_add(1, Relaxed);
            function.timed_bytes.fetch_add(entry.count.load(Relaxed).saturating_mul(bytes), Relaxed);
            function.gpu_ns.fetch_add(took, Relaxed);
        }
        entry.ended_ns.store(now, Relaxed);
        function.ended.fetch_max(entry.function_number.load(Relaxed).saturating_add(1), Relaxed);
        slot.changed_ns.store(now, Release);
    }

    #[inline]
    fn find(&self, handle: OperationHandle) -> Option<(&CommunicatorSlot, &OperationEntry)> {
        let (index, is_point_to_point, ordinal) = handle.parts();
        const { assert!(COMMUNICATORS_MAX <= 256, "a handle has 8 bits for the slot") };
        let slot = self.layout().communicators.get(index)?;
        let entry = entry_of(slot, is_point_to_point, ordinal.checked_sub(1)?);
        entry.has_ordinal(ordinal).then_some((slot, entry))
    }
}

/// Returns the microseconds since the Unix epoch.
fn unix_micros() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Realtime);
    u64::try_from(now.tv_sec).unwrap_or(0) * 1_000_000 + now.tv_nsec.unsigned_abs() / 1000
}

/// Returns the entry in which the operation with this number is, was or will be.
#[inline]
pub(crate) fn entry_of(slot: &CommunicatorSlot, is_point_to_point: bool, number: u64) -> &OperationEntry {
    if is_point_to_point {
        &slot.point_to_point_ring[(number % POINT_TO_POINT_KEPT as u64) as usize]
    } else {
        &slot.collective_ring[(number % COLLECTIVES_KEPT as u64) as usize]
    }
}

#[inline]
fn function_of<'a>(slot: &'a CommunicatorSlot, entry: &OperationEntry) -> &'a FunctionSlot {
    let number = usize::from(entry.function.load(Relaxed));
    slot.functions.get(number).unwrap_or(&slot.functions[slot.functions.len() - 1])
}

/// Writes a name, and cuts it to fit.
fn write_name(to: &[AtomicU8; NAME_BYTES], name: &[u8]) {
    for (at, byte) in to.iter().enumerate() {
        byte.store(name.get(at).copied().unwrap_or(0), Relaxed);
    }
}
