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
use crate::launch::peer_launch::OwnedAccessGuard;
use crate::memory::Span;
use crate::protocol::clique_message::CliquePiece;
use crate::protocol::link::{GroupId, ProtocolViolation};

/// A batch is overdue after the longest stall limit of its launches and this part of it: the launches fail first, with their own reason.
const GRACE: u32 = 16;

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
pub struct BatchMemory {
    pub receiving: Vec<OwnedAccessGuard>,
    pub sending: Vec<(OwnedAccessGuard, u64)>,
    pub clique: Option<Arc<JoinedClique>>,
}

/// A batch that is about to be run.
pub struct PreparedBatch {
    pub number: u64,
    pub operations: Vec<CliqueOperation>,
    /// The pieces that this side sends from the memory of launches; none if it sends nothing.
    pub sent: Option<u64>,
}

/// What follows from the end of a batch.
#[derive(Default)]
pub struct SettledBatch {
    /// Bytes that are in place: the group, the launch, the offset in its inbound stream, the length, and whether they are the last ones.
    pub landed: Vec<(GroupId, OwnedAccessGuard, u64, u32, bool)>,
    /// The pieces to ask for next.
    pub next: Vec<CliquePiece>,
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
    /// When a batch last ended. A batch waits for those before it, so until then none was overdue.
    last_end: Option<Instant>,
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
            last_end: None,
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
    ) -> Result<PreparedBatch, ProtocolViolation> {
        memory.clique = Some(Arc::clone(joined));
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
                let fetch = self.fetches.get_mut(&piece.group).ok_or(unasked.clone())?;
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
                rank: rank(joined, self.me, own),
                peer: rank(joined, self.peer, other),
                direction: if is_received { OperationDirection::Receive } else { OperationDirection::Send },
                address,
                len: piece.len as usize,
            });
        }
        let number = self.next;
        self.next += 1;
        let began = clock::monotonic();
        self.under_way.insert(number, BatchState { receives, has_ended: false, sent: None, began, allowed });
        Ok(PreparedBatch { number, operations, sent })
    }

    /// Records that a batch has ended in order. Returns what follows.
    pub fn record_end(&mut self, number: u64) -> SettledBatch {
        self.last_end = Some(clock::monotonic());
        let Some(batch) = self.under_way.get_mut(&number) else { return SettledBatch::default() };
        batch.has_ended = true;
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
            let guard = if is_real { fetch.launch.access_owned() } else { None };
            let Some((start, is_last)) = fetch.end_piece(&piece, guard.is_some()) else { continue };
            if let Some(guard) = guard {
                settled.landed.push((piece.group, guard, start, piece.len, is_last));
                settled.next.extend(fetch.take_piece(piece.group, self.leads));
            }
            if fetch.is_idle() {
                self.fetches.remove(&piece.group);
            }
        }
        settled
    }

    /// Forgets all batches, and returns the fetches. Listeners of batches find nothing any more.
    pub fn take_all(&mut self) -> HashMap<GroupId, CliqueFetch> {
        self.under_way.clear();
        std::mem::take(&mut self.fetches)
    }

    /// Returns when the first of the batches under way is overdue, if no other one ends before.
    pub fn first_limit(&self) -> Option<Instant> {
        let limit = |batch: &BatchState| {
            let begin = self.last_end.map_or(batch.began, |end| end.max(batch.began));
            begin + batch.allowed + batch.allowed / GRACE
        };
        self.under_way.values().filter(|batch| !batch.has_ended).map(limit).min()
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
