//! Counts the work that a peer causes, so that a connection with much work yields to other connections.
//!
//! Work is counted in steps, not measured in time, because reading the clock for each frame would cost more than
//! processing the frame. One step is about a tenth of a microsecond. The owner reads the clock when
//! [`WorkMeter::is_clock_check_due`] says so, and calls [`WorkMeter::end_turn`] if the turn has lasted too long. Begin at
//! [`WorkMeter::count`].

/// The steps of work after which the answers are sent.
const STEPS_PER_BATCH: usize = 4 << 10;
/// The steps of work between two checks of the clock. A call takes the engine's lock. If the thread that holds the lock has
/// lost its processor, the call waits for milliseconds, so there are few calls between two checks.
const STEPS_BETWEEN_CHECKS: usize = 256;

/// The steps of work that a peer has caused.
#[derive(Debug, Default)]
pub(super) struct WorkMeter {
    /// Since the connection began; it wraps around.
    total: usize,
    /// The total at the begin of the batch.
    batch_began: usize,
    /// The total at the last check of the clock.
    checked: usize,
    /// Whether nothing more is processed in this turn.
    is_turn_over: bool,
}

impl WorkMeter {
    pub(super) fn count(&mut self, steps: usize) {
        self.total = self.total.wrapping_add(steps);
    }

    /// Returns whether answers should be sent before more input is processed, or the turn is over.
    pub(super) fn should_yield(&self) -> bool {
        self.is_turn_over || self.total.wrapping_sub(self.batch_began) > STEPS_PER_BATCH
    }

    pub(super) fn end_batch(&mut self) {
        self.batch_began = self.total;
    }

    /// Returns whether enough work was done since the last such result to check the clock.
    pub(super) fn is_clock_check_due(&mut self) -> bool {
        let due = self.total.wrapping_sub(self.checked) > STEPS_BETWEEN_CHECKS;
        if due {
            self.checked = self.total;
        }
        due
    }

    pub(super) fn begin_turn(&mut self) {
        self.is_turn_over = false;
    }

    pub(super) fn end_turn(&mut self) {
        self.is_turn_over = true;
    }

    pub(super) fn is_turn_over(&self) -> bool {
        self.is_turn_over
    }
}
