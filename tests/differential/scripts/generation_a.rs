//! Calls that only generation A has.

use crate::differences::Difference;
use crate::expect::{Code, ExpectedOutcome, ExpectedTaskState, error, ok, plain_error, waits};
use crate::script::{Release, Script, script, t};
use crate::support::Call;

pub fn scripts(release: Release) -> Vec<Script> {
    match release {
        Release::V0_6_2 => vec![devices_are_exchanged(), states_are_told(), strangers_have_no_devices()],
        Release::V0_9_2 => vec![calls_that_the_last_release_leaves_waiting()],
        Release::V0_10_2 | Release::V0_12_0 => Vec::new(),
    }
}

fn devices_are_exchanged() -> Script {
    let devices = |names: &[&str]| Call::WaitForAllTasks {
        devices: names.iter().map(|name| name.as_bytes().to_vec()).collect(),
    };
    let all = ["zero a", "zero b", "one", "two"];
    script("devices are exchanged in the order of tasks", 3)
        .register_all_tasks()
        .start("2", t(2), devices(&["two"]))
        .start("0", t(0), devices(&["zero a", "zero b"]))
        .expect_all(&["0", "2"], &waits())
        .start("1", t(1), devices(&["one"]))
        .expect_all(&["0", "1", "2"], &ok().devices(&all))
        .call(t(1), devices(&["one again"]), ok())
}

fn states_are_told() -> Script {
    let states = |tasks: &[i32]| Call::TaskStates { tasks: tasks.to_vec() };
    script("the states of tasks are told", 3)
        .call(
            t(0),
            states(&[0, 2]),
            ok().states(&[(0, ExpectedTaskState::Disconnected), (2, ExpectedTaskState::Disconnected)]),
        )
        .register_all_tasks()
        .call(
            t(0),
            states(&[1, 0]),
            ok().states(&[(1, ExpectedTaskState::Connected), (0, ExpectedTaskState::Connected)]),
        )
        .call(t(0), states(&[]), ok().states(&[]))
        .call(t(1), Call::report(9, "out of luck"), ok())
        .call(t(0), states(&[1]), ok().states(&[(1, ExpectedTaskState::Error)]))
}

fn strangers_have_no_devices() -> Script {
    script("the states of strangers", 2)
        .register_all_tasks()
        .call_differs(
            t(0),
            Call::TaskStates { tasks: vec![0, 9] },
            Difference::Strangers,
            ExpectedOutcome::ServiceDied,
            error(Code::InvalidArgument),
        )
        .without_comparison_at_end()
}

fn calls_that_the_last_release_leaves_waiting() -> Script {
    script("calls that the last release of their generation leaves waiting", 2)
        .register_all_tasks()
        .call_differs(
            t(0),
            Call::TaskStates { tasks: vec![0] },
            Difference::NeverAnswered,
            waits(),
            ok().states(&[(0, ExpectedTaskState::Connected)]),
        )
        .call_differs(
            t(0),
            Call::ReportErrorToTask,
            Difference::NeverAnswered,
            waits(),
            plain_error(Code::Unimplemented),
        )
        .start("devices 0", t(0), Call::WaitForAllTasks { devices: vec![b"zero".to_vec()] })
        .start("devices 1", t(1), Call::WaitForAllTasks { devices: vec![b"one".to_vec()] })
        .expect_difference("devices 0", Difference::NeverAnswered, waits(), ok().devices(&["zero", "one"]))
        .expect_difference("devices 1", Difference::NeverAnswered, waits(), ok().devices(&["zero", "one"]))
        .call_differs(t(1), Call::report(9, "out of luck"), Difference::NeverAnswered, waits(), ok())
        .without_comparison_at_end()
}
