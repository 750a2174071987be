//! A table that never assigns a key twice. A look-up with the key of a removed value finds nothing.
//!
//! Begin at [`SlotTable::insert`].

struct SlotEntry<T> {
    generation: u32,
    content: Option<T>,
}

/// A table that assigns each value a number. No number is used twice: the number of a removed value finds
/// nothing, even if another value is in the same cell.
pub(super) struct SlotTable<T> {
    cells: Vec<SlotEntry<T>>,
    free: Vec<u32>,
    /// The generation of new cells; all earlier cells had lower ones.
    first_generation: u32,
}

/// The number of cells that an empty table keeps at most.
const CELLS_KEPT: usize = 256;

impl<T> Default for SlotTable<T> {
    fn default() -> Self {
        Self { cells: Vec::new(), free: Vec::new(), first_generation: 0 }
    }
}

fn slot_key(generation: u32, place: u32) -> u64 {
    u64::from(generation) << 32 | u64::from(place)
}

fn slot_index(key: u64) -> usize {
    (key & u64::from(u32::MAX)) as usize
}

impl<T> SlotTable<T> {
    /// Returns the key of the next insertion.
    pub(super) fn next_key(&self) -> u64 {
        match self.free.last() {
            Some(&at) => slot_key(self.cells.get(at as usize).map_or(0, |cell| cell.generation), at),
            None => slot_key(self.first_generation, u32::try_from(self.cells.len()).unwrap_or(u32::MAX)),
        }
    }

    /// Inserts `content` and returns its key.
    pub(super) fn insert(&mut self, content: T) -> u64 {
        let next = self.next_key();
        match self.free.pop() {
            Some(at) => {
                if let Some(cell) = self.cells.get_mut(at as usize) {
                    cell.content = Some(content);
                }
            }
            None => self.cells.push(SlotEntry { generation: self.first_generation, content: Some(content) }),
        }
        next
    }

    fn entry_mut(&mut self, key: u64) -> Option<&mut SlotEntry<T>> {
        let cell = self.cells.get_mut(slot_index(key))?;
        (u64::from(cell.generation) == key >> 32).then_some(cell)
    }

    /// Returns the value under `key`.
    pub(super) fn get_mut(&mut self, key: u64) -> Option<&mut T> {
        self.entry_mut(key)?.content.as_mut()
    }

    /// Removes and returns the value under `key`.
    pub(super) fn remove(&mut self, key: u64) -> Option<T> {
        let cell = self.entry_mut(key)?;
        let content = cell.content.take()?;
        cell.generation = cell.generation.wrapping_add(1);
        self.free.push(slot_index(key) as u32);
        if self.free.len() == self.cells.len() && self.cells.len() > CELLS_KEPT {
            self.release_all_cells();
        }
        Some(content)
    }

    /// Frees all cells; none has a value.
    fn release_all_cells(&mut self) {
        let newest = self.cells.iter().map(|cell| cell.generation.wrapping_sub(self.first_generation)).max();
        self.first_generation = self.first_generation.wrapping_add(newest.unwrap_or_default());
        (self.cells, self.free) = (Vec::new(), Vec::new());
    }

    /// Returns the number of values.
    pub(super) fn len(&self) -> usize {
        self.cells.len() - self.free.len()
    }

    /// Returns all values.
    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.cells.iter_mut().filter_map(|cell| cell.content.as_mut())
    }

    /// Returns all values.
    pub(super) fn iter(&self) -> impl Iterator<Item = &T> {
        self.cells.iter().filter_map(|cell| cell.content.as_ref())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_good_once() {
        let mut slots = SlotTable::default();
        let first = slots.next_key();
        assert_eq!(slots.insert("a"), first);
        let second = slots.insert("b");
        assert_eq!(slots.remove(first), Some("a"));
        assert_eq!(slots.remove(first), None);

        let third = slots.next_key();
        assert_eq!(slots.insert("c"), third);
        assert_ne!(third, first);
        assert_eq!(slots.get_mut(first), None);
        assert_eq!(slots.get_mut(third), Some(&mut "c"));
        assert_eq!(slots.get_mut(second), Some(&mut "b"));
        assert_eq!(slots.len(), 2);
        assert_eq!(slots.iter().copied().collect::<Vec<_>>(), ["c", "b"]);
    }

    #[test]
    fn a_table_that_becomes_empty_gives_its_memory_back_and_its_keys_stay_good_once() {
        let mut slots = SlotTable::default();
        let mut seen = std::collections::HashSet::new();
        for round in 0..3 {
            let keys: Vec<u64> = (0..2 * CELLS_KEPT).map(|n| slots.insert(n)).collect();
            assert!(keys.iter().all(|key| seen.insert(*key)), "round {round}");
            for key in &keys {
                assert!(slots.remove(*key).is_some());
            }
            assert_eq!((slots.len(), slots.cells.capacity(), slots.free.capacity()), (0, 0, 0));
            assert!(seen.iter().all(|key| slots.get_mut(*key).is_none()));
        }
    }
}
