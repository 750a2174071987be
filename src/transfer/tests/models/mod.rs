//! Models of the engine's concurrent code, which loom explores.
//!
//! A model is a few threads that use the real code. Loom runs it once for each order in which the threads' operations
//! may take effect, including reads of stale values. Each model bounds how often loom may preempt a thread. In the
//! engine, a sleeping thread checks again after 50 ms, so a lost wake-up costs only 50 ms. In a model, sleeps have no
//! time limit. So a lost wake-up is a deadlock, which loom reports. `ring.rs` has the models of the ring and of a
//! session, `launch.rs` those of launches and their parts, and `small.rs` the others. Begin at
//! `explore_interleavings`.

mod launch;
mod ring;
mod small;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Goes through the executions of a model in which threads are interrupted `preemptions` times at most, and prints how many
/// there were.
fn explore_interleavings(name: &str, preemptions: usize, model: impl Fn() + Send + Sync + 'static) {
    let count = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&count);
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.max_branches = 100_000;
    builder.check(move || {
        counted.fetch_add(1, Ordering::Relaxed);
        model();
    });
    println!("{name}: {} executions, at most {preemptions} preemptions", count.load(Ordering::Relaxed));
}
