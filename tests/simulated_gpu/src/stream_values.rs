//! Words that streams write and await.

use std::ffi::{c_int, c_uint};
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

use crate::context::current_device;
use crate::error::{Answer, ILLEGAL_ADDRESS, INVALID_VALUE, code_of, is_lost};
use crate::host_memory::{HostRange, classify};
use crate::stream::Stream;
use crate::wait::{wait_until, wake_all_waits};
use crate::{device_memory, host_memory};

/// How a value is awaited, as `CUstreamWaitValue_flags` numbers it.
#[derive(Debug, Clone, Copy)]
enum Comparison {
    AtLeast,
    Equal,
    CommonBits,
    MissingBits,
}

impl Comparison {
    fn of(flags: c_uint) -> Answer<Self> {
        /// `CU_STREAM_WAIT_VALUE_FLUSH`.
        const FLUSH: c_uint = 1 << 30;
        match flags & !FLUSH {
            0 => Ok(Self::AtLeast),
            1 => Ok(Self::Equal),
            2 => Ok(Self::CommonBits),
            3 => Ok(Self::MissingBits),
            _ => Err(INVALID_VALUE),
        }
    }

    fn holds(self, now: u32, value: u32) -> bool {
        match self {
            // The difference is signed, so that counters may wrap.
            Self::AtLeast => now.wrapping_sub(value).cast_signed() >= 0,
            Self::Equal => now == value,
            Self::CommonBits => now & value != 0,
            Self::MissingBits => !(now | value) != 0,
        }
    }
}

/// Returns whether an address is that of a word that a stream may use.
fn is_word(at: u64) -> bool {
    at.is_multiple_of(4)
        && (device_memory::find_usable_pieces(at, 4).is_some() || host_memory::is_pinned(at, 4))
}

/// Runs a function on a word; error 700 if the memory is gone.
fn with_word<T>(at: u64, body: impl FnOnce(&AtomicU32) -> T) -> Answer<T> {
    if let Some(pieces) = device_memory::find_usable_pieces(at, 4) {
        // SAFETY: the piece is mapped while it is held, and aligned as the segment is.
        return Ok(body(unsafe { &*(pieces[0].address as *const AtomicU32) }));
    }
    match classify(at, 4) {
        // SAFETY: the guard keeps the driver's pages mapped; a registration promises that the program's are.
        HostRange::Pinned(_guard) => Ok(body(unsafe { &*(at as *const AtomicU32) })),
        _ => Err(ILLEGAL_ADDRESS),
    }
}

/// Writes a word after all earlier work of a stream, whose writes are visible before it. The address is that of device
/// memory or page-locked memory, and a multiple of 4. Flags: no memory barrier 1.
#[unsafe(no_mangle)]
pub extern "C" fn cuStreamWriteValue32_v2(handle: usize, at: u64, value: u32, flags: c_uint) -> c_int {
    code_of(current_device().and_then(|device| {
        let stream = Stream::find(handle, device)?;
        if flags > 1 || !is_word(at) {
            return Err(INVALID_VALUE);
        }
        stream.enqueue_work(move || {
            with_word(at, |word| word.store(value, SeqCst))?;
            wake_all_waits();
            Ok(())
        });
        Ok(())
    }))
}

/// Lets the later work of a stream wait until a word compares to a value: at least 0, equal 1, common bits 2, missing
/// bits 3. Nothing ends the wait but the word; here a sticky error does as well.
#[unsafe(no_mangle)]
pub extern "C" fn cuStreamWaitValue32_v2(handle: usize, at: u64, value: u32, flags: c_uint) -> c_int {
    code_of(current_device().and_then(|device| {
        let stream = Stream::find(handle, device)?;
        let comparison = Comparison::of(flags)?;
        if !is_word(at) {
            return Err(INVALID_VALUE);
        }
        stream.enqueue_work(move || {
            let mut outcome = Ok(false);
            wait_until(|| {
                outcome = with_word(at, |word| comparison.holds(word.load(SeqCst), value));
                is_lost() || !matches!(outcome, Ok(false))
            });
            outcome.map(drop)
        });
        Ok(())
    }))
}
