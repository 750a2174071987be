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

/// Page-locked memory of [`STEP`] bytes.
struct CopySlot(Option<PageLocked>);

impl CopySlot {
    fn take(gpu: &Gpu) -> Result<Self, GpuError> {
        let kept = lock(&KEPT).pop();
        kept.map_or_else(|| PageLocked::allocate(gpu, STEP), Ok).map(|memory| Self(Some(memory)))
    }

    fn base(&self) -> NonNull<u8> {
        self.0.as_ref().map_or(NonNull::dangling(), PageLocked::base)
    }
}

impl Drop for CopySlot {
    fn drop(&mut self) {
        let mut kept = lock(&KEPT);
        if kept.len() < KEPT_MAX {
            kept.extend(self.0.take());
        }
    }
}

/// Copies the bytes from `offset` on into `into`. The caller has reserved them, and they are within the memory.
pub fn read_device_bytes(memory: &DeviceMemory, offset: usize, into: &mut [u8]) -> Result<(), MemoryError> {
    let failed = |error| MemoryError::Gpu { gpu: memory.gpu().ordinal(), error };
    let slot = CopySlot::take(memory.gpu()).map_err(failed)?;
    for (number, part) in into.chunks_mut(STEP).enumerate() {
        let at = offset + number * STEP;
        copy_and_wait(CopyDirection::ToHost, memory, at, slot.base(), part.len()).map_err(failed)?;
        // SAFETY: the slot is as long, no copy uses it, and it is none of the caller's memory.
        unsafe { slot.base().copy_to_nonoverlapping(NonNull::from(&mut *part).cast(), part.len()) };
    }
    Ok(())
}

/// Copies `bytes` to the bytes from `offset` on. The caller has reserved them, and they are within the memory.
pub fn write_device_bytes(memory: &DeviceMemory, offset: usize, bytes: &[u8]) -> Result<(), MemoryError> {
    let failed = |error| MemoryError::Gpu { gpu: memory.gpu().ordinal(), error };
    let slot = CopySlot::take(memory.gpu()).map_err(failed)?;
    for (number, part) in bytes.chunks(STEP).enumerate() {
        // SAFETY: the slot is as long, no copy uses it, and it is none of the caller's memory.
        unsafe { slot.base().copy_from_nonoverlapping(NonNull::from(part).cast(), part.len()) };
        let at = offset + number * STEP;
        copy_and_wait(CopyDirection::ToDevice, memory, at, slot.base(), part.len()).map_err(failed)?;
    }
    Ok(())
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
