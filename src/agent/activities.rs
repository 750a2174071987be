//! The activities of an agent's program now: the calls that wait for the service, and an outer activity that the program
//! names, such as a step.
//!
//! `stack_answers.rs` sends them when the service asks. Begin at [`Activities::begin`].

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::clock;

/// The maximum number of calls that are recorded at once.
const CALLS_MAX: usize = 64;

/// A call that waits.
#[derive(Debug, Clone)]
struct OpenCall {
    text: String,
    since: Instant,
}

#[derive(Debug, Default)]
struct ActivityTable {
    outer: Option<String>,
    next: u64,
    calls: BTreeMap<u64, OpenCall>,
}

/// The present activities.
#[derive(Debug, Default)]
pub(super) struct Activities(Mutex<ActivityTable>);

/// A call that waits as long as this exists.
#[derive(Debug)]
pub(super) struct ActivityGuard<'a> {
    activities: &'a Activities,
    number: u64,
}

impl Activities {
    fn lock_table(&self) -> MutexGuard<'_, ActivityTable> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records a call that waits.
    pub fn begin(&self, text: impl FnOnce() -> String) -> ActivityGuard<'_> {
        let mut table = self.lock_table();
        table.next += 1;
        let number = table.next;
        if table.calls.len() < CALLS_MAX {
            table.calls.insert(number, OpenCall { text: text(), since: clock::monotonic() });
        }
        ActivityGuard { activities: self, number }
    }

    /// Names what the program does outside of calls, and around them.
    pub fn set_outer(&self, text: String) {
        self.lock_table().outer = Some(text);
    }

    /// Returns each waiting call with its outer activity, the outermost first, and its age. If no call waits, returns the
    /// outer activity alone.
    pub fn describe(&self) -> Vec<(Vec<String>, Option<Duration>)> {
        let table = self.lock_table();
        let outer = table.outer.iter().cloned();
        if table.calls.is_empty() {
            let nothing = "waits for no call to the service".to_owned();
            return vec![(outer.chain([nothing]).collect(), None)];
        }
        let calls = table.calls.values();
        calls
            .map(|call| (outer.clone().chain([call.text.clone()]).collect(), Some(call.since.elapsed())))
            .collect()
    }
}

impl Drop for ActivityGuard<'_> {
    fn drop(&mut self) {
        self.activities.lock_table().calls.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_described_as_long_as_they_wait() {
        let activities = Activities::default();
        let texts =
            || -> Vec<Vec<String>> { activities.describe().into_iter().map(|(texts, _)| texts).collect() };
        assert_eq!(texts(), [["waits for no call to the service"]]);
        activities.set_outer("step 3".into());
        let barrier = activities.begin(|| "barrier a".into());
        let key = activities.begin(|| "key b".into());
        assert_eq!(texts(), [["step 3", "barrier a"], ["step 3", "key b"]]);
        drop(barrier);
        assert_eq!(texts(), [["step 3", "key b"]]);
        drop(key);
        assert_eq!(texts(), [["step 3", "waits for no call to the service"]]);
        let many: Vec<_> = (0..CALLS_MAX + 9).map(|at| activities.begin(|| at.to_string())).collect();
        assert_eq!(texts().len(), CALLS_MAX);
        drop(many);
        assert_eq!(texts().len(), 1);
    }
}
