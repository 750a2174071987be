//! Runs the engines of several tasks in one process, over real sockets and real shared memory.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use muster::transfer::{
    Arena, Buffer, CliqueChoice, DeviceId, EngineConfig, Incarnation, LaunchOptions, MemberId, MemberInfo,
    Membership, MemoryError, TaskId, TransferEngine, TransferHandle, TransferKey, TransferSpec,
    TransportChoice,
};

use crate::fabric_provider::fabric_over_tcp;
use crate::gpu_driver::open_gpu;

/// The time limit of operations that should take a moment.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// Selects the memory of the buffers of most tests: `gpu` for the memory of GPUs.
const MEMORY: &str = "MUSTER_TRANSFER_MEMORY";

/// Names the fabric of engines over TCP: a provider of libfabric, or `default` for that of [`fabric_over_tcp`]. Without it they use
/// none.
const FABRIC: &str = "MUSTER_TRANSFER_FABRIC";

/// Returns the fabric of engines over TCP.
pub fn fabric_under_test() -> Option<String> {
    let name = std::env::var(FABRIC).ok()?;
    Some(if name == "default" { fabric_over_tcp().to_owned() } else { name })
}

/// Selects cliques for bytes between GPUs: `always`, with NCCL from `MUSTER_NCCL_LIBRARY`.
const CLIQUES: &str = "MUSTER_TRANSFER_CLIQUES";

/// Returns where engines use cliques.
fn cliques_under_test() -> CliqueChoice {
    match std::env::var(CLIQUES).as_deref() {
        Ok("always") => CliqueChoice::Always,
        _ => CliqueChoice::Off,
    }
}

/// Returns whether the memory under test is that of GPUs.
pub fn is_on_gpu() -> bool {
    std::env::var(MEMORY).as_deref() == Ok("gpu")
}

/// Creates an arena of the memory under test for a task.
pub fn arena_under_test(task: usize, bytes: usize) -> Arena {
    if !is_on_gpu() {
        return Arena::new(bytes).unwrap();
    }
    Arena::on_gpu(&open_gpu(task as u32), bytes).unwrap()
}

/// Access to the contents of a buffer in any memory.
pub trait AnyMemory {
    /// Calls `with` with the contents.
    fn look<R>(&self, with: impl FnOnce(&[u8]) -> R) -> Result<R, MemoryError>;

    /// Calls `with` with the contents, which it may change.
    fn change<R>(&self, with: impl FnOnce(&mut [u8]) -> R) -> Result<R, MemoryError>;
}

impl AnyMemory for Buffer {
    fn look<R>(&self, with: impl FnOnce(&[u8]) -> R) -> Result<R, MemoryError> {
        if self.gpu().is_none() {
            return self.with_bytes(with);
        }
        let mut bytes = vec![0; self.len()];
        self.read_contents(0, &mut bytes)?;
        Ok(with(&bytes))
    }

    fn change<R>(&self, with: impl FnOnce(&mut [u8]) -> R) -> Result<R, MemoryError> {
        if self.gpu().is_none() {
            return self.with_bytes_mut(with);
        }
        let mut bytes = vec![0; self.len()];
        self.read_contents(0, &mut bytes)?;
        let result = with(&mut bytes);
        self.write_contents(0, &bytes)?;
        Ok(result)
    }
}

/// Engines that know each other. Task `n` has the device `n`, unless the cluster has several devices a task.
pub struct Cluster {
    /// The number of devices of each task.
    each: u32,
    /// The TCP addresses that peers dial, if they are not those on which the engines listen.
    reached_at: Vec<SocketAddr>,
    pub engines: Vec<TransferEngine>,
    pub arenas: Vec<Arena>,
    /// The arena under test of each task; `arenas` are those of host memory.
    pub memory: Vec<Arena>,
}

fn devices(task: u32, each: u32) -> Vec<DeviceId> {
    (task * each..(task + 1) * each).map(DeviceId).collect()
}

pub fn device(task: usize) -> DeviceId {
    DeviceId(task as u32)
}

pub fn member(task: usize, life: u64) -> MemberId {
    MemberId::of_own_job(TaskId(task as u32), Incarnation::new(1000 * (task as u64 + 1) + life).unwrap())
}

impl Cluster {
    pub fn new(count: usize, choice: TransportChoice) -> Self {
        Self::with(count, |config| config.transport = choice)
    }

    pub fn with(count: usize, setting: impl Fn(&mut EngineConfig)) -> Self {
        Self::of_devices(count, 1, setting)
    }

    /// Starts engines with `each` devices each: those of task `n` follow those of task `n - 1`.
    pub fn of_devices(count: usize, each: u32, setting: impl Fn(&mut EngineConfig)) -> Self {
        let setting = |config: &mut EngineConfig| {
            config.devices = devices(config.here.task.0, each);
            setting(config);
        };
        let engines: Vec<_> = (0..count).map(|task| start(task, 0, setting)).collect();
        let arenas = (0..count).map(|_| Arena::new(64 << 20).unwrap()).collect();
        let memory = (0..count).map(|task| arena_under_test(task, 64 << 20)).collect();
        let cluster = Self { each, reached_at: Vec::new(), engines, arenas, memory };
        cluster.announce();
        cluster
    }

    pub fn membership(&self) -> Membership {
        let peers: BTreeMap<_, _> = self
            .engines
            .iter()
            .map(|engine| {
                let here = engine.here();
                let mut address = engine.address().clone();
                if let Some(instead) = self.reached_at.get(here.task.0 as usize) {
                    address.tcp = vec![*instead];
                }
                let devices = devices(here.task.0, self.each);
                (here.task, MemberInfo { incarnation: here.incarnation, address, devices })
            })
            .collect();
        Membership::of_own_job(peers)
    }

    /// Announces other TCP addresses than those on which the engines listen.
    pub fn announce_other_addresses(&mut self, addresses: Vec<SocketAddr>) {
        self.reached_at = addresses;
        self.announce();
    }

    /// Announces another task to the first engine, with this address only.
    pub fn announce_stranger(&self, task: usize, at: SocketAddr) {
        let mut membership = self.membership();
        let mut address = self.engines[0].address().clone();
        (address.local, address.tcp) = (String::new(), vec![at]);
        let MemberId { task: number, incarnation, .. } = member(task, 0);
        membership.peers.insert(number, MemberInfo { incarnation, address, devices: vec![device(task)] });
        self.engines[0].on_membership(membership);
    }

    /// Announces all engines to all engines.
    pub fn announce(&self) {
        for engine in &self.engines {
            engine.on_membership(self.membership());
        }
    }

    /// Allocates a buffer with the contents of a seed.
    pub fn filled(&self, task: usize, len: usize, seed: u64) -> Buffer {
        let buffer = self.memory[task].allocate(len).unwrap();
        buffer.write_contents(0, &contents(len, seed)).unwrap();
        buffer
    }

    pub fn empty(&self, task: usize, len: usize) -> Buffer {
        let buffer = self.memory[task].allocate(len).unwrap();
        buffer.fill(0xee).unwrap();
        buffer
    }

    /// Sends a buffer of one task into a buffer of another task.
    pub fn send(
        &self,
        from: usize,
        source: &Buffer,
        to: usize,
        target: &Buffer,
        key: u64,
    ) -> (TransferHandle, TransferHandle) {
        self.send_with_options((from, source), (to, target), key, LaunchOptions::default())
    }

    /// Sends a buffer of one task into a buffer of another task.
    pub fn send_with_options(
        &self,
        (from, source): (usize, &Buffer),
        (to, target): (usize, &Buffer),
        key: u64,
        options: LaunchOptions,
    ) -> (TransferHandle, TransferHandle) {
        let sent = self.engines[from].transfer(&[], vec![outgoing(source, from, to, key)], options);
        let received = self.engines[to].transfer(&[], vec![incoming(target, from, to, key)], options);
        (sent, received)
    }
}

pub fn start(task: usize, life: u64, setting: impl Fn(&mut EngineConfig)) -> TransferEngine {
    let mut config = EngineConfig::new(member(task, life), vec![device(task)]);
    config.fabric = fabric_under_test();
    config.cliques = cliques_under_test();
    setting(&mut config);
    if config.tls.is_some() {
        (config.fabric, config.cliques) = (None, CliqueChoice::Off);
    }
    TransferEngine::start(config).unwrap()
}

pub fn outgoing(buffer: &Buffer, from: usize, to: usize, key: u64) -> TransferSpec {
    TransferSpec::send(buffer.full_span(), device(from), device(to), TransferKey(key))
}

pub fn incoming(buffer: &Buffer, from: usize, to: usize, key: u64) -> TransferSpec {
    TransferSpec::receive(buffer.full_span(), device(from), device(to), TransferKey(key))
}

/// Returns options for a channel of its own.
pub fn options_on_channel(channel: u32) -> LaunchOptions {
    LaunchOptions { channel, ..LaunchOptions::default() }
}

/// Returns pseudo-random bytes.
pub fn contents(len: usize, seed: u64) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut bytes = vec![0; len];
    random.fill(&mut bytes);
    bytes
}

/// The size of the pieces of [`fill_quickly`].
const PIECE: usize = 64 << 10;

/// Returns the piece with this number of the contents of a seed.
fn piece(seed: u64, number: usize, len: usize) -> &'static [u8] {
    static BLOCK: std::sync::OnceLock<Vec<u8>> = std::sync::OnceLock::new();
    let block = BLOCK.get_or_init(|| contents(1 << 20, 0));
    let mut mixed =
        seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (number as u64).wrapping_mul(0xd134_2543_de82_ef95);
    mixed = (mixed ^ (mixed >> 32)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let begin = (mixed >> 20) as usize % (block.len() - PIECE);
    &block[begin..begin + len]
}

/// Fills `bytes` with pseudo-random bytes piece by piece, for tests that need many bytes.
pub fn fill_quickly(bytes: &mut [u8], seed: u64) {
    for (number, bytes) in bytes.chunks_mut(PIECE).enumerate() {
        bytes.copy_from_slice(piece(seed, number, bytes.len()));
    }
}

/// Returns whether the bytes are those that [`fill_quickly`] makes of the seed.
pub fn is_filled_quickly_from(bytes: &[u8], seed: u64) -> bool {
    bytes.chunks(PIECE).enumerate().all(|(number, bytes)| bytes == piece(seed, number, bytes.len()))
}

pub fn assert_contents(buffer: &Buffer, seed: u64) {
    let wanted = contents(buffer.len(), seed);
    buffer
        .look(|bytes| {
            if bytes != wanted {
                let differs = bytes.iter().zip(&wanted).position(|(a, b)| a != b);
                panic!("of {} bytes, {differs:?} is the first that differs", wanted.len());
            }
        })
        .unwrap();
}

/// Waits for the outcome of a transfer.
pub fn done(
    transfer: &TransferHandle,
) -> Result<muster::transfer::LaunchStats, muster::transfer::TransferError> {
    transfer.wait_for(PATIENCE).expect("it has an outcome")
}

/// Waits until a condition becomes true.
pub fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let until = std::time::Instant::now() + PATIENCE;
    while !is_so() {
        assert!(std::time::Instant::now() < until, "in vain: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}
