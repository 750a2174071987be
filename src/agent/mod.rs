//! The native worker: a task of a job that speaks the coordination protocol and owns a transfer engine.
//!
//! It has no rule of coordination, and no training step: `cli::worker` performs the steps. An [`Agent`] is one
//! incarnation of one task, with background tasks for heartbeats, the error poll, the preemption notice, the task
//! states and the reports. Begin at [`Agent::join`].
//!
//! | file | what it does |
//! | --- | --- |
//! | `cluster_env/` | detects which task this process is, and where the service is |
//! | `config.rs`, `error.rs` | the configuration of an agent; its errors |
//! | `join.rs` | how an agent joins |
//! | `shared.rs` | the state that an agent and its background tasks share |
//! | `heartbeat.rs` | heartbeats and the error poll |
//! | `attachment.rs` | a transfer engine for a task that another client of this process has registered |
//! | `engine_host.rs` | the engine of an agent or an attachment, with its roster and its end; repeated calls |
//! | `channel.rs`, `coordination_client.rs` | the gRPC channel, and the calls of the protocol |
//! | `task_states.rs` | the task states |
//! | `live_engines.rs`, `engine_record.rs` | the connected tasks, and the engine records that they publish |
//! | `roster.rs` | turns the task states into the engine's membership |
//! | `peer_jobs.rs`, `followed_jobs.rs` | the tasks of other jobs that the program names as peers of its transfers |
//! | `waiting_launches.rs`, `pending_launch.rs` | launches that wait until the engines of their peers are members |
//! | `launch_queue.rs` | the queue of these launches |
//! | `unregistered_access.rs` | which tasks have registered, for a process that has not |
//! | `task_claim.rs` | asks the service which task this process is |
//! | `retry.rs` | the pauses before repeated calls, and their time limit |
//! | `live_set.rs` | the live set, and which tasks have not called |
//! | `topology.rs` | devices, published as JAX publishes them |
//! | `transfer_access.rs` | which processes may connect to the transfer engine |
//! | `preemption.rs` | preemption notices, and the step that all tasks agree on |
//! | `transfer_reports.rs`, `report_state.rs` | transfer reports |
//! | `activities.rs`, `stack_answers.rs` | what the program and the engine are doing, for an operator who asks |
//! | `collective_reports.rs` | reports of collectives, for the profiler plug-in of NCCL |
//! | `clock_offset.rs` | the offset of this host's clock |
//! | `metrics.rs` | the worker's own metrics |
//!
//! - A task is in the engine's membership if it is connected and its engine record, written under its incarnation,
//!   was read and found usable. The record comes from another process, so it is bounded and checked, and it cannot
//!   give a task devices that another task has.
//! - The service's statement about a task counts, not the state of the network. An excluded worker is still reachable
//!   by the network, but its transfers fail.
//! - When an incarnation ends, the agent empties the membership before any caller learns of the end. So nothing moves
//!   in the name of a fenced incarnation.
//! - If the service is unreachable, a call is repeated for a limited time. If the service is still unreachable then,
//!   the call fails. If the call is a heartbeat, the error poll or the watch of the task states, the incarnation
//!   ends.
//! - If a task is silent, only the service judges it, by its heartbeats. The other tasks wait until then.
//! - On SIGTERM, a worker tries to leave alone. If the service does not let it leave, the worker raises the
//!   preemption notice. The protocol does not tell a worker whether the tasks of its job share their fate; only the
//!   answer to the shutdown call shows it.
//!
//! Every call to the service that the program makes through an [`Agent`] has a limit, ends when this incarnation
//! ends, and is cancelled by dropping its future. Background tasks wait for changes without a limit.

mod activities;
mod attachment;
mod channel;
mod clock_offset;
pub mod cluster_env;
mod collective_reports;
mod config;
mod coordination_client;
mod engine_host;
mod engine_record;
mod error;
mod followed_jobs;
mod heartbeat;
mod join;
mod launch_queue;
mod live_engines;
mod live_set;
mod metrics;
mod peer_jobs;
mod pending_launch;
mod preemption;
mod report_state;
mod retry;
mod roster;
mod shared;
mod stack_answers;
mod task_claim;
mod task_states;
mod timed_connector;
pub(crate) mod topology;
mod transfer_access;
mod transfer_reports;
mod unregistered_access;
mod waiting_launches;

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tonic::transport::Channel;

pub use attachment::AttachedEngine;
pub use collective_reports::CollectiveReporter;
pub use config::{
    AgentConfig, AgentTlsFiles, DEVICES_MAX, cliques_of_environment, device_id_of_task,
    fabric_of_environment, provider_of_fabric, task_of_device_id,
};
pub use engine_host::EngineHost;
pub use engine_record::EngineRecordError;
pub use error::AgentError;
pub use live_engines::ClusterRoster;
pub use pending_launch::{PendingLaunch, WaitStatus};
pub use transfer_access::{TransferAccess, check_credentials_if_exposed};
pub(crate) use transfer_reports::asked_report_interval;
pub use unregistered_access::{
    TaskPresence, UnregisteredJobClient, list_task_presences, query_admission_refusal,
};

pub(crate) use channel::DetectedPortProtocol;
pub(crate) use coordination_client::CoordinationClient;
pub(crate) use live_engines::hash_members;
pub use task_claim::{GrantedTask, claim_task, own_claimant_id};
pub(crate) use timed_connector::TimedConnector;
pub use waiting_launches::PeerWait;

use crate::transfer::{Incarnation, MemberId, TaskId, TransferEngine};
use pending_launch::lock;
use retry::RetryBudget;
use shared::AgentShared;

/// One incarnation of a task, registered and with an engine. If it is dropped without
/// [`leave`](Agent::leave), the service sees what it sees of a killed process.
pub struct Agent {
    inner: Arc<AgentShared>,
    channel: Channel,
    /// The background tasks: heartbeats, the error poll, the watch of tasks, the notice, reports. They end
    /// with the agent.
    background: JoinSet<()>,
}

impl std::fmt::Debug for Agent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Agent").field("here", &self.inner.here()).finish_non_exhaustive()
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.inner.host.stop_peer_jobs_and_launches();
    }
}

impl Agent {
    /// Returns this task and its incarnation.
    #[must_use]
    pub fn here(&self) -> MemberId {
        self.inner.here()
    }

    /// Returns the configuration with which it joined.
    #[must_use]
    pub fn config(&self) -> &AgentConfig {
        &self.inner.config
    }

    /// Returns the number of tasks of the job.
    #[must_use]
    pub fn tasks(&self) -> u32 {
        self.inner.tasks
    }

    /// Returns the service incarnation of the run.
    #[must_use]
    pub fn service_incarnation(&self) -> u64 {
        self.inner.service.service_incarnation()
    }

    /// Returns the transfer engine with its roster and its end.
    #[must_use]
    pub fn host(&self) -> &Arc<EngineHost> {
        &self.inner.host
    }

    /// Returns the transfer engine, which receives every change of the membership.
    #[must_use]
    pub fn engine(&self) -> &TransferEngine {
        self.inner.host.engine()
    }

    /// Returns the roster of live tasks, as it changes.
    #[must_use]
    pub fn roster(&self) -> watch::Receiver<ClusterRoster> {
        self.inner.host.roster()
    }

    /// Resolves with the reason when this incarnation has ended without leaving.
    pub async fn wait_for_end(&self) -> AgentError {
        self.inner.host.wait_for_end().await
    }

    /// Resolves with the text of a preemption notice when there is one.
    pub async fn wait_for_preemption_notice(&self) -> String {
        let mut notice = self.inner.notice.subscribe();
        loop {
            if let Some(text) = notice.borrow_and_update().clone() {
                return text;
            }
            if notice.changed().await.is_err() {
                return std::future::pending().await;
            }
        }
    }

    /// Writes a preemption notice for all tasks of the job, as JAX does at SIGTERM.
    ///
    /// # Errors
    /// If the service refuses it.
    pub async fn raise_preemption_notice(&self) -> Result<(), AgentError> {
        self.run_until_agent_ends(preemption::publish_preemption_notice(&self.inner)).await
    }

    /// Returns whether all tasks have agreed to stop before `step`. Call it before each step; between a
    /// notice and the agreement it waits.
    ///
    /// # Errors
    /// If this incarnation has ended.
    pub async fn reached_sync_point(&self, step: u64) -> Result<bool, AgentError> {
        let _waits =
            self.inner.activities.begin(|| "waits for the agreement on a step to stop at".to_owned());
        self.run_until_agent_ends(async {
            Ok(preemption::wait_for_sync_point_decision(&self.inner.sync, step).await)
        })
        .await
    }

    /// Waits at a barrier of all tasks, or of `members`, for at most `limit`. Only one call at a time may use
    /// an id. While the service is unreachable, the call is repeated; the service knows by the counter which
    /// instance it means.
    ///
    /// # Errors
    /// If the barrier does not pass, with the service's message.
    pub async fn barrier(&self, id: &str, members: &[u32], limit: Duration) -> Result<i64, AgentError> {
        let counters = &self.inner.counters;
        let mut counter = lock(counters).get(id).copied().unwrap_or(-1);
        let _waits = self.inner.activities.begin(|| format!("waits at barrier {id}, use {}", counter + 1));
        let mut patience = RetryBudget::new(self.inner.config.patience);
        let waiting = async {
            loop {
                // The service applies the limit; the patience is for a service that does not answer.
                let own = limit.saturating_add(self.inner.config.patience);
                match self.inner.service.barrier(id, members, &mut counter, limit, own).await {
                    Err(error) => self.inner.pause_before_retry(&mut patience, error).await?,
                    passed => {
                        self.inner.mark_service_reachable();
                        return passed;
                    }
                }
            }
        };
        let passed = self.run_until_agent_ends(waiting).await;
        lock(counters).insert(id.to_owned(), counter);
        passed.map(|()| counter)
    }

    /// Cancels the instance of a barrier at which this incarnation waits. Returns whether it was in time;
    /// every waiting call gets the same result.
    ///
    /// # Errors
    /// If the service does not answer.
    pub async fn cancel_barrier(&self, id: &str) -> Result<bool, AgentError> {
        let counter = lock(&self.inner.counters).get(id).copied().unwrap_or(-1) + 1;
        let limit = self.inner.config.call_limit;
        self.retry_while_service_unreachable(|| self.inner.service.cancel_barrier(id, counter, limit)).await
    }

    /// Drops the counter of a barrier that is not used again.
    pub fn drop_barrier_counter(&self, id: &str) {
        lock(&self.inner.counters).remove(id);
    }

    /// Returns the live tasks, once every one of them has called; they all get the same answer. A task that
    /// is lost meanwhile is not waited for.
    ///
    /// # Errors
    /// If not all of them have called within `limit`, with those that have not.
    pub async fn live_set(&self, limit: Duration) -> Result<Vec<MemberId>, AgentError> {
        let _waits = self.inner.activities.begin(|| "waits for the live set".to_owned());
        let alive = self.run_until_agent_ends(live_set::agree_on_live_set(&self.inner, limit)).await?;
        let members = alive.into_iter().map(|(task, incarnation)| {
            let incarnation = Incarnation::new(incarnation)?;
            (task < self.inner.tasks).then_some(MemberId::of_own_job(TaskId(task), incarnation))
        });
        members.collect::<Option<Vec<_>>>().ok_or_else(|| AgentError::Protocol {
            call: "live set",
            what: "it has a task that does not exist, or has no incarnation".to_owned(),
        })
    }

    /// Writes a key, which must not exist unless `overwrite`.
    ///
    /// # Errors
    /// If the service refuses it.
    pub async fn insert(
        &self,
        key: &str,
        value: impl Into<Bytes>,
        overwrite: bool,
    ) -> Result<(), AgentError> {
        let (limit, value) = (self.inner.config.call_limit, value.into());
        let inserting = || self.inner.service.insert(key, value.clone(), overwrite, limit);
        if overwrite {
            return self.retry_while_service_unreachable(inserting).await;
        }
        // It is not repeated, because a second attempt might find the key that the first one wrote.
        self.run_until_agent_ends(inserting()).await
    }

    /// Returns the value of a key, once it has one.
    ///
    /// # Errors
    /// If it has none within `limit`.
    pub async fn get(&self, key: &str, limit: Duration) -> Result<Bytes, AgentError> {
        let _waits = self.inner.activities.begin(|| format!("waits for key {key}"));
        self.retry_while_service_unreachable(|| self.inner.service.get(key, Some(limit))).await
    }

    /// Returns the value of a key, if it has one.
    ///
    /// # Errors
    /// If the service does not answer.
    pub async fn try_get(&self, key: &str) -> Result<Option<Bytes>, AgentError> {
        self.retry_while_service_unreachable(|| self.inner.service.try_get(key, self.inner.config.call_limit))
            .await
    }

    /// Returns the entries of a directory, by key.
    ///
    /// # Errors
    /// If the service does not answer.
    pub async fn list(&self, directory: &str) -> Result<Vec<(String, Bytes)>, AgentError> {
        self.retry_while_service_unreachable(|| {
            self.inner.service.list(directory, self.inner.config.call_limit)
        })
        .await
    }

    /// Deletes a key and everything below it.
    ///
    /// # Errors
    /// If the service does not answer.
    pub async fn delete(&self, key: &str) -> Result<(), AgentError> {
        self.retry_while_service_unreachable(|| self.inner.service.delete(key, self.inner.config.call_limit))
            .await
    }

    /// Returns a function that writes the worker's metrics in Prometheus's text format; `muster metrics list
    /// --worker` explains them.
    pub fn metrics_renderer(&self) -> impl Fn() -> String + Clone + Send + Sync + 'static {
        let inner = Arc::clone(&self.inner);
        move || metrics::render_metrics(&inner)
    }

    /// Tries to leave within `limit`: alone in a recoverable job, together with all other tasks in a
    /// fate-sharing one. If it fails, this incarnation continues.
    ///
    /// # Errors
    /// If the service does not let it leave, or not in time.
    pub async fn try_leave(&self, limit: Duration) -> Result<(), AgentError> {
        // The last report is sent before, because a task that has left cannot report.
        transfer_reports::send_final_report(&self.inner.host, &self.channel).await;
        self.inner.leaving.store(true, Ordering::Release);
        let left = match self.inner.service.shutdown(limit).await {
            // The task may have left all the same, and only the answer was late.
            Err(late @ AgentError::TimedOut { .. }) => match self.is_connected().await {
                Ok(false) => Ok(()),
                _ => Err(late),
            },
            left => left,
        };
        if left.is_err() {
            self.inner.leaving.store(false, Ordering::Release);
        }
        left
    }

    /// Returns whether the service counts this incarnation as connected, by a call that it handles after all
    /// earlier ones.
    async fn is_connected(&self) -> Result<bool, AgentError> {
        let (here, limit) = (self.here(), self.inner.config.call_limit);
        let (states, _) = self
            .inner
            .retry_while_service_unreachable(|| self.inner.service.watch_task_states(-1, Some(limit)))
            .await?;
        let own = states.iter().find(|state| state.task == here.task.0);
        Ok(own.is_some_and(|own| own.connected && own.incarnation == here.incarnation.get()))
    }

    /// Leaves in good order, together with the others if the job requires that, and ends the agent.
    ///
    /// # Errors
    /// If the service did not let it leave. The agent has ended all the same.
    pub async fn leave(self) -> Result<(), AgentError> {
        let over = self.inner.over.borrow().clone();
        let left = match over {
            None => self.try_leave(self.inner.config.shutdown_limit).await,
            Some(error) => Err(error),
        };
        self.stop_without_leaving().await;
        left
    }

    /// Ends the agent without telling the service.
    pub async fn stop_without_leaving(mut self) {
        self.inner.host.shut_down(&mut self.background).await;
    }

    /// Repeats a call while the service is unreachable, unless this incarnation has ended.
    async fn retry_while_service_unreachable<T, F>(&self, ask: impl FnMut() -> F) -> Result<T, AgentError>
    where
        F: Future<Output = Result<T, AgentError>>,
    {
        self.run_until_agent_ends(self.inner.retry_while_service_unreachable(ask)).await
    }

    async fn run_until_agent_ends<T>(
        &self,
        asking: impl Future<Output = Result<T, AgentError>>,
    ) -> Result<T, AgentError> {
        tokio::select! {
            biased;
            answer = asking => answer,
            error = self.wait_for_end() => Err(error),
        }
    }
}
