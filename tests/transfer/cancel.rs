//! Tests of cancelled transfers: a transfer has provably ended on both sides before its memory is used again.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use muster::transfer::{
    Arena, Buffer, EngineConfig, FaultInjector, LaunchOptions, PreparedTransfers, QuiescenceFuture,
    TransferEngine, TransferError, TransferHandle, TransportChoice, registered_bytes,
};

use crate::cluster::{
    AnyMemory, Cluster, PATIENCE, arena_under_test, assert_contents, contents, done, eventually,
    fill_quickly, incoming, is_filled_quickly_from, is_on_gpu, outgoing, start,
};
use crate::harness::{Signal, run_ignored_test};
use crate::processes::{TaskProcess, next_line_from_test, send_message_to_test};

const CHOICES: [TransportChoice; 5] = [
    TransportChoice::Auto,
    TransportChoice::Pvm,
    TransportChoice::Unix,
    TransportChoice::Tcp,
    TransportChoice::Loopback,
];

/// Returns a cluster without checksums, so that only the protocol keeps wrong bytes out.
fn cluster_without_checksums(choice: TransportChoice) -> Cluster {
    Cluster::with(2, |config: &mut EngineConfig| {
        config.transport = choice;
        config.checks = false;
    })
}

#[test]
fn a_receive_is_complete_or_an_error_when_the_sender_cancels() {
    for choice in CHOICES {
        let cluster = cluster_without_checksums(choice);
        let mut random = fastrand::Rng::with_seed(5);
        let (mut whole, mut cancelled) = (0, 0);
        let len = 3 << 20;
        let wanted = contents(len, 1);
        for round in 0..60 {
            let (source, target) = (cluster.filled(0, len, 1), cluster.empty(1, len));
            let (sent, received) = cluster.send(0, &source, 1, &target, round);
            // Some are cancelled at once, some too late, and the others in the middle.
            match round % 10 {
                0 => {}
                9 => drop(done(&received)),
                _ => std::thread::sleep(Duration::from_micros(random.u64(0..2500))),
            }
            let proof = sent.cancel("enough");
            // As soon as the buffer is reported free, it is overwritten.
            while source.fill(0).is_err() {
                std::thread::yield_now();
            }
            assert!(proof.wait_for(PATIENCE), "{choice:?} {round}");
            match done(&received) {
                Ok(_) => {
                    whole += 1;
                    target
                        .look(|bytes| assert!(bytes == wanted, "{choice:?}: wrong bytes in round {round}"))
                        .unwrap();
                }
                Err(TransferError::Cancelled { by, reason }) => {
                    cancelled += 1;
                    // The first time there may be no connection yet that could carry the reason.
                    let why = reason.contains("enough") || round == 0 && reason.contains("failed earlier");
                    assert!(by.task.0 == 0 && why, "{by} {reason}");
                }
                Err(error) => panic!("{choice:?}: {error}"),
            }
        }
        println!("{choice:?}: {whole} whole, {cancelled} cancelled");
        assert!(whole > 0 && cancelled > 0, "{choice:?}: {whole} whole, {cancelled} cancelled");
    }
}

#[test]
fn a_receive_is_complete_or_an_error_during_shutdown() {
    for choice in CHOICES {
        let mut cluster = cluster_without_checksums(choice);
        let mut random = fastrand::Rng::with_seed(8);
        let (mut whole, mut failed) = (0, 0);
        let len = 3 << 20;
        let wanted = contents(len, 1);
        let source = cluster.filled(0, len, 1);
        for round in 1..60 {
            source.change(|bytes| bytes.copy_from_slice(&wanted)).unwrap();
            let target = cluster.empty(1, len);
            let (sent, received) = cluster.send(0, &source, 1, &target, round);
            match round % 10 {
                0 => {}
                9 => drop(done(&received)),
                _ => std::thread::sleep(Duration::from_micros(random.u64(0..3000))),
            }
            let who = usize::from(round % 2 == 0);
            std::thread::scope(|scope| {
                scope.spawn(|| cluster.engines[who].shutdown());
                // As soon as the sender may, it overwrites the buffer.
                while sent.outcome().is_none() || source.fill(0).is_err() {
                    std::hint::spin_loop();
                }
            });
            match done(&received) {
                Ok(_) => {
                    whole += 1;
                    target
                        .look(|bytes| assert!(bytes == wanted, "{choice:?}: wrong bytes in round {round}"))
                        .unwrap();
                }
                Err(_) => failed += 1,
            }
            let _over = done(&sent);
            cluster.engines[who] = start(who, round, |config| {
                config.transport = choice;
                config.checks = false;
            });
            cluster.announce();
        }
        println!("{choice:?}: {whole} whole, {failed} failed");
        assert!(whole > 0 && failed > 0, "{choice:?}: {whole} whole, {failed} failed");
    }
}

#[test]
fn after_the_proof_no_byte_changes_however_often_it_is_asked_for() {
    for choice in CHOICES {
        let cluster = cluster_without_checksums(choice);
        let mut random = fastrand::Rng::with_seed(6);
        let len = 2 << 20;
        let source = cluster.filled(0, len, 1);
        let mut cancelled = 0;
        for round in 0..3000u64 {
            // On a busy machine it takes more rounds until a cancellation comes in time.
            if round >= 60 && cancelled > 0 {
                break;
            }
            let target = cluster.empty(1, len);
            let (sent, received) = cluster.send(0, &source, 1, &target, round);
            if round < 60 && round % 10 > 1 {
                std::thread::sleep(Duration::from_micros(random.u64(0..1500)));
            }
            // The sender's proof covers the receiver's memory too. A second cancellation is proven as well.
            let who = if round % 2 == 0 { &sent } else { &received };
            let _first = who.cancel("first");
            let second = who.cancel("second");
            assert!(second.wait_for(PATIENCE), "{choice:?} {round}");
            let outcomes = (done(&received), done(&sent));
            cancelled += usize::from(outcomes.0.is_err());
            target.fill(round as u8).unwrap();
            std::thread::sleep(Duration::from_micros(500));
            target.look(|bytes| assert!(bytes.iter().all(|byte| *byte == round as u8))).unwrap();
        }
        assert!(cancelled > 0, "{choice:?}: nothing was in the middle of anything");
    }
}

#[test]
fn cancel_waits_for_writes_in_progress() {
    for choice in [TransportChoice::Unix, TransportChoice::Tcp, TransportChoice::Loopback] {
        let faults = FaultInjector::new(4);
        let cluster = Cluster::with(2, |config| {
            config.transport = choice;
            config.checks = false;
            // The receiver is delayed while it holds a guard of the bytes.
            config.faults = (config.here.task.0 == 1).then(|| faults.clone());
        });
        let mut random = fastrand::Rng::with_seed(12);
        let mut resting = QuiescedBuffers::default();
        let mut cancelled = 0;
        faults.delay_receives(Duration::from_millis(2));
        for round in 0..100u64 {
            let len = 1 << 20;
            let orders = (round, 0, 1, len, round);
            let mut running = [1, 0]
                .map(|task| RunningTransfer::start(&cluster.engines[task], &cluster.memory[task], orders));
            std::thread::sleep(Duration::from_micros(random.u64(0..40_000)));
            // The sender's proof covers the receiver's memory too.
            let who = random.usize(0..2);
            running[who].cancel();
            running[who].overwrite_when_quiescent();
            for one in &mut running {
                done(&one.transfer).map_or_else(|_| cancelled += 1, |_| ());
                one.overwrite_when_quiescent();
            }
            running
                .into_iter()
                .filter_map(|one| one.check().1)
                .for_each(|(buffer, seed)| resting.add(buffer, seed));
        }
        while resting.check() {}
        println!("{choice:?}: {cancelled} of 200 ended early");
        assert!(cancelled > 20);
    }
}

#[test]
fn cancels_at_the_moment_of_the_launch_are_proven_too() {
    for choice in [TransportChoice::Auto, TransportChoice::Tcp, TransportChoice::Loopback] {
        let cluster = cluster_without_checksums(choice);
        let len = 6000;
        let (source, target) = (cluster.filled(0, len, 1), cluster.empty(1, len));
        let mut sending = cluster.engines[0]
            .prepare(vec![outgoing(&source, 0, 1, 1)], LaunchOptions::default())
            .wait()
            .unwrap();
        let mut receiving = cluster.engines[1]
            .prepare(vec![incoming(&target, 0, 1, 1)], LaunchOptions::default())
            .wait()
            .unwrap();
        let mut cancelled = 0;
        for round in 0..3000 {
            target.fill(1).unwrap();
            let next = sending.next_launch_handle();
            let received = receiving.launch(&[]);
            let sent = std::thread::scope(|scope| {
                let cancelling = scope.spawn(move || {
                    for _ in 0..round % 50 {
                        std::hint::spin_loop();
                    }
                    next.cancel("at once").wait_for(PATIENCE)
                });
                let sent = sending.launch(&[]);
                assert!(cancelling.join().unwrap(), "{choice:?} {round}");
                sent
            });
            match done(&received) {
                Ok(_) => assert_contents(&target, 1),
                Err(TransferError::Cancelled { .. }) => cancelled += 1,
                Err(error) => panic!("{choice:?} {round}: {error}"),
            }
            let _over = done(&sent);
            eventually("both buffers are free", || source.change(|_| ()).is_ok());
        }
        assert!(cancelled > 0, "{choice:?}: no cancel was in time");
    }
}

#[test]
fn thousands_of_random_cancels_under_fire() {
    for choice in CHOICES {
        let cluster = cluster_without_checksums(choice);
        let outcomes: Vec<_> = std::thread::scope(|scope| {
            let cluster = &cluster;
            let firing: Vec<_> = (0..4u32)
                .map(|channel| scope.spawn(move || transfer_and_cancel_at_random(cluster, choice, channel)))
                .collect();
            firing.into_iter().map(|firing| firing.join().unwrap()).collect()
        });
        let (whole, cancelled) = outcomes.iter().fold((0, 0), |all, one| (all.0 + one.0, all.1 + one.1));
        assert!(whole > 0 && cancelled > 0, "{choice:?}: {whole} whole, {cancelled} cancelled");
        eventually("all groups are forgotten", || {
            cluster.engines.iter().all(|engine| engine.links().iter().all(|link| link.launched == 0))
        });
    }
}

/// Returns the number of complete transfers, and of cancelled ones.
fn transfer_and_cancel_at_random(cluster: &Cluster, choice: TransportChoice, channel: u32) -> (usize, usize) {
    let (mut whole, mut cancelled) = (0, 0);
    let mut random = fastrand::Rng::with_seed(u64::from(channel));
    let options = LaunchOptions { channel, ..LaunchOptions::default() };
    let sizes = [1, 5000, 40_000, 700_000];
    let seed = u64::from(channel);
    for round in 0..250u64 {
        let len = *random.choice(&sizes).unwrap();
        let (from, to) = if random.bool() { (0, 1) } else { (1, 0) };
        let (source, target) = (cluster.filled(from, len, seed), cluster.empty(to, len));
        let sent = cluster.engines[from].transfer(&[], vec![outgoing(&source, from, to, round)], options);
        let received = cluster.engines[to].transfer(&[], vec![incoming(&target, from, to, round)], options);
        if random.u8(0..4) == 0 {
            std::thread::sleep(Duration::from_micros(random.u64(0..800)));
        }
        let mut proofs = Vec::new();
        if random.bool() {
            proofs.push(received.cancel("by the receiver"));
        }
        if random.bool() {
            proofs.push(sent.cancel("by the sender"));
        }
        for proof in &proofs {
            assert!(proof.wait_for(PATIENCE), "{choice:?} {round}");
        }
        match done(&received) {
            Ok(_) => {
                whole += 1;
                assert_contents(&target, seed);
            }
            Err(TransferError::Cancelled { .. }) if !proofs.is_empty() => cancelled += 1,
            Err(error) => panic!("{choice:?} {round}: {error}"),
        }
        if !proofs.is_empty() {
            target.fill(0xaa).unwrap();
            if random.u8(0..8) == 0 {
                std::thread::sleep(Duration::from_millis(1));
            }
            target.look(|bytes| assert!(bytes.iter().all(|byte| *byte == 0xaa))).unwrap();
        }
        let _over = done(&sent);
    }
    (whole, cancelled)
}

/// Returns the number of descriptors, threads and arena mappings of this process.
fn count_held_resources() -> (usize, usize, usize) {
    let count = |path: &str| std::fs::read_dir(path).unwrap().count();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let arenas = maps.lines().filter(|line| line.contains("muster-arena")).count();
    (count("/proc/self/fd"), count("/proc/self/task"), arenas)
}

/// Returns a description of the engines' connections.
fn describe_connections(cluster: &Cluster) -> String {
    let all = cluster.engines.iter().map(|engine| {
        let (cliques, ..) = engine.clique_cache_stats();
        let links: Vec<_> = engine
            .links()
            .iter()
            .map(|link| {
                format!("{} by {:?}, {} lanes, {} launched", link.peer, link.kind, link.lanes, link.launched)
            })
            .collect();
        format!("\n{}: {cliques} cliques; {}", engine.here(), links.join("; "))
    });
    all.collect()
}

/// Buffers that no transfer may write any more, filled with other contents. They are checked when there are
/// many, and at the end, so that a byte that lands too late is detected, however late it is.
#[derive(Default)]
struct QuiescedBuffers {
    buffers: VecDeque<(Buffer, u64)>,
    bytes: usize,
}

impl QuiescedBuffers {
    const BYTES_MAX: usize = 8 << 20;

    fn add(&mut self, buffer: Buffer, seed: u64) {
        self.bytes += buffer.len();
        self.buffers.push_back((buffer, seed));
        while self.bytes > Self::BYTES_MAX {
            self.check();
        }
    }

    /// Checks the oldest buffer, if there is one.
    fn check(&mut self) -> bool {
        let Some((buffer, seed)) = self.buffers.pop_front() else { return false };
        self.bytes -= buffer.len();
        let same = buffer.look(|bytes| is_filled_quickly_from(bytes, seed)).expect("no transfer uses it");
        assert!(same, "{} bytes: {LATE}", buffer.len());
        true
    }
}

/// A transfer in flight, and the contents that its buffer must have in the end.
struct RunningTransfer {
    transfer: TransferHandle,
    proof: Option<QuiescenceFuture>,
    receives: bool,
    /// Whether no byte of it moves any more, and its buffer has other contents.
    rests: bool,
    buffer: Buffer,
    seed: u64,
}

/// A transfer between two tasks: its key, the sender, the receiver, the size, and the seed of the contents.
type RandomTransfer = (u64, usize, usize, usize, u64);

impl RunningTransfer {
    fn start(engine: &TransferEngine, arena: &Arena, (key, from, to, len, seed): RandomTransfer) -> Self {
        let receives = engine.here().task.0 as usize == to;
        let buffer = arena.allocate(len).unwrap();
        if !receives {
            buffer.change(|bytes| fill_quickly(bytes, seed)).unwrap();
        }
        let spec = if receives { incoming(&buffer, from, to, key) } else { outgoing(&buffer, from, to, key) };
        let transfer = engine.transfer(&[], vec![spec], LaunchOptions::default());
        Self { transfer, proof: None, receives, rests: false, buffer, seed }
    }

    fn cancel(&mut self) {
        self.proof = Some(self.transfer.cancel("no more"));
    }

    fn is_over(&self) -> bool {
        self.transfer.outcome().is_some()
            && self.proof.as_ref().is_none_or(|proof| proof.wait_for(Duration::ZERO))
    }

    /// Returns the seed of the contents that replace its own.
    fn other(&self) -> u64 {
        self.seed ^ u64::MAX
    }

    /// Overwrites the buffer at the moment at which it is proven that no byte lands or is read any more.
    fn overwrite_when_quiescent(&mut self) {
        if let Some(proof) = &self.proof {
            assert!(proof.wait_for(PATIENCE));
        }
        if self.transfer.outcome().is_some_and(|outcome| outcome.is_err()) && !self.rests {
            let other = self.other();
            let overwrite = || self.buffer.change(|bytes| fill_quickly(bytes, other)).is_ok();
            if self.receives || self.proof.is_some() {
                eventually("it may be written", overwrite);
            } else {
                // A read of the peer is refused, or its bytes are discarded.
                overwrite();
            }
            self.rests = true;
        }
    }

    /// Checks the transfer after its end: received bytes are those sent, and a buffer that received none does
    /// not change any more. Returns whether the bytes arrived, and the buffer to watch from now on.
    fn check(mut self) -> (bool, Option<(Buffer, u64)>) {
        self.overwrite_when_quiescent();
        let is =
            |seed| self.buffer.look(|bytes| is_filled_quickly_from(bytes, seed)).expect("nobody writes it");
        if !self.receives {
            (false, None)
        } else if self.rests {
            assert!(is(self.other()), "{} bytes: {LATE}", self.buffer.len());
            let other = self.other();
            (false, Some((self.buffer, other)))
        } else {
            assert!(is(self.seed), "{} bytes: some are not what was sent", self.buffer.len());
            (true, None)
        }
    }
}

/// The assertion message for a byte that landed too late.
const LATE: &str = "some landed after it was said that none does";

/// Prepared transfers that are launched and cancelled again and again.
struct BufferSlot {
    ends: [usize; 2],
    prepared: [PreparedTransfers; 2],
    buffers: [Buffer; 2],
    /// The seed of the contents that its target must keep since no byte lands there any more.
    rests: Option<u64>,
}

impl BufferSlot {
    fn new(cluster: &Cluster, key: u64, ends: [usize; 2], len: usize) -> Self {
        let buffers = ends.map(|task| cluster.memory[task].allocate(len).unwrap());
        let prepared = Self::prepare(cluster, key, ends, &buffers);
        Self { ends, prepared, buffers, rests: None }
    }

    fn prepare(
        cluster: &Cluster,
        key: u64,
        ends: [usize; 2],
        [source, target]: &[Buffer; 2],
    ) -> [PreparedTransfers; 2] {
        let [from, to] = ends;
        let specs = [(from, outgoing(source, from, to, key)), (to, incoming(target, from, to, key))];
        let preparing =
            specs.map(|(task, spec)| cluster.engines[task].prepare(vec![spec], LaunchOptions::default()));
        preparing.map(|preparing| preparing.wait().unwrap())
    }

    /// Checks the target for bytes that landed too late.
    fn check(&mut self) {
        if let Some(seed) = self.rests.take() {
            let same = self.buffers[1]
                .look(|bytes| is_filled_quickly_from(bytes, seed))
                .expect("no transfer uses it");
            assert!(same, "{} bytes: {LATE}", self.buffers[1].len());
        }
    }

    /// Launches with contents that were never sent before.
    fn launch(&mut self, seed: u64, receiver_first: bool) -> [RunningTransfer; 2] {
        self.check();
        let [source, target] = &self.buffers;
        eventually("it may be written", || source.change(|bytes| fill_quickly(bytes, seed)).is_ok());
        let [send, receive] = &mut self.prepared;
        let early = receiver_first.then(|| receive.launch(&[]));
        let sent = send.launch(&[]);
        let received = early.unwrap_or_else(|| receive.launch(&[]));
        [(sent, source, false), (received, target, true)].map(|(transfer, buffer, receives)| {
            let buffer = buffer.clone();
            RunningTransfer { transfer, proof: None, receives, rests: false, buffer, seed }
        })
    }
}

/// A task in a process of its own: performs transfers, cancels some of them, and checks all that arrive,
/// until it is killed.
pub fn run_cancelling_task(engine: &TransferEngine) {
    let arena = arena_under_test(engine.here().task.0 as usize, 64 << 20);
    let mut random = fastrand::Rng::with_seed(engine.here().incarnation.get());
    let (mut running, mut resting) = (Vec::<RunningTransfer>::new(), QuiescedBuffers::default());
    let mut came = 0;
    while let Some(line) = next_line_from_test() {
        let (word, value) = line.split_at(1);
        match word {
            "M" => engine.on_membership(serde_json::from_str(value).unwrap()),
            "T" => {
                let orders: Vec<RandomTransfer> = serde_json::from_str(value).unwrap();
                running.extend(orders.into_iter().map(|order| RunningTransfer::start(engine, &arena, order)));
                running.iter_mut().filter(|_| random.u8(0..8) == 0).for_each(RunningTransfer::cancel);
            }
            _ => {
                eventually("all is over", || running.iter().all(RunningTransfer::is_over));
            }
        }
        let (over, still) = running.into_iter().partition(RunningTransfer::is_over);
        running = still;
        let over: Vec<RunningTransfer> = over;
        for (whole, rests) in over.into_iter().map(RunningTransfer::check) {
            came += usize::from(whole);
            rests.into_iter().for_each(|(buffer, seed)| resting.add(buffer, seed));
        }
        if word == "E" {
            while resting.check() {}
            send_message_to_test(&format!("came {came}"));
        }
    }
}

/// This test runs alone in its process, because it counts the process's resources.
#[test]
#[ignore = "a process of another test"]
fn alone_restarts() {
    /// The tasks of this process; the next one is a process of its own.
    const HERE: usize = 3;
    const SIZES: [usize; 6] = [10, 3000, 9000, 12_000, 20_000, 300_000];
    /// How often that process is killed, and restarted with another incarnation.
    const KILLS: u64 = 40;
    let cancels_wanted: u64 = std::env::var("CANCELS").map_or(100_000, |cancels| cancels.parse().unwrap());
    let faults = FaultInjector::new(78);
    let setting = |task: usize| {
        let faults = faults.clone();
        move |config: &mut EngineConfig| {
            config.faults = (task == 1).then(|| faults.clone());
            config.transport =
                if task.is_multiple_of(2) { TransportChoice::Auto } else { TransportChoice::Tcp };
            // A single reactor would process the proof only after the bytes that it holds.
            config.reactors = 1 + usize::from(task == 1);
            config.copiers = 1;
            config.lanes = 2;
        }
    };
    // The next incarnation of the other process is started before it is needed.
    let spawn = |life: u64| {
        let choice = ["auto", "pvm", "tcp", "unix"][life as usize % 4];
        std::thread::spawn(move || TaskProcess::live(HERE, life, choice, "fire", None))
    };
    let began = Instant::now();
    let mut random = fastrand::Rng::with_seed(77);
    let before = count_held_resources();
    let (mut cancels, mut kills, mut rounds) = (0u64, 0u64, 0u64);
    let (mut came, mut over) = (0, 0);
    {
        let mut cluster = Cluster::with(HERE, |config| setting(config.here.task.0 as usize)(config));
        let mut lives = [0u64; HERE];
        let mut other = spawn(0).join().unwrap();
        let mut next = spawn(1);
        let mut resting = QuiescedBuffers::default();
        let announce = |cluster: &Cluster, other: &mut TaskProcess, first: bool| {
            let mut membership = cluster.membership();
            membership.peers.extend([other.peer()]);
            cluster.engines.iter().for_each(|engine| engine.on_membership(membership.clone()));
            other.tell(if first { "" } else { "M" }, &membership);
        };
        announce(&cluster, &mut other, true);
        let ways =
            (0..HERE).flat_map(|from| (0..HERE).map(move |to| [from, to])).filter(|[from, to]| from != to);
        let ways = ways.flat_map(|ends| SIZES.map(|len| (ends, len))).enumerate();
        let mut slots: Vec<_> =
            ways.map(|(at, (ends, len))| BufferSlot::new(&cluster, 100 + at as u64, ends, len)).collect();
        while cancels < cancels_wanted {
            rounds += 1;
            // The receiver is delayed while it holds a guard of the bytes, so that the cancellation comes in
            // the middle of a chunk.
            let slow = rounds % 40 == 0;
            faults.delay_receives(Duration::from_millis(u64::from(slow)));
            let (mut orders, mut theirs) = (Vec::new(), Vec::new());
            for key in 0..random.u64(1..12) {
                let (one, other) = (random.usize(0..=HERE), random.usize(0..HERE));
                let one = if one == other { HERE } else { one };
                let (from, to) = if random.bool() { (one, other) } else { (other, one) };
                let order = (key, from, to, *random.choice(&SIZES).unwrap(), rounds << 16 | key);
                orders.push(order);
                if [from, to].contains(&HERE) {
                    theirs.push(order);
                }
            }
            let before_us = random.bool();
            if before_us {
                other.tell("T", &theirs);
            }
            // Each transfer with the slot that it belongs to, if there is one.
            let mut running: Vec<(Option<usize>, RunningTransfer)> = Vec::new();
            for &order in &orders {
                for task in [order.1, order.2].into_iter().filter(|task| *task < HERE) {
                    running.push((
                        None,
                        RunningTransfer::start(&cluster.engines[task], &cluster.memory[task], order),
                    ));
                }
            }
            for (at, slot) in slots.iter_mut().enumerate() {
                if random.bool() {
                    let pair = slot.launch(rounds << 16 | 1 << 8 | at as u64, random.bool());
                    running.extend(pair.map(|one| (Some(at), one)));
                }
            }
            if random.bool() {
                std::thread::sleep(Duration::from_micros(random.u64(0..3000)));
            }
            for (_, one) in &mut running {
                if random.u8(0..8) > 0 {
                    one.cancel();
                    cancels += 1;
                    if random.u8(0..16) == 0 || slow && random.u8(0..4) == 0 {
                        one.overwrite_when_quiescent();
                    }
                }
            }
            if !before_us {
                other.tell("T", &theirs);
            }
            let mut restarted = None;
            if kills < KILLS && cancels > (kills + 1) * cancels_wanted / (KILLS + 1) {
                kills += 1;
                other.signal(Signal::KILL);
                // The peers either detect the death, or learn of the new incarnation from the membership.
                if random.bool() {
                    running.iter().for_each(|(_, one)| assert!(one.transfer.wait_for(PATIENCE).is_some()));
                }
                other = std::mem::replace(&mut next, spawn(kills + 1)).join().unwrap();
                announce(&cluster, &mut other, true);
            } else if random.u8(0..12) == 0 {
                let task = random.usize(0..HERE);
                restarted = Some(task);
                lives[task] += 1;
                let fresh = start(task, lives[task], setting(task));
                let old: TransferEngine = std::mem::replace(&mut cluster.engines[task], fresh);
                if random.bool() {
                    old.shutdown();
                }
                drop(old);
                announce(&cluster, &mut other, false);
            } else {
                // Transfers that only one side launched are cancelled.
                for (_, one) in &mut running {
                    if one.transfer.wait_for(Duration::from_millis(300)).is_none() {
                        one.cancel();
                    }
                }
            }
            for (at, (_, one)) in running.iter().enumerate() {
                let way = if one.receives { "receive" } else { "send" };
                if one.transfer.wait_for(PATIENCE).is_none() {
                    panic!(
                        "a {way}, number {at} of round {rounds}, hangs: {}",
                        describe_connections(&cluster)
                    );
                }
                if !one.proof.as_ref().is_none_or(|proof| proof.wait_for(PATIENCE)) {
                    panic!(
                        "a proof of a {way} of round {rounds} does not come: {}",
                        describe_connections(&cluster)
                    );
                }
            }
            over += running.len();
            for (slot, one) in running {
                let (whole, rests) = one.check();
                came += usize::from(whole);
                match (slot, rests) {
                    (_, None) => {}
                    (Some(at), Some((_, seed))) => slots[at].rests = Some(seed),
                    (None, Some((buffer, seed))) => resting.add(buffer, seed),
                }
            }
            if let Some(task) = restarted {
                for (at, slot) in slots.iter_mut().enumerate().filter(|(_, slot)| slot.ends.contains(&task)) {
                    slot.prepared = BufferSlot::prepare(&cluster, 100 + at as u64, slot.ends, &slot.buffers);
                }
            }
        }
        slots.iter_mut().for_each(BufferSlot::check);
        other.tell("E", &0);
        let there: usize = other.wait_for_message_and_take_rest("came ").parse().unwrap();
        while resting.check() {}
        println!(
            "{rounds} rounds, {over} transfers, {came} received here and {there} by the last of {kills} that were killed, {cancels} cancels, {lives:?} restarts, {:?}: {:?} held",
            began.elapsed(),
            count_held_resources()
        );
        assert!(cancels >= cancels_wanted && kills == KILLS && came > 0);
        drop(next.join().unwrap());
    }
    let mut after = count_held_resources();
    for _ in 0..600 {
        if after == before {
            break;
        }
        std::thread::sleep(Duration::from_millis(25));
        after = count_held_resources();
    }
    println!("descriptors, threads, mappings before {before:?} and after {after:?}");
    for entry in std::fs::read_dir("/proc/self/fd").unwrap().flatten() {
        println!("  {:?} -> {:?}", entry.file_name(), std::fs::read_link(entry.path()));
    }
    // The simulated driver keeps its streams.
    assert!(before == after || is_on_gpu(), "{before:?} {after:?}");
}

#[test]
fn engines_that_are_dropped_and_restarted_under_fire_leave_nothing_behind() {
    run_ignored_test("cancel::alone_restarts");
}

/// This test runs alone in its process, because it counts the memory that engines know.
#[test]
#[ignore = "a process of another test"]
fn alone_letting_go() {
    let before = registered_bytes();
    let mut random = fastrand::Rng::with_seed(9);
    for choice in CHOICES {
        let cluster = cluster_without_checksums(choice);
        for round in 0..400u64 {
            let len = *random.choice(&[100, 9000, 200_000]).unwrap();
            // The memory belongs to the launch alone: it is freed when the last reference is dropped, by
            // whichever thread.
            let owned = |len: usize| match round % 3 {
                0 => Buffer::foreign(vec![1; len]),
                _ => Arena::new(len).unwrap().allocate(len).unwrap(),
            };
            let sent = {
                let specs = vec![outgoing(&owned(len), 0, 1, round)];
                cluster.engines[0].transfer(&[], specs, LaunchOptions::default())
            };
            let shorter = usize::from(random.u8(0..5) == 0);
            let received = {
                let specs = vec![incoming(&owned(len - shorter), 0, 1, round)];
                cluster.engines[1].transfer(&[], specs, LaunchOptions::default())
            };
            match random.u8(0..6) {
                0 => drop(sent.cancel("by the sender")),
                1 => drop(received.cancel("by the receiver")),
                2 => drop((sent.cancel("by both"), received.cancel("by both"))),
                _ => {}
            }
            let (sent, received) = (done(&sent), done(&received));
            assert!(shorter == 0 || sent.is_err() && received.is_err());
        }
        // Transfers in flight when the engines end release their memory too.
        for task in [0, 1] {
            let specs = vec![outgoing(&Buffer::foreign(vec![1; 5000]), task, 1 - task, 1000)];
            let unmet = cluster.engines[task].transfer(
                &[],
                specs,
                LaunchOptions { channel: 1 + task as u32, ..LaunchOptions::default() },
            );
            assert!(unmet.outcome().is_none());
        }
    }
    eventually("no memory is left", || registered_bytes() == before);
}

#[test]
fn memory_that_only_a_launch_holds_goes_with_it_under_no_lock_that_its_end_takes() {
    run_ignored_test("cancel::alone_letting_go");
}
