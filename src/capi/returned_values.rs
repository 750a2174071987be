//! Answers whose memory the caller frees: bytes, members, entries.
//!
//! Each value is one block of `malloc`, so it can be freed by its address alone. Begin at [`MusterBytes`].

use std::ffi::c_char;
use std::ptr::null_mut;

use muster::transfer::MemberId;

use super::boundary::{check_fits_address_space, check_pointer, run_interface_function};
use super::status::{CallError, MusterStatus};

/// Bytes, followed by NUL, which `len` does not count. `data` is NULL if there is no value; an empty value has `data`.
/// Free it with `muster_bytes_free`.
#[derive(Debug)]
#[repr(C)]
pub struct MusterBytes {
    /// The first byte.
    pub data: *mut u8,
    /// The number of bytes.
    pub len: usize,
}

/// A task in one of its incarnations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct MusterMember {
    /// The number of the task.
    pub task: u32,
    /// Zero.
    pub reserved: u32,
    /// The random identity of this incarnation; never 0.
    pub incarnation: u64,
}

/// Members, by ascending task. Free it with `muster_members_free`.
#[derive(Debug)]
#[repr(C)]
pub struct MusterMembers {
    /// The first member.
    pub items: *mut MusterMember,
    /// The number of members.
    pub len: usize,
}

/// A key with its value. Its memory belongs to the `muster_entries` that it is in.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct MusterEntry {
    /// The key.
    pub key: *const c_char,
    /// The value, followed by NUL, which `len` does not count.
    pub value: *const u8,
    /// The number of bytes of the value.
    pub len: usize,
}

/// Entries, by ascending key. Free it with `muster_entries_free`.
#[derive(Debug)]
#[repr(C)]
pub struct MusterEntries {
    /// The first entry.
    pub items: *mut MusterEntry,
    /// The number of entries.
    pub len: usize,
}

/// Returns a new block of so many bytes, at least one, aligned for every type.
fn allocate_block(bytes: usize) -> Result<*mut u8, CallError> {
    // SAFETY: `malloc` may be called with any size.
    let block = unsafe { libc::malloc(bytes.max(1)) };
    if block.is_null() {
        return Err(CallError::new(MusterStatus::System, format!("no memory for {bytes} bytes")));
    }
    Ok(block.cast())
}

/// Copies bytes to `at`, followed by NUL, and returns the address after that.
///
/// # Safety
/// There is room.
unsafe fn copy_with_nul(at: *mut u8, bytes: &[u8]) -> *mut u8 {
    // SAFETY: the caller guarantees the room.
    unsafe {
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), at, bytes.len());
        at.add(bytes.len()).write(0);
        at.add(bytes.len() + 1)
    }
}

impl MusterBytes {
    /// Returns the value that stands for none.
    pub const fn none() -> Self {
        Self { data: null_mut(), len: 0 }
    }

    /// Copies bytes.
    pub fn copy(bytes: &[u8]) -> Result<Self, CallError> {
        let data = allocate_block(bytes.len() + 1)?;
        // SAFETY: the block has room for the bytes and NUL.
        unsafe { copy_with_nul(data, bytes) };
        Ok(Self { data, len: bytes.len() })
    }
}

impl MusterMember {
    fn from_member(member: MemberId) -> Self {
        Self { task: member.task.0, reserved: 0, incarnation: member.incarnation.get() }
    }
}

impl MusterMembers {
    /// Copies members.
    pub fn copy(members: &[MemberId]) -> Result<Self, CallError> {
        let items: *mut MusterMember =
            allocate_block(size_of_val(members).max(size_of::<MusterMember>()))?.cast();
        for (at, member) in members.iter().enumerate() {
            // SAFETY: the block has room for all members, and is aligned for every type.
            unsafe { items.add(at).write(MusterMember::from_member(*member)) };
        }
        Ok(Self { items, len: members.len() })
    }
}

impl MusterEntries {
    /// Copies entries. A key with NUL ends there.
    pub fn copy<B: AsRef<[u8]>>(entries: &[(String, B)]) -> Result<Self, CallError> {
        let texts: usize = entries.iter().map(|(key, value)| key.len() + value.as_ref().len() + 2).sum();
        let table = entries.len() * size_of::<MusterEntry>();
        check_fits_address_space("the list", 0, table + texts, 1)?;
        let block = allocate_block(table + texts)?;
        let items: *mut MusterEntry = block.cast();
        // SAFETY: the block has room for the table, then for all texts with their NULs.
        unsafe {
            let mut at = block.add(table);
            for (number, (key, value)) in entries.iter().enumerate() {
                let value = value.as_ref();
                let start = copy_with_nul(at, key.as_bytes());
                let entry =
                    MusterEntry { key: at.cast::<c_char>().cast_const(), value: start, len: value.len() };
                at = copy_with_nul(start, value);
                items.add(number).write(entry);
            }
        }
        Ok(Self { items, len: entries.len() })
    }
}

/// Frees the block of a value and empties the value.
fn free_block<T>(
    name: &str,
    place: *mut T,
    block: impl FnOnce(&mut T) -> *mut libc::c_void,
) -> Result<(), CallError> {
    if place.is_null() {
        return Ok(());
    }
    check_pointer(name, place)?;
    // SAFETY: it is neither null nor misaligned, and the caller passed a value that the library has written, or an empty one.
    unsafe { libc::free(block(&mut *place)) };
    Ok(())
}

/// Frees bytes and empties them; does nothing if they are empty or NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn muster_bytes_free(bytes: *mut MusterBytes) -> MusterStatus {
    run_interface_function(|| {
        free_block("bytes", bytes, |bytes| std::mem::replace(bytes, MusterBytes::none()).data.cast())
    })
}

/// Frees members and empties them; does nothing if they are empty or NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn muster_members_free(members: *mut MusterMembers) -> MusterStatus {
    run_interface_function(|| {
        free_block("members", members, |members| {
            std::mem::replace(members, MusterMembers { items: null_mut(), len: 0 }).items.cast()
        })
    })
}

/// Frees entries and empties them; does nothing if they are empty or NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn muster_entries_free(entries: *mut MusterEntries) -> MusterStatus {
    run_interface_function(|| {
        free_block("entries", entries, |entries| {
            std::mem::replace(entries, MusterEntries { items: null_mut(), len: 0 }).items.cast()
        })
    })
}
