//! Runs the state machine in virtual time: thousands of seeded schedules of calls, restarts, silences and
//! cancellations. After every input it checks every invariant.
//!
//! A failing seed prints the command that replays it: `MUSTER_SEED=<seed> cargo test --test simulation`.
//! `MUSTER_SEEDS=<n>` sets the number of seeds.

mod coordinator;
mod elastic_programs;
mod exclusions;
mod histories;
mod hosts;
mod journal;
mod kept_calls;
mod measurements;
mod peer_jobs;
mod random_schedules;
mod rules;
mod task_id_claims;

/// The default number of seeds of a run.
const SEEDS: u64 = 2_000;

/// Runs `scenario` for every seed, or for the one to replay.
fn for_every_seed(name: &str, share: u64, scenario: impl Fn(u64) + Sync) {
    let setting = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    if let Some(seed) = setting("MUSTER_SEED") {
        return scenario(seed);
    }
    let seeds = setting("MUSTER_SEEDS").unwrap_or(SEEDS) / share;
    let next = std::sync::atomic::AtomicU64::new(0);
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                    if seed >= seeds {
                        return;
                    }
                    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| scenario(seed)));
                    if let Err(panic) = result {
                        eprintln!("replay with: MUSTER_SEED={seed} cargo test --test simulation {name}");
                        std::panic::resume_unwind(panic);
                    }
                }
            });
        }
    });
}
