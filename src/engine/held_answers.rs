//! Answers that wait until the record of their input is on the disk ([`Durability::Host`](super::Durability)). Begin at
//! [`HeldAnswers::hold`].
//!
//! The thread of the journal that writes to the disk delivers them, all that one write covers together.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use muster_journal::JournalSync;

use super::waiting_calls::WaitingCall;
use crate::coordination::CallOutcome;

/// The greatest time for which a command, a claim or a declaration waits for the disk. It is done and recorded by then, and is
/// answered, though a disk that hangs does not have it yet.
const COMMAND_WAIT_MAX: Duration = Duration::from_secs(5);

/// An answer, and the number below which all records must be on the disk.
struct HeldAnswer {
    until: u64,
    call: WaitingCall,
    outcome: CallOutcome,
}

/// The answers that wait for the disk.
pub(super) struct HeldAnswers {
    answers: Mutex<VecDeque<HeldAnswer>>,
    /// Held by the thread that takes answers out of the list until they are delivered.
    delivering: Mutex<()>,
    sync: JournalSync,
}

impl HeldAnswers {
    /// Returns an empty list, which is served by `sync`.
    pub fn new(sync: JournalSync) -> Arc<Self> {
        let held = Arc::new(Self { answers: Mutex::default(), delivering: Mutex::default(), sync });
        let weak = Arc::downgrade(&held);
        held.sync.set_durable_hook(Box::new(move |durable| {
            if let Some(held) = weak.upgrade() {
                held.deliver_up_to(durable);
            }
        }));
        held
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<HeldAnswer>> {
        self.answers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Delivers `answers` as soon as all records below `until` are on the disk.
    pub fn hold(&self, until: u64, answers: impl IntoIterator<Item = (WaitingCall, CallOutcome)>) {
        let mut held = self.lock();
        let before = held.len();
        held.extend(answers.into_iter().map(|(call, outcome)| HeldAnswer { until, call, outcome }));
        if held.len() == before {
            return;
        }
        drop(held);
        self.sync.request_sync();
        // The write may have ended before the answers were in the list.
        let durable = self.sync.durable_records();
        if durable >= until {
            self.deliver_up_to(durable);
        }
    }

    fn deliver_up_to(&self, durable: u64) {
        let _delivering = self.delivering.lock().unwrap_or_else(PoisonError::into_inner);
        // Delivered without the lock of the list: others add to it meanwhile.
        let covered: Vec<HeldAnswer> = {
            let mut held = self.lock();
            let count = held.iter().take_while(|answer| answer.until <= durable).count();
            held.drain(..count).collect()
        };
        for HeldAnswer { call, outcome, .. } in covered {
            call.inbox.deliver(call.slot, outcome);
        }
    }

    /// Waits until no answer waits any more for the records below `until`, for a limited time. A disk that has failed has them
    /// only after the next snapshot.
    pub fn wait_until_delivered(&self, until: u64) {
        if self.lock().iter().any(|answer| answer.until <= until) {
            self.sync.wait_until_durable(until, COMMAND_WAIT_MAX);
            self.deliver_up_to(self.sync.durable_records());
        }
        drop(self.delivering.lock());
    }

    /// Waits until all records below `until` are on the disk, for a limited time.
    pub fn wait(&self, until: u64) {
        self.sync.wait_until_durable(until, COMMAND_WAIT_MAX);
    }
}
