//! Renders the transfers of all jobs, and those of one job: rates, pairs of tasks, and reasons of failures.
//!
//! `service::reports` aggregates the reports. Begin at `show_job_transfers_page`.

use std::fmt::Write as _;
use std::time::Duration;

use askama::Template;
use axum::extract::State;
use axum::response::Response;

use super::fragment::Fragment;
use super::frame::{NavEntry, PageFrame, PageUser, render_page};
use super::job_head::render_head_fragment;
use super::links::JobPages;
use super::live_page::{LivePage, PairFilter};
use super::snapshot::JobSnapshot;
use super::transfer_map::{CELL, TransferMap};
use super::{amount, links, status, times};
use crate::coordination::{JobId, JobName, TaskId, TaskIncarnations, Timestamp};
use crate::http::extractors::{JobPath, QueryParams, ViewedRun};
use crate::http::{AppState, Problem};
use crate::service::reports::{
    POINTS, PairSeries, PairView, PeerJobView, ReasonView, ReportedTransport, TaskTransfers, Throughput,
    TransferOutcome, TransfersView, rate_window,
};

/// The maximum number of tasks that are shown as a matrix.
const MATRIX: usize = 16;
/// The maximum number of pairs and tasks that are listed.
const LISTED: usize = 40;
/// The maximum number of failure reasons that are listed with the text of workers.
const SAID: usize = 3;
/// The seconds of one point of the chart.
const STEP: usize = 10;
/// The width of the chart, in units of the picture.
const WIDTH: usize = 600;
const HEIGHT: usize = 140;

impl PairFilter {
    pub fn task_filter(&self) -> Option<TaskId> {
        self.task.trim().parse().ok().map(TaskId)
    }

    fn transport_filter(&self) -> Option<ReportedTransport> {
        ReportedTransport::ALL.into_iter().find(|it| it.name() == self.transport)
    }

    fn matches_all_pairs(&self) -> bool {
        self.task_filter().is_none() && self.transport_filter().is_none()
    }
}

/// The maximum number of pairs with a line of their own in the chart.
const PAIRS_DRAWN: usize = 5;

#[derive(Template)]
#[template(path = "parts/moves.html")]
struct TransferSummaryFragment<'a> {
    view: &'a TransfersView,
    is_overdue: bool,
}

/// A line of a chart.
struct ChartLine {
    name: String,
    /// The CSS class of the line.
    style: String,
    path: String,
    now: u64,
}

/// The bytes of each second from which a line is made.
struct ChartSeries<'a> {
    name: String,
    style: String,
    sent: &'a [u64],
}

#[derive(Template)]
#[template(path = "parts/throughput.html")]
struct Chart {
    /// The id of the chart and of its table.
    id: &'static str,
    title: &'static str,
    about: String,
    lines: Vec<ChartLine>,
    most: u64,
    /// The time span in words.
    span: String,
    /// The text if there is nothing to draw.
    nothing: String,
    /// The chart as a table: the start of each step, and bytes a second of each transport.
    steps: Vec<(Timestamp, Vec<u64>)>,
}

impl Chart {
    /// Returns the chart of the bytes of all tasks, by transport.
    fn of_throughput(throughput: &Throughput) -> Self {
        let tracks = throughput.transports.iter().map(|it| ChartSeries {
            name: it.transport.to_string(),
            style: format!("t-{}", it.transport),
            sent: &it.sent,
        });
        let about = "bytes sent by all tasks".to_owned();
        Self::new(("throughput", "Throughput", about), throughput, tracks.collect())
    }

    /// Returns the chart of the chosen pairs that have sent most, one line each, with all others in one line
    /// if no filter is set.
    fn of_pairs(throughput: &Throughput, choice: &PairFilter) -> Self {
        let (task, transport) = (choice.task_filter(), choice.transport_filter());
        let chosen = |it: &&PairSeries| {
            task.is_none_or(|task| task == it.from || task == it.to)
                && transport.is_none_or(|transport| transport == it.transport)
        };
        let sum = |it: &PairSeries| it.sent.iter().copied().fold(0, u64::saturating_add);
        let mut pairs: Vec<&PairSeries> =
            throughput.pairs.iter().filter(chosen).filter(|it| sum(it) > 0).collect();
        pairs.sort_by_key(|it| (std::cmp::Reverse(sum(it)), it.from, it.to));
        let rest = pairs.split_off(pairs.len().min(PAIRS_DRAWN));
        let mut others = if choice.matches_all_pairs() { throughput.others.clone() } else { Vec::new() };
        others.resize(throughput.seconds, 0);
        for it in rest {
            // Both series end at the same second.
            for (sum, bytes) in others.iter_mut().rev().zip(it.sent.iter().rev()) {
                *sum = sum.saturating_add(*bytes);
            }
        }
        let tracks = pairs.iter().zip(0..).map(|(it, place): (_, usize)| ChartSeries {
            name: format!("{} to {} by {}", it.from, it.to, it.transport),
            style: format!("l-{place}"),
            sent: &it.sent,
        });
        let mut tracks: Vec<ChartSeries<'_>> = tracks.collect();
        if others.iter().any(|bytes| *bytes > 0) {
            tracks.push(ChartSeries {
                name: "other pairs".to_owned(),
                style: "t-other".to_owned(),
                sent: &others,
            });
        }
        let whose = task.map_or_else(String::new, |task| format!(" of task {task}"));
        let by = transport.map_or_else(String::new, |transport| format!(" by {transport}"));
        let about = format!("bytes sent by the busiest pairs{whose}{by}");
        Self::new(("pair-throughput", "Throughput by pair", about), throughput, tracks)
    }

    fn new(
        (id, title, about): (&'static str, &'static str, String),
        throughput: &Throughput,
        tracks: Vec<ChartSeries<'_>>,
    ) -> Self {
        let end = throughput.ends_at.0 / 1_000_000;
        // Steps begin at multiples of ten seconds, so that a finished step does not change.
        let spare = usize::try_from(end % STEP as u64).unwrap_or_default();
        let steps_of = |sent: &[u64]| -> Vec<u64> {
            let whole = sent.get(..sent.len().saturating_sub(spare)).unwrap_or_default();
            let steps = whole.rchunks_exact(STEP);
            let mut steps: Vec<u64> = steps
                .map(|step| step.iter().fold(0, |sum: u64, it| sum.saturating_add(*it)) / STEP as u64)
                .collect();
            steps.reverse();
            steps
        };
        let series: Vec<((String, String), Vec<u64>)> =
            tracks.into_iter().map(|it| ((it.name, it.style), steps_of(it.sent))).collect();
        let most = series.iter().flat_map(|(_, steps)| steps).copied().max().unwrap_or_default();
        let count = series.first().map_or(0, |(_, steps)| steps.len());
        let began = end - spare as u64 - (count * STEP) as u64;
        let when = |at: usize| Timestamp((began + (at * STEP) as u64) * 1_000_000);
        let steps = (0..count).map(|at| (when(at), series.iter().map(|(_, steps)| steps[at]).collect()));
        let lines = series.iter().map(|((name, style), steps)| ChartLine {
            name: name.clone(),
            style: style.clone(),
            path: line_path(steps, most),
            now: steps.last().copied().unwrap_or_default(),
        });
        let words = |seconds: usize| match seconds {
            POINTS => "ten minutes".to_owned(),
            seconds => times::duration_text(&Duration::from_secs(seconds as u64)),
        };
        let nothing = match throughput.seconds {
            seconds if seconds < spare + STEP => "Not yet reported for ten seconds".to_owned(),
            seconds => format!("No bytes moved in the last {}", words(seconds)),
        };
        let (lines, steps, span) = (lines.collect(), steps.collect(), words(count * STEP));
        Self { id, title, about, lines, most, span, nothing, steps }
    }
}

fn line_path(steps: &[u64], most: u64) -> String {
    let mut path = String::new();
    let columns = steps.len().saturating_sub(1).max(1);
    for (at, bytes) in steps.iter().enumerate() {
        let up = u128::from(*bytes) * HEIGHT as u128 / u128::from(most.max(1));
        let y = HEIGHT - usize::try_from(up).unwrap_or(HEIGHT).min(HEIGHT);
        // Writing to a string cannot fail.
        let _ = write!(path, "{}{} {y}", if at == 0 { 'M' } else { 'L' }, at * WIDTH / columns);
    }
    path
}

/// A cell of the matrix.
struct MatrixCell {
    /// The bytes or the rate; empty if there are none.
    text: String,
    /// From 0 for none to 4 for the most.
    heat: u64,
}

#[derive(Template)]
#[template(path = "parts/pairs.html")]
struct PairsFragment<'a> {
    job: &'a JobPages,
    choice: &'a PairFilter,
    pairs: Vec<PairView>,
    kept: usize,
    most: u64,
    /// The matrix of all pairs, if there are few tasks.
    matrix: Vec<Vec<MatrixCell>>,
    /// The picture of all pairs, if there are many tasks.
    map: Option<TransferMap>,
    /// Those with tasks of other jobs.
    peer_jobs: Vec<PeerJobView>,
}

impl PairsFragment<'_> {
    /// Returns the query of the page whose picture tells the bytes, or the rates.
    fn query_by(&self, by: &str) -> String {
        let filter = PairFilter { by: by.to_owned(), ..self.choice.clone() };
        // Strings always serialize.
        serde_urlencoded::to_string(filter).unwrap_or_default()
    }

    /// Returns the bytes of a pair as a share of the largest, in percent.
    fn percent_of_largest_pair(&self, pair: &PairView) -> u64 {
        let part = u128::from(pair.bytes()) * 100 / u128::from(self.most.max(1));
        u64::try_from(part).unwrap_or(100)
    }
}

/// Returns the bytes that a task has sent and received.
fn sent_plus_received_bytes(task: &TaskTransfers) -> u64 {
    task.totals.sent_bytes().saturating_add(task.totals.received_bytes())
}

fn pair_matrix(pairs: &[PairView], tasks: usize, by_rate: bool) -> Vec<Vec<MatrixCell>> {
    if tasks > MATRIX || pairs.is_empty() {
        return Vec::new();
    }
    let mut sums = vec![vec![0_u64; tasks]; tasks];
    for pair in pairs {
        let [from, to] = [pair.from, pair.to].map(|task| usize::try_from(task.0).unwrap_or(usize::MAX));
        if let Some(sum) = sums.get_mut(from).and_then(|row| row.get_mut(to)) {
            *sum = sum.saturating_add(if by_rate { pair.rate } else { pair.bytes() });
        }
    }
    let most = sums.iter().flatten().copied().max().unwrap_or_default().max(1);
    let heat = |value: u64| u64::try_from(u128::from(value) * 4 / u128::from(most)).unwrap_or(4);
    let text = |value: u64| if by_rate { amount::rate_text(value) } else { amount::bytes_text(value) };
    let cell = |value: u64| match value {
        0 => MatrixCell { text: String::new(), heat: 0 },
        _ => MatrixCell { text: text(value), heat: heat(value).max(1) },
    };
    sums.into_iter().map(|row| row.into_iter().map(cell).collect()).collect()
}

#[derive(Template)]
#[template(path = "parts/movers.html")]
struct BusiestTasksFragment<'a> {
    job: &'a JobPages,
    tasks: Vec<TaskTransfers>,
    all: usize,
    failing: usize,
}

#[derive(Template)]
#[template(path = "parts/reasons.html")]
struct FailureReasonsFragment<'a> {
    job: &'a JobPages,
    reasons: &'a [ReasonView],
}

#[derive(Template)]
#[template(path = "parts/no-transfers.html")]
struct NoTransfersFragment<'a> {
    job: Option<&'a JobName>,
    /// The page shows an ended run.
    is_past: bool,
}

/// Returns the fragments of the page.
pub(super) fn render_fragments(
    snapshot: &JobSnapshot,
    choice: &PairFilter,
) -> Result<Vec<Fragment>, Problem> {
    let (board, job, name) = (&snapshot.records.reports, snapshot.id, &snapshot.pages);
    let view = board.transfers_summary(job, &snapshot.roster, snapshot.captured_at());
    if view.reporting == 0 && view.stale == 0 {
        // The others say nothing; they may have, of the run before.
        let mut parts = vec![
            render_head_fragment(snapshot)?,
            Fragment::new(
                "moves",
                &NoTransfersFragment { job: Some(snapshot.job_name()), is_past: snapshot.past.is_some() },
            )?,
        ];
        for id in ["reasons", "throughput", "pair-throughput", "pairs", "movers"] {
            parts.push(Fragment::empty(id));
        }
        return Ok(parts);
    }
    let throughput = board.throughput(job, &snapshot.roster, POINTS);
    let mut pairs = board.pair_views(job, &snapshot.roster, choice.task_filter(), choice.transport_filter());
    let matrix = pair_matrix(&pairs, snapshot.roster.incarnations.len(), choice.by == "rate");
    let map = match matrix.is_empty() {
        true => TransferMap::new(snapshot, &pairs, &view.failures, choice),
        false => None,
    };
    let kept = pairs.len();
    pairs.sort_by_key(|pair| (std::cmp::Reverse(pair.bytes()), pair.from, pair.to));
    pairs.truncate(LISTED);
    let most = pairs.first().map_or(0, PairView::bytes);
    let mut peer_jobs =
        board.peer_jobs(job, &snapshot.roster, choice.task_filter(), choice.transport_filter());
    peer_jobs.sort_by_key(|row| std::cmp::Reverse(row.sent.saturating_add(row.received)));
    peer_jobs.truncate(LISTED);
    let mut tasks = board.task_transfers(job, &snapshot.roster);
    let (all, failing) = (tasks.len(), tasks.iter().filter(|task| task.totals.failed_launches() > 0).count());
    tasks.sort_by_key(|task| (std::cmp::Reverse(sent_plus_received_bytes(task)), task.task));
    tasks.truncate(LISTED);
    let late = u64::from(view.interval_ms) * 10_000;
    let is_overdue = view.reported_at.is_some_and(|at| snapshot.captured_at().0.saturating_sub(at.0) > late);
    Ok(vec![
        render_head_fragment(snapshot)?,
        Fragment::new("moves", &TransferSummaryFragment { view: &view, is_overdue })?,
        Fragment::new("reasons", &FailureReasonsFragment { job: name, reasons: &view.failures })?,
        Fragment::new("throughput", &Chart::of_throughput(&throughput))?,
        Fragment::new("pair-throughput", &Chart::of_pairs(&throughput, choice))?,
        Fragment::new(
            "pairs",
            &PairsFragment { job: name, choice, pairs, kept, most, matrix, map, peer_jobs },
        )?,
        Fragment::new("movers", &BusiestTasksFragment { job: name, tasks, all, failing })?,
    ])
}

#[derive(Template)]
#[template(path = "parts/task-moves.html")]
struct TaskTransfersFragment<'a> {
    job: &'a JobPages,
    task: TaskId,
    it: Option<TaskTransfers>,
    /// The times between which its rates are measured.
    window: (Timestamp, Timestamp),
}

/// Returns the transfers of one task for its page; empty if no task of the job reports.
pub(super) fn render_task_fragment(snapshot: &JobSnapshot, task: TaskId) -> Result<Fragment, Problem> {
    let it = snapshot.records.reports.transfers_of_task(snapshot.id, &snapshot.roster, task);
    let window = it.as_ref().map(|it| rate_window(it.rate_until)).unwrap_or_default();
    Fragment::new("task-moves", &TaskTransfersFragment { job: &snapshot.pages, task, it, window })
}

#[derive(Template)]
#[template(path = "job-transfers.html")]
struct JobTransfersPageTemplate {
    page: PageFrame,
}

/// Serves `GET /jobs/{job}/transfers` and `GET /jobs/{job}/runs/{run}/transfers`.
pub(super) async fn show_job_transfers_page(
    State(site): State<AppState>,
    job: JobPath,
    ViewedRun(run): ViewedRun,
    user: PageUser,
    QueryParams(choice): QueryParams<PairFilter>,
) -> Result<Response, Problem> {
    let snapshot = JobSnapshot::capture_in_run(&site, &job, run)?;
    let (title, parts) = (format!("Transfers of {}", job.name), render_fragments(&snapshot, &choice)?);
    let live = LivePage::Transfers(choice);
    let page = PageFrame::for_job_snapshot(user, NavEntry::JobTransfers, title, &snapshot, &live, parts);
    render_page(&JobTransfersPageTemplate { page }, snapshot.page_clock())
}

#[derive(Template)]
#[template(path = "transfers.html")]
struct TransfersPageTemplate {
    page: PageFrame,
    jobs: Vec<(JobName, TransfersView)>,
    nobody: NoTransfersFragment<'static>,
}

/// Serves `GET /transfers`: every job whose tasks report.
pub(super) async fn show_transfers_page(
    State(site): State<AppState>,
    user: PageUser,
) -> Result<Response, Problem> {
    let now = site.engine.clock().now();
    let all: Vec<(JobId, JobName, TaskIncarnations)> = site.engine.read(|core, _| {
        let jobs = core.jobs().filter(|(job, _)| site.transfers.has_reports(*job));
        jobs.filter_map(|(job, name)| Some((job, name.clone(), core.job(job)?.task_incarnations()))).collect()
    });
    let jobs = all
        .into_iter()
        .map(|(job, name, roster)| (name, site.transfers.transfers_summary(job, &roster, now)));
    let jobs = jobs.filter(|(_, view)| view.reporting + view.stale > 0).collect();
    let page = PageFrame::new(user, NavEntry::Transfers, "Transfers", now);
    render_page(
        &TransfersPageTemplate { page, jobs, nobody: NoTransfersFragment { job: None, is_past: false } },
        now,
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::service::reports::Series;

    #[test]
    fn a_step_of_the_chart_stays_as_it_is_once_it_is_over() {
        let throughput = |end: u64, sent: Vec<u64>| Throughput {
            ends_at: Timestamp(end * 1_000_000),
            seconds: sent.len(),
            transports: vec![Series { transport: ReportedTransport::Shm, sent }],
            pairs: vec![],
            others: vec![],
        };
        let idle = Chart::of_throughput(&throughput(86_400 + 600, [vec![0; 590], vec![10; 10]].concat()));
        assert_eq!((idle.steps.len(), idle.span.as_str()), (60, "ten minutes"));
        let sent: Vec<u64> = (0..30).map(|second| if second < 20 { 100 } else { 300 }).collect();
        let chart = Chart::of_throughput(&throughput(86_400 + 30, sent.clone()));
        let steps: Vec<_> =
            chart.steps.iter().map(|(when, rates)| (when.0 / 1_000_000 - 86_400, rates[0])).collect();
        assert_eq!(steps, [(0, 100), (10, 100), (20, 300)]);
        assert_eq!((chart.most, chart.lines[0].now, chart.span.as_str()), (300, 300, "30 s"));
        assert_eq!(chart.lines[0].path, "M0 94L300 94L600 0");
        let later = Chart::of_throughput(&throughput(86_400 + 33, [&sent[3..], &[7, 7, 7]].concat()));
        assert_eq!(later.steps, chart.steps[1..]);
        assert!(Chart::of_throughput(&throughput(0, vec![])).steps.is_empty());
    }

    #[test]
    fn pairs_are_drawn_that_sent_most_and_the_rest_together() {
        let pair = |from, to, transport, bytes| PairSeries {
            from: TaskId(from),
            to: TaskId(to),
            transport,
            sent: vec![bytes; 30],
        };
        let mut pairs: Vec<PairSeries> =
            (0..7).map(|to| pair(9, to, ReportedTransport::Tcp, 10 * (to as u64 + 1))).collect();
        pairs.push(pair(1, 2, ReportedTransport::Shm, 500));
        let throughput = Throughput {
            ends_at: Timestamp(86_430_000_000),
            seconds: 30,
            transports: vec![],
            pairs,
            others: vec![5; 30],
        };
        let names =
            |chart: &Chart| chart.lines.iter().map(|line| (line.name.clone(), line.now)).collect::<Vec<_>>();
        let all = Chart::of_pairs(&throughput, &PairFilter::default());
        assert_eq!(all.lines.len(), PAIRS_DRAWN + 1);
        assert_eq!(names(&all)[0], ("1 to 2 by shm".to_owned(), 500));
        assert_eq!(names(&all)[PAIRS_DRAWN], ("other pairs".to_owned(), 10 + 20 + 30 + 5));
        let of_two = Chart::of_pairs(
            &throughput,
            &PairFilter { task: "2".into(), transport: String::new(), by: String::new() },
        );
        assert_eq!(names(&of_two), [("1 to 2 by shm".to_owned(), 500), ("9 to 2 by tcp".to_owned(), 30)]);
        let by_tcp = Chart::of_pairs(
            &throughput,
            &PairFilter { task: "2".into(), transport: "tcp".into(), by: String::new() },
        );
        assert_eq!(names(&by_tcp), [("9 to 2 by tcp".to_owned(), 30)]);
        assert_eq!(by_tcp.about, "bytes sent by the busiest pairs of task 2 by tcp");
    }

    #[test]
    fn few_tasks_are_a_table_of_all_with_all_and_many_are_not() {
        let pair = |from, to, sent| PairView {
            from: TaskId(from),
            to: TaskId(to),
            transport: ReportedTransport::Tcp,
            sent: Some(sent),
            received: Some(1),
            rate: 0,
        };
        let pairs = [pair(0, 1, 100), pair(0, 1, 100), pair(1, 0, 1)];
        let table = pair_matrix(&pairs, 2, false);
        let shown: Vec<_> = table.iter().flatten().map(|cell| (&*cell.text, cell.heat)).collect();
        assert_eq!(shown, [("", 0), ("200 B", 4), ("1 B", 1), ("", 0)]);
        assert!(pair_matrix(&pairs, MATRIX + 1, false).is_empty());
        assert_eq!(amount::bytes_text(5_u64 << 40), "5.0 TiB");
        assert_eq!(amount::rate_text(2048_u64), "2.0 KiB/s");
    }
}
