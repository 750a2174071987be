//! The C functions for transfers: requests, prepared transfers, and transfers in flight.
//!
//! `muster::transfer` moves the bytes. Begin at [`muster_transfer_start`].

use std::collections::BTreeSet;
use std::ffi::c_char;
use std::sync::{Arc, Mutex, PoisonError};

use muster::agent::{Agent, DEVICES_MAX, device_id_of_task, task_of_device_id};
use muster::transfer::{
    BufferLayout, DeviceId, LaunchOptions, LaunchStats, LayoutFingerprint, PeerJob, PeerTask,
    PreparedTransfers, PriorityClass, TaskId, TransferKey, TransferSpec,
};

use super::agent::MusterAgent;
use super::boundary::{
    OutputPointer, read_array, read_options, read_text, run_interface_function, write_defaults,
};
use super::buffer::MusterBuffer;
use super::handles::{self, OpaqueHandle};
use super::launch::LaunchObject;
use super::status::{CallError, MusterStatus};
use super::wait::{self, MusterCancellation, WaitLimits, parse_timeout_ms, timeout_error};

/// A transfer that sends from a device of this task.
pub const MUSTER_SEND: u32 = 0;
/// A transfer that receives onto a device of this task.
pub const MUSTER_RECEIVE: u32 = 1;

/// For small urgent launches.
pub const MUSTER_CLASS_LATENCY: u32 = 0;
/// The default.
pub const MUSTER_CLASS_NORMAL: u32 = 1;
/// For launches that may be slow.
pub const MUSTER_CLASS_BULK: u32 = 2;

/// Transfers in flight. Freeing the handle does not cancel them.
pub struct MusterTransfer {
    _private: [u8; 0],
}

impl OpaqueHandle for MusterTransfer {
    type Object = LaunchObject;
    const NAME: &'static str = "muster_transfer";
}

/// Transfers whose slow work is done, so that they can be launched many times. `muster_prepare` makes one.
pub struct MusterPrepared {
    _private: [u8; 0],
}

impl OpaqueHandle for MusterPrepared {
    type Object = Mutex<PreparedTransfers>;
    const NAME: &'static str = "muster_prepared";
}

/// A request of one transfer. Set unused fields to zero.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct MusterTransferSpec {
    /// MUSTER_SEND or MUSTER_RECEIVE.
    pub direction: u32,
    /// The device that sends, as `muster_device` numbers them.
    pub from: u32,
    /// The device that receives.
    pub to: u32,
    /// Zero.
    pub reserved: u32,
    /// The name of the transfer, the same on both sides.
    pub key: u64,
    /// The memory.
    pub buffer: *const MusterBuffer,
    /// The first byte within the buffer.
    pub offset: usize,
    /// The number of bytes, the same on both sides.
    pub len: usize,
    /// The fingerprint of the layout, the same on both sides: of `muster_array_layout`, or 0 for plain bytes.
    pub layout: u64,
}

/// The options of a launch. `muster_launch_options_init` sets the defaults.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct MusterLaunchOptions {
    /// The size of this struct, as `muster_launch_options_init` sets it.
    pub size: usize,
    /// The channel. Launches to a peer are matched by their order on a channel; threads that launch independently need
    /// channels of their own. The default is 0.
    pub channel: u32,
    /// The priority: one of MUSTER_CLASS_*.
    pub priority: u32,
    /// The time after the launch by which it must be complete; else it fails with MUSTER_STATUS_DEADLINE. -1, the default: no
    /// limit.
    pub deadline_ms: i64,
    /// The longest time without progress after both sides have launched; else it fails with MUSTER_STATUS_STALLED. The
    /// default is 30000.
    pub stall_ms: i64,
}

const DEFAULTS: MusterLaunchOptions = MusterLaunchOptions {
    size: size_of::<MusterLaunchOptions>(),
    channel: 0,
    priority: MUSTER_CLASS_NORMAL,
    deadline_ms: -1,
    stall_ms: 30_000,
};

/// The amounts that a launch has moved.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct MusterTransferStats {
    /// The bytes sent.
    pub sent: u64,
    /// The bytes received.
    pub received: u64,
    /// The time from the launch until all bytes were in place, in microseconds.
    pub elapsed_us: u64,
}

impl MusterTransferStats {
    fn from_launch_stats(stats: LaunchStats) -> Self {
        let elapsed_us = u64::try_from(stats.elapsed.as_micros()).unwrap_or(u64::MAX);
        Self { sent: stats.sent, received: stats.received, elapsed_us }
    }
}

/// Returns the number of a device: the `ordinal`-th of a task, from 0. A task without such a device makes a transfer fail
/// with MUSTER_STATUS_UNKNOWN_DEVICE, and so does UINT32_MAX, which stands for numbers that are too large.
#[unsafe(no_mangle)]
pub extern "C" fn muster_device(task: u32, ordinal: u32) -> u32 {
    let exists = ordinal < DEVICES_MAX && task < u32::MAX / DEVICES_MAX;
    if exists { device_id_of_task(TaskId(task), ordinal).0 } else { u32::MAX }
}

/// Writes the fingerprint of the layout of an array: the name of its element type, the bytes of an element, its shape, and
/// its sharding (any text that both sides write alike).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn muster_array_layout(
    element: *const c_char,
    width: u64,
    shape: *const u64,
    rank: usize,
    sharding: *const c_char,
    layout: *mut u64,
) -> MusterStatus {
    run_interface_function(|| {
        let place = OutputPointer::new("layout", layout)?;
        // SAFETY: the caller passes texts, and an array of this length.
        let (element, shape, sharding) = unsafe {
            (
                read_text("element", element)?,
                read_array("shape", shape, rank)?,
                read_text("sharding", sharding)?,
            )
        };
        let layout = BufferLayout::array(element, width, shape, sharding);
        let layout =
            layout.ok_or_else(|| CallError::invalid_argument("the array has more than 2^64 bytes"))?;
        place.set(layout.fingerprint().0);
        Ok(())
    })
}

/// Sets the defaults. `size` is `sizeof(muster_launch_options)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn muster_launch_options_init(
    options: *mut MusterLaunchOptions,
    size: usize,
) -> MusterStatus {
    // SAFETY: the caller passes the size of the struct that it has.
    run_interface_function(|| unsafe { write_defaults("options", options, size, DEFAULTS) })
}

/// Returns the options of a launch; the defaults for NULL.
///
/// # Safety
/// As of [`read_options`].
unsafe fn read_launch_options(given: *const MusterLaunchOptions) -> Result<LaunchOptions, CallError> {
    if given.is_null() {
        return Ok(LaunchOptions::default());
    }
    // SAFETY: the caller guarantees it; any bytes are valid numbers.
    let given = unsafe { read_options("options", given, DEFAULTS) }?;
    let class = match given.priority {
        MUSTER_CLASS_LATENCY => PriorityClass::Latency,
        MUSTER_CLASS_NORMAL => PriorityClass::Normal,
        MUSTER_CLASS_BULK => PriorityClass::Bulk,
        other => {
            return Err(CallError::invalid_argument(format!(
                "priority is {other}: give one of MUSTER_CLASS_*"
            )));
        }
    };
    let deadline = match given.deadline_ms {
        -1 => None,
        some => Some(parse_timeout_ms("deadline_ms", some)?),
    };
    Ok(LaunchOptions {
        channel: given.channel,
        class,
        deadline,
        stall: parse_timeout_ms("stall_ms", given.stall_ms)?,
    })
}

/// Returns the requests of an array of specs.
fn decode_specs(specs: &[MusterTransferSpec]) -> Result<Vec<TransferSpec>, CallError> {
    specs.iter().map(decode_spec).collect()
}

fn decode_spec(spec: &MusterTransferSpec) -> Result<TransferSpec, CallError> {
    let object = handles::get(spec.buffer)?;
    let end = spec.offset.saturating_add(spec.len);
    let span = object.buffer.range(spec.offset..end)?;
    let (from, to, key) = (DeviceId(spec.from), DeviceId(spec.to), TransferKey(spec.key));
    let layout = match spec.layout {
        0 => BufferLayout::bytes(spec.len),
        fingerprint => BufferLayout::part_of_array(spec.len as u64, LayoutFingerprint(fingerprint)),
    };
    match spec.direction {
        MUSTER_SEND => Ok(TransferSpec::send(span, from, to, key).with_layout(layout)),
        MUSTER_RECEIVE => Ok(TransferSpec::receive(span, from, to, key).with_layout(layout)),
        other => Err(CallError::invalid_argument(format!(
            "direction is {other}: give MUSTER_SEND or MUSTER_RECEIVE"
        ))),
    }
}

/// Launches transfers together and returns at once. They move when the peers have launched theirs with the same keys,
/// devices and layouts, in the same order on the channel; until both sides agree, no byte moves. `options` may be NULL.
///
/// A peer need not be there yet. If a task has not joined, or joins again, its transfers wait for it, in their order.
///
/// If both devices of a transfer are of this task, `specs` has both its send and its receive: the engine copies the bytes.
///
/// A request that is invalid or cannot be carried out makes the transfer fail, and `muster_transfer_wait` says how. If the
/// incarnation has ended, or 4096 launches wait for their peers, the call itself fails.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn muster_transfer_start(
    agent: *const MusterAgent,
    specs: *const MusterTransferSpec,
    specs_len: usize,
    options: *const MusterLaunchOptions,
    transfer: *mut *mut MusterTransfer,
) -> MusterStatus {
    run_interface_function(|| {
        let place = OutputPointer::new("transfer", transfer)?;
        let agent = handles::get(agent)?.get()?;
        // SAFETY: the caller passes an array of this length, and options that its _init function has set.
        let (specs, options) =
            unsafe { (read_array("specs", specs, specs_len)?, read_launch_options(options)?) };
        place.set(handles::add(Arc::new(start(&agent, specs, options)?)));
        Ok(())
    })
}

/// Launches transfers, at once or when the engines of their peers are members.
fn start(
    agent: &Agent,
    specs: &[MusterTransferSpec],
    options: LaunchOptions,
) -> Result<LaunchObject, CallError> {
    LaunchObject::start(agent, decode_specs(specs)?, peers_of(agent, specs), options)
}

/// Returns the other tasks of these transfers. A device that no task has now belongs to the task that its number names
/// (`muster_device`). A task that the job does not have is left out, since no launch waits for it: the engine says that it does
/// not know the device.
fn peers_of(agent: &Agent, specs: &[MusterTransferSpec]) -> Vec<PeerTask> {
    let far =
        |spec: &MusterTransferSpec| DeviceId(if spec.direction == MUSTER_SEND { spec.to } else { spec.from });
    let devices: BTreeSet<DeviceId> = specs.iter().map(far).collect();
    let tasks: BTreeSet<TaskId> = agent.engine().with_membership(|membership| {
        let owner = |device| membership.device_owner(PeerJob::OWN, device);
        devices.into_iter().map(|device| owner(device).unwrap_or_else(|| task_of_device_id(device))).collect()
    });
    let others = tasks.into_iter().filter(|task| task.0 < agent.tasks() && *task != agent.here().task);
    others.map(|task| PeerTask { job: PeerJob::OWN, task }).collect()
}

/// Sends a whole buffer from the first device of this task to the first device of another one, with default options. To copy
/// within this task, name both sides in `muster_transfer_start`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn muster_send(
    agent: *const MusterAgent,
    buffer: *const MusterBuffer,
    to_task: u32,
    key: u64,
    transfer: *mut *mut MusterTransfer,
) -> MusterStatus {
    run_interface_function(|| start_whole_buffer_transfer(MUSTER_SEND, agent, buffer, to_task, key, transfer))
}

/// Receives a whole buffer onto the first device of this task from the first device of another one, with default options.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn muster_receive(
    agent: *const MusterAgent,
    buffer: *const MusterBuffer,
    from_task: u32,
    key: u64,
    transfer: *mut *mut MusterTransfer,
) -> MusterStatus {
    run_interface_function(|| {
        start_whole_buffer_transfer(MUSTER_RECEIVE, agent, buffer, from_task, key, transfer)
    })
}

fn start_whole_buffer_transfer(
    direction: u32,
    agent: *const MusterAgent,
    buffer: *const MusterBuffer,
    peer: u32,
    key: u64,
    transfer: *mut *mut MusterTransfer,
) -> Result<(), CallError> {
    let place = OutputPointer::new("transfer", transfer)?;
    let agent = handles::get(agent)?.get()?;
    let len = handles::get(buffer)?.buffer.len();
    let (near, far) = (muster_device(agent.here().task.0, 0), muster_device(peer, 0));
    let (from, to) = if direction == MUSTER_SEND { (near, far) } else { (far, near) };
    let spec =
        MusterTransferSpec { direction, from, to, reserved: 0, key, buffer, offset: 0, len, layout: 0 };
    place.set(handles::add(Arc::new(start(&agent, &[spec], LaunchOptions::default())?)));
    Ok(())
}

/// Prepares transfers: finds or makes the connections and announces the transfers to the peers, so that each launch only
/// moves bytes. If the engine of a peer is not there yet, the call waits for it. `options` may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn muster_prepare(
    agent: *const MusterAgent,
    specs: *const MusterTransferSpec,
    specs_len: usize,
    options: *const MusterLaunchOptions,
    timeout_ms: i64,
    cancellation: *const MusterCancellation,
    prepared: *mut *mut MusterPrepared,
) -> MusterStatus {
    run_interface_function(|| {
        let place = OutputPointer::new("prepared", prepared)?;
        // SAFETY: the caller passes an array of this length, and options that its _init function has set.
        let (specs, options) =
            unsafe { (read_array("specs", specs, specs_len)?, read_launch_options(options)?) };
        let limits = WaitLimits::new(timeout_ms, cancellation)?;
        let time = limits.timeout;
        let object = handles::get(agent)?;
        let peers = peers_of(&*object.get()?, specs);
        let specs = decode_specs(specs)?;
        let ready = object.call_until_freed(limits, move |agent| async move {
            let preparing = async {
                agent.host().wait_for_peers(&peers, time).await?;
                // Launches of the prepared transfers come after those that are requested already.
                agent.host().wait_for_earlier_launches(&peers).await;
                agent.engine().prepare(specs, options).await.map_err(CallError::from)
            };
            tokio::time::timeout(time, preparing).await.map_err(|_| timeout_error(time))?
        })?;
        place.set(handles::add(Arc::new(Mutex::new(ready))));
        Ok(())
    })
}

/// Launches prepared transfers and returns at once. It may be called again while an earlier launch is in flight.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn muster_launch(
    prepared: *mut MusterPrepared,
    transfer: *mut *mut MusterTransfer,
) -> MusterStatus {
    run_interface_function(|| {
        let place = OutputPointer::new("transfer", transfer)?;
        let object = handles::get(prepared)?;
        let mut prepared = object.lock().unwrap_or_else(PoisonError::into_inner);
        let launched = wait::with_signals_blocked(|| prepared.launch(&[]));
        place.set(handles::add(Arc::new(LaunchObject::without_wait(launched))));
        Ok(())
    })
}

/// Frees prepared transfers. Launches in flight go on.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn muster_prepared_free(prepared: *mut MusterPrepared) -> MusterStatus {
    run_interface_function(|| handles::remove(prepared).map(drop))
}

/// Waits for the outcome of all transfers of a launch: MUSTER_STATUS_OK, or the error of the first that failed. Once it has
/// returned one of them, the program may use all the memory again. MUSTER_STATUS_TIMED_OUT and MUSTER_STATUS_INTERRUPTED
/// mean that the launch goes on. `stats` may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn muster_transfer_wait(
    transfer: *const MusterTransfer,
    timeout_ms: i64,
    cancellation: *const MusterCancellation,
    stats: *mut MusterTransferStats,
) -> MusterStatus {
    run_interface_function(|| {
        let place = OutputPointer::optional("stats", stats)?;
        let limits = WaitLimits::new(timeout_ms, cancellation)?;
        let launched = handles::get(transfer)?;
        let time = limits.timeout;
        let outcome = match limits.cancellation {
            // This thread helps to move the bytes.
            None => launched.transfer().wait_for(time).ok_or_else(|| launched.pending_error(time))?,
            Some(_) => {
                let launched = Arc::clone(&launched);
                wait::wait(limits, async move {
                    let over = tokio::time::timeout(time, launched.transfer().clone()).await;
                    over.map_err(|_| launched.pending_error(time))
                })?
            }
        };
        write_optional_stats(place, outcome.map_err(|error| launched.failure(error))?);
        Ok(())
    })
}

/// Writes whether a launch is over. If it is, `stats` is written, which may be NULL, or its error returned. It does not wait.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn muster_transfer_poll(
    transfer: *const MusterTransfer,
    is_over: *mut bool,
    stats: *mut MusterTransferStats,
) -> MusterStatus {
    run_interface_function(|| {
        let (over, place) =
            (OutputPointer::new("is_over", is_over)?, OutputPointer::optional("stats", stats)?);
        let launched = handles::get(transfer)?;
        let outcome = launched.transfer().outcome();
        over.set(outcome.is_some());
        if let Some(outcome) = outcome {
            write_optional_stats(place, outcome.map_err(|error| launched.failure(error))?);
        }
        Ok(())
    })
}

/// Writes whether the transfer with this index in the request is over. If it has failed, its error is returned. It does not
/// wait.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn muster_transfer_poll_one(
    transfer: *const MusterTransfer,
    index: usize,
    is_over: *mut bool,
) -> MusterStatus {
    run_interface_function(|| {
        let over = OutputPointer::new("is_over", is_over)?;
        let launched = handles::get(transfer)?;
        if index >= launched.transfer().len() {
            let len = launched.transfer().len();
            return Err(CallError::invalid_argument(format!(
                "index is {index}, and the launch has {len} transfer(s)"
            )));
        }
        let outcome = launched.transfer().outcome_of(index);
        over.set(outcome.is_some());
        outcome.transpose().map(drop).map_err(|error| launched.failure(error))
    })
}

/// Cancels what a launch has not moved yet, and waits for the proof that no byte of it can land any more, neither here nor
/// at the peers. MUSTER_STATUS_OK is that proof: the program may use all the memory again. If the proof takes longer, it
/// returns MUSTER_STATUS_TIMED_OUT; call it again to go on waiting. `reason` is shown to the peers. A launch that was over
/// already stays as it is.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn muster_transfer_cancel(
    transfer: *const MusterTransfer,
    reason: *const c_char,
    timeout_ms: i64,
) -> MusterStatus {
    run_interface_function(|| {
        // SAFETY: the caller passes a text.
        let reason = unsafe { read_text("reason", reason) }?;
        let limits = WaitLimits::new(timeout_ms, std::ptr::null())?;
        let time = limits.timeout;
        let launched = handles::get(transfer)?;
        if wait::with_signals_blocked(|| launched.transfer().cancel(reason)).wait_for(time) {
            return Ok(());
        }
        let text = format!(
            "cancelled, but not proven within {} ms: bytes may still land; call it again",
            time.as_millis()
        );
        Err(CallError::new(MusterStatus::TimedOut, text))
    })
}

/// Frees a transfer. It goes on, and keeps its memory in use until it is over.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn muster_transfer_free(transfer: *mut MusterTransfer) -> MusterStatus {
    run_interface_function(|| handles::remove(transfer).map(drop))
}

fn write_optional_stats(place: Option<OutputPointer<MusterTransferStats>>, stats: LaunchStats) {
    if let Some(place) = place {
        place.set(MusterTransferStats::from_launch_stats(stats));
    }
}
