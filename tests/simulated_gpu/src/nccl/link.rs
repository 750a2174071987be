//! The socket from one rank to another: one for each direction. The sender writes headers and contents, the receiver
//! replies.

use std::io::{ErrorKind, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;

/// How long a wait for a socket takes before the sign to stop is looked at again, in milliseconds.
const LOOK_MS: i32 = 2;
/// The most bytes of one system call, so that a stopped group ends soon.
const BYTES_MAX: usize = 256 << 10;

/// A socket whose waits can be stopped.
#[derive(Debug)]
pub struct Link(UnixStream);

/// Why bytes did not move.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkFailure {
    /// The caller's sign to stop was set.
    Stopped,
    /// The other process, or its communicator, has ended.
    PeerGone,
}

impl Link {
    pub fn new(socket: UnixStream) -> std::io::Result<Self> {
        socket.set_nonblocking(true)?;
        Ok(Self(socket))
    }

    /// Reads exactly so many bytes.
    pub fn read(&self, to: &mut [u8], is_stopped: &dyn Fn() -> bool) -> Result<(), LinkFailure> {
        let mut done = 0;
        while done < to.len() {
            let end = to.len().min(done + BYTES_MAX);
            done += self.step(libc::POLLIN, is_stopped, |mut socket| socket.read(&mut to[done..end]))?;
        }
        Ok(())
    }

    /// Writes all bytes.
    pub fn write(&self, from: &[u8], is_stopped: &dyn Fn() -> bool) -> Result<(), LinkFailure> {
        let mut done = 0;
        while done < from.len() {
            let end = from.len().min(done + BYTES_MAX);
            done += self.step(libc::POLLOUT, is_stopped, |mut socket| socket.write(&from[done..end]))?;
        }
        Ok(())
    }

    /// Makes one call when the socket is ready.
    fn step(
        &self,
        readiness: i16,
        is_stopped: &dyn Fn() -> bool,
        mut call: impl FnMut(&UnixStream) -> std::io::Result<usize>,
    ) -> Result<usize, LinkFailure> {
        loop {
            if is_stopped() {
                return Err(LinkFailure::Stopped);
            }
            match call(&self.0) {
                Ok(0) => return Err(LinkFailure::PeerGone),
                Ok(len) => return Ok(len),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    let mut wanted = libc::pollfd { fd: self.0.as_raw_fd(), events: readiness, revents: 0 };
                    // SAFETY: a plain system call on one descriptor.
                    unsafe { libc::poll(&raw mut wanted, 1, LOOK_MS) };
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return Err(LinkFailure::PeerGone),
            }
        }
    }

    /// Ends the link for both ranks.
    pub fn shut_down(&self) {
        // It fails if the other rank has done so.
        let _ = self.0.shutdown(std::net::Shutdown::Both);
    }
}
