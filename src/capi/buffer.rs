//! Memory that transfers move: memory of the program, or shared memory of the library.
//!
//! Transfers decide when the memory may be used. Begin at [`muster_buffer_register`].

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;

use muster::transfer::{Arena, Buffer};

use super::boundary::{OutputPointer, check_fits_address_space, run_interface_function};
use super::handles::{self, OpaqueHandle};
use super::status::{CallError, MusterStatus};
use super::wait::run_callback;

/// Memory that transfers read and write. `muster_buffer_register` and `muster_buffer_allocate` make one.
pub struct MusterBuffer {
    _private: [u8; 0],
}

impl OpaqueHandle for MusterBuffer {
    type Object = BufferObject;
    const NAME: &'static str = "muster_buffer";
}

/// The object of a [`MusterBuffer`].
pub struct BufferObject {
    pub buffer: Buffer,
    data: BufferAddress,
}

/// The address of memory that the buffer keeps.
struct BufferAddress(*mut u8);

// SAFETY: it is only handed out, never dereferenced here.
unsafe impl Send for BufferAddress {}
// SAFETY: as above.
unsafe impl Sync for BufferAddress {}

/// Called once when nothing of the library uses the memory any more, on any thread: `context` as it was registered, and the
/// memory. It must return soon, must not throw, and must call no function of the library.
pub type MusterRelease = Option<unsafe extern "C" fn(context: *mut c_void, data: *mut c_void, len: usize)>;

/// The memory of a program, which is released when this is dropped.
struct ProgramMemory {
    data: NonNull<u8>,
    len: usize,
    release: MusterRelease,
    context: *mut c_void,
}

// SAFETY: the program has agreed that its callback is called on any thread, and nothing else uses the context.
unsafe impl Send for ProgramMemory {}

impl AsMut<[u8]> for ProgramMemory {
    fn as_mut(&mut self) -> &mut [u8] {
        // SAFETY: the pointer was checked when the memory was registered, and the program keeps the memory until it is
        // released.
        unsafe { std::slice::from_raw_parts_mut(self.data.as_ptr(), self.len) }
    }
}

impl Drop for ProgramMemory {
    fn drop(&mut self) {
        if let Some(release) = self.release {
            let data = if self.len == 0 { std::ptr::null_mut() } else { self.data.as_ptr() };
            // SAFETY: the program registered this function for these arguments.
            run_callback(|| unsafe { release(self.context, data.cast(), self.len) });
        }
    }
}

/// Makes a buffer of the program's memory, without a copy. The memory must stay valid until `release` is called, which
/// happens once the handle is freed and no transfer uses it. Without `release`, that moment is unknown: keep the memory to
/// the end of the process, or until every transfer of it has its outcome and the handle is freed.
///
/// From the launch of a transfer to its outcome, or to the proof that a cancellation is complete, the program must not
/// write what is sent and must not use what is received. If this fails, `release` is not called.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn muster_buffer_register(
    data: *mut c_void,
    len: usize,
    release: MusterRelease,
    context: *mut c_void,
    buffer: *mut *mut MusterBuffer,
) -> MusterStatus {
    run_interface_function(|| {
        let place = OutputPointer::new("buffer", buffer)?;
        let start = match (NonNull::new(data.cast::<u8>()), len) {
            (_, 0) => NonNull::dangling(),
            (Some(start), _) => start,
            (None, _) => return Err(CallError::invalid_argument(format!("data is NULL, and len is {len}"))),
        };
        check_fits_address_space("data", start.as_ptr().addr(), len, 1)?;
        let memory = ProgramMemory { data: start, len, release, context };
        let object = BufferObject { buffer: Buffer::foreign(memory), data: BufferAddress(data.cast()) };
        place.set(handles::add(Arc::new(object)));
        Ok(())
    })
}

/// Makes a buffer of `len` bytes of shared memory, all zero. Tasks on this host copy directly from it, which is faster than
/// from registered memory. `muster_buffer_data` returns its address. It is freed when the handle is freed and no transfer
/// uses it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn muster_buffer_allocate(len: usize, buffer: *mut *mut MusterBuffer) -> MusterStatus {
    run_interface_function(|| {
        let place = OutputPointer::new("buffer", buffer)?;
        let buffer = Arena::new(len)?.allocate(len)?;
        let data = BufferAddress(buffer.with_bytes_mut(<[u8]>::as_mut_ptr)?);
        place.set(handles::add(Arc::new(BufferObject { buffer, data })));
        Ok(())
    })
}

/// Writes the address and the length of a buffer. `len` may be NULL. The rules of `muster_buffer_register` say when the
/// program may use the memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn muster_buffer_data(
    buffer: *const MusterBuffer,
    data: *mut *mut c_void,
    len: *mut usize,
) -> MusterStatus {
    run_interface_function(|| {
        let (data, len) = (OutputPointer::new("data", data)?, OutputPointer::optional("len", len)?);
        let object = handles::get(buffer)?;
        data.set(object.data.0.cast());
        if let Some(len) = len {
            len.set(object.buffer.len());
        }
        Ok(())
    })
}

/// Frees a buffer. Its memory is released when no transfer uses it any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn muster_buffer_free(buffer: *mut MusterBuffer) -> MusterStatus {
    run_interface_function(|| handles::remove(buffer).map(drop))
}
