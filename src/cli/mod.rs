//! Parses the command line and dispatches to one file for each subcommand.
//!
//! Begin at `main`, then `Command`.

mod allocator;
mod audit;
mod certificates;
mod client;
mod collectives;
mod completions;
mod config;
mod connection_limits;
mod credentials;
mod demo;
mod doctor;
mod drain;
mod events;
mod exclude;
mod hosts;
mod job;
mod journal;
mod keeper;
mod launch;
mod listeners;
mod local_server;
mod metrics;
mod nccl_plugin;
mod output;
mod readmit;
mod runs;
mod screen;
mod self_command;
mod serve;
mod server;
mod server_args;
mod server_histories;
mod server_journal;
mod setting_flags;
mod simulate;
mod stacks;
mod status;
mod stop_signals;
mod task_owners;
mod tls;
mod token;
mod transfer;
mod upgrade;
mod worker;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{CommandFactory as _, FromArgMatches as _, Parser, Subcommand};

use crate::config::ConfigError;
use crate::simulator::StoryError;
use output::print_error;

/// Coordinates multi-controller training and inference: unmodified JAX programs, one service.
///
/// Muster takes the place of the coordination service inside JAX's process 0. Tasks register with it, meet
/// at its barriers and learn from it who is alive; it shows who is missing, and it outlives every one of them.
#[derive(Debug, Parser)]
#[command(name = "muster", version, max_term_width = 100, after_long_help = EXAMPLES)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

const EXAMPLES: &str = "\
Examples:
  See it at work, with nothing but this program: a service, four workers, losses and returns:
    muster demo

  Look at a cluster of 10,000 tasks without one, whose stories go wrong in known ways:
    muster simulate --tasks 10000 --hosts 1250 --story dead-host

  Run two processes of a JAX program on this machine, with a server of their own:
    muster launch -n 2 -- python3 train.py

  Serve a job of eight tasks to a cluster, and look at it:
    muster serve --tasks 8 --grpc 0.0.0.0:8476 --insecure-grpc
    muster status

  On each host of the cluster, point JAX at it and start the program as ever:
    export JAX_COORDINATOR_ADDRESS=HOST:8476 JAX_COORDINATOR_BIND_ADDRESS=127.0.0.1:0
    python3 train.py    # calls jax.distributed.initialize(num_processes=8, process_id=...)

Every setting is a flag, an environment variable (MUSTER_...) or a key in a
file, in this order of strength; `muster config print` shows each with its
source. `muster help COMMAND` tells more.";

#[derive(Debug, Subcommand)]
enum Command {
    Serve(serve::Arguments),
    Launch(launch::Arguments),
    Worker(Box<worker::Arguments>),
    Demo(demo::Arguments),
    Simulate(simulate::Arguments),
    Status(status::Arguments),
    Events(events::Arguments),
    Exclude(exclude::Arguments),
    Readmit(readmit::Arguments),
    Drain(drain::Arguments),
    Hosts(hosts::Arguments),
    Runs(runs::Arguments),
    Stacks(stacks::Arguments),
    Collectives(collectives::Arguments),
    TaskOwners(task_owners::Arguments),
    Job(job::Arguments),
    Audit(audit::Arguments),
    Journal(journal::Arguments),
    Upgrade(upgrade::Arguments),
    Config(config::Arguments),
    Tls(tls::Arguments),
    Token(token::Arguments),
    Metrics(metrics::Arguments),
    Transfer(transfer::Arguments),
    Doctor(doctor::Arguments),
    Completions(completions::Arguments),
    #[command(name = launch::BECOME_COMMAND, hide = true)]
    Become(launch::ExecTaskArguments),
    #[command(name = launch::GUARD_COMMAND, hide = true)]
    Guard,
}

/// The time that the last log lines have.
const LOG_STOP_TIMEOUT: std::time::Duration = std::time::Duration::from_millis(500);

/// Returns the command line. Each subcommand has its usage overridden with that of its help: clap's own usage
/// in an error shows arguments as required that the environment has given.
fn command_line() -> clap::Command {
    fn set_usage_lines(command: &mut clap::Command) {
        for part in command.get_subcommands_mut() {
            let usage = part.render_usage().to_string();
            let usage = usage.trim_start_matches("Usage:").trim().to_owned();
            *part = std::mem::take(part).override_usage(usage);
            set_usage_lines(part);
        }
    }
    let mut command = Arguments::command();
    command.build();
    set_usage_lines(&mut command);
    command
}

/// Parses the arguments of this process, runs the subcommand and returns its exit code.
#[must_use]
pub fn main() -> ExitCode {
    run_command_line(std::env::args_os().collect())
}

/// Does what [`main`] does, in a process whose executable is another program, such as a Python interpreter.
///
/// `arguments` begin with the name of the program. `restart` is the command that starts this program again: a launch
/// runs its tasks by it. `nccl_plugin` is a library that has the tables of NCCL's profiler plug-in.
#[must_use]
pub fn main_in_other_program(
    arguments: Vec<OsString>,
    restart: Vec<OsString>,
    nccl_plugin: PathBuf,
) -> ExitCode {
    self_command::set_self_exec_words(restart);
    nccl_plugin::set_nccl_plugin(nccl_plugin);
    run_command_line(arguments)
}

fn run_command_line(arguments: Vec<OsString>) -> ExitCode {
    self_command::set_arguments(arguments.iter().skip(1).cloned().collect());
    let mut command = command_line();
    let mut matches = command.try_get_matches_from_mut(arguments).unwrap_or_else(|error| error.exit());
    let read = Arguments::from_arg_matches_mut(&mut matches);
    let done = match read.unwrap_or_else(|error| error.format(&mut command).exit()).command {
        Command::Serve(arguments) => serve::run(&arguments),
        Command::Launch(arguments) => launch::run(&arguments),
        Command::Worker(arguments) => worker::run(&arguments),
        Command::Demo(arguments) => demo::run(&arguments),
        Command::Simulate(arguments) => simulate::run(&arguments),
        Command::Status(arguments) => status::run(&arguments),
        Command::Events(arguments) => events::run(&arguments),
        Command::Exclude(arguments) => exclude::run(&arguments),
        Command::Readmit(arguments) => readmit::run(&arguments),
        Command::Drain(arguments) => drain::run(&arguments),
        Command::Hosts(arguments) => hosts::run(&arguments),
        Command::Runs(arguments) => runs::run(&arguments),
        Command::Stacks(arguments) => stacks::run(&arguments),
        Command::Collectives(arguments) => collectives::run(&arguments),
        Command::TaskOwners(arguments) => task_owners::run(&arguments),
        Command::Job(arguments) => job::run(&arguments),
        Command::Audit(arguments) => audit::run(&arguments),
        Command::Journal(arguments) => journal::run(&arguments),
        Command::Upgrade(arguments) => upgrade::run(&arguments),
        Command::Config(arguments) => config::run(&arguments),
        Command::Tls(arguments) => tls::run(&arguments),
        Command::Token(arguments) => token::run(&arguments),
        Command::Metrics(arguments) => metrics::run(&arguments),
        Command::Transfer(arguments) => transfer::run(&arguments),
        Command::Doctor(arguments) => doctor::run(&arguments),
        Command::Completions(arguments) => completions::run(&arguments, command),
        Command::Become(arguments) => launch::exec_task_command(&arguments),
        Command::Guard => launch::run_process_guard(),
    };
    // A reader that does not read the log must not delay the exit.
    crate::telemetry::log::flush_log(LOG_STOP_TIMEOUT);
    done.unwrap_or_else(|error| {
        print_error(format_args!("{error:#}"));
        ExitCode::from(if error.is::<ConfigError>() || error.is::<StoryError>() { 2 } else { 1 })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the commands in a text for people: those of its shell blocks, and those within its sentences.
    fn commands_in_text(text: &str) -> Vec<Vec<String>> {
        let whole = text.replace("\\\n", " ");
        let lines = whole.lines().filter(|line| line.starts_with("muster "));
        let within = whole.split('`').filter(|code| code.starts_with("muster ") && !code.contains('\n'));
        let words = |line: &str| {
            // Quotes keep words together; the rest of the shell's syntax is not part of the command.
            let line = line.replace("$SLURM_NTASKS", "8");
            let parts = line.split('"').enumerate();
            let parts = parts.flat_map(|(at, part)| match at % 2 {
                0 => part.split_whitespace().map(str::to_owned).collect(),
                _ => vec![part.to_owned()],
            });
            parts.take_while(|word| !["&", "#", ">"].contains(&word.as_str())).collect::<Vec<_>>()
        };
        lines.chain(within).map(words).collect()
    }

    #[test]
    fn every_command_that_the_guide_gives_is_taken() {
        let guide = [
            include_str!("../../web/guide/start.md"),
            include_str!("../../web/guide/arrays.md"),
            include_str!("../../web/guide/data.md"),
            include_str!("../../web/guide/live.md"),
            include_str!("../../web/guide/preemption.md"),
            include_str!("../../web/guide/resharding.md"),
            include_str!("../../web/guide/platforms.md"),
            include_str!("../../web/guide/stacks.md"),
            include_str!("../../web/guide/collectives.md"),
            include_str!("../../web/guide/troubleshooting.md"),
            include_str!("../../web/guide/operations.md"),
            include_str!("../../web/guide/restarts.md"),
            include_str!("../../web/guide/security.md"),
        ];
        let all: Vec<_> = guide.into_iter().flat_map(commands_in_text).collect();
        assert!(all.len() > 12, "{all:?}");
        for command in all {
            if let Err(error) = Arguments::try_parse_from(&command) {
                // A sentence may name a command without its arguments.
                let is_name = !command.iter().any(|word| word.starts_with('-'));
                let is_taken = is_name && error.kind() == clap::error::ErrorKind::MissingRequiredArgument;
                assert!(is_taken, "{}: {error}", command.join(" "));
            }
        }
    }

    #[test]
    fn the_arguments_are_well_formed() {
        Arguments::command().debug_assert();
        command_line().debug_assert();
    }
}
