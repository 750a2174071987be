//! Converts names of jobs, numbers and times to the values that spans contain.
//!
//! `mod.rs` and `exclusion_spans.rs` make the spans. Begin at `JobNameCache`.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError, Weak};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::coordination::{JobId, JobName, Timestamp};
use crate::engine::Engine;

/// The maximum number of arrival events in the span of a barrier.
pub(super) const BARRIER_EVENTS_MAX: u32 = 1 << 14;

/// The names of jobs, which never change.
pub(super) struct JobNameCache {
    engine: Weak<Engine>,
    known: Mutex<HashMap<JobId, JobName>>,
}

impl JobNameCache {
    pub(super) fn new(engine: Weak<Engine>) -> Self {
        Self { engine, known: Mutex::default() }
    }

    /// Returns the name of a job; an empty one if the job was deleted before it was known.
    pub(super) fn name_of(&self, job: JobId) -> JobName {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(name) = known.get(&job) {
            return name.clone();
        }
        let name = self
            .engine
            .upgrade()
            .and_then(|engine| engine.read_under_lock(|core| core.job_name(job).cloned()));
        name.inspect(|name| {
            known.insert(job, name.clone());
        })
        .unwrap_or_default()
    }
}

pub(super) fn saturating_i64(n: u64) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}

pub(super) fn to_system_time(at: Timestamp) -> SystemTime {
    UNIX_EPOCH + Duration::from_micros(at.0)
}
