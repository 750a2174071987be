//! Implements `muster transfer plan`: prints the transfers that change the sharding of an array, and their cost. The
//! command moves no data.
//!
//! `transfer::plan` computes the plan. Begin at `run`.

use std::cmp::Reverse;
use std::fmt::Write as _;
use std::fs::File;
use std::io::Read as _;
use std::num::NonZeroU32;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail};
use clap::Args;

use super::super::output::{TerminalText, print, print_json_text};
use crate::text::{escape_to_one_line, format_bytes};
use crate::transfer::plan::{
    ArrayDescription, Cost, MAX_DESCRIPTION_TEXT, MAX_PLAN_TEXT, Placement, Plan, PlanError, PlanOptions,
    Step, TaskBytes, TaskId,
};

/// Show the moves of an array whose sharding changes, and their cost
///
/// A sharding is a NamedSharding of JAX: a mesh with named axes and its devices in row-major order, and a
/// partition spec. Every process with the same descriptions computes the same plan, with the same keys.
/// Nothing is moved.
#[derive(Debug, Args)]
#[command(after_long_help = EXAMPLES)]
pub struct Arguments {
    /// The present array: shape, dtype and sharding
    #[arg(long, value_name = "FILE|JSON", required_unless_present = "from")]
    source: Option<String>,

    /// The array after the change
    #[arg(long, value_name = "FILE|JSON", required_unless_present = "from")]
    destination: Option<String>,

    /// Read a plan that --json printed, `-` for standard input, and check it: the plan is computed again from
    /// its descriptions, and every step must be equal
    #[arg(long, value_name = "FILE", conflicts_with_all =
          ["source", "destination", "placement", "devices_per_task", "tasks_per_host", "fan_out", "timeout"])]
    from: Option<String>,

    /// The task and the host of each device; the device list of the REST API is accepted. Without it devices
    /// are assigned in blocks, by their ids
    #[arg(long, value_name = "FILE|JSON", conflicts_with_all = ["devices_per_task", "tasks_per_host"])]
    placement: Option<String>,

    /// The number of devices of each task
    #[arg(long, value_name = "N", default_value = "8")]
    devices_per_task: NonZeroU32,

    /// The number of tasks on each host
    #[arg(long, value_name = "N", default_value = "1")]
    tasks_per_host: NonZeroU32,

    /// The number of tasks that a holder of a part sends it to before the recipients send it on
    #[arg(long, value_name = "N", default_value_t = PlanOptions::default().fan_out)]
    fan_out: NonZeroU32,

    /// The time limit of the whole change; a field of the plan
    #[arg(long, value_name = "DURATION", value_parser = parse_positive_duration)]
    timeout: Option<Duration>,

    /// Show the steps in which this task takes part
    #[arg(long, value_name = "ID", conflicts_with = "json")]
    task: Option<u32>,

    /// The maximum number of rows of a long table
    #[arg(long, value_name = "N", default_value_t = 20)]
    rows: usize,

    /// Print the plan as JSON: every step with its key, regions and runs
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = r#"Examples:
  From rows on devices 0 to 3 to columns on devices 4 to 7, two devices a task:
    muster transfer plan --devices-per-task 2 \
      --source '{"shape": [1024, 512], "dtype": "bfloat16", "sharding": {
        "mesh": {"axes": [{"name": "x", "size": 4}], "devices": [0, 1, 2, 3]}, "spec": ["x"]}}' \
      --destination '{"shape": [1024, 512], "dtype": "bfloat16", "sharding": {
        "mesh": {"axes": [{"name": "x", "size": 4}], "devices": [4, 5, 6, 7]}, "spec": [null, "x"]}}'

  On the devices of a job that runs, and only what task 3 does:
    curl -s "localhost:8477/api/v1/jobs/train/devices?limit=1000" > devices.json
    muster transfer plan --source now.json --destination then.json --placement devices.json --task 3

  What goes across hosts, by its regions:
    muster transfer plan --source now.json --destination then.json --json \
      | jq -c '.steps[] | select(.class == "across-hosts") | [.key, .bytes, .source.region]'

  Check a plan that somebody handed on, and show what it costs:
    muster transfer plan --from plan.json"#;

/// Parses a duration greater than zero.
fn parse_positive_duration(text: &str) -> Result<Duration, String> {
    match humantime::parse_duration(text) {
        Ok(Duration::ZERO) => Err("nothing can be done in no time: give more, or leave it out".to_owned()),
        Ok(duration) => Ok(duration),
        Err(error) => Err(error.to_string()),
    }
}

/// Runs the subcommand.
pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    let plan = match &arguments.from {
        Some(from) => read_printed_plan(from)?,
        None => build_plan(arguments)?,
    };
    if arguments.json {
        print_json_text(&plan.to_json().map_err(single_line_error)?)?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = match arguments.task {
        Some(task) => write_steps_of_task(&mut text, &plan, TaskId(task), arguments.rows),
        None => write_overview(&mut text, &plan, arguments),
    };
    print(&TerminalText::from_escaped_text(&text))?;
    Ok(ExitCode::SUCCESS)
}

/// Returns the plan of the given descriptions.
fn build_plan(arguments: &Arguments) -> Result<Plan> {
    let given = |flag: &'static str, given: &Option<String>| {
        let given = given.as_deref().with_context(|| format!("{flag} is missing"))?;
        parse_json_argument(flag, given, ArrayDescription::from_json)
    };
    let source = given("--source", &arguments.source)?;
    let destination = given("--destination", &arguments.destination)?;
    let placement = match &arguments.placement {
        Some(placement) => parse_json_argument("--placement", placement, Placement::from_json)?,
        None => placement_by_blocks(
            &source,
            &destination,
            arguments.devices_per_task.get(),
            arguments.tasks_per_host.get(),
        ),
    };
    let options = PlanOptions { fan_out: arguments.fan_out, timeout: arguments.timeout };
    Plan::new(source, destination, &placement, options).map_err(single_line_error)
}

/// Reads a printed plan and checks it.
fn read_printed_plan(from: &str) -> Result<Plan> {
    let text = if from == "-" {
        read_bounded_text(std::io::stdin().lock(), MAX_PLAN_TEXT)
            .context("--from -: cannot read standard input")?
    } else {
        read_text_file("--from", from, MAX_PLAN_TEXT)?
    };
    // The line end of the printed plan is not part of it.
    let plan = Plan::from_json(text.trim_end()).map_err(single_line_error);
    plan.with_context(|| format!("--from {}", escape_to_one_line(from)))
}

/// Reads the text of a file: at most one byte beyond the limit and a line end, whatever the file is.
fn read_bounded_text(file: impl std::io::Read, most: usize) -> std::io::Result<String> {
    let mut text = String::new();
    file.take(most as u64 + 2).read_to_string(&mut text)?;
    Ok(text)
}

fn read_text_file(argument: &str, path: &str, most: usize) -> Result<String> {
    if path.trim().is_empty() {
        bail!("{argument} is empty: give the name of a file with the JSON");
    }
    let read = File::open(path).and_then(|file| read_bounded_text(file, most));
    read.with_context(|| format!("{argument}: cannot read {}", escape_to_one_line(path)))
}

/// Reads the value of an argument: JSON itself, or the name of a file with it.
fn parse_json_argument<T>(
    argument: &str,
    given: &str,
    read: impl Fn(&str) -> Result<T, PlanError>,
) -> Result<T> {
    if given.trim_start().starts_with('{') {
        return read(given).map_err(single_line_error).with_context(|| argument.to_owned());
    }
    let text = read_text_file(argument, given, MAX_DESCRIPTION_TEXT)?;
    read(&text)
        .map_err(single_line_error)
        .with_context(|| format!("{argument}: {}", escape_to_one_line(given)))
}

/// Returns the error on one line, because names from the descriptions may be in it.
#[expect(clippy::needless_pass_by_value, reason = "as map_err hands it over")]
fn single_line_error(error: PlanError) -> anyhow::Error {
    anyhow!("{}", escape_to_one_line(&error.to_string()))
}

fn placement_by_blocks(
    source: &ArrayDescription,
    destination: &ArrayDescription,
    per_task: u32,
    tasks_per_host: u32,
) -> Placement {
    let both = source.sharding.mesh.devices.iter().chain(&destination.sharding.mesh.devices);
    let mut devices: Vec<_> = both.copied().collect();
    devices.sort_unstable();
    devices.dedup();
    Placement::blocks(devices, per_task, tasks_per_host)
}

fn write_overview(text: &mut String, plan: &Plan, arguments: &Arguments) -> std::fmt::Result {
    let (source, cost) = (plan.source(), plan.cost());
    let total = source.bytes().map_or_else(|_| String::new(), |total| format!(" ({})", format_bytes(total)));
    writeln!(text, "{}{:?}{total}", source.dtype, source.shape)?;
    for (what, array) in [("from", source), ("to", plan.destination())] {
        let (mesh, spec) = (&array.sharding.mesh, &array.sharding.spec);
        let shown = format!("{spec} over {} devices, mesh {mesh}", mesh.devices.len());
        writeln!(text, "  {what:4} {}", escape_to_one_line(&shown))?;
    }
    let tasks = plan.tasks().len();
    if arguments.placement.is_some() || arguments.from.is_some() {
        writeln!(text, "  on   {tasks} tasks")?;
    } else {
        let (devices, hosts) = (arguments.devices_per_task, arguments.tasks_per_host);
        writeln!(
            text,
            "  on   {tasks} tasks: no --placement, so {devices} devices a task and {hosts} tasks a host, by id"
        )?;
    }
    let PlanOptions { fan_out, timeout } = plan.options();
    let timeout = timeout.map_or_else(
        || "without a timeout".to_owned(),
        |timeout| format!("timeout {}", humantime::format_duration(timeout)),
    );
    writeln!(text, "  with fan-out {fan_out}, {timeout}")?;
    writeln!(text, "layout {}, plan {}\n", plan.layout_fingerprint(), plan.fingerprint())?;
    write_costs(text, &cost)?;
    if cost.messages.min((tasks as u64).pow(2)) > PAIRS_MAX {
        return writeln!(
            text,
            "\nThere may be too many pairs of tasks to list them; --task N tells what a task gives and takes."
        );
    }
    write_busiest_pairs(text, plan, arguments.rows)
}

/// The maximum number of pairs of tasks that are collected to find those that move most bytes.
const PAIRS_MAX: u64 = 1 << 22;

fn write_costs(text: &mut String, cost: &Cost) -> std::fmt::Result {
    writeln!(text, "{:<14}{:>9}{:>12}{:>14}", "WHERE", "STEPS", "BYTES", "LEAST")?;
    let least = [0, cost.minimum.local_copy, cost.minimum.same_host, cost.minimum.across_hosts];
    for (class, least) in cost.classes.iter().zip(least) {
        let least = if class.class.name() == "same buffer" { "-".to_owned() } else { format_bytes(least) };
        writeln!(text, "{:<14}{:>9}{:>12}{least:>14}", class.class, class.steps, format_bytes(class.bytes))?;
    }
    let beyond = if cost.over_minimum == 0 {
        "no plan could move less".to_owned()
    } else {
        format!("{} more than the least possible", format_bytes(cost.over_minimum))
    };
    writeln!(text, "\n{} are copied or sent; {beyond}.", format_bytes(cost.moved))?;
    writeln!(
        text,
        "Messages between tasks: {}. The longest chain of steps that wait for one another: {}.",
        cost.messages, cost.rounds
    )?;
    let busiest = |text: &mut String, what: &str, task: Option<TaskBytes>| match task {
        Some(TaskBytes { task, bytes: moved }) => {
            writeln!(text, "{what} task {task}, {}.", format_bytes(moved))
        }
        None => Ok(()),
    };
    busiest(text, "Most goes out of", cost.busiest_out)?;
    busiest(text, "Most comes in to", cost.busiest_in)?;
    busiest(text, "Most room to pack short runs is needed by", cost.most_staging)
}

fn write_busiest_pairs(text: &mut String, plan: &Plan, rows: usize) -> std::fmt::Result {
    let mut pairs = plan.pairs();
    if pairs.is_empty() {
        return Ok(());
    }
    // The sort is stable, so equal pairs stay in the order of the tasks.
    pairs.sort_by_key(|pair| Reverse(pair.bytes));
    writeln!(text, "\n{:>6}{:>8}  {:<14}{:>9}{:>12}", "FROM", "TO", "WHERE", "STEPS", "BYTES")?;
    for pair in pairs.iter().take(rows) {
        let place = if pair.same_host { "same host" } else { "across hosts" };
        writeln!(
            text,
            "{:>6}{:>8}  {place:<14}{:>9}{:>12}",
            pair.from,
            pair.to,
            pair.steps,
            format_bytes(pair.bytes)
        )?;
    }
    if pairs.len() > rows {
        writeln!(text, "and {} more pairs of tasks, with less; --rows N shows more", pairs.len() - rows)?;
    }
    Ok(())
}

fn write_steps_of_task(text: &mut String, plan: &Plan, task: TaskId, rows: usize) -> std::fmt::Result {
    let count = plan.steps_of_task(task).count();
    let room = plan.staging_bytes(task);
    writeln!(
        text,
        "Task {task} takes part in {count} of {} steps; it needs {} to pack short runs.",
        plan.len(),
        format_bytes(room)
    )?;
    if count > 0 {
        writeln!(
            text,
            "\n{:>8}  {:<17}{:>8}{:>8}{:>8}{:>8}  {:<14}{:>12}{:>9}{:>9}{:>8}",
            "STEP", "KEY", "FROM", "DEVICE", "TO", "DEVICE", "WHERE", "BYTES", "READS", "WRITES", "AFTER"
        )?;
    }
    for step in plan.steps_of_task(task).take(rows) {
        let Step { index, key, class, bytes: moved, after, source, destination } = step;
        let after = after.map_or_else(|| "-".to_owned(), |step| step.to_string());
        writeln!(
            text,
            "{index:>8}  {:<17}{:>8}{:>8}{:>8}{:>8}  {class:<14}{:>12}{:>9}{:>9}{after:>8}",
            key.to_string(),
            source.task,
            source.device,
            destination.task,
            destination.device,
            format_bytes(moved),
            source.runs.count(),
            destination.runs.count()
        )?;
    }
    if count > rows {
        writeln!(text, "and {} more steps; --rows N shows more", count - rows)?;
    }
    Ok(())
}
