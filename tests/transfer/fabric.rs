//! Reads of a peer's memory over a real libfabric, with its provider for TCP. `MUSTER_TRANSFER_FABRIC` runs the other tests over it as well.

use std::sync::atomic::Ordering;
use std::time::Duration;

use muster::transfer::{
    Buffer, EngineConfig, LaunchOptions, PemCertificates, TransferEngine, TransferError, TransportChoice,
    TransportKind,
};

use crate::cluster::{
    AnyMemory, Cluster, assert_contents, contents, device, done, eventually, fabric_under_test, incoming,
    member, options_on_channel, outgoing,
};
use crate::fabric_provider::fabric_over_tcp;

fn over_fabric(config: &mut EngineConfig) {
    config.transport = TransportChoice::Tcp;
    config.fabric = fabric_under_test().or_else(|| Some(fabric_over_tcp().to_owned()));
}

/// Starts two engines, and waits until they read each other's memory over the fabric.
fn two_engines() -> Cluster {
    let cluster = Cluster::with(2, over_fabric);
    let (source, target) = (cluster.filled(0, 8, 0), cluster.empty(1, 8));
    let (sent, received) = cluster.send(0, &source, 1, &target, 1 << 40);
    done(&received).unwrap();
    done(&sent).unwrap();
    eventually("both use the fabric", || {
        cluster.engines.iter().all(|engine| engine.links().iter().all(|link| link.reads_over_fabric))
    });
    cluster
}

/// Returns the bytes that a task has sent and received over a transport.
fn moved(engine: &TransferEngine, kind: TransportKind) -> (u64, u64) {
    let all = engine.bytes_by_task().into_iter().flat_map(|(_, bytes)| bytes);
    all.filter(|(of, _)| *of == kind)
        .fold((0, 0), |sum, (_, (sent, received))| (sum.0 + sent, sum.1 + received))
}

#[test]
fn bytes_of_arenas_and_of_programs_are_read_over_the_fabric() {
    let cluster = two_engines();
    let mut total = 0;
    for (key, len) in (0..).zip([8193, 100_000, 1 << 20, (5 << 20) + 3]) {
        let (source, target) = (cluster.filled(0, len, key), cluster.empty(1, len));
        let (sent, received) = cluster.send(0, &source, 1, &target, key);
        done(&received).unwrap();
        assert_contents(&target, key);
        // Memory of the program.
        let source = Buffer::foreign(contents(len, key + 50));
        let target = Buffer::foreign(vec![0; len]);
        let back = cluster.send(1, &source, 0, &target, key + 100);
        done(&back.1).unwrap();
        assert_contents(&target, key + 50);
        done(&sent).unwrap();
        done(&back.0).unwrap();
        total += len as u64;
    }
    for engine in &cluster.engines {
        assert_eq!(moved(engine, TransportKind::Fabric), (total, total));
        let (sent, received) = moved(engine, TransportKind::Tcp);
        assert_eq!(sent + received, 8, "the message that made the connection");
        assert_eq!(engine.counts().fallbacks.load(Ordering::Relaxed), 0);
    }
}

#[test]
fn many_small_buffers_of_one_launch_are_read_as_runs() {
    let cluster = two_engines();
    let sources: Vec<_> = (0..300).map(|seed| cluster.filled(0, 100 + seed as usize, seed)).collect();
    let targets: Vec<_> = sources.iter().map(|source| cluster.empty(1, source.len())).collect();
    for round in 0..5 {
        let specs = |buffers: &[Buffer], way: fn(&Buffer, usize, usize, u64) -> _| {
            (0..).zip(buffers).map(|(key, buffer)| way(buffer, 0, 1, key)).collect()
        };
        let sent = cluster.engines[0].transfer(&[], specs(&sources, outgoing), options_on_channel(round));
        let received = cluster.engines[1].transfer(&[], specs(&targets, incoming), options_on_channel(round));
        done(&received).unwrap();
        done(&sent).unwrap();
        (0..).zip(&targets).for_each(|(seed, target)| assert_contents(target, seed));
        targets.iter().for_each(|target| target.fill(0).unwrap());
    }
    assert!(moved(&cluster.engines[1], TransportKind::Fabric).1 > 0);
}

#[test]
fn more_memory_of_a_program_than_a_peer_is_told_of_is_pushed() {
    let cluster = two_engines();
    let count = 5000;
    let sources: Vec<_> = (0..count).map(|seed| Buffer::foreign(contents(64, seed))).collect();
    let targets: Vec<_> = (0..count).map(|_| Buffer::foreign(vec![0; 64])).collect();
    for round in 0..2 {
        let out = (0..).zip(&sources).map(|(key, buffer)| outgoing(buffer, 0, 1, key)).collect();
        let into = (0..).zip(&targets).map(|(key, buffer)| incoming(buffer, 0, 1, key)).collect();
        let sent = cluster.engines[0].transfer(&[], out, options_on_channel(round));
        let received = cluster.engines[1].transfer(&[], into, options_on_channel(round));
        done(&received).unwrap();
        done(&sent).unwrap();
        (0..).zip(&targets).for_each(|(seed, target)| assert_contents(target, seed));
    }
    assert!(
        cluster.engines[0].links().iter().all(|link| link.reads_over_fabric),
        "the connection is the same"
    );
}

#[test]
fn an_engine_without_the_fabric_and_one_in_another_use_tcp() {
    for other in [None, Some("udp;ofi_rxd".to_owned())] {
        let cluster = Cluster::with(2, |config| {
            over_fabric(config);
            if config.here == member(1, 0) {
                config.fabric.clone_from(&other);
            }
        });
        let (source, target) = (cluster.filled(0, 100_000, 7), cluster.empty(1, 100_000));
        let (sent, received) = cluster.send(0, &source, 1, &target, 1);
        done(&received).unwrap();
        done(&sent).unwrap();
        assert_contents(&target, 7);
        assert_eq!(moved(&cluster.engines[1], TransportKind::Tcp), (0, 100_000), "{other:?}");
    }
}

#[test]
fn a_cancelled_read_leaves_both_sides_free_and_the_connection_as_it_was() {
    let cluster = two_engines();
    for round in 0..40 {
        let len = 24 << 20;
        let (source, target) = (cluster.filled(0, len, round), cluster.empty(1, len));
        let (sent, received) = cluster.send(0, &source, 1, &target, round);
        std::thread::sleep(Duration::from_micros(fastrand::u64(0..4000)));
        let canceller = if round % 2 == 0 { &sent } else { &received };
        let _proof = canceller.cancel("a test");
        let outcomes = [&sent, &received].map(|side| done(side).is_ok());
        // No byte is read or written from here on, on either side.
        eventually("the source is free", || source.fill(0xdd).is_ok());
        if outcomes[1] {
            assert_contents(&target, round);
        }
        eventually("the target is free", || target.fill(0xcc).is_ok());
        std::thread::sleep(Duration::from_millis(1));
        target.look(|bytes| assert!(bytes.iter().all(|byte| *byte == 0xcc))).unwrap();
    }
    let (source, target) = (cluster.filled(0, 1 << 20, 99), cluster.empty(1, 1 << 20));
    let (sent, received) = cluster.send(0, &source, 1, &target, 99);
    done(&received).unwrap();
    done(&sent).unwrap();
    assert_contents(&target, 99);
}

#[test]
fn when_a_side_ends_during_a_read_the_other_has_whole_bytes_or_an_error() {
    for round in 0..12 {
        let mut cluster = two_engines();
        let len = 24 << 20;
        let (source, target) = (cluster.filled(0, len, round), cluster.empty(1, len));
        let (sent, received) = cluster.send(0, &source, 1, &target, 1);
        std::thread::sleep(Duration::from_micros(fastrand::u64(0..20_000)));
        // The one that ends writes its memory at once: its reads have ended.
        let ends = (round % 2) as usize;
        drop(cluster.engines.remove(ends));
        let (mine, theirs) = if ends == 0 { (&sent, &received) } else { (&received, &sent) };
        let own = done(mine);
        if ends == 0 {
            eventually("its memory is free", || source.fill(0xdd).is_ok());
        }
        let other = done(theirs);
        if ends == 0 && other.is_ok() {
            assert_contents(&target, round);
        }
        assert!(own.is_ok() || matches!(own, Err(TransferError::Closed)), "{own:?}");
    }
}

#[test]
fn a_fabric_that_is_not_there_is_an_error_that_names_it() {
    let start = |change: fn(&mut EngineConfig)| {
        let mut config = EngineConfig::new(member(0, 0), vec![device(0)]);
        over_fabric(&mut config);
        change(&mut config);
        TransferEngine::start(config).unwrap_err().to_string()
    };
    let unknown = start(|config| config.fabric = Some("smoke-signals".to_owned()));
    assert!(unknown.contains("smoke-signals"), "{unknown}");
    let with_tls = start(|config| {
        config.tls = Some(PemCertificates { cert: vec![], key: vec![], ca: vec![], name: None });
    });
    assert!(with_tls.contains("a fabric are not encrypted"), "{with_tls}");
}

#[test]
fn launch_options_hold_over_the_fabric() {
    let cluster = two_engines();
    let target = cluster.empty(1, 1 << 20);
    let options = LaunchOptions { deadline: Some(Duration::from_millis(100)), ..LaunchOptions::default() };
    let alone = cluster.engines[1].transfer(&[], vec![incoming(&target, 0, 1, 1)], options);
    assert!(matches!(done(&alone), Err(TransferError::Deadline { .. })));
    eventually("its memory is free", || target.fill(1).is_ok());
}
