//! The table of live-set requests in progress: their callers, and how many live members have not called.
//!
//! `live_set_rules.rs` has the rules. Begin at `LiveSetRequest`.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::ids::{CallId, TaskId, Timestamp};
use crate::cow::CowMap;

/// One question in progress, about one set of tasks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct LiveSetRequest {
    pub since: Timestamp,
    /// Who asked first, and who asked last and when.
    pub first: TaskId,
    pub last: (TaskId, Timestamp),
    /// Who has asked, with the calls to answer (one task may have asked more than once).
    pub callers: CowMap<TaskId, BTreeSet<CallId>>,
    /// How many live members have not asked.
    pub awaited: usize,
}
