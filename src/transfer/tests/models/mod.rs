//! Models of the concurrent cores, gone through by loom.
//!
//! A model is a few threads that use the real code. Loom runs it once for each order in which the threads' operations may take
//! effect, stale reads included. Sleeps have no time limit here: in the engine a thread looks again after 50 ms, and a wake-up that
//! is lost would cost that; here it is a deadlock, which loom reports. `ring.rs` has the ring and a session, `launch.rs` launches
//! and their parts, `small.rs` the rest.

mod launch;
mod ring;
mod small;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Goes through the executions of a model in which threads are interrupted `preemptions` times at most, and prints how many
/// there were.
fn explore(name: &str, preemptions: usize, model: impl Fn() + Send + Sync + 'static) {
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
