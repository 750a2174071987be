//! Copies and fills.
//!
//! Addresses are checked at the call, as the driver looks pointers up, and again when the stream comes to the operation.

use std::ffi::{c_int, c_uchar, c_void};
use std::time::Duration;

use crate::context::current_device;
use crate::counters::Counter;
use crate::device::Device;
use crate::device_memory::{self, UsablePiece};
use crate::error::{
    Answer, ECC_UNCORRECTABLE, ILLEGAL_ADDRESS, INVALID_VALUE, check_sticky, code_of, is_lost,
};
use crate::host_memory::{HostRange, PinnedGuard, classify};
use crate::settings::Setting;
use crate::stream::Stream;
use crate::wait::wait_until;

/// One end of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CopyEnd {
    Device(u64),
    /// Memory of the host, and whether it is page-locked.
    Host(u64, bool),
}

/// Bytes that a stream may use while this lives.
struct UsableBytes {
    pieces: Vec<UsablePiece>,
    _guard: Option<PinnedGuard>,
}

impl CopyEnd {
    fn device(at: u64, len: usize) -> Answer<Self> {
        let is_usable = len == 0 || device_memory::find_usable_pieces(at, len).is_some();
        is_usable.then_some(Self::Device(at)).ok_or(INVALID_VALUE)
    }

    fn host(at: u64, len: usize) -> Answer<Self> {
        if device_memory::is_device_address(at) {
            return Err(INVALID_VALUE);
        }
        match classify(at, len) {
            HostRange::Pinned(_) => Ok(Self::Host(at, true)),
            HostRange::Pageable if at != 0 || len == 0 => Ok(Self::Host(at, false)),
            HostRange::Pageable | HostRange::Straddling => Err(INVALID_VALUE),
        }
    }

    /// Returns which memory an address belongs to, with unified addresses.
    fn of(at: u64, len: usize) -> Answer<Self> {
        if device_memory::is_device_address(at) { Self::device(at, len) } else { Self::host(at, len) }
    }

    fn is_pageable(self) -> bool {
        matches!(self, Self::Host(_, false))
    }

    /// Returns the bytes, if they may still be used.
    fn usable_bytes(self, len: usize) -> Answer<UsableBytes> {
        let host = |address, guard| UsableBytes {
            pieces: vec![UsablePiece { address, len, _mapping: None }],
            _guard: guard,
        };
        match self {
            Self::Device(at) => {
                let pieces = device_memory::find_usable_pieces(at, len).ok_or(ILLEGAL_ADDRESS)?;
                Ok(UsableBytes { pieces, _guard: None })
            }
            Self::Host(at, false) => Ok(host(at, None)),
            Self::Host(at, true) => match classify(at, len) {
                HostRange::Pinned(guard) => Ok(host(at, Some(guard))),
                _ => Err(ILLEGAL_ADDRESS),
            },
        }
    }
}

impl UsableBytes {
    /// Returns where the bytes from an offset on are, and how many are contiguous there.
    fn at(&self, mut offset: usize) -> (*mut u8, usize) {
        for piece in &self.pieces {
            if offset < piece.len {
                return ((piece.address + offset as u64) as *mut u8, piece.len - offset);
            }
            offset -= piece.len;
        }
        (std::ptr::null_mut(), 0)
    }
}

/// The bytes of a copy: rows, and the distances from one row to the next on both sides.
#[derive(Debug, Clone, Copy)]
struct Rows {
    len: usize,
    count: usize,
    to_pitch: usize,
    from_pitch: usize,
}

impl Rows {
    const fn one(len: usize) -> Self {
        Self { len, count: 1, to_pitch: len, from_pitch: len }
    }

    /// Returns the bytes from the first one of the first row to the last one of the last row, on both sides: `to`, then `from`.
    fn extents(self) -> Answer<[usize; 2]> {
        let extent = |pitch: usize| {
            let last = self.count.saturating_sub(1).checked_mul(pitch);
            last.and_then(|last| last.checked_add(self.len)).ok_or(INVALID_VALUE)
        };
        Ok([extent(self.to_pitch)?, extent(self.from_pitch)?])
    }

    const fn is_empty(self) -> bool {
        self.len == 0 || self.count == 0
    }

    /// Moves the first or the second half of the bytes.
    fn move_half(self, to: &UsableBytes, from: &UsableBytes, second: bool) {
        if self.count == 1 {
            let (start, end) = if second { (self.len / 2, self.len) } else { (0, self.len / 2) };
            return move_bytes((to, start), (from, start), end - start);
        }
        let rows = if second { self.count / 2..self.count } else { 0..self.count / 2 };
        rows.for_each(|row| move_bytes((to, row * self.to_pitch), (from, row * self.from_pitch), self.len));
    }
}

/// Moves bytes from an offset to an offset.
fn move_bytes(
    (to, to_offset): (&UsableBytes, usize),
    (from, from_offset): (&UsableBytes, usize),
    len: usize,
) {
    let mut moved = 0;
    while moved < len {
        let ((to, to_len), (from, from_len)) = (to.at(to_offset + moved), from.at(from_offset + moved));
        let piece = to_len.min(from_len).min(len - moved);
        if piece == 0 {
            return;
        }
        // SAFETY: both are mapped while `to` and `from` live, or are memory of a caller that waits for this copy, or that
        // promised to keep it registered. Other streams may access the same bytes, as on a device.
        unsafe { std::ptr::copy(from, to, piece) };
        moved += piece;
    }
}

/// Executes a copy on its stream.
fn execute(to: CopyEnd, from: CopyEnd, rows: Rows) -> Answer {
    if Setting::HoldCopies.is_on() {
        let _guard = Counter::HeldCopies.count_while_guard_lives();
        wait_until(|| !Setting::HoldCopies.is_on() || is_lost());
        check_sticky()?;
    }
    let pause = Duration::from_micros(Setting::CopyUs.amount());
    std::thread::sleep(pause / 2);
    Counter::Copies.add(1);
    if Setting::EccAfter.count_use_and_strikes_now() {
        return Err(ECC_UNCORRECTABLE);
    }
    let [to_extent, from_extent] = rows.extents()?;
    if !rows.is_empty() {
        {
            let (to, from) = (to.usable_bytes(to_extent)?, from.usable_bytes(from_extent)?);
            rows.move_half(&to, &from, false);
        }
        std::thread::sleep(pause / 2);
        // Looked up again: the memory may have gone in between.
        let (to, from) = (to.usable_bytes(to_extent)?, from.usable_bytes(from_extent)?);
        rows.move_half(&to, &from, true);
        Counter::CopiedBytes.add((rows.len * rows.count) as i64);
    }
    Ok(())
}

fn enqueue(device: Device, stream: usize, to: CopyEnd, from: CopyEnd, rows: Rows) -> Answer {
    let stream = Stream::find(stream, device)?;
    stream.enqueue_work(move || execute(to, from, rows));
    if to.is_pageable() || from.is_pageable() {
        Counter::PageableCopies.add(1);
        stream.synchronize();
        return check_sticky();
    }
    Ok(())
}

/// Copies from the host to a device. Page-locked memory must not change before the stream has come past the copy. Memory
/// that is not page-locked makes the caller wait until the driver has read it.
///
/// Stricter: the caller waits for the whole copy, and for all earlier work of the stream. A range of which only a part is
/// page-locked gives error 1 (*unconfirmed*).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyHtoDAsync_v2(
    to: u64,
    from: *const c_void,
    len: usize,
    stream: usize,
) -> c_int {
    code_of(current_device().and_then(|device| {
        enqueue(device, stream, CopyEnd::device(to, len)?, CopyEnd::host(from as u64, len)?, Rows::one(len))
    }))
}

/// Copies from a device to the host. Memory that is not page-locked makes the caller wait for the whole copy. The limits are
/// those of `cuMemcpyHtoDAsync`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoHAsync_v2(
    to: *mut c_void,
    from: u64,
    len: usize,
    stream: usize,
) -> c_int {
    code_of(current_device().and_then(|device| {
        enqueue(device, stream, CopyEnd::host(to as u64, len)?, CopyEnd::device(from, len)?, Rows::one(len))
    }))
}

/// Copies within a device, or from imported memory.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, len: usize, stream: usize) -> c_int {
    code_of(current_device().and_then(|device| {
        enqueue(device, stream, CopyEnd::device(to, len)?, CopyEnd::device(from, len)?, Rows::one(len))
    }))
}

/// One side of a copy of rows, as a program passes it.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct RowsEnd {
    x_in_bytes: usize,
    y: usize,
    memory_type: u32,
    host: u64,
    device: u64,
    array: u64,
    pitch: usize,
}

/// `CUDA_MEMCPY2D`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct CopyOfRows {
    from: RowsEnd,
    to: RowsEnd,
    width: usize,
    height: usize,
}

/// `CU_DEVICE_ATTRIBUTE_MAX_PITCH` of all devices.
const MAX_PITCH: usize = i32::MAX as usize;

impl RowsEnd {
    /// Returns the end, of which the copy uses `extent` bytes.
    fn end(self, extent: usize) -> Answer<CopyEnd> {
        let offset = self.y.wrapping_mul(self.pitch).wrapping_add(self.x_in_bytes);
        let first = |base: u64| base.wrapping_add(offset as u64);
        match self.memory_type {
            1 => CopyEnd::host(first(self.host), extent),
            2 => CopyEnd::device(first(self.device), extent),
            4 => CopyEnd::of(first(self.device), extent),
            _ => Err(INVALID_VALUE),
        }
    }
}

/// Copies rows of bytes. A pitch that is smaller than a row, or above the greatest one, gives error 1, also if there is one row.
///
/// Stricter: arrays are refused (error 1). More lenient: a device may refuse a pitch between its own memories that it would not have
/// chosen itself.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpy2DAsync_v2(copy: *const CopyOfRows, stream: usize) -> c_int {
    code_of(current_device().and_then(|device| {
        // SAFETY: the caller passes a copy.
        let CopyOfRows { from, to, width, height } = *unsafe { copy.as_ref() }.ok_or(INVALID_VALUE)?;
        let rows = Rows { len: width, count: height, to_pitch: to.pitch, from_pitch: from.pitch };
        if [to.pitch, from.pitch].into_iter().any(|pitch| pitch < width || pitch > MAX_PITCH) {
            return Err(INVALID_VALUE);
        }
        let [to_extent, from_extent] = if rows.is_empty() { [0, 0] } else { rows.extents()? };
        enqueue(device, stream, to.end(to_extent)?, from.end(from_extent)?, rows)
    }))
}

/// Copies between any memories; the driver finds out which, since addresses are unified. An address of a device without
/// memory gives error 1. Two ranges of the host make the
/// caller wait.
///
/// More lenient: the caller of a copy between two page-locked ranges does not wait.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyAsync(to: u64, from: u64, len: usize, stream: usize) -> c_int {
    code_of(current_device().and_then(|device| {
        enqueue(device, stream, CopyEnd::of(to, len)?, CopyEnd::of(from, len)?, Rows::one(len))
    }))
}

/// Fills device memory with a byte.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD8Async(to: u64, byte: c_uchar, len: usize, stream: usize) -> c_int {
    code_of(current_device().and_then(|device| {
        let (end, stream) = (CopyEnd::device(to, len)?, Stream::find(stream, device)?);
        stream.enqueue_work(move || {
            if len > 0 {
                for piece in &end.usable_bytes(len)?.pieces {
                    // SAFETY: the piece is mapped while it is held.
                    unsafe { std::ptr::write_bytes(piece.address as *mut u8, byte, piece.len) };
                }
            }
            Ok(())
        });
        Ok(())
    }))
}
