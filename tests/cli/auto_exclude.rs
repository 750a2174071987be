//! Tests of automatic exclusions after findings, in jobs whose settings ask for them.

use serde_json::{Value, json};

use crate::harness::{MusterServer, wait_until};
use crate::status::{register_task, register_task_as};

/// Sets up a job of five tasks, one of which has restarted three times.
fn storm(arguments: &[&str]) -> (MusterServer, tokio::runtime::Runtime) {
    let server = MusterServer::start(&[&["--tasks", "5", "--recoverable"], arguments].concat());
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    (0..5).for_each(|task| register_task(&server, &runtime, task));
    wait_until("the run is running", || server.get("/api/v1/jobs").body.contains("\"running\""));
    for life in 1..=3_u64 {
        register_task_as(&server, &runtime, 3, 1000 + life);
        let lives = || server.get("/api/v1/jobs/default/tasks/3").json()["lives"].as_array().map(Vec::len);
        wait_until("it is back", || lives() == Some(1 + life as usize));
    }
    (server, runtime)
}

fn list_exclusions(server: &MusterServer, state: &str) -> Value {
    let page = server.get(&format!("/api/v1/jobs/default/exclusions?state={state}")).json();
    page["exclusions"].clone()
}

#[test]
fn a_rule_that_a_job_asks_for_takes_the_task_out_for_a_time() {
    let (server, _tasks) = storm(&["--auto-exclude", "restart-storm", "--auto-exclude-for", "1s"]);
    wait_until("the task is out", || list_exclusions(&server, "all") != json!([]));
    let made = list_exclusions(&server, "all")[0].clone();
    assert_eq!((&made["task"], &made["actor"]["who"]), (&3.into(), &"restart-storm".into()), "{made}");
    assert_eq!(made["actor"]["means"], "rule", "{made}");
    assert!(made["reason"].as_str().is_some_and(|reason| reason.contains("restarted")), "{made}");
    let audit = server.get("/api/v1/audit").json();
    let line = &audit["lines"][0];
    assert_eq!((&line["act"], &line["outcome"]), (&"exclude".into(), &"done".into()), "{audit}");
    wait_until("it may come back", || list_exclusions(&server, "over")[0]["ended"]["how"] == "expired");
}

#[test]
fn no_task_is_excluded_without_the_setting() {
    let (server, _tasks) = storm(&[]);
    let open = || server.get("/api/v1/jobs/default/findings").json()["open"].clone();
    wait_until("it is found", || open().as_array().is_some_and(|open| !open.is_empty()));
    assert_eq!(open()[0]["id"], "restart-storm");
    assert_eq!(list_exclusions(&server, "all"), json!([]));
}

#[test]
fn a_rule_is_set_and_unset_while_the_job_runs() {
    let (server, _tasks) = storm(&[]);
    let job = "/api/v1/jobs/default";
    let set = server.send("PATCH", job, r#"{"settings": {"auto_exclude": ["no-such-rule"]}, "reason": "x"}"#);
    assert_eq!(set.status, 422, "{set:?}");
    let set =
        server.send("PATCH", job, r#"{"settings": {"auto_exclude": ["stalled-task"]}, "reason": "nights"}"#);
    assert_eq!(set.status, 200, "{set:?}");
    assert_eq!(server.get(job).json()["settings"]["auto_exclude"], json!(["stalled-task"]));
}
