//! Staging memory for regions that are packed for their transfer.
//!
//! A region that leaves its task in several runs of less than 4 KiB is packed into one range before it is
//! sent, and unpacked where it arrives. Each buffer with such a region has staging memory of its own size. A
//! region's offset in it follows all regions that come before in the row-major order of the grid into which
//! the tiles of the other side cut the shard. So no two regions of a buffer overlap there, and no step waits
//! for memory that an unrelated step holds: no order of the steps can deadlock a plan. A region is packed
//! once, however many recipients it has, and bytes that are passed on are sent from where they arrived. Begin
//! at [`is_packed`] and [`place`].

use super::make::Record;
use super::step::BufferRole;
use super::tiles::Stretches;

/// The run length in bytes below which a region is packed. Above it, a vectored read or write of the runs
/// costs less than a copy.
const PACKED_BELOW: u64 = 4096;

/// The devices whose buffers need staging memory.
pub(super) struct Rooms {
    pub source: Vec<bool>,
    pub destination: Vec<bool>,
}

impl Rooms {
    /// Creates the set in which none of `devices` devices needs any.
    pub fn of(devices: usize) -> Self {
        Self { source: vec![false; devices], destination: vec![false; devices] }
    }

    /// Adds the buffers that the steps of a region stage.
    pub fn note(&mut self, steps: &[Record], lies: &Stretches, item: u64) {
        let mut packed = None;
        for step in steps.iter().filter(|step| step.class.leaves_task()) {
            let from = match step.from() {
                BufferRole::Source => &mut self.source[step.source as usize],
                BufferRole::Destination => &mut self.destination[step.source as usize],
            };
            let (held, wanted) = *packed.get_or_insert_with(|| {
                (is_packed(&lies.common, &lies.held, item), is_packed(&lies.common, &lies.wanted, item))
            });
            *from |= if step.from() == BufferRole::Source { held } else { wanted };
            self.destination[step.destination as usize] |= wanted;
        }
    }
}

/// Returns whether a region of a tile consists of several short runs.
pub(super) fn is_packed(region: &[(u64, u64)], tile: &[(u64, u64)], item: u64) -> bool {
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
pub(super) fn place(region: &[(u64, u64)], tile: &[(u64, u64)], item: u64) -> u64 {
    let (mut place, mut outer) = (0, item);
    for (&(start, end), &(first, last)) in region.iter().zip(tile) {
        place = place * (last - first) + outer * (start - first);
        outer *= end - start;
    }
    place
}
