//! A barrier of several clients, with its history. Begin at [`SharedBarrier`].

use std::sync::{Mutex, MutexGuard};

use super::barrier_history::{BarrierHistory, RoundResult};

/// A barrier with its history.
pub struct SharedBarrier {
    pub id: String,
    pub members: Vec<i32>,
    history: Mutex<BarrierHistory>,
}

impl SharedBarrier {
    pub fn new(id: String, members: Vec<i32>) -> Self {
        Self { id, history: Mutex::new(BarrierHistory::new(members.clone())), members }
    }

    fn history(&self) -> MutexGuard<'_, BarrierHistory> {
        self.history.lock().expect("no holder panics")
    }

    pub fn record_arrival(&self, task: i32, round: i64) {
        self.history().record_arrival(task, round);
    }

    pub fn record_cancellation(&self, task: i32, round: i64) {
        self.history().record_cancellation(task, round);
    }

    pub fn record_pass(&self, task: i32, round: i64, counter: i64) {
        self.history().record_result(task, round, RoundResult::Passed(counter));
    }

    pub fn record_cancelled_round(&self, task: i32, round: i64) {
        self.history().record_result(task, round, RoundResult::Cancelled);
    }

    /// Checks the history, and returns the number of rounds that all members have passed.
    pub fn check(&self) -> i64 {
        self.history().check().unwrap_or_else(|why| panic!("barrier {:?}: {why}", self.id))
    }
}
