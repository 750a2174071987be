//! The view of an exclusion, in force or ended.
//!
//! Begin at [`ExclusionView`].

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::coordination::actor::{Actor, CommandReason};
use crate::coordination::exclusion::{Exclusion, ExclusionEndRecord, ExclusionTarget};
use crate::coordination::ids::{ExclusionId, TaskId, Timestamp};
use crate::coordination::job::Job;

/// One exclusion.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ExclusionView {
    /// The number of the exclusion within the job.
    pub id: ExclusionId,
    /// The excluded `task` or `host`.
    #[serde(flatten)]
    pub target: ExclusionTarget,
    /// The tasks of the present run that it keeps out; none once it has ended.
    pub tasks: Vec<TaskId>,
    /// The operator who made it.
    pub actor: Actor,
    /// The operator's reason.
    pub reason: CommandReason,
    /// The time since which it is in force.
    pub since: Timestamp,
    /// The time at which it expires; `None`: when an operator lifts it.
    pub expires_at: Option<Timestamp>,
    /// The number of registrations that it has refused.
    pub refused: u64,
    /// The time of the last refusal.
    pub last_refused_at: Option<Timestamp>,
    /// The record of its end; `None` while it is in force.
    pub ended: Option<ExclusionEndRecord>,
}

impl Job {
    /// Returns the exclusions in force, and the ended ones if `with_past`.
    pub(super) fn exclusion_views(&self, with_past: bool) -> Vec<ExclusionView> {
        let view = |exclusion: &Exclusion, ended: Option<&ExclusionEndRecord>| ExclusionView {
            id: exclusion.id,
            target: exclusion.target.clone(),
            tasks: if ended.is_some() { Vec::new() } else { self.tasks_excluded_by(&exclusion.target) },
            actor: exclusion.actor.clone(),
            reason: exclusion.reason.clone(),
            since: exclusion.since,
            expires_at: exclusion.expires_at,
            refused: exclusion.refused,
            last_refused_at: exclusion.last_refused_at,
            ended: ended.cloned(),
        };
        let present = self.exclusions.in_force().map(|exclusion| view(exclusion, None));
        let past = self.exclusions.ended().filter(|_| with_past);
        present.chain(past.map(|(exclusion, ended)| view(exclusion, Some(ended)))).collect()
    }
}
