//! The tables that NCCL finds, and their functions. Begin at [`ncclProfiler_v5`].
//!
//! A context is one more than the index of a communicator's slot; null for a communicator that has none. A handle is a number:
//! that of an operation, with a bit for a channel of it, or a constant for a group. Every function returns success, as NCCL
//! ignores what they return.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
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
/// The handle of groups. NCCL counts the operations of captured graphs only if their group has one.
const GROUP_HANDLE: u64 = 1 << 58;
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
        eprintln!(
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
            enqueue(record, slot, &operation, number, state.is_timed())
        }
        POINT_TO_POINT => {
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
            enqueue(record, slot, &operation, None, state.is_timed())
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
        GROUP | GROUP_API | COLLECTIVE_API | POINT_TO_POINT_API => GROUP_HANDLE,
        _ => 0,
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
        && handle < GROUP_HANDLE
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
