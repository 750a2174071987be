//! Converts launch requests of the Python code to transfers of the engine, in two steps.
//!
//! If a request names no device of its peer, it means the peer's first device. That device is known only when the
//! peer's engine is a member. The first step makes a [`NamedTransfer`] of the request, and needs the GIL. The second
//! step makes a [`TransferSpec`] when the peer is a member, and needs no GIL. Begin at [`NamedTransfer::new`].

use muster::agent::EngineHost;
use muster::transfer::{
    BufferLayout, DeviceId, LaunchOptions, MemberId, Membership, PeerJob, PeerTask, PrepareError,
    PriorityClass, Span, TaskId, TransferEngine, TransferKey, TransferSpec,
};
use pyo3::prelude::*;

use super::buffer::Buffer;
use super::errors::new_exception;
use super::source::Source;
use super::target::Target;
use super::wait::parse_timeout_seconds;

/// One transfer that a program wants.
#[derive(FromPyObject)]
pub struct Request<'py> {
    /// Whether it sends.
    pub outgoing: bool,
    /// The memory of its bytes: a Source, a Target or a Buffer.
    pub memory: Bound<'py, PyAny>,
    /// The job of the other task, if it is not this one's.
    pub job: Option<String>,
    /// The task at the other end.
    pub task: u32,
    /// The device there; its first one if none is named.
    pub far: Option<u32>,
    /// The device here; the first one if none is named.
    pub near: Option<u32>,
    pub key: u64,
    /// The place in an array that is divided; nothing for a whole one.
    pub place: String,
}

impl Request<'_> {
    /// Returns the task at the other end.
    pub fn peer(&self, py: Python<'_>) -> PyResult<PeerTask> {
        peer_task(py, self.job.as_deref(), self.task)
    }
}

/// A transfer whose memory is known.
#[derive(Clone)]
pub struct NamedTransfer {
    outgoing: bool,
    span: Span,
    peer: PeerTask,
    near: DeviceId,
    far: Option<DeviceId>,
    key: TransferKey,
}

impl NamedTransfer {
    /// Takes the memory of a request.
    pub fn new(py: Python<'_>, host: &EngineHost, request: &Request<'_>) -> PyResult<Self> {
        let first = || {
            let found = host.devices().iter().min().copied();
            let here = host.here().peer_task();
            found.ok_or_else(|| new_exception(py, "SettingsError", &no_device(here), &[]))
        };
        Ok(Self {
            outgoing: request.outgoing,
            span: span(&request.memory, &request.place)?,
            peer: request.peer(py)?,
            near: request.near.map_or_else(first, |near| Ok(DeviceId(near)))?,
            far: request.far.map(DeviceId),
            key: TransferKey(request.key),
        })
    }

    /// Returns whether it sends, and its bytes.
    pub fn direction_and_bytes(&self) -> (bool, u64) {
        (self.outgoing, self.span.len() as u64)
    }

    /// Returns the transfer with a device number that no task has in place of that of its peer, if no device of the peer is
    /// named. It serves to check what concerns this task.
    fn provisional_spec(&self) -> TransferSpec {
        let far = self.far.unwrap_or(DeviceId(u32::MAX - self.peer.task.0));
        self.clone().spec_with_device(far)
    }

    /// Returns the transfer with this device of its peer.
    fn spec_with_device(self, far: DeviceId) -> TransferSpec {
        let spec = if self.outgoing {
            TransferSpec::send(self.span, self.near, far, self.key)
        } else {
            TransferSpec::receive(self.span, far, self.near, self.key)
        };
        spec.with_job(self.peer.job)
    }

    /// Returns the transfer as the engine of `here` takes it.
    ///
    /// # Errors
    /// If the peer has no device.
    fn spec(self, here: MemberId, membership: &Membership) -> Result<TransferSpec, String> {
        let first = || {
            if self.peer == here.peer_task() {
                return Ok(self.near);
            }
            let member =
                membership.current_member(self.peer).and_then(|member| membership.member_info(member));
            // A task that has just been lost has none, and the engine says so.
            let Some(info) = member else { return Ok(DeviceId(u32::MAX)) };
            info.devices.iter().min().copied().ok_or_else(|| no_device(self.peer))
        };
        let far = self.far.map_or_else(first, Ok)?;
        Ok(self.spec_with_device(far))
    }
}

/// Returns transfers as the engine of `here` takes them.
///
/// # Errors
/// If a peer has no device.
pub fn specs(
    named: Vec<NamedTransfer>,
    here: MemberId,
    membership: &Membership,
) -> Result<Vec<TransferSpec>, String> {
    named.into_iter().map(|transfer| transfer.spec(here, membership)).collect()
}

/// Checks transfers whose peers may be absent, as far as that needs no peer.
///
/// # Errors
/// The error with which these transfers would fail.
pub fn check_own_side(engine: &TransferEngine, named: &[NamedTransfer]) -> Result<(), PrepareError> {
    let specs: Vec<_> = named.iter().map(NamedTransfer::provisional_spec).collect();
    engine.check_own_side(&specs)
}

/// Returns the bytes that transfers send and those that they receive; of each, whether it sends, and its bytes.
pub fn sent_and_received(transfers: impl Iterator<Item = (bool, u64)>) -> (u64, u64) {
    transfers.fold(
        (0, 0),
        |(sent, received), (outgoing, bytes)| {
            if outgoing { (sent + bytes, received) } else { (sent, received + bytes) }
        },
    )
}

fn no_device(task: PeerTask) -> String {
    format!("task {task} has no devices to send from or receive on: attach with devices=[...]")
}

/// Returns a task of this job, or of the one with this name.
pub fn peer_task(py: Python<'_>, job: Option<&str>, task: u32) -> PyResult<PeerTask> {
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

/// How transfers are launched: channel, priority class, timeout and stall limit.
pub type Options = (u32, String, f64, f64);

/// Returns the options of the engine.
pub fn launch_options(py: Python<'_>, (channel, class, timeout, stall): Options) -> PyResult<LaunchOptions> {
    let class = PriorityClass::ALL.into_iter().find(|known| known.name() == class).ok_or_else(|| {
        let names = PriorityClass::ALL.map(PriorityClass::name).join(", ");
        new_exception(py, "SettingsError", &format!("priority is {class:?}: give one of {names}"), &[])
    })?;
    let deadline = parse_timeout_seconds(py, "timeout", timeout)?;
    let stall = parse_timeout_seconds(py, "stall_timeout", stall)?;
    Ok(LaunchOptions { channel, class, deadline: Some(deadline), stall })
}

/// The channel of a launch, as the Python code divides the engine's: the first of four is for what the first of two tasks sends
/// alone, the second for what the other one sends alone, and the others are for launches of both.
#[derive(Debug, Clone, Copy)]
pub enum LaunchChannel {
    /// This one.
    Fixed(u32),
    /// Of the four that begin with this number, that of one side, whose peer is this task.
    OfSender { first: u32, outgoing: bool, peer: PeerTask },
}

impl LaunchChannel {
    /// Returns the channel of a launch: that of its sender if the launch is `single`, which consists of one array.
    pub fn new(channel: u32, single: bool, outgoing: bool, peer: Option<PeerTask>) -> Self {
        match peer {
            Some(peer) if single => Self::OfSender { first: channel, outgoing, peer },
            _ => Self::Fixed(channel),
        }
    }

    /// Returns the number of the channel for the engine of `here`, when the peer is a member.
    pub fn number(self, here: MemberId, membership: &Membership) -> u32 {
        match self {
            Self::Fixed(channel) => channel,
            Self::OfSender { first, outgoing, peer } => {
                let is_second = if peer.job.is_own() {
                    here.task > peer.task
                } else {
                    membership.current_member(peer).is_some_and(|peer| !here.precedes(peer))
                };
                first + u32::from(is_second == outgoing)
            }
        }
    }
}
