//! Recoverable jobs.

use crate::differences::Difference;
use crate::expect::{Code, ExpectedTaskState, error, ok, waits};
use crate::script::{Release, Script, ScriptCall, ServiceKind, TaskStatesVersion, observer, script, t};
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

fn counter_mismatch_error(id: &'static str, counter: i64) -> crate::expect::ExpectedOutcome {
    error(Code::Cancelled).of_barrier(id, counter).with_message_part("Stale barrier invocation")
}

fn a_restarted_task_comes_back_at_once() -> Script {
    script("a restarted task comes back at once", 3)
        .recoverable()
        .register_all_tasks()
        .start("poll", t(0), Call::PollForError)
        .start("poll of the old life", t(2), Call::PollForError)
        .call(t(2), Call::insert("k", "v"), ok())
        .restart(2)
        .register_and_expect(t(2), ok())
        .heartbeat(t(2), ok())
        .expect_outcome("poll", waits())
        .call(t(2), Call::get("k"), ok().value("v"))
        .call(
            observer(),
            ScriptCall::Watch(TaskStatesVersion::None),
            ok().states(&[
                (0, ExpectedTaskState::Connected),
                (1, ExpectedTaskState::Connected),
                (2, ExpectedTaskState::Connected),
            ]),
        )
        .heartbeat(t(0), ok())
}

fn a_restarted_task_is_not_counted_where_it_waited() -> Script {
    script("a restarted task is not counted where it waited", 3)
        .recoverable()
        .register_all_tasks()
        .start("0", t(0), Call::barrier("b", 0))
        .start("old", t(1), Call::barrier("b", 0))
        .restart(1)
        .register_and_expect(t(1), ok())
        .expect_outcome("old", counter_mismatch_error("b", 0))
        .expect_outcome("0", waits())
        .start("new", t(1), Call::barrier("b", 0))
        .expect_all(&["0", "new"], &waits())
        .call(t(2), Call::barrier("b", 0), ok().counter(0))
        .expect_all(&["0", "new"], &ok().counter(0))
}

fn a_restarted_task_joins_what_is_going_on() -> Script {
    script("a restarted task joins the instance that is going on", 2)
        .recoverable()
        .register_all_tasks()
        .start("0 first", t(0), Call::barrier("b", 0))
        .call(t(1), Call::barrier("b", 0), ok().counter(0))
        .expect_outcome("0 first", ok().counter(0))
        .restart(1)
        .register_and_expect(t(1), ok())
        .start("0 second", t(0), Call::barrier("b", 1))
        .expect_outcome("0 second", waits())
        // It counts from 0, as a new process does, and learns the counter from the answer.
        .call(t(1), Call::barrier("b", 0), ok().counter(1))
        .expect_outcome("0 second", ok().counter(1))
        .start("1 third", t(1), Call::barrier("b", 2))
        .expect_outcome("1 third", waits())
        .call(t(0), Call::barrier("b", 2), ok().counter(2))
        .expect_outcome("1 third", ok().counter(2))
}

fn a_restarted_task_begins_the_next_use() -> Script {
    script("a restarted task begins the next use of a barrier", 2)
        .recoverable()
        .register_all_tasks()
        .start("0 first", t(0), Call::barrier("b", 0))
        .call(t(1), Call::barrier("b", 0), ok().counter(0))
        .expect_outcome("0 first", ok().counter(0))
        .restart(1)
        .register_and_expect(t(1), ok())
        .start("1 second", t(1), Call::barrier("b", 0))
        .expect_outcome("1 second", waits())
        .call(t(0), Call::barrier("b", 1), ok().counter(1))
        .expect_outcome("1 second", ok().counter(1))
}

fn a_silent_task_is_lost_alone() -> Script {
    let mut script = script("a silent task is lost alone", 2)
        .recoverable()
        .heartbeat_timeout_s(2)
        .register_all_tasks()
        .start("poll", t(0), Call::PollForError)
        .start("alive", t(0), Call::alive(&[0, 1]))
        .start("silent one's barrier", t(1), Call::barrier("b", 0))
        .start("barrier", t(0), Call::barrier("b", 0).within_ms(60_000));
    // Both tasks have arrived: the barrier passes before a task is lost.
    script = script.expect_all(&["barrier", "silent one's barrier"], &ok().counter(0));
    script = script.start("waits at the next", t(1), Call::barrier("b", 1));
    for _ in 0..8 {
        script = script.sleep_ms(500).heartbeat(t(0), ok());
    }
    script
        .expect_outcome("alive", ok().alive(&[(0, 0)]))
        .expect_outcome("poll", waits())
        .expect_outcome("waits at the next", counter_mismatch_error("b", 1))
        .call(
            observer(),
            ScriptCall::Watch(TaskStatesVersion::None),
            ok().states(&[(0, ExpectedTaskState::Connected), (1, ExpectedTaskState::Error)]),
        )
        .heartbeat(t(1), error(Code::Aborted).with_message_part("already-in-error"))
        .restart(1)
        .register_and_expect(t(1), ok())
        .heartbeat(t(1), ok())
        .heartbeat(t(0), ok())
        .start("alive again", t(0), Call::alive(&[0, 1]))
        .expect_outcome("alive again", waits())
        .call(t(1), Call::alive(&[0, 1]), ok().alive(&[(0, 0), (1, 1)]))
        .expect_outcome("alive again", ok().alive(&[(0, 0), (1, 1)]))
}

fn a_task_that_leaves_is_not_counted_where_it_waited() -> Script {
    script("a task that leaves is not counted where it waited", 3)
        .recoverable()
        .register_all_tasks()
        .start("0", t(0), Call::barrier("b", 0))
        .start("1", t(1), Call::barrier("b", 0))
        .call(t(1), Call::Shutdown, ok())
        .expect_outcome("1", counter_mismatch_error("b", 0))
        .expect_outcome("0", waits())
}

fn an_instance_that_everybody_left() -> Script {
    script("an instance that everybody left", 2)
        .recoverable()
        .register_all_tasks()
        .start("0", t(0), Call::barrier("b", 0))
        .call(t(0), Call::Shutdown, ok())
        .expect_outcome("0", counter_mismatch_error("b", 0))
        .call_differs(
            t(1),
            Call::cancel("b", 0),
            Difference::DesertedInstance,
            ok(),
            error(Code::FailedPrecondition).of_barrier("b", 0),
        )
        .without_comparison_at_end()
}

fn the_living_shrink_and_grow() -> Script {
    let all = [0, 1, 2];
    script("the living shrink and grow", 3)
        .recoverable()
        .register_all_tasks()
        .start("0", t(0), Call::alive(&all))
        .start("1", t(1), Call::alive(&all))
        .call(t(2), Call::Shutdown, ok())
        .expect_all(&["0", "1"], &ok().alive(&[(0, 0), (1, 0)]))
        .restart(2)
        .register_and_expect(t(2), ok())
        .start("0 again", t(0), Call::alive(&all))
        .start("1 again", t(1), Call::alive(&all))
        .expect_outcome("1 again", waits())
        .call(t(2), Call::alive(&all), ok().alive(&[(0, 0), (1, 0), (2, 1)]))
        .expect_all(&["0 again", "1 again"], &ok().alive(&[(0, 0), (1, 0), (2, 1)]))
}

fn a_counter_that_is_wrong_still_fails_all() -> Script {
    script("a counter that is wrong still fails all in a recoverable job", 2)
        .recoverable()
        .register_all_tasks()
        .start("0 first", t(0), Call::barrier("b", 0))
        .call(t(1), Call::barrier("b", 0), ok().counter(0))
        .expect_outcome("0 first", ok().counter(0))
        .start("0 second", t(0), Call::barrier("b", 1))
        .call(t(1), Call::barrier("b", 5), error(Code::Internal).of_barrier("b", 1))
        .expect_outcome("0 second", error(Code::Internal).of_barrier("b", 1))
}

fn an_older_life_is_fenced() -> Script {
    script("an older life is fenced in a recoverable job", 2)
        .recoverable()
        .register_all_tasks()
        .start("poll of the old life", t(1), Call::PollForError)
        .start("question of the old life", t(1), Call::alive(&[0, 1]))
        .restart(1)
        .register_and_expect(t(1), ok())
        .expect_difference("poll of the old life", Difference::FencedLife, waits(), error(Code::Aborted))
        .expect_difference("question of the old life", Difference::FencedLife, waits(), error(Code::Aborted))
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
        .expect_difference("old", Difference::FencedLife, ok().counter(0), error(Code::Aborted))
        .only_for_service(ServiceKind::Muster, Difference::FencedLife, |script| {
            script
                .expect_outcome("0", waits())
                .call(t(1), Call::barrier("b", 0), ok().counter(0))
                .expect_outcome("0", ok().counter(0))
        })
        .without_comparison_at_end()
}

fn an_instance_that_a_restart_missed_does_not_need_it() -> Script {
    script("an instance that a restart missed does not need it", 3)
        .recoverable()
        .register_all_tasks()
        .start("0", t(0), Call::barrier("end", 0).within_ms(500))
        .start("1", t(1), Call::barrier("end", 0))
        .expect_all(&["0", "1"], &waits())
        .restart(2)
        .register_and_expect(t(2), ok())
        .expect_difference(
            "0",
            Difference::MissedInstance,
            error(Code::DeadlineExceeded).of_barrier("end", 0),
            ok().counter(0),
        )
        .expect_difference(
            "1",
            Difference::MissedInstance,
            error(Code::DeadlineExceeded).of_barrier("end", 0),
            ok().counter(0),
        )
        .without_comparison_at_end()
}

fn tasks_out_of_step_meet_again() -> Script {
    script("tasks out of step meet again", 3)
        .recoverable()
        .register_all_tasks()
        .restart(2)
        .register_and_expect(t(2), ok())
        // The restarted task is at the beginning of its loop, the others arrive at its end.
        .start("2 begins", t(2), Call::barrier("begin", 0))
        .start("0 ends", t(0), Call::barrier("end", 0).within_ms(500))
        .expect_outcome("0 ends", waits())
        .start("1 ends", t(1), Call::barrier("end", 0))
        .expect_difference(
            "0 ends",
            Difference::UnsyncedRestart,
            error(Code::DeadlineExceeded).of_barrier("end", 0),
            ok().counter(0),
        )
        .expect_difference(
            "1 ends",
            Difference::UnsyncedRestart,
            error(Code::DeadlineExceeded).of_barrier("end", 0),
            ok().counter(0),
        )
        .expect_outcome("2 begins", waits())
        .start("0 begins", t(0), Call::barrier("begin", 0))
        .start("1 begins", t(1), Call::barrier("begin", 0))
        .expect_all(&["0 begins", "1 begins", "2 begins"], &ok().counter(0))
}
