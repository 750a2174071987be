//! Virtual memory management: physical allocations, reserved addresses, and mappings of the first into the second.
//!
//! A physical allocation lives until its handle is released and nothing maps it, in any process. Its descriptor is a
//! duplicate of the file in memory.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_uint, c_ulonglong, c_void};
use std::os::fd::{BorrowedFd, IntoRawFd};
use std::sync::{Arc, Mutex};

use crate::context::{check_ready, current_device};
use crate::counters::{Counter, CounterGuard};
use crate::device::Device;
use crate::device_memory::{self, Backing, SegmentKind, add_segment, find_segment};
use crate::error::{
    Answer, INVALID_VALUE, NOT_SUPPORTED, OUT_OF_MEMORY, PEER_ACCESS_UNSUPPORTED, UNKNOWN, code_of, write_out,
};
use crate::handles::new_handle;
use crate::settings::Setting;
use crate::wait::lock;

/// Sizes and addresses are multiples of this.
const GRANULARITY: usize = 2 << 20;
/// `CU_MEM_ALLOCATION_TYPE_PINNED`, `CU_MEM_LOCATION_TYPE_DEVICE`, `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
const TYPE_PINNED: c_uint = 1;
const LOCATION_DEVICE: c_uint = 1;
const POSIX_DESCRIPTOR: c_uint = 1;

/// `CUmemLocation`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct MemLocation {
    kind: c_uint,
    id: c_int,
}

/// The begin of `CUmemAllocationProp`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct AllocationProp {
    kind: c_uint,
    handle_types: c_uint,
    location: MemLocation,
}

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct AccessDesc {
    location: MemLocation,
    flags: c_uint,
}

/// A physical allocation that this process has a handle of.
struct PhysicalAllocation {
    device: Device,
    backing: Arc<Backing>,
    /// Whether it was created for export.
    is_exportable: bool,
    /// Counts the allocation, also while only a mapping is left of it.
    guard: Arc<CounterGuard>,
}

static PHYSICAL: Mutex<BTreeMap<u64, PhysicalAllocation>> = Mutex::new(BTreeMap::new());
/// Reserved ranges: first address and length.
static RESERVED: Mutex<BTreeMap<u64, usize>> = Mutex::new(BTreeMap::new());

/// Reads and checks the properties of an allocation.
unsafe fn read_prop(prop: *const AllocationProp) -> Answer<(Device, AllocationProp)> {
    if prop.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the caller passes the struct, of which this is the begin.
    let prop = unsafe { prop.read_unaligned() };
    if prop.kind != TYPE_PINNED
        || prop.location.kind != LOCATION_DEVICE
        || prop.handle_types & !POSIX_DESCRIPTOR != 0
    {
        return Err(INVALID_VALUE);
    }
    Ok((Device::find(prop.location.id)?, prop))
}

/// Returns whether a range is aligned and not empty.
fn is_aligned_to_granularity(at: u64, len: usize) -> bool {
    len > 0 && len.is_multiple_of(GRANULARITY) && at.is_multiple_of(GRANULARITY as u64)
}

/// Returns the granularity of sizes and addresses: 2 MiB, minimal and recommended.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemGetAllocationGranularity(
    to: *mut usize,
    prop: *const AllocationProp,
    option: c_uint,
) -> c_int {
    code_of(check_ready().and_then(|()| {
        // SAFETY: the caller passes the struct.
        unsafe { read_prop(prop)? };
        if option > 1 {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the caller passes a place for a number.
        unsafe { write_out(to, GRANULARITY) }
    }))
}

/// Creates a physical allocation. The length is a multiple of the granularity, else error 1. The handle types are fixed
/// here: without the type of descriptors it cannot be exported.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemCreate(
    to: *mut u64,
    len: usize,
    prop: *const AllocationProp,
    flags: c_ulonglong,
) -> c_int {
    code_of(check_ready().and_then(|()| {
        // SAFETY: the caller passes the struct.
        let (device, prop) = unsafe { read_prop(prop)? };
        if flags != 0 || !is_aligned_to_granularity(0, len) || to.is_null() {
            return Err(INVALID_VALUE);
        }
        if Setting::AllocFails.count_use_and_strikes_now() {
            return Err(OUT_OF_MEMORY);
        }
        let (backing, is_exportable) = (Backing::create(device, len)?, prop.handle_types != 0);
        let physical = PhysicalAllocation {
            device,
            backing,
            is_exportable,
            guard: Arc::new(Counter::Allocations.count_while_guard_lives()),
        };
        // SAFETY: the caller passes a place for a handle.
        unsafe { write_out(to, register_physical_allocation(physical)) }
    }))
}

fn register_physical_allocation(physical: PhysicalAllocation) -> u64 {
    let handle = new_handle() as u64;
    lock(&PHYSICAL).insert(handle, physical);
    handle
}

/// Releases a handle. The memory stays as long as it is mapped, or another process has it.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemRelease(handle: u64) -> c_int {
    code_of(check_ready().and_then(|()| lock(&PHYSICAL).remove(&handle).map(drop).ok_or(INVALID_VALUE)))
}

/// Reserves addresses. Length and alignment are multiples of the granularity (alignment 0: the granularity). The hint of an
/// address is ignored.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAddressReserve(
    to: *mut u64,
    len: usize,
    alignment: usize,
    _hint: u64,
    flags: c_ulonglong,
) -> c_int {
    code_of(check_ready().and_then(|()| {
        let is_aligned = alignment == 0 || alignment.is_power_of_two();
        if flags != 0 || !is_aligned_to_granularity(0, len) || !is_aligned || to.is_null() {
            return Err(INVALID_VALUE);
        }
        let base = device_memory::reserve(len, alignment.max(GRANULARITY))?;
        lock(&RESERVED).insert(base, len);
        // SAFETY: the caller passes a place for an address.
        unsafe { write_out(to, base) }
    }))
}

/// Frees a whole reservation in which nothing is mapped; anything else gives error 1. The addresses are not used again.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemAddressFree(at: u64, len: usize) -> c_int {
    code_of(check_ready().and_then(|()| {
        let mut reserved = lock(&RESERVED);
        if reserved.get(&at) != Some(&len) || !mappings_within(at, len).is_empty() {
            return Err(INVALID_VALUE);
        }
        reserved.remove(&at);
        Ok(())
    }))
}

/// Returns the mappings that touch a range: first address and length.
fn mappings_within(at: u64, len: usize) -> Vec<(u64, usize)> {
    let mut found = Vec::new();
    let end = at.saturating_add(len as u64);
    find_segment(|segment| {
        if segment.base < end && at < segment.base + segment.len as u64 {
            found.push((segment.base, segment.len));
        }
        None::<()>
    });
    found
}

/// Returns whether the mappings of a range cover it exactly.
fn are_mapped(at: u64, len: usize, mappings: &[(u64, usize)]) -> bool {
    mappings.first().is_some_and(|(base, _)| *base == at)
        && mappings.iter().map(|(_, len)| len).sum::<usize>() == len
}

/// Maps a physical allocation into a reservation. The offset must be 0. A range that is not granular, or longer than the
/// allocation, gives error 801; one that is not in one reservation, or contains a mapping, error 1. The memory is not accessible before `cuMemSetAccess`.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemMap(at: u64, len: usize, offset: usize, handle: u64, flags: c_ulonglong) -> c_int {
    code_of(check_ready().and_then(|()| {
        let reserved = lock(&RESERVED);
        let whole = reserved.range(..=at).next_back().map(|(base, len)| base + *len as u64);
        let is_reserved = whole.is_some_and(|end| at.checked_add(len as u64).is_some_and(|last| last <= end));
        if !is_aligned_to_granularity(at, len) {
            return Err(NOT_SUPPORTED);
        }
        if flags != 0 || offset != 0 || !is_reserved || !mappings_within(at, len).is_empty() {
            return Err(INVALID_VALUE);
        }
        let physical = lock(&PHYSICAL);
        let physical = physical.get(&handle).ok_or(INVALID_VALUE)?;
        if len > physical.backing.len() {
            return Err(NOT_SUPPORTED);
        }
        let kind = SegmentKind::Mapped { is_accessible: false, _guard: physical.guard.clone() };
        add_segment(at, physical.device, physical.backing.clone(), len, kind)
    }))
}

/// Unmaps all mappings of a range, which they must cover exactly, else error 1. The manual asks the caller to have finished
/// with the memory.
///
/// Stricter: work that comes later to the memory meets the sticky error 700, and nothing waits.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemUnmap(at: u64, len: usize) -> c_int {
    code_of(check_ready().and_then(|()| {
        let mappings = mappings_within(at, len);
        if !are_mapped(at, len, &mappings) {
            return Err(INVALID_VALUE);
        }
        mappings.into_iter().try_for_each(|(base, _)| {
            device_memory::remove_segment(base, |segment| matches!(segment.kind, SegmentKind::Mapped { .. }))
                .map(drop)
        })
    }))
}

/// Makes the mappings of a range accessible to devices, or inaccessible. The range is mapped completely, else error 1.
/// Flags: none 0, read 1, read and write 3. A device that cannot access the memory's device gives error 217 (*unconfirmed*).
///
/// More lenient: all devices of the process have the access of the last description; read-only access is refused.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemSetAccess(
    at: u64,
    len: usize,
    descriptions: *const AccessDesc,
    count: usize,
) -> c_int {
    code_of(check_ready().and_then(|()| {
        let mappings = mappings_within(at, len);
        if descriptions.is_null() || count == 0 || !are_mapped(at, len, &mappings) {
            return Err(INVALID_VALUE);
        }
        for index in 0..count {
            // SAFETY: the caller passes an array of this length.
            let description = unsafe { descriptions.add(index).read_unaligned() };
            let device = Device::find(description.location.id)?;
            if description.location.kind != LOCATION_DEVICE || !matches!(description.flags, 0 | 3) {
                return Err(INVALID_VALUE);
            }
            for (base, _) in &mappings {
                let is_accessible =
                    device_memory::with_segment(*base, |segment| segment.backing.is_accessible_to(device));
                if is_accessible == Some(false) {
                    return Err(PEER_ACCESS_UNSUPPORTED);
                }
                device_memory::with_segment(*base, |segment| {
                    if let SegmentKind::Mapped { is_accessible, .. } = &mut segment.kind {
                        *is_accessible = description.flags == 3;
                    }
                });
            }
        }
        Ok(())
    }))
}

/// Exports a physical allocation as a descriptor, which the caller closes. The type must be one of the allocation's handle
/// types, else error 1.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemExportToShareableHandle(
    to: *mut c_void,
    handle: u64,
    kind: c_uint,
    flags: c_ulonglong,
) -> c_int {
    code_of(check_ready().and_then(|()| {
        let physical = lock(&PHYSICAL);
        let physical =
            physical.get(&handle).filter(|physical| physical.is_exportable).ok_or(INVALID_VALUE)?;
        if kind != POSIX_DESCRIPTOR || flags != 0 || to.is_null() {
            return Err(INVALID_VALUE);
        }
        let file = physical.backing.file().try_clone_to_owned().map_err(|_| OUT_OF_MEMORY)?;
        // SAFETY: the caller passes a place for a descriptor.
        unsafe { write_out(to.cast::<c_int>(), file.into_raw_fd()) }
    }))
}

/// Imports a descriptor, which is passed as the pointer's value. The caller still owns it. A descriptor of anything else than
/// device memory gives error 999, which is not sticky here.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemImportFromShareableHandle(
    to: *mut u64,
    descriptor: *mut c_void,
    kind: c_uint,
) -> c_int {
    code_of(current_device().and_then(|device| {
        let descriptor = c_int::try_from(descriptor as isize).ok().filter(|descriptor| *descriptor >= 0);
        let (Some(descriptor), POSIX_DESCRIPTOR, false) = (descriptor, kind, to.is_null()) else {
            return Err(INVALID_VALUE);
        };
        // SAFETY: the descriptor is only duplicated, which fails if it is not open.
        let file =
            unsafe { BorrowedFd::borrow_raw(descriptor) }.try_clone_to_owned().map_err(|_| INVALID_VALUE)?;
        let backing = Backing::open(file).ok_or(UNKNOWN)?;
        let physical = PhysicalAllocation {
            device,
            backing,
            is_exportable: true,
            guard: Arc::new(Counter::Imports.count_while_guard_lives()),
        };
        // SAFETY: the caller passes a place for a handle.
        unsafe { write_out(to, register_physical_allocation(physical)) }
    }))
}
