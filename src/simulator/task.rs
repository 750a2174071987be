//! Runs one simulated task: it registers, sends heartbeats, waits for errors, and makes steps that end at a barrier, as
//! an unmodified JAX process does. It carries out the actions of the story.
//!
//! The future of a call takes 3 KB. Calls are boxed, so that a task has this memory only while it makes a call.
//! `cluster.rs` starts the tasks and sends them their actions. Begin at [`SimulatedTask::run`], then `run_life`.

use std::convert::Infallible;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use futures_util::future::OptionFuture;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tonic::Code;

use super::clique::SimulatedClique;
use super::connection::{ConnectionPool, SimulatedConnection};
use super::layout::{boot_id, host_name};
use super::schedule::TaskAction;
use super::story::Story;
use super::tally::Tally;
use crate::agent::topology::{self, GLOBAL_TOPOLOGY_KEY};
use crate::agent::{AgentError, CoordinationClient, DetectedPortProtocol, asked_report_interval};
use crate::clock;
use crate::coordination::ProcessIdentity;
use crate::proto::muster::v1 as pb;
use crate::proto::muster::v1::collectives_client::CollectivesClient;

/// The id of the barrier at the end of each step.
pub const STEP_BARRIER: &str = "train/step";
/// The timeout of a registration, which waits for all other tasks.
const REGISTER_TIMEOUT: Duration = Duration::from_secs(600);
/// The timeout of a call that the service answers at once.
const CALL_TIMEOUT: Duration = Duration::from_secs(60);
/// The timeout of a shutdown, which waits for all other tasks if the job is not recoverable.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(60);
/// The longest pause before a registration is repeated.
const REGISTER_PAUSE: Duration = Duration::from_secs(1);
/// The shortest pause before a task returns that an operator has excluded.
const EXCLUDED_PAUSE: Duration = Duration::from_secs(5);
/// The pause after a report of collectives that was not taken.
const REPORT_RETRY: Duration = Duration::from_secs(5);
/// Longer than any simulation.
const FOREVER: Duration = Duration::from_secs(366 * 24 * 60 * 60);
/// The most devices of all tasks together that process 0 publishes in one value.
const GLOBAL_DEVICES_MAX: u64 = 16_384;

/// The shared state of a simulated job's tasks.
pub struct ClusterShared {
    /// The story.
    pub story: Story,
    /// The connections.
    pub pool: ConnectionPool,
    /// The counts.
    pub tally: Tally,
    /// The address of the service in errors.
    pub service: String,
    /// The number of tasks that have registered at least once.
    pub registered: watch::Sender<u32>,
    /// The collectives, if the story has any.
    pub clique: Option<SimulatedClique>,
}

/// An instruction to a simulated task.
#[derive(Debug, Clone)]
pub enum TaskCommand {
    /// An action of the story.
    Act(TaskAction),
    /// The simulation ends: shut down within this time, and do not come back.
    Leave(Duration),
}

/// A simulated task.
pub struct SimulatedTask {
    task: u32,
    shared: Arc<ClusterShared>,
    commands: UnboundedReceiver<TaskCommand>,
    random: fastrand::Rng,
    /// How late it is. A slow host stays slow when its tasks start again.
    lateness: Arc<Lateness>,
    late_until: Option<Instant>,
    has_registered: bool,
}

/// The time in microseconds by which a task is late at present, which the future of its steps reads.
#[derive(Debug, Default)]
struct Lateness(AtomicU64);

impl Lateness {
    fn set(&self, by: Duration) {
        self.0.store(u64::try_from(by.as_micros()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    fn get(&self) -> Duration {
        Duration::from_micros(self.0.load(Ordering::Relaxed))
    }
}

/// How one incarnation of a task ended.
enum LifeEnd {
    /// The story killed it, or it shut down: it stays away until an event restarts it.
    Away,
    /// It registers again after this time.
    Restart(Duration),
    /// The simulation has ended.
    Leave,
}

fn end_of(lasts: Option<Duration>) -> Instant {
    Instant::now() + lasts.unwrap_or(FOREVER).min(FOREVER)
}

impl SimulatedTask {
    /// Creates a task. Its `commands` come from the cluster.
    pub fn new(task: u32, shared: Arc<ClusterShared>, commands: UnboundedReceiver<TaskCommand>) -> Self {
        // The number of the task is in the high bits, so that no two tasks have the same numbers.
        let random = fastrand::Rng::with_seed(shared.story.seed ^ (u64::from(task) << 32));
        Self {
            task,
            shared,
            commands,
            random,
            lateness: Arc::default(),
            late_until: None,
            has_registered: false,
        }
    }

    /// Runs the task until the simulation ends.
    pub async fn run(mut self) {
        let start = self.random_time(self.shared.story.workers.start_spread.0);
        let mut again = self.wait_while_away(Some(start)).await;
        while again {
            let after = match self.run_life().await {
                LifeEnd::Away => None,
                LifeEnd::Restart(after) => Some(after),
                LifeEnd::Leave => return,
            };
            again = self.wait_while_away(after).await;
        }
    }

    /// Waits until the task starts again: after this time, or when an event restarts it. Returns false if the simulation
    /// has ended.
    async fn wait_while_away(&mut self, after: Option<Duration>) -> bool {
        let mut until = end_of(after);
        loop {
            tokio::select! {
                biased;
                command = self.commands.recv() => match command {
                    None | Some(TaskCommand::Leave(_)) => return false,
                    Some(TaskCommand::Act(TaskAction::Restart { after })) => until = end_of(Some(after)),
                    Some(TaskCommand::Act(TaskAction::Kill)) => until = end_of(None),
                    Some(TaskCommand::Act(TaskAction::Late { by, lasts })) => self.become_late(by, lasts),
                    Some(TaskCommand::Act(_)) => {}
                },
                () = sleep_until(until) => return true,
            }
        }
    }

    /// Runs one incarnation.
    async fn run_life(&mut self) -> LifeEnd {
        let connection = self.shared.pool.acquire(self.task);
        let mut client = CoordinationClient::new(
            (connection.channel(), DetectedPortProtocol::default()),
            self.shared.service.clone(),
            self.task,
            clock::random_nonzero().get(),
        );
        if let Some(end) = self.register(&mut client, &connection).await {
            return end;
        }
        self.shared.tally.record_registration();
        if !std::mem::replace(&mut self.has_registered, true) {
            self.shared.registered.send_modify(|count| *count += 1);
        }
        let end = self.take_part(&client, &connection).await;
        self.shared.clique.iter().for_each(|clique| clique.leave(self.task));
        self.shared.tally.record_departure();
        end
    }

    /// Registers. Returns how this incarnation ended, if it ended before it was registered.
    async fn register(
        &mut self,
        client: &mut CoordinationClient,
        connection: &SimulatedConnection,
    ) -> Option<LifeEnd> {
        let until = Instant::now() + REGISTER_TIMEOUT;
        loop {
            let outcome = {
                let mut registering = Box::pin(client.register(REGISTER_TIMEOUT));
                loop {
                    tokio::select! {
                        biased;
                        command = self.commands.recv() => match command {
                            None | Some(TaskCommand::Leave(_)) => return Some(LifeEnd::Leave),
                            Some(TaskCommand::Act(action)) => {
                                // A slow host is slow from the first step on.
                                if let TaskAction::Late { by, lasts } = action {
                                    self.become_late(by, lasts);
                                }
                                if let Some(end) = end_by_action(&action, connection) {
                                    return Some(end);
                                }
                            }
                        },
                        outcome = &mut registering => break outcome,
                    }
                }
            };
            let (error, may_repeat) = match outcome {
                Ok(Ok(())) => return None,
                Ok(Err(error)) => (error, Instant::now() < until),
                Err(error) => (error, false),
            };
            let end = self.end_by_error(&error, connection);
            if !may_repeat || connection.is_reset() {
                return Some(end);
            }
            sleep(REGISTER_PAUSE.mul_f64(0.1 + 0.9 * self.random.f64())).await;
        }
    }

    /// Takes part in the run until this incarnation ends.
    async fn take_part(&mut self, client: &CoordinationClient, connection: &SimulatedConnection) -> LifeEnd {
        let shared = Arc::clone(&self.shared);
        let lateness = Arc::clone(&self.lateness);
        let interval = shared.story.heartbeat_interval();
        // The service counts the silence of a task from the start of the run, which is before the answer arrives.
        let first = self.random_time(interval / 2);
        let random = fastrand::Rng::with_seed(self.random.u64(..));
        let mut polls = pin!(poll_for_errors(client));
        let mut heartbeats = pin!(send_heartbeats(client, first, interval));
        let is_timed = AtomicBool::new(shared.clique.as_ref().is_some_and(SimulatedClique::is_always_timed));
        let mut steps =
            pin!(make_steps(self.task, &shared, client, connection, (&lateness, &is_timed), random));
        let mut collectives = pin!(report_collectives(self.task, &shared, connection, &is_timed));
        let mut hang_until = None;
        let mut shutdown = OptionFuture::from(None);
        let mut is_shutting_down = false;
        let mut end_after_shutdown = LifeEnd::Away;
        loop {
            let next_end = self.late_until.into_iter().chain(hang_until).min();
            let makes_steps = hang_until.is_none() && !is_shutting_down;
            let failed = tokio::select! {
                biased;
                command = self.commands.recv() => match command {
                    None => return LifeEnd::Leave,
                    Some(TaskCommand::Leave(limit)) => {
                        end_after_shutdown = LifeEnd::Leave;
                        is_shutting_down = true;
                        shutdown = Some(Box::pin(client.shutdown(limit))).into();
                        continue;
                    }
                    Some(TaskCommand::Act(TaskAction::Stop)) => {
                        is_shutting_down = true;
                        shutdown = Some(Box::pin(client.shutdown(SHUTDOWN_TIMEOUT))).into();
                        continue;
                    }
                    Some(TaskCommand::Act(TaskAction::Hang { lasts })) => {
                        hang_until = Some(end_of(lasts));
                        continue;
                    }
                    // Meanwhile the other futures are not polled, so the task makes no further call.
                    Some(TaskCommand::Act(action)) => match self.carry_out(action, client, connection).await {
                        None => continue,
                        Some(end) => return end,
                    },
                },
                // Heartbeats go on while a shutdown waits for other tasks.
                Some(outcome) = &mut shutdown => {
                    if let Err(error) = outcome {
                        self.shared.tally.record_error(self.task, &error, connection.is_reset());
                    }
                    return end_after_shutdown;
                }
                Err(error) = &mut polls => error,
                Err(error) = &mut heartbeats => error,
                Err(error) = &mut steps, if makes_steps => error,
                // A report that is not taken harms nothing.
                never = &mut collectives => match never {},
                () = sleep_until(next_end.unwrap_or_else(Instant::now)), if next_end.is_some() => {
                    hang_until = hang_until.filter(|end| *end > Instant::now());
                    self.end_lateness_if_over();
                    continue;
                }
            };
            return self.end_by_error(&failed, connection);
        }
    }

    /// Carries out an action that neither hangs nor shuts down the task. Returns how this incarnation ends, if it ends.
    async fn carry_out(
        &mut self,
        action: TaskAction,
        client: &CoordinationClient,
        connection: &SimulatedConnection,
    ) -> Option<LifeEnd> {
        match action {
            TaskAction::Late { by, lasts } => {
                self.become_late(by, lasts);
                None
            }
            TaskAction::Silence { lasts } => self.stay_silent(end_of(lasts), connection).await,
            TaskAction::HoldGpu { lasts } => {
                self.hold_gpu(lasts);
                None
            }
            TaskAction::ReportError { message } => {
                let reporting = client.report_error(Code::Internal, &message, CALL_TIMEOUT);
                if let Err(error) = Box::pin(reporting).await {
                    self.shared.tally.record_error(self.task, &error, connection.is_reset());
                }
                Some(self.end_after_failure(Duration::ZERO))
            }
            TaskAction::Kill | TaskAction::Restart { .. } | TaskAction::Hang { .. } | TaskAction::Stop => {
                end_by_action(&action, connection)
            }
        }
    }

    /// Lets the GPU of the task begin no further collective for a time.
    fn hold_gpu(&self, lasts: Option<Duration>) {
        let (shared, task) = (Arc::clone(&self.shared), self.task);
        let Some(hold) = shared.clique.as_ref().map(|clique| clique.hold_gpu(task)) else { return };
        if let Some(lasts) = lasts {
            tokio::spawn(async move {
                sleep(lasts).await;
                shared.clique.iter().for_each(|clique| clique.release_gpu(task, hold));
            });
        }
    }

    fn become_late(&mut self, by: Duration, lasts: Option<Duration>) {
        self.lateness.set(by);
        self.late_until = Some(end_of(lasts));
    }

    fn end_lateness_if_over(&mut self) {
        if self.late_until.is_some_and(|end| end <= Instant::now()) {
            self.late_until = None;
            self.lateness.set(Duration::ZERO);
        }
    }

    /// Sends nothing until `until`. Returns how this incarnation ends, if an event ends it meanwhile.
    async fn stay_silent(&mut self, mut until: Instant, connection: &SimulatedConnection) -> Option<LifeEnd> {
        loop {
            tokio::select! {
                biased;
                command = self.commands.recv() => match command {
                    None | Some(TaskCommand::Leave(_)) => return Some(LifeEnd::Leave),
                    Some(TaskCommand::Act(TaskAction::Silence { lasts })) => until = until.max(end_of(lasts)),
                    Some(TaskCommand::Act(TaskAction::Late { by, lasts })) => self.become_late(by, lasts),
                    Some(TaskCommand::Act(action)) => {
                        // A silent process can be killed, and does nothing else.
                        if action.resets_connection() {
                            return end_by_action(&action, connection);
                        }
                    }
                },
                () = sleep_until(until) => return None,
            }
        }
    }

    /// Records the error that ended a call, and returns how this incarnation ends by it.
    fn end_by_error(&self, error: &AgentError, connection: &SimulatedConnection) -> LifeEnd {
        self.shared.tally.record_error(self.task, error, connection.is_reset());
        if connection.is_reset() {
            // The story has killed this task too, and the command is on its way.
            return LifeEnd::Away;
        }
        let is_excluded = error.grpc_code() == Some(Code::PermissionDenied);
        self.end_after_failure(if is_excluded { EXCLUDED_PAUSE } else { Duration::ZERO })
    }

    /// Returns how this incarnation ends after a failure: a supervisor may start the task again.
    fn end_after_failure(&self, pause: Duration) -> LifeEnd {
        match self.shared.story.workers.restart_delay {
            Some(delay) => LifeEnd::Restart(delay.0.max(pause)),
            None => LifeEnd::Away,
        }
    }

    fn random_time(&mut self, most: Duration) -> Duration {
        most.mul_f64(self.random.f64())
    }
}

/// Returns how an incarnation ends by an action, if the action ends it at once.
fn end_by_action(action: &TaskAction, connection: &SimulatedConnection) -> Option<LifeEnd> {
    if action.resets_connection() {
        connection.reset();
    }
    match action {
        TaskAction::Kill | TaskAction::Stop => Some(LifeEnd::Away),
        TaskAction::Restart { after } => Some(LifeEnd::Restart(*after)),
        _ => None,
    }
}

/// Waits for an error of the run.
async fn poll_for_errors(client: &CoordinationClient) -> Result<Infallible, AgentError> {
    Box::pin(client.poll_for_error()).await?;
    // The service delivers errors with heartbeats, and the client polls no more.
    std::future::pending().await
}

/// Sends heartbeats until one of them fails.
async fn send_heartbeats(
    client: &CoordinationClient,
    first: Duration,
    interval: Duration,
) -> Result<Infallible, AgentError> {
    let mut next = Instant::now() + first;
    loop {
        sleep_until(next).await;
        // The time of a slow call is part of the interval, and heartbeats that a silence has missed are not made up for.
        next = Instant::now() + interval;
        Box::pin(client.heartbeat(interval.max(CALL_TIMEOUT))).await?;
    }
}

/// Publishes what a JAX process publishes, and makes steps until an error ends the incarnation.
async fn make_steps(
    task: u32,
    shared: &ClusterShared,
    client: &CoordinationClient,
    connection: &SimulatedConnection,
    (lateness, is_timed): (&Lateness, &AtomicBool),
    mut random: fastrand::Rng,
) -> Result<Infallible, AgentError> {
    // All tasks have registered at the same moment, and a real cluster publishes over some time.
    sleep(shared.story.workers.start_spread.0.mul_f64(random.f64())).await;
    Box::pin(publish(task, shared, client)).await?;
    let steps = &shared.story.steps;
    let (limit, own_limit) = (steps.timeout.0, steps.timeout.0 + CALL_TIMEOUT);
    let mut counter = -1;
    loop {
        sleep(steps.time.0 + steps.spread.0.mul_f64(random.f64()) + lateness.get()).await;
        let arriving = client.barrier(STEP_BARRIER, &[], &mut counter, limit, own_limit);
        match Box::pin(arriving).await {
            Ok(()) => {
                shared.tally.record_step(client.service_incarnation(), counter);
                if let Some(clique) = &shared.clique {
                    clique.run_step(task, counter, is_timed.load(Ordering::Relaxed)).await;
                }
            }
            // A failed barrier is an exception in a JAX program. This program goes on with the next step.
            Err(error @ AgentError::Refused { .. }) if error.grpc_code() != Some(Code::PermissionDenied) => {
                shared.tally.record_error(task, &error, connection.is_reset());
            }
            Err(error) => return Err(error),
        }
    }
}

/// Reports the collectives of a task, as NCCL's profiler plug-in does.
async fn report_collectives(
    task: u32,
    shared: &ClusterShared,
    connection: &SimulatedConnection,
    is_timed: &AtomicBool,
) -> Infallible {
    let Some(clique) = &shared.clique else { return std::future::pending().await };
    let (process, mut sequence, mut wanted) = (clock::random_u64(), 0, Vec::new());
    loop {
        sequence += 1;
        let report = pb::CollectivesReport {
            process,
            sequence,
            pid: task + 1,
            host: host_name(shared.story.layout().host_of_task(task)),
            task: Some(task),
            timing: is_timed.load(Ordering::Relaxed),
            communicators_not_recorded: 0,
            communicators: clique.describe(task, shared.story.hosts, &wanted).into_iter().collect(),
            // No NCCL runs here.
            ras: None,
        };
        let mut client = CollectivesClient::new(connection.channel());
        let pause = match timeout(CALL_TIMEOUT, Box::pin(client.report(report))).await {
            Ok(Ok(answer)) => {
                let answer = answer.into_inner();
                is_timed.store(answer.timing || clique.is_always_timed(), Ordering::Relaxed);
                wanted = answer.wanted;
                asked_report_interval(answer.interval_ms)
            }
            _ => REPORT_RETRY,
        };
        sleep(pause).await;
    }
}

/// Publishes the identity of the host and the devices. A task that has started again finds its devices published.
async fn publish(task: u32, shared: &ClusterShared, client: &CoordinationClient) -> Result<(), AgentError> {
    let story = &shared.story;
    let layout = story.layout();
    let host = layout.host_of_task(task);
    if story.workers.identities
        && let Ok(identity) = ProcessIdentity::new(&host_name(host), layout.local_number(task))
    {
        client
            .insert(&ProcessIdentity::store_key(task), identity.to_store_value(), true, CALL_TIMEOUT)
            .await?;
    }
    if !story.workers.topology {
        return Ok(());
    }
    let devices = story.devices_per_task;
    let local = topology::encode_local_topology(task, devices, &boot_id(host));
    insert_if_absent(client, &topology::store_key(task), local).await?;
    if task == 0 && u64::from(story.tasks) * u64::from(devices) <= GLOBAL_DEVICES_MAX {
        let hosts = (0..story.tasks).map(|task| (task, layout.host_of_task(task)));
        let global =
            topology::encode_global_topology(hosts.map(|(task, host)| (task, devices, boot_id(host), host)));
        insert_if_absent(client, GLOBAL_TOPOLOGY_KEY, global).await?;
    }
    Ok(())
}

async fn insert_if_absent(client: &CoordinationClient, key: &str, value: Vec<u8>) -> Result<(), AgentError> {
    match client.insert(key, value, false, CALL_TIMEOUT).await {
        Err(AgentError::Refused { code: Code::AlreadyExists, .. }) => Ok(()),
        inserted => inserted,
    }
}
