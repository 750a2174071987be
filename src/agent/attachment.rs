//! Attaches a transfer engine to a task that another client of this process, such as JAX's, has registered.
//!
//! An attachment does not register, because a second registration would replace the first. It sends no heartbeats,
//! holds no error poll and calls no barrier. Begin at [`AttachedEngine::open`].
//!
//! - The calls of an attachment are of generation A. These calls state no incarnation, so the service answers a
//!   process that has not registered itself (`unregistered_access.rs`).
//! - An attachment belongs to one incarnation of its task. It ends as soon as the task states show another
//!   incarnation of the task, or show that the task is not connected. After that it moves nothing.
//! - An attachment publishes its engine record and reports its transfers as an agent does, so peers and pages treat
//!   both alike. An incarnation has only one engine in its life, because its peers read its engine record once.

use std::sync::Arc;

use tokio::task::JoinSet;
use tonic::transport::Channel;

use super::coordination_client::CoordinationClient;
use super::engine_host::EngineHost;
use super::error::AgentError;
use super::unregistered_access::UnregisteredRosterSource;
use super::{AgentConfig, channel, engine_record, roster, task_states, transfer_reports};
use crate::transfer::{DeviceId, Incarnation, MemberId, TaskId};

/// A transfer engine for a task that another client has registered.
pub struct AttachedEngine {
    host: Arc<EngineHost>,
    channel: Channel,
    /// The background tasks: the watch of tasks, and reports. They end with the attachment.
    background: JoinSet<()>,
}

impl std::fmt::Debug for AttachedEngine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AttachedEngine").field("here", &self.host.here()).finish_non_exhaustive()
    }
}

impl Drop for AttachedEngine {
    fn drop(&mut self) {
        self.host.stop_peer_jobs_and_launches();
    }
}

impl AttachedEngine {
    /// Starts an engine for `incarnation` of the task of `config`, with these devices, and publishes its record.
    ///
    /// # Errors
    /// If the incarnation is not the one that the service counts as connected, or has had an engine before; if the
    /// engine cannot start, or the service does not answer within `config.call_limit`.
    pub async fn open(
        config: AgentConfig,
        incarnation: Incarnation,
        devices: Vec<DeviceId>,
    ) -> Result<Self, AgentError> {
        config.check()?;
        let (channel, port) = channel::create_service_channel(&config)?;
        let (to, address) = ((channel.clone(), port), config.service.clone());
        let job = UnregisteredRosterSource(CoordinationClient::new(to, address, config.task, 0));
        let limit = config.call_limit;
        let states = job.0.watch_task_states_without_registration(-1);
        let call = "watch of tasks";
        let late = |_| AgentError::TimedOut { call, limit };
        let (states, version) = tokio::time::timeout(limit, states).await.map_err(late)??;
        task_states::check_connected(&states, config.task, incarnation)?;
        let here = MemberId::of_own_job(TaskId(config.task), incarnation);
        let host = EngineHost::start(config, here, devices, job.0.clone())?;
        publish_engine_record(&job.0, &host).await?;
        let mut background = JoinSet::new();
        background.spawn(roster::follow_task_states(Arc::clone(&host), Arc::new(job), (states, version)));
        background.spawn(transfer_reports::report_periodically(Arc::clone(&host), channel.clone()));
        Ok(Self { host, channel, background })
    }

    /// Returns the transfer engine with its roster and its end.
    #[must_use]
    pub fn host(&self) -> &Arc<EngineHost> {
        &self.host
    }

    /// Reports for the last time, and ends the engine. The task stays registered.
    pub async fn close(mut self) {
        if self.host.incarnation_end_reason().is_none() {
            transfer_reports::send_final_report(&self.host, &self.channel).await;
        }
        self.host.shut_down(&mut self.background).await;
    }
}

/// Publishes the engine record, unless the incarnation has one.
async fn publish_engine_record(service: &CoordinationClient, host: &EngineHost) -> Result<(), AgentError> {
    let (here, own) = (host.here(), host.encoded_engine_record()?);
    let key = engine_record::store_key(here);
    if service.insert_without_registration(&key, own.clone(), false, host.config.call_limit).await? {
        return Ok(());
    }
    Err(AgentError::EngineExists { task: here.task.0, incarnation: here.incarnation })
}
