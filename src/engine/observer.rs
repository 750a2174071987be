//! The observers of the driver's effects.
//!
//! Counters and traces begin anew with each process. Histories are saved with the state in snapshots, and the events after a
//! snapshot are replayed. Begin at [`Observer`].

use std::sync::Arc;

use crate::coordination::{BarrierRecordWithArrivals, JobEvent};

/// An observer of every effect, such as a counter. It is called under the engine's lock: it must be quick,
/// and must not block or call the engine.
pub trait Observer: Send + Sync {
    /// Receives an event.
    fn on_event(&self, event: &JobEvent);
    /// Receives an ended barrier.
    fn on_barrier_ended(&self, ending: &Arc<BarrierRecordWithArrivals>);
}

/// A function that serialises contents that have been copied before.
pub type ContentsSerialiser = Box<dyn FnOnce() -> Vec<u8> + Send>;

/// An observer whose contents are saved with the state of the jobs: the events that led to a saved state are not
/// emitted again after it is restored.
pub trait PersistentObserver: Observer {
    /// Returns the name under which the contents are stored. It differs from the names of all other observers, and must
    /// not change.
    fn name(&self) -> &'static str;

    /// Copies the contents, and returns a function that serialises the copy. The same contents give the same bytes.
    ///
    /// The engine's lock is held for the copy, so that it fits the state. The copy must cost little more than a pointer
    /// for each record. The returned function needs no lock, and may take long.
    fn copy_contents(&self) -> ContentsSerialiser;

    /// Returns the contents as bytes. A caller that holds the engine's lock should use
    /// [`PersistentObserver::copy_contents`], because serialising takes much longer than copying.
    fn save(&self) -> Vec<u8> {
        self.copy_contents()()
    }

    /// Adds contents that [`Engine::record_note`](super::Engine::record_note) has recorded.
    ///
    /// # Errors
    /// If the bytes are not such contents.
    fn restore_note(&self, _bytes: &[u8]) -> Result<(), String> {
        Ok(())
    }

    /// Replaces all contents by saved ones. The bytes may be damaged: contents that exceed the bounds of this observer
    /// are refused.
    ///
    /// # Errors
    /// If the bytes are not saved contents of this observer; its contents have not changed then.
    fn restore(&self, bytes: &[u8]) -> Result<(), String>;
}
