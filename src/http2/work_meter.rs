//! Counts the work that a peer causes, so that a connection with much work yields to other connections.
//!
//! Work is counted in steps, not measured in time, because reading the clock for each frame would cost more than
//! processing the frame. One step is about a tenth of a microsecond. Begin at [`WorkMeter::count`].

/// The steps of work after which a turn yields.
const STEPS_PER_TURN: usize = 4 << 10;

/// The steps of work that a peer has caused.
#[derive(Debug, Default)]
pub(super) struct WorkMeter {
    /// Since the last yield.
    batch: usize,
    /// Since the clock was last checked, without those of the batch.
    unchecked: usize,
}

impl WorkMeter {
    pub(super) fn count(&mut self, steps: usize) {
        self.batch += steps;
    }

    /// Returns whether answers should be sent, and the clock checked, before more input is processed.
    pub(super) fn is_batch_full(&self) -> bool {
        self.batch > STEPS_PER_TURN
    }

    pub(super) fn end_batch(&mut self) {
        self.unchecked += std::mem::take(&mut self.batch);
    }

    /// Returns whether enough work was done since the last such result to check the clock.
    pub(super) fn is_clock_check_due(&mut self) -> bool {
        let due = self.unchecked + self.batch > STEPS_PER_TURN / 2;
        if due {
            self.unchecked = 0;
        }
        due
    }
}
