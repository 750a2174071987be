//! Buffers, and the reservations of their bytes.
//!
//! A reservation says which bytes are read or written, not by whom. Begin at [`Span::reserve`].
#![allow(unsafe_code, reason = "makes views of bytes, which reservations say who uses")]

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::mapping::OwnedMemory;
use super::pool::Pool;
use super::region::{Memory, MemoryRegion};
use super::view::{ReadView, WriteView};
use crate::base::error::MemoryError;
use crate::base::layout::Layout;

/// The memory that holds a buffer's bytes.
#[derive(Debug)]
pub(crate) enum Backing {
    Arena(Arc<Pool>),
    Foreign(Arc<MemoryRegion>),
}

/// A range of memory that transfers read and write. Clones are the same buffer.
///
/// [`read`](Buffer::read), [`write`](Buffer::write) and [`fill`](Buffer::fill) access its contents. They
/// return an error while a transfer uses the buffer in a conflicting way.
#[derive(Debug, Clone)]
pub struct Buffer(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    backing: Backing,
    start: usize,
    len: usize,
    usage: Mutex<Usage>,
}

/// The ranges that are reserved now: few, hence lists.
#[derive(Debug, Default)]
struct Usage {
    reads: Vec<(usize, usize)>,
    writes: Vec<(usize, usize)>,
    /// The number of [`Claim`]s.
    claims: u32,
}

/// A claim on a whole buffer: while it lives, only its holder and transfers access the contents, programs do
/// not.
#[derive(Debug)]
pub struct Claim(Buffer);

impl Drop for Claim {
    fn drop(&mut self) {
        self.0.usage().claims -= 1;
    }
}

/// The kind of access that a reservation allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    /// Reads the range; other readers may, too.
    Read,
    /// Writes the range; nothing else may access it.
    Write,
}

impl Buffer {
    pub(crate) fn new(backing: Backing, start: usize, len: usize) -> Self {
        Self(Arc::new(Inner { backing, start, len, usage: Mutex::default() }))
    }

    /// Creates a buffer over existing memory without a copy: a vector, a mapped file, memory that a device
    /// knows, or anything else that lends its bytes. The engine keeps `owner` until the last handle and the
    /// last transfer of the buffer are gone; the thread that releases the last one drops it. Peers on this
    /// host read such memory through the kernel, which is slower than an [`Arena`](crate::memory::Arena).
    #[must_use]
    pub fn foreign(owner: impl AsMut<[u8]> + Send + 'static) -> Self {
        let memory = OwnedMemory::new(owner);
        let len = memory.len();
        Self::new(Backing::Foreign(Arc::new(MemoryRegion::new(Memory::Foreign(memory)))), 0, len)
    }

    /// Returns the length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len
    }

    /// Returns whether the length is zero.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.len == 0
    }

    /// Returns the span of the whole buffer.
    #[must_use]
    pub fn span(&self) -> Span {
        Span { buffer: self.clone(), start: 0, len: self.len(), layout: None }
    }

    /// Returns the span of a range of the buffer.
    ///
    /// # Errors
    /// Returns [`MemoryError::OutOfRange`] if the range reaches beyond the buffer.
    pub fn range(&self, range: Range<usize>) -> Result<Span, MemoryError> {
        if range.start > range.end || range.end > self.len() {
            return Err(MemoryError::OutOfRange { start: range.start, end: range.end, len: self.len() });
        }
        Ok(Span { buffer: self.clone(), start: range.start, len: range.end - range.start, layout: None })
    }

    /// Calls `with` with the contents.
    ///
    /// # Errors
    /// Returns [`MemoryError::Busy`] while a transfer writes any of the buffer.
    pub fn read<R>(&self, with: impl FnOnce(&[u8]) -> R) -> Result<R, MemoryError> {
        let span = self.unclaimed()?;
        let _reserved = span.reserve(Use::Read)?;
        // SAFETY: the bytes are reserved against writers until this returns.
        Ok(unsafe { span.read_view(0, span.len) }.read(with))
    }

    /// Calls `with` with the contents, which it may change.
    ///
    /// # Errors
    /// Returns [`MemoryError::Busy`] while a transfer uses any of the buffer.
    pub fn write<R>(&self, with: impl FnOnce(&mut [u8]) -> R) -> Result<R, MemoryError> {
        let span = self.unclaimed()?;
        let _reserved = span.reserve(Use::Write)?;
        // SAFETY: the bytes are reserved for this call alone.
        Ok(unsafe { span.write_view(0, span.len) }.write(with))
    }

    /// Sets every byte to `byte`.
    ///
    /// # Errors
    /// Returns [`MemoryError::Busy`] while a transfer uses any of the buffer.
    pub fn fill(&self, byte: u8) -> Result<(), MemoryError> {
        self.write(|bytes| bytes.fill(byte))
    }

    fn unclaimed(&self) -> Result<Span, MemoryError> {
        if self.usage().claims > 0 {
            return Err(MemoryError::Busy { start: 0, end: self.len() });
        }
        Ok(self.span())
    }

    /// Claims the buffer: programs cannot access its contents while the claim lives, transfers can.
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

    /// Returns a number that identifies the buffer within the process, for sorting.
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
    /// Sets the layout of the span's bytes. Both sides of a transfer must set the same one, and its size must
    /// be the span's.
    #[must_use]
    pub fn with_layout(mut self, layout: Layout) -> Self {
        self.layout = Some(layout);
        self
    }

    /// Returns the layout; plain bytes if none was set.
    #[must_use]
    pub fn layout(&self) -> Layout {
        self.layout.clone().unwrap_or_else(|| Layout::bytes(self.len))
    }

    /// Returns the buffer.
    #[must_use]
    pub const fn buffer(&self) -> &Buffer {
        &self.buffer
    }

    /// Returns the index of the first byte within the buffer.
    #[must_use]
    pub const fn start(&self) -> usize {
        self.start
    }

    /// Returns the length in bytes.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the length is zero.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns a view of `len` bytes from `start` on. It may reach into spans that
    /// [continue](Self::goes_on_in) this one in memory.
    ///
    /// # Safety
    /// As of [`ReadView::at`]: nothing writes these bytes while the view is used.
    pub(crate) unsafe fn read_view(&self, start: usize, len: usize) -> ReadView<'_> {
        // SAFETY: the buffer keeps its memory mapped, and the caller guarantees the access.
        unsafe { ReadView::at(self.buffer.region().base(), self.offset() + start, len) }
    }

    /// Returns a view to write `len` bytes from `start` on. It may reach into spans that
    /// [continue](Self::goes_on_in) this one in memory.
    ///
    /// # Safety
    /// As of [`WriteView::at`]: nothing else in this process uses these bytes while the view is used.
    pub(crate) unsafe fn write_view(&self, start: usize, len: usize) -> WriteView<'_> {
        // SAFETY: as above.
        unsafe { WriteView::at(self.buffer.region().base(), self.offset() + start, len) }
    }

    /// Returns the address of the first byte as a number, by which a peer names it to the kernel.
    pub(crate) fn address(&self) -> u64 {
        self.buffer.region().base().number(self.offset())
    }

    /// Returns whether `next` begins in memory where this span ends.
    pub(crate) fn goes_on_in(&self, next: &Self) -> bool {
        Arc::ptr_eq(self.buffer.region(), next.buffer.region()) && self.offset() + self.len == next.offset()
    }

    /// Returns the index of the first byte within the region.
    pub(crate) fn offset(&self) -> usize {
        self.buffer.0.start + self.start
    }

    /// Reserves the range for this access. An empty range conflicts with nothing.
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

/// A reservation of a range, which ends when it is dropped.
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
