//! Combines flags, environment and file into `Config`.
//!
//! `value.rs` parses single values. Begin at `load_config`.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;

use serde::Deserialize as _;

use crate::coordination::{JobBounds, JobName, JobSettings};

use super::file::{self, ConfigFile, KnownKeys, ValueTable};
use super::setting_definitions::{JOB_SETTINGS, SERVER_SETTINGS, Setting, environment_variable_name};
use super::value::{SettingValue, parse_address, parse_job_spec, parse_task_count};
use super::{
    CommandLineConfig, Config, ConfigError, GivenValue, JobConfig, JobSelection, ResolvedValue, ServerConfig,
    ValueSource, bounds_table,
};

/// A function that reads an environment variable; of this process, except in tests.
pub type EnvironmentLookup<'a> = &'a dyn Fn(&str) -> Option<String>;

/// Combines the command line, the environment, the file and the defaults.
///
/// # Errors
/// The first error, with its place and what to do about it.
pub fn load_config(
    asked: &CommandLineConfig,
    environment: EnvironmentLookup<'_>,
) -> Result<Config, ConfigError> {
    let bound_defaults = bounds_table(&JobBounds::default());
    let path =
        asked.file.clone().or_else(|| look_up_variable(environment, "MUSTER_CONFIG").map(PathBuf::from));
    let file = match path {
        Some(path) => with_known_keys(&bound_defaults, |known| file::read_config_file(&path, known))?,
        None => ConfigFile::default(),
    };
    let loader = ConfigLoader { asked, environment, file };
    loader.load(&bound_defaults)
}

/// Calls `with` with the keys that a file may have.
fn with_known_keys<R>(bound_defaults: &BTreeMap<String, u64>, with: impl FnOnce(&KnownKeys<'_>) -> R) -> R {
    let job_keys = JOB_SETTINGS.iter().map(|key| key.name);
    let top: Vec<&str> =
        SERVER_SETTINGS.iter().map(|key| key.name).chain(job_keys.clone()).chain(["tasks"]).collect();
    let job: Vec<&str> = ["tasks", "grpc"].into_iter().chain(job_keys).collect();
    let bounds: Vec<&str> = bound_defaults.keys().map(String::as_str).collect();
    with(&KnownKeys { top: &top, job: &job, bounds: &bounds })
}

/// The property of configuration files: the output of `muster config print` means the same as its input.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn check_config_round_trip(input: &[u8]) {
    let Ok(text) = str::from_utf8(input) else { return };
    let jobs = JobSelection::Declared { tasks: None, jobs: Vec::new() };
    let asked =
        CommandLineConfig { profile: super::ServerProfile::Serve, file: None, flags: BTreeMap::new(), jobs };
    let bound_defaults = bounds_table(&JobBounds::default());
    let load = |text: &str| {
        let path = std::path::Path::new("muster.toml");
        let file = with_known_keys(&bound_defaults, |known| file::parse_config_file(path, text, known))?;
        ConfigLoader { asked: &asked, environment: &|_| None, file }.load(&bound_defaults)
    };
    let Ok(config) = load(text) else { return };
    let printed = config.to_toml_text();
    match load(&printed) {
        Ok(again) => assert_eq!((again.server, again.jobs), (config.server, config.jobs), "{printed}"),
        Err(error) => panic!("what is printed is refused: {error}\n{printed}"),
    }
}

fn look_up_variable(environment: EnvironmentLookup<'_>, name: &str) -> Option<String> {
    // An empty variable counts as unset, because container manifests write "not set" so.
    environment(name).filter(|text| !text.is_empty())
}

struct ConfigLoader<'a> {
    asked: &'a CommandLineConfig,
    environment: EnvironmentLookup<'a>,
    file: ConfigFile,
}

/// A declared job before its settings are known.
struct JobDeclaration {
    name: JobName,
    tasks: Option<(u32, ValueSource)>,
    grpc: Option<(SocketAddr, ValueSource)>,
}

impl ConfigLoader<'_> {
    fn load(&self, bound_defaults: &BTreeMap<String, u64>) -> Result<Config, ConfigError> {
        let mut values = Vec::new();
        let mut server = ServerConfig::new(self.asked.profile);
        let top = [&self.file.top];
        self.resolve_all_settings(&SERVER_SETTINGS, &mut server, "", &top, &mut values)?;
        let mut common = JobSettings::new(1);
        self.resolve_all_settings(&JOB_SETTINGS, &mut common, "", &top, &mut values)?;
        common.bounds = resolve_bounds(bound_defaults, "bounds", &[&self.file.bounds], &mut values)?;

        let mut jobs = Vec::new();
        for declaration in self.declared_jobs()? {
            jobs.push(self.resolve_job(declaration, &common, &mut values)?);
        }
        check_addresses_differ(&values)?;
        Ok(Config { server, jobs, values })
    }

    /// Sets every given key of `target`, the strongest source first, and records the values.
    fn resolve_all_settings<T>(
        &self,
        keys: &[Setting<T>],
        target: &mut T,
        table: &str,
        tables: &[&ValueTable],
        values: &mut Vec<ResolvedValue>,
    ) -> Result<(), ConfigError> {
        for key in keys {
            let mut source = ValueSource::Default;
            if let Some(given) = self.highest_precedence_value(key.name, tables) {
                (key.set)(target, &given.text).map_err(|wrong| value_error(&given, key.name, wrong))?;
                source = given.source;
            }
            values.push(ResolvedValue {
                table: table.into(),
                key: key.name.into(),
                shown: (key.show)(target),
                source,
            });
        }
        Ok(())
    }

    fn highest_precedence_value(&self, key: &str, tables: &[&ValueTable]) -> Option<GivenValue> {
        if let Some(text) = self.asked.flags.get(key) {
            return Some(GivenValue { text: text.clone(), source: ValueSource::Flag(format!("--{key}")) });
        }
        let name = environment_variable_name(key);
        if let Some(text) = look_up_variable(self.environment, &name) {
            return Some(GivenValue { text, source: ValueSource::Environment(name) });
        }
        tables.iter().find_map(|table| table.get(key)).cloned()
    }

    fn resolve_job(
        &self,
        declaration: JobDeclaration,
        common: &JobSettings,
        values: &mut Vec<ResolvedValue>,
    ) -> Result<JobConfig, ConfigError> {
        let JobDeclaration { name, tasks, grpc } = declaration;
        let nothing = file::JobTomlTable::default();
        let own = self.file.jobs.get(&name).unwrap_or(&nothing);
        let table = format!("jobs.{name}");
        let Some((tasks, source)) = tasks else {
            let place = own.values.values().map(|given| given.source.clone()).min();
            return Err(ConfigError::NoTasks { place: place.unwrap_or(ValueSource::Default), name });
        };
        let mut note = |key: &str, shown, source| {
            values.push(ResolvedValue { table: table.clone(), key: key.into(), shown, source });
        };
        note("tasks", SettingValue::Number(u64::from(tasks)), source);
        let grpc = grpc.map(|(address, source)| {
            note("grpc", SettingValue::Text(address.to_string()), source);
            address
        });
        let mut settings = JobSettings { tasks, ..common.clone() };
        self.resolve_all_settings(
            &JOB_SETTINGS,
            &mut settings,
            &table,
            &[&own.values, &self.file.top],
            values,
        )?;
        if !own.bounds.is_empty() {
            let common = bounds_table(&common.bounds);
            let mut all = Vec::new();
            settings.bounds = resolve_bounds(&common, &format!("{table}.bounds"), &[&own.bounds], &mut all)?;
            // Defaults of bounds are printed under [bounds].
            values.extend(all.into_iter().filter(|value| value.source != ValueSource::Default));
        }
        Ok(JobConfig { name, grpc, settings })
    }

    /// Returns the declared jobs in the order of their sources; a stronger source comes later and overrides.
    fn declared_jobs(&self) -> Result<Vec<JobDeclaration>, ConfigError> {
        if let JobSelection::Only { name, tasks } = &self.asked.jobs {
            let tasks = Some((*tasks, ValueSource::Flag("-n".into())));
            return Ok(vec![JobDeclaration { name: name.clone(), tasks, grpc: None }]);
        }
        let mut declared = Vec::new();
        for layer in [
            self.jobs_declared_by_file()?,
            self.jobs_declared_by_environment()?,
            self.jobs_declared_by_flags()?,
        ] {
            let mut seen: BTreeMap<JobName, ValueSource> = BTreeMap::new();
            for new in layer {
                let source = new.tasks.as_ref().map_or(ValueSource::Default, |(_, source)| source.clone());
                if let Some(first) = seen.insert(new.name.clone(), source.clone()) {
                    return Err(ConfigError::JobTwice { name: new.name, first, second: source });
                }
                match declared.iter_mut().find(|old: &&mut JobDeclaration| old.name == new.name) {
                    Some(old) => {
                        old.tasks = new.tasks.or(old.tasks.take());
                        old.grpc = new.grpc.or(old.grpc.take());
                    }
                    None => declared.push(new),
                }
            }
        }
        Ok(declared)
    }

    fn jobs_declared_by_file(&self) -> Result<Vec<JobDeclaration>, ConfigError> {
        let mut declared = Vec::new();
        if let Some(given) = self.file.top.get("tasks") {
            declared.push(parse_default_job(given)?);
        }
        for (name, job) in &self.file.jobs {
            let tasks = parse_given_value(job.values.get("tasks"), "tasks", parse_task_count)?;
            let grpc = parse_given_value(job.values.get("grpc"), "grpc", parse_address)?;
            declared.push(JobDeclaration { name: name.clone(), tasks, grpc });
        }
        // The default job is the first one, however the file declares it.
        declared.sort_by_key(|job| job.name.as_str() != JobName::DEFAULT);
        Ok(declared)
    }

    fn jobs_declared_by_environment(&self) -> Result<Vec<JobDeclaration>, ConfigError> {
        let mut declared = Vec::new();
        let given = |name: &str| {
            let source = ValueSource::Environment(name.into());
            look_up_variable(self.environment, name).map(|text| GivenValue { text, source })
        };
        if let Some(given) = given("MUSTER_TASKS") {
            declared.push(parse_default_job(&given)?);
        }
        if let Some(given) = given("MUSTER_JOBS") {
            for text in given.text.split(',').map(str::trim).filter(|text| !text.is_empty()) {
                declared.push(parse_job_declaration(
                    &GivenValue { text: text.into(), source: given.source.clone() },
                    "jobs",
                )?);
            }
        }
        Ok(declared)
    }

    fn jobs_declared_by_flags(&self) -> Result<Vec<JobDeclaration>, ConfigError> {
        let JobSelection::Declared { tasks, jobs } = &self.asked.jobs else { return Ok(Vec::new()) };
        let mut declared = Vec::new();
        if let Some(text) = tasks {
            declared.push(parse_default_job(&GivenValue {
                text: text.clone(),
                source: ValueSource::Flag("--tasks".into()),
            })?);
        }
        for text in jobs {
            let source = ValueSource::Flag("--job".into());
            declared.push(parse_job_declaration(&GivenValue { text: text.clone(), source }, "job")?);
        }
        Ok(declared)
    }
}

fn parse_default_job(given: &GivenValue) -> Result<JobDeclaration, ConfigError> {
    let tasks = parse_given_value(Some(given), "tasks", parse_task_count)?;
    Ok(JobDeclaration { name: JobName::default(), tasks, grpc: None })
}

fn parse_job_declaration(given: &GivenValue, key: &str) -> Result<JobDeclaration, ConfigError> {
    let job = parse_job_spec(&given.text).map_err(|wrong| value_error(given, key, wrong))?;
    let source = given.source.clone();
    let grpc = job.grpc.map(|address| (address, source.clone()));
    Ok(JobDeclaration { name: job.name, tasks: Some((job.tasks, source)), grpc })
}

/// Returns the value of a key with its source, if it is given.
fn parse_given_value<T>(
    given: Option<&GivenValue>,
    key: &str,
    parse: impl FnOnce(&str) -> Result<T, String>,
) -> Result<Option<(T, ValueSource)>, ConfigError> {
    let Some(given) = given else { return Ok(None) };
    let value = parse(&given.text).map_err(|wrong| value_error(given, key, wrong))?;
    Ok(Some((value, given.source.clone())))
}

fn value_error(given: &GivenValue, key: &str, wrong: String) -> ConfigError {
    ConfigError::Value { place: given.source.clone(), key: key.into(), value: given.text.clone(), wrong }
}

fn resolve_bounds(
    defaults: &BTreeMap<String, u64>,
    table: &str,
    tables: &[&ValueTable],
    values: &mut Vec<ResolvedValue>,
) -> Result<JobBounds, ConfigError> {
    let mut settled = toml::Table::new();
    for (key, default) in defaults {
        let (number, source) = match tables.iter().find_map(|table| table.get(key)) {
            Some(given) => {
                let wrong = |wrong: &str| value_error(given, &format!("{table}.{key}"), wrong.into());
                let number = given.text.parse::<u64>().ok().filter(|number| i64::try_from(*number).is_ok());
                let number = number.ok_or_else(|| wrong("write a whole number, such as 1048576"))?;
                // A bound on history may be 0; a bound on what is needed to work may not.
                if number == 0 && !key.ends_with("-kept") {
                    return Err(wrong("it must be at least 1: nothing would be allowed at all"));
                }
                (number, given.source.clone())
            }
            None => (*default, ValueSource::Default),
        };
        settled.insert(key.clone(), i64::try_from(number).unwrap_or(i64::MAX).into());
        values.push(ResolvedValue {
            table: table.into(),
            key: key.clone(),
            shown: SettingValue::Number(number),
            source,
        });
    }
    JobBounds::deserialize(settled).map_err(|error| ConfigError::Value {
        place: ValueSource::Default,
        key: table.into(),
        value: String::new(),
        wrong: error.to_string(),
    })
}

/// Checks that no two listeners have the same address. This error names both places; that of the operating
/// system would not.
fn check_addresses_differ(values: &[ResolvedValue]) -> Result<(), ConfigError> {
    let mut taken: Vec<(SocketAddr, &ResolvedValue)> = Vec::new();
    for value in values {
        let SettingValue::Text(text) = &value.shown else { continue };
        if !matches!(value.key.as_str(), "grpc" | "http" | "health" | "metrics") {
            continue;
        }
        let Ok(address) = text.parse::<SocketAddr>() else { continue };
        let collides = |other: &SocketAddr| {
            let same_family = other.is_ipv4() == address.is_ipv4();
            let everywhere = other.ip().is_unspecified() || address.ip().is_unspecified();
            other.port() == address.port() && (other.ip() == address.ip() || (same_family && everywhere))
        };
        if address.port() != 0 {
            if let Some((_, first)) = taken.iter().find(|(other, _)| collides(other)) {
                let taken_by = format!("{} ({})", qualified_name(first), first.source);
                let place = value.source.clone();
                return Err(ConfigError::AddressTwice {
                    place,
                    key: qualified_name(value),
                    address,
                    taken_by,
                });
            }
            taken.push((address, value));
        }
    }
    Ok(())
}

fn qualified_name(value: &ResolvedValue) -> String {
    if value.table.is_empty() { value.key.clone() } else { format!("{}.{}", value.table, value.key) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ServerProfile;
    use std::time::Duration;

    fn command_line_config(flags: &[(&'static str, &str)], jobs: &[&str]) -> CommandLineConfig {
        CommandLineConfig {
            profile: ServerProfile::Serve,
            file: None,
            flags: flags.iter().map(|(key, text)| (*key, (*text).into())).collect(),
            jobs: JobSelection::Declared {
                tasks: None,
                jobs: jobs.iter().map(|job| (*job).into()).collect(),
            },
        }
    }

    fn file(name: &str, text: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("muster-config-{}-{name}.toml", std::process::id()));
        std::fs::write(&path, text).unwrap();
        path
    }

    fn load_config_from(asked: &CommandLineConfig, variables: &[(&str, &str)]) -> Result<Config, String> {
        let find = |name: &str| variables.iter().find(|(n, _)| *n == name).map(|(_, text)| (*text).into());
        load_config(asked, &find).map_err(|error| error.to_string())
    }

    #[test]
    fn a_flag_is_stronger_than_the_environment_and_that_than_the_file() {
        let text = "heartbeat-timeout = '1s'\nshutdown-timeout = '1s'\nregister-timeout = '1s'\n\
                    [jobs.a]\ntasks = 2\nheartbeat-timeout = '9s'\nregister-timeout = '9s'\n";
        let mut command_line_config = command_line_config(&[("heartbeat-timeout", "3s")], &[]);
        command_line_config.file = Some(file("precedence", text));
        let config = load_config_from(
            &command_line_config,
            &[("MUSTER_HEARTBEAT_TIMEOUT", "2s"), ("MUSTER_SHUTDOWN_TIMEOUT", "2s")],
        )
        .unwrap();
        let settings = &config.jobs[0].settings;
        assert_eq!(settings.heartbeat_timeout, Duration::from_secs(3));
        assert_eq!(settings.shutdown_timeout, Duration::from_secs(2));
        assert_eq!(settings.register_timeout, Duration::from_secs(9));
        assert_eq!(settings.disconnect_grace, Some(Duration::from_millis(500)));
    }

    #[test]
    fn jobs_add_up_and_the_stronger_source_counts_their_tasks() {
        let mut command_line_config = command_line_config(&[], &["a=8", "c=1@127.0.0.1:9001"]);
        command_line_config.file =
            Some(file("jobs", "[jobs.a]\ntasks = 2\ngrpc = '127.0.0.1:9000'\n[jobs.b]\ntasks = 3\n"));
        let config = load_config_from(&command_line_config, &[("MUSTER_JOBS", "d=4, b=5")]).unwrap();
        let jobs: Vec<_> = config
            .jobs
            .iter()
            .map(|job| (job.name.as_str(), job.settings.tasks, job.grpc.is_some()))
            .collect();
        assert_eq!(jobs, [("a", 8, true), ("b", 5, false), ("d", 4, false), ("c", 1, true)]);
    }

    #[test]
    fn a_launch_knows_its_own_job_only() {
        let mut command_line_config = command_line_config(&[], &[]);
        command_line_config.file = Some(file("only", "[jobs.a]\nrecoverable = true\n[jobs.b]\ntasks = 3\n"));
        command_line_config.jobs = JobSelection::Only { name: "a".parse().unwrap(), tasks: 5 };
        let config = load_config_from(&command_line_config, &[("MUSTER_TASKS", "9")]).unwrap();
        assert_eq!(config.jobs.len(), 1);
        assert!(config.jobs[0].settings.recoverable && config.jobs[0].settings.tasks == 5);
    }

    #[test]
    fn nonsense_is_refused_with_its_place() {
        let error =
            load_config_from(&command_line_config(&[("heartbeat-timeout", "0s")], &[]), &[]).unwrap_err();
        assert!(error.contains("--heartbeat-timeout") && error.contains("longer than zero"), "{error}");
        let error = load_config_from(&command_line_config(&[], &[]), &[("MUSTER_ERROR_DELIVERY", "never")])
            .unwrap_err();
        assert!(error.contains("MUSTER_ERROR_DELIVERY") && error.contains("hold or cancel"), "{error}");
        let error = load_config_from(&command_line_config(&[], &["a=1", "a=2"]), &[]).unwrap_err();
        assert!(error.contains("`a`"), "{error}");
        let error =
            load_config_from(&command_line_config(&[("http", "0.0.0.0:8476")], &[]), &[]).unwrap_err();
        assert!(error.contains("--http") && error.contains("grpc (default)"), "{error}");
        let mut command_line_config = command_line_config(&[], &[]);
        command_line_config.file = Some(file("tasks", "[jobs.a]\nrecoverable = true\n"));
        assert!(load_config_from(&command_line_config, &[]).unwrap_err().contains("tasks = N"));
        command_line_config.file = Some(file("bounds", "[bounds]\nkeys = 0\n"));
        assert!(load_config_from(&command_line_config, &[]).unwrap_err().contains("at least 1"));
    }

    #[test]
    fn bounds_of_a_job_override_the_common_ones() {
        let mut command_line_config = command_line_config(&[], &["b=1"]);
        command_line_config.file = Some(file(
            "own-bounds",
            "[bounds]\nkeys = 7\nwaiters = 8\n[jobs.a]\ntasks = 1\n[jobs.a.bounds]\nkeys = 9\n",
        ));
        let config = load_config_from(&command_line_config, &[]).unwrap();
        let bounds = |n: usize| &config.jobs[n].settings.bounds;
        assert_eq!((bounds(0).keys, bounds(0).waiters), (9, 8));
        assert_eq!((bounds(1).keys, bounds(1).waiters), (7, 8));
        assert_eq!(bounds(1).key_bytes, JobBounds::default().key_bytes);
    }

    #[test]
    fn the_printed_configuration_reads_back_the_same() {
        let mut first = command_line_config(&[("disconnect-grace", "off")], &["b=2@127.0.0.1:9000"]);
        first.file =
            Some(file("print", "[jobs.a]\ntasks = 1\nrecoverable = true\n[jobs.a.bounds]\nkeys = 9\n"));
        let printed = load_config_from(&first, &[]).unwrap();
        let mut second = command_line_config(&[], &[]);
        second.file = Some(file("printed", &printed.to_toml_text()));
        let read = load_config_from(&second, &[]).unwrap();
        assert_eq!((&read.server, &read.jobs), (&printed.server, &printed.jobs));
    }
}
