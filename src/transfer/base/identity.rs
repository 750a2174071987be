//! Members: tasks, their incarnations, their devices and their addresses.
//!
//! It does not discover members. Begin at [`Membership`].

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

/// One incarnation of one task: the endpoint of transfers, and the unit of fencing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Member {
    /// The task.
    pub task: TaskId,
    /// Its incarnation.
    pub incarnation: Incarnation,
}

impl fmt::Display for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "task {} (incarnation {})", self.task, self.incarnation)
    }
}

/// The addresses of an engine, as the task publishes them. The receiver trusts nothing in it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Address {
    /// The identity of the host and of its boot: equal for processes that can share memory.
    pub host: String,
    /// The name of the engine's abstract Unix socket; empty if it has none.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub local: String,
    /// The TCP addresses that the engine listens on, in order of preference; empty if it listens on none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tcp: Vec<SocketAddr>,
    /// The engine's name within its process; empty if it has none ([`Choice::Loopback`](crate::Choice)).
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub inside: String,
}

/// A live task in a [`Membership`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Peer {
    /// Its current incarnation.
    pub incarnation: Incarnation,
    /// The addresses of its engine.
    pub address: Address,
    /// The devices that it owns.
    pub devices: Vec<DeviceId>,
}

/// The live tasks at one moment. The engine compares it with the previous one: a task that is missing from
/// the new one, or is in it with another incarnation, has failed.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Membership {
    /// Every live task; the engine's own task may be among them.
    pub peers: BTreeMap<TaskId, Peer>,
}

impl Membership {
    /// Returns `task` with its current incarnation, or none if it is not live.
    #[must_use]
    pub fn member(&self, task: TaskId) -> Option<Member> {
        self.peers.get(&task).map(|peer| Member { task, incarnation: peer.incarnation })
    }

    /// Returns whether `member` is a live task with its current incarnation.
    #[must_use]
    pub fn has(&self, member: Member) -> bool {
        self.member(member.task) == Some(member)
    }

    /// Returns the task that owns `device`, or none if no live task does.
    #[must_use]
    pub fn owner(&self, device: DeviceId) -> Option<TaskId> {
        self.peers.iter().find(|(_, peer)| peer.devices.contains(&device)).map(|(task, _)| *task)
    }
}
