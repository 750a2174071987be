//! The memory of a peer, as this side reaches it: host memory or memory of a GPU that it maps, or memory that it reads over a fabric.
//!
//! Begin at [`PeerMemory`].

use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;

use muster_fabric::RemoteBytes;
use muster_gpu::{Gpu, ImportedMemory};

use crate::memory::{DeviceMappings, Mapping, PeerView};

/// A region of a peer.
pub enum PeerMemory {
    /// Host memory, mapped read-only.
    Host(Mapping),
    /// Memory of a GPU.
    Device(PeerDeviceMemory),
    /// Host memory that is read over a fabric.
    Fabric(PeerFabricMemory),
}

/// The memory of a peer as a fabric knows it.
pub struct PeerFabricMemory {
    first: RemoteBytes,
    /// The length that the peer announced.
    len: u64,
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

    /// Returns memory that a peer has registered with the fabric, from the payload of its announcement; none if that makes no sense.
    pub fn from_fabric_announcement(payload: &[u8], len: u64) -> Option<Self> {
        let (key, address) = payload.split_first_chunk::<8>()?;
        let [key, address] = [*key, <[u8; 8]>::try_from(address).ok()?].map(u64::from_le_bytes);
        Some(Self::Fabric(PeerFabricMemory { first: RemoteBytes { key, address }, len }))
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

impl PeerFabricMemory {
    /// Returns how the fabric names the bytes `start..start + len`, if the memory has them.
    pub fn remote_bytes(&self, start: u64, len: u64) -> Option<RemoteBytes> {
        let address = self.first.address.checked_add(start)?;
        (start.checked_add(len)? <= self.len).then_some(RemoteBytes { address, ..self.first })
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
