//! Supervises the processes of a launch: starts failed ones again or begins the next run, passes signals on, and
//! computes the exit code.
//!
//! `launch/server.rs` starts the server. Begin at `Supervisor::run`.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
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

use super::super::nccl_plugin::NCCL_PLUGIN_VARIABLE;
use super::super::self_command;
use super::children::{BECOME_COMMAND, ProcessGuard};
use super::host_identities::IdentityPublisher;
use super::prefix_output::{SharedOutput, forward_prefixed_lines};
use super::server::LaunchServer;
use crate::clock::Clock;
use crate::coordination::Timestamp;
use crate::text::{UntrustedText, format_approximate_duration, format_exact_duration};

/// The variable that turns off the detection by JAX programs: `0`.
const JAX_DETECTION: &str = "MUSTER_JAX_DETECTION";
/// The variable that tells JAX which devices of the machine a process uses.
const LOCAL_DEVICES: &str = "JAX_LOCAL_DEVICE_IDS";
/// The time that the other tasks have to fail by themselves, with messages of their own, after a task failed.
const FATE_GRACE: Duration = Duration::from_secs(3);
/// The time that output may still arrive after its process has exited: a process that left the group may hold
/// the pipe.
const OUTPUT_DRAIN_TIMEOUT: Duration = Duration::from_secs(2);

/// The processes to run, and the rules for restarts.
pub struct LaunchPlan {
    pub command: Vec<OsString>,
    /// The task of each process.
    pub tasks: Vec<u32>,
    /// The number of tasks of the job.
    pub job_tasks: u32,
    /// The identity of this host, if the processes should take it from the launch.
    pub host_id: Option<String>,
    /// NCCL's profiler plug-in, if the processes should load it.
    pub nccl_plugin: Option<PathBuf>,
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
    fn from_status(status: ExitStatus) -> Self {
        match (status.code(), status.signal()) {
            (Some(code), _) => Self::Code(u8::try_from(code).unwrap_or(u8::MAX)),
            (None, Some(signal)) => Self::Signal(signal),
            (None, None) => Self::Code(u8::MAX),
        }
    }

    fn exit_code(self) -> u8 {
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
    slot: usize,
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
    identities: IdentityPublisher,
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
    slot: usize,
    end: ExitReason,
}

impl Supervisor {
    /// Prepares a launch without starting a process.
    pub fn new(plan: LaunchPlan, target: LaunchServer, identities: IdentityPublisher) -> Result<Self> {
        let (exited, exits) = mpsc::channel(plan.tasks.len());
        Ok(Self {
            slots: plan.tasks.iter().map(|_| TaskSlot::Idle).collect(),
            plan,
            server: target,
            identities,
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
        let mut signals = listen_for_signals()?;
        self.err
            .write_launch_line(&format!("{} task(s), {}", self.plan.tasks.len(), self.server.summary_line()))
            .await;
        let watched = self.run_until_processes_end(&mut signals).await;
        if watched.is_err() {
            self.signal_all(Signal::KILL);
        }
        self.drain_output().await;
        let code = self.exit_code();
        let summary = self.summary_text().await;
        self.err.write_launch_line(&summary).await;
        let Self { server: target, identities, out, err, .. } = self;
        identities.stop().await;
        target.stop().await;
        out.finish().await;
        err.finish().await;
        watched.map(|()| code)
    }

    async fn run_until_processes_end(&mut self, signals: &mut mpsc::Receiver<Signal>) -> Result<()> {
        self.start_all_processes()?;
        loop {
            tokio::select! {
                biased;
                Some(exit) = self.exits.recv() => self.on_process_exit(exit).await?,
                Some(signal) = signals.recv() => self.on_signal(signal).await,
                () = sleep_until(&mut self.timer) => self.escalate_stop().await,
            }
            if self.running_processes().next().is_none() && !self.start_next_run().await? {
                return Ok(());
            }
        }
    }

    fn start_all_processes(&mut self) -> Result<()> {
        self.runs += 1;
        for slot in 0..self.plan.tasks.len() {
            self.start_process(slot)?;
        }
        Ok(())
    }

    /// Starts one process. It must be called on the main thread, because the child's death signal is tied to
    /// that thread.
    fn start_process(&mut self, slot: usize) -> Result<()> {
        let Some(task) = self.plan.tasks.get(slot).copied() else { return Ok(()) };
        let mut command = Command::from(self_command::self_exec_command());
        command.arg(BECOME_COMMAND).arg("--parent").arg(std::process::id().to_string());
        if let Some(soft) = self.plan.open_files {
            command.arg("--open-files").arg(soft.to_string());
        }
        command.arg("--").args(&self.plan.command);
        command
            .env("JAX_COORDINATOR_ADDRESS", self.server.coordinator_address())
            .env("JAX_COORDINATOR_BIND_ADDRESS", "127.0.0.1:0")
            .env("MUSTER_PROCESS_ID", task.to_string())
            .env("MUSTER_NUM_PROCESSES", self.plan.job_tasks.to_string())
            .env("MUSTER_LOCAL_PROCESS_ID", slot.to_string())
            .env("MUSTER_SERVER", self.server.http_url())
            .env("MUSTER_JOB", self.server.job_name().as_str());
        if std::env::var_os(JAX_DETECTION).is_none_or(|value| value != "0") {
            set_jax_detection_env(&mut command, (task, self.plan.job_tasks), (slot, self.plan.tasks.len()));
        }
        if let Some(host) = &self.plan.host_id {
            command.env("MUSTER_HOST_ID", host);
        }
        if let Some(file) = &self.plan.nccl_plugin {
            command.env(NCCL_PLUGIN_VARIABLE, file);
        }
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
        self.guard.add_process_group(pid);
        if let Some(stdout) = child.stdout.take() {
            self.pumps.spawn(forward_prefixed_lines(stdout, task, self.out.line_sender()));
        }
        if let Some(stderr) = child.stderr.take() {
            self.pumps.spawn(forward_prefixed_lines(stderr, task, self.err.line_sender()));
        }
        let exited = self.exited.clone();
        tokio::spawn(async move {
            let end = child.wait().await.map_or(ExitReason::Code(u8::MAX), ExitReason::from_status);
            let _ = exited.send(ProcessExit { slot, end }).await;
        });
        if let Some(state) = self.slots.get_mut(slot) {
            *state = TaskSlot::Running(RunningProcess { pid, began: self.clock.now() });
        }
        self.identities.on_process_started(task, slot);
        Ok(())
    }

    fn running_processes(&self) -> impl Iterator<Item = &RunningProcess> {
        self.slots.iter().filter_map(|slot| match slot {
            TaskSlot::Running(process) => Some(process),
            TaskSlot::Idle | TaskSlot::Ended(_) => None,
        })
    }

    async fn on_process_exit(&mut self, ProcessExit { slot, end }: ProcessExit) -> Result<()> {
        let Some((state, task)) = self.slots.get_mut(slot).zip(self.plan.tasks.get(slot).copied()) else {
            return Ok(());
        };
        let TaskSlot::Running(process) = std::mem::replace(state, TaskSlot::Ended(end)) else {
            return Ok(());
        };
        self.identities.on_process_exited(task);
        // Descendants that the process left behind end with it.
        let _ = kill_process_group(process.pid, Signal::KILL);
        self.guard.remove_process_group(process.pid);
        if end == ExitReason::Code(0) {
            return Ok(());
        }
        let failed = FailedProcess { slot, task, end, after: self.clock.now().since(process.began) };
        self.failed.push(failed);
        match self.phase {
            SupervisorPhase::Running if self.plan.recoverable => self.restart_task(failed).await,
            SupervisorPhase::Running => {
                self.fail_run(failed).await;
                Ok(())
            }
            SupervisorPhase::Failed(_) | SupervisorPhase::Interrupted(..) => Ok(()),
        }
    }

    /// Handles a failure in a recoverable job: starts the task again, if a restart is left.
    async fn restart_task(&mut self, failed: FailedProcess) -> Result<()> {
        if self.restarts == self.plan.max_restarts {
            let others = self.running_processes().count();
            let no_more = self.no_more_restarts_text();
            self.err.write_launch_line(&format!("{failed}; {no_more}; {others} other task(s) go on")).await;
            return Ok(());
        }
        self.restarts += 1;
        self.err
            .write_launch_line(&format!("{failed}; starting it again ({})", self.restart_count_text()))
            .await;
        self.failed.retain(|old| old.task != failed.task);
        self.start_process(failed.slot)
    }

    /// Handles a failure in a job whose tasks share their fate: ends the other tasks.
    async fn fail_run(&mut self, failed: FailedProcess) {
        self.phase = SupervisorPhase::Failed(StopStage::Waiting);
        self.timer = Some(Box::pin(tokio::time::sleep(FATE_GRACE)));
        let others = self.running_processes().count();
        if others > 0 {
            let time = format_exact_duration(FATE_GRACE);
            self.err
                .write_launch_line(&format!(
                    "{failed}; {others} other task(s) have {time} to end by themselves"
                ))
                .await;
        } else {
            self.err.write_launch_line(&failed.to_string()).await;
        }
    }

    /// Starts the next run, if the last one failed and a restart is left. Returns whether it did.
    async fn start_next_run(&mut self) -> Result<bool> {
        let SupervisorPhase::Failed(_) = self.phase else { return Ok(false) };
        if self.restarts == self.plan.max_restarts {
            return Ok(false);
        }
        self.restarts += 1;
        self.drain_output().await;
        self.server.wait_until_tasks_are_gone(FATE_GRACE).await;
        self.failed.clear();
        self.phase = SupervisorPhase::Running;
        self.timer = None;
        let (tasks, count) = (self.plan.tasks.len(), self.restart_count_text());
        self.err.write_launch_line(&format!("starting all {tasks} again ({count})")).await;
        self.start_all_processes()?;
        Ok(true)
    }

    fn restart_count_text(&self) -> String {
        format!("restart {} of {}", self.restarts, self.plan.max_restarts)
    }

    fn no_more_restarts_text(&self) -> &'static str {
        if self.plan.max_restarts == 0 { "no restarts were asked for" } else { "no restarts are left" }
    }

    async fn on_signal(&mut self, signal: Signal) {
        if matches!(signal, Signal::USR1 | Signal::USR2) {
            // The signal goes to the program alone: processes that it started would usually die of it.
            self.running_processes().for_each(|process| _ = kill_process(process.pid, signal));
            return;
        }
        match self.phase {
            SupervisorPhase::Interrupted(first, _) if signal == Signal::INT => {
                self.phase = SupervisorPhase::Interrupted(first, StopStage::Killed);
                self.timer = None;
                self.err.write_launch_line("interrupted again; killing what is left").await;
                self.signal_all(Signal::KILL);
            }
            SupervisorPhase::Interrupted(..) => self.signal_all(signal),
            SupervisorPhase::Running | SupervisorPhase::Failed(_) => {
                self.phase = SupervisorPhase::Interrupted(signal, StopStage::Told);
                self.timer = Some(Box::pin(tokio::time::sleep(self.plan.kill_after)));
                self.signal_all(signal);
                let (name, time) =
                    (signal_name(signal.as_raw()), format_exact_duration(self.plan.kill_after));
                let again = if signal == Signal::INT { " (or when interrupted again)" } else { "" };
                let say = format!("passed {name} on; what has not ended after {time} is killed{again}");
                self.err.write_launch_line(&say).await;
            }
        }
    }

    /// Takes the next stage of stopping when the time of the present one is over.
    async fn escalate_stop(&mut self) {
        self.timer = None;
        let left = self.running_processes().count();
        if let SupervisorPhase::Failed(ending @ StopStage::Waiting) = &mut self.phase {
            *ending = StopStage::Told;
            self.timer = Some(Box::pin(tokio::time::sleep(self.plan.kill_after)));
            self.err.write_launch_line(&format!("ending {left} other task(s) with SIGTERM")).await;
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
            .write_launch_line(&format!(
                "killing {left} task(s) that did not end within {}",
                format_exact_duration(self.plan.kill_after)
            ))
            .await;
        self.signal_all(Signal::KILL);
    }

    fn signal_all(&self, signal: Signal) {
        // A process that has just exited misses the signal.
        self.running_processes().for_each(|process| _ = kill_process_group(process.pid, signal));
    }

    /// Waits for the remaining output.
    async fn drain_output(&mut self) {
        let all = async { while self.pumps.join_next().await.is_some() {} };
        if tokio::time::timeout(OUTPUT_DRAIN_TIMEOUT, all).await.is_err() {
            self.pumps.shutdown().await;
        }
    }

    fn exit_code(&self) -> u8 {
        match self.phase {
            SupervisorPhase::Interrupted(signal, _) => ExitReason::Signal(signal.as_raw()).exit_code(),
            SupervisorPhase::Running | SupervisorPhase::Failed(_) => {
                self.failed.first().map_or(0, |failed| failed.end.exit_code())
            }
        }
    }

    async fn summary_text(&self) -> String {
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
            && let Some(cause) = self.server.fetch_first_cause().await
        {
            let whose = cause.task.map_or_else(String::new, |task| format!("task {task}: "));
            text.push_str(&format!("; first cause: {whose}{}", UntrustedText::from(&*cause.why)));
        }
        text
    }
}

impl fmt::Display for FailedProcess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "task {} failed ({}) after {}",
            self.task,
            self.end,
            format_approximate_duration(self.after)
        )
    }
}

/// Sets the variables from which `jax.distributed.initialize()` learns its place in every release, with no argument and no
/// import. JAX knows no variables of its own for the number of processes, so these are those of Open MPI 4.
fn set_jax_detection_env(command: &mut Command, (task, tasks): (u32, u32), (local, locals): (usize, usize)) {
    command
        // JAX checks that it is set, and reads it only without JAX_COORDINATOR_ADDRESS.
        .env("OMPI_MCA_orte_hnp_uri", "muster")
        .env("OMPI_COMM_WORLD_SIZE", tasks.to_string())
        .env("OMPI_COMM_WORLD_RANK", task.to_string())
        .env("OMPI_COMM_WORLD_LOCAL_RANK", local.to_string())
        // With version 5 JAX would ask mpi4py instead.
        .env_remove("OMPI_VERSION");
    // JAX gives each process the GPU of its local number. One process alone has all of them.
    let gpus = visible_gpu_count();
    if locals == 1 && gpus > 1 && std::env::var_os(LOCAL_DEVICES).is_none() {
        let ids: Vec<String> = (0..gpus).map(|id| id.to_string()).collect();
        command.env(LOCAL_DEVICES, ids.join(","));
    }
}

/// Returns the number of NVIDIA GPUs that a process sees.
fn visible_gpu_count() -> usize {
    match std::env::var("CUDA_VISIBLE_DEVICES") {
        Ok(listed) => listed.split(',').filter(|id| !id.trim().is_empty()).count(),
        Err(_) => (0..64).take_while(|id| Path::new(&format!("/dev/nvidia{id}")).exists()).count(),
    }
}

async fn sleep_until(timer: &mut Option<Pin<Box<Sleep>>>) {
    match timer {
        Some(timer) => timer.await,
        None => std::future::pending().await,
    }
}

/// Returns one queue of all signals that a launch passes on.
fn listen_for_signals() -> Result<mpsc::Receiver<Signal>> {
    let (send, receive) = mpsc::channel(16);
    for passed in [Signal::INT, Signal::TERM, Signal::HUP, Signal::USR1, Signal::USR2] {
        // Under nohup, SIGHUP stays ignored, here and in the children.
        if passed == Signal::HUP && is_signal_ignored(passed) {
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
fn is_signal_ignored(signal: Signal) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    mask & (1 << (signal.as_raw() - 1)) != 0
}
