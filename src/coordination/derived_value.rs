//! A value that follows from a state and is computed when it is first needed.
//!
//! Begin at [`DerivedValue`].

use std::sync::{Arc, OnceLock};

/// A value that follows from the state that contains it. Copies of the state share it, so that it is computed once however often the
/// state is copied. Code that changes the state, and thereby the value, replaces the `DerivedValue`.
#[derive(Debug, Clone)]
pub(super) struct DerivedValue<T>(Arc<OnceLock<T>>);

impl<T: Clone> DerivedValue<T> {
    /// Returns the value. `compute` is called if it is not known.
    pub fn get_or_compute(&self, compute: impl FnOnce() -> T) -> T {
        self.0.get_or_init(compute).clone()
    }
}

impl<T> Default for DerivedValue<T> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

/// A derived value makes no difference between states.
impl<T> PartialEq for DerivedValue<T> {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl<T> Eq for DerivedValue<T> {}
