//! The memory of a peer on this host, as this side maps it: host memory, or memory of a GPU.
//!
//! Begin at [`PeerMemory`].

use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;

use muster_gpu::{Gpu, ImportedMemory};

use crate::memory::{DeviceMappings, Mapping, PeerView};

/// A region of a peer.
pub enum PeerMemory {
    /// Host memory, mapped read-only.
    Host(Mapping),
    /// Memory of a GPU.
    Device(PeerDeviceMemory),
}

/// The memory of a peer's GPU.
pub struct PeerDeviceMemory {
    descriptor: OwnedFd,
    /// The length that the peer announced.
    len: u64,
    mappings: DeviceMappings,
}

impl PeerMemory {
    /// Returns the `len` bytes of a region whose descriptor a peer sent; none if reading it could fault.
    pub fn from_descriptor(descriptor: OwnedFd, len: u64, is_device: bool) -> Option<Self> {
        if is_device {
            return Some(Self::Device(PeerDeviceMemory {
                descriptor,
                len,
                mappings: DeviceMappings::default(),
            }));
        }
        Mapping::map_sealed_file(descriptor.as_fd(), usize::try_from(len).ok()?, false).map(Self::Host)
    }

    /// Returns whether it is memory of a GPU, which holds a descriptor.
    pub const fn is_device(&self) -> bool {
        matches!(self, Self::Device(_))
    }

    /// Returns a view of `len` bytes of host memory at `offset + from`, or none if they exceed the mapping.
    pub fn view_of_peer_bytes(&self, offset: u64, from: usize, len: usize) -> Option<PeerView<'_>> {
        let Self::Host(mapping) = self else { return None };
        mapping.peer_view(usize::try_from(offset).ok()?.checked_add(from)?, len)
    }
}

impl PeerDeviceMemory {
    /// Returns the memory as a GPU of this process accesses it, if it has the bytes `start..start + len` and the GPU can.
    pub fn mapped_for(&self, gpu: &Gpu, start: u64, len: u64) -> Option<Arc<ImportedMemory>> {
        if start.checked_add(len)? > self.len {
            return None;
        }
        self.mappings.mapped_for(gpu, self.descriptor.as_fd(), usize::try_from(self.len).ok()?)
    }
}
