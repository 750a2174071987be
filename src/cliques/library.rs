//! The functions of NCCL, found once per process. The library stays loaded.
//!
//! Results are plain integers: a newer NCCL may return a code that a Rust enum of today does not have. Begin at [`Nccl::get`].
#![allow(unsafe_code, reason = "looks up functions of a C library, and calls them")]

use std::error::Error as _;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem::ManuallyDrop;
use std::sync::OnceLock;

use cudarc::nccl::sys::{ncclComm_t, ncclConfig_t, ncclUniqueId};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use crate::error::{NcclError, NcclUnavailable};
use crate::operation::{CliqueOperation, OperationDirection};

/// The oldest version: in it, calls that do not block are dependable.
const VERSION_MIN: c_int = 21_800;
/// The version of the layouts in `cudarc`.
const VERSION_OF_LAYOUTS: c_int = 23_000;
/// `ncclSuccess` and `ncclInProgress`.
const SUCCESS: c_int = 0;
const IN_PROGRESS: c_int = 7;
/// `ncclUint8`.
const BYTE: c_int = 1;
/// The variable that names the library's file.
const LIBRARY_VARIABLE: &str = "MUSTER_NCCL_LIBRARY";

/// The identity of a communicator, which all its members have. It is a secret of the job: a process that has it can join.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct CliqueId([u8; Self::LEN]);

impl CliqueId {
    /// The length in bytes.
    pub const LEN: usize = 128;

    /// Returns the id with these bytes.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; Self::LEN]) -> Self {
        Self(bytes)
    }

    /// Returns the bytes.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; Self::LEN] {
        &self.0
    }
}

impl std::fmt::Debug for CliqueId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("CliqueId(..)")
    }
}

/// A communicator: one member's part of a clique.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Communicator(ncclComm_t);

// SAFETY: NCCL accepts a communicator from any thread, one at a time.
unsafe impl Send for Communicator {}

/// Defines the table: the name of each function and field, and the arguments.
macro_rules! nccl_functions {
    ($($name:ident($($argument:ty),*);)*) => {
        /// The functions of NCCL that this crate calls.
        #[allow(non_snake_case, reason = "the names of NCCL")]
        struct NcclFunctions {
            $($name: unsafe extern "C" fn($($argument),*) -> c_int,)*
            ncclGetErrorString: unsafe extern "C" fn(c_int) -> *const c_char,
            /// Since 2.28.7.
            ncclCommRevoke: Option<unsafe extern "C" fn(ncclComm_t, c_int) -> c_int>,
        }

        impl NcclFunctions {
            /// Looks up all functions.
            ///
            /// # Safety
            /// The library is NCCL, and stays loaded.
            unsafe fn find(library: &Library) -> Result<Self, NcclUnavailable> {
                // SAFETY: the types are those of NCCL's header.
                unsafe {
                    Ok(Self {
                        $($name: *library
                            .get(stringify!($name))
                            .map_err(|_| NcclUnavailable::MissingFunction(stringify!($name)))?,)*
                        ncclGetErrorString: *library
                            .get("ncclGetErrorString")
                            .map_err(|_| NcclUnavailable::MissingFunction("ncclGetErrorString"))?,
                        ncclCommRevoke: library.get("ncclCommRevoke").ok().map(|function| *function),
                    })
                }
            }
        }
    };
}

nccl_functions! {
    ncclGetVersion(*mut c_int);
    ncclGetUniqueId(*mut ncclUniqueId);
    ncclCommInitRankConfig(*mut ncclComm_t, c_int, ncclUniqueId, c_int, *mut ncclConfig_t);
    ncclCommGetAsyncError(ncclComm_t, *mut c_int);
    ncclCommAbort(ncclComm_t);
    ncclCommFinalize(ncclComm_t);
    ncclCommDestroy(ncclComm_t);
    ncclGroupStart();
    ncclGroupEnd();
    ncclSend(u64, usize, c_int, c_int, ncclComm_t, *mut c_void);
    ncclRecv(u64, usize, c_int, c_int, ncclComm_t, *mut c_void);
}

/// NCCL, loaded.
pub struct Nccl {
    functions: NcclFunctions,
    version: c_int,
}

impl std::fmt::Debug for Nccl {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Nccl").field("version", &self.version).finish_non_exhaustive()
    }
}

impl Nccl {
    /// Returns NCCL. The first call loads it: the file that `MUSTER_NCCL_LIBRARY` names, or `libnccl.so.2`, which is the program's
    /// own one if it has loaded that. The result never changes in a process.
    ///
    /// # Errors
    /// Returns why there is none.
    pub fn get() -> Result<&'static Self, NcclUnavailable> {
        static LOADED: OnceLock<Result<Nccl, NcclUnavailable>> = OnceLock::new();
        LOADED.get_or_init(Self::load).as_ref().map_err(Clone::clone)
    }

    fn load() -> Result<Self, NcclUnavailable> {
        let named = std::env::var_os(LIBRARY_VARIABLE).filter(|path| !path.is_empty());
        let name = named.unwrap_or_else(|| "libnccl.so.2".into());
        // SAFETY: loading the library runs its constructors, which every program that uses NCCL runs.
        let library = unsafe { Library::open(Some(name), RTLD_NOW | RTLD_LOCAL) };
        // The loader's own text is the source of the error.
        let why = |error: libloading::Error| error.source().unwrap_or(&error).to_string();
        let library = library.map_err(|error| NcclUnavailable::NotLoaded(why(error)))?;
        // The functions are used for as long as the process runs.
        let library = ManuallyDrop::new(library);
        // SAFETY: the library is NCCL.
        let functions = unsafe { NcclFunctions::find(&library)? };
        let mut version = 0;
        // SAFETY: the call writes a number.
        let code = unsafe { (functions.ncclGetVersion)(&raw mut version) };
        if code != SUCCESS || version < VERSION_MIN {
            return Err(NcclUnavailable::TooOld { version });
        }
        Ok(Self { functions, version })
    }

    /// Returns the version: 10,000 times the major number, plus 100 times the minor one, plus the patch.
    #[must_use]
    pub const fn version(&self) -> c_int {
        self.version
    }

    /// Returns a new id, for one member to bring to all others.
    ///
    /// # Errors
    /// Returns the error of NCCL, which listens on a network interface for the other members.
    pub fn new_id(&self) -> Result<CliqueId, NcclError> {
        let mut id = ncclUniqueId { internal: [0; CliqueId::LEN] };
        // SAFETY: the call writes an id.
        self.check("ncclGetUniqueId", unsafe { (self.functions.ncclGetUniqueId)(&raw mut id) })?;
        Ok(CliqueId(id.internal.map(c_char::cast_unsigned)))
    }

    /// Begins the start of a communicator on the current device. Returns it with the error, if the call failed.
    pub(crate) fn start(
        &self,
        id: &CliqueId,
        rank: usize,
        ranks: usize,
        is_blocking: bool,
    ) -> (Option<Communicator>, Result<(), NcclError>) {
        let (mut communicator, mut config) = (std::ptr::null_mut(), self.config(is_blocking));
        let id = ncclUniqueId { internal: id.0.map(u8::cast_signed) };
        // SAFETY: the call writes a handle and reads the settings.
        let code = unsafe {
            (self.functions.ncclCommInitRankConfig)(
                &raw mut communicator,
                ranks as c_int,
                id,
                rank as c_int,
                &raw mut config,
            )
        };
        let communicator = (!communicator.is_null()).then_some(Communicator(communicator));
        (communicator, self.check("ncclCommInitRankConfig", code))
    }

    /// Returns the settings of a communicator: every other field is undefined, as the header's initializer has it.
    fn config(&self, is_blocking: bool) -> ncclConfig_t {
        const UNDEFINED: c_int = c_int::MIN;
        ncclConfig_t {
            size: size_of::<ncclConfig_t>(),
            magic: 0xcafe_beef,
            version: self.version.min(VERSION_OF_LAYOUTS).unsigned_abs(),
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

    /// Returns the state of a communicator: false while a call is in progress, or its error.
    pub(crate) fn is_ready(&self, of: Communicator) -> Result<bool, NcclError> {
        let mut state = SUCCESS;
        // SAFETY: the call writes a code. The callers hold the communicator.
        let code = unsafe { (self.functions.ncclCommGetAsyncError)(of.0, &raw mut state) };
        self.check("ncclCommGetAsyncError", code)?;
        // An operation's error has no call of its own.
        self.check("NCCL", state).map(|()| state == SUCCESS)
    }

    /// Begins a group of this thread.
    pub(crate) fn begin_group(&self) -> Result<(), NcclError> {
        // SAFETY: the call has no arguments.
        self.check("ncclGroupStart", unsafe { (self.functions.ncclGroupStart)() })
    }

    /// Ends a group of this thread: its operations are on their streams once the communicator is ready.
    pub(crate) fn end_group(&self) -> Result<(), NcclError> {
        // SAFETY: the call has no arguments.
        self.check("ncclGroupEnd", unsafe { (self.functions.ncclGroupEnd)() })
    }

    /// Adds an operation to the thread's group.
    ///
    /// # Safety
    /// As of [`GpuClique::run`](crate::GpuClique::run), until the operation has ended. The stream is one of the communicator's device.
    pub(crate) unsafe fn add_to_group(
        &self,
        communicator: Communicator,
        operation: &CliqueOperation,
        stream: *mut c_void,
    ) -> Result<(), NcclError> {
        let &CliqueOperation { peer, direction, address, len, .. } = operation;
        let (name, function) = match direction {
            OperationDirection::Send => ("ncclSend", self.functions.ncclSend),
            OperationDirection::Receive => ("ncclRecv", self.functions.ncclRecv),
        };
        // SAFETY: the caller guarantees the memory.
        let code = unsafe { function(address, len, BYTE, peer as c_int, communicator.0, stream) };
        self.check(name, code)
    }

    /// Revokes a communicator, if this NCCL can. Returns whether it was asked to.
    pub(crate) fn revoke(&self, communicator: Communicator) -> bool {
        // SAFETY: the callers hold the communicator.
        self.functions
            .ncclCommRevoke
            .is_some_and(|revoke| unsafe { self.check("ncclCommRevoke", revoke(communicator.0, 0)).is_ok() })
    }

    /// Aborts a communicator, which is not used afterwards. May wait for its operations.
    pub(crate) fn abort(&self, communicator: Communicator) -> Result<(), NcclError> {
        // SAFETY: the callers hold the communicator, and forget it.
        self.check("ncclCommAbort", unsafe { (self.functions.ncclCommAbort)(communicator.0) })
    }

    /// Begins the orderly end of a communicator.
    pub(crate) fn finalize(&self, communicator: Communicator) -> Result<(), NcclError> {
        // SAFETY: the callers hold the communicator.
        self.check("ncclCommFinalize", unsafe { (self.functions.ncclCommFinalize)(communicator.0) })
    }

    /// Destroys a communicator after its orderly end.
    pub(crate) fn destroy(&self, communicator: Communicator) -> Result<(), NcclError> {
        // SAFETY: the callers hold the communicator, and forget it.
        self.check("ncclCommDestroy", unsafe { (self.functions.ncclCommDestroy)(communicator.0) })
    }

    /// Checks a result: a call in progress is no error.
    fn check(&self, call: &'static str, code: c_int) -> Result<(), NcclError> {
        if matches!(code, SUCCESS | IN_PROGRESS) {
            return Ok(());
        }
        // SAFETY: the library returns a constant text for every number.
        let text = unsafe { (self.functions.ncclGetErrorString)(code) };
        // SAFETY: the text is a constant of the library, which stays loaded.
        let text = (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned());
        Err(NcclError { call, code, text: text.unwrap_or_default() })
    }
}
