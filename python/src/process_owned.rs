//! Values that only the process that made them may use. A forked child has a copy of such a value, and gets an
//! error when it uses the copy.
//!
//! Begin at [`ProcessOwned::get`].

use muster::transfer::Buffer;
use pyo3::prelude::*;

use super::wait::forked_error;

/// Memory of the transfer engine.
pub type ProcessOwnedBuffer = ProcessOwned<Buffer>;

/// A value, and the process that made it.
pub struct ProcessOwned<T> {
    /// `None` once it was taken.
    value: Option<T>,
    process: u32,
}

impl<T> ProcessOwned<T> {
    pub fn new(value: T) -> Self {
        Self { value: Some(value), process: std::process::id() }
    }

    /// Returns the value.
    ///
    /// # Errors
    /// `MusterError` in a process that was forked from the one that made it.
    pub fn get(&self, py: Python<'_>) -> PyResult<&T> {
        match &self.value {
            Some(value) if self.process == std::process::id() => Ok(value),
            _ => Err(forked_error(py)),
        }
    }

    /// Takes the value out, to be dropped; nothing in another process.
    pub fn take(&mut self) -> Option<T> {
        let value = self.value.take();
        if self.process == std::process::id() {
            return value;
        }
        // Another thread of the parent may have held a lock of the value when this process was forked, and the end of
        // the value may be told to a peer, which the parent still talks to.
        std::mem::forget(value);
        None
    }
}

impl<T> Drop for ProcessOwned<T> {
    fn drop(&mut self) {
        drop(self.take());
    }
}
