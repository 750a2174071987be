//! Implements one process of the benchmark: an engine that executes orders.
//!
//! It does not measure across processes (`conductor.rs`). Begin at `run`, then `execute`.

use std::io::{self, BufRead as _, Write as _};
use std::process::ExitCode;

use anyhow::{Context as _, Result, bail, ensure};
use clap::Args;
use rustix::process::Signal;

use super::BenchShape;
use super::protocol::{BenchOrder, BenchReply, EngineSetup, PairSide};
use crate::clock;
use crate::test_pattern;
use crate::transfer::{
    Arena, Buffer, Config, DeviceId, Engine, LaunchOptions, Member, Peer, Prepared, Spec, Transfer,
    TransferKey, TransportKind,
};

/// Be a task of `muster transfer bench`
#[derive(Debug, Args)]
pub struct PeerArguments {
    /// The process that asked for it; when that ends, so does this one
    #[arg(long)]
    parent: u32,
}

/// The channel by which launches are matched. The latency measurement has one for each direction, so that
/// neither waits for a place in the order of the other.
#[derive(Debug, Clone, Copy)]
enum BenchChannel {
    Moves,
    There,
    Back,
    Prepares,
}

/// Runs the subcommand.
pub fn run(arguments: &PeerArguments) -> Result<ExitCode> {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    let parent = rustix::process::getppid().map(|pid| pid.as_raw_nonzero().get());
    ensure!(parent == i32::try_from(arguments.parent).ok(), "whoever asked for this process has gone");
    let mut task = None;
    for line in io::stdin().lock().lines() {
        let order: BenchOrder = serde_json::from_str(&line?)?;
        let answer =
            execute(&mut task, order).unwrap_or_else(|error| BenchReply::Failed(format!("{error:#}")));
        let mut out = io::stdout().lock();
        out.write_all((serde_json::to_string(&answer)? + "\n").as_bytes())?;
        out.flush()?;
    }
    Ok(ExitCode::SUCCESS)
}

fn execute(task: &mut Option<PeerState>, order: BenchOrder) -> Result<BenchReply> {
    if let BenchOrder::Begin { setup, here, there, side } = order {
        let begun = task.insert(PeerState::begin(&setup, here, there, side)?);
        let devices = vec![DeviceId(here.task.0)];
        let address = begun.engine.address().clone();
        return Ok(BenchReply::Here(Peer { incarnation: here.incarnation, address, devices }));
    }
    let task = task.as_mut().context("the first order must be to begin")?;
    match order {
        BenchOrder::Begin { .. } => bail!("begun already"),
        BenchOrder::SetMembership(membership) => task.engine.on_membership(membership),
        BenchOrder::Prepare { again } => return task.prepare_often(again),
        BenchOrder::Allocate(shape) => task.allocate(shape)?,
        BenchOrder::Fill { measurement } => task.fill(measurement)?,
        BenchOrder::Move { launches } => return task.launch(launches),
        BenchOrder::Check { measurement } => {
            return Ok(BenchReply::Checked { wrong: task.check(measurement)? });
        }
        BenchOrder::PingPong { rounds, measurement } => return task.ping_pong(rounds, measurement),
        BenchOrder::Clear => task.clear(),
    }
    Ok(BenchReply::Done)
}

/// The buffers of one launch, and the prepared launch.
struct BenchSlot {
    buffers: Vec<Buffer>,
    size: usize,
    prepared: Prepared,
}

struct PeerState {
    engine: Engine,
    here: DeviceId,
    there: DeviceId,
    side: PairSide,
    moves: Vec<BenchSlot>,
    /// The outgoing and incoming slots of the latency measurement: two of each, so that the next launch is
    /// posted before the last one is checked.
    out: Vec<BenchSlot>,
    inbound: Vec<BenchSlot>,
}

impl PeerState {
    fn begin(setup: &EngineSetup, here: Member, there: Member, side: PairSide) -> Result<Self> {
        let (near, far) = (DeviceId(here.task.0), DeviceId(there.task.0));
        let mut config = Config::new(here, vec![near]);
        config.transport = setup.transport;
        config.checks = setup.checksums;
        config.lanes = setup.lanes.unwrap_or(config.lanes);
        config.spin = setup.spin.unwrap_or(config.spin);
        config.tls = setup.certificates.read()?;
        Ok(Self {
            engine: Engine::start(config).context("cannot start a transfer engine")?,
            here: near,
            there: far,
            side,
            moves: Vec::new(),
            out: Vec::new(),
            inbound: Vec::new(),
        })
    }

    fn spec(&self, buffer: &Buffer, size: usize, outgoing: bool, key: u64) -> Result<Spec> {
        let (span, key) = (buffer.range(0..size)?, TransferKey(key));
        Ok(if outgoing {
            Spec::send(span, self.here, self.there, key)
        } else {
            Spec::receive(span, self.there, self.here, key)
        })
    }

    fn slot(
        &self,
        arena: &Arena,
        shape: BenchShape,
        channel: BenchChannel,
        outgoing: bool,
        number: usize,
    ) -> Result<BenchSlot> {
        let buffers =
            (0..shape.batch).map(|_| Ok(arena.allocate(shape.stride())?)).collect::<Result<Vec<_>>>()?;
        let first = (number * shape.batch) as u64;
        let specs = buffers
            .iter()
            .zip(first..)
            .map(|(buffer, key)| self.spec(buffer, shape.size, outgoing, key))
            .collect::<Result<Vec<_>>>()?;
        let options = LaunchOptions { channel: channel as u32, ..LaunchOptions::default() };
        Ok(BenchSlot { buffers, size: shape.size, prepared: self.engine.prepare(specs, options).wait()? })
    }

    /// Times the first preparation, which makes the connection, and later ones.
    fn prepare_often(&self, again: u32) -> Result<BenchReply> {
        let buffer = Arena::new(4096)?.allocate(4096)?;
        let options = LaunchOptions { channel: BenchChannel::Prepares as u32, ..LaunchOptions::default() };
        let mut kept = Vec::new();
        let mut times = Vec::new();
        for _ in 0..=again {
            let began = clock::monotonic_nanoseconds();
            let spec = self.spec(&buffer, 4096, self.side == PairSide::Sender, 0)?;
            kept.push(self.engine.prepare(vec![spec], options).wait()?);
            times.push(clock::monotonic_nanoseconds() - began);
        }
        let first = times.remove(0);
        Ok(BenchReply::Prepared { first, again: times })
    }

    fn allocate(&mut self, shape: BenchShape) -> Result<()> {
        let sender = self.side == PairSide::Sender;
        let arena = Arena::new(shape.memory())?;
        self.moves = (0..shape.in_flight)
            .map(|number| self.slot(&arena, shape, BenchChannel::Moves, sender, number))
            .collect::<Result<_>>()?;
        let (out, inbound) = if sender {
            (BenchChannel::There, BenchChannel::Back)
        } else {
            (BenchChannel::Back, BenchChannel::There)
        };
        self.out = (0..2).map(|number| self.slot(&arena, shape, out, true, number)).collect::<Result<_>>()?;
        self.inbound =
            (0..2).map(|number| self.slot(&arena, shape, inbound, false, number)).collect::<Result<_>>()?;
        Ok(())
    }

    fn clear(&mut self) {
        self.moves.clear();
        self.out.clear();
        self.inbound.clear();
    }

    fn fill(&self, measurement: u64) -> Result<()> {
        for (number, buffer, size) in numbered(&self.moves) {
            let seed = test_pattern::at(measurement, number);
            buffer.write(|bytes| match self.side {
                PairSide::Sender => test_pattern::fill(&mut bytes[..size], seed),
                PairSide::Receiver => test_pattern::fill_wrong(&mut bytes[..size], seed),
            })?;
        }
        Ok(())
    }

    fn check(&self, measurement: u64) -> Result<Option<String>> {
        for (number, buffer, size) in numbered(&self.moves) {
            let wrong = buffer.read(|bytes| {
                test_pattern::first_mismatch(&bytes[..size], test_pattern::at(measurement, number))
            })?;
            if let Some(at) = wrong {
                return Ok(Some(format!("byte {at} of {size} of buffer {number} is not what was sent")));
            }
        }
        Ok(None)
    }

    /// Runs launches, as many at a time as there are slots. A launch is awaited only when its slot is needed
    /// again.
    fn launch(&mut self, launches: u64) -> Result<BenchReply> {
        let before = self.bytes();
        let slots = self.moves.len();
        let mut under_way: Vec<Option<Transfer>> = (0..slots).map(|_| None).collect();
        let began = clock::monotonic_nanoseconds();
        for n in 0..launches {
            let at = (n % slots as u64) as usize;
            if let Some(transfer) = under_way[at].take() {
                transfer.wait()?;
            }
            under_way[at] = Some(self.moves[at].prepared.launch(&[]));
        }
        for transfer in under_way.into_iter().flatten() {
            transfer.wait()?;
        }
        let ended = clock::monotonic_nanoseconds();
        let by = most_moved(before, self.bytes())?;
        Ok(BenchReply::Moved { began, ended, by })
    }

    /// Returns the bytes moved so far by each transport.
    fn bytes(&self) -> BytesByTransport {
        let mut sums = [0; TransportKind::ALL.len()];
        for link in self.engine.links() {
            for (sum, (_, (sent, received))) in sums.iter_mut().zip(link.bytes) {
                *sum += sent + received;
            }
        }
        sums
    }

    /// Runs round trips, one at a time. The sender of the pair begins; the other answers as soon as a buffer
    /// arrives.
    fn ping_pong(&mut self, rounds: u64, measurement: u64) -> Result<BenchReply> {
        let first = self.side == PairSide::Sender;
        let (mine, others) = (
            test_pattern::at(measurement, u64::from(first)),
            test_pattern::at(measurement, u64::from(!first)),
        );
        prime(&self.out, &self.inbound, mine, others)?;
        let before = self.bytes();
        let (mut launched, mut arrived) = (Vec::new(), Vec::new());
        let mut wrong = None;
        let worked = clock::process_nanoseconds();
        let mut expected = self.inbound[0].prepared.launch(&[]);
        for round in 0..rounds {
            let (now, next) = ((round % 2) as usize, ((round + 1) % 2) as usize);
            stamp(&self.out[now], test_pattern::at(mine, round))?;
            // Posted before this round is answered, so that the other never sends to a receiver that is not
            // ready.
            let following = (round + 1 < rounds).then(|| self.inbound[next].prepared.launch(&[]));
            if !first {
                expected.wait()?;
                arrived.push(clock::monotonic_nanoseconds());
            }
            launched.push(clock::monotonic_nanoseconds());
            let sent = self.out[now].prepared.launch(&[]);
            if first {
                expected.wait()?;
                arrived.push(clock::monotonic_nanoseconds());
            }
            sent.wait()?;
            wrong = wrong.or(stamped(&self.inbound[now], test_pattern::at(others, round))?);
            if let Some(following) = following {
                expected = following;
            }
        }
        let worked = clock::process_nanoseconds().saturating_sub(worked);
        wrong = wrong.or(primed(&self.inbound, others, rounds)?);
        let by = most_moved(before, self.bytes())?;
        Ok(BenchReply::Tossed { launched, arrived, worked, by, wrong })
    }
}

/// Bytes by transport.
type BytesByTransport = [u64; TransportKind::ALL.len()];

/// Returns the transport that moved most bytes between two readings.
fn most_moved(before: BytesByTransport, after: BytesByTransport) -> Result<TransportKind> {
    let moved = TransportKind::ALL.into_iter().zip(before.into_iter().zip(after));
    Ok(moved.max_by_key(|(_, (before, after))| after - before).context("no transports")?.0)
}

/// Returns all buffers with their numbers and the number of their bytes that are moved.
fn numbered(slots: &[BenchSlot]) -> impl Iterator<Item = (u64, &Buffer, usize)> {
    let buffers = slots.iter().flat_map(|slot| slot.buffers.iter().map(|buffer| (buffer, slot.size)));
    (0..).zip(buffers).map(|(number, (buffer, size))| (number, buffer, size))
}

/// The bytes at the beginning of a buffer that change in each round; the rest is checked at the end.
const STAMP: usize = 8;

fn prime(out: &[BenchSlot], inbound: &[BenchSlot], mine: u64, others: u64) -> Result<()> {
    for (number, buffer, size) in numbered(out) {
        buffer.write(|bytes| {
            test_pattern::fill(&mut bytes[STAMP.min(size)..size], test_pattern::at(mine, number))
        })?;
    }
    for (number, buffer, size) in numbered(inbound) {
        buffer.write(|bytes| {
            test_pattern::fill_wrong(&mut bytes[STAMP.min(size)..size], test_pattern::at(others, number))
        })?;
    }
    Ok(())
}

fn primed(inbound: &[BenchSlot], others: u64, rounds: u64) -> Result<Option<String>> {
    // A single round uses only the first slot.
    for (number, buffer, size) in numbered(&inbound[..inbound.len().min(rounds as usize)]) {
        if let Some(at) = buffer.read(|bytes| {
            test_pattern::first_mismatch(&bytes[STAMP.min(size)..size], test_pattern::at(others, number))
        })? {
            return Ok(Some(format!(
                "to and fro: byte {} of buffer {number} is not what was sent",
                at + STAMP
            )));
        }
    }
    Ok(None)
}

fn stamp(slot: &BenchSlot, stamp: u64) -> Result<()> {
    for buffer in &slot.buffers {
        buffer.write(|bytes| test_pattern::fill(&mut bytes[..STAMP.min(slot.size)], stamp))?;
    }
    Ok(())
}

fn stamped(slot: &BenchSlot, stamp: u64) -> Result<Option<String>> {
    for buffer in &slot.buffers {
        if buffer.read(|bytes| test_pattern::first_mismatch(&bytes[..STAMP.min(slot.size)], stamp))?.is_some()
        {
            return Ok(Some("to and fro: what arrived is not of this round".to_owned()));
        }
    }
    Ok(None)
}
