//! The native worker: a task of a job that speaks the coordination protocol and owns a transfer engine.
//!
//! It contains no training step (`exercise/` has one for tests) and no rule of coordination. Begin at
//! [`Agent::join`]. An `Agent` is one incarnation of one task, with background tasks for heartbeats, the error
//! poll, the preemption notice, the task states and the reports.
//!
//! | file | what it does |
//! | --- | --- |
//! | `cluster_env/` | detects which task this process is, and where the service is: one file a cluster system
//! |
//! | `channel.rs`, `service.rs` | the gRPC channel, and the calls of the protocol (generation C) |
//! | `roster.rs`, `engine_record.rs` | the task states made into the engine's membership; the engine record that each worker publishes |
//! | `retry.rs`, `live_set.rs` | retries while the service is away; the live set, with the tasks that have not called |
//! | `topology.rs` | devices, published as JAX publishes them |
//! | `preemption.rs` | preemption notices, and the step that all tasks agree on |
//! | `transfer_reports.rs`, `clock_offset.rs` | transfer reports, and the offset of this host's clock |
//! | `metrics.rs` | the worker's own metrics |
//! | `exercise/` | a program that moves buffers and checks every byte |
//!
//! - A task is a member of the engine's membership when it is connected and its engine record, written under
//!   its incarnation, was read and found usable. The record comes from another process: it is bounded and
//!   checked, and no task obtains devices that another task has.
//! - The service's statement counts before the network's. An excluded worker still answers on the network;
//!   its transfers fail all the same.
//! - When an incarnation ends, the agent empties the membership before any caller learns of it, so nothing
//!   moves in the name of a fenced incarnation.
//! - Every call waits for an unreachable service, for a limited time; no call waits for an answer without a
//!   limit. The service decides which tasks are lost, and says so with the first call that it answers.
//! - Only the service judges a silent task, by its heartbeats. The others wait for it until then; a barrier
//!   that times out is cancelled.
//! - SIGTERM makes a worker leave alone, and raises the preemption notice if the service does not let it
//!   leave. Nothing on the wire tells whether tasks share their fate; the answer to the shutdown call does.
//!
//! Every wait has a limit, ends when this incarnation ends, and is cancelled by dropping its future.

mod channel;
mod clock_offset;
pub mod cluster_env;
mod config;
mod engine_record;
mod error;
pub mod exercise;
mod live_set;
mod metrics;
mod preemption;
mod retry;
mod roster;
mod service;
mod topology;
mod transfer_reports;

use std::collections::HashMap;
use std::future::Future;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;
use tonic::transport::Channel;

pub use config::{AgentConfig, AgentTlsFiles, DEVICES_MAX};
pub use engine_record::EngineRecordError;
pub use error::AgentError;
pub use roster::ClusterRoster;

use crate::clock;
use crate::transfer::{Engine, Incarnation, Member, Membership, TaskId};
use retry::RetryBudget;
use service::CoordinationClient;
use transfer_reports::ReportState;

/// The longest pause between two attempts to register.
const REGISTER_PAUSE_MAX: Duration = Duration::from_secs(1);
/// The timeout of the last report.
const FINAL_REPORT_TIMEOUT: Duration = Duration::from_secs(1);

/// The state that the agent and its background tasks share.
struct AgentShared {
    config: AgentConfig,
    service: CoordinationClient,
    engine: Engine,
    tasks: u32,
    roster: watch::Sender<ClusterRoster>,
    over: watch::Sender<Option<AgentError>>,
    notice: watch::Sender<Option<String>>,
    sync: watch::Sender<preemption::SyncState>,
    counters: Mutex<HashMap<String, i64>>,
    report_state: Mutex<ReportState>,
    report_soon: Arc<Notify>,
    leaving: AtomicBool,
    /// Whether the service is unreachable and that has been logged.
    is_unreachable: AtomicBool,
}

impl AgentShared {
    fn here(&self) -> Member {
        self.engine.here()
    }

    fn is_leaving(&self) -> bool {
        self.leaving.load(Ordering::Acquire)
    }

    /// Repeats a call while the service is unreachable, until it is answered.
    ///
    /// # Errors
    /// The error of the answer, or the transport's error if the service is unreachable for too long.
    async fn retry<T, F>(&self, mut ask: impl FnMut() -> F) -> Result<T, AgentError>
    where
        F: Future<Output = Result<T, AgentError>>,
    {
        let mut patience = RetryBudget::new(self.config.patience);
        loop {
            match ask().await {
                Err(error) => self.pause_before_retry(&mut patience, error).await?,
                answer => {
                    self.mark_reachable();
                    return answer;
                }
            }
        }
    }

    /// Waits before a failed call is repeated.
    ///
    /// # Errors
    /// The error itself, if repeating is useless or the time for it is over.
    async fn pause_before_retry(
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
        patience.next_pause(error).await
    }

    /// Records that the service has answered.
    fn mark_reachable(&self) {
        if self.is_unreachable.swap(false, Ordering::AcqRel) {
            tracing::warn!("the service answers again");
        }
    }

    /// Ends this incarnation, for this reason unless it has ended before. The membership is emptied before
    /// any caller learns of it.
    fn end(&self, error: AgentError) {
        self.over.send_if_modified(|over| {
            let first = over.is_none();
            if first {
                self.engine.on_membership(Membership::default());
                *over = Some(error);
            }
            first
        });
    }

    /// Sends a membership to the engine, unless this incarnation has ended; it cannot end meanwhile.
    fn tell_engine(&self, membership: Membership) {
        let over = self.over.borrow();
        if over.is_none() {
            self.engine.on_membership(membership);
        }
    }
}

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

impl Agent {
    /// Starts an engine and registers a new incarnation of the task. Returns when the service counts it as
    /// connected; in a forming run, when all others have registered.
    ///
    /// # Errors
    /// If the settings are wrong, the engine cannot start, the service refuses the task, or the time is over.
    pub async fn join(config: AgentConfig) -> Result<Self, AgentError> {
        config.check()?;
        let (channel, port) = channel::channel(&config)?;
        let incarnation = new_incarnation();
        let here = Member { task: TaskId(config.task), incarnation };
        let engine = start_engine(&config, here)?;
        let (to, address) = ((channel.clone(), port), config.service.clone());
        let mut service = CoordinationClient::new(to, address, config.task, incarnation.get());
        let hurry = Arc::new(Notify::new());
        let failed = Arc::clone(&hurry);
        engine.meters().on_failure(move || failed.notify_one());
        register(&mut service, &config).await?;
        publish(&service, &config, &engine).await?;
        let first = service.watch(-1, Some(config.call_limit)).await?;
        let tasks = count(&config, &first.0)?;
        let inner = Arc::new(AgentShared {
            config,
            service,
            engine,
            tasks,
            roster: watch::Sender::new(ClusterRoster::default()),
            over: watch::Sender::new(None),
            notice: watch::Sender::new(None),
            sync: watch::Sender::default(),
            counters: Mutex::default(),
            report_state: Mutex::default(),
            report_soon: hurry,
            leaving: AtomicBool::new(false),
            is_unreachable: AtomicBool::new(false),
        });
        let mut background = JoinSet::new();
        background.spawn(heartbeat_loop(Arc::clone(&inner)));
        background.spawn(error_poll_loop(Arc::clone(&inner)));
        background.spawn(roster::follow(Arc::clone(&inner), first));
        background.spawn(preemption::watch(Arc::clone(&inner)));
        background.spawn(transfer_reports::keep(Arc::clone(&inner), channel.clone()));
        Ok(Self { inner, channel, background })
    }

    /// Returns this task and its incarnation.
    #[must_use]
    pub fn here(&self) -> Member {
        self.inner.here()
    }

    /// Returns the number of tasks of the job.
    #[must_use]
    pub fn tasks(&self) -> u32 {
        self.inner.tasks
    }

    /// Returns the service incarnation of the run.
    #[must_use]
    pub fn run(&self) -> u64 {
        self.inner.service.run()
    }

    /// Returns the transfer engine, which receives every change of the membership.
    #[must_use]
    pub fn engine(&self) -> &Engine {
        &self.inner.engine
    }

    /// Returns the roster of live tasks, as it changes.
    #[must_use]
    pub fn roster(&self) -> watch::Receiver<ClusterRoster> {
        self.inner.roster.subscribe()
    }

    /// Resolves with the reason when this incarnation has ended without leaving.
    pub async fn over(&self) -> AgentError {
        let mut over = self.inner.over.subscribe();
        loop {
            if let Some(error) = over.borrow_and_update().clone() {
                return error;
            }
            if over.changed().await.is_err() {
                return AgentError::LifeEnded {
                    task: self.here().task.0,
                    why: "the agent is gone".to_owned(),
                };
            }
        }
    }

    /// Resolves with the text of a preemption notice when there is one.
    pub async fn notice(&self) -> String {
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
    pub async fn raise_notice(&self) -> Result<(), AgentError> {
        self.unless_over(preemption::publish_notice(&self.inner)).await
    }

    /// Returns whether all tasks have agreed to stop before `step`. Call it before each step; between a
    /// notice and the agreement it waits.
    ///
    /// # Errors
    /// If this incarnation has ended.
    pub async fn reached_sync_point(&self, step: u64) -> Result<bool, AgentError> {
        self.unless_over(async { Ok(preemption::sync_point_reached(&self.inner.sync, step).await) }).await
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
        let mut patience = RetryBudget::new(self.inner.config.patience);
        let waiting = async {
            loop {
                // The service applies the limit; the patience is for a service that does not answer.
                let own = limit.saturating_add(self.inner.config.patience);
                match self.inner.service.barrier(id, members, &mut counter, limit, own).await {
                    Err(error) => self.inner.pause_before_retry(&mut patience, error).await?,
                    passed => {
                        self.inner.mark_reachable();
                        return passed;
                    }
                }
            }
        };
        let passed = self.unless_over(waiting).await;
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
        self.retry(|| self.inner.service.cancel_barrier(id, counter, limit)).await
    }

    /// Drops the counter of a barrier that is not used again.
    pub fn forget_barrier(&self, id: &str) {
        lock(&self.inner.counters).remove(id);
    }

    /// Returns the live tasks, once every one of them has called; they all get the same answer. A task that
    /// is lost meanwhile is not waited for.
    ///
    /// # Errors
    /// If not all of them have called within `limit`, with those that have not.
    pub async fn live_set(&self, limit: Duration) -> Result<Vec<Member>, AgentError> {
        let alive = self.unless_over(live_set::live_set(&self.inner, limit)).await?;
        let members = alive.into_iter().map(|(task, incarnation)| {
            let incarnation = Incarnation::new(incarnation)?;
            (task < self.inner.tasks).then_some(Member { task: TaskId(task), incarnation })
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
            return self.retry(inserting).await;
        }
        // It is not repeated, because a second attempt might find the key that the first one wrote.
        self.unless_over(inserting()).await
    }

    /// Returns the value of a key, once it has one.
    ///
    /// # Errors
    /// If it has none within `limit`.
    pub async fn get(&self, key: &str, limit: Duration) -> Result<Bytes, AgentError> {
        self.retry(|| self.inner.service.get(key, Some(limit))).await
    }

    /// Returns the value of a key, if it has one.
    ///
    /// # Errors
    /// If the service does not answer.
    pub async fn try_get(&self, key: &str) -> Result<Option<Bytes>, AgentError> {
        self.retry(|| self.inner.service.try_get(key, self.inner.config.call_limit)).await
    }

    /// Returns the entries of a directory, by key.
    ///
    /// # Errors
    /// If the service does not answer.
    pub async fn list(&self, directory: &str) -> Result<Vec<(String, Bytes)>, AgentError> {
        self.retry(|| self.inner.service.list(directory, self.inner.config.call_limit)).await
    }

    /// Deletes a key and everything below it.
    ///
    /// # Errors
    /// If the service does not answer.
    pub async fn delete(&self, key: &str) -> Result<(), AgentError> {
        self.retry(|| self.inner.service.delete(key, self.inner.config.call_limit)).await
    }

    /// Returns a function that writes the worker's metrics in Prometheus's text format; `muster metrics list
    /// --worker` explains them.
    pub fn metrics(&self) -> impl Fn() -> String + Clone + Send + Sync + 'static {
        let inner = Arc::clone(&self.inner);
        move || metrics::page(&inner)
    }

    /// Tries to leave within `limit`: alone in a recoverable job, together with all other tasks in a
    /// fate-sharing one. If it fails, this incarnation continues.
    ///
    /// # Errors
    /// If the service does not let it leave, or not in time.
    pub async fn try_leave(&self, limit: Duration) -> Result<(), AgentError> {
        // The last report is sent before, because a task that has left cannot report.
        let _told = tokio::time::timeout(
            FINAL_REPORT_TIMEOUT,
            transfer_reports::send_report(&self.inner, self.channel.clone()),
        )
        .await;
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
        let (states, _) = self.inner.retry(|| self.inner.service.watch(-1, Some(limit))).await?;
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
        self.end().await;
        left
    }

    /// Ends the agent without telling the service.
    pub async fn end(mut self) {
        self.background.shutdown().await;
        let engine = self.inner.engine.clone();
        // The shutdown joins threads, so it blocks.
        let _ended = tokio::task::spawn_blocking(move || engine.shutdown()).await;
    }

    /// Repeats a call while the service is unreachable, unless this incarnation has ended.
    async fn retry<T, F>(&self, ask: impl FnMut() -> F) -> Result<T, AgentError>
    where
        F: Future<Output = Result<T, AgentError>>,
    {
        self.unless_over(self.inner.retry(ask)).await
    }

    async fn unless_over<T>(
        &self,
        asking: impl Future<Output = Result<T, AgentError>>,
    ) -> Result<T, AgentError> {
        tokio::select! {
            biased;
            answer = asking => answer,
            error = self.over() => Err(error),
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn new_incarnation() -> Incarnation {
    loop {
        if let Some(incarnation) = Incarnation::new(clock::random_u64()) {
            return incarnation;
        }
    }
}

fn start_engine(config: &AgentConfig, here: Member) -> Result<Engine, AgentError> {
    let mut engine = crate::transfer::Config::new(here, config.device_ids());
    engine.listen = config.listen;
    engine.advertise = config.advertise.clone();
    engine.token = config.token.clone();
    engine.tls = config.transfer_tls.clone();
    engine.transport = config.transport;
    engine.spin = config.spin.unwrap_or(engine.spin);
    let engine = Engine::start(engine).map_err(|error| cannot_start(config, &error))?;
    // Peers dial the addresses in the record.
    let own = engine_record::write(here.incarnation, engine.address(), &config.device_ids());
    let own = own.map_err(AgentError::Engine)?;
    engine_record::read(here, &own).map_err(|error| {
        AgentError::Settings(format!(
            "nobody could reach this engine ({error}): name the address that others dial with --advertise"
        ))
    })?;
    Ok(engine)
}

fn cannot_start(config: &AgentConfig, error: &io::Error) -> AgentError {
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
async fn publish(
    service: &CoordinationClient,
    config: &AgentConfig,
    engine: &Engine,
) -> Result<(), AgentError> {
    let limit = config.call_limit;
    let here = engine.here();
    let own = engine_record::write(here.incarnation, engine.address(), &config.device_ids())
        .map_err(AgentError::Engine)?;
    service.insert(&engine_record::key(here), own, true, limit).await?;
    let key = topology::key(config.task);
    let devices = topology::write(config, &engine.address().host);
    match service.insert(&key, devices.clone(), false, limit).await {
        Err(error) if error.code() == Some(tonic::Code::AlreadyExists) => {
            let before = service.try_get(&key, limit).await?.unwrap_or_default();
            if !topology::same_devices(&before, &devices) {
                return Err(AgentError::DevicesChanged { task: config.task, key });
            }
            // The same devices, perhaps on another host.
            service.insert(&key, devices, true, limit).await
        }
        done => done,
    }
}

/// Returns the number of tasks of the job, by the service's own list.
fn count(config: &AgentConfig, states: &[service::KnownTaskState]) -> Result<u32, AgentError> {
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

/// Sends heartbeats at half of the timeout, each with that as its limit.
async fn heartbeat_loop(inner: Arc<AgentShared>) {
    let interval = inner.config.heartbeat_timeout / 2;
    loop {
        tokio::time::sleep(interval).await;
        let heard = inner.retry(|| async {
            // A silent service counts as unreachable: another call may succeed.
            inner.service.heartbeat(interval).await.map_err(|error| match error {
                AgentError::TimedOut { call, limit } => AgentError::Unreachable {
                    service: inner.config.service.clone(),
                    call,
                    why: format!("no answer within {limit:?}"),
                },
                error => error,
            })
        });
        if let Err(error) = heard.await {
            return inner.end(error);
        }
    }
}

/// Holds the error poll.
async fn error_poll_loop(inner: Arc<AgentShared>) {
    // If the poll is answered for good, errors arrive with heartbeats and with the watch.
    if let Err(error) = inner.retry(|| inner.service.poll()).await {
        inner.end(error);
    }
}
