//! Memory for regions that are packed on their way.
//!
//! A region that leaves its task in several runs of less than 4 KiB is packed into one stretch before it is sent,
//! and unpacked where it arrives. Each buffer for which that happens has staging memory as large as itself, and in
//! it each region has a place: behind all that come before it in the row-major order of the grid into which the
//! tiles of the other side cut the shard. So no two regions of a buffer overlap there, and no step waits for memory
//! that a step on which it does not depend still holds: no order of the steps can stop a plan. A region is packed
//! once, however many recipients it has, and bytes that are passed on leave from where they arrived.

use super::make::Record;
use super::step::BufferRole;
use super::tiles::Stretches;

/// Runs shorter than this are packed. Above it, a vectored read or write of the runs themselves costs less than a
/// copy.
const PACKED_BELOW: u64 = 4096;

/// Which devices' buffers need room.
pub(super) struct Rooms {
    pub source: Vec<bool>,
    pub destination: Vec<bool>,
}

impl Rooms {
    /// None of so many yet.
    pub fn of(devices: usize) -> Self {
        Self { source: vec![false; devices], destination: vec![false; devices] }
    }

    /// Takes note of what the steps of a region need.
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

/// Returns whether a region of a tile lies in many runs that are short.
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

/// Returns where the place of a region is in the room of its shard. What comes before it in a dimension comes before it
/// with all of the dimensions behind, and with as much of those in front as the region has of them.
pub(super) fn place(region: &[(u64, u64)], tile: &[(u64, u64)], item: u64) -> u64 {
    let (mut place, mut outer) = (0, item);
    for (&(start, end), &(first, last)) in region.iter().zip(tile) {
        place = place * (last - first) + outer * (start - first);
        outer *= end - start;
    }
    place
}
