//! Processes of a test: starts programs, reads their output line by line, signals them, and waits for their end. A
//! process is killed when its [`Process`] is dropped.
//!
//! Methods that return a `Result` are for benchmarks. The other methods fail the test. Begin at [`Process`].

use std::ffi::OsStr;
use std::io::{self, BufRead as _, BufReader, Read, Write as _};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use rustix::process::{
    Pid, Signal, WaitId, WaitIdOptions, getpgid, kill_process, kill_process_group, waitid,
};

use super::time::{PATIENCE, TestInstant};

/// The number of last output lines that a failed test shows.
const LINES_SHOWN: usize = 25;

/// A running program. Dropping it kills the program, and its process group if it leads one.
pub struct Process {
    /// The name of the program in failures.
    pub name: String,
    pid: Pid,
    child: Mutex<Child>,
    output: Arc<ProcessOutput>,
    /// The lines that [`Self::read_line`] and its kind have passed, of standard output and of standard error.
    read: [usize; 2],
}

/// One of the two outputs of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OutputStream {
    Stdout,
    Stderr,
}

/// A line of output, without its line break.
#[derive(Debug, Clone)]
pub struct OutputLine {
    pub stream: OutputStream,
    pub text: String,
}

#[derive(Default)]
struct ProcessOutput {
    state: Mutex<OutputState>,
    changed: Condvar,
}

#[derive(Default)]
struct OutputState {
    lines: Vec<OutputLine>,
    /// The number of piped outputs that are still open.
    open: usize,
    ended_at: Option<TestInstant>,
}

impl ProcessOutput {
    fn lock(&self) -> MutexGuard<'_, OutputState> {
        self.state.lock().expect("no holder panics")
    }

    fn update(&self, change: impl FnOnce(&mut OutputState)) {
        change(&mut self.lock());
        self.changed.notify_all();
    }
}

impl OutputState {
    fn is_over(&self) -> bool {
        self.ended_at.is_some() && self.open == 0
    }

    fn text_of(&self, stream: OutputStream) -> String {
        let lines = self.lines.iter().filter(|line| line.stream == stream).map(|line| line.text.as_str());
        lines.collect::<Vec<_>>().join("\n")
    }
}

/// The exit and the output of a program.
#[derive(Debug)]
pub struct CommandOutput {
    pub code: Option<i32>,
    pub status: ExitStatus,
    /// The time of its end.
    pub at: TestInstant,
    pub out: String,
    pub err: String,
}

impl Process {
    /// Starts a command with both outputs piped.
    #[track_caller]
    pub fn start(command: &mut Command) -> Self {
        Self::spawn(command.stdout(Stdio::piped()).stderr(Stdio::piped()))
            .unwrap_or_else(|error| panic!("{error:#}"))
    }

    /// Starts a command and reads the outputs that it pipes.
    pub fn spawn(command: &mut Command) -> Result<Self> {
        let name = command.get_program().display().to_string();
        let mut child = command.spawn().with_context(|| format!("{name} cannot be started"))?;
        let pid = Pid::from_child(&child);
        let (out, err) = (child.stdout.take(), child.stderr.take());
        let output = Arc::new(ProcessOutput::default());
        output.lock().open = usize::from(out.is_some()) + usize::from(err.is_some());
        if let Some(out) = out {
            follow(out, OutputStream::Stdout, Arc::clone(&output));
        }
        if let Some(err) = err {
            follow(err, OutputStream::Stderr, Arc::clone(&output));
        }
        watch(pid, Arc::clone(&output));
        Ok(Self { name, pid, child: Mutex::new(child), output, read: [0; 2] })
    }

    /// Waits until `look` finds something in a line from number `from` on. Returns it with the number of the next
    /// line.
    pub fn find<T>(
        &self,
        from: usize,
        limit: Duration,
        mut look: impl FnMut(&OutputLine) -> Option<T>,
    ) -> Result<(T, usize)> {
        let (mut next, mut found) = (from, None);
        let waits = |state: &mut OutputState| {
            while found.is_none() && next < state.lines.len() {
                found = look(&state.lines[next]);
                next += 1;
            }
            found.is_none() && !state.is_over()
        };
        let (state, _) = self
            .output
            .changed
            .wait_timeout_while(self.output.lock(), limit, waits)
            .expect("no holder panics");
        match found {
            Some(found) => Ok((found, next)),
            None if state.is_over() => bail!("{} has ended", self.name),
            None => bail!("{} did not say it within {limit:?}", self.name),
        }
    }

    /// Waits until `look` finds something in a further line of an output, after the line of the last such wait.
    pub fn next<T>(
        &mut self,
        stream: OutputStream,
        limit: Duration,
        mut look: impl FnMut(&str) -> Option<T>,
    ) -> Result<T> {
        let from = self.read[stream as usize];
        let (found, next) =
            self.find(from, limit, |line| if line.stream == stream { look(&line.text) } else { None })?;
        self.read[stream as usize] = next;
        Ok(found)
    }

    /// Waits for the next line of standard output.
    pub fn read_line(&mut self, limit: Duration) -> Result<String> {
        self.next(OutputStream::Stdout, limit, |line| Some(line.to_owned()))
    }

    /// Waits for a further line of standard output that contains `text`, and returns it.
    #[track_caller]
    pub fn out_line(&mut self, text: &str) -> String {
        self.next_with(OutputStream::Stdout, text)
    }

    /// Waits for a further line of standard error that contains `text`, and returns it.
    #[track_caller]
    pub fn err_line(&mut self, text: &str) -> String {
        self.next_with(OutputStream::Stderr, text)
    }

    #[track_caller]
    fn next_with(&mut self, stream: OutputStream, text: &str) -> String {
        let found = self.next(stream, PATIENCE, |line| line.contains(text).then(|| line.to_owned()));
        found.unwrap_or_else(|error| self.fail_with(&format!("no line with {text:?}: {error}")))
    }

    /// Fails the test and shows the last lines of the output.
    #[track_caller]
    fn fail_with(&self, what: &str) -> ! {
        panic!("{}: {what}; its last lines:\n{}", self.name, self.last_lines(LINES_SHOWN))
    }

    fn last_lines(&self, count: usize) -> String {
        let state = self.output.lock();
        let skipped = state.lines.len().saturating_sub(count);
        state.lines[skipped..].iter().map(|line| line.text.as_str()).collect::<Vec<_>>().join("\n")
    }

    /// Returns all lines so far.
    pub fn lines(&self) -> Vec<OutputLine> {
        self.output.lock().lines.clone()
    }

    /// Returns the number of lines so far, for [`Self::find`].
    pub fn mark(&self) -> usize {
        self.output.lock().lines.len()
    }

    /// Returns all output so far.
    pub fn said(&self) -> String {
        self.last_lines(usize::MAX)
    }

    /// Writes a line to its standard input, which must be piped.
    pub fn say(&self, line: &str) -> Result<()> {
        let mut child = self.child.lock().expect("no holder panics");
        let input = child.stdin.as_mut().context("its standard input is not piped")?;
        Ok(input.write_all(format!("{line}\n").as_bytes())?)
    }

    /// Returns the process id.
    pub fn pid(&self) -> i32 {
        self.pid.as_raw_pid()
    }

    /// Returns its first child: of a keeper, the process that serves.
    pub fn first_child(&self) -> Option<i32> {
        let pid = self.pid();
        let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).ok()?;
        children.split_whitespace().next()?.parse().ok()
    }

    /// Sends a signal, and returns the time of that.
    #[track_caller]
    pub fn signal(&self, signal: Signal) -> TestInstant {
        let now = TestInstant::now();
        // The id is not reused until the exit status was read.
        kill_process(self.pid, signal).unwrap_or_else(|error| panic!("{}: {signal:?}: {error}", self.name));
        now
    }

    /// Returns whether it still runs.
    pub fn is_running(&self) -> bool {
        self.output.lock().ended_at.is_none()
    }

    /// Returns its exit status, if it has ended.
    pub fn exit_status(&self) -> Option<ExitStatus> {
        self.child.lock().expect("no holder panics").try_wait().ok().flatten()
    }

    /// Waits for its end and for the end of its output.
    #[track_caller]
    pub fn end(&self) -> CommandOutput {
        let waits = |state: &mut OutputState| !state.is_over();
        let waited = self.output.changed.wait_timeout_while(self.output.lock(), PATIENCE, waits);
        let (state, _) = waited.expect("no holder panics");
        let Some(at) = state.ended_at.filter(|_| state.is_over()) else {
            drop(state);
            self.fail_with("it does not end")
        };
        let (out, err) = (state.text_of(OutputStream::Stdout), state.text_of(OutputStream::Stderr));
        drop(state);
        let status =
            self.child.lock().expect("no holder panics").wait().expect("it is a child of this process");
        CommandOutput { code: status.code(), status, at, out, err }
    }

    /// Returns the CPU time that it has used.
    pub fn cpu(&self) -> Duration {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.pid())).expect("it runs");
        // The second field is a name in brackets, which may contain anything.
        let fields: Vec<&str> =
            stat.rsplit_once(')').map_or("", |(_, rest)| rest).split_whitespace().collect();
        let ticks: u64 = fields[11..13].iter().filter_map(|field| field.parse::<u64>().ok()).sum();
        Duration::from_millis(ticks * 1000 / rustix::param::clock_ticks_per_second())
    }

    /// Returns its resident memory, in bytes.
    pub fn resident_bytes(&self) -> u64 {
        self.memory("VmRSS:")
    }

    /// Returns its peak resident memory, in bytes.
    pub fn peak_resident_bytes(&self) -> u64 {
        self.memory("VmHWM:")
    }

    fn memory(&self, name: &str) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid())).expect("it runs");
        let line = status.lines().find(|line| line.starts_with(name)).expect("a running process has memory");
        let kib: u64 = line.split_whitespace().nth(1).and_then(|kib| kib.parse().ok()).expect("a number");
        kib * 1024
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let how = if self.is_running() { "runs" } else { "has ended" };
            eprintln!("--- {} ({how}), its last lines:\n{}", self.name, self.last_lines(LINES_SHOWN));
        }
        // It may have ended already.
        let _ = match getpgid(Some(self.pid)) {
            Ok(group) if group == self.pid => kill_process_group(self.pid, Signal::KILL),
            _ => Ok(()),
        };
        if let Ok(mut child) = self.child.lock() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Reads lines until the end of an output, so that the program never blocks on it.
fn follow(stream: impl Read + Send + 'static, which: OutputStream, output: Arc<ProcessOutput>) {
    std::thread::spawn(move || {
        let mut stream = BufReader::new(stream);
        let mut bytes = Vec::new();
        while stream.read_until(b'\n', &mut bytes).is_ok_and(|count| count > 0) {
            let text = String::from_utf8_lossy(&bytes);
            let text = text.strip_suffix('\n').unwrap_or(&text);
            let text = text.strip_suffix('\r').unwrap_or(text).to_owned();
            output.update(|state| state.lines.push(OutputLine { stream: which, text }));
            bytes.clear();
        }
        output.update(|state| state.open -= 1);
    });
}

/// Records the time of a process's end, and leaves its exit status to be read.
fn watch(pid: Pid, output: Arc<ProcessOutput>) {
    std::thread::spawn(move || {
        let ended = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        while waitid(WaitId::Pid(pid), ended).is_err_and(|error| error == rustix::io::Errno::INTR) {}
        output.update(|state| state.ended_at = Some(TestInstant::now()));
    });
}

/// Returns a command of this build's program with these arguments, without settings from this process's
/// environment. A server keeps no journal unless the arguments name its folder: two tests may get the same port.
pub fn muster<S: AsRef<OsStr>>(arguments: impl IntoIterator<Item = S>) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_muster"));
    command.args(arguments).stdin(Stdio::null());
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("MUSTER_") {
            command.env_remove(name);
        }
    }
    let mut words = command.get_args();
    if words.next().is_some_and(|word| word == "serve") && !words.any(|word| word == "--data-dir") {
        command.env("MUSTER_EPHEMERAL", "true");
    }
    command
}

/// Returns a command that becomes `program`, which the kernel kills when the calling thread ends.
pub fn tied(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_muster"));
    command.args(["__become", "--parent", &std::process::id().to_string(), "--"]).arg(program);
    command
}

/// Runs a command to its end.
pub fn run(command: &mut Command) -> CommandOutput {
    let output = command.output().expect("the program starts");
    let [out, err] = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    CommandOutput { code: output.status.code(), status: output.status, at: TestInstant::now(), out, err }
}

/// Runs a command to its end with this standard input.
pub fn run_with_input(command: &mut Command, input: &str) -> io::Result<Output> {
    let command = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn()?;
    let mut stdin = child.stdin.take().expect("it is piped");
    // A program that does not read its input does not need it.
    let _ = stdin.write_all(input.as_bytes());
    drop(stdin);
    child.wait_with_output()
}

/// Returns the arguments with which a test program runs one ignored test alone.
pub fn test_arguments(name: &str) -> [&str; 4] {
    ["--exact", name, "--ignored", "--nocapture"]
}

/// Runs an ignored test of this program in a process of its own, which must succeed.
#[track_caller]
pub fn run_ignored_test(name: &str) {
    let program = std::env::current_exe().expect("this program has a path");
    let status = Command::new(program).args(test_arguments(name)).status().expect("this program starts");
    assert!(status.success(), "{name}: {status}");
}

/// Sends a signal to a process that is no child of this one.
#[track_caller]
pub fn signal(pid: i32, signal: Signal) {
    let sent = Pid::from_raw(pid).map(|pid| kill_process(pid, signal));
    assert_eq!(sent, Some(Ok(())), "no {signal:?} could be sent to {pid}");
}

/// Returns whether a process is running; a zombie is not.
pub fn is_alive(pid: i32) -> bool {
    let Ok(stat) = std::fs::read_to_string(format!("/proc/{pid}/stat")) else { return false };
    let state = stat.rsplit_once(')').and_then(|(_, rest)| rest.trim_start().chars().next());
    !matches!(state, Some('Z' | 'X') | None)
}
