//! Tests a coordinated save: all processes agree on one step, save, and leave.

use bytes::Bytes;
use muster::coordination::{JobView, RunState, TaskId};
use muster::proto::tensorflow;
use muster::proto::xla::coordination as xla;
use rustix::process::Signal;
use tensorflow::coordination_service_client::CoordinationServiceClient as GenerationA;
use tonic::transport::Endpoint;
use xla::coordination_service_client::CoordinationServiceClient as GenerationC;

use super::fixture::JaxFixture;
use super::http;
use super::process::Process;
use super::release::Generation;
use super::{RunSet, Test};

pub const TESTS: &[Test] = &[
    (RunSet::All, "a_preemption_notice_from_outside_makes_all_save_at_one_step", |scene| {
        save_together(scene, |_| insert_notice(scene));
    }),
    (RunSet::Both, "an_operator_who_drains_makes_all_save_at_one_step", |scene| {
        save_together(scene, |_| {
            let body = serde_json::json!({ "reason": "the machines are needed" });
            let at = scene.server().about.http;
            let (status, view) = http::ask(at, "POST", "/api/v1/jobs/default/drain", &body);
            assert_eq!((status, &view["run"]), (202, &1.into()), "{view}");
        });
    }),
    (RunSet::Both, "sigterm_to_one_process_makes_all_save_at_one_step", |scene| {
        save_together(scene, |tasks| _ = tasks[1].signal(Signal::TERM));
    }),
];

/// The key for which every JAX process waits.
const NOTICE: &str = "RECEIVED_PREEMPTION_NOTICE";
/// The time of the notice: long ago, so that no process waits until then.
const DEATH: &str = "2026-01-01T00:00:00+00:00";

fn save_together(scene: &JaxFixture, ask: impl Fn(&[Process])) {
    let server = scene.serve(&["--tasks", "3"]);
    // At different paces, so that the processes have to agree on a step.
    let start = |task| scene.start(task, 3, &["worker.py", "preempt", "--step-ms", ["40", "50", "60"][task]]);
    let tasks: Vec<Process> = (0..3).map(start).collect();
    tasks.iter().for_each(|task| _ = task.line("step", |line| line.number::<u64>("n") >= 3));
    assert_eq!(server.view("default").run.preemption, None);

    ask(&tasks);

    tasks.iter().for_each(Process::succeed);
    let steps = |name: &str| -> Vec<i64> {
        tasks.iter().flat_map(|task| task.records(name)).map(|line| line.number("n")).collect()
    };
    let agreed = steps("agreed");
    assert_eq!(agreed, [agreed[0]; 3], "they agreed on different steps");
    assert_eq!(steps("saved"), agreed);

    let JobView { run, .. } = server.until_run(1, RunState::Completed);
    let preemption = run.preemption.expect("the notice was seen");
    assert_eq!(preemption.agreed_step, Some(agreed[0]));
    let acknowledged: Vec<TaskId> = preemption.acknowledged.iter().map(|(task, _)| *task).collect();
    assert_eq!(acknowledged, [TaskId(0), TaskId(1), TaskId(2)]);
    assert!(preemption.acknowledged.iter().all(|(_, step)| *step < agreed[0]), "{preemption:?}");
}

/// Inserts the notice with a client that is no task of the job.
fn insert_notice(scene: &JaxFixture) {
    let server = scene.server();
    let service = u64::from_str_radix(&server.view("default").run.incarnation, 16).expect("hexadecimal");
    let address = format!("http://{}", server.grpc());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let channel = Endpoint::from_shared(address).unwrap().connect().await.unwrap();
        let (key, value) = (NOTICE.to_owned(), Bytes::from_static(DEATH.as_bytes()));
        match scene.release.generation() {
            Generation::A => {
                let kv = Some(tensorflow::KeyValueEntry { key, value });
                let request = tensorflow::InsertKeyValueRequest { kv, ..Default::default() };
                GenerationA::new(channel).insert_key_value(request).await.unwrap();
            }
            Generation::C => {
                let incarnations = xla::Incarnations { service_incarnation: service, ..Default::default() };
                let kv = Some(xla::KeyValueEntry { key, value });
                let request =
                    xla::InsertKeyValueRequest { incarnations: Some(incarnations), kv, ..Default::default() };
                GenerationC::new(channel).insert_key_value(request).await.unwrap();
            }
        }
    });
}
