//! Peers that are killed, stopped and started again in the middle of things: processes of their own.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use muster::transfer::{
    Address, Arena, Choice, DeviceId, Engine, Member, Membership, Options, Peer, ReshardError, ShardBuffers,
    TaskId, Transfer, TransferError,
};

use crate::cluster::{Cluster, PATIENCE, contents, device, member, start};
use crate::resharding::{DEVICES_EACH, Wanted, gathered};

const LEN: usize = 4 << 20;
/// Without progress, or without a word of the peer, transfers of these tests fail after so long.
const STALL: Duration = Duration::from_secs(1);

/// A task in a process of its own, which moves buffers to and from task 0 for as long as it can.
struct Task {
    child: Child,
    input: ChildStdin,
    lines: Receiver<String>,
    here: Member,
    devices: Vec<DeviceId>,
    address: Address,
}

impl Drop for Task {
    fn drop(&mut self) {
        let _gone = self.child.kill();
        let _gone = self.child.wait();
    }
}

/// The devices of a task that is a process of its own.
fn devices_of(task: usize, role: &str) -> Vec<DeviceId> {
    match role {
        "gather" => (0..DEVICES_EACH).map(|at| DeviceId(task as u32 * DEVICES_EACH + at)).collect(),
        _ => vec![device(task)],
    }
}

fn choice_of(name: &str) -> Choice {
    serde_json::from_value(serde_json::Value::String(name.to_owned())).unwrap()
}

impl Task {
    fn start(task: usize, choice: &str, role: &str, network: Option<&str>) -> Self {
        let exe = std::env::current_exe().unwrap();
        let mut command = match network {
            None => Command::new(exe),
            Some(name) => {
                let mut command = Command::new("ip");
                command.args(["netns", "exec", name]).arg(exe);
                command
            }
        };
        let mut child = command
            .args(["--exact", "deaths::child", "--ignored", "--nocapture"])
            .env("MUSTER_TEST_TASK", format!("{task} {choice} {role}"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let input = child.stdin.take().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let (tell, lines) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                // The harness writes on the same line as the child's first word.
                if let Some((_, said)) = line.split_once("child: ")
                    && tell.send(said.to_owned()).is_err()
                {
                    return;
                }
            }
        });
        let address = lines.recv_timeout(PATIENCE).unwrap();
        let address = serde_json::from_str(&address).unwrap();
        let devices = devices_of(task, role);
        Self { child, input, lines, here: member(task, 0), devices, address }
    }

    fn peer(&self) -> (TaskId, Peer) {
        let devices = self.devices.clone();
        (self.here.task, Peer { incarnation: self.here.incarnation, address: self.address.clone(), devices })
    }

    fn announce(&mut self, membership: &Membership) {
        writeln!(self.input, "{}", serde_json::to_string(membership).unwrap()).unwrap();
    }

    fn hears(&self, what: &str) {
        let until = Instant::now() + PATIENCE;
        while let Ok(line) = self.lines.recv_timeout(until.saturating_duration_since(Instant::now())) {
            if line == what {
                return;
            }
        }
        panic!("the child never said {what}");
    }

    fn signal(&self, signal: rustix::process::Signal) {
        rustix::process::kill_process(rustix::process::Pid::from_child(&self.child), signal).unwrap();
    }
}

/// With these tasks: task 0 in this process, and all know of each other.
fn with(choice: &str, tasks: &mut [Task]) -> Cluster {
    let cluster = Cluster::with(1, |config| config.transport = choice_of(choice));
    let mut membership = cluster.membership();
    membership.peers.extend(tasks.iter().map(Task::peer));
    cluster.engines[0].on_membership(membership.clone());
    for task in tasks {
        task.announce(&membership);
    }
    cluster
}

fn say(what: &str) {
    println!("\nchild: {what}");
}

/// What a task does that is a process of its own.
#[test]
#[ignore = "is started by the other tests"]
fn child() {
    let Ok(setting) = std::env::var("MUSTER_TEST_TASK") else { return };
    let mut words = setting.split(' ');
    let mut word = || words.next().unwrap().to_owned();
    let (task, choice, role) = (word().parse().unwrap(), word(), word());
    let engine = start(task, 0, |config| {
        config.transport = choice_of(&choice);
        config.devices = devices_of(task, &role);
        if role == "away" {
            config.listen = Some("10.77.0.2:0".parse().unwrap());
        }
    });
    say(&serde_json::to_string(engine.address()).unwrap());
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    let membership: Membership = serde_json::from_str(&line).unwrap();
    engine.on_membership(membership.clone());
    if role == "meet" {
        return meet_all(&engine, &membership);
    }
    if role == "gather" {
        return gather_all(&engine);
    }
    let arena = Arena::new(4 * LEN).unwrap();
    let (source, target) = (arena.allocate(LEN).unwrap(), arena.allocate(LEN).unwrap());
    source.write(|bytes| bytes.copy_from_slice(&contents(LEN, task as u64))).unwrap();
    let [mut out, mut back] = streams(&engine, task, &target, &source);
    if role == "late" {
        say("ready");
        std::thread::sleep(PATIENCE);
    }
    for round in 0.. {
        let (received, sent) = (out.launch(&[]), back.launch(&[]));
        if received.wait().is_err() || sent.wait().is_err() {
            return;
        }
        if round == 3 {
            say("going");
        }
    }
}

/// What moves between task 0 and another: a buffer each way, on channels of their own.
fn streams(
    engine: &Engine,
    task: usize,
    first: &muster::transfer::Buffer,
    second: &muster::transfer::Buffer,
) -> [muster::transfer::Prepared; 2] {
    let near = engine.here().task.0 as usize == 0;
    let (out, back) = if near {
        (crate::cluster::outgoing(first, 0, task, 1), crate::cluster::incoming(second, task, 0, 2))
    } else {
        (crate::cluster::incoming(first, 0, task, 1), crate::cluster::outgoing(second, task, 0, 2))
    };
    [(out, 1), (back, 2)].map(|(spec, channel)| {
        let options = Options { channel, stall: STALL, ..Options::default() };
        engine.prepare(vec![spec], options).wait().unwrap()
    })
}

/// Moves with a task until `until` says so; returns what was under way then.
fn flow(cluster: &Cluster, task: usize, until: impl Fn(usize) -> bool) -> [Transfer; 2] {
    let (source, target) = (cluster.filled(0, LEN, 9), cluster.empty(0, LEN));
    let [mut out, mut back] = streams(&cluster.engines[0], task, &source, &target);
    for round in 0.. {
        let (sent, received) = (out.launch(&[]), back.launch(&[]));
        if until(round) {
            return [sent, received];
        }
        sent.wait().unwrap();
        received.wait().unwrap();
        if round < 5 {
            target.read(|bytes| assert!(bytes == contents(LEN, task as u64))).unwrap();
        }
    }
    unreachable!()
}

#[test]
fn a_peer_that_is_killed_is_told_of_at_once_and_others_lose_nothing() {
    for choice in ["auto", "pvm", "unix", "tcp"] {
        let mut tasks = vec![Task::start(1, choice, "stream", None), Task::start(2, choice, "stream", None)];
        let cluster = with(choice, &mut tasks);
        let over = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            let other = scope.spawn(|| {
                let mut rounds = 0;
                let last = flow(&cluster, 2, |_| over.load(std::sync::atomic::Ordering::SeqCst));
                for transfer in last {
                    transfer.wait_for(PATIENCE).unwrap().unwrap();
                    rounds += 1;
                }
                rounds
            });
            // One that the peer has not launched waits in any case.
            let (unmet, target) = (cluster.empty(0, 100), cluster.empty(0, 100));
            let unmet =
                vec![crate::cluster::outgoing(&unmet, 0, 1, 5), crate::cluster::incoming(&target, 1, 0, 6)];
            let options = Options { channel: 9, ..Options::default() };
            let mut unmet = cluster.engines[0].prepare(unmet, options).wait().unwrap();
            let unmet = unmet.launch(&[]);
            let killed = std::cell::Cell::new(Instant::now());
            let under_way = flow(&cluster, 1, |round| {
                if round == 20 {
                    tasks[0].signal(rustix::process::Signal::KILL);
                    killed.set(Instant::now());
                }
                round == 20
            });
            let began = killed.get();
            let mut slowest = Duration::ZERO;
            for transfer in under_way.iter().chain([&unmet]) {
                match transfer.wait_for(PATIENCE).expect("it has an outcome") {
                    // It was over before the signal came.
                    Ok(_) => {}
                    Err(error) => {
                        slowest = slowest.max(began.elapsed());
                        let text = error.to_string();
                        assert!(text.contains(&tasks[0].here.to_string()), "{choice}: {text}");
                        assert!(matches!(
                            error,
                            TransferError::PeerDead { .. } | TransferError::Transport { .. }
                        ));
                    }
                }
            }
            println!("{choice}: killed, told after {slowest:?}");
            assert!(unmet.outcome().unwrap().is_err());
            assert!(slowest < Duration::from_secs(1), "{slowest:?}");
            std::thread::sleep(Duration::from_millis(100));
            over.store(true, std::sync::atomic::Ordering::SeqCst);
            assert_eq!(other.join().unwrap(), 2);
        });
    }
}

/// Given up at the stall limit and not before it: by the engine's own account of the silence, because how long ago the
/// peer was last heard when the signal came is up to the machine.
fn assert_stalled(error: &TransferError) {
    let TransferError::Stalled { idle, .. } = error else { panic!("{error}") };
    let limit = STALL;
    assert!(*idle >= limit && *idle < 3 * limit, "{error}");
}

#[test]
fn a_peer_that_is_stopped_is_given_up_at_the_stall_limit() {
    for choice in ["auto", "tcp"] {
        let mut tasks = vec![Task::start(1, choice, "stream", None)];
        let cluster = with(choice, &mut tasks);
        let under_way = flow(&cluster, 1, |round| {
            if round == 20 {
                tasks[0].signal(rustix::process::Signal::STOP);
            }
            round == 20
        });
        let began = Instant::now();
        for transfer in &under_way {
            let outcome = transfer.wait_for(PATIENCE).expect("it has an outcome");
            let after = began.elapsed();
            println!("{choice}: stopped in the middle, {outcome:?} after {after:?}");
            if let Err(error) = outcome {
                assert_stalled(&error);
            }
        }
    }
}

#[test]
fn a_peer_that_is_stopped_before_it_launched_is_given_up_at_the_stall_limit() {
    for choice in ["auto", "tcp"] {
        let mut tasks = vec![Task::start(1, choice, "late", None)];
        let cluster = with(choice, &mut tasks);
        tasks[0].hears("ready");
        let launched = Instant::now();
        let patient = flow(&cluster, 1, |_| true);
        // It lives, and so it is waited for, longer than the limit.
        std::thread::sleep(Duration::from_millis(1500));
        assert!(patient.iter().all(|transfer| transfer.outcome().is_none()));
        tasks[0].signal(rustix::process::Signal::STOP);
        let began = Instant::now();
        for transfer in &patient {
            let error = transfer.wait_for(PATIENCE).expect("it has an outcome").unwrap_err();
            let after = began.elapsed();
            println!(
                "{choice}: stopped before it launched, {error} after {after:?}, {:?} in all",
                launched.elapsed()
            );
            assert_stalled(&error);
        }
    }
}

/// How long a plan may take of which a task is stopped, and its stall limit.
const GATHER: (Duration, Duration) = (Duration::from_millis(1200), Duration::from_millis(1000));

/// Carries out the same plan again and again, until it fails: how long that took, how, and with which shards.
fn gather_until_it_fails(
    engine: &Engine,
    arena: &Arena,
    each: impl Fn(u32),
) -> (Duration, ReshardError, ShardBuffers) {
    let wanted = Wanted::of(gathered(4 * DEVICES_EACH, &[64, 16 << 10], GATHER.0));
    for round in 0.. {
        let shards = wanted.buffers(engine.here().task.0, DEVICES_EACH, arena);
        each(round);
        let options = Options { channel: round, stall: GATHER.1, ..Options::default() };
        let began = Instant::now();
        match engine.carry_out(&wanted.plan, &shards, arena, options) {
            Ok(_) => wanted.assert_after(&shards),
            Err(error) => return (began.elapsed(), error, shards),
        }
    }
    unreachable!()
}

/// What a task does whose plans are carried out with others until one of them fails.
fn gather_all(engine: &Engine) {
    let arena = Arena::new(64 << 20).unwrap();
    let (_, error, shards) = gather_until_it_fails(engine, &arena, |round| {
        if round == 2 {
            say("going");
        }
    });
    assert!(!matches!(error, ReshardError::Unproven { .. }), "{error}");
    shards.destination.values().for_each(|buffer| buffer.fill(0).unwrap());
    say("over");
}

#[test]
fn a_plan_with_a_peer_that_is_stopped_ends_in_its_time_and_its_shards_are_free() {
    for choice in ["auto", "pvm", "unix", "tcp"] {
        let mut tasks = [Task::start(3, choice, "gather", None)];
        let cluster = Cluster::of_devices(3, DEVICES_EACH, |config| config.transport = choice_of(choice));
        let mut membership = cluster.membership();
        membership.peers.extend(tasks.iter().map(Task::peer));
        cluster.engines.iter().for_each(|engine| engine.on_membership(membership.clone()));
        tasks[0].announce(&membership);
        let stopped = std::sync::atomic::AtomicBool::new(false);
        let carry = |(engine, arena): (&Engine, &Arena)| {
            let (took, error, shards) = gather_until_it_fails(engine, arena, |_| ());
            println!("{choice}: task {} after {took:?}: {error}", engine.here().task);
            assert!(stopped.load(std::sync::atomic::Ordering::SeqCst), "{choice}: {error}");
            assert!(took < GATHER.0 + 2 * GATHER.1, "{choice}: {took:?}");
            assert!(!matches!(error, ReshardError::Unproven { .. }), "{choice}: {error}");
            // It is used for something else at once.
            shards.destination.values().for_each(|buffer| buffer.fill(0x77).unwrap());
            shards
        };
        let carry = &carry;
        let freed: Vec<_> = std::thread::scope(|scope| {
            let ours = cluster.engines.iter().zip(&cluster.arenas);
            let carrying: Vec<_> = ours.map(|ours| scope.spawn(move || carry(ours))).collect();
            tasks[0].hears("going");
            std::thread::sleep(Duration::from_millis(40));
            stopped.store(true, std::sync::atomic::Ordering::SeqCst);
            tasks[0].signal(rustix::process::Signal::STOP);
            carrying.into_iter().map(|carrying| carrying.join().unwrap()).collect()
        });
        // Whatever was still on its way from or to the stopped one, it changes nothing any more.
        tasks[0].signal(rustix::process::Signal::CONT);
        tasks[0].hears("over");
        for buffer in freed.iter().flat_map(|shards| shards.destination.values()) {
            buffer.read(|bytes| assert!(bytes.iter().all(|byte| *byte == 0x77), "{choice}")).unwrap();
        }
    }
}

/// Everybody sends to everybody, once.
fn meet_all(engine: &Engine, membership: &Membership) {
    const MEET: usize = 300_001;
    let here = engine.here().task.0 as usize;
    let arena = Arena::new(16 << 20).unwrap();
    let mut specs = Vec::new();
    let mut targets = Vec::new();
    for other in membership.peers.keys().map(|task| task.0 as usize).filter(|other| *other != here) {
        let (source, target) = (arena.allocate(MEET).unwrap(), arena.allocate(MEET).unwrap());
        source.write(|bytes| bytes.copy_from_slice(&contents(MEET, (here * 100 + other) as u64))).unwrap();
        specs.push(crate::cluster::outgoing(&source, here, other, (here * 100 + other) as u64));
        specs.push(crate::cluster::incoming(&target, other, here, (other * 100 + here) as u64));
        targets.push((target, (other * 100 + here) as u64));
    }
    let outcome = engine.transfer(&[], specs, Options::default()).wait_for(PATIENCE).unwrap();
    outcome.unwrap();
    for (target, seed) in targets {
        target.read(|bytes| assert!(bytes == contents(MEET, seed))).unwrap();
    }
    say("met");
    let mut rest = String::new();
    let _until_all_have = std::io::stdin().read_line(&mut rest);
}

#[test]
fn two_to_eight_processes_all_send_to_all() {
    for (count, choice) in [(2, "auto"), (5, "tcp"), (8, "auto")] {
        let mut tasks: Vec<_> = (0..count).map(|task| Task::start(task, choice, "meet", None)).collect();
        let membership = Membership { peers: tasks.iter().map(Task::peer).collect() };
        tasks.iter_mut().for_each(|task| task.announce(&membership));
        tasks.iter().for_each(|task| task.hears("met"));
    }
}

#[test]
fn between_two_network_namespaces_tcp_is_chosen_by_itself() {
    let ip = |line: &str| {
        Command::new("ip").args(line.split(' ')).stderr(Stdio::null()).status().is_ok_and(|s| s.success())
    };
    let name = format!("muster-{}", std::process::id());
    let near = format!("mu{}", std::process::id());
    if !ip(&format!("netns add {name}")) {
        println!("skipped: no network namespaces may be made here");
        return;
    }
    let made = ip(&format!("link add {near} type veth peer name far netns {name}"))
        && ip(&format!("addr add 10.77.0.1/24 dev {near}"))
        && ip(&format!("link set {near} up"))
        && ip(&format!("-n {name} addr add 10.77.0.2/24 dev far"))
        && ip(&format!("-n {name} link set far up"));
    if !made {
        println!("skipped: no pair of interfaces may be made here");
    } else {
        let mut tasks = [Task::start(1, "auto", "away", Some(&name))];
        let cluster = Cluster::with(1, |config| config.listen = Some("10.77.0.1:0".parse().unwrap()));
        let mut membership = cluster.membership();
        membership.peers.extend(tasks.iter().map(Task::peer));
        cluster.engines[0].on_membership(membership.clone());
        tasks[0].announce(&membership);
        for transfer in flow(&cluster, 1, |round| round == 5) {
            transfer.wait_for(PATIENCE).unwrap().unwrap();
        }
        let kinds: Vec<_> = cluster.engines[0].links().iter().map(|link| link.kind).collect();
        println!("two hosts: {kinds:?}");
        assert_eq!(kinds, [muster::transfer::TransportKind::Tcp]);
    }
    let _gone = ip(&format!("netns del {name}"));
}

#[test]
#[ignore = "a gibibyte each way: slow without optimisation"]
fn a_gibibyte_arrives_whole() {
    for choice in [Choice::Auto, Choice::Tcp] {
        let mut cluster = Cluster::new(2, choice);
        let len = (1 << 30) + 13;
        cluster.arenas = (0..2).map(|_| Arena::new(len + 8192).unwrap()).collect();
        let (source, target) = (cluster.filled(0, len, 1), cluster.empty(1, len));
        let began = Instant::now();
        let (sent, received) = cluster.send(0, &source, 1, &target, 1);
        received.wait().unwrap();
        sent.wait().unwrap();
        println!("{choice:?}: 1 GiB in {:?}", began.elapsed());
        crate::cluster::assert_contents(&target, 1);
    }
}
