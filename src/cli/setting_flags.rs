//! Builds the flags of all settings from the tables in `config/setting_definitions.rs`.
//!
//! `config` parses the values. Begin at `SettingFlags`.

use std::collections::BTreeMap;
use std::path::PathBuf;

use clap::builder::NonEmptyStringValueParser;
use clap::{Arg, ArgAction, ArgMatches};

use crate::config::{
    CommandLineConfig, Config, ConfigError, JOB_SETTINGS, JobSelection, SERVER_SETTINGS, ServerConfig,
    ServerProfile, Setting, SettingValue, environment_variable_name, load_config,
};
use crate::coordination::JobSettings;

/// The settings that `muster serve` takes as flags.
pub type ServeFlags = SettingFlags<true>;
/// The settings that `muster launch` takes as flags.
pub type LaunchFlags = SettingFlags<false>;

/// The given settings as text. The configuration parses them, so that an invalid value gets the same error
/// from every source. `SERVE` selects the defaults that the help shows.
#[derive(Debug, Clone, Default)]
pub struct SettingFlags<const SERVE: bool> {
    flags: BTreeMap<&'static str, String>,
    file: Option<PathBuf>,
}

impl<const SERVE: bool> SettingFlags<SERVE> {
    const PROFILE: ServerProfile = if SERVE { ServerProfile::Serve } else { ServerProfile::Launch };

    /// Loads the configuration with these `jobs`.
    pub fn load_config(&self, jobs: JobSelection) -> Result<Config, ConfigError> {
        let asked = CommandLineConfig {
            profile: Self::PROFILE,
            file: self.file.clone(),
            flags: self.flags.clone(),
            jobs,
        };
        load_config(&asked, &|name| std::env::var(name).ok())
    }

    /// Returns the value of a setting that was given as a flag.
    pub fn flag_value(&self, name: &str) -> Option<&str> {
        self.flags.get(name).map(String::as_str)
    }

    /// Returns the first setting that was given as a flag and is not in `allowed`.
    pub fn first_flag_not_in(&self, allowed: &[&str]) -> Option<&'static str> {
        self.flags.keys().copied().find(|name| !allowed.contains(name))
    }
}

impl<const SERVE: bool> clap::FromArgMatches for SettingFlags<SERVE> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let names = SERVER_SETTINGS.iter().map(|key| key.name).chain(JOB_SETTINGS.iter().map(|key| key.name));
        let flags = names.filter_map(|name| Some((name, matches.get_one::<String>(name)?.clone()))).collect();
        Ok(Self { flags, file: matches.get_one::<PathBuf>("config").cloned() })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl<const SERVE: bool> clap::Args for SettingFlags<SERVE> {
    fn augment_args(command: clap::Command) -> clap::Command {
        let server = ServerConfig::new(Self::PROFILE);
        let job = JobSettings::new(1);
        let command = JOB_SETTINGS.iter().fold(command, |command, key| {
            command.arg(clap_argument(key, &(key.show)(&job)).help_heading("Jobs"))
        });
        let command = SERVER_SETTINGS.iter().fold(command, |command, key| {
            command.arg(clap_argument(key, &(key.show)(&server)).help_heading("Server"))
        });
        command.arg(
            Arg::new("config")
                .long("config")
                .value_name("FILE")
                .value_parser(clap::value_parser!(PathBuf))
                .help("A TOML file with settings; `muster config print` shows one [env: MUSTER_CONFIG]")
                .help_heading("Server"),
        )
    }

    fn augment_args_for_update(command: clap::Command) -> clap::Command {
        Self::augment_args(command)
    }
}

fn clap_argument<T>(key: &Setting<T>, default: &SettingValue) -> Arg {
    let Setting { name, placeholder, help, is_advanced: rare, .. } = key;
    let default = match default {
        SettingValue::Text(text) => text.clone(),
        SettingValue::Number(number) => number.to_string(),
        SettingValue::Switch(switch) => switch.to_string(),
    };
    let argument = Arg::new(*name)
        .long(*name)
        .value_name(*placeholder)
        .hide_short_help(*rare)
        .value_parser(NonEmptyStringValueParser::new())
        .action(ArgAction::Set)
        .help(format!("{help} [default: {default}] [env: {}]", environment_variable_name(name)));
    if *placeholder == "true|false" {
        return argument.num_args(0..=1).require_equals(true).default_missing_value("true");
    }
    argument
}
