//! What a plan moves, and the least that could be moved.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::bounded::at_most;
use super::holders::Holders;
use super::plan::Stretches;
use super::tiles::{NONE, Reach, intersect, volume};
use super::{Class, Plan, TaskId};

/// How many steps of a class there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClassCost {
    /// The class.
    pub class: Class,
    /// How many steps.
    pub steps: u64,
    /// How many bytes they have together.
    pub bytes: u64,
}

/// The least that any plan could move, whatever its steps. A byte must come to a host from another one if the host
/// shall hold it and no task of it does; once is enough, since it can be copied on from there. The same holds for
/// tasks, and what remains is copied within tasks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Minimum {
    /// Bytes that must come from another host.
    pub across_hosts: u64,
    /// Bytes that must come from another task beside these.
    pub same_host: u64,
    /// Bytes that must be copied within tasks.
    pub local_copy: u64,
}

/// A task, and how many bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TaskBytes {
    /// The task.
    pub task: TaskId,
    /// How many bytes.
    pub bytes: u64,
}

/// What goes from one task to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PairCost {
    /// The task that gives.
    pub from: TaskId,
    /// The task that takes.
    pub to: TaskId,
    /// Whether they share a host.
    pub same_host: bool,
    /// How many steps.
    pub steps: u64,
    /// How many bytes they have together.
    pub bytes: u64,
}

/// What a plan costs. Bytes are exact; every byte of the destination is counted once, in the class of the step that
/// puts it there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cost {
    /// By class, the nearest first.
    #[serde(deserialize_with = "at_most::<_, _, 4>")]
    pub classes: Vec<ClassCost>,
    /// Bytes that are copied or sent: all but those whose buffer is handed on.
    pub moved: u64,
    /// The least that any plan could move.
    pub minimum: Minimum,
    /// How many of the bytes moved are beyond that.
    pub over_minimum: u64,
    /// Steps that leave their task.
    pub messages: u64,
    /// The longest chain of steps that depend on each other.
    pub rounds: u64,
    /// The task to which most comes from other tasks.
    pub busiest_in: Option<TaskBytes>,
    /// The task from which most goes to other tasks.
    pub busiest_out: Option<TaskBytes>,
    /// The task that needs the most staging room.
    pub most_staging: Option<TaskBytes>,
}

impl Plan {
    /// What the plan costs, and the least that it could cost. The latter is worked out from the tiles, not from the
    /// steps.
    #[must_use]
    pub fn cost(&self) -> Cost {
        let mut classes = Class::ALL.map(|class| ClassCost { class, steps: 0, bytes: 0 });
        let tasks = self.parties.task_ids.len();
        let (mut comes, mut goes) = (vec![0; tasks], vec![0; tasks]);
        let mut depths: Vec<u32> = Vec::with_capacity(self.records.len());
        let mut room = Stretches::default();
        for record in &self.records {
            let bytes = self.bytes_of(record, &mut room);
            let class = &mut classes[record.class as usize];
            class.steps += 1;
            class.bytes += bytes;
            if record.class.leaves_task() {
                goes[self.parties.tasks[record.source as usize] as usize] += bytes;
                comes[self.parties.tasks[record.destination as usize] as usize] += bytes;
            }
            let before = if record.after == NONE { 0 } else { depths[record.after as usize] };
            depths.push(before + 1);
        }
        let moved = classes[1..].iter().map(|class| class.bytes).sum();
        let minimum = self.minimum();
        Cost {
            messages: classes.iter().filter(|class| class.class.leaves_task()).map(|class| class.steps).sum(),
            classes: classes.to_vec(),
            moved,
            minimum,
            over_minimum: moved - (minimum.across_hosts + minimum.same_host + minimum.local_copy),
            rounds: depths.iter().copied().max().unwrap_or(0).into(),
            busiest_in: self.busiest(&comes),
            busiest_out: self.busiest(&goes),
            most_staging: self.busiest(&self.rooms.tasks),
        }
    }

    /// What goes from task to task, in the order of the tasks.
    #[must_use]
    pub fn pairs(&self) -> Vec<PairCost> {
        let mut pairs: BTreeMap<(u32, u32), PairCost> = BTreeMap::new();
        let mut room = Stretches::default();
        for record in self.records.iter().filter(|record| record.class.leaves_task()) {
            let task = |device: u32| self.parties.tasks[device as usize];
            let (from, to) = (task(record.source), task(record.destination));
            let id = |task: u32| self.parties.task_ids[task as usize];
            let same_host = record.class == Class::SameHost;
            let pair = pairs.entry((from, to)).or_insert(PairCost {
                from: id(from),
                to: id(to),
                same_host,
                steps: 0,
                bytes: 0,
            });
            pair.steps += 1;
            pair.bytes += self.bytes_of(record, &mut room);
        }
        pairs.into_values().collect()
    }

    /// The task with the most, if any has something; the first one of equals.
    fn busiest(&self, bytes: &[u64]) -> Option<TaskBytes> {
        let tasks = self.parties.task_ids.iter().zip(bytes).rev();
        let (&task, &bytes) = tasks.max_by_key(|(_, bytes)| **bytes)?;
        (bytes > 0).then_some(TaskBytes { task, bytes })
    }

    fn minimum(&self) -> Minimum {
        let mut minimum = Minimum::default();
        if self.records.is_empty() {
            return minimum;
        }
        let holders = Holders::of(&self.parties, &self.parties.source, self.source_tiling.tiles());
        let receivers =
            Holders::of(&self.parties, &self.parties.destination, self.destination_tiling.tiles());
        let mut room = Stretches::default();
        let mut reach = Reach::default();
        for wanted in 0..self.destination_tiling.tiles() {
            self.destination_tiling.intervals(wanted, &mut room.wanted);
            if volume(&room.wanted) == 0 {
                continue;
            }
            for number in 0..reach.find(&self.source_tiling, &room.wanted) {
                let held = reach.nth(&self.source_tiling, number);
                self.source_tiling.intervals(held, &mut room.held);
                intersect(&room.held, &room.wanted, &mut room.common);
                let bytes = volume(&room.common) * self.item;
                let whole = room.held == room.wanted;
                for span in receivers.spans(wanted) {
                    let holding = holders.find_span(held, span.host);
                    let mut lacking = 0;
                    for group in receivers.groups(span) {
                        lacking += u64::from(
                            holding.is_none_or(|host| holders.find_group(host, group.task).is_none()),
                        );
                        let devices = receivers.devices(group);
                        let stays = |device: &&u32| whole && self.parties.source[**device as usize] == held;
                        minimum.local_copy +=
                            (devices.len() - devices.iter().filter(stays).count()) as u64 * bytes;
                    }
                    // What comes to a task from elsewhere is not copied within it.
                    minimum.local_copy -= lacking * bytes;
                    let away = u64::from(holding.is_none());
                    minimum.across_hosts += away * bytes;
                    minimum.same_host += (lacking - away) * bytes;
                }
            }
        }
        minimum
    }
}
