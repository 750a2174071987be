//! The C tables of a profiler plug-in.

use std::ffi::{CStr, c_char, c_int, c_ulong, c_void};

use super::descriptor::EventDescriptor;

/// The first NCCL with table v5 and the events of API calls.
pub const NCCL_2_28: i64 = 22_800;
/// The first NCCL with table v7. The events of API calls have a rank from here on, which 2.30 leaves at 0. *Unconfirmed*: the
/// version that begins with it.
pub const NCCL_2_31: i64 = 23_100;

/// The log function that a plug-in gets. C declares it with `...` behind the format.
pub type LogFunction = unsafe extern "C" fn(c_int, c_ulong, *const c_char, c_int, *const c_char);

/// `init` of table v4: context, mask, name and number of the communicator, nodes, ranks, rank, log.
pub type InitV4 = unsafe extern "C" fn(
    *mut *mut c_void,
    *mut c_int,
    *const c_char,
    u64,
    c_int,
    c_int,
    c_int,
    LogFunction,
) -> c_int;

/// `init` of the tables v5 to v7: the number of the communicator comes second.
pub type InitV5 = unsafe extern "C" fn(
    *mut *mut c_void,
    u64,
    *mut c_int,
    *const c_char,
    c_int,
    c_int,
    c_int,
    LogFunction,
) -> c_int;

/// `ncclProfiler_vN`. The versions differ in the type of `init`.
#[repr(C)]
pub struct ProfilerTable {
    pub name: *const c_char,
    pub init: *const c_void,
    pub start_event: unsafe extern "C" fn(*mut c_void, *mut *mut c_void, *mut EventDescriptor) -> c_int,
    pub stop_event: unsafe extern "C" fn(*mut c_void) -> c_int,
    /// The last argument is a union of 8 bytes, or null.
    pub record_event_state: unsafe extern "C" fn(*mut c_void, c_int, *mut u64) -> c_int,
    pub finalize: unsafe extern "C" fn(*mut c_void) -> c_int,
}

const _: () = assert!(size_of::<ProfilerTable>() == 48);

/// The tables that the simulation can use, newest first.
const TABLES: [(u32, &CStr); 4] =
    [(7, c"ncclProfiler_v7"), (6, c"ncclProfiler_v6"), (5, c"ncclProfiler_v5"), (4, c"ncclProfiler_v4")];

/// Returns the tables that a version of NCCL knows, newest first.
///
/// More lenient: v1 to v3 are not known. A library that has only those is not used.
pub fn known_tables(nccl_version: i64) -> impl Iterator<Item = (u32, &'static CStr)> {
    let newest = match nccl_version / 100 {
        ..227 => 0,
        227 => 4,
        228 => 5,
        229 | 230 => 6,
        _ => 7,
    };
    TABLES.into_iter().filter(move |(version, _)| *version <= newest)
}
