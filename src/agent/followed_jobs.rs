//! The other jobs that an engine follows, and what is known of each.
//!
//! `peer_jobs.rs` follows them. Begin at [`PeerJobs`].

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, PoisonError};

use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::coordination_client::CoordinationClient;
use super::error::AgentError;
use super::live_engines::ClusterRoster;
use crate::transfer::{PeerJob, TaskId};

/// The other jobs that an engine follows.
pub(super) struct PeerJobs {
    pub(super) service: CoordinationClient,
    pub(super) runtime: Handle,
    pub(super) followed: Mutex<FollowedJobs>,
}

/// The followed jobs, and the tasks that follow them.
#[derive(Default)]
pub(super) struct FollowedJobs {
    pub(super) jobs: BTreeMap<PeerJob, FollowedJob>,
    pub(super) tasks: JoinSet<()>,
}

/// One followed job.
pub(super) struct FollowedJob {
    /// The tasks that the program has named.
    pub(super) wanted: watch::Sender<BTreeSet<TaskId>>,
    pub(super) known: watch::Receiver<PeerJobState>,
}

/// The knowledge about a followed job.
#[derive(Debug, Clone, Default)]
pub(super) enum PeerJobState {
    /// The service has not answered yet.
    #[default]
    Nothing,
    Tasks(ClusterRoster),
    Refused(AgentError),
}

impl PeerJobs {
    /// Returns the table of an engine that follows no job yet. It belongs to the present runtime.
    pub fn new(service: CoordinationClient) -> Self {
        Self { service, runtime: Handle::current(), followed: Mutex::default() }
    }

    /// Follows no job any more.
    pub fn stop_following(&self) {
        *self.followed.lock().unwrap_or_else(PoisonError::into_inner) = FollowedJobs::default();
    }
}
