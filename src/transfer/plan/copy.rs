//! Copies regions between byte slices, and executes a plan inside one process.
//!
//! This module uses no transfer engine. Transfer engines copy with the same loops ([`RunCopies`]). Begin at
//! [`copy_region`].

use std::collections::BTreeMap;

use super::step::{byte_strides, fold_contiguous_dimensions};
use super::{BufferRole, DeviceId, MAX_RANK, Plan, PlanError, ShardRegion, Step, StridedRuns};

/// The shards of an array by device: dense, row-major, each of exactly its own size.
pub type ShardContents = BTreeMap<DeviceId, Vec<u8>>;

/// A loop: the number of its turns, and the distance of two turns in bytes, on both sides.
type StridedLoop = (usize, [usize; 2]);

/// Copies a box of elements from one dense, row-major buffer into another. Each range that is contiguous on
/// both sides is one copy.
///
/// # Errors
/// Returns [`PlanError::Region`] if the regions reach beyond their shapes or have different extents, or if a
/// buffer does not have the size of its shape.
pub fn copy_region(
    source: &[u8],
    source_shape: &[u64],
    source_region: &ShardRegion,
    destination: &mut [u8],
    destination_shape: &[u64],
    destination_region: &ShardRegion,
    item: u64,
) -> Result<(), PlanError> {
    if source_region.extent != destination_region.extent {
        return Err(invalid_region_error("a copy", "the regions have different extents"));
    }
    source_region.bounds_within(source_shape)?;
    destination_region.bounds_within(destination_shape)?;
    check_buffer_size(source, source_shape, item, "the source buffer")?;
    check_buffer_size(destination, destination_shape, item, "the destination buffer")?;
    RunCopies::copies_between_regions(
        (source_shape, source_region),
        (destination_shape, destination_region),
        item,
    )
    .perform(source, destination);
    Ok(())
}

/// Packs the runs of a buffer into one contiguous range, in order.
///
/// # Errors
/// Returns [`PlanError::Region`] if the runs reach beyond the buffer, or the range does not have their size.
pub fn pack_runs(buffer: &[u8], runs: &StridedRuns, packed: &mut [u8]) -> Result<(), PlanError> {
    if check_runs(runs, buffer.len(), packed.len())? {
        RunCopies::copies_that_pack(runs).perform(buffer, packed);
    }
    Ok(())
}

/// Unpacks one contiguous range into the runs of a buffer, in order: the reverse of [`pack_runs`].
///
/// # Errors
/// Returns the errors of [`pack_runs`].
pub fn unpack_runs(packed: &[u8], runs: &StridedRuns, buffer: &mut [u8]) -> Result<(), PlanError> {
    if check_runs(runs, buffer.len(), packed.len())? {
        RunCopies::copies_that_unpack(runs).perform(packed, buffer);
    }
    Ok(())
}

/// Copies between two sides, each of one run: a nest of loops around it.
#[derive(Debug)]
pub(crate) struct RunCopies {
    /// The offsets of the first run, on both sides.
    at: [usize; 2],
    /// The outermost first.
    loops: Vec<StridedLoop>,
    /// The bytes of a run.
    run: usize,
}

impl RunCopies {
    /// Returns the copies between two regions of one extent, each inside its shape: the ranges that are
    /// contiguous on both sides.
    pub(crate) fn copies_between_regions(
        source: (&[u64], &ShardRegion),
        destination: (&[u64], &ShardRegion),
        item: u64,
    ) -> Self {
        let extent = &source.1.extent;
        if item == 0 || extent.contains(&0) {
            return Self { at: [0; 2], loops: Vec::new(), run: 0 };
        }
        // A shape that overflows is of no buffer.
        let strides = |shape: &[u64]| byte_strides(shape, item).unwrap_or_else(|_| vec![0; shape.len()]);
        let (from, to) = (strides(source.0), strides(destination.0));
        let begin = |region: &ShardRegion, strides: &[u64]| {
            saturating_usize(region.start.iter().zip(strides).map(|(start, stride)| start * stride).sum())
        };
        let at = [begin(source.1, &from), begin(destination.1, &to)];
        let (run, loops) = fold_contiguous_dimensions(extent, [&from, &to], item);
        let loops = loops
            .into_iter()
            .map(|(count, strides)| (saturating_usize(count), strides.map(saturating_usize)));
        Self { at, loops: loops.collect(), run: saturating_usize(run) }
    }

    /// Returns the copies of runs into one contiguous range, in order.
    pub(crate) fn copies_that_pack(runs: &StridedRuns) -> Self {
        let run = saturating_usize(runs.run_bytes);
        let mut apart = run;
        let mut loops: Vec<StridedLoop> = Vec::with_capacity(runs.counts.len());
        for (&count, &stride) in runs.counts.iter().zip(&runs.strides).rev() {
            loops.push((saturating_usize(count), [saturating_usize(stride), apart]));
            // The product is at most the number of packed bytes.
            apart = apart.saturating_mul(saturating_usize(count));
        }
        loops.reverse();
        Self { at: [saturating_usize(runs.offset), 0], loops, run }
    }

    /// Returns the copies of one contiguous range into runs, in order.
    pub(crate) fn copies_that_unpack(runs: &StridedRuns) -> Self {
        let mut copies = Self::copies_that_pack(runs);
        copies.at.reverse();
        copies.loops.iter_mut().for_each(|(_, strides)| strides.reverse());
        copies
    }

    /// Calls `with` for each copy: its offsets on the two sides, and its length.
    pub(crate) fn for_each_copy(&self, mut with: impl FnMut(usize, usize, usize)) {
        if self.run > 0 {
            for_each_innermost_loop(self.at, &self.loops, &mut |at, (count, apart)| {
                for turn in 0..count {
                    with(at[0] + turn * apart[0], at[1] + turn * apart[1], self.run);
                }
            });
        }
    }

    /// Performs the copies. The caller has checked that all of them lie inside the buffers.
    fn perform(&self, source: &[u8], destination: &mut [u8]) {
        let run = self.run;
        for_each_innermost_loop(self.at, &self.loops, &mut |at, (count, apart)| match run {
            // To copy a few bytes through a call costs many times as much as to copy a number.
            1 => copy_fixed_runs::<1>(source, destination, at, count, apart),
            2 => copy_fixed_runs::<2>(source, destination, at, count, apart),
            4 => copy_fixed_runs::<4>(source, destination, at, count, apart),
            8 => copy_fixed_runs::<8>(source, destination, at, count, apart),
            16 => copy_fixed_runs::<16>(source, destination, at, count, apart),
            0 => {}
            _ => {
                for turn in 0..count {
                    let [from, to] = [at[0] + turn * apart[0], at[1] + turn * apart[1]];
                    destination[to..to + run].copy_from_slice(&source[from..from + run]);
                }
            }
        });
    }
}

/// Calls `innermost` with the innermost loop, and the offsets at which it begins, for every turn of the others.
fn for_each_innermost_loop(
    at: [usize; 2],
    loops: &[StridedLoop],
    innermost: &mut impl FnMut([usize; 2], StridedLoop),
) {
    match loops {
        [] => innermost(at, (1, [0, 0])),
        &[last] => innermost(at, last),
        [(count, apart), inner @ ..] => {
            for turn in 0..*count {
                for_each_innermost_loop([at[0] + turn * apart[0], at[1] + turn * apart[1]], inner, innermost);
            }
        }
    }
}

impl Plan {
    /// Returns the copies of one of its steps, between the shards of both ends.
    pub(crate) fn step_copies(&self, step: &Step) -> RunCopies {
        let (from, to) = (&step.source, &step.destination);
        RunCopies::copies_between_regions((&from.shape, &from.region), (&to.shape, &to.region), self.item)
    }

    /// Executes the whole plan inside this process, in the order of its steps.
    ///
    /// # Errors
    /// Returns [`PlanError::Buffer`] if a shard is missing or has another size. Nothing is copied then.
    pub fn execute(&self, source: &ShardContents, destination: &mut ShardContents) -> Result<(), PlanError> {
        for (role, array, shards) in [
            (BufferRole::Source, &self.source, source),
            (BufferRole::Destination, &self.destination, &*destination),
        ] {
            for &device in &array.sharding.mesh.devices {
                let wanted = self.shard_bytes(role, device);
                let found = shards.get(&device).map(|shard| shard.len() as u64);
                if found != Some(wanted) {
                    let found = found.unwrap_or(0);
                    return Err(PlanError::Buffer { device, role: role.name(), wanted, found });
                }
            }
        }
        for step in self.steps() {
            let missing = || invalid_region_error("a step", "its buffer is gone");
            let (from, to) = (&step.source, &step.destination);
            let mut into = std::mem::take(destination.get_mut(&to.device).ok_or_else(missing)?);
            let shards = if from.buffer == BufferRole::Source { source } else { &*destination };
            let shard = shards.get(&from.device).ok_or_else(missing)?;
            let done =
                copy_region(shard, &from.shape, &from.region, &mut into, &to.shape, &to.region, self.item);
            destination.insert(to.device, into);
            done?;
        }
        Ok(())
    }
}

/// Checks that the runs lie inside the buffer and fill the packed bytes exactly; returns whether they have bytes.
fn check_runs(runs: &StridedRuns, buffer: usize, packed: usize) -> Result<bool, PlanError> {
    let wrong = |why| invalid_region_error("the runs", why);
    if runs.counts.len() != runs.strides.len() || runs.counts.len() > MAX_RANK {
        return Err(wrong("there must be a stride for each count, and not too many"));
    }
    let empty = runs.run_bytes == 0 || runs.counts.contains(&0);
    let total = runs.counts.iter().try_fold(runs.run_bytes, |total, &count| total.checked_mul(count));
    match total {
        _ if empty && packed == 0 => return Ok(false),
        Some(total) if !empty && total == packed as u64 => {}
        _ => return Err(wrong("the packed bytes are not as many as the runs have")),
    }
    let reach = runs.counts.iter().zip(&runs.strides).try_fold(runs.run_bytes, |reach, (&count, &stride)| {
        (count - 1).checked_mul(stride).and_then(|far| reach.checked_add(far))
    });
    if reach.and_then(|reach| reach.checked_add(runs.offset)).is_none_or(|end| end > buffer as u64) {
        return Err(wrong("they reach beyond the buffer"));
    }
    Ok(true)
}

/// Performs the innermost loop, for runs of a size that is known at compile time.
fn copy_fixed_runs<const RUN: usize>(
    source: &[u8],
    destination: &mut [u8],
    at: [usize; 2],
    count: usize,
    apart: [usize; 2],
) {
    let [mut from, mut to] = at;
    for _ in 0..count {
        destination[to..to + RUN].copy_from_slice(&source[from..from + RUN]);
        from += apart[0];
        to += apart[1];
    }
}

fn check_buffer_size(buffer: &[u8], shape: &[u64], item: u64, what: &'static str) -> Result<(), PlanError> {
    let empty = shape.contains(&0);
    let wanted =
        if empty { Some(0) } else { shape.iter().try_fold(item, |bytes, &size| bytes.checked_mul(size)) };
    if wanted == Some(buffer.len() as u64) {
        return Ok(());
    }
    Err(invalid_region_error(what, &format!("it has {} bytes, and its shape {wanted:?}", buffer.len())))
}

fn invalid_region_error(what: &'static str, why: &str) -> PlanError {
    PlanError::Region { what, why: why.to_owned() }
}

/// Converts a number that is known to fit a buffer in memory.
fn saturating_usize(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}
