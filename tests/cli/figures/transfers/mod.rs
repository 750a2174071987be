//! The figures of a job's transfers: totals, by task and by pair.

mod failures;
mod tasks_and_pairs;
mod totals_of_all_tasks;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;

use muster::coordination::TaskId;
use muster::proto::muster::v1::TransferReport;
use muster::service::reports::{
    ClockReading, LinksView, PairView, ReportedTransport, TaskTransfers, TotalsView, TransferOutcome,
    TransfersView,
};
use muster::text::{format_bytes, format_micros};
use serde_json::Value;

use super::displayed_figures::{
    DisplayedFigures, definition_list, group_thousands, html_section, html_text, numbers_with_units,
    table_rows, texts_between,
};
use super::programs::RandomProgram;
use super::{ComparedFigures, ComparisonContext};

/// The number of pairs and tasks that a page lists.
const LISTED: usize = 40;
/// The number of tasks up to which a page has a matrix.
const MATRIX: usize = 16;
/// The number of tasks up to which each has a row in the picture of pairs.
const OWN_ROWS: usize = 64;
/// The number of newest failures that a page lists for each reason.
const NEWEST: usize = 3;

struct Comparison<'a> {
    program: &'a RandomProgram<'a>,
    seen: &'a DisplayedFigures,
    view: &'a TransfersView,
    tasks: &'a [TaskTransfers],
    /// The totals on the page of transfers, by term.
    sums: BTreeMap<String, String>,
    /// The row of the job in the table of all jobs with reports.
    line: BTreeMap<String, String>,
    ledger: &'a mut ComparedFigures,
}

/// Compares a job's transfers in all places.
pub fn compare_transfer_figures(
    program: &RandomProgram<'_>,
    seen: &DisplayedFigures,
    ledger: &mut ComparedFigures,
) {
    let (view, tasks) = (&seen.transfers.summary, &*seen.task_transfers.tasks);
    let line = table_rows(&seen.fleet_page).into_iter().find(|row| row["Job"] == program.job);
    if tasks.is_empty() {
        let why = ComparisonContext(program, seen);
        assert_eq!((view.reporting, view.stale, line), (0, 0, None), "{why}");
        assert!(html_text(&seen.transfers_page).contains("reports transfers."), "{why}");
        let shown = |line: &&str| line.starts_with("muster_transfer_") && line.contains(&program.job_label());
        assert_eq!(seen.metrics.lines().find(shown), None, "{why}");
        return;
    }
    let sums = definition_list(html_section(&seen.transfers_page, "moves"));
    let line = line.expect("a line of the job");
    let mut all = Comparison { program, seen, view, tasks, sums, line, ledger };
    all.compare_reports();
    all.compare_totals();
    all.compare_gauges();
    all.compare_times();
    all.compare_clocks();
    all.compare_failures();
    all.compare_events();
    all.compare_tasks();
    all.compare_task_pages();
    all.compare_pairs();
    all.compare_rates();
    all.compare_with_what_was_reported();
}

fn saturating_sum(all: impl IntoIterator<Item = u64>) -> u64 {
    all.into_iter().fold(0, u64::saturating_add)
}

/// Returns the figures in several texts.
fn figures_in_texts<const COUNT: usize>(texts: [String; COUNT]) -> Vec<String> {
    texts.iter().flat_map(|text| numbers_with_units(text)).collect()
}

/// Returns bytes over one transport: sent, received.
fn bytes_moved(totals: &TotalsView, transport: ReportedTransport) -> [u64; 2] {
    let of = totals.bytes.iter().find(|of| of.transport == transport);
    of.map_or([0; 2], |of| [of.sent, of.received])
}

fn bytes_moved_by_all_transports(totals: &TotalsView) -> [u64; 2] {
    [0, 1].map(|way: usize| {
        saturating_sum(ReportedTransport::ALL.map(|transport| bytes_moved(totals, transport)[way]))
    })
}

fn launches_with_outcome(totals: &TotalsView, outcome: TransferOutcome) -> u64 {
    saturating_sum(totals.launches.iter().filter(|of| of.outcome == outcome).map(|of| of.launches))
}

/// Returns launches: completed, failed.
fn completed_and_failed_launches(totals: &TotalsView) -> [u64; 2] {
    let failed = TransferOutcome::all().filter(|outcome| *outcome != TransferOutcome::COMPLETED);
    [
        launches_with_outcome(totals, TransferOutcome::COMPLETED),
        saturating_sum(failed.map(|outcome| launches_with_outcome(totals, outcome))),
    ]
}

/// Returns connections, lanes, and launches in progress over one transport.
fn connection_totals(links: &[LinksView], transport: ReportedTransport) -> [u64; 3] {
    let of = links.iter().find(|of| of.transport == transport);
    of.map_or([0; 3], |of| [of.connections, of.lanes, of.launches])
}

fn connection_totals_of_all_transports(links: &[LinksView]) -> [u64; 3] {
    [0, 1, 2].map(|which: usize| {
        saturating_sum(ReportedTransport::ALL.map(|transport| connection_totals(links, transport)[which]))
    })
}

/// Returns the bytes of a pair: sent, received, and the larger of both.
fn bytes_of_pair(pair: &PairView) -> [u64; 3] {
    let (sent, received) = (pair.sent.unwrap_or(0), pair.received.unwrap_or(0));
    [sent, received, sent.max(received)]
}

impl Comparison<'_> {
    fn assert_same<T: PartialEq + Debug>(&mut self, figure: &'static str, said: &[(&str, T)]) {
        self.ledger.assert_same(figure, said, &ComparisonContext(self.program, self.seen));
    }

    fn samples(&self, name: &str, labels: &[(&str, &str)]) -> Vec<f64> {
        let mut all = vec![("muster_job", self.program.job.as_str())];
        all.extend(labels);
        self.seen.samples(&format!("muster_transfer_{name}"), &all)
    }

    fn metric(&self, name: &str, labels: &[(&str, &str)]) -> u64 {
        match self.samples(name, labels)[..] {
            [sample] => sample as u64,
            ref other => {
                panic!("{name} {labels:?}: {other:?}\n{}", ComparisonContext(self.program, self.seen))
            }
        }
    }

    fn sum_over_tasks(&self, of: impl Fn(&TaskTransfers) -> u64) -> u64 {
        saturating_sum(self.tasks.iter().map(of))
    }

    fn page(&self, term: &str) -> Vec<String> {
        let says = self.sums.get(term).unwrap_or_else(|| panic!("no {term} in {:?}", self.sums));
        numbers_with_units(says)
    }

    fn compare_reports(&mut self) {
        let (view, stale) = (self.view, self.tasks.iter().filter(|task| task.stale).count());
        let reporting = self.tasks.len() - stale;
        let mut shown = vec![group_thousands(view.reporting as u64), group_thousands(view.tasks as u64)];
        let among_all: Vec<String> = numbers_with_units(&self.line["Tasks that report"]);
        self.assert_same("tasks of transfers", &[("REST", shown.clone()), ("page of all jobs", among_all)]);
        if view.stale > 0 {
            shown.push(group_thousands(view.stale as u64));
        }
        let page = self.page("Tasks that report");
        self.assert_same("tasks of transfers", &[("REST", shown), ("page", page)]);
        let metric = self.metric("reporting_tasks", &[]) as usize;
        self.assert_same(
            "tasks that report transfers",
            &[("REST", view.reporting), ("REST tasks", reporting), ("metrics", metric)],
        );
        let filtered = self.seen.filtered[1];
        self.assert_same(
            "tasks that stopped reporting",
            &[("REST", view.stale), ("REST tasks", stale), ("REST stale tasks", filtered)],
        );
        for (result, count) in [("taken", view.taken), ("repeated", view.repeated), ("refused", view.refused)]
        {
            let metric = self.metric("reports_total", &[("result", result)]);
            self.assert_same("reports of transfers", &[("REST", count), ("metrics", metric)]);
        }
    }

    fn compare_with_what_was_reported(&mut self) {
        if self.view.run.0 != 1 {
            return;
        }
        let answered = &self.program.answered[self.program.of_deleted..];
        let accepted: Vec<&TransferReport> =
            answered.iter().filter(|(_, accepted)| *accepted).map(|(report, _)| report).collect();
        let (taken, count) = (self.view.taken + self.view.repeated, accepted.len() as u64);
        self.assert_same("reports that were accepted", &[("REST", taken), ("workers", count)]);
        let mut last = BTreeMap::<(u32, u64), &TransferReport>::new();
        for report in accepted {
            let newest = last.entry((report.task, report.incarnation)).or_insert(report);
            if report.sequence > newest.sequence {
                *newest = report;
            }
        }
        let said = |of: fn(&TransferReport, ReportedTransport) -> u64, transport| {
            saturating_sum(last.values().map(|report| of(report, transport)))
        };
        for transport in ReportedTransport::ALL {
            let sent = said(|report, transport| bytes_in_report(report, transport)[0], transport);
            let received = said(|report, transport| bytes_in_report(report, transport)[1], transport);
            let in_rest = bytes_moved(&self.view.totals, transport);
            self.assert_same("bytes that were reported", &[("REST", in_rest), ("workers", [sent, received])]);
        }
        for outcome in TransferOutcome::all() {
            let ended_so = last.values().flat_map(|report| &report.outcomes);
            let ended_so = ended_so
                .filter(|row| TransferOutcome::from_name(&row.outcome) == outcome)
                .map(|row| row.launches);
            let (reported, in_rest) =
                (saturating_sum(ended_so), launches_with_outcome(&self.view.totals, outcome));
            self.assert_same("launches that were reported", &[("REST", in_rest), ("workers", reported)]);
        }
        let lives = |task: &TaskTransfers| {
            last.keys().filter(|(id, _)| TaskId(id.cast_signed()) == task.task).count()
        };
        for task in self.tasks {
            let said = [("REST", task.lives as usize), ("workers", lives(task))];
            self.assert_same("lives that reported", &said);
        }
    }
}

/// Returns the bytes in a report over one transport: sent, received.
fn bytes_in_report(report: &TransferReport, transport: ReportedTransport) -> [u64; 2] {
    let by_this = report.pairs.iter().filter(|row| ReportedTransport::from_name(&row.transport) == transport);
    let both = by_this.map(|row| [row.sent_bytes, row.received_bytes]);
    both.fold([0; 2], |[sent, received], [s, r]| [sent.saturating_add(s), received.saturating_add(r)])
}
