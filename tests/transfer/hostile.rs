//! Tests that strangers who can reach an engine's sockets do no harm.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use muster::transfer::{BufferDefinitionEvent, LaunchOptions, MemberId, TransferError, TransportChoice};

use crate::cluster::{AnyMemory, Cluster, assert_contents, done, eventually, member, start};
use crate::harness::run_ignored_test;

fn count_held_resources() -> (usize, usize) {
    let count = |path: &str| std::fs::read_dir(path).unwrap().count();
    (count("/proc/self/fd"), count("/proc/self/task"))
}

fn address(cluster: &Cluster) -> SocketAddr {
    cluster.engines[1].address().tcp[0]
}

/// Performs transfers while `harm` runs. Returns their number.
fn count_transfers_during(cluster: &Cluster, harm: impl FnOnce()) -> u64 {
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let moving = scope.spawn(|| {
            let mut count = 0;
            while !over.load(Ordering::SeqCst) || count < 3 {
                let (source, target) = (cluster.filled(0, 300_000, count), cluster.empty(1, 300_000));
                let (sent, received) = cluster.send(0, &source, 1, &target, count);
                assert_eq!((done(&received).err(), done(&sent).err()), (None, None), "transfer {count}");
                assert_contents(&target, count);
                count += 1;
                std::thread::sleep(Duration::from_millis(2));
            }
            count
        });
        harm();
        over.store(true, Ordering::SeqCst);
        moving.join().unwrap()
    })
}

#[test]
#[ignore = "a process of another test"]
fn alone_ten_thousand() {
    let cluster = Cluster::with(2, |config| {
        config.transport = TransportChoice::Tcp;
        config.token = Some(b"known to all".to_vec());
    });
    count_transfers_during(&cluster, || ());
    let before = count_held_resources();
    let mut most = 0;
    let moved = count_transfers_during(&cluster, || {
        let mut silent = Vec::new();
        for n in 0..10_000 {
            // The other end may have closed it already.
            silent.extend(TcpStream::connect(address(&cluster)));
            if n % 500 == 499 {
                most = most.max(count_held_resources().1);
                // Only the listener's descriptors are counted, so the closed ones are dropped.
                silent.clear();
            }
        }
    });
    println!("{moved} transfers went on; at most {most} threads, {} before", before.1);
    assert!(most < before.1 + 300);
    let until = Instant::now() + Duration::from_secs(15);
    // Threads that handled connections at the first count may be gone.
    while count_held_resources().0 > before.0 || count_held_resources().1 > before.1 {
        assert!(Instant::now() < until, "before {before:?}, after {:?}", count_held_resources());
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn ten_thousand_connections_that_say_nothing_leave_nothing_behind() {
    run_ignored_test("hostile::alone_ten_thousand");
}

#[test]
fn random_bytes_and_partial_hellos_affect_no_transfer() {
    for token in [None, Some(b"known to all".to_vec())] {
        let cluster = Cluster::with(2, |config| {
            config.transport = TransportChoice::Tcp;
            config.token = token.clone();
        });
        let mut random = fastrand::Rng::with_seed(9);
        let moved = count_transfers_during(&cluster, || {
            for round in 0..300 {
                let Ok(mut socket) = TcpStream::connect(address(&cluster)) else { continue };
                let mut bytes = vec![0; random.usize(0..400)];
                random.fill(&mut bytes);
                if round % 2 == 0 {
                    bytes.splice(0..bytes.len().min(8), *b"MUSTERX3");
                }
                let _gone = socket.write_all(&bytes);
                if round % 3 == 0 {
                    let _gone = socket.set_read_timeout(Some(Duration::from_millis(5)));
                    let _gone = socket.read(&mut [0; 100]);
                }
            }
        });
        assert!(moved > 2);
    }
}

/// A relay in front of an engine that records what each dialler sent first.
pub struct RecordingProxy {
    pub address: SocketAddr,
    pub heard: Arc<Mutex<Vec<Vec<u8>>>>,
    /// The outgoing sockets of the relay, in order: bytes written there seem to come from the dialler.
    pub onward: Arc<Mutex<Vec<TcpStream>>>,
}

impl RecordingProxy {
    pub fn before(target: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let heard = Arc::new(Mutex::new(Vec::new()));
        let onward = Arc::new(Mutex::new(Vec::new()));
        let (keeping, ends) = (Arc::clone(&heard), Arc::clone(&onward));
        // The threads end with the test's process, or with the connections.
        std::thread::spawn(move || {
            for near in listener.incoming().map_while(Result::ok) {
                let Ok(far) = TcpStream::connect(target) else { continue };
                let (near_too, far_too) = (near.try_clone().unwrap(), far.try_clone().unwrap());
                let keeping = Arc::clone(&keeping);
                ends.lock().unwrap().push(far.try_clone().unwrap());
                std::thread::spawn(move || forward_bytes(near, far, Some(&keeping)));
                std::thread::spawn(move || forward_bytes(far_too, near_too, None));
            }
        });
        Self { address, heard, onward }
    }
}

fn forward_bytes(mut from: TcpStream, mut to: TcpStream, keep: Option<&Mutex<Vec<Vec<u8>>>>) {
    let mut buffer = vec![0; 128 << 10];
    let mut first = keep;
    while let Ok(got @ 1..) = from.read(&mut buffer) {
        if let Some(keep) = first.take() {
            keep.lock().unwrap().push(buffer[..got].to_vec());
        }
        if to.write_all(&buffer[..got]).is_err() {
            break;
        }
    }
    let _gone = from.shutdown(std::net::Shutdown::Both);
    let _gone = to.shutdown(std::net::Shutdown::Both);
}

#[test]
fn a_replayed_hello_without_the_token_is_refused() {
    let mut cluster = Cluster::with(2, |config| {
        config.transport = TransportChoice::Tcp;
        config.token = Some(b"known to all".to_vec());
    });
    let listening: Vec<_> =
        cluster.engines.iter().map(|engine| RecordingProxy::before(engine.address().tcp[0])).collect();
    cluster.announce_other_addresses(listening.iter().map(|before| before.address).collect());
    count_transfers_during(&cluster, || ());
    let lost = |cluster: &Cluster| {
        cluster.engines.iter().map(|engine| engine.counts().lanes_lost.load(Ordering::Relaxed)).sum::<u64>()
    };
    let cliques =
        |cluster: &Cluster| cluster.engines.iter().map(|engine| engine.clique_cache_stats().2).sum::<u64>();
    let before = (lost(&cluster), cliques(&cluster));
    let moved = count_transfers_during(&cluster, || {
        for _ in 0..10 {
            for before in &listening {
                let hellos = before.heard.lock().unwrap().clone();
                for hello in hellos.into_iter().take(4) {
                    let mut socket = TcpStream::connect(before.address).unwrap();
                    // All messages of the dialler: its opening, its hello with the proof, its confirmation.
                    let _gone = socket.write_all(&hello[..hello.len().min(48 + 92 + 36)]);
                    let _gone = socket.set_read_timeout(Some(Duration::from_millis(20)));
                    let _gone = socket.read(&mut [0; 80]);
                }
            }
        }
    });
    assert!(moved > 2);
    assert_eq!((lost(&cluster), cliques(&cluster)), before, "lanes were lost, or connections made anew");
}

#[test]
fn a_wrong_token_is_refused_by_name() {
    let cluster = Cluster::with(2, |config| {
        config.transport = TransportChoice::Tcp;
        config.dial_timeout = Duration::from_millis(300);
        config.token = Some(vec![config.here.task.0 as u8]);
    });
    let (source, target) = (cluster.filled(0, 100, 0), cluster.empty(1, 100));
    let (sent, _received) = cluster.send(0, &source, 1, &target, 0);
    let error = done(&sent).unwrap_err().to_string();
    assert!(error.contains("token"), "{error}");
}

/// Returns the number of threads that perform handshakes.
fn count_handshake_threads() -> usize {
    let threads = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let names = threads.filter_map(|thread| std::fs::read_to_string(thread.path().join("comm")).ok());
    names.filter(|name| name.trim() == "muster-hello").count()
}

/// The most concurrent handshakes that an engine allows for one network.
const PER_SOURCE: usize = 64;

#[test]
fn slow_unauthenticated_dialers_do_not_block_peers() {
    let cluster = Cluster::with(2, |config| config.transport = TransportChoice::Tcp);
    let over = AtomicBool::new(false);
    let targets: Vec<_> = cluster.engines.iter().map(|engine| engine.address().tcp[0]).collect();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut slow: Vec<(SocketAddr, Option<TcpStream>)> =
                targets.iter().flat_map(|target| (0..2 * PER_SOURCE).map(|_| (*target, None))).collect();
            while !over.load(Ordering::SeqCst) {
                for (target, socket) in &mut slow {
                    // One byte of an opening at a time; a socket that was closed is dialled again.
                    let goes_on = socket.as_mut().is_some_and(|socket| socket.write_all(b"M").is_ok());
                    if !goes_on {
                        *socket = TcpStream::connect(*target).ok();
                    }
                }
                std::thread::sleep(Duration::from_millis(50));
            }
        });
        eventually("as many as may are heard", || count_handshake_threads() >= 2 * PER_SOURCE - 10);
        for key in 0..5 {
            let (source, target) = (cluster.filled(0, 100, key), cluster.empty(1, 100));
            let (sent, received) = cluster.send(0, &source, 1, &target, key);
            let outcomes = (done(&sent).err(), done(&received).err());
            assert!(count_handshake_threads() < 400, "threads are bounded");
            assert_eq!(outcomes, (None, None));
        }
        over.store(true, Ordering::SeqCst);
    });
}

/// Encodes an opening or a challenge of a handshake.
fn nonce_message(which: u8) -> Vec<u8> {
    let mut bytes = b"MUSTERX3".to_vec();
    bytes.extend([which, 0, 0, 0]);
    bytes.extend([0x42; 32]);
    with_checksum_appended(bytes)
}

fn with_checksum_appended(mut bytes: Vec<u8>) -> Vec<u8> {
    let check = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, &bytes) as u32;
    bytes.extend(check.to_le_bytes());
    bytes
}

/// Encodes a hello between these members, with this proof.
fn hello(from: MemberId, to: MemberId, proof: [u8; 32]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for member in [from, to] {
        bytes.extend(member.task.0.to_le_bytes());
        bytes.extend(member.incarnation.get().to_le_bytes());
    }
    bytes.extend([0; 32]);
    // The flags: it begins a connection, carries control frames, and has a token.
    bytes[34] = 0b10011;
    bytes.extend(proof);
    with_checksum_appended(bytes)
}

/// Reads all bytes until the other end closes.
fn read_until_closed(socket: &mut TcpStream) -> Vec<u8> {
    socket.set_read_timeout(Some(crate::cluster::PATIENCE)).unwrap();
    let mut said = Vec::new();
    let _reset = socket.read_to_end(&mut said);
    said
}

#[test]
fn a_dialler_that_proves_nothing_learns_no_identity_and_nothing_that_the_token_makes() {
    const TOKEN: &[u8] = b"guess me";
    let cluster = Cluster::with(2, |config| {
        config.transport = TransportChoice::Tcp;
        config.token = Some(TOKEN.to_vec());
    });
    let [here, there] = [member(0, 0), member(1, 0)];
    let mut refusals = Vec::new();
    // The dialler guesses the identities rightly, and wrongly.
    for (from, to) in [(here, there), (here, member(1, 9)), (member(7, 7), there)] {
        let mut socket = TcpStream::connect(address(&cluster)).unwrap();
        socket.write_all(&nonce_message(1)).unwrap();
        let mut challenge = [0; 48];
        socket.read_exact(&mut challenge).unwrap();
        assert_eq!(&challenge[..12], b"MUSTERX3\x02\0\0\0");
        socket.write_all(&hello(from, to, [7; 32])).unwrap();
        refusals.push(read_until_closed(&mut socket));
    }
    // The refusal is the same for all of them: a code, zeros, a checksum.
    let mut expected = vec![4];
    expected.resize(24 + 32, 0);
    let expected = with_checksum_appended(expected);
    assert!(refusals.iter().all(|refusal| *refusal == expected), "{refusals:?}");
    // A dialler that sends nothing or an incomplete message receives nothing, and is disconnected soon.
    for said in [&b""[..], b"MUSTERX3", b"GET / HTTP/1.1\r\n\r\n"] {
        let mut socket = TcpStream::connect(address(&cluster)).unwrap();
        socket.write_all(said).unwrap();
        assert_eq!(read_until_closed(&mut socket), b"");
    }
    let moved = count_transfers_during(&cluster, || ());
    assert!(moved > 2);
}

/// Listens at the address announced for task 1: sends a challenge, and then this answer to any hello.
fn start_impostor(answer: Vec<u8>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for mut near in listener.incoming().map_while(Result::ok) {
            let _gone = near.read_exact(&mut [0; 48]);
            let _gone = near.write_all(&nonce_message(2));
            let _gone = near.read_exact(&mut [0; 92]);
            let _gone = near.write_all(&answer);
        }
    });
    address
}

#[test]
fn only_the_authenticated_peer_can_announce_an_incarnation_or_accept() {
    let cluster = Cluster::with(2, |config| {
        config.transport = TransportChoice::Tcp;
        config.dial_timeout = Duration::from_millis(300);
        config.token = Some(b"known to all".to_vec());
    });
    for (task, code) in [(5, 0), (6, 1), (7, 2)] {
        let mut answer = vec![0; 24 + 32];
        answer[0] = code;
        answer[8] = 99;
        cluster.announce_stranger(task, start_impostor(with_checksum_appended(answer)));
        let source = cluster.filled(0, 100, 1);
        let sent = cluster.engines[0].transfer(
            &[],
            vec![crate::cluster::outgoing(&source, 0, task, 1)],
            LaunchOptions::default(),
        );
        let error = done(&sent).unwrap_err();
        assert!(matches!(error, TransferError::Transport { .. }), "code {code}: {error}");
        assert!(error.to_string().contains("does not know the cluster token"), "code {code}: {error}");
    }
    assert_eq!(cluster.engines[0].counts().fenced.load(Ordering::SeqCst), 0);
}

/// Relays each connection to another address.
fn start_relay(target: SocketAddr) -> SocketAddr {
    RecordingProxy::before(target).address
}

#[test]
fn a_hello_that_is_sent_back_or_on_to_another_task_is_refused() {
    let cluster = Cluster::with(3, |config| {
        config.transport = TransportChoice::Tcp;
        config.dial_timeout = Duration::from_millis(300);
        config.token = Some(b"known to all".to_vec());
    });
    // Task 5 is announced at task 0's own address, and task 6 at that of task 2: the proofs are right, but
    // for another task.
    for (task, behind) in [(5, 0), (6, 2)] {
        cluster.announce_stranger(task, start_relay(cluster.engines[behind].address().tcp[0]));
        let source = cluster.filled(0, 100, 1);
        let spec = crate::cluster::outgoing(&source, 0, task, 1);
        let sent = cluster.engines[0].transfer(&[], vec![spec], LaunchOptions::default());
        let error = done(&sent).unwrap_err();
        assert!(matches!(error, TransferError::StaleIncarnation { .. }), "task {task}: {error}");
        assert!(cluster.engines[behind].links().is_empty());
    }
}

#[test]
fn an_old_life_is_kept_out_while_the_new_one_goes_on() {
    for choice in [TransportChoice::Tcp, TransportChoice::Auto] {
        let quick = |config: &mut muster::transfer::EngineConfig| {
            config.transport = choice;
            config.dial_timeout = Duration::from_millis(500);
        };
        let mut cluster = Cluster::with(2, quick);
        let len = 24 << 20;
        let (source, target) = (cluster.filled(1, len, 1), cluster.empty(0, len));
        let (sent, received) = cluster.send(1, &source, 0, &target, 1);
        eventually("some of it has come", || {
            received.outcome().is_some()
                || cluster.engines[0]
                    .links()
                    .iter()
                    .any(|link| link.bytes.iter().any(|(_, (_, got))| *got > 0))
        });
        // The new incarnation is announced to the others; the old one is not told, and goes on sending.
        let fresh = start(1, 1, quick);
        let old = std::mem::replace(&mut cluster.engines[1], fresh);
        cluster.announce();
        let (first, last) = (done(&received), done(&sent));
        for (side, outcome) in [("receiver", &first), ("sender", &last)] {
            match outcome {
                Ok(_) => assert_contents(&target, 1),
                Err(error) => println!("{choice:?}: the {side} of the old life heard: {error}"),
            }
        }
        let again =
            old.transfer(&[], vec![crate::cluster::outgoing(&source, 1, 0, 2)], LaunchOptions::default());
        let error = done(&again).unwrap_err().to_string();
        println!("{choice:?}: the old life heard: {error}");
        assert!(error.contains("incarnation"), "{error}");
        assert!(cluster.engines[0].counts().fenced.load(Ordering::Relaxed) > 0);
        let (source, target) = (cluster.filled(1, 5000, 3), cluster.empty(0, 5000));
        let (sent, received) = cluster.send(1, &source, 0, &target, 3);
        assert_eq!((done(&sent).err(), done(&received).err()), (None, None));
        assert_contents(&target, 3);
    }
}

/// Encodes the frame of a chunk: the first of a group, complete.
fn chunk(from: MemberId, to: MemberId, channel: u32, payload: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; 64];
    bytes[0..2].copy_from_slice(&0x4d58_u16.to_le_bytes());
    (bytes[2], bytes[3]) = (1, 13);
    bytes[8..16].copy_from_slice(&from.incarnation.get().to_le_bytes());
    bytes[16..24].copy_from_slice(&to.incarnation.get().to_le_bytes());
    bytes[24..28].copy_from_slice(&channel.to_le_bytes());
    bytes[48..52].copy_from_slice(&(payload.len() as u32).to_le_bytes());
    let check = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, &bytes[..60]) as u32;
    bytes[60..64].copy_from_slice(&check.to_le_bytes());
    bytes.extend_from_slice(payload);
    bytes
}

#[test]
fn a_frame_of_a_former_life_on_a_lane_that_lives_lands_nowhere_and_ends_the_connection() {
    const LEN: usize = 40_000;
    let tcp = |config: &mut muster::transfer::EngineConfig| {
        config.transport = TransportChoice::Tcp;
        config.lanes = 1;
    };
    let [old, new, here] = [member(0, 0), member(0, 1), member(1, 0)];
    let formerly = member(1, 7);
    // The sender, the receiver and the lane of a frame, and whether it is accepted. The first one shows that
    // only the incarnation is wrong with the others.
    for (from, to, lane, lands) in
        [(new, here, 1, true), (old, here, 1, false), (old, here, 0, false), (new, formerly, 1, false)]
    {
        let mut cluster = Cluster::with(2, tcp);
        let before = RecordingProxy::before(cluster.engines[1].address().tcp[0]);
        let other = cluster.engines[0].address().tcp[0];
        cluster.announce_other_addresses(vec![other, before.address]);
        // This side knew the task's former incarnation, and then another one came.
        let (source, target) = (cluster.filled(0, LEN, 1), cluster.empty(1, LEN));
        let (sent, received) = cluster.send(0, &source, 1, &target, 1);
        assert_eq!((done(&sent).err(), done(&received).err()), (None, None));
        cluster.engines[0].shutdown();
        cluster.engines[0] = start(0, 1, tcp);
        let other = cluster.engines[0].address().tcp[0];
        before.onward.lock().unwrap().clear();
        cluster.announce_other_addresses(vec![other, before.address]);
        // Only this side dials: the other one is asked once the connection exists.
        let alone = LaunchOptions { channel: 1, ..LaunchOptions::default() };
        let prepared = cluster.engines[0].prepare(vec![crate::cluster::outgoing(&source, 0, 1, 1)], alone);
        let mut sending = prepared.wait().unwrap();
        eventually("both lanes are there", || {
            cluster.engines.iter().all(|engine| engine.links().iter().any(|link| link.lanes == 2))
        });
        assert_eq!(before.onward.lock().unwrap().len(), 2, "both go through here");
        // Both sides have launched it, and it waits for its source: a chunk of it would land.
        target.fill(0xee).unwrap();
        let (_definer, event) = BufferDefinitionEvent::new();
        let sent = sending.launch(&[event]);
        let received =
            cluster.engines[1].transfer(&[], vec![crate::cluster::incoming(&target, 0, 1, 1)], alone);
        eventually("both have heard of each other", || {
            cluster.engines.iter().all(|engine| engine.links().iter().all(|link| link.launched == 1))
        });
        std::thread::sleep(Duration::from_millis(50));
        let fenced = || cluster.engines[1].counts().fenced.load(Ordering::SeqCst);
        let fenced_before = fenced();
        let mut wire = before.onward.lock().unwrap()[lane].try_clone().unwrap();
        wire.write_all(&chunk(from, to, 1, &[0x5a; LEN])).unwrap();
        let outcome = done(&received);
        if lands {
            assert_eq!(outcome.map(|stats| stats.received), Ok(LEN as u64));
            target.look(|bytes| assert!(bytes.iter().all(|byte| *byte == 0x5a))).unwrap();
            assert_eq!(fenced(), fenced_before);
            continue;
        }
        let error = outcome.unwrap_err();
        assert!(matches!(error, TransferError::Transport { .. }), "{error}");
        assert!(error.to_string().contains("another incarnation"), "{error}");
        target.look(|bytes| assert!(bytes.iter().all(|byte| *byte == 0xee), "something landed")).unwrap();
        assert_eq!(fenced(), fenced_before + 1);
        eventually("the connection is over on both sides", || {
            cluster.engines.iter().all(|engine| engine.links().is_empty())
        });
        assert!(done(&sent).is_err());
        // The current incarnation goes on, on another connection.
        let (sent, received) = cluster.send(0, &source, 1, &target, 2);
        assert_eq!((done(&sent).err(), done(&received).err()), (None, None));
        assert_contents(&target, 1);
    }
}
