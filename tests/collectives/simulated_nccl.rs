//! The calls of the CUDA driver and of NCCL that a rank makes, of a library by its path. Begin at [`Gpu::load`].

#![allow(unsafe_code, reason = "the entry points are C functions")]

use std::ffi::{CString, c_int, c_void};
use std::path::Path;
use std::sync::{Condvar, Mutex, PoisonError};

/// The bytes of `ncclUniqueId`.
pub const UNIQUE_ID_BYTES: usize = 128;
/// The bytes of each of the two buffers of a communicator.
const BUFFER_BYTES: usize = 1 << 20;
/// `ncclFloat32` and `ncclSum`.
const FLOAT: c_int = 7;
const SUM: c_int = 0;

/// `ncclUniqueId`.
#[repr(C)]
#[derive(Clone, Copy)]
struct UniqueId([u8; UNIQUE_ID_BYTES]);

/// Defines the table of functions: field, symbol, arguments.
macro_rules! functions {
    ($($field:ident = $symbol:literal($($argument:ty),*);)*) => {
        /// The functions of the library.
        #[derive(Debug, Clone, Copy)]
        pub struct Gpu { $($field: unsafe extern "C" fn($($argument),*) -> c_int,)* }

        impl Gpu {
            /// Loads the library, and makes the context of its device 0 current on this thread.
            pub fn load(path: &Path) -> Self {
                let path = CString::new(path.as_os_str().as_encoded_bytes()).unwrap();
                // SAFETY: the library has no constructors and stays loaded; its functions have these types.
                let gpu = unsafe {
                    let library = libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL);
                    assert!(!library.is_null(), "{path:?} cannot be loaded");
                    Self { $($field: {
                        let address = libc::dlsym(library, $symbol.as_ptr());
                        assert!(!address.is_null(), "there is no {:?}", $symbol);
                        std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($argument),*) -> c_int>(address)
                    },)* }
                };
                gpu.use_device();
                gpu
            }
        }
    };
}

functions! {
    initialize = c"cuInit"(c_int);
    retain_context = c"cuDevicePrimaryCtxRetain"(*mut usize, c_int);
    set_context = c"cuCtxSetCurrent"(usize);
    create_stream = c"cuStreamCreate"(*mut usize, c_int);
    synchronize = c"cuStreamSynchronize"(usize);
    launch_host_function = c"cuLaunchHostFunc"(usize, unsafe extern "C" fn(*mut c_void), *mut c_void);
    allocate = c"cuMemAlloc_v2"(*mut u64, usize);
    unique_id = c"ncclGetUniqueId"(*mut UniqueId);
    start = c"ncclCommInitRank"(*mut usize, c_int, UniqueId, c_int);
    all_reduce = c"ncclAllReduce"(u64, u64, usize, c_int, c_int, usize, usize);
    reduce_scatter = c"ncclReduceScatter"(u64, u64, usize, c_int, c_int, usize, usize);
    all_gather = c"ncclAllGather"(u64, u64, usize, c_int, usize, usize);
    broadcast = c"ncclBroadcast"(u64, u64, usize, c_int, c_int, usize, usize);
}

/// Fails the process if a call has not succeeded.
#[track_caller]
fn check(code: c_int) {
    assert_eq!(code, 0, "the call failed");
}

/// A communicator with a stream and two buffers of its own.
#[derive(Debug, Clone, Copy)]
pub struct Communicator {
    gpu: Gpu,
    handle: usize,
    stream: usize,
    from: u64,
    to: u64,
}

impl Gpu {
    fn use_device(&self) {
        let mut context = 0;
        // SAFETY: the library writes a handle.
        unsafe {
            check((self.initialize)(0));
            check((self.retain_context)(&raw mut context, 0));
            check((self.set_context)(context));
        }
    }

    /// Returns a new unique id.
    pub fn new_unique_id(&self) -> [u8; UNIQUE_ID_BYTES] {
        let mut id = UniqueId([0; UNIQUE_ID_BYTES]);
        // SAFETY: the library writes an id.
        check(unsafe { (self.unique_id)(&raw mut id) });
        id.0
    }

    /// Makes the communicator of a rank, and waits for the other ranks.
    pub fn join(&self, id: [u8; UNIQUE_ID_BYTES], ranks: usize, rank: usize) -> Communicator {
        let (mut handle, mut stream, mut from, mut to) = (0, 0, 0, 0);
        // SAFETY: the library writes handles and addresses.
        unsafe {
            check((self.start)(&raw mut handle, ranks as c_int, UniqueId(id), rank as c_int));
            // 1 is a stream that the default stream does not order.
            check((self.create_stream)(&raw mut stream, 1));
            check((self.allocate)(&raw mut from, BUFFER_BYTES));
            check((self.allocate)(&raw mut to, BUFFER_BYTES));
        }
        Communicator { gpu: *self, handle, stream, from, to }
    }
}

impl Communicator {
    /// Enqueues a collective of `count` elements, by NCCL's name of it.
    pub fn call(&self, function: &str, count: usize) {
        let Self { gpu, handle, stream, from, to } = *self;
        // SAFETY: the library checks handles and addresses.
        check(unsafe {
            match function {
                "AllReduce" => (gpu.all_reduce)(from, to, count, FLOAT, SUM, handle, stream),
                "ReduceScatter" => (gpu.reduce_scatter)(from, to, count, FLOAT, SUM, handle, stream),
                "AllGather" => (gpu.all_gather)(from, to, count, FLOAT, handle, stream),
                "Broadcast" => (gpu.broadcast)(from, to, count, FLOAT, 0, handle, stream),
                other => panic!("there is no collective {other}"),
            }
        });
    }

    /// Waits until the stream has done everything that was enqueued.
    pub fn synchronize(&self) {
        // SAFETY: the library checks the handle.
        check(unsafe { (self.gpu.synchronize)(self.stream) });
    }

    /// Holds the stream until [`release_streams`], as a kernel does that does not end.
    pub fn hold(&self) {
        // SAFETY: the function takes no argument.
        check(unsafe {
            (self.gpu.launch_host_function)(self.stream, wait_for_release, std::ptr::null_mut())
        });
    }
}

/// How often streams were released.
static RELEASES: (Mutex<u64>, Condvar) = (Mutex::new(0), Condvar::new());

unsafe extern "C" fn wait_for_release(_: *mut c_void) {
    let releases = RELEASES.0.lock().unwrap_or_else(PoisonError::into_inner);
    let before = *releases;
    drop(RELEASES.1.wait_while(releases, |releases| *releases == before));
}

/// Lets held streams go on.
pub fn release_streams() {
    *RELEASES.0.lock().unwrap_or_else(PoisonError::into_inner) += 1;
    RELEASES.1.notify_all();
}
