//! The output lines of the test programs: `EVENT name t=SECONDS task=ID key=value ...`. `common.py` writes them.
//! `muster launch` puts `[TASK] ` before each line.

use std::collections::BTreeMap;
use std::str::FromStr;

use super::harness::TestInstant;

/// One output line of a program.
#[derive(Debug, Clone, PartialEq)]
pub struct LogRecord {
    /// The kind of line.
    pub name: String,
    /// The time at which it was written.
    pub at: TestInstant,
    fields: BTreeMap<String, String>,
}

impl LogRecord {
    /// Parses a line; returns `None` if it has another form.
    pub fn parse(text: &str) -> Option<Self> {
        let text =
            text.strip_prefix('[').and_then(|rest| rest.split_once("] ")).map_or(text, |(_, said)| said);
        let (name, mut rest) = text.strip_prefix("EVENT ")?.split_once(' ')?;
        let mut fields = BTreeMap::new();
        while let Some((key, after)) = rest.split_once('=') {
            let (value, after) = if after.starts_with('"') {
                let mut values = serde_json::Deserializer::from_str(after).into_iter::<String>();
                let value = values.next()?.ok()?;
                (value, &after[values.byte_offset()..])
            } else {
                let end = after.find(' ').unwrap_or(after.len());
                (after[..end].to_owned(), &after[end..])
            };
            fields.insert(key.to_owned(), value);
            rest = after.trim_start();
        }
        let at = TestInstant(fields.get("t")?.parse().ok()?);
        Some(Self { name: name.to_owned(), at, fields })
    }

    /// Returns a field as text.
    #[track_caller]
    pub fn text(&self, key: &str) -> &str {
        self.fields.get(key).unwrap_or_else(|| panic!("no {key} in {self:?}"))
    }

    /// Returns a field as a number.
    #[track_caller]
    pub fn number<T: FromStr>(&self, key: &str) -> T {
        let text = self.text(key);
        text.parse().unwrap_or_else(|_| panic!("{key}={text} is no such number in {self:?}"))
    }
}
