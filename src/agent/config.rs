//! Defines and checks the configuration of an agent.
//!
//! `cluster_env/` reads the environment; this module does not. Begin at `AgentConfig::check`.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::error::AgentError;
use crate::coordination::{ProcessIdentity, TASKS_MAX};
use crate::proto::muster::v1 as wire;
use crate::transfer::{CliqueChoice, DeviceId, PemCertificates, TaskId, TransportChoice};

/// The step between the device ids of tasks: those of task `n` begin at `n` times this, as JAX numbers CPU
/// devices.
pub const DEVICES_MAX: u32 = 2048;

/// Returns the id of a device by its task and its ordinal there.
pub const fn device_id_of_task(task: TaskId, ordinal: u32) -> DeviceId {
    DeviceId(task.0 * DEVICES_MAX + ordinal)
}

/// Returns the task to which a device belongs by its id.
pub const fn task_of_device_id(device: DeviceId) -> TaskId {
    TaskId(device.0 / DEVICES_MAX)
}

/// The variable that names the [fabric](AgentConfig::fabric) to programs in C and Python: a provider, or `auto`.
const FABRIC_VARIABLE: &str = "MUSTER_FABRIC";

/// Returns the fabric that the environment names.
#[must_use]
pub fn fabric_of_environment() -> Option<String> {
    std::env::var(FABRIC_VARIABLE).ok().filter(|name| !name.is_empty()).map(|name| provider_of_fabric(&name))
}

/// Returns the provider that a setting names: none in particular, the empty name, for `auto`.
#[must_use]
pub fn provider_of_fabric(setting: &str) -> String {
    if setting == "auto" { String::new() } else { setting.to_owned() }
}

/// The variable that says to programs in C and Python where bytes between GPUs move through [cliques](AgentConfig::cliques).
const CLIQUES_VARIABLE: &str = "MUSTER_CLIQUES";

/// Returns where bytes between GPUs move through cliques, as the environment says.
///
/// # Errors
/// Returns [`AgentError::Settings`] for a value that is none.
pub fn cliques_of_environment() -> Result<CliqueChoice, AgentError> {
    let named = std::env::var(CLIQUES_VARIABLE).ok().filter(|name| !name.is_empty());
    let wrong = |error| AgentError::Settings(format!("{CLIQUES_VARIABLE}: {error}"));
    named.map_or(Ok(CliqueChoice::Off), |name| name.parse().map_err(wrong))
}

/// The configuration of an agent.
#[derive(Debug, Clone)]
pub struct AgentConfig {
    /// The address of the service: `host:port`.
    pub service: String,
    /// The authority of the calls, if it is not the address: `job.host:port` names a job.
    pub authority: Option<String>,
    /// The certificates for TLS; plaintext without them.
    pub tls: Option<AgentTlsFiles>,
    /// The number of this task.
    pub task: u32,
    /// The expected number of tasks; `None` accepts the service's.
    pub tasks: Option<u32>,
    /// The identity of this process over runs, which it publishes; `None` to publish none.
    pub identity: Option<ProcessIdentity>,
    /// The number of this task's devices: at most [`DEVICES_MAX`].
    pub devices: u32,
    /// The permitted transports.
    pub transport: TransportChoice,
    /// The provider of libfabric over which the host memory of tasks on other hosts is read and this task's is offered; empty for the
    /// library's first choice. `None`: TCP connections carry the bytes.
    pub fabric: Option<String>,
    /// Where bytes between GPUs move through a clique of NCCL.
    pub cliques: CliqueChoice,
    /// The time for which a waiter polls before it sleeps; `None` for the engine's default.
    pub spin: Option<Duration>,
    /// The TCP address on which the engine listens; `None` to listen on this host only.
    pub listen: Option<SocketAddr>,
    /// The addresses that peers dial, if they differ.
    pub advertise: Vec<SocketAddr>,
    /// The secret that all engines of a job share, if they have one.
    pub token: Option<Vec<u8>>,
    /// The certificates of the engines, with which transfers over TCP are encrypted; all engines of a job
    /// have some, or none has.
    pub transfer_tls: Option<PemCertificates>,
    /// The checks of this host, which the reports of transfers tell once they are there.
    pub host_checks: Arc<OnceLock<wire::HostChecks>>,
    /// The timeout of the registration, including the wait for the service and for all other tasks.
    pub register_limit: Duration,
    /// The heartbeat timeout of the job; a heartbeat is sent at half of it.
    pub heartbeat_timeout: Duration,
    /// The time for which the service may be unreachable before this incarnation ends.
    pub patience: Duration,
    /// The timeout of any other call that the service answers at once.
    pub call_limit: Duration,
    /// The time for which a shutdown may wait for the other tasks.
    pub shutdown_limit: Duration,
}

/// PEM files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AgentTlsFiles {
    /// The authorities that may have issued the service's certificate.
    pub ca: PathBuf,
    /// The client certificate and its key.
    pub own: Option<(PathBuf, PathBuf)>,
}

impl AgentConfig {
    /// Returns the defaults for a task of the service at `service` (`host:port`): those of JAX, where it has
    /// one.
    #[must_use]
    pub fn new(service: impl Into<String>, task: u32) -> Self {
        Self {
            service: service.into(),
            authority: None,
            tls: None,
            task,
            tasks: None,
            identity: None,
            devices: 1,
            transport: TransportChoice::Auto,
            fabric: None,
            cliques: CliqueChoice::Off,
            spin: None,
            listen: Some(SocketAddr::from(([127, 0, 0, 1], 0))),
            advertise: Vec::new(),
            token: None,
            transfer_tls: None,
            host_checks: Arc::default(),
            register_limit: Duration::from_secs(300),
            heartbeat_timeout: Duration::from_secs(100),
            patience: Duration::from_secs(30),
            call_limit: Duration::from_secs(30),
            shutdown_limit: Duration::from_secs(300),
        }
    }

    /// Returns the device ids of this task.
    #[must_use]
    pub fn device_ids(&self) -> Vec<DeviceId> {
        (0..self.devices).map(|ordinal| device_id_of_task(TaskId(self.task), ordinal)).collect()
    }

    pub(super) fn check(&self) -> Result<(), AgentError> {
        let wrong = |text: String| Err(AgentError::Settings(text));
        if self.task >= TASKS_MAX {
            return wrong(format!("task {} is beyond the {TASKS_MAX} that a job may have", self.task));
        }
        if self.devices == 0 || self.devices > DEVICES_MAX {
            return wrong(format!("a task has 1 to {DEVICES_MAX} devices, not {}", self.devices));
        }
        if self.heartbeat_timeout < Duration::from_millis(10) {
            return wrong("a heartbeat timeout below 10 ms cannot be kept".to_owned());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_numbered_as_jax_numbers_those_of_cpus() {
        let config = AgentConfig { devices: 2, ..AgentConfig::new("m:1", 3) };
        assert_eq!(config.device_ids(), [DeviceId(6144), DeviceId(6145)]);
        assert!(config.check().is_ok());
        assert!(AgentConfig { devices: 0, ..config.clone() }.check().is_err());
        assert!(AgentConfig { devices: DEVICES_MAX + 1, ..config.clone() }.check().is_err());
        assert!(AgentConfig { task: TASKS_MAX, ..config }.check().is_err());
    }
}
