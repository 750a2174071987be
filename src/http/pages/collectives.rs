//! Renders the collectives of a job: its cliques, those that wait first, and the ranks of one clique as a picture and a table.
//!
//! `service/collectives/` has the analysis. Begin at `show_collectives_page`.

use askama::Template;
use axum::extract::State;
use axum::response::Response;
use muster_collectives::parse_clique_name;

use super::fragment::Fragment;
use super::frame::{NavEntry, PageFrame, PageUser, render_page};
use super::job_head::render_head_fragment;
use super::live_page::{CollectivesPageQuery, LivePage};
use super::snapshot::JobSnapshot;
use super::{amount, links, times};
use crate::coordination::JobName;
use crate::http::extractors::{JobPath, QueryParams};
use crate::http::{AppState, Problem};
use crate::service::collectives::{
    CliqueMemberView, CliqueView, CollectiveView, CollectivesView, RasView, WaitRole,
};
use crate::service::stacks::TaskRange;
use crate::text::{format_approximate_seconds, format_bytes, format_count_with_noun};

/// The maximum number of cliques in the table.
const CLIQUES_SHOWN: usize = 100;
/// The maximum number of columns of the picture. Of more ranks, several share a column.
const COLUMNS_MAX: usize = 256;
/// The maximum number of rows of the table of ranks: those that are waited for first, then those that are furthest behind.
const ROWS_MAX: usize = 200;
/// The maximum number of ranges of tasks in one cell.
const RANGES_SHOWN: usize = 8;
/// The height of the picture, in units of its view box.
const HEIGHT: u32 = 120;
/// The least height of a column.
const HEIGHT_MIN: u32 = 6;
/// The most units of a column's width.
const COLUMN_WIDTH_MAX: usize = 40;
const PICTURE_WIDTH: usize = 1024;

fn ranges_text(ranges: &[TaskRange]) -> String {
    let numbers = TaskRange::tasks(ranges).map(|task| task.0);
    crate::text::format_ranges(numbers, RANGES_SHOWN, "–", "…")
}

fn seconds_text(seconds: &f64) -> String {
    format_approximate_seconds(*seconds)
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a figure for people")]
fn rate_text(bytes_per_s: &f64) -> String {
    format!("{}/s", format_bytes(bytes_per_s.max(0.0) as u64))
}

fn latest_text(collective: &CollectiveView) -> String {
    collective.text()
}

/// Returns the bus bandwidth of the function that takes most time on the GPUs.
fn bandwidth_text(clique: &CliqueView) -> Option<String> {
    let by_time = |one: &&crate::service::collectives::CliqueFunctionView,
                   other: &&crate::service::collectives::CliqueFunctionView| {
        one.gpu_s.total_cmp(&other.gpu_s)
    };
    let most = clique.functions.iter().filter(|it| it.bus_bytes_per_s.is_some()).max_by(by_time)?;
    Some(format!("{} {}", rate_text(&most.bus_bytes_per_s?), most.function))
}

#[derive(Template)]
#[template(path = "parts/collectives.html")]
struct CollectivesFragment<'a> {
    job: &'a JobName,
    view: &'a CollectivesView,
    rows: &'a [CliqueView],
    selected: &'a str,
}

/// A column of the picture: one rank, or several.
#[derive(Debug, Clone, PartialEq, Eq)]
struct RankColumn {
    x: usize,
    width: usize,
    height: u32,
    class: &'static str,
    is_waited_for: bool,
    description: String,
    link: Option<String>,
}

/// The picture of a clique: how far each rank has come.
#[derive(Debug, Clone, PartialEq, Eq)]
struct FrontPicture {
    width: usize,
    columns: Vec<RankColumn>,
    ranks_per_column: usize,
}

impl FrontPicture {
    fn new(job: &JobName, clique: &CliqueView) -> Self {
        let ranks_per_column = clique.members.len().div_ceil(COLUMNS_MAX).max(1);
        let groups: Vec<&[CliqueMemberView]> = clique.members.chunks(ranks_per_column).collect();
        let step = (PICTURE_WIDTH / groups.len().max(1)).clamp(3, COLUMN_WIDTH_MAX);
        // The scale begins below the last rank, so that its column is to be seen.
        let spread = clique.front.saturating_sub(clique.back);
        let base = clique.back.saturating_sub(spread / 4 + 1);
        let columns = groups.iter().enumerate().map(|(at, members)| {
            let least = members.iter().map(|member| member.collectives).min().unwrap_or_default();
            let share = u128::from(least.saturating_sub(base)) * u128::from(HEIGHT)
                / u128::from((clique.front - base.min(clique.front)).max(1));
            let is_waited_for = members.iter().any(|member| member.waited_for);
            let is_silent = members.iter().any(|member| member.silent);
            let class = match (is_waited_for, is_silent) {
                (true, _) => "waited",
                (false, true) => "silent",
                (false, false) if members.iter().any(|member| member.behind > 0) => "behind",
                (false, false) => "level",
            };
            RankColumn {
                x: at * step,
                width: step - 1,
                height: u32::try_from(share).unwrap_or(HEIGHT).clamp(HEIGHT_MIN, HEIGHT),
                class,
                is_waited_for,
                description: describe_column(members),
                link: match members {
                    [member] => member.task.as_ref().map(|task| links::task_page_path(job, task)),
                    _ => None,
                },
            }
        });
        Self { width: step * groups.len().max(1), columns: columns.collect(), ranks_per_column }
    }
}

/// Returns what a column says, for its tooltip and for screen readers.
fn describe_column(members: &[CliqueMemberView]) -> String {
    let state = |member: &CliqueMemberView| match (member.waited_for, member.silent) {
        (true, true) => ": the others wait for it, and it reports nothing",
        (true, false) => ": the others wait for it",
        (false, true) => ": it reports nothing",
        (false, false) => "",
    };
    match members {
        [] => String::new(),
        [member] => {
            let task = member.task.map_or_else(String::new, |task| format!(", task {}", task.0));
            format!(
                "rank {}{task}, {}: {} collectives called, {} behind{}",
                member.rank,
                member.host,
                member.collectives,
                member.behind,
                state(member)
            )
        }
        [first, .., last] => {
            let waited_for = members.iter().filter(|member| member.waited_for).count();
            let behind = members.iter().map(|member| member.behind).max().unwrap_or_default();
            let waits = match waited_for {
                0 => String::new(),
                count => {
                    format!(": the others wait for {}", format_count_with_noun(count, "of them", "of them"))
                }
            };
            format!("ranks {} to {}: up to {behind} behind{waits}", first.rank, last.rank)
        }
    }
}

#[derive(Template)]
#[template(path = "parts/clique.html")]
struct CliqueFragment<'a> {
    job: &'a JobName,
    /// The clique that the address names.
    wanted: &'a str,
    clique: Option<&'a CliqueView>,
    last_ras: Option<&'a RasView>,
    picture: FrontPicture,
    rows: Vec<&'a CliqueMemberView>,
}

/// Returns the name of the clique whose ranks are shown. Without a choice it is the first one: that with the longest wait.
fn wanted_clique<'a>(view: &'a CollectivesView, query: &'a CollectivesPageQuery) -> &'a str {
    match &*query.clique {
        "" => view.cliques.first().map_or("", |clique| &*clique.clique),
        chosen => chosen,
    }
}

/// Returns the fragments of the page.
pub(super) fn render_fragments(
    site: &AppState,
    snapshot: &JobSnapshot,
    query: &CollectivesPageQuery,
) -> Result<Vec<Fragment>, Problem> {
    let job = &snapshot.view.name;
    let (view, clique) =
        site.collectives.view_with_clique(&site.engine, snapshot.id, snapshot.task_count(), |view| {
            parse_clique_name(wanted_clique(view, query))
        });
    let rows = &view.cliques[..view.cliques.len().min(CLIQUES_SHOWN)];
    let wanted = wanted_clique(&view, query);
    let list = CollectivesFragment { job, view: &view, rows, selected: wanted };
    let empty = FrontPicture { width: 1, columns: Vec::new(), ranks_per_column: 1 };
    let picture = clique.as_ref().map_or(empty, |clique| FrontPicture::new(job, clique));
    let mut members: Vec<&CliqueMemberView> = clique.iter().flat_map(|clique| &clique.members).collect();
    members.sort_by_key(|member| (!member.waited_for, std::cmp::Reverse(member.behind), member.rank));
    members.truncate(ROWS_MAX);
    let (clique, last_ras) = (clique.as_ref(), view.ras.as_ref());
    let one = CliqueFragment { job, wanted, clique, last_ras, picture, rows: members };
    Ok(vec![
        render_head_fragment(snapshot)?,
        Fragment::new("collectives", &list)?,
        Fragment::new("clique", &one)?,
    ])
}

#[derive(Template)]
#[template(path = "collectives.html")]
struct CollectivesPageTemplate<'a> {
    page: PageFrame,
    job: &'a JobName,
}

/// Serves `GET /jobs/{job}/collectives`.
pub(super) async fn show_collectives_page(
    State(site): State<AppState>,
    job: JobPath,
    user: PageUser,
    QueryParams(query): QueryParams<CollectivesPageQuery>,
) -> Result<Response, Problem> {
    let snapshot = JobSnapshot::capture_for_request(&site, &job)?;
    let parts = render_fragments(&site, &snapshot, &query)?;
    let (title, live) = (format!("Collectives of {}", job.name), LivePage::Collectives(query));
    let page = PageFrame::for_job_snapshot(user, NavEntry::Collectives, title, &snapshot, &live, parts);
    render_page(&CollectivesPageTemplate { page, job: &job.name }, snapshot.page_clock())
}
