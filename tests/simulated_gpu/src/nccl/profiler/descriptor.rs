//! The layouts of event descriptors.
//!
//! Each version appends fields to those of the version before. So there is one layout, that of v7; the descriptor of an older
//! version is its first part.

use std::ffi::{c_char, c_int};
use std::mem::{offset_of, size_of};

use super::Handle;

/// The bits of events, in a mask and as the type of a descriptor.
pub mod bits {
    pub const GROUP: i32 = 1;
    pub const COLL: i32 = 1 << 1;
    pub const P2P: i32 = 1 << 2;
    pub const PROXY_OP: i32 = 1 << 3;
    pub const PROXY_STEP: i32 = 1 << 4;
    pub const KERNEL_CHANNEL: i32 = 1 << 6;
    pub const NET_PLUGIN: i32 = 1 << 7;
    pub const GROUP_API: i32 = 1 << 8;
    pub const COLL_API: i32 = 1 << 9;
    pub const P2P_API: i32 = 1 << 10;
    pub const KERNEL_LAUNCH: i32 = 1 << 11;
    pub const CE_ALL: i32 = 0b111 << 12;
}

/// A C string that lives as long as the process.
type Text = *const c_char;

/// A collective that was enqueued.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct CollFields {
    pub sequence_number: u64,
    pub function: Text,
    pub send_buffer: u64,
    pub receive_buffer: u64,
    pub count: usize,
    pub root: c_int,
    pub datatype: Text,
    pub channels: u8,
    pub warps: u8,
    pub algorithm: Text,
    pub protocol: Text,
    /// From v5 on.
    pub parent_group: Handle,
    /// From v7 on, as all that follow.
    pub kernel_variant: Text,
    pub is_symmetric: bool,
    pub user_tag: u64,
}

/// A message that was enqueued.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct P2pFields {
    pub function: Text,
    pub buffer: u64,
    pub datatype: Text,
    pub count: usize,
    pub peer: c_int,
    pub channels: u8,
    /// From v5 on.
    pub parent_group: Handle,
    /// From v7 on.
    pub user_tag: u64,
}

/// The part of an operation that one channel executes.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct KernelChannelFields {
    pub channel: u8,
    pub gpu_time: u64,
}

/// The outermost group around a call.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct GroupApiFields {
    pub is_captured: bool,
    pub depth: c_int,
}

/// The call of a collective.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct CollApiFields {
    pub function: Text,
    pub count: usize,
    pub datatype: Text,
    pub root: c_int,
    pub stream: usize,
    pub is_captured: bool,
    /// From v7 on.
    pub user_tag: u64,
}

/// The call of a send or a receive.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct P2pApiFields {
    pub function: Text,
    pub count: usize,
    pub datatype: Text,
    pub stream: usize,
    pub is_captured: bool,
    /// From v7 on.
    pub user_tag: u64,
}

/// The launch of a kernel.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct KernelLaunchFields {
    pub stream: usize,
}

/// The fields of one kind of event.
#[repr(C)]
#[derive(Clone, Copy)]
pub union Fields {
    pub coll: CollFields,
    pub p2p: P2pFields,
    pub kernel_channel: KernelChannelFields,
    pub group_api: GroupApiFields,
    pub coll_api: CollApiFields,
    pub p2p_api: P2pApiFields,
    pub kernel_launch: KernelLaunchFields,
}

/// The facts of an event that a plug-in gets at its start.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct EventDescriptor {
    pub kind: u64,
    pub parent: Handle,
    pub rank: c_int,
    pub fields: Fields,
}

/// The value of the bytes behind a shorter descriptor, so that a plug-in that reads them as a pointer crashes.
const FILL: u8 = 0xa5;

impl EventDescriptor {
    /// Returns a descriptor whose other bytes are 0.
    pub fn new(kind: c_int, parent: Handle, rank: c_int) -> Self {
        // SAFETY: 0 is a value of every field.
        let zero: Self = unsafe { std::mem::zeroed() };
        Self { kind: kind as u64, parent, rank, ..zero }
    }

    /// Fills what lies behind the descriptor of a version.
    pub fn cut_to(&mut self, version: u32) {
        let len = descriptor_len(version);
        // SAFETY: `len` is not more than the size. The bytes belong to numbers, which have no invalid values, and to a flag
        // that the host does not read.
        unsafe { std::ptr::from_mut(self).cast::<u8>().add(len).write_bytes(FILL, size_of::<Self>() - len) };
    }
}

/// Returns the bytes of a version's descriptor.
const fn descriptor_len(version: u32) -> usize {
    let fields = offset_of!(EventDescriptor, fields);
    match version {
        0..=4 => fields + offset_of!(CollFields, parent_group),
        5 | 6 => fields + offset_of!(CollFields, kernel_variant),
        _ => size_of::<EventDescriptor>(),
    }
}

/// Compares the offset of each field in the descriptor with that of the C header, at compile time.
macro_rules! check_offsets {
    ($($fields:ident { $($field:ident $offset:literal)* })*) => {
        $($(const _: () = assert!(offset_of!(EventDescriptor, fields) + offset_of!($fields, $field) == $offset);)*)*
    };
}

check_offsets! {
    CollFields {
        sequence_number 24 function 32 send_buffer 40 receive_buffer 48 count 56 root 64 datatype 72 channels 80 warps 81
        algorithm 88 protocol 96 parent_group 104 kernel_variant 112 is_symmetric 120 user_tag 128
    }
    P2pFields { function 24 buffer 32 datatype 40 count 48 peer 56 channels 60 parent_group 64 user_tag 72 }
    KernelChannelFields { channel 24 gpu_time 32 }
    GroupApiFields { is_captured 24 depth 28 }
    CollApiFields { function 24 count 32 datatype 40 root 48 stream 56 is_captured 64 user_tag 72 }
    P2pApiFields { function 24 count 32 datatype 40 stream 48 is_captured 56 user_tag 64 }
    KernelLaunchFields { stream 24 }
}

const _: () = assert!(offset_of!(EventDescriptor, parent) == 8 && offset_of!(EventDescriptor, rank) == 16);
const _: () = assert!(descriptor_len(4) == 104 && descriptor_len(5) == 112);
const _: () = assert!(descriptor_len(6) == 112 && descriptor_len(7) == 136);
