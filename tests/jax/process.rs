//! Runs programs as processes: reads their output, awaits their end, and kills them with their test.

use std::io::{BufRead as _, BufReader, Read};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, kill_process_group, waitid};

use super::line::LogRecord;
use super::time::{PATIENCE, TestInstant};

/// The number of last output lines that a failed test shows.
const LINES_SHOWN: usize = 25;
/// The prefixes of variables that would change a program's behaviour; they are removed.
const FOREIGN: [&str; 8] = ["JAX_", "XLA_", "TF_", "GRPC_", "MUSTER_", "OTEL_", "PYTHON", "TEST_"];

/// A running program. It and its descendants are killed when this value is dropped, and the program also when
/// the thread that started it ends.
pub struct Process {
    label: String,
    pid: Pid,
    child: Mutex<Child>,
    heard: Arc<OutputState>,
}

/// The observed state of a process.
#[derive(Default)]
struct OutputState {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    said: Vec<OutputLine>,
    /// The number of its closed outputs.
    closed: usize,
    ended_at: Option<TestInstant>,
}

struct OutputLine {
    text: String,
    line: Option<LogRecord>,
}

/// The end of a process.
#[derive(Debug, Clone, Copy)]
pub struct ProcessEnd {
    /// The time.
    pub at: TestInstant,
    /// The exit status.
    pub status: ExitStatus,
}

impl ProcessEnd {
    /// Returns whether it was aborted, as jaxlib does when its job has failed, or ended with an error.
    pub fn is_failure(&self) -> bool {
        self.status.signal() == Some(Signal::ABORT.as_raw())
            || self.status.code().is_some_and(|code| code != 0)
    }
}

impl Process {
    /// Starts `program`, tied to the life of this thread. `label` names it in failures.
    pub fn start(label: String, program: &Path, arguments: &[String], variables: &[(&str, String)]) -> Self {
        let muster = env!("CARGO_BIN_EXE_muster");
        let mut command = Command::new(muster);
        // Ties the program to this thread's life, and becomes it.
        command.args(["__become", "--parent", &std::process::id().to_string(), "--"]);
        command.arg(program).args(arguments);
        for (name, _) in std::env::vars_os() {
            let text = name.to_string_lossy().to_uppercase();
            if FOREIGN.iter().any(|prefix| text.starts_with(prefix)) || text.ends_with("_PROXY") {
                command.env_remove(&name);
            }
        }
        command.envs(variables.iter().map(|(name, value)| (name, value)));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
        let mut child = command.spawn().unwrap_or_else(|error| panic!("cannot run {muster}: {error}"));
        let pid = Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
        let heard = Arc::new(OutputState::default());
        listen(child.stdout.take().unwrap(), Arc::clone(&heard));
        listen(child.stderr.take().unwrap(), Arc::clone(&heard));
        wait(pid, Arc::clone(&heard));
        Self { label, pid, child: Mutex::new(child), heard }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.heard.state.lock().expect("no holder panics")
    }

    /// Waits until `look` finds something in the observed state.
    #[track_caller]
    fn find<T>(&self, what: &str, mut look: impl FnMut(&State) -> Option<T>) -> T {
        let began = TestInstant::now();
        let mut state = self.state();
        loop {
            if let Some(found) = look(&state) {
                return found;
            }
            let over = state.ended_at.is_some() && state.closed == 2;
            let left = PATIENCE.saturating_sub(began.elapsed());
            if over || left == Duration::ZERO {
                drop(state);
                let why = if over { "it has ended" } else { "waited in vain" };
                panic!("{}: {what}: {why}", self.label);
            }
            (state, _) = self.heard.changed.wait_timeout(state, left).expect("no holder panics");
        }
    }

    /// Returns the present position in the output, for [`Self::line_after`].
    pub fn mark(&self) -> usize {
        self.state().said.len()
    }

    /// Waits for a line of this kind that `which` accepts.
    #[track_caller]
    pub fn line(&self, name: &str, which: impl Fn(&LogRecord) -> bool) -> LogRecord {
        self.line_after(0, name, which)
    }

    /// Waits for such a line after `mark`.
    #[track_caller]
    pub fn line_after(&self, mark: usize, name: &str, which: impl Fn(&LogRecord) -> bool) -> LogRecord {
        self.find(&format!("a line {name:?}"), |state| {
            let mut lines = state.said.iter().skip(mark).filter_map(|said| said.line.as_ref());
            lines.find(|line| line.name == name && which(line)).cloned()
        })
    }

    /// Returns the lines of this kind so far.
    pub fn lines(&self, name: &str) -> Vec<LogRecord> {
        let state = self.state();
        let lines = state.said.iter().filter_map(|said| said.line.as_ref());
        lines.filter(|line| line.name == name).cloned().collect()
    }

    /// Waits for a text in the output, and returns its line.
    #[track_caller]
    pub fn text(&self, wanted: &str) -> String {
        self.find(&format!("the text {wanted:?}"), |state| {
            state.said.iter().find(|said| said.text.contains(wanted)).map(|said| said.text.clone())
        })
    }

    /// Returns all output that is no line of a test program, mostly its standard error.
    pub fn unstructured(&self) -> String {
        let state = self.state();
        let texts = state.said.iter().filter(|said| said.line.is_none()).map(|said| said.text.as_str());
        texts.collect::<Vec<_>>().join("\n")
    }

    /// Returns whether it still runs.
    pub fn is_running(&self) -> bool {
        self.state().ended_at.is_none()
    }

    /// Waits for its end, and for the end of its output.
    #[track_caller]
    pub fn end(&self) -> ProcessEnd {
        let at = self.find("its end", |state| state.ended_at.filter(|_| state.closed == 2));
        let status =
            self.child.lock().expect("no holder panics").wait().expect("it is a child of this process");
        ProcessEnd { at, status }
    }

    /// Waits for its end, which must be a success.
    #[track_caller]
    pub fn succeed(&self) {
        let end = self.end();
        assert!(end.status.success(), "{}: {}", self.label, end.status);
    }

    /// Waits for its end, which must be a failure.
    #[track_caller]
    pub fn fail(&self) -> ProcessEnd {
        let end = self.end();
        assert!(end.is_failure(), "{}: {}", self.label, end.status);
        end
    }

    /// Sends it a signal, and returns the time of that.
    pub fn signal(&self, signal: Signal) -> TestInstant {
        let now = TestInstant::now();
        // Its pid is not reused as long as its exit status was not read.
        kill_process(self.pid, signal).unwrap_or_else(|error| panic!("{}: {signal:?}: {error}", self.label));
        now
    }

    /// Returns its last output, for a person.
    fn show(&self) -> String {
        let state = self.state();
        let skipped = state.said.len().saturating_sub(LINES_SHOWN);
        let how = if state.ended_at.is_some() { "has ended" } else { "runs" };
        let mut text = format!("--- {} ({how}), its last lines:\n", self.label);
        for said in state.said.iter().skip(skipped) {
            text.push_str(&said.text);
            text.push('\n');
        }
        text
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprint!("{}", self.show());
        }
        // It may have ended already.
        let _ = kill_process_group(self.pid, Signal::KILL);
        if let Ok(mut child) = self.child.lock() {
            let _ = child.wait();
        }
    }
}

/// Reads lines until the end of the output, so that the program never blocks on it.
fn listen(stream: impl Read + Send + 'static, heard: Arc<OutputState>) {
    std::thread::spawn(move || {
        let mut stream = BufReader::new(stream);
        let mut bytes = Vec::new();
        while stream.read_until(b'\n', &mut bytes).is_ok_and(|count| count > 0) {
            let text = String::from_utf8_lossy(&bytes).trim_end().to_owned();
            let line = LogRecord::parse(&text);
            heard.state.lock().expect("no holder panics").said.push(OutputLine { text, line });
            heard.changed.notify_all();
            bytes.clear();
        }
        heard.state.lock().expect("no holder panics").closed += 1;
        heard.changed.notify_all();
    });
}

/// Records the time of the process's end, and leaves its exit status to be read.
fn wait(pid: Pid, heard: Arc<OutputState>) {
    std::thread::spawn(move || {
        let ended = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        while waitid(WaitId::Pid(pid), ended).is_err_and(|error| error == rustix::io::Errno::INTR) {}
        heard.state.lock().expect("no holder panics").ended_at = Some(TestInstant::now());
        heard.changed.notify_all();
    });
}
