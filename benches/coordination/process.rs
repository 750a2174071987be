//! Server processes: starts them, reads what they have used, and ends them with the benchmark.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::io::{BufRead as _, BufReader, Read as _};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use rustix::process::{Resource, Rlimit, Signal};

/// The first argument with which this program arranges its end and then becomes a server.
pub const LAUNCH: &str = "--launch";

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

/// Becomes the given program, which the kernel kills when the parent process ends.
///
/// This is a step of its own because the new process itself must ask for that, before the program runs in it.
pub fn launch(mut arguments: impl Iterator<Item = OsString>) -> Result<()> {
    let parent = arguments.next().context("no parent given")?;
    let program = arguments.next().context("no program given")?;
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    let now = rustix::process::getppid().map(|pid| pid.as_raw_nonzero().to_string());
    ensure!(now.as_deref() == parent.to_str(), "the parent has gone already");
    Err(Command::new(&program).args(arguments).exec()).with_context(|| format!("{}", program.display()))
}

/// A server under test.
pub struct Server {
    child: Child,
    // Kept open, because a server may end when one of its pipes does.
    output: mpsc::Receiver<String>,
}

impl Server {
    /// Starts a server and waits for the line of output in which `ready` finds its result.
    pub fn start<T>(
        command: &[OsString],
        log: Option<&Path>,
        ready: impl Fn(&str) -> Option<T>,
    ) -> Result<(Self, T)> {
        let errors = match log {
            Some(path) => fs::File::options().create(true).append(true).open(path)?.into(),
            None => Stdio::null(),
        };
        let mut child = Command::new(std::env::current_exe()?)
            .arg(LAUNCH)
            .arg(std::process::id().to_string())
            .args(command)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(errors)
            .spawn()?;
        let output = child.stdout.take().context("no output")?;
        let (lines, received) = mpsc::channel();
        std::thread::spawn(move || forward(output, &lines));
        let server = Self { child, output: received };
        let deadline = crate::clock::now() + START_MAX;
        loop {
            let left = deadline.saturating_duration_since(crate::clock::now());
            match server.output.recv_timeout(left) {
                Ok(line) => match ready(&line) {
                    Some(found) => {
                        std::thread::sleep(SETTLE);
                        return Ok((server, found));
                    }
                    None => continue,
                },
                Err(mpsc::RecvTimeoutError::Timeout) => bail!("it does not listen after {START_MAX:?}"),
                Err(mpsc::RecvTimeoutError::Disconnected) => bail!("it ended without listening (see --logs)"),
            }
        }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns how it ended, if it has ended by itself.
    pub fn has_ended(&mut self) -> Option<String> {
        self.child.try_wait().ok().flatten().map(|status| status.to_string())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// Forwards the output of a server, so that it never blocks.
fn forward(output: ChildStdout, lines: &mpsc::Sender<String>) {
    let mut output = BufReader::new(output);
    let mut line = String::new();
    while output.by_ref().take(1 << 16).read_line(&mut line).is_ok_and(|length| length > 0) {
        // Once the server is up, no receiver is left.
        drop(lines.send(std::mem::take(&mut line)));
    }
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
