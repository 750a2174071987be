//! Checks the table of `web/guide/languages.md`: each name in it exists in its language, and no name is missing.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use crate::harness::TempFolder;
use crate::header::{declared_functions, header};
use crate::programs::{Compiler, Language, checkout_folder, program_command};

/// The columns of the page that name things.
#[derive(Debug, Default, Clone)]
struct LanguageTableRow {
    cells: BTreeMap<String, Vec<String>>,
}

impl LanguageTableRow {
    fn names_in_column(&self, column: &str) -> &[String] {
        self.cells.get(column).map_or(&[], Vec::as_slice)
    }
}

/// Returns the rows of the first table below a heading of the page, each with the names between backticks, by column.
fn language_table_rows(anchor: &str) -> Vec<LanguageTableRow> {
    let page = read_checkout_file("web/guide/languages.md");
    let section =
        page.split_once(&format!("{{#{anchor}}}")).unwrap_or_else(|| panic!("no section {anchor}")).1;
    let lines =
        section.lines().skip_while(|line| !line.starts_with('|')).take_while(|line| line.starts_with('|'));
    let cells = |line: &str| -> Vec<String> {
        line.trim_matches('|').split('|').map(|cell| cell.trim().to_owned()).collect()
    };
    let mut lines = lines.map(cells);
    let columns = lines.next().expect("a table has a head");
    let rows = lines.skip(1).map(|cells| {
        assert_eq!(cells.len(), columns.len(), "{cells:?}");
        let named = columns.iter().cloned().zip(cells).map(|(column, cell)| {
            let names = cell.split('`').skip(1).step_by(2).map(str::to_owned).collect();
            (column, names)
        });
        LanguageTableRow { cells: named.collect() }
    });
    rows.collect()
}

fn read_checkout_file(path: &str) -> String {
    std::fs::read_to_string(checkout_folder().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Returns the sources of Rust below a folder.
fn rust_sources(folder: &Path, found: &mut Vec<String>) {
    for entry in std::fs::read_dir(folder).expect("the folder can be read") {
        let path: PathBuf = entry.expect("the folder can be read").path();
        if path.is_dir() && !path.ends_with("tests") {
            rust_sources(&path, found);
        } else if path.extension().is_some_and(|end| end == "rs") {
            found.push(std::fs::read_to_string(path).expect("it can be read"));
        }
    }
}

/// Returns the bodies of the items that begin with one of these lines: up to the bracket in the first column.
fn item_bodies<'a>(text: &'a str, begins: &'a impl Fn(&str) -> bool) -> impl Iterator<Item = &'a str> {
    text.match_indices('\n')
        .map(|(at, _)| &text[at + 1..])
        .filter(|rest| begins(rest.lines().next().unwrap_or("")))
        .map(|rest| &rest[..rest.find("\n}").unwrap_or(rest.len())])
}

fn word_after<'a>(line: &'a str, keyword: &str) -> Option<&'a str> {
    let rest = line.trim_start().strip_prefix(keyword)?;
    Some(rest.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or(""))
}

/// Returns whether Rust has this public name: `Type`, `Type::function`, `Type::field`, `Type::Variant` or a function.
fn rust_has_public_name(sources: &[String], name: &str) -> bool {
    let public_fn = |line: &str, wanted: &str| {
        ["pub fn ", "pub const fn ", "pub async fn "]
            .iter()
            .any(|begin| word_after(line, begin) == Some(wanted))
    };
    let is_type = |line: &str, wanted: &str| {
        ["pub struct ", "pub enum "].iter().any(|begin| word_after(line, begin) == Some(wanted))
    };
    let Some((of, member)) = name.split_once("::") else {
        return sources
            .iter()
            .any(|text| text.lines().any(|line| public_fn(line, name) || is_type(line, name)));
    };
    let is_impl = |line: &str| word_after(line, "impl ") == Some(of) && !line.contains(" for ");
    let is_definition = |line: &str| is_type(line, of);
    sources.iter().any(|text| {
        item_bodies(text, &is_impl).any(|body| body.lines().any(|line| public_fn(line, member)))
            || item_bodies(text, &is_definition).any(|body| {
                body.lines().any(|line| {
                    word_after(line, "pub ") == Some(member)
                        || (word_after(line, "") == Some(member) && member.starts_with(char::is_uppercase))
                })
            })
    })
}

/// Returns the methods and properties of a class of Python without those that begin with an underscore.
fn python_members(text: &str, class: &str) -> BTreeSet<String> {
    let start = text.find(&format!("\nclass {class}")).unwrap_or_else(|| panic!("no class {class}"));
    let body = text[start + 1..].lines().skip(1).take_while(|line| line.is_empty() || line.starts_with(' '));
    let members =
        body.filter(|line| line.starts_with("    def ")).filter_map(|line| word_after(line, "def "));
    members.filter(|name| !name.starts_with('_')).map(str::to_owned).collect()
}

#[test]
fn the_names_of_the_table_exist_in_rust() {
    let mut sources = Vec::new();
    rust_sources(&checkout_folder().join("src/agent"), &mut sources);
    rust_sources(&checkout_folder().join("src/transfer"), &mut sources);
    let calls = language_table_rows("calls");
    let missing: Vec<_> = calls
        .iter()
        .flat_map(|row| row.names_in_column("Rust"))
        .filter(|name| !rust_has_public_name(&sources, name))
        .collect();
    assert!(calls.len() > 25 && missing.is_empty(), "{missing:?}");
    assert!(
        !rust_has_public_name(&sources, "Agent::nothing") && !rust_has_public_name(&sources, "nothing"),
        "it can tell"
    );
    assert!(
        !rust_has_public_name(&sources, "AgentError::Nothing") && !rust_has_public_name(&sources, "Nothing"),
        "it can tell"
    );
}

#[test]
fn the_table_has_every_function_of_c() {
    let (declared, text) = (declared_functions(&header()), header());
    let mut listed = BTreeSet::new();
    for name in language_table_rows("calls").iter().flat_map(|row| row.names_in_column("C").to_vec()) {
        match name.split_once('.') {
            None => assert!(listed.insert(name.clone()), "{name} is listed twice"),
            Some((of, field)) => {
                let start =
                    text.find(&format!("typedef struct {of} {{")).unwrap_or_else(|| panic!("no {of}"));
                let end = start + text[start..].find('}').expect("it ends");
                assert!(text[start..end].contains(&format!(" {field};")), "{name}");
            }
        }
    }
    for row in language_table_rows("only-c") {
        // Its columns have no names.
        for name in row.cells.values().flatten() {
            assert!(listed.insert(name.clone()), "{name} is listed twice");
        }
    }
    assert_eq!(listed, declared);
}

#[test]
fn the_names_of_the_table_exist_in_cxx() {
    let mut code = String::from("#include <muster.hpp>\nint main() {\n    muster::JoinOptions options;\n");
    for name in language_table_rows("calls").iter().flat_map(|row| row.names_in_column("C++").to_vec()) {
        let is_type = |name: &str| name.starts_with(char::is_uppercase);
        let line = match name.split_once("::") {
            Some(("JoinOptions", field)) => format!("static_cast<void>(options.{field});"),
            // A template of functions has no address of its own.
            Some(("Buffer", "own")) => "static_cast<void>(&muster::Buffer::own<float>);".to_owned(),
            None if is_type(&name) => format!("static_assert(sizeof(muster::{name}) > 0, \"\");"),
            _ => format!("static_cast<void>(&muster::{name});"),
        };
        writeln!(code, "    {line}").expect("a string takes all");
    }
    code.push_str("    return 0;\n}\n");
    let folder = TempFolder::new("c-table");
    let file = folder.0.join("names.cpp");
    std::fs::write(&file, &code).expect("it can be written");
    for compiler in Compiler::installed() {
        compiler.check_syntax(&file, Language::Cxx).unwrap_or_else(|error| panic!("{compiler:?}:\n{error}"));
        let wrong = folder.0.join("wrong.cpp");
        std::fs::write(&wrong, code.replace("&muster::Agent::barrier", "&muster::Agent::nothing")).unwrap();
        assert!(compiler.check_syntax(&wrong, Language::Cxx).is_err(), "it can tell");
    }
}

#[test]
fn the_table_has_every_call_of_an_agent_in_python() {
    let (agent, init) =
        (read_checkout_file("python/muster/_agent.py"), read_checkout_file("python/muster/__init__.py"));
    let transfer = read_checkout_file("python/muster/transfer.py");
    let mut listed = BTreeSet::new();
    for name in language_table_rows("calls").iter().flat_map(|row| row.names_in_column("Python").to_vec()) {
        match name.split_once(['.', '(']) {
            Some(("Agent", method)) => _ = listed.insert(method.to_owned()),
            Some((class @ ("Engine" | "Transfer" | "Prepared"), method)) => {
                assert!(python_members(&transfer, class).contains(method), "{name}");
            }
            Some((function, keyword)) => {
                let start =
                    agent.find(&format!("\ndef {function}(")).unwrap_or_else(|| panic!("no {function}"));
                let end = start + agent[start..].find(") ->").expect("a function has a result");
                assert!(
                    agent[start..end].contains(&format!(" {}:", keyword.trim_end_matches(')'))),
                    "{name}"
                );
            }
            None => assert!(init.contains(&format!("\"{name}\",")), "{name} is not in the package"),
        }
    }
    assert_eq!(listed, python_members(&agent, "Agent"));
}

/// Returns the variants of a public enum of errors.
fn enum_variants(path: &str, name: &str) -> BTreeSet<String> {
    let text = read_checkout_file(path);
    let is_definition = |line: &str| word_after(line, "pub enum ") == Some(name);
    let body = item_bodies(&text, &is_definition).next().unwrap_or_else(|| panic!("no {name}"));
    let lines = body.lines().filter(|line| line.starts_with("    ") && !line.starts_with("     "));
    let names =
        lines.filter_map(|line| word_after(line, "")).filter(|word| word.starts_with(char::is_uppercase));
    names.map(|variant| format!("{name}::{variant}")).collect()
}

/// Returns `TimedOut` as `TIMED_OUT`.
fn to_screaming_case(name: &str) -> String {
    let mut out = String::new();
    for letter in name.chars() {
        if letter.is_ascii_uppercase() && !out.is_empty() {
            out.push('_');
        }
        out.push(letter.to_ascii_uppercase());
    }
    out
}

#[test]
fn every_kind_of_error_of_rust_has_its_status() {
    // Those that only contain another error, which has a status of its own.
    const WRAPPERS: [&str; 4] =
        ["TransferError::Memory", "TransferError::Prepare", "PrepareError::Memory", "PrepareError::Clique"];
    let mut kinds = enum_variants("src/agent/error.rs", "AgentError");
    for name in ["TransferError", "PrepareError", "MemoryError"] {
        kinds.extend(enum_variants("src/transfer/base/error.rs", name));
    }
    assert!(kinds.len() > 40, "{kinds:?}");
    // Those of calls that C does not have: claims of a task id, attached engines, reserved launches and those that wait, other jobs, memory of GPUs, and memory that is only read or
    // exported. The last two of the agent are MUSTER_STATUS_NO_ENGINE and MUSTER_STATUS_TIMED_OUT.
    const NOT_IN_C: [&str; 17] = [
        "AgentError::NoTask",
        "AgentError::EngineExists",
        "AgentError::EngineUnusable",
        "AgentError::EnginesMissing",
        "AgentError::PeerJobRefused",
        "AgentError::NoSuchPeerJob",
        "AgentError::TooManyWaitingLaunches",
        "TransferError::Gpu",
        "TransferError::JobRefused",
        "PrepareError::JobRefused",
        "PrepareError::UnknownPeerDevice",
        "PrepareError::Reserved",
        "MemoryError::Exported",
        "MemoryError::Foreign",
        "MemoryError::Gpu",
        "MemoryError::OnDevice",
        "MemoryError::ReadOnly",
    ];
    assert!(WRAPPERS.iter().chain(&NOT_IN_C).all(|kind| kinds.remove(*kind)), "{kinds:?}");
    let mut listed = BTreeSet::new();
    for row in language_table_rows("errors") {
        for kind in row.names_in_column("Rust") {
            let (_, variant) = kind.split_once("::").expect("a variant has a type");
            assert_eq!(
                row.names_in_column("C"),
                [format!("MUSTER_STATUS_{}", to_screaming_case(variant))],
                "{kind}"
            );
            listed.insert(kind.clone());
        }
    }
    assert_eq!(listed, kinds);
}

#[test]
fn the_table_has_every_status_and_every_class_of_exceptions() {
    let (text, table) = (header(), language_table_rows("errors"));
    let declared: BTreeSet<&str> = text
        .lines()
        .filter_map(|line| Some(line.trim().strip_prefix("MUSTER_STATUS_")?.split(' ').next().unwrap_or("")))
        .filter(|name| *name != "OK")
        .collect();
    let listed: BTreeSet<&str> = table
        .iter()
        .flat_map(|row| row.names_in_column("C"))
        .filter_map(|name| name.strip_prefix("MUSTER_STATUS_"))
        .collect();
    assert!(declared.len() > 40);
    assert_eq!(listed, declared);

    let errors = read_checkout_file("python/muster/errors.py");
    let classes: BTreeSet<&str> = errors.lines().filter_map(|line| word_after(line, "class ")).collect();
    let mut named: BTreeSet<&str> =
        table.iter().flat_map(|row| row.names_in_column("Python")).map(String::as_str).collect();
    // About JAX, its arrays, and other jobs: below the table.
    let only_python = [
        "ArrayDeleted",
        "ComputationFailed",
        "CopyWarning",
        "PeerJobRefused",
        "PlanError",
        "StateDiverged",
        "StateLost",
        "UnsupportedRelease",
    ];
    let page = read_checkout_file("web/guide/languages.md");
    assert!(only_python.iter().all(|class| page.contains(&format!("`{class}`")) && named.insert(class)));
    assert_eq!(named, classes);
}

#[test]
fn each_status_is_thrown_as_the_class_of_the_table() {
    let mut code = String::from(
        "#include <cstdio>\n#include <typeinfo>\n#include <muster.hpp>\n\
         template <typename Wanted> static int thrown(muster_status status, const char *name) {\n\
             try {\n        muster::detail::throw_error(status, \"text\", 6, 3);\n    } catch (const muster::Error &error) {\n\
                 const bool same = typeid(error) == typeid(Wanted) && error.status() == status &&\n\
                                   error.what() == std::string(\"text\") && error.service_code() == 6 && error.task() == 3u &&\n\
                                   error.name() == name;\n\
                 if (!same) { std::printf(\"%s is thrown as %s\\n\", name, typeid(error).name()); }\n\
                 return same ? 0 : 1;\n    }\n    return 1;\n}\n\
         int main() {\n    int wrong = 0;\n",
    );
    for row in language_table_rows("errors") {
        let (status, class) = (&row.names_in_column("C")[0], &row.names_in_column("C++")[0]);
        let name = status.trim_start_matches("MUSTER_STATUS_");
        writeln!(code, "    wrong += thrown<muster::{class}>({status}, \"{name}\");")
            .expect("a string takes all");
    }
    code.push_str("    return wrong;\n}\n");
    let folder = TempFolder::new("c-errors");
    let file = folder.0.join("errors.cpp");
    std::fs::write(&file, &code).expect("it can be written");
    for compiler in Compiler::installed() {
        let program = compiler.compile(&file, &folder);
        let done = crate::harness::run(&mut program_command(&program, &[]));
        assert!(done.status.success(), "{compiler:?}: {}{}", done.out, done.err);
    }
}
