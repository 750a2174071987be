//! Writes the effective configuration as a file that gives the same configuration when it is read.
//!
//! Begin at `effective_toml_text`.

use std::fmt::Write as _;

use super::value::SettingValue;
use super::value_source::ResolvedValue;
use crate::text::is_hidden_character;

/// Returns one line for each value, under the headings of the tables, with the sources as comments in a
/// column.
pub fn effective_toml_text(values: &[ResolvedValue]) -> String {
    let lines: Vec<String> =
        values.iter().map(|value| format!("{} = {}", value.key, toml_value_text(&value.shown))).collect();
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

fn toml_value_text(shown: &SettingValue) -> String {
    match shown {
        SettingValue::Text(text) if text.contains(is_hidden_character) => escape_toml(text),
        SettingValue::Text(text) => toml::Value::String(text.clone()).to_string(),
        SettingValue::Number(number) => number.to_string(),
        SettingValue::Switch(switch) => switch.to_string(),
    }
}

/// Returns a text with its hidden characters escaped as in TOML.
fn escape_toml(text: &str) -> String {
    let mut escaped = String::from("\"");
    for c in text.chars() {
        match c {
            '"' | '\\' => escaped.extend(['\\', c]),
            // Writing to a string cannot fail.
            c if is_hidden_character(c) => _ = write!(escaped, "\\U{:08X}", u32::from(c)),
            c => escaped.push(c),
        }
    }
    escaped + "\""
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hidden_characters_are_escaped_and_mean_the_same() {
        let text = "a\"\\\u{1b}]0;\u{7}\n\u{202e}\u{e0041}";
        let written = toml_value_text(&SettingValue::Text(text.into()));
        assert!(!written.contains(is_hidden_character), "{written}");
        let read: ::toml::Table = format!("k = {written}").parse().unwrap();
        assert_eq!(read["k"].as_str(), Some(text));
    }
}
