//! Views of memory: an address and a length that borrow the owner of the bytes.
//!
//! A Rust reference must not describe memory that another process changes, so no code keeps a reference to bytes
//! that a transfer uses. A [`ReadView`] is only read and a [`WriteView`] only written. Another process may change
//! the memory of a [`PeerView`] at any moment, so it is only copied. Reservations ([`super::buffer`]) and the gate
//! of a launch ([`crate::launch`]) decide when a view may be made. Begin at [`ReadView`].
#![allow(unsafe_code, reason = "the one place that turns addresses into bytes")]

use std::marker::PhantomData;
use std::ptr::NonNull;

use super::shared_memory_copy;

/// The address of the first byte of a memory range. It is only compared and added to; views access the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryAddress(pub(super) NonNull<u8>);

// SAFETY: an address is a number; every access goes through a view, whose owner keeps the memory alive.
unsafe impl Send for MemoryAddress {}
// SAFETY: as above.
unsafe impl Sync for MemoryAddress {}

impl MemoryAddress {
    /// Returns the address as the number by which another process names it to the kernel.
    pub fn numeric_address_at(self, offset: usize) -> u64 {
        (self.0.as_ptr() as u64).wrapping_add(offset as u64)
    }

    /// Returns the pointer to the byte at `offset`.
    pub(super) fn pointer_at(self, offset: usize) -> *mut u8 {
        self.0.as_ptr().wrapping_add(offset)
    }
}

/// Bytes that may be read for `'a`. It has the representation of the kernel's `iovec`.
#[derive(Debug, Clone, Copy)]
#[repr(transparent)]
pub struct ReadView<'a>(libc::iovec, PhantomData<&'a [u8]>);

/// Bytes that only the holder uses for `'a`, and may write. It has the representation of the kernel's
/// `iovec`.
#[derive(Debug)]
#[repr(transparent)]
pub struct WriteView<'a>(libc::iovec, PhantomData<&'a mut [u8]>);

/// Bytes that are mapped for `'a` and that another process may change at any moment.
#[derive(Debug, Clone, Copy)]
pub struct PeerView<'a>(*const u8, usize, PhantomData<&'a ()>);

// SAFETY: as a shared slice: its creator guaranteed that the bytes are mapped and do not change.
unsafe impl Send for ReadView<'_> {}
// SAFETY: as above.
unsafe impl Sync for ReadView<'_> {}
// SAFETY: as an exclusive slice.
unsafe impl Send for WriteView<'_> {}

/// Returns the bytes of a view from `start` on, `len` at most.
fn clamp_iovec(view: libc::iovec, start: usize, len: usize) -> libc::iovec {
    let start = start.min(view.iov_len);
    let iov_base = view.iov_base.cast::<u8>().wrapping_add(start).cast();
    libc::iovec { iov_base, iov_len: len.min(view.iov_len - start) }
}

impl<'a> ReadView<'a> {
    /// Creates a view of the `len` bytes at `base + start`.
    ///
    /// # Safety
    /// For `'a` the bytes must be mapped, and nothing may write them: the caller holds a reservation to read
    /// them, or a guard of the launch that holds one.
    pub unsafe fn from_address(base: MemoryAddress, start: usize, len: usize) -> Self {
        let iov_base = base.0.as_ptr().wrapping_add(start).cast();
        Self(libc::iovec { iov_base, iov_len: len }, PhantomData)
    }

    /// Creates a view of a slice.
    pub const fn of_slice(bytes: &'a [u8]) -> Self {
        Self(libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() }, PhantomData)
    }

    /// Returns the length in bytes.
    pub const fn len(&self) -> usize {
        self.0.iov_len
    }

    /// Returns the bytes of the view from `start` on, `len` at most.
    #[cfg(feature = "faults")]
    pub fn part(&self, start: usize, len: usize) -> Self {
        Self(clamp_iovec(self.0, start, len), PhantomData)
    }

    /// Calls `with` with the bytes.
    pub fn with_bytes<R>(&self, with: impl FnOnce(&[u8]) -> R) -> R {
        if self.len() == 0 {
            return with(&[]);
        }
        // SAFETY: the creator of the view guaranteed that the bytes are mapped and that nothing writes them.
        with(unsafe { std::slice::from_raw_parts(self.0.iov_base.cast(), self.len()) })
    }

    /// Returns the views as the vectors of a system call.
    pub(crate) fn as_iovecs<'p>(views: &'p [ReadView<'_>]) -> &'p [libc::iovec] {
        // SAFETY: `ReadView` is a transparent wrapper of `iovec`.
        unsafe { std::slice::from_raw_parts(views.as_ptr().cast(), views.len()) }
    }
}

impl<'a> WriteView<'a> {
    /// Creates a view of the `len` bytes at `base + start`.
    ///
    /// # Safety
    /// For `'a` the bytes must be mapped writable, and nothing else in this process may use them: the caller
    /// holds a reservation to write them, or a guard of the launch that holds one, and makes no second view
    /// of the same bytes.
    pub unsafe fn from_address(base: MemoryAddress, start: usize, len: usize) -> Self {
        let iov_base = base.0.as_ptr().wrapping_add(start).cast();
        Self(libc::iovec { iov_base, iov_len: len }, PhantomData)
    }

    /// Creates a view of a slice.
    pub const fn of_slice(bytes: &'a mut [u8]) -> Self {
        Self(libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() }, PhantomData)
    }

    /// Returns the address of the first byte, for an operation that outlives the view: its caller keeps the guard of the bytes.
    pub fn address(&self) -> *mut u8 {
        self.0.iov_base.cast()
    }

    /// Returns the length in bytes.
    pub const fn len(&self) -> usize {
        self.0.iov_len
    }

    /// Returns the bytes of the view from `start` on, `len` at most.
    pub fn part(&mut self, start: usize, len: usize) -> WriteView<'_> {
        WriteView(clamp_iovec(self.0, start, len), PhantomData)
    }

    /// Removes the first `len` bytes from the view.
    pub fn advance(&mut self, len: usize) {
        self.0 = clamp_iovec(self.0, len, usize::MAX);
    }

    /// Copies from `source`, as many bytes as both have.
    pub fn copy_from(&mut self, source: &ReadView<'_>) {
        let len = self.len().min(source.len());
        // SAFETY: both ranges are mapped, and `copy` allows an overlap.
        unsafe { std::ptr::copy(source.0.iov_base.cast::<u8>(), self.0.iov_base.cast::<u8>(), len) };
    }

    /// Copies from another process's memory, as many bytes as both have; `past_caches` is for more than the
    /// caches hold.
    pub fn copy_from_peer(&mut self, source: &PeerView<'_>, past_caches: bool) {
        let (to, len) = (self.0.iov_base.cast::<u8>(), self.len().min(source.1));
        // SAFETY: both are mapped for `len` bytes; the destination is the holder's alone, and the source is
        // treated as shared.
        unsafe {
            if past_caches {
                shared_memory_copy::copy_from_shared_nontemporal(source.0, to, len);
            } else {
                shared_memory_copy::copy_from_shared(source.0, to, len);
            }
        }
    }

    /// Calls `with` with the bytes, which it may write.
    pub fn with_bytes_mut<R>(&mut self, with: impl FnOnce(&mut [u8]) -> R) -> R {
        if self.len() == 0 {
            return with(&mut []);
        }
        // SAFETY: the creator of the view guaranteed that the bytes are mapped and that nothing else uses
        // them.
        with(unsafe { std::slice::from_raw_parts_mut(self.0.iov_base.cast(), self.len()) })
    }

    /// Returns the views as the vectors of a system call.
    pub(crate) fn as_iovecs<'p>(views: &'p [WriteView<'_>]) -> &'p [libc::iovec] {
        // SAFETY: `WriteView` is a transparent wrapper of `iovec`.
        unsafe { std::slice::from_raw_parts(views.as_ptr().cast(), views.len()) }
    }
}

impl PeerView<'_> {
    /// Creates a view of the `len` bytes at `base + start`.
    ///
    /// # Safety
    /// The bytes must be mapped for the lifetime of the view.
    pub(super) unsafe fn from_address(base: MemoryAddress, start: usize, len: usize) -> Self {
        Self(base.0.as_ptr().wrapping_add(start), len, PhantomData)
    }
}

/// Returns the number of bytes of all views.
pub fn total_len_of_views(views: &[WriteView<'_>]) -> usize {
    views.iter().map(WriteView::len).sum()
}
