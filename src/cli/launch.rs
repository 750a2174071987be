//! Implements `muster launch`: runs the tasks of a job on this machine.
//!
//! It does not supervise (`launch/supervisor.rs`). Begin at `run`, then `launch`.

pub(super) mod children;
mod prefix_output;
mod supervisor;
mod target;

use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::Args;

use super::credentials::Credentials;
use super::options::LaunchFlags;
use super::output::print_error;
use super::{allocator, limits};
use crate::config::{ConfigError, JobSelection};
use crate::coordination::JobName;
use crate::telemetry::log;
use crate::text::parse_duration;
use supervisor::{LaunchPlan, Supervisor};
use target::LaunchServer;

pub use children::{BECOME_COMMAND, BecomeArguments, GUARD_COMMAND, run_become, run_guard};

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
    credentials: Credentials,

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

  With a server that runs already (muster serve --job train=4):
    muster launch -n 4 --server http://127.0.0.1:8477 --job train -- python3 train.py";

/// The exit code if the launch itself fails.
const NOT_LAUNCHED: u8 = 125;
/// The exit code if the command does not exist.
const NO_COMMAND: u8 = 127;

/// Runs the subcommand.
pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    let name = arguments.command.first().map(Path::new).unwrap_or(Path::new(""));
    if !children::is_command(name) {
        let wrong =
            if name.components().count() > 1 { "is no file that can be run" } else { "is not on PATH" };
        print_error(format_args!("cannot launch {}: it {wrong}", name.display()));
        return Ok(ExitCode::from(NO_COMMAND));
    }
    match launch(arguments) {
        Err(error) if !error.is::<ConfigError>() => {
            print_error(format_args!("cannot launch: {error:#}"));
            Ok(ExitCode::from(NOT_LAUNCHED))
        }
        done => done,
    }
}

fn launch(arguments: &Arguments) -> Result<ExitCode> {
    let jobs = JobSelection::Only { name: arguments.job.clone(), tasks: arguments.processes };
    let config = arguments.options.load(jobs)?;
    log::start(&config.server.log, config.server.log_format).map_err(anyhow::Error::msg)?;
    let open_files = limits::raise_open_files();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(config.server.io_threads)
        .enable_all()
        .build()
        .context("cannot start the threads that serve connections")?;
    allocator::configure_allocator(runtime.handle());
    // The supervisor runs on this thread, which lives as long as the process: children are tied to the
    // thread that started them.
    let code = runtime.block_on(async {
        let target = match &arguments.server {
            Some(url) => LaunchServer::find(url, arguments, &arguments.options).await?,
            None => LaunchServer::start(&config).await?,
        };
        let plan = LaunchPlan {
            command: arguments.command.clone(),
            tasks: arguments.processes,
            recoverable: target.recoverable(),
            max_restarts: arguments.max_restarts,
            kill_after: arguments.kill_after,
            open_files: open_files.current,
        };
        Supervisor::new(plan, target)?.run().await
    });
    runtime.shutdown_background();
    Ok(ExitCode::from(code?))
}
