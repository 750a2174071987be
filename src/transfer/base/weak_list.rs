//! A list of values that end by themselves. Begin at [`WeakList`].

use std::sync::{Arc, Weak};

/// The number of entries below which none is removed.
const FEW: usize = 16;

/// Weak references to values. Those of values that are gone are removed before the list exceeds twice the live ones.
pub struct WeakList<T: ?Sized> {
    all: Vec<Weak<T>>,
    /// The number of those that lived when those that were gone were last removed.
    lived: usize,
}

impl<T: ?Sized> Default for WeakList<T> {
    fn default() -> Self {
        Self { all: Vec::new(), lived: 0 }
    }
}

impl<T: ?Sized> WeakList<T> {
    /// Adds a value.
    pub fn add(&mut self, value: Weak<T>) {
        if self.all.len() >= FEW.max(2 * self.lived) {
            self.all.retain(|value| value.strong_count() > 0);
            self.lived = self.all.len();
        }
        self.all.push(value);
    }

    /// Returns the values that live.
    pub fn upgrade_all(&self) -> Vec<Arc<T>> {
        self.all.iter().filter_map(Weak::upgrade).collect()
    }

    /// Returns the number of entries, of which some may be of values that are gone.
    #[cfg(test)]
    pub const fn len(&self) -> usize {
        self.all.len()
    }
}
