//! The events of launches and kernels.

use std::ffi::c_int;

use super::Handle;
use super::calls::{BELOW_TASKS, rank_of_call};
use super::context::{ProfilerContext, states};
use super::descriptor::{
    CollFields, EventDescriptor, KernelChannelFields, KernelLaunchFields, P2pFields, bits,
};
use super::table::NCCL_2_28;
use crate::nccl::communicator::Communicator;
use crate::nccl::operation::{Operation, OperationKind};
use crate::settings::Setting;

const COLL_MASK: c_int = bits::COLL | BELOW_TASKS;
const P2P_MASK: c_int = bits::P2P | BELOW_TASKS;
const GROUP_MASK: c_int = bits::GROUP | COLL_MASK | P2P_MASK;
const WARPS: u8 = 16;

/// The events of one launch: a group of operations of one communicator.
#[derive(Debug, Default)]
pub struct LaunchEvents {
    group: Handle,
    tasks: Vec<Handle>,
}

impl LaunchEvents {
    /// Numbers the collectives, and sends the events that start before the operations are on their stream.
    pub fn start(batch: &mut [Operation]) -> Self {
        let numbers: Vec<u64> = batch.iter().map(next_sequence_number).collect();
        let communicator = batch[0].communicator.clone();
        let events = communicator.profiler.with(|context| {
            send_kernel_launch(context, batch);
            let group = start_group(context, batch);
            for (operation, number) in batch.iter_mut().zip(numbers) {
                operation.trace.task = start_task(context, operation, number, group);
            }
            Self { group, tasks: batch.iter().map(|operation| operation.trace.task).collect() }
        });
        events.unwrap_or_default()
    }

    /// Sends the events that stop when the operations are on their stream.
    pub fn stop(self, communicator: &Communicator) {
        communicator.profiler.with(|context| {
            self.tasks.into_iter().for_each(|task| context.stop(task));
            context.stop(self.group);
        });
    }
}

/// Returns the number of a collective among those of its communicator and function. They are numbered without a plug-in, too.
fn next_sequence_number(operation: &Operation) -> u64 {
    match operation.kind {
        OperationKind::Collective(collective) if operation.has_events() => {
            operation.communicator.next_sequence_number(collective.function)
        }
        _ => 0,
    }
}

/// Sends KernelLaunch. The first operation with a mask decides.
fn send_kernel_launch(context: &ProfilerContext, batch: &[Operation]) {
    let Some(first) = batch.iter().find(|operation| operation.trace.mask != 0) else { return };
    if first.trace.mask & bits::KERNEL_LAUNCH == 0 {
        return;
    }
    let rank = rank_of_call(&first.communicator);
    let mut descriptor = EventDescriptor::new(bits::KERNEL_LAUNCH, first.trace.group_call, rank);
    descriptor.fields.kernel_launch = KernelLaunchFields { stream: first.stream_handle };
    let mut handle = 0;
    context.start(descriptor, &mut handle);
    context.stop(handle);
}

/// Starts Group. The first operation with a mask decides.
fn start_group(context: &ProfilerContext, batch: &[Operation]) -> Handle {
    let mask = batch.iter().map(|operation| operation.trace.mask).find(|mask| *mask != 0).unwrap_or(0);
    let mut handle = 0;
    if mask & GROUP_MASK != 0 {
        // NCCL leaves its rank at 0.
        context.start(EventDescriptor::new(bits::GROUP, 0, 0), &mut handle);
    }
    handle
}

/// Starts the Coll or the P2p event of an operation.
fn start_task(context: &ProfilerContext, operation: &Operation, number: u64, group: Handle) -> Handle {
    let trace = &operation.trace;
    let (kind, mask) = match operation.kind {
        OperationKind::Collective(_) => (bits::COLL, COLL_MASK),
        OperationKind::Send { .. } | OperationKind::Receive { .. } => (bits::P2P, P2P_MASK),
    };
    let needs_group = Setting::NcclVersion.get() < NCCL_2_28;
    if trace.mask & mask == 0 || (needs_group && group == 0) {
        return 0;
    }
    let mut descriptor = EventDescriptor::new(kind, trace.call, operation.communicator.rank as c_int);
    match operation.kind {
        OperationKind::Collective(collective) => {
            let counts_bytes = collective.function.is_counted_in_bytes();
            let datatype = if counts_bytes { c"ncclInt8" } else { operation.datatype_name() };
            descriptor.fields.coll = CollFields {
                sequence_number: number,
                function: operation.function_name().as_ptr(),
                send_buffer: operation.from,
                receive_buffer: operation.to,
                count: if counts_bytes { operation.bytes } else { operation.count },
                root: collective.root as c_int,
                datatype: datatype.as_ptr(),
                channels: trace.channels,
                warps: WARPS,
                algorithm: c"RING".as_ptr(),
                protocol: c"SIMPLE".as_ptr(),
                parent_group: group,
                kernel_variant: std::ptr::null(),
                is_symmetric: false,
                user_tag: 0,
            };
        }
        OperationKind::Send { peer } | OperationKind::Receive { peer } => {
            descriptor.fields.p2p = P2pFields {
                function: operation.function_name().as_ptr(),
                // One of the two is 0.
                buffer: operation.from | operation.to,
                datatype: operation.datatype_name().as_ptr(),
                count: operation.count,
                peer: peer as c_int,
                channels: trace.channels,
                parent_group: group,
                user_tag: 0,
            };
        }
    }
    let mut handle = 0;
    context.start(descriptor, &mut handle);
    handle
}

/// Starts the KernelCh event of one channel. NCCL leaves its rank at 0.
fn start_channel(context: &ProfilerContext, task: Handle, channel: u8) -> Handle {
    let mut descriptor = EventDescriptor::new(bits::KERNEL_CHANNEL, task, 0);
    descriptor.fields.kernel_channel = KernelChannelFields { channel, gpu_time: gpu_time() };
    let mut handle = 0;
    context.start(descriptor, &mut handle);
    handle
}

/// The KernelCh events of a group that its stream executes now.
#[derive(Debug)]
pub struct KernelEvents(Vec<Handle>);

impl KernelEvents {
    /// Starts the channels of all operations.
    pub fn start(batch: &[Operation]) -> Self {
        let started = batch[0].communicator.profiler.with(|context| {
            let wanted = batch.iter().filter(|operation| operation.trace.mask & bits::KERNEL_CHANNEL != 0);
            let channels = wanted.flat_map(|operation| {
                (0..operation.trace.channels).map(|channel| (operation.trace.task, channel))
            });
            channels.map(|(task, channel)| start_channel(context, task, channel)).collect()
        });
        Self(started.unwrap_or_default())
    }

    /// Stops the channels of an exchange that is complete.
    pub fn stop(self, communicator: &Communicator) {
        communicator.profiler.with(|context| {
            for handle in self.0 {
                context.record_state(handle, states::KERNEL_CHANNEL_STOP, Some(gpu_time()));
                context.stop(handle);
            }
        });
    }
}

/// Returns the time of the GPU's clock, in nanoseconds. It is far from every clock of the host.
fn gpu_time() -> u64 {
    const START: u64 = 1 << 60;
    const SECOND: u64 = 1_000_000_000;
    // SAFETY: 0 is a value of both numbers, and the kernel writes them.
    let now = unsafe {
        let mut now: libc::timespec = std::mem::zeroed();
        libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now);
        now
    };
    START + now.tv_sec as u64 * SECOND + now.tv_nsec as u64
}
