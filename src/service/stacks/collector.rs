//! The latest request for stacks of each job, its answers, and the tasks that can answer.
//!
//! While the collector holds its own lock, it asks the driver for the present incarnation of a task. So an answer of an
//! ended incarnation is never accepted after the next incarnation was asked. `stack_groups.rs` stores the stacks. Begin at
//! [`StackCollector::ask`], [`StackCollector::poll`] and [`StackCollector::accept_helper_answer`].

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use utoipa::ToSchema;

use super::answer::{NewStackAnswer, StackSource, ThreadStack, check_threads};
use super::refusals::{StackAnswerRefusal, StackRequestRefusal};
use super::stack_groups::StackGroups;
use super::task_ranges::TaskRanges;
use super::{
    ALL_BYTES_MAX, AUTOMATIC_AFTER_OPERATOR, AUTOMATIC_INTERVAL, JOB_BYTES_MAX, OPEN_FOR, REQUEST_INTERVAL,
};
use crate::clock::random_bytes;
use crate::coordination::{
    Actor, ActorOrigin, CommandReason, JobId, RunNumber, TaskId, TaskIncarnation, TaskIncarnations, Timestamp,
};
use crate::engine::Engine;

/// The number of polls a second that all helpers together should make if they do not wait at the server.
const POLLS_PER_SECOND: usize = 250;
/// The bounds of the pause between two polls of one helper.
const POLL_PAUSE: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(60));
/// The number of answers a second at which a request spreads the answers of many tasks.
const ANSWERS_PER_SECOND: usize = 200;

/// A request for stacks.
#[derive(Debug, Clone)]
pub struct NewStackRequest {
    /// The author; a rule for automatic requests.
    pub actor: Actor,
    /// The reason.
    pub reason: CommandReason,
    /// The tasks; `None` for all.
    pub tasks: Option<TaskRanges>,
}

/// The poll of a helper, which asks whether its task is asked.
#[derive(Debug, Clone, Copy)]
pub struct HelperPoll {
    /// The task.
    pub task: TaskId,
    /// The last request that the helper has dealt with; 0 for none.
    pub after: u64,
}

/// A request as it is handed out to a helper.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HandedRequest {
    /// The number of the request.
    pub number: u64,
    /// The ticket with which the task answers.
    pub ticket: String,
    /// The helper reads the stacks at once, and sends them after a random part of this time.
    pub spread_ms: u32,
}

/// The answer to a helper that waits for a request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = StackWait)]
pub struct StackWaitView {
    /// The request, if the task is asked.
    pub request: Option<HandedRequest>,
    /// The number of the latest request of the job; 0 for none.
    pub latest: u64,
    /// The helper asks again after this time.
    pub retry_ms: u32,
}

/// A process of a task that can answer.
#[derive(Debug, Clone, Copy)]
pub(super) struct KnownSource {
    /// The connected incarnation of the task when the process was heard last.
    incarnation: Option<TaskIncarnation>,
}

impl KnownSource {
    /// Returns whether the process may be that of the present incarnation. A helper may be loaded before its task has
    /// registered.
    pub fn is_present(self, present: Option<TaskIncarnation>) -> bool {
        self.incarnation.is_none() || self.incarnation == present
    }
}

/// A request that was handed out to a helper.
#[derive(Debug)]
struct HandedOut {
    ticket: u64,
    incarnation: Option<TaskIncarnation>,
}

/// The kept part of an answer, beside its stacks.
#[derive(Debug, Clone, Copy)]
pub(super) struct AcceptedAnswer {
    /// The process that answered.
    pub process: KnownSource,
    /// The number of threads that it left out.
    pub threads_left_out: u32,
}

/// The latest request of a job, with its answers.
#[derive(Debug)]
pub(super) struct StackRequest {
    pub number: u64,
    pub at: Timestamp,
    pub run: RunNumber,
    pub by: NewStackRequest,
    /// The number of tasks of the job at the time of the request.
    pub job_tasks: usize,
    pub stacks: StackGroups,
    /// The tasks that have answered.
    pub answered: BTreeMap<(TaskId, StackSource), AcceptedAnswer>,
    /// The number of answers that were dropped for lack of memory.
    pub dropped: u64,
    handed_out: BTreeMap<TaskId, HandedOut>,
}

impl StackRequest {
    /// Returns whether the request asks a task.
    pub fn asks(&self, task: TaskId) -> bool {
        self.by.tasks.as_ref().is_none_or(|tasks| tasks.contains(task))
    }

    /// Returns whether the request is handed out and answered in this run.
    pub fn is_open(&self, run: RunNumber, now: Timestamp) -> bool {
        self.run == run && now < self.at.after(OPEN_FOR)
    }

    /// Returns whether the stacks of a task from a source are those of its present process. They are not if the task has
    /// restarted since, or its connection has ended.
    pub fn is_of_present_process(
        &self,
        task: TaskId,
        source: StackSource,
        roster: &TaskIncarnations,
    ) -> bool {
        let answer = self.answered.get(&(task, source));
        answer.is_some_and(|answer| answer.process.is_present(roster.incarnation_of(task)))
    }

    /// Returns whether a task has yet to answer from a source.
    fn awaits(&self, task: TaskId, source: StackSource) -> bool {
        self.asks(task) && !self.answered.contains_key(&(task, source))
    }

    /// Returns the number of tasks that the request asks.
    pub fn task_count(&self) -> usize {
        let ranges = self.by.tasks.as_ref().map(|tasks| super::TaskRange::count(tasks.ranges()));
        ranges.unwrap_or(self.job_tasks)
    }

    fn is_automatic(&self) -> bool {
        self.by.actor.means == ActorOrigin::Rule
    }
}

/// The counters of a job.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct StackCounts {
    /// Requests by operators, and automatic ones.
    pub requests: [u64; 2],
    pub accepted: u64,
    pub refused: u64,
}

/// The requests of one job.
#[derive(Debug)]
pub(super) struct JobStacks {
    /// The number of the latest request, for helpers that wait.
    latest: watch::Sender<u64>,
    pub request: Option<StackRequest>,
    pub sources: BTreeMap<(TaskId, StackSource), KnownSource>,
    automatic_at: Option<Timestamp>,
    pub counts: StackCounts,
}

impl Default for JobStacks {
    fn default() -> Self {
        Self {
            latest: watch::Sender::new(0),
            request: None,
            sources: BTreeMap::new(),
            automatic_at: None,
            counts: StackCounts::default(),
        }
    }
}

impl JobStacks {
    fn bytes(&self) -> usize {
        self.request.as_ref().map_or(0, |request| request.stacks.bytes())
    }

    /// Returns the time for which a request must still wait.
    fn refused_for(&self, automatic: bool, now: Timestamp) -> Option<Duration> {
        let last = self.request.as_ref().map(|request| (request.at, request.is_automatic()));
        let within = |at: Timestamp, interval: Duration| (now.since(at) < interval).then_some(interval);
        if automatic {
            let by_operator = last.filter(|(_, automatic)| !automatic);
            let own = self.automatic_at.and_then(|at| within(at, AUTOMATIC_INTERVAL));
            return own.or_else(|| by_operator.and_then(|(at, _)| within(at, AUTOMATIC_AFTER_OPERATOR)));
        }
        // An operator need not wait for a rule.
        last.filter(|(_, automatic)| !automatic).and_then(|(at, _)| within(at, REQUEST_INTERVAL))
    }
}

/// The state of a task in the present run.
#[derive(Debug, Clone, Copy)]
struct TaskLife {
    run: RunNumber,
    incarnation: Option<TaskIncarnation>,
}

/// Returns the state of a task; `None` if the job does not exist, and `Some(None)` if the task does not.
fn task_life(engine: &Engine, job: JobId, task: TaskId) -> Option<Option<TaskLife>> {
    engine.read_under_lock(|core| {
        let job = core.job(job)?;
        let life = job.current_incarnation(task);
        let exists = usize::try_from(task.0).is_ok_and(|task| task < life.tasks);
        Some(exists.then_some(TaskLife { run: life.run, incarnation: life.incarnation }))
    })
}

/// The requests for stacks of all jobs, with their answers.
#[derive(Debug, Default)]
pub struct StackCollector {
    jobs: Mutex<BTreeMap<JobId, JobStacks>>,
    /// The number of tasks that can answer, over all jobs.
    sources: AtomicU64,
}

impl StackCollector {
    pub(super) fn lock_jobs(&self) -> MutexGuard<'_, BTreeMap<JobId, JobStacks>> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Requests the stacks of tasks. Returns the number of the request: `number_min`, or the one after the last request of the
    /// job if that is more. The answers to the former request are dropped.
    ///
    /// Helpers answer only a request whose number is above the last one that they answered, perhaps to a server that ended since.
    /// So `number_min` must grow from server to server.
    ///
    /// # Errors
    /// If the job or a task does not exist, or the last request was too short a time ago.
    pub fn ask(
        &self,
        engine: &Engine,
        job: JobId,
        request: NewStackRequest,
        number_min: u64,
    ) -> Result<u64, StackRequestRefusal> {
        let mut jobs = self.lock_jobs();
        let life = engine.read_under_lock(|core| core.job(job).map(|job| job.current_incarnation(TaskId(0))));
        let life = life.ok_or(StackRequestRefusal::NoSuchJob)?;
        if let Some(tasks) = &request.tasks
            && usize::try_from(tasks.last().0).is_ok_and(|last| last >= life.tasks)
        {
            return Err(StackRequestRefusal::NoSuchTask { task: tasks.last(), tasks: life.tasks });
        }
        let of_job = jobs.entry(job).or_default();
        let (now, automatic) = (engine.clock().now(), request.actor.means == ActorOrigin::Rule);
        if let Some(interval) = of_job.refused_for(automatic, now) {
            return Err(StackRequestRefusal::TooSoon(interval));
        }
        let number = (*of_job.latest.borrow() + 1).max(number_min);
        of_job.counts.requests[usize::from(automatic)] += 1;
        if automatic {
            of_job.automatic_at = Some(now);
        }
        of_job.request = Some(StackRequest {
            number,
            at: now,
            run: life.run,
            by: request,
            job_tasks: life.tasks,
            stacks: StackGroups::default(),
            answered: BTreeMap::new(),
            dropped: 0,
            handed_out: BTreeMap::new(),
        });
        of_job.latest.send_replace(number);
        Ok(number)
    }

    /// Returns a receiver that changes with every request of a job, and closes when the job is deleted.
    ///
    /// # Errors
    /// If the job does not exist.
    pub fn subscribe(&self, engine: &Engine, job: JobId) -> Result<watch::Receiver<u64>, StackAnswerRefusal> {
        let mut jobs = self.lock_jobs();
        if !engine.read_under_lock(|core| core.job(job).is_some()) {
            return Err(StackAnswerRefusal::NoSuchJob);
        }
        Ok(jobs.entry(job).or_default().latest.subscribe())
    }

    /// Records that a helper can answer for its task, and hands out the request if the task is asked. A helper that asks
    /// again gets a new ticket, so of two processes of a task the one that asked last answers.
    ///
    /// # Errors
    /// If the job or the task does not exist.
    pub fn poll(
        &self,
        engine: &Engine,
        job: JobId,
        poll: HelperPoll,
    ) -> Result<StackWaitView, StackAnswerRefusal> {
        let mut jobs = self.lock_jobs();
        let life = task_life(engine, job, poll.task).ok_or(StackAnswerRefusal::NoSuchJob)?;
        let life = life.ok_or(StackAnswerRefusal::NoSuchTask(poll.task))?;
        let of_job = jobs.entry(job).or_default();
        self.record_source(of_job, (poll.task, StackSource::Python), life.incarnation);
        let latest = *of_job.latest.borrow();
        // The numbers begin anew after a restart of a server that keeps no audit.
        let after = if poll.after > latest { 0 } else { poll.after };
        let now = engine.clock().now();
        let request = of_job.request.as_mut().filter(|request| {
            request.number > after
                && request.is_open(life.run, now)
                && request.awaits(poll.task, StackSource::Python)
        });
        let handed = request.map(|request| {
            let ticket = u64::from_le_bytes(random_bytes());
            let spread = request.task_count() * 1000 / ANSWERS_PER_SECOND;
            request.handed_out.insert(poll.task, HandedOut { ticket, incarnation: life.incarnation });
            HandedRequest {
                number: request.number,
                ticket: format!("{ticket:016x}"),
                // A few tasks answer at once.
                spread_ms: if spread < 500 {
                    0
                } else {
                    u32::try_from(spread).unwrap_or(u32::MAX).min(30_000)
                },
            }
        });
        Ok(StackWaitView { request: handed, latest, retry_ms: 0 })
    }

    /// Returns the pause after which a helper that could not wait at the server asks again.
    #[must_use]
    pub fn poll_pause(&self) -> Duration {
        let sources = usize::try_from(self.sources.load(Ordering::Relaxed)).unwrap_or(usize::MAX);
        Duration::from_millis((sources.saturating_mul(1000) / POLLS_PER_SECOND) as u64)
            .clamp(POLL_PAUSE.0, POLL_PAUSE.1)
    }

    fn record_source(
        &self,
        of_job: &mut JobStacks,
        source: (TaskId, StackSource),
        incarnation: Option<TaskIncarnation>,
    ) {
        if of_job.sources.insert(source, KnownSource { incarnation }).is_none() {
            self.sources.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Records that the worker of a task can answer. Returns the number of the request that it has yet to answer; 0 for
    /// none.
    #[must_use]
    pub fn request_for_worker(
        &self,
        engine: &Engine,
        job: JobId,
        task: TaskId,
        incarnation: TaskIncarnation,
    ) -> u64 {
        let mut jobs = self.lock_jobs();
        let Some(Some(life)) = task_life(engine, job, task) else { return 0 };
        if life.incarnation != Some(incarnation) {
            return 0;
        }
        let of_job = jobs.entry(job).or_default();
        self.record_source(of_job, (task, StackSource::Worker), life.incarnation);
        let now = engine.clock().now();
        let request = of_job
            .request
            .as_ref()
            .filter(|request| request.is_open(life.run, now) && request.awaits(task, StackSource::Worker));
        request.map_or(0, |request| request.number)
    }

    /// Accepts the answer of a helper.
    ///
    /// # Errors
    /// If the task was not asked, or not with this ticket; if it has answered; if the answer is invalid, or there is no
    /// memory for it.
    pub fn accept_helper_answer(
        &self,
        engine: &Engine,
        job: JobId,
        answer: NewStackAnswer,
    ) -> Result<(), StackAnswerRefusal> {
        let NewStackAnswer { request, task, ticket, threads, threads_left_out } = answer;
        self.accept(
            engine,
            job,
            (request, task, StackSource::Python),
            (threads, threads_left_out),
            |asked, life| {
                let Some(handed) = asked.handed_out.get(&task) else {
                    return Err(StackAnswerRefusal::WrongTicket { request, task });
                };
                if u64::from_str_radix(&ticket, 16) != Ok(handed.ticket) {
                    return Err(StackAnswerRefusal::WrongTicket { request, task });
                }
                // A task may have registered since.
                if handed.incarnation.is_some() && handed.incarnation != life.incarnation {
                    return Err(StackAnswerRefusal::StaleIncarnation(task));
                }
                Ok(())
            },
        )
    }

    /// Accepts the answer of a worker.
    ///
    /// # Errors
    /// If the task was not asked, or has answered; if this is not its present incarnation; if the answer is invalid, or
    /// there is no memory for it.
    pub fn accept_worker_answer(
        &self,
        engine: &Engine,
        job: JobId,
        (request, task, incarnation): (u64, TaskId, TaskIncarnation),
        threads: Vec<ThreadStack>,
    ) -> Result<(), StackAnswerRefusal> {
        self.accept(engine, job, (request, task, StackSource::Worker), (threads, 0), |_, life| {
            if life.incarnation == Some(incarnation) {
                Ok(())
            } else {
                Err(StackAnswerRefusal::StaleIncarnation(task))
            }
        })
    }

    fn accept(
        &self,
        engine: &Engine,
        job: JobId,
        (number, task, source): (u64, TaskId, StackSource),
        (threads, left_out): (Vec<ThreadStack>, u32),
        authorize: impl FnOnce(&StackRequest, TaskLife) -> Result<(), StackAnswerRefusal>,
    ) -> Result<(), StackAnswerRefusal> {
        // Checked without the lock, because it copies texts.
        let threads = check_threads(threads);
        let mut jobs = self.lock_jobs();
        let life = task_life(engine, job, task).ok_or(StackAnswerRefusal::NoSuchJob)?;
        let others: usize = jobs.iter().filter(|(other, _)| **other != job).map(|(_, it)| it.bytes()).sum();
        let of_job = jobs.entry(job).or_default();
        let now = engine.clock().now();
        let accepted = life.ok_or(StackAnswerRefusal::NoSuchTask(task)).and_then(|life| {
            let request = of_job.request.as_mut().filter(|request| request.number == number);
            let request = request.ok_or(StackAnswerRefusal::NoSuchRequest(number))?;
            if !request.asks(task) {
                return Err(StackAnswerRefusal::NotAsked { request: number, task });
            }
            if !request.awaits(task, source) {
                return Err(StackAnswerRefusal::AlreadyAnswered { request: number, task });
            }
            if !request.is_open(life.run, now) {
                return Err(StackAnswerRefusal::Over(number));
            }
            authorize(request, life)?;
            let threads = threads?;
            let process = KnownSource { incarnation: life.incarnation };
            let answer = AcceptedAnswer { process, threads_left_out: left_out };
            if !request.stacks.add(task, source, threads, now, JOB_BYTES_MAX) {
                request.dropped += 1;
                // The task is not asked again: its answer would have no room either.
                request.answered.insert((task, source), answer);
                return Err(StackAnswerRefusal::NoRoom);
            }
            request.answered.insert((task, source), answer);
            Ok(others + request.stacks.bytes())
        });
        match &accepted {
            Ok(_) => of_job.counts.accepted += 1,
            Err(_) => of_job.counts.refused += 1,
        }
        let bytes = accepted?;
        if bytes > ALL_BYTES_MAX {
            drop_oldest_stacks_of_others(&mut jobs, job, bytes);
        }
        Ok(())
    }

    /// Drops the requests of deleted jobs. Helpers that wait for them learn that the job is gone.
    pub fn retain_jobs(&self, exists: impl Fn(JobId) -> bool) {
        let mut jobs = self.lock_jobs();
        jobs.retain(|job, _| exists(*job));
        let sources: usize = jobs.values().map(|of_job| of_job.sources.len()).sum();
        self.sources.store(sources as u64, Ordering::Relaxed);
    }

    /// Returns the counters of a job, and the number of tasks whose helper or worker is known.
    pub(super) fn counts_and_source_count(&self, job: JobId) -> (StackCounts, usize) {
        let jobs = self.lock_jobs();
        let Some(of_job) = jobs.get(&job) else { return (StackCounts::default(), 0) };
        let mut tasks: Vec<TaskId> = of_job.sources.keys().map(|(task, _)| *task).collect();
        tasks.dedup();
        (of_job.counts, tasks.len())
    }

    /// Returns whether a helper or a worker of a job has been heard.
    #[must_use]
    pub fn knows_sources(&self, job: JobId) -> bool {
        self.lock_jobs().get(&job).is_some_and(|of_job| !of_job.sources.is_empty())
    }

    /// Returns the memory of all stacks, in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.lock_jobs().values().map(JobStacks::bytes).sum()
    }
}

/// Drops the stacks of the oldest requests of other jobs, until all stacks have room.
fn drop_oldest_stacks_of_others(jobs: &mut BTreeMap<JobId, JobStacks>, job: JobId, mut bytes: usize) {
    while bytes > ALL_BYTES_MAX {
        let others = jobs.iter_mut().filter(|(other, it)| **other != job && it.bytes() > 0);
        let oldest = others.filter_map(|(_, it)| it.request.as_mut()).min_by_key(|request| request.at);
        let Some(oldest) = oldest else { return };
        bytes -= oldest.stacks.bytes();
        // Answers that had no room are counted already, and are among these.
        oldest.dropped = oldest.answered.len() as u64;
        oldest.stacks = StackGroups::default();
    }
}
