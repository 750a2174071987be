//! Allocates buffers for request bodies, and populates their pages in one system call (on Linux).
//!
//! `body_memory.rs` bounds the memory of bodies. If pages are not populated, the kernel clears and maps fresh memory
//! page by page, at the first access to each page. For a body of 64 KiB, this costs more than receiving the body. To
//! populate all pages of a buffer in one call costs two thirds of that. If one call also populates the memory of the
//! next few bodies, each body costs still less. Reused memory needs no populating, so `cli/allocator.rs` configures
//! the allocator to keep freed memory for a few seconds. Begin at [`allocate_prefaulted`].

#![cfg_attr(target_os = "linux", allow(unsafe_code))]

/// The lengths of bodies whose pages are populated. Longer bodies get theirs at the first touch, because an
/// announced length need not arrive.
const PREFAULTED_LENGTHS: std::ops::RangeInclusive<usize> = 32 << 10..=4 << 20;
/// The memory that is populated at a time for shorter bodies. The allocator gives the rest of it to the next ones.
#[cfg(target_os = "linux")]
const POPULATED_AT_ONCE: usize = 256 << 10;

/// Returns an empty vector with a capacity of exactly `length` bytes; `None` if there is no memory.
pub(super) fn allocate_prefaulted(length: usize) -> Option<Vec<u8>> {
    let mut room = allocate_without_prefault(length)?;
    #[cfg(target_os = "linux")]
    if PREFAULTED_LENGTHS.contains(&length) && needs_populating(&mut room) {
        if length < POPULATED_AT_ONCE {
            // The allocator gives the freed memory to the next request, unless it has a better fit elsewhere.
            drop(room);
            if let Some(mut ahead) = allocate_without_prefault(POPULATED_AT_ONCE) {
                populate_pages(&mut ahead);
            }
            room = allocate_without_prefault(length)?;
        }
        if length >= POPULATED_AT_ONCE || needs_populating(&mut room) {
            populate_pages(&mut room);
        }
    }
    Some(room)
}

fn allocate_without_prefault(length: usize) -> Option<Vec<u8>> {
    let mut room = Vec::new();
    room.try_reserve_exact(length).ok()?;
    Some(room)
}

/// Returns the whole pages of unused memory.
#[cfg(target_os = "linux")]
fn whole_pages_of_spare_capacity(
    room: &mut Vec<u8>,
    page: usize,
) -> Option<&mut [std::mem::MaybeUninit<u8>]> {
    let spare = room.spare_capacity_mut();
    let before = spare.as_ptr().align_offset(page);
    let whole = spare.len().saturating_sub(before) / page * page;
    spare.get_mut(before..before + whole)
}

/// Returns whether the last whole page is not in memory.
#[cfg(target_os = "linux")]
fn needs_populating(room: &mut Vec<u8>) -> bool {
    let page = rustix::param::page_size();
    let Some(last) =
        whole_pages_of_spare_capacity(room, page).and_then(|pages| pages.rchunks_mut(page).next())
    else {
        return false;
    };
    let mut there = 0u8;
    // SAFETY: the page is this vector's own; the call reads no memory and writes one byte, of which there is one.
    let asked = unsafe { libc::mincore(last.as_mut_ptr().cast(), page, &raw mut there) };
    asked == 0 && there & 1 == 0
}

#[cfg(target_os = "linux")]
fn populate_pages(room: &mut Vec<u8>) {
    let Some(pages) = whole_pages_of_spare_capacity(room, rustix::param::page_size()) else { return };
    let (start, length) = (pages.as_mut_ptr().cast(), pages.len());
    // SAFETY: the pages are this vector's own, and keep their contents, which are none yet. If the call
    // is refused (Linux before 5.14), the pages are populated at the first touch.
    let _best_effort = unsafe { rustix::mm::madvise(start, length, rustix::mm::Advice::LinuxPopulateWrite) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_allocation_has_the_requested_capacity() {
        for length in [0, 1, 4095, 32 << 10, (32 << 10) + 1, 100_001, 4 << 20, (4 << 20) + 1] {
            let mut bytes = allocate_prefaulted(length).expect("memory");
            assert!(bytes.is_empty() && bytes.capacity() >= length);
            let place = bytes.as_ptr();
            bytes.extend(std::iter::repeat_n(7, length));
            assert!(bytes.iter().all(|byte| *byte == 7) && (length == 0 || bytes.as_ptr() == place));
        }
        assert!(allocate_prefaulted(usize::MAX).is_none());
    }
}
