//! Starts the client and the attacker of the benchmark as processes of this same program, which receive their
//! orders as lines on standard input.

use std::io::Write as _;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Result, bail};
use rustix::process::{Signal, set_parent_process_death_signal};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::Target;
use crate::harness::Process;

/// Starts the client or the attacker.
pub fn start_part(words: &[&str], target: &Target) -> Result<Process> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(words).args([target.grpc.to_string(), target.http.to_string()]);
    command.arg(target.seconds.to_string());
    if target.stores {
        command.arg("--stores");
    }
    Process::spawn(command.stdin(Stdio::piped()).stdout(Stdio::piped()))
}

impl Process {
    /// Waits for this line.
    pub fn expect(&mut self, word: &str, most: Duration) -> Result<()> {
        let line = self.read_line(most)?;
        if line == word { Ok(()) } else { bail!("it says {line:?} instead of {word:?}") }
    }

    /// Waits for the result.
    pub fn answer<T: DeserializeOwned>(&mut self, most: Duration) -> Result<T> {
        Ok(serde_json::from_str(&self.read_line(most)?)?)
    }
}

/// Ends this process with the benchmark.
pub fn end_with_parent() -> Result<()> {
    Ok(set_parent_process_death_signal(Some(Signal::KILL))?)
}

/// Waits for an order of the benchmark.
pub fn wait_for(word: &str) -> Result<()> {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line)?;
    if line.trim() == word { Ok(()) } else { bail!("told {line:?} instead of {word:?}") }
}

/// Sends a line to the benchmark.
pub fn tell(text: &str) -> Result<()> {
    let mut output = std::io::stdout();
    writeln!(output, "{text}")?;
    Ok(output.flush()?)
}

/// Sends a result to the benchmark.
pub fn tell_json(found: &impl Serialize) -> Result<()> {
    tell(&serde_json::to_string(found)?)
}
