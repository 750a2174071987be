//! The finished plan.
//!
//! `expand.rs` computes its steps. Begin at [`Plan::new`].

use std::num::NonZeroU32;
use std::time::Duration;

use super::fingerprint::{self, Digest};
use super::holders::{Holders, Parties};
use super::placement::Placement;
use super::rounds::Rounds;
use super::tiles::{Tiling, extents, number};
use super::turns::Turns;
use super::{
    ArrayDescription, BufferRole, DeviceId, Fingerprint, MAX_BYTES, MAX_STEPS, PLAN_VERSION, PlanError,
    TaskId,
};

/// The options of a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlanOptions {
    /// The number of recipients to which each holder of a region sends it, on average. Each recipient then
    /// sends it to as many others.
    pub fan_out: NonZeroU32,
    /// The longest time that the execution may take; `None` for no limit. It changes no step and no key.
    pub timeout: Option<Duration>,
}

impl Default for PlanOptions {
    /// Returns a fan-out of two, by which the bytes of one device reach `n` hosts in about `log2(n)` rounds
    /// while none sends them more than twice; no time limit.
    fn default() -> Self {
        Self { fan_out: NonZeroU32::MIN.saturating_add(1), timeout: None }
    }
}

/// A plan: which bytes of an array go from which device to which.
///
/// No step is stored: it is computed from its number when it is needed. A plan therefore takes time and
/// memory in proportion to its devices, not to its steps.
#[derive(Debug, Clone)]
pub struct Plan {
    pub(super) source: ArrayDescription,
    pub(super) destination: ArrayDescription,
    pub(super) placement: Placement,
    pub(super) options: PlanOptions,
    layout: Fingerprint,
    pub(super) fingerprint: Fingerprint,
    pub(super) item: u64,
    pub(super) parties: Parties,
    pub(super) source_tiling: Tiling,
    pub(super) destination_tiling: Tiling,
    /// The devices that hold each source tile, and the devices that are to hold each destination tile:
    /// `copies` for each.
    pub(super) holders: Holders,
    pub(super) receivers: Holders,
    pub(super) copies: u32,
    pub(super) rounds: Rounds,
    pub(super) turns: Turns,
}

impl Plan {
    /// Plans how the array that `source` describes becomes the one that `destination` describes. Both must
    /// have the same shape and data type; their devices may be the same or others. The source is not changed:
    /// the destination's shards are other buffers, except if a step's class is [`super::StepClass::SameBuffer`].
    ///
    /// # Errors
    /// Returns the error of the descriptions or the placement, or the bound that the plan would exceed. The
    /// bounds are checked before the work is done.
    pub fn new(
        source: ArrayDescription,
        destination: ArrayDescription,
        placement: &Placement,
        options: PlanOptions,
    ) -> Result<Self, PlanError> {
        source.check()?;
        destination.check()?;
        if source.shape != destination.shape {
            return Err(PlanError::Shape {
                source_shape: source.shape,
                destination_shape: destination.shape,
            });
        }
        if source.dtype != destination.dtype {
            return Err(PlanError::DtypeChanged {
                source_dtype: source.dtype,
                destination_dtype: destination.dtype,
            });
        }
        let item = source.dtype.bytes()?;
        let copies = destination.sharding.mesh.devices.len() as u64;
        if source.bytes()?.checked_mul(copies).is_none_or(|bytes| bytes > MAX_BYTES) {
            return Err(PlanError::TooLarge { what: "the array, once for each device of the destination," });
        }
        let (source_tiling, destination_tiling) = (Tiling::of(&source), Tiling::of(&destination));
        let copies = destination_tiling.copies();
        let count = Rounds::count(&source_tiling, &destination_tiling) * u64::from(copies);
        if count > MAX_STEPS {
            return Err(PlanError::TooMany { what: "steps of the plan", count, limit: MAX_STEPS });
        }
        let (parties, placement) = Parties::of(&source_tiling, &destination_tiling, placement)?;
        let layout = fingerprint::layout(source.dtype.name(), &source_tiling, &destination_tiling);
        let fingerprint = identify(layout, &parties, options.fan_out);
        let holders = Holders::of(&parties, &parties.source, source_tiling.tiles());
        let receivers = Holders::of(&parties, &parties.destination, destination_tiling.tiles());
        let rounds = Rounds::of(&source_tiling, &destination_tiling);
        let turns = Turns::of(&parties, &rounds, &holders, &receivers, options.fan_out.get());
        Ok(Self {
            source,
            destination,
            placement,
            options,
            layout,
            fingerprint,
            item,
            parties,
            source_tiling,
            destination_tiling,
            holders,
            receivers,
            copies,
            rounds,
            turns,
        })
    }

    /// Returns the description of the array as it is.
    #[must_use]
    pub fn source(&self) -> &ArrayDescription {
        &self.source
    }

    /// Returns the description of the array as it is to become.
    #[must_use]
    pub fn destination(&self) -> &ArrayDescription {
        &self.destination
    }

    /// Returns the tasks and hosts of the devices of both sides, in the order of the devices' ids.
    #[must_use]
    pub fn placement(&self) -> &Placement {
        &self.placement
    }

    /// Returns the options.
    #[must_use]
    pub fn options(&self) -> PlanOptions {
        self.options
    }

    /// Returns the longest time that the execution may take.
    #[must_use]
    pub fn timeout(&self) -> Option<Duration> {
        self.options.timeout
    }

    /// Returns the fingerprint that both sides of a transfer compare before a byte moves: of shape, data
    /// type, and the place of every tile before and after.
    #[must_use]
    pub fn layout(&self) -> Fingerprint {
        self.layout
    }

    /// Returns the identity of the plan: of its layout, the tasks of the devices, the fan-out, and the
    /// version of the rules. Two plans with the same fingerprint have the same steps.
    #[must_use]
    pub fn fingerprint(&self) -> Fingerprint {
        self.fingerprint
    }

    /// Returns the number of steps.
    #[must_use]
    pub fn len(&self) -> usize {
        self.rounds.regions() as usize * self.copies as usize
    }

    /// Returns whether there are no steps, because the array has no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.rounds.regions() == 0
    }

    /// Returns the index of a task, or none if it owns none of the devices.
    pub(super) fn number_of(&self, task: TaskId) -> Option<u32> {
        self.parties.task_ids.binary_search(&task).ok().map(number)
    }

    /// Returns the tasks that own devices of either side, in order.
    #[must_use]
    pub fn tasks(&self) -> &[TaskId] {
        &self.parties.task_ids
    }

    /// Returns the size of a device's shard in each dimension, in elements; all zero for an empty shard,
    /// `None` if the device has none.
    #[must_use]
    pub fn shard_shape(&self, role: BufferRole, device: DeviceId) -> Option<Vec<u64>> {
        self.shard_bounds(role, device).map(|bounds| extents(&bounds))
    }

    /// Returns the bounds of a device's shard in the array: in each dimension the first element, and the one
    /// after the last. A shard is empty if it is empty in any dimension. `None` if the device has none.
    #[must_use]
    pub fn shard_bounds(&self, role: BufferRole, device: DeviceId) -> Option<Vec<(u64, u64)>> {
        let tiling = match role {
            BufferRole::Source => &self.source_tiling,
            BufferRole::Destination => &self.destination_tiling,
        };
        let at = tiling.devices.binary_search_by_key(&device, |(device, _)| *device).ok()?;
        let mut bounds = Vec::new();
        tiling.intervals(tiling.devices[at].1, &mut bounds);
        Some(bounds)
    }

    /// Returns the size of a device's shard in bytes; zero if the device has none.
    #[must_use]
    pub fn shard_bytes(&self, role: BufferRole, device: DeviceId) -> u64 {
        self.shard_shape(role, device).map_or(0, |shape| {
            // The other dimensions of an empty shard may be so large that their product overflows.
            if shape.contains(&0) { 0 } else { shape.iter().product::<u64>() * self.item }
        })
    }
}

/// Returns the fingerprint of all inputs of the steps. It covers the index of a host, not its name.
fn identify(layout: Fingerprint, parties: &Parties, fan_out: NonZeroU32) -> Fingerprint {
    let mut digest = Digest::new("muster plan");
    digest.number(PLAN_VERSION);
    digest.text(&layout.to_string());
    digest.number(u64::from(fan_out.get()));
    digest.number(parties.ids.len() as u64);
    for ((device, &task), &host) in parties.ids.iter().zip(&parties.tasks).zip(&parties.hosts) {
        digest.number(i64::from(device.0).cast_unsigned());
        digest.number(i64::from(parties.task_ids[task as usize].0).cast_unsigned());
        digest.number(u64::from(host));
    }
    digest.end()
}
