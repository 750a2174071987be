//! Plans: which bytes of an array move from which device to which device when the sharding of the array changes.
//!
//! A plan is computed from two [`ArrayDescription`]s (source and destination), a [`Placement`] of their devices, and
//! [`PlanOptions`]. The computation is pure: it uses no IO, no clock, no threads and no randomness. So every process
//! computes the same plan with the same keys from the same inputs, and plans need not be sent. Begin at
//! `region_routing.rs`, which has the rules.
//!
//! A *region* is the overlap of a tile of the source with a tile of the destination. Overlapping tiles are found by
//! division in each dimension. A *step* is one copy operation. A region has one step for each device that is to hold
//! its destination tile. If there are `k` such devices, the steps of region `n` begin at number `n * k`. No step is
//! stored: its region, its sending device and its staging offset are computed from its number alone. So a plan of
//! sixteen million steps is made in time proportional to the number of devices, and takes about as much memory as its
//! description.
//!
//! ```text
//! descriptions ─► tilings ───────────────► order: number ◄─► region ┐
//! placement ────► holders by host, task ─► choices of senders ──────┴─► rules, per region ─► its steps, on demand
//!   stored: as much as there are devices                                                  └─► cost, staging, JSON
//! ```
//!
//! | file | what it owns |
//! | --- | --- |
//! | `array_description.rs`, `dtype.rs` | the input: meshes, partition specs, arrays, as JAX names them |
//! | `limits.rs`, `bounded.rs`, `error.rs` | bounds, bounded lists from outside, errors |
//! | `placement.rs` | the task and the host of each device |
//! | `tiles.rs` | a sharding as arithmetic: the tile of the array that a device holds |
//! | `region_order.rs` | regions by number, and the numbers of a tile's regions |
//! | `holders.rs` | the devices that hold a tile, by host and task |
//! | `round_robin.rs`, `sender_choices.rs` | the choice of the sender of a region that several devices hold |
//! | `region_routing.rs` | the rules that choose which device copies to which, for one region |
//! | `staging.rs` | memory for regions that are packed |
//! | `plan.rs`, `step.rs` | the plan, and a step with its regions and its runs (contiguous byte ranges) |
//! | `step_iter.rs` | the steps of a plan, computed on demand |
//! | `fingerprint.rs` | the fingerprints of layouts and plans, and the key of a step |
//! | `step_keys.rs` | keys of the steps of several plans that are executed together |
//! | `collectives.rs` | broadcast, all-gather, scatter and reshard, all made by the same rules |
//! | `cost.rs` | the bytes that a plan moves, and the fewest that any plan could move |
//! | `plan_json.rs` | plans as JSON |
//! | `copy.rs` | copies of regions between byte slices, and the execution of a plan inside one process |
//!
//! Every plan has the following properties. `tests/plans/properties.rs` checks them with random meshes, specs,
//! copies, uneven parts and orders of devices:
//!
//! 1. Executing the plan gives, byte for byte, the result of gathering the array and cutting it again.
//! 2. Every byte of the destination is written exactly once.
//! 3. If a step reads a region from a destination buffer, it comes after the step that wrote exactly that region. So
//!    a step depends only on earlier steps.
//! 4. No other plan for the same inputs moves fewer bytes across hosts. Of the plans that move equally few across
//!    hosts, none moves fewer bytes between the tasks of a host. Of those that are equal in this too, none copies
//!    fewer bytes within tasks. The tests count these minimums element by element.
//! 5. No two steps have the same key, neither in one plan nor in plans that are executed together. The key of a step
//!    is its number under a permutation of the 64-bit numbers. The fingerprint of the plan (or plans) selects this
//!    permutation.
//! 6. No step and no key depends on the order of the placement, on names of axes and hosts, or on axes and devices
//!    that take no part. The plan's fingerprint covers the shape, the element type, the tile of every device before
//!    and after, the task and the host of every device, and the fan-out ([`PlanOptions`]). The layout's fingerprint
//!    covers only the shape, the element type, and the tile of every device before and after. The two sides of a
//!    transfer compare the layout's fingerprint before a byte moves.
//! 7. In the staging memory of a buffer, different regions never overlap, and all regions lie within the size of the
//!    shard. Bytes that are passed on are sent from the memory at which they arrived, and nothing else arrives in
//!    this memory.
//! 8. A task finds its steps from the regions of its own tiles alone, in the order of the plan. The cost of a plan is
//!    the sum of the costs of its steps.
//! 9. The usual reshardings (those in `tests/plans/balance.rs`) are balanced if each region has several holders. Two
//!    hosts that hold the same tiles send equally many regions to other hosts, or differ by one. The same is true of
//!    two tasks of such hosts. A *round* has the next region of each destination tile that has regions left
//!    (`region_order.rs`). In each round, the holders of a tile send equally many regions.
//! 10. A plan that is written as JSON and read again is the same plan. If the text was changed so that a step, a key
//!     or a cost would change, the reader refuses it.
//!
//! # Shardings
//!
//! The semantics are those of JAX's `NamedSharding`. A mesh names its axes and lists its devices in row-major order
//! (the last axis fastest). A partition spec has an entry for each leading dimension of the array. The entry is
//! empty, one axis, or several axes (the first one major). Dimensions without an entry are not divided. If two
//! devices differ only in axes that no entry names, they hold copies of the same tile.
//!
//! JAX refuses arguments and results whose dimensions are not divisible by their number of shards. Muster divides
//! such dimensions as GSPMD does inside a program: the size of a shard is the quotient rounded up, so the last shards
//! may be smaller, or empty. A shard's buffer is expected to be row-major, dense and of exactly the shard's own size,
//! without padding. Elements smaller than a byte are refused: a host stores each one in a byte, but devices pack
//! them, each kind of device in its own way.

mod array_description;
mod bounded;
mod collectives;
mod copy;
mod cost;
mod dtype;
mod error;
mod fingerprint;
mod holders;
mod limits;
mod placement;
#[expect(clippy::module_inception, reason = "the room is named for what it makes")]
mod plan;
mod plan_json;
mod region_order;
mod region_routing;
mod round_robin;
mod sender_choices;
mod staging;
mod step;
mod step_iter;
mod step_keys;
mod tiles;

pub use crate::base::membership::{DeviceId, TaskId};
pub use array_description::{ArrayDescription, Axis, Mesh, Partition, PartitionSpec, Sharding};
pub use collectives::{AllGather, Broadcast, Reshard, Scatter};
pub(crate) use copy::{RowBlocks, RunCopies};
pub use copy::{ShardContents, copy_region, pack_runs, unpack_runs};
pub use cost::{ClassCost, Cost, MinimumTraffic, PairCost, TaskBytes};
pub use dtype::Dtype;
pub use error::PlanError;
pub use fingerprint::{Fingerprint, TransferKey};
pub use limits::{
    MAX_AXES, MAX_BYTES, MAX_DESCRIPTION_TEXT, MAX_DEVICES, MAX_NAME, MAX_PLACED, MAX_PLAN_TEXT, MAX_RANK,
    MAX_STEPS, PLAN_VERSION,
};
pub use placement::{HostName, PlacedDevice, Placement};
pub use plan::{Plan, PlanOptions};
pub use step::{BufferRole, ShardRegion, Staging, Step, StepClass, StepEnd, StridedRuns};
pub(crate) use step_keys::StepKeys;
