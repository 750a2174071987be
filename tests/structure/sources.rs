//! The imports of a crate, read from its sources.
//!
//! A name is followed through the re-exports of modules to the file that defines it. A re-export counts as an import
//! only if the code of its own file has the name. Declarations of modules and test code do not count as imports. If a file adds a method to a type of another
//! file, a call of the method counts as an import (`methods.rs`).

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use super::methods::{Methods, calls_between};

/// One source file.
#[derive(Debug, Default)]
pub struct File {
    /// The segments of its module's path.
    module: Vec<String>,
    /// Its imports: name and path.
    uses: Vec<(String, Vec<String>)>,
    /// Its re-exports, likewise.
    exports: BTreeMap<String, Vec<String>>,
    /// The paths in its code.
    paths: Vec<Vec<String>>,
    /// The names in its code.
    words: BTreeSet<String>,
    methods: Methods,
    /// It contains unsafe code.
    pub has_unsafe: bool,
}

/// The source files of a crate, by their paths below its root.
pub struct Sources {
    /// Every file except those of tests.
    pub files: BTreeMap<String, File>,
    /// The file of each module.
    modules: BTreeMap<Vec<String>, String>,
}

impl Sources {
    /// Reads the sources of a crate.
    pub fn read(root: &Path) -> Self {
        let mut sources = Self { files: BTreeMap::new(), modules: BTreeMap::new() };
        let mut folders = vec![root.to_path_buf()];
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(&folder).expect("the sources can be read") {
                let path = entry.expect("the sources can be read").path();
                let name = path.file_name().expect("an entry has a name").to_string_lossy().into_owned();
                // A folder with a manifest is another crate.
                if path.is_dir() && name != "tests" && !path.join("Cargo.toml").exists() {
                    folders.push(path);
                } else if name.ends_with(".rs") && name != "tests.rs" {
                    let below =
                        path.strip_prefix(root).expect("it lies below").to_string_lossy().into_owned();
                    sources.add(below, &std::fs::read_to_string(&path).expect("the sources can be read"));
                }
            }
        }
        sources
    }

    fn add(&mut self, path: String, text: &str) {
        let mut module: Vec<String> = path.trim_end_matches(".rs").split('/').map(str::to_owned).collect();
        // A program (`main.rs`) is a crate beside its library.
        if matches!(module.last().map(String::as_str), Some("mod" | "lib")) {
            module.pop();
        }
        self.modules.insert(module.clone(), path.clone());
        self.files.insert(path, File::parse(module, text));
    }

    /// Returns the imports as pairs of files: importer, imported.
    pub fn imports(&self) -> BTreeSet<(String, String)> {
        let files = self.files.iter().map(|(name, file)| (name.as_str(), &file.methods));
        let mut all = calls_between(&files.collect());
        for (name, file) in &self.files {
            let aliases: BTreeMap<&str, &Vec<String>> =
                file.uses.iter().map(|(alias, path)| (alias.as_str(), path)).collect();
            let direct = file.uses.iter().map(|(_, path)| path.clone());
            let inline = file.paths.iter().map(|path| match aliases.get(path[0].as_str()) {
                Some(module) => module.iter().chain(&path[1..]).cloned().collect(),
                None => path.clone(),
            });
            let own = file.exports.iter().filter(|(alias, _)| file.words.contains(*alias));
            let own = own.map(|(_, path)| path.clone());
            for path in direct.chain(inline).chain(own) {
                if let Some(target) = self.resolve(&file.module, &path, 0)
                    && target != *name
                {
                    all.insert((name.clone(), target));
                }
            }
        }
        all
    }

    /// Returns the file that defines the item of a path, as seen from a module; `None` for a module or an
    /// item of another crate.
    fn resolve(&self, from: &[String], path: &[String], depth: usize) -> Option<String> {
        const DEPTH_MAX: usize = 16;
        if depth > DEPTH_MAX {
            return None;
        }
        let (mut module, rest) = match path.first()?.as_str() {
            "crate" => (Vec::new(), &path[1..]),
            "self" => (from.to_vec(), &path[1..]),
            "super" => {
                let ups = path.iter().take_while(|segment| *segment == "super").count();
                (from[..from.len().checked_sub(ups)?].to_vec(), &path[ups..])
            }
            _ => {
                let child: Vec<_> = from.iter().chain(path.first()).cloned().collect();
                if !self.modules.contains_key(&child) {
                    return None;
                }
                (child, &path[1..])
            }
        };
        for (at, segment) in rest.iter().enumerate() {
            let child: Vec<_> = module.iter().chain([segment]).cloned().collect();
            if self.modules.contains_key(&child) {
                module = child;
                continue;
            }
            let file = self.modules.get(&module)?;
            return match self.files[file].exports.get(segment) {
                Some(target) => {
                    let target: Vec<_> = target.iter().chain(&rest[at + 1..]).cloned().collect();
                    self.resolve(&module, &target, depth + 1)
                }
                None => Some(file.clone()),
            };
        }
        None
    }
}

impl File {
    /// Returns whether its code names this crate.
    pub fn names_crate(&self, name: &str) -> bool {
        let imported = self.uses.iter().map(|(_, path)| path).chain(self.exports.values());
        imported.chain(&self.paths).any(|path| path.first().is_some_and(|first| first == name))
    }

    fn parse(module: Vec<String>, text: &str) -> Self {
        let mut file = Self { module, ..Self::default() };
        let mut code = String::new();
        for line in text.split("#[cfg(test)]\nmod tests {").next().unwrap_or("").lines() {
            code.push_str(line.split("//").next().unwrap_or(""));
            code.push('\n');
        }
        file.methods = Methods::parse(&code);
        let mut rest = String::new();
        let mut items = code.split_inclusive(';');
        for item in &mut items {
            let start = item.rfind("use ").filter(|at| {
                let before = item[..*at].trim_end();
                let line = item[..*at].rsplit('\n').next().unwrap_or("").trim();
                (line.is_empty() || line == "pub" || line.starts_with("pub(")) && !before.ends_with('=')
            });
            let Some(start) = start.filter(|_| item.ends_with(';')) else {
                rest.push_str(item);
                continue;
            };
            rest.push_str(&item[..start]);
            let exported = item[..start].rsplit('\n').next().unwrap_or("").trim_start().starts_with("pub");
            let mut found = Vec::new();
            expand("", item[start + 4..].trim_end_matches(';'), &mut found);
            for (alias, path) in found {
                if exported {
                    file.exports.insert(alias, path);
                } else {
                    file.uses.push((alias, path));
                }
            }
        }
        file.paths = paths(&rest);
        let words = rest.split(|sign: char| !sign.is_alphanumeric() && sign != '_');
        file.words = words.map(str::to_owned).collect();
        file.has_unsafe = file.words.contains("unsafe");
        file
    }
}

/// Flattens a tree of imports into names and paths.
fn expand(before: &str, tree: &str, into: &mut Vec<(String, Vec<String>)>) {
    let tree = tree.trim();
    if let Some(open) = tree.find('{') {
        let before = format!("{before}{}", &tree[..open]);
        let inner = tree[open + 1..].trim_end().trim_end_matches('}');
        let inner = if tree.ends_with('}') { &tree[open + 1..tree.len() - 1] } else { inner };
        let (mut depth, mut start) = (0, 0);
        for (at, sign) in inner.char_indices().chain([(inner.len(), ',')]) {
            match sign {
                '{' => depth += 1,
                '}' => depth -= 1,
                ',' if depth == 0 => {
                    if !inner[start..at].trim().is_empty() {
                        expand(&before, &inner[start..at], into);
                    }
                    start = at + 1;
                }
                _ => {}
            }
        }
        return;
    }
    let whole: String = format!("{before}{tree}");
    let (path, alias) = match whole.split_once(" as ") {
        Some((path, alias)) => (path.trim().to_owned(), Some(alias.trim().to_owned())),
        None => (whole.trim().to_owned(), None),
    };
    let mut segments: Vec<String> = path.split("::").map(|segment| segment.trim().to_owned()).collect();
    if segments.last().is_some_and(|last| last == "self") && segments.len() > 1 {
        segments.pop();
    }
    let name = alias.unwrap_or_else(|| segments.last().cloned().unwrap_or_default());
    into.push((name, segments));
}

/// Returns the paths of at least two segments in code.
fn paths(code: &str) -> Vec<Vec<String>> {
    let mut found = Vec::new();
    let mut word = String::new();
    for sign in code.chars().chain([' ']) {
        if sign.is_alphanumeric() || sign == '_' || sign == ':' {
            word.push(sign);
            continue;
        }
        let taken = std::mem::take(&mut word);
        let segments: Vec<String> =
            taken.split("::").filter(|segment| !segment.is_empty()).map(str::to_owned).collect();
        if segments.len() > 1 && !taken.starts_with(':') {
            found.push(segments);
        }
    }
    found
}

#[test]
fn imports_are_followed_to_the_file_that_defines_them() {
    let mut sources = Sources { files: BTreeMap::new(), modules: BTreeMap::new() };
    for (path, text) in [
        ("lib.rs", "mod high;\nmod low;\n"),
        (
            "low/mod.rs",
            "//! use crate::high::nothing;\nmod inner;\npub use inner::{Thing, other as renamed};\n",
        ),
        ("low/inner.rs", "pub struct Thing;\npub fn other() {}\n"),
        ("low/deep.rs", "use super::inner;\nfn f() { inner::other() }\n"),
        (
            "high.rs",
            "use crate::low::{self, Thing as Name};\nfn f() { low::renamed(); crate::low::deep::f(); }\n",
        ),
        ("low/own.rs", "mod part;\npub use part::{Part, unused};\nfn f(_: Part) {}\n"),
        ("low/own/part.rs", "pub struct Part;\npub fn unused() {}\n"),
        ("tested.rs", "#[cfg(test)]\nmod tests {\n use crate::high::f;\n}\n"),
    ] {
        sources.add(path.to_owned(), text);
    }
    let found: Vec<_> = sources.imports().into_iter().collect();
    let wanted = [
        ("high.rs", "low/deep.rs"),
        ("high.rs", "low/inner.rs"),
        ("low/deep.rs", "low/inner.rs"),
        ("low/own.rs", "low/own/part.rs"),
    ];
    assert_eq!(found, wanted.map(|(from, to)| (from.to_owned(), to.to_owned())));
}
