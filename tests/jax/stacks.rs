//! Tests of stacks of real JAX processes: one does not reach a barrier, and its stack says where it is.

use serde_json::{Value, json};

use super::fixture::JaxFixture;
use super::harness::wait_until;
use super::http;
use super::process::Process;
use super::{RunSet, Test};

pub const TESTS: &[Test] =
    &[(RunSet::Both, "the_stack_of_a_task_that_does_not_come_to_a_barrier_names_its_function", odd_one)];

const STACKS: &str = "/api/v1/jobs/default/stacks";

fn odd_one(scene: &JaxFixture) {
    let server = scene.serve(&["--tasks", "3"]);
    let address = server.about.http;
    let helper = format!("http://{address}/helper.py");
    let program = ["stacks.py", &helper, "1"];
    let tasks: Vec<Process> = (0..3).map(|task| scene.start(task, 3, &program)).collect();
    tasks.iter().for_each(|task| _ = task.text("EVENT registered"));
    server.until("all but one wait at the barrier", |view| {
        view.run.barriers.iter().any(|barrier| barrier.missing.len() == 1).then_some(())
    });
    wait_until("all helpers have learned from JAX which task they are", || {
        http::get::<Value>(address, STACKS)["helpers"] == 3
    });
    let (status, asked) = http::ask(address, "POST", STACKS, &json!({"reason": "who holds up the step?"}));
    assert_eq!(status, 202, "{asked}");
    wait_until("all have answered", || http::get::<Value>(address, STACKS)["awaited"] == json!([]));
    let view = http::get::<Value>(address, STACKS);
    let innermost = |task: i32| {
        let groups = view["groups"].as_array().expect("a list").iter();
        let of_task = |group: &&Value| {
            let ranges = group["tasks"].as_array().expect("a list").iter();
            let within = |range: &Value| {
                range["first"].as_i64() <= Some(task.into()) && Some(task.into()) <= range["last"].as_i64()
            };
            group["main"] == true && ranges.clone().any(within)
        };
        let group = groups.clone().find(of_task).unwrap_or_else(|| panic!("task {task}: {view}"));
        let frames = group["frames"].as_array().expect("a list");
        let own = |frame: &&Value| frame["file"].as_str().is_some_and(|file| file.ends_with("stacks.py"));
        frames.iter().rfind(own).map(|frame| frame["function"].clone()).unwrap_or_default()
    };
    assert_eq!([0, 1, 2].map(innermost), ["train", "load_batch", "train"].map(Value::from), "{view}");
    let page =
        super::harness::http::send(address, "GET", "/jobs/default/barriers", &["accept: text/html"], "");
    let page = page.expect("the server answers").body;
    assert!(page.contains("load_batch (stacks.py:"), "beside the barrier: {page}");
}
