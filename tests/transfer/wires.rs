//! What carries the bytes: engines of one process without a network.

use std::time::{Duration, Instant};

use muster::transfer::{Choice, Options, TransferError, TransportKind};

use crate::cluster::{Cluster, assert_contents, done, incoming, outgoing};

#[test]
fn engines_of_one_process_meet_without_listening_on_anything() {
    let cluster = Cluster::new(3, Choice::Loopback);
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
fn an_engine_of_this_process_that_ends_is_told_of_at_once() {
    let cluster = Cluster::new(2, Choice::Loopback);
    let (source, target) = (cluster.filled(0, 1000, 1), cluster.empty(1, 1000));
    let (sent, received) = cluster.send(0, &source, 1, &target, 1);
    assert_eq!((done(&sent).err(), done(&received).err()), (None, None));
    let waiting = cluster.engines[0].transfer(&[], vec![incoming(&source, 1, 0, 2)], Options::default());
    std::thread::sleep(Duration::from_millis(50));
    let began = Instant::now();
    cluster.engines[1].shutdown();
    let error = done(&waiting).unwrap_err();
    assert!(matches!(error, TransferError::PeerDead { .. }), "{error}");
    assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
    // Nobody is there to be dialled either.
    let late = cluster.engines[0].transfer(&[], vec![outgoing(&source, 0, 1, 3)], Options::default());
    let error = done(&late).unwrap_err().to_string();
    assert!(error.contains("loopback:muster-1-"), "{error}");
}
