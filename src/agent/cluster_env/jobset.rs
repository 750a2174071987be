//! Reads the variables of a Kubernetes JobSet: several indexed Kubernetes Jobs that are one job of Muster.
//!
//! JobSet writes the values into labels of the pod, and the pod's specification exposes them as variables. This
//! module reads the usual names of these variables. Begin at `detect_jobset`.

use super::kubernetes;
use super::variables::{
    ClusterEnvError, DetectedClusterSystem, EnvironmentVariables, TASK, UnknownParameters, ValueWithSource,
    nonempty_value, parse_number, parse_task,
};
use crate::coordination::TASKS_MAX;

const HINT: &str = "JOBSET_NAME is set, so JOB_INDEX (from the label jobset.sigs.k8s.io/job-global-index), PROCESSES_IN_JOB (pods of each \
                    job) and JOB_COMPLETION_INDEX are needed: hand them on in the pod's specification";

/// Returns the values of a JobSet: the pods of each of its jobs are numbered after those of the jobs before.
pub(super) fn detect_jobset(
    variables: &EnvironmentVariables,
    wanted: UnknownParameters,
) -> Result<Option<DetectedClusterSystem>, ClusterEnvError> {
    if nonempty_value(variables, "JOBSET_NAME").is_none() {
        return Ok(None);
    }
    let service = kubernetes::detect_service_address(variables, wanted)?;
    let mut found = DetectedClusterSystem {
        system: "JobSet",
        service,
        hint: Some(HINT),
        ..DetectedClusterSystem::default()
    };
    if !wanted.task {
        return Ok(Some(found));
    }
    let job = parse_task(variables, "JOB_INDEX")?;
    let each = parse_number(variables, "PROCESSES_IN_JOB", &TASK, TASKS_MAX)?;
    let index = parse_task(variables, "JOB_COMPLETION_INDEX")?;
    let (Some(job), Some(each), Some(index)) = (job, each, index) else { return Ok(Some(found)) };
    let number = job.value.checked_mul(each.value).and_then(|before| before.checked_add(index.value));
    let Some(value) = number.filter(|number| *number < TASKS_MAX && index.value < each.value) else {
        return Err(ClusterEnvError::Malformed {
            variable: "JOB_COMPLETION_INDEX".to_owned(),
            value: index.value.to_string(),
            wanted: "the index of one of PROCESSES_IN_JOB pods",
            flag: TASK.flag,
        });
    };
    let from = "JOB_INDEX × PROCESSES_IN_JOB + JOB_COMPLETION_INDEX".to_owned();
    found.task = Some(ValueWithSource { value, from });
    Ok(Some(found))
}

#[cfg(test)]
mod tests {
    use super::super::tests::detect_from_variables as place;

    const POD: [(&str, &str); 5] = [
        ("JOBSET_NAME", "train"),
        ("JOB_INDEX", "2"),
        ("PROCESSES_IN_JOB", "4"),
        ("JOB_COMPLETION_INDEX", "1"),
        ("JAX_COORDINATOR_ADDRESS", "muster"),
    ];

    #[test]
    fn pods_are_numbered_through_all_jobs() {
        let found = place(&POD).unwrap();
        assert_eq!((found.task.value, found.tasks), (9, None));
        assert_eq!(found.systems, ["JobSet"]);
    }

    #[test]
    fn a_half_description_is_refused_with_what_to_add() {
        for gone in 1..4 {
            let rest: Vec<_> =
                POD.iter().enumerate().filter(|(n, _)| *n != gone).map(|(_, pair)| *pair).collect();
            let error = place(&rest).unwrap_err().to_string();
            assert!(error.contains("PROCESSES_IN_JOB") && error.contains("job-global-index"), "{error}");
        }
        let mut wrong = POD;
        wrong[3].1 = "4";
        assert!(place(&wrong).is_err(), "the fifth of four");
        wrong[1].1 = "999999";
        assert!(place(&wrong).is_err());
    }
}
