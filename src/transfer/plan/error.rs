//! The errors of planning.

use super::{DeviceId, Dtype, TaskId};

/// Why there is no plan.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// Something has more parts, or is longer, than is allowed.
    #[error("{what}: {count} is beyond the limit of {limit}")]
    TooMany {
        /// What there is too much of.
        what: &'static str,
        /// How much there is.
        count: u64,
        /// How much there may be.
        limit: u64,
    },
    /// The plan's text would be longer than what is read again.
    #[error(
        "a plan of {steps} steps is longer as JSON than the {} MiB that are written and read: hand on its source, destination, \
         placement and fan-out instead, from which everybody makes the same plan, or look at the steps of single tasks",
        super::limits::MAX_PLAN_TEXT >> 20
    )]
    TooLong {
        /// How many steps it has.
        steps: usize,
    },
    /// A name is empty, too long, or has characters that cannot be shown.
    #[error(
        "the name of {what} number {index} is empty, longer than {} bytes or has control characters",
        super::limits::MAX_NAME
    )]
    Name {
        /// What is named.
        what: &'static str,
        /// Which of them, from zero.
        index: usize,
    },
    /// Two axes of a mesh have one name.
    #[error("the mesh has two axes named {0:?}")]
    DuplicateAxis(String),
    /// An axis has no device.
    #[error("axis {0:?} of the mesh has size 0")]
    EmptyAxis(String),
    /// The sizes of the axes do not give the number of devices.
    #[error("the axes of the mesh make {axes} places, and it lists {devices} devices")]
    DeviceCount {
        /// The product of the sizes.
        axes: u64,
        /// How many devices are listed.
        devices: usize,
    },
    /// A mesh has a device twice.
    #[error("the mesh lists device {0} twice")]
    DuplicateDevice(DeviceId),
    /// A partition spec names an axis that the mesh lacks.
    #[error("the partition spec names axis {0:?}, which the mesh does not have")]
    UnknownAxis(String),
    /// A partition spec names an axis twice.
    #[error("the partition spec names axis {0:?} twice: an axis can divide one dimension only")]
    AxisUsedTwice(String),
    /// A partition spec has more entries than the array has dimensions.
    #[error("the partition spec has {entries} entries, and the array has {rank} dimensions")]
    Rank {
        /// How many entries.
        entries: usize,
        /// How many dimensions.
        rank: usize,
    },
    /// The array's elements are smaller than a byte.
    #[error(
        "elements of {0} are smaller than a byte: how they are packed differs between devices; transfer the array as bytes"
    )]
    SubByte(Dtype),
    /// No such data type.
    #[error("there is no data type of this name; JAX's names are known, as float32 or bfloat16")]
    UnknownDtype,
    /// The array, or what moves, has more bytes than is allowed.
    #[error("{what} has more than {} bytes", super::limits::MAX_BYTES)]
    TooLarge {
        /// What is too large.
        what: &'static str,
    },
    /// Source and destination have other shapes.
    #[error(
        "the shape of the source is {source_shape:?}, that of the destination {destination_shape:?}: a plan moves an array, and does not change it"
    )]
    Shape {
        /// The source's shape.
        source_shape: Vec<u64>,
        /// The destination's shape.
        destination_shape: Vec<u64>,
    },
    /// Source and destination have other data types.
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
    /// The placement lacks a device.
    #[error("the placement does not say which task owns device {0}")]
    NotPlaced(DeviceId),
    /// The placement puts one task on two hosts.
    #[error("the placement puts task {0} on two hosts")]
    TaskOnTwoHosts(TaskId),
    /// A number that must be at least one is zero.
    #[error("{0} must be at least 1")]
    Zero(&'static str),
    /// The text is not the JSON that was expected.
    #[error("{what} is not what is expected: {why}")]
    Json {
        /// What was read.
        what: &'static str,
        /// What is wrong, and where.
        why: String,
    },
    /// A plan of another version of the rules.
    #[error(
        "the plan is of version {found}; this program makes and reads version {}",
        super::limits::PLAN_VERSION
    )]
    Version {
        /// The version of the text.
        found: u64,
    },
    /// The plan's text contradicts what its own inputs give.
    #[error(
        "the plan's {what} is not what its own source, destination and placement give: it was changed or damaged"
    )]
    Contradicts {
        /// What differs.
        what: String,
    },
    /// A region lies outside its buffer, or its parts do not fit together.
    #[error("{what} does not fit: {why}")]
    Region {
        /// What does not fit.
        what: &'static str,
        /// Why.
        why: String,
    },
    /// A buffer has another size than the shard.
    #[error("the {role} shard of device {device} has {wanted} bytes, and its buffer has {found}")]
    Buffer {
        /// The device of the buffer.
        device: DeviceId,
        /// Of which array.
        role: &'static str,
        /// The size of the shard.
        wanted: u64,
        /// The size of the buffer; zero if there is none.
        found: u64,
    },
}

impl PlanError {
    /// Of a text that is not what it should be. What its author wrote may stand in the error, so the error is cut,
    /// and on one line.
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

/// Refuses a count beyond its limit.
pub(super) fn within(what: &'static str, count: usize, limit: usize) -> Result<(), PlanError> {
    if count > limit {
        return Err(PlanError::TooMany { what, count: count as u64, limit: limit as u64 });
    }
    Ok(())
}
