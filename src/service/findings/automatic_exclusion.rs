//! Decides whether a finding leads to an automatic exclusion. The setting `auto-exclude` of a job names the detectors
//! whose findings may exclude a task.
//!
//! This module asks for the exclusion of one task, for a limited time, because a wrong detection must not cost more
//! than the fault itself. It asks only if the job's exclusions in force, with this one, are at most a quarter of the
//! number of its tasks. If many tasks are in trouble, the tasks are not the cause. `service::AuditedOperations`
//! performs the exclusion. Begin at `automatic_exclusion_for_finding`.

use std::time::Duration;

use super::finding_store::Finding;
use crate::coordination::{AutoExcludeRule, JobId, JobName, TaskId};
use crate::engine::Engine;

/// An exclusion that a rule of a job asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AutomaticExclusion {
    /// The job.
    pub job: JobId,
    /// Its name.
    pub name: JobName,
    /// The rule that asks.
    pub rule: AutoExcludeRule,
    /// The task to exclude.
    pub task: TaskId,
    /// The duration of the exclusion.
    pub expires_in: Duration,
    /// The reason: the summary of the finding.
    pub reason: String,
}

/// The inverse of the largest share of a job's tasks that may be excluded, including all exclusions in force.
/// If more tasks are in trouble, the tasks are not the cause.
const MAX_SHARE: usize = 4;

/// Returns the exclusion that a newly opened finding asks for. It excludes one task at a time, because that
/// may help the others.
pub(super) fn automatic_exclusion_for_finding(
    engine: &Engine,
    job: JobId,
    finding: &Finding,
) -> Option<AutomaticExclusion> {
    if !finding.may_exclude {
        return None;
    }
    let rule = AutoExcludeRule::ALL.into_iter().find(|rule| rule.name() == finding.id.as_ref())?;
    engine.read(|core, _| {
        let job_seen = core.job(job)?;
        let settings = job_seen.settings();
        if !settings.auto_exclude.contains(&rule) {
            return None;
        }
        let out = job_seen.exclusions_in_force_count();
        if (out + 1) * MAX_SHARE > settings.tasks as usize {
            tracing::warn!(
                job = %finding.job,
                rule = rule.name(),
                excluded = out,
                "a rule excludes nobody: it would be more than a quarter of the tasks"
            );
            return None;
        }
        let task = *finding.tasks.first()?;
        let (name, expires_in) = (finding.job.clone(), settings.auto_exclude_for);
        Some(AutomaticExclusion { job, name, rule, task, expires_in, reason: finding.summary.clone() })
    })
}
