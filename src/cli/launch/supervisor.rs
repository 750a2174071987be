//! Supervises the processes of a launch: restarts, next runs, signals, exit code.
//!
//! It does not start the server (`launch/target.rs`). Begin at `Supervisor::run`.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;
use std::os::unix::process::ExitStatusExt as _;
use std::pin::Pin;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result};
use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use tokio::process::Command;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::Sleep;

use super::children::{BECOME_COMMAND, ProcessGuard, THIS_PROGRAM};
use super::prefix_output::{SharedOutput, pump};
use super::target::LaunchServer;
use crate::clock::Clock;
use crate::coordination::Timestamp;
use crate::text::{Untrusted, format_duration};

/// The time that the other tasks have to fail by themselves, with messages of their own, after a task failed.
const FATE_GRACE: Duration = Duration::from_secs(3);
/// The time that output may still arrive after its process has exited: a process that left the group may hold
/// the pipe.
const OUTPUT_DRAIN_TIMEOUT: Duration = Duration::from_secs(2);

/// The processes to run, and the rules for restarts.
pub struct LaunchPlan {
    pub command: Vec<OsString>,
    pub tasks: u32,
    pub recoverable: bool,
    pub max_restarts: u32,
    pub kill_after: Duration,
    /// The original limit on open files, which is restored in the children.
    pub open_files: Option<u64>,
}

/// The exit of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum ExitReason {
    Code(u8),
    Signal(i32),
}

impl ExitReason {
    fn of(status: ExitStatus) -> Self {
        match (status.code(), status.signal()) {
            (Some(code), _) => Self::Code(u8::try_from(code).unwrap_or(u8::MAX)),
            (None, Some(signal)) => Self::Signal(signal),
            (None, None) => Self::Code(u8::MAX),
        }
    }

    fn code(self) -> u8 {
        match self {
            Self::Code(code) => code,
            Self::Signal(signal) => 128 + u8::try_from(signal).unwrap_or(127),
        }
    }
}

impl fmt::Display for ExitReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Code(code) => write!(f, "exit code {code}"),
            Self::Signal(number) => f.write_str(&signal_name(*number)),
        }
    }
}

/// Returns the name of a signal, such as `SIGTERM`.
fn signal_name(number: i32) -> String {
    const NAMED: [(Signal, &str); 18] = [
        (Signal::HUP, "SIGHUP"),
        (Signal::INT, "SIGINT"),
        (Signal::QUIT, "SIGQUIT"),
        (Signal::ILL, "SIGILL"),
        (Signal::TRAP, "SIGTRAP"),
        (Signal::ABORT, "SIGABRT"),
        (Signal::BUS, "SIGBUS"),
        (Signal::FPE, "SIGFPE"),
        (Signal::KILL, "SIGKILL"),
        (Signal::USR1, "SIGUSR1"),
        (Signal::SEGV, "SIGSEGV"),
        (Signal::USR2, "SIGUSR2"),
        (Signal::PIPE, "SIGPIPE"),
        (Signal::ALARM, "SIGALRM"),
        (Signal::TERM, "SIGTERM"),
        (Signal::XCPU, "SIGXCPU"),
        (Signal::XFSZ, "SIGXFSZ"),
        (Signal::SYS, "SIGSYS"),
    ];
    let named = NAMED.iter().find(|(signal, _)| signal.as_raw() == number);
    named.map_or_else(|| format!("signal {number}"), |(_, name)| (*name).to_owned())
}

struct RunningProcess {
    pid: Pid,
    began: Timestamp,
}

enum TaskSlot {
    Idle,
    Running(RunningProcess),
    Ended(ExitReason),
}

/// A failed process that was not started again.
#[derive(Clone, Copy)]
struct FailedProcess {
    task: u32,
    end: ExitReason,
    after: Duration,
}

/// The progress of stopping the processes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum StopStage {
    /// They have time to end by themselves.
    Waiting,
    /// They have been told to end.
    Told,
    /// They have been killed.
    Killed,
}

#[derive(Clone, Copy)]
enum SupervisorPhase {
    Running,
    /// A task failed, and the run with it.
    Failed(StopStage),
    /// A signal ended the launch.
    Interrupted(Signal, StopStage),
}

/// Supervises the processes of a launch.
pub struct Supervisor {
    plan: LaunchPlan,
    server: LaunchServer,
    clock: Clock,
    guard: ProcessGuard,
    out: SharedOutput,
    err: SharedOutput,
    pumps: JoinSet<()>,
    exits: mpsc::Receiver<ProcessExit>,
    exited: mpsc::Sender<ProcessExit>,
    slots: Vec<TaskSlot>,
    /// The failed processes in the order of their exits.
    failed: Vec<FailedProcess>,
    phase: SupervisorPhase,
    timer: Option<Pin<Box<Sleep>>>,
    restarts: u32,
    runs: u32,
}

struct ProcessExit {
    task: u32,
    end: ExitReason,
}

impl Supervisor {
    /// Prepares a launch without starting a process.
    pub fn new(plan: LaunchPlan, target: LaunchServer) -> Result<Self> {
        let (exited, exits) = mpsc::channel(plan.tasks as usize);
        Ok(Self {
            slots: (0..plan.tasks).map(|_| TaskSlot::Idle).collect(),
            plan,
            server: target,
            clock: Clock::start(),
            guard: ProcessGuard::start().context("cannot start the guard of the processes")?,
            out: SharedOutput::start(std::io::stdout()),
            err: SharedOutput::start(std::io::stderr()),
            pumps: JoinSet::new(),
            exits,
            exited,
            failed: Vec::new(),
            phase: SupervisorPhase::Running,
            timer: None,
            restarts: 0,
            runs: 0,
        })
    }

    /// Runs all processes to their end and returns the exit code.
    pub async fn run(mut self) -> Result<u8> {
        let mut signals = signals()?;
        self.err.say(&format!("{} task(s), {}", self.plan.tasks, self.server.describe())).await;
        let watched = self.watch(&mut signals).await;
        if watched.is_err() {
            self.signal_all(Signal::KILL);
        }
        self.drain().await;
        let code = self.exit_code();
        let summary = self.summary().await;
        self.err.say(&summary).await;
        let Self { server: target, out, err, .. } = self;
        target.stop().await;
        out.finish().await;
        err.finish().await;
        watched.map(|()| code)
    }

    async fn watch(&mut self, signals: &mut mpsc::Receiver<Signal>) -> Result<()> {
        self.start_all()?;
        loop {
            tokio::select! {
                biased;
                Some(exit) = self.exits.recv() => self.process_ended(exit).await?,
                Some(signal) = signals.recv() => self.signalled(signal).await,
                () = sleep_until(&mut self.timer) => self.escalate().await,
            }
            if self.running().next().is_none() && !self.start_next_run().await? {
                return Ok(());
            }
        }
    }

    fn start_all(&mut self) -> Result<()> {
        self.runs += 1;
        for task in 0..self.plan.tasks {
            self.start(task)?;
        }
        Ok(())
    }

    /// Starts one process. It must be called on the main thread, because the child's death signal is tied to
    /// that thread.
    fn start(&mut self, task: u32) -> Result<()> {
        let mut command = Command::new(THIS_PROGRAM);
        command.arg(BECOME_COMMAND).arg("--parent").arg(std::process::id().to_string());
        if let Some(soft) = self.plan.open_files {
            command.arg("--open-files").arg(soft.to_string());
        }
        command.arg("--").args(&self.plan.command);
        command
            .env("JAX_COORDINATOR_ADDRESS", self.server.coordinator())
            .env("JAX_COORDINATOR_BIND_ADDRESS", "127.0.0.1:0")
            .env("MUSTER_PROCESS_ID", task.to_string())
            .env("MUSTER_NUM_PROCESSES", self.plan.tasks.to_string());
        if std::env::var_os("PYTHONUNBUFFERED").is_none() {
            command.env("PYTHONUNBUFFERED", "1");
        }
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .kill_on_drop(true);
        let mut child = command.spawn().with_context(|| format!("cannot start task {task}"))?;
        let pid = child.id().and_then(|id| Pid::from_raw(i32::try_from(id).ok()?));
        let pid = pid.with_context(|| format!("task {task} has no process id"))?;
        self.guard.add(pid);
        if let Some(stdout) = child.stdout.take() {
            self.pumps.spawn(pump(stdout, task, self.out.pieces()));
        }
        if let Some(stderr) = child.stderr.take() {
            self.pumps.spawn(pump(stderr, task, self.err.pieces()));
        }
        let exited = self.exited.clone();
        tokio::spawn(async move {
            let end = child.wait().await.map_or(ExitReason::Code(u8::MAX), ExitReason::of);
            let _ = exited.send(ProcessExit { task, end }).await;
        });
        if let Some(slot) = self.slots.get_mut(task as usize) {
            *slot = TaskSlot::Running(RunningProcess { pid, began: self.clock.now() });
        }
        Ok(())
    }

    fn running(&self) -> impl Iterator<Item = &RunningProcess> {
        self.slots.iter().filter_map(|slot| match slot {
            TaskSlot::Running(process) => Some(process),
            TaskSlot::Idle | TaskSlot::Ended(_) => None,
        })
    }

    async fn process_ended(&mut self, ProcessExit { task, end }: ProcessExit) -> Result<()> {
        let Some(slot) = self.slots.get_mut(task as usize) else { return Ok(()) };
        let TaskSlot::Running(process) = std::mem::replace(slot, TaskSlot::Ended(end)) else { return Ok(()) };
        // Descendants that the process left behind end with it.
        let _ = kill_process_group(process.pid, Signal::KILL);
        self.guard.remove(process.pid);
        if end == ExitReason::Code(0) {
            return Ok(());
        }
        let failed = FailedProcess { task, end, after: self.clock.now().since(process.began) };
        self.failed.push(failed);
        match self.phase {
            SupervisorPhase::Running if self.plan.recoverable => self.replace(failed).await,
            SupervisorPhase::Running => {
                self.fail_run(failed).await;
                Ok(())
            }
            SupervisorPhase::Failed(_) | SupervisorPhase::Interrupted(..) => Ok(()),
        }
    }

    /// Handles a failure in a recoverable job: starts the task again, if a restart is left.
    async fn replace(&mut self, failed: FailedProcess) -> Result<()> {
        if self.restarts == self.plan.max_restarts {
            let others = self.running().count();
            let no_more = self.no_more_restarts();
            self.err.say(&format!("{failed}; {no_more}; {others} other task(s) go on")).await;
            return Ok(());
        }
        self.restarts += 1;
        self.err.say(&format!("{failed}; starting it again ({})", self.restart_count())).await;
        self.failed.retain(|old| old.task != failed.task);
        self.start(failed.task)
    }

    /// Handles a failure in a job whose tasks share their fate: ends the other tasks.
    async fn fail_run(&mut self, failed: FailedProcess) {
        self.phase = SupervisorPhase::Failed(StopStage::Waiting);
        self.timer = Some(Box::pin(tokio::time::sleep(FATE_GRACE)));
        let others = self.running().count();
        if others > 0 {
            let time = format_duration(FATE_GRACE);
            self.err.say(&format!("{failed}; {others} other task(s) have {time} to end by themselves")).await;
        } else {
            self.err.say(&failed.to_string()).await;
        }
    }

    /// Starts the next run, if the last one failed and a restart is left. Returns whether it did.
    async fn start_next_run(&mut self) -> Result<bool> {
        let SupervisorPhase::Failed(_) = self.phase else { return Ok(false) };
        if self.restarts == self.plan.max_restarts {
            return Ok(false);
        }
        self.restarts += 1;
        self.drain().await;
        self.server.wait_until_vacated(FATE_GRACE).await;
        self.failed.clear();
        self.phase = SupervisorPhase::Running;
        self.timer = None;
        let (tasks, count) = (self.plan.tasks, self.restart_count());
        self.err.say(&format!("starting all {tasks} again ({count})")).await;
        self.start_all()?;
        Ok(true)
    }

    fn restart_count(&self) -> String {
        format!("restart {} of {}", self.restarts, self.plan.max_restarts)
    }

    fn no_more_restarts(&self) -> &'static str {
        if self.plan.max_restarts == 0 { "no restarts were asked for" } else { "no restarts are left" }
    }

    async fn signalled(&mut self, signal: Signal) {
        if matches!(signal, Signal::USR1 | Signal::USR2) {
            // The signal goes to the program alone: processes that it started would usually die of it.
            self.running().for_each(|process| _ = kill_process(process.pid, signal));
            return;
        }
        match self.phase {
            SupervisorPhase::Interrupted(first, _) if signal == Signal::INT => {
                self.phase = SupervisorPhase::Interrupted(first, StopStage::Killed);
                self.timer = None;
                self.err.say("interrupted again; killing what is left").await;
                self.signal_all(Signal::KILL);
            }
            SupervisorPhase::Interrupted(..) => self.signal_all(signal),
            SupervisorPhase::Running | SupervisorPhase::Failed(_) => {
                self.phase = SupervisorPhase::Interrupted(signal, StopStage::Told);
                self.timer = Some(Box::pin(tokio::time::sleep(self.plan.kill_after)));
                self.signal_all(signal);
                let (name, time) = (signal_name(signal.as_raw()), format_duration(self.plan.kill_after));
                let again = if signal == Signal::INT { " (or when interrupted again)" } else { "" };
                let say = format!("passed {name} on; what has not ended after {time} is killed{again}");
                self.err.say(&say).await;
            }
        }
    }

    /// Takes the next stage of stopping when the time of the present one is over.
    async fn escalate(&mut self) {
        self.timer = None;
        let left = self.running().count();
        if let SupervisorPhase::Failed(ending @ StopStage::Waiting) = &mut self.phase {
            *ending = StopStage::Told;
            self.timer = Some(Box::pin(tokio::time::sleep(self.plan.kill_after)));
            self.err.say(&format!("ending {left} other task(s) with SIGTERM")).await;
            self.signal_all(Signal::TERM);
            return;
        }
        match &mut self.phase {
            SupervisorPhase::Failed(ending) | SupervisorPhase::Interrupted(_, ending) => {
                *ending = StopStage::Killed
            }
            SupervisorPhase::Running => return,
        }
        self.err
            .say(&format!(
                "killing {left} task(s) that did not end within {}",
                format_duration(self.plan.kill_after)
            ))
            .await;
        self.signal_all(Signal::KILL);
    }

    fn signal_all(&self, signal: Signal) {
        // A process that has just exited misses the signal.
        self.running().for_each(|process| _ = kill_process_group(process.pid, signal));
    }

    /// Waits for the remaining output.
    async fn drain(&mut self) {
        let all = async { while self.pumps.join_next().await.is_some() {} };
        if tokio::time::timeout(OUTPUT_DRAIN_TIMEOUT, all).await.is_err() {
            self.pumps.shutdown().await;
        }
    }

    fn exit_code(&self) -> u8 {
        match self.phase {
            SupervisorPhase::Interrupted(signal, _) => ExitReason::Signal(signal.as_raw()).code(),
            SupervisorPhase::Running | SupervisorPhase::Failed(_) => {
                self.failed.first().map_or(0, |failed| failed.end.code())
            }
        }
    }

    async fn summary(&self) -> String {
        let mut ends: BTreeMap<ExitReason, u32> = BTreeMap::new();
        for slot in &self.slots {
            if let TaskSlot::Ended(end) = slot {
                *ends.entry(*end).or_default() += 1;
            }
        }
        let ends: Vec<String> = ends.iter().map(|(end, count)| format!("{count} with {end}")).collect();
        let mut text = match (self.phase, self.failed.first()) {
            (SupervisorPhase::Interrupted(signal, _), _) => {
                format!("interrupted by {}; ", signal_name(signal.as_raw()))
            }
            (_, Some(first)) => format!("{first}, first of all; "),
            (_, None) => String::new(),
        };
        text.push_str(&format!("{} task(s) ended: {}", self.slots.len(), ends.join(", ")));
        text.push_str(&format!("; {} run(s), {} restart(s)", self.runs, self.restarts));
        if !self.failed.is_empty()
            && let Some(cause) = self.server.first_cause().await
        {
            let whose = cause.task.map_or_else(String::new, |task| format!("task {task}: "));
            text.push_str(&format!("; first cause: {whose}{}", Untrusted::from(&*cause.why)));
        }
        text
    }
}

impl fmt::Display for FailedProcess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "task {} failed ({}) after {:.1} s", self.task, self.end, self.after.as_secs_f64())
    }
}

async fn sleep_until(timer: &mut Option<Pin<Box<Sleep>>>) {
    match timer {
        Some(timer) => timer.await,
        None => std::future::pending().await,
    }
}

/// Returns one queue of all signals that a launch passes on.
fn signals() -> Result<mpsc::Receiver<Signal>> {
    let (send, receive) = mpsc::channel(16);
    for passed in [Signal::INT, Signal::TERM, Signal::HUP, Signal::USR1, Signal::USR2] {
        // Under nohup, SIGHUP stays ignored, here and in the children.
        if passed == Signal::HUP && is_ignored(passed) {
            continue;
        }
        let mut coming =
            signal(SignalKind::from_raw(passed.as_raw())).context("cannot listen for signals")?;
        let send = send.clone();
        tokio::spawn(
            async move { while coming.recv().await.is_some() && send.send(passed).await.is_ok() {} },
        );
    }
    Ok(receive)
}

/// Returns whether the parent of this process has set a signal to be ignored.
fn is_ignored(signal: Signal) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    mask & (1 << (signal.as_raw() - 1)) != 0
}
