//! The figures of the pages that no random program fills: heartbeats of a task, transfers of a host, search, a drain, and
//! requests for stacks.

use std::collections::BTreeSet;
use std::time::Duration;

use muster::http::api::TaskTransfersPage;
use muster::text::{encode_query_value, format_bytes, format_micros};
use serde_json::{Value, json};

use super::ComparedFigures;
use super::displayed_figures::{
    definition_list, group_thousands, html_section, html_text, list, numbers_with_units, table_rows,
    texts_between,
};
use super::programs::RandomProgram;
use crate::harness::wait_until;

/// The number of tasks whose own pages are read.
const TASK_PAGES: i32 = 5;

/// The program of the test, and where its figures are compared.
struct OtherPages<'a> {
    program: &'a RandomProgram<'a>,
    ledger: &'a mut ComparedFigures,
}

/// Lets each task of a program register, report transfers and send heartbeats, and then compares the pages.
pub fn compare_other_pages(program: &mut RandomProgram<'_>, ledger: &mut ComparedFigures) {
    let tasks = program.tasks;
    (0..tasks).for_each(|task| program.register(task));
    wait_until("all have registered", || (0..tasks).all(|task| program.is_registered(task)));
    for round in 1..6 {
        for task in 0..tasks {
            program.send_next_report(task);
            program.send_heartbeat(task);
        }
        program.wait_for_answers();
        let has_gaps = |task| list(&program.get_job_json(&format!("/tasks/{task}"))["recent_gaps"]).len();
        wait_until("the heartbeats have come", || (0..tasks).all(|task| has_gaps(task) >= round - 1));
        // Two gaps that end within one unit of a history's time, 10 ms, are one point of it.
        std::thread::sleep(Duration::from_millis(25));
    }
    program.insert_key(0, "shape/a", 700);
    program.insert_key(1, "shape/b", 90);
    wait_until("the keys are there", || {
        list(&program.get_job_json("/keys?recursive=true")["keys"]).len() >= 2
    });
    let mut pages = OtherPages { program, ledger };
    pages.compare_heartbeats();
    pages.compare_hosts();
    pages.compare_search();
    pages.compare_drain();
    pages.compare_stacks();
}

fn numbers(value: &Value) -> Vec<u64> {
    list(value).iter().filter_map(Value::as_u64).collect()
}

/// Returns the numbers in a text of ranges, such as `0–2, 5`.
fn numbers_of_ranges(text: &str) -> Vec<u64> {
    let ends = |range: &str| -> Vec<u64> {
        range.split(['–', '-']).filter_map(|end| end.trim().parse().ok()).collect()
    };
    let range = |text: &str| match ends(text)[..] {
        [first, last] => (first..=last).collect(),
        ref one => one.to_vec(),
    };
    text.split(',').flat_map(range).collect()
}

impl OtherPages<'_> {
    fn page(&self, rest: &str) -> String {
        let answer = self.program.server.get(&format!("/jobs/{}{rest}", self.program.job));
        assert_eq!(answer.status, 200, "{rest}");
        answer.body
    }

    #[track_caller]
    fn assert_same<T: PartialEq + std::fmt::Debug>(&mut self, figure: &'static str, said: &[(&str, T)]) {
        self.ledger.assert_same(figure, said, &self.program.job);
    }

    fn compare_heartbeats(&mut self) {
        for task in 0..self.program.tasks.min(TASK_PAGES) {
            let view = self.program.get_job_json(&format!("/tasks/{task}"));
            let page = self.page(&format!("/tasks/{task}"));
            let section = html_section(&page, "pulse");
            let mut gaps: Vec<u64> =
                list(&view["recent_gaps"]).iter().filter_map(|gap| gap["gap_us"].as_u64()).collect();
            // The page has the latest first.
            gaps.reverse();
            let drawn = texts_between(section, " data-gap=\"", "\"").filter_map(|gap| gap.parse().ok());
            self.assert_same("gaps between heartbeats", &[("REST", gaps), ("page", drawn.collect())]);
            let usual = view["pulse"]["interval_us"].as_u64().unwrap_or_default();
            let shown = texts_between(section, "Usual interval <b>", "</b>").next().map(str::to_owned);
            self.assert_same(
                "usual interval of heartbeats",
                &[("REST", Some(format_micros(usual))), ("page", shown)],
            );
        }
    }

    fn compare_hosts(&mut self) {
        for host in list(&self.program.get_job_json("/hosts")["hosts"]) {
            let name = encode_query_value(host["host"].as_str().unwrap_or_default());
            let listed = self.program.get_job_json(&format!("/transfers/tasks?host={name}&limit=1000"));
            let listed: TaskTransfersPage = serde_json::from_value(listed).expect("a page of tasks");
            let tasks: Vec<u64> =
                listed.tasks.iter().map(|task| u64::from(task.task.0.unsigned_abs())).collect();
            self.assert_same(
                "tasks of a host that report",
                &[("REST hosts", numbers(&host["tasks"])), ("REST transfers", tasks)],
            );
            let page = self.page(&format!("/hosts/{name}"));
            let says = definition_list(html_section(&page, "host-transfers"));
            let sum = |of: &dyn Fn(&muster::service::reports::TaskTransfers) -> u64| {
                listed.tasks.iter().map(of).fold(0, u64::saturating_add)
            };
            let bytes = |way: usize| {
                sum(&|task| {
                    task.totals
                        .bytes
                        .iter()
                        .map(|of| [of.sent, of.received][way])
                        .fold(0, u64::saturating_add)
                })
            };
            for (term, in_rest) in [
                ("Sent", format_bytes(bytes(0))),
                ("Received", format_bytes(bytes(1))),
                (
                    "Connections",
                    group_thousands(sum(&|task| task.links.iter().map(|of| of.connections).sum())),
                ),
            ] {
                let shown = numbers_with_units(&says[term]).into_iter().next();
                let in_rest = numbers_with_units(&in_rest).into_iter().next();
                self.assert_same("transfers of a host", &[("REST", in_rest), ("page", shown)]);
            }
            let launches = |is_counted: fn(&str) -> bool| {
                sum(&|task| {
                    let counted = task.totals.launches.iter().filter(|of| is_counted(of.outcome.name()));
                    counted.map(|of| of.launches).sum()
                })
            };
            let in_rest = [
                launches(|outcome| outcome == "completed"),
                launches(|outcome| outcome != "completed"),
                sum(&|task| task.links.iter().map(|of| of.launches).sum()),
            ];
            self.assert_same(
                "launches of a host",
                &[
                    ("REST", in_rest.map(group_thousands).to_vec()),
                    ("page", numbers_with_units(&says["Launches"])),
                ],
            );
        }
    }

    fn compare_search(&mut self) {
        let result = |query: &str, kind: &str| -> Vec<String> {
            let page = self.program.server.get(&format!("/search?q={}", encode_query_value(query))).body;
            let rest = page.split_once(&format!("<h2>{kind}</h2>")).map_or("", |(_, rest)| rest);
            let section = rest.split("</ul>").next().unwrap_or_default();
            let of_job = format!("/jobs/{}/", self.program.job);
            texts_between(section, "<li>", "</li>")
                .filter(|item| item.contains(&of_job))
                .map(html_text)
                .collect()
        };
        let run = self.program.get_job_json("")["run"].clone();
        let task = &list(&run["tasks"])[1];
        let in_rest = format!(
            "Task 1 of {} {}",
            self.program.job,
            task["lives"][0]["peer"].as_str().unwrap_or_default()
        );
        let tasks = ("search", result("1", "Tasks"));
        let keys = self.program.get_job_json("/keys?recursive=true&limit=1000");
        let keys: BTreeSet<String> = list(&keys["keys"])
            .iter()
            .filter(|entry| entry["key"].as_str().is_some_and(|key| key.starts_with("shape/")))
            .map(|entry| {
                let bytes = entry["value_bytes"].as_u64().unwrap_or_default();
                let key = entry["key"].as_str().unwrap_or_default();
                format!("{key} key of {}, {}", self.program.job, format_bytes(bytes))
            })
            .collect();
        let found_keys: BTreeSet<String> = result("shape/", "Keys").into_iter().collect();
        let hosts: BTreeSet<String> = list(&self.program.get_job_json("/hosts")["hosts"])
            .iter()
            .filter_map(|host| host["host"].as_str().map(str::to_owned))
            .collect();
        let found_hosts: BTreeSet<String> = result("127.0.9.", "Hosts")
            .iter()
            .filter_map(|text| text.split(' ').next().map(str::to_owned))
            .collect();
        self.assert_same("found tasks", &[("REST", vec![in_rest]), tasks]);
        assert!(keys.len() == 2 && !hosts.is_empty());
        self.assert_same("found keys", &[("REST", keys), ("search", found_keys)]);
        self.assert_same("found hosts", &[("REST", hosts), ("search", found_hosts)]);
    }

    fn compare_drain(&mut self) {
        let path = self.program.job_path("/drain");
        let before = self.page("/drain");
        assert!(html_section(&before, "drain").contains("No drain requested"));
        let answer = self.program.server.send("POST", &path, &json!({"reason": "for a test"}).to_string());
        assert_eq!(answer.status, 202, "{answer:?}");
        let view = self.program.get_job_json("/drain");
        let page = self.page("/drain");
        let section = html_section(&page, "drain");
        let live = self.program.get_job_json("")["run"]["live"].as_u64().unwrap_or_default();
        let acknowledged = list(&view["preemption"]["acknowledged"]).len() as u64;
        let said = texts_between(section, "<p data-say=\"", "\"").next().unwrap_or_default();
        let shown: Vec<u64> = said.split(' ').filter_map(|word| word.parse().ok()).collect();
        self.assert_same(
            "acknowledgements of a drain",
            &[("REST", vec![acknowledged, live]), ("page", shown)],
        );
        let awaited =
            texts_between(section, "tasks: <span class=\"dim\">", "</span>").next().unwrap_or_default();
        self.assert_same(
            "tasks that a drain waits for",
            &[("REST", numbers(&view["waiting_for"])), ("page", numbers_of_ranges(awaited))],
        );
        assert_eq!(self.program.get_job_json("")["run"]["preemption"], view["preemption"]);
    }

    fn compare_stacks(&mut self) {
        let path = self.program.job_path("/stacks");
        let answer = self.program.server.send("POST", &path, &json!({"reason": "for a test"}).to_string());
        assert!(answer.status < 300, "{answer:?}");
        let view = self.program.get_job_json("/stacks");
        let page = self.page("/stacks");
        let section = html_section(&page, "stacks");
        let request = &view["request"];
        let number = texts_between(section, "(request ", ",").next().and_then(|text| text.parse().ok());
        self.assert_same(
            "number of the request for stacks",
            &[("REST", request["number"].as_u64()), ("page", number)],
        );
        let ends = |range: &Value| range["first"].as_u64().zip(range["last"].as_u64());
        let ranges = list(&view["without_helper"]).iter().filter_map(ends);
        let in_rest: Vec<u64> = ranges.flat_map(|(first, last)| first..=last).collect();
        let without = texts_between(section, "Without a helper: ", "</p>").next().unwrap_or_default();
        let without = numbers_of_ranges(&without.replace("tasks ", "").replace("task ", ""));
        self.assert_same("tasks without a helper", &[("REST", in_rest), ("page", without)]);
        let rows = table_rows(&page).len();
        assert_eq!(rows, 0, "no stacks have come, so none are listed: {view}");
    }
}
