//! Renders one host of a job: its tasks, the barriers that it delayed, its transfers, its devices, and the form that
//! excludes it.
//!
//! `pages/exclusions.rs` handles the form. Begin at `show_host_page`.

use askama::Template;
use axum::extract::State;
use axum::response::Response;

use super::exclusions::ExcludeForm;
use super::fragment::Fragment;
use super::frame::{NavEntry, PageFrame, PageUser, render_page};
use super::host_transfers::render_host_transfers_fragment;
use super::issues::{self, Issue};
use super::job_head::render_head_fragment;
use super::links::{JobPages, TaskLabel};
use super::live_page::LivePage;
use super::snapshot::JobSnapshot;
use super::status::{self, TaskStatus, barrier_display_name};
use super::task::render_devices_fragment;
use super::timeline::{TimelineScope, render_timeline_fragment};
use super::{amount, links, times};
use crate::coordination::{
    BarrierKind, BarrierOutcome, BarrierRecord, ExclusionView, HostIdSource, HostState, HostView, JobName,
    TaskId,
};
use crate::http::extractors::{HostInPath, JobPath, ViewedRun};
use crate::http::hosts::no_such_host;
use crate::http::{AppState, Problem};
use crate::service::reports::HostChecksView;

/// The maximum number of tasks on the page.
const TASKS_SHOWN: usize = 256;
/// The maximum number of barriers on the page.
const BARRIERS_SHOWN: usize = 12;
/// The maximum number of devices on the page.
const DEVICES_SHOWN: usize = 400;

#[derive(Template)]
#[template(path = "parts/host.html")]
struct HostStateFragment<'a> {
    job: &'a JobPages,
    host: &'a HostView,
    counts: Vec<(TaskStatus, usize)>,
    /// The issues about one of its tasks.
    found: Vec<Issue>,
    tasks: Vec<HostTaskRow>,
}

/// A task of the host.
struct HostTaskRow {
    label: TaskLabel,
    devices: usize,
    score: String,
    lateness_us: Option<u64>,
}

impl HostStateFragment<'_> {
    /// Returns what names the host, in words.
    fn named_by_text(&self) -> &'static str {
        match self.host.named_by {
            HostIdSource::Identity => "identity of its processes",
            HostIdSource::BootId => "boot ID of its kernel",
            HostIdSource::Address => "address of its tasks",
        }
    }
}

/// A barrier at which a task of the host was the last to arrive.
struct DelayedBarrier<'a> {
    record: &'a BarrierRecord,
    name: String,
}

#[derive(Template)]
#[template(path = "parts/host-barriers.html")]
struct DelayedBarriersFragment<'a> {
    job: &'a JobPages,
    delayed: Vec<DelayedBarrier<'a>>,
    /// The number of recent barriers of the run, and of those that the host delayed.
    recent: usize,
    count: usize,
}

/// The host checks of the native workers on the host.
#[derive(Template)]
#[template(path = "parts/host-checks.html")]
struct HostChecksFragment {
    /// The checks of the worker that told some.
    checks: Option<(TaskId, HostChecksView)>,
}

fn render_host_checks_fragment(snapshot: &JobSnapshot, host: &HostView) -> Result<Fragment, Problem> {
    let reports = &snapshot.records.reports;
    let told = |task: &TaskId| {
        let of_task = reports.transfers_of_task(snapshot.id, &snapshot.roster, *task)?;
        Some((*task, of_task.host_checks?))
    };
    // All workers of a host see the same host.
    Fragment::new("host-checks", &HostChecksFragment { checks: host.tasks.iter().find_map(told) })
}

/// The form that excludes the host, or the exclusions that keep it out.
#[derive(Template)]
#[template(path = "parts/host-act.html")]
struct HostExclusionFormFragment<'a> {
    job: &'a JobName,
    user: &'a PageUser,
    host: &'a HostView,
    exclusions: Vec<&'a ExclusionView>,
    recoverable: bool,
    form: ExcludeForm,
}

/// Returns the fragments of the page for this user; `None` if no task of the present run is on the host.
pub(super) fn render_fragments(
    snapshot: &JobSnapshot,
    user: &PageUser,
    name: &str,
) -> Result<Option<Vec<Fragment>>, Problem> {
    let Some(host) = snapshot.hosts.iter().find(|host| host.host.as_str() == name) else { return Ok(None) };
    let (view, run) = (&snapshot.view, &snapshot.view.run);
    let is_here = |task: &_| host.tasks.binary_search(task).is_ok();
    let mut found = issues::job_issues(snapshot);
    found.retain(|issue| issue.concerns_one_of(&host.tasks));
    let state = HostStateFragment {
        job: &snapshot.pages,
        host,
        counts: snapshot.status_counts_of(&host.tasks),
        found,
        tasks: host_task_rows(snapshot, host),
    };
    // As the statistics of arrivals count: processes start when they start.
    let counted = run.recent_barriers.iter().filter(|record| record.kind == BarrierKind::Client);
    let arrived_last = |record: &&BarrierRecord| record.last.as_ref().is_some_and(is_here);
    let delayed = counted.clone().filter(arrived_last);
    let barriers = DelayedBarriersFragment {
        job: &snapshot.pages,
        recent: counted.count(),
        count: delayed.clone().count(),
        delayed: delayed
            .take(BARRIERS_SHOWN)
            .map(|record| DelayedBarrier { record, name: barrier_display_name(&record.id) })
            .collect(),
    };
    let act = HostExclusionFormFragment {
        job: &view.name,
        user,
        host,
        exclusions: view.exclusions.iter().filter(|it| host.exclusions.contains(&it.id)).collect(),
        recoverable: view.settings.recoverable,
        form: ExcludeForm { host: host.host.to_string(), ..ExcludeForm::default() },
    };
    let devices = run.devices.iter().filter(|device| is_here(&device.task)).take(DEVICES_SHOWN);
    // Nothing can be done about an ended run.
    let act = match snapshot.pages.run {
        None => Fragment::new("host-act", &act)?,
        Some(_) => Fragment::empty("host-act"),
    };
    Ok(Some(vec![
        render_head_fragment(snapshot)?,
        Fragment::new("host", &state)?,
        act,
        render_timeline_fragment(snapshot, TimelineScope::Tasks(&host.tasks))?,
        Fragment::new("host-barriers", &barriers)?,
        render_host_transfers_fragment(snapshot, host)?,
        render_host_checks_fragment(snapshot, host)?,
        render_devices_fragment(snapshot, devices)?,
    ]))
}

/// Returns the tasks of a host, those in trouble first.
fn host_task_rows(snapshot: &JobSnapshot, host: &HostView) -> Vec<HostTaskRow> {
    let mut tasks = host.tasks.clone();
    tasks.sort_by_key(|task| (snapshot.status_of(*task), *task));
    tasks.truncate(TASKS_SHOWN);
    let row = |task: &_| {
        let straggling = snapshot.find_task(*task).and_then(|task| task.straggling.as_ref());
        HostTaskRow {
            label: snapshot.task_label(*task),
            devices: snapshot.device_count_of(*task),
            score: straggling.map_or_else(String::new, |it| format!("{:.2}", it.score)),
            lateness_us: straggling.map(|it| it.lateness_us),
        }
    };
    tasks.iter().map(row).collect()
}

#[derive(Template)]
#[template(path = "host.html")]
struct HostPageTemplate {
    page: PageFrame,
    job: JobName,
    host: String,
}

/// Serves `GET /jobs/{job}/hosts/{host}` and `GET /jobs/{job}/runs/{run}/hosts/{host}`.
pub(super) async fn show_host_page(
    State(site): State<AppState>,
    job: JobPath,
    ViewedRun(run): ViewedRun,
    user: PageUser,
    HostInPath(host): HostInPath,
) -> Result<Response, Problem> {
    let snapshot = JobSnapshot::capture_in_run(&site, &job, run)?;
    let parts = render_fragments(&snapshot, &user, &host)?.ok_or_else(|| no_such_host(&job, &host))?;
    let (title, live) = (format!("Host {host} of {}", job.name), LivePage::Host { host: host.clone() });
    let page = PageFrame::for_job_snapshot(user, NavEntry::Hosts, title, &snapshot, &live, parts);
    render_page(&HostPageTemplate { page, job: job.name, host }, snapshot.page_clock())
}
