//! Runs the transfers of one step and checks their bytes.
//!
//! `move_plan.rs` chooses the transfers. Begin at `run_step_transfers`.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use futures_util::future::join_all;

use super::move_plan::{self, BufferMove};
use super::resharding::{self, ReshardPlans};
use super::step::{ExerciseError, ExerciseOptions, PeerFailure, STALL, StepReport};
use crate::agent::{Agent, device_id_of_task};
use crate::clock;
use crate::test_pattern;
use crate::transfer::{
    Arena, Buffer, LaunchOptions, LaunchStats, MemberId, MemoryError, PrepareError, ReshardStats, Span,
    TransferError, TransferSpec,
};

/// The buffers of a task, which are allocated once. Those for the ring are stored by direction, device and
/// turn, those for partners by direction.
#[derive(Debug)]
pub struct MoveBuffers {
    ring: HashMap<(bool, u32, usize), Buffer>,
    partner: [Buffer; 2],
}

impl MoveBuffers {
    /// Allocates the buffers for this number of devices.
    pub fn new(devices: u32, bytes_max: usize) -> Result<Self, MemoryError> {
        let arena = Arena::new(move_plan::arena_bytes(devices, bytes_max))?;
        let mut ring = HashMap::new();
        for turn in 0..move_plan::TURNS {
            for device in 0..devices {
                for outgoing in [false, true] {
                    let buffer = arena.allocate(move_plan::ring_buffer_bytes(turn, device, bytes_max))?;
                    ring.insert((outgoing, device, turn), buffer);
                }
            }
        }
        Ok(Self { ring, partner: [arena.allocate(bytes_max)?, arena.allocate(bytes_max)?] })
    }

    fn buffer_span(&self, part: &MoveEnd, turn: Option<usize>) -> Result<Span, MemoryError> {
        let buffer = match turn {
            Some(turn) => self.ring.get(&(part.outgoing, part.of.device, turn)),
            None => Some(&self.partner[usize::from(part.outgoing)]),
        };
        let missing = MemoryError::OutOfRange { start: 0, end: part.of.bytes, len: 0 };
        buffer.ok_or(missing)?.range(0..part.of.bytes)
    }
}

/// The prepared transfers that are launched again in later steps, by peer and turn.
pub type PreparedMoves = HashMap<(MemberId, usize), PeerTransfers>;

/// The transfers with one peer, and their buffers.
#[derive(Debug)]
pub struct PeerTransfers {
    prepared: crate::transfer::PreparedTransfers,
    parts: Vec<(MoveEnd, Span)>,
}

/// One end of a move.
#[derive(Debug, Clone, Copy)]
struct MoveEnd {
    outgoing: bool,
    of: BufferMove,
}

/// The result of the transfers with one peer in a step.
struct PeerResult {
    peer: MemberId,
    kept: Option<(usize, PeerTransfers)>,
    outcome: Result<LaunchStats, TransferError>,
    checked: usize,
    damaged: Option<ExerciseError>,
}

/// The transfers of the exercise, with the memory for them.
#[derive(Debug)]
pub struct StepTransfers<'a> {
    agent: &'a Agent,
    options: ExerciseOptions,
    buffers: MoveBuffers,
    /// The memory for the shards of the array.
    shards: Arena,
}

/// The transfers that last as long as the members do not change.
#[derive(Debug)]
pub struct EpochTransfers {
    pub members: Vec<MemberId>,
    /// The number of the epoch.
    pub number: u64,
    /// The number of devices that each member has at least.
    pub devices: u32,
    pub rings: PreparedMoves,
    pub resharding: Option<ReshardPlans>,
}

impl<'a> StepTransfers<'a> {
    /// Allocates the memory for all buffers.
    pub fn new(agent: &'a Agent, options: ExerciseOptions) -> Result<Self, MemoryError> {
        let devices = agent.config().devices.min(move_plan::DEVICES_MAX);
        let buffers = MoveBuffers::new(devices, options.bytes_max)?;
        let shards = resharding::allocate_arena(devices, options.bytes_max)?;
        Ok(Self { agent, options, buffers, shards })
    }

    /// Runs the transfers of step `number`, and checks the received bytes.
    pub async fn run_step_transfers(
        &self,
        epoch: &mut EpochTransfers,
        number: u64,
    ) -> Result<StepReport, ExerciseError> {
        let began = clock::monotonic();
        let turn = move_plan::ring_size_class_of_step(number);
        let (count, most) = (epoch.members.len(), self.options.bytes_max);
        let rings =
            self.moves_by_peer(&epoch.members, move_plan::ring_moves(count, epoch.devices, turn, most));
        let partners =
            self.moves_by_peer(&epoch.members, move_plan::partner_moves(count, number, epoch.number, most));
        // Each epoch and each kind of transfer has its own channel: an epoch counts anew, and the kinds do
        // not wait for each other.
        let channel = (epoch.number as u32) & !3;
        let mut work = Vec::new();
        for (peer, moves) in rings {
            let known = epoch.rings.remove(&(peer, turn));
            work.push(self.run_peer_transfers(
                number,
                epoch.number,
                peer,
                moves,
                known,
                (channel, Some(turn)),
            ));
        }
        for (peer, moves) in partners {
            work.push(self.run_peer_transfers(number, epoch.number, peer, moves, None, (channel | 1, None)));
        }
        let array = async {
            let Some(resharding) = &epoch.resharding else { return Ok(None) };
            let what = (number, move_plan::content_seed_of_array(number, epoch.number));
            resharding.reshard(self.agent, &self.shards, what, &epoch.members, channel | 2).await.map(Some)
        };
        let mut step = StepReport::new(number, epoch.members.clone());
        let (bundles, array) = tokio::join!(join_all(work), array);
        for done in bundles {
            let done = done?;
            if let Some(damaged) = done.damaged {
                return Err(damaged);
            }
            if let Some((turn, bundle)) = done.kept {
                epoch.rings.insert((done.peer, turn), bundle);
            }
            step.checked += done.checked;
            match done.outcome {
                Ok(stats) => {
                    step.sent += stats.sent;
                    step.received += stats.received;
                }
                Err(error) => step.failures.push(PeerFailure { with: vec![done.peer], error }),
            }
        }
        match array? {
            None => {}
            Some(Ok(resharded)) => {
                let ReshardStats { sent, received, .. } = resharded.moved;
                step.checked += resharded.checked;
                step.sent += sent;
                step.received += received;
                step.resharded = Some(resharded);
            }
            Some(Err((with, error))) => step.failures.push(PeerFailure { with, error }),
        }
        step.elapsed = clock::monotonic().saturating_duration_since(began);
        Ok(step)
    }

    /// Returns this task's part of the moves, by peer.
    fn moves_by_peer(
        &self,
        members: &[MemberId],
        moves: Vec<BufferMove>,
    ) -> BTreeMap<MemberId, Vec<MoveEnd>> {
        let here = self.agent.here();
        let mut shares: BTreeMap<MemberId, Vec<MoveEnd>> = BTreeMap::new();
        for of in moves {
            let (from, to) = (members[of.from], members[of.to]);
            if from == here {
                shares.entry(to).or_default().push(MoveEnd { outgoing: true, of });
            } else if to == here {
                shares.entry(from).or_default().push(MoveEnd { outgoing: false, of });
            }
        }
        shares
    }

    /// Runs the transfers with one peer.
    async fn run_peer_transfers(
        &self,
        step: u64,
        epoch: u64,
        peer: MemberId,
        parts: Vec<MoveEnd>,
        known: Option<PeerTransfers>,
        (channel, turn): (u32, Option<usize>),
    ) -> Result<PeerResult, ExerciseError> {
        let failed = |error: TransferError| {
            Ok(PeerResult { peer, kept: None, outcome: Err(error), checked: 0, damaged: None })
        };
        let mut bundle = match known {
            Some(bundle) => bundle,
            None => match self.prepare_peer_transfers(peer, parts, (channel, turn)).await? {
                Ok(bundle) => bundle,
                Err(error) => return failed(error.into()),
            },
        };
        for (part, span) in bundle.parts.iter().filter(|(part, _)| part.outgoing) {
            span.buffer().with_bytes_mut(|bytes| {
                test_pattern::fill_with_pattern(
                    &mut bytes[..span.len()],
                    move_plan::content_seed_of_move(step, epoch, part.of.key),
                )
            })?;
        }
        let transfer = bundle.prepared.launch(&[]);
        let outcome = match tokio::time::timeout(self.options.limit, transfer.clone()).await {
            Ok(outcome) => outcome,
            Err(_) => {
                transfer.cancel("the step took too long").await;
                transfer.wait_for(Duration::ZERO).unwrap_or(Err(TransferError::Closed))
            }
        };
        let (mut checked, mut damaged) = (0, None);
        if outcome.is_ok() {
            for (part, span) in bundle.parts.iter().filter(|(part, _)| !part.outgoing) {
                let seed = move_plan::content_seed_of_move(step, epoch, part.of.key);
                let wrong = span.buffer().with_bytes(|bytes| {
                    test_pattern::first_difference_from_pattern(&bytes[..span.len()], seed)
                })?;
                checked += usize::from(wrong.is_none());
                if let Some(at) = wrong {
                    damaged = Some(ExerciseError::Damaged { step, from: peer, len: span.len(), at });
                }
            }
        }
        let kept = turn.filter(|_| outcome.is_ok()).map(|turn| (turn, bundle));
        Ok(PeerResult { peer, kept, outcome, checked, damaged })
    }

    /// Finds the buffers for the moves with one peer, and prepares the transfers.
    async fn prepare_peer_transfers(
        &self,
        peer: MemberId,
        wanted: Vec<MoveEnd>,
        (channel, turn): (u32, Option<usize>),
    ) -> Result<Result<PeerTransfers, PrepareError>, ExerciseError> {
        let here = self.agent.here();
        let mut parts = Vec::with_capacity(wanted.len());
        let mut specs = Vec::with_capacity(wanted.len());
        for part in wanted {
            let span = self.buffers.buffer_span(&part, turn)?;
            let (near, far) =
                (device_id_of_task(here.task, part.of.device), device_id_of_task(peer.task, part.of.device));
            specs.push(if part.outgoing {
                TransferSpec::send(span.clone(), near, far, part.of.key)
            } else {
                TransferSpec::receive(span.clone(), far, near, part.of.key)
            });
            parts.push((part, span));
        }
        let options = LaunchOptions {
            channel,
            stall: STALL,
            deadline: Some(self.options.limit),
            ..LaunchOptions::default()
        };
        let preparing = self.agent.engine().prepare(specs, options);
        let prepared = match tokio::time::timeout(self.options.limit, preparing).await {
            Ok(prepared) => prepared,
            Err(_) => {
                let why = "it was not prepared in time".to_owned();
                let transport = crate::transfer::TransportKind::Tcp;
                let error = TransferError::Transport { transport, member: peer, why };
                Err(PrepareError::Clique { member: peer, error })
            }
        };
        Ok(prepared.map(|prepared| PeerTransfers { prepared, parts }))
    }
}
