//! The connected tasks of a job, and the engine records of those that are wanted. The record of an incarnation is
//! under the key `muster/transfer/<task>/<incarnation>`, and is read once.
//!
//! `roster.rs` follows its own job and wants the records of all tasks. `peer_jobs.rs` follows other jobs and wants
//! the records of the tasks that the program has named. Begin at [`LiveEngines`].

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::task::{AbortHandle, JoinSet};

use super::engine_record;
use super::error::AgentError;
use super::task_states::ReportedTaskState;
use crate::test_pattern::hash_numbers;
use crate::transfer::{Incarnation, MemberId, MemberInfo, Membership, PeerJob, TaskId};

/// The calls by which a roster is kept: those of a task that has registered, of a process that has not, or of a task of
/// another job.
pub(super) trait RosterSource: Send + Sync + 'static {
    /// Returns the states of all tasks and their version, once they are newer than `version`.
    fn watch_states(
        &self,
        version: i64,
    ) -> impl Future<Output = Result<(Vec<ReportedTaskState>, i64), AgentError>> + Send;

    /// Returns the engine record of a member, once it is published, if it is not longer than a record may be.
    fn wait_for_engine_record(
        &self,
        member: MemberId,
    ) -> impl Future<Output = Result<Bytes, AgentError>> + Send;
}

/// The live tasks at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ClusterRoster {
    /// The tasks that the service counts as connected, with their incarnations.
    pub lives: BTreeMap<TaskId, Incarnation>,
    /// The members with a known engine: the membership of the transfer engine.
    pub membership: Membership,
    /// The tasks whose engines are unusable, with the reason.
    pub unusable: BTreeMap<TaskId, String>,
}

impl ClusterRoster {
    /// Returns one of `members` whose incarnation is no longer live. A member whose engine is not known yet
    /// is not lost.
    #[must_use]
    pub fn first_lost_member(&self, members: &[MemberId]) -> Option<MemberId> {
        members.iter().copied().find(|member| self.lives.get(&member.task) != Some(&member.incarnation))
    }
}

impl ClusterRoster {
    /// Returns the error for those of these tasks, of this roster's job, whose engines are not known within `limit`.
    pub(super) fn engines_missing(&self, job: PeerJob, tasks: &[TaskId], limit: Duration) -> AgentError {
        let absent = tasks.iter().filter(|task| !self.membership.peers.contains_key(task));
        let (connected, gone) =
            absent.map(|task| task.0).partition(|task| self.lives.contains_key(&TaskId(*task)));
        AgentError::EnginesMissing { job, limit, connected, gone }
    }
}

/// Returns a number that identifies a set of incarnations.
pub(crate) fn hash_members(members: &[MemberId]) -> u64 {
    let parts: Vec<u64> =
        members.iter().flat_map(|member| [u64::from(member.task.0), member.incarnation.get()]).collect();
    hash_numbers(&parts)
}

/// One live incarnation of another task, with its engine record.
struct LiveEngine {
    incarnation: Incarnation,
    peer: Option<Result<MemberInfo, String>>,
    /// The read of its engine record, once it is wanted.
    fetch_task: Option<AbortHandle>,
}

type FetchedRecord = (MemberId, Result<MemberInfo, String>);

/// The live incarnations of the tasks of a job, with the engine records of those that are wanted.
pub(super) struct LiveEngines<R> {
    source: Arc<R>,
    job: PeerJob,
    lives: BTreeMap<TaskId, LiveEngine>,
    fetches: JoinSet<FetchedRecord>,
}

impl<R: RosterSource> LiveEngines<R> {
    /// Returns the engines of a job of which nothing is known yet.
    pub fn new(source: Arc<R>, job: PeerJob) -> Self {
        Self { source, job, lives: BTreeMap::new(), fetches: JoinSet::new() }
    }

    /// Applies the incarnations that live now; all others are forgotten.
    pub fn set_live_incarnations(&mut self, now: &BTreeMap<TaskId, Incarnation>) {
        self.lives.retain(|task, life| {
            let lives = now.get(task) == Some(&life.incarnation);
            if !lives && let Some(fetch) = &life.fetch_task {
                fetch.abort();
            }
            lives
        });
        for (task, incarnation) in now {
            let fresh = LiveEngine { incarnation: *incarnation, peer: None, fetch_task: None };
            self.lives.entry(*task).or_insert(fresh);
        }
    }

    /// Begins to read the engine records of the live tasks that are wanted.
    pub fn fetch_wanted_records(&mut self, is_wanted: impl Fn(TaskId) -> bool) {
        for (task, life) in &mut self.lives {
            if life.fetch_task.is_none() && is_wanted(*task) {
                let member = MemberId { task: *task, incarnation: life.incarnation, job: self.job };
                life.fetch_task =
                    Some(self.fetches.spawn(fetch_engine_record(Arc::clone(&self.source), member)));
            }
        }
    }

    /// Waits until the next engine record is read, and stores it; returns none if none is being read.
    pub async fn store_next_record(&mut self) -> Option<()> {
        // A cancelled read belongs to an incarnation that has ended.
        let Ok((member, peer)) = self.fetches.join_next().await? else { return Some(()) };
        if let Err(why) = &peer {
            tracing::warn!(%member, why, "its engine cannot be used");
        }
        let life = self.lives.get_mut(&member.task);
        if let Some(life) = life.filter(|life| life.incarnation == member.incarnation) {
            life.peer = Some(peer);
        }
        Some(())
    }

    /// Adds the incarnations, the usable engines and the unusable ones to a roster.
    pub fn add_to_roster(&self, roster: &mut ClusterRoster) {
        for (task, life) in &self.lives {
            roster.lives.insert(*task, life.incarnation);
            match &life.peer {
                None => {}
                Some(Ok(peer)) => _ = roster.membership.peers.insert(*task, peer.clone()),
                Some(Err(why)) => _ = roster.unusable.insert(*task, why.clone()),
            }
        }
    }
}

/// Reads the engine record of an incarnation, once it is published; a task that is no worker never publishes
/// one.
async fn fetch_engine_record<R: RosterSource>(job: Arc<R>, member: MemberId) -> FetchedRecord {
    let mut pause = Duration::from_millis(50);
    loop {
        match job.wait_for_engine_record(member).await {
            Ok(value) => {
                return (member, engine_record::decode(member, &value).map_err(|error| error.to_string()));
            }
            Err(error) if error.grpc_code() == Some(tonic::Code::OutOfRange) => {
                return (member, Err(engine_record::EngineRecordError::TooLong.to_string()));
            }
            Err(error) => tracing::debug!(%member, %error, "its engine is asked for again"),
        }
        // The watch detects a service that is gone for good.
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(Duration::from_secs(5));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_task_with_a_new_incarnation_is_lost() {
        let member = |task, life| MemberId::of_own_job(TaskId(task), Incarnation::new(life).unwrap());
        let mut roster = ClusterRoster::default();
        roster.lives.insert(TaskId(0), member(0, 1).incarnation);
        roster.lives.insert(TaskId(1), member(1, 7).incarnation);
        assert_eq!(roster.first_lost_member(&[member(0, 1), member(1, 7)]), None);
        assert_eq!(roster.first_lost_member(&[member(0, 1), member(1, 8)]), Some(member(1, 8)));
        assert_eq!(roster.first_lost_member(&[member(2, 1)]), Some(member(2, 1)));
    }
}
