//! The spans that a prepared launch moves with one peer, and views of their bytes.
//!
//! A *guard* is the permission to access the bytes of a launch. The launch reserves the bytes before any guard is
//! used; this module reserves nothing. Begin at [`LaunchBytes`].
#![allow(unsafe_code, reason = "makes views of bytes that a guard of the launch keeps from all others")]

use muster_gpu::DeviceMemory;

use crate::memory::{ReadView, Span, SpanStream, WriteView};
use crate::protocol::frame::Crc32c;
use crate::protocol::link::launch_definition::{FetchSource, LaunchDefinition};

/// The spans that a prepared launch sends to one peer and receives from it; the same for every launch of it.
#[derive(Debug, Default)]
pub struct LaunchSpans {
    /// The bytes that this side sends.
    pub outbound: SpanStream,
    /// The bytes that this side receives.
    pub inbound: SpanStream,
}

impl LaunchSpans {
    /// Returns the number of bytes of both directions.
    pub fn total_bytes(&self) -> u64 {
        self.outbound.total() + self.inbound.total()
    }

    /// Returns whether some of the bytes are in the memory of GPUs.
    pub const fn has_bytes_of_gpus(&self) -> bool {
        self.outbound.gpu().is_some() || self.inbound.gpu().is_some()
    }

    /// Returns the receives with bytes, each with its index and the source that the peer's definition names for it.
    pub fn receives_with_sources<'a>(
        &'a self,
        definition: &'a LaunchDefinition,
    ) -> impl Iterator<Item = (usize, &'a Span, FetchSource)> {
        let sources = definition.entries.iter().filter(|entry| !entry.outgoing).map(|entry| entry.source);
        let receives = self.inbound.spans.iter().enumerate().zip(sources);
        receives.filter(|((_, span), _)| !span.is_empty()).map(|((at, span), source)| (at, span, source))
    }

    /// Returns the numbers of all transfers, the sends first.
    pub fn transfer_numbers(&self) -> impl Iterator<Item = u32> {
        self.outbound.specs.iter().chain(&self.inbound.specs).copied()
    }
}

/// Contiguous bytes of a launch: host memory, or the memory of a GPU with an address and a length.
pub enum BytesPiece<'a, V> {
    Host(V),
    Device(&'a DeviceMemory, u64, usize),
}

/// The bytes of a launch, accessible to the holder of a guard. If a stream has bytes of [GPUs](SpanStream::gpu), only the
/// functions that give pieces may be called for it; the others panic.
///
/// The spans of a launch are reserved before the link lets any byte move, and stay reserved until its last
/// guard is dropped. The link, or the copy within this task, gives each chunk to one thread at a time. Therefore no thread writes bytes
/// under a view of the outbound stream, and no other thread uses bytes under a view of the inbound stream.
#[derive(Clone, Copy)]
pub struct LaunchBytes<'a>(&'a LaunchSpans);

impl<'a> LaunchBytes<'a> {
    /// Creates the access; only guards call it.
    pub(super) const fn guarded(lists: &'a LaunchSpans) -> Self {
        Self(lists)
    }

    /// Appends views of the bytes `start..start + len` of the outbound stream, until `into` has `most`.
    pub fn append_outbound_views(self, start: u64, len: u64, most: usize, into: &mut Vec<ReadView<'a>>) {
        // SAFETY: a guard exists, so the bytes are reserved for reading.
        unsafe { self.0.outbound.read_views_unchecked(start, len, most, into) };
    }

    /// Appends views of the bytes `start..start + len` of the inbound stream, until `into` has `most`. The
    /// caller has this range to itself.
    pub fn append_inbound_views(self, start: u64, len: u64, most: usize, into: &mut Vec<WriteView<'a>>) {
        // SAFETY: a guard exists, so the bytes are reserved for writing, and the link gave them to this
        // caller alone.
        unsafe { self.0.inbound.write_views_unchecked(start, len, most, into) };
    }

    /// Calls `with` for each contiguous piece of the bytes `start..start + len` of the outbound stream, in order.
    pub fn for_each_outbound_piece(
        self,
        start: u64,
        len: u64,
        with: impl FnMut(BytesPiece<'a, ReadView<'a>>),
    ) {
        // SAFETY: as in `append_outbound_views`.
        let view = |span: &'a Span, from, len| unsafe { span.read_view_unchecked(from, len) };
        for_each_piece(&self.0.outbound, (start, len), view, with);
    }

    /// Calls `with` for each contiguous piece of the bytes `start..start + len` of the inbound stream, in order. The caller has
    /// this range to itself.
    pub fn for_each_inbound_piece(
        self,
        start: u64,
        len: u64,
        with: impl FnMut(BytesPiece<'a, WriteView<'a>>),
    ) {
        // SAFETY: as in `append_inbound_views`.
        let view = |span: &'a Span, from, len| unsafe { span.write_view_unchecked(from, len) };
        for_each_piece(&self.0.inbound, (start, len), view, with);
    }

    /// Returns a view to write `len` bytes from `start` on of the receive with index `at`; it may reach into
    /// the receives that are joined with it in memory.
    pub fn inbound_span(self, at: usize, start: usize, len: usize) -> WriteView<'a> {
        // SAFETY: as in `append_inbound_views`.
        unsafe { self.0.inbound.spans[at].write_view_unchecked(start, len) }
    }

    /// Appends a copy of the bytes `start..start + len` of the outbound stream to `into`.
    pub fn copy_out(self, start: u64, len: u64, into: &mut Vec<u8>) {
        let mut views = Vec::new();
        self.append_outbound_views(start, len, usize::MAX, &mut views);
        for view in views {
            view.with_bytes(|bytes| into.extend_from_slice(bytes));
        }
    }

    /// Copies `bytes` into the inbound stream from `start` on.
    pub fn copy_in(self, start: u64, mut bytes: &[u8]) {
        let mut views = Vec::new();
        self.append_inbound_views(start, bytes.len() as u64, usize::MAX, &mut views);
        for mut view in views {
            let (here, rest) = bytes.split_at(view.len());
            view.copy_from(&ReadView::of_slice(here));
            bytes = rest;
        }
    }

    /// Returns the checksum of the bytes `start..start + len` of the outbound stream.
    pub fn outbound_checksum(self, start: u64, len: u64) -> u32 {
        let mut views = Vec::with_capacity(8);
        self.append_outbound_views(start, len, usize::MAX, &mut views);
        checksum_of_views(&views)
    }

    /// Returns the checksum of the bytes `start..start + len` of the inbound stream.
    pub fn inbound_checksum(self, start: u64, len: u64) -> u32 {
        let mut views = Vec::with_capacity(8);
        // SAFETY: the caller has written the bytes, and no other thread uses them.
        unsafe { self.0.inbound.read_views_unchecked(start, len, usize::MAX, &mut views) };
        checksum_of_views(&views)
    }
}

/// Calls `with` for each contiguous piece of `len` bytes from `start` on, in order. `view` makes the views of host memory.
fn for_each_piece<'a, V>(
    stream: &'a SpanStream,
    (start, len): (u64, u64),
    view: impl Fn(&'a Span, usize, usize) -> V,
    mut with: impl FnMut(BytesPiece<'a, V>),
) {
    stream.for_each_contiguous_run(start, len, |span, from, bytes| {
        with(match span.device_memory() {
            Some(memory) => {
                let offset = (span.region_offset() + from) as u64;
                BytesPiece::Device(memory, memory.address() + offset, bytes)
            }
            None => BytesPiece::Host(view(span, from, bytes)),
        });
        true
    });
}

fn checksum_of_views(views: &[ReadView<'_>]) -> u32 {
    let mut checksum = Crc32c::new();
    views.iter().for_each(|view| view.with_bytes(|bytes| checksum.update(bytes)));
    checksum.value()
}
