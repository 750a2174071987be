//! The transfer engine of a task, and its transfers in flight, for Python.
//!
//! The Python code (`muster/transfer.py`) decides which memory an array has, and turns keys and peers of programs
//! into those of the engine. No function of this module waits while its thread holds the GIL. Begin at
//! [`Engine::attach`] and [`Engine::transfer`].

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::num::NonZeroUsize;
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use muster::agent::{
    AgentConfig, AgentError, AttachedEngine, EngineHost, PeerWait, PendingLaunch, TransferAccess,
    cliques_of_environment, fabric_of_environment,
};
use muster::clock;
use muster::transfer::{
    DeviceId, Incarnation, LaunchOptions, LaunchStats, Membership, PeerTask, PemCertificates, PrepareError,
    PreparedTransfers, ShardBuffers, TaskId, TransferError, TransferHandle,
};
use pyo3::prelude::*;
use tokio::task::AbortHandle;

use super::buffer::Buffer;
use super::cluster_env::{TlsPaths, tls_files};
use super::errors::{agent_error, new_exception, transfer_error};
use super::launch_request::{
    LaunchChannel, NamedTransfer, Options, Request, check_own_side, launch_options, peer_task,
    sent_and_received, specs,
};
use super::process_owned::ProcessOwned;
use super::reshard::{ArrayToReshard, reshard};
use super::source::Source;
use super::wait::{parse_timeout_seconds, runtime, wait, wait_in_steps};

/// The time that peers have beyond a limit of their own.
const GRACE: Duration = Duration::from_secs(5);

/// How engines of other hosts reach this one: the address to listen on, those to dial, a file with the shared secret, the
/// certificates, and whether neither is needed.
pub type NetworkOptions = (String, Vec<String>, Option<PathBuf>, Option<TlsPaths>, bool);

/// Applies network options to a configuration.
pub fn apply_network(py: Python<'_>, config: &mut AgentConfig, network: NetworkOptions) -> PyResult<()> {
    let (listen, advertise, token_file, tls, insecure) = network;
    let address = |name: &str, text: &str| {
        let wrong = |_| {
            let text = format!("{name} is {text:?}: give IP:PORT, with port 0 for any free one");
            new_exception(py, "SettingsError", &text, &[])
        };
        text.parse::<SocketAddr>().map_err(wrong)
    };
    config.fabric = fabric_of_environment();
    config.cliques = cliques_of_environment().map_err(|error| agent_error(py, &error))?;
    config.listen = Some(address("listen", &listen)?);
    config.advertise = advertise.iter().map(|text| address("advertise", text)).collect::<PyResult<_>>()?;
    let read = |path: PathBuf| {
        std::fs::read(&path).map_err(|error| {
            new_exception(py, "SettingsError", &format!("cannot read {}: {error}", path.display()), &[])
        })
    };
    let certificates = match tls {
        None => None,
        Some((ca, Some(cert), Some(key))) => {
            Some(PemCertificates { cert: read(cert)?, key: read(key)?, ca: read(ca)?, name: None })
        }
        Some(_) => {
            let text = "each engine needs a certificate of its own: give muster.Tls(ca, cert, key)";
            return Err(new_exception(py, "SettingsError", text, &[]));
        }
    };
    let access = TransferAccess { token_file, certificates, is_insecure: insecure };
    access.apply_to_config(config).map_err(|error| agent_error(py, &error))
}

/// An array that is to be moved: its name, its descriptions before and after, and its shards before and after.
type ReshardRequest<'py> =
    (String, String, String, BTreeMap<u32, Py<Source>>, BTreeMap<u32, Bound<'py, Buffer>>);

/// The transfer engine of a task: of an [`Agent`](super::agent::Agent), or attached to a task that JAX's client has
/// registered.
#[pyclass(frozen, module = "muster._native")]
pub struct Engine {
    /// `None` only while it is dropped.
    host: Option<Arc<EngineHost>>,
    /// `None` if the engine belongs to an agent, or is closed.
    attachment: Mutex<Option<AttachedEngine>>,
}

impl Engine {
    /// Returns the engine of an agent.
    pub fn of_agent(host: &Arc<EngineHost>) -> Self {
        Self { host: Some(Arc::clone(host)), attachment: Mutex::new(None) }
    }

    /// Returns the engine, unless its incarnation has ended.
    fn live_host(&self, py: Python<'_>) -> PyResult<&Arc<EngineHost>> {
        runtime(py)?;
        let gone = || new_exception(py, "MusterError", "the engine is gone", &[]);
        let host = self.host.as_ref().ok_or_else(gone)?;
        match host.incarnation_end_reason() {
            None => Ok(host),
            Some(error) => Err(agent_error(py, &error)),
        }
    }

    /// Waits until the engines of all these tasks are known.
    fn wait_for_engines(
        &self,
        py: Python<'_>,
        peers: impl Iterator<Item = PyResult<PeerTask>>,
        limit: Duration,
    ) -> PyResult<()> {
        let host = Arc::clone(self.live_host(py)?);
        let mut peers = peers.collect::<PyResult<Vec<_>>>()?;
        peers.retain(|peer| *peer != host.here().peer_task());
        peers.sort_unstable();
        peers.dedup();
        if host.can_launch_with(&peers) {
            return Ok(());
        }
        let known = wait(py, async move {
            host.wait_for_peers(&peers, limit).await?;
            let earlier = host.wait_for_earlier_launches(&peers);
            let late =
                |_| AgentError::TimedOut { call: "launches that wait for places with the same tasks", limit };
            tokio::time::timeout(limit, earlier).await.map_err(late)
        })?;
        known.map_err(|error| agent_error(py, &error))
    }

    /// Launches transfers as one. Transfers of one array are `single`.
    fn launch(
        &self,
        py: Python<'_>,
        requests: &[Request<'_>],
        single: bool,
        given: Options,
    ) -> PyResult<Transfer> {
        let options = launch_options(py, given)?;
        let host = self.live_host(py)?;
        let here = host.here();
        let peers = requests.iter().map(|request| request.peer(py)).collect::<PyResult<Vec<_>>>()?;
        let outgoing = requests.first().is_some_and(|request| request.outgoing);
        let channel = LaunchChannel::new(options.channel, single, outgoing, peers.first().copied());
        let named = self.named_transfers(py, requests)?;
        let limit = transfer_limit(options);
        if !host.can_launch_with(&peers) {
            check_own_side(host.engine(), &named).map_err(|error| transfer_error(py, &error.into()))?;
            let size = sent_and_received(named.iter().map(NamedTransfer::direction_and_bytes));
            let pending = reserve(py, host, peers, (named.len(), size), options, channel)?;
            let transfer = Transfer::of_pending(host, &pending, options);
            py.detach(|| pending.launch(host.engine(), move |membership| specs(named, here, membership)));
            return Ok(transfer);
        }
        let engine = host.engine();
        let found = engine.with_membership(|membership| {
            specs(named, here, membership).map(|specs| (specs, channel.number(here, membership)))
        });
        let (specs, channel) = found.map_err(|error| new_exception(py, "SettingsError", &error, &[]))?;
        let handle = py.detach(|| engine.transfer(&[], specs, LaunchOptions { channel, ..options }));
        // An error of the request itself is known already.
        if let Some(Err(error @ (TransferError::Prepare(_) | TransferError::Memory(_)))) = handle.outcome() {
            return Err(transfer_error(py, &error));
        }
        Ok(Transfer { handle, limit, wait: None })
    }

    fn named_transfers(&self, py: Python<'_>, requests: &[Request<'_>]) -> PyResult<Vec<NamedTransfer>> {
        let host = self.live_host(py)?;
        requests.iter().map(|request| NamedTransfer::new(py, host, request)).collect()
    }
}

/// Returns the time within which a launch is over, by its deadline.
fn transfer_limit(options: LaunchOptions) -> Duration {
    options.deadline.unwrap_or_default() + options.stall + GRACE
}

/// Takes the place of a launch in the order of its channel, now or when its peers are members.
fn reserve(
    py: Python<'_>,
    host: &Arc<EngineHost>,
    peers: Vec<PeerTask>,
    (count, bytes): (usize, (u64, u64)),
    options: LaunchOptions,
    channel: LaunchChannel,
) -> PyResult<PendingLaunch> {
    let here = host.here();
    let count = NonZeroUsize::new(count).ok_or_else(|| transfer_error(py, &PrepareError::Empty.into()))?;
    let number = move |membership: &Membership| channel.number(here, membership);
    py.detach(|| host.reserve_launch(peers, count, bytes, options, number))
        .map_err(|error| agent_error(py, &error))
}

#[pymethods]
impl Engine {
    /// Attaches an engine to a task that another client has registered under this incarnation.
    #[staticmethod]
    #[pyo3(signature = (service, process_id, incarnation, devices, *, timeout, tls, network))]
    #[expect(clippy::too_many_arguments, reason = "they are the keywords of a Python function")]
    fn attach(
        py: Python<'_>,
        service: String,
        process_id: u32,
        incarnation: u64,
        devices: Vec<u32>,
        timeout: f64,
        tls: Option<TlsPaths>,
        network: NetworkOptions,
    ) -> PyResult<Self> {
        let call_limit = parse_timeout_seconds(py, "timeout", timeout)?.max(Duration::from_millis(1));
        let mut config =
            AgentConfig { tls: tls_files(tls), call_limit, ..AgentConfig::new(service, process_id) };
        apply_network(py, &mut config, network)?;
        let incarnation = Incarnation::new(incarnation).ok_or_else(|| {
            let text =
                format!("task {process_id} has not registered: attach to a task that has joined its job");
            new_exception(py, "StaleIncarnation", &text, &[])
        })?;
        let devices = devices.into_iter().map(DeviceId).collect();
        let opened = wait(py, async move { AttachedEngine::open(config, incarnation, devices).await })?;
        let attachment = opened.map_err(|error| agent_error(py, &error))?;
        let host = Some(Arc::clone(attachment.host()));
        Ok(Self { host, attachment: Mutex::new(Some(attachment)) })
    }

    #[getter]
    fn process_id(&self) -> u32 {
        self.host.as_ref().map_or(0, |host| host.here().task.0)
    }

    #[getter]
    fn incarnation(&self) -> u64 {
        self.host.as_ref().map_or(0, |host| host.here().incarnation.get())
    }

    #[getter]
    fn devices(&self) -> Vec<u32> {
        let host = self.host.as_ref();
        host.map(|host| host.devices().iter().map(|device| device.0).collect()).unwrap_or_default()
    }

    /// Why the engine has ended, if it has.
    #[getter]
    fn ended(&self) -> Option<String> {
        self.host.as_ref().and_then(|host| host.incarnation_end_reason()).map(|error| error.to_string())
    }

    /// Returns the tasks whose engines are known, with their incarnations and devices.
    fn peers(&self, py: Python<'_>) -> PyResult<BTreeMap<u32, (u64, Vec<u32>)>> {
        let host = self.live_host(py)?;
        let roster = host.roster();
        let roster = roster.borrow();
        let peers = roster.membership.peers.iter().filter(|(task, _)| **task != host.here().task);
        let devices = |devices: &[DeviceId]| devices.iter().map(|device| device.0).collect();
        Ok(peers.map(|(task, peer)| (task.0, (peer.incarnation.get(), devices(&peer.devices)))).collect())
    }

    /// Returns when the engines of these tasks are known, each with its job if that is another one.
    fn wait_for_peers(
        &self,
        py: Python<'_>,
        peers: Vec<(Option<String>, u32)>,
        timeout: f64,
    ) -> PyResult<()> {
        let peers = peers.iter().map(|(job, task)| peer_task(py, job.as_deref(), *task));
        self.wait_for_engines(py, peers, parse_timeout_seconds(py, "timeout", timeout)?)
    }

    /// Launches transfers as one. Transfers of one array are `single`, and the channel is the first of four then.
    fn transfer(
        &self,
        py: Python<'_>,
        requests: Vec<Request<'_>>,
        single: bool,
        given: Options,
    ) -> PyResult<Transfer> {
        self.launch(py, &requests, single, given)
    }

    /// Launches the transfer of one whole array, with a task of this job. Its first device and this task's take part.
    fn transfer_whole(
        &self,
        outgoing: bool,
        memory: Bound<'_, PyAny>,
        task: u32,
        key: u64,
        given: Options,
    ) -> PyResult<Transfer> {
        let py = memory.py();
        let place = String::new();
        let request = Request { outgoing, memory, job: None, task, far: None, near: None, key, place };
        self.launch(py, &[request], true, given)
    }

    /// Takes the place of a launch in the order of its channel, for transfers whose memory is known later: of each,
    /// whether it sends, the job (if it is another one) and the task at the other end, and its bytes.
    fn reserve(
        &self,
        py: Python<'_>,
        transfers: Vec<(bool, Option<String>, u32, u64)>,
        single: bool,
        given: Options,
    ) -> PyResult<Reserved> {
        let options = launch_options(py, given)?;
        let peer =
            |(_, job, task, _): &(bool, Option<String>, u32, u64)| peer_task(py, job.as_deref(), *task);
        let peers = transfers.iter().map(peer).collect::<PyResult<Vec<PeerTask>>>()?;
        let outgoing = transfers.first().is_some_and(|transfer| transfer.0);
        let channel = LaunchChannel::new(options.channel, single, outgoing, peers.first().copied());
        let bytes = sent_and_received(transfers.iter().map(|transfer| (transfer.0, transfer.3)));
        let size = (transfers.len(), bytes);
        let host = self.live_host(py)?;
        let pending = reserve(py, host, peers, size, options, channel)?;
        let transfer = Transfer::of_pending(host, &pending, options);
        Ok(Reserved { launch: ProcessOwned::new(Mutex::new(Some(pending))), transfer })
    }

    /// Launches the transfers of a reserved launch.
    fn launch_reserved(
        &self,
        py: Python<'_>,
        reserved: &Reserved,
        requests: Vec<Request<'_>>,
    ) -> PyResult<()> {
        let host = self.live_host(py)?;
        let (named, here) = (self.named_transfers(py, &requests)?, host.here());
        let launch = lock(reserved.launch.get(py)?).take();
        py.detach(move || {
            if let Some(launch) = launch {
                launch.launch(host.engine(), move |membership| specs(named, here, membership));
            }
        });
        Ok(())
    }

    /// Moves arrays from one sharding to another: of each its name, its two descriptions for the planner, and its shards
    /// before and after, by device. Returns the bytes sent, received and copied, and the seconds that it took.
    fn reshard(
        &self,
        py: Python<'_>,
        arrays: Vec<ReshardRequest<'_>>,
        tasks: Vec<u32>,
        given: Options,
    ) -> PyResult<(u64, u64, u64, f64)> {
        let began = clock::monotonic();
        let mut options = launch_options(py, given)?;
        let limit = options.deadline.unwrap_or_default();
        self.wait_for_engines(py, tasks.into_iter().map(|task| Ok(TaskId(task).into())), limit)?;
        options.deadline = Some(limit.saturating_sub(clock::monotonic().saturating_duration_since(began)));
        let moves = arrays.into_iter().map(|(name, before, after, held, wanted)| {
            let held = held.into_iter();
            let held = held.map(|(device, shard)| Ok((DeviceId(device), shard.get().memory(py)?.clone())));
            let wanted = wanted.into_iter();
            let wanted =
                wanted.map(|(device, shard)| Ok((DeviceId(device), shard.get().memory(py)?.clone())));
            let (source, destination) = (held.collect::<PyResult<_>>()?, wanted.collect::<PyResult<_>>()?);
            let shards = ShardBuffers { source, destination };
            Ok(ArrayToReshard { name, descriptions: (before, after), shards })
        });
        let moved = reshard(py, self.live_host(py)?, moves.collect::<PyResult<_>>()?, options)?;
        Ok((moved.sent, moved.received, moved.copied, moved.elapsed.as_secs_f64()))
    }

    /// Prepares transfers, to be launched many times.
    fn prepare(&self, py: Python<'_>, requests: Vec<Request<'_>>, given: Options) -> PyResult<Prepared> {
        let options = launch_options(py, given)?;
        let limit = options.deadline.unwrap_or_default();
        self.wait_for_engines(py, requests.iter().map(|request| request.peer(py)), limit)?;
        let (named, host) = (self.named_transfers(py, &requests)?, self.live_host(py)?);
        let found = host.engine().with_membership(|membership| specs(named, host.here(), membership));
        let specs = found.map_err(|error| new_exception(py, "SettingsError", &error, &[]))?;
        let engine = host.engine().clone();
        let prepared = wait(py, async move {
            let preparing = engine.prepare(specs, options);
            tokio::time::timeout(limit, preparing).await
        })?;
        match prepared {
            Ok(Ok(prepared)) => {
                let transfers = ProcessOwned::new(Mutex::new(Some(prepared)));
                Ok(Prepared { transfers, limit: transfer_limit(options) })
            }
            Ok(Err(error)) => Err(transfer_error(py, &error.into())),
            Err(_) => Err(agent_error(py, &AgentError::TimedOut { call: "preparation of transfers", limit })),
        }
    }

    /// Ends an attached engine. Its transfers in flight fail. The task stays registered.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        // A forked process keeps it: its end would join threads that exist only in the parent.
        runtime(py)?;
        let Some(attachment) = lock(&self.attachment).take() else { return Ok(()) };
        wait(py, attachment.close())
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let parts = (self.host.take(), lock(&self.attachment).take());
        match Python::attach(runtime) {
            // The end of the engine joins threads: not on a thread that holds the GIL.
            Ok(runtime) => _ = runtime.spawn_blocking(move || drop(parts)),
            // A forked process has none of the threads that it would join.
            Err(_) => std::mem::forget(parts),
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Prepared transfers.
#[pyclass(frozen, module = "muster._native")]
pub struct Prepared {
    /// `None` once it is closed.
    transfers: ProcessOwned<Mutex<Option<PreparedTransfers>>>,
    limit: Duration,
}

#[pymethods]
impl Prepared {
    /// Launches the transfers.
    fn launch(&self, py: Python<'_>) -> PyResult<Transfer> {
        let transfers = self.transfers.get(py)?;
        let launched = py.detach(|| lock(transfers).as_mut().map(|transfers| transfers.launch(&[])));
        let Some(handle) = launched else {
            let text = "these prepared transfers are closed: prepare them again";
            return Err(new_exception(py, "TransferError", text, &[("reason", "dropped")]));
        };
        Ok(Transfer { handle, limit: self.limit, wait: None })
    }

    /// Lets go of what was prepared. Launches in flight go on.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let transfers = self.transfers.get(py)?;
        py.detach(|| drop(lock(transfers).take()));
        Ok(())
    }
}

/// A launch whose memory is not known yet.
#[pyclass(frozen, module = "muster._native")]
pub struct Reserved {
    /// `None` once it is launched or has failed.
    launch: ProcessOwned<Mutex<Option<PendingLaunch>>>,
    transfer: Transfer,
}

#[pymethods]
impl Reserved {
    /// Returns the transfers.
    fn transfer(&self) -> Transfer {
        self.transfer.clone()
    }

    /// Fails the transfers.
    fn fail(&self, py: Python<'_>, reason: String) -> PyResult<()> {
        let launch = lock(self.launch.get(py)?).take();
        py.detach(move || {
            if let Some(launch) = launch {
                launch.fail(&TransferError::Dependency(reason));
            }
        });
        Ok(())
    }
}

/// Transfers in flight.
#[pyclass(frozen, module = "muster._native")]
#[derive(Clone)]
pub struct Transfer {
    handle: TransferHandle,
    /// A time within which it is over, by its deadline.
    limit: Duration,
    /// The wait for its peers; none if it was launched at once.
    wait: Option<PeerWait>,
}

impl Transfer {
    fn of_pending(host: &Arc<EngineHost>, launch: &PendingLaunch, options: LaunchOptions) -> Self {
        let wait = Some(host.peer_wait(launch, options.deadline));
        Self { handle: launch.transfer().clone(), limit: transfer_limit(options), wait }
    }

    /// Returns the exception for a failure.
    fn exception(&self, py: Python<'_>, error: &TransferError) -> PyErr {
        let reason = self.wait.as_ref().and_then(|wait| wait.reason(error));
        match reason {
            Some(error) => agent_error(py, &error),
            None => transfer_error(py, error),
        }
    }
}

#[pymethods]
impl Transfer {
    /// Waits for the outcome of all, for the time of its deadline if no other is given. Returns the bytes sent and
    /// received, and the seconds that it took.
    #[pyo3(signature = (timeout = None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<(u64, u64, f64)> {
        let limit =
            timeout.map_or(Ok(self.limit), |timeout| parse_timeout_seconds(py, "timeout", timeout))?;
        let handle = &self.handle;
        match wait_in_steps(py, limit, |time| handle.outcome().or_else(|| handle.wait_for(time)))? {
            Some(Ok(LaunchStats { sent, received, elapsed })) => Ok((sent, received, elapsed.as_secs_f64())),
            Some(Err(error)) => Err(self.exception(py, &error)),
            None => {
                let text = format!(
                    "the transfer is not over within {limit:?}, and goes on: wait again, or cancel it"
                );
                Err(new_exception(py, "Deadline", &text, &[]))
            }
        }
    }

    /// Whether all have their outcome.
    fn done(&self) -> bool {
        self.handle.outcome().is_some()
    }

    /// Cancels what is not complete, and waits until no byte can land any more, here or at the peers.
    fn cancel(&self, py: Python<'_>, reason: &str, timeout: f64) -> PyResult<()> {
        let limit = parse_timeout_seconds(py, "timeout", timeout)?;
        let handle = &self.handle;
        runtime(py)?;
        let proof = py.detach(|| handle.cancel(reason));
        let is_quiet = wait_in_steps(py, limit, |time| proof.wait_for(time).then_some(()))?;
        is_quiet.ok_or_else(|| {
            let text = format!(
                "the transfer is cancelled, but its peers have not confirmed within {limit:?} that nothing is in flight: do not                  reuse its memory; cancel it again to wait longer, or end the engine"
            );
            new_exception(py, "Deadline", &text, &[])
        })
    }

    /// Closes a duplicate of this file descriptor when all have their outcome, or the result is dropped; the writing end of
    /// a pipe wakes its reader.
    #[pyo3(name = "close_when_done")]
    fn close_descriptor_when_done(&self, py: Python<'_>, descriptor: RawFd) -> PyResult<CloseOnCompletion> {
        let end = duplicate_descriptor(descriptor)?;
        let handle = self.handle.clone();
        let watching = runtime(py)?.spawn(async move {
            // The thread that is woken asks for the outcome.
            let _outcome = handle.await;
            drop(end);
        });
        Ok(CloseOnCompletion(watching.abort_handle()))
    }
}

/// A watch for the outcome of transfers, which ends with this value.
#[pyclass(frozen, module = "muster._native")]
pub struct CloseOnCompletion(AbortHandle);

impl Drop for CloseOnCompletion {
    fn drop(&mut self) {
        self.0.abort();
    }
}

#[expect(unsafe_code, reason = "Python names a descriptor by its number")]
fn duplicate_descriptor(descriptor: RawFd) -> PyResult<OwnedFd> {
    // SAFETY: the caller keeps the descriptor open during this call. If the number is not open, the system says so.
    let borrowed = unsafe { BorrowedFd::borrow_raw(descriptor.max(0)) };
    Ok(rustix::io::fcntl_dupfd_cloexec(borrowed, 0).map_err(std::io::Error::from)?)
}
