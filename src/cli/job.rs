//! Implements `muster job`: lists, shows, creates, changes and deletes jobs.
//!
//! This module checks only the syntax of settings; the server validates them. Begin at `run`.

use std::fmt::Write as _;
use std::process::ExitCode;

use anyhow::{Context as _, Result, anyhow, bail};
use clap::{Args, Subcommand};
use http::Method;

use super::output::{TerminalCapabilities, TerminalLine, TerminalText, TextColour, print};
use super::server_args::{ServerArgs, block_on_requests, send_json};
use crate::config::{parse_auto_exclude_rules, parse_job_names};
use crate::coordination::{CommandReason, ErrorDelivery, JobName, JobSettings, JobSummary, JobView};
use crate::http::api::{JobPatch, NewJob, SettingsBody};
use crate::text::encode_query_value;

/// List, show, create, change or delete the jobs of a server
#[derive(Debug, Args)]
#[command(after_long_help = EXAMPLES)]
pub struct Arguments {
    #[command(subcommand)]
    command: Command,
}

const EXAMPLES: &str = "\
Examples:
  muster job list
  muster job create eval --tasks 4 --recoverable --reason 'nightly evaluation'
  muster job set train --heartbeat-timeout 20s --reason 'the network is fine now'
  muster job delete eval --reason 'done'";

#[derive(Debug, Subcommand)]
enum Command {
    List(ListArguments),
    Show(ShowArguments),
    Create(CreateArguments),
    Set(SetArguments),
    Delete(DeleteArguments),
}

/// The summaries of all jobs
#[derive(Debug, Args)]
struct ListArguments {
    #[command(flatten)]
    server_args: ServerArgs,
}

/// A job's settings, or everything about it with --json
#[derive(Debug, Args)]
struct ShowArguments {
    /// Its name
    name: JobName,
    #[command(flatten)]
    server_args: ServerArgs,
}

/// Create a job; its tasks reach it on the shared listener, by the name that they dial: NAME.HOST:PORT
#[derive(Debug, Args)]
struct CreateArguments {
    /// Its name: letters, digits and hyphens, as in a host's name
    name: JobName,
    /// How many tasks it has
    #[arg(long, value_name = "N")]
    tasks: u32,
    #[command(flatten)]
    settings: JobSettingFlags,
    /// Why; the audit keeps it
    #[arg(long, value_name = "TEXT")]
    reason: String,
    #[command(flatten)]
    server_args: ServerArgs,
}

/// Change settings of a job, also while it runs
///
/// The heartbeat timeout takes effect at once, other timeouts for what begins afterwards. The number of tasks
/// and whether they are recoverable cannot change during a run.
#[derive(Debug, Args)]
struct SetArguments {
    /// Its name
    name: JobName,
    /// How many tasks it has
    #[arg(long, value_name = "N")]
    tasks: Option<u32>,
    #[command(flatten)]
    settings: JobSettingFlags,
    /// Why; the audit keeps it
    #[arg(long, value_name = "TEXT")]
    reason: String,
    #[command(flatten)]
    server_args: ServerArgs,
}

/// Delete a job; waiting calls are answered that there is no such job
#[derive(Debug, Args)]
struct DeleteArguments {
    /// Its name
    name: JobName,
    /// Even if tasks are connected
    #[arg(long)]
    force: bool,
    /// Why; the audit keeps it
    #[arg(long, value_name = "TEXT")]
    reason: String,
    #[command(flatten)]
    server_args: ServerArgs,
}

/// The flags for settings, named as in `muster serve`.
#[derive(Debug, Args)]
struct JobSettingFlags {
    /// Tasks may fail and come back without ending the run
    #[arg(long, value_name = "true|false", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    recoverable: Option<bool>,
    /// A task that gives no sign of life for this long has failed
    #[arg(long, value_name = "DURATION")]
    heartbeat_timeout: Option<String>,
    /// How long tasks wait for one another when they register
    #[arg(long, value_name = "DURATION")]
    register_timeout: Option<String>,
    /// How long tasks wait for one another when they shut down; 0s: not at all
    #[arg(long, value_name = "DURATION")]
    shutdown_timeout: Option<String>,
    /// How long a task whose connection broke may take to be heard again
    #[arg(long, value_name = "DURATION|off")]
    disconnect_grace: Option<String>,
    /// How errors reach tasks
    #[arg(long, value_name = "auto|hold|cancel")]
    error_delivery: Option<String>,
    /// Findings upon which the server excludes the task that they name; none: none
    #[arg(long, value_name = "RULE,...|none")]
    auto_exclude: Option<String>,
    /// How long such an exclusion lasts
    #[arg(long, value_name = "DURATION")]
    auto_exclude_for: Option<String>,
    /// Jobs whose tasks may exchange transfers with those of this job, if they name it too; none: none
    #[arg(long, value_name = "JOB,...|none")]
    transfers_with: Option<String>,
    /// A bound, such as keys=1000; repeat for more
    #[arg(long = "bound", value_name = "NAME=NUMBER")]
    bounds: Vec<String>,
}

impl JobSettingFlags {
    fn to_settings_body(&self, tasks: Option<u32>) -> Result<SettingsBody> {
        let error_delivery = match self.error_delivery.as_deref() {
            None => None,
            Some("auto") => Some(ErrorDelivery::Auto),
            Some("hold") => Some(ErrorDelivery::Hold),
            Some("cancel") => Some(ErrorDelivery::Cancel),
            Some(other) => bail!("--error-delivery {other}: write auto, hold or cancel"),
        };
        let rules = self.auto_exclude.as_deref().map(parse_auto_exclude_rules);
        let peers = self.transfers_with.as_deref().map(parse_job_names);
        let mut bounds = serde_json::Map::new();
        for bound in &self.bounds {
            let (name, number) =
                bound.split_once('=').context("--bound: write NAME=NUMBER, such as keys=1000")?;
            let number: u64 = number.parse().with_context(|| format!("--bound {bound}: write a number"))?;
            bounds.insert(name.to_owned(), number.into());
        }
        Ok(SettingsBody {
            tasks,
            recoverable: self.recoverable,
            heartbeat_timeout: self.heartbeat_timeout.clone(),
            register_timeout: self.register_timeout.clone(),
            shutdown_timeout: self.shutdown_timeout.clone(),
            disconnect_grace: self.disconnect_grace.clone(),
            error_delivery,
            auto_exclude: rules.transpose().map_err(|wrong| anyhow!("--auto-exclude: {wrong}"))?,
            auto_exclude_for: self.auto_exclude_for.clone(),
            transfers_with: peers.transpose().map_err(|wrong| anyhow!("--transfers-with: {wrong}"))?,
            bounds: (!bounds.is_empty()).then_some(bounds),
        })
    }
}

/// Runs the subcommand.
pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    block_on_requests(async {
        match &arguments.command {
            Command::List(list) => {
                let jobs = list.server_args.connect().await?.fetch_jobs().await?;
                list.server_args.print_answer(&jobs, |jobs| jobs_table_text(jobs))?;
            }
            Command::Show(show) => {
                let job: JobView = show.server_args.connect().await?.fetch_job(&show.name).await?;
                show.server_args.print_answer(&job, |job| settings_text(&job.name, &job.settings))?;
            }
            Command::Create(create) => {
                let client = create.server_args.connect().await?;
                let settings = create.settings.to_settings_body(Some(create.tasks))?;
                let reason = CommandReason::try_from(create.reason.clone())?;
                let body = NewJob { name: create.name.clone(), settings, reason };
                let made: JobSummary = send_json(&client, Method::POST, "/api/v1/jobs", &body).await?;
                create.server_args.print_answer(&made, |made| {
                    TerminalText::from_line(format!("Made: {}", job_line_text(made)))
                })?;
            }
            Command::Set(set) => {
                let client = set.server_args.connect().await?;
                let reason = CommandReason::try_from(set.reason.clone())?;
                let body = JobPatch { settings: set.settings.to_settings_body(set.tasks)?, reason };
                let path = format!("/api/v1/jobs/{}", set.name);
                let now: JobSettings = send_json(&client, Method::PATCH, &path, &body).await?;
                set.server_args.print_answer(&now, |now| settings_text(&set.name, now))?;
            }
            Command::Delete(delete) => {
                let client = delete.server_args.connect().await?;
                let (name, force) = (&delete.name, delete.force);
                let path = format!(
                    "/api/v1/jobs/{name}?force={force}&reason={}",
                    encode_query_value(&delete.reason)
                );
                client.send_request::<()>(Method::DELETE, &path, None).await?;
                if !delete.server_args.json {
                    print(&TerminalText::from_line(format!("Job {name} is deleted.")))?;
                }
            }
        }
        Ok(ExitCode::SUCCESS)
    })
}

fn job_line_text(job: &JobSummary) -> String {
    let mut text = format!(
        "{}  run {} {}, {} of {} task(s) connected",
        job.name, job.run, job.state, job.live, job.tasks
    );
    // Writing to a string cannot fail.
    if job.recoverable {
        text.push_str(", recoverable");
    }
    if job.exclusions > 0 {
        let _ = write!(text, ", {} exclusion(s)", job.exclusions);
    }
    text
}

/// Returns jobs as a table.
fn jobs_table_text(jobs: &[JobSummary]) -> TerminalText {
    if jobs.is_empty() {
        return TerminalText::from_line(
            "There is no job. Make one with: muster job create NAME --tasks N --reason TEXT",
        );
    }
    let wide = jobs.iter().map(|job| job.name.as_str().len()).max().unwrap_or_default().max("NAME".len());
    let row = |name: &str, run: &str, state: &str, tasks: &str, excluded: &str, recoverable: &str| {
        format!("{name:<wide$}  {run:>4}  {state:<10}  {tasks:>13}  {excluded:>10}  {recoverable}")
    };
    let heading = row("NAME", "RUN", "STATE", "CONNECTED", "EXCLUSIONS", "RECOVERABLE");
    let mut out = TerminalText::from_line(TerminalLine::default().push_styled(
        TerminalCapabilities::of_stdout(),
        heading,
        TextColour::Bold,
    ));
    for job in jobs {
        let recoverable = if job.recoverable { "yes" } else { "no" };
        let (run, state) = (job.run.to_string(), job.state.to_string());
        let tasks = format!("{} of {}", job.live, job.tasks);
        out.add_line(row(job.name.as_str(), &run, &state, &tasks, &job.exclusions.to_string(), recoverable));
    }
    out
}

/// Returns the settings of a job, one a line, as in JSON.
fn settings_text(name: &JobName, settings: &JobSettings) -> TerminalText {
    let mut text = TerminalText::from_line(format!("name = {name}"));
    let Ok(serde_json::Value::Object(all)) = serde_json::to_value(settings) else { return text };
    for (name, value) in all {
        match value {
            serde_json::Value::Object(bounds) => {
                for (bound, value) in bounds {
                    text.add_line(format!("bound {bound} = {value}"));
                }
            }
            serde_json::Value::Null => text.add_line(format!("{name} = off")),
            serde_json::Value::String(value) => text.add_line(format!("{name} = {value}")),
            value => text.add_line(format!("{name} = {value}")),
        }
    }
    text
}
