//! The code that all socket wires share.
//!
//! It makes no sockets. Begin at [`Socket`].

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::retry_on_intr;

use super::traits::{Received, WireError};
use crate::io::sys;
use crate::memory::{ReadView, WriteView, total};

/// What is dropped is read into this much at once, where the system cannot drop it unread.
const WASTE: usize = 16 << 10;

/// A stream socket that does not block.
#[derive(Debug)]
pub struct Socket(OwnedFd);

impl Socket {
    /// Makes one of a socket that does not block.
    pub const fn new(socket: OwnedFd) -> Self {
        Self(socket)
    }

    /// Sends the views, as much as fits.
    pub fn send(&self, views: &[ReadView<'_>]) -> Result<usize, WireError> {
        Ok(retry_on_intr(|| sys::send(self.as_fd(), views))?)
    }

    /// Receives what is there into the views.
    pub fn receive(&self, views: &mut [WriteView<'_>]) -> Result<Received, WireError> {
        let room = total(views);
        let bytes = retry_on_intr(|| sys::read(self.as_fd(), views))?;
        Ok(Received { bytes, dry: bytes < room })
    }

    /// Reads up to `len` bytes, and drops them.
    pub fn waste(&self, len: usize) -> Result<usize, WireError> {
        let mut waste = [0; WASTE];
        let most = len.min(WASTE);
        Ok(retry_on_intr(|| sys::read(self.as_fd(), &mut [WriteView::of(&mut waste[..most])]))?)
    }

    /// Ends it in both directions.
    pub fn end(&self) {
        let _gone = rustix::net::shutdown(&self.0, rustix::net::Shutdown::Both);
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
