//! The input of a plan: arrays and how they are sharded, as JAX describes them.
//!
//! It plans nothing. Begin at [`ArrayDescription`].

use std::collections::BTreeSet;
use std::fmt;

use std::str::FromStr;

use serde::de::{SeqAccess, Visitor};

use serde::{Deserialize, Deserializer, Serialize};

use super::bounded::{self, at_most, check_name};
use super::error::within;
use super::{
    DeviceId, Dtype, MAX_AXES, MAX_BYTES, MAX_DESCRIPTION_TEXT, MAX_DEVICES, MAX_NAME, MAX_RANK, PlanError,
};

/// An axis of a mesh.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Axis {
    /// Its name.
    pub name: String,
    /// How many devices lie along it.
    pub size: u64,
}

/// Devices in a grid with named axes.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mesh {
    /// The axes, the slowest first.
    #[serde(deserialize_with = "at_most::<_, _, MAX_AXES>")]
    pub axes: Vec<Axis>,
    /// The devices in row-major order: along the last axis first.
    #[serde(deserialize_with = "at_most::<_, _, MAX_DEVICES>")]
    pub devices: Vec<DeviceId>,
}

impl Mesh {
    /// Returns a mesh of these axes and devices.
    #[must_use]
    pub fn new(axes: &[(&str, u64)], devices: impl IntoIterator<Item = u32>) -> Self {
        Self {
            axes: axes.iter().map(|&(name, size)| Axis { name: name.to_owned(), size }).collect(),
            devices: devices.into_iter().map(DeviceId).collect(),
        }
    }
}

impl fmt::Display for Mesh {
    /// Returns its axes and their sizes: `data=4, model=8`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (place, axis) in self.axes.iter().enumerate() {
            let comma = if place == 0 { "" } else { ", " };
            write!(f, "{comma}{}={}", axis.name, axis.size)?;
        }
        Ok(())
    }
}

/// How one dimension of an array is divided: an entry of a partition spec.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize)]
#[serde(untagged)]
pub enum Partition {
    /// Not at all (`None`).
    Whole,
    /// Along one axis of the mesh.
    Axis(String),
    /// Along several, the first one major. Along none of them, it is whole.
    Axes(Vec<String>),
}

impl Partition {
    /// The axes along which the dimension is divided, the major one first.
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
        bounded::collect(axes, MAX_AXES).map(Partition::Axes)
    }
}

/// How the dimensions of an array are divided among the axes of a mesh. Dimensions beyond its entries are whole.
#[derive(Debug, Default, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct PartitionSpec(#[serde(deserialize_with = "at_most::<_, _, MAX_RANK>")] pub Vec<Partition>);

impl PartitionSpec {
    /// Returns a spec whose entries name some axes each: none for a dimension that stays whole.
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
    /// As JAX writes it: `P(data, None, (model, expert))`.
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

/// A mesh, and how an array is divided among it: JAX's `NamedSharding`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sharding {
    /// The devices.
    pub mesh: Mesh,
    /// Which dimension is divided among which axes.
    pub spec: PartitionSpec,
}

/// An array and where its parts lie.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ArrayDescription {
    /// The size of each dimension of the whole array, in elements.
    #[serde(deserialize_with = "at_most::<_, _, MAX_RANK>")]
    pub shape: Vec<u64>,
    /// The type of its elements.
    pub dtype: Dtype,
    /// Where its parts lie.
    pub sharding: Sharding,
}

impl ArrayDescription {
    /// Reads a description from JSON.
    ///
    /// # Errors
    /// [`PlanError::Json`] for a text that is none; otherwise as [`ArrayDescription::check`].
    pub fn from_json(text: &str) -> Result<Self, PlanError> {
        within("bytes of a description", text.len(), MAX_DESCRIPTION_TEXT)?;
        let found: Self = serde_json::from_str(text)
            .map_err(|error| PlanError::json("the description of an array", &error))?;
        found.check()?;
        Ok(found)
    }

    /// Checks that the description makes sense and is within the bounds of this room.
    ///
    /// # Errors
    /// The first thing that is wrong with it.
    pub fn check(&self) -> Result<(), PlanError> {
        within("dimensions", self.shape.len(), MAX_RANK)?;
        self.sharding.mesh.check()?;
        self.sharding.check_spec(self.shape.len())?;
        self.bytes().map(|_| ())
    }

    /// Returns the size of the whole array, in bytes.
    ///
    /// # Errors
    /// [`PlanError::SubByte`] or [`PlanError::TooLarge`].
    pub fn bytes(&self) -> Result<u64, PlanError> {
        let item = self.dtype.bytes()?;
        // An array without elements may have any other dimensions, as long as each is of a size that can be computed
        // with.
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
        within("axes of a mesh", self.axes.len(), MAX_AXES)?;
        within("devices of a mesh", self.devices.len(), MAX_DEVICES)?;
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
            // Before the name is repeated in an error, it is known to be one of the mesh's, or short.
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
    /// Returns the size of an element, in bytes.
    ///
    /// # Errors
    /// [`PlanError::SubByte`] for types whose elements do not fill whole bytes: a host keeps each in a byte of its
    /// own, devices pack them.
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
