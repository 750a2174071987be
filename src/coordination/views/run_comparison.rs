//! The comparison of two runs of a job: which tasks and hosts came late or failed in which of them, and which tasks and
//! devices have another host or task now.
//!
//! Tasks are compared by number, because the number decides a task's share of the work; hosts by name, and devices by
//! their place (`device_comparison.rs`). So a task that is late in both runs points at its work, and a host that is late
//! in both points at the host. Begin at `JobReader::compare_runs`.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::device_comparison::DeviceChange;
use super::hosts::{HostLateness, HostView};
use super::job::{JobReader, JobView};
use super::job_in_run::RunDetail;
use super::task::TaskView;
use super::task_state::TaskPhase;
use crate::coordination::ids::{HostId, RunNumber, TaskId, Timestamp};
use crate::coordination::straggler_stats::StragglerView;
use crate::text::format_count_with_noun;

/// The maximum number of tasks and of hosts in a comparison.
const LISTED_MAX: usize = 1_000;

/// The lateness of a task at the barriers of one run.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ComparedLateness {
    /// The usual time from the first arrival at a barrier to its own, in microseconds.
    pub lateness_us: u64,
    /// The straggler score, from 0 to 1. Near 1: it is late every time.
    pub score: f64,
    /// Whether it is late at nearly every barrier.
    pub is_chronic: bool,
}

/// A task in two runs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ComparedTask {
    /// The task.
    pub task: TaskId,
    /// Its host in the earlier run.
    pub host_before: Option<HostId>,
    /// Its host in the later run.
    pub host: Option<HostId>,
    /// Its lateness in the earlier run.
    pub before: Option<ComparedLateness>,
    /// Its lateness in the later run.
    pub now: Option<ComparedLateness>,
    /// Whether it was late in the earlier run: at nearly every barrier, or with its host.
    pub late_before: bool,
    /// Whether it is late in the later run.
    pub late: bool,
    /// Whether it had failed when the earlier run ended.
    pub failed_before: bool,
    /// Whether it has failed in the later run.
    pub failed: bool,
}

impl ComparedTask {
    /// Returns whether the hosts of both runs are known and differ.
    #[must_use]
    pub fn has_moved(&self) -> bool {
        self.host.is_some() && self.host_before.is_some() && self.host != self.host_before
    }

    /// Returns whether the task was late: in the earlier run, in the later run.
    #[must_use]
    pub const fn was_late(&self) -> [bool; 2] {
        [self.late_before, self.late]
    }

    /// Returns whether the task had failed: in the earlier run, in the later run.
    #[must_use]
    pub const fn had_failed(&self) -> [bool; 2] {
        [self.failed_before, self.failed]
    }
}

/// A host in two runs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ComparedHost {
    /// Its name.
    pub host: HostId,
    /// Its tasks in the earlier run, ascending; none if it had no part in it.
    pub tasks_before: Vec<TaskId>,
    /// Its tasks in the later run, ascending; none if it has no part in it.
    pub tasks: Vec<TaskId>,
    /// The lateness of its tasks in the earlier run.
    pub before: Option<HostLateness>,
    /// The lateness of its tasks in the later run.
    pub now: Option<HostLateness>,
    /// The number of its tasks that had failed when the earlier run ended.
    pub failed_before: usize,
    /// The number of its tasks that have failed in the later run.
    pub failed: usize,
}

impl ComparedHost {
    /// Returns whether the tasks of the host came habitually later than those of the median host: in the earlier run, in the later
    /// run. Of a run with few barriers nothing is said.
    #[must_use]
    pub fn was_late(&self) -> [bool; 2] {
        [&self.before, &self.now].map(|late| late.as_ref().is_some_and(HostLateness::is_habit))
    }

    /// Returns whether tasks of the host had failed: in the earlier run, in the later run.
    #[must_use]
    pub const fn had_failed(&self) -> [bool; 2] {
        [self.failed_before > 0, self.failed > 0]
    }
}

/// Two runs side by side.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RunComparison {
    /// The earlier run.
    pub before: RunDetail,
    /// The later run.
    pub now: RunDetail,
    /// The changes from the earlier run to the later one, in words.
    pub summary: String,
    /// The tasks that had failed in the later run, those that had in the earlier one, those that are late in both, those
    /// that are late in one, and after them the tasks that have another host now. At most 1,000.
    pub tasks: Vec<ComparedTask>,
    /// The number of tasks that are late in both runs.
    pub late_in_both: usize,
    /// The number of tasks that are on another host now.
    pub moved_tasks: usize,
    /// The hosts that are later than the median host, or have failed tasks, in at least one of the runs, or have other
    /// tasks now. At most 1,000.
    pub hosts: Vec<ComparedHost>,
    /// The number of devices that have another task or other ids, came or are gone; `None` if the devices of a run are
    /// not known. The device map lists them.
    pub changed_devices: Option<usize>,
}

impl JobReader<'_> {
    /// Compares a run with an earlier one; `None` if it is not earlier, or if one of them is not known or its tasks are no
    /// longer kept.
    #[must_use]
    pub fn compare_runs(&self, before: RunNumber, now: RunNumber) -> Option<RunComparison> {
        if before >= now {
            return None;
        }
        // One view of each run has its tasks, its hosts and its counts, so hosts are assigned once for each run.
        let view = |run| Some(self.in_run(run)?.view_with_hosts(Timestamp::default()));
        let ((old, old_hosts, _), (new, new_hosts, _)) = (view(before)?, view(now)?);
        let detail = |run, view: &JobView, hosts: usize| {
            self.run_detail_with_counts(run, Some((view.run.counts, hosts)))
        };
        let (old_detail, new_detail) =
            (detail(before, &old, old_hosts.len())?, detail(now, &new, new_hosts.len())?);
        let hosts = compared_hosts(old_hosts, new_hosts);
        let mut tasks = compared_tasks(&old.run.tasks, &new.run.tasks, &hosts);
        let late_in_both = tasks.iter().filter(|task| task.was_late() == [true; 2]).count();
        let moved_tasks = tasks.iter().filter(|task| task.has_moved()).count();
        let devices = self
            .compare_devices(Some(now), Some(before))
            .map(|devices| devices.places.iter().filter(|place| place.fate != DeviceChange::Same).count());
        let summary = summary_text(
            [&old_detail, &new_detail],
            [moved_tasks, devices.unwrap_or_default()],
            &tasks,
            &hosts,
        );
        tasks.truncate(LISTED_MAX);
        Some(RunComparison {
            before: old_detail,
            now: new_detail,
            summary,
            tasks,
            late_in_both,
            moved_tasks,
            hosts: hosts.into_iter().take(LISTED_MAX).collect(),
            changed_devices: devices,
        })
    }
}

/// Says what has changed from one run to a later one, and what had failed or was late in which of them.
fn summary_text(
    [before, now]: [&RunDetail; 2],
    [moved_tasks, changed_devices]: [usize; 2],
    tasks: &[ComparedTask],
    hosts: &[ComparedHost],
) -> String {
    let mut told = Vec::new();
    if before.tasks != now.tasks {
        told.push(format!("the job has {} instead of {}", count_of_tasks(now.tasks), before.tasks));
    }
    if moved_tasks > 0 {
        told.push(format_count_with_noun(moved_tasks, "task is", "tasks are") + " on another host");
    }
    if changed_devices > 0 {
        told.push(format_count_with_noun(changed_devices, "device has", "devices have") + " changed");
    }
    if before.run.state != now.run.state && before.run.first_cause.is_some() != now.run.first_cause.is_some()
    {
        let failed = if before.run.first_cause.is_some() { before } else { now };
        let other = if failed.run.number == before.run.number { now } else { before };
        told.push(format!("run {} failed, and run {} has not", failed.run.number, other.run.number));
    }
    let failed_hosts = hosts.iter().map(|host| (host, host.had_failed())).collect::<Vec<_>>();
    let failed_tasks = tasks.iter().map(ComparedTask::had_failed).collect::<Vec<_>>();
    let words = [["has failed tasks", "have failed tasks"], ["task has failed", "tasks have failed"]];
    told.extend(told_by_run(&failed_hosts, &failed_tasks, words));
    let late_hosts = hosts.iter().map(|host| (host, host.was_late())).collect::<Vec<_>>();
    let late_tasks = tasks.iter().map(ComparedTask::was_late).collect::<Vec<_>>();
    told.extend(told_by_run(
        &late_hosts,
        &late_tasks,
        [["is late", "are late"], ["task is late", "tasks are late"]],
    ));
    let since = format!("From run {} to run {}", before.run.number, now.run.number);
    match told.is_empty() {
        true => {
            format!(
                "{since} nothing has changed: the same tasks are on the same hosts, and none has failed or is late."
            )
        }
        false => format!("{since}: {}.", told.join("; ")),
    }
}

/// Says of how many hosts, or else of how many tasks, something holds in the later run only, in the earlier one only, and in both: what
/// holds of a host holds of its tasks. Both lists tell in which of the runs it holds; the words are for one and for many.
fn told_by_run(
    hosts: &[(&ComparedHost, [bool; 2])],
    tasks: &[[bool; 2]],
    [[of_one_host, of_hosts], [of_one_task, of_tasks]]: [[&str; 2]; 2],
) -> Vec<String> {
    let runs = [
        ([false, true], "in the later run only"),
        ([true, false], "in the earlier run only"),
        ([true, true], "in both"),
    ];
    let tell = |(held, when): ([bool; 2], &str)| {
        let tasks = tasks.iter().filter(|task| **task == held).count();
        let mut hosts = hosts.iter().filter(|(_, host)| *host == held).map(|(host, _)| host);
        match (hosts.next(), hosts.count()) {
            (Some(one), 0) => Some(format!("host {} {of_one_host} {when}", one.host)),
            (Some(_), others) => Some(format!("{} hosts {of_hosts} {when}", others + 1)),
            (None, _) if tasks > 0 => {
                Some(format!("{} {when}", format_count_with_noun(tasks, of_one_task, of_tasks)))
            }
            (None, _) => None,
        }
    };
    runs.into_iter().filter_map(tell).collect()
}

fn count_of_tasks(tasks: usize) -> String {
    format_count_with_noun(tasks, "task", "tasks")
}

/// Returns the tasks that have failed, are late or on another host, the most telling first.
fn compared_tasks(old: &[TaskView], new: &[TaskView], hosts: &[ComparedHost]) -> Vec<ComparedTask> {
    let (old_count, new_count) = (old.len(), new.len());
    let lateness = |task: Option<&TaskView>, of: usize| {
        let it = task?.straggling.as_ref()?;
        Some(ComparedLateness { lateness_us: it.lateness_us, score: it.score, is_chronic: it.is_chronic(of) })
    };
    let host = |task: Option<&TaskView>| task.and_then(|task| task.host.clone());
    let late_hosts = [0, 1].map(|run| {
        hosts.iter().filter(|host| host.was_late()[run]).map(|host| &host.host).collect::<BTreeSet<_>>()
    });
    // A task of a late host is late with it, also if its own score is a little lower.
    let is_late = |run: usize, lateness: Option<ComparedLateness>, host: Option<&HostId>| {
        let is_with_host =
            || lateness.is_some_and(|it| it.lateness_us >= StragglerView::SIGNIFICANT_LATENESS_US);
        lateness.is_some_and(|it| it.is_chronic)
            || (host.is_some_and(|host| late_hosts[run].contains(host)) && is_with_host())
    };
    let has_failed = |task: Option<&TaskView>| task.is_some_and(|task| task.standing == TaskPhase::Failed);
    let compare = |place: usize| {
        let (old, new) = (old.get(place), new.get(place));
        let (before, now) = (lateness(old, old_count), lateness(new, new_count));
        let (host_before, host) = (host(old), host(new));
        Some(ComparedTask {
            task: new.or(old)?.task,
            late_before: is_late(0, before, host_before.as_ref()),
            late: is_late(1, now, host.as_ref()),
            failed_before: has_failed(old),
            failed: has_failed(new),
            host_before,
            host,
            before,
            now,
        })
    };
    let all = (0..old_count.max(new_count)).filter_map(compare);
    let is_told = |task: &ComparedTask| {
        task.has_moved() || task.was_late().contains(&true) || task.had_failed().contains(&true)
    };
    let mut told: Vec<ComparedTask> = all.filter(is_told).collect();
    told.sort_by_key(|task| {
        let late = task.was_late();
        let most = [task.before, task.now].into_iter().flatten().map(|it| it.lateness_us).max();
        let lateness = (Reverse(late.iter().filter(|late| **late).count()), Reverse(late[1]), Reverse(most));
        (Reverse(task.failed), Reverse(task.failed_before), lateness, task.task)
    });
    told
}

/// Returns the hosts that have failed tasks, are late or have other tasks, the most telling first.
fn compared_hosts(old: Vec<HostView>, new: Vec<HostView>) -> Vec<ComparedHost> {
    let mut hosts: BTreeMap<HostId, (Option<HostView>, Option<HostView>)> = BTreeMap::new();
    for host in old {
        let name = host.host.clone();
        hosts.entry(name).or_default().0 = Some(host);
    }
    for host in new {
        let name = host.host.clone();
        hosts.entry(name).or_default().1 = Some(host);
    }
    let tasks = |host: &Option<HostView>| host.as_ref().map_or_else(Vec::new, |host| host.tasks.clone());
    let failed = |host: &Option<HostView>| host.as_ref().map_or(0, |host| host.counts.failed);
    let all = hosts.into_iter().map(|(host, (before, now))| ComparedHost {
        host,
        tasks_before: tasks(&before),
        tasks: tasks(&now),
        failed_before: failed(&before),
        failed: failed(&now),
        before: before.and_then(|host| host.lateness),
        now: now.and_then(|host| host.lateness),
    });
    let is_told = |host: &ComparedHost| {
        host.tasks != host.tasks_before
            || host.was_late().contains(&true)
            || host.had_failed().contains(&true)
    };
    let mut told: Vec<ComparedHost> = all.filter(is_told).collect();
    told.sort_by_key(|host| {
        let late = host.was_late();
        let most = [&host.before, &host.now].into_iter().flatten().map(|it| it.above_median_us).max();
        let lateness = (Reverse(late.iter().filter(|late| **late).count()), Reverse(most));
        (Reverse(host.failed), Reverse(host.failed_before), lateness, host.host.clone())
    });
    told
}
