//! Barrier and CancelBarrier in fate-sharing jobs.

use crate::differences::Difference;
use crate::expect::{Code, error, ok, plain_error, waits};
use crate::script::{Release, Script, ServiceKind, script, t};
use crate::support::Call;

pub fn scripts(_: Release) -> Vec<Script> {
    vec![
        all_must_come(),
        an_id_is_used_again(),
        a_call_repeated_after_the_end_gets_the_same_answer(),
        a_call_repeated_while_it_waits_replaces_the_first(),
        a_wrong_counter_fails_the_instance_for_all(),
        a_task_that_counts_on_while_it_waits_fails_the_instance_for_all(),
        a_wrong_counter_after_the_end_fails_what_comes_next(),
        some_must_come(),
        a_repeated_use_keeps_its_members(),
        members_must_agree(),
        only_members_may_come(),
        nobody_waits_for_strangers(),
        the_first_caller_sets_the_timeout(),
        a_timeout_stays_the_answer(),
        a_barrier_is_cancelled(),
        only_the_instance_in_progress_is_cancelled(),
        strangers_cancel_nothing(),
        different_barriers_do_not_touch(),
        names_are_taken_as_they_are(),
        a_barrier_of_one(),
        a_first_call_with_a_counter(),
        a_cancel_before_any_call(),
        a_caller_that_hung_up(),
        a_timeout_of_nothing(),
    ]
}

fn all_must_come() -> Script {
    script("all must come", 3)
        .register_all_tasks()
        .start("0", t(0), Call::barrier("b", 0))
        .start("2", t(2), Call::barrier("b", 0))
        .expect_all(&["0", "2"], &waits())
        .start("1", t(1), Call::barrier("b", 0))
        .expect_all(&["0", "1", "2"], &ok().counter(0))
}

fn an_id_is_used_again() -> Script {
    let mut script = script("an id is used again", 2).register_all_tasks();
    for counter in 0..4 {
        let (first, second) = (format!("0 in {counter}"), format!("1 in {counter}"));
        script = script
            .start(&first, t(0), Call::barrier("step", counter))
            .expect_outcome(&first, waits())
            .start(&second, t(1), Call::barrier("step", counter))
            .expect_all(&[&first, &second], &ok().counter(counter));
    }
    script
}

fn a_call_repeated_after_the_end_gets_the_same_answer() -> Script {
    script("a call repeated after the end gets the same answer", 2)
        .register_all_tasks()
        .start("0", t(0), Call::barrier("b", 0))
        .start("1", t(1), Call::barrier("b", 0))
        .expect_all(&["0", "1"], &ok().counter(0))
        .call(t(0), Call::barrier("b", 0), ok().counter(0))
        .call(t(1), Call::barrier("b", 0), ok().counter(0))
        .start("0 next", t(0), Call::barrier("b", 1))
        .expect_outcome("0 next", waits())
        .call(t(1), Call::barrier("b", 1), ok().counter(1))
        .expect_outcome("0 next", ok().counter(1))
        .call(t(0), Call::barrier("b", 1), ok().counter(1))
}

fn a_call_repeated_while_it_waits_replaces_the_first() -> Script {
    script("a call repeated while it waits replaces the first", 2)
        .register_all_tasks()
        .start("first", t(0), Call::barrier("b", 0))
        .start("second", t(0), Call::barrier("b", 0))
        .expect_outcome("first", plain_error(Code::Cancelled))
        .expect_outcome("second", waits())
        .call(t(1), Call::barrier("b", 0), ok().counter(0))
        .expect_outcome("second", ok().counter(0))
}

fn a_wrong_counter_fails_the_instance_for_all() -> Script {
    let failed = || error(Code::Internal).of_barrier("b", 0).with_message_part("0-th instance");
    script("a wrong counter fails the instance for all", 3)
        .register_all_tasks()
        .start("0", t(0), Call::barrier("b", 0))
        .start("1", t(1), Call::barrier("b", 0))
        .call(t(2), Call::barrier("b", 1), failed())
        .expect_all(&["0", "1"], &failed())
        // It is the answer of the present instance; the next one is free.
        .call(t(2), Call::barrier("b", 0), failed())
        .start("0 next", t(0), Call::barrier("b", 1))
        .start("1 next", t(1), Call::barrier("b", 1))
        .expect_all(&["0 next", "1 next"], &waits())
        .call(t(2), Call::barrier("b", 1), ok().counter(1))
        .expect_all(&["0 next", "1 next"], &ok().counter(1))
}

fn a_task_that_counts_on_while_it_waits_fails_the_instance_for_all() -> Script {
    let failed = || error(Code::Internal).of_barrier("b", 0).with_message_part("0-th instance");
    script("a task that counts on while it waits fails the instance for all", 3)
        .register_all_tasks()
        .start("0", t(0), Call::barrier("b", 0))
        .start("1", t(1), Call::barrier("b", 0))
        .call(t(0), Call::barrier("b", 1), failed())
        // Its own earlier call is replaced, as by any newer one.
        .expect_outcome("0", plain_error(Code::Cancelled))
        .expect_outcome("1", failed())
        .call(t(2), Call::barrier("b", 0), failed())
        .start("0 alone", t(0), Call::barrier("alone", 0))
        .call(t(0), Call::barrier("alone", 1), error(Code::Internal).of_barrier("alone", 0))
        .expect_outcome("0 alone", plain_error(Code::Cancelled))
        .start("0 next", t(0), Call::barrier("b", 1))
        .start("1 next", t(1), Call::barrier("b", 1))
        .start("2 next", t(2), Call::barrier("b", 1))
        .expect_all(&["0 next", "1 next", "2 next"], &ok().counter(1))
}

fn a_wrong_counter_after_the_end_fails_what_comes_next() -> Script {
    script("a wrong counter after the end", 2)
        .register_all_tasks()
        .start("0", t(0), Call::barrier("b", 0))
        .start("1", t(1), Call::barrier("b", 0))
        .expect_all(&["0", "1"], &ok().counter(0))
        .call(t(0), Call::barrier("b", 5), error(Code::Internal).of_barrier("b", 0))
        .call_differs(
            t(1),
            Call::barrier("b", 0),
            Difference::ResultStays,
            error(Code::Internal).of_barrier("b", 0),
            ok().counter(0),
        )
        .start("0 next", t(0), Call::barrier("b", 1))
        .expect_outcome("0 next", waits())
        .call(t(1), Call::barrier("b", -1), error(Code::Internal).of_barrier("b", 1))
        .expect_difference(
            "0 next",
            Difference::NegativeCounter,
            error(Code::Internal).of_barrier("b", 1),
            waits(),
        )
        .without_comparison_at_end()
}

fn some_must_come() -> Script {
    script("only the members must come", 3)
        .register_all_tasks()
        .start("0", t(0), Call::barrier_of("pair", 0, &[0, 2]))
        .expect_outcome("0", waits())
        .start("2", t(2), Call::barrier_of("pair", 0, &[0, 2]))
        .expect_all(&["0", "2"], &ok().counter(0))
        .start("all 1", t(1), Call::barrier("all", 0))
        .start("all 2", t(2), Call::barrier("all", 0))
        .start("all 0", t(0), Call::barrier_of("all", 0, &[2, 1, 0]))
        .expect_all(&["all 0", "all 1", "all 2"], &ok().counter(0))
}

fn a_repeated_use_keeps_its_members() -> Script {
    script("a repeated use keeps its members", 3)
        .register_all_tasks()
        .start("0", t(0), Call::barrier_of("pair", 0, &[0, 1]))
        .start("1", t(1), Call::barrier_of("pair", 0, &[0, 1]))
        .expect_all(&["0", "1"], &ok().counter(0))
        .start("0 next", t(0), Call::barrier_of("pair", 1, &[0, 1]))
        .start("1 next", t(1), Call::barrier_of("pair", 1, &[1, 0]))
        .expect_all(&["0 next", "1 next"], &ok().counter(1))
        // Other members than those of the first instance: later callers get the same failure.
        .call(t(0), Call::barrier("pair", 2), error(Code::InvalidArgument).of_barrier("pair", 2))
        .call(t(1), Call::barrier_of("pair", 2, &[0, 1]), error(Code::InvalidArgument).of_barrier("pair", 2))
        .call(t(0), Call::barrier_of("pair", 2, &[0, 1]), error(Code::InvalidArgument).of_barrier("pair", 2))
        // The next instance is free again, with the members of the first.
        .start("0 third", t(0), Call::barrier_of("pair", 3, &[0, 1]))
        .expect_outcome("0 third", waits())
        .call(t(1), Call::barrier_of("pair", 3, &[0, 1]), ok().counter(3))
        .expect_outcome("0 third", ok().counter(3))
}

fn members_must_agree() -> Script {
    let differing = || error(Code::InvalidArgument).of_barrier("b", 0).with_message_part("Conflicting tasks");
    script("members must agree on who they are", 3)
        .register_all_tasks()
        .start("0", t(0), Call::barrier_of("b", 0, &[0, 1]))
        .call(t(1), Call::barrier_of("b", 0, &[0, 1, 2]), differing())
        .expect_outcome("0", differing())
        .start("all 0", t(0), Call::barrier("c", 0))
        .call(t(1), Call::barrier_of("c", 0, &[0, 1]), error(Code::InvalidArgument).of_barrier("c", 0))
        .expect_outcome("all 0", error(Code::InvalidArgument).of_barrier("c", 0))
        .start("some 0", t(0), Call::barrier_of("d", 0, &[0, 1]))
        .call(t(1), Call::barrier("d", 0), error(Code::InvalidArgument).of_barrier("d", 0))
        .expect_outcome("some 0", error(Code::InvalidArgument).of_barrier("d", 0))
}

fn only_members_may_come() -> Script {
    let refused_in = |id, counter| {
        error(Code::InvalidArgument).of_barrier(id, counter).with_message_part("A non-participating task")
    };
    script("only members may come", 3)
        .register_all_tasks()
        .start("0", t(0), Call::barrier_of("b", 0, &[0, 1]))
        .call(t(2), Call::barrier_of("b", 0, &[0, 1]), error(Code::InvalidArgument).of_barrier("b", 0))
        .expect_outcome("0", error(Code::InvalidArgument).of_barrier("b", 0))
        // A task that is no member arrives first: the members that arrive later get the failure.
        .call(t(2), Call::barrier_of("first", 0, &[0, 1]), refused_in("first", 0))
        .call(t(0), Call::barrier_of("first", 0, &[0, 1]), refused_in("first", 0))
        .call(t(1), Call::barrier_of("first", 0, &[0, 1]), refused_in("first", 0))
        .call(t(2), Call::barrier_of("first", 0, &[0, 1]), refused_in("first", 0))
        .start("first 1", t(1), Call::barrier_of("first", 1, &[0, 1]))
        .call(t(0), Call::barrier_of("first", 1, &[0, 1]), ok().counter(1))
        .expect_outcome("first 1", ok().counter(1))
        // A task that is no member arrives last.
        .call(
            t(2),
            Call::barrier_of("first", 1, &[0, 1]),
            error(Code::InvalidArgument).of_barrier("first", 1),
        )
        .call_differs(
            t(0),
            Call::barrier_of("first", 1, &[0, 1]),
            Difference::ResultStays,
            refused_in("first", 1),
            ok().counter(1),
        )
        .call(
            t(2),
            Call::barrier_of("first", 2, &[0, 1]),
            error(Code::InvalidArgument).of_barrier("first", 2),
        )
        .call(
            t(1),
            Call::barrier_of("first", 2, &[0, 1]),
            error(Code::InvalidArgument).of_barrier("first", 2),
        )
        .call_differs(
            t(9),
            Call::barrier("stranger", 0),
            Difference::Strangers,
            waits(),
            error(Code::InvalidArgument).of_barrier("stranger", 0),
        )
}

fn nobody_waits_for_strangers() -> Script {
    let stranger = || error(Code::InvalidArgument).of_barrier("only strangers", 0);
    script("nobody waits for strangers", 2)
        .register_all_tasks()
        .call(t(0), Call::barrier_of("b", 0, &[0, 7]), error(Code::InvalidArgument).of_barrier("b", 0))
        .call(t(1), Call::barrier_of("b", 0, &[0, 7]), error(Code::InvalidArgument).of_barrier("b", 0))
        .call(t(0), Call::barrier_of("c", 0, &[0, -1]), error(Code::InvalidArgument).of_barrier("c", 0))
        // Later callers get the failure too, and the id stays unusable.
        .call(t(1), Call::barrier("c", 0), error(Code::InvalidArgument).of_barrier("c", 0))
        .call(t(1), Call::barrier("c", 1), error(Code::InvalidArgument).of_barrier("c", 1))
        .call(t(1), Call::barrier_of("c", 2, &[0]), error(Code::InvalidArgument).of_barrier("c", 2))
        .call(t(1), Call::barrier_of("only strangers", 0, &[7, 9]), stranger())
        .call(t(0), Call::barrier("only strangers", 0), stranger())
        // The same for an instance in which a task already waits.
        .start("waits", t(0), Call::barrier("e", 0))
        .call(t(1), Call::barrier_of("e", 0, &[0, 1, 7]), error(Code::InvalidArgument).of_barrier("e", 0))
        .expect_outcome("waits", error(Code::InvalidArgument).of_barrier("e", 0))
        .start("0", t(0), Call::barrier("d", 0))
        .start("1", t(1), Call::barrier("d", 0))
        .expect_all(&["0", "1"], &ok().counter(0))
}

fn the_first_caller_sets_the_timeout() -> Script {
    let late = || error(Code::DeadlineExceeded).of_barrier("b", 0).with_message_part("timed out");
    script("the first caller sets the timeout", 3)
        .register_all_tasks()
        .start("0", t(0), Call::barrier("b", 0).within_ms(200))
        .start("1", t(1), Call::barrier("b", 0).within_ms(60_000))
        .start("patient", t(0), Call::barrier("c", 0).within_ms(60_000))
        .start("hasty", t(1), Call::barrier("c", 0).within_ms(1))
        .expect_all(&["0", "1"], &late())
        .expect_all(&["patient", "hasty"], &waits())
        .call(t(2), Call::barrier("c", 0), ok().counter(0))
        .expect_all(&["patient", "hasty"], &ok().counter(0))
}

fn a_timeout_stays_the_answer() -> Script {
    let late = || {
        error(Code::DeadlineExceeded)
            .of_barrier("b", 0)
            .with_message_part("timed out")
            .with_message_part("reached the barrier: 1/2")
    };
    script("a timeout stays the answer of its instance", 2)
        .register_all_tasks()
        .call(t(0), Call::barrier("b", 0).within_ms(200), late())
        .call(t(1), Call::barrier("b", 0), late())
        .call(t(0), Call::barrier("b", 0), late())
        .start("0 next", t(0), Call::barrier("b", 1))
        .start("1 next", t(1), Call::barrier("b", 1))
        .expect_all(&["0 next", "1 next"], &ok().counter(1))
}

fn a_barrier_is_cancelled() -> Script {
    let cancelled = || error(Code::Cancelled).of_barrier("b", 0);
    script("a barrier is cancelled for all", 3)
        .register_all_tasks()
        .start("0", t(0), Call::barrier("b", 0))
        .start("1", t(1), Call::barrier("b", 0))
        .call(t(2), Call::cancel("b", 0), ok())
        .expect_all(&["0", "1"], &cancelled())
        .call(t(2), Call::barrier("b", 0), cancelled())
        .call(t(2), Call::cancel("b", 0), error(Code::FailedPrecondition).of_barrier("b", 0))
        .start("0 next", t(0), Call::barrier("b", 1))
        .start("1 next", t(1), Call::barrier("b", 1))
        .start("2 next", t(2), Call::barrier("b", 1))
        .expect_all(&["0 next", "1 next", "2 next"], &ok().counter(1))
}

fn only_the_instance_in_progress_is_cancelled() -> Script {
    let not_cancelled = |counter| error(Code::FailedPrecondition).of_barrier("b", counter);
    script("only the instance in progress is cancelled", 2)
        .register_all_tasks()
        .start("0", t(0), Call::barrier("b", 0))
        .call(t(1), Call::cancel("b", 1), not_cancelled(0))
        .call(t(1), Call::cancel("b", -1), not_cancelled(0))
        .expect_outcome("0", waits())
        .call(t(1), Call::barrier("b", 0), ok().counter(0))
        .expect_outcome("0", ok().counter(0))
        .call(t(1), Call::cancel("b", 0), not_cancelled(0))
        .call(t(1), Call::cancel("b", 1), not_cancelled(0))
        .start("0 next", t(0), Call::barrier("b", 1))
        // An agent that does not know the counter sends this.
        .call(t(1), Call::cancel("b", 0), not_cancelled(1))
        .expect_outcome("0 next", waits())
        .call(t(1), Call::cancel("b", 1), ok())
        .expect_outcome("0 next", error(Code::Cancelled).of_barrier("b", 1))
}

fn strangers_cancel_nothing() -> Script {
    script("strangers cancel nothing", 2)
        .register_all_tasks()
        .start("0", t(0), Call::barrier("b", 0))
        .call_differs(t(9), Call::cancel("b", 0), Difference::Strangers, ok(), error(Code::InvalidArgument))
        .expect_difference("0", Difference::Strangers, error(Code::Cancelled).of_barrier("b", 0), waits())
        .without_comparison_at_end()
}

fn different_barriers_do_not_touch() -> Script {
    script("different barriers do not touch", 2)
        .register_all_tasks()
        .start("a 0", t(0), Call::barrier("a", 0))
        .start("b 0", t(0), Call::barrier("b", 0))
        .start("c 1", t(1), Call::barrier("c", 0))
        .call(t(1), Call::barrier("b", 0), ok().counter(0))
        .expect_outcome("b 0", ok().counter(0))
        .expect_all(&["a 0", "c 1"], &waits())
        .call(t(1), Call::cancel("a", 0), ok())
        .expect_outcome("a 0", error(Code::Cancelled).of_barrier("a", 0))
        .expect_outcome("c 1", waits())
        .call(t(0), Call::barrier("c", 0), ok().counter(0))
        .expect_outcome("c 1", ok().counter(0))
}

fn names_are_taken_as_they_are() -> Script {
    let mut script = script("names of barriers are taken as they are", 1).register_all_tasks();
    for id in ["", "/", "a/b", "/a/b", "a::b", "名", "with space", "[Init]another"] {
        script = script.call(t(0), Call::barrier(id, 0), ok().counter(0));
    }
    script
}

fn a_barrier_of_one() -> Script {
    script("a barrier of one passes at once", 2)
        .register_all_tasks()
        .call(t(0), Call::barrier_of("alone", 0, &[0]), ok().counter(0))
        .call(t(0), Call::barrier_of("alone", 1, &[0]), ok().counter(1))
        .call_differs(
            t(1),
            Call::barrier_of("twice named", 0, &[1, 1]),
            Difference::RepeatedMembers,
            error(Code::InvalidArgument).of_barrier("twice named", 0),
            ok().counter(0),
        )
}

fn a_timeout_of_nothing() -> Script {
    script("a timeout of nothing", 2)
        .register_all_tasks()
        .call(t(0), Call::barrier("b", 0).within_ms(0), error(Code::DeadlineExceeded).of_barrier("b", 0))
        .call(t(0), Call::barrier("c", 0).within_ms(-5), error(Code::DeadlineExceeded).of_barrier("c", 0))
        .call(t(0), Call::barrier_of("d", 0, &[0]).within_ms(0), ok().counter(0))
}

fn a_first_call_with_a_counter() -> Script {
    script("a first call with a counter", 2)
        .register_all_tasks()
        .call_differs(
            t(0),
            Call::barrier("b", 3),
            Difference::BarrierBeginsAtZero,
            error(Code::Internal).of_barrier("", 0).with_message_part("::3"),
            error(Code::Internal).of_barrier("b", -1),
        )
        .start("0", t(0), Call::barrier("b", 0))
        .only_for_service(ServiceKind::Muster, Difference::BarrierBeginsAtZero, |script| {
            script
                .expect_outcome("0", waits())
                .call(t(1), Call::barrier("b", 0), ok().counter(0))
                .expect_outcome("0", ok().counter(0))
        })
        .without_comparison_at_end()
}

fn a_cancel_before_any_call() -> Script {
    script("a cancel before any call", 2)
        .register_all_tasks()
        .call_differs(
            t(0),
            Call::cancel("b", 0),
            Difference::NoNamelessBarrier,
            ok(),
            error(Code::FailedPrecondition).of_barrier("b", 0),
        )
        .start("0", t(0), Call::barrier("b", 0))
        .only_for_service(ServiceKind::Cxx, Difference::NoNamelessBarrier, |script| {
            script.expect_outcome("0", error(Code::InvalidArgument).of_barrier("", 0))
        })
        .only_for_service(ServiceKind::Muster, Difference::NoNamelessBarrier, |script| {
            script
                .expect_outcome("0", waits())
                .call(t(1), Call::barrier("b", 0), ok().counter(0))
                .expect_outcome("0", ok().counter(0))
        })
        .without_comparison_at_end()
}

fn a_caller_that_hung_up() -> Script {
    script("a caller that hung up does not count", 2)
        .register_all_tasks()
        .start("hung up", t(0), Call::barrier("b", 0))
        .hang_up("hung up")
        .start("1", t(1), Call::barrier("b", 0))
        .expect_difference("1", Difference::CallerHungUp, ok().counter(0), waits())
        .only_for_service(ServiceKind::Muster, Difference::CallerHungUp, |script| {
            script.call(t(0), Call::barrier("b", 0), ok().counter(0)).expect_outcome("1", ok().counter(0))
        })
}
