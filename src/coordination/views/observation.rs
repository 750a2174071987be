//! The measurements of one job for metrics and detectors. To compute them, this module visits each task and each
//! waiting call.
//!
//! The other views serve people. Begin at [`JobObservation`].

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use super::barrier::LIVE_SET_REQUEST;
use super::host_assignment::{HostAssignment, HostOrTask};
use super::hosts::HostCounts;
use super::task_state::{TaskCounts, TaskPhase, TaskState};
use crate::coordination::barrier_record::{BarrierKind, BarrierRecord};
use crate::coordination::barrier_table::{BarrierInstance, BarrierKey};
use crate::coordination::coordinator::Coordinator;
use crate::coordination::event::RunOutcome;
use crate::coordination::exclusion::ExclusionTable;
use crate::coordination::failure_detection::is_unreachable_host;
use crate::coordination::fatal_gpu_error::FatalGpuError;
use crate::coordination::heartbeat_stats::GapHistogram;
use crate::coordination::ids::{HostId, JobId, JobName, RunNumber, TaskId, Timestamp};
use crate::coordination::job::Job;
use crate::coordination::live_set_request::LiveSetRequest;
use crate::coordination::request_reply::TaskSet;
use crate::coordination::run::Run;
use crate::coordination::run_state::RunState;
use crate::coordination::settings::JobBounds;
use crate::coordination::straggler_stats::StragglerView;
use crate::coordination::task::Task;
use crate::coordination::waiters::WaitTarget;

/// The greatest number of missing members listed for one barrier.
const MISSING_LISTED: usize = 64;
/// The greatest number of ended runs listed.
const RUNS_LISTED: usize = 16;

/// The observed state of one task.
#[derive(Debug, Clone, PartialEq)]
pub struct TaskObservation {
    /// Its number.
    pub task: TaskId,
    /// The phase of the task.
    pub standing: TaskPhase,
    /// Whether an exclusion keeps it out.
    pub excluded: bool,
    /// The time since which it is in that phase.
    pub since: Timestamp,
    /// The address from which its present or last incarnation registered.
    pub peer: Option<SocketAddr>,
    /// Its last heartbeat.
    pub last_heartbeat: Option<Timestamp>,
    /// Whether it waits at a client's barrier or for a live set.
    pub is_waiting: bool,
    /// The times at which its remembered earlier incarnations in this run registered, the latest first.
    pub past_registrations: Vec<Timestamp>,
    /// Whether earlier incarnations may be forgotten.
    pub may_have_more_incarnations: bool,
    /// Whether the incarnation before the present one ended because nothing came from its host.
    pub was_unreachable: bool,
    /// The time at which the present incarnation registered.
    pub registered_at: Timestamp,
    /// The usual interval of its heartbeats, in microseconds; 0 if it is not known yet.
    pub interval_us: u64,
    /// The longest recent gap between them, in microseconds.
    pub longest_gap_us: u64,
    /// Its statistics at barriers.
    pub straggling: Option<StragglerView>,
}

impl TaskObservation {
    /// Returns its state for people.
    #[must_use]
    pub fn state(&self) -> TaskState {
        TaskState::from_phase(self.standing, self.excluded)
    }
}

/// A barrier or a live-set request in progress.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BarrierObservation {
    /// Its id.
    pub id: Arc<str>,
    /// The counter of the instance.
    pub counter: i64,
    /// The kind of the barrier.
    pub kind: BarrierKind,
    /// The time of the first arrival.
    pub since: Timestamp,
    /// The time of the latest arrival.
    pub last_arrival: Timestamp,
    /// The time at which it times out.
    pub deadline: Timestamp,
    /// The number of members.
    pub members: usize,
    /// The number of members that have arrived.
    pub arrived: usize,
    /// The number of members that it waits for.
    pub missing: usize,
    /// The first 64 members that it waits for.
    pub missing_tasks: Vec<TaskId>,
}

/// The number of waiting calls, by what they wait for.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct WaitingCallCounts {
    /// At barriers.
    pub barrier: usize,
    /// For an error.
    pub poll: usize,
    /// For a key.
    pub key: usize,
    /// For a live set.
    pub live_set: usize,
    /// For a change of state.
    pub watch: usize,
}

/// A bound and its usage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BoundUsage {
    /// Its name, as in the settings.
    pub name: &'static str,
    /// The greatest value that it allows.
    pub limit: usize,
    /// The present usage; `None` for a bound on a single value, such as the length of a key.
    pub used: Option<usize>,
    /// Whether the table behind it is normally full: new entries evict old ones.
    pub is_rolling: bool,
}

/// The summary of an ended run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PastRunObservation {
    /// Its number.
    pub number: RunNumber,
    /// Its outcome.
    pub outcome: RunOutcome,
    /// The time at which its registration opened.
    pub opened_at: Timestamp,
    /// The time at which it ended.
    pub ended_at: Timestamp,
    /// The task that caused its first error, if one is known.
    pub first_cause_task: Option<TaskId>,
    /// The host of this task in that run, if it is known.
    pub first_cause_host: Option<HostId>,
}

/// The observed state of a job and its present run.
#[derive(Debug, Clone, PartialEq)]
pub struct JobObservation {
    /// The job's number.
    pub job: JobId,
    /// Its name.
    pub name: JobName,
    /// The time of the observation.
    pub seen_at: Timestamp,
    /// The silence after which a task has failed.
    pub heartbeat_timeout: Duration,
    /// The present run.
    pub run: RunNumber,
    /// The state of the run.
    pub state: RunState,
    /// The time at which its registration opened.
    pub opened_at: Timestamp,
    /// The time at which every task had registered.
    pub started_at: Option<Timestamp>,
    /// The time at which it ended.
    pub ended_at: Option<Timestamp>,
    /// The number of connected tasks.
    pub live: usize,
    /// The time at which the preemption notice was written.
    pub noticed_at: Option<Timestamp>,
    /// The number of tasks in each state.
    pub counts: TaskCounts,
    /// Every task, by number.
    pub tasks: Vec<TaskObservation>,
    /// The hosts, and the host of each task.
    pub hosts: HostAssignment,
    /// The number of hosts in each state.
    pub host_counts: HostCounts,
    /// The barriers in progress.
    pub barriers: Vec<BarrierObservation>,
    /// The latest ended barriers, the newest last.
    pub recent: Vec<BarrierRecord>,
    /// The number of waiting calls.
    pub waiting: WaitingCallCounts,
    /// The gaps between heartbeats, of all tasks in this run.
    pub gaps: GapHistogram,
    /// The size of the store, in bytes.
    pub store_bytes: usize,
    /// The number of keys.
    pub keys: usize,
    /// Every bound with its usage.
    pub bounds: Vec<BoundUsage>,
    /// The GPU that is lost to its process, if one has told so in this run.
    pub fatal_gpu_error: Option<FatalGpuError>,
    /// The number of exclusions in force.
    pub exclusions: usize,
    /// Ended runs, newest first.
    pub past_runs: Vec<PastRunObservation>,
}

impl JobObservation {
    /// Returns a task of the job.
    #[must_use]
    pub fn task(&self, task: TaskId) -> Option<&TaskObservation> {
        self.tasks.get(usize::try_from(task.0).ok()?)
    }

    /// Describes tasks for people: hosts all of whose tasks are among them, then the first few other tasks with their
    /// addresses, and the rest of `all` as a number.
    #[must_use]
    pub fn describe_tasks(&self, tasks: &[TaskId], all: usize) -> String {
        const SHOWN: usize = 8;
        let describe = |group: &HostOrTask<'_>| match group {
            HostOrTask::Host(host) => host.describe_all_tasks(),
            HostOrTask::Task(id) => match self.task(*id).and_then(|task| task.peer) {
                Some(peer) => format!("task {id} at {peer}"),
                None => format!("task {id}"),
            },
        };
        let groups = self.hosts.group_by_host(tasks);
        let shown = &groups[..groups.len().min(SHOWN)];
        let mut text: Vec<String> = shown.iter().map(describe).collect();
        let named = shown.iter().map(HostOrTask::task_count).sum();
        if all > named {
            text.push(format!("and {} more ({all} in all)", all - named));
        }
        text.join(", ")
    }
}

impl Coordinator {
    /// Returns the observation of a job. It visits each of its tasks and waiting calls.
    #[must_use]
    pub fn observe_job(&self, job: JobId, now: Timestamp) -> Option<JobObservation> {
        self.job_state(job).map(|found| found.observe(job, now))
    }
}

impl Job {
    fn observe(&self, job: JobId, now: Timestamp) -> JobObservation {
        let run = &self.run;
        let mut gaps = GapHistogram::default();
        for task in run.tasks.iter() {
            gaps.add_gaps_of(&task.heartbeat_stats);
        }
        let past = self.past.iter().take(RUNS_LISTED).map(|past| PastRunObservation {
            number: past.summary.number,
            outcome: past.summary.outcome,
            opened_at: past.summary.opened_at,
            ended_at: past.summary.ended_at,
            first_cause_task: past.summary.first_cause.as_ref().and_then(|cause| cause.task),
            first_cause_host: self.first_cause_host(past),
        });
        let mut tasks = run.observe_tasks(self.settings.bounds.incarnations_kept);
        if self.exclusions.len() > 0 {
            for task in &mut tasks {
                task.excluded = self.exclusion_covering(task.task).is_some();
            }
        }
        let hosts = self.assign_hosts();
        let state_of = |task: TaskId| Some(tasks.get(usize::try_from(task.0).ok()?)?.state());
        let host_counts = HostCounts::count_hosts(&hosts, state_of);
        JobObservation {
            job,
            name: self.name.clone(),
            seen_at: now,
            heartbeat_timeout: self.settings.heartbeat_timeout,
            run: run.number,
            state: run.state(),
            opened_at: run.opened_at,
            started_at: run.started_at,
            ended_at: run.ended.map(|(_, at)| at),
            live: run.connected_tasks,
            noticed_at: run.noticed_at,
            counts: TaskCounts::count_states(tasks.iter().map(TaskObservation::state)),
            tasks,
            hosts,
            host_counts,
            barriers: run.observe_barriers(),
            recent: run.recent.iter().cloned().collect(),
            waiting: run.count_waiting_calls(),
            gaps,
            store_bytes: run.store.total_bytes(),
            keys: run.store.len(),
            bounds: run.observe_bounds(&self.settings.bounds, self.past_runs().count(), &self.exclusions),
            fatal_gpu_error: run.fatal_gpu_error(),
            exclusions: self.exclusions.len(),
            past_runs: past.collect(),
        }
    }
}

impl Run {
    fn fatal_gpu_error(&self) -> Option<FatalGpuError> {
        FatalGpuError::keys().find_map(|key| {
            let entry = self.store.get(key)?;
            FatalGpuError::parse(&entry.value, entry.by, entry.at)
        })
    }

    /// Returns the observations of all tasks, of each of which `incarnations_kept` earlier incarnations are remembered.
    fn observe_tasks(&self, incarnations_kept: usize) -> Vec<TaskObservation> {
        let asking: BTreeSet<TaskId> =
            self.live_set_requests.values().flat_map(|question| question.callers.keys().copied()).collect();
        let observe = |(id, task): (TaskId, &Task)| {
            let (interval_us, longest_gap_us) = task.heartbeat_stats.usual_and_longest_gap_us();
            TaskObservation {
                task: id,
                standing: self.task_phase(id, task),
                excluded: false,
                since: task.suspicion.as_ref().map_or(task.since, |suspicion| suspicion.since),
                peer: task.peer,
                last_heartbeat: task.last_heartbeat,
                is_waiting: self.barrier_wait_count(id) > 0 || asking.contains(&id),
                past_registrations: task.past_incarnations.iter().map(|life| life.registered_at).collect(),
                may_have_more_incarnations: task.past_incarnations.len() >= incarnations_kept,
                was_unreachable: task
                    .past_incarnations
                    .front()
                    .is_some_and(|life| is_unreachable_host(&life.ended)),
                registered_at: task.registered_at,
                interval_us,
                longest_gap_us,
                straggling: task.straggling.view(),
            }
        };
        self.task_ids().zip(self.tasks.iter()).map(observe).collect()
    }

    fn observe_barriers(&self) -> Vec<BarrierObservation> {
        let observe = |(key, instance): (&BarrierKey, &BarrierInstance)| BarrierObservation {
            id: key.barrier_id_for_clients(self.incarnation),
            counter: instance.counter,
            kind: key.kind(),
            since: instance.began,
            last_arrival: instance.arrivals().map(|(_, a)| a.at).max().unwrap_or(instance.began),
            deadline: instance.deadline,
            members: instance.members.len(),
            arrived: instance.arrived_count(),
            missing: instance.missing_count(),
            missing_tasks: instance.missing_tasks().take(MISSING_LISTED).collect(),
        };
        let ask = |(set, question): (&TaskSet, &LiveSetRequest)| {
            let missing = self.live_members_that_have_not_called(set, question);
            BarrierObservation {
                id: LIVE_SET_REQUEST.into(),
                counter: 0,
                kind: BarrierKind::LiveSet,
                since: question.since,
                last_arrival: question.last.1,
                deadline: Timestamp(u64::MAX),
                // Members that are not live do not count.
                members: question.callers.len() + missing.len(),
                arrived: question.callers.len(),
                missing: missing.len(),
                missing_tasks: missing.into_iter().take(MISSING_LISTED).collect(),
            }
        };
        self.barriers.in_progress().map(observe).chain(self.live_set_requests.iter().map(ask)).collect()
    }

    fn count_waiting_calls(&self) -> WaitingCallCounts {
        let mut waiting = WaitingCallCounts::default();
        for (_, place) in self.waiters.iter() {
            *match place {
                WaitTarget::Barrier(..) => &mut waiting.barrier,
                WaitTarget::Poll(_) => &mut waiting.poll,
                WaitTarget::Key(..) => &mut waiting.key,
                WaitTarget::LiveSet(..) => &mut waiting.live_set,
                WaitTarget::Watch => &mut waiting.watch,
            } += 1;
        }
        waiting
    }

    fn observe_bounds(&self, bounds: &JobBounds, runs: usize, excluded: &ExclusionTable) -> Vec<BoundUsage> {
        let exchanged =
            self.exchanged.values().flatten().map(|device| device.len() + size_of::<bytes::Bytes>());
        let fills = |name, limit, used| BoundUsage { name, limit, used: Some(used), is_rolling: false };
        let rolls = |name, limit, used| BoundUsage { name, limit, used: Some(used), is_rolling: true };
        let each = |name, limit| BoundUsage { name, limit, used: None, is_rolling: false };
        // Destructured, so that the compiler reports a bound that is added and missing here.
        let &JobBounds {
            key_bytes,
            value_bytes,
            store_bytes,
            keys,
            waiters,
            waited_key_bytes,
            barrier_id_bytes,
            barriers_in_progress,
            barrier_members_in_progress,
            exchanged_device_bytes,
            barrier_memory_bytes,
            barriers_recent,
            live_sets_in_progress,
            runs_kept,
            incarnations_kept,
            error_message_bytes,
            exclusions,
            exclusions_kept,
        } = bounds;
        vec![
            each("key-bytes", key_bytes),
            each("value-bytes", value_bytes),
            fills("store-bytes", store_bytes, self.store.total_bytes()),
            fills("keys", keys, self.store.len()),
            fills("waiters", waiters, self.waiters.len()),
            fills("waited-key-bytes", waited_key_bytes, self.store.waited_key_bytes()),
            each("barrier-id-bytes", barrier_id_bytes),
            fills("barriers-in-progress", barriers_in_progress, self.barriers.in_progress_count()),
            fills(
                "barrier-members-in-progress",
                barrier_members_in_progress.max(self.tasks.len()),
                self.barriers.member_count_in_progress(),
            ),
            fills("exchanged-device-bytes", exchanged_device_bytes, exchanged.sum()),
            rolls("barrier-memory-bytes", barrier_memory_bytes, self.barriers.retained_result_bytes()),
            rolls("barriers-recent", barriers_recent, self.recent.len()),
            fills("live-sets-in-progress", live_sets_in_progress, self.live_set_requests.len()),
            rolls("runs-kept", runs_kept, runs),
            each("incarnations-kept", incarnations_kept),
            each("error-message-bytes", error_message_bytes),
            fills("exclusions", exclusions, excluded.len()),
            rolls("exclusions-kept", exclusions_kept, excluded.ended().count()),
        ]
    }
}
