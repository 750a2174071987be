//! Detects the identity of this process across runs: its host, and its number on that host. Begin at
//! [`DetectedProcessIdentity::detect`].
//!
//! The service and checkpoints find the process by its identity. So the identity must stay the same when the process
//! starts again and, if possible, when the host does. The table lists the sources of the host; the first one that
//! gives a value wins. The host name is not a source, because in a container it is the name of the container.
//!
//! | source | stays the same when the host starts again |
//! | --- | --- |
//! | `--host-id`, `MUSTER_HOST_ID` | as the user promises |
//! | Kubernetes: `NODE_NAME`, which the pod's specification sets from `spec.nodeName` | yes |
//! | Slurm: `SLURMD_NODENAME` | yes |
//! | TPU: `TPU_WORKER_ID`, with `MEGASCALE_SLICE_ID` if there are several slices | yes |
//! | a hash of `/etc/machine-id`, unless in a container: all containers of an image have the same file | yes |
//! | the boot id of the kernel | no |

use std::path::Path;

use ring::digest::{SHA256, digest};

use super::variables::{
    ClusterEnvError, EnvironmentVariables, ParameterDescription, ValueWithSource, nonempty_value,
    parse_number,
};
use crate::coordination::ProcessIdentity;

const HOST: ParameterDescription =
    ParameterDescription { what: "which host this is", flag: "--host-id", variable: "MUSTER_HOST_ID=NAME" };
const LOCAL: ParameterDescription = ParameterDescription {
    what: "which process of its host this is",
    flag: "MUSTER_LOCAL_PROCESS_ID",
    variable: "MUSTER_LOCAL_PROCESS_ID=N",
};

/// The variables that number the processes of a host.
const LOCAL_VARIABLES: [&str; 3] = ["MUSTER_LOCAL_PROCESS_ID", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK"];

/// The identity of the machine, as its own files and interfaces state it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MachineIds {
    /// The content of `/etc/machine-id`; `None` in a container.
    pub machine: Option<String>,
    /// The boot id of the kernel.
    pub boot: Option<String>,
}

impl MachineIds {
    /// Reads the ids of this machine.
    #[must_use]
    pub fn read() -> Self {
        let read = |path: &str| {
            let text = std::fs::read_to_string(path).ok()?;
            Some(text.trim().to_owned()).filter(|id| !id.is_empty())
        };
        let is_container = ["/.dockerenv", "/run/.containerenv"].iter().any(|path| Path::new(path).exists())
            || std::env::var_os("KUBERNETES_SERVICE_HOST").is_some();
        Self {
            machine: read("/etc/machine-id").filter(|_| !is_container),
            boot: read("/proc/sys/kernel/random/boot_id"),
        }
    }
}

/// The identity of this process across runs, with the sources of its parts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DetectedProcessIdentity {
    /// The identity.
    pub identity: ProcessIdentity,
    /// The source of the host.
    pub host_from: String,
    /// The source of the number of the process on its host.
    pub local_from: String,
    /// Whether the identity stays when the host starts again.
    pub survives_reboot: bool,
}

impl DetectedProcessIdentity {
    /// Detects the identity of this process; `given` is the host's identity by a flag or an argument.
    ///
    /// # Errors
    /// If a value is malformed, or the machine says nothing of itself; the error says what to set.
    pub fn detect(
        given: Option<&str>,
        variables: &EnvironmentVariables,
        machine: &MachineIds,
    ) -> Result<Self, ClusterEnvError> {
        let (host, survives_reboot) = detect_host_identity(given, variables, machine)?;
        let local = detect_local_index(variables)?;
        let malformed = |_| ClusterEnvError::Malformed {
            variable: host.from.clone(),
            value: host.value.chars().take(ProcessIdentity::HOST_BYTES_MAX).collect(),
            wanted: "1 to 253 visible ASCII characters",
            flag: HOST.flag,
        };
        let identity = ProcessIdentity::new(&host.value, local.value).map_err(malformed)?;
        Ok(Self { identity, host_from: host.from, local_from: local.from, survives_reboot })
    }

    /// Detects the identity of this process from its environment and machine.
    ///
    /// # Errors
    /// As [`DetectedProcessIdentity::detect`].
    pub fn detect_on_this_machine(
        given: Option<&str>,
        variables: &EnvironmentVariables,
    ) -> Result<Self, ClusterEnvError> {
        Self::detect(given, variables, &MachineIds::read())
    }
}

/// Returns the identity of the host, and whether it stays when the host starts again.
fn detect_host_identity(
    given: Option<&str>,
    variables: &EnvironmentVariables,
    machine: &MachineIds,
) -> Result<(ValueWithSource<String>, bool), ClusterEnvError> {
    let found = |value: &str, from: &str| ValueWithSource { value: value.to_owned(), from: from.to_owned() };
    if let Some(given) = given {
        return Ok((found(given, HOST.flag), true));
    }
    let cluster_systems = [
        (None, "MUSTER_HOST_ID"),
        (Some("KUBERNETES_SERVICE_HOST"), "NODE_NAME"),
        (Some("SLURM_JOB_ID"), "SLURMD_NODENAME"),
    ];
    for (inside, name) in cluster_systems {
        if inside.is_none_or(|inside| nonempty_value(variables, inside).is_some())
            && let Some(value) = nonempty_value(variables, name)
        {
            return Ok((found(value, name), true));
        }
    }
    if let Some(worker) = nonempty_value(variables, "TPU_WORKER_ID") {
        let (value, from) = match nonempty_value(variables, "MEGASCALE_SLICE_ID") {
            Some(slice) => {
                (format!("tpu-slice-{slice}-worker-{worker}"), "MEGASCALE_SLICE_ID and TPU_WORKER_ID")
            }
            None => (format!("tpu-worker-{worker}"), "TPU_WORKER_ID"),
        };
        return Ok((found(&value, from), true));
    }
    if let Some(id) = &machine.machine {
        // A machine id is confidential (machine-id(5)): others see a hash that only this program computes.
        let hash = digest(&SHA256, format!("muster host {id}").as_bytes());
        let short: String = hash.as_ref().iter().take(8).map(|byte| format!("{byte:02x}")).collect();
        return Ok((found(&format!("machine-{short}"), "/etc/machine-id"), true));
    }
    match &machine.boot {
        Some(id) => Ok((found(&format!("boot-{id}"), "the boot id of the kernel"), false)),
        None => Err(ClusterEnvError::Missing {
            what: HOST.what,
            looked: "no cluster system, machine id or boot id was found".to_owned(),
            flag: HOST.flag,
            variable: HOST.variable,
            hint: String::new(),
        }),
    }
}

/// Returns the number of this process on its host: 0 if no source gives one.
fn detect_local_index(variables: &EnvironmentVariables) -> Result<ValueWithSource<u32>, ClusterEnvError> {
    for name in LOCAL_VARIABLES {
        if let Some(found) = parse_number(variables, name, &LOCAL, ProcessIdentity::LOCAL_MAX)? {
            return Ok(found);
        }
    }
    Ok(ValueWithSource { value: 0, from: "one process on each host".to_owned() })
}

#[cfg(test)]
mod tests {
    use super::super::tests::variables;
    use super::*;

    fn machine() -> MachineIds {
        MachineIds { machine: Some("0123456789abcdef".to_owned()), boot: Some("b007".to_owned()) }
    }

    fn detect(
        given: Option<&str>,
        pairs: &[(&str, &str)],
    ) -> Result<DetectedProcessIdentity, ClusterEnvError> {
        DetectedProcessIdentity::detect(given, &variables(pairs), &machine())
    }

    #[test]
    fn the_first_source_wins() {
        let all = [
            ("MUSTER_HOST_ID", "mine"),
            ("KUBERNETES_SERVICE_HOST", "10.0.0.1"),
            ("NODE_NAME", "node"),
            ("SLURM_JOB_ID", "7"),
            ("SLURMD_NODENAME", "slurm"),
            ("MEGASCALE_SLICE_ID", "2"),
            ("TPU_WORKER_ID", "5"),
        ];
        let found: Vec<String> = (0..=all.len())
            .map(|from| detect(None, &all[from..]).unwrap().identity.host().to_owned())
            .collect();
        let machine = found.last().unwrap();
        assert!(machine.starts_with("machine-") && !machine.contains("0123456789abcdef"), "{machine}");
        let expected = [
            "mine",
            "node",
            "slurm",
            "slurm",
            "tpu-slice-2-worker-5",
            "tpu-slice-2-worker-5",
            "tpu-worker-5",
            machine,
        ];
        assert_eq!(found, expected);
        assert_eq!(detect(Some("flag"), &all).unwrap().identity.host(), "flag");
        // Outside of Kubernetes, NODE_NAME is anybody's variable.
        assert_ne!(detect(None, &[("NODE_NAME", "node")]).unwrap().identity.host(), "node");
    }

    #[test]
    fn a_boot_id_does_not_survive_a_reboot_and_says_so() {
        let only_boot = MachineIds { machine: None, ..machine() };
        let found = DetectedProcessIdentity::detect(None, &variables(&[]), &only_boot).unwrap();
        assert_eq!((found.identity.host(), found.survives_reboot), ("boot-b007", false));
        let error =
            DetectedProcessIdentity::detect(None, &variables(&[]), &MachineIds::default()).unwrap_err();
        assert!(error.to_string().contains("MUSTER_HOST_ID"), "{error}");
    }

    #[test]
    fn processes_of_a_host_have_numbers() {
        let local = |pairs: &[(&str, &str)]| detect(Some("h"), pairs).map(|found| found.identity.local());
        assert_eq!(local(&[]), Ok(0));
        assert_eq!(local(&[("SLURM_LOCALID", "3"), ("OMPI_COMM_WORLD_LOCAL_RANK", "4")]), Ok(3));
        assert_eq!(local(&[("MUSTER_LOCAL_PROCESS_ID", "2"), ("SLURM_LOCALID", "3")]), Ok(2));
        for wrong in ["x", "-1", "65536"] {
            let error = local(&[("MUSTER_LOCAL_PROCESS_ID", wrong)]).unwrap_err().to_string();
            assert!(error.contains("MUSTER_LOCAL_PROCESS_ID") && error.contains(wrong), "{error}");
        }
    }

    #[test]
    fn the_error_names_an_identity_that_is_none() {
        for (given, pairs) in [(Some("a b"), vec![]), (None, vec![("MUSTER_HOST_ID", "a\tb")])] {
            let error = detect(given, &pairs).unwrap_err().to_string();
            assert!(error.contains("visible ASCII"), "{error}");
        }
    }
}
