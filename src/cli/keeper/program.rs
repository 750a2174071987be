//! The program that a core runs. Begin at [`Program`].

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::AsRawFd as _;
use std::path::Path;

use tokio::process::{Child, Command};

use super::super::self_command;
use crate::grpc::KEPT_CONNECTIONS_VERSION;

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
    /// Its version of kept connections; 0: it continues none.
    pub kept_connections: u64,
}

impl Program {
    /// Returns the program of this process.
    pub fn this(encoding: u32) -> Self {
        let version = env!("CARGO_PKG_VERSION").to_owned();
        let kept_connections = KEPT_CONNECTIONS_VERSION;
        Self { version, kept_connections, ..Self::open(self_command::self_exec_words(), encoding) }
    }

    /// Returns the program that a command names. Its version is not known yet.
    pub fn open(command: Vec<OsString>, encoding: u32) -> Self {
        let open = |program: &OsString| {
            let mut file = File::open(program).ok()?;
            let mut beginning = [0; ELF.len()];
            file.read_exact(&mut beginning).ok()?;
            (beginning == ELF).then_some(file)
        };
        // A file that cannot be opened cannot be started, and the start says why.
        let file = command.first().and_then(open);
        Self { command, file, version: String::new(), encoding, kept_connections: 0 }
    }

    /// Returns its name.
    pub fn name(&self) -> String {
        self.command.first().map_or_else(String::new, |program| Path::new(program).display().to_string())
    }

    /// Starts a process of it, which `prepare` has given its arguments.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn spawn(&self, prepare: impl Fn(&mut Command)) -> io::Result<Child> {
        if let Some(file) = &self.file {
            let mut command = Command::new(format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd()));
            command.arg0(self.visible_name());
            command.args(self.command.iter().skip(1));
            prepare(&mut command);
            // A child cannot look at the descriptors of a keeper that has capabilities of its file.
            match command.spawn() {
                Err(error)
                    if matches!(error.kind(), io::ErrorKind::PermissionDenied | io::ErrorKind::NotFound) => {}
                spawned => return spawned,
            }
        }
        let mut words = self.command.iter();
        let mut command = Command::new(words.next().map_or(OsStr::new(""), OsString::as_os_str));
        command.args(words);
        prepare(&mut command);
        command.spawn()
    }

    /// Returns the name by which people look for a process: that under which they started it.
    fn visible_name(&self) -> OsString {
        let first = self.command.first().cloned().unwrap_or_default();
        if !first.to_str().is_some_and(|path| path.starts_with("/proc/self/")) {
            return first;
        }
        std::env::args_os().next().unwrap_or(first)
    }
}
