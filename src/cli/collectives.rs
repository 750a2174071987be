//! Implements `muster collectives`: shows how far the cliques of a job have come and for whom they wait, or what the processes
//! of this host have recorded.
//!
//! `collectives/records.rs` reads the records of this host, and `collectives/ras.rs` asks NCCL itself; `collectives/clique_rows.rs` is
//! the table of cliques. Begin at `run`.

mod clique_rows;
mod ras;
mod records;

use std::fmt::Write as _;
use std::process::ExitCode;

use anyhow::{Context as _, Result};
use clap::Args;

use clique_rows::{CLIQUE_HEADING, clique_row};

use super::nccl_plugin::find_nccl_plugin;
use super::output::TerminalText;
use super::server_args::{JobArg, ServerArgs, block_on_requests, format_time_millis};
use crate::service::collectives::{CliqueFunctionView, CliqueView, CollectiveView, CollectivesView};
use crate::text::{format_approximate_seconds, format_bytes, format_count_with_noun};

/// Show the collectives of a job: how far each clique has come, and which tasks hold it up
///
/// Processes report that have loaded NCCL's profiler plug-in of Muster: by `muster launch --collectives`, or by
/// NCCL_PROFILER_PLUGIN=$(muster collectives --plugin).
/// With --pid or --here, reads what processes of this host have recorded, also those that hang or were killed; no server is
/// asked. With --ras, asks RAS, NCCL's own monitoring, of which nothing must be loaded: from NCCL 2.28.7 on, any process of the job
/// answers for all. Ends with status 1 if a clique has waited longer than the server's collective-stuck-after, if there is no record,
/// or if RAS says that a rank is gone, or that a clique does not advance while its ranks differ; and with 3 if RAS gives no answer.
#[derive(Debug, Args)]
#[command(after_long_help = EXAMPLES)]
pub struct Arguments {
    /// Show the ranks of this clique: the first digits of its hash are enough
    #[arg(long, value_name = "HASH", conflicts_with_all = ["pid", "here", "ras"])]
    clique: Option<String>,

    /// Read the record of this process of this host
    #[arg(long, value_name = "PID")]
    pid: Option<u32>,

    /// Read the records of all processes of this host
    #[arg(long, conflicts_with = "pid")]
    here: bool,

    /// Ask RAS, NCCL's own monitoring, at this address: by default NCCL_RAS_ADDR, or localhost:28028
    #[arg(long, value_name = "ADDRESS", num_args = 0..=1, default_missing_value = "", conflicts_with_all = ["pid", "here"])]
    ras: Option<String>,

    /// Print the path of the plug-in that programs load by NCCL_PROFILER_PLUGIN
    #[arg(long, conflicts_with_all = ["clique", "pid", "here", "ras"])]
    plugin: bool,

    #[command(flatten)]
    job_arg: JobArg,

    #[command(flatten)]
    server_args: ServerArgs,
}

const EXAMPLES: &str = "\
Examples:
  muster collectives
  muster collectives --clique 5f3a
  muster collectives --pid 4711
  export NCCL_PROFILER_PLUGIN=$(muster collectives --plugin)
  muster collectives --here --json
  muster collectives --ras";

/// Runs the subcommand.
pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    if arguments.plugin {
        return print_plugin_path(&arguments.server_args);
    }
    if arguments.here || arguments.pid.is_some() {
        return records::run(arguments.pid, &arguments.server_args);
    }
    if let Some(address) = &arguments.ras {
        return ras::run(address, &arguments.server_args);
    }
    block_on_requests(async {
        let client = arguments.server_args.connect().await?;
        let path = format!("{}/collectives", arguments.job_arg.resolve_job_path(&client).await?);
        let all: CollectivesView = client.fetch_all_pages(&path, "").await?;
        let is_stuck =
            |clique: &CliqueView| clique.wait.as_ref().is_some_and(|wait| wait.waited_s >= all.stuck_after_s);
        let status = |stuck| if stuck { ExitCode::FAILURE } else { ExitCode::SUCCESS };
        let Some(wanted) = &arguments.clique else {
            arguments
                .server_args
                .print_answer(&all, |all| TerminalText::from_escaped_text(&collectives_text(all)))?;
            return Ok(status(all.cliques.iter().any(is_stuck)));
        };
        let mut found = all.cliques.iter().filter(|clique| clique.clique.starts_with(wanted.as_str()));
        let Some(one) = found.next() else {
            anyhow::bail!("no clique begins with {wanted:?}; see them with: muster collectives");
        };
        if found.next().is_some() {
            anyhow::bail!("several cliques begin with {wanted:?}: give more digits");
        }
        let clique: CliqueView = client.get(&format!("{path}/{}", one.clique)).await?;
        arguments
            .server_args
            .print_answer(&clique, |clique| TerminalText::from_escaped_text(&clique_text(clique)))?;
        Ok(status(is_stuck(&clique)))
    })
}

/// Prints the path of the plug-in, on a line that a shell can use.
fn print_plugin_path(answers: &ServerArgs) -> Result<ExitCode> {
    let file = find_nccl_plugin()?;
    let text = file.to_str().with_context(|| format!("the path {} is no UTF-8", file.display()))?;
    answers
        .print_answer(&serde_json::json!({ "plugin": text }), |_| TerminalText::from_escaped_text(text))?;
    Ok(ExitCode::SUCCESS)
}

/// Returns all cliques as lines.
fn collectives_text(all: &CollectivesView) -> String {
    if all.processes == 0 && all.cliques.is_empty() {
        return "No process reports collectives: start the program by `muster launch --collectives`, or with \
                NCCL_PROFILER_PLUGIN=$(muster collectives --plugin) (guide: Collectives)."
            .to_owned();
    }
    let mut text = format!(
        "{}, {}; {}\n",
        format_count_with_noun(all.processes, "process reports", "processes report"),
        format_count_with_noun(all.clique_count, "clique", "cliques"),
        match all.waiting_count {
            0 => "none waits".to_owned(),
            count => format_count_with_noun(count, "waits", "wait"),
        }
    );
    text += CLIQUE_HEADING;
    for clique in &all.cliques {
        let (ranks, called) = ((clique.reported, clique.ranks), (clique.back, clique.front));
        text += &clique_row(&clique.clique, ranks, called, state_text(clique));
    }
    text.pop();
    text
}

/// Returns the state of a clique in words.
fn state_text(clique: &CliqueView) -> String {
    match (&clique.wait, &clique.slow) {
        (Some(wait), _) => {
            format!("waits for {}: {}", format_approximate_seconds(wait.waited_s), wait.summary)
        }
        (None, Some(slow)) => {
            let who =
                slow.task.map_or_else(|| format!("rank {}", slow.rank), |task| format!("task {}", task.0));
            let late = format_approximate_seconds(slow.lateness_s);
            format!("advances; the others wait about {late} for {who} in a collective")
        }
        (None, None) => "advances".to_owned(),
    }
}

/// Returns a clique with its ranks as lines.
fn clique_text(clique: &CliqueView) -> String {
    let name = if clique.name.is_empty() { String::new() } else { format!(" ({})", clique.name) };
    let mut text = format!("clique {}{name}: {}\n", clique.clique, state_text(clique));
    for CliqueFunctionView { function, operations, bytes, bus_bytes_per_s, .. } in &clique.functions {
        let bus = bus_bytes_per_s.map_or_else(String::new, |rate| {
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "a figure for people"
            )]
            let rate = rate.max(0.0) as u64;
            format!(", bus bandwidth {}/s", format_bytes(rate))
        });
        let _ = writeln!(text, "  {function}: {operations} of {} together{bus}", format_bytes(*bytes));
    }
    text += "RANK   TASK   DEVICE  CALLED      BEHIND  CHANGED                   PROCESS            LATEST\n";
    for member in &clique.members {
        let task = member.task.map_or_else(|| "?".to_owned(), |task| task.0.to_string());
        let device = member.device.map_or_else(|| "?".to_owned(), |device| device.to_string());
        let latest = member.latest.as_ref().map_or_else(|| "-".to_owned(), CollectiveView::text);
        let mark = match (member.waited_for, member.silent) {
            (true, true) => "  << waited for, silent",
            (true, false) => "  << waited for",
            (false, true) => "  silent",
            (false, false) => "",
        };
        let _ = writeln!(
            text,
            "{:<6} {task:<6} {device:<7} {:<11} {:<7} {:<25} {:<18} {latest}{mark}",
            member.rank,
            member.collectives,
            member.behind,
            format_time_millis(member.changed_at),
            format!("{}:{}", member.host, member.pid),
        );
    }
    text.pop();
    text
}
