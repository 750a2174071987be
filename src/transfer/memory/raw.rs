//! Memory as addresses: the one file of the room that touches it through pointers, apart from `sys`.
//!
//! Rust's references cannot describe memory that other processes read while this one writes it, so nothing here makes
//! a reference to bytes that a transfer uses. A [`Piece`] is an address and a length that borrows its owner, so the
//! memory outlives it; that two threads of this process do not use the same bytes at once is the business of
//! [`crate::memory::buffer`] (who may begin) and of `launch::Pad` (who may still write).
#![allow(unsafe_code)]

use std::marker::PhantomData;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64};

use rustix::mm::{MapFlags, ProtFlags};

/// Where something begins. Only compared and added to; read and written through a [`Piece`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Address(NonNull<u8>);

// SAFETY: an address is a number; what is done at it is done through `Piece`, whose owner keeps it alive.
unsafe impl Send for Address {}
// SAFETY: as above.
unsafe impl Sync for Address {}

/// Memory that is mapped as long as this lives.
#[derive(Debug)]
pub struct Mapping {
    base: Address,
    len: usize,
}

impl Mapping {
    /// Maps `len` bytes of `file`, to be read and, where `writable`, written.
    pub fn of(file: BorrowedFd<'_>, len: usize, writable: bool) -> rustix::io::Result<Self> {
        if len == 0 {
            return Ok(Self { base: Address(NonNull::dangling()), len });
        }
        let protection = if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        // SAFETY: a new mapping at a place that the kernel chooses overlaps nothing.
        let base = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), len, protection, MapFlags::SHARED, file.as_fd(), 0)?
        };
        let base = NonNull::new(base.cast()).ok_or(rustix::io::Errno::NOMEM)?;
        Ok(Self { base: Address(base), len })
    }

    /// Maps `len` bytes of what another process sent; none if it could shrink, which would fault whoever reads it, or is
    /// shorter.
    pub fn sealed(file: BorrowedFd<'_>, len: usize, writable: bool) -> Option<Self> {
        let seals = rustix::fs::fcntl_get_seals(file).ok()?;
        let size = usize::try_from(rustix::fs::fstat(file).ok()?.st_size).ok()?;
        if !seals.contains(rustix::fs::SealFlags::SHRINK) || size < len {
            return None;
        }
        Self::of(file, len, writable).ok()
    }

    /// Asks for large pages, and for all pages now: the first touch of a page costs more than a copy into it.
    pub fn prefault(&self, writable: bool) {
        if self.len == 0 {
            return;
        }
        let populate = if writable {
            rustix::mm::Advice::LinuxPopulateWrite
        } else {
            rustix::mm::Advice::LinuxPopulateRead
        };
        for advice in [rustix::mm::Advice::LinuxHugepage, populate] {
            // SAFETY: the range is this mapping; neither advice changes its contents.
            let _best_effort = unsafe { rustix::mm::madvise(self.base.0.as_ptr().cast(), self.len, advice) };
        }
    }

    /// Its length in bytes.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Where it begins.
    pub const fn base(&self) -> Address {
        self.base
    }

    /// The word at `at`, which this process and others may change. `at` is a multiple of 8, within the mapping.
    pub fn word64(&self, at: usize) -> &AtomicU64 {
        assert!(at.is_multiple_of(8) && at + 8 <= self.len, "a word of the mapping");
        // SAFETY: it is aligned and within the mapping, which is only ever used as atomic words there.
        unsafe { AtomicU64::from_ptr(self.base.0.as_ptr().add(at).cast()) }
    }

    /// As [`word64`](Self::word64), of 32 bits.
    pub fn word32(&self, at: usize) -> &AtomicU32 {
        assert!(at.is_multiple_of(4) && at + 4 <= self.len, "a word of the mapping");
        // SAFETY: as above.
        unsafe { AtomicU32::from_ptr(self.base.0.as_ptr().add(at).cast()) }
    }

    /// The bytes `start..start + len`, if they lie in it.
    pub fn piece(&self, start: usize, len: usize) -> Option<Piece<'_>> {
        (start.checked_add(len)? <= self.len).then(|| Piece::at(self.base, start, len))
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.len > 0 {
            // SAFETY: the mapping is this value's own, and every `Piece` of it borrowed this value.
            let _ = unsafe { rustix::mm::munmap(self.base.0.as_ptr().cast(), self.len) };
        }
    }
}

/// Somebody's memory as it is, and its owner, which lives here so that it outlives every use.
pub struct Foreign {
    base: Address,
    len: usize,
    owner: NonNull<dyn Send>,
}

// SAFETY: the owner may be sent, and nobody looks at it before it is dropped.
unsafe impl Send for Foreign {}
// SAFETY: as above.
unsafe impl Sync for Foreign {}

impl std::fmt::Debug for Foreign {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Foreign").field("len", &self.len).finish_non_exhaustive()
    }
}

impl Foreign {
    /// Takes the memory that `owner` has. It is asked for it once.
    pub fn new<M: AsMut<[u8]> + Send + 'static>(owner: M) -> Self {
        let owner = Box::into_raw(Box::new(owner));
        // SAFETY: made of a box a moment ago, and borrowed from here until `drop` takes it back: nobody else reaches it.
        let bytes = unsafe { (*owner).as_mut() };
        let (len, base) = (bytes.len(), NonNull::from(bytes).cast());
        let owner: *mut dyn Send = owner;
        // SAFETY: a box is never null.
        Self { base: Address(base), len, owner: unsafe { NonNull::new_unchecked(owner) } }
    }

    /// Its length in bytes.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Where it begins.
    pub const fn base(&self) -> Address {
        self.base
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        // SAFETY: `new` made it of a box, and gave it away to nobody.
        drop(unsafe { Box::from_raw(self.owner.as_ptr()) });
    }
}

/// Bytes that are there for `'a`. Laid out as the kernel takes a vector of them.
#[derive(Debug, Clone, Copy)]
#[repr(transparent)]
pub struct Piece<'a>(libc::iovec, PhantomData<&'a ()>);

// SAFETY: an address and a length; see the head of the file for who may use the bytes.
unsafe impl Send for Piece<'_> {}
// SAFETY: as above.
unsafe impl Sync for Piece<'_> {}

impl<'a> Piece<'a> {
    /// `len` bytes at `start` after `base`; whoever calls answers for their being there for `'a`.
    pub(crate) fn at(base: Address, start: usize, len: usize) -> Self {
        // SAFETY: callers in this room give offsets that lie within the owner's memory.
        let base = unsafe { base.0.as_ptr().add(start) };
        Self(libc::iovec { iov_base: base.cast(), iov_len: len }, PhantomData)
    }

    /// A piece of bytes that somebody owns alone.
    pub fn of_mut(bytes: &'a mut [u8]) -> Self {
        Self(libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() }, PhantomData)
    }

    /// A piece of bytes that will only be read.
    pub fn of(bytes: &'a [u8]) -> Self {
        Self(libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() }, PhantomData)
    }

    /// How many bytes.
    pub const fn len(&self) -> usize {
        self.0.iov_len
    }

    /// Where, as a number.
    pub fn number(&self) -> u64 {
        self.0.iov_base as u64
    }

    /// Its part from `start` on, at most `len` bytes.
    pub fn part(&self, start: usize, len: usize) -> Self {
        let start = start.min(self.len());
        let len = len.min(self.len() - start);
        // SAFETY: `start` is within the piece.
        let base = unsafe { self.0.iov_base.cast::<u8>().add(start) };
        Self(libc::iovec { iov_base: base.cast(), iov_len: len }, PhantomData)
    }

    /// Copies from `source` into this, as many bytes as both have.
    pub fn copy_from(&self, source: &Piece<'_>) {
        let len = self.len().min(source.len());
        // SAFETY: both are there; that they do not overlap is seen to by reservations (one is written by nobody else),
        // and `copy` would allow it anyway.
        unsafe { std::ptr::copy(source.0.iov_base.cast::<u8>(), self.0.iov_base.cast::<u8>(), len) };
    }

    /// As [`copy_from`](Self::copy_from), past the caches: what is written is not read from memory before, which is a
    /// third of what a plain copy moves, and drives nothing else out of the caches. For more than they hold.
    pub fn copy_past_caches(&self, source: &Piece<'_>) {
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};
            const LINE: usize = 64;
            const WORDS: usize = LINE / size_of::<__m128i>();
            let len = self.len().min(source.len());
            let head = self.0.iov_base.cast::<u8>().align_offset(LINE).min(len);
            let lines = (len - head) / LINE;
            self.part(0, head).copy_from(source);
            let (to, from) = (self.part(head, lines * LINE), source.part(head, lines * LINE));
            let (into, out) = (to.0.iov_base.cast::<__m128i>(), from.0.iov_base.cast::<__m128i>());
            for line in 0..lines {
                // SAFETY: four words, which is a line, within both pieces; `into` begins with a line, so its words are
                // aligned. That they do not overlap is seen to by reservations.
                unsafe {
                    let (into, out) = (into.add(line * WORDS), out.add(line * WORDS));
                    let (first, second) = (_mm_loadu_si128(out), _mm_loadu_si128(out.add(1)));
                    let (third, fourth) = (_mm_loadu_si128(out.add(2)), _mm_loadu_si128(out.add(3)));
                    _mm_stream_si128(into, first);
                    _mm_stream_si128(into.add(1), second);
                    _mm_stream_si128(into.add(2), third);
                    _mm_stream_si128(into.add(3), fourth);
                }
            }
            // SAFETY: a fence. Such stores may come after later ones, and whoever hears that the bytes are there must see
            // them.
            unsafe { _mm_sfence() };
            let done = head + lines * LINE;
            self.part(done, len - done).copy_from(&source.part(done, len - done));
        }
        #[cfg(not(target_arch = "x86_64"))]
        self.copy_from(source);
    }

    /// Calls `with` with the bytes. For bytes that no transfer writes meanwhile.
    pub fn read<R>(&self, with: impl FnOnce(&[u8]) -> R) -> R {
        if self.len() == 0 {
            return with(&[]);
        }
        // SAFETY: the bytes are there, and the caller holds a reservation against writers in this process; no other
        // process can write them.
        with(unsafe { std::slice::from_raw_parts(self.0.iov_base.cast(), self.len()) })
    }

    /// Calls `with` with the bytes, to be written. For bytes that no transfer uses meanwhile.
    pub fn write<R>(&self, with: impl FnOnce(&mut [u8]) -> R) -> R {
        if self.len() == 0 {
            return with(&mut []);
        }
        // SAFETY: the bytes are there, and the caller holds the reservation to write them, which excludes all others.
        with(unsafe { std::slice::from_raw_parts_mut(self.0.iov_base.cast(), self.len()) })
    }

    /// The pieces as the kernel takes them.
    pub(crate) fn vectors<'p>(pieces: &'p [Piece<'_>]) -> &'p [libc::iovec] {
        // SAFETY: `Piece` is a transparent wrapper of `iovec`.
        unsafe { std::slice::from_raw_parts(pieces.as_ptr().cast(), pieces.len()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_past_the_caches_copies_just_what_both_have() {
        let source: Vec<u8> = (0..1000_u32).map(|n| n as u8 ^ (n >> 3) as u8).collect();
        for (from, to, len) in [
            (0, 0, 1000),
            (1, 0, 999),
            (0, 3, 700),
            (7, 5, 64),
            (7, 5, 63),
            (9, 60, 1),
            (0, 64, 0),
            (13, 1, 511),
        ] {
            for more in [0, 40] {
                let mut target = vec![0xee; 1200];
                let room = if more == 0 { len } else { len + more };
                Piece::of_mut(&mut target[to..to + room])
                    .copy_past_caches(&Piece::of(&source[from..from + len]));
                assert_eq!(target[to..to + len], source[from..from + len], "{len} from {from} to {to}");
                assert!(target[..to].iter().chain(&target[to + len..]).all(|byte| *byte == 0xee));
            }
        }
    }
}
