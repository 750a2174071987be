//! Compiles the programs of README.md as it says, and runs them together.

use std::path::PathBuf;
use std::process::Command;

use crate::harness::{MusterServer, PATIENCE, TempFolder, muster, run};
use crate::programs::{Compiler, checkout_folder, installed_library_folder, program_command};

/// Returns the block of this language in the section on C and C++.
fn readme_code_block(language: &str) -> String {
    let readme = std::fs::read_to_string(checkout_folder().join("README.md")).expect("it is there");
    let (_, section) = readme.split_once("\n## C and C++\n").expect("it has the section");
    let section = section.split("\n## ").next().expect("a text has a beginning");
    let (_, block) = section.split_once(&format!("```{language}\n")).expect("it has a program");
    block.split_once("```").expect("a block ends").0.to_owned()
}

/// Writes both programs into a folder.
fn write_readme_programs(folder: &TempFolder) -> [PathBuf; 2] {
    [("hello.c", "c"), ("hello.cpp", "cpp")].map(|(name, language)| {
        let path = folder.0.join(name);
        std::fs::write(&path, readme_code_block(language)).expect("it can be written");
        path
    })
}

#[test]
fn a_program_in_c_and_one_in_cxx_exchange_a_text() {
    for compiler in Compiler::installed() {
        let folder = TempFolder::new(&format!("c-readme-{compiler:?}"));
        let programs = write_readme_programs(&folder).map(|source| compiler.compile(&source, &folder));
        for order in [[0, 1], [1, 0]] {
            let server = MusterServer::patient(&["--tasks", "2"]);
            let tasks = [0, 1].map(|task| {
                let mut program_command = program_command(&programs[order[task]], &[]);
                program_command.env("JAX_COORDINATOR_ADDRESS", server.grpc.to_string());
                crate::harness::Process::start(program_command.env("MUSTER_PROCESS_ID", task.to_string()))
            });
            for task in tasks {
                let done = task.end();
                assert!(done.status.success(), "{}{}", done.out, done.err);
                assert_eq!(done.out.trim(), "hello from task 0");
            }
        }
    }
}

#[test]
fn it_is_compiled_with_pkg_config_and_launched() {
    let folder = TempFolder::new("c-pkg-config");
    let mut probe = Command::new("pkg-config");
    let flags = probe
        .env("PKG_CONFIG_PATH", installed_library_folder().join("lib/pkgconfig"))
        .args(["--cflags", "--libs", "muster"]);
    let flags = run(flags);
    assert!(flags.status.success(), "pkg-config: {}", flags.err);
    let [source, _] = write_readme_programs(&folder);
    let program = folder.0.join("hello");
    let mut compile = Command::new("cc");
    compile.arg(source).arg("-o").arg(&program).args(flags.out.split_whitespace());
    let done = run(&mut compile);
    assert!(done.status.success(), "{}", done.err);
    let launch = ["launch", "-n", "2", "--", &program.display().to_string()].map(str::to_owned);
    let mut launch = muster(launch);
    let launched =
        crate::harness::Process::start(launch.env("LD_LIBRARY_PATH", installed_library_folder().join("lib")));
    let done = launched.end();
    assert!(done.status.success(), "within {PATIENCE:?}: {}{}", done.out, done.err);
    assert_eq!(done.out.matches("hello from task 0").count(), 2, "{}", done.out);
}
