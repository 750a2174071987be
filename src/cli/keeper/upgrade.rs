//! The trial of an upgrade: whether another program can take over. Begin at [`try_program`].

use std::ffi::OsString;
use std::process::Stdio;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::super::self_command;
use super::program::Program;

/// The hidden flag of a program that only says whether it could take over.
pub const TRIAL_FLAG: &str = "trial";
/// The time that a trial may take.
const TRIAL_TIMEOUT: Duration = Duration::from_secs(120);
/// The characters at the end of a program's output that a failure shows.
const OUTPUT_SHOWN: usize = 2000;

/// The report of a program that could take over.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrialReport {
    /// Its version.
    pub version: String,
    /// The encoding of the journal that it writes.
    pub encoding: u32,
    /// The version of kept connections. Only a program with the same version continues them.
    #[serde(default)]
    pub kept_connections: u64,
    /// The number of inputs that it has applied to the latest snapshot, while the present process goes on.
    pub inputs: u64,
}

/// Starts a program that checks the configuration and reads the journal, changes nothing and ends. Returns the program, and the
/// number of inputs that it has applied.
///
/// # Errors
/// Why it cannot take over.
pub async fn try_program(command: Vec<String>) -> Result<(Program, u64), String> {
    let mut program = Program::open(command.into_iter().map(OsString::from).collect(), 0);
    let name = program.name();
    let spawned = program.spawn(|command| {
        command.args(self_command::arguments()).arg(format!("--{TRIAL_FLAG}"));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    });
    let process = spawned.map_err(|error| format!("cannot run {name}: {error}"))?;
    let output = match tokio::time::timeout(TRIAL_TIMEOUT, process.wait_with_output()).await {
        Err(_) => return Err(format!("{name} did not read the journal within {TRIAL_TIMEOUT:?}")),
        Ok(Err(error)) => return Err(format!("cannot run {name}: {error}")),
        Ok(Ok(output)) => output,
    };
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        let said = said.trim();
        let start = said.char_indices().rev().nth(OUTPUT_SHOWN).map_or(0, |(at, _)| at);
        return Err(format!("{name} cannot take over ({}): {}", output.status, &said[start..]));
    }
    let report: TrialReport = serde_json::from_slice(&output.stdout)
        .map_err(|_| format!("{name} is no program that can take over"))?;
    (program.version, program.encoding) = (report.version, report.encoding);
    program.kept_connections = report.kept_connections;
    Ok((program, report.inputs))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_program_that_is_none_of_ours_is_refused_with_its_words() {
        let refusal = async |text: &[&str]| {
            try_program(text.iter().map(ToString::to_string).collect()).await.expect_err("it is refused")
        };
        let missing = refusal(&["/nowhere/muster"]).await;
        assert!(missing.contains("cannot run /nowhere/muster"), "{missing}");
        let failing = refusal(&["/bin/sh", "-c", "echo too old >&2; exit 3"]).await;
        assert!(failing.contains("exit status: 3") && failing.ends_with("too old"), "{failing}");
        let other = refusal(&["/bin/echo", "hello"]).await;
        assert!(other.contains("is no program that can take over"), "{other}");
        refusal(&[]).await;
    }
}
