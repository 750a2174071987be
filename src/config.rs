//! One typed configuration for every subcommand that runs a server.
//!
//! The value of a setting is taken from the first of these that has one: its flag, its environment variable, the
//! file, the default. So a flag or a variable applies to every job, even to one that has its own value in the file.
//! In the file, the table of a job comes before the top level. Bounds have neither flags nor variables. Flags, the
//! environment and the file may each declare jobs. If several of them declare the same job, the number of its tasks
//! is taken in the same order. Begin at [`Config`], then `load.rs`.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use crate::coordination::{JobBounds, JobName, JobSettings};
use crate::engine::{Durability, Engine};
use crate::grpc::GrpcLimits;
use crate::http::{AllowedHosts, BodyMemoryBudget, EventStreamLimiter, RedactionPatterns};
use crate::service::{AuditFailurePolicy, AuditLog, collectives};
use crate::telemetry::log::LogFormat;
use crate::telemetry::traces::OtlpProtocol;

mod effective;
mod exposure;
mod file;
mod listener_access;
mod load;
mod setting_definitions;
mod value;
mod value_source;

pub use listener_access::{ExposedAddress, TlsConfig};
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use load::check_config_round_trip;
pub use load::load_config;
pub use setting_definitions::{JOB_SETTINGS, SERVER_SETTINGS, Setting, environment_variable_name};
pub use value::{
    SettingValue, format_auto_exclude_rules, parse_address, parse_auto_exclude_rules, parse_job_names,
    parse_task_count,
};
use value_source::ResolvedValue;
pub use value_source::{GivenValue, ValueSource};

/// The configuration of a server and its jobs.
#[derive(Debug, Clone)]
pub struct Config {
    /// The settings of the server itself.
    pub server: ServerConfig,
    /// The jobs, with unique names.
    pub jobs: Vec<JobConfig>,
    /// Every value with its source, in printing order.
    values: Vec<ResolvedValue>,
}

/// The settings of the server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerConfig {
    /// The address of the shared gRPC listener.
    pub grpc: SocketAddr,
    /// The limits of the gRPC port.
    pub grpc_limits: GrpcLimits,
    /// The address of the HTTP listener.
    pub http: SocketAddr,
    /// The address of a listener for metrics alone.
    pub metrics: Option<SocketAddr>,
    /// The number of tasks above which a job has no metrics for each task.
    pub task_metrics_max: usize,
    /// The endpoint to which traces are exported.
    pub otlp_endpoint: Option<String>,
    /// The protocol of the export.
    pub otlp_protocol: OtlpProtocol,
    /// The address of a listener for health probes alone.
    pub health: Option<SocketAddr>,
    /// The maximum number of HTTP connections.
    pub http_connections: usize,
    /// The maximum number of HTTP connections of one client network.
    pub http_connections_per_source: usize,
    /// The memory for HTTP request bodies, in bytes.
    pub http_bodies_bytes: usize,
    /// The time that the ranks of a collective wait before there is a finding.
    pub collective_stuck_after: Duration,
    /// The maximum number of jobs.
    pub jobs_max: usize,
    /// The maximum number of event streams.
    pub http_streams: usize,
    /// The number of threads that serve connections.
    pub io_threads: usize,
    /// The time that open connections have to finish when the server stops.
    pub stop_timeout: Duration,
    /// The log filter.
    pub log: String,
    /// The format of log lines.
    pub log_format: LogFormat,
    /// The folder of the journal; `None`: a folder of the user's state, named after the gRPC port.
    pub data_dir: Option<PathBuf>,
    /// The durability of an answer when it leaves.
    pub durability: Durability,
    /// Nothing survives the process: there is no journal.
    pub ephemeral: bool,
    /// The process serves by itself, without a keeper.
    pub no_keeper: bool,
    /// The path of the audit file.
    pub audit_file: Option<PathBuf>,
    /// The treatment of changes while the audit file cannot be written.
    pub audit_failure: AuditFailurePolicy,
    /// The number of audit lines in memory.
    pub audit_lines: usize,
    /// The patterns of keys whose values are redacted.
    pub redact_keys: RedactionPatterns,
    /// TLS of the gRPC listeners.
    pub grpc_tls: TlsConfig,
    /// TLS of the HTTP listener.
    pub http_tls: TlsConfig,
    /// The host names of the HTTP listener besides those that always hold.
    pub http_hosts: AllowedHosts,
    /// The path of the token file.
    pub tokens_file: Option<PathBuf>,
    /// The lifetime of a browser session.
    pub session_timeout: Duration,
    /// The maximum number of changes of one actor per second.
    pub http_changes_per_second: usize,
    /// Other machines may use the HTTP listener without authentication.
    pub insecure: bool,
    /// Other machines may use the gRPC listeners without authentication.
    pub insecure_grpc: bool,
}

/// The purpose for which defaults are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServerProfile {
    /// A dedicated server on the well-known ports.
    Serve,
    /// A server beside the tasks that it serves: on free ports, and with a quiet log, because the output
    /// belongs to the tasks.
    Launch,
}

impl ServerConfig {
    /// Returns the defaults for a purpose.
    #[must_use]
    pub fn new(profile: ServerProfile) -> Self {
        let (grpc, http, log) = match profile {
            ServerProfile::Serve => (8476, 8477, "info"),
            ServerProfile::Launch => (0, 0, "warn,muster::events=error"),
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
            http_bodies_bytes: BodyMemoryBudget::DEFAULT,
            collective_stuck_after: collectives::STUCK_AFTER,
            jobs_max: Engine::JOBS_MAX,
            http_streams: EventStreamLimiter::DEFAULT,
            io_threads: cores.min(2),
            stop_timeout: Duration::from_secs(10),
            log: log.into(),
            log_format: LogFormat::Human,
            data_dir: None,
            durability: Durability::default(),
            ephemeral: profile == ServerProfile::Launch,
            no_keeper: profile == ServerProfile::Launch,
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

/// A declared job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobConfig {
    /// Its name.
    pub name: JobName,
    /// The address of a gRPC listener of its own.
    pub grpc: Option<SocketAddr>,
    /// Its settings.
    pub settings: JobSettings,
}

/// The request of a command line for a configuration.
#[derive(Debug, Clone)]
pub struct CommandLineConfig {
    /// The defaults to use.
    pub profile: ServerProfile,
    /// The configuration file, if one is named.
    pub file: Option<PathBuf>,
    /// The settings given as flags, by key.
    pub flags: BTreeMap<&'static str, String>,
    /// The jobs.
    pub jobs: JobSelection,
}

/// The jobs that a command line requests.
#[derive(Debug, Clone)]
pub enum JobSelection {
    /// The jobs declared by flags, the environment and the file.
    Declared {
        /// `--tasks`: the job `default`.
        tasks: Option<String>,
        /// `--job`, once or more.
        jobs: Vec<String>,
    },
    /// This job alone; the file may still give its settings.
    Only {
        /// Its name.
        name: JobName,
        /// The number of its tasks.
        tasks: u32,
    },
}

/// An error in the configuration.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("{}: cannot read the configuration file: {error}; check the path that --config or MUSTER_CONFIG names", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The error of the operating system.
        error: String,
    },
    /// The file is no valid TOML.
    #[error("{place}: this is not TOML: {wrong}")]
    NotToml {
        /// The place of the error.
        place: ValueSource,
        /// The error.
        wrong: String,
    },
    /// The file has an unknown key.
    #[error("{place}: there is no key `{key}`: {hint}")]
    UnknownKey {
        /// The place of the key.
        place: ValueSource,
        /// The key, with its table.
        key: String,
        /// The suggestion.
        hint: String,
    },
    /// A value is invalid.
    #[error("{place}: {key} = {value:?}: {wrong}")]
    Value {
        /// The place of the value.
        place: ValueSource,
        /// The key, with its table.
        key: String,
        /// The value.
        value: String,
        /// The reason, and what to write instead.
        wrong: String,
    },
    /// Two jobs have the same name.
    #[error(
        "{second}: the job `{name}` is declared here and at {first}: give one of them another name, or remove it"
    )]
    JobTwice {
        /// Their name.
        name: JobName,
        /// The place of the first.
        first: ValueSource,
        /// The place of the second.
        second: ValueSource,
    },
    /// A job of the file without a number of tasks.
    #[error(
        "{place}: [jobs.{name}] does not say how many tasks the job has: add `tasks = N` to it, or give --job {name}=N"
    )]
    NoTasks {
        /// The place of the table.
        place: ValueSource,
        /// The job.
        name: JobName,
    },
    /// Two listeners have the same address.
    #[error("{place}: {key} = {address} is the address of {taken_by}: give one of them another port")]
    AddressTwice {
        /// The place of the second.
        place: ValueSource,
        /// The key of the second.
        key: String,
        /// The address.
        address: SocketAddr,
        /// The key of the first, with its place.
        taken_by: String,
    },
    /// A setting requires another one.
    #[error("{given} needs {lacks}: give that too")]
    MissingCompanion {
        /// The setting that was given.
        given: String,
        /// The missing one.
        lacks: String,
    },
    /// An address would be open to other machines without access control.
    #[error("{0}")]
    Open(ExposedAddress),
    /// No job is declared.
    #[error(
        "no job is declared: give --tasks N for one job, --job NAME=N for each of several, or [jobs.NAME] tables in a \
         --config file"
    )]
    NoJobs,
}

impl Config {
    /// Checks that there is a job to serve.
    ///
    /// # Errors
    /// If no job is declared.
    pub fn check_has_jobs(&self) -> Result<(), ConfigError> {
        if self.jobs.is_empty() { Err(ConfigError::NoJobs) } else { Ok(()) }
    }

    /// Returns the configuration as an equivalent file, with the source of each value as a comment.
    #[must_use]
    pub fn to_toml_text(&self) -> String {
        effective::effective_toml_text(&self.values)
    }
}

/// Returns the bounds by key.
///
/// The keys are the field names of the type, so every new field is a setting.
fn bounds_table(bounds: &JobBounds) -> BTreeMap<String, u64> {
    let table = toml::Table::try_from(bounds).unwrap_or_default();
    let number = |value: &toml::Value| value.as_integer().and_then(|number| u64::try_from(number).ok());
    table.iter().filter_map(|(key, value)| Some((key.clone(), number(value)?))).collect()
}
