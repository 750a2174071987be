//! The state survives the process: a server that is killed, or stopped, goes on from its journal, with real workers.

use std::fs::{self, File};
use std::path::Path;
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};

use crate::harness::process::OutputLine;
use crate::harness::temp_folder::TempFolder;
use crate::harness::time::PATIENCE;
use crate::harness::{MusterServer, Process, Signal, muster, run, wait_until};

const JOB: &str = "/api/v1/jobs/default";

/// Starts a server on the journal in `folder`, at the gRPC address of an earlier one.
#[track_caller]
pub fn serve(folder: &str, grpc: &str, further: &[&str]) -> MusterServer {
    let server = [
        "serve",
        "--grpc",
        grpc,
        "--http",
        "127.0.0.1:0",
        "--data-dir",
        folder,
        "--tasks",
        "2",
        "--recoverable",
    ];
    MusterServer::run(&mut muster(server.iter().chain(further)))
}

pub fn start_worker(server: &MusterServer, task: &str) -> Process {
    let service = server.grpc.to_string();
    let arguments =
        ["worker", "--service", &service, "--task", task, "--program", "exercise", "--pause=20ms"];
    Process::start(&mut muster(arguments.into_iter().chain([
        "--bytes-max=100000",
        "--heartbeat-timeout",
        "1h",
    ])))
}

pub fn read(server: &MusterServer, path: &str) -> Value {
    server.get(&format!("{JOB}{path}")).json()
}

#[track_caller]
pub fn put_key(server: &MusterServer, key: &str, value: &str) -> u16 {
    let body = json!({"text": value, "reason": "a test"}).to_string();
    server.send("PUT", &format!("{JOB}/keys/{key}"), &body).status
}

/// Returns what must be the same after a restart.
fn durable_state(server: &MusterServer) -> Value {
    let mut run = read(server, "/runs/1");
    let barriers = run["barriers"].take();
    let lives = |task: &str| read(server, &format!("/tasks/{task}"))["lives"].clone();
    json!({
        "run": [run["number"], run["incarnation"], run["opened_at"], run["started_at"]],
        "lives": [lives("0"), lives("1")],
        "settings": read(server, "")["settings"],
        "exclusions": read(server, "/exclusions"),
        "key": read(server, "/keys/checkpoint"),
        "barriers": barriers.as_array().map(Vec::len).min(Some(1)),
    })
}

#[test]
fn a_killed_server_goes_on_and_its_workers_do_not_notice() {
    let folder = TempFolder::new("journal-kill");
    let path = folder.path("journal");
    // The whole service dies with its keeper.
    let mut server = serve(&path, "127.0.0.1:0", &[]);
    let grpc = server.grpc.to_string();
    let mut workers = [start_worker(&server, "0"), start_worker(&server, "1")];
    for worker in &mut workers {
        worker.out_line(": tasks 0 1;");
    }
    assert_eq!(put_key(&server, "checkpoint", "step 100"), 204);
    let settings = json!({"settings": {"heartbeat_timeout": "77s"}, "reason": "a test"}).to_string();
    assert_eq!(server.send("PATCH", JOB, &settings).status, 200);
    let exclusion = json!({"host": "10.9.9.9", "reason": "a bad NIC"}).to_string();
    assert_eq!(server.send("POST", &format!("{JOB}/exclusions"), &exclusion).status, 201);
    let before = durable_state(&server);
    for kill in 1..=5 {
        server.signal(Signal::KILL);
        server.end();
        server = serve(&path, &grpc, &[]);
        assert_eq!(durable_state(&server), before, "after kill {kill}");
        for worker in &workers {
            let step = |line: &OutputLine| line.text.contains(": tasks 0 1;").then_some(());
            worker.find(worker.mark(), PATIENCE, step).expect("a step after the restart");
        }
        let audit = server.get("/api/v1/audit").json();
        let acts: Vec<_> = audit["lines"].as_array().into_iter().flatten().map(|line| &line["act"]).collect();
        assert_eq!(acts, ["put-key", "change-settings", "exclude"], "{audit}");
        let metrics = server.get("/metrics").body;
        assert!(metrics.contains(&format!("\nmuster_journal_restarts_total {kill}\n")), "{metrics}");
    }
    let events = read(&server, "/events?limit=1000");
    let numbers: Vec<u64> = events["events"]
        .as_array()
        .expect("a list")
        .iter()
        .filter_map(|event| event["number"].as_u64())
        .collect();
    assert!(numbers.is_sorted_by(|a, b| a < b) && numbers.first() == Some(&1), "{numbers:?}");
    for worker in workers {
        worker.signal(Signal::TERM);
        let ended = worker.end();
        assert_eq!(ended.code, Some(0), "{ended:?}");
    }
}

#[test]
fn a_stopped_server_leaves_a_snapshot_and_needs_no_replay() {
    let folder = TempFolder::new("journal-stop");
    let path = folder.path("journal");
    let server = serve(&path, "127.0.0.1:0", &[]);
    assert_eq!(put_key(&server, "checkpoint", "step 7"), 204);
    server.signal(Signal::TERM);
    assert_eq!(server.end().code, Some(0));
    let checked = run(&mut muster(["journal", "check", &path, "--json"]));
    let contents: Value = serde_json::from_str(&checked.out).expect("JSON");
    assert_eq!(
        (&contents["has_snapshot"], &contents["inputs"], &contents["jobs"], &contents["cut"]),
        (&true.into(), &0.into(), &1.into(), &Value::Null),
        "{contents}"
    );
    // A copy of the folder is a server elsewhere.
    let copy = folder.path("copy");
    assert!(run(&mut muster(["journal", "export", &path, &copy])).status.success());
    for path in [&path, &copy] {
        let again = serve(path, "127.0.0.1:0", &[]);
        assert_eq!(read(&again, "/keys/checkpoint")["text"], "step 7", "{path}");
    }
}

#[test]
fn a_changed_configuration_is_applied_and_a_changed_setting_is_kept() {
    let folder = TempFolder::new("journal-settings");
    let path = folder.path("journal");
    let server = serve(&path, "127.0.0.1:0", &[]);
    let settings = json!({"settings": {"heartbeat_timeout": "77s"}, "reason": "a test"}).to_string();
    assert_eq!(server.send("PATCH", JOB, &settings).status, 200);
    server.signal(Signal::KILL);
    server.end();
    let server = serve(&path, "127.0.0.1:0", &["--shutdown-timeout", "44s"]);
    let settings = read(&server, "")["settings"].clone();
    assert_eq!(
        (&settings["heartbeat_timeout"], &settings["shutdown_timeout"]),
        (&"1m 17s".into(), &"44s".into())
    );
}

#[test]
fn a_second_server_on_the_folder_is_refused_and_names_the_first() {
    let folder = TempFolder::new("journal-two");
    let path = folder.path("journal");
    let first = serve(&path, "127.0.0.1:0", &[]);
    let arguments =
        ["serve", "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0", "--tasks", "2", "--data-dir", &path];
    let second = run(&mut muster(arguments));
    assert_eq!(second.code, Some(1), "{second:?}");
    assert!(second.err.contains(&format!("in use by process {}", first.pid())), "{second:?}");
    let looked = run(&mut muster(["journal", "check", &path]));
    assert!(looked.err.contains("in use by process"), "{looked:?}");
}

/// Returns the first segment that has records.
fn first_segment(folder: &str) -> std::path::PathBuf {
    Path::new(folder).join("segment-00000001")
}

#[test]
fn a_damaged_journal_is_refused_until_it_is_repaired() {
    let folder = TempFolder::new("journal-damage");
    let path = folder.path("journal");
    let server = serve(&path, "127.0.0.1:0", &[]);
    for key in ["a", "b", "c"] {
        assert_eq!(put_key(&server, key, "the value that is looked for"), 204);
    }
    server.signal(Signal::KILL);
    server.end();
    let segment = first_segment(&path);
    let mut bytes = fs::read(&segment).unwrap();
    let text = b"the value that is looked for";
    let at = bytes.windows(text.len()).position(|window| window == text).expect("the first value");
    bytes[at] ^= 1;
    fs::write(&segment, &bytes).unwrap();
    let arguments =
        ["serve", "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0", "--tasks", "2", "--data-dir", &path];
    let refused = run(&mut muster(arguments));
    assert_eq!(refused.code, Some(1), "{refused:?}");
    for part in ["is damaged, at byte", "segment-00000001", "muster journal repair"] {
        assert!(refused.err.replace('\n', " ").contains(part), "{part}: {refused:?}");
    }
    let repaired = run(&mut muster(["journal", "repair", &path]));
    assert!(repaired.out.contains("now ends before record"), "{repaired:?}");
    assert!(Path::new(&path).join("removed").read_dir().unwrap().count() > 0);
    let server = serve(&path, "127.0.0.1:0", &[]);
    assert_eq!(read(&server, "/keys/a")["status"], 404, "the first value is lost");
    assert_eq!(put_key(&server, "a", "again"), 204);
}

#[test]
fn without_room_changes_are_refused_reads_go_on_and_it_recovers_by_itself() {
    let folder = TempFolder::new("journal-room");
    let path = folder.path("journal");
    let server = serve(&path, "127.0.0.1:0", &["--http-changes-per-second", "100000"]);
    // Nothing can be created under the names of the next segments.
    let blocked: Vec<_> =
        (3..200).map(|index| Path::new(&path).join(format!("segment-{index:08}"))).collect();
    wait_until("the spare segment", || Path::new(&path).join("segment-00000002").exists());
    blocked.iter().for_each(|file| drop(File::create(file).unwrap()));
    let value = "x".repeat(250_000);
    let refused =
        (0..200).map(|key| put_key(&server, &format!("k{key}"), &value)).find(|status| *status != 204);
    assert_eq!(refused, Some(503));
    assert_eq!(read(&server, "/keys/k0")["status"], Value::Null, "reads go on");
    let problem =
        server.send("PUT", &format!("{JOB}/keys/z"), &json!({"text": "v", "reason": "r"}).to_string()).json();
    assert_eq!(problem["type"], "/problems/not-recordable", "{problem}");
    assert!(server.get("/metrics").body.contains("\nmuster_journal_refuses_changes 1\n"));
    blocked.iter().for_each(|file| fs::remove_file(file).unwrap());
    let mut tries = 0;
    while put_key(&server, "after", "v") != 204 {
        tries += 1;
        assert!(tries < 100, "{}", server.get("/metrics").body);
        thread::sleep(Duration::from_millis(100));
    }
    server.signal(Signal::KILL);
    server.end();
    let server = serve(&path, "127.0.0.1:0", &[]);
    assert_eq!(read(&server, "/keys/after")["text"], "v");
}

#[test]
fn the_state_of_an_earlier_time_can_be_shown() {
    let folder = TempFolder::new("journal-show");
    let path = folder.path("journal");
    let server = serve(&path, "127.0.0.1:0", &[]);
    let opened = read(&server, "/runs/1")["opened_at"].as_u64().expect("a time");
    thread::sleep(Duration::from_secs(2));
    let settings = json!({"settings": {"heartbeat_timeout": "77s"}, "reason": "a test"}).to_string();
    assert_eq!(server.send("PATCH", JOB, &settings).status, 200);
    server.signal(Signal::TERM);
    server.end();
    let timeout = |at: &[&str]| {
        let shown = run(&mut muster(["journal", "show", &path, "--job", "default"].iter().chain(at)));
        let views: Value = serde_json::from_str(&shown.out).unwrap_or_else(|_| panic!("{shown:?}"));
        views[0]["settings"]["heartbeat_timeout"].clone()
    };
    let after_opening = muster::coordination::Timestamp(opened + 1_000_000).to_text_with_milliseconds();
    assert_eq!(timeout(&[]), "1m 17s");
    assert_eq!(timeout(&["--at", &after_opening]), "1m 40s");
    let too_early =
        run(&mut muster(["journal", "show", &path, "--job", "default", "--at", "2001-01-01T00:00:00Z"]));
    assert!(too_early.err.contains("there was no job default"), "{too_early:?}");
}
