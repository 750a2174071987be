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

/// Moves a part of the bytes of a copy.
fn move_bytes(to: &UsableBytes, from: &UsableBytes, mut offset: usize, end: usize) {
    while offset < end {
        let ((to, to_len), (from, from_len)) = (to.at(offset), from.at(offset));
        let len = to_len.min(from_len).min(end - offset);
        if len == 0 {
            return;
        }
        // SAFETY: both are mapped while `to` and `from` live, or are memory of a caller that waits for this copy, or that
        // promised to keep it registered. Other streams may access the same bytes, as on a device.
        unsafe { std::ptr::copy(from, to, len) };
        offset += len;
    }
}

/// Executes a copy on its stream.
fn execute(to: CopyEnd, from: CopyEnd, len: usize) -> Answer {
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
    if len > 0 {
        {
            let (to, from) = (to.usable_bytes(len)?, from.usable_bytes(len)?);
            move_bytes(&to, &from, 0, len / 2);
        }
        std::thread::sleep(pause / 2);
        // Looked up again: the memory may have gone in between.
        let (to, from) = (to.usable_bytes(len)?, from.usable_bytes(len)?);
        move_bytes(&to, &from, len / 2, len);
    }
    Counter::CopiedBytes.add(len as i64);
    Ok(())
}

fn enqueue(device: Device, stream: usize, to: CopyEnd, from: CopyEnd, len: usize) -> Answer {
    let stream = Stream::find(stream, device)?;
    stream.enqueue_work(move || execute(to, from, len));
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
        enqueue(device, stream, CopyEnd::device(to, len)?, CopyEnd::host(from as u64, len)?, len)
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
        enqueue(device, stream, CopyEnd::host(to as u64, len)?, CopyEnd::device(from, len)?, len)
    }))
}

/// Copies within a device, or from imported memory.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, len: usize, stream: usize) -> c_int {
    code_of(current_device().and_then(|device| {
        enqueue(device, stream, CopyEnd::device(to, len)?, CopyEnd::device(from, len)?, len)
    }))
}

/// Copies between any memories; the driver finds out which, since addresses are unified. An address of a device without
/// memory gives error 1. Two ranges of the host make the
/// caller wait.
///
/// More lenient: the caller of a copy between two page-locked ranges does not wait.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyAsync(to: u64, from: u64, len: usize, stream: usize) -> c_int {
    code_of(
        current_device()
            .and_then(|device| enqueue(device, stream, CopyEnd::of(to, len)?, CopyEnd::of(from, len)?, len)),
    )
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
