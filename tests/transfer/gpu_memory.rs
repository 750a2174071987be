//! Tests transfers of memory of GPUs. Each test has a process of its own: a setting of the driver
//! concerns the whole process.
#![allow(unsafe_code, reason = "calls the driver as a program does")]

use std::time::Duration;

use cudarc::driver::sys;
use muster::transfer::{
    Arena, Buffer, BufferDefinitionEvent, LaunchOptions, MemoryError, TransferError, TransferSpec,
    TransportChoice,
};
use muster_gpu::GpuEvent;
use simulated_gpu::{Counter, Setting};

use crate::cluster::{PATIENCE, contents, device, done, eventually, incoming, outgoing};
use crate::contents::CHOICES;
use crate::gpu_cluster::{GpuCluster, Memory, is_direct, read};
use crate::gpu_driver::{is_real, open_gpu, run_on_any_gpu, run_on_simulated_gpu};

#[test]
fn every_size_arrives_from_and_to_every_memory_on_every_transport() {
    use Memory::{Gpu, Host};
    run_on_any_gpu("devices=2", || {
        for choice in CHOICES {
            let gpus = GpuCluster::over(choice);
            for (from, to) in [(Gpu, Gpu), (Host, Gpu), (Gpu, Host)] {
                for (key, len) in
                    [0, 1, 63, 8192, 8193, 65_537, 1 << 20, (3 << 20) + 5].into_iter().enumerate()
                {
                    let source = gpus.filled(0, from, len, key as u64);
                    let target = gpus.empty(1, to, len);
                    let (sent, received) = gpus.cluster.send(0, &source, 1, &target, key as u64);
                    let what = format!("{choice:?} {from:?} {to:?} {len}");
                    assert_eq!(done(&received).map(|stats| stats.received), Ok(len as u64), "{what}");
                    assert_eq!(done(&sent).map(|stats| stats.sent), Ok(len as u64), "{what}");
                    assert!(read(&target) == contents(len, key as u64), "{what}");
                }
            }
            gpus.assert_no_copy_blocked();
        }
    });
}

#[test]
fn buffers_of_all_memories_move_in_one_request_both_ways_at_odd_offsets() {
    run_on_any_gpu("devices=2", || {
        for choice in CHOICES {
            let gpus = GpuCluster::over(choice);
            let mut random = fastrand::Rng::with_seed(3);
            let mut requests = [Vec::new(), Vec::new()];
            let mut targets = Vec::new();
            for key in 0..100u64 {
                let len = random.usize(0..60_000);
                let (from, to) = if key % 3 == 0 { (1, 0) } else { (0, 1) };
                let mut memory = || if random.bool() { Memory::Gpu } else { Memory::Host };
                let (near, far) = (memory(), memory());
                let (offset, tail) = (key as usize % 7, key as usize % 5);
                let source = gpus.filled(from, near, offset + len + tail, key);
                let target = gpus.empty(to, far, offset + len + tail);
                let range = offset..offset + len;
                let spans = [&source, &target].map(|buffer| buffer.range(range.clone()).unwrap());
                let [a, b] = spans;
                let (here, there) = (device(from), device(to));
                let number = muster::transfer::TransferKey(key);
                requests[from].push(TransferSpec::send(a, here, there, number));
                requests[to].push(TransferSpec::receive(b, here, there, number));
                targets.push((target, range, contents(offset + len + tail, key)));
            }
            let [first, second] = requests;
            let engines = &gpus.cluster.engines;
            let here = engines[0].transfer(&[], first, LaunchOptions::default());
            let there = engines[1].transfer(&[], second, LaunchOptions::default());
            assert_eq!((done(&here).err(), done(&there).err()), (None, None), "{choice:?}");
            for (target, range, source) in targets {
                let found = read(&target);
                assert!(found[range.clone()] == source[range.clone()], "{choice:?}");
                let around = found[..range.start].iter().chain(&found[range.end..]);
                assert!(around.copied().all(|byte| byte == 0xee), "{choice:?}");
            }
            gpus.assert_no_copy_blocked();
        }
    });
}

#[test]
fn a_prepared_transfer_moves_what_the_gpu_holds_at_each_launch() {
    run_on_any_gpu("devices=2", || {
        let gpus = GpuCluster::over(TransportChoice::Tcp);
        let (source, target) = (gpus.empty(0, Memory::Gpu, 20_000), gpus.empty(1, Memory::Gpu, 20_000));
        let [sender, receiver] = [0, 1].map(|task| &gpus.cluster.engines[task]);
        let options = LaunchOptions::default();
        let mut sending = sender.prepare(vec![outgoing(&source, 0, 1, 5)], options).wait().unwrap();
        let mut receiving = receiver.prepare(vec![incoming(&target, 0, 1, 5)], options).wait().unwrap();
        for round in 0..50 {
            source.write_contents(0, &contents(20_000, round)).unwrap();
            let (received, sent) = (receiving.launch(&[]), sending.launch(&[]));
            assert_eq!((done(&received).err(), done(&sent).err()), (None, None));
            assert!(read(&target) == contents(20_000, round));
        }
    });
}

/// A stream of the program, whose work waits until it is opened.
pub struct HeldStream {
    stream: sys::CUstream,
    word: &'static mut u32,
}

impl HeldStream {
    pub fn new() -> Self {
        let (mut context, mut stream, mut word) =
            (std::ptr::null_mut(), std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the memory and the stream live as long as the process.
        unsafe {
            sys::cuDevicePrimaryCtxRetain(&raw mut context, 0).result().unwrap();
            sys::cuCtxSetCurrent(context).result().unwrap();
            sys::cuStreamCreate(&raw mut stream, 1).result().unwrap();
            sys::cuMemHostAlloc(&raw mut word, 4, 0).result().unwrap();
            let word = &mut *word.cast::<u32>();
            *word = 0;
            sys::cuStreamWaitValue32_v2(stream, std::ptr::from_mut(word) as u64, 1, 0).result().unwrap();
            Self { stream, word }
        }
    }

    /// Fills a buffer behind the work so far, and returns the event of that.
    pub fn fill(&self, buffer: &Buffer, byte: u8) -> BufferDefinitionEvent {
        let gpu = buffer.gpu().unwrap();
        // SAFETY: the buffer lives until the end of the test.
        unsafe {
            let address = buffer.device_address().unwrap();
            sys::cuMemsetD8Async(address, byte, buffer.len(), self.stream).result().unwrap();
            BufferDefinitionEvent::of_gpu_event(gpu, GpuEvent::recorded_on(gpu, self.stream.cast()).unwrap())
        }
    }

    pub fn open(&mut self) {
        // SAFETY: the word is the stream's.
        unsafe { std::ptr::write_volatile(self.word, 1) };
    }
}

#[test]
fn no_byte_leaves_before_the_gpu_has_filled_the_buffer() {
    run_on_any_gpu("devices=2", || {
        for choice in CHOICES {
            let gpus = GpuCluster::over(choice);
            let (source, target) = (gpus.empty(0, Memory::Gpu, 100_000), gpus.empty(1, Memory::Gpu, 100_000));
            let mut stream = HeldStream::new();
            let filled = stream.fill(&source, 7);
            let [sender, receiver] = [0, 1].map(|task| &gpus.cluster.engines[task]);
            let options = LaunchOptions::default();
            let sent = sender.transfer(&[filled], vec![outgoing(&source, 0, 1, 1)], options);
            let received = receiver.transfer(&[], vec![incoming(&target, 0, 1, 1)], options);
            // Others go on meanwhile.
            let (other, there) = (gpus.filled(0, Memory::Gpu, 5000, 9), gpus.empty(1, Memory::Gpu, 5000));
            let on = |channel| LaunchOptions { channel, ..options };
            let second = sender.transfer(&[], vec![outgoing(&other, 0, 1, 2)], on(1));
            let landed = receiver.transfer(&[], vec![incoming(&there, 0, 1, 2)], on(1));
            assert_eq!((done(&second).err(), done(&landed).err()), (None, None));
            assert_eq!((sent.outcome(), received.outcome()), (None, None), "{choice:?}");
            stream.open();
            assert_eq!((done(&received).err(), done(&sent).err()), (None, None), "{choice:?}");
            assert!(read(&target).iter().all(|byte| *byte == 7), "{choice:?}");
        }
    });
}

#[test]
fn a_cancellation_is_proven_only_when_no_gpu_copies_any_more() {
    run_on_simulated_gpu("devices=2", || {
        for choice in CHOICES {
            let gpus = GpuCluster::over(choice);
            for round in 0..20 {
                let len = 2 << 20;
                let (source, target) = (gpus.filled(0, Memory::Gpu, len, 1), gpus.empty(1, Memory::Gpu, len));
                gpus.simulated().set(Setting::HoldCopies, 1);
                let (sent, received) = gpus.cluster.send(0, &source, 1, &target, round);
                eventually("a copy is under way", || gpus.simulated().count(Counter::HeldCopies) > 0);
                let proof = if round % 2 == 0 { sent.cancel("enough") } else { received.cancel("enough") };
                // Long enough for the other side to learn of it: else it may have all bytes first.
                assert!(!proof.wait_for(Duration::from_millis(20)), "{choice:?}: a copy reads the source");
                assert!(
                    matches!(source.write_contents(0, &[0; 10]), Err(MemoryError::Busy { .. })),
                    "{choice:?}"
                );
                gpus.simulated().set(Setting::HoldCopies, 0);
                assert!(proof.wait_for(PATIENCE), "{choice:?}");
                for (transfer, name) in [(&sent, "sent"), (&received, "received")] {
                    let outcome = done(transfer);
                    assert!(
                        matches!(outcome, Err(TransferError::Cancelled { .. })),
                        "{choice:?} {name} {outcome:?}"
                    );
                }
                // A GPU that copied to the target itself has written it; else the copy that was held filled a slot.
                let now = read(&target);
                let is_written = |byte: &u8| *byte != 0xee;
                assert!(is_direct(choice) || !now.iter().any(is_written), "{choice:?}");
                std::thread::sleep(Duration::from_millis(1));
                assert!(read(&target) == now, "{choice:?}: a byte landed after the proof");
            }
        }
    });
}

#[test]
fn after_the_proof_no_byte_changes_at_whatever_moment_it_is_asked_for() {
    run_on_any_gpu("devices=2;copy_us=200", || {
        for choice in [TransportChoice::Auto, TransportChoice::Tcp] {
            let gpus = GpuCluster::over(choice);
            let mut random = fastrand::Rng::with_seed(6);
            let (mut whole, mut cancelled) = (0, 0);
            // A real GPU copies more in that time.
            let len = if is_real() { 96 << 20 } else { 2 << 20 };
            let longest_us = if is_direct(choice) { 600 } else { 8000 };
            let source = gpus.filled(0, Memory::Gpu, len, 1);
            for round in 0..if is_real() { 20 } else { 60 } {
                let target = gpus.empty(1, Memory::Gpu, len);
                let (sent, received) = gpus.cluster.send(0, &source, 1, &target, round);
                // Some are cancelled too late.
                match round % 10 {
                    9 => drop(done(&received)),
                    _ => std::thread::sleep(Duration::from_micros(random.u64(0..longest_us))),
                }
                let proof = if round % 2 == 0 { sent.cancel("enough") } else { received.cancel("enough") };
                assert!(proof.wait_for(PATIENCE), "{choice:?}");
                // A receiver that has all bytes tells the sender before it releases the buffer.
                let outcome = done(&received);
                let now = read(&target);
                match outcome {
                    Ok(_) => {
                        whole += 1;
                        assert!(now == contents(len, 1), "{choice:?}");
                    }
                    Err(_) => cancelled += 1,
                }
                std::thread::sleep(Duration::from_millis(2));
                assert!(read(&target) == now, "{choice:?}: a byte landed after the proof");
            }
            println!("{choice:?}: {whole} whole, {cancelled} cancelled");
            assert!(whole > 0 && cancelled > 0, "{choice:?}");
        }
    });
}

#[test]
fn a_deadline_passes_while_a_gpu_hangs() {
    run_on_simulated_gpu("devices=2", || {
        let gpus = GpuCluster::over(TransportChoice::Tcp);
        let (source, target) = (gpus.filled(0, Memory::Gpu, 4096, 1), gpus.empty(1, Memory::Gpu, 4096));
        gpus.simulated().set(Setting::HoldCopies, 1);
        let options =
            LaunchOptions { deadline: Some(Duration::from_millis(300)), ..LaunchOptions::default() };
        let received = gpus.cluster.engines[1].transfer(&[], vec![incoming(&target, 0, 1, 1)], options);
        let sent =
            gpus.cluster.engines[0].transfer(&[], vec![outgoing(&source, 0, 1, 1)], LaunchOptions::default());
        let late = done(&received);
        assert!(matches!(late, Err(TransferError::Deadline { moved: 0, total: 4096 })), "{late:?}");
        // The sender's buffer stays reserved until its copy ends.
        assert!(source.write_contents(0, &[1]).is_err());
        gpus.simulated().set(Setting::HoldCopies, 0);
        assert!(matches!(done(&sent), Err(TransferError::Cancelled { .. })));
        eventually("the source is free", || source.write_contents(0, &[1]).is_ok());
    });
}

#[test]
fn a_lost_gpu_fails_its_transfers_with_its_reason_on_both_sides() {
    run_on_simulated_gpu("devices=2", || {
        let gpus = GpuCluster::over(TransportChoice::Tcp);
        let len = 1 << 20;
        let (source, target) = (gpus.filled(0, Memory::Gpu, len, 1), gpus.empty(1, Memory::Gpu, len));
        let (host, there) = (gpus.filled(0, Memory::Host, len, 2), gpus.empty(1, Memory::Host, len));
        gpus.simulated().set(Setting::EccAfter, 3);
        let (sent, received) = gpus.cluster.send(0, &source, 1, &target, 1);
        let outcomes = [done(&sent), done(&received)].map(Result::unwrap_err);
        let own = outcomes.iter().find_map(|error| match error {
            TransferError::Gpu { error, .. } => Some(error.clone()),
            _ => None,
        });
        assert_eq!(own.map(|error| error.code), Some(214), "{outcomes:?}");
        assert!(outcomes.iter().all(|error| error.to_string().contains("GPU")), "{outcomes:?}");
        // Host memory needs no GPU.
        gpus.send_to_end(&host, &there, 2);
        // A transfer of the lost GPU fails at once.
        let (sent, received) = gpus.cluster.send(0, &source, 1, &target, 3);
        assert!(matches!(done(&sent), Err(TransferError::Gpu { gpu: 0, .. })));
        assert!(done(&received).is_err());
    });
}

#[test]
fn memory_of_the_host_moves_while_a_gpu_hangs() {
    run_on_simulated_gpu("devices=2", || {
        for choice in [TransportChoice::Unix, TransportChoice::Tcp] {
            let gpus = GpuCluster::over(choice);
            let len = 4 << 20;
            let (source, target) = (gpus.filled(0, Memory::Gpu, len, 1), gpus.empty(1, Memory::Gpu, len));
            let (host, there) = (gpus.filled(0, Memory::Host, len, 2), gpus.empty(1, Memory::Host, len));
            gpus.simulated().set(Setting::HoldCopies, 1);
            let (stuck, waiting) = gpus.cluster.send(0, &source, 1, &target, 1);
            eventually("a copy is under way", || gpus.simulated().count(Counter::HeldCopies) > 0);
            let (sent, received) = gpus.cluster.send(0, &host, 1, &there, 2);
            assert_eq!((done(&sent).err(), done(&received).err()), (None, None), "{choice:?}");
            assert_eq!(stuck.outcome(), None);
            gpus.simulated().set(Setting::HoldCopies, 0);
            assert_eq!((done(&stuck).err(), done(&waiting).err()), (None, None), "{choice:?}");
            assert!(read(&target) == contents(len, 1) && read(&there) == contents(len, 2), "{choice:?}");
        }
    });
}

#[test]
fn a_gpu_without_page_locked_memory_fails_the_transfer_and_not_the_engine() {
    run_on_simulated_gpu("devices=2", || {
        let gpus = GpuCluster::over(TransportChoice::Tcp);
        let (source, target) = (gpus.filled(0, Memory::Gpu, 50_000, 1), gpus.empty(1, Memory::Gpu, 50_000));
        gpus.simulated().set(Setting::HostAllocFails, 1);
        let (sent, received) = gpus.cluster.send(0, &source, 1, &target, 1);
        let refused = done(&sent).unwrap_err();
        assert!(
            matches!(&refused, TransferError::Gpu { error, .. } if error.is_out_of_memory()),
            "{refused}"
        );
        assert!(done(&received).unwrap_err().to_string().contains("cuMemHostAlloc"));
        gpus.send_to_end(&source, &target, 2);
        assert!(read(&target) == contents(50_000, 1));
    });
}

#[test]
fn lanes_share_a_bounded_number_of_slots() {
    run_on_simulated_gpu("devices=2;copy_us=50", || {
        let gpus = GpuCluster::new(|config| {
            config.transport = TransportChoice::Tcp;
            (config.lanes, config.chunk) = (16, 256 << 10);
            // Four slots for sending, and four for receiving.
            config.staging_bytes = 2 << 20;
        });
        let len = 40 << 20;
        let (source, target) = (gpus.filled(0, Memory::Gpu, len, 1), gpus.empty(1, Memory::Gpu, len));
        let others = gpus.simulated().count(Counter::PinnedRanges);
        gpus.send_to_end(&source, &target, 1);
        assert!(read(&target) == contents(len, 1));
        // Of each engine, four slots of a pool: sixteen lanes have waited for them.
        let pinned = gpus.simulated().count(Counter::PinnedRanges) - others;
        assert!((5..=8).contains(&pinned), "{pinned}");
        // A launch that fails while it has all slots gives them back.
        gpus.simulated().set(Setting::HoldCopies, 1);
        let (sent, received) = gpus.cluster.send(0, &source, 1, &target, 2);
        eventually("copies are under way", || gpus.simulated().count(Counter::HeldCopies) > 0);
        let _proof = sent.cancel("enough");
        gpus.simulated().set(Setting::HoldCopies, 0);
        assert!(done(&received).is_err());
        gpus.send_to_end(&source, &target, 3);
        gpus.assert_no_copy_blocked();
    });
}

#[test]
fn the_host_gets_an_error_where_it_would_touch_the_bytes() {
    run_on_any_gpu("devices=1", || {
        let arena = Arena::on_gpu(&open_gpu(0), 1 << 20).unwrap();
        let buffer = arena.allocate(1000).unwrap();
        let wanted = MemoryError::OnDevice { gpu: 0 };
        assert_eq!(buffer.with_bytes(|_| ()).unwrap_err(), wanted);
        assert_eq!(buffer.with_bytes_mut(|_| ()).unwrap_err(), wanted);
        buffer.fill(9).unwrap();
        assert_eq!(read(&buffer), vec![9; 1000]);
        // A program that has the address of the memory keeps it from being written.
        let export = buffer.export().unwrap();
        assert_eq!(export.address() as u64, buffer.device_address().unwrap());
        assert_eq!(buffer.write_contents(0, &[1]).unwrap_err(), MemoryError::Exported { exports: 1 });
        drop(export);
        buffer.write_contents(0, &[1]).unwrap();
        assert!(buffer.write_contents(990, &[0; 11]).is_err());
        assert!(matches!(arena.allocate(2 << 20), Err(MemoryError::Full { .. })));
        let refused = Arena::on_gpu(&open_gpu(0), 1 << 40).unwrap_err();
        assert!(
            matches!(&refused, MemoryError::Gpu { gpu: 0, error } if error.is_out_of_memory()),
            "{refused}"
        );
    });
}
