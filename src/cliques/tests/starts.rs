//! Starts: members that never come, hang, or give up; cancellation while others are awaited; libraries that cannot be used.

use std::time::Duration;

use muster_cliques::{CliqueError, CliqueOptions, GpuClique, Nccl, NcclUnavailable};
use simulated_gpu::SimulatedGpu;

use crate::gpu_driver::open_gpu;
use crate::isolated_test::run_isolated;
use crate::members::{
    assert_silent, ended, filled, join, join_all, key_of, member, nccl, outcome_at_end, quick, ready, run,
    run_on_simulated_nccl, send, wait, wait_for_communicators,
};

#[test]
fn a_start_without_a_member_times_out_in_cliques_of_two_to_eight() {
    run_on_simulated_nccl("", || {
        for members in 2..=8 {
            let (key, id) = (key_of(members), nccl().new_id().unwrap());
            let cliques: Vec<_> = (1..members).map(|task| join(&key, id, task, quick())).collect();
            let memory = filled(0, 100, 1);
            let told = run(&cliques[0], &[send(1, 0, &memory)]);
            for clique in &cliques {
                let expected =
                    CliqueError::StartTimedOut { members: members as usize, after: quick().start_timeout };
                assert_eq!(wait(&ready(clique)), Err(expected.clone()));
                assert_eq!(ended(clique), Err(expected));
            }
            assert!(matches!(wait(&told), Err(CliqueError::StartTimedOut { .. })));
            wait_for_communicators(0);
        }
    });
}

#[test]
fn a_start_is_cancelled_while_it_waits() {
    run_on_simulated_nccl("", || {
        let options = CliqueOptions { start_timeout: Duration::from_secs(3600), ..CliqueOptions::default() };
        for members in 2..=8 {
            let (key, id) = (key_of(members), nccl().new_id().unwrap());
            let cliques: Vec<_> = (1..members).map(|task| join(&key, id, task, options)).collect();
            let waiting: Vec<_> = cliques.iter().map(|clique| ready(clique)).collect();
            if members % 2 == 0 {
                waiting.iter().for_each(assert_silent);
            }
            let reason = CliqueError::MemberLost(member(0));
            for clique in &cliques {
                clique.end(reason.clone());
                clique.end(CliqueError::Ended("a second reason does not count".to_owned()));
            }
            for (clique, waiting) in cliques.iter().zip(&waiting) {
                assert_eq!(wait(waiting), Err(reason.clone()));
                assert_eq!(ended(clique), Err(reason.clone()));
            }
            wait_for_communicators(0);
        }
    });
}

#[test]
fn a_start_that_hangs_in_one_member_times_out_in_all() {
    run_on_simulated_nccl("nccl_init_hang=2", || {
        let (key, id) = (key_of(3), nccl().new_id().unwrap());
        let cliques: Vec<_> = (0..3).map(|task| join(&key, id, task, quick())).collect();
        for clique in &cliques {
            assert!(matches!(wait(&ready(clique)), Err(CliqueError::StartTimedOut { .. })));
            ended(clique).unwrap_err();
        }
        wait_for_communicators(0);
        // The same members begin anew, with another id.
        let again = join_all(3, CliqueOptions::default());
        assert!(again.iter().all(|clique| clique.end_reason().is_none()));
    });
}

#[test]
fn a_blocking_start_that_nobody_joins_does_not_hold_up_its_caller() {
    run_on_simulated_nccl("", || {
        let options = CliqueOptions { is_blocking: true, ..quick() };
        let clique = join(&key_of(2), nccl().new_id().unwrap(), 0, options);
        assert!(matches!(wait(&ready(&clique)), Err(CliqueError::StartTimedOut { .. })));
        ended(&clique).unwrap_err();
        // Another clique of the same device is not held up.
        let others = join_all(2, CliqueOptions::default());
        assert!(others.iter().all(|clique| clique.end_reason().is_none()));
    });
}

#[test]
fn a_clique_that_its_owner_drops_ends() {
    run_on_simulated_nccl("", || {
        let cliques = join_all(2, CliqueOptions::default());
        drop(cliques);
        wait_for_communicators(0);
        // One that waits for a member, as soon as it does.
        let waiting = join(&key_of(2), nccl().new_id().unwrap(), 0, CliqueOptions::default());
        wait_for_communicators(1);
        let (is_ready, has_ended) = (ready(&waiting), outcome_at_end(&waiting));
        drop(waiting);
        for outcome in [wait(&is_ready), wait(&has_ended)] {
            assert!(matches!(outcome, Err(CliqueError::Ended(_))), "{outcome:?}");
        }
        wait_for_communicators(0);
    });
}

#[test]
fn members_of_others_are_refused() {
    run_on_simulated_nccl("", || {
        let (key, id, options) = (key_of(2), nccl().new_id().unwrap(), CliqueOptions::default());
        for local in
            [&[][..], &[(member(2), open_gpu(0))], &[(member(0), open_gpu(0)), (member(9), open_gpu(0))]]
        {
            let refused = GpuClique::start(nccl(), &key, id, local, options);
            assert_eq!(refused.unwrap_err(), CliqueError::NotAMember);
        }
        let twice = [(member(0), open_gpu(0)), (member(0), open_gpu(0))];
        let refused = GpuClique::start(nccl(), &key, id, &twice, options);
        assert_eq!(refused.unwrap_err(), CliqueError::GivenTwice(member(0)));
        wait_for_communicators(0);
    });
}

#[test]
fn a_library_that_cannot_be_used_is_named() {
    let missing = [("MUSTER_NCCL_LIBRARY", "/nowhere/libnccl.so.2")];
    run_isolated(&missing, || {
        let Err(NcclUnavailable::NotLoaded(why)) = Nccl::get() else { panic!("there is a library") };
        assert!(why.contains("/nowhere/libnccl.so.2"), "{why}");
    });
}

#[test]
fn a_library_without_the_functions_is_named() {
    run_isolated(&[("MUSTER_NCCL_LIBRARY", "libc.so.6")], || {
        assert_eq!(Nccl::get().unwrap_err(), NcclUnavailable::MissingFunction("ncclGetVersion"));
    });
}

#[test]
fn an_old_library_is_refused() {
    run_on_simulated_nccl("nccl_version=21703", || {
        SimulatedGpu::load();
        assert_eq!(Nccl::get().unwrap_err(), NcclUnavailable::TooOld { version: 21_703 });
        let text = Nccl::get().unwrap_err().to_string();
        assert!(text.contains("NCCL 2.17") && text.contains("2.18"), "{text}");
    });
}
