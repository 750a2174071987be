//! Defines and checks the configuration of an agent.
//!
//! It reads no environment: `place/` does. Begin at `AgentConfig::check`.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use super::error::AgentError;
use crate::coordination::TASKS_MAX;
use crate::transfer::{Certificates, Choice, DeviceId, TaskId};

/// Devices of task `n` are numbered from `n` times this on, as JAX numbers CPU devices.
pub const DEVICES_MAX: u32 = 2048;

/// A device of a task, by its ordinal there.
pub(super) const fn device_of(task: TaskId, ordinal: u32) -> DeviceId {
    DeviceId(task.0 * DEVICES_MAX + ordinal)
}

/// How an agent is set up.
#[derive(Debug, Clone)]
pub struct AgentConfig {
    /// Where the service is: `host:port`.
    pub service: String,
    /// What it is called there, where that is not the address: `job.host:port` names a job.
    pub authority: Option<String>,
    /// Certificates for TLS; plaintext without them.
    pub tls: Option<AgentTlsFiles>,
    /// Which task this is.
    pub task: u32,
    /// How many tasks there must be; whatever the service says, if that is none.
    pub tasks: Option<u32>,
    /// How many devices it has: at most [`DEVICES_MAX`].
    pub devices: u32,
    /// Which transports may be used.
    pub transport: Choice,
    /// How long who waits for something small looks for it before they sleep; as engines do by default if that is none.
    pub spin: Option<Duration>,
    /// Where the engine listens on TCP; none to listen on this host only.
    pub listen: Option<SocketAddr>,
    /// What others dial, where that differs.
    pub advertise: Vec<SocketAddr>,
    /// Every engine of a job has the same one, or none.
    pub token: Option<Vec<u8>>,
    /// Certificates of the engines, by which transfers over TCP are encrypted; every engine of a job has some, or none.
    pub transfer_tls: Option<Certificates>,
    /// How long the registration may take, waiting for the service and for all other tasks included.
    pub register_limit: Duration,
    /// The heartbeat timeout of the job: heartbeats are sent twice as often.
    pub heartbeat_timeout: Duration,
    /// How long the service may be out of reach before this life is given up.
    pub patience: Duration,
    /// How long any other call may take that the service answers at once.
    pub call_limit: Duration,
    /// How long a shutdown may wait for the other tasks.
    pub shutdown_limit: Duration,
}

/// Files in PEM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AgentTlsFiles {
    /// The authorities that the service's certificate is to come from.
    pub ca: PathBuf,
    /// The certificate to show, and its key.
    pub own: Option<(PathBuf, PathBuf)>,
}

impl AgentConfig {
    /// The defaults for a task of the service at `service` (`host:port`): those of JAX, where it has one.
    #[must_use]
    pub fn new(service: impl Into<String>, task: u32) -> Self {
        Self {
            service: service.into(),
            authority: None,
            tls: None,
            task,
            tasks: None,
            devices: 1,
            transport: Choice::Auto,
            spin: None,
            listen: Some(SocketAddr::from(([127, 0, 0, 1], 0))),
            advertise: Vec::new(),
            token: None,
            transfer_tls: None,
            register_limit: Duration::from_secs(300),
            heartbeat_timeout: Duration::from_secs(100),
            patience: Duration::from_secs(30),
            call_limit: Duration::from_secs(30),
            shutdown_limit: Duration::from_secs(300),
        }
    }

    /// The devices of this task.
    #[must_use]
    pub fn device_ids(&self) -> Vec<DeviceId> {
        (0..self.devices).map(|ordinal| device_of(TaskId(self.task), ordinal)).collect()
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
