//! One typed configuration for every subcommand that runs a server.
//!
//! A value comes from a flag, else from its environment variable, else from the file, else it is the default. The
//! rule has no exception: a flag or a variable holds for every job, also for one that has its own value in the file.
//! Jobs themselves add up: the file, the environment and the flags may each declare some, and where they
//! declare the same one, the stronger of them says how many tasks it has.

use std::collections::BTreeMap;
use std::fmt;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crate::coordination::{Bounds, JobName, JobSettings};
use crate::engine::Engine;
use crate::grpc::GrpcLimits;
use crate::http::{AllowedHosts, BodyBudget, EventStreamLimiter, RedactionPatterns};
use crate::service::{AuditFailurePolicy, AuditLog};
use crate::telemetry::log::LogFormat;
use crate::telemetry::traces::OtlpProtocol;

mod effective;
mod exposure;
mod file;
mod load;
mod settings;
mod value;

pub use exposure::{ExposedAddress, TlsConfig};
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use load::fuzz;
pub use load::load;
pub use settings::{JOB_SETTINGS, SERVER_SETTINGS, Setting, SettingValue, environment_variable};
pub use value::{format_rules, parse_address, parse_rules, parse_tasks};

/// Everything that a server is told.
#[derive(Debug, Clone)]
pub struct Config {
    /// About the server itself.
    pub server: ServerConfig,
    /// Its jobs, none of a name twice.
    pub jobs: Vec<JobConfig>,
    /// Every value with its source, in the order to print.
    values: Vec<ResolvedValue>,
}

/// What the server itself is told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerConfig {
    /// Where clients connect.
    pub grpc: SocketAddr,
    /// What the wire edge allows.
    pub grpc_limits: GrpcLimits,
    /// Where people and tools look.
    pub http: SocketAddr,
    /// Where metrics are served too, on a listener of their own.
    pub metrics: Option<SocketAddr>,
    /// Jobs with more tasks than this have no metrics for each task.
    pub task_metrics_max: usize,
    /// Where traces are sent.
    pub otlp_endpoint: Option<String>,
    /// How they are sent.
    pub otlp_protocol: OtlpProtocol,
    /// Where health is served too, on a listener of its own.
    pub health: Option<SocketAddr>,
    /// How many HTTP connections are served at once.
    pub http_connections: usize,
    /// How many of them one source may have.
    pub http_connections_per_source: usize,
    /// Memory for the bodies of requests over HTTP.
    pub http_bodies_bytes: usize,
    /// How many jobs there may be.
    pub jobs_max: usize,
    /// How many streams of events are served at once.
    pub http_streams: usize,
    /// Threads that serve connections.
    pub io_threads: usize,
    /// How long open connections may take to finish when the server stops.
    pub stop_timeout: Duration,
    /// What is logged.
    pub log: String,
    /// How log lines look.
    pub log_format: LogFormat,
    /// Where the audit is written besides memory.
    pub audit_file: Option<PathBuf>,
    /// What happens to changes while that cannot be written.
    pub audit_failure: AuditFailurePolicy,
    /// How many lines of it are kept in memory.
    pub audit_lines: usize,
    /// Keys whose values are not shown.
    pub redact_keys: RedactionPatterns,
    /// TLS where clients connect.
    pub grpc_tls: TlsConfig,
    /// TLS where people and tools look.
    pub http_tls: TlsConfig,
    /// Names by which the HTTP address may be reached, besides those that are its own.
    pub http_hosts: AllowedHosts,
    /// Who may do what.
    pub tokens_file: Option<PathBuf>,
    /// How long a login in a browser holds.
    pub session_timeout: Duration,
    /// How many changes one actor may ask for in a second.
    pub http_changes_per_second: usize,
    /// Other machines reach the HTTP address without saying who they are.
    pub insecure: bool,
    /// Other machines reach the gRPC addresses without saying who they are.
    pub insecure_grpc: bool,
}

/// What the defaults are chosen for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Profile {
    /// A server of its own, at the well-known ports.
    Serve,
    /// A server beside the tasks that it serves: any free ports, and quiet, for the output is the tasks'.
    Launch,
}

impl ServerConfig {
    /// The defaults.
    #[must_use]
    pub fn new(profile: Profile) -> Self {
        let (grpc, http, log) = match profile {
            Profile::Serve => (8476, 8477, "info"),
            Profile::Launch => (0, 0, "warn,muster::events=error"),
        };
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Self {
            grpc: (Ipv4Addr::LOCALHOST, grpc).into(),
            grpc_limits: GrpcLimits::default(),
            http: (Ipv4Addr::LOCALHOST, http).into(),
            metrics: None,
            task_metrics_max: 1024,
            otlp_endpoint: None,
            otlp_protocol: OtlpProtocol::Grpc,
            health: None,
            http_connections: 1024,
            http_connections_per_source: 512,
            http_bodies_bytes: BodyBudget::DEFAULT,
            jobs_max: Engine::JOBS_MAX,
            http_streams: EventStreamLimiter::DEFAULT,
            io_threads: cores.min(2),
            stop_timeout: Duration::from_secs(10),
            log: log.into(),
            log_format: LogFormat::Human,
            audit_file: None,
            audit_failure: AuditFailurePolicy::default(),
            audit_lines: AuditLog::DEFAULT,
            redact_keys: RedactionPatterns::default(),
            grpc_tls: TlsConfig::default(),
            http_tls: TlsConfig::default(),
            http_hosts: AllowedHosts::default(),
            tokens_file: None,
            session_timeout: Duration::from_secs(12 * 60 * 60),
            http_changes_per_second: 100,
            insecure: false,
            insecure_grpc: false,
        }
    }
}

/// A job as it is declared.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobConfig {
    /// Its name.
    pub name: JobName,
    /// The address of a gRPC listener of its own.
    pub grpc: Option<SocketAddr>,
    /// Its settings.
    pub settings: JobSettings,
}

/// Where a value comes from, weakest first.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum ValueSource {
    /// Nobody said anything.
    Default,
    /// A line of the file.
    File(Arc<Path>, usize),
    /// An environment variable.
    Environment(String),
    /// A flag.
    Flag(String),
}

impl fmt::Display for ValueSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File(path, line) => write!(f, "{}:{line}", path.display()),
            Self::Environment(name) => write!(f, "environment {name}"),
            Self::Flag(name) => write!(f, "flag {name}"),
        }
    }
}

/// A value that was given, as text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GivenValue {
    /// As it was written.
    pub text: String,
    /// Where.
    pub source: ValueSource,
}

/// One line of `muster config print`.
#[derive(Debug, Clone)]
struct ResolvedValue {
    table: String,
    key: String,
    shown: SettingValue,
    source: ValueSource,
}

/// What a command line asks of the configuration.
#[derive(Debug, Clone)]
pub struct ConfigRequest {
    /// Which defaults.
    pub profile: Profile,
    /// The file, if one is named.
    pub file: Option<PathBuf>,
    /// The settings that were given as flags, by the names of their keys.
    pub flags: BTreeMap<&'static str, String>,
    /// The jobs.
    pub jobs: JobSelection,
}

/// The jobs that a command line asks for.
#[derive(Debug, Clone)]
pub enum JobSelection {
    /// Those declared by flags, the environment and the file.
    Declared {
        /// `--tasks`: the job `default`.
        tasks: Option<String>,
        /// `--job`, once or more.
        jobs: Vec<String>,
    },
    /// This one and no other; the file may still say more about it.
    Only {
        /// Its name.
        name: JobName,
        /// How many tasks it has.
        tasks: u32,
    },
}

/// What is wrong with a configuration.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// The file is not to be read.
    #[error("{}: cannot read the configuration file: {error}; check the path that --config or MUSTER_CONFIG names", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What the system says.
        error: String,
    },
    /// The file is no TOML.
    #[error("{place}: this is not TOML: {wrong}")]
    NotToml {
        /// Where.
        place: ValueSource,
        /// What is wrong.
        wrong: String,
    },
    /// The file has a key that means nothing.
    #[error("{place}: there is no key `{key}`: {hint}")]
    UnknownKey {
        /// Where.
        place: ValueSource,
        /// The key, with its table.
        key: String,
        /// What to write instead.
        hint: String,
    },
    /// A value makes no sense.
    #[error("{place}: {key} = {value:?}: {wrong}")]
    Value {
        /// Where.
        place: ValueSource,
        /// The key, with its table.
        key: String,
        /// The value.
        value: String,
        /// What is wrong with it and what to write instead.
        wrong: String,
    },
    /// Two jobs of one name.
    #[error(
        "{second}: the job `{name}` is declared here and at {first}: give one of them another name, or remove it"
    )]
    JobTwice {
        /// Their name.
        name: JobName,
        /// Where the first is.
        first: ValueSource,
        /// Where the second is.
        second: ValueSource,
    },
    /// A job of the file without a number of tasks.
    #[error(
        "{place}: [jobs.{name}] does not say how many tasks the job has: add `tasks = N` to it, or give --job {name}=N"
    )]
    NoTasks {
        /// Where.
        place: ValueSource,
        /// The job.
        name: JobName,
    },
    /// Two listeners at one address.
    #[error("{place}: {key} = {address} is the address of {taken_by}: give one of them another port")]
    AddressTwice {
        /// Where.
        place: ValueSource,
        /// The key that wants the address.
        key: String,
        /// The address.
        address: SocketAddr,
        /// The key that has it already, and where that is.
        taken_by: String,
    },
    /// A setting needs another.
    #[error("{given} needs {lacks}: give that too")]
    MissingCompanion {
        /// The setting that was given.
        given: String,
        /// The one that was not.
        lacks: String,
    },
    /// An address would be open to everybody.
    #[error("{0}")]
    Open(ExposedAddress),
    /// There is nothing to serve.
    #[error(
        "no job is declared: give --tasks N for one job, --job NAME=N for each of several, or [jobs.NAME] tables in a \
         --config file"
    )]
    NoJobs,
}

impl Config {
    /// Sees to it that there is something to serve.
    ///
    /// # Errors
    /// If no job is declared.
    pub fn require_jobs(&self) -> Result<(), ConfigError> {
        if self.jobs.is_empty() { Err(ConfigError::NoJobs) } else { Ok(()) }
    }

    /// The whole configuration as a file that means the same, each value with its source as a comment.
    #[must_use]
    pub fn print(&self) -> String {
        effective::print(&self.values)
    }
}

/// The bounds by the names of their keys.
///
/// The names come from the type itself, so that a bound is a setting by being a field.
fn bounds_table(bounds: &Bounds) -> BTreeMap<String, u64> {
    let table = toml::Table::try_from(bounds).unwrap_or_default();
    let number = |value: &toml::Value| value.as_integer().and_then(|number| u64::try_from(number).ok());
    table.iter().filter_map(|(key, value)| Some((key.clone(), number(value)?))).collect()
}
