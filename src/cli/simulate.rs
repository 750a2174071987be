//! Implements `muster simulate`: runs the simulated tasks of a story against a server of its own or a running one.
//!
//! `simulator` runs the tasks, `simulate/server.rs` has the server and its job, and `simulate/report.rs` the output.
//! Begin at `run`, then `simulate`.

mod report;
mod server;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Result, bail};
use clap::Args;
use rustix::process::{Resource, getrlimit};

use super::credentials::CredentialArgs;
use super::local_server::{parse_duration_or_seconds, parse_loopback_address};
use super::output::print_raw;
use super::stop_signals::{StopSignal, StopSignals};
use super::{allocator, connection_limits};
use crate::coordination::JobName;
use crate::simulator::{
    ConnectionPlan, SimulatedCluster, SimulatedTarget, Story, StoryError, StoryOverrides, built_in_names,
    built_in_text, plan_connections,
};
use crate::telemetry::log::{self, LogFormat};
use report::SimulationReport;
use server::SimulationServer;

/// The time in which all tasks must have registered.
const REGISTER_LIMIT: Duration = Duration::from_secs(300);
/// The time that the tasks have to shut down at the end of the story.
const LEAVE_LIMIT: Duration = Duration::from_secs(10);
/// The same after a signal.
const LEAVE_LIMIT_AFTER_SIGNAL: Duration = Duration::from_millis(500);
/// Open files besides the connections of the tasks.
const OTHER_FILES: u64 = 256;

/// Simulate the tasks of a large job, to which a story happens
///
/// Runs many real clients of the protocol in this process: they register, publish their hosts and devices, send
/// heartbeats and make steps. The story kills, delays, silences or restarts some of them. So pages, alerts, dashboards
/// and people can be tried at size without a cluster. The server is one of its own, at the usual ports if they are free,
/// or a running one. On Linux, each simulated host connects from an address of its own in 127.0.0.0/8 to a server on
/// this machine. If the gRPC port of a running server wants TLS, the tasks use the variables JAX_MTLS_CA_FILE,
/// JAX_MTLS_CERT_FILE and JAX_MTLS_KEY_FILE.
#[derive(Debug, Args)]
#[command(after_long_help = EXAMPLES)]
pub struct Arguments {
    /// The story: healthy, straggler, dead-host, restart-storm, partition or held-gpu, or the path of a file
    #[arg(long, value_name = "STORY|FILE", default_value = "healthy")]
    story: String,

    /// Print one of the stories of this program, as a start for one's own, and do nothing else
    #[arg(long, value_name = "STORY")]
    print_story: Option<String>,

    /// The number of tasks, in place of the story's. Without --hosts, the hosts keep their number of tasks
    #[arg(long, value_name = "N")]
    tasks: Option<u32>,

    /// The number of hosts, in place of the story's
    #[arg(long, value_name = "N")]
    hosts: Option<u32>,

    /// End after this time, in place of the story's; without either, after Ctrl-C
    #[arg(long = "for", value_name = "SECONDS", value_parser = parse_duration_or_seconds)]
    length: Option<Duration>,

    /// The seed of everything that is random, in place of the story's
    #[arg(long, value_name = "N")]
    seed: Option<u64>,

    /// The number of connections that the tasks share [default: one for each host]. A task that is killed without the
    /// others of its connection has one of its own
    #[arg(long, value_name = "N")]
    connections: Option<u32>,

    /// Use the server at this HTTP address, instead of one of its own
    #[arg(long, value_name = "URL")]
    server: Option<String>,

    #[command(flatten)]
    credentials: CredentialArgs,

    /// The job; it is made if the server has none of this name
    #[arg(long, value_name = "NAME", default_value = "simulation")]
    job: JobName,

    /// The address for tasks of the own server, on this machine; port 0 picks a free one [default: 127.0.0.1:8476 if it
    /// is free]
    #[arg(long, value_name = "IP:PORT", value_parser = parse_loopback_address, conflicts_with = "server")]
    grpc: Option<SocketAddr>,

    /// The address of the pages of the own server, on this machine; port 0 picks a free one [default: 127.0.0.1:8477 if
    /// it is free]
    #[arg(long, value_name = "IP:PORT", value_parser = parse_loopback_address, conflicts_with = "server")]
    http: Option<SocketAddr>,

    /// Print each line as a JSON object
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "\
Exit code:
  0      the story ran as it is written; errors that it provokes are no failures
  1      the service refused or lost what it should not have, or the simulation could not begin
  2      the story or the arguments are wrong
  128+S  the simulation was ended by signal S

Examples:
  muster simulate --story straggler
  muster simulate --story dead-host --tasks 10000 --hosts 1250

  Write a story of one's own, and run it for five minutes against a running server:
    muster simulate --print-story partition > own.toml
    muster simulate --story own.toml --for 5m --server http://127.0.0.1:8477

Keys of a story ([default]):
  description, tasks, hosts, devices-per-task [1], seed [0], for [none: until Ctrl-C]
  [job]       recoverable [true], heartbeat-timeout [10s]
  [workers]   identities [true], topology [true]: publish hosts and devices;
              heartbeat-interval [half of the timeout], start-spread [1s],
              restart-delay [2s]: when a task starts again that ended with an error
  [steps]     time [2s], spread [100ms], timeout [5m] of the barrier of each step
  [collectives]  all-reduces of each step, if it is there: each-step [8], bytes [64 MiB],
              time [2ms], timed [false]: times on the GPU from the start
  [[events]]  at; what; tasks = \"8-15\", hosts = \"3\" or random-hosts = 2; every; and, by what:
    late       they are late at each barrier: by, for [until the end]
    hang       they send heartbeats, and reach no barrier: for [until the end]
    silence    they send nothing, with open sockets: for [until the end]
    partition  hosts are cut off, and then go on: for
    kill       their connections are reset
    restart    the same, and they register again: after [0s]
    stop       they shut down in good order
    error      they report an error and end: message
    hold-gpu   their GPUs begin no further collective: for [until the end]";

/// Runs the subcommand.
pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    if let Some(name) = &arguments.print_story {
        let text = built_in_text(name).ok_or_else(|| unknown_story_error(name))?;
        print_raw(text)?;
        return Ok(ExitCode::SUCCESS);
    }
    let story = load_story(arguments)?;
    let plan = plan_connections(&story, arguments.connections)?;
    log::start_logging("error", LogFormat::Human).map_err(anyhow::Error::msg)?;
    connection_limits::raise_open_file_limit();
    check_open_files(&plan, arguments.server.is_none())?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    allocator::configure_allocator_and_start_trimming(runtime.handle());
    let code = runtime.block_on(simulate(arguments, story, plan));
    runtime.shutdown_background();
    code
}

fn unknown_story_error(name: &str) -> StoryError {
    StoryError::Unknown { name: name.to_owned(), names: built_in_names().collect::<Vec<_>>().join(", ") }
}

/// Loads the story with the values of the command line.
fn load_story(arguments: &Arguments) -> Result<Story> {
    let name = &arguments.story;
    let mut story = match built_in_text(name) {
        Some(text) => Story::parse(text)?,
        None if !name.contains(['.', '/']) && !PathBuf::from(name).exists() => {
            return Err(unknown_story_error(name).into());
        }
        None => Story::read(&PathBuf::from(name))?,
    };
    let Arguments { tasks, hosts, length, seed, .. } = *arguments;
    story.apply(StoryOverrides { tasks, hosts, length, seed });
    story.check()?;
    Ok(story)
}

/// Checks that the connections fit into the limit on open files.
fn check_open_files(plan: &ConnectionPlan, has_own_server: bool) -> Result<()> {
    // The own server has the other end of each connection.
    let needed = plan.connections() as u64 * if has_own_server { 2 } else { 1 } + OTHER_FILES;
    match getrlimit(Resource::Nofile).current {
        Some(limit) if limit < needed => bail!(
            "{} connections need {needed} open files, and the limit is {limit}: raise it (ulimit -n), or give fewer with \
             --connections",
            plan.connections()
        ),
        _ => Ok(()),
    }
}

/// How the part of the simulation ended that a signal can end.
enum SimulationEnd {
    Story,
    Signal(StopSignal),
}

/// Starts or finds the server, and returns it with its gRPC port.
async fn find_server(
    arguments: &Arguments,
    story: &mut Story,
) -> Result<(SimulationServer, SimulatedTarget)> {
    let Arguments { job, grpc, http, credentials, .. } = arguments;
    let server = match &arguments.server {
        None => SimulationServer::start_own([*grpc, *http], job, story).await?,
        Some(url) => SimulationServer::connect(url, credentials, job, story).await?,
    };
    let target = server.target().await?;
    Ok((server, target))
}

async fn simulate(arguments: &Arguments, mut story: Story, plan: ConnectionPlan) -> Result<ExitCode> {
    let mut stops = StopSignals::listen()?;
    let (server, target) = tokio::select! {
        found = find_server(arguments, &mut story) => found?,
        stop = stops.next() => return Ok(stop.exit_code()),
    };
    let report = SimulationReport::new(story.clone(), arguments.json);
    report.print_start(&server, &target, &plan)?;
    let mut cluster = SimulatedCluster::start(story, target, plan);
    let played = tokio::select! {
        played = play(&mut cluster, &report) => played.map(|()| SimulationEnd::Story),
        stop = stops.next() => Ok(SimulationEnd::Signal(stop)),
    };
    let summary = cluster.summary();
    let is_stopped = matches!(played, Ok(SimulationEnd::Signal(_)));
    // A signal must end the command at once.
    let first_cause = if is_stopped { None } else { server.fetch_first_cause().await };
    let elapsed = cluster.elapsed();
    cluster.end(if is_stopped { LEAVE_LIMIT_AFTER_SIGNAL } else { LEAVE_LIMIT }).await;
    let remains = server.remaining_job_text();
    server.stop().await;
    let played = played?;
    let has_failed = summary.unexpected_count() > 0;
    report.print_summary(elapsed, &summary, first_cause.as_ref(), remains.as_deref())?;
    Ok(match played {
        SimulationEnd::Signal(stop) => stop.exit_code(),
        SimulationEnd::Story if has_failed => ExitCode::FAILURE,
        SimulationEnd::Story => ExitCode::SUCCESS,
    })
}

/// Plays the story to its end.
async fn play(cluster: &mut SimulatedCluster, report: &SimulationReport) -> Result<()> {
    let began = tokio::time::Instant::now();
    cluster.wait_until_registered(REGISTER_LIMIT).await?;
    report.print_registered(began.elapsed())?;
    while let Some(action) = cluster.next_action().await {
        report.print_action(&action)?;
    }
    Ok(())
}
