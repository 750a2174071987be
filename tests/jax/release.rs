//! The tested JAX releases, and their environments.

use std::path::{Path, PathBuf};

use libtest_mimic::Completion;

use super::skip::{Lacking, skip_named};

/// The wire generation of a release.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Generation {
    /// `tensorflow.CoordinationService`, up to 0.9.2.
    A,
    /// `xla.coordination.CoordinationService`, from 0.10.0 on.
    C,
}

/// One JAX release.
#[derive(Debug, Clone)]
pub struct Release {
    /// Its version, as text.
    pub name: String,
    home: PathBuf,
}

/// Returns the folder of the test programs.
pub fn programs() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/jax")
}

/// Returns the releases listed in `versions`, oldest first.
pub fn all() -> Vec<Release> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let root = std::env::var_os("MUSTER_JAX_ENVS").filter(|root| !root.is_empty());
    let root = root.map_or_else(|| here.join("target/jax"), PathBuf::from);
    let versions = std::fs::read_to_string(programs().join("versions")).expect("the list of releases");
    let lines = versions.lines().map(|line| line.split('#').next().unwrap_or_default());
    let names = lines.filter_map(|line| line.split_whitespace().next());
    names.map(|name| Release { name: name.to_owned(), home: root.join(name) }).collect()
}

/// Checks that at least one environment exists.
pub fn require_any(releases: &[Release]) -> Result<(), String> {
    if releases.iter().any(Release::is_there) {
        return Ok(());
    }
    let lacking: Vec<String> = releases.iter().map(|r| format!("JAX {}: {}", r.name, r.lacking())).collect();
    Err(format!("no JAX release can be tested here:\n{}", lacking.join("\n")))
}

impl Release {
    /// Returns the interpreter of its environment.
    pub fn python(&self) -> PathBuf {
        self.home.join("bin/python")
    }

    /// Returns whether its environment exists and is complete.
    pub fn is_there(&self) -> bool {
        self.home.join(".complete").is_file() && self.python().exists()
    }

    /// Returns the message for a missing environment.
    pub fn lacking(&self) -> String {
        format!("there is no environment at {}; run tests/jax/setup", self.home.display())
    }

    /// Records that a test is skipped because its environment is missing.
    pub fn skip(&self, test: &str) -> Completion {
        let what = format!("JAX {}, which tests/jax/setup installs,", self.name);
        Completion::ignored_with(skip_named(test, Lacking::Installation(&what)))
    }

    /// Returns its generation.
    pub fn generation(&self) -> Generation {
        if self.is_at_least(0, 10) { Generation::C } else { Generation::A }
    }

    /// Returns whether it is this version or a later one.
    pub fn is_at_least(&self, major: u32, minor: u32) -> bool {
        let mut parts = self.name.split('.').map(|part| part.parse::<u32>().expect("a number"));
        (parts.next(), parts.next()) >= (Some(major), Some(minor))
    }
}
