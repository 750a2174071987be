//! Plans: which bytes of an array go from which device to which, when its sharding changes.
//!
//! A plan is made of two [`ArrayDescription`]s (source and destination), a [`Placement`] of their devices and
//! [`Options`]. It is pure: no IO, no clock, no threads, no randomness. Every process that is given the same
//! description makes the same plan, with the same keys, so plans are not sent.
//!
//! It is also arithmetic: nothing is kept of a step. Which region a number means, which device gives it and where it is
//! staged follow from the number alone, so a plan of sixteen million steps is made in the time that its devices take.
//!
//! | file | its reason to exist |
//! | --- | --- |
//! | `describe.rs`, `dtype.rs` | what is asked for: meshes, partition specs, arrays, as JAX names them |
//! | `limits.rs`, `bounded.rs`, `error.rs` | bounds, lists from outside, and why there is no plan |
//! | `placement.rs` | which task and host owns a device |
//! | `tiles.rs` | a sharding as arithmetic: which tile of the array a device holds |
//! | `rounds.rs` | regions by number, and the numbers of a tile's regions |
//! | `holders.rs` | which devices hold a tile, by host and task |
//! | `turn.rs`, `turns.rs` | whose turn it is to give a region that several hold |
//! | `make.rs` | the rules that choose which device copies to which, for one region |
//! | `staging.rs` | room for what has to be packed on its way |
//! | `plan.rs`, `step.rs` | the plan, and one copy of it with its regions and runs |
//! | `expand.rs` | the steps of a plan, worked out when they are looked at |
//! | `collectives.rs` | broadcast, all-gather, scatter and reshard, all made by the same rules |
//! | `cost.rs` | what a plan moves, and the least that could be moved |
//! | `document.rs` | plans as JSON |
//! | `copy.rs` | copies of regions between byte slices, and a plan carried out inside one process |
//!
//! # Shardings
//! The semantics are those of JAX's `NamedSharding`: a mesh names its axes and lists its devices in row-major order
//! (the last axis fastest); a partition spec has an entry for each leading dimension of the array, which is nothing,
//! an axis, or several axes (the first one major); dimensions without an entry are whole, and devices that differ
//! only in axes that no entry names hold copies of the same tile.
//!
//! JAX refuses arguments and results whose dimensions are not divisible by their number of shards. Here they are
//! divided as GSPMD divides them inside a program: shards have the size of the quotient rounded up, so the last ones
//! may be smaller, or empty. A shard's buffer is taken to be row-major, dense and of exactly its own size: padding is
//! not part of it.
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
