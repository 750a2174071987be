//! The transfer engine of a task, and its transfers in flight, for Python.
//!
//! The Python code (`muster/transfer.py`) decides which memory an array has, and turns keys and peers of programs
//! into those of the engine. Nothing in this module waits while it holds the GIL. Begin at [`Engine::attach`] and
//! [`Engine::transfer`].

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::num::NonZeroUsize;
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use muster::agent::{AgentConfig, AgentError, AttachedEngine, EngineHost, TransferAccess};
use muster::clock;
use muster::transfer::{
    BufferLayout, DeviceId, Incarnation, LaunchOptions, LaunchStats, PeerJob, PeerTask, PemCertificates,
    PrepareError, PreparedTransfers, PriorityClass, ReservedLaunch, ShardBuffers, Span, TaskId,
    TransferError, TransferHandle, TransferKey, TransferSpec,
};
use pyo3::prelude::*;
use tokio::task::AbortHandle;

use super::buffer::Buffer;
use super::errors::{agent_error, new_exception, transfer_error};
use super::place::{TlsPaths, tls_files};
use super::process_owned::ProcessOwned;
use super::reshard::{ArrayToReshard, reshard};
use super::source::Source;
use super::target::Target;
use super::wait::{runtime, seconds, wait, wait_in_steps};

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
    access.apply(config).map_err(|error| agent_error(py, &error))
}

/// One transfer that a program wants.
#[derive(FromPyObject)]
struct Request<'py> {
    /// Whether it sends.
    outgoing: bool,
    /// The memory of its bytes: a Source, a Target or a Buffer.
    memory: Bound<'py, PyAny>,
    /// The job of the other task, if it is not this one's.
    job: Option<String>,
    /// The task at the other end.
    task: u32,
    /// The device there; its first one if none is named.
    far: Option<u32>,
    /// The device here; the first one if none is named.
    near: Option<u32>,
    key: u64,
    /// The place in an array that is divided; nothing for a whole one.
    place: String,
}

/// An array that is to be moved: its name, its descriptions before and after, and its shards before and after.
type ReshardRequest<'py> =
    (String, String, String, BTreeMap<u32, Py<Source>>, BTreeMap<u32, Bound<'py, Buffer>>);

/// How transfers are launched: channel, priority class, timeout and stall limit.
type Options = (u32, String, f64, f64);

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
        match host.end_reason() {
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
        let membership = host.engine().membership();
        if peers.iter().all(|peer| membership.current_member(*peer).is_some()) {
            return Ok(());
        }
        let known = wait(py, async move { host.wait_for_peers(&peers, limit).await })?;
        known.map_err(|error| agent_error(py, &error))
    }

    fn wait_for_request_peers(
        &self,
        py: Python<'_>,
        requests: &[Request<'_>],
        limit: Duration,
    ) -> PyResult<()> {
        let peers = requests.iter().map(|request| peer_task(py, request.job.as_deref(), request.task));
        self.wait_for_engines(py, peers, limit)
    }

    /// Turns requests into those of the engine.
    fn specs(&self, py: Python<'_>, requests: &[Request<'_>]) -> PyResult<Vec<TransferSpec>> {
        let host = self.live_host(py)?;
        let membership = host.engine().membership();
        let first_of = |devices: &[DeviceId], task: PeerTask| {
            devices.iter().min().copied().ok_or_else(|| {
                let text = format!(
                    "task {task} has no devices to send from or receive on: attach with devices=[...]"
                );
                new_exception(py, "SettingsError", &text, &[])
            })
        };
        let spec = |request: &Request<'_>| {
            let (task, here) =
                (peer_task(py, request.job.as_deref(), request.task)?, host.here().peer_task());
            let far = match request.far {
                Some(far) => DeviceId(far),
                None if task == here => first_of(host.devices(), here)?,
                // A task that has just been lost has none, and the engine says so.
                None => membership
                    .current_member(task)
                    .and_then(|member| membership.member_info(member))
                    .map_or(Ok(DeviceId(u32::MAX)), |peer| first_of(&peer.devices, task))?,
            };
            let near =
                request.near.map_or_else(|| first_of(host.devices(), here), |near| Ok(DeviceId(near)))?;
            let (span, key) = (span(&request.memory, &request.place)?, TransferKey(request.key));
            let spec = if request.outgoing {
                TransferSpec::send(span, near, far, key)
            } else {
                TransferSpec::receive(span, far, near, key)
            };
            Ok(spec.with_job(task.job))
        };
        requests.iter().map(spec).collect()
    }

    /// Launches transfers as one.
    fn launch(&self, py: Python<'_>, requests: &[Request<'_>], given: Options) -> PyResult<Transfer> {
        let began = clock::monotonic();
        let (mut options, limit) = options(py, given)?;
        self.wait_for_request_peers(py, requests, limit)?;
        let specs = self.specs(py, requests)?;
        let engine = self.live_host(py)?.engine().clone();
        options.deadline = Some(limit.saturating_sub(clock::monotonic().saturating_duration_since(began)));
        let handle = py.detach(move || engine.transfer(&[], specs, options));
        // An error of the request itself is known already.
        if let Some(Err(error @ (TransferError::Prepare(_) | TransferError::Memory(_)))) = handle.outcome() {
            return Err(transfer_error(py, &error));
        }
        Ok(Transfer { handle, limit: limit + options.stall + GRACE })
    }
}

/// Returns a task of this job, or of the one with this name.
fn peer_task(py: Python<'_>, job: Option<&str>, task: u32) -> PyResult<PeerTask> {
    let named = job.map_or(Ok(PeerJob::OWN), PeerJob::named);
    let job = named.map_err(|error| new_exception(py, "SettingsError", &error.to_string(), &[]))?;
    Ok(PeerTask { job, task: TaskId(task) })
}

/// Returns the memory of a request, with its layout.
fn span(memory: &Bound<'_, PyAny>, place: &str) -> PyResult<Span> {
    let py = memory.py();
    let (span, shape) = if let Ok(source) = memory.cast::<Source>() {
        (source.get().span(py)?, source.get().array_shape())
    } else if let Ok(target) = memory.cast::<Target>() {
        (target.get().span(py)?, target.get().array_shape())
    } else {
        let buffer = memory.cast::<Buffer>()?.get();
        (buffer.span(py)?, buffer.array_shape())
    };
    let width = u64::from(shape.dtype.bits() / 8);
    let layout = BufferLayout::array(shape.dtype.name(), width, &shape.sizes, place);
    Ok(match layout {
        Some(layout) => span.with_layout(layout),
        // The shape was checked.
        None => span,
    })
}

/// Returns the options of the engine, and the limit of the preparation.
fn options(py: Python<'_>, (channel, class, timeout, stall): Options) -> PyResult<(LaunchOptions, Duration)> {
    let class = PriorityClass::ALL.into_iter().find(|known| known.name() == class).ok_or_else(|| {
        let names = PriorityClass::ALL.map(PriorityClass::name).join(", ");
        new_exception(py, "SettingsError", &format!("priority is {class:?}: give one of {names}"), &[])
    })?;
    let deadline = seconds(py, "timeout", timeout)?;
    let stall = seconds(py, "stall_timeout", stall)?;
    Ok((LaunchOptions { channel, class, deadline: Some(deadline), stall }, deadline))
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
        let call_limit = seconds(py, "timeout", timeout)?.max(Duration::from_millis(1));
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
        self.host.as_ref().and_then(|host| host.end_reason()).map(|error| error.to_string())
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
        self.wait_for_engines(py, peers, seconds(py, "timeout", timeout)?)
    }

    /// Returns whether this task comes before a task of another job, in the order that both see; `None` if that one is not
    /// known.
    #[pyo3(name = "precedes")]
    fn precedes_task(&self, py: Python<'_>, job: &str, task: u32) -> PyResult<Option<bool>> {
        let host = self.live_host(py)?;
        let peer = host.engine().membership().current_member(peer_task(py, Some(job), task)?);
        Ok(peer.map(|peer| host.here().precedes(peer)))
    }

    /// Launches transfers as one.
    fn transfer(&self, py: Python<'_>, requests: Vec<Request<'_>>, given: Options) -> PyResult<Transfer> {
        self.launch(py, &requests, given)
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
        self.launch(
            py,
            &[Request { outgoing, memory, job: None, task, far: None, near: None, key, place }],
            given,
        )
    }

    /// Takes the place of a launch in the order of its channel, for transfers whose memory is known later: of each,
    /// whether it sends, the job (if it is another one) and the task at the other end, and its bytes.
    fn reserve(
        &self,
        py: Python<'_>,
        transfers: Vec<(bool, Option<String>, u32, u64)>,
        given: Options,
    ) -> PyResult<Reserved> {
        let began = clock::monotonic();
        let (mut options, limit) = options(py, given)?;
        let peer =
            |(_, job, task, _): &(bool, Option<String>, u32, u64)| peer_task(py, job.as_deref(), *task);
        self.wait_for_engines(py, transfers.iter().map(peer), limit)?;
        let engine = self.live_host(py)?.engine().clone();
        let peers = transfers.iter().map(peer).collect::<PyResult<Vec<PeerTask>>>()?;
        let bytes = |outgoing| {
            transfers.iter().filter(|transfer| transfer.0 == outgoing).map(|transfer| transfer.3).sum::<u64>()
        };
        let size = (bytes(true), bytes(false));
        let Some(count) = NonZeroUsize::new(transfers.len()) else {
            return Err(transfer_error(py, &PrepareError::Empty.into()));
        };
        options.deadline = Some(limit.saturating_sub(clock::monotonic().saturating_duration_since(began)));
        let reserved = py.detach(move || engine.reserve(&peers, count, size, options));
        let (handle, limit) = (reserved.transfer(), limit + options.stall + GRACE);
        Ok(Reserved { launch: ProcessOwned::new(Mutex::new(Some(reserved))), handle, limit })
    }

    /// Launches the transfers of a reserved launch.
    fn launch_reserved(
        &self,
        py: Python<'_>,
        reserved: &Reserved,
        requests: Vec<Request<'_>>,
    ) -> PyResult<()> {
        let specs = self.specs(py, &requests)?;
        let launch = lock(reserved.launch.get(py)?).take();
        py.detach(move || {
            if let Some(launch) = launch {
                launch.launch(&[], specs);
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
        let (mut options, limit) = options(py, given)?;
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
        let (options, limit) = options(py, given)?;
        self.wait_for_request_peers(py, &requests, limit)?;
        let specs = self.specs(py, &requests)?;
        let engine = self.live_host(py)?.engine().clone();
        let prepared = wait(py, async move {
            let preparing = engine.prepare(specs, options);
            tokio::time::timeout(limit, preparing).await
        })?;
        match prepared {
            Ok(Ok(prepared)) => {
                let transfers = ProcessOwned::new(Mutex::new(Some(prepared)));
                Ok(Prepared { transfers, limit: limit + options.stall + GRACE })
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
        Ok(Transfer { handle, limit: self.limit })
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
    launch: ProcessOwned<Mutex<Option<ReservedLaunch>>>,
    handle: TransferHandle,
    limit: Duration,
}

#[pymethods]
impl Reserved {
    /// Returns the transfers.
    fn transfer(&self) -> Transfer {
        Transfer { handle: self.handle.clone(), limit: self.limit }
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
pub struct Transfer {
    handle: TransferHandle,
    /// A time within which it is over, by its deadline.
    limit: Duration,
}

#[pymethods]
impl Transfer {
    /// Waits for the outcome of all, for the time of its deadline if no other is given. Returns the bytes sent and
    /// received, and the seconds that it took.
    #[pyo3(signature = (timeout = None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<(u64, u64, f64)> {
        let limit = timeout.map_or(Ok(self.limit), |timeout| seconds(py, "timeout", timeout))?;
        let handle = &self.handle;
        match wait_in_steps(py, limit, |time| handle.outcome().or_else(|| handle.wait_for(time)))? {
            Some(Ok(LaunchStats { sent, received, elapsed })) => Ok((sent, received, elapsed.as_secs_f64())),
            Some(Err(error)) => Err(transfer_error(py, &error)),
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
        let limit = seconds(py, "timeout", timeout)?;
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
