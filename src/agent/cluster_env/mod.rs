//! Detects which task this process is, of how many, and where the service is.
//!
//! Explicit flags and variables take precedence; otherwise the module tries each cluster system. It reads a map of
//! variables, not the process environment, so tests need no cluster system. It does not guess, because a process with
//! a wrong task number would replace a healthy task. If two sources disagree, or a value is missing, the result is an
//! error that names the flag or variable to set. Begin at `ClusterEnv::detect`.
//!
//! | file | system | variables |
//! | --- | --- | --- |
//! | `process_identity.rs` | the identity of the process | `MUSTER_HOST_ID`, `NODE_NAME`, `TPU_WORKER_ID`, … |
//! | `explicit_parameters.rs` | flags and variables | `MUSTER_PROCESS_ID`, `JAX_COORDINATOR_ADDRESS`, … |
//! | `slurm.rs` | Slurm | `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS`, `SLURM_STEP_NODELIST`, … |
//! | `jobset.rs` | Kubernetes JobSet | `JOBSET_NAME`, `JOB_INDEX`, `PROCESSES_IN_JOB`, `JOB_COMPLETION_INDEX` |
//! | `kubernetes.rs` | Kubernetes indexed job | `JOB_COMPLETION_INDEX`, `MUSTER_SERVICE_HOST`, … |
//! | `open_mpi.rs` | Open MPI | `OMPI_COMM_WORLD_RANK`, `OMPI_COMM_WORLD_SIZE` |
//!
//! `variables.rs` has the types that these files share: values with their sources, and errors.

mod explicit_parameters;
mod jobset;
mod kubernetes;
mod open_mpi;
mod process_identity;
mod slurm;
mod variables;

use std::fmt;

pub use explicit_parameters::ClusterFlags;
pub use process_identity::{DetectedProcessIdentity, MachineIds};
pub use variables::{ClusterEnvError, EnvironmentVariables, PORT, ValueWithSource, environment_variables};
use variables::{
    DetectedClusterSystem, ParameterDescription, SERVICE, TASK, TASKS, UnknownParameters, conflict_error,
    nonempty_value,
};

/// The detected place of this process in its job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClusterEnv {
    /// The number of the task.
    pub task: ValueWithSource<u32>,
    /// The number of tasks; `None` if no source gives it: the service knows it.
    pub tasks: Option<ValueWithSource<u32>>,
    /// The address of the service: `host:port`.
    pub service: ValueWithSource<String>,
    /// The systems that were detected.
    pub systems: Vec<&'static str>,
}

impl ClusterEnv {
    /// Detects the place of this process from flags and `variables`.
    ///
    /// # Errors
    /// If a value is missing or ambiguous; the error says what to set.
    pub fn detect(asked: &ClusterFlags, variables: &EnvironmentVariables) -> Result<Self, ClusterEnvError> {
        let said = explicit_parameters::resolve_explicit_parameters(asked, variables)?;
        let detectors = [
            slurm::detect_slurm,
            jobset::detect_jobset,
            kubernetes::detect_indexed_job,
            open_mpi::detect_open_mpi,
        ];
        let wanted = UnknownParameters {
            task: said.task.is_none(),
            tasks: said.tasks.is_none(),
            service: said.service.is_none(),
        };
        let found = detectors
            .iter()
            .filter_map(|find| find(variables, wanted).transpose())
            .collect::<Result<Vec<_>, _>>()?;
        let task = explicit_or_agreed_value(&TASK, said.task, &found, |found| found.task.clone())?;
        let tasks = explicit_or_agreed_value(&TASKS, said.tasks, &found, |found| found.tasks.clone())?;
        let service =
            explicit_or_agreed_value(&SERVICE, said.service, &found, |found| found.service.clone())?;
        let task = task.ok_or_else(|| missing_parameter_error(&TASK, &found))?;
        let service = service.ok_or_else(|| missing_parameter_error(&SERVICE, &found))?;
        if let Some(tasks) = tasks.clone().filter(|tasks| task.value >= tasks.value) {
            return Err(ClusterEnvError::TaskOutOfRange { task, tasks });
        }
        let service = ValueWithSource { value: add_default_port_if_missing(&service)?, from: service.from };
        Ok(Self { task, tasks, service, systems: found.iter().map(|found| found.system).collect() })
    }

    /// Returns whether the process leaves its task to the service: by a flag, or by a variable if no flag gives a
    /// number.
    #[must_use]
    pub fn must_claim_task(asked: &ClusterFlags, is_asked: bool, variables: &EnvironmentVariables) -> bool {
        is_asked
            || (asked.task.is_none() && nonempty_value(variables, "MUSTER_PROCESS_ID") == Some(Self::CLAIMED))
    }

    /// The value in place of a task number by which a process leaves its task to the service.
    pub const CLAIMED: &str = "auto";

    /// Detects the number of tasks and the service for a process that does not know its task yet, which is 0 until
    /// [`ClusterEnv::with_claimed_task`].
    ///
    /// # Errors
    /// As [`ClusterEnv::detect`].
    pub fn detect_without_task(
        asked: &ClusterFlags,
        variables: &EnvironmentVariables,
    ) -> Result<Self, ClusterEnvError> {
        Self::detect(&ClusterFlags { task: Some(0), ..asked.clone() }, variables)
    }

    /// Returns the place of this process, as the service has granted it to `host`.
    #[must_use]
    pub fn with_claimed_task(self, task: u32, host: &DetectedProcessIdentity) -> Self {
        let from = format!("the service, for {}, from {}", host.identity, host.host_from);
        Self { task: ValueWithSource { value: task, from }, ..self }
    }

    /// Returns the detected values and their sources, in lines for people.
    #[must_use]
    pub fn describe(&self) -> String {
        let systems = if self.systems.is_empty() { "none".to_owned() } else { self.systems.join(", ") };
        let tasks =
            self.tasks.as_ref().map_or_else(|| "the service says".to_owned(), ValueWithSource::to_string);
        let Self { task, service, .. } = self;
        format!("  task     {task}\n  tasks    {tasks}\n  service  {service}\n  detected {systems}\n")
    }
}

/// Returns the explicit value, or else the value on which all detected systems agree.
fn explicit_or_agreed_value<T: PartialEq + fmt::Display>(
    question: &ParameterDescription,
    said: Option<ValueWithSource<T>>,
    found: &[DetectedClusterSystem],
    of: impl Fn(&DetectedClusterSystem) -> Option<ValueWithSource<T>>,
) -> Result<Option<ValueWithSource<T>>, ClusterEnvError> {
    if said.is_some() {
        return Ok(said);
    }
    let mut voices = found.iter().filter_map(of);
    let Some(first) = voices.next() else { return Ok(None) };
    match voices.find(|other| other.value != first.value) {
        None => Ok(Some(first)),
        Some(other) => Err(conflict_error(question, &first, &other)),
    }
}

fn missing_parameter_error(
    question: &ParameterDescription,
    found: &[DetectedClusterSystem],
) -> ClusterEnvError {
    let looked = if found.is_empty() {
        "no system that starts processes was detected".to_owned()
    } else {
        format!("detected: {}", found.iter().map(|found| found.system).collect::<Vec<_>>().join(", "))
    };
    let hint = found.iter().find_map(|found| found.hint).map_or_else(String::new, |hint| format!("; {hint}"));
    ClusterEnvError::Missing {
        what: question.what,
        looked,
        flag: question.flag,
        variable: question.variable,
        hint,
    }
}

/// Returns the address with a port, the default one if it has none.
fn add_default_port_if_missing(service: &ValueWithSource<String>) -> Result<String, ClusterEnvError> {
    let malformed = || ClusterEnvError::Malformed {
        variable: service.from.clone(),
        value: service.value.clone(),
        wanted: "an address HOST:PORT",
        flag: SERVICE.flag,
    };
    let text = service.value.strip_prefix("http://").unwrap_or(&service.value).trim_end_matches('/');
    if text.is_empty() || text.contains(['/', '@', ' ']) {
        return Err(malformed());
    }
    // An IPv6 address is in brackets, or has no port.
    let bare = text.parse::<std::net::Ipv6Addr>().is_ok();
    let text = if bare { format!("[{text}]") } else { text.to_owned() };
    let port = match text.rsplit_once(']') {
        Some((_, rest)) => rest.strip_prefix(':'),
        None => text.rsplit_once(':').map(|(_, port)| port),
    };
    match port {
        None => Ok(format!("{text}:{PORT}")),
        Some(port) if port.parse::<u16>().is_ok_and(|port| port != 0) => Ok(text),
        Some(_) => Err(malformed()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) fn variables(pairs: &[(&str, &str)]) -> EnvironmentVariables {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    pub(super) fn detect_from_variables(pairs: &[(&str, &str)]) -> Result<ClusterEnv, ClusterEnvError> {
        ClusterEnv::detect(&ClusterFlags::default(), &variables(pairs))
    }

    #[test]
    fn missing_values_are_errors() {
        let error = detect_from_variables(&[]).unwrap_err().to_string();
        for part in ["which task", "--task", "MUSTER_PROCESS_ID", "no system"] {
            assert!(error.contains(part), "{part} is not in {error}");
        }
        let error = detect_from_variables(&[("MUSTER_PROCESS_ID", "1")]).unwrap_err().to_string();
        assert!(error.contains("--service") && error.contains("JAX_COORDINATOR_ADDRESS"), "{error}");
    }

    #[test]
    fn systems_that_disagree_are_not_chosen_between() {
        let both = [
            ("SLURM_JOB_ID", "7"),
            ("SLURM_STEP_ID", "0"),
            ("SLURM_PROCID", "0"),
            ("SLURM_NTASKS", "1"),
            ("OMPI_COMM_WORLD_RANK", "3"),
            ("OMPI_COMM_WORLD_SIZE", "4"),
            ("JAX_COORDINATOR_ADDRESS", "m:1"),
        ];
        let error = detect_from_variables(&both).unwrap_err().to_string();
        for part in ["SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "--task"] {
            assert!(error.contains(part), "{part} is not in {error}");
        }
        let asked = ClusterFlags { task: Some(3), tasks: Some(4), service: None };
        let place = ClusterEnv::detect(&asked, &variables(&both)).unwrap();
        assert_eq!((place.task.value, place.tasks.map(|tasks| tasks.value)), (3, Some(4)));
    }

    #[test]
    fn a_flag_overrides_all_cluster_systems() {
        let slurm = [("SLURM_JOB_ID", "1"), ("SLURM_STEP_ID", "0"), ("SLURM_NTASKS", "x")];
        let jobset = [("JOBSET_NAME", "train"), ("JOB_INDEX", "x"), ("PROCESSES_IN_JOB", "y")];
        let places = [
            [&slurm[..], &[("SLURM_PROCID", "garbage")]].concat(),
            [&jobset[..], &[("JOB_COMPLETION_INDEX", "abc")]].concat(),
            vec![
                ("JOB_COMPLETION_INDEX", "abc"),
                ("MUSTER_SERVICE_HOST", "a b"),
                ("MUSTER_SERVICE_PORT", "x"),
            ],
            vec![("OMPI_COMM_WORLD_RANK", "-1"), ("OMPI_COMM_WORLD_SIZE", "many")],
        ];
        for environment in places {
            let found = |asked: ClusterFlags| ClusterEnv::detect(&asked, &variables(&environment));
            let service = || Some("m:1".to_owned());
            let place = found(ClusterFlags { task: Some(3), tasks: Some(4), service: service() }).unwrap();
            assert_eq!((place.task.value, place.service.value.as_str()), (3, "m:1"), "{environment:?}");
            // A parameter without a flag is read from the variables, and an error names the variable.
            let error = found(ClusterFlags { task: None, tasks: Some(4), service: service() }).unwrap_err();
            assert!(error.to_string().contains("--task"), "{error}");
        }
        let pod = [("JOB_COMPLETION_INDEX", "abc")];
        let asked = ClusterFlags { task: Some(3), tasks: None, service: Some("m:1".to_owned()) };
        assert_eq!(ClusterEnv::detect(&asked, &variables(&pod)).unwrap().task.value, 3);
        let slurm = variables(&[&slurm[..2], &[("SLURM_PROCID", "garbage"), ("SLURM_NTASKS", "8")]].concat());
        let place = ClusterEnv::detect(&asked, &slurm).unwrap();
        assert_eq!((place.task.value, place.tasks.map(|tasks| tasks.value)), (3, Some(8)));
        let error = add_default_port_if_missing(&ValueWithSource {
            value: "host:x".to_owned(),
            from: "--service".to_owned(),
        });
        let error = error.unwrap_err().to_string();
        assert!(!error.contains("or give"), "the flag itself is wrong: {error}");
    }

    #[test]
    fn a_task_beyond_the_number_of_tasks_is_refused() {
        let error = detect_from_variables(&[
            ("MUSTER_PROCESS_ID", "4"),
            ("MUSTER_NUM_PROCESSES", "4"),
            ("JAX_COORDINATOR_ADDRESS", "m"),
        ])
        .unwrap_err();
        assert!(
            matches!(error, ClusterEnvError::TaskOutOfRange { .. }) && error.to_string().contains("from 0"),
            "{error}"
        );
    }

    #[test]
    fn addresses_get_a_port_or_are_refused() {
        let port = |text: &str| {
            add_default_port_if_missing(&ValueWithSource { value: text.to_owned(), from: "x".to_owned() })
        };
        for (text, wanted) in [
            ("host", "host:8476"),
            ("host:1", "host:1"),
            ("10.0.0.1", "10.0.0.1:8476"),
            ("::1", "[::1]:8476"),
            ("[::1]", "[::1]:8476"),
            ("[::1]:9", "[::1]:9"),
            ("http://host:1/", "host:1"),
        ] {
            assert_eq!(port(text).as_deref(), Ok(wanted), "{text}");
        }
        for text in ["", "host:", "host:0", "host:x", "host:70000", "a/b", "u@h:1", "a b"] {
            assert!(port(text).is_err(), "{text}");
        }
    }

    #[test]
    fn describe_names_the_source_of_each_value() {
        let place = detect_from_variables(&[
            ("OMPI_COMM_WORLD_RANK", "1"),
            ("OMPI_COMM_WORLD_SIZE", "2"),
            ("JAX_COORDINATOR_ADDRESS", "m"),
        ])
        .unwrap();
        let text = place.describe();
        for part in ["1 (from OMPI_COMM_WORLD_RANK)", "m:8476 (from JAX_COORDINATOR_ADDRESS)", "Open MPI"] {
            assert!(text.contains(part), "{part} is not in {text}");
        }
    }
}
