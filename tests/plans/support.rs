//! Makes random plans, and computes their expected results naively, one element at a time.

use std::collections::BTreeMap;

use muster::transfer::plan::{
    ArrayDescription, BufferRole, DeviceId, Dtype, Mesh, Partition, PartitionSpec, PlacedDevice, Placement,
    Plan, PlanOptions, ShardContents, Sharding, StridedRuns, TaskId,
};

/// A source of decisions from bytes: shorter and smaller inputs make smaller plans, so that failures can be
/// shrunk.
pub struct RandomChoices<'a>(std::slice::Iter<'a, u8>);

impl<'a> RandomChoices<'a> {
    pub fn of(bytes: &'a [u8]) -> Self {
        Self(bytes.iter())
    }

    /// Returns a number below `limit`.
    pub fn number_below(&mut self, limit: usize) -> usize {
        usize::from(self.0.next().copied().unwrap_or(0)) % limit
    }

    fn shuffle<T>(&mut self, things: &mut [T]) {
        for at in 1..things.len() {
            things.swap(at, self.number_below(at + 1));
        }
    }
}

/// The inputs of a plan.
#[derive(Debug, Clone)]
pub struct PlanCase {
    pub source: ArrayDescription,
    pub destination: ArrayDescription,
    pub placement: Placement,
    pub options: PlanOptions,
}

impl PlanCase {
    pub fn plan(&self) -> Plan {
        Plan::new(self.source.clone(), self.destination.clone(), &self.placement, self.options)
            .expect("it makes sense")
    }
}

/// Returns random inputs: up to four axes and 36 devices a side, up to four dimensions of up to nine
/// elements, several devices a task and tasks a host.
pub fn asked(choices: &mut RandomChoices) -> PlanCase {
    let dtypes = [Dtype::Uint8, Dtype::Bfloat16, Dtype::Float32, Dtype::Complex128];
    let dtype = dtypes[choices.number_below(dtypes.len())];
    let shape: Vec<u64> = (0..choices.number_below(5))
        .map(|_| [4, 1, 2, 3, 5, 6, 7, 8, 9, 0][choices.number_below(10)])
        .collect();
    let pool = 12 + choices.number_below(37) as u32;
    let (tasks, hosts) = (1 + choices.number_below(12), 1 + choices.number_below(6));
    let place = |device: u32| {
        let task = (device.wrapping_mul(7) as usize) % tasks;
        PlacedDevice {
            device: DeviceId(device),
            task: TaskId(task as u32),
            host: format!("h{}", task % hosts),
        }
    };
    let placement = Placement { devices: (0..pool).map(place).collect() };
    let source =
        ArrayDescription { shape: shape.clone(), dtype, sharding: sharding(choices, shape.len(), pool) };
    let destination = if choices.number_below(6) == 1 {
        source.clone()
    } else {
        ArrayDescription { sharding: sharding(choices, shape.len(), pool), ..source.clone() }
    };
    let fan_out = std::num::NonZeroU32::MIN.saturating_add(choices.number_below(3) as u32);
    PlanCase { source, destination, placement, options: PlanOptions { fan_out, timeout: None } }
}

fn sharding(choices: &mut RandomChoices, rank: usize, pool: u32) -> Sharding {
    let mut sizes: Vec<u64> =
        (0..choices.number_below(5)).map(|_| 1 + choices.number_below(4) as u64).collect();
    while sizes.iter().product::<u64>() > 36.min(pool as u64) {
        sizes.pop();
    }
    let names = ["a", "b", "c", "d"];
    let axes: Vec<(&str, u64)> = names.into_iter().zip(sizes).collect();
    let mut devices: Vec<u32> = (0..pool).collect();
    choices.shuffle(&mut devices);
    devices.truncate(axes.iter().map(|(_, size)| *size as usize).product());
    let mut entries: Vec<Vec<&str>> = vec![Vec::new(); rank];
    let mut order: Vec<&str> = axes.iter().map(|(name, _)| *name).collect();
    choices.shuffle(&mut order);
    for name in order {
        if let Some(entry) = entries.get_mut(choices.number_below(rank + 1)) {
            entry.push(name);
        }
    }
    while choices.number_below(2) == 1 && entries.last().is_some_and(Vec::is_empty) {
        entries.pop();
    }
    let entries: Vec<&[&str]> = entries.iter().map(Vec::as_slice).collect();
    Sharding { mesh: Mesh::new(&axes, devices), spec: PartitionSpec::new(&entries) }
}

/// Returns the elements that each device holds, by their number in row-major order of the whole array, in the
/// order of its buffer.
pub fn elements(array: &ArrayDescription) -> BTreeMap<DeviceId, Vec<u64>> {
    let mesh = &array.sharding.mesh;
    let mut held = BTreeMap::new();
    for (place, &device) in mesh.devices.iter().enumerate() {
        // The index of the device along each axis: the last axis changes fastest.
        let mut along = BTreeMap::new();
        let mut rest = place as u64;
        for axis in mesh.axes.iter().rev() {
            along.insert(axis.name.as_str(), (rest % axis.size, axis.size));
            rest /= axis.size;
        }
        let mut numbers = vec![0_u64];
        for (dimension, &size) in array.shape.iter().enumerate() {
            let entry = array.sharding.spec.0.get(dimension).unwrap_or(&Partition::Whole);
            let (mut own, mut ways) = (0, 1);
            for axis in entry.axes() {
                let (at, count) = along[axis.as_str()];
                own = own * count + at;
                ways *= count;
            }
            let shard = size.div_ceil(ways);
            let mine = |at: &u64| shard > 0 && at / shard == own;
            numbers =
                numbers.iter().flat_map(|n| (0..size).filter(mine).map(move |at| n * size + at)).collect();
        }
        held.insert(device, numbers);
    }
    held
}

/// Returns the bytes of one element: no two elements of these small arrays are equal.
fn bytes_of_element(number: u64, item: usize) -> impl Iterator<Item = u8> {
    (0..item as u64).map(move |byte| (number.wrapping_mul(31) + byte * 101 + (number >> 8) * 7 + 1) as u8)
}

/// Returns the expected shard of each device.
pub fn expected_shards(array: &ArrayDescription) -> ShardContents {
    let item = array.dtype.bytes().expect("whole bytes") as usize;
    let bytes =
        |numbers: Vec<u64>| numbers.into_iter().flat_map(|number| bytes_of_element(number, item)).collect();
    elements(array).into_iter().map(|(device, numbers)| (device, bytes(numbers))).collect()
}

/// Returns zeroed shards of the right size.
pub fn zeroed_shards(plan: &Plan) -> ShardContents {
    let devices = &plan.destination().sharding.mesh.devices;
    devices
        .iter()
        .map(|&device| (device, vec![0; plan.shard_bytes(BufferRole::Destination, device) as usize]))
        .collect()
}

/// Returns the offset of each run.
pub fn run_offsets(runs: &StridedRuns) -> Vec<u64> {
    let mut places = vec![runs.offset];
    for (&count, &stride) in runs.counts.iter().zip(&runs.strides) {
        places = places.iter().flat_map(|place| (0..count).map(move |turn| place + turn * stride)).collect();
    }
    places
}
