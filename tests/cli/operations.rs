//! Tests of operations on jobs by REST and by the command line.

use serde_json::{Value, json};

use crate::harness::{CommandOutput, HttpResponse, MusterServer, TempFolder, muster, run, wait_until};
use crate::status::register_task;

fn run_subcommand(server: &MusterServer, arguments: &[&str]) -> CommandOutput {
    run(muster(arguments).args(["--server", &server.url()]))
}

/// Returns the output of a subcommand that must succeed.
fn successful_output(server: &MusterServer, arguments: &[&str]) -> String {
    let ended = run_subcommand(server, arguments);
    assert_eq!((ended.code, ended.err.as_str()), (Some(0), ""), "{arguments:?}: {ended:?}");
    ended.out
}

fn register_until_running(server: &MusterServer, tasks: i32) -> tokio::runtime::Runtime {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    (0..tasks).for_each(|task| register_task(server, &runtime, task));
    wait_until("the run is running", || server.get("/api/v1/jobs").body.contains("\"running\""));
    runtime
}

fn problem_detail(answer: &HttpResponse, status: u16, kind: &str) -> String {
    assert_eq!(answer.status, status, "{answer:?}");
    assert!(answer.head.contains("content-type: application/problem+json"), "{answer:?}");
    let problem = answer.json();
    assert_eq!(problem["type"], format!("/problems/{kind}"), "{problem}");
    problem["detail"].as_str().expect("a detail").to_owned()
}

const EXCLUSIONS: &str = "/api/v1/jobs/default/exclusions";

#[test]
fn an_exclusion_is_made_shown_and_lifted() {
    let server = MusterServer::start(&["--tasks", "3", "--recoverable"]);
    let _tasks = register_until_running(&server, 3);
    let made =
        server.send("POST", EXCLUSIONS, r#"{"task": 2, "reason": "flaky NIC", "expires_in_seconds": 600}"#);
    assert_eq!(made.status, 201, "{made:?}");
    assert!(made.head.contains("location: /api/v1/jobs/default/exclusions/1"), "{made:?}");
    let exclusion = made.json();
    assert_eq!(
        (&exclusion["id"], &exclusion["task"], &exclusion["tasks"]),
        (&1.into(), &2.into(), &json!([2]))
    );
    assert_eq!(
        (&exclusion["actor"]["who"], &exclusion["actor"]["means"]),
        (&"anonymous".into(), &"api".into())
    );
    let until = exclusion["expires_at"].as_u64().zip(exclusion["since"].as_u64());
    assert_eq!(until.map(|(until, since)| until - since), Some(600_000_000));
    assert_eq!(server.get(&format!("{EXCLUSIONS}/1")).json(), exclusion);

    let live = server.get("/api/v1/jobs/default/live").json();
    let tasks: Vec<&Value> = live["tasks"].as_array().expect("a list").iter().map(|t| &t["task"]).collect();
    assert_eq!(tasks, [0, 1]);
    let task = server.get("/api/v1/jobs/default/tasks/2").json();
    assert_eq!(
        (&task["excluded"]["exclusion"], &task["excluded"]["reason"]),
        (&1.into(), &"flaky NIC".into())
    );
    let out = server.get("/api/v1/jobs/default/tasks?excluded=true").json();
    assert_eq!(out["tasks"].as_array().map(Vec::len), Some(1));
    assert_eq!(server.get("/api/v1/jobs").json()["jobs"][0]["exclusions"], 1);

    assert_eq!(server.send("DELETE", &format!("{EXCLUSIONS}/1?reason=replaced"), "").status, 200);
    assert_eq!(server.get(EXCLUSIONS).json()["exclusions"], json!([]));
    let over = server.get(&format!("{EXCLUSIONS}?state=over")).json();
    assert_eq!(over["exclusions"][0]["ended"]["reason"], "replaced");
    problem_detail(&server.send("DELETE", &format!("{EXCLUSIONS}/1?reason=again"), ""), 409, "already-over");
    problem_detail(&server.send("DELETE", &format!("{EXCLUSIONS}/7?reason=x"), ""), 404, "no-such-exclusion");
}

#[test]
fn invalid_requests_are_explained() {
    let server = MusterServer::start(&["--tasks", "2"]);
    let _tasks = register_until_running(&server, 2);
    let post = |body: &str| server.send("POST", EXCLUSIONS, body);
    for (body, status, kind, part) in [
        (r#"{"task": 1, "reason": "r", "until": 3}"#, 422, "bad-body", "unknown field `until`"),
        (r#"{"task": 1}"#, 422, "bad-body", "missing field `reason`"),
        (r#"{"task": 1, "reason": "  "}"#, 422, "bad-body", "a reason is required"),
        (r#"{"task": 1, "reason": "a\u001b[2Jb"}"#, 422, "bad-body", "control characters"),
        (r#"{"task": 1, "host": "10.0.0.1", "reason": "r"}"#, 422, "unusable", "either"),
        (r#"{"host": "host-7:1234", "reason": "r"}"#, 422, "unusable", "is no IP address"),
        (r#"{"task": 1, "reason": "r", "expires_in_seconds": 0}"#, 422, "unusable", "at least 1"),
        (r#"{"task": 9, "reason": "r"}"#, 422, "no-such-task", "the tasks 0 to 1"),
        (r#"{"task": 1, "reason": "r"}"#, 409, "ends-run", "its tasks share their fate"),
        ("no json", 400, "bad-body", "expected"),
    ] {
        let detail = problem_detail(&post(body), status, kind);
        assert!(detail.contains(part), "{body}: {detail}");
    }
    problem_detail(&post(&format!(r#"{{"task": 1, "reason": "{}"}}"#, "x".repeat(501))), 422, "bad-body");
    problem_detail(&post(&"x".repeat(300 << 10)), 413, "bad-body");
    problem_detail(&server.send("DELETE", &format!("{EXCLUSIONS}/1"), ""), 400, "bad-query");
    problem_detail(&server.send("DELETE", &format!("{EXCLUSIONS}/x?reason=r"), ""), 400, "bad-path");
    problem_detail(&server.get("/api/v1/jobs/default/tasks?standing=x"), 400, "bad-query");
    problem_detail(&server.get("/api/v1/jobs/nobody/live"), 404, "no-such-job");
    let preview = post(r#"{"task": 1, "reason": "r", "dry_run": true}"#);
    assert_eq!((preview.status, &preview.json()["ends_run"]), (200, &"failed".into()));
    assert_eq!(server.get("/api/v1/jobs/default").json()["run"]["live"], 2, "nothing has happened");
    let ended = post(r#"{"task": 1, "reason": "it burns", "end_run": true}"#);
    assert_eq!(ended.status, 201);
    let run = &server.get("/api/v1/jobs/default").json()["run"];
    assert_eq!((&run["state"], &run["first_cause"]["task"]), (&"failed".into(), &1.into()));
}

#[test]
fn the_command_line_excludes_and_readmits() {
    let server = MusterServer::start(&["--tasks", "3", "--recoverable"]);
    let _tasks = register_until_running(&server, 3);
    assert_eq!(successful_output(&server, &["exclude"]), "Nobody is excluded.\n");
    let text = successful_output(&server, &["exclude", "2", "--reason", "flaky NIC", "--dry-run"]);
    assert!(text.contains("take out task 2") && text.contains("leave 2 task(s) live"), "{text}");
    let text = successful_output(&server, &["exclude", "2", "--reason", "flaky NIC", "--for", "10m"]);
    assert!(text.contains("Exclusion 1: task 2 takes no part until "), "{text}");
    assert!(text.contains("muster readmit 1 --reason"), "{text}");
    let text = successful_output(&server, &["status"]);
    assert!(text.contains("EXCLUDED  task 2 since ") && text.contains("flaky NIC (number 1)"), "{text}");
    assert!(text.contains("anonymous (by the command line from 127.0.0.1)"), "{text}");
    let all = successful_output(&server, &["exclude", "--json"]);
    let all: Value = serde_json::from_str(&all).expect("it is JSON");
    assert_eq!(all["exclusions"][0]["id"], 1);

    let again = run_subcommand(&server, &["exclude", "2", "--reason", "x"]);
    assert_eq!(again.code, Some(1));
    assert!(
        again.err.contains("Already excluded") && again.err.contains("muster readmit NUMBER"),
        "{again:?}"
    );
    let last = run_subcommand(&server, &["exclude", "127.0.0.1", "--reason", "x"]);
    assert!(last.err.contains("nobody would be left") && last.err.contains("--end-run"), "{last:?}");
    let silent = run_subcommand(&server, &["exclude", "1"]);
    assert!(silent.err.contains("--reason"), "{silent:?}");

    let text = successful_output(&server, &["readmit", "--task", "2", "--reason", "replaced"]);
    assert!(text.contains("Exclusion 1 is lifted: task 2 may register again"), "{text}");
    let gone = run_subcommand(&server, &["readmit", "1", "--reason", "x"]);
    assert!(gone.err.contains("has already ended") && gone.err.contains("muster exclude"), "{gone:?}");

    let text = successful_output(&server, &["audit"]);
    for part in
        ["exclude task 2 in job default", "(flaky NIC)  done: exclusion 1", "REFUSED", "readmit exclusion 1"]
    {
        assert!(text.contains(part), "{part}: {text}");
    }
    let text = successful_output(&server, &["audit", "--refused"]);
    assert!(text.lines().all(|line| line.contains("REFUSED")) && text.lines().count() == 3, "{text}");
    let text = successful_output(&server, &["events"]);
    assert!(text.contains("  excluded  ") && text.contains("  readmitted  "), "{text}");
    let lines = successful_output(&server, &["events", "--json"]);
    let kinds: Vec<Value> =
        lines.lines().map(|line| serde_json::from_str(line).expect("JSON a line")).collect();
    assert!(kinds.iter().any(|event| event["kind"] == "excluded" && event["target"]["task"] == 2));
}

#[test]
fn a_run_is_drained_once() {
    let server = MusterServer::start(&["--tasks", "2"]);
    let early = run_subcommand(&server, &["drain", "--reason", "x"]);
    assert!(
        early.err.contains("still waits for its tasks") && early.err.contains("muster status"),
        "{early:?}"
    );
    let _tasks = register_until_running(&server, 2);
    let text = successful_output(&server, &["drain", "--reason", "kernel update"]);
    assert!(text.contains("Run 1 is asked to save: 0 task(s) have acknowledged, 2 have not"), "{text}");
    let view = server.get("/api/v1/jobs/default/drain").json();
    assert_eq!(view["preemption"]["requested"]["reason"], "kernel update");
    assert_eq!(view["waiting_for"], json!([0, 1]));
    let key = server.get("/api/v1/jobs/default/keys/RECEIVED_PREEMPTION_NOTICE").json();
    assert!(key["text"].as_str().is_some_and(|at| at.ends_with("+00:00")), "{key}");
    let again = server.send("POST", "/api/v1/jobs/default/drain", r#"{"reason": "x"}"#);
    problem_detail(&again, 409, "drain-under-way");
    let late = run_subcommand(&server, &["drain", "--reason", "x", "--wait=1ms"]);
    assert!(late.err.contains("under way"), "{late:?}");
}

#[test]
fn jobs_are_made_changed_and_deleted() {
    let server = MusterServer::start(&["--tasks", "2"]);
    let text = successful_output(
        &server,
        &["job", "create", "eval", "--tasks", "4", "--recoverable", "--reason", "nightly"],
    );
    assert!(text.contains("Made: eval  run 1 forming, 0 of 4 task(s) connected, recoverable"), "{text}");
    let list = successful_output(&server, &["job", "list"]);
    assert!(list.starts_with("NAME  ") && list.lines().count() == 3, "{list}");
    assert_eq!(server.get("/api/v1/server").json()["grpc"][0]["jobs"], json!(["default", "eval"]));
    let twice = run_subcommand(&server, &["job", "create", "eval", "--tasks", "4", "--reason", "x"]);
    assert!(twice.err.contains("there is a job named eval already"), "{twice:?}");

    let set = ["job", "set", "eval", "--heartbeat-timeout", "20s", "--bound", "keys=10", "--reason", "x"];
    let text = successful_output(&server, &set);
    assert!(text.contains("heartbeat_timeout = 20s") && text.contains("bound keys = 10"), "{text}");
    assert!(text.starts_with("name = eval\n"), "{text}");
    let text = successful_output(&server, &["job", "show", "eval"]);
    assert!(text.starts_with("name = eval\n"), "{text}");
    assert!(text.contains("heartbeat_timeout = 20s") && text.contains("disconnect_grace = 500ms"), "{text}");
    let wrong =
        run_subcommand(&server, &["job", "set", "eval", "--heartbeat-timeout", "20", "--reason", "x"]);
    assert!(wrong.err.contains("heartbeat_timeout: it has no unit"), "{wrong:?}");
    let wrong = run_subcommand(&server, &["job", "set", "eval", "--bound", "kees=1", "--reason", "x"]);
    assert!(wrong.err.contains("unknown field `kees`"), "{wrong:?}");

    let _tasks = register_until_running(&server, 2);
    let reshaped = run_subcommand(&server, &["job", "set", "default", "--tasks", "3", "--reason", "x"]);
    assert!(reshaped.err.contains("cannot change while run 1 is in progress"), "{reshaped:?}");
    let refused = run_subcommand(&server, &["job", "delete", "default", "--reason", "x"]);
    assert!(refused.err.contains("2 task(s)") && refused.err.contains("--force"), "{refused:?}");
    successful_output(&server, &["job", "delete", "default", "--force", "--reason", "x"]);
    problem_detail(&server.get("/api/v1/jobs/default"), 404, "no-such-job");
    successful_output(&server, &["job", "delete", "eval", "--reason", "x"]);
    assert!(successful_output(&server, &["job", "list"]).starts_with("There is no job."));
}

#[test]
fn jobs_are_bounded() {
    let server = MusterServer::start(&["--tasks", "2", "--jobs-max", "2"]);
    successful_output(&server, &["job", "create", "second", "--tasks", "1", "--reason", "x"]);
    let third = run_subcommand(&server, &["job", "create", "third", "--tasks", "1", "--reason", "x"]);
    assert!(third.err.contains("there are 2 jobs") && third.err.contains("jobs-max"), "{third:?}");
    successful_output(&server, &["job", "delete", "second", "--reason", "x"]);
    successful_output(&server, &["job", "create", "third", "--tasks", "1", "--reason", "x"]);
}

#[test]
fn the_store_is_seen_as_a_tree_and_can_be_written() {
    let server = MusterServer::start(&["--tasks", "1", "--redact-keys", "secrets/*"]);
    let keys = "/api/v1/jobs/default/keys";
    let put = |key: &str, body: &str| server.send("PUT", &format!("{keys}/{key}"), body).status;
    assert_eq!(put("a/b", r#"{"text": "hello", "reason": "r"}"#), 204);
    assert_eq!(put("a/b", r#"{"text": "other", "reason": "r"}"#), 409);
    assert_eq!(put("a/b", r#"{"text": "other", "reason": "r", "overwrite": true}"#), 204);
    assert_eq!(put("a/c", r#"{"base64": "/w==", "reason": "r"}"#), 204);
    assert_eq!(put("secrets/x", r#"{"text": "hush", "reason": "r"}"#), 204);
    let root = server.get(keys).json();
    assert_eq!(
        (&root["keys"][0]["key"], &root["keys"][0]["bytes_below"]),
        (&"a/".into(), &6.into()),
        "{root}"
    );
    let first = server.get(&format!("{keys}?recursive=true&limit=1")).json();
    assert_eq!(first["keys"][0]["key"], "a/b");
    let after = first["next"].as_str().expect("there is more");
    let rest = server.get(&format!("{keys}?recursive=true&after={after}")).json();
    assert_eq!((&rest["keys"][0]["key"], &rest["keys"][1]["key"]), (&"a/c".into(), &"secrets/x".into()));
    assert_eq!(server.get(&format!("{keys}/a/b")).json()["text"], "other");
    assert_eq!(server.get(&format!("{keys}/a/c")).json()["base64"], "/w==");
    let cut = server.get(&format!("{keys}/a/b?max_bytes=2")).json();
    assert_eq!((&cut["text"], &cut["truncated"]), (&"ot".into(), &true.into()));
    for spelling in ["secrets/x", "secrets//x", "/secrets/x/"] {
        let hidden = server.get(&format!("{keys}/{spelling}"));
        assert!(hidden.body.contains("\"redacted\":true") && !hidden.body.contains("hush"), "{hidden:?}");
    }
    assert_eq!(server.send("DELETE", &format!("{keys}/a?reason=r"), "").status, 204);
    problem_detail(&server.get(&format!("{keys}/a/b")), 404, "no-such-key");
}

#[test]
fn every_act_stands_in_the_audit_file() {
    let folder = TempFolder::new("cli-audit");
    let file = folder.path("audit.jsonl");
    {
        let server = MusterServer::start(&["--tasks", "2", "--recoverable", "--audit-file", &file]);
        successful_output(&server, &["exclude", "1", "--reason", "first"]);
        run_subcommand(&server, &["exclude", "1", "--reason", "second"]);
        let page = server.get("/api/v1/audit?limit=1").json();
        assert_eq!((&page["lines"][0]["act"], &page["next"]), (&"exclude".into(), &1.into()));
        let page = server.get("/api/v1/audit?after=1").json();
        assert_eq!(page["lines"][0]["outcome"], "refused");
    }
    // Another server continues the numbers of the file.
    let server = MusterServer::start(&["--tasks", "2", "--recoverable", "--audit-file", &file]);
    successful_output(&server, &["exclude", "0", "--reason", "third"]);
    let text = std::fs::read_to_string(&file).expect("the file is there");
    let lines: Vec<Value> =
        text.lines().map(|line| serde_json::from_str(line).expect("JSON a line")).collect();
    let reasons: Vec<&Value> = lines.iter().map(|line| &line["reason"]).collect();
    assert_eq!(reasons, ["first", "second", "third"]);
    assert_eq!(lines[0]["actor"]["means"], "cli");
    let nowhere = run(muster(["serve", "--tasks", "1", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"])
        .args(["--audit-file", "/nowhere/at/all"]));
    assert!(nowhere.code == Some(1) && nowhere.err.contains("--audit-file"), "{nowhere:?}");
}

#[test]
fn an_answer_that_was_seen_is_not_sent_again() {
    let server = MusterServer::start(&["--tasks", "2", "--recoverable"]);
    let first = server.get("/api/v1/jobs/default");
    let tag = first.head.lines().find_map(|line| line.strip_prefix("etag: ")).expect("a tag").to_owned();
    assert!(tag.starts_with("W/\""), "{tag}");
    let header = format!("if-none-match: {tag}");
    let second = server.get_with("/api/v1/jobs/default", &header);
    assert_eq!((second.status, second.body.as_str()), (304, ""));
    successful_output(&server, &["exclude", "1", "--reason", "x"]);
    assert_eq!(server.get_with("/api/v1/jobs/default", &header).status, 200);
}

#[test]
fn long_lists_come_in_pages() {
    let server = MusterServer::start(&["--tasks", "2500"]);
    let mut seen = 0;
    let mut path = "/api/v1/jobs/default/tasks".to_owned();
    loop {
        let page = server.get(&path).json();
        seen += page["tasks"].as_array().expect("a list").len();
        match page["next"].as_i64() {
            Some(next) => path = format!("/api/v1/jobs/default/tasks?after={next}"),
            None => break,
        }
    }
    assert_eq!(seen, 2500);
}

#[test]
fn the_audit_is_kept_within_its_setting_and_what_is_dropped_is_counted() {
    let server = MusterServer::start(&["--tasks", "4", "--recoverable", "--audit-lines", "2"]);
    for task in 0..3 {
        let body = format!(r#"{{"task": {task}, "reason": "r"}}"#);
        assert_eq!(server.send("POST", EXCLUSIONS, &body).status, 201);
    }
    problem_detail(&server.send("POST", EXCLUSIONS, r#"{"task": 3}"#), 422, "bad-body");
    let audit = server.get("/api/v1/audit").json();
    let of =
        |line: &Value| [&line["act"], &line["outcome"], &line["role"], &line["times"]].map(Value::to_string);
    let lines: Vec<[String; 4]> = audit["lines"].as_array().expect("lines").iter().map(of).collect();
    let line = |act: &str, outcome: &str| [act, outcome, "admin"].map(|word| format!("{word:?}"));
    let [done, refused] = [line("exclude", "done"), line("change", "refused")];
    let with_times = |[act, outcome, role]: [String; 3]| [act, outcome, role, "1".into()];
    assert_eq!(lines, [with_times(done), with_times(refused)], "{audit}");
    assert_eq!(audit["gap"], true);
    assert!(audit["lines"][1]["detail"].as_str().is_some_and(|why| why.contains("reason")), "{audit}");
    let metrics = server.get("/metrics").body;
    for line in [
        "muster_audit_lines_total{outcome=\"done\"} 3",
        "muster_audit_lines_total{outcome=\"refused\"} 1",
        "muster_audit_lines_kept 2",
        "muster_audit_lines_limit 2",
        "muster_audit_lines_dropped_total 2",
    ] {
        assert!(metrics.lines().any(|found| found == line), "no {line} in:\n{metrics}");
    }
}

#[test]
fn a_job_that_is_made_again_has_its_own_listener_again() {
    let mut server = MusterServer::start(&["--tasks", "1", "--job", "eval=1@127.0.0.1:0"]);
    let own = server.get("/api/v1/server").json()["grpc"][1]["address"].clone();
    server.grpc = own.as_str().and_then(|own| own.parse().ok()).expect("an address");
    successful_output(&server, &["job", "delete", "eval", "--reason", "x"]);
    successful_output(&server, &["job", "create", "eval", "--tasks", "1", "--reason", "again"]);
    assert_eq!(server.get("/api/v1/server").json()["grpc"][1], json!({"address": own, "jobs": ["eval"]}));
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    register_task(&server, &runtime, 0);
    wait_until("the job is reached", || server.get("/api/v1/jobs/eval").json()["run"]["state"] == "running");
    let events = server.get("/api/v1/jobs/eval/events").json();
    let declared = &events["events"][0];
    assert_eq!((&declared["kind"], &declared["actor"]["means"]), (&"job-declared".into(), &"cli".into()));
    let configured = server.get("/api/v1/jobs/default/events").json();
    assert_eq!(configured["events"][0]["actor"], Value::Null, "{configured}");
}
