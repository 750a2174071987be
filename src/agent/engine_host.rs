//! The transfer engine of a task, with the state around it: the roster of live tasks, the other jobs that the program
//! has named, the waiting launches, the state of the transfer reports, and the reason if the incarnation has ended.
//!
//! An agent and an attachment have one [`EngineHost`] each, and run the background tasks that keep it up to date.
//! Begin at [`EngineHost::start`], then [`EngineHost::retry_while_service_unreachable`] and
//! [`EngineHost::end_incarnation`].

use std::future::Future;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;

use super::activities::Activities;
use super::config::AgentConfig;
use super::coordination_client::CoordinationClient;
use super::engine_record;
use super::error::AgentError;
use super::followed_jobs::PeerJobs;
use super::launch_queue::WaitingLaunches;
use super::live_engines::ClusterRoster;
use super::report_state::ReportState;
use super::retry::RetryBudget;
use crate::transfer::{
    DeviceId, MemberId, MemberInfo, Membership, PeerJob, PeerJobAccess, TaskId, TransferEngine,
};

/// The transfer engine of one incarnation of a task in its job.
///
/// The engine receives every change of the membership. When the incarnation ends, the membership is emptied first.
pub struct EngineHost {
    pub(super) config: AgentConfig,
    pub(super) engine: TransferEngine,
    /// The devices whose buffers the engine moves.
    pub(super) devices: Vec<DeviceId>,
    pub(super) roster: watch::Sender<ClusterRoster>,
    /// The other jobs that the program has named.
    pub(super) peer_jobs: PeerJobs,
    /// The launches that wait until their peers are members.
    pub(super) waiting_launches: WaitingLaunches,
    /// The membership that the engine has received last.
    membership: Mutex<Membership>,
    pub(super) over: watch::Sender<Option<AgentError>>,
    pub(super) report_state: Mutex<ReportState>,
    /// Is notified when a transfer fails.
    pub(super) report_soon: Arc<Notify>,
    pub(super) leaving: AtomicBool,
    /// The activities of the program.
    pub(super) activities: Activities,
    /// The last request for stacks that was answered.
    pub(super) answered_stacks: AtomicU64,
    /// Whether the service is unreachable and that has been logged.
    is_unreachable: AtomicBool,
}

impl std::fmt::Debug for EngineHost {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EngineHost").field("here", &self.here()).finish_non_exhaustive()
    }
}

impl EngineHost {
    /// Starts the engine of `here`, whose peers in other jobs `service` knows.
    pub(super) fn start(
        config: AgentConfig,
        here: MemberId,
        devices: Vec<DeviceId>,
        service: CoordinationClient,
    ) -> Result<Arc<Self>, AgentError> {
        let engine = start_engine(&config, here, &devices)?;
        let report_soon = Arc::new(Notify::new());
        let failed = Arc::clone(&report_soon);
        engine.launch_metrics().set_failure_hook(move || failed.notify_one());
        Ok(Arc::new(Self {
            config,
            engine,
            devices,
            roster: watch::Sender::new(ClusterRoster::default()),
            peer_jobs: PeerJobs::new(service),
            waiting_launches: WaitingLaunches::default(),
            membership: Mutex::default(),
            over: watch::Sender::new(None),
            report_state: Mutex::default(),
            report_soon,
            leaving: AtomicBool::new(false),
            activities: Activities::default(),
            answered_stacks: AtomicU64::new(0),
            is_unreachable: AtomicBool::new(false),
        }))
    }

    /// Returns this task and its incarnation.
    #[must_use]
    pub fn here(&self) -> MemberId {
        self.engine.here()
    }

    /// Returns the transfer engine.
    #[must_use]
    pub fn engine(&self) -> &TransferEngine {
        &self.engine
    }

    /// Returns the devices whose buffers the engine moves.
    #[must_use]
    pub fn devices(&self) -> &[DeviceId] {
        &self.devices
    }

    /// Names what the program is doing, for an operator who asks for the stacks of this task.
    pub fn set_activity(&self, text: String) {
        self.activities.set_outer(text);
    }

    /// Returns the roster of live tasks, as it changes.
    #[must_use]
    pub fn roster(&self) -> watch::Receiver<ClusterRoster> {
        self.roster.subscribe()
    }

    /// Returns why this incarnation has ended, if it has.
    #[must_use]
    pub fn incarnation_end_reason(&self) -> Option<AgentError> {
        self.over.borrow().clone()
    }

    /// Resolves with the reason when this incarnation has ended without leaving.
    pub async fn wait_for_end(&self) -> AgentError {
        let mut over = self.over.subscribe();
        loop {
            if let Some(error) = over.borrow_and_update().clone() {
                return error;
            }
            if over.changed().await.is_err() {
                let why = "its transfer engine is gone".to_owned();
                return AgentError::LifeEnded { task: self.here().task.0, why };
            }
        }
    }

    /// Returns when the engines of all `tasks` are members.
    ///
    /// # Errors
    /// If one of them is not within `limit`, or its engine cannot be used, or this incarnation ends.
    pub async fn wait_for_engines(&self, tasks: &[TaskId], limit: Duration) -> Result<(), AgentError> {
        let mut roster = self.roster();
        let known = roster.wait_for(|roster| {
            tasks.iter().all(|task| roster.membership.peers.contains_key(task))
                || tasks.iter().any(|task| roster.unusable.contains_key(task))
        });
        let known = tokio::select! {
            // An engine that has ended has no peers, whatever it still knows of them.
            biased;
            error = self.wait_for_end() => return Err(error),
            known = tokio::time::timeout(limit, known) => matches!(known, Ok(Ok(_))),
        };
        let roster = self.roster.borrow();
        let unusable = tasks.iter().find_map(|task| Some((task.0, roster.unusable.get(task)?.clone())));
        if let Some((task, why)) = unusable {
            return Err(AgentError::EngineUnusable { job: PeerJob::OWN, task, why });
        }
        if known {
            return Ok(());
        }
        Err(roster.engines_missing(PeerJob::OWN, tasks, limit))
    }

    pub(super) fn is_leaving(&self) -> bool {
        self.leaving.load(Ordering::Acquire)
    }

    /// Returns this task's entry of the membership.
    pub(super) fn own_member_info(&self) -> MemberInfo {
        let address = self.engine.address().clone();
        MemberInfo { incarnation: self.here().incarnation, address, devices: self.devices.clone() }
    }

    /// Returns the engine record.
    pub(super) fn encoded_engine_record(&self) -> Result<Vec<u8>, AgentError> {
        encode_engine_record(&self.engine, &self.devices)
    }

    /// Repeats a call while the service is unreachable, until it is answered.
    ///
    /// # Errors
    /// The error of the answer, or the transport's error if the service is unreachable for too long.
    pub async fn retry_while_service_unreachable<T, F>(
        &self,
        mut ask: impl FnMut() -> F,
    ) -> Result<T, AgentError>
    where
        F: Future<Output = Result<T, AgentError>>,
    {
        let mut patience = RetryBudget::new(self.config.patience);
        loop {
            match ask().await {
                Err(error) => self.pause_before_retry(&mut patience, error).await?,
                answer => {
                    self.mark_service_reachable();
                    return answer;
                }
            }
        }
    }

    /// Waits before a failed call is repeated.
    ///
    /// # Errors
    /// The error itself, if repeating is useless or the time for it is over.
    pub async fn pause_before_retry(
        &self,
        patience: &mut RetryBudget,
        error: AgentError,
    ) -> Result<(), AgentError> {
        if !error.is_transient() {
            return Err(error);
        }
        if !self.is_leaving() && !self.is_unreachable.swap(true, Ordering::AcqRel) {
            tracing::warn!(%error, "waits for the service, for {:?} at most", self.config.patience);
        }
        patience.sleep_before_retry(error).await
    }

    /// Records that the service has answered.
    pub fn mark_service_reachable(&self) {
        if self.is_unreachable.swap(false, Ordering::AcqRel) {
            tracing::warn!("the service answers again");
        }
    }

    /// Ends this incarnation, for this reason unless it has ended before. The membership is emptied before
    /// any caller learns of it.
    pub fn end_incarnation(&self, error: AgentError) {
        self.over.send_if_modified(|over| {
            let first = over.is_none();
            if first {
                self.engine.on_membership(Membership::default());
                *over = Some(error);
            }
            first
        });
    }

    /// Sends the members of this job to the engine, unless this incarnation has ended; it cannot end meanwhile.
    pub(super) fn set_own_job_members(&self, own_job: &Membership) {
        self.change_membership_unless_ended(|membership| membership.peers.clone_from(&own_job.peers));
    }

    /// Sends the members of another job to the engine, likewise.
    pub(super) fn set_peer_job_members(&self, job: PeerJob, peers: PeerJobAccess) {
        self.change_membership_unless_ended(|membership| _ = membership.jobs.insert(job, peers));
    }

    fn change_membership_unless_ended(&self, change: impl FnOnce(&mut Membership)) {
        let over = self.over.borrow();
        if over.is_none() {
            let mut membership = self.membership.lock().unwrap_or_else(PoisonError::into_inner);
            change(&mut membership);
            self.engine.on_membership(membership.clone());
        }
    }

    /// Ends what runs on its behalf and keeps it alive. Its owner does so when it is dropped.
    pub(super) fn stop_peer_jobs_and_launches(&self) {
        self.peer_jobs.stop_following();
        self.waiting_launches.stop();
    }

    /// Stops the background tasks and shuts the engine down, without telling the service.
    pub(super) async fn shut_down(&self, background: &mut JoinSet<()>) {
        background.shutdown().await;
        self.close_engine().await;
    }

    /// Shuts the engine down and ends the incarnation, without telling the service: whatever waits on its behalf ends.
    pub async fn close_engine(&self) {
        self.stop_peer_jobs_and_launches();
        let engine = self.engine.clone();
        // The shutdown joins threads, so it blocks.
        let _ended = tokio::task::spawn_blocking(move || engine.shutdown()).await;
        let why = "its transfer engine was closed".to_owned();
        self.end_incarnation(AgentError::LifeEnded { task: self.here().task.0, why });
    }
}

fn encode_engine_record(engine: &TransferEngine, devices: &[DeviceId]) -> Result<Vec<u8>, AgentError> {
    engine_record::encode(engine.here().incarnation, engine.address(), devices).map_err(AgentError::Engine)
}

fn start_engine(
    config: &AgentConfig,
    here: MemberId,
    devices: &[DeviceId],
) -> Result<TransferEngine, AgentError> {
    let mut engine = crate::transfer::EngineConfig::new(here, devices.to_vec());
    engine.listen = config.listen;
    engine.advertise = config.advertise.clone();
    engine.token = config.token.clone();
    engine.tls = config.transfer_tls.clone();
    engine.transport = config.transport;
    engine.fabric = config.fabric.clone();
    engine.cliques = config.cliques;
    engine.spin = config.spin.unwrap_or(engine.spin);
    let engine = TransferEngine::start(engine).map_err(|error| engine_start_error(config, &error))?;
    // Peers dial the addresses in the record.
    engine_record::decode(here, &encode_engine_record(&engine, devices)?).map_err(|error| {
        AgentError::Settings(format!(
            "nobody could reach this engine ({error}): name the address that others dial with --advertise"
        ))
    })?;
    Ok(engine)
}

fn engine_start_error(config: &AgentConfig, error: &io::Error) -> AgentError {
    use io::ErrorKind::{AddrInUse, AddrNotAvailable, PermissionDenied};
    let Some(listen) = config.listen else { return AgentError::Engine(error.to_string()) };
    let next = match error.kind() {
        AddrInUse => "another process listens there: choose another port, or 0 for a free one",
        AddrNotAvailable => "this host has no such address: name one that it has",
        PermissionDenied => "this process may not: choose a port from 1024 on, or 0 for a free one",
        _ => return AgentError::Engine(error.to_string()),
    };
    AgentError::Engine(format!("it cannot listen at {listen} (--listen): {error}; {next}"))
}
