//! Recoverable jobs.

use crate::differences::Difference;
use crate::expect::{Code, State, error, ok, waits};
use crate::script::{Release, Script, ScriptCall, SideKind, Version, observer, script, t};
use crate::support::Call;

pub fn scripts(_: Release) -> Vec<Script> {
    vec![
        a_restarted_task_comes_back_at_once(),
        a_restarted_task_is_not_counted_where_it_waited(),
        a_restarted_task_joins_what_is_going_on(),
        a_restarted_task_begins_the_next_use(),
        a_silent_task_is_lost_alone(),
        a_task_that_leaves_is_not_counted_where_it_waited(),
        an_instance_that_everybody_left(),
        the_living_shrink_and_grow(),
        a_counter_that_is_wrong_still_fails_all(),
        an_older_life_is_fenced(),
        an_instance_that_a_restart_missed_does_not_need_it(),
        tasks_out_of_step_meet_again(),
    ]
}

fn stale(id: &'static str, counter: i64) -> crate::expect::Outcome {
    error(Code::Cancelled).of_barrier(id, counter).says("Stale barrier invocation")
}

fn a_restarted_task_comes_back_at_once() -> Script {
    script("a restarted task comes back at once", 3)
        .recoverable()
        .registered()
        .start("poll", t(0), Call::PollForError)
        .start("poll of the old life", t(2), Call::PollForError)
        .call(t(2), Call::insert("k", "v"), ok())
        .restart(2)
        .registers(t(2), ok())
        .heartbeat(t(2), ok())
        .then("poll", waits())
        .call(t(2), Call::get("k"), ok().value("v"))
        .call(
            observer(),
            ScriptCall::Watch(Version::None),
            ok().states(&[(0, State::Connected), (1, State::Connected), (2, State::Connected)]),
        )
        .heartbeat(t(0), ok())
}

fn a_restarted_task_is_not_counted_where_it_waited() -> Script {
    script("a restarted task is not counted where it waited", 3)
        .recoverable()
        .registered()
        .start("0", t(0), Call::barrier("b", 0))
        .start("old", t(1), Call::barrier("b", 0))
        .restart(1)
        .registers(t(1), ok())
        .then("old", stale("b", 0))
        .then("0", waits())
        .start("new", t(1), Call::barrier("b", 0))
        .all(&["0", "new"], &waits())
        .call(t(2), Call::barrier("b", 0), ok().counter(0))
        .all(&["0", "new"], &ok().counter(0))
}

fn a_restarted_task_joins_what_is_going_on() -> Script {
    script("a restarted task joins the instance that is going on", 2)
        .recoverable()
        .registered()
        .start("0 first", t(0), Call::barrier("b", 0))
        .call(t(1), Call::barrier("b", 0), ok().counter(0))
        .then("0 first", ok().counter(0))
        .restart(1)
        .registers(t(1), ok())
        .start("0 second", t(0), Call::barrier("b", 1))
        .then("0 second", waits())
        // It counts from 0, as a new process does, and learns the counter from the answer.
        .call(t(1), Call::barrier("b", 0), ok().counter(1))
        .then("0 second", ok().counter(1))
        .start("1 third", t(1), Call::barrier("b", 2))
        .then("1 third", waits())
        .call(t(0), Call::barrier("b", 2), ok().counter(2))
        .then("1 third", ok().counter(2))
}

fn a_restarted_task_begins_the_next_use() -> Script {
    script("a restarted task begins the next use of a barrier", 2)
        .recoverable()
        .registered()
        .start("0 first", t(0), Call::barrier("b", 0))
        .call(t(1), Call::barrier("b", 0), ok().counter(0))
        .then("0 first", ok().counter(0))
        .restart(1)
        .registers(t(1), ok())
        .start("1 second", t(1), Call::barrier("b", 0))
        .then("1 second", waits())
        .call(t(0), Call::barrier("b", 1), ok().counter(1))
        .then("1 second", ok().counter(1))
}

fn a_silent_task_is_lost_alone() -> Script {
    let mut script = script("a silent task is lost alone", 2)
        .recoverable()
        .heartbeat_timeout_s(2)
        .registered()
        .start("poll", t(0), Call::PollForError)
        .start("alive", t(0), Call::alive(&[0, 1]))
        .start("silent one's barrier", t(1), Call::barrier("b", 0))
        .start("barrier", t(0), Call::barrier("b", 0).within_ms(60_000));
    // Both tasks have arrived: the barrier passes before a task is lost.
    script = script.all(&["barrier", "silent one's barrier"], &ok().counter(0));
    script = script.start("waits at the next", t(1), Call::barrier("b", 1));
    for _ in 0..8 {
        script = script.sleep_ms(500).heartbeat(t(0), ok());
    }
    script
        .then("alive", ok().alive(&[(0, 0)]))
        .then("poll", waits())
        .then("waits at the next", stale("b", 1))
        .call(
            observer(),
            ScriptCall::Watch(Version::None),
            ok().states(&[(0, State::Connected), (1, State::Error)]),
        )
        .heartbeat(t(1), error(Code::Aborted).says("already-in-error"))
        .restart(1)
        .registers(t(1), ok())
        .heartbeat(t(1), ok())
        .heartbeat(t(0), ok())
        .start("alive again", t(0), Call::alive(&[0, 1]))
        .then("alive again", waits())
        .call(t(1), Call::alive(&[0, 1]), ok().alive(&[(0, 0), (1, 1)]))
        .then("alive again", ok().alive(&[(0, 0), (1, 1)]))
}

fn a_task_that_leaves_is_not_counted_where_it_waited() -> Script {
    script("a task that leaves is not counted where it waited", 3)
        .recoverable()
        .registered()
        .start("0", t(0), Call::barrier("b", 0))
        .start("1", t(1), Call::barrier("b", 0))
        .call(t(1), Call::Shutdown, ok())
        .then("1", stale("b", 0))
        .then("0", waits())
}

fn an_instance_that_everybody_left() -> Script {
    script("an instance that everybody left", 2)
        .recoverable()
        .registered()
        .start("0", t(0), Call::barrier("b", 0))
        .call(t(0), Call::Shutdown, ok())
        .then("0", stale("b", 0))
        .call_differs(
            t(1),
            Call::cancel("b", 0),
            Difference::DesertedInstance,
            ok(),
            error(Code::FailedPrecondition).of_barrier("b", 0),
        )
        .parted()
}

fn the_living_shrink_and_grow() -> Script {
    let all = [0, 1, 2];
    script("the living shrink and grow", 3)
        .recoverable()
        .registered()
        .start("0", t(0), Call::alive(&all))
        .start("1", t(1), Call::alive(&all))
        .call(t(2), Call::Shutdown, ok())
        .all(&["0", "1"], &ok().alive(&[(0, 0), (1, 0)]))
        .restart(2)
        .registers(t(2), ok())
        .start("0 again", t(0), Call::alive(&all))
        .start("1 again", t(1), Call::alive(&all))
        .then("1 again", waits())
        .call(t(2), Call::alive(&all), ok().alive(&[(0, 0), (1, 0), (2, 1)]))
        .all(&["0 again", "1 again"], &ok().alive(&[(0, 0), (1, 0), (2, 1)]))
}

fn a_counter_that_is_wrong_still_fails_all() -> Script {
    script("a counter that is wrong still fails all in a recoverable job", 2)
        .recoverable()
        .registered()
        .start("0 first", t(0), Call::barrier("b", 0))
        .call(t(1), Call::barrier("b", 0), ok().counter(0))
        .then("0 first", ok().counter(0))
        .start("0 second", t(0), Call::barrier("b", 1))
        .call(t(1), Call::barrier("b", 5), error(Code::Internal).of_barrier("b", 1))
        .then("0 second", error(Code::Internal).of_barrier("b", 1))
}

fn an_older_life_is_fenced() -> Script {
    script("an older life is fenced in a recoverable job", 2)
        .recoverable()
        .registered()
        .start("poll of the old life", t(1), Call::PollForError)
        .start("question of the old life", t(1), Call::alive(&[0, 1]))
        .restart(1)
        .registers(t(1), ok())
        .differs("poll of the old life", Difference::FencedLife, waits(), error(Code::Aborted))
        .differs("question of the old life", Difference::FencedLife, waits(), error(Code::Aborted))
        .call_differs(
            t(1).life(0),
            Call::Heartbeat { incarnation: crate::script::incarnation(1, 0) },
            Difference::FencedLife,
            ok(),
            error(Code::Aborted),
        )
        .heartbeat(t(1), ok())
        // An unknown incarnation is not an older one.
        .call(t(1), Call::Heartbeat { incarnation: 4711 }, ok())
        .start("0", t(0), Call::barrier("b", 0))
        .start("old", t(1).life(0), Call::barrier("b", 0))
        .differs("old", Difference::FencedLife, ok().counter(0), error(Code::Aborted))
        .only(SideKind::Muster, Difference::FencedLife, |script| {
            script
                .then("0", waits())
                .call(t(1), Call::barrier("b", 0), ok().counter(0))
                .then("0", ok().counter(0))
        })
        .parted()
}

fn an_instance_that_a_restart_missed_does_not_need_it() -> Script {
    script("an instance that a restart missed does not need it", 3)
        .recoverable()
        .registered()
        .start("0", t(0), Call::barrier("end", 0).within_ms(500))
        .start("1", t(1), Call::barrier("end", 0))
        .all(&["0", "1"], &waits())
        .restart(2)
        .registers(t(2), ok())
        .differs(
            "0",
            Difference::MissedInstance,
            error(Code::DeadlineExceeded).of_barrier("end", 0),
            ok().counter(0),
        )
        .differs(
            "1",
            Difference::MissedInstance,
            error(Code::DeadlineExceeded).of_barrier("end", 0),
            ok().counter(0),
        )
        .parted()
}

fn tasks_out_of_step_meet_again() -> Script {
    script("tasks out of step meet again", 3)
        .recoverable()
        .registered()
        .restart(2)
        .registers(t(2), ok())
        // The restarted task is at the beginning of its loop, the others arrive at its end.
        .start("2 begins", t(2), Call::barrier("begin", 0))
        .start("0 ends", t(0), Call::barrier("end", 0).within_ms(500))
        .then("0 ends", waits())
        .start("1 ends", t(1), Call::barrier("end", 0))
        .differs(
            "0 ends",
            Difference::UnsyncedRestart,
            error(Code::DeadlineExceeded).of_barrier("end", 0),
            ok().counter(0),
        )
        .differs(
            "1 ends",
            Difference::UnsyncedRestart,
            error(Code::DeadlineExceeded).of_barrier("end", 0),
            ok().counter(0),
        )
        .then("2 begins", waits())
        .start("0 begins", t(0), Call::barrier("begin", 0))
        .start("1 begins", t(1), Call::barrier("begin", 0))
        .all(&["0 begins", "1 begins", "2 begins"], &ok().counter(0))
}
