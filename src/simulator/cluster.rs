//! Runs all tasks of a simulated job, and tells them at the times of the schedule what to do.
//!
//! `task.rs` runs one task. Begin at [`SimulatedCluster::start`], then `next_action`.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until, timeout, timeout_at};

use super::clique::SimulatedClique;
use super::connection::{ConnectionPool, SimulatedTarget};
use super::layout::{ClusterLayout, ConnectionPlan};
use super::schedule::{Schedule, ScheduledAction};
use super::story::{Story, StoryError};
use super::tally::{SimulationSummary, Tally};
use super::task::{ClusterShared, SimulatedTask, TaskCommand};
use crate::agent::{AgentError, CoordinationClient, DetectedPortProtocol};

/// The most tasks that share a connection: each has up to three calls at a time, and the service limits the streams of
/// a connection to 16,384.
const TASKS_OF_CONNECTION_MAX: u32 = 4000;

/// Why a simulation cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum SimulationError {
    /// Not all tasks have registered in time.
    #[error("{registered} of {tasks} tasks have registered within {} s{}", within.as_secs(), first_error(errors))]
    NotRegistered {
        /// The number of tasks that have registered.
        registered: u32,
        /// The number of tasks.
        tasks: u32,
        /// The limit.
        within: Duration,
        /// The first errors of tasks.
        errors: Vec<String>,
    },
}

fn first_error(errors: &[String]) -> String {
    errors.first().map_or_else(String::new, |error| format!("; the first error: {error}"))
}

/// Plans the connections of a story. By default each host has one.
///
/// # Errors
/// If `shared` connections are too few or too many.
pub fn plan_connections(story: &Story, shared: Option<u32>) -> Result<ConnectionPlan, StoryError> {
    let least = story.tasks.div_ceil(TASKS_OF_CONNECTION_MAX);
    let given = shared.unwrap_or_else(|| story.hosts.max(least));
    if !(least..=story.tasks).contains(&given) {
        return Err(StoryError::Connections { given, tasks: story.tasks, least });
    }
    let schedule = Schedule::new(story);
    Ok(ConnectionPlan::new(story.tasks, given, schedule.tasks_killed_together()))
}

/// Checks by one call that the service answers at `target`.
///
/// # Errors
/// If there is no connection, or the service refuses the call.
pub async fn check_service(target: &SimulatedTarget, within: Duration) -> Result<(), AgentError> {
    let layout = ClusterLayout { tasks: 1, hosts: 1 };
    let pool = ConnectionPool::new(target.clone(), layout, ConnectionPlan::new(1, 1, []));
    let connection = (pool.acquire(0).channel(), DetectedPortProtocol::default());
    let client = CoordinationClient::new(connection, target.address.to_string(), 0, 0);
    client.get_task_states_without_registration(within).await.map(|_| ())
}

/// The running tasks of a simulated job.
pub struct SimulatedCluster {
    shared: Arc<ClusterShared>,
    schedule: Schedule,
    commands: Vec<UnboundedSender<TaskCommand>>,
    running: JoinSet<()>,
    /// The time at which all tasks had registered.
    started: Option<Instant>,
}

impl SimulatedCluster {
    /// Starts the tasks of a story that has been checked.
    #[must_use]
    pub fn start(story: Story, target: SimulatedTarget, plan: ConnectionPlan) -> Self {
        let schedule = Schedule::new(&story);
        let shared = Arc::new(ClusterShared {
            service: target.address.to_string(),
            pool: ConnectionPool::new(target, story.layout(), plan),
            tally: Tally::new(story.tasks, story.job.recoverable),
            registered: watch::Sender::new(0),
            clique: story.collectives.clone().map(|settings| SimulatedClique::new(story.tasks, settings)),
            story,
        });
        let mut running = JoinSet::new();
        let commands = (0..shared.story.tasks).map(|task| {
            let (sender, receiver) = unbounded_channel();
            running.spawn(SimulatedTask::new(task, Arc::clone(&shared), receiver).run());
            sender
        });
        let commands = commands.collect();
        Self { commands, running, schedule, started: None, shared }
    }

    /// Waits until all tasks have registered. The times of the story count from then on.
    ///
    /// # Errors
    /// If this takes longer than `limit`.
    pub async fn wait_until_registered(&mut self, limit: Duration) -> Result<(), SimulationError> {
        let tasks = self.shared.story.tasks;
        let mut registered = self.shared.registered.subscribe();
        let all = timeout(limit, registered.wait_for(|count| *count == tasks)).await;
        match all {
            Ok(Ok(_)) => {
                self.started = Some(Instant::now());
                Ok(())
            }
            _ => Err(SimulationError::NotRegistered {
                registered: *self.shared.registered.borrow(),
                tasks,
                within: limit,
                errors: self.shared.tally.summary().unexpected,
            }),
        }
    }

    /// Returns the time since all tasks had registered.
    #[must_use]
    pub fn elapsed(&self) -> Duration {
        self.started.map_or(Duration::ZERO, |started| started.elapsed())
    }

    /// Waits for the next action of the story, begins it, and returns it. Returns `None` at the end of the story; a story
    /// without a length has no end.
    pub async fn next_action(&mut self) -> Option<ScheduledAction> {
        let started = self.started.unwrap_or_else(Instant::now);
        let length = self.shared.story.length.map(|length| length.0);
        let next = self.schedule.next_at().filter(|next| length.is_none_or(|length| *next < length));
        match (next, length) {
            (Some(next), _) => sleep_until(started + next).await,
            (None, Some(length)) => {
                sleep_until(started + length).await;
                return None;
            }
            (None, None) => std::future::pending().await,
        }
        let action = self.schedule.next()?;
        self.shared.tally.record_action(&action);
        for task in action.tasks.iter() {
            // A task takes commands for as long as the simulation runs.
            let _ = self.commands[*task as usize].send(TaskCommand::Act(action.action.clone()));
        }
        Some(action)
    }

    /// Returns the counts so far.
    #[must_use]
    pub fn summary(&self) -> SimulationSummary {
        self.shared.tally.summary()
    }

    /// Shuts all tasks down, and waits for this at most for `limit`. Then it closes the connections.
    pub async fn end(mut self, limit: Duration) {
        self.shared.tally.record_end();
        for task in &self.commands {
            // A task that has panicked takes no command.
            let _ = task.send(TaskCommand::Leave(limit));
        }
        let until = Instant::now() + limit;
        while let Ok(Some(_)) = timeout_at(until, self.running.join_next()).await {}
        self.running.shutdown().await;
    }
}
