//! `muster events`: what happened in a job, and what happens.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::Args;

use super::client::Client;
use super::place::{Meant, Place, converse, moment};
use super::print;
use crate::http::{EventLine, EventsPage};
use crate::telemetry::events::kind;
use crate::text::one_line;

/// Show what happened in a job, each change with its reason
#[derive(Debug, Args)]
#[command(after_long_help = EXAMPLES)]
pub struct Arguments {
    /// Go on with what happens, until interrupted
    #[arg(long, short)]
    follow: bool,

    /// Only what came after the event of this number
    #[arg(long, value_name = "NUMBER", default_value_t = 0)]
    after: u64,

    #[command(flatten)]
    meant: Meant,

    #[command(flatten)]
    place: Place,
}

const EXAMPLES: &str = "\
Examples:
  muster events
  muster events --follow
  muster events --json | jq 'select(.kind == \"task-failed\")'     # one event a line";

/// Between two looks for what is new.
const PAUSE: Duration = Duration::from_millis(500);

/// Runs the subcommand.
pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    converse(async {
        let client = arguments.place.find().await?;
        let path = format!("{}/events", arguments.meant.path(&client).await?);
        let mut after = arguments.after;
        loop {
            after = show_all(arguments, &client, &path, after).await?;
            if !arguments.follow {
                return Ok(ExitCode::SUCCESS);
            }
            tokio::time::sleep(PAUSE).await;
        }
    })
}

/// Shows every event after `after`; returns the number of the last one looked at.
async fn show_all(arguments: &Arguments, client: &Client, path: &str, mut after: u64) -> Result<u64> {
    loop {
        let page: EventsPage = client.get(&format!("{path}?after={after}")).await?;
        if page.gap && after > 0 && !arguments.place.json {
            print("… some events are no longer kept\n")?;
        }
        for event in &page.events {
            print(&line(event, arguments.place.json)?)?;
        }
        if page.next == after {
            return Ok(after);
        }
        after = page.next;
    }
}

fn line(event: &EventLine, json: bool) -> Result<String> {
    if json {
        let text = serde_json::to_string(event).context("cannot write the event as JSON")?;
        return Ok(format!("{text}\n"));
    }
    Ok(format!(
        "{:>6}  {}  run {}  {:<20}  {}\n",
        event.number,
        moment(event.at),
        event.run,
        kind(&event.what),
        one_line(&event.reason)
    ))
}
