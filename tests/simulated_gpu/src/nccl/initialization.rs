//! The start of communicators.

use std::ffi::c_int;

use super::communicator::Communicator;
use super::ras::join_ras;
use super::rendezvous::UniqueId;
use super::{INVALID_ARGUMENT, NcclAnswer, UNHANDLED_CUDA_ERROR, code_of, group, write_out};
use crate::context::current_device;

/// The most ranks of a communicator.
const RANKS_MAX: c_int = 1024;

/// The begin of `ncclConfig_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct ConfigHead {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
}

impl ConfigHead {
    /// Reads whether a communicator is to be blocking.
    unsafe fn is_blocking(config: *const Self) -> NcclAnswer<bool> {
        const MAGIC: u32 = 0xcafe_beef;
        if config.is_null() {
            return Ok(true);
        }
        // SAFETY: the caller passes the struct, of which this is the begin.
        let config = unsafe { config.read_unaligned() };
        if config.magic != MAGIC || config.size < size_of::<Self>() {
            return Err(INVALID_ARGUMENT);
        }
        match config.blocking {
            c_int::MIN | 1 => Ok(true),
            0 => Ok(false),
            _ => Err(INVALID_ARGUMENT),
        }
    }
}

/// Starts a blocking communicator; see `ncclCommInitRankConfig`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommInitRank(to: *mut usize, ranks: c_int, id: UniqueId, rank: c_int) -> c_int {
    // SAFETY: the caller passes a place for a handle.
    unsafe { ncclCommInitRankConfig(to, ranks, id, rank, std::ptr::null()) }
}

/// Starts the communicator of one rank, on the current device. It completes when all ranks have called, without a limit of
/// time. Between group start and end it begins at the group's end. A non-blocking communicator can be aborted before.
///
/// Stricter: two processes with one rank, and ranks that disagree on their number, have error 5. NCCL is known to hang.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommInitRankConfig(
    to: *mut usize,
    ranks: c_int,
    id: UniqueId,
    rank: c_int,
    config: *const ConfigHead,
) -> c_int {
    let start = || {
        // SAFETY: the caller passes the struct, or null.
        let is_blocking = unsafe { ConfigHead::is_blocking(config)? };
        if !(1..=RANKS_MAX).contains(&ranks) || !(0..ranks).contains(&rank) || to.is_null() || !id.is_valid()
        {
            return Err(INVALID_ARGUMENT);
        }
        let device = current_device().map_err(|_| UNHANDLED_CUDA_ERROR)?;
        let (handle, communicator) =
            Communicator::create(rank as usize, ranks as usize, device, is_blocking, id);
        // SAFETY: the caller passes a place for a handle.
        unsafe { write_out(to, handle)? };
        join_ras(&communicator);
        group::start_communicator(communicator)
    };
    code_of(group::note_error(start()))
}
