//! `muster transfer`: moving the bytes of arrays between the devices of tasks.

mod plan;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Args, Subcommand};

/// Move the bytes of arrays between the devices of tasks
#[derive(Debug, Args)]
pub struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Plan(plan::Arguments),
}

/// Runs the subcommand.
pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    match &arguments.command {
        Command::Plan(arguments) => plan::run(arguments),
    }
}
