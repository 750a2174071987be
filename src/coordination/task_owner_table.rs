//! The owners of a job's task ids, and the claims that wait for an id. The owner of a task id is the process
//! identity to which the id belongs. The table belongs to the job and outlives its runs.
//!
//! `task_id_claims.rs` decides which process gets an id. Begin at [`TaskOwnerTable`].
//!
//! Bounds: each task id has at most one owner, and a job of N tasks has at most N + 64 waiting claims. A claim that
//! is not repeated is dropped. A claim costs a search in ordered tables. It also costs a pass over all tasks if three
//! numbers together are at least the number of tasks: the waiting claims, the ids claimed for the run, and the tasks
//! that register or are connected. These numbers may count a process twice.

use std::collections::BTreeSet;
use std::fmt;
use std::net::IpAddr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::ids::{ConnectionId, RunNumber, TaskId, Timestamp};
use super::process_identity::ProcessIdentity;
use crate::cow::CowMap;

/// The time for which a claim holds its task id before the task registers, and for which a waiting claim counts before
/// it is repeated.
pub(super) const CLAIM_LEASE: Duration = Duration::from_secs(10);

/// The number of claims that may wait beyond the number of tasks: spare hosts.
const SPARE_CLAIMS: usize = 64;

/// The claim of a process on the task id of its identity.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaskClaim {
    /// The identity of the process.
    pub identity: ProcessIdentity,
    /// The random number of this life of the process: it tells a repeated claim from that of another process.
    pub claimant: u64,
    /// The connection on which the claim came, if it came by the port of tasks.
    pub connection: Option<ConnectionId>,
}

/// The answer to a claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ClaimAnswer {
    /// The process is this task.
    Granted {
        /// The task.
        task: TaskId,
        /// The number of tasks of the job.
        tasks: u32,
    },
    /// The process is no task yet, and should ask again.
    Pending {
        /// The reason.
        why: ClaimWaitReason,
        /// The number of tasks of the job.
        tasks: u32,
        /// The time after which it should ask again.
        retry_after: Duration,
    },
}

/// The reason for which a claim waits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ClaimWaitReason {
    /// The identity is new, and fewer processes are present than the job has tasks: it is open whose id it may take.
    TooFew {
        /// The number of processes that hold an id or wait for one.
        present: usize,
        /// The number of tasks.
        tasks: usize,
    },
    /// Another process of the same identity holds its task id.
    HeldBySame {
        /// The identity.
        identity: ProcessIdentity,
        /// The task.
        task: Option<TaskId>,
        /// The address of the other process.
        address: Option<IpAddr>,
    },
    /// The identity is new, and other processes hold every task id.
    NoneFree {
        /// The number of tasks.
        tasks: usize,
    },
}

impl ClaimWaitReason {
    /// Returns the stable, machine-readable name of the reason.
    #[must_use]
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::TooFew { .. } => "too-few",
            Self::HeldBySame { .. } => "held-by-same",
            Self::NoneFree { .. } => "none-free",
        }
    }
}

impl fmt::Display for ClaimWaitReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooFew { present, tasks } => write!(
                f,
                "this host is new to the job, and {present} of {tasks} processes are present: a new host gets its task \
                 id when all are, because the ids of hosts that are still missing may be theirs"
            ),
            Self::HeldBySame { identity, task, address } => {
                write!(f, "another process says that it is {identity}")?;
                if let Some(address) = address {
                    write!(f, ", at {address}")?;
                }
                match task {
                    Some(task) => write!(f, ", and holds task {task}")?,
                    None => f.write_str(", and waits for a task id")?,
                }
                f.write_str(
                    ": if one host runs several processes, set MUSTER_LOCAL_PROCESS_ID; if two hosts have the same \
                     identity, set MUSTER_HOST_ID",
                )
            }
            Self::NoneFree { tasks } => write!(
                f,
                "this host is new to the job, and other processes hold all {tasks} task ids: it is a spare until one of \
                 them is gone"
            ),
        }
    }
}

/// The reason for which a claim is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ClaimRefusal {
    /// There is no such job.
    #[error("the job does not exist any more")]
    NoSuchJob,
    /// Too many claims wait.
    #[error(
        "{waiting} new processes wait for the ids of {tasks} tasks already: start as many as the job has tasks"
    )]
    TooManyClaims {
        /// The number of waiting claims.
        waiting: usize,
        /// The number of tasks.
        tasks: usize,
    },
    /// The service cannot record changes now.
    #[error("{0}")]
    NotRecordable(String),
}

/// The process to which a task id belongs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct TaskOwner {
    pub identity: ProcessIdentity,
    /// The life of the process that claimed the id last.
    pub claimant: u64,
    /// The run for which it was claimed.
    pub run: RunNumber,
    pub claimed_at: Timestamp,
    pub address: Option<IpAddr>,
}

impl TaskOwner {
    /// Returns whether the claim alone holds the id at `now`.
    pub fn has_lease(&self, joins: RunNumber, now: Timestamp) -> bool {
        self.run == joins && now < self.claimed_at.after(CLAIM_LEASE)
    }
}

/// A claim that waits for a task id.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct WaitingClaim {
    pub claimant: u64,
    /// The time of its latest repetition.
    pub at: Timestamp,
    pub since: Timestamp,
    pub address: Option<IpAddr>,
}

/// The result of adding a waiting claim.
pub(super) enum AddClaimResult {
    Waits,
    /// Another process of the same identity waits.
    Duplicate(WaitingClaim),
    Full,
}

/// The owners of a job's task ids, and the waiting claims.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct TaskOwnerTable {
    owners: CowMap<TaskId, TaskOwner>,
    tasks: CowMap<ProcessIdentity, TaskId>,
    waiting: CowMap<ProcessIdentity, WaitingClaim>,
    by_time: BTreeSet<(Timestamp, ProcessIdentity)>,
    /// The number of owners that claimed their id for the latest run.
    claimed: Option<(RunNumber, usize)>,
}

impl TaskOwnerTable {
    /// Returns the task id of an identity.
    pub fn task_of_identity(&self, identity: &ProcessIdentity) -> Option<TaskId> {
        self.tasks.get(identity).copied()
    }

    /// Returns the owner of a task id.
    pub fn owner(&self, task: TaskId) -> Option<&TaskOwner> {
        self.owners.get(&task)
    }

    /// Returns every owner, by task id.
    pub fn owners(&self) -> impl Iterator<Item = (TaskId, &TaskOwner)> {
        self.owners.iter().map(|(task, owner)| (*task, owner))
    }

    /// Returns every waiting claim, by identity.
    pub fn waiting_claims(&self) -> impl Iterator<Item = (&ProcessIdentity, &WaitingClaim)> {
        self.waiting.iter()
    }

    /// Returns the number of waiting claims.
    pub fn waiting_claim_count(&self) -> usize {
        self.waiting.len()
    }

    /// Returns how many owners claimed their id for a run.
    pub fn count_owners_that_claimed_for_run(&self, run: RunNumber) -> usize {
        self.claimed.filter(|(of, _)| *of == run).map_or(0, |(_, count)| count)
    }

    /// Makes a process the owner of a task id, and of no other.
    pub fn set_owner(&mut self, task: TaskId, owner: TaskOwner) {
        self.remove_waiting_claim(&owner.identity);
        if let Some(former) = self.tasks.get(&owner.identity).copied() {
            self.remove_owner_of_task(former);
        }
        self.remove_owner_of_task(task);
        self.claimed = Some((owner.run, self.count_owners_that_claimed_for_run(owner.run) + 1));
        self.tasks.insert(owner.identity.clone(), task);
        self.owners.insert(task, owner);
    }

    /// Forgets the owner of a task id; returns it.
    pub fn remove_owner_of_task(&mut self, task: TaskId) -> Option<TaskOwner> {
        let owner = self.owners.remove(&task)?;
        self.tasks.remove(&owner.identity);
        if let Some((run, count)) = &mut self.claimed
            && *run == owner.run
        {
            *count -= 1;
        }
        Some(owner)
    }

    /// Forgets the owners of ids that the job has no more.
    pub fn remove_owners_of_ids_from(&mut self, tasks: u32) {
        let beyond: Vec<TaskId> =
            self.owners.keys().rev().take_while(|task| task.0 >= task_count_as_id(tasks)).copied().collect();
        for task in beyond {
            self.remove_owner_of_task(task);
        }
    }

    /// Adds or repeats a waiting claim.
    pub fn add_waiting_claim(
        &mut self,
        claim: &TaskClaim,
        address: Option<IpAddr>,
        now: Timestamp,
        tasks: usize,
    ) -> AddClaimResult {
        let identity = &claim.identity;
        let since = match self.waiting.get(identity) {
            Some(known) if known.claimant != claim.claimant => {
                return AddClaimResult::Duplicate(known.clone());
            }
            Some(known) => known.since,
            None if self.waiting.len() >= tasks.saturating_add(SPARE_CLAIMS) => return AddClaimResult::Full,
            None => now,
        };
        self.remove_waiting_claim(identity);
        self.by_time.insert((now, identity.clone()));
        self.waiting
            .insert(identity.clone(), WaitingClaim { claimant: claim.claimant, at: now, since, address });
        AddClaimResult::Waits
    }

    fn remove_waiting_claim(&mut self, identity: &ProcessIdentity) {
        if let Some(claim) = self.waiting.remove(identity) {
            self.by_time.remove(&(claim.at, identity.clone()));
        }
    }

    /// Drops the waiting claims that have not been repeated in time.
    pub fn drop_unrenewed_claims(&mut self, now: Timestamp) {
        while let Some((at, identity)) = self.by_time.first()
            && now >= at.after(CLAIM_LEASE)
        {
            let identity = identity.clone();
            self.remove_waiting_claim(&identity);
        }
    }

    /// Gives the free task ids to the waiting claims, in the order of their identities; returns the tasks with the
    /// identities that had them before.
    pub fn assign_ids_to_waiting_claims(
        &mut self,
        free: &[TaskId],
        joins: RunNumber,
        now: Timestamp,
    ) -> Vec<(TaskId, ProcessIdentity, Option<ProcessIdentity>)> {
        let waiting: Vec<(ProcessIdentity, WaitingClaim)> = self
            .waiting
            .iter()
            .take(free.len())
            .map(|(identity, claim)| (identity.clone(), claim.clone()))
            .collect();
        let mut given = Vec::with_capacity(waiting.len());
        for (task, (identity, claim)) in free.iter().copied().zip(waiting) {
            let before = self.owner(task).map(|owner| owner.identity.clone());
            let WaitingClaim { claimant, address, .. } = claim;
            let owner =
                TaskOwner { identity: identity.clone(), claimant, run: joins, claimed_at: now, address };
            self.set_owner(task, owner);
            given.push((task, identity, before));
        }
        given
    }

    /// Checks that the tables agree and are within their bounds.
    pub fn check_invariants(&self, tasks: u32) -> Result<(), String> {
        let owners = self.owners.iter().all(|(task, owner)| self.tasks.get(&owner.identity) == Some(task));
        if !owners || self.owners.len() != self.tasks.len() {
            return Err("the tables of hosts by task and of tasks by host disagree".to_owned());
        }
        if let Some(task) = self.owners.keys().find(|task| !(0..task_count_as_id(tasks)).contains(&task.0)) {
            return Err(format!("a host owns task {task}, and there are {tasks}"));
        }
        if let Some((run, counted)) = self.claimed {
            let claimed = self.owners.values().filter(|owner| owner.run == run).count();
            if claimed != counted {
                return Err(format!(
                    "{claimed} hosts claimed an id for run {run}, and {counted} are counted"
                ));
            }
        }
        let timed = self.waiting.iter().all(|(id, claim)| self.by_time.contains(&(claim.at, id.clone())));
        if !timed || self.waiting.len() != self.by_time.len() {
            return Err("the table of waiting claims by time is out of date".to_owned());
        }
        if let Some((identity, _)) = self.waiting.iter().find(|(id, _)| self.tasks.contains_key(*id)) {
            return Err(format!("{identity} waits for a task id and has one"));
        }
        if self.waiting.len() > (tasks as usize).saturating_add(SPARE_CLAIMS) {
            return Err(format!("{} claims wait for the ids of {tasks} tasks", self.waiting.len()));
        }
        Ok(())
    }
}

/// Returns a number of tasks as a task id is counted.
fn task_count_as_id(tasks: u32) -> i32 {
    i32::try_from(tasks).unwrap_or(i32::MAX)
}
