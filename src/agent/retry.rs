//! Gives the pauses between attempts at a call while the service is unreachable, until a time limit has passed. The
//! pauses double from 50 ms to 1 s.
//!
//! `engine_host.rs` repeats the calls. Begin at [`RetryBudget::sleep_before_retry`].

use std::time::{Duration, Instant};

use super::error::AgentError;
use crate::clock;

const FIRST_PAUSE: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// A series of growing pauses with a limit.
pub struct RetryBudget {
    limit: Duration,
    pause: Duration,
    since: Option<Instant>,
}

impl RetryBudget {
    /// Returns a budget that is spent when calls have failed for `limit`.
    pub const fn new(limit: Duration) -> Self {
        Self { limit, pause: FIRST_PAUSE, since: None }
    }

    /// Sleeps before a failed call is repeated.
    ///
    /// # Errors
    /// The error itself, if calls have failed for too long.
    pub async fn sleep_before_retry(&mut self, error: AgentError) -> Result<(), AgentError> {
        let since = *self.since.get_or_insert_with(clock::monotonic);
        let over = clock::monotonic().saturating_duration_since(since) >= self.limit;
        if over {
            return Err(error);
        }
        tracing::debug!(%error, pause = ?self.pause, "tried again");
        tokio::time::sleep(self.pause).await;
        self.pause = (self.pause * 2).min(PAUSE_MAX);
        Ok(())
    }
}
