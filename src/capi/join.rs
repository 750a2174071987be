//! The C functions by which a task joins a job: its options, and `muster_join`.
//!
//! `muster::agent` registers the task. Begin at [`muster_join`].

use std::ffi::c_char;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::ptr::null;
use std::sync::Arc;
use std::time::Duration;

use muster::agent::cluster_env::{ClusterEnv, ClusterFlags, environment_variables};
use muster::agent::{
    Agent, AgentConfig, AgentError, AgentTlsFiles, check_credentials_if_exposed, cliques_of_environment,
    fabric_of_environment,
};
use muster::transfer::{PemCertificates, TransportChoice};

use super::agent::{AgentObject, MusterAgent};
use super::boundary::{
    OutputPointer, read_array, read_optional_text, read_options, run_interface_function, write_defaults,
};
use super::handles;
use super::status::{CallError, MusterStatus};
use super::wait::{ANSWER_TIME, MusterCancellation, WaitLimits, parse_timeout_ms, wait};

/// The transport to tasks on this host: the best that both sides have.
pub const MUSTER_TRANSPORT_AUTO: u32 = 0;
/// The transport to tasks on this host: shared memory.
pub const MUSTER_TRANSPORT_SHM: u32 = 1;
/// The transport to tasks on this host: the kernel copies from process to process.
pub const MUSTER_TRANSPORT_PVM: u32 = 2;
/// The transport to tasks on this host: a Unix socket.
pub const MUSTER_TRANSPORT_UNIX: u32 = 3;
/// The transport to tasks on this host: TCP.
pub const MUSTER_TRANSPORT_TCP: u32 = 4;

/// How a task joins. `muster_join_options_init` sets the defaults; change what differs.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct MusterJoinOptions {
    /// The size of this struct, as `muster_join_options_init` sets it.
    pub size: usize,
    /// The address HOST:PORT of the service's gRPC port. NULL: as `muster worker` finds it, in JAX_COORDINATOR_ADDRESS or
    /// in the variables of Slurm, Kubernetes or Open MPI.
    pub service: *const c_char,
    /// The job, where the service has several on one port. NULL: the one of the address.
    pub job: *const c_char,
    /// The number of this task. -1: as `muster worker` finds it, in MUSTER_PROCESS_ID or in the variables of a cluster.
    pub task: i64,
    /// The number of tasks that the job must have. -1: as `muster worker` finds it, else what the service says.
    pub tasks: i64,
    /// The job's heartbeat timeout; heartbeats are sent at half of it. The default is 100000.
    pub heartbeat_timeout_ms: i64,
    /// The file with the authorities of the service's certificate. NULL: no TLS.
    pub ca: *const c_char,
    /// The file with the client certificate. NULL: none.
    pub cert: *const c_char,
    /// The file with the private key of the client certificate.
    pub key: *const c_char,
    /// The number of devices of this task. The default is 1.
    pub devices: u32,
    /// The transport to tasks on this host: one of MUSTER_TRANSPORT_*.
    pub transport: u32,
    /// The address IP:PORT where the transfer engine listens; port 0 picks a free one. NULL: 127.0.0.1:0. "none": tasks of
    /// this host only. Any other address needs a token, certificates, or `insecure_transfers`.
    pub listen: *const c_char,
    /// The address IP:PORT that other tasks dial. NULL: the one where it listens.
    pub advertise: *const c_char,
    /// The secret that all tasks of the job share, at least 16 random bytes. NULL: none.
    pub token: *const u8,
    /// The length of the secret.
    pub token_len: usize,
    /// The file with the certificate of the transfer engine, with which transfers over TCP are encrypted. NULL: none.
    pub transfer_cert: *const c_char,
    /// The file with its private key.
    pub transfer_key: *const c_char,
    /// The file with the authorities that have issued the certificates of all tasks.
    pub transfer_ca: *const c_char,
    /// 1 to listen beyond loopback without token and certificates, inside a network that you trust; otherwise 0.
    pub insecure_transfers: u32,
    /// Zero.
    pub reserved: u32,
}

const DEFAULTS: MusterJoinOptions = MusterJoinOptions {
    size: size_of::<MusterJoinOptions>(),
    service: null(),
    job: null(),
    task: -1,
    tasks: -1,
    heartbeat_timeout_ms: 100_000,
    ca: null(),
    cert: null(),
    key: null(),
    devices: 1,
    transport: MUSTER_TRANSPORT_AUTO,
    listen: null(),
    advertise: null(),
    token: null(),
    token_len: 0,
    transfer_cert: null(),
    transfer_key: null(),
    transfer_ca: null(),
    insecure_transfers: 0,
    reserved: 0,
};

/// How long the service may take to say which tasks are missing, and how many a message lists.
const PRESENCE_TIME: Duration = Duration::from_secs(5);
const NAMED_MAX: usize = 20;

/// Sets the defaults. `size` is `sizeof(muster_join_options)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn muster_join_options_init(
    options: *mut MusterJoinOptions,
    size: usize,
) -> MusterStatus {
    // SAFETY: the caller passes the size of the struct that it has.
    run_interface_function(|| unsafe { write_defaults("options", options, size, DEFAULTS) })
}

/// Registers a new incarnation of a task, starts its transfer engine, and waits until the service counts it as connected:
/// in a run that is forming, until all tasks have registered. From then on threads of the library send heartbeats. If the
/// timeout passes, it asks the service which tasks are missing, for at most 5 s. It reads the environment, which no other
/// thread may change meanwhile.
///
/// `cancellation` may be NULL, here and in every wait. Free the agent with `muster_agent_free`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn muster_join(
    options: *const MusterJoinOptions,
    timeout_ms: i64,
    cancellation: *const MusterCancellation,
    agent: *mut *mut MusterAgent,
) -> MusterStatus {
    run_interface_function(|| {
        let place = OutputPointer::new("agent", agent)?;
        let limits = WaitLimits::new(timeout_ms, cancellation)?;
        // SAFETY: the caller passes a struct that `muster_join_options_init` has set.
        let config = unsafe { options_to_config(options, limits.timeout) }?;
        let answer_time = WaitLimits { timeout: limits.timeout + PRESENCE_TIME, ..limits };
        let joined = wait(answer_time, join(config))?;
        place.set(handles::add(Arc::new(AgentObject::new(joined))));
        Ok(())
    })
}

async fn join(config: AgentConfig) -> Result<Agent, CallError> {
    let limit = config.register_limit;
    let agent = match Agent::join(config.clone()).await {
        Ok(agent) => agent,
        Err(error) => {
            let error = CallError::from(error);
            return Err(match error.status {
                MusterStatus::TimedOut => missing_tasks_error(config, limit).await.unwrap_or(error),
                _ => error,
            });
        }
    };
    // The states of the tasks are here, and the roster is made of them in a moment.
    let (here, mut roster) = (agent.here().task, agent.roster());
    let known = roster.wait_for(|roster| roster.lives.contains_key(&here));
    let _in_time = tokio::time::timeout(ANSWER_TIME, known).await;
    Ok(agent)
}

/// Returns the error that names the tasks that have not registered, if the service says so.
async fn missing_tasks_error(config: AgentConfig, waited: Duration) -> Option<CallError> {
    let config = AgentConfig { call_limit: PRESENCE_TIME, ..config };
    let presence = muster::agent::list_task_presences(&config).await.ok()?;
    let missing: Vec<String> = presence
        .iter()
        .filter(|other| other.incarnation.is_none() && other.task != config.task)
        .map(|other| other.task.to_string())
        .collect();
    let names = missing.get(..NAMED_MAX).map_or_else(|| missing.join(", "), |few| few.join(", ") + ", …");
    let (count, all, service) = (missing.len(), presence.len(), &config.service);
    (count > 0).then(|| {
        CallError::new(
            MusterStatus::TasksMissing,
            format!(
                "{count} of {all} tasks have not registered at {service}: {names} (waited for {waited:?}). Start them, or \
                 look at `muster status`; then join again"
            ),
        )
    })
}

/// Returns a number of a task or of tasks; `None` for -1.
fn parse_optional_number(name: &str, given: i64) -> Result<Option<u32>, CallError> {
    match given {
        -1 => Ok(None),
        _ => u32::try_from(given).map(Some).map_err(|_| {
            CallError::invalid_argument(format!("{name} is {given}: give a number from 0, or -1"))
        }),
    }
}

/// Returns the configuration that the options describe.
///
/// # Safety
/// As of [`read_options`] and [`read_optional_text`].
unsafe fn options_to_config(
    given: *const MusterJoinOptions,
    register_limit: Duration,
) -> Result<AgentConfig, CallError> {
    // SAFETY: the caller guarantees it; any bytes are valid numbers and pointers.
    let given = unsafe { read_options("options", given, DEFAULTS) }?;
    // SAFETY: the caller guarantees that each text is null or ends with NUL.
    let owned =
        |name: &str, text| unsafe { read_optional_text(name, text) }.map(|text| text.map(str::to_owned));
    let path = |name: &str, text| owned(name, text).map(|text| text.map(PathBuf::from));
    let flags = ClusterFlags {
        task: parse_optional_number("task", given.task)?,
        tasks: parse_optional_number("tasks", given.tasks)?,
        service: owned("service", given.service)?,
    };
    let place = ClusterEnv::detect(&flags, &environment_variables()).map_err(AgentError::from)?;
    let (ca, cert, key) = (path("ca", given.ca)?, path("cert", given.cert)?, path("key", given.key)?);
    if cert.is_some() != key.is_some() || (cert.is_some() && ca.is_none()) {
        return Err(CallError::invalid_argument("cert and key need each other, and ca"));
    }
    let job = owned("job", given.job)?;
    // SAFETY: the caller guarantees that the secret has this length.
    let token = unsafe { read_array("token", given.token, given.token_len) }?;
    let token = (!token.is_empty()).then(|| token.to_vec());
    let transfer_tls = read_certificates(
        path("transfer_cert", given.transfer_cert)?,
        path("transfer_key", given.transfer_key)?,
        path("transfer_ca", given.transfer_ca)?,
    )?;
    let listen = match owned("listen", given.listen)?.as_deref() {
        None => Some(SocketAddr::from(([127, 0, 0, 1], 0))),
        Some("none") => None,
        Some(text) => Some(parse_address("listen", text)?),
    };
    let advertise = owned("advertise", given.advertise)?;
    let advertise = advertise.map(|text| parse_address("advertise", &text)).transpose()?;
    let config = AgentConfig {
        authority: job.map(|job| format!("{job}.job")),
        tls: ca.map(|ca| AgentTlsFiles { ca, own: cert.zip(key) }),
        tasks: place.tasks.map(|tasks| tasks.value),
        devices: given.devices,
        transport: parse_transport(given.transport)?,
        fabric: fabric_of_environment(),
        cliques: cliques_of_environment()?,
        listen,
        advertise: advertise.into_iter().collect(),
        token,
        transfer_tls,
        register_limit,
        heartbeat_timeout: parse_timeout_ms("heartbeat_timeout_ms", given.heartbeat_timeout_ms)?,
        ..AgentConfig::new(place.service.value, place.task.value)
    };
    check_credentials_if_exposed(&config, given.insecure_transfers == 1)?;
    Ok(config)
}

fn parse_address(name: &str, text: &str) -> Result<SocketAddr, CallError> {
    text.parse().map_err(|_| {
        CallError::invalid_argument(format!(
            "{name} is {text:?}: write an address IP:PORT (port 0 picks a free one)"
        ))
    })
}

fn parse_transport(number: u32) -> Result<TransportChoice, CallError> {
    Ok(match number {
        MUSTER_TRANSPORT_AUTO => TransportChoice::Auto,
        MUSTER_TRANSPORT_SHM => TransportChoice::Shm,
        MUSTER_TRANSPORT_PVM => TransportChoice::Pvm,
        MUSTER_TRANSPORT_UNIX => TransportChoice::Unix,
        MUSTER_TRANSPORT_TCP => TransportChoice::Tcp,
        _ => {
            return Err(CallError::invalid_argument(format!(
                "transport is {number}: give one of MUSTER_TRANSPORT_*"
            )));
        }
    })
}

fn read_certificates(
    cert: Option<PathBuf>,
    key: Option<PathBuf>,
    ca: Option<PathBuf>,
) -> Result<Option<PemCertificates>, CallError> {
    let (cert, key, ca) = match (cert, key, ca) {
        (Some(cert), Some(key), Some(ca)) => (cert, key, ca),
        (None, None, None) => return Ok(None),
        _ => {
            return Err(CallError::invalid_argument(
                "transfer_cert, transfer_key and transfer_ca need one another",
            ));
        }
    };
    let read = |path: PathBuf| {
        std::fs::read(&path).map_err(|error| {
            CallError::new(MusterStatus::Tls, format!("cannot read {}: {error}", path.display()))
        })
    };
    Ok(Some(PemCertificates { cert: read(cert)?, key: read(key)?, ca: read(ca)?, name: None }))
}
