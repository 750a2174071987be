//! The numbers of the pictures: the tasks as cells, the hosts as boxes, arrivals at barriers, states over time, the last
//! minutes, devices, and ended runs.
//!
//! A picture is read as it is drawn: its paths and boxes, the names of its links, and the table below it.

use std::collections::{BTreeMap, BTreeSet};

use muster::text::{encode_query_value, format_micros};
use serde_json::Value;

use super::displayed_figures::{
    DisplayedFigures, group_thousands, html_section, html_text, list, number_after, table_rows, texts_between,
};
use super::programs::RandomProgram;
use super::{ComparedFigures, ComparisonContext};

/// The side of the cell of a task, in units of a picture.
const CELL: u64 = 10;
/// The maximum number of uses of barriers in their picture, and of tasks in the picture of one use.
const USES: usize = 24;
const TASKS_OF_USE: usize = 64;
/// The number of rows of the picture of states.
const STATE_ROWS: usize = 40;

/// The contents of a job's pictures, and the same data by REST.
pub struct PictureFigures {
    arrivals: Value,
    recent: Value,
    /// The page with the arrivals of the newest use.
    opened_page: String,
    states: Value,
    states_page: String,
    devices: Value,
    devices_page: String,
    activity: Value,
    audit: Value,
    audit_page: String,
    /// The first host, and its page.
    host: Option<(String, String)>,
    /// The newest run that has ended, if its tasks are kept.
    ended: Option<EndedRunFigures>,
}

struct EndedRunFigures {
    detail: Value,
    tasks: Value,
    states: Value,
    page: String,
    states_page: String,
    comparison: Value,
    comparison_page: String,
}

impl PictureFigures {
    pub fn read(program: &RandomProgram<'_>) -> Self {
        let page = |rest: &str| program.server.get(&format!("/jobs/{}{rest}", program.job)).body;
        let runs = program.get_job_json("/runs");
        let (present, before) = (runs["runs"][0]["number"].as_u64(), runs["runs"][1]["number"].as_u64());
        let arrivals = format!("/barriers/arrivals?run={}&limit=1000", present.expect("a run"));
        let arrivals = program.get_job_json(&arrivals);
        let newest = &arrivals["barriers"][0];
        let opened = match newest["id"].as_str() {
            Some(id) => format!("{}/{}/{id}", newest["run"], newest["counter"]),
            None => String::new(),
        };
        let host = program.get_job_json("/hosts")["hosts"][0]["host"].as_str().map(str::to_owned);
        Self {
            recent: program.get_job_json("/barriers?state=recent&limit=1000"),
            opened_page: page(&format!("/barriers?open={}&by=task", encode_query_value(&opened))),
            states: program.get_job_json("/states?limit=1000"),
            states_page: page("/timeline?by=task"),
            devices: program.get_job_json("/devices?limit=1000"),
            devices_page: page("/devices"),
            activity: program.get_job_json("/activity"),
            audit: program.server.get(&format!("/api/v1/audit?job={}&limit=1000", program.job)).json(),
            audit_page: program.server.get(&format!("/audit?job={}", program.job)).body,
            host: host.map(|host| (host.clone(), page(&format!("/hosts/{}", encode_query_value(&host))))),
            ended: present.zip(before).and_then(|(present, before)| {
                let path = format!("/runs/{present}/comparison?before={before}");
                let comparison = program.server.get(&program.job_path(&path));
                (comparison.status == 200).then(|| EndedRunFigures {
                    detail: program.get_job_json(&format!("/runs/{before}")),
                    tasks: program.get_job_json(&format!("/tasks?run={before}&limit=1000")),
                    states: program.get_job_json(&format!("/states?run={before}&limit=1000")),
                    page: page(&format!("/runs/{before}")),
                    states_page: page(&format!("/runs/{before}/timeline?by=task")),
                    comparison: comparison.json(),
                    comparison_page: page(&path),
                })
            }),
            arrivals,
        }
    }
}

impl PictureFigures {
    /// Returns how many things the pictures show, by kind: none of them may be nothing in all programs.
    pub fn counts(&self) -> [(&'static str, u64); 6] {
        let marks = list(&self.states["tasks"]).iter().map(|task| list(&task["marks"]).len()).sum::<usize>();
        let ended = self.ended.as_ref();
        let changed = ended.and_then(|ended| ended.comparison["changed_devices"].as_u64());
        let moved = ended.map_or(0, |ended| list(&ended.comparison["hosts"]).len());
        [
            ("uses of barriers", list(&self.arrivals["barriers"]).len() as u64),
            ("marks of states", marks as u64),
            ("devices", list(&self.devices["devices"]).len() as u64),
            ("ended runs", u64::from(ended.is_some())),
            ("changed devices", changed.unwrap_or_default()),
            ("compared hosts", moved as u64),
        ]
    }
}

/// Compares the pictures of a job with REST.
pub fn compare_pictures(program: &RandomProgram<'_>, seen: &DisplayedFigures, ledger: &mut ComparedFigures) {
    let mut all = Comparison { program, seen, pictures: &seen.pictures, ledger };
    all.compare_grid("cells of the tasks", &seen.job_page, &seen.rest["run"]["tasks"]);
    all.compare_hosts();
    all.compare_uses_of_barriers();
    all.compare_opened_use();
    all.compare_states("states of the tasks", &seen.pictures.states_page, &seen.pictures.states);
    all.compare_devices();
    all.compare_activity();
    all.compare_audit();
    all.compare_ended_run();
}

struct Comparison<'a> {
    program: &'a RandomProgram<'a>,
    seen: &'a DisplayedFigures,
    pictures: &'a PictureFigures,
    ledger: &'a mut ComparedFigures,
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("{value} is no number"))
}

/// Returns the state of a task as pages call it. A task that others wait for is connected.
fn state_word(task: &Value) -> &str {
    match (task["excluded"].is_null(), task["standing"].as_str().unwrap_or_default()) {
        (false, _) => "excluded",
        (true, standing) => standing,
    }
}

fn as_connected(word: &str) -> &str {
    if word == "awaited" { "connected" } else { word }
}

/// Returns the values of an attribute in a part of a page.
fn attributes<'a>(html: &'a str, name: &str) -> impl Iterator<Item = &'a str> {
    texts_between(html, &format!(" {name}=\""), "\"")
}

fn attribute<'a>(html: &'a str, name: &str) -> &'a str {
    attributes(html, name).next().unwrap_or_default()
}

/// Returns the rectangles of a path of cells: left, top and width, in units of the picture.
fn rectangles(path: &str) -> Vec<[u64; 3]> {
    let rectangle = |piece: &str| {
        let (corner, rest) = piece.split_once('h').expect("a rectangle");
        let (x, y) = corner.split_once(' ').expect("a corner");
        let width = rest.split('v').next().unwrap_or_default();
        [x, y, width].map(|text| text.parse().expect("a number"))
    };
    path.split('M').skip(1).map(rectangle).collect()
}

impl Comparison<'_> {
    #[track_caller]
    fn assert_same<T: PartialEq + std::fmt::Debug>(&mut self, figure: &'static str, said: &[(&str, T)]) {
        self.ledger.assert_same(figure, said, &ComparisonContext(self.program, self.seen));
    }

    /// Compares the cells of all tasks, which are links, or parts of one path for each state.
    fn compare_grid(&mut self, figure: &'static str, page: &str, tasks: &Value) {
        let grid = html_section(page, "grid");
        let mut drawn = BTreeMap::<u64, String>::new();
        for cell in texts_between(grid, "<a class=\"cell ", "</a>") {
            let state = cell.split('"').next().unwrap_or_default();
            let task = number_after(cell, "<span>").expect("a number");
            assert_eq!(
                drawn.insert(task, as_connected(state).to_owned()),
                None,
                "task {task} is drawn twice"
            );
        }
        let columns = number_after(grid, "data-columns=\"").unwrap_or(1);
        for path in texts_between(grid, "<path data-look=", "/>") {
            let state = path.split('"').nth(1).unwrap_or_default();
            for [x, y, width] in rectangles(attribute(path, "d")) {
                for cell in 0..width / CELL {
                    let task = y / CELL * columns + x / CELL + cell;
                    let twice = drawn.insert(task, as_connected(state).to_owned());
                    assert_eq!(twice, None, "task {task} is drawn twice");
                }
            }
        }
        let in_rest = list(tasks).iter().map(|task| (number(&task["task"]), state_word(task).to_owned()));
        self.assert_same(figure, &[("REST", in_rest.collect()), ("picture", drawn)]);
    }

    fn compare_hosts(&mut self) {
        let picture = html_section(&self.seen.hosts_page, "hosts");
        let hosts = list(&self.seen.hosts["hosts"]);
        let tasks = list(&self.seen.rest["run"]["tasks"]);
        let of = |host: &Value| list(&host["tasks"]).iter().filter_map(Value::as_u64).collect::<Vec<_>>();
        // A box says the host, its state, how many of its tasks are in each state but connected, and the findings about the host.
        let state_of = |id: u64| tasks.iter().find(|task| number(&task["task"]) == id).map(state_word);
        let mut boxes = Vec::new();
        for label in attributes(picture, "aria-label").filter(|label| label.contains(", task")) {
            let (name, rest) = label.split_once(", task").expect("its tasks");
            let (_, says) = rest.split_once(": ").expect("its state");
            let mut parts = says.split("; finding: ").map(str::to_owned);
            let says = parts.next().unwrap_or_default();
            let findings: Vec<String> = parts.collect();
            let mut words = says.split(", ");
            let state = words.next().unwrap_or_default().to_owned();
            let counts: BTreeMap<String, u64> = words
                .filter_map(|entry| entry.split_once(' '))
                .filter(|(_, word)| *word != "awaited")
                .filter_map(|(count, word)| Some((word.to_owned(), count.parse().ok()?)))
                .filter(|(word, _)| !word.starts_with("device"))
                .collect();
            boxes.push((name.to_owned(), state, counts, findings));
        }
        let in_rest = hosts.iter().map(|host| {
            let mut counts = BTreeMap::<String, u64>::new();
            for state in of(host).into_iter().filter_map(state_of).filter(|state| *state != "connected") {
                *counts.entry(state.to_owned()).or_default() += 1;
            }
            let text = |name: &str| host[name].as_str().unwrap_or_default().to_owned();
            let is_about =
                |finding: &&Value| list(&finding["hosts"]).iter().any(|name| *name == host["host"]);
            let findings = list(&self.seen.findings["open"]).iter().filter(is_about);
            let titles = findings.map(|finding| finding["title"].as_str().unwrap_or_default().to_owned());
            (text("host"), text("state"), counts, titles.collect())
        });
        let mut in_rest: Vec<_> = in_rest.collect();
        in_rest.sort();
        boxes.sort();
        self.assert_same("boxes of hosts", &[("REST", in_rest), ("picture", boxes)]);
        let mut cells = BTreeMap::<String, u64>::new();
        for path in texts_between(picture, "<path class=\"cells-of\"", "/>") {
            let count: u64 = rectangles(attribute(path, "d")).iter().map(|[_, _, width]| width / CELL).sum();
            *cells.entry(as_connected(attribute(path, "data-look")).to_owned()).or_default() += count;
        }
        let mut in_rest = BTreeMap::<String, u64>::new();
        for state in hosts.iter().flat_map(of).filter_map(state_of) {
            *in_rest.entry(state.to_owned()).or_default() += 1;
        }
        self.assert_same("cells of hosts", &[("REST", in_rest), ("picture", cells)]);

        let Some((name, page)) = &self.pictures.host else { return };
        let host = hosts.iter().find(|host| host["host"] == **name);
        let host = host.unwrap_or_else(|| panic!("REST has no host {name}"));
        let in_rest = of(host).into_iter().map(|id| (id.to_string(), state_of(id).unwrap_or_default()));
        let in_rest: BTreeMap<String, &str> = in_rest.collect();
        let rows = table_rows(html_section(page, "host"));
        let on_page = rows.iter().map(|row| {
            let word = row["State"].split(' ').next().unwrap_or_default();
            (row["Task"].clone(), as_connected(word))
        });
        let said = [("REST", in_rest), ("page of the host", on_page.collect())];
        self.assert_same("tasks of a host", &said);
    }

    fn compare_uses_of_barriers(&mut self) {
        let all = list(&self.pictures.arrivals["barriers"]);
        let describe = |used: &Value| {
            let last = used["last"].as_i64().map_or(String::new(), |task| format!("; task {task} was last"));
            format!(
                "use {}: {}, {} of {} arrived within {}{last}; {} blocked in all",
                used["counter"],
                used["outcome"].as_str().unwrap_or_default(),
                group_thousands(number(&used["arrived"])),
                group_thousands(number(&used["members"])),
                format_micros(number(&used["skew_us"])),
                format_micros(number(&used["waited_us"])),
            )
        };
        let in_rest: Vec<String> = all.iter().take(USES).map(describe).collect();
        let picture = html_section(&self.seen.barriers_page, "waterfall");
        // The names of barriers are escaped in their own way.
        let without_name = |label: &str| label.split_once(" use ").map(|(_, rest)| format!("use {rest}"));
        let rows = attributes(picture, "aria-label").filter_map(without_name).collect();
        self.assert_same("uses of barriers", &[("REST", in_rest), ("picture", rows)]);
        let dots = texts_between(picture, "<path class=\"arrived\" d=\"", "\"");
        for (path, used) in dots.zip(all) {
            let (first, end) = first_arrival_and_end(used);
            let times = list(&used["arrivals"]).iter().map(|arrival| number(&arrival["at"]) - first);
            let longest = all.iter().take(USES).map(|used| {
                let (first, end) = first_arrival_and_end(used);
                end - first
            });
            let scale = longest.max().unwrap_or_default().max(1);
            let places: BTreeSet<u64> = times.map(|after| after * 1000 / scale).collect();
            let drawn: BTreeSet<u64> =
                path.split('M').skip(1).filter_map(|dot| dot.split(' ').next()?.parse().ok()).collect();
            assert!(end >= first);
            if list(&used["arrivals"]).len() <= TASKS_OF_USE {
                self.assert_same("dots of arrivals", &[("REST", places), ("picture", drawn)]);
            }
        }
        let rows = table_rows(html_section(&self.seen.barriers_page, "recent"));
        let in_rest = list(&self.pictures.recent["recent"]).iter().take(rows.len()).map(|used| {
            let last = used["last"].as_i64().map_or(String::new(), |task| format!("task {task}"));
            [
                used["counter"].to_string(),
                format_micros(number(&used["skew_us"])),
                format_micros(number(&used["waited_us"])),
                format!("{}/{}", used["arrived"], used["members"]),
                last,
            ]
        });
        let in_rest: Vec<_> = in_rest.collect();
        let shown = |row: &BTreeMap<String, String>| {
            ["Use", "Skew", "Blocked", "Arrived", "Last"].map(|head| row[head].clone())
        };
        let shown = rows.iter().map(shown).collect();
        self.assert_same("ended barriers", &[("REST", in_rest), ("page", shown)]);
    }

    fn compare_opened_use(&mut self) {
        let Some(used) = list(&self.pictures.arrivals["barriers"]).first() else { return };
        let (first, end) = first_arrival_and_end(used);
        let mut arrivals: Vec<(u64, u64)> = list(&used["arrivals"])
            .iter()
            .map(|arrival| (number(&arrival["at"]), number(&arrival["task"])))
            .collect();
        arrivals.sort_by_key(|arrival| std::cmp::Reverse(*arrival));
        let row = |(at, task): &(u64, u64)| {
            [format!("task {task}"), format_micros(at - first), format_micros(end - at)]
        };
        let in_rest: Vec<_> = arrivals.iter().take(TASKS_OF_USE).map(row).collect();
        let opened =
            texts_between(&self.pictures.opened_page, "<section id=\"opened-barrier\"", "</section>");
        let rows: Vec<_> = opened.flat_map(table_rows).collect();
        let shown = |row: &BTreeMap<String, String>| {
            ["Task", "Arrived after", "Blocked"].map(|head| row[head].clone())
        };
        let shown = rows.iter().map(shown).collect();
        self.assert_same("arrivals at one use", &[("REST", in_rest), ("picture", shown)]);
    }

    /// Compares the picture with a row for each task. Its rows are those in which trouble began first.
    fn compare_states(&mut self, figure: &'static str, page: &str, states: &Value) {
        let picture = html_section(page, "state-chart");
        let tasks = list(&states["tasks"]);
        let rows = table_rows(picture);
        self.assert_same("rows of states", &[("REST", tasks.len().min(STATE_ROWS)), ("picture", rows.len())]);
        let drawn = texts_between(picture, "<text class=\"name\" x=\"-10\" y=\"12\">", "</g>");
        for (row, drawn) in rows.iter().zip(drawn) {
            let label = &row["Task"];
            assert!(drawn.starts_with(label.as_str()), "the table and the picture have one order");
            let task = tasks.iter().find(|task| format!("task {}", task["task"]) == *label);
            let task = task.unwrap_or_else(|| panic!("REST has no {label}"));
            let mut counts = BTreeMap::<String, u64>::new();
            for mark in list(&task["marks"]) {
                *counts.entry(mark["kind"].as_str().unwrap_or_default().to_owned()).or_default() += 1;
            }
            let shown = row["In the shown time"].split(", ").filter_map(|part| part.split_once(' '));
            let shown =
                shown.map(|(count, kind)| (kind.to_owned(), count.parse().expect("a number"))).collect();
            self.assert_same(figure, &[("REST", counts), ("picture", shown)]);
            // A state that is drawn was there, though one that was short may not be drawn.
            let was_there: BTreeSet<&str> =
                list(&task["periods"]).iter().filter_map(|period| period["state"].as_str()).collect();
            for state in texts_between(drawn, "<path class=\"st ", "\"") {
                assert!(was_there.contains(state), "{label} was never {state}: {task}");
            }
            let marked: BTreeSet<&str> = texts_between(drawn, "href=\"#g-mark-", "\"").collect();
            let kinds: BTreeSet<&str> =
                list(&task["marks"]).iter().filter_map(|mark| mark["kind"].as_str()).collect();
            self.assert_same("marks of states", &[("REST", kinds), ("picture", marked)]);
        }
        let moments = picture.matches("<g class=\"moment\">").count();
        self.assert_same(
            "moments of the run",
            &[("REST", list(&states["marks"]).len()), ("picture", moments)],
        );
    }

    fn compare_devices(&mut self) {
        let devices = list(&self.pictures.devices["devices"]);
        let row =
            |device: &Value| ["global_id", "task", "local_id"].map(|name| device[name].to_string()).to_vec();
        let in_rest: Vec<_> = devices.iter().map(row).collect();
        let rows = table_rows(html_section(&self.pictures.devices_page, "all"));
        let shown =
            rows.iter().map(|row| ["Global ID", "Task", "Local ID"].map(|head| row[head].clone()).to_vec());
        self.assert_same("devices", &[("REST", in_rest), ("page", shown.collect())]);
        let of_hosts = list(&self.seen.hosts["hosts"]).iter().map(|host| number(&host["devices"])).sum();
        self.assert_same("devices of hosts", &[("REST", devices.len() as u64), ("REST hosts", of_hosts)]);
        let picture = html_section(&self.seen.hosts_page, "hosts");
        let dots = texts_between(picture, "<path class=\"devices\" d=\"", "\"")
            .next()
            .map_or(0, |path| path.matches('M').count());
        self.assert_same("dots of devices", &[("REST", devices.len()), ("picture", dots)]);
    }

    /// Compares the small pictures of the overview, by their description.
    fn compare_activity(&mut self) {
        let mark = format!("<a href=\"/api/v1/jobs/{}/activity\"", self.program.job);
        let link = texts_between(&self.seen.overview, &mark, ">").next();
        let drawn = link.map(|link| attribute(link, "aria-label").replace(". As JSON", ""));
        let steps: Vec<&Value> =
            list(&self.pictures.activity["steps"]).iter().filter(|step| !step["live"].is_null()).collect();
        let lives = || steps.iter().map(|step| number(&step["live"]));
        let in_rest = lives().min().zip(lives().max()).map(|(low, high)| {
            let range = if low == high { low.to_string() } else { format!("{low} to {high}") };
            let tasks = steps.iter().map(|step| number(&step["tasks"])).max().unwrap_or_default();
            format!("Last ten minutes: {range} of {tasks} tasks live")
        });
        // The second picture has its highest value in the description.
        let shown = drawn.map(|text| text.split(';').next().unwrap_or_default().to_owned());
        self.assert_same("live tasks of the last minutes", &[("REST", in_rest), ("picture", shown)]);
    }

    fn compare_audit(&mut self) {
        let row = |line: &Value| {
            let outcome = line["outcome"].as_str().unwrap_or_default().to_owned();
            (line["number"].to_string(), outcome)
        };
        let mut in_rest: Vec<_> = list(&self.pictures.audit["lines"]).iter().map(row).collect();
        // The page has the newest line first.
        in_rest.reverse();
        let rows = table_rows(&self.pictures.audit_page).into_iter().filter(|row| row.contains_key("No."));
        let shown = rows.map(|row| {
            let outcome = row["Outcome"].split([' ', ',']).next().unwrap_or_default().to_owned();
            (row["No."].clone(), outcome)
        });
        self.assert_same("lines of the audit", &[("REST", in_rest), ("page", shown.collect())]);
    }

    fn compare_ended_run(&mut self) {
        let Some(ended) = &self.pictures.ended else { return };
        self.compare_grid("cells of the tasks of an ended run", &ended.page, &ended.tasks["tasks"]);
        self.compare_states("states of the tasks of an ended run", &ended.states_page, &ended.states);
        let says = super::displayed_figures::definition_list(html_section(&ended.page, "run-summary"));
        let tasks = says["Tasks"].split(' ').next().unwrap_or_default().to_owned();
        self.assert_same(
            "tasks of an ended run",
            &[("REST", group_thousands(number(&ended.detail["tasks"]))), ("page", tasks)],
        );
        let hosts = number_after(&says["Tasks"], " on ").unwrap_or_default();
        self.assert_same(
            "hosts of an ended run",
            &[("REST", number(&ended.detail["hosts"])), ("page", hosts)],
        );
        let comparison = &ended.comparison;
        let html = &ended.comparison_page;
        let summary = texts_between(html, "<p class=\"summary\">", "</p>").next().map(html_text);
        self.assert_same(
            "what has changed since an ended run",
            &[("REST", comparison["summary"].as_str().map(str::to_owned)), ("page", summary)],
        );
        let rows = |section: &str| table_rows(html_section(html, section)).len();
        for (figure, name, section) in
            [("compared tasks", "tasks", "late-tasks"), ("compared hosts", "hosts", "late-hosts")]
        {
            let shown = rows(section);
            // The page lists the first of them, and says how many more there are.
            let all = list(&comparison[name]).len();
            let more = number_after(html_section(html, section), "<p class=\"dim\">and ").unwrap_or_default();
            self.assert_same(figure, &[("REST", all as u64), ("page", shown as u64 + more)]);
        }
        let changed = comparison["changed_devices"].as_u64().unwrap_or_default();
        self.assert_same("changed devices", &[("REST", changed), ("page", rows("devices") as u64)]);
    }
}

fn first_arrival_and_end(used: &Value) -> (u64, u64) {
    let times = list(&used["arrivals"]).iter().map(|arrival| number(&arrival["at"]));
    (times.min().unwrap_or_else(|| number(&used["began"])), number(&used["ended"]))
}
