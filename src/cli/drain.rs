//! Implements `muster drain`: requests that all tasks agree on a step and save there.
//!
//! With `--wait`, the command waits until the tasks have agreed on a step. The command does not learn whether they
//! have saved. Begin at `run`.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Result, bail};
use clap::Args;
use http::Method;

use super::client::Client;
use super::output::TerminalText;
use super::server_args::{JobArg, ServerArgs, block_on_requests, send_json};
use crate::coordination::{CommandReason, EventKind, RunNumber, RunState, is_preemption_barrier};
use crate::http::api::{DrainView, EventsPage, NewDrain};
use crate::text::parse_duration;

/// Ask all tasks of a run to agree on a step and save
///
/// Gives the notice that JAX programs wait for: those that call `multihost_utils.reached_preemption_sync_point(step)` in
/// their loop agree on a step and save there. A run can be drained once.
#[derive(Debug, Args)]
#[command(after_long_help = EXAMPLES)]
pub struct Arguments {
    /// Why; the audit keeps it
    #[arg(long, value_name = "TEXT")]
    reason: String,

    /// The time until the machines are gone, as the notice says. JAX saves a quarter of an hour before that
    /// time
    #[arg(long = "in", value_name = "DURATION", default_value = "0s", value_parser = parse_duration)]
    within: Duration,

    /// Wait until the tasks have agreed on a step, at most this long. Ends with status 1 if they have not, or
    /// if the run has ended before they had
    #[arg(long, value_name = "DURATION", num_args = 0..=1, require_equals = true, default_missing_value = "5m",
        value_parser = parse_duration)]
    wait: Option<Duration>,

    #[command(flatten)]
    job_arg: JobArg,

    #[command(flatten)]
    server_args: ServerArgs,
}

const EXAMPLES: &str = "\
Examples:
  muster drain --reason 'kernel update tonight'
  muster drain --reason 'host goes at five' --in 40m
  muster drain --reason 'maintenance' --wait=10m && muster status";

/// The interval between two checks of the acknowledgements.
const PAUSE: Duration = Duration::from_millis(500);

/// Runs the subcommand.
pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    block_on_requests(async {
        let client = arguments.server_args.connect().await?;
        let job = arguments.job_arg.resolve_job_path(&client).await?;
        let path = format!("{job}/drain");
        let reason = CommandReason::try_from(arguments.reason.clone())?;
        let body = NewDrain { reason, in_seconds: arguments.within.as_secs() };
        let mut view: DrainView = send_json(&client, Method::POST, &path, &body).await?;
        if let Some(most) = arguments.wait {
            let run = view.run;
            let agreed = async {
                loop {
                    let over = view.run != run || !is_run_in_progress(&view);
                    if over || has_agreement_failed(&view) || agreed_step(&view).is_some() {
                        return anyhow::Ok(());
                    }
                    tokio::time::sleep(PAUSE).await;
                    let seen: DrainView = client.get(&path).await?;
                    // The last known state of the drained run is kept when another run has begun.
                    if seen.run == run { view = seen } else { view.state = RunState::Completed }
                }
            };
            let waited = tokio::time::timeout(most, agreed).await;
            if let Ok(done) = &waited
                && done.is_ok()
                && agreed_step(&view).is_none()
            {
                if view.run == run && is_run_in_progress(&view) {
                    arguments.server_args.print_answer(&view, drain_text)?;
                    bail!(
                        "the tasks of run {run} did not agree on a step, since the barrier at which they agree failed; see why \
                         with: muster events"
                    );
                }
                return report_ended_run(arguments, &client, &job, &view).await;
            }
            let Ok(done) = waited else {
                arguments.server_args.print_answer(&view, drain_text)?;
                bail!("the tasks have not agreed on a step in time; look on with: muster status --watch");
            };
            done?;
        }
        arguments.server_args.print_answer(&view, drain_text)?;
        Ok(ExitCode::SUCCESS)
    })
}

/// Reports that the run ended before its tasks were seen to agree on a step: they may have agreed just
/// before.
async fn report_ended_run(
    arguments: &Arguments,
    client: &Client,
    job: &str,
    view: &DrainView,
) -> Result<ExitCode> {
    let run = view.run;
    let path = format!("{job}/events?kind=barrier-passed&newest=true&limit=1000");
    let passed: EventsPage = client.get(&path).await?;
    let agreed = passed.events.iter().any(|event| {
        event.run == run
            && matches!(&event.what, EventKind::BarrierPassed { barrier, .. } if is_preemption_barrier(barrier))
    });
    arguments.server_args.print_answer(view, |_| ended_run_text(run, agreed))?;
    if agreed {
        return Ok(ExitCode::SUCCESS);
    }
    bail!("run {run} ended before its tasks agreed on a step: they may not have saved");
}

fn ended_run_text(run: RunNumber, agreed: bool) -> TerminalText {
    TerminalText::from_line(match agreed {
        true => format!("Run {run} was drained: its tasks agreed on a step, and it has ended."),
        false => format!("Run {run} was asked to save, and has ended."),
    })
}

fn is_run_in_progress(view: &DrainView) -> bool {
    matches!(view.state, RunState::Forming | RunState::Running)
}

fn has_agreement_failed(view: &DrainView) -> bool {
    view.preemption.as_ref().is_some_and(|preemption| preemption.failed)
}

fn agreed_step(view: &DrainView) -> Option<i64> {
    view.preemption.as_ref()?.agreed_step
}

fn drain_text(view: &DrainView) -> TerminalText {
    let acknowledged = view.preemption.as_ref().map_or(0, |preemption| preemption.acknowledged.len());
    TerminalText::from_line(match agreed_step(view) {
        Some(step) => format!("Run {} is drained: all tasks save at step {step}.", view.run),
        None => format!(
            "Run {} is asked to save: {acknowledged} task(s) have acknowledged, {} have not. Look on with: muster status",
            view.run,
            view.waiting_for.len()
        ),
    })
}
