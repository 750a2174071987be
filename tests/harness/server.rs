//! The servers under test. Each runs in its own process, which ends when its value is dropped.

use std::net::SocketAddr;
use std::ops::{Deref, DerefMut};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use anyhow::{Context as _, Result};
use rustix::process::Signal;

use super::http::{self, HttpResponse, JSON};
use super::process::{OutputStream, Process, muster, signal};
use super::time::PATIENCE;

/// The addresses of a server that chooses its ports.
pub const ANY_PORTS: [&str; 4] = ["--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0"];

/// A running `muster serve`.
pub struct MusterServer {
    pub process: Process,
    pub grpc: SocketAddr,
    pub http: SocketAddr,
}

impl MusterServer {
    /// Starts a server with these further arguments.
    #[track_caller]
    pub fn start(arguments: &[&str]) -> Self {
        Self::start_with(arguments, &[])
    }

    /// Starts a server with these further arguments and environment variables.
    #[track_caller]
    pub fn start_with(arguments: &[&str], variables: &[(&str, &str)]) -> Self {
        let mut command = muster(["serve"].iter().chain(&ANY_PORTS).chain(arguments));
        Self::run(command.envs(variables.iter().copied()))
    }

    /// Runs a command that becomes a server.
    #[track_caller]
    pub fn run(command: &mut Command) -> Self {
        Self::spawn(command.stderr(Stdio::piped()), PATIENCE).unwrap_or_else(|error| panic!("{error:#}"))
    }

    /// Starts a server with a heartbeat timeout, unless the arguments have one, that is so long that no task fails
    /// by accident on a slow machine.
    #[track_caller]
    pub fn patient(arguments: &[&str]) -> Self {
        Self::patient_with(arguments, &[])
    }

    /// Starts such a server with these environment variables.
    #[track_caller]
    pub fn patient_with(arguments: &[&str], variables: &[(&str, &str)]) -> Self {
        const TIMEOUT: [&str; 2] = ["--heartbeat-timeout", "1h"];
        let timeout = if arguments.contains(&TIMEOUT[0]) { &[][..] } else { &TIMEOUT };
        Self::start_with(&[arguments, timeout].concat(), variables)
    }

    /// Starts a server with one job of these options and with further arguments.
    #[track_caller]
    pub fn of_job(options: &JobOptions, further: &[&str]) -> Self {
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
        Self::start(&arguments)
    }

    /// Starts a server with a JSON log, in which it announces its addresses.
    #[track_caller]
    pub fn start_json(arguments: &[&str]) -> Self {
        let mut command = muster(["serve", "--log-format", "json", "--log", "debug"]);
        let mut process = Process::start(command.args(ANY_PORTS).args(arguments));
        let line: serde_json::Value = serde_json::from_str(&process.err_line("\"serving\"")).expect("JSON");
        let at = |name: &str| line[name].as_str().and_then(|text| text.parse().ok()).expect("an address");
        Self { grpc: at("grpc"), http: at("http"), process }
    }

    /// Kills the process that serves for a keeper, with SIGKILL, and returns its id.
    #[track_caller]
    pub fn kill_core(&self) -> i32 {
        let core = self.process.first_child().expect("the keeper has a core");
        signal(core, Signal::KILL);
        core
    }

    /// Starts a command that becomes a server, and waits until it has printed its addresses.
    pub fn spawn(command: &mut Command, limit: Duration) -> Result<Self> {
        let mut process = Process::spawn(command.stdout(Stdio::piped()))?;
        let mut addresses = || -> Result<_> {
            let mut named = |name: &str| {
                process.next(OutputStream::Stdout, limit, |line| {
                    line.split_once(name).and_then(|(_, rest)| address(rest))
                })
            };
            Ok((named("gRPC  ")?, named("HTTP  ")?))
        };
        let found = addresses();
        let (grpc, http) =
            found.with_context(|| format!("the server does not listen:\n{}", process.said()))?;
        Ok(Self { process, grpc, http })
    }

    /// Returns the URL for subcommands.
    pub fn url(&self) -> String {
        format!("http://{}", self.http)
    }

    /// Sends a GET request.
    #[track_caller]
    pub fn get(&self, path: &str) -> HttpResponse {
        http::get(self.http, path).expect("the server answers")
    }

    /// Sends a GET request with this header.
    #[track_caller]
    pub fn get_with(&self, path: &str, header: &str) -> HttpResponse {
        http::send(self.http, "GET", path, &[header], "").expect("the server answers")
    }

    /// Sends a request with a JSON body.
    #[track_caller]
    pub fn send(&self, method: &str, path: &str, body: &str) -> HttpResponse {
        http::send(self.http, method, path, &[JSON], body).expect("the server answers")
    }
}

/// A server is its process: its output, its signals, its end and its memory.
impl Deref for MusterServer {
    type Target = Process;

    fn deref(&self) -> &Process {
        &self.process
    }
}

impl DerefMut for MusterServer {
    fn deref_mut(&mut self) -> &mut Process {
        &mut self.process
    }
}

/// Returns the address at the beginning of a text, without its scheme.
pub fn address(text: &str) -> Option<SocketAddr> {
    let first = text.split_whitespace().next()?;
    first.split_once("://").map_or(first, |(_, address)| address).trim_end_matches('/').parse().ok()
}

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

/// A running coordination service of jaxlib.
pub struct Cxx {
    process: Process,
    address: SocketAddr,
}

impl Cxx {
    /// Starts a service for one job from this environment.
    #[track_caller]
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
        // The end of stdin tells the service to exit, however this process ends.
        let mut process = Process::start(command.stdin(Stdio::piped()));
        let ready = process.out_line("READY port=");
        let port = ready.strip_prefix("READY port=").and_then(|port| port.parse().ok()).expect("a port");
        Self { process, address: SocketAddr::from(([127, 0, 0, 1], port)) }
    }

    /// Returns the address of the service.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns its output.
    pub fn said(&self) -> String {
        self.process.said()
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
