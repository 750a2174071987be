//! Reads the figures of a job at one moment from pages, REST, the command line and metrics.

use std::collections::BTreeMap;
use std::time::Duration;

use muster::http::api::{TaskTransfersPage, TransfersPage};
use serde_json::Value;

use super::pictures::PictureFigures;
use super::programs::RandomProgram;
use crate::harness::{muster, run};

/// The maximum number of attempts until nothing changes during a read.
const LOOKS: usize = 200;
/// The number of tasks whose own pages are read.
const TASK_PAGES: usize = 5;

/// The figures of a job at one moment, from all places.
pub struct DisplayedFigures {
    pub rest: Value,
    pub summary: Value,
    pub runs: Value,
    pub runs_listed: String,
    pub live: Value,
    pub keys: Value,
    pub exclusions: Value,
    pub findings: Value,
    pub newest_event: u64,
    pub metrics: String,
    pub status: String,
    pub list: String,
    pub job_page: String,
    pub barriers_page: String,
    pub keys_page: String,
    pub hosts: Value,
    pub hosts_listed: Value,
    pub hosts_page: String,
    pub exclusions_page: String,
    pub overview: String,
    pub transfers: TransfersPage,
    pub task_transfers: TaskTransfersPage,
    /// The number of tasks in REST with failures, and of stale ones.
    pub filtered: [usize; 2],
    /// The pairs of one task: in REST, and on the page.
    pub of_task: (i32, TransfersPage, String),
    pub transfer_events: Vec<Value>,
    pub transfer_events_listed: String,
    pub transfers_page: String,
    pub fleet_page: String,
    pub timeline_page: String,
    pub task_pages: BTreeMap<i32, String>,
    pub pictures: PictureFigures,
}

impl DisplayedFigures {
    pub fn read_all(program: &RandomProgram<'_>) -> Self {
        let server = program.server;
        let said = |arguments: &[&str]| {
            let ended = run(muster(arguments).args(["--server", &server.url()]));
            assert_eq!((ended.code, ended.err.as_str()), (Some(0), ""), "{arguments:?}");
            ended.out
        };
        let page = |rest: &str| server.get(&format!("/jobs/{}{rest}", program.job)).body;
        let mut last = String::new();
        for _ in 0..LOOKS {
            let before = stable_values(program);
            let jobs = server.get("/api/v1/jobs?limit=1000").json();
            let summary =
                jobs["jobs"].as_array().into_iter().flatten().find(|one| one["name"] == *program.job);
            let reported = get_task_transfers(program, "");
            let shown =
                reported.tasks.iter().map(|one| one.task.0).take(TASK_PAGES).chain([program.tasks - 1]);
            let one = reported.tasks.last().map_or(0, |last| last.task.0);
            let of_one = format!("/transfers?task={one}");
            let seen = Self {
                rest: program.get_job_json(""),
                summary: summary.expect("the job is listed").clone(),
                runs: program.get_job_json("/runs"),
                runs_listed: said(&["runs", "--job", &program.job]),
                live: program.get_job_json("/live"),
                keys: program.get_job_json("/keys?recursive=true&limit=1000"),
                exclusions: program.get_job_json("/exclusions"),
                findings: program.get_job_json("/findings"),
                newest_event: newest_event(program),
                metrics: server.get("/metrics").body,
                status: said(&["status", "--job", &program.job]),
                list: said(&["job", "list"]),
                job_page: page(""),
                barriers_page: page("/barriers"),
                keys_page: page("/keys"),
                hosts: program.get_job_json("/hosts"),
                hosts_listed: serde_json::from_str(&said(&["hosts", "--job", &program.job, "--json"]))
                    .expect("JSON"),
                hosts_page: page("/hosts"),
                exclusions_page: page("/exclusions"),
                overview: server.get("/").body,
                transfers: transfers(program, "?seconds=600"),
                filtered: ["failed", "stale"].map(|filter| get_task_transfers(program, filter).tasks.len()),
                of_task: (one, transfers(program, &format!("?task={one}")), page(&of_one)),
                transfer_events: match &program.get_job_json("/events?kind=transfer-failed&limit=1000")["events"]
                {
                    Value::Array(events) => events.clone(),
                    other => panic!("{other} is no list"),
                },
                transfer_events_listed: said(&[
                    "events",
                    "--job",
                    &program.job,
                    "--kind",
                    "transfer-failed",
                    "--json",
                ]),
                transfers_page: page("/transfers"),
                fleet_page: server.get("/transfers").body,
                timeline_page: page("/timeline"),
                task_pages: shown.map(|task| (task, page(&format!("/tasks/{task}")))).collect(),
                task_transfers: reported,
                pictures: PictureFigures::read(program),
            };
            let after = stable_values(program);
            if before == after {
                return seen;
            }
            last = format!("{before:?}\n{after:?}");
            std::thread::sleep(Duration::from_millis(20));
        }
        panic!("it never stands still: {last}");
    }

    /// Returns the samples of a job's metric with these labels, in the order of the scrape.
    pub fn samples(&self, name: &str, labels: &[(&str, &str)]) -> Vec<f64> {
        let wanted = |line: &&str| {
            line.strip_prefix(name).is_some_and(|rest| {
                rest.starts_with(['{', ' '])
                    && labels.iter().all(|(label, value)| rest.contains(&format!("{label}=\"{value}\"")))
            })
        };
        let value = |line: &str| line.rsplit(' ').next().and_then(|value| value.parse().ok());
        self.metrics.lines().filter(wanted).map(|line| value(line).expect("a number")).collect()
    }

    /// Returns the only sample of a metric with these labels.
    pub fn metric(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        match self.samples(name, labels)[..] {
            [sample] => sample,
            [] => panic!("no {name} {labels:?}"),
            _ => panic!("{name} {labels:?} is there twice"),
        }
    }
}

/// Returns the values of a job that do not change while nothing happens.
fn stable_values(program: &RandomProgram<'_>) -> [Value; 6] {
    let views = ["", "/findings", "/transfers?seconds=600", "/transfers/tasks", "/activity"].map(|rest| {
        let mut view = program.get_job_json(rest);
        view["seen_at"] = Value::Null;
        view
    });
    let [job, findings, transfers, tasks, activity] = views;
    [job, findings, transfers, tasks, activity, newest_event(program).into()]
}

fn transfers(program: &RandomProgram<'_>, query: &str) -> TransfersPage {
    serde_json::from_value(program.get_job_json(&format!("/transfers{query}"))).expect("a page of transfers")
}

/// Returns the reporting tasks, optionally filtered.
fn get_task_transfers(program: &RandomProgram<'_>, filter: &str) -> TaskTransfersPage {
    let query = if filter.is_empty() { String::new() } else { format!("?{filter}=true") };
    serde_json::from_value(program.get_job_json(&format!("/transfers/tasks{query}")))
        .expect("a page of tasks")
}

/// Returns the number of the newest event of all jobs.
fn newest_event(program: &RandomProgram<'_>) -> u64 {
    let of_job = |job| {
        let page = program.server.get(&format!("/api/v1/jobs/{job}/events?newest=true&limit=1")).json();
        page["events"][0]["number"].as_u64().expect("an event")
    };
    of_job("default").max(of_job(&program.job))
}

/// Returns the items of a JSON list.
pub fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// Returns the first number after `mark`, with or without separators between thousands.
pub fn number_after(text: &str, mark: &str) -> Option<u64> {
    let (_, rest) = text.split_once(mark)?;
    let digits = rest.chars().take_while(|c| c.is_ascii_digit() || *c == '\u{202f}');
    digits.filter(char::is_ascii_digit).collect::<String>().parse().ok()
}

/// Returns each text between two marks.
pub fn texts_between<'a>(text: &'a str, begin: &str, end: &str) -> std::vec::IntoIter<&'a str> {
    let inner = |rest: &'a str| rest.split_once(end).map_or(rest, |(inner, _)| inner);
    text.split(begin).skip(1).map(inner).collect::<Vec<_>>().into_iter()
}

/// Returns the section of a page with this name, if there is one.
pub fn html_section<'a>(page: &'a str, name: &str) -> &'a str {
    texts_between(page, &format!("<section aria-labelledby=\"{name}-title\""), "</section>")
        .next()
        .unwrap_or_default()
}

/// Returns the text of a part of a page.
pub fn html_text(html: &str) -> String {
    let mut pieces = html.split('<');
    let first = pieces.next().unwrap_or_default();
    let rest = pieces.map(|piece| piece.split_once('>').map_or("", |(_, text)| text));
    let all: String = std::iter::once(first).chain(rest).collect();
    all.split([' ', '\n']).filter(|word| !word.is_empty()).collect::<Vec<_>>().join(" ")
}

/// Returns the table rows in a part of a page, by column heading.
pub fn table_rows(html: &str) -> Vec<BTreeMap<String, String>> {
    let cells = |row: &str| -> Vec<String> {
        let row = row.replace("<th", "<td").replace("</th>", "</td>");
        let inner = |cell: &str| cell.split_once('>').map_or_else(String::new, |(_, inner)| html_text(inner));
        texts_between(&row, "<td", "</td>").map(inner).collect()
    };
    let tables = texts_between(html, "<table", "</table>").map(|table| {
        let mut rows = texts_between(table, "<tr", "</tr>").map(cells);
        let heads = rows.next().unwrap_or_default();
        rows.map(|row| heads.iter().cloned().zip(row).collect()).collect::<Vec<_>>()
    });
    tables.flatten().collect()
}

/// Returns the definition lists in a part of a page, by term.
pub fn definition_list(html: &str) -> BTreeMap<String, String> {
    let all = texts_between(html, "<div><dt>", "</div>").filter_map(|entry| entry.split_once("</dt>"));
    all.map(|(term, says)| (html_text(term), html_text(says))).collect()
}

/// Returns the numbers in a text, with their units.
pub fn numbers_with_units(text: &str) -> Vec<String> {
    const UNITS: [&str; 18] = [
        "B", "KiB", "MiB", "GiB", "TiB", "PiB", "B/s", "KiB/s", "MiB/s", "GiB/s", "TiB/s", "PiB/s", "µs",
        "ms", "s", "min", "h", "d",
    ];
    let mut found: Vec<String> = Vec::new();
    let mut after_number = false;
    for word in text.split(' ').map(|word| word.trim_matches([',', ';', ':', '(', ')'])) {
        let is_number = word.starts_with(|c: char| c.is_ascii_digit());
        match found.last_mut() {
            _ if is_number => found.push(word.to_owned()),
            Some(last) if after_number && UNITS.contains(&word) => last.push_str(word),
            _ => {}
        }
        after_number = is_number;
    }
    found
}

/// Returns a number with separators between thousands, as pages show it.
pub fn group_thousands(number: u64) -> String {
    let digits = number.to_string();
    let first = digits.len() % 3;
    let (head, tail) = digits.split_at(first);
    let mut groups: Vec<&str> = if head.is_empty() { Vec::new() } else { vec![head] };
    groups.extend((0..tail.len()).step_by(3).map(|at| &tail[at..at + 3]));
    groups.join("\u{202f}")
}
