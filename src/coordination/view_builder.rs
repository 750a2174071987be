//! Makes the views of a run: its tasks, barriers, live-set requests and drain.
//!
//! The types are in `view.rs`. Begin at `Job::run_view`.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::barrier::{BarrierInstance, BarrierKey, MemberState};
use super::barrier_record::BarrierArrival;
use super::call::TaskSet;
use super::devices::{self, Device};
use super::event::RunOutcome;
use super::exclusion::{Exclusion, ExclusionEndRecord};
use super::ids::{ConnectionId, TaskId};
use super::job::Job;
use super::live_set::LiveSetRequest;
use super::run::{PREEMPTION_NOTICE, Run};
use super::store::display_key;
use super::task::{ProtocolState, Task};
use super::task_state::TaskPhase;
use super::task_state::{RunInterval, TaskCounts};
use super::view::{
    BarrierView, ExclusionView, IncarnationView, KeyWait, LiveSetRequestView, PreemptionView, RunListItem,
    RunState, RunSummary, RunView, TaskExclusion, TaskView,
};

/// The greatest number of arrivals shown for a barrier in progress.
const ARRIVALS_SHOWN: usize = 256;
/// The name under which a waiting live-set request is shown.
pub(super) const LIVE_SET_REQUEST: &str = "live-set question";
/// The greatest number of waited keys shown for a task.
const KEY_WAITS_SHOWN: usize = 4;
/// The directory in which each task writes its step when it learns of a preemption.
const PREEMPTION_STEPS: &[u8] = b"PREEMPTION_CURRENT_COUNTER";
/// The barrier at which the tasks wait until all have written their steps.
const PREEMPTION_BARRIER: &str = "PREEMPTION_SYNC_BARRIER";

impl Job {
    /// Returns the view of the present run, with its exclusions.
    pub(super) fn run_view(&self) -> RunView {
        let mut view = self.run.view();
        self.mark_excluded(&mut view.tasks);
        view.counts = TaskCounts::count_views(&view.tasks);
        view
    }

    /// Returns the tasks of the present run, with their exclusions.
    pub(super) fn task_views(&self) -> Vec<TaskView> {
        let mut tasks = self.run.task_views();
        self.mark_excluded(&mut tasks);
        tasks
    }

    /// Returns one task of the present run, with its gaps over time.
    pub(super) fn task_view(&self, id: TaskId) -> Option<TaskView> {
        let recent_gaps = self.run.task(id)?.heartbeat_stats.course();
        let waits_for = self.run.key_waits().remove(&id).unwrap_or_default();
        let mut view =
            TaskView { recent_gaps, waits_for, ..self.run.task_view(id, self.run.barriers_waited_at(id)) };
        self.mark_excluded(std::slice::from_mut(&mut view));
        Some(view)
    }

    fn mark_excluded(&self, tasks: &mut [TaskView]) {
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

    /// Returns the exclusions in force, and the ended ones if `with_past`.
    pub(super) fn exclusion_views(&self, with_past: bool) -> Vec<ExclusionView> {
        let view = |exclusion: &Exclusion, ended: Option<&ExclusionEndRecord>| ExclusionView {
            id: exclusion.id,
            target: exclusion.target,
            tasks: if ended.is_some() { Vec::new() } else { self.tasks_excluded_by(exclusion.target) },
            actor: exclusion.actor.clone(),
            reason: exclusion.reason.clone(),
            since: exclusion.since,
            expires_at: exclusion.expires_at,
            refused: exclusion.refused,
            last_refused_at: exclusion.last_refused_at,
            ended: ended.cloned(),
        };
        let present = self.exclusions.in_force().map(|exclusion| view(exclusion, None));
        let past = self.exclusions.over().filter(|_| with_past);
        present.chain(past.map(|(exclusion, ended)| view(exclusion, Some(ended)))).collect()
    }
}

impl Run {
    /// Returns the state of the run.
    pub(super) fn state(&self) -> RunState {
        match (self.ended, self.started_at) {
            (Some((outcome, _)), _) => RunState::ended(outcome),
            (None, Some(_)) => RunState::Running,
            (None, None) => RunState::Forming,
        }
    }

    pub(super) fn view(&self) -> RunView {
        RunView {
            number: self.number,
            incarnation: self.incarnation.to_string(),
            state: self.state(),
            opened_at: self.opened_at,
            started_at: self.started_at,
            ended_at: self.ended.map(|(_, at)| at),
            end_reason: self.ended.map(|_| self.end_reason.clone()),
            live: self.connected_tasks,
            counts: TaskCounts::default(),
            first_cause: self.first_cause.clone(),
            tasks: self.task_views(),
            barriers: self.barrier_views(),
            recent_barriers: self.recent.iter().rev().cloned().collect(),
            live_sets: self.live_set_views(),
            keys: self.store.len(),
            store_bytes: self.store.bytes(),
            preemption: self.preemption(),
            devices: self.devices(),
        }
    }

    /// Returns the list item of the run.
    pub(super) fn line(&self) -> RunListItem {
        RunListItem {
            number: self.number,
            incarnation: self.incarnation.to_string(),
            state: self.state(),
            opened_at: self.opened_at,
            started_at: self.started_at,
            ended_at: self.ended.map(|(_, at)| at),
            length_us: self.span().final_length_us(),
            first_cause: self.first_cause.clone(),
        }
    }

    /// Returns the summary of the run, without its devices.
    pub(super) fn summary(&self) -> RunSummary {
        let (outcome, ended_at) = self.ended.unwrap_or((RunOutcome::Abandoned, self.opened_at));
        let length_us = RunInterval::new(self.opened_at, self.started_at, Some(ended_at)).final_length_us();
        RunSummary {
            number: self.number,
            incarnation: self.incarnation.to_string(),
            outcome,
            opened_at: self.opened_at,
            started_at: self.started_at,
            ended_at,
            length_us: length_us.unwrap_or_default(),
            end_reason: self.end_reason.clone(),
            first_cause: self.first_cause.clone(),
            devices: Vec::new(),
        }
    }

    pub(super) fn devices(&self) -> Vec<Device> {
        devices::decode_topology(self.store.topology())
    }

    fn task_views(&self) -> Vec<TaskView> {
        let mut waits: Vec<Vec<String>> = vec![Vec::new(); self.tasks.len()];
        let mut note = |task: TaskId, what: &str| {
            if let Some(list) = usize::try_from(task.0).ok().and_then(|t| waits.get_mut(t)) {
                list.push(what.to_owned());
            }
        };
        for (key, instance) in self.barriers.in_progress() {
            let id = key.wire_id(self.incarnation);
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
        let names = barriers.map(|(key, _)| key.wire_id(self.incarnation).as_ref().to_owned());
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
        let standing = self.standing(id, task);
        TaskView {
            task: id,
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

    pub(super) fn standing(&self, id: TaskId, task: &Task) -> TaskPhase {
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

    pub(super) fn barrier_views(&self) -> Vec<BarrierView> {
        let view = |(key, instance): (&BarrierKey, &BarrierInstance)| BarrierView {
            id: key.wire_id(self.incarnation).as_ref().to_owned(),
            counter: instance.counter,
            kind: key.kind(),
            members: instance.members.len(),
            arrived: instance.arrived(),
            missing: instance.missing_tasks().collect(),
            first: instance.first,
            since: instance.began,
            deadline: instance.deadline,
            arrivals: latest_arrivals(instance),
        };
        self.barriers.in_progress().map(view).collect()
    }

    pub(super) fn live_set_views(&self) -> Vec<LiveSetRequestView> {
        let views = self.live_set_requests.iter().map(|(set, question)| {
            let missing = self.missing_live_members(set, question);
            LiveSetRequestView {
                members: question.callers.len() + missing.len(),
                arrived: question.callers.len(),
                missing,
                first: question.first,
                since: question.since,
                last: BarrierArrival { task: question.last.0, at: question.last.1 },
            }
        });
        views.collect()
    }

    /// Returns the live members of a set that have not called for it yet.
    pub(super) fn missing_live_members(&self, set: &TaskSet, question: &LiveSetRequest) -> Vec<TaskId> {
        let missing =
            |id: &TaskId| self.expect_task(*id).is_connected() && !question.callers.contains_key(id);
        set.ids().iter().copied().filter(missing).collect()
    }

    pub(super) fn preemption(&self) -> Option<PreemptionView> {
        let notice = self.store.get(PREEMPTION_NOTICE)?;
        let mut acknowledged: Vec<(TaskId, i64)> = self
            .store
            .list(PREEMPTION_STEPS)
            .iter()
            .filter_map(|(key, value)| {
                let key = std::str::from_utf8(key).ok()?;
                // `…/job:jax_worker/replica:0/task:1` up to 0.8.3, `…/1` later.
                let task = key.rsplit(['/', ':']).next()?.parse().ok()?;
                Some((TaskId(task), std::str::from_utf8(value).ok()?.parse().ok()?))
            })
            .collect();
        acknowledged.sort_unstable();
        let barrier = BarrierKey::Named(Arc::from(PREEMPTION_BARRIER));
        let ended = self.barriers.ended(&barrier).map(|ended| ended.result.is_ok());
        let (agreed, instance) = (ended == Some(true), self.barriers.instance(&barrier));
        let has_acknowledged = |id: TaskId| acknowledged.binary_search_by_key(&id, |(task, _)| *task).is_ok();
        let is_awaited = |id: &TaskId| match instance.map(|instance| instance.member_state(*id)) {
            Some(Some(MemberState::Missing)) => true,
            Some(_) => false,
            // Before the barrier begins, no task has arrived: each writes its step first and then arrives.
            None => self.expect_task(*id).is_connected(),
        };
        let unheard = |id: &TaskId| self.expect_task(*id).is_connected() && !has_acknowledged(*id);
        let over = self.ended.is_some() || (ended == Some(false) && instance.is_none());
        let failed = over && !agreed;
        let open = !agreed && !failed;
        let awaited = self.task_ids().filter(|id| open && (is_awaited(id) || unheard(id))).collect();
        let arrived = instance.map_or(0, BarrierInstance::arrived);
        let last = acknowledged.iter().map(|(_, step)| *step).max();
        Some(PreemptionView {
            notice: String::from_utf8_lossy(&notice.value).into_owned(),
            since: notice.at,
            requested: self.drain.clone(),
            awaited,
            arrived,
            failed,
            acknowledged,
            agreed_step: last.filter(|_| agreed).map(|step| step.saturating_add(1)),
        })
    }
}

/// Returns the latest arrivals at an instance, in their order.
fn latest_arrivals(instance: &BarrierInstance) -> Vec<BarrierArrival> {
    let mut arrivals: Vec<BarrierArrival> =
        instance.arrivals().map(|(task, arrival)| BarrierArrival { task, at: arrival.at }).collect();
    arrivals.sort_by_key(|arrival| (arrival.at, arrival.task));
    arrivals.split_off(arrivals.len().saturating_sub(ARRIVALS_SHOWN))
}

impl Run {
    pub(super) fn span(&self) -> RunInterval {
        RunInterval::new(self.opened_at, self.started_at, self.ended.map(|(_, at)| at))
    }
}

impl Job {
    /// Returns the exclusion that keeps a task out.
    pub(super) fn exclusion_covering(&self, id: TaskId) -> Option<&Exclusion> {
        let task = self.run.task(id)?;
        let present = task.incarnation.map(|_| task.peer);
        let last = present.or_else(|| task.past_incarnations.front().map(|life| life.peer)).flatten();
        self.exclusions.matching(id, last.map(|peer| peer.ip()))
    }
}
