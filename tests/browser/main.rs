//! Tests of the pages in a real browser, against a real server with simulated tasks.
//!
//! The tests need node, playwright-core and Chromium, which `tests/run` installs. If one of these is missing, the
//! tests fail with a message that names it.

#[path = "../support/mod.rs"]
mod support;

mod cluster;
mod measures;
mod questions;
mod script;

use std::path::{Path, PathBuf};
use std::time::Duration;

use cluster::TaskCluster;
use script::Script;
use support::MusterServer;
use support::harness::{self, Process, Signal, TempFolder, run};

/// Sets up a job during training in which one task does not arrive at a barrier.
async fn set_up_job_stuck_at_barrier(muster: &MusterServer) -> (TaskCluster, Vec<support::Pending>) {
    let party = TaskCluster::register_tasks(muster.grpc, "train", 0..8, 1).await;
    party.start_heartbeats(cluster::BEAT);
    party.start_transfer_reports();
    party.publish_and_pass_step_barriers(20, 6).await;
    let waiting =
        (0..8).filter(|task| *task != 6).map(|task| party.member(task).start_barrier_call("train/step", 20));
    let waiting = waiting.collect();
    (party, waiting)
}

fn start_server_with_three_jobs() -> MusterServer {
    let jobs = ["--job", "train=8", "--job", "eval=4", "--job", "idle=2", "--recoverable"];
    let further = ["--heartbeat-timeout", "10s", "--redact-keys", "secrets/*"];
    MusterServer::patient(&[&jobs[..], &further[..]].concat())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_page_is_whole_quiet_and_accessible_and_changes_show_at_once() {
    let muster = start_server_with_three_jobs();
    let _coming = TaskCluster::start_pending_registrations(muster.grpc, "eval", 0..3);
    let (mut party, _waiting) = set_up_job_stuck_at_barrier(&muster).await;
    let mut script = Script::start("walk.mjs", muster.http);
    while let Some(wanted) = script.next_requested_action().await {
        match wanted.as_str() {
            "fail" => {
                TaskCluster::register_tasks(muster.grpc, "fails", 0..3, 1).await.close_connection_of_task(1)
            }
            "lose 6" => party.close_connection_of_task(6),
            "restart 6" => party.register_lost_task_again(6).await,
            other => panic!("the script wants {other:?}"),
        }
        script.report_action_done().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_keyboard_reaches_and_excludes_the_blocking_task() {
    let muster = start_server_with_three_jobs();
    let (_party, waiting) = set_up_job_stuck_at_barrier(&muster).await;
    let mut script = Script::start("keyboard.mjs", muster.http);
    while let Some(wanted) = script.next_requested_action().await {
        assert_eq!(wanted, "passed", "that is all that it wants to know");
        expect_barrier_passes(&waiting).await;
        script.report_action_done().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_keyboard_leads_through_every_picture_and_opens_its_rows() {
    let muster = MusterServer::patient(&["--job", "train=40", "--recoverable"]);
    // Two tasks are on each host. All of them report, so the pairs are a picture and not a table.
    let mut party = TaskCluster::register_tasks(muster.grpc, "train", 0..40, 1).await;
    party.start_heartbeats(cluster::BEAT);
    party.start_transfer_reports();
    party.publish_and_pass_step_barriers(6, 6).await;
    party.close_connection_of_task(5);
    let mut script = Script::start("picture-links.mjs", muster.http);
    while let Some(wanted) = script.next_requested_action().await {
        let lost = wanted.strip_prefix("lose ").and_then(|task| task.parse().ok());
        party.close_connection_of_task(lost.unwrap_or_else(|| panic!("the script wants {wanted:?}")));
        script.report_action_done().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_slash_key_leads_to_a_search_that_finds_jobs_tasks_and_hosts() {
    let muster = start_server_with_three_jobs();
    let _coming = TaskCluster::start_pending_registrations(muster.grpc, "eval", 0..4);
    let _party = TaskCluster::register_tasks(muster.grpc, "train", 0..8, 1).await;
    let mut script = Script::start("search.mjs", muster.http);
    assert_eq!(script.next_requested_action().await, None, "it asks for nothing");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn times_and_charts_are_shown_as_the_reader_wants_them() {
    let muster = start_server_with_three_jobs();
    let (_party, _waiting) = set_up_job_stuck_at_barrier(&muster).await;
    let mut script = Script::start("times.mjs", muster.http);
    assert_eq!(script.next_requested_action().await, None, "it asks for nothing");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_overview_leads_a_new_reader_to_the_first_task_and_shows_the_last_minutes() {
    let muster = MusterServer::patient(&["--job", "train=8", "--recoverable"]);
    let mut script = Script::start("front.mjs", muster.http);
    let mut job = None;
    while let Some(wanted) = script.next_requested_action().await {
        assert_eq!(wanted, "register", "that is all that it wants");
        job = Some(set_up_job_stuck_at_barrier(&muster).await);
        script.report_action_done().await;
    }
    assert!(job.is_some());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_failure_of_a_run_stands_first_and_a_finding_vanishes_when_it_does_not_hold() {
    let muster = MusterServer::patient(&["--job", "stop=3", "--job", "idle=2"]);
    let mut party = TaskCluster::register_tasks(muster.grpc, "stop", 0..3, 1).await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    let _waiting: Vec<_> =
        (0..2).map(|task| party.member(task).start_barrier_call("train/step", 0)).collect();
    let mut script = Script::start("first.mjs", muster.http);
    while let Some(wanted) = script.next_requested_action().await {
        assert_eq!(wanted, "kill", "that is all that it wants");
        party.close_connection_of_task(2);
        script.report_action_done().await;
    }
}

/// Creates a token file with an operator's token.
fn create_operator_token_file(folder: &TempFolder, name: &str) -> PathBuf {
    let tokens = folder.path("tokens.toml");
    let mut command =
        harness::muster(["token", "new", "--name", name, "--role", "operator", "--file", &tokens]);
    let made = run(&mut command);
    assert_eq!(made.code, Some(0), "{made:?}");
    let token = folder.0.join(format!("{name}.token"));
    std::fs::write(&token, made.out).expect("it can be written");
    token
}

/// Three jobs in which all but the last task wait at a barrier. Three operators each exclude that task: on
/// the page with the keyboard alone, with curl, and on the command line.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_task_is_excluded_by_page_by_curl_and_by_command_and_the_audit_has_all_three() {
    let folder = TempFolder::new("three-ways");
    let [alice, bob, carol] = ["alice", "bob", "carol"].map(|name| create_operator_token_file(&folder, name));
    let token = |of: &Path| std::fs::read_to_string(of).expect("it is there").trim().to_owned();
    let tokens = folder.path("tokens.toml");
    let jobs = ["--job", "train=8", "--job", "eval=4", "--job", "tune=4", "--recoverable"];
    let further = ["--heartbeat-timeout", "10s", "--tokens-file", &tokens];
    let muster = MusterServer::patient(&[&jobs[..], &further[..]].concat());
    let url = format!("http://{}", muster.http);

    let (_party, waiting) = set_up_job_stuck_at_barrier(&muster).await;
    let variables = [("MUSTER_TOKEN", &*token(&alice))];
    let mut script = Script::start_with_environment("keyboard.mjs", muster.http, &variables);
    while let Some(wanted) = script.next_requested_action().await {
        assert_eq!(wanted, "passed", "that is all that it wants to know");
        expect_barrier_passes(&waiting).await;
        script.report_action_done().await;
    }

    let (_eval, waiting) = set_up_job_without_last_arrival(&muster, "eval").await;
    let asked = std::process::Command::new("curl")
        .args(["--silent", "--show-error", "--fail-with-body", "--header", "content-type: application/json"])
        .args(["--header", &format!("authorization: Bearer {}", token(&bob))])
        .args(["--data", r#"{"task": 3, "reason": "its disk is full"}"#])
        .arg(format!("{url}/api/v1/jobs/eval/exclusions"))
        .output()
        .expect("curl is there");
    assert!(asked.status.success(), "{asked:?}");
    expect_barrier_passes(&waiting).await;

    let (_tune, waiting) = set_up_job_without_last_arrival(&muster, "tune").await;
    let mut command =
        harness::muster(["exclude", "3", "--job", "tune", "--reason", "flaky NIC", "--server", &url]);
    let done = run(command.arg("--token-file").arg(&carol));
    assert_eq!(done.code, Some(0), "{done:?}");
    expect_barrier_passes(&waiting).await;

    let mut command = harness::muster(["audit", "--json", "--server", &url, "--token-file"]);
    let audit = run(command.arg(&carol));
    let lines: Vec<serde_json::Value> =
        serde_json::from_str(&audit.out).unwrap_or_else(|error| panic!("{error}: {audit:?}"));
    let text = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
    let excluded = lines.iter().filter(|line| line["act"] == "exclude").map(|line| {
        assert_eq!((&line["outcome"], &line["role"]), (&"done".into(), &"operator".into()), "{line}");
        [&line["actor"]["who"], &line["actor"]["means"], &line["job"], &line["subject"], &line["reason"]]
            .map(text)
    });
    let expected = [
        ["alice", "page", "train", "task 6", "does not come; stack is in the ticket"],
        ["bob", "api", "eval", "task 3", "its disk is full"],
        ["carol", "cli", "tune", "task 3", "flaky NIC"],
    ];
    assert_eq!(excluded.collect::<Vec<_>>(), expected.map(|line| line.map(str::to_owned)), "{audit:?}");
}

/// Sets up a job of four tasks in which the last one does not arrive at a barrier.
async fn set_up_job_without_last_arrival(
    muster: &MusterServer,
    job: &str,
) -> (TaskCluster, Vec<support::Pending>) {
    let party = TaskCluster::register_tasks(muster.grpc, job, 0..4, 1).await;
    party.start_heartbeats(cluster::BEAT);
    let waiting = (0..3).map(|task| party.member(task).start_barrier_call("step", 0)).collect();
    (party, waiting)
}

/// Checks that the waiting tasks pass their barrier.
async fn expect_barrier_passes(waiting: &[support::Pending]) {
    for answer in waiting {
        let answer = answer.within(Duration::from_secs(20)).await.expect("the barrier passes without it");
        assert!(answer.is_ok(), "{answer:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_tasks_are_seen_at_once() {
    let muster = MusterServer::patient(&["--job", "train=10000", "--recoverable"]);
    let mut party = TaskCluster::register_tasks(muster.grpc, "train", 0..10_000, 100).await;
    party.publish_devices().await;
    let waiting: Vec<_> = party
        .remaining_tasks()
        .take(9_800)
        .map(|member| member.start_barrier_call("train/step", 0))
        .collect();
    // The limit holds for an optimized build; an unoptimized one takes longer for the same page.
    let limit_ms = if cfg!(debug_assertions) { "2500" } else { "1000" };
    let mut script = Script::start_with_environment("many.mjs", muster.http, &[("MUSTER_LOAD_MS", limit_ms)]);
    while let Some(wanted) = script.next_requested_action().await {
        match wanted.as_str() {
            "rest" => println!("the server has used {:.2} s of CPU", muster.cpu().as_secs_f64()),
            "lose" => (9_900..10_000).for_each(|task| party.close_connection_of_task(task)),
            "report" => party.send_one_report_per_task(20).await,
            other => panic!("the script wants {other:?}"),
        }
        script.report_action_done().await;
    }
    drop(waiting);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_demo_is_seen_as_it_happens() {
    let mut demo = Process::start(&mut harness::muster(["demo", "--pause", "300ms"]));
    let line = demo.out_line("look at");
    let address = line.split("http://").nth(1).and_then(|rest| rest.split('/').next());
    let address = address.and_then(|text| text.parse().ok()).expect("it says where to look");
    let mut script = Script::start("demo.mjs", address);
    assert_eq!(script.next_requested_action().await, None, "it asks for nothing");
    demo.signal(Signal::INT);
    assert_eq!(demo.end().code, Some(130));
}

/// `charts.js` labels the axis of a chart; the server writes all other amounts.
#[test]
fn the_axis_of_a_chart_shows_amounts_as_the_server_does() {
    let script = include_str!("../../web/static/charts.js");
    let from = script.find("const rate = (bytes)").expect("it formats amounts");
    let length = script[from..].find("\n};\n").expect("the function ends") + 3;
    let values =
        [0.5, 1.0, 1.04, 1.05, 1.25, 1.75, 9.95, 99.95, 999.5, 1000.0, 1023.0, 1023.9, 1023.94, 1023.95];
    let of_units = (0..5).flat_map(|unit| values.map(|value| (value * 1024_f64.powi(unit)) as u64));
    let near = of_units.flat_map(|count| [count.saturating_sub(1), count, count + 1]);
    let counts: Vec<u64> = near.chain([9_995, 1280, 3 << 28, 5 << 28]).collect();
    let program =
        format!("{}console.log(JSON.stringify({counts:?}.map(rate)))", &script[from..from + length]);
    let done = std::process::Command::new("node").args(["--eval", &program]).output().expect("node is there");
    assert!(done.status.success(), "{done:?}");
    let shown: Vec<String> = serde_json::from_slice(&done.stdout).expect("it prints a list");
    for (count, shown) in counts.iter().zip(&shown) {
        assert_eq!(*shown, format!("{}/s", muster::text::format_bytes(*count)), "{count} bytes a second");
    }
    assert_eq!(shown.len(), counts.len());
}

/// Not a test: takes screenshots of the pages, for changes to their design.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "takes pictures: cargo test --test browser -- --ignored pictures"]
async fn pictures() {
    let muster = start_server_with_three_jobs();
    let _coming = TaskCluster::start_pending_registrations(muster.grpc, "eval", 0..3);
    let (mut party, _waiting) = set_up_job_stuck_at_barrier(&muster).await;
    party.close_connection_of_task(5);
    tokio::time::sleep(Duration::from_secs(35)).await;
    let mut script = Script::start("pictures.mjs", muster.http);
    while let Some(wanted) = script.next_requested_action().await {
        assert_eq!(wanted, "fail", "that is all that it wants");
        TaskCluster::register_tasks(muster.grpc, "fails", 0..3, 1).await.close_connection_of_task(1);
        script.report_action_done().await;
    }
}

/// Not a test: takes screenshots of a job of ten thousand tasks with three in trouble.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "takes pictures: cargo test --test browser -- --ignored pictures"]
async fn pictures_of_many() {
    let muster = MusterServer::patient(&["--job", "train=10000", "--recoverable"]);
    let mut party = TaskCluster::register_tasks(muster.grpc, "train", 0..10_000, 2).await;
    // These two share a connection, so both end with it.
    (6..8).for_each(|task| party.close_connection_of_task(task));
    let well = party.remaining_tasks().filter(|member| member.number() != 4711);
    let _waiting: Vec<_> = well.map(|member| member.start_barrier_call("train/step", 0)).collect();
    tokio::time::sleep(Duration::from_secs(35)).await;
    let mut script = Script::start("pictures.mjs", muster.http);
    assert_eq!(script.next_requested_action().await, None, "it asks for nothing");
}
