//! The audit log: numbered lines about every change, done or refused, with actor, reason, address and outcome.
//! Lines are only added.
//!
//! It writes no file itself: with `--audit-file` a thread does (`writer.rs`). The answer to a change waits
//! for the disk, at most [`DISK_TIMEOUT`]; nothing else ever waits. [`AuditFailurePolicy`] says whether changes are
//! refused while the file cannot be written. Refusals of clients that cannot be told apart are aggregated
//! (`aggregate.rs`). The last lines are kept in memory. Begin at [`AuditLog::record`].

mod aggregate;
mod metrics;
mod writer;

use std::collections::VecDeque;
use std::fmt;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use utoipa::ToSchema;

use super::Role;
use crate::clock::Clock;
use crate::coordination::{Actor, JobName, Reason, Timestamp};
use writer::{AuditWriter, FileSink};

/// How long a change waits for the disk, before it is made and before it is answered.
const DISK_TIMEOUT: Duration = Duration::from_secs(1);

/// The policy for changes while the audit file cannot be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AuditFailurePolicy {
    /// They are made. Their lines wait, and are counted if they are lost.
    #[default]
    Continue,
    /// They are refused before they are made.
    Refuse,
}

impl AuditFailurePolicy {
    /// Reads a policy.
    ///
    /// # Errors
    /// How to write one.
    pub fn parse(text: &str) -> Result<Self, String> {
        match text {
            "continue" => Ok(Self::Continue),
            "refuse" => Ok(Self::Refuse),
            _ => Err("write continue or refuse".into()),
        }
    }
}

impl fmt::Display for AuditFailurePolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Continue => "continue",
            Self::Refuse => "refuse",
        })
    }
}

/// The outcome of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum AuditOutcome {
    /// It was done.
    Done,
    /// It was refused.
    Refused,
}

impl AuditOutcome {
    /// Its name, as in JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Refused => "refused",
        }
    }
}

/// One act.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AuditLine {
    /// Its place among all acts upon this server, from 1.
    pub number: u64,
    /// When, in microseconds since the Unix epoch.
    pub at: Timestamp,
    /// Who, from where, by what means.
    pub actor: Actor,
    /// The role; `None` for unauthenticated authors and for rules of the server.
    #[serde(default)]
    pub role: Option<Role>,
    /// In which job.
    pub job: Option<JobName>,
    /// What, in a word: `exclude`, `readmit`, `drain`, …
    pub act: String,
    /// Upon what.
    pub subject: String,
    /// Why.
    pub reason: Option<Reason>,
    /// The outcome.
    pub outcome: AuditOutcome,
    /// Why it was refused, or what there is now that was not before.
    pub detail: String,
    /// How many refusals like this the line stands for: those of the same source since its last line.
    #[serde(default = "once")]
    pub times: u64,
}

fn once() -> u64 {
    1
}

/// Some lines of the audit, oldest first.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AuditPage {
    /// The lines.
    pub lines: Vec<AuditLine>,
    /// The value of `after` for the next page.
    pub next: u64,
    /// Lines that are no longer in memory may be missing before the first.
    pub gap: bool,
}

/// An act before it is numbered.
#[derive(Debug)]
pub(crate) struct AuditEntry {
    pub actor: Actor,
    pub role: Option<Role>,
    pub job: Option<JobName>,
    pub act: &'static str,
    pub subject: String,
    pub reason: Option<Reason>,
}

#[derive(Default)]
struct AuditBuffer {
    kept: VecDeque<AuditLine>,
    last: u64,
    /// By outcome.
    counts: [u64; 2],
}

/// The audit of a server.
pub struct AuditLog {
    lines: Mutex<AuditBuffer>,
    /// How many lines are kept in memory.
    capacity: usize,
    gathered: aggregate::RefusalAggregator,
    file: Option<AuditWriter>,
    on_failure: AuditFailurePolicy,
    /// How many acts there have been, for who follows.
    appended: watch::Sender<u64>,
}

impl Default for AuditLog {
    fn default() -> Self {
        Self::new(Self::DEFAULT)
    }
}

/// The counters of the audit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct AuditStats {
    /// Lines, by outcome: done, refused.
    pub lines: [u64; 2],
    /// Lines in memory.
    pub kept: usize,
    /// How many are kept there at most.
    pub kept_max: usize,
    /// Lines that are there no more.
    pub dropped: u64,
    /// The lines that the file has not taken.
    pub file: writer::WriterStats,
    /// Refusals that have no line of their own.
    pub gathered: u64,
}

impl AuditLog {
    /// How many lines are kept in memory unless a setting says otherwise.
    pub const DEFAULT: usize = 4096;

    /// An audit that keeps this many lines, in memory.
    #[must_use]
    pub fn new(most: usize) -> Self {
        Self {
            lines: Mutex::default(),
            capacity: most.max(1),
            gathered: aggregate::RefusalAggregator::default(),
            file: None,
            on_failure: AuditFailurePolicy::default(),
            appended: watch::Sender::default(),
        }
    }

    /// The same, which also appends to the file at `path`.
    ///
    /// # Errors
    /// If the file cannot be opened for that.
    pub fn to_file(self, path: &Path, clock: Clock) -> std::io::Result<Self> {
        let file = AuditWriter::start(FileSink::open(path)?, path, clock)?;
        Ok(Self { file: Some(file), ..self })
    }

    /// The same, with this policy for when the file cannot be written.
    #[must_use]
    pub fn on_failure(self, on_failure: AuditFailurePolicy) -> Self {
        Self { on_failure, ..self }
    }

    /// Waits until a change may be made.
    ///
    /// # Errors
    /// If changes are refused because the lines of earlier ones cannot be written: why they cannot.
    pub(crate) async fn wait_writable(&self) -> Result<(), String> {
        let Some(file) = self.file.as_ref().filter(|_| self.on_failure == AuditFailurePolicy::Refuse) else {
            return Ok(());
        };
        if file.write_error().is_none() && file.wait_durable(DISK_TIMEOUT).await {
            return Ok(());
        }
        Err(file.write_error().unwrap_or_else(|| "it does not take lines in time".into()))
    }

    /// Waits until the lines so far are on the disk, but not for a disk that is in trouble.
    pub(crate) async fn wait_durable(&self) {
        if let Some(file) = self.file.as_ref().filter(|file| file.write_error().is_none()) {
            file.wait_durable(DISK_TIMEOUT).await;
        }
    }

    /// Why lines do not reach the file; `None` if they do.
    pub(crate) fn write_error(&self) -> Option<String> {
        self.file.as_ref().and_then(AuditWriter::write_error)
    }

    /// Opens the file again: it may have been rotated.
    pub fn reopen(&self) {
        if let Some(file) = &self.file {
            file.reopen();
        }
    }

    /// Waits until the last lines are on the disk, for `within` at most: the server stops.
    pub async fn close(&self, within: Duration) {
        let Some(file) = &self.file else { return };
        if !file.wait_durable(within).await {
            let lines = file.stats().queued;
            tracing::error!(lines, "the last lines of the audit are not in its file");
        }
    }

    fn lines(&self) -> MutexGuard<'_, AuditBuffer> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn stats(&self) -> AuditStats {
        let (kept_max, gathered) = (self.capacity, self.gathered.count());
        let file = self.file.as_ref().map(AuditWriter::stats).unwrap_or_default();
        let lines = self.lines();
        let kept = lines.kept.len();
        let dropped = lines.last.saturating_sub(kept as u64);
        AuditStats { lines: lines.counts, kept, kept_max, dropped, file, gathered }
    }

    pub(crate) fn record(&self, at: Timestamp, deed: AuditEntry, outcome: AuditOutcome, detail: String) {
        self.record_many(at, deed, outcome, detail, 1);
    }

    fn record_many(
        &self,
        at: Timestamp,
        deed: AuditEntry,
        outcome: AuditOutcome,
        detail: String,
        times: u64,
    ) {
        let AuditEntry { actor, role, job, act, subject, reason } = deed;
        let (subject, detail) = (truncate(subject), truncate(detail));
        let mut lines = self.lines();
        lines.last += 1;
        lines.counts[outcome as usize] += 1;
        let (number, act) = (lines.last, act.to_owned());
        let line = AuditLine { number, at, actor, role, job, act, subject, reason, outcome, detail, times };
        tracing::info!(
            target: "muster::audit",
            number,
            who = %line.actor,
            role = line.role.map(tracing::field::display),
            job = line.job.as_ref().map(JobName::as_str),
            act = line.act,
            outcome = outcome.name(),
            times,
            "{}: {}",
            crate::text::one_line(&line.subject),
            crate::text::one_line(&line.detail)
        );
        // In the order of their numbers, since the lock is held; it never waits.
        if let Some(file) = &self.file {
            file.push(&line);
        }
        lines.kept.push_back(line);
        if lines.kept.len() > self.capacity {
            lines.kept.pop_front();
        }
        self.appended.send_replace(number);
    }

    /// Tells of further acts.
    pub(crate) fn subscribe(&self) -> watch::Receiver<u64> {
        self.appended.subscribe()
    }

    /// The latest lines that are wanted, the latest first.
    pub(crate) fn latest(&self, limit: usize, wanted: impl Fn(&AuditLine) -> bool) -> Vec<AuditLine> {
        let lines = self.lines();
        lines.kept.iter().rev().filter(|line| wanted(line)).take(limit).cloned().collect()
    }

    pub(crate) fn page(&self, after: u64, limit: usize, wanted: impl Fn(&AuditLine) -> bool) -> AuditPage {
        let lines = self.lines();
        let gap = lines.kept.front().is_some_and(|first| first.number > after.saturating_add(1));
        let mut page = AuditPage { lines: Vec::new(), next: after.max(lines.last), gap };
        for line in lines.kept.iter().filter(|line| line.number > after && wanted(line)) {
            if page.lines.len() == limit {
                page.next = page.lines.last().map_or(after, |last| last.number);
                break;
            }
            page.lines.push(line.clone());
        }
        page
    }
}

/// No more of a text than a line holds: requests may be long, and many lines are kept.
fn truncate(mut text: String) -> String {
    const MOST: usize = 1 << 10;
    if text.len() > MOST {
        text.truncate(text.floor_char_boundary(MOST));
        text.push('…');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::coordination::ActorOrigin;

    #[tokio::test]
    async fn lines_are_numbered_kept_within_bounds_and_appended_to_the_file() {
        let path = std::env::temp_dir().join(format!("muster-audit-{}", std::process::id()));
        std::fs::write(&path, "earlier\n").unwrap();
        const LINES_KEPT: usize = 8;
        let audit = AuditLog::new(LINES_KEPT).to_file(&path, Clock::start()).unwrap();
        let deed = |subject: &str| AuditEntry {
            actor: Actor { who: "alice".into(), address: None, means: ActorOrigin::Api },
            role: Some(Role::Operator),
            job: None,
            act: "exclude",
            subject: subject.into(),
            reason: None,
        };
        audit.record(Timestamp(1), deed("task 1"), AuditOutcome::Done, "exclusion 1".into());
        audit.record(Timestamp(2), deed("task 2"), AuditOutcome::Refused, "no".into());
        let page = audit.page(0, 1, |_| true);
        assert_eq!((page.lines[0].subject.as_str(), page.next), ("task 1", 1));
        let page = audit.page(1, 10, |_| true);
        assert_eq!((page.lines[0].number, page.next, page.gap), (2, 2, false));
        audit.wait_durable().await;
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!((lines.len(), lines[0]), (3, "earlier"), "{text}");
        assert!(lines[2].contains("\"outcome\":\"refused\""), "{text}");
        audit.record(Timestamp(3), deed(&"ü".repeat(9_999)), AuditOutcome::Done, String::new());
        let long = audit.page(2, 1, |_| true).lines.remove(0);
        assert!(long.subject.len() < 1_100 && long.subject.ends_with('…'));
        for _ in 0..LINES_KEPT {
            audit.record(Timestamp(3), deed("x"), AuditOutcome::Done, String::new());
        }
        assert!(audit.page(0, 1, |_| true).gap);
        let figures = audit.stats();
        assert_eq!((figures.kept, figures.kept_max), (LINES_KEPT, LINES_KEPT));
        assert_eq!((figures.lines, figures.dropped, figures.file.lost), ([10, 1], 3, 0));
    }
}
