//! Checks the reasons for which tests are ignored, and the reasons for which tests may skip themselves in CI.

#[path = "../support/skip.rs"]
mod skip;

use std::path::{Path, PathBuf};

/// The reasons for which a test may be ignored. A test that a machine cannot run is not ignored: it says so
/// when it runs, and is counted (tests/support/skip.rs).
const REASONS: [&str; 4] = [
    // The body runs in a process that another test starts.
    "a process of another test",
    // Not a test: it prints figures for BENCHMARKS.md.
    "measures for some minutes",
    // Not a test: it makes the pictures of the README.
    "takes pictures: cargo test --test browser -- --ignored pictures",
    // Not a test: it makes the journal of a new encoding.
    "writes a journal to be kept: cargo test --test simulation -- --ignored write_a_journal",
];

#[test]
fn an_ignored_test_is_part_of_another_or_no_test() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut folders: Vec<PathBuf> = ["benches", "src", "tests"].map(|folder| root.join(folder)).into();
    let (mut ignored, mut wrong) = (0, Vec::new());
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).expect("the sources can be read") {
            let path = entry.expect("the sources can be read").path();
            if path.is_dir() && !path.ends_with("node_modules") {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") && !path.ends_with(file!())
            {
                let text = std::fs::read_to_string(&path).expect("the sources can be read");
                let lines = text.lines().map(str::trim).filter(|line| line.starts_with("#[ignore"));
                for line in lines {
                    ignored += 1;
                    if !REASONS.iter().any(|reason| line == format!("#[ignore = \"{reason}\"]")) {
                        wrong.push(format!("{}: {line}", path.display()));
                    }
                }
            }
        }
    }
    assert!(ignored >= REASONS.len(), "{ignored} ignored tests were found");
    assert!(wrong.is_empty(), "tests that are ignored for another reason:\n{}", wrong.join("\n"));
}

#[test]
fn in_ci_only_the_kernel_and_the_machine_excuse_a_test() {
    let (kernel, tool) = (skip::Lacking::KernelFeature("namespaces"), skip::Lacking::Installation("strace"));
    assert_eq!(kernel.excuse(true), Ok("the kernel refuses namespaces".to_owned()));
    assert_eq!(skip::Lacking::Hardware("GPU").excuse(true), Ok("the machine has no GPU".to_owned()));
    assert_eq!(tool.excuse(false), Ok("strace is not installed".to_owned()));
    assert_eq!(
        tool.excuse(true),
        Err("strace is not installed, and in CI no test is skipped for that".to_owned())
    );
}
