//! Closes a connection whose peer violated the protocol, after the peer has received the reason and had time to
//! read it.
//!
//! If the server closed the socket while the peer is still sending, the peer's host would discard all data that the
//! peer has not read yet, including the reason. Begin at [`LingeringClose::poll_close`].

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::ReadBuf;
use tokio::time::{Sleep, sleep};

use super::connection_socket::ConnectionSocket;
use super::thread_buffers::with_thread_buffers;
use crate::http2::OutputBuffer;

/// The time that the peer has to read the reason.
const LINGER_TIME: Duration = Duration::from_secs(1);
/// The number of bytes that the peer may still send.
const LINGER_BYTES: usize = 4 << 20;

/// The closing state of a connection.
pub(super) struct LingeringClose {
    until: Pin<Box<Sleep>>,
    /// The number of bytes that are still read and discarded.
    left: usize,
    /// Whether the socket was closed for writing.
    is_shut: bool,
}

impl LingeringClose {
    pub(super) fn begin() -> Self {
        Self { until: Box::pin(sleep(LINGER_TIME)), left: LINGER_BYTES, is_shut: false }
    }

    /// Sends the output, and reads the remaining input until the peer closes or the time is over. Adds the bytes
    /// that it reads to `received`.
    pub(super) fn poll_close<T: ConnectionSocket>(
        &mut self,
        cx: &mut Context<'_>,
        socket: &mut T,
        output: &mut OutputBuffer,
        received: &mut u64,
    ) -> Poll<()> {
        if self.until.as_mut().poll(cx).is_ready() {
            socket.send_close_notify(cx);
            return Poll::Ready(());
        }
        if !self.is_shut {
            match output.poll_send(cx, socket) {
                Poll::Pending => {}
                Poll::Ready(Err(_)) => return Poll::Ready(()),
                Poll::Ready(Ok(())) => match Pin::new(&mut *socket).poll_shutdown(cx) {
                    Poll::Pending => {}
                    Poll::Ready(Err(_)) => return Poll::Ready(()),
                    Poll::Ready(Ok(())) => self.is_shut = true,
                },
            }
        }
        with_thread_buffers(|buffers| {
            loop {
                let mut room = ReadBuf::new(&mut buffers.room);
                match Pin::new(&mut *socket).poll_read(cx, &mut room) {
                    Poll::Pending => return Poll::Pending,
                    Poll::Ready(Err(_)) => return Poll::Ready(()),
                    Poll::Ready(Ok(())) => {
                        let bytes = room.filled().len();
                        *received += bytes as u64;
                        self.left = self.left.saturating_sub(bytes);
                        if bytes == 0 || self.left == 0 {
                            return Poll::Ready(());
                        }
                    }
                }
            }
        })
    }
}
