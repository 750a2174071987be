//! PollForError, and the calls by which tasks report errors themselves.

use crate::differences::Difference;
use crate::expect::{Code, Outcome, State, another_life, error, ok, waits};
use crate::script::{Release, Script, ScriptCall, SideKind, Version, observer, script, t};
use crate::support::Call;

pub fn scripts(release: Release) -> Vec<Script> {
    let mut scripts = vec![
        polls_of_those_who_take_no_part_are_refused(),
        a_later_poll_takes_the_place_of_an_earlier_one(),
        only_the_first_error_is_told_and_it_stays(),
    ];
    if release.reports_errors() {
        scripts.extend([
            a_reported_error_reaches_everybody(),
            a_reported_error_breaks_barriers(),
            a_second_report_does_not_replace_the_first(),
            reports_of_those_who_take_no_part_are_refused(),
            codes_that_nobody_knows_are_reported_as_they_are(),
            a_long_message_is_cut(),
            a_reported_error_never_heals(),
            in_a_recoverable_job_a_reported_error_is_the_tasks_own(),
        ]);
    }
    if release == Release::V0_12_0 {
        scripts.push(a_report_without_a_code());
    }
    scripts
}

fn polls_of_those_who_take_no_part_are_refused() -> Script {
    script("polls of those who take no part are refused", 2)
        .start("look", observer(), ScriptCall::Watch(Version::None))
        .call(t(2), Call::PollForError, error(Code::InvalidArgument))
        .call(t(0), Call::PollForError, error(Code::FailedPrecondition))
        .start_register("0", t(0))
        .call(t(0), Call::PollForError, error(Code::FailedPrecondition))
        .registers(t(1), ok())
        .start("0 polls", t(0), Call::PollForError)
        .then("0 polls", waits())
}

fn a_later_poll_takes_the_place_of_an_earlier_one() -> Script {
    script("a later poll takes the place of an earlier one", 2)
        .registered()
        .start("first", t(0), Call::PollForError)
        .start("other", t(1), Call::PollForError)
        .start("second", t(0), Call::PollForError)
        .then("first", error(Code::Cancelled).says("new request from the same task"))
        .all(&["other", "second"], &waits())
}

fn only_the_first_error_is_told_and_it_stays() -> Script {
    let first = another_life;
    let own = || error(Code::FailedPrecondition).says("already in error state");
    script("only the first error is told and it stays", 3)
        .registered()
        .start("0", t(0), Call::PollForError)
        .call(t(1), Call::Heartbeat { incarnation: 4711 }, first())
        .then("0", first())
        .call(t(2), Call::Heartbeat { incarnation: 4712 }, another_life())
        .call(t(0), Call::PollForError, first())
        .call(t(1), Call::PollForError, own())
        .call(t(2), Call::PollForError, own())
        .call(t(0), Call::PollForError, first())
}

fn reported(task: i32) -> Outcome {
    error(Code::ResourceExhausted).about_task(task).reported().says("out of memory on host 7")
}

fn report() -> Call {
    Call::report(Code::ResourceExhausted as i32, "out of memory on host 7")
}

fn a_reported_error_reaches_everybody() -> Script {
    script("a reported error reaches everybody", 3)
        .registered()
        .start("0", t(0), Call::PollForError)
        .start("1", t(1), Call::PollForError)
        .call(t(1), report(), ok())
        .all(&["0", "1"], &reported(1))
        // Later polls get the error too.
        .call(t(2), Call::PollForError, reported(1))
        .call(
            observer(),
            ScriptCall::Watch(Version::None),
            ok().states(&[(0, State::Connected), (1, State::Error), (2, State::Connected)]),
        )
        .heartbeat(t(0), ok())
        .heartbeat(t(1), error(Code::Aborted).says("already-in-error"))
        .call(t(0), Call::Shutdown, error(Code::Internal).says("Shutdown barrier has failed"))
}

fn a_reported_error_breaks_barriers() -> Script {
    let broken = || error(Code::Internal).of_barrier("b", 0).says("task is set to ERROR");
    script("a reported error breaks barriers", 3)
        .registered()
        .start("poll", t(0), Call::PollForError)
        .start("0", t(0), Call::barrier("b", 0))
        .start("1", t(1), Call::barrier("b", 0))
        .start("others", t(0), Call::barrier_of("without 2", 0, &[0, 1]))
        .call(t(2), report(), ok())
        .all(&["0", "1"], &broken())
        .then("poll", reported(2))
        .then("others", waits())
        .call(
            t(0),
            Call::barrier("later", 0),
            error(Code::Internal).of_barrier("later", 0).says("already in error"),
        )
        .call(t(1), Call::barrier_of("without 2", 0, &[0, 1]), ok().counter(0))
        .then("others", ok().counter(0))
}

fn a_second_report_does_not_replace_the_first() -> Script {
    script("a second report does not replace the first", 3)
        .registered()
        .start("0", t(0), Call::PollForError)
        .call(t(1), report(), ok())
        .then("0", reported(1))
        .call(t(2), Call::report(Code::Internal as i32, "me too"), ok())
        .call(t(0), Call::PollForError, reported(1))
        .call(t(0), report(), ok())
        .call(t(0), report(), error(Code::FailedPrecondition))
        .call(t(0), Call::PollForError, error(Code::FailedPrecondition).says("already in error state"))
}

fn reports_of_those_who_take_no_part_are_refused() -> Script {
    script("reports of those who take no part are refused", 2)
        .start("look", observer(), ScriptCall::Watch(Version::None))
        .call(t(0), report(), error(Code::FailedPrecondition))
        .registered()
        .start("poll", t(0), Call::PollForError)
        .call(t(2), report(), error(Code::InvalidArgument))
        .call(t(-3), report(), error(Code::InvalidArgument))
        .then("poll", waits())
        .start("0", t(0), Call::Shutdown)
        .start("1", t(1), Call::Shutdown)
        .all(&["0", "1"], &ok())
        .call(t(0), report(), error(Code::FailedPrecondition))
}

fn codes_that_nobody_knows_are_reported_as_they_are() -> Script {
    script("codes that nobody knows are reported as they are", 2)
        .registered()
        .start("0", t(0), Call::PollForError)
        .call(t(1), Call::report(77, "seventy-seven"), ok())
        .then("0", error(Code::Unknown).about_task(1).reported().says("seventy-seven"))
        .call(t(0), Call::report(-3, "minus three"), ok())
        .call(
            observer(),
            ScriptCall::Watch(Version::None),
            ok().states(&[(0, State::Error), (1, State::Error)]),
        )
}

fn a_long_message_is_cut() -> Script {
    let long: String = "x".repeat(5000);
    script("a long message is cut", 2)
        .registered()
        .start("0", t(0), Call::PollForError)
        .call(t(1), Call::report(Code::Internal as i32, &long), ok())
        .then("0", error(Code::Internal).about_task(1).reported().says(" ... [truncated]"))
}

fn a_reported_error_never_heals() -> Script {
    script("a reported error never heals within its run", 2)
        .registered()
        .start("0", t(0), Call::PollForError)
        .call(t(1), report(), ok())
        .then("0", reported(1))
        .registers(t(1), error(Code::Aborted).about_task(1).says("already in error"))
        .call(t(0), Call::PollForError, reported(1))
}

fn in_a_recoverable_job_a_reported_error_is_the_tasks_own() -> Script {
    script("in a recoverable job a reported error is the task's own", 3)
        .recoverable()
        .registered()
        .start("poll", t(0), Call::PollForError)
        .start("0", t(0), Call::barrier("b", 0))
        .start("1", t(1), Call::barrier("b", 0))
        .call(t(1), report(), ok())
        .then("poll", waits())
        .call(
            observer(),
            ScriptCall::Watch(Version::None),
            ok().states(&[(0, State::Connected), (1, State::Error), (2, State::Connected)]),
        )
        .heartbeat(t(1), error(Code::Aborted).says("already-in-error"))
        .heartbeat(t(0), ok())
        .then("0", waits())
        .call(
            t(0),
            Call::barrier("later", 0).within_ms(200),
            error(Code::DeadlineExceeded).of_barrier("later", 0),
        )
        .registers(t(1), error(Code::Aborted).about_task(1).says("already in error"))
        .restart(1)
        .registers(t(1), error(Code::Aborted).about_task(1).says("already in error"))
        .call(t(2), Call::Shutdown, ok())
        .call(t(0), Call::Shutdown, ok())
        .parted()
}

fn a_report_without_a_code() -> Script {
    script("a report without a code", 2)
        .registered()
        .start("poll", t(0), Call::PollForError)
        .call_differs(
            t(1),
            Call::report(0, "nothing"),
            Difference::ErrorWithoutCode,
            Outcome::ServiceDied,
            error(Code::InvalidArgument),
        )
        .only(SideKind::Muster, Difference::ErrorWithoutCode, |script| {
            script
                .then("poll", waits())
                .call(
                    observer(),
                    ScriptCall::Watch(Version::None),
                    ok().states(&[(0, State::Connected), (1, State::Connected)]),
                )
                .heartbeat(t(1), ok())
        })
        .parted()
}
