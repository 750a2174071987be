//! Keeps the lines of the audit over a restart of the service: each line is a note in the engine's journal, and snapshots
//! have the lines that are in memory.
//!
//! A line is written as JSON, because it has fields with defaults, which only self-describing formats can restore. Begin at
//! the implementation of [`PersistentObserver`].

use std::sync::Arc;

use super::{AuditLine, AuditLog};
use crate::coordination::{BarrierRecordWithArrivals, JobEvent};
use crate::engine::{ContentsSerialiser, Observer, PersistentObserver};

impl AuditLog {
    /// The name of the lines in the journal.
    pub(super) const NAME: &'static str = "audit";

    /// Adds a line of an earlier process, unless it is there. Notes may be in another order than the lines.
    fn restore_line(&self, line: AuditLine) {
        let mut lines = self.lock_lines();
        let place = lines.kept.partition_point(|kept| kept.number < line.number);
        if lines.kept.get(place).is_some_and(|kept| kept.number == line.number) {
            return;
        }
        lines.last = lines.last.max(line.number);
        lines.kept.insert(place, line);
        while lines.kept.len() > self.capacity {
            lines.kept.pop_front();
        }
        self.appended.send_replace(lines.last);
    }
}

// The lines come from operations, not from events.
impl Observer for AuditLog {
    fn on_event(&self, _: &JobEvent) {}

    fn on_barrier_ended(&self, _: &Arc<BarrierRecordWithArrivals>) {}
}

impl PersistentObserver for AuditLog {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn copy_contents(&self) -> ContentsSerialiser {
        let lines = self.lock_lines().kept.clone();
        Box::new(move || serde_json::to_vec(&lines).expect("every line can be serialised"))
    }

    fn restore(&self, bytes: &[u8]) -> Result<(), String> {
        let lines: Vec<AuditLine> = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
        *self.lock_lines() = super::AuditBuffer::default();
        lines.into_iter().for_each(|line| self.restore_line(line));
        Ok(())
    }

    fn restore_note(&self, bytes: &[u8]) -> Result<(), String> {
        let line: AuditLine = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
        self.restore_line(line);
        Ok(())
    }
}
