//! The tables that NCCL finds, and their functions. Begin at [`ncclProfiler_v5`].
//!
//! A context is one more than the index of a communicator's slot; null for a communicator that has none. A handle is a number:
//! that of an operation, with a bit for a channel of it, or constants for groups and calls. `init` may fail, which disables the
//! plug-in. Every other function returns success, as NCCL ignores what they return.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::io::Write as _;
use std::sync::Once;

use muster_collectives::{
    Collective, CollectiveFunction, DataType, NewCommunicator, OperationHandle, Record,
};

use crate::abi::{
    COLLECTIVE, COLLECTIVE_API, EventDescriptor, GROUP, GROUP_API, InitV1, InitV4, InitV5, KERNEL_CHANNEL,
    KERNEL_CHANNEL_ENDED, LogFunction, POINT_TO_POINT, POINT_TO_POINT_API, ProfilerTable,
};
use crate::plugin_state::plugin_state;

const SUCCESS: c_int = 0;
const INVALID_USAGE: c_int = 5;
/// The bit of the handle of a channel.
const CHANNEL_BIT: u64 = 1 << 57;
/// The bits of the handles of groups and calls: of all, of those at which NCCL was asked for times, and of those that a CUDA graph
/// captures. NCCL counts the operations of captured graphs only if their group has a handle.
const CALL_BIT: u64 = 1 << 58;
const TIMED_BIT: u64 = 1 << 59;
const CAPTURED_BIT: u64 = 1 << 60;
/// The log level of NCCL for what a person may want to know, and all its subsystems.
const LOG_INFO: c_int = 3;
const ALL_SUBSYSTEMS: std::ffi::c_ulong = std::ffi::c_ulong::MAX;

macro_rules! tables {
    ($($name:ident, $init:ident, $kind:ty;)*) => {$(
        /// The table of this version.
        #[allow(non_upper_case_globals, reason = "NCCL's name")]
        #[expect(unsafe_code, reason = "a symbol that NCCL looks up")]
        #[unsafe(no_mangle)]
        pub static $name: ProfilerTable<$kind> = ProfilerTable {
            name: c"muster".as_ptr(),
            init: $init,
            start_event,
            stop_event,
            record_event_state,
            finalize,
        };
    )*};
}

tables! {
    ncclProfiler_v1, init_of_old_version, InitV1;
    ncclProfiler_v2, init_of_old_version, InitV1;
    ncclProfiler_v3, init_of_old_version, InitV1;
    ncclProfiler_v4, init_v4, InitV4;
    ncclProfiler_v5, init_v5, InitV5;
    ncclProfiler_v6, init_v5, InitV5;
    ncclProfiler_v7, init_v5, InitV5;
}

/// Refuses: the descriptors of NCCL before 2.27 are others, and do not name the communicator.
#[expect(unsafe_code, reason = "called by NCCL")]
unsafe extern "C" fn init_of_old_version(_: *mut *mut c_void, _: *mut c_int) -> c_int {
    static TOLD: Once = Once::new();
    TOLD.call_once(|| {
        // If stderr has no reader any more, the program goes on all the same.
        let _ = writeln!(
            std::io::stderr(),
            "muster: this NCCL is older than 2.27, so its collectives are not recorded; the program goes on"
        );
    });
    INVALID_USAGE
}

#[expect(unsafe_code, reason = "called by NCCL")]
unsafe extern "C" fn init_v4(
    context: *mut *mut c_void,
    mask: *mut c_int,
    name: *const c_char,
    hash: u64,
    nodes: c_int,
    ranks: c_int,
    rank: c_int,
    log: LogFunction,
) -> c_int {
    // SAFETY: as NCCL promises for its table.
    unsafe { open(context, mask, name, (hash, nodes, ranks, rank), log) }
}

#[expect(unsafe_code, reason = "called by NCCL")]
unsafe extern "C" fn init_v5(
    context: *mut *mut c_void,
    hash: u64,
    mask: *mut c_int,
    name: *const c_char,
    nodes: c_int,
    ranks: c_int,
    rank: c_int,
    log: LogFunction,
) -> c_int {
    // SAFETY: as NCCL promises for its table.
    unsafe { open(context, mask, name, (hash, nodes, ranks, rank), log) }
}

/// Opens a communicator.
///
/// # Safety
/// The pointers are valid, or null.
#[expect(unsafe_code, reason = "pointers of NCCL")]
unsafe fn open(
    context: *mut *mut c_void,
    mask: *mut c_int,
    name: *const c_char,
    (hash, nodes, ranks, rank): (u64, c_int, c_int, c_int),
    log: LogFunction,
) -> c_int {
    if context.is_null() || mask.is_null() {
        return INVALID_USAGE;
    }
    let state = plugin_state();
    let number = |number: c_int| u32::try_from(number).unwrap_or(0);
    let new = NewCommunicator {
        hash,
        rank: number(rank),
        ranks: number(ranks),
        nodes: number(nodes),
        // SAFETY: a name is a text that ends with 0, or null.
        name: unsafe { text(&name) },
    };
    let slot = state.open_communicator(&new, mask);
    // SAFETY: the pointer was checked.
    unsafe { *context = slot.map_or(0, |slot| slot + 1) as *mut c_void };
    if let Some(log) = log {
        for note in state.notes() {
            let Ok(note) = CString::new(format!("muster: {note}")) else { continue };
            // SAFETY: the format takes one text. The function is valid now.
            unsafe { log(LOG_INFO, ALL_SUBSYSTEMS, c"muster".as_ptr(), 0, c"%s".as_ptr(), note.as_ptr()) };
        }
    }
    SUCCESS
}

/// Returns the bytes of a text of C; none for null.
///
/// # Safety
/// The pointer is null, or that of a text that ends with 0.
#[expect(unsafe_code, reason = "texts of NCCL")]
unsafe fn text(at: &*const c_char) -> &[u8] {
    if at.is_null() {
        return &[];
    }
    // SAFETY: as the caller promises.
    unsafe { CStr::from_ptr(*at) }.to_bytes()
}

#[expect(unsafe_code, reason = "called by NCCL")]
unsafe extern "C" fn start_event(
    context: *mut c_void,
    handle: *mut *mut c_void,
    event: *const EventDescriptor,
) -> c_int {
    if handle.is_null() {
        return SUCCESS;
    }
    // SAFETY: NCCL passes a descriptor that is valid during the call, with the fields of its kind.
    let given = unsafe { event.as_ref().map_or(0, |event| start(context, event)) };
    // SAFETY: the pointer was checked.
    unsafe { *handle = given as usize as *mut c_void };
    SUCCESS
}

/// Returns the handle of an event; 0 for one that is of no interest.
///
/// # Safety
/// The descriptor has the fields of its kind, and its texts end with 0.
#[expect(unsafe_code, reason = "fields of NCCL")]
unsafe fn start(context: *mut c_void, event: &EventDescriptor) -> u64 {
    let state = plugin_state();
    let Some(record) = state.record() else { return 0 };
    let slot = (context as usize).checked_sub(1);
    match event.kind {
        COLLECTIVE => {
            let Some(is_timed) = is_timed_since_call(event.parent, state.is_timed()) else { return 0 };
            // SAFETY: the kind says which fields there are.
            let found = unsafe { event.of_kind.collective };
            let operation = Collective {
                // SAFETY: as the caller promises.
                function: CollectiveFunction::from_name(unsafe { text(&found.function) }),
                // SAFETY: as the caller promises.
                data_type: DataType::from_name(unsafe { text(&found.data_type) }),
                count: found.count as u64,
                root: found.root,
                channels: found.channels.max(1),
            };
            let number = Some(found.sequence_number);
            enqueue(record, slot, &operation, number, is_timed)
        }
        POINT_TO_POINT => {
            let Some(is_timed) = is_timed_since_call(event.parent, state.is_timed()) else { return 0 };
            // SAFETY: the kind says which fields there are.
            let found = unsafe { event.of_kind.point_to_point };
            // SAFETY: as the caller promises.
            let function = match CollectiveFunction::from_name(unsafe { text(&found.function) }) {
                function if function.is_point_to_point() => function,
                _ => CollectiveFunction::Send,
            };
            let operation = Collective {
                function,
                // SAFETY: as the caller promises.
                data_type: DataType::from_name(unsafe { text(&found.data_type) }),
                count: found.count as u64,
                root: found.peer,
                channels: found.channels.max(1),
            };
            enqueue(record, slot, &operation, None, is_timed)
        }
        KERNEL_CHANNEL => {
            let parent = event.parent as usize as u64;
            if parent == 0 || parent >= CHANNEL_BIT {
                return 0;
            }
            // SAFETY: the kind says which fields there are.
            let channel = unsafe { event.of_kind.kernel_channel };
            record.channel_began(OperationHandle::from_bits(parent), channel.gpu_time);
            parent | CHANNEL_BIT
        }
        GROUP | GROUP_API | COLLECTIVE_API | POINT_TO_POINT_API => {
            // SAFETY: the kind says which fields there are.
            let is_captured = unsafe {
                match event.kind {
                    GROUP_API => event.of_kind.group_call.is_captured,
                    COLLECTIVE_API => event.of_kind.collective_call.is_captured,
                    POINT_TO_POINT_API => event.of_kind.point_to_point_call.is_captured,
                    _ => 0,
                }
            };
            call_handle(event.parent, is_captured != 0, state.is_timed())
        }
        _ => 0,
    }
}

/// Returns the handle of a group or call, whose parent may be a group.
fn call_handle(parent: *mut c_void, is_captured: bool, is_timed: bool) -> u64 {
    let parent = parent as usize as u64;
    let captured = if is_captured { CAPTURED_BIT } else { parent & CAPTURED_BIT };
    CALL_BIT | captured | if is_timed { TIMED_BIT } else { 0 }
}

/// Returns whether NCCL was asked for the times of an operation when the program called it, which may be long before its event
/// comes. `None` for an operation of a captured graph: NCCL sends events of these on some ranks only, so they have no numbers that
/// could be compared.
fn is_timed_since_call(parent: *mut c_void, is_timed_now: bool) -> Option<bool> {
    let parent = parent as usize as u64;
    match (parent & CALL_BIT != 0, parent & CAPTURED_BIT != 0) {
        (true, true) => None,
        (true, false) => Some(parent & TIMED_BIT != 0),
        (false, _) => Some(is_timed_now),
    }
}

fn enqueue(
    record: &Record,
    slot: Option<usize>,
    operation: &Collective,
    number: Option<u64>,
    is_timed: bool,
) -> u64 {
    let handle = slot.and_then(|slot| record.enqueue(slot, operation, number, is_timed));
    handle.map_or(0, OperationHandle::to_bits)
}

#[expect(unsafe_code, reason = "called by NCCL")]
unsafe extern "C" fn stop_event(_handle: *mut c_void) -> c_int {
    // It says that an operation was enqueued, which its start has said.
    SUCCESS
}

#[expect(unsafe_code, reason = "called by NCCL")]
unsafe extern "C" fn record_event_state(handle: *mut c_void, event_state: c_int, args: *const u64) -> c_int {
    let handle = handle as usize as u64;
    if event_state == KERNEL_CHANNEL_ENDED
        && handle & CHANNEL_BIT != 0
        && handle < CALL_BIT
        && let Some(record) = plugin_state().record()
    {
        // SAFETY: NCCL passes the arguments of the state, or null.
        let gpu_time = unsafe { args.as_ref() }.copied().unwrap_or(0);
        record.channel_ended(OperationHandle::from_bits(handle & !CHANNEL_BIT), gpu_time);
    }
    SUCCESS
}

#[expect(unsafe_code, reason = "called by NCCL")]
unsafe extern "C" fn finalize(context: *mut c_void) -> c_int {
    if let Some(slot) = (context as usize).checked_sub(1) {
        plugin_state().end_communicator(slot);
    }
    SUCCESS
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pointer(handle: u64) -> *mut c_void {
        handle as usize as *mut c_void
    }

    #[test]
    fn an_operation_is_timed_if_times_were_asked_for_at_its_call() {
        let call = |is_timed| pointer(call_handle(pointer(0), false, is_timed));
        assert_eq!(is_timed_since_call(call(false), true), Some(false));
        assert_eq!(is_timed_since_call(call(true), false), Some(true));
        // Version 4 has no events of calls.
        assert_eq!(is_timed_since_call(pointer(0), true), Some(true));
    }

    #[test]
    fn an_operation_of_a_captured_graph_is_not_recorded() {
        let group = pointer(call_handle(pointer(0), true, true));
        assert_eq!(is_timed_since_call(group, true), None);
        let call = pointer(call_handle(group, false, true));
        assert_eq!(is_timed_since_call(call, true), None);
    }
}
