//! The child processes of `muster launch` and of the demo. They never outlive their parent, even if it is killed.
//!
//! Two mechanisms ensure this. First, each child starts as this program, asks the kernel for SIGKILL at the death of
//! its parent, and then executes the command of the task. This order needs no code between fork and exec. Second, a
//! guard process knows the process groups of the children and reads a pipe from the parent. When the pipe closes, the
//! guard kills the remaining processes of these groups. Begin at [`ProcessGuard::start`] and [`exec_task_command`].

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::io::{self, BufRead as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, ExitCode, Stdio};

use anyhow::{Context as _, Result};
use clap::Args;
use rustix::process::{Pid, Signal, getppid, kill_process_group, set_parent_process_death_signal};
use tokio::signal::unix::{SignalKind, signal};

use super::super::output::print_error;
use super::super::{connection_limits, self_command};

/// The hidden subcommand that becomes a task.
pub const BECOME_COMMAND: &str = "__become";
/// The hidden subcommand of the guard process.
pub const GUARD_COMMAND: &str = "__guard";

const CANNOT_RUN: u8 = 126;
const NO_COMMAND: u8 = 127;

/// Become a task of a launch.
#[derive(Debug, Args)]
pub struct ExecTaskArguments {
    /// The process that launched it
    #[arg(long)]
    parent: i32,
    /// The usual limit on open files
    #[arg(long)]
    open_files: Option<u64>,
    /// The command and its arguments
    #[arg(last = true, required = true)]
    command: Vec<OsString>,
}

/// Executes the command in place of this process.
pub fn exec_task_command(arguments: &ExecTaskArguments) -> Result<ExitCode> {
    set_parent_process_death_signal(Some(Signal::KILL)).context("cannot tie the task to its launch")?;
    // The parent may have died before the signal was requested.
    if getppid().map(Pid::as_raw_pid) != Some(arguments.parent) {
        return Ok(ExitCode::from(CANNOT_RUN));
    }
    if let Some(soft) = arguments.open_files {
        connection_limits::set_open_file_limit(soft);
    }
    let Some((program, rest)) = arguments.command.split_first() else {
        return Ok(ExitCode::from(NO_COMMAND));
    };
    let error = Command::new(program).args(rest).exec();
    print_error(format_args!("cannot run {}: {error}", Path::new(program).display()));
    let missing = error.kind() == io::ErrorKind::NotFound;
    Ok(ExitCode::from(if missing { NO_COMMAND } else { CANNOT_RUN }))
}

/// Waits for the end of the launch, then kills the remaining processes of its process groups.
pub fn run_process_guard() -> Result<ExitCode> {
    // A signal to all processes must not end the guard first; the guard ends when its pipe closes.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let entered = runtime.enter();
    let _ignored = [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()].map(signal);
    drop(entered);
    let mut groups = BTreeSet::new();
    for line in io::stdin().lock().lines() {
        let Ok(line) = line else { break };
        match (line.get(..1), line.get(1..).and_then(|number| number.parse::<i32>().ok())) {
            (Some("+"), Some(group)) => _ = groups.insert(group),
            (Some("-"), Some(group)) => _ = groups.remove(&group),
            _ => {}
        }
    }
    for group in groups {
        if let Some(group) = Pid::from_raw(group) {
            // The group may be empty already.
            let _ = kill_process_group(group, Signal::KILL);
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The launch's end of the pipe to the guard.
pub struct ProcessGuard {
    child: Child,
    pipe: Option<ChildStdin>,
}

impl ProcessGuard {
    /// Starts the guard in a process group of its own.
    pub fn start() -> io::Result<Self> {
        let mut child = self_command::self_exec_command()
            .arg(GUARD_COMMAND)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()?;
        let pipe = child.stdin.take();
        Ok(Self { child, pipe })
    }

    /// Adds a process group to the guard.
    pub fn add_process_group(&mut self, group: Pid) {
        self.write_to_guard('+', group);
    }

    /// Removes a process group from the guard.
    pub fn remove_process_group(&mut self, group: Pid) {
        self.write_to_guard('-', group);
    }

    fn write_to_guard(&mut self, sign: char, group: Pid) {
        if let Some(pipe) = &mut self.pipe {
            // Without the guard, a child is still tied to this process by its death signal.
            let _ = pipe.write_all(format!("{sign}{}\n", group.as_raw_pid()).as_bytes());
        }
    }
}

impl Drop for ProcessGuard {
    fn drop(&mut self) {
        drop(self.pipe.take());
        let _ = self.child.wait();
    }
}

/// Returns whether `name` is an executable: a file if it is a path, else a file on `PATH`.
pub fn command_exists(name: &Path) -> bool {
    let runs = |path: &Path| {
        path.metadata().is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0)
    };
    if name.components().count() != 1 || name.is_absolute() {
        return runs(name);
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| runs(&folder.join(name)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_found_on_the_path_or_as_paths() {
        assert!(command_exists(Path::new("sh")));
        assert!(command_exists(Path::new("/bin/sh")));
        assert!(!command_exists(Path::new("/bin")));
        assert!(!command_exists(Path::new("no-such-command-anywhere")));
        assert!(!command_exists(Path::new("")));
    }
}
