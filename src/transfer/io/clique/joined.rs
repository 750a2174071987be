//! A clique in use, and the memory of GPUs with which cancelled launches take part. Begin at [`JoinedClique`].

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use muster_cliques::{CliqueError, CliqueMember, GpuClique};
use muster_gpu::{DeviceMemory, Gpu};

use crate::base::membership::MemberId;
use crate::base::sync::lock;
use crate::memory::device_copy::write_device_bytes;
use crate::protocol::clique_message::{CliquePiece, PIECE_MAX};

/// A clique in use.
pub struct JoinedClique {
    /// Its number among those of the connection, from 1.
    pub number: u32,
    pub clique: Arc<GpuClique>,
    /// The GPUs of this side and of the peer.
    pub gpus: [BTreeSet<u32>; 2],
    /// Of each GPU of this side.
    pub scratch: BTreeMap<u32, Arc<GpuScratch>>,
}

/// The memory of a GPU with which cancelled launches take part, [`PIECE_MAX`] bytes each.
pub struct GpuScratch {
    /// Zeros, which are sent. Nothing is received there, so no peer gets the bytes of another one.
    pub zeros: DeviceMemory,
    /// The destination of bytes that are never read.
    pub sink: DeviceMemory,
}

impl GpuScratch {
    /// Returns the memory of a GPU. The first call for it allocates, and the process keeps it: the driver waits for all operations of a
    /// GPU before it frees memory, and some of them may wait for a peer.
    pub fn of_gpu(gpu: &Gpu) -> Result<Arc<Self>, CliqueError> {
        static OF_GPUS: Mutex<BTreeMap<u32, Arc<GpuScratch>>> = Mutex::new(BTreeMap::new());
        let mut of_gpus = lock(&OF_GPUS);
        if let Some(scratch) = of_gpus.get(&gpu.ordinal()) {
            return Ok(Arc::clone(scratch));
        }
        let allocate = || DeviceMemory::allocate(gpu, PIECE_MAX as usize);
        let failed = |error| CliqueError::Gpu { gpu: gpu.ordinal(), error };
        let (zeros, sink) = (allocate().map_err(failed)?, allocate().map_err(failed)?);
        let nothing = vec![0; PIECE_MAX as usize];
        write_device_bytes(&zeros, 0, &nothing).map_err(|error| CliqueError::Ended(error.to_string()))?;
        let scratch = Arc::new(Self { zeros, sink });
        of_gpus.insert(gpu.ordinal(), Arc::clone(&scratch));
        Ok(scratch)
    }
}

impl JoinedClique {
    /// Returns the address of the memory with which a cancelled launch takes part on a GPU of this side.
    pub fn scratch_address(&self, gpu: u32, is_received: bool) -> Option<u64> {
        let scratch = self.scratch.get(&gpu)?;
        Some(if is_received { scratch.sink.address() } else { scratch.zeros.address() })
    }

    /// Returns whether it has both GPUs of a piece, as seen by the leader or by the follower.
    pub fn has_both(&self, piece: &CliquePiece, leads: bool) -> bool {
        let (own, other) = piece.gpus(leads);
        self.gpus[0].contains(&own) && self.gpus[1].contains(&other)
    }
}

/// Returns a GPU of a member as a member of a clique.
pub const fn clique_member(member: MemberId, gpu: u32) -> CliqueMember {
    CliqueMember { task: member.task.0, incarnation: member.incarnation.get(), device: gpu }
}
