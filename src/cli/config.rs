//! Implements `muster config print`: prints every setting with its value and its source, as a configuration file.
//!
//! `config::effective` formats the settings. Begin at `run`.

use std::process::ExitCode;

use anyhow::Result;
use clap::{Args, Subcommand};

use super::output::print_raw;
use super::setting_flags::ServeFlags;
use crate::config::JobSelection;

/// Show the configuration that a server would have
#[derive(Debug, Args)]
pub struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Print(PrintArguments),
}

/// Print every setting with its value and the source of the value
///
/// Takes the flags of `muster serve`. The output is an equivalent configuration file: save it and give it to
/// --config.
#[derive(Debug, Args)]
#[command(after_long_help = EXAMPLES)]
struct PrintArguments {
    #[command(flatten)]
    jobs: JobDeclarationArgs,
    #[command(flatten)]
    options: ServeFlags,
}

const EXAMPLES: &str = "\
Examples:
  muster config print
  muster config print --job train=8 --heartbeat-timeout 20s > muster.toml
  MUSTER_LOG=debug muster config print --config muster.toml";

/// The flags that declare jobs, for `muster serve` and `muster config print`.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Jobs")]
pub struct JobDeclarationArgs {
    /// Declare the job `default` with this many tasks [env: MUSTER_TASKS]
    #[arg(long, value_name = "N")]
    tasks: Option<String>,

    /// Declare a job; repeat for more. With @ADDR it gets a gRPC listener of its own; without, its tasks say which job
    /// they mean by the name that they dial, NAME.HOST:PORT (only the job `default`, or one that is alone, is also found
    /// at a bare address) [env: MUSTER_JOBS=NAME=TASKS,...]
    #[arg(long = "job", value_name = "NAME=TASKS[@ADDR]")]
    jobs: Vec<String>,
}

impl From<&JobDeclarationArgs> for JobSelection {
    fn from(jobs: &JobDeclarationArgs) -> Self {
        Self::Declared { tasks: jobs.tasks.clone(), jobs: jobs.jobs.clone() }
    }
}

/// Runs the subcommand.
pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    let Command::Print(arguments) = &arguments.command;
    let config = arguments.options.load_config(JobSelection::from(&arguments.jobs))?;
    print_raw(&config.to_toml_text())?;
    Ok(ExitCode::SUCCESS)
}
