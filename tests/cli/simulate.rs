//! `muster simulate`: each story shows on the server what it promises.
//!
//! The stories of the program are run with short times: `shortened_story` replaces them in the printed file.

use std::collections::BTreeSet;
use std::net::SocketAddr;

use serde_json::Value;

use crate::harness::server::address;
use crate::harness::{
    CommandOutput, MusterServer, PATIENCE, Process, Signal, TempFolder, http, muster, run, wait_for,
    wait_until,
};

const JOB: &str = "/api/v1/jobs/simulation";
/// The story of most tests of single actions: 8 tasks on 4 hosts with quick steps.
const SMALL: &str = "
description = \"a test\"
tasks = 8
hosts = 4
[job]
heartbeat-timeout = \"5s\"
[workers]
start-spread = \"10ms\"
restart-delay = \"100ms\"
[steps]
time = \"50ms\"
spread = \"5ms\"
";

/// A running `muster simulate --json` with a server of its own.
struct Simulation {
    process: Process,
    http: SocketAddr,
    _folder: TempFolder,
}

impl Simulation {
    #[track_caller]
    fn start(name: &str, story: &str, arguments: &[&str]) -> Self {
        let folder = TempFolder::new(name);
        let path = folder.path("story.toml");
        std::fs::write(&path, story).expect("the story is written");
        let given =
            ["simulate", "--json", "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0", "--story", &path];
        let mut process = Process::start(muster(given).args(arguments));
        let start = json(&process.out_line(r#""kind":"start""#));
        let http = address(start["server"].as_str().expect("a URL")).expect("an address");
        Self { process, http, _folder: folder }
    }

    #[track_caller]
    fn get(&self, path: &str) -> Value {
        http::get(self.http, path).expect("the server answers").json()
    }

    /// Returns the tasks of the next event.
    #[track_caller]
    fn tasks_of_next_event(&mut self) -> BTreeSet<u64> {
        numbers(&json(&self.process.out_line(r#""kind":"event""#))["tasks"])
    }

    /// Returns the tasks that meet a condition.
    fn tasks_with(&self, condition: impl Fn(&Value) -> bool) -> BTreeSet<u64> {
        let job = self.get(JOB);
        let tasks = job["run"]["tasks"].as_array().expect("a list").iter();
        tasks.filter(|task| condition(task)).filter_map(|task| task["task"].as_u64()).collect()
    }

    fn tasks_in_state(&self, state: &str) -> BTreeSet<u64> {
        self.tasks_with(|task| task["standing"] == state)
    }

    /// Waits until each task has taken part in this many more steps.
    #[track_caller]
    fn wait_for_steps(&self, more: u64) {
        let steps = || {
            self.get(JOB)["run"]["tasks"].as_array().map(|tasks| {
                tasks
                    .iter()
                    .filter_map(|task| task["straggling"]["taken_part"].as_u64())
                    .min()
                    .unwrap_or_default()
            })
        };
        let before = steps();
        wait_until("the steps advance", || steps() >= before.map(|before| before + more));
    }

    /// Waits for an open finding, and returns it.
    #[track_caller]
    fn wait_for_finding(&self, id: &str) -> Value {
        wait_for(id, || {
            let open = self.get(&format!("{JOB}/findings"))["open"].as_array().cloned().unwrap_or_default();
            open.into_iter().find(|finding| finding["id"] == id)
        })
    }

    /// Ends the simulation as an operator does, and returns its summary.
    #[track_caller]
    fn interrupt(self) -> Value {
        self.process.signal(Signal::INT);
        let ended = self.process.end();
        assert_eq!(ended.code, Some(130), "{ended:?}");
        summary(&ended)
    }
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).expect("a line is JSON")
}

fn numbers(list: &Value) -> BTreeSet<u64> {
    list.as_array().expect("a list").iter().filter_map(Value::as_u64).collect()
}

#[track_caller]
fn summary(ended: &CommandOutput) -> Value {
    let line = ended.out.lines().find(|line| line.contains(r#""kind":"summary""#));
    json(line.unwrap_or_else(|| panic!("there is no summary: {ended:?}")))
}

/// Returns a story of the program with other values. Each of them must be in it.
fn shortened_story(name: &str, replaced: &[(&str, &str)]) -> String {
    let printed = run(&mut muster(["simulate", "--print-story", name]));
    assert_eq!(printed.code, Some(0), "{printed:?}");
    let mut text = printed.out;
    for (old, new) in replaced {
        assert!(text.contains(old), "{name} has no {old}");
        text = text.replace(old, new);
    }
    text
}

const SIZE: [&str; 4] = ["--tasks", "24", "--hosts", "6"];

#[test]
fn a_healthy_story_makes_steps_and_shows_hosts_and_devices() {
    let story =
        shortened_story("healthy", &[("time = \"2s\"", "time = \"100ms\""), ("\"100ms\"", "\"20ms\"")]);
    let arguments = [&SIZE[..], &["--for", "4s"]].concat();
    let mut simulation = Simulation::start("simulate-healthy", &story, &arguments);
    simulation.process.out_line("registered");
    wait_until("all are connected", || simulation.tasks_in_state("connected").len() == 24);
    simulation.wait_for_steps(3);
    let devices = || simulation.get(&format!("{JOB}/devices?limit=1000"))["devices"].clone();
    let devices = wait_for("all devices are published", || {
        Some(devices()).filter(|all| all.as_array().is_some_and(|all| all.len() == 24 * 4))
    });
    let host = |device: &Value| device["identity"]["host"].to_string();
    let hosts: BTreeSet<String> = devices.as_array().into_iter().flatten().map(host).collect();
    assert_eq!(hosts, (0..6).map(|host| format!("\"host-{host:04}\"")).collect());
    if cfg!(target_os = "linux") {
        let peer = |task: &Value| {
            task["lives"][0]["peer"].as_str().map(|peer| peer.split(':').next().map(str::to_owned))
        };
        let job = simulation.get(JOB);
        let peers: BTreeSet<_> = job["run"]["tasks"].as_array().into_iter().flatten().map(peer).collect();
        assert_eq!(peers.len(), 6, "{peers:?}");
    }
    assert_eq!(simulation.get(&format!("{JOB}/findings"))["open"], serde_json::json!([]));
    let ended = simulation.process.end();
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let summary = summary(&ended);
    assert_eq!((&summary["registrations"], &summary["errors"]), (&24.into(), &serde_json::json!({})));
    assert!(summary["steps"].as_u64() > Some(3), "{summary}");
}

#[test]
fn a_dead_host_takes_all_its_tasks_with_it_and_no_other() {
    let story = shortened_story(
        "dead-host",
        &[("time = \"2s\"", "time = \"100ms\""), ("at = \"10s\"", "at = \"1s\"")],
    );
    let mut simulation = Simulation::start("simulate-dead-host", &story, &SIZE);
    let dead = simulation.tasks_of_next_event();
    assert_eq!(dead.len(), 4);
    wait_until("the tasks of the host have failed", || simulation.tasks_in_state("failed") == dead);
    assert_eq!(simulation.tasks_in_state("connected").len(), 20);
    let job = simulation.get(JOB);
    let missing = &job["run"]["barriers"][0]["missing"];
    assert_eq!((numbers(missing), &job["run"]["number"]), (dead, &1.into()), "{job}");
    let summary = simulation.interrupt();
    assert_eq!((&summary["present"], &summary["unexpected"]), (&20.into(), &serde_json::json!([])));
}

#[test]
fn a_dead_host_is_named_everywhere_and_excluded_as_a_whole() {
    let story = shortened_story(
        "dead-host",
        &[("time = \"2s\"", "time = \"100ms\""), ("at = \"10s\"", "at = \"1s\"")],
    );
    let mut simulation = Simulation::start("simulate-dead-host-excluded", &story, &SIZE);
    let dead = simulation.tasks_of_next_event();
    let name = format!("host-{:04}", dead.first().expect("a task") / 4);
    wait_until("the tasks of the host have failed", || simulation.tasks_in_state("failed") == dead);
    let down = simulation.get(&format!("{JOB}/hosts?state=down"))["hosts"].clone();
    let down = down.as_array().expect("a list");
    assert_eq!(
        (down.len(), &down[0]["host"], numbers(&down[0]["tasks"])),
        (1, &name.as_str().into(), dead.clone())
    );
    let shown = simulation.get(&format!("{JOB}/hosts/{name}"));
    assert_eq!((&shown["state"], &shown["named_by"]), (&"down".into(), &"identity".into()));
    let nobody = http::get(simulation.http, &format!("{JOB}/hosts/nobody")).expect("it answers");
    assert_eq!((nobody.status, &nobody.json()["type"]), (404, &"/problems/no-such-host".into()));

    let server = format!("http://{}", simulation.http);
    let command = |words: &[&str]| run(muster(words).args(["--server", &server, "--job", "simulation"]));
    let listed = command(&["hosts", "--state", "down"]);
    assert!(listed.out.lines().count() == 2 && listed.out.contains(&name), "{listed:?}");
    let unknown = command(&["exclude", "host-9999", "--reason", "r"]);
    assert!(unknown.code == Some(1) && unknown.err.contains("see the hosts of the job"), "{unknown:?}");
    let preview = command(&["exclude", &name, "--reason", "ECC errors", "--dry-run"]);
    assert_eq!(preview.code, Some(0), "{preview:?}");
    let excluded = command(&["exclude", &name, "--reason", "ECC errors"]);
    assert!(excluded.out.contains(&format!("host {name}")), "{excluded:?}");
    let exclusion = simulation.get(&format!("{JOB}/exclusions"))["exclusions"][0].clone();
    assert_eq!((&exclusion["host"], numbers(&exclusion["tasks"])), (&name.as_str().into(), dead.clone()));
    // Each simulated host has an address of its own on Linux; elsewhere its tasks are excluded by their numbers.
    let recognised = if cfg!(target_os = "linux") { "host_addresses" } else { "host_tasks" };
    assert!(!exclusion[recognised].is_null(), "{exclusion}");
    simulation.wait_for_steps(2);
    let state = || simulation.get(&format!("{JOB}/hosts/{name}"))["state"].clone();
    assert_eq!(state(), "excluded");

    // The arrivals of the steps agree with their records.
    let arrivals = simulation.get(&format!("{JOB}/barriers/arrivals?limit=3"));
    let steps = arrivals["barriers"].as_array().expect("a list");
    assert_eq!(steps.len(), 3);
    for step in steps {
        let times: Vec<u64> =
            step["arrivals"].as_array().into_iter().flatten().filter_map(|it| it["at"].as_u64()).collect();
        assert_eq!(Some(times.len() as u64), step["arrived"].as_u64());
        let skew = times.iter().max().zip(times.iter().min()).map(|(last, first)| last - first);
        assert_eq!(skew, step["skew_us"].as_u64(), "{step}");
        let ended = step["ended"].as_u64().expect("a time");
        assert_eq!(Some(times.iter().map(|at| ended - at).sum()), step["waited_us"].as_u64(), "{step}");
    }
    let id = steps[0]["id"].as_str().expect("an id");
    let path = format!("{JOB}/barriers/arrivals?format=csv&run=1&limit=1&barrier={}", id.replace('/', "%2F"));
    let csv = http::get(simulation.http, &path).expect("it answers").body;
    assert!(csv.starts_with("run,barrier,use,task,at_us,after_us,blocked_us\r\n"), "{csv}");
    assert!((21..=25).contains(&csv.lines().count()), "a line for each arrival: {csv}");
    let none = simulation.get(&format!("{JOB}/barriers/arrivals?run=7"));
    assert_eq!(none["status"], 404, "the job has had no such run: {none}");

    let readmitted = command(&["readmit", "--host", &name, "--reason", "memory replaced"]);
    assert_eq!(readmitted.code, Some(0), "{readmitted:?}");
    assert_eq!(state(), "down");
    simulation.interrupt();
}

#[test]
fn a_straggler_is_named_by_its_statistics() {
    let shortened = [
        ("time = \"2s\"", "time = \"100ms\""),
        ("spread = \"100ms\"", "spread = \"10ms\""),
        ("at = \"10s\"", "at = \"500ms\""),
        ("by = \"1s\"", "by = \"300ms\""),
    ];
    let story = shortened_story("straggler", &shortened);
    let mut simulation = Simulation::start("simulate-straggler", &story, &SIZE);
    let late = simulation.tasks_of_next_event();
    assert_eq!(late.len(), 4);
    let is_straggler = |task: &Value| task["straggling"]["score"].as_f64().is_some_and(|score| score > 0.75);
    wait_until("the statistics name the tasks", || simulation.tasks_with(is_straggler) == late);
    let finding = simulation.wait_for_finding("chronic-straggler");
    assert!(numbers(&finding["tasks"]).is_subset(&late), "{finding}");
    let summary = simulation.interrupt();
    assert_eq!(summary["errors"], serde_json::json!({}));
}

#[test]
fn a_restart_storm_is_found_and_the_run_goes_on() {
    let shortened = [
        ("time = \"2s\"", "time = \"100ms\""),
        ("at = \"10s\"", "at = \"1s\""),
        ("every = \"10s\"", "every = \"1s\""),
        ("after = \"3s\"", "after = \"200ms\""),
    ];
    let story = shortened_story("restart-storm", &shortened);
    let mut simulation = Simulation::start("simulate-storm", &story, &SIZE);
    let restarted = simulation.tasks_of_next_event();
    assert_eq!(simulation.tasks_of_next_event(), restarted, "it is the same host each time");
    let finding = simulation.wait_for_finding("restart-storm");
    assert_eq!(numbers(&finding["tasks"]), restarted, "{finding}");
    simulation.wait_for_steps(2);
    assert_eq!(simulation.get(JOB)["run"]["number"], 1);
    let summary = simulation.interrupt();
    assert_eq!(summary["unexpected"], serde_json::json!([]), "{summary}");
}

#[test]
fn a_partition_heals_within_the_run() {
    let shortened = [
        ("time = \"2s\"", "time = \"100ms\""),
        ("heartbeat-timeout = \"10s\"", "heartbeat-timeout = \"3s\""),
        ("at = \"10s\"", "at = \"1s\""),
        ("for = \"20s\"", "for = \"5s\""),
        ("restart-delay = \"2s\"", "restart-delay = \"100ms\""),
    ];
    let story = shortened_story("partition", &shortened);
    let mut simulation = Simulation::start("simulate-partition", &story, &SIZE);
    let cut_off = simulation.tasks_of_next_event();
    assert_eq!(cut_off.len(), 8);
    wait_until("they have failed", || simulation.tasks_in_state("failed") == cut_off);
    wait_until("they are back", || {
        let lives = |task: &Value| task["lives"].as_array().is_some_and(|lives| lives.len() == 2);
        simulation.tasks_in_state("connected").len() == 24 && simulation.tasks_with(lives) == cut_off
    });
    simulation.wait_for_steps(2);
    assert_eq!(simulation.get(JOB)["run"]["number"], 1);
    let summary = simulation.interrupt();
    assert_eq!(summary["errors"]["heartbeat: Aborted"]["expected"], 8, "{summary}");
}

#[test]
fn a_task_can_hang_report_an_error_and_shut_down() {
    let story = format!(
        "{SMALL}
        [[events]]
        at = \"200ms\"
        what = \"hang\"
        tasks = \"3\"
        [[events]]
        at = \"400ms\"
        what = \"error\"
        tasks = \"5\"
        message = \"out of memory\"
        [[events]]
        at = \"600ms\"
        what = \"stop\"
        tasks = \"6\"
        [[events]]
        at = \"800ms\"
        what = \"kill\"
        tasks = \"7\""
    );
    // Task 5 stays away after its error.
    let story = story.replace("restart-delay = \"100ms\"", "restart-delay = \"1h\"");
    let mut simulation = Simulation::start("simulate-actions", &story, &[]);
    for task in [3, 5, 6, 7] {
        assert_eq!(simulation.tasks_of_next_event(), [task].into());
    }
    wait_until("task 5 and task 7 have failed", || simulation.tasks_in_state("failed") == [5, 7].into());
    wait_until("task 6 has shut down", || simulation.tasks_in_state("disconnected") == [6].into());
    // Task 7 has a connection of its own, so the other task of its host lives on.
    assert_eq!(simulation.tasks_in_state("connected"), (0..5).collect());
    let job = simulation.get(JOB);
    let error = &job["run"]["tasks"][5]["error"];
    assert!(error.as_str().is_some_and(|error| error.contains("out of memory")), "{error}");
    wait_until("the hung task is missing at the barrier", || {
        let missing = numbers(&simulation.get(JOB)["run"]["barriers"][0]["missing"]);
        missing == [3, 5, 6, 7].into()
    });
    simulation.interrupt();
}

#[test]
fn a_job_that_is_not_recoverable_runs_again_after_a_loss() {
    let story = format!(
        "{}
        [[events]]
        at = \"300ms\"
        what = \"kill\"
        hosts = \"2\"
        [[events]]
        at = \"1s\"
        what = \"restart\"
        hosts = \"2\"",
        SMALL.replace("[job]", "[job]\nrecoverable = false")
    );
    let mut simulation = Simulation::start("simulate-fate", &story, &[]);
    assert_eq!(simulation.tasks_of_next_event(), [4, 5].into());
    wait_until("the next run is running", || {
        let run = simulation.get(JOB)["run"].clone();
        run["number"].as_u64() >= Some(2) && run["state"] == "running"
    });
    let runs = simulation.get(&format!("{JOB}/runs"));
    let first = runs["runs"].as_array().and_then(|runs| runs.last().cloned()).expect("a run");
    let cause = first["first_cause"]["task"].as_u64();
    assert!(first["state"] == "failed" && (cause == Some(4) || cause == Some(5)), "{first}");
    simulation.wait_for_steps(2);
    let summary = simulation.interrupt();
    assert_eq!(summary["unexpected"], serde_json::json!([]), "{summary}");
}

#[test]
fn tasks_that_wait_for_others_to_shut_down_send_heartbeats() {
    let story = format!(
        "{}
        [[events]]
        at = \"300ms\"
        what = \"stop\"
        tasks = \"0-6\"
        [[events]]
        at = \"5s\"
        what = \"stop\"
        tasks = \"7\"",
        SMALL.replace("[job]", "[job]\nrecoverable = false").replace("\"5s\"", "\"3s\"")
    );
    let mut simulation = Simulation::start("simulate-stop", &story, &[]);
    assert_eq!(simulation.tasks_of_next_event().len(), 7);
    assert_eq!(simulation.tasks_of_next_event(), [7].into());
    wait_until("the run has ended in good order", || {
        let runs = simulation.get(&format!("{JOB}/runs"))["runs"].clone();
        runs.as_array().is_some_and(|runs| runs.iter().any(|run| run["state"] == "completed"))
    });
    let summary = simulation.interrupt();
    assert_eq!(summary["errors"], serde_json::json!({}), "{summary}");
}

#[test]
fn a_wrong_story_is_refused_with_its_field() {
    let folder = TempFolder::new("simulate-wrong");
    let path = folder.path("story.toml");
    for (text, named) in [
        (format!("{SMALL}[[events]]\nat = \"1s\"\nwhat = \"late\"\ntasks = \"1\"\n"), "events[0].by"),
        (format!("{SMALL}[[events]]\nat = \"soon\"\nwhat = \"kill\"\ntasks = \"1\"\n"), "line 14"),
        (format!("hostz = 3\n{SMALL}"), "hostz"),
        (SMALL.replace("hosts = 4", "hosts = 9"), "hosts: 9 hosts"),
    ] {
        std::fs::write(&path, &text).expect("the story is written");
        let ended = run(&mut muster(["simulate", "--story", &path]));
        assert!(ended.code == Some(2) && ended.err.contains(named), "{named}: {ended:?}");
    }
    let ended = run(&mut muster(["simulate", "--story", "stragler"]));
    assert!(ended.code == Some(2) && ended.err.contains("straggler"), "{ended:?}");
    let ended = run(&mut muster(["simulate", "--tasks", "1000000"]));
    assert!(ended.code == Some(2) && ended.err.contains("tasks: 1000000"), "{ended:?}");
    let ended = run(&mut muster(["simulate", "--tasks", "100", "--connections", "101"]));
    assert!(ended.code == Some(2) && ended.err.contains("101 connections"), "{ended:?}");
}

#[test]
fn a_running_server_gets_a_job_and_keeps_it() {
    let server = MusterServer::start(&["--tasks", "2"]);
    let url = server.url();
    let folder = TempFolder::new("simulate-server");
    let path = folder.path("story.toml");
    std::fs::write(&path, SMALL).expect("the story is written");
    let simulate = |arguments: &[&str]| {
        let mut command = muster(["simulate", "--story", &path, "--server", &url]);
        command.args(arguments);
        command
    };
    let job = |path: &str| server.get(&format!("{JOB}{path}")).json();

    let mut simulation = Process::start(&mut simulate(&[]));
    simulation.out_line("All 8 tasks have registered");
    assert_eq!(job("")["settings"]["heartbeat_timeout"], "5s");
    let other = run(&mut simulate(&["--tasks", "8"]));
    assert!(other.code == Some(1) && other.err.contains("8 connected"), "{other:?}");
    let told = simulation.signal(Signal::INT);
    let ended = simulation.end();
    assert_eq!(ended.code, Some(130), "{ended:?}");
    // It takes less than a second on an idle machine.
    assert!(ended.at - told < PATIENCE.as_secs_f64() / 10.0, "it took {} s", ended.at - told);
    assert!(ended.out.contains("muster job delete simulation"), "{ended:?}");
    wait_until("the run has ended in good order", || {
        job("/runs")["runs"][0]["state"] == "completed" || job("/runs")["runs"][1]["state"] == "completed"
    });

    let wrong = run(&mut simulate(&["--tasks", "12"]));
    assert!(wrong.code == Some(1) && wrong.err.contains("--tasks 8"), "{wrong:?}");
    let again = run(&mut simulate(&["--for", "1s"]));
    assert_eq!(again.code, Some(0), "{again:?}");
    assert!(again.out.contains("ends after 1s") && again.out.contains("other errors: none"), "{again:?}");
}

#[test]
fn a_lost_service_is_a_failure() {
    let server = MusterServer::start(&["--tasks", "2"]);
    let folder = TempFolder::new("simulate-lost");
    let path = folder.path("story.toml");
    std::fs::write(&path, SMALL).expect("the story is written");
    let arguments = ["simulate", "--story", &path, "--server", &server.url(), "--for", "5s", "--json"];
    let mut simulation = Process::start(&mut muster(arguments));
    simulation.out_line("registered");
    server.signal(Signal::KILL);
    let ended = simulation.end();
    assert_eq!(ended.code, Some(1), "{ended:?}");
    let summary = summary(&ended);
    assert!(
        summary["unexpected"][0].as_str().is_some_and(|text| text.contains("cannot be reached")),
        "{summary}"
    );
}

#[test]
fn a_gpu_that_is_held_is_named_by_the_clique_that_waits_and_all_go_on_when_it_does() {
    let story = format!(
        "{SMALL}[collectives]\neach-step = 3\ntimed = true\n\
         [[events]]\nat = \"500ms\"\nwhat = \"hold-gpu\"\ntasks = \"5\"\nfor = \"6s\"\n"
    );
    let mut simulation = Simulation::start("simulate-held-gpu", &story, &[]);
    let cliques = || simulation.get(&format!("{JOB}/collectives"))["cliques"].clone();
    wait_until("the clique advances", || cliques()[0]["back"].as_u64() > Some(6));
    assert_eq!((&cliques()[0]["ranks"], &cliques()[0]["reported"]), (&8.into(), &8.into()));
    let wait = wait_for("the clique waits", || Some(cliques()[0]["wait"].clone()).filter(Value::is_object));
    assert_eq!((&wait["kind"], &wait["certain"]), (&"not-begun".into(), &true.into()), "{wait}");
    assert_eq!(wait["tasks"], serde_json::json!([{"first": 5, "last": 5}]), "{wait}");
    assert_eq!(simulation.tasks_in_state("connected").len(), 8, "heartbeats go on");
    let before = cliques()[0]["back"].as_u64();
    wait_until("all go on", || cliques()[0]["wait"].is_null() && cliques()[0]["back"].as_u64() > before);
    assert_eq!(simulation.tasks_of_next_event(), BTreeSet::from([5]));
    assert_eq!(simulation.interrupt()["unexpected"], serde_json::json!([]));
}

#[test]
fn tasks_that_start_again_are_in_a_new_clique_with_all_others() {
    let story = format!(
        "{SMALL}[collectives]\n[[events]]\nat = \"1s\"\nevery = \"4s\"\nwhat = \"restart\"\ntasks = \"2-3\"\n"
    );
    let simulation = Simulation::start("simulate-restarted-clique", &story, &[]);
    let present = || {
        let cliques = simulation.get(&format!("{JOB}/collectives"))["cliques"].clone();
        let whole = cliques.as_array().expect("a list").iter().filter(|clique| clique["reported"] == 8);
        let advanced = whole.filter(|clique| clique["back"].as_u64() > Some(0));
        advanced.filter_map(|clique| Some(clique["clique"].as_str()?.to_owned())).collect::<Vec<_>>()
    };
    let mut seen = BTreeSet::new();
    wait_until("three cliques have advanced with all ranks", || {
        seen.extend(present());
        seen.len() >= 3
    });
    simulation.interrupt();
}
