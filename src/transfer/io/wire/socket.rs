//! What all wires over sockets share.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::retry_on_intr;

use crate::io::sys;
use crate::io::wire::{Received, WireError};
use crate::memory::raw::Piece;

/// What is dropped is read into this much at once, where the system cannot drop it unread.
const WASTE: usize = 16 << 10;

/// A stream socket that does not block.
#[derive(Debug)]
pub struct Socket(OwnedFd);

impl Socket {
    /// Of a socket that does not block.
    pub const fn new(socket: OwnedFd) -> Self {
        Self(socket)
    }

    pub fn send(&self, pieces: &[Piece<'_>]) -> Result<usize, WireError> {
        Ok(retry_on_intr(|| sys::send(self.as_fd(), pieces))?)
    }

    pub fn receive(&self, pieces: &[Piece<'_>]) -> Result<Received, WireError> {
        let bytes = retry_on_intr(|| sys::read(self.as_fd(), pieces))?;
        let room: usize = pieces.iter().map(Piece::len).sum();
        Ok(Received { bytes, dry: bytes < room })
    }

    /// Reads bytes for nobody.
    pub fn waste(&self, len: usize) -> Result<usize, WireError> {
        let mut waste = [0; WASTE];
        let most = len.min(WASTE);
        Ok(retry_on_intr(|| sys::read(self.as_fd(), &[Piece::of_mut(&mut waste[..most])]))?)
    }

    pub fn end(&self) {
        let _gone = rustix::net::shutdown(&self.0, rustix::net::Shutdown::Both);
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
