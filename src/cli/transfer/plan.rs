//! `muster transfer plan`: what would move where if an array's sharding changed, and what it would cost.

use std::cmp::Reverse;
use std::fmt::Write as _;
use std::fs::File;
use std::io::Read as _;
use std::num::NonZeroU32;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow};
use clap::Args;

use super::super::print;
use crate::text::one_line;
use crate::transfer::plan::{
    ArrayDescription, Cost, MAX_DESCRIPTION_TEXT, Options, Placement, Plan, PlanError, Step, TaskBytes,
    TaskId,
};

/// Show what would move where if an array's sharding changed, and what it would cost
///
/// A sharding is what JAX calls a NamedSharding: a mesh with named axes and its devices in row-major order, and a
/// partition spec. Every process that is given the same descriptions makes the same plan, with the same keys. Nothing
/// is moved.
#[derive(Debug, Args)]
#[command(after_long_help = EXAMPLES)]
pub struct Arguments {
    /// The array as it is: shape, dtype and sharding
    #[arg(long, value_name = "FILE|JSON")]
    source: String,

    /// The array as it shall be
    #[arg(long, value_name = "FILE|JSON")]
    destination: String,

    /// Which task and host owns each device; the device list of the REST API is one. Without it devices are owned in
    /// blocks, by their ids
    #[arg(long, value_name = "FILE|JSON", conflicts_with_all = ["devices_per_task", "tasks_per_host"])]
    placement: Option<String>,

    /// How many devices each task owns
    #[arg(long, value_name = "N", default_value = "8")]
    devices_per_task: NonZeroU32,

    /// How many tasks run on each host
    #[arg(long, value_name = "N", default_value = "1")]
    tasks_per_host: NonZeroU32,

    /// How many others a holder of a part feeds with it before those who were fed feed others
    #[arg(long, value_name = "N", default_value_t = Options::default().fan_out)]
    fan_out: NonZeroU32,

    /// How long the whole may take; a field of the plan
    #[arg(long, value_name = "DURATION", value_parser = humantime::parse_duration)]
    timeout: Option<Duration>,

    /// Show the steps in which this task takes part
    #[arg(long, value_name = "ID", conflicts_with = "json")]
    task: Option<u32>,

    /// How many rows are shown of a long table
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
      | jq -c '.steps[] | select(.class == "across-hosts") | [.key, .bytes, .source.region]'"#;

/// Runs the subcommand.
pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    let source = described("--source", &arguments.source, ArrayDescription::from_json)?;
    let destination = described("--destination", &arguments.destination, ArrayDescription::from_json)?;
    let placement = match &arguments.placement {
        Some(placement) => described("--placement", placement, Placement::from_json)?,
        None => {
            in_blocks(&source, &destination, arguments.devices_per_task.get(), arguments.tasks_per_host.get())
        }
    };
    let options = Options { fan_out: arguments.fan_out, timeout: arguments.timeout };
    let plan = Plan::new(source, destination, &placement, options).map_err(told)?;
    if arguments.json {
        print(&(plan.to_json().map_err(told)? + "\n"))?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = match arguments.task {
        Some(task) => steps_of(&mut text, &plan, TaskId(task), arguments.rows),
        None => overview(&mut text, &plan, arguments),
    };
    print(&text)?;
    Ok(ExitCode::SUCCESS)
}

/// Reads what an argument holds: JSON itself, or the name of a file with it.
fn described<T>(argument: &str, given: &str, read: impl Fn(&str) -> Result<T, PlanError>) -> Result<T> {
    if given.trim_start().starts_with('{') {
        return read(given).map_err(told).with_context(|| argument.to_owned());
    }
    let mut text = String::new();
    // One byte more than is taken: whatever the file is, no more of it is read.
    let file = File::open(given).with_context(|| format!("{argument}: cannot read {}", one_line(given)))?;
    file.take(MAX_DESCRIPTION_TEXT as u64 + 1)
        .read_to_string(&mut text)
        .with_context(|| format!("{argument}: cannot read {}", one_line(given)))?;
    read(&text).map_err(told).with_context(|| format!("{argument}: {}", one_line(given)))
}

/// What is wrong, on one line: names from the descriptions may stand in it.
#[expect(clippy::needless_pass_by_value, reason = "as map_err hands it over")]
fn told(error: PlanError) -> anyhow::Error {
    anyhow!("{}", one_line(&error.to_string()))
}

fn in_blocks(
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

fn overview(text: &mut String, plan: &Plan, arguments: &Arguments) -> std::fmt::Result {
    let (source, cost) = (plan.source(), plan.cost());
    let total = source.bytes().map_or_else(|_| String::new(), |bytes| format!(" ({})", bytes_of(bytes)));
    writeln!(text, "{}{:?}{total}", source.dtype, source.shape)?;
    for (what, array) in [("from", source), ("to", plan.destination())] {
        let (mesh, spec) = (&array.sharding.mesh, &array.sharding.spec);
        let shown = format!("{spec} over {} devices, mesh {mesh}", mesh.devices.len());
        writeln!(text, "  {what:4} {}", one_line(&shown))?;
    }
    let tasks = plan.tasks().len();
    match &arguments.placement {
        Some(_) => writeln!(text, "  on   {tasks} tasks")?,
        None => {
            let (devices, hosts) = (arguments.devices_per_task, arguments.tasks_per_host);
            writeln!(
                text,
                "  on   {tasks} tasks: no --placement, so {devices} devices a task and {hosts} tasks a host, by id"
            )?;
        }
    }
    writeln!(text, "layout {}, plan {}\n", plan.layout(), plan.fingerprint())?;
    costs(text, &cost)?;
    pairs(text, plan, arguments.rows)
}

fn costs(text: &mut String, cost: &Cost) -> std::fmt::Result {
    writeln!(text, "{:<14}{:>9}{:>12}{:>14}", "WHERE", "STEPS", "BYTES", "LEAST")?;
    let least = [0, cost.minimum.local_copy, cost.minimum.same_host, cost.minimum.across_hosts];
    for (class, least) in cost.classes.iter().zip(least) {
        let least = if class.class.name() == "same buffer" { "-".to_owned() } else { bytes_of(least) };
        writeln!(text, "{:<14}{:>9}{:>12}{least:>14}", class.class, class.steps, bytes_of(class.bytes))?;
    }
    let beyond = if cost.over_minimum == 0 {
        "no plan could move less".to_owned()
    } else {
        format!("{} more than the least possible", bytes_of(cost.over_minimum))
    };
    writeln!(text, "\n{} are copied or sent; {beyond}.", bytes_of(cost.moved))?;
    writeln!(
        text,
        "Messages between tasks: {}. The longest chain of steps that wait for one another: {}.",
        cost.messages, cost.rounds
    )?;
    let busiest = |text: &mut String, what: &str, task: Option<TaskBytes>| match task {
        Some(TaskBytes { task, bytes }) => writeln!(text, "{what} task {task}, {}.", bytes_of(bytes)),
        None => Ok(()),
    };
    busiest(text, "Most goes out of", cost.busiest_out)?;
    busiest(text, "Most comes in to", cost.busiest_in)?;
    busiest(text, "Most room to pack short runs is needed by", cost.most_staging)
}

fn pairs(text: &mut String, plan: &Plan, rows: usize) -> std::fmt::Result {
    let mut pairs = plan.pairs();
    if pairs.is_empty() {
        return Ok(());
    }
    // Equal ones stay in the order of the tasks.
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
            bytes_of(pair.bytes)
        )?;
    }
    if pairs.len() > rows {
        writeln!(text, "and {} more pairs of tasks, with less; --rows N shows more", pairs.len() - rows)?;
    }
    Ok(())
}

fn steps_of(text: &mut String, plan: &Plan, task: TaskId, rows: usize) -> std::fmt::Result {
    let count = plan.for_task(task).count();
    let room = plan.staging_bytes(task);
    writeln!(
        text,
        "Task {task} takes part in {count} of {} steps; it needs {} to pack short runs.",
        plan.len(),
        bytes_of(room)
    )?;
    if count > 0 {
        writeln!(
            text,
            "\n{:>8}  {:<17}{:>8}{:>8}{:>8}{:>8}  {:<14}{:>12}{:>9}{:>9}{:>8}",
            "STEP", "KEY", "FROM", "DEVICE", "TO", "DEVICE", "WHERE", "BYTES", "READS", "WRITES", "AFTER"
        )?;
    }
    for step in plan.for_task(task).take(rows) {
        let Step { index, key, class, bytes, after, source, destination } = step;
        let after = after.map_or_else(|| "-".to_owned(), |step| step.to_string());
        writeln!(
            text,
            "{index:>8}  {:<17}{:>8}{:>8}{:>8}{:>8}  {class:<14}{:>12}{:>9}{:>9}{after:>8}",
            key.to_string(),
            source.task,
            source.device,
            destination.task,
            destination.device,
            bytes_of(bytes),
            source.runs.count(),
            destination.runs.count()
        )?;
    }
    if count > rows {
        writeln!(text, "and {} more steps; --rows N shows more", count - rows)?;
    }
    Ok(())
}

/// A number of bytes as people read it.
fn bytes_of(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    let unit = (1..=UNITS.len()).rev().find(|unit| bytes >> (10 * unit) > 0);
    // Rounding is what is wanted here.
    unit.map_or_else(
        || format!("{bytes} B"),
        |unit| format!("{:.1} {}", bytes as f64 / (1_u64 << (10 * unit)) as f64, UNITS[unit - 1]),
    )
}
