//! Tests transfers between devices of one task: the engine copies the bytes.
#![allow(unsafe_code, reason = "makes two buffers of one memory, as a program may")]

use std::time::Duration;

use muster::transfer::{
    Arena, Buffer, BufferDefinitionEvent, DeviceId, LaunchOptions, MemoryError, PrepareError, TransferEngine,
    TransferError, TransferHandle, TransferKey, TransferSpec, TransportChoice, TransportKind,
};
use muster_gpu::DeviceMemory;
use simulated_gpu::{Counter, Setting, SimulatedGpu};

use crate::cluster::{
    AnyMemory, Cluster, PATIENCE, assert_contents, contents, done, eventually, incoming, outgoing,
};
use crate::gpu_driver::{open_gpu, run_on_any_gpu, run_on_simulated_gpu};
use crate::gpu_memory::HeldStream;

const MIB: usize = 1 << 20;
/// The bytes of one copy between GPUs, and of one through a slot.
const CHUNK: usize = 8 * MIB;
const STAGED_CHUNK: usize = 4 * MIB;
/// How many copies of a launch are under way at a time.
const CHUNKS_IN_FLIGHT: usize = 3;

/// Two tasks with two devices each: 0 and 1, 2 and 3.
fn cluster() -> Cluster {
    Cluster::of_devices(2, 2, |config| config.transport = TransportChoice::Auto)
}

/// Returns the send and the receive of a copy from device 0 to device 1.
fn both_sides(source: &Buffer, target: &Buffer, key: u64) -> Vec<TransferSpec> {
    vec![outgoing(source, 0, 1, key), incoming(target, 0, 1, key)]
}

fn copy(engine: &TransferEngine, source: &Buffer, target: &Buffer, key: u64) -> TransferHandle {
    engine.transfer(&[], both_sides(source, target, key), LaunchOptions::default())
}

/// Returns the bytes that the engine has copied within its task, as sent and as received.
fn copied_within(engine: &TransferEngine) -> (u64, u64) {
    let moved = engine.bytes_by_task().into_iter().filter(|(task, _)| *task == engine.here().peer_task());
    let of_kind = moved.flat_map(|(_, bytes)| bytes).find(|(kind, _)| *kind == TransportKind::Local);
    of_kind.map_or((0, 0), |(_, bytes)| bytes)
}

#[test]
fn buffers_of_one_task_are_copied_in_one_request_with_those_of_peers() {
    let cluster = cluster();
    let engine = &cluster.engines[0];
    let mut random = fastrand::Rng::with_seed(3);
    let (mut specs, mut targets, mut total) = (Vec::new(), Vec::new(), 0);
    for key in 0..300 {
        let len = if key % 60 == 0 { random.usize(0..3 * MIB) } else { random.usize(0..5000) };
        let (source, target) = (cluster.filled(0, len, key), cluster.empty(0, len));
        // Also from a device to itself, and in both directions.
        let (from, to) = (random.usize(0..2), random.usize(0..2));
        specs.extend([outgoing(&source, from, to, key), incoming(&target, from, to, key)]);
        targets.push((target, key));
        total += len as u64;
    }
    let (source, far) = (cluster.filled(0, 70_000, 1000), cluster.empty(1, 70_000));
    specs.push(outgoing(&source, 1, 3, 1000));
    random.shuffle(&mut specs);
    let received =
        cluster.engines[1].transfer(&[], vec![incoming(&far, 1, 3, 1000)], LaunchOptions::default());
    let launched = engine.transfer(&[], specs, LaunchOptions::default());
    let stats = done(&launched).unwrap();
    assert_eq!((stats.sent, stats.received), (total + 70_000, total));
    done(&received).unwrap();
    targets.iter().for_each(|(target, key)| assert_contents(target, *key));
    assert_contents(&far, 1000);
    assert_eq!(copied_within(engine), (total, total));
    assert!(engine.launches_in_flight().iter().all(|launch| launch.bytes_left == 0));
}

#[test]
fn a_prepared_copy_is_launched_again_and_again() {
    let cluster = cluster();
    let (source, target) = (cluster.empty(0, 3 * MIB + 5), cluster.empty(0, 3 * MIB + 5));
    let options = LaunchOptions::default();
    let mut prepared = cluster.engines[0].prepare(both_sides(&source, &target, 1), options).wait().unwrap();
    for round in 0..20 {
        source.write_contents(0, &contents(source.len(), round)).unwrap();
        done(&prepared.launch(&[])).unwrap();
        assert_contents(&target, round);
    }
    cluster.engines[0].shutdown();
    let late = prepared.launch(&[]);
    assert_eq!(done(&late), Err(TransferError::Closed));
    assert!(late.cancel("it is over").wait_for(PATIENCE));
    source.fill(1).unwrap();
}

#[test]
fn a_request_names_both_sides_of_a_copy_and_they_agree() {
    let cluster = cluster();
    let refusal =
        |specs| cluster.engines[0].prepare(specs, LaunchOptions::default()).wait().map(|_| ()).unwrap_err();
    let (source, target) = (cluster.filled(0, 1000, 1), cluster.empty(0, 1000));
    let (near, other, key) = (DeviceId(0), DeviceId(1), TransferKey(5));
    let has_only = |named| PrepareError::SameTask { key, source_device: near, destination: other, named };
    assert_eq!(refusal(vec![outgoing(&source, 0, 1, 5)]), has_only("send"));
    assert_eq!(refusal(vec![incoming(&target, 0, 1, 5)]), has_only("receive"));
    assert_eq!(refusal(vec![outgoing(&source, 0, 1, 5), incoming(&target, 0, 1, 6)]), has_only("send"));
    let (first, second) = (both_sides(&source, &target, 5), both_sides(&source, &cluster.empty(0, 1000), 5));
    assert_eq!(
        refusal([first.clone(), second].concat()),
        PrepareError::DuplicateKey { key, source_device: near, destination: other }
    );
    let (low, high) = (source.range(0..600).unwrap(), source.range(500..1000).unwrap());
    let overlapping =
        vec![TransferSpec::send(low, near, other, key), TransferSpec::receive(high, near, other, key)];
    assert_eq!(refusal(overlapping), PrepareError::Overlap { key, start: 0, end: 600 });
    // Two buffers may be of the same memory.
    let memory = vec![7; 1000];
    let address = memory.as_ptr();
    let own = Buffer::foreign(memory);
    // SAFETY: the other buffer keeps the memory, and nothing writes it.
    let alias = unsafe { Buffer::read_only(address.add(400), 600, 1, Box::new(())) }.unwrap();
    let aliased = vec![
        TransferSpec::send(alias.full_span(), near, other, key),
        TransferSpec::receive(own.range(0..600).unwrap(), near, other, key),
    ];
    assert_eq!(refusal(aliased), PrepareError::Overlap { key, start: 0, end: 600 });
    assert_eq!(refusal(both_sides(&source, &alias, 5)), PrepareError::Memory(MemoryError::ReadOnly));
    // As with a peer, both sides are prepared, and the launch finds that they differ. Other copies of the request do not move.
    let short = cluster.empty(0, 999);
    let (fine, there) = (cluster.filled(0, 10, 2), cluster.empty(0, 10));
    let specs = vec![
        outgoing(&source, 0, 1, 5),
        incoming(&short, 0, 1, 5),
        outgoing(&fine, 0, 1, 6),
        incoming(&there, 0, 1, 6),
    ];
    let launched = cluster.engines[0].transfer(&[], specs, LaunchOptions::default());
    let Err(TransferError::LayoutMismatch { key: differing, here, there: other_side }) = done(&launched)
    else {
        panic!("{launched:?}")
    };
    assert_eq!(differing, key);
    assert!(here.starts_with("1000 bytes") && other_side.starts_with("999 bytes"), "{here}, {other_side}");
    assert!(there.look(|bytes| bytes.iter().all(|byte| *byte == 0xee)).unwrap());
    let launched = copy(&cluster.engines[0], &source, &cluster.empty(0, 0), 5);
    assert!(matches!(done(&launched), Err(TransferError::LayoutMismatch { .. })));
    // The buffers are free again.
    done(&copy(&cluster.engines[0], &source, &target, 5)).unwrap();
    assert_contents(&target, 1);
}

#[test]
fn a_copy_waits_for_its_dependencies_and_can_be_cancelled_before() {
    let cluster = cluster();
    let engine = &cluster.engines[0];
    let (source, target) = (cluster.empty(0, 10_000), cluster.empty(0, 10_000));
    let (promise, filled) = BufferDefinitionEvent::new();
    let both = || both_sides(&source, &target, 1);
    let launched = engine.transfer(&[filled], both(), LaunchOptions::default());
    assert_eq!(launched.wait_for(Duration::from_millis(20)), None);
    let waiting = engine.launches_in_flight();
    assert_eq!((waiting.len(), waiting[0].is_matched, waiting[0].bytes_left), (1, false, 20_000));
    // Its memory is reserved only when it begins.
    source.write_contents(0, &contents(10_000, 8)).unwrap();
    promise.complete();
    done(&launched).unwrap();
    assert_contents(&target, 8);
    let (promise, never) = BufferDefinitionEvent::new();
    let launched = engine.transfer(std::slice::from_ref(&never), both(), LaunchOptions::default());
    assert!(launched.cancel("not wanted any more").wait_for(PATIENCE));
    assert!(matches!(done(&launched), Err(TransferError::Cancelled { .. })));
    let late = LaunchOptions { deadline: Some(Duration::from_millis(20)), ..LaunchOptions::default() };
    let launched = engine.transfer(&[never], both(), late);
    assert_eq!(done(&launched), Err(TransferError::Deadline { moved: 0, total: 20_000 }));
    target.write_contents(0, &[1; 10_000]).unwrap();
    promise.complete();
    std::thread::sleep(Duration::from_millis(5));
    assert!(target.look(|bytes| bytes.iter().all(|byte| *byte == 1)).unwrap(), "what is over does not begin");
    let (promise, failed) = BufferDefinitionEvent::new();
    let launched = engine.transfer(&[failed], both(), LaunchOptions::default());
    promise.fail("the kernel failed");
    assert_eq!(done(&launched), Err(TransferError::Dependency("the kernel failed".to_owned())));
    let (_kept, undefined) = BufferDefinitionEvent::new();
    let launched = engine.transfer(&[undefined], both(), LaunchOptions::default());
    engine.shutdown();
    assert_eq!(done(&launched), Err(TransferError::Closed));
}

#[test]
fn a_cancelled_copy_of_host_memory_is_at_rest_when_it_is_proven() {
    let cluster = cluster();
    let (source, target) = (cluster.filled(0, 16 * MIB, 1), cluster.empty(0, 16 * MIB));
    for round in 0..20 {
        let launched = copy(&cluster.engines[0], &source, &target, round);
        if round % 2 == 1 {
            std::thread::sleep(Duration::from_micros(300));
        }
        assert!(launched.cancel("enough").wait_for(PATIENCE));
        // It may have been complete.
        assert!(matches!(done(&launched), Ok(_) | Err(TransferError::Cancelled { .. })));
        target.fill(round as u8).unwrap();
        std::thread::sleep(Duration::from_millis(1));
        assert!(target.look(|bytes| bytes.iter().all(|byte| *byte == round as u8)).unwrap());
    }
}

/// The arenas of a task with two GPUs, by the place of a buffer: host memory, the first GPU, the second.
fn arenas() -> [Arena; 3] {
    let gpu = |number| Arena::on_gpu(&open_gpu(number), 128 * MIB).unwrap();
    [Arena::new(128 * MIB).unwrap(), gpu(0), gpu(1)]
}

fn filled(arena: &Arena, len: usize, seed: u64) -> Buffer {
    let buffer = arena.allocate(len).unwrap();
    buffer.write_contents(0, &contents(len, seed)).unwrap();
    buffer
}

fn empty(arena: &Arena, len: usize) -> Buffer {
    let buffer = arena.allocate(len).unwrap();
    buffer.fill(0xee).unwrap();
    buffer
}

/// Copies between host memory and two GPUs, which can access each other's memory or not.
fn copy_between_all_places(can_access: bool) {
    let simulated = SimulatedGpu::load_if_wanted();
    let (cluster, arenas) = (cluster(), arenas());
    let (mut key, mut total) = (0, 0);
    for (from, to) in (0..9).map(|pair| (pair / 3, pair % 3)) {
        for len in [0, 1, 4097, STAGED_CHUNK + 1, 3 * CHUNK + 7] {
            let (source, target) = (filled(&arenas[from], len, key), empty(&arenas[to], len));
            let before = simulated.map(|driver| driver.count(Counter::Copies));
            done(&copy(&cluster.engines[0], &source, &target, key)).unwrap();
            let is_direct = from > 0 && to > 0 && (from == to || can_access);
            if let (Some(driver), Some(before), true) = (simulated, before, is_direct) {
                let copies = driver.count(Counter::Copies) - before;
                assert_eq!(copies, len.div_ceil(CHUNK) as i64, "{from} to {to}, {len} bytes");
            }
            assert_contents(&target, key);
            (key, total) = (key + 1, total + len as u64);
        }
    }
    assert_eq!(copied_within(&cluster.engines[0]), (total, total));
    // All places in one request.
    let mut random = fastrand::Rng::with_seed(9);
    let (mut specs, mut targets) = (Vec::new(), Vec::new());
    for key in 0..200 {
        let len = if key % 50 == 0 { random.usize(0..6 * MIB) } else { random.usize(0..20_000) };
        let (from, to) = (random.usize(0..3), random.usize(0..3));
        let (source, target) = (filled(&arenas[from], len, key), empty(&arenas[to], len));
        specs.extend(both_sides(&source, &target, key));
        targets.push((target, key));
    }
    done(&cluster.engines[0].transfer(&[], specs, LaunchOptions::default())).unwrap();
    targets.iter().for_each(|(target, key)| assert_contents(target, *key));
    assert!(simulated.is_none_or(|driver| driver.count(Counter::PageableCopies) == 0));
}

#[test]
fn host_memory_and_memory_of_gpus_are_copied_into_each_other() {
    run_on_any_gpu("devices=2", || copy_between_all_places(true));
}

#[test]
fn gpus_that_cannot_access_each_other_copy_through_host_memory() {
    run_on_simulated_gpu("devices=2;peer_access=0", || copy_between_all_places(false));
}

#[test]
fn memory_that_the_program_allocated_is_copied_too() {
    run_on_any_gpu("devices=2", || {
        let (cluster, arenas) = (cluster(), arenas());
        for (seed, to) in [&arenas[1], &arenas[2]].into_iter().enumerate() {
            let source = Buffer::on_device(DeviceMemory::allocate(&open_gpu(0), MIB).unwrap());
            source.write_contents(0, &contents(MIB, seed as u64)).unwrap();
            let target = empty(to, MIB);
            done(&copy(&cluster.engines[0], &source, &target, 1)).unwrap();
            assert_contents(&target, seed as u64);
        }
    });
}

#[test]
fn a_cancelled_copy_by_a_gpu_is_at_rest_when_it_is_proven() {
    run_on_simulated_gpu("devices=2", || {
        let simulated = SimulatedGpu::load_if_wanted().unwrap();
        let (cluster, arenas) = (cluster(), arenas());
        // Between GPUs, to a GPU and from one.
        for (from, to, chunk) in [(1, 2, CHUNK), (0, 1, STAGED_CHUNK), (1, 0, STAGED_CHUNK)] {
            let len = 6 * chunk;
            let (source, target) = (filled(&arenas[from], len, 1), empty(&arenas[to], len));
            let before = simulated.count(Counter::Copies);
            simulated.set(Setting::HoldCopies, 1);
            let launched = copy(&cluster.engines[0], &source, &target, 1);
            eventually("a copy is under way", || simulated.count(Counter::HeldCopies) > 0);
            let proof = launched.cancel("enough");
            assert!(!proof.wait_for(Duration::from_millis(5)), "a copy is under way");
            simulated.set(Setting::HoldCopies, 0);
            assert!(proof.wait_for(PATIENCE));
            assert!(matches!(done(&launched), Err(TransferError::Cancelled { .. })));
            let copies = (simulated.count(Counter::Copies) - before) as usize;
            assert!((1..=CHUNKS_IN_FLIGHT).contains(&copies), "{copies}");
            // Neither buffer is used any more.
            let now = target.look(<[u8]>::to_vec).unwrap();
            source.fill(9).unwrap();
            std::thread::sleep(Duration::from_millis(2));
            assert!(target.look(|bytes| bytes == now).unwrap(), "{from} to {to}");
        }
    });
}

/// Copies three chunks, and the second copy of a GPU meets an error after which the GPU is lost.
fn lose_gpu_during_copy(from: usize, to: usize) {
    let simulated = SimulatedGpu::load_if_wanted().unwrap();
    let (cluster, arenas) = (cluster(), arenas());
    let (source, target) = (filled(&arenas[from], 3 * CHUNK, 1), empty(&arenas[to], 3 * CHUNK));
    simulated.set(Setting::EccAfter, 2);
    let outcome = done(&copy(&cluster.engines[0], &source, &target, 1));
    let Err(TransferError::Gpu { error, .. }) = &outcome else { panic!("{outcome:?}") };
    assert_eq!(error.code, 214);
}

#[test]
fn a_copy_between_gpus_of_which_one_is_lost_fails_with_the_reason() {
    run_on_simulated_gpu("devices=2", || lose_gpu_during_copy(1, 2));
}

#[test]
fn a_copy_to_a_gpu_that_is_lost_fails_with_the_reason() {
    run_on_simulated_gpu("devices=2", || lose_gpu_during_copy(0, 1));
}

#[test]
fn a_copy_from_a_gpu_that_is_lost_fails_with_the_reason() {
    run_on_simulated_gpu("devices=2", || lose_gpu_during_copy(1, 0));
}

#[test]
fn a_copy_begins_when_the_gpu_has_filled_its_source() {
    run_on_any_gpu("devices=2", || {
        let (cluster, arenas) = (cluster(), arenas());
        for to in [0, 1, 2] {
            let (source, target) = (empty(&arenas[1], MIB), empty(&arenas[to], MIB));
            let mut stream = HeldStream::new();
            let is_filled = stream.fill(&source, 7);
            let both = both_sides(&source, &target, 1);
            let launched = cluster.engines[0].transfer(&[is_filled], both, LaunchOptions::default());
            assert_eq!(launched.wait_for(Duration::from_millis(10)), None);
            stream.open();
            done(&launched).unwrap();
            assert!(target.look(|bytes| bytes.iter().all(|byte| *byte == 7)).unwrap(), "to {to}");
        }
    });
}

#[test]
fn the_end_of_the_engine_ends_a_copy_through_slots() {
    run_on_simulated_gpu("devices=2", || {
        let simulated = SimulatedGpu::load_if_wanted().unwrap();
        for (from, to) in [(0, 1), (1, 0)] {
            let (cluster, arenas) = (cluster(), arenas());
            let (source, target) =
                (filled(&arenas[from], 6 * STAGED_CHUNK, 1), empty(&arenas[to], 6 * STAGED_CHUNK));
            simulated.set(Setting::HoldCopies, 1);
            let launched = copy(&cluster.engines[0], &source, &target, 1);
            eventually("a copy is under way", || simulated.count(Counter::HeldCopies) > 0);
            let engine = cluster.engines[0].clone();
            let ending = std::thread::spawn(move || engine.shutdown());
            std::thread::sleep(Duration::from_millis(20));
            simulated.set(Setting::HoldCopies, 0);
            ending.join().unwrap();
            assert_eq!(done(&launched), Err(TransferError::Closed), "{from} to {to}");
            assert!(launched.cancel("it is over").wait_for(PATIENCE));
            source.fill(9).unwrap();
            target.fill(9).unwrap();
        }
    });
}

#[test]
fn many_copies_share_few_slots() {
    run_on_simulated_gpu("devices=2", || {
        let cluster = Cluster::of_devices(1, 2, |config| config.staging_bytes = 4 * MIB);
        let arenas = arenas();
        let both =
            |key| (filled(&arenas[0], 2 * STAGED_CHUNK + 77, key), empty(&arenas[1], 2 * STAGED_CHUNK + 77));
        let buffers: Vec<_> = (0..12).map(both).collect();
        let launches: Vec<_> = (0..)
            .zip(&buffers)
            .map(|(key, (source, target))| copy(&cluster.engines[0], source, target, key))
            .collect();
        launches.iter().for_each(|launched| assert!(done(launched).is_ok()));
        (0..).zip(&buffers).for_each(|(key, (_, target))| assert_contents(target, key));
    });
}

#[test]
fn memory_that_cannot_be_page_locked_fails_the_copy_that_needs_it() {
    run_on_simulated_gpu("devices=2", || {
        let simulated = SimulatedGpu::load_if_wanted().unwrap();
        let (cluster, arenas) = (cluster(), arenas());
        let (source, target) = (filled(&arenas[0], 2 * STAGED_CHUNK, 1), empty(&arenas[1], 2 * STAGED_CHUNK));
        simulated.set(Setting::HostAllocFails, 1);
        let outcome = done(&copy(&cluster.engines[0], &source, &target, 1));
        let Err(TransferError::Gpu { error, .. }) = &outcome else { panic!("{outcome:?}") };
        assert!(error.is_out_of_memory(), "{error}");
        done(&copy(&cluster.engines[0], &source, &target, 1)).unwrap();
        assert_contents(&target, 1);
    });
}
