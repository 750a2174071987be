//! Implements `muster events`: prints the retained events of a job. With `--follow`, the command goes on with new
//! events.
//!
//! `client/sse.rs` reads the stream of events. Begin at `run`, then `EventPrinter::print_new_events`.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::Args;

use super::client::{Client, SseEvent};
use super::output::{
    TerminalCapabilities, TerminalLine, TerminalText, TextColour, is_stdout_closed, pad_to_width, print,
    print_error, print_json_line,
};
use super::server_args::{JobArg, ServerArgs, block_on_requests, format_time_millis};
use crate::coordination::{JobView, Timestamp, barrier_label};
use crate::http::api::{EventLine, EventsPage};
use crate::text::{UntrustedText, encode_query_value, format_ranges, parse_duration};

/// Show the events of a job, each change with its reason
///
/// Each line has the event's number, its time (UTC, to the millisecond), its run, its kind, its tasks and
/// barrier, and its reason.
#[derive(Debug, Args)]
#[command(after_long_help = EXAMPLES)]
pub struct Arguments {
    /// Follow new events until interrupted
    #[arg(long, short)]
    follow: bool,

    /// Only events after the one with this number
    #[arg(long, value_name = "NUMBER", default_value_t = 0)]
    after: u64,

    /// Only events of the last DURATION, by the server's clock
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    since: Option<Duration>,

    /// Only events about this task, alone or among others
    #[arg(long, value_name = "N")]
    task: Option<i32>,

    /// Only events of these kinds, such as task-failed,barrier-failed
    #[arg(long, value_name = "KIND,...")]
    kind: Option<String>,

    /// Only events about the barrier with this id, such as train/step
    #[arg(long, value_name = "ID")]
    barrier: Option<String>,

    /// Only events of this run
    #[arg(long, value_name = "NUMBER")]
    run: Option<u64>,

    #[command(flatten)]
    job_arg: JobArg,

    #[command(flatten)]
    server_args: ServerArgs,
}

const EXAMPLES: &str = "\
Examples:
  muster events
  muster events --follow
  muster events --task 3 --since 10m
  muster events --barrier train/step --run 2
  muster events --kind task-failed,barrier-failed
  muster events --json | jq 'select(.kind == \"task-failed\")'     # one event a line";

/// The most ranges of tasks in a line.
const RANGES_SHOWN: usize = 4;
/// The pause before a broken stream is opened again: at first, and at most.
const PAUSE: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(10));

/// The filter and the format of events.
struct EventPrinter<'a> {
    arguments: &'a Arguments,
    path: String,
    /// The filters that the server applies, as a query.
    query: String,
    /// The time before which events are not shown.
    from: Timestamp,
}

/// Runs the subcommand.
pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    block_on_requests(async {
        let client = arguments.server_args.connect().await?;
        let job = arguments.job_arg.resolve_job_path(&client).await?;
        let wanted = EventPrinter::new(arguments, &client, &job).await?;
        if arguments.follow {
            wanted.print_new_events(&client).await?
        } else {
            wanted.print_retained_events(&client).await?
        }
        Ok(ExitCode::SUCCESS)
    })
}

impl<'a> EventPrinter<'a> {
    async fn new(arguments: &'a Arguments, client: &Client, job: &str) -> Result<Self> {
        let mut query = String::new();
        if let Some(task) = arguments.task {
            query.push_str(&format!("&task={task}"));
        }
        if let Some(kinds) = &arguments.kind {
            query.push_str(&format!("&kind={}", encode_query_value(kinds)));
        }
        if let Some(barrier) = &arguments.barrier {
            query.push_str(&format!("&barrier={}", encode_query_value(barrier)));
        }
        if let Some(run) = arguments.run {
            query.push_str(&format!("&run={run}"));
        }
        let from = match arguments.since {
            Some(since) => {
                let now = client.get::<JobView>(job).await?.seen_at;
                Timestamp(now.since(Timestamp(0)).saturating_sub(since).as_micros().try_into()?)
            }
            None => Timestamp(0),
        };
        Ok(Self { arguments, path: format!("{job}/events"), query, from })
    }

    /// Prints events until the reader of stdout has gone. A broken stream is resumed after the last event.
    async fn print_new_events(&self, client: &Client) -> Result<()> {
        let mut last = self.arguments.after;
        let (mut pause, most) = PAUSE;
        let path = format!("{}?stream=1{}", self.path, self.query);
        let mut stream = client.open_event_stream(&path, last).await?;
        self.print_heading()?;
        loop {
            let why = loop {
                if is_stdout_closed() {
                    return Ok(());
                }
                match stream.next_event().await {
                    Ok(Some(sent)) => {
                        pause = PAUSE.0;
                        if let Some(number) = self.print_received_event(&sent, last)? {
                            last = number;
                        }
                    }
                    Ok(None) => break "the server has ended the stream".to_owned(),
                    Err(error) => break error.to_string(),
                }
            };
            // On stderr, because a program may read the events.
            print_error(format_args!("{why}; trying again"));
            stream = loop {
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(most);
                match client.open_event_stream(&path, last).await {
                    Ok(stream) => break stream,
                    Err(error) if error.is_transient() => {}
                    Err(error) => return Err(error.into()),
                }
            };
        }
    }

    /// Prints an event. Returns its number, if it is not `last`.
    fn print_received_event(&self, sent: &SseEvent, last: u64) -> Result<Option<u64>> {
        match sent.id {
            Some(number) => {
                let event: EventLine = serde_json::from_str(&sent.data).with_context(|| {
                    let data = UntrustedText::from(&*sent.data);
                    format!("event {number} is in a form that this version does not know: {data}")
                })?;
                self.print_event(&event)?;
                Ok(Some(number))
            }
            // The server no longer has these events, or is another one.
            None if sent.kind == "gap" => {
                if last > 0 {
                    self.print_missing_events_notice()?;
                }
                Ok(None)
            }
            None => Ok(None),
        }
    }

    /// Prints all kept events.
    async fn print_retained_events(&self, client: &Client) -> Result<()> {
        self.print_heading()?;
        let mut after = self.arguments.after;
        loop {
            let page: EventsPage = client.get(&format!("{}?after={after}{}", self.path, self.query)).await?;
            if page.gap && after > 0 {
                self.print_missing_events_notice()?;
            }
            for event in &page.events {
                self.print_event(event)?;
            }
            if page.next == after {
                return Ok(());
            }
            after = page.next;
        }
    }

    fn print_missing_events_notice(&self) -> Result<()> {
        if !self.arguments.server_args.json {
            print(&TerminalText::from_line("… some events are no longer kept"))?;
        }
        Ok(())
    }

    fn print_heading(&self) -> Result<()> {
        let style = TerminalCapabilities::of_stdout();
        // Only on a terminal: a pipe receives nothing but events.
        if !self.arguments.server_args.json && style.width.is_some() {
            let columns = format_columns("NUMBER", "TIME (UTC)", "RUN", "KIND", "TASKS", "BARRIER", "REASON");
            print(&TerminalText::from_line(TerminalLine::default().push_styled(
                style,
                columns,
                TextColour::Bold,
            )))?;
        }
        Ok(())
    }

    fn print_event(&self, event: &EventLine) -> Result<()> {
        if event.at < self.from {
            return Ok(());
        }
        if self.arguments.server_args.json {
            return print_json_line(event);
        }
        Ok(print(&TerminalText::from_line(format_event(event)))?)
    }
}

fn format_columns(
    number: &str,
    time: &str,
    run: &str,
    kind: &str,
    tasks: &str,
    barrier: &str,
    reason: &str,
) -> String {
    let barrier = pad_to_width(barrier, 16);
    format!("{number:>6}  {time:<24}  {run:>4}  {kind:<20}  {tasks:>7}  {barrier}  {reason}")
}

fn format_event(event: &EventLine) -> String {
    let tasks = match &event.what.tasks()[..] {
        [] => "-".to_owned(),
        tasks => format_ranges(tasks.iter().map(|task| task.0), RANGES_SHOWN, "-", "…"),
    };
    let barrier = event.what.subject().barrier.map_or_else(
        || "-".to_owned(),
        |(id, counter)| {
            let id = UntrustedText::from(barrier_label(id));
            if counter > 0 { format!("{id}#{counter}") } else { id.to_string() }
        },
    );
    format_columns(
        &event.number.to_string(),
        &format_time_millis(event.at),
        &event.run.to_string(),
        event.what.kind(),
        &tasks,
        &barrier,
        &event.reason,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_barrier_named_in_wide_characters_does_not_shift_the_reason() {
        let row =
            |barrier: &str| format_columns("1", "t", "1", "barrier-passed", "-", barrier, "all are there");
        let before = |row: String| {
            let (before, _) = row.split_once("all").expect("it has the reason");
            textwrap::core::display_width(before)
        };
        assert_eq!(before(row("訓練/一歩")), before(row("train/step")));
    }
}
