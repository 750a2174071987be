//! Tests of two processes with the same task number.

use std::net::SocketAddr;

use muster::coordination::{EventKind, RunState, TaskId, TaskIncarnation};

use super::fixture::JaxFixture;
use super::{RunSet, Test};

pub const TESTS: &[Test] =
    &[(RunSet::All, "of_two_processes_that_claim_a_task_the_newer_wins_and_the_job_forms", newer_wins)];

fn newer_wins(scene: &JaxFixture) {
    let server = scene.serve(&["--tasks", "2"]);
    let program = ["worker.py", "register"];
    let registration = |nth: usize| -> Option<(TaskIncarnation, SocketAddr)> {
        let mut registered = server.events("default").into_iter().filter_map(|event| match event.what {
            EventKind::TaskRegistering { task: TaskId(0), incarnation, peer } => {
                Some((incarnation, peer.unwrap()))
            }
            _ => None,
        });
        registered.nth(nth)
    };
    let older = scene.start(0, 2, &program);
    let (old, old_peer) = super::harness::wait_for("the first claim", || registration(0));
    let newer = scene.start(0, 2, &program);
    let (new, new_peer) = super::harness::wait_for("the second claim", || registration(1));

    older.fail();
    let said = older.unstructured();
    for expected in ["ALREADY_EXISTS", "newer incarnation", &new.to_string(), &new_peer.to_string()] {
        assert!(said.contains(expected), "{expected} is not in: {said}");
    }

    let superseded =
        server.event("the older claim loses", |event| matches!(event.what, EventKind::TaskSuperseded { .. }));
    let expected = EventKind::TaskSuperseded {
        task: TaskId(0),
        old,
        old_peer: Some(old_peer),
        new,
        new_peer: Some(new_peer),
    };
    assert_eq!(superseded.what, expected);
    let view = server.until_run(1, RunState::Forming);
    let lives: Vec<_> =
        view.run.tasks[0].lives.iter().map(|life| (life.incarnation.clone(), life.peer)).collect();
    assert_eq!(lives, [(new.to_string(), Some(new_peer)), (old.to_string(), Some(old_peer))]);

    let other = scene.start(1, 2, &program);
    newer.succeed();
    other.succeed();
    let view = server.until_run(1, RunState::Completed);
    assert_eq!(view.run.first_cause, None);
}
