//! Implements `muster demo`: a server and four workers, losses and returns.
//!
//! It does not judge their steps (`demo/record.rs`). Begin at `run`, then `Demo::play`.

mod record;

use std::collections::{BTreeMap, BTreeSet};
use std::net::{Ipv4Addr, SocketAddr};
use std::process::{ExitCode, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use clap::Args;
use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncBufReadExt as _, AsyncRead, AsyncReadExt as _, BufReader};
use tokio::process::{Child, Command};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until, timeout_at};

use super::launch::children::{BECOME_COMMAND, ProcessGuard, THIS_PROGRAM};
use super::output::{TerminalText, print};
use super::server::RunningServer;
use super::worker::{CANCELLED_TEXT, StepLine, parse};
use super::{allocator, limits};
use crate::config::{ConfigRequest, JobSelection, Profile, load, parse_address};
use crate::coordination::{JobName, TaskId};
use crate::telemetry::log::{self, LogFormat};
use crate::text::parse_duration;
use record::DemoRecord;

/// The number of workers.
const WORKERS: u32 = 4;
/// The preferred ports of the service.
const PORTS: [u16; 2] = [8476, 8477];
/// The time for which all workers run before one is killed, and for which the others then run without it.
const STEADY_TIME: Duration = Duration::from_secs(4);
const ABSENCE_TIME: Duration = Duration::from_secs(3);
/// The timeout for anything that should take a moment: the machine may be busy.
const STEP_TIMEOUT: Duration = Duration::from_secs(60);
/// The interval at which exclusions are checked.
const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// The time that workers have to leave.
const EXIT_TIMEOUT: Duration = Duration::from_secs(20);
const STOP_TIMEOUT: Duration = Duration::from_secs(1);
/// The maximum length of a worker's line; a longer one is truncated.
const LINE_MAX: u64 = 4096;

/// Run a demo: a service, four workers, buffers that move, losses and returns
///
/// Starts a service with its pages, at the usual ports if they are free, and four workers of a recoverable
/// job. They register, meet at barriers, move buffers to one another, reshard an array, and check every byte.
/// Then the demo kills one of them, the others continue without it, and it comes back. This repeats until
/// Ctrl-C or the time given by --for. It needs nothing but this program. Operators may exclude workers,
/// readmit them and drain the job meanwhile: the demo adapts to it.
#[derive(Debug, Args)]
pub struct Arguments {
    /// End after about this time, with status 0 only if every content was right and every step held; steps
    /// may fail while a worker is away that the demo itself has killed
    #[arg(long = "for", value_name = "SECONDS", value_parser = seconds)]
    length: Option<Duration>,

    /// The pause between two steps of the workers
    #[arg(long, value_name = "DURATION", default_value = "500ms", value_parser = parse_duration)]
    pause: Duration,

    /// The address for workers, on this machine; port 0 picks a free one [default: 127.0.0.1:8476 if it is
    /// free]
    #[arg(long, value_name = "IP:PORT", value_parser = here)]
    grpc: Option<SocketAddr>,

    /// The address of the pages, on this machine; port 0 picks a free one [default: 127.0.0.1:8477 if it is
    /// free]
    #[arg(long, value_name = "IP:PORT", value_parser = here)]
    http: Option<SocketAddr>,
}

/// Parses a loopback address: the demo has no access control.
fn here(text: &str) -> Result<SocketAddr, String> {
    let address = parse_address(text)?;
    if address.ip().is_loopback() {
        Ok(address)
    } else {
        Err("the demo asks nobody who they are: use an address that only this machine reaches, such as 127.0.0.1:0".into())
    }
}

/// Short, so that heartbeats are frequent. They are sent twice as often.
const HEARTBEAT_TIMEOUT: &str = "10s";

/// Parses a duration, or a bare number of seconds.
fn seconds(text: &str) -> Result<Duration, String> {
    text.parse::<u32>()
        .map_or_else(|_| parse_duration(text), |seconds| Ok(Duration::from_secs(seconds.into())))
}

/// Runs the subcommand.
pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    log::start("error", LogFormat::Human).map_err(anyhow::Error::msg)?;
    limits::raise_open_files();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    allocator::configure_allocator(runtime.handle());
    // On this thread, which lives as long as the process: children are tied to the thread that started them.
    let code = runtime.block_on(show(arguments));
    runtime.shutdown_background();
    code
}

/// Starts the service. It ignores the environment of this process, so that the demo is the same everywhere.
async fn serve(arguments: &Arguments) -> Result<RunningServer> {
    let given = [arguments.grpc, arguments.http];
    let local = |port: u16| SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let at = |ports: [u16; 2]| [given[0].unwrap_or(local(ports[0])), given[1].unwrap_or(local(ports[1]))];
    match serve_at(at(PORTS)).await {
        // The preferred ports are taken, so free ones are used in place of those that no flag gives.
        Err(_) if given.contains(&None) => serve_at(at([0, 0])).await,
        served => served,
    }
}

async fn serve_at([grpc, http]: [SocketAddr; 2]) -> Result<RunningServer> {
    let flags = BTreeMap::from([
        ("grpc", grpc.to_string()),
        ("http", http.to_string()),
        ("recoverable", true.to_string()),
        ("heartbeat-timeout", HEARTBEAT_TIMEOUT.to_owned()),
    ]);
    let name: JobName = JobName::DEFAULT.parse().map_err(anyhow::Error::msg)?;
    let jobs = JobSelection::Only { name, tasks: WORKERS };
    let config = load(&ConfigRequest { profile: Profile::Launch, file: None, flags, jobs }, &|_| None)?;
    RunningServer::start(&config).await
}

async fn show(arguments: &Arguments) -> Result<ExitCode> {
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot listen for signals")?;
    let mut terminate = signal(SignalKind::terminate()).context("cannot listen for signals")?;
    let server = serve(arguments).await?;
    let http = server.about().http;
    let name: JobName = JobName::DEFAULT.parse().map_err(anyhow::Error::msg)?;
    let service =
        server.about().coordinator_address(&name, Some("127.0.0.1")).context("the job is not served")?;
    say(&format!("Muster demo: a service, and {WORKERS} workers that move buffers to one another"))?;
    say(&format!("  look at  http://{http}/"))?;
    say(&format!("  or with  muster status --server http://{http} --watch"))?;
    say("  end with Ctrl-C")?;
    let engine = Arc::clone(server.engine());
    let excluded = move |task: u32| {
        let view = engine.read(|core, now| core.job_view(core.job_named(JobName::DEFAULT)?, now));
        let task = TaskId(task as i32);
        view.is_some_and(|view| view.run.tasks.iter().any(|of| of.task == task && of.excluded.is_some()))
    };
    let engine = Arc::clone(server.engine());
    let drained = move || {
        let view = engine.read(|core, now| core.job_view(core.job_named(JobName::DEFAULT)?, now));
        view.filter(|view| view.run.preemption.is_some()).map(|view| view.run.number.0)
    };
    let mut demo = Demo::new(service, arguments, Box::new(excluded), Box::new(drained))?;
    let ended = tokio::select! {
        played = demo.play(arguments.length) => played.map(|()| None),
        _ = interrupt.recv() => Ok(Some(128 + 2)),
        _ = terminate.recv() => Ok(Some(128 + 15)),
    };
    let left = demo.end().await;
    server.stop(STOP_TIMEOUT).await;
    let verdict = match (ended, left) {
        (Err(error), _) | (Ok(None), Err(error)) => Err(error),
        (Ok(code), _) => Ok(code),
    };
    let DemoRecord { steps, resharded, checked, losses, .. } = &demo.record;
    say(&format!(
        "{steps} steps, {resharded} of them with an array resharded, {checked} buffers checked byte for byte, {losses} \
         worker(s) lost and taken back"
    ))?;
    match verdict {
        Ok(None) => {
            let all = WORKERS as usize;
            say(&demo.record.verdict(all - demo.out.len().min(all), all).map_err(anyhow::Error::msg)?)?;
            Ok(ExitCode::SUCCESS)
        }
        Ok(Some(code)) => Ok(ExitCode::from(code)),
        Err(error) => Err(error),
    }
}

/// An event of a worker: a line or its exit.
enum WorkerEvent {
    Line(String),
    Ended(ExitStatus),
}

/// The end of a round of loss and return.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RoundEnd {
    /// All workers take part again.
    Whole,
    /// The run is drained.
    Drained,
}

struct Worker {
    pid: Pid,
    /// The number of the life, which distinguishes the lives of a task.
    life: u64,
    /// The demo killed the worker or told it to end.
    expected: bool,
    /// The worker has taken part in a step.
    stepped: bool,
}

/// A function that returns the number of the drained run, if one is drained.
type DrainedRun = Box<dyn Fn() -> Option<u64>>;

struct Demo {
    service: String,
    pause: Duration,
    guard: ProcessGuard,
    workers: BTreeMap<u32, Worker>,
    /// Returns whether an operator excludes a worker.
    excluded: Box<dyn Fn(u32) -> bool>,
    /// Returns the present run, if an operator drains it: then all workers end at one step.
    drained: DrainedRun,
    /// The last run that ended by a drain.
    drained_last: Option<u64>,
    /// Workers have ended because of a drain, and the others will follow.
    leaving: bool,
    /// The excluded workers.
    out: BTreeSet<u32>,
    /// The number of runs after the first.
    runs: u64,
    ending: bool,
    coming: mpsc::Receiver<(u32, u64, WorkerEvent)>,
    tell: mpsc::Sender<(u32, u64, WorkerEvent)>,
    lives: u64,
    /// The time at which the demo ends.
    end: Option<Instant>,
    record: DemoRecord,
}

impl Demo {
    fn new(
        service: String,
        arguments: &Arguments,
        excluded: Box<dyn Fn(u32) -> bool>,
        drained: DrainedRun,
    ) -> Result<Self> {
        let (tell, coming) = mpsc::channel(256);
        let guard = ProcessGuard::start().context("cannot start the guard of the workers")?;
        Ok(Self {
            service,
            pause: arguments.pause,
            guard,
            workers: BTreeMap::new(),
            excluded,
            drained,
            drained_last: None,
            leaving: false,
            out: BTreeSet::new(),
            runs: 0,
            ending: false,
            coming,
            tell,
            lives: 0,
            end: None,
            record: DemoRecord::default(),
        })
    }

    /// Runs rounds of work, loss and return.
    async fn play(&mut self, length: Option<Duration>) -> Result<()> {
        self.end = length.map(|length| Instant::now() + length);
        for task in 0..WORKERS {
            self.start(task)?;
        }
        let all: Vec<u32> = (0..WORKERS).collect();
        let mut together = false;
        for victim in (0..WORKERS).cycle().skip(2) {
            let run = self.runs;
            if !together && !self.is_drained(run) {
                together = self.until_step_of(&all).await?.is_some();
                if together {
                    say(&format!("all {WORKERS} workers step together"))?;
                }
            }
            if self.is_over() {
                break;
            }
            let lost = self.run_loss_round(victim, &all).await?;
            if lost == RoundEnd::Drained {
                self.until_run_after(run).await?;
            }
            together = lost == RoundEnd::Whole;
        }
        match self.end {
            Some(end) => self.watch(end.saturating_duration_since(Instant::now())).await,
            None => Ok(()),
        }
    }

    /// Runs one round: all workers step, one is killed, and it returns. A drain may end the round at any
    /// time; then the killed worker is not started again, because all workers end and the next run starts all
    /// of them.
    async fn run_loss_round(&mut self, victim: u32, all: &[u32]) -> Result<RoundEnd> {
        let run = self.runs;
        self.watch(STEADY_TIME).await?;
        if self.is_drained(run) {
            return Ok(RoundEnd::Drained);
        }
        if !self.kill(victim)? {
            return Ok(RoundEnd::Whole);
        }
        let others: Vec<u32> = all.iter().copied().filter(|task| *task != victim).collect();
        self.until_step_of(&others).await?;
        if self.is_drained(run) {
            return Ok(RoundEnd::Drained);
        }
        say(&format!("the others step on without worker {victim}"))?;
        self.watch(ABSENCE_TIME).await?;
        if self.is_drained(run) {
            return Ok(RoundEnd::Drained);
        }
        say(&format!("worker {victim} comes back"))?;
        self.start(victim)?;
        let step = self.until_step_of(all).await?;
        if self.is_drained(run) {
            return Ok(RoundEnd::Drained);
        }
        if let Some(step) = step {
            self.record.end_loss(step);
            say(&format!("worker {victim} takes part again"))?;
        }
        Ok(RoundEnd::Whole)
    }

    /// Returns whether this run is being drained or has ended.
    fn is_drained(&self, run: u64) -> bool {
        self.runs != run || (self.drained)().is_some_and(|drained| self.drained_last != Some(drained))
    }

    /// Handles events until another run has begun.
    async fn until_run_after(&mut self, run: u64) -> Result<()> {
        let until = Instant::now() + STEP_TIMEOUT;
        while self.runs == run {
            if Instant::now() > until {
                bail!("within {STEP_TIMEOUT:?} the drained workers did not end");
            }
            if let Ok(news) = timeout_at(Instant::now() + POLL_INTERVAL, self.coming.recv()).await {
                self.handle_event(news)?;
            }
            self.restart_readmitted()?;
        }
        Ok(())
    }

    /// Returns whether the remaining time is too short for another round.
    fn is_over(&self) -> bool {
        let next = Instant::now() + STEADY_TIME + ABSENCE_TIME;
        self.end.is_some_and(|end| next > end && (self.record.losses > 0 || Instant::now() > end))
    }

    fn start(&mut self, task: u32) -> Result<()> {
        let mut command = Command::new(THIS_PROGRAM);
        command.arg(BECOME_COMMAND).arg("--parent").arg(std::process::id().to_string()).arg("--");
        command.arg(THIS_PROGRAM).args(["worker", "--program", "exercise", "--service", &self.service]);
        command.arg("--task").arg(task.to_string()).arg("--tasks").arg(WORKERS.to_string());
        command.args(["--devices", "2", "--heartbeat-timeout", HEARTBEAT_TIMEOUT]);
        command.arg("--pause").arg(format!("{}ms", self.pause.as_millis()));
        let own = std::env::vars_os().filter(|(name, _)| {
            let name = name.to_string_lossy();
            name.starts_with("MUSTER_") || name.starts_with("JAX_")
        });
        for (name, _) in own {
            command.env_remove(name);
        }
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = command.process_group(0).kill_on_drop(true).spawn().context("cannot start a worker")?;
        let pid = child.id().and_then(|id| Pid::from_raw(i32::try_from(id).ok()?));
        let pid = pid.context("a worker has no process id")?;
        self.guard.add(pid);
        self.lives += 1;
        let life = self.lives;
        self.workers.insert(task, Worker { pid, life, expected: false, stepped: false });
        tokio::spawn(follow(child, task, life, self.tell.clone()));
        Ok(())
    }

    /// Kills a worker with SIGKILL, if it runs.
    fn kill(&mut self, task: u32) -> Result<bool> {
        let Some(worker) = self.workers.get_mut(&task) else { return Ok(false) };
        worker.expected = true;
        self.record.begin_loss();
        say(&format!("worker {task} (process {}) is killed: kill -9", worker.pid.as_raw_pid()))?;
        kill_process(worker.pid, Signal::KILL).context("it cannot be killed")?;
        Ok(true)
    }

    /// Handles events for this time.
    async fn watch(&mut self, time: Duration) -> Result<()> {
        let until = Instant::now() + time;
        loop {
            tokio::select! {
                () = sleep_until(until) => return self.restart_readmitted(),
                news = self.coming.recv() => drop(self.handle_event(news)?),
            }
        }
    }

    /// Handles events until exactly these tasks, without excluded ones, have completed a step, and returns
    /// its number; `None` if the time is over while all are excluded, or if the run is drained.
    async fn until_step_of(&mut self, tasks: &[u32]) -> Result<Option<u64>> {
        let mut until = Instant::now() + STEP_TIMEOUT;
        let run = self.runs;
        loop {
            let out = self.out.clone();
            let news = timeout_at(Instant::now() + POLL_INTERVAL, self.coming.recv()).await;
            let seen = match news {
                Ok(news) => self.handle_event(news)?,
                Err(_) => None,
            };
            self.restart_readmitted()?;
            let wanted: Vec<u32> = tasks.iter().copied().filter(|task| !self.out.contains(task)).collect();
            if let Some(seen) = seen.filter(|seen| seen.whole && seen.tasks == wanted) {
                return Ok(Some(seen.number));
            }
            if self.is_drained(run) {
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
    fn restart_readmitted(&mut self) -> Result<()> {
        for task in self.out.clone() {
            if !(self.excluded)(task) {
                say(&format!("the exclusion of worker {task} is lifted; it comes back"))?;
                self.out.remove(&task);
                self.start(task)?;
            }
        }
        Ok(())
    }

    /// Handles an event of a worker. Returns the step that it reports, if any.
    fn handle_event(&mut self, news: Option<(u32, u64, WorkerEvent)>) -> Result<Option<StepLine>> {
        let (task, life, news) = news.context("nobody speaks any more")?;
        let worker = self.workers.get(&task).filter(|worker| worker.life == life);
        match news {
            WorkerEvent::Line(line) => {
                let Some(seen) = parse(&line) else {
                    // A worker that was told to end may make the others cancel a step.
                    if line.starts_with(CANCELLED_TEXT) && !self.ending {
                        self.record.called_off();
                    }
                    say(&format!("[{task}] {line}"))?;
                    return Ok(None);
                };
                if let Some(worker) = self.workers.get_mut(&task).filter(|worker| worker.life == life) {
                    worker.stepped = true;
                }
                // All members report the same step. It is printed once, unless something failed.
                if self.record.step(task, &seen) || !seen.whole {
                    say(&format!("[{task}] {line}"))?;
                }
                Ok(Some(seen))
            }
            WorkerEvent::Ended(status) => {
                let Some(worker) = worker else { return Ok(None) };
                self.guard.remove(worker.pid);
                let expected = worker.expected;
                self.workers.remove(&task);
                if expected || self.ending {
                    if !status.success() && !expected {
                        bail!("worker {task} found something wrong: {status}");
                    }
                    return self.begin_next_run().map(|()| None);
                }
                self.on_unexpected_exit(task, status).map(|()| None)
            }
        }
    }

    /// Handles the exit of a worker that the demo did not end: an operator may have excluded or drained it.
    fn on_unexpected_exit(&mut self, task: u32, status: ExitStatus) -> Result<()> {
        if (self.excluded)(task) {
            self.out.insert(task);
            return say(&format!("worker {task} was excluded; it comes back when that is lifted"));
        }
        if !status.success() {
            bail!("worker {task} ended by itself: {status}");
        }
        self.leaving = true;
        // A worker that started after the others agreed on a step does not belong to their run, or is all
        // that is left of it.
        if self.workers.values().all(|worker| !worker.stepped) {
            for worker in self.workers.values_mut() {
                worker.expected = true;
                // The worker may have exited already.
                let _ = kill_process(worker.pid, Signal::KILL);
            }
        }
        self.begin_next_run()
    }

    /// Starts all workers again after all of them have ended because of a drain.
    fn begin_next_run(&mut self) -> Result<()> {
        if self.leaving && self.workers.is_empty() && !self.ending {
            self.leaving = false;
            self.drained_last = (self.drained)().or(self.drained_last);
            say("the job was drained: all workers ended at one step. Its next run begins")?;
            self.record.new_run();
            self.runs += 1;
            for task in (0..WORKERS).filter(|task| !self.out.contains(task)).collect::<Vec<_>>() {
                self.start(task)?;
            }
        }
        Ok(())
    }

    /// Ends all workers: gracefully, or else by force. Returns an error if one of them found a fault.
    async fn end(&mut self) -> Result<()> {
        self.ending = true;
        for worker in self.workers.values() {
            // The worker may have exited already.
            let _ = kill_process(worker.pid, Signal::TERM);
        }
        let until = Instant::now() + EXIT_TIMEOUT;
        let mut wrong = None;
        while !self.workers.is_empty() {
            let Ok(news) = timeout_at(until, self.coming.recv()).await else {
                let left: Vec<_> = self.workers.keys().collect();
                wrong.get_or_insert_with(|| {
                    anyhow::anyhow!("the workers {left:?} did not end in {EXIT_TIMEOUT:?}")
                });
                for worker in self.workers.values() {
                    let _ = kill_process(worker.pid, Signal::KILL);
                }
                break;
            };
            if let Err(error) = self.handle_event(news) {
                wrong.get_or_insert(error);
            }
        }
        wrong.map_or(Ok(()), Err)
    }
}

/// Forwards the lines of a worker, and its exit.
async fn follow(mut child: Child, task: u32, life: u64, tell: mpsc::Sender<(u32, u64, WorkerEvent)>) {
    let out = child.stdout.take().map(|stream| lines(stream, task, life, tell.clone()));
    let err = child.stderr.take().map(|stream| lines(stream, task, life, tell.clone()));
    let heard = async {
        tokio::join!(
            async {
                if let Some(out) = out {
                    out.await
                }
            },
            async {
                if let Some(err) = err {
                    err.await
                }
            }
        )
    };
    heard.await;
    if let Ok(status) = child.wait().await {
        let _ = tell.send((task, life, WorkerEvent::Ended(status))).await;
    }
}

async fn lines(
    stream: impl AsyncRead + Unpin,
    task: u32,
    life: u64,
    tell: mpsc::Sender<(u32, u64, WorkerEvent)>,
) {
    let mut stream = BufReader::new(stream);
    loop {
        let mut line = Vec::new();
        match (&mut stream).take(LINE_MAX).read_until(b'\n', &mut line).await {
            Ok(0) | Err(_) => return,
            Ok(_) => {}
        }
        let line = String::from_utf8_lossy(&line).trim_end().to_owned();
        if !line.is_empty() && tell.send((task, life, WorkerEvent::Line(line))).await.is_err() {
            return;
        }
    }
}

fn say(line: &str) -> Result<()> {
    Ok(print(&TerminalText::of(line))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bare_number_is_seconds() {
        assert_eq!(seconds("20"), Ok(Duration::from_secs(20)));
        assert_eq!(seconds("500ms"), Ok(Duration::from_millis(500)));
        assert!(seconds("soon").is_err());
    }
}
