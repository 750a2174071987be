//! Controls the demo. In each round, all workers run; then the demo kills one of them and starts it again. Meanwhile
//! an operator may exclude workers or drain the job.
//!
//! `workers.rs` starts the processes, and `record.rs` checks the steps of the workers. Begin at [`Demo::run_rounds`].

use std::collections::BTreeSet;
use std::process::ExitStatus;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use rustix::process::Signal;
use tokio::time::{Instant, sleep_until, timeout_at};

use super::super::worker::{CANCELLED_TEXT, StepLine, parse_step_line};
use super::demo_output::DemoOutput;
use super::record::DemoRecord;
use super::service::{ServiceKilled, ServiceKiller};
use super::workers::{TaskWorkerEvent, WORKERS, Worker, WorkerEvent, WorkerProcesses};

/// The time for which all workers run before one is killed, and for which the others then run without it.
const STEADY_TIME: Duration = Duration::from_secs(4);
const ABSENCE_TIME: Duration = Duration::from_secs(3);
/// The timeout for anything that should take a moment: the machine may be busy.
const STEP_TIMEOUT: Duration = Duration::from_secs(60);
/// The interval at which exclusions are checked.
const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// The time that workers have to leave.
const EXIT_TIMEOUT: Duration = Duration::from_secs(20);

/// The end of a round of loss and return.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RoundEnd {
    /// All workers take part again.
    Whole,
    /// The run is drained.
    Drained,
}

/// A function that returns the number of the drained run, if one is drained.
pub type DrainedRunLookup = Box<dyn Fn() -> Option<u64>>;

/// A demo that is played.
pub struct Demo {
    workers: WorkerProcesses,
    /// Returns whether an operator excludes a worker.
    excluded: Box<dyn Fn(u32) -> bool>,
    /// Returns the present run, if an operator drains it: then all workers end at one step.
    drained: DrainedRunLookup,
    /// The killer of the service; `None`: it lives in this process.
    killer: Option<ServiceKiller>,
    /// The last run that ended by a drain.
    drained_last: Option<u64>,
    /// Workers have ended because of a drain, and the others will follow.
    leaving: bool,
    /// The excluded workers.
    pub out: BTreeSet<u32>,
    /// The number of runs after the first.
    runs: u64,
    ending: bool,
    /// The time at which the demo ends.
    end: Option<Instant>,
    pub record: DemoRecord,
    output: DemoOutput,
}

impl Demo {
    pub fn new(
        workers: WorkerProcesses,
        excluded: Box<dyn Fn(u32) -> bool>,
        drained: DrainedRunLookup,
        killer: Option<ServiceKiller>,
        output: DemoOutput,
    ) -> Self {
        Self {
            workers,
            excluded,
            drained,
            killer,
            drained_last: None,
            leaving: false,
            out: BTreeSet::new(),
            runs: 0,
            ending: false,
            end: None,
            record: DemoRecord::default(),
            output,
        }
    }

    /// Runs rounds of work, loss and return.
    pub async fn run_rounds(&mut self, length: Option<Duration>) -> Result<()> {
        self.end = length.map(|length| Instant::now() + length);
        for task in 0..WORKERS {
            self.workers.start_worker(task)?;
        }
        let all: Vec<u32> = (0..WORKERS).collect();
        let mut together = false;
        for victim in (0..WORKERS).cycle().skip(2) {
            let run = self.runs;
            if !together && !self.is_run_drained(run) {
                together = self.wait_for_step_completed_by(&all).await?.is_some();
                if together {
                    self.output.say(&format!("all {WORKERS} workers step together"))?;
                }
            }
            if self.is_time_over() {
                break;
            }
            if together && !self.kill_service(&all).await? {
                together = false;
                continue;
            }
            let lost = self.run_loss_round(victim, &all).await?;
            if lost == RoundEnd::Drained {
                self.wait_for_run_after(run).await?;
            }
            together = lost == RoundEnd::Whole;
        }
        match self.end {
            Some(end) => self.handle_events_during(end.saturating_duration_since(Instant::now())).await,
            None => Ok(()),
        }
    }

    /// Runs one round: all workers step, one is killed, and it returns. A drain may end the round at any
    /// time; then the killed worker is not started again, because all workers end and the next run starts all
    /// of them.
    async fn run_loss_round(&mut self, victim: u32, all: &[u32]) -> Result<RoundEnd> {
        let run = self.runs;
        self.handle_events_during(STEADY_TIME).await?;
        if self.is_run_drained(run) {
            return Ok(RoundEnd::Drained);
        }
        if !self.kill_worker(victim)? {
            return Ok(RoundEnd::Whole);
        }
        let others: Vec<u32> = all.iter().copied().filter(|task| *task != victim).collect();
        self.wait_for_step_completed_by(&others).await?;
        if self.is_run_drained(run) {
            return Ok(RoundEnd::Drained);
        }
        self.output.say(&format!("the others step on without worker {victim}"))?;
        self.handle_events_during(ABSENCE_TIME).await?;
        if self.is_run_drained(run) {
            return Ok(RoundEnd::Drained);
        }
        self.output.say(&format!("worker {victim} comes back"))?;
        self.workers.start_worker(victim)?;
        let step = self.wait_for_step_completed_by(all).await?;
        if self.is_run_drained(run) {
            return Ok(RoundEnd::Drained);
        }
        if let Some(step) = step {
            self.record.record_worker_return(step);
            self.output.say(&format!("worker {victim} takes part again"))?;
        }
        Ok(RoundEnd::Whole)
    }

    /// Kills the service, if it has a process of its own, and waits until all workers step together. Returns `false` if they
    /// do not, because the run is drained.
    async fn kill_service(&mut self, all: &[u32]) -> Result<bool> {
        let Some(mut killer) = self.killer.take() else { return Ok(true) };
        self.handle_events_during(STEADY_TIME).await?;
        self.record.record_kill();
        let killed = killer.kill().await;
        self.killer = Some(killer);
        let ServiceKilled { process, away } = killed?;
        self.output.say(&format!(
            "the service (process {process}) was killed: kill -9; another process goes on from its journal, after {} ms",
            away.as_millis()
        ))?;
        // The first report may be of a step from before the kill.
        let _ = self.wait_for_step_completed_by(all).await?;
        let Some(step) = self.wait_for_step_completed_by(all).await? else { return Ok(false) };
        self.record.record_service_return(step);
        self.output.say(&format!("all {WORKERS} workers step on in the same run"))?;
        Ok(true)
    }

    /// Returns whether this run is being drained or has ended.
    fn is_run_drained(&self, run: u64) -> bool {
        self.runs != run || (self.drained)().is_some_and(|drained| self.drained_last != Some(drained))
    }

    /// Handles events until another run has begun.
    async fn wait_for_run_after(&mut self, run: u64) -> Result<()> {
        let until = Instant::now() + STEP_TIMEOUT;
        while self.runs == run {
            if Instant::now() > until {
                bail!("within {STEP_TIMEOUT:?} the drained workers did not end");
            }
            if let Ok(news) = timeout_at(Instant::now() + POLL_INTERVAL, self.workers.next_event()).await {
                self.handle_event(news)?;
            }
            self.start_readmitted_workers()?;
        }
        Ok(())
    }

    /// Returns whether the remaining time is too short for another round.
    fn is_time_over(&self) -> bool {
        let next = Instant::now() + STEADY_TIME + ABSENCE_TIME;
        self.end.is_some_and(|end| next > end && (self.record.losses > 0 || Instant::now() > end))
    }

    /// Kills a worker with SIGKILL, if it runs.
    fn kill_worker(&mut self, task: u32) -> Result<bool> {
        let Some(killed) = self.workers.kill_worker(task)? else { return Ok(false) };
        self.record.record_kill();
        self.output.say(&format!("worker {task} (process {}) is killed: kill -9", killed.as_raw_pid()))?;
        Ok(true)
    }

    /// Handles events for this time.
    async fn handle_events_during(&mut self, time: Duration) -> Result<()> {
        let until = Instant::now() + time;
        loop {
            tokio::select! {
                () = sleep_until(until) => return self.start_readmitted_workers(),
                news = self.workers.next_event() => drop(self.handle_event(news)?),
            }
        }
    }

    /// Handles events until exactly these tasks, without excluded ones, have completed a step, and returns
    /// its number; `None` if the time is over while all are excluded, or if the run is drained.
    async fn wait_for_step_completed_by(&mut self, tasks: &[u32]) -> Result<Option<u64>> {
        let mut until = Instant::now() + STEP_TIMEOUT;
        let run = self.runs;
        loop {
            let out = self.out.clone();
            let news = timeout_at(Instant::now() + POLL_INTERVAL, self.workers.next_event()).await;
            let seen = match news {
                Ok(news) => self.handle_event(news)?,
                Err(_) => None,
            };
            self.start_readmitted_workers()?;
            let wanted: Vec<u32> = tasks.iter().copied().filter(|task| !self.out.contains(task)).collect();
            if let Some(seen) = seen.filter(|seen| seen.whole && seen.tasks == wanted) {
                return Ok(Some(seen.number));
            }
            if self.is_run_drained(run) {
                return Ok(None);
            }
            // All workers are excluded, and stay so for as long as the operator wants.
            if wanted.is_empty() && self.end.is_some_and(|end| Instant::now() > end) {
                return Ok(None);
            }
            if out != self.out || wanted.is_empty() {
                until = Instant::now() + STEP_TIMEOUT;
            }
            if Instant::now() > until {
                bail!("within {STEP_TIMEOUT:?} the workers {tasks:?} made no step together");
            }
        }
    }

    /// Starts the workers that are no longer excluded.
    fn start_readmitted_workers(&mut self) -> Result<()> {
        for task in self.out.clone() {
            if !(self.excluded)(task) {
                self.output.say(&format!("the exclusion of worker {task} is lifted; it comes back"))?;
                self.out.remove(&task);
                self.workers.start_worker(task)?;
            }
        }
        Ok(())
    }

    /// Handles an event of a worker. Returns the step that it reports, if any.
    fn handle_event(&mut self, news: Option<TaskWorkerEvent>) -> Result<Option<StepLine>> {
        let TaskWorkerEvent { task, life, event } = news.context("nobody speaks any more")?;
        match event {
            WorkerEvent::Line(line) => {
                let Some(seen) = parse_step_line(&line) else {
                    // A worker that was told to end may make the others cancel a step.
                    if line.starts_with(CANCELLED_TEXT) && !self.ending {
                        self.record.record_cancelled_step();
                    }
                    self.output.say(&format!("[{task}] {line}"))?;
                    return Ok(None);
                };
                if let Some(worker) = self.workers.find_worker(task, life) {
                    worker.stepped = true;
                }
                // All members report the same step. It is printed once, unless something failed.
                if self.record.record_step(task, &seen) || !seen.whole {
                    self.output.say(&format!("[{task}] {line}"))?;
                }
                Ok(Some(seen))
            }
            WorkerEvent::Ended(status) => {
                let Some(Worker { expected, .. }) = self.workers.remove_worker(task, life) else {
                    return Ok(None);
                };
                if expected || self.ending {
                    if !status.success() && !expected {
                        bail!("worker {task} found something wrong: {status}");
                    }
                    return self.restart_after_drain().map(|()| None);
                }
                self.on_unexpected_exit(task, status).map(|()| None)
            }
        }
    }

    /// Handles the exit of a worker that the demo did not end: an operator may have excluded or drained it.
    fn on_unexpected_exit(&mut self, task: u32, status: ExitStatus) -> Result<()> {
        if (self.excluded)(task) {
            self.out.insert(task);
            return self
                .output
                .say(&format!("worker {task} was excluded; it comes back when that is lifted"));
        }
        if !status.success() {
            bail!("worker {task} ended by itself: {status}");
        }
        self.leaving = true;
        // A worker that started after the others agreed on a step does not belong to their run, or is all
        // that is left of it.
        let left = self.workers.running_workers();
        if left.values().all(|worker| !worker.stepped) {
            left.values_mut().for_each(|worker| worker.expected = true);
            self.workers.signal_all(Signal::KILL);
        }
        self.restart_after_drain()
    }

    /// Starts all workers again after all of them have ended because of a drain.
    fn restart_after_drain(&mut self) -> Result<()> {
        if self.leaving && self.workers.running_workers().is_empty() && !self.ending {
            self.leaving = false;
            self.drained_last = (self.drained)().or(self.drained_last);
            self.output.say("the job was drained: all workers ended at one step. Its next run begins")?;
            self.record.record_start_of_next_run();
            self.runs += 1;
            for task in (0..WORKERS).filter(|task| !self.out.contains(task)).collect::<Vec<_>>() {
                self.workers.start_worker(task)?;
            }
        }
        Ok(())
    }

    /// Ends all workers: gracefully, or else by force. Returns an error if one of them found a fault.
    pub async fn end_workers(&mut self) -> Result<()> {
        self.ending = true;
        self.workers.signal_all(Signal::TERM);
        let until = Instant::now() + EXIT_TIMEOUT;
        let mut wrong = None;
        while !self.workers.running_workers().is_empty() {
            let Ok(news) = timeout_at(until, self.workers.next_event()).await else {
                let left: Vec<_> = self.workers.running_workers().keys().collect();
                wrong.get_or_insert_with(|| {
                    anyhow::anyhow!("the workers {left:?} did not end in {EXIT_TIMEOUT:?}")
                });
                self.workers.signal_all(Signal::KILL);
                break;
            };
            if let Err(error) = self.handle_event(news) {
                wrong.get_or_insert(error);
            }
        }
        wrong.map_or(Ok(()), Err)
    }
}
