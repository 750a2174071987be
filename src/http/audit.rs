//! The audit: who did what, why, from where, and what came of it. Lines are only ever added.
//!
//! The last lines are kept in memory; with `--audit-file` every line is also written to a file, as JSON, and is on the
//! disk before the act is answered.

use std::collections::VecDeque;
use std::fs::File;
use std::io::Write as _;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use axum::Json;
use axum::extract::State;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use utoipa::{IntoParams, ToSchema};

use super::extract::Params;
use super::page::limit;
use super::{Problem, Site};
use crate::coordination::{Actor, JobName, Reason, Timestamp};

/// How many lines are kept in memory.
const LINES_KEPT: usize = 4096;

/// What came of an act.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum AuditOutcome {
    /// It was done.
    Done,
    /// It was refused.
    Refused,
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
    /// In which job.
    pub job: Option<JobName>,
    /// What, in a word: `exclude`, `readmit`, `drain`, …
    pub act: String,
    /// Upon what.
    pub subject: String,
    /// Why.
    pub reason: Option<Reason>,
    /// What came of it.
    pub outcome: AuditOutcome,
    /// Why it was refused, or what there is now that was not before.
    pub detail: String,
}

/// Some lines of the audit, oldest first.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AuditPage {
    /// The lines.
    pub lines: Vec<AuditLine>,
    /// What to give as `after` for those that follow.
    pub next: u64,
    /// Lines that are no longer in memory may be missing before the first.
    pub gap: bool,
}

/// An act before it is numbered.
pub(super) struct Deed {
    pub actor: Actor,
    pub job: Option<JobName>,
    pub act: &'static str,
    pub subject: String,
    pub reason: Option<Reason>,
}

#[derive(Default)]
struct Lines {
    kept: VecDeque<AuditLine>,
    last: u64,
    file: Option<File>,
}

/// The audit of a server.
#[derive(Default)]
pub struct Audit {
    lines: Mutex<Lines>,
    /// How many acts there have been, for who follows.
    grown: watch::Sender<u64>,
}

impl Audit {
    /// An audit that also appends to a file.
    ///
    /// # Errors
    /// If the file cannot be opened for that.
    pub fn to_file(path: &Path) -> std::io::Result<Self> {
        let file = File::options().create(true).append(true).open(path)?;
        let lines = Mutex::new(Lines { file: Some(file), ..Lines::default() });
        Ok(Self { lines, ..Self::default() })
    }

    pub(super) fn record(&self, at: Timestamp, deed: Deed, outcome: AuditOutcome, detail: String) {
        let Deed { actor, job, act, subject, reason } = deed;
        let (subject, detail) = (cut(subject), cut(detail));
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        lines.last += 1;
        let number = lines.last;
        let line =
            AuditLine { number, at, actor, job, act: act.to_owned(), subject, reason, outcome, detail };
        tracing::info!(
            target: "muster::audit",
            number,
            who = %line.actor,
            job = line.job.as_ref().map(JobName::as_str),
            act,
            outcome = if outcome == AuditOutcome::Done { "done" } else { "refused" },
            "{}: {}",
            crate::text::one_line(&line.subject),
            crate::text::one_line(&line.detail)
        );
        if let Some(file) = &mut lines.file
            && let Err(error) = append(file, &line)
        {
            // The act stands: to undo it because it cannot be written down would help nobody.
            tracing::error!(%error, number, "an act cannot be written to the audit file");
        }
        lines.kept.push_back(line);
        if lines.kept.len() > LINES_KEPT {
            lines.kept.pop_front();
        }
        self.grown.send_replace(number);
    }

    /// Tells of further acts.
    pub(super) fn follow(&self) -> watch::Receiver<u64> {
        self.grown.subscribe()
    }

    /// The latest lines that are wanted, the latest first.
    pub(super) fn latest(&self, limit: usize, wanted: impl Fn(&AuditLine) -> bool) -> Vec<AuditLine> {
        let lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        lines.kept.iter().rev().filter(|line| wanted(line)).take(limit).cloned().collect()
    }

    fn page(&self, after: u64, limit: usize, wanted: impl Fn(&AuditLine) -> bool) -> AuditPage {
        let lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
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
fn cut(mut text: String) -> String {
    const MOST: usize = 1 << 10;
    if text.len() > MOST {
        text.truncate(text.floor_char_boundary(MOST));
        text.push('…');
    }
    text
}

fn append(file: &mut File, line: &AuditLine) -> std::io::Result<()> {
    let mut text = serde_json::to_vec(line)?;
    text.push(b'\n');
    file.write_all(&text)?;
    file.sync_data()
}

/// Which lines of the audit are wanted.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct AuditQuery {
    /// The number of the last line that the caller has.
    #[serde(default)]
    after: u64,
    /// How many to give at most.
    limit: Option<usize>,
    /// Only acts upon this job.
    job: Option<String>,
    /// Only `done`, or only `refused`.
    #[param(value_type = Option<String>)]
    outcome: Option<AuditOutcome>,
}

/// Who did what, why, from where, and what came of it
#[utoipa::path(get, path = "/api/v1/audit", operation_id = "audit_list", tag = "audit", params(AuditQuery),
    responses((status = 200, body = AuditPage, description = "A page of the audit, oldest first")))]
pub(super) async fn list(
    State(site): State<Site>,
    Params(query): Params<AuditQuery>,
) -> Result<Json<AuditPage>, Problem> {
    let wanted = |line: &AuditLine| {
        let of_job = |job: &String| line.job.as_ref().is_some_and(|named| named.as_str() == job);
        query.job.as_ref().is_none_or(of_job) && query.outcome.is_none_or(|outcome| outcome == line.outcome)
    };
    Ok(Json(site.audit.page(query.after, limit(query.limit), wanted)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::coordination::Means;

    #[test]
    fn lines_are_numbered_kept_within_bounds_and_appended_to_the_file() {
        let path = std::env::temp_dir().join(format!("muster-audit-{}", std::process::id()));
        std::fs::write(&path, "earlier\n").unwrap();
        let audit = Audit::to_file(&path).unwrap();
        let deed = |subject: &str| Deed {
            actor: Actor { who: "alice".into(), address: None, means: Means::Api },
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
    }
}
