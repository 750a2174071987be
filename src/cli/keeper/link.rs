//! The core's side of a keeper. Begin at [`KeeperLink::open`].

use std::backtrace::{Backtrace, BacktraceStatus};
use std::collections::HashMap;
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::panic::{self, PanicHookInfo};
use std::sync::Arc;

use anyhow::{Context as _, Result, bail};
use muster_kept::{HeldSlot, are_counters_exact};
use rustix::process::{Signal, getppid, set_parent_process_death_signal};
use tokio::sync::mpsc;

use super::channel::{CoreChannel, CoreMessage, CoreStart, KeeperMessage};
use crate::grpc::{ConnectionKeeper, ContinuedConnections};
use crate::text::truncate_text;

/// The bytes of a panic that the keeper is told.
const PANIC_MAX: usize = 4 << 10;

/// The keeper of this process.
#[derive(Debug)]
pub struct KeeperLink {
    channel: Arc<CoreChannel>,
    /// The facts that this process needs to serve.
    pub start: CoreStart,
    /// The listening sockets, by the names of their addresses.
    pub listeners: HashMap<String, TcpListener>,
    /// The memory of the connections of former cores.
    memory: Option<OwnedFd>,
    /// The sockets of these connections.
    sockets: Vec<(HeldSlot, OwnedFd)>,
    stops: mpsc::UnboundedReceiver<i32>,
}

impl KeeperLink {
    /// Receives what the keeper hands over. From now on this process dies with its keeper, which is told of panics.
    ///
    /// # Errors
    /// If this process has no keeper.
    pub fn open() -> Result<Self> {
        set_parent_process_death_signal(Some(Signal::KILL))
            .context("cannot tie this process to its keeper")?;
        // It was started by a descriptor, whose number would be its name.
        let _ = rustix::thread::set_name(c"muster");
        let channel = CoreChannel::take_standard_input()
            .context("only the keeper starts a core: standard input is no channel")?;
        // A keeper that ended before this process was tied to it sends no signal.
        if channel.keeper().context("cannot identify the keeper")? != getppid() {
            bail!(
                "the keeper has ended, or is not the parent of this process: a script must exec the program"
            );
        }
        let mut listeners = HashMap::new();
        let (mut memory, mut sockets) = (None, Vec::new());
        let start = loop {
            match channel.receive().context("cannot read the keeper's message")? {
                Some((KeeperMessage::Listener(name), mut descriptors)) => {
                    let socket =
                        descriptors.pop().with_context(|| format!("the keeper sent no socket for {name}"))?;
                    _ = listeners.insert(name, TcpListener::from(socket));
                }
                Some((KeeperMessage::Memory, mut descriptors)) => memory = descriptors.pop(),
                Some((KeeperMessage::Connections(slots), descriptors)) => {
                    // Without room for more descriptors, the kernel leaves some out.
                    let slots = slots.into_iter().map(|(slot, serial)| HeldSlot { slot, serial });
                    sockets.extend(slots.zip(descriptors));
                }
                Some((KeeperMessage::Serve(start), _)) => break start,
                Some((KeeperMessage::Stop(_), _)) => bail!("the keeper stops"),
                None => bail!("the keeper has ended"),
            }
        };
        let channel = Arc::new(channel);
        report_panics_to(Arc::clone(&channel));
        let stops = receive_stops(Arc::clone(&channel))?;
        Ok(Self { channel, start, listeners, memory, sockets, stops })
    }

    /// Takes over the connections of the former core; `None`: connections end with this process.
    pub fn take_over_connections(&mut self) -> Option<ContinuedConnections> {
        let (memory, sockets) = (self.memory.take()?, std::mem::take(&mut self.sockets));
        let held = sockets.len();
        let taken = match are_counters_exact() {
            Ok(true) => ContinuedConnections::take_over(memory, sockets, !self.start.ends_connections)
                .map_err(|error| error.to_string()),
            Ok(false) => Err("this kernel does not count the bytes of connections exactly".to_owned()),
            Err(error) => Err(error.to_string()),
        };
        let release = |why: &String| {
            tracing::warn!(held, why, "connections do not go on when the service dies");
            let _ = self.channel.send(&CoreMessage::ReleaseAll);
        };
        taken.inspect_err(release).ok()
    }

    /// Returns the keeper as the holder of connections.
    pub fn connection_keeper(&self) -> Arc<dyn ConnectionKeeper> {
        Arc::clone(&self.channel) as Arc<dyn ConnectionKeeper>
    }

    /// Waits for the next request of the keeper to stop. Returns the number of the signal that the keeper has got.
    pub async fn next_stop(&mut self) -> i32 {
        match self.stops.recv().await {
            Some(signal) => signal,
            // The keeper has ended, and with it this process.
            None => std::future::pending().await,
        }
    }

    /// Tells the keeper which records of the journal are not applied, so that the next process does not apply them either.
    pub fn report_set_aside(&self, records: &[u64]) {
        if !records.is_empty()
            && let Err(error) = self.channel.send(&CoreMessage::SetAside(records.to_vec()))
        {
            tracing::warn!(%error, "the keeper was not told of inputs that were set aside");
        }
    }

    /// Tells the keeper that this process serves.
    pub fn report_serving(&self) {
        if let Err(error) = self.channel.send(&CoreMessage::Serving) {
            tracing::warn!(%error, "the keeper was not told that this process serves");
        }
    }
}

/// Reads what the keeper sends, on a thread of its own: the runtime may not run yet.
fn receive_stops(channel: Arc<CoreChannel>) -> Result<mpsc::UnboundedReceiver<i32>> {
    let (send, stops) = mpsc::unbounded_channel();
    let receive = move || {
        while let Ok(Some((message, _))) = channel.receive() {
            if let KeeperMessage::Stop(signal) = message
                && send.send(signal).is_err()
            {
                return;
            }
        }
    };
    std::thread::Builder::new().name("keeper".to_owned()).spawn(receive).context("cannot start a thread")?;
    Ok(stops)
}

/// Tells the keeper of each panic, also of one that ends the process just afterwards.
fn report_panics_to(channel: Arc<CoreChannel>) {
    let former = panic::take_hook();
    panic::set_hook(Box::new(move |panic| {
        former(panic);
        // A keeper that does not read learns of the end of this process all the same.
        let _ = channel.send(&CoreMessage::Panicked(panic_text(panic)));
    }));
}

fn panic_text(panic: &PanicHookInfo<'_>) -> String {
    let thread = std::thread::current();
    let message = panic.payload_as_str().unwrap_or("no message");
    let place = panic.location().map_or_else(|| "an unknown place".to_owned(), ToString::to_string);
    let mut text = format!("{message} (at {place}, thread {})", thread.name().unwrap_or("without a name"));
    // RUST_BACKTRACE asks for it. The released binary has no names, so a backtrace would be addresses.
    let backtrace = Backtrace::capture();
    if backtrace.status() == BacktraceStatus::Captured {
        text.push_str(&format!("\n{backtrace}"));
    }
    truncate_text(&text, PANIC_MAX, "…")
}
