//! The lists of the REST API as tables: the columns of each list, as CSV.
//!
//! A list has the query parameter `format`. As JSON it comes in pages; as CSV it comes whole, unless the client asks for
//! a limit. Begin at [`answer_in_format`].

use axum::Json;
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::api::{
    BarriersPage, DevicesPage, EventsPage, ExclusionsPage, HostsPage, JobsPage, RunsPage, TaskStatesPage,
    TaskStatesView, TaskTransfersPage, TasksPage, TransfersPage,
};
use super::csv::CsvTable;
use super::pagination::paginate;
use crate::coordination::{ExclusionEndKind, TaskId};

/// The format of a list.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub(super) enum TableFormat {
    /// JSON.
    #[default]
    Json,
    /// A table with a line for each item.
    Csv,
}

impl TableFormat {
    /// Returns the page of `items` that a client has asked for, as [`paginate`] does. A table without a limit has all
    /// items.
    pub fn paginate<T, K: PartialOrd + Copy>(
        self,
        items: impl IntoIterator<Item = T>,
        after: Option<K>,
        asked: Option<usize>,
        key: impl Fn(&T) -> K,
    ) -> (Vec<T>, Option<K>) {
        if self == Self::Json || asked.is_some() {
            return paginate(items, after, asked, key);
        }
        (items.into_iter().filter(|item| after.is_none_or(|after| key(item) > after)).collect(), None)
    }
}

/// A list that can be a table.
pub(super) trait ToCsv {
    /// Returns the table: a row for each item of the list.
    fn to_csv(&self) -> CsvTable;
}

/// Returns a list in the format that the client has asked for.
pub(super) fn answer_in_format<T: ToCsv + Serialize>(format: TableFormat, list: T) -> Response {
    match format {
        TableFormat::Json => Json(list).into_response(),
        TableFormat::Csv => list.to_csv().into_response(),
    }
}

/// Returns task numbers as ranges, however many there are.
fn ranges_text(tasks: &[TaskId]) -> String {
    crate::text::format_ranges(tasks.iter().map(|task| task.0), usize::MAX, "-", "")
}

impl ToCsv for JobsPage {
    fn to_csv(&self) -> CsvTable {
        let mut table = CsvTable::new(&[
            "job",
            "run",
            "state",
            "live",
            "tasks",
            "recoverable",
            "exclusions",
            "first_cause",
        ]);
        for job in &self.jobs {
            table
                .row()
                .text(job.name.as_str())
                .value(job.run)
                .value(job.state)
                .value(job.live)
                .value(job.tasks)
                .value(job.recoverable)
                .value(job.exclusions)
                .text(job.first_cause.as_ref().map_or("", |cause| &cause.why));
        }
        table
    }
}

impl ToCsv for TasksPage {
    fn to_csv(&self) -> CsvTable {
        let mut table = CsvTable::new(&[
            "task",
            "state",
            "since",
            "host",
            "address",
            "incarnation",
            "lives",
            "last_heartbeat",
            "waits_at",
            "waits_for",
            "excluded",
            "error",
            "heartbeat_interval_us",
            "longest_gap_us",
            "score",
            "late_us",
            "held_up_us",
        ]);
        for task in &self.tasks {
            let (life, late) = (task.lives.first(), task.straggling.as_ref());
            let keys: Vec<&str> = task.waits_for.iter().map(|wait| wait.key.as_str()).collect();
            table
                .row()
                .value(task.task)
                .value(task.state().name())
                .time(task.since)
                .text(task.host.as_ref().map_or("", |host| host.as_str()))
                .optional(life.and_then(|life| life.peer))
                .text(life.map_or("", |life| &life.incarnation))
                .value(task.lives.len())
                .optional_time(task.last_heartbeat)
                .text(task.waits_at.join(" "))
                .text(keys.join(" "))
                .text(task.excluded.as_ref().map_or_else(String::new, |it| it.reason.to_string()))
                .text(task.why.as_deref().unwrap_or_default())
                .optional(task.pulse.as_ref().map(|pulse| pulse.interval_us))
                .optional(task.pulse.as_ref().map(|pulse| pulse.longest_recent_us))
                .optional(late.map(|it| it.score))
                .optional(late.map(|it| it.lateness_us))
                .optional(late.map(|it| it.held_up_us));
        }
        table
    }
}

impl ToCsv for TaskStatesPage {
    /// A row for each period. The last period of a task ends when its states were last known.
    fn to_csv(&self) -> CsvTable {
        let mut table = CsvTable::new(&["run", "task", "host", "state", "from_us", "until_us"]);
        for TaskStatesView { host, states } in &self.tasks {
            for period in &states.periods {
                table
                    .row()
                    .value(self.run)
                    .value(states.task)
                    .text(host.as_ref().map_or("", |host| host.as_str()))
                    .value(period.state.name())
                    .value(period.from.0)
                    .value(period.until.unwrap_or(self.until).0);
            }
        }
        table
    }
}

impl ToCsv for HostsPage {
    fn to_csv(&self) -> CsvTable {
        let mut table = CsvTable::new(&[
            "host",
            "state",
            "tasks",
            "task_numbers",
            "connected",
            "last_heartbeat",
            "later_than_median_us",
            "score",
            "was_last",
            "devices",
            "addresses",
        ]);
        for host in &self.hosts {
            let addresses: Vec<String> = host.addresses.iter().map(ToString::to_string).collect();
            let late = host.lateness.as_ref();
            table
                .row()
                .text(host.host.as_str())
                .value(host.state.name())
                .value(host.tasks.len())
                .text(ranges_text(&host.tasks))
                .value(host.counts.connected)
                .optional_time(host.last_heartbeat)
                .optional(late.map(|it| it.above_median_us))
                .optional(late.map(|it| it.score))
                .optional(late.map(|it| it.last))
                .value(host.devices)
                .text(addresses.join(" "));
        }
        table
    }
}

impl ToCsv for BarriersPage {
    fn to_csv(&self) -> CsvTable {
        let mut table = CsvTable::new(&[
            "barrier",
            "use",
            "kind",
            "outcome",
            "began",
            "ended",
            "deadline",
            "members",
            "arrived",
            "first",
            "last",
            "skew_us",
            "waited_us",
            "missing",
        ]);
        for it in &self.barriers {
            table
                .row()
                .text(&it.id)
                .value(it.counter)
                .value(it.kind.name())
                .value("in-progress")
                .time(it.since)
                .value("")
                .time(it.deadline)
                .value(it.members)
                .value(it.arrived)
                .value(it.first)
                .optional(it.arrivals.last().map(|latest| latest.task))
                .value("")
                .value("")
                .text(ranges_text(&it.missing));
        }
        for it in self.recent.iter().map(|ended| &ended.record) {
            table
                .row()
                .text(&it.id)
                .value(it.counter)
                .value(it.kind.name())
                .value(it.outcome.name())
                .time(it.began)
                .time(it.ended)
                .value("")
                .value(it.members)
                .value(it.arrived)
                .optional(it.first)
                .optional(it.last)
                .value(it.skew_us)
                .value(it.waited_us)
                .text(ranges_text(&it.without));
        }
        table
    }
}

impl ToCsv for DevicesPage {
    fn to_csv(&self) -> CsvTable {
        let mut table =
            CsvTable::new(&["global_id", "task", "local_id", "platform", "kind", "partition", "boot_id"]);
        for it in &self.devices {
            table
                .row()
                .value(it.global_id)
                .value(it.task)
                .value(it.local_id)
                .text(&it.platform)
                .text(&it.kind)
                .optional(it.partition)
                .text(&it.boot_id);
        }
        table
    }
}

impl ToCsv for TransfersPage {
    /// Returns a row for each pair of tasks.
    fn to_csv(&self) -> CsvTable {
        let mut table = CsvTable::new(&["from", "to", "transport", "sent", "received", "rate"]);
        for it in &self.pairs {
            table
                .row()
                .value(it.from)
                .value(it.to)
                .value(it.transport)
                .optional(it.sent)
                .optional(it.received)
                .value(it.rate);
        }
        table
    }
}

impl ToCsv for TaskTransfersPage {
    fn to_csv(&self) -> CsvTable {
        let mut table = CsvTable::new(&[
            "task",
            "incarnation",
            "lives",
            "stale",
            "reported_at",
            "sent",
            "received",
            "sent_rate",
            "received_rate",
            "failed_launches",
        ]);
        for it in &self.tasks {
            table
                .row()
                .value(it.task)
                .text(&it.incarnation)
                .value(it.lives)
                .value(it.stale)
                .time(it.reported_at)
                .value(it.totals.sent_bytes())
                .value(it.totals.received_bytes())
                .value(it.sent_rate)
                .value(it.received_rate)
                .value(it.totals.failed_launches());
        }
        table
    }
}

impl ToCsv for ExclusionsPage {
    fn to_csv(&self) -> CsvTable {
        let mut table = CsvTable::new(&[
            "number",
            "target",
            "reason",
            "actor",
            "since",
            "expires",
            "refused",
            "ended",
            "how",
            "ended_by",
            "ended_reason",
        ]);
        for it in &self.exclusions {
            let end = it.ended.as_ref();
            let how = end.map(|end| match end.how {
                ExclusionEndKind::Expired => "expired",
                ExclusionEndKind::Lifted => "lifted",
            });
            let actor = end.and_then(|end| end.actor.as_ref()).map(ToString::to_string);
            let reason = end.and_then(|end| end.reason.as_ref()).map(ToString::to_string);
            table
                .row()
                .value(it.id)
                .text(it.target.to_string())
                .text(it.reason.to_string())
                .text(it.actor.to_string())
                .time(it.since)
                .optional_time(it.expires_at)
                .value(it.refused)
                .optional_time(end.map(|end| end.at))
                .optional(how)
                .text(actor.unwrap_or_default())
                .text(reason.unwrap_or_default());
        }
        table
    }
}

impl ToCsv for EventsPage {
    fn to_csv(&self) -> CsvTable {
        let mut table =
            CsvTable::new(&["number", "time", "run", "kind", "task", "barrier", "use", "reason", "tasks"]);
        for event in &self.events {
            let about = event.what.subject();
            table
                .row()
                .value(event.number)
                .time(event.at)
                .value(event.run)
                .value(event.what.kind())
                .optional(about.task)
                .text(about.barrier.map_or("", |(id, _)| id))
                .optional(about.barrier.map(|(_, counter)| counter))
                .text(&event.reason)
                .text(ranges_text(&event.what.tasks()));
        }
        table
    }
}

impl ToCsv for RunsPage {
    fn to_csv(&self) -> CsvTable {
        let mut table = CsvTable::new(&[
            "run",
            "state",
            "opened",
            "started",
            "ended",
            "length_us",
            "first_cause_task",
            "first_cause",
        ]);
        for run in &self.runs {
            let cause = run.first_cause.as_ref();
            table
                .row()
                .value(run.number)
                .value(run.state)
                .time(run.opened_at)
                .optional_time(run.started_at)
                .optional_time(run.ended_at)
                .optional(run.length_us)
                .optional(cause.and_then(|cause| cause.task))
                .text(cause.map_or("", |cause| &cause.why));
        }
        table
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_is_whole_unless_a_limit_is_asked_for() {
        let page = |format: TableFormat, after, limit| {
            let (items, next) = format.paginate(0..3000_u64, after, limit, |item| *item);
            (items.len(), next)
        };
        assert_eq!(page(TableFormat::Csv, None, None), (3000, None));
        assert_eq!(page(TableFormat::Csv, Some(999), None), (2000, None));
        assert_eq!(page(TableFormat::Csv, None, Some(10)), (10, Some(9)));
        assert_eq!(page(TableFormat::Json, None, None), (1000, Some(999)));
    }
}
