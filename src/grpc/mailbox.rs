//! The mailbox of one connection: passes messages from other threads to the tokio task of the connection, and wakes
//! this task.
//!
//! The messages are answers to waiting calls, wake-ups of slots, and orders to stop. A slot is woken, for
//! example, when it gets memory for its body, or a part of an auxiliary response. A batch of messages wakes the task
//! once. A message that arrives while the task runs, or that the task sends to itself, causes no wakeup. Begin at
//! [`Mailbox::post`].

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Wake, Waker};

use crate::coordination::CallOutcome;
use crate::engine::{AnswerInbox, FlushToken};

/// A message to the task of a connection.
pub(super) enum MailboxMessage {
    /// The answer to the call in this slot.
    Answer(u64, CallOutcome),
    /// The event for which this slot waits may have happened.
    SlotReady(u64),
    /// Commit the answers so far to the log, if the connection is kept, and then drop this.
    Flush(FlushToken),
    /// Send GOAWAY, finish what is in progress, and close.
    Stop,
    /// Close now.
    Abort,
}

/// The mailboxes of several connections.
pub(super) trait MailboxGroup: Send + Sync {
    /// Sends a message to every connection.
    fn post_to_all(&self, message: &dyn Fn() -> MailboxMessage);
}

#[derive(Default)]
struct MailboxState {
    messages: Vec<MailboxMessage>,
    /// The task's waker since it last slept; none once it was woken.
    sleeper: Option<Waker>,
    /// Whether the task sleeps.
    is_asleep: bool,
    /// Whether the connection has ended: messages are dropped.
    is_closed: bool,
}

/// The mailbox of one connection.
#[derive(Default)]
pub(super) struct Mailbox {
    state: Mutex<MailboxState>,
}

impl Mailbox {
    fn lock(&self) -> MutexGuard<'_, MailboxState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Posts a message, and wakes the task if it sleeps.
    pub(super) fn post(&self, message: MailboxMessage) {
        let mut state = self.lock();
        if state.is_closed {
            return;
        }
        state.messages.push(message);
        let sleeper = if std::mem::take(&mut state.is_asleep) { state.sleeper.take() } else { None };
        drop(state);
        if let Some(sleeper) = sleeper {
            sleeper.wake();
        }
    }

    /// Drops all messages, and those that come later.
    pub(super) fn close(&self) {
        let mut state = self.lock();
        state.is_closed = true;
        let messages = std::mem::take(&mut state.messages);
        drop(state);
        drop(messages);
    }

    /// Takes all messages. From here on until [`Mailbox::try_sleep`] the task counts as running.
    pub(super) fn take_messages(&self) -> Vec<MailboxMessage> {
        let mut state = self.lock();
        state.is_asleep = false;
        std::mem::take(&mut state.messages)
    }

    /// Lets the task sleep; returns `false` if there are messages to process first.
    pub(super) fn try_sleep(&self, task: &Waker) -> bool {
        let mut state = self.lock();
        if !state.messages.is_empty() {
            return false;
        }
        // A waker that is kept costs no access to the task's counter of references.
        if !state.sleeper.as_ref().is_some_and(|sleeper| sleeper.will_wake(task)) {
            state.sleeper = Some(task.clone());
        }
        state.is_asleep = true;
        true
    }
}

impl AnswerInbox for Mailbox {
    fn deliver(&self, slot: u64, outcome: CallOutcome) {
        self.post(MailboxMessage::Answer(slot, outcome));
    }
}

/// The waker of one slot, so that the event of one call does not make the task check all of them.
struct SlotWaker {
    mailbox: Arc<Mailbox>,
    slot: u64,
}

impl Wake for SlotWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.mailbox.post(MailboxMessage::SlotReady(self.slot));
    }
}

/// Returns the waker for the event for which the call in `slot` waits.
pub(super) fn slot_waker(mailbox: &Arc<Mailbox>, slot: u64) -> Waker {
    Arc::new(SlotWaker { mailbox: Arc::clone(mailbox), slot }).into()
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    struct WakeCounter(AtomicUsize);

    impl Wake for WakeCounter {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn a_batch_wakes_once_and_only_a_sleeper() {
        let mailbox = Arc::new(Mailbox::default());
        let count = Arc::new(WakeCounter(AtomicUsize::new(0)));
        let task = Waker::from(Arc::clone(&count));
        let woken = || count.0.load(Ordering::Relaxed);

        assert!(mailbox.try_sleep(&task));
        for slot in 0..3 {
            slot_waker(&mailbox, slot).wake();
        }
        assert_eq!(woken(), 1);

        assert_eq!(mailbox.take_messages().len(), 3);
        mailbox.post(MailboxMessage::Stop);
        assert!(!mailbox.try_sleep(&task), "there is a message to read");
        assert!(matches!(mailbox.take_messages()[..], [MailboxMessage::Stop]));
        assert_eq!(woken(), 1);
    }
}
