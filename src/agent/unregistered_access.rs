//! Follows the task states of a job, and reads and writes its store, without registering.
//!
//! This module does not retry. Its calls are of generation A. These calls state no incarnation, so the service
//! answers a process that has not registered. Begin at [`list_task_presences`], then [`UnregisteredJobClient`].

use std::time::Duration;

use bytes::Bytes;

use super::channel;
use super::config::AgentConfig;
use super::coordination_client::CoordinationClient;
use super::engine_record;
use super::error::AgentError;
use super::live_engines::RosterSource;
use super::task_states::ReportedTaskState;
use crate::transfer::{Incarnation, MemberId};

/// The length of the longest value that [`UnregisteredJobClient::get`] takes.
const VALUE_BYTES_MAX: usize = 4 << 20;

/// A task of a job, as a process sees it that has not registered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TaskPresence {
    /// The task.
    pub task: u32,
    /// The incarnation that registered last in the present run, if one did. It may have gone again while others were
    /// missing.
    pub incarnation: Option<Incarnation>,
    /// Whether it is connected. No task is before all have registered.
    pub is_connected: bool,
    /// Its error; empty if it has none.
    pub error: String,
}

/// Returns every task of the job at `config.service`, ascending, within `config.call_limit`.
///
/// # Errors
/// If the service cannot be reached, or does not serve the job.
pub async fn list_task_presences(config: &AgentConfig) -> Result<Vec<TaskPresence>, AgentError> {
    Ok(to_presences(
        unregistered_client(config)?.get_task_states_without_registration(config.call_limit).await?,
    ))
}

/// Returns why the service refuses the task of `config`, if it does, within `config.call_limit`.
///
/// The text is that of the exclusion. A task that was excluded in the present run, and readmitted since, is refused with
/// the same text until it registers again.
///
/// # Errors
/// If the service cannot be reached, or does not serve the job.
pub async fn query_admission_refusal(config: &AgentConfig) -> Result<Option<String>, AgentError> {
    unregistered_client(config)?.query_exclusion_reason(config.call_limit).await
}

/// Follows the task states of a job, and reads and writes its store, without registering.
#[derive(Debug, Clone)]
pub struct UnregisteredJobClient {
    service: CoordinationClient,
    limit: Duration,
    /// The version of the states that it has returned last.
    version: i64,
}

impl UnregisteredJobClient {
    /// Returns an observer of the job at `config.service`. It connects with its first call.
    ///
    /// # Errors
    /// If the settings are wrong.
    pub fn new(config: &AgentConfig) -> Result<Self, AgentError> {
        Ok(Self { service: unregistered_client(config)?, limit: config.call_limit, version: -1 })
    }

    /// Returns the states of all tasks: at once the first time, then when one has changed, however long that takes.
    ///
    /// # Errors
    /// If the service cannot be reached.
    pub async fn next_states(&mut self) -> Result<Vec<TaskPresence>, AgentError> {
        let (states, version) = self.service.watch_task_states_without_registration(self.version).await?;
        self.version = version;
        Ok(to_presences(states))
    }

    /// Returns the version of the states that [`Self::next_states`] has returned last. It is the service's own, so two observers
    /// can tell which of their states are newer.
    #[must_use]
    pub const fn states_version(&self) -> i64 {
        self.version
    }

    /// Writes a key; returns whether it was written, which it is not if it exists and `overwrite` is false.
    ///
    /// # Errors
    /// If the service does not answer in time, or refuses the key.
    pub async fn insert(&self, key: &str, value: Bytes, overwrite: bool) -> Result<bool, AgentError> {
        self.service.insert_without_registration(key, value, overwrite, self.limit).await
    }

    /// Returns the value of a key, once it has one, however long that takes.
    ///
    /// # Errors
    /// If the service cannot be reached.
    pub async fn get(&self, key: &str) -> Result<Bytes, AgentError> {
        self.service.get_without_registration(key, VALUE_BYTES_MAX).await
    }

    /// Returns the value of a key, if it has one now.
    ///
    /// # Errors
    /// If the service does not answer in time.
    pub async fn try_get(&self, key: &str) -> Result<Option<Bytes>, AgentError> {
        self.service.try_get_without_registration(key, self.limit).await
    }

    /// Deletes a key and everything below it.
    ///
    /// # Errors
    /// If the service does not answer in time.
    pub async fn delete(&self, key: &str) -> Result<(), AgentError> {
        self.service.delete_without_registration(key, self.limit).await
    }

    /// Returns the entries of a directory of the store, by key.
    ///
    /// # Errors
    /// If the service does not answer in time.
    pub async fn list(&self, directory: &str) -> Result<Vec<(String, Bytes)>, AgentError> {
        self.service.list_without_registration(directory, self.limit).await
    }
}

/// The calls of a process that has not registered.
#[derive(Debug)]
pub(super) struct UnregisteredRosterSource(pub CoordinationClient);

impl RosterSource for UnregisteredRosterSource {
    async fn watch_states(&self, version: i64) -> Result<(Vec<ReportedTaskState>, i64), AgentError> {
        self.0.watch_task_states_without_registration(version).await
    }

    async fn wait_for_engine_record(&self, member: MemberId) -> Result<Bytes, AgentError> {
        self.0.get_without_registration(&engine_record::store_key(member), engine_record::BYTES_MAX).await
    }
}

fn to_presences(states: Vec<ReportedTaskState>) -> Vec<TaskPresence> {
    let mut tasks: Vec<TaskPresence> = states
        .into_iter()
        .map(|state| TaskPresence {
            task: state.task,
            incarnation: Incarnation::new(state.incarnation),
            is_connected: state.connected,
            error: state.error,
        })
        .collect();
    tasks.sort_by_key(|task| task.task);
    tasks
}

fn unregistered_client(config: &AgentConfig) -> Result<CoordinationClient, AgentError> {
    config.check()?;
    let (channel, port) = channel::create_service_channel(config)?;
    Ok(CoordinationClient::new((channel, port), config.service.clone(), config.task, 0))
}
