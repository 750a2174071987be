//! The structs of libfabric's interface (`rdma/fabric.h` and the headers beside it, ABI of 1.9 and later), as far as this crate uses
//! them. Tables of functions end where the crate needs no more: the library makes them.
//!
//! `tests/layouts.rs` compares them with the headers, where a C compiler finds these.
#![allow(missing_docs, reason = "the names of libfabric; its manual pages say what they mean")]

use std::ffi::{c_char, c_int, c_void};

/// `fi_addr_t` of no address.
pub const ADDRESS_UNSPECIFIED: u64 = u64::MAX;
/// `FI_VERSION(1, 9)`: the interface that the crate asks for.
pub const API_VERSION: u32 = 1 << 16 | 9;

pub const CAP_RMA: u64 = 1 << 2;
pub const CAP_READ: u64 = 1 << 8;
pub const CAP_REMOTE_READ: u64 = 1 << 12;
pub const MODE_CONTEXT: u64 = 1 << 59;
pub const MODE_CONTEXT2: u64 = 1 << 52;
pub const MR_LOCAL: c_int = 1 << 2;
pub const MR_VIRT_ADDR: c_int = 1 << 4;
pub const MR_ALLOCATED: c_int = 1 << 5;
pub const MR_PROV_KEY: c_int = 1 << 6;
/// `FI_EP_RDM`: reliable, to any peer.
pub const ENDPOINT_RDM: u32 = 3;
/// `FI_THREAD_SAFE`.
pub const THREAD_SAFE: u32 = 1;
/// `FI_CQ_FORMAT_CONTEXT`: an entry is the context of its operation.
pub const CQ_FORMAT_CONTEXT: u32 = 1;
/// `FI_WAIT_NONE`.
pub const WAIT_NONE: u32 = 0;
/// `FI_ADDR_STR`: addresses are C strings.
pub const ADDRESS_TEXT: u32 = 9;
/// `FI_TRANSMIT` and `FI_RECV`: what of an endpoint a queue is for.
pub const BIND_TRANSMIT: u64 = 1 << 11;
pub const BIND_RECV: u64 = 1 << 10;
/// `FI_ENABLE`, a command of `control`.
pub const COMMAND_ENABLE: c_int = 6;
/// `FI_EAGAIN` and `FI_EAVAIL`.
pub const EAGAIN: isize = 11;
pub const EAVAIL: isize = 259;

#[repr(C)]
pub struct Fid {
    pub class: usize,
    pub context: *mut c_void,
    pub ops: *const FidOps,
}

#[repr(C)]
pub struct FidOps {
    pub size: usize,
    pub close: unsafe extern "C" fn(*mut Fid) -> c_int,
    pub bind: unsafe extern "C" fn(*mut Fid, *mut Fid, u64) -> c_int,
    pub control: unsafe extern "C" fn(*mut Fid, c_int, *mut c_void) -> c_int,
}

#[repr(C)]
pub struct TransmitAttributes {
    pub caps: u64,
    pub mode: u64,
    pub op_flags: u64,
    pub msg_order: u64,
    pub comp_order: u64,
    pub inject_size: usize,
    pub size: usize,
    pub iov_limit: usize,
    pub rma_iov_limit: usize,
}

#[repr(C)]
pub struct EndpointAttributes {
    pub kind: u32,
    pub protocol: u32,
    pub protocol_version: u32,
    pub max_msg_size: usize,
}

#[repr(C)]
pub struct DomainAttributes {
    pub domain: *mut c_void,
    pub name: *mut c_char,
    pub threading: u32,
    pub control_progress: u32,
    pub data_progress: u32,
    pub resource_mgmt: u32,
    pub av_type: u32,
    pub mr_mode: c_int,
    pub mr_key_size: usize,
}

#[repr(C)]
pub struct FabricAttributes {
    pub fabric: *mut c_void,
    pub name: *mut c_char,
    pub prov_name: *mut c_char,
    pub prov_version: u32,
    pub api_version: u32,
}

#[repr(C)]
pub struct Info {
    pub next: *mut Info,
    pub caps: u64,
    pub mode: u64,
    pub addr_format: u32,
    pub src_addrlen: usize,
    pub dest_addrlen: usize,
    pub src_addr: *mut c_void,
    pub dest_addr: *mut c_void,
    pub handle: *mut c_void,
    pub tx_attr: *mut TransmitAttributes,
    pub rx_attr: *mut c_void,
    pub ep_attr: *mut EndpointAttributes,
    pub domain_attr: *mut DomainAttributes,
    pub fabric_attr: *mut FabricAttributes,
    pub nic: *mut c_void,
}

#[repr(C)]
pub struct FabricFid {
    pub fid: Fid,
    pub ops: *const FabricOps,
}

#[repr(C)]
pub struct FabricOps {
    pub size: usize,
    pub domain: unsafe extern "C" fn(*mut FabricFid, *mut Info, *mut *mut DomainFid, *mut c_void) -> c_int,
}

#[repr(C)]
pub struct DomainFid {
    pub fid: Fid,
    pub ops: *const DomainOps,
    pub mr: *const MemoryOps,
}

#[repr(C)]
pub struct DomainOps {
    pub size: usize,
    pub av_open: unsafe extern "C" fn(
        *mut DomainFid,
        *mut AddressAttributes,
        *mut *mut AddressFid,
        *mut c_void,
    ) -> c_int,
    pub cq_open:
        unsafe extern "C" fn(*mut DomainFid, *mut QueueAttributes, *mut *mut QueueFid, *mut c_void) -> c_int,
    pub endpoint:
        unsafe extern "C" fn(*mut DomainFid, *mut Info, *mut *mut EndpointFid, *mut c_void) -> c_int,
}

#[repr(C)]
pub struct MemoryOps {
    pub size: usize,
    pub reg: unsafe extern "C" fn(
        *mut Fid,
        *const c_void,
        usize,
        u64,
        u64,
        u64,
        u64,
        *mut *mut MemoryFid,
        *mut c_void,
    ) -> c_int,
}

#[repr(C)]
pub struct MemoryFid {
    pub fid: Fid,
    pub mem_desc: *mut c_void,
    pub key: u64,
}

#[repr(C)]
pub struct AddressAttributes {
    pub kind: u32,
    pub rx_ctx_bits: c_int,
    pub count: usize,
    pub ep_per_node: usize,
    pub name: *const c_char,
    pub map_addr: *mut c_void,
    pub flags: u64,
}

#[repr(C)]
pub struct AddressFid {
    pub fid: Fid,
    pub ops: *const AddressOps,
}

#[repr(C)]
pub struct AddressOps {
    pub size: usize,
    pub insert:
        unsafe extern "C" fn(*mut AddressFid, *const c_void, usize, *mut u64, u64, *mut c_void) -> c_int,
}

#[repr(C)]
pub struct QueueAttributes {
    pub size: usize,
    pub flags: u64,
    pub format: u32,
    pub wait_obj: u32,
    pub signaling_vector: c_int,
    pub wait_cond: u32,
    pub wait_set: *mut c_void,
}

#[repr(C)]
pub struct QueueFid {
    pub fid: Fid,
    pub ops: *const QueueOps,
}

#[repr(C)]
pub struct QueueOps {
    pub size: usize,
    pub read: unsafe extern "C" fn(*mut QueueFid, *mut c_void, usize) -> isize,
    pub readfrom: unsafe extern "C" fn(*mut QueueFid, *mut c_void, usize, *mut u64) -> isize,
    pub readerr: unsafe extern "C" fn(*mut QueueFid, *mut QueueError, u64) -> isize,
}

/// An entry of a queue in the format [`CQ_FORMAT_CONTEXT`].
#[repr(C)]
#[derive(Clone, Copy)]
pub struct QueueEntry {
    pub op_context: *mut c_void,
}

#[repr(C)]
pub struct QueueError {
    pub op_context: *mut c_void,
    pub flags: u64,
    pub len: usize,
    pub buf: *mut c_void,
    pub data: u64,
    pub tag: u64,
    pub olen: usize,
    pub err: c_int,
    pub prov_errno: c_int,
    pub err_data: *mut c_void,
    pub err_data_size: usize,
    /// A later interface may write more.
    pub reserve: [u64; 4],
}

#[repr(C)]
pub struct EndpointFid {
    pub fid: Fid,
    pub ops: *const c_void,
    pub cm: *const ConnectionOps,
    pub msg: *const c_void,
    pub rma: *const RemoteMemoryOps,
}

#[repr(C)]
pub struct ConnectionOps {
    pub size: usize,
    pub setname: *const c_void,
    pub getname: unsafe extern "C" fn(*mut Fid, *mut c_void, *mut usize) -> c_int,
}

#[repr(C)]
pub struct RemoteMemoryOps {
    pub size: usize,
    pub read: unsafe extern "C" fn(
        *mut EndpointFid,
        *mut c_void,
        usize,
        *mut c_void,
        u64,
        u64,
        u64,
        *mut c_void,
    ) -> isize,
}
