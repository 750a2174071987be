//! The inbound bytes of a launch as runs that are contiguous in the memory of both sides. Begin at [`contiguous_runs`].

use std::sync::Arc;

use muster_fabric::RemoteBytes;

use super::fetch_host::FetchHost;
use super::peer_memory::PeerMemory;
use crate::launch::peer_launch::PeerLaunch;
use crate::protocol::link::launch_definition::{FetchSource, LaunchDefinition};

/// Bytes that are contiguous in the memory of both sides.
pub struct ContiguousBytes {
    /// The offset in the inbound stream, and the length in bytes.
    pub start: u64,
    pub len: u64,
    /// The index of the receive in which the run begins, at its first byte.
    pub at: usize,
    pub source: FetchSource,
    /// The memory, for a source within a region.
    pub memory: Option<Arc<PeerMemory>>,
}

impl ContiguousBytes {
    /// Returns whether `source` follows this run in the sender's memory.
    fn is_followed_by(&self, source: FetchSource) -> bool {
        match (self.source, source) {
            (FetchSource::Region(region, offset), FetchSource::Region(other, next)) => {
                region == other && offset.checked_add(self.len) == Some(next)
            }
            (FetchSource::Address(address), FetchSource::Address(next)) => {
                address.checked_add(self.len) == Some(next)
            }
            _ => false,
        }
    }

    /// Returns how a fabric names `len` bytes of the run from `from` on; none if it does not know them.
    pub fn remote_bytes(&self, from: u64, len: u64) -> Option<RemoteBytes> {
        let (FetchSource::Region(_, offset), Some(PeerMemory::Fabric(memory))) =
            (self.source, self.memory.as_deref())
        else {
            return None;
        };
        memory.remote_bytes(offset.checked_add(from)?, len)
    }

    /// Returns whether the whole run can be fetched.
    pub fn is_available(&self, host: &dyn FetchHost) -> bool {
        match self.source {
            // Bytes between GPUs never come here, and others are pushed.
            FetchSource::None | FetchSource::Gpu(_) => false,
            FetchSource::Region(_, offset) => {
                let memory = self.memory.as_ref();
                memory.is_some_and(|memory| memory.view_of_peer_bytes(offset, 0, self.len as usize).is_some())
            }
            FetchSource::Address(_) => host.readable_peer_pid().is_some(),
        }
    }
}

/// Returns the inbound bytes of a launch as runs: small buffers that are contiguous on both sides make one
/// run.
pub fn contiguous_runs(
    host: &dyn FetchHost,
    launch: &PeerLaunch,
    definition: &LaunchDefinition,
) -> Vec<ContiguousBytes> {
    let inbound = &launch.lists.inbound;
    let mut runs: Vec<ContiguousBytes> = Vec::new();
    for (at, span, source) in launch.lists.receives_with_sources(definition) {
        let last = runs.last_mut();
        let memory = match (&last, source) {
            (
                Some(ContiguousBytes { source: FetchSource::Region(last, _), memory, .. }),
                FetchSource::Region(region, _),
            ) if *last == region => memory.clone(),
            _ => host.peer_memory(source),
        };
        match last {
            Some(run) if inbound.continues_previous_span(at) && run.is_followed_by(source) => {
                run.len += span.len() as u64;
            }
            _ => runs.push(ContiguousBytes {
                start: inbound.span_start(at),
                len: span.len() as u64,
                at,
                source,
                memory,
            }),
        }
    }
    runs
}
