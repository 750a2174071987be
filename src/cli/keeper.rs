//! The keeper: a small parent process of a server, which holds the listening sockets and starts the server again when it
//! dies.
//!
//! `muster serve` is the keeper, and starts a child process, the *core*, which does everything else. The core restores its
//! state from the journal; without a journal there is no keeper. `keeper/channel.rs` connects both processes,
//! `keeper/core_end.rs` decides when another core starts, and `keeper/link.rs` is the core's side. Begin at [`run_keeper`].
//!
//! - The listening sockets stay open while no core serves. A client that connects meanwhile waits in their backlog, and is
//!   not refused. Without that, a heartbeat that is due just then would end a JAX process.
//! - A signal to the keeper is passed on to the core. The core has a process group of its own, so that Ctrl-C in a terminal
//!   reaches it once, and not a second time by the terminal, which would end it at once.
//! - The core dies with its keeper, so that the process which was started is the service.

mod channel;
mod core_end;
mod link;
mod metrics;

use std::os::fd::AsFd as _;
use std::process::{ExitCode, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use rustix::process::{Pid, kill_process};
use tokio::process::{Child, Command};
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::listeners::{ListenAddress, listen_addresses};
use super::self_command;
use crate::clock;
use crate::config::Config;
use channel::{CoreMessage, KeeperEnd, KeeperMessage, create_channel};
use core_end::{CoreEnd, CoreEndCause, NextStep, RestartPolicy};

pub use channel::CoreTask;
pub use link::KeeperLink;
pub use metrics::KeeperMetrics;

/// The hidden flag of a core.
pub const CORE_FLAG: &str = "core";

/// How long an address may still be in use by a keeper that was killed, and its core.
const ENDING_PROCESS_WAIT: Duration = Duration::from_secs(1);

/// Runs a server of this configuration, and starts it again when it dies. Returns when it was asked to stop.
pub fn run_keeper(config: &Config) -> Result<ExitCode> {
    // On this thread, which lives as long as the process: a core is tied to the thread that started it.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start the loop of the keeper")?;
    runtime.block_on(async { Keeper::bind(config)?.run().await })
}

/// A listening socket, and the name of its address.
struct KeptListener {
    name: String,
    socket: std::net::TcpListener,
}

/// The keeper of a server.
struct Keeper {
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
    fn bind(config: &Config) -> Result<Self> {
        let bind = |at: &ListenAddress| {
            Ok(KeptListener { name: at.name(), socket: at.bind(ENDING_PROCESS_WAIT)? })
        };
        Ok(Self {
            listeners: listen_addresses(config).iter().map(bind).collect::<Result<_>>()?,
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
            // A core that cannot serve at all has said why.
            if self.stops || !self.has_served {
                return Ok(exit_code);
            }
            let (cause, served) = (end.cause, end.served);
            let next = self.policy.record_end(&end);
            self.task.ends.add(cause);
            self.task.previous_end = Some(end);
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
                            self.has_served = true;
                            if self.task.starts > 1 {
                                tracing::info!(after = ?began.elapsed(), "the service serves again");
                            }
                        }
                        core.record_message(message);
                    }
                    Ok(None) | Err(_) => core.is_silent = true,
                },
                passed = self.signals.next() => {
                    self.stops |= passed.stops;
                    core.send_signal(passed.kind);
                }
            }
        }
    }

    async fn start_core(&mut self) -> Result<Core> {
        self.task.starts += 1;
        let (channel, end_of_core) = create_channel().context("cannot create the channel to the service")?;
        let mut command = Command::from(self_command::this_command());
        command.arg(format!("--{CORE_FLAG}")).stdin(Stdio::from(end_of_core)).process_group(0);
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

    fn send_signal(&self, kind: SignalKind) {
        let process = self.process.id().and_then(|id| Pid::from_raw(i32::try_from(id).ok()?));
        let signal = rustix::process::Signal::from_named_raw(kind.as_raw_value());
        if let (Some(process), Some(signal)) = (process, signal) {
            // It may end just now.
            let _ = kill_process(process, signal);
        }
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
