//! The same calls against jaxlib's own coordination service and against Muster.
//!
//! Every script is a test of its own for every release that it speaks of, named `RELEASE::SCRIPT`:
//!
//!     cargo test --test differential
//!     cargo test --test differential 0.10.2::a_barrier
//!
//! `MUSTER_DIFFERENTIAL_SIDES=jaxlib|muster` runs one side only, against the expectations that the scripts state.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on has failed")]

mod differences;
mod expect;
mod run;
mod script;
mod scripts;
mod side;
#[path = "../support/mod.rs"]
mod support;

use std::path::PathBuf;
use std::sync::Arc;

use libtest_mimic::{Arguments, Failed, Trial};

use run::Sides;
use script::{Release, Script, SideKind};

/// How many scripts run at once: nearly all of their time is spent waiting.
const AT_ONCE: usize = 12;

fn main() {
    let mut arguments = Arguments::from_args();
    arguments.test_threads.get_or_insert(AT_ONCE);
    let runtime = Arc::new(tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap());
    let sides = sides();
    let mut trials = Vec::new();
    for release in Release::ALL {
        for script in scripts::all(release) {
            trials.push(trial(script, release, sides, &runtime));
        }
    }
    libtest_mimic::run(&arguments, trials).exit();
}

fn sides() -> Sides {
    match std::env::var("MUSTER_DIFFERENTIAL_SIDES").as_deref() {
        Ok("jaxlib") => Sides::Only(SideKind::Cxx),
        Ok("muster") => Sides::Only(SideKind::Muster),
        _ => Sides::Both,
    }
}

fn trial(script: Script, release: Release, sides: Sides, runtime: &Arc<tokio::runtime::Runtime>) -> Trial {
    let runtime = Arc::clone(runtime);
    let name = format!("{}::{}", release.name(), script.name.replace(' ', "_"));
    Trial::test(name, move || {
        let environment = environment(release, sides)?;
        let Some(environment) = environment else { return Ok(()) };
        runtime
            .block_on(run::compare(&script, release, &environment, sides))
            .map_err(Failed::from)
    })
}

/// Where the release's service is; `None` if this machine may do without it.
fn environment(release: Release, sides: Sides) -> Result<Option<PathBuf>, Failed> {
    if sides == Sides::Only(SideKind::Muster) {
        return Ok(Some(PathBuf::new()));
    }
    match support::server::jax_environment(release.name()) {
        Some(path) => Ok(Some(path)),
        // It needs a Python that not every machine has.
        None if release == Release::V0_12_0 => Ok(None),
        None => Err(format!("there is no JAX {} to compare with; run tests/jax/setup", release.name()).into()),
    }
}
