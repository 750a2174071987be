//! The next run, after a run has ended.

use crate::differences::Difference;
use crate::expect::{Code, ExpectedTaskState, error, ok, waits};
use crate::script::{Release, Script, ScriptCall, ServiceKind, TaskStatesVersion, observer, script, t};
use crate::support::Call;

pub fn scripts(_: Release) -> Vec<Script> {
    vec![a_failed_run_is_followed_by_another(), a_completed_run_is_followed_by_another(), a_lost_connection()]
}

fn a_failed_run_is_followed_by_another() -> Script {
    let restarted = || error(Code::Aborted).about_task(1).with_message_part("different incarnation");
    script("a failed run is followed by another", 2)
        .register_all_tasks()
        .start("poll", t(0), Call::PollForError)
        .call(t(0), Call::insert("k", "of the first run"), ok())
        .restart(1)
        // The restart that ends the run gets the usual error; its client retries.
        .register_and_expect(t(1), restarted())
        .expect_outcome("poll", restarted())
        .start_register("1 tries again", t(1))
        .expect_difference(
            "1 tries again",
            Difference::NextRun,
            error(Code::Aborted).about_task(1).with_message_part("already in error"),
            waits(),
        )
        .restart(0)
        .start_register("0 restarted", t(0))
        .expect_difference("0 restarted", Difference::NextRun, error(Code::Aborted).about_task(0), ok())
        .only_for_service(ServiceKind::Muster, Difference::NextRun, |script| {
            script
                .expect_outcome("1 tries again", ok())
                .call(t(0), Call::try_get("k"), error(Code::NotFound))
                .start("0", t(0), Call::barrier("b", 0))
                .call(t(1), Call::barrier("b", 0), ok().counter(0))
                .expect_outcome("0", ok().counter(0))
                .call(
                    observer(),
                    ScriptCall::Watch(TaskStatesVersion::None),
                    ok().states(&[(0, ExpectedTaskState::Connected), (1, ExpectedTaskState::Connected)]),
                )
        })
        .without_comparison_at_end()
}

fn a_completed_run_is_followed_by_another() -> Script {
    script("a completed run is followed by another", 2)
        .register_all_tasks()
        .call(t(0), Call::insert("k", "of the first run"), ok())
        .start("0 leaves", t(0), Call::Shutdown)
        .start("1 leaves", t(1), Call::Shutdown)
        .expect_all(&["0 leaves", "1 leaves"], &ok())
        .restart(0)
        .restart(1)
        .start_register("0", t(0))
        .expect_difference("0", Difference::NextRun, ok(), waits())
        .start_register("1", t(1))
        // Under another service incarnation than before, or under the old one.
        .expect_difference("0", Difference::NextRun, ok(), ok())
        .expect_difference("1", Difference::NextRun, ok(), ok())
        .start("look", t(0), Call::try_get("k"))
        .expect_difference("look", Difference::NextRun, ok().value("of the first run"), error(Code::NotFound))
        .without_comparison_at_end()
}

fn a_lost_connection() -> Script {
    let lost = || error(Code::Unavailable);
    script("a connection that ends under a held poll", 2)
        .detecting_lost_connections()
        .register_all_tasks()
        .start("poll 0", t(0), Call::PollForError)
        .start("poll 1", t(1), Call::PollForError)
        .disconnect(t(1))
        .expect_difference("poll 0", Difference::LostConnection, waits(), lost())
        .start("states", observer(), ScriptCall::Watch(TaskStatesVersion::None))
        .expect_difference(
            "states",
            Difference::LostConnection,
            ok().states(&[(0, ExpectedTaskState::Connected), (1, ExpectedTaskState::Connected)]),
            ok().states(&[(0, ExpectedTaskState::Connected), (1, ExpectedTaskState::Error)]),
        )
        .without_comparison_at_end()
}
