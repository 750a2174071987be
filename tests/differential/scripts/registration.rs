//! RegisterTask, and the incarnation of the service that every call states.

use crate::expect::{Code, State, error, ok, waits};
use crate::script::{Claim, Release, Script, ScriptCall, Version, observer, script, t};
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

const ALL_CONNECTED: [(i32, State); 3] =
    [(0, State::Connected), (1, State::Connected), (2, State::Connected)];

fn nobody_is_connected_before_all_have_come() -> Script {
    script("nobody is connected before all have come", 3)
        // A caller reads the service incarnation before it registers, where it needs it.
        .start("first look", observer(), ScriptCall::Watch(Version::None))
        .start_register("0", t(0))
        .start_register("2", t(2))
        .all(&["0", "2"], &waits())
        .call(
            observer(),
            ScriptCall::Watch(Version::None),
            ok().states(&[(0, State::Disconnected), (1, State::Disconnected), (2, State::Disconnected)]),
        )
        .start_register("1", t(1))
        .all(&["0", "1", "2"], &ok())
        .call(observer(), ScriptCall::Watch(Version::None), ok().states(&ALL_CONNECTED))
}

fn a_stranger_is_refused() -> Script {
    let refused = || error(Code::InvalidArgument).says("Unexpected task registered");
    script("a stranger is refused and disturbs nobody", 2)
        .start_register("0", t(0))
        .registers(t(2), refused())
        .registers(t(-5), refused())
        .registers(t(i32::MAX), refused())
        .registers(t(i32::MIN), refused())
        .then("0", waits())
        .start_register("1", t(1))
        .all(&["0", "1"], &ok())
        .registers(t(2), refused())
}

fn a_newer_life_takes_the_place_of_an_older_one_that_waits() -> Script {
    script("a newer life takes the place of an older one that waits", 2)
        .start_register("old", t(0))
        .restart(0)
        .start_register("new", t(0))
        .then("old", error(Code::AlreadyExists).says("newer incarnation"))
        .then("new", waits())
        .start_register("1", t(1))
        .all(&["new", "1"], &ok())
        .heartbeat(t(0), ok())
}

fn a_repeated_registration_takes_the_place_of_the_first() -> Script {
    script("a repeated registration takes the place of the first", 2)
        .start_register("first", t(0))
        .start_register("second", t(0))
        .then("first", error(Code::AlreadyExists).says("newer incarnation"))
        .then("second", waits())
        .start_register("1", t(1))
        .all(&["second", "1"], &ok())
}

fn a_connected_task_may_register_again() -> Script {
    script("a connected task may register again in the same life", 2)
        .registered()
        .start("poll", t(1), Call::PollForError)
        .registers(t(0), ok())
        .then("poll", waits())
        .call(t(0), Call::insert("k", "v"), ok())
        .registers(t(0), ok())
        .call(t(1), Call::get("k"), ok().value("v"))
}

fn a_restarted_task_fails_the_run() -> Script {
    script("a restarted task fails the run", 3)
        .registered()
        .start("poll 0", t(0), Call::PollForError)
        .start("poll 1", t(1), Call::PollForError)
        .start("poll of the old life", t(2), Call::PollForError)
        .restart(2)
        .registers(t(2), error(Code::Aborted).about_task(2).says("different incarnation"))
        .all(
            &["poll 0", "poll 1", "poll of the old life"],
            &error(Code::Aborted).about_task(2).says("different incarnation"),
        )
        .call(observer(), ScriptCall::Watch(Version::None), ok())
        // The error stays: later polls get it at once.
        .call(t(0), Call::PollForError, error(Code::Aborted).about_task(2))
        .heartbeat(t(0), ok())
        .heartbeat(t(2).life(0), error(Code::Aborted).says("already-in-error"))
}

fn a_late_task_fails_the_registration_of_all() -> Script {
    const ID: &str = "[Init]Wait_for_all_tasks_to_register";
    script("a late task fails the registration of all", 3)
        .register_timeout_s(1)
        .start_register("0", t(0))
        .start_register("1", t(1))
        .all(&["0", "1"], &error(Code::DeadlineExceeded).of_barrier(ID, 0))
}

fn a_call_to_another_service_is_refused(release: Release) -> Script {
    let refused = || error(Code::Internal).mismatch().says("service incarnation");
    every_call(script("a call to another service is refused", 2), release, Claim::Wrong, &refused)
}

fn a_call_to_no_service_is_refused(release: Release) -> Script {
    let refused = || error(Code::Internal).mismatch().says("service incarnation");
    every_call(script("a call that leaves the service out is refused", 2), release, Claim::Absent, &refused)
}

/// Makes each call that states a service incarnation, with one that must be refused.
fn every_call(
    script: Script,
    release: Release,
    claim: Claim,
    refused: &dyn Fn() -> crate::expect::Outcome,
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
    let mut script = script.registered();
    let report = release.reports_errors().then(|| Call::report(9, "out of luck"));
    for call in calls.into_iter().chain(report) {
        script = script.call(t(0).claiming(claim), call, refused());
    }
    // None of the calls has had an effect.
    script
        .call(t(0), Call::try_get("k"), error(Code::NotFound))
        .start("0", t(0), Call::barrier("b", 0))
        .start("1", t(1), Call::barrier("b", 0))
        .all(&["0", "1"], &ok().counter(0))
}

fn a_task_is_spelled_as_its_caller_spells_it() -> Script {
    script("a task is spelled as its caller spells it", 2)
        .start_register("0", t(0).named())
        .start_register("1", t(1).named())
        .all(&["0", "1"], &ok())
        .call(t(0).named(), Call::TaskStates { tasks: vec![0, 1] }, ok())
        .start("0 alive", t(0).named(), Call::alive(&[0, 1]))
        .start("1 alive", t(1).named(), Call::alive(&[0, 1]))
        .all(&["0 alive", "1 alive"], &ok().alive(&[(0, 0), (1, 0)]))
        .start("poll", t(0).named(), Call::PollForError)
        .call(t(1).named(), Call::report(9, "out of luck"), ok())
        .then("poll", error(Code::FailedPrecondition).about_task(1).reported().says("out of luck"))
}

fn a_reset_task_comes_back() -> Script {
    script("a reset task comes back without waiting for anybody", 2)
        .registered()
        .start("poll", t(0), Call::PollForError)
        .call(t(0), Call::Reset, ok())
        .then("poll", error(Code::Cancelled).says("disconnected"))
        .call(
            observer(),
            ScriptCall::Watch(Version::None),
            ok().states(&[(0, State::Disconnected), (1, State::Connected)]),
        )
        .call(t(0), Call::Reset, error(Code::FailedPrecondition))
        .call(t(7), Call::Reset, error(Code::InvalidArgument))
        .restart(0)
        .registers(t(0), ok())
        .start("0", t(0), Call::barrier("b", 0))
        .start("1", t(1), Call::barrier("b", 0))
        .all(&["0", "1"], &ok().counter(0))
}
