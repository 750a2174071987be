//! `muster drain`: asks all tasks to agree on a step and save.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Result, bail};
use clap::Args;
use http::Method;

use super::place::{Meant, Place, converse, send};
use crate::config::parse_duration;
use crate::coordination::Reason;
use crate::http::{DrainView, NewDrain};

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

    /// When the machines will be gone, as the notice says. JAX waits with the save until a quarter of an hour before
    #[arg(long = "in", value_name = "DURATION", default_value = "0s", value_parser = parse_duration)]
    within: Duration,

    /// Wait until the tasks have agreed on a step, at most so long
    #[arg(long, value_name = "DURATION", num_args = 0..=1, require_equals = true, default_missing_value = "5m",
        value_parser = parse_duration)]
    wait: Option<Duration>,

    #[command(flatten)]
    meant: Meant,

    #[command(flatten)]
    place: Place,
}

const EXAMPLES: &str = "\
Examples:
  muster drain --reason 'kernel update tonight'
  muster drain --reason 'host goes at five' --in 40m
  muster drain --reason 'maintenance' --wait=10m && muster status";

/// Between two looks at who has acknowledged.
const PAUSE: Duration = Duration::from_millis(500);

/// Runs the subcommand.
pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    converse(async {
        let client = arguments.place.find().await?;
        let path = format!("{}/drain", arguments.meant.path(&client).await?);
        let reason = Reason::try_from(arguments.reason.clone())?;
        let body = NewDrain { reason, in_seconds: arguments.within.as_secs() };
        let mut view: DrainView = send(&client, Method::POST, &path, &body).await?;
        if let Some(most) = arguments.wait {
            let run = view.run;
            let agreed = async {
                while agreed_step(&view).is_none() && view.run == run {
                    tokio::time::sleep(PAUSE).await;
                    view = client.get(&path).await?;
                }
                anyhow::Ok(())
            };
            match tokio::time::timeout(most, agreed).await {
                Ok(done) => done?,
                Err(_) => {
                    arguments.place.show(&view, said)?;
                    bail!("the tasks have not agreed on a step in time; look on with: muster status --watch");
                }
            }
        }
        arguments.place.show(&view, said)?;
        Ok(ExitCode::SUCCESS)
    })
}

fn agreed_step(view: &DrainView) -> Option<i64> {
    view.preemption.as_ref()?.agreed_step
}

fn said(view: &DrainView) -> String {
    let acknowledged = view.preemption.as_ref().map_or(0, |preemption| preemption.acknowledged.len());
    match agreed_step(view) {
        Some(step) => format!("Run {} is drained: all tasks save at step {step}.\n", view.run),
        None => format!(
            "Run {} is asked to save: {acknowledged} task(s) have acknowledged, {} have not. Look on with: muster status\n",
            view.run,
            view.waiting_for.len()
        ),
    }
}
