//! Heartbeat, and what follows when heartbeats are missing.

use crate::expect::{Code, ExpectedTaskState, error, incarnation_mismatch_error, ok, waits};
use crate::script::{Release, Script, ScriptCall, TaskStatesVersion, observer, script, t};
use crate::support::Call;

pub fn scripts(_: Release) -> Vec<Script> {
    vec![
        heartbeats_of_strangers_are_refused(),
        a_heartbeat_before_registration_is_refused(),
        a_heartbeat_of_another_life_fails_the_run(),
        a_silent_task_fails_the_run(),
        a_silent_task_does_not_fail_those_who_speak_in_time(),
        a_failed_run_without_polls_sets_every_task_to_error(),
        heartbeats_after_the_shutdown_are_forgiven_for_a_while(),
        heartbeats_long_after_the_shutdown_are_refused(),
    ]
}

fn heartbeats_of_strangers_are_refused() -> Script {
    script("heartbeats of strangers are refused", 2)
        .register_all_tasks()
        .heartbeat(t(2), error(Code::InvalidArgument))
        .heartbeat(t(-1), error(Code::InvalidArgument))
        .heartbeat(t(0), ok())
        .heartbeat(t(1), ok())
}

fn a_heartbeat_before_registration_is_refused() -> Script {
    script("a heartbeat before registration is refused", 2)
        // Learns the service incarnation, where it is needed.
        .start("look", observer(), ScriptCall::Watch(TaskStatesVersion::None))
        .heartbeat(
            t(0),
            error(Code::InvalidArgument).with_message_part("must be registered before sending heartbeat"),
        )
        .start_register("0", t(0))
        .expect_outcome("0", waits())
        .heartbeat(
            t(0),
            error(Code::InvalidArgument).with_message_part("must be registered before sending heartbeat"),
        )
        .expect_outcome("0", waits())
        .register_and_expect(t(1), ok())
        .expect_outcome("0", ok())
        .heartbeat(t(0), ok())
}

fn a_heartbeat_of_another_life_fails_the_run() -> Script {
    script("a heartbeat of another life fails the run", 2)
        .register_all_tasks()
        .start("poll 0", t(0), Call::PollForError)
        .start("poll 1", t(1), Call::PollForError)
        .call(t(1), Call::Heartbeat { incarnation: 4711 }, incarnation_mismatch_error())
        .expect_all(&["poll 0", "poll 1"], &incarnation_mismatch_error())
        .heartbeat(t(1), error(Code::Aborted).with_message_part("already-in-error"))
        .heartbeat(t(0), ok())
}

fn a_silent_task_fails_the_run() -> Script {
    let mut script = script("a silent task fails the run", 2)
        .heartbeat_timeout_s(2)
        .register_all_tasks()
        .start("poll 0", t(0), Call::PollForError)
        .start("poll 1", t(1), Call::PollForError)
        .start("barrier", t(0), Call::barrier("b", 0));
    for _ in 0..8 {
        script = script.sleep_ms(500).heartbeat(t(0), ok());
    }
    let unhealthy = || error(Code::Unavailable).with_message_part("unhealthy (stopped sending heartbeats)");
    script
        .expect_all(&["poll 0", "poll 1"], &unhealthy())
        .expect_outcome(
            "barrier",
            error(Code::Internal).of_barrier("b", 0).with_message_part("task is set to ERROR"),
        )
        .heartbeat(t(1), error(Code::Aborted).with_message_part("already-in-error"))
        .call(t(0), Call::PollForError, unhealthy())
        .call(
            t(1),
            Call::PollForError,
            error(Code::FailedPrecondition).with_message_part("already in error state"),
        )
        .call(
            t(0),
            Call::barrier("c", 0),
            error(Code::Internal).of_barrier("c", 0).with_message_part("already in error"),
        )
        .call(
            observer(),
            ScriptCall::Watch(TaskStatesVersion::None),
            ok().states(&[(0, ExpectedTaskState::Connected), (1, ExpectedTaskState::Error)]),
        )
        .heartbeat(t(0), ok())
}

fn a_silent_task_does_not_fail_those_who_speak_in_time() -> Script {
    let mut script = script("tasks that speak in time are not taken for dead", 2)
        .heartbeat_timeout_s(2)
        .register_all_tasks()
        .start("poll", t(0), Call::PollForError);
    for _ in 0..7 {
        script = script.sleep_ms(500).heartbeat(t(0), ok()).heartbeat(t(1), ok());
    }
    script.expect_outcome("poll", waits()).call(
        observer(),
        ScriptCall::Watch(TaskStatesVersion::None),
        ok().states(&[(0, ExpectedTaskState::Connected), (1, ExpectedTaskState::Connected)]),
    )
}

fn a_failed_run_without_polls_sets_every_task_to_error() -> Script {
    script("a failed run without polls sets every task to error", 3)
        .register_all_tasks()
        .call(t(1), Call::Heartbeat { incarnation: 4711 }, incarnation_mismatch_error())
        .call(
            observer(),
            ScriptCall::Watch(TaskStatesVersion::None),
            ok().states(&[
                (0, ExpectedTaskState::Error),
                (1, ExpectedTaskState::Error),
                (2, ExpectedTaskState::Error),
            ]),
        )
        .heartbeat(t(0), error(Code::Aborted).with_message_part("already-in-error"))
}

fn heartbeats_after_the_shutdown_are_forgiven_for_a_while() -> Script {
    script("heartbeats after the shutdown are forgiven for a while", 2)
        .register_all_tasks()
        .start("0", t(0), Call::Shutdown)
        .start("1", t(1), Call::Shutdown)
        .expect_all(&["0", "1"], &ok())
        .heartbeat(t(0), ok())
        .heartbeat(t(1), ok())
}

fn heartbeats_long_after_the_shutdown_are_refused() -> Script {
    let mut script = script("heartbeats long after the shutdown are refused", 2)
        .heartbeat_timeout_s(2)
        .shutdown_timeout_s(0)
        .register_all_tasks()
        .call(t(0), Call::Shutdown, ok())
        .heartbeat(t(0), ok());
    for _ in 0..8 {
        script = script.sleep_ms(500).heartbeat(t(1), ok());
    }
    script
        .heartbeat(
            t(0),
            error(Code::InvalidArgument).with_message_part("must be registered before sending heartbeat"),
        )
        .call(t(0), Call::PollForError, error(Code::FailedPrecondition))
        .heartbeat(t(1), ok())
        .register_and_expect(t(0), ok())
        .heartbeat(t(0), ok())
        .heartbeat(t(1), ok())
}
