//! The parameters of a task, the variables that give them, and the errors of their values.
//!
//! Each file beside this one reads the variables of one system. Begin at [`ValueWithSource`].

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;

use crate::coordination::TASKS_MAX;

/// Environment variables by name.
pub type EnvironmentVariables = BTreeMap<String, String>;

/// Returns the environment variables of this process whose names and values are text.
#[must_use]
pub fn environment_variables() -> EnvironmentVariables {
    let text =
        |(name, value): (OsString, OsString)| Some((name.into_string().ok()?, value.into_string().ok()?));
    std::env::vars_os().filter_map(text).collect()
}

/// The default port of the service.
pub const PORT: u16 = 8476;

/// A value with its source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ValueWithSource<T> {
    /// The value.
    pub value: T,
    /// The flag or variable that it came from.
    pub from: String,
}

impl<T: fmt::Display> fmt::Display for ValueWithSource<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (from {})", self.value, self.from)
    }
}

/// The values of one system; a value that it does not give is `None`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct DetectedClusterSystem {
    /// The name of the system, for people.
    pub(super) system: &'static str,
    pub(super) task: Option<ValueWithSource<u32>>,
    pub(super) tasks: Option<ValueWithSource<u32>>,
    pub(super) service: Option<ValueWithSource<String>>,
    /// The advice for a missing value.
    pub(super) hint: Option<&'static str>,
}

/// The reason for which the place of this process is unknown.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ClusterEnvError {
    /// The value of a variable is malformed.
    #[error("{variable} is {value:?}, which is not {wanted}: set it right{}", flag_advice(.variable, .flag))]
    Malformed {
        /// The variable.
        variable: String,
        /// The value.
        value: String,
        /// The expected form.
        wanted: &'static str,
        /// The flag that overrides it.
        flag: &'static str,
    },
    /// Two sources disagree.
    #[error("{what} is {first} but also {second}: say which is right with {flag}")]
    Conflict {
        /// The parameter.
        what: &'static str,
        /// The value and source of one.
        first: String,
        /// The value and source of the other.
        second: String,
        /// The flag that overrides both.
        flag: &'static str,
    },
    /// No source gives the value.
    #[error("nothing says {what} ({looked}): give {flag}, or set {variable}{hint}")]
    Missing {
        /// The parameter.
        what: &'static str,
        /// The sources that were searched.
        looked: String,
        /// The flag that sets it.
        flag: &'static str,
        /// The variable that sets it.
        variable: &'static str,
        /// Further advice.
        hint: String,
    },
    /// The number of the task is beyond the number of tasks.
    #[error("task {task} does not exist among {tasks} task(s): they are numbered from 0")]
    TaskOutOfRange {
        /// The task.
        task: ValueWithSource<u32>,
        /// The number of tasks.
        tasks: ValueWithSource<u32>,
    },
}

pub(super) const TASK: ParameterDescription =
    ParameterDescription { what: "which task this is", flag: "--task", variable: "MUSTER_PROCESS_ID=N" };
pub(super) const TASKS: ParameterDescription = ParameterDescription {
    what: "how many tasks there are",
    flag: "--tasks",
    variable: "MUSTER_NUM_PROCESSES=N",
};
pub(super) const SERVICE: ParameterDescription = ParameterDescription {
    what: "where the service is",
    flag: "--service",
    variable: "JAX_COORDINATOR_ADDRESS=HOST:PORT",
};

/// The parameters that are still unknown. Other variables are not read, so a user who gives a flag need not
/// correct the environment.
#[derive(Debug, Clone, Copy)]
pub(super) struct UnknownParameters {
    pub(super) task: bool,
    pub(super) tasks: bool,
    pub(super) service: bool,
}

impl UnknownParameters {
    /// Returns the number of the task, if it is unknown.
    pub(super) fn parse_task_if_unknown(
        self,
        variables: &EnvironmentVariables,
        name: &str,
    ) -> Result<Option<ValueWithSource<u32>>, ClusterEnvError> {
        if self.task { parse_task(variables, name) } else { Ok(None) }
    }

    /// Returns the number of tasks, if it is unknown.
    pub(super) fn parse_task_count_if_unknown(
        self,
        variables: &EnvironmentVariables,
        name: &str,
    ) -> Result<Option<ValueWithSource<u32>>, ClusterEnvError> {
        if self.tasks { parse_task_count(variables, name) } else { Ok(None) }
    }
}

/// A parameter, with the flag and the variable that set it.
pub(super) struct ParameterDescription {
    pub(super) what: &'static str,
    pub(super) flag: &'static str,
    pub(super) variable: &'static str,
}

/// Returns the advice to give the flag, unless the flag itself is wrong.
fn flag_advice(variable: &str, flag: &str) -> String {
    if variable == flag { String::new() } else { format!(", or give {flag}") }
}

pub(super) fn conflict_error<T: fmt::Display>(
    question: &ParameterDescription,
    first: &ValueWithSource<T>,
    second: &ValueWithSource<T>,
) -> ClusterEnvError {
    let (first, second) = (first.to_string(), second.to_string());
    ClusterEnvError::Conflict { what: question.what, first, second, flag: question.flag }
}

/// Parses a variable as a number.
pub(super) fn parse_number(
    variables: &EnvironmentVariables,
    name: &str,
    question: &ParameterDescription,
    most: u32,
) -> Result<Option<ValueWithSource<u32>>, ClusterEnvError> {
    let Some(text) = nonempty_value(variables, name) else { return Ok(None) };
    match text.parse::<u32>().ok().filter(|number| *number <= most) {
        Some(value) => Ok(Some(ValueWithSource { value, from: name.to_owned() })),
        None => Err(ClusterEnvError::Malformed {
            variable: name.to_owned(),
            value: text.to_owned(),
            wanted: "a number in range",
            flag: question.flag,
        }),
    }
}

/// Parses a variable as the number of a task.
pub(super) fn parse_task(
    variables: &EnvironmentVariables,
    name: &str,
) -> Result<Option<ValueWithSource<u32>>, ClusterEnvError> {
    parse_number(variables, name, &TASK, TASKS_MAX - 1)
}

/// Parses a variable as a number of tasks.
pub(super) fn parse_task_count(
    variables: &EnvironmentVariables,
    name: &str,
) -> Result<Option<ValueWithSource<u32>>, ClusterEnvError> {
    parse_number(variables, name, &TASKS, TASKS_MAX)
}

/// Returns a variable that is set and not empty.
pub(super) fn nonempty_value<'a>(variables: &'a EnvironmentVariables, name: &str) -> Option<&'a str> {
    variables.get(name).map(|text| text.trim()).filter(|text| !text.is_empty())
}
