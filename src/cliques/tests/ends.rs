//! Ends: groups that hang, sticky errors, and the proof that nothing moves any more.

use std::time::Duration;

use muster_cliques::{CliqueError, CliqueOptions, StopMethod};
use simulated_gpu::{Counter, Setting, SimulatedGpu};

use crate::copying::wait_until;
use crate::members::{
    assert_silent, contents, ended, filled, join_all, member, pattern, receive, run, run_on_simulated_nccl,
    send, wait,
};

#[test]
fn a_batch_that_hangs_ends_with_its_clique_and_nothing_lands_afterwards() {
    run_on_simulated_nccl("", || {
        let gpu = SimulatedGpu::load();
        for (stop_method, is_blocking) in
            [(StopMethod::Abort, false), (StopMethod::RevokeThenAbort, false), (StopMethod::Abort, true)]
        {
            for members in 2..=8 {
                let cliques = join_all(
                    members,
                    CliqueOptions {
                        end_timeout: Duration::from_millis(100),
                        stop_method,
                        is_blocking,
                        ..CliqueOptions::default()
                    },
                );
                let ranks = members as usize;
                let memory: Vec<_> = (0..ranks)
                    .map(|rank| [0, 1].map(|part| filled(0, 60_000, 10 * part + rank as u64)))
                    .collect();
                gpu.set(Setting::NcclHang, 1);
                let told: Vec<_> = (0..ranks)
                    .map(|rank| {
                        let [from, to] = &memory[rank];
                        let [above, below] = [1, ranks - 1].map(|step| (rank + step) % ranks);
                        run(&cliques[rank], &[send(rank, above, from), receive(rank, below, to)])
                    })
                    .collect();
                wait_until("a group hangs", || gpu.count(Counter::NcclHangs) >= 1);
                let reason = CliqueError::MemberLost(member(0));
                cliques.iter().for_each(|clique| clique.end(reason.clone()));
                let mut failed = 0;
                for (rank, told) in told.iter().enumerate() {
                    // The group of a member that got what it waited for has ended in order, and a member may notice the abort of
                    // another one before its own.
                    let outcome = wait(told);
                    let is_expected = match &outcome {
                        Ok(()) | Err(CliqueError::Nccl(_)) => true,
                        Err(error) => *error == reason,
                    };
                    assert!(is_expected, "{outcome:?}");
                    failed += usize::from(outcome.is_err());
                    let below = (rank + ranks - 1) % ranks;
                    let is_whole = contents(0, &memory[rank][1]) == pattern(60_000, below as u64);
                    assert!(is_whole || outcome.is_err(), "a batch has ended in order without its bytes");
                    let after = contents(0, &memory[rank][1]);
                    std::thread::sleep(Duration::from_millis(2));
                    assert!(contents(0, &memory[rank][1]) == after, "a byte has landed after the end");
                }
                assert!(failed > 0);
                cliques.iter().for_each(|clique| assert!(ended(clique).is_err()));
                assert_eq!(gpu.count(Counter::Communicators), 0);
            }
        }
    });
}

#[test]
fn a_batch_without_its_counterpart_ends_with_its_clique() {
    run_on_simulated_nccl("nccl_silent_death=1", || {
        let cliques = join_all(2, CliqueOptions::default());
        let to = filled(0, 1000, 5);
        let [first, second] = [(); 2].map(|()| run(&cliques[0], &[receive(0, 1, &to)]));
        assert_silent(&first);
        cliques[0].end(CliqueError::MemberLost(member(1)));
        for told in [first, second] {
            assert_eq!(wait(&told), Err(CliqueError::MemberLost(member(1))));
        }
        assert!(contents(0, &to) == pattern(1000, 5));
    });
}

#[test]
fn the_abort_of_one_member_ends_the_batches_of_the_other() {
    run_on_simulated_nccl("", || {
        let cliques = join_all(2, CliqueOptions::default());
        let [from, to] = [filled(0, 1000, 5), filled(0, 1000, 6)];
        SimulatedGpu::load().set(Setting::NcclHang, 1);
        let sent = run(&cliques[0], &[send(0, 1, &from)]);
        wait_until("a group hangs", || SimulatedGpu::load().count(Counter::NcclHangs) == 1);
        let told = [sent, run(&cliques[1], &[receive(1, 0, &to)])];
        assert_silent(&told[1]);
        cliques[0].end(CliqueError::Ended("the program gives up".to_owned()));
        assert!(matches!(wait(&told[0]), Err(CliqueError::Ended(_))));
        assert!(matches!(wait(&told[1]), Err(CliqueError::Nccl(_))));
        assert!(contents(0, &to) == pattern(1000, 6));
    });
}

#[test]
fn a_lost_device_ends_its_cliques() {
    run_on_simulated_nccl("", || {
        let cliques = join_all(2, CliqueOptions::default());
        let to = filled(0, 1000, 6);
        let told = run(&cliques[0], &[receive(0, 1, &to)]);
        assert_silent(&told);
        SimulatedGpu::load().set(Setting::Sticky, 700);
        assert!(matches!(wait(&told), Err(CliqueError::Gpu { .. } | CliqueError::Nccl(_))));
        assert!(ended(&cliques[0]).is_err());
    });
}
