//! Members in several processes: contents, and processes that are killed.

use std::io::{Read, Write};
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use muster_cliques::{CliqueError, CliqueId, CliqueOptions, GpuClique};
use simulated_gpu::{Setting, SimulatedGpu};

use crate::members::{
    assert_silent, contents, ended, filled, join, key_of, member, nccl, pattern, ready, receive, run,
    run_on_simulated_nccl, send, wait,
};

const ROLE: &str = "MUSTER_CLIQUE_ROLE";
const LEN: usize = 200_000;

/// A process with one member.
struct PeerProcess {
    child: Child,
    socket: UnixStream,
}

impl PeerProcess {
    fn start(role: &str, id: CliqueId, task: u8, tasks: u8) -> Self {
        let (mut socket, other) = UnixStream::pair().unwrap();
        socket.set_read_timeout(Some(std::time::Duration::from_secs(30))).unwrap();
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "processes::peer", "--ignored", "--nocapture", "--test-threads=1"]);
        let command = command.env(ROLE, role).stdin(OwnedFd::from(other)).stdout(Stdio::null());
        let child = command.spawn().unwrap();
        socket.write_all(id.as_bytes()).unwrap();
        socket.write_all(&[task, tasks]).unwrap();
        Self { child, socket }
    }

    /// Waits for a sign of the process.
    fn expect_sign(&mut self) {
        let mut sign = [0];
        self.socket.read_exact(&mut sign).unwrap();
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for PeerProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The process of a peer. Its standard input is the socket.
#[test]
#[ignore = "a process of another test"]
fn peer() {
    // SAFETY: nothing else owns the descriptor.
    let mut socket = unsafe { UnixStream::from_raw_fd(0) };
    let mut id = [0; CliqueId::LEN];
    socket.read_exact(&mut id).unwrap();
    let mut numbers = [0; 2];
    socket.read_exact(&mut numbers).unwrap();
    let [task, tasks] = numbers.map(u32::from);
    let role = std::env::var(ROLE).unwrap();
    nccl();
    if role == "never joins" {
        socket.write_all(b"!").unwrap();
    } else {
        let clique = join(&key_of(tasks), CliqueId::from_bytes(id), task, CliqueOptions::default());
        if role == "joins" {
            socket.write_all(b"!").unwrap();
        }
        assert_eq!(wait(&ready(&clique)), Ok(()));
        if role == "hangs" {
            SimulatedGpu::load().set(Setting::NcclHang, 1);
        }
        let _memory = exchange(&clique, task as usize, tasks as usize, |told| match role.as_str() {
            "rings" => assert_eq!(wait(told), Ok(())),
            _ => assert_silent(told),
        });
        socket.write_all(b"!").unwrap();
    }
    let _until_the_test_ends = socket.read(&mut [0]);
}

/// Sends to the next member and receives from the previous one; `then` waits. Returns what was received.
fn exchange(
    clique: &Arc<GpuClique>,
    rank: usize,
    ranks: usize,
    then: impl FnOnce(&crate::members::OutcomeReceiver),
) -> Vec<u8> {
    let [from, to] = [filled(0, LEN, rank as u64), filled(0, LEN, 99)];
    let [next, previous] = [1, ranks - 1].map(|step| (rank + step) % ranks);
    let told = run(clique, &[send(rank, next, &from), receive(rank, previous, &to)]);
    then(&told);
    let received = contents(0, &to);
    // The operations may be under way.
    std::mem::forget((from, to));
    received
}

#[test]
fn contents_go_around_processes() {
    run_on_simulated_nccl("", || {
        for tasks in [2u8, 5, 8] {
            let id = nccl().new_id().unwrap();
            let mut peers: Vec<_> =
                (1..tasks).map(|task| PeerProcess::start("rings", id, task, tasks)).collect();
            let own = join(&key_of(tasks.into()), id, 0, CliqueOptions::default());
            let received = exchange(&own, 0, tasks.into(), |told| assert_eq!(wait(told), Ok(())));
            assert!(received == pattern(LEN, u64::from(tasks) - 1));
            peers.iter_mut().for_each(PeerProcess::expect_sign);
        }
    });
}

#[test]
fn a_process_that_is_killed_in_a_batch_ends_the_clique() {
    run_on_simulated_nccl("", || {
        let id = nccl().new_id().unwrap();
        let mut peer = PeerProcess::start("hangs", id, 1, 2);
        let own = join(&key_of(2), id, 0, CliqueOptions::default());
        exchange(&own, 0, 2, |told| {
            peer.expect_sign();
            assert_silent(told);
            peer.kill();
            assert!(matches!(wait(told), Err(CliqueError::Nccl(_))));
        });
        assert!(matches!(ended(&own), Err(CliqueError::Nccl(_))));
    });
}

#[test]
fn a_death_that_nccl_does_not_notice_ends_by_the_membership() {
    run_on_simulated_nccl("nccl_silent_death=1", || {
        let id = nccl().new_id().unwrap();
        let mut peers = [1, 2].map(|task| PeerProcess::start("hangs", id, task, 3));
        let own = join(&key_of(3), id, 0, CliqueOptions::default());
        exchange(&own, 0, 3, |told| {
            peers.iter_mut().for_each(PeerProcess::expect_sign);
            peers[1].kill();
            assert_silent(told);
            own.end(CliqueError::MemberLost(member(2)));
            assert_eq!(wait(told), Err(CliqueError::MemberLost(member(2))));
        });
    });
}

#[test]
fn a_process_that_is_killed_during_the_start_leaves_it_to_its_limit() {
    run_on_simulated_nccl("", || {
        for role in ["never joins", "joins"] {
            let id = nccl().new_id().unwrap();
            let mut peer = PeerProcess::start(role, id, 1, 3);
            peer.expect_sign();
            let own = join(&key_of(3), id, 0, crate::members::quick());
            peer.kill();
            assert!(matches!(wait(&ready(&own)), Err(CliqueError::StartTimedOut { .. })));
            ended(&own).unwrap_err();
        }
    });
}
