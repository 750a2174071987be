//! Members: tasks, their incarnations, their devices, and where they are reached.
//!
//! It does not know how members are found out. Begin at [`Membership`].

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::num::NonZeroU64;

use serde::{Deserialize, Serialize};

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

/// One life of a task. Never zero: zero means "none" on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Incarnation(pub NonZeroU64);

impl Incarnation {
    /// Returns the incarnation with this number; none for zero.
    #[must_use]
    pub const fn new(number: u64) -> Option<Self> {
        match NonZeroU64::new(number) {
            Some(number) => Some(Self(number)),
            None => None,
        }
    }

    /// Returns its number.
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

/// One life of one task: what transfers are between, and what they are fenced by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Member {
    /// Which task.
    pub task: TaskId,
    /// Which life of it.
    pub incarnation: Incarnation,
}

impl fmt::Display for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "task {} (incarnation {})", self.task, self.incarnation)
    }
}

/// Where an engine is reached. Published as it is serialised; nothing in it is trusted.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Address {
    /// Names the host and its boot: equal for processes that can share memory.
    pub host: String,
    /// The name of the engine's abstract Unix socket; empty where it has none.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub local: String,
    /// Where it listens on TCP, the first choice first; empty where it does not.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tcp: Vec<SocketAddr>,
    /// Its name among the engines of its own process; empty where it has none ([`Choice::Loopback`](crate::Choice)).
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub inside: String,
}

/// A task that lives, as a membership tells of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Peer {
    /// The life that counts now.
    pub incarnation: Incarnation,
    /// Where its engine is reached.
    pub address: Address,
    /// The devices that it owns.
    pub devices: Vec<DeviceId>,
}

/// The live tasks at one moment. The engine compares it with the one before: a task that is not in it any more, or is in it
/// with another incarnation, has failed.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Membership {
    /// Every live task, the engine's own among them or not.
    pub peers: BTreeMap<TaskId, Peer>,
}

impl Membership {
    /// Returns the life of `task` that counts.
    #[must_use]
    pub fn member(&self, task: TaskId) -> Option<Member> {
        self.peers.get(&task).map(|peer| Member { task, incarnation: peer.incarnation })
    }

    /// Returns whether `member` is a life that counts.
    #[must_use]
    pub fn has(&self, member: Member) -> bool {
        self.member(member.task) == Some(member)
    }

    /// Returns the task that owns `device`.
    #[must_use]
    pub fn owner(&self, device: DeviceId) -> Option<TaskId> {
        self.peers.iter().find(|(_, peer)| peer.devices.contains(&device)).map(|(task, _)| *task)
    }
}
