//! Changes the sharding of an array in each step and checks every element.
//!
//! `transfer::plan` computes which regions of the array move. Begin at `ReshardPlans::plan_of_step`.

use std::sync::Arc;
use std::time::Duration;

use super::step::{ExerciseError, ReshardResult, STALL};
use crate::agent::{Agent, ClusterRoster, device_id_of_task};
use crate::test_pattern;
use crate::transfer::plan::{
    ArrayDescription, BufferRole, Dtype, MAX_NAME, Mesh, PartitionSpec, PlacedDevice, Placement, Plan,
    PlanError, PlanOptions, Sharding,
};
use crate::transfer::{
    Arena, Buffer, DeviceId, LaunchOptions, MemberId, MemoryError, ReshardError, ShardBuffers, TransferError,
};

/// The name of the mesh's only axis: all devices are in one row.
const AXIS: &str = "d";
/// The number of rows. It is no multiple of a usual number of devices.
const ROWS: u64 = 97;
/// The greatest number of columns, which is no multiple of one either.
const COLUMNS_MAX: u64 = 1001;
/// The size of an element, in bytes.
const ITEM: u64 = 4;
/// The shardings of rows and columns, in the order in which the array passes through them.
const SPECS: [&[&[&str]]; 3] = [&[&[AXIS]], &[&[], &[AXIS]], &[]];

/// The resharding plans of an epoch.
#[derive(Debug)]
pub struct ReshardPlans {
    /// The plan from each sharding to the next.
    plans: [Arc<Plan>; SPECS.len()],
}

/// Returns the number of columns with which the array has its largest permitted size.
fn column_count(bytes_max: usize) -> u64 {
    (bytes_max as u64 / (ROWS * ITEM)).clamp(1, COLUMNS_MAX)
}

/// Allocates the memory for the shards of this number of devices, before and after, and for packing.
pub fn allocate_arena(devices: u32, bytes_max: usize) -> Result<Arena, MemoryError> {
    let whole = (ROWS * ITEM * column_count(bytes_max)) as usize;
    // Buffers are rounded up: small ones to cache lines, others to pages.
    Arena::new(8 * devices as usize * whole + (1 << 20))
}

impl ReshardPlans {
    /// Returns the plans for the first `devices` devices of these members; all members compute the same.
    pub fn new(
        members: &[MemberId],
        devices: u32,
        roster: &ClusterRoster,
        bytes_max: usize,
        limit: Duration,
    ) -> Result<Self, PlanError> {
        let all = || members.iter().flat_map(|member| (0..devices).map(|ordinal| (*member, ordinal)));
        // A member that does not state its host counts as a host of its own.
        let host = |member: &MemberId| {
            let named = roster.membership.peers.get(&member.task).map(|peer| peer.address.host.as_str());
            named
                .filter(|name| (1..=MAX_NAME).contains(&name.len()))
                .map_or_else(|| format!("of task {}", member.task), str::to_owned)
        };
        let placed = all().map(|(member, ordinal)| PlacedDevice {
            device: device_id_of_task(member.task, ordinal),
            task: member.task,
            host: host(&member),
        });
        let placement = Placement { devices: placed.collect() };
        let mesh = Mesh::new(
            &[(AXIS, all().count() as u64)],
            all().map(|(member, ordinal)| device_id_of_task(member.task, ordinal).0),
        );
        let array = |turn: usize| ArrayDescription {
            shape: vec![ROWS, column_count(bytes_max)],
            dtype: Dtype::Float32,
            sharding: Sharding { mesh: mesh.clone(), spec: PartitionSpec::new(SPECS[turn % SPECS.len()]) },
        };
        let options = PlanOptions { timeout: Some(limit), ..PlanOptions::default() };
        let plan = |turn: usize| Plan::new(array(turn), array(turn + 1), &placement, options).map(Arc::new);
        Ok(Self { plans: [plan(0)?, plan(1)?, plan(2)?] })
    }

    fn plan_of_step(&self, step: u64) -> &Arc<Plan> {
        &self.plans[(step % SPECS.len() as u64) as usize]
    }
}

impl ReshardPlans {
    /// Executes the plan of a step with shards in `arena`, and checks this task's shards. The inner error names the
    /// members that may have caused it.
    pub async fn reshard(
        &self,
        agent: &Agent,
        arena: &Arena,
        (step, seed): (u64, u64),
        members: &[MemberId],
        channel: u32,
    ) -> Result<Result<ReshardResult, (Vec<MemberId>, TransferError)>, ExerciseError> {
        let plan = Arc::clone(self.plan_of_step(step));
        let arena = arena.clone();
        let here = agent.here();
        let shards = allocate_shards(&plan, here, &arena)?;
        for (device, buffer) in &shards.source {
            let elements = expected_elements(&plan, BufferRole::Source, *device, seed);
            buffer.with_bytes_mut(|bytes| fill_shard(bytes, elements))?;
        }
        let engine = agent.engine().clone();
        let options = LaunchOptions { channel, stall: STALL, ..LaunchOptions::default() };
        // The call blocks its thread.
        let carried = tokio::task::spawn_blocking({
            let plan = Arc::clone(&plan);
            move || {
                let outcome = engine.execute_plan(&plan, &shards, &[&arena], options);
                (outcome, shards)
            }
        });
        let Ok((outcome, shards)) = carried.await else {
            return Ok(Err((Vec::new(), TransferError::Closed)));
        };
        let moved = match outcome {
            Ok(moved) => moved,
            Err(ReshardError::Memory(error)) => return Err(error.into()),
            Err(error @ ReshardError::Shard { .. }) => return Err(ExerciseError::Reshard(error)),
            Err(error) => return Ok(Err(possibly_failed_members(&plan, here, error, members))),
        };
        let mut checked = 0;
        for (device, buffer) in &shards.destination {
            let elements = expected_elements(&plan, BufferRole::Destination, *device, seed);
            if let Some((row, column)) = buffer.with_bytes(|bytes| first_wrong_element(bytes, elements))? {
                return Err(ExerciseError::WrongShard { step, device: *device, row, column });
            }
            checked += 1;
        }
        let name = |array: &ArrayDescription| array.sharding.spec.to_string();
        let what = format!("{} to {}", name(plan.source()), name(plan.destination()));
        Ok(Ok(ReshardResult { what, checked, moved }))
    }
}

/// Allocates the shards of this task's devices, before and after.
fn allocate_shards(plan: &Plan, here: MemberId, arena: &Arena) -> Result<ShardBuffers, MemoryError> {
    let mine = || plan.placement().devices.iter().filter(|placed| placed.task == here.task);
    let buffers = |role| {
        let buffer = |placed: &PlacedDevice| {
            let bytes = plan.shard_bytes(role, placed.device) as usize;
            Ok::<(DeviceId, Buffer), MemoryError>((placed.device, arena.allocate(bytes)?))
        };
        mine().map(buffer).collect::<Result<_, MemoryError>>()
    };
    Ok(ShardBuffers { source: buffers(BufferRole::Source)?, destination: buffers(BufferRole::Destination)? })
}

/// Returns the members that may have caused the failure of a plan: the peer of the failed transfer, or
/// all members if the plan was cancelled because of another failure or did not arrive.
fn possibly_failed_members(
    plan: &Plan,
    here: MemberId,
    error: ReshardError,
    members: &[MemberId],
) -> (Vec<MemberId>, TransferError) {
    let others = || members.iter().copied().filter(|member| *member != here);
    match error {
        ReshardError::Transfer { step, error, .. }
            if !matches!(error, TransferError::Cancelled { .. } | TransferError::Deadline { .. }) =>
        {
            let tasks = plan.step(step).map(|step| [step.source.task, step.destination.task]);
            let with = others().filter(|member| tasks.is_some_and(|tasks| tasks.contains(&member.task)));
            (with.collect(), error)
        }
        ReshardError::Transfer { error, .. } => (others().collect(), error),
        _ => (others().collect(), TransferError::Deadline { moved: 0, total: 0 }),
    }
}

/// The bytes of an element.
type ElementBytes = [u8; ITEM as usize];

/// Returns the elements of a shard in order: the position of each in the array, and its expected value.
fn expected_elements(
    plan: &Plan,
    role: BufferRole,
    device: DeviceId,
    seed: u64,
) -> impl Iterator<Item = ((u64, u64), ElementBytes)> {
    let columns = plan.source().shape[1];
    let bounds = plan.shard_bounds(role, device).unwrap_or_default();
    let [rows, across] = [0, 1].map(|dimension| bounds.get(dimension).copied().unwrap_or_default());
    let places = (rows.0..rows.1).flat_map(move |row| (across.0..across.1).map(move |column| (row, column)));
    places.map(move |(row, column)| {
        let made = test_pattern::next_pattern_word(&mut (seed ^ (row * columns + column))) as u32;
        ((row, column), made.to_le_bytes())
    })
}

/// Fills a shard.
fn fill_shard(bytes: &mut [u8], elements: impl Iterator<Item = ((u64, u64), ElementBytes)>) {
    let (places, _) = bytes.as_chunks_mut();
    places.iter_mut().zip(elements).for_each(|(place, (_, element))| *place = element);
}

/// Returns the row and column of the first wrong element of a shard.
fn first_wrong_element(
    bytes: &[u8],
    elements: impl Iterator<Item = ((u64, u64), ElementBytes)>,
) -> Option<(u64, u64)> {
    let (found, _) = bytes.as_chunks();
    found.iter().zip(elements).find_map(|(found, (place, wanted))| (*found != wanted).then_some(place))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transfer::{Incarnation, TaskId};

    fn example_reshard_plans(count: u32, devices: u32, bytes_max: usize) -> ReshardPlans {
        let member = |task| MemberId::of_own_job(TaskId(task), Incarnation::new(9).unwrap());
        let members: Vec<_> = (0..count).map(member).collect();
        ReshardPlans::new(&members, devices, &ClusterRoster::default(), bytes_max, Duration::from_secs(1))
            .unwrap()
    }

    #[test]
    fn from_step_to_step_each_sharding_follows_the_one_before() {
        for (count, devices, bytes_max) in [(2, 1, 1 << 20), (4, 2, 4 << 20), (3, 8, 1), (120, 1, 1 << 16)] {
            let example_reshard_plans = example_reshard_plans(count, devices, bytes_max);
            for step in 0..6 {
                let (plan, next) =
                    (example_reshard_plans.plan_of_step(step), example_reshard_plans.plan_of_step(step + 1));
                assert_eq!(plan.destination(), next.source());
                assert!(plan.source().bytes().unwrap() <= (bytes_max as u64).max(ROWS * ITEM));
            }
        }
    }

    #[test]
    fn an_element_in_the_wrong_place_is_found() {
        let plan = Arc::clone(example_reshard_plans(2, 1, 1 << 20).plan_of_step(0));
        let (from, columns) = (DeviceId(0), plan.source().shape[1] as usize);
        let elements = || expected_elements(&plan, BufferRole::Source, from, 7);
        let mut bytes = vec![0; plan.shard_bytes(BufferRole::Source, from) as usize];
        assert_eq!(elements().count() * ITEM as usize, bytes.len());
        fill_shard(&mut bytes, elements());
        assert_eq!(first_wrong_element(&bytes, elements()), None);
        let at = (columns * 3 + 5) * ITEM as usize;
        bytes.swap(at, at + ITEM as usize);
        assert_eq!(first_wrong_element(&bytes, elements()), Some((3, 5)));
    }
}
