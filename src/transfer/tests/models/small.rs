//! Models of the gate of a part of a launch, and of the exclusive work that pumps a lane.
//!
//! Begin at `a_closed_gate_is_quiet_once_and_lets_no_guard_in`.

use std::sync::atomic::Ordering;

use loom::sync::Arc;
use loom::sync::atomic::AtomicUsize;
use loom::thread;

use super::explore_interleavings;
use crate::base::sync::{Mutex, lock};
use crate::io::exclusive_work::ExclusiveWork;
use crate::launch::access_gate::AccessGate;

#[test]
fn a_closed_gate_is_quiet_once_and_lets_no_guard_in() {
    explore_interleavings("gate", 4, || {
        let gate = Arc::new((AccessGate::default(), AtomicUsize::new(0), AtomicUsize::new(0)));
        let quiet = |gate: &(AccessGate, AtomicUsize, AtomicUsize)| {
            assert_eq!(gate.1.load(Ordering::Relaxed), 0, "it is quiet while a guard is inside");
            gate.2.fetch_add(1, Ordering::Relaxed);
        };
        let users: Vec<_> = (0..2)
            .map(|_| {
                let gate = Arc::clone(&gate);
                thread::spawn(move || {
                    if gate.0.enter() {
                        gate.1.fetch_add(1, Ordering::Relaxed);
                        assert!(!gate.0.is_closed_and_empty());
                        gate.1.fetch_sub(1, Ordering::Relaxed);
                    }
                    if gate.0.leave() {
                        quiet(&gate);
                    }
                })
            })
            .collect();
        assert!(gate.0.close());
        if gate.0.is_closed_and_empty() {
            // `PeerLaunch::resolve_failed_if_quiet` says it once: the last to leave says it as well.
            assert_eq!(gate.1.load(Ordering::Relaxed), 0);
        }
        for user in users {
            user.join().unwrap();
        }
        assert!(gate.0.is_closed_and_empty() && !gate.0.enter());
        assert!(gate.2.load(Ordering::Relaxed) <= 2);
    });
}

#[test]
fn what_is_found_to_do_before_a_pump_runs_is_done() {
    explore_interleavings("pump", 4, || {
        // Beside the work and the pump a word that every thread touches, so that loom interrupts it at that place.
        let shared = Arc::new((Mutex::new(0), ExclusiveWork::new(0), AtomicUsize::new(0)));
        let work = |shared: &(Mutex<usize>, ExclusiveWork<usize>, AtomicUsize)| {
            *lock(&shared.0) += 1;
            shared.2.fetch_add(1, Ordering::Relaxed);
            let done: Result<(), ()> = shared.1.run_unless_running(|done| {
                *done += std::mem::take(&mut *lock(&shared.0));
                shared.2.fetch_add(1, Ordering::Relaxed);
                Ok(())
            });
            assert_eq!(done, Ok(()));
        };
        let other = thread::spawn({
            let shared = Arc::clone(&shared);
            move || work(&shared)
        });
        work(&shared);
        other.join().unwrap();
        assert_eq!((*lock(&shared.0), *shared.1.wait_idle()), (0, 2));
    });
}
