//! A cancelled transfer is over on both sides, and that is proven before anybody uses its memory again.

use std::time::Duration;

use muster::transfer::{Arena, Buffer, Choice, Config, Engine, Options, TransferError, registered_bytes};

use crate::cluster::{
    Cluster, PATIENCE, assert_contents, contents, done, eventually, incoming, outgoing, start,
};

const CHOICES: [Choice; 5] = [Choice::Auto, Choice::Pvm, Choice::Unix, Choice::Tcp, Choice::Loopback];

/// Without checksums, so that nothing but the protocol keeps wrong bytes out.
fn bare(choice: Choice) -> Cluster {
    Cluster::with(2, |config: &mut Config| {
        config.transport = choice;
        config.checks = false;
    })
}

#[test]
fn what_is_received_of_a_sender_that_cancels_is_whole_or_an_error() {
    for choice in CHOICES {
        let cluster = bare(choice);
        let mut random = fastrand::Rng::with_seed(5);
        let (mut whole, mut cancelled) = (0, 0);
        let len = 3 << 20;
        let wanted = contents(len, 1);
        for round in 0..60 {
            let (source, target) = (cluster.filled(0, len, 1), cluster.empty(1, len));
            let (sent, received) = cluster.send(0, &source, 1, &target, round);
            std::thread::sleep(Duration::from_micros(random.u64(0..2500)));
            let proof = sent.cancel("enough");
            // As soon as it is told that the buffer is free, it is used for something else.
            while source.fill(0).is_err() {
                std::thread::yield_now();
            }
            assert!(proof.wait_for(PATIENCE), "{choice:?} {round}");
            match done(&received) {
                Ok(_) => {
                    whole += 1;
                    target
                        .read(|bytes| assert!(bytes == wanted, "{choice:?}: wrong bytes in round {round}"))
                        .unwrap();
                }
                Err(TransferError::Cancelled { by, reason }) => {
                    cancelled += 1;
                    // The first time there may be no connection yet that could bring the reason.
                    let why = reason.contains("enough") || round == 0 && reason.contains("failed earlier");
                    assert!(by.0 == 0 && why, "{by} {reason}");
                }
                Err(error) => panic!("{choice:?}: {error}"),
            }
        }
        println!("{choice:?}: {whole} whole, {cancelled} cancelled");
    }
}

#[test]
fn what_is_received_while_either_engine_shuts_down_is_whole_or_an_error() {
    for choice in CHOICES {
        let mut cluster = bare(choice);
        let mut random = fastrand::Rng::with_seed(8);
        let (mut whole, mut failed) = (0, 0);
        let len = 3 << 20;
        let wanted = contents(len, 1);
        let source = cluster.filled(0, len, 1);
        for round in 1..60 {
            source.write(|bytes| bytes.copy_from_slice(&wanted)).unwrap();
            let target = cluster.empty(1, len);
            let (sent, received) = cluster.send(0, &source, 1, &target, round);
            std::thread::sleep(Duration::from_micros(random.u64(0..3000)));
            let who = usize::from(round % 2 == 0);
            std::thread::scope(|scope| {
                scope.spawn(|| cluster.engines[who].shutdown());
                // As soon as the sender may, it uses the buffer for something else.
                while sent.outcome().is_none() || source.fill(0).is_err() {
                    std::hint::spin_loop();
                }
            });
            match done(&received) {
                Ok(_) => {
                    whole += 1;
                    target
                        .read(|bytes| assert!(bytes == wanted, "{choice:?}: wrong bytes in round {round}"))
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
    }
}

#[test]
fn after_the_proof_no_byte_changes_however_often_it_is_asked_for() {
    for choice in CHOICES {
        let cluster = bare(choice);
        let mut random = fastrand::Rng::with_seed(6);
        let len = 2 << 20;
        let source = cluster.filled(0, len, 1);
        for round in 0..60u64 {
            let target = cluster.empty(1, len);
            let (sent, received) = cluster.send(0, &source, 1, &target, round);
            std::thread::sleep(Duration::from_micros(random.u64(0..1500)));
            // The sender's proof counts for the receiver's memory too. Asked twice, it is proven both times.
            let who = if round % 2 == 0 { &sent } else { &received };
            let _first = who.cancel("first");
            let second = who.cancel("second");
            assert!(second.wait_for(PATIENCE), "{choice:?} {round}");
            let _over = (done(&received), done(&sent));
            target.fill(round as u8).unwrap();
            std::thread::sleep(Duration::from_micros(500));
            target.read(|bytes| assert!(bytes.iter().all(|byte| *byte == round as u8))).unwrap();
        }
    }
}

#[test]
fn cancels_at_the_moment_of_the_launch_are_proven_too() {
    for choice in [Choice::Auto, Choice::Tcp, Choice::Loopback] {
        let cluster = bare(choice);
        let len = 6000;
        let (source, target) = (cluster.filled(0, len, 1), cluster.empty(1, len));
        let mut sending =
            cluster.engines[0].prepare(vec![outgoing(&source, 0, 1, 1)], Options::default()).wait().unwrap();
        let mut receiving =
            cluster.engines[1].prepare(vec![incoming(&target, 0, 1, 1)], Options::default()).wait().unwrap();
        for round in 0..3000 {
            target.fill(1).unwrap();
            let next = sending.next();
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
                Err(TransferError::Cancelled { .. }) => {}
                Err(error) => panic!("{choice:?} {round}: {error}"),
            }
            let _over = done(&sent);
            eventually("both buffers are free", || source.write(|_| ()).is_ok());
        }
    }
}

#[test]
fn thousands_of_random_cancels_under_fire() {
    for choice in CHOICES {
        let cluster = bare(choice);
        std::thread::scope(|scope| {
            for channel in 0..4u32 {
                let cluster = &cluster;
                scope.spawn(move || fire(cluster, choice, channel));
            }
        });
        eventually("all groups are forgotten", || {
            cluster.engines.iter().all(|engine| engine.links().iter().all(|link| link.launched == 0))
        });
    }
}

fn fire(cluster: &Cluster, choice: Choice, channel: u32) {
    let mut random = fastrand::Rng::with_seed(u64::from(channel));
    let options = Options { channel, ..Options::default() };
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
            Ok(_) => assert_contents(&target, seed),
            Err(TransferError::Cancelled { .. }) if !proofs.is_empty() => {}
            Err(error) => panic!("{choice:?} {round}: {error}"),
        }
        if !proofs.is_empty() {
            target.fill(0xaa).unwrap();
            if random.u8(0..8) == 0 {
                std::thread::sleep(Duration::from_millis(1));
            }
            target.read(|bytes| assert!(bytes.iter().all(|byte| *byte == 0xaa))).unwrap();
        }
        let _over = done(&sent);
    }
}

/// What this process holds: descriptors, threads, mappings.
fn held() -> (usize, usize, usize) {
    let count = |path: &str| std::fs::read_dir(path).unwrap().count();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let arenas = maps.lines().filter(|line| line.contains("muster-arena")).count();
    (count("/proc/self/fd"), count("/proc/self/task"), arenas)
}

/// What the engines know of their connections.
fn told(cluster: &Cluster) -> String {
    let all = cluster.engines.iter().map(|engine| {
        let (cliques, ..) = engine.cliques();
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

/// Alone in its process: it counts what the process holds.
#[test]
#[ignore = "run by the test below, in a process of its own"]
fn alone_restarts() {
    let rounds: u64 = std::env::var("ROUNDS").map_or(12_500, |rounds| rounds.parse().unwrap());
    let setting = |task: usize| {
        move |config: &mut Config| {
            config.transport = if task.is_multiple_of(2) { Choice::Auto } else { Choice::Tcp };
            config.reactors = 1;
            config.copiers = 1;
            config.lanes = 2;
        }
    };
    let mut random = fastrand::Rng::with_seed(77);
    let before = held();
    let mut cancels = 0;
    {
        let mut cluster = Cluster::with(3, |config| setting(config.here.task.0 as usize)(config));
        let mut lives = [0u64; 3];
        for round in 0..rounds {
            let (mut running, mut ways) = (Vec::new(), Vec::new());
            for key in 0..random.u64(1..25) {
                let (from, to) = *random.choice(&[(0, 1), (1, 0), (0, 2), (2, 0), (1, 2), (2, 1)]).unwrap();
                let len = *random.choice(&[10, 9000, 300_000]).unwrap();
                ways.push((from, to, len));
                let (source, target) = (cluster.empty(from, len), cluster.empty(to, len));
                let (sent, received) = cluster.send(from, &source, to, &target, key);
                running.push(sent);
                running.push(received);
            }
            if random.bool() {
                std::thread::sleep(Duration::from_micros(random.u64(0..3000)));
            }
            let mut proofs = Vec::new();
            for transfer in &running {
                if random.u8(0..3) == 0 {
                    proofs.push(transfer.cancel("no more"));
                    cancels += 1;
                }
            }
            let restarted = random.usize(0..3);
            if random.u8(0..4) == 0 {
                lives[restarted] += 1;
                let fresh = start(restarted, lives[restarted], setting(restarted));
                let old: Engine = std::mem::replace(&mut cluster.engines[restarted], fresh);
                if random.bool() {
                    old.shutdown();
                }
                drop(old);
                cluster.announce();
            } else {
                // What one side launched and the other did not is given up.
                for transfer in &running {
                    if transfer.wait_for(Duration::from_millis(300)).is_none() {
                        proofs.push(transfer.cancel("it does not come"));
                    }
                }
            }
            for (at, transfer) in running.iter().enumerate() {
                if transfer.wait_for(PATIENCE).is_none() {
                    panic!("transfer {at} of round {round} ({:?}) hangs: {}", ways[at / 2], told(&cluster));
                }
            }
            for proof in &proofs {
                assert!(
                    proof.wait_for(PATIENCE),
                    "a proof of round {round} does not come: {}",
                    told(&cluster)
                );
            }
        }
        assert!(rounds < 12_500 || cancels >= 100_000, "{cancels} cancels");
        println!("{rounds} rounds, {cancels} cancels, {lives:?} restarts: {:?} held", held());
    }
    let mut after = held();
    for _ in 0..600 {
        if after == before {
            break;
        }
        std::thread::sleep(Duration::from_millis(25));
        after = held();
    }
    println!("descriptors, threads, mappings before {before:?} and after {after:?}");
    for entry in std::fs::read_dir("/proc/self/fd").unwrap().flatten() {
        println!("  {:?} -> {:?}", entry.file_name(), std::fs::read_link(entry.path()));
    }
    assert_eq!(before, after);
}

#[test]
fn engines_that_are_dropped_and_restarted_under_fire_leave_nothing_behind() {
    let status = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "cancel::alone_restarts", "--ignored", "--nocapture"])
        .status()
        .unwrap();
    assert!(status.success());
}

/// Alone in its process: it counts the memory that engines know.
#[test]
#[ignore = "run by the test below, in a process of its own"]
fn alone_letting_go() {
    let before = registered_bytes();
    let mut random = fastrand::Rng::with_seed(9);
    for choice in CHOICES {
        let cluster = bare(choice);
        for round in 0..400u64 {
            let len = *random.choice(&[100, 9000, 200_000]).unwrap();
            // Of memory that nobody has but the launch: it goes when the last of it does, whoever that is.
            let owned = |len: usize| match round % 3 {
                0 => Buffer::foreign(vec![1; len]),
                _ => Arena::new(len).unwrap().allocate(len).unwrap(),
            };
            let sent = {
                let specs = vec![outgoing(&owned(len), 0, 1, round)];
                cluster.engines[0].transfer(&[], specs, Options::default())
            };
            let shorter = usize::from(random.u8(0..5) == 0);
            let received = {
                let specs = vec![incoming(&owned(len - shorter), 0, 1, round)];
                cluster.engines[1].transfer(&[], specs, Options::default())
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
        // What is under way when the engines end, too.
        for task in [0, 1] {
            let specs = vec![outgoing(&Buffer::foreign(vec![1; 5000]), task, 1 - task, 1000)];
            let unmet = cluster.engines[task].transfer(
                &[],
                specs,
                Options { channel: 1 + task as u32, ..Options::default() },
            );
            assert!(unmet.outcome().is_none());
        }
    }
    eventually("no memory is left", || registered_bytes() == before);
}

#[test]
fn memory_that_only_a_launch_holds_goes_with_it_under_no_lock_that_its_end_takes() {
    let status = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "cancel::alone_letting_go", "--ignored", "--nocapture"])
        .status()
        .unwrap();
    assert!(status.success());
}
