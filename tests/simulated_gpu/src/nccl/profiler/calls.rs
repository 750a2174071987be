//! The events of API calls, from NCCL 2.28 on: they belong to the thread that calls.

use std::cell::RefCell;
use std::ffi::c_int;
use std::sync::Arc;

use super::context::{ProfilerContext, event_mask, states};
use super::descriptor::{CollApiFields, EventDescriptor, GroupApiFields, P2pApiFields, bits};
use super::table::{NCCL_2_28, NCCL_2_31};
use super::{Handle, OperationTrace};
use crate::nccl::communicator::Communicator;
use crate::nccl::operation::{Operation, OperationKind};
use crate::settings::Setting;

/// The events that need the events of tasks: their parents come, too.
pub const BELOW_TASKS: c_int = bits::PROXY_OP | bits::PROXY_STEP | bits::KERNEL_CHANNEL | bits::NET_PLUGIN;
const COLL_API_MASK: c_int = bits::COLL_API | bits::COLL | BELOW_TASKS | bits::CE_ALL;
const P2P_API_MASK: c_int = bits::P2P_API | bits::P2P | BELOW_TASKS;
const GROUP_API_MASK: c_int =
    bits::GROUP_API | bits::KERNEL_LAUNCH | bits::GROUP | COLL_API_MASK | P2P_API_MASK;

/// The events of a thread.
#[derive(Default)]
struct ThreadEvents {
    /// The communicator of the first operation in the group, if GroupApi has started.
    group: Option<Arc<Communicator>>,
    group_call: Handle,
    /// The handle of the last CollApi. It is never cleared.
    coll_call: Handle,
}

thread_local! {
    static EVENTS: RefCell<ThreadEvents> = RefCell::default();
}

/// Returns the rank of an event whose descriptor has it only in later versions.
pub fn rank_of_call(communicator: &Communicator) -> c_int {
    if Setting::NcclVersion.get() >= NCCL_2_31 { communicator.rank as c_int } else { 0 }
}

/// Reads the mask for an operation that is called now, and sends the events of the call. `depth` counts the groups around the
/// operation, with its own.
pub fn trace_call(operation: &mut Operation, depth: u32) {
    if !operation.has_events() {
        return;
    }
    let communicator = operation.communicator.clone();
    communicator.profiler.with(|context| {
        let channels = Setting::NcclChannels.get().clamp(1, 64) as u8;
        operation.trace = OperationTrace { mask: event_mask(), channels, ..OperationTrace::default() };
        if Setting::NcclVersion.get() >= NCCL_2_28 {
            start_group_call(context, operation, depth);
            operation.trace.group_call = EVENTS.with_borrow(|events| events.group_call);
            operation.trace.call = match operation.kind {
                OperationKind::Collective(_) => send_coll_call(context, operation),
                OperationKind::Send { .. } | OperationKind::Receive { .. } => {
                    send_p2p_call(context, operation)
                }
            };
        }
    });
}

/// Starts GroupApi at the first operation of the outermost group.
fn start_group_call(context: &ProfilerContext, operation: &Operation, depth: u32) {
    let is_started = EVENTS.with_borrow(|events| events.group.is_some());
    if is_started || operation.trace.mask & GROUP_API_MASK == 0 {
        return;
    }
    let mut descriptor = EventDescriptor::new(bits::GROUP_API, 0, rank_of_call(&operation.communicator));
    descriptor.fields.group_api = GroupApiFields { is_captured: false, depth: depth as c_int };
    let mut handle = 0;
    context.start(descriptor, &mut handle);
    context.record_state(handle, states::GROUP_API_START_STOP, None);
    EVENTS.with_borrow_mut(|events| {
        (events.group, events.group_call) = (Some(operation.communicator.clone()), handle);
    });
}

/// Sends CollApi, and returns its handle.
fn send_coll_call(context: &ProfilerContext, operation: &Operation) -> Handle {
    let trace = &operation.trace;
    let mut handle = EVENTS.with_borrow(|events| events.coll_call);
    if trace.mask & COLL_API_MASK != 0 {
        let rank = rank_of_call(&operation.communicator);
        let mut descriptor = EventDescriptor::new(bits::COLL_API, trace.group_call, rank);
        descriptor.fields.coll_api = CollApiFields {
            function: operation.function_name().as_ptr(),
            count: operation.count,
            datatype: operation.datatype_name().as_ptr(),
            root: operation.root() as c_int,
            stream: operation.stream_handle,
            is_captured: false,
            user_tag: 0,
        };
        context.start(descriptor, &mut handle);
        EVENTS.with_borrow_mut(|events| events.coll_call = handle);
    }
    // As NCCL does: it stops what is in the place, also if that is the handle of a former call.
    context.stop(handle);
    handle
}

/// Sends P2pApi, and returns its handle.
fn send_p2p_call(context: &ProfilerContext, operation: &Operation) -> Handle {
    let trace = &operation.trace;
    let mut handle = 0;
    if trace.mask & P2P_API_MASK != 0 {
        let rank = rank_of_call(&operation.communicator);
        let mut descriptor = EventDescriptor::new(bits::P2P_API, trace.group_call, rank);
        descriptor.fields.p2p_api = P2pApiFields {
            function: operation.function_name().as_ptr(),
            count: operation.count,
            datatype: operation.datatype_name().as_ptr(),
            stream: operation.stream_handle,
            is_captured: false,
            user_tag: 0,
        };
        context.start(descriptor, &mut handle);
        context.stop(handle);
    }
    handle
}

/// Tells the plug-in that the end of the outermost group has begun.
pub fn note_group_end() {
    let (group, handle) = EVENTS.with_borrow(|events| (events.group.clone(), events.group_call));
    if let Some(communicator) = group {
        communicator.profiler.with(|context| context.record_state(handle, states::GROUP_API_END_START, None));
    }
}

/// Stops GroupApi when the end of the outermost group returns.
pub fn finish_group_call() {
    let (group, handle) =
        EVENTS.with_borrow_mut(|events| (events.group.take(), std::mem::take(&mut events.group_call)));
    if let Some(communicator) = group {
        communicator.profiler.with(|context| context.stop(handle));
    }
}
