//! Tests transfers between GPUs of one host: the receiver's GPU copies from the sender's memory, and no byte passes through
//! host memory. Each test has a process of its own, as in `gpu_memory.rs`.
#![allow(unsafe_code, reason = "lends memory of a GPU, as a program does")]

use std::time::Duration;

use muster::transfer::{Arena, Buffer, LaunchOptions, TransferError, TransportChoice, TransportKind};
use muster_gpu::DeviceMemory;
use simulated_gpu::{Counter, Setting};

use crate::cluster::{PATIENCE, contents, done, eventually, incoming, outgoing};
use crate::gpu_cluster::{GpuCluster, Memory, read};
use crate::gpu_driver::{open_gpu, run_on_any_gpu, run_on_simulated_gpu};

const MIB: usize = 1 << 20;
/// The bytes of one copy of a GPU, and how many copies of a launch are under way at a time.
const CHUNK: usize = 8 * MIB;
const CHUNKS_IN_FLIGHT: usize = 3;

/// Returns the bytes that the receiver has received by a transport.
fn received_by(gpus: &GpuCluster, kind: TransportKind) -> u64 {
    let links = gpus.cluster.engines[1].links();
    let bytes = links.iter().flat_map(|link| link.bytes).filter(|(by, _)| *by == kind);
    bytes.map(|(_, (_, received))| received).sum()
}

#[test]
fn no_byte_passes_through_host_memory() {
    run_on_any_gpu("devices=2", || {
        for choice in [TransportChoice::Auto, TransportChoice::Shm] {
            let gpus = GpuCluster::over(choice);
            let mut total = 0;
            for (key, len) in [8193, 65_537, CHUNK, CHUNK + 1, 5 * CHUNK + 3].into_iter().enumerate() {
                let seed = key as u64;
                let (source, target) =
                    (gpus.filled(0, Memory::Gpu, len, seed), gpus.empty(1, Memory::Gpu, len));
                let pinned = gpus.count(Counter::PinnedRanges);
                let copies = gpus.count(Counter::Copies) + len.div_ceil(CHUNK) as i64;
                let (sent, received) = gpus.cluster.send(0, &source, 1, &target, seed);
                assert_eq!((done(&sent).err(), done(&received).err()), (None, None), "{choice:?} {len}");
                let what = format!("{choice:?} {len}");
                gpus.assert_count(Counter::PinnedRanges, pinned, &what);
                gpus.assert_count(Counter::Copies, copies, &what);
                assert!(read(&target) == contents(len, seed), "{choice:?} {len}");
                total += len as u64;
            }
            assert_eq!(received_by(&gpus, TransportKind::Gpu), total, "{choice:?}");
        }
    });
}

#[test]
fn many_pieces_between_several_gpus_move_in_one_request() {
    run_on_any_gpu("devices=4", || {
        let gpus = GpuCluster::over(TransportChoice::Auto);
        let more = [2, 3].map(|device| Arena::on_gpu(&open_gpu(device), 128 * MIB).unwrap());
        let mut random = fastrand::Rng::with_seed(5);
        let (mut sends, mut receives, mut targets) = (Vec::new(), Vec::new(), Vec::new());
        for key in 0..200 {
            let len = if key % 50 == 0 { random.usize(0..10 * MIB) } else { random.usize(0..40_000) };
            let [from, to] = [0, 1].map(|task| match random.bool() {
                true => gpus.arenas[task].allocate(len).unwrap(),
                false => more[task].allocate(len).unwrap(),
            });
            from.write_contents(0, &contents(len, key)).unwrap();
            to.fill(0xee).unwrap();
            sends.push(outgoing(&from, 0, 1, key));
            receives.push(incoming(&to, 0, 1, key));
            targets.push((to, contents(len, key)));
        }
        random.shuffle(&mut receives);
        let engines = &gpus.cluster.engines;
        let received = engines[1].transfer(&[], receives, LaunchOptions::default());
        let sent = engines[0].transfer(&[], sends, LaunchOptions::default());
        assert_eq!((done(&sent).err(), done(&received).err()), (None, None));
        let total: usize = targets.iter().map(|(_, bytes)| bytes.len()).sum();
        assert_eq!(received_by(&gpus, TransportKind::Gpu), total as u64);
        assert!(targets.iter().all(|(target, bytes)| read(target) == *bytes));
    });
}

#[test]
fn bytes_that_a_gpu_cannot_reach_go_through_host_memory() {
    run_on_simulated_gpu("devices=2;peer_access=0", || {
        let gpus = GpuCluster::over(TransportChoice::Auto);
        let len = 3 * MIB;
        let (source, target) = (gpus.filled(0, Memory::Gpu, len, 1), gpus.empty(1, Memory::Gpu, len));
        for key in 0..3 {
            gpus.send_to_end(&source, &target, key);
        }
        assert!(read(&target) == contents(len, 1));
        let by = [TransportKind::Unix, TransportKind::Gpu].map(|kind| received_by(&gpus, kind));
        assert_eq!(by, [3 * len as u64, 0]);
        assert_eq!(gpus.simulated().count(Counter::Imports), 0, "a refused import leaves nothing behind");
        gpus.assert_no_copy_blocked();
    });
}

#[test]
fn memory_that_the_program_allocated_goes_through_host_memory() {
    run_on_any_gpu("devices=2", || {
        let gpus = GpuCluster::over(TransportChoice::Auto);
        let (gpu, len) = (open_gpu(0), 2 * MIB);
        let own = DeviceMemory::allocate(&gpu, len).unwrap();
        let address = own.address();
        // SAFETY: the memory lives as long as its owner.
        let lent = unsafe { DeviceMemory::of_program(&gpu, address, len, Box::new(own)) };
        let source = Buffer::on_device(lent.unwrap());
        source.write_contents(0, &contents(len, 4)).unwrap();
        let target = gpus.empty(1, Memory::Gpu, len);
        gpus.send_to_end(&source, &target, 1);
        assert!(read(&target) == contents(len, 4));
        assert_eq!(received_by(&gpus, TransportKind::Gpu), 0);
    });
}

#[test]
fn a_cancelled_transfer_asks_for_no_further_copy_and_then_nothing_changes() {
    run_on_simulated_gpu("devices=2", || {
        let gpus = GpuCluster::over(TransportChoice::Auto);
        let len = 6 * CHUNK;
        let (source, target) = (gpus.filled(0, Memory::Gpu, len, 1), gpus.empty(1, Memory::Gpu, len));
        for round in 0..6 {
            let copies = gpus.simulated().count(Counter::Copies);
            gpus.simulated().set(Setting::HoldCopies, 1);
            let (sent, received) = gpus.cluster.send(0, &source, 1, &target, round);
            eventually("a copy is under way", || gpus.simulated().count(Counter::HeldCopies) > 0);
            let proof = if round % 2 == 0 { sent.cancel("enough") } else { received.cancel("enough") };
            assert!(!proof.wait_for(Duration::from_millis(5)), "a copy is under way");
            gpus.simulated().set(Setting::HoldCopies, 0);
            assert!(proof.wait_for(PATIENCE));
            for transfer in [&sent, &received] {
                assert!(matches!(done(transfer), Err(TransferError::Cancelled { .. })));
            }
            let copies = (gpus.simulated().count(Counter::Copies) - copies) as usize;
            assert!((1..=CHUNKS_IN_FLIGHT).contains(&copies), "{copies}");
            let now = read(&target);
            assert!(now[CHUNKS_IN_FLIGHT * CHUNK..].iter().all(|byte| *byte == 0xee));
            // The sender may write its buffer again, and no byte of that arrives.
            source.write_contents(0, &[9; 1000]).unwrap();
            std::thread::sleep(Duration::from_millis(2));
            assert!(read(&target) == now);
            source.write_contents(0, &contents(1000, 1)).unwrap();
        }
    });
}

#[test]
fn bytes_that_were_read_after_the_sender_took_its_memory_back_do_not_count() {
    run_on_simulated_gpu("devices=2", || {
        let mut gpus = GpuCluster::over(TransportChoice::Auto);
        let len = 2 * CHUNK;
        let (source, target) = (gpus.filled(0, Memory::Gpu, len, 1), gpus.empty(1, Memory::Gpu, len));
        gpus.simulated().set(Setting::HoldCopies, 1);
        let (sent, received) = gpus.cluster.send(0, &source, 1, &target, 1);
        eventually("a copy is under way", || gpus.simulated().count(Counter::HeldCopies) > 0);
        drop(gpus.cluster.engines.remove(0));
        assert!(done(&sent).is_err());
        // The program has its buffer back while the other GPU still reads it: its write ends when copies move again.
        let writer = std::thread::spawn(move || source.write_contents(0, &contents(len, 2)));
        std::thread::sleep(Duration::from_millis(20));
        gpus.simulated().set(Setting::HoldCopies, 0);
        assert_eq!(writer.join().unwrap(), Ok(()));
        let outcome = done(&received);
        assert!(matches!(outcome, Err(TransferError::PeerDead { .. })), "{outcome:?}");
    });
}

#[test]
fn a_peer_unmaps_what_its_owner_frees_and_what_a_connection_that_ended_had() {
    run_on_any_gpu("devices=2", || {
        let gpus = GpuCluster::over(TransportChoice::Auto);
        let target = gpus.empty(1, Memory::Gpu, MIB);
        for round in 0..20 {
            let arena = Arena::on_gpu(&open_gpu(0), 4 * MIB).unwrap();
            let source = arena.allocate(MIB).unwrap();
            source.write_contents(0, &contents(MIB, round)).unwrap();
            gpus.send_to_end(&source, &target, round);
            assert!(read(&target) == contents(MIB, round));
            gpus.assert_count(Counter::Imports, 1, "it is mapped once");
            drop((source, arena));
            eventually("the memory is unmapped", || gpus.count(Counter::Imports) == 0);
        }
        let source = gpus.filled(0, Memory::Gpu, MIB, 77);
        gpus.send_to_end(&source, &target, 77);
        gpus.assert_count(Counter::Imports, 1, "it is mapped once");
        let GpuCluster { simulated, cluster, arenas } = gpus;
        drop((cluster, arenas));
        eventually("the memory is unmapped", || {
            simulated.is_none_or(|driver| driver.count(Counter::Imports) == 0)
        });
    });
}

#[test]
fn a_gpu_that_hangs_or_is_lost_fails_the_transfer_with_its_reason() {
    run_on_simulated_gpu("devices=2", || {
        let gpus = GpuCluster::over(TransportChoice::Auto);
        let len = 2 * CHUNK;
        let (source, target) = (gpus.filled(0, Memory::Gpu, len, 1), gpus.empty(1, Memory::Gpu, len));
        gpus.simulated().set(Setting::HoldCopies, 1);
        let options =
            LaunchOptions { deadline: Some(Duration::from_millis(200)), ..LaunchOptions::default() };
        let engines = &gpus.cluster.engines;
        let received = engines[1].transfer(&[], vec![incoming(&target, 0, 1, 1)], options);
        let sent = engines[0].transfer(&[], vec![outgoing(&source, 0, 1, 1)], LaunchOptions::default());
        std::thread::sleep(Duration::from_millis(400));
        gpus.simulated().set(Setting::HoldCopies, 0);
        let late = done(&received);
        assert!(matches!(late, Err(TransferError::Deadline { moved: 0, .. })), "{late:?}");
        assert!(done(&sent).is_err());
        gpus.simulated().set(Setting::EccAfter, 2);
        let (sent, received) = gpus.cluster.send(0, &source, 1, &target, 2);
        let (sent, received) = (done(&sent).unwrap_err(), done(&received).unwrap_err());
        assert!(
            matches!(&received, TransferError::Gpu { gpu: 1, error, .. } if error.code == 214),
            "{received}"
        );
        assert!(sent.to_string().contains("GPU"), "{sent}");
    });
}
