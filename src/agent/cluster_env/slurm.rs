//! Reads the variables of a Slurm step, including host lists.
//!
//! A batch script gets the service's address but no task number, because it is not a task of the step. Begin at
//! `detect_slurm`.

use super::variables::{
    ClusterEnvError, DetectedClusterSystem, EnvironmentVariables, PORT, UnknownParameters, ValueWithSource,
    nonempty_value,
};

/// Returns the values of Slurm. Outside a step (in a batch script, after `salloc`) its variables are set, but
/// it numbers no processes.
pub(super) fn detect_slurm(
    variables: &EnvironmentVariables,
    wanted: UnknownParameters,
) -> Result<Option<DetectedClusterSystem>, ClusterEnvError> {
    if nonempty_value(variables, "SLURM_JOB_ID").is_none() {
        return Ok(None);
    }
    let service = ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"].into_iter().find_map(|name| {
        let host = first_host_of_node_list(nonempty_value(variables, name)?)?;
        let from = format!("the first host of {name}, where `muster serve` is expected");
        Some(ValueWithSource { value: format!("{host}:{PORT}"), from })
    });
    let mut found = DetectedClusterSystem { system: "Slurm", service, ..DetectedClusterSystem::default() };
    if nonempty_value(variables, "SLURM_STEP_ID").is_none() {
        found.hint = Some("SLURM_STEP_ID is not set, so this is no task of a Slurm step: start it with srun");
        return Ok(Some(found));
    }
    found.task = wanted.parse_task_if_unknown(variables, "SLURM_PROCID")?;
    found.tasks = match wanted.parse_task_count_if_unknown(variables, "SLURM_STEP_NUM_TASKS")? {
        Some(tasks) => Some(tasks),
        None => wanted.parse_task_count_if_unknown(variables, "SLURM_NTASKS")?,
    };
    Ok(Some(found))
}

/// Returns the first host of a node list: `a1,b`, `a[01-04,07]`, `a[1-2]b[3-4]`.
fn first_host_of_node_list(list: &str) -> Option<String> {
    let mut host = String::new();
    let mut rest = list.chars();
    while let Some(next) = rest.next() {
        match next {
            ',' => break,
            '[' => {
                let inside: String = rest.by_ref().take_while(|c| *c != ']').collect();
                let first = inside.split([',', '-']).next().filter(|number| !number.is_empty())?;
                host.push_str(first);
            }
            c => host.push(c),
        }
    }
    (!host.is_empty()).then_some(host)
}

#[cfg(test)]
mod tests {
    use super::super::tests::detect_from_variables as place;
    use super::*;

    const STEP: [(&str, &str); 5] = [
        ("SLURM_JOB_ID", "42"),
        ("SLURM_STEP_ID", "0"),
        ("SLURM_PROCID", "3"),
        ("SLURM_NTASKS", "8"),
        ("SLURM_JOB_NODELIST", "node[001-004]"),
    ];

    #[test]
    fn a_task_of_a_step_knows_its_place() {
        let found = place(&STEP).unwrap();
        assert_eq!((found.task.value, found.tasks.map(|tasks| tasks.value)), (3, Some(8)));
        assert_eq!(found.service.value, "node001:8476");
        assert!(found.service.from.contains("SLURM_JOB_NODELIST"));
        let explicit = place(&[&STEP[..], &[("JAX_COORDINATOR_ADDRESS", "muster:1")]].concat()).unwrap();
        assert_eq!(explicit.service.value, "muster:1");
    }

    #[test]
    fn the_step_counts_and_not_the_job() {
        let found =
            place(&[&STEP[..], &[("SLURM_STEP_NUM_TASKS", "4"), ("SLURM_STEP_NODELIST", "b,c")]].concat());
        let found = found.unwrap();
        assert_eq!((found.tasks.map(|tasks| tasks.value), found.service.value.as_str()), (Some(4), "b:8476"));
    }

    #[test]
    fn a_batch_script_is_no_task() {
        let error = place(&[("SLURM_JOB_ID", "42"), ("SLURM_PROCID", "0"), ("SLURM_JOB_NODELIST", "a")]);
        let error = error.unwrap_err().to_string();
        assert!(error.contains("srun") && error.contains("--task"), "{error}");
    }

    #[test]
    fn node_lists_in_all_their_forms() {
        for (list, first) in [
            ("node001", Some("node001")),
            ("node001,host2", Some("node001")),
            ("node[001-015],host2", Some("node001")),
            ("node[001,007-015]", Some("node001")),
            ("rack[1-2]n[3-4].local", Some("rack1n3.local")),
            ("", None),
            ("node[]", None),
            (",a", None),
        ] {
            assert_eq!(first_host_of_node_list(list).as_deref(), first, "{list}");
        }
    }
}
