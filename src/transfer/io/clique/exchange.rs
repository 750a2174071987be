//! The messages of both sides about cliques and their batches, and the beginning and the end of cliques.
//!
//! The module says how batches keep their order. Begin at [`CliqueExchange::fetch_or_request_push`].
#![allow(unsafe_code, reason = "runs operations on memory that guards keep")]

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, TryLockError, Weak};
use std::time::{Duration, Instant};

use muster_cliques::{CliqueError, CliqueId, CliqueOptions, GpuClique, GpuCliqueKey, Nccl};
use muster_gpu::Gpu;

use super::batches::{BatchMemory, CliqueBatches, DeferredDrops, PreparedBatch, SettledBatch};
use super::fetch::CliqueFetch;
use super::host::CliqueHost;
use super::joined::{GpuScratch, JoinedClique, clique_member};
use crate::base::membership::MemberId;
use crate::base::sync::lock;
use crate::base::transport::TransportKind;
use crate::launch::peer_launch::PeerLaunch;
use crate::protocol::clique_message::{CliqueMessage, CliquePiece, GPUS_MAX, PIECES_MAX};
use crate::protocol::link::ProtocolViolation;
use crate::protocol::link::launch_definition::LaunchDefinition;

/// The most pieces of a launch that are asked for: enough to keep a network busy while one is asked for, and few enough for a program
/// that waits for the end of a cancellation.
const PIECES_UNDER_WAY: usize = 16;
/// The most batches under way: while one moves, the next one is being launched.
const BATCHES_UNDER_WAY: usize = 2;
/// The most pieces that the leader holds: for as many launches as a link has in flight, and those that were cancelled.
const PENDING_MAX: usize = 1 << 18;
/// The most messages that wait while a follower joins.
const WAITING_MAX: usize = 1024;
/// The most cliques of a connection: each has one GPU more than that before.
const CLIQUES_MAX: u32 = 2 * GPUS_MAX as u32;

/// The exchange of one connection.
pub struct CliqueExchange {
    host: Weak<dyn CliqueHost>,
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

struct ExchangeState {
    /// The GPUs of this side that have bytes of launches, by number.
    own: BTreeMap<u32, Gpu>,
    clique: Option<Arc<JoinedClique>>,
    /// The one that starts, for [`CliqueExchange::end`].
    starting: Option<Arc<GpuClique>>,
    /// Whether a clique is being made. Messages wait until it is.
    is_beginning: bool,
    /// The number of cliques that were begun.
    begun: u32,
    /// The cliques that larger ones replaced, until their batches have ended.
    former: Vec<Weak<GpuClique>>,
    /// The GPUs of the follower that its requests named; the leader's.
    peer_gpus: BTreeSet<u32>,
    waiting_messages: VecDeque<CliqueMessage>,
    /// The pieces that are in no batch yet, of both directions; the leader's.
    pending: VecDeque<CliquePiece>,
    batches: CliqueBatches,
    /// Why no clique is used any more.
    failure: Option<Arc<str>>,
}

impl CliqueExchange {
    /// Creates the exchange of a connection between two members of one job.
    pub fn new(
        host: Weak<dyn CliqueHost>,
        nccl: &'static Nccl,
        options: CliqueOptions,
        me: MemberId,
        peer: MemberId,
    ) -> Arc<Self> {
        let batches = CliqueBatches::new(me, peer);
        let leads = batches.leads();
        let state = ExchangeState {
            own: BTreeMap::new(),
            clique: None,
            starting: None,
            is_beginning: false,
            begun: 0,
            former: Vec::new(),
            peer_gpus: BTreeSet::new(),
            waiting_messages: VecDeque::new(),
            pending: VecDeque::new(),
            batches,
            failure: None,
        };
        let (order, reading, state) = (Mutex::default(), Mutex::default(), Mutex::new(state));
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
        host: &dyn CliqueHost,
        launch: &Arc<PeerLaunch>,
        definition: &LaunchDefinition,
    ) {
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
            state.batches.fetches.insert(group, fetch);
        }
        drop(state);
        self.ask_for(host, pieces);
    }

    /// Asks for pieces: the leader itself, or by a message.
    fn ask_for(self: &Arc<Self>, host: &dyn CliqueHost, pieces: Vec<CliquePiece>) {
        if pieces.is_empty() {
            return;
        }
        if self.leads {
            lock(&self.state).pending.extend(pieces);
            return self.run_pending(host);
        }
        for part in pieces.chunks(PIECES_MAX) {
            host.send_clique_message(CliqueMessage::Request(part.to_vec()).encode());
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
        host: &dyn CliqueHost,
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

    fn on_message(self: &Arc<Self>, host: &dyn CliqueHost, payload: &[u8]) -> Result<(), ProtocolViolation> {
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
            if state.waiting_messages.len() >= WAITING_MAX {
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
        host: &dyn CliqueHost,
        message: CliqueMessage,
    ) -> Result<(), ProtocolViolation> {
        match message {
            CliqueMessage::Request(pieces) if self.leads => {
                let mut state = lock(&self.state);
                let is_possible =
                    |piece: &CliquePiece| !piece.is_to_leader && state.own.contains_key(&piece.sender_gpu);
                if !pieces.iter().all(is_possible) {
                    return Err(ProtocolViolation("pieces were asked for that this side does not have"));
                }
                state.peer_gpus.extend(pieces.iter().map(|piece| piece.receiver_gpu));
                if state.peer_gpus.len() > GPUS_MAX || state.pending.len() + pieces.len() > PENDING_MAX {
                    return Err(ProtocolViolation("too many pieces or GPUs were asked for"));
                }
                state.pending.extend(pieces);
                drop(state);
                self.run_pending(host);
                Ok(())
            }
            CliqueMessage::Begin { id, gpus } if !self.leads => self.join(host, id, gpus),
            CliqueMessage::Batch { number, pieces } if !self.leads => {
                // Declared first, so that they are dropped without a lock, also after an error.
                let (mut deferred, mut memory) = (DeferredDrops::default(), BatchMemory::default());
                let order = lock(&self.order);
                let mut state = lock(&self.state);
                if number != state.batches.next_number() {
                    return Err(ProtocolViolation("a batch is missing"));
                }
                let joined = state.clique.clone();
                let joined = joined.ok_or(ProtocolViolation("a batch came before its clique"))?;
                let prepared = state.batches.prepare(&joined, host, &pieces, &mut memory, &mut deferred)?;
                drop(state);
                self.run(host, prepared, memory);
                drop(order);
                host.flush_control_frames();
                Ok(())
            }
            CliqueMessage::Sent { number, pieces } => {
                let mut state = lock(&self.state);
                let settled = state.batches.record_sent(number, pieces)?;
                drop(state);
                self.complete(host, settled);
                Ok(())
            }
            _ => Err(ProtocolViolation("a message about cliques came from the wrong side")),
        }
    }

    /// Puts pending pieces into batches, tells the peer, and runs them; the leader only.
    fn run_pending(self: &Arc<Self>, host: &dyn CliqueHost) {
        let mut deferred = DeferredDrops::default();
        if let Err((ProtocolViolation(why), memory)) = self.run_pending_in_order(host, &mut deferred) {
            self.fail(why, true);
            drop(memory);
        }
        host.flush_control_frames();
    }

    /// Does so with the lock of the order. Values that must be dropped without it go to `deferred`, or come with the error.
    fn run_pending_in_order(
        self: &Arc<Self>,
        host: &dyn CliqueHost,
        deferred: &mut DeferredDrops,
    ) -> Result<(), (ProtocolViolation, BatchMemory)> {
        let _order = lock(&self.order);
        loop {
            let mut memory = BatchMemory::default();
            let mut state = lock(&self.state);
            let under_way = state.batches.count_under_way();
            if state.failure.is_some() || state.is_beginning || under_way >= BATCHES_UNDER_WAY {
                return Ok(());
            }
            let count = state.pending.len().min(PIECES_MAX);
            if count == 0 {
                return Ok(());
            }
            let has_all = |joined: &&Arc<JoinedClique>| {
                state.pending.iter().take(count).all(|piece| joined.has_both(piece, true))
            };
            let Some(joined) = state.clique.as_ref().filter(has_all).cloned() else {
                state.is_beginning = true;
                drop(state);
                let weak = Arc::downgrade(self);
                host.run_soon(Box::new(move || {
                    if let Some(this) = weak.upgrade() {
                        this.begin();
                    }
                }));
                return Ok(());
            };
            let pieces: Vec<_> = state.pending.drain(..count).collect();
            let number = state.batches.next_number();
            let prepared = state.batches.prepare(&joined, host, &pieces, &mut memory, deferred);
            drop(state);
            match prepared {
                Ok(prepared) => {
                    host.send_clique_message(CliqueMessage::Batch { number, pieces }.encode());
                    self.run(host, prepared, memory);
                }
                Err(violation) => return Err((violation, memory)),
            }
        }
    }

    /// Runs a batch, and tells the peer which of its pieces have the bytes of launches. The caller holds the order.
    fn run(self: &Arc<Self>, host: &dyn CliqueHost, prepared: PreparedBatch, memory: BatchMemory) {
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
        let settled = state.batches.record_end(number);
        drop(state);
        self.complete(&*host, settled);
        if self.leads {
            self.run_pending(&*host);
        }
    }

    fn complete(self: &Arc<Self>, host: &dyn CliqueHost, settled: SettledBatch) {
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

    /// Makes a clique of the GPUs of the present one, of all that this side may send from, and of the pending pieces; the leader, on a
    /// thread that may wait.
    fn begin(self: &Arc<Self>) {
        let Some(host) = self.host.upgrade() else { return };
        let mut state = lock(&self.state);
        let mut gpus = state.clique.as_ref().map(|clique| clique.gpus.clone()).unwrap_or_default();
        gpus[0].extend(state.own.keys());
        for piece in &state.pending {
            let (own, other) = piece.gpus(true);
            gpus[0].insert(own);
            gpus[1].insert(other);
        }
        state.begun += 1;
        let (number, groups) =
            (state.begun, state.pending.iter().map(|piece| piece.group).collect::<BTreeSet<_>>());
        let mut stalls: Vec<Duration> =
            state.batches.fetches.values().map(|fetch| fetch.launch.limits.stall).collect();
        drop(state);
        if number > CLIQUES_MAX {
            return self.fail("too many cliques were begun", true);
        }
        // A start that never ends must cost no launch its stall limit: until then its bytes can be pushed.
        stalls.extend(groups.iter().filter_map(|group| Some(host.launch_that_sends(*group)?.limits.stall)));
        let shortest = stalls.into_iter().min().map_or(Duration::MAX, |stall| stall / 2);
        let start_timeout = self.options.start_timeout.min(shortest);
        let options = CliqueOptions { start_timeout, ..self.options };
        let lists = gpus.each_ref().map(|side| side.iter().copied().collect::<Vec<_>>());
        let id = self.nccl.new_id().map_err(CliqueError::from);
        let started = id.and_then(|id| Ok((id, self.start(id, number, gpus, options)?)));
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
        host: &dyn CliqueHost,
        id: [u8; CliqueId::LEN],
        [leader, follower]: [Vec<u32>; 2],
    ) -> Result<(), ProtocolViolation> {
        let mut state = lock(&self.state);
        if follower.iter().any(|gpu| !state.own.contains_key(gpu)) || state.begun >= CLIQUES_MAX {
            return Err(ProtocolViolation("a clique has a GPU that this side has not named"));
        }
        state.begun += 1;
        state.is_beginning = true;
        let number = state.begun;
        drop(state);
        let weak = Arc::downgrade(self);
        host.run_soon(Box::new(move || {
            let Some(this) = weak.upgrade() else { return };
            let gpus = [follower.into_iter().collect(), leader.into_iter().collect()];
            let joined = match this.start(CliqueId::from_bytes(id), number, gpus, this.options) {
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
    fn start(
        &self,
        id: CliqueId,
        number: u32,
        gpus: [BTreeSet<u32>; 2],
        options: CliqueOptions,
    ) -> Result<JoinedClique, CliqueError> {
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
        let clique = GpuClique::start(self.nccl, &key, id, &local, options)?;
        let mut state = lock(&self.state);
        if let Some(why) = &state.failure {
            return Err(CliqueError::Ended(why.to_string()));
        }
        state.starting = Some(Arc::clone(&clique));
        drop(state);
        Ok(JoinedClique { number, clique, gpus, scratch })
    }

    /// Uses a clique for all later batches. The one before ends once its batches have.
    fn use_clique(self: &Arc<Self>, joined: JoinedClique) {
        let Some(host) = self.host.upgrade() else { return };
        let mut state = lock(&self.state);
        state.starting = None;
        let before = state.clique.replace(Arc::new(joined));
        state.former.retain(|former| former.strong_count() > 0);
        state.former.extend(before.iter().map(|before| Arc::downgrade(&before.clique)));
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
                // The messages behind it are for that clique.
                return;
            }
        }
        if self.leads {
            self.run_pending(&*host);
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
        let joined = state.clique.take();
        let mut cliques: Vec<Arc<GpuClique>> =
            joined.iter().map(|joined| Arc::clone(&joined.clique)).collect();
        cliques.extend(state.starting.take());
        cliques.extend(state.former.drain(..).filter_map(|former| former.upgrade()));
        let fetches = state.batches.take_all();
        state.pending.clear();
        state.waiting_messages.clear();
        drop(state);
        for clique in cliques {
            // Not in order: operations of batches may wait for the peer.
            clique.end(CliqueError::Ended(why.to_owned()));
        }
        Some(fetches.into_values().collect())
    }

    /// Returns when the first of the batches under way is overdue, if no other one ends before.
    pub fn first_limit(&self) -> Option<Instant> {
        lock(&self.state).batches.first_limit()
    }

    /// Ends the clique because a batch has not ended in time: a launch that was cancelled waits for it.
    pub fn fail_for_overdue_batch(self: &Arc<Self>) {
        self.fail("a batch has not ended in time", true);
    }
}
