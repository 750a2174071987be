//! The number of bytes that a plan moves, and the fewest that any plan could move.
//!
//! This module does not estimate times. Begin at [`Cost`].

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::bounded::deserialize_at_most;
use super::staging::DevicesNeedingStaging;
use super::tiles::{NONE, TilePair};
use super::{Plan, StepClass, TaskId};

/// The steps of one class.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClassCost {
    /// The class.
    pub class: StepClass,
    /// The number of steps.
    pub steps: u64,
    /// The bytes of these steps together.
    pub bytes: u64,
}

/// The fewest bytes that any plan could move, whatever its steps. A byte must come to a host from another one
/// if the host is to hold it and no task of it does; once is enough, because it can be copied on from there.
/// The same holds for tasks, and the rest is copied within tasks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MinimumTraffic {
    /// The bytes that must come from another host.
    pub across_hosts: u64,
    /// The bytes that must come from another task on the same host.
    pub same_host: u64,
    /// The bytes that must be copied within tasks.
    pub local_copy: u64,
}

/// A task and a number of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TaskBytes {
    /// The task.
    pub task: TaskId,
    /// The number of bytes.
    pub bytes: u64,
}

/// The steps from one task to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PairCost {
    /// The sending task.
    pub from: TaskId,
    /// The receiving task.
    pub to: TaskId,
    /// Whether both run on one host.
    pub same_host: bool,
    /// The number of steps.
    pub steps: u64,
    /// The bytes of these steps together.
    pub bytes: u64,
}

/// The cost of a plan. Bytes are exact; every byte of the destination is counted once, in the class of the
/// step that writes it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cost {
    /// The steps by class, the nearest first.
    #[serde(deserialize_with = "deserialize_at_most::<_, _, 4>")]
    pub classes: Vec<ClassCost>,
    /// The bytes that are copied or sent: all but those of [`StepClass::SameBuffer`].
    pub moved: u64,
    /// The fewest bytes that any plan could move.
    pub minimum: MinimumTraffic,
    /// The bytes moved beyond the minimum.
    pub over_minimum: u64,
    /// The number of steps that leave their task.
    pub messages: u64,
    /// The longest chain of steps that depend on each other.
    pub rounds: u64,
    /// The task that receives the most bytes from other tasks.
    pub busiest_in: Option<TaskBytes>,
    /// The task that sends the most bytes to other tasks.
    pub busiest_out: Option<TaskBytes>,
    /// The task that needs the most staging memory.
    pub most_staging: Option<TaskBytes>,
}

impl Plan {
    /// Returns the cost of the plan, and the minimum. The minimum is computed from the tiles, not from the
    /// steps.
    #[must_use]
    pub fn cost(&self) -> Cost {
        let mut classes = StepClass::ALL.map(|class| ClassCost { class, steps: 0, bytes: 0 });
        let tasks = self.device_table.task_ids.len();
        let (mut comes, mut goes) = (vec![0; tasks], vec![0; tasks]);
        let mut staged = DevicesNeedingStaging::with_none_staged(self.device_table.ids.len());
        let mut minimum = MinimumTraffic::default();
        let mut depths: Vec<u64> = Vec::new();
        let mut rounds = 0;
        self.for_each_region(|pair, lies, steps| {
            let bytes = lies.element_count() * self.item;
            depths.clear();
            for step in steps {
                let class = &mut classes[step.class as usize];
                class.steps += 1;
                class.bytes += bytes;
                if step.class.leaves_task() {
                    goes[self.device_table.tasks[step.source as usize] as usize] += bytes;
                    comes[self.device_table.tasks[step.destination as usize] as usize] += bytes;
                }
                let before = if step.after == NONE { 0 } else { depths[step.after as usize] };
                depths.push(before + 1);
                rounds = rounds.max(before + 1);
            }
            staged.add_devices_of(steps, lies, self.item);
            self.add_minimum(pair, bytes, &mut minimum);
        });
        let moved = classes[1..].iter().map(|class| class.bytes).sum();
        Cost {
            messages: classes.iter().filter(|class| class.class.leaves_task()).map(|class| class.steps).sum(),
            classes: classes.to_vec(),
            moved,
            minimum,
            over_minimum: moved - (minimum.across_hosts + minimum.same_host + minimum.local_copy),
            rounds,
            busiest_in: self.task_with_most(&comes),
            busiest_out: self.task_with_most(&goes),
            most_staging: self.task_with_most(&self.staging_bytes_by_task(&staged)),
        }
    }

    /// Returns the traffic between tasks, in the order of the tasks: 40 bytes for each pair, of which there
    /// may be as many as messages ([`Cost::messages`]).
    #[must_use]
    pub fn pairs(&self) -> Vec<PairCost> {
        let mut pairs: BTreeMap<(u32, u32), PairCost> = BTreeMap::new();
        let mut gather = |(from, to, same_host): (u32, u32, bool), steps: u64, bytes: u64| {
            let id = |task: u32| self.device_table.task_ids[task as usize];
            let none = PairCost { from: id(from), to: id(to), same_host, steps: 0, bytes: 0 };
            let pair = pairs.entry((from, to)).or_insert(none);
            pair.steps += steps;
            pair.bytes += bytes;
        };
        // Consecutive steps are often between the same two tasks.
        let mut last = ((0, 0, false), 0, 0);
        self.for_each_region(|_, lies, steps| {
            let bytes = lies.element_count() * self.item;
            for step in steps.iter().filter(|step| step.class.leaves_task()) {
                let task = |device: u32| self.device_table.tasks[device as usize];
                let pair = (task(step.source), task(step.destination), step.class == StepClass::SameHost);
                if pair != last.0 {
                    if last.1 > 0 {
                        gather(last.0, last.1, last.2);
                    }
                    last = (pair, 0, 0);
                }
                (last.1, last.2) = (last.1 + 1, last.2 + bytes);
            }
        });
        if last.1 > 0 {
            gather(last.0, last.1, last.2);
        }
        pairs.into_values().collect()
    }

    /// Returns the task with the most bytes, the first one of equals; none if all have zero.
    fn task_with_most(&self, bytes: &[u64]) -> Option<TaskBytes> {
        let tasks = self.device_table.task_ids.iter().zip(bytes).rev();
        let (&task, &bytes) = tasks.max_by_key(|(_, bytes)| **bytes)?;
        (bytes > 0).then_some(TaskBytes { task, bytes })
    }

    /// Adds the fewest bytes that any plan moves for a region.
    fn add_minimum(&self, pair: TilePair, bytes: u64, minimum: &mut MinimumTraffic) {
        let whole = self.region_order.covers_both_tiles(pair);
        for span in self.receivers.hosts_holding_tile(pair.wanted) {
            let holding = self.holders.find_host(pair.held, span.host);
            let mut lacking = 0;
            for group in self.receivers.tasks_on_host(span) {
                lacking +=
                    u64::from(holding.is_none_or(|host| self.holders.find_task(host, group.task).is_none()));
                let devices = self.receivers.devices_in_task(group);
                let stays = |device: &&u32| whole && self.device_table.source[**device as usize] == pair.held;
                minimum.local_copy += (devices.len() - devices.iter().filter(stays).count()) as u64 * bytes;
            }
            // Bytes that come to a task from elsewhere are not copied within it.
            minimum.local_copy -= lacking * bytes;
            let away = u64::from(holding.is_none());
            minimum.across_hosts += away * bytes;
            minimum.same_host += (lacking - away) * bytes;
        }
    }
}
