//! Tests of real JAX processes against a real server, with every JAX release that `versions` lists.
//!
//! Every test is named `RELEASE::what_it_shows`:
//!
//! ```text
//! cargo test --test jax
//! cargo test --test jax 0.10.2::a_killed_task
//! ```
//!
//! `setup` makes the environment of each release. If a release has no environment, its tests are skipped; in CI
//! they fail. If no release has an environment, the whole target fails.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on has failed")]

mod conformance;
mod death;
mod devices;
mod drain;
mod duplicate_task;
mod exclude;
mod fixture;
#[path = "../harness/mod.rs"]
mod harness;
mod http;
mod launch;
mod line;
mod process;
mod release;
mod restart;
mod rounds;
mod server;
#[path = "../support/skip.rs"]
mod skip;
mod stacks;
mod stop;
mod stopped_process;
mod tls;
mod two_generations;

use libtest_mimic::{Arguments, Completion, Failed, Trial};

use fixture::JaxFixture;
use release::Release;

/// The releases for which a test runs.
#[derive(Clone, Copy)]
enum RunSet {
    /// All: features on which every user relies.
    All,
    /// The last of generation A and the first stable one of generation C: features that depend on the
    /// generation.
    Both,
    /// One: features that depend on the server alone.
    One,
    /// The latest: features that only it has, such as TLS.
    Latest,
}

impl RunSet {
    fn has(self, release: &Release) -> bool {
        match self {
            Self::All => true,
            Self::Both => ["0.9.2", "0.10.2"].contains(&release.name.as_str()),
            Self::One => release.name == "0.10.2",
            Self::Latest => release.name == "0.12.0",
        }
    }
}

type Test = (RunSet, &'static str, fn(&JaxFixture));

fn tests() -> Vec<Test> {
    [
        conformance::TESTS,
        death::TESTS,
        restart::TESTS,
        rounds::TESTS,
        stopped_process::TESTS,
        duplicate_task::TESTS,
        devices::TESTS,
        drain::TESTS,
        exclude::TESTS,
        launch::TESTS,
        stacks::TESTS,
        stop::TESTS,
        tls::TESTS,
    ]
    .concat()
}

fn main() {
    let arguments = Arguments::from_args();
    let releases = release::all();
    let mut trials = vec![Trial::test("there_is_a_release_to_test", {
        let releases = releases.clone();
        move || release::require_any(&releases).map_err(Failed::from)
    })];
    for release in &releases {
        for (_, name, run) in tests().into_iter().filter(|(of, _, _)| of.has(release)) {
            let name = format!("{}::{name}", release.name);
            let (scene_name, release) = (name.clone(), release.clone());
            trials.push(Trial::ignorable_test(name, move || {
                if !release.is_there() {
                    return Ok(release.skip(&scene_name));
                }
                run(&JaxFixture::new(&scene_name, &release));
                Ok(Completion::Completed)
            }));
        }
    }
    trials.push(two_generations::trial(&releases));
    libtest_mimic::run(&arguments, trials).exit();
}
