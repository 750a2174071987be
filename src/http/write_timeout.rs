//! Wraps a stream. If the peer accepts too few bytes of a blocked write within the timeout, the write fails and the
//! connection ends.
//!
//! `connection_slots.rs` has the timeouts of reads. Begin at [`WriteTimeoutStream`].

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep};

use super::connection_slots::HttpConnectionState;

/// The minimum number of bytes that a peer must accept per timeout while a write is blocked.
const PROGRESS_MIN_BYTES: usize = 16 << 10;

/// A write that is blocked by the peer.
struct StalledWrite {
    until: Pin<Box<Sleep>>,
    /// Bytes that the peer has accepted since the write was blocked.
    accepted_bytes: usize,
}

/// A stream with a limit on the time for which the peer may block a write. A peer that accepts a few bytes
/// now and then counts as blocked.
pub(super) struct WriteTimeoutStream<S> {
    stream: S,
    connection: Arc<HttpConnectionState>,
    timeout: Duration,
    waiting: Option<StalledWrite>,
}

impl<S> WriteTimeoutStream<S> {
    pub fn new(stream: S, connection: Arc<HttpConnectionState>, timeout: Duration) -> Self {
        Self { stream, connection, timeout, waiting: None }
    }

    /// Records the result of a write of `offered` bytes and returns it.
    fn track_write_result(
        &mut self,
        cx: &mut Context<'_>,
        offered: usize,
        written: Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        match written {
            Poll::Ready(Ok(count)) => {
                self.connection.record_sent();
                if count == offered {
                    self.waiting = None;
                } else if let Some(waiting) = &mut self.waiting {
                    waiting.accepted_bytes += count;
                }
                Poll::Ready(Ok(count))
            }
            Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
            Poll::Pending => {
                let timeout = self.timeout;
                let waiting = self.waiting.get_or_insert_with(|| StalledWrite {
                    until: Box::pin(tokio::time::sleep(timeout)),
                    accepted_bytes: 0,
                });
                while waiting.until.as_mut().poll(cx).is_ready() {
                    if waiting.accepted_bytes < PROGRESS_MIN_BYTES {
                        let why = "the peer does not take what is sent to it";
                        return Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, why)));
                    }
                    waiting.accepted_bytes = 0;
                    waiting.until.as_mut().reset(Instant::now() + timeout);
                }
                Poll::Pending
            }
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for WriteTimeoutStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        room: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = room.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(cx, room);
        if room.filled().len() > before {
            self.connection.record_received();
        }
        read
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for WriteTimeoutStream<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.track_write_result(cx, bytes.len(), written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, slices);
        let offered = slices.iter().map(|slice| slice.len()).sum();
        self.track_write_result(cx, offered, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
