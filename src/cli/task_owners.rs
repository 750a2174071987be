//! Implements `muster task-owners`: lists the process to which each task id belongs. With `--forget` or
//! `--forget-all`, the service forgets the owner of one task id, or of all.
//!
//! Begin at `run`.

use std::fmt::Write as _;
use std::process::ExitCode;

use anyhow::{Result, bail};
use clap::Args;
use http::Method;

use super::output::TerminalText;
use super::server_args::{JobArg, ServerArgs, block_on_requests};
use crate::http::api::TaskOwnersPage;
use crate::text::encode_query_value;

/// Show to which process each task id belongs, or forget it
///
/// Processes that leave their task id to the service (`--task auto`, MUSTER_PROCESS_ID=auto, `muster launch
/// --claim-ids`) get the one that their host had before. A new host gets an id when as many processes are present as the
/// job has tasks.
#[derive(Debug, Args)]
#[command(after_long_help = EXAMPLES)]
pub struct Arguments {
    /// Forget the owner of this task id: the next new process may take it
    #[arg(long, value_name = "TASK", requires = "reason", conflicts_with = "forget_all")]
    forget: Option<u32>,

    /// Forget all owners: processes are numbered anew, in the order of their identities
    #[arg(long, requires = "reason")]
    forget_all: bool,

    /// Why; the audit keeps it
    #[arg(long, value_name = "TEXT")]
    reason: Option<String>,

    #[command(flatten)]
    job_arg: JobArg,

    #[command(flatten)]
    server_args: ServerArgs,
}

const EXAMPLES: &str = "\
Examples:
  muster task-owners
  muster task-owners --forget 3 --reason 'node-7 is gone for good'";

/// Runs the subcommand.
pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    block_on_requests(async {
        let client = arguments.server_args.connect().await?;
        let path = format!("{}/task-owners", arguments.job_arg.resolve_job_path(&client).await?);
        if arguments.forget.is_some() || arguments.forget_all {
            let Some(reason) = &arguments.reason else { bail!("give --reason") };
            let of = arguments.forget.map_or_else(String::new, |task| format!("/{task}"));
            let path = format!("{path}{of}?reason={}", encode_query_value(reason));
            let () = client.send_request(Method::DELETE, &path, None).await?;
            let what = arguments
                .forget
                .map_or_else(|| "All owners are".to_owned(), |task| format!("The owner of task {task} is"));
            arguments
                .server_args
                .print_answer(&(), |()| TerminalText::from_line(format!("{what} forgotten.")))?;
            return Ok(ExitCode::SUCCESS);
        }
        let all: TaskOwnersPage = client.fetch_all_pages(&path, "").await?;
        arguments
            .server_args
            .print_answer(&all, |all| TerminalText::from_escaped_text(&task_owners_table_text(all)))?;
        Ok(ExitCode::SUCCESS)
    })
}

/// Returns the task owners as lines.
fn task_owners_table_text(all: &TaskOwnersPage) -> String {
    let mut text = String::new();
    if all.owners.is_empty() {
        text.push_str("No task id has an owner: no process has left its task id to the service.\n");
    } else {
        text.push_str("TASK  HELD  RUN   ADDRESS          HOST\n");
    }
    for owner in &all.owners {
        let address = owner.address.map_or_else(|| "-".to_owned(), |address| address.to_string());
        let held = if owner.held { "yes" } else { "no" };
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "{:<5} {held:<5} {:<5} {address:<16} {}",
            owner.task.to_string(),
            owner.run.to_string(),
            owner.identity
        );
    }
    for claim in &all.waiting {
        let _ = writeln!(text, "{} waits for a task id since {}", claim.identity, claim.since);
    }
    text.pop();
    text
}
