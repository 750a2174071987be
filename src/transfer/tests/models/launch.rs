//! Models of launches, of the threads that wait for them, and of their parts with one peer.
//!
//! Begin at `a_thread_that_blocks_hears_of_the_last_outcome`.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Wake};
use std::time::{Duration, Instant};

use loom::thread;

use super::explore_interleavings;
use crate::base::error::TransferError;
use crate::base::launch_metrics::LaunchMetrics;
use crate::base::membership::{Incarnation, MemberId, TaskId};
use crate::base::sync::{AtomicUsize, Condvar, Mutex, lock};
use crate::launch::launch_spans::LaunchSpans;
use crate::launch::outcome::{AwaitedLaunchState, Launch, LaunchPart};
use crate::launch::peer_launch::{LaunchLimits, PeerLaunch, fail_and_tell_peer};
use crate::launch::session_handle::{LaunchSession, SessionHandle};
use crate::protocol::link::{GroupId, PriorityClass};

fn member() -> MemberId {
    MemberId::of_own_job(TaskId(1), Incarnation::new(1).unwrap())
}

fn launch(count: usize) -> Arc<Launch> {
    let launch = Launch::new(&Arc::new(LaunchMetrics::new(TaskId(0))), count, 1, 0);
    launch.start_clock();
    launch
}

#[test]
fn a_thread_that_blocks_hears_of_the_last_outcome() {
    explore_interleavings("a thread that blocks", 5, || {
        let launch = launch(2);
        let threads: Vec<_> = (0..2)
            .map(|number| {
                let launch = Arc::clone(&launch);
                thread::spawn(move || launch.record_transfer_outcome(number, true))
            })
            .collect();
        assert!(
            launch
                .block_until(AwaitedLaunchState::All, None, Launch::overall_outcome)
                .is_some_and(|whole| whole.is_ok())
        );
        for thread in threads {
            thread.join().unwrap();
        }
    });
}

#[test]
fn an_outcome_that_comes_twice_counts_once() {
    explore_interleavings("an outcome twice", 5, || {
        let launch = launch(2);
        let threads: Vec<_> = [true, false]
            .map(|ok| {
                let launch = Arc::clone(&launch);
                thread::spawn(move || {
                    if ok {
                        launch.record_transfer_outcome(0, true)
                    } else {
                        launch.fail_unresolved_transfers(0..1, &TransferError::Closed)
                    }
                })
            })
            .into();
        for thread in threads {
            thread.join().unwrap();
        }
        assert_eq!(launch.pending_count(), 1);
        assert!(launch.outcome(0).is_some());
    });
}

#[test]
fn a_thread_that_waits_for_one_of_many_hears_of_it() {
    explore_interleavings("one of many", 5, || {
        let launch = launch(2);
        let other = thread::spawn({
            let launch = Arc::clone(&launch);
            move || launch.record_transfer_outcome(1, true)
        });
        assert_eq!(
            launch.block_until(AwaitedLaunchState::One(1), None, |launch| launch.outcome(1)),
            Some(Ok(()))
        );
        other.join().unwrap();
    });
}

#[test]
fn a_callback_is_called_once() {
    explore_interleavings("a callback", 5, || {
        let launch = launch(1);
        let calls = Arc::new(AtomicUsize::new(0));
        let other = thread::spawn({
            let launch = Arc::clone(&launch);
            move || launch.record_transfer_outcome(0, true)
        });
        let counted = Arc::clone(&calls);
        launch.add_outcome_callback(
            0,
            Box::new(move |outcome| {
                assert_eq!(outcome, Ok(()));
                counted.fetch_add(1, Ordering::Relaxed);
            }),
        );
        other.join().unwrap();
        assert_eq!(calls.load(Ordering::Relaxed), 1);
    });
}

/// A task of a runtime: it sleeps until it is woken.
#[derive(Default)]
struct RuntimeTask {
    woken: Mutex<bool>,
    changed: Condvar,
}

impl Wake for RuntimeTask {
    fn wake(self: Arc<Self>) {
        *lock(&self.woken) = true;
        self.changed.notify_all();
    }
}

#[test]
fn a_future_is_woken_for_its_outcome() {
    explore_interleavings("a future", 5, || {
        let launch = launch(1);
        let other = thread::spawn({
            let launch = Arc::clone(&launch);
            move || launch.record_transfer_outcome(0, true)
        });
        let task = Arc::new(RuntimeTask::default());
        let waker = Arc::clone(&task).into();
        while launch.poll_with_waker(
            AwaitedLaunchState::All,
            &Context::from_waker(&waker),
            Launch::overall_outcome,
        ) == Poll::Pending
        {
            let mut woken = lock(&task.woken);
            while !std::mem::take(&mut *woken) {
                woken = task.changed.wait(woken).unwrap();
            }
        }
        other.join().unwrap();
    });
}

#[test]
fn a_launch_that_is_cancelled_before_it_has_parts_is_proven_to_every_waiter() {
    explore_interleavings("a cancelled launch", 5, || {
        let launch = launch(1);
        let other = thread::spawn({
            let launch = Arc::clone(&launch);
            move || launch.cancel(TaskId(0), "no more")
        });
        launch.block_until(AwaitedLaunchState::Proof, None, Launch::check_quiescence);
        other.join().unwrap();
    });
}

/// A session that notes what its launches ask.
#[derive(Default)]
struct RecordingSession {
    waiters: AtomicUsize,
    /// The times that a group was given up, and that it was said to be quiet.
    stopped: AtomicUsize,
    quiesced: AtomicUsize,
}

impl SessionHandle for RecordingSession {
    fn add_send_waiter(&self) {
        self.waiters.fetch_add(1, Ordering::SeqCst);
    }

    fn remove_send_waiter(&self) {
        self.waiters.fetch_sub(1, Ordering::SeqCst);
    }

    fn wake_lanes(&self) {}

    fn wake_poller(&self) {}

    fn poll_ring_on_this_thread(&self, _: Option<Instant>, _: bool, _: &dyn Fn() -> bool) -> bool {
        false
    }

    fn announce_group_ready(&self, _: GroupId) {}

    fn stop_group_of_launch(&self, _: GroupId, _: &str) -> bool {
        self.stopped.fetch_add(1, Ordering::SeqCst);
        true
    }

    fn announce_quiescence(&self, _: GroupId) {
        self.quiesced.fetch_add(1, Ordering::SeqCst);
    }

    fn end_session(&self, _: TransferError) {}
}

/// A launch of one transfer with its part.
fn part() -> (Arc<RecordingSession>, Arc<Launch>, Arc<PeerLaunch>) {
    let session = Arc::new(RecordingSession::default());
    let launch = launch(1);
    let handle: Weak<RecordingSession> = Arc::downgrade(&session);
    let carrier = LaunchSession { session: Some(handle), peer: member(), fetches: false };
    let mut lists = LaunchSpans::default();
    lists.outbound.specs.push(0);
    let limits =
        LaunchLimits { deadline: None, stall: Duration::from_secs(3600), class: PriorityClass::Normal };
    let part = PeerLaunch::new(&launch, carrier, &Arc::new(lists), limits);
    (session, launch, part)
}

/// The launching thread has its group, and the program gives the launch up, in any order: the peer is told, and then that
/// nothing can land here any more.
#[test]
fn a_launch_that_is_given_up_while_it_begins_is_given_up_at_the_peer() {
    explore_interleavings("given up while it begins", 5, || {
        let (session, launch, part) = part();
        let launching = thread::spawn({
            let part = Arc::clone(&part);
            move || {
                part.set_group_id((0, 0));
                part.stop_group_if_launch_failed();
            }
        });
        fail_and_tell_peer(
            &part,
            TransferError::Cancelled { by: TaskId(0).into(), reason: "no more".to_owned() },
        );
        launching.join().unwrap();
        assert!(launch.outcome(0).is_some_and(|outcome| outcome.is_err()));
        assert!(session.stopped.load(Ordering::SeqCst) > 0, "the peer was not told");
        assert!(
            session.quiesced.load(Ordering::SeqCst) > 0,
            "the peer waits for the word that nothing lands here"
        );
    });
}

/// A thread uses the bytes while the launch fails: its outcome comes when that thread is done, and once.
#[test]
fn a_failure_is_told_when_the_last_guard_is_gone() {
    explore_interleavings("the last guard", 5, || {
        let (_session, launch, part) = part();
        let using = Arc::new(AtomicUsize::new(0));
        let user = thread::spawn({
            let (part, using, launch) = (Arc::clone(&part), Arc::clone(&using), Arc::clone(&launch));
            move || {
                if let Some(guard) = part.access() {
                    using.store(1, Ordering::Relaxed);
                    assert!(launch.outcome(0).is_none(), "bytes are used of a launch that is over");
                    using.store(0, Ordering::Relaxed);
                    drop(guard);
                }
            }
        });
        part.fail_locally(TransferError::Closed);
        launch.block_until(AwaitedLaunchState::One(0), None, |launch| launch.outcome(0));
        assert_eq!(using.load(Ordering::Relaxed), 0, "the program is told while its bytes are used");
        user.join().unwrap();
        assert_eq!(launch.pending_count(), 0);
    });
}

/// This side becomes quiet, and the peer says that it is: the cancellation is proven once, to the thread that waits for it.
#[test]
fn a_cancellation_is_proven_when_both_sides_are_quiet() {
    explore_interleavings("a proof", 3, || {
        let (_session, launch, part) = part();
        launch.attach_parts(vec![part.as_weak_launch_part()]);
        let peer = thread::spawn({
            let part = Arc::clone(&part);
            move || part.mark_peer_quiescent()
        });
        let here = thread::spawn({
            let part = Arc::clone(&part);
            move || {
                part.fail_locally(TransferError::Closed);
            }
        });
        launch.block_until(AwaitedLaunchState::Proof, None, Launch::check_quiescence);
        assert!(part.is_proven_quiescent());
        peer.join().unwrap();
        here.join().unwrap();
    });
}
