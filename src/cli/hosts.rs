//! Implements `muster hosts`: lists the hosts of a job with the state and the tasks of each.
//!
//! Begin at `run`.

use std::fmt::Write as _;
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;

use super::output::TerminalText;
use super::server_args::{JobArg, ServerArgs, block_on_requests, format_time};
use crate::coordination::{HostState, HostView};
use crate::http::api::HostsPage;
use crate::text::{format_micros, format_ranges};

/// Show the hosts of a job: the state, the tasks and the lateness of each
///
/// A host is known by the identity that its processes publish (`muster launch`, `muster worker`, muster.jax), or by the
/// boot id of its kernel, or by the address from which its tasks registered.
#[derive(Debug, Args)]
#[command(after_long_help = EXAMPLES)]
pub struct Arguments {
    /// Only hosts in this state
    #[arg(long, value_parser = parse_host_state, value_name = "down|degraded|excluded|healthy")]
    state: Option<HostState>,

    #[command(flatten)]
    job_arg: JobArg,

    #[command(flatten)]
    server_args: ServerArgs,
}

const EXAMPLES: &str = "\
Examples:
  muster hosts
  muster hosts --state down
  muster exclude node-7 --reason 'ECC errors, ticket 4711' --dry-run";

/// The maximum number of ranges of tasks of a host.
const RANGES_SHOWN: usize = 4;

fn parse_host_state(text: &str) -> Result<HostState, String> {
    let known = || HostState::ALL.map(HostState::name).join(", ");
    HostState::ALL
        .into_iter()
        .find(|state| state.name() == text)
        .ok_or_else(|| format!("write one of {}", known()))
}

/// Runs the subcommand.
pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    block_on_requests(async {
        let client = arguments.server_args.connect().await?;
        let state = arguments.state.map_or_else(String::new, |state| format!("&state={}", state.name()));
        let path = format!("{}/hosts", arguments.job_arg.resolve_job_path(&client).await?);
        let all: HostsPage = client.fetch_all_pages(&path, &state).await?;
        arguments.server_args.print_answer(&all, |all| {
            TerminalText::from_escaped_text(&hosts_table_text(&all.hosts, arguments.state))
        })?;
        Ok(ExitCode::SUCCESS)
    })
}

/// Returns the hosts as lines: those of one state, or all.
fn hosts_table_text(hosts: &[HostView], state: Option<HostState>) -> String {
    match state {
        None if hosts.is_empty() => {
            return "No host: no task of the present run has registered from an address that is known."
                .to_owned();
        }
        Some(state) if hosts.is_empty() => return format!("No host is {}.", state.name()),
        _ => {}
    }
    let width = hosts.iter().map(|host| host.host.as_str().len()).max().unwrap_or_default().max(4);
    // The hosts in trouble first: a healthy one is rarely looked for.
    let mut hosts: Vec<&HostView> = hosts.iter().collect();
    hosts.sort_by_key(|host| host.urgency());
    let mut text = format!("{:<width$} STATE     LIVE     TASKS         LATER BY   LAST HEARTBEAT\n", "HOST");
    for host in hosts {
        let live = format!("{}/{}", host.counts.connected, host.tasks.len());
        let tasks = format_ranges(host.tasks.iter().map(|task| task.0), RANGES_SHOWN, "-", "…");
        let late =
            host.lateness.as_ref().map_or_else(|| "-".to_owned(), |it| format_micros(it.above_median_us));
        let heard = host.last_heartbeat.map_or_else(|| "never".to_owned(), format_time);
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "{:<width$} {:<9} {live:<8} {tasks:<13} {late:<10} {heard}",
            host.host.as_str(),
            host.state.name()
        );
    }
    text.pop();
    text
}
