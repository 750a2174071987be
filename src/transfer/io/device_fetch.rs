//! Fetches between GPUs: the receiver's GPU copies from the memory of the sender's GPU, which this process maps.
//!
//! No byte passes through host memory. The copies go in chunks, of which several are in the GPU's stream: a cancelled
//! launch asks for no further chunk, and is quiescent once the last one has ended. Chunks grow with the speed of the copies, so
//! that each takes about [`CHUNK_TIME`], on a slow bus as within one GPU. As of every fetch, bytes that were read after
//! the sender took its memory back do not count (`fetch.rs`). Begin at [`DeviceFetch::begin_or_request_push`].
#![allow(unsafe_code, reason = "copies between memory that a guard keeps, and memory of a peer")]

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use muster_gpu::{CopyDirection, Gpu, GpuCopy, ImportedMemory};

use super::fetch_host::FetchHost;
use super::gpu_copies::{CopiesByGpu, CopyFailure};
use super::peer_memory::PeerMemory;
use crate::base::transport::TransportKind;
use crate::launch::peer_launch::{OwnedAccessGuard, PeerLaunch};
use crate::protocol::link::launch_definition::{FetchSource, LaunchDefinition};

/// The bytes of the first chunks, and the least of later ones.
const CHUNK_MIN: u64 = 8 << 20;
/// The most bytes of a chunk.
const CHUNK_MAX: u64 = 256 << 20;
/// The wanted duration of the copy of a chunk: long beside the time that it takes to ask for another one, and short for a
/// program that waits for the end of a cancellation.
const CHUNK_TIME: Duration = Duration::from_micros(100);
/// The most chunks of a launch that are in the streams of GPUs.
const CHUNKS_IN_FLIGHT: usize = 3;

/// Bytes that are contiguous in the memory of both sides.
struct ContiguousBytes {
    /// The offset in the inbound stream, and the length in bytes.
    start: u64,
    len: u64,
    /// The GPU that copies, and the first address to which it does.
    gpu: Gpu,
    to: u64,
    /// The sender's memory, as this GPU accesses it, and the first address in it.
    memory: Arc<ImportedMemory>,
    from: u64,
}

/// A fetch of the inbound bytes of one launch.
pub struct DeviceFetch {
    host: Weak<dyn FetchHost>,
    launch: Arc<PeerLaunch>,
    runs: Vec<ContiguousBytes>,
    total: u64,
    began: Instant,
    /// The offset at which the next chunk begins.
    next: AtomicU64,
    /// The length of the next chunk.
    chunk: AtomicU64,
    fetched: AtomicU64,
    has_failed: AtomicBool,
}

impl DeviceFetch {
    /// Begins the fetch of a launch, if all bytes are in memory of GPUs on both sides, and the receiver's GPUs can access the
    /// sender's. Else the peer pushes the bytes, which go through the slots of a lane.
    pub fn begin_or_request_push(
        host: &Arc<dyn FetchHost>,
        launch: &Arc<PeerLaunch>,
        definition: &LaunchDefinition,
    ) {
        let runs = host.can_fetch().then(|| contiguous_runs(&**host, launch, definition)).flatten();
        let Some(runs) = runs else { return host.request_push(launch) };
        let total = launch.lists.inbound.total();
        let fetch = Arc::new(Self {
            host: Arc::downgrade(host),
            launch: Arc::clone(launch),
            runs,
            total,
            began: muster_clock::monotonic(),
            next: AtomicU64::new(0),
            chunk: AtomicU64::new(CHUNK_MIN),
            fetched: AtomicU64::new(0),
            has_failed: AtomicBool::new(false),
        });
        for _ in 0..CHUNKS_IN_FLIGHT {
            fetch.copy_next_chunk();
        }
    }

    /// Asks the GPUs for the next chunk, if there is one.
    fn copy_next_chunk(self: &Arc<Self>) {
        if self.has_failed.load(Ordering::Acquire) {
            return;
        }
        let chunk = self.chunk.load(Ordering::Relaxed);
        let start = self.next.fetch_add(chunk, Ordering::Relaxed);
        if start >= self.total {
            return;
        }
        let len = chunk.min(self.total - start);
        let Some(guard) = self.launch.access_owned() else { return };
        let mut copies = CopiesByGpu::new(CopyDirection::BetweenDevices);
        let end = start + len;
        let first = self.runs.partition_point(|run| run.start + run.len <= start);
        for run in self.runs[first..].iter().take_while(|run| run.start < end) {
            let from = start.max(run.start) - run.start;
            let len = end.min(run.start + run.len) - run.start - from;
            let copy = GpuCopy { from: run.from + from, to: run.to + from, len: len as usize };
            copies.add(&run.gpu, copy);
        }
        let fetch = Arc::clone(self);
        // SAFETY: the guard reserves the bytes for writing, and only this fetch writes those of the launch. The runs keep the
        // peer's memory mapped. The peer may write what is read: then the bytes do not count.
        unsafe {
            copies.start((guard, fetch), move |(guard, fetch), outcome| {
                fetch.finish_chunk(guard, start, len, outcome);
            });
        }
    }

    fn finish_chunk(
        self: &Arc<Self>,
        guard: OwnedAccessGuard,
        start: u64,
        len: u64,
        outcome: Result<(), CopyFailure>,
    ) {
        let Some(host) = self.host.upgrade() else { return };
        let launch = &self.launch;
        let is_first_failure = || !self.has_failed.swap(true, Ordering::AcqRel);
        if let Err(failure) = outcome {
            drop(guard);
            if is_first_failure() {
                host.on_device_fetch_failed(launch, failure);
            }
            return;
        }
        if !host.fetched_bytes_are_valid() {
            drop(guard);
            if is_first_failure() {
                host.on_fetch_invalidated(launch);
            }
            return;
        }
        // A launch that was cancelled meanwhile resolves as cancelled, also if this chunk was its last one.
        if launch.is_closing() {
            return;
        }
        launch.set_transport(TransportKind::Gpu);
        host.count_received(TransportKind::Gpu, len);
        let fetched = self.fetched.fetch_add(len, Ordering::AcqRel) + len;
        if fetched == self.total
            && let Some(at) = launch.group_id()
        {
            // The peer learns of it before this program does, because the program may exit at once.
            host.on_group_fetched(at);
        }
        launch.record_arrived_bytes(start, len);
        drop(guard);
        let took = muster_clock::monotonic().saturating_duration_since(self.began);
        self.chunk.store(chunk_len(fetched, took), Ordering::Relaxed);
        self.copy_next_chunk();
    }
}

/// Returns the length of the next chunk, if the copies have moved so many bytes in this time.
fn chunk_len(bytes: u64, took: Duration) -> u64 {
    let wanted = u128::from(bytes) * CHUNK_TIME.as_nanos() / took.as_nanos().max(1);
    // Of whole pages of a GPU.
    u64::try_from(wanted).unwrap_or(CHUNK_MAX).clamp(CHUNK_MIN, CHUNK_MAX) & !(CHUNK_MIN - 1)
}

/// Returns the inbound bytes of a launch; none if some cannot be copied from GPU to GPU.
fn contiguous_runs(
    host: &dyn FetchHost,
    launch: &PeerLaunch,
    definition: &LaunchDefinition,
) -> Option<Vec<ContiguousBytes>> {
    let inbound = &launch.lists.inbound;
    let mut runs: Vec<ContiguousBytes> = Vec::new();
    for (at, span, source) in launch.lists.receives_with_sources(definition) {
        let FetchSource::Region(_, offset) = source else { return None };
        let (own, len) = (span.device_memory()?, span.len() as u64);
        let shared = host.peer_memory(source)?;
        let PeerMemory::Device(shared) = &*shared else { return None };
        let memory = shared.mapped_for(own.gpu(), offset, len)?;
        let to = own.address() + span.region_offset() as u64;
        let from = memory.base() + offset;
        match runs.last_mut() {
            Some(last)
                if last.gpu == *own.gpu()
                    && Arc::ptr_eq(&last.memory, &memory)
                    && last.to + last.len == to
                    && last.from + last.len == from =>
            {
                last.len += len;
            }
            _ => runs.push(ContiguousBytes {
                start: inbound.span_start(at),
                len,
                gpu: own.gpu().clone(),
                to,
                memory,
                from,
            }),
        }
    }
    // The definition has as many entries as the launch has receives.
    (runs.iter().map(|run| run.len).sum::<u64>() == inbound.total()).then_some(runs)
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
