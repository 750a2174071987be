//! Implements `muster upgrade`: asks the keeper of a server to serve with another program.
//!
//! The keeper does the work (`keeper/upgrade.rs`). Begin at `run`.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context as _, Result};
use clap::Args;

use super::keeper::{UpgradeNews, UpgradeRequest, request_upgrade};
use super::output::{TerminalText, print, print_error};
use super::self_command;
use super::server_journal::journal_folder;
use crate::config::{CommandLineConfig, JobSelection, ServerProfile, load_config};

/// Serve with another version, while the jobs go on
///
/// The other program first reads the journal, while the service goes on. If it can, the service stops in good order, the other
/// program takes its place with all jobs and runs, and clients that connect meanwhile wait. If the other program does not
/// serve, or ends within a minute, the former one serves again, unless both write the journal in different encodings and the
/// other one has served.
#[derive(Debug, Args)]
#[command(after_long_help = EXAMPLES)]
pub struct Arguments {
    /// The other program [default: this one]
    binary: Option<PathBuf>,

    /// The folder of the journal of the service [default: that of a service at the default gRPC port]
    #[arg(long, value_name = "FOLDER")]
    data_dir: Option<PathBuf>,

    /// The TOML file with the settings of the service, which may name the folder
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

const EXAMPLES: &str = "\
Examples:
  A new version is installed, and the service of this machine is to use it:
    muster upgrade

  A service with a folder of its own, and a program that is not installed:
    muster upgrade --data-dir /var/lib/muster ./muster-0.2.0";

/// Runs the subcommand.
pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    let folder = arguments.folder()?;
    let command = match &arguments.binary {
        // The keeper may have another working folder.
        Some(binary) => vec![std::path::absolute(binary)?.into_os_string()],
        None => this_program()?,
    };
    let command = command.into_iter().map(|word| word.into_string().ok()).collect::<Option<Vec<String>>>();
    let request = UpgradeRequest { command: command.context("the name of the program is no text")? };
    let mut failed = false;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime
        .block_on(request_upgrade(&folder, &request, |news| match news {
            UpgradeNews::Step(text) | UpgradeNews::Done(text) => {
                // Unread output stops no upgrade.
                let _ = print(&TerminalText::from_line(text));
            }
            UpgradeNews::Failed(text) => {
                failed = true;
                print_error(format_args!("{text}"));
            }
        }))
        .with_context(|| {
            format!(
                "no keeper answers in {}: name the folder of the journal with --data-dir, as the log of the service does; a service \
                 without a keeper (--no-keeper, --ephemeral) is stopped and started instead",
                folder.display()
            )
        })?;
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Returns the words that start this program, which the keeper can use too.
fn this_program() -> Result<Vec<OsString>> {
    let mut words = self_command::self_exec_words();
    if let Some(program) = words.first_mut()
        && program.to_str().is_some_and(|name| name.starts_with("/proc/self/"))
    {
        *program = std::env::current_exe().context("this program has no path")?.into_os_string();
    }
    Ok(words)
}

impl Arguments {
    fn folder(&self) -> Result<PathBuf> {
        if let Some(folder) = &self.data_dir {
            return Ok(folder.clone());
        }
        let asked = CommandLineConfig {
            profile: ServerProfile::Serve,
            file: self.config.clone(),
            flags: BTreeMap::new(),
            jobs: JobSelection::Declared { tasks: None, jobs: Vec::new() },
        };
        let config = load_config(&asked, &|name| std::env::var(name).ok())?;
        journal_folder(&config.server).context("name the folder of the journal with --data-dir")
    }
}
