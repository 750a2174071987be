//! Joins a job: starts the engine, registers, publishes the engine record, the devices and the process identity, and
//! starts the background tasks.
//!
//! `mod.rs` has the calls of an agent that has joined. Begin at [`Agent::join`].

use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;

use super::coordination_client::CoordinationClient;
use super::engine_host::EngineHost;
use super::shared::AgentShared;
use super::task_states::ReportedTaskState;
use super::{
    Agent, AgentConfig, AgentError, channel, engine_record, heartbeat, preemption, roster, topology,
    transfer_reports,
};
use crate::clock;
use crate::coordination::ProcessIdentity;
use crate::transfer::{Incarnation, MemberId, TaskId};

/// The longest pause between two attempts to register.
const REGISTER_PAUSE_MAX: Duration = Duration::from_secs(1);

impl Agent {
    /// Starts an engine and registers a new incarnation of the task. Returns when the service counts it as
    /// connected; in a forming run, when all others have registered.
    ///
    /// # Errors
    /// If the settings are wrong, the engine cannot start, the service refuses the task, or the time is over.
    pub async fn join(config: AgentConfig) -> Result<Self, AgentError> {
        config.check()?;
        let (channel, port) = channel::create_service_channel(&config)?;
        let incarnation = new_incarnation();
        let here = MemberId::of_own_job(TaskId(config.task), incarnation);
        let devices = config.device_ids();
        let (to, address) = ((channel.clone(), port), config.service.clone());
        let mut service = CoordinationClient::new(to, address, config.task, incarnation.get());
        let host = EngineHost::start(config, here, devices, service.clone())?;
        let config = &host.config;
        register(&mut service, config).await?;
        publish_engine_and_devices(&service, &host).await?;
        let first = service.watch_task_states(-1, Some(config.call_limit)).await?;
        let tasks = validated_task_count(config, &first.0)?;
        let service = Arc::new(service);
        let inner = Arc::new(AgentShared::new(Arc::clone(&host), Arc::clone(&service), tasks));
        let mut background = JoinSet::new();
        background.spawn(heartbeat::send_heartbeats(Arc::clone(&inner)));
        background.spawn(heartbeat::poll_for_service_error(Arc::clone(&inner)));
        background.spawn(roster::follow_task_states(Arc::clone(&host), service, first));
        background.spawn(preemption::watch_preemption_notice(Arc::clone(&inner)));
        background.spawn(transfer_reports::report_periodically(host, channel.clone()));
        Ok(Self { inner, channel, background })
    }
}

fn new_incarnation() -> Incarnation {
    loop {
        if let Some(incarnation) = Incarnation::new(clock::random_u64()) {
            return incarnation;
        }
    }
}

/// Registers, repeatedly as clients of the protocol do, until the time is over.
async fn register(service: &mut CoordinationClient, config: &AgentConfig) -> Result<(), AgentError> {
    let until = clock::monotonic() + config.register_limit;
    let mut pause = Duration::from_millis(20);
    let mut told = false;
    loop {
        let left = until.saturating_duration_since(clock::monotonic());
        let error = match service.register(left).await? {
            Ok(()) => return Ok(()),
            Err(error) => error,
        };
        if until.saturating_duration_since(clock::monotonic()) <= pause {
            return Err(error);
        }
        if !std::mem::replace(&mut told, true) {
            tracing::warn!(%error, "not registered yet; it is tried again for {:?}", config.register_limit);
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(REGISTER_PAUSE_MAX);
    }
}

/// Publishes the engine record and the devices.
async fn publish_engine_and_devices(
    service: &CoordinationClient,
    host: &EngineHost,
) -> Result<(), AgentError> {
    let (config, limit) = (&host.config, host.config.call_limit);
    service
        .insert(&engine_record::store_key(host.here()), host.encoded_engine_record()?, true, limit)
        .await?;
    if let Some(identity) = &config.identity {
        service
            .insert(&ProcessIdentity::store_key(config.task), identity.to_store_value(), true, limit)
            .await?;
    }
    let key = topology::store_key(config.task);
    let devices = topology::encode(config, &host.engine.address().host);
    match service.insert(&key, devices.clone(), false, limit).await {
        Err(error) if error.grpc_code() == Some(tonic::Code::AlreadyExists) => {
            let before = service.try_get(&key, limit).await?.unwrap_or_default();
            if !topology::have_same_devices(&before, &devices) {
                return Err(AgentError::DevicesChanged { task: config.task, key });
            }
            // The same devices, perhaps on another host.
            service.insert(&key, devices, true, limit).await
        }
        done => done,
    }
}

/// Returns the number of tasks of the job, by the service's own list.
fn validated_task_count(config: &AgentConfig, states: &[ReportedTaskState]) -> Result<u32, AgentError> {
    let tasks = states.iter().map(|state| state.task + 1).max().unwrap_or(0);
    match config.tasks {
        Some(wanted) if wanted != tasks => Err(AgentError::Settings(format!(
            "the job has {tasks} task(s), but this worker was told {wanted}: serve a job of {wanted}, or correct --tasks"
        ))),
        _ if config.task >= tasks => Err(AgentError::Protocol {
            call: "watch of tasks",
            what: format!("task {} is registered, but not among {tasks}", config.task),
        }),
        _ => Ok(tasks),
    }
}
