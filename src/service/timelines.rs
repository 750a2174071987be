//! The timeline of each job: what happened to its tasks, and which changes are consequences of the first cause of a
//! failure.
//!
//! [`Timelines`] is an [`Observer`]: the driver passes each event to it. The driver also retains events, but frequent
//! barriers displace older events there. In a timeline, a barrier has an entry only if it fails, or if it passes
//! while a member is missing. Begin at [`Timelines`].

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};

use super::records_by_run::{BoundedRecord, RecordBounds, RecordsByRun};
use super::saved_contents;
use crate::coordination::{
    BarrierRecordWithArrivals, EventKind, FailureClass, JobEvent, JobId, PASSED_WITHOUT_EXCLUDED, RunNumber,
    RunOutcome, TaskId, Timestamp, barrier_label,
};
use crate::engine::{ContentsSerialiser, Observer, PersistentObserver};
use crate::text::{escape_to_one_line, truncate_text};

/// The maximum number of entries of a run.
pub const TIMELINE_ENTRIES_MAX: usize = 400;
/// The maximum weight of the entries of a job. An entry weighs [`ENTRY_WEIGHT`] and as much as its tasks, of four bytes
/// each. So a job has at most 1,600 entries, and all tasks of all its entries take at most 16 MB.
const WEIGHT_MAX: usize = 4_000_000;
const ENTRY_WEIGHT: usize = 2_500;
/// The maximum number of tasks of a merged entry: as many as the largest job has.
const MERGED_TASKS_MAX: usize = 1_000_000;
/// More entries than any job can have had.
const ADDED_MAX: u64 = 1 << 62;
/// The maximum number of characters of a barrier's name.
const BARRIER_NAME_CHARS: usize = 120;
/// The entries that are looked through for one that says the same.
const KNOWN_MAX: usize = 64;
/// Consecutive changes of many tasks are one entry if they are no further apart than this, in microseconds:
/// the first is for normal changes, the second for trouble.
const MERGE_WITHIN_US: u64 = 60_000_000;
const MERGE_TROUBLE_WITHIN_US: u64 = 1_000_000;

/// The relation of an entry to the failure of its run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum CausalRole {
    /// The first cause.
    Cause,
    /// A consequence of the first cause.
    Consequence,
    /// Neither.
    Plain,
}

/// How serious a change is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum TimelineTone {
    /// A normal change.
    Calm,
    /// A change that an operator should know of.
    Info,
    /// A change that needs attention.
    Warning,
    /// A failure.
    Bad,
}

/// The kind of an entry, as in [`EventKind::kind`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
struct EntryKind(&'static str);

impl<'de> Deserialize<'de> for EntryKind {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let name = String::deserialize(deserializer)?;
        let known = EventKind::NAMES.into_iter().find(|known| *known == name);
        known.map(Self).ok_or_else(|| D::Error::custom("an unknown kind of event"))
    }
}

/// A change of one task, or of many tasks at once.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TimelineEntry {
    /// Its number among all entries of the job.
    pub number: u64,
    /// The time of the first change.
    pub at: Timestamp,
    last_at: Timestamp,
    /// The run of the changes.
    pub run: RunNumber,
    kind: EntryKind,
    /// The relation to the failure of the run.
    pub role: CausalRole,
    /// How serious the changes are.
    pub tone: TimelineTone,
    /// It counts as a consequence if a failure came before it.
    is_trouble: bool,
    /// The tasks.
    pub tasks: Vec<TaskId>,
    /// The reason.
    pub text: String,
    /// The task of the text, if the text is not about all tasks.
    pub latest: Option<TaskId>,
    /// The key that entries must share to be merged; `None` for entries that are never merged.
    merge_key: Option<String>,
}

impl TimelineEntry {
    fn from_event(event: &JobEvent) -> Option<Self> {
        let tone = event_tone(&event.what)?;
        Some(Self {
            number: 0,
            at: event.at,
            last_at: event.at,
            run: event.run,
            kind: EntryKind(event.what.kind()),
            role: if matches!(event.what, EventKind::FirstCause { .. }) {
                CausalRole::Cause
            } else {
                CausalRole::Plain
            },
            tone,
            is_trouble: tone == TimelineTone::Bad || matches!(event.what, EventKind::TaskSuspected { .. }),
            tasks: event.what.tasks(),
            text: event_text(event),
            latest: None,
            merge_key: merge_key(event),
        })
    }

    /// Returns the kind of the changes, as in [`EventKind::kind`].
    #[must_use]
    pub fn kind(&self) -> &'static str {
        self.kind.0
    }

    /// Returns the tasks to which the change happened: a barrier fails for all, and its entry has the tasks that had not arrived, which
    /// its text names.
    #[must_use]
    pub fn tasks_it_happened_to(&self) -> &[TaskId] {
        if self.kind.0 == "barrier-failed" { &[] } else { &self.tasks }
    }

    /// Returns whether a later change is of the same kind, soon enough after this one, to be merged with it.
    fn can_be_merged_with(&self, later: &Self) -> bool {
        let Some(shared) = &later.merge_key else { return false };
        let within = if shared.is_empty() { MERGE_WITHIN_US } else { MERGE_TROUBLE_WITHIN_US };
        (&self.merge_key, self.kind, self.role) == (&later.merge_key, later.kind, later.role)
            && later.at.0.saturating_sub(self.last_at.0) < within
            && self.tasks.len() + later.tasks.len() <= MERGED_TASKS_MAX
    }

    fn merge(&mut self, later: Self) {
        self.last_at = later.at;
        // The merged text must hold for all tasks; otherwise it names the latest one.
        if self.text != later.text {
            self.latest = later.tasks.first().copied();
            self.text = later.text;
        }
        self.tasks.extend(later.tasks);
    }
}

impl BoundedRecord for Arc<TimelineEntry> {
    const BOUNDS: RecordBounds = RecordBounds { records_of_run: TIMELINE_ENTRIES_MAX, weight: WEIGHT_MAX };

    fn weight(&self) -> usize {
        ENTRY_WEIGHT + self.tasks.len()
    }
}

/// Returns the tone of a change; `None` if it has no entry.
fn event_tone(what: &EventKind) -> Option<TimelineTone> {
    Some(match what {
        // The exclusion has an entry of its own.
        EventKind::BarrierStarted { .. } | EventKind::TaskFailed { class: FailureClass::Excluded, .. } => {
            return None;
        }
        EventKind::BarrierPassed { without, .. } if without.is_empty() => return None,
        EventKind::FirstCause { .. } | EventKind::TaskFailed { .. } | EventKind::BarrierFailed { .. } => {
            TimelineTone::Bad
        }
        EventKind::RunEnded { outcome } if *outcome != RunOutcome::Completed => TimelineTone::Bad,
        EventKind::TaskSuspected { .. }
        | EventKind::TaskSuperseded { .. }
        | EventKind::Fenced { .. }
        | EventKind::Excluded { .. }
        | EventKind::RegistrationRefused { .. }
        | EventKind::FindingOpened { .. }
        | EventKind::TransferFailed { .. }
        | EventKind::JobDeleted { .. } => TimelineTone::Warning,
        EventKind::RegistrationWithdrawn { .. }
        | EventKind::DrainRequested { .. }
        | EventKind::PreemptionNoticed
        | EventKind::ServiceRestarted
        | EventKind::BarrierPassed { .. } => TimelineTone::Info,
        _ => TimelineTone::Calm,
    })
}

/// Returns the key that changes must share to be merged into one entry: an empty one for normal changes, the
/// cause for failures. Other changes are never merged.
fn merge_key(event: &JobEvent) -> Option<String> {
    match &event.what {
        EventKind::TaskRegistering { .. }
        | EventKind::RegistrationWithdrawn { .. }
        | EventKind::TaskConnected { .. }
        | EventKind::TaskDisconnected { .. }
        | EventKind::TaskReturned { .. } => Some(String::new()),
        EventKind::TaskFailed { class, .. } => Some(class.name().to_owned()),
        EventKind::TaskSuspected { .. } => Some("suspected".to_owned()),
        _ => None,
    }
}

/// Returns the reason of a change, with the barrier it is about.
fn event_text(event: &JobEvent) -> String {
    let reason = escape_to_one_line(&event.reason);
    match &event.what {
        EventKind::BarrierFailed { barrier, counter, .. }
        | EventKind::BarrierPassed { barrier, counter, .. } => {
            let used = if *counter > 0 { format!(" (use {counter})") } else { String::new() };
            format!("{}{used}: {reason}", barrier_display_name(barrier))
        }
        _ => reason.into_owned(),
    }
}

/// Returns the name of a barrier for people, on one line and shortened: those of the service itself by their purpose.
#[must_use]
pub fn barrier_display_name(id: &str) -> String {
    truncate_text(&escape_to_one_line(barrier_label(id)), BARRIER_NAME_CHARS, "…")
}

/// The timeline of one job, over its latest runs.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobTimeline {
    entries: RecordsByRun<Arc<TimelineEntry>>,
    /// The run whose first cause is in the timeline.
    run_with_cause: Option<RunNumber>,
    /// The number of entries ever.
    added: u64,
}

impl JobTimeline {
    /// Returns whether a restored timeline can be continued.
    fn is_valid(&self) -> bool {
        self.added <= ADDED_MAX
            && self.entries.with_runs().all(|(run, entry)| entry.run == run && entry.number <= self.added)
    }

    fn add_or_merge(&mut self, mut entry: TimelineEntry) {
        if entry.role == CausalRole::Cause {
            self.run_with_cause = Some(entry.run);
            self.mark_consequences_of(&entry);
        } else if self.run_with_cause == Some(entry.run) && entry.is_trouble {
            entry.role = CausalRole::Consequence;
        }
        if self.tells_what_is_known(&entry) {
            return;
        }
        let newest = self.entries.of_run(entry.run).and_then(|of_run| of_run.records.back());
        if newest.is_some_and(|newest| newest.can_be_merged_with(&entry)) {
            self.entries.change_newest(entry.run, |newest| Arc::make_mut(newest).merge(entry));
            return;
        }
        self.added += 1;
        entry.number = self.added;
        self.entries.add(entry.run, Arc::new(entry));
    }

    /// Returns whether an entry says of a barrier that it passed without tasks that are excluded, and a recent one says so of the same
    /// tasks. A job that goes on without a host has such a barrier with every step.
    fn tells_what_is_known(&self, entry: &TimelineEntry) -> bool {
        let tells_it = |entry: &TimelineEntry| {
            entry.kind == EntryKind("barrier-passed") && entry.text.ends_with(PASSED_WITHOUT_EXCLUDED)
        };
        let is_known = |known: &Arc<TimelineEntry>| known.tasks == entry.tasks && tells_it(known);
        tells_it(entry)
            && self
                .entries
                .of_run(entry.run)
                .is_some_and(|of_run| of_run.records.iter().rev().take(KNOWN_MAX).any(is_known))
    }

    /// Marks failures at the very time of a first cause as its consequences, although their events came
    /// before it.
    fn mark_consequences_of(&mut self, cause: &TimelineEntry) {
        for entry in self.entries.newest_records_mut(cause.run).take_while(|entry| entry.at == cause.at) {
            if entry.is_trouble && entry.tasks_it_happened_to() != cause.tasks {
                Arc::make_mut(entry).role = CausalRole::Consequence;
            }
        }
    }

    /// Returns the entries of all runs, the latest first.
    pub fn latest_first(&self) -> impl Iterator<Item = &TimelineEntry> + Clone {
        self.entries.latest_first().map(Arc::as_ref)
    }

    /// Returns the timeline of one run alone.
    #[must_use]
    pub fn of_run(&self, run: RunNumber) -> Self {
        Self { entries: self.entries.only_run(run), ..self.clone() }
    }

    /// Returns whether older entries were dropped.
    #[must_use]
    pub fn is_truncated(&self) -> bool {
        self.entries.is_truncated()
    }
}

/// The timelines of all jobs.
///
/// As saved contents, an entry takes about 50 bytes, its text and up to 3 bytes for each of its tasks; the entries of a
/// job take up to 12 MB for their tasks.
#[derive(Debug, Default)]
pub struct Timelines(Mutex<BTreeMap<JobId, JobTimeline>>);

impl Timelines {
    fn lock_timelines(&self) -> MutexGuard<'_, BTreeMap<JobId, JobTimeline>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the timeline of a job.
    #[must_use]
    pub fn timeline_of(&self, job: JobId) -> JobTimeline {
        self.lock_timelines().get(&job).cloned().unwrap_or_default()
    }
}

impl Observer for Timelines {
    fn on_event(&self, event: &JobEvent) {
        if matches!(event.what, EventKind::JobDeleted { .. }) {
            self.lock_timelines().remove(&event.job);
        } else if let Some(entry) = TimelineEntry::from_event(event) {
            self.lock_timelines().entry(event.job).or_default().add_or_merge(entry);
        }
    }

    fn on_barrier_ended(&self, _ending: &Arc<BarrierRecordWithArrivals>) {}
}

impl PersistentObserver for Timelines {
    fn name(&self) -> &'static str {
        "timelines"
    }

    fn copy_contents(&self) -> ContentsSerialiser {
        saved_contents::serialise_later(self.lock_timelines().clone())
    }

    fn restore(&self, bytes: &[u8]) -> Result<(), String> {
        let jobs = saved_contents::restore_jobs(bytes, |_, timeline: &JobTimeline| timeline.is_valid())?;
        *self.lock_timelines() = jobs;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn timeline_entry(kind: &'static str, task: i32, tone: TimelineTone, role: CausalRole) -> TimelineEntry {
        let (at, run) = (Timestamp(task.unsigned_abs().into()), RunNumber(1));
        let (tasks, text, shared) = (vec![TaskId(task)], kind.into(), Some(kind.into()));
        let (is_trouble, latest) = (tone == TimelineTone::Bad, None);
        TimelineEntry {
            number: 0,
            at,
            last_at: at,
            run,
            kind: EntryKind(kind),
            role,
            tone,
            is_trouble,
            tasks,
            text,
            latest,
            merge_key: shared,
        }
    }

    fn record_task_failed_event(
        timelines: &Timelines,
        at: u64,
        task: i32,
        class: FailureClass,
        reason: &str,
    ) {
        let what = EventKind::TaskFailed { task: TaskId(task), class };
        let (run, reason) = (RunNumber(1), reason.to_owned());
        timelines.on_event(&JobEvent { at: Timestamp(at), job: JobId(0), run, what, reason });
    }

    #[test]
    fn a_job_that_goes_on_without_excluded_tasks_is_told_once() {
        let timelines = Timelines::default();
        let pass = |at: u64, tasks: &[i32], reason: &str| {
            let barrier = "train/step".into();
            let without = tasks.iter().copied().map(TaskId).collect();
            let what = EventKind::BarrierPassed { barrier, counter: at as i64, without };
            let (run, reason) = (RunNumber(1), reason.to_owned());
            timelines.on_event(&JobEvent { at: Timestamp(at), job: JobId(0), run, what, reason });
        };
        let count = || timelines.timeline_of(JobId(0)).latest_first().count();
        (1..40).for_each(|at| pass(at, &[4, 5], PASSED_WITHOUT_EXCLUDED));
        assert_eq!(count(), 1);
        // Others, and other reasons, are news.
        pass(40, &[4, 5, 6], PASSED_WITHOUT_EXCLUDED);
        pass(41, &[4, 5], "passed without members that restarted after it began; all others had arrived");
        assert_eq!(count(), 3);
        (42..50).for_each(|at| pass(at, &[4, 5, 6], PASSED_WITHOUT_EXCLUDED));
        assert_eq!(count(), 3);
    }

    #[test]
    fn failures_are_one_line_only_where_they_have_one_cause() {
        let timelines = Timelines::default();
        record_task_failed_event(&timelines, 0, 1, FailureClass::ConnectionLost, "the host is gone");
        record_task_failed_event(&timelines, 900_000, 2, FailureClass::ConnectionLost, "the host is gone");
        record_task_failed_event(
            &timelines,
            1_000_000,
            3,
            FailureClass::HeartbeatTimeout,
            "no heartbeat for 100 s",
        );
        record_task_failed_event(
            &timelines,
            2_500_000,
            4,
            FailureClass::HeartbeatTimeout,
            "no heartbeat for 101 s",
        );
        record_task_failed_event(
            &timelines,
            2_600_000,
            5,
            FailureClass::Excluded,
            "its exclusion is told instead",
        );
        let told: Vec<_> = timelines
            .timeline_of(JobId(0))
            .latest_first()
            .map(|m| (m.tasks.clone(), m.text.clone()))
            .collect();
        let wanted = [
            (vec![TaskId(4)], "no heartbeat for 101 s"),
            (vec![TaskId(3)], "no heartbeat for 100 s"),
            (vec![TaskId(1), TaskId(2)], "the host is gone"),
        ];
        assert_eq!(told, wanted.map(|(tasks, text)| (tasks, text.to_owned())));
    }

    #[test]
    fn simultaneous_events_are_one_line_and_consequences_name_their_cause() {
        let mut happened = JobTimeline::default();
        for task in 0..3 {
            happened.add_or_merge(timeline_entry(
                "task-connected",
                task,
                TimelineTone::Calm,
                CausalRole::Plain,
            ));
        }
        happened.add_or_merge(timeline_entry("first-cause", 1, TimelineTone::Bad, CausalRole::Cause));
        for task in 0..3 {
            happened.add_or_merge(timeline_entry("task-failed", task, TimelineTone::Bad, CausalRole::Plain));
        }
        let all: Vec<TaskId> = (0..3).map(TaskId).collect();
        let told: Vec<_> = happened.latest_first().map(|m| (m.kind(), m.role, m.tasks.clone())).collect();
        assert_eq!(
            told,
            [
                ("task-failed", CausalRole::Consequence, all.clone()),
                ("first-cause", CausalRole::Cause, vec![TaskId(1)]),
                ("task-connected", CausalRole::Plain, all.clone()),
            ]
        );
    }

    #[test]
    fn the_tasks_of_all_entries_are_bounded() {
        let mut timeline = JobTimeline::default();
        // Changes of the same kind are merged for as long as they follow one another.
        for task in 0..100 {
            let mut entry = timeline_entry("task-connected", task, TimelineTone::Calm, CausalRole::Plain);
            entry.tasks = vec![TaskId(task); WEIGHT_MAX / 50];
            entry.merge_key = (task < 40).then(String::new);
            timeline.add_or_merge(entry);
        }
        let kept: usize = timeline.latest_first().map(|entry| entry.tasks.len()).sum();
        assert!((WEIGHT_MAX - WEIGHT_MAX / 20..=WEIGHT_MAX).contains(&kept), "{kept}");
        assert!(timeline.is_truncated());
    }

    #[test]
    fn restored_entries_have_known_kinds_and_numbers() {
        let restore = |kind: &'static str, added: u64| {
            let mut timeline = JobTimeline::default();
            timeline.add_or_merge(timeline_entry(kind, 1, TimelineTone::Calm, CausalRole::Plain));
            timeline.added = added;
            let bytes = postcard::to_stdvec(&BTreeMap::from([(JobId(0), timeline.clone())])).unwrap();
            let timelines = Timelines::default();
            timelines.restore(&bytes).map(|()| assert_eq!(timelines.timeline_of(JobId(0)), timeline))
        };
        assert_eq!(restore("task-connected", 1), Ok(()));
        assert!(restore("task-exploded", 1).is_err());
        assert!(restore("task-connected", 0).is_err());
        assert!(restore("task-connected", u64::MAX).is_err());
    }
}
