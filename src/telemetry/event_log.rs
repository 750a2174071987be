//! Writes one log line for each event, within a rate limit for each kind of event of each job. Events at level DEBUG
//! have no limit.
//!
//! `log_rate_limit.rs` implements the limit, and `engine` retains the events. Begin at `log_events`.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::broadcast::error::RecvError;
use tokio::sync::watch;
use tracing::Level;

use crate::coordination::{EventKind, JobEvent, JobId, JobName, RunOutcome};
use crate::engine::{Engine, NumberedEvent};
use crate::text::escape_to_one_line;

use super::log_rate_limit::{LogRateLimit, REFILL_INTERVAL};

/// Logs every event of `engine` after number `last`. When `stop` becomes true, it logs the events so far and
/// returns.
pub async fn log_events(engine: Arc<Engine>, mut last: u64, mut stop: watch::Receiver<bool>) {
    let mut lines = EventLogger { names: JobNames::default(), limit: LogRateLimit::default() };
    'follow: loop {
        let (past, mut coming) = engine.subscribe_events(last);
        engine.add_to_missed_events(past.complete_after.saturating_sub(last));
        for numbered in past.events {
            last = numbered.number;
            lines.log_within_limit(&engine, &numbered);
        }
        loop {
            let numbered = tokio::select! {
                biased;
                numbered = coming.recv() => numbered,
                _ = stop.wait_for(|stop| *stop) => return lines.log_suppressed(&engine),
                () = tokio::time::sleep(REFILL_INTERVAL), if lines.limit.has_suppressed() => {
                    lines.log_suppressed(&engine);
                    continue;
                }
            };
            match numbered {
                Ok(numbered) => {
                    last = numbered.number;
                    lines.log_within_limit(&engine, &numbered);
                }
                // The receiver was too slow: the events that the engine still keeps are read from there.
                Err(RecvError::Lagged(_)) => continue 'follow,
                Err(RecvError::Closed) => return lines.log_suppressed(&engine),
            }
        }
    }
}

/// Writes lines within a limit for each kind of event of each job. Lines at DEBUG level about single tasks
/// have no limit.
struct EventLogger {
    names: JobNames,
    limit: LogRateLimit<(JobId, &'static str)>,
}

impl EventLogger {
    fn log_within_limit(&mut self, engine: &Engine, numbered: &NumberedEvent) {
        let JobEvent { job, what, .. } = numbered.event.as_ref();
        let name = self.names.name_of(engine, *job);
        if log_level_of_event(what) != Level::DEBUG {
            let kind = (*job, what.kind());
            match self.limit.admit(&kind, elapsed_since_start(engine)) {
                None => return,
                Some(0) => {}
                Some(count) => log_suppressed_count(&name, kind.1, count),
            }
        }
        log_event(numbered, &name);
    }

    fn log_suppressed(&mut self, engine: &Engine) {
        for ((job, kind), count) in self.limit.take_suppressed(elapsed_since_start(engine)) {
            log_suppressed_count(&self.names.name_of(engine, job), kind, count);
        }
    }
}

fn elapsed_since_start(engine: &Engine) -> Duration {
    Duration::from_nanos(engine.clock().elapsed_nanos())
}

fn log_suppressed_count(job: &JobName, kind: &'static str, count: u64) {
    tracing::warn!(
        target: "muster::events",
        job = job.as_str(),
        kind,
        count,
        "{count} further events of this kind were not logged one by one: the API and the pages have them"
    );
}

/// The names of jobs, which never change, by job id.
#[derive(Default)]
struct JobNames(HashMap<JobId, JobName>);

impl JobNames {
    fn name_of(&mut self, engine: &Engine, job: JobId) -> JobName {
        let named = || engine.read_under_lock(|core| core.job_name(job).cloned()).unwrap_or_default();
        self.0.entry(job).or_insert_with(named).clone()
    }
}

fn log_event(numbered: &NumberedEvent, job: &JobName) {
    let JobEvent { run, what, reason, .. } = numbered.event.as_ref();
    let about = what.subject();
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
                escape_to_one_line(reason)
            )
        };
    }
    match log_level_of_event(what) {
        Level::WARN => line!(Level::WARN),
        Level::INFO => line!(Level::INFO),
        _ => line!(Level::DEBUG),
    }
}

/// Returns the level of a change: WARN for changes that an operator should look at, INFO for the course of
/// jobs and runs, DEBUG for single tasks and barriers, of which a large job has thousands.
fn log_level_of_event(what: &EventKind) -> Level {
    match what {
        EventKind::TaskSuperseded { .. }
        | EventKind::TaskSuspected { .. }
        | EventKind::TaskFailed { .. }
        | EventKind::Fenced { .. }
        | EventKind::BarrierFailed { .. }
        | EventKind::FindingOpened { .. }
        | EventKind::TransferFailed { .. }
        | EventKind::Excluded { .. }
        | EventKind::RegistrationRefused { .. }
        | EventKind::JobDeleted { .. }
        | EventKind::FirstCause { .. } => Level::WARN,
        EventKind::RunEnded { outcome } if *outcome != RunOutcome::Completed => Level::WARN,
        // A barrier that passes without a member is a decision and not routine.
        EventKind::BarrierPassed { without, .. } if !without.is_empty() => Level::INFO,
        EventKind::TaskConnected { again: true, .. } => Level::INFO,
        EventKind::JobDeclared { .. }
        | EventKind::RunOpened
        | EventKind::RunEnded { .. }
        | EventKind::FindingClosed { .. }
        | EventKind::RegistrationWithdrawn { .. }
        | EventKind::TaskReturned { .. }
        | EventKind::Readmitted { .. }
        | EventKind::TaskIdsAssigned { .. }
        | EventKind::TaskOwnersForgotten { .. }
        | EventKind::DrainRequested { .. }
        | EventKind::SettingsChanged { .. }
        | EventKind::KeyWritten { .. }
        | EventKind::KeyDeleted { .. }
        | EventKind::ServiceRestarted
        | EventKind::PreemptionNoticed => Level::INFO,
        EventKind::TaskRegistering { .. }
        | EventKind::TaskConnected { .. }
        | EventKind::TaskDisconnected { .. }
        | EventKind::BarrierStarted { .. }
        | EventKind::BarrierPassed { .. } => Level::DEBUG,
    }
}
