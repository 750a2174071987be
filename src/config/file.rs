//! Parses the TOML file into values with their line numbers, and suggests a known key for an unknown one.
//!
//! `value.rs` interprets the values. Begin at `read_config_file`.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::coordination::JobName;

use super::{ConfigError, GivenValue, ValueSource};

/// The values of one table.
pub type ValueTable = BTreeMap<String, GivenValue>;

/// The content of a configuration file.
#[derive(Debug, Default)]
pub struct ConfigFile {
    /// The keys outside of any table.
    pub top: ValueTable,
    /// `[bounds]`.
    pub bounds: ValueTable,
    /// `[jobs.NAME]`.
    pub jobs: BTreeMap<JobName, JobTomlTable>,
}

/// One `[jobs.NAME]`.
#[derive(Debug, Default)]
pub struct JobTomlTable {
    /// Its keys.
    pub values: ValueTable,
    /// `[jobs.NAME.bounds]`.
    pub bounds: ValueTable,
}

/// The keys that a file may contain.
pub struct KnownKeys<'a> {
    /// Keys outside of any table.
    pub top: &'a [&'a str],
    /// Keys in `[jobs.NAME]`.
    pub job: &'a [&'a str],
    /// Keys in `[bounds]` and `[jobs.NAME.bounds]`.
    pub bounds: &'a [&'a str],
}

/// Reads the file at `path`.
///
/// # Errors
/// If the file cannot be read, is no valid TOML, or has unknown keys.
pub fn read_config_file(path: &Path, known: &KnownKeys<'_>) -> Result<ConfigFile, ConfigError> {
    let text = std::fs::read_to_string(path)
        .map_err(|error| ConfigError::Unreadable { path: path.into(), error: error.to_string() })?;
    parse_config_file(path, &text, known)
}

/// Parses the text of a configuration file. Errors name `path` as its path.
pub(super) fn parse_config_file(
    path: &Path,
    text: &str,
    known: &KnownKeys<'_>,
) -> Result<ConfigFile, ConfigError> {
    let reader = ConfigFileReader { path: path.into(), text };
    let document = DeTable::parse(text).map_err(|error| ConfigError::NotToml {
        place: reader.line_source(error.span().map_or(0, |span| span.start)),
        wrong: error.message().into(),
    })?;
    let mut file = ConfigFile::default();
    for (key, value) in document.get_ref() {
        match key.get_ref().as_ref() {
            "bounds" => file.bounds = reader.read_values("bounds", value, known.bounds, &[])?,
            "jobs" => file.jobs = reader.read_job_tables(value, known)?,
            _ => reader.read_value("", key, value, known.top, &["bounds", "jobs"], &mut file.top)?,
        }
    }
    Ok(file)
}

struct ConfigFileReader<'a> {
    path: Arc<Path>,
    text: &'a str,
}

type SpannedKey<'a> = Spanned<std::borrow::Cow<'a, str>>;

impl ConfigFileReader<'_> {
    fn line_source(&self, offset: usize) -> ValueSource {
        let before = self.text.get(..offset).unwrap_or(self.text);
        ValueSource::File(Arc::clone(&self.path), before.matches('\n').count() + 1)
    }

    fn expect_table<'v, 'd>(
        &self,
        name: &str,
        value: &'v Spanned<DeValue<'d>>,
    ) -> Result<&'v DeTable<'d>, ConfigError> {
        value.get_ref().as_table().ok_or_else(|| ConfigError::Value {
            place: self.line_source(value.span().start),
            key: name.into(),
            value: value.get_ref().type_str().into(),
            wrong: format!("it is a table: write [{name}] on a line of its own, and its keys below"),
        })
    }

    fn read_job_tables(
        &self,
        value: &Spanned<DeValue<'_>>,
        known: &KnownKeys<'_>,
    ) -> Result<BTreeMap<JobName, JobTomlTable>, ConfigError> {
        let mut jobs = BTreeMap::new();
        for (key, value) in self.expect_table("jobs", value)? {
            let name = key.get_ref().parse::<JobName>().map_err(|error| ConfigError::Value {
                place: self.line_source(key.span().start),
                key: "jobs".into(),
                value: key.get_ref().to_string(),
                wrong: error.to_string(),
            })?;
            let path = format!("jobs.{name}");
            let mut job = JobTomlTable::default();
            for (key, value) in self.expect_table(&path, value)? {
                if key.get_ref() == "bounds" {
                    job.bounds = self.read_values(&format!("{path}.bounds"), value, known.bounds, &[])?;
                } else {
                    self.read_value(&path, key, value, known.job, &["bounds"], &mut job.values)?;
                }
            }
            jobs.insert(name, job);
        }
        Ok(jobs)
    }

    fn read_values(
        &self,
        table: &str,
        value: &Spanned<DeValue<'_>>,
        known: &[&str],
        tables: &[&str],
    ) -> Result<ValueTable, ConfigError> {
        let mut values = ValueTable::new();
        for (key, value) in self.expect_table(table, value)? {
            self.read_value(table, key, value, known, tables, &mut values)?;
        }
        Ok(values)
    }

    fn read_value(
        &self,
        table: &str,
        key: &SpannedKey<'_>,
        value: &Spanned<DeValue<'_>>,
        known: &[&str],
        tables: &[&str],
        values: &mut ValueTable,
    ) -> Result<(), ConfigError> {
        let name = key.get_ref().as_ref();
        if !known.contains(&name) {
            let known: Vec<&str> = known.iter().chain(tables).copied().collect();
            return Err(ConfigError::UnknownKey {
                place: self.line_source(key.span().start),
                key: qualified_name(table, name),
                hint: suggest_key(name, &known),
            });
        }
        let text = match value.get_ref() {
            DeValue::String(text) => text.to_string(),
            DeValue::Integer(number) if number.radix() == 10 => number.as_str().replace('_', ""),
            DeValue::Float(number) => number.as_str().into(),
            DeValue::Boolean(switch) => switch.to_string(),
            other => {
                return Err(ConfigError::Value {
                    place: self.line_source(value.span().start),
                    key: qualified_name(table, name),
                    value: other.type_str().into(),
                    wrong: "it is one value: write a quoted text, a decimal number, or true or false".into(),
                });
            }
        };
        let source = self.line_source(key.span().start);
        values.insert(name.into(), GivenValue { text, source });
        Ok(())
    }
}

fn qualified_name(table: &str, key: &str) -> String {
    if table.is_empty() { key.into() } else { format!("{table}.{key}") }
}

/// Returns a suggestion for an unknown key: the nearest known key, or all of them if none is near.
fn suggest_key(name: &str, known: &[&str]) -> String {
    let nearest = known.iter().map(|known| (strsim::levenshtein(name, known), known)).min();
    match nearest {
        Some((distance, known)) if distance <= 3 && distance < name.len() => {
            format!("did you mean `{known}`?")
        }
        _ => format!("the keys here are {}", known.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KNOWN: KnownKeys<'_> = KnownKeys {
        top: &["grpc", "heartbeat-timeout"],
        job: &["tasks", "grpc"],
        bounds: &["keys", "key-bytes"],
    };

    fn read_config_file(text: &str) -> Result<ConfigFile, String> {
        parse_config_file(Path::new("muster.toml"), text, &KNOWN).map_err(|error| error.to_string())
    }

    #[test]
    fn values_know_their_line() {
        let file = read_config_file(
            "# first\ngrpc = '127.0.0.1:1'\n[jobs.a]\ntasks = 1_000\n[jobs.a.bounds]\nkeys = 3\n",
        )
        .unwrap();
        assert_eq!(file.top["grpc"].source.to_string(), "muster.toml:2");
        let job = &file.jobs["a"];
        assert_eq!((job.values["tasks"].text.as_str(), job.bounds["keys"].text.as_str()), ("1000", "3"));
        assert_eq!(job.bounds["keys"].source.to_string(), "muster.toml:6");
    }

    #[test]
    fn unknown_keys_are_named_with_what_was_meant() {
        let error = read_config_file("\nheartbeat_timeout = '5s'").unwrap_err();
        assert!(error.contains("muster.toml:2") && error.contains("`heartbeat-timeout`"), "{error}");
        let error = read_config_file("[jobs.a]\ncolour = 1").unwrap_err();
        assert!(error.contains("jobs.a.colour") && error.contains("tasks, grpc, bounds"), "{error}");
        assert!(read_config_file("[bounds]\nkees = 1").unwrap_err().contains("did you mean `keys`"));
    }

    #[test]
    fn syntax_and_type_errors_name_their_line() {
        assert!(read_config_file("a = = 1").unwrap_err().contains("muster.toml:1"));
        assert!(read_config_file("jobs = 3").unwrap_err().contains("[jobs]"));
        assert!(read_config_file("[jobs]\na = 3").unwrap_err().contains("[jobs.a]"));
        assert!(read_config_file("[jobs.A]\ntasks = 3").unwrap_err().contains("lower-case"));
        assert!(read_config_file("grpc = ['a']").unwrap_err().contains("one value"));
    }
}
