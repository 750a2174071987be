//! Tests of stacks with real Python programs that load the helper, and of `muster stacks`.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::Duration;

use serde_json::{Value, json};

use crate::harness::process::tied;
use crate::harness::{
    CommandOutput, MusterServer, PATIENCE, Process, Signal, TempFolder, TestInstant, muster, run, wait_until,
};
use crate::status::register_task;

const STACKS: &str = "/api/v1/jobs/default/stacks";

/// Loads the helper as the guide says, and then waits in one of two functions.
const PROGRAM: &str = r#"
import sys, threading, time, urllib.request
exec(urllib.request.urlopen(sys.argv[1] + "/helper.py").read())

def all_reduce():
    threading.Event().wait()

def load_batch():
    while True:
        time.sleep(0.05)

def main():
    print("READY", flush=True)
    (load_batch if sys.argv[2] == "5" else all_reduce)()

main()
"#;

/// Starts a Python program as this task.
fn start_python(program: &str, task: i32, arguments: &[&str]) -> Process {
    let mut command = tied("python3");
    command.args(["-c", program]).args(arguments).env("MUSTER_PROCESS_ID", task.to_string());
    for name in ["MUSTER_SERVER", "MUSTER_JOB", "MUSTER_TOKEN", "MUSTER_TOKEN_FILE"] {
        command.env_remove(name);
    }
    Process::start(&mut command)
}

fn run_subcommand(server: &MusterServer, arguments: &[&str]) -> CommandOutput {
    run(muster(arguments).args(["--server", &server.url()]))
}

fn helper_count(server: &MusterServer) -> u64 {
    server.get(STACKS).json()["helpers"].as_u64().unwrap_or_default()
}

/// Registers tasks, and starts a program for each.
fn start_programs(server: &MusterServer, tasks: i32) -> (tokio::runtime::Runtime, Vec<Process>) {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    (0..tasks).for_each(|task| register_task(server, &runtime, task));
    wait_until("the run is running", || server.get("/api/v1/jobs").body.contains("\"running\""));
    let url = server.url();
    let programs = (0..tasks).map(|task| start_python(PROGRAM, task, &[&url, &task.to_string()])).collect();
    wait_until("all helpers wait", || Some(helper_count(server)) == u64::try_from(tasks).ok());
    (runtime, programs)
}

#[test]
fn the_odd_one_among_python_programs_is_named() {
    let server = MusterServer::patient(&["--tasks", "8"]);
    let (_tasks, programs) = start_programs(&server, 8);
    programs
        .iter()
        .for_each(|program| _ = program.find(0, PATIENCE, |line| line.text.contains("READY").then_some(())));
    let began = TestInstant::now();
    let shown = run_subcommand(&server, &["stacks", "--wait", "30s", "--reason", "a test"]);
    assert_eq!((shown.code, &*shown.err), (Some(0), ""), "{shown:?}");
    assert!(began.elapsed() < Duration::from_secs(20), "helpers answer at once");
    assert!(shown.out.contains("8 of 8 tasks answered\n"), "{}", shown.out);
    assert!(shown.out.contains("7 tasks (0-4, 6-7): all_reduce (<string>:6), in "), "{}", shown.out);
    assert!(shown.out.contains("1 task (5): load_batch (<string>:"), "{}", shown.out);
    assert!(!shown.out.contains("muster-stacks"), "the helper leaves itself out: {}", shown.out);
    // A stopped process does not answer, and is named.
    programs[2].signal(Signal::STOP);
    // Two requests have at least a second between them.
    std::thread::sleep(Duration::from_secs(1));
    let shown = run_subcommand(&server, &["stacks", "--tasks", "2-3", "--wait", "3s", "--json"]);
    assert_eq!(shown.code, Some(1), "{shown:?}");
    let view: Value = serde_json::from_str(&shown.out).expect("JSON");
    assert_eq!(view["awaited"], json!([{"first": 2, "last": 2}]), "{view}");
    assert_eq!(view["answered"], json!([{"first": 3, "last": 3}]), "{view}");
    programs[2].signal(Signal::CONT);
    wait_until("it answers late", || server.get(STACKS).json()["awaited"] == json!([]));
    let latest = run_subcommand(&server, &["stacks", "--latest", "--full"]);
    assert!(latest.out.contains("Request 2 of ") && latest.out.contains("(<string>:16)"), "{}", latest.out);
    let page = server.get_with("/jobs/default/stacks", "accept: text/html").body;
    assert!(
        page.contains("2 of 2 tasks have answered") && page.contains("all_reduce (&#60;string&#62;:6)"),
        "{page}"
    );
    let audit = server.get("/api/v1/audit").json();
    let asked = |line: &&Value| line["act"] == "ask-for-stacks" && line["reason"] == "a test";
    assert_eq!(audit["lines"].as_array().into_iter().flatten().filter(asked).count(), 1, "{audit}");
    let metrics = server.get("/metrics").body;
    for sample in [
        "muster_stack_requests_total{muster_job=\"default\",cause=\"operator\"} 2",
        "muster_stack_answers_total{muster_job=\"default\",result=\"accepted\"} 10",
        "muster_stack_helpers{muster_job=\"default\"} 8",
    ] {
        assert!(metrics.contains(sample), "{sample}");
    }
}

#[test]
fn a_helper_does_no_harm_to_its_program() {
    let server = MusterServer::patient(&["--tasks", "2"]);
    let folder = TempFolder::new("stack-helper");
    let text = server.get("/helper.py").body;
    std::fs::write(folder.path("muster_helper.py"), &text).expect("it is written");
    // Loaded as a file, with a wrong address, twice, and in a forked child; the random numbers of the program are its own.
    let program = r#"
import os, random, sys, threading
random.seed(7)
expected = random.Random(7).random()
before = set(globals())
import muster_helper
muster_helper.show_stacks("http://127.0.0.1:1", task=0)
muster_helper.show_stacks("ftp://nothing", task=0)
muster_helper.show_stacks("http://127.0.0.1:1", task=1)
exec(__import__("pathlib").Path(muster_helper.__file__).read_text())
assert set(globals()) - before == {"before", "muster_helper", "show_stacks"}, set(globals()) - before
assert random.random() == expected
child = os.fork()
if child == 0:
    assert [thread.name for thread in threading.enumerate()] == ["MainThread"]
    show_stacks("http://127.0.0.1:1", task=0)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert "jax" not in sys.modules
print("DONE", flush=True)
"#;
    let mut command = tied("python3");
    command.args(["-W", "ignore", "-c", program]).current_dir(&folder.0).env_remove("MUSTER_PROCESS_ID");
    let began = TestInstant::now();
    let ended = run(&mut command);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(ended.out.contains("DONE"), "{ended:?}");
    assert!(began.elapsed() < Duration::from_secs(20), "it ends with its program");
    let lines: Vec<&str> = ended.err.lines().collect();
    assert_eq!(lines.len(), 1, "one warning, about the wrong address: {ended:?}");
    assert!(lines[0].contains("ftp://nothing"), "{ended:?}");
}

#[test]
fn a_helper_comes_back_to_a_server_that_was_away_and_uses_little() {
    let server = MusterServer::patient(&["--tasks", "1"]);
    let (http, grpc) = (server.http.to_string(), server.grpc.to_string());
    let (tasks, programs) = start_programs(&server, 1);
    drop(tasks);
    server.process.signal(Signal::KILL);
    server.process.end();
    let cpu = programs[0].cpu();
    let again = ["serve", "--grpc", &grpc, "--http", &http, "--tasks", "1", "--heartbeat-timeout", "1h"];
    let server = MusterServer::run(&mut muster(again));
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    register_task(&server, &runtime, 0);
    wait_until("the helper is back", || helper_count(&server) == 1);
    let shown = run_subcommand(&server, &["stacks", "--wait", "30s"]);
    assert!(shown.out.contains("1 of 1 task answered"), "{shown:?}");
    assert!(programs[0].cpu() - cpu < Duration::from_secs(1), "{:?}", programs[0].cpu() - cpu);
}

#[test]
fn every_request_is_answered_before_and_after_the_service_dies() {
    let folder = TempFolder::new("stacks-restart");
    let server = MusterServer::patient(&["--tasks", "2", "--data-dir", &folder.path("journal")]);
    let (_tasks, _programs) = start_programs(&server, 2);
    let mut last = 0;
    for round in 0..3 {
        let shown = run_subcommand(&server, &["stacks", "--wait", "30s"]);
        assert!(shown.out.contains("2 of 2 tasks answered"), "{round}: {shown:?}");
        let number = server.get(STACKS).json()["request"]["number"].as_u64().expect("a number");
        assert!(number > last, "{round}: {number} after {last}");
        last = number;
        server.kill_core();
        wait_until("the helpers are back", || helper_count(&server) == 2);
    }
}

/// Opens a connection that waits for a request.
fn open_wait(server: &MusterServer, task: usize) -> TcpStream {
    let mut stream = TcpStream::connect(server.http).expect("it connects");
    let request = format!(
        "GET {STACKS}/requests?task={task}&wait_seconds=30 HTTP/1.1\r\nhost: {}\r\nconnection: close\r\n\r\n",
        server.http
    );
    stream.write_all(request.as_bytes()).expect("it is sent");
    stream
}

fn waits(server: &MusterServer) -> Option<usize> {
    let metrics = server.get("/metrics").body;
    metrics.lines().find_map(|line| line.strip_prefix("muster_stack_waits "))?.parse().ok()
}

#[test]
fn more_helpers_than_may_wait_are_sent_away_and_a_helper_that_hangs_up_makes_room() {
    let server = MusterServer::patient(&["--tasks", "10000"]);
    let mut open: Vec<TcpStream> = (0..128).map(|task| open_wait(&server, task)).collect();
    wait_until("half of the places are taken", || waits(&server) == Some(128));
    // One network has half of the places. All others are answered at once, and told to come again.
    for task in 128..10_000 {
        let mut stream = open_wait(&server, task);
        if task % 100 == 0 {
            let mut answer = String::new();
            stream.set_read_timeout(Some(PATIENCE)).expect("it is set");
            stream.read_to_string(&mut answer).expect("an answer");
            assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("\"retry_ms\":"), "{answer}");
            assert!(!answer.contains("\"retry_ms\":0"), "{answer}");
        }
    }
    assert_eq!(waits(&server), Some(128));
    assert_eq!(server.get("/healthz/ready").status, 200);
    open.truncate(28);
    wait_until("those that hang up make room", || waits(&server) == Some(28));
    // The others learn of the request at once, though they do not read it.
    assert_eq!(server.send("POST", STACKS, r#"{"reason": "a test"}"#).status, 202);
    wait_until("nobody waits", || waits(&server) == Some(0));
    let view = server.get(STACKS).json();
    assert_eq!(view["request"]["task_count"], 10_000, "{view}");
}

#[test]
fn the_server_stops_at_once_while_helpers_wait() {
    let server = MusterServer::patient(&["--tasks", "2"]);
    let mut waiting = open_wait(&server, 0);
    wait_until("it waits", || waits(&server) == Some(1));
    let began = server.process.signal(Signal::TERM);
    let mut answer = String::new();
    waiting.set_read_timeout(Some(PATIENCE)).expect("it is set");
    waiting.read_to_string(&mut answer).expect("an answer");
    assert!(answer.contains("\"retry_ms\":2000"), "{answer}");
    assert!(server.process.end().at - began < 5.0);
}
