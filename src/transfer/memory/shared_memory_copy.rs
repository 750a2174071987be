//! Copies of memory that another process may change during the copy.
//!
//! The compiler may assume that plain memory does not change during a copy. So every access to the shared memory here
//! is volatile, or an instruction that the compiler does not analyse. A peer that writes during the copy can then
//! change only the copied bytes. Begin at [`copy_from_shared`].
#![allow(unsafe_code, reason = "a copy between two addresses; callers say whose they are")]

/// The least length in bytes that `rep movsb` copies.
#[cfg(target_arch = "x86_64")]
const LONG: usize = 256;
const WORD: usize = size_of::<u64>();

/// Copies `len` bytes out of memory that another process may change.
///
/// # Safety
/// `from` must be mapped for `len` bytes, and only the caller may use the `len` bytes at `to`.
pub unsafe fn copy_from_shared(from: *const u8, to: *mut u8, len: usize) {
    #[cfg(target_arch = "x86_64")]
    if len >= LONG {
        // SAFETY: the caller guarantees both ranges.
        return unsafe { copy_with_string_instruction(from, to, len) };
    }
    let head = from.align_offset(WORD).min(len);
    let words = (len - head) / WORD;
    // SAFETY: every access is within the two ranges, and `from` is aligned after `head` bytes.
    unsafe {
        for at in 0..head {
            to.add(at).write(from.add(at).read_volatile());
        }
        for word in 0..words {
            let at = head + word * WORD;
            to.add(at).cast::<u64>().write_unaligned(from.add(at).cast::<u64>().read_volatile());
        }
        for at in head + words * WORD..len {
            to.add(at).write(from.add(at).read_volatile());
        }
    }
}

/// Copies `len` bytes into memory that another process may read and change.
///
/// # Safety
/// `to` must be mapped writable for `len` bytes, and nothing may change the `len` bytes at `from`.
pub unsafe fn copy_to_shared(from: *const u8, to: *mut u8, len: usize) {
    #[cfg(target_arch = "x86_64")]
    if len >= LONG {
        // SAFETY: the caller guarantees both ranges.
        return unsafe { copy_with_string_instruction(from, to, len) };
    }
    let head = to.align_offset(WORD).min(len);
    let words = (len - head) / WORD;
    // SAFETY: as in `copy_from_shared`, with `to` aligned after `head` bytes.
    unsafe {
        for at in 0..head {
            to.add(at).write_volatile(from.add(at).read());
        }
        for word in 0..words {
            let at = head + word * WORD;
            to.add(at).cast::<u64>().write_volatile(from.add(at).cast::<u64>().read_unaligned());
        }
        for at in head + words * WORD..len {
            to.add(at).write_volatile(from.add(at).read());
        }
    }
}

/// Copies as [`copy_from_shared`] does, with stores that bypass the caches, for more bytes than the caches hold.
/// Such a store does not read the destination first, which saves a third of the memory traffic of a plain
/// copy, and evicts nothing from the caches.
///
/// # Safety
/// As [`copy_from_shared`].
pub unsafe fn copy_from_shared_nontemporal(from: *const u8, to: *mut u8, len: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        const LINE: usize = 64;
        let head = to.align_offset(LINE).min(len);
        let lines = (len - head) / LINE;
        let done = head + lines * LINE;
        // SAFETY: the head, the lines and the rest are the whole of both ranges, and `to` is aligned after
        // the head.
        unsafe {
            copy_from_shared(from, to, head);
            for line in 0..lines {
                let at = head + line * LINE;
                copy_line_nontemporal(from.add(at), to.add(at));
            }
            // Non-temporal stores are weakly ordered: without the fence a thread that learns of the bytes
            // might not see them.
            std::arch::x86_64::_mm_sfence();
            copy_from_shared(from.add(done), to.add(done), len - done);
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    // SAFETY: the caller guarantees both ranges.
    unsafe {
        copy_from_shared(from, to, len);
    }
}

/// Copies with `rep movsb`.
#[cfg(target_arch = "x86_64")]
unsafe fn copy_with_string_instruction(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: it reads and writes the two ranges upwards, because the calling convention clears the direction
    // flag.
    unsafe {
        std::arch::asm!(
            "rep movsb",
            inout("rcx") len => _,
            inout("rsi") from => _,
            inout("rdi") to => _,
            options(nostack, preserves_flags)
        );
    }
}

/// Copies one cache line to an aligned address with non-temporal stores.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn copy_line_nontemporal(from: *const u8, to: *mut u8) {
    // SAFETY: both ranges have 64 bytes; `to` is a multiple of 16.
    unsafe {
        std::arch::asm!(
            "movdqu {a}, [{from}]",
            "movdqu {b}, [{from} + 16]",
            "movdqu {c}, [{from} + 32]",
            "movdqu {d}, [{from} + 48]",
            "movntdq [{to}], {a}",
            "movntdq [{to} + 16], {b}",
            "movntdq [{to} + 32], {c}",
            "movntdq [{to} + 48], {d}",
            from = in(reg) from,
            to = in(reg) to,
            a = out(xmm_reg) _,
            b = out(xmm_reg) _,
            c = out(xmm_reg) _,
            d = out(xmm_reg) _,
            options(nostack, preserves_flags)
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type CopyFunction = unsafe fn(*const u8, *mut u8, usize);

    #[test]
    fn copies_of_shared_memory_copy_just_the_bytes_that_were_named() {
        let source: Vec<u8> = (0..1000_u32).map(|n| n as u8 ^ (n >> 3) as u8).collect();
        let copies: [CopyFunction; 3] = [copy_from_shared, copy_to_shared, copy_from_shared_nontemporal];
        for (from, to, len) in [
            (0, 0, 1000),
            (1, 0, 999),
            (0, 3, 700),
            (3, 9, 255),
            (3, 9, 256),
            (7, 5, 64),
            (7, 5, 63),
            (9, 60, 1),
            (0, 64, 0),
            (13, 1, 511),
        ] {
            for copy in copies {
                let mut target = vec![0xee; 1200];
                // SAFETY: both ranges lie within their vectors.
                unsafe { copy(source[from..].as_ptr(), target[to..].as_mut_ptr(), len) };
                assert_eq!(target[to..to + len], source[from..from + len], "{len} from {from} to {to}");
                assert!(target[..to].iter().chain(&target[to + len..]).all(|byte| *byte == 0xee));
            }
        }
    }
}
