//! Transfers between GPUs through cliques of NCCL. Each test has a process of its own, over simulated NCCL.

use std::time::Duration;

use muster::transfer::{
    Arena, Buffer, CliqueChoice, CliqueOptions, EngineConfig, LaunchOptions, PemCertificates, TransferEngine,
    TransferError, TransportChoice, TransportKind,
};
use simulated_gpu::{Counter, Setting, SimulatedGpu};

use crate::cluster::{
    PATIENCE, contents, device, done, eventually, incoming, member, options_on_channel, outgoing,
};
use crate::gpu_cluster::{GpuCluster, Memory, read};
use crate::gpu_driver::{is_real, open_gpu};
use crate::isolated_test::run_isolated;
use crate::skip::{Lacking, skip};

const MIB: usize = 1 << 20;

/// Runs a test over simulated NCCL with these settings.
fn run_on_simulated_nccl<F: FnOnce()>(settings: &str, body: F) {
    if is_real() {
        return skip(Lacking::Hardware("second GPU for a clique, and faults that can be set"));
    }
    let library = SimulatedGpu::library();
    run_isolated(&[("SIMULATED_GPU", settings), ("MUSTER_NCCL_LIBRARY", library.to_str().unwrap())], body);
}

fn with_cliques(config: &mut EngineConfig) {
    config.transport = TransportChoice::Tcp;
    config.cliques = CliqueChoice::Auto;
    config.fabric = None;
}

/// Returns the bytes that the second task has received by a transport.
fn received_by(gpus: &GpuCluster, kind: TransportKind) -> u64 {
    let all = gpus.cluster.engines[1].bytes_by_task().into_iter().flat_map(|(_, bytes)| bytes);
    all.filter(|(of, _)| *of == kind).map(|(_, (_, received))| received).sum()
}

/// Returns whether all connections still use cliques.
fn use_cliques(gpus: &GpuCluster) -> bool {
    gpus.cluster.engines.iter().all(|engine| engine.links().iter().all(|link| link.moves_by_clique))
}

/// Asserts that nothing reserves bytes that were sent: an engine keeps them until the peer, which may fetch, says that it does not.
fn assert_becomes_free(source: &Buffer) {
    eventually("nothing reserves the bytes", || source.write_contents(0, &[1; 10]).is_ok());
}

#[test]
fn contents_move_between_gpus_in_both_directions() {
    run_on_simulated_nccl("devices=2;memory=2G", || {
        for (choice, cliques) in
            [(TransportChoice::Tcp, CliqueChoice::Auto), (TransportChoice::Auto, CliqueChoice::Always)]
        {
            let gpus = GpuCluster::new(|config| (config.transport, config.cliques) = (choice, cliques));
            let mut total = 0;
            for (key, len) in (0..).zip([65_537, 4 * MIB, 4 * MIB + 1, 30 * MIB + 3]) {
                let there = [gpus.filled(0, Memory::Gpu, len, key), gpus.empty(1, Memory::Gpu, len)];
                let back = [gpus.filled(1, Memory::Gpu, len, key + 50), gpus.empty(0, Memory::Gpu, len)];
                let first = gpus.cluster.send(0, &there[0], 1, &there[1], key);
                let second = gpus.cluster.send(1, &back[0], 0, &back[1], key + 100);
                for transfer in [&first.0, &first.1, &second.0, &second.1] {
                    assert_eq!(done(transfer).err(), None, "{choice:?} {len}");
                }
                assert!(read(&there[1]) == contents(len, key), "{choice:?} {len}");
                assert!(read(&back[1]) == contents(len, key + 50), "{choice:?} {len}");
                total += len as u64;
            }
            assert_eq!(received_by(&gpus, TransportKind::Nccl), total, "{choice:?}");
            assert!(use_cliques(&gpus));
        }
    });
}

#[test]
fn many_pieces_between_several_gpus_move_in_one_request() {
    run_on_simulated_nccl("devices=4;memory=1G", || {
        let gpus = GpuCluster::new(with_cliques);
        let more = [2, 3].map(|device| Arena::on_gpu(&open_gpu(device), 128 * MIB).unwrap());
        let mut random = fastrand::Rng::with_seed(5);
        for round in 0..3 {
            let (mut sends, mut receives, mut targets) = (Vec::new(), Vec::new(), Vec::new());
            for key in 0..200 {
                let len = if key % 50 == 0 { random.usize(0..10 * MIB) } else { random.usize(0..40_000) };
                // The first round knows one GPU of each side.
                let [from, to] = [0, 1].map(|task| match round == 0 || random.bool() {
                    true => gpus.arenas[task].allocate(len).unwrap(),
                    false => more[task].allocate(len).unwrap(),
                });
                from.write_contents(0, &contents(len, key)).unwrap();
                to.write_contents(0, &vec![0xee; len]).unwrap();
                sends.push(outgoing(&from, 0, 1, key));
                receives.push(incoming(&to, 0, 1, key));
                targets.push((to, contents(len, key)));
            }
            random.shuffle(&mut receives);
            let engines = &gpus.cluster.engines;
            let received = engines[1].transfer(&[], receives, options_on_channel(round));
            let sent = engines[0].transfer(&[], sends, options_on_channel(round));
            assert_eq!((done(&sent).err(), done(&received).err()), (None, None), "round {round}");
            assert!(targets.iter().all(|(target, bytes)| read(target) == *bytes), "round {round}");
        }
        assert!(use_cliques(&gpus));
        // The clique of two GPUs has ended without its batches, and the larger one is there.
        eventually("four members", || SimulatedGpu::load().count(Counter::Communicators) == 4);
    });
}

#[test]
fn every_pair_of_memories_moves_in_both_directions() {
    run_on_simulated_nccl("devices=2;memory=1G", || {
        for (choice, cliques) in
            [(TransportChoice::Tcp, CliqueChoice::Auto), (TransportChoice::Auto, CliqueChoice::Always)]
        {
            let gpus = GpuCluster::new(|config| (config.transport, config.cliques) = (choice, cliques));
            let len = 3 * MIB;
            let pairs = [Memory::Host, Memory::Gpu].map(|from| [(from, Memory::Host), (from, Memory::Gpu)]);
            let all = pairs.as_flattened().iter().flat_map(|pair| [(*pair, 0), (*pair, 1)]);
            // Twice: the first round announces regions, whose numbers are small like those of GPUs.
            let rounds = all.clone().chain(all);
            for (key, ((from, to), sender)) in (0..).zip(rounds) {
                let (source, target) = (gpus.filled(sender, from, len, key), gpus.empty(1 - sender, to, len));
                let (sent, received) = gpus.cluster.send(sender, &source, 1 - sender, &target, key);
                let what = format!("{choice:?}: task {sender} sends {from:?} to {to:?}");
                assert_eq!((done(&sent).err(), done(&received).err()), (None, None), "{what}");
                assert!(read(&target) == contents(len, key), "{what}");
            }
            assert_eq!(received_by(&gpus, TransportKind::Nccl), 2 * len as u64, "{choice:?}");
            assert!(use_cliques(&gpus), "{choice:?}");
        }
    });
}

#[test]
fn a_clique_that_a_larger_one_replaced_ends_with_the_connection_too() {
    run_on_simulated_nccl("devices=3;memory=1G", || {
        let gpus = GpuCluster::new(with_cliques);
        let more = Arena::on_gpu(&open_gpu(2), 8 * MIB).unwrap();
        let len = 6 * MIB;
        let (source, target) = (gpus.filled(0, Memory::Gpu, len, 1), gpus.empty(1, Memory::Gpu, len));
        gpus.send_to_end(&source, &target, 1);
        SimulatedGpu::load().set(Setting::NcclHang, 1);
        let hangs = gpus.cluster.send(0, &source, 1, &target, 2);
        eventually("a batch hangs", || SimulatedGpu::load().count(Counter::NcclHangs) > 0);
        SimulatedGpu::load().set(Setting::NcclHang, 0);
        let (other, into) = (gpus.filled(0, Memory::Gpu, len, 3), more.allocate(len).unwrap());
        let options = options_on_channel(5);
        let (sent, received) = gpus.cluster.send_with_options((0, &other), (1, &into), 3, options);
        eventually("a clique of three", || SimulatedGpu::load().count(Counter::Communicators) > 2);
        std::thread::sleep(Duration::from_millis(50));
        gpus.cluster.engines[0].shutdown();
        assert!(done(&hangs.0).is_err() && done(&hangs.1).is_err());
        let _either = (done(&sent), done(&received));
        target.write_contents(0, &[1; 10]).unwrap();
        assert_becomes_free(&source);
        eventually("no communicator is left", || SimulatedGpu::load().count(Counter::Communicators) == 0);
    });
}

#[test]
fn the_cancellation_of_one_launch_leaves_others_and_the_clique_as_they_are() {
    run_on_simulated_nccl("devices=2;memory=2G", || {
        let gpus = GpuCluster::new(with_cliques);
        let len = 40 * MIB;
        let (source, target) = (gpus.filled(0, Memory::Gpu, len, 1), gpus.empty(1, Memory::Gpu, len));
        let (other, kept) = (gpus.filled(0, Memory::Gpu, len, 2), gpus.empty(1, Memory::Gpu, len));
        gpus.send_to_end(&source, &target, 1 << 40);
        for round in 0..8 {
            target.write_contents(0, &vec![0xee; len]).unwrap();
            let driver = SimulatedGpu::load();
            driver.set(Setting::NcclHoldLaunches, 1);
            let options = options_on_channel(7);
            let (sent, received) = gpus.cluster.send_with_options((0, &source), (1, &target), round, options);
            let going_on = gpus.cluster.send(0, &other, 1, &kept, round + 100);
            std::thread::sleep(Duration::from_millis(5 * (round % 3)));
            let proof = if round % 2 == 0 { sent.cancel("enough") } else { received.cancel("enough") };
            driver.set(Setting::NcclHoldLaunches, 0);
            assert!(proof.wait_for(PATIENCE), "round {round}");
            let (cancelled, other_side) =
                if round % 2 == 0 { (&sent, &received) } else { (&received, &sent) };
            assert!(matches!(done(cancelled), Err(TransferError::Cancelled { .. })), "round {round}");
            let outcome = done(other_side);
            let now = read(&target);
            match outcome {
                // Every byte was in a batch already.
                Ok(_) => assert!(now == contents(len, 1), "round {round}"),
                Err(error) => {
                    assert!(matches!(error, TransferError::Cancelled { .. }), "round {round}: {error}")
                }
            }
            // The sender may write its buffer again, and no byte of that arrives.
            source.write_contents(0, &[9; 1000]).unwrap();
            std::thread::sleep(Duration::from_millis(2));
            assert!(read(&target) == now, "round {round}");
            source.write_contents(0, &contents(1000, 1)).unwrap();
            assert_eq!((done(&going_on.0).err(), done(&going_on.1).err()), (None, None), "round {round}");
            assert!(read(&kept) == contents(len, 2), "round {round}");
            kept.write_contents(0, &vec![0; len]).unwrap();
        }
        assert!(use_cliques(&gpus), "the clique has survived");
        assert_eq!(received_by(&gpus, TransportKind::Tcp), 0);
    });
}

#[test]
fn a_clique_that_never_starts_costs_its_limit_and_the_bytes_are_pushed() {
    run_on_simulated_nccl("devices=2;nccl_init_hang=1", || {
        let gpus = GpuCluster::new(|config| {
            with_cliques(config);
            config.clique_options.start_timeout = Duration::from_millis(300);
        });
        let len = 6 * MIB;
        for key in 0..3 {
            let (source, target) = (gpus.filled(0, Memory::Gpu, len, key), gpus.empty(1, Memory::Gpu, len));
            gpus.send_to_end(&source, &target, key);
            assert!(read(&target) == contents(len, key));
        }
        assert_eq!(received_by(&gpus, TransportKind::Tcp), 3 * len as u64);
        assert!(!use_cliques(&gpus));
        eventually("no communicator is left", || SimulatedGpu::load().count(Counter::Communicators) == 0);
    });
}

#[test]
fn a_batch_that_hangs_fails_its_launches_and_later_bytes_are_pushed() {
    run_on_simulated_nccl("devices=2", || {
        let gpus = GpuCluster::new(|config| {
            with_cliques(config);
            config.clique_options.end_timeout = Duration::from_millis(100);
        });
        let len = 6 * MIB;
        let (source, target) = (gpus.filled(0, Memory::Gpu, len, 1), gpus.empty(1, Memory::Gpu, len));
        gpus.send_to_end(&source, &target, 1);
        target.write_contents(0, &vec![0xee; len]).unwrap();
        SimulatedGpu::load().set(Setting::NcclHang, 1);
        let options = LaunchOptions { stall: Duration::from_millis(400), ..LaunchOptions::default() };
        let (sent, received) = gpus.cluster.send_with_options((0, &source), (1, &target), 2, options);
        let failed = [done(&received).unwrap_err(), done(&sent).unwrap_err()];
        eventually("the clique has ended", || !use_cliques(&gpus));
        let now = read(&target);
        source.write_contents(0, &[9; 1000]).unwrap();
        std::thread::sleep(Duration::from_millis(5));
        assert!(read(&target) == now, "a byte has landed after the end: {failed:?}");
        source.write_contents(0, &contents(1000, 1)).unwrap();
        gpus.send_to_end(&source, &target, 3);
        assert!(read(&target) == contents(len, 1));
        assert_eq!(received_by(&gpus, TransportKind::Tcp), len as u64);
    });
}

#[test]
fn an_engine_that_ends_while_a_batch_moves_leaves_nothing_in_use() {
    run_on_simulated_nccl("devices=2", || {
        for first in [0, 1] {
            let gpus = GpuCluster::new(with_cliques);
            let len = 6 * MIB;
            let (source, target) = (gpus.filled(0, Memory::Gpu, len, 1), gpus.empty(1, Memory::Gpu, len));
            gpus.send_to_end(&source, &target, 1);
            SimulatedGpu::load().set(Setting::NcclHang, 1);
            let (sent, received) = gpus.cluster.send(0, &source, 1, &target, 2);
            eventually("a batch hangs", || SimulatedGpu::load().count(Counter::NcclHangs) > 0);
            gpus.cluster.engines[first as usize].shutdown();
            assert!(done(&sent).is_err() && done(&received).is_err());
            // Nothing reserves the bytes any more.
            target.write_contents(0, &[1; 10]).unwrap();
            assert_becomes_free(&source);
            SimulatedGpu::load().set(Setting::NcclHang, 0);
        }
        eventually("no communicator is left", || SimulatedGpu::load().count(Counter::Communicators) == 0);
    });
}

#[test]
fn an_engine_that_chooses_no_cliques_gets_bytes_through_sockets() {
    run_on_simulated_nccl("devices=2", || {
        let cluster = crate::cluster::Cluster::with(2, |config| {
            with_cliques(config);
            if config.here == member(1, 0) {
                config.cliques = CliqueChoice::Off;
            }
        });
        let arenas = [0, 1].map(|task| Arena::on_gpu(&open_gpu(task), 8 * MIB).unwrap());
        let [source, target]: [Buffer; 2] = arenas.each_ref().map(|arena| arena.allocate(MIB).unwrap());
        source.write_contents(0, &contents(MIB, 1)).unwrap();
        let (sent, received) = cluster.send(0, &source, 1, &target, 1);
        assert_eq!((done(&sent).err(), done(&received).err()), (None, None));
        assert!(read(&target) == contents(MIB, 1));
        assert!(cluster.engines.iter().all(|engine| engine.links().iter().all(|link| !link.moves_by_clique)));
    });
}

#[test]
fn what_cannot_be_used_with_cliques_is_named() {
    run_on_simulated_nccl("", || {
        let start = |change: fn(&mut EngineConfig)| {
            let mut config = EngineConfig::new(member(0, 0), vec![device(0)]);
            with_cliques(&mut config);
            change(&mut config);
            TransferEngine::start(config).map(|_| ()).map_err(|error| error.to_string())
        };
        assert_eq!(start(|config| config.clique_options = CliqueOptions::default()), Ok(()));
        let with_tls = start(|config| {
            config.tls = Some(PemCertificates { cert: vec![], key: vec![], ca: vec![], name: None });
        });
        assert!(with_tls.unwrap_err().contains("cliques of GPUs are not encrypted"));
    });
}

#[test]
fn an_engine_without_nccl_says_what_is_missing() {
    run_isolated(&[("MUSTER_NCCL_LIBRARY", "/nowhere/libnccl.so.2"), ("SIMULATED_GPU", "")], || {
        let mut config = EngineConfig::new(member(0, 0), vec![device(0)]);
        with_cliques(&mut config);
        let why = TransferEngine::start(config).map(|_| ()).unwrap_err().to_string();
        assert!(why.contains("NCCL cannot be loaded") && why.contains("MUSTER_NCCL_LIBRARY"), "{why}");
    });
}
