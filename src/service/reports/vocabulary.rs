//! Defines the fixed vocabulary of reports: transports, outcomes, counters. Any other name becomes `other`.
//!
//! Begin at `ReportedTransport`, then `TransferOutcome`.

use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The transport of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
#[schema(as = Transport)]
pub enum ReportedTransport {
    /// Shared memory that both processes map.
    Shm,
    /// The receiver reads the sender's memory through the kernel.
    Pvm,
    /// The receiver's GPU copies from the memory of the sender's GPU.
    Gpu,
    /// Unix sockets.
    Unix,
    /// TCP connections.
    Tcp,
    /// The receiver reads the sender's memory over a fabric.
    Fabric,
    /// The GPUs of both sides move the bytes through a clique of NCCL.
    Nccl,
    /// The task copies between its own buffers.
    Local,
    /// A transport that this version does not know.
    Other,
}

impl ReportedTransport {
    /// All transports.
    pub const ALL: [Self; 9] = [
        Self::Shm,
        Self::Pvm,
        Self::Gpu,
        Self::Unix,
        Self::Tcp,
        Self::Fabric,
        Self::Nccl,
        Self::Local,
        Self::Other,
    ];

    /// Returns its name on the wire.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Shm => "shm",
            Self::Pvm => "pvm",
            Self::Gpu => "gpu",
            Self::Unix => "unix",
            Self::Tcp => "tcp",
            Self::Fabric => "fabric",
            Self::Nccl => "nccl",
            Self::Local => "local",
            Self::Other => "other",
        }
    }

    /// Returns the transport of this name; `Other` if it is unknown.
    #[must_use]
    pub fn from_name(name: &str) -> Self {
        Self::ALL.into_iter().find(|known| known.name() == name).unwrap_or(Self::Other)
    }
}

impl fmt::Display for ReportedTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The outcomes of launches: completed, then the reasons of the transfer engine, then unknown ones.
const NAMES: [&str; 19] = [
    "completed",
    "peer_dead",
    "stale_incarnation",
    "stalled",
    "deadline",
    "transport",
    "integrity",
    "gpu",
    "layout_mismatch",
    "order_mismatch",
    "job_refused",
    "overloaded",
    "memory",
    "refused",
    "dependency",
    "cancelled",
    "dropped",
    "closed",
    "other",
];

/// How a launch ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TransferOutcome(u8);

impl TransferOutcome {
    /// The number of outcomes.
    pub const COUNT: usize = NAMES.len();
    /// The launch moved all bytes.
    pub const COMPLETED: Self = Self(0);

    /// Returns all outcomes, `completed` first.
    pub fn all() -> impl Iterator<Item = Self> {
        (0..).take(Self::COUNT).map(Self)
    }

    /// Returns the outcome of this name.
    #[must_use]
    pub fn from_name(name: &str) -> Self {
        Self::all().find(|known| known.name() == name).unwrap_or(Self(NAMES.len() as u8 - 1))
    }

    /// Returns its name on the wire.
    #[must_use]
    pub fn name(self) -> &'static str {
        NAMES[usize::from(self.0)]
    }

    /// Returns its meaning in a few words.
    #[must_use]
    pub fn description(self) -> &'static str {
        match self.name() {
            "completed" => "everything moved",
            "peer_dead" => "the other process or its host is gone",
            "stale_incarnation" => "it was for an ended life of the task",
            "stalled" => "nothing moved for too long",
            "deadline" => "its deadline passed",
            "transport" => "a transport failed and no other could replace it",
            "integrity" => "a chunk arrived damaged twice",
            "gpu" => "a GPU failed to copy the bytes",
            "layout_mismatch" => "the two sides name different layouts",
            "order_mismatch" => "the two sides launched different transfers",
            "job_refused" => "the settings of the two jobs do not allow it",
            "overloaded" => "too many launches were under way",
            "memory" => "its memory could not be used",
            "refused" => "the request was invalid",
            "dependency" => "a dependency failed",
            "cancelled" => "a program cancelled it",
            "dropped" => "it was dropped before it was launched",
            "closed" => "the engine had been shut down",
            _ => "unknown reason",
        }
    }

    /// Returns its index among all outcomes.
    pub(super) fn index(self) -> usize {
        usize::from(self.0)
    }
}

impl Serialize for TransferOutcome {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl<'de> Deserialize<'de> for TransferOutcome {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let name = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
        Ok(Self::from_name(&name))
    }
}

/// The counters of engines besides bytes and launches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(usize)]
pub enum TransferCounter {
    /// Cliques found in the cache.
    CacheHits,
    /// Cliques that had to be created.
    CacheMisses,
    /// Cliques evicted for others.
    CacheEvictions,
    /// Rejected frames of another life.
    FencedFrames,
    /// Chunks that arrived damaged.
    DamagedChunks,
    /// Lanes that were lost.
    LanesLost,
    /// Lanes that were established again.
    LanesMade,
    /// Fetches that were replaced by pushes.
    FetchFallbacks,
}

impl TransferCounter {
    /// The number of counters.
    pub const COUNT: usize = 8;
}
