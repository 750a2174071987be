//! Computes the status that pages show for a task, the word for this status, and short texts about waits and errors.
//!
//! `task_grid.rs` and `task_table.rs` render the tasks. Begin at `TaskStatus`.

use std::time::Duration;

use crate::coordination::{FirstCause, RunOutcome, RunState, RunView, TaskPhase, TaskView, Timestamp};
pub(super) use crate::service::barrier_display_name;
use crate::service::findings::Severity;

/// The time for which others must have waited before a task is shown as awaited: until then a barrier is
/// merely filling.
pub(super) const AWAITED_AFTER: Duration = Duration::from_secs(3);

/// The status of a task. The most urgent comes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum TaskStatus {
    Failed,
    Suspect,
    Awaited,
    Missing,
    Registering,
    Excluded,
    Disconnected,
    Connected,
}

impl TaskStatus {
    pub const ALL: [Self; 8] = [
        Self::Failed,
        Self::Suspect,
        Self::Awaited,
        Self::Missing,
        Self::Registering,
        Self::Excluded,
        Self::Disconnected,
        Self::Connected,
    ];

    /// Returns the status of a task for which others have waited since `awaited`.
    pub fn of_task(task: &TaskView, awaited: Option<Timestamp>, now: Timestamp) -> Self {
        if task.excluded.is_some() {
            return Self::Excluded;
        }
        match task.standing {
            TaskPhase::Missing => Self::Missing,
            TaskPhase::Registering => Self::Registering,
            TaskPhase::Suspect => Self::Suspect,
            TaskPhase::Disconnected => Self::Disconnected,
            TaskPhase::Failed => Self::Failed,
            TaskPhase::Connected => match awaited {
                Some(since) if now.since(since) >= AWAITED_AFTER => Self::Awaited,
                _ => Self::Connected,
            },
        }
    }

    /// Returns its word for pages and addresses.
    pub fn word(&self) -> &'static str {
        match self {
            Self::Failed => "failed",
            Self::Suspect => "suspect",
            Self::Awaited => "awaited",
            Self::Missing => "missing",
            Self::Registering => "registering",
            Self::Excluded => "excluded",
            Self::Disconnected => "disconnected",
            Self::Connected => "connected",
        }
    }
}

/// Returns the tone of the present run of a job: that of its state, but a run without some of its tasks has a tone of its own.
pub(super) fn present_run_tone(run: &RunView) -> &'static str {
    let out = run.tasks.len().saturating_sub(run.live);
    match run.state {
        RunState::Running if out > run.counts.excluded => "warn",
        state => run_state_tone(&state),
    }
}

/// Returns the tone of a run's state: the class of its chip.
pub(super) fn run_state_tone(state: &RunState) -> &'static str {
    match state {
        RunState::Forming => "info",
        RunState::Running => "ok",
        RunState::Completed => "calm",
        RunState::Failed | RunState::Abandoned => "bad",
    }
}

/// Returns the tone of a finding: the class of its issue.
pub(super) fn severity_tone(severity: Severity) -> &'static str {
    match severity {
        Severity::Critical => "bad",
        Severity::Warning => "warn",
        Severity::Notice => "info",
    }
}

/// Returns the name of the symbol for a tone.
pub(super) fn tone_symbol(tone: &str) -> &'static str {
    match tone {
        "bad" => "alarm",
        "warn" => "caution",
        _ => "note",
    }
}

/// Returns the name of a key that a task waits for.
pub(super) fn awaited_key_text(key: &str) -> String {
    format!("key {}", shorten(&crate::text::escape_to_one_line(key), 120))
}

/// Returns the barriers and keys at which a task waits, barriers first.
pub(super) fn wait_texts(task: &TaskView) -> Vec<String> {
    let barriers = task.waits_at.iter().map(|id| barrier_display_name(id));
    barriers.chain(task.waits_for.iter().map(|wait| awaited_key_text(&wait.key))).collect()
}

/// Returns at most this many characters of a text.
pub(super) fn shorten(text: &str, most: usize) -> String {
    crate::text::truncate_text(text, most, "…")
}

/// Returns a text as a sentence.
pub(super) fn to_sentence(text: &str) -> String {
    let mut letters = text.chars();
    let first = letters.next().map(|first| first.to_uppercase().to_string()).unwrap_or_default();
    let end = if text.ends_with('.') { "" } else { "." };
    format!("{first}{}{end}", letters.as_str())
}

/// Returns an error for people: what happened, and the text that clients received if it is another one.
fn cause_and_client_error_texts(error: &str, why: &str) -> (String, String) {
    let line = |text: &str| crate::text::escape_to_one_line(text).into_owned();
    if why.is_empty() || error.ends_with(why) {
        (line(error), String::new())
    } else {
        (line(why), line(error))
    }
}

/// Returns the reason for which a task failed, and the error that clients received if that is another text; `None` if it has not failed.
pub(super) fn failure_texts(task: &TaskView) -> Option<(String, String)> {
    Some(cause_and_client_error_texts(task.error.as_deref()?, task.why.as_deref().unwrap_or_default()))
}

/// Returns the first error of a run in few words, and as clients received it if that is another text.
pub(super) fn first_cause_texts(cause: &FirstCause) -> (String, String) {
    cause_and_client_error_texts(&cause.error, &cause.why)
}

/// Returns the state that a run has after this outcome.
pub(super) fn run_state_of_outcome(outcome: &RunOutcome) -> RunState {
    RunState::ended(*outcome)
}
