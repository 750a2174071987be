//! Buffers, and which of their bytes are in use.
//!
//! It does not know what uses them: reservations say which bytes are read and written. Begin at [`Span::reserve`].
#![allow(unsafe_code, reason = "makes views of bytes, which reservations say who uses")]

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::mapping::OwnedMemory;
use super::pool::Pool;
use super::region::{Memory, MemoryRegion};
use super::view::{ReadView, WriteView};
use crate::base::error::MemoryError;
use crate::base::layout::Layout;

/// Where a buffer's bytes lie.
#[derive(Debug)]
pub(crate) enum Backing {
    Arena(Arc<Pool>),
    Foreign(Arc<MemoryRegion>),
}

/// A stretch of memory that transfers read and write. Clones are the same buffer.
///
/// Its contents are reached by [`read`](Buffer::read), [`write`](Buffer::write) and [`fill`](Buffer::fill), which
/// refuse while a transfer uses it in a way that would clash.
#[derive(Debug, Clone)]
pub struct Buffer(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    backing: Backing,
    start: usize,
    len: usize,
    usage: Mutex<Usage>,
}

/// Ranges in use now: few, so lists.
#[derive(Debug, Default)]
struct Usage {
    reads: Vec<(usize, usize)>,
    writes: Vec<(usize, usize)>,
    /// How many have the whole buffer to themselves and their transfers.
    claims: u32,
}

/// A buffer that belongs to the holder of this, and to transfers: programs do not reach its contents.
#[derive(Debug)]
pub struct Claim(Buffer);

impl Drop for Claim {
    fn drop(&mut self) {
        self.0.usage().claims -= 1;
    }
}

/// What a range is used for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    /// Reads it. Others may, too.
    Read,
    /// Writes it. Nothing else may use it.
    Write,
}

impl Buffer {
    pub(crate) fn new(backing: Backing, start: usize, len: usize) -> Self {
        Self(Arc::new(Inner { backing, start, len, usage: Mutex::default() }))
    }

    /// Makes a buffer of memory as it is, without copying it: a vector, a mapped file, memory that a device knows;
    /// whatever can give its bytes. Its owner lives until the last handle and the last transfer of the buffer are gone,
    /// and is dropped by whichever thread is the last. Peers on this host read it through the kernel, which is slower
    /// than an [`Arena`](crate::memory::Arena).
    #[must_use]
    pub fn foreign(owner: impl AsMut<[u8]> + Send + 'static) -> Self {
        let memory = OwnedMemory::new(owner);
        let len = memory.len();
        Self::new(Backing::Foreign(Arc::new(MemoryRegion::new(Memory::Foreign(memory)))), 0, len)
    }

    /// Returns its length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len
    }

    /// Returns whether it has none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.len == 0
    }

    /// Returns all of it.
    #[must_use]
    pub fn span(&self) -> Span {
        Span { buffer: self.clone(), start: 0, len: self.len(), layout: None }
    }

    /// Returns a range of it.
    ///
    /// # Errors
    /// If the range reaches beyond it.
    pub fn range(&self, range: Range<usize>) -> Result<Span, MemoryError> {
        if range.start > range.end || range.end > self.len() {
            return Err(MemoryError::OutOfRange { start: range.start, end: range.end, len: self.len() });
        }
        Ok(Span { buffer: self.clone(), start: range.start, len: range.end - range.start, layout: None })
    }

    /// Calls `with` with its contents.
    ///
    /// # Errors
    /// While a transfer writes any of it.
    pub fn read<R>(&self, with: impl FnOnce(&[u8]) -> R) -> Result<R, MemoryError> {
        let span = self.unclaimed()?;
        let _reserved = span.reserve(Use::Read)?;
        // SAFETY: they are reserved against writers until this returns.
        Ok(unsafe { span.read_view(0, span.len) }.read(with))
    }

    /// Calls `with` with its contents, to be changed.
    ///
    /// # Errors
    /// While a transfer uses any of it.
    pub fn write<R>(&self, with: impl FnOnce(&mut [u8]) -> R) -> Result<R, MemoryError> {
        let span = self.unclaimed()?;
        let _reserved = span.reserve(Use::Write)?;
        // SAFETY: they are reserved for this call alone.
        Ok(unsafe { span.write_view(0, span.len) }.write(with))
    }

    /// Sets every byte.
    ///
    /// # Errors
    /// While a transfer uses any of it.
    pub fn fill(&self, byte: u8) -> Result<(), MemoryError> {
        self.write(|bytes| bytes.fill(byte))
    }

    fn unclaimed(&self) -> Result<Span, MemoryError> {
        if self.usage().claims > 0 {
            return Err(MemoryError::Busy { start: 0, end: self.len() });
        }
        Ok(self.span())
    }

    /// Keeps programs from its contents, but not transfers.
    pub(crate) fn claim(&self) -> Claim {
        self.usage().claims += 1;
        Claim(self.clone())
    }

    pub(crate) fn region(&self) -> &Arc<MemoryRegion> {
        match &self.0.backing {
            Backing::Arena(arena) => &arena.region,
            Backing::Foreign(region) => region,
        }
    }

    /// Tells the handles apart for sorting.
    pub(crate) fn id(&self) -> usize {
        Arc::as_ptr(&self.0) as usize
    }

    fn usage(&self) -> MutexGuard<'_, Usage> {
        self.0.usage.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if let Backing::Arena(arena) = &self.backing {
            arena.give_back(self.start, self.len);
        }
    }
}

/// A range of a buffer.
#[derive(Debug, Clone)]
pub struct Span {
    buffer: Buffer,
    start: usize,
    len: usize,
    layout: Option<Layout>,
}

impl Span {
    /// Says what its bytes are. Both sides of a transfer have to say the same; a layout takes as many bytes as the span
    /// has.
    #[must_use]
    pub fn with_layout(mut self, layout: Layout) -> Self {
        self.layout = Some(layout);
        self
    }

    /// Returns what its bytes are: plain ones, unless something else was said.
    #[must_use]
    pub fn layout(&self) -> Layout {
        self.layout.clone().unwrap_or_else(|| Layout::bytes(self.len))
    }

    /// Returns the buffer.
    #[must_use]
    pub const fn buffer(&self) -> &Buffer {
        &self.buffer
    }

    /// Returns its first byte within the buffer.
    #[must_use]
    pub const fn start(&self) -> usize {
        self.start
    }

    /// Returns how many bytes.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Returns whether it has none.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns a view of `len` of its bytes from `start` on, and of those of the spans that [go on](Self::goes_on_in)
    /// after it.
    ///
    /// # Safety
    /// As [`ReadView::at`]: nothing writes these bytes as long as the view is used.
    pub(crate) unsafe fn read_view(&self, start: usize, len: usize) -> ReadView<'_> {
        // SAFETY: the buffer keeps its memory, and the caller answers for the bytes.
        unsafe { ReadView::at(self.buffer.region().base(), self.offset() + start, len) }
    }

    /// Returns a view to write `len` of its bytes from `start` on, and those of the spans that [go on](Self::goes_on_in)
    /// after it.
    ///
    /// # Safety
    /// As [`WriteView::at`]: nothing else in this process uses these bytes as long as the view is used.
    pub(crate) unsafe fn write_view(&self, start: usize, len: usize) -> WriteView<'_> {
        // SAFETY: as above.
        unsafe { WriteView::at(self.buffer.region().base(), self.offset() + start, len) }
    }

    /// Returns where it lies in this process, as a number that another process can name to the kernel.
    pub(crate) fn address(&self) -> u64 {
        self.buffer.region().base().number(self.offset())
    }

    /// Returns whether `next` begins in memory where this one ends.
    pub(crate) fn goes_on_in(&self, next: &Self) -> bool {
        Arc::ptr_eq(self.buffer.region(), next.buffer.region()) && self.offset() + self.len == next.offset()
    }

    /// Returns its first byte within the region.
    pub(crate) fn offset(&self) -> usize {
        self.buffer.0.start + self.start
    }

    /// Takes the range into use. A range without bytes clashes with nothing.
    pub(crate) fn reserve(&self, how: Use) -> Result<Reservation, MemoryError> {
        let (start, end) = (self.start, self.start + self.len);
        let clashes = |&(from, to): &(usize, usize)| from < end && start < to;
        let mut usage = self.buffer.usage();
        if self.len > 0 {
            if usage.writes.iter().any(clashes) || (how == Use::Write && usage.reads.iter().any(clashes)) {
                return Err(MemoryError::Busy { start, end });
            }
            match how {
                Use::Read => usage.reads.push((start, end)),
                Use::Write => usage.writes.push((start, end)),
            }
        }
        drop(usage);
        Ok(Reservation { buffer: self.buffer.clone(), range: (start, end), how })
    }
}

/// A range in use, until this is dropped.
#[derive(Debug)]
pub struct Reservation {
    buffer: Buffer,
    range: (usize, usize),
    how: Use,
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let mut usage = self.buffer.usage();
        let list = match self.how {
            Use::Read => &mut usage.reads,
            Use::Write => &mut usage.writes,
        };
        if let Some(at) = list.iter().rposition(|range| *range == self.range) {
            list.swap_remove(at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readers_share_and_writers_do_not() {
        let buffer = Buffer::foreign(vec![1; 100]);
        let (low, high) = (buffer.range(0..50).unwrap(), buffer.range(50..100).unwrap());
        let reading = low.reserve(Use::Read).unwrap();
        assert!(low.reserve(Use::Read).is_ok());
        assert_eq!(low.reserve(Use::Write).unwrap_err(), MemoryError::Busy { start: 0, end: 50 });
        let writing = high.reserve(Use::Write).unwrap();
        assert!(buffer.read(|_| ()).is_err(), "a writer is at work");
        drop(writing);
        assert!(buffer.read(|_| ()).is_ok());
        assert!(buffer.fill(0).is_err(), "a reader is at work");
        drop(reading);
        buffer.fill(3).unwrap();
        assert_eq!(buffer.read(|bytes| bytes.to_vec()).unwrap(), vec![3; 100]);
    }

    #[test]
    fn ranges_are_checked() {
        let buffer = Buffer::foreign(Vec::new());
        assert!(buffer.range(0..0).is_ok());
        assert!(buffer.range(0..1).is_err());
        #[expect(clippy::reversed_empty_ranges, reason = "that is the point")]
        let reversed = buffer.range(1..0);
        assert!(reversed.is_err());
    }
}
