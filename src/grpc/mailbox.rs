//! What a connection's task is told from outside, and how it is woken for it.
//!
//! A connection is one task. Everything that concerns it ends up in its mailbox: answers to its
//! waiting calls, streams that moved, the order to stop. While the task runs nobody needs to wake
//! it, so a batch costs one wake-up, and what the task does to itself costs none.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Wake, Waker};

use crate::coordination::Outcome;
use crate::engine::Inbox;

/// One thing that a connection's task is told.
pub(super) enum Note {
    /// The answer to the call in this slot.
    Answer(u64, Outcome),
    /// The stream in this slot may have moved on.
    Stirred(u64),
    /// Say goodbye: finish what is in progress and close.
    Stop,
    /// Close now.
    Abort,
}

#[derive(Default)]
struct State {
    notes: Vec<Note>,
    /// The task's waker, there while the task sleeps.
    sleeper: Option<Waker>,
    /// HTTP/2 wants to be driven again, and said so while the task was running.
    stirred: bool,
}

/// The mailbox of one connection.
#[derive(Default)]
pub(super) struct Mailbox {
    state: Mutex<State>,
    unsent: AtomicUsize,
    /// An answer was given that the peer's host may have no room for.
    large: AtomicBool,
}

/// Answers up to this length fit into what any host keeps for a process that does not read.
const LARGE: usize = 16 << 10;

impl Mailbox {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Leaves a note, and wakes the task if it sleeps.
    pub(super) fn post(&self, note: Note) {
        let mut state = self.lock();
        state.notes.push(note);
        let sleeper = state.sleeper.take();
        drop(state);
        if let Some(sleeper) = sleeper {
            sleeper.wake();
        }
    }

    /// Takes all notes. From here on until [`Mailbox::rest`] the task counts as running.
    pub(super) fn collect(&self) -> Vec<Note> {
        let mut state = self.lock();
        state.sleeper = None;
        std::mem::take(&mut state.notes)
    }

    /// Forgets that HTTP/2 wanted to be driven, as it is about to be.
    pub(super) fn calm(&self) {
        self.lock().stirred = false;
    }

    /// Lets the task sleep; `false` if there are notes to read first.
    pub(super) fn rest(&self, task: &Waker) -> bool {
        let mut state = self.lock();
        if !state.notes.is_empty() {
            return false;
        }
        if std::mem::take(&mut state.stirred) {
            // It asked to be driven again while it was being driven: in the next turn, so that
            // others get theirs.
            drop(state);
            task.wake_by_ref();
        } else {
            state.sleeper = Some(task.clone());
        }
        true
    }

    /// Answer bytes that the peer has not taken yet.
    pub(super) fn unsent(&self) -> usize {
        self.unsent.load(Ordering::Relaxed)
    }

    /// Counts answer bytes that are to be sent.
    pub(super) fn charge(&self, bytes: usize) {
        self.unsent.fetch_add(bytes, Ordering::Relaxed);
        if bytes > LARGE {
            self.large.store(true, Ordering::Relaxed);
        }
    }

    /// Whether there was a large answer since this was last asked.
    pub(super) fn had_large(&self) -> bool {
        self.large.load(Ordering::Relaxed) && self.large.swap(false, Ordering::Relaxed)
    }

    /// Counts answer bytes that are sent, or never will be.
    pub(super) fn discharge(&self, bytes: usize) {
        self.unsent.fetch_sub(bytes, Ordering::Relaxed);
    }
}

impl Inbox for Mailbox {
    fn deliver(&self, slot: u64, outcome: Outcome) {
        self.post(Note::Answer(slot, outcome));
    }
}

/// The waker that HTTP/2 and the socket are given.
impl Wake for Mailbox {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        let mut state = self.lock();
        state.stirred = true;
        if let Some(sleeper) = state.sleeper.take() {
            drop(state);
            sleeper.wake();
        }
    }
}

/// The waker of one slot, so that a stream that moves does not make the task look at all of them.
struct SlotWaker {
    mailbox: Arc<Mailbox>,
    slot: u64,
}

impl Wake for SlotWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.mailbox.post(Note::Stirred(self.slot));
    }
}

/// The waker for what happens to the stream in `slot`.
pub(super) fn slot_waker(mailbox: &Arc<Mailbox>, slot: u64) -> Waker {
    Arc::new(SlotWaker { mailbox: Arc::clone(mailbox), slot }).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn a_batch_wakes_once_and_only_a_sleeper() {
        let mailbox = Arc::new(Mailbox::default());
        let count = Arc::new(Count(AtomicUsize::new(0)));
        let task = Waker::from(Arc::clone(&count));
        let woken = || count.0.load(Ordering::Relaxed);

        assert!(mailbox.rest(&task));
        for slot in 0..3 {
            slot_waker(&mailbox, slot).wake();
        }
        assert_eq!(woken(), 1);

        assert_eq!(mailbox.collect().len(), 3);
        mailbox.post(Note::Stop);
        assert!(!mailbox.rest(&task), "there is a note to read");
        assert!(matches!(mailbox.collect()[..], [Note::Stop]));
        assert_eq!(woken(), 1);
    }

    #[test]
    fn http2_that_wants_another_turn_gets_it() {
        let mailbox = Arc::new(Mailbox::default());
        let count = Arc::new(Count(AtomicUsize::new(0)));
        let task = Waker::from(Arc::clone(&count));
        let woken = || count.0.load(Ordering::Relaxed);

        mailbox.collect();
        mailbox.wake_by_ref();
        mailbox.calm();
        assert!(mailbox.rest(&task));
        assert_eq!(woken(), 0, "what came before it was driven is taken care of");
        mailbox.wake_by_ref();
        assert_eq!(woken(), 1);

        mailbox.collect();
        mailbox.calm();
        mailbox.wake_by_ref();
        assert!(mailbox.rest(&task));
        assert_eq!(woken(), 2);
    }
}
