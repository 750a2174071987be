//! Fetches between GPUs: the receiver's GPU copies from the memory of the sender's GPU, which this process maps.
//!
//! No byte passes through host memory. The copies go in chunks, of which several are in the GPU's stream: a cancelled
//! launch asks for no further chunk, and is quiescent once the last one has ended. As of every fetch, bytes that were read after
//! the sender took its memory back do not count (`fetch.rs`). Begin at [`DeviceFetch::begin_or_request_push`].
#![allow(unsafe_code, reason = "copies between memory that a guard keeps, and memory of a peer")]

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use super::device_runs::{CHUNKS_IN_FLIGHT, ChunkPace, DeviceRuns, DeviceSource};
use super::fetch_host::FetchHost;
use super::gpu_copies::CopyFailure;
use super::peer_memory::PeerMemory;
use crate::base::transport::TransportKind;
use crate::launch::peer_launch::{OwnedAccessGuard, PeerLaunch};
use crate::protocol::link::launch_definition::{FetchSource, LaunchDefinition};

/// A fetch of the inbound bytes of one launch.
pub struct DeviceFetch {
    host: Weak<dyn FetchHost>,
    launch: Arc<PeerLaunch>,
    runs: DeviceRuns,
    total: u64,
    pace: ChunkPace,
    /// The offset at which the next chunk begins.
    next: AtomicU64,
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
        let runs = host.can_fetch().then(|| device_runs(&**host, launch, definition)).flatten();
        let Some(runs) = runs else { return host.request_push(launch) };
        let total = launch.lists.inbound.total();
        let fetch = Arc::new(Self {
            host: Arc::downgrade(host),
            launch: Arc::clone(launch),
            runs,
            total,
            pace: ChunkPace::begin(),
            next: AtomicU64::new(0),
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
        let chunk = self.pace.next_len();
        let start = self.next.fetch_add(chunk, Ordering::Relaxed);
        if start >= self.total {
            return;
        }
        let len = chunk.min(self.total - start);
        let Some(guard) = self.launch.access_owned() else { return };
        let copies = self.runs.copies(start, len);
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
        self.pace.record_copied(fetched);
        self.copy_next_chunk();
    }
}

/// Returns the inbound bytes of a launch; none if some cannot be copied from GPU to GPU.
fn device_runs(
    host: &dyn FetchHost,
    launch: &PeerLaunch,
    definition: &LaunchDefinition,
) -> Option<DeviceRuns> {
    let mut runs = DeviceRuns::default();
    for (_, span, source) in launch.lists.receives_with_sources(definition) {
        let FetchSource::Region(_, offset) = source else { return None };
        let (own, len) = (span.device_memory()?, span.len() as u64);
        let shared = host.peer_memory(source)?;
        let PeerMemory::Device(shared) = &*shared else { return None };
        let memory = shared.mapped_for(own.gpu(), offset, len)?;
        let source = DeviceSource { base: memory.base(), offset, mapping: Some(memory) };
        runs.push((own, span.region_offset() as u64), source, len);
    }
    // The definition has as many entries as the launch has receives.
    (runs.total() == launch.lists.inbound.total()).then_some(runs)
}
