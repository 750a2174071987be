//! The spans that a prepared launch moves with one peer, and the views of their bytes.
//!
//! It reserves nothing: a launch does, before any guard is used. Begin at [`LaunchBytes`].
#![allow(unsafe_code, reason = "makes views of bytes that a guard of the launch keeps from all others")]

use crate::memory::{ReadView, SpanStream, WriteView};
use crate::protocol::frame::Checksum;

/// What a prepared launch does with one peer. The same for every launch of it.
#[derive(Debug, Default)]
pub struct IoLists {
    /// What is sent.
    pub outbound: SpanStream,
    /// What is received.
    pub inbound: SpanStream,
}

impl IoLists {
    /// Returns the bytes of both directions.
    pub fn total(&self) -> u64 {
        self.outbound.total() + self.inbound.total()
    }

    /// Returns the numbers of all transfers.
    pub fn specs(&self) -> impl Iterator<Item = u32> {
        self.outbound.specs.iter().chain(&self.inbound.specs).copied()
    }
}

/// The bytes of a launch, for the holder of a guard of it.
///
/// A launch is guarded between two moments: its spans were reserved before the link let any byte move, and they stay so
/// until its last guard is gone. The link gives each chunk to one thread at a time. So views of what is sent are of bytes
/// that no thread writes, and views of what is received are of bytes that no other thread uses.
#[derive(Clone, Copy)]
pub struct LaunchBytes<'a>(&'a IoLists);

impl<'a> LaunchBytes<'a> {
    /// Makes it, for guards only.
    pub(super) const fn guarded(lists: &'a IoLists) -> Self {
        Self(lists)
    }

    /// Appends views of the bytes `start..start + len` of what is sent, until `into` has `most`.
    pub fn outbound(self, start: u64, len: u64, most: usize, into: &mut Vec<ReadView<'a>>) {
        // SAFETY: they are reserved to be read, see above.
        unsafe { self.0.outbound.read_views(start, len, most, into) };
    }

    /// Appends views of the bytes `start..start + len` of what is received, until `into` has `most`. The caller has been
    /// given this stretch of the stream by the link.
    pub fn inbound(self, start: u64, len: u64, most: usize, into: &mut Vec<WriteView<'a>>) {
        // SAFETY: they are reserved to be written, and the link has given them to this caller.
        unsafe { self.0.inbound.write_views(start, len, most, into) };
    }

    /// Returns a view to write `len` bytes from `start` on of the receive with this place in the list, and of those that it
    /// is joined with.
    pub fn inbound_span(self, at: usize, start: usize, len: usize) -> WriteView<'a> {
        // SAFETY: as above.
        unsafe { self.0.inbound.spans[at].write_view(start, len) }
    }

    /// Appends a copy of the bytes `start..start + len` of what is sent.
    pub fn copy_out(self, start: u64, len: u64, into: &mut Vec<u8>) {
        let mut views = Vec::new();
        self.outbound(start, len, usize::MAX, &mut views);
        for view in views {
            view.read(|bytes| into.extend_from_slice(bytes));
        }
    }

    /// Copies `bytes` to where the stream of what is received has them from `start` on.
    pub fn copy_in(self, start: u64, mut bytes: &[u8]) {
        let mut views = Vec::new();
        self.inbound(start, bytes.len() as u64, usize::MAX, &mut views);
        for mut view in views {
            let (here, rest) = bytes.split_at(view.len());
            view.copy_from(&ReadView::of(here));
            bytes = rest;
        }
    }

    /// Returns the checksum of the bytes `start..start + len` of what is sent.
    pub fn outbound_checksum(self, start: u64, len: u64) -> u32 {
        let mut views = Vec::with_capacity(8);
        self.outbound(start, len, usize::MAX, &mut views);
        let mut checksum = Checksum::new();
        views.iter().for_each(|view| view.read(|bytes| checksum.update(bytes)));
        checksum.value()
    }

    /// Returns the checksum of the bytes `start..start + len` of what was received.
    pub fn inbound_checksum(self, start: u64, len: u64) -> u32 {
        let mut views = Vec::with_capacity(8);
        // SAFETY: the caller has written them, and no other thread uses them.
        unsafe { self.0.inbound.read_views(start, len, usize::MAX, &mut views) };
        let mut checksum = Checksum::new();
        views.iter().for_each(|view| view.read(|bytes| checksum.update(bytes)));
        checksum.value()
    }
}
