//! Tests that errors in a request are reported before any byte moves, and that a disagreement is reported to both
//! sides.

use muster::transfer::{
    Buffer, BufferLayout, DeviceId, LaunchOptions, LayoutFingerprint, MemoryError, PrepareError,
    TransferError, TransferKey, TransferSpec, TransportChoice,
};

use crate::cluster::{AnyMemory, Cluster, assert_contents, device, done, eventually, incoming, outgoing};

fn refusal(cluster: &Cluster, specs: Vec<TransferSpec>) -> PrepareError {
    cluster.engines[0].prepare(specs, LaunchOptions::default()).wait().map(|_| ()).unwrap_err()
}

#[test]
fn every_wrong_request_has_its_own_error() {
    let cluster = Cluster::new(2, TransportChoice::Auto);
    let buffer = cluster.empty(0, 100);
    let (near, far, key) = (device(0), device(1), TransferKey(3));
    let send = |span| TransferSpec::send(span, near, far, key);
    assert_eq!(refusal(&cluster, Vec::new()), PrepareError::Empty);
    // A request that names nothing fails as any other that is refused, and moves nothing.
    for launched in [
        cluster.engines[0].transfer(&[], Vec::new(), LaunchOptions::default()),
        cluster.engines[0].batch(LaunchOptions::default()).launch(&[]),
    ] {
        assert_eq!(done(&launched), Err(TransferError::Prepare(Box::new(PrepareError::Empty))));
        launched.cancel("it is over already").wait();
    }
    let nowhere = DeviceId(77);
    assert_eq!(
        refusal(&cluster, vec![TransferSpec::send(buffer.full_span(), near, nowhere, key)]),
        PrepareError::UnknownDevice(nowhere)
    );
    assert_eq!(
        refusal(&cluster, vec![TransferSpec::receive(buffer.full_span(), near, far, key)]),
        PrepareError::NotAddressable {
            device: far,
            owner: muster::transfer::TaskId(1),
            here: muster::transfer::TaskId(0)
        }
    );
    assert_eq!(
        refusal(&cluster, vec![TransferSpec::send(buffer.full_span(), near, near, key)]),
        PrepareError::SameTask { key, source_device: near, destination: near, named: "send" }
    );
    let (low, high) = (buffer.range(0..60).unwrap(), buffer.range(50..100).unwrap());
    assert_eq!(
        refusal(&cluster, vec![send(low.clone()), send(high.clone())]),
        PrepareError::DuplicateKey { key, source_device: near, destination: far }
    );
    let receive = |span, key| TransferSpec::receive(span, far, near, TransferKey(key));
    assert_eq!(
        refusal(&cluster, vec![receive(low.clone(), 1), receive(high.clone(), 2)]),
        PrepareError::Overlap { key: TransferKey(2), start: 50, end: 100 }
    );
    assert_eq!(
        refusal(&cluster, vec![send(low.clone()), receive(high, 2)]),
        PrepareError::Overlap { key, start: 0, end: 60 }
    );
    assert_eq!(
        refusal(
            &cluster,
            vec![send(low.clone()).with_layout(BufferLayout::array("f32", 4, &[16], "").unwrap())]
        ),
        PrepareError::WrongSize { key, layout: 64, buffer: 60 }
    );
    assert!(matches!(buffer.range(90..101), Err(MemoryError::OutOfRange { start: 90, end: 101, len: 100 })));
    assert!(BufferLayout::array("f64", 8, &[u64::MAX, 2], "").is_none());
    assert_eq!(
        cluster.engines[0].cross_host_send(std::slice::from_ref(&low), &[far], &[]).map(|_| ()).unwrap_err(),
        PrepareError::Uneven { buffers: 1, devices: 1, keys: 0 }
    );
    let many =
        (0..=65_536).map(|key| TransferSpec::send(buffer.range(0..0).unwrap(), near, far, TransferKey(key)));
    assert_eq!(refusal(&cluster, many.collect()), PrepareError::TooMany { given: 65_537, bound: 65_536 });
    cluster.engines[0].shutdown();
    assert_eq!(refusal(&cluster, vec![send(low)]), PrepareError::Closed);
    assert_eq!(LayoutFingerprint::hash_of_parts(&[b"a"]), LayoutFingerprint::hash_of_parts(&[b"a"]));
}

#[test]
fn buffers_are_sent_and_received_by_devices_and_keys() {
    for choice in [TransportChoice::Auto, TransportChoice::Tcp] {
        let cluster = Cluster::of_devices(3, 2, |config| config.transport = choice);
        // From the first device of task 1 to a device of task 0 and a device of task 2.
        let lengths = [5000, 300_000, 0];
        let keys = [TransferKey(7), TransferKey(8), TransferKey(9)];
        let to = [DeviceId(1), DeviceId(4), DeviceId(1)];
        let sources: Vec<_> =
            lengths.iter().zip(0..).map(|(len, seed)| cluster.filled(1, *len, seed)).collect();
        let spans: Vec<_> = sources.iter().map(Buffer::full_span).collect();
        let sent = cluster.engines[1].cross_host_send(&spans, &to, &keys).unwrap();
        let receive = |task: usize, device: u32, which: &[usize]| {
            let layouts: Vec<_> = which.iter().map(|at| BufferLayout::bytes(lengths[*at])).collect();
            let keys: Vec<_> = which.iter().map(|at| keys[*at]).collect();
            let from = vec![DeviceId(2); which.len()];
            let (engine, arena) = (&cluster.engines[task], &cluster.arenas[task]);
            engine.cross_host_receive(arena, DeviceId(device), &layouts, &from, &keys).unwrap()
        };
        let (first, received) = receive(0, 1, &[0, 2]);
        let (second, received_too) = receive(2, 4, &[1]);
        assert_eq!(done(&received).map(|stats| stats.received), Ok(5000), "{choice:?}");
        assert_eq!(done(&received_too).map(|stats| stats.received), Ok(300_000), "{choice:?}");
        assert_eq!(done(&sent).map(|stats| stats.sent), Ok(305_000), "{choice:?}");
        for (buffer, seed) in [(&first[0], 0), (&second[0], 1), (&first[1], 2)] {
            assert_contents(buffer, seed);
        }
        // A full arena is reported before any peer is contacted.
        let small = muster::transfer::Arena::new(4096).unwrap();
        let full = cluster.engines[0].cross_host_receive(
            &small,
            DeviceId(1),
            &[BufferLayout::bytes(8192)],
            &[DeviceId(2)],
            &[keys[0]],
        );
        assert!(matches!(full, Err(PrepareError::Memory(MemoryError::Full { wanted: 8192, .. }))));
    }
}

#[test]
fn a_task_without_devices_is_refused_by_number() {
    let cluster = Cluster::with(2, |config| {
        if config.here.task.0 == 0 {
            config.devices = Vec::new();
        }
    });
    let buffer = cluster.empty(0, 100);
    let error = cluster.engines[0]
        .cross_host_send(&[buffer.full_span()], &[device(1)], &[TransferKey(1)])
        .unwrap_err();
    assert_eq!(error, PrepareError::NoDevice { here: muster::transfer::TaskId(0) });
    assert!(error.to_string().contains("task 0"), "{error}");
    assert!(matches!(
        refusal(
            &cluster,
            vec![TransferSpec::send(buffer.full_span(), DeviceId(40), device(1), TransferKey(1))]
        ),
        PrepareError::UnknownDevice(DeviceId(40))
    ));
    let foreign = cluster.engines[0].cross_host_receive(
        &cluster.arenas[0],
        device(1),
        &[BufferLayout::bytes(10)],
        &[device(1)],
        &[TransferKey(1)],
    );
    let (_, received) = foreign.unwrap();
    let error = done(&received).unwrap_err();
    assert!(
        matches!(&error, TransferError::Prepare(why) if matches!(**why, PrepareError::NotAddressable { device, .. } if device.0 == 1)),
        "{error}"
    );
}

#[test]
fn a_batch_leaves_as_one_group_for_each_peer() {
    for choice in [TransportChoice::Auto, TransportChoice::Tcp] {
        let cluster = Cluster::new(3, choice);
        let mut batches: Vec<_> =
            cluster.engines.iter().map(|engine| engine.batch(LaunchOptions::default())).collect();
        let mut targets = Vec::new();
        for key in 0..40u64 {
            let to = 1 + key as usize % 2;
            let len = 1000 * key as usize;
            let (source, target) = (cluster.filled(0, len, key), cluster.empty(to, len));
            assert_eq!(batches[0].add(outgoing(&source, 0, to, key)), key as usize);
            assert_eq!(batches[to].add(incoming(&target, 0, to, key)), key as usize / 2);
            targets.push((target, key));
        }
        let launched: Vec<_> = batches.into_iter().map(|batch| batch.launch(&[])).collect();
        for transfer in &launched {
            done(transfer).unwrap();
        }
        assert_eq!(
            launched.iter().map(muster::transfer::TransferHandle::len).collect::<Vec<_>>(),
            [40, 20, 20]
        );
        assert!((0..40).all(|number| launched[0].outcome_of(number) == Some(Ok(()))));
        targets.iter().for_each(|(target, key)| assert_contents(target, *key));
        for engine in &cluster.engines {
            let completed = engine.launch_metrics().outcome_counts().find(|(name, _)| *name == "completed");
            assert_eq!(completed, Some(("completed", 1)), "one launch a task");
        }
        // The next launch is in step with each peer, because each group took one number.
        for to in [1, 2] {
            let (source, target) = (cluster.filled(0, 100, 3), cluster.empty(to, 100));
            let (sent, received) = cluster.send(0, &source, to, &target, 99);
            assert_eq!((done(&sent).err(), done(&received).err()), (None, None));
        }
    }
}

#[test]
fn launches_beyond_the_bound_fail_on_both_sides() {
    const BOUND: usize = 4096;
    let cluster = Cluster::new(2, TransportChoice::Auto);
    let (source, target) = (cluster.filled(0, 100, 1), cluster.empty(1, 100));
    let prepare = |task: usize, spec| {
        cluster.engines[task].prepare(vec![spec], LaunchOptions::default()).wait().unwrap()
    };
    let mut sending = prepare(0, outgoing(&source, 0, 1, 1));
    let under_way: Vec<_> = (0..BOUND).map(|_| sending.launch(&[])).collect();
    let error = done(&sending.launch(&[])).unwrap_err();
    assert_eq!(error, TransferError::Overloaded { member: cluster.engines[1].here(), bound: BOUND });
    assert!(under_way.iter().all(|transfer| transfer.outcome().is_none()));
    // No launch in flight is lost, and the refused one is reported in its turn.
    let mut receiving = prepare(1, incoming(&target, 0, 1, 1));
    for (number, sent) in under_way.iter().enumerate() {
        done(&receiving.launch(&[])).unwrap_or_else(|error| panic!("number {number}: {error}"));
        done(sent).unwrap();
    }
    let told = done(&receiving.launch(&[])).unwrap_err();
    assert!(
        matches!(&told, TransferError::Cancelled { by, reason } if by.task.0 == 0 && reason.contains("too many")),
        "{told}"
    );
    let (received, sent) = (receiving.launch(&[]), sending.launch(&[]));
    assert_eq!((done(&received).err(), done(&sent).err()), (None, None));
    assert_contents(&target, 1);
}

#[test]
fn many_who_prepare_at_once_make_one_connection() {
    for choice in [TransportChoice::Auto, TransportChoice::Tcp] {
        const MANY: usize = 48;
        let cluster = Cluster::new(2, choice);
        let source = cluster.filled(0, 1000, 1);
        let start = std::sync::Barrier::new(MANY);
        let prepared: Vec<_> = std::thread::scope(|scope| {
            let prepare = |key: usize| {
                let (cluster, source, start) = (&cluster, &source, &start);
                scope.spawn(move || {
                    start.wait();
                    let specs = vec![outgoing(source, 0, 1, key as u64)];
                    cluster.engines[0].prepare(specs, LaunchOptions::default()).wait().unwrap()
                })
            };
            let preparing: Vec<_> = (0..MANY).map(prepare).collect();
            preparing.into_iter().map(|preparing| preparing.join().unwrap()).collect()
        });
        let (cliques, hits, misses, evictions) = cluster.engines[0].clique_cache_stats();
        assert_eq!((cliques, misses, evictions), (1, 1, 0), "{choice:?}");
        // All requests but the one that made it: those that waited for it count as hits, too.
        assert_eq!(hits, MANY as u64 - 1, "{choice:?}");
        // The side that was dialled has its end a moment later.
        eventually("each side has one link", || {
            cluster.engines.iter().all(|engine| engine.links().len() == 1)
        });
        drop(prepared);
    }
}

#[test]
fn sends_may_share_bytes_and_a_buffer_in_use_is_busy() {
    let cluster = Cluster::new(2, TransportChoice::Tcp);
    let source = cluster.filled(0, 5000, 1);
    let targets = [cluster.empty(1, 5000), cluster.empty(1, 5000)];
    let sends = vec![outgoing(&source, 0, 1, 1), outgoing(&source, 0, 1, 2)];
    let sent = cluster.engines[0].prepare(sends, LaunchOptions::default()).wait().unwrap().launch(&[]);
    assert!(source.look(|_| ()).is_ok());
    assert!(matches!(source.fill(0), Err(MemoryError::Busy { .. })));
    let again = cluster.engines[0].transfer(
        &[],
        vec![incoming(&source, 1, 0, 9)],
        LaunchOptions { channel: 1, ..LaunchOptions::default() },
    );
    assert!(matches!(done(&again), Err(TransferError::Memory(MemoryError::Busy { .. }))));
    let receives = targets.iter().zip(1..).map(|(target, key)| incoming(target, 0, 1, key)).collect();
    let received = cluster.engines[1].transfer(&[], receives, LaunchOptions::default());
    done(&received).unwrap();
    done(&sent).unwrap();
    for target in &targets {
        assert_contents(target, 1);
    }
    source.fill(0).unwrap();
}

#[test]
fn mismatched_layouts_and_orders_fail_on_both_sides() {
    for choice in [TransportChoice::Auto, TransportChoice::Tcp, TransportChoice::Loopback] {
        let cluster = Cluster::new(2, choice);
        let (source, target) = (cluster.filled(0, 400, 1), cluster.empty(1, 400));
        let layout = |shape: &[u64]| BufferLayout::array("f32", 4, shape, "").unwrap();
        let sending = outgoing(&source, 0, 1, 8).with_layout(layout(&[10, 10]));
        let receiving = incoming(&target, 0, 1, 8).with_layout(layout(&[100]));
        let sent = cluster.engines[0].transfer(&[], vec![sending], LaunchOptions::default());
        let received = cluster.engines[1].transfer(&[], vec![receiving], LaunchOptions::default());
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
                cluster.engines[0].transfer(&[], vec![outgoing(buffer, 0, 1, key)], LaunchOptions::default())
            })
            .into();
        let receives: Vec<_> = [(&d, 22), (&c, 21)]
            .map(|(buffer, key)| {
                cluster.engines[1].transfer(&[], vec![incoming(buffer, 0, 1, key)], LaunchOptions::default())
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
            buffer.look(|bytes| assert!(bytes.iter().all(|byte| *byte == 0xee))).unwrap();
        }
        // The connection goes on.
        let (sent, received) = cluster.send(0, &a, 1, &c, 30);
        assert_eq!((done(&sent).err(), done(&received).err()), (None, None));
        assert_contents(&c, 1);
    }
}

#[test]
fn arena_and_other_memory_mix_in_one_request() {
    for choice in [TransportChoice::Auto, TransportChoice::Shm, TransportChoice::Pvm] {
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
            let sent = cluster.engines[0].transfer(&[], sends, LaunchOptions::default());
            let received = cluster.engines[1].transfer(&[], receives, LaunchOptions::default());
            assert_eq!((done(&sent).err(), done(&received).err()), (None, None), "{choice:?}");
            for (target, seed) in targets.iter().zip(0..) {
                assert_contents(target, seed);
            }
        }
    }
}

#[test]
fn finished_transfers_leave_no_state() {
    for choice in [TransportChoice::Auto, TransportChoice::Tcp, TransportChoice::Loopback] {
        let cluster = Cluster::new(2, choice);
        for round in 0..20 {
            let (source, target) = (cluster.filled(0, 100_000, round), cluster.empty(1, 100_000));
            let (sent, received) = cluster.send(0, &source, 1, &target, round);
            done(&received).unwrap();
            done(&sent).unwrap();
        }
        eventually("the buffers are given back", || {
            cluster.arenas.iter().all(|arena| arena.free_bytes() == arena.size())
        });
    }
}
