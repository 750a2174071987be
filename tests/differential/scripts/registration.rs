//! RegisterTask, and the incarnation of the service that every call states.

use crate::expect::{Code, ExpectedTaskState, error, ok, waits};
use crate::script::{
    Release, Script, ScriptCall, StatedServiceIncarnation, TaskStatesVersion, observer, script, t,
};
use crate::support::Call;

pub fn scripts(release: Release) -> Vec<Script> {
    let mut scripts = vec![
        nobody_is_connected_before_all_have_come(),
        a_stranger_is_refused(),
        a_newer_life_takes_the_place_of_an_older_one_that_waits(),
        a_repeated_registration_takes_the_place_of_the_first(),
        a_connected_task_may_register_again(),
        a_restarted_task_fails_the_run(),
        a_late_task_fails_the_registration_of_all(),
    ];
    if release.states_incarnations() {
        scripts.extend([
            a_call_to_another_service_is_refused(release),
            a_call_to_no_service_is_refused(release),
        ]);
    } else {
        scripts.push(a_reset_task_comes_back());
    }
    if release == Release::V0_6_2 {
        scripts.push(a_task_is_spelled_as_its_caller_spells_it());
    }
    scripts
}

const ALL_CONNECTED: [(i32, ExpectedTaskState); 3] =
    [(0, ExpectedTaskState::Connected), (1, ExpectedTaskState::Connected), (2, ExpectedTaskState::Connected)];

fn nobody_is_connected_before_all_have_come() -> Script {
    script("nobody is connected before all have come", 3)
        // A caller reads the service incarnation before it registers, where it needs it.
        .start("first look", observer(), ScriptCall::Watch(TaskStatesVersion::None))
        .start_register("0", t(0))
        .start_register("2", t(2))
        .expect_all(&["0", "2"], &waits())
        .call(
            observer(),
            ScriptCall::Watch(TaskStatesVersion::None),
            ok().states(&[
                (0, ExpectedTaskState::Disconnected),
                (1, ExpectedTaskState::Disconnected),
                (2, ExpectedTaskState::Disconnected),
            ]),
        )
        .start_register("1", t(1))
        .expect_all(&["0", "1", "2"], &ok())
        .call(observer(), ScriptCall::Watch(TaskStatesVersion::None), ok().states(&ALL_CONNECTED))
}

fn a_stranger_is_refused() -> Script {
    let refused = || error(Code::InvalidArgument).with_message_part("Unexpected task registered");
    script("a stranger is refused and disturbs nobody", 2)
        .start_register("0", t(0))
        .register_and_expect(t(2), refused())
        .register_and_expect(t(-5), refused())
        .register_and_expect(t(i32::MAX), refused())
        .register_and_expect(t(i32::MIN), refused())
        .expect_outcome("0", waits())
        .start_register("1", t(1))
        .expect_all(&["0", "1"], &ok())
        .register_and_expect(t(2), refused())
}

fn a_newer_life_takes_the_place_of_an_older_one_that_waits() -> Script {
    script("a newer life takes the place of an older one that waits", 2)
        .start_register("old", t(0))
        .restart(0)
        .start_register("new", t(0))
        .expect_outcome("old", error(Code::AlreadyExists).with_message_part("newer incarnation"))
        .expect_outcome("new", waits())
        .start_register("1", t(1))
        .expect_all(&["new", "1"], &ok())
        .heartbeat(t(0), ok())
}

fn a_repeated_registration_takes_the_place_of_the_first() -> Script {
    script("a repeated registration takes the place of the first", 2)
        .start_register("first", t(0))
        .start_register("second", t(0))
        .expect_outcome("first", error(Code::AlreadyExists).with_message_part("newer incarnation"))
        .expect_outcome("second", waits())
        .start_register("1", t(1))
        .expect_all(&["second", "1"], &ok())
}

fn a_connected_task_may_register_again() -> Script {
    script("a connected task may register again in the same life", 2)
        .register_all_tasks()
        .start("poll", t(1), Call::PollForError)
        .register_and_expect(t(0), ok())
        .expect_outcome("poll", waits())
        .call(t(0), Call::insert("k", "v"), ok())
        .register_and_expect(t(0), ok())
        .call(t(1), Call::get("k"), ok().value("v"))
}

fn a_restarted_task_fails_the_run() -> Script {
    script("a restarted task fails the run", 3)
        .register_all_tasks()
        .start("poll 0", t(0), Call::PollForError)
        .start("poll 1", t(1), Call::PollForError)
        .start("poll of the old life", t(2), Call::PollForError)
        .restart(2)
        .register_and_expect(
            t(2),
            error(Code::Aborted).about_task(2).with_message_part("different incarnation"),
        )
        .expect_all(
            &["poll 0", "poll 1", "poll of the old life"],
            &error(Code::Aborted).about_task(2).with_message_part("different incarnation"),
        )
        .call(observer(), ScriptCall::Watch(TaskStatesVersion::None), ok())
        // The error stays: later polls get it at once.
        .call(t(0), Call::PollForError, error(Code::Aborted).about_task(2))
        .heartbeat(t(0), ok())
        .heartbeat(t(2).life(0), error(Code::Aborted).with_message_part("already-in-error"))
}

fn a_late_task_fails_the_registration_of_all() -> Script {
    const ID: &str = "[Init]Wait_for_all_tasks_to_register";
    script("a late task fails the registration of all", 3)
        .register_timeout_s(1)
        .start_register("0", t(0))
        .start_register("1", t(1))
        .expect_all(&["0", "1"], &error(Code::DeadlineExceeded).of_barrier(ID, 0))
}

fn a_call_to_another_service_is_refused(release: Release) -> Script {
    let refused =
        || error(Code::Internal).naming_service_incarnation().with_message_part("service incarnation");
    script_of_every_refused_call(
        script("a call to another service is refused", 2),
        release,
        StatedServiceIncarnation::Wrong,
        &refused,
    )
}

fn a_call_to_no_service_is_refused(release: Release) -> Script {
    let refused =
        || error(Code::Internal).naming_service_incarnation().with_message_part("service incarnation");
    script_of_every_refused_call(
        script("a call that leaves the service out is refused", 2),
        release,
        StatedServiceIncarnation::Absent,
        &refused,
    )
}

/// Makes each call that states a service incarnation, with one that must be refused.
fn script_of_every_refused_call(
    script: Script,
    release: Release,
    claim: StatedServiceIncarnation,
    refused: &dyn Fn() -> crate::expect::ExpectedOutcome,
) -> Script {
    let calls = [
        Call::Heartbeat { incarnation: crate::script::incarnation(0, 0) },
        Call::PollForError,
        Call::Shutdown,
        Call::watch(-1),
        Call::insert("k", "v"),
        Call::get("k"),
        Call::try_get("k"),
        Call::increment("n", 1),
        Call::list("d"),
        Call::delete("k"),
        Call::barrier("b", 0),
        Call::barrier("b", 7),
        Call::cancel("b", 0),
        Call::alive(&[0, 1]),
    ];
    let mut script = script.register_all_tasks();
    let report = release.reports_errors().then(|| Call::report(9, "out of luck"));
    for call in calls.into_iter().chain(report) {
        script = script.call(t(0).stating(claim), call, refused());
    }
    // None of the calls has had an effect.
    script
        .call(t(0), Call::try_get("k"), error(Code::NotFound))
        .start("0", t(0), Call::barrier("b", 0))
        .start("1", t(1), Call::barrier("b", 0))
        .expect_all(&["0", "1"], &ok().counter(0))
}

fn a_task_is_spelled_as_its_caller_spells_it() -> Script {
    script("a task is spelled as its caller spells it", 2)
        .start_register("0", t(0).naming_its_job())
        .start_register("1", t(1).naming_its_job())
        .expect_all(&["0", "1"], &ok())
        .call(t(0).naming_its_job(), Call::TaskStates { tasks: vec![0, 1] }, ok())
        .start("0 alive", t(0).naming_its_job(), Call::alive(&[0, 1]))
        .start("1 alive", t(1).naming_its_job(), Call::alive(&[0, 1]))
        .expect_all(&["0 alive", "1 alive"], &ok().alive(&[(0, 0), (1, 0)]))
        .start("poll", t(0).naming_its_job(), Call::PollForError)
        .call(t(1).naming_its_job(), Call::report(9, "out of luck"), ok())
        .expect_outcome(
            "poll",
            error(Code::FailedPrecondition).about_task(1).reported_by_task().with_message_part("out of luck"),
        )
}

fn a_reset_task_comes_back() -> Script {
    script("a reset task comes back without waiting for anybody", 2)
        .register_all_tasks()
        .start("poll", t(0), Call::PollForError)
        .call(t(0), Call::Reset, ok())
        .expect_outcome("poll", error(Code::Cancelled).with_message_part("disconnected"))
        .call(
            observer(),
            ScriptCall::Watch(TaskStatesVersion::None),
            ok().states(&[(0, ExpectedTaskState::Disconnected), (1, ExpectedTaskState::Connected)]),
        )
        .call(t(0), Call::Reset, error(Code::FailedPrecondition))
        .call(t(7), Call::Reset, error(Code::InvalidArgument))
        .restart(0)
        .register_and_expect(t(0), ok())
        .start("0", t(0), Call::barrier("b", 0))
        .start("1", t(1), Call::barrier("b", 0))
        .expect_all(&["0", "1"], &ok().counter(0))
}
