//! ShutdownTask.

use crate::differences::Difference;
use crate::expect::{Code, Outcome, State, another_life, error, ok, waits};
use crate::script::{Release, Script, ScriptCall, SideKind, Version, observer, script, t};
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

const LEFT: [(i32, State); 2] = [(0, State::Disconnected), (1, State::Disconnected)];

fn failed() -> Outcome {
    error(Code::Internal).says("Shutdown barrier has failed")
}

fn all_tasks_leave_together() -> Script {
    script("all tasks leave together", 2)
        .registered()
        .start("poll 0", t(0), Call::PollForError)
        .start("poll 1", t(1), Call::PollForError)
        .start("wait for a key", t(0), Call::get("never"))
        .start("0", t(0), Call::Shutdown)
        .then("0", waits())
        .then("poll 0", waits())
        .heartbeat(t(0), ok())
        .start("1", t(1), Call::Shutdown)
        .all(&["0", "1"], &ok())
        .all(&["poll 0", "poll 1"], &error(Code::Cancelled).says("disconnected"))
        .call(observer(), ScriptCall::Watch(Version::None), ok().states(&LEFT))
        .then("wait for a key", waits())
}

fn a_second_shutdown_of_a_task_takes_the_place_of_its_first() -> Script {
    script("a second shutdown of a task", 2)
        .registered()
        .start("first", t(0), Call::Shutdown)
        .start("second", t(0), Call::Shutdown)
        .then("first", failed().says("more recent"))
        .then("second", waits())
        .call(t(1), Call::Shutdown, ok())
        .then("second", ok())
}

fn strangers_cannot_shut_down() -> Script {
    script("strangers cannot shut down", 2)
        .registered()
        .start("poll", t(0), Call::PollForError)
        .start("0", t(0), Call::Shutdown)
        .call(t(2), Call::Shutdown, failed())
        .call(t(-1), Call::Shutdown, failed())
        .differs("0", Difference::Strangers, failed(), waits())
        .differs("poll", Difference::Strangers, failed(), waits())
        .start("1", t(1), Call::Shutdown)
        .differs("1", Difference::Strangers, failed(), ok())
        .only(SideKind::Muster, Difference::Strangers, |script| script.then("0", ok()))
        .parted()
}

fn a_task_that_does_not_come_fails_the_shutdown() -> Script {
    script("a task that does not come fails the shutdown", 2)
        .shutdown_timeout_s(1)
        .registered()
        .start("poll", t(1), Call::PollForError)
        .call(t(0), Call::Shutdown, failed())
        .then("poll", error(Code::Internal).says("Shutdown barrier has failed"))
        .call(
            observer(),
            ScriptCall::Watch(Version::None),
            ok().states(&[(0, State::Error), (1, State::Error)]),
        )
        .call(t(1), Call::Shutdown, failed())
        .call(t(0), Call::Shutdown, failed())
        .call(observer(), ScriptCall::Watch(Version::None), ok().states(&LEFT))
}

fn a_failed_task_fails_the_shutdown() -> Script {
    script("a failed task fails the shutdown", 3)
        .registered()
        .start("poll", t(0), Call::PollForError)
        .start("0", t(0), Call::Shutdown)
        .then("0", waits())
        .call(t(1), Call::Heartbeat { incarnation: 4711 }, another_life())
        .then("poll", failed())
        .then("0", failed())
        .call(t(2), Call::Shutdown, failed())
        .call(t(1), Call::Shutdown, failed())
}

fn without_a_timeout_everybody_leaves_alone() -> Script {
    script("without a timeout everybody leaves alone", 2)
        .shutdown_timeout_s(0)
        .registered()
        .start("poll 0", t(0), Call::PollForError)
        .start("poll 1", t(1), Call::PollForError)
        .call(t(0), Call::Shutdown, ok())
        .then("poll 0", error(Code::Cancelled).says("disconnected"))
        .then("poll 1", waits())
        .call(
            observer(),
            ScriptCall::Watch(Version::None),
            ok().states(&[(0, State::Disconnected), (1, State::Connected)]),
        )
        .call(t(0), Call::Shutdown, error(Code::FailedPrecondition))
        .heartbeat(t(0), ok())
        .registers(t(0), ok())
        .call(t(1), Call::Shutdown, ok())
        .call(t(0), Call::Shutdown, ok())
}

fn in_a_recoverable_job_everybody_leaves_alone() -> Script {
    script("in a recoverable job everybody leaves alone", 2)
        .recoverable()
        .registered()
        .start("poll 0", t(0), Call::PollForError)
        .start("poll 1", t(1), Call::PollForError)
        .call(t(0), Call::Shutdown, ok())
        .then("poll 0", error(Code::Cancelled).says("disconnected"))
        .then("poll 1", waits())
        .call(t(0), Call::Shutdown, error(Code::FailedPrecondition))
        // A task that has left may still call, for the time for which it could have been silent.
        .start("poll of one who left", t(0), Call::PollForError)
        .then("poll of one who left", waits())
        .registers(t(0), ok())
        .call(
            observer(),
            ScriptCall::Watch(Version::None),
            ok().states(&[(0, State::Connected), (1, State::Connected)]),
        )
}

fn what_waits_for_a_task_that_leaves() -> Script {
    script("barriers fail when a member leaves", 3)
        .shutdown_timeout_s(0)
        .registered()
        .start("0", t(0), Call::barrier("b", 0))
        .start("1", t(1), Call::barrier("b", 0))
        .call(t(1), Call::Shutdown, ok())
        .all(&["0", "1"], &error(Code::Internal).of_barrier("b", 0))
        .start("later", t(0), Call::barrier("c", 0).within_ms(100))
        .then("later", error(Code::DeadlineExceeded).of_barrier("c", 0))
}
