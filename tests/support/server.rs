//! Services in processes of their own, which end with their guards.

use std::io::{BufRead as _, BufReader, Read};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

/// The time limit for a start; it is long because the machine may be compiling.
const START_LIMIT: Duration = Duration::from_secs(60);
/// The number of last lines that are kept for error messages.
const LINES_KEPT: usize = 200;

/// The options of the job that a service serves.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct JobOptions {
    pub tasks: u32,
    pub recoverable: bool,
    pub heartbeat_timeout_s: u32,
    pub shutdown_timeout_s: u32,
    pub register_timeout_s: u32,
}

impl JobOptions {
    /// Returns a job of `tasks` tasks whose timeouts no test reaches.
    pub fn new(tasks: u32) -> Self {
        Self {
            tasks,
            recoverable: false,
            heartbeat_timeout_s: 100,
            shutdown_timeout_s: 60,
            register_timeout_s: 60,
        }
    }
}

/// A process that is killed on drop.
struct Process {
    child: Child,
    said: Arc<Mutex<Vec<String>>>,
}

impl Process {
    /// Starts a program and reads its output until `find` returns a result for the lines so far.
    fn start<T>(command: &mut Command, find: impl Fn(&[String]) -> Option<T>) -> (Self, T) {
        let program = command.get_program().display().to_string();
        let mut child = command
            // The end of stdin tells a service to exit, however this process ends.
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("cannot run {program}: {error}"));
        let said = Arc::default();
        let (news, heard) = mpsc::channel();
        keep_lines(child.stdout.take().expect("it is piped"), Arc::clone(&said), news.clone());
        keep_lines(child.stderr.take().expect("it is piped"), Arc::clone(&said), news);
        let process = Self { child, said };
        loop {
            if let Some(found) = find(&process.lines()) {
                return (process, found);
            }
            if heard.recv_timeout(START_LIMIT).is_err() {
                panic!("{program} did not come up; it said:\n{}", process.lines().join("\n"));
            }
        }
    }

    fn lines(&self) -> Vec<String> {
        self.said.lock().expect("no holder panics").clone()
    }

    /// Asks the process to exit gracefully.
    fn terminate(&self) {
        // The process may have exited already.
        let _ = rustix::process::kill_process(
            rustix::process::Pid::from_child(&self.child),
            rustix::process::Signal::TERM,
        );
    }

    fn has_ended(&mut self) -> bool {
        !matches!(self.child.try_wait(), Ok(None))
    }
}

/// Reads lines until the end of the stream, so that the program never blocks on its output.
fn keep_lines(stream: impl Read + Send + 'static, said: Arc<Mutex<Vec<String>>>, news: mpsc::Sender<()>) {
    std::thread::spawn(move || {
        for line in BufReader::new(stream).lines().map_while(Result::ok) {
            let mut said = said.lock().expect("no holder panics");
            if said.len() == LINES_KEPT {
                said.remove(0);
            }
            said.push(line);
            // After the start the receiver is gone.
            let _ = news.send(());
        }
    });
}

impl Drop for Process {
    fn drop(&mut self) {
        // The process may have exited already; then it is only reaped.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A running `muster serve`.
pub struct Muster {
    process: Process,
    grpc: SocketAddr,
    http: SocketAddr,
}

impl Muster {
    /// Starts a server with one job of these options and with further arguments.
    pub fn start(options: &JobOptions, further: &[&str]) -> Self {
        let tasks = options.tasks.to_string();
        let [heartbeat, shutdown, register] =
            [options.heartbeat_timeout_s, options.shutdown_timeout_s, options.register_timeout_s]
                .map(|seconds| format!("{seconds}s"));
        let mut arguments = vec!["--tasks", &tasks, "--heartbeat-timeout", &heartbeat];
        arguments.extend(["--shutdown-timeout", &shutdown, "--register-timeout", &register]);
        if options.recoverable {
            arguments.push("--recoverable");
        }
        arguments.extend(further);
        Self::serve(&arguments)
    }

    /// Starts a server with these arguments.
    pub fn serve(arguments: &[&str]) -> Self {
        Self::serve_with(arguments, &[])
    }

    /// Starts a server with these arguments and environment variables.
    pub fn serve_with(arguments: &[&str], variables: &[(&str, &str)]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_muster"));
        command.args(["serve", "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0"]).args(arguments);
        command.envs(variables.iter().copied());
        if !arguments.contains(&"--heartbeat-timeout") {
            // Long enough that no task fails by accident on a slow machine.
            command.args(["--heartbeat-timeout", "1h"]);
        }
        let (process, (grpc, http)) = Process::start(&mut command, |lines| {
            let named =
                |name| lines.iter().filter(move |line| line.contains(name)).find_map(|line| address(line));
            named("gRPC  ").zip(named("HTTP  "))
        });
        Self { process, grpc, http }
    }

    /// Returns the address of the gRPC listener.
    pub fn grpc(&self) -> SocketAddr {
        self.grpc
    }

    /// Returns the address of the HTTP listener.
    pub fn http(&self) -> SocketAddr {
        self.http
    }

    /// Returns the CPU time of the process.
    pub fn cpu(&self) -> Duration {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.process.child.id()));
        let stat = stat.expect("it runs");
        let fields: Vec<&str> =
            stat.rsplit_once(')').map_or("", |(_, rest)| rest).split_whitespace().collect();
        let ticks: u64 = fields[11..13].iter().filter_map(|field| field.parse::<u64>().ok()).sum();
        Duration::from_millis(ticks * 1000 / rustix::param::clock_ticks_per_second())
    }

    /// Returns the resident memory, in bytes.
    pub fn resident_bytes(&self) -> u64 {
        self.memory("VmRSS:")
    }

    /// Returns the peak resident memory, in bytes.
    pub fn peak_resident_bytes(&self) -> u64 {
        self.memory("VmHWM:")
    }

    fn memory(&self, name: &str) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.process.child.id()))
            .expect("the server is running, on a system with /proc");
        let line = status.lines().find(|line| line.starts_with(name)).expect("a running process has memory");
        let kib: u64 = line.split_whitespace().nth(1).and_then(|kib| kib.parse().ok()).expect("a number");
        kib * 1024
    }

    /// Asks the server to stop gracefully.
    pub fn terminate(&self) {
        self.process.terminate();
    }

    /// Returns whether the process is still running.
    pub fn is_running(&mut self) -> bool {
        !self.process.has_ended()
    }

    /// Returns the last lines of its output.
    pub fn said(&self) -> String {
        self.process.lines().join("\n")
    }
}

/// Returns the first loopback address in a line.
fn address(line: &str) -> Option<SocketAddr> {
    let from = line.find("127.0.0.1:")?;
    let digits = |c: &char| c.is_ascii_digit() || *c == '.' || *c == ':';
    line[from..].chars().take_while(digits).collect::<String>().parse().ok()
}

/// A running coordination service of jaxlib.
pub struct Cxx {
    process: Process,
    address: SocketAddr,
}

impl Cxx {
    /// Starts a service for one job from this environment.
    pub fn start(environment: &Path, options: &JobOptions) -> Self {
        let mut command = Command::new(environment.join("bin/python"));
        command.arg(jax_tests().join("cxx_service.py"));
        command.args(["--tasks", &options.tasks.to_string()]);
        command.args(["--heartbeat-timeout", &options.heartbeat_timeout_s.to_string()]);
        command.args(["--shutdown-timeout", &options.shutdown_timeout_s.to_string()]);
        command.args(["--register-timeout", &options.register_timeout_s.to_string()]);
        if options.recoverable {
            command.arg("--recoverable");
        }
        let (process, port) = Process::start(&mut command, |lines| {
            lines.iter().find_map(|line| line.strip_prefix("READY port=")).and_then(|port| port.parse().ok())
        });
        Self { process, address: SocketAddr::from(([127, 0, 0, 1], port)) }
    }

    /// Returns the address of the service.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns the last lines of its output.
    pub fn said(&self) -> String {
        self.process.lines().join("\n")
    }
}

/// Returns the folder of the programs for real JAX.
fn jax_tests() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/jax")
}

/// The releases with which the tests compare.
const RELEASES: [&str; 4] = ["0.6.2", "0.9.2", "0.10.2", "0.12.0"];

/// Returns the environment of a JAX release, and installs it if necessary; `None` if this machine cannot have
/// it.
pub fn jax_environment(release: &str) -> Option<PathBuf> {
    static READY: OnceLock<PathBuf> = OnceLock::new();
    let root = READY.get_or_init(|| {
        let root = std::env::var_os("MUSTER_JAX_ENVS")
            .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("target/jax"), PathBuf::from);
        let complete = RELEASES.iter().all(|r| root.join(r).join(".complete").is_file());
        if !complete {
            // The setup prints its errors; a missing result shows below.
            let _ = Command::new("python3")
                .arg(jax_tests().join("setup"))
                .args(RELEASES)
                .env("MUSTER_JAX_ENVS", &root)
                .status();
        }
        root
    });
    let environment = root.join(release);
    environment.join(".complete").is_file().then_some(environment)
}
