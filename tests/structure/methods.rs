//! Finds the methods that a file adds to a type of another file, and the calls of such methods.
//!
//! A call of such a method needs no import, so it could call a higher layer unseen. A method in its type's own file
//! is not checked: a caller that has the value has imported the type, or got the value from a file that did.

use std::collections::{BTreeMap, BTreeSet};

/// The methods that one file defines, and those that it calls.
#[derive(Debug, Default)]
pub struct Methods {
    /// The types that it defines.
    types: BTreeSet<String>,
    /// Every function that it defines.
    functions: BTreeSet<String>,
    /// Its public methods, each with its type.
    methods: Vec<(String, String)>,
    /// The names that it calls: `.name(` and `Type::name`.
    calls: BTreeSet<String>,
}

impl Methods {
    /// Reads them from code without comments.
    pub fn parse(code: &str) -> Self {
        let mut found = Self::default();
        let mut of: Option<String> = None;
        for line in code.lines() {
            if let Some(head) = line.strip_prefix("impl") {
                of = inherent(head);
            } else if line.starts_with('}') {
                of = None;
            }
            let words: Vec<&str> = line.split(|sign: char| !is_of_name(sign)).collect();
            for pair in words.windows(2) {
                match *pair {
                    ["struct" | "enum" | "union" | "trait", name] => {
                        found.types.insert(name.to_owned());
                    }
                    ["fn", name] => {
                        found.functions.insert(name.to_owned());
                        if let Some(of) = of.as_ref().filter(|_| line.trim_start().starts_with("pub")) {
                            found.methods.push((of.clone(), name.to_owned()));
                        }
                    }
                    _ => {}
                }
            }
        }
        found.calls = calls(code);
        found
    }

    /// Returns the public methods that it adds to types of other files.
    fn added(&self) -> impl Iterator<Item = &str> {
        let added = self.methods.iter().filter(|(of, _)| !self.types.contains(of));
        added.map(|(_, name)| name.as_str())
    }
}

/// Methods of the standard library that files call, and whose names methods of this project have too.
const STANDARD: [&str; 1] = ["join"];

/// Returns the pairs of files of which the first calls a method that the second adds to a type of another file. A
/// name that several files define, or the standard library too, is left out, because its calls do not say which of
/// them they mean.
pub fn calls_between(files: &BTreeMap<&str, &Methods>) -> BTreeSet<(String, String)> {
    let mut defined: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (file, methods) in files {
        for name in &methods.functions {
            defined.entry(name).or_default().push(file);
        }
    }
    let mut added: BTreeMap<&str, &str> = BTreeMap::new();
    for (file, methods) in files {
        let is_clear = |name: &&str| defined[name].len() == 1 && !STANDARD.contains(name);
        added.extend(methods.added().filter(is_clear).map(|name| (name, *file)));
    }
    let mut all = BTreeSet::new();
    for (from, methods) in files {
        let called = methods.calls.iter().filter_map(|name| added.get(name.as_str()));
        all.extend(called.filter(|to| *to != from).map(|to| ((*from).to_owned(), (*to).to_owned())));
    }
    all
}

/// Returns the type of an implementation without a trait, from what follows `impl`.
fn inherent(head: &str) -> Option<String> {
    let mut rest = head;
    if head.starts_with('<') {
        let mut depth = 0;
        let end = head.char_indices().find(|(at, sign)| {
            depth += i32::from(*sign == '<');
            depth -= i32::from(*sign == '>' && !head[..*at].ends_with('-'));
            depth == 0
        })?;
        rest = &head[end.0 + 1..];
    }
    if rest.split_whitespace().any(|word| word == "for") {
        return None;
    }
    let path = rest.trim_start().split(|sign: char| !is_of_name(sign) && sign != ':').next()?;
    path.rsplit("::").next().filter(|name| !name.is_empty()).map(str::to_owned)
}

/// Returns the names after `.` with an open parenthesis behind them, and those after the name of a type and `::`.
fn calls(code: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut at = 0;
    while let Some(sign) = code[at..].find(is_of_name) {
        let start = at + sign;
        let end = code[start..].find(|sign| !is_of_name(sign)).map_or(code.len(), |length| start + length);
        let (before, name, behind) = (&code[..start], &code[start..end], &code[end..]);
        let of_type = before.strip_suffix("::").is_some_and(|path| {
            let word = path.rsplit(|sign| !is_of_name(sign)).next().unwrap_or("");
            word.starts_with(char::is_uppercase)
        });
        let of_value = before.ends_with('.') && (behind.starts_with('(') || behind.starts_with("::<"));
        if of_type || of_value {
            found.insert(name.to_owned());
        }
        at = end;
    }
    found
}

fn is_of_name(sign: char) -> bool {
    sign.is_alphanumeric() || sign == '_'
}

#[test]
fn a_call_of_a_method_that_another_file_adds_is_found() {
    let files = [
        ("run.rs", "pub struct Run;\nimpl Run {\n    pub fn new() {}\n}\n"),
        (
            "rules.rs",
            "impl Run {\n    pub(super) fn fail(&self) {}\n    fn hidden(&self) {}\n    pub fn twice(&self) {}\n}\n",
        ),
        (
            "generic.rs",
            "impl<T: Fn() -> u8> super::Table<T>\nwhere\n    T: Copy,\n{\n    pub fn add(&self) {}\n}\n",
        ),
        ("own.rs", "pub struct Own;\nimpl Own {\n    pub fn owned(&self) {}\n}\nfn twice() {}\n"),
        ("of_trait.rs", "impl Drop for Run {\n    fn drop(&mut self) {}\n}\n"),
        (
            "caller.rs",
            "fn f() { run.fail(); run.hidden(); run.twice(); own.owned(); table\n .add::<u8>(1); fail; run.new(); drop.drop() }\n",
        ),
        ("by_path.rs", "fn f() { rows.map(Run::fail); module::fail(); table.add; }\n"),
    ];
    let parsed: Vec<_> = files.iter().map(|(name, text)| (*name, Methods::parse(text))).collect();
    let found = calls_between(&parsed.iter().map(|(name, methods)| (*name, methods)).collect());
    let wanted = [("by_path.rs", "rules.rs"), ("caller.rs", "generic.rs"), ("caller.rs", "rules.rs")];
    assert_eq!(found.into_iter().collect::<Vec<_>>(), wanted.map(|(a, b)| (a.to_owned(), b.to_owned())));
}
