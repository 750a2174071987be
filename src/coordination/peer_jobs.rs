//! The rules by which a task of one job may learn of the tasks of another job. By these rules two jobs can exchange
//! transfers, such as weights from a training job to an inference job.
//!
//! `peer_job_calls.rs` answers the calls that these rules admit. `agent/peer_jobs.rs` makes the calls, and finds the
//! transfer engines of the other job by the answers. Begin at [`peer_job_refusal`].
//!
//! - Two jobs may exchange transfers exactly while each lists the other in its setting `transfers-with`. If a job
//!   lists itself, the entry has no effect.
//! - A task of one job may read the states of the other job's tasks (numbers, incarnations, errors), and the engine
//!   record of a given incarnation. The task can read nothing else of the other job, such as other keys or barriers.
//!   It can read nothing of a job that does not list the task's own job.
//! - A call is admitted, and may wait, only while both settings are present. When a setting is withdrawn, or one of
//!   the jobs is deleted, the same input refuses every waiting call between the two jobs and names the missing
//!   setting. These calls get no later answer.
//! - A call from another job does not register a task, does not count as a heartbeat, and does not keep a run
//!   alive.
//!
//! `invariants.rs` checks the third rule after every input of a simulation.

use std::sync::Arc;

use super::failure::{Code, Failure};
use super::ids::{JobId, JobName, Timestamp};
use super::input::Effect;
use super::job::{Job, with_run};

/// Returns why tasks of job `from` may exchange no transfers with those of job `to`, if they may not.
pub(super) fn peer_job_refusal(from: &Job, to: &Job) -> Option<Failure> {
    if from.id == to.id {
        let text = format!("{} is the job of this task: name the other task without a job.", to.name);
        return Some(Failure::from_service(Code::InvalidArgument, text));
    }
    let missing = |of: &Job, other: &Job| (!of.settings.transfers_with.contains(&other.name)).then_some(());
    let lists = [missing(from, to).map(|()| (from, to)), missing(to, from).map(|()| (to, from))];
    let lacking: Vec<String> =
        lists.into_iter().flatten().map(|(of, other)| describe_missing_peer_setting(of, other)).collect();
    if lacking.is_empty() {
        return None;
    }
    let text =
        format!("Jobs {} and {} may not exchange transfers: {}", from.name, to.name, lacking.join(" "));
    Some(Failure::from_service(Code::PermissionDenied, text))
}

/// Says that the setting of one job lacks the other, and how to set it.
fn describe_missing_peer_setting(of: &Job, other: &Job) -> String {
    let listed = of.settings.transfers_with.iter().chain([&other.name]);
    let all = listed.map(JobName::as_str).collect::<Vec<_>>().join(",");
    format!(
        "the setting transfers-with of job {0} does not name {1} (`muster job set {0} --transfers-with {all} --reason TEXT`).",
        of.name, other.name
    )
}

/// Returns the failure of a question about a job that does not exist.
pub(super) fn no_such_peer_job_failure(name: &str) -> Failure {
    let shown = name.get(..name.floor_char_boundary(100)).unwrap_or_default();
    let text = format!("There is no job named {shown:?} on this server: `muster job list` shows its jobs.");
    Failure::from_service(Code::NotFound, text)
}

impl Job {
    /// Refuses every waiting call of a task of job `from`.
    pub(super) fn refuse_calls_of_peer_job(
        &mut self,
        now: Timestamp,
        effects: &mut Vec<Effect>,
        from: JobId,
        failure: &Arc<Failure>,
    ) {
        with_run!(self, now, effects, |run, _cx| run.fail_calls_of_peer_job(from, failure));
    }
}
