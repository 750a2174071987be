//! Plans: which bytes of an array go from which device to which, when its sharding changes.
//!
//! A plan is made of two [`ArrayDescription`]s (source and destination), a [`Placement`] of their devices and
//! [`PlanOptions`]. It is pure: no IO, no clock, no threads, no randomness. Every process makes the same plan,
//! with the same keys, of the same description, so plans are not sent. Begin at `make.rs`, which has the
//! rules.
//!
//! A *region* is the intersection of a tile of the source with a tile of the destination. Overlapping tiles
//! are found by division in each dimension. Every region makes as many steps as its destination tile has
//! holders, so region `n` has the steps from `n` times that number on. No step is stored: its region, its
//! sending device and its staging offset are computed from its number alone. A plan of sixteen million steps
//! is made in time proportional to its devices, and takes about as much memory as its description.
//!
//! ```text
//! descriptions ─► tilings ───────────────► rounds: number ◄─► region ─┐
//! placement ────► holders by host, task ─► turns: who sends ──────────┴─► rules, for one region ─► its steps, on demand
//!   stored: as much as there are devices                                                       └─► cost, staging, JSON
//! ```
//!
//! | file | what it owns |
//! | --- | --- |
//! | `describe.rs`, `dtype.rs` | the input: meshes, partition specs, arrays, as JAX names them |
//! | `limits.rs`, `bounded.rs`, `error.rs` | bounds, bounded lists from outside, errors |
//! | `placement.rs` | which task and host owns a device |
//! | `tiles.rs` | a sharding as arithmetic: the tile of the array that a device holds |
//! | `rounds.rs` | regions by number, and the numbers of a tile's regions |
//! | `holders.rs` | the devices that hold a tile, by host and task |
//! | `turn.rs`, `turns.rs` | the choice of the sender of a region that several devices hold |
//! | `make.rs` | the rules that choose which device copies to which, for one region |
//! | `staging.rs` | memory for regions that are packed |
//! | `plan.rs`, `step.rs` | the plan, and one copy of it with its regions and runs |
//! | `expand.rs` | the steps of a plan, computed on demand |
//! | `collectives.rs` | broadcast, all-gather, scatter and reshard, all made by the same rules |
//! | `cost.rs` | the bytes that a plan moves, and the fewest that any plan could move |
//! | `document.rs` | plans as JSON |
//! | `copy.rs` | copies of regions between byte slices, and the execution of a plan inside one process |
//!
//! Properties of every plan, for random meshes, specs, copies, uneven parts and orders of devices
//! (`tests/plans/properties.rs`):
//!
//! 1. Executed, it gives byte for byte the result of gathering the array and cutting it again.
//! 2. No byte of the destination is written twice, and none is left out.
//! 3. A step that reads from the destination comes after the one that wrote exactly that region; dependencies point
//!    backwards only.
//! 4. By class (across hosts, on a host, in a task) it moves the fewest bytes that any plan could, counted
//!    element by element.
//! 5. Two steps never have one key: keys are a permutation of the step's number, chosen by the plan's fingerprint.
//! 6. The order of the placement, the names of axes and hosts, and axes and devices that take no part change
//!    neither a step nor a key; another place of a device, task or host, another shape, type or fan-out
//!    changes the fingerprint. The fingerprint of the layout, which a transport compares before a byte moves,
//!    covers shape, type and the place of every tile before and after, and nothing else.
//! 7. Different regions of one buffer never overlap in its staging memory, and lie within the size of the
//!    shard; bytes that are passed on are sent from where they arrived, and nothing else arrives there.
//! 8. A task's steps are found from the regions of its own tiles alone, in the order of the plan. The cost of
//!    a plan is the sum of its steps.
//! 9. If each region has several holders, hosts that hold the same tiles, and their tasks, send equally many
//!    regions, or one more or less, in the usual reshardings (`tests/plans/balance.rs`), and equally many
//!    within a round.
//! 10. A plan that is written as JSON and read is the same plan. A change of the text that would change a step, a
//!     key or a cost is refused.
//!
//! # Shardings
//!
//! The semantics are those of JAX's `NamedSharding`: a mesh names its axes and lists its devices in row-major order
//! (the last axis fastest); a partition spec has an entry for each leading dimension of the array, which is
//! nothing, an axis, or several axes (the first one major); dimensions without an entry are whole, and devices that
//! differ only in axes that no entry names hold copies of the same tile.
//!
//! JAX refuses arguments and results whose dimensions are not divisible by their number of shards. Here they are
//! divided as GSPMD divides them inside a program: shards have the size of the quotient rounded up, so the last
//! ones may be smaller, or empty. A shard's buffer is taken to be row-major, dense and of exactly its own size:
//! padding is not part of it. Elements smaller than a byte are refused: a host keeps each in a byte, and devices
//! pack them in ways of their own.

mod bounded;
mod collectives;
mod copy;
mod cost;
mod describe;
mod document;
mod dtype;
mod error;
mod expand;
mod fingerprint;
mod holders;
mod limits;
mod make;
mod placement;
#[expect(clippy::module_inception, reason = "the room is named for what it makes")]
mod plan;
mod rounds;
mod staging;
mod step;
mod tiles;
mod turn;
mod turns;

pub use crate::base::identity::{DeviceId, TaskId};
pub use collectives::{AllGather, Broadcast, Reshard, Scatter};
pub(crate) use copy::each_common_run;
pub use copy::{Shards, copy_region, pack, unpack};
pub use cost::{ClassCost, Cost, Minimum, PairCost, TaskBytes};
pub use describe::{ArrayDescription, Axis, Mesh, Partition, PartitionSpec, Sharding};
pub use dtype::Dtype;
pub use error::PlanError;
pub use fingerprint::{Fingerprint, TransferKey};
pub use limits::{
    MAX_AXES, MAX_BYTES, MAX_DESCRIPTION_TEXT, MAX_DEVICES, MAX_NAME, MAX_PLACED, MAX_PLAN_TEXT, MAX_RANK,
    MAX_STEPS, PLAN_VERSION,
};
pub use placement::{HostName, PlacedDevice, Placement};
pub use plan::{Plan, PlanOptions};
pub use step::{BufferRole, Region, Runs, Staging, Step, StepClass, StepEnd};
