//! Draws the states of tasks over a run: a row for each host or task, with its states from left to right, and marks for
//! failures, restarts and exclusions.
//!
//! In the row of a host, each state is as high as the share of the host's tasks in that state. So the row of a single task
//! shows one state at a time, and the row of ten thousand shows how many are in each. Rows in which trouble began first
//! come first. `service/state_periods.rs` computes the periods. Begin at [`StateChart::new`].

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::links::{host_page_path, short_host_name, task_page_path, task_ranges_text};
use super::live_page::TimelinePageQuery;
use super::picture_rows::{AREA_HEIGHT, ROW_HEIGHT};
use super::run_moments::{RunMoment, with_texts_apart};
use super::snapshot::JobSnapshot;
use super::time_window::{AxisMark, COLUMN_WIDTH, COLUMNS, TimeWindow};
use crate::coordination::{HostId, TaskId, TaskPhase, Timestamp};
use crate::service::{RunStates, TaskMarkKind, TaskPeriods};
use crate::text::format_grouped;

/// The maximum number of rows on a page.
const ROWS_OF_PAGE: usize = 40;
/// The maximum number of marks of one kind in a row.
const MARKS_MAX: usize = 60;

/// The phases that are drawn, from the bottom of a row to its top. Missing tasks leave it empty.
const DRAWN: [TaskPhase; 5] = [
    TaskPhase::Connected,
    TaskPhase::Registering,
    TaskPhase::Disconnected,
    TaskPhase::Suspect,
    TaskPhase::Failed,
];

/// The area of one state in a row.
pub(super) struct StateArea {
    pub state: TaskPhase,
    pub path: String,
}

/// The marks of one kind in a row.
pub(super) struct RowMarks {
    pub kind: TaskMarkKind,
    /// Their places.
    pub places: Vec<usize>,
}

/// A host or a task over the shown time.
pub(super) struct StateRow {
    pub label: String,
    pub path: String,
    pub description: String,
    pub tasks: String,
    pub y: usize,
    pub areas: Vec<StateArea>,
    pub marks: Vec<RowMarks>,
    /// The number of failures, restarts and exclusions of its tasks in the shown time.
    pub counts: Vec<(TaskMarkKind, usize)>,
    /// The number of its tasks that had failed before the shown time.
    pub failed_before: usize,
    pub first_trouble: Option<Timestamp>,
    /// The share of the shown time for which its tasks were connected, in thousandths.
    pub connected_thousandths: u64,
}

/// The picture.
pub(super) struct StateChart {
    pub rows: Vec<StateRow>,
    pub by_host: bool,
    pub can_group: bool,
    /// The number of all rows, and of those before the first shown.
    pub total: usize,
    pub skipped: usize,
    pub marks: Vec<AxisMark>,
    pub moments: Vec<RunMoment>,
    pub window: TimeWindow,
    pub height: usize,
    /// The place up to which the states are not known.
    pub unknown_until: Option<usize>,
    query: TimelinePageQuery,
}

/// The tasks of one row.
struct RowGroup<'a> {
    host: Option<&'a HostId>,
    tasks: Vec<&'a TaskPeriods>,
}

impl RowGroup<'_> {
    fn first_trouble(&self) -> Option<Timestamp> {
        self.tasks.iter().filter_map(|task| task.first_trouble_at()).min()
    }

    fn task_ids(&self) -> Vec<TaskId> {
        self.tasks.iter().map(|task| task.task).collect()
    }
}

impl StateChart {
    /// Draws the states of a run that the query selects.
    pub fn new(snapshot: &JobSnapshot, states: &RunStates, query: &TimelinePageQuery) -> Self {
        let window = TimeWindow::new(states, query);
        let can_group = snapshot.host_assignment.hosts().iter().any(|host| host.tasks.len() > 1);
        let by_host = can_group && query.by != "task" && query.task_filter().is_none();
        let mut groups = row_groups(snapshot, states, query, by_host);
        groups.sort_by_cached_key(|group| {
            let first = group.tasks.first().map_or(0, |task| task.task.0);
            (group.first_trouble().map_or(u64::MAX, |at| at.0), first)
        });
        let total = groups.len();
        let page = query.rows.trim().parse::<usize>().unwrap_or(1).max(1);
        let skipped = ((page - 1).saturating_mul(ROWS_OF_PAGE))
            .min(total.saturating_sub(1) / ROWS_OF_PAGE * ROWS_OF_PAGE);
        let shown = groups.iter().skip(skipped).take(ROWS_OF_PAGE).enumerate();
        let rows: Vec<StateRow> =
            shown.map(|(place, group)| state_row(snapshot, group, window, place * ROW_HEIGHT)).collect();
        let moments = states.marks.iter().filter(|mark| window.includes(mark.at.0)).map(|mark| RunMoment {
            x: window.place_of(mark.at.0),
            text: match mark.task {
                Some(task) => format!("{}: task {task}", mark.kind.words()),
                None => mark.kind.words().to_owned(),
            },
        });
        Self {
            height: rows.len() * ROW_HEIGHT,
            rows,
            by_host,
            can_group,
            total,
            skipped,
            marks: window.marks(),
            moments: with_texts_apart(moments.collect()),
            unknown_until: states.known_since.filter(|at| at.0 > window.from).map(|at| window.place_of(at.0)),
            window,
            query: query.clone(),
        }
    }

    /// Returns the query of the page with rows by host or by task.
    pub fn query_by(&self, by: &str) -> String {
        TimelinePageQuery { by: by.to_owned(), rows: String::new(), ..self.query.clone() }.to_query()
    }

    /// Returns the query of the page at a page of rows, counted from 1.
    pub fn query_at_page(&self, page: usize) -> String {
        TimelinePageQuery { rows: page.to_string(), ..self.query.clone() }.to_query()
    }

    /// Returns the page of rows, counted from 1, and the number of pages.
    pub fn page_of_pages(&self) -> (usize, usize) {
        (self.skipped / ROWS_OF_PAGE + 1, self.total.div_ceil(ROWS_OF_PAGE).max(1))
    }

    fn query_of_window(&self, (from, until): (u64, u64)) -> String {
        let (from, until) = match (from, until) == self.window.whole {
            true => (String::new(), String::new()),
            false => (from.to_string(), until.to_string()),
        };
        TimelinePageQuery { from, until, ..self.query.clone() }.to_query()
    }

    /// Returns the steps through time: each with its name and the query of the page after it.
    pub fn steps(&self) -> Vec<(&'static str, String)> {
        let (window, length) = (self.window, self.window.length());
        let at = |from, length| self.query_of_window(window.moved(from, length));
        let mut steps = vec![("Zoom in", at(window.from + length / 4, length / 2))];
        if !window.is_whole() {
            steps.push(("Zoom out", at(window.from.saturating_sub(length / 2), length.saturating_mul(2))));
            steps.push(("Earlier", at(window.from.saturating_sub(length / 2), length)));
            steps.push(("Later", at(window.from + length / 2, length)));
            steps.push(("Whole run", self.query_of_window(window.whole)));
        }
        steps
    }

    /// Returns the query of the page without a part of the run; a script adds the part that a person selects.
    pub fn query_without_window(&self) -> String {
        self.query_of_window(self.window.whole)
    }
}

/// Groups the tasks of a run by host, or one by one.
fn row_groups<'a>(
    snapshot: &'a JobSnapshot,
    states: &'a RunStates,
    query: &TimelinePageQuery,
    by_host: bool,
) -> Vec<RowGroup<'a>> {
    let wanted = query.task_filter();
    let mut groups: BTreeMap<(Option<&HostId>, Option<TaskId>), Vec<&TaskPeriods>> = BTreeMap::new();
    for task in states.tasks.iter().filter(|task| wanted.is_none_or(|wanted| wanted == task.task)) {
        let host = snapshot.host_assignment.host_of(task.task).filter(|_| by_host).map(|host| &host.name);
        let alone = if host.is_none() { Some(task.task) } else { None };
        groups.entry((host, alone)).or_default().push(task);
    }
    groups.into_iter().map(|((host, _), tasks)| RowGroup { host, tasks }).collect()
}

fn state_row(snapshot: &JobSnapshot, group: &RowGroup<'_>, window: TimeWindow, y: usize) -> StateRow {
    let (tasks, job) = (group.task_ids(), &snapshot.pages);
    let (label, path) = match (group.host, &tasks[..]) {
        (Some(host), _) => (short_host_name(host), host_page_path(job, host)),
        (None, [task, ..]) => (format!("task {task}"), task_page_path(job, task)),
        (None, []) => (String::new(), String::new()),
    };
    let counted = count_by_column(&group.tasks, window);
    let marks = marks_by_kind(&group.tasks, window);
    let counts: Vec<(TaskMarkKind, usize)> =
        marks.iter().map(|(kind, times)| (*kind, times.len())).filter(|(_, count)| *count > 0).collect();
    let connected_thousandths = connected_thousandths(&group.tasks, window);
    let told: Vec<String> =
        counts.iter().map(|(kind, count)| format!("{} {}", format_grouped(*count), kind.name())).collect();
    let failed_before = count_failed_before(&group.tasks, window);
    let told = match (told.is_empty(), failed_before) {
        (true, 0) => "no failure".to_owned(),
        (false, 0) => told.join(", "),
        (_, before) => {
            let before = format!("{} had failed before", format_grouped(before));
            told.into_iter().chain([before]).collect::<Vec<_>>().join(", ")
        }
    };
    let tasks = task_ranges_text(&tasks);
    let noun = if group.tasks.len() == 1 { "task" } else { "tasks" };
    StateRow {
        description: format!(
            "{label}, {noun} {tasks}: connected for {}.{} % of the shown time, {told}",
            connected_thousandths / 10,
            connected_thousandths % 10,
        ),
        label,
        path,
        tasks,
        failed_before,
        y,
        areas: state_areas(&counted, group.tasks.len()),
        marks: marks
            .into_iter()
            .map(|(kind, times)| RowMarks { kind, places: distinct_places(&times, window) })
            .filter(|marks| !marks.places.is_empty())
            .collect(),
        counts,
        first_trouble: group.first_trouble(),
        connected_thousandths,
    }
}

/// Returns the number of tasks in each drawn state at each column.
fn count_by_column(tasks: &[&TaskPeriods], window: TimeWindow) -> [Vec<usize>; DRAWN.len()] {
    // The differences from one column to the next.
    let mut steps = [(); DRAWN.len()].map(|()| vec![0_i64; COLUMNS + 1]);
    for period in tasks.iter().flat_map(|task| &task.periods) {
        let Some(drawn) = DRAWN.iter().position(|state| *state == period.state) else { continue };
        let until = period.until.map_or(window.known_until, |until| until.0.min(window.known_until));
        if until < window.from || period.from.0 > window.known_until {
            continue;
        }
        let first = window.column_of(period.from.0);
        // A column shows the state at its end, so a state that begins in it counts and one that ends in it does not.
        let past = if until >= window.until { COLUMNS } else { window.column_of(until) };
        if first < past {
            steps[drawn][first] += 1;
            steps[drawn][past] -= 1;
        }
    }
    steps.map(|steps| {
        let mut count = 0;
        let counts = steps.into_iter().take(COLUMNS).map(|step| {
            count += step;
            usize::try_from(count).unwrap_or_default()
        });
        counts.collect()
    })
}

/// Returns the areas of the states that occur, one above the other.
fn state_areas(counted: &[Vec<usize>; DRAWN.len()], tasks: usize) -> Vec<StateArea> {
    // A state of any task is seen: its area is at least one unit high.
    let height = |count: usize| (count * AREA_HEIGHT).div_ceil(tasks.max(1));
    let mut below = vec![0_usize; COLUMNS];
    let mut areas = Vec::new();
    for (state, counts) in DRAWN.into_iter().zip(counted) {
        let bands: Vec<(usize, usize)> = below
            .iter_mut()
            .zip(counts)
            .map(|(below, count)| {
                let bottom = (*below).min(AREA_HEIGHT - usize::from(*count > 0));
                let top = (bottom + height(*count)).min(AREA_HEIGHT);
                *below = top;
                (bottom, top)
            })
            .collect();
        let mut path = String::new();
        let mut column = 0;
        for band in bands.chunk_by(|a, b| a == b) {
            let (bottom, top) = band[0];
            if top > bottom {
                let (x, wide) = (column * COLUMN_WIDTH, band.len() * COLUMN_WIDTH);
                // Writing to a string cannot fail.
                let _ = write!(path, "M{x} {}h{wide}v{}h-{wide}z", AREA_HEIGHT - top, top - bottom);
            }
            column += band.len();
        }
        if !path.is_empty() {
            areas.push(StateArea { state, path });
        }
    }
    areas
}

/// Returns the times of the marks of each kind within the window, ascending.
fn marks_by_kind(tasks: &[&TaskPeriods], window: TimeWindow) -> Vec<(TaskMarkKind, Vec<u64>)> {
    let of_kind = |kind: TaskMarkKind| {
        let marks = tasks.iter().flat_map(|task| &task.marks).filter(|mark| mark.kind == kind);
        let mut times: Vec<u64> = marks.map(|mark| mark.at.0).filter(|at| window.includes(*at)).collect();
        times.sort_unstable();
        (kind, times)
    };
    TaskMarkKind::ALL.into_iter().map(of_kind).collect()
}

/// Returns how many tasks had failed before the window, and had not come back by its beginning.
fn count_failed_before(tasks: &[&TaskPeriods], window: TimeWindow) -> usize {
    let has_failed = |task: &&&TaskPeriods| {
        task.periods.iter().any(|period| {
            period.state == TaskPhase::Failed
                && period.from.0 < window.from
                && period.until.is_none_or(|until| until.0 > window.from)
        })
    };
    tasks.iter().filter(has_failed).count()
}

/// Returns the places of these times, each once; of more than [`MARKS_MAX`] some, evenly.
fn distinct_places(times: &[u64], window: TimeWindow) -> Vec<usize> {
    let mut places: Vec<usize> = times.iter().map(|at| window.place_of(*at)).collect();
    places.dedup();
    let step = places.len().div_ceil(MARKS_MAX).max(1);
    places.into_iter().step_by(step).collect()
}

/// Returns the share of the shown time for which the tasks were connected, in thousandths.
fn connected_thousandths(tasks: &[&TaskPeriods], window: TimeWindow) -> u64 {
    let from = window.from.max(window.known_from);
    let periods = tasks.iter().flat_map(|task| &task.periods);
    let connected = periods.filter(|period| period.state == TaskPhase::Connected).map(|period| {
        let until = period.until.map_or(window.known_until, |until| until.0.min(window.known_until));
        u128::from(until.saturating_sub(period.from.0.max(from)))
    });
    let all = u128::from(window.known_until.saturating_sub(from)) * tasks.len() as u128;
    u64::try_from(connected.sum::<u128>() * 1000 / all.max(1)).unwrap_or(1000)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::coordination::RunNumber;
    use crate::http::page_times::{TimeStyle, fill_times};
    use crate::http::pages::time_window::MarkTime;
    use crate::http::pages::times;
    use crate::service::{StatePeriod, TaskMark};

    fn states(tasks: Vec<TaskPeriods>) -> RunStates {
        RunStates {
            run: RunNumber(1),
            opened_at: Timestamp(1_000_000),
            until: Timestamp(501_000_000),
            goes_on: false,
            known_since: None,
            marks: Vec::new(),
            tasks,
        }
    }

    fn task(number: i32, periods: &[(TaskPhase, u64)]) -> TaskPeriods {
        let ends = periods.iter().skip(1).map(|(_, at)| Some(Timestamp(at * 1_000_000))).chain([None]);
        let period = |((state, from), until): (&(TaskPhase, u64), Option<Timestamp>)| StatePeriod {
            state: *state,
            from: Timestamp(from * 1_000_000),
            until,
        };
        let failed = periods.iter().filter(|(state, _)| *state == TaskPhase::Failed);
        let mark = |(_, at): &(TaskPhase, u64)| TaskMark {
            at: Timestamp(at * 1_000_000),
            kind: TaskMarkKind::Failed,
            class: None,
        };
        TaskPeriods {
            task: TaskId(number),
            periods: periods.iter().zip(ends).map(period).collect(),
            marks: failed.map(mark).collect(),
        }
    }

    #[test]
    fn a_row_is_as_high_in_each_state_as_the_share_of_tasks_in_it() {
        use TaskPhase::{Connected, Failed, Missing};
        let all = states(vec![
            task(0, &[(Missing, 1), (Connected, 101)]),
            task(1, &[(Missing, 1), (Connected, 101), (Failed, 301)]),
        ]);
        let window = TimeWindow::new(&all, &TimelinePageQuery::default());
        let both: Vec<&TaskPeriods> = all.tasks.iter().collect();
        let areas = state_areas(&count_by_column(&both, window), 2);
        let drawn: Vec<(TaskPhase, &str)> =
            areas.iter().map(|area| (area.state, area.path.as_str())).collect();
        assert_eq!(
            drawn,
            [(Connected, "M200 0h400v16h-400zM600 8h400v8h-400z"), (Failed, "M600 0h400v8h-400z"),]
        );
        assert_eq!(connected_thousandths(&both, window), 600);
        assert_eq!(marks_by_kind(&both, window)[0], (TaskMarkKind::Failed, vec![301_000_000]));
        // One failed task of a thousand is seen.
        let mut many: Vec<TaskPeriods> = (0..999).map(|number| task(number, &[(Connected, 1)])).collect();
        many.push(task(999, &[(Connected, 1), (Failed, 251)]));
        let many: Vec<&TaskPeriods> = many.iter().collect();
        let areas = state_areas(&count_by_column(&many, window), 1000);
        assert_eq!(areas[1].path, "M500 0h500v1h-500z");
    }

    #[test]
    fn a_window_stays_within_the_run_whatever_the_query_says() {
        let all = states(Vec::new());
        let window = |from: &str, until: &str| {
            let query =
                TimelinePageQuery { from: from.into(), until: until.into(), ..TimelinePageQuery::default() };
            let window = TimeWindow::new(&all, &query);
            (window.from, window.until)
        };
        assert_eq!(window("", ""), (1_000_000, 501_000_000));
        assert_eq!(window("101000000", "201000000"), (101_000_000, 201_000_000));
        assert_eq!(window("201000000", "101000000"), (201_000_000, 201_001_000));
        assert_eq!(window("0", "18446744073709551615"), (1_000_000, 501_000_000));
        assert_eq!(window("18446744073709551615", "x"), (500_999_000, 501_000_000));
        let marks = TimeWindow::new(&all, &TimelinePageQuery::default()).marks();
        assert!((4..=10).contains(&marks.len()), "{} marks", marks.len());
    }

    #[test]
    fn marks_show_a_date_where_the_day_changes_and_at_the_beginning_of_a_long_axis() {
        let texts = |hours: u64| -> Vec<String> {
            // The run opened at 2023-11-14, 22:13:20.
            let begin = 1_700_000_000_000_000;
            let run = RunStates {
                opened_at: Timestamp(begin),
                until: Timestamp(begin + hours * 3_600_000_000),
                ..states(Vec::new())
            };
            let text = |mark: AxisMark| {
                let MarkTime { at, before, is_whole_minute } = mark.time.expect("a time");
                let attribute = times::mark_attribute(&at, &before, &is_whole_minute);
                let filled = fill_times(&format!("<text{attribute}></text>"), at, TimeStyle::Utc);
                filled.split(['>', '<']).nth(2).unwrap().to_owned()
            };
            TimeWindow::new(&run, &TimelinePageQuery::default()).marks().into_iter().map(text).collect()
        };
        assert_eq!(texts(1), ["22:20", "22:30", "22:40", "22:50", "23:00", "23:10"]);
        assert_eq!(texts(3), ["22:30", "23:00", "23:30", "11-15 00:00", "00:30", "01:00"]);
        // The first mark of an axis of more than a day has a date, though its day does not change there.
        assert_eq!(texts(25)[..2], ["11-15 00:00", "06:00"]);
        assert_eq!(texts(48)[..5], ["11-15 00:00", "06:00", "12:00", "18:00", "11-16 00:00"]);
        assert_eq!(texts(24 * 5)[..3], ["11-15 00:00", "11-16 00:00", "11-17 00:00"]);
        assert_eq!(texts(24 * 30)[..2], ["11-16 00:00", "11-23 00:00"]);
    }
}
