//! Copies of regions between byte slices, and the execution of a plan inside one process.
//!
//! It knows no engine. Begin at [`copy_region`].

use std::collections::BTreeMap;

use super::step::{byte_strides, fold};
use super::{BufferRole, DeviceId, MAX_RANK, Plan, PlanError, Region, Runs};

/// The shards of an array by device: dense, row-major, each of exactly its own size.
pub type Shards = BTreeMap<DeviceId, Vec<u8>>;

/// A loop: the number of its turns, and the distance of two turns in bytes, on both sides.
type Loop = (usize, [usize; 2]);

/// Copies a box of elements from one dense, row-major buffer into another. Each range that is contiguous on
/// both sides is one copy.
///
/// # Errors
/// Returns [`PlanError::Region`] if the regions reach beyond their shapes or have different extents, or if a
/// buffer does not have the size of its shape.
pub fn copy_region(
    source: &[u8],
    source_shape: &[u64],
    source_region: &Region,
    destination: &mut [u8],
    destination_shape: &[u64],
    destination_region: &Region,
    item: u64,
) -> Result<(), PlanError> {
    if source_region.extent != destination_region.extent {
        return Err(misfit("a copy", "the regions have different extents"));
    }
    source_region.stretches(source_shape)?;
    destination_region.stretches(destination_shape)?;
    fits(source, source_shape, item, "the source buffer")?;
    fits(destination, destination_shape, item, "the destination buffer")?;
    if item == 0 || source_region.extent.contains(&0) {
        return Ok(());
    }
    let (from, to) = (byte_strides(source_shape, item)?, byte_strides(destination_shape, item)?);
    let begin = |region: &Region, strides: &[u64]| {
        to_usize(region.start.iter().zip(strides).map(|(start, stride)| start * stride).sum())
    };
    let at = [begin(source_region, &from), begin(destination_region, &to)];
    let (run, loops) = fold(&source_region.extent, [&from, &to], item);
    let loops: Vec<Loop> =
        loops.into_iter().map(|(count, strides)| (to_usize(count), strides.map(to_usize))).collect();
    walk(source, destination, at, &loops, to_usize(run));
    Ok(())
}

/// Packs the runs of a buffer into one contiguous range, in order.
///
/// # Errors
/// Returns [`PlanError::Region`] if the runs reach beyond the buffer, or the range does not have their size.
pub fn pack(buffer: &[u8], runs: &Runs, packed: &mut [u8]) -> Result<(), PlanError> {
    let loops = checked(runs, buffer.len(), packed.len())?;
    walk(buffer, packed, [to_usize(runs.offset), 0], &loops, to_usize(runs.run_bytes));
    Ok(())
}

/// Unpacks one contiguous range into the runs of a buffer, in order: the reverse of [`pack`].
///
/// # Errors
/// Returns the errors of [`pack`].
pub fn unpack(packed: &[u8], runs: &Runs, buffer: &mut [u8]) -> Result<(), PlanError> {
    let mut loops = checked(runs, buffer.len(), packed.len())?;
    for (_, strides) in &mut loops {
        strides.reverse();
    }
    walk(packed, buffer, [0, to_usize(runs.offset)], &loops, to_usize(runs.run_bytes));
    Ok(())
}

/// Calls `with` for each range that is one run, or part of one, on both sides: its offsets on the two sides,
/// and its length. Both sides must have the same number of bytes.
pub fn each_common_run(from: &Runs, to: &Runs, mut with: impl FnMut(usize, usize, usize)) {
    let (mut sources, mut targets) = (stretches(from), stretches(to));
    let (mut source, mut target) = ((0, 0), (0, 0));
    loop {
        if source.1 == 0 {
            let Some(next) = sources.next() else { return };
            source = next;
        }
        if target.1 == 0 {
            let Some(next) = targets.next() else { return };
            target = next;
        }
        let len = source.1.min(target.1);
        if len == 0 {
            return;
        }
        with(source.0, target.0, len);
        source = (source.0 + len, source.1 - len);
        target = (target.0 + len, target.1 - len);
    }
}

/// Returns the offset and the length of each run.
fn stretches(runs: &Runs) -> impl Iterator<Item = (usize, usize)> + '_ {
    let run = to_usize(runs.run_bytes);
    (0..runs.count()).map(move |number| {
        let mut rest = number;
        let mut offset = runs.offset;
        for (count, stride) in runs.counts.iter().zip(&runs.strides).rev() {
            offset += rest % count * stride;
            rest /= count;
        }
        (to_usize(offset), run)
    })
}

impl Plan {
    /// Executes the whole plan inside this process, in the order of its steps.
    ///
    /// # Errors
    /// Returns [`PlanError::Buffer`] if a shard is missing or has another size. Nothing is copied then.
    pub fn execute(&self, source: &Shards, destination: &mut Shards) -> Result<(), PlanError> {
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
            let missing = || misfit("a step", "its buffer is gone");
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

/// Returns the loops of runs, after a check that the runs lie inside the buffer and fill the packed bytes
/// exactly.
fn checked(runs: &Runs, buffer: usize, packed: usize) -> Result<Vec<Loop>, PlanError> {
    let wrong = |why| misfit("the runs", why);
    if runs.counts.len() != runs.strides.len() || runs.counts.len() > MAX_RANK {
        return Err(wrong("there must be a stride for each count, and not too many"));
    }
    let empty = runs.run_bytes == 0 || runs.counts.contains(&0);
    let total = runs.counts.iter().try_fold(runs.run_bytes, |total, &count| total.checked_mul(count));
    match total {
        _ if empty && packed == 0 => return Ok(vec![(0, [0, 0])]),
        Some(total) if !empty && total == packed as u64 => {}
        _ => return Err(wrong("the packed bytes are not as many as the runs have")),
    }
    let reach = runs.counts.iter().zip(&runs.strides).try_fold(runs.run_bytes, |reach, (&count, &stride)| {
        (count - 1).checked_mul(stride).and_then(|far| reach.checked_add(far))
    });
    if reach.and_then(|reach| reach.checked_add(runs.offset)).is_none_or(|end| end > buffer as u64) {
        return Err(wrong("they reach beyond the buffer"));
    }
    let mut apart = to_usize(runs.run_bytes);
    let mut loops: Vec<Loop> = Vec::with_capacity(runs.counts.len());
    for (&count, &stride) in runs.counts.iter().zip(&runs.strides).rev() {
        loops.push((to_usize(count), [to_usize(stride), apart]));
        // The product is at most the number of packed bytes.
        apart *= to_usize(count);
    }
    loops.reverse();
    Ok(loops)
}

/// Copies runs of `run` bytes between the offsets `at`, for every turn of the loops. The caller has checked
/// that all of it lies inside the buffers.
fn walk(source: &[u8], destination: &mut [u8], at: [usize; 2], loops: &[Loop], run: usize) {
    match loops {
        [] => destination[at[1]..at[1] + run].copy_from_slice(&source[at[0]..at[0] + run]),
        // To copy a few bytes through a call costs many times as much as to copy a number.
        &[(count, apart)] => match run {
            1 => turns::<1>(source, destination, at, count, apart),
            2 => turns::<2>(source, destination, at, count, apart),
            4 => turns::<4>(source, destination, at, count, apart),
            8 => turns::<8>(source, destination, at, count, apart),
            16 => turns::<16>(source, destination, at, count, apart),
            _ => {
                for turn in 0..count {
                    let [from, to] = [at[0] + turn * apart[0], at[1] + turn * apart[1]];
                    destination[to..to + run].copy_from_slice(&source[from..from + run]);
                }
            }
        },
        [(count, apart), inner @ ..] => {
            for turn in 0..*count {
                walk(source, destination, [at[0] + turn * apart[0], at[1] + turn * apart[1]], inner, run);
            }
        }
    }
}

/// Performs the innermost loop, for runs of a size that is known at compile time.
fn turns<const RUN: usize>(
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

fn fits(buffer: &[u8], shape: &[u64], item: u64, what: &'static str) -> Result<(), PlanError> {
    let empty = shape.contains(&0);
    let wanted =
        if empty { Some(0) } else { shape.iter().try_fold(item, |bytes, &size| bytes.checked_mul(size)) };
    if wanted == Some(buffer.len() as u64) {
        return Ok(());
    }
    Err(misfit(what, &format!("it has {} bytes, and its shape {wanted:?}", buffer.len())))
}

fn misfit(what: &'static str, why: &str) -> PlanError {
    PlanError::Region { what, why: why.to_owned() }
}

/// Converts a number that is known to fit a buffer in memory.
fn to_usize(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}
