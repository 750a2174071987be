//! `muster metrics`: explains what is measured.

use std::process::ExitCode;

use anyhow::Result;
use clap::{Args, Subcommand};

use super::print;
use crate::telemetry::metrics::catalogue::{self, CATALOGUE};

/// Explain the metrics that a server exports
#[derive(Debug, Args)]
pub struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    List(List),
}

/// List every metric with its type, its labels and what it says, as a table in Markdown
#[derive(Debug, Args)]
struct List {
    /// Only the names, one a line
    #[arg(long)]
    names: bool,
}

/// Runs the subcommand.
pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    let Command::List(List { names }) = arguments.command;
    let text = match names {
        true => CATALOGUE.iter().map(|metric| format!("{}\n", metric.name)).collect(),
        false => catalogue::page(),
    };
    print(&text)?;
    Ok(ExitCode::SUCCESS)
}
