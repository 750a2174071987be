//! `muster transfer`: the transfer engine at the command line. One file for each of its subcommands.

mod bench;

pub use bench::probe;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Args, Subcommand};

/// Look into how buffers move between tasks
#[derive(Debug, Args)]
pub struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Bench(bench::Arguments),
    #[command(name = bench::PEER, hide = true)]
    BenchPeer(bench::PeerArguments),
}

/// Runs the subcommand.
pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    match &arguments.command {
        Command::Bench(arguments) => bench::run(arguments),
        Command::BenchPeer(arguments) => bench::run_peer(arguments),
    }
}
