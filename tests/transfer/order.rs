//! Tests that launches are matched in the order of their requests, in whatever order their connections are made.

use std::num::NonZeroUsize;
use std::sync::atomic::Ordering;
use std::time::Duration;

use muster::transfer::{
    FaultInjector, LaunchOptions, TaskId, TransferEngine, TransferError, TransportChoice,
};

use crate::cluster::{Cluster, assert_contents, done, eventually, incoming, member, outgoing};

#[test]
fn transfers_asked_for_before_there_are_connections_keep_their_order() {
    for round in 0..20 {
        let cluster = Cluster::new(3, TransportChoice::Auto);
        let (mut transfers, mut targets) = (Vec::new(), Vec::new());
        for here in 0..3 {
            let others: Vec<usize> = (0..3).filter(|other| *other != here).collect();
            // First a request that needs all connections, then requests that need one each, in another order
            // than they are made.
            let mut specs = Vec::new();
            for &other in &others {
                let target = cluster.empty(here, 5000);
                specs.push(outgoing(&cluster.filled(here, 5000, here as u64), here, other, here as u64));
                specs.push(incoming(&target, other, here, other as u64));
                targets.push((target, other as u64));
            }
            transfers.push(cluster.engines[here].transfer(&[], specs, LaunchOptions::default()));
            for key in [10, 20] {
                for &other in others.iter().rev() {
                    let target = cluster.empty(here, 9000);
                    let source = cluster.filled(here, 9000, here as u64 + key);
                    let specs = vec![
                        outgoing(&source, here, other, here as u64 + key),
                        incoming(&target, other, here, other as u64 + key),
                    ];
                    targets.push((target, other as u64 + key));
                    transfers.push(cluster.engines[here].transfer(&[], specs, LaunchOptions::default()));
                }
            }
        }
        for transfer in &transfers {
            done(transfer).unwrap_or_else(|error| panic!("round {round}: {error}"));
        }
        targets.iter().for_each(|(target, seed)| assert_contents(target, *seed));
    }
}

#[test]
fn an_early_failure_reaches_the_peer_and_later_launches_stay_matched() {
    let cluster = Cluster::new(2, TransportChoice::Auto);
    // A third task that cannot be reached: its port is bound, but nothing listens there.
    let taken = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    taken.bind(&std::net::SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
    cluster.announce_stranger(2, taken.local_addr().unwrap().as_socket().unwrap());
    for key in 0..20 {
        let (source, target) = (cluster.filled(0, 4000, key), cluster.empty(1, 4000));
        let receive =
            || cluster.engines[1].transfer(&[], vec![incoming(&target, 0, 1, key)], LaunchOptions::default());
        let unreachable = vec![outgoing(&source, 0, 1, key), outgoing(&source, 0, 2, key)];
        // Before the other side requests its half, or after.
        let early = (key % 2 == 0).then(receive);
        let failed = cluster.engines[0].transfer(&[], unreachable, LaunchOptions::default());
        let error = done(&failed).unwrap_err();
        assert!(
            matches!(error, TransferError::PeerDead { member: gone, .. } if gone == member(2, 0)),
            "{error}"
        );
        let half = done(&early.unwrap_or_else(receive)).unwrap_err();
        assert!(matches!(half, TransferError::Cancelled { .. }), "{half}");
        let (sent, received) = cluster.send(0, &source, 1, &target, 100 + key);
        done(&sent).unwrap();
        done(&received).unwrap();
        assert_contents(&target, key);
    }
}

#[test]
fn a_launch_that_was_reserved_keeps_its_place_until_its_memory_is_known() {
    let cluster = Cluster::new(3, TransportChoice::Auto);
    let one = NonZeroUsize::MIN;
    for key in 0..10 {
        let (first, second) = (cluster.filled(0, 4000, key), cluster.filled(0, 4000, key + 50));
        let targets = [cluster.empty(1, 4000), cluster.empty(1, 4000)];
        let receive = |at: usize, key| {
            cluster.engines[1].transfer(
                &[],
                vec![incoming(&targets[at], 0, 1, key)],
                LaunchOptions::default(),
            )
        };
        let reserved =
            cluster.engines[0].reserve(&[TaskId(1).into()], one, (4000, 0), LaunchOptions::default());
        let early = (key % 2 == 0).then(|| receive(0, key));
        let early_handle = reserved.transfer();
        let later = cluster.engines[0].transfer(
            &[],
            vec![outgoing(&second, 0, 1, key + 50)],
            LaunchOptions::default(),
        );
        assert_eq!(early_handle.outcome(), None);
        reserved.launch(&[], vec![outgoing(&first, 0, 1, key)]);
        let received = [early.unwrap_or_else(|| receive(0, key)), receive(1, key + 50)];
        for transfer in [&early_handle, &later, &received[0], &received[1]] {
            done(transfer).unwrap_or_else(|error| panic!("{key}: {error}"));
        }
        assert_contents(&targets[0], key);
        assert_contents(&targets[1], key + 50);
    }
}

#[test]
fn a_reserved_launch_that_ends_before_it_is_launched_is_over_at_the_peer_too() {
    let cluster = Cluster::new(2, TransportChoice::Auto);
    let one = NonZeroUsize::MIN;
    let hurried = LaunchOptions { deadline: Some(Duration::from_millis(50)), ..LaunchOptions::default() };
    for key in 0..5 {
        let (source, target) = (cluster.filled(0, 4000, key), cluster.empty(1, 4000));
        let options = if key == 2 { hurried } else { LaunchOptions::default() };
        let reserved = cluster.engines[0].reserve(&[TaskId(1).into()], one, (4000, 0), options);
        let handle = reserved.transfer();
        let receive = vec![incoming(&target, 0, 1, key)];
        let half = cluster.engines[1].transfer(&[], receive, LaunchOptions::default());
        let mut kept = None;
        match key {
            0 => drop(reserved),
            1 => {
                handle.cancel("not wanted").wait();
                kept = Some(reserved);
            }
            2 => kept = Some(reserved),
            3 => reserved.fail(&TransferError::Dependency("no memory".to_owned())),
            _ => reserved.launch(&[], Vec::new()),
        }
        let error = done(&handle).unwrap_err();
        let reason = ["dropped", "cancelled", "deadline", "dependency", "refused"][key as usize];
        assert_eq!(error.reason_label(), reason, "{error}");
        let half = done(&half).unwrap_err();
        assert!(matches!(half, TransferError::Cancelled { .. }), "{key}: {half}");
        // Its memory comes too late.
        if let Some(reserved) = kept {
            reserved.launch(&[], vec![outgoing(&source, 0, 1, key)]);
            assert_eq!(done(&handle).unwrap_err().reason_label(), reason);
        }
        let (sent, received) = cluster.send(0, &source, 1, &target, 100 + key);
        done(&sent).unwrap();
        done(&received).unwrap();
        assert_contents(&target, key);
    }
}

/// Performs the random transfers of one task with another. The other task performs the same ones, in its own
/// time: some are requested at once, some are prepared and launched repeatedly, some are only prepared.
/// Returns the bytes in each direction.
fn run_random_transfers(cluster: &Cluster, here: usize, there: usize, rounds: u64) -> u64 {
    let mut moved = 0;
    let pair = (here.min(there) * 10 + here.max(there)) as u64;
    let mut together = fastrand::Rng::with_seed(pair);
    let mut alone = fastrand::Rng::with_seed(pair * 100 + here as u64);
    for round in 0..rounds {
        let (len, launches) = (*together.choice(&[1, 3000, 70_000]).unwrap(), together.u64(0..4));
        let key = |from: usize| pair * 1000 + round * 10 + from as u64;
        let (source, target) = (cluster.filled(here, len, key(here)), cluster.empty(here, len));
        let specs =
            || vec![outgoing(&source, here, there, key(here)), incoming(&target, there, here, key(there))];
        let told = |error| panic!("{here} with {there} in round {round}: {error}");
        let pause = |random: &mut fastrand::Rng| {
            if random.bool() {
                std::thread::sleep(Duration::from_micros(random.u64(0..3000)));
            }
        };
        let engine = &cluster.engines[here];
        pause(&mut alone);
        if launches > 1 {
            let mut prepared = engine.prepare(specs(), LaunchOptions::default()).wait().unwrap();
            for _ in 0..launches {
                pause(&mut alone);
                done(&prepared.launch(&[])).unwrap_or_else(&told);
            }
        } else {
            if alone.u8(0..4) == 0 {
                drop(engine.prepare(specs(), LaunchOptions::default()).wait().unwrap());
            }
            done(&engine.transfer(&[], specs(), LaunchOptions::default())).unwrap_or_else(told);
        }
        assert_contents(&target, key(there));
        moved += len as u64 * launches.max(1);
    }
    moved
}

#[test]
fn idle_connections_are_evicted_for_new_ones() {
    const COUNT: usize = 5;
    let rounds = std::env::var("ROUNDS").map_or(150, |rounds| rounds.parse().unwrap());
    for (choice, slow) in
        [(TransportChoice::Auto, false), (TransportChoice::Tcp, false), (TransportChoice::Tcp, true)]
    {
        let cluster = Cluster::with(COUNT, |config| {
            config.transport = choice;
            config.cliques_max = 2;
            config.lanes = 2;
            if slow {
                // A question is in flight for long, so that requests are made meanwhile.
                let faults = FaultInjector::new(u64::from(config.here.task.0));
                faults.delay_receives(Duration::from_millis(2));
                config.faults = Some(faults);
            }
        });
        let rounds = if slow { rounds / 4 } else { rounds };
        let pairs = (0..COUNT).flat_map(|here| (0..COUNT).map(move |there| (here, there)));
        let pairs: Vec<_> = pairs.filter(|(here, there)| here != there).collect();
        let moved: Vec<_> = std::thread::scope(|scope| {
            let meet = |&(here, there)| {
                let cluster = &cluster;
                scope.spawn(move || run_random_transfers(cluster, here, there, rounds))
            };
            let meetings: Vec<_> = pairs.iter().map(meet).collect();
            meetings.into_iter().map(|meeting| meeting.join().unwrap()).collect()
        });
        eventually("all that was moved is counted, however short a connection lived", || {
            pairs.iter().zip(&moved).all(|(&(here, there), &wanted)| {
                let counted = cluster.engines[here].bytes_by_task();
                let (_, traffic) = counted.iter().find(|(peer, _)| peer.task.0 as usize == there).unwrap();
                let sums = traffic.iter().fold((0, 0), |all, (_, some)| (all.0 + some.0, all.1 + some.1));
                sums == (wanted, wanted)
            })
        });
        let of = |count: fn(&TransferEngine) -> u64| cluster.engines.iter().map(count).sum::<u64>();
        let (evictions, lost) = (
            of(|engine| engine.clique_cache_stats().3),
            of(|engine| engine.counts().lanes_lost.load(Ordering::SeqCst)),
        );
        println!("{choice:?}, slow: {slow}: {evictions} connections made room, {lost} lanes were lost");
        assert!(slow || evictions > 0, "there were more than two at once");
        assert!(slow || lost < evictions, "lanes of connections that were let go of are not lost");
    }
}

#[test]
fn a_request_may_need_more_connections_than_are_kept() {
    const COUNT: usize = 5;
    let cluster = Cluster::with(COUNT, |config| config.cliques_max = 2);
    for round in 0..3 {
        let targets: Vec<_> = (1..COUNT).map(|other| cluster.empty(other, 3000)).collect();
        let source = cluster.filled(0, 3000, round);
        let specs = (1..COUNT).map(|other| outgoing(&source, 0, other, round)).collect();
        let sent = cluster.engines[0].transfer(&[], specs, LaunchOptions::default());
        eventually("all of them are there, and in use", || {
            let links = cluster.engines[0].links();
            links.iter().filter(|link| link.launched == 1).count() == COUNT - 1
        });
        for (other, target) in (1..COUNT).zip(&targets) {
            let specs = vec![incoming(target, 0, other, round)];
            done(&cluster.engines[other].transfer(&[], specs, LaunchOptions::default())).unwrap();
            assert_contents(target, round);
        }
        done(&sent).unwrap();
        // One after the other: an unused connection makes room for the next one.
        for other in 1..COUNT {
            let (source, target) = (cluster.filled(0, 3000, 7), cluster.empty(other, 3000));
            let (sent, received) = cluster.send(0, &source, other, &target, 7);
            done(&sent).unwrap();
            done(&received).unwrap();
        }
    }
}
