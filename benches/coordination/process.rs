//! Server processes: starts them, reads their processor time and memory, and ends them with the benchmark.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, Result};
use rustix::process::{Resource, Rlimit};

use crate::harness::process::{OutputStream, Process, tied};

/// The timeout of a server's start. jaxlib needs most of it on a busy machine.
const START_MAX: Duration = Duration::from_secs(60);

/// The pause after a start, so that its work is not charged to the first request.
const SETTLE: Duration = Duration::from_millis(200);

/// Raises the limit on open files of this process and its servers as far as the system permits.
pub fn raise_file_limit() -> u64 {
    let limit = rustix::process::getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    if rustix::process::setrlimit(Resource::Nofile, raised).is_err() {
        return limit.current.unwrap_or(u64::MAX);
    }
    limit.maximum.unwrap_or(u64::MAX)
}

/// Starts a server, which ends with the benchmark, and waits for the line of output in which `ready` finds its
/// result.
pub fn start_server<T>(
    command: &[OsString],
    log: Option<&Path>,
    ready: impl Fn(&str) -> Option<T>,
) -> Result<(Process, T)> {
    let errors = match log {
        Some(path) => fs::File::options().create(true).append(true).open(path)?.into(),
        None => Stdio::null(),
    };
    let (program, arguments) = command.split_first().context("no program given")?;
    // A server may end when its standard input does.
    let mut command = tied(program);
    let command = command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(errors);
    let mut server = Process::spawn(command)?;
    let found =
        server.next(OutputStream::Stdout, START_MAX, ready).context("it does not listen (see --logs)")?;
    std::thread::sleep(SETTLE);
    Ok((server, found))
}

/// The processor time that a process has used up to some moment.
pub struct CpuReading {
    /// The time of each live thread, to the nanosecond.
    threads: BTreeMap<u32, u64>,
    /// The time of all threads, ended ones too, to the tick.
    ticks: u64,
}

impl CpuReading {
    pub fn take(pid: u32) -> Result<Self> {
        let mut threads = BTreeMap::new();
        for entry in fs::read_dir(format!("/proc/{pid}/task")).context("the server is gone")? {
            let entry = entry?;
            // A thread may end after it was listed and before it is read.
            let Ok(text) = fs::read_to_string(entry.path().join("schedstat")) else { continue };
            let spent = text.split_whitespace().next().context("schedstat is empty")?.parse()?;
            threads.insert(entry.file_name().to_string_lossy().parse()?, spent);
        }
        let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
        // The second field is a name in brackets, which may contain anything.
        let (_, fields) = stat.rsplit_once(')').context("stat has no name")?;
        let fields: Vec<_> = fields.split_whitespace().collect();
        let field = |number: usize| -> Result<u64> { Ok(fields[number - 3].parse()?) };
        Ok(Self { threads, ticks: field(14)? + field(15)? })
    }

    /// Returns the time used since an earlier reading.
    pub fn since(&self, earlier: &Self) -> Duration {
        let mut exact = 0;
        for (thread, spent) in &self.threads {
            exact += spent.saturating_sub(earlier.threads.get(thread).copied().unwrap_or(0));
        }
        let exact = Duration::from_nanos(exact);
        let ticks = TICK * u32::try_from(self.ticks.saturating_sub(earlier.ticks)).unwrap_or(u32::MAX);
        // The sum over threads misses those that ended in between; the process's count has them but is
        // coarse.
        exact.max(ticks.saturating_sub(2 * TICK))
    }
}

/// The resolution in which Linux reports processor time to programs: a hundredth of a second.
const TICK: Duration = Duration::from_millis(10);

/// Returns the most memory that a process has held, and its present memory, in MiB.
pub fn memory(pid: u32) -> Result<(f64, f64)> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).context("the server is gone")?;
    let line = |name: &str| -> Result<f64> {
        let found = status.lines().find_map(|line| line.strip_prefix(name));
        let kib: f64 = found.context("no such line in status")?.trim().trim_end_matches(" kB").parse()?;
        Ok(kib / 1024.0)
    };
    Ok((line("VmHWM:")?, line("VmRSS:")?))
}
