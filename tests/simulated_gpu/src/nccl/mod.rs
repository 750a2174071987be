//! Simulated NCCL: communicators between threads or processes of one host.
//!
//! | module | what it owns |
//! | --- | --- |
//! | `rendezvous` | unique ids, and how the ranks of one find each other |
//! | `link` | the socket from one rank to another |
//! | `communicator` | the states of a communicator, from its start to its end |
//! | `group` | what a thread collects between group start and end, and its launch |
//! | `operation`, `operation_calls` | the calls of operations, their types and sizes |
//! | `collective` | what the ranks of a collective send to each other |
//! | `exchange` | the execution of a group on its stream |
//! | `reduction` | sums, products, minima and maxima |
//! | `profiler` | the profiler plug-in and its events |
//! | `ras` | what NCCL's own monitoring says |
//!
//! Rules that hold for all of it:
//!
//! 1. The operations of one group and communicator are one operation of a stream, and run at the same time. Groups of a
//!    communicator run in the order in which they were launched, also on different streams.
//! 2. A group that meets an error keeps its stream until the communicator is revoked or aborted, as a real kernel does. The
//!    error is the communicator's asynchronous error.
//! 3. *Stricter*: a receiver compares size and type with the sender before a byte moves, and in a collective the function, its
//!    reduction and root. Both have the asynchronous error 5 if they differ. NCCL compares nothing; contents are then
//!    undefined, or nothing ends. With the setting `nccl_lenient` nothing ends: the group waits for a revocation or an abort.
//! 4. *Stricter*: the death of a peer causes the asynchronous error 6 only if an operation is under way with it, and with the
//!    setting `nccl_silent_death` not even then. On one host, NCCL notices nothing.
//! 5. *More lenient*: ranks may share a device.
//! 6. *Stricter*: a collective ends on no rank before all ranks have begun it, and an empty one has to be called by all ranks.
//!    In NCCL the root of a broadcast may end first, and empty collectives are dropped.

mod collective;
mod communicator;
mod exchange;
mod group;
mod initialization;
mod link;
mod operation;
mod operation_calls;
mod profiler;
mod ras;
mod reduction;
mod rendezvous;

use std::ffi::{CStr, c_char, c_int};

pub use profiler::communicator_hash;

use crate::settings::Setting;

/// A code of `ncclResult_t` other than success.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct NcclError(c_int);

/// The answer of an entry point.
type NcclAnswer<T = ()> = Result<T, NcclError>;

const UNHANDLED_CUDA_ERROR: NcclError = NcclError(1);
const SYSTEM_ERROR: NcclError = NcclError(2);
const INVALID_ARGUMENT: NcclError = NcclError(4);
const INVALID_USAGE: NcclError = NcclError(5);
const REMOTE_ERROR: NcclError = NcclError(6);
const IN_PROGRESS: NcclError = NcclError(7);

fn code_of(answer: NcclAnswer) -> c_int {
    answer.map_or_else(|error| error.0, |()| 0)
}

/// Writes an output; a null pointer is an invalid argument.
///
/// # Safety
/// A pointer that is not null is valid for a write.
unsafe fn write_out<T>(to: *mut T, value: T) -> NcclAnswer {
    // SAFETY: as the caller promises.
    unsafe { crate::error::write_out(to, value) }.map_err(|_| INVALID_ARGUMENT)
}

/// Returns 10000 × major + 100 × minor + patch.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetVersion(to: *mut c_int) -> c_int {
    // SAFETY: the caller passes a place for a number.
    code_of(unsafe { write_out(to, Setting::NcclVersion.get() as c_int) })
}

/// Returns the text of a code.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGetErrorString(code: c_int) -> *const c_char {
    let text: &CStr = match code {
        0 => c"no error",
        1 => c"unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
        2 => c"unhandled system error (run with NCCL_DEBUG=INFO for details)",
        3 => c"internal error - please report this issue to the NCCL developers",
        4 => c"invalid argument (run with NCCL_DEBUG=WARN for details)",
        5 => c"invalid usage (run with NCCL_DEBUG=WARN for details)",
        6 => c"remote process exited or there was a network error",
        7 => c"NCCL operation in progress",
        _ => c"unknown result code",
    };
    text.as_ptr()
}

/// Returns the text of the last error of any thread. Here it is empty: tests look at codes.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGetLastError(_communicator: usize) -> *const c_char {
    c"".as_ptr()
}
