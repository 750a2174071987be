//! The batches of one connection: what each moves, and which of its pieces count. Begin at [`CliqueBatches::prepare`].

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use muster_cliques::{CliqueOperation, OperationDirection};
use muster_clock as clock;

use super::fetch::CliqueFetch;
use super::host::CliqueHost;
use super::joined::{JoinedClique, clique_member};
use crate::base::membership::MemberId;
use crate::launch::peer_launch::{OwnedAccessGuard, PeerLaunch};
use crate::memory::Span;
use crate::protocol::clique_message::CliquePiece;
use crate::protocol::link::{GroupId, ProtocolViolation};

/// A batch is overdue after the longest stall limit of its launches and this part of it: the launches fail first, with their own reason.
const GRACE: u32 = 16;
/// The limit of a batch whose launches were all cancelled before.
const LIMIT_WITHOUT_LAUNCHES: Duration = Duration::from_secs(30);

/// A batch that was run.
struct BatchState {
    /// The pieces that this side receives, by their place in the batch, and whether each is received into its launch's memory.
    receives: Vec<(usize, CliquePiece, bool)>,
    has_ended: bool,
    /// The pieces that the sender sends from the memory of launches, once it has told.
    sent: Option<u64>,
    /// When it began to be due: when it was run, when the batch before it in its clique ended, or when it ended itself and only the word
    /// of the sender is missing.
    began: Instant,
    allowed: Duration,
    /// The number of its clique.
    clique: u32,
}

/// The values that keep the memory of a batch.
#[derive(Default)]
pub struct BatchMemory {
    pub receiving: Vec<OwnedAccessGuard>,
    pub sending: Vec<(OwnedAccessGuard, u64)>,
    pub clique: Option<Arc<JoinedClique>>,
}

/// Values to drop where callbacks of the program may run: without a lock of the exchange.
#[derive(Default)]
pub struct DeferredDrops {
    refused: Vec<OwnedAccessGuard>,
    launches: Vec<Arc<PeerLaunch>>,
    fetches: Vec<CliqueFetch>,
}

/// A batch that is about to be run.
pub struct PreparedBatch {
    pub number: u64,
    pub operations: Vec<CliqueOperation>,
    /// The pieces that this side sends from the memory of launches; none if it sends nothing.
    pub sent: Option<u64>,
}

/// The consequences of the end of a batch.
#[derive(Default)]
pub struct SettledBatch {
    /// Bytes that are in place: the group, the launch, the offset in its inbound stream, the length, and whether they are the last ones.
    pub landed: Vec<(GroupId, OwnedAccessGuard, u64, u32, bool)>,
    /// The pieces to ask for next.
    pub next: Vec<CliquePiece>,
    /// The values that the batch has kept.
    pub deferred: DeferredDrops,
}

/// The batches of one connection, and the receives that they serve.
pub struct CliqueBatches {
    me: MemberId,
    peer: MemberId,
    leads: bool,
    /// The number of the next batch.
    next: u64,
    under_way: BTreeMap<u64, BatchState>,
    pub fetches: HashMap<GroupId, CliqueFetch>,
}

impl CliqueBatches {
    /// Creates the batches of a connection that has run none. The member with the lower task leads.
    pub fn new(me: MemberId, peer: MemberId) -> Self {
        let place = |member: MemberId| (member.task, member.incarnation);
        Self {
            me,
            peer,
            leads: place(me) < place(peer),
            next: 0,
            under_way: BTreeMap::new(),
            fetches: HashMap::new(),
        }
    }

    /// Returns whether this side leads.
    pub const fn leads(&self) -> bool {
        self.leads
    }

    /// Returns the number of the next batch.
    pub const fn next_number(&self) -> u64 {
        self.next
    }

    /// Returns the number of batches that have not ended.
    pub fn count_under_way(&self) -> usize {
        self.under_way.values().filter(|batch| !batch.has_ended).count()
    }

    /// Takes part in a batch with the memory of launches, or with other memory where a launch was cancelled.
    ///
    /// # Errors
    /// Returns [`ProtocolViolation`] for pieces that no launch of either side backs.
    pub fn prepare(
        &mut self,
        joined: &Arc<JoinedClique>,
        host: &dyn CliqueHost,
        pieces: &[CliquePiece],
        memory: &mut BatchMemory,
        deferred: &mut DeferredDrops,
    ) -> Result<PreparedBatch, ProtocolViolation> {
        memory.clique = Some(Arc::clone(joined));
        let (mut operations, mut receives, mut sent) = (Vec::new(), Vec::new(), None::<u64>);
        let mut allowed = None::<Duration>;
        for (place, piece) in pieces.iter().enumerate() {
            if !joined.has_both(piece, self.leads) {
                return Err(ProtocolViolation("a piece is on a GPU that is not in the clique"));
            }
            let is_received = piece.is_to_leader == self.leads;
            let (own, other) = piece.gpus(self.leads);
            let launch = if is_received {
                // A fetch whose launch was cancelled keeps its pieces until their batches have ended.
                let unasked = ProtocolViolation("a piece was sent that nobody asked for");
                let fetch = self.fetches.get_mut(&piece.group).ok_or(unasked.clone())?;
                if !fetch.put_in_batch(piece) {
                    return Err(unasked);
                }
                Some(Arc::clone(&fetch.launch))
            } else {
                host.launch_that_sends(piece.group)
            };
            let mut from_launch = None;
            if let Some(launch) = launch {
                let spans = if is_received { &launch.lists.inbound } else { &launch.lists.outbound };
                let span = spans.spans.get(piece.receive as usize);
                let address = span.and_then(|span| address_of(span, piece, own));
                allowed = allowed.max(Some(launch.limits.stall));
                match launch.try_access_owned() {
                    Ok(guard) => from_launch = address.map(|address| (address, guard)),
                    Err(refused) => deferred.refused.push(refused),
                }
                deferred.launches.push(launch);
                if address.is_none() {
                    return Err(ProtocolViolation("a piece is not in its transfer"));
                }
            }
            if is_received {
                receives.push((place, *piece, from_launch.is_some()));
            } else {
                *sent.get_or_insert(0) |= u64::from(from_launch.is_some()) << place;
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
                None => joined
                    .scratch_address(own, is_received)
                    .ok_or(ProtocolViolation("a piece is on a GPU without memory for it"))?,
            };
            operations.push(CliqueOperation {
                rank: rank(joined, self.me, own),
                peer: rank(joined, self.peer, other),
                direction: if is_received { OperationDirection::Receive } else { OperationDirection::Send },
                address,
                len: piece.len as usize,
            });
        }
        let number = self.next;
        self.next += 1;
        let batch = BatchState {
            receives,
            has_ended: false,
            sent: None,
            began: clock::monotonic(),
            allowed: allowed.unwrap_or(LIMIT_WITHOUT_LAUNCHES),
            clique: joined.number,
        };
        self.under_way.insert(number, batch);
        Ok(PreparedBatch { number, operations, sent })
    }

    /// Records that a batch has ended without an error. Returns what follows.
    pub fn record_end(&mut self, number: u64) -> SettledBatch {
        let now = clock::monotonic();
        let Some(batch) = self.under_way.get_mut(&number) else { return SettledBatch::default() };
        batch.has_ended = true;
        batch.began = now;
        // Those behind it in its clique waited for it.
        let clique = batch.clique;
        for (_, later) in self.under_way.range_mut(number + 1..) {
            if later.clique == clique && !later.has_ended {
                later.began = now;
            }
        }
        self.settle(number)
    }

    /// Records which pieces of a batch the peer sends from the memory of launches. Returns what follows.
    ///
    /// # Errors
    /// Returns [`ProtocolViolation`] if there is no such batch, or the peer has told before.
    pub fn record_sent(&mut self, number: u64, pieces: u64) -> Result<SettledBatch, ProtocolViolation> {
        let batch = self.under_way.get_mut(&number).filter(|batch| batch.sent.is_none());
        let batch = batch.ok_or(ProtocolViolation("a batch was told of twice, or never was one"))?;
        batch.sent = Some(pieces);
        Ok(self.settle(number))
    }

    /// Forgets a batch that has ended and of which the sender has told what it sent.
    fn settle(&mut self, number: u64) -> SettledBatch {
        let mut settled = SettledBatch::default();
        let is_settled =
            |batch: &BatchState| batch.has_ended && (batch.receives.is_empty() || batch.sent.is_some());
        if !self.under_way.get(&number).is_some_and(is_settled) {
            return settled;
        }
        let Some(batch) = self.under_way.remove(&number) else { return settled };
        let sent = batch.sent.unwrap_or_default();
        for (place, piece, is_into_launch) in batch.receives {
            let Some(fetch) = self.fetches.get_mut(&piece.group) else { continue };
            let is_real = is_into_launch && sent >> place & 1 != 0;
            let guard = match is_real.then(|| fetch.launch.try_access_owned()) {
                Some(Ok(guard)) => Some(guard),
                Some(Err(refused)) => {
                    settled.deferred.refused.push(refused);
                    None
                }
                None => None,
            };
            let Some((start, is_last)) = fetch.end_piece(&piece, guard.is_some()) else {
                settled.deferred.refused.extend(guard);
                continue;
            };
            if let Some(guard) = guard {
                settled.landed.push((piece.group, guard, start, piece.len, is_last));
                settled.next.extend(fetch.take_piece(piece.group, self.leads));
            }
            if fetch.is_idle() {
                settled.deferred.fetches.extend(self.fetches.remove(&piece.group));
            }
        }
        settled
    }

    /// Forgets all batches, and returns the fetches. Listeners of batches find nothing any more.
    pub fn take_all(&mut self) -> HashMap<GroupId, CliqueFetch> {
        self.under_way.clear();
        std::mem::take(&mut self.fetches)
    }

    /// Returns when the first of the batches is overdue: one that has not ended, or whose sender has not told what it sent.
    pub fn first_limit(&self) -> Option<Instant> {
        let limit = |batch: &BatchState| batch.began + batch.allowed + batch.allowed / GRACE;
        self.under_way.values().map(limit).min()
    }
}

fn rank(joined: &JoinedClique, member: MemberId, gpu: u32) -> usize {
    // `has_both` has found the GPU in the clique.
    joined.clique.key().rank_of(&clique_member(member, gpu)).unwrap_or(usize::MAX)
}

/// Returns the address of a piece in the memory of a GPU; none if the span does not have it.
fn address_of(span: &Span, piece: &CliquePiece, gpu: u32) -> Option<u64> {
    let memory = span.device_memory().filter(|memory| memory.gpu().ordinal() == gpu)?;
    let end = piece.from.checked_add(u64::from(piece.len))?;
    (end <= span.len() as u64).then(|| memory.address() + span.region_offset() as u64 + piece.from)
}
