//! The exchange of bytes between the GPUs of two engines through a clique of NCCL.
//!
//! NCCL matches the operations of two members in their order, so both sides run the same batches in one order. The side with
//! the lower task *leads*: it takes the pieces that it wants to receive and those that the other side asks for, puts what is ready
//! into the next batch, tells the other side of the batch by a frame, and runs it. Frames arrive in order, so the other side runs
//! the same batches in the same order. Both directions share batches.
//!
//! A piece that both sides' lists and buffers do not back does not exist: a receiver takes part only in pieces that it asked for,
//! and a sender only in such of matched launches whose bytes are defined. If a launch is cancelled after its pieces were put into a
//! batch, its side takes part with other memory, so that the clique survives. Therefore a sender tells of
//! each batch which pieces have the bytes of launches, and a receiver counts no others.
//!
//! The guards of a launch are held until its batch has ended, or the clique has and nothing can move any more. If a
//! clique fails, the exchange is over: receives of which nothing is in a batch are pushed, as are those of later launches.
//! Begin at [`CliqueExchange::fetch_or_request_push`].
#![allow(unsafe_code, reason = "runs operations on memory that guards keep")]

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::{Arc, Mutex, TryLockError, Weak};
use std::time::{Duration, Instant};

use muster_cliques::{
    CliqueError, CliqueId, CliqueMember, CliqueOperation, CliqueOptions, GpuClique, GpuCliqueKey, Nccl,
    OperationDirection,
};
use muster_clock as clock;
use muster_gpu::{DeviceMemory, Gpu};

use super::clique_fetch::CliqueFetch;
use super::fetch_host::FetchHost;
use crate::base::membership::MemberId;
use crate::base::sync::lock;
use crate::base::transport::TransportKind;
use crate::launch::peer_launch::{OwnedAccessGuard, PeerLaunch};
use crate::memory::Span;
use crate::memory::device_copy::write_device_bytes;
use crate::protocol::clique_message::{CliqueMessage, CliquePiece, GPUS_MAX, PIECE_MAX, PIECES_MAX};
use crate::protocol::link::launch_definition::LaunchDefinition;
use crate::protocol::link::{GroupId, ProtocolViolation};

/// The most pieces of a launch that are asked for: enough to keep a network busy while one is asked for, and few enough for a program
/// that waits for the end of a cancellation.
const PIECES_UNDER_WAY: usize = 16;
/// The most batches under way: while one moves, the next one is being launched.
const BATCHES_UNDER_WAY: usize = 2;
/// The most pieces that the leader holds for the follower.
const PENDING_MAX: usize = 1 << 16;
/// The most cliques of a connection: each has one GPU more than that before.
const CLIQUES_MAX: u32 = 2 * GPUS_MAX as u32;
/// A batch is overdue after the longest stall limit of its launches and this part of it: the launches fail first, with their own reason.
const GRACE: u32 = 16;

/// The exchange of one connection.
pub struct CliqueExchange {
    host: Weak<dyn FetchHost>,
    nccl: &'static Nccl,
    options: CliqueOptions,
    me: MemberId,
    peer: MemberId,
    leads: bool,
    /// Held while a batch is told of and run, so that both happen in one order.
    order: Mutex<()>,
    /// Held by the thread that processes messages.
    reading: Mutex<()>,
    state: Mutex<ExchangeState>,
}

/// A clique in use.
struct JoinedClique {
    clique: Arc<GpuClique>,
    /// The GPUs of this side and of the peer.
    gpus: [BTreeSet<u32>; 2],
    /// Of each GPU of this side.
    scratch: BTreeMap<u32, Arc<GpuScratch>>,
}

/// The memory of a GPU with which cancelled launches take part, [`PIECE_MAX`] bytes each.
struct GpuScratch {
    /// Zeros, which are sent. Nothing is received there, so no peer gets the bytes of another one.
    zeros: DeviceMemory,
    /// Where bytes are received that nobody reads.
    sink: DeviceMemory,
}

impl GpuScratch {
    /// Returns the memory of a GPU. The first call for it allocates, and the process keeps it: the driver waits for all operations of a
    /// GPU before it frees memory, and some of them may wait for a peer.
    fn of_gpu(gpu: &Gpu) -> Result<Arc<Self>, CliqueError> {
        static OF_GPUS: Mutex<BTreeMap<u32, Arc<GpuScratch>>> = Mutex::new(BTreeMap::new());
        let mut of_gpus = lock(&OF_GPUS);
        if let Some(scratch) = of_gpus.get(&gpu.ordinal()) {
            return Ok(Arc::clone(scratch));
        }
        let allocate = || DeviceMemory::allocate(gpu, PIECE_MAX as usize);
        let failed = |error| CliqueError::Gpu { gpu: gpu.ordinal(), error };
        let (zeros, sink) = (allocate().map_err(failed)?, allocate().map_err(failed)?);
        let nothing = vec![0; PIECE_MAX as usize];
        write_device_bytes(&zeros, 0, &nothing).map_err(|error| CliqueError::Ended(error.to_string()))?;
        let scratch = Arc::new(Self { zeros, sink });
        of_gpus.insert(gpu.ordinal(), Arc::clone(&scratch));
        Ok(scratch)
    }
}

#[derive(Default)]
struct ExchangeState {
    /// The GPUs of this side that have bytes of launches, by number.
    own: BTreeMap<u32, Gpu>,
    clique: Option<Arc<JoinedClique>>,
    /// The one that starts, for [`CliqueExchange::end`].
    starting: Option<Arc<GpuClique>>,
    /// Whether a clique is being made. Messages wait until it is.
    is_beginning: bool,
    begun: u32,
    waiting_messages: VecDeque<CliqueMessage>,
    /// The pieces that are in no batch yet, of both directions; the leader's.
    pending: VecDeque<CliquePiece>,
    next_batch: u64,
    batches: BTreeMap<u64, BatchState>,
    fetches: HashMap<GroupId, CliqueFetch>,
    /// When a batch last ended. A batch waits for those before it, so until then none was overdue.
    last_end: Option<Instant>,
    /// Why no clique is used any more.
    failure: Option<Arc<str>>,
}

/// A batch that was run.
struct BatchState {
    /// The pieces that this side receives, by their place in the batch, and whether each is received into its launch's memory.
    receives: Vec<(usize, CliquePiece, bool)>,
    has_ended: bool,
    /// The pieces that the sender sends from the memory of launches, once it has told.
    sent: Option<u64>,
    began: Instant,
    allowed: Duration,
}

/// What keeps the memory of a batch.
#[derive(Default)]
struct BatchMemory {
    receiving: Vec<OwnedAccessGuard>,
    sending: Vec<(OwnedAccessGuard, u64)>,
    clique: Option<Arc<JoinedClique>>,
}

/// A batch that is about to be run.
struct PreparedBatch {
    number: u64,
    operations: Vec<CliqueOperation>,
    /// The pieces that this side sends from the memory of launches; none if it sends nothing.
    sent: Option<u64>,
}

/// What follows from the end of a batch.
#[derive(Default)]
struct Settled {
    /// Bytes that are in place: the group, the launch, the offset in its inbound stream, the length, and whether they are the last ones.
    landed: Vec<(GroupId, OwnedAccessGuard, u64, u32, bool)>,
    /// The pieces to ask for next.
    next: Vec<CliquePiece>,
}

impl CliqueExchange {
    /// Creates the exchange of a connection between two members of one job.
    pub fn new(
        host: Weak<dyn FetchHost>,
        nccl: &'static Nccl,
        options: CliqueOptions,
        me: MemberId,
        peer: MemberId,
    ) -> Arc<Self> {
        let place = |member: MemberId| (member.task, member.incarnation);
        let (order, reading, state) = (Mutex::default(), Mutex::default(), Mutex::default());
        let leads = place(me) < place(peer);
        Arc::new(Self { host, nccl, options, me, peer, leads, order, reading, state })
    }

    /// Returns whether bytes can move this way: no clique has failed.
    pub fn is_usable(&self) -> bool {
        lock(&self.state).failure.is_none()
    }

    /// Records that launches have bytes on a GPU of this side, so that the peer may name it.
    pub fn use_gpu(&self, gpu: &Gpu) {
        let mut state = lock(&self.state);
        if state.own.len() < GPUS_MAX {
            state.own.entry(gpu.ordinal()).or_insert_with(|| gpu.clone());
        }
    }

    /// Begins to receive the bytes of a launch, if all are in memory of GPUs on both sides. Else the peer pushes them.
    pub fn fetch_or_request_push(
        self: &Arc<Self>,
        host: &dyn FetchHost,
        launch: &Arc<PeerLaunch>,
        definition: &LaunchDefinition,
    ) {
        let spans = &launch.lists.inbound.spans;
        spans.iter().filter_map(Span::device_memory).for_each(|memory| self.use_gpu(memory.gpu()));
        let (Some(group), Some(mut fetch)) = (launch.group_id(), CliqueFetch::new(launch, definition)) else {
            return host.request_push(launch);
        };
        let mut state = lock(&self.state);
        if state.failure.is_some() {
            drop(state);
            return host.request_push(launch);
        }
        let pieces: Vec<_> =
            (0..PIECES_UNDER_WAY).map_while(|_| fetch.take_piece(group, self.leads)).collect();
        if !pieces.is_empty() {
            state.fetches.insert(group, fetch);
        }
        drop(state);
        self.ask_for(host, pieces);
    }

    /// Asks for pieces: the leader itself, or by a message.
    fn ask_for(self: &Arc<Self>, host: &dyn FetchHost, pieces: Vec<CliquePiece>) {
        if pieces.is_empty() {
            return;
        }
        if self.leads {
            lock(&self.state).pending.extend(pieces);
            self.run_pending(host);
        } else {
            for part in pieces.chunks(PIECES_MAX) {
                host.send_clique_message(CliqueMessage::Request(part.to_vec()).encode());
            }
        }
        host.flush_control_frames();
    }

    /// Processes the messages of the peer that `next` returns, in their order. If another thread does so now, or this one already does,
    /// that call takes these too.
    ///
    /// # Errors
    /// Returns [`ProtocolViolation`] for a message that makes no sense.
    pub fn process_messages(
        self: &Arc<Self>,
        host: &dyn FetchHost,
        next: &dyn Fn() -> Option<Vec<u8>>,
        has_more: &dyn Fn() -> bool,
    ) -> Result<(), ProtocolViolation> {
        loop {
            let reading = match self.reading.try_lock() {
                Err(TryLockError::WouldBlock) => return Ok(()),
                Err(TryLockError::Poisoned(reading)) => reading.into_inner(),
                Ok(reading) => reading,
            };
            while let Some(message) = next() {
                self.on_message(host, &message)?;
            }
            drop(reading);
            // The thread of a message that has come since the last look has left it to this one.
            if !has_more() {
                return Ok(());
            }
        }
    }

    fn on_message(self: &Arc<Self>, host: &dyn FetchHost, payload: &[u8]) -> Result<(), ProtocolViolation> {
        let message = CliqueMessage::decode(payload)
            .ok_or(ProtocolViolation("a message about cliques cannot be read"))?;
        if let CliqueMessage::Failed(why) = message {
            self.fail(
                &format!("the peer said: {}", why.chars().take(200).collect::<String>().escape_debug()),
                false,
            );
            return Ok(());
        }
        let mut state = lock(&self.state);
        if state.failure.is_some() {
            // Sent before the peer heard of it.
            return Ok(());
        }
        // A follower that joins runs the batches of the clique once it has.
        if state.is_beginning && !self.leads {
            if state.waiting_messages.len() >= PENDING_MAX {
                return Err(ProtocolViolation("too many batches of a clique that begins"));
            }
            state.waiting_messages.push_back(message);
            return Ok(());
        }
        drop(state);
        self.process(host, message)
    }

    fn process(
        self: &Arc<Self>,
        host: &dyn FetchHost,
        message: CliqueMessage,
    ) -> Result<(), ProtocolViolation> {
        match message {
            CliqueMessage::Request(pieces) if self.leads => {
                let mut state = lock(&self.state);
                if pieces.iter().any(|piece| piece.is_to_leader)
                    || state.pending.len() + pieces.len() > PENDING_MAX
                {
                    return Err(ProtocolViolation("pieces were asked for that do not exist"));
                }
                state.pending.extend(pieces);
                drop(state);
                self.run_pending(host);
                host.flush_control_frames();
                Ok(())
            }
            CliqueMessage::Begin { id, gpus } if !self.leads => self.join(host, id, gpus),
            CliqueMessage::Batch { number, pieces } if !self.leads => {
                let order = lock(&self.order);
                // Declared first, so that after an error it is dropped without the lock.
                let mut memory = BatchMemory::default();
                let mut state = lock(&self.state);
                if number != state.next_batch {
                    return Err(ProtocolViolation("a batch is missing"));
                }
                let prepared = self.prepare(&mut state, host, &pieces, &mut memory)?;
                drop(state);
                self.run(host, prepared, memory);
                drop(order);
                host.flush_control_frames();
                Ok(())
            }
            CliqueMessage::Sent { number, pieces } => {
                let mut state = lock(&self.state);
                let batch = state.batches.get_mut(&number).filter(|batch| batch.sent.is_none());
                let batch = batch.ok_or(ProtocolViolation("a batch was told of twice, or never was one"))?;
                batch.sent = Some(pieces);
                let settled = self.settle(&mut state, number);
                drop(state);
                self.complete(host, settled);
                Ok(())
            }
            _ => Err(ProtocolViolation("a message about cliques came from the wrong side")),
        }
    }

    /// Puts pending pieces into batches, and runs them; the leader only.
    fn run_pending(self: &Arc<Self>, host: &dyn FetchHost) {
        let _order = lock(&self.order);
        loop {
            let mut memory = BatchMemory::default();
            let mut state = lock(&self.state);
            let under_way = state.batches.values().filter(|batch| !batch.has_ended).count();
            if state.failure.is_some() || state.is_beginning || under_way >= BATCHES_UNDER_WAY {
                return;
            }
            let count = state.pending.len().min(PIECES_MAX);
            if count == 0 {
                return;
            }
            if !state.clique.as_ref().is_some_and(|clique| {
                state.pending.iter().take(count).all(|piece| clique.has_both(piece, true))
            }) {
                state.is_beginning = true;
                drop(state);
                let weak = Arc::downgrade(self);
                return host.run_soon(Box::new(move || {
                    if let Some(this) = weak.upgrade() {
                        this.begin();
                    }
                }));
            }
            let pieces: Vec<_> = state.pending.drain(..count).collect();
            let number = state.next_batch;
            match self.prepare(&mut state, host, &pieces, &mut memory) {
                Ok(prepared) => {
                    drop(state);
                    host.send_clique_message(CliqueMessage::Batch { number, pieces }.encode());
                    self.run(host, prepared, memory);
                }
                Err(ProtocolViolation(why)) => {
                    drop(state);
                    return self.fail(why, true);
                }
            }
        }
    }

    /// Takes part in a batch with the memory of launches, or with other memory where a launch was cancelled.
    fn prepare(
        &self,
        state: &mut ExchangeState,
        host: &dyn FetchHost,
        pieces: &[CliquePiece],
        memory: &mut BatchMemory,
    ) -> Result<PreparedBatch, ProtocolViolation> {
        let Some(joined) = state.clique.clone() else {
            return Err(ProtocolViolation("a batch came before its clique"));
        };
        memory.clique = Some(Arc::clone(&joined));
        let (mut operations, mut receives, mut sent) = (Vec::new(), Vec::new(), None::<u64>);
        let mut allowed = Duration::ZERO;
        for (place, piece) in pieces.iter().enumerate() {
            if !joined.has_both(piece, self.leads) {
                return Err(ProtocolViolation("a piece is on a GPU that is not in the clique"));
            }
            let is_received = piece.is_to_leader == self.leads;
            let (own, other) = piece.gpus(self.leads);
            let found = if is_received {
                // A fetch that a cancellation ended keeps its pieces until their batches have ended.
                let unasked = ProtocolViolation("a piece was sent that nobody asked for");
                let fetch = state.fetches.get_mut(&piece.group).ok_or(unasked.clone())?;
                if !fetch.put_in_batch(piece) {
                    return Err(unasked);
                }
                Some((Arc::clone(&fetch.launch), true))
            } else {
                host.launch_that_sends(piece.group).map(|launch| (launch, false))
            };
            let guarded = found.and_then(|(launch, is_received)| {
                let spans = if is_received { &launch.lists.inbound } else { &launch.lists.outbound };
                let address = address_of(spans.spans.get(piece.receive as usize)?, piece, own);
                Some((address, launch.limits.stall, launch.access_owned()))
            });
            let mut from_launch = None;
            if let Some((address, stall, guard)) = guarded {
                let address = address.ok_or(ProtocolViolation("a piece is not in its transfer"))?;
                allowed = allowed.max(stall);
                from_launch = guard.map(|guard| (address, guard));
            }
            if !is_received {
                *sent.get_or_insert(0) |= u64::from(from_launch.is_some()) << place;
            } else {
                receives.push((place, *piece, from_launch.is_some()));
            }
            let address = match from_launch {
                Some((address, guard)) if is_received => {
                    memory.receiving.push(guard);
                    address
                }
                Some((address, guard)) => {
                    memory.sending.push((guard, u64::from(piece.len)));
                    address
                }
                None => joined.scratch.get(&own).map_or(0, |scratch| {
                    if is_received { scratch.sink.address() } else { scratch.zeros.address() }
                }),
            };
            operations.push(CliqueOperation {
                rank: self.rank(&joined, self.me, own),
                peer: self.rank(&joined, self.peer, other),
                direction: if is_received { OperationDirection::Receive } else { OperationDirection::Send },
                address,
                len: piece.len as usize,
            });
        }
        let number = state.next_batch;
        state.next_batch += 1;
        let began = clock::monotonic();
        state.batches.insert(number, BatchState { receives, has_ended: false, sent: None, began, allowed });
        Ok(PreparedBatch { number, operations, sent })
    }

    fn rank(&self, joined: &JoinedClique, member: MemberId, gpu: u32) -> usize {
        // `has_both` has found the GPU in the clique.
        joined.clique.key().rank_of(&clique_member(member, gpu)).unwrap_or(usize::MAX)
    }

    /// Runs a batch, and tells the peer what it receives. The caller holds the order.
    fn run(self: &Arc<Self>, host: &dyn FetchHost, prepared: PreparedBatch, memory: BatchMemory) {
        let PreparedBatch { number, operations, sent } = prepared;
        if let Some(pieces) = sent {
            host.send_clique_message(CliqueMessage::Sent { number, pieces }.encode());
        }
        let Some(clique) = memory.clique.as_ref().map(|joined| Arc::clone(&joined.clique)) else { return };
        let weak = Arc::downgrade(self);
        // SAFETY: the guards keep the bytes of launches, and reserve them, until the listener drops them; other memory is
        // kept as long as the process.
        unsafe {
            clique.run(&operations, move |outcome| match (outcome, weak.upgrade()) {
                (Ok(()), this) => {
                    memory.sending.iter().for_each(|(guard, bytes)| guard.launch().add_progress(*bytes));
                    drop(memory);
                    this.iter().for_each(|this| this.on_batch_ended(number));
                }
                (Err(error), this) => {
                    // First, so that a launch that the program makes when it learns of a failed one uses no clique any more.
                    this.iter().for_each(|this| this.fail(&error.to_string(), true));
                    drop(memory);
                }
            });
        }
    }

    fn on_batch_ended(self: &Arc<Self>, number: u64) {
        let Some(host) = self.host.upgrade() else { return };
        let mut state = lock(&self.state);
        state.last_end = Some(clock::monotonic());
        let Some(batch) = state.batches.get_mut(&number) else { return };
        batch.has_ended = true;
        let settled = self.settle(&mut state, number);
        drop(state);
        self.complete(&*host, settled);
        if self.leads {
            self.run_pending(&*host);
            host.flush_control_frames();
        }
    }

    /// Forgets a batch that has ended and of which the sender has told what it sent.
    fn settle(&self, state: &mut ExchangeState, number: u64) -> Settled {
        let mut settled = Settled::default();
        let is_settled =
            |batch: &BatchState| batch.has_ended && (batch.receives.is_empty() || batch.sent.is_some());
        if !state.batches.get(&number).is_some_and(is_settled) {
            return settled;
        }
        let Some(batch) = state.batches.remove(&number) else { return settled };
        let sent = batch.sent.unwrap_or_default();
        for (place, piece, is_into_launch) in batch.receives {
            let Some(fetch) = state.fetches.get_mut(&piece.group) else { continue };
            let is_real = is_into_launch && sent >> place & 1 != 0;
            let guard = if is_real { fetch.launch.access_owned() } else { None };
            let Some((start, is_last)) = fetch.end_piece(&piece, guard.is_some()) else { continue };
            if let Some(guard) = guard {
                settled.landed.push((piece.group, guard, start, piece.len, is_last));
                settled.next.extend(fetch.take_piece(piece.group, self.leads));
            }
            if fetch.is_idle() {
                state.fetches.remove(&piece.group);
            }
        }
        settled
    }

    fn complete(self: &Arc<Self>, host: &dyn FetchHost, settled: Settled) {
        for (group, guard, start, len, is_last) in settled.landed {
            let launch = Arc::clone(guard.launch());
            launch.set_transport(TransportKind::Nccl);
            host.count_received(TransportKind::Nccl, u64::from(len));
            if is_last {
                // The peer learns of it before this program does, because the program may exit at once.
                host.on_group_fetched(group);
            }
            launch.record_arrived_bytes(start, u64::from(len));
        }
        self.ask_for(host, settled.next);
    }

    /// Makes a clique of the GPUs of the present one and of the pending pieces; the leader, on a thread that may wait.
    fn begin(self: &Arc<Self>) {
        let Some(host) = self.host.upgrade() else { return };
        let state = lock(&self.state);
        let mut gpus = state.clique.as_ref().map(|clique| clique.gpus.clone()).unwrap_or_default();
        for piece in &state.pending {
            let (own, other) = piece.gpus(true);
            gpus[0].insert(own);
            gpus[1].insert(other);
        }
        drop(state);
        let lists = gpus.each_ref().map(|side| side.iter().copied().collect::<Vec<_>>());
        let id = self.nccl.new_id().map_err(CliqueError::from);
        let started = id.and_then(|id| Ok((id, self.start(id, gpus)?)));
        let (id, joined) = match started {
            Ok(started) => started,
            Err(error) => return self.fail(&error.to_string(), true),
        };
        host.send_clique_message(CliqueMessage::Begin { id: *id.as_bytes(), gpus: lists }.encode());
        host.flush_control_frames();
        let (this, clique) = (Arc::downgrade(self), Arc::clone(&joined.clique));
        // Batches begin once the clique has started, so that receives can still be pushed if it never does.
        clique.when_ready(move |outcome| {
            let Some(this) = this.upgrade() else { return };
            match outcome {
                Ok(()) => this.use_clique(joined),
                Err(error) => this.fail(&error.to_string(), true),
            }
        });
    }

    /// Joins the clique that the leader begins, on a thread that may wait; the follower.
    fn join(
        self: &Arc<Self>,
        host: &dyn FetchHost,
        id: [u8; CliqueId::LEN],
        [leader, follower]: [Vec<u32>; 2],
    ) -> Result<(), ProtocolViolation> {
        let mut state = lock(&self.state);
        if follower.iter().any(|gpu| !state.own.contains_key(gpu)) || state.begun >= CLIQUES_MAX {
            return Err(ProtocolViolation("a clique has a GPU that this side has not named"));
        }
        state.begun += 1;
        state.is_beginning = true;
        drop(state);
        let weak = Arc::downgrade(self);
        host.run_soon(Box::new(move || {
            let Some(this) = weak.upgrade() else { return };
            let gpus = [follower.into_iter().collect(), leader.into_iter().collect()];
            let joined = match this.start(CliqueId::from_bytes(id), gpus) {
                Ok(joined) => joined,
                Err(error) => return this.fail(&error.to_string(), true),
            };
            let again = Arc::downgrade(&this);
            joined.clique.when_ready(move |outcome| {
                if let (Err(error), Some(this)) = (outcome, again.upgrade()) {
                    this.fail(&error.to_string(), true);
                }
            });
            this.use_clique(joined);
        }));
        Ok(())
    }

    /// Starts a clique of these GPUs of this side and of the peer.
    fn start(&self, id: CliqueId, gpus: [BTreeSet<u32>; 2]) -> Result<JoinedClique, CliqueError> {
        let own: Vec<Gpu> = {
            let state = lock(&self.state);
            gpus[0].iter().filter_map(|gpu| state.own.get(gpu).cloned()).collect()
        };
        let members = [self.me, self.peer].into_iter().zip(&gpus);
        let members =
            members.flat_map(|(member, gpus)| gpus.iter().map(move |gpu| clique_member(member, *gpu)));
        let key = GpuCliqueKey::new(members).map_err(|error| CliqueError::Ended(error.to_string()))?;
        let mut scratch = BTreeMap::new();
        for gpu in &own {
            scratch.insert(gpu.ordinal(), GpuScratch::of_gpu(gpu)?);
        }
        let local: Vec<_> = own.into_iter().map(|gpu| (clique_member(self.me, gpu.ordinal()), gpu)).collect();
        let clique = GpuClique::start(self.nccl, &key, id, &local, self.options)?;
        let mut state = lock(&self.state);
        if let Some(why) = &state.failure {
            return Err(CliqueError::Ended(why.to_string()));
        }
        state.starting = Some(Arc::clone(&clique));
        drop(state);
        Ok(JoinedClique { clique, gpus, scratch })
    }

    /// Uses a clique for all later batches. The one before ends once its batches have.
    fn use_clique(self: &Arc<Self>, joined: JoinedClique) {
        let Some(host) = self.host.upgrade() else { return };
        let mut state = lock(&self.state);
        state.starting = None;
        let before = state.clique.replace(Arc::new(joined));
        drop(state);
        // Dropped without the lock: it may end here.
        drop(before);
        loop {
            let mut state = lock(&self.state);
            let Some(message) = state.waiting_messages.pop_front() else {
                state.is_beginning = false;
                break;
            };
            drop(state);
            let begins_another = matches!(message, CliqueMessage::Begin { .. });
            if let Err(ProtocolViolation(why)) = self.process(&*host, message) {
                return self.fail(why, true);
            }
            if begins_another {
                // What waits behind it is for that one.
                return;
            }
        }
        if self.leads {
            self.run_pending(&*host);
            host.flush_control_frames();
        }
    }

    /// Ends the use of cliques on the connection, and tells the peer if it does not know.
    fn fail(self: &Arc<Self>, why: &str, is_peer_to_know: bool) {
        let Some(fetches) = self.end_with(why) else { return };
        tracing::warn!(peer = %self.peer, why, "the clique of GPUs has failed: bytes go through sockets");
        let Some(host) = self.host.upgrade() else { return };
        if is_peer_to_know {
            host.send_clique_message(CliqueMessage::Failed(why.to_owned()).encode());
        }
        for fetch in fetches {
            host.on_clique_failed(&fetch.launch, why, fetch.has_not_begun());
        }
        host.flush_control_frames();
    }

    /// Ends the exchange with its connection, whose end fails the launches.
    pub fn end(&self) {
        drop(self.end_with("the connection has ended"));
    }

    /// Returns the fetches, if this is the first end.
    fn end_with(&self, why: &str) -> Option<Vec<CliqueFetch>> {
        let mut state = lock(&self.state);
        if state.failure.is_some() {
            return None;
        }
        state.failure = Some(why.into());
        let cliques = [state.clique.take().map(|joined| Arc::clone(&joined.clique)), state.starting.take()];
        let fetches = std::mem::take(&mut state.fetches);
        state.pending.clear();
        state.waiting_messages.clear();
        state.batches.clear();
        drop(state);
        for clique in cliques.into_iter().flatten() {
            // Not in order: operations of batches may wait for the peer.
            clique.end(CliqueError::Ended(why.to_owned()));
        }
        Some(fetches.into_values().collect())
    }

    /// Returns when the first of the batches under way is overdue, if no other one ends before.
    pub fn first_limit(&self) -> Option<Instant> {
        let state = lock(&self.state);
        let limit = |batch: &BatchState| {
            state.last_end.map_or(batch.began, |end| end.max(batch.began))
                + batch.allowed
                + batch.allowed / GRACE
        };
        state.batches.values().filter(|batch| !batch.has_ended).map(limit).min()
    }

    /// Ends the clique because a batch has not ended in time: a launch that was cancelled waits for it.
    pub fn fail_for_overdue_batch(self: &Arc<Self>) {
        self.fail("a batch has not ended in time", true);
    }
}

impl JoinedClique {
    /// Returns whether it has both GPUs of a piece, as seen by the leader or by the follower.
    fn has_both(&self, piece: &CliquePiece, leads: bool) -> bool {
        let (own, other) = piece.gpus(leads);
        self.gpus[0].contains(&own) && self.gpus[1].contains(&other)
    }
}

/// Returns a GPU of a member as a member of a clique.
const fn clique_member(member: MemberId, gpu: u32) -> CliqueMember {
    CliqueMember { task: member.task.0, incarnation: member.incarnation.get(), device: gpu }
}

/// Returns the address of a piece in the memory of a GPU; none if the span does not have it.
fn address_of(span: &Span, piece: &CliquePiece, gpu: u32) -> Option<u64> {
    let memory = span.device_memory().filter(|memory| memory.gpu().ordinal() == gpu)?;
    let end = piece.from.checked_add(u64::from(piece.len))?;
    (end <= span.len() as u64).then(|| memory.address() + span.region_offset() as u64 + piece.from)
}
