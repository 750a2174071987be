//! A range of host memory as fabrics know it. Begin at [`FabricRegistrations::registered_with`].
#![allow(unsafe_code, reason = "registers memory that its owner keeps mapped")]

use std::ptr::NonNull;
use std::sync::{Arc, Mutex};

use muster_fabric::{Fabric, RegisteredMemory};

use crate::base::sync::lock;

/// The registrations of one range of memory, by fabric; none if the fabric refused it. The memory is registered at its first use,
/// and stays so: a registration takes much longer than a read.
#[derive(Debug, Default)]
pub struct FabricRegistrations(Mutex<Vec<(Fabric, Option<Arc<RegisteredMemory>>)>>);

impl FabricRegistrations {
    /// Returns the registration of the `len` bytes at `base`, which are the same in every call; none if the fabric refuses the memory.
    ///
    /// # Safety
    /// The memory stays mapped until this is dropped, and until every registration that was returned is.
    pub unsafe fn registered_with(
        &self,
        fabric: &Fabric,
        base: NonNull<u8>,
        len: usize,
    ) -> Option<Arc<RegisteredMemory>> {
        let mut registrations = lock(&self.0);
        if let Some((_, memory)) = registrations.iter().find(|(other, _)| other == fabric) {
            return memory.clone();
        }
        // SAFETY: the caller guarantees the memory.
        let memory = unsafe { fabric.register(base, len) }.map(Arc::new).inspect_err(|error| {
            tracing::warn!(%error, len, "memory cannot be registered with the fabric: its bytes go through sockets");
        });
        let memory = memory.ok();
        registrations.push((fabric.clone(), memory.clone()));
        memory
    }
}
