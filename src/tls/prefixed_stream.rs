//! A stream whose first bytes have already been read from the socket. Reads return these bytes first.
//!
//! Begin at [`PrefixedStream::new`].

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// A stream that first returns bytes which were already read.
#[derive(Debug)]
pub struct PrefixedStream<S> {
    early: Vec<u8>,
    given: usize,
    stream: S,
}

impl<S> PrefixedStream<S> {
    /// Returns `stream` with `early` before its own bytes.
    pub fn new(early: Vec<u8>, stream: S) -> Self {
        Self { early, given: 0, stream }
    }

    /// Returns the underlying stream.
    pub fn inner_stream(&self) -> &S {
        &self.stream
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for PrefixedStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        room: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        let left = this.early.get(this.given..).unwrap_or_default();
        if left.is_empty() {
            return Pin::new(&mut this.stream).poll_read(cx, room);
        }
        let taken = left.len().min(room.remaining());
        room.put_slice(left.get(..taken).unwrap_or_default());
        this.given += taken;
        if this.given == this.early.len() {
            (this.early, this.given) = (Vec::new(), 0);
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for PrefixedStream<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, slices)
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

#[cfg(test)]
mod tests {
    use tokio::io::AsyncReadExt as _;

    use super::*;

    #[tokio::test]
    async fn the_prefix_is_read_first() {
        let mut stream = PrefixedStream::new(b"abc".to_vec(), &b"def"[..]);
        let mut two = [0; 2];
        stream.read_exact(&mut two).await.unwrap();
        let mut rest = String::new();
        stream.read_to_string(&mut rest).await.unwrap();
        assert_eq!((&two, rest.as_str()), (b"ab", "cdef"));
    }
}
