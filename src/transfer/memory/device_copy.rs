//! Copies between memory of a GPU and slices of the host, for tools, tests and small amounts.
//!
//! A copy blocks its caller, and goes through page-locked memory of its own, which is kept for the next one: to page-lock it
//! takes longer than to copy, and it is freed only when the device has no work. Begin at [`read_device_bytes`].
#![allow(unsafe_code, reason = "copies between a GPU and memory that it owns")]

use std::ptr::NonNull;
use std::sync::Mutex;
use std::sync::mpsc::channel;

use muster_gpu::{CopyDirection, DeviceMemory, Gpu, GpuCopy, GpuError, PageLocked, is_reporting_thread};

use crate::base::error::MemoryError;
use crate::base::sync::lock;

/// The bytes of one copy, and of a slot.
const STEP: usize = 1 << 20;
/// The most slots that are kept.
const KEPT_MAX: usize = 4;

/// Slots that no copy uses. Any GPU can use any slot.
static KEPT: Mutex<Vec<PageLocked>> = Mutex::new(Vec::new());

/// Calls `work` with page-locked memory of [`STEP`] bytes, which nothing else uses.
fn with_slot(gpu: &Gpu, work: impl FnOnce(NonNull<u8>) -> Result<(), GpuError>) -> Result<(), MemoryError> {
    let failed = |error| MemoryError::Gpu { gpu: gpu.ordinal(), error };
    let kept = lock(&KEPT).pop();
    let slot = kept.map_or_else(|| PageLocked::allocate(gpu, STEP), Ok).map_err(failed)?;
    let outcome = work(slot.base()).map_err(failed);
    let mut kept = lock(&KEPT);
    if kept.len() < KEPT_MAX {
        kept.push(slot);
    }
    outcome
}

/// Copies the bytes from `offset` on into `into`. The caller has reserved them, and they are within the memory.
pub fn read_device_bytes(memory: &DeviceMemory, offset: usize, into: &mut [u8]) -> Result<(), MemoryError> {
    with_slot(memory.gpu(), |slot| {
        for (number, part) in into.chunks_mut(STEP).enumerate() {
            copy_and_wait(CopyDirection::ToHost, memory, offset + number * STEP, slot, part.len())?;
            // SAFETY: the slot is as long, no copy uses it, and it is none of the caller's memory.
            unsafe { slot.copy_to_nonoverlapping(NonNull::from(&mut *part).cast(), part.len()) };
        }
        Ok(())
    })
}

/// Copies `bytes` to the bytes from `offset` on. The caller has reserved them, and they are within the memory.
pub fn write_device_bytes(memory: &DeviceMemory, offset: usize, bytes: &[u8]) -> Result<(), MemoryError> {
    with_slot(memory.gpu(), |slot| {
        for (number, part) in bytes.chunks(STEP).enumerate() {
            // SAFETY: the slot is as long, no copy uses it, and it is none of the caller's memory.
            unsafe { slot.copy_from_nonoverlapping(NonNull::from(part).cast(), part.len()) };
            copy_and_wait(CopyDirection::ToDevice, memory, offset + number * STEP, slot, part.len())?;
        }
        Ok(())
    })
}

/// Copies between page-locked memory and a GPU, and waits for the end.
fn copy_and_wait(
    direction: CopyDirection,
    memory: &DeviceMemory,
    offset: usize,
    host: NonNull<u8>,
    len: usize,
) -> Result<(), GpuError> {
    let failed = |why: &str| GpuError { call: "copy", code: 0, name: why.to_owned() };
    if is_reporting_thread() {
        return Err(failed(
            "the thread that reports copies cannot wait for one: read or write on another thread",
        ));
    }
    let (tell, told) = channel();
    let copy = GpuCopy::with_host(direction, host, memory.address() + offset as u64, len);
    // SAFETY: the caller keeps both memories until the end, which this function awaits.
    unsafe { memory.gpu().copy(direction, &[copy], move |outcome| drop(tell.send(outcome)))? };
    told.recv().map_err(|_| failed("its end was never reported"))?
}
