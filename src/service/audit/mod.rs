//! The audit log: a numbered line for every change, done or refused, with its actor, reason, address and outcome.
//! Lines in the audit file are never changed or removed.
//!
//! The last lines are kept in memory, and in the journal if the server has one (`persistence.rs`). With `--audit-file`, a separate thread also writes the lines to a file
//! (`writer.rs`). The answer to a change then waits until its line is on the disk, but at most [`DISK_TIMEOUT`].
//! [`AuditFailurePolicy`] decides whether changes are refused while the file cannot be written. Refused requests of
//! unidentified clients share lines (`refusal_aggregation.rs`). Begin at [`AuditLog::record`].

mod line;
mod metrics;
mod persistence;
mod refusal_aggregation;
mod writer;

use std::collections::VecDeque;
use std::fmt;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use utoipa::ToSchema;

use crate::clock::Clock;
use crate::coordination::{JobName, Timestamp};
use crate::engine::Engine;
pub(crate) use line::AuditEntry;
pub use line::{AuditLine, AuditOutcome};
use writer::{AuditFileSink, AuditWriter};

/// The maximum time that a change waits for the disk, before it is made and again before it is answered.
const DISK_TIMEOUT: Duration = Duration::from_secs(1);

/// The treatment of changes while the audit file cannot be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AuditFailurePolicy {
    /// Changes are made. Their lines wait; lost lines are counted.
    #[default]
    Continue,
    /// Changes are refused before they are made.
    Refuse,
}

impl AuditFailurePolicy {
    /// Parses a policy.
    ///
    /// # Errors
    /// The text that explains the syntax.
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

/// A page of the audit, oldest first.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AuditPage {
    /// The lines.
    pub lines: Vec<AuditLine>,
    /// The value of `after` for the next page.
    pub next: u64,
    /// Lines before the first are no longer in memory.
    pub gap: bool,
}

#[derive(Default)]
struct AuditBuffer {
    kept: VecDeque<AuditLine>,
    last: u64,
    /// Line counts by outcome.
    counts: [u64; 2],
}

impl AuditBuffer {
    /// Adds a line, and drops the oldest ones beyond `capacity`.
    fn keep(&mut self, line: AuditLine, capacity: usize) {
        self.kept.push_back(line);
        while self.kept.len() > capacity {
            self.kept.pop_front();
        }
    }
}

/// The audit log of a server.
pub struct AuditLog {
    lines: Mutex<AuditBuffer>,
    /// The maximum number of lines in memory.
    capacity: usize,
    gathered: refusal_aggregation::RefusalAggregator,
    file: Option<AuditWriter>,
    on_failure: AuditFailurePolicy,
    /// The number of lines so far, for readers that follow the log.
    appended: watch::Sender<u64>,
    /// The engine, which records the lines in its journal.
    engine: OnceLock<Weak<Engine>>,
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
    /// Lines that memory no longer holds.
    pub dropped: u64,
    /// The counters of the file writer.
    pub file: writer::WriterStats,
    /// Refusals without a line of their own.
    pub gathered: u64,
}

impl AuditLog {
    /// The default maximum of lines in memory.
    pub const DEFAULT: usize = 4096;

    /// Returns an audit log in memory that keeps this many lines.
    #[must_use]
    pub fn new(most: usize) -> Self {
        Self {
            lines: Mutex::default(),
            capacity: most.max(1),
            gathered: refusal_aggregation::RefusalAggregator::default(),
            file: None,
            on_failure: AuditFailurePolicy::default(),
            appended: watch::Sender::default(),
            engine: OnceLock::new(),
        }
    }

    /// Records every line in the journal of `engine` from now on.
    pub fn record_lines_in_journal(&self, engine: &Arc<Engine>) {
        let _ = self.engine.set(Arc::downgrade(engine));
    }

    /// Also appends every line to the file at `path`.
    ///
    /// # Errors
    /// If the file cannot be opened for appending.
    pub fn with_file(self, path: &Path, clock: Clock) -> std::io::Result<Self> {
        let file = AuditWriter::start(AuditFileSink::open(path)?, path, clock)?;
        Ok(Self { file: Some(file), ..self })
    }

    /// Sets the policy for the time while the file cannot be written.
    #[must_use]
    pub fn with_failure_policy(self, on_failure: AuditFailurePolicy) -> Self {
        Self { on_failure, ..self }
    }

    /// Waits until a change may be made.
    ///
    /// # Errors
    /// The reason why earlier lines cannot be written, if the policy refuses changes then.
    pub(crate) async fn wait_until_changes_allowed(&self) -> Result<(), String> {
        let Some(file) = self.file.as_ref().filter(|_| self.on_failure == AuditFailurePolicy::Refuse) else {
            return Ok(());
        };
        if file.write_error().is_none() && file.wait_until_lines_durable(DISK_TIMEOUT).await {
            return Ok(());
        }
        Err(file.write_error().unwrap_or_else(|| "it does not take lines in time".into()))
    }

    /// Waits until the lines so far are on the disk, but not while the disk fails or hangs.
    pub(crate) async fn wait_until_lines_durable(&self) {
        if let Some(file) = self.file.as_ref().filter(|file| file.write_error().is_none()) {
            file.wait_until_lines_durable(DISK_TIMEOUT).await;
        }
    }

    /// Returns why lines do not reach the file; `None` if they do.
    pub(crate) fn write_error(&self) -> Option<String> {
        self.file.as_ref().and_then(AuditWriter::write_error)
    }

    /// Opens the file again: log rotation may have replaced it.
    pub fn reopen_file(&self) {
        if let Some(file) = &self.file {
            file.request_reopen();
        }
    }

    /// Waits, for `within` at most, until the last lines are on the disk. Called when the server stops.
    pub async fn wait_for_last_lines(&self, within: Duration) {
        let Some(file) = &self.file else { return };
        if !file.wait_until_lines_durable(within).await {
            let lines = file.stats().queued;
            tracing::error!(lines, "the last lines of the audit are not in its file");
        }
    }

    fn lock_lines(&self) -> MutexGuard<'_, AuditBuffer> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn stats(&self) -> AuditStats {
        let (kept_max, gathered) = (self.capacity, self.gathered.aggregated_count());
        let file = self.file.as_ref().map(AuditWriter::stats).unwrap_or_default();
        let lines = self.lock_lines();
        let kept = lines.kept.len();
        let dropped = lines.last.saturating_sub(kept as u64);
        AuditStats { lines: lines.counts, kept, kept_max, dropped, file, gathered }
    }

    pub(crate) fn record(&self, at: Timestamp, deed: AuditEntry, outcome: AuditOutcome, detail: String) {
        self.record_with_repetitions(at, deed, outcome, detail, 1);
    }

    fn record_with_repetitions(
        &self,
        at: Timestamp,
        deed: AuditEntry,
        outcome: AuditOutcome,
        detail: String,
        times: u64,
    ) {
        let AuditEntry { actor, role, job, act, subject, reason } = deed;
        let (subject, detail) = (truncate_to_line_length(subject), truncate_to_line_length(detail));
        let mut lines = self.lock_lines();
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
            crate::text::escape_to_one_line(&line.subject),
            crate::text::escape_to_one_line(&line.detail)
        );
        // The held lock keeps the lines in the order of their numbers. `push` never blocks.
        if let Some(file) = &self.file {
            file.queue_line(&line);
        }
        let engine = self.engine.get().and_then(Weak::upgrade);
        let note = engine.as_ref().and_then(|_| serde_json::to_vec(&line).ok());
        lines.keep(line, self.capacity);
        self.appended.send_replace(number);
        // A snapshot copies the lines under the engine's lock. So that lock must not be taken while the lines are locked.
        drop(lines);
        if let (Some(engine), Some(note)) = (engine, note) {
            engine.record_note(Self::NAME, &note);
        }
    }

    /// Audits a refusal: the first one of a key at once, further ones as one line a minute. It must be called
    /// within a tokio runtime, whose timer it uses.
    pub(crate) fn record_refusal_aggregated(
        self: &Arc<Self>,
        clock: Clock,
        source: String,
        deed: AuditEntry,
        detail: String,
    ) {
        let Some((source, deed, detail)) = self.gathered.count_or_return_first_refusal(source, deed, detail)
        else {
            return;
        };
        self.record(clock.now(), deed, AuditOutcome::Refused, detail);
        let audit = Arc::downgrade(self);
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(refusal_aggregation::AGGREGATION_WINDOW).await;
                // If the audit log is gone, there is nothing to write to.
                let Some(audit) = audit.upgrade() else { return };
                if !audit.flush_pending_refusals_of(clock, &source) {
                    return;
                }
            }
        });
    }

    fn flush_pending_refusals_of(&self, clock: Clock, source: &str) -> bool {
        let Some((times, deed, detail)) = self.gathered.take_pending_refusals(source) else { return false };
        self.record_with_repetitions(clock.now(), deed, AuditOutcome::Refused, detail, times);
        true
    }

    /// Writes the lines that are still pending. Called when the server stops.
    pub fn flush_all_pending_refusals(&self, clock: Clock) {
        for source in self.gathered.pending_keys() {
            self.flush_pending_refusals_of(clock, &source);
        }
    }

    /// Returns the number of the last line; 0 if there is none.
    pub(crate) fn last_line_number(&self) -> u64 {
        self.lock_lines().last
    }

    /// Returns a receiver that changes with every new line.
    pub(crate) fn subscribe_to_line_count(&self) -> watch::Receiver<u64> {
        self.appended.subscribe()
    }

    /// Returns the latest `limit` lines for which `wanted` holds, the latest first.
    pub(crate) fn latest_lines(&self, limit: usize, wanted: impl Fn(&AuditLine) -> bool) -> Vec<AuditLine> {
        let lines = self.lock_lines();
        lines.kept.iter().rev().filter(|line| wanted(line)).take(limit).cloned().collect()
    }

    pub(crate) fn page_of_lines_after(
        &self,
        after: u64,
        limit: usize,
        wanted: impl Fn(&AuditLine) -> bool,
    ) -> AuditPage {
        let lines = self.lock_lines();
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

/// Truncates a text to the length that a line may hold: requests may be long, and many lines are kept.
fn truncate_to_line_length(mut text: String) -> String {
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
    use crate::coordination::{Actor, ActorOrigin};
    use crate::service::role::AccessRole;

    #[tokio::test]
    async fn lines_are_numbered_kept_within_bounds_and_appended_to_the_file() {
        let path = std::env::temp_dir().join(format!("muster-audit-{}", std::process::id()));
        std::fs::write(&path, "earlier\n").unwrap();
        const LINES_KEPT: usize = 8;
        let audit = AuditLog::new(LINES_KEPT).with_file(&path, Clock::start()).unwrap();
        let deed = |subject: &str| AuditEntry {
            actor: Actor { who: "alice".into(), address: None, means: ActorOrigin::Api },
            role: Some(AccessRole::Operator),
            job: None,
            act: "exclude",
            subject: subject.into(),
            reason: None,
        };
        audit.record(Timestamp(1), deed("task 1"), AuditOutcome::Done, "exclusion 1".into());
        audit.record(Timestamp(2), deed("task 2"), AuditOutcome::Refused, "no".into());
        let page = audit.page_of_lines_after(0, 1, |_| true);
        assert_eq!((page.lines[0].subject.as_str(), page.next), ("task 1", 1));
        let page = audit.page_of_lines_after(1, 10, |_| true);
        assert_eq!((page.lines[0].number, page.next, page.gap), (2, 2, false));
        audit.wait_until_lines_durable().await;
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!((lines.len(), lines[0]), (3, "earlier"), "{text}");
        assert!(lines[2].contains("\"outcome\":\"refused\""), "{text}");
        audit.record(Timestamp(3), deed(&"ü".repeat(9_999)), AuditOutcome::Done, String::new());
        let long = audit.page_of_lines_after(2, 1, |_| true).lines.remove(0);
        assert!(long.subject.len() < 1_100 && long.subject.ends_with('…'));
        for _ in 0..LINES_KEPT {
            audit.record(Timestamp(3), deed("x"), AuditOutcome::Done, String::new());
        }
        assert!(audit.page_of_lines_after(0, 1, |_| true).gap);
        let figures = audit.stats();
        assert_eq!((figures.kept, figures.kept_max), (LINES_KEPT, LINES_KEPT));
        assert_eq!((figures.lines, figures.dropped, figures.file.lost), ([10, 1], 3, 0));
    }
}
