//! A table of NCCL's functions, loaded by the library's path, with the types of cudarc. Its own enumeration of results must
//! not be used for codes of an unknown NCCL.

use std::ffi::{CString, c_int};
use std::sync::OnceLock;

pub use cudarc::nccl::sys::{ncclComm_t as Comm, ncclConfig_t as Config, ncclUniqueId as UniqueId};
use simulated_gpu::SimulatedGpu;

use crate::driver::CUstream;

pub const INVALID_ARGUMENT: c_int = 4;
pub const INVALID_USAGE: c_int = 5;
pub const REMOTE_ERROR: c_int = 6;
pub const IN_PROGRESS: c_int = 7;
/// `ncclUint8`, `ncclInt32`, `ncclFloat32`.
pub const BYTE: c_int = 1;
pub const INT: c_int = 2;
pub const FLOAT: c_int = 7;

/// Defines the table: field, symbol, arguments.
macro_rules! table {
    ($($field:ident = $symbol:ident($($argument:ty),*);)*) => {
        #[derive(Debug)]
        pub struct Nccl { $(pub $field: unsafe extern "C" fn($($argument),*) -> c_int,)* }

        /// The symbols of the table.
        pub const SYMBOLS: &[&str] = &[$(stringify!($symbol),)*];

        impl Nccl {
            fn load(path: &CString) -> Self {
                // SAFETY: the library has no constructors and stays loaded; its functions have these types.
                unsafe {
                    let library = libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL);
                    assert!(!library.is_null(), "{path:?} cannot be loaded");
                    Self { $($field: {
                        let name = CString::new(stringify!($symbol)).unwrap();
                        let address = libc::dlsym(library, name.as_ptr());
                        assert!(!address.is_null(), "there is no {name:?}");
                        std::mem::transmute::<*mut std::ffi::c_void, unsafe extern "C" fn($($argument),*) -> c_int>(address)
                    },)* }
                }
            }
        }
    };
}

table! {
    unique_id = ncclGetUniqueId(*mut UniqueId);
    start_blocking = ncclCommInitRank(*mut Comm, c_int, UniqueId, c_int);
    start = ncclCommInitRankConfig(*mut Comm, c_int, UniqueId, c_int, *mut Config);
    error = ncclCommGetAsyncError(Comm, *mut c_int);
    count = ncclCommCount(Comm, *mut c_int);
    rank = ncclCommUserRank(Comm, *mut c_int);
    device = ncclCommCuDevice(Comm, *mut c_int);
    revoke = ncclCommRevoke(Comm, c_int);
    abort = ncclCommAbort(Comm);
    finalize = ncclCommFinalize(Comm);
    destroy = ncclCommDestroy(Comm);
    register = ncclCommRegister(Comm, u64, usize, *mut *mut std::ffi::c_void);
    deregister = ncclCommDeregister(Comm, *mut std::ffi::c_void);
    group_start = ncclGroupStart();
    group_end = ncclGroupEnd();
    send = ncclSend(u64, usize, c_int, c_int, Comm, CUstream);
    receive = ncclRecv(u64, usize, c_int, c_int, Comm, CUstream);
    all_reduce = ncclAllReduce(u64, u64, usize, c_int, c_int, Comm, CUstream);
    reduce = ncclReduce(u64, u64, usize, c_int, c_int, c_int, Comm, CUstream);
    reduce_scatter = ncclReduceScatter(u64, u64, usize, c_int, c_int, Comm, CUstream);
    all_gather = ncclAllGather(u64, u64, usize, c_int, Comm, CUstream);
    broadcast = ncclBroadcast(u64, u64, usize, c_int, c_int, Comm, CUstream);
    broadcast_in_place = ncclBcast(u64, usize, c_int, c_int, Comm, CUstream);
}

/// Returns the table.
pub fn nccl() -> &'static Nccl {
    static TABLE: OnceLock<Nccl> = OnceLock::new();
    TABLE.get_or_init(|| {
        let path = SimulatedGpu::library();
        Nccl::load(&CString::new(path.as_os_str().as_encoded_bytes()).unwrap())
    })
}

/// Returns a new id.
pub fn new_id() -> UniqueId {
    let mut id = UniqueId { internal: [0; 128] };
    // SAFETY: the library writes an id.
    assert_eq!(unsafe { (nccl().unique_id)(&raw mut id) }, 0);
    id
}

/// Returns the settings of a communicator; every other field is undefined, as the header's initializer has it.
pub fn config(is_blocking: bool) -> Config {
    const UNDEFINED: c_int = c_int::MIN;
    Config {
        size: size_of::<Config>(),
        magic: 0xcafe_beef,
        version: 23_007,
        blocking: is_blocking.into(),
        cgaClusterSize: UNDEFINED,
        minCTAs: UNDEFINED,
        maxCTAs: UNDEFINED,
        netName: std::ptr::null(),
        splitShare: UNDEFINED,
        trafficClass: UNDEFINED,
        commName: std::ptr::null(),
        collnetEnable: UNDEFINED,
        CTAPolicy: UNDEFINED,
        shrinkShare: UNDEFINED,
        nvlsCTAs: UNDEFINED,
        nChannelsPerNetPeer: UNDEFINED,
        nvlinkCentricSched: UNDEFINED,
        graphUsageMode: UNDEFINED,
        numRmaCtx: UNDEFINED,
        maxP2pPeers: UNDEFINED,
    }
}
