//! The deadlines of one run: heartbeats, grace periods, barriers.
//!
//! This module only stores deadlines. `Run::fire_timers` handles those that are due. Begin at [`Timer`].

use serde::{Deserialize, Serialize};

use super::barrier_table::BarrierKey;
use super::ids::{TaskId, Timestamp};
use crate::cow::CowMap;

/// One deadline.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) enum Timer {
    /// The heartbeat timeout of a connected task, one timer for each. Heartbeats do not move it: when it
    /// fires it compares with the last heartbeat and, if that was later, is set again to the exact moment.
    Heartbeat(TaskId),
    /// The end of a suspected task's grace.
    Grace(TaskId),
    /// The timeout of a barrier instance.
    Barrier(BarrierKey),
}

#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Timers(CowMap<(Timestamp, Timer), ()>);

impl Timers {
    pub fn set(&mut self, at: Timestamp, timer: Timer) {
        self.0.insert((at, timer), ());
    }

    pub fn clear(&mut self, at: Timestamp, timer: Timer) {
        self.0.remove(&(at, timer));
    }

    /// Clears the heartbeat timers of all tasks.
    pub fn clear_heartbeat_timers(&mut self) {
        self.0.retain(|(_, timer), ()| !matches!(timer, Timer::Heartbeat(_)));
    }

    pub fn next_deadline(&self) -> Option<Timestamp> {
        self.0.first_key_value().map(|((at, _), ())| *at)
    }

    /// Removes and returns the first timer that is due.
    pub fn pop_due(&mut self, now: Timestamp) -> Option<Timer> {
        if self.next_deadline()? > now {
            return None;
        }
        self.0.pop_first().map(|((_, timer), ())| timer)
    }

    /// Returns whether `timer` will fire at `at`.
    pub fn is_set(&self, at: Timestamp, timer: &Timer) -> bool {
        self.0.contains_key(&(at, timer.clone()))
    }

    /// Returns whether the table is consistent.
    pub fn is_consistent(&self) -> bool {
        self.0.is_consistent()
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }
}
