//! `muster events`: what happened in a job, and what happens.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::Args;

use super::client::{Client, Sent};
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

/// How long to wait before a stream that has broken is opened again: so long at first, and at most.
const PAUSE: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(10));

/// Runs the subcommand.
pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    converse(async {
        let client = arguments.place.find().await?;
        let path = format!("{}/events", arguments.meant.path(&client).await?);
        if arguments.follow {
            follow(arguments, &client, &path).await?;
        } else {
            show_all(arguments, &client, &path).await?;
        }
        Ok(ExitCode::SUCCESS)
    })
}

/// Shows what happens, without end. A stream that breaks is opened again where it broke.
async fn follow(arguments: &Arguments, client: &Client, path: &str) -> Result<()> {
    let mut last = arguments.after;
    let (mut pause, most) = PAUSE;
    let mut stream = client.stream(path, last).await?;
    loop {
        let why = loop {
            match stream.next().await {
                Ok(Some(sent)) => {
                    pause = PAUSE.0;
                    if let Some(number) = show(arguments, &sent, last)? {
                        last = number;
                    }
                }
                Ok(None) => break "the server has ended the stream".to_owned(),
                Err(error) => break error.to_string(),
            }
        };
        // Not among the events: those may be read by a program.
        eprintln!("muster: {}; trying again", one_line(&why));
        stream = loop {
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(most);
            match client.stream(path, last).await {
                Ok(stream) => break stream,
                Err(error) if error.may_pass() => {}
                Err(error) => return Err(error.into()),
            }
        };
    }
}

/// Shows what was sent; the number of the last event that was seen, if that is another one now.
fn show(arguments: &Arguments, sent: &Sent, last: u64) -> Result<Option<u64>> {
    match sent.id {
        Some(number) => {
            let event: EventLine = serde_json::from_str(&sent.data).with_context(|| {
                format!(
                    "event {number} is in a form that this version does not know: {}",
                    one_line(&sent.data)
                )
            })?;
            print(&line(&event, arguments.place.json)?)?;
            Ok(Some(number))
        }
        // The server has no more than this, or is another one since.
        None if sent.kind == "gap" => {
            if last > 0 && !arguments.place.json {
                print("… some events are no longer kept\n")?;
            }
            Ok(None)
        }
        None => Ok(None),
    }
}

/// Shows every event that there is.
async fn show_all(arguments: &Arguments, client: &Client, path: &str) -> Result<()> {
    let mut after = arguments.after;
    loop {
        let page: EventsPage = client.get(&format!("{path}?after={after}")).await?;
        if page.gap && after > 0 && !arguments.place.json {
            print("… some events are no longer kept\n")?;
        }
        for event in &page.events {
            print(&line(event, arguments.place.json)?)?;
        }
        if page.next == after {
            return Ok(());
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
