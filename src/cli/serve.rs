//! Implements `muster serve`: runs a server until a signal stops it.
//!
//! `server.rs` assembles the server. Begin at `run`.

use std::fmt::Write as _;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::Args;
use tokio::signal::unix::{SignalKind, signal};

use super::client::DEFAULT_SERVER;
use super::config::JobDeclarationArgs;
use super::keeper::{self, KeeperLink};
use super::output::{TerminalText, print, print_json};
use super::server::RunningServer;
use super::server_journal::{ServerJournal, usable_journal_folder};
use super::setting_flags::ServeFlags;
use super::stop_signals::{StopSignal, StopSignals};
use super::{allocator, connection_limits};
use crate::config::{Config, JobSelection};
use crate::http::api::ServerInfo;
use crate::telemetry::log::{self, LogFormat};

/// Serve jobs to JAX programs until stopped
///
/// Declare at least one job. Its tasks are JAX processes on any host, which find this server by two
/// environment variables; the server prints them at its start. The programs themselves stay unchanged. When a
/// run of a job has ended, its next run may register without a restart of the server.
///
/// SIGTERM or SIGINT stops it gracefully: it reports not ready at once, waiting calls are answered, and
/// connections may finish for --stop-timeout. A second signal ends it at once.
///
/// SIGHUP opens the audit file again, which may have been rotated, and reloads tokens and certificates.
///
/// The process holds the listening sockets and starts a second one that serves. If that one dies, another takes its place,
/// with the state from the journal (`muster help journal`).
#[derive(Debug, Args)]
#[command(after_long_help = EXAMPLES)]
pub struct Arguments {
    #[command(flatten)]
    jobs: JobDeclarationArgs,

    #[command(flatten)]
    options: ServeFlags,

    /// Check the configuration, report its errors, and serve nothing
    #[arg(long)]
    check_config: bool,

    /// Serve as the process that a keeper has started
    #[arg(long = keeper::CORE_FLAG, hide = true)]
    core: bool,

    /// Say whether this program could take over from another one, and serve nothing
    #[arg(long = keeper::TRIAL_FLAG, hide = true)]
    trial: bool,
}

const EXAMPLES: &str = "\
Examples:
  One job of eight tasks, reachable from other machines that show a certificate (jaxlib 0.11.2 and later):
    muster serve --tasks 8 --grpc 0.0.0.0:8476 --grpc-tls-cert server.pem --grpc-tls-key server-key.pem \\
      --grpc-tls-client-ca ca.pem

  The same for clients that speak only plaintext, inside a network that you trust:
    muster serve --tasks 8 --grpc 0.0.0.0:8476 --insecure-grpc

  Pages and REST for other machines, to those who have a token:
    muster token new --name ops --role operator --file tokens.toml
    muster serve --tasks 8 --http 0.0.0.0:8477 --http-hosts muster.example --tokens-file tokens.toml

  Tasks that may fail and come back; broken connections are forgiven for five seconds:
    muster serve --tasks 8 --recoverable --disconnect-grace 5s

  Two jobs, the second with a port of its own:
    muster serve --tasks 64 --job eval=4@127.0.0.1:9476

  The same as a file, checked and then served (flags still override it):
    muster config print --tasks 64 --job eval=4@127.0.0.1:9476 > muster.toml
    muster serve --config muster.toml --check-config
    muster serve --config muster.toml";

/// The time that the reader of stdout has.
const ANNOUNCE_TIMEOUT: Duration = Duration::from_secs(1);

/// Runs the subcommand.
pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    let config = arguments.options.load_config(JobSelection::from(&arguments.jobs))?;
    config.check_has_jobs()?;
    config.check_access_control()?;
    if arguments.check_config {
        RunningServer::check_certificates_and_tokens(&config)?;
        let tasks: u64 = config.jobs.iter().map(|job| u64::from(job.settings.tasks)).sum();
        let jobs = config.jobs.len();
        print(&TerminalText::from_line(format!(
            "The configuration is valid: {jobs} job(s), {tasks} task(s)."
        )))?;
        return Ok(ExitCode::SUCCESS);
    }
    if arguments.trial {
        RunningServer::check_certificates_and_tokens(&config)?;
        print_json(&ServerJournal::try_read(&config)?)?;
        return Ok(ExitCode::SUCCESS);
    }
    log::start_logging(&config.server.log, config.server.log_format).map_err(anyhow::Error::msg)?;
    connection_limits::raise_open_file_limit();
    if !arguments.core
        && !config.server.no_keeper
        && let Some(folder) = usable_journal_folder(&config.server)
    {
        return keeper::run_keeper(&config, folder);
    }
    let mut keeper = arguments.core.then(KeeperLink::open).transpose()?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(config.server.io_threads)
        .enable_all()
        .build()
        .context("cannot start the threads that serve connections")?;
    allocator::configure_allocator_and_start_trimming(runtime.handle());
    let served = runtime.block_on(serve_until_stopped(&config, keeper.as_mut()));
    // Tasks that still run have had their time.
    runtime.shutdown_background();
    served
}

async fn serve_until_stopped(config: &Config, mut keeper: Option<&mut KeeperLink>) -> Result<ExitCode> {
    let mut stops = StopSignals::listen()?;
    let mut hangups = signal(SignalKind::hangup()).context("cannot listen for signals")?;
    let server = RunningServer::start_as_core(config, keeper.as_deref_mut()).await?;
    // The next core has the same sockets.
    if keeper.as_ref().is_none_or(|keeper| !keeper.start.is_announced) {
        print_announcement(config, server.server_info()).await?;
    }
    if let Some(keeper) = &keeper {
        keeper.report_serving();
    }
    let (first, is_from_keeper) = loop {
        tokio::select! {
            first = stops.next() => break (first, false),
            first = next_stop_of_keeper(keeper.as_deref_mut()) => break (first, true),
            _ = hangups.recv() => server.reload_files(),
        }
    };
    tracing::info!(signal = first.name, within = ?config.server.stop_timeout, "stopping; a second signal ends at once");
    tokio::select! {
        () = server.stop(config.server.stop_timeout) => {
            tracing::info!("stopped");
            Ok(ExitCode::SUCCESS)
        }
        second = next_second_stop(&mut stops, keeper, is_from_keeper) => {
            tracing::warn!(signal = second.name, "ended at once");
            Ok(second.exit_code())
        }
    }
}

/// Waits until the keeper asks to stop; for ever if there is none.
async fn next_stop_of_keeper(keeper: Option<&mut KeeperLink>) -> StopSignal {
    match keeper {
        Some(keeper) => StopSignal::from_raw(keeper.next_stop().await),
        None => std::future::pending().await,
    }
}

/// Waits for the request to stop at once. If there is a keeper, only it makes one: a supervisor may send one signal to all
/// processes, also to those that the keeper tells.
async fn next_second_stop(
    stops: &mut StopSignals,
    mut keeper: Option<&mut KeeperLink>,
    is_first_from_keeper: bool,
) -> StopSignal {
    if keeper.is_none() {
        return stops.next().await;
    }
    if !is_first_from_keeper {
        next_stop_of_keeper(keeper.as_deref_mut()).await;
    }
    next_stop_of_keeper(keeper).await
}

/// Announces the addresses and how to use them: a block for people, or a log line for machines.
async fn print_announcement(config: &Config, about: &ServerInfo) -> Result<()> {
    if config.server.log_format == LogFormat::Json {
        let grpc: Vec<String> = about.grpc.iter().map(|listener| listener.address.to_string()).collect();
        tracing::info!(version = about.version.version, grpc = grpc.join(","), http = %about.http, "serving");
        return Ok(());
    }
    // The reader of stdout may be slow; the service must not wait for it.
    let text = TerminalText::from_escaped_text(&announcement_text(config, about));
    let written = tokio::task::spawn_blocking(move || print(&text));
    match tokio::time::timeout(ANNOUNCE_TIMEOUT, written).await {
        Ok(Ok(written)) => written.context("cannot write to stdout"),
        Ok(Err(error)) => Err(error).context("cannot write to stdout"),
        Err(_) => {
            tracing::warn!("stdout is not being read: the addresses of the service were not printed");
            Ok(())
        }
    }
}

fn announcement_text(config: &Config, about: &ServerInfo) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = writeln!(text, "Muster {} serves", about.version.version);
    for listener in &about.grpc {
        let _ = writeln!(text, "  gRPC  {}", listener.address);
    }
    let scheme = if config.server.http_tls.cert.is_some() { "https" } else { "http" };
    let http = format!("{scheme}://{}", about.http);
    let named = if http == DEFAULT_SERVER { String::new() } else { format!(" --server {http}") };
    let _ = writeln!(text, "  HTTP  {http}");
    let _ = writeln!(text, "Look with: muster status{named}");
    for job in &config.jobs {
        let settings = &job.settings;
        let recoverable = if settings.recoverable { ", recoverable" } else { "" };
        let _ = writeln!(
            text,
            "Job {}: {} task(s){recoverable}. Start each of them with",
            job.name, settings.tasks
        );
        let address = about.coordinator_address(&job.name, None).unwrap_or_default();
        let _ =
            writeln!(text, "  JAX_COORDINATOR_ADDRESS={address} JAX_COORDINATOR_BIND_ADDRESS=127.0.0.1:0");
        if address.starts_with(&format!("{}.", job.name)) {
            let (name, tasks) = (&job.name, settings.tasks);
            let _ = writeln!(
                text,
                "  (that name must lead here; or give the job a port: --job {name}={tasks}@IP:PORT)"
            );
        }
    }
    text
}
