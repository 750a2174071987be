//! The input of a plan: arrays and their shardings, as JAX describes them.
//!
//! `region_routing.rs` has the rules of planning. Begin at [`ArrayDescription`].

use std::collections::BTreeSet;
use std::fmt;

use std::str::FromStr;

use serde::de::{SeqAccess, Visitor};

use serde::{Deserialize, Deserializer, Serialize};

use super::bounded::{self, check_name, deserialize_at_most};
use super::error::check_limit;
use super::{
    DeviceId, Dtype, MAX_AXES, MAX_BYTES, MAX_DESCRIPTION_TEXT, MAX_DEVICES, MAX_NAME, MAX_RANK, PlanError,
};

/// An axis of a mesh.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Axis {
    /// The name.
    pub name: String,
    /// The number of devices along it.
    pub size: u64,
}

/// A mesh: devices in a grid with named axes.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mesh {
    /// The axes, the slowest first.
    #[serde(deserialize_with = "deserialize_at_most::<_, _, MAX_AXES>")]
    pub axes: Vec<Axis>,
    /// The devices in row-major order: along the last axis first.
    #[serde(deserialize_with = "deserialize_at_most::<_, _, MAX_DEVICES>")]
    pub devices: Vec<DeviceId>,
}

impl Mesh {
    /// Creates a mesh of these axes and devices.
    #[must_use]
    pub fn new(axes: &[(&str, u64)], devices: impl IntoIterator<Item = u32>) -> Self {
        Self {
            axes: axes.iter().map(|&(name, size)| Axis { name: name.to_owned(), size }).collect(),
            devices: devices.into_iter().map(DeviceId).collect(),
        }
    }
}

impl fmt::Display for Mesh {
    /// Writes the axes and their sizes: `data=4, model=8`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (place, axis) in self.axes.iter().enumerate() {
            let comma = if place == 0 { "" } else { ", " };
            write!(f, "{comma}{}={}", axis.name, axis.size)?;
        }
        Ok(())
    }
}

/// The division of one dimension of an array: an entry of a partition spec.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize)]
#[serde(untagged)]
pub enum Partition {
    /// Not divided (`None`).
    Whole,
    /// Divided along one axis of the mesh.
    Axis(String),
    /// Divided along several axes, the first one major. Without axes, it is not divided.
    Axes(Vec<String>),
}

impl Partition {
    /// Returns the axes along which the dimension is divided, the major one first.
    #[must_use]
    pub fn axes(&self) -> &[String] {
        match self {
            Self::Whole => &[],
            Self::Axis(axis) => std::slice::from_ref(axis),
            Self::Axes(axes) => axes,
        }
    }
}

impl<'de> Deserialize<'de> for Partition {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(PartitionVisitor)
    }
}

struct PartitionVisitor;

impl<'de> Visitor<'de> for PartitionVisitor {
    type Value = Partition;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("null, the name of an axis, or a list of names")
    }

    fn visit_unit<E>(self) -> Result<Partition, E> {
        Ok(Partition::Whole)
    }

    fn visit_str<E>(self, axis: &str) -> Result<Partition, E> {
        Ok(Partition::Axis(axis.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, axes: A) -> Result<Partition, A::Error> {
        bounded::collect_bounded_list(axes, MAX_AXES).map(Partition::Axes)
    }
}

/// The division of an array's dimensions among the axes of a mesh. Dimensions without an entry are not
/// divided.
#[derive(Debug, Default, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct PartitionSpec(
    #[serde(deserialize_with = "deserialize_at_most::<_, _, MAX_RANK>")] pub Vec<Partition>,
);

impl PartitionSpec {
    /// Creates a spec with the axes of each dimension; none for a dimension that is not divided.
    #[must_use]
    pub fn new(entries: &[&[&str]]) -> Self {
        let entry = |axes: &&[&str]| match **axes {
            [] => Partition::Whole,
            [axis] => Partition::Axis(axis.to_owned()),
            ref axes => Partition::Axes(axes.iter().map(|&axis| axis.to_owned()).collect()),
        };
        Self(entries.iter().map(entry).collect())
    }
}

impl fmt::Display for PartitionSpec {
    /// Writes the spec as JAX does: `P(data, None, (model, expert))`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("P(")?;
        for (place, entry) in self.0.iter().enumerate() {
            let comma = if place == 0 { "" } else { ", " };
            match entry.axes() {
                [] => write!(f, "{comma}None")?,
                [axis] => write!(f, "{comma}{axis}")?,
                axes => write!(f, "{comma}({})", axes.join(", "))?,
            }
        }
        f.write_str(")")
    }
}

/// A mesh, and the division of an array among it: JAX's `NamedSharding`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sharding {
    /// The devices.
    pub mesh: Mesh,
    /// The axes that divide each dimension.
    pub spec: PartitionSpec,
}

/// An array and its sharding.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ArrayDescription {
    /// The size of each dimension of the whole array, in elements.
    #[serde(deserialize_with = "deserialize_at_most::<_, _, MAX_RANK>")]
    pub shape: Vec<u64>,
    /// The data type of its elements.
    pub dtype: Dtype,
    /// The sharding.
    pub sharding: Sharding,
}

impl ArrayDescription {
    /// Reads a description from JSON.
    ///
    /// # Errors
    /// Returns [`PlanError::Json`] if the text is no description, and the errors of
    /// [`ArrayDescription::check`].
    pub fn from_json(text: &str) -> Result<Self, PlanError> {
        check_limit("bytes of a description", text.len(), MAX_DESCRIPTION_TEXT)?;
        let found: Self = serde_json::from_str(text)
            .map_err(|error| PlanError::json("the description of an array", &error))?;
        found.check()?;
        Ok(found)
    }

    /// Checks that the description is consistent and within the bounds of `limits.rs`.
    ///
    /// # Errors
    /// Returns the first error found.
    pub fn check(&self) -> Result<(), PlanError> {
        check_limit("dimensions", self.shape.len(), MAX_RANK)?;
        self.sharding.mesh.check()?;
        self.sharding.check_spec(self.shape.len())?;
        self.bytes().map(|_| ())
    }

    /// Returns the size of the whole array in bytes.
    ///
    /// # Errors
    /// Returns [`PlanError::SubByte`] or [`PlanError::TooLarge`].
    pub fn bytes(&self) -> Result<u64, PlanError> {
        let item = self.dtype.bytes()?;
        // An array without elements may have any other dimensions, but each must be small enough for
        // arithmetic.
        if self.shape.iter().any(|&size| size > MAX_BYTES) {
            return Err(PlanError::TooLarge { what: "a dimension of the array" });
        }
        if self.shape.contains(&0) {
            return Ok(0);
        }
        let bytes = self.shape.iter().try_fold(item, |bytes, &size| bytes.checked_mul(size));
        bytes.filter(|&bytes| bytes <= MAX_BYTES).ok_or(PlanError::TooLarge { what: "the array" })
    }
}

impl Mesh {
    fn check(&self) -> Result<(), PlanError> {
        check_limit("axes of a mesh", self.axes.len(), MAX_AXES)?;
        check_limit("devices of a mesh", self.devices.len(), MAX_DEVICES)?;
        let mut names = BTreeSet::new();
        for (index, axis) in self.axes.iter().enumerate() {
            check_name("axis", index, &axis.name)?;
            if !names.insert(axis.name.as_str()) {
                return Err(PlanError::DuplicateAxis(axis.name.clone()));
            }
            if axis.size == 0 {
                return Err(PlanError::EmptyAxis(axis.name.clone()));
            }
        }
        let places = self.axes.iter().fold(1_u64, |places, axis| places.saturating_mul(axis.size));
        if places != self.devices.len() as u64 {
            return Err(PlanError::DeviceCount { axes: places, devices: self.devices.len() });
        }
        let mut sorted = self.devices.clone();
        sorted.sort_unstable();
        match sorted.windows(2).find(|pair| pair[0] == pair[1]) {
            Some(pair) => Err(PlanError::DuplicateDevice(pair[0])),
            None => Ok(()),
        }
    }
}

impl Sharding {
    fn check_spec(&self, rank: usize) -> Result<(), PlanError> {
        let entries = self.spec.0.len();
        if entries > rank {
            return Err(PlanError::Rank { entries, rank });
        }
        let mut used: Vec<&str> = Vec::new();
        for axis in self.spec.0.iter().flat_map(Partition::axes) {
            // The error repeats a part of the name only, because nothing has bounded its length.
            if !self.mesh.axes.iter().any(|known| known.name == *axis) {
                return Err(PlanError::UnknownAxis(axis.chars().take(MAX_NAME / 4).collect()));
            }
            if used.contains(&axis.as_str()) {
                return Err(PlanError::AxisUsedTwice(axis.clone()));
            }
            used.push(axis);
        }
        Ok(())
    }
}

impl Dtype {
    /// Returns the size of an element in bytes.
    ///
    /// # Errors
    /// Returns [`PlanError::SubByte`] for types whose elements do not fill whole bytes: a host keeps each in
    /// a byte of its own, devices pack them.
    pub const fn bytes(self) -> Result<u64, PlanError> {
        match self.bits() {
            bits if bits % 8 == 0 => Ok(bits as u64 / 8),
            _ => Err(PlanError::SubByte(self)),
        }
    }
}

impl FromStr for Dtype {
    type Err = PlanError;

    fn from_str(text: &str) -> Result<Self, PlanError> {
        Self::ALL.iter().copied().find(|dtype| dtype.name() == text).ok_or(PlanError::UnknownDtype)
    }
}

impl TryFrom<String> for Dtype {
    type Error = PlanError;

    fn try_from(text: String) -> Result<Self, PlanError> {
        text.parse()
    }
}
