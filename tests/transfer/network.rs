//! A network that resets, delays, throttles, damages and cuts off: what arrives is whole, or the error has a name.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use muster::transfer::{Choice, Config, Options, TransferError};

use crate::cluster::{Cluster, PATIENCE, assert_contents, done, eventually, incoming, member, outgoing};

/// Stands between two engines, and does what it is told.
pub struct Proxy {
    pub address: SocketAddr,
    pub faults: Arc<Faults>,
}

#[derive(Default)]
pub struct Faults {
    /// So many large reads have a byte changed, from the next one on.
    damage: AtomicUsize,
    /// Microseconds that each read is held back.
    delay: AtomicU64,
    /// Bytes of one read; 0 for any.
    narrow: AtomicUsize,
    /// The next large read is passed on by half, and then the connection ends.
    truncate: AtomicUsize,
    /// New connections are refused by closing them.
    shut: AtomicBool,
    /// Both ends of each connection, and its first bytes.
    pub passing: Mutex<Vec<Passing>>,
}

pub struct Passing {
    ends: [TcpStream; 2],
    pub first: Arc<Mutex<Vec<u8>>>,
}

impl Passing {
    fn reset(&self) {
        for end in &self.ends {
            let _gone = socket2::SockRef::from(end).set_linger(Some(Duration::ZERO));
            let _gone = end.shutdown(std::net::Shutdown::Both);
        }
    }

    fn is_open(&self) -> bool {
        self.ends.iter().all(|end| end.peer_addr().is_ok())
    }
}

impl Proxy {
    pub fn to(target: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let faults = Arc::new(Faults::default());
        let serving = Arc::clone(&faults);
        // The thread ends with the test's process.
        std::thread::spawn(move || {
            for near in listener.incoming().map_while(Result::ok) {
                if serving.shut.load(Ordering::SeqCst) {
                    continue;
                }
                let Ok(far) = TcpStream::connect(target) else { continue };
                near.set_nodelay(true).unwrap();
                far.set_nodelay(true).unwrap();
                let first = Arc::new(Mutex::new(Vec::new()));
                let ends = [near.try_clone().unwrap(), far.try_clone().unwrap()];
                serving.passing.lock().unwrap().push(Passing { ends, first: Arc::clone(&first) });
                let (from, to) = (near.try_clone().unwrap(), far.try_clone().unwrap());
                let (ahead, back) = (Arc::clone(&serving), Arc::clone(&serving));
                std::thread::spawn(move || ahead.pass(from, to, Some(&first)));
                std::thread::spawn(move || back.pass(far, near, None));
            }
        });
        Self { address, faults }
    }
}

fn take(count: &AtomicUsize) -> bool {
    count.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).is_ok()
}

impl Faults {
    fn pass(&self, mut from: TcpStream, mut to: TcpStream, first: Option<&Mutex<Vec<u8>>>) {
        let mut buffer = vec![0; 128 << 10];
        loop {
            let most = match self.narrow.load(Ordering::SeqCst) {
                0 => buffer.len(),
                narrow => narrow,
            };
            let Ok(got @ 1..) = from.read(&mut buffer[..most]) else { break };
            if let Some(first) = first {
                let mut first = first.lock().unwrap();
                if first.len() < 128 {
                    first.extend_from_slice(&buffer[..got.min(128)]);
                }
            }
            let delay = self.delay.load(Ordering::SeqCst);
            if delay > 0 {
                std::thread::sleep(Duration::from_micros(delay));
            }
            let mut passed = got;
            if got > 4096 {
                let middle = got / 2;
                // Headers are not to be hit: they begin with their magic and version.
                let header = buffer[middle - 64..=middle].windows(3).any(|bytes| bytes == [0x58, 0x4d, 1]);
                if !header && take(&self.damage) {
                    buffer[middle] ^= 0x10;
                }
                if take(&self.truncate) {
                    passed = middle;
                }
            }
            if to.write_all(&buffer[..passed]).is_err() || passed < got {
                break;
            }
        }
        let _gone = from.shutdown(std::net::Shutdown::Both);
        let _gone = to.shutdown(std::net::Shutdown::Both);
    }

    fn reset(&self, chosen: impl Fn(usize) -> bool) {
        let mut passing = self.passing.lock().unwrap();
        passing.retain(Passing::is_open);
        passing.iter().enumerate().filter(|(at, _)| chosen(*at)).for_each(|(_, passing)| passing.reset());
    }
}

/// Two engines that reach each other through proxies only.
pub fn through_proxies(setting: impl Fn(&mut Config)) -> (Cluster, Vec<Proxy>) {
    let mut cluster = Cluster::with(2, |config| {
        config.transport = Choice::Tcp;
        config.lanes = 3;
        setting(config);
    });
    let proxies: Vec<_> = cluster.engines.iter().map(|engine| Proxy::to(engine.address().tcp[0])).collect();
    cluster.reached_at(proxies.iter().map(|proxy| proxy.address).collect());
    (cluster, proxies)
}

/// Moves so many bytes while `harm` is done, and says how it went on both sides.
fn move_under(
    cluster: &Cluster,
    len: usize,
    key: u64,
    harm: impl FnOnce(),
) -> (Option<TransferError>, Option<TransferError>) {
    let (source, target) = (cluster.filled(0, len, key), cluster.empty(1, len));
    // On a channel of its own: one side may launch on a connection that dies, and the other on the one after it. Then
    // that one waits for a launch that does not come, and is given up.
    let options = Options { channel: key as u32, ..Options::default() };
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
    let (cluster, proxies) = through_proxies(|_| ());
    let mut random = fastrand::Rng::with_seed(3);
    for round in 0..40u64 {
        let outcomes = move_under(&cluster, 12 << 20, round, || {
            std::thread::sleep(Duration::from_micros(random.u64(0..12_000)));
            let all = round % 4 == 3;
            let one = random.usize(0..4);
            for proxy in &proxies {
                proxy.faults.reset(|at| all || at == one);
            }
        });
        assert_eq!(outcomes, (None, None), "round {round}");
    }
    let counts = cluster.engines[0].counts();
    println!(
        "lanes lost {}, made anew {}",
        counts.lanes_lost.load(Ordering::Relaxed),
        counts.lanes_made.load(Ordering::Relaxed)
    );
    assert!(counts.lanes_lost.load(Ordering::Relaxed) > 20);
}

#[test]
fn a_slow_network_is_only_slow() {
    let (cluster, proxies) = through_proxies(|_| ());
    let set = |delay, narrow| {
        for proxy in &proxies {
            proxy.faults.delay.store(delay, Ordering::SeqCst);
            proxy.faults.narrow.store(narrow, Ordering::SeqCst);
        }
    };
    for (key, (delay, narrow, len)) in
        [(3000, 0, 4 << 20), (0, 700, 1 << 20), (200, 1500, 100_000)].into_iter().enumerate()
    {
        set(delay, narrow);
        assert_eq!(move_under(&cluster, len, key as u64, || ()), (None, None));
    }
}

#[test]
fn a_damaged_chunk_is_sent_once_more_and_one_that_is_damaged_twice_is_an_error() {
    let (cluster, proxies) = through_proxies(|_| ());
    assert_eq!(move_under(&cluster, 1000, 0, || ()), (None, None));
    let set = |count| proxies.iter().for_each(|proxy| proxy.faults.damage.store(count, Ordering::SeqCst));
    set(1);
    assert_eq!(move_under(&cluster, 3 << 20, 1, || ()), (None, None));
    assert!(cluster.engines[1].counts().damaged.load(Ordering::Relaxed) > 0);
    set(usize::MAX);
    let outcomes = move_under(&cluster, 3 << 20, 2, || ());
    assert!(
        matches!(outcomes.1, Some(TransferError::Integrity { member: from, .. }) if from == member(0, 0)),
        "{outcomes:?}"
    );
    assert!(
        matches!(&outcomes.0, Some(TransferError::Cancelled { by, reason }) if by.0 == 1 && reason.contains("damaged twice")),
        "{outcomes:?}"
    );
    set(0);
    assert_eq!(move_under(&cluster, 3 << 20, 3, || ()), (None, None));
}

#[test]
fn whatever_the_network_does_nothing_hangs_and_no_byte_is_wrong() {
    let (cluster, proxies) = through_proxies(|config| config.dial_timeout = Duration::from_secs(3));
    let mut random = fastrand::Rng::with_seed(11);
    let until = Instant::now() + Duration::from_secs(6);
    let (mut whole, mut failed) = (0, std::collections::BTreeMap::<&str, usize>::new());
    let mut key = 0;
    while Instant::now() < until {
        key += 1;
        let harms: Vec<_> = (0..random.usize(0..4))
            .map(|_| (random.u8(0..8), random.usize(0..2), random.usize(0..5)))
            .collect();
        let outcomes = move_under(&cluster, random.usize(1..3_000_000), key, || {
            for (harm, proxy, lane) in harms {
                std::thread::sleep(Duration::from_micros(random.u64(0..2000)));
                let faults = &proxies[proxy].faults;
                match harm {
                    0 => faults.reset(|at| at == lane),
                    1 => faults.reset(|_| true),
                    2 => faults.truncate.store(1, Ordering::SeqCst),
                    3 => faults.damage.store(lane, Ordering::SeqCst),
                    4 => faults.delay.store(random.u64(0..1500), Ordering::SeqCst),
                    5 => faults.narrow.store(random.usize(3000..9000), Ordering::SeqCst),
                    6 => faults.shut.store(random.bool(), Ordering::SeqCst),
                    _ => {
                        faults.delay.store(0, Ordering::SeqCst);
                        faults.narrow.store(0, Ordering::SeqCst);
                        faults.shut.store(false, Ordering::SeqCst);
                    }
                }
            }
        });
        for proxy in &proxies {
            proxy.faults.shut.store(false, Ordering::SeqCst);
        }
        for outcome in [outcomes.0, outcomes.1] {
            match outcome {
                None => whole += 1,
                Some(error) => *failed.entry(error.reason()).or_default() += 1,
            }
        }
    }
    println!("{whole} whole, failed {failed:?}");
    for proxy in &proxies {
        for count in [&proxy.faults.damage, &proxy.faults.truncate, &proxy.faults.narrow] {
            count.store(0, Ordering::SeqCst);
        }
        proxy.faults.delay.store(0, Ordering::SeqCst);
    }
    eventually("the network is well, and so are transfers", || {
        key += 1;
        move_under(&cluster, 1 << 20, key, || ()) == (None, None)
    });
}

#[test]
fn whoever_dials_a_peer_that_never_answers_is_freed_by_the_membership() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let cluster = Cluster::with(1, |config| config.transport = Choice::Tcp);
    cluster.announce_stranger(1, silent.local_addr().unwrap());
    let buffer = cluster.empty(0, 100);
    let waiting = cluster.engines[0].transfer(&[], vec![outgoing(&buffer, 0, 1, 1)], Options::default());
    let cancelled = cluster.engines[0].transfer(&[], vec![outgoing(&buffer, 0, 1, 2)], Options::default());
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
    // Shutting down frees too, and does not wait for the dialling.
    let cluster = Cluster::with(1, |config| config.transport = Choice::Tcp);
    cluster.announce_stranger(1, silent.local_addr().unwrap());
    let waiting = cluster.engines[0].transfer(&[], vec![outgoing(&buffer, 0, 1, 1)], Options::default());
    let began = Instant::now();
    cluster.engines[0].shutdown();
    assert!(matches!(done(&waiting), Err(TransferError::Closed)));
    assert!(began.elapsed() < Duration::from_secs(1));
}

#[test]
fn a_deadline_counts_from_the_request_even_if_the_peer_never_answers() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let cluster = Cluster::with(1, |config| config.transport = Choice::Tcp);
    cluster.announce_stranger(1, silent.local_addr().unwrap());
    let buffer = cluster.empty(0, 100);
    let options = Options { deadline: Some(Duration::from_millis(200)), ..Options::default() };
    let late = cluster.engines[0].transfer(&[], vec![outgoing(&buffer, 0, 1, 1)], options);
    // Long before the dialling is given up.
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
