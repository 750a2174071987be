//! The bytes that a launch sends to one peer, or receives from it, as one byte stream.
//!
//! The stream reserves no memory. Its callers guarantee that nothing writes the bytes that they read, and that
//! nothing else in the process uses the bytes that they write. Spans that are adjacent in memory count as one
//! stretch, with one vector entry, one copy and one checksum. Small buffers are usually allocated one after the
//! other, so this saves work. Begin at [`SpanStream`].

#![allow(unsafe_code, reason = "passes on what its callers promise of the bytes")]

use muster_gpu::Gpu;

use super::buffer::Span;
use super::view::{ReadView, WriteView};

/// The bytes of one direction of a launch, as one stream in the order of its definition.
#[derive(Debug, Default)]
pub struct SpanStream {
    /// The spans, in order.
    pub spans: Vec<Span>,
    /// The offset of each span in the stream, and the end of the stream.
    starts: Vec<u64>,
    /// The number of each span's transfer within the launch.
    pub specs: Vec<u32>,
    /// For each span, whether it begins in memory where the one before it ends.
    joined: Vec<bool>,
    /// The GPU of the first bytes that are in the memory of one.
    gpu: Option<Gpu>,
}

impl SpanStream {
    /// Creates a stream of spans with the numbers of their transfers.
    pub fn new(parts: impl IntoIterator<Item = (u32, Span)>) -> Self {
        let mut stream = Self { starts: vec![0], ..Self::default() };
        let mut end = 0;
        for (spec, span) in parts {
            end += span.len() as u64;
            if stream.gpu.is_none() && !span.is_empty() {
                stream.gpu = span.buffer().gpu().cloned();
            }
            stream.joined.push(stream.spans.last().is_some_and(|last: &Span| last.is_contiguous_with(&span)));
            stream.starts.push(end);
            stream.specs.push(spec);
            stream.spans.push(span);
        }
        stream
    }

    /// Returns the length of the stream in bytes.
    pub fn total(&self) -> u64 {
        self.starts.last().copied().unwrap_or(0)
    }

    /// Returns a GPU that has some of the bytes in its memory; none if all are in host memory. If there is one, there are no
    /// views of the stream.
    pub const fn gpu(&self) -> Option<&Gpu> {
        self.gpu.as_ref()
    }

    /// Returns the offset of a span in the stream.
    pub fn span_start(&self, at: usize) -> u64 {
        self.starts[at]
    }

    /// Returns whether a span begins in memory where the one before it ends.
    pub fn continues_previous_span(&self, at: usize) -> bool {
        self.joined[at]
    }

    /// Calls `with` for each span that has bytes of `start..start + len`: the span's index, the first of
    /// those bytes within the span, and their number.
    pub fn for_each_piece(&self, start: u64, len: u64, mut with: impl FnMut(usize, usize, usize)) {
        let end = start + len;
        let mut at = self.starts.partition_point(|begin| *begin <= start).saturating_sub(1);
        while at < self.spans.len() && self.starts[at] < end {
            let from = start.max(self.starts[at]);
            let to = end.min(self.starts[at + 1]);
            if from < to {
                with(at, (from - self.starts[at]) as usize, (to - from) as usize);
            }
            at += 1;
        }
    }

    /// Calls `with` for each contiguous stretch of memory of the bytes `start..start + len`, until it returns
    /// false: the span in which the stretch begins, its first byte within that span, and its length.
    /// Adjoining spans make one stretch.
    pub fn for_each_contiguous_run<'a>(
        &'a self,
        start: u64,
        len: u64,
        mut with: impl FnMut(&'a Span, usize, usize) -> bool,
    ) {
        let end = start + len;
        let mut at = self.starts.partition_point(|begin| *begin <= start).saturating_sub(1);
        while at < self.spans.len() && self.starts[at] < end {
            let (first, from) = (at, start.max(self.starts[at]));
            at += 1;
            while at < self.spans.len() && self.joined[at] && self.starts[at] < end {
                at += 1;
            }
            let to = end.min(self.starts[at]);
            if from < to
                && !with(&self.spans[first], (from - self.starts[first]) as usize, (to - from) as usize)
            {
                return;
            }
        }
    }

    /// Appends views of the bytes `start..start + len`, one for each contiguous stretch, until `into` has
    /// `most`.
    ///
    /// # Safety
    /// As of [`ReadView::from_address`]: nothing writes these bytes while the views are used.
    pub unsafe fn read_views_unchecked<'a>(
        &'a self,
        start: u64,
        len: u64,
        most: usize,
        into: &mut Vec<ReadView<'a>>,
    ) {
        self.for_each_contiguous_run(start, len, |span, from, bytes| {
            if into.len() < most {
                // SAFETY: the caller guarantees the access.
                into.push(unsafe { span.read_view_unchecked(from, bytes) });
            }
            into.len() < most
        });
    }

    /// Appends views to write the bytes `start..start + len`, one for each contiguous stretch, until `into`
    /// has `most`.
    ///
    /// # Safety
    /// As of [`WriteView::from_address`]: nothing else in this process uses these bytes while the views are used.
    pub unsafe fn write_views_unchecked<'a>(
        &'a self,
        start: u64,
        len: u64,
        most: usize,
        into: &mut Vec<WriteView<'a>>,
    ) {
        self.for_each_contiguous_run(start, len, |span, from, bytes| {
            if into.len() < most {
                // SAFETY: the caller guarantees the access.
                into.push(unsafe { span.write_view_unchecked(from, bytes) });
            }
            into.len() < most
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{Arena, Buffer};

    #[test]
    fn what_lies_together_is_one_piece_and_nothing_else_is() {
        let arena = Arena::new(1 << 20).unwrap();
        let buffers: Vec<_> = (0..4).map(|_| arena.allocate(4096).unwrap()).collect();
        for (n, buffer) in buffers.iter().enumerate() {
            buffer.fill(n as u8 + 1).unwrap();
        }
        let foreign = Buffer::foreign(vec![9; 100]);
        let empty = foreign.range(50..50).unwrap();
        let spans = [
            buffers[0].full_span(),
            buffers[1].full_span(),
            empty,
            buffers[2].range(0..4095).unwrap(),
            buffers[3].full_span(),
            foreign.full_span(),
            buffers[0].range(0..7).unwrap(),
        ];
        // SAFETY: nothing else uses the buffers.
        let contents =
            |span: &Span| unsafe { span.read_view_unchecked(0, span.len()) }.with_bytes(<[u8]>::to_vec);
        let bytes: Vec<u8> = spans.iter().flat_map(contents).collect();
        let stream = SpanStream::new(spans.into_iter().zip(0..).map(|(span, spec)| (spec, span)));
        assert_eq!(stream.total(), bytes.len() as u64);
        let adjoin = buffers[1].full_span().region_offset() == buffers[0].full_span().region_offset() + 4096;
        assert!(adjoin, "an arena gives out what is next to the last");
        for (start, len, pieces) in [
            (0, 8192, 1),
            (1, 8190, 1),
            (4096, 4096, 1),
            (0, 0, 0),
            (8192, 4095, 1),
            (8191, 4097, 3),
            (0, bytes.len(), 5),
            (bytes.len() - 8, 8, 2),
        ] {
            let mut found = Vec::new();
            // SAFETY: as above.
            unsafe { stream.read_views_unchecked(start as u64, len as u64, usize::MAX, &mut found) };
            let joined: Vec<u8> = found.iter().flat_map(|piece| piece.with_bytes(<[u8]>::to_vec)).collect();
            assert_eq!(joined, &bytes[start..start + len], "{len} from {start}");
            assert_eq!(found.len(), pieces, "{len} from {start}");
        }
    }
}
