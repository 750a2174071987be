//! Finds which task this process is, its process identity, and the address of its service. This module also calls the
//! service: to claim a task id, to list the tasks that have registered, and to learn whether the service refuses a
//! task.
//!
//! `muster::agent::cluster_env` reads the environment. Begin at [`find_place`].

use std::path::PathBuf;
use std::time::Duration;

use muster::agent::cluster_env::{ClusterEnv, ClusterFlags, DetectedProcessIdentity, environment_variables};
use muster::agent::{AgentConfig, AgentTlsFiles, claim_task, own_claimant_id};
use muster::coordination::ProcessIdentity;
use pyo3::prelude::*;

use super::errors::{agent_error, cluster_env_error};
use super::wait::{parse_timeout_seconds, wait};

/// The certificates for TLS to the service: authorities, and the client's own certificate and key.
pub type TlsPaths = (PathBuf, Option<PathBuf>, Option<PathBuf>);

/// Returns the place of this process, by the given values and else by the environment.
pub fn detect_cluster_env(
    py: Python<'_>,
    service: Option<String>,
    tasks: Option<u32>,
    task: Option<u32>,
) -> PyResult<ClusterEnv> {
    let given = ClusterFlags { task, tasks, service };
    // Python's os.environ writes through to the environment that is read here, and only threads of Python write it.
    ClusterEnv::detect(&given, &environment_variables()).map_err(|error| cluster_env_error(py, &error))
}

/// Returns the address of the service, the number of tasks (`None` if only the service knows it), and the task.
#[pyfunction]
#[pyo3(signature = (service, num_processes, process_id))]
pub fn find_place(
    py: Python<'_>,
    service: Option<String>,
    num_processes: Option<u32>,
    process_id: Option<u32>,
) -> PyResult<(String, Option<u32>, u32)> {
    let place = detect_cluster_env(py, service, num_processes, process_id)?;
    Ok((place.service.value, place.tasks.map(|tasks| tasks.value), place.task.value))
}

/// Asks the service which task this process is, by the identity of its host. Returns the address of the service, the number of
/// tasks that this process was told (`None` if it was told none), the task, and the number of tasks of the job.
#[pyfunction]
#[pyo3(signature = (service, num_processes, tls, timeout))]
pub fn claim_place(
    py: Python<'_>,
    service: Option<String>,
    num_processes: Option<u32>,
    tls: Option<TlsPaths>,
    timeout: f64,
) -> PyResult<(String, Option<u32>, u32, u32)> {
    let limit = parse_timeout_seconds(py, "timeout", timeout)?;
    let variables = environment_variables();
    let given = ClusterFlags { task: None, tasks: num_processes, service };
    let place =
        ClusterEnv::detect_without_task(&given, &variables).map_err(|error| cluster_env_error(py, &error))?;
    let host = DetectedProcessIdentity::detect_on_this_machine(None, &variables)
        .map_err(|error| cluster_env_error(py, &error))?;
    let config = AgentConfig { tls: tls_files(tls), ..AgentConfig::new(place.service.value.clone(), 0) };
    let asked = wait(py, async move { claim_task(&config, &host.identity, own_claimant_id(), limit).await })?;
    let granted = asked.map_err(|error| agent_error(py, &error))?;
    Ok((place.service.value, place.tasks.map(|tasks| tasks.value), granted.task, granted.tasks))
}

/// Returns the identity of this process, if anything says it.
pub fn own_process_identity() -> Option<ProcessIdentity> {
    DetectedProcessIdentity::detect_on_this_machine(None, &environment_variables())
        .ok()
        .map(|host| host.identity)
}

/// Returns the identity of this process across runs: its host, its number there, the source of the host's identity, and
/// whether it stays when the host starts again.
#[pyfunction]
#[pyo3(name = "host_identity", signature = (host_id))]
pub fn process_identity(py: Python<'_>, host_id: Option<String>) -> PyResult<(String, u32, String, bool)> {
    let found = DetectedProcessIdentity::detect_on_this_machine(host_id.as_deref(), &environment_variables())
        .map_err(|error| cluster_env_error(py, &error))?;
    let DetectedProcessIdentity { identity, host_from, survives_reboot, .. } = found;
    Ok((identity.host().to_owned(), identity.local(), host_from, survives_reboot))
}

/// Returns the key under which a task publishes the identity of its process.
#[pyfunction(name = "host_key")]
pub fn process_identity_key(process_id: u32) -> String {
    ProcessIdentity::store_key(process_id)
}

/// Returns the files for TLS; certificate and key count only together.
pub fn tls_files(tls: Option<TlsPaths>) -> Option<AgentTlsFiles> {
    tls.map(|(ca, cert, key)| AgentTlsFiles { ca, own: cert.zip(key) })
}

/// A task, the incarnation that registered last (0: none did), whether it is connected, and its error.
type TaskPresenceTuple = (u32, u64, bool, String);

/// Returns each task of the job at `service`.
#[pyfunction]
#[pyo3(name = "task_presence", signature = (service, tls, timeout))]
pub fn list_task_presences(
    py: Python<'_>,
    service: String,
    tls: Option<TlsPaths>,
    timeout: f64,
) -> PyResult<Vec<TaskPresenceTuple>> {
    let call_limit = parse_timeout_seconds(py, "timeout", timeout)?.max(Duration::from_millis(1));
    let config = AgentConfig { tls: tls_files(tls), call_limit, ..AgentConfig::new(service, 0) };
    let asked = wait(py, async move { muster::agent::list_task_presences(&config).await })?;
    let tasks = asked.map_err(|error| agent_error(py, &error))?;
    Ok(tasks
        .into_iter()
        .map(|task| {
            let incarnation = task.incarnation.map_or(0, |incarnation| incarnation.get());
            (task.task, incarnation, task.is_connected, task.error)
        })
        .collect())
}

/// Returns why the service refuses a task; `None` if it does not.
#[pyfunction]
#[pyo3(signature = (service, process_id, tls, timeout))]
pub fn query_admission_refusal(
    py: Python<'_>,
    service: String,
    process_id: u32,
    tls: Option<TlsPaths>,
    timeout: f64,
) -> PyResult<Option<String>> {
    let call_limit = parse_timeout_seconds(py, "timeout", timeout)?.max(Duration::from_millis(1));
    let config = AgentConfig { tls: tls_files(tls), call_limit, ..AgentConfig::new(service, process_id) };
    let asked = wait(py, async move { muster::agent::query_admission_refusal(&config).await })?;
    asked.map_err(|error| agent_error(py, &error))
}
