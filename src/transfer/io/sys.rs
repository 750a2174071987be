//! Wrappers of the system calls that take memory by address: scattered reads and writes of sockets, and reads of
//! another process's memory.
//!
//! This module knows sockets and processes, not wires. Begin at [`read_into_views`].
#![allow(unsafe_code, reason = "system calls that take memory by address")]

use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::io::Errno;

use crate::memory::{ReadView, WriteView};

/// The most memory ranges of one call (the kernel accepts up to 1,024).
pub const PIECES_MAX: usize = 256;

fn count_or_errno(returned: libc::ssize_t) -> Result<usize, Errno> {
    usize::try_from(returned)
        .map_err(|_| Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO))
}

/// Reads available bytes into the views. Returns their number; 0 at the end of the stream.
pub fn read_into_views(socket: BorrowedFd<'_>, views: &mut [WriteView<'_>]) -> Result<usize, Errno> {
    let vectors = WriteView::as_iovecs(views);
    // SAFETY: the vectors describe memory that only the holder of the views uses.
    count_or_errno(unsafe { libc::readv(socket.as_raw_fd(), vectors.as_ptr(), vectors.len() as libc::c_int) })
}

/// Writes the bytes of the views, as many as fit. Returns their number.
pub fn send(socket: BorrowedFd<'_>, views: &[ReadView<'_>]) -> Result<usize, Errno> {
    let vectors = ReadView::as_iovecs(views);
    // SAFETY: all-zero is a valid message header: no name, no control data.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = vectors.as_ptr().cast_mut();
    message.msg_iovlen = vectors.len() as _;
    // SAFETY: the vectors describe memory that the views keep valid, and the kernel only reads it.
    count_or_errno(unsafe {
        libc::sendmsg(socket.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT)
    })
}

/// Discards up to `len` bytes from a TCP socket without copying them.
pub fn discard(socket: BorrowedFd<'_>, len: usize) -> Result<usize, Errno> {
    // SAFETY: with MSG_TRUNC a TCP socket drops what it would have copied and touches no memory.
    count_or_errno(unsafe {
        libc::recv(socket.as_raw_fd(), std::ptr::null_mut(), len, libc::MSG_TRUNC | libc::MSG_DONTWAIT)
    })
}

/// Reads the memory at each address of the process `pid` into the view with the same index, one after the
/// other, until one cannot be read. At most [`PIECES_MAX`] of them. Returns the number of bytes read.
pub fn read_process_memory(pid: i32, addresses: &[u64], into: &mut [WriteView<'_>]) -> Result<usize, Errno> {
    let count = addresses.len().min(into.len()).min(PIECES_MAX);
    let local = WriteView::as_iovecs(&into[..count]);
    let remote: Vec<_> = addresses
        .iter()
        .zip(local)
        .map(|(address, view)| libc::iovec { iov_base: *address as *mut libc::c_void, iov_len: view.iov_len })
        .collect();
    let count = count as libc::c_ulong;
    // SAFETY: `local` is as for `read_into_views`; the kernel checks that `remote` is memory of the other process.
    count_or_errno(unsafe { libc::process_vm_readv(pid, local.as_ptr(), count, remote.as_ptr(), count, 0) })
}
