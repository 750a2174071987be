//! Implements `muster status`: fetches the state of jobs.
//!
//! `status/render.rs` formats the state. Begin at `run`.

mod render;

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::Args;
use serde::Serialize;
use tokio::signal::unix::{SignalKind, signal};

use super::client::{Client, DEFAULT_SERVER};
use super::credentials::CredentialArgs;
use super::output::{TerminalCapabilities, TerminalText, is_stdout_closed, print, print_error, print_json};
use super::screen::Screen;
use super::stop_signals::StopSignals;
use crate::coordination::{JobName, JobView};
use crate::http::api::{FindingsPage, ServerInfo};
use crate::service::findings::Finding;
use crate::text::parse_positive_duration;

/// Show what the jobs of a server do, and who is missing
///
/// For each job: its run, the first error (the cause; what followed is its consequence), what the server has found and
/// what to do about it, tasks that failed or are suspected, barriers in progress with the tasks that have not come, since when, and when they give up. Of large jobs
/// only the tasks that are not fine are listed.
#[derive(Debug, Args)]
#[command(after_long_help = EXAMPLES)]
pub struct Arguments {
    /// The HTTP address of the server
    #[arg(long, value_name = "URL", env = "MUSTER_SERVER", default_value = DEFAULT_SERVER, hide_env_values = true)]
    server: String,

    #[command(flatten)]
    credentials: CredentialArgs,

    /// Only this job
    #[arg(long, value_name = "NAME", env = "MUSTER_JOB", hide_env_values = true)]
    job: Option<JobName>,

    /// Print everything as JSON: the server, and every job as the REST API gives it
    #[arg(long)]
    json: bool,

    /// Repeat the output at this interval until interrupted
    #[arg(long, value_name = "DURATION", num_args = 0..=1, require_equals = true, default_missing_value = "2s",
        value_parser = parse_positive_duration)]
    watch: Option<Duration>,
}

const EXAMPLES: &str = "\
Examples:
  muster status
  muster status --server http://coordinator:8477 --job train
  muster status --json | jq '.jobs[].run.barriers[] | {id, missing}'
  muster status --watch          # every 2 s; --watch=500ms for more often";

/// The state that is shown.
#[derive(Debug, Serialize)]
struct StatusReport {
    server: ServerInfo,
    jobs: Vec<JobView>,
    /// The open findings by job, the most urgent first.
    findings: Vec<Finding>,
}

/// Runs the subcommand.
pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let Some(pause) = arguments.watch else {
        let seen = runtime.block_on(fetch_status(arguments))?;
        if arguments.json {
            print_json(&seen.1)?;
        } else {
            print(&status_text(&seen, TerminalCapabilities::of_stdout()))?;
        }
        return Ok(ExitCode::SUCCESS);
    };
    runtime.block_on(watch_status(arguments, pause))
}

/// Shows the state again and again, until a signal comes or the reader of stdout has gone.
async fn watch_status(arguments: &Arguments, pause: Duration) -> Result<ExitCode> {
    let mut stops = StopSignals::listen()?;
    let mut resized = signal(SignalKind::window_change()).context("cannot listen for signals")?;
    let mut screen = Screen::default();
    loop {
        let seen = tokio::select! {
            seen = fetch_status(arguments) => seen,
            stop = stops.next() => return Ok(stop.exit_code()),
        };
        // A server that is briefly unreachable is reported and tried again.
        match seen {
            Ok(seen) if arguments.json => print_json(&seen.1)?,
            Ok(seen) => screen.show(status_text(&seen, TerminalCapabilities::of_stdout()))?,
            // On stderr, because a program may read the reports.
            Err(error) if arguments.json => print_error(format_args!("{error:#}")),
            Err(error) => screen.show(TerminalText::from_line(format!("{error:#}; trying again")))?,
        }
        let next = tokio::time::sleep(pause);
        tokio::pin!(next);
        loop {
            if is_stdout_closed() {
                return Ok(ExitCode::SUCCESS);
            }
            tokio::select! {
                () = &mut next => break,
                stop = stops.next() => return Ok(stop.exit_code()),
                Some(()) = resized.recv() => if !arguments.json { screen.redraw()? },
            }
        }
    }
}

fn status_text((url, seen): &(String, StatusReport), style: TerminalCapabilities) -> TerminalText {
    render::render_status(url, &seen.server, &seen.jobs, &seen.findings, style)
}

async fn fetch_status(arguments: &Arguments) -> Result<(String, StatusReport)> {
    let client = Client::connect(&arguments.server, &arguments.credentials).await?;
    let names = match &arguments.job {
        Some(name) => vec![name.clone()],
        None => client.fetch_jobs().await?.into_iter().map(|job| job.name).collect(),
    };
    let mut jobs = Vec::with_capacity(names.len());
    for name in &names {
        jobs.push(client.fetch_job(name).await?);
    }
    let FindingsPage { mut findings, .. } = client.get("/api/v1/findings").await?;
    findings.retain(|finding| names.contains(&finding.job));
    Ok((client.server_url().into(), StatusReport { server: client.server_info().clone(), jobs, findings }))
}
