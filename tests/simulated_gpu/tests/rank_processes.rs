//! NCCL between processes: contents, and the death of a rank.

use std::io::Write;
use std::os::unix::net::UnixStream;

use simulated_gpu::{Counter, Setting};

use crate::driver::{NOT_READY, OK, contents, query, start, synchronize};
use crate::isolation::{PeerProcess, read, run_isolated, wait_until};
use crate::nccl::{REMOTE_ERROR, UniqueId, new_id};
use crate::peers::wait_for_socket_close;
use crate::ranks::{Rank, abort, async_error};

/// Sends a rank its id, number and count.
pub fn introduce(peer: &mut PeerProcess, id: UniqueId, rank: u8, ranks: u8) {
    peer.send(&id.internal.map(|byte| byte as u8));
    peer.send(&[rank, ranks]);
}

/// Joins as the test has said.
pub fn join(socket: &mut UnixStream) -> Rank {
    let id = UniqueId { internal: read::<128>(socket).map(|byte| byte as std::ffi::c_char) };
    let [rank, ranks] = read(socket);
    Rank::join(id, rank.into(), ranks.into())
}

/// A rank that takes part in a ring and ends.
pub fn join_ring(mut socket: UnixStream) {
    start();
    let rank = join(&mut socket);
    rank.check_ring(&[4097, 700_000]);
    rank.finish();
    socket.write_all(b"done").unwrap();
}

/// A rank that begins a group which never moves, on its side.
pub fn join_and_hang(mut socket: UnixStream) {
    let gpu = start();
    let rank = join(&mut socket);
    gpu.set(Setting::NcclHang, 1);
    rank.hang(0, 1 << 20);
    wait_until("the group hangs", || gpu.count(Counter::NcclHangs) == 1);
    socket.write_all(b"hangs").unwrap();
    wait_for_socket_close(socket);
}

/// A process that ends while a group hangs and a start is in progress.
pub fn leave_stuck_group(mut socket: UnixStream) {
    let gpu = start();
    gpu.set(Setting::NcclHang, 1);
    let rank = Rank::join(new_id(), 0, 1);
    rank.hang(0, 4);
    wait_until("the group hangs", || gpu.count(Counter::NcclHangs) == 1);
    crate::ranks::begin_communicator_start(new_id(), 0, 2);
    socket.write_all(b"stuck").unwrap();
}

#[test]
fn contents_go_around_rings_of_two_to_eight_processes() {
    run_isolated("", || {
        start();
        for ranks in [2u8, 3, 5, 8] {
            let id = new_id();
            let mut peers: Vec<_> = (1..ranks).map(|_| PeerProcess::start("join_ring", "")).collect();
            peers.iter_mut().zip(1..).for_each(|(peer, rank)| introduce(peer, id, rank, ranks));
            let own = Rank::join(id, 0, ranks.into());
            own.check_ring(&[4097, 700_000]);
            own.finish();
            for mut peer in peers {
                assert_eq!(peer.receive(), *b"done");
                assert!(peer.wait().success());
            }
        }
    });
}

/// Starts a peer that hangs in the middle of a group with this process, which waits for it.
fn hang_with_peer() -> (Rank, u64, PeerProcess) {
    let (id, mut peer) = (new_id(), PeerProcess::start("join_and_hang", ""));
    introduce(&mut peer, id, 1, 2);
    let own = Rank::join(id, 0, 2);
    let to = own.hang(1, 1 << 20);
    assert_eq!(peer.receive(), *b"hangs");
    assert_eq!((query(own.stream), async_error(own.comm)), (NOT_READY, 0));
    (own, to, peer)
}

#[test]
fn a_rank_that_is_killed_in_a_group_is_a_remote_error() {
    run_isolated("", || {
        start();
        let (own, to, peer) = hang_with_peer();
        peer.kill();
        wait_until("the error is told", || async_error(own.comm) == REMOTE_ERROR);
        assert!(own.is_busy());
        assert_eq!((abort(own.comm), synchronize(own.stream)), (0, OK));
        assert!(contents(to, 1 << 20).iter().all(|byte| *byte == 0), "nothing arrived");
    });
}

#[test]
fn a_death_is_silent_by_setting() {
    run_isolated("nccl_silent_death=1", || {
        let gpu = start();
        let (own, _, peer) = hang_with_peer();
        assert_eq!(gpu.count(Counter::NcclHangs), 0);
        peer.kill();
        // Both directions have met the end of the peer, and wait.
        wait_until("the group hangs", || gpu.count(Counter::NcclHangs) == 2);
        assert_eq!((async_error(own.comm), query(own.stream)), (0, NOT_READY));
        assert_eq!((abort(own.comm), synchronize(own.stream)), (0, OK));
    });
}

#[test]
fn a_rank_that_is_killed_before_all_are_there_leaves_the_start_in_progress() {
    run_isolated("", || {
        start();
        let (id, mut peer) = (new_id(), PeerProcess::start("join_ring", ""));
        introduce(&mut peer, id, 1, 3);
        let (comm, _) = crate::ranks::begin_communicator_start(id, 0, 3);
        peer.kill();
        assert_eq!(async_error(comm), crate::nccl::IN_PROGRESS);
        assert_eq!(abort(comm), 0);
    });
}
