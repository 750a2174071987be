//! Room for what has to be packed on its way.
//!
//! A region that leaves its task in many short runs is packed into one stretch before it is sent, and unpacked where
//! it arrives. Both need room. A step gets room of its own, except for one case: a step that sends on what an earlier
//! step brought uses the room in which it was unpacked, if no other step that sends it on does. It comes after the
//! release of that room by its very nature. So no step ever waits for room that a step on which it does not depend
//! still holds, and a plan cannot stop for want of room, whatever order its steps are done in.

use super::PlanError;
use super::holders::Parties;
use super::make::Record;
use super::step::BufferRole;
use super::tiles::{NONE, Tiling, intersect, volume};

/// Runs shorter than this are packed. Above it, a vectored read or write of the runs themselves costs less than a
/// copy.
pub(super) const PACKED_BELOW: u64 = 4096;
/// Where a stretch of staging room may begin: at cache lines.
const ALIGNMENT: u64 = 64;
/// No room.
pub(super) const NOWHERE: u64 = u64::MAX;

/// The room that every step gets in its source's and in its destination's task.
#[derive(Debug, Clone)]
pub(super) struct Rooms {
    /// For each step, where its room begins, or [`NOWHERE`]. Empty if no step needs any.
    pub places: Vec<(u64, u64)>,
    /// How much room each task needs.
    pub tasks: Vec<u64>,
}

/// Assigns room to every step that needs it.
pub(super) fn assign(
    records: &[Record],
    parties: &Parties,
    source: &Tiling,
    destination: &Tiling,
    item: u64,
) -> Result<Rooms, PlanError> {
    let mut rooms = Rooms { places: Vec::new(), tasks: vec![0; parties.task_ids.len()] };
    // Steps whose room at the destination was taken over already.
    let mut taken = Vec::new();
    let (mut held, mut wanted, mut common) = (Vec::new(), Vec::new(), Vec::new());
    for (step, record) in records.iter().enumerate() {
        if !record.class.leaves_task() {
            continue;
        }
        let (from, to) = (record.source as usize, record.destination as usize);
        source.intervals(record.tile, &mut held);
        destination.intervals(parties.destination[to], &mut wanted);
        intersect(&held, &wanted, &mut common);
        let bytes = volume(&common) * item;
        // What is sent on is read from a shard of the same tile as the one that it is written to.
        let read_from = if record.from == BufferRole::Source { &held } else { &wanted };
        let (packed, unpacked) = (is_packed(&common, read_from, item), is_packed(&common, &wanted, item));
        if !packed && !unpacked {
            continue;
        }
        if rooms.places.is_empty() {
            rooms.places = vec![(NOWHERE, NOWHERE); records.len()];
            taken = vec![false; records.len()];
        }
        if packed {
            let before = record.after as usize;
            // The step before may have been a copy within the task, which has no room.
            let free = record.after != NONE && !taken[before] && rooms.places[before].1 != NOWHERE;
            rooms.places[step].0 = if free {
                taken[before] = true;
                rooms.places[before].1
            } else {
                take(&mut rooms.tasks[parties.tasks[from] as usize], bytes)?
            };
        }
        if unpacked {
            rooms.places[step].1 = take(&mut rooms.tasks[parties.tasks[to] as usize], bytes)?;
        }
    }
    Ok(rooms)
}

fn take(used: &mut u64, bytes: u64) -> Result<u64, PlanError> {
    let place = *used;
    let end = place.checked_add(bytes).and_then(|end| end.checked_next_multiple_of(ALIGNMENT));
    *used = end.ok_or(PlanError::TooLarge { what: "the staging room of a task" })?;
    Ok(place)
}

/// Whether a region of a tile lies in many runs that are short.
fn is_packed(region: &[(u64, u64)], tile: &[(u64, u64)], item: u64) -> bool {
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
