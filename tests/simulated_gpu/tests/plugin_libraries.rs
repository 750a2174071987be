//! The profiler host and libraries: their search, their tables, loading and unloading, and ranks that are processes.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Barrier;

use simulated_gpu::{Counter, Setting, communicator_hash};

use crate::driver::{OK, allocate, start, synchronize};
use crate::isolation::{PeerProcess, run_isolated};
use crate::nccl::{FLOAT, new_id};
use crate::plugin_recorder::{COLL, Call, KERNEL_CHANNEL, calls, started, stopped};
use crate::profiler::{bytes_of, name_plugin};
use crate::rank_processes::{introduce, join};
use crate::ranks::{Rank, on_threads};

/// A folder of libraries, which ends with the test.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        let folder = std::env::temp_dir().join(format!("simulated-nccl-plugin-{}", std::process::id()));
        std::fs::create_dir(&folder).unwrap();
        // SAFETY: no other thread of this process reads the environment yet.
        unsafe { std::env::set_var("PLUGIN_LOG", folder.join("log")) };
        Self(folder)
    }

    /// Compiles a library with the tables of some versions.
    fn compile(&self, name: &str, first: u32, last: u32) -> PathBuf {
        let library = self.0.join(name);
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/plugin.c");
        let mut compiler = Command::new("cc");
        compiler.args(["-shared", "-fPIC", "-o"]).arg(&library).arg(source);
        let status = compiler.args([format!("-DFIRST={first}"), format!("-DLAST={last}")]).status();
        assert!(status.unwrap().success());
        library
    }

    /// Returns the lines of the plug-in's calls, and forgets them.
    fn take_lines(&self) -> Vec<String> {
        let text = std::fs::read_to_string(self.0.join("log")).unwrap_or_default();
        let _ = std::fs::remove_file(self.0.join("log"));
        text.lines().map(str::to_owned).collect()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Starts and ends a communicator of one rank.
fn run_communicator() {
    on_threads(1, Rank::finish);
}

#[test]
fn the_newest_table_is_used_that_both_sides_know() {
    run_isolated("", || {
        let (gpu, folder) = (start(), Folder::new());
        let library = folder.compile("plugin.so", 4, 7);
        name_plugin(library.to_str().unwrap());
        for (nccl, version) in [(22_707, 4), (22_809, 5), (22_907, 6), (23_007, 6), (23_100, 7), (23_203, 7)]
        {
            gpu.set(Setting::NcclVersion, nccl);
            run_communicator();
            assert_eq!(folder.take_lines(), ["load 0", &format!("init {version}"), "finalize 0", "unload 0"]);
        }
        let library = folder.compile("old.so", 3, 5);
        name_plugin(library.to_str().unwrap());
        run_communicator();
        assert_eq!(folder.take_lines()[1], "init 5");
        // NCCL 2.28 does not know its tables. The library is closed, and not tried again.
        let library = folder.compile("new.so", 6, 7);
        name_plugin(library.to_str().unwrap());
        gpu.set(Setting::NcclVersion, 22_809);
        run_communicator();
        assert_eq!(folder.take_lines(), ["load 0", "unload 0"]);
        gpu.set(Setting::NcclVersion, 23_007);
        run_communicator();
        assert_eq!(folder.take_lines(), Vec::<String>::new());
    });
}

#[test]
fn a_library_with_only_older_tables_is_not_used() {
    run_isolated("", || {
        let (gpu, folder) = (start(), Folder::new());
        name_plugin(folder.compile("plugin.so", 3, 3).to_str().unwrap());
        on_threads(2, |rank| {
            assert_eq!(gpu.count(Counter::NcclProfilers), 0);
            let at = allocate(4);
            assert_eq!((rank.all_reduce(at, at, 1, FLOAT, 0), synchronize(rank.stream)), (0, OK));
            rank.finish();
        });
        assert_eq!(folder.take_lines(), ["load 0", "unload 0"]);
    });
}

#[test]
fn a_library_is_loaded_with_the_first_communicator_and_unloaded_with_the_last() {
    run_isolated("", || {
        let (gpu, folder) = (start(), Folder::new());
        name_plugin(folder.compile("plugin.so", 6, 6).to_str().unwrap());
        let barrier = Barrier::new(2);
        assert_eq!(folder.take_lines(), Vec::<String>::new());
        on_threads(2, |rank| {
            barrier.wait();
            assert_eq!(gpu.count(Counter::NcclProfilers), 2);
            barrier.wait();
            if rank.rank == 0 {
                assert_eq!(folder.take_lines(), ["load 0", "init 6", "init 6"]);
                rank.finish();
                assert_eq!(folder.take_lines(), ["finalize 0"]);
                barrier.wait();
            } else {
                barrier.wait();
                // An abort is an end, too.
                assert_eq!(crate::ranks::abort(rank.comm), 0);
                assert_eq!(folder.take_lines(), ["finalize 0", "unload 0"]);
            }
        });
    });
}

#[test]
fn a_library_is_found_by_its_short_name() {
    run_isolated("", || {
        let folder = Folder::new();
        folder.compile("libnccl-profiler-lines.so", 6, 6);
        let mut peer = PeerProcess::start_with("run_with_library", |command| {
            command.env("LD_LIBRARY_PATH", &folder.0).env("NCCL_PROFILER_PLUGIN", "lines")
        });
        assert_eq!(peer.receive(), *b"done");
        assert!(peer.wait().success());
        assert_eq!(folder.take_lines()[..2], ["load 0", "init 6"]);
    });
}

/// A process with one communicator of one rank.
pub fn run_with_library(mut socket: UnixStream) {
    start();
    run_communicator();
    socket.write_all(b"done").unwrap();
}

#[test]
fn no_plugin_is_used_without_its_name() {
    for name in
        [None, Some(""), Some("none"), Some("NONE"), Some("/no/such/library.so"), Some("no-such-name")]
    {
        // One process for each, since NCCL searches once.
        let change = |command: &mut Command| match name {
            Some(name) => drop(command.env("NCCL_PROFILER_PLUGIN", name)),
            None => drop(command.env_remove("NCCL_PROFILER_PLUGIN")),
        };
        let mut peer = PeerProcess::start_with("run_without_plugin", |command| {
            change(command);
            command
        });
        assert_eq!(peer.receive(), *b"done", "{name:?}");
        assert!(peer.wait().success());
    }
}

/// A process whose communicators have no plug-in.
pub fn run_without_plugin(mut socket: UnixStream) {
    let gpu = start();
    on_threads(2, |rank| {
        let at = allocate(4);
        assert_eq!((rank.all_reduce(at, at, 1, FLOAT, 0), synchronize(rank.stream)), (0, OK));
        assert_eq!(gpu.count(Counter::NcclProfilers), 0);
        rank.finish();
    });
    assert!(calls().is_empty());
    socket.write_all(b"done").unwrap();
}

#[test]
fn ranks_in_processes_have_a_plugin_each() {
    run_isolated("", || {
        name_plugin("STATIC_PLUGIN");
        start();
        let id = new_id();
        let mut peers: Vec<_> = (1..3).map(|_| PeerProcess::start("reduce_and_tell", "")).collect();
        peers.iter_mut().zip(1..).for_each(|(peer, rank)| introduce(peer, id, rank, 3));
        let own = reduce_and_tell_own(Rank::join(id, 0, 3));
        assert_eq!(own, (communicator_hash(&bytes_of(&id)), 2));
        for mut peer in peers {
            let [hash, colls] = [(); 2].map(|()| u64::from_le_bytes(peer.receive()));
            assert_eq!((hash, colls), own);
            assert!(peer.wait().success());
        }
    });
}

/// A rank that reduces with its peers, and tells what its plug-in was told.
pub fn reduce_and_tell(mut socket: UnixStream) {
    start();
    let rank = join(&mut socket);
    let (hash, colls) = reduce_and_tell_own(rank);
    socket.write_all(&hash.to_le_bytes()).unwrap();
    socket.write_all(&colls.to_le_bytes()).unwrap();
}

/// Runs two collectives. Returns the communicator's number and the collectives that the plug-in was told.
fn reduce_and_tell_own(rank: Rank) -> (u64, u64) {
    let at = allocate(4);
    for _ in 0..2 {
        assert_eq!(rank.all_reduce(at, at, 1, FLOAT, 0), 0);
    }
    assert_eq!(synchronize(rank.stream), OK);
    rank.finish();
    assert_eq!((started(KERNEL_CHANNEL).len(), stopped(KERNEL_CHANNEL)), (4, 4));
    let hash = calls().into_iter().find_map(|call| match call {
        Call::Init(init) => Some(init.hash),
        _ => None,
    });
    (hash.unwrap(), started(COLL).len() as u64)
}
