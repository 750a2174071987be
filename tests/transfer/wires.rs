//! Tests of the transports: engines of one process without a network, and other paths when the best one fails.

use std::time::{Duration, Instant};

use muster::transfer::{FaultInjector, LaunchOptions, TransferError, TransportChoice, TransportKind};

use crate::cluster::{Cluster, assert_contents, done, eventually, incoming, outgoing};

#[test]
fn engines_of_one_process_meet_without_listening_on_anything() {
    let cluster = Cluster::new(3, TransportChoice::Loopback);
    for engine in &cluster.engines {
        let address = engine.address();
        assert!(address.tcp.is_empty() && address.local.is_empty() && !address.inside.is_empty());
    }
    let len = 2_000_003;
    let mut moved = Vec::new();
    for (key, (from, to)) in [(0, 1), (1, 0), (1, 2), (2, 0)].into_iter().enumerate() {
        let (source, target) = (cluster.filled(from, len, key as u64), cluster.empty(to, len));
        moved.push((cluster.send(from, &source, to, &target, key as u64), target, key as u64));
    }
    for ((sent, received), target, key) in moved {
        assert_eq!((done(&sent).err(), done(&received).err()), (None, None));
        assert_contents(&target, key);
    }
    for link in cluster.engines[0].links() {
        assert_eq!(link.kind, TransportKind::Loopback);
        assert!(link.lanes > 1, "{link:?}");
        let by: Vec<_> =
            link.bytes.iter().filter(|(_, moved)| *moved != (0, 0)).map(|(kind, _)| *kind).collect();
        assert_eq!(by, [TransportKind::Loopback]);
    }
}

#[test]
fn the_end_of_an_in_process_engine_is_reported_at_once() {
    let cluster = Cluster::new(2, TransportChoice::Loopback);
    let (source, target) = (cluster.filled(0, 1000, 1), cluster.empty(1, 1000));
    let (sent, received) = cluster.send(0, &source, 1, &target, 1);
    assert_eq!((done(&sent).err(), done(&received).err()), (None, None));
    let waiting =
        cluster.engines[0].transfer(&[], vec![incoming(&source, 1, 0, 2)], LaunchOptions::default());
    std::thread::sleep(Duration::from_millis(50));
    let began = Instant::now();
    cluster.engines[1].shutdown();
    let error = done(&waiting).unwrap_err();
    assert!(matches!(error, TransferError::PeerDead { .. }), "{error}");
    assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
    // Nothing listens there any more.
    let late = cluster.engines[0].transfer(&[], vec![outgoing(&source, 0, 1, 3)], LaunchOptions::default());
    let error = done(&late).unwrap_err().to_string();
    assert!(error.contains("loopback:muster-1-"), "{error}");
}

/// Moves bytes in both directions between tasks 0 and 1. Returns the transport of the connection.
fn transfer_both_ways(cluster: &Cluster, key: u64) -> TransportKind {
    const LEN: usize = 1_500_001;
    let moved = [(0, 1), (1, 0)].map(|(from, to)| {
        let (source, target) = (cluster.filled(from, LEN, key), cluster.empty(to, LEN));
        (cluster.send(from, &source, to, &target, key), target)
    });
    for ((sent, received), target) in moved {
        assert_eq!((done(&sent).err(), done(&received).err()), (None, None), "{key}");
        assert_contents(&target, key);
    }
    let kind = |task: usize, peer: u32| {
        let links = cluster.engines[task].links();
        links.iter().find(|link| link.peer.task.0 == peer).expect("it has just been used").kind
    };
    assert_eq!(kind(0, 1), kind(1, 0));
    kind(0, 1)
}

#[test]
fn a_unix_socket_that_cannot_be_dialled_is_not_missed() {
    let cluster = Cluster::new(2, TransportChoice::Auto);
    let mut membership = cluster.membership();
    for peer in membership.peers.values_mut() {
        peer.address.local = "muster-nobody-listens-here".to_owned();
    }
    for engine in &cluster.engines {
        engine.on_membership(membership.clone());
    }
    for key in 0..3 {
        assert_eq!(transfer_both_ways(&cluster, key), TransportKind::Tcp);
    }
}

#[test]
fn a_unix_socket_that_is_lost_in_use_gives_way_to_tcp() {
    let faults = FaultInjector::new(1);
    let cluster = Cluster::with(2, |config| config.faults = Some(faults.clone()));
    assert_eq!(transfer_both_ways(&cluster, 0), TransportKind::Unix);
    // In use on both sides: a transfer is prepared, and one of two sides has launched it, on a channel of its
    // own.
    let alone = LaunchOptions { channel: 7, ..LaunchOptions::default() };
    let (source, target) = (cluster.filled(0, 1000, 1), cluster.empty(1, 1000));
    let [out, into] = [outgoing(&source, 0, 1, 1), incoming(&target, 0, 1, 1)];
    let mut here = cluster.engines[0].prepare(vec![out], alone).wait().unwrap();
    let _there = cluster.engines[1].prepare(vec![into], alone).wait().unwrap();
    let under_way = here.launch(&[]);
    assert_eq!(faults.reset(|_| true), 2);
    let error = done(&under_way).unwrap_err();
    assert!(matches!(error, TransferError::PeerDead { .. }), "{error}");
    eventually("both sides know of it", || cluster.engines.iter().all(|engine| engine.links().is_empty()));
    for key in 2..5 {
        assert_eq!(transfer_both_ways(&cluster, key), TransportKind::Tcp);
    }
    // The path that failed is still in the list, for when TCP fails as well.
    let mut membership = cluster.membership();
    for peer in membership.peers.values_mut() {
        peer.address.tcp = vec!["127.0.0.1:9".parse().unwrap()];
    }
    for engine in &cluster.engines {
        engine.on_membership(membership.clone());
    }
    faults.set_new_wires_end_at_once(true);
    faults.reset(|_| true);
    eventually("both sides know of it", || cluster.engines.iter().all(|engine| engine.links().is_empty()));
    faults.clear_faults();
    assert_eq!(transfer_both_ways(&cluster, 5), TransportKind::Unix);
}

#[test]
fn a_choice_that_is_forced_is_not_made_again() {
    let faults = FaultInjector::new(1);
    let cluster = Cluster::with(2, |config| {
        config.transport = TransportChoice::Pvm;
        config.faults = Some(faults.clone());
    });
    assert_eq!(transfer_both_ways(&cluster, 0), TransportKind::Unix);
    let target = cluster.empty(1, 1000);
    let waiting =
        cluster.engines[1].transfer(&[], vec![incoming(&target, 0, 1, 1)], LaunchOptions::default());
    std::thread::sleep(Duration::from_millis(50));
    faults.reset(|_| true);
    assert!(done(&waiting).is_err());
    eventually("both sides know of it", || cluster.engines.iter().all(|engine| engine.links().is_empty()));
    let options = LaunchOptions { channel: 1, ..LaunchOptions::default() };
    let (source, target) = (cluster.filled(0, 1000, 2), cluster.empty(1, 1000));
    let sent = cluster.engines[0].transfer(&[], vec![outgoing(&source, 0, 1, 2)], options);
    let received = cluster.engines[1].transfer(&[], vec![incoming(&target, 0, 1, 2)], options);
    assert_eq!((done(&sent).err(), done(&received).err()), (None, None));
    assert!(cluster.engines[0].links().iter().all(|link| link.kind == TransportKind::Unix));
}

#[test]
fn a_connection_that_made_room_for_another_has_not_failed() {
    let cluster = Cluster::with(3, |config| config.cliques_max = if config.here.task.0 == 0 { 1 } else { 8 });
    assert_eq!(transfer_both_ways(&cluster, 0), TransportKind::Unix);
    let (source, target) = (cluster.filled(0, 1000, 1), cluster.empty(2, 1000));
    let dropped = || !cluster.engines[0].links().iter().any(|link| link.peer.task.0 == 1);
    eventually("it was dropped", || {
        let (sent, received) = cluster.send(0, &source, 2, &target, 1);
        assert_eq!((done(&sent).err(), done(&received).err()), (None, None));
        dropped()
    });
    eventually("the other side knows of it", || cluster.engines[1].links().is_empty());
    assert_eq!(transfer_both_ways(&cluster, 2), TransportKind::Unix);
}
