//! Page-locked host memory: allocations, registrations, and what an address is.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_uint, c_void};
use std::ptr::null_mut;
use std::sync::{Arc, Mutex};

use crate::context::current_device;
use crate::counters::{Counter, CounterGuard};
use crate::device_memory::{self, PAGE, SegmentKind};
use crate::error::{
    Answer, HOST_MEMORY_ALREADY_REGISTERED, HOST_MEMORY_NOT_REGISTERED, INVALID_VALUE, OUT_OF_MEMORY,
    code_of, write_out,
};
use crate::settings::Setting;
use crate::wait::lock;

/// Pages that `cuMemHostAlloc` made.
#[derive(Debug)]
struct HostPages {
    address: u64,
    len: usize,
}

impl Drop for HostPages {
    fn drop(&mut self) {
        // SAFETY: the pages were mapped by `cuMemHostAlloc`; copies hold them as long as they run.
        unsafe { libc::munmap(self.address as *mut _, self.len) };
    }
}

/// A range of page-locked memory.
#[derive(Debug)]
struct PinnedRange {
    len: usize,
    /// The pages, unless they are the program's own, which it registered.
    pages: Option<Arc<HostPages>>,
    _guard: CounterGuard,
}

/// The ranges by their first address. They do not overlap.
static PINNED: Mutex<BTreeMap<u64, PinnedRange>> = Mutex::new(BTreeMap::new());

/// A range of host memory, as the driver knows it.
#[derive(Debug)]
pub enum HostRange {
    /// It lies in one page-locked range. The guard keeps pages of the driver mapped.
    Pinned(PinnedGuard),
    /// No byte of it is page-locked.
    Pageable,
    /// A part of it is page-locked, or several ranges hold it.
    Straddling,
}

/// Keeps page-locked memory of the driver mapped.
#[derive(Debug)]
pub struct PinnedGuard {
    _pages: Option<Arc<HostPages>>,
}

/// Returns what a range of host memory is.
pub fn classify(at: u64, len: usize) -> HostRange {
    let end = at.saturating_add(len.max(1) as u64);
    let pinned = lock(&PINNED);
    match pinned.range(..end).next_back().filter(|(base, range)| **base + range.len as u64 > at) {
        None => HostRange::Pageable,
        Some((base, range)) if *base <= at && end <= *base + range.len as u64 => {
            HostRange::Pinned(PinnedGuard { _pages: range.pages.clone() })
        }
        Some(_) => HostRange::Straddling,
    }
}

/// Returns whether a range lies in one page-locked range.
pub fn is_pinned(at: u64, len: usize) -> bool {
    matches!(classify(at, len), HostRange::Pinned(_))
}

/// Returns the first address and the length of the page-locked range that contains an address.
fn pinned_range(at: u64) -> Option<(u64, usize)> {
    let pinned = lock(&PINNED);
    let (base, range) = pinned.range(..=at).next_back()?;
    (at < *base + range.len as u64).then_some((*base, range.len))
}

/// Allocates page-locked memory, which both host and device access at the same address. Flags: portable 1, mapped 2,
/// write-combined 4. No bytes are no error, and the address is null. Error 2 is not sticky.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemHostAlloc(to: *mut *mut c_void, len: usize, flags: c_uint) -> c_int {
    code_of(current_device().and_then(|_| {
        if flags & !7 != 0 || to.is_null() {
            return Err(INVALID_VALUE);
        }
        if len == 0 {
            // SAFETY: the caller passes a place for an address.
            return unsafe { write_out(to, null_mut()) };
        }
        if Setting::HostAllocFails.count_use_and_strikes_now() {
            return Err(OUT_OF_MEMORY);
        }
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let whole = len.checked_next_multiple_of(PAGE).ok_or(OUT_OF_MEMORY)?;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let at =
            unsafe { libc::mmap(null_mut(), whole, access, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0) };
        if at == libc::MAP_FAILED {
            return Err(OUT_OF_MEMORY);
        }
        let pages = Some(Arc::new(HostPages { address: at as u64, len: whole }));
        let range = PinnedRange { len, pages, _guard: Counter::PinnedRanges.count_while_guard_lives() };
        lock(&PINNED).insert(at as u64, range);
        // SAFETY: the caller passes a place for an address.
        unsafe { write_out(to, at) }
    }))
}

/// Forgets memory of `cuMemHostAlloc`.
pub fn remove_allocation(at: u64) -> Answer {
    let mut pinned = lock(&PINNED);
    let is_allocated = pinned.get(&at).is_some_and(|range| range.pages.is_some());
    is_allocated.then(|| pinned.remove(&at)).flatten().map(drop).ok_or(INVALID_VALUE)
}

/// Forgets a registration.
pub fn remove_registration(at: u64) -> Answer {
    if pinned_range(at).is_none() {
        return Err(HOST_MEMORY_NOT_REGISTERED);
    }
    let mut pinned = lock(&PINNED);
    let is_registered = pinned.get(&at).is_some_and(|range| range.pages.is_none());
    is_registered.then(|| pinned.remove(&at)).flatten().map(drop).ok_or(INVALID_VALUE)
}

/// Returns whether all pages of a range are mapped.
fn is_mapped(at: u64, len: usize) -> bool {
    let start = at - at % PAGE as u64;
    let whole = ((at - start) as usize).saturating_add(len);
    // SAFETY: the call only asks; unmapped pages make it fail.
    unsafe { libc::msync(start as *mut _, whole, libc::MS_ASYNC) == 0 }
}

/// Page-locks memory of the program. Flags: portable 1, mapped 2, I/O memory 4, read-only 8. A range that overlaps a
/// page-locked one gives error 712, and a range that is not mapped error 1.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemHostRegister_v2(at: *mut c_void, len: usize, flags: c_uint) -> c_int {
    code_of(current_device().and_then(|_| {
        let at = at as u64;
        if at == 0
            || len == 0
            || flags & !15 != 0
            || !is_mapped(at, len)
            || device_memory::is_device_address(at)
        {
            return Err(INVALID_VALUE);
        }
        if !matches!(classify(at, len), HostRange::Pageable) {
            return Err(HOST_MEMORY_ALREADY_REGISTERED);
        }
        if Setting::HostRegisterFails.count_use_and_strikes_now() {
            return Err(OUT_OF_MEMORY);
        }
        lock(&PINNED).insert(
            at,
            PinnedRange { len, pages: None, _guard: Counter::PinnedRanges.count_while_guard_lives() },
        );
        Ok(())
    }))
}

/// Returns the device's address of page-locked memory: here the same. A real driver (580.159) gives registered memory another
/// one, although the device can use the host's address as well. Memory that is not page-locked gives error 1.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemHostGetDevicePointer_v2(to: *mut u64, at: *mut c_void, flags: c_uint) -> c_int {
    code_of(current_device().and_then(|_| {
        if flags != 0 || !is_pinned(at as u64, 1) {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the caller passes a place for an address.
        unsafe { write_out(to, at as u64) }
    }))
}

/// Attributes of pointers, as `CUpointer_attribute` numbers them.
mod attribute {
    use std::ffi::c_uint;

    pub const MEMORY_TYPE: c_uint = 2;
    pub const DEVICE_POINTER: c_uint = 3;
    pub const HOST_POINTER: c_uint = 4;
    pub const BUFFER_ID: c_uint = 7;
    pub const IS_MANAGED: c_uint = 8;
    pub const DEVICE_ORDINAL: c_uint = 9;
    pub const IS_LEGACY_IPC_CAPABLE: c_uint = 10;
    pub const RANGE_START: c_uint = 11;
    pub const RANGE_SIZE: c_uint = 12;
    pub const MAPPED: c_uint = 13;
}

/// Returns an attribute of device memory or of page-locked memory. Memory that the driver does not know gives error 1.
///
/// The buffer id tells two allocations apart that had the same address at different times. Memory of `cuMemAlloc` is
/// capable of IPC handles; mapped memory and imported memory are not.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuPointerGetAttribute(to: *mut c_void, wanted: c_uint, at: u64) -> c_int {
    /// `CU_MEMORYTYPE_HOST` and `CU_MEMORYTYPE_DEVICE`.
    const TYPES: [u32; 2] = [1, 2];
    // SAFETY: the caller passes a place of the attribute's type, for each of these functions.
    let put_u32 = |value: u32| unsafe { write_out(to.cast(), value) };
    // SAFETY: the same.
    let put_u64 = |value: u64| unsafe { write_out(to.cast(), value) };
    // SAFETY: the same.
    let put_bool = |value: bool| unsafe { write_out(to.cast(), u8::from(value)) };
    let of_device = |segment: &mut device_memory::MappedSegment| match wanted {
        attribute::MEMORY_TYPE => put_u32(TYPES[1]),
        attribute::DEVICE_POINTER => put_u64(at),
        attribute::BUFFER_ID => put_u64(segment.id),
        attribute::IS_MANAGED => put_bool(false),
        attribute::DEVICE_ORDINAL => put_u32(segment.device.ordinal() as u32),
        attribute::IS_LEGACY_IPC_CAPABLE => put_bool(matches!(segment.kind, SegmentKind::Allocated { .. })),
        attribute::RANGE_START => put_u64(segment.base),
        attribute::RANGE_SIZE => put_u64(segment.len as u64),
        attribute::MAPPED => put_bool(true),
        _ => Err(INVALID_VALUE),
    };
    code_of(current_device().and_then(|_| {
        if let Some(answer) = device_memory::with_segment(at, of_device) {
            return answer;
        }
        let (base, len) = pinned_range(at).ok_or(INVALID_VALUE)?;
        match wanted {
            attribute::MEMORY_TYPE => put_u32(TYPES[0]),
            attribute::DEVICE_POINTER | attribute::HOST_POINTER => put_u64(at),
            attribute::IS_MANAGED => put_bool(false),
            attribute::RANGE_START => put_u64(base),
            attribute::RANGE_SIZE => put_u64(len as u64),
            attribute::MAPPED => put_bool(true),
            _ => Err(INVALID_VALUE),
        }
    }))
}
