//! Aggregates refusals that have the same key. The first refusal of a key gets an audit line at once. Further
//! refusals in the same minute share one line, with a count.
//!
//! So a client that tries a thousand tokens is visible in the audit, but does not displace the actions of operators.
//! The HTTP port makes the keys, for example from the client network and the job. Begin at [`RefusalAggregator`].

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use super::line::AuditEntry;

/// The time during which refusals after a line are aggregated before they get a line.
pub(super) const AGGREGATION_WINDOW: Duration = Duration::from_secs(60);
/// The maximum number of keys. When there are as many, further keys share one.
const SOURCES_MAX: usize = 1024;

/// The refusals of one key since its last line.
#[derive(Default)]
struct PendingRefusals {
    times: u64,
    /// The latest refusal with its reason.
    latest: Option<(AuditEntry, String)>,
}

/// Aggregates refusals by key. Holds the keys that had a line less than a minute ago.
#[derive(Default)]
pub(super) struct RefusalAggregator {
    open: Mutex<HashMap<String, PendingRefusals>>,
    gathered: AtomicU64,
}

impl RefusalAggregator {
    /// Returns how many refusals were counted without a line of their own.
    pub fn aggregated_count(&self) -> u64 {
        self.gathered.load(Ordering::Relaxed)
    }

    /// Counts a refusal. Returns it with its key if it is the first one, which gets a line at once.
    pub fn count_or_return_first_refusal(
        &self,
        source: String,
        deed: AuditEntry,
        detail: String,
    ) -> Option<(String, AuditEntry, String)> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let full = open.len() >= SOURCES_MAX && !open.contains_key(&source);
        let source = if full { String::new() } else { source };
        if let Some(since) = open.get_mut(&source) {
            since.times += 1;
            since.latest = Some((deed, detail));
            self.gathered.fetch_add(1, Ordering::Relaxed);
            return None;
        }
        open.insert(source.clone(), PendingRefusals::default());
        Some((source, deed, detail))
    }

    /// Takes the refusals of a key after its minute. If there are none, the key is removed.
    pub fn take_pending_refusals(&self, source: &str) -> Option<(u64, AuditEntry, String)> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let since = std::mem::take(open.get_mut(source)?);
        let Some((deed, detail)) = since.latest else {
            open.remove(source);
            return None;
        };
        Some((since.times, deed, detail))
    }

    /// Returns every key.
    pub fn pending_keys(&self) -> Vec<String> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner).keys().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::clock::Clock;
    use crate::coordination::{Actor, ActorOrigin};
    use crate::service::audit::AuditLog;

    fn record_test_refusal(audit: &Arc<AuditLog>, source: &str, subject: &str) {
        let actor = Actor { who: Actor::ANONYMOUS.into(), address: None, means: ActorOrigin::Api };
        let subject = subject.to_owned();
        let deed = AuditEntry { actor, role: None, job: None, act: "look", subject, reason: None };
        audit.record_refusal_aggregated(Clock::start(), source.into(), deed, "no".into());
    }

    fn subjects_and_times(audit: &AuditLog) -> Vec<(String, u64)> {
        let lines = audit.latest_lines(usize::MAX, |_| true);
        lines.into_iter().rev().map(|line| (line.subject, line.times)).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn the_first_refusal_of_a_source_is_written_at_once_and_then_a_line_a_minute_says_how_many() {
        let audit = Arc::new(AuditLog::new(8));
        for n in 0..1_000 {
            record_test_refusal(&audit, "10.0.0.1", &format!("/{n}"));
        }
        record_test_refusal(&audit, "10.0.0.2", "/other");
        assert_eq!(subjects_and_times(&audit), [("/0".into(), 1), ("/other".into(), 1)]);
        tokio::time::sleep(AGGREGATION_WINDOW + Duration::from_secs(1)).await;
        assert_eq!(subjects_and_times(&audit)[2..], [("/999".into(), 999)]);
        record_test_refusal(&audit, "10.0.0.1", "/again");
        record_test_refusal(&audit, "10.0.0.2", "/more");
        assert_eq!(subjects_and_times(&audit)[3..], [("/more".into(), 1)], "a minute without any is over");
        tokio::time::sleep(AGGREGATION_WINDOW).await;
        assert_eq!(subjects_and_times(&audit)[4..], [("/again".into(), 1)]);
        record_test_refusal(&audit, "10.0.0.2", "/last");
        audit.flush_all_pending_refusals(Clock::start());
        assert_eq!(subjects_and_times(&audit).last(), Some(&("/last".into(), 1)));
        assert_eq!(audit.stats().gathered, 1_001);
    }

    #[tokio::test(start_paused = true)]
    async fn refusals_are_aggregated_by_network_within_a_bound() {
        let audit = Arc::new(AuditLog::new(1 << 14));
        for n in 0..SOURCES_MAX * 2 {
            record_test_refusal(&audit, &n.to_string(), "/");
        }
        assert_eq!(
            subjects_and_times(&audit).len(),
            SOURCES_MAX + 1,
            "those for whom there is no room share one"
        );
    }
}
