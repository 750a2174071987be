//! Draws the ended barriers of a job as a waterfall: a row for each use of a barrier, and in it the arrivals of its
//! tasks. One use can be opened, with a row for each host or task.
//!
//! In a row, the shaded area is the time for which tasks were blocked: at each moment it is as high as the share of
//! the tasks that had arrived. So the area, as a part of the whole row, is the blocked time of all tasks. Begin at
//! [`Waterfall::new`], then [`OpenedBarrier::new`].

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::links::{host_page_path, short_host_name, task_page_path, task_ranges_text};
use super::live_page::BarriersPageQuery;
use super::picture_rows::{AREA_HEIGHT, ROW_HEIGHT};
use super::snapshot::JobSnapshot;
use super::status::{barrier_display_name, shorten};
use crate::coordination::{BarrierArrival, BarrierOutcome, BarrierRecordWithArrivals, HostId, TaskId};
use crate::text::{encode_query_value, format_count_with_noun, format_grouped, format_micros};

/// The maximum number of uses in the picture.
const ROWS_MAX: usize = 24;
/// The maximum number of hosts or tasks of an opened use: those that arrived last.
const GROUPS_MAX: usize = 64;
/// The width of the part of a row that shows time, in units of the picture.
const WIDTH: u64 = 1_000;
/// The maximum number of steps of a shaded area.
const STEPS_MAX: usize = 120;
/// The maximum number of arrivals that have dots of their own; of more, only the latest have.
const DOTS_MAX: usize = 64;
/// The number of latest arrivals that have dots among many.
const LATEST_DOTS: usize = 8;

/// The horizontal scale of a picture: this many microseconds are as wide as it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct TimeScale(u64);

impl TimeScale {
    /// Returns the place of a time after the first arrival.
    fn place_of(self, after_us: u64) -> u64 {
        u64::try_from(u128::from(after_us) * u128::from(WIDTH) / u128::from(self.0.max(1)))
            .unwrap_or(WIDTH)
            .min(WIDTH)
    }

    /// Returns marks at round times, each with its place and its text.
    fn marks(self) -> Vec<(u64, String)> {
        const MARKS: u64 = 5;
        let least = self.0.div_ceil(MARKS).max(1);
        let magnitude = 10_u64.pow(least.ilog10());
        let steps = [1_u64, 2, 5, 10].map(|factor| magnitude.saturating_mul(factor));
        let step = steps.into_iter().find(|step| *step >= least).unwrap_or(least);
        (0..=MARKS)
            .map_while(|mark| mark.checked_mul(step).filter(|at| *at <= self.0))
            .map(|at| (self.place_of(at), if at == 0 { "0".to_owned() } else { format_micros(at) }))
            .collect()
    }
}

/// One use of a barrier as a row.
pub(super) struct WaterfallRow {
    pub label: String,
    /// The query of the page that opens this use.
    pub query: String,
    pub description: String,
    pub passed: bool,
    pub y: usize,
    /// The outline of the shaded area.
    pub area: String,
    /// The arrivals that have dots, as one path of dots.
    pub dots: String,
    /// The places of the last arrival and of the end.
    pub last_x: u64,
    pub end_x: u64,
    pub last_label: String,
    pub is_open: bool,
}

/// The picture of the latest uses.
pub(super) struct Waterfall {
    pub rows: Vec<WaterfallRow>,
    pub marks: Vec<(u64, String)>,
    pub height: usize,
    /// Each use fills the width.
    pub has_own_scales: bool,
}

impl Waterfall {
    /// Draws the latest uses that the query selects, the newest first.
    pub fn new(snapshot: &JobSnapshot, query: &BarriersPageQuery) -> Self {
        let has_own_scales = query.scale == "own";
        let shown: Vec<&BarrierRecordWithArrivals> = snapshot
            .records
            .ended_barriers
            .iter()
            .map(AsRef::as_ref)
            .filter(|ended| query.barrier.is_empty() || *ended.record.id == *query.barrier)
            .take(ROWS_MAX)
            .collect();
        let longest = shown.iter().map(|ended| duration_us(ended)).max().unwrap_or_default();
        let row = |(place, ended): (usize, &&BarrierRecordWithArrivals)| {
            let scale = TimeScale(if has_own_scales { duration_us(ended) } else { longest });
            waterfall_row(snapshot, query, ended, scale, place * ROW_HEIGHT)
        };
        let rows: Vec<WaterfallRow> = shown.iter().enumerate().map(row).collect();
        Self {
            height: rows.len() * ROW_HEIGHT,
            marks: if has_own_scales { Vec::new() } else { TimeScale(longest).marks() },
            rows,
            has_own_scales,
        }
    }
}

/// Returns the time from the first arrival to the end.
fn duration_us(ended: &BarrierRecordWithArrivals) -> u64 {
    ended.record.ended.0.saturating_sub(ended.first_arrival_at().0)
}

fn waterfall_row(
    snapshot: &JobSnapshot,
    query: &BarriersPageQuery,
    ended: &BarrierRecordWithArrivals,
    scale: TimeScale,
    y: usize,
) -> WaterfallRow {
    let (record, first) = (&ended.record, ended.first_arrival_at().0);
    let mut after: Vec<u64> = ended.arrivals.iter().map(|arrival| arrival.at.0 - first).collect();
    after.sort_unstable();
    let end_x = scale.place_of(duration_us(ended));
    let last_x = after.last().map_or(0, |last| scale.place_of(*last));
    let name = barrier_display_name(&record.id);
    let last_label = record.last.map_or_else(String::new, |task| {
        match snapshot.host_assignment.host_of(task).filter(|_| ended.run == snapshot.view.run.number) {
            Some(host) if host.tasks.len() > 1 => format!("{task} on {}", short_host_name(&host.name)),
            _ => format!("task {task}"),
        }
    });
    let last = record.last.map_or_else(String::new, |last| format!("; task {last} was last"));
    let run =
        if ended.run == snapshot.view.run.number { String::new() } else { format!("run {}, ", ended.run) };
    let outcome = if record.outcome == BarrierOutcome::Passed { "passed" } else { "failed" };
    WaterfallRow {
        label: format!("{} {}", shorten(&name, 22), record.counter),
        query: BarriersPageQuery {
            barrier: query.barrier.clone(),
            opened: opened_barrier_text(ended),
            by: query.by.clone(),
            scale: query.scale.clone(),
        }
        .to_query(),
        description: format!(
            "{run}{name} use {}: {outcome}, {} of {} arrived within {}{last}; {} blocked in all",
            record.counter,
            format_grouped(record.arrived),
            format_grouped(record.members),
            format_micros(record.skew_us),
            format_micros(record.waited_us),
        ),
        passed: record.outcome == BarrierOutcome::Passed,
        y,
        area: blocked_area(&after, record.members, scale, end_x),
        dots: dots_path(&after, scale),
        last_x,
        end_x,
        last_label,
        is_open: query.opened == opened_barrier_text(ended),
    }
}

/// Returns the text that names a use in an address: run, counter and id.
fn opened_barrier_text(ended: &BarrierRecordWithArrivals) -> String {
    format!("{}/{}/{}", ended.run, ended.record.counter, ended.record.id)
}

/// Returns the outline of the area that is as high as the share of members that have arrived. `after` is ascending.
fn blocked_area(after: &[u64], members: usize, scale: TimeScale, end_x: u64) -> String {
    // In tenths of a unit, so that few of many arrivals show.
    let height = |arrived: usize| arrived * AREA_HEIGHT * 10 / members.max(1);
    let top = |arrived: usize| AREA_HEIGHT * 10 - height(arrived);
    let mut path = format!("M0 {AREA_HEIGHT}");
    let step = after.len().div_ceil(STEPS_MAX).max(1);
    for (place, at) in
        after.iter().enumerate().filter(|(place, _)| place % step == 0 || place + 1 == after.len())
    {
        // Writing to a string cannot fail.
        let top = top(place + 1);
        let _ = write!(path, "H{}V{}.{}", scale.place_of(*at), top / 10, top % 10);
    }
    let _ = write!(path, "H{end_x}V{AREA_HEIGHT}z");
    path
}

/// Returns the dots of the arrivals, or of the latest of many. `after` is ascending.
fn dots_path(after: &[u64], scale: TimeScale) -> String {
    let from = if after.len() > DOTS_MAX { after.len() - LATEST_DOTS } else { 0 };
    let mut path = String::new();
    let mut previous = None;
    for at in after[from..].iter().map(|at| scale.place_of(*at)) {
        if previous.replace(at) != Some(at) {
            // Writing to a string cannot fail.
            let _ = write!(path, "M{at} {}h0", AREA_HEIGHT / 2);
        }
    }
    path
}

/// A host or a task of an opened use.
pub(super) struct ArrivalRow {
    pub label: String,
    pub path: String,
    pub y: usize,
    /// The places of its first and its last arrival.
    pub first_x: u64,
    pub last_x: u64,
    pub dots: String,
    /// The times of its first and its last arrival after the first arrival of all, in microseconds.
    pub after_us: (u64, u64),
    /// The time for which its tasks waited, in microseconds.
    pub blocked_us: u64,
    pub tasks: String,
}

/// One use of a barrier, with a row for each of the hosts or tasks that arrived last.
pub(super) struct OpenedBarrier {
    pub name: String,
    pub counter: i64,
    pub description: String,
    pub by_host: bool,
    pub rows: Vec<ArrivalRow>,
    /// The number of earlier hosts or tasks that are not shown.
    pub others: usize,
    pub marks: Vec<(u64, String)>,
    pub height: usize,
    pub end_x: u64,
    /// The query of the arrivals of this barrier in REST.
    pub arrivals_query: String,
    /// The query of the page.
    pub query: BarriersPageQuery,
}

/// The arrivals of one host or task.
struct ArrivalGroup<'a> {
    host: Option<&'a HostId>,
    arrivals: Vec<BarrierArrival>,
}

impl OpenedBarrier {
    /// Draws the use that the query opens; `None` if it opens none, or one that is not kept.
    pub fn new(snapshot: &JobSnapshot, query: &BarriersPageQuery) -> Option<Self> {
        let ended = snapshot
            .records
            .ended_barriers
            .iter()
            .find(|ended| opened_barrier_text(ended) == query.opened)?;
        let (record, first) = (&ended.record, ended.first_arrival_at().0);
        // Hosts are known of the present run only.
        let by_host = query.by != "task"
            && ended.run == snapshot.view.run.number
            && snapshot.host_assignment.hosts().iter().any(|host| host.tasks.len() > 1);
        let mut groups = arrival_groups(snapshot, &ended.arrivals, by_host);
        groups.sort_by_key(|group| {
            let last = group.arrivals.iter().map(|arrival| (arrival.at, arrival.task)).max();
            std::cmp::Reverse(last)
        });
        let others = groups.len().saturating_sub(GROUPS_MAX);
        groups.truncate(GROUPS_MAX);
        let scale = TimeScale(duration_us(ended));
        let row = |(place, group): (usize, &ArrivalGroup<'_>)| {
            arrival_row(snapshot, group, (first, record.ended.0), scale, place * ROW_HEIGHT)
        };
        let rows: Vec<ArrivalRow> = groups.iter().enumerate().map(row).collect();
        let absent = record.members - record.arrived;
        let absent = if absent == 0 { String::new() } else { format!("; {} absent", format_grouped(absent)) };
        Some(Self {
            name: barrier_display_name(&record.id),
            counter: record.counter,
            description: format!(
                "{} of {} arrived within {}, and {} were blocked in all{absent}",
                format_grouped(record.arrived),
                format_count_with_noun(record.members, "member", "members"),
                format_micros(record.skew_us),
                format_micros(record.waited_us),
            ),
            by_host,
            height: rows.len() * ROW_HEIGHT,
            rows,
            others,
            marks: scale.marks(),
            end_x: scale.place_of(duration_us(ended)),
            arrivals_query: format!("run={}&barrier={}", ended.run, encode_query_value(&record.id)),
            query: query.clone(),
        })
    }

    /// Returns the query of the page without an opened use.
    pub fn query_closed(&self) -> String {
        BarriersPageQuery { opened: String::new(), by: String::new(), ..self.query.clone() }.to_query()
    }

    /// Returns the query of the page with rows by host or by task.
    pub fn query_by(&self, by: &str) -> String {
        BarriersPageQuery { by: by.to_owned(), ..self.query.clone() }.to_query()
    }
}

/// Groups arrivals by host, or one by one.
fn arrival_groups<'a>(
    snapshot: &'a JobSnapshot,
    arrivals: &[BarrierArrival],
    by_host: bool,
) -> Vec<ArrivalGroup<'a>> {
    let mut groups: BTreeMap<(Option<&HostId>, Option<TaskId>), Vec<BarrierArrival>> = BTreeMap::new();
    for arrival in arrivals {
        let host = snapshot.host_assignment.host_of(arrival.task).filter(|_| by_host).map(|host| &host.name);
        let alone = if host.is_none() { Some(arrival.task) } else { None };
        groups.entry((host, alone)).or_default().push(*arrival);
    }
    groups.into_iter().map(|((host, _), arrivals)| ArrivalGroup { host, arrivals }).collect()
}

fn arrival_row(
    snapshot: &JobSnapshot,
    group: &ArrivalGroup<'_>,
    (first, ended): (u64, u64),
    scale: TimeScale,
    y: usize,
) -> ArrivalRow {
    let mut after: Vec<u64> = group.arrivals.iter().map(|arrival| arrival.at.0 - first).collect();
    after.sort_unstable();
    let after_us = (after.first().copied().unwrap_or_default(), after.last().copied().unwrap_or_default());
    let tasks: Vec<TaskId> = group.arrivals.iter().map(|arrival| arrival.task).collect();
    let job = &snapshot.pages;
    let (label, path) = match (group.host, &tasks[..]) {
        (Some(host), _) => (short_host_name(host), host_page_path(job, host)),
        (None, [task, ..]) => (format!("task {task}"), task_page_path(job, task)),
        (None, []) => (String::new(), String::new()),
    };
    ArrivalRow {
        label,
        path,
        y,
        first_x: scale.place_of(after_us.0),
        last_x: scale.place_of(after_us.1),
        dots: dots_path(&after, scale),
        after_us,
        blocked_us: group.arrivals.iter().map(|arrival| ended.saturating_sub(arrival.at.0)).sum(),
        tasks: task_ranges_text(&tasks),
    }
}

impl BarriersPageQuery {
    /// Returns the query of the page's address.
    pub fn to_query(&self) -> String {
        let pairs =
            [("barrier", &self.barrier), ("open", &self.opened), ("by", &self.by), ("scale", &self.scale)];
        let set = pairs.into_iter().filter(|(_, value)| !value.is_empty());
        let texts: Vec<String> =
            set.map(|(name, value)| format!("{name}={}", encode_query_value(value))).collect();
        texts.join("&")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scale_has_marks_at_round_times() {
        let texts =
            |longest| TimeScale(longest).marks().into_iter().map(|(_, text)| text).collect::<Vec<_>>();
        assert_eq!(texts(1_000), ["0", "200 µs", "400 µs", "600 µs", "800 µs", "1.0 ms"]);
        assert_eq!(texts(84_000), ["0", "20 ms", "40 ms", "60 ms", "80 ms"]);
        assert_eq!(texts(0), ["0"]);
        for longest in [1, 7, 99, 12_345, 3_600_000_000, u64::MAX] {
            let marks = TimeScale(longest).marks();
            assert!((1..=6).contains(&marks.len()), "{longest}: {marks:?}");
            assert!(marks.iter().all(|(place, _)| *place <= WIDTH), "{longest}: {marks:?}");
        }
    }

    #[test]
    fn the_area_rises_with_each_arrival_to_the_share_that_has_arrived() {
        let scale = TimeScale(1_000);
        assert_eq!(blocked_area(&[0, 500], 2, scale, 1_000), "M0 16H0V8.0H500V0.0H1000V16z");
        assert_eq!(
            blocked_area(&[0, 500], 4, scale, 1_000),
            "M0 16H0V12.0H500V8.0H1000V16z",
            "two are absent"
        );
        assert_eq!(blocked_area(&[], 4, scale, 0), "M0 16H0V16z");
        let many: Vec<u64> = (0..10_000).map(|n| n / 10).collect();
        let area = blocked_area(&many, 10_000, scale, 1_000);
        assert!(area.len() < 2_000 && area.ends_with("V0.0H1000V16z"), "{area}");
        assert_eq!(dots_path(&[0, 0, 500], scale), "M0 8h0M500 8h0");
        assert_eq!(dots_path(&many, scale).matches('M').count(), 1, "the latest eight are in one place");
    }
}
