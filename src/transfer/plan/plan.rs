//! A plan: its inputs, and the tables from which its steps are computed.
//!
//! `step_iter.rs` computes the steps. Begin at [`Plan::new`].

use std::num::NonZeroU32;
use std::time::Duration;

use super::fingerprint::{self, FingerprintHasher};
use super::holders::{DeviceTable, TileHolders};
use super::placement::Placement;
use super::region_order::RegionOrder;
use super::sender_choices::SenderChoices;
use super::tiles::{Tiling, interval_lengths, saturating_u32};
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
    pub(super) device_table: DeviceTable,
    pub(super) source_tiling: Tiling,
    pub(super) destination_tiling: Tiling,
    /// The devices that hold each source tile, and the devices that are to hold each destination tile:
    /// `copies` for each.
    pub(super) holders: TileHolders,
    pub(super) receivers: TileHolders,
    pub(super) copies: u32,
    pub(super) region_order: RegionOrder,
    pub(super) sender_choices: SenderChoices,
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
        let count = RegionOrder::count(&source_tiling, &destination_tiling) * u64::from(copies);
        if count > MAX_STEPS {
            return Err(PlanError::TooMany { what: "steps of the plan", count, limit: MAX_STEPS });
        }
        let (device_table, placement) = DeviceTable::of(&source_tiling, &destination_tiling, placement)?;
        let layout =
            fingerprint::tilings_fingerprint(source.dtype.name(), &source_tiling, &destination_tiling);
        let fingerprint = plan_fingerprint(layout, &device_table, options.fan_out);
        let holders = TileHolders::of(&device_table, &device_table.source, source_tiling.tile_count());
        let receivers =
            TileHolders::of(&device_table, &device_table.destination, destination_tiling.tile_count());
        let region_order = RegionOrder::of(&source_tiling, &destination_tiling);
        let sender_choices =
            SenderChoices::of(&device_table, &region_order, &holders, &receivers, options.fan_out.get());
        Ok(Self {
            source,
            destination,
            placement,
            options,
            layout,
            fingerprint,
            item,
            device_table,
            source_tiling,
            destination_tiling,
            holders,
            receivers,
            copies,
            region_order,
            sender_choices,
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
    pub fn layout_fingerprint(&self) -> Fingerprint {
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
        self.region_order.region_count() as usize * self.copies as usize
    }

    /// Returns whether there are no steps, because the array has no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.region_order.region_count() == 0
    }

    /// Returns the index of a task, or none if it owns none of the devices.
    pub(super) fn task_index(&self, task: TaskId) -> Option<u32> {
        self.device_table.task_ids.binary_search(&task).ok().map(saturating_u32)
    }

    /// Returns the tasks that own devices of either side, in order.
    #[must_use]
    pub fn tasks(&self) -> &[TaskId] {
        &self.device_table.task_ids
    }

    /// Returns the size of a device's shard in each dimension, in elements; all zero for an empty shard,
    /// `None` if the device has none.
    #[must_use]
    pub fn shard_shape(&self, role: BufferRole, device: DeviceId) -> Option<Vec<u64>> {
        self.shard_bounds(role, device).map(|bounds| interval_lengths(&bounds))
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
fn plan_fingerprint(layout: Fingerprint, device_table: &DeviceTable, fan_out: NonZeroU32) -> Fingerprint {
    let mut digest = FingerprintHasher::new("muster plan");
    digest.add_number(PLAN_VERSION);
    digest.add_text(&layout.to_string());
    digest.add_number(u64::from(fan_out.get()));
    digest.add_number(device_table.ids.len() as u64);
    for ((device, &task), &host) in device_table.ids.iter().zip(&device_table.tasks).zip(&device_table.hosts)
    {
        digest.add_number(i64::from(device.0).cast_unsigned());
        digest.add_number(i64::from(device_table.task_ids[task as usize].0).cast_unsigned());
        digest.add_number(u64::from(host));
    }
    digest.finish()
}
