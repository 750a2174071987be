//! Implements `muster audit`: prints audit lines of a server.
//!
//! Begin at `run`.

use std::fmt::Write as _;
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;

use super::output::TerminalLine;
use super::server_args::{ServerArgs, block_on_requests, format_time};
use crate::coordination::JobName;
use crate::service::{AuditLine, AuditOutcome, AuditPage};

/// Show who did what to the jobs, with reason, address and outcome
///
/// The server keeps the last lines in memory; with `muster serve --audit-file PATH` it also writes every line
/// to a file.
#[derive(Debug, Args)]
#[command(after_long_help = EXAMPLES)]
pub struct Arguments {
    /// Only actions on this job
    #[arg(long, value_name = "NAME", env = "MUSTER_JOB", hide_env_values = true)]
    job: Option<JobName>,

    /// Only refused actions
    #[arg(long)]
    refused: bool,

    /// Only lines after the one with this number
    #[arg(long, value_name = "NUMBER", default_value_t = 0)]
    after: u64,

    #[command(flatten)]
    server_args: ServerArgs,
}

const EXAMPLES: &str = "\
Examples:
  muster audit
  muster audit --job train --refused
  muster audit --json | jq '.[] | [.actor.who, .act, .subject]'";

/// Runs the subcommand.
pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    block_on_requests(async {
        let client = arguments.server_args.connect().await?;
        let mut query = String::new();
        // Writing to a string cannot fail.
        if let Some(job) = &arguments.job {
            let _ = write!(query, "&job={job}");
        }
        if arguments.refused {
            query.push_str("&outcome=refused");
        }
        let mut lines: Vec<AuditLine> = Vec::new();
        let mut after = arguments.after;
        loop {
            let page: AuditPage = client.get(&format!("/api/v1/audit?after={after}{query}")).await?;
            lines.extend(page.lines);
            if page.next <= after {
                break;
            }
            after = page.next;
        }
        arguments.server_args.print_answer(&lines, |lines| lines.iter().map(format_audit_line).collect())?;
        Ok(ExitCode::SUCCESS)
    })
}

fn format_audit_line(line: &AuditLine) -> TerminalLine {
    let outcome = match line.outcome {
        AuditOutcome::Done => "done",
        AuditOutcome::Refused => "REFUSED",
    };
    let job = line.job.as_ref().map_or_else(String::new, |job| format!(" in job {job}"));
    let reason = line.reason.as_ref().map_or_else(String::new, |reason| format!(" ({reason})"));
    let detail = if line.detail.is_empty() { String::new() } else { format!(": {}", line.detail) };
    let role = line.role.map_or_else(String::new, |role| format!(", {role}"));
    let times = if line.times > 1 { format!(" {} times", line.times) } else { String::new() };
    let who = format!("{}{role}", line.actor);
    let what = format!("{} {}{job}, {who}{reason}  {outcome}{times}{detail}", line.act, line.subject);
    TerminalLine::from(format!("{:>6}  {}  {what}", line.number, format_time(line.at)))
}
