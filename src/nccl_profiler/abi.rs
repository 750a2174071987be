//! NCCL's profiler tables and event descriptors, for versions 4 to 7 (NCCL 2.27 to 2.32).
//!
//! All fields that are read here lie at the same offsets in these versions, so one set of functions serves four tables; the
//! tests have the offsets. Begin at [`ProfilerTable`] and [`EventDescriptor`].
#![allow(missing_docs, reason = "the names are NCCL's")]

use std::ffi::{c_char, c_int, c_ulong, c_void};

/// The log function of NCCL: level, subsystems, file, line, format and values. It is valid while `init` runs.
pub type LogFunction = Option<unsafe extern "C" fn(c_int, c_ulong, *const c_char, c_int, *const c_char, ...)>;
pub type InitV1 = unsafe extern "C" fn(*mut *mut c_void, *mut c_int) -> c_int;
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
pub type StartEvent = unsafe extern "C" fn(*mut c_void, *mut *mut c_void, *const EventDescriptor) -> c_int;
pub type StopEvent = unsafe extern "C" fn(*mut c_void) -> c_int;
pub type RecordEventState = unsafe extern "C" fn(*mut c_void, c_int, *const u64) -> c_int;

/// The table of a version.
#[repr(C)]
#[derive(Debug)]
pub struct ProfilerTable<I> {
    pub name: *const c_char,
    pub init: I,
    pub start_event: StartEvent,
    pub stop_event: StopEvent,
    pub record_event_state: RecordEventState,
    pub finalize: StopEvent,
}

// SAFETY: the table is never written, and its name is a static text.
#[expect(unsafe_code, reason = "a table with a pointer to a static text")]
unsafe impl<I: Sync> Sync for ProfilerTable<I> {}

/// The bits of events in the mask and in descriptors.
pub const GROUP: u64 = 1;
pub const COLLECTIVE: u64 = 1 << 1;
pub const POINT_TO_POINT: u64 = 1 << 2;
pub const KERNEL_CHANNEL: u64 = 1 << 6;
pub const GROUP_API: u64 = 1 << 8;
pub const COLLECTIVE_API: u64 = 1 << 9;
pub const POINT_TO_POINT_API: u64 = 1 << 10;
/// The state in which a channel has ended; its argument is the time of the GPU.
pub const KERNEL_CHANNEL_ENDED: c_int = 22;

/// An event that starts.
#[repr(C)]
pub struct EventDescriptor {
    pub kind: u64,
    pub parent: *mut c_void,
    pub rank: c_int,
    pub of_kind: EventOfKind,
}

/// The fields that depend on the kind.
#[repr(C)]
pub union EventOfKind {
    pub collective: CollectiveEvent,
    pub point_to_point: PointToPointEvent,
    pub kernel_channel: KernelChannelEvent,
    pub group_call: GroupCallEvent,
    pub collective_call: CollectiveCallEvent,
    pub point_to_point_call: PointToPointCallEvent,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct CollectiveEvent {
    pub sequence_number: u64,
    pub function: *const c_char,
    pub send_buffer: *const c_void,
    pub receive_buffer: *mut c_void,
    pub count: usize,
    pub root: c_int,
    pub data_type: *const c_char,
    pub channels: u8,
    pub warps: u8,
    pub algorithm: *const c_char,
    pub protocol: *const c_char,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct PointToPointEvent {
    pub function: *const c_char,
    pub buffer: *mut c_void,
    pub data_type: *const c_char,
    pub count: usize,
    pub peer: c_int,
    pub channels: u8,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct KernelChannelEvent {
    pub channel: u8,
    /// By the clock of the GPU, in nanoseconds.
    pub gpu_time: u64,
}

/// A group of calls, from version 5 on.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct GroupCallEvent {
    /// 1 if a CUDA graph captures the calls.
    pub is_captured: u8,
    pub depth: c_int,
}

/// The call of a collective, from version 5 on.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct CollectiveCallEvent {
    pub function: *const c_char,
    pub count: usize,
    pub data_type: *const c_char,
    pub root: c_int,
    pub stream: *mut c_void,
    /// 1 if a CUDA graph captures the call.
    pub is_captured: u8,
}

/// The call of a send or receive, from version 5 on.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct PointToPointCallEvent {
    pub function: *const c_char,
    pub count: usize,
    pub data_type: *const c_char,
    pub stream: *mut c_void,
    /// 1 if a CUDA graph captures the call.
    pub is_captured: u8,
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use super::*;

    #[test]
    fn offsets_are_those_of_versions_4_to_7() {
        let of_kind = offset_of!(EventDescriptor, of_kind);
        assert_eq!((offset_of!(EventDescriptor, parent), offset_of!(EventDescriptor, rank)), (8, 16));
        assert_eq!(of_kind, 24);
        let collective = [
            offset_of!(CollectiveEvent, sequence_number),
            offset_of!(CollectiveEvent, function),
            offset_of!(CollectiveEvent, send_buffer),
            offset_of!(CollectiveEvent, receive_buffer),
            offset_of!(CollectiveEvent, count),
            offset_of!(CollectiveEvent, root),
            offset_of!(CollectiveEvent, data_type),
            offset_of!(CollectiveEvent, channels),
            offset_of!(CollectiveEvent, warps),
            offset_of!(CollectiveEvent, algorithm),
            offset_of!(CollectiveEvent, protocol),
        ];
        assert_eq!(collective.map(|at| at + of_kind), [24, 32, 40, 48, 56, 64, 72, 80, 81, 88, 96]);
        let point_to_point = [
            offset_of!(PointToPointEvent, function),
            offset_of!(PointToPointEvent, buffer),
            offset_of!(PointToPointEvent, data_type),
            offset_of!(PointToPointEvent, count),
            offset_of!(PointToPointEvent, peer),
            offset_of!(PointToPointEvent, channels),
        ];
        assert_eq!(point_to_point.map(|at| at + of_kind), [24, 32, 40, 48, 56, 60]);
        let channel = [offset_of!(KernelChannelEvent, channel), offset_of!(KernelChannelEvent, gpu_time)];
        assert_eq!(channel.map(|at| at + of_kind), [24, 32]);
        let is_captured = [
            offset_of!(GroupCallEvent, is_captured),
            offset_of!(CollectiveCallEvent, is_captured),
            offset_of!(PointToPointCallEvent, is_captured),
        ];
        assert_eq!(is_captured.map(|at| at + of_kind), [24, 64, 56]);
        assert_eq!(size_of::<ProfilerTable<InitV5>>(), 48);
        // Version 4 has the shortest descriptor. No more than that is ever read.
        assert_eq!(size_of::<EventDescriptor>(), 104);
    }
}
