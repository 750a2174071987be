//! Reads the variables of an indexed Kubernetes Job, and those of the Kubernetes Service named `muster`.
//!
//! It calls no API server. Begin at `detect_indexed_job`.

use super::variables::{
    ClusterEnvError, DetectedClusterSystem, EnvironmentVariables, PORT, SERVICE, UnknownParameters,
    ValueWithSource, nonempty_value,
};

const HINT: &str = "in Kubernetes, a job with completionMode: Indexed numbers its pods, and a Service named `muster` in the same namespace \
                    tells where it is";

/// Returns the values of an indexed Job. A pod does not learn the number of pods; the service knows it.
pub(super) fn detect_indexed_job(
    variables: &EnvironmentVariables,
    wanted: UnknownParameters,
) -> Result<Option<DetectedClusterSystem>, ClusterEnvError> {
    let inside = nonempty_value(variables, "KUBERNETES_SERVICE_HOST").is_some();
    let numbered = nonempty_value(variables, "JOB_COMPLETION_INDEX").is_some();
    // A JobSet numbers its pods across all of its jobs; this index does not.
    let whole = nonempty_value(variables, "JOBSET_NAME").is_some();
    if whole || (!inside && !numbered) {
        return Ok(None);
    }
    Ok(Some(DetectedClusterSystem {
        system: "Kubernetes indexed job",
        task: wanted.parse_task_if_unknown(variables, "JOB_COMPLETION_INDEX")?,
        tasks: None,
        service: detect_service_address(variables, wanted)?,
        hint: Some(HINT),
    }))
}

/// Returns the address of the Service named `muster`, which Kubernetes sets for every pod of its namespace.
pub(super) fn detect_service_address(
    variables: &EnvironmentVariables,
    wanted: UnknownParameters,
) -> Result<Option<ValueWithSource<String>>, ClusterEnvError> {
    let Some(host) = nonempty_value(variables, "MUSTER_SERVICE_HOST").filter(|_| wanted.service) else {
        return Ok(None);
    };
    let named = ["MUSTER_SERVICE_PORT_GRPC", "MUSTER_SERVICE_PORT"]
        .into_iter()
        .find_map(|name| Some((name, nonempty_value(variables, name)?)));
    let port = match named {
        None => PORT,
        Some((name, port)) => match port.parse::<u16>() {
            Ok(port) if port != 0 => port,
            _ => {
                return Err(ClusterEnvError::Malformed {
                    variable: name.to_owned(),
                    value: port.to_owned(),
                    wanted: "the port of the Service named muster",
                    flag: SERVICE.flag,
                });
            }
        },
    };
    let host = if host.contains(':') { format!("[{host}]") } else { host.to_owned() };
    let from = "MUSTER_SERVICE_HOST, the Service named muster".to_owned();
    Ok(Some(ValueWithSource { value: format!("{host}:{port}"), from }))
}

#[cfg(test)]
mod tests {
    use super::super::tests::detect_from_variables as place;

    #[test]
    fn a_pod_of_an_indexed_job_knows_its_number() {
        let pod = [
            ("KUBERNETES_SERVICE_HOST", "10.0.0.1"),
            ("JOB_COMPLETION_INDEX", "5"),
            ("MUSTER_SERVICE_HOST", "10.0.0.9"),
            ("MUSTER_SERVICE_PORT", "8477"),
            ("MUSTER_SERVICE_PORT_GRPC", "8476"),
        ];
        let found = place(&pod).unwrap();
        assert_eq!((found.task.value, found.tasks), (5, None));
        assert_eq!(found.service.value, "10.0.0.9:8476");
    }

    #[test]
    fn a_port_that_is_none_is_named_alone() {
        for name in ["MUSTER_SERVICE_PORT", "MUSTER_SERVICE_PORT_GRPC"] {
            let pod = [
                ("JOB_COMPLETION_INDEX", "5"),
                ("MUSTER_SERVICE_HOST", "127.0.0.1"),
                (name, "tcp://10.0.0.1:99"),
            ];
            let error = place(&pod).unwrap_err().to_string();
            let said =
                format!("{name} is \"tcp://10.0.0.1:99\", which is not the port of the Service named muster");
            assert!(error.starts_with(&said) && error.contains("--service"), "{error}");
        }
    }

    #[test]
    fn the_error_for_a_pod_without_an_index_says_how_to_set_it() {
        let error =
            place(&[("KUBERNETES_SERVICE_HOST", "10.0.0.1"), ("JAX_COORDINATOR_ADDRESS", "m")]).unwrap_err();
        assert!(error.to_string().contains("completionMode: Indexed"), "{error}");
    }
}
