//! Implements `muster exclude`: previews, creates and lists exclusions.
//!
//! `readmit.rs` lifts exclusions. Begin at `run`.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Result, bail};
use clap::Args;
use http::Method;

use super::output::TerminalText;
use super::server_args::{JobArg, ServerArgs, block_on_requests, format_time, send_json};
use crate::coordination::{CommandReason, ExclusionPreview, ExclusionView, RunOutcome, TaskId};
use crate::http::api::{ExclusionsPage, NewExclusion};
use crate::text::{format_ranges, parse_positive_duration};

/// Exclude a task or a host from its job, or show the exclusions
///
/// An exclusion takes effect at once: the task leaves the live set, its waiting calls are answered with your
/// reason, barriers continue without it, and it cannot register again until the exclusion expires or is
/// lifted (`muster readmit`). The other tasks continue. Exclusions outlive the runs of a job.
///
/// In a job whose tasks are not recoverable the run cannot continue without one of them: excluding it ends
/// the run, and is refused unless --end-run is given.
#[derive(Debug, Args)]
#[command(after_long_help = EXAMPLES)]
pub struct Arguments {
    /// A task's number; a host's name, as `muster hosts` shows it; or an IP address, for all tasks that register from
    /// it. Without it, the exclusions in force are shown
    target: Option<String>,

    /// The reason; the excluded process receives it, and the audit keeps it
    #[arg(long, value_name = "TEXT")]
    reason: Option<String>,

    /// The duration, such as 10m; without it, until the exclusion is lifted
    #[arg(long = "for", value_name = "DURATION", value_parser = parse_positive_duration)]
    lasts: Option<Duration>,

    /// Exclude even if that ends the run
    #[arg(long)]
    end_run: bool,

    /// Only show the effects
    #[arg(long)]
    dry_run: bool,

    #[command(flatten)]
    job_arg: JobArg,

    #[command(flatten)]
    server_args: ServerArgs,
}

const EXAMPLES: &str = "\
Examples:
  See what it would do, then do it for ten minutes:
    muster exclude 2 --reason 'flaky NIC' --dry-run
    muster exclude 2 --reason 'flaky NIC' --for 10m

  Keep a whole host out until somebody lifts it:
    muster exclude 10.0.0.7 --reason 'ECC errors, ticket 4711'

  See who is out, and let one in again:
    muster exclude
    muster readmit 1 --reason 'NIC replaced'";

/// Runs the subcommand.
pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    block_on_requests(async {
        let client = arguments.server_args.connect().await?;
        let path = format!("{}/exclusions", arguments.job_arg.resolve_job_path(&client).await?);
        let Some(target) = &arguments.target else {
            let page: ExclusionsPage = client.get(&path).await?;
            arguments.server_args.print_answer(&page, exclusions_text)?;
            return Ok(ExitCode::SUCCESS);
        };
        let Some(reason) = &arguments.reason else {
            bail!("say why, with --reason TEXT: the excluded process is shown it, and the audit keeps it");
        };
        let body = exclusion_request(arguments, target, reason)?;
        if arguments.dry_run {
            let preview: ExclusionPreview = send_json(&client, Method::POST, &path, &body).await?;
            arguments.server_args.print_answer(&preview, |preview| preview_text(target, preview))?;
        } else {
            let made: ExclusionView = send_json(&client, Method::POST, &path, &body).await?;
            arguments.server_args.print_answer(&made, exclusion_text)?;
        }
        Ok(ExitCode::SUCCESS)
    })
}

fn exclusion_request(arguments: &Arguments, target: &str, reason: &str) -> Result<NewExclusion> {
    let task = target.parse::<i32>().ok();
    let host = task.is_none().then(|| target.to_owned());
    Ok(NewExclusion {
        task,
        host,
        reason: CommandReason::try_from(reason.to_owned())?,
        expires_in_seconds: arguments
            .lasts
            .map(|lasts| lasts.as_millis().div_ceil(1000).try_into())
            .transpose()?,
        end_run: arguments.end_run,
        dry_run: arguments.dry_run,
    })
}

fn exclusion_text(made: &ExclusionView) -> TerminalText {
    let until = match made.expires_at {
        Some(at) => format!("until {}", format_time(at)),
        None => "until that is lifted".to_owned(),
    };
    let out = match &made.tasks[..] {
        [] => "no task of the present run is concerned".to_owned(),
        tasks => format!("out of the present run: {}", task_numbers_text(tasks)),
    };
    let mut text = TerminalText::from_line(format!(
        "Exclusion {}: {} takes no part {until}; {out}.",
        made.id, made.target
    ));
    text.add_line(format!("Lift it with: muster readmit {} --reason TEXT", made.id));
    text
}

fn preview_text(target: &str, preview: &ExclusionPreview) -> TerminalText {
    let mut text = TerminalText::from_line(format!("Nothing was done. Excluding {target} would"));
    let mut say = |line: String| text.add_line(format!("  {line}"));
    match &preview.tasks[..] {
        [] => say("take no task of the present run out; it would hold for those that come".into()),
        tasks => say(format!("take out {}", task_numbers_text(tasks))),
    }
    if preview.calls_refused > 0 {
        say(format!("answer {} waiting call(s) of theirs with the reason", preview.calls_refused));
    }
    for barrier in &preview.barriers {
        let how = if barrier.passes { "let the others pass" } else { "fail" };
        say(format!("{how} barrier {} (use {})", barrier.id, barrier.counter));
    }
    if preview.live_sets > 0 {
        say(format!("answer {} live-set question(s)", preview.live_sets));
    }
    if preview.starts_run {
        say("start the run, which waits for nobody else".into());
    }
    match preview.ends_run {
        Some(RunOutcome::Failed) => say("END THE RUN, whose tasks share their fate (needs --end-run)".into()),
        Some(_) => say("END THE RUN, in which nobody would be left (needs --end-run)".into()),
        None => say(format!("leave {} task(s) live", preview.live.len())),
    }
    text
}

fn exclusions_text(page: &ExclusionsPage) -> TerminalText {
    if page.exclusions.is_empty() {
        return TerminalText::from_line("Nobody is excluded.");
    }
    let mut text = TerminalText::default();
    for exclusion in &page.exclusions {
        let until = exclusion.expires_at.map_or_else(|| "lifted".to_owned(), format_time);
        text.add_line(format!(
            "{:>4}  {} since {} until {until}, by {}: {} ({} registration(s) refused)",
            exclusion.id,
            exclusion.target,
            format_time(exclusion.since),
            exclusion.actor,
            exclusion.reason,
            exclusion.refused,
        ));
    }
    text
}

/// Returns the numbers of tasks as a list.
fn task_numbers_text(tasks: &[TaskId]) -> String {
    match tasks {
        [one] => format!("task {one}"),
        many => {
            let more = format!("… ({} in all)", many.len());
            format!("tasks {}", format_ranges(many.iter().map(|task| task.0), 16, "-", &more))
        }
    }
}
