//! The staging memory that a plan provides for regions that are packed for their transfer.
//!
//! If a region is sent to another task and consists of several runs of less than 4 KiB, the sender packs it into one
//! range, and the receiver unpacks it. Each buffer with such a region has staging memory of the buffer's own size.
//! The tiles of the destination cut each shard of the source into a grid, and the tiles of the source cut each shard
//! of the destination into one. The offset of a region in the staging memory is the total size of the regions before
//! it in the row-major order of this grid. So no two regions of a buffer overlap in its staging memory, and no step
//! waits for memory of an unrelated step. Therefore no order of the steps can deadlock a plan. A region is packed
//! once for all its recipients. A task that passes bytes on sends them from the memory at which they arrived.
//!
//! The engine (`engine/resharding/`) does not use these offsets: it allocates staging memory for each step. Begin at
//! [`needs_staging`] and [`staging_offset`].

use super::region_routing::StepRecord;
use super::step::BufferRole;
use super::tiles::RegionBounds;

/// The run length in bytes below which a region is packed. Above it, a vectored read or write of the runs
/// costs less than a copy.
const PACKED_BELOW: u64 = 4096;

/// The devices whose buffers need staging memory.
pub(super) struct DevicesNeedingStaging {
    pub source: Vec<bool>,
    pub destination: Vec<bool>,
}

impl DevicesNeedingStaging {
    /// Creates the set in which none of `devices` devices needs any.
    pub fn with_none_staged(devices: usize) -> Self {
        Self { source: vec![false; devices], destination: vec![false; devices] }
    }

    /// Adds the buffers that the steps of a region stage.
    pub fn add_devices_of(&mut self, steps: &[StepRecord], lies: &RegionBounds, item: u64) {
        let mut packed = None;
        for step in steps.iter().filter(|step| step.class.leaves_task()) {
            let from = match step.source_role() {
                BufferRole::Source => &mut self.source[step.source as usize],
                BufferRole::Destination => &mut self.destination[step.source as usize],
            };
            let (held, wanted) = *packed.get_or_insert_with(|| {
                (
                    needs_staging(&lies.common, &lies.held, item),
                    needs_staging(&lies.common, &lies.wanted, item),
                )
            });
            *from |= if step.source_role() == BufferRole::Source { held } else { wanted };
            self.destination[step.destination as usize] |= wanted;
        }
    }
}

/// Returns whether a region of a tile consists of several short runs.
pub(super) fn needs_staging(region: &[(u64, u64)], tile: &[(u64, u64)], item: u64) -> bool {
    let mut run = item;
    let mut whole = true;
    let mut several = false;
    for (&(start, end), &(first, last)) in region.iter().zip(tile).rev() {
        if whole {
            run *= end - start;
            whole = end - start == last - first;
        } else {
            several |= end - start > 1;
        }
    }
    several && run < PACKED_BELOW
}

/// Returns the offset of a region in the staging memory of its shard, in bytes. A region that precedes it in
/// one dimension counts with the full size of the later dimensions, and with this region's extent in the
/// earlier ones.
pub(super) fn staging_offset(region: &[(u64, u64)], tile: &[(u64, u64)], item: u64) -> u64 {
    let (mut place, mut outer) = (0, item);
    for (&(start, end), &(first, last)) in region.iter().zip(tile) {
        place = place * (last - first) + outer * (start - first);
        outer *= end - start;
    }
    place
}
