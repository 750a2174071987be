//! Tests that the received bytes equal the sent bytes, on every path.

use muster::transfer::{LaunchOptions, TransportChoice};

use crate::cluster::{AnyMemory, Cluster, assert_contents, done, incoming, outgoing};

pub const CHOICES: [TransportChoice; 6] = [
    TransportChoice::Auto,
    TransportChoice::Shm,
    TransportChoice::Pvm,
    TransportChoice::Unix,
    TransportChoice::Tcp,
    TransportChoice::Loopback,
];

#[test]
fn every_size_arrives_whole_on_every_transport() {
    for choice in CHOICES {
        let cluster = Cluster::new(2, choice);
        for (n, len) in [0, 1, 63, 4096, 8192, 8193, 65_537, 1 << 20, (3 << 20) + 5].into_iter().enumerate() {
            let key = n as u64;
            let source = cluster.filled(0, len, key);
            let target = cluster.empty(1, len);
            let (sent, received) = cluster.send(0, &source, 1, &target, key);
            assert_eq!(done(&received).map(|stats| stats.received), Ok(len as u64), "{choice:?} {len}");
            assert_eq!(done(&sent).map(|stats| stats.sent), Ok(len as u64), "{choice:?} {len}");
            assert_contents(&target, key);
        }
    }
}

#[test]
fn both_directions_at_once_of_many_buffers_at_odd_offsets() {
    for choice in CHOICES {
        let cluster = Cluster::new(2, choice);
        let mut requests = [Vec::new(), Vec::new()];
        let mut targets = Vec::new();
        for key in 0..200u64 {
            let len = (key as usize * 7919) % 50_000;
            let (from, to) = if key % 3 == 0 { (1, 0) } else { (0, 1) };
            let (offset, tail) = (key as usize % 7, key as usize % 5);
            let source = cluster.filled(from, offset + len + tail, key);
            let target = cluster.empty(to, offset + len + tail);
            let wanted = source.look(|bytes| bytes[offset..offset + len].to_vec()).unwrap();
            let (a, b) =
                (source.range(offset..offset + len).unwrap(), target.range(offset..offset + len).unwrap());
            let (near, far) = (crate::cluster::device(from), crate::cluster::device(to));
            let key = muster::transfer::TransferKey(key);
            requests[from].push(muster::transfer::TransferSpec::send(a, near, far, key));
            requests[to].push(muster::transfer::TransferSpec::receive(b, near, far, key));
            targets.push((target, offset, wanted));
        }
        // The order of the requests does not matter.
        requests[1].reverse();
        let [first, second] = requests;
        let here = cluster.engines[0].transfer(&[], first, LaunchOptions::default());
        let there = cluster.engines[1].transfer(&[], second, LaunchOptions::default());
        assert_eq!((done(&here).err(), done(&there).err()), (None, None), "{choice:?}");
        for (target, offset, wanted) in targets {
            target
                .look(|bytes| {
                    assert_eq!(&bytes[offset..offset + wanted.len()], wanted);
                    assert!(
                        bytes[..offset]
                            .iter()
                            .chain(&bytes[offset + wanted.len()..])
                            .all(|byte| *byte == 0xee)
                    );
                })
                .unwrap();
        }
    }
}

#[test]
fn eight_tasks_all_send_to_all() {
    for choice in [TransportChoice::Auto, TransportChoice::Tcp, TransportChoice::Loopback] {
        let cluster = Cluster::new(8, choice);
        let len = 100_003;
        let mut requests: Vec<_> = (0..8).map(|_| Vec::new()).collect();
        let mut targets = Vec::new();
        for from in 0..8 {
            for to in (0..8).filter(|to| *to != from) {
                let key = (from * 8 + to) as u64;
                let (source, target) = (cluster.filled(from, len, key), cluster.empty(to, len));
                requests[from].push(outgoing(&source, from, to, key));
                requests[to].push(incoming(&target, from, to, key));
                targets.push((target, key));
            }
        }
        let running: Vec<_> = requests
            .into_iter()
            .zip(&cluster.engines)
            .map(|(specs, engine)| engine.transfer(&[], specs, LaunchOptions::default()))
            .collect();
        for transfer in running {
            assert_eq!(done(&transfer).map(|stats| stats.received), Ok(7 * len as u64), "{choice:?}");
        }
        for (target, key) in targets {
            assert_contents(&target, key);
        }
    }
}

#[test]
fn a_prepared_transfer_is_launched_again_and_again() {
    for choice in CHOICES {
        let cluster = Cluster::new(2, choice);
        let (source, target) = (cluster.empty(0, 20_000), cluster.empty(1, 20_000));
        let mut sending = cluster.engines[0]
            .prepare(vec![outgoing(&source, 0, 1, 5)], LaunchOptions::default())
            .wait()
            .unwrap();
        let mut receiving = cluster.engines[1]
            .prepare(vec![incoming(&target, 0, 1, 5)], LaunchOptions::default())
            .wait()
            .unwrap();
        for round in 0..100 {
            source.fill(round).unwrap();
            let received = receiving.launch(&[]);
            let sent = sending.launch(&[]);
            done(&received).unwrap();
            done(&sent).unwrap();
            target
                .look(|bytes| assert!(bytes.iter().all(|byte| *byte == round), "{choice:?} {round}"))
                .unwrap();
        }
    }
}
