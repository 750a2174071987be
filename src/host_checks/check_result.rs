//! The result of a check, and the results of the probes that checks read.
//!
//! Begin at [`HostCheck`].

use muster_gpu::InstalledGpu;
use serde::{Deserialize, Serialize};

/// The state of a checked item.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum CheckState {
    /// Nothing needs to be done.
    Good,
    /// It works, but not as fast or as safely as possible.
    CouldBeBetter,
    /// It is missing.
    Missing,
}

/// The result of one check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct HostCheck {
    /// The stable identifier for programs.
    pub id: &'static str,
    /// The title for people.
    pub title: &'static str,
    /// The state.
    pub state: CheckState,
    /// The observed value.
    pub found: String,
    /// The reason why it matters.
    pub why: &'static str,
    /// The command that improves it, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fix: Option<String>,
    /// The reason why nothing needs to be or can be done, if it is not good and has no fix.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nothing_to_do: Option<&'static str>,
}

impl HostCheck {
    pub(super) fn new(
        id: &'static str,
        title: &'static str,
        why: &'static str,
        verdict: CheckVerdict,
    ) -> Self {
        let CheckVerdict { state, found, fix, nothing_to_do } = verdict;
        Self { id, title, state, found, why, fix, nothing_to_do }
    }
}

/// The conclusion of a check.
pub(super) struct CheckVerdict {
    pub(super) state: CheckState,
    pub(super) found: String,
    pub(super) fix: Option<String>,
    pub(super) nothing_to_do: Option<&'static str>,
}

impl CheckVerdict {
    pub(super) fn good(found: impl Into<String>) -> Self {
        Self { state: CheckState::Good, found: found.into(), fix: None, nothing_to_do: None }
    }

    pub(super) fn improvable(found: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { fix: Some(fix.into()), ..Self::without_fix(CheckState::CouldBeBetter, found, None) }
    }

    pub(super) fn missing(found: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { fix: Some(fix.into()), ..Self::without_fix(CheckState::Missing, found, None) }
    }

    /// Returns a result that no command on this host improves, with the reason.
    pub(super) fn without_fix(
        state: CheckState,
        found: impl Into<String>,
        because: Option<&'static str>,
    ) -> Self {
        Self { state, found: found.into(), fix: None, nothing_to_do: because }
    }
}

/// A GPU as the driver describes it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProbedGpu {
    /// The name of the product.
    pub name: String,
    /// The bytes of its memory.
    pub memory: u64,
    /// The numbers of the GPUs whose memory it can access.
    pub peers: Vec<u32>,
}

/// The GPUs of a process whose memory transfers reach.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProbedGpus {
    /// The GPUs, by number.
    pub gpus: Vec<ProbedGpu>,
    /// How many bytes of host memory could be page-locked for them, or why none.
    pub page_locked: Result<u64, String>,
}

/// The results of probes. An error says why the probe failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProbeResults {
    /// The size of `/dev/shm` in bytes; `None` if it is not mounted.
    pub dev_shm: Option<u64>,
    /// Whether a sealed memory file of one gibibyte could be created.
    pub memory_file: Result<(), String>,
    /// Whether bytes went from one process to another through shared memory.
    pub shared_memory: Result<(), String>,
    /// Whether bytes went from one process to another by `process_vm_readv`.
    pub process_memory: Result<(), String>,
    /// The GPUs, if bytes went from the memory of one process's GPU to that of another's.
    pub gpu_memory: Result<ProbedGpus, String>,
    /// The providers of libfabric; it is not asked on a host without RDMA devices.
    pub fabric: Result<Vec<String>, String>,
    /// The GPUs of the host with their health, as NVML reports it.
    pub gpu_health: Result<Vec<InstalledGpu>, String>,
    /// The folders that the loader searches first: `LD_LIBRARY_PATH` of this process.
    pub library_path: String,
}
