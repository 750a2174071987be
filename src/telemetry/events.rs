//! One log line for every change of state; a flood of changes of one kind is gathered ([`LineLimit`]), since strangers can
//! cause them.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::broadcast::error::RecvError;
use tokio::sync::watch;
use tracing::Level;

use crate::coordination::{Change, Event, JobId, JobName, RunOutcome, Target, TaskId};
use crate::engine::{Engine, Numbered};
use crate::text::one_line;

use super::line_limit::{LineLimit, REFILL};

/// Logs every event of `engine`, from its first one on, until `stop` says so; what has happened by then is
/// still logged.
pub async fn log_events(engine: Arc<Engine>, mut stop: watch::Receiver<bool>) {
    let mut lines = Lines { names: Names::default(), limit: LineLimit::default() };
    let mut last = 0;
    'follow: loop {
        let (past, mut coming) = engine.follow(last);
        engine.note_missed(past.whole_after.saturating_sub(last));
        for numbered in past.events {
            last = numbered.number;
            lines.log(&engine, &numbered);
        }
        loop {
            let numbered = tokio::select! {
                biased;
                numbered = coming.recv() => numbered,
                _ = stop.wait_for(|stop| *stop) => return lines.log_left_out(&engine),
                () = tokio::time::sleep(REFILL), if lines.limit.has_left_out() => {
                    lines.log_left_out(&engine);
                    continue;
                }
            };
            match numbered {
                Ok(numbered) => {
                    last = numbered.number;
                    lines.log(&engine, &numbered);
                }
                // Too slow: what the engine still keeps is read from there.
                Err(RecvError::Lagged(_)) => continue 'follow,
                Err(RecvError::Closed) => return lines.log_left_out(&engine),
            }
        }
    }
}

/// Writes lines, within a bound for each kind of event of each job. Lines of single tasks, which are for debugging, have none.
struct Lines {
    names: Names,
    limit: LineLimit<(JobId, &'static str)>,
}

impl Lines {
    fn log(&mut self, engine: &Engine, numbered: &Numbered) {
        let Event { job, what, .. } = numbered.event.as_ref();
        let name = self.names.of(engine, *job);
        if level(what) != Level::DEBUG {
            let kind = (*job, kind(what));
            match self.limit.admit(&kind, now(engine)) {
                None => return,
                Some(0) => {}
                Some(count) => log_count(&name, kind.1, count),
            }
        }
        log_event(numbered, &name);
    }

    fn log_left_out(&mut self, engine: &Engine) {
        for ((job, kind), count) in self.limit.take_left_out(now(engine)) {
            log_count(&self.names.of(engine, job), kind, count);
        }
    }
}

fn now(engine: &Engine) -> Duration {
    Duration::from_nanos(engine.clock().nanos())
}

fn log_count(job: &JobName, kind: &'static str, count: u64) {
    tracing::warn!(
        target: "muster::events",
        job = job.as_str(),
        kind,
        count,
        "{count} further events of this kind were not logged one by one: the API and the pages have them"
    );
}

/// The names of jobs, which never change, by their places.
#[derive(Default)]
struct Names(HashMap<JobId, JobName>);

impl Names {
    fn of(&mut self, engine: &Engine, job: JobId) -> JobName {
        let named = || engine.look_up(|core| core.job_name(job).cloned()).unwrap_or_default();
        self.0.entry(job).or_insert_with(named).clone()
    }
}

/// What an event is about, besides its job and its run.
#[derive(Default)]
struct About<'a> {
    task: Option<TaskId>,
    peer: Option<SocketAddr>,
    barrier: Option<&'a str>,
    counter: Option<i64>,
    outcome: Option<&'static str>,
}

fn log_event(numbered: &Numbered, job: &JobName) {
    let Event { run, what, reason, .. } = numbered.event.as_ref();
    let about = about(what);
    let (task, peer) = (about.task.map(|task| task.0), about.peer.map(tracing::field::display));
    macro_rules! line {
        ($level:expr) => {
            tracing::event!(
                target: "muster::events",
                $level,
                event = numbered.number,
                job = job.as_str(),
                run = run.0,
                kind = kind(what),
                task,
                peer,
                barrier = about.barrier,
                counter = about.counter,
                outcome = about.outcome,
                "{}",
                one_line(reason)
            )
        };
    }
    match level(what) {
        Level::WARN => line!(Level::WARN),
        Level::INFO => line!(Level::INFO),
        _ => line!(Level::DEBUG),
    }
}

/// Who wants to know of a change: WARN is for what somebody should look at, INFO for the course of jobs and runs, DEBUG
/// for the course of single tasks and barriers, of which a large job has thousands.
fn level(what: &Change) -> Level {
    match what {
        Change::TaskSuperseded { .. }
        | Change::TaskSuspected { .. }
        | Change::TaskFailed { .. }
        | Change::Fenced { .. }
        | Change::BarrierFailed { .. }
        | Change::FindingOpened { .. }
        | Change::TransferFailed { .. }
        | Change::Excluded { .. }
        | Change::RegistrationRefused { .. }
        | Change::JobDeleted { .. }
        | Change::FirstCause { .. } => Level::WARN,
        Change::RunEnded { outcome } if *outcome != RunOutcome::Completed => Level::WARN,
        // A barrier that passed without somebody is a decision, not routine.
        Change::BarrierPassed { without, .. } if !without.is_empty() => Level::INFO,
        Change::TaskConnected { again: true, .. } => Level::INFO,
        Change::JobDeclared { .. }
        | Change::RunOpened
        | Change::RunEnded { .. }
        | Change::FindingClosed { .. }
        | Change::TaskReturned { .. }
        | Change::Readmitted { .. }
        | Change::DrainRequested { .. }
        | Change::SettingsChanged { .. }
        | Change::KeyWritten { .. }
        | Change::KeyDeleted { .. }
        | Change::PreemptionNoticed => Level::INFO,
        Change::TaskRegistering { .. }
        | Change::TaskConnected { .. }
        | Change::TaskDisconnected { .. }
        | Change::BarrierStarted { .. }
        | Change::BarrierPassed { .. } => Level::DEBUG,
    }
}

/// The kind of a change, by the name that it has in JSON.
#[must_use]
pub fn kind(what: &Change) -> &'static str {
    match what {
        Change::JobDeclared { .. } => "job-declared",
        Change::RunOpened => "run-opened",
        Change::TaskRegistering { .. } => "task-registering",
        Change::TaskConnected { .. } => "task-connected",
        Change::TaskSuperseded { .. } => "task-superseded",
        Change::TaskSuspected { .. } => "task-suspected",
        Change::TaskReturned { .. } => "task-returned",
        Change::TaskDisconnected { .. } => "task-disconnected",
        Change::TaskFailed { .. } => "task-failed",
        Change::Fenced { .. } => "fenced",
        Change::BarrierStarted { .. } => "barrier-started",
        Change::BarrierPassed { .. } => "barrier-passed",
        Change::BarrierFailed { .. } => "barrier-failed",
        Change::Excluded { .. } => "excluded",
        Change::Readmitted { .. } => "readmitted",
        Change::RegistrationRefused { .. } => "registration-refused",
        Change::DrainRequested { .. } => "drain-requested",
        Change::SettingsChanged { .. } => "settings-changed",
        Change::KeyWritten { .. } => "key-written",
        Change::KeyDeleted { .. } => "key-deleted",
        Change::JobDeleted { .. } => "job-deleted",
        Change::PreemptionNoticed => "preemption-noticed",
        Change::FirstCause { .. } => "first-cause",
        Change::TransferFailed { .. } => "transfer-failed",
        Change::FindingOpened { .. } => "finding-opened",
        Change::FindingClosed { .. } => "finding-closed",
        Change::RunEnded { .. } => "run-ended",
    }
}

/// Whether a change is about a task, alone or among others.
#[must_use]
pub fn concerns(what: &Change, task: TaskId) -> bool {
    match what {
        Change::BarrierPassed { without: tasks, .. }
        | Change::FindingOpened { tasks, .. }
        | Change::Excluded { target: Target::Host(_), tasks, .. } => tasks.contains(&task),
        Change::TransferFailed { task: one, with, .. } => [*one, *with].contains(&task),
        other => about(other).task == Some(task),
    }
}

/// The task that a change is about, if it is about one, and the barrier with its use.
#[must_use]
pub fn subject(what: &Change) -> (Option<TaskId>, Option<(&str, i64)>) {
    let about = about(what);
    (about.task, about.barrier.zip(about.counter))
}

fn about(what: &Change) -> About<'_> {
    match what {
        Change::TaskRegistering { task, peer, .. } => {
            About { task: Some(*task), peer: *peer, ..About::default() }
        }
        Change::TaskSuperseded { task, new_peer, .. } => {
            About { task: Some(*task), peer: *new_peer, ..About::default() }
        }
        Change::RegistrationRefused { task, peer, .. } => {
            About { task: Some(*task), peer: *peer, ..About::default() }
        }
        Change::Excluded { target, .. } | Change::Readmitted { target, .. } => match target {
            Target::Task(task) => About { task: Some(*task), ..About::default() },
            Target::Host(_) => About::default(),
        },
        Change::TaskConnected { task, .. }
        | Change::TaskSuspected { task }
        | Change::TaskReturned { task }
        | Change::TaskDisconnected { task }
        | Change::TransferFailed { task, .. }
        | Change::TaskFailed { task, .. } => About { task: Some(*task), ..About::default() },
        Change::Fenced { task } | Change::FirstCause { task } => About { task: *task, ..About::default() },
        Change::BarrierStarted { barrier, counter }
        | Change::BarrierPassed { barrier, counter, .. }
        | Change::BarrierFailed { barrier, counter } => {
            About { barrier: Some(barrier), counter: Some(*counter), ..About::default() }
        }
        Change::RunEnded { outcome } => About {
            outcome: Some(match outcome {
                RunOutcome::Completed => "completed",
                RunOutcome::Failed => "failed",
                RunOutcome::Abandoned => "abandoned",
            }),
            ..About::default()
        },
        Change::FindingOpened { tasks, .. } => About { task: tasks.first().copied(), ..About::default() },
        Change::JobDeclared { .. }
        | Change::RunOpened
        | Change::FindingClosed { .. }
        | Change::DrainRequested { .. }
        | Change::SettingsChanged { .. }
        | Change::KeyWritten { .. }
        | Change::KeyDeleted { .. }
        | Change::JobDeleted { .. }
        | Change::PreemptionNoticed => About::default(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::coordination::FailureClass;

    #[test]
    fn kinds_are_called_as_in_json() {
        let task = TaskId(1);
        let barrier = Arc::<str>::from("b");
        for change in [
            Change::JobDeclared { actor: None },
            Change::RunOpened,
            Change::TaskSuspected { task },
            Change::TaskReturned { task },
            Change::TaskDisconnected { task },
            Change::TaskFailed { task, class: FailureClass::Reported },
            Change::Fenced { task: None },
            Change::BarrierStarted { barrier: Arc::clone(&barrier), counter: 0 },
            Change::BarrierPassed { barrier: Arc::clone(&barrier), counter: 0, without: vec![] },
            Change::BarrierFailed { barrier, counter: 0 },
            Change::PreemptionNoticed,
            Change::FindingOpened { finding: Arc::from("f"), tasks: vec![] },
            Change::FindingClosed { finding: Arc::from("f") },
            Change::TransferFailed { task, with: task, error: Arc::from("stalled"), count: 1 },
            Change::FirstCause { task: None },
            Change::RunEnded { outcome: RunOutcome::Failed },
        ] {
            assert_eq!(serde_json::to_value(&change).unwrap()["kind"], kind(&change));
        }
    }
}
