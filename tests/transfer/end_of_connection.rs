//! Tests that a thread that waits for one transfer also processes the frames of others, whether or not it spins
//! before it sleeps.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Wake, Waker};
use std::time::{Duration, Instant};

use muster::transfer::{TransferError, TransportChoice};

use crate::cluster::{
    AnyMemory, Cluster, PATIENCE, assert_contents, contents, done, eventually, incoming, options_on_channel,
    outgoing,
};

const CHOICES: [TransportChoice; 4] =
    [TransportChoice::Auto, TransportChoice::Unix, TransportChoice::Tcp, TransportChoice::Loopback];

#[test]
fn a_send_completes_while_a_thread_waits_for_another_transfer() {
    for choice in CHOICES {
        for len in [100, 64 << 10] {
            let cluster = Cluster::new(2, choice);
            let [zero, one] = [&cluster.engines[0], &cluster.engines[1]];
            let sources = [1, 2, 3].map(|seed| cluster.filled(0, len, seed));
            let targets = [1, 2, 3].map(|_| cluster.empty(1, len));
            let (late, last) = (cluster.filled(1, len, 9), cluster.empty(0, len));
            std::thread::scope(|scope| {
                let expected = zero.transfer(&[], vec![incoming(&last, 1, 0, 9)], options_on_channel(9));
                let waits = scope.spawn(move || expected.wait_for(PATIENCE).expect("it comes"));
                for (key, (source, target)) in (0..).zip(sources.iter().zip(&targets)) {
                    let sent = zero.transfer(&[], vec![outgoing(source, 0, 1, key)], options_on_channel(0));
                    done(&one.transfer(&[], vec![incoming(target, 0, 1, key)], options_on_channel(0)))
                        .unwrap();
                    match key {
                        // The outcome of the first is polled, the second is waited for, and of the third the
                        // memory is polled.
                        0 => eventually("it is known", || sent.outcome().is_some()),
                        1 => assert!(done(&sent).is_ok()),
                        _ => eventually("its memory is free", || source.fill(0).is_ok()),
                    }
                    assert_contents(target, key + 1);
                }
                done(&one.transfer(&[], vec![outgoing(&late, 1, 0, 9)], options_on_channel(9))).unwrap();
                waits.join().unwrap().unwrap();
            });
            assert_contents(&last, 9);
        }
    }
}

#[test]
fn to_and_fro_on_several_threads_at_a_time_with_and_without_looking_before_sleep() {
    const THREADS: u32 = 3;
    const ROUNDS: u64 = 400;
    for spin in [Duration::ZERO, Duration::from_micros(1), Duration::from_millis(1)] {
        let cluster = Cluster::with(2, |config| {
            config.transport = TransportChoice::Shm;
            config.spin = spin;
        });
        std::thread::scope(|scope| {
            for (task, thread) in [0, 1].into_iter().flat_map(|task| (0..THREADS).map(move |n| (task, n))) {
                let cluster = &cluster;
                scope.spawn(move || {
                    let other = 1 - task;
                    let len = [8, 4096, 20_000][thread as usize % 3];
                    let (out, back) = (cluster.empty(task, len), cluster.empty(task, len));
                    for round in 0..ROUNDS {
                        let seed = |task: usize| round << 8 | u64::from(thread) << 1 | task as u64;
                        out.change(|bytes| bytes.copy_from_slice(&contents(len, seed(task)))).unwrap();
                        let channel = |from: usize| options_on_channel(2 * thread + from as u32);
                        let expected = cluster.engines[task].transfer(
                            &[],
                            vec![incoming(&back, other, task, 0)],
                            channel(other),
                        );
                        let send = || {
                            let spec = outgoing(&out, task, other, 0);
                            cluster.engines[task].transfer(&[], vec![spec], channel(task))
                        };
                        // One of the two sides answers; that side waits first.
                        if task == 1 {
                            done(&expected).unwrap();
                        }
                        let sent = send();
                        if round % 3 == 0 {
                            done(&sent).unwrap();
                        }
                        done(&expected).unwrap();
                        assert_contents(&back, seed(other));
                        done(&sent).unwrap();
                    }
                });
            }
        });
    }
}

/// A waker that blocks until all others were woken too: it shows that they do not wait for one another.
struct WakeGroup {
    told: Arc<AtomicUsize>,
    of: usize,
    met: AtomicBool,
}

impl Wake for WakeGroup {
    fn wake(self: Arc<Self>) {
        self.told.fetch_add(1, Ordering::SeqCst);
        let until = Instant::now() + PATIENCE;
        while self.told.load(Ordering::SeqCst) < self.of && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.met.store(self.told.load(Ordering::SeqCst) == self.of, Ordering::SeqCst);
    }
}

#[test]
fn a_waiter_woken_for_one_connection_delays_no_other() {
    for choice in CHOICES {
        let cluster = Cluster::new(5, choice);
        let peers = [1, 2, 3, 4];
        let told = Arc::new(AtomicUsize::new(0));
        let waits: Vec<_> = peers
            .into_iter()
            .map(|peer| {
                let target = cluster.empty(0, 1 << 20);
                let transfer = cluster.engines[0].transfer(
                    &[],
                    vec![incoming(&target, peer, 0, 1)],
                    options_on_channel(peer as u32),
                );
                let (told, met) = (Arc::clone(&told), AtomicBool::new(false));
                let wake = Arc::new(WakeGroup { told, of: peers.len(), met });
                let mut future = Box::pin(transfer.clone());
                let waker = Waker::from(Arc::clone(&wake));
                assert!(future.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
                (transfer, wake, future)
            })
            .collect();
        eventually("all are under way", || {
            cluster.engines[0].links().iter().filter(|link| link.launched == 1).count() == peers.len()
        });
        let mut alone = cluster.membership();
        alone.peers.retain(|task, _| task.0 == 0);
        cluster.engines[0].on_membership(alone);
        for (transfer, wake, _future) in waits {
            let error = done(&transfer).unwrap_err();
            assert!(matches!(error, TransferError::StaleIncarnation { .. }), "{error}");
            // The error may be seen before the waker has returned.
            eventually(&format!("{choice:?}: no waiter is delayed by another"), || {
                wake.met.load(Ordering::SeqCst)
            });
        }
    }
}

#[test]
fn bytes_acknowledged_before_a_peer_exit_count_as_delivered() {
    for round in 0..64 {
        let cluster = Cluster::with(2, |config| config.transport = TransportChoice::Shm);
        let [zero, one] = [&cluster.engines[0], &cluster.engines[1]];
        let len = [100, 40_000][round % 2];
        let (source, target) = (cluster.filled(0, len, 1), cluster.empty(1, len));
        let never = cluster.empty(0, 100);
        if round % 4 < 3 {
            // Otherwise the connection has just been made.
            let (sent, received) = cluster.send(0, &source, 1, &target, 0);
            done(&sent).unwrap();
            done(&received).unwrap();
        }
        let expected = zero.transfer(&[], vec![incoming(&never, 1, 0, 9)], options_on_channel(9));
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| done(&expected));
            let sent = zero.transfer(&[], vec![outgoing(&source, 0, 1, 1)], options_on_channel(0));
            done(&one.transfer(&[], vec![incoming(&target, 0, 1, 1)], options_on_channel(0))).unwrap();
            one.shutdown();
            assert_eq!(done(&sent).err(), None, "it has arrived, in round {round}");
            waits.join().unwrap().unwrap_err();
        });
    }
}

#[test]
fn a_wait_with_an_expired_deadline_does_not_spin() {
    let cluster = Cluster::with(2, |config| {
        config.transport = TransportChoice::Shm;
        config.spin = Duration::from_secs(3600);
    });
    let targets = [cluster.empty(0, 100), cluster.empty(0, 100)];
    let transfers = [0, 1].map(|channel| {
        cluster.engines[0].transfer(
            &[],
            vec![incoming(&targets[channel], 1, 0, 1)],
            options_on_channel(channel as u32),
        )
    });
    eventually("there is a connection", || cluster.engines[0].links().len() == 1);
    let began = Instant::now();
    for time in [0, 1, 20] {
        assert!(transfers[0].wait_for(Duration::from_millis(time)).is_none());
    }
    assert!(began.elapsed() < PATIENCE);
    // The time limit also holds while other transfers keep the thread busy.
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (over, cluster) = (&over, &cluster);
        scope.spawn(move || {
            let (source, target) = (cluster.filled(1, 100, 1), cluster.empty(0, 100));
            while !over.load(Ordering::SeqCst) {
                let sent =
                    cluster.engines[1].transfer(&[], vec![outgoing(&source, 1, 0, 2)], options_on_channel(2));
                done(&cluster.engines[0].transfer(
                    &[],
                    vec![incoming(&target, 1, 0, 2)],
                    options_on_channel(2),
                ))
                .unwrap();
                done(&sent).unwrap();
            }
        });
        let began = Instant::now();
        for _ in 0..20 {
            assert!(transfers[1].wait_for(Duration::from_millis(5)).is_none());
        }
        assert!(began.elapsed() < PATIENCE);
        over.store(true, Ordering::SeqCst);
    });
    for transfer in transfers {
        transfer.cancel("enough").wait();
    }
}
