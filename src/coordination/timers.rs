//! The deadlines of one run: heartbeats, grace periods, barriers.
//!
//! It acts on none: `Run::fire` does when they are due. Begin at [`Timer`].

use serde::{Deserialize, Serialize};

use super::barrier::BarrierKey;
use super::ids::{TaskId, Timestamp};
use crate::cow::CowMap;

/// One deadline.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) enum Timer {
    /// A connected task may have been silent for too long. One stands for each connected task; signs of life do
    /// not move it: when it fires it looks at the last one and, if that was later, stands again at the exact moment.
    Heartbeat(TaskId),
    /// A suspected task's grace runs out.
    Grace(TaskId),
    /// A barrier instance has not completed in time.
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
    pub fn clear_heartbeats(&mut self) {
        self.0.retain(|(_, timer), ()| !matches!(timer, Timer::Heartbeat(_)));
    }

    pub fn next(&self) -> Option<Timestamp> {
        self.0.first_key_value().map(|((at, _), ())| *at)
    }

    /// Takes the first timer that is due.
    pub fn pop_due(&mut self, now: Timestamp) -> Option<Timer> {
        if self.next()? > now {
            return None;
        }
        self.0.pop_first().map(|((_, timer), ())| timer)
    }

    /// Whether `timer` will fire at `at`.
    pub fn is_set(&self, at: Timestamp, timer: &Timer) -> bool {
        self.0.contains_key(&(at, timer.clone()))
    }

    /// Whether the table is in order.
    pub fn is_consistent(&self) -> bool {
        self.0.is_consistent()
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }
}
