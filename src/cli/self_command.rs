//! The command that starts this program again. `muster launch`, the demo and the benchmark start their child
//! processes with this command.
//!
//! By default, the command is the executable of this process. That executable may be another program, such as a
//! Python interpreter that has loaded the command line as a library. Such a process sets the command with
//! [`set_self_exec_words`]. Begin at [`self_exec_words`].

use std::ffi::OsString;
use std::process::Command;
use std::sync::OnceLock;

/// The executable of this process, even if its file was replaced meanwhile.
const THIS_EXECUTABLE: &str = "/proc/self/exe";

static WORDS: OnceLock<Vec<OsString>> = OnceLock::new();
static ARGUMENTS: OnceLock<Vec<OsString>> = OnceLock::new();

/// Sets the command that starts this program again. Only the first call has an effect.
pub fn set_self_exec_words(words: Vec<OsString>) {
    if !words.is_empty() {
        // A second call would come from a second command line in one process.
        let _ = WORDS.set(words);
    }
}

/// Sets the arguments of this process, without the name of the program. Only the first call has an effect.
pub fn set_arguments(arguments: Vec<OsString>) {
    // A second call would come from a second command line in one process.
    let _ = ARGUMENTS.set(arguments);
}

/// Returns the arguments of this process, without the name of the program.
pub fn arguments() -> &'static [OsString] {
    ARGUMENTS.get().map(Vec::as_slice).unwrap_or_default()
}

/// Returns the command that starts this program again: the program and its first arguments.
pub fn self_exec_words() -> Vec<OsString> {
    WORDS.get().cloned().unwrap_or_else(|| vec![THIS_EXECUTABLE.into()])
}

/// Returns that command, to which the caller adds the arguments of the subcommand.
pub fn self_exec_command() -> Command {
    let words = self_exec_words();
    let (program, rest) = words
        .split_first()
        .map_or((THIS_EXECUTABLE.as_ref(), &[][..]), |(program, rest)| (program.as_os_str(), rest));
    let mut command = Command::new(program);
    command.args(rest);
    command
}
