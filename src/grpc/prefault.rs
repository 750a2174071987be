//! Allocates buffers for request bodies, and populates their pages in one system call.
//!
//! `body_memory.rs` bounds the memory of bodies. At the first access, the kernel clears and maps fresh memory page
//! by page. For a body of 64 KiB this costs more than receiving the body. Populating all pages at once costs two
//! thirds as much. Reused memory needs no populating, so `cli/allocator.rs` configures the allocator to keep freed
//! memory for a few seconds.

#![cfg_attr(target_os = "linux", allow(unsafe_code))]

/// The lengths of bodies whose pages are populated. Longer bodies get theirs at the first touch, because an
/// announced length need not arrive.
const PREFAULTED_LENGTHS: std::ops::RangeInclusive<usize> = 32 << 10..=4 << 20;

/// Returns an empty vector with a capacity of exactly `length` bytes; `None` if there is no memory.
pub(super) fn allocate_prefaulted(length: usize) -> Option<Vec<u8>> {
    let mut room = Vec::new();
    room.try_reserve_exact(length).ok()?;
    #[cfg(target_os = "linux")]
    if PREFAULTED_LENGTHS.contains(&length) {
        populate_pages(&mut room);
    }
    Some(room)
}

#[cfg(target_os = "linux")]
fn populate_pages(room: &mut Vec<u8>) {
    let page = rustix::param::page_size();
    let spare = room.spare_capacity_mut();
    let before = spare.as_ptr().align_offset(page);
    let whole = spare.len().saturating_sub(before) / page * page;
    let Some(pages) = spare.get_mut(before..before + whole) else { return };
    let Some(last) = pages.rchunks_mut(page).next() else { return };
    let mut there = 0u8;
    // SAFETY: the page is this vector's own; the call reads no memory and writes one byte, of which there is one.
    let asked = unsafe { libc::mincore(last.as_mut_ptr().cast(), page, &raw mut there) };
    if asked == 0 && there & 1 == 0 {
        // SAFETY: the pages are this vector's own, and keep their contents, which are none yet. If the call
        // is refused (Linux before 5.14), the pages are populated at the first touch.
        let _best_effort = unsafe {
            rustix::mm::madvise(pages.as_mut_ptr().cast(), whole, rustix::mm::Advice::LinuxPopulateWrite)
        };
    }
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
