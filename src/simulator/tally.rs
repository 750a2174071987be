//! Counts what simulated tasks do, and the errors that they get. An error that the story provokes is expected. Any
//! other error is a failure of the service.
//!
//! Begin at [`Tally::record_error`], then [`SimulationSummary`].

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::Serialize;
use tonic::Code;

use super::schedule::ScheduledAction;
use crate::agent::AgentError;
use crate::text::UntrustedText;

/// The most unexpected errors whose messages are kept.
const UNEXPECTED_KEPT: usize = 5;

/// The counts of a simulation so far.
#[derive(Debug)]
pub struct Tally {
    is_recoverable: bool,
    /// For each task, whether an event of the story has disturbed it.
    disturbed: Vec<AtomicBool>,
    /// Whether an event has disturbed any task.
    any_disturbed: AtomicBool,
    /// Whether the simulation ends, so that errors no longer count.
    is_ending: AtomicBool,
    registrations: AtomicU64,
    /// The tasks that take part now.
    present: AtomicU64,
    counts: Mutex<Counts>,
}

#[derive(Debug, Default)]
struct Counts {
    steps: u64,
    /// The service incarnation and the counter of the latest step.
    latest_step: Option<(u64, i64)>,
    errors: BTreeMap<String, ErrorCount>,
    unexpected: Vec<String>,
}

/// How often an error of one kind was received.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct ErrorCount {
    /// Because of an event of the story, or by a decision of an operator.
    pub expected: u64,
    /// For no reason that the story has.
    pub unexpected: u64,
}

/// The summary of a simulation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SimulationSummary {
    /// The steps that all members completed.
    pub steps: u64,
    /// The registrations that the service accepted.
    pub registrations: u64,
    /// The tasks that took part at the end.
    pub present: u64,
    /// The errors by kind.
    pub errors: BTreeMap<String, ErrorCount>,
    /// The first of the unexpected errors.
    pub unexpected: Vec<String>,
}

impl SimulationSummary {
    /// Returns the number of unexpected errors.
    #[must_use]
    pub fn unexpected_count(&self) -> u64 {
        self.unexpected_errors().values().sum()
    }

    /// Returns how many errors of each kind the story provoked.
    #[must_use]
    pub fn expected_errors(&self) -> BTreeMap<&str, u64> {
        self.nonzero_counts(|count| count.expected)
    }

    /// Returns how many errors of each kind had no reason in the story.
    #[must_use]
    pub fn unexpected_errors(&self) -> BTreeMap<&str, u64> {
        self.nonzero_counts(|count| count.unexpected)
    }

    fn nonzero_counts(&self, of: impl Fn(&ErrorCount) -> u64) -> BTreeMap<&str, u64> {
        let counts = self.errors.iter().map(|(kind, count)| (kind.as_str(), of(count)));
        counts.filter(|(_, count)| *count > 0).collect()
    }
}

impl Tally {
    /// Creates the counts for this many tasks.
    #[must_use]
    pub fn new(tasks: u32, is_recoverable: bool) -> Self {
        Self {
            is_recoverable,
            disturbed: (0..tasks).map(|_| AtomicBool::default()).collect(),
            any_disturbed: AtomicBool::default(),
            is_ending: AtomicBool::default(),
            registrations: AtomicU64::default(),
            present: AtomicU64::default(),
            counts: Mutex::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Counts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that an action begins.
    pub fn record_action(&self, action: &ScheduledAction) {
        if !action.action.is_disruptive() {
            return;
        }
        self.any_disturbed.store(true, Ordering::Release);
        for task in action.tasks.iter().filter_map(|task| self.disturbed.get(*task as usize)) {
            task.store(true, Ordering::Release);
        }
    }

    /// Records that the simulation ends.
    pub fn record_end(&self) {
        self.is_ending.store(true, Ordering::Release);
    }

    /// Records a registration. Returns its number.
    pub fn record_registration(&self) -> u64 {
        self.present.fetch_add(1, Ordering::AcqRel);
        self.registrations.fetch_add(1, Ordering::AcqRel) + 1
    }

    /// Records that a task no longer takes part.
    pub fn record_departure(&self) {
        self.present.fetch_sub(1, Ordering::AcqRel);
    }

    /// Records that a task has passed instance `counter` of the step barrier in a run.
    pub fn record_step(&self, run: u64, counter: i64) {
        let mut counts = self.lock();
        if counts.latest_step.is_none_or(|(of, latest)| of != run || counter > latest) {
            counts.latest_step = Some((run, counter));
            counts.steps += 1;
        }
    }

    /// Records the error of a call. `connection_was_reset`: the story has reset the connection of the call.
    pub fn record_error(&self, task: u32, error: &AgentError, connection_was_reset: bool) {
        if self.is_ending.load(Ordering::Acquire) {
            return;
        }
        let disturbed = |of: Option<&AtomicBool>| of.is_some_and(|of| of.load(Ordering::Acquire));
        let concerns_all = !self.is_recoverable || call_name(error) == "barrier";
        let expected = connection_was_reset
            || disturbed(self.disturbed.get(task as usize))
            || (concerns_all && disturbed(Some(&self.any_disturbed)))
            || error.grpc_code() == Some(Code::PermissionDenied);
        let mut counts = self.lock();
        let count = counts.errors.entry(error_kind(error)).or_default();
        *(if expected { &mut count.expected } else { &mut count.unexpected }) += 1;
        if !expected && counts.unexpected.len() < UNEXPECTED_KEPT {
            counts.unexpected.push(format!("task {task}: {}", UntrustedText::from(error.to_string())));
        }
    }

    /// Returns the counts.
    #[must_use]
    pub fn summary(&self) -> SimulationSummary {
        let counts = self.lock();
        SimulationSummary {
            steps: counts.steps,
            registrations: self.registrations.load(Ordering::Acquire),
            present: self.present.load(Ordering::Acquire),
            errors: counts.errors.clone(),
            unexpected: counts.unexpected.clone(),
        }
    }
}

fn call_name(error: &AgentError) -> &'static str {
    match error {
        AgentError::Refused { call, .. }
        | AgentError::Unreachable { call, .. }
        | AgentError::TimedOut { call, .. }
        | AgentError::RunChanged { call, .. }
        | AgentError::Protocol { call, .. } => call,
        AgentError::Ended { .. } => "error poll",
        _ => "other",
    }
}

/// Returns the call and the form of its failure, which are few.
fn error_kind(error: &AgentError) -> String {
    let form = match error {
        AgentError::Refused { code, .. } | AgentError::Ended { code, .. } => format!("{code:?}"),
        AgentError::Unreachable { .. } => "no connection".to_owned(),
        AgentError::TimedOut { .. } => "no answer in time".to_owned(),
        AgentError::RunChanged { .. } => "the run has changed".to_owned(),
        AgentError::Protocol { .. } => "against the protocol".to_owned(),
        _ => "other".to_owned(),
    };
    format!("{}: {form}", call_name(error))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::schedule::Schedule;
    use super::super::story::Story;
    use super::*;

    fn action(what: &str) -> ScheduledAction {
        let text = format!(
            "description = \"d\"\ntasks = 4\nhosts = 2\n[[events]]\nat = \"1s\"\ntasks = \"1\"\nwhat = \"{what}\""
        );
        Schedule::new(&Story::parse(&text).unwrap()).next().unwrap()
    }

    fn refused(call: &'static str, code: Code) -> AgentError {
        AgentError::Refused { call, code, message: "m".to_owned() }
    }

    fn unexpected(tally: &Tally) -> u64 {
        tally.summary().unexpected_count()
    }

    #[test]
    fn only_errors_that_the_story_provokes_are_expected() {
        let tally = Tally::new(4, true);
        tally.record_error(1, &refused("heartbeat", Code::Aborted), false);
        assert_eq!(unexpected(&tally), 1);
        tally.record_error(2, &refused("heartbeat", Code::PermissionDenied), false);
        assert_eq!(unexpected(&tally), 1, "an operator excluded the task");
        tally.record_action(&action("kill"));
        tally.record_error(1, &refused("heartbeat", Code::Aborted), false);
        tally.record_error(2, &refused("barrier", Code::DeadlineExceeded), false);
        assert_eq!(unexpected(&tally), 1);
        tally.record_error(2, &refused("heartbeat", Code::Aborted), false);
        assert_eq!(unexpected(&tally), 2, "the other tasks of a recoverable job have no reason to fail");
        let lost = AgentError::Unreachable { service: "s".into(), call: "heartbeat", why: "w".into() };
        tally.record_error(3, &lost, true);
        assert_eq!(unexpected(&tally), 2);
        let summary = tally.summary();
        assert_eq!(summary.errors["heartbeat: Aborted"], ErrorCount { expected: 1, unexpected: 2 });
        assert!(summary.unexpected[0].starts_with("task 1: heartbeat"), "{summary:?}");
    }

    #[test]
    fn one_lost_task_ends_the_others_of_a_job_that_is_not_recoverable() {
        let tally = Tally::new(4, false);
        tally.record_action(&action("late"));
        tally.record_error(3, &refused("heartbeat", Code::Aborted), false);
        assert_eq!(unexpected(&tally), 1, "a late task ends no other");
        tally.record_action(&action("kill"));
        tally.record_error(3, &refused("heartbeat", Code::Aborted), false);
        let late = AgentError::TimedOut { call: "heartbeat", limit: Duration::from_secs(1) };
        tally.record_error(3, &late, false);
        assert_eq!(unexpected(&tally), 1);
    }

    #[test]
    fn a_step_counts_once_for_all_tasks() {
        let tally = Tally::new(2, true);
        for (run, counter) in [(1, 0), (1, 0), (1, 1), (1, 0), (2, 0), (2, 0)] {
            tally.record_step(run, counter);
        }
        assert_eq!(tally.summary().steps, 3);
    }
}
