//! Kubernetes: pods of an indexed job.

use super::{Found, PORT, PlaceError, Taken, Variables, task, text};

const HINT: &str = "in Kubernetes, a job with completionMode: Indexed numbers its pods, and a Service named `muster` in the same namespace \
                    tells where it is";

/// What an indexed job says. How many pods it has, none of them is told: the service knows.
pub(super) fn find(variables: &Variables) -> Result<Option<Found>, PlaceError> {
    let inside = text(variables, "KUBERNETES_SERVICE_HOST").is_some();
    let index = task(variables, "JOB_COMPLETION_INDEX")?;
    // A JobSet's pods are numbered through all of its jobs, which this index is not.
    let whole = text(variables, "JOBSET_NAME").is_some();
    if whole || (!inside && index.is_none()) {
        return Ok(None);
    }
    Ok(Some(Found {
        system: "Kubernetes indexed job",
        task: index,
        tasks: None,
        service: service(variables),
        hint: Some(HINT),
    }))
}

/// The Service named `muster`, which Kubernetes tells every pod of its namespace about.
pub(super) fn service(variables: &Variables) -> Option<Taken<String>> {
    let host = text(variables, "MUSTER_SERVICE_HOST")?;
    let port = text(variables, "MUSTER_SERVICE_PORT_GRPC").or_else(|| text(variables, "MUSTER_SERVICE_PORT"));
    let host = if host.contains(':') { format!("[{host}]") } else { host.to_owned() };
    let value = format!("{host}:{}", port.map_or_else(|| PORT.to_string(), str::to_owned));
    Some(Taken { value, from: "MUSTER_SERVICE_HOST, the Service named muster".to_owned() })
}

#[cfg(test)]
mod tests {
    use super::super::tests::find as place;

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
    fn a_pod_without_a_number_is_told_how_to_get_one() {
        let error =
            place(&[("KUBERNETES_SERVICE_HOST", "10.0.0.1"), ("JAX_COORDINATOR_ADDRESS", "m")]).unwrap_err();
        assert!(error.to_string().contains("completionMode: Indexed"), "{error}");
    }
}
