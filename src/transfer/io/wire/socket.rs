//! The code that all wires over sockets share.
//!
//! Each transport makes its own sockets. Begin at [`Socket`].

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::retry_on_intr;

use super::traits::{ReceivedCount, WireError};
use crate::io::sys;
use crate::memory::{ReadView, WriteView, total_len_of_views};

/// The buffer size for bytes that are read to be discarded, where the system cannot discard them unread.
const WASTE: usize = 16 << 10;

/// A non-blocking stream socket.
#[derive(Debug)]
pub struct Socket(OwnedFd);

impl Socket {
    /// Wraps a non-blocking socket.
    pub const fn new(socket: OwnedFd) -> Self {
        Self(socket)
    }

    /// Sends the bytes of the views, as many as fit. Returns their number.
    pub fn send(&self, views: &[ReadView<'_>]) -> Result<usize, WireError> {
        Ok(retry_on_intr(|| sys::send(self.as_fd(), views))?)
    }

    /// Receives available bytes into the views.
    pub fn receive(&self, views: &mut [WriteView<'_>]) -> Result<ReceivedCount, WireError> {
        let room = total_len_of_views(views);
        let bytes = retry_on_intr(|| sys::read_into_views(self.as_fd(), views))?;
        Ok(ReceivedCount { bytes, dry: bytes < room })
    }

    /// Reads and discards up to `len` bytes. Returns their number.
    pub fn discard(&self, len: usize) -> Result<usize, WireError> {
        let mut waste = [0; WASTE];
        let most = len.min(WASTE);
        Ok(retry_on_intr(|| {
            sys::read_into_views(self.as_fd(), &mut [WriteView::of_slice(&mut waste[..most])])
        })?)
    }

    /// Shuts the socket down in both directions.
    pub fn end(&self) {
        let _gone = rustix::net::shutdown(&self.0, rustix::net::Shutdown::Both);
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
