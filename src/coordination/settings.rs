//! The settings of a job, their defaults, and the bounds on what one job may hold.
//!
//! `config` reads settings from files and flags, and `job_settings.rs` applies changes to an existing job. Begin at
//! [`JobSettings`] and [`JobBounds`].

use std::collections::BTreeSet;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::ids::JobName;

/// The greatest number of tasks of a job. It is far above any cluster; within it every table fits into
/// memory.
pub const TASKS_MAX: u32 = 1_000_000;
/// The greatest number of jobs that one job may exchange transfers with.
pub const PEER_JOBS_MAX: usize = 64;

/// The way in which the first error of a run reaches tasks that poll for it.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ErrorDelivery {
    /// `cancel` for recoverable jobs, whose polls carry no error; `hold` otherwise.
    #[default]
    Auto,
    /// Polls are held until there is an error: errors arrive at once, and a broken connection ends a client's
    /// process.
    Hold,
    /// Polls are answered with CANCELLED at once: clients stop polling, survive a lost connection, and learn
    /// of errors with their next heartbeat.
    Cancel,
}

/// A finding upon which a job may exclude the task that it names, for a limited time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
#[schema(as = ActingRule)]
pub enum AutoExcludeRule {
    /// A task sends heartbeats, and all others wait for it at a barrier.
    StalledTask,
    /// A task arrives late at barriers every time.
    ChronicStraggler,
    /// A task restarts again and again within one run.
    RestartStorm,
    /// A GPU is lost to its process.
    FatalGpuError,
    /// All others wait for a task in a collective, and the times on the GPUs show that it alone is the cause.
    CollectiveStuck,
}

impl AutoExcludeRule {
    /// Every rule.
    pub const ALL: [Self; 5] = [
        Self::StalledTask,
        Self::ChronicStraggler,
        Self::RestartStorm,
        Self::FatalGpuError,
        Self::CollectiveStuck,
    ];

    /// Returns the name of the rule, which is that of the finding.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::StalledTask => "stalled-task",
            Self::ChronicStraggler => "chronic-straggler",
            Self::RestartStorm => "restart-storm",
            Self::FatalGpuError => "fatal-gpu-error",
            Self::CollectiveStuck => "collective-stuck",
        }
    }
}

/// The settings of a job. None of them is on the wire.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct JobSettings {
    /// The number of tasks: their ids are `0..tasks`.
    pub tasks: u32,
    /// Whether tasks may fail and return without ending the run.
    pub recoverable: bool,
    /// The silence after which a connected task has failed.
    #[serde(with = "humantime_serde")]
    #[schema(value_type = String)]
    pub heartbeat_timeout: Duration,
    /// The timeout of the registration barrier.
    #[serde(with = "humantime_serde")]
    #[schema(value_type = String)]
    pub register_timeout: Duration,
    /// The timeout of the shutdown barrier; zero: tasks shut down without waiting.
    #[serde(with = "humantime_serde")]
    #[schema(value_type = String)]
    pub shutdown_timeout: Duration,
    /// The time in which a task may return whose connection broke while no error poll was held on it; `None`:
    /// only missing heartbeats fail a task.
    #[serde(with = "humantime_serde")]
    #[schema(value_type = Option<String>)]
    pub disconnect_grace: Option<Duration>,
    /// The way in which errors are delivered.
    pub error_delivery: ErrorDelivery,
    /// Findings upon which the job excludes the task that they name. None by default: a detector alone is
    /// harmless.
    pub auto_exclude: BTreeSet<AutoExcludeRule>,
    /// The duration of such an exclusion.
    #[serde(with = "humantime_serde")]
    #[schema(value_type = String)]
    pub auto_exclude_for: Duration,
    /// The jobs whose tasks may exchange transfers with those of this job. Both jobs must list each other.
    #[serde(default)]
    pub transfers_with: BTreeSet<JobName>,
    /// The bounds on what the job may hold.
    pub bounds: JobBounds,
}

impl JobSettings {
    /// Returns the defaults for a job of `tasks` tasks: those of JAX where JAX has them.
    #[must_use]
    pub fn new(tasks: u32) -> Self {
        Self {
            tasks,
            recoverable: false,
            heartbeat_timeout: Duration::from_secs(100),
            register_timeout: Duration::from_secs(60 * 60),
            shutdown_timeout: Duration::from_secs(5 * 60),
            disconnect_grace: Some(Duration::from_millis(500)),
            error_delivery: ErrorDelivery::Auto,
            auto_exclude: BTreeSet::new(),
            auto_exclude_for: Duration::from_secs(60 * 60),
            transfers_with: BTreeSet::new(),
            bounds: JobBounds::default(),
        }
    }

    /// Returns the names of the settings that differ from `other`.
    pub(super) fn changed_setting_names(&self, other: &Self) -> Vec<String> {
        let pairs = [
            ("tasks", self.tasks != other.tasks),
            ("recoverable", self.recoverable != other.recoverable),
            ("heartbeat-timeout", self.heartbeat_timeout != other.heartbeat_timeout),
            ("register-timeout", self.register_timeout != other.register_timeout),
            ("shutdown-timeout", self.shutdown_timeout != other.shutdown_timeout),
            ("disconnect-grace", self.disconnect_grace != other.disconnect_grace),
            ("error-delivery", self.error_delivery != other.error_delivery),
            ("auto-exclude", self.auto_exclude != other.auto_exclude),
            ("auto-exclude-for", self.auto_exclude_for != other.auto_exclude_for),
            ("transfers-with", self.transfers_with != other.transfers_with),
            ("bounds", self.bounds != other.bounds),
        ];
        pairs.into_iter().filter(|(_, differs)| *differs).map(|(name, _)| name.to_owned()).collect()
    }

    /// Returns whether polls are held until there is an error.
    #[must_use]
    pub fn holds_error_polls(&self) -> bool {
        match self.error_delivery {
            ErrorDelivery::Auto => !self.recoverable,
            ErrorDelivery::Hold => true,
            ErrorDelivery::Cancel => false,
        }
    }
}

/// New values for some settings of a job; a setting that is `None` stays as it is.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SettingsChange {
    /// [`JobSettings::tasks`]
    pub tasks: Option<u32>,
    /// [`JobSettings::recoverable`]
    pub recoverable: Option<bool>,
    /// [`JobSettings::heartbeat_timeout`]
    pub heartbeat_timeout: Option<Duration>,
    /// [`JobSettings::register_timeout`]
    pub register_timeout: Option<Duration>,
    /// [`JobSettings::shutdown_timeout`]
    pub shutdown_timeout: Option<Duration>,
    /// [`JobSettings::disconnect_grace`]
    pub disconnect_grace: Option<Option<Duration>>,
    /// [`JobSettings::error_delivery`]
    pub error_delivery: Option<ErrorDelivery>,
    /// [`JobSettings::auto_exclude`]
    pub auto_exclude: Option<BTreeSet<AutoExcludeRule>>,
    /// [`JobSettings::auto_exclude_for`]
    pub auto_exclude_for: Option<Duration>,
    /// [`JobSettings::transfers_with`], all of them.
    pub transfers_with: Option<BTreeSet<JobName>>,
    /// [`JobSettings::bounds`], all of them.
    pub bounds: Option<JobBounds>,
}

impl SettingsChange {
    /// Returns the change that gives `after` to each setting that differs from `before`; without `before`, to each setting.
    #[must_use]
    pub fn between(before: Option<&JobSettings>, after: &JobSettings) -> Self {
        fn changed<T: Clone + PartialEq>(
            before: Option<&JobSettings>,
            after: &JobSettings,
            setting: impl Fn(&JobSettings) -> &T,
        ) -> Option<T> {
            let new = setting(after);
            (before.map(&setting) != Some(new)).then(|| new.clone())
        }
        Self {
            tasks: changed(before, after, |it| &it.tasks),
            recoverable: changed(before, after, |it| &it.recoverable),
            heartbeat_timeout: changed(before, after, |it| &it.heartbeat_timeout),
            register_timeout: changed(before, after, |it| &it.register_timeout),
            shutdown_timeout: changed(before, after, |it| &it.shutdown_timeout),
            disconnect_grace: changed(before, after, |it| &it.disconnect_grace),
            error_delivery: changed(before, after, |it| &it.error_delivery),
            auto_exclude: changed(before, after, |it| &it.auto_exclude),
            auto_exclude_for: changed(before, after, |it| &it.auto_exclude_for),
            transfers_with: changed(before, after, |it| &it.transfers_with),
            bounds: changed(before, after, |it| &it.bounds),
        }
    }

    /// Returns the settings after the change.
    ///
    /// # Errors
    /// If a value is invalid; the text says what to give instead.
    pub fn apply_to(self, present: &JobSettings) -> Result<JobSettings, &'static str> {
        if self.tasks == Some(0) {
            return Err("a job has at least one task");
        }
        let never = |timeout: Option<Duration>| timeout.is_some_and(|timeout| timeout.is_zero());
        if never(self.heartbeat_timeout) || never(self.register_timeout) {
            return Err("the heartbeat timeout and the register timeout must be longer than zero");
        }
        if self.transfers_with.as_ref().is_some_and(|jobs| jobs.len() > PEER_JOBS_MAX) {
            return Err("transfers-with names at most 64 jobs");
        }
        Ok(JobSettings {
            tasks: self.tasks.unwrap_or(present.tasks),
            recoverable: self.recoverable.unwrap_or(present.recoverable),
            heartbeat_timeout: self.heartbeat_timeout.unwrap_or(present.heartbeat_timeout),
            register_timeout: self.register_timeout.unwrap_or(present.register_timeout),
            shutdown_timeout: self.shutdown_timeout.unwrap_or(present.shutdown_timeout),
            disconnect_grace: self.disconnect_grace.unwrap_or(present.disconnect_grace),
            error_delivery: self.error_delivery.unwrap_or(present.error_delivery),
            auto_exclude: self.auto_exclude.unwrap_or_else(|| present.auto_exclude.clone()),
            auto_exclude_for: self.auto_exclude_for.unwrap_or(present.auto_exclude_for),
            transfers_with: self.transfers_with.unwrap_or_else(|| present.transfers_with.clone()),
            bounds: self.bounds.unwrap_or_else(|| present.bounds.clone()),
        })
    }
}

/// The bounds on what one job may hold. A request that would exceed one is refused with RESOURCE_EXHAUSTED
/// and changes nothing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = Bounds)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct JobBounds {
    /// Length of a key, in bytes.
    pub key_bytes: usize,
    /// Length of a value, in bytes.
    pub value_bytes: usize,
    /// Keys and values of one run together, in bytes.
    pub store_bytes: usize,
    /// Number of keys of one run.
    pub keys: usize,
    /// Number of waiting calls, of all callers together.
    pub waiters: usize,
    /// Keys that calls wait for, together, in bytes.
    pub waited_key_bytes: usize,
    /// Length of a barrier id, in bytes.
    pub barrier_id_bytes: usize,
    /// Barriers in progress at once.
    pub barriers_in_progress: usize,
    /// Number of members of all barriers in progress, added up.
    pub barrier_members_in_progress: usize,
    /// Devices that tasks exchange (generation A), together, in bytes.
    pub exchanged_device_bytes: usize,
    /// Memory for the results and counters of ended barriers, in bytes. When it is full, barriers with one
    /// instance that ended longest ago are evicted first.
    pub barrier_memory_bytes: usize,
    /// Number of records of ended barriers that are kept of one run, for pages and the API.
    pub barriers_recent: usize,
    /// Live-set requests in progress at once (one for each set of tasks).
    pub live_sets_in_progress: usize,
    /// Number of ended runs that are kept.
    pub runs_kept: usize,
    /// Number of past incarnations that are kept for each task.
    pub incarnations_kept: usize,
    /// Exclusions in force at once.
    pub exclusions: usize,
    /// Number of ended exclusions that are kept.
    pub exclusions_kept: usize,
    /// Length of an error message that a task reports, in bytes; the rest is cut off.
    pub error_message_bytes: usize,
}

impl Default for JobBounds {
    fn default() -> Self {
        Self {
            key_bytes: 64 << 10,
            value_bytes: 256 << 20,
            store_bytes: 2 << 30,
            keys: 1 << 20,
            waiters: 1 << 18,
            waited_key_bytes: 64 << 20,
            barrier_id_bytes: 4 << 10,
            barriers_in_progress: 1 << 14,
            barrier_members_in_progress: 1 << 22,
            exchanged_device_bytes: 64 << 20,
            barrier_memory_bytes: 32 << 20,
            barriers_recent: 256,
            live_sets_in_progress: 1 << 10,
            runs_kept: 64,
            incarnations_kept: 16,
            exclusions: 1 << 10,
            exclusions_kept: 256,
            error_message_bytes: 16 << 10,
        }
    }
}
