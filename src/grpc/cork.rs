//! A socket that gathers what is written to it until it is told to send.
//!
//! HTTP/2 flushes whenever it is driven. While a connection works through a batch of calls it is
//! driven once a call, which would cost one system call an answer. Behind a cork it costs one a batch.

use std::cell::Cell;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// How much is gathered at most before it is sent in any case.
const GATHERED: usize = 64 << 10;

thread_local! {
    /// Room to gather in: only a connection that has something to send needs it, and then only
    /// for the moment.
    static SPARE: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

struct State<T> {
    socket: T,
    corked: bool,
    gathered: Vec<u8>,
    sent: usize,
    end: Option<End>,
    /// The first byte that the peer sent.
    first: Option<u8>,
    /// Bytes that came and went and were not asked about yet.
    moved: (u64, u64),
}

/// How the peer's side of a socket came to its end.
#[derive(Debug, Clone)]
pub(super) enum End {
    /// In good order.
    Finished,
    /// With an error.
    Failed(io::ErrorKind, String),
}

impl End {
    fn of(error: &io::Error) -> Self {
        Self::Failed(error.kind(), error.to_string())
    }
}

/// HTTP/2's side of the socket.
pub(super) struct Corked<T>(Arc<Mutex<State<T>>>);

/// The connection's side of the socket.
pub(super) struct Cork<T>(Arc<Mutex<State<T>>>);

/// Puts a cork on `socket`; it is not closed yet.
pub(super) fn cork<T>(socket: T) -> (Corked<T>, Cork<T>) {
    let state =
        State { socket, corked: false, gathered: Vec::new(), sent: 0, end: None, first: None, moved: (0, 0) };
    let state = Arc::new(Mutex::new(state));
    (Corked(Arc::clone(&state)), Cork(state))
}

fn lock<T>(state: &Mutex<State<T>>) -> MutexGuard<'_, State<T>> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<T: AsyncWrite + Unpin> Cork<T> {
    /// Closes the cork: from now on only [`Cork::poll_send`] sends, unless very much is gathered.
    pub(super) fn close(&self) {
        lock(&self.0).corked = true;
    }

    /// The first byte that the peer sent.
    pub(super) fn first(&self) -> Option<u8> {
        lock(&self.0).first
    }

    /// Sends what is gathered.
    pub(super) fn poll_send(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        lock(&self.0).poll_send(cx)
    }

    /// How many bytes came and went since this was last asked.
    pub(super) fn moved(&self) -> (u64, u64) {
        std::mem::take(&mut lock(&self.0).moved)
    }

    /// The socket itself, for its settings.
    pub(super) fn socket(&self, look: impl FnOnce(&T)) {
        look(&lock(&self.0).socket);
    }

    /// How the socket ended, if it did.
    pub(super) fn end(&self) -> Option<End> {
        lock(&self.0).end.clone()
    }
}

impl<T: AsyncWrite + Unpin> State<T> {
    fn poll_send(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.gathered.is_empty() {
            return Poll::Ready(Ok(()));
        }
        while let Some(rest) = self.gathered.get(self.sent..).filter(|rest| !rest.is_empty()) {
            match ready!(Pin::new(&mut self.socket).poll_write(cx, rest)) {
                Ok(0) => return self.note(Err(io::ErrorKind::WriteZero.into())),
                Ok(sent) => {
                    self.sent += sent;
                    self.moved.1 += sent as u64;
                }
                Err(error) => return self.note(Err(error)),
            }
        }
        self.sent = 0;
        self.gathered.clear();
        SPARE.set(std::mem::take(&mut self.gathered));
        Poll::Ready(Ok(()))
    }

    /// Gathers `length` bytes from `parts`, if that is to be done with so many.
    fn gather<'a>(&mut self, length: usize, parts: impl Iterator<Item = &'a [u8]>) -> bool {
        if !self.corked || self.gathered.len() + length > GATHERED {
            return false;
        }
        if self.gathered.capacity() == 0 {
            self.gathered = SPARE.take();
        }
        for part in parts {
            self.gathered.extend_from_slice(part);
        }
        true
    }

    fn note<R>(&mut self, result: io::Result<R>) -> Poll<io::Result<R>> {
        if let Err(error) = &result {
            self.end.get_or_insert(End::of(error));
        }
        Poll::Ready(result)
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for Corked<T> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let mut state = lock(&self.0);
        let before = buf.filled().len();
        let result = ready!(Pin::new(&mut state.socket).poll_read(cx, buf));
        match &result {
            Ok(()) if buf.filled().len() == before && buf.remaining() > 0 => {
                state.end.get_or_insert(End::Finished);
            }
            Ok(()) => {
                state.moved.0 += (buf.filled().len() - before) as u64;
                if state.first.is_none() {
                    state.first = buf.filled().get(before).copied();
                }
            }
            Err(error) => {
                state.end.get_or_insert(End::of(error));
            }
        }
        Poll::Ready(result)
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Corked<T> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let mut state = lock(&self.0);
        if state.gather(buf.len(), std::iter::once(buf)) {
            return Poll::Ready(Ok(buf.len()));
        }
        ready!(state.poll_send(cx))?;
        let result = ready!(Pin::new(&mut state.socket).poll_write(cx, buf));
        state.moved.1 += *result.as_ref().unwrap_or(&0) as u64;
        state.note(result)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let mut state = lock(&self.0);
        let length = bufs.iter().map(|buf| buf.len()).sum();
        if state.gather(length, bufs.iter().map(|buf| &**buf)) {
            return Poll::Ready(Ok(length));
        }
        ready!(state.poll_send(cx))?;
        let result = ready!(Pin::new(&mut state.socket).poll_write_vectored(cx, bufs));
        state.moved.1 += *result.as_ref().unwrap_or(&0) as u64;
        state.note(result)
    }

    fn is_write_vectored(&self) -> bool {
        lock(&self.0).socket.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut state = lock(&self.0);
        if state.corked { Poll::Ready(Ok(())) } else { Pin::new(&mut state.socket).poll_flush(cx) }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut state = lock(&self.0);
        ready!(state.poll_send(cx))?;
        Pin::new(&mut state.socket).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use super::*;

    struct Writes(Vec<Vec<u8>>);

    impl AsyncWrite for Writes {
        fn poll_write(mut self: Pin<&mut Self>, _: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
            self.0.push(buf.to_vec());
            Poll::Ready(Ok(buf.len()))
        }
        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }
        fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }
    }

    #[test]
    fn small_writes_leave_together_and_in_order() {
        let mut cx = Context::from_waker(Waker::noop());
        let (mut corked, handle) = cork(Writes(Vec::new()));
        let mut write = |bytes: &[u8]| {
            assert!(
                matches!(Pin::new(&mut corked).poll_write(&mut cx, bytes), Poll::Ready(Ok(n)) if n == bytes.len())
            );
            assert!(matches!(Pin::new(&mut corked).poll_flush(&mut cx), Poll::Ready(Ok(()))));
        };
        write(b"open");
        handle.close();
        write(b"a");
        write(b"b");
        let mut cx = Context::from_waker(Waker::noop());
        assert!(matches!(handle.poll_send(&mut cx), Poll::Ready(Ok(()))));
        write(b"c");
        let big = vec![7; GATHERED];
        write(&big);
        let writes = std::mem::take(&mut lock(&handle.0).socket.0);
        assert_eq!(writes, [b"open".to_vec(), b"ab".to_vec(), b"c".to_vec(), big]);
    }
}
