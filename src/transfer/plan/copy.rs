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
#[derive(Debug, Clone)]
pub(crate) struct RunCopies {
    /// The offsets of the first run, on both sides.
    at: [usize; 2],
    /// The outermost first.
    loops: Vec<StridedLoop>,
    /// The bytes of a run.
    run: usize,
}

/// Copies of one length at equal distances: a part of one of the loops of [`RunCopies`], or a part of a long run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RowBlock {
    /// The offsets of the first row, on both sides.
    pub at: [usize; 2],
    /// The number of rows.
    pub count: usize,
    /// The distances from one row to the next, on both sides.
    pub pitches: [usize; 2],
    /// The bytes of a row.
    pub len: usize,
}

/// The copies of [`RunCopies`] as blocks of rows, in any order: the rows of a block are turns of the loop with the most turns. A long
/// run is several blocks of one row.
#[derive(Debug)]
pub(crate) struct RowBlocks {
    at: [usize; 2],
    /// The loop whose turns are rows.
    rows: StridedLoop,
    others: Vec<StridedLoop>,
    run: usize,
    /// The bytes of a row: of a run, or of a part of it.
    row_len: usize,
    /// The rows of a block.
    rows_each: usize,
}

impl RowBlocks {
    /// Returns the number of blocks.
    pub(crate) fn count(&self) -> usize {
        let turns = self.others.iter().fold(1_usize, |turns, (count, _)| turns.saturating_mul(*count));
        turns.saturating_mul(self.blocks_of_a_turn()).saturating_mul(self.parts_of_a_run())
    }

    /// Returns the bytes of the greatest block.
    pub(crate) const fn block_bytes(&self) -> usize {
        self.row_len.saturating_mul(self.rows_each)
    }

    /// Returns the rows of the greatest block.
    pub(crate) const fn block_rows(&self) -> usize {
        self.rows_each
    }

    const fn blocks_of_a_turn(&self) -> usize {
        self.rows.0.div_ceil(self.rows_each)
    }

    const fn parts_of_a_run(&self) -> usize {
        if self.run == 0 { 0 } else { self.run.div_ceil(self.row_len) }
    }

    /// Returns the block with this number.
    pub(crate) fn block(&self, number: usize) -> RowBlock {
        let (number, within) =
            (number / self.parts_of_a_run(), number % self.parts_of_a_run() * self.row_len);
        let (mut turn, first) =
            (number / self.blocks_of_a_turn(), number % self.blocks_of_a_turn() * self.rows_each);
        let (rows, pitches) = self.rows;
        let mut at = [0, 1].map(|side| self.at[side] + within + first * pitches[side]);
        for (count, apart) in self.others.iter().rev() {
            (0..2).for_each(|side| at[side] += turn % count * apart[side]);
            turn /= count;
        }
        let len = self.row_len.min(self.run - within);
        RowBlock { at, count: self.rows_each.min(rows - first), pitches, len }
    }
}

impl RunCopies {
    /// Returns the copies as blocks of rows, of `bytes` and of `rows` at most.
    pub(crate) fn row_blocks(&self, bytes: usize, rows: usize) -> RowBlocks {
        let mut others = self.loops.clone();
        let most = (0..others.len()).max_by_key(|at| others[*at].0);
        let rows_loop = most.map_or((1, [self.run; 2]), |at| others.remove(at));
        let row_len = self.run.clamp(1, bytes.max(1));
        let rows_each =
            if row_len < self.run { 1 } else { (bytes / row_len).clamp(1, rows.min(rows_loop.0).max(1)) };
        RowBlocks { at: self.at, rows: rows_loop, others, run: self.run, row_len, rows_each }
    }

    /// Returns the ends of the bytes that the copies use, on both sides.
    pub(crate) fn ends(&self) -> [usize; 2] {
        let end = |side: usize| {
            self.loops.iter().fold(self.at[side].saturating_add(self.run), |end, (count, apart)| {
                end.saturating_add(count.saturating_sub(1).saturating_mul(apart[side]))
            })
        };
        [end(0), end(1)]
    }

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

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns where each byte of a copy comes from and goes to.
    fn single_bytes((from, to, len): (usize, usize, usize)) -> impl Iterator<Item = (usize, usize)> {
        (0..len).map(move |byte| (from + byte, to + byte))
    }

    #[test]
    fn blocks_of_rows_are_the_same_copies() {
        let mut random = fastrand::Rng::with_seed(5);
        for _ in 0..500 {
            let loops: Vec<StridedLoop> = (0..random.usize(0..4))
                .map(|_| (random.usize(1..6), [random.usize(0..100), random.usize(0..100)]))
                .collect();
            let copies =
                RunCopies { at: [random.usize(0..50), random.usize(0..50)], loops, run: random.usize(1..9) };
            let mut wanted = Vec::new();
            copies.for_each_copy(|from, to, len| wanted.push((from, to, len)));
            let (most, rows) = (random.usize(1..30), random.usize(1..4));
            let blocks = copies.row_blocks(most, rows);
            let (mut found, mut greatest) = (Vec::new(), 0);
            for number in 0..blocks.count() {
                let RowBlock { at, count, pitches, len } = blocks.block(number);
                assert!(count > 0 && count <= blocks.block_rows() && count <= rows && count * len <= most);
                greatest = greatest.max(count * len);
                let row = |row| (at[0] + row * pitches[0], at[1] + row * pitches[1], len);
                found.extend((0..count).map(row).flat_map(single_bytes));
            }
            assert_eq!(greatest, blocks.block_bytes(), "{copies:?}");
            let ends = [0, 1].map(|side| {
                wanted.iter().map(|copy| if side == 0 { copy.0 + copy.2 } else { copy.1 + copy.2 }).max()
            });
            assert_eq!(copies.ends().map(Some), ends);
            let mut wanted: Vec<_> = wanted.into_iter().flat_map(single_bytes).collect();
            wanted.sort_unstable();
            found.sort_unstable();
            assert_eq!(found, wanted, "{copies:?}");
        }
        let nothing = RunCopies { at: [0; 2], loops: vec![(0, [1, 1]), (3, [1, 1])], run: 4 };
        assert_eq!(nothing.row_blocks(100, 100).count(), 0);
        assert_eq!(RunCopies { at: [0; 2], loops: Vec::new(), run: 0 }.row_blocks(100, 100).count(), 0);
    }
}
