//! Reads the variables of `mpirun`.
//!
//! It finds no service address: Open MPI provides none. Begin at `detect_open_mpi`.

use super::variables::{
    ClusterEnvError, DetectedClusterSystem, EnvironmentVariables, UnknownParameters, nonempty_value,
};

/// Returns the values of Open MPI, which do not include the service address.
pub(super) fn detect_open_mpi(
    variables: &EnvironmentVariables,
    wanted: UnknownParameters,
) -> Result<Option<DetectedClusterSystem>, ClusterEnvError> {
    if nonempty_value(variables, "OMPI_COMM_WORLD_RANK").is_none()
        && nonempty_value(variables, "OMPI_COMM_WORLD_SIZE").is_none()
    {
        return Ok(None);
    }
    Ok(Some(DetectedClusterSystem {
        system: "Open MPI",
        task: wanted.parse_task_if_unknown(variables, "OMPI_COMM_WORLD_RANK")?,
        tasks: wanted.parse_task_count_if_unknown(variables, "OMPI_COMM_WORLD_SIZE")?,
        service: None,
        hint: Some("mpirun hands a variable on with -x NAME"),
    }))
}

#[cfg(test)]
mod tests {
    use super::super::tests::detect_from_variables as place;

    #[test]
    fn a_rank_knows_its_place_but_not_the_service() {
        let rank = [("OMPI_COMM_WORLD_RANK", "2"), ("OMPI_COMM_WORLD_SIZE", "3")];
        let error = place(&rank).unwrap_err().to_string();
        assert!(error.contains("--service") && error.contains("mpirun"), "{error}");
        let found = place(&[&rank[..], &[("MUSTER_COORDINATOR_ADDRESS", "m:9")]].concat()).unwrap();
        assert_eq!((found.task.value, found.tasks.map(|tasks| tasks.value)), (2, Some(3)));
    }
}
