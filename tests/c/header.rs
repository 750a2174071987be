//! Tests of the C headers: they match the Rust sources, and declare exactly what the library exports.

use std::collections::BTreeSet;
use std::process::Command;

use crate::harness::{TempFolder, run};
use crate::programs::{Compiler, Language, checkout_folder, installed_library_folder, programs_folder};
use crate::skip::{Lacking, skip};

/// Returns the text of `muster.h`.
pub fn header() -> String {
    std::fs::read_to_string(checkout_folder().join("src/capi/include/muster.h")).expect("the header is there")
}

/// Returns the functions that a header declares.
pub fn declared_functions(header: &str) -> BTreeSet<String> {
    let code =
        header.lines().filter(|line| !line.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n");
    let calls = code.match_indices('(').filter_map(|(at, _)| {
        let before = &code[..at];
        let start = before.rfind(|c: char| !c.is_ascii_alphanumeric() && c != '_').map_or(0, |at| at + 1);
        before[start..].starts_with("muster_").then(|| before[start..].to_owned())
    });
    calls.collect()
}

#[test]
fn the_header_is_that_of_the_sources() {
    let cbindgen = checkout_folder().join("target/tools/bin/cbindgen");
    if !cbindgen.exists() {
        return skip(Lacking::Installation("cbindgen"));
    }
    let folder = TempFolder::new("c-header");
    let made = folder.path("muster.h");
    let mut command = Command::new(cbindgen);
    command.current_dir(checkout_folder()).args([
        "--quiet",
        "--config",
        "src/capi/cbindgen.toml",
        "--crate",
        "muster-c",
    ]);
    let done = run(command.args(["--output", &made, "src/capi"]));
    assert!(done.status.success(), "{}", done.err);
    let made = std::fs::read_to_string(made).expect("it was made");
    assert!(made.len() > 1000, "{made}");
    assert!(
        made == header(),
        "src/capi/include/muster.h is stale: make it again, as src/capi/cbindgen.toml says"
    );
}

#[test]
fn the_library_exports_the_functions_of_the_header_and_nothing_else() {
    let library = installed_library_folder().join("lib/libmuster.so");
    let done = run(Command::new("nm").args(["-D", "--defined-only"]).arg(library));
    assert!(done.status.success(), "{}", done.err);
    let exported: BTreeSet<String> =
        done.out.lines().filter_map(|line| Some(line.split_whitespace().last()?.to_owned())).collect();
    let declared = declared_functions(&header());
    assert!(declared.len() > 40, "{declared:?}");
    assert_eq!(exported, declared);
}

#[test]
fn each_header_stands_alone() {
    let folder = TempFolder::new("c-headers");
    for compiler in Compiler::installed() {
        for (name, text, language) in [
            (
                "alone.c",
                "#include <muster.h>\n#include <muster.h>\nint main(void) { return 0; }\n",
                Language::C,
            ),
            ("alone.cpp", "#include <muster.h>\nint main() { return 0; }\n", Language::Cxx),
            (
                "alone2.cpp",
                "#include <muster.hpp>\n#include <muster.hpp>\nint main() { return 0; }\n",
                Language::Cxx,
            ),
        ] {
            let file = folder.0.join(name);
            std::fs::write(&file, text).expect("it can be written");
            compiler
                .check_syntax(&file, language)
                .unwrap_or_else(|error| panic!("{compiler:?}, {name}:\n{error}"));
        }
    }
}

#[test]
fn the_binary_interface_of_a_version_does_not_change() {
    for compiler in Compiler::installed() {
        let checked = compiler.check_syntax(&programs_folder().join("abi.c"), Language::C);
        checked.unwrap_or_else(|error| {
            panic!("{compiler:?}: increment MUSTER_ABI_VERSION, or undo this:\n{error}")
        });
    }
}
