//! The next run, after a run has ended.

use crate::differences::Difference;
use crate::expect::{Code, State, error, ok, waits};
use crate::script::{Release, Script, ScriptCall, SideKind, Version, observer, script, t};
use crate::support::Call;

pub fn scripts(_: Release) -> Vec<Script> {
    vec![a_failed_run_is_followed_by_another(), a_completed_run_is_followed_by_another(), a_lost_connection()]
}

fn a_failed_run_is_followed_by_another() -> Script {
    let restarted = || error(Code::Aborted).about_task(1).says("different incarnation");
    script("a failed run is followed by another", 2)
        .registered()
        .start("poll", t(0), Call::PollForError)
        .call(t(0), Call::insert("k", "of the first run"), ok())
        .restart(1)
        // The restart that ends the run gets the usual error; its client retries.
        .registers(t(1), restarted())
        .then("poll", restarted())
        .start_register("1 tries again", t(1))
        .differs(
            "1 tries again",
            Difference::NextRun,
            error(Code::Aborted).about_task(1).says("already in error"),
            waits(),
        )
        .restart(0)
        .start_register("0 restarted", t(0))
        .differs("0 restarted", Difference::NextRun, error(Code::Aborted).about_task(0), ok())
        .only(SideKind::Muster, Difference::NextRun, |script| {
            script
                .then("1 tries again", ok())
                .call(t(0), Call::try_get("k"), error(Code::NotFound))
                .start("0", t(0), Call::barrier("b", 0))
                .call(t(1), Call::barrier("b", 0), ok().counter(0))
                .then("0", ok().counter(0))
                .call(
                    observer(),
                    ScriptCall::Watch(Version::None),
                    ok().states(&[(0, State::Connected), (1, State::Connected)]),
                )
        })
        .parted()
}

fn a_completed_run_is_followed_by_another() -> Script {
    script("a completed run is followed by another", 2)
        .registered()
        .call(t(0), Call::insert("k", "of the first run"), ok())
        .start("0 leaves", t(0), Call::Shutdown)
        .start("1 leaves", t(1), Call::Shutdown)
        .all(&["0 leaves", "1 leaves"], &ok())
        .restart(0)
        .restart(1)
        .start_register("0", t(0))
        .differs("0", Difference::NextRun, ok(), waits())
        .start_register("1", t(1))
        // Under another service incarnation than before, or under the old one.
        .differs("0", Difference::NextRun, ok(), ok())
        .differs("1", Difference::NextRun, ok(), ok())
        .start("look", t(0), Call::try_get("k"))
        .differs("look", Difference::NextRun, ok().value("of the first run"), error(Code::NotFound))
        .parted()
}

fn a_lost_connection() -> Script {
    let lost = || error(Code::Unavailable);
    script("a connection that ends under a held poll", 2)
        .heeding_connections()
        .registered()
        .start("poll 0", t(0), Call::PollForError)
        .start("poll 1", t(1), Call::PollForError)
        .disconnect(t(1))
        .differs("poll 0", Difference::LostConnection, waits(), lost())
        .start("states", observer(), ScriptCall::Watch(Version::None))
        .differs(
            "states",
            Difference::LostConnection,
            ok().states(&[(0, State::Connected), (1, State::Connected)]),
            ok().states(&[(0, State::Connected), (1, State::Error)]),
        )
        .parted()
}
