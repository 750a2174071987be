//! Defines a story: the file that says how large a simulated job is, how its tasks behave, and what happens to them.
//!
//! `schedule.rs` computes from a story which action comes when. Begin at [`Story::parse`], then [`Story::check`].

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;

use super::layout::ClusterLayout;
use super::story_values::{NumberRanges, PositiveStoryDuration, StoryDuration};
use crate::agent::DEVICES_MAX;
use crate::text::format_exact_duration;

/// The most tasks of a simulated job.
pub const SIMULATED_TASKS_MAX: u32 = 100_000;
/// The most hosts of a simulated job.
pub const SIMULATED_HOSTS_MAX: u32 = 10_000;
/// The longest story file, in bytes.
const STORY_BYTES_MAX: u64 = 1 << 20;
/// The most events of a story.
const EVENTS_MAX: usize = 1000;
/// The most collectives of a step.
pub const COLLECTIVES_MAX: u32 = 1000;
/// The shortest interval at which an event repeats.
const EVERY_MIN: Duration = Duration::from_millis(100);
/// The shortest step and the shortest interval between heartbeats.
const STEP_MIN: Duration = Duration::from_millis(10);

/// Why a story cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum StoryError {
    /// The file cannot be read.
    #[error("cannot read the story {}: {error}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The error of the operating system.
        error: std::io::Error,
    },
    /// The file is not TOML, or has a wrong or a missing key.
    #[error("the story is not understood: {0}")]
    Syntax(String),
    /// This program has no story of this name.
    #[error("there is no story {name:?}: name one of {names}, or a file")]
    Unknown {
        /// The name.
        name: String,
        /// The names of the stories.
        names: String,
    },
    /// Too many tasks share a connection, or a connection has no task.
    #[error("{given} connections are not possible for {tasks} tasks: use {least} to {tasks}")]
    Connections {
        /// The number of connections.
        given: u32,
        /// The number of tasks.
        tasks: u32,
        /// The least number of connections.
        least: u32,
    },
    /// A value is impossible.
    #[error("the story is not possible: {field}: {problem}")]
    Value {
        /// The key, such as `events[1].by`; the events are counted from 0.
        field: String,
        /// The problem, and what to write.
        problem: String,
    },
}

impl StoryError {
    fn value(field: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Value { field: field.into(), problem: problem.into() }
    }
}

/// A story.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Story {
    /// A sentence about what happens.
    pub description: String,
    /// The number of tasks.
    pub tasks: u32,
    /// The number of hosts.
    pub hosts: u32,
    /// The number of devices of each task.
    #[serde(default = "default_devices")]
    pub devices_per_task: u32,
    /// The seed of everything that is random.
    #[serde(default)]
    pub seed: u64,
    /// The length of the story; without it, the story goes on until it is stopped.
    #[serde(default, rename = "for")]
    pub length: Option<PositiveStoryDuration>,
    /// The settings of the job.
    #[serde(default)]
    pub job: StoryJob,
    /// The behaviour of all tasks.
    #[serde(default)]
    pub workers: StoryWorkers,
    /// The steps of the tasks.
    #[serde(default)]
    pub steps: StorySteps,
    /// The collectives of each step; without them, a step has none.
    pub collectives: Option<StoryCollectives>,
    /// The events.
    #[serde(default)]
    pub events: Vec<StoryEvent>,
}

const fn default_devices() -> u32 {
    1
}

/// The settings of the job that a story needs.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct StoryJob {
    /// Tasks may fail and return without ending the run.
    pub recoverable: bool,
    /// The silence after which a task has failed.
    pub heartbeat_timeout: PositiveStoryDuration,
}

impl Default for StoryJob {
    fn default() -> Self {
        Self { recoverable: true, heartbeat_timeout: PositiveStoryDuration(Duration::from_secs(10)) }
    }
}

/// The behaviour of all tasks of a story.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct StoryWorkers {
    /// The interval between heartbeats; half of the heartbeat timeout if it is not given, as in JAX.
    pub heartbeat_interval: Option<PositiveStoryDuration>,
    /// The tasks publish the identities of their hosts, as the processes of `muster launch` do.
    pub identities: bool,
    /// The tasks publish their devices, as JAX processes do.
    pub topology: bool,
    /// The time over which the tasks start.
    pub start_spread: StoryDuration,
    /// The time after which a task starts again that has ended with an error; without it, the task stays away.
    pub restart_delay: Option<StoryDuration>,
}

impl Default for StoryWorkers {
    fn default() -> Self {
        Self {
            heartbeat_interval: None,
            identities: true,
            topology: true,
            start_spread: StoryDuration(Duration::from_secs(1)),
            restart_delay: Some(StoryDuration(Duration::from_secs(2))),
        }
    }
}

/// The steps of the tasks: each step computes and ends at a barrier of all tasks.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct StorySteps {
    /// The time that each task computes.
    pub time: PositiveStoryDuration,
    /// The greatest time that is added to it at random, for each task and step.
    pub spread: StoryDuration,
    /// The timeout of the barrier.
    pub timeout: PositiveStoryDuration,
}

impl Default for StorySteps {
    fn default() -> Self {
        Self {
            time: PositiveStoryDuration(Duration::from_secs(2)),
            spread: StoryDuration(Duration::from_millis(100)),
            timeout: PositiveStoryDuration(Duration::from_secs(300)),
        }
    }
}

/// The collectives of a step: all-reduces of one clique of all tasks, each of which has one GPU. Nothing is computed: the tasks tell
/// the service what NCCL's profiler plug-in would tell.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct StoryCollectives {
    /// The number of collectives of a step.
    pub each_step: u32,
    /// The bytes that each of them reduces.
    pub bytes: u64,
    /// The time that each takes once all GPUs have begun it.
    pub time: PositiveStoryDuration,
    /// NCCL is asked for times on the GPU from the start, and not only when the service wants them.
    pub timed: bool,
}

impl Default for StoryCollectives {
    fn default() -> Self {
        Self {
            each_step: 8,
            bytes: 64 << 20,
            time: PositiveStoryDuration(Duration::from_millis(2)),
            timed: false,
        }
    }
}

/// The effect of an event on tasks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum StoryAction {
    /// They arrive later at the barrier of each step.
    Late,
    /// They send heartbeats, and do not arrive at the barrier.
    Hang,
    /// They send nothing. Their sockets stay open.
    Silence,
    /// Their connections are reset.
    Kill,
    /// Their connections are reset, and they register again under new incarnations.
    Restart,
    /// All tasks of hosts send nothing for a time, and then go on.
    Partition,
    /// They shut down in good order.
    Stop,
    /// They report an error to the service, and end.
    Error,
    /// Their GPUs begin no further collective. They send heartbeats.
    HoldGpu,
}

impl StoryAction {
    /// Returns its name in stories.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Late => "late",
            Self::Hang => "hang",
            Self::Silence => "silence",
            Self::Kill => "kill",
            Self::Restart => "restart",
            Self::Partition => "partition",
            Self::Stop => "stop",
            Self::Error => "error",
            Self::HoldGpu => "hold-gpu",
        }
    }
}

/// An event of a story: what happens, when, and to which tasks.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct StoryEvent {
    /// The time since all tasks had registered.
    pub at: StoryDuration,
    /// The effect.
    pub what: StoryAction,
    /// These tasks.
    pub tasks: Option<NumberRanges>,
    /// All tasks of these hosts.
    pub hosts: Option<NumberRanges>,
    /// All tasks of this many hosts, which the seed selects. A repeated event has the same hosts each time.
    pub random_hosts: Option<u32>,
    /// How long it lasts; without it, until the end.
    #[serde(rename = "for")]
    pub lasts: Option<PositiveStoryDuration>,
    /// The interval at which it repeats.
    pub every: Option<PositiveStoryDuration>,
    /// With `late`: by how much.
    pub by: Option<PositiveStoryDuration>,
    /// With `restart`: the time until the tasks register again.
    pub after: Option<StoryDuration>,
    /// With `error`: the message.
    pub message: Option<String>,
}

/// The values of a command line that replace those of a story.
#[derive(Debug, Clone, Copy, Default)]
pub struct StoryOverrides {
    /// The number of tasks. Without `hosts`, the hosts keep about as many tasks each as the story gives them.
    pub tasks: Option<u32>,
    /// The number of hosts.
    pub hosts: Option<u32>,
    /// The length.
    pub length: Option<Duration>,
    /// The seed.
    pub seed: Option<u64>,
}

impl Story {
    /// Parses a story.
    ///
    /// # Errors
    /// If the text is not TOML, or a key or the form of a value is wrong. The error names the line.
    pub fn parse(text: &str) -> Result<Self, StoryError> {
        toml::from_str(text).map_err(|error| StoryError::Syntax(error.to_string()))
    }

    /// Reads a story from a file.
    ///
    /// # Errors
    /// If the file cannot be read or parsed.
    pub fn read(path: &Path) -> Result<Self, StoryError> {
        use std::io::Read as _;
        let failed = |error| StoryError::Read { path: path.to_owned(), error };
        let mut text = String::new();
        let file = std::fs::File::open(path).map_err(failed)?;
        file.take(STORY_BYTES_MAX + 1).read_to_string(&mut text).map_err(failed)?;
        if text.len() as u64 > STORY_BYTES_MAX {
            return Err(StoryError::Syntax(format!("the file has more than {STORY_BYTES_MAX} bytes")));
        }
        Self::parse(&text)
    }

    /// Replaces values of the story.
    pub fn apply(&mut self, overrides: StoryOverrides) {
        if let Some(tasks) = overrides.tasks {
            let hosts = u64::from(tasks) * u64::from(self.hosts) / u64::from(self.tasks.max(1));
            // Two at least, if there are as many tasks: one host alone is late after no other.
            self.hosts = (hosts as u32).clamp(tasks.clamp(1, 2), SIMULATED_HOSTS_MAX);
            self.tasks = tasks;
        }
        self.hosts = overrides.hosts.unwrap_or(self.hosts);
        self.length = overrides.length.map(PositiveStoryDuration).or(self.length);
        self.seed = overrides.seed.unwrap_or(self.seed);
    }

    /// Checks that all values are possible and fit one another.
    ///
    /// # Errors
    /// The first impossible value, with its key.
    pub fn check(&self) -> Result<(), StoryError> {
        let bounded = |field: &str, value: u32, most: u32| {
            (1..=most).contains(&value).then_some(()).ok_or_else(|| {
                StoryError::value(field, format!("{value} is not possible: write 1 to {most}"))
            })
        };
        bounded("tasks", self.tasks, SIMULATED_TASKS_MAX)?;
        bounded("hosts", self.hosts, SIMULATED_HOSTS_MAX)?;
        bounded("devices-per-task", self.devices_per_task, DEVICES_MAX)?;
        if self.hosts > self.tasks {
            let problem = format!(
                "{} hosts have no task each, because there are {} tasks: write at most {} hosts, or more tasks",
                self.hosts, self.tasks, self.tasks
            );
            return Err(StoryError::value("hosts", problem));
        }
        let at_least = |field: &str, value: Duration, least: Duration| {
            (value >= least).then_some(()).ok_or_else(|| {
                StoryError::value(
                    field,
                    format!("it is too short: write at least {}", format_exact_duration(least)),
                )
            })
        };
        at_least("steps.time", self.steps.time.0, STEP_MIN)?;
        at_least("job.heartbeat-timeout", self.job.heartbeat_timeout.0, STEP_MIN * 2)?;
        at_least("workers.heartbeat-interval", self.heartbeat_interval(), STEP_MIN)?;
        if self.heartbeat_interval() >= self.job.heartbeat_timeout.0 {
            let problem = "tasks fail between two heartbeats: write less than job.heartbeat-timeout";
            return Err(StoryError::value("workers.heartbeat-interval", problem));
        }
        if self.events.len() > EVENTS_MAX {
            return Err(StoryError::value("events", format!("there are more than {EVENTS_MAX}")));
        }
        if let Some(collectives) = &self.collectives
            && !(1..=COLLECTIVES_MAX).contains(&collectives.each_step)
        {
            let problem = format!("write 1 to {COLLECTIVES_MAX}");
            return Err(StoryError::value("collectives.each-step", problem));
        }
        for (at, event) in self.events.iter().enumerate() {
            if event.what == StoryAction::HoldGpu && self.collectives.is_none() {
                let problem = "`hold-gpu` needs collectives: add the table [collectives]";
                return Err(StoryError::value(format!("events[{at}].what"), problem));
            }
            event
                .check(self.layout())
                .map_err(|(key, problem)| StoryError::value(format!("events[{at}].{key}"), problem))?;
        }
        Ok(())
    }

    /// Returns the tasks and the hosts.
    #[must_use]
    pub const fn layout(&self) -> ClusterLayout {
        ClusterLayout { tasks: self.tasks, hosts: self.hosts }
    }

    /// Returns the interval between heartbeats.
    #[must_use]
    pub fn heartbeat_interval(&self) -> Duration {
        self.workers.heartbeat_interval.map_or(self.job.heartbeat_timeout.0 / 2, |interval| interval.0)
    }
}

/// The key with the wrong value, and the problem.
type WrongKey = (&'static str, String);

impl StoryEvent {
    fn check(&self, layout: ClusterLayout) -> Result<(), WrongKey> {
        self.check_selection(layout)?;
        self.check_keys()?;
        if self.every.is_some_and(|every| every.0 < EVERY_MIN) {
            return Err((
                "every",
                format!("it is too short: write at least {}", format_exact_duration(EVERY_MIN)),
            ));
        }
        if let (Some(every), Some(lasts)) = (self.every, self.lasts)
            && lasts >= every
        {
            return Err(("for", "it lasts until it is repeated: write less than `every`".to_owned()));
        }
        Ok(())
    }

    fn check_selection(&self, layout: ClusterLayout) -> Result<(), WrongKey> {
        let given = [self.tasks.is_some(), self.hosts.is_some(), self.random_hosts.is_some()];
        if given.into_iter().filter(|given| *given).count() != 1 {
            return Err(("tasks", "give one of `tasks`, `hosts` and `random-hosts`".to_owned()));
        }
        let beyond = |ranges: &Option<NumberRanges>, all: u32, noun: &str| {
            let last = ranges.as_ref().map(NumberRanges::last).filter(|last| *last >= all)?;
            Some(format!("there is no {noun} {last}: the last one is {}", all - 1))
        };
        if let Some(problem) = beyond(&self.tasks, layout.tasks, "task") {
            return Err(("tasks", problem));
        }
        if let Some(problem) = beyond(&self.hosts, layout.hosts, "host") {
            return Err(("hosts", problem));
        }
        match self.random_hosts {
            Some(0) => Err(("random-hosts", "write at least 1".to_owned())),
            Some(many) if many > layout.hosts => {
                Err(("random-hosts", format!("there are only {} hosts", layout.hosts)))
            }
            _ => Ok(()),
        }
    }

    /// Checks that the event has the keys that its action needs, and no others.
    fn check_keys(&self) -> Result<(), WrongKey> {
        use StoryAction::{Error, Hang, HoldGpu, Late, Partition, Restart, Silence};
        let action = self.what.name();
        let allowed = [
            ("by", self.by.is_some(), self.what == Late),
            ("after", self.after.is_some(), self.what == Restart),
            ("message", self.message.is_some(), self.what == Error),
            ("for", self.lasts.is_some(), matches!(self.what, Late | Hang | HoldGpu | Silence | Partition)),
        ];
        if let Some((key, ..)) = allowed.into_iter().find(|(_, given, fits)| *given && !fits) {
            return Err((key, format!("`{action}` has no `{key}`: leave it out")));
        }
        if self.what == Late && self.by.is_none() {
            return Err(("by", "`late` needs it: by how much the tasks are late, such as \"1s\"".to_owned()));
        }
        if self.what == Partition && self.lasts.is_none() {
            return Err((
                "for",
                "`partition` needs it: how long the hosts are cut off, such as \"20s\"".to_owned(),
            ));
        }
        if self.what == Partition && self.tasks.is_some() {
            return Err((
                "tasks",
                "`partition` cuts off whole hosts: give `hosts` or `random-hosts`".to_owned(),
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: &str = "description = \"d\"\ntasks = 8\nhosts = 4\n";

    fn problem(events: &str) -> String {
        match Story::parse(&format!("{SMALL}{events}")).and_then(|story| story.check()) {
            Ok(()) => "none".to_owned(),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn a_wrong_key_is_named_with_its_line() {
        let error = problem("hostz = 3\n");
        assert!(error.contains("line 4") && error.contains("hostz"), "{error}");
        let error = problem("[steps]\ntime = \"soon\"\n");
        assert!(error.contains("line 5") && error.contains("no duration"), "{error}");
        let error = problem("[[events]]\nat = \"1s\"\nwhat = \"explode\"\ntasks = \"1\"\n");
        assert!(error.contains("line 6") && error.contains("explode"), "{error}");
        let error = problem("[[events]]\nat = \"1s\"\nwhat = \"kill\"\ntasks = \"5-2\"\n");
        assert!(error.contains("line 7") && error.contains("5-2"), "{error}");
    }

    #[test]
    fn an_impossible_value_is_named_with_its_key() {
        let event = |keys: &str| problem(&format!("[[events]]\nat = \"1s\"\n{keys}\n"));
        for (keys, named) in [
            ("what = \"kill\"", "events[0].tasks"),
            ("what = \"kill\"\ntasks = \"1\"\nhosts = \"1\"", "events[0].tasks"),
            ("what = \"kill\"\ntasks = \"6-8\"", "events[0].tasks: there is no task 8"),
            ("what = \"kill\"\nhosts = \"4\"", "events[0].hosts: there is no host 4"),
            ("what = \"kill\"\nrandom-hosts = 5", "events[0].random-hosts"),
            ("what = \"kill\"\nhosts = \"1\"\nby = \"1s\"", "events[0].by"),
            ("what = \"late\"\nhosts = \"1\"", "events[0].by"),
            ("what = \"partition\"\nhosts = \"1\"", "events[0].for"),
            ("what = \"partition\"\ntasks = \"1\"\nfor = \"1s\"", "events[0].tasks"),
            ("what = \"hang\"\ntasks = \"1\"\nfor = \"5s\"\nevery = \"5s\"", "events[0].for"),
            ("what = \"kill\"\ntasks = \"1\"\nevery = \"1ms\"", "events[0].every"),
        ] {
            let error = event(keys);
            assert!(error.contains(named), "{keys}: {error}");
        }
        assert_eq!(
            event("what = \"late\"\nby = \"1s\"\ntasks = \"0, 4-7\"\nevery = \"5s\"\nfor = \"1s\""),
            "none"
        );
        assert!(problem("[workers]\nheartbeat-interval = \"10s\"\n").contains("workers.heartbeat-interval"));
    }

    #[test]
    fn sizes_are_bounded() {
        let mut story = Story::parse(SMALL).unwrap();
        let mut with = |tasks, hosts| {
            story.apply(StoryOverrides {
                tasks: Some(tasks),
                hosts: Some(hosts),
                ..StoryOverrides::default()
            });
            story.check().map_err(|error| error.to_string())
        };
        assert!(with(100_000, 10_000).is_ok());
        assert!(with(100_001, 10).unwrap_err().contains("tasks: 100001"));
        assert!(with(100_000, 10_001).unwrap_err().contains("hosts: 10001"));
        assert!(with(3, 4).unwrap_err().contains("hosts: 4 hosts"));
        assert!(with(0, 0).unwrap_err().contains("tasks: 0"));
    }

    #[test]
    fn another_number_of_tasks_keeps_the_tasks_of_a_host() {
        let mut story = Story::parse(SMALL).unwrap();
        story.apply(StoryOverrides { tasks: Some(1000), ..StoryOverrides::default() });
        assert_eq!((story.tasks, story.hosts), (1000, 500));
        story.apply(StoryOverrides { tasks: Some(1), ..StoryOverrides::default() });
        assert_eq!((story.tasks, story.hosts), (1, 1));
    }
}
