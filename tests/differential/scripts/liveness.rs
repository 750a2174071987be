//! GetAliveTasks, and watching the states of tasks.

use crate::differences::Difference;
use crate::expect::{
    Code, ExpectedOutcome, ExpectedTaskState, error, incarnation_mismatch_error, ok, plain_error, waits,
};
use crate::script::{Release, Script, ScriptCall, TaskStatesVersion, observer, script, t};
use crate::support::Call;

pub fn scripts(release: Release) -> Vec<Script> {
    let mut scripts = vec![
        the_living_agree_on_who_is_alive(),
        sets_are_asked_about_apart(),
        only_members_may_ask_who_is_alive(),
        strangers_are_not_alive(),
        nobody_waits_for_those_who_fail(),
        nobody_waits_for_those_who_leave(),
        a_repeated_question(),
        a_watch_waits_for_a_change(),
        a_watch_sees_every_kind_of_change(),
        a_watch_from_the_future(),
    ];
    if release.reports_errors() {
        scripts.push(a_watch_sees_what_was_reported());
    }
    scripts
}

fn the_living_agree_on_who_is_alive() -> Script {
    let all = [0, 1, 2];
    script("the living agree on who is alive", 3)
        .register_all_tasks()
        .start("0", t(0), Call::alive(&all))
        .start("1", t(1), Call::alive(&all))
        .expect_all(&["0", "1"], &waits())
        .start("2", t(2), Call::alive(&all))
        .expect_all(&["0", "1", "2"], &ok().alive(&[(0, 0), (1, 0), (2, 0)]))
        // A second request is independent of the first.
        .start("0 again", t(0), Call::alive(&all))
        .expect_outcome("0 again", waits())
}

fn sets_are_asked_about_apart() -> Script {
    script("sets are asked about apart", 3)
        .register_all_tasks()
        .start("0 of all", t(0), Call::alive(&[0, 1, 2]))
        .start("0 of pair", t(0), Call::alive(&[0, 1]))
        .start("1 of pair", t(1), Call::alive(&[1, 0]))
        .expect_all(&["0 of pair", "1 of pair"], &ok().alive(&[(0, 0), (1, 0)]))
        .expect_outcome("0 of all", waits())
        .call(t(2), Call::alive(&[2]), ok().alive(&[(2, 0)]))
        .start("1 of all", t(1), Call::alive(&[2, 1, 0]))
        .start("2 of all", t(2), Call::alive(&[2, 1, 0, 0]))
        .expect_all(&["0 of all", "1 of all", "2 of all"], &ok().alive(&[(0, 0), (1, 0), (2, 0)]))
}

fn only_members_may_ask_who_is_alive() -> Script {
    script("only members may ask who is alive", 3)
        .register_all_tasks()
        .call(t(2), Call::alive(&[0, 1]), plain_error(Code::InvalidArgument))
        .call(t(2), Call::alive(&[]), plain_error(Code::InvalidArgument))
        .call(t(7), Call::alive(&[0, 1]), plain_error(Code::InvalidArgument))
}

fn strangers_are_not_alive() -> Script {
    script("strangers are not alive", 2)
        .register_all_tasks()
        .call(t(0), Call::alive(&[0, 9]), ok().alive(&[(0, 0)]))
        .start("0", t(0), Call::alive(&[0, 1, -4]))
        .expect_outcome("0", waits())
        .call(t(1), Call::alive(&[0, 1, -4]), ok().alive(&[(0, 0), (1, 0)]))
        .expect_outcome("0", ok().alive(&[(0, 0), (1, 0)]))
}

fn nobody_waits_for_those_who_fail() -> Script {
    script("nobody waits for those who fail", 3)
        .register_all_tasks()
        .start("poll", t(0), Call::PollForError)
        .start("0", t(0), Call::alive(&[0, 1, 2]))
        .start("1", t(1), Call::alive(&[0, 1, 2]))
        .call(t(2), Call::Heartbeat { incarnation: 4711 }, incarnation_mismatch_error())
        .expect_all(&["0", "1"], &ok().alive(&[(0, 0), (1, 0)]))
        .expect_outcome("poll", incarnation_mismatch_error())
}

fn nobody_waits_for_those_who_leave() -> Script {
    script("nobody waits for those who leave", 3)
        .shutdown_timeout_s(0)
        .register_all_tasks()
        .start("0", t(0), Call::alive(&[0, 1, 2]))
        .start("1", t(1), Call::alive(&[0, 1, 2]))
        .call(t(2), Call::Shutdown, ok())
        .expect_all(&["0", "1"], &ok().alive(&[(0, 0), (1, 0)]))
        .register_and_expect(t(2), ok())
        .start("0 again", t(0), Call::alive(&[0, 1, 2]))
        .start("1 again", t(1), Call::alive(&[0, 1, 2]))
        .expect_all(&["0 again", "1 again"], &waits())
        .call(t(2), Call::alive(&[0, 1, 2]), ok().alive(&[(0, 0), (1, 0), (2, 0)]))
        .expect_all(&["0 again", "1 again"], &ok().alive(&[(0, 0), (1, 0), (2, 0)]))
}

fn a_repeated_question() -> Script {
    script("a repeated question about the living", 2)
        .register_all_tasks()
        .start("first", t(0), Call::alive(&[0, 1]))
        .start("second", t(0), Call::alive(&[0, 1]))
        .call(t(1), Call::alive(&[0, 1]), ok().alive(&[(0, 0), (1, 0)]))
        .expect_all(&["first", "second"], &ok().alive(&[(0, 0), (1, 0)]))
}

const CONNECTED: [(i32, ExpectedTaskState); 2] =
    [(0, ExpectedTaskState::Connected), (1, ExpectedTaskState::Connected)];

fn a_watch_waits_for_a_change() -> Script {
    script("a watch waits for a change", 2)
        .shutdown_timeout_s(0)
        .register_all_tasks()
        .call(observer(), ScriptCall::Watch(TaskStatesVersion::None), ok().states(&CONNECTED))
        .start("current", observer(), ScriptCall::Watch(TaskStatesVersion::LastSeen))
        .start("another", t(0), ScriptCall::Watch(TaskStatesVersion::LastSeen))
        .expect_all(&["current", "another"], &waits())
        .call(observer(), ScriptCall::Watch(TaskStatesVersion::OneOlder), ok().states(&CONNECTED))
        .call(t(0), Call::insert("k", "v"), ok())
        .heartbeat(t(0), ok())
        .expect_all(&["current", "another"], &waits())
        .call(t(1), Call::Shutdown, ok())
        .expect_all(
            &["current", "another"],
            &ok().states(&[(0, ExpectedTaskState::Connected), (1, ExpectedTaskState::Disconnected)]),
        )
        .start("hung up", observer(), ScriptCall::Watch(TaskStatesVersion::LastSeen))
        .hang_up("hung up")
        .register_and_expect(t(1), ok())
}

fn a_watch_sees_every_kind_of_change() -> Script {
    script("a watch sees who fails", 2)
        .register_all_tasks()
        .start("poll", t(0), Call::PollForError)
        .call(observer(), ScriptCall::Watch(TaskStatesVersion::None), ok().states(&CONNECTED))
        .start("next", observer(), ScriptCall::Watch(TaskStatesVersion::LastSeen))
        .call(t(1), Call::Heartbeat { incarnation: 4711 }, incarnation_mismatch_error())
        .expect_outcome(
            "next",
            ok().states(&[(0, ExpectedTaskState::Connected), (1, ExpectedTaskState::Error)]),
        )
        .expect_outcome("poll", incarnation_mismatch_error())
}

fn a_watch_sees_what_was_reported() -> Script {
    script("a watch sees what was reported", 2)
        .register_all_tasks()
        .start("poll", t(0), Call::PollForError)
        .call(observer(), ScriptCall::Watch(TaskStatesVersion::None), ok().states(&CONNECTED))
        .start("next", observer(), ScriptCall::Watch(TaskStatesVersion::LastSeen))
        .call(t(1), Call::report(Code::Internal as i32, "out of luck"), ok())
        .expect_outcome(
            "next",
            ok().states(&[(0, ExpectedTaskState::Connected), (1, ExpectedTaskState::Error)]),
        )
        .expect_outcome("poll", error(Code::Internal).about_task(1).reported_by_task())
}

fn a_watch_from_the_future() -> Script {
    script("a watch from the future", 2)
        .register_all_tasks()
        .call(observer(), ScriptCall::Watch(TaskStatesVersion::None), ok().states(&CONNECTED))
        .call_differs(
            observer(),
            ScriptCall::Watch(TaskStatesVersion::Future),
            Difference::FutureVersion,
            ExpectedOutcome::ServiceDied,
            ok().states(&CONNECTED),
        )
        .without_comparison_at_end()
}
