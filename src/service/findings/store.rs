//! Holds open and closed findings and turns flicker into one finding.
//!
//! Begin at `FindingStore::update`.

use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{Detection, Detector, Evidence, Severity};
use crate::coordination::{JobId, JobName, JobObservation, RunNumber, TaskId, Timestamp};

/// What is not found any more stays open for so long, so that what flickers is one finding.
const CLOSE_AFTER: Duration = Duration::from_secs(10);
/// How many closed findings are kept of one job.
const CLOSED_KEPT: usize = 64;

/// A finding.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Finding {
    /// Which detector says so.
    #[schema(value_type = String)]
    pub id: Arc<str>,
    /// The job that it is about.
    pub job: JobName,
    /// The run of the job in which it was opened.
    pub run: RunNumber,
    /// Its name for people.
    pub title: String,
    /// How much it matters.
    pub severity: Severity,
    /// What it is, in a sentence that names the first of the tasks.
    pub summary: String,
    /// The same without the tasks.
    #[serde(default)]
    pub summary_without_tasks: String,
    /// Since when it has been so.
    pub since: Timestamp,
    /// When it was found.
    pub opened_at: Timestamp,
    /// When it was found no more.
    pub closed_at: Option<Timestamp>,
    /// The tasks that it is about: the first 16 of them.
    pub tasks: Vec<TaskId>,
    /// How many tasks it is about.
    #[serde(default)]
    pub task_count: usize,
    /// The barrier that it is about, if it is about one.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    pub barrier: Option<Arc<str>>,
    /// Which use of that barrier.
    #[serde(default)]
    pub counter: Option<i64>,
    /// Where they are.
    #[schema(value_type = Vec<String>)]
    pub hosts: Vec<IpAddr>,
    /// The numbers that it rests on.
    pub evidence: Vec<Evidence>,
    /// What it means.
    pub means: String,
    /// What to do.
    pub advice: String,
}

/// A finding has come or gone.
#[derive(Debug, Clone, PartialEq)]
pub enum Transition {
    /// It is found.
    Opened(Finding),
    /// It is found no more.
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
    /// The latest first.
    closed: VecDeque<Finding>,
}

/// The findings of every job.
#[derive(Debug, Default)]
pub struct FindingStore {
    jobs: Mutex<BTreeMap<JobId, JobFindingState>>,
    checked_at: AtomicU64,
}

impl FindingStore {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<JobId, JobFindingState>> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets jobs that are there no more.
    pub fn retain_jobs(&self, there: impl Fn(JobId) -> bool) {
        self.lock().retain(|job, _| there(*job));
    }

    /// Takes in what was found in a job; returns what has changed.
    pub fn update(
        &self,
        seen: &JobObservation,
        found: Vec<(&'static Detector, Detection)>,
    ) -> Vec<Transition> {
        let now = seen.seen_at;
        let mut jobs = self.lock();
        let of_job = jobs.entry(seen.job).or_default();
        let mut changed = Vec::new();
        for (detector, found) in found {
            let fresh = finding(seen, detector, found);
            match of_job.open.get_mut(detector.id) {
                Some(open) => {
                    *open = OpenFinding { finding: open.finding.refreshed_from(fresh), seen_last: now }
                }
                None => {
                    changed.push(Transition::Opened(fresh.clone()));
                    of_job.open.insert(detector.id, OpenFinding { finding: fresh, seen_last: now });
                }
            }
        }
        let gone: Vec<&'static str> = of_job
            .open
            .iter()
            .filter(|(_, open)| now.since(open.seen_last) >= CLOSE_AFTER)
            .map(|(id, _)| *id)
            .collect();
        for id in gone {
            let Some(OpenFinding { mut finding, seen_last }) = of_job.open.remove(id) else { continue };
            finding.closed_at = Some(seen_last);
            of_job.closed.push_front(finding.clone());
            of_job.closed.truncate(CLOSED_KEPT);
            changed.push(Transition::Closed(finding));
        }
        changed
    }

    /// Every job has been looked at.
    pub fn last_checked(&self, now: Timestamp) {
        self.checked_at.store(now.0, Ordering::Relaxed);
    }

    /// When every job was last looked at.
    #[must_use]
    pub fn looked_at(&self) -> Timestamp {
        Timestamp(self.checked_at.load(Ordering::Relaxed))
    }

    /// Whether a finding is open.
    #[must_use]
    pub fn is_open(&self, job: JobId, id: &str) -> bool {
        self.lock().get(&job).is_some_and(|of_job| of_job.open.contains_key(id))
    }

    /// Whether a job has open findings.
    #[must_use]
    pub fn has_open(&self, job: JobId) -> bool {
        self.lock().get(&job).is_some_and(|of_job| !of_job.open.is_empty())
    }

    /// The closed findings of a job, the latest first.
    #[must_use]
    pub fn closed(&self, job: JobId) -> Vec<Finding> {
        self.lock().get(&job).map_or_else(Vec::new, |of_job| of_job.closed.iter().cloned().collect())
    }

    /// Those of a job's open findings that are among `found`, as they are found now: what matters most first.
    #[must_use]
    pub fn hold(&self, seen: &JobObservation, found: Vec<(&'static Detector, Detection)>) -> Vec<Finding> {
        let jobs = self.lock();
        let Some(of_job) = jobs.get(&seen.job) else { return Vec::new() };
        let held = found.into_iter().filter_map(|(detector, found)| {
            let open = of_job.open.get(detector.id)?;
            Some(open.finding.refreshed_from(finding(seen, detector, found)))
        });
        let mut held: Vec<Finding> = held.collect();
        held.sort_by_key(|finding| (std::cmp::Reverse(finding.severity), finding.since));
        held
    }
}

impl Finding {
    /// The same finding as it is found now.
    fn refreshed_from(&self, fresh: Self) -> Self {
        // A detector that cannot tell since when says now; what was said first is nearer to the truth. Another use of a
        // barrier is another wait.
        let same = (&self.barrier, self.counter) == (&fresh.barrier, fresh.counter);
        let since = if same { self.since.min(fresh.since) } else { fresh.since };
        Self { opened_at: self.opened_at, run: self.run, since, ..fresh }
    }
}

fn finding(seen: &JobObservation, detector: &Detector, found: Detection) -> Finding {
    let host = |id: &TaskId| Some(seen.task(*id)?.peer?.ip());
    let mut hosts: Vec<IpAddr> = found.tasks.iter().filter_map(host).collect();
    hosts.sort_unstable();
    hosts.dedup();
    let named = seen.describe(&found.tasks, found.task_count);
    let summary = if named.is_empty() {
        found.summary_without_tasks.clone()
    } else {
        format!("{}: {named}", found.summary_without_tasks)
    };
    let (barrier, counter) = found.barrier.unzip();
    Finding {
        id: detector.id.into(),
        job: seen.name.clone(),
        run: seen.run,
        title: found.title.unwrap_or_else(|| detector.title.into()),
        severity: detector.severity,
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
        evidence: found.evidence,
        means: detector.means.into(),
        advice: detector.advice.into(),
    }
}
