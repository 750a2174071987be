//! PollForError, and the calls by which tasks report errors themselves.

use crate::differences::Difference;
use crate::expect::{Code, ExpectedOutcome, ExpectedTaskState, error, incarnation_mismatch_error, ok, waits};
use crate::script::{Release, Script, ScriptCall, ServiceKind, TaskStatesVersion, observer, script, t};
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
        .start("look", observer(), ScriptCall::Watch(TaskStatesVersion::None))
        .call(t(2), Call::PollForError, error(Code::InvalidArgument))
        .call(t(0), Call::PollForError, error(Code::FailedPrecondition))
        .start_register("0", t(0))
        .call(t(0), Call::PollForError, error(Code::FailedPrecondition))
        .register_and_expect(t(1), ok())
        .start("0 polls", t(0), Call::PollForError)
        .expect_outcome("0 polls", waits())
}

fn a_later_poll_takes_the_place_of_an_earlier_one() -> Script {
    script("a later poll takes the place of an earlier one", 2)
        .register_all_tasks()
        .start("first", t(0), Call::PollForError)
        .start("other", t(1), Call::PollForError)
        .start("second", t(0), Call::PollForError)
        .expect_outcome("first", error(Code::Cancelled).with_message_part("new request from the same task"))
        .expect_all(&["other", "second"], &waits())
}

fn only_the_first_error_is_told_and_it_stays() -> Script {
    let first = incarnation_mismatch_error;
    let own = || error(Code::FailedPrecondition).with_message_part("already in error state");
    script("only the first error is told and it stays", 3)
        .register_all_tasks()
        .start("0", t(0), Call::PollForError)
        .call(t(1), Call::Heartbeat { incarnation: 4711 }, first())
        .expect_outcome("0", first())
        .call(t(2), Call::Heartbeat { incarnation: 4712 }, incarnation_mismatch_error())
        .call(t(0), Call::PollForError, first())
        .call(t(1), Call::PollForError, own())
        .call(t(2), Call::PollForError, own())
        .call(t(0), Call::PollForError, first())
}

fn reported_error(task: i32) -> ExpectedOutcome {
    error(Code::ResourceExhausted)
        .about_task(task)
        .reported_by_task()
        .with_message_part("out of memory on host 7")
}

fn report_error_call() -> Call {
    Call::report(Code::ResourceExhausted as i32, "out of memory on host 7")
}

fn a_reported_error_reaches_everybody() -> Script {
    script("a reported error reaches everybody", 3)
        .register_all_tasks()
        .start("0", t(0), Call::PollForError)
        .start("1", t(1), Call::PollForError)
        .call(t(1), report_error_call(), ok())
        .expect_all(&["0", "1"], &reported_error(1))
        // Later polls get the error too.
        .call(t(2), Call::PollForError, reported_error(1))
        .call(
            observer(),
            ScriptCall::Watch(TaskStatesVersion::None),
            ok().states(&[
                (0, ExpectedTaskState::Connected),
                (1, ExpectedTaskState::Error),
                (2, ExpectedTaskState::Connected),
            ]),
        )
        .heartbeat(t(0), ok())
        .heartbeat(t(1), error(Code::Aborted).with_message_part("already-in-error"))
        .call(t(0), Call::Shutdown, error(Code::Internal).with_message_part("Shutdown barrier has failed"))
}

fn a_reported_error_breaks_barriers() -> Script {
    let broken = || error(Code::Internal).of_barrier("b", 0).with_message_part("task is set to ERROR");
    script("a reported error breaks barriers", 3)
        .register_all_tasks()
        .start("poll", t(0), Call::PollForError)
        .start("0", t(0), Call::barrier("b", 0))
        .start("1", t(1), Call::barrier("b", 0))
        .start("others", t(0), Call::barrier_of("without 2", 0, &[0, 1]))
        .call(t(2), report_error_call(), ok())
        .expect_all(&["0", "1"], &broken())
        .expect_outcome("poll", reported_error(2))
        .expect_outcome("others", waits())
        .call(
            t(0),
            Call::barrier("later", 0),
            error(Code::Internal).of_barrier("later", 0).with_message_part("already in error"),
        )
        .call(t(1), Call::barrier_of("without 2", 0, &[0, 1]), ok().counter(0))
        .expect_outcome("others", ok().counter(0))
}

fn a_second_report_does_not_replace_the_first() -> Script {
    script("a second report does not replace the first", 3)
        .register_all_tasks()
        .start("0", t(0), Call::PollForError)
        .call(t(1), report_error_call(), ok())
        .expect_outcome("0", reported_error(1))
        .call(t(2), Call::report(Code::Internal as i32, "me too"), ok())
        .call(t(0), Call::PollForError, reported_error(1))
        .call(t(0), report_error_call(), ok())
        .call(t(0), report_error_call(), error(Code::FailedPrecondition))
        .call(
            t(0),
            Call::PollForError,
            error(Code::FailedPrecondition).with_message_part("already in error state"),
        )
}

fn reports_of_those_who_take_no_part_are_refused() -> Script {
    script("reports of those who take no part are refused", 2)
        .start("look", observer(), ScriptCall::Watch(TaskStatesVersion::None))
        .call(t(0), report_error_call(), error(Code::FailedPrecondition))
        .register_all_tasks()
        .start("poll", t(0), Call::PollForError)
        .call(t(2), report_error_call(), error(Code::InvalidArgument))
        .call(t(-3), report_error_call(), error(Code::InvalidArgument))
        .expect_outcome("poll", waits())
        .start("0", t(0), Call::Shutdown)
        .start("1", t(1), Call::Shutdown)
        .expect_all(&["0", "1"], &ok())
        .call(t(0), report_error_call(), error(Code::FailedPrecondition))
}

fn codes_that_nobody_knows_are_reported_as_they_are() -> Script {
    script("codes that nobody knows are reported as they are", 2)
        .register_all_tasks()
        .start("0", t(0), Call::PollForError)
        .call(t(1), Call::report(77, "seventy-seven"), ok())
        .expect_outcome(
            "0",
            error(Code::Unknown).about_task(1).reported_by_task().with_message_part("seventy-seven"),
        )
        .call(t(0), Call::report(-3, "minus three"), ok())
        .call(
            observer(),
            ScriptCall::Watch(TaskStatesVersion::None),
            ok().states(&[(0, ExpectedTaskState::Error), (1, ExpectedTaskState::Error)]),
        )
}

fn a_long_message_is_cut() -> Script {
    let long: String = "x".repeat(5000);
    script("a long message is cut", 2)
        .register_all_tasks()
        .start("0", t(0), Call::PollForError)
        .call(t(1), Call::report(Code::Internal as i32, &long), ok())
        .expect_outcome(
            "0",
            error(Code::Internal).about_task(1).reported_by_task().with_message_part(" ... [truncated]"),
        )
}

fn a_reported_error_never_heals() -> Script {
    script("a reported error never heals within its run", 2)
        .register_all_tasks()
        .start("0", t(0), Call::PollForError)
        .call(t(1), report_error_call(), ok())
        .expect_outcome("0", reported_error(1))
        .register_and_expect(t(1), error(Code::Aborted).about_task(1).with_message_part("already in error"))
        .call(t(0), Call::PollForError, reported_error(1))
}

fn in_a_recoverable_job_a_reported_error_is_the_tasks_own() -> Script {
    script("in a recoverable job a reported error is the task's own", 3)
        .recoverable()
        .register_all_tasks()
        .start("poll", t(0), Call::PollForError)
        .start("0", t(0), Call::barrier("b", 0))
        .start("1", t(1), Call::barrier("b", 0))
        .call(t(1), report_error_call(), ok())
        .expect_outcome("poll", waits())
        .call(
            observer(),
            ScriptCall::Watch(TaskStatesVersion::None),
            ok().states(&[
                (0, ExpectedTaskState::Connected),
                (1, ExpectedTaskState::Error),
                (2, ExpectedTaskState::Connected),
            ]),
        )
        .heartbeat(t(1), error(Code::Aborted).with_message_part("already-in-error"))
        .heartbeat(t(0), ok())
        .expect_outcome("0", waits())
        .call(
            t(0),
            Call::barrier("later", 0).within_ms(200),
            error(Code::DeadlineExceeded).of_barrier("later", 0),
        )
        .register_and_expect(t(1), error(Code::Aborted).about_task(1).with_message_part("already in error"))
        .restart(1)
        .register_and_expect(t(1), error(Code::Aborted).about_task(1).with_message_part("already in error"))
        .call(t(2), Call::Shutdown, ok())
        .call(t(0), Call::Shutdown, ok())
        .without_comparison_at_end()
}

fn a_report_without_a_code() -> Script {
    script("a report without a code", 2)
        .register_all_tasks()
        .start("poll", t(0), Call::PollForError)
        .call_differs(
            t(1),
            Call::report(0, "nothing"),
            Difference::ErrorWithoutCode,
            ExpectedOutcome::ServiceDied,
            error(Code::InvalidArgument),
        )
        .only_for_service(ServiceKind::Muster, Difference::ErrorWithoutCode, |script| {
            script
                .expect_outcome("poll", waits())
                .call(
                    observer(),
                    ScriptCall::Watch(TaskStatesVersion::None),
                    ok().states(&[(0, ExpectedTaskState::Connected), (1, ExpectedTaskState::Connected)]),
                )
                .heartbeat(t(1), ok())
        })
        .without_comparison_at_end()
}
