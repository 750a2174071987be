//! Implements one process of the benchmark: a transfer engine that executes orders.
//!
//! `controller.rs` combines the measurements of all processes. Begin at `run_bench_peer`, then `execute_order`.

use std::io::{self, BufRead as _, Write as _};
use std::ops::Range;
use std::process::ExitCode;

use anyhow::{Context as _, Result, bail, ensure};
use clap::Args;
use muster_gpu::{DeviceFacts, PageLocked};
use rustix::process::Signal;

use super::protocol::{BenchEngineSetup, BenchMemory, BenchOrder, BenchReply, BenchShape, PairSide};
use crate::clock;
use crate::host_checks::{ProbedGpu, ProbedGpus};
use crate::test_pattern;
use crate::transfer::{
    Arena, ArenaPool, Buffer, DeviceId, EngineConfig, Gpu, LaunchOptions, MemberId, MemberInfo,
    PreparedTransfers, TransferEngine, TransferHandle, TransferKey, TransferSpec, TransportKind,
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
pub fn run_bench_peer(arguments: &PeerArguments) -> Result<ExitCode> {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    let parent = rustix::process::getppid().map(|pid| pid.as_raw_nonzero().get());
    ensure!(parent == i32::try_from(arguments.parent).ok(), "whoever asked for this process has gone");
    let mut task = None;
    for line in io::stdin().lock().lines() {
        let order: BenchOrder = serde_json::from_str(&line?)?;
        let answer =
            execute_order(&mut task, order).unwrap_or_else(|error| BenchReply::Failed(format!("{error:#}")));
        let mut out = io::stdout().lock();
        out.write_all((serde_json::to_string(&answer)? + "\n").as_bytes())?;
        out.flush()?;
    }
    Ok(ExitCode::SUCCESS)
}

fn execute_order(task: &mut Option<PeerState>, order: BenchOrder) -> Result<BenchReply> {
    if let BenchOrder::Begin { setup, here, there, side } = order {
        let begun = task.insert(PeerState::start(&setup, here, there, side)?);
        let devices = vec![DeviceId(here.task.0)];
        let address = begun.engine.address().clone();
        return Ok(BenchReply::Here(MemberInfo { incarnation: here.incarnation, address, devices }));
    }
    let task = task.as_mut().context("the first order must be to begin")?;
    match order {
        BenchOrder::Begin { .. } => bail!("begun already"),
        BenchOrder::SetMembership(membership) => task.engine.on_membership(membership),
        BenchOrder::DescribeGpus => {
            return Ok(BenchReply::Gpus(describe_gpus()?));
        }
        BenchOrder::Prepare { again } => return task.time_preparations(again),
        BenchOrder::Allocate(shape) => task.allocate_slots(shape)?,
        BenchOrder::Fill { measurement } => task.fill_buffers(measurement)?,
        BenchOrder::Move { launches } => return task.run_launches(launches),
        BenchOrder::Check { measurement } => {
            return Ok(BenchReply::Checked { wrong: task.check_contents(measurement)? });
        }
        BenchOrder::PingPong { rounds, measurement } => return task.run_ping_pong(rounds, measurement),
        BenchOrder::Clear => task.drop_all_slots(),
    }
    Ok(BenchReply::Done)
}

fn describe_gpus() -> Result<ProbedGpus> {
    /// The default of an engine for one direction.
    const PAGE_LOCKED_BYTES: usize = 128 << 20;
    let all = DeviceFacts::of_all_devices()?.into_iter();
    let gpus = all.map(|gpu| ProbedGpu { name: gpu.name, memory: gpu.memory, peers: gpu.peers });
    let locked = PageLocked::allocate(&Gpu::open(0)?, PAGE_LOCKED_BYTES);
    let page_locked = locked.map(|memory| memory.len() as u64).map_err(|error| error.to_string());
    Ok(ProbedGpus { gpus: gpus.collect(), page_locked })
}

/// The buffers of one launch, and what launches it.
struct BenchSlot {
    buffers: Vec<Buffer>,
    size: usize,
    launcher: LaunchMethod,
}

enum LaunchMethod {
    Prepared(PreparedTransfers),
    Unprepared(UnpreparedTransfers),
}

/// Transfers that are requested anew at each launch. Those that are received get new buffers each time.
struct UnpreparedTransfers {
    engine: TransferEngine,
    memory: ArenaPool,
    request: BenchRequest,
}

/// The request of a launch to the engine, without the memory.
#[derive(Clone, Copy)]
struct BenchRequest {
    here: DeviceId,
    there: DeviceId,
    outgoing: bool,
    first_key: u64,
    options: LaunchOptions,
}

impl BenchRequest {
    /// Returns the transfers of the first `size` bytes of each buffer.
    fn transfer_specs(&self, buffers: &[Buffer], size: usize) -> Result<Vec<TransferSpec>> {
        let spec = |(buffer, key): (&Buffer, u64)| {
            let (span, key) = (buffer.range(0..size)?, TransferKey(key));
            Ok(if self.outgoing {
                TransferSpec::send(span, self.here, self.there, key)
            } else {
                TransferSpec::receive(span, self.there, self.here, key)
            })
        };
        buffers.iter().zip(self.first_key..).map(spec).collect()
    }
}

impl BenchSlot {
    /// Launches its transfers.
    fn launch(&mut self) -> Result<TransferHandle> {
        match &mut self.launcher {
            LaunchMethod::Prepared(prepared) => Ok(prepared.launch(&[])),
            LaunchMethod::Unprepared(UnpreparedTransfers { engine, memory, request }) => {
                if !request.outgoing {
                    for buffer in &mut self.buffers {
                        *buffer = memory.allocate(buffer.len())?;
                    }
                }
                Ok(engine.transfer(&[], request.transfer_specs(&self.buffers, self.size)?, request.options))
            }
        }
    }
}

/// Opens the GPU of a task: the tasks use those of the host in turn.
fn open_gpu_of_task(task: u32) -> Result<Gpu> {
    let count = muster_gpu::device_count()?;
    ensure!(count > 0, "the CUDA driver finds no GPU");
    Ok(Gpu::open(task % count)?)
}

struct PeerState {
    engine: TransferEngine,
    here: DeviceId,
    there: DeviceId,
    side: PairSide,
    unprepared: bool,
    /// The GPU of the buffers; none for memory of the host.
    gpu: Option<Gpu>,
    /// The memory of what is received unprepared.
    memory: ArenaPool,
    moves: Vec<BenchSlot>,
    /// The outgoing and incoming slots of the latency measurement: two of each, so that the next launch is
    /// posted before the last one is checked.
    out: Vec<BenchSlot>,
    inbound: Vec<BenchSlot>,
}

impl PeerState {
    fn start(setup: &BenchEngineSetup, here: MemberId, there: MemberId, side: PairSide) -> Result<Self> {
        let (near, far) = (DeviceId(here.task.0), DeviceId(there.task.0));
        let mut config = EngineConfig::new(here, vec![near]);
        config.transport = setup.transport;
        config.fabric.clone_from(&setup.fabric);
        config.cliques = setup.cliques;
        config.checks = setup.checksums;
        config.lanes = setup.lanes.unwrap_or(config.lanes);
        config.spin = setup.spin.unwrap_or(config.spin);
        config.tls = setup.certificates.read_files()?;
        let gpu = match setup.memory {
            BenchMemory::Host => None,
            BenchMemory::Gpu => Some(open_gpu_of_task(here.task.0)?),
        };
        Ok(Self {
            gpu,
            engine: TransferEngine::start(config).context("cannot start a transfer engine")?,
            here: near,
            there: far,
            side,
            unprepared: setup.unprepared,
            memory: ArenaPool::default(),
            moves: Vec::new(),
            out: Vec::new(),
            inbound: Vec::new(),
        })
    }

    fn request(&self, channel: BenchChannel, outgoing: bool, first_key: u64) -> BenchRequest {
        let options = LaunchOptions { channel: channel as u32, ..LaunchOptions::default() };
        BenchRequest { here: self.here, there: self.there, outgoing, first_key, options }
    }

    fn make_slot(
        &self,
        arena: &Arena,
        shape: BenchShape,
        channel: BenchChannel,
        outgoing: bool,
        number: usize,
    ) -> Result<BenchSlot> {
        let buffers = (0..shape.batch)
            .map(|_| Ok(arena.allocate(shape.buffer_stride())?))
            .collect::<Result<Vec<_>>>()?;
        let request = self.request(channel, outgoing, (number * shape.batch) as u64);
        let launcher = if self.unprepared {
            let (engine, memory) = (self.engine.clone(), self.memory.clone());
            LaunchMethod::Unprepared(UnpreparedTransfers { engine, memory, request })
        } else {
            let transfer_specs = request.transfer_specs(&buffers, shape.size)?;
            LaunchMethod::Prepared(self.engine.prepare(transfer_specs, request.options).wait()?)
        };
        Ok(BenchSlot { buffers, size: shape.size, launcher })
    }

    /// Times the first preparation, which makes the connection, and later ones.
    fn time_preparations(&self, again: u32) -> Result<BenchReply> {
        let buffer = [Arena::new(4096)?.allocate(4096)?];
        let request = self.request(BenchChannel::Prepares, self.side == PairSide::Sender, 0);
        let mut kept = Vec::new();
        let mut times = Vec::new();
        for _ in 0..=again {
            let began = clock::monotonic_nanoseconds();
            let transfer_specs = request.transfer_specs(&buffer, 4096)?;
            kept.push(self.engine.prepare(transfer_specs, request.options).wait()?);
            times.push(clock::monotonic_nanoseconds() - began);
        }
        let first = times.remove(0);
        Ok(BenchReply::Prepared { first, again: times })
    }

    fn allocate_slots(&mut self, shape: BenchShape) -> Result<()> {
        let sender = self.side == PairSide::Sender;
        let arena = match &self.gpu {
            Some(gpu) => Arena::on_gpu(gpu, shape.memory_bytes())?,
            None => Arena::new(shape.memory_bytes())?,
        };
        self.moves = (0..shape.in_flight)
            .map(|number| self.make_slot(&arena, shape, BenchChannel::Moves, sender, number))
            .collect::<Result<_>>()?;
        let (out, inbound) = if sender {
            (BenchChannel::There, BenchChannel::Back)
        } else {
            (BenchChannel::Back, BenchChannel::There)
        };
        self.out =
            (0..2).map(|number| self.make_slot(&arena, shape, out, true, number)).collect::<Result<_>>()?;
        self.inbound = (0..2)
            .map(|number| self.make_slot(&arena, shape, inbound, false, number))
            .collect::<Result<_>>()?;
        Ok(())
    }

    fn drop_all_slots(&mut self) {
        self.moves.clear();
        self.out.clear();
        self.inbound.clear();
    }

    fn fill_buffers(&self, measurement: u64) -> Result<()> {
        for (number, buffer, size) in numbered_buffers(&self.moves) {
            let seed = test_pattern::pattern_word_at(measurement, number);
            change_contents(buffer, 0..size, |bytes| match self.side {
                PairSide::Sender => test_pattern::fill_with_pattern(bytes, seed),
                PairSide::Receiver => test_pattern::fill_with_wrong_pattern(bytes, seed),
            })?;
        }
        Ok(())
    }

    fn check_contents(&self, measurement: u64) -> Result<Option<String>> {
        for (number, buffer, size) in numbered_buffers(&self.moves) {
            let seed = test_pattern::pattern_word_at(measurement, number);
            let wrong = read_contents(buffer, 0..size, |bytes| {
                test_pattern::first_difference_from_pattern(bytes, seed)
            })?;
            if let Some(at) = wrong {
                return Ok(Some(format!("byte {at} of {size} of buffer {number} is not what was sent")));
            }
        }
        Ok(None)
    }

    /// Runs launches, as many at a time as there are slots. A launch is awaited only when its slot is needed
    /// again.
    fn run_launches(&mut self, launches: u64) -> Result<BenchReply> {
        let before = self.bytes_by_transport();
        let slots = self.moves.len();
        let mut under_way: Vec<Option<TransferHandle>> = (0..slots).map(|_| None).collect();
        let began = clock::monotonic_nanoseconds();
        for n in 0..launches {
            let at = (n % slots as u64) as usize;
            if let Some(transfer) = under_way[at].take() {
                transfer.wait()?;
            }
            under_way[at] = Some(self.moves[at].launch()?);
        }
        for transfer in under_way.into_iter().flatten() {
            transfer.wait()?;
        }
        let ended = clock::monotonic_nanoseconds();
        let by = busiest_transport(before, self.bytes_by_transport())?;
        Ok(BenchReply::Moved { began, ended, by })
    }

    /// Returns the bytes moved so far by each transport.
    fn bytes_by_transport(&self) -> TotalsByTransport {
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
    fn run_ping_pong(&mut self, rounds: u64, measurement: u64) -> Result<BenchReply> {
        let first = self.side == PairSide::Sender;
        let (mine, others) = (
            test_pattern::pattern_word_at(measurement, u64::from(first)),
            test_pattern::pattern_word_at(measurement, u64::from(!first)),
        );
        fill_ping_pong_buffers(&self.out, &self.inbound, mine, others)?;
        let before = self.bytes_by_transport();
        let (mut launched, mut arrived, mut calls) = (Vec::new(), Vec::new(), Vec::new());
        let mut wrong = None;
        let worked = clock::process_cpu_nanoseconds();
        let mut expected = self.inbound[0].launch()?;
        for round in 0..rounds {
            let (now, next) = ((round % 2) as usize, ((round + 1) % 2) as usize);
            write_stamp(&self.out[now], test_pattern::pattern_word_at(mine, round))?;
            // Posted before this round is answered, so that the other never sends to a receiver that is not
            // ready.
            let following = if round + 1 < rounds { Some(self.inbound[next].launch()?) } else { None };
            if !first {
                expected.wait()?;
                arrived.push(clock::monotonic_nanoseconds());
            }
            let began = clock::monotonic_nanoseconds();
            let sent = self.out[now].launch()?;
            calls.push(clock::monotonic_nanoseconds().saturating_sub(began));
            launched.push(began);
            if first {
                expected.wait()?;
                arrived.push(clock::monotonic_nanoseconds());
            }
            sent.wait()?;
            wrong = wrong.or(check_stamp(&self.inbound[now], test_pattern::pattern_word_at(others, round))?);
            if let Some(following) = following {
                expected = following;
            }
        }
        let worked = clock::process_cpu_nanoseconds().saturating_sub(worked);
        wrong = wrong.or(check_ping_pong_buffers(&self.inbound, others, rounds)?);
        let by = busiest_transport(before, self.bytes_by_transport())?;
        Ok(BenchReply::Tossed { launched, arrived, calls, worked, by, wrong })
    }
}

/// The bytes sent and received by each transport.
type TotalsByTransport = [u64; TransportKind::ALL.len()];

/// Returns the transport that moved most bytes between two readings.
fn busiest_transport(before: TotalsByTransport, after: TotalsByTransport) -> Result<TransportKind> {
    let moved = TransportKind::ALL.into_iter().zip(before.into_iter().zip(after));
    Ok(moved.max_by_key(|(_, (before, after))| after - before).context("no transports")?.0)
}

/// Returns all buffers with their numbers and the number of their bytes that are moved.
fn numbered_buffers(slots: &[BenchSlot]) -> impl Iterator<Item = (u64, &Buffer, usize)> {
    let buffers = slots.iter().flat_map(|slot| slot.buffers.iter().map(|buffer| (buffer, slot.size)));
    (0..).zip(buffers).map(|(number, (buffer, size))| (number, buffer, size))
}

/// Calls `read` with a range of the contents, which may be in the memory of a GPU.
fn read_contents<T>(buffer: &Buffer, range: Range<usize>, read: impl FnOnce(&[u8]) -> T) -> Result<T> {
    if buffer.gpu().is_none() {
        return Ok(buffer.with_bytes(|bytes| read(&bytes[range]))?);
    }
    let mut bytes = vec![0; range.len()];
    buffer.read_contents(range.start, &mut bytes)?;
    Ok(read(&bytes))
}

/// Overwrites a range of the contents, which may be in the memory of a GPU: `write` writes all of its bytes.
fn change_contents(buffer: &Buffer, range: Range<usize>, write: impl FnOnce(&mut [u8])) -> Result<()> {
    if buffer.gpu().is_none() {
        return Ok(buffer.with_bytes_mut(|bytes| write(&mut bytes[range]))?);
    }
    let mut bytes = vec![0; range.len()];
    write(&mut bytes);
    Ok(buffer.write_contents(range.start, &bytes)?)
}

/// The bytes at the beginning of a buffer that change in each round; the rest is checked at the end.
const STAMP: usize = 8;

fn fill_ping_pong_buffers(out: &[BenchSlot], inbound: &[BenchSlot], mine: u64, others: u64) -> Result<()> {
    for (number, buffer, size) in numbered_buffers(out) {
        change_contents(buffer, STAMP.min(size)..size, |bytes| {
            test_pattern::fill_with_pattern(bytes, test_pattern::pattern_word_at(mine, number));
        })?;
    }
    for (number, buffer, size) in numbered_buffers(inbound) {
        change_contents(buffer, STAMP.min(size)..size, |bytes| {
            test_pattern::fill_with_wrong_pattern(bytes, test_pattern::pattern_word_at(others, number));
        })?;
    }
    Ok(())
}

fn check_ping_pong_buffers(inbound: &[BenchSlot], others: u64, rounds: u64) -> Result<Option<String>> {
    // A single round uses only the first slot.
    for (number, buffer, size) in numbered_buffers(&inbound[..inbound.len().min(rounds as usize)]) {
        let seed = test_pattern::pattern_word_at(others, number);
        let wrong = read_contents(buffer, STAMP.min(size)..size, |bytes| {
            test_pattern::first_difference_from_pattern(bytes, seed)
        })?;
        if let Some(at) = wrong {
            return Ok(Some(format!(
                "to and fro: byte {} of buffer {number} is not what was sent",
                at + STAMP
            )));
        }
    }
    Ok(None)
}

fn write_stamp(slot: &BenchSlot, stamp: u64) -> Result<()> {
    for buffer in &slot.buffers {
        change_contents(buffer, 0..STAMP.min(slot.size), |bytes| {
            test_pattern::fill_with_pattern(bytes, stamp);
        })?;
    }
    Ok(())
}

fn check_stamp(slot: &BenchSlot, stamp: u64) -> Result<Option<String>> {
    for buffer in &slot.buffers {
        let wrong = read_contents(buffer, 0..STAMP.min(slot.size), |bytes| {
            test_pattern::first_difference_from_pattern(bytes, stamp)
        })?;
        if wrong.is_some() {
            return Ok(Some("to and fro: what arrived is not of this round".to_owned()));
        }
    }
    Ok(None)
}
