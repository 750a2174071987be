//! Holds open and closed findings. If the condition of a finding ends and soon returns, the finding stays open.
//!
//! Begin at `FindingStore::update_with_detections`.

use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::detector::{Detection, Detector, Evidence, Severity};
use crate::coordination::{HostId, HostOrTask, JobId, JobName, JobObservation, RunNumber, TaskId, Timestamp};

/// The time for which a finding stays open after its last detection, so that a flickering condition is one
/// finding.
const CLOSE_AFTER: Duration = Duration::from_secs(10);
/// The maximum number of closed findings of one job.
const CLOSED_KEPT: usize = 64;

/// The maximum number of tasks, and of hosts, that one finding names.
pub(super) const TASKS_NAMED: usize = 16;

/// A conclusion from the measurements of a job, with its evidence and advice.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Finding {
    /// The detector.
    #[schema(value_type = String)]
    pub id: Arc<str>,
    /// The job.
    pub job: JobName,
    /// The run of the job in which it was opened.
    pub run: RunNumber,
    /// The title for people.
    pub title: String,
    /// The severity.
    pub severity: Severity,
    /// The evidence suffices for an automatic exclusion.
    #[serde(skip)]
    pub may_exclude: bool,
    /// A sentence about the condition that names the first of the tasks.
    pub summary: String,
    /// The same sentence without the tasks.
    #[serde(default)]
    pub summary_without_tasks: String,
    /// The time since which the condition has held.
    pub since: Timestamp,
    /// The time at which the finding was opened.
    pub opened_at: Timestamp,
    /// The time at which the finding was closed.
    pub closed_at: Option<Timestamp>,
    /// The tasks that it concerns: the first 16 of them.
    pub tasks: Vec<TaskId>,
    /// The number of tasks that it concerns.
    #[serde(default)]
    pub task_count: usize,
    /// The barrier, if the finding concerns one.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    pub barrier: Option<Arc<str>>,
    /// The instance of that barrier.
    #[serde(default)]
    pub counter: Option<i64>,
    /// The hosts of at least two tasks whose tasks are all concerned: it is the host, and not one task.
    #[serde(default)]
    pub hosts: Vec<HostId>,
    /// The addresses of the tasks.
    #[schema(value_type = Vec<String>)]
    pub addresses: Vec<IpAddr>,
    /// The numbers on which it rests.
    pub evidence: Vec<Evidence>,
    /// The meaning.
    pub means: String,
    /// The advice.
    pub advice: String,
}

impl Finding {
    /// Returns whether it is about tasks or a barrier of a run that is over.
    pub(super) fn has_ended_with_run(&self, seen: &JobObservation) -> bool {
        let is_of_run = !self.tasks.is_empty() || self.barrier.is_some();
        is_of_run && (self.run != seen.run || seen.ended_at.is_some())
    }
}

/// A change of a finding.
#[derive(Debug, Clone, PartialEq)]
pub enum FindingTransition {
    /// The finding was opened.
    Opened(Finding),
    /// The finding was closed.
    Closed(Finding),
}

#[derive(Debug)]
struct OpenFinding {
    finding: Finding,
    seen_last: Timestamp,
}

#[derive(Debug, Default)]
struct JobFindingState {
    open: BTreeMap<&'static str, OpenFinding>,
    /// Closed findings, the latest first.
    closed: VecDeque<Finding>,
}

/// The findings of all jobs.
#[derive(Debug, Default)]
pub struct FindingStore {
    jobs: Mutex<BTreeMap<JobId, JobFindingState>>,
    checked_at: AtomicU64,
}

impl FindingStore {
    fn lock_findings(&self) -> MutexGuard<'_, BTreeMap<JobId, JobFindingState>> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Removes the findings of deleted jobs.
    pub fn retain_jobs(&self, there: impl Fn(JobId) -> bool) {
        self.lock_findings().retain(|job, _| there(*job));
    }

    /// Updates the findings of a job with new detections. Returns the changes.
    pub fn update_with_detections(
        &self,
        seen: &JobObservation,
        found: Vec<(&'static Detector, Detection)>,
    ) -> Vec<FindingTransition> {
        let now = seen.seen_at;
        let mut jobs = self.lock_findings();
        let of_job = jobs.entry(seen.job).or_default();
        let mut changed = Vec::new();
        for (detector, found) in found {
            let fresh = finding_from_detection(seen, detector, found);
            match of_job.open.get_mut(detector.id) {
                Some(open) => {
                    *open =
                        OpenFinding { finding: open.finding.with_values_of_detection(fresh), seen_last: now }
                }
                None => {
                    changed.push(FindingTransition::Opened(fresh.clone()));
                    of_job.open.insert(detector.id, OpenFinding { finding: fresh, seen_last: now });
                }
            }
        }
        // With the run, its findings end at once, so that their ends are among the events of the run.
        let is_over = |open: &OpenFinding| {
            let has_ended = open.finding.has_ended_with_run(seen) && open.seen_last < now;
            has_ended || now.since(open.seen_last) >= CLOSE_AFTER
        };
        let gone: Vec<&'static str> =
            of_job.open.iter().filter(|(_, open)| is_over(open)).map(|(id, _)| *id).collect();
        for id in gone {
            let Some(OpenFinding { mut finding, seen_last }) = of_job.open.remove(id) else { continue };
            finding.closed_at = Some(seen_last);
            of_job.closed.push_front(finding.clone());
            of_job.closed.truncate(CLOSED_KEPT);
            changed.push(FindingTransition::Closed(finding));
        }
        changed
    }

    /// Records that every job was checked at `now`.
    pub fn record_check_time(&self, now: Timestamp) {
        self.checked_at.store(now.0, Ordering::Relaxed);
    }

    /// Returns the time of the last check.
    #[must_use]
    pub fn last_checked_at(&self) -> Timestamp {
        Timestamp(self.checked_at.load(Ordering::Relaxed))
    }

    /// Returns whether a finding is open.
    #[must_use]
    pub fn is_finding_open(&self, job: JobId, id: &str) -> bool {
        self.lock_findings().get(&job).is_some_and(|of_job| of_job.open.contains_key(id))
    }

    /// Returns whether a job has open findings.
    #[must_use]
    pub fn has_open_findings(&self, job: JobId) -> bool {
        self.lock_findings().get(&job).is_some_and(|of_job| !of_job.open.is_empty())
    }

    /// Returns the findings of a job that have ended, the latest first: those that are closed, and those that stay open for a while
    /// only because they may return. The latter are not among `held`, the findings that held at `seen_at`.
    #[must_use]
    pub fn ended_findings(&self, job: JobId, held: &[Finding], seen_at: Timestamp) -> Vec<Finding> {
        let jobs = self.lock_findings();
        let Some(of_job) = jobs.get(&job) else { return Vec::new() };
        let holds = |open: &&OpenFinding| held.iter().any(|held| held.id == open.finding.id);
        let is_older = |open: &&OpenFinding| open.finding.opened_at <= seen_at;
        let lingering = of_job.open.values().filter(|open| is_older(open) && !holds(open));
        let mut ended: Vec<Finding> = lingering
            .map(|open| Finding { closed_at: Some(open.seen_last), ..open.finding.clone() })
            .chain(of_job.closed.iter().cloned())
            .collect();
        ended.sort_by_key(|finding| std::cmp::Reverse(finding.closed_at));
        ended.truncate(CLOSED_KEPT);
        ended
    }

    /// Returns the open findings of a job that are among `found`, with present values and by severity.
    #[must_use]
    pub fn open_findings_among(
        &self,
        seen: &JobObservation,
        found: Vec<(&'static Detector, Detection)>,
    ) -> Vec<Finding> {
        let jobs = self.lock_findings();
        let Some(of_job) = jobs.get(&seen.job) else { return Vec::new() };
        let held = found.into_iter().filter_map(|(detector, found)| {
            let open = of_job.open.get(detector.id)?;
            Some(open.finding.with_values_of_detection(finding_from_detection(seen, detector, found)))
        });
        let mut held: Vec<Finding> = held.collect();
        held.sort_by_key(|finding| (std::cmp::Reverse(finding.severity), finding.since));
        held
    }
}

impl Finding {
    /// Returns this finding with the values of the new detection.
    fn with_values_of_detection(&self, fresh: Self) -> Self {
        // A detector without memory sets `since` to now, so the first value is more accurate, unless the
        // barrier instance is another one.
        let same = (&self.barrier, self.counter) == (&fresh.barrier, fresh.counter);
        let since = if same { self.since.min(fresh.since) } else { fresh.since };
        Self { opened_at: self.opened_at, run: self.run, since, ..fresh }
    }
}

fn finding_from_detection(seen: &JobObservation, detector: &Detector, mut found: Detection) -> Finding {
    let named = seen.describe_tasks(&found.tasks, found.task_count);
    let host_name = |group: HostOrTask<'_>| match group {
        HostOrTask::Host(host) => Some(host.name.clone()),
        HostOrTask::Task(_) => None,
    };
    // That all tasks of a job are on its only host says nothing of the host.
    let groups =
        if seen.hosts.hosts().len() > 1 { seen.hosts.group_by_host(&found.tasks) } else { Vec::new() };
    let hosts = groups.into_iter().filter_map(host_name).take(TASKS_NAMED).collect();
    found.tasks.truncate(TASKS_NAMED);
    let address = |id: &TaskId| Some(seen.task(*id)?.peer?.ip());
    let mut addresses: Vec<IpAddr> = found.tasks.iter().filter_map(address).collect();
    addresses.sort_unstable();
    addresses.dedup();
    let summary = if named.is_empty() {
        found.summary_without_tasks.clone()
    } else {
        format!("{}: {named}", found.summary_without_tasks)
    };
    let (barrier, counter) = found.barrier.unzip();
    let (means, advice) = found.meaning_and_advice.unwrap_or((detector.means, detector.advice));
    Finding {
        id: detector.id.into(),
        job: seen.name.clone(),
        run: seen.run,
        title: found.title.unwrap_or_else(|| detector.title.into()),
        severity: found.severity.unwrap_or(detector.severity),
        may_exclude: found.may_exclude,
        summary,
        summary_without_tasks: found.summary_without_tasks,
        since: found.since,
        opened_at: seen.seen_at,
        closed_at: None,
        tasks: found.tasks,
        task_count: found.task_count,
        barrier,
        counter,
        hosts,
        addresses,
        evidence: found.evidence,
        means: means.into(),
        advice: advice.into(),
    }
}
