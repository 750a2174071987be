//! The view of the processes that the service remembers for a job: the owner of each task id, and the processes
//! that wait for an id.
//!
//! Begin at [`TaskOwnersView`].

use std::net::IpAddr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::job::JobReader;
use crate::coordination::ids::{RunNumber, TaskId, Timestamp};
use crate::coordination::process_identity::ProcessIdentity;

/// The process to which a task id belongs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TaskOwnerView {
    /// The task.
    pub task: TaskId,
    /// The identity of the process.
    #[serde(flatten)]
    pub identity: ProcessIdentity,
    /// The run for which it claimed the id last.
    pub run: RunNumber,
    /// The time of that claim.
    pub claimed_at: Timestamp,
    /// The address from which it came.
    #[schema(value_type = Option<String>)]
    pub address: Option<IpAddr>,
    /// Whether a process holds the id now: it registers or is connected, or claimed the id just now.
    pub held: bool,
}

/// A process that waits for a task id.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ClaimantView {
    /// The identity of the process.
    #[serde(flatten)]
    pub identity: ProcessIdentity,
    /// The time since which it waits.
    pub since: Timestamp,
    /// The address from which it came.
    #[schema(value_type = Option<String>)]
    pub address: Option<IpAddr>,
}

/// The owners of task ids, and the processes that wait for an id.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TaskOwnersView {
    /// The processes to which task ids belong, by task.
    pub owners: Vec<TaskOwnerView>,
    /// The processes that wait for a task id, by identity.
    pub waiting: Vec<ClaimantView>,
}

impl JobReader<'_> {
    /// Returns the owners of task ids, and the processes that wait for an id.
    #[must_use]
    pub fn task_owners(&self, now: Timestamp) -> TaskOwnersView {
        let job = self.job_state();
        let joins = job.run_that_registrations_join();
        let owners = job.task_owners.owners().map(|(task, owner)| TaskOwnerView {
            task,
            identity: owner.identity.clone(),
            run: owner.run,
            claimed_at: owner.claimed_at,
            address: owner.address,
            held: job.is_task_id_held(task, joins, now),
        });
        let waiting = job.task_owners.waiting_claims().map(|(identity, claim)| ClaimantView {
            identity: identity.clone(),
            since: claim.since,
            address: claim.address,
        });
        TaskOwnersView { owners: owners.collect(), waiting: waiting.collect() }
    }
}
