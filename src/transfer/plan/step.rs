//! A step of a plan: one copy operation, with its regions and its runs (contiguous byte ranges).
//!
//! `staging.rs` computes the staging offsets. Begin at [`Step`].

use std::fmt;

use serde::{Deserialize, Serialize};

use super::bounded::deserialize_at_most;
use super::{DeviceId, HostName, MAX_RANK, PlanError, TaskId, TransferKey};

/// The distance that the bytes of a step travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum StepClass {
    /// None: the device holds the same tile before and after, so the buffer itself can be handed on.
    SameBuffer,
    /// Within a task: on one device, or between two of them.
    LocalCopy,
    /// To another task on the same host.
    SameHost,
    /// To another host.
    AcrossHosts,
}

impl StepClass {
    /// All classes, the nearest first.
    pub const ALL: [Self; 4] = [Self::SameBuffer, Self::LocalCopy, Self::SameHost, Self::AcrossHosts];

    /// Returns whether the step needs a transport, and not only a copy.
    #[must_use]
    pub const fn leaves_task(self) -> bool {
        matches!(self, Self::SameHost | Self::AcrossHosts)
    }

    /// Returns the name as text.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::SameBuffer => "same buffer",
            Self::LocalCopy => "local copy",
            Self::SameHost => "same host",
            Self::AcrossHosts => "across hosts",
        }
    }
}

impl fmt::Display for StepClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The role of a device's buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BufferRole {
    /// The shard of the array as it is.
    Source,
    /// The shard of the array as it is to become.
    Destination,
}

impl BufferRole {
    /// Returns the name as text.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Source => "source",
            Self::Destination => "destination",
        }
    }
}

/// A box of elements inside a shard's buffer, in elements.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShardRegion {
    /// The first element in each dimension, relative to the shard.
    #[serde(deserialize_with = "deserialize_at_most::<_, _, MAX_RANK>")]
    pub start: Vec<u64>,
    /// The number of elements in each dimension.
    #[serde(deserialize_with = "deserialize_at_most::<_, _, MAX_RANK>")]
    pub extent: Vec<u64>,
}

/// The memory ranges of a region: `run_bytes` bytes at `offset`, and at the offset of every combination of
/// the loops. The runs are as long, and as few, as possible.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StridedRuns {
    /// The offset of the first run in the buffer, in bytes.
    pub offset: u64,
    /// The length of each run in bytes.
    pub run_bytes: u64,
    /// The number of turns of each loop, the outermost first.
    #[serde(deserialize_with = "deserialize_at_most::<_, _, MAX_RANK>")]
    pub counts: Vec<u64>,
    /// The distance of two turns of each loop, in bytes.
    #[serde(deserialize_with = "deserialize_at_most::<_, _, MAX_RANK>")]
    pub strides: Vec<u64>,
}

impl StridedRuns {
    /// Returns the number of runs.
    #[must_use]
    pub fn count(&self) -> u64 {
        if self.run_bytes == 0 { 0 } else { self.counts.iter().product() }
    }

    /// Returns the bytes of all runs together.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.count() * self.run_bytes
    }
}

/// A range in the staging memory of one device's buffer, which is as large as that shard. Different regions
/// of a buffer never overlap there, and bytes that are passed on are sent from where they arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Staging {
    /// The offset of the range in bytes.
    pub offset: u64,
    /// The length of the range in bytes.
    pub bytes: u64,
}

/// One end of a step.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StepEnd {
    /// The device.
    pub device: DeviceId,
    /// The task that owns it.
    pub task: TaskId,
    /// The host on which that task runs.
    pub host: HostName,
    /// The role of the device's buffer.
    pub buffer: BufferRole,
    /// The size of that shard in each dimension, in elements.
    #[serde(deserialize_with = "deserialize_at_most::<_, _, MAX_RANK>")]
    pub shape: Vec<u64>,
    /// The part of the shard.
    pub region: ShardRegion,
    /// The memory ranges of that part.
    pub runs: StridedRuns,
    /// The range of this buffer's staging memory in which the task packs the region, or receives it packed,
    /// if its runs are too short to be moved one by one.
    pub staging: Option<Staging>,
}

/// One copy of a plan.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Step {
    /// The number of the step in the plan.
    pub index: u32,
    /// The key by which both sides know the step.
    pub key: TransferKey,
    /// The distance that its bytes travel.
    pub class: StepClass,
    /// The number of bytes.
    pub bytes: u64,
    /// The step that must be done before, because it writes what this step reads. It always has a smaller
    /// number.
    pub after: Option<u32>,
    /// The side that is read.
    pub source: StepEnd,
    /// The side that is written.
    pub destination: StepEnd,
}

impl ShardRegion {
    /// Returns the memory ranges of the region in a dense, row-major buffer of `shape`, with elements of
    /// `item` bytes.
    ///
    /// # Errors
    /// Returns [`PlanError::Region`] if the region reaches beyond the shape or has another rank, and
    /// [`PlanError::TooLarge`] if the size of the buffer exceeds 64 bits.
    pub fn runs(&self, shape: &[u64], item: u64) -> Result<StridedRuns, PlanError> {
        self.bounds_within(shape)?;
        byte_strides(shape, item)?;
        Ok(runs(shape, self, item))
    }

    /// Returns the first element and the one after the last in each dimension, if the region lies inside the
    /// shape.
    pub(super) fn bounds_within(&self, shape: &[u64]) -> Result<Vec<(u64, u64)>, PlanError> {
        let wrong = |why: String| PlanError::Region { what: "the region", why };
        if self.start.len() != shape.len() || self.extent.len() != shape.len() || shape.len() > MAX_RANK {
            let ranks = (self.start.len(), self.extent.len(), shape.len());
            return Err(wrong(format!(
                "start, extent and buffer have {ranks:?} dimensions, of at most {MAX_RANK}"
            )));
        }
        let ends = self.start.iter().zip(&self.extent).zip(shape).enumerate();
        ends.map(|(dimension, ((&start, &extent), &size))| match start.checked_add(extent) {
            Some(end) if end <= size => Ok((start, end)),
            _ => {
                Err(wrong(format!("{extent} elements from {start} on, of {size}, in dimension {dimension}")))
            }
        })
        .collect()
    }
}

/// Returns the runs of a region that is known to lie inside the shape.
pub(super) fn runs(shape: &[u64], region: &ShardRegion, item: u64) -> StridedRuns {
    let none = StridedRuns { offset: 0, run_bytes: 0, counts: Vec::new(), strides: Vec::new() };
    if item == 0 || region.extent.contains(&0) {
        return none;
    }
    let Ok(strides) = byte_strides(shape, item) else { return none };
    let offset = region.start.iter().zip(&strides).map(|(start, stride)| start * stride).sum();
    let (run_bytes, loops) = fold_contiguous_dimensions(&region.extent, [&strides], item);
    let (counts, strides) = loops.into_iter().map(|(count, [stride])| (count, stride)).unzip();
    StridedRuns { offset, run_bytes, counts, strides }
}

/// Returns the distance of neighbours in each dimension of a dense, row-major buffer, in bytes.
pub(super) fn byte_strides(shape: &[u64], item: u64) -> Result<Vec<u64>, PlanError> {
    let mut strides = vec![item; shape.len()];
    let mut bytes = item;
    for (stride, &size) in strides.iter_mut().zip(shape).rev() {
        *stride = bytes;
        // A buffer without elements has no strides that matter, but they must not overflow.
        bytes = bytes.checked_mul(size.max(1)).ok_or(PlanError::TooLarge { what: "a buffer" })?;
    }
    Ok(strides)
}

/// Folds a box into one run and the loops around it, in each of `N` buffers at once: dimensions that are
/// contiguous in all of them become one. Returns the bytes of the run, and the loops with their strides, the
/// outermost first.
pub(super) fn fold_contiguous_dimensions<const N: usize>(
    extent: &[u64],
    strides: [&[u64]; N],
    item: u64,
) -> (u64, Vec<(u64, [u64; N])>) {
    let mut run = item;
    // The innermost first.
    let mut loops: Vec<(u64, [u64; N])> = Vec::new();
    for (dimension, &count) in extent.iter().enumerate().rev() {
        let here = strides.map(|strides| strides[dimension]);
        if count == 1 {
            continue;
        }
        match loops.last_mut() {
            None if here.iter().all(|&stride| stride == run) => run *= count,
            Some((inner, apart))
                if here.iter().zip(apart.iter()).all(|(&stride, &apart)| stride == apart * *inner) =>
            {
                *inner *= count;
            }
            _ => loops.push((count, here)),
        }
    }
    loops.reverse();
    (run, loops)
}
