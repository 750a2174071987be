//! The cache: one clique for each key, current members only, and the loss of members.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use muster_cliques::{CliqueError, CliqueId, CliqueOptions, GpuClique, GpuCliqueCache, GpuCliqueKey};

use crate::gpu_driver::open_gpu;
use crate::members::{
    ended, key_of, member, nccl, ready, run_on_simulated_nccl, wait, wait_for_communicators,
};

fn new_cache() -> GpuCliqueCache {
    nccl();
    GpuCliqueCache::new(nccl(), CliqueOptions::default())
}

fn join(
    cache: &GpuCliqueCache,
    key: &GpuCliqueKey,
    id: CliqueId,
    task: u32,
) -> Result<Arc<GpuClique>, CliqueError> {
    cache.join(key, id, &[(member(task), open_gpu(0))], |_| true)
}

#[test]
fn callers_at_the_same_time_share_one_clique() {
    run_on_simulated_nccl("", || {
        let (caches, key, id) = ([new_cache(), new_cache()], key_of(2), nccl().new_id().unwrap());
        let mut found: Vec<Arc<GpuClique>> = std::thread::scope(|scope| {
            let (caches, key) = (&caches, &key);
            let threads: Vec<_> = (0..16)
                .map(|n| scope.spawn(move || join(&caches[n % 2], key, id, n as u32 % 2).unwrap()))
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        found.iter().for_each(|clique| assert_eq!(wait(&ready(clique)), Ok(())));
        wait_for_communicators(2);
        let first = Arc::clone(&found[0]);
        found.retain(|clique| !Arc::ptr_eq(clique, &first));
        assert_eq!((found.len(), caches[0].len()), (8, 1));
    });
}

#[test]
fn a_stale_incarnation_is_refused_before_and_after_the_join() {
    run_on_simulated_nccl("", || {
        let (cache, key, id) = (new_cache(), key_of(3), nccl().new_id().unwrap());
        let local = [(member(0), open_gpu(0))];
        let stale = cache.join(&key, id, &local, |of| of.task != 2).unwrap_err();
        assert_eq!(stale, CliqueError::MemberLost(member(2)));
        assert!(cache.is_empty());
        // The member is lost between the two questions.
        let asked = AtomicUsize::new(0);
        let is_current =
            |of: &muster_cliques::CliqueMember| of.task != 1 || asked.fetch_add(1, Ordering::Relaxed) == 0;
        let stale = cache.join(&key, id, &local, is_current).unwrap_err();
        assert_eq!(stale, CliqueError::MemberLost(member(1)));
        assert!(cache.is_empty(), "nothing is kept of it");
        wait_for_communicators(0);
    });
}

#[test]
fn the_loss_of_a_member_ends_all_cliques_with_it_and_no_others() {
    run_on_simulated_nccl("", || {
        let caches: Vec<_> = (0..4).map(|_| new_cache()).collect();
        let new = |tasks: &[u32]| {
            let key = GpuCliqueKey::new(tasks.iter().map(|task| member(*task))).unwrap();
            let id = nccl().new_id().unwrap();
            tasks
                .iter()
                .map(|task| join(&caches[*task as usize], &key, id, *task).unwrap())
                .collect::<Vec<_>>()
        };
        let (with, without) = ([new(&[0, 1]), new(&[1, 2]), new(&[0, 1, 2, 3])].concat(), new(&[2, 3]));
        with.iter().chain(&without).for_each(|clique| assert_eq!(wait(&ready(clique)), Ok(())));
        // One that waits for task 3.
        let key = GpuCliqueKey::new([member(1), member(3)]).unwrap();
        let waits = join(&caches[1], &key, nccl().new_id().unwrap(), 1).unwrap();
        caches.iter().for_each(|cache| cache.end_cliques_of(|of| *of == member(1)));
        for clique in with.iter().chain([&waits]) {
            assert_eq!(ended(clique), Err(CliqueError::MemberLost(member(1))));
        }
        without.iter().for_each(|clique| assert_eq!(clique.end_reason(), None));
        wait_for_communicators(2);
        caches.iter().for_each(|cache| cache.end_all("the program ends"));
        without.iter().for_each(|clique| assert!(matches!(ended(clique), Err(CliqueError::Ended(_)))));
        assert!(caches.iter().all(GpuCliqueCache::is_empty));
        wait_for_communicators(0);
    });
}

#[test]
fn another_id_replaces_the_clique_of_the_same_members() {
    run_on_simulated_nccl("", || {
        let (caches, key) = ([new_cache(), new_cache()], key_of(2));
        let join_both = |id| [0, 1].map(|task| join(&caches[task as usize], &key, id, task).unwrap());
        let first = nccl().new_id().unwrap();
        let former = join_both(first);
        former.iter().for_each(|clique| assert_eq!(wait(&ready(clique)), Ok(())));
        let later = join_both(nccl().new_id().unwrap());
        later.iter().for_each(|clique| assert_eq!(wait(&ready(clique)), Ok(())));
        former.iter().for_each(|clique| assert!(ended(clique).is_err()));
        // A join that comes late, with the former id, replaces nothing.
        let late = join(&caches[0], &key, first, 0).unwrap_err();
        assert!(matches!(late, CliqueError::Ended(_)), "{late}");
        later.iter().for_each(|clique| assert_eq!(clique.end_reason(), None));
        assert_eq!(caches.map(|cache| cache.len()), [1, 1]);
    });
}
