//! Implements `muster launch`: runs the tasks of a job on this machine.
//!
//! `launch/supervisor.rs` supervises the tasks. Begin at `run`, then `launch_job`.

pub(super) mod children;
mod host_identities;
mod prefix_output;
mod server;
mod supervisor;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::Args;
use tokio::task::JoinSet;

use super::credentials::CredentialArgs;
use super::nccl_plugin::{NCCL_PLUGIN_VARIABLE, find_nccl_plugin};
use super::output::print_error;
use super::setting_flags::LaunchFlags;
use super::{allocator, connection_limits};
use crate::agent::cluster_env::{DetectedProcessIdentity, environment_variables};
use crate::agent::{AgentConfig, AgentTlsFiles, claim_task, own_claimant_id};
use crate::config::{ConfigError, JobSelection};
use crate::coordination::{JobName, ProcessIdentity};
use crate::telemetry::log;
use crate::text::parse_duration;
use host_identities::IdentityPublisher;
use server::{LaunchServer, RequestedJob};
use supervisor::{LaunchPlan, Supervisor};

pub use children::{BECOME_COMMAND, ExecTaskArguments, GUARD_COMMAND, exec_task_command, run_process_guard};

/// Run a job on this machine: N processes of one command, and a server for them
///
/// Starts a server in this process, at free loopback ports, and N processes of COMMAND, which find it and their place by
/// their environment (see below). Every line they write is passed on with `[i] ` before it; their standard input is
/// empty.
///
/// When a process fails, the others are ended too, unless the job is recoverable; --max-restarts starts again what
/// failed. SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 are passed on; a second SIGINT kills. No process outlives the
/// launch, however that ends.
#[derive(Debug, Args)]
#[command(after_long_help = EXAMPLES)]
pub struct Arguments {
    /// How many processes to run
    #[arg(short = 'n', long = "processes", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    processes: u32,

    /// How many times to start again what failed, in all: the one process if the job is recoverable, else all of them
    /// as the next run
    #[arg(long, value_name = "R", default_value_t = 0, env = "MUSTER_MAX_RESTARTS", hide_env_values = true)]
    max_restarts: u32,

    /// How long processes that were told to end may take before they are killed
    #[arg(long, value_name = "DURATION", default_value = "10s", env = "MUSTER_KILL_AFTER", hide_env_values = true,
          value_parser = parse_duration)]
    kill_after: Duration,

    /// Use the server at this HTTP address, instead of one of its own; its job must have N tasks
    #[arg(long, value_name = "URL")]
    server: Option<String>,

    #[command(flatten)]
    credentials: CredentialArgs,

    /// Ask the server which tasks the processes are: those that this host had before. N may be less than the tasks of
    /// the job; launch the others on other hosts
    #[arg(long, requires = "server")]
    claim_ids: bool,

    /// The identity of this host, which stays when it starts again [default: NODE_NAME in Kubernetes, the node of
    /// Slurm, the TPU worker, or the machine id]
    #[arg(long, value_name = "NAME", env = "MUSTER_HOST_ID", hide_env_values = true)]
    host_id: Option<String>,

    /// Let NCCL load Muster's profiler plug-in in each process, so that the server knows which task holds up a collective
    #[arg(long)]
    collectives: bool,

    /// The job's name
    #[arg(long, value_name = "NAME", default_value = JobName::DEFAULT, env = "MUSTER_JOB", hide_env_values = true)]
    job: JobName,

    #[command(flatten)]
    options: LaunchFlags,

    /// The command and its arguments, after `--`
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

const EXAMPLES: &str = "\
Environment of each process:
  JAX_COORDINATOR_ADDRESS       the server's address; JAX reads it
  JAX_COORDINATOR_BIND_ADDRESS  127.0.0.1:0, for a service of JAX's own that stays unused
  MUSTER_PROCESS_ID             its number, for jax.distributed.initialize(process_id=...)
  MUSTER_NUM_PROCESSES          how many there are, for initialize(num_processes=...)
  MUSTER_LOCAL_PROCESS_ID       its number on this machine, the same
  MUSTER_HOST_ID                with --host-id or --claim-ids: the identity of this host
  MUSTER_SERVER, MUSTER_JOB     the server's HTTP address and the job, for `muster status` and the like
  OMPI_MCA_orte_hnp_uri, OMPI_COMM_WORLD_SIZE, OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_LOCAL_RANK
                                from these JAX learns both numbers by itself: initialize() needs no argument. As
                                under mpirun, each of several processes then uses one GPU, that of its
                                number; JAX_LOCAL_DEVICE_IDS names others. Not set if MUSTER_JAX_DETECTION is 0, as
                                programs that use MPI itself need it
  NCCL_PROFILER_PLUGIN          with --collectives: the plug-in's file
  PYTHONUNBUFFERED              1 unless it is set, so that lines come when they are written

Exit code:
  0      every process ended with 0
  N      otherwise, that of the first process that failed (128+S if it died of signal S)
  128+S  the launch itself was ended by signal S
  125    the launch could not be made; 127: there is no such COMMAND; 2: wrong arguments

Examples:
  muster launch -n 2 -- python3 train.py

  Start all four again, up to three times, when one fails:
    muster launch -n 4 --max-restarts 3 -- python3 train.py

  Start only the one that failed; the program must be able to take it back:
    muster launch -n 4 --max-restarts 3 --recoverable -- python3 elastic.py

  On each of four hosts, with a server for all; a host keeps its tasks over restarts (muster serve --job train=8):
    muster launch -n 2 --server http://muster-host:8477 --job train --claim-ids -- python3 train.py

  With a server that runs already (muster serve --job train=4):
    muster launch -n 4 --server http://127.0.0.1:8477 --job train -- python3 train.py";

/// The exit code if the launch itself fails.
const NOT_LAUNCHED: u8 = 125;
/// The exit code if the command does not exist.
const NO_COMMAND: u8 = 127;

/// Runs the subcommand.
pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    let name = arguments.command.first().map(Path::new).unwrap_or(Path::new(""));
    if !children::command_exists(name) {
        let wrong =
            if name.components().count() > 1 { "is no file that can be run" } else { "is not on PATH" };
        print_error(format_args!("cannot launch {}: it {wrong}", name.display()));
        return Ok(ExitCode::from(NO_COMMAND));
    }
    match launch_job(arguments) {
        Err(error) if !error.is::<ConfigError>() => {
            print_error(format_args!("cannot launch: {error:#}"));
            Ok(ExitCode::from(NOT_LAUNCHED))
        }
        done => done,
    }
}

fn launch_job(arguments: &Arguments) -> Result<ExitCode> {
    let jobs = JobSelection::Only { name: arguments.job.clone(), tasks: arguments.processes };
    let config = arguments.options.load_config(jobs)?;
    log::start_logging(&config.server.log, config.server.log_format).map_err(anyhow::Error::msg)?;
    let nccl_plugin = arguments.collectives.then(choose_nccl_plugin).transpose()?;
    let open_files = connection_limits::raise_open_file_limit();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(config.server.io_threads)
        .enable_all()
        .build()
        .context("cannot start the threads that serve connections")?;
    allocator::configure_allocator_and_start_trimming(runtime.handle());
    // The supervisor runs on this thread, which lives as long as the process: children are tied to the
    // thread that started them.
    let code = runtime.block_on(async {
        let target = match &arguments.server {
            Some(url) => {
                let requested = RequestedJob {
                    name: &arguments.job,
                    processes: arguments.processes,
                    claims_ids: arguments.claim_ids,
                };
                LaunchServer::connect_remote(url, &arguments.credentials, &requested, &arguments.options)
                    .await?
            }
            None => LaunchServer::start_local(&config).await?,
        };
        let (tasks, job_tasks, host_id) = if arguments.claim_ids {
            let host = launch_host_identity(arguments.host_id.as_deref())?;
            let (tasks, job_tasks) = claim_task_ids(&target, host.host(), arguments.processes).await?;
            (tasks, job_tasks, Some(host.host().to_owned()))
        } else {
            ((0..arguments.processes).collect(), arguments.processes, arguments.host_id.clone())
        };
        // The processes of a host without an identity have none.
        let host = launch_host_identity(host_id.as_deref()).ok().map(|identity| identity.host().to_owned());
        let identities = IdentityPublisher::start(agent_config(&target), host);
        let plan = LaunchPlan {
            command: arguments.command.clone(),
            tasks,
            job_tasks,
            host_id,
            nccl_plugin,
            recoverable: target.is_recoverable(),
            max_restarts: arguments.max_restarts,
            kill_after: arguments.kill_after,
            open_files: open_files.current,
        };
        Supervisor::new(plan, target, identities)?.run().await
    });
    runtime.shutdown_background();
    Ok(ExitCode::from(code?))
}

/// Returns the plug-in that the processes should load.
fn choose_nccl_plugin() -> Result<PathBuf> {
    let plugin = find_nccl_plugin()?;
    // NCCL loads one plug-in.
    match std::env::var_os(NCCL_PLUGIN_VARIABLE) {
        Some(other) if !other.is_empty() && plugin.as_os_str() != other => anyhow::bail!(
            "{NCCL_PLUGIN_VARIABLE} names {} already, and NCCL loads one plug-in: unset it, or omit --collectives",
            other.display()
        ),
        _ => Ok(plugin),
    }
}

/// The time that a launch waits for the task ids of its processes: for the launches on all other hosts.
const CLAIM_TIMEOUT: Duration = Duration::from_secs(600);

/// Returns the identity of this host.
fn launch_host_identity(given: Option<&str>) -> Result<ProcessIdentity> {
    let mut variables = environment_variables();
    // The processes of a launch are numbered by it.
    variables.insert("MUSTER_LOCAL_PROCESS_ID".to_owned(), "0".to_owned());
    Ok(DetectedProcessIdentity::detect_on_this_machine(given, &variables)?.identity)
}

/// Returns the settings by which the launch calls the service: those of the JAX programs that it starts.
fn agent_config(target: &LaunchServer) -> AgentConfig {
    let ca = std::env::var_os("JAX_MTLS_CA_FILE").map(PathBuf::from);
    let own = std::env::var_os("JAX_MTLS_CERT_FILE").zip(std::env::var_os("JAX_MTLS_KEY_FILE"));
    let own = own.map(|(cert, key)| (PathBuf::from(cert), PathBuf::from(key)));
    let tls = ca.map(|ca| AgentTlsFiles { ca, own });
    AgentConfig { tls, ..AgentConfig::new(target.coordinator_address(), 0) }
}

/// Returns the task ids that the server grants to the processes of this host, and the number of tasks of the job.
async fn claim_task_ids(target: &LaunchServer, host: &str, processes: u32) -> Result<(Vec<u32>, u32)> {
    let mut claims = JoinSet::new();
    for local in 0..processes {
        let identity = ProcessIdentity::new(host, local).map_err(anyhow::Error::msg)?;
        let config = agent_config(target);
        // The processes of one launch are told apart, and its repetitions are not.
        let claimant = own_claimant_id().wrapping_add(u64::from(local));
        claims.spawn(async move { (local, claim_task(&config, &identity, claimant, CLAIM_TIMEOUT).await) });
    }
    let mut granted = BTreeMap::new();
    let mut tasks = 0;
    while let Some(done) = claims.join_next().await {
        let (local, answer) = done.context("a claim was cut short")?;
        let answer = answer?;
        granted.insert(local, answer.task);
        tasks = answer.tasks;
    }
    Ok((granted.into_values().collect(), tasks))
}
