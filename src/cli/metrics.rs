//! Implements `muster metrics list`: prints the catalogue of metrics.
//!
//! Begin at `run`.

use std::process::ExitCode;

use anyhow::Result;
use clap::{Args, Subcommand};

use super::output::print_raw;
use crate::telemetry::metrics::catalogue::{self, CATALOGUE, WORKER};

/// Explain the metrics that a server or a worker exports
#[derive(Debug, Args)]
pub struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    List(ListArguments),
}

/// List every metric with its type, its labels and its meaning, as a table in Markdown
#[derive(Debug, Args)]
struct ListArguments {
    /// Only the names, one a line
    #[arg(long)]
    names: bool,

    /// List those of `muster worker --metrics` instead
    #[arg(long)]
    worker: bool,
}

/// Runs the subcommand.
pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    let Command::List(ListArguments { names, worker }) = arguments.command;
    let metrics = if worker { WORKER } else { CATALOGUE };
    let text = match names {
        true => metrics.iter().map(|metric| format!("{}\n", metric.name)).collect(),
        false => catalogue::markdown_table(metrics),
    };
    print_raw(&text)?;
    Ok(ExitCode::SUCCESS)
}
