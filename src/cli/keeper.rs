//! The keeper: a small parent process of a server, which holds the listening sockets and starts the server again when it
//! dies.
//!
//! `muster serve` is the keeper, and starts a child process, the *core*, which does everything else. The core restores its
//! state from the journal; a server without a journal has no keeper. `keeper/channel.rs` connects both processes,
//! `keeper/core_end.rs` decides when another core starts, and `keeper/link.rs` is the core's side. `keeper/control.rs`,
//! `keeper/program.rs` and `keeper/upgrade.rs` are for upgrades. Begin at [`run_keeper`].
//!
//! - The listening sockets stay open while no core serves. A client that connects meanwhile waits in their backlog, and is
//!   not refused. Without that, a heartbeat that is due just then would end a JAX process.
//! - The keeper also holds a descriptor of each plaintext connection of the gRPC port, and memory in which the core writes down
//!   what the next one has to know of them (`keeper/held_connections.rs`). So these connections go on when the core dies.
//! - Signals that stop or reload are for the keeper, which tells the core. The core has a process group of its own, so that
//!   Ctrl-C in a terminal does not reach it directly. A supervisor may send a signal to both: so a second request to stop,
//!   which ends the core at once, counts only if it comes from the keeper.
//! - The core dies with its keeper, so that the process which was started is the service.
//! - *An upgrade.* Another program first reads the journal in a trial, while the present core serves. If it can, the present core
//!   ends, and a core of the other program starts, which continues the connections if both programs know the same version of
//!   them. If that does not serve, or ends soon, the former program is back, unless the other one has answered in an encoding of the journal that the former cannot read. The keeper itself stays what it is.

mod channel;
mod control;
mod core_end;
mod held_connections;
mod link;
mod metrics;
mod program;
mod upgrade;

use std::os::fd::{AsFd as _, OwnedFd};
use std::path::PathBuf;
use std::process::{ExitCode, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result};
use muster_journal::JournalCopy;
use muster_kept::HeldSlot;
use rustix::process::{Pid, kill_process};
use tokio::process::Child;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until, timeout};

use super::listeners::{ENDING_PROCESS_WAIT, ListenAddress, listen_addresses};
use super::self_command;
use super::stop_signals::{StopSignal, StopSignals};
use crate::config::Config;
use crate::engine::JOURNAL_ENCODING;
use channel::{CoreMessage, KeeperChannel, KeeperMessage, create_channel};
use control::{ControlSocket, UpgradeReply};
use core_end::{CoreEnd, CoreEndCause, NextStep, RestartPolicy};
use held_connections::HeldConnections;
use program::Program;
use upgrade::try_program;

pub use channel::CoreStart;
pub use control::{UpgradeNews, UpgradeRequest, request_upgrade};
pub use link::KeeperLink;
pub use metrics::KeeperMetrics;
pub use upgrade::{TRIAL_FLAG, TrialReport};

/// The hidden flag of a core.
pub const CORE_FLAG: &str = "core";

/// How long a core may take to read what it gets at its start.
const START_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a core may take to end at once, before it is killed.
const END_TIMEOUT: Duration = Duration::from_secs(2);
/// How long a core may take to stop for an upgrade, beyond its stop timeout, before it is killed.
const STOP_MARGIN: Duration = Duration::from_secs(30);
/// How long an upgraded program may take until it serves, before it is killed.
const SERVING_TIMEOUT: Duration = Duration::from_secs(120);
/// The time between two looks for connections that have ended.
const SWEEP_INTERVAL: Duration = Duration::from_secs(1);
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

/// An upgrade that was asked for.
struct Upgrade {
    reply: UpgradeReply,
    phase: UpgradePhase,
}

enum UpgradePhase {
    /// The program reads the journal.
    Trial(JoinHandle<Result<(Program, u64), String>>),
    /// The present core ends, after which the program serves.
    Stopping(Box<Program>),
}

/// The program before an upgrade, which serves again if the present one fails.
struct FormerProgram {
    program: Program,
    /// The journal as it was, if the present program writes another encoding.
    copy: Option<JournalCopy>,
    phase: ProbationPhase,
}

enum ProbationPhase {
    /// The present program must serve before this time. The command that asked for the upgrade waits for that.
    Starting(UpgradeReply, Instant),
    /// The present program stays if it serves until this time.
    Serving(Instant),
}

/// The keeper of a server.
struct Keeper {
    /// The folder of the journal.
    folder: PathBuf,
    stop_timeout: Duration,
    program: Program,
    former: Option<FormerProgram>,
    upgrade: Option<Upgrade>,
    /// Where upgrades are asked for, once a core has served.
    control: Option<ControlSocket>,
    listeners: Vec<KeptListener>,
    /// `None`: connections end with their core.
    connections: Option<HeldConnections>,
    stops: StopSignals,
    hangups: Signal,
    policy: RestartPolicy,
    start: CoreStart,
    /// Whether connections of the gRPC port may have TLS, so that they end with their core.
    has_grpc_tls: bool,
    /// Whether a signal asked the server to stop.
    is_stopping: bool,
}

/// A running core.
struct Core {
    process: Child,
    channel: KeeperChannel,
    began: Instant,
    serves_since: Option<Instant>,
    /// Its last panic.
    panic: Option<String>,
    /// Whether it has closed its end of the channel.
    is_silent: bool,
    /// Whether it was asked to stop.
    is_stopping: bool,
    /// The time at which it is killed.
    killed_at: Option<Instant>,
}

impl Keeper {
    fn bind(config: &Config, folder: PathBuf) -> Result<Self> {
        let bind =
            |at: &ListenAddress| Ok(KeptListener { name: at.name(), socket: at.bind(ENDING_PROCESS_WAIT)? });
        Ok(Self {
            listeners: listen_addresses(config).iter().map(bind).collect::<Result<_>>()?,
            folder,
            stop_timeout: config.server.stop_timeout,
            program: Program::this(JOURNAL_ENCODING),
            former: None,
            upgrade: None,
            control: None,
            connections: HeldConnections::create()
                .inspect_err(|error| tracing::warn!(%error, "connections end when the service dies"))
                .ok(),
            stops: StopSignals::listen()?,
            hangups: signal(SignalKind::hangup()).context("cannot listen for signals")?,
            policy: RestartPolicy::default(),
            start: CoreStart { keeper: std::process::id(), ..CoreStart::default() },
            has_grpc_tls: config.server.grpc_tls.cert.is_some(),
            is_stopping: false,
        })
    }

    async fn run(mut self) -> Result<ExitCode> {
        loop {
            let end = match self.run_core().await {
                Ok(end) => end,
                Err(error) if !self.start.is_announced => return Err(error),
                Err(error) => CoreEnd::not_started(&error),
            };
            let exit_code = ExitCode::from(end.cause.exit_code());
            if self.is_stopping {
                return Ok(exit_code);
            }
            if self.change_program() {
                continue;
            }
            self.start.ends.add(&end.cause);
            if self.return_to_former_program(&end)? {
                continue;
            }
            // A core that cannot serve at all has said why.
            if !self.start.is_announced && matches!(end.cause, CoreEndCause::Exited(_)) {
                return Ok(exit_code);
            }
            let next = self.policy.record_end(&end);
            let (cause, served) = (&end.cause, end.served);
            match next {
                NextStep::GiveUp => {
                    tracing::error!(%cause, "the service ended again and again, and is not started any more");
                    return Ok(exit_code);
                }
                NextStep::Start { after, sets_last_input_aside, ends_connections } => {
                    tracing::error!(%cause, ?served, ?after, "the service has ended, and is started again");
                    self.start.sets_last_input_aside = sets_last_input_aside;
                    self.start.ends_connections = ends_connections;
                    self.start.previous_end = Some(end.to_string());
                    if self.is_stopped_within(after).await {
                        return Ok(ExitCode::SUCCESS);
                    }
                }
            }
        }
    }

    /// Runs one core until its end.
    ///
    /// # Errors
    /// If it cannot be started.
    async fn run_core(&mut self) -> Result<CoreEnd> {
        let mut core = self.start_core().await?;
        let mut sweep = tokio::time::interval(SWEEP_INTERVAL);
        loop {
            let (killed_at, end_of_probation) = (core.killed_at, self.end_of_probation());
            tokio::select! {
                status = core.process.wait() => {
                    let cause = CoreEndCause::from_status(status.context("cannot wait for the service")?);
                    // Its last messages are still in the channel.
                    while let Some((message, socket)) = core.channel.try_receive() {
                        self.on_message(&mut core, message, socket);
                    }
                    let served = core.serves_since.map_or(Duration::ZERO, |since| since.elapsed());
                    return Ok(CoreEnd { cause, served, panic: core.panic });
                }
                message = core.channel.receive(), if !core.is_silent => match message {
                    Ok(Some((message, socket))) => self.on_message(&mut core, message, socket),
                    Ok(None) | Err(_) => core.is_silent = true,
                },
                stop = self.stops.next() => self.on_stop(&mut core, stop),
                _ = self.hangups.recv() => core.reload(),
                (request, reply) = next_request(self.control.as_mut()) => self.begin_upgrade(request, reply),
                tried = end_of_trial(&mut self.upgrade) => self.end_trial(tried, &mut core),
                () = sleep_until_some(killed_at) => {
                    tracing::warn!("the service does not end, and is killed");
                    core.killed_at = None;
                    core.send_signal(rustix::process::Signal::KILL.as_raw());
                }
                () = sleep_until_some(end_of_probation) => self.end_probation(&core),
                _ = sweep.tick() => {
                    if let Some(connections) = &mut self.connections {
                        connections.release_ended();
                    }
                }
            }
        }
    }

    async fn start_core(&mut self) -> Result<Core> {
        let (channel, end_of_core) = create_channel().context("cannot create the channel to the service")?;
        let process = self.program.spawn(|command| {
            command.args(self_command::arguments()).arg(format!("--{CORE_FLAG}"));
            // The command has a copy of the core's end, which is dropped with it: it would hide the end of the core.
            command.stdin(end_of_core.try_clone().map_or_else(|_| Stdio::null(), Stdio::from));
            command.process_group(0);
        });
        let process = process.context("cannot start the service")?;
        drop(end_of_core);
        let core = Core {
            process,
            channel,
            began: Instant::now(),
            serves_since: None,
            panic: None,
            is_silent: false,
            is_stopping: false,
            killed_at: None,
        };
        let handed_over = async {
            for KeptListener { name, socket } in &self.listeners {
                let message = KeeperMessage::Listener(name.clone());
                core.channel.send(&message, &[socket.as_fd()]).await?;
            }
            if let Some(connections) = &self.connections {
                connections.hand_over(&core.channel).await?;
            }
            core.channel.send(&KeeperMessage::Serve(self.start.clone()), &[]).await
        };
        if !matches!(timeout(START_TIMEOUT, handed_over).await, Ok(Ok(()))) {
            // If it has ended already, its status says more. If it does not read, it never serves.
            core.send_signal(rustix::process::Signal::KILL.as_raw());
        }
        Ok(core)
    }

    fn on_message(&mut self, core: &mut Core, message: CoreMessage, socket: Option<OwnedFd>) {
        match message {
            CoreMessage::Hold(slot, serial) => {
                if let (Some(connections), Some(socket)) = (&mut self.connections, socket) {
                    connections.hold(HeldSlot { slot, serial }, socket);
                }
            }
            CoreMessage::ReleaseAll => self.connections.iter_mut().for_each(HeldConnections::release_all),
            CoreMessage::Release(slot, serial) => {
                if let Some(connections) = &mut self.connections {
                    connections.release(HeldSlot { slot, serial });
                }
            }
            CoreMessage::Serving => {
                core.serves_since = Some(Instant::now());
                self.on_serving(core.began.elapsed());
            }
            CoreMessage::SetAside(records) => self.start.set_aside.extend(records),
            CoreMessage::Panicked(text) => core.panic = Some(text),
        }
    }

    /// Records that a core serves, `after` its start.
    fn on_serving(&mut self, after: Duration) {
        if self.start.is_announced {
            tracing::info!(?after, version = self.program.version, "the service serves again");
        }
        self.start.is_announced = true;
        if let Some(former) = &mut self.former
            && let ProbationPhase::Starting(..) = former.phase
        {
            let serving = ProbationPhase::Serving(Instant::now() + PROBATION);
            if let ProbationPhase::Starting(reply, _) = std::mem::replace(&mut former.phase, serving) {
                let way_back = match former.copy {
                    None => format!(
                        " If it ends within {} s, version {} is back.",
                        PROBATION.as_secs(),
                        former.program.version
                    ),
                    Some(_) => String::new(),
                };
                reply.send(&UpgradeNews::Done(format!(
                    "version {} serves, {} ms after its start.{way_back}",
                    self.program.version,
                    after.as_millis()
                )));
            }
        }
        if self.control.is_none() {
            match ControlSocket::listen(&self.folder) {
                Ok(control) => self.control = Some(control),
                Err(error) => {
                    tracing::warn!(%error, folder = %self.folder.display(), "`muster upgrade` cannot reach this service");
                }
            }
        }
    }

    fn on_stop(&mut self, core: &mut Core, stop: StopSignal) {
        let is_second = std::mem::replace(&mut self.is_stopping, true);
        if let Some(Upgrade { reply, .. }) = self.upgrade.take() {
            reply.send(&UpgradeNews::Failed("the service stops".to_owned()));
        }
        if is_second {
            core.end_at_once(stop);
        } else {
            core.stop(stop);
        }
    }

    fn begin_upgrade(&mut self, request: UpgradeRequest, reply: UpgradeReply) {
        let starting =
            self.former.as_ref().is_some_and(|former| matches!(former.phase, ProbationPhase::Starting(..)));
        let refusal = match () {
            () if self.is_stopping => "the service stops",
            () if self.upgrade.is_some() || starting => "another upgrade is under way",
            () => {
                tracing::info!(program = ?request.command, "an upgrade is asked for");
                let trial = tokio::spawn(try_program(request.command));
                self.upgrade = Some(Upgrade { reply, phase: UpgradePhase::Trial(trial) });
                return;
            }
        };
        reply.send(&UpgradeNews::Failed(refusal.to_owned()));
    }

    /// Ends a trial: if the program can take over, the core stops for it.
    fn end_trial(&mut self, tried: Result<(Program, u64), String>, core: &mut Core) {
        let Some(upgrade) = self.upgrade.take() else { return };
        match tried {
            Ok((program, inputs)) => {
                let version = program.kept_connections;
                let knows_connections = version != 0 && version == self.program.kept_connections;
                let continues = self.connections.is_some() && !self.has_grpc_tls && knows_connections;
                upgrade.reply.send(&UpgradeNews::Step(format!(
                    "version {} can read the journal: it has applied {inputs} inputs to the last snapshot. The present process \
                     ends{}.",
                    program.version,
                    if continues { ", and its connections go on" } else { ", and its connections with it" }
                )));
                self.upgrade = Some(Upgrade { phase: UpgradePhase::Stopping(Box::new(program)), ..upgrade });
                if continues {
                    // A stop in good order would end the connections, which a kill does not.
                    core.send_signal(rustix::process::Signal::KILL.as_raw());
                } else {
                    core.stop(StopSignal::TERMINATE);
                    core.killed_at = Some(Instant::now() + self.stop_timeout + STOP_MARGIN);
                }
            }
            Err(why) => {
                tracing::error!(why, "the upgrade is refused, and the service goes on as it is");
                upgrade.reply.send(&UpgradeNews::Failed(format!("{why}. The service goes on as it is.")));
            }
        }
    }

    /// Makes the other program the present one, if the core has ended for an upgrade. Returns whether it did.
    fn change_program(&mut self) -> bool {
        let is_stopping = |upgrade: &mut Upgrade| matches!(upgrade.phase, UpgradePhase::Stopping(_));
        let Some(Upgrade { reply, phase: UpgradePhase::Stopping(program) }) =
            self.upgrade.take_if(is_stopping)
        else {
            return false;
        };
        let present = &self.program.version;
        let copy = if program.encoding == self.program.encoding {
            None
        } else {
            match JournalCopy::make(&self.folder) {
                Ok(copy) => Some(copy),
                Err(error) => {
                    reply.send(&UpgradeNews::Failed(format!(
                        "the journal cannot be copied ({error}), and without a copy there is no way back. Version {present} serves \
                         again."
                    )));
                    self.start.previous_end = Some(format!(
                        "the process before this one, version {present}, was stopped for an upgrade that was given up"
                    ));
                    return true;
                }
            }
        };
        self.start.previous_end =
            Some(format!("the process before this one, version {present}, was stopped for an upgrade"));
        (self.start.sets_last_input_aside, self.start.ends_connections) = (false, false);
        let former = std::mem::replace(&mut self.program, *program);
        let phase = ProbationPhase::Starting(reply, Instant::now() + SERVING_TIMEOUT);
        if let Some(FormerProgram { copy: Some(copy), .. }) =
            self.former.replace(FormerProgram { program: former, copy, phase })
        {
            copy.forget();
        }
        true
    }

    /// Returns to the program before an upgrade, if the present one has ended too soon. Returns whether it did.
    ///
    /// # Errors
    /// If the journal of before the upgrade cannot be restored.
    fn return_to_former_program(&mut self, end: &CoreEnd) -> Result<bool> {
        let is_over = |former: &mut FormerProgram| match former.phase {
            ProbationPhase::Starting(..) => true,
            // The answers of the present program must not be lost.
            ProbationPhase::Serving(_) => former.copy.is_none(),
        };
        let Some(FormerProgram { program, copy, phase }) = self.former.take_if(is_over) else {
            return Ok(false);
        };
        let why = format!("version {} {}", self.program.version, end.cause);
        tracing::error!(
            why,
            version = program.version,
            "the upgrade has failed, and the former version serves again"
        );
        // The logs of connections may be ahead of a journal that is restored.
        self.start.ends_connections = copy.is_some();
        let restored = copy.map_or(Ok(()), JournalCopy::restore);
        if let ProbationPhase::Starting(reply, _) = phase {
            let outcome = match &restored {
                Ok(()) => format!("Version {} serves again.", program.version),
                Err(error) => format!("{error:#}."),
            };
            reply.send(&UpgradeNews::Failed(format!(
                "{why} before it served; the log of the service says more. {outcome}"
            )));
        }
        restored?;
        self.start.previous_end = Some(format!("the upgrade failed: {why}"));
        self.program = program;
        Ok(true)
    }

    fn end_of_probation(&self) -> Option<Instant> {
        match self.former.as_ref()?.phase {
            ProbationPhase::Starting(_, until) | ProbationPhase::Serving(until) => Some(until),
        }
    }

    /// Keeps a program that has served for long enough, and kills one that has not begun to serve in time.
    fn end_probation(&mut self, core: &Core) {
        match self.former.as_mut().map(|former| &mut former.phase) {
            Some(ProbationPhase::Starting(_, until)) => {
                tracing::error!("the upgraded program does not serve, and is killed");
                *until += SERVING_TIMEOUT;
                core.send_signal(rustix::process::Signal::KILL.as_raw());
            }
            _ => {
                tracing::info!(version = self.program.version, "the upgraded program stays");
                if let Some(FormerProgram { copy: Some(copy), .. }) = self.former.take() {
                    copy.forget();
                }
            }
        }
    }

    /// Waits for `pause`. Returns whether a signal asked the server to stop.
    async fn is_stopped_within(&mut self, pause: Duration) -> bool {
        timeout(pause, self.stops.next()).await.is_ok()
    }
}

impl Core {
    /// Asks the core to stop in good order.
    fn stop(&mut self, by: StopSignal) {
        // One that was stopped for an upgrade goes on stopping: a second request would end it at once.
        if !std::mem::replace(&mut self.is_stopping, true) {
            self.request_stop(by);
        }
        // One that does not serve yet has nothing to put in order, and may not read.
        if self.serves_since.is_none() {
            self.send_signal(by.as_raw());
        }
    }

    /// Ends the core at once.
    fn end_at_once(&mut self, by: StopSignal) {
        self.request_stop(by);
        self.killed_at = Some(Instant::now() + END_TIMEOUT);
    }

    fn request_stop(&self, by: StopSignal) {
        // The channel of a core that does not read may be full; then the signal must do.
        if self.channel.try_send(&KeeperMessage::Stop(by.as_raw())).is_err() {
            self.send_signal(by.as_raw());
        }
    }

    /// Makes the core open its files again. One that does not serve yet is reading them just now, and a hangup would end it.
    fn reload(&self) {
        if self.serves_since.is_some() {
            self.send_signal(SignalKind::hangup().as_raw_value());
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

/// Waits for a request for an upgrade; for ever if no process can make one.
async fn next_request(control: Option<&mut ControlSocket>) -> (UpgradeRequest, UpgradeReply) {
    if let Some(control) = control
        && let Some(request) = control.next_request().await
    {
        return request;
    }
    std::future::pending().await
}

/// Waits for the end of a trial; for ever if there is none.
async fn end_of_trial(upgrade: &mut Option<Upgrade>) -> Result<(Program, u64), String> {
    match upgrade {
        Some(Upgrade { phase: UpgradePhase::Trial(trial), .. }) => {
            trial.await.unwrap_or_else(|error| Err(error.to_string()))
        }
        _ => std::future::pending().await,
    }
}

/// Waits until a time; for ever if there is none.
async fn sleep_until_some(time: Option<Instant>) {
    match time {
        Some(time) => sleep_until(time).await,
        None => std::future::pending().await,
    }
}
