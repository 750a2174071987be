//! The engine as programs use it.
//!
//! This file starts the engine and shuts it down. The other files of this folder do the rest of the work. Begin at
//! [`TransferEngine::start`] and [`TransferEngine::transfer`].
//!
//! Small transfers that belong together can be launched as one ([`TransferEngine::batch`]). Then, for each peer, one
//! frame launches all of them, and one system call reads many ranges of the peer's memory. One wake-up serves the
//! waiter. Separate launches would need a frame, a system call and a wake-up each.

use std::net::SocketAddr;
use std::num::NonZeroUsize;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use muster_cliques::Nccl;
use muster_clock as clock;
use muster_fabric::Fabric;

use super::accept;
use super::config::EngineConfig;
use super::prepare::{TransferRequest, prepare_transfers};
use super::prepare_future::PrepareFuture;
use super::prepared_transfers::{LaunchOptions, TransferSpec};
use super::request_check::{check_equal_lengths, check_own_side};
use super::reserved_launch::{ReservedLaunch, current_members, prepare_and_launch};
use super::reserved_launch_number::ReservedLaunchNumber;
use super::shared::EngineShared;
use crate::base::buffer_definition::BufferDefinitionEvent;
use crate::base::counters::FailureCounters;
use crate::base::error::{PrepareError, TransferError};
use crate::base::key::TransferKey;
use crate::base::launch_metrics::LaunchMetrics;
use crate::base::layout::BufferLayout;
use crate::base::membership::{DeviceId, EngineAddress, MemberId, Membership, PeerTask};
use crate::base::sync::lock;
use crate::base::transport::{CliqueChoice, TransportKind};
use crate::io::threads::IoThreads;
use crate::io::wire::{self, EngineTlsConfigs, ListenSettings, WireWrappers};
use crate::launch::outcome::Launch;
use crate::launch::transfer::TransferHandle;
use crate::memory::{Arena, Buffer, Span};
use crate::protocol::frame::CHUNK_MAX;
use crate::protocol::link::PriorityClass;

/// How long a shutdown waits until queued frames have left.
const DRAIN_TIME: Duration = Duration::from_millis(100);

/// The transfer engine: it moves buffers between the devices of this task and those of other tasks. Clones
/// are the same engine; dropping the last one shuts it down.
#[derive(Clone)]
pub struct TransferEngine(Arc<EngineOwner>);

struct EngineOwner {
    shared: Arc<EngineShared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl std::fmt::Debug for TransferEngine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine").field("here", &self.0.shared.config.here).finish_non_exhaustive()
    }
}

/// Opens the fabric that a configuration names; over IP at the address by which peers reach this host.
fn open_fabric(config: &EngineConfig) -> std::io::Result<Option<Fabric>> {
    let Some(provider) = &config.fabric else { return Ok(None) };
    if config.tls.is_some() {
        let why = "reads over a fabric are not encrypted: use either certificates or a fabric";
        return Err(std::io::Error::new(std::io::ErrorKind::InvalidInput, why));
    }
    // Providers of network cards choose the card themselves.
    let is_over_ip = ["tcp", "net", "udp", "sockets"].iter().any(|name| provider.starts_with(name));
    let addresses = config.advertise.iter().chain(&config.listen).map(SocketAddr::ip);
    let address = addresses.filter(|_| is_over_ip).find(|address| !address.is_unspecified());
    Fabric::open(provider, address).map(Some).map_err(std::io::Error::other)
}

/// Loads NCCL, if a configuration wants cliques.
fn load_nccl(config: &EngineConfig) -> std::io::Result<Option<&'static Nccl>> {
    if config.cliques == CliqueChoice::Off {
        return Ok(None);
    }
    if config.tls.is_some() {
        let why = "cliques of GPUs are not encrypted: use either certificates or cliques";
        return Err(std::io::Error::new(std::io::ErrorKind::InvalidInput, why));
    }
    if config.clique_options.is_blocking || !config.clique_options.is_reused {
        let why = "transfers use a clique for many batches, and several cliques in no common order: its calls must not block";
        return Err(std::io::Error::new(std::io::ErrorKind::InvalidInput, why));
    }
    Nccl::get().map(Some).map_err(std::io::Error::other)
}

impl TransferEngine {
    /// Starts an engine: its threads and its listeners.
    ///
    /// # Errors
    /// Returns an error if it cannot listen on its address, its certificates, its fabric or NCCL cannot be used, or the
    /// system refuses a thread.
    pub fn start(mut config: EngineConfig) -> std::io::Result<Self> {
        config.lanes = config.lanes.clamp(1, 64);
        config.chunk = config.chunk.clamp(4 << 10, CHUNK_MAX as u32);
        config.devices.sort_unstable();
        config.devices.dedup();
        let fabric = open_fabric(&config)?;
        let nccl = load_nccl(&config)?;
        let wrapping = WireWrappers {
            identity: config.tls.as_ref().map(EngineTlsConfigs::new).transpose()?,
            #[cfg(feature = "faults")]
            faults: config.faults.clone(),
        };
        let (address, listeners) = wire::listen(&ListenSettings {
            here: config.here,
            transport: config.transport,
            listen: config.listen,
            advertise: &config.advertise,
        })?;
        let (io, threads) = IoThreads::start(config.reactors, config.copiers, config.staging_bytes)?;
        let shared = EngineShared::new(config, address, wrapping, (fabric, nccl), io);
        // If a thread is refused, those that have started are ended as the handle is dropped.
        let handle = EngineOwner { shared: Arc::clone(&shared), threads: Mutex::new(threads) };
        let mut threads = lock(&handle.threads);
        accept::start_listeners(&shared, listeners, &mut threads)?;
        let keep = move || shared.run_watchdog();
        threads.push(std::thread::Builder::new().name("muster-keep".to_owned()).spawn(keep)?);
        drop(threads);
        Ok(Self(Arc::new(handle)))
    }

    /// Returns the engine's address, which peers need to reach it.
    #[must_use]
    pub fn address(&self) -> &EngineAddress {
        &self.0.shared.address
    }

    /// Returns the task and incarnation of the engine.
    #[must_use]
    pub fn here(&self) -> MemberId {
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
        let gone = |member: MemberId| member != shared.here() && !membership.has(member);
        lock(&shared.numbers).retain(|member, _| !gone(*member));
        shared.backoff.retain_peers(|member| !gone(member));
        shared.end_connections_with(gone, |member| TransferError::of_absent_member(member, &membership));
    }

    /// Returns the current membership.
    #[must_use]
    pub fn membership(&self) -> Membership {
        self.0.shared.membership()
    }

    /// Calls `read` with the current membership, which does not change meanwhile: `read` is short, and calls no method of
    /// the engine.
    pub fn with_membership<T>(&self, read: impl FnOnce(&Membership) -> T) -> T {
        self.0.shared.with_membership(read)
    }

    /// Checks transfers as far as that needs no peer: their number, the devices of this task, and the memory.
    ///
    /// # Errors
    /// The error with which these transfers would fail.
    pub fn check_own_side(&self, specs: &[TransferSpec]) -> Result<(), PrepareError> {
        check_own_side(&self.0.shared, specs)
    }

    /// Prepares transfers: finds or makes the connections, and announces the transfers to the peers. Dropping
    /// the future cancels the preparation.
    pub fn prepare(&self, specs: Vec<TransferSpec>, options: LaunchOptions) -> PrepareFuture {
        let (preparing, wanted, finish) = PrepareFuture::new(&self.0.shared.launch_metrics);
        match TransferRequest::new(&self.0.shared, specs) {
            Ok(request) => prepare_transfers(&self.0.shared, request, options, &wanted, finish),
            Err(error) => finish(Err(error)),
        }
        preparing
    }

    /// Prepares and launches transfers as soon as `dependencies` have completed. It returns at once. The
    /// launch takes its place in the order of its channel now, and its deadline runs from now.
    pub fn transfer(
        &self,
        dependencies: &[BufferDefinitionEvent],
        specs: Vec<TransferSpec>,
        options: LaunchOptions,
    ) -> TransferHandle {
        let (sent, received) = TransferSpec::sent_and_received(&specs);
        let shared = &self.0.shared;
        let launch = Launch::new(&shared.launch_metrics, specs.len(), sent, received);
        let transfer = TransferHandle::new(Arc::clone(&launch), self.here().task);
        launch.start_clock();
        let request = match TransferRequest::new(&self.0.shared, specs) {
            Ok(request) => request,
            Err(error) => {
                launch.fail_all(&error.into());
                return transfer;
            }
        };
        if let Some(peer) = request.distinct.first() {
            launch.set_peer_for_metrics(peer.peer_task());
        }
        let tickets: Vec<_> = request
            .distinct
            .iter()
            .map(|peer| ReservedLaunchNumber::take(shared, *peer, options.channel))
            .collect();
        prepare_and_launch(shared, launch, tickets, request, dependencies, options);
        transfer
    }

    /// Takes the places of a launch in the order of its channel now, for transfers whose memory is known later. The launch
    /// has `count` transfers, and sends and receives so many bytes. It has a place with each of these tasks that is a
    /// member. Its deadline runs from now.
    pub fn reserve(
        &self,
        peers: &[PeerTask],
        count: NonZeroUsize,
        (sent, received): (u64, u64),
        options: LaunchOptions,
    ) -> ReservedLaunch {
        let shared = &self.0.shared;
        let launch = Launch::new(&shared.launch_metrics, count.get(), sent, received);
        ReservedLaunch::new(shared, launch, &current_members(shared, peers), options)
    }

    /// Takes the place of a launch with a peer, and tells the peer that it does not come. Nothing happens if the peer is not
    /// a member.
    pub fn skip_launch(&self, peer: PeerTask, channel: u32) {
        let member = self.with_membership(|membership| membership.current_member(peer));
        // An unused number tells the peer.
        drop(member.map(|member| ReservedLaunchNumber::take(&self.0.shared, member, channel)));
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
    ) -> Result<TransferHandle, PrepareError> {
        let here = self.here().task;
        let from = self.0.shared.config.devices.first().copied().ok_or(PrepareError::NoDevice { here })?;
        check_equal_lengths(buffers.len(), destinations.len(), keys.len())?;
        let specs = buffers.iter().zip(destinations).zip(keys);
        let specs =
            specs.map(|((span, to), key)| TransferSpec::send(span.clone(), from, *to, *key)).collect();
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
        layouts: &[BufferLayout],
        sources: &[DeviceId],
        keys: &[TransferKey],
    ) -> Result<(Vec<Buffer>, TransferHandle), PrepareError> {
        check_equal_lengths(layouts.len(), sources.len(), keys.len())?;
        let buffers = layouts
            .iter()
            .map(|layout| arena.allocate(usize::try_from(layout.len()).unwrap_or(usize::MAX)))
            .collect::<Result<Vec<_>, _>>()?;
        let specs = buffers.iter().zip(layouts).zip(sources.iter().zip(keys));
        let specs = specs
            .map(|((buffer, layout), (from, key))| {
                TransferSpec::receive(buffer.full_span(), *from, device, *key).with_layout(layout.clone())
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
    pub fn launch_metrics(&self) -> &Arc<LaunchMetrics> {
        &self.0.shared.launch_metrics
    }

    /// Returns the bytes that launches in flight have not moved yet, by class, the most urgent first.
    #[must_use]
    pub fn bytes_in_flight(&self) -> [(PriorityClass, u64); PriorityClass::ALL.len()] {
        let mut bytes = PriorityClass::ALL.map(|class| (class, 0));
        let connections = lock(&self.0.shared.connections).clone();
        let launches = connections.iter().flat_map(|connection| connection.in_flight_launches());
        for launch in launches.chain(self.0.shared.local_launches.in_flight()) {
            let (class, left) = launch.class_and_bytes_left();
            bytes[class as usize].1 += left;
        }
        bytes
    }

    /// Returns each launch in flight with each of its peers, of which this task is one for copies within it.
    #[must_use]
    pub fn launches_in_flight(&self) -> Vec<LaunchInFlight> {
        let connections = lock(&self.0.shared.connections).clone();
        let launches = connections.iter().flat_map(|connection| {
            connection.in_flight_launches().into_iter().map(|launch| LaunchInFlight {
                peer: connection.peer,
                kind: connection.kind,
                is_matched: launch.is_matched(),
                bytes_left: launch.class_and_bytes_left().1,
                age: launch.age(),
            })
        });
        let local = self.0.shared.local_launches.in_flight().into_iter().map(|launch| LaunchInFlight {
            peer: self.here(),
            kind: TransportKind::Local,
            is_matched: launch.is_matched(),
            bytes_left: launch.class_and_bytes_left().1,
            age: launch.age(),
        });
        launches.chain(local).collect()
    }

    /// Returns the number of launches in flight that copy within this task.
    #[must_use]
    pub fn local_launches_in_flight(&self) -> usize {
        self.0.shared.local_launches.in_flight().len()
    }

    /// Returns the counters.
    #[must_use]
    pub fn counts(&self) -> &FailureCounters {
        &self.0.shared.counts
    }

    /// Returns the state of each connection.
    #[must_use]
    pub fn links(&self) -> Vec<ConnectionStatus> {
        let connections = lock(&self.0.shared.connections).clone();
        connections
            .into_iter()
            .map(|connection| ConnectionStatus {
                peer: connection.peer,
                kind: connection.kind,
                lanes: connection.live_lane_count(),
                launched: connection.in_flight_count(),
                reads_over_fabric: connection.reads_over_fabric(),
                moves_by_clique: connection.moves_by_clique(),
                bytes: TransportKind::ALL.map(|kind| (kind, connection.counters.sent_and_received(kind))),
            })
            .collect()
    }

    /// Returns the bytes sent to and received from each task since the engine was started, by transport, on
    /// all connections including ended ones.
    #[must_use]
    pub fn bytes_by_task(&self) -> Vec<(PeerTask, BytesByTransport)> {
        let all = lock(&self.0.shared.moved);
        all.iter()
            .map(|(task, counters)| {
                (*task, TransportKind::ALL.map(|kind| (kind, counters.sent_and_received(kind))))
            })
            .collect()
    }

    /// Returns the number of cliques, and the hits, misses and evictions of their cache.
    #[must_use]
    pub fn clique_cache_stats(&self) -> (usize, u64, u64, u64) {
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
    engine: TransferEngine,
    options: LaunchOptions,
    specs: Vec<TransferSpec>,
}

impl Batch {
    fn new(engine: &TransferEngine, options: LaunchOptions) -> Self {
        Self { engine: engine.clone(), options, specs: Vec::new() }
    }

    /// Adds a transfer. Returns its index in the batch.
    pub fn add(&mut self, spec: TransferSpec) -> usize {
        self.specs.push(spec);
        self.specs.len() - 1
    }

    /// Launches the transfers of the batch.
    pub fn launch(self, dependencies: &[BufferDefinitionEvent]) -> TransferHandle {
        self.engine.transfer(dependencies, self.specs, self.options)
    }
}

/// The state of a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConnectionStatus {
    /// The peer.
    pub peer: MemberId,
    /// The transport of its lanes.
    pub kind: TransportKind,
    /// The number of live lanes.
    pub lanes: usize,
    /// The number of launches in flight.
    pub launched: usize,
    /// Whether the sides read each other's memory over a fabric.
    pub reads_over_fabric: bool,
    /// Whether bytes between GPUs move through a clique of NCCL.
    pub moves_by_clique: bool,
    /// The bytes moved.
    pub bytes: BytesByTransport,
}

/// A launch in flight with one of its peers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LaunchInFlight {
    /// The peer.
    pub peer: MemberId,
    /// The transport of the lanes; [`TransportKind::Local`] of copies within this task.
    pub kind: TransportKind,
    /// The peer has launched too; copies within this task have begun.
    pub is_matched: bool,
    /// The bytes that are still to move.
    pub bytes_left: u64,
    /// The time since the launch.
    pub age: Duration,
}

/// The bytes sent and received, by transport.
pub type BytesByTransport = [(TransportKind, (u64, u64)); TransportKind::ALL.len()];

impl EngineOwner {
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
        connections.iter().for_each(|connection| connection.flush_until(until));
        shared.end_connections_with(|_| true, |_| TransferError::Closed);
        for launch in shared.local_launches.in_flight() {
            launch.fail_locally(TransferError::Closed);
        }
        shared.io.request_stop();
        {
            let _planned = lock(&shared.watchdog.0);
            shared.watchdog.1.notify_all();
        }
        accept::stop_listeners(shared);
        let me = std::thread::current().id();
        for thread in std::mem::take(&mut *lock(&self.threads)) {
            if thread.thread().id() != me {
                let _ended = thread.join();
            }
        }
    }
}

impl Drop for EngineOwner {
    fn drop(&mut self) {
        self.shutdown();
    }
}
