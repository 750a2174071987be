//! Maps a task to its state, word, shape and colour.
//!
//! It does not render (`grid.rs`, `task_table.rs`). Begin at `TaskStatus`.

use std::fmt::Display;
use std::time::Duration;

use crate::coordination::{RunOutcome, RunState, TaskPhase, TaskView, Timestamp, barrier_label};

/// For how long the others must have waited for a task before it is shown as awaited: below that, barriers are
/// merely filling.
pub(super) const AWAITED_AFTER: Duration = Duration::from_secs(3);

/// How a task looks. What needs a person first comes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum TaskStatus {
    Failed,
    Suspect,
    Awaited,
    Missing,
    Registering,
    Excluded,
    Left,
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
        Self::Left,
        Self::Connected,
    ];

    /// How a task looks that others have waited for since `awaited`.
    pub fn of(task: &TaskView, awaited: Option<Timestamp>, now: Timestamp) -> Self {
        if task.excluded.is_some() {
            return Self::Excluded;
        }
        match task.standing {
            TaskPhase::Missing => Self::Missing,
            TaskPhase::Registering => Self::Registering,
            TaskPhase::Suspect => Self::Suspect,
            TaskPhase::Disconnected => Self::Left,
            TaskPhase::Failed => Self::Failed,
            TaskPhase::Connected => match awaited {
                Some(since) if now.since(since) >= AWAITED_AFTER => Self::Awaited,
                _ => Self::Connected,
            },
        }
    }

    /// Its word for people, and in addresses.
    pub fn word(&self) -> &'static str {
        match self {
            Self::Failed => "failed",
            Self::Suspect => "suspect",
            Self::Awaited => "awaited",
            Self::Missing => "missing",
            Self::Registering => "registering",
            Self::Excluded => "excluded",
            Self::Left => "left",
            Self::Connected => "connected",
        }
    }
}

/// The colour of a run's state: the class of its chip.
pub(super) fn tone(state: &RunState) -> &'static str {
    match state {
        RunState::Forming => "info",
        RunState::Running => "ok",
        RunState::Completed => "calm",
        RunState::Failed | RunState::Abandoned => "bad",
    }
}

/// A barrier's name: those of the service itself by what they are for.
pub(super) fn barrier_name(id: &str) -> String {
    shorten(&crate::text::one_line(barrier_label(id)), 120)
}

/// A key that a task waits for.
pub(super) fn key_name(key: &str) -> String {
    format!("key {}", shorten(&crate::text::one_line(key), 120))
}

/// Where a task waits: barriers first, then keys.
pub(super) fn waits(task: &TaskView) -> Vec<String> {
    let barriers = task.waits_at.iter().map(|id| barrier_name(id));
    barriers.chain(task.waits_for.iter().map(|wait| key_name(&wait.key))).collect()
}

/// A text of at most so many characters.
pub(super) fn shorten(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        None => text.to_owned(),
        Some((end, _)) => format!("{}…", text[..end].trim_end()),
    }
}

/// A text as a sentence.
pub(super) fn sentence(text: &str) -> String {
    let mut letters = text.chars();
    let first = letters.next().map(|first| first.to_uppercase().to_string()).unwrap_or_default();
    let end = if text.ends_with('.') { "" } else { "." };
    format!("{first}{}{end}", letters.as_str())
}

/// An error for people: what happened, and what clients were told if those are other words.
pub(super) fn error_texts(error: &str, why: &str) -> (String, String) {
    let line = |text: &str| crate::text::one_line(text).into_owned();
    if why.is_empty() || error.ends_with(why) {
        (line(error), String::new())
    } else {
        (line(why), line(error))
    }
}

/// Bytes for people.
pub(super) fn bytes(count: &usize) -> String {
    crate::text::bytes(*count as u64)
}

/// A whole number with its thousands parted.
pub(super) fn grouped(number: impl Display) -> String {
    let digits = number.to_string();
    let mut shown = String::with_capacity(digits.len() + digits.len() / 3);
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            shown.push('\u{202f}');
        }
        shown.push(digit);
    }
    shown
}

/// How a run would end, in a word.
pub(super) fn ended_word(outcome: &RunOutcome) -> RunState {
    RunState::ended(*outcome)
}
