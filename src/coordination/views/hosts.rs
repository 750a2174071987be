//! The view of the hosts of a job: the state of each host, its tasks, and how late its tasks are at barriers.
//!
//! `host_assignment.rs` tells which tasks are on a host. Begin at [`HostView`], then `JobReader::hosts`.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::host_assignment::{HostAssignment, HostIdSource, HostOfTasks};
use super::job::{JobReader, JobView};
use super::task_state::{TaskCounts, TaskState};
use crate::coordination::exclusion::{ExcludedHost, ExclusionKey};
use crate::coordination::ids::{ExclusionId, HostId, TaskId, Timestamp};
use crate::coordination::job::Job;
use crate::coordination::straggler_stats::StragglerView;
use crate::coordination::topology::Device;

/// The state of a host, which follows from the states of its tasks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum HostState {
    /// None of its tasks is live, and not all are excluded: each has failed, is suspect or missing, or is excluded.
    Down,
    /// Some of its tasks have failed, are suspect or missing, but not all.
    Degraded,
    /// All of its tasks are excluded.
    Excluded,
    /// None of its tasks has failed, is suspect or missing.
    Healthy,
}

impl HostState {
    /// Every state, in the order of urgency for a person.
    pub const ALL: [Self; 4] = [Self::Down, Self::Degraded, Self::Excluded, Self::Healthy];

    /// Returns the name of the state, as in JSON, in metrics and for people.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Down => "down",
            Self::Degraded => "degraded",
            Self::Excluded => "excluded",
            Self::Healthy => "healthy",
        }
    }

    /// Returns the state of a host whose tasks have these states.
    #[must_use]
    pub fn from_task_counts(counts: &TaskCounts) -> Self {
        let in_trouble = counts.failed + counts.suspect + counts.missing;
        let well = counts.connected + counts.registering + counts.disconnected;
        match (in_trouble, well, counts.excluded) {
            (0, 0, 1..) => Self::Excluded,
            (1.., 0, _) => Self::Down,
            (1.., ..) => Self::Degraded,
            (0, ..) => Self::Healthy,
        }
    }
}

/// The lateness of a host's tasks at the barriers that clients name.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct HostLateness {
    /// The mean, over its tasks, of the usual time from the first arrival at a barrier to that of the task, in
    /// microseconds.
    pub lateness_us: u64,
    /// The time by which this is more than the median of all hosts, in microseconds; 0 if it is less.
    pub above_median_us: u64,
    /// The mean of the straggler scores of its tasks, from 0 to 1. Near 1: its tasks are late every time.
    pub score: f64,
    /// The number of barriers at which one of its tasks was the last to arrive.
    pub last: u64,
    /// The number of barriers in which each of its tasks took part, at least.
    #[serde(default)]
    pub barriers: u64,
}

impl HostLateness {
    /// The number of barriers that are needed to distinguish a habit from chance.
    const HABIT_AFTER: u64 = 8;
    /// The score from which on the tasks of a host count as habitually late.
    const HABIT_SCORE: f64 = 0.5;

    /// Returns whether the tasks of the host came significantly later than those of the median host, and did so as a habit.
    #[must_use]
    pub fn is_habit(&self) -> bool {
        self.barriers >= Self::HABIT_AFTER
            && self.score >= Self::HABIT_SCORE
            && self.above_median_us >= StragglerView::SIGNIFICANT_LATENESS_US
    }
}

/// A host of a job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct HostView {
    /// Its name: the host in the identity of its processes, or its boot id, or its address.
    pub host: HostId,
    /// The property that names it.
    pub named_by: HostIdSource,
    /// The boot id of its kernel, if its tasks published one.
    pub boot_id: Option<String>,
    /// The addresses from which its tasks registered, ascending.
    #[schema(value_type = Vec<String>)]
    pub addresses: Vec<IpAddr>,
    /// Its state.
    pub state: HostState,
    /// Its tasks, ascending.
    pub tasks: Vec<TaskId>,
    /// The number of its tasks in each state.
    pub counts: TaskCounts,
    /// The number of devices that its tasks published.
    pub devices: usize,
    /// The latest heartbeat of any of its tasks.
    pub last_heartbeat: Option<Timestamp>,
    /// The lateness of its tasks at barriers, once they have arrived at one.
    #[serde(default)]
    pub lateness: Option<HostLateness>,
    /// The exclusions in force on its addresses or on its tasks, ascending.
    #[serde(default)]
    pub exclusions: Vec<ExclusionId>,
}

impl HostView {
    /// Returns the key by which hosts are listed: those in trouble first, then excluded ones, then the latest at barriers.
    #[must_use]
    pub fn urgency(&self) -> (HostState, Reverse<u64>, TaskId) {
        let late = self.lateness.as_ref().map_or(0, |it| it.above_median_us);
        (self.state, Reverse(late), self.first_task())
    }

    /// Returns the first of its tasks.
    #[must_use]
    pub fn first_task(&self) -> TaskId {
        self.tasks.first().copied().unwrap_or_default()
    }
}

impl JobReader<'_> {
    /// Returns the hosts of the present run, in the order of their first task. Tasks of which no identity, boot id
    /// or address is known are on no host.
    #[must_use]
    pub fn hosts(&self) -> Vec<HostView> {
        let job = self.job_state();
        job.host_views(&job.assign_hosts(), &self.devices())
    }

    /// Returns the view of the job, and the hosts of its present run with the host of each task. They are computed
    /// together, because the view names the host of each task.
    #[must_use]
    pub fn view_with_hosts(&self, now: Timestamp) -> (JobView, Vec<HostView>, HostAssignment) {
        let assigned = self.job_state().assign_hosts();
        let view = self.view_on_hosts(now, &assigned);
        let hosts = self.job_state().host_views(&assigned, &view.run.devices);
        (view, hosts, assigned)
    }

    /// Returns the host with this name as the target of an exclusion: by the addresses that no other host has, and by the
    /// number of each task that has no such address. Returns `None` if the present run has no such host.
    #[must_use]
    pub fn excluded_host(&self, name: &str) -> Option<ExcludedHost> {
        let assigned = self.job_state().assign_hosts();
        let host = assigned.find(name)?;
        let is_shared = |address: &IpAddr| {
            assigned.hosts().iter().any(|other| other.name != host.name && other.addresses.contains(address))
        };
        let own: BTreeSet<IpAddr> = host.addresses.iter().copied().filter(|it| !is_shared(it)).collect();
        let has_own_address = |task: &TaskId| {
            let peer = self.job_state().run.task(*task).and_then(|task| task.peer);
            peer.is_some_and(|peer| own.contains(&peer.ip().to_canonical()))
        };
        let tasks = host.tasks.iter().copied().filter(|task| !has_own_address(task)).collect();
        Some(ExcludedHost::new(host.name.clone(), own.into_iter().collect(), tasks))
    }
}

impl Job {
    /// Returns the hosts that the tasks are assigned to, in the order of their first task.
    pub(super) fn host_views(&self, assigned: &HostAssignment, devices: &[Device]) -> Vec<HostView> {
        let mut device_counts: BTreeMap<TaskId, usize> = BTreeMap::new();
        for device in devices {
            *device_counts.entry(device.task).or_default() += 1;
        }
        let lateness = self.lateness_of_hosts(assigned);
        let view = |(host, lateness)| self.host_view(host, lateness, &device_counts);
        assigned.hosts().iter().zip(lateness).map(view).collect()
    }

    fn host_view(
        &self,
        host: &HostOfTasks,
        lateness: Option<HostLateness>,
        device_counts: &BTreeMap<TaskId, usize>,
    ) -> HostView {
        let tasks = || host.tasks.iter().filter_map(|id| Some((*id, self.run.task(*id)?)));
        let states = tasks().map(|(id, task)| {
            TaskState::from_phase(self.run.task_phase(id, task), self.exclusion_covering(id).is_some())
        });
        let counts = TaskCounts::count_states(states);
        let on_addresses = host.addresses.iter().map(|address| ExclusionKey::Address(*address));
        let on_tasks = host.tasks.iter().map(|task| ExclusionKey::Task(*task));
        let mut exclusions: Vec<ExclusionId> =
            on_addresses.chain(on_tasks).flat_map(|key| self.exclusions.ids_for_key(key)).collect();
        exclusions.sort_unstable();
        exclusions.dedup();
        HostView {
            host: host.name.clone(),
            named_by: host.named_by,
            boot_id: host.boot_id.as_deref().map(str::to_owned),
            addresses: host.addresses.iter().copied().collect(),
            state: HostState::from_task_counts(&counts),
            tasks: host.tasks.clone(),
            counts,
            devices: host.tasks.iter().filter_map(|task| device_counts.get(task)).sum(),
            last_heartbeat: tasks().filter_map(|(_, task)| task.last_heartbeat).max(),
            lateness,
            exclusions,
        }
    }

    /// Returns the lateness of each host; `None` for a host whose tasks have arrived at no barrier.
    fn lateness_of_hosts(&self, assigned: &HostAssignment) -> Vec<Option<HostLateness>> {
        let mean = |host: &HostOfTasks| {
            let views: Vec<_> =
                host.tasks.iter().filter_map(|id| self.run.task(*id)?.straggling.view()).collect();
            let (count, scores) = (u32::try_from(views.len()).ok()?, views.iter().map(|view| view.score));
            let lateness_us =
                views.iter().map(|view| view.lateness_us).sum::<u64>().checked_div(count.into())?;
            let (score, last) =
                (scores.sum::<f64>() / f64::from(count), views.iter().map(|view| view.last).sum());
            let barriers = views.iter().map(|view| view.taken_part).min().unwrap_or_default();
            Some(HostLateness { lateness_us, above_median_us: 0, score, last, barriers })
        };
        let mut all: Vec<Option<HostLateness>> = assigned.hosts().iter().map(mean).collect();
        let mut usual: Vec<u64> = all.iter().flatten().map(|lateness| lateness.lateness_us).collect();
        usual.sort_unstable();
        // Of an even number, the lower one: of two hosts, one can be late.
        let median_us = usual.get(usual.len().saturating_sub(1) / 2).copied().unwrap_or_default();
        for lateness in all.iter_mut().flatten() {
            lateness.above_median_us = lateness.lateness_us.saturating_sub(median_us);
        }
        all
    }
}

/// The number of hosts in each state.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct HostCounts(BTreeMap<HostState, usize>);

impl HostCounts {
    /// Counts hosts whose tasks have the states that `state_of` tells.
    #[must_use]
    pub fn count_hosts(assigned: &HostAssignment, state_of: impl Fn(TaskId) -> Option<TaskState>) -> Self {
        let mut counts = Self::default();
        for host in assigned.hosts() {
            let states = host.tasks.iter().filter_map(|task| state_of(*task));
            let state = HostState::from_task_counts(&TaskCounts::count_states(states));
            *counts.0.entry(state).or_default() += 1;
        }
        counts
    }

    /// Returns the number of hosts in a state.
    #[must_use]
    pub fn get(&self, state: HostState) -> usize {
        self.0.get(&state).copied().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::coordination::views::task_state::TaskPhase;

    #[test]
    fn the_state_of_a_host_follows_from_its_tasks() {
        let state = |states: &[TaskState]| {
            HostState::from_task_counts(&TaskCounts::count_states(states.iter().copied()))
        };
        let phase = TaskState::Phase;
        assert_eq!(state(&[phase(TaskPhase::Connected), phase(TaskPhase::Disconnected)]), HostState::Healthy);
        assert_eq!(state(&[phase(TaskPhase::Connected), phase(TaskPhase::Failed)]), HostState::Degraded);
        assert_eq!(state(&[phase(TaskPhase::Suspect), phase(TaskPhase::Missing)]), HostState::Down);
        assert_eq!(state(&[phase(TaskPhase::Failed), TaskState::Excluded]), HostState::Down);
        assert_eq!(state(&[TaskState::Excluded, TaskState::Excluded]), HostState::Excluded);
        assert_eq!(state(&[TaskState::Excluded, phase(TaskPhase::Connected)]), HostState::Healthy);
    }
}
