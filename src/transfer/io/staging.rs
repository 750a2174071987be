//! Staging: page-locked memory through which lanes, and copies within this task, move the bytes of GPUs.
//!
//! A lane cannot send from a GPU's memory, nor receive into it. So each chunk with bytes of a GPU passes through a
//! *slot*: the sender's GPU copies into the slot, the lane sends from it; the receiver's lane receives into a slot, and
//! the GPU copies from it. While the lane sends one chunk, the GPU copies the next ones. Begin at
//! [`StagingPool::take_or_wait`], [`copy_to_slot`] and [`copy_from_slot`].
//!
//! Invariants:
//!
//! 1. A slot has one user at a time: a copy of a GPU, a lane, or a fetching thread that copies within this task.
//! 2. A copy keeps its slot and the guard of the launch until its end is reported. So a launch is quiescent only when no
//!    GPU copies for it any more.
//! 3. Slots for sending, for receiving and for copies within this task come from different pools. So a lane that receives never
//!    waits for a lane that sends, and none waits for a local copy.
#![allow(unsafe_code, reason = "copies between slots, which one user has, and bytes that a guard keeps")]

use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use muster_gpu::{CopyDirection, Gpu, GpuCopy, GpuError, PageLocked};

use super::gpu_copies::{CopiesByGpu, CopyFailure};
use crate::base::sync::lock;
use crate::launch::launch_spans::BytesPiece;
use crate::launch::peer_launch::OwnedAccessGuard;
use crate::memory::{ReadView, WriteView};

/// The least length of a slot.
const SLOT_MIN: usize = 64 << 10;

/// Is called when a slot may be free.
pub type SlotWaiter = Box<dyn FnOnce() + Send>;

/// The pools of an engine.
pub struct StagingPools {
    /// The slots from which lanes send.
    pub sending: Arc<StagingPool>,
    /// The slots into which lanes receive.
    pub receiving: Arc<StagingPool>,
    /// The slots of copies within this task.
    pub local: Arc<StagingPool>,
}

impl StagingPools {
    /// Creates pools that have together at most so many bytes, unless one slot is longer than its part of them: three eighths of
    /// them for either direction of the lanes, and a quarter for copies within this task.
    pub fn new(bytes_max: usize) -> Self {
        let lanes = || StagingPool::new(bytes_max / 8 * 3);
        Self { sending: lanes(), receiving: lanes(), local: StagingPool::new(bytes_max / 4) }
    }
}

/// Slots, allocated when they are first needed, and kept.
pub struct StagingPool {
    bytes_max: usize,
    state: Mutex<PoolState>,
}

#[derive(Default)]
struct PoolState {
    free: Vec<PageLocked>,
    /// The bytes of all slots, free or taken.
    allocated: usize,
    waiters: Vec<SlotWaiter>,
}

/// Page-locked memory for one chunk, which returns to its pool when it is dropped.
pub struct StagingSlot {
    memory: Option<PageLocked>,
    pool: Arc<StagingPool>,
}

impl StagingPool {
    fn new(bytes_max: usize) -> Arc<Self> {
        Arc::new(Self { bytes_max, state: Mutex::default() })
    }

    /// Takes a slot of at least `len` bytes. If all are taken, it returns none, and `wake` is called once when a slot was given
    /// back, unless the taker waits already: `awaits` says whether it does.
    ///
    /// # Errors
    /// As [`take_or_wait`](Self::take_or_wait).
    pub fn take_with_one_waiter(
        self: &Arc<Self>,
        gpu: &Gpu,
        len: usize,
        awaits: &Arc<AtomicBool>,
        wake: impl FnOnce() + Send + 'static,
    ) -> Result<Option<StagingSlot>, GpuError> {
        let is_waiter = !awaits.swap(true, Ordering::SeqCst);
        let waiter = is_waiter.then(|| -> SlotWaiter {
            let awaits = Arc::clone(awaits);
            Box::new(move || {
                awaits.store(false, Ordering::SeqCst);
                wake();
            })
        });
        let taken = self.take_or_wait(gpu, len, waiter);
        if is_waiter && !matches!(taken, Ok(None)) {
            awaits.store(false, Ordering::SeqCst);
        }
        taken
    }

    /// Takes a slot of at least `len` bytes. If all are taken, it returns none, and `waiter` is called once when a slot was
    /// given back.
    ///
    /// # Errors
    /// Returns the error of the GPU if it refuses page-locked memory, and no slot is taken that could be given back.
    pub fn take_or_wait(
        self: &Arc<Self>,
        gpu: &Gpu,
        len: usize,
        waiter: Option<SlotWaiter>,
    ) -> Result<Option<StagingSlot>, GpuError> {
        let len = len.next_power_of_two().max(SLOT_MIN);
        loop {
            let mut dropped = Vec::new();
            let mut state = lock(&self.state);
            if let Some(memory) = state.take_free(len) {
                return Ok(Some(self.slot(memory)));
            }
            if !state.reserve(len, self.bytes_max, &mut dropped) {
                state.waiters.extend(waiter);
                return Ok(None);
            }
            // The driver is called without the lock, which the thread that reports copies takes.
            drop(state);
            drop(dropped);
            let refused = match PageLocked::allocate(gpu, len) {
                Ok(memory) => return Ok(Some(self.slot(memory))),
                Err(error) => error,
            };
            let mut state = lock(&self.state);
            let too_short = state.give_up_reservation(len);
            if too_short.is_empty() {
                if state.allocated == 0 {
                    // Others may wait for the very bytes that could not be allocated.
                    call_waiters(state);
                    return Err(refused);
                }
                state.waiters.extend(waiter);
                return Ok(None);
            }
            // Once more without the free slots, which may be what leaves no memory.
            drop(state);
            drop(too_short);
        }
    }

    fn slot(self: &Arc<Self>, memory: PageLocked) -> StagingSlot {
        StagingSlot { memory: Some(memory), pool: Arc::clone(self) }
    }
}

impl PoolState {
    /// Takes the shortest free slot that is long enough.
    fn take_free(&mut self, len: usize) -> Option<PageLocked> {
        let fitting = self.free.iter().enumerate().filter(|(_, memory)| memory.len() >= len);
        let (found, _) = fitting.min_by_key(|(_, memory)| memory.len())?;
        Some(self.free.swap_remove(found))
    }

    /// Reserves the bytes of a new slot, in place of free ones that are too short if need be. Returns whether the bound leaves
    /// room for it.
    fn reserve(&mut self, len: usize, bytes_max: usize, dropped: &mut Vec<PageLocked>) -> bool {
        let free: usize = self.free.iter().map(PageLocked::len).sum();
        let taken = self.allocated - free;
        if taken > 0 && taken + len > bytes_max {
            return false;
        }
        while self.allocated + len > bytes_max
            && let Some(shorter) = self.free.pop()
        {
            self.allocated -= shorter.len();
            dropped.push(shorter);
        }
        self.allocated += len;
        true
    }

    /// Gives up the bytes of a slot that could not be allocated, and all free slots.
    fn give_up_reservation(&mut self, len: usize) -> Vec<PageLocked> {
        let dropped = std::mem::take(&mut self.free);
        self.allocated -= len + dropped.iter().map(PageLocked::len).sum::<usize>();
        dropped
    }
}

impl StagingSlot {
    fn base(&self) -> NonNull<u8> {
        self.memory.as_ref().map_or(NonNull::dangling(), PageLocked::base)
    }

    fn clamp(&self, start: usize, len: usize) -> (usize, usize) {
        let all = self.memory.as_ref().map_or(0, PageLocked::len);
        let start = start.min(all);
        (start, len.min(all - start))
    }

    /// Returns a view of the bytes from `start` on, `len` at most. No copy may be writing the slot.
    pub fn read_view(&self, start: usize, len: usize) -> ReadView<'_> {
        let (start, len) = self.clamp(start, len);
        // SAFETY: the range is within the slot, which has one user.
        ReadView::of_slice(unsafe { std::slice::from_raw_parts(self.base().as_ptr().add(start), len) })
    }

    /// Returns a view to write the bytes from `start` on, `len` at most.
    pub fn write_view(&mut self, start: usize, len: usize) -> WriteView<'_> {
        let (start, len) = self.clamp(start, len);
        // SAFETY: as above, and the slot is borrowed exclusively.
        WriteView::of_slice(unsafe { std::slice::from_raw_parts_mut(self.base().as_ptr().add(start), len) })
    }
}

impl Drop for StagingSlot {
    fn drop(&mut self) {
        let mut state = lock(&self.pool.state);
        state.free.extend(self.memory.take());
        call_waiters(state);
    }
}

/// Calls all waiters, without the lock. Each looks again: the first may be over, and would take no slot.
fn call_waiters(mut state: MutexGuard<'_, PoolState>) {
    let waiters = std::mem::take(&mut state.waiters);
    drop(state);
    waiters.into_iter().for_each(|waiter| waiter());
}

/// The slot and the guard of the launch's bytes, which a copy of a chunk keeps.
pub type StagedBytes = (StagingSlot, OwnedAccessGuard);

/// Copies the bytes `start..start + len` of the outbound stream into the slot, then calls `then`: on this thread, or on that
/// of a GPU.
pub fn copy_to_slot(
    staged: StagedBytes,
    (start, len): (u64, usize),
    then: impl FnOnce(StagedBytes, Result<(), CopyFailure>) + Send + 'static,
) {
    let (mut slot, guard) = staged;
    let mut copies = CopiesByGpu::new(CopyDirection::ToHost);
    let mut at = 0;
    guard.bytes().for_each_outbound_piece(start, len as u64, |piece| {
        at += match piece {
            BytesPiece::Host(view) => {
                slot.write_view(at, view.len()).copy_from(&view);
                view.len()
            }
            BytesPiece::Device(memory, device, len) => {
                add_copy(&mut copies, memory.gpu(), &slot, at, device, len)
            }
        };
    });
    // SAFETY: the guard reserves the bytes for reading, and the slot is this chunk's.
    unsafe { copies.start((slot, guard), then) };
}

/// Copies the bytes of the slot to `start..start + len` of the inbound stream, then calls `then`: on this thread, or on that of
/// a GPU. The caller has this range to itself: the link gave it to a lane, or a copy within this task took it.
pub fn copy_from_slot(
    staged: StagedBytes,
    (start, len): (u64, usize),
    then: impl FnOnce(StagedBytes, Result<(), CopyFailure>) + Send + 'static,
) {
    let (slot, guard) = staged;
    let mut copies = CopiesByGpu::new(CopyDirection::ToDevice);
    let mut at = 0;
    guard.bytes().for_each_inbound_piece(start, len as u64, |piece| {
        at += match piece {
            BytesPiece::Host(mut view) => {
                view.copy_from(&slot.read_view(at, view.len()));
                view.len()
            }
            BytesPiece::Device(memory, device, len) => {
                add_copy(&mut copies, memory.gpu(), &slot, at, device, len)
            }
        };
    });
    // SAFETY: the guard reserves the bytes for writing, the caller has them for itself, and the slot is this chunk's.
    unsafe { copies.start((slot, guard), then) };
}

/// Adds a copy between the bytes of a slot from `at` on and those of a GPU from `device` on. Returns its length.
fn add_copy(
    copies: &mut CopiesByGpu,
    gpu: &Gpu,
    slot: &StagingSlot,
    at: usize,
    device: u64,
    len: usize,
) -> usize {
    let (from, len) = slot.clamp(at, len);
    // SAFETY: the range is within the slot.
    let host = unsafe { slot.base().add(from) };
    copies.add(gpu, GpuCopy::with_host(copies.direction(), host, device, len));
    len
}
