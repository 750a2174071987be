//! Implements `muster worker`: flags and configuration of a task without JAX.
//!
//! It holds no step (`worker/program.rs`). Begin at `run`.

mod metrics_listener;
mod program;

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs::File;
use std::io::Read as _;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use clap::{Args, ValueEnum};

use super::certificates::TransferCertificateArgs;
use super::limits;
use super::output::{TerminalText, print};
use crate::agent::cluster_env::{ClusterEnv, ExplicitFlags, Variables};
use crate::agent::{Agent, AgentConfig, AgentTlsFiles, DEVICES_MAX, exercise};
use crate::coordination::JobName;
use crate::telemetry::log::{self, LogFormat};
use crate::text::parse_duration;
use crate::transfer::Choice;

pub use program::{CANCELLED_TEXT, StepLine, parse};

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
    /// The number of this task, from 0
    #[arg(long, value_name = "N")]
    task: Option<u32>,

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
    #[arg(long, value_enum, default_value_t = Program::Idle)]
    program: Program,

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
    service_options: ServiceOptions,

    /// The log filter; the log goes to stderr
    #[arg(long, value_name = "FILTER", env = "MUSTER_LOG", hide_env_values = true, default_value = "warn")]
    log: String,
}

/// The connection to the service.
#[derive(Debug, Args)]
#[command(next_help_heading = "Service")]
struct ServiceOptions {
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
enum Program {
    /// Stay, and follow who lives
    Idle,
    /// Step with all others: a barrier, then buffers round the ring and to partners, every byte checked
    Exercise,
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
    log::start(&arguments.log, LogFormat::Human).map_err(anyhow::Error::msg)?;
    let variables: Variables = std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .collect();
    let asked =
        ExplicitFlags { task: arguments.task, tasks: arguments.tasks, service: arguments.service.clone() };
    let place = ClusterEnv::find(&asked, &variables)?;
    let config = arguments.config(&place)?;
    limits::raise_open_files();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let code = runtime.block_on(program::work(arguments, &place, config));
    runtime.shutdown_background();
    code
}

/// The maximum length of a secret file, in bytes.
const SECRET_BYTES_MAX: u64 = 64 << 10;
/// The minimum strength of a secret, in bits.
const SECRET_BITS: usize = 128;

/// Returns the maximum entropy of a text of this length and alphabet, in bits.
fn bits_at_most(secret: &[u8]) -> usize {
    let each = if secret.iter().all(u8::is_ascii_hexdigit) {
        4
    } else if secret.iter().all(u8::is_ascii_graphic) {
        6
    } else {
        8
    };
    secret.len() * each
}

impl Arguments {
    fn config(&self, place: &ClusterEnv) -> Result<AgentConfig> {
        let listen = match self.listen.as_str() {
            "none" => None,
            text => Some(text.parse::<SocketAddr>().with_context(|| {
                format!("--listen {text}: write an address IP:PORT (port 0 picks a free one), or none")
            })?),
        };
        let token = self.token_file.as_ref().map(|path| {
            let mut text = Vec::new();
            let read = File::open(path).and_then(|file| file.take(SECRET_BYTES_MAX + 1).read_to_end(&mut text));
            read.with_context(|| format!("cannot read the secret in {}", path.display()))?;
            if text.len() as u64 > SECRET_BYTES_MAX {
                bail!("{} holds more than {SECRET_BYTES_MAX} bytes: is it the secret?", path.display());
            }
            match text.trim_ascii() {
                [] => bail!("{} holds no secret: put at least 16 random bytes into it", path.display()),
                secret => {
                    let bits = bits_at_most(secret);
                    if bits < SECRET_BITS {
                        tracing::warn!(
                            "the secret in {} holds {bits} bits at most: a process that a worker takes for its peer can \
                             find it by guessing, without asking anybody. Make one with: head -c 32 /dev/urandom | base64",
                            path.display()
                        );
                    }
                    Ok(secret.to_vec())
                }
            }
        });
        let token = token.transpose()?;
        let certificates = self.certificates.read()?;
        if let Some(address) = listen.filter(|address| !address.ip().is_loopback())
            && token.is_none()
            && certificates.is_none()
            && !self.insecure_transfers
        {
            bail!(
                "--listen {address} can be reached by other machines, and nothing would ask who they are: give all workers \
                 --token-file with one secret or --transfer-cert, --transfer-key and --transfer-ca, or say --insecure-transfers inside a network that you trust"
            );
        }
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
        Ok(AgentConfig {
            authority: self.job.as_ref().map(|job| format!("{job}.job")),
            tls: options.ca.clone().map(|ca| AgentTlsFiles { ca, own }),
            tasks: place.tasks.as_ref().map(|tasks| tasks.value),
            devices: self.devices,
            transport: match self.transport {
                TransportArg::Auto => Choice::Auto,
                TransportArg::Shm => Choice::Shm,
                TransportArg::Pvm => Choice::Pvm,
                TransportArg::Unix => Choice::Unix,
                TransportArg::Tcp => Choice::Tcp,
            },
            spin: self.spin,
            listen,
            advertise: self.advertise.clone(),
            token,
            transfer_tls: certificates,
            register_limit: options.register_timeout,
            heartbeat_timeout: options.heartbeat_timeout,
            shutdown_limit: options.shutdown_timeout,
            ..AgentConfig::new(place.service.value.clone(), place.task.value)
        })
    }

    fn exercise(&self) -> exercise::ExerciseOptions {
        let bytes_max = usize::try_from(self.bytes_max).unwrap_or(usize::MAX);
        exercise::ExerciseOptions { bytes_max, limit: self.step_timeout }
    }
}

/// Returns the announcement of a registered worker.
fn registered(agent: &Agent) -> String {
    let here = agent.here();
    let address = agent.engine().address();
    let mut ways: BTreeSet<String> = address.tcp.iter().map(SocketAddr::to_string).collect();
    if !address.local.is_empty() {
        ways.insert(format!("this host's @{}", address.local));
    }
    let ways: Vec<_> = ways.into_iter().collect();
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = writeln!(text, "Registered: {here} of {}, run {:016x}", agent.tasks(), agent.run());
    let _ = writeln!(text, "  engine   {}", ways.join(", "));
    text
}

/// Prints a line of the worker. A closed pipe is no error.
fn say(line: &str) -> Result<()> {
    Ok(print(&TerminalText::of(line))?)
}

/// Prints several lines of the worker.
fn say_all(lines: &str) -> Result<()> {
    Ok(print(&TerminalText::from_lines(lines))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_holds_as_much_as_its_alphabet_allows() {
        for (secret, bits) in
            [("0123456789abcdef0123456789abcdef", 128), ("hunter2", 42), ("AAECAwQF+/8=", 72)]
        {
            assert_eq!(bits_at_most(secret.as_bytes()), bits, "{secret}");
        }
        assert_eq!(bits_at_most(&[0xff; 16]), 128);
    }
}
