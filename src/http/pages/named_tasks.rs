//! Names the tasks of an issue or a barrier: hosts all of whose tasks are concerned as hosts, and the other tasks one
//! by one.
//!
//! Begin at [`NamedTasks::new`].

use super::links::TaskLabel;
use super::snapshot::{JobSnapshot, heartbeat_interval_us};
use super::status::TaskStatus;
use crate::coordination::{HostId, HostOfTasks, HostOrTask, TaskId, Timestamp};
use crate::text::format_grouped;

/// A host all of whose tasks are concerned.
pub(super) struct HostLabel {
    pub host: HostId,
    pub tasks: Vec<TaskId>,
    /// The number of its tasks with each status, in words.
    pub statuses: String,
    /// The most urgent status of its tasks.
    pub worst: TaskStatus,
    /// The latest heartbeat of its tasks.
    pub heard: Option<Timestamp>,
    /// The longest usual interval between the heartbeats of one of its tasks in microseconds; 0 if none is known.
    pub heartbeat_interval_us: u64,
    /// Whether all of its tasks are excluded.
    pub is_excluded: bool,
}

impl HostLabel {
    fn new(snapshot: &JobSnapshot, host: &HostOfTasks) -> Self {
        let counts = snapshot.status_counts_of(&host.tasks);
        let words = counts.iter().map(|(status, count)| format!("{count} {}", status.word()));
        let heard = host.tasks.iter().filter_map(|task| snapshot.find_task(*task)?.last_heartbeat).max();
        let interval = |task: &TaskId| snapshot.find_task(*task).map(heartbeat_interval_us);
        let heartbeat_interval_us = host.tasks.iter().filter_map(interval).max();
        Self {
            host: host.name.clone(),
            tasks: host.tasks.clone(),
            statuses: words.collect::<Vec<_>>().join(", "),
            worst: counts.first().map_or(TaskStatus::Connected, |(status, _)| *status),
            heard,
            heartbeat_interval_us: heartbeat_interval_us.unwrap_or_default(),
            is_excluded: counts.iter().all(|(status, _)| *status == TaskStatus::Excluded),
        }
    }
}

/// A host or a task that is named.
pub(super) enum NamedGroup {
    Host(HostLabel),
    Task(TaskLabel),
}

/// The first hosts and tasks of a list of tasks, and how many tasks are left.
#[derive(Default)]
pub(super) struct NamedTasks {
    pub groups: Vec<NamedGroup>,
    /// The number of tasks that are neither named nor on a named host.
    pub others: usize,
    /// The number of all tasks of the list.
    pub total: usize,
    /// The number of hosts to which all tasks of the list belong, and all of whose tasks are on it; 0 if a task is on none.
    pub whole_hosts: usize,
}

impl NamedTasks {
    /// Names at most `most` hosts and tasks of a list. `total` is the number of tasks, of which the list may have only
    /// the first.
    pub fn new(snapshot: &JobSnapshot, tasks: &[TaskId], total: usize, most: usize) -> Self {
        let all = snapshot.host_assignment.group_by_host(tasks);
        let shown = &all[..all.len().min(most)];
        let named: usize = shown.iter().map(HostOrTask::task_count).sum();
        let total = total.max(tasks.len());
        let is_whole = total == tasks.len() && all.iter().all(|group| matches!(group, HostOrTask::Host(_)));
        let whole_hosts = if is_whole { all.len() } else { 0 };
        let label = |group: &HostOrTask<'_>| match group {
            HostOrTask::Host(host) => NamedGroup::Host(HostLabel::new(snapshot, host)),
            HostOrTask::Task(task) => NamedGroup::Task(snapshot.task_label(*task)),
        };
        Self { groups: shown.iter().map(label).collect(), others: total - named, total, whole_hosts }
    }

    /// Returns every task that is named, alone or with its host.
    pub fn task_ids(&self) -> impl Iterator<Item = TaskId> {
        self.groups.iter().flat_map(|group| match group {
            NamedGroup::Host(host) => host.tasks.clone(),
            NamedGroup::Task(label) => vec![label.task],
        })
    }

    /// Returns whether nothing is named.
    pub fn is_empty(&self) -> bool {
        self.groups.is_empty()
    }

    /// Returns the hosts to which all tasks of the list belong, as the end of a title; empty if a task is on none.
    pub fn whole_hosts_text(&self) -> String {
        match (self.whole_hosts, &self.groups[..]) {
            (0, _) => String::new(),
            (1, [NamedGroup::Host(one)]) => {
                format!(": all tasks of host {}", super::links::short_host_name(&one.host))
            }
            (hosts, _) => format!(": all tasks of {} hosts", format_grouped(hosts)),
        }
    }
}
