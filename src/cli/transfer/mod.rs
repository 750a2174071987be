//! Dispatches the subcommands of `muster transfer`.
//!
//! Begin at `run`.

mod bench;
mod plan;

pub use bench::{probe_gpu_memory, probe_transport};

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
    Bench(bench::Arguments),
    #[command(name = bench::PEER, hide = true)]
    BenchPeer(bench::PeerArguments),
    Plan(plan::Arguments),
}

/// Runs the subcommand.
pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    match &arguments.command {
        Command::Bench(arguments) => bench::run(arguments),
        Command::BenchPeer(arguments) => bench::run_bench_peer(arguments),
        Command::Plan(arguments) => plan::run(arguments),
    }
}
