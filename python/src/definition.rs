//! Events that complete when arrays of JAX are defined, without a thread that waits for them.
//!
//! JAX does not call back when an array is defined, so a small computation takes the place of a callback. Its inputs
//! are the array and a *token*: memory that this module lends to JAX. JAX deletes the token when the computation is
//! over. At that moment the array is defined or has failed. `muster/jax/_arrays.py` dispatches the computations, and
//! asks JAX for failures. Begin at [`DefinitionEvent`].

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};

use muster::transfer::{BufferDefinitionEvent, BufferDefinitionPromise};
use pyo3::prelude::*;
use tokio::sync::watch;

use super::dlpack::{CPU, MemoryToLend, lend_memory};
use super::errors::new_exception;
use super::wait::{parse_timeout_seconds, wait};

/// The memory of all tokens. Nobody writes it, so they share it. JAX uses memory without a copy if it is aligned so.
#[repr(align(64))]
struct TokenMemory([u8; TOKEN_BYTES as usize]);

const TOKEN_BYTES: u64 = 64;
static TOKEN: TokenMemory = TokenMemory([0; TOKEN_BYTES as usize]);

type DefinitionOutcome = Result<(), String>;

/// Completes the event when it is dropped: when all tokens have been given back.
struct CompleteOnDrop(Mutex<Option<BufferDefinitionPromise>>);

impl CompleteOnDrop {
    fn take_promise(&self) -> Option<BufferDefinitionPromise> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl Drop for CompleteOnDrop {
    fn drop(&mut self) {
        if let Some(promise) = self.take_promise() {
            promise.complete();
        }
    }
}

/// An event that completes when all its tokens have been given back.
#[pyclass(frozen, module = "muster._native")]
pub struct DefinitionEvent {
    event: BufferDefinitionEvent,
    completion: Mutex<Option<Arc<CompleteOnDrop>>>,
    outcome: watch::Receiver<Option<DefinitionOutcome>>,
}

impl DefinitionEvent {
    /// Returns the event of the transfer engine. It completes also if the computation has failed.
    pub fn event(&self) -> BufferDefinitionEvent {
        self.event.clone()
    }

    fn take_completion(&self) -> Option<Arc<CompleteOnDrop>> {
        self.completion.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

#[pymethods]
impl DefinitionEvent {
    #[new]
    fn new() -> Self {
        let (promise, event) = BufferDefinitionEvent::new();
        let (tell, outcome) = watch::channel(None);
        event.add_outcome_listener(move |outcome| _ = tell.send(Some(outcome)));
        let completion = Arc::new(CompleteOnDrop(Mutex::new(Some(promise))));
        Self { event, completion: Mutex::new(Some(completion)), outcome }
    }

    /// Returns a token for a computation on a CPU device of this process.
    #[pyo3(name = "token")]
    fn lend_token(&self, py: Python<'_>, device: i32) -> PyResult<Token> {
        let completion = self.completion.lock().unwrap_or_else(PoisonError::into_inner).clone();
        match completion {
            Some(completion) => Ok(Token { completion, device }),
            None => Err(new_exception(py, "MusterError", "the event has all its tokens already", &[])),
        }
    }

    /// Says that there are no more tokens: from now on it completes when all have been given back.
    #[pyo3(name = "arm")]
    fn forbid_more_tokens(&self) {
        drop(self.take_completion());
    }

    /// Fails the event.
    fn fail(&self, reason: &str) {
        if let Some(promise) = self.take_completion().and_then(|completion| completion.take_promise()) {
            promise.fail(reason);
        }
    }

    /// Returns whether the event is over.
    #[pyo3(name = "done")]
    fn is_over(&self) -> bool {
        self.event.outcome().is_some()
    }

    /// Waits until the event is over. Returns why it failed, if it did.
    #[pyo3(name = "wait")]
    fn wait_for_outcome(&self, py: Python<'_>, timeout: f64) -> PyResult<Option<String>> {
        let limit = parse_timeout_seconds(py, "timeout", timeout)?;
        if let Some(outcome) = self.event.outcome() {
            return Ok(outcome.err());
        }
        let mut outcome = self.outcome.clone();
        let over = wait(py, async move {
            let over = outcome.wait_for(Option::is_some);
            tokio::time::timeout(limit, over).await.is_ok_and(|over| over.is_ok())
        })?;
        match self.event.outcome() {
            Some(outcome) if over => Ok(outcome.err()),
            _ => {
                let text =
                    format!("the array was not defined within {timeout} s; a longer timeout waits longer");
                Err(new_exception(py, "Deadline", &text, &[]))
            }
        }
    }
}

/// The numbers of events that are over, which a thread takes in the order in which they were put in.
#[pyclass(frozen, module = "muster._native")]
pub struct EventQueue {
    put: Sender<u64>,
    next: Mutex<Receiver<u64>>,
}

#[pymethods]
impl EventQueue {
    #[new]
    fn new() -> Self {
        let (put, next) = channel();
        Self { put, next: Mutex::new(next) }
    }

    /// Puts a number in.
    fn put(&self, number: u64) {
        // The queue itself has the receiver.
        let _ = self.put.send(number);
    }

    /// Puts a number in when the event is over, or now if it is.
    fn put_when_over(&self, event: &DefinitionEvent, number: u64) {
        let put = self.put.clone();
        event.event.add_outcome_listener(move |_| _ = put.send(number));
    }

    /// Takes the next number; waits for it without the GIL, however long that takes. A signal does not end the wait, so the
    /// thread is not the main one.
    fn next(&self, py: Python<'_>) -> PyResult<u64> {
        let next = py.detach(|| self.next.lock().unwrap_or_else(PoisonError::into_inner).recv());
        // The queue itself has a sender.
        next.map_err(|_| new_exception(py, "MusterError", "the queue is gone", &[]))
    }
}

/// A token: 64 bytes that are lent to JAX.
#[pyclass(frozen, module = "muster._native")]
pub struct Token {
    completion: Arc<CompleteOnDrop>,
    device: i32,
}

#[pymethods]
impl Token {
    fn __dlpack_device__(&self) -> (i32, i32) {
        (CPU, self.device)
    }

    #[pyo3(signature = (*, stream = None, max_version = None, dl_device = None, copy = None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<Py<PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let _ = (stream, dl_device, copy);
        let loan = MemoryToLend {
            address: TOKEN.0.as_ptr().cast_mut(),
            shape: &[TOKEN_BYTES],
            dtype: muster::transfer::plan::Dtype::Uint8,
            device: self.device,
            owner: Box::new(Arc::clone(&self.completion)),
        };
        lend_memory(py, loan, max_version)
    }
}

/// Returns whether an array is defined, or has failed; `None` if it was deleted.
///
/// Some releases of JAX end the process when a deleted array is asked. No Python runs between the two questions, so no other
/// thread deletes it in between.
#[pyfunction]
pub fn is_ready(array: &Bound<'_, PyAny>) -> PyResult<Option<bool>> {
    if array.call_method0("is_deleted")?.is_truthy()? {
        return Ok(None);
    }
    array.call_method0("is_ready")?.is_truthy().map(Some)
}
