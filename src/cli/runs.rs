//! Implements `muster runs`: lists the runs of a job, shows one of them, or compares one with an earlier one.
//!
//! Begin at `run`.

use std::fmt::Write as _;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use clap::Args;

use super::output::TerminalText;
use super::server_args::{JobArg, ServerArgs, block_on_requests, format_time};
use crate::coordination::{
    ComparedHost, ComparedLateness, ComparedTask, HostId, RunComparison, RunDetail, RunListItem, TaskId,
};
use crate::http::api::RunsPage;
use crate::text::{escape_to_one_line, format_approximate_duration, format_micros, format_ranges};

/// Show the runs of a job, one run, or what changed between two
///
/// The server keeps the tasks, hosts and barriers of the run before the present one, and of earlier ones while there is
/// room.
#[derive(Debug, Args)]
#[command(after_long_help = EXAMPLES)]
pub struct Arguments {
    /// Show this run
    run: Option<u64>,

    /// Compare the run with this earlier one: which tasks and hosts came late, and which have moved
    #[arg(long, value_name = "RUN", requires = "run")]
    before: Option<u64>,

    #[command(flatten)]
    job_arg: JobArg,

    #[command(flatten)]
    server_args: ServerArgs,
}

const EXAMPLES: &str = "\
Examples:
  muster runs
  muster runs 3
  muster runs 4 --before 3";

/// The number of runs in a page.
const PAGE: usize = 1000;
/// The maximum number of tasks and hosts of a comparison.
const ROWS_MAX: usize = 50;

/// Runs the subcommand.
pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    block_on_requests(async {
        let client = arguments.server_args.connect().await?;
        let job = arguments.job_arg.resolve_job_path(&client).await?;
        match (arguments.run, arguments.before) {
            (None, _) => {
                let all: RunsPage = client.get(&format!("{job}/runs?limit={PAGE}")).await?;
                arguments.server_args.print_answer(&all, |all| run_table_text(&all.runs))?;
            }
            (Some(run), None) => {
                let one: RunDetail = client.get(&format!("{job}/runs/{run}")).await?;
                arguments.server_args.print_answer(&one, run_text)?;
            }
            (Some(run), Some(before)) => {
                let path = format!("{job}/runs/{run}/comparison?before={before}");
                let both: RunComparison = client.get(&path).await?;
                arguments.server_args.print_answer(&both, comparison_text)?;
            }
        }
        Ok(ExitCode::SUCCESS)
    })
}

/// Returns the first error of a run in few words, or nothing.
fn cause_text(run: &RunListItem) -> String {
    run.first_cause.as_ref().map_or_else(String::new, |cause| {
        let task = cause.task.map_or_else(String::new, |task| format!("task {task}: "));
        format!("{task}{}", escape_to_one_line(&cause.why))
    })
}

fn length_text(run: &RunListItem) -> String {
    let text = |us| format_approximate_duration(Duration::from_micros(us));
    run.length_us.map_or_else(|| "-".to_owned(), text)
}

/// Returns the runs as lines.
fn run_table_text(runs: &[RunListItem]) -> TerminalText {
    let mut text = "RUN    STATE      OPENED                       LENGTH     FIRST CAUSE".to_owned();
    for run in runs {
        // Writing to a string cannot fail.
        let _ = write!(
            text,
            "\n{:<6} {:<10} {:<28} {:<10} {}",
            run.number.0,
            run.state.to_string(),
            format_time(run.opened_at),
            length_text(run),
            cause_text(run),
        );
    }
    TerminalText::from_escaped_text(&text)
}

/// Returns one run as lines.
fn run_text(one: &RunDetail) -> TerminalText {
    let RunDetail { run, end_reason, tasks, keys, store_bytes, counts, hosts } = one;
    let mut text = format!("Run {}: {}, opened {}", run.number, run.state, format_time(run.opened_at));
    let mut line = |name: &str, value: String| {
        let _ = write!(text, "\n  {name:<12} {value}");
    };
    line("started", run.started_at.map_or_else(|| "never".to_owned(), format_time));
    line("ended", run.ended_at.map_or_else(|| "not yet".to_owned(), format_time));
    line("length", length_text(run));
    let because = if run.first_cause.is_some() { Some(cause_text(run)) } else { end_reason.clone() };
    if let Some(because) = because {
        line("because", escape_to_one_line(&because).into_owned());
    }
    line("tasks", tasks.to_string());
    match counts {
        Some(counts) => line(
            "",
            format!(
                "{} connected, {} disconnected, {} failed, {} suspect, {} registering, {} missing, {} excluded",
                counts.connected,
                counts.disconnected,
                counts.failed,
                counts.suspect,
                counts.registering,
                counts.missing,
                counts.excluded
            ),
        ),
        None => line("", "their states are no longer kept".to_owned()),
    }
    if let Some(hosts) = hosts {
        line("hosts", hosts.to_string());
    }
    line("keys", format!("{keys} ({store_bytes} bytes)"));
    TerminalText::from_escaped_text(&text)
}

/// Returns in which of two runs something had failed, or else was late, in words.
fn trouble_text(had_failed: [bool; 2], was_late: [bool; 2]) -> String {
    let (what, when) = if had_failed.contains(&true) { ("failed", had_failed) } else { ("late", was_late) };
    match when {
        [true, true] => format!("{what} in both"),
        [true, false] => format!("{what} before"),
        [false, true] => format!("{what} now"),
        [false, false] => String::new(),
    }
}

/// Returns two runs side by side as lines.
fn comparison_text(both: &RunComparison) -> TerminalText {
    let mut text = String::new();
    for one in [&both.before, &both.now] {
        let _ = writeln!(
            text,
            "Run {}: {}, {} tasks, length {}  {}",
            one.run.number,
            one.run.state,
            one.tasks,
            length_text(&one.run),
            cause_text(&one.run),
        );
    }
    text.push_str(&escape_to_one_line(&both.summary));
    if both.changed_devices.is_none() {
        text.push_str(" The devices of one of them are not known.");
    }
    for compared in both.tasks.iter().take(ROWS_MAX) {
        let ComparedTask { task, host, host_before, before, now, .. } = compared;
        let late = |of: &Option<ComparedLateness>| {
            of.as_ref().map_or_else(|| "-".to_owned(), |it| format_micros(it.lateness_us))
        };
        let name = |host: &Option<HostId>| host.as_ref().map_or_else(|| "-".to_owned(), ToString::to_string);
        let told = trouble_text(compared.had_failed(), compared.was_late());
        let _ = write!(
            text,
            "\n  task {task:<8} {told:<14} late by {} then, {} now; host {} then, {} now",
            late(before),
            late(now),
            name(host_before),
            name(host),
        );
    }
    for host in both.hosts.iter().take(ROWS_MAX) {
        let ComparedHost { host: name, tasks_before, tasks, .. } = host;
        let ranges = |tasks: &[TaskId]| match tasks {
            [] => "none".to_owned(),
            tasks => format_ranges(tasks.iter().map(|task| task.0), 4, "-", "…"),
        };
        let _ = write!(
            text,
            "\n  host {:<24} {:<14} tasks {} then, {} now",
            name.as_str(),
            trouble_text(host.had_failed(), host.was_late()),
            ranges(tasks_before),
            ranges(tasks),
        );
    }
    TerminalText::from_escaped_text(&text)
}
