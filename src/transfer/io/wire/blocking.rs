//! A blocking wire for the handshake. One time limit covers the whole handshake, so a peer cannot extend it by
//! sending its bytes slowly.
//!
//! [`crate::session::handshake`] performs the handshake. Begin at [`BlockingWire::new`].

use std::io::{self, Read, Write};
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::traits::{Wire, WireError};
use crate::memory::{ReadView, WriteView};
use muster_clock as clock;

/// A wire whose reads and writes block, until a time limit.
pub struct BlockingWire<'a> {
    wire: &'a dyn Wire,
    until: Instant,
}

impl<'a> BlockingWire<'a> {
    /// Wraps a wire, with the time limit `until`.
    pub const fn new(wire: &'a dyn Wire, until: Instant) -> Self {
        Self { wire, until }
    }

    fn retry_until_ready<R>(
        &self,
        wanted: PollFlags,
        mut attempt: impl FnMut() -> Result<R, WireError>,
    ) -> io::Result<R> {
        loop {
            match attempt() {
                Err(WireError::Later) => {}
                outcome => return Ok(outcome?),
            }
            let left = self.until.saturating_duration_since(clock::monotonic());
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            let time = Timespec::try_from(left).map_err(|_| io::ErrorKind::TimedOut)?;
            let descriptor = self.wire.descriptor();
            match poll(&mut [PollFd::from_borrowed_fd(descriptor, wanted)], Some(&time)) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

impl Read for BlockingWire<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.retry_until_ready(PollFlags::IN, || {
            Ok(self.wire.receive(&mut [WriteView::of_slice(buf)])?.bytes)
        })
    }
}

impl Write for BlockingWire<'_> {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        self.retry_until_ready(PollFlags::OUT, || self.wire.send(&[ReadView::of_slice(buf)]))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
