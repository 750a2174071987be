//! Makes the same calls to jaxlib's own coordination service and to Muster, and compares the results.
//!
//! Every script is a separate test for each jaxlib release that it names. The test is called `RELEASE::SCRIPT`:
//!
//!     cargo test --test differential
//!     cargo test --test differential 0.10.2::a_barrier
//!
//! There are also tests with random calls from fixed seeds. `MUSTER_DIFFERENTIAL_SEED=N` runs one other seed
//! instead, and `MUSTER_DIFFERENTIAL_STEPS=N` sets the number of calls for every seed.
//!
//! `MUSTER_DIFFERENTIAL_SIDES=jaxlib|muster` runs only one service, against the expectations that the scripts
//! state.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on has failed")]

mod differences;
mod expect;
mod random_calls;
mod script;
mod script_runner;
mod scripts;
mod service;
#[path = "../support/mod.rs"]
mod support;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use libtest_mimic::{Arguments, Completion, Failed, Trial};

use script::{Release, Script, ServiceKind};
use script_runner::ServicesUnderTest;
use support::skip::{Lacking, skip_named};

/// The number of scripts that run at once: they spend nearly all of their time waiting.
const AT_ONCE: usize = 12;
/// The number of seeds of random calls for every kind of job of every release.
const RANDOM_SEEDS: u64 = 4;
/// The number of calls for each seed.
const RANDOM_STEPS: usize = 150;

fn main() {
    let mut arguments = Arguments::from_args();
    arguments.test_threads.get_or_insert(AT_ONCE);
    let runtime = Arc::new(tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap());
    let sides = services_from_environment();
    let mut trials = Vec::new();
    for release in Release::ALL {
        for script in scripts::all_scripts(release) {
            trials.push(trial_of_script(script, release, sides, &runtime));
        }
    }
    if sides == ServicesUnderTest::Both {
        trials.extend(random_trials(&runtime));
    }
    trials.push(Trial::test("every_difference_has_a_row_and_a_script", || {
        differences::check_rows_and_scripts().map_err(Failed::from)
    }));
    libtest_mimic::run(&arguments, trials).exit();
}

fn services_from_environment() -> ServicesUnderTest {
    match std::env::var("MUSTER_DIFFERENTIAL_SIDES").as_deref() {
        Ok("jaxlib") => ServicesUnderTest::Only(ServiceKind::Cxx),
        Ok("muster") => ServicesUnderTest::Only(ServiceKind::Muster),
        _ => ServicesUnderTest::Both,
    }
}

fn trial_of_script(
    script: Script,
    release: Release,
    sides: ServicesUnderTest,
    runtime: &Arc<tokio::runtime::Runtime>,
) -> Trial {
    let runtime = Arc::clone(runtime);
    let name = format!("{}::{}", release.name(), script.name.replace(' ', "_"));
    Trial::ignorable_test(name.clone(), move || {
        with_environment(&name, release, sides, |environment| {
            runtime.block_on(script_runner::compare_services(&script, release, environment, sides))
        })
    })
}

/// Returns the trials with random calls against the last release of each generation.
fn random_trials(runtime: &Arc<tokio::runtime::Runtime>) -> Vec<Trial> {
    let number = |name| std::env::var(name).ok().map(|text| text.parse().expect("a number"));
    let steps = number("MUSTER_DIFFERENTIAL_STEPS").map_or(RANDOM_STEPS, |steps: u64| steps as usize);
    let seeds = number("MUSTER_DIFFERENTIAL_SEED").map_or(0..RANDOM_SEEDS, |seed| seed..seed + 1);
    let mut trials = Vec::new();
    for release in [Release::V0_9_2, Release::V0_10_2, Release::V0_12_0] {
        for (recoverable, kind) in [(false, "fate-sharing"), (true, "recoverable")] {
            for seed in seeds.clone() {
                let runtime = Arc::clone(runtime);
                let name = format!("{}::random_calls_in_a_{kind}_job_from_seed_{seed}", release.name());
                trials.push(Trial::ignorable_test(name.clone(), move || {
                    with_environment(&name, release, ServicesUnderTest::Both, |environment| {
                        runtime.block_on(random_calls::compare_with_random_calls(
                            release,
                            environment,
                            recoverable,
                            seed,
                            steps,
                        ))
                    })
                }));
            }
        }
    }
    trials
}

/// Runs a test with the environment of the release's service. 0.12.0 needs a Python that not every machine
/// has: without its environment the test is skipped. Without the environment of another release it fails.
fn with_environment(
    test: &str,
    release: Release,
    sides: ServicesUnderTest,
    compare: impl FnOnce(&Path) -> Result<(), String>,
) -> Result<Completion, Failed> {
    let environment = match sides {
        ServicesUnderTest::Only(ServiceKind::Muster) => Some(PathBuf::new()),
        _ => support::harness::jax_environment(release.name()),
    };
    let what = format!("JAX {}, which tests/jax/setup installs,", release.name());
    match environment {
        Some(environment) => compare(&environment).map(|()| Completion::Completed).map_err(Failed::from),
        None if release == Release::V0_12_0 => {
            Ok(Completion::ignored_with(skip_named(test, Lacking::Installation(&what))))
        }
        None => Err(format!("{what} is not installed").into()),
    }
}
