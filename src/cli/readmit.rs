//! Implements `muster readmit`: lifts exclusions.
//!
//! Begin at `run`.

use std::process::ExitCode;

use anyhow::{Result, anyhow};
use clap::Args;
use http::Method;

use super::output::TerminalText;
use super::server_args::{JobArg, ServerArgs, block_on_requests};
use crate::coordination::{ExclusionTarget, ExclusionView, TaskId};
use crate::http::api::ExclusionsPage;
use crate::text::encode_query_value;

/// Lift an exclusion: the task or host may register again
///
/// The excluded process has ended: start it again, and it takes part. Until then no task waits for it.
#[derive(Debug, Args)]
#[command(after_long_help = EXAMPLES)]
pub struct Arguments {
    /// The exclusion's number, as `muster exclude` shows it
    #[arg(required_unless_present_any = ["task", "host"])]
    exclusion: Option<u64>,

    /// Rather than by number: the exclusion of this task
    #[arg(long, value_name = "N", conflicts_with = "exclusion")]
    task: Option<i32>,

    /// Rather than by number: the exclusion of this host
    #[arg(long, value_name = "NAME|IP", conflicts_with_all = ["exclusion", "task"])]
    host: Option<String>,

    /// Why; the audit keeps it
    #[arg(long, value_name = "TEXT")]
    reason: String,

    #[command(flatten)]
    job_arg: JobArg,

    #[command(flatten)]
    server_args: ServerArgs,
}

const EXAMPLES: &str = "\
Examples:
  muster readmit 1 --reason 'NIC replaced'
  muster readmit --task 2 --reason 'it was the switch'";

/// Runs the subcommand.
pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    block_on_requests(async {
        let client = arguments.server_args.connect().await?;
        let path = format!("{}/exclusions", arguments.job_arg.resolve_job_path(&client).await?);
        let is_wanted = |target: &ExclusionTarget| match (arguments.task, &arguments.host) {
            (Some(task), _) => *target == ExclusionTarget::Task(TaskId(task)),
            (None, Some(host)) => {
                let by_address = host.parse().is_ok_and(|address| *target == ExclusionTarget::host(address));
                by_address || target.host_text() == *host
            }
            (None, None) => false,
        };
        let number = match arguments.exclusion {
            Some(number) => number,
            None => {
                let page: ExclusionsPage = client.get(&path).await?;
                let found = page.exclusions.iter().find(|exclusion| is_wanted(&exclusion.target));
                let missing = || anyhow!("no such exclusion is in force; see all with: muster exclude");
                found.ok_or_else(missing)?.id.0
            }
        };
        let path = format!("{path}/{number}?reason={}", encode_query_value(&arguments.reason));
        let over: ExclusionView = client.send_request(Method::DELETE, &path, None).await?;
        arguments.server_args.print_answer(&over, |over| {
            TerminalText::from_line(format!(
                "Exclusion {} is lifted: {} may register again. Start its process anew.",
                over.id, over.target
            ))
        })?;
        Ok(ExitCode::SUCCESS)
    })
}
