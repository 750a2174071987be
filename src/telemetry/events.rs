//! Writes one log line for each change of state, within a rate limit by kind.
//!
//! It does not store events (`engine`). Begin at `log_events`.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::broadcast::error::RecvError;
use tokio::sync::watch;
use tracing::Level;

use crate::coordination::{Change, Event, JobId, JobName, RunOutcome};
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
            let kind = (*job, what.kind());
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

fn log_event(numbered: &Numbered, job: &JobName) {
    let Event { run, what, reason, .. } = numbered.event.as_ref();
    let about = what.about();
    let (task, peer) = (about.task.map(|task| task.0), about.peer.map(tracing::field::display));
    macro_rules! line {
        ($level:expr) => {
            tracing::event!(
                target: "muster::events",
                $level,
                event = numbered.number,
                job = job.as_str(),
                run = run.0,
                kind = what.kind(),
                task,
                peer,
                barrier = about.barrier.map(|(id, _)| id),
                counter = about.barrier.map(|(_, counter)| counter),
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
