//! The scripts, by subject.

mod barriers;
mod errors;
mod generation_a;
mod heartbeats;
mod key_values;
mod liveness;
mod recoverable;
mod registration;
mod runs;
mod shutdown;

use crate::script::{Release, Script};

/// Returns every script for a release.
pub fn all_scripts(release: Release) -> Vec<Script> {
    [
        registration::scripts(release),
        heartbeats::scripts(release),
        errors::scripts(release),
        shutdown::scripts(release),
        barriers::scripts(release),
        key_values::scripts(release),
        liveness::scripts(release),
        recoverable::scripts(release),
        runs::scripts(release),
        generation_a::scripts(release),
    ]
    .concat()
    .into_iter()
    .filter(|script| release.can_run(script))
    .collect()
}
