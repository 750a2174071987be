//! Runs the program and waits for its lines and its exit, with generous deadlines and no clock.

use std::ffi::OsStr;
use std::io::{BufRead as _, BufReader, Read};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

/// The deadline of every wait, long enough for the slowest machine.
const PATIENCE: Duration = Duration::from_secs(60);
/// The pause between two checks of a condition.
const PAUSE: Duration = Duration::from_millis(20);

/// Returns a command with these arguments, without settings from this process's environment.
pub fn muster<S: AsRef<OsStr>>(arguments: impl IntoIterator<Item = S>) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_muster"));
    command.args(arguments).stdin(Stdio::null());
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("MUSTER_") {
            command.env_remove(name);
        }
    }
    command
}

/// The exit code and the output of a program.
#[derive(Debug)]
pub struct CommandOutput {
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
}

/// Runs the program to its end and returns its output.
pub fn run(command: &mut Command) -> CommandOutput {
    let output = command.output().expect("the program starts");
    CommandOutput {
        code: output.status.code(),
        out: String::from_utf8_lossy(&output.stdout).into_owned(),
        err: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

/// A running program. Dropping it kills the process.
pub struct CommandProcess {
    child: Child,
    out: OutputLines,
    err: OutputLines,
}

struct OutputLines {
    coming: Receiver<String>,
    seen: Vec<String>,
}

impl OutputLines {
    fn of(stream: impl Read + Send + 'static) -> Self {
        let (send, coming) = channel();
        thread::spawn(move || {
            for line in BufReader::new(stream).lines() {
                let Ok(line) = line else { break };
                if send.send(line).is_err() {
                    break;
                }
            }
        });
        Self { coming, seen: Vec::new() }
    }

    fn wait_for(&mut self, wanted: impl Fn(&str) -> bool) -> String {
        loop {
            match self.coming.recv_timeout(PATIENCE) {
                Ok(line) => {
                    self.seen.push(line.clone());
                    if wanted(&line) {
                        return line;
                    }
                }
                Err(error) => panic!("no such line ({error}) after:\n{}", self.seen.join("\n")),
            }
        }
    }

    fn rest(mut self) -> String {
        self.seen.extend(self.coming.iter());
        self.seen.join("\n")
    }
}

impl CommandProcess {
    /// Starts the program.
    pub fn start(command: &mut Command) -> Self {
        let mut child =
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the program starts");
        let out = OutputLines::of(child.stdout.take().expect("stdout is a pipe"));
        let err = OutputLines::of(child.stderr.take().expect("stderr is a pipe"));
        Self { child, out, err }
    }

    /// Waits for a line of stdout that contains `text`, and returns it.
    pub fn out_line(&mut self, text: &str) -> String {
        self.out.wait_for(|line| line.contains(text))
    }

    /// Waits for a line of stderr that contains `text`, and returns it.
    pub fn err_line(&mut self, text: &str) -> String {
        self.err.wait_for(|line| line.contains(text))
    }

    /// Returns the process id.
    pub fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).expect("process ids are small")
    }

    /// Sends a signal, by its name for `kill`.
    pub fn signal(&self, name: &str) {
        signal(self.pid(), name);
    }

    /// Waits for the exit and returns the output.
    pub fn end(mut self) -> CommandOutput {
        wait_until("the program has ended", || {
            self.child.try_wait().expect("it can be waited for").is_some()
        });
        let code = self.child.wait().expect("it has ended").code();
        let (out, err) =
            (std::mem::replace(&mut self.out, nothing()), std::mem::replace(&mut self.err, nothing()));
        CommandOutput { code, out: out.rest(), err: err.rest() }
    }
}

fn nothing() -> OutputLines {
    OutputLines { coming: channel().1, seen: Vec::new() }
}

impl Drop for CommandProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Sends a signal to a process, by its name for `kill`.
pub fn signal(pid: i32, name: &str) {
    let sent = Command::new("sh").args(["-c", &format!("kill -{name} {pid}")]).status();
    assert!(sent.expect("sh runs").success(), "no signal {name} could be sent to {pid}");
}

/// Returns whether a process is running; a zombie is not.
pub fn lives(pid: i32) -> bool {
    let Ok(stat) = std::fs::read_to_string(format!("/proc/{pid}/stat")) else { return false };
    let state = stat.rsplit_once(')').and_then(|(_, rest)| rest.trim_start().chars().next());
    !matches!(state, Some('Z' | 'X') | None)
}

/// Waits until a condition holds.
pub fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let looks = PATIENCE.as_millis() / PAUSE.as_millis();
    for _ in 0..looks {
        if holds() {
            return;
        }
        thread::sleep(PAUSE);
    }
    panic!("it never came to this: {what}");
}
