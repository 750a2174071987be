//! Buffers, and the reservations of their bytes.
//!
//! A *reservation* records which bytes are read or written, but not by which transfer. An *export* records that a
//! program keeps the address of the bytes, for example in an array that shares the memory. Until the export is
//! dropped, transfers may read the buffer, and nothing may begin to write it. A *claim* keeps programs from the
//! contents of a buffer while a plan uses it. Begin at [`Span::reserve`].
#![allow(unsafe_code, reason = "makes views of bytes, which reservations say who uses")]

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use muster_gpu::{DeviceMemory, Gpu};

use super::device_copy::{read_device_bytes, write_device_bytes};
use super::free_ranges::FreeRanges;
use super::mapping::OwnedMemory;
use super::region::{MemoryRegion, RegionMemory};
use super::view::{ReadView, WriteView};
use crate::base::error::MemoryError;
use crate::base::layout::BufferLayout;

/// The memory that holds a buffer's bytes.
#[derive(Debug)]
pub(crate) enum Backing {
    Arena(Arc<FreeRanges>),
    Foreign(Arc<MemoryRegion>),
}

/// A range of memory that transfers read and write. Clones are the same buffer.
///
/// [`with_bytes`](Buffer::with_bytes), [`with_bytes_mut`](Buffer::with_bytes_mut) and [`fill`](Buffer::fill) access
/// its contents. They return an error while a transfer uses the buffer in a conflicting way.
#[derive(Debug, Clone)]
pub struct Buffer(Arc<BufferInner>);

#[derive(Debug)]
struct BufferInner {
    backing: Backing,
    start: usize,
    len: usize,
    usage: Mutex<ReservedAccess>,
}

/// The ranges that are reserved now: few, hence lists.
#[derive(Debug, Default)]
struct ReservedAccess {
    reads: Vec<(usize, usize)>,
    writes: Vec<(usize, usize)>,
    /// The number of [`BufferClaim`]s.
    claims: u32,
    /// The number of claims that were abandoned.
    abandoned: u32,
    /// The number of [`BufferExport`]s.
    exports: u32,
}

/// A claim on a whole buffer: while it lives, only its holder and transfers access the contents, programs do
/// not.
#[derive(Debug)]
pub struct BufferClaim {
    buffer: Buffer,
    is_abandoned: AtomicBool,
}

/// The address of a whole buffer in the hands of a program. It keeps the memory. While it lives, transfers may
/// read the buffer, and nothing may write it through the engine. Any thread may drop it.
#[derive(Debug)]
pub struct BufferExport(Buffer);

impl BufferExport {
    /// Returns the address of the first byte, in host memory or in that of the buffer's GPU. An empty buffer has an address
    /// without meaning.
    #[must_use]
    pub fn address(&self) -> *mut u8 {
        if let Some(address) = self.0.device_address() {
            return std::ptr::without_provenance_mut(usize::try_from(address).unwrap_or_default());
        }
        self.0.region().base().pointer_at(self.0.0.start)
    }
}

impl Drop for BufferExport {
    fn drop(&mut self) {
        self.0.lock_reserved_access().exports -= 1;
    }
}

impl BufferClaim {
    /// Gives the claim up while a device may still use the buffer: until the claim is dropped, nothing else may, transfers
    /// neither.
    pub(crate) fn abandon(&self) {
        if !self.is_abandoned.swap(true, Ordering::AcqRel) {
            self.buffer.lock_reserved_access().abandoned += 1;
        }
    }
}

impl Drop for BufferClaim {
    fn drop(&mut self) {
        let mut usage = self.buffer.lock_reserved_access();
        usage.claims -= 1;
        usage.abandoned -= u32::from(*self.is_abandoned.get_mut());
    }
}

/// The kind of access that a reservation allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AccessKind {
    /// Reads the range; other readers may, too.
    Read,
    /// Writes the range; nothing else may access it.
    Write,
}

impl Buffer {
    pub(crate) fn from_backing(backing: Backing, start: usize, len: usize) -> Self {
        Self(Arc::new(BufferInner { backing, start, len, usage: Mutex::default() }))
    }

    /// Creates a buffer over existing memory without a copy: a vector, a mapped file, memory that a device
    /// knows, or anything else that lends its bytes. The engine keeps `owner` until the last handle and the
    /// last transfer of the buffer are gone; the thread that releases the last one drops it. Peers on this
    /// host read such memory through the kernel, which is slower than an [`Arena`](crate::memory::Arena).
    #[must_use]
    pub fn foreign(owner: impl AsMut<[u8]> + Send + 'static) -> Self {
        let memory = OwnedMemory::from_owner(owner);
        let len = memory.len();
        Self::from_backing(
            Backing::Foreign(Arc::new(MemoryRegion::new(RegionMemory::Foreign(memory)))),
            0,
            len,
        )
    }

    /// Creates a buffer over existing memory that is only read: a transfer may send it and not receive into it.
    /// The engine drops `owner` once, when the last handle and the last transfer of the buffer are gone, on the
    /// thread that releases the last one. So its `Drop` must neither wait nor take a lock that a thread holds
    /// while it calls the engine.
    ///
    /// # Errors
    /// Returns [`MemoryError::Foreign`] if the address is null, not a multiple of `align`, or the memory would
    /// reach beyond the address space. An empty buffer may have any address.
    ///
    /// # Safety
    /// Until `owner` is dropped, the `len` bytes at `address` must be mapped, and nothing may write them while a
    /// transfer of the buffer is in flight.
    pub unsafe fn read_only(
        address: *const u8,
        len: usize,
        align: usize,
        owner: Box<dyn Send>,
    ) -> Result<Self, MemoryError> {
        // SAFETY: the caller guarantees the memory.
        let memory = unsafe { OwnedMemory::read_only(address, len, align, owner)? };
        Ok(Self::from_backing(
            Backing::Foreign(Arc::new(MemoryRegion::new(RegionMemory::Foreign(memory)))),
            0,
            len,
        ))
    }

    /// Creates a buffer of memory of a GPU: a part of a program's arrays, or memory that was allocated for it. The host
    /// never touches its bytes. [`Arena::on_gpu`](crate::memory::Arena::on_gpu) allocates many
    /// buffers from one range.
    #[must_use]
    pub fn on_device(memory: DeviceMemory) -> Self {
        let len = memory.len();
        let region = Arc::new(MemoryRegion::new(RegionMemory::Device(memory)));
        Self::from_backing(Backing::Foreign(region), 0, len)
    }

    /// Returns the address of the first byte in the memory of its GPU; none for host memory. Kernels and copies of the
    /// program may use it while no transfer does.
    #[must_use]
    pub fn device_address(&self) -> Option<u64> {
        Some(self.region().device()?.address() + self.0.start as u64)
    }

    /// Returns the GPU whose memory it is; none for host memory.
    #[must_use]
    pub fn gpu(&self) -> Option<&Gpu> {
        self.region().device().map(DeviceMemory::gpu)
    }

    /// Checks that the host can touch the bytes.
    fn check_in_host_memory(&self) -> Result<(), MemoryError> {
        match self.gpu() {
            Some(gpu) => Err(MemoryError::OnDevice { gpu: gpu.ordinal() }),
            None => Ok(()),
        }
    }

    /// Returns whether transfers may only read it.
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        !self.region().is_writable()
    }

    /// Hands the address of the contents to a program, for as long as the export lives.
    ///
    /// # Errors
    /// Returns [`MemoryError::Busy`] while a transfer writes any of the buffer, or a plan uses it, and
    /// [`MemoryError::ReadOnly`] for memory that is only read.
    pub fn export(&self) -> Result<BufferExport, MemoryError> {
        self.check_not_read_only()?;
        let mut usage = self.lock_reserved_access();
        if usage.claims > 0 || !usage.writes.is_empty() {
            return Err(MemoryError::Busy { start: 0, end: self.len() });
        }
        usage.exports += 1;
        drop(usage);
        Ok(BufferExport(self.clone()))
    }

    /// Hands the address out while a transfer writes the buffer, to a caller that does not show the contents before
    /// the transfer is complete. None if no transfer writes it now: then [`export`](Self::export) is for it.
    #[must_use]
    pub fn export_while_written(&self) -> Option<BufferExport> {
        let mut usage = self.lock_reserved_access();
        if usage.claims > 0 || usage.writes.is_empty() {
            return None;
        }
        usage.exports += 1;
        drop(usage);
        Some(BufferExport(self.clone()))
    }

    /// Returns the number of exports that live.
    #[must_use]
    pub fn exports(&self) -> u32 {
        self.lock_reserved_access().exports
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
    pub fn full_span(&self) -> Span {
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
    /// Returns [`MemoryError::Busy`] while a transfer writes any of the buffer, and [`MemoryError::OnDevice`] for memory of
    /// a GPU.
    pub fn with_bytes<R>(&self, with: impl FnOnce(&[u8]) -> R) -> Result<R, MemoryError> {
        let span = self.span_if_unclaimed()?;
        let _reserved = span.reserve(AccessKind::Read)?;
        // SAFETY: the bytes are reserved against writers until this returns.
        Ok(unsafe { span.read_view_unchecked(0, span.len) }.with_bytes(with))
    }

    /// Calls `with` with the contents, which it may change.
    ///
    /// # Errors
    /// Returns [`MemoryError::Busy`] while a transfer uses any of the buffer, [`MemoryError::Exported`] while an
    /// export lives, [`MemoryError::ReadOnly`] for memory that is only read, and [`MemoryError::OnDevice`] for memory of
    /// a GPU.
    pub fn with_bytes_mut<R>(&self, with: impl FnOnce(&mut [u8]) -> R) -> Result<R, MemoryError> {
        let span = self.span_if_unclaimed()?;
        let _reserved = span.reserve(AccessKind::Write)?;
        // SAFETY: the bytes are reserved for this call alone.
        Ok(unsafe { span.write_view_unchecked(0, span.len) }.with_bytes_mut(with))
    }

    /// Copies the bytes from `start` on into `into`, from whatever memory the buffer is. For memory of a GPU it blocks until
    /// the copy has ended, and is slow: it is for tools, tests and small amounts.
    ///
    /// # Errors
    /// Returns [`MemoryError::OutOfRange`] if the buffer has fewer bytes, [`MemoryError::Busy`] while a transfer writes
    /// some of them, and [`MemoryError::Gpu`] if the GPU fails.
    pub fn read_contents(&self, start: usize, into: &mut [u8]) -> Result<(), MemoryError> {
        let span = self.range(start..start.saturating_add(into.len()))?;
        self.check_unclaimed()?;
        let _reserved = span.reserve(AccessKind::Read)?;
        match span.device_memory() {
            Some(memory) => read_device_bytes(memory, span.region_offset(), into),
            // SAFETY: the bytes are reserved against writers until this returns.
            None => {
                unsafe { span.read_view_unchecked(0, span.len) }
                    .with_bytes(|bytes| into.copy_from_slice(bytes));
                Ok(())
            }
        }
    }

    /// Copies `bytes` to the bytes from `start` on, in whatever memory the buffer is. For memory of a GPU it blocks until the
    /// copy has ended, and is slow.
    ///
    /// # Errors
    /// As [`read_contents`](Self::read_contents), and as [`with_bytes_mut`](Self::with_bytes_mut) for bytes that may not be
    /// written.
    pub fn write_contents(&self, start: usize, bytes: &[u8]) -> Result<(), MemoryError> {
        let span = self.range(start..start.saturating_add(bytes.len()))?;
        self.check_unclaimed()?;
        let _reserved = span.reserve(AccessKind::Write)?;
        match span.device_memory() {
            Some(memory) => write_device_bytes(memory, span.region_offset(), bytes),
            // SAFETY: the bytes are reserved for this call alone.
            None => {
                let mut view = unsafe { span.write_view_unchecked(0, span.len) };
                view.with_bytes_mut(|into| into.copy_from_slice(bytes));
                Ok(())
            }
        }
    }

    /// Sets every byte to `byte`.
    ///
    /// # Errors
    /// As [`write_contents`](Self::write_contents).
    pub fn fill(&self, byte: u8) -> Result<(), MemoryError> {
        match self.gpu() {
            Some(_) => self.write_contents(0, &vec![byte; self.len()]),
            None => self.with_bytes_mut(|bytes| bytes.fill(byte)),
        }
    }

    fn span_if_unclaimed(&self) -> Result<Span, MemoryError> {
        self.check_in_host_memory()?;
        self.check_unclaimed()?;
        Ok(self.full_span())
    }

    fn check_unclaimed(&self) -> Result<(), MemoryError> {
        match self.lock_reserved_access().claims {
            0 => Ok(()),
            _ => Err(MemoryError::Busy { start: 0, end: self.len() }),
        }
    }

    /// Claims the buffer for this access: programs cannot access its contents while the claim lives, transfers
    /// can.
    pub(crate) fn claim(&self, how: AccessKind) -> Result<BufferClaim, MemoryError> {
        if how == AccessKind::Write {
            self.check_not_read_only()?;
        }
        let mut usage = self.lock_reserved_access();
        if usage.abandoned > 0 {
            return Err(MemoryError::Busy { start: 0, end: self.len() });
        }
        if how == AccessKind::Write {
            usage.check_not_exported()?;
        }
        usage.claims += 1;
        drop(usage);
        Ok(BufferClaim { buffer: self.clone(), is_abandoned: AtomicBool::new(false) })
    }

    /// Checks that transfers may write the memory.
    pub(crate) fn check_not_read_only(&self) -> Result<(), MemoryError> {
        if self.is_read_only() { Err(MemoryError::ReadOnly) } else { Ok(()) }
    }

    pub(crate) fn region(&self) -> &Arc<MemoryRegion> {
        match &self.0.backing {
            Backing::Arena(arena) => &arena.region,
            Backing::Foreign(region) => region,
        }
    }

    fn lock_reserved_access(&self) -> MutexGuard<'_, ReservedAccess> {
        self.0.usage.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ReservedAccess {
    /// Checks that no program keeps the address of the bytes.
    const fn check_not_exported(&self) -> Result<(), MemoryError> {
        match self.exports {
            0 => Ok(()),
            exports => Err(MemoryError::Exported { exports }),
        }
    }
}

impl Drop for BufferInner {
    fn drop(&mut self) {
        if let Backing::Arena(arena) = &self.backing {
            arena.release(self.start, self.len);
        }
    }
}

/// A range of a buffer.
#[derive(Debug, Clone)]
pub struct Span {
    buffer: Buffer,
    start: usize,
    len: usize,
    layout: Option<BufferLayout>,
}

impl Span {
    /// Sets the layout of the span's bytes. Both sides of a transfer must set the same one, and its size must
    /// be the span's.
    #[must_use]
    pub fn with_layout(mut self, layout: BufferLayout) -> Self {
        self.layout = Some(layout);
        self
    }

    /// Returns the layout; plain bytes if none was set.
    #[must_use]
    pub fn layout(&self) -> BufferLayout {
        self.layout.clone().unwrap_or_else(|| BufferLayout::bytes(self.len))
    }

    /// Returns the buffer.
    #[must_use]
    pub const fn buffer(&self) -> &Buffer {
        &self.buffer
    }

    /// Returns the index of the first byte within the buffer.
    #[must_use]
    pub const fn buffer_offset(&self) -> usize {
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
    /// [continue](Self::is_contiguous_with) this one in memory.
    ///
    /// # Safety
    /// As of [`ReadView::from_address`]: nothing writes these bytes while the view is used.
    pub(crate) unsafe fn read_view_unchecked(&self, start: usize, len: usize) -> ReadView<'_> {
        // SAFETY: the buffer keeps its memory mapped, and the caller guarantees the access.
        unsafe { ReadView::from_address(self.buffer.region().base(), self.region_offset() + start, len) }
    }

    /// Returns a view to write `len` bytes from `start` on. It may reach into spans that
    /// [continue](Self::is_contiguous_with) this one in memory.
    ///
    /// # Safety
    /// As of [`WriteView::from_address`]: nothing else in this process uses these bytes while the view is used.
    pub(crate) unsafe fn write_view_unchecked(&self, start: usize, len: usize) -> WriteView<'_> {
        // SAFETY: as above.
        unsafe { WriteView::from_address(self.buffer.region().base(), self.region_offset() + start, len) }
    }

    /// Returns the memory of a GPU that the span is in; none for host memory.
    pub(crate) fn device_memory(&self) -> Option<&DeviceMemory> {
        self.buffer.region().device()
    }

    /// Returns the address of the first byte as a number, in host memory or in that of a GPU: no two bytes have the same.
    pub(crate) fn address(&self) -> u64 {
        match self.device_memory() {
            Some(memory) => memory.address() + self.region_offset() as u64,
            None => self.buffer.region().base().numeric_address_at(self.region_offset()),
        }
    }

    /// Returns whether `next` begins in memory where this span ends.
    pub(crate) fn is_contiguous_with(&self, next: &Self) -> bool {
        Arc::ptr_eq(self.buffer.region(), next.buffer.region())
            && self.region_offset() + self.len == next.region_offset()
    }

    /// Returns the index of the first byte within the region.
    pub(crate) fn region_offset(&self) -> usize {
        self.buffer.0.start + self.start
    }

    /// Reserves the range for this access. An empty range conflicts with nothing.
    pub(crate) fn reserve(&self, how: AccessKind) -> Result<Reservation, MemoryError> {
        let (start, end) = (self.start, self.start + self.len);
        let clashes = |&(from, to): &(usize, usize)| from < end && start < to;
        if how == AccessKind::Write && self.len > 0 {
            self.buffer.check_not_read_only()?;
        }
        let mut usage = self.buffer.lock_reserved_access();
        if self.len > 0 {
            if how == AccessKind::Write {
                usage.check_not_exported()?;
            }
            if usage.abandoned > 0
                || usage.writes.iter().any(clashes)
                || (how == AccessKind::Write && usage.reads.iter().any(clashes))
            {
                return Err(MemoryError::Busy { start, end });
            }
            match how {
                AccessKind::Read => usage.reads.push((start, end)),
                AccessKind::Write => usage.writes.push((start, end)),
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
    how: AccessKind,
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let mut usage = self.buffer.lock_reserved_access();
        let list = match self.how {
            AccessKind::Read => &mut usage.reads,
            AccessKind::Write => &mut usage.writes,
        };
        if let Some(at) = list.iter().rposition(|range| *range == self.range) {
            list.swap_remove(at);
        }
    }
}

#[cfg(test)]
mod tests;
