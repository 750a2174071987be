//! Implements `muster worker`, which runs one task without JAX. This file defines the flags and makes the
//! configuration from them.
//!
//! `worker/program.rs` runs the worker. Begin at `run`.

mod exercise;
mod metrics_listener;
mod program;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use clap::{Args, ValueEnum};

use super::certificates::TransferCertificateArgs;
use super::{connection_limits, doctor};
use crate::agent::cluster_env::{ClusterEnv, ClusterFlags, DetectedProcessIdentity, environment_variables};
use crate::agent::{
    AgentConfig, AgentTlsFiles, DEVICES_MAX, TransferAccess, claim_task, own_claimant_id, provider_of_fabric,
};
use crate::clock;
use crate::coordination::JobName;
use crate::telemetry::log::{self, LogFormat};
use crate::text::parse_duration;
use crate::transfer::{CliqueChoice, TransportChoice};

use exercise::ExerciseOptions;
pub use program::{CANCELLED_TEXT, StepLine, parse_step_line};
use program::{WorkerOptions, WorkerProgram};

/// The most time before a worker checks its host, in milliseconds.
const HOST_CHECK_DELAY_MS: u64 = 3_000;

/// Run one task of a job: register, follow the states of all tasks, and move buffers to the others
///
/// The task number and the address of the service come from flags, from MUSTER_PROCESS_ID,
/// MUSTER_NUM_PROCESSES and JAX_COORDINATOR_ADDRESS, or from Slurm, a Kubernetes indexed job or JobSet, or
/// Open MPI. If the sources disagree, or a value is missing, the worker does not start, and says what to set.
///
/// SIGTERM and SIGINT end it gracefully: it finishes the step in progress and tells the service. In a job
/// whose tasks share their fate, the notice that JAX programs know asks all other tasks to end with it. A
/// second signal ends it at once.
#[derive(Debug, Args)]
#[command(after_long_help = EXAMPLES)]
pub struct Arguments {
    /// The number of this task, from 0; or `auto`: the service gives it the number that its host had before
    #[arg(long, value_name = "N|auto")]
    task: Option<TaskArg>,

    /// The identity of this host, which stays when it starts again [default: NODE_NAME in Kubernetes, the node of
    /// Slurm, the TPU worker, or the machine id]
    #[arg(long, value_name = "NAME", env = "MUSTER_HOST_ID", hide_env_values = true)]
    host_id: Option<String>,

    /// The number of tasks that the job must have [default: that of the service]
    #[arg(long, value_name = "N")]
    tasks: Option<u32>,

    /// The address of the service, as in JAX_COORDINATOR_ADDRESS
    #[arg(long, value_name = "HOST:PORT")]
    service: Option<String>,

    /// The job, where the service has several on one port
    #[arg(long, value_name = "NAME", env = "MUSTER_JOB", hide_env_values = true)]
    job: Option<JobName>,

    /// The program of the task
    #[arg(long, value_enum, default_value_t = WorkerProgram::Idle)]
    program: WorkerProgram,

    /// The number of steps of the exercise [default: no limit]
    #[arg(long, value_name = "N")]
    steps: Option<u64>,

    /// The pause between two steps
    #[arg(long, value_name = "DURATION", default_value = "0s", value_parser = parse_duration)]
    pause: Duration,

    /// The largest buffer of the exercise, in bytes
    #[arg(long, value_name = "BYTES", default_value_t = 4 << 20, value_parser = clap::value_parser!(u64).range(1..=1 << 30))]
    bytes_max: u64,

    /// How long the tasks wait for one another at the barrier of a step, and how long a transfer may take; a
    /// missing task is awaited until the service counts it as lost
    #[arg(long, value_name = "DURATION", default_value = "60s", value_parser = parse_duration)]
    step_timeout: Duration,

    /// The number of its devices
    #[arg(long, value_name = "K", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=i64::from(DEVICES_MAX)),
          help_heading = "Transfers")]
    devices: u32,

    /// The transport to other tasks on this host
    #[arg(long, value_enum, default_value_t = TransportArg::Auto, help_heading = "Transfers")]
    transport: TransportArg,

    /// Read the memory of tasks on other hosts over a fabric (RDMA), through libfabric: the name of a provider, such as
    /// verbs;ofi_rxm, or `auto` for the library's first choice. Tasks that do not name one, or are in another fabric, use TCP
    #[arg(
        long,
        value_name = "PROVIDER",
        env = "MUSTER_FABRIC",
        hide_env_values = true,
        help_heading = "Transfers"
    )]
    fabric: Option<String>,

    /// Where bytes between GPUs move through NCCL: `off`, `auto` for other hosts, or `always`. Both tasks must choose so. The file of
    /// NCCL is the one that MUSTER_NCCL_LIBRARY names, or libnccl.so.2
    #[arg(
        long,
        value_name = "WHERE",
        env = "MUSTER_CLIQUES",
        default_value = "off",
        hide_env_values = true,
        help_heading = "Transfers"
    )]
    cliques: CliqueChoice,

    /// How long a thread that waits for a small message from this host polls before it sleeps; `0s` for
    /// never. The default is 50us, and 0s on a machine with one processor
    #[arg(long, value_name = "DURATION", value_parser = parse_duration, help_heading = "Transfers")]
    spin: Option<Duration>,

    /// The address for the engines of other hosts; `none` for this host only
    #[arg(long, value_name = "IP:PORT", default_value = "127.0.0.1:0", help_heading = "Transfers")]
    listen: String,

    /// The address that others dial, if it is another one; may be given more than once
    #[arg(long, value_name = "IP:PORT", help_heading = "Transfers")]
    advertise: Vec<SocketAddr>,

    /// A file with a secret that all workers of the job share; others cannot connect to them. At least 128 random bits:
    /// head -c 32 /dev/urandom | base64
    #[arg(
        long,
        value_name = "FILE",
        env = "MUSTER_TRANSFER_TOKEN_FILE",
        hide_env_values = true,
        help_heading = "Transfers"
    )]
    token_file: Option<PathBuf>,

    #[command(flatten, next_help_heading = "Transfers")]
    certificates: TransferCertificateArgs,

    /// Listen beyond loopback without a shared secret and without certificates
    #[arg(long, help_heading = "Transfers")]
    insecure_transfers: bool,

    /// Serve Prometheus metrics of its engine at /metrics on this address; port 0 picks a free one
    #[arg(
        long,
        value_name = "IP:PORT",
        env = "MUSTER_WORKER_METRICS",
        hide_env_values = true,
        help_heading = "Metrics"
    )]
    metrics: Option<SocketAddr>,

    /// Serve them beyond loopback: everybody who reaches the address can read them
    #[arg(long, help_heading = "Metrics", requires = "metrics")]
    insecure_metrics: bool,

    #[command(flatten)]
    service_options: ServiceConnectionArgs,

    /// The log filter; the log goes to stderr
    #[arg(long, value_name = "FILTER", env = "MUSTER_LOG", hide_env_values = true, default_value = "warn")]
    log: String,
}

/// The number of a task, or that the service gives it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TaskArg {
    Number(u32),
    Auto,
}

impl FromStr for TaskArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse() {
            Ok(number) => Ok(Self::Number(number)),
            Err(_) if text == ClusterEnv::CLAIMED => Ok(Self::Auto),
            Err(error) => Err(format!("{error}: write a number, or auto")),
        }
    }
}

/// The connection to the service.
#[derive(Debug, Args)]
#[command(next_help_heading = "Service")]
struct ServiceConnectionArgs {
    /// Use TLS, and trust these authorities
    #[arg(long, value_name = "FILE", env = "JAX_MTLS_CA_FILE", hide_env_values = true)]
    ca: Option<PathBuf>,

    /// The client certificate
    #[arg(
        long,
        value_name = "FILE",
        env = "JAX_MTLS_CERT_FILE",
        hide_env_values = true,
        requires = "ca",
        requires = "key"
    )]
    cert: Option<PathBuf>,

    /// Its private key
    #[arg(long, value_name = "FILE", env = "JAX_MTLS_KEY_FILE", hide_env_values = true, requires = "cert")]
    key: Option<PathBuf>,

    /// The heartbeat timeout of the job; heartbeats are sent twice as often
    #[arg(long, value_name = "DURATION", default_value = "100s", value_parser = parse_duration)]
    heartbeat_timeout: Duration,

    /// How long the registration may take, waiting for the service and for all other tasks
    #[arg(long, value_name = "DURATION", default_value = "5m", value_parser = parse_duration)]
    register_timeout: Duration,

    /// How long its end may wait for the other tasks
    #[arg(long, value_name = "DURATION", default_value = "5m", value_parser = parse_duration)]
    shutdown_timeout: Duration,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum TransportArg {
    /// The best that both sides can
    Auto,
    /// Shared memory
    Shm,
    /// The kernel copies from process to process
    Pvm,
    /// A Unix socket
    Unix,
    /// TCP, even on one host
    Tcp,
}

const EXAMPLES: &str = "\
Examples:
  Two tasks of a job on this machine (muster serve --tasks 2 --recoverable):
    muster worker --service 127.0.0.1:8476 --task 0 --program exercise
    muster worker --service 127.0.0.1:8476 --task 1 --program exercise

  Under Slurm, with muster serve on the first host of the job:
    srun muster worker --listen 0.0.0.0:9000 --advertise $(hostname -I | cut -d' ' -f1):9000 --token-file secret

  All of it on this machine, to look at:
    muster demo

Exit code:
  0      it was told to end, or had made its steps, and every byte was right
  1      it failed; the error says how
  128+S  it was ended at once by signal S";

/// Runs the subcommand.
pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    log::start_logging(&arguments.log, LogFormat::Human).map_err(anyhow::Error::msg)?;
    let variables = environment_variables();
    let number = match arguments.task {
        Some(TaskArg::Number(task)) => Some(task),
        Some(TaskArg::Auto) | None => None,
    };
    let asked = ClusterFlags { task: number, tasks: arguments.tasks, service: arguments.service.clone() };
    let claims = ClusterEnv::must_claim_task(&asked, arguments.task == Some(TaskArg::Auto), &variables);
    let host = match DetectedProcessIdentity::detect_on_this_machine(arguments.host_id.as_deref(), &variables)
    {
        Ok(host) => Some(host),
        Err(error) if claims || arguments.host_id.is_some() => return Err(error.into()),
        Err(_) => None,
    };
    let mut place = if claims {
        ClusterEnv::detect_without_task(&asked, &variables)?
    } else {
        ClusterEnv::detect(&asked, &variables)?
    };
    let mut config = arguments.agent_config(&place)?;
    config.identity = host.as_ref().map(|host| host.identity.clone());
    connection_limits::raise_open_file_limit();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let code = runtime.block_on(async {
        if claims && let Some(host) = &host {
            let limit = config.register_limit;
            let granted = claim_task(&config, &host.identity, own_claimant_id(), limit).await?;
            place = place.with_claimed_task(granted.task, host);
            config.task = granted.task;
        }
        check_host_in_background(&config);
        program::run_worker(&arguments.worker_options(), &place, config).await
    });
    runtime.shutdown_background();
    code
}

/// Checks the host as `muster doctor` does, and tells the result with the reports of transfers.
fn check_host_in_background(config: &AgentConfig) {
    let cell = Arc::clone(&config.host_checks);
    // The thread ends with the process, and no thread waits for it.
    let started = std::thread::Builder::new().name("host-checks".to_owned()).spawn(move || {
        // The workers of a host start together; their probes should not all run at once.
        let delay = clock::random_nonzero().get() % HOST_CHECK_DELAY_MS;
        std::thread::sleep(Duration::from_millis(delay));
        let _first = cell.set(doctor::host_checks_to_report());
    });
    if let Err(error) = started {
        tracing::warn!(%error, "the host is not checked for fast transfers");
    }
}

impl Arguments {
    fn agent_config(&self, place: &ClusterEnv) -> Result<AgentConfig> {
        let listen = match self.listen.as_str() {
            "none" => None,
            text => Some(text.parse::<SocketAddr>().with_context(|| {
                format!("--listen {text}: write an address IP:PORT (port 0 picks a free one), or none")
            })?),
        };
        if let Some(address) = self.metrics.filter(|address| !address.ip().is_loopback())
            && !self.insecure_metrics
        {
            bail!(
                "--metrics {address} can be reached by other machines, and a worker asks nobody who they are: serve them on \
                 loopback, or say --insecure-metrics inside a network that you trust"
            );
        }
        let options = &self.service_options;
        let own = options.cert.clone().zip(options.key.clone());
        let mut config = AgentConfig {
            authority: self.job.as_ref().map(|job| format!("{job}.job")),
            tls: options.ca.clone().map(|ca| AgentTlsFiles { ca, own }),
            tasks: place.tasks.as_ref().map(|tasks| tasks.value),
            devices: self.devices,
            transport: match self.transport {
                TransportArg::Auto => TransportChoice::Auto,
                TransportArg::Shm => TransportChoice::Shm,
                TransportArg::Pvm => TransportChoice::Pvm,
                TransportArg::Unix => TransportChoice::Unix,
                TransportArg::Tcp => TransportChoice::Tcp,
            },
            fabric: self.fabric.as_deref().map(provider_of_fabric),
            cliques: self.cliques,
            spin: self.spin,
            listen,
            advertise: self.advertise.clone(),
            register_limit: options.register_timeout,
            heartbeat_timeout: options.heartbeat_timeout,
            shutdown_limit: options.shutdown_timeout,
            ..AgentConfig::new(place.service.value.clone(), place.task.value)
        };
        let access = TransferAccess {
            token_file: self.token_file.clone(),
            certificates: self.certificates.read_files()?,
            is_insecure: self.insecure_transfers,
        };
        access.apply_to_config(&mut config)?;
        Ok(config)
    }

    fn worker_options(&self) -> WorkerOptions {
        let bytes_max = usize::try_from(self.bytes_max).unwrap_or(usize::MAX);
        WorkerOptions {
            program: self.program,
            exercise: ExerciseOptions { bytes_max, limit: self.step_timeout },
            steps: self.steps,
            pause: self.pause,
            metrics: self.metrics,
        }
    }
}
