//! Bytes that GPUs copy directly between the memory of GPUs, as contiguous runs, and the lengths of the chunks in which
//! they do.
//!
//! `device_fetch.rs` copies so from the memory of a peer, and `local_copy.rs` within this task. Begin at [`DeviceRuns`].

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use muster_gpu::{CopyDirection, DeviceMemory, Gpu, GpuCopy, ImportedMemory};

use super::gpu_copies::CopiesByGpu;
use crate::memory::Span;

/// The most chunks of a launch that are in the streams of GPUs.
pub const CHUNKS_IN_FLIGHT: usize = 3;
/// The bytes of the first chunks, and the least of later ones.
const CHUNK_MIN: u64 = 8 << 20;
/// The most bytes of a chunk.
const CHUNK_MAX: u64 = 256 << 20;
/// The wanted duration of the copy of a chunk: long beside the time that it takes to ask for another one, and short for a
/// program that waits for the end of a cancellation.
const CHUNK_TIME: Duration = Duration::from_micros(100);

/// Bytes that are contiguous on both sides.
struct DeviceRun {
    /// The offset in the stream of the launch, and the length in bytes.
    start: u64,
    len: u64,
    /// The GPU that copies, and the first address to which it does.
    gpu: Gpu,
    to: u64,
    /// The first address from which it copies.
    from: u64,
    /// The addresses at which the memory of both sides begins. A copy does not reach from one allocation into another.
    allocations: (u64, u64),
    /// Keeps memory of another GPU mapped.
    _mapping: Option<Arc<ImportedMemory>>,
}

/// Bytes in memory of a GPU, as the GPU that copies them accesses it.
pub struct DeviceSource {
    /// The address at which the memory begins.
    pub base: u64,
    /// The first byte.
    pub offset: u64,
    /// Keeps the memory mapped, if it is another GPU's.
    pub mapping: Option<Arc<ImportedMemory>>,
}

impl DeviceSource {
    /// Returns a span as a GPU of this task accesses it; none if it cannot, or for host memory. The driver may wait, so a thread that
    /// reports copies must not call it.
    pub fn of_span(span: &Span, gpu: &Gpu) -> Option<Self> {
        let (memory, offset) = (span.device_memory()?, span.region_offset() as u64);
        if memory.gpu() == gpu {
            return Some(Self { base: memory.address(), offset, mapping: None });
        }
        let mapping = span.buffer().region().mapped_for(gpu)?;
        Some(Self { base: mapping.base(), offset, mapping: Some(mapping) })
    }
}

/// The bytes of a stream, in order, as runs. They keep the memory of other GPUs mapped.
#[derive(Default)]
pub struct DeviceRuns(Vec<DeviceRun>);

impl DeviceRuns {
    /// Appends `len` bytes, which the GPU of `to` copies from `source` to those at `offset` of `to`.
    pub fn push(&mut self, (to, offset): (&DeviceMemory, u64), source: DeviceSource, len: u64) {
        let (gpu, allocations) = (to.gpu(), (source.base, to.address()));
        let (from, to) = (source.base + source.offset, to.address() + offset);
        match self.0.last_mut() {
            Some(last)
                if last.gpu == *gpu
                    && last.allocations == allocations
                    && last.to + last.len == to
                    && last.from + last.len == from =>
            {
                last.len += len;
            }
            _ => {
                let (start, gpu, _mapping) = (self.total(), gpu.clone(), source.mapping);
                self.0.push(DeviceRun { start, len, gpu, to, from, allocations, _mapping });
            }
        }
    }

    /// Returns the number of bytes.
    pub fn total(&self) -> u64 {
        self.0.last().map_or(0, |last| last.start + last.len)
    }

    /// Returns the copies of the bytes `start..start + len`.
    pub fn copies(&self, start: u64, len: u64) -> CopiesByGpu {
        let mut copies = CopiesByGpu::new(CopyDirection::BetweenDevices);
        let end = start + len;
        let first = self.0.partition_point(|run| run.start + run.len <= start);
        for run in self.0[first..].iter().take_while(|run| run.start < end) {
            let from = start.max(run.start) - run.start;
            let len = end.min(run.start + run.len) - run.start - from;
            let copy = GpuCopy { from: run.from + from, to: run.to + from, len: len as usize };
            copies.add(&run.gpu, copy);
        }
        copies
    }
}

/// Chooses the lengths of chunks: they grow with the speed of the copies, so that each takes about [`CHUNK_TIME`], on a slow bus
/// as within one GPU.
pub struct ChunkPace {
    began: Instant,
    len: AtomicU64,
}

impl ChunkPace {
    /// Begins now.
    pub fn begin() -> Self {
        Self { began: muster_clock::monotonic(), len: AtomicU64::new(CHUNK_MIN) }
    }

    /// Returns the length of the next chunk in bytes.
    pub fn next_len(&self) -> u64 {
        self.len.load(Ordering::Relaxed)
    }

    /// Records how many bytes have been copied since the beginning.
    pub fn record_copied(&self, bytes: u64) {
        let took = muster_clock::monotonic().saturating_duration_since(self.began);
        self.len.store(chunk_len(bytes, took), Ordering::Relaxed);
    }
}

/// Returns the length of the next chunk, if the copies have moved so many bytes in this time.
fn chunk_len(bytes: u64, took: Duration) -> u64 {
    let wanted = u128::from(bytes) * CHUNK_TIME.as_nanos() / took.as_nanos().max(1);
    // Of whole pages of a GPU.
    u64::try_from(wanted).unwrap_or(CHUNK_MAX).clamp(CHUNK_MIN, CHUNK_MAX) & !(CHUNK_MIN - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_as_long_as_the_copies_are_quick() {
        let gigabyte = 1_000_000_000;
        let of_rate = |gigabytes: u64| chunk_len(gigabytes * gigabyte, Duration::from_secs(1));
        assert_eq!(
            [of_rate(0), of_rate(25), of_rate(200), of_rate(2000)],
            [8, 8, 16, 184].map(|mib| mib << 20)
        );
        assert_eq!(chunk_len(u64::MAX, Duration::ZERO), CHUNK_MAX);
    }
}
