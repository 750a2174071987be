//! A live-set request in progress: the tasks that have called, and the number of live members that have not called.
//!
//! `live_set_rules.rs` has the rules. Begin at `LiveSetRequest`.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::ids::{CallId, TaskId, Timestamp};
use crate::cow::CowMap;

/// One live-set request in progress, for one set of tasks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct LiveSetRequest {
    pub since: Timestamp,
    /// The task that called first.
    pub first: TaskId,
    /// The task that called last, and the time of its call.
    pub last: (TaskId, Timestamp),
    /// The tasks that have called, with the calls to answer (a task may have called more than once).
    pub callers: CowMap<TaskId, BTreeSet<CallId>>,
    /// The number of live members that have not called.
    pub awaited: usize,
}
