//! Writes the configuration as a file that means the same.

use std::fmt::Write as _;

use super::{Shown, Value};

/// A line each, under the headings of their tables, with the sources as comments in a column.
pub fn print(values: &[Value]) -> String {
    let lines: Vec<String> =
        values.iter().map(|value| format!("{} = {}", value.key, toml(&value.shown))).collect();
    let column = lines.iter().map(String::len).max().unwrap_or(0).min(60);
    let mut printed = String::new();
    let mut table = "";
    for (value, line) in values.iter().zip(&lines) {
        if value.table != table {
            table = &value.table;
            // Writing to a string cannot fail.
            let _ = writeln!(printed, "\n[{table}]");
        }
        let _ = writeln!(printed, "{line:column$}  # {}", value.source);
    }
    printed
}

fn toml(shown: &Shown) -> String {
    match shown {
        Shown::Text(text) => toml::Value::String(text.clone()).to_string(),
        Shown::Number(number) => number.to_string(),
        Shown::Switch(switch) => switch.to_string(),
    }
}
