//! Tests of peers, in their own processes, that are killed, stopped and restarted during transfers.

use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use muster::transfer::{
    Arena, Buffer, LaunchOptions, Membership, PreparedTransfers, ReshardError, ShardBuffers, TransferEngine,
    TransferError, TransferHandle, TransportChoice, TransportKind,
};

use crate::cluster::{
    AnyMemory, Cluster, PATIENCE, arena_under_test, contents, fill_quickly, is_filled_quickly_from,
};
use crate::harness::Signal;
use crate::processes::{TaskProcess, choice_of, next_line_from_test, send_message_to_test};
use crate::resharding::{DEVICES_EACH, ReshardCase, gathered};
use crate::skip::{Lacking, is_refusal, skip};

const LEN: usize = 4 << 20;
/// The stall limit of these tests.
const STALL: Duration = Duration::from_secs(1);

/// Returns a cluster with task 0 in this process and these tasks, which all know each other.
fn start_cluster_with_processes(choice: &str, tasks: &mut [TaskProcess]) -> Cluster {
    let cluster = Cluster::with(1, |config| config.transport = choice_of(choice));
    let mut membership = cluster.membership();
    membership.peers.extend(tasks.iter().map(TaskProcess::peer));
    cluster.engines[0].on_membership(membership.clone());
    for task in tasks {
        task.announce(&membership);
    }
    cluster
}

/// Prepares the transfers between task 0 and another one: a buffer each way, on channels of their own.
fn prepare_both_directions(
    engine: &TransferEngine,
    task: usize,
    first: &Buffer,
    second: &Buffer,
) -> [PreparedTransfers; 2] {
    let near = engine.here().task.0 as usize == 0;
    let (out, back) = if near {
        (crate::cluster::outgoing(first, 0, task, 1), crate::cluster::incoming(second, task, 0, 2))
    } else {
        (crate::cluster::incoming(first, 0, task, 1), crate::cluster::outgoing(second, task, 0, 2))
    };
    [(out, 1), (back, 2)].map(|(spec, channel)| {
        let options = LaunchOptions { channel, stall: STALL, ..LaunchOptions::default() };
        engine.prepare(vec![spec], options).wait().unwrap()
    })
}

/// Returns the seed of the contents that one side sends in a round.
fn contents_seed_of_round(task: usize, near: bool, round: usize) -> u64 {
    (round * 1000 + 2 * task + usize::from(near)) as u64
}

/// A task that exchanges buffers with task 0 for as long as it can, with other contents every time, and
/// checks what it receives.
pub fn exchange_while_peer_lives(engine: &TransferEngine, task: usize, late: bool) {
    let arena = arena_under_test(task, 4 * LEN);
    let (source, target) = (arena.allocate(LEN).unwrap(), arena.allocate(LEN).unwrap());
    let [mut out, mut back] = prepare_both_directions(engine, task, &target, &source);
    if late {
        send_message_to_test("ready");
        std::thread::sleep(PATIENCE);
    }
    for round in 0.. {
        source.change(|bytes| fill_quickly(bytes, contents_seed_of_round(task, false, round))).unwrap();
        let (received, sent) = (out.launch(&[]), back.launch(&[]));
        if received.wait().is_err() {
            return send_message_to_test(&format!("whole {round}"));
        }
        target
            .look(|bytes| {
                assert!(
                    is_filled_quickly_from(bytes, contents_seed_of_round(task, true, round)),
                    "round {round}"
                )
            })
            .unwrap();
        if sent.wait().is_err() {
            return send_message_to_test(&format!("whole {}", round + 1));
        }
        if round == 3 {
            send_message_to_test("going");
        }
    }
}

/// The last round of an exchange.
struct FinalRound {
    round: usize,
    launched: Instant,
    sent: TransferHandle,
    received: TransferHandle,
    source: Buffer,
    target: Buffer,
}

impl FinalRound {
    fn transfers(&self) -> [&TransferHandle; 2] {
        [&self.sent, &self.received]
    }

    /// Checks the last round: received buffers are complete, and a buffer that is reported free does not
    /// change any more.
    fn check(&self, task: usize) {
        match self.received.wait_for(PATIENCE).expect("it has an outcome") {
            Ok(_) => {
                let wanted = contents_seed_of_round(task, false, self.round);
                self.target
                    .look(|bytes| assert!(is_filled_quickly_from(bytes, wanted), "the last round"))
                    .unwrap();
            }
            Err(_) => self.target.fill(0).unwrap(),
        }
    }
}

/// Exchanges buffers with a task until `until` returns true or a transfer fails, and checks what it receives.
/// Returns the transfers that were in flight then.
fn exchange_until(cluster: &Cluster, task: usize, until: impl Fn(usize) -> bool) -> FinalRound {
    let (source, target) = (cluster.empty(0, LEN), cluster.empty(0, LEN));
    let [mut out, mut back] = prepare_both_directions(&cluster.engines[0], task, &source, &target);
    for round in 0.. {
        source.change(|bytes| fill_quickly(bytes, contents_seed_of_round(task, true, round))).unwrap();
        let launched = Instant::now();
        let (sent, received) = (out.launch(&[]), back.launch(&[]));
        if until(round) || received.wait().is_err() || sent.wait().is_err() {
            return FinalRound { round, launched, sent, received, source, target };
        }
        target
            .look(|bytes| {
                assert!(
                    is_filled_quickly_from(bytes, contents_seed_of_round(task, false, round)),
                    "round {round}"
                )
            })
            .unwrap();
    }
    unreachable!()
}

#[test]
fn a_killed_peer_is_reported_at_once_and_other_transfers_complete() {
    for choice in ["auto", "pvm", "unix", "tcp"] {
        let mut tasks = vec![
            TaskProcess::start(1, choice, "stream", None),
            TaskProcess::start(2, choice, "stream", None),
        ];
        let cluster = start_cluster_with_processes(choice, &mut tasks);
        let over = AtomicBool::new(false);
        let [task, other] = &mut tasks[..] else { unreachable!("there are two") };
        let task = &*task;
        std::thread::scope(|scope| {
            let others = scope.spawn(|| {
                let last = exchange_until(&cluster, 2, |_| over.load(Ordering::SeqCst));
                for transfer in last.transfers() {
                    transfer.wait_for(PATIENCE).unwrap().unwrap();
                }
                last.check(2);
                last.round + 1
            });
            // A transfer that the peer has not launched waits in any case.
            let (unmet, target) = (cluster.empty(0, 100), cluster.empty(0, 100));
            let unmet =
                vec![crate::cluster::outgoing(&unmet, 0, 1, 5), crate::cluster::incoming(&target, 1, 0, 6)];
            let options = LaunchOptions { channel: 9, ..LaunchOptions::default() };
            let mut unmet = cluster.engines[0].prepare(unmet, options).wait().unwrap();
            let unmet = unmet.launch(&[]);
            let killed = std::cell::Cell::new(Instant::now());
            let under_way = exchange_until(&cluster, 1, |round| {
                if round == 20 {
                    task.signal(Signal::KILL);
                    killed.set(Instant::now());
                }
                round == 20
            });
            let began = killed.get();
            let mut slowest = Duration::ZERO;
            let mut completed = Vec::new();
            for (what, transfer) in
                [("sent", &under_way.sent), ("received", &under_way.received), ("unmet", &unmet)]
            {
                match transfer.wait_for(PATIENCE).expect("it has an outcome") {
                    // The peer's last frame said that it has all bytes, or all of them were here: the
                    // received buffer is checked below.
                    Ok(_) => completed.push(what),
                    Err(error) => {
                        slowest = slowest.max(began.elapsed());
                        let text = error.to_string();
                        assert!(text.contains(&task.here.to_string()), "{choice}: {text}");
                        assert!(matches!(
                            error,
                            TransferError::PeerDead { .. } | TransferError::Transport { .. }
                        ));
                    }
                }
            }
            println!("{choice}: killed, told after {slowest:?}; completed before: {completed:?}");
            assert!(unmet.outcome().unwrap().is_err());
            assert!(slowest < Duration::from_secs(1), "{slowest:?}");
            under_way.check(1);
            // No process is left that could read it.
            under_way.source.fill(0).unwrap();
            std::thread::sleep(Duration::from_millis(100));
            over.store(true, Ordering::SeqCst);
            let rounds = others.join().unwrap();
            // The other task has checked all that it received.
            cluster.engines[0].shutdown();
            assert_eq!(other.wait_for_message_and_take_rest("whole "), rounds.to_string());
        });
    }
}

/// Asserts that a transfer failed at the stall limit, both by the engine's measurement and by this test's
/// clock since the signal. `before` is how much of the limit may have passed when the signal came.
fn assert_stalled(error: &TransferError, after: Duration, before: Duration) {
    let TransferError::Stalled { idle, .. } = error else { panic!("{error}") };
    assert!(*idle >= STALL && *idle < 3 * STALL, "{error}");
    let earliest = (STALL - before).mul_f64(0.9);
    assert!(after >= earliest, "{error}, as early as {after:?} after the signal");
    // Long enough for a busy machine.
    assert!(after < 2 * STALL, "{error}, as late as {after:?} after the signal");
}

const SAME_HOST_AND_TCP: [&str; 4] = ["auto", "pvm", "unix", "tcp"];

#[test]
fn a_peer_that_is_stopped_is_given_up_at_the_stall_limit() {
    for choice in SAME_HOST_AND_TCP {
        let mut tasks = vec![TaskProcess::start(1, choice, "stream", None)];
        let cluster = start_cluster_with_processes(choice, &mut tasks);
        let stopped = std::cell::Cell::new(Instant::now());
        // Further rounds follow those that were quick enough to complete.
        let last = exchange_until(&cluster, 1, |round| {
            if round == 20 {
                tasks[0].signal(Signal::STOP);
                stopped.set(Instant::now());
            }
            false
        });
        let mut stalled = 0;
        for transfer in last.transfers() {
            let outcome = transfer.wait_for(PATIENCE).expect("it has an outcome");
            let after = stopped.get().max(last.launched).elapsed();
            println!("{choice}: stopped in the middle, round {}: {outcome:?} after {after:?}", last.round);
            if let Err(error) = outcome {
                // Until the signal, there was progress all the time.
                assert_stalled(&error, after, Duration::ZERO);
                stalled += 1;
            }
        }
        assert!(stalled > 0, "{choice}");
        last.check(1);
    }
}

#[test]
fn a_peer_that_is_stopped_before_it_launched_is_given_up_at_the_stall_limit() {
    for choice in SAME_HOST_AND_TCP {
        let mut tasks = vec![TaskProcess::start(1, choice, "late", None)];
        let cluster = start_cluster_with_processes(choice, &mut tasks);
        tasks[0].wait_for_message("ready");
        let launched = Instant::now();
        let patient = exchange_until(&cluster, 1, |_| true);
        // The peer is alive, so the transfer waits longer than the limit.
        std::thread::sleep(Duration::from_millis(1500));
        assert!(patient.transfers().iter().all(|transfer| transfer.outcome().is_none()));
        tasks[0].signal(Signal::STOP);
        let began = Instant::now();
        for transfer in patient.transfers() {
            let error = transfer.wait_for(PATIENCE).expect("it has an outcome").unwrap_err();
            let after = began.elapsed();
            println!(
                "{choice}: stopped before it launched, {error} after {after:?}, {:?} in all",
                launched.elapsed()
            );
            // The peer is pinged after a quarter of the limit without a frame, or an eighth later.
            assert_stalled(&error, after, STALL * 3 / 8);
        }
    }
}

/// The time limit of a plan in which a task is stopped, and its stall limit.
const GATHER: (Duration, Duration) = (Duration::from_millis(1200), Duration::from_millis(1000));

fn gather_plan() -> ReshardCase {
    ReshardCase::of(gathered(4 * DEVICES_EACH, &[64, 16 << 10], GATHER.0))
}

/// Executes the same plan again and again until it fails. Returns the time that took, the error, and the
/// shards.
fn gather_until_it_fails(
    engine: &TransferEngine,
    arena: &Arena,
    each: impl Fn(u32),
) -> (Duration, ReshardError, ShardBuffers) {
    let wanted = gather_plan();
    for round in 0.. {
        let shards = wanted.buffers(engine.here().task.0, DEVICES_EACH, arena);
        each(round);
        let options = LaunchOptions { channel: round, stall: GATHER.1, ..LaunchOptions::default() };
        let began = Instant::now();
        match engine.execute_plan(&wanted.plan, &shards, &[arena], options) {
            Ok(_) => wanted.assert_after(&shards),
            Err(error) => return (began.elapsed(), error, shards),
        }
    }
    unreachable!()
}

/// The role of a task that executes plans with others until one of them fails.
pub fn gather_all(engine: &TransferEngine) {
    let arena = Arena::new(64 << 20).unwrap();
    let (_, error, shards) = gather_until_it_fails(engine, &arena, |round| {
        if round == 2 {
            send_message_to_test("going");
        }
    });
    assert!(!matches!(error, ReshardError::Unproven { .. }), "{error}");
    shards.destination.values().for_each(|buffer| buffer.fill(0).unwrap());
    send_message_to_test("over");
}

#[test]
fn a_plan_with_a_peer_that_is_stopped_ends_in_its_time_and_its_shards_are_free() {
    for choice in ["auto", "pvm", "unix", "tcp"] {
        let mut tasks = [TaskProcess::start(3, choice, "gather", None)];
        let cluster = Cluster::of_devices(3, DEVICES_EACH, |config| config.transport = choice_of(choice));
        let mut membership = cluster.membership();
        membership.peers.extend(tasks.iter().map(TaskProcess::peer));
        cluster.engines.iter().for_each(|engine| engine.on_membership(membership.clone()));
        tasks[0].announce(&membership);
        let stopped = AtomicBool::new(false);
        let carry = |(engine, arena): (&TransferEngine, &Arena)| {
            let (took, error, shards) = gather_until_it_fails(engine, arena, |_| ());
            println!("{choice}: task {} after {took:?}: {error}", engine.here().task);
            assert!(stopped.load(Ordering::SeqCst), "{choice}: {error}");
            assert!(took < GATHER.0 + 2 * GATHER.1, "{choice}: {took:?}");
            assert!(!matches!(error, ReshardError::Unproven { .. }), "{choice}: {error}");
            // The shards are reused at once.
            shards.destination.values().for_each(|buffer| buffer.fill(0x77).unwrap());
            shards
        };
        let carry = &carry;
        let freed: Vec<_> = std::thread::scope(|scope| {
            let ours = cluster.engines.iter().zip(&cluster.arenas);
            let carrying: Vec<_> = ours.map(|ours| scope.spawn(move || carry(ours))).collect();
            tasks[0].wait_for_message("going");
            std::thread::sleep(Duration::from_millis(40));
            stopped.store(true, Ordering::SeqCst);
            tasks[0].signal(Signal::STOP);
            carrying.into_iter().map(|carrying| carrying.join().unwrap()).collect()
        });
        // Bytes still in flight from or to the stopped task must change nothing any more.
        tasks[0].signal(Signal::CONT);
        tasks[0].wait_for_message("over");
        for buffer in freed.iter().flat_map(|shards| shards.destination.values()) {
            buffer.look(|bytes| assert!(bytes.iter().all(|byte| *byte == 0x77), "{choice}")).unwrap();
        }
    }
}

/// Every task sends to every other task, once.
pub fn send_to_every_task(engine: &TransferEngine, membership: &Membership) {
    const MEET: usize = 300_001;
    let here = engine.here().task.0 as usize;
    let arena = arena_under_test(here, 16 << 20);
    let mut specs = Vec::new();
    let mut targets = Vec::new();
    for other in membership.peers.keys().map(|task| task.0 as usize).filter(|other| *other != here) {
        let (source, target) = (arena.allocate(MEET).unwrap(), arena.allocate(MEET).unwrap());
        source.change(|bytes| bytes.copy_from_slice(&contents(MEET, (here * 100 + other) as u64))).unwrap();
        specs.push(crate::cluster::outgoing(&source, here, other, (here * 100 + other) as u64));
        specs.push(crate::cluster::incoming(&target, other, here, (other * 100 + here) as u64));
        targets.push((target, (other * 100 + here) as u64));
    }
    let outcome = engine.transfer(&[], specs, LaunchOptions::default()).wait_for(PATIENCE).unwrap();
    outcome.unwrap();
    for (target, seed) in targets {
        target.look(|bytes| assert!(bytes == contents(MEET, seed))).unwrap();
    }
    send_message_to_test("met");
    let _until_all_have = next_line_from_test();
}

#[test]
fn two_to_eight_processes_all_send_to_all() {
    for (count, choice) in [(2, "auto"), (5, "tcp"), (8, "auto")] {
        let mut tasks: Vec<_> =
            (0..count).map(|task| TaskProcess::start(task, choice, "meet", None)).collect();
        let membership = Membership::of_own_job(tasks.iter().map(TaskProcess::peer).collect());
        tasks.iter_mut().for_each(|task| task.announce(&membership));
        tasks.iter_mut().for_each(|task| task.wait_for_message("met"));
    }
}

/// Runs `ip`, or returns the reason why it failed.
fn run_ip_command(line: &str) -> Result<(), String> {
    let told = |what: &dyn std::fmt::Display| format!("ip {line}: {what}");
    let output = Command::new("ip").args(line.split(' ')).output().map_err(|error| told(&error))?;
    if output.status.success() {
        return Ok(());
    }
    Err(told(&format!("{}, {}", output.status, String::from_utf8_lossy(&output.stderr).trim())))
}

/// A network namespace that is connected to this one until it is dropped: this side is 10.77.0.1, the other
/// 10.77.0.2.
struct OtherNamespace(String);

impl OtherNamespace {
    fn new() -> Result<Self, String> {
        let (name, near) = (format!("muster-{}", std::process::id()), format!("mu{}", std::process::id()));
        run_ip_command(&format!("netns add {name}"))?;
        let away = Self(name.clone());
        run_ip_command(&format!("link add {near} type veth peer name far netns {name}"))?;
        run_ip_command(&format!("addr add 10.77.0.1/24 dev {near}"))?;
        run_ip_command(&format!("link set {near} up"))?;
        run_ip_command(&format!("-n {name} addr add 10.77.0.2/24 dev far"))?;
        run_ip_command(&format!("-n {name} link set far up"))?;
        Ok(away)
    }
}

impl Drop for OtherNamespace {
    fn drop(&mut self) {
        if let Err(why) = run_ip_command(&format!("netns del {}", self.0)) {
            println!("the namespace is left behind: {why}");
        }
    }
}

#[test]
fn between_two_network_namespaces_tcp_is_chosen_by_itself_for_transfers_and_plans() {
    let away = match OtherNamespace::new() {
        Ok(away) => away,
        Err(why) if is_refusal(&why) => return skip(Lacking::KernelFeature("network namespaces")),
        Err(why) => panic!("no other network can be made here: {why}"),
    };
    let here = || Some("10.77.0.1:0".parse().unwrap());
    let mut tasks = [TaskProcess::start(1, "auto", "stream-away", Some(&away.0))];
    let cluster = Cluster::with(1, |config| config.listen = here());
    let meet = |cluster: &Cluster, tasks: &mut [TaskProcess]| {
        let mut membership = cluster.membership();
        membership.peers.extend(tasks.iter().map(TaskProcess::peer));
        cluster.engines.iter().for_each(|engine| engine.on_membership(membership.clone()));
        tasks.iter_mut().for_each(|task| task.announce(&membership));
    };
    meet(&cluster, &mut tasks);
    // Both directions at once, and both sides check what they receive.
    let last = exchange_until(&cluster, 1, |round| round == 15);
    for transfer in last.transfers() {
        transfer.wait_for(PATIENCE).unwrap().unwrap();
    }
    last.check(1);
    let kinds: Vec<_> = cluster.engines[0].links().iter().map(|link| link.kind).collect();
    assert_eq!(kinds, [TransportKind::Tcp]);
    cluster.engines[0].shutdown();
    assert_eq!(tasks[0].wait_for_message_and_take_rest("whole "), "16");

    let mut tasks = [TaskProcess::start(3, "auto", "gather-away", Some(&away.0))];
    let cluster = Cluster::of_devices(3, DEVICES_EACH, |config| config.listen = here());
    meet(&cluster, &mut tasks);
    let wanted = gather_plan();
    std::thread::scope(|scope| {
        for (engine, arena) in cluster.engines.iter().zip(&cluster.arenas) {
            let wanted = &wanted;
            scope.spawn(move || {
                for channel in 0..5 {
                    let shards = wanted.buffers(engine.here().task.0, DEVICES_EACH, arena);
                    let options = LaunchOptions { channel, stall: GATHER.1, ..LaunchOptions::default() };
                    engine.execute_plan(&wanted.plan, &shards, &[arena], options).unwrap();
                    wanted.assert_after(&shards);
                }
            });
        }
    });
    let kind = |task: u32| {
        cluster.engines[0].links().iter().find(|link| link.peer.task.0 == task).map(|link| link.kind)
    };
    assert_eq!((kind(1), kind(3)), (Some(TransportKind::Unix), Some(TransportKind::Tcp)));
    cluster.engines.iter().for_each(TransferEngine::shutdown);
    tasks[0].wait_for_message("over");
}

/// Moves `len` bytes in each of these directions.
fn transfer_large_buffers(choice: TransportChoice, len: usize, ways: &[(usize, usize)]) {
    let mut cluster = Cluster::new(2, choice);
    let each = ways.len() * (len + 8192);
    cluster.memory = (0..2).map(|task| arena_under_test(task, each)).collect();
    let moved: Vec<_> = ways
        .iter()
        .map(|&(from, to)| {
            let source = cluster.memory[from].allocate(len).unwrap();
            source.change(|bytes| fill_quickly(bytes, from as u64)).unwrap();
            (from, to, source, cluster.memory[to].allocate(len).unwrap())
        })
        .collect();
    let began = Instant::now();
    let under_way: Vec<_> = moved
        .iter()
        .map(|(from, to, source, target)| cluster.send(*from, source, *to, target, *from as u64))
        .collect();
    for (sent, received) in under_way {
        received.wait().unwrap();
        sent.wait().unwrap();
    }
    println!("{choice:?}: {len} bytes on {} ways in {:?}", ways.len(), began.elapsed());
    for (from, _, _, target) in moved {
        target.look(|bytes| assert!(is_filled_quickly_from(bytes, from as u64), "{choice:?}")).unwrap();
    }
}

#[test]
fn a_gibibyte_arrives_whole() {
    transfer_large_buffers(TransportChoice::Auto, (1 << 30) + 13, &[(0, 1)]);
    transfer_large_buffers(TransportChoice::Tcp, (512 << 20) + 13, &[(0, 1), (1, 0)]);
}
