//! The engine as programs use it.
//!
//! It only composes; the files beside it do the work. Begin at [`Engine::start`] and [`Engine::transfer`].
//! Small transfers that should leave together are launched as one ([`Engine::batch`]): one frame launches
//! them, one system call reads many ranges of another process, and one wake-up serves the waiter. Each
//! separate launch would cost all of that by itself.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use muster_clock as clock;

use super::accept;
use super::check::check_even;
use super::cliques::IsWanted;
use super::config::Config;
use super::prepared::{LaunchOptions, Spec};
use super::preparing::Preparing;
use super::request::{TransferRequest, prepare_then};
use super::shared::EngineShared;
use super::ticket::Ticket;
use crate::base::counts::EngineCounts;
use crate::base::error::{PrepareError, TransferError};
use crate::base::event::Event;
use crate::base::identity::{Address, DeviceId, Member, Membership, TaskId};
use crate::base::key::TransferKey;
use crate::base::layout::Layout;
use crate::base::meters::Meters;
use crate::base::sync::lock;
use crate::base::transport::TransportKind;
use crate::io::threads::IoThreads;
use crate::io::wire::{self, Identity, ListenSettings, Wrapping};
use crate::launch::outcome::Launch;
use crate::launch::transfer::Transfer;
use crate::memory::{Arena, Buffer, Span};
use crate::protocol::frame::CHUNK_MAX;
use crate::protocol::link::Class;

/// How long a shutdown waits until queued frames have left.
const DRAIN_TIME: Duration = Duration::from_millis(100);

/// The transfer engine: it moves buffers between the devices of this task and those of other tasks. Clones
/// are the same engine; dropping the last one shuts it down.
#[derive(Clone)]
pub struct Engine(Arc<Handle>);

struct Handle {
    shared: Arc<EngineShared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine").field("here", &self.0.shared.config.here).finish_non_exhaustive()
    }
}

impl Engine {
    /// Starts an engine: its threads and its listeners.
    ///
    /// # Errors
    /// Returns an error if it cannot listen on its address, its certificates cannot be used, or the system
    /// refuses a thread.
    pub fn start(mut config: Config) -> std::io::Result<Self> {
        config.lanes = config.lanes.clamp(1, 64);
        config.chunk = config.chunk.clamp(4 << 10, CHUNK_MAX as u32);
        config.devices.sort_unstable();
        config.devices.dedup();
        let wrapping = Wrapping {
            identity: config.tls.as_ref().map(Identity::new).transpose()?,
            #[cfg(feature = "faults")]
            faults: config.faults.clone(),
        };
        let (address, listeners) = wire::listen(&ListenSettings {
            here: config.here,
            transport: config.transport,
            listen: config.listen,
            advertise: &config.advertise,
        })?;
        let (io, mut threads) = IoThreads::start(config.reactors, config.copiers)?;
        let shared = EngineShared::new(config, address, wrapping, io);
        threads.extend(accept::accept(&shared, listeners)?);
        let keeping = Arc::clone(&shared);
        threads
            .push(std::thread::Builder::new().name("muster-keep".to_owned()).spawn(move || keeping.keep())?);
        Ok(Self(Arc::new(Handle { shared, threads: Mutex::new(threads) })))
    }

    /// Returns the engine's address, which peers need to reach it.
    #[must_use]
    pub fn address(&self) -> &Address {
        &self.0.shared.address
    }

    /// Returns the task and incarnation of the engine.
    #[must_use]
    pub fn here(&self) -> Member {
        self.0.shared.here()
    }

    /// Applies a new membership. Connections with incarnations that are not in it fail at once, including
    /// those that are being made; all others go on.
    pub fn on_membership(&self, membership: Membership) {
        let shared = &self.0.shared;
        {
            let _announcing = lock(&shared.changed.0);
            *shared.membership.write().unwrap_or_else(PoisonError::into_inner) = membership.clone();
            shared.changed.1.notify_all();
        }
        let gone = |member: Member| member != shared.here() && !membership.has(member);
        lock(&shared.numbers).retain(|member, _| !gone(*member));
        shared.backoff.retain(|member| !gone(member));
        let error = |member: Member| TransferError::StaleIncarnation {
            member,
            current: membership.member(member.task).map(|member| member.incarnation),
        };
        shared.end_all(gone, error);
    }

    /// Returns the current membership.
    #[must_use]
    pub fn membership(&self) -> Membership {
        self.0.shared.membership()
    }

    /// Prepares transfers: finds or makes the connections, and announces the transfers to the peers. Dropping
    /// the future cancels the preparation.
    pub fn prepare(&self, specs: Vec<Spec>, options: LaunchOptions) -> Preparing {
        let (preparing, wanted, finish) = Preparing::new(&self.0.shared.meters);
        match TransferRequest::new(&self.0.shared, specs) {
            Ok(request) => prepare_then(&self.0.shared, request, options, &wanted, finish),
            Err(error) => finish(Err(error)),
        }
        preparing
    }

    /// Prepares and launches transfers as soon as `dependencies` have completed. It returns at once. The
    /// launch takes its place in the order of its channel now, and its deadline runs from now.
    pub fn transfer(&self, dependencies: &[Event], specs: Vec<Spec>, options: LaunchOptions) -> Transfer {
        let (mut sent, mut received) = (0, 0);
        for spec in &specs {
            *(if spec.outgoing { &mut sent } else { &mut received }) += spec.span.len() as u64;
        }
        let shared = &self.0.shared;
        let launch = Launch::new(&shared.meters, specs.len(), sent, received);
        let transfer = Transfer::new(Arc::clone(&launch), self.here().task);
        launch.begin();
        let request = match TransferRequest::new(&self.0.shared, specs) {
            Ok(request) => request,
            Err(error) => {
                launch.fail_all(&error.into());
                return transfer;
            }
        };
        if let Some(peer) = request.distinct.first() {
            launch.set_peer(peer.task);
        }
        let tickets: Vec<_> =
            request.distinct.iter().map(|peer| Ticket::take(shared, *peer, options.channel)).collect();
        let dependencies = dependencies.to_vec();
        let (waiting, asked) = (Arc::clone(&launch), Arc::clone(&launch));
        let wanted: IsWanted = Arc::new(move || asked.awaits_connections());
        prepare_then(shared, request, options, &wanted, move |result| match result {
            Ok(prepared) => {
                prepared.launch_as(launch, &dependencies, tickets);
            }
            Err(error) => launch.fail_all(&error.into()),
        });
        if let Some(deadline) = options.deadline
            && waiting.awaits_connections()
        {
            shared.expect(&waiting, waiting.began() + deadline);
        }
        transfer
    }

    /// Sends buffers, each from the first device of this task to its destination, with their
    /// [layouts](Span::with_layout).
    ///
    /// # Errors
    /// Returns an error if there is not one destination and one key for each buffer, or this task has no
    /// device.
    pub fn cross_host_send(
        &self,
        buffers: &[Span],
        destinations: &[DeviceId],
        keys: &[TransferKey],
    ) -> Result<Transfer, PrepareError> {
        let here = self.here().task;
        let from = self.0.shared.config.devices.first().copied().ok_or(PrepareError::NoDevice { here })?;
        check_even(buffers.len(), destinations.len(), keys.len())?;
        let specs = buffers.iter().zip(destinations).zip(keys);
        let specs = specs.map(|((span, to), key)| Spec::send(span.clone(), from, *to, *key)).collect();
        Ok(self.transfer(&[], specs, LaunchOptions::default()))
    }

    /// Receives buffers of these layouts onto a device of this task, each from its source, into memory of
    /// `arena`.
    ///
    /// # Errors
    /// Returns an error if there is not one source and one key for each layout, or the arena is full.
    pub fn cross_host_receive(
        &self,
        arena: &Arena,
        device: DeviceId,
        layouts: &[Layout],
        sources: &[DeviceId],
        keys: &[TransferKey],
    ) -> Result<(Vec<Buffer>, Transfer), PrepareError> {
        check_even(layouts.len(), sources.len(), keys.len())?;
        let buffers = layouts
            .iter()
            .map(|layout| arena.allocate(usize::try_from(layout.len()).unwrap_or(usize::MAX)))
            .collect::<Result<Vec<_>, _>>()?;
        let specs = buffers.iter().zip(layouts).zip(sources.iter().zip(keys));
        let specs = specs
            .map(|((buffer, layout), (from, key))| {
                Spec::receive(buffer.span(), *from, device, *key).with_layout(layout.clone())
            })
            .collect();
        Ok((buffers, self.transfer(&[], specs, LaunchOptions::default())))
    }

    /// Begins a batch: transfers that are added one by one and leave as one group for each peer.
    pub fn batch(&self, options: LaunchOptions) -> Batch {
        Batch::new(self, options)
    }

    /// Returns the measurements of launches.
    #[must_use]
    pub fn meters(&self) -> &Arc<Meters> {
        &self.0.shared.meters
    }

    /// Returns the bytes that launches in flight have not moved yet, by class, the most urgent first.
    #[must_use]
    pub fn in_flight(&self) -> [(Class, u64); Class::ALL.len()] {
        let mut bytes = Class::ALL.map(|class| (class, 0));
        let connections = lock(&self.0.shared.connections).clone();
        for launch in connections.iter().flat_map(|connection| connection.launches()) {
            let (class, left) = launch.in_flight();
            bytes[class as usize].1 += left;
        }
        bytes
    }

    /// Returns the counters.
    #[must_use]
    pub fn counts(&self) -> &EngineCounts {
        &self.0.shared.counts
    }

    /// Returns the state of each connection.
    #[must_use]
    pub fn links(&self) -> Vec<LinkState> {
        let connections = lock(&self.0.shared.connections).clone();
        connections
            .into_iter()
            .map(|connection| LinkState {
                peer: connection.peer,
                kind: connection.kind,
                lanes: connection.live_lanes(),
                launched: connection.launched(),
                bytes: TransportKind::ALL.map(|kind| (kind, connection.counters.get(kind))),
            })
            .collect()
    }

    /// Returns the bytes sent to and received from each task since the engine was started, by transport, on
    /// all connections including ended ones.
    #[must_use]
    pub fn moved(&self) -> Vec<(TaskId, Traffic)> {
        let all = lock(&self.0.shared.moved);
        all.iter()
            .map(|(task, counters)| (*task, TransportKind::ALL.map(|kind| (kind, counters.get(kind)))))
            .collect()
    }

    /// Returns the number of cliques, and the hits, misses and evictions of their cache.
    #[must_use]
    pub fn cliques(&self) -> (usize, u64, u64, u64) {
        let cliques = lock(&self.0.shared.cliques);
        (cliques.len(), cliques.hits, cliques.misses, cliques.evictions)
    }

    /// Shuts the engine down: all transfers in flight fail, and its threads end. Buffers stay valid.
    pub fn shutdown(&self) {
        self.0.shutdown();
    }
}

/// Transfers that are added one by one, and leave together.
#[derive(Debug)]
#[must_use = "nothing of it leaves until it is launched"]
pub struct Batch {
    engine: Engine,
    options: LaunchOptions,
    specs: Vec<Spec>,
}

impl Batch {
    fn new(engine: &Engine, options: LaunchOptions) -> Self {
        Self { engine: engine.clone(), options, specs: Vec::new() }
    }

    /// Adds a transfer. Returns its index in the batch.
    pub fn add(&mut self, spec: Spec) -> usize {
        self.specs.push(spec);
        self.specs.len() - 1
    }

    /// Launches the transfers of the batch.
    pub fn launch(self, dependencies: &[Event]) -> Transfer {
        self.engine.transfer(dependencies, self.specs, self.options)
    }
}

/// The state of a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinkState {
    /// The peer.
    pub peer: Member,
    /// The transport of its lanes.
    pub kind: TransportKind,
    /// The number of live lanes.
    pub lanes: usize,
    /// The number of launches in flight.
    pub launched: usize,
    /// The bytes moved.
    pub bytes: Traffic,
}

/// The bytes sent and received, by transport.
pub type Traffic = [(TransportKind, (u64, u64)); TransportKind::ALL.len()];

impl Handle {
    fn shutdown(&self) {
        let shared = &self.shared;
        if shared.closed.swap(true, Ordering::AcqRel) {
            return;
        }
        {
            let _announcing = lock(&shared.changed.0);
            shared.changed.1.notify_all();
        }
        let until = clock::monotonic() + DRAIN_TIME;
        let connections = lock(&shared.connections).clone();
        connections.iter().for_each(|connection| connection.drain(until));
        shared.end_all(|_| true, |_| TransferError::Closed);
        shared.io.stop();
        {
            let _planned = lock(&shared.keeper.0);
            shared.keeper.1.notify_all();
        }
        accept::stop(shared);
        let me = std::thread::current().id();
        for thread in std::mem::take(&mut *lock(&self.threads)) {
            if thread.thread().id() != me {
                let _ended = thread.join();
            }
        }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.shutdown();
    }
}
