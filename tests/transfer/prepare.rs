//! Tests of preparations. One attempt to connect serves all requests that wait for it, and is cancelled when no
//! request waits. Connections to several peers are made in parallel.

use std::net::{SocketAddr, TcpListener};
use std::time::{Duration, Instant};

use muster::transfer::{
    Buffer, BufferLayout, LaunchOptions, MemoryError, PrepareError, TransferError, TransportChoice,
};

use crate::cluster::{Cluster, PATIENCE, done, eventually, incoming, outgoing};

/// Returns addresses at which a socket listens but never answers.
fn start_silent_listeners(count: usize) -> (Vec<TcpListener>, Vec<SocketAddr>) {
    let listeners: Vec<_> = (0..count).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
    let addresses = listeners.iter().map(|listener| listener.local_addr().unwrap()).collect();
    (listeners, addresses)
}

/// Returns a cluster whose last `dark` tasks cannot be reached.
fn with_dark_peers(count: usize, dark: usize) -> (Cluster, Vec<TcpListener>) {
    let mut cluster = Cluster::with(count, |config| config.transport = TransportChoice::Tcp);
    let (listeners, addresses) = start_silent_listeners(dark);
    let mut all: Vec<_> =
        cluster.engines[..count - dark].iter().map(|engine| engine.address().tcp[0]).collect();
    all.extend(addresses);
    cluster.announce_other_addresses(all);
    (cluster, listeners)
}

#[test]
fn a_preparation_that_is_dropped_ends_the_making_of_its_connection() {
    let (cluster, _listeners) = with_dark_peers(2, 1);
    let source = cluster.filled(0, 1000, 1);
    let engine = &cluster.engines[0];
    let mut preparing = engine.prepare(vec![outgoing(&source, 0, 1, 1)], LaunchOptions::default());
    assert!(preparing.wait_for(Duration::from_millis(50)).is_none());
    let other = engine.prepare(vec![outgoing(&source, 0, 1, 2)], LaunchOptions::default());
    assert_eq!(engine.clique_cache_stats().0, 1);
    drop(preparing);
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(engine.clique_cache_stats().0, 1, "somebody else waits for it");
    drop(other);
    eventually("nobody waits, and it is not made", || engine.clique_cache_stats().0 == 0);
}

#[test]
fn a_transfer_that_is_cancelled_before_its_peers_are_reached_leaves_its_buffers_at_once() {
    let (cluster, _listeners) = with_dark_peers(2, 1);
    let source = cluster.filled(0, 1000, 1);
    let engine = &cluster.engines[0];
    let transfer = engine.transfer(&[], vec![outgoing(&source, 0, 1, 1)], LaunchOptions::default());
    assert!(transfer.cancel("not needed").wait_for(PATIENCE));
    source.fill(7).unwrap();
    assert!(matches!(done(&transfer), Err(TransferError::Cancelled { .. })));
    eventually("its connection is not made", || engine.clique_cache_stats().0 == 0);
    source.fill(8).unwrap();
}

#[test]
fn prepare_dials_all_peers_at_once_and_reports_the_first_failure() {
    const DARK: usize = 6;
    let (cluster, listeners) = with_dark_peers(DARK + 1, DARK);
    let source = cluster.filled(0, 1000, 1);
    let specs = (1..=DARK).map(|task| outgoing(&source, 0, task, task as u64)).collect();
    let preparing = cluster.engines[0].prepare(specs, LaunchOptions::default());
    for (at, listener) in listeners.iter().enumerate() {
        // Each is dialled although none has answered.
        let began = Instant::now();
        listener.accept().unwrap();
        println!("task {} was dialled after {:?}", at + 1, began.elapsed());
    }
    // Peers at whose addresses nothing listens any more.
    drop(listeners);
    let error = preparing.wait().unwrap_err();
    assert!(matches!(error, PrepareError::Clique { .. }), "{error}");
}

#[test]
fn buffers_bring_their_layouts() {
    let cluster = Cluster::new(2, TransportChoice::Auto);
    let layout = BufferLayout::array("f32", 4, &[25, 10], "P(d)").unwrap();
    let other = BufferLayout::array("f32", 4, &[10, 25], "P(d)").unwrap();
    let to = crate::cluster::device(1);
    for (said, same) in [(layout.clone(), true), (other, false)] {
        let source = cluster.filled(0, 1000, 1);
        let key = muster::transfer::TransferKey(9);
        let sent = cluster.engines[0]
            .cross_host_send(&[source.full_span().with_layout(said)], &[to], &[key])
            .unwrap();
        let arena = muster::transfer::Arena::new(4096).unwrap();
        let from = crate::cluster::device(0);
        let (buffers, received) = cluster.engines[1]
            .cross_host_receive(&arena, to, std::slice::from_ref(&layout), &[from], &[key])
            .unwrap();
        if same {
            done(&sent).unwrap();
            done(&received).unwrap();
            crate::cluster::assert_contents(&buffers[0], 1);
        } else {
            for transfer in [&sent, &received] {
                let error = done(transfer).unwrap_err();
                assert!(matches!(error, TransferError::LayoutMismatch { .. }), "{error}");
            }
        }
    }
}

#[test]
fn memory_of_others_is_used_as_it_is_and_kept_until_the_last_transfer_of_it() {
    /// Memory that reports when it is dropped.
    struct LentBuffer(Box<[u8; 5000]>, std::sync::mpsc::Sender<()>);
    impl AsMut<[u8]> for LentBuffer {
        fn as_mut(&mut self) -> &mut [u8] {
            &mut self.0[..]
        }
    }
    impl Drop for LentBuffer {
        fn drop(&mut self) {
            self.1.send(()).unwrap();
        }
    }
    for choice in [TransportChoice::Auto, TransportChoice::Tcp] {
        let cluster = Cluster::new(2, choice);
        let (gone, told) = std::sync::mpsc::channel();
        let mut memory = Box::new([0; 5000]);
        memory.copy_from_slice(&crate::cluster::contents(5000, 3));
        let place = memory.as_ptr();
        let buffer = Buffer::foreign(LentBuffer(memory, gone));
        buffer.with_bytes(|bytes| assert_eq!(bytes.as_ptr(), place)).unwrap();
        let target = cluster.empty(1, 5000);
        let sent =
            cluster.engines[0].transfer(&[], vec![outgoing(&buffer, 0, 1, 1)], LaunchOptions::default());
        drop(buffer);
        std::thread::sleep(Duration::from_millis(50));
        assert!(told.try_recv().is_err(), "a transfer still needs it");
        let received =
            cluster.engines[1].transfer(&[], vec![incoming(&target, 0, 1, 1)], LaunchOptions::default());
        done(&sent).unwrap();
        done(&received).unwrap();
        crate::cluster::assert_contents(&target, 3);
        told.recv_timeout(PATIENCE).expect("its owner is let go of");
    }
}

#[test]
#[expect(unsafe_code, reason = "lends memory to a transfer by its address")]
fn memory_that_is_only_read_is_sent_and_never_received_into() {
    /// Memory that reports when it is dropped.
    struct DropReportingVector(#[expect(unused, reason = "kept")] Vec<u8>, std::sync::mpsc::Sender<()>);
    impl Drop for DropReportingVector {
        fn drop(&mut self) {
            self.1.send(()).unwrap();
        }
    }
    for choice in [TransportChoice::Auto, TransportChoice::Tcp] {
        let cluster = Cluster::new(2, choice);
        let (gone, told) = std::sync::mpsc::channel();
        let memory = crate::cluster::contents(100_000, 3);
        let (address, len) = (memory.as_ptr(), memory.len());
        // SAFETY: the owner keeps the vector, which nothing writes.
        let lent = unsafe { Buffer::read_only(address, len, 1, Box::new(DropReportingVector(memory, gone))) };
        let buffer = lent.unwrap();
        let target = cluster.arenas[1].allocate(len).unwrap();
        let refused =
            cluster.engines[0].transfer(&[], vec![incoming(&buffer, 1, 0, 1)], LaunchOptions::default());
        let error = done(&refused).unwrap_err();
        assert!(error.to_string().contains("read-only"), "{error}");
        let sent =
            cluster.engines[0].transfer(&[], vec![outgoing(&buffer, 0, 1, 2)], LaunchOptions::default());
        drop((buffer, refused));
        assert!(told.recv_timeout(Duration::from_millis(50)).is_err(), "a transfer still needs it");
        // A program keeps the address of the destination, for example in an array.
        let export = target.export().unwrap();
        let held =
            cluster.engines[1].transfer(&[], vec![incoming(&target, 0, 1, 2)], LaunchOptions::default());
        assert_eq!(
            done(&held).unwrap_err(),
            TransferError::Memory(MemoryError::Exported { exports: 1 }),
            "nothing may change what it sees"
        );
        assert!(done(&sent).is_err());
        drop((export, sent));
        told.recv_timeout(PATIENCE).expect("its owner is dropped");
        // The same without one.
        let memory = crate::cluster::contents(100_000, 3);
        let address = memory.as_ptr();
        let (gone, told) = std::sync::mpsc::channel();
        // SAFETY: as above.
        let lent = unsafe { Buffer::read_only(address, len, 1, Box::new(DropReportingVector(memory, gone))) };
        let specs = vec![outgoing(&lent.unwrap(), 0, 1, 3)];
        let sent = cluster.engines[0].transfer(&[], specs, LaunchOptions::default());
        let specs = vec![incoming(&target, 0, 1, 3)];
        let received = cluster.engines[1].transfer(&[], specs, LaunchOptions::default());
        done(&sent).unwrap();
        done(&received).unwrap();
        crate::cluster::assert_contents(&target, 3);
        drop(sent);
        told.recv_timeout(PATIENCE).expect("its owner is dropped");
        assert!(told.try_recv().is_err());
    }
}
