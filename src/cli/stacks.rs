//! Implements `muster stacks`: asks tasks for their stacks, waits for the answers, and shows the groups of equal stacks.
//!
//! Begin at `run`.

use std::fmt::Write as _;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use clap::Args;
use http::Method;

use super::client::Client;
use super::output::TerminalText;
use super::server_args::{JobArg, ServerArgs, block_on_requests, format_time, send_json};
use crate::coordination::CommandReason;
use crate::service::stacks::{
    NewStackRequestBody, StackGroupView, StackSource, StacksView, TaskRange, TaskRanges,
};
use crate::text::{format_count_with_noun, parse_duration};

/// Ask tasks what they are doing: the stacks of their threads, grouped by equal stacks
///
/// Native workers answer, and Python programs that have loaded the helper (/helper.py of the server, or
/// muster.show_stacks()). Stacks have names of functions and files, and no values. Asking requires the role operator; the
/// audit keeps the operator and the reason. With --latest, shows the answers to the latest request, and asks no task. Ends with status 1
/// if one of the tasks has not answered.
#[derive(Debug, Args)]
#[command(after_long_help = EXAMPLES)]
pub struct Arguments {
    /// The tasks to ask [default: all]
    #[arg(long, value_name = "0-7,12")]
    tasks: Option<TaskRanges>,

    /// Why; the audit keeps it
    #[arg(long, value_name = "TEXT", default_value = "a look at what the tasks are doing")]
    reason: String,

    /// The longest time to wait for the answers; the command ends as soon as all have come
    #[arg(long, value_name = "DURATION", default_value = "5s", value_parser = parse_duration)]
    wait: Duration,

    /// Show the answers to the latest request, without a new one
    #[arg(long, conflicts_with_all = ["tasks", "reason", "wait"])]
    latest: bool,

    /// Show every frame of every thread, not only those of the program in main threads
    #[arg(long)]
    full: bool,

    #[command(flatten)]
    job_arg: JobArg,

    #[command(flatten)]
    server_args: ServerArgs,
}

const EXAMPLES: &str = "\
Examples:
  muster stacks
  muster stacks --tasks 5 --full
  muster stacks --wait 30s --reason 'step 4711 hangs' --json
  muster stacks --latest";

/// The interval between two looks at the answers.
const PAUSE: Duration = Duration::from_millis(250);
/// The number of times that the pages are read from the first one on if they change meanwhile.
const ATTEMPTS: u32 = 20;
/// The message if the answers belong to another request.
const REPLACED: &str = "another request has replaced this one, and its answers are dropped; see the new ones with: muster stacks --latest";
/// The number of groups in a page.
const PAGE: usize = 200;
/// The maximum number of ranges of tasks of a group.
const RANGES_SHOWN: usize = 8;

/// Runs the subcommand.
pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    block_on_requests(async {
        let client = arguments.server_args.connect().await?;
        let path = format!("{}/stacks", arguments.job_arg.resolve_job_path(&client).await?);
        let number =
            if arguments.latest { None } else { Some(ask_and_wait(arguments, &client, &path).await?) };
        let fetch_page = |after| {
            let path = format!("{path}?limit={PAGE}&after={after}");
            let client = &client;
            async move { anyhow::Ok(client.get(&path).await?) }
        };
        let view = fetch_all_groups(number, fetch_page).await?;
        let is_answered = view.awaited.is_empty() && view.without_helper.is_empty();
        arguments.server_args.print_answer(&view, |view| {
            TerminalText::from_escaped_text(&stacks_text(view, arguments.full))
        })?;
        Ok(if is_answered && view.request.is_some() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    })
}

/// Asks, and waits until all tasks that can answer have answered. Returns the number of the request.
async fn ask_and_wait(arguments: &Arguments, client: &Client, path: &str) -> Result<u64> {
    let reason = CommandReason::try_from(arguments.reason.clone())?;
    let body = NewStackRequestBody { tasks: arguments.tasks.clone(), reason };
    let mut view: StacksView = send_json(client, Method::POST, path, &body).await?;
    let number = request_number(&view).context("the server has not named the request")?;
    let answered = async {
        while !view.awaited.is_empty() {
            tokio::time::sleep(PAUSE).await;
            view = client.get(&format!("{path}?limit=1")).await?;
            if request_number(&view) != Some(number) {
                bail!(REPLACED);
            }
        }
        Ok(())
    };
    // The answers that have come in time are shown.
    if let Ok(done) = tokio::time::timeout(arguments.wait, answered).await {
        done?;
    }
    Ok(number)
}

/// Returns the number of the request that a view shows.
fn request_number(view: &StacksView) -> Option<u64> {
    view.request.as_ref().map(|request| request.number)
}

/// Fetches all pages of one state of the answers: to the request of this number, or else to the latest request.
///
/// # Errors
/// If a later request has replaced the one of this number, whose answers the server has dropped.
async fn fetch_all_groups<F: Future<Output = Result<StacksView>>>(
    number: Option<u64>,
    fetch_page: impl Fn(u64) -> F,
) -> Result<StacksView> {
    'again: for attempt in 1..=ATTEMPTS {
        let mut view = fetch_page(0).await?;
        if number.is_some() && request_number(&view) != number {
            bail!(REPLACED);
        }
        while let Some(after) = view.next {
            let page = fetch_page(after).await?;
            // Between two pages another request may replace this one, or another answer may move groups from page to page. While
            // many tasks answer, the pages of one request are shown in the end.
            let is_of_request = request_number(&page) == request_number(&view);
            if !is_of_request || (page.answered != view.answered && attempt < ATTEMPTS) {
                continue 'again;
            }
            view.groups.extend(page.groups);
            view.next = page.next;
        }
        return Ok(view);
    }
    bail!("new requests replace each other faster than their answers can be read: try again");
}

/// Returns ranges of tasks as text: `0-6, 9`.
fn ranges_text(ranges: &[TaskRange]) -> String {
    let shown = ranges.iter().take(RANGES_SHOWN).map(|TaskRange { first, last }| {
        if first == last { first.to_string() } else { format!("{first}-{last}") }
    });
    let more = (ranges.len() > RANGES_SHOWN).then(|| "…".to_owned());
    shown.chain(more).collect::<Vec<_>>().join(", ")
}

/// Returns `task 5` or `tasks 0-6`.
fn tasks_text(ranges: &[TaskRange]) -> String {
    let noun = if TaskRange::count(ranges) == 1 { "task" } else { "tasks" };
    format!("{noun} {}", ranges_text(ranges))
}

/// Returns the answers as lines.
fn stacks_text(view: &StacksView, full: bool) -> String {
    let Some(request) = &view.request else { return "No stacks have been requested.".to_owned() };
    let mut text = format!(
        "Request {} of {}, by {}: {}\n{} of {} answered",
        request.number,
        format_time(request.at),
        request.actor,
        request.reason,
        TaskRange::count(&view.answered),
        format_count_with_noun(request.task_count, "task", "tasks"),
    );
    // Writing to a string cannot fail.
    if !view.awaited.is_empty() {
        let _ = write!(text, "; no answer from {}", tasks_text(&view.awaited));
    }
    if !view.without_helper.is_empty() {
        let _ = write!(text, "; no helper in {}", tasks_text(&view.without_helper));
    }
    if view.dropped > 0 {
        let _ = write!(text, "; the stacks of {} were dropped for lack of memory", view.dropped);
    }
    text.push('\n');
    for group in view.groups.iter().filter(|group| full || group.main) {
        text.push('\n');
        text.push_str(&group_text(group, full));
    }
    let others = view.groups.iter().filter(|group| !full && !group.main).count();
    if others > 0 {
        let groups = format_count_with_noun(others, "group", "groups");
        let _ = write!(text, "\n{groups} of other threads: add --full\n");
    }
    text.pop();
    text
}

/// Returns a group as lines: its tasks, and its frames, the innermost last.
fn group_text(group: &StackGroupView, full: bool) -> String {
    let count = format_count_with_noun(group.task_count, "task", "tasks");
    let mut text = format!("{count} ({}): {}", ranges_text(&group.tasks), group.place_text());
    if let Some(since) = group.since {
        let _ = write!(text, ", since {}", format_time(since));
    }
    if !group.of_earlier_process.is_empty() {
        let _ = write!(text, "; of an earlier process: {}", tasks_text(&group.of_earlier_process));
    }
    if !group.main {
        let _ = write!(text, " [{}]", group.thread_names.join(", "));
    }
    text.push('\n');
    let shown = |at: usize| full || group.frames[at].is_of_program() || at + 1 == group.frames.len();
    let mut left_out = group.frames_left_out as usize;
    let told = |text: &mut String, left_out: &mut usize| {
        if *left_out > 0 {
            let _ = writeln!(text, "    … {}", format_count_with_noun(*left_out, "frame", "frames"));
        }
        *left_out = 0;
    };
    for (at, frame) in group.frames.iter().enumerate() {
        if !shown(at) {
            left_out += 1;
            continue;
        }
        told(&mut text, &mut left_out);
        let line = match (group.source, frame.line) {
            (StackSource::Worker, _) => frame.function.clone(),
            (StackSource::Python, 0) => format!("{} ({})", frame.function, frame.file),
            (StackSource::Python, line) => format!("{} ({}:{line})", frame.function, frame.file),
        };
        // One line of a foreign text stays one line.
        let _ = writeln!(text, "    {}", crate::text::escape_to_one_line(&line));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::coordination::{Actor, ActorOrigin, RunNumber, TaskId, Timestamp};
    use crate::service::stacks::{StackFrame, StackRequestView};

    fn range(first: i32, last: i32) -> TaskRange {
        TaskRange { first: TaskId(first), last: TaskId(last) }
    }

    fn group(tasks: TaskRange, frames: &[(&str, &str, u32)]) -> StackGroupView {
        let frame = |(function, file, line): &(&str, &str, u32)| StackFrame {
            function: (*function).into(),
            file: (*file).into(),
            line: *line,
        };
        StackGroupView {
            number: 1,
            main: true,
            source: StackSource::Python,
            frames: frames.iter().map(frame).collect(),
            frames_left_out: 0,
            tasks: vec![tasks],
            task_count: TaskRange::count(&[tasks]),
            of_earlier_process: Vec::new(),
            threads: 1,
            thread_names: vec!["MainThread".into()],
            since: None,
        }
    }

    /// Returns the request `number` for the stacks of nine tasks.
    fn request_view(number: u64, at: Timestamp) -> StackRequestView {
        StackRequestView {
            number,
            at,
            run: RunNumber(1),
            open: true,
            actor: Actor { who: "alice".into(), address: None, means: ActorOrigin::Cli },
            reason: CommandReason::try_from("hangs".to_owned()).unwrap(),
            tasks: vec![range(0, 8)],
            task_count: 9,
        }
    }

    /// Returns a page of the answers to a request, whose groups each have one task: `first`, and those after it.
    fn page(request: u64, answered: i32, tasks: std::ops::Range<i32>) -> StacksView {
        let next = (tasks.end < answered).then(|| u64::try_from(tasks.end).unwrap());
        StacksView {
            request: Some(request_view(request, Timestamp(0))),
            answered: vec![range(0, answered - 1)],
            groups: tasks.map(|task| group(range(task, task), &[("f", "f.py", 1)])).collect(),
            next,
            ..StacksView::default()
        }
    }

    #[tokio::test]
    async fn all_pages_belong_to_one_request_and_to_one_set_of_answers() {
        let fetch = |number, pages: Vec<StacksView>| async move {
            let pages = std::cell::RefCell::new(pages.into_iter());
            let next =
                |_| std::future::ready(Ok(pages.borrow_mut().next().expect("no further page is read")));
            fetch_all_groups(number, next).await
        };
        let tasks = |view: StacksView| -> (Option<u64>, Vec<i32>) {
            (request_number(&view), view.groups.iter().map(|group| group.tasks[0].first.0).collect())
        };
        let both = fetch(Some(3), vec![page(3, 4, 0..2), page(3, 4, 2..4)]).await.unwrap();
        assert_eq!(tasks(both), (Some(3), vec![0, 1, 2, 3]));
        // Another operator asks between two pages.
        let replaced = vec![page(3, 4, 0..2), page(4, 4, 2..4), page(4, 4, 0..2), page(4, 4, 2..4)];
        assert_eq!(fetch(Some(3), replaced.clone()).await.unwrap_err().to_string(), REPLACED);
        assert_eq!(tasks(fetch(None, replaced).await.unwrap()), (Some(4), vec![0, 1, 2, 3]));
        // Another task answers between two pages.
        let grown = vec![page(3, 4, 0..2), page(3, 5, 2..4), page(3, 5, 0..5)];
        assert_eq!(tasks(fetch(Some(3), grown).await.unwrap()), (Some(3), vec![0, 1, 2, 3, 4]));
    }

    #[test]
    fn groups_are_shown_with_the_frames_of_the_program() {
        let waits = [
            ("<module>", "/home/u/train.py", 90),
            ("step", "/home/u/train.py", 41),
            ("sync", "/venv/lib/python3.11/site-packages/jax/a.py", 7),
            ("wait", "/venv/lib/python3.11/site-packages/jax/b.py", 8),
        ];
        let view = StacksView {
            request: Some(request_view(3, Timestamp(1_700_000_000_000_000))),
            answered: vec![range(0, 5), range(7, 7)],
            awaited: vec![range(6, 6)],
            without_helper: vec![range(8, 8)],
            groups: vec![
                group(range(0, 4), &waits),
                StackGroupView {
                    of_earlier_process: vec![range(5, 5)],
                    ..group(range(5, 5), &[("load\n\u{1b}[2J", "/home/u/data.py", 3)])
                },
            ],
            ..StacksView::default()
        };
        let text = stacks_text(&view, false);
        assert!(
            text.contains("7 of 9 tasks answered; no answer from task 6; no helper in task 8\n"),
            "{text}"
        );
        assert!(text.contains("5 tasks (0-4): step (train.py:41), in wait (b.py:8)\n"), "{text}");
        assert!(text.contains("    step (/home/u/train.py:41)\n    … 1 frame\n    wait ("), "{text}");
        assert!(text.contains("(data.py:3); of an earlier process: task 5\n"), "{text}");
        assert!(text.contains("    load | \\u{1b}[2J (/home/u/data.py:3)"), "{text}");
        assert!(!text.ends_with('\n'));
        let full = stacks_text(&view, true);
        assert!(full.contains("    sync (/venv/") && !full.contains("… 1 frame"), "{full}");
    }
}
