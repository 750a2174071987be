//! Builds and installs the library once, and compiles programs against it.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use crate::harness::{Process, TempFolder, run};
use crate::skip::{Lacking, skip};

/// A compiler of C with its compiler of C++.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compiler {
    Gcc,
    Clang,
}

/// The language of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Language {
    C,
    Cxx,
}

const WARNINGS: [&str; 6] = ["-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Wconversion", "-Werror"];
const SANITIZERS: [&str; 3] =
    ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"];

impl Compiler {
    /// Returns both compilers if they are installed; else the test is recorded as skipped for the missing one.
    pub fn installed() -> Vec<Self> {
        let is_there = |compiler: &Self| {
            let found = [Language::C, Language::Cxx].iter().all(|language| {
                let probe = Command::new(compiler.program(*language)).arg("--version").output();
                probe.is_ok_and(|probe| probe.status.success())
            });
            if !found {
                skip(Lacking::Installation(compiler.program(Language::C)));
            }
            found
        };
        [Self::Gcc, Self::Clang].into_iter().filter(is_there).collect()
    }

    const fn program(self, language: Language) -> &'static str {
        match (self, language) {
            (Self::Gcc, Language::C) => "gcc",
            (Self::Gcc, Language::Cxx) => "g++",
            (Self::Clang, Language::C) => "clang",
            (Self::Clang, Language::Cxx) => "clang++",
        }
    }

    /// Returns a command that compiles a file of this language with all warnings as errors.
    fn compile_command(self, language: Language) -> Command {
        let mut command = Command::new(self.program(language));
        command.args(WARNINGS).args(["-g", "-pthread", "-I"]).arg(installed_library_folder().join("include"));
        command.arg(match language {
            Language::C => "-std=c11",
            // Without optimization, which would take most of the time of the tests.
            Language::Cxx => "-std=c++17",
        });
        if language == Language::C {
            command.arg("-O1");
        }
        command
    }

    /// Compiles `source` to a program in `folder`, with sanitizers.
    #[track_caller]
    pub fn compile(self, source: &Path, folder: &TempFolder) -> PathBuf {
        let language =
            if source.extension().is_some_and(|end| end == "c") { Language::C } else { Language::Cxx };
        let name = source.file_name().expect("a file has a name").to_string_lossy();
        let program = folder.0.join(format!("{name}-{}", self.program(language)));
        let lib = installed_library_folder().join("lib");
        let mut compile_command = self.compile_command(language);
        compile_command
            .args(SANITIZERS)
            .arg(source)
            .arg("-o")
            .arg(&program)
            .arg("-L")
            .arg(&lib)
            .arg("-lmuster");
        let done = run(compile_command.arg(format!("-Wl,-rpath,{}", lib.display())));
        assert!(done.status.success(), "{self:?} does not compile {}:\n{}", source.display(), done.err);
        program
    }

    /// Checks that `source` is correct, without linking it.
    pub fn check_syntax(self, source: &Path, language: Language) -> Result<(), String> {
        let done = run(self.compile_command(language).arg("-fsyntax-only").arg(source));
        if done.status.success() { Ok(()) } else { Err(done.err) }
    }
}

/// Returns the folder of the programs.
pub fn programs_folder() -> PathBuf {
    checkout_folder().join("tests/c")
}

/// Returns the checkout.
pub fn checkout_folder() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Returns where the library is installed, as a user installs it but without optimization.
pub fn installed_library_folder() -> &'static Path {
    static PREFIX: OnceLock<PathBuf> = OnceLock::new();
    PREFIX.get_or_init(|| {
        let prefix = checkout_folder().join("target/c");
        let done = run(Command::new(checkout_folder().join("src/capi/install"))
            .args(["--profile", "dev"])
            .arg(&prefix));
        assert!(done.status.success(), "the library cannot be installed:\n{}", done.err);
        prefix
    })
}

/// Starts a compiled program without settings from this process's environment. It fails on a leak.
pub fn start_program(program: &Path, arguments: &[&str]) -> Process {
    Process::start(&mut program_command(program, arguments))
}

/// Returns the command of a compiled program.
pub fn program_command(program: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(program);
    command.args(arguments);
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if ["MUSTER_", "JAX_", "SLURM_", "OMPI_", "JOB", "KUBERNETES_"]
            .iter()
            .any(|start| text.starts_with(start))
        {
            command.env_remove(name);
        }
    }
    command.env("ASAN_OPTIONS", "detect_leaks=1:abort_on_error=0").env("UBSAN_OPTIONS", "print_stacktrace=1");
    command
}
