//! Reads between two endpoints of one process.

use std::sync::mpsc::Receiver;
use std::time::Duration;

use muster_fabric::{Fabric, FabricUnavailable, RemoteBytes, library_version, providers};

use crate::memory::{Memory, Outcome, connected, open, provider, random_bytes, read, wait};

const MIB: usize = 1 << 20;

#[test]
fn random_pieces_arrive_where_they_belong() {
    let (near, far) = (open(), open());
    let [here, there] = connected(&near, &far);
    let len = 8 * MIB;
    let source = Memory::new(&far, random_bytes(1, len));
    let mut target = Memory::new(&near, vec![0; len]);
    let mut random = fastrand::Rng::with_seed(2);
    let mut cuts: Vec<usize> = (0..300).map(|_| random.usize(..len)).collect();
    cuts.extend([0, len]);
    cuts.sort_unstable();
    let mut pieces: Vec<_> =
        cuts.windows(2).map(|cut| cut[0]..cut[1]).filter(|piece| !piece.is_empty()).collect();
    random.shuffle(&mut pieces);
    // Many more than a provider takes at a time.
    let told: Vec<Receiver<Outcome>> = pieces
        .into_iter()
        .map(|piece| {
            let from = source.remote(piece.start);
            read(&here, &mut target, piece, from)
        })
        .collect();
    told.iter().for_each(|told| wait(told).unwrap());
    assert!(target.bytes == source.bytes);
    // In the other direction, too.
    let from = target.remote(5);
    let mut back = Memory::new(&far, vec![0; MIB]);
    wait(&read(&there, &mut back, 0..MIB, from)).unwrap();
    assert!(back.bytes[..] == target.bytes[5..5 + MIB]);
}

#[test]
fn memory_that_was_withdrawn_is_not_read() {
    let (near, far) = (open(), open());
    let [here, _there] = connected(&near, &far);
    let source = Memory::new(&far, random_bytes(3, 4096));
    let mut target = Memory::new(&near, vec![0xee; 4096]);
    wait(&read(&here, &mut target, 0..100, source.remote(0))).unwrap();
    let from = source.remote(0);
    drop(source.registered);
    let outcome = wait(&read(&here, &mut target, 100..4096, from));
    assert!(outcome.is_err(), "{outcome:?}");
    assert!(target.bytes[100..].iter().all(|byte| *byte == 0xee));
}

#[test]
fn bytes_beyond_registered_memory_are_not_read() {
    let (near, far) = (open(), open());
    for (offset, len) in [(4000, 97), (4096, 1), (1 << 40, 1)] {
        let [here, _there] = connected(&near, &far);
        let source = Memory::new(&far, random_bytes(3, 4096));
        let mut target = Memory::new(&near, vec![0xee; 4096]);
        let RemoteBytes { key, address } = source.remote(0);
        let from = RemoteBytes { key, address: address.wrapping_add(offset) };
        let outcome = wait(&read(&here, &mut target, 0..len, from));
        assert!(outcome.is_err(), "{offset}: {outcome:?}");
        assert!(target.bytes.iter().all(|byte| *byte == 0xee));
    }
}

#[test]
fn closing_an_endpoint_ends_all_reads_and_nothing_changes_afterwards() {
    let (near, far) = (open(), open());
    let source = Memory::new(&far, vec![7; 64 * MIB]);
    for turn in 0..5 {
        let [here, there] = connected(&near, &far);
        let mut target = Memory::new(&near, vec![0; 64 * MIB]);
        let told: Vec<_> = (0..64)
            .map(|n| read(&here, &mut target, n * MIB..(n + 1) * MIB, source.remote(n * MIB)))
            .collect();
        if turn > 0 {
            wait(&read(&here, &mut Memory::new(&near, vec![0; 9]), 0..9, source.remote(0))).unwrap();
        }
        // The reader's end, or that of the owner: then the reader closes as well.
        if turn % 2 == 1 {
            assert!(there.close());
        }
        assert!(here.close());
        let now = target.bytes.to_vec();
        let outcomes: Vec<Outcome> = told.iter().map(wait).collect();
        std::thread::sleep(Duration::from_millis(100));
        assert!(target.bytes[..] == now[..], "turn {turn}");
        let bytes_of = |n: usize| &now[n * MIB..(n + 1) * MIB];
        let in_place = |n: usize| bytes_of(n).iter().all(|byte| *byte == 7);
        assert!(outcomes.iter().enumerate().all(|(n, outcome)| outcome.is_err() || in_place(n)));
        assert!(here.connect(&[0; 16]).is_err() && here.address().is_err() && here.close());
    }
}

#[test]
fn one_endpoint_is_closed_and_those_of_other_peers_go_on() {
    let (near, far, third) = (open(), open(), open());
    let ([here, _there], [other, _third]) = (connected(&near, &far), connected(&near, &third));
    let source = Memory::new(&third, random_bytes(9, 16 * MIB));
    let mut target = Memory::new(&near, vec![0; 16 * MIB]);
    let told: Vec<_> =
        (0..16).map(|n| read(&other, &mut target, n * MIB..(n + 1) * MIB, source.remote(n * MIB))).collect();
    assert!(here.close());
    told.iter().for_each(|told| wait(told).unwrap());
    assert!(target.bytes == source.bytes);
}

#[test]
fn a_fabric_that_is_not_there_is_named() {
    let (major, minor) = library_version().unwrap();
    assert!((major, minor) >= (1, 9), "{major}.{minor}");
    let all = providers().unwrap();
    assert!(all.iter().any(|found| found.provider == provider()), "{all:?}");
    assert_eq!(open().provider().provider, provider());
    let refused = Fabric::open("abacus", None).unwrap_err();
    assert!(
        matches!(&refused, FabricUnavailable::Provider { provider, .. } if provider == "abacus"),
        "{refused}"
    );
    assert!(refused.to_string().contains("abacus"), "{refused}");
    assert!(Fabric::open("a\0b", None).is_err());
    // An address that this host does not have.
    if provider() == "tcp;ofi_rxm" {
        let elsewhere = Fabric::open(&provider(), Some([192, 0, 2, 1].into()));
        assert!(elsewhere.is_err() || elsewhere.unwrap().open_endpoint().is_err());
    }
}

#[test]
fn an_endpoint_without_a_peer_reads_nothing() {
    let fabric = open();
    let endpoint = fabric.open_endpoint().unwrap();
    for wrong in [&[][..], &[1, 2, 3], &[0; 300]] {
        assert!(endpoint.connect(wrong).is_err());
    }
    let bytes = std::ptr::NonNull::from(vec![0_u8; 8].leak()).cast();
    let from = RemoteBytes { key: 1, address: 0 };
    #[allow(unsafe_code, reason = "lends memory that is never freed")]
    // SAFETY: as above.
    let refused = unsafe { endpoint.read(bytes, 8, None, from, |_| panic!("it is not called")) };
    assert!(refused.unwrap_err().is_closed());
}
