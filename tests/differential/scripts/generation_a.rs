//! Calls that only generation A has.

use crate::expect::{Code, State, error, ok, plain_error, waits};
use crate::script::{Release, Script, script, t};
use crate::support::{Call, Generation};

pub fn scripts(release: Release) -> Vec<Script> {
    if release.generation() != Generation::A {
        return Vec::new();
    }
    vec![devices_are_exchanged(), states_are_told(), nobody_reports_errors_to_tasks()]
}

fn devices_are_exchanged() -> Script {
    let devices = |names: &[&str]| Call::WaitForAllTasks {
        devices: names.iter().map(|name| name.as_bytes().to_vec()).collect(),
    };
    let all = ["zero a", "zero b", "one", "two"];
    script("devices are exchanged in the order of tasks", 3)
        .registered()
        .start("2", t(2), devices(&["two"]))
        .start("0", t(0), devices(&["zero a", "zero b"]))
        .all(&["0", "2"], &waits())
        .call(t(7), devices(&["seven"]), error(Code::InvalidArgument))
        .start("1", t(1), devices(&["one"]))
        .all(&["0", "1", "2"], &ok().devices(&all))
        .call(t(1), devices(&["one again"]), ok())
}

fn states_are_told() -> Script {
    let states = |tasks: &[i32]| Call::TaskStates { tasks: tasks.to_vec() };
    script("the states of tasks are told", 3)
        .call(t(0), states(&[0, 2]), ok().states(&[(0, State::Disconnected), (2, State::Disconnected)]))
        .registered()
        .call(t(0), states(&[1, 0]), ok().states(&[(1, State::Connected), (0, State::Connected)]))
        .call(t(0), states(&[]), ok().states(&[]))
        .call(t(0), states(&[0, 9]), error(Code::InvalidArgument))
        .call(t(1), Call::report(9, "out of luck"), ok())
        .call(t(0), states(&[1]), ok().states(&[(1, State::Error)]))
}

fn nobody_reports_errors_to_tasks() -> Script {
    script("the service is no task to report errors to", 2)
        .registered()
        .call(t(0), Call::ReportErrorToTask, plain_error(Code::Unimplemented))
}
