//! The processes of the benchmark: this program again, with orders line by line.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use rustix::process::{Signal, set_parent_process_death_signal};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::Target;

/// The client or the attacker, which is killed when this is dropped.
pub struct ChildProcess {
    child: Child,
    orders: ChildStdin,
    answers: Receiver<String>,
}

impl ChildProcess {
    pub fn start(words: &[&str], target: &Target) -> Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(words).args([target.grpc.to_string(), target.http.to_string()]);
        command.arg(target.seconds.to_string());
        if target.stores {
            command.arg("--stores");
        }
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let orders = child.stdin.take().context("no pipe to it")?;
        let output = child.stdout.take().context("no pipe from it")?;
        Ok(Self { child, orders, answers: lines(output) })
    }

    /// Sends an order.
    pub fn say(&mut self, word: &str) -> Result<()> {
        Ok(writeln!(self.orders, "{word}")?)
    }

    fn line(&self, most: Duration) -> Result<String> {
        match self.answers.recv_timeout(most) {
            Ok(line) => Ok(line),
            Err(mpsc::RecvTimeoutError::Timeout) => bail!("it says nothing for {most:?}"),
            Err(mpsc::RecvTimeoutError::Disconnected) => bail!("it has ended"),
        }
    }

    /// Waits for this line.
    pub fn expect(&self, word: &str, most: Duration) -> Result<()> {
        let line = self.line(most)?;
        if line == word { Ok(()) } else { bail!("it says {line:?} instead of {word:?}") }
    }

    /// Waits for the result.
    pub fn answer<T: DeserializeOwned>(&self, most: Duration) -> Result<T> {
        Ok(serde_json::from_str(&self.line(most)?)?)
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// Forwards the output of a process, so that it never blocks.
pub fn lines(output: impl std::io::Read + Send + 'static) -> Receiver<String> {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        for line in BufReader::new(output).lines().map_while(Result::ok) {
            // Once the server is up, no receiver is left.
            drop(sender.send(line));
        }
    });
    receiver
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
