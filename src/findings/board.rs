//! What is found now, and what was found before.

use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{Detector, Evidence, Found, Severity};
use crate::coordination::{JobId, JobName, JobObservation, RunNumber, TaskId, Timestamp};

/// What is not found any more stays open for so long, so that what flickers is one finding.
const LINGERS: Duration = Duration::from_secs(10);
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
    /// What it is, in a sentence.
    pub summary: String,
    /// Since when it has been so.
    pub since: Timestamp,
    /// When it was found.
    pub opened_at: Timestamp,
    /// When it was found no more.
    pub closed_at: Option<Timestamp>,
    /// The tasks that it is about: 16 at most.
    pub tasks: Vec<TaskId>,
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
struct Open {
    finding: Finding,
    seen_last: Timestamp,
}

#[derive(Debug, Default)]
struct OfJob {
    open: BTreeMap<&'static str, Open>,
    /// The latest first.
    closed: VecDeque<Finding>,
}

/// The findings of every job.
#[derive(Debug, Default)]
pub struct Board {
    jobs: Mutex<BTreeMap<JobId, OfJob>>,
    looked_at: AtomicU64,
}

impl Board {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<JobId, OfJob>> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets jobs that are there no more.
    pub fn keep(&self, there: impl Fn(JobId) -> bool) {
        self.lock().retain(|job, _| there(*job));
    }

    /// Takes in what was found in a job; returns what has changed.
    pub fn look(&self, seen: &JobObservation, found: Vec<(&'static Detector, Found)>) -> Vec<Transition> {
        let now = seen.seen_at;
        let mut jobs = self.lock();
        let of_job = jobs.entry(seen.job).or_default();
        let mut changed = Vec::new();
        for (detector, found) in found {
            let fresh = finding(seen, detector, found);
            match of_job.open.get_mut(detector.id) {
                Some(open) => {
                    let finding =
                        Finding { opened_at: open.finding.opened_at, run: open.finding.run, ..fresh };
                    // A detector that cannot tell since when says now; what was said first is nearer to the truth.
                    let since = open.finding.since.min(finding.since);
                    *open = Open { finding: Finding { since, ..finding }, seen_last: now };
                }
                None => {
                    changed.push(Transition::Opened(fresh.clone()));
                    of_job.open.insert(detector.id, Open { finding: fresh, seen_last: now });
                }
            }
        }
        let gone: Vec<&'static str> = of_job
            .open
            .iter()
            .filter(|(_, open)| now.since(open.seen_last) >= LINGERS)
            .map(|(id, _)| *id)
            .collect();
        for id in gone {
            let Some(Open { mut finding, seen_last }) = of_job.open.remove(id) else { continue };
            finding.closed_at = Some(seen_last);
            of_job.closed.push_front(finding.clone());
            of_job.closed.truncate(CLOSED_KEPT);
            changed.push(Transition::Closed(finding));
        }
        changed
    }

    /// Every job has been looked at.
    pub fn looked(&self, now: Timestamp) {
        self.looked_at.store(now.0, Ordering::Relaxed);
    }

    /// When every job was last looked at.
    #[must_use]
    pub fn looked_at(&self) -> Timestamp {
        Timestamp(self.looked_at.load(Ordering::Relaxed))
    }

    /// Whether a finding is open.
    #[must_use]
    pub fn is_open(&self, job: JobId, id: &str) -> bool {
        self.lock().get(&job).is_some_and(|of_job| of_job.open.contains_key(id))
    }

    /// The open findings of a job, what matters most first, and the closed ones, the latest first.
    #[must_use]
    pub fn of(&self, job: JobId) -> (Vec<Finding>, Vec<Finding>) {
        let jobs = self.lock();
        let Some(of_job) = jobs.get(&job) else { return (Vec::new(), Vec::new()) };
        let mut open: Vec<Finding> = of_job.open.values().map(|open| open.finding.clone()).collect();
        open.sort_by_key(|finding| (std::cmp::Reverse(finding.severity), finding.since));
        (open, of_job.closed.iter().cloned().collect())
    }
}

fn finding(seen: &JobObservation, detector: &Detector, found: Found) -> Finding {
    let host = |id: &TaskId| Some(seen.task(*id)?.peer?.ip());
    let mut hosts: Vec<IpAddr> = found.tasks.iter().filter_map(host).collect();
    hosts.sort_unstable();
    hosts.dedup();
    Finding {
        id: detector.id.into(),
        job: seen.name.clone(),
        run: seen.run,
        title: detector.title.into(),
        severity: detector.severity,
        summary: found.summary,
        since: found.since,
        opened_at: seen.seen_at,
        closed_at: None,
        tasks: found.tasks,
        hosts,
        evidence: found.evidence,
        means: detector.means.into(),
        advice: detector.advice.into(),
    }
}
