//! Renders one task: its incarnations, heartbeats and barriers, and the form that excludes it.
//!
//! `pages/exclusions.rs` handles the form. Begin at `show_task_page`.

use std::time::Duration;

use askama::Template;
use axum::extract::State;
use axum::response::Response;

use super::exclusions::{CompletedActionQuery, ExcludeForm};
use super::fragment::Fragment;
use super::frame::{NavEntry, PageFrame, PageUser, render_page};
use super::job::has_recent_arrival;
use super::job_head::render_head_fragment;
use super::links::JobPages;
use super::live_page::LivePage;
use super::snapshot::{JobSnapshot, task_address_text};
use super::status::{TaskStatus, awaited_key_text, barrier_display_name};
use super::task_table::gap_class_counts;
use super::timeline::TimelineScope;
use super::{amount, links, status, timeline, times, transfers};
use crate::coordination::{
    BarrierOutcome, BarrierRecord, Coordinator, Device, ExclusionView, HeartbeatGap, HostId, JobName,
    JobView, KeyEntry, RunNumber, TaskId, TaskView, Timestamp,
};
use crate::http::extractors::{JobPath, QueryParams, TaskInPath, ViewedRun};
use crate::http::runs::no_such_task;
use crate::http::{AppState, Problem};
use crate::service::findings::Finding;

/// The maximum number of keys that are searched for those the task wrote.
const KEYS_SEARCHED: usize = 20_000;
/// The maximum number of those on the page.
const KEYS_SHOWN: usize = 40;
/// The number of wide gaps in a row from which they are no accident.
const WIDE_MIN: usize = 3;
/// The maximum number of recent barriers on the page.
const MEETINGS_SHOWN: usize = 12;

#[derive(Template)]
#[template(path = "parts/task.html")]
struct TaskStateFragment<'a> {
    job: &'a JobPages,
    task: &'a TaskView,
    status: TaskStatus,
    /// The time since which it has its status.
    since: Timestamp,
    address: String,
    waits: Vec<String>,
    /// The keys that it waits for, and since when.
    keys: Vec<(String, Timestamp)>,
    awaited_at: Vec<(String, usize, usize)>,
    /// The findings about it.
    found: Vec<&'a Finding>,
    /// Its error: what happened, and the text that clients received.
    error: Option<(String, String)>,
    /// Its failure is a consequence of the first cause.
    follows: bool,
    /// Its error is the first cause.
    is_cause: bool,
}

#[derive(Template)]
#[template(path = "parts/pulse.html")]
struct HeartbeatFragment<'a> {
    task: &'a TaskView,
    classes: Vec<(String, u64)>,
    /// The same gaps over time.
    course: Vec<HeartbeatGap>,
    timeout: Duration,
    /// The median of the usual heartbeat intervals in the job, in microseconds.
    median_us: u64,
    wide_since: Option<Timestamp>,
    score: String,
}

impl<'a> HeartbeatFragment<'a> {
    fn new(site: &AppState, snapshot: &'a JobSnapshot, task: &'a TaskView) -> Self {
        let run = snapshot.view.run.number;
        let in_run = site.engine.read(|core, _| core.job(snapshot.id).and_then(|job| job.in_run(run)));
        let view = in_run.and_then(|in_run| in_run.reader().task(task.task));
        let course = view.map(|task| task.recent_gaps).unwrap_or_default();
        let pulses = snapshot.view.run.tasks.iter().filter_map(|task| task.pulse.as_ref());
        let mut usual: Vec<u64> = pulses.map(|pulse| pulse.interval_us).collect();
        let middle = usual.len() / 2;
        let median_us = match usual.is_empty() {
            true => 0,
            false => *usual.select_nth_unstable(middle).1,
        };
        Self {
            task,
            classes: task.pulse.as_ref().map(gap_class_counts).unwrap_or_default(),
            wide_since: wide_gaps_since(&course, median_us),
            course,
            timeout: snapshot.view.settings.heartbeat_timeout,
            median_us,
            score: task.straggling.as_ref().map(|it| format!("{:.2}", it.score)).unwrap_or_default(),
        }
    }

    fn timeout_us(&self) -> u128 {
        self.timeout.as_micros()
    }

    /// Returns a gap as a share of the timeout, in thousandths.
    fn gap_in_thousandths(&self, gap: &HeartbeatGap) -> u128 {
        (u128::from(gap.gap_us) * 1000 / self.timeout_us().max(1)).min(1000)
    }
}

/// Returns the time since which every gap has been wide compared with the median of the job; `None` if the
/// last gaps are not.
fn wide_gaps_since(course: &[HeartbeatGap], median_us: u64) -> Option<Timestamp> {
    let wide = |gap: &&HeartbeatGap| gap.gap_us >= median_us + median_us / 2;
    let last = course.iter().rev().take_while(wide).count();
    (median_us > 0 && last >= WIDE_MIN).then(|| course[course.len() - last].at)
}

/// The attendance of a task at consecutive instances of a barrier with the same outcome.
#[derive(Debug, PartialEq)]
struct BarrierAttendance {
    name: String,
    /// The first and the last of these instances, and how many there are.
    uses: (i64, i64),
    count: usize,
    passed: bool,
    rank: ArrivalRank,
    /// The minimum and maximum delay after the first arrival, in microseconds, if recorded.
    late_us: Option<(u64, u64)>,
    /// The time at which the last of them ended.
    ended: Timestamp,
}

impl BarrierAttendance {
    fn from_record(record: &BarrierRecord, task: TaskId, tasks: usize) -> Self {
        let arrival = record.latest.iter().find(|arrival| arrival.task == task);
        let late = arrival.map(|arrival| record.lateness_us(arrival));
        // The record of the latest arrivals includes the first one only if few tasks arrived.
        let late = if record.first == Some(task) { Some(0) } else { late };
        Self {
            name: barrier_display_name(&record.id),
            uses: (record.counter, record.counter),
            count: 1,
            passed: record.outcome == BarrierOutcome::Passed,
            rank: ArrivalRank::of_task(record, task, tasks),
            late_us: late.map(|us| (us, us)),
            ended: record.ended,
        }
    }

    /// Merges an earlier attendance into this one if both are alike. Returns whether it did.
    fn merge_earlier_if_alike(&mut self, earlier: &Self) -> bool {
        let alike = (&self.name, self.passed, self.rank) == (&earlier.name, earlier.passed, earlier.rank);
        if alike {
            self.uses.0 = earlier.uses.0;
            self.count += earlier.count;
            self.late_us = match (self.late_us, earlier.late_us) {
                (Some((least, most)), Some((low, high))) => Some((least.min(low), most.max(high))),
                (one, other) => one.or(other),
            };
        }
        alike
    }
}

/// The rank of a task's arrival at a barrier, as far as the record tells: it has the first arrival, the last
/// few, and the first few absent tasks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ArrivalRank {
    First,
    Last,
    Between,
    Never,
    NoMember,
    Unknown,
}

impl ArrivalRank {
    fn of_task(record: &BarrierRecord, task: TaskId, tasks: usize) -> Self {
        let place = record.latest.iter().position(|arrival| arrival.task == task);
        let all_named = record.arrived <= record.latest.len();
        let all_absent_named = record.absent() <= record.without.len();
        let everybody = record.members == tasks;
        match place {
            _ if record.without.contains(&task) => Self::Never,
            _ if record.first == Some(task) => Self::First,
            Some(0) => Self::Last,
            Some(_) => Self::Between,
            None if all_named && all_absent_named => Self::NoMember,
            None if all_named => Self::Never,
            // A member that is not absent has arrived.
            None if everybody && all_absent_named => Self::Between,
            None => Self::Unknown,
        }
    }

    fn text(&self) -> &'static str {
        match self {
            Self::First => "first",
            Self::Last => "last",
            Self::Between => "middle",
            Self::Never => "absent",
            Self::NoMember => "not a member",
            Self::Unknown => "not recorded",
        }
    }
}

/// Returns the attendance of a task at the recent barriers of its run, the latest first; consecutive equal
/// ones are one line.
fn recent_attendances(records: &[BarrierRecord], task: TaskId, tasks: usize) -> Vec<BarrierAttendance> {
    let mut meetings: Vec<BarrierAttendance> = Vec::new();
    for record in records {
        let one = BarrierAttendance::from_record(record, task, tasks);
        if !meetings.last_mut().is_some_and(|last| last.merge_earlier_if_alike(&one)) {
            meetings.push(one);
        }
    }
    meetings
}

#[derive(Template)]
#[template(path = "parts/meetings.html")]
struct BarrierAttendanceFragment<'a> {
    job: &'a JobPages,
    attendances: Vec<BarrierAttendance>,
    /// The number of further lines.
    more: usize,
}

/// The form that excludes or readmits the task.
#[derive(Template)]
#[template(path = "parts/act.html")]
struct TaskExclusionFormFragment<'a> {
    job: &'a JobName,
    user: &'a PageUser,
    id: TaskId,
    exclusion: Option<&'a ExclusionView>,
    recoverable: bool,
    form: ExcludeForm,
    host: Option<&'a HostId>,
}

impl<'a> TaskExclusionFormFragment<'a> {
    fn new(snapshot: &'a JobSnapshot, task: &'a TaskView, user: &'a PageUser) -> Self {
        let id = task.task;
        let peer = task.lives.iter().find_map(|life| life.peer);
        let covers = |exclusion: &&ExclusionView| exclusion.target.covers(id, peer.map(|peer| peer.ip()));
        let (job, recoverable) = (&snapshot.view.name, snapshot.view.settings.recoverable);
        let exclusion = snapshot.view.exclusions.iter().find(covers);
        let form = ExcludeForm { task: id.to_string(), ..ExcludeForm::default() };
        Self { job, user, id, exclusion, recoverable, form, host: task.host.as_ref() }
    }
}

/// Returns the fragments of the page for this user; `None` if the task does not exist.
pub(super) fn render_fragments(
    site: &AppState,
    snapshot: &JobSnapshot,
    user: &PageUser,
    id: TaskId,
) -> Result<Option<Vec<Fragment>>, Problem> {
    let Some(task) = snapshot.find_task(id) else { return Ok(None) };
    let run = &snapshot.view.run;
    let waited_for = run
        .barriers
        .iter()
        .filter(|barrier| barrier.missing.contains(&id) && !has_recent_arrival(snapshot, barrier));
    let state = TaskStateFragment {
        job: &snapshot.pages,
        task,
        status: snapshot.status_of(id),
        since: snapshot.status_since(task),
        address: task_address_text(task),
        waits: task.waits_at.iter().map(|id| barrier_display_name(id)).collect(),
        keys: task.waits_for.iter().map(|wait| (awaited_key_text(&wait.key), wait.since)).collect(),
        awaited_at: waited_for.map(|b| (barrier_display_name(&b.id), b.arrived, b.members)).collect(),
        found: snapshot.findings.iter().filter(|finding| finding.tasks.contains(&id)).collect(),
        error: status::failure_texts(task),
        follows: snapshot.is_consequence(id),
        is_cause: run.first_cause.as_ref().is_some_and(|cause| cause.task == Some(id)),
    };
    let pulse = HeartbeatFragment::new(site, snapshot, task);
    let mut meetings = recent_attendances(&run.recent_barriers, id, snapshot.task_count());
    let more = meetings.len().saturating_sub(MEETINGS_SHOWN);
    meetings.truncate(MEETINGS_SHOWN);
    // Of an ended run the keys are not kept, and nothing can be done about its tasks.
    let (act, keys) = match snapshot.pages.run {
        None => (
            Fragment::new("act", &TaskExclusionFormFragment::new(snapshot, task, user))?,
            render_written_keys_fragment(site, snapshot, id)?,
        ),
        Some(_) => (Fragment::empty("act"), Fragment::empty("task-keys")),
    };
    Ok(Some(vec![
        render_head_fragment(snapshot)?,
        Fragment::new("task", &state)?,
        act,
        Fragment::new("pulse", &pulse)?,
        transfers::render_task_fragment(snapshot, id)?,
        Fragment::new(
            "meetings",
            &BarrierAttendanceFragment { job: &snapshot.pages, attendances: meetings, more },
        )?,
        timeline::render_timeline_fragment(snapshot, TimelineScope::Task(id))?,
        render_devices_fragment(snapshot, run.devices.iter().filter(|device| device.task == id))?,
        keys,
    ]))
}

#[derive(Template)]
#[template(path = "parts/task-devices.html")]
struct DevicesFragment<'a> {
    job: &'a JobPages,
    devices: Vec<&'a Device>,
}

/// Renders these devices of a task or of a host.
pub(super) fn render_devices_fragment<'a>(
    snapshot: &'a JobSnapshot,
    devices: impl Iterator<Item = &'a Device>,
) -> Result<Fragment, Problem> {
    let devices = devices.collect();
    Fragment::new("task-devices", &DevicesFragment { job: &snapshot.pages, devices })
}

#[derive(Template)]
#[template(path = "parts/task-keys.html")]
struct TaskWrittenKeysFragment<'a> {
    job: &'a JobName,
    keys: Vec<(KeyEntry, String)>,
    /// All keys were searched, and not only the first ones.
    whole: bool,
    searched: usize,
}

impl TaskWrittenKeysFragment<'_> {
    fn encoded_key(&self, line: &KeyEntry) -> String {
        super::keys::encode_key_for_page_address(&line.key)
    }
}

/// Returns the keys that a task wrote. They are searched once a snapshot for all viewers.
fn render_written_keys_fragment(
    site: &AppState,
    snapshot: &JobSnapshot,
    id: TaskId,
) -> Result<Fragment, Problem> {
    let made = snapshot.cached_or_rendered_fragments(&format!("task-keys/{id}"), || {
        let look =
            |core: &Coordinator, _| Some(core.job(snapshot.id)?.list_keys(b"", b"", true, KEYS_SEARCHED));
        let lines = site.engine.read(look).unwrap_or_default();
        let wrote = lines.into_iter().filter(|line| line.written_by == Some(id)).take(KEYS_SHOWN);
        let keys = wrote.map(|line| {
            let name = String::from_utf8_lossy(&line.key).into_owned();
            (line, name)
        });
        let (job, searched) = (&snapshot.view.name, KEYS_SEARCHED);
        let whole = snapshot.view.run.keys <= searched;
        Ok(vec![Fragment::new(
            "task-keys",
            &TaskWrittenKeysFragment { job, keys: keys.collect(), whole, searched },
        )?])
    })?;
    made.first().cloned().ok_or_else(Problem::internal_error)
}

#[derive(Template)]
#[template(path = "task.html")]
struct TaskPageTemplate {
    page: PageFrame,
    view: JobView,
    id: TaskId,
}

/// Returns the page after an action, or with the error of its form.
pub(super) fn render_task_page(
    site: &AppState,
    job: &JobPath,
    run: Option<RunNumber>,
    user: PageUser,
    id: TaskId,
    did: &CompletedActionQuery,
) -> Result<Response, Problem> {
    let snapshot = JobSnapshot::capture_in_run(site, job, run)?;
    let missing = || no_such_task(job, id.0, snapshot.view.settings.tasks);
    let parts = render_fragments(site, &snapshot, &user, id)?.ok_or_else(missing)?;
    let clock = snapshot.page_clock();
    let (title, live) = (format!("Task {id} of {}", job.name), LivePage::Task { task: id.to_string() });
    let page = PageFrame::for_job_snapshot(user, NavEntry::Task, title, &snapshot, &live, parts)
        .with_notice(did.completed_action_message());
    render_page(&TaskPageTemplate { page, view: snapshot.view, id }, clock)
}

pub(super) async fn show_task_page(
    State(site): State<AppState>,
    job: JobPath,
    ViewedRun(run): ViewedRun,
    user: PageUser,
    TaskInPath(task): TaskInPath,
    QueryParams(did): QueryParams<CompletedActionQuery>,
) -> Result<Response, Problem> {
    render_task_page(&site, &job, run, user, task, &did)
}

/// Serves `GET /jobs/{job}/tasks/{task}/tip`: where a task is and for what it waits, which a picture shows beside the
/// pointer.
pub(super) async fn show_task_tip(
    State(site): State<AppState>,
    job: JobPath,
    ViewedRun(run): ViewedRun,
    TaskInPath(task): TaskInPath,
) -> Result<String, Problem> {
    // A pointer rests on many tasks, so no more than this one is read.
    let run = run.map(|run| run.0);
    let (found, tasks) =
        site.read_job_in_run(&job, run, |reader| (reader.task(task), reader.task_count()))?;
    let found = found.ok_or_else(|| no_such_task(&job, task.0, u32::try_from(tasks).unwrap_or(u32::MAX)))?;
    let host = found.host.as_ref().map(links::short_host_name);
    let address = Some(task_address_text(&found)).filter(|address| !address.is_empty());
    let mut told: Vec<String> = host.into_iter().chain(address).collect();
    let waits = found.waits_at.iter().map(|id| barrier_display_name(id));
    told.extend(waits.map(|name| format!("waits at {name}")));
    told.extend(found.why.as_deref().map(|why| status::shorten(why, 160)));
    Ok(told.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::coordination::{BarrierArrival, BarrierKind};

    /// Returns the record of a barrier of `members` tasks, in which those of `came` arrived a second apart.
    fn record(counter: i64, members: usize, came: &[i32], without: &[i32]) -> BarrierRecord {
        let ids = |numbers: &[i32]| numbers.iter().copied().map(TaskId).collect::<Vec<_>>();
        let arrivals =
            (1..).zip(ids(came)).map(|(at, task)| BarrierArrival { task, at: Timestamp(at * 1_000_000) });
        let mut latest: Vec<BarrierArrival> = arrivals.collect();
        latest.reverse();
        latest.truncate(8);
        BarrierRecord {
            id: "step".into(),
            counter,
            kind: BarrierKind::Client,
            began: Timestamp(1_000_000),
            ended: Timestamp(99_000_000),
            members,
            arrived: came.len(),
            first: ids(came).first().copied(),
            last: ids(came).last().copied(),
            skew_us: (came.len() as u64).saturating_sub(1) * 1_000_000,
            waited_us: 0,
            outcome: BarrierOutcome::Passed,
            without: ids(without).into_iter().take(8).collect(),
            latest,
        }
    }

    #[test]
    fn a_barrier_row_shows_only_recorded_values() {
        use ArrivalRank::{Between, First, Last, Never, NoMember, Unknown};
        let all: Vec<i32> = (0..100).collect();
        let came = |record: &BarrierRecord, task: i32, tasks: usize| {
            ArrivalRank::of_task(record, TaskId(task), tasks)
        };
        let whole = record(1, 100, &all, &[]);
        assert_eq!([0, 99, 95, 50].map(|task| came(&whole, task, 100)), [First, Last, Between, Between]);
        // The barrier may have other members than this task.
        assert_eq!(came(&whole, 50, 200), Unknown);
        let few = record(1, 3, &[4, 5], &[6]);
        assert_eq!([4, 5, 6, 7].map(|task| came(&few, task, 8)), [First, Last, Never, NoMember]);
        // Twenty tasks are absent and eight of them are named, so an unnamed task may have arrived or not.
        let torn = record(1, 100, &all[..80], &all[80..]);
        assert_eq!([85, 95, 40].map(|task| came(&torn, task, 100)), [Never, Unknown, Unknown]);
        let lonely = record(1, 100, &all[..4], &all[4..]);
        assert_eq!(came(&lonely, 95, 100), Never);
    }

    #[test]
    fn barriers_to_which_a_task_came_alike_are_one_line() {
        let late = |counter| record(counter, 3, &[0, 1, 2], &[]);
        let records = [late(9), late(8), record(7, 3, &[2, 0, 1], &[]), late(6)];
        let lines = recent_attendances(&records, TaskId(2), 3);
        let told: Vec<_> = lines.iter().map(|it| (it.uses, it.count, it.rank, it.late_us)).collect();
        let two = Some((2_000_000, 2_000_000));
        let expected = [
            ((8, 9), 2, ArrivalRank::Last, two),
            ((7, 7), 1, ArrivalRank::First, Some((0, 0))),
            ((6, 6), 1, ArrivalRank::Last, two),
        ];
        assert_eq!(told, expected);
    }

    #[test]
    fn one_wide_gap_is_an_accident_and_three_at_the_end_are_not() {
        let course = |gaps: &[u64]| -> Vec<HeartbeatGap> {
            (1..).zip(gaps).map(|(at, gap)| HeartbeatGap { at: Timestamp(at), gap_us: *gap }).collect()
        };
        assert_eq!(wide_gaps_since(&course(&[10, 10, 40, 10, 10]), 10), None);
        assert_eq!(wide_gaps_since(&course(&[10, 10, 15, 20, 30]), 10), Some(Timestamp(3)));
        assert_eq!(wide_gaps_since(&course(&[30, 30, 30, 10]), 10), None);
        assert_eq!(wide_gaps_since(&[], 10), None);
        assert_eq!(wide_gaps_since(&course(&[1, 1, 1]), 0), None);
    }
}
