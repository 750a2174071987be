//! Skips tests that cannot run on this machine, and counts them.
//!
//! A test may skip itself only for lack of one of the things in [`Lacking`]. If anything else is missing, it fails.
//! Each skipped test is a line of the file that `MUSTER_SKIPS` names. At their end, `tests/run` and `.ci/run` count
//! these lines.

#![allow(dead_code, reason = "every target uses its own part of it")]

use std::io::Write as _;

/// A feature that a machine may lack.
#[derive(Debug, Clone, Copy)]
pub enum Lacking<'a> {
    /// The kernel, or the sandbox of the tests, refuses something. No installation helps.
    KernelFeature(&'a str),
    /// The machine lacks a device. No installation helps.
    Hardware(&'a str),
    /// A program that could be installed is missing. The test is skipped on a developer's machine and fails
    /// in CI (`MUSTER_CI`).
    Installation(&'a str),
}

impl Lacking<'_> {
    /// Returns why a test may be skipped, or why it may not.
    pub fn excuse(self, in_ci: bool) -> Result<String, String> {
        match self {
            Self::KernelFeature(feature) => Ok(format!("the kernel refuses {feature}")),
            Self::Hardware(what) => Ok(format!("the machine has no {what}")),
            Self::Installation(what) if in_ci => {
                Err(format!("{what} is not installed, and in CI no test is skipped for that"))
            }
            Self::Installation(what) => Ok(format!("{what} is not installed")),
        }
    }
}

/// Records that the running test of the standard harness is skipped. The test returns next.
pub fn skip(lacking: Lacking) {
    let thread = std::thread::current();
    skip_named(thread.name().unwrap_or("a test"), lacking);
}

/// Records that a test is skipped, and returns the reason.
///
/// # Panics
/// In CI, if the missing program could be installed.
pub fn skip_named(test: &str, lacking: Lacking) -> String {
    let in_ci = std::env::var_os("MUSTER_CI").is_some();
    let reason = lacking.excuse(in_ci).unwrap_or_else(|refused| panic!("{refused}"));
    let line = format!("{reason}\t{} {test}\n", env!("CARGO_CRATE_NAME"));
    // The harness captures the output of macros and shows it only if the test fails.
    let _ = std::io::stderr().write_all(format!("SKIPPED {line}").as_bytes());
    if let Some(file) = std::env::var_os("MUSTER_SKIPS") {
        let file = std::fs::OpenOptions::new().append(true).create(true).open(file);
        // One write, so that parallel tests do not mix their lines.
        file.and_then(|mut file| file.write_all(line.as_bytes()))
            .expect("the list of skipped tests can be written");
    }
    reason
}

/// Returns whether a program failed because the kernel refused what the program asked for.
pub fn is_refusal(message: &str) -> bool {
    ["not permitted", "Permission denied", "not supported"].iter().any(|words| message.contains(words))
}
