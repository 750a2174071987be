//! Tests that the second launch of a prepared transfer makes only system calls that move bytes or wake waiters.

use std::collections::BTreeMap;
use std::process::Command;

use muster::transfer::{LaunchOptions, TransferEngine, TransferSpec, TransportChoice};

use crate::cluster::{Cluster, assert_contents, done, eventually, incoming, outgoing};
use crate::harness::test_arguments;
use crate::skip::{Lacking, is_refusal, skip};

const CHOICES: [(&str, TransportChoice); 4] = [
    ("shm", TransportChoice::Shm),
    ("pvm", TransportChoice::Pvm),
    ("unix", TransportChoice::Unix),
    ("tcp", TransportChoice::Tcp),
];

/// The sizes: one that goes with the launch frame, one that is sent at once, and one of many chunks.
const SIZES: [usize; 3] = [100, 64 << 10, 3 << 20];

/// The system calls on the data path.
const ALLOWED: [(&str, &str); 9] = [
    ("sendmsg", "chunks, and control frames where there is no ring"),
    ("readv", "chunks, into their place"),
    ("recvmsg", "what comes by a Unix socket, which may bring descriptors along"),
    ("process_vm_readv", "memory of the other process, into its place"),
    ("epoll_wait", "a reactor looks for the next event"),
    ("epoll_pwait", "the same, where the library calls it so"),
    ("write", "an eventfd: a bell, or the waker of a reactor"),
    ("read", "the eventfd of a reactor that was woken"),
    ("futex", "a thread waits for another, or wakes it"),
];

/// Makes a system call that nothing else makes: the test examines the calls between two of them.
fn make_marker_system_call() {
    let _parent = std::os::unix::process::parent_id();
}

/// Returns the number of threads that dial or perform a handshake.
fn count_dial_and_handshake_threads() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let names = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
    names.filter(|name| ["muster-dial", "muster-hello"].contains(&name.trim())).count()
}

/// Launches a transfer twice, and marks the begin and the end of the second launch.
#[test]
#[ignore = "a process of another test"]
fn alone_twice() {
    let Ok(name) = std::env::var("MUSTER_TEST_CALLS") else { return };
    let (_, choice) = CHOICES.into_iter().find(|(known, _)| *known == name).unwrap();
    let cluster = Cluster::with(2, |config| {
        config.transport = choice;
        config.reactors = 1;
        config.copiers = 2;
        config.lanes = 2;
    });
    for (key, len) in SIZES.into_iter().enumerate() {
        let key = key as u64;
        let (source, target) = (cluster.filled(0, len, key), cluster.empty(1, len));
        let prepare = |task: usize, spec| {
            cluster.engines[task].prepare(vec![spec], LaunchOptions::default()).wait().unwrap()
        };
        let mut sending = prepare(0, outgoing(&source, 0, 1, key));
        let mut receiving = prepare(1, incoming(&target, 0, 1, key));
        let mut launch = || {
            let (received, sent) = (receiving.launch(&[]), sending.launch(&[]));
            done(&received).unwrap();
            done(&sent).unwrap();
        };
        launch();
        target.fill(0).unwrap();
        // The preparation has threads of its own, which may end later.
        eventually("all that preparing does is done", || {
            let lanes = if choice == TransportChoice::Tcp { 3 } else { 1 };
            let mut links = cluster.engines.iter().flat_map(TransferEngine::links);
            links.all(|link| link.lanes == lanes) && count_dial_and_handshake_threads() == 0
        });
        make_marker_system_call();
        launch();
        make_marker_system_call();
        assert_contents(&target, key);
    }
    for link in cluster.engines[1].links() {
        let moved: Vec<_> = link.bytes.iter().filter(|(_, (_, received))| *received > 8192).collect();
        assert!(moved.len() == 1 && moved[0].0.name() == name, "{name}: {:?}", link.bytes);
    }
}

/// Counts the calls between each two marks in the output of `strace -f`.
fn between_marks(trace: &str) -> Vec<BTreeMap<String, usize>> {
    let mut all = Vec::new();
    let mut now: Option<BTreeMap<String, usize>> = None;
    for line in trace.lines() {
        let Some((_, call)) = line.trim_start().split_once(char::is_whitespace) else { continue };
        // Skips signals, ends of threads, and the second half of a call that another thread's call
        // interrupted.
        let Some((name, arguments)) = call.trim_start().split_once('(') else { continue };
        if !name.chars().all(|letter| letter.is_ascii_alphanumeric() || letter == '_') {
            continue;
        }
        if name == "getppid" {
            match now.take() {
                Some(counts) => all.push(counts),
                None => now = Some(BTreeMap::new()),
            }
        } else if let Some(counts) = &mut now {
            // An eventfd is read and written in words of 8 bytes; a launch makes no other use of these two
            // calls.
            let word = arguments.contains(", 8") || arguments.ends_with("<unfinished ...>");
            let other = ["read", "write"].contains(&name) && !word;
            let name = if other { format!("{name} of more than a word") } else { name.to_owned() };
            *counts.entry(name).or_default() += 1;
        }
    }
    assert!(now.is_none(), "a mark is missing");
    all
}

/// The number of transfers that are launched one by one, and their sizes.
const MANY: usize = 256;
const SMALL: [usize; 3] = [4 << 10, 12 << 10, 40 << 10];

/// Launches many small transfers one after the other, then as one, and marks the begin and the end of each.
#[test]
#[ignore = "a process of another test"]
fn alone_many() {
    let Ok(name) = std::env::var("MUSTER_TEST_CALLS") else { return };
    let (_, choice) = CHOICES.into_iter().find(|(known, _)| *known == name).unwrap();
    let cluster = Cluster::with(2, |config| {
        config.transport = choice;
        config.reactors = 1;
        config.lanes = 1;
    });
    for len in SMALL {
        let sources: Vec<_> = (0..MANY).map(|key| cluster.filled(0, len, key as u64)).collect();
        let targets: Vec<_> = (0..MANY).map(|_| cluster.empty(1, len)).collect();
        let sends: Vec<_> = (0..).zip(&sources).map(|(key, source)| outgoing(source, 0, 1, key)).collect();
        let receives: Vec<_> = (0..).zip(&targets).map(|(key, target)| incoming(target, 0, 1, key)).collect();
        for together in [false, true] {
            let prepare = |task: usize, specs: &[TransferSpec]| -> Vec<_> {
                let groups = specs.chunks(if together { MANY } else { 1 }).map(<[TransferSpec]>::to_vec);
                let prepared =
                    groups.map(|specs| cluster.engines[task].prepare(specs, LaunchOptions::default()));
                prepared.map(|prepared| prepared.wait().unwrap()).collect()
            };
            let (mut sending, mut receiving) = (prepare(0, &sends), prepare(1, &receives));
            let mut launch = || {
                let received: Vec<_> = receiving.iter_mut().map(|prepared| prepared.launch(&[])).collect();
                let sent: Vec<_> = sending.iter_mut().map(|prepared| prepared.launch(&[])).collect();
                received.iter().chain(&sent).for_each(|transfer| assert!(done(transfer).is_ok()));
            };
            launch();
            targets.iter().for_each(|target| target.fill(0).unwrap());
            eventually("all that preparing does is done", || count_dial_and_handshake_threads() == 0);
            make_marker_system_call();
            launch();
            make_marker_system_call();
            (0..).zip(&targets).for_each(|(key, target)| assert_contents(target, key));
        }
    }
}

/// Returns whether processes may be traced here. If not, the running test is recorded as skipped.
fn may_trace() -> bool {
    let tried = Command::new("strace").args(["-f", "-o", "/dev/null", "true"]).output();
    let tried = tried.unwrap_or_else(|error| panic!("strace cannot be run ({error}): tests/run installs it"));
    let why = String::from_utf8_lossy(&tried.stderr);
    assert!(tried.status.success() || is_refusal(&why), "strace fails: {why}");
    if !tried.status.success() {
        skip(Lacking::KernelFeature("to trace processes"));
    }
    tried.status.success()
}

/// Runs a test of this file under `strace -f`. Returns the calls between its marks.
fn traced(test: &str, name: &str) -> Vec<BTreeMap<String, usize>> {
    let file = std::env::temp_dir().join(format!("muster-{test}-{}-{name}", std::process::id()));
    let status = Command::new("strace")
        .args(["-f", "-qq", "-o"])
        .arg(&file)
        .arg(std::env::current_exe().unwrap())
        .args(test_arguments(&format!("calls::{test}")))
        .env("MUSTER_TEST_CALLS", name)
        .status()
        .unwrap();
    let trace = std::fs::read_to_string(&file).unwrap();
    std::fs::remove_file(&file).unwrap();
    assert!(status.success(), "{name}");
    assert!(trace.contains("eventfd2(") && trace.contains("mmap("), "what is not for a launch is seen");
    between_marks(&trace)
}

#[test]
fn the_second_launch_makes_no_system_call_but_those_of_the_path_of_the_bytes() {
    if !may_trace() {
        return;
    }
    for (name, _) in CHOICES {
        let counts = traced("alone_twice", name);
        assert_eq!(counts.len(), SIZES.len(), "{name}: not all was marked");
        for (len, counts) in SIZES.into_iter().zip(counts) {
            println!("{name}, {len} bytes, both sides together: {counts:?}");
            let others: Vec<_> =
                counts.keys().filter(|call| !ALLOWED.iter().any(|(name, _)| name == *call)).collect();
            // If the receiver fetches, nothing goes by a socket: control frames are in the ring.
            let sockets = ["sendmsg", "recvmsg", "readv"];
            let fetched = ["shm", "pvm"].contains(&name);
            assert!(!fetched || !sockets.iter().any(|call| counts.contains_key(*call)), "{name}: {counts:?}");
            assert!(others.is_empty(), "{name}, {len} bytes: {others:?} besides what moves bytes");
        }
    }
}

#[test]
fn many_small_transfers_that_are_launched_as_one_need_hardly_any_system_calls() {
    if !may_trace() {
        return;
    }
    for (name, _) in CHOICES {
        let counts = traced("alone_many", name);
        let ways = SMALL.into_iter().flat_map(|len| [(len, "one by one"), (len, "as one")]);
        assert_eq!(counts.len(), 2 * SMALL.len(), "{name}: not all was marked");
        for ((len, how), counts) in ways.zip(counts) {
            println!("{name}, {MANY} of {len} bytes {how}, both sides together: {counts:?}");
            let calls: usize = counts.values().sum();
            let chunks = (MANY * len).div_ceil(256 << 10);
            assert!(how != "as one" || calls < 100 + 20 * chunks, "{name}, {len} bytes: {calls} calls");
        }
    }
}
