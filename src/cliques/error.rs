//! Why there is no NCCL, what a call of it answered, and why a clique has ended.

use std::ffi::c_int;
use std::time::Duration;

use muster_gpu::{Gpu, GpuError};

use crate::key::CliqueMember;

/// The reason why this process cannot use NCCL.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NcclUnavailable {
    /// The loader finds no library, or cannot load it.
    #[error(
        "NCCL cannot be loaded ({0}): install libnccl2, or name the file in MUSTER_NCCL_LIBRARY (in a Python environment, \
         nvidia/nccl/lib/libnccl.so.2 under site-packages)"
    )]
    NotLoaded(String),
    /// The library lacks a function.
    #[error("this NCCL lacks {0}: install NCCL 2.18 or later")]
    MissingFunction(&'static str),
    /// The library is too old.
    #[error("this is NCCL {}.{}, and calls that do not block need 2.18: install a later one", version / 10_000, version % 10_000 / 100)]
    TooOld {
        /// The version: 10,000 times the major number, plus 100 times the minor one, plus the patch.
        version: c_int,
    },
}

/// The failure of a call of NCCL.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{call}: {text} ({code})")]
pub struct NcclError {
    /// The name of the function.
    pub call: &'static str,
    /// The code that it returned (`ncclResult_t`).
    pub code: c_int,
    /// NCCL's text of the code.
    pub text: String,
}

/// The reason why a clique cannot be used, or has ended.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CliqueError {
    /// A member is no longer current, or the membership has lost it.
    #[error("{0} is lost")]
    MemberLost(CliqueMember),
    /// A member of this process is not in the key, or there is none.
    #[error("this process has no such member of the clique")]
    NotAMember,
    /// A member of this process is given twice.
    #[error("{0} is given twice")]
    GivenTwice(CliqueMember),
    /// Not all members have joined in time.
    #[error("not all {members} members of the clique have joined within {after:?}")]
    StartTimedOut {
        /// The number of members.
        members: usize,
        /// The limit.
        after: Duration,
    },
    /// A call of NCCL failed, or an operation did.
    #[error(transparent)]
    Nccl(#[from] NcclError),
    /// A GPU failed.
    #[error("GPU {gpu}: {error}")]
    Gpu {
        /// The number of the device in this process.
        gpu: u32,
        /// The error of the driver.
        error: GpuError,
    },
    /// This program ended it.
    #[error("the clique was ended: {0}")]
    Ended(String),
}

impl CliqueError {
    /// Returns the error of a thread that cannot be started.
    #[expect(clippy::needless_pass_by_value, reason = "passed to map_err")]
    pub(crate) fn no_thread(error: std::io::Error) -> Self {
        Self::Ended(format!("no thread can be started: {error}"))
    }

    /// Returns the error of a device.
    pub(crate) fn of_gpu(gpu: &Gpu, error: GpuError) -> Self {
        Self::Gpu { gpu: gpu.ordinal(), error }
    }
}
