//! Implements `muster token new`: creates a token for the HTTP port.
//!
//! `http/access/tokens.rs` verifies tokens. Begin at `run`.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, anyhow};
use clap::{Args, Subcommand};

use super::output::{eprint_raw, print_raw};
use crate::http::{NewToken, append_token_to_file};
use crate::service::AccessRole;

/// Create tokens for access over HTTP
///
/// Each has a role: a viewer reads everything except the values of keys; an operator also excludes, readmits,
/// drains, and reads and writes keys; an admin also creates, changes and deletes jobs. The server has only
/// the hashes of tokens, in the file that --tokens-file names, and reloads it when it changes: to revoke a
/// token, delete its four lines.
#[derive(Debug, Args)]
#[command(after_long_help = EXAMPLES)]
pub struct Arguments {
    #[command(subcommand)]
    command: Command,
}

const EXAMPLES: &str = "\
Examples:
  muster token new --name ops --role operator --file tokens.toml > ops.token
  muster serve --tasks 8 --http 0.0.0.0:8477 --http-hosts muster.example --tokens-file tokens.toml
  muster status --server http://muster.example:8477 --token-file ops.token
  curl -H \"authorization: Bearer $(cat ops.token)\" http://muster.example:8477/api/v1/jobs";

#[derive(Debug, Subcommand)]
enum Command {
    New(NewArguments),
}

/// Create a token, print it once, and add its hash to a file
#[derive(Debug, Args)]
struct NewArguments {
    /// The holder: the name in the audit
    #[arg(long, value_name = "NAME")]
    name: String,

    /// The role of the holder: viewer, operator or admin
    #[arg(long, value_name = "ROLE")]
    role: AccessRole,

    /// The file to add its hash to; without one, the lines to add are printed to stderr
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,
}

/// Runs the subcommand.
pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    let Command::New(NewArguments { name, role, file }) = &arguments.command;
    let made = NewToken::generate(name, *role).map_err(|wrong| anyhow!("--name {name}: {wrong}"))?;
    match file {
        Some(file) => append_token_to_file(file, name, &made.line)?,
        None => eprint_raw(&made.line),
    }
    print_raw(&format!("{}\n", made.token))?;
    Ok(ExitCode::SUCCESS)
}
