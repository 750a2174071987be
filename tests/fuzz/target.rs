//! Searches with libFuzzer for bytes that violate one of the properties of [`muster::fuzzing`].
//!
//! ```text
//! tests/fuzz/run              each target for 20 s: what a change should pass
//! tests/fuzz/run 3600         each target for an hour
//! tests/fuzz/run 600 hpack    one target for ten minutes
//! ```
//!
//! It needs only the toolchain of the project and a C++ compiler: the stable compiler can insert the coverage
//! counters that guide libFuzzer (`flags`). Every run starts from the files of `corpus`, the words of `words`, and
//! one seed. It writes inputs that reach new code to `target/fuzz-corpus`, and inputs that violate a property to
//! `target/fuzz-finds`. When such an input is found, fix the cause and add the input to `corpus`. An ordinary test
//! runs the properties on the whole corpus (`fuzzing::tests` of the crate), so `cargo test` repeats every find
//! without a fuzzer.
//!
//! Two limits apply besides the properties. An input must not take more memory than its target declares; the
//! allocator of this file checks it. And it must not take more than a second (libFuzzer's `-timeout`).
#![no_main]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::OnceLock;

use muster::fuzzing::{FuzzTarget, MEMORY, fuzz_targets};

/// Counts the memory that this thread holds, and the most that it held.
struct Counting;

thread_local! {
    static HELD: Cell<isize> = const { Cell::new(0) };
    static MOST: Cell<isize> = const { Cell::new(0) };
}

fn count(bytes: isize) {
    let held = HELD.get() + bytes;
    HELD.set(held);
    MOST.set(MOST.get().max(held));
}

#[allow(unsafe_code, reason = "an allocator that counts what it passes on")]
// SAFETY: every call is passed on as it is.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: passed on.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: passed on.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size as isize - layout.size() as isize);
        // SAFETY: passed on.
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// Returns the target that `MUSTER_FUZZ` names.
fn target() -> &'static FuzzTarget {
    static CHOSEN: OnceLock<&FuzzTarget> = OnceLock::new();
    CHOSEN.get_or_init(|| {
        let name = std::env::var("MUSTER_FUZZ").unwrap_or_default();
        fuzz_targets().find(|target| target.name == name).unwrap_or_else(|| {
            let names: Vec<_> = fuzz_targets().map(|target| target.name).collect();
            panic!("MUSTER_FUZZ names no target; the targets are {}", names.join(" "))
        })
    })
}

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let target = target();
    let before = HELD.get();
    MOST.set(before);
    (target.property)(input);
    let took = (MOST.get() - before) as usize;
    let most = MEMORY + target.growth * input.len();
    assert!(
        took <= most,
        "{took} bytes of memory for an input of {} bytes; {most} are declared",
        input.len()
    );
});
