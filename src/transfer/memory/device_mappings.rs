//! Memory of one GPU as the other GPUs of this process access it. Begin at [`DeviceMappings::mapped_for`].

use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex};

use muster_gpu::{Gpu, ImportedMemory};

use crate::base::sync::lock;

/// The mappings of one range of memory, by the GPU that accesses it; none if that GPU cannot. Each GPU maps the memory at its
/// first copy.
#[derive(Debug, Default)]
pub struct DeviceMappings(Mutex<Vec<(Gpu, Option<Arc<ImportedMemory>>)>>);

impl DeviceMappings {
    /// Returns the `len` bytes of memory behind a descriptor, which is the same in every call, as a GPU accesses them; none if
    /// it cannot. The driver may wait, so a thread that [reports copies](muster_gpu::is_reporting_thread) must not call it.
    pub fn mapped_for(
        &self,
        gpu: &Gpu,
        descriptor: BorrowedFd<'_>,
        len: usize,
    ) -> Option<Arc<ImportedMemory>> {
        let mut mappings = lock(&self.0);
        if let Some((_, memory)) = mappings.iter().find(|(other, _)| other == gpu) {
            return memory.clone();
        }
        let memory = ImportedMemory::import(gpu, descriptor, len).map(Arc::new).inspect_err(|error| {
            let gpu = gpu.ordinal();
            tracing::warn!(gpu, %error, "a GPU cannot map the memory of another GPU: its bytes go through host memory");
        });
        let memory = memory.ok();
        mappings.push((gpu.clone(), memory.clone()));
        memory
    }
}
