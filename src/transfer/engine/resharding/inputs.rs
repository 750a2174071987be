//! The arrays that are resharded together, and this task's shards of them.
//!
//! Begin at [`ReshardArray`].

use std::collections::BTreeMap;

use crate::base::membership::DeviceId;
use crate::memory::Buffer;
use crate::plan::{BufferRole, Plan, StepEnd};

/// The shards of this task's devices, before and after the resharding.
#[derive(Debug, Clone, Default)]
pub struct ShardBuffers {
    /// The shards of the array as it is.
    pub source: BTreeMap<DeviceId, Buffer>,
    /// The shards of the array as it is to become.
    pub destination: BTreeMap<DeviceId, Buffer>,
}

impl ShardBuffers {
    /// Returns the shard of one end of a step.
    pub(super) fn shard_of(&self, side: &StepEnd) -> Option<&Buffer> {
        match side.buffer {
            BufferRole::Source => self.source.get(&side.device),
            BufferRole::Destination => self.destination.get(&side.device),
        }
    }
}

/// One of the arrays that are resharded together.
#[derive(Debug, Clone, Copy)]
pub struct ReshardArray<'a> {
    /// Its plan.
    pub plan: &'a Plan,
    /// Its shards.
    pub shards: &'a ShardBuffers,
}
