//! Follows the states of all tasks and makes the roster by which the transfer engine fences.
//!
//! It decides nothing about a task: the service does. A change of the task states (`WatchTasks`) starts a read of
//! each new incarnation's engine record (`muster/transfer/<task>/<incarnation>`); each change of the result goes to
//! the engine as a new membership. Begin at `follow`.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::{AbortHandle, JoinSet};

use super::AgentShared;
use super::engine_record;
use super::error::AgentError;
use super::service::KnownTaskState;
use crate::transfer::{Incarnation, Member, Membership, Peer, TaskId};

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
    pub fn lost(&self, members: &[Member]) -> Option<Member> {
        members.iter().copied().find(|member| self.lives.get(&member.task) != Some(&member.incarnation))
    }
}

/// One incarnation of another task.
struct TaskLife {
    incarnation: Incarnation,
    peer: Option<Result<Peer, String>>,
    fetch_task: AbortHandle,
}

type FetchedRecord = (Member, Result<Peer, String>);

/// Follows the states of the tasks until this incarnation has ended.
pub(super) async fn follow(inner: Arc<AgentShared>, first: (Vec<KnownTaskState>, i64)) {
    let mut lives: BTreeMap<TaskId, TaskLife> = BTreeMap::new();
    let mut fetches: JoinSet<FetchedRecord> = JoinSet::new();
    let (states, version) = first;
    if !update_lives(&inner, &mut lives, &mut fetches, &states) {
        return;
    }
    let mut watching = Box::pin(watch(Arc::clone(&inner), version));
    loop {
        tokio::select! {
            answer = &mut watching => match answer {
                Ok((states, version)) => {
                    if !update_lives(&inner, &mut lives, &mut fetches, &states) {
                        return;
                    }
                    watching = Box::pin(watch(Arc::clone(&inner), version));
                }
                Err(error) => return inner.end(error),
            },
            Some(fetched) = fetches.join_next() => {
                // A cancelled read belongs to an incarnation that has ended.
                let Ok((member, peer)) = fetched else { continue };
                if let Err(why) = &peer {
                    tracing::warn!(%member, why, "its engine cannot be used");
                }
                if let Some(life) = lives.get_mut(&member.task).filter(|life| life.incarnation == member.incarnation) {
                    life.peer = Some(peer);
                    publish_roster(&inner, &lives);
                }
            }
        }
    }
}

/// Returns the next states, however long that takes; a lost connection is made again.
async fn watch(inner: Arc<AgentShared>, version: i64) -> Result<(Vec<KnownTaskState>, i64), AgentError> {
    inner.retry(|| inner.service.watch(version, None)).await
}

/// Applies new states; returns whether this incarnation is still live.
fn update_lives(
    inner: &Arc<AgentShared>,
    lives: &mut BTreeMap<TaskId, TaskLife>,
    fetches: &mut JoinSet<FetchedRecord>,
    states: &[KnownTaskState],
) -> bool {
    let here = inner.here();
    let mut now: BTreeMap<TaskId, Incarnation> = BTreeMap::new();
    for state in states {
        let counts = state.connected.then(|| Incarnation::new(state.incarnation)).flatten();
        if state.task == here.task.0 {
            if counts != Some(here.incarnation) && !inner.is_leaving() {
                let why = match (&counts, state.error.is_empty()) {
                    (Some(other), _) => format!("incarnation {other} counts now"),
                    (None, true) => "the service does not count it as connected".to_owned(),
                    (None, false) => state.error.clone(),
                };
                inner.end(AgentError::LifeEnded { task: state.task, why });
                return false;
            }
        } else if let Some(incarnation) = counts {
            now.insert(TaskId(state.task), incarnation);
        }
    }
    lives.retain(|task, life| {
        let lives = now.get(task) == Some(&life.incarnation);
        if !lives {
            life.fetch_task.abort();
        }
        lives
    });
    for (task, incarnation) in now {
        lives.entry(task).or_insert_with(|| {
            let member = Member { task, incarnation };
            let asking = fetches.spawn(fetch(Arc::clone(inner), member));
            TaskLife { incarnation, peer: None, fetch_task: asking }
        });
    }
    publish_roster(inner, lives);
    true
}

/// Reads the engine record of an incarnation, once it is published; a task that is no worker never publishes
/// one.
async fn fetch(inner: Arc<AgentShared>, member: Member) -> FetchedRecord {
    let mut pause = Duration::from_millis(50);
    loop {
        match inner.service.get_at_most(&engine_record::key(member), engine_record::BYTES_MAX).await {
            Ok(value) => {
                return (member, engine_record::read(member, &value).map_err(|error| error.to_string()));
            }
            Err(error) if error.code() == Some(tonic::Code::OutOfRange) => {
                return (member, Err(engine_record::EngineRecordError::TooLong.to_string()));
            }
            Err(error) => tracing::debug!(%member, %error, "its engine is asked for again"),
        }
        // The watch detects a service that is gone for good.
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(Duration::from_secs(5));
    }
}

/// Sends the roster to the engine and to all followers.
fn publish_roster(inner: &AgentShared, lives: &BTreeMap<TaskId, TaskLife>) {
    let here = inner.here();
    let mut roster = ClusterRoster::default();
    let devices = inner.config.device_ids();
    let own = Peer { incarnation: here.incarnation, address: inner.engine.address().clone(), devices };
    roster.lives.insert(here.task, here.incarnation);
    roster.membership.peers.insert(here.task, own);
    for (task, life) in lives {
        roster.lives.insert(*task, life.incarnation);
        match &life.peer {
            None => {}
            Some(Ok(peer)) => _ = roster.membership.peers.insert(*task, peer.clone()),
            Some(Err(why)) => _ = roster.unusable.insert(*task, why.clone()),
        }
    }
    // This task's own devices come first, then those of the others in their order.
    let own = roster.membership.peers.remove(&here.task);
    let mut own = own.map(|peer| (here.task.0, peer));
    let others = roster.membership.peers.iter_mut().map(|(task, peer)| (task.0, peer));
    let greedy = engine_record::remove_duplicate_devices(
        own.iter_mut().map(|(task, peer)| (*task, peer)).chain(others),
    );
    if let Some((_, peer)) = own {
        roster.membership.peers.insert(here.task, peer);
    }
    for task in greedy {
        tracing::warn!(task, "it claims devices of other tasks; they stay with those");
    }
    inner.tell_engine(roster.membership.clone());
    inner.roster.send_if_modified(|old| {
        let differs = *old != roster;
        *old = roster;
        differs
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_task_with_a_new_incarnation_is_lost() {
        let member = |task, life| Member { task: TaskId(task), incarnation: Incarnation::new(life).unwrap() };
        let mut roster = ClusterRoster::default();
        roster.lives.insert(TaskId(0), member(0, 1).incarnation);
        roster.lives.insert(TaskId(1), member(1, 7).incarnation);
        assert_eq!(roster.lost(&[member(0, 1), member(1, 7)]), None);
        assert_eq!(roster.lost(&[member(0, 1), member(1, 8)]), Some(member(1, 8)));
        assert_eq!(roster.lost(&[member(2, 1)]), Some(member(2, 1)));
    }
}
