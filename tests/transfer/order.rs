//! Launches are matched in the order in which they were asked for, whenever their connections come.

use muster::transfer::{Choice, Options, TransferError};

use crate::cluster::{Cluster, assert_contents, done, eventually, incoming, member, outgoing};

#[test]
fn transfers_asked_for_before_there_are_connections_keep_their_order() {
    for round in 0..20 {
        let cluster = Cluster::new(3, Choice::Auto);
        let (mut transfers, mut targets) = (Vec::new(), Vec::new());
        for here in 0..3 {
            let others: Vec<usize> = (0..3).filter(|other| *other != here).collect();
            // First one that needs all connections, then some that need one each, in another order than they are made.
            let mut specs = Vec::new();
            for &other in &others {
                let target = cluster.empty(here, 5000);
                specs.push(outgoing(&cluster.filled(here, 5000, here as u64), here, other, here as u64));
                specs.push(incoming(&target, other, here, other as u64));
                targets.push((target, other as u64));
            }
            transfers.push(cluster.engines[here].transfer(&[], specs, Options::default()));
            for key in [10, 20] {
                for &other in others.iter().rev() {
                    let target = cluster.empty(here, 9000);
                    let source = cluster.filled(here, 9000, here as u64 + key);
                    let specs = vec![
                        outgoing(&source, here, other, here as u64 + key),
                        incoming(&target, other, here, other as u64 + key),
                    ];
                    targets.push((target, other as u64 + key));
                    transfers.push(cluster.engines[here].transfer(&[], specs, Options::default()));
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
fn what_fails_before_it_begins_is_told_to_the_other_side_and_the_next_are_in_step() {
    let cluster = Cluster::new(2, Choice::Auto);
    // A third task that nobody can reach: its port is taken, and nobody listens there.
    let taken = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    taken.bind(&std::net::SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
    cluster.announce_stranger(2, taken.local_addr().unwrap().as_socket().unwrap());
    for key in 0..20 {
        let (source, target) = (cluster.filled(0, 4000, key), cluster.empty(1, 4000));
        let receive =
            || cluster.engines[1].transfer(&[], vec![incoming(&target, 0, 1, key)], Options::default());
        let unreachable = vec![outgoing(&source, 0, 1, key), outgoing(&source, 0, 2, key)];
        // Before the other side asks for its half, or after.
        let early = (key % 2 == 0).then(receive);
        let failed = cluster.engines[0].transfer(&[], unreachable, Options::default());
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
fn connections_that_nobody_uses_make_room_for_others() {
    const COUNT: usize = 5;
    let cluster = Cluster::with(COUNT, |config| config.cliques_max = 2);
    // Who drops a connection does not ask the other side, which knows it a moment later.
    let linked = |here: usize, there: usize| {
        cluster.engines[here].links().iter().any(|link| link.peer == member(there, 0))
    };
    for round in 0..3 {
        for other in 1..COUNT {
            eventually("both sides know what is left", || linked(0, other) == linked(other, 0));
            let key = (round * COUNT + other) as u64;
            let (source, target) = (cluster.filled(0, 3000, key), cluster.empty(other, 3000));
            let (sent, received) = cluster.send(0, &source, other, &target, key);
            done(&sent).unwrap();
            done(&received).unwrap();
            assert_contents(&target, key);
        }
    }
    let (_, _, _, evictions) = cluster.engines[0].cliques();
    assert!(evictions > 0, "there were more than two at once");
    eventually("there are as few as there may be", || cluster.engines[0].cliques().0 <= 3);
    // One request that needs more of them than are kept.
    let targets: Vec<_> = (1..COUNT).map(|other| cluster.empty(other, 3000)).collect();
    let source = cluster.filled(0, 3000, 7);
    let specs = (1..COUNT).map(|other| outgoing(&source, 0, other, 7)).collect();
    let sent = cluster.engines[0].transfer(&[], specs, Options::default());
    eventually("all of them are there, and in use", || {
        let links = cluster.engines[0].links();
        links.len() == COUNT - 1 && links.iter().all(|link| link.launched == 1)
    });
    for (other, target) in (1..COUNT).zip(&targets) {
        let specs = vec![incoming(target, 0, other, 7)];
        done(&cluster.engines[other].transfer(&[], specs, Options::default())).unwrap();
        assert_contents(target, 7);
    }
    done(&sent).unwrap();
}
