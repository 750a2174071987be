//! Tests of exclusions: an operator excludes a task of a running job, and readmits it.

use serde_json::{Value, json};

use muster::coordination::{JobView, RunState};

use super::fixture::JaxFixture;
use super::harness::TestInstant;
use super::http;
use super::process::Process;
use super::server::Server;
use super::{RunSet, Test};

pub const TESTS: &[Test] = &[
    (RunSet::All, "an_excluded_task_is_out_at_once_and_cannot_come_back_until_it_is_let_in", undo),
    (RunSet::Both, "an_exclusion_expires_and_the_live_set_is_whole_again", expiry),
    (RunSet::Both, "a_run_whose_tasks_share_their_fate_is_ended_only_on_request", fate),
];

/// The operator's reason, which the excluded process must show.
const REASON: &str = "its network card is flaky";

/// Settings with which a client fails an excluded process within seconds instead of the default 100 s.
const QUICK: [&str; 2] = ["--heartbeat-timeout", "6"];

fn exclude(server: &Server, body: &Value) -> (u16, Value) {
    http::ask(server.about.http, "POST", "/api/v1/jobs/default/exclusions", body)
}

fn start(scene: &JaxFixture, task: usize, program: &[&str]) -> Process {
    scene.start(task, 3, &[&["worker.py"], program, &QUICK, &["--recoverable"]].concat())
}

fn live(view: &JobView) -> usize {
    view.run.live
}

fn undo(scene: &JaxFixture) {
    let server = scene.serve(&["--tasks", "3", "--recoverable"]);
    let rounds = ["rounds", "--step-ms", "50", "--checkpoint-ms", "50"];
    let tasks: Vec<Process> = (0..3).map(|task| start(scene, task, &rounds)).collect();
    let in_round = |at_least: u64| {
        move |line: &super::line::LogRecord| {
            line.text("barrier") == "end" && line.number::<u64>("round") >= at_least
        }
    };
    tasks.iter().for_each(|task| _ = task.line("pass", in_round(2)));

    let asked = TestInstant::now();
    let (status, made) = exclude(server, &json!({ "task": 2, "reason": REASON }));
    assert_eq!((status, &made["id"], &made["tasks"]), (201, &1.into(), &json!([2])), "{made}");
    assert_eq!(live(&server.view("default")), 2, "it is out as soon as the request is answered");

    // Every call of it is answered with the reason, and its process ends.
    let told = tasks[2].text(REASON);
    assert!(told.contains("PERMISSION_DENIED"), "{told}");
    let end = tasks[2].fail();
    scene.figure("from the request to the end of the excluded process", end.at - asked);

    // The others continue.
    let last = |task: &Process| task.records("pass").last().map_or(0, |line| line.number("round"));
    let round: u64 = last(&tasks[0]) + 5;
    tasks[..2].iter().for_each(|task| _ = task.line("pass", in_round(round)));
    assert!(tasks[..2].iter().all(|task| task.records("fail").is_empty()), "nobody else has had an error");

    // It cannot return, and does not retry for ever.
    let began = TestInstant::now();
    let refused = start(scene, 2, &rounds);
    let end = refused.fail();
    assert!(refused.records("registered").is_empty());
    let said = refused.unstructured();
    assert!(
        said.contains("PERMISSION_DENIED") && said.contains("is excluded") && said.contains(REASON),
        "{said}"
    );
    scene.figure("from the start of the refused process to its end", end.at - began);
    let view = server.view("default");
    assert!(view.exclusions[0].refused >= 1, "{view:?}");

    // Until an operator readmits it.
    let path = "/api/v1/jobs/default/exclusions/1?reason=replaced";
    let (status, over) = http::ask(server.about.http, "DELETE", path, &json!({}));
    assert_eq!((status, &over["ended"]["how"]), (200, &"lifted".into()), "{over}");
    let back = start(scene, 2, &rounds);
    back.line("registered", |_| true);
    let round: u64 = last(&tasks[0]) + 5;
    back.line("pass", in_round(round));
    tasks[..2].iter().for_each(|task| _ = task.line("pass", in_round(round)));
    assert_eq!(live(&server.view("default")), 3);
}

fn expiry(scene: &JaxFixture) {
    let server = scene.serve(&["--tasks", "3", "--recoverable"]);
    let program = ["live", "--poll-ms", "50"];
    let tasks: Vec<Process> = (0..3).map(|task| start(scene, task, &program)).collect();
    let whole = |line: &super::line::LogRecord| line.text("members") == "0,1,2";
    tasks.iter().for_each(|task| _ = task.line("live", whole));

    let asked = TestInstant::now();
    let body = json!({ "task": 1, "reason": REASON, "expires_in_seconds": 2 });
    assert_eq!(exclude(server, &body).0, 201);
    for task in [&tasks[0], &tasks[2]] {
        let seen = task.line("live", |line| line.text("members") == "0,2");
        scene.figure("from the request to the others' live set without it", seen.at - asked);
    }
    let told = tasks[1].line("error", |_| true);
    assert!(told.text("message").contains(REASON), "{told:?}");
    tasks[1].fail();

    server.until("the exclusion expires", |view| view.exclusions.is_empty().then_some(()));
    let marks = [tasks[0].mark(), tasks[2].mark()];
    let back = start(scene, 1, &program);
    back.line("live", whole);
    tasks[0].line_after(marks[0], "live", whole);
    tasks[2].line_after(marks[1], "live", whole);
    let over = http::get::<Value>(server.about.http, "/api/v1/jobs/default/exclusions?state=over");
    assert_eq!(over["exclusions"][0]["ended"]["how"], "expired", "{over}");
}

fn fate(scene: &JaxFixture) {
    let server = scene.serve(&["--tasks", "3"]);
    let tasks = scene.start_all(3, &["worker.py", "steps", "--step-ms", "50"]);
    let step = |at_least: u64| move |line: &super::line::LogRecord| line.number::<u64>("n") >= at_least;
    tasks.iter().for_each(|task| _ = task.line("step", step(2)));

    let (status, problem) = exclude(server, &json!({ "task": 1, "reason": REASON }));
    assert_eq!((status, &problem["type"]), (409, &"/problems/ends-run".into()), "{problem}");
    let n: u64 = tasks[0].records("step").last().expect("a step").number("n");
    tasks.iter().for_each(|task| _ = task.line("step", step(n + 3)));

    let (status, _) = exclude(server, &json!({ "task": 1, "reason": REASON, "end_run": true }));
    assert_eq!(status, 201);
    tasks.iter().for_each(|task| _ = task.fail());
    for task in &tasks {
        assert!(task.unstructured().contains(REASON), "everybody is told: {}", task.unstructured());
    }
    let view = server.until_run(1, RunState::Failed);
    let cause = view.run.first_cause.expect("a first cause");
    assert_eq!(cause.task.map(|task| task.0), Some(1));
    assert!(cause.error.contains("excluded") && cause.error.contains(REASON), "{}", cause.error);
}
