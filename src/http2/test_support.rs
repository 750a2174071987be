//! A simulated socket, and a parser for the frames that were written to it. The tests and fuzz targets of HTTP/2
//! share this module.
//!
//! Begin at [`TestSocket`].

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use tokio::io::AsyncWrite;

use super::frame::{FRAME_HEADER_LEN, FrameHeader};
use super::{Http2Sender, OutputBuffer};

/// A socket that keeps what it accepts.
pub(super) struct TestSocket {
    pub(super) taken: Vec<u8>,
    /// The bytes that it accepts in one write.
    pub(super) max_write: usize,
    /// The bytes that it still accepts.
    pub(super) capacity_left: usize,
}

impl Default for TestSocket {
    fn default() -> Self {
        Self { taken: Vec::new(), max_write: usize::MAX, capacity_left: usize::MAX }
    }
}

impl AsyncWrite for TestSocket {
    fn poll_write(mut self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let count = bytes.len().min(self.max_write).min(self.capacity_left);
        if count == 0 && !bytes.is_empty() {
            return Poll::Pending;
        }
        self.capacity_left -= count;
        self.taken.extend_from_slice(&bytes[..count]);
        Poll::Ready(Ok(count))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

impl TestSocket {
    /// Sends as much of the output as the socket accepts; returns whether that is all.
    pub(super) fn accept_output(&mut self, output: &mut OutputBuffer) -> bool {
        match output.poll_send(&mut Context::from_waker(Waker::noop()), self) {
            Poll::Pending => false,
            Poll::Ready(sent) => {
                sent.expect("the socket never fails");
                true
            }
        }
    }
}

/// Sends all that there is to send, as to a peer that takes everything; returns the bytes.
pub(super) fn drain_output(sender: &mut Http2Sender) -> Vec<u8> {
    let mut socket = TestSocket::default();
    loop {
        sender.end_batch();
        assert!(socket.accept_output(&mut sender.output));
        sender.resume_sending();
        if sender.output.is_empty() && !sender.can_resume_sending() {
            return socket.taken;
        }
    }
}

/// Returns the frames of these bytes, which must be whole.
pub(super) fn parse_frames(mut bytes: &[u8]) -> Vec<(FrameHeader, Vec<u8>)> {
    let mut all = Vec::new();
    while let Some((head, rest)) = bytes.split_first_chunk::<FRAME_HEADER_LEN>() {
        let head = FrameHeader::parse(*head);
        let (payload, rest) = rest.split_at_checked(head.length).expect("only whole frames are sent");
        all.push((head, payload.to_vec()));
        bytes = rest;
    }
    assert!(bytes.is_empty(), "only whole frames are sent");
    all
}
