//! Buffer definition events, for which a launch may wait. A completed event says that a buffer is *defined*: its
//! bytes may be sent, or the buffer may be received into.
//!
//! An event refers to no buffer. The holder of its [`BufferDefinitionPromise`] completes the event, or fails it with
//! a reason. Begin at [`BufferDefinitionEvent::new`].

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};

use muster_gpu::{Gpu, GpuError, GpuEvent};

use crate::base::sync::lock;

type DefinitionOutcome = Result<(), String>;
type DefinitionOutcomeListener = Box<dyn FnOnce(DefinitionOutcome) + Send>;

enum DefinitionState {
    Pending(Vec<DefinitionOutcomeListener>),
    Over(DefinitionOutcome),
}

/// An event that completes when a buffer is defined: its bytes may be sent, or the buffer may be received
/// into. Clones are the same event.
#[derive(Clone)]
pub struct BufferDefinitionEvent(Arc<Mutex<DefinitionState>>);

/// The handle that completes a [`BufferDefinitionEvent`]. If it is dropped before it completes the event, the event
/// fails, so that no waiter waits for ever.
#[derive(Debug)]
pub struct BufferDefinitionPromise(BufferDefinitionEvent);

impl fmt::Debug for BufferDefinitionEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Event").field(&self.outcome()).finish()
    }
}

impl BufferDefinitionEvent {
    /// Creates a pending event and the handle that completes it.
    #[must_use]
    pub fn new() -> (BufferDefinitionPromise, Self) {
        let event = Self(Arc::new(Mutex::new(DefinitionState::Pending(Vec::new()))));
        (BufferDefinitionPromise(event.clone()), event)
    }

    /// Creates an event that completes once the work before the latest record of an event of a GPU is done. A program
    /// records the event on the stream that fills the buffer, or reads it for the last time, and goes on.
    #[must_use]
    pub fn of_gpu_event(gpu: &Gpu, event: GpuEvent) -> Self {
        let (promise, defined) = Self::new();
        let ordinal = gpu.ordinal();
        let end = move |outcome: Result<(), GpuError>| match outcome {
            Ok(()) => promise.complete(),
            Err(error) => promise.fail(format!("GPU {ordinal}: {error}")),
        };
        match gpu.call_when_happened(event, end) {
            Ok(()) => defined,
            Err(error) => {
                let (promise, failed) = Self::new();
                promise.fail(format!("GPU {ordinal}: {error}"));
                failed
            }
        }
    }

    fn lock_state(&self) -> MutexGuard<'_, DefinitionState> {
        lock(&self.0)
    }

    /// Returns the outcome, or none while the event is pending. An error says why the buffer will never be
    /// defined.
    #[must_use]
    pub fn outcome(&self) -> Option<Result<(), String>> {
        match &*self.lock_state() {
            DefinitionState::Pending(_) => None,
            DefinitionState::Over(outcome) => Some(outcome.clone()),
        }
    }

    /// Calls `listener` with the outcome: at once if the event is over, else on the thread that ends it. That may be
    /// any thread, so the listener must not wait. A listener is kept until the event is over.
    pub fn add_outcome_listener(&self, listener: impl FnOnce(DefinitionOutcome) + Send + 'static) {
        let mut state = self.lock_state();
        let outcome = match &mut *state {
            DefinitionState::Pending(listeners) => {
                listeners.push(Box::new(listener));
                return;
            }
            DefinitionState::Over(outcome) => outcome.clone(),
        };
        drop(state);
        listener(outcome);
    }

    fn end_with_outcome(&self, outcome: DefinitionOutcome) {
        let mut state = self.lock_state();
        let DefinitionState::Pending(listeners) = &mut *state else { return };
        let listeners = std::mem::take(listeners);
        *state = DefinitionState::Over(outcome.clone());
        drop(state);
        for listener in listeners {
            listener(outcome.clone());
        }
    }
}

impl BufferDefinitionPromise {
    /// Completes the event: the buffer is defined.
    pub fn complete(self) {
        self.0.end_with_outcome(Ok(()));
    }

    /// Fails the event: the buffer will never be defined.
    pub fn fail(self, why: impl Into<String>) {
        self.0.end_with_outcome(Err(why.into()));
    }
}

impl Drop for BufferDefinitionPromise {
    fn drop(&mut self) {
        self.0.end_with_outcome(Err("what was to define the buffer is gone".to_owned()));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn listeners_are_told_once_whenever_they_come() {
        let (definer, event) = BufferDefinitionEvent::new();
        let (tell, told) = channel();
        let late = tell.clone();
        event.add_outcome_listener(move |outcome| tell.send(outcome).unwrap());
        assert!(told.try_recv().is_err() && event.outcome().is_none());
        definer.complete();
        assert_eq!(told.try_recv(), Ok(Ok(())));
        event.add_outcome_listener(move |outcome| late.send(outcome).unwrap());
        assert_eq!(told.try_recv(), Ok(Ok(())));
        assert!(told.try_recv().is_err());
    }

    #[test]
    fn a_definer_that_is_dropped_fails_its_event() {
        let (definer, event) = BufferDefinitionEvent::new();
        drop(definer);
        assert!(event.outcome().is_some_and(|outcome| outcome.is_err()));
        let (definer, event) = BufferDefinitionEvent::new();
        definer.fail("the step was skipped");
        assert_eq!(event.outcome(), Some(Err("the step was skipped".to_owned())));
    }
}
