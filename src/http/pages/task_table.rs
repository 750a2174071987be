//! Renders the table of tasks. The query of the address selects the filter, the order and the page.
//!
//! `live_page.rs` defines this query (`TaskTableQuery`). Begin at `render_task_table_fragment`.

use std::cmp::Reverse;
use std::fmt::Write as _;

use askama::Template;

use super::fragment::Fragment;
use super::links::{self, JobPages};
use super::live_page::TaskTableQuery;
use super::snapshot::{JobSnapshot, task_address_text};
use super::status::{TaskStatus, shorten, wait_texts};
use super::times;
use crate::coordination::{GapHistogram, HeartbeatStatsView, HostId, TaskView, Timestamp};
use crate::http::Problem;
use crate::text::encode_query_value;

/// The number of rows of a page.
const ROWS: usize = 100;
/// The maximum length of a filter, in bytes.
const FIND_BYTES_MAX: usize = 200;

/// A column by which rows can be sorted.
struct TaskColumn {
    name: &'static str,
    title: &'static str,
    explained: &'static str,
    /// The column holds numbers.
    is_numeric: bool,
}

impl TaskColumn {
    const fn new_text(name: &'static str, title: &'static str, explained: &'static str) -> Self {
        Self { name, title, explained, is_numeric: false }
    }

    const fn new_numeric(name: &'static str, title: &'static str, explained: &'static str) -> Self {
        Self { is_numeric: true, ..Self::new_text(name, title, explained) }
    }
}

const COLUMNS: [TaskColumn; 11] = [
    TaskColumn::new_text("task", "Task", "its number"),
    TaskColumn::new_text("state", "State", "tasks with issues first"),
    TaskColumn::new_text(
        "since",
        "For",
        "time in this state; of an awaited task, how long the others have waited",
    ),
    TaskColumn::new_text("host", "Host and peer", "its host, and the address from which it registered"),
    TaskColumn::new_text("incarnation", "Incarnation", "its current life, and how many lives it had before"),
    TaskColumn::new_text("heard", "Heartbeat", "its last heartbeat"),
    TaskColumn::new_text(
        "gap",
        "Gaps",
        "time between heartbeats: the distribution, and the longest recent gap",
    ),
    TaskColumn::new_text("waits", "Waits at", "the barriers at which it waits"),
    TaskColumn::new_numeric(
        "score",
        "Score",
        "lateness score, 0 to 1: how late it usually arrives at barriers beside the others",
    ),
    TaskColumn::new_numeric(
        "late",
        "Late by",
        "how long after the first task it usually arrives at barriers, and whether it became slower",
    ),
    TaskColumn::new_numeric(
        "held",
        "Held up alone",
        "how long the other tasks waited for it alone in this run",
    ),
];

impl TaskTableQuery {
    /// Returns the parameters with long ones truncated.
    fn with_truncated_search_text(&self) -> Self {
        let find = self.find.get(..self.find.floor_char_boundary(FIND_BYTES_MAX)).unwrap_or_default();
        Self { find: find.to_owned(), ..self.clone() }
    }

    fn is_descending(&self) -> bool {
        !self.down.is_empty()
    }

    /// Returns the query of the page's address.
    pub fn to_query(&self) -> String {
        let mut query = String::new();
        let pairs = [
            ("state", &self.state),
            ("find", &self.find),
            ("sort", &self.sort),
            ("down", &self.down),
            ("page", &self.page),
            ("around", &self.around),
        ];
        for (name, value) in pairs {
            if !value.is_empty() {
                let and = if query.is_empty() { "" } else { "&" };
                // Writing to a string cannot fail.
                let _ = write!(query, "{and}{name}={}", encode_query_value(value));
            }
        }
        query
    }

    fn query_sorted_by(&self, column: &str) -> String {
        let present = if self.sort.is_empty() { "task" } else { &self.sort };
        let down = if present == column && !self.is_descending() { "1" } else { "" };
        let sort = if column == "task" { String::new() } else { column.to_owned() };
        Self { sort, down: down.into(), page: String::new(), ..self.clone() }.to_query()
    }

    /// Returns the query of the page whose picture shows only the tasks near to a task, or all of them.
    pub fn query_around(&self, task: Option<usize>) -> String {
        Self { around: task.map_or_else(String::new, |task| task.to_string()), ..self.clone() }.to_query()
    }

    fn query_at_page(&self, page: usize) -> String {
        Self { page: page.to_string(), ..self.clone() }.to_query()
    }

    fn matches(&self, snapshot: &JobSnapshot, task: &TaskView) -> bool {
        let look = snapshot.status_of(task.task);
        let state = match self.state.as_str() {
            "" => true,
            "trouble" => !matches!(look, TaskStatus::Connected | TaskStatus::Disconnected),
            word => look.word() == word,
        };
        state && self.matches_search_text(task)
    }

    fn matches_search_text(&self, task: &TaskView) -> bool {
        let find = self.find.trim();
        if find.is_empty() {
            return true;
        }
        if let Ok(number) = find.parse::<i32>() {
            return task.task.0 == number;
        }
        task_address_text(task).contains(find)
            || task.host.as_ref().is_some_and(|host| host.as_str().contains(find))
            || task.waits_at.iter().any(|id| id.contains(find))
            || task.waits_for.iter().any(|wait| wait.key.contains(find))
            || task.lives.first().is_some_and(|life| life.incarnation.starts_with(find))
    }

    fn sort_tasks(&self, snapshot: &JobSnapshot, tasks: &mut [&TaskView]) {
        let incarnation = |task: &TaskView| task.lives.first().map(|life| life.incarnation.clone());
        match self.sort.as_str() {
            "state" => tasks.sort_by_key(|task| (snapshot.status_of(task.task), snapshot.status_since(task))),
            "since" => tasks.sort_by_key(|task| snapshot.status_since(task)),
            "host" => tasks
                .sort_by_cached_key(|task| (task.host.clone(), task.lives.iter().find_map(|life| life.peer))),
            "incarnation" => tasks.sort_by_cached_key(|task| (Reverse(task.lives.len()), incarnation(task))),
            "heard" => tasks.sort_by_key(|task| task.last_heartbeat),
            "gap" => {
                tasks.sort_by_key(|task| Reverse(task.pulse.as_ref().map(|pulse| pulse.longest_recent_us)));
            }
            "waits" => tasks.sort_by_cached_key(|task| {
                (task.waits_at.clone(), task.waits_for.first().map(|wait| wait.key.clone()))
            }),
            "score" => tasks.sort_by(|a, b| lateness_score(b).total_cmp(&lateness_score(a))),
            "late" => tasks.sort_by_key(|task| Reverse(task.straggling.as_ref().map(|it| it.lateness_us))),
            "held" => tasks.sort_by_key(|task| Reverse(task.straggling.as_ref().map(|it| it.held_up_us))),
            _ => {}
        }
        if self.is_descending() {
            tasks.reverse();
        }
    }
}

fn lateness_score(task: &TaskView) -> f64 {
    task.straggling.as_ref().map_or(0.0, |it| it.score)
}

struct TaskRow<'a> {
    task: &'a TaskView,
    status: TaskStatus,
    /// The time since which it has its status.
    since: Timestamp,
    /// Its failure is a consequence of the first cause.
    follows: bool,
    address: String,
    /// Its host, unless its address names it.
    host: Option<&'a HostId>,
    incarnation: &'a str,
    lives_before: usize,
    waits: String,
    devices: usize,
    spark: String,
    score: String,
}

impl<'a> TaskRow<'a> {
    fn new(snapshot: &'a JobSnapshot, task: &'a TaskView) -> Self {
        let (waits, address) = (wait_texts(task), task_address_text(task));
        let score = task.straggling.as_ref().map(|it| format!("{:.2}", it.score)).unwrap_or_default();
        Self {
            status: snapshot.status_of(task.task),
            since: snapshot.status_since(task),
            follows: snapshot.is_consequence(task.task),
            host: task.host.as_ref().filter(|host| !address.contains(host.as_str())),
            address,
            incarnation: task.lives.first().map_or("", |life| &life.incarnation),
            lives_before: task.lives.len().saturating_sub(1),
            waits: shorten(&waits.join(", "), 60),
            devices: snapshot.device_count_of(task.task),
            spark: task.pulse.as_ref().map(gap_histogram_path).unwrap_or_default(),
            score,
            task,
        }
    }
}

/// Returns the distribution of gaps as a path: one bar for each class, in a box of 38 by 12.
fn gap_histogram_path(pulse: &HeartbeatStatsView) -> String {
    let most = pulse.gaps.counts.iter().copied().max().unwrap_or_default().max(1);
    let mut path = String::new();
    for (class, count) in pulse.gaps.counts.iter().enumerate().filter(|(_, count)| **count > 0) {
        let high = (count * 12).div_ceil(most);
        let _ = write!(path, "M{} 12v-{high}h2v{high}z", class * 2);
    }
    path
}

/// Returns the observed classes of gaps with their numbers.
pub(super) fn gap_class_counts(pulse: &HeartbeatStatsView) -> Vec<(String, u64)> {
    let seen = |(_, count): &(usize, &u64)| **count > 0;
    let counts = pulse.gaps.counts.iter().enumerate();
    let first = counts.clone().position(|one| seen(&one)).unwrap_or_default();
    let last = pulse.gaps.counts.len() - counts.rev().position(|one| seen(&one)).unwrap_or_default();
    let classes = first.saturating_sub(1)..(last + 1).min(pulse.gaps.counts.len());
    let name = |class| match GapHistogram::upper_bound_us_of_bucket(class) {
        Some(longest) => format!("≤ {}", times::microseconds_text(&longest)),
        None => "longer".to_owned(),
    };
    classes.map(|class| (name(class), pulse.gaps.counts[class])).collect()
}

#[derive(Template)]
#[template(path = "parts/tasks.html")]
struct TaskTableFragment<'a> {
    job: &'a JobPages,
    listing: TaskTableQuery,
    rows: Vec<TaskRow<'a>>,
    found: usize,
    total: usize,
    page: usize,
    pages: usize,
    columns: &'static [TaskColumn],
}

impl TaskTableFragment<'_> {
    fn aria_sort(&self, column: &TaskColumn) -> &'static str {
        let present = if self.listing.sort.is_empty() { "task" } else { &self.listing.sort };
        // Columns of measurements begin with the largest.
        let begins_with_largest = ["gap", "score", "late", "held"].contains(&column.name);
        match (present == column.name, self.listing.is_descending() != begins_with_largest) {
            (false, _) => "none",
            (true, false) => "ascending",
            (true, true) => "descending",
        }
    }
}

/// Returns the requested rows as a fragment of a page.
pub(super) fn render_task_table_fragment(
    snapshot: &JobSnapshot,
    listing: &TaskTableQuery,
) -> Result<Fragment, Problem> {
    let listing = listing.with_truncated_search_text();
    let tasks = &snapshot.view.run.tasks;
    let mut found: Vec<&TaskView> = tasks.iter().filter(|task| listing.matches(snapshot, task)).collect();
    listing.sort_tasks(snapshot, &mut found);
    let pages = found.len().div_ceil(ROWS).max(1);
    let page = listing.page.parse().unwrap_or(1).clamp(1, pages);
    let rows =
        found.iter().skip((page - 1) * ROWS).take(ROWS).map(|task| TaskRow::new(snapshot, task)).collect();
    let (found, total) = (found.len(), tasks.len());
    let job = &snapshot.pages;
    Fragment::new(
        "tasks",
        &TaskTableFragment { job, listing, rows, found, total, page, pages, columns: &COLUMNS },
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_says_what_is_listed_and_a_second_click_turns_the_order() {
        let listing =
            TaskTableQuery { find: "10.0.0.7&x".into(), sort: "score".into(), ..TaskTableQuery::default() };
        assert_eq!(listing.to_query(), "find=10.0.0.7%26x&sort=score");
        assert_eq!(listing.query_sorted_by("score"), "find=10.0.0.7%26x&sort=score&down=1");
        assert_eq!(listing.query_sorted_by("task"), "find=10.0.0.7%26x");
        assert_eq!(listing.query_at_page(3), "find=10.0.0.7%26x&sort=score&page=3");
    }
}
