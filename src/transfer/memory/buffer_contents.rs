//! Reads and writes the contents of buffers in any memory, that of GPUs too.
//!
//! For memory of a GPU, it blocks, and copies through page-locked memory of its own: it is for tools, tests and small amounts.
//! Begin at [`Buffer::read_contents`].
#![allow(unsafe_code, reason = "copies between a GPU and memory that it owns")]

use std::ptr::NonNull;
use std::sync::mpsc::channel;

use muster_gpu::{Copy, CopyDirection, DeviceMemory, GpuError, PageLocked};

use super::buffer::{AccessKind, Buffer, Span};
use crate::base::error::MemoryError;

/// The bytes of one copy.
const STEP: usize = 1 << 20;

impl Buffer {
    /// Copies the bytes from `start` on into `into`, from whatever memory the buffer is.
    ///
    /// # Errors
    /// Returns [`MemoryError::OutOfRange`] if the buffer has fewer bytes, [`MemoryError::Busy`] while a transfer writes
    /// some of them, and [`MemoryError::Gpu`] if the GPU fails.
    pub fn read_contents(&self, start: usize, into: &mut [u8]) -> Result<(), MemoryError> {
        let span = self.range_of(start, into.len())?;
        let Some(memory) = span.device_memory() else {
            return self.with_bytes(|bytes| into.copy_from_slice(&bytes[start..start + into.len()]));
        };
        let _reserved = span.reserve(AccessKind::Read)?;
        let failed = |error| MemoryError::Gpu { gpu: memory.gpu().ordinal(), error };
        let slot = PageLocked::allocate(memory.gpu(), STEP.min(into.len())).map_err(failed)?;
        for (number, part) in into.chunks_mut(STEP).enumerate() {
            let offset = span.region_offset() + number * STEP;
            copy_and_wait(CopyDirection::ToHost, memory, offset, slot.base(), part.len()).map_err(failed)?;
            // SAFETY: the slot is as long, no copy uses it, and it is none of the caller's memory.
            unsafe { slot.base().copy_to_nonoverlapping(NonNull::from(&mut *part).cast(), part.len()) };
        }
        Ok(())
    }

    /// Copies `bytes` to the bytes from `start` on, in whatever memory the buffer is.
    ///
    /// # Errors
    /// As [`read_contents`](Self::read_contents), and as [`with_bytes_mut`](Self::with_bytes_mut) for bytes that may not be
    /// written.
    pub fn write_contents(&self, start: usize, bytes: &[u8]) -> Result<(), MemoryError> {
        let span = self.range_of(start, bytes.len())?;
        let Some(memory) = span.device_memory() else {
            return self.with_bytes_mut(|into| into[start..start + bytes.len()].copy_from_slice(bytes));
        };
        let _reserved = span.reserve(AccessKind::Write)?;
        let failed = |error| MemoryError::Gpu { gpu: memory.gpu().ordinal(), error };
        let slot = PageLocked::allocate(memory.gpu(), STEP.min(bytes.len())).map_err(failed)?;
        for (number, part) in bytes.chunks(STEP).enumerate() {
            // SAFETY: the slot is as long, no copy uses it, and it is none of the caller's memory.
            unsafe { slot.base().copy_from_nonoverlapping(NonNull::from(part).cast(), part.len()) };
            let offset = span.region_offset() + number * STEP;
            copy_and_wait(CopyDirection::ToDevice, memory, offset, slot.base(), part.len())
                .map_err(failed)?;
        }
        Ok(())
    }

    /// Sets every byte to `byte`.
    ///
    /// # Errors
    /// As [`write_contents`](Self::write_contents).
    pub fn fill(&self, byte: u8) -> Result<(), MemoryError> {
        match self.gpu() {
            Some(_) => self.write_contents(0, &vec![byte; self.len()]),
            None => self.with_bytes_mut(|bytes| bytes.fill(byte)),
        }
    }

    fn range_of(&self, start: usize, len: usize) -> Result<Span, MemoryError> {
        self.range(start..start.saturating_add(len))
    }
}

/// Copies between page-locked memory and a GPU, and waits for the end. The caller has reserved the bytes.
fn copy_and_wait(
    direction: CopyDirection,
    memory: &DeviceMemory,
    offset: usize,
    host: NonNull<u8>,
    len: usize,
) -> Result<(), GpuError> {
    let (tell, told) = channel();
    let copy = Copy { host, device: memory.address() + offset as u64, len };
    // SAFETY: the caller keeps both memories until the end, which this function awaits.
    unsafe { memory.gpu().copy(direction, &[copy], move |outcome| drop(tell.send(outcome)))? };
    told.recv().unwrap_or(Ok(()))
}
