//! Changes the shardings of arrays across processes. Every process computes the plans for itself.
//!
//! The Python code (`muster/jax/_reshard.py`) finds the shards of this process and makes arrays of the results.
//! Begin at [`reshard`].

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use muster::agent::EngineHost;
use muster::transfer::plan::{
    ArrayDescription, BufferRole, MAX_NAME, PlacedDevice, Placement, Plan, PlanError, PlanOptions, StepEnd,
};
use muster::transfer::{
    Arena, LaunchOptions, ReshardArray, ReshardError, ReshardStats, ShardBuffers, TransferEngine,
    TransferError,
};
use pyo3::prelude::*;

use super::errors::{memory_error, new_exception, transfer_error};
use super::wait::wait;

/// The size to which the engine rounds allocations up.
const PAGE: usize = 4096;

/// An array that is moved from one sharding to another.
pub struct ArrayToReshard {
    /// Its name in messages; empty if there is only one.
    pub name: String,
    /// Its description before and after, as JSON.
    pub descriptions: (String, String),
    /// Its shards of this task.
    pub shards: ShardBuffers,
}

/// The plans that were used last.
static PLANS: Mutex<Option<PlanCache>> = Mutex::new(None);

/// Moves the shards of arrays from one sharding to another, all at once. All tasks that own a device of one of them call
/// it.
///
/// # Errors
/// `PlanError` if there is no plan, and the errors of transfers. `KeyboardInterrupt` leaves the plans running, with their
/// memory, until they end by themselves.
pub fn reshard(
    py: Python<'_>,
    host: &EngineHost,
    moves: Vec<ArrayToReshard>,
    options: LaunchOptions,
) -> PyResult<ReshardStats> {
    let placement = placement_of_devices(host);
    let names: Vec<String> = moves.iter().map(|array| array.name.clone()).collect();
    let made = py.detach(|| {
        let mut cache = PLANS.lock().unwrap_or_else(PoisonError::into_inner);
        let cache = PlanCache::for_placement(&mut cache, placement);
        let cached_or_new_plan =
            |(number, array): (usize, ArrayToReshard)| match cache.cached_or_new_plan(array.descriptions) {
                Ok(cached_or_new_plan) => Ok((cached_or_new_plan, array.shards)),
                Err(error) => Err((number, error)),
            };
        moves.into_iter().enumerate().map(cached_or_new_plan).collect::<Result<Vec<_>, _>>()
    });
    let arrays = made.map_err(|(number, error)| {
        new_exception(py, "PlanError", &prefix_array_name(&names, number, &error.to_string()), &[])
    })?;
    let engine = host.engine().clone();
    let execution = tokio::task::spawn_blocking;
    let done =
        wait(
            py,
            async move { execution(move || execute_transfers_of_plans(&engine, &arrays, options)).await },
        )?;
    match done {
        Ok(Ok(stats)) => Ok(stats),
        Ok(Err(error)) => Err(reshard_error(py, &error, &names)),
        Err(_) => Err(new_exception(py, "MusterError", "muster failed inside: please report it", &[])),
    }
}

/// Puts the name of an array before a message.
fn prefix_array_name(names: &[String], number: usize, text: &str) -> String {
    match names.get(number) {
        Some(name) if !name.is_empty() => format!("{name}: {text}"),
        _ => text.to_owned(),
    }
}

/// Plans by the descriptions of their arrays, for one placement of the devices: all that are used in turn by a program
/// that moves the same arrays again and again.
struct PlanCache {
    placement: Placement,
    /// The plans, with the number of their last use.
    plans: HashMap<(String, String), (Arc<Plan>, u64)>,
    uses: u64,
    /// The bytes of the descriptions.
    bytes: usize,
}

impl PlanCache {
    /// The most plans, and the most bytes of their descriptions, to which the memory of a plan is in proportion.
    const PLANS_MAX: usize = 4096;
    const BYTES_MAX: usize = 32 << 20;

    /// Returns the cache for a placement. The plans for another one are forgotten.
    fn for_placement(cache: &mut Option<Self>, placement: Placement) -> &mut Self {
        if cache.as_ref().is_none_or(|cache| cache.placement != placement) {
            *cache = None;
        }
        cache.get_or_insert_with(|| Self { placement, plans: HashMap::new(), uses: 0, bytes: 0 })
    }

    /// Returns the plan from one description to the other.
    fn cached_or_new_plan(&mut self, descriptions: (String, String)) -> Result<Arc<Plan>, PlanError> {
        self.uses += 1;
        if let Some((plan, used)) = self.plans.get_mut(&descriptions) {
            *used = self.uses;
            return Ok(Arc::clone(plan));
        }
        let describe = |text: &str| ArrayDescription::from_json(text);
        let (before, after) = (describe(&descriptions.0)?, describe(&descriptions.1)?);
        let plan = Arc::new(Plan::new(before, after, &self.placement, PlanOptions::default())?);
        self.bytes += descriptions.0.len() + descriptions.1.len();
        self.plans.insert(descriptions, (Arc::clone(&plan), self.uses));
        while self.plans.len() > Self::PLANS_MAX || self.bytes > Self::BYTES_MAX && self.plans.len() > 1 {
            self.forget_older_half();
        }
        Ok(plan)
    }

    fn forget_older_half(&mut self) {
        let mut uses: Vec<u64> = self.plans.values().map(|(_, used)| *used).collect();
        let middle = uses.len() / 2;
        let (_, since, _) = uses.select_nth_unstable(middle);
        let since = *since;
        self.plans.retain(|_, (_, used)| *used >= since);
        self.bytes = self.plans.keys().map(|(before, after)| before.len() + after.len()).sum();
    }
}

/// Executes this task's part of the plans.
fn execute_transfers_of_plans(
    engine: &TransferEngine,
    arrays: &[(Arc<Plan>, ShardBuffers)],
    options: LaunchOptions,
) -> Result<ReshardStats, ReshardError> {
    let here = engine.here().task;
    let packed = |end: &StepEnd, bytes: u64| {
        let is_packed = end.task == here && end.runs.count() > 1;
        if is_packed { usize::try_from(bytes).unwrap_or(usize::MAX).next_multiple_of(PAGE) } else { 0 }
    };
    let steps = arrays.iter().flat_map(|(plan, _)| plan.steps_of_task(here));
    let staging = steps.filter(|step| step.class.leaves_task()).fold(0_usize, |sum, step| {
        sum.saturating_add(packed(&step.source, step.bytes))
            .saturating_add(packed(&step.destination, step.bytes))
    });
    let arrays: Vec<_> = arrays.iter().map(|(plan, shards)| ReshardArray { plan, shards }).collect();
    engine.execute_plans(&arrays, &[&Arena::new(staging)?], options)
}

/// Returns the tasks and hosts of all devices, as the engine records say.
fn placement_of_devices(host: &EngineHost) -> Placement {
    let roster = host.roster();
    let roster = roster.borrow();
    let placed = roster.membership.peers.iter().flat_map(|(task, peer)| {
        // A task that does not state its host counts as a host of its own.
        let named = Some(&peer.address.host).filter(|name| (1..=MAX_NAME).contains(&name.len()));
        let name = named.map_or_else(|| format!("of task {task}"), String::clone);
        peer.devices.iter().map(move |device| PlacedDevice {
            device: *device,
            task: *task,
            host: name.clone(),
        })
    });
    Placement { devices: placed.collect() }
}

fn reshard_error(py: Python<'_>, error: &ReshardError, names: &[String]) -> PyErr {
    const NEXT: &str = "see whether all processes have called it with the same arrays, in the same order";
    match error {
        ReshardError::Transfer {
            array, error: TransferError::LayoutMismatch { here, there, .. }, ..
        } => {
            let text = format!("another process gives another array or sharding: {here} here, {there} there");
            let text = prefix_array_name(names, *array, &format!("{text}; {NEXT}"));
            new_exception(py, "LayoutMismatch", &text, &[("reason", "layout_mismatch")])
        }
        ReshardError::Transfer { error, .. } => transfer_error(py, error),
        ReshardError::Memory(error) => memory_error(py, error),
        ReshardError::Plan(error) => new_exception(py, "PlanError", &error.to_string(), &[]),
        ReshardError::Shard { array, device, role, wanted, found } if *role == BufferRole::Source.name() => {
            let text = format!("device {device} has {found} of {wanted} bytes of it here; {NEXT}");
            new_exception(py, "PlanError", &prefix_array_name(names, *array, &text), &[])
        }
        ReshardError::Timeout { .. } => new_exception(py, "Deadline", &format!("{error}; {NEXT}"), &[]),
        error => {
            let reason = match error {
                ReshardError::GpuStalled { .. } => "stalled",
                ReshardError::Staging { .. } => "memory",
                _ => "unproven",
            };
            new_exception(py, "TransferError", &error.to_string(), &[("reason", reason)])
        }
    }
}
