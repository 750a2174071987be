//! The five questions of a user, each answered by one click from the overview.

use std::time::Duration;

use crate::cluster::{BEAT, TaskCluster};
use crate::script::Script;
use crate::support::MusterServer;

/// The number of barriers at which the tasks of one host come late.
const LATE_BARRIERS: i64 = 10;

/// A run fails by task 5. In the next run the tasks are on other hosts, and the tasks 2 and 3 of one host come late to
/// every barrier.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn five_questions_are_answered_by_one_click_each_from_the_overview() {
    let muster = MusterServer::patient(&["--job", "train=8", "--heartbeat-timeout", "10s"]);
    let mut first = TaskCluster::register_tasks(muster.grpc, "train", 0..8, 1).await;
    first.start_heartbeats(BEAT);
    first.publish_and_pass_step_barriers(4, 1).await;
    first.close_connection_of_task(5);
    // The run fails with it.
    tokio::time::sleep(Duration::from_secs(2)).await;
    drop(first);

    let second = TaskCluster::register_tasks_of_run(muster.grpc, "train", 0..8, 1, 1).await;
    second.start_heartbeats(BEAT);
    second.publish_devices().await;
    for step in 0..LATE_BARRIERS {
        second.pass_barrier_with_late_tasks("train/step", step, &[2, 3], Duration::from_millis(400)).await;
    }
    let mut script = Script::start("questions.mjs", muster.http);
    assert_eq!(script.next_requested_action().await, None, "it asks for nothing");
}
