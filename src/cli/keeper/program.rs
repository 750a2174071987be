//! The program that a core runs. Begin at [`Program`].

use std::ffi::OsString;
use std::fs::File;
use std::io::Read as _;
use std::os::fd::AsRawFd as _;
use std::path::Path;

use tokio::process::Command;

use super::super::self_command;

/// The first bytes of an executable file of Linux.
const ELF: [u8; 4] = *b"\x7fELF";

/// A program that serves: an executable and its first arguments.
#[derive(Debug)]
pub struct Program {
    command: Vec<OsString>,
    /// The executable, so that it stays the same if another one takes its path. `None` for a script, which is found by its path.
    file: Option<File>,
    /// Its version.
    pub version: String,
    /// The encoding of the journal that it writes.
    pub encoding: u32,
}

impl Program {
    /// Returns the program of this process.
    pub fn this(encoding: u32) -> Self {
        let version = env!("CARGO_PKG_VERSION").to_owned();
        let mut program = Self { version, ..Self::open(self_command::self_exec_words(), encoding) };
        // People look for a process by the name under which they started it.
        if program.file.is_some()
            && let (Some(name), Some(first)) = (std::env::args_os().next(), program.command.first_mut())
            && first.to_str().is_some_and(|path| path.starts_with("/proc/self/"))
        {
            *first = name;
        }
        program
    }

    /// Returns the program that a command names. Its version is not known yet.
    pub fn open(command: Vec<OsString>, encoding: u32) -> Self {
        let open = |program: &OsString| {
            let mut file = File::open(program).ok()?;
            let mut beginning = [0; ELF.len()];
            file.read_exact(&mut beginning).ok()?;
            (beginning == ELF).then_some(file)
        };
        // What cannot be opened cannot be started either, and the start says why.
        let file = command.first().and_then(open);
        Self { command, file, version: String::new(), encoding }
    }

    /// Returns its name.
    pub fn name(&self) -> String {
        self.command.first().map_or_else(String::new, |program| Path::new(program).display().to_string())
    }

    /// Returns the command that starts it, to which arguments are added.
    pub fn command(&self) -> Command {
        let Some((program, first)) = self.command.split_first() else { return Command::new("") };
        let mut command = match &self.file {
            Some(file) => {
                let mut command =
                    Command::new(format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd()));
                command.arg0(program);
                command
            }
            None => Command::new(program),
        };
        command.args(first);
        command
    }
}
