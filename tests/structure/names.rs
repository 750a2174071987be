//! Checks that the name of a public type belongs to no other type, except for listed names: neither in the product nor
//! in a folder of the tests or of the benchmarks.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Names that several types may have, with the reasons.
const SHARED: &[(&str, &str)] = &[
    ("Agent", "the Python class is a thin layer over it"),
    ("Arguments", "the command line of one subcommand: its module says which"),
    ("Buffer", "the Python class is a thin layer over it"),
    ("Engine", "the driver; the Python class is a transfer engine"),
    ("Request", "a call of the protocol; in the Python package, a request for transfers"),
    ("TaskId", "the same number; `muster-transfer` does not know the coordination service"),
];

/// Files that define the types of another file again, for a build without a feature.
const SECOND_FORMS: &[&str] = &["meter/disabled.rs"];

/// Definitions of types: by name, the files, and whether one of them is public.
type Definitions<'a> = BTreeMap<&'a str, (Vec<&'a str>, bool)>;

/// Returns the definitions of types.
fn definitions(sources: &BTreeMap<String, String>) -> Definitions<'_> {
    let mut all = Definitions::new();
    for (file, text) in sources {
        // The tests are at the end of a file.
        let text = text.split("\nmod tests {").next().unwrap_or_default();
        for line in text.lines() {
            if let Some((name, public)) = defined(line) {
                let (files, is_public) = all.entry(name).or_default();
                files.push(file);
                *is_public |= public;
            }
        }
    }
    all
}

/// Returns the type that a line defines, and whether it is public.
fn defined(line: &str) -> Option<(&str, bool)> {
    let code = line.trim_start();
    let (public, code) = match code.strip_prefix("pub") {
        Some(rest) if rest.starts_with(' ') => (true, rest.trim_start()),
        Some(rest) if rest.starts_with('(') => (true, rest.split_once(") ")?.1),
        _ => (false, code),
    };
    let (keyword, rest) = code.strip_prefix("unsafe ").unwrap_or(code).split_once(' ')?;
    // An indented type alias without `pub` belongs to an implementation of a trait.
    let is_definition = match keyword {
        "struct" | "enum" | "union" | "trait" => true,
        "type" => public || !line.starts_with(' '),
        _ => false,
    };
    let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
    (is_definition && end > 0).then_some((&rest[..end], public))
}

/// Returns the names of public types that several files define.
fn shared_names(all: Definitions<'_>) -> Definitions<'_> {
    all.into_iter().filter(|(_, (files, public))| *public && files.len() > 1).collect()
}

fn read(root: &Path) -> BTreeMap<String, String> {
    let mut sources = BTreeMap::new();
    let mut folders: Vec<PathBuf> = vec![root.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).expect("the sources can be read") {
            let path = entry.expect("the sources can be read").path();
            let below = path.strip_prefix(root).expect("it lies below").to_string_lossy().into_owned();
            if path.is_dir() && !path.ends_with("tests") && !path.ends_with("node_modules") {
                folders.push(path);
            } else if below.ends_with(".rs") && !path.ends_with("tests.rs") {
                sources.insert(below, std::fs::read_to_string(&path).expect("the sources can be read"));
            }
        }
    }
    sources
}

#[test]
fn a_public_type_name_has_one_meaning() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut sources = read(&root.join("src"));
    for file in SECOND_FORMS {
        assert!(sources.remove(*file).is_some(), "{file} is not there");
    }
    let python = read(&root.join("python/src"));
    sources.extend(python.into_iter().map(|(file, text)| (format!("python/src/{file}"), text)));
    let all = definitions(&sources);
    assert!(all.len() > 500, "{} types were found", all.len());
    let shared = shared_names(all);
    let allowed: BTreeSet<_> = SHARED.iter().map(|(name, _)| *name).collect();
    let wrong: Vec<_> = shared
        .iter()
        .filter(|(name, _)| !allowed.contains(*name))
        .map(|(name, (files, _))| format!("  {name}: {}\n", files.join(", ")))
        .collect();
    assert!(wrong.is_empty(), "one name, several types:\n{}", wrong.concat());
    let stale: Vec<_> = allowed.iter().filter(|name| !shared.contains_key(**name)).collect();
    assert!(stale.is_empty(), "these names are not shared any more: {stale:?}");
}

#[test]
fn a_public_type_name_has_one_meaning_in_each_folder_of_tests() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let (mut folders, mut wrong) = (0, Vec::new());
    for parent in ["benches", "tests"] {
        for entry in std::fs::read_dir(root.join(parent)).expect("the tests can be read") {
            let path = entry.expect("the tests can be read").path();
            if !path.is_dir() {
                continue;
            }
            folders += 1;
            let sources = read(&path);
            for (name, (files, _)) in shared_names(definitions(&sources)) {
                wrong.push(format!("  {}: {name}: {}\n", path.display(), files.join(", ")));
            }
        }
    }
    assert!(folders > 10, "{folders} folders were found");
    assert!(wrong.is_empty(), "one name, several types:\n{}", wrong.concat());
}

#[test]
fn definitions_are_read_from_lines() {
    assert_eq!(defined("pub struct Engine {"), Some(("Engine", true)));
    assert_eq!(defined("    pub(super) enum State<'a> {"), Some(("State", true)));
    assert_eq!(defined("struct Heard(u8);"), Some(("Heard", false)));
    assert_eq!(defined("pub unsafe trait Wire: Send {"), Some(("Wire", true)));
    assert_eq!(defined("    type Output = u8;"), None);
    assert_eq!(defined("type Listener = Box<dyn Fn()>;"), Some(("Listener", false)));
    assert_eq!(defined("// struct Engine"), None);
    assert_eq!(defined("pub fn engine() {"), None);
}

#[test]
fn one_name_of_two_types_is_found() {
    let file = |name: &str, text: &str| (name.to_owned(), text.to_owned());
    let sources: BTreeMap<_, _> = [
        file("a.rs", "pub struct Slot;\nstruct Inner;\n\n#[cfg(test)]\nmod tests {\n    struct Rig;\n}\n"),
        file("b.rs", "struct Slot;\nstruct Inner;\npub struct Rig;\n"),
    ]
    .into();
    let all = definitions(&sources);
    assert_eq!(all["Slot"], (vec!["a.rs", "b.rs"], true));
    assert_eq!(all["Inner"], (vec!["a.rs", "b.rs"], false));
    assert_eq!(all["Rig"], (vec!["b.rs"], true));
}
