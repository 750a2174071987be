//! The members among which an engine moves bytes: tasks, with their incarnations, devices and addresses.
//!
//! The program discovers the members and passes them to the engine. Begin at [`Membership`].

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::num::NonZeroU64;

use serde::{Deserialize, Serialize};

use super::peer_job::PeerJob;

/// A task's number within its job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct TaskId(pub u32);

impl fmt::Display for TaskId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A device's number within the cluster (JAX's global device id).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct DeviceId(pub u32);

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The identity of one life of a task. Never zero: zero means "none" on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Incarnation(pub NonZeroU64);

impl Incarnation {
    /// Returns the incarnation with this number, or none for zero.
    #[must_use]
    pub const fn new(number: u64) -> Option<Self> {
        match NonZeroU64::new(number) {
            Some(number) => Some(Self(number)),
            None => None,
        }
    }

    /// Returns the incarnation's number.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0.get()
    }
}

impl fmt::Display for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// A task of this job, or of another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PeerTask {
    /// Its job.
    pub job: PeerJob,
    /// The task.
    pub task: TaskId,
}

impl From<TaskId> for PeerTask {
    fn from(task: TaskId) -> Self {
        Self { job: PeerJob::OWN, task }
    }
}

impl fmt::Display for PeerTask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.task, self.job)
    }
}

/// One incarnation of one task: the endpoint of transfers, and the unit of fencing. Its identity is job, task and
/// incarnation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct MemberId {
    /// The task.
    pub task: TaskId,
    /// Its incarnation.
    pub incarnation: Incarnation,
    /// Its job, as this engine names it. It is not on the wire, because the other side names jobs otherwise.
    #[serde(skip)]
    pub job: PeerJob,
}

impl MemberId {
    /// Returns an incarnation of a task of this job.
    #[must_use]
    pub const fn of_own_job(task: TaskId, incarnation: Incarnation) -> Self {
        Self { task, incarnation, job: PeerJob::OWN }
    }

    /// Returns the task with its job.
    #[must_use]
    pub const fn peer_task(self) -> PeerTask {
        PeerTask { job: self.job, task: self.task }
    }

    /// Returns whether this is the first of two members in the order that both of their engines see: by task, then by
    /// incarnation.
    #[must_use]
    pub fn precedes(self, other: Self) -> bool {
        (self.task, self.incarnation) < (other.task, other.incarnation)
    }
}

impl fmt::Display for MemberId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "task {} (incarnation {})", self.peer_task(), self.incarnation)
    }
}

/// The addresses of an engine, as the task publishes them. The receiver trusts nothing in it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineAddress {
    /// The identity of the host and of its boot: equal for processes that can share memory.
    pub host: String,
    /// The name of the engine's abstract Unix socket; empty if it has none.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub local: String,
    /// The TCP addresses that the engine listens on, in order of preference; empty if it listens on none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tcp: Vec<SocketAddr>,
    /// The engine's name within its process; empty if it has none ([`TransportChoice::Loopback`](crate::TransportChoice)).
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub inside: String,
}

/// A live task in a [`Membership`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemberInfo {
    /// Its current incarnation.
    pub incarnation: Incarnation,
    /// The addresses of its engine.
    pub address: EngineAddress,
    /// The devices that it owns.
    pub devices: Vec<DeviceId>,
}

/// The live tasks at one moment. The engine compares it with the previous one: a task that is missing from
/// the new one, or is in it with another incarnation, has failed.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Membership {
    /// Every live task of the engine's job; its own task may be among them.
    pub peers: BTreeMap<TaskId, MemberInfo>,
    /// The other jobs that the program has named.
    #[serde(skip)]
    pub jobs: BTreeMap<PeerJob, PeerJobAccess>,
}

/// The service's answer about another job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PeerJobAccess {
    /// Its live tasks that the program has named and whose engines are known.
    Allowed(BTreeMap<TaskId, MemberInfo>),
    /// Why the two jobs may exchange no transfers.
    Refused(String),
}

impl Membership {
    /// Returns the membership of these tasks of the engine's job.
    #[must_use]
    pub fn of_own_job(peers: BTreeMap<TaskId, MemberInfo>) -> Self {
        Self { peers, jobs: BTreeMap::new() }
    }

    /// Returns the live tasks of a job; none if nothing is known of the job, or it is refused.
    #[must_use]
    pub fn members_of_job(&self, job: PeerJob) -> Option<&BTreeMap<TaskId, MemberInfo>> {
        if job.is_own() {
            return Some(&self.peers);
        }
        match self.jobs.get(&job)? {
            PeerJobAccess::Allowed(peers) => Some(peers),
            PeerJobAccess::Refused(_) => None,
        }
    }

    /// Returns why the engine may exchange no transfers with a job, if the service has said so.
    #[must_use]
    pub fn job_refusal(&self, job: PeerJob) -> Option<&str> {
        match self.jobs.get(&job)? {
            PeerJobAccess::Allowed(_) => None,
            PeerJobAccess::Refused(why) => Some(why),
        }
    }

    /// Returns `task` with its current incarnation, or none if it is not live.
    #[must_use]
    pub fn current_member(&self, task: impl Into<PeerTask>) -> Option<MemberId> {
        let PeerTask { job, task } = task.into();
        let peer = self.members_of_job(job)?.get(&task)?;
        Some(MemberId { task, incarnation: peer.incarnation, job })
    }

    /// Returns the live task of another job with this number and this incarnation. Incarnations are random, so there is
    /// one at most; if two jobs had the same, none would be trusted.
    #[must_use]
    pub fn find_member_of_other_jobs(&self, task: TaskId, incarnation: Incarnation) -> Option<MemberId> {
        let members = self.jobs.keys().filter_map(|job| self.current_member(PeerTask { job: *job, task }));
        let mut found = members.filter(|member| member.incarnation == incarnation);
        found.next().filter(|_| found.next().is_none())
    }

    /// Returns the entry of `member`, or none if it is not a live task with its current incarnation.
    #[must_use]
    pub fn member_info(&self, member: MemberId) -> Option<&MemberInfo> {
        self.members_of_job(member.job)?
            .get(&member.task)
            .filter(|peer| peer.incarnation == member.incarnation)
    }

    /// Returns whether `member` is a live task with its current incarnation.
    #[must_use]
    pub fn has(&self, member: MemberId) -> bool {
        self.member_info(member).is_some()
    }

    /// Returns the task of `job` that owns `device`, or none if no live task does.
    #[must_use]
    pub fn device_owner(&self, job: PeerJob, device: DeviceId) -> Option<TaskId> {
        let mut peers = self.members_of_job(job)?.iter();
        peers.find(|(_, peer)| peer.devices.contains(&device)).map(|(task, _)| *task)
    }
}
