//! Reads explicit flags, and variables of Muster and JAX. If one of them gives a parameter, the cluster systems are
//! not asked for it.
//!
//! Begin at `resolve_explicit_parameters`.

use super::variables::{
    ClusterEnvError, DetectedClusterSystem, EnvironmentVariables, ParameterDescription, SERVICE, TASK, TASKS,
    ValueWithSource, conflict_error, nonempty_value, parse_task, parse_task_count,
};

const TASK_VARIABLES: [&str; 2] = ["MUSTER_PROCESS_ID", "JAX_PROCESS_ID"];
const TASKS_VARIABLES: [&str; 3] = ["MUSTER_NUM_PROCESSES", "JAX_NUM_PROCESSES", "JAX_PROCESS_COUNT"];
const SERVICE_VARIABLES: [&str; 2] = ["MUSTER_COORDINATOR_ADDRESS", "JAX_COORDINATOR_ADDRESS"];

/// The values given by flags.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ClusterFlags {
    /// The number of this task.
    pub task: Option<u32>,
    /// The number of tasks.
    pub tasks: Option<u32>,
    /// The address of the service.
    pub service: Option<String>,
}

/// Returns the values given by flags, or else by variables.
pub(super) fn resolve_explicit_parameters(
    asked: &ClusterFlags,
    variables: &EnvironmentVariables,
) -> Result<DetectedClusterSystem, ClusterEnvError> {
    let flag =
        |value: Option<u32>, flag: &str| value.map(|value| ValueWithSource { value, from: flag.to_owned() });
    Ok(DetectedClusterSystem {
        system: "what was said",
        task: flag_or_agreeing_variables(&TASK, flag(asked.task, "--task"), &TASK_VARIABLES, |name| {
            parse_task(variables, name)
        })?,
        tasks: flag_or_agreeing_variables(&TASKS, flag(asked.tasks, "--tasks"), &TASKS_VARIABLES, |name| {
            parse_task_count(variables, name)
        })?,
        service: flag_or_agreeing_variables(
            &SERVICE,
            asked.service.clone().map(|value| ValueWithSource { value, from: "--service".to_owned() }),
            &SERVICE_VARIABLES,
            |name| {
                Ok(nonempty_value(variables, name)
                    .map(|text| ValueWithSource { value: text.to_owned(), from: name.to_owned() }))
            },
        )?,
        hint: None,
    })
}

/// Returns the value of the flag, or else of the variables if they agree.
fn flag_or_agreeing_variables<T: PartialEq + std::fmt::Display>(
    question: &ParameterDescription,
    flag: Option<ValueWithSource<T>>,
    names: &[&str],
    read: impl Fn(&str) -> Result<Option<ValueWithSource<T>>, ClusterEnvError>,
) -> Result<Option<ValueWithSource<T>>, ClusterEnvError> {
    if flag.is_some() {
        return Ok(flag);
    }
    let mut first: Option<ValueWithSource<T>> = None;
    for name in names {
        let Some(next) = read(name)? else { continue };
        match &first {
            None => first = Some(next),
            Some(first) if first.value != next.value => return Err(conflict_error(question, first, &next)),
            Some(_) => {}
        }
    }
    Ok(first)
}

#[cfg(test)]
mod tests {
    use super::super::tests::{detect_from_variables as place, variables};
    use super::super::{ClusterEnv, ClusterFlags};

    #[test]
    fn flags_count_before_variables() {
        let said = variables(&[
            ("MUSTER_PROCESS_ID", "1"),
            ("MUSTER_NUM_PROCESSES", "2"),
            ("JAX_COORDINATOR_ADDRESS", "jax:1"),
        ]);
        let asked = ClusterFlags { task: Some(5), tasks: Some(6), service: Some("here:2".to_owned()) };
        let found = ClusterEnv::detect(&asked, &said).unwrap();
        assert_eq!((found.task.value, found.service.value.as_str()), (5, "here:2"));
        assert_eq!(found.task.from, "--task");
        let found = ClusterEnv::detect(&ClusterFlags::default(), &said).unwrap();
        assert_eq!((found.task.value, found.service.value.as_str()), (1, "jax:1"));
    }

    #[test]
    fn variables_that_disagree_are_not_chosen_between() {
        let error =
            place(&[("MUSTER_PROCESS_ID", "1"), ("JAX_PROCESS_ID", "2"), ("JAX_COORDINATOR_ADDRESS", "m")])
                .unwrap_err()
                .to_string();
        assert!(
            error.contains("1 (from MUSTER_PROCESS_ID)") && error.contains("2 (from JAX_PROCESS_ID)"),
            "{error}"
        );
        let same =
            place(&[("MUSTER_PROCESS_ID", "1"), ("JAX_PROCESS_ID", "1"), ("JAX_COORDINATOR_ADDRESS", "m")]);
        assert_eq!(same.unwrap().task.value, 1);
    }

    #[test]
    fn the_error_names_a_value_that_is_no_number() {
        for wrong in ["x", "-1", "1.5", "99999999999"] {
            let error = place(&[("MUSTER_PROCESS_ID", wrong), ("JAX_COORDINATOR_ADDRESS", "m")]).unwrap_err();
            let error = error.to_string();
            assert!(error.contains("MUSTER_PROCESS_ID") && error.contains(wrong), "{error}");
        }
    }
}
