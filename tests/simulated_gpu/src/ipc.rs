//! Handles by which another process opens memory of `cuMemAlloc`, or an event.
//!
//! A handle names the process, one of its descriptors, and the file behind that: the other process opens the descriptor
//! through `/proc`. It works as long as the owner lives and has not freed the object. A mapping or an event that is open
//! stays so when the owner ends.

use std::ffi::{c_int, c_uint};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use crate::context::{check_ready, current_device};
use crate::counters::Counter;
use crate::device_memory::{
    Backing, PAGE, SegmentKind, add_segment, file_status, find_segment, remove_segment, reserve, with_segment,
};
use crate::error::{
    Answer, INVALID_CONTEXT, INVALID_HANDLE, INVALID_VALUE, PEER_ACCESS_UNSUPPORTED, code_of, write_out,
};
use crate::event::Event;
use crate::process::ProcessIdentity;

/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`.
const LAZY_ENABLE_PEER_ACCESS: c_uint = 1;

/// A handle of 64 bytes. C passes it by value, as a struct; an array would be passed by its address.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct IpcHandle {
    kind: u64,
    pid: u64,
    started: u64,
    descriptor: u64,
    inode: u64,
    flags: u64,
    unused: [u64; 2],
}

const _: () = assert!(size_of::<IpcHandle>() == 64);
const KIND_MEMORY: u64 = 0x7969_7063_206d_656d;
const KIND_EVENT: u64 = 0x7969_7063_2065_7674;

impl IpcHandle {
    fn new(kind: u64, file: BorrowedFd, inode: u64, flags: u64) -> Self {
        let (owner, descriptor) = (ProcessIdentity::own(), file.as_raw_fd() as u64);
        Self { kind, pid: owner.pid, started: owner.started, descriptor, inode, flags, unused: [0; 2] }
    }

    /// Opens the file of the handle.
    fn open(&self, kind: u64) -> Answer<OwnedFd> {
        let owner = ProcessIdentity { pid: self.pid, started: self.started };
        if self.kind != kind {
            return Err(INVALID_VALUE);
        }
        if owner == ProcessIdentity::own() {
            return Err(INVALID_CONTEXT);
        }
        if !owner.is_alive() {
            return Err(INVALID_HANDLE);
        }
        let path = format!("/proc/{}/fd/{}", self.pid, self.descriptor);
        let file = std::fs::OpenOptions::new().read(true).write(true).open(path);
        let file = OwnedFd::from(file.map_err(|_| INVALID_HANDLE)?);
        // The owner may use the number of a freed object's descriptor for something else.
        let is_same = file_status(file.as_fd()).is_some_and(|(inode, _)| inode == self.inode);
        is_same.then_some(file).ok_or(INVALID_HANDLE)
    }
}

/// Returns the handle of an allocation. Mapped memory (`cuMemMap`) and memory of pools have none: error 1.
///
/// Any address of the allocation gives the same handle, by which the other process gets the first address. Imported memory has
/// no handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuIpcGetMemHandle(to: *mut IpcHandle, at: u64) -> c_int {
    code_of(current_device().and_then(|_| {
        let handle = with_segment(at, |segment| {
            let is_right = matches!(segment.kind, SegmentKind::Allocated { .. });
            is_right.then(|| IpcHandle::new(KIND_MEMORY, segment.backing.file(), segment.backing.inode(), 0))
        });
        // SAFETY: the caller passes a place for a handle.
        unsafe { write_out(to, handle.flatten().ok_or(INVALID_VALUE)?) }
    }))
}

/// Opens an allocation of another process, and returns its address here. A handle that is open already returns the same
/// address, and counts once more. The flag must be 1 (lazy peer access), else error 1. One's own handle gives error 201.
/// If the owner ended or freed the memory, the error is 400 (*unconfirmed*), and if the device cannot access the
/// memory's device, 217.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuIpcOpenMemHandle_v2(to: *mut u64, handle: IpcHandle, flags: c_uint) -> c_int {
    code_of(current_device().and_then(|device| {
        if flags != LAZY_ENABLE_PEER_ACCESS || to.is_null() {
            return Err(INVALID_VALUE);
        }
        let backing = Backing::open(handle.open(KIND_MEMORY)?).ok_or(INVALID_HANDLE)?;
        if backing.is_freed() {
            return Err(INVALID_HANDLE);
        }
        if !backing.is_accessible_to(device) {
            return Err(PEER_ACCESS_UNSUPPORTED);
        }
        let open = find_segment(|segment| match &mut segment.kind {
            SegmentKind::Imported { opened, .. } if segment.backing.inode() == handle.inode => {
                *opened += 1;
                Some(segment.base)
            }
            _ => None,
        });
        let base = match open {
            Some(base) => base,
            None => {
                let len = backing.len();
                let base = reserve(len.next_multiple_of(PAGE), PAGE)?;
                let kind =
                    SegmentKind::Imported { opened: 1, _guard: Counter::Imports.count_while_guard_lives() };
                add_segment(base, device, backing, len, kind)?;
                base
            }
        };
        // SAFETY: the caller passes a place for an address.
        unsafe { write_out(to, base) }
    }))
}

/// Closes memory of another process, as often as it was opened. The owner must not free the memory before; the manual
/// leaves that undefined.
///
/// Stricter: after the owner's `cuMemFree`, work on the mapping meets the sticky error 700. After the owner's death the
/// bytes stay.
#[unsafe(no_mangle)]
pub extern "C" fn cuIpcCloseMemHandle(at: u64) -> c_int {
    code_of(check_ready().and_then(|()| {
        let left = with_segment(at, |segment| match &mut segment.kind {
            SegmentKind::Imported { opened, .. } if segment.base == at => {
                *opened -= 1;
                Some(*opened)
            }
            _ => None,
        });
        if left.flatten().ok_or(INVALID_VALUE)? == 0 {
            remove_segment(at, |_| true)?;
        }
        Ok(())
    }))
}

/// Returns the handle of an event that was created for other processes, else error 400.
///
/// Stricter: an event of another process has no handle here.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuIpcGetEventHandle(to: *mut IpcHandle, event: usize) -> c_int {
    code_of(current_device().and_then(|_| {
        let event = Event::find(event)?;
        let (file, flags) = event.export().ok_or(INVALID_HANDLE)?;
        let (inode, _) = file_status(file).ok_or(INVALID_HANDLE)?;
        // SAFETY: the caller passes a place for a handle.
        unsafe { write_out(to, IpcHandle::new(KIND_EVENT, file, inode, flags.into())) }
    }))
}

/// Opens an event of another process. Both processes may record it, query it and wait for it. It is destroyed by
/// `cuEventDestroy`. If the owner destroyed it, using it is undefined; here it works on. One's own handle gives error 201,
/// and one of a process that ended error 400 (both *unconfirmed*).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuIpcOpenEventHandle(to: *mut usize, handle: IpcHandle) -> c_int {
    code_of(current_device().and_then(|device| {
        if to.is_null() {
            return Err(INVALID_VALUE);
        }
        let file = handle.open(KIND_EVENT)?;
        let event = Event::import(device, handle.flags as c_uint, file)?;
        // SAFETY: the caller passes a place for a handle.
        unsafe { write_out(to, event) }
    }))
}
