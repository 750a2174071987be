//! The finished plan.

use std::num::NonZeroU32;
use std::time::Duration;

use super::fingerprint::{self, Digest};
use super::holders::Parties;
use super::make::{self, Record};
use super::placement::Placement;
use super::staging::{self, NOWHERE, Rooms};
use super::tiles::{self, NONE, Tiling, intersect, volume};
use super::{
    ArrayDescription, BufferRole, DeviceId, Fingerprint, MAX_BYTES, MAX_STEPS, PLAN_VERSION, PlanError,
    Region, Side, Staging, Step, TaskId, TransferKey,
};

/// What a plan is made with, beside what it moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// How many others each holder of a region feeds with it, on average, before those who were fed feed others, as
    /// many each.
    pub fan_out: NonZeroU32,
    /// How long the whole may take, for whoever carries it out; `None` for no limit. It changes no step and no key.
    pub timeout: Option<Duration>,
}

impl Default for Options {
    /// A fan-out of two, by which what one device holds reaches `n` hosts in about `log2(n)` rounds, and nobody sends
    /// it to more than two; no limit of time.
    fn default() -> Self {
        Self { fan_out: NonZeroU32::MIN.saturating_add(1), timeout: None }
    }
}

/// Which bytes of an array go from which device to which.
///
/// What is kept of a step is who copies which tile from whom, in 20 bytes; its regions and runs are worked out when
/// it is looked at.
#[derive(Debug, Clone)]
pub struct Plan {
    pub(super) source: ArrayDescription,
    pub(super) destination: ArrayDescription,
    pub(super) placement: Placement,
    pub(super) options: Options,
    layout: Fingerprint,
    fingerprint: Fingerprint,
    pub(super) item: u64,
    pub(super) parties: Parties,
    pub(super) source_tiling: Tiling,
    pub(super) destination_tiling: Tiling,
    pub(super) records: Vec<Record>,
    pub(super) rooms: Rooms,
}

impl Plan {
    /// Plans how an array as `source` describes it becomes one as `destination` describes it. Both must have the same
    /// shape and data type; their devices may be the same, others, or both. The source is not changed: the
    /// destination's shards are other buffers, except where a step's class is [`super::Class::SameBuffer`].
    ///
    /// # Errors
    /// What is wrong with the descriptions or the placement, or which bound the plan would pass. The bounds are
    /// checked before the work is done.
    pub fn new(
        source: ArrayDescription,
        destination: ArrayDescription,
        placement: &Placement,
        options: Options,
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
        let count = tiles::count_steps(&source_tiling, &destination_tiling, MAX_STEPS)?;
        let (parties, placement) = Parties::of(&source_tiling, &destination_tiling, placement)?;
        let layout = fingerprint::layout(source.dtype.name(), &source_tiling, &destination_tiling);
        let fingerprint = identify(layout, &parties, options.fan_out);
        let records =
            make::steps(&parties, &source_tiling, &destination_tiling, item, options.fan_out.get(), count);
        let rooms = staging::assign(&records, &parties, &source_tiling, &destination_tiling, item)?;
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
            records,
            rooms,
        })
    }

    /// The array as it is.
    #[must_use]
    pub fn source(&self) -> &ArrayDescription {
        &self.source
    }

    /// The array as it shall be.
    #[must_use]
    pub fn destination(&self) -> &ArrayDescription {
        &self.destination
    }

    /// Whose the devices of both are, in the order of their ids.
    #[must_use]
    pub fn placement(&self) -> &Placement {
        &self.placement
    }

    /// What the plan was made with.
    #[must_use]
    pub fn options(&self) -> Options {
        self.options
    }

    /// How long the whole may take.
    #[must_use]
    pub fn timeout(&self) -> Option<Duration> {
        self.options.timeout
    }

    /// What both sides of a transfer compare before a byte moves: shape, data type, and where every tile lies before
    /// and after.
    #[must_use]
    pub fn layout(&self) -> Fingerprint {
        self.layout
    }

    /// Identifies the plan: its layout, whose the devices are, the fan-out, and the version of the rules. Two plans
    /// of one fingerprint have the same steps.
    #[must_use]
    pub fn fingerprint(&self) -> Fingerprint {
        self.fingerprint
    }

    /// How many steps there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.records.len()
    }

    /// Whether there are none: the array has no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    /// The step of this number.
    #[must_use]
    pub fn step(&self, index: u32) -> Option<Step> {
        self.records.get(index as usize).map(|record| self.describe(index, record))
    }

    /// All steps. Those that a step depends on come before it.
    pub fn steps(&self) -> impl Iterator<Item = Step> {
        self.numbered().map(|(index, record)| self.describe(index, record))
    }

    /// The steps in which a task takes part: it gives, takes, or both. None for a task that owns none of the devices.
    pub fn for_task(&self, task: TaskId) -> impl Iterator<Item = Step> {
        let number = self.parties.task_ids.binary_search(&task).ok();
        let of = move |device: u32| Some(self.parties.tasks[device as usize] as usize) == number;
        let own = self.numbered().filter(move |(_, record)| of(record.source) || of(record.destination));
        own.map(|(index, record)| self.describe(index, record))
    }

    /// How much staging room a task needs, in bytes.
    #[must_use]
    pub fn staging_bytes(&self, task: TaskId) -> u64 {
        self.parties.task_ids.binary_search(&task).map_or(0, |number| self.rooms.tasks[number])
    }

    /// The tasks that own devices of either side, in order.
    #[must_use]
    pub fn tasks(&self) -> &[TaskId] {
        &self.parties.task_ids
    }

    /// The size of a device's shard in each dimension, in elements, all of them zero for an empty one; `None` if the
    /// device has none.
    #[must_use]
    pub fn shard_shape(&self, role: BufferRole, device: DeviceId) -> Option<Vec<u64>> {
        self.shard_bounds(role, device).map(|bounds| extents(&bounds))
    }

    /// Where a device's shard lies in the array: in each dimension the first element, and the one behind the last. A
    /// shard is empty if it is so in any dimension. `None` if the device has none.
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

    /// The size of a device's shard, in bytes; zero if the device has none.
    #[must_use]
    pub fn shard_bytes(&self, role: BufferRole, device: DeviceId) -> u64 {
        self.shard_shape(role, device).map_or(0, |shape| {
            // An empty shard of an array of large dimensions.
            if shape.contains(&0) { 0 } else { shape.iter().product::<u64>() * self.item }
        })
    }

    fn numbered(&self) -> impl Iterator<Item = (u32, &Record)> {
        (0..).zip(&self.records)
    }

    /// The bytes of a step.
    pub(super) fn bytes_of(&self, record: &Record, room: &mut Stretches) -> u64 {
        self.source_tiling.intervals(record.tile, &mut room.held);
        self.destination_tiling
            .intervals(self.parties.destination[record.destination as usize], &mut room.wanted);
        intersect(&room.held, &room.wanted, &mut room.common);
        volume(&room.common) * self.item
    }

    fn describe(&self, index: u32, record: &Record) -> Step {
        let mut room = Stretches::default();
        let bytes = self.bytes_of(record, &mut room);
        let place = self.rooms.places.get(index as usize).copied().unwrap_or((NOWHERE, NOWHERE));
        let side = |device: u32, buffer, tile: &[(u64, u64)], place| {
            self.side(device, buffer, tile, &room.common, (place, bytes))
        };
        let read_from = if record.from == BufferRole::Source { &room.held } else { &room.wanted };
        Step {
            index,
            key: TransferKey::of(self.fingerprint, index),
            class: record.class,
            bytes,
            after: (record.after != NONE).then_some(record.after),
            source: side(record.source, record.from, read_from, place.0),
            destination: side(record.destination, BufferRole::Destination, &room.wanted, place.1),
        }
    }

    fn side(
        &self,
        device: u32,
        buffer: BufferRole,
        tile: &[(u64, u64)],
        common: &[(u64, u64)],
        (place, bytes): (u64, u64),
    ) -> Side {
        let at = device as usize;
        let start = common.iter().zip(tile).map(|(common, tile)| common.0 - tile.0).collect();
        let region = Region { start, extent: extents(common) };
        let shape = extents(tile);
        Side {
            device: self.parties.ids[at],
            task: self.parties.task_ids[self.parties.tasks[at] as usize],
            host: self.parties.host_names[self.parties.hosts[at] as usize].clone(),
            buffer,
            runs: super::step::runs(&shape, &region, self.item),
            shape,
            region,
            staging: (place != NOWHERE).then_some(Staging { offset: place, bytes }),
        }
    }
}

/// The stretches of a step, kept for their room.
#[derive(Debug, Default)]
pub(super) struct Stretches {
    pub held: Vec<(u64, u64)>,
    pub wanted: Vec<(u64, u64)>,
    pub common: Vec<(u64, u64)>,
}

fn extents(stretches: &[(u64, u64)]) -> Vec<u64> {
    stretches.iter().map(|(start, end)| end - start).collect()
}

/// Everything that the steps follow from. Hosts are told apart by number, not by name.
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
