//! The key-value store.

use crate::differences::Difference;
use crate::expect::{Code, error, ok, plain_error, waits};
use crate::script::{Release, Script, script, t};
use crate::support::{Call, Generation};

pub fn scripts(release: Release) -> Vec<Script> {
    let mut scripts = vec![
        a_key_is_written_once(),
        a_value_is_waited_for(),
        keys_are_normalised(),
        keys_with_a_nul(),
        the_same_topology_again(),
        a_directory_lists_its_descendants(),
        deleting_takes_the_descendants_along(),
        counters_count(),
        values_are_any_bytes(),
        a_preemption_is_agreed_upon(),
    ];
    if release.generation() == Generation::A {
        scripts.push(the_store_is_open_before_registration());
    }
    scripts
}

fn a_key_is_written_once() -> Script {
    script("a key is written once unless it may be overwritten", 2)
        .register_all_tasks()
        .call(t(0), Call::try_get("k"), error(Code::NotFound).with_message_part("Config key k not found."))
        .call(t(0), Call::insert("k", "one"), ok())
        // Without a payload, unlike other errors: the start of JAX recognises a restart by it.
        .call(
            t(1),
            Call::insert("k", "two"),
            plain_error(Code::AlreadyExists).with_message_part("already exists"),
        )
        .call(t(1), Call::insert("k", "one"), plain_error(Code::AlreadyExists))
        .call(t(1), Call::try_get("k"), ok().value("one"))
        .call(t(1), Call::overwrite("k", "three"), ok())
        .call(t(0), Call::try_get("k"), ok().value("three"))
        .call(t(0), Call::overwrite("fresh", "yes"), ok())
        .call(t(0), Call::get("fresh"), ok().value("yes"))
}

fn a_value_is_waited_for() -> Script {
    script("a value is waited for", 2)
        .register_all_tasks()
        .start("one", t(0), Call::get("/k"))
        .start("two", t(0), Call::get("k/"))
        .start("three", t(1), Call::get("k"))
        .start("counter", t(1), Call::get("n"))
        .expect_all(&["one", "two", "three", "counter"], &waits())
        .call(t(0), Call::insert("k/below", "not it"), ok())
        .call(t(1), Call::delete("k"), ok())
        .call(t(0), Call::delete("n"), ok())
        .expect_all(&["one", "two", "three", "counter"], &waits())
        .call(t(1), Call::insert("k", "v"), ok())
        .expect_outcome("one", ok().value("v").key("/k"))
        .expect_outcome("two", ok().key("k/"))
        .expect_outcome("three", ok().value("v"))
        .expect_outcome("counter", waits())
        .call(t(0), Call::increment("n", 3), ok().value("3"))
        .expect_outcome("counter", ok().value("3"))
        .start("hung up", t(0), Call::get("later"))
        .start("patient", t(1), Call::get("later"))
        .hang_up("hung up")
        .call(t(0), Call::overwrite("later", "now"), ok())
        .expect_outcome("patient", ok().value("now"))
}

fn keys_are_normalised() -> Script {
    script("keys are normalised", 1)
        .register_all_tasks()
        .call(t(0), Call::insert("///a//b/c//", "v"), ok())
        .call(t(0), Call::try_get("a/b/c"), ok().value("v"))
        .call(t(0), Call::try_get("a/b/c"), ok().key("a/b/c"))
        // The answer repeats the caller's spelling.
        .call(t(0), Call::try_get("/a/b//c"), ok().key("/a/b//c"))
        .call(t(0), Call::get("a///b/c/"), ok().key("a///b/c/"))
        .call(t(0), Call::increment("//n/", 2), ok().key("//n/"))
        .call(t(0), Call::insert("a/b/c", "w"), plain_error(Code::AlreadyExists))
        .call(t(0), Call::list("/a//"), ok().entries(&[("a/b/c", "v")]))
        .call(t(0), Call::insert("", "empty"), ok())
        .call(t(0), Call::try_get("///"), ok().value("empty"))
        .call(t(0), Call::insert("with space=;:[1,2]", "v"), ok())
        .call(t(0), Call::try_get("with space=;:[1,2]"), ok().value("v"))
        .call(t(0), Call::insert("schlüssel/鍵", "v"), ok())
        .call(t(0), Call::list("schlüssel"), ok().entries(&[("schlüssel/鍵", "v")]))
}

fn keys_with_a_nul() -> Script {
    script("keys with a NUL", 1)
        .register_all_tasks()
        .call(t(0), Call::insert("a\0b", "nul"), ok())
        .call(t(0), Call::try_get("a\0b"), ok().value("nul"))
        .call_differs(
            t(0),
            Call::try_get("a"),
            Difference::NulInKey,
            ok().value("nul"),
            error(Code::NotFound),
        )
        .without_comparison_at_end()
}

fn the_same_topology_again() -> Script {
    script("the same topology again", 1)
        .register_all_tasks()
        .call(t(0), Call::insert("cpu:global_topology/cpu", "gathered"), ok())
        .call(t(0), Call::insert("cpu:global_topology/cpu", "another"), plain_error(Code::AlreadyExists))
        // Each process's own topology: clients rely on the error, and then compare.
        .call(t(0), Call::insert("cpu:local_topology/cpu/0", "own"), ok())
        .call(t(0), Call::insert("cpu:local_topology/cpu/0", "own"), plain_error(Code::AlreadyExists))
        .call_differs(
            t(0),
            Call::insert("cpu:global_topology/cpu", "gathered"),
            Difference::SameTopology,
            plain_error(Code::AlreadyExists),
            ok(),
        )
}

fn a_directory_lists_its_descendants() -> Script {
    script("a directory lists its descendants in order", 1)
        .register_all_tasks()
        .call(t(0), Call::list("d"), ok().entries(&[]))
        .call(t(0), Call::insert("d", "the directory itself"), ok())
        .call(t(0), Call::insert("d/z", "4"), ok())
        .call(t(0), Call::insert("d/b/c", "3"), ok())
        .call(t(0), Call::insert("d/b", "2"), ok())
        .call(t(0), Call::insert("d/B", "1"), ok())
        .call(t(0), Call::insert("dd", "beside it"), ok())
        .call(t(0), Call::insert("d!", "before its slash"), ok())
        .call(t(0), Call::insert("d0", "behind its slash"), ok())
        .call(
            t(0),
            Call::list("d"),
            ok().entries(&[("d/B", "1"), ("d/b", "2"), ("d/b/c", "3"), ("d/z", "4")]),
        )
        .call(t(0), Call::list("d/b/"), ok().entries(&[("d/b/c", "3")]))
        .call(t(0), Call::list("d/z"), ok().entries(&[]))
        // No call lists everything.
        .call(t(0), Call::list(""), ok().entries(&[]))
        .call(t(0), Call::list("/"), ok().entries(&[]))
}

fn deleting_takes_the_descendants_along() -> Script {
    let flat = |key: &str| Call::Delete { key: key.into(), directory: false };
    script("deleting takes the descendants along", 1)
        .register_all_tasks()
        .call(t(0), Call::delete("nothing"), ok())
        .call(t(0), Call::insert("d", "0"), ok())
        .call(t(0), Call::insert("d/a", "1"), ok())
        .call(t(0), Call::insert("d/a/b", "2"), ok())
        .call(t(0), Call::insert("dd", "3"), ok())
        .call(t(0), Call::delete("d/a"), ok())
        .call(t(0), Call::list("d"), ok().entries(&[]))
        .call(t(0), Call::insert("d/a/b", "2"), ok())
        .call(t(0), flat("//d/"), ok())
        .call(t(0), Call::try_get("d"), error(Code::NotFound))
        .call(t(0), Call::try_get("d/a/b"), error(Code::NotFound))
        .call(t(0), Call::try_get("dd"), ok().value("3"))
        .call(t(0), Call::insert("d", "again"), ok())
        .call(t(0), Call::delete(""), ok())
        .call(t(0), Call::try_get("d"), ok().value("again"))
}

fn counters_count() -> Script {
    script("counters count", 1)
        .register_all_tasks()
        .call(t(0), Call::increment("n", 5), ok().value("5"))
        .call(t(0), Call::increment("n", -7), ok().value("-2"))
        .call(t(0), Call::increment("n", 0), ok().value("-2"))
        .call(t(0), Call::try_get("n"), ok().value("-2"))
        .call(t(0), Call::insert("text", "abc"), ok())
        .call(
            t(0),
            Call::increment("text", 1),
            error(Code::FailedPrecondition).with_message_part("as an integer"),
        )
        .call(t(0), Call::try_get("text"), ok().value("abc"))
        .call(t(0), Call::insert("padded", " 7 "), ok())
        .call(t(0), Call::increment("padded", 1), ok().value("8"))
        .call(t(0), Call::insert("plus", "+7"), ok())
        .call(t(0), Call::increment("plus", 1), ok().value("8"))
        .call(t(0), Call::insert("none", ""), ok())
        .call(t(0), Call::increment("none", 1), error(Code::FailedPrecondition))
        .call(t(0), Call::insert("huge", "9223372036854775808"), ok())
        .call(t(0), Call::increment("huge", 1), error(Code::FailedPrecondition))
        .call(t(0), Call::insert("fraction", "1.5"), ok())
        .call(t(0), Call::increment("fraction", 1), error(Code::FailedPrecondition))
}

fn values_are_any_bytes() -> Script {
    let every_byte: Vec<u8> = (0..=255).collect();
    let large: Vec<u8> = (0..5 << 20).map(|i: u32| (i * 31 / 7) as u8).collect();
    script("values are any bytes of any length", 1)
        .register_all_tasks()
        .call(t(0), Call::insert("bytes", &every_byte), ok())
        .call(t(0), Call::get("bytes"), ok().value(&every_byte))
        .call(t(0), Call::insert("nothing", ""), ok())
        .call(t(0), Call::get("nothing"), ok().value(""))
        .call(t(0), Call::insert("large", &large), ok())
        .call(t(0), Call::get("large"), ok().value(&large))
}

fn the_store_is_open_before_registration() -> Script {
    script("the store is open before registration", 2)
        .call(t(0), Call::insert("k", "v"), ok())
        .call(t(7), Call::try_get("k"), ok().value("v"))
        .start("wait", t(1), Call::get("later"))
        .expect_outcome("wait", waits())
        .register_all_tasks()
        .call(t(1), Call::try_get("k"), ok().value("v"))
        .call(t(1), Call::insert("later", "now"), ok())
        .expect_outcome("wait", ok().value("now"))
}

/// The protocol of JAX's preemption manager: all tasks wait for the notice, write their step, and read those
/// of the others.
fn a_preemption_is_agreed_upon() -> Script {
    const NOTICE: &str = "RECEIVED_PREEMPTION_NOTICE";
    let position = |task| format!("PREEMPTION_CURRENT_COUNTER//job:/task:{task}");
    script("a preemption is agreed upon", 2)
        .register_all_tasks()
        .start("0 waits for the notice", t(0), Call::get(NOTICE))
        .start("1 waits for the notice", t(1), Call::get(NOTICE))
        .expect_all(&["0 waits for the notice", "1 waits for the notice"], &waits())
        .call(t(1), Call::insert(NOTICE, "2026-01-01T00:00:00+00:00"), ok())
        .call(t(0), Call::insert(NOTICE, "2026-01-01T00:00:01+00:00"), plain_error(Code::AlreadyExists))
        .expect_all(
            &["0 waits for the notice", "1 waits for the notice"],
            &ok().value("2026-01-01T00:00:00+00:00"),
        )
        .call(t(0), Call::insert(&position(0), "41"), ok())
        .call(t(1), Call::insert(&position(1), "42"), ok())
        .start("0 synchronises", t(0), Call::barrier("PREEMPTION_SYNC_BARRIER", 0).within_ms(180_000))
        .start("1 synchronises", t(1), Call::barrier("PREEMPTION_SYNC_BARRIER", 0).within_ms(180_000))
        .expect_all(&["0 synchronises", "1 synchronises"], &ok().counter(0))
        .call(
            t(0),
            Call::list("PREEMPTION_CURRENT_COUNTER/"),
            ok().entries(&[
                ("PREEMPTION_CURRENT_COUNTER/job:/task:0", "41"),
                ("PREEMPTION_CURRENT_COUNTER/job:/task:1", "42"),
            ]),
        )
}
