//! ShutdownTask.

use crate::differences::Difference;
use crate::expect::{Code, ExpectedOutcome, ExpectedTaskState, error, incarnation_mismatch_error, ok, waits};
use crate::script::{Release, Script, ScriptCall, ServiceKind, TaskStatesVersion, observer, script, t};
use crate::support::Call;

pub fn scripts(_: Release) -> Vec<Script> {
    vec![
        all_tasks_leave_together(),
        a_second_shutdown_of_a_task_takes_the_place_of_its_first(),
        strangers_cannot_shut_down(),
        a_task_that_does_not_come_fails_the_shutdown(),
        a_failed_task_fails_the_shutdown(),
        without_a_timeout_everybody_leaves_alone(),
        in_a_recoverable_job_everybody_leaves_alone(),
        what_waits_for_a_task_that_leaves(),
    ]
}

const LEFT: [(i32, ExpectedTaskState); 2] =
    [(0, ExpectedTaskState::Disconnected), (1, ExpectedTaskState::Disconnected)];

fn shutdown_failed_error() -> ExpectedOutcome {
    error(Code::Internal).with_message_part("Shutdown barrier has failed")
}

fn all_tasks_leave_together() -> Script {
    script("all tasks leave together", 2)
        .register_all_tasks()
        .start("poll 0", t(0), Call::PollForError)
        .start("poll 1", t(1), Call::PollForError)
        .start("wait for a key", t(0), Call::get("never"))
        .start("0", t(0), Call::Shutdown)
        .expect_outcome("0", waits())
        .expect_outcome("poll 0", waits())
        .heartbeat(t(0), ok())
        .start("1", t(1), Call::Shutdown)
        .expect_all(&["0", "1"], &ok())
        .expect_all(&["poll 0", "poll 1"], &error(Code::Cancelled).with_message_part("disconnected"))
        .call(observer(), ScriptCall::Watch(TaskStatesVersion::None), ok().states(&LEFT))
        .expect_outcome("wait for a key", waits())
}

fn a_second_shutdown_of_a_task_takes_the_place_of_its_first() -> Script {
    script("a second shutdown of a task", 2)
        .register_all_tasks()
        .start("first", t(0), Call::Shutdown)
        .start("second", t(0), Call::Shutdown)
        .expect_outcome("first", shutdown_failed_error().with_message_part("more recent"))
        .expect_outcome("second", waits())
        .call(t(1), Call::Shutdown, ok())
        .expect_outcome("second", ok())
}

fn strangers_cannot_shut_down() -> Script {
    script("strangers cannot shut down", 2)
        .register_all_tasks()
        .start("poll", t(0), Call::PollForError)
        .start("0", t(0), Call::Shutdown)
        .call(t(2), Call::Shutdown, shutdown_failed_error())
        .call(t(-1), Call::Shutdown, shutdown_failed_error())
        .expect_difference("0", Difference::Strangers, shutdown_failed_error(), waits())
        .expect_difference("poll", Difference::Strangers, shutdown_failed_error(), waits())
        .start("1", t(1), Call::Shutdown)
        .expect_difference("1", Difference::Strangers, shutdown_failed_error(), ok())
        .only_for_service(ServiceKind::Muster, Difference::Strangers, |script| {
            script.expect_outcome("0", ok())
        })
        .without_comparison_at_end()
}

fn a_task_that_does_not_come_fails_the_shutdown() -> Script {
    script("a task that does not come fails the shutdown", 2)
        .shutdown_timeout_s(1)
        .register_all_tasks()
        .start("poll", t(1), Call::PollForError)
        .call(t(0), Call::Shutdown, shutdown_failed_error())
        .expect_outcome("poll", error(Code::Internal).with_message_part("Shutdown barrier has failed"))
        .call(
            observer(),
            ScriptCall::Watch(TaskStatesVersion::None),
            ok().states(&[(0, ExpectedTaskState::Error), (1, ExpectedTaskState::Error)]),
        )
        .call(t(1), Call::Shutdown, shutdown_failed_error())
        .call(t(0), Call::Shutdown, shutdown_failed_error())
        .call(observer(), ScriptCall::Watch(TaskStatesVersion::None), ok().states(&LEFT))
}

fn a_failed_task_fails_the_shutdown() -> Script {
    script("a failed task fails the shutdown", 3)
        .register_all_tasks()
        .start("poll", t(0), Call::PollForError)
        .start("0", t(0), Call::Shutdown)
        .expect_outcome("0", waits())
        .call(t(1), Call::Heartbeat { incarnation: 4711 }, incarnation_mismatch_error())
        .expect_outcome("poll", shutdown_failed_error())
        .expect_outcome("0", shutdown_failed_error())
        .call(t(2), Call::Shutdown, shutdown_failed_error())
        .call(t(1), Call::Shutdown, shutdown_failed_error())
}

fn without_a_timeout_everybody_leaves_alone() -> Script {
    script("without a timeout everybody leaves alone", 2)
        .shutdown_timeout_s(0)
        .register_all_tasks()
        .start("poll 0", t(0), Call::PollForError)
        .start("poll 1", t(1), Call::PollForError)
        .call(t(0), Call::Shutdown, ok())
        .expect_outcome("poll 0", error(Code::Cancelled).with_message_part("disconnected"))
        .expect_outcome("poll 1", waits())
        .call(
            observer(),
            ScriptCall::Watch(TaskStatesVersion::None),
            ok().states(&[(0, ExpectedTaskState::Disconnected), (1, ExpectedTaskState::Connected)]),
        )
        .call(t(0), Call::Shutdown, error(Code::FailedPrecondition))
        .heartbeat(t(0), ok())
        .register_and_expect(t(0), ok())
        .call(t(1), Call::Shutdown, ok())
        .call(t(0), Call::Shutdown, ok())
}

fn in_a_recoverable_job_everybody_leaves_alone() -> Script {
    script("in a recoverable job everybody leaves alone", 2)
        .recoverable()
        .register_all_tasks()
        .start("poll 0", t(0), Call::PollForError)
        .start("poll 1", t(1), Call::PollForError)
        .call(t(0), Call::Shutdown, ok())
        .expect_outcome("poll 0", error(Code::Cancelled).with_message_part("disconnected"))
        .expect_outcome("poll 1", waits())
        .call(t(0), Call::Shutdown, error(Code::FailedPrecondition))
        // A task that has left may still call, for the time for which it could have been silent.
        .start("poll of one who left", t(0), Call::PollForError)
        .expect_outcome("poll of one who left", waits())
        .register_and_expect(t(0), ok())
        .call(
            observer(),
            ScriptCall::Watch(TaskStatesVersion::None),
            ok().states(&[(0, ExpectedTaskState::Connected), (1, ExpectedTaskState::Connected)]),
        )
}

fn what_waits_for_a_task_that_leaves() -> Script {
    script("barriers fail when a member leaves", 3)
        .shutdown_timeout_s(0)
        .register_all_tasks()
        .start("0", t(0), Call::barrier("b", 0))
        .start("1", t(1), Call::barrier("b", 0))
        .call(t(1), Call::Shutdown, ok())
        .expect_all(&["0", "1"], &error(Code::Internal).of_barrier("b", 0))
        .start("later", t(0), Call::barrier("c", 0).within_ms(100))
        .expect_outcome("later", error(Code::DeadlineExceeded).of_barrier("c", 0))
}
