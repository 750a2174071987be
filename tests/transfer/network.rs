//! Tests over a network that resets, truncates, delays, throttles, corrupts and stops. Either the bytes arrive
//! complete, or the transfer fails with a specific error.

use std::net::{SocketAddr, TcpListener};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use muster::transfer::{
    EngineConfig, FaultInjector, LaunchOptions, PriorityClass, TransferError, TransportChoice,
};

use crate::cluster::{
    AnyMemory, Cluster, PATIENCE, assert_contents, done, eventually, incoming, member, outgoing,
};

/// The transports whose wires may be lost while both ends live.
const BREAKING: [TransportChoice; 2] = [TransportChoice::Tcp, TransportChoice::Loopback];
/// All transports that the tests inject faults into.
const WIRES: [TransportChoice; 3] = [TransportChoice::Tcp, TransportChoice::Loopback, TransportChoice::Unix];

/// Starts two engines with fault injection. Returns the handle of each.
pub fn with_faults(
    choice: TransportChoice,
    setting: impl Fn(&mut EngineConfig),
) -> (Cluster, [FaultInjector; 2]) {
    let faults = [FaultInjector::new(1), FaultInjector::new(2)];
    let cluster = Cluster::with(2, |config| {
        config.transport = choice;
        config.lanes = 3;
        config.faults = Some(faults[config.here.task.0 as usize].clone());
        setting(config);
    });
    (cluster, faults)
}

/// Moves `len` bytes while `harm` runs. Returns the outcomes of both sides.
pub fn transfer_while(
    cluster: &Cluster,
    len: usize,
    key: u64,
    harm: impl FnOnce(),
) -> (Option<TransferError>, Option<TransferError>) {
    let (source, target) = (cluster.filled(0, len, key), cluster.empty(1, len));
    // A channel of its own: one side may launch on a connection that fails, and the other on the next one.
    // Then that one waits for a launch that does not come, and is cancelled.
    let options = LaunchOptions { channel: key as u32, ..LaunchOptions::default() };
    let sent = cluster.engines[0].transfer(&[], vec![outgoing(&source, 0, 1, key)], options);
    let received = cluster.engines[1].transfer(&[], vec![incoming(&target, 0, 1, key)], options);
    harm();
    for (one, other) in [(&sent, &received), (&received, &sent)] {
        if other.wait_for(PATIENCE / 2).is_some_and(|outcome| outcome.is_err()) && one.outcome().is_none() {
            let given_up = one.wait_for(Duration::from_secs(1)).is_some()
                || one.cancel("the other side failed").wait_for(PATIENCE);
            assert!(given_up);
        }
    }
    let outcomes = (done(&sent).err(), done(&received).err());
    if outcomes.1.is_none() {
        assert_contents(&target, key);
    }
    outcomes
}

#[test]
fn lanes_that_are_reset_are_made_anew_and_nothing_is_lost() {
    for choice in BREAKING {
        let (cluster, faults) = with_faults(choice, |_| ());
        let mut random = fastrand::Rng::with_seed(3);
        let mut reset = 0;
        // A connection that is lost while it is being made is another case.
        assert_eq!(transfer_while(&cluster, 1000, 1000, || ()), (None, None));
        for round in 0..40u64 {
            let outcomes = transfer_while(&cluster, 12 << 20, round, || {
                std::thread::sleep(Duration::from_micros(random.u64(0..12_000)));
                let all = round % 4 == 3;
                let one = random.usize(0..4);
                reset += faults.iter().map(|faults| faults.reset(|at| all || at == one)).sum::<usize>();
            });
            assert_eq!(outcomes, (None, None), "{choice:?} round {round}");
        }
        let counts = cluster.engines[0].counts();
        println!(
            "{choice:?}: wires reset {reset}, lanes lost {}, made anew {}",
            counts.lanes_lost.load(Ordering::Relaxed),
            counts.lanes_made.load(Ordering::Relaxed)
        );
        assert!(counts.lanes_lost.load(Ordering::Relaxed) > 20);
    }
}

#[test]
fn wires_that_end_in_the_middle_of_a_chunk_lose_nothing() {
    for choice in BREAKING {
        let (cluster, faults) = with_faults(choice, |_| ());
        for round in 0..20u64 {
            faults[0].truncate_sends(1 + round as usize % 3);
            assert_eq!(
                transfer_while(&cluster, 3 << 20, round, || ()),
                (None, None),
                "{choice:?} round {round}"
            );
        }
        assert!(cluster.engines[1].counts().lanes_lost.load(Ordering::Relaxed) >= 20);
    }
}

#[test]
fn a_unix_socket_that_is_reset_fails_what_is_under_way_and_is_made_anew_for_the_next() {
    let (cluster, faults) = with_faults(TransportChoice::Unix, |_| ());
    let mut failed = 0;
    for round in 0..20u64 {
        let (sent, received) = transfer_while(&cluster, 12 << 20, 2 * round, || {
            faults[round as usize % 2].reset(|_| true);
        });
        for error in [sent, received].into_iter().flatten() {
            let named = matches!(error, TransferError::PeerDead { .. } | TransferError::Transport { .. });
            assert!(named || matches!(error, TransferError::Cancelled { .. }), "{error}");
            failed += 1;
        }
        let next = transfer_while(&cluster, 100_000, 2 * round + 1, || ());
        // The other side may learn of the reset a moment later, and then launches on the old connection.
        if next != (None, None) {
            let again = transfer_while(&cluster, 100_000, 1000 + round, || ());
            assert_eq!(again, (None, None), "round {round}, after {next:?}");
        }
    }
    println!("{failed} of 40 failed");
    assert!(failed > 10);
}

#[test]
fn a_connection_goes_on_with_the_lanes_that_it_has_and_tries_the_lost_one_again() {
    let dial_timeout = Duration::from_millis(200);
    let (cluster, faults) = with_faults(TransportChoice::Tcp, |config| config.dial_timeout = dial_timeout);
    assert_eq!(transfer_while(&cluster, 1 << 20, 0, || ()), (None, None));
    let lanes = || cluster.engines.iter().map(|engine| engine.links()[0].lanes).collect::<Vec<_>>();
    eventually("all lanes are there", || lanes() == [4, 4]);
    let shut = |shut| faults.iter().for_each(|faults| faults.set_new_wires_end_at_once(shut));
    shut(true);
    // Wire 0 is the control lane.
    assert_eq!(faults[0].reset(|at| at == 1), 1);
    eventually("both sides have lost it", || lanes() == [3, 3]);
    let until = Instant::now() + 4 * dial_timeout;
    let mut key = 0;
    while Instant::now() < until {
        key += 1;
        assert_eq!(transfer_while(&cluster, 1 << 20, key, || ()), (None, None), "after {key} transfers");
    }
    assert_eq!(lanes(), [3, 3]);
    shut(false);
    eventually("it is there again", || lanes() == [4, 4]);
    assert_eq!(transfer_while(&cluster, 1 << 20, key + 1, || ()), (None, None));
    let links: Vec<_> = cluster.engines.iter().map(|engine| engine.links().len()).collect();
    assert_eq!(links, [1, 1], "it is the same connection");
}

#[test]
fn a_slow_network_is_only_slow() {
    for choice in WIRES {
        let (cluster, faults) = with_faults(choice, |_| ());
        for (key, (delay, narrow, len)) in
            [(3000, 0, 4 << 20), (0, 700, 1 << 20), (0, 7, 20_000), (200, 1500, 100_000)]
                .into_iter()
                .enumerate()
        {
            for faults in &faults {
                faults.delay_receives(Duration::from_micros(delay));
                faults.limit_io_size(narrow);
            }
            assert_eq!(transfer_while(&cluster, len, key as u64, || ()), (None, None), "{choice:?} {key}");
        }
    }
}

#[test]
fn a_damaged_chunk_is_sent_once_more_and_one_that_is_damaged_twice_is_an_error() {
    for choice in BREAKING {
        let (cluster, [faults, _]) = with_faults(choice, |_| ());
        assert_eq!(transfer_while(&cluster, 1000, 0, || ()), (None, None));
        faults.corrupt_chunks(1);
        assert_eq!(transfer_while(&cluster, 3 << 20, 1, || ()), (None, None));
        assert_eq!(cluster.engines[1].counts().damaged.load(Ordering::Relaxed), 1);
        faults.corrupt_chunks(usize::MAX);
        let outcomes = transfer_while(&cluster, 3 << 20, 2, || ());
        assert!(
            matches!(outcomes.1, Some(TransferError::Integrity { member: from, .. }) if from == member(0, 0)),
            "{outcomes:?}"
        );
        assert!(
            matches!(&outcomes.0, Some(TransferError::Cancelled { by, reason }) if by.task.0 == 1 && reason.contains("damaged twice")),
            "{outcomes:?}"
        );
        faults.clear_faults();
        assert_eq!(transfer_while(&cluster, 3 << 20, 3, || ()), (None, None));
    }
}

#[test]
fn whatever_frame_comes_damaged_is_sent_again_on_another_lane_and_twice_is_an_error() {
    for choice in BREAKING {
        // A damaged frame ends its lane. On a loaded machine, dialling a new one takes longer than an instant.
        let (cluster, faults) = with_faults(choice, |config| config.dial_timeout = Duration::from_secs(2));
        assert_eq!(transfer_while(&cluster, 1000, 1000, || ()), (None, None));
        // Inline, in the control lane, and in chunks, whose headers are corrupted as well as their payload.
        for round in 0..60u64 {
            let len = [1, 100, 8000, 5000, 100_000, 1 << 20][round as usize % 6];
            let outcomes =
                transfer_while(&cluster, len, round, || faults[round as usize % 2].corrupt_sends(1));
            assert_eq!(outcomes, (None, None), "{choice:?} round {round}: {len} bytes");
        }
        let damaged = || cluster.engines.iter().map(|engine| engine.counts().damaged.load(Ordering::Relaxed));
        assert!(damaged().sum::<u64>() >= 30, "{choice:?}: {:?}", damaged().collect::<Vec<_>>());
        faults[0].corrupt_sends(usize::MAX);
        let (sent, received) = transfer_while(&cluster, 5000, 2000, || ());
        let named = |error: &TransferError| {
            matches!(error, TransferError::PeerDead { .. } | TransferError::Transport { .. })
        };
        assert!(
            sent.as_ref().is_some_and(named) || received.as_ref().is_some_and(named),
            "{sent:?} {received:?}"
        );
        faults[0].clear_faults();
        // Each side detects the end of the other's connection in its own time.
        eventually("they meet again", || transfer_while(&cluster, 5000, 3000, || ()) == (None, None));
    }
}

#[test]
fn chunks_carry_checksums_if_either_side_wants_them() {
    for wants in [0, 1] {
        let (cluster, [faults, _]) =
            with_faults(TransportChoice::Tcp, |config| config.checks = config.here.task.0 == wants);
        assert_eq!(transfer_while(&cluster, 1000, 0, || ()), (None, None));
        faults.corrupt_chunks(1);
        assert_eq!(transfer_while(&cluster, 3 << 20, 1, || ()), (None, None), "{wants}");
        assert_eq!(cluster.engines[1].counts().damaged.load(Ordering::Relaxed), 1, "{wants}");
    }
}

#[test]
fn a_peer_that_takes_no_bytes_any_more_is_given_up_at_the_stall_limit_and_goes_on_afterwards() {
    const STALL: Duration = Duration::from_millis(400);
    for choice in WIRES {
        let (cluster, [_, faults]) = with_faults(choice, |_| ());
        assert_eq!(transfer_while(&cluster, 1 << 20, 0, || ()), (None, None));
        faults.hold_wires(true);
        let (source, target) = (cluster.filled(0, 24 << 20, 1), cluster.empty(1, 24 << 20));
        let options = LaunchOptions { channel: 1, stall: STALL, ..LaunchOptions::default() };
        let sent = cluster.engines[0].transfer(&[], vec![outgoing(&source, 0, 1, 1)], options);
        let received = cluster.engines[1].transfer(&[], vec![incoming(&target, 0, 1, 1)], options);
        let began = Instant::now();
        for transfer in [&sent, &received] {
            let error = done(transfer).unwrap_err();
            // If control frames go through shared memory, the side that cancels first tells the other.
            let told = |error: &TransferError| {
                choice == TransportChoice::Unix && error.to_string().contains("nothing moved for")
            };
            let stalled = matches!(error, TransferError::Stalled { idle, .. } if idle >= STALL);
            assert!(stalled || told(&error), "{choice:?}: {error}");
        }
        println!("{choice:?}: given up after {:?}", began.elapsed());
        faults.hold_wires(false);
        assert_eq!(transfer_while(&cluster, 12 << 20, 2, || ()), (None, None), "{choice:?}");
    }
}

#[test]
fn whatever_the_network_does_nothing_hangs_and_no_byte_is_wrong() {
    for choice in WIRES {
        let (cluster, faults) = with_faults(choice, |config| config.dial_timeout = Duration::from_secs(3));
        let mut random = fastrand::Rng::with_seed(11);
        let until = Instant::now() + Duration::from_secs(4);
        let (mut whole, mut failed) = (0, std::collections::BTreeMap::<&str, usize>::new());
        let mut key = 0;
        while Instant::now() < until {
            key += 1;
            let harms: Vec<_> = (0..random.usize(0..4))
                .map(|_| (random.u8(0..9), random.usize(0..2), random.usize(0..5)))
                .collect();
            let outcomes = transfer_while(&cluster, random.usize(1..3_000_000), key, || {
                for (harm, side, lane) in harms {
                    std::thread::sleep(Duration::from_micros(random.u64(0..2000)));
                    let faults = &faults[side];
                    match harm {
                        0 => drop(faults.reset(|at| at == lane)),
                        1 => drop(faults.reset(|_| true)),
                        2 => faults.truncate_sends(1),
                        // A change would go unnoticed without checksums.
                        3 if choice != TransportChoice::Unix => faults.corrupt_chunks(lane),
                        4 => faults.delay_receives(Duration::from_micros(random.u64(0..1500))),
                        5 => faults.limit_io_size(random.usize(3000..9000)),
                        6 => faults.set_new_wires_end_at_once(random.bool()),
                        7 => faults.hold_wires(random.bool()),
                        _ => faults.clear_faults(),
                    }
                }
                // A wire that is held for good fails at the stall limit, which another test covers.
                faults.iter().for_each(|faults| faults.hold_wires(false));
            });
            faults.iter().for_each(|faults| faults.set_new_wires_end_at_once(false));
            for outcome in [outcomes.0, outcomes.1] {
                match outcome {
                    None => whole += 1,
                    Some(error) => {
                        println!("{choice:?}: {error}");
                        *failed.entry(error.reason_label()).or_default() += 1;
                    }
                }
            }
        }
        println!("{choice:?}: {whole} whole, failed {failed:?}");
        let lost: u64 = cluster.engines.iter().map(|e| e.counts().lanes_lost.load(Ordering::Relaxed)).sum();
        assert!(whole > 0 && (lost > 0 || !failed.is_empty()), "{choice:?}: nothing was harmed");
        faults.iter().for_each(FaultInjector::clear_faults);
        eventually("the network is well, and so are transfers", || {
            key += 1;
            transfer_while(&cluster, 1 << 20, key, || ()) == (None, None)
        });
    }
}

#[test]
fn a_membership_change_ends_a_dial_without_answer() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let cluster = Cluster::with(1, |config| config.transport = TransportChoice::Tcp);
    cluster.announce_stranger(1, silent.local_addr().unwrap());
    let buffer = cluster.empty(0, 100);
    let waiting =
        cluster.engines[0].transfer(&[], vec![outgoing(&buffer, 0, 1, 1)], LaunchOptions::default());
    let cancelled =
        cluster.engines[0].transfer(&[], vec![outgoing(&buffer, 0, 1, 2)], LaunchOptions::default());
    std::thread::sleep(Duration::from_millis(100));
    let began = Instant::now();
    let proof = cancelled.cancel("it takes too long");
    assert!(matches!(done(&cancelled), Err(TransferError::Cancelled { .. })));
    assert!(proof.wait_for(PATIENCE));
    println!("cancelled while dialling after {:?}", began.elapsed());
    assert!(began.elapsed() < Duration::from_secs(1));
    assert!(waiting.outcome().is_none());
    let began = Instant::now();
    cluster.announce();
    assert!(
        matches!(done(&waiting), Err(TransferError::StaleIncarnation { member: gone, .. }) if gone == member(1, 0))
    );
    println!("freed by the membership after {:?}", began.elapsed());
    assert!(began.elapsed() < Duration::from_secs(1));
    // A shutdown releases too, and does not wait for the dialling.
    let cluster = Cluster::with(1, |config| config.transport = TransportChoice::Tcp);
    cluster.announce_stranger(1, silent.local_addr().unwrap());
    let waiting =
        cluster.engines[0].transfer(&[], vec![outgoing(&buffer, 0, 1, 1)], LaunchOptions::default());
    let began = Instant::now();
    cluster.engines[0].shutdown();
    assert!(matches!(done(&waiting), Err(TransferError::Closed)));
    assert!(began.elapsed() < Duration::from_secs(1));
}

/// Waits until a task has received some of the bytes.
fn wait_until_bytes_arrived(cluster: &Cluster, task: usize) {
    eventually("some of it has come", || {
        let links = cluster.engines[task].links();
        links.iter().any(|link| link.bytes.iter().any(|(_, (_, received))| *received > 0))
    });
}

#[test]
fn a_deadline_that_passes_in_the_middle_ends_the_transfer_on_both_sides() {
    const LEN: usize = 8 << 20;
    for choice in WIRES {
        let (cluster, [_, faults]) = with_faults(choice, |config| config.chunk = 64 << 10);
        faults.limit_io_size(16 << 10);
        faults.delay_receives(Duration::from_millis(1));
        let (source, target) = (cluster.filled(0, LEN, 1), cluster.empty(1, LEN));
        let deadline = Duration::from_millis(500);
        let options = |task: usize| LaunchOptions {
            // Only the receiver has a deadline; the sender is told.
            deadline: (task == 1).then_some(deadline),
            ..LaunchOptions::default()
        };
        let began = Instant::now();
        let received = cluster.engines[1].transfer(&[], vec![incoming(&target, 0, 1, 1)], options(1));
        let sent = cluster.engines[0].transfer(&[], vec![outgoing(&source, 0, 1, 1)], options(0));
        wait_until_bytes_arrived(&cluster, 1);
        faults.hold_wires(true);
        let error = done(&received).unwrap_err();
        assert!(began.elapsed() >= deadline, "{choice:?}: {error}, too early");
        assert!(began.elapsed() < 10 * deadline, "{choice:?}: {error}, after {:?}", began.elapsed());
        let TransferError::Deadline { moved, total } = error else { panic!("{choice:?}: {error}") };
        assert!(moved > 0 && moved < total && total == LEN as u64, "{choice:?}: {moved} of {total}");
        // No byte lands any more, and those in flight are discarded.
        target.fill(0x55).unwrap();
        faults.clear_faults();
        let told = done(&sent).unwrap_err();
        assert!(
            matches!(&told, TransferError::Cancelled { by, reason } if by.task.0 == 1 && reason.contains("deadline")),
            "{choice:?}: {told}"
        );
        assert_eq!(transfer_while(&cluster, 1 << 20, 2, || ()), (None, None), "{choice:?}");
        target.look(|bytes| assert!(bytes.iter().all(|byte| *byte == 0x55), "{choice:?}")).unwrap();
    }
}

#[test]
fn urgent_transfers_overtake_bulk_transfers() {
    const SMALL: usize = 1 << 20;
    let (cluster, [_, faults]) = with_faults(TransportChoice::Loopback, |config| {
        config.lanes = 1;
        config.chunk = 64 << 10;
    });
    faults.delay_receives(Duration::from_millis(1));
    let launch = |channel: u32, class, len: usize| {
        let (source, target) = (cluster.filled(0, len, channel.into()), cluster.empty(1, len));
        let options = LaunchOptions { channel, class, ..LaunchOptions::default() };
        let key = channel.into();
        let received = cluster.engines[1].transfer(&[], vec![incoming(&target, 0, 1, key)], options);
        let sent = cluster.engines[0].transfer(&[], vec![outgoing(&source, 0, 1, key)], options);
        (sent, received, target)
    };
    let large = launch(1, PriorityClass::Bulk, 16 << 20);
    wait_until_bytes_arrived(&cluster, 1);
    // Three of one size, requested in reverse order of urgency.
    let patient = launch(2, PriorityClass::Bulk, SMALL);
    let usual = launch(3, PriorityClass::Normal, SMALL);
    let urgent = launch(4, PriorityClass::Latency, SMALL);
    done(&urgent.1).unwrap();
    let others = [&usual.1, &patient.1, &large.1].map(|transfer| transfer.outcome().is_none());
    assert_eq!(others, [true; 3], "nothing that is less urgent was there before");
    done(&usual.1).unwrap();
    assert!(patient.1.outcome().is_none() && large.1.outcome().is_none(), "nor before what is usual");
    faults.clear_faults();
    for ((sent, received, target), seed) in [large, patient, usual, urgent].into_iter().zip(1..) {
        assert_eq!((done(&sent).err(), done(&received).err()), (None, None));
        assert_contents(&target, seed);
    }
}

#[test]
fn a_deadline_counts_from_the_request_even_if_the_peer_never_answers() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let cluster = Cluster::with(1, |config| config.transport = TransportChoice::Tcp);
    cluster.announce_stranger(1, silent.local_addr().unwrap());
    let buffer = cluster.empty(0, 100);
    let options = LaunchOptions { deadline: Some(Duration::from_millis(200)), ..LaunchOptions::default() };
    let late = cluster.engines[0].transfer(&[], vec![outgoing(&buffer, 0, 1, 1)], options);
    // Long before the dial timeout.
    let outcome = late.wait_for(Duration::from_secs(4)).expect("its deadline has passed");
    assert_eq!(outcome, Err(TransferError::Deadline { moved: 0, total: 100 }));
}

#[test]
fn an_engine_that_advertises_another_port_shuts_down() {
    let engine =
        crate::cluster::start(0, 0, |config| config.advertise = vec![SocketAddr::from(([127, 0, 0, 1], 9))]);
    let (tell, told) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        engine.shutdown();
        let _heard = tell.send(());
    });
    assert!(told.recv_timeout(Duration::from_secs(5)).is_ok(), "it hangs");
}
