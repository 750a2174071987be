//! Implements `muster completions`: prints a script that completes subcommands and flags in a shell.
//!
//! clap generates the script. Begin at `run`.

use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use clap_complete::Shell;

use super::output::print_raw;

/// Print a script that completes subcommands and flags in a shell
#[derive(Debug, Args)]
#[command(after_long_help = EXAMPLES)]
pub struct Arguments {
    /// The shell
    #[arg(value_enum)]
    shell: Shell,
}

const EXAMPLES: &str = "\
Examples:
  source <(muster completions bash)
  muster completions zsh > ~/.zfunc/_muster
  muster completions fish > ~/.config/fish/completions/muster.fish";

/// Runs the subcommand.
pub fn run(arguments: &Arguments, mut command: clap::Command) -> Result<ExitCode> {
    let mut script = Vec::new();
    clap_complete::generate(arguments.shell, &mut command, "muster", &mut script);
    print_raw(&String::from_utf8(script)?)?;
    Ok(ExitCode::SUCCESS)
}
