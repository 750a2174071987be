//! Follows the tasks of other jobs that the program names as its peers. All these jobs are on the same server.
//!
//! The service decides by the settings of two jobs whether they may exchange transfers (`coordination/peer_jobs.rs`),
//! and the engine performs the transfers. Begin at [`EngineHost::wait_for_peers`].
//!
//! - Until the program names a task of a job, this module asks nothing about the job. It reads the engine records of
//!   named tasks only. So an engine connects only with tasks that its own program has named.
//! - Once the engine record of a named task is read, the task is in the engine's membership. It stays there while the
//!   service says that both jobs allow transfers and that the same incarnation of the task is connected.
//! - The service may refuse transfers with a job, at once or later. The engine learns of the refusal before any
//!   caller does, and ends its connections with that job with the service's reason. When the program names the job
//!   again, this module asks the service again.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, PoisonError, Weak};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::watch;
use tonic::Code;

use super::coordination_client::CoordinationClient;
use super::engine_host::EngineHost;
use super::engine_record;
use super::error::AgentError;
use super::followed_jobs::{FollowedJob, PeerJobState};
use super::live_engines::{ClusterRoster, LiveEngines, RosterSource};
use super::task_states::{ReportedTaskState, connected_incarnations};
use crate::transfer::{MemberId, PeerJob, PeerJobAccess, PeerTask, TaskId};

/// The pause after a call that may succeed when it is repeated.
const RETRY_PAUSE: Duration = Duration::from_millis(200);

/// The calls by which a task of this job follows another job.
struct PeerJobReader {
    service: CoordinationClient,
    job: &'static str,
}

impl RosterSource for PeerJobReader {
    async fn watch_states(&self, version: i64) -> Result<(Vec<ReportedTaskState>, i64), AgentError> {
        self.service.watch_peer_tasks(self.job, version).await
    }

    async fn wait_for_engine_record(&self, member: MemberId) -> Result<Bytes, AgentError> {
        self.service.wait_for_peer_engine_record(self.job, member).await
    }
}

impl EngineHost {
    /// Returns when the engines of all `peers`, tasks of this job or of others, are members.
    ///
    /// # Errors
    /// If the service refuses the job of one of them or knows no such job, at once; if one of them is not a member within
    /// `limit`, or its engine cannot be used, or this incarnation ends.
    pub async fn wait_for_peers(
        self: &Arc<Self>,
        peers: &[PeerTask],
        limit: Duration,
    ) -> Result<(), AgentError> {
        let until = tokio::time::Instant::now() + limit;
        let mut by_job: BTreeMap<PeerJob, BTreeSet<TaskId>> = BTreeMap::new();
        for peer in peers {
            by_job.entry(peer.job).or_default().insert(peer.task);
        }
        for (job, tasks) in by_job {
            let left = until.saturating_duration_since(tokio::time::Instant::now());
            if job.is_own() {
                self.wait_for_engines(&tasks.into_iter().collect::<Vec<_>>(), left).await?;
                continue;
            }
            let mut known = follow_tasks_of_job(self, job, &tasks);
            let settled = known.wait_for(|known| is_usability_known(known, &tasks));
            tokio::select! {
                // An engine that has ended has no peers, whatever it still knows of them.
                biased;
                error = self.wait_for_end() => return Err(error),
                _settled = tokio::time::timeout(left, settled) => {}
            }
            let known = known.borrow();
            check_engines_usable(&known, job, &tasks, limit)?;
        }
        Ok(())
    }

    /// Returns the error for those of these tasks of a job whose engines are not known within `limit`.
    pub(super) fn engines_missing(&self, job: PeerJob, tasks: &[TaskId], limit: Duration) -> AgentError {
        if job.is_own() {
            return self.roster.borrow().engines_missing(job, tasks, limit);
        }
        let followed = self.peer_jobs.followed.lock().unwrap_or_else(PoisonError::into_inner);
        let state = followed.jobs.get(&job).map(|of_job| of_job.known.borrow());
        match state.as_deref() {
            Some(PeerJobState::Tasks(roster)) => roster.engines_missing(job, tasks, limit),
            Some(PeerJobState::Refused(error)) => error.clone(),
            _ => ClusterRoster::default().engines_missing(job, tasks, limit),
        }
    }
}

/// Follows a job, if it is not followed yet, and wants these tasks of it.
fn follow_tasks_of_job(
    host: &Arc<EngineHost>,
    job: PeerJob,
    tasks: &BTreeSet<TaskId>,
) -> watch::Receiver<PeerJobState> {
    let mut followed = host.peer_jobs.followed.lock().unwrap_or_else(PoisonError::into_inner);
    while followed.tasks.try_join_next().is_some() {}
    if let Some(of_job) = followed.jobs.get(&job).filter(|of_job| !of_job.wanted.is_closed()) {
        of_job.wanted.send_if_modified(|wanted| {
            let before = wanted.len();
            wanted.extend(tasks);
            wanted.len() > before
        });
        return of_job.known.clone();
    }
    let (wanted, wants) = watch::channel(tasks.clone());
    let (tell, known) = watch::channel(PeerJobState::default());
    let reader =
        PeerJobReader { service: host.peer_jobs.service.clone(), job: job.name().unwrap_or_default() };
    let following = follow_peer_job(Arc::downgrade(host), job, reader, wants, tell);
    followed.tasks.spawn_on(following, &host.peer_jobs.runtime);
    followed.jobs.insert(job, FollowedJob { wanted, known: known.clone() });
    known
}

/// Returns whether it is known of all tasks whether their engines can be used.
fn is_usability_known(known: &PeerJobState, tasks: &BTreeSet<TaskId>) -> bool {
    match known {
        PeerJobState::Nothing => false,
        PeerJobState::Refused(_) => true,
        PeerJobState::Tasks(roster) => {
            tasks.iter().all(|task| roster.membership.peers.contains_key(task))
                || tasks.iter().any(|task| roster.unusable.contains_key(task))
        }
    }
}

fn check_engines_usable(
    known: &PeerJobState,
    job: PeerJob,
    tasks: &BTreeSet<TaskId>,
    limit: Duration,
) -> Result<(), AgentError> {
    let empty = ClusterRoster::default();
    let roster = match known {
        PeerJobState::Refused(error) => return Err(error.clone()),
        PeerJobState::Nothing => &empty,
        PeerJobState::Tasks(roster) => roster,
    };
    let unusable = tasks.iter().find_map(|task| Some((task.0, roster.unusable.get(task)?.clone())));
    if let Some((task, why)) = unusable {
        return Err(AgentError::EngineUnusable { job, task, why });
    }
    if tasks.iter().all(|task| roster.membership.peers.contains_key(task)) {
        return Ok(());
    }
    Err(roster.engines_missing(job, &tasks.iter().copied().collect::<Vec<_>>(), limit))
}

/// Follows a job until the service refuses it, or the engine is gone.
async fn follow_peer_job(
    host: Weak<EngineHost>,
    job: PeerJob,
    reader: PeerJobReader,
    mut wanted: watch::Receiver<BTreeSet<TaskId>>,
    tell: watch::Sender<PeerJobState>,
) {
    let reader = Arc::new(reader);
    let mut engines = LiveEngines::new(Arc::clone(&reader), job);
    let mut watching = Box::pin(watch_states_with_retry(Arc::clone(&reader), -1));
    loop {
        tokio::select! {
            answer = &mut watching => match answer {
                Ok((states, version)) => {
                    engines.set_live_incarnations(&connected_incarnations(&states));
                    watching = Box::pin(watch_states_with_retry(Arc::clone(&reader), version));
                }
                Err(error) => {
                    let refused = job_refusal_error(job, error);
                    if let Some(host) = host.upgrade() {
                        host.set_peer_job_members(job, PeerJobAccess::Refused(refused.to_string()));
                    }
                    // Before any caller hears of the refusal: a caller that names the job after that must ask again.
                    drop(wanted);
                    return tell.send_modify(|known| *known = PeerJobState::Refused(refused));
                }
            },
            changed = wanted.changed() => if changed.is_err() { return },
            Some(()) = engines.store_next_record() => {}
        }
        {
            let wanted = wanted.borrow_and_update();
            engines.fetch_wanted_records(|task| wanted.contains(&task));
        }
        let Some(host) = host.upgrade() else { return };
        publish_peer_roster(&host, job, &engines, &tell);
    }
}

/// Returns the next states, however long that takes. A call that fails is repeated, and asks for the present states, unless
/// the service refuses the job.
async fn watch_states_with_retry(
    reader: Arc<PeerJobReader>,
    mut version: i64,
) -> Result<(Vec<ReportedTaskState>, i64), AgentError> {
    loop {
        match reader.watch_states(version).await {
            Err(error) if !is_lasting_refusal(&error) => {
                tracing::debug!(%error, job = reader.job, "its tasks are asked about again");
                version = -1;
                tokio::time::sleep(RETRY_PAUSE).await;
            }
            answer => return answer,
        }
    }
}

/// Returns whether the same call would be refused again.
fn is_lasting_refusal(error: &AgentError) -> bool {
    const REFUSALS: [Code; 4] =
        [Code::PermissionDenied, Code::NotFound, Code::InvalidArgument, Code::Unimplemented];
    error.grpc_code().is_some_and(|grpc_code| REFUSALS.contains(&grpc_code))
}

/// Returns the error of a program that has named a job which the service refuses.
fn job_refusal_error(job: PeerJob, error: AgentError) -> AgentError {
    match error {
        AgentError::Refused { code: Code::PermissionDenied, message, .. } => {
            AgentError::PeerJobRefused { job, why: message }
        }
        AgentError::Refused { code: Code::NotFound, message, .. } => {
            AgentError::NoSuchPeerJob { job, why: message }
        }
        AgentError::Refused { code: Code::InvalidArgument, message, .. } => AgentError::Settings(message),
        error => error,
    }
}

/// Sends what is known of a job to the engine and to all callers.
fn publish_peer_roster(
    host: &EngineHost,
    job: PeerJob,
    engines: &LiveEngines<PeerJobReader>,
    tell: &watch::Sender<PeerJobState>,
) {
    let mut roster = ClusterRoster::default();
    engines.add_to_roster(&mut roster);
    let peers = roster.membership.peers.iter_mut().map(|(task, peer)| (task.0, peer));
    for task in engine_record::remove_duplicate_devices(peers) {
        tracing::warn!(task, %job, "it claims devices of other tasks; they stay with those");
    }
    host.set_peer_job_members(job, PeerJobAccess::Allowed(roster.membership.peers.clone()));
    tell.send_if_modified(|known| {
        let differs = !matches!(known, PeerJobState::Tasks(old) if *old == roster);
        if differs {
            *known = PeerJobState::Tasks(roster);
        }
        differs
    });
}
