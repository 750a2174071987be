//! The processes of a test, and the output lines of the test programs as records.

use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::Path;
use std::process::Stdio;

use super::harness::process::tied;
use super::line::LogRecord;

pub use super::harness::{CommandOutput, PATIENCE, Process, Signal};

/// The prefixes of variables that would change a program's behaviour; they are removed.
const FOREIGN: [&str; 8] = ["JAX_", "XLA_", "TF_", "GRPC_", "MUSTER_", "OTEL_", "PYTHON", "TEST_"];

/// Starts `program` in a process group of its own, tied to the life of this thread. `label` names it in failures.
pub fn start(label: String, program: &Path, arguments: &[String], variables: &[(&str, String)]) -> Process {
    let mut command = tied(program);
    command.args(arguments);
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy().to_uppercase();
        if FOREIGN.iter().any(|prefix| text.starts_with(prefix)) || text.ends_with("_PROXY") {
            command.env_remove(&name);
        }
    }
    command.envs(variables.iter().map(|(name, value)| (name, value)));
    let mut process = Process::start(command.stdin(Stdio::null()).process_group(0));
    process.name = label;
    process
}

impl Process {
    /// Waits for a line of this kind that `which` accepts.
    #[track_caller]
    pub fn line(&self, name: &str, which: impl Fn(&LogRecord) -> bool) -> LogRecord {
        self.line_after(0, name, which)
    }

    /// Waits for such a line after `mark`.
    #[track_caller]
    pub fn line_after(&self, mark: usize, name: &str, which: impl Fn(&LogRecord) -> bool) -> LogRecord {
        let found = self.find(mark, PATIENCE, |line| {
            LogRecord::parse(&line.text).filter(|line| line.name == name && which(line))
        });
        found.unwrap_or_else(|error| panic!("a line {name:?}: {error}")).0
    }

    /// Returns the lines of this kind so far.
    pub fn records(&self, name: &str) -> Vec<LogRecord> {
        let records = self.lines().into_iter().filter_map(|line| LogRecord::parse(&line.text));
        records.filter(|line| line.name == name).collect()
    }

    /// Waits for a text in the output, and returns its line.
    #[track_caller]
    pub fn text(&self, wanted: &str) -> String {
        let found = self.find(0, PATIENCE, |line| line.text.contains(wanted).then(|| line.text.clone()));
        found.unwrap_or_else(|error| panic!("the text {wanted:?}: {error}")).0
    }

    /// Returns all output that is no line of a test program, mostly its standard error.
    pub fn unstructured(&self) -> String {
        let lines = self.lines().into_iter().map(|line| line.text);
        lines.filter(|text| LogRecord::parse(text).is_none()).collect::<Vec<_>>().join("\n")
    }

    /// Waits for its end, which must be a success.
    #[track_caller]
    pub fn succeed(&self) {
        let end = self.end();
        assert!(end.status.success(), "{}: {}", self.name, end.status);
    }

    /// Waits for its end, which must be a failure: an abort, as of jaxlib when its job has failed, or an error.
    #[track_caller]
    pub fn fail(&self) -> CommandOutput {
        let end = self.end();
        let is_aborted = end.status.signal() == Some(Signal::ABORT.as_raw());
        assert!(is_aborted || end.code.is_some_and(|code| code != 0), "{}: {}", self.name, end.status);
        end
    }
}
