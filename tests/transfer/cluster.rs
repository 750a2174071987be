//! Engines of several tasks in one process, over real sockets and real shared memory.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use muster::transfer::{
    Arena, Buffer, Choice, Config, DeviceId, Engine, Incarnation, LaunchOptions, Member, Membership, Peer,
    Spec, TaskId, Transfer, TransferKey,
};

/// How long anything may take that should take a moment.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// Engines that know of each other. The device of task `n` is `n`.
pub struct Cluster {
    /// How many devices each task has.
    each: u32,
    /// Where others reach each engine by TCP, if not where it listens.
    reached_at: Vec<SocketAddr>,
    pub engines: Vec<Engine>,
    pub arenas: Vec<Arena>,
}

fn devices(task: u32, each: u32) -> Vec<DeviceId> {
    (task * each..(task + 1) * each).map(DeviceId).collect()
}

pub fn device(task: usize) -> DeviceId {
    DeviceId(task as u32)
}

pub fn member(task: usize, life: u64) -> Member {
    Member {
        task: TaskId(task as u32),
        incarnation: Incarnation::new(1000 * (task as u64 + 1) + life).unwrap(),
    }
}

impl Cluster {
    pub fn new(count: usize, choice: Choice) -> Self {
        Self::with(count, |config| config.transport = choice)
    }

    pub fn with(count: usize, setting: impl Fn(&mut Config)) -> Self {
        Self::of_devices(count, 1, setting)
    }

    /// Engines with so many devices each: those of task `n` follow those of task `n - 1`.
    pub fn of_devices(count: usize, each: u32, setting: impl Fn(&mut Config)) -> Self {
        let setting = |config: &mut Config| {
            config.devices = devices(config.here.task.0, each);
            setting(config);
        };
        let engines: Vec<_> = (0..count).map(|task| start(task, 0, setting)).collect();
        let arenas = (0..count).map(|_| Arena::new(64 << 20).unwrap()).collect();
        let cluster = Self { each, reached_at: Vec::new(), engines, arenas };
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
                (here.task, Peer { incarnation: here.incarnation, address, devices })
            })
            .collect();
        Membership { peers }
    }

    /// Tells all that each engine is reached somewhere else than where it listens.
    pub fn reached_at(&mut self, addresses: Vec<SocketAddr>) {
        self.reached_at = addresses;
        self.announce();
    }

    /// Tells the first engine of another task too, which it would reach at this address only.
    pub fn announce_stranger(&self, task: usize, at: SocketAddr) {
        let mut membership = self.membership();
        let mut address = self.engines[0].address().clone();
        (address.local, address.tcp) = (String::new(), vec![at]);
        let Member { task: number, incarnation } = member(task, 0);
        membership.peers.insert(number, Peer { incarnation, address, devices: vec![device(task)] });
        self.engines[0].on_membership(membership);
    }

    /// Tells all of all.
    pub fn announce(&self) {
        for engine in &self.engines {
            engine.on_membership(self.membership());
        }
    }

    /// A buffer with contents that its seed says.
    pub fn filled(&self, task: usize, len: usize, seed: u64) -> Buffer {
        let buffer = self.arenas[task].allocate(len).unwrap();
        buffer.write(|bytes| bytes.copy_from_slice(&contents(len, seed))).unwrap();
        buffer
    }

    pub fn empty(&self, task: usize, len: usize) -> Buffer {
        let buffer = self.arenas[task].allocate(len).unwrap();
        buffer.fill(0xee).unwrap();
        buffer
    }

    /// Sends a buffer of one task into one of another.
    pub fn send(
        &self,
        from: usize,
        source: &Buffer,
        to: usize,
        target: &Buffer,
        key: u64,
    ) -> (Transfer, Transfer) {
        let sent =
            self.engines[from].transfer(&[], vec![outgoing(source, from, to, key)], LaunchOptions::default());
        let received =
            self.engines[to].transfer(&[], vec![incoming(target, from, to, key)], LaunchOptions::default());
        (sent, received)
    }
}

pub fn start(task: usize, life: u64, setting: impl Fn(&mut Config)) -> Engine {
    let mut config = Config::new(member(task, life), vec![device(task)]);
    setting(&mut config);
    Engine::start(config).unwrap()
}

pub fn outgoing(buffer: &Buffer, from: usize, to: usize, key: u64) -> Spec {
    Spec::send(buffer.span(), device(from), device(to), TransferKey(key))
}

pub fn incoming(buffer: &Buffer, from: usize, to: usize, key: u64) -> Spec {
    Spec::receive(buffer.span(), device(from), device(to), TransferKey(key))
}

/// On a channel of its own.
pub fn on(channel: u32) -> LaunchOptions {
    LaunchOptions { channel, ..LaunchOptions::default() }
}

/// Bytes that look like nothing else.
pub fn contents(len: usize, seed: u64) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut bytes = vec![0; len];
    random.fill(&mut bytes);
    bytes
}

/// How far apart the contents of [`fill_quickly`] begin anew.
const PIECE: usize = 64 << 10;

/// Where the piece of this number is taken from, of contents that their seed says.
fn piece(seed: u64, number: usize, len: usize) -> &'static [u8] {
    static BLOCK: std::sync::OnceLock<Vec<u8>> = std::sync::OnceLock::new();
    let block = BLOCK.get_or_init(|| contents(1 << 20, 0));
    let mut mixed =
        seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (number as u64).wrapping_mul(0xd134_2543_de82_ef95);
    mixed = (mixed ^ (mixed >> 32)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let begin = (mixed >> 20) as usize % (block.len() - PIECE);
    &block[begin..begin + len]
}

/// Bytes that look like nothing else, for tests that need many of them: no loop goes over single ones.
pub fn fill_quickly(bytes: &mut [u8], seed: u64) {
    for (number, bytes) in bytes.chunks_mut(PIECE).enumerate() {
        bytes.copy_from_slice(piece(seed, number, bytes.len()));
    }
}

/// Whether they are what [`fill_quickly`] makes of the seed.
pub fn is_quick(bytes: &[u8], seed: u64) -> bool {
    bytes.chunks(PIECE).enumerate().all(|(number, bytes)| bytes == piece(seed, number, bytes.len()))
}

pub fn assert_contents(buffer: &Buffer, seed: u64) {
    let wanted = contents(buffer.len(), seed);
    buffer
        .read(|bytes| {
            if bytes != wanted {
                let differs = bytes.iter().zip(&wanted).position(|(a, b)| a != b);
                panic!("of {} bytes, {differs:?} is the first that differs", wanted.len());
            }
        })
        .unwrap();
}

/// The outcome of a transfer that must have one.
pub fn done(transfer: &Transfer) -> Result<muster::transfer::Stats, muster::transfer::TransferError> {
    transfer.wait_for(PATIENCE).expect("it has an outcome")
}

/// Waits until something is so that must become so.
pub fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let until = std::time::Instant::now() + PATIENCE;
    while !is_so() {
        assert!(std::time::Instant::now() < until, "in vain: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}
