//! Starts and kills the worker processes of the demo. Every line of their output, and every exit, is returned as an
//! event.
//!
//! `rounds.rs` decides when a worker runs. Begin at [`WorkerProcesses::start_worker`], then `next_event`.

use std::collections::BTreeMap;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result};
use futures_util::future::OptionFuture;
use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncBufReadExt as _, AsyncRead, AsyncReadExt as _, BufReader};
use tokio::process::{Child, Command};
use tokio::sync::mpsc;

use super::super::launch::children::{BECOME_COMMAND, ProcessGuard};
use super::super::self_command;

/// The number of workers.
pub const WORKERS: u32 = 4;
/// The heartbeat timeout of the job. It is short, so that heartbeats are frequent: they are sent twice as often.
pub const HEARTBEAT_TIMEOUT: &str = "10s";
/// The maximum length of a worker's line; a longer one is truncated.
const LINE_MAX: u64 = 4096;

/// An event of a worker: a line or its exit.
pub enum WorkerEvent {
    Line(String),
    Ended(ExitStatus),
}

/// An event of one life of a task.
pub struct TaskWorkerEvent {
    pub task: u32,
    pub life: u64,
    pub event: WorkerEvent,
}

/// A running worker.
pub struct Worker {
    pid: Pid,
    /// The number of the life, which distinguishes the lives of a task.
    life: u64,
    /// The demo killed the worker or told it to end.
    pub expected: bool,
    /// The worker has taken part in a step.
    pub stepped: bool,
}

/// The processes of the workers.
pub struct WorkerProcesses {
    service: String,
    pause: Duration,
    guard: ProcessGuard,
    running: BTreeMap<u32, Worker>,
    coming: mpsc::Receiver<TaskWorkerEvent>,
    tell: mpsc::Sender<TaskWorkerEvent>,
    lives: u64,
}

/// Returns the command that starts this program again, without settings of the environment. The process dies with this one.
pub fn tied_command() -> Command {
    let mut command = Command::from(self_command::self_exec_command());
    command.arg(BECOME_COMMAND).arg("--parent").arg(std::process::id().to_string()).arg("--");
    command.args(self_command::self_exec_words());
    let settings = std::env::vars_os().filter(|(name, _)| {
        let name = name.to_string_lossy();
        name.starts_with("MUSTER_") || name.starts_with("JAX_")
    });
    for (name, _) in settings {
        command.env_remove(name);
    }
    command
}

impl WorkerProcesses {
    pub fn new(service: String, pause: Duration) -> Result<Self> {
        let (tell, coming) = mpsc::channel(256);
        let guard = ProcessGuard::start().context("cannot start the guard of the workers")?;
        Ok(Self { service, pause, guard, running: BTreeMap::new(), coming, tell, lives: 0 })
    }

    /// Starts a worker.
    pub fn start_worker(&mut self, task: u32) -> Result<()> {
        let mut command = tied_command();
        command.args(["worker", "--program", "exercise", "--service", &self.service]);
        command.arg("--task").arg(task.to_string()).arg("--tasks").arg(WORKERS.to_string());
        command.args(["--devices", "2", "--heartbeat-timeout", HEARTBEAT_TIMEOUT]);
        command.arg("--pause").arg(format!("{}ms", self.pause.as_millis()));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = command.process_group(0).kill_on_drop(true).spawn().context("cannot start a worker")?;
        let pid = child.id().and_then(|id| Pid::from_raw(i32::try_from(id).ok()?));
        let pid = pid.context("a worker has no process id")?;
        self.guard.add_process_group(pid);
        self.lives += 1;
        let life = self.lives;
        self.running.insert(task, Worker { pid, life, expected: false, stepped: false });
        tokio::spawn(forward_events(child, task, life, self.tell.clone()));
        Ok(())
    }

    /// Kills a worker with SIGKILL, if it runs. Returns its process id.
    pub fn kill_worker(&mut self, task: u32) -> Result<Option<Pid>> {
        let Some(worker) = self.running.get_mut(&task) else { return Ok(None) };
        worker.expected = true;
        kill_process(worker.pid, Signal::KILL).context("it cannot be killed")?;
        Ok(Some(worker.pid))
    }

    /// Sends a signal to every worker.
    pub fn signal_all(&self, signal: Signal) {
        for worker in self.running.values() {
            // The worker may have exited already.
            let _ = kill_process(worker.pid, signal);
        }
    }

    /// Returns the next event; `None` if there will be none.
    pub async fn next_event(&mut self) -> Option<TaskWorkerEvent> {
        self.coming.recv().await
    }

    /// Returns the running workers.
    pub fn running_workers(&mut self) -> &mut BTreeMap<u32, Worker> {
        &mut self.running
    }

    /// Returns this life of a worker, if it runs.
    pub fn find_worker(&mut self, task: u32, life: u64) -> Option<&mut Worker> {
        self.running.get_mut(&task).filter(|worker| worker.life == life)
    }

    /// Forgets this life of a worker, which has ended.
    pub fn remove_worker(&mut self, task: u32, life: u64) -> Option<Worker> {
        self.find_worker(task, life)?;
        let worker = self.running.remove(&task)?;
        self.guard.remove_process_group(worker.pid);
        Some(worker)
    }
}

/// Forwards the lines of a worker, and its exit.
async fn forward_events(mut child: Child, task: u32, life: u64, tell: mpsc::Sender<TaskWorkerEvent>) {
    let out = child.stdout.take().map(|stream| forward_lines(stream, task, life, tell.clone()));
    let err = child.stderr.take().map(|stream| forward_lines(stream, task, life, tell.clone()));
    tokio::join!(OptionFuture::from(out), OptionFuture::from(err));
    if let Ok(status) = child.wait().await {
        let _ = tell.send(TaskWorkerEvent { task, life, event: WorkerEvent::Ended(status) }).await;
    }
}

async fn forward_lines(
    stream: impl AsyncRead + Unpin,
    task: u32,
    life: u64,
    tell: mpsc::Sender<TaskWorkerEvent>,
) {
    let mut stream = BufReader::new(stream);
    loop {
        let mut line = Vec::new();
        match (&mut stream).take(LINE_MAX).read_until(b'\n', &mut line).await {
            Ok(0) | Err(_) => return,
            Ok(_) => {}
        }
        let line = String::from_utf8_lossy(&line).trim_end().to_owned();
        if line.is_empty() {
            continue;
        }
        if tell.send(TaskWorkerEvent { task, life, event: WorkerEvent::Line(line) }).await.is_err() {
            return;
        }
    }
}
