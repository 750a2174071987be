//! Batches: contents, order, and who may run what.

use std::sync::Arc;

use muster_cliques::{CliqueError, CliqueMember, CliqueOptions, GpuClique, GpuCliqueKey};
use simulated_gpu::{Counter, Setting, SimulatedGpu};

use crate::gpu_driver::open_gpu;
use crate::members::{
    OutcomeReceiver, assert_silent, contents, ended, filled, join, join_all, key_of, nccl, pattern, ready,
    receive, run, run_on_simulated_nccl, send, wait, wait_for_communicators,
};

/// Sends around a ring in both directions, and checks what arrives.
fn check_ring(cliques: &[Arc<GpuClique>], len: usize) {
    let ranks = cliques.len();
    let memory: Vec<_> = (0..ranks)
        .map(|rank| {
            [0, 1, 2, 3].map(|part| filled(0, len, if part < 2 { 2 * rank as u64 + part } else { 99 }))
        })
        .collect();
    let told: Vec<OutcomeReceiver> = (0..ranks)
        .map(|rank| {
            let [up, down, from_below, from_above] = &memory[rank];
            let [above, below] = [1, ranks - 1].map(|step| (rank + step) % ranks);
            // With two members, above and below are one: its operations are matched in their order.
            let operations = [
                send(rank, above, up),
                send(rank, below, down),
                receive(rank, below, from_below),
                receive(rank, above, from_above),
            ];
            run(&cliques[rank], &operations)
        })
        .collect();
    for told in &told {
        assert_eq!(wait(told), Ok(()));
    }
    for (rank, memory) in memory.iter().enumerate() {
        let [above, below] = [1, ranks - 1].map(|step| ((rank + step) % ranks) as u64);
        assert!(contents(0, &memory[2]) == pattern(len, 2 * below), "rank {rank} from below");
        assert!(contents(0, &memory[3]) == pattern(len, 2 * above + 1), "rank {rank} from above");
    }
}

#[test]
fn contents_arrive_in_cliques_of_two_to_eight_members() {
    run_on_simulated_nccl("", || {
        for members in 2..=8 {
            for options in
                [CliqueOptions::default(), CliqueOptions { is_blocking: true, ..CliqueOptions::default() }]
            {
                let cliques = join_all(members, options);
                [1, 4097, 300_000].iter().for_each(|len| check_ring(&cliques, *len));
                for clique in &cliques {
                    clique.end(CliqueError::Ended("done".to_owned()));
                }
                assert!(cliques.iter().all(|clique| ended(clique).is_err()));
            }
        }
        assert_eq!(SimulatedGpu::load().count(Counter::Communicators), 0);
        assert_eq!(SimulatedGpu::load().count(Counter::PageableCopies), 0);
    });
}

#[test]
fn one_process_has_members_on_several_devices() {
    run_on_simulated_nccl("devices=4", || {
        // Task 0 has devices 0 and 1, task 1 has devices 2 and 3.
        let member = |device: u32| CliqueMember { task: device / 2, incarnation: 7, device };
        let key = GpuCliqueKey::new((0..4).map(member)).unwrap();
        let id = nccl().new_id().unwrap();
        let start = |devices: [u32; 2]| {
            let local = devices.map(|device| (member(device), open_gpu(device)));
            GpuClique::start(nccl(), &key, id, &local, CliqueOptions::default()).unwrap()
        };
        let cliques = [start([0, 1]), start([2, 3])];
        for clique in &cliques {
            assert_eq!(wait(&ready(clique)), Ok(()));
        }
        // Each member sends to each, itself included.
        let len = 10_000;
        let sent: Vec<Vec<_>> = (0..4)
            .map(|from| (0..4).map(|to| filled(from, len, u64::from(10 * from + to))).collect())
            .collect();
        let received: Vec<Vec<_>> = (0..4).map(|to| (0..4).map(|_| filled(to, len, 99)).collect()).collect();
        let operations = |device: usize| {
            let sends = (0..4).map(move |to| (device, to)).map(|(from, to)| send(from, to, &sent[from][to]));
            let receives = (0..4)
                .map(move |from| (device, from))
                .map(|(to, from)| receive(to, from, &received[to][from]));
            sends.chain(receives).collect::<Vec<_>>()
        };
        let told = [0, 1]
            .map(|task| run(&cliques[task], &[operations(2 * task), operations(2 * task + 1)].concat()));
        told.iter().for_each(|told| assert_eq!(wait(told), Ok(())));
        for (to, received) in (0..4u32).zip(&received) {
            for (from, memory) in (0..4u64).zip(received) {
                assert!(contents(to, memory) == pattern(len, 10 * from + u64::from(to)), "{from} to {to}");
            }
        }
    });
}

#[test]
fn batches_run_in_their_order_while_earlier_ones_are_under_way() {
    run_on_simulated_nccl("copy_us=200", || {
        let cliques = join_all(2, CliqueOptions::default());
        let sent: Vec<_> = (0..40).map(|seed| filled(0, 1000 + seed as usize, seed)).collect();
        let received: Vec<_> = (0..40).map(|seed| filled(0, 1000 + seed, 99)).collect();
        let told: Vec<_> = sent
            .iter()
            .zip(&received)
            .flat_map(|(from, to)| {
                [run(&cliques[0], &[send(0, 1, from)]), run(&cliques[1], &[receive(1, 0, to)])]
            })
            .collect();
        told.iter().for_each(|told| assert_eq!(wait(told), Ok(())));
        for (seed, memory) in received.iter().enumerate() {
            assert!(contents(0, memory) == pattern(memory.len(), seed as u64), "batch {seed}");
        }
    });
}

#[test]
fn a_batch_waits_for_the_start_and_for_its_launch() {
    run_on_simulated_nccl("nccl_hold_launches=1", || {
        let (key, id) = (key_of(2), nccl().new_id().unwrap());
        let one = join(&key, id, 0, CliqueOptions::default());
        let [from, to] = [filled(0, 5000, 1), filled(0, 5000, 2)];
        let sent = run(&one, &[send(0, 1, &from)]);
        assert_silent(&sent);
        let two = join(&key, id, 1, CliqueOptions::default());
        let received = run(&two, &[receive(1, 0, &to)]);
        assert_silent(&received);
        SimulatedGpu::load().set(Setting::NcclHoldLaunches, 0);
        assert_eq!((wait(&sent), wait(&received)), (Ok(()), Ok(())));
        assert!(contents(0, &to) == pattern(5000, 1));
    });
}

#[test]
fn a_listener_that_panics_does_not_stop_the_thread_of_its_device() {
    run_on_simulated_nccl("", || {
        let cliques = join_all(2, CliqueOptions::default());
        let [from, to] = [filled(0, 100, 1), filled(0, 100, 2)];
        let sent = run(&cliques[0], &[send(0, 1, &from)]);
        // SAFETY: the memory lives until the clique has ended.
        unsafe { cliques[1].run(&[receive(1, 0, &to)], |_| panic!("a listener's own fault")) };
        assert_eq!(wait(&sent), Ok(()));
        check_ring(&cliques, 100);
        cliques[1].end(CliqueError::Ended("done".to_owned()));
        assert!(ended(&cliques[1]).is_err());
    });
}

#[test]
fn operations_of_others_are_refused_and_empty_batches_end_at_once() {
    run_on_simulated_nccl("", || {
        let cliques = join_all(2, CliqueOptions::default());
        let memory = filled(0, 10, 1);
        for operation in [send(1, 0, &memory), send(0, 2, &memory), send(7, 0, &memory)] {
            assert_eq!(wait(&run(&cliques[0], &[operation])), Err(CliqueError::NotAMember));
        }
        assert_eq!(wait(&run(&cliques[0], &[])), Ok(()));
        check_ring(&cliques, 100);
    });
}

#[test]
fn sizes_that_differ_end_the_clique_of_both_sides_and_move_nothing() {
    run_on_simulated_nccl("", || {
        let cliques = join_all(2, CliqueOptions::default());
        let [from, to] = [filled(0, 1000, 1), filled(0, 900, 2)];
        let told = [run(&cliques[0], &[send(0, 1, &from)]), run(&cliques[1], &[receive(1, 0, &to)])];
        for told in &told {
            assert!(matches!(wait(told), Err(CliqueError::Nccl(_))));
        }
        assert!(contents(0, &to) == pattern(900, 2));
        for (rank, clique) in cliques.iter().enumerate() {
            assert!(matches!(ended(clique), Err(CliqueError::Nccl(_))));
            let late = run(clique, &[send(rank, 1 - rank, &from)]);
            assert!(matches!(wait(&late), Err(CliqueError::Nccl(_))));
        }
        wait_for_communicators(0);
    });
}

#[test]
fn a_clique_that_is_not_reused_ends_in_order_after_its_batch() {
    run_on_simulated_nccl("", || {
        let cliques = join_all(3, CliqueOptions { is_reused: false, ..CliqueOptions::default() });
        let [from, to] = [filled(0, 100, 1), filled(0, 100, 2)];
        let told = [run(&cliques[0], &[send(0, 1, &from)]), run(&cliques[1], &[receive(1, 0, &to)])];
        // While the first one is under way, too.
        let second = run(&cliques[0], &[send(0, 1, &from)]);
        assert!(matches!(wait(&second), Err(CliqueError::Ended(_))));
        told.iter().for_each(|told| assert_eq!(wait(told), Ok(())));
        let told = run(&cliques[2], &[send(2, 2, &from), receive(2, 2, &to)]);
        assert_eq!(wait(&told), Ok(()));
        for clique in &cliques {
            assert!(matches!(ended(clique), Err(CliqueError::Ended(_))));
        }
        assert_eq!(SimulatedGpu::load().count(Counter::Communicators), 0);
    });
}
