//! The errors of making, reading and executing plans.
//!
//! Other modules detect the errors. Begin at [`PlanError`].

use super::{DeviceId, Dtype, TaskId};

/// The reason why a plan could not be made, read or executed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// A count or a length exceeds its limit.
    #[error("{what}: {count} is beyond the limit of {limit}")]
    TooMany {
        /// The thing that is counted.
        what: &'static str,
        /// Its number.
        count: u64,
        /// The limit.
        limit: u64,
    },
    /// The plan's text would be longer than the reader accepts.
    #[error(
        "a plan of {steps} steps is longer as JSON than the {} MiB that are written and read: hand on its source, destination, \
         placement and fan-out instead, from which everybody makes the same plan, or look at the steps of single tasks",
        super::limits::MAX_PLAN_TEXT >> 20
    )]
    TooLong {
        /// The number of steps.
        steps: usize,
    },
    /// A name is empty, too long, or contains control characters.
    #[error(
        "the name of {what} number {index} is empty, longer than {} bytes or has control characters",
        super::limits::MAX_NAME
    )]
    Name {
        /// The kind of thing that is named.
        what: &'static str,
        /// Its index.
        index: usize,
    },
    /// Two axes of a mesh have one name.
    #[error("the mesh has two axes named {0:?}")]
    DuplicateAxis(String),
    /// An axis has no device.
    #[error("axis {0:?} of the mesh has size 0")]
    EmptyAxis(String),
    /// The product of the axis sizes is not the number of devices.
    #[error("the axes of the mesh make {axes} places, and it lists {devices} devices")]
    DeviceCount {
        /// The product of the axis sizes.
        axes: u64,
        /// The number of devices listed.
        devices: usize,
    },
    /// A mesh has a device twice.
    #[error("the mesh lists device {0} twice")]
    DuplicateDevice(DeviceId),
    /// A partition spec names an axis that the mesh does not have.
    #[error("the partition spec names axis {0:?}, which the mesh does not have")]
    UnknownAxis(String),
    /// A partition spec names an axis twice.
    #[error("the partition spec names axis {0:?} twice: an axis can divide one dimension only")]
    AxisUsedTwice(String),
    /// A partition spec has more entries than the array has dimensions.
    #[error("the partition spec has {entries} entries, and the array has {rank} dimensions")]
    Rank {
        /// The number of entries.
        entries: usize,
        /// The number of dimensions.
        rank: usize,
    },
    /// The array's elements are smaller than a byte.
    #[error(
        "elements of {0} are smaller than a byte: how they are packed differs between devices; transfer the array as bytes"
    )]
    SubByte(Dtype),
    /// The data type has an unknown name.
    #[error("there is no data type of this name; JAX's names are known, as float32 or bfloat16")]
    UnknownDtype,
    /// The array, or the sum of all destination shards, has more bytes than is allowed.
    #[error("{what} has more than {} bytes", super::limits::MAX_BYTES)]
    TooLarge {
        /// The thing that is too large.
        what: &'static str,
    },
    /// Source and destination have different shapes.
    #[error(
        "the shape of the source is {source_shape:?}, that of the destination {destination_shape:?}: a plan moves an array, and does not change it"
    )]
    Shape {
        /// The source's shape.
        source_shape: Vec<u64>,
        /// The destination's shape.
        destination_shape: Vec<u64>,
    },
    /// Source and destination have different data types.
    #[error(
        "the source has elements of {source_dtype}, the destination of {destination_dtype}: a plan moves an array, and does not change it"
    )]
    DtypeChanged {
        /// The source's data type.
        source_dtype: Dtype,
        /// The destination's data type.
        destination_dtype: Dtype,
    },
    /// The placement has a device twice.
    #[error("the placement has device {0} twice")]
    PlacedTwice(DeviceId),
    /// The placement does not have a device.
    #[error("the placement does not say which task owns device {0}")]
    NotPlaced(DeviceId),
    /// The placement puts one task on two hosts.
    #[error("the placement puts task {0} on two hosts")]
    TaskOnTwoHosts(TaskId),
    /// A number that must be at least one is zero.
    #[error("{0} must be at least 1")]
    Zero(&'static str),
    /// The text is not the expected JSON.
    #[error("{what} is not what is expected: {why}")]
    Json {
        /// The thing that was read.
        what: &'static str,
        /// The error, and its position.
        why: String,
    },
    /// The plan has another version of the rules.
    #[error(
        "the plan is of version {found}; this program makes and reads version {}",
        super::limits::PLAN_VERSION
    )]
    Version {
        /// The version of the text.
        found: u64,
    },
    /// The plan's text contradicts the plan that its own inputs give.
    #[error(
        "the plan's {what} is not what its own source, destination and placement give: it was changed or damaged"
    )]
    Contradicts {
        /// The field that differs.
        what: String,
    },
    /// A region lies outside its buffer, or its parts do not match.
    #[error("{what} does not fit: {why}")]
    Region {
        /// The thing that does not match.
        what: &'static str,
        /// The reason.
        why: String,
    },
    /// A buffer does not have the size of the shard.
    #[error("the {role} shard of device {device} has {wanted} bytes, and its buffer has {found}")]
    Buffer {
        /// The device of the buffer.
        device: DeviceId,
        /// The role of the buffer.
        role: &'static str,
        /// The size of the shard in bytes.
        wanted: u64,
        /// The size of the buffer in bytes; zero if there is none.
        found: u64,
    },
}

impl PlanError {
    /// Creates the error of a text that could not be parsed. The parser's message may quote the text, so it
    /// is truncated and put on one line.
    pub(super) fn json(what: &'static str, error: &serde_json::Error) -> Self {
        const LONGEST: usize = 300;
        let mut why = error.to_string().replace(char::is_control, " ");
        if let Some((end, _)) = why.char_indices().nth(LONGEST) {
            why.truncate(end);
            why.push('…');
        }
        Self::Json { what, why }
    }
}

/// Returns [`PlanError::TooMany`] if a count exceeds its limit.
pub(super) fn check_limit(what: &'static str, count: usize, limit: usize) -> Result<(), PlanError> {
    if count > limit {
        return Err(PlanError::TooMany { what, count: count as u64, limit: limit as u64 });
    }
    Ok(())
}
