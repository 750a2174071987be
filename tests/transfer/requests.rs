//! What is wrong with a request is said before anything moves, and what two sides disagree on is told to both.

use muster::transfer::{
    Buffer, Choice, DeviceId, Fingerprint, Layout, MemoryError, Options, PrepareError, Spec, TransferError,
    TransferKey,
};

use crate::cluster::{Cluster, assert_contents, device, done, incoming, outgoing};

fn refusal(cluster: &Cluster, specs: Vec<Spec>) -> PrepareError {
    cluster.engines[0].prepare(specs, Options::default()).wait().map(|_| ()).unwrap_err()
}

#[test]
fn every_wrong_request_has_its_own_error() {
    let cluster = Cluster::new(2, Choice::Auto);
    let buffer = cluster.empty(0, 100);
    let (near, far, key) = (device(0), device(1), TransferKey(3));
    let send = |span| Spec::send(span, near, far, key);
    assert_eq!(refusal(&cluster, Vec::new()), PrepareError::Empty);
    let nowhere = DeviceId(77);
    assert_eq!(
        refusal(&cluster, vec![Spec::send(buffer.span(), near, nowhere, key)]),
        PrepareError::UnknownDevice(nowhere)
    );
    assert_eq!(
        refusal(&cluster, vec![Spec::receive(buffer.span(), near, far, key)]),
        PrepareError::NotAddressable {
            device: far,
            owner: muster::transfer::TaskId(1),
            here: muster::transfer::TaskId(0)
        }
    );
    assert_eq!(
        refusal(&cluster, vec![Spec::send(buffer.span(), near, near, key)]),
        PrepareError::SameTask(near, near)
    );
    let (low, high) = (buffer.range(0..60).unwrap(), buffer.range(50..100).unwrap());
    assert_eq!(
        refusal(&cluster, vec![send(low.clone()), send(high.clone())]),
        PrepareError::DuplicateKey { key, source_device: near, destination: far }
    );
    let receive = |span, key| Spec::receive(span, far, near, TransferKey(key));
    assert_eq!(
        refusal(&cluster, vec![receive(low.clone(), 1), receive(high.clone(), 2)]),
        PrepareError::Overlap { key: TransferKey(2), start: 50, end: 100 }
    );
    assert_eq!(
        refusal(&cluster, vec![send(low.clone()), receive(high, 2)]),
        PrepareError::Overlap { key, start: 0, end: 60 }
    );
    assert_eq!(
        refusal(&cluster, vec![send(low.clone()).with_layout(Layout::array("f32", 4, &[16], "").unwrap())]),
        PrepareError::WrongSize { key, layout: 64, buffer: 60 }
    );
    assert!(matches!(buffer.range(90..101), Err(MemoryError::OutOfRange { start: 90, end: 101, len: 100 })));
    assert!(Layout::array("f64", 8, &[u64::MAX, 2], "").is_none());
    assert_eq!(
        cluster.engines[0].cross_host_send(std::slice::from_ref(&low), &[far], &[]).map(|_| ()).unwrap_err(),
        PrepareError::Uneven { buffers: 1, devices: 1, keys: 0 }
    );
    let many = (0..=65_536).map(|key| Spec::send(buffer.range(0..0).unwrap(), near, far, TransferKey(key)));
    assert_eq!(refusal(&cluster, many.collect()), PrepareError::TooMany { given: 65_537, bound: 65_536 });
    cluster.engines[0].shutdown();
    assert_eq!(refusal(&cluster, vec![send(low)]), PrepareError::Closed);
    assert_eq!(Fingerprint::of(&[b"a"]), Fingerprint::of(&[b"a"]));
}

#[test]
fn sends_may_share_bytes_and_a_buffer_in_use_is_busy() {
    let cluster = Cluster::new(2, Choice::Tcp);
    let source = cluster.filled(0, 5000, 1);
    let targets = [cluster.empty(1, 5000), cluster.empty(1, 5000)];
    let sends = vec![outgoing(&source, 0, 1, 1), outgoing(&source, 0, 1, 2)];
    let sent = cluster.engines[0].prepare(sends, Options::default()).wait().unwrap().launch(&[]);
    assert!(source.read(|_| ()).is_ok());
    assert!(matches!(source.fill(0), Err(MemoryError::Busy { .. })));
    let again = cluster.engines[0].transfer(
        &[],
        vec![incoming(&source, 1, 0, 9)],
        Options { channel: 1, ..Options::default() },
    );
    assert!(matches!(done(&again), Err(TransferError::Memory(MemoryError::Busy { .. }))));
    let receives = targets.iter().zip(1..).map(|(target, key)| incoming(target, 0, 1, key)).collect();
    let received = cluster.engines[1].transfer(&[], receives, Options::default());
    done(&received).unwrap();
    done(&sent).unwrap();
    for target in &targets {
        assert_contents(target, 1);
    }
    source.fill(0).unwrap();
}

#[test]
fn different_layouts_and_different_orders_are_told_to_both_sides() {
    for choice in [Choice::Auto, Choice::Tcp, Choice::Loopback] {
        let cluster = Cluster::new(2, choice);
        let (source, target) = (cluster.filled(0, 400, 1), cluster.empty(1, 400));
        let layout = |shape: &[u64]| Layout::array("f32", 4, shape, "").unwrap();
        let sending = outgoing(&source, 0, 1, 8).with_layout(layout(&[10, 10]));
        let receiving = incoming(&target, 0, 1, 8).with_layout(layout(&[100]));
        let sent = cluster.engines[0].transfer(&[], vec![sending], Options::default());
        let received = cluster.engines[1].transfer(&[], vec![receiving], Options::default());
        let (flat, square) =
            (layout(&[100]).fingerprint().to_string(), layout(&[10, 10]).fingerprint().to_string());
        for (transfer, mine, theirs) in [(sent, &square, &flat), (received, &flat, &square)] {
            let Err(TransferError::LayoutMismatch { key, here, there }) = done(&transfer) else {
                panic!("{transfer:?}");
            };
            assert_eq!(key, TransferKey(8));
            assert!(here.contains(mine) && there.contains(theirs), "{here} {there}");
        }
        let (a, b) = (cluster.filled(0, 10, 1), cluster.filled(0, 10, 2));
        let (c, d) = (cluster.empty(1, 10), cluster.empty(1, 10));
        let sends: Vec<_> = [(&a, 21), (&b, 22)]
            .map(|(buffer, key)| {
                cluster.engines[0].transfer(&[], vec![outgoing(buffer, 0, 1, key)], Options::default())
            })
            .into();
        let receives: Vec<_> = [(&d, 22), (&c, 21)]
            .map(|(buffer, key)| {
                cluster.engines[1].transfer(&[], vec![incoming(buffer, 0, 1, key)], Options::default())
            })
            .into();
        for (transfer, mine, theirs) in
            [(&sends[0], 21, 22), (&sends[1], 22, 21), (&receives[0], 22, 21), (&receives[1], 21, 22)]
        {
            let Err(TransferError::OrderMismatch { here, there, .. }) = done(transfer) else {
                panic!("{transfer:?}");
            };
            let [mine, theirs] = [mine, theirs].map(|key| TransferKey(key).to_string());
            assert!(here.contains(&mine) && there.contains(&theirs), "{here} {there}");
        }
        for buffer in [&target, &c, &d] {
            buffer.read(|bytes| assert!(bytes.iter().all(|byte| *byte == 0xee))).unwrap();
        }
        // The link goes on.
        let (sent, received) = cluster.send(0, &a, 1, &c, 30);
        assert_eq!((done(&sent).err(), done(&received).err()), (None, None));
        assert_contents(&c, 1);
    }
}

#[test]
fn arena_and_other_memory_mix_in_one_request() {
    for choice in [Choice::Auto, Choice::Shm, Choice::Pvm] {
        let cluster = Cluster::new(2, choice);
        for round in 0..10 {
            let len = 1 << 20;
            let sources: Vec<_> = (0..4)
                .map(|n| {
                    let contents = crate::cluster::contents(len, n);
                    if (n + round) % 2 == 0 { cluster.filled(0, len, n) } else { Buffer::foreign(contents) }
                })
                .collect();
            let targets: Vec<_> = (0..4).map(|_| cluster.empty(1, len)).collect();
            let sends = sources.iter().zip(0..).map(|(source, key)| outgoing(source, 0, 1, key)).collect();
            let receives = targets.iter().zip(0..).map(|(target, key)| incoming(target, 0, 1, key)).collect();
            let sent = cluster.engines[0].transfer(&[], sends, Options::default());
            let received = cluster.engines[1].transfer(&[], receives, Options::default());
            assert_eq!((done(&sent).err(), done(&received).err()), (None, None), "{choice:?}");
            for (target, seed) in targets.iter().zip(0..) {
                assert_contents(target, seed);
            }
        }
    }
}

#[test]
fn what_is_over_leaves_nothing_behind() {
    for choice in [Choice::Auto, Choice::Tcp, Choice::Loopback] {
        let cluster = Cluster::new(2, choice);
        for round in 0..20 {
            let (source, target) = (cluster.filled(0, 100_000, round), cluster.empty(1, 100_000));
            let (sent, received) = cluster.send(0, &source, 1, &target, round);
            done(&received).unwrap();
            done(&sent).unwrap();
        }
        crate::cluster::eventually("the buffers are given back", || {
            cluster.arenas.iter().all(|arena| arena.free() == arena.size())
        });
    }
}
