//! The keeper: a small parent process of a server, which holds the listening sockets and starts the server again when it
//! dies.
//!
//! `muster serve` is the keeper, and starts a child process, the *core*, which does everything else. The core restores its
//! state from the journal; without a journal there is no keeper. `keeper/channel.rs` connects both processes,
//! `keeper/core_end.rs` decides when another core starts, and `keeper/link.rs` is the core's side. `keeper/control.rs` and
//! `keeper/upgrade.rs` are for upgrades. Begin at [`run_keeper`].
//!
//! - The listening sockets stay open while no core serves. A client that connects meanwhile waits in their backlog, and is
//!   not refused. Without that, a heartbeat that is due just then would end a JAX process.
//! - A signal to the keeper is passed on to the core. The core has a process group of its own, so that Ctrl-C in a terminal
//!   reaches it once, and not a second time by the terminal, which would end it at once.
//! - The core dies with its keeper, so that the process which was started is the service.
//! - *An upgrade.* Another program first reads the journal in a trial, while the present core serves. If it can, the present core
//!   stops, and a core of the other program starts. If that does not serve, or ends soon, the former program is back. The
//!   keeper itself stays what it is.

mod channel;
mod control;
mod core_end;
mod link;
mod metrics;
mod upgrade;

use std::ffi::OsString;
use std::os::fd::AsFd as _;
use std::path::PathBuf;
use std::process::{ExitCode, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use rustix::process::{Pid, kill_process};
use tokio::process::{Child, Command};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::task::JoinHandle;

use super::listeners::{ListenAddress, listen_addresses};
use super::self_command;
use crate::clock;
use crate::config::Config;
use crate::engine::JOURNAL_ENCODING;
use channel::{CoreMessage, KeeperEnd, KeeperMessage, create_channel};
use control::{ControlSocket, UpgradeReply};
use core_end::{CoreEnd, CoreEndCause, NextStep, RestartPolicy};
use upgrade::{JournalCopy, try_program};

pub use channel::CoreTask;
pub use control::{UpgradeNews, UpgradeRequest, request_upgrade};
pub use link::KeeperLink;
pub use metrics::KeeperMetrics;
pub use upgrade::{TRIAL_FLAG, TrialReport};

/// The hidden flag of a core.
pub const CORE_FLAG: &str = "core";

/// How long an address may still be in use by a keeper that was killed, and its core.
const ENDING_PROCESS_WAIT: Duration = Duration::from_secs(1);

/// How long a core may take to stop for an upgrade, before it is killed.
const STOPPING_TIMEOUT: Duration = Duration::from_secs(30);
/// A program that has served for so long after an upgrade stays.
const PROBATION: Duration = Duration::from_secs(60);

/// Runs a server of this configuration with its journal in `folder`, and starts it again when it dies. Returns when it was asked
/// to stop.
pub fn run_keeper(config: &Config, folder: PathBuf) -> Result<ExitCode> {
    // On this thread, which lives as long as the process: a core is tied to the thread that started it.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start the loop of the keeper")?;
    runtime.block_on(async { Keeper::bind(config, folder)?.run().await })
}

/// A listening socket, and the name of its address.
struct KeptListener {
    name: String,
    socket: std::net::TcpListener,
}

/// A program that serves.
#[derive(Debug, Clone)]
struct Program {
    /// The program and its first arguments.
    words: Vec<OsString>,
    version: String,
    /// The encoding of the journal that it writes.
    encoding: u32,
}

/// An upgrade that was asked for.
struct Upgrade {
    reply: UpgradeReply,
    words: Vec<OsString>,
    phase: UpgradePhase,
}

enum UpgradePhase {
    /// The program reads the journal.
    Trial(JoinHandle<Result<TrialReport, String>>),
    /// The present core ends, after which the program serves. It is killed at this time.
    Stopping(Program, tokio::time::Instant),
}

/// The program before an upgrade, which serves again if the present one fails.
struct FormerProgram {
    program: Program,
    /// The journal as it was, if the present program writes another encoding.
    copy: Option<JournalCopy>,
    /// Who asked for the upgrade, until the present program serves.
    reply: Option<UpgradeReply>,
    /// The time from which on the present program stays.
    until: tokio::time::Instant,
}

/// The keeper of a server.
struct Keeper {
    /// The folder of the journal.
    folder: PathBuf,
    program: Program,
    former: Option<FormerProgram>,
    upgrade: Option<Upgrade>,
    /// Where upgrades are asked for, once a core has served.
    control: Option<ControlSocket>,
    listeners: Vec<KeptListener>,
    signals: ForwardedSignals,
    policy: RestartPolicy,
    task: CoreTask,
    /// Whether a signal asked the server to stop.
    stops: bool,
    /// Whether a core has ever served.
    has_served: bool,
}

/// A running core.
struct Core {
    process: Child,
    channel: KeeperEnd,
    serves_since: Option<Instant>,
    /// Its last panic.
    panic: Option<String>,
    /// Whether it has closed its end of the channel.
    is_silent: bool,
}

impl Keeper {
    fn bind(config: &Config, folder: PathBuf) -> Result<Self> {
        let bind = |at: &ListenAddress| {
            Ok(KeptListener { name: at.name(), socket: at.bind(ENDING_PROCESS_WAIT)? })
        };
        Ok(Self {
            listeners: listen_addresses(config).iter().map(bind).collect::<Result<_>>()?,
            folder,
            program: Program {
                words: self_command::self_exec_words(),
                version: env!("CARGO_PKG_VERSION").to_owned(),
                encoding: JOURNAL_ENCODING,
            },
            former: None,
            upgrade: None,
            control: None,
            signals: ForwardedSignals::listen()?,
            policy: RestartPolicy::default(),
            task: CoreTask { keeper: std::process::id(), ..CoreTask::default() },
            stops: false,
            has_served: false,
        })
    }

    async fn run(mut self) -> Result<ExitCode> {
        loop {
            let end = self.run_core().await?;
            let exit_code = ExitCode::from(end.cause.exit_code());
            if self.stops {
                return Ok(exit_code);
            }
            if self.change_program() || self.return_to_former_program(&end) {
                continue;
            }
            // A core that cannot serve at all has said why.
            if !self.has_served {
                return Ok(exit_code);
            }
            let (cause, served) = (end.cause, end.served);
            let next = self.policy.record_end(&end);
            self.task.ends.add(cause);
            self.task.previous_end = Some(end.to_string());
            match next {
                NextStep::GiveUp => {
                    tracing::error!(%cause, "the service ended again and again, and is not started any more");
                    return Ok(exit_code);
                }
                NextStep::Start { after, sets_last_input_aside } => {
                    tracing::error!(%cause, ?served, ?after, "the service has ended, and is started again");
                    self.task.sets_last_input_aside = sets_last_input_aside;
                    if self.is_stopped_within(after).await {
                        return Ok(ExitCode::SUCCESS);
                    }
                }
            }
        }
    }

    /// Runs one core until its end.
    async fn run_core(&mut self) -> Result<CoreEnd> {
        let began = clock::monotonic();
        let mut core = self.start_core().await?;
        loop {
            tokio::select! {
                status = core.process.wait() => {
                    let cause = CoreEndCause::from_status(status.context("cannot wait for the service")?);
                    // What it said last is still in the channel.
                    while let Ok(Ok(Some(message))) =
                        tokio::time::timeout(Duration::ZERO, core.channel.receive()).await
                    {
                        core.record_message(message);
                    }
                    let served = core.serves_since.map_or(Duration::ZERO, |since| since.elapsed());
                    return Ok(CoreEnd { cause, served, panic: core.panic });
                }
                message = core.channel.receive(), if !core.is_silent => match message {
                    Ok(Some(message)) => {
                        if message == CoreMessage::Serving {
                            self.on_serving(began.elapsed());
                        }
                        core.record_message(message);
                    }
                    Ok(None) | Err(_) => core.is_silent = true,
                },
                passed = self.signals.next() => {
                    self.stops |= passed.stops;
                    core.send_signal(passed.kind.as_raw_value());
                }
                (request, reply) = next_request(self.control.as_ref()), if self.upgrade.is_none() => {
                    let words: Vec<OsString> = request.words.into_iter().map(OsString::from).collect();
                    tracing::info!(program = ?words, "an upgrade is asked for");
                    let trial = tokio::spawn(try_program(words.clone()));
                    self.upgrade = Some(Upgrade { reply, words, phase: UpgradePhase::Trial(trial) });
                }
                step = next_upgrade_step(&mut self.upgrade) => match step {
                    UpgradeStep::Tried(tried) => if self.end_trial(tried) {
                        core.send_signal(SignalKind::terminate().as_raw_value());
                    },
                    UpgradeStep::StopOverdue => core.send_signal(rustix::process::Signal::KILL.as_raw()),
                },
                () = end_of_probation(self.former.as_ref()) => {
                    tracing::info!(version = self.program.version, "the upgraded program has served for {PROBATION:?}, and stays");
                    if let Some(FormerProgram { copy: Some(copy), .. }) = self.former.take() {
                        copy.remove();
                    }
                }
            }
        }
    }

    async fn start_core(&mut self) -> Result<Core> {
        self.task.starts += 1;
        let (channel, end_of_core) = create_channel().context("cannot create the channel to the service")?;
        let (program, words) = self.program.words.split_first().context("no program is known")?;
        let mut command = Command::new(program);
        command.args(words).args(self_command::arguments()).arg(format!("--{CORE_FLAG}"));
        command.stdin(Stdio::from(end_of_core)).process_group(0);
        let process = command.spawn().context("cannot start the service")?;
        // The command has a copy of the core's end, which would hide the end of the core.
        drop(command);
        let core = Core { process, channel, serves_since: None, panic: None, is_silent: false };
        // A core that has ended already takes no message; its status says more than the error.
        for KeptListener { name, socket } in &self.listeners {
            let message = KeeperMessage::Listener(name.clone());
            if core.channel.send(&message, Some(socket.as_fd())).await.is_err() {
                return Ok(core);
            }
        }
        let _ = core.channel.send(&KeeperMessage::Serve(self.task.clone()), None).await;
        Ok(core)
    }

    /// Records that a core serves, `after` its start.
    fn on_serving(&mut self, after: Duration) {
        self.has_served = true;
        if self.task.starts > 1 {
            tracing::info!(?after, version = self.program.version, "the service serves again");
        }
        if let Some(former) = &mut self.former
            && let Some(reply) = former.reply.take()
        {
            former.until = tokio::time::Instant::now() + PROBATION;
            reply.tell(&UpgradeNews::Done(format!(
                "version {} serves, {} ms after its start. If it ends within {} s, version {} is back.",
                self.program.version,
                after.as_millis(),
                PROBATION.as_secs(),
                former.program.version
            )));
        }
        if self.control.is_none() {
            match ControlSocket::listen(&self.folder) {
                Ok(control) => self.control = Some(control),
                Err(error) => tracing::warn!(%error, folder = %self.folder.display(), "`muster upgrade` cannot reach this service"),
            }
        }
    }

    /// Ends a trial. Returns whether the present core is to stop.
    fn end_trial(&mut self, tried: Result<TrialReport, String>) -> bool {
        let Some(upgrade) = self.upgrade.take() else { return false };
        let report = match tried {
            Ok(report) => report,
            Err(why) => {
                tracing::error!(why, "the upgrade is refused, and the service goes on as it is");
                upgrade.reply.tell(&UpgradeNews::Failed(format!("{why}. The service goes on as it is.")));
                return false;
            }
        };
        let TrialReport { version, encoding, inputs } = report;
        upgrade.reply.tell(&UpgradeNews::Step(format!(
            "version {version} can read the journal: it has applied {inputs} inputs to the last snapshot. The present process stops."
        )));
        let program = Program { words: upgrade.words.clone(), version, encoding };
        let deadline = tokio::time::Instant::now() + STOPPING_TIMEOUT;
        self.upgrade = Some(Upgrade { phase: UpgradePhase::Stopping(program, deadline), ..upgrade });
        true
    }

    /// Makes the other program the present one, if the core has ended for an upgrade. Returns whether it did.
    fn change_program(&mut self) -> bool {
        let Some(Upgrade { reply, phase: UpgradePhase::Stopping(program, _), .. }) =
            self.upgrade.take_if(|upgrade| matches!(upgrade.phase, UpgradePhase::Stopping(..)))
        else {
            return false;
        };
        let copy = if program.encoding == self.program.encoding {
            None
        } else {
            match JournalCopy::make(&self.folder) {
                Ok(copy) => Some(copy),
                Err(error) => {
                    reply.tell(&UpgradeNews::Failed(format!(
                        "the journal cannot be copied ({error}), and without a copy nobody could return to the present version. \
                         Version {} serves again.",
                        self.program.version
                    )));
                    return true;
                }
            }
        };
        self.task.previous_end =
            Some(format!("the process before this one, version {}, was stopped for an upgrade", self.program.version));
        self.task.sets_last_input_aside = false;
        let former = std::mem::replace(&mut self.program, program);
        let until = tokio::time::Instant::now() + PROBATION;
        self.former = Some(FormerProgram { program: former, copy, reply: Some(reply), until });
        true
    }

    /// Returns to the program before an upgrade, if the present one has ended too soon. Returns whether it did.
    fn return_to_former_program(&mut self, end: &CoreEnd) -> bool {
        let Some(former) = &self.former else { return false };
        let has_served = former.reply.is_none();
        // What the present program has answered must not be lost.
        if has_served && former.copy.is_some() {
            return false;
        }
        let Some(FormerProgram { program, copy, reply, .. }) = self.former.take() else { return false };
        if let Some(copy) = copy {
            if let Err(error) = copy.restore() {
                tracing::error!(%error, "the journal of before the upgrade cannot be restored; it is in before-upgrade");
            } else {
                copy.remove();
            }
        }
        let why = format!("version {} {}", self.program.version, end.cause);
        tracing::error!(why, version = program.version, "the upgrade has failed, and the former version serves again");
        if let Some(reply) = reply {
            reply.tell(&UpgradeNews::Failed(format!(
                "{why} before it served; the log of the service says more. Version {} serves again.",
                program.version
            )));
        }
        self.task.previous_end = Some(format!("the upgrade failed: {why}"));
        self.program = program;
        true
    }

    /// Waits for `pause`. Returns whether a signal asked the server to stop.
    async fn is_stopped_within(&mut self, pause: Duration) -> bool {
        let until = tokio::time::Instant::now() + pause;
        loop {
            tokio::select! {
                biased;
                passed = self.signals.next() => if passed.stops { return true },
                () = tokio::time::sleep_until(until) => return false,
            }
        }
    }
}

impl Core {
    fn record_message(&mut self, message: CoreMessage) {
        match message {
            CoreMessage::Serving => self.serves_since = Some(clock::monotonic()),
            CoreMessage::Panicked(text) => self.panic = Some(text),
        }
    }

    fn send_signal(&self, signal: i32) {
        let process = self.process.id().and_then(|id| Pid::from_raw(i32::try_from(id).ok()?));
        let signal = rustix::process::Signal::from_named_raw(signal);
        if let (Some(process), Some(signal)) = (process, signal) {
            // It may end just now.
            let _ = kill_process(process, signal);
        }
    }
}

/// Waits for a request for an upgrade; for ever if nobody can make one.
async fn next_request(control: Option<&ControlSocket>) -> (UpgradeRequest, UpgradeReply) {
    match control {
        Some(control) => control.next_request().await,
        None => std::future::pending().await,
    }
}

/// What happens next to an upgrade.
enum UpgradeStep {
    /// The trial has ended.
    Tried(Result<TrialReport, String>),
    /// The core has not stopped in time.
    StopOverdue,
}

/// Waits for the next step of an upgrade; for ever if there is none.
async fn next_upgrade_step(upgrade: &mut Option<Upgrade>) -> UpgradeStep {
    match upgrade.as_mut().map(|upgrade| &mut upgrade.phase) {
        Some(UpgradePhase::Trial(trial)) => {
            UpgradeStep::Tried(trial.await.unwrap_or_else(|error| Err(error.to_string())))
        }
        Some(UpgradePhase::Stopping(_, deadline)) => {
            tokio::time::sleep_until(*deadline).await;
            *deadline += STOPPING_TIMEOUT;
            UpgradeStep::StopOverdue
        }
        None => std::future::pending().await,
    }
}

/// Waits until an upgraded program has served for long enough; for ever if none serves.
async fn end_of_probation(former: Option<&FormerProgram>) {
    match former {
        Some(former) if former.reply.is_none() => tokio::time::sleep_until(former.until).await,
        _ => std::future::pending().await,
    }
}

/// The signals that the keeper passes on.
struct ForwardedSignals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
}

/// A signal to be passed on.
struct ForwardedSignal {
    kind: SignalKind,
    /// Whether it asks the server to stop.
    stops: bool,
}

impl ForwardedSignals {
    fn listen() -> Result<Self> {
        let listen = |kind| signal(kind).context("cannot listen for signals");
        Ok(Self {
            terminate: listen(SignalKind::terminate())?,
            interrupt: listen(SignalKind::interrupt())?,
            hangup: listen(SignalKind::hangup())?,
        })
    }

    async fn next(&mut self) -> ForwardedSignal {
        tokio::select! {
            _ = self.terminate.recv() => ForwardedSignal { kind: SignalKind::terminate(), stops: true },
            _ = self.interrupt.recv() => ForwardedSignal { kind: SignalKind::interrupt(), stops: true },
            _ = self.hangup.recv() => ForwardedSignal { kind: SignalKind::hangup(), stops: false },
        }
    }
}
