//! The bytes that wait to be written to the socket. Small parts are copied together; large parts are shared and not
//! copied.
//!
//! `sender.rs` handles frames and windows. Begin at [`OutputBuffer::poll_send`].

use std::cell::Cell;
use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes};
use tokio::io::AsyncWrite;

/// The length beyond which a part is shared and not copied.
pub(super) const COPY_MAX: usize = 4 << 10;
/// The number of slices in one write.
const SLICES: usize = 64;
/// The size beyond which an empty buffer is freed and not kept.
const SPARE_BYTES: usize = 256 << 10;
/// The number of sent bytes from which on the others are moved to the front.
const COMPACT_MIN: usize = 16 << 10;

thread_local! {
    /// A buffer of the thread: only a connection with output needs one, and only for the moment.
    static SPARE: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

#[derive(Debug)]
enum OutputSegment {
    /// This number of the gathered bytes.
    Gathered(usize),
    Shared(Bytes),
}

impl OutputSegment {
    /// Returns the bytes, which begin at `place` if they are gathered.
    fn bytes<'a>(&'a self, gathered: &'a [u8], place: usize) -> &'a [u8] {
        match self {
            Self::Gathered(length) => gathered.get(place..place + length).unwrap_or_default(),
            Self::Shared(part) => part,
        }
    }
}

/// The outgoing bytes of one connection.
#[derive(Debug, Default)]
pub(crate) struct OutputBuffer {
    gathered: Vec<u8>,
    /// The number of gathered bytes that are sent.
    sent_prefix: usize,
    pieces: VecDeque<OutputSegment>,
    length: usize,
    /// The number of bytes sent since [`Self::take_sent_bytes`] was last called, and before that.
    sent: u64,
    sent_before: u64,
}

impl OutputBuffer {
    /// Returns the buffer of a connection of which `sent` bytes were sent, and `waiting` are not.
    pub(super) fn with_waiting(sent: u64, waiting: &[u8]) -> Self {
        let mut output = Self { sent_before: sent, ..Self::default() };
        if !waiting.is_empty() {
            output.write_with(|gathered| gathered.extend_from_slice(waiting));
        }
        output
    }

    /// Returns the waiting bytes after the first `skipped` of them, in parts.
    pub(crate) fn waiting_parts(&self, mut skipped: usize) -> impl Iterator<Item = &[u8]> + Clone {
        let mut place = self.sent_prefix;
        self.pieces.iter().filter_map(move |piece| {
            let bytes = piece.bytes(&self.gathered, place);
            if let OutputSegment::Gathered(length) = piece {
                place += length;
            }
            let part = bytes.get(skipped..).filter(|part| !part.is_empty());
            skipped = skipped.saturating_sub(bytes.len());
            part
        })
    }

    /// Returns the number of waiting bytes.
    pub(crate) fn len(&self) -> usize {
        self.length
    }

    /// Returns the number of waiting bytes in this connection's own memory.
    pub(crate) fn waiting_copied_bytes(&self) -> usize {
        self.gathered.len() - self.sent_prefix
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Returns the number of bytes that the socket has accepted since the last call.
    pub(crate) fn take_sent_bytes(&mut self) -> u64 {
        self.sent_before += self.sent;
        std::mem::take(&mut self.sent)
    }

    /// Returns the offset of the first waiting byte in the whole output.
    pub(crate) fn offset_of_first_waiting_byte(&self) -> u64 {
        self.sent_before + self.sent
    }

    /// Returns the offset after the last waiting byte.
    pub(crate) fn offset_after_last_waiting_byte(&self) -> u64 {
        self.offset_of_first_waiting_byte() + self.length as u64
    }

    /// Appends the bytes that `write` writes.
    pub(super) fn write_with(&mut self, write: impl FnOnce(&mut Vec<u8>)) {
        if self.gathered.capacity() == 0 {
            self.gathered = SPARE.take();
        }
        let before = self.gathered.len();
        write(&mut self.gathered);
        let added = self.gathered.len() - before;
        self.length += added;
        match self.pieces.back_mut() {
            Some(OutputSegment::Gathered(length)) => *length += added,
            _ => self.pieces.push_back(OutputSegment::Gathered(added)),
        }
    }

    /// Appends a part.
    pub(super) fn append(&mut self, part: &Bytes) {
        if part.len() <= COPY_MAX {
            return self.write_with(|gathered| gathered.extend_from_slice(part));
        }
        self.length += part.len();
        self.pieces.push_back(OutputSegment::Shared(part.clone()));
    }

    /// Sends as much as the socket accepts; ready once everything is sent.
    pub(crate) fn poll_send<T: AsyncWrite + Unpin>(
        &mut self,
        cx: &mut Context<'_>,
        socket: &mut T,
    ) -> Poll<io::Result<()>> {
        while !self.is_empty() {
            let sent = ready!(self.poll_write(cx, socket))?;
            if sent == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.discard_sent_bytes(sent);
        }
        // TLS may hold accepted bytes back. For a plain socket the flush does nothing.
        Pin::new(socket).poll_flush(cx)
    }

    fn poll_write<T: AsyncWrite + Unpin>(
        &self,
        cx: &mut Context<'_>,
        socket: &mut T,
    ) -> Poll<io::Result<usize>> {
        if self.pieces.len() == 1
            && let Some(only) = self.pieces.front()
        {
            return Pin::new(socket).poll_write(cx, only.bytes(&self.gathered, self.sent_prefix));
        }
        let mut place = self.sent_prefix;
        let mut slices = [IoSlice::new(&[]); SLICES];
        let mut count = 0;
        for (slice, piece) in slices.iter_mut().zip(&self.pieces) {
            *slice = IoSlice::new(piece.bytes(&self.gathered, place));
            if let OutputSegment::Gathered(length) = piece {
                place += length;
            }
            count += 1;
        }
        Pin::new(socket).poll_write_vectored(cx, slices.get(..count).unwrap_or_default())
    }

    fn discard_sent_bytes(&mut self, mut sent: usize) {
        self.length = self.length.saturating_sub(sent);
        self.sent += sent as u64;
        while let Some(piece) = self.pieces.front_mut() {
            let length = match piece {
                OutputSegment::Gathered(length) => *length,
                OutputSegment::Shared(part) => part.len(),
            };
            let taken = sent.min(length);
            sent -= taken;
            if let OutputSegment::Gathered(_) = piece {
                self.sent_prefix += taken;
            }
            if taken < length {
                match piece {
                    OutputSegment::Gathered(left) => *left -= taken,
                    OutputSegment::Shared(part) => part.advance(taken),
                }
                break;
            }
            self.pieces.pop_front();
            if sent == 0 {
                break;
            }
        }
        if self.pieces.is_empty() {
            self.return_buffer_to_thread();
        } else if self.sent_prefix >= COMPACT_MIN && self.sent_prefix >= self.gathered.len() / 2 {
            // Otherwise a peer that never takes everything would make the server keep all that it ever sent.
            // Each byte is moved at most once for each byte that was sent.
            self.gathered.drain(..self.sent_prefix);
            self.sent_prefix = 0;
            if self.gathered.capacity() > SPARE_BYTES && self.gathered.len() < SPARE_BYTES / 4 {
                self.gathered.shrink_to(SPARE_BYTES / 2);
            }
        }
    }

    /// Returns the empty buffer to the thread.
    fn return_buffer_to_thread(&mut self) {
        let mut gathered = std::mem::take(&mut self.gathered);
        self.sent_prefix = 0;
        gathered.clear();
        if gathered.capacity() <= SPARE_BYTES {
            SPARE.set(gathered);
        }
        if self.pieces.capacity() > 16 {
            self.pieces = VecDeque::new();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::test_support::TestSocket;
    use super::*;

    #[test]
    fn output_is_complete_and_in_order_at_any_write_size() {
        for max_write in [1, 7, 4096, 1 << 20] {
            let mut output = OutputBuffer::default();
            let mut expected = Vec::new();
            let large = Bytes::from((0..COPY_MAX * 2).map(|n| n as u8).collect::<Vec<_>>());
            for round in 0..100_u8 {
                output.write_with(|to| to.extend_from_slice(&[round; 5]));
                expected.extend_from_slice(&[round; 5]);
                let part = large.slice(..if round % 7 == 0 { large.len() } else { usize::from(round) });
                output.append(&part);
                expected.extend_from_slice(&part);
            }
            assert_eq!(output.len(), expected.len());
            let mut socket = TestSocket { max_write, ..TestSocket::default() };
            assert!(socket.accept_output(&mut output));
            assert!(output.is_empty() && output.gathered.capacity() == 0 && socket.taken == expected);
        }
    }

    #[test]
    fn sent_bytes_are_released_while_others_wait() {
        let mut output = OutputBuffer::default();
        output.write_with(|to| to.resize(1000, 0));
        let mut largest = 0;
        for _ in 0..20_000 {
            output.write_with(|to| to.resize(to.len() + 1000, 1));
            output.discard_sent_bytes(1000);
            largest = largest.max(output.gathered.len());
        }
        assert_eq!(output.len(), 1000);
        assert!(largest <= 4 * COMPACT_MIN, "{largest} bytes are kept for 1,000 that wait");
    }
}
