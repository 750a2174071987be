//! Checks the layers of the code by the imports in its sources.
//!
//! `layers.rs` is a table of the layers of each part of the code, the lowest first. A part is added as a row of the
//! table. The check fails if a module imports a higher layer or another module of its own layer, or if files import
//! one another in a cycle. `sources.rs` reads the imports. `methods.rs` finds calls of methods, which need no
//! import. `graph.rs` finds cycles. `names.rs` checks that a public type name has one meaning.
//!
//! `ignored.rs` has the reasons for which a test may be ignored. `sizes.rs` bounds the length of files. `symbols.rs` compares templates with the
//! sprite.

mod graph;
mod ignored;
mod layers;
mod methods;
mod names;
mod sizes;
mod sources;
mod symbols;

use std::collections::BTreeSet;
use std::path::Path;

use layers::{CRATE_ROOTS, PARTS, Part};
use sources::Sources;

fn read(part: &Part) -> Sources {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let sources = Sources::read(&root.join(part.crate_root));
    assert!(sources.files.len() > 20, "{}: {} files were found", part.name, sources.files.len());
    sources
}

#[test]
fn every_file_belongs_to_a_layer() {
    for part in PARTS {
        let stray: Vec<_> = read(part)
            .files
            .keys()
            .filter(|file| !matches!(file.as_str(), "lib.rs" | "mod.rs") && part.level(file).is_none())
            .cloned()
            .collect();
        assert!(stray.is_empty(), "{}: no layer has {stray:?}", part.name);
    }
}

#[test]
fn imports_look_down_only() {
    for part in PARTS {
        let mut wrong = BTreeSet::new();
        let sources = read(part);
        let mut arrows = 0;
        for (from, to) in sources.imports() {
            let (Some(higher), Some(lower)) = (part.level(&from), part.level(&to)) else { continue };
            arrows += 1;
            let same = higher == lower && part.module(&from) == part.module(&to);
            if !same && lower >= higher {
                wrong.insert(format!("{from} imports {to}"));
            }
        }
        assert!(arrows > 20, "{}: {arrows} imports were found", part.name);
        assert!(wrong.is_empty(), "{}: imports that look up:\n{}", part.name, list(&wrong));
    }
}

#[test]
fn imports_of_a_part_go_no_further() {
    for part in PARTS {
        let imports = read(part).imports();
        for rule in part.narrow {
            let wrong: BTreeSet<_> = imports
                .iter()
                .filter(|(from, to)| rule.forbids(from, to))
                .map(|(from, to)| format!("{from} imports {to}"))
                .collect();
            assert!(wrong.is_empty(), "only {} may be imported here:\n{}", rule.part, list(&wrong));
            for file in rule.except {
                let needed = imports.iter().any(|(from, to)| from == file && rule.goes_further(to));
                assert!(needed, "{file} needs no exception");
            }
        }
    }
}

#[test]
fn what_clients_share_with_the_port_knows_no_router() {
    let sources = read(&PARTS[0]);
    let foreign = sources.files["http/api.rs"].names_crate("axum");
    assert!(!foreign, "http/api.rs names axum");
}

#[test]
fn files_form_no_circles() {
    let mut wrong = BTreeSet::new();
    for root in CRATE_ROOTS {
        let imports = Sources::read(&Path::new(env!("CARGO_MANIFEST_DIR")).join(root)).imports();
        for circle in graph::circles(&imports) {
            let within = imports.iter().filter(|(from, to)| circle.contains(from) && circle.contains(to));
            wrong.extend(within.map(|(from, to)| format!("{root}: {from} imports {to}")));
        }
    }
    assert!(wrong.is_empty(), "imports that form circles of files:\n{}", list(&wrong));
}

#[test]
fn unsafe_code_is_where_the_table_has_it() {
    for part in PARTS {
        let found: BTreeSet<_> =
            read(part).files.into_iter().filter(|(_, file)| file.has_unsafe).map(|(name, _)| name).collect();
        let allowed: BTreeSet<_> = part.with_unsafe.iter().map(|file| (*file).to_owned()).collect();
        assert_eq!(found, allowed, "{}", part.name);
    }
}

fn list(lines: &BTreeSet<String>) -> String {
    lines.iter().map(|line| format!("  {line}\n")).collect()
}
