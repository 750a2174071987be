//! Runs the command `muster` in a Python process.
//!
//! `muster::cli` parses the arguments. Begin at [`run_command_and_exit`].

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use pyo3::prelude::*;

/// The exit code of a program that panicked.
const PANICKED: i32 = 101;

/// Runs the command line and ends the process with its exit code.
///
/// It does not return: the Rust runtime flushes its own standard output when it ends the process. `arguments` begin with
/// the name of the program; `restart` is the command that starts it again, and `library` the file of this extension, which
/// is NCCL's plug-in, too. The caller has restored the signal dispositions that Python changed.
#[pyfunction]
#[pyo3(name = "run_command", signature = (arguments, restart, library))]
pub fn run_command_and_exit(
    py: Python<'_>,
    arguments: Vec<OsString>,
    restart: Vec<OsString>,
    library: PathBuf,
) {
    py.detach(|| {
        let done =
            std::panic::catch_unwind(|| muster::cli::main_in_other_program(arguments, restart, library));
        std::process::exit(done.map_or(PANICKED, exit_code_number))
    })
}

/// Returns the number of an exit code, which has no accessor.
fn exit_code_number(code: ExitCode) -> i32 {
    (0..=u8::MAX).find(|number| ExitCode::from(*number) == code).map_or(1, i32::from)
}
