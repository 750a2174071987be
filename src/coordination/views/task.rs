//! The view of a task: its phase, its incarnations, its heartbeats, and the calls of the task that wait.
//!
//! Begin at [`TaskView`], then `Job::task_views`.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::barrier::LIVE_SET_REQUEST;
use super::host_assignment::HostAssignment;
use super::task_state::{TaskCounts, TaskPhase, TaskState};
use crate::coordination::actor::CommandReason;
use crate::coordination::barrier_table::{BarrierInstance, BarrierKey, MemberState};
use crate::coordination::exclusion::Exclusion;
use crate::coordination::heartbeat_history::HeartbeatGap;
use crate::coordination::heartbeat_stats::HeartbeatStatsView;
use crate::coordination::ids::{ConnectionId, ExclusionId, HostId, TaskId, Timestamp};
use crate::coordination::job::Job;
use crate::coordination::key_value_store::display_key;
use crate::coordination::run::Run;
use crate::coordination::store_calls::PREEMPTION_NOTICE;
use crate::coordination::straggler_stats::StragglerView;
use crate::coordination::task::{ProtocolState, Task};

/// The greatest number of waited keys shown for a task.
const KEY_WAITS_SHOWN: usize = 4;

/// One task.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct TaskView {
    /// Its number.
    pub task: TaskId,
    /// The host on which it is, if one is known.
    #[serde(default)]
    pub host: Option<HostId>,
    /// The phase of the task.
    pub standing: TaskPhase,
    /// The time since which it is in that phase.
    pub since: Timestamp,
    /// Its incarnations, the present or last one first.
    pub lives: Vec<IncarnationView>,
    /// Its last heartbeat.
    pub last_heartbeat: Option<Timestamp>,
    /// The time since which it is connected, if it is; suspicion does not change it.
    #[serde(default)]
    pub live_since: Option<Timestamp>,
    /// The statistics of its heartbeats, from the second one on.
    #[serde(default)]
    pub pulse: Option<HeartbeatStatsView>,
    /// Its gaps between heartbeats over time, the oldest first: at first one for each heartbeat, later the
    /// longest gap of each step of time, which grows up to 41 s. At most 64 gaps, which cover at least the
    /// last half hour. Only in the view of a single task.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub recent_gaps: Vec<HeartbeatGap>,
    /// Its statistics at barriers, once it has arrived at one.
    #[serde(default)]
    pub straggling: Option<StragglerView>,
    /// Whether it may fail and return.
    pub recoverable: bool,
    /// Whether it returned in this run and has not completed a barrier with all members since, apart from excluded ones.
    pub unsynced: bool,
    /// The exclusion that keeps it out.
    #[serde(default)]
    pub excluded: Option<TaskExclusion>,
    /// The barriers at which it waits, by id, and the live-set request if it waits for one.
    pub waits_at: Vec<String>,
    /// The keys without a value for which it waits: 4 at most. Not the preemption notice, for which every JAX
    /// program waits.
    #[serde(default)]
    pub waits_for: Vec<KeyWait>,
    /// Its error, as clients receive it.
    pub error: Option<String>,
    /// A short form of the error.
    #[serde(default)]
    pub why: Option<String>,
}

impl TaskView {
    /// Returns its state for people.
    #[must_use]
    pub fn state(&self) -> TaskState {
        TaskState::from_phase(self.standing, self.excluded.is_some())
    }
}

/// One incarnation of a task.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = LifeView)]
pub struct IncarnationView {
    /// Its incarnation, in hexadecimal.
    pub incarnation: String,
    /// The address from which it registered.
    #[schema(value_type = Option<String>)]
    pub peer: Option<SocketAddr>,
    /// The time at which it registered.
    pub registered_at: Timestamp,
    /// The reason for its end; `None` for the present one.
    pub ended: Option<String>,
}

/// The exclusion of a task, in short.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TaskExclusion {
    /// The exclusion's number.
    pub exclusion: ExclusionId,
    /// The operator who made it, as text.
    pub by: String,
    /// The operator's reason.
    pub reason: CommandReason,
    /// The time at which it expires; `None`: when an operator lifts it.
    pub expires_at: Option<Timestamp>,
}

/// A key that a task waits for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct KeyWait {
    /// The key, as text; long keys are cut.
    pub key: String,
    /// The time since which it waits.
    pub since: Timestamp,
}

impl TaskCounts {
    /// Counts the tasks of a view.
    #[must_use]
    pub fn count_tasks(tasks: &[TaskView]) -> Self {
        Self::count_states(tasks.iter().map(TaskView::state))
    }
}

impl Job {
    /// Returns the tasks of the present run, with their hosts and exclusions.
    pub(super) fn task_views(&self) -> Vec<TaskView> {
        let mut tasks = self.run.task_views();
        self.add_hosts_and_exclusions_to_views(&mut tasks, &self.assign_hosts());
        tasks
    }

    /// Returns one task of the present run, with its gaps over time.
    pub(super) fn task_view(&self, id: TaskId) -> Option<TaskView> {
        let recent_gaps = self.run.task(id)?.heartbeat_stats.gap_history();
        let waits_for = self.run.key_waits().remove(&id).unwrap_or_default();
        let mut view =
            TaskView { recent_gaps, waits_for, ..self.run.task_view(id, self.run.barriers_waited_at(id)) };
        self.add_hosts_and_exclusions_to_views(std::slice::from_mut(&mut view), &self.assign_hosts());
        Some(view)
    }

    pub(super) fn add_hosts_and_exclusions_to_views(&self, tasks: &mut [TaskView], hosts: &HostAssignment) {
        for task in &mut *tasks {
            task.host = hosts.host_of(task.task).map(|host| host.name.clone());
        }
        if self.exclusions.len() > 0 {
            for task in tasks {
                task.excluded = self.exclusion_covering(task.task).map(|exclusion| TaskExclusion {
                    exclusion: exclusion.id,
                    by: exclusion.actor.to_string(),
                    reason: exclusion.reason.clone(),
                    expires_at: exclusion.expires_at,
                });
            }
        }
    }

    /// Returns the exclusion that keeps a task out.
    pub(super) fn exclusion_covering(&self, id: TaskId) -> Option<&Exclusion> {
        let task = self.run.task(id)?;
        let present = task.incarnation.map(|_| task.peer);
        let last = present.or_else(|| task.past_incarnations.front().map(|life| life.peer)).flatten();
        self.exclusions.find_matching(id, last.map(|peer| peer.ip()))
    }
}

impl Run {
    pub(super) fn task_views(&self) -> Vec<TaskView> {
        let mut waits: Vec<Vec<String>> = vec![Vec::new(); self.tasks.len()];
        let mut note = |task: TaskId, what: &str| {
            if let Some(list) = usize::try_from(task.0).ok().and_then(|t| waits.get_mut(t)) {
                list.push(what.to_owned());
            }
        };
        for (key, instance) in self.barriers.in_progress() {
            let id = key.barrier_id_for_clients(self.incarnation);
            for (task, _) in instance.arrivals() {
                note(task, &id);
            }
        }
        for question in self.live_set_requests.values() {
            for task in question.callers.keys() {
                note(*task, LIVE_SET_REQUEST);
            }
        }
        let mut keys = self.key_waits();
        let view = |(id, waits_at)| {
            let waits_for = keys.remove(&id).unwrap_or_default();
            TaskView { waits_for, ..self.task_view(id, waits_at) }
        };
        self.task_ids().zip(waits).map(view).collect()
    }

    /// Returns the keys that each task waits for. A read names no task, so its connection tells which task
    /// waits.
    fn key_waits(&self) -> BTreeMap<TaskId, Vec<KeyWait>> {
        let mut waits: BTreeMap<TaskId, Vec<KeyWait>> = BTreeMap::new();
        let mut wanted =
            self.waiters.key_waiters().filter(|(_, key, _)| *key != PREEMPTION_NOTICE).peekable();
        if wanted.peek().is_none() {
            return waits;
        }
        let on = self.task_ids().zip(self.tasks.iter()).filter(|(_, task)| task.is_connected());
        let on: BTreeMap<ConnectionId, TaskId> =
            on.filter_map(|(id, task)| Some((task.connection?, id))).collect();
        for (connection, key, since) in wanted {
            let Some(task) = on.get(&connection) else { continue };
            let waits = waits.entry(*task).or_default();
            if waits.len() < KEY_WAITS_SHOWN {
                waits.push(KeyWait { key: display_key(key).into_owned(), since });
            }
        }
        waits
    }

    /// Returns the barriers and requests at which one task waits, in the order of [`Run::task_views`].
    fn barriers_waited_at(&self, id: TaskId) -> Vec<String> {
        let arrived = |(_, instance): &(&BarrierKey, &BarrierInstance)| {
            matches!(instance.member_state(id), Some(MemberState::Arrived(_)))
        };
        let barriers = self.barriers.in_progress().filter(arrived);
        let asked = self.live_set_requests.values().filter(|question| question.callers.contains_key(&id));
        let names = barriers.map(|(key, _)| key.barrier_id_for_clients(self.incarnation).as_ref().to_owned());
        names.chain(asked.map(|_| LIVE_SET_REQUEST.to_owned())).collect()
    }

    fn task_view(&self, id: TaskId, waits_at: Vec<String>) -> TaskView {
        let task = self.expect_task(id);
        let present = task.incarnation.map(|incarnation| IncarnationView {
            incarnation: incarnation.to_string(),
            peer: task.peer,
            registered_at: task.registered_at,
            ended: task.failure().map(|failure| failure.summary().to_owned()),
        });
        let past = task.past_incarnations.iter().map(|life| IncarnationView {
            incarnation: life.incarnation.to_string(),
            peer: life.peer,
            registered_at: life.registered_at,
            ended: Some(life.ended.clone()),
        });
        let standing = self.task_phase(id, task);
        TaskView {
            task: id,
            host: None,
            standing,
            since: match standing {
                TaskPhase::Registering => task.registered_at,
                _ => task.suspicion.as_ref().map_or(task.since, |suspicion| suspicion.since),
            },
            lives: present.into_iter().chain(past).collect(),
            last_heartbeat: task.last_heartbeat,
            live_since: task.is_connected().then_some(task.since),
            pulse: task.heartbeat_stats.view(),
            recent_gaps: Vec::new(),
            straggling: task.straggling.view(),
            recoverable: task.recoverable,
            unsynced: task.unsynced,
            excluded: None,
            waits_at,
            waits_for: Vec::new(),
            error: task.failure().map(ToString::to_string),
            why: task.failure().map(|failure| failure.summary().to_owned()),
        }
    }

    pub(super) fn task_phase(&self, id: TaskId, task: &Task) -> TaskPhase {
        match &task.standing {
            ProtocolState::Failed(_) => TaskPhase::Failed,
            ProtocolState::Connected if task.suspicion.is_some() => TaskPhase::Suspect,
            ProtocolState::Connected => TaskPhase::Connected,
            ProtocolState::Disconnected(_) if task.was_connected => TaskPhase::Disconnected,
            ProtocolState::Disconnected(_) => {
                let registration = self.barriers.instance(&BarrierKey::Registration);
                match registration.and_then(|instance| instance.member_state(id)) {
                    Some(MemberState::Arrived(_)) => TaskPhase::Registering,
                    _ => TaskPhase::Missing,
                }
            }
        }
    }
}
