//! Figures that several places show: pages, REST, the command line and metrics must say the same at one moment.
//!
//! Random tasks do random things to a job of a real server. When nothing moves any more, all four are read and compared,
//! figure by figure; what REST says of single tasks is counted here once more. `FIGURES_SEEDS` asks for more programs,
//! `FIGURES_SEED` for a certain one.

use std::collections::BTreeMap;
use std::time::Duration;

use muster::proto::xla::coordination as wire;
use serde_json::{Value, json};
use tonic::transport::{Channel, Endpoint};
use wire::coordination_service_client::CoordinationServiceClient;

use crate::process::{muster, run, wait_until};
use crate::web::Server;

/// How many programs a normal run makes.
const SEEDS: u64 = 32;
/// How often all is read until nothing moved meanwhile.
const LOOKS: usize = 200;

const STATES: [&str; 7] =
    ["missing", "registering", "connected", "suspect", "disconnected", "failed", "excluded"];

/// One task's process.
struct Process {
    channel: Channel,
    incarnation: u64,
    service: std::sync::Arc<std::sync::atomic::AtomicU64>,
    /// Its calls end with it.
    calls: Vec<tokio::task::AbortHandle>,
}

impl Drop for Process {
    fn drop(&mut self) {
        self.calls.iter().for_each(tokio::task::AbortHandle::abort);
    }
}

/// A job, and the processes of its tasks.
struct ScriptedTasks<'a> {
    server: &'a Server,
    runtime: &'a tokio::runtime::Runtime,
    job: String,
    tasks: i32,
    random: fastrand::Rng,
    processes: BTreeMap<i32, Process>,
    lives: u64,
    done: Vec<String>,
}

impl<'a> ScriptedTasks<'a> {
    fn new(server: &'a Server, runtime: &'a tokio::runtime::Runtime, seed: u64) -> Self {
        let mut random = fastrand::Rng::with_seed(seed);
        let job = format!("job{seed}");
        // A large job now and then: it is shown in other ways.
        let tasks = if random.u8(..5) == 0 { 40 } else { random.i32(2..6) };
        let grace = ["0s", "10m"][random.usize(..2)];
        let settings = json!({
            "tasks": tasks,
            "recoverable": random.bool(),
            "disconnect_grace": grace,
            "bounds": {"keys": 8},
        });
        let body = json!({"name": job, "settings": settings, "reason": "r"}).to_string();
        assert_eq!(server.send("POST", "/api/v1/jobs", &body).status, 201);
        let done = vec![settings.to_string()];
        Self { server, runtime, job, tasks, random, processes: BTreeMap::new(), lives: 0, done }
    }

    fn path(&self, rest: &str) -> String {
        format!("/api/v1/jobs/{}{rest}", self.job)
    }

    fn get(&self, rest: &str) -> Value {
        let answer = self.server.get(&self.path(rest));
        assert_eq!(answer.status, 200, "{rest}: {answer:?}");
        answer.json()
    }

    /// A new process of a task, which registers.
    fn register(&mut self, task: i32) {
        self.lives += 1;
        let origin = format!("http://{}.test", self.job).parse().expect("an authority");
        let endpoint = Endpoint::from_shared(format!("http://{}", self.server.grpc)).expect("an address");
        let entered = self.runtime.enter();
        let channel = endpoint.origin(origin).connect_lazy();
        drop(entered);
        let process = Process {
            channel,
            incarnation: 1000 + self.lives,
            service: Default::default(),
            calls: Vec::new(),
        };
        let (incarnation, service) = (process.incarnation, std::sync::Arc::clone(&process.service));
        self.processes.insert(task, process);
        self.call(task, move |mut client, _| async move {
            let request = wire::RegisterTaskRequest { incarnation, source_task_id: task };
            if let Ok(answer) = client.register_task(request).await {
                let incarnation = answer.into_inner().service_incarnation;
                service.store(incarnation, std::sync::atomic::Ordering::SeqCst);
            }
        });
    }

    /// Begins a call of a task's process, whatever comes of it.
    fn call<F: Future<Output = ()> + Send + 'static>(
        &mut self,
        task: i32,
        ask: impl FnOnce(CoordinationServiceClient<Channel>, Option<wire::Incarnations>) -> F,
    ) {
        let Some(process) = self.processes.get_mut(&task) else { return };
        let claim = wire::Incarnations {
            task_id: 0,
            task_incarnation: process.incarnation,
            service_incarnation: process.service.load(std::sync::atomic::Ordering::SeqCst),
        };
        let call = ask(CoordinationServiceClient::new(process.channel.clone()), Some(claim));
        process.calls.push(self.runtime.spawn(call).abort_handle());
    }

    fn barrier(&mut self, task: i32, id: &'static str, members: Vec<i32>) {
        self.call(task, move |mut client, incarnations| async move {
            let request = wire::BarrierRequest {
                incarnations,
                barrier_id: id.into(),
                barrier_timeout_in_ms: 3_600_000,
                task_ids: members,
                source_task_id: task,
                counter: 0,
            };
            let _ = client.barrier(request).await;
        });
    }

    /// Does something.
    fn step(&mut self) {
        let task = self.random.i32(0..self.tasks);
        let choice = self.random.u8(..100);
        let what = match choice {
            0..20 => {
                self.register(task);
                "registers"
            }
            20..40 => {
                let id = ["step", "save", "odd/\u{202e}name"][self.random.usize(..3)];
                self.barrier(task, id, Vec::new());
                "comes to a barrier"
            }
            40..52 => {
                let set: Vec<i32> = (0..self.tasks).filter(|_| self.random.u8(..4) > 0).collect();
                self.call(task, |mut client, incarnations| async move {
                    let request =
                        wire::GetAliveTasksRequest { incarnations, requesting_task_id: task, task_ids: set };
                    let _ = client.get_alive_tasks(request).await;
                });
                "asks who lives"
            }
            52..66 => {
                let key = format!("dir{}/key{}", self.random.u8(..3), self.random.u8(..4));
                let value = vec![b'v'; self.random.usize(..3000)];
                self.call(task, |mut client, incarnations| async move {
                    let kv = Some(wire::KeyValueEntry { key, value: value.into() });
                    let request = wire::InsertKeyValueRequest { incarnations, kv, allow_overwrite: true };
                    let _ = client.insert_key_value(request).await;
                });
                "writes a key"
            }
            66..72 => {
                self.call(task, |mut client, incarnations| async move {
                    let request = wire::GetKeyValueRequest { incarnations, key: "nobody/writes".into() };
                    let _ = client.get_key_value(request).await;
                });
                "waits for a key"
            }
            72..80 => {
                self.processes.remove(&task);
                "is gone"
            }
            80..88 => {
                let body = json!({"task": task, "reason": "r", "end_run": true}).to_string();
                self.server.send("POST", &self.path("/exclusions"), &body);
                "is excluded"
            }
            88..92 => {
                let first = self.get("/exclusions")["exclusions"][0]["id"].as_u64();
                if let Some(id) = first {
                    self.server.send("DELETE", &self.path(&format!("/exclusions/{id}?reason=r")), "");
                }
                "is readmitted, or another"
            }
            92..96 => {
                self.call(task, |mut client, incarnations| async move {
                    let request = wire::ReportErrorToServiceRequest {
                        incarnations,
                        source_task_id: task,
                        error_code: 13,
                        error_message: "out of memory".into(),
                    };
                    let _ = client.report_error_to_service(request).await;
                });
                "reports an error"
            }
            _ => {
                self.call(task, |mut client, incarnations| async move {
                    let request = wire::ShutdownTaskRequest { incarnations, source_task_id: task };
                    let _ = client.shutdown_task(request).await;
                });
                "shuts down"
            }
        };
        self.done.push(format!("task {task} {what}"));
        // Registrations and ends take effect before what comes of them; now and then they meet.
        if choice < 20 || self.random.bool() {
            std::thread::sleep(Duration::from_millis(self.random.u64(1..6)));
        }
    }

    fn play(&mut self) {
        // All come, or most: jobs in which nobody is are soon told.
        let late = self.random.i32(0..self.tasks * 2);
        for task in (0..self.tasks).filter(|task| *task != late) {
            self.register(task);
        }
        if late >= self.tasks {
            wait_until("the run has begun", || self.get("")["run"]["state"] == "running");
        }
        for _ in 0..self.random.usize(6..30) {
            self.step();
        }
    }
}

/// What is seen of a job at one moment, everywhere.
struct ShownValues {
    rest: Value,
    summary: Value,
    runs: Value,
    live: Value,
    keys: Value,
    exclusions: Value,
    findings: Value,
    newest_event: u64,
    metrics: String,
    status: String,
    list: String,
    job_page: String,
    barriers_page: String,
    keys_page: String,
    exclusions_page: String,
    overview: String,
}

/// What of a job does not change by the passing of time alone.
fn settled(view: &Value) -> Value {
    let mut view = view.clone();
    view["seen_at"] = Value::Null;
    view
}

impl ShownValues {
    fn all(program: &ScriptedTasks<'_>) -> Self {
        let server = program.server;
        let said = |arguments: &[&str]| {
            let ended = run(muster(arguments).args(["--server", &server.url()]));
            assert_eq!((ended.code, ended.err.as_str()), (Some(0), ""), "{arguments:?}");
            ended.out
        };
        let page = |rest: &str| server.get(&format!("/jobs/{}{rest}", program.job)).body;
        let mut last = String::new();
        for _ in 0..LOOKS {
            let before = (settled(&program.get("")), program.get("/findings"));
            let jobs = server.get("/api/v1/jobs?limit=1000").json();
            let summary =
                jobs["jobs"].as_array().into_iter().flatten().find(|one| one["name"] == *program.job);
            let seen = Self {
                rest: program.get(""),
                summary: summary.expect("the job is listed").clone(),
                runs: program.get("/runs"),
                live: program.get("/live"),
                keys: program.get("/keys?recursive=true&limit=1000"),
                exclusions: program.get("/exclusions"),
                findings: program.get("/findings"),
                newest_event: ["default", &program.job]
                    .map(|job| newest_event(server, job))
                    .into_iter()
                    .max()
                    .unwrap_or(0),
                metrics: server.get("/metrics").body,
                status: said(&["status", "--job", &program.job]),
                list: said(&["job", "list"]),
                job_page: page(""),
                barriers_page: page("/barriers"),
                keys_page: page("/keys"),
                exclusions_page: page("/exclusions"),
                overview: server.get("/").body,
            };
            let after = (settled(&program.get("")), program.get("/findings"));
            if before == after {
                return seen;
            }
            last = format!("{}\n{}", before.0, after.0);
            std::thread::sleep(Duration::from_millis(20));
        }
        panic!("it never stands still: {last}");
    }

    fn metric(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        let wanted = |line: &&str| {
            line.strip_prefix(name).is_some_and(|rest| {
                rest.starts_with(['{', ' '])
                    && labels.iter().all(|(label, value)| rest.contains(&format!("{label}=\"{value}\"")))
            })
        };
        let mut found = self.metrics.lines().filter(wanted);
        let line = found.next().unwrap_or_else(|| panic!("no {name} {labels:?}"));
        assert!(found.next().is_none(), "{name} {labels:?} is there twice");
        line.rsplit(' ').next().and_then(|value| value.parse().ok()).expect("a number")
    }
}

/// The number of the last event of a job.
fn newest_event(server: &Server, job: &str) -> u64 {
    let page = server.get(&format!("/api/v1/jobs/{job}/events?newest=true&limit=1")).json();
    page["events"][0]["number"].as_u64().expect("an event")
}

/// The first number after `mark`, with its thousands parted or not.
fn number_after(text: &str, mark: &str) -> Option<u64> {
    let (_, rest) = text.split_once(mark)?;
    let digits = rest.chars().take_while(|c| c.is_ascii_digit() || *c == '\u{202f}');
    digits.filter(char::is_ascii_digit).collect::<String>().parse().ok()
}

/// What stands between two marks, each time.
fn between<'a>(text: &'a str, begin: &str, end: &str) -> std::vec::IntoIter<&'a str> {
    let inner = |rest: &'a str| rest.split_once(end).map_or(rest, |(inner, _)| inner);
    text.split(begin).skip(1).map(inner).collect::<Vec<_>>().into_iter()
}

/// Compares what four places say of one figure.
#[derive(Default)]
struct Comparison {
    compared: BTreeMap<&'static str, usize>,
}

impl Comparison {
    #[track_caller]
    fn same<T: PartialEq + std::fmt::Debug>(
        &mut self,
        figure: &'static str,
        said: &[(&str, T)],
        why: &Mismatch<'_>,
    ) {
        assert!(said.len() > 1, "{figure} is said once");
        let differ = said.windows(2).any(|two| two[0].1 != two[1].1);
        assert!(!differ, "{figure}: {said:?}\n{why}");
        *self.compared.entry(figure).or_default() += 1;
    }
}

/// What is shown if a figure differs.
struct Mismatch<'a>(&'a ScriptedTasks<'a>, &'a ShownValues);

impl std::fmt::Display for Mismatch<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self(program, seen) = self;
        write!(f, "{}: {}\n{}\n{:#}", program.job, program.done.join("; "), seen.status, seen.rest["run"])
    }
}

fn compare(program: &ScriptedTasks<'_>, seen: &ShownValues, ledger: &mut Comparison) {
    let why = &Mismatch(program, seen);
    let job = ("muster_job", program.job.as_str());
    let (run, name) = (&seen.rest["run"], program.job.as_str());
    let count = |value: &Value| value.as_u64().unwrap_or_else(|| panic!("{value} is no number\n{why}"));
    let tasks = run["tasks"].as_array().expect("a list");
    let metric = |name: &str, labels: &[(&str, &str)]| {
        let mut all = vec![job];
        all.extend(labels);
        seen.metric(name, &all) as u64
    };

    // Who is there.
    let headline =
        seen.status.lines().find(|line| line.contains(&format!("JOB {name} "))).expect("a headline");
    let (live_of, _) = headline.split_once(" task(s) connected").expect("a count");
    let (rest, total) = live_of.rsplit_once(" of ").expect("a count");
    let live = rest.rsplit(' ').next().expect("a number");
    let row = seen.list.lines().find(|line| line.starts_with(&format!("{name} "))).expect("a row");
    let row: Vec<&str> = row.split_whitespace().collect();
    let head = between(&seen.job_page, "data-say=\"Run ", "\"").next().expect("a head");
    let head_live = head.rsplit(", ").next().expect("a count").trim_end_matches(" live").to_owned();
    let (_, lines_of_jobs) = seen.overview.split_once("<table class=\"jobs\">").expect("a table");
    let mark = format!("<a href=\"/jobs/{name}\">");
    let line = between(lines_of_jobs, &mark, "</tr>").next().expect("a line");
    let text = |value: u64| value.to_string();
    ledger.same(
        "live tasks",
        &[
            ("REST job", text(count(&run["live"]))),
            ("REST summary", text(count(&seen.summary["live"]))),
            ("REST live", text(seen.live["tasks"].as_array().map_or(0, Vec::len) as u64)),
            ("metrics", text(metric("muster_live_tasks", &[]))),
            ("status", live.to_owned()),
            ("job list", row[3].to_owned()),
            ("job page", head_live.split(' ').next().unwrap_or_default().to_owned()),
            ("overview", text(number_after(line, "<td class=\"num\"><b>").expect("a number"))),
        ],
        why,
    );
    ledger.same(
        "tasks",
        &[
            ("REST job", tasks.len() as u64),
            ("REST summary", count(&seen.summary["tasks"])),
            ("metrics", metric("muster_job_tasks", &[])),
            ("status", total.parse().expect("a number")),
            ("job list", row[5].parse().expect("a number")),
            (
                "job page",
                head_live.rsplit(' ').next().and_then(|total| total.parse().ok()).expect("a number"),
            ),
            ("grid", number_after(&seen.job_page, "<h2 id=\"grid-title\">").expect("a number")),
            ("overview", number_after(line, "</b><span class=\"dim\"> / ").expect("a number")),
        ],
        why,
    );
    let legend = between(&seen.job_page, "<ul class=\"legend\">", "</ul>").next().expect("a legend");
    for state in STATES {
        let is = |task: &&Value| match task["excluded"].is_null() {
            true => task["standing"] == state,
            false => state == "excluded",
        };
        let counted = tasks.iter().filter(is).count() as u64;
        let word = if state == "disconnected" { "left" } else { state };
        let shown = |word: &str| {
            let entry = between(legend, &format!("state={word}#tasks"), "</a>").next()?.to_owned();
            number_after(&entry, "<b>")
        };
        // Those that others wait for are connected, too.
        let awaited = if state == "connected" { shown("awaited").unwrap_or(0) } else { 0 };
        let mut said = vec![
            ("REST tasks", counted),
            ("REST counts", count(&run["counts"][state])),
            ("metrics", metric("muster_tasks", &[("standing", state)])),
            ("job page", shown(word).unwrap_or(0) + awaited),
        ];
        if let Some(line) = seen.status.lines().find_map(|line| line.strip_prefix("  TASKS  ")) {
            let part = line.split(", ").find_map(|part| part.strip_suffix(&format!(" {word}")));
            said.push(("status", part.map_or(0, |part| part.parse().expect("a number"))));
        } else if let Some((_, table)) = seen.status.split_once("  TASK  STATE") {
            let rows = table.lines().skip(1).take(tasks.len());
            said.push((
                "status",
                rows.filter(|row| row.split_whitespace().nth(1) == Some(word)).count() as u64,
            ));
        }
        ledger.same(state, &said, why);
    }

    // Who waits for whom.
    let mut waits = Vec::new();
    for barrier in run["barriers"]
        .as_array()
        .into_iter()
        .flatten()
        .chain(run["live_sets"].as_array().into_iter().flatten())
    {
        let missing = barrier["missing"].as_array().map_or(0, Vec::len) as u64;
        let kind = barrier["kind"].as_str().unwrap_or("live-set").to_owned();
        waits.push((kind, count(&barrier["arrived"]), count(&barrier["members"]), missing));
    }
    let pairs = |text: &str, mark: &str, end: &str| {
        let mut found: Vec<String> =
            text.lines().filter_map(|line| line.strip_prefix(mark)).map(str::to_owned).collect();
        found
            .iter_mut()
            .for_each(|line| *line = line.split_once(end).map_or("", |(start, _)| start).to_owned());
        found.into_iter().filter(|line| !line.is_empty()).collect::<Vec<_>>()
    };
    let of = |text: &str| {
        let words: Vec<&str> = text.split_whitespace().collect();
        let at = words.iter().rposition(|word| *word == "of").expect("a pair");
        let of = |at: usize| words[at].trim_end_matches(',').parse::<u64>().expect("a number");
        (of(at - 1), of(at + 1))
    };
    let sorted = |mut all: Vec<(u64, u64)>| {
        all.sort_unstable();
        all
    };
    let barrier_lines = pairs(&seen.status, "  BARRIER  ", " arrived, waiting for ");
    let live_lines = pairs(&seen.status, "  LIVE SET  ", " asked, waiting for ");
    let on_page = |page: &str| {
        let meters = between(page, "aria-label=\"", "\"");
        sorted(
            meters
                .filter(|label| label.ends_with(" have arrived") || label.ends_with(" have registered"))
                .map(of)
                .collect(),
        )
    };
    ledger.same(
        "members of barriers, arrived and all",
        &[
            ("REST", sorted(waits.iter().map(|(_, arrived, members, _)| (*arrived, *members)).collect())),
            ("status", sorted(barrier_lines.iter().chain(&live_lines).map(|line| of(line)).collect())),
            ("job page", on_page(&seen.job_page)),
            ("barriers page", on_page(&seen.barriers_page)),
        ],
        why,
    );
    for kind in ["registration", "shutdown", "client", "live-set"] {
        let of_kind = waits.iter().filter(|(of, ..)| of == kind);
        ledger.same(
            "barriers in progress",
            &[
                ("REST", of_kind.clone().count() as u64),
                ("metrics", metric("muster_barriers_in_progress", &[("kind", kind)])),
            ],
            why,
        );
        ledger.same(
            "tasks that barriers wait for",
            &[
                ("REST", of_kind.map(|(.., missing)| missing).sum::<u64>()),
                ("metrics", metric("muster_barrier_missing_members", &[("kind", kind)])),
            ],
            why,
        );
    }

    // What the store holds.
    let keys = seen.keys["keys"].as_array().expect("a list");
    let held = between(&seen.keys_page, "<p class=\"dim\">", "</p>")
        .find(|text| text.contains(" keys, "))
        .expect("a line");
    ledger.same(
        "keys",
        &[
            ("REST job", count(&run["keys"])),
            ("REST keys", keys.len() as u64),
            ("metrics", metric("muster_store_keys", &[])),
            ("metrics of bounds", metric("muster_bound_used", &[("bound", "keys")])),
            ("keys page", number_after(&format!("!{held}"), "!").expect("a number")),
        ],
        why,
    );
    ledger.same(
        "bytes of the store",
        &[
            ("REST job", count(&run["store_bytes"])),
            ("metrics", metric("muster_store_bytes", &[])),
            ("metrics of bounds", metric("muster_bound_used", &[("bound", "store-bytes")])),
        ],
        why,
    );
    let shown = muster::text::bytes(count(&run["store_bytes"]));
    assert!(held.contains(&format!(" keys, {shown}")), "{held} does not say {shown}\n{why}");

    // Exclusions, runs, findings, events.
    let in_force = seen.exclusions_page.split("id=\"over-title\"").next().unwrap_or_default();
    let listed = seen.status.lines().filter(|line| line.starts_with("  EXCLUDED  ")).count() as u64;
    let all = pairs(&seen.status, "  EXCLUDED  … ", " in all");
    ledger.same(
        "exclusions in force",
        &[
            ("REST job", seen.rest["exclusions"].as_array().map_or(0, Vec::len) as u64),
            ("REST summary", count(&seen.summary["exclusions"])),
            ("REST exclusions", seen.exclusions["exclusions"].as_array().map_or(0, Vec::len) as u64),
            ("metrics", metric("muster_exclusions", &[])),
            ("status", all.first().map_or(listed, |all| all.parse().expect("a number"))),
            ("job list", row[6].parse().expect("a number")),
            ("exclusions page", in_force.matches("<article class=\"wait\" data-key=").count() as u64),
        ],
        why,
    );
    let lines = seen.runs["runs"].as_array().expect("a list");
    ledger.same(
        "number of the run",
        &[
            ("REST job", count(&run["number"])),
            ("REST runs", count(&lines[0]["number"])),
            ("metrics", metric("muster_run_number", &[])),
            ("job list", row[1].parse().expect("a number")),
            ("job page", head.split(' ').next().and_then(|number| number.parse().ok()).expect("a number")),
        ],
        why,
    );
    ledger.same(
        "state of the run",
        &[
            ("REST job", run["state"].as_str().unwrap_or_default().to_owned()),
            ("REST runs", lines[0]["state"].as_str().unwrap_or_default().to_owned()),
            ("job list", row[2].to_owned()),
            ("status", headline.split_whitespace().nth(4).unwrap_or_default().to_lowercase()),
            ("job page", head.split([' ', ',']).nth(1).unwrap_or_default().to_owned()),
        ],
        why,
    );
    let state = run["state"].as_str().unwrap_or_default();
    assert_eq!(metric("muster_run_state", &[("state", state)]), 1, "{why}");
    let history = between(&seen.job_page, "id=\"runs-title\"", "</section>").next().expect("the runs before");
    for past in seen.rest["history"].as_array().into_iter().flatten() {
        let number = count(&past["number"]);
        let began = past["started_at"].as_u64().unwrap_or_else(|| count(&past["opened_at"]));
        let line = lines.iter().find(|line| line["number"] == number).expect("a line");
        let length = count(&past["ended_at"]) - began;
        ledger.same(
            "length of an ended run, in microseconds",
            &[
                ("REST times", length),
                ("REST job", count(&past["length_us"])),
                ("REST runs", count(&line["length_us"])),
            ],
            why,
        );
        let shown = muster::text::span(Duration::from_micros(length));
        let row =
            between(history, &format!("<tr><td class=\"num\">{number}</td>"), "</tr>").next().expect("a row");
        let cell = between(row, "<td>", "</td>").nth(2).unwrap_or_default();
        let mut said = vec![("REST", shown), ("job page", cell.to_owned())];
        let earlier = seen.status.lines().find(|line| line.starts_with(&format!("  EARLIER  run {number} ")));
        if let Some((_, after)) = earlier.and_then(|line| line.split_once(" ago after ")) {
            said.push(("status", after.split(';').next().unwrap_or_default().to_owned()));
        }
        ledger.same("length of an ended run", &said, why);
    }
    let ended = |outcome: &str| lines.iter().filter(|line| line["state"] == outcome).count() as u64;
    for outcome in ["completed", "failed", "abandoned"] {
        let said =
            [("REST", ended(outcome)), ("metrics", metric("muster_runs_total", &[("outcome", outcome)]))];
        ledger.same("runs that have ended", &said, why);
    }
    let open = seen.findings["open"].as_array().expect("a list");
    let ids: std::collections::BTreeSet<&str> = open.iter().filter_map(|one| one["id"].as_str()).collect();
    let issues = seen.status.lines().filter(|line| line.starts_with("  ISSUE  ")).count();
    ledger.same("findings that are open", &[("REST", open.len()), ("status", issues)], why);
    let raised = seen.metrics.lines().filter(|line| {
        line.starts_with("muster_finding")
            && line.contains(&format!("\"{name}\""))
            && line.ends_with("} 1")
            && !line.contains("_total")
    });
    ledger.same("kinds of findings that are open", &[("REST", ids.len()), ("metrics", raised.count())], why);
    ledger.same(
        "events",
        &[("REST", seen.newest_event), ("metrics", seen.metric("muster_events_total", &[]) as u64)],
        why,
    );
}

#[test]
fn pages_rest_the_command_line_and_metrics_say_the_same() {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let seeds = match number("FIGURES_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("FIGURES_SEEDS").unwrap_or(SEEDS),
    };
    let many = seeds.end - seeds.start >= SEEDS;
    let server = Server::start(&["--tasks", "1", "--log", "error"]);
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let mut ledger = Comparison::default();
    let mut seen_states = BTreeMap::<&str, usize>::new();
    for seed in seeds {
        let mut program = ScriptedTasks::new(&server, &runtime, seed);
        program.play();
        let seen = ShownValues::all(&program);
        if std::env::var_os("FIGURES_SHOW").is_some() {
            println!("{}\n{}", program.done.join("; "), seen.status);
        }
        compare(&program, &seen, &mut ledger);
        for state in STATES {
            *seen_states.entry(state).or_default() +=
                seen.rest["run"]["counts"][state].as_u64().unwrap_or(0) as usize;
        }
        let path = program.path("?force=true&reason=r");
        drop(program);
        assert_eq!(server.send("DELETE", &path, "").status, 204);
    }
    if many {
        // It is no comparison if all of it is nothing: every state was seen, and every figure compared.
        assert!(seen_states.values().all(|count| *count > 0), "{seen_states:?}");
        assert!(ledger.compared.len() >= 22, "{:?}", ledger.compared);
        assert!(ledger.compared.contains_key("length of an ended run"), "{:?}", ledger.compared);
    }
}
