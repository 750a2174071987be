//! Which parts of the kept memory are in use. An *area* has a power of two of bytes, and begins at a multiple of its length.
//! Begin at [`AreaTable::allocate`].
//!
//! The table is in the core's own memory. The next core makes it again from the areas that the logs of connections name.

/// The length of the smallest area.
pub(crate) const SMALLEST: u64 = 512;
/// The number of lengths: the largest area has 64 MiB.
const CLASSES: usize = 18;

/// A part of the kept memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Area {
    /// Its offset, in units of [`SMALLEST`] bytes.
    pub block: u32,
    /// Its length is [`SMALLEST`] times two to this power.
    pub class: u8,
}

impl Area {
    /// Returns whether there are areas of this length.
    pub(crate) fn is_valid(self) -> bool {
        usize::from(self.class) < CLASSES && self.block.is_multiple_of(1 << self.class)
    }

    /// Returns its length in bytes.
    pub(crate) fn bytes(self) -> u64 {
        SMALLEST << self.class
    }

    /// Returns the offset of its first byte among all areas.
    pub(crate) fn offset(self) -> u64 {
        u64::from(self.block) * SMALLEST
    }

    /// Returns the block after its last one.
    pub(crate) fn end_block(self) -> u32 {
        self.block + self.blocks()
    }

    fn blocks(self) -> u32 {
        1 << self.class
    }
}

/// The free areas.
#[derive(Debug)]
pub(crate) struct AreaTable {
    free: [Vec<u32>; CLASSES],
    /// The blocks from here on were never used.
    end: u32,
    used_bytes: u64,
    most_bytes: u64,
}

impl AreaTable {
    /// Returns a table in which the areas `used` are taken, and at most `most_bytes` may be.
    pub(crate) fn new(mut used: Vec<Area>, most_bytes: u64) -> Self {
        used.sort_unstable_by_key(|area| area.block);
        let mut table = Self { free: Default::default(), end: 0, used_bytes: 0, most_bytes };
        for area in used {
            table.free_blocks(table.end, area.block);
            table.end = area.block + area.blocks();
            table.used_bytes += area.bytes();
        }
        table
    }

    /// Returns the bytes of all areas in use.
    pub(crate) fn used_bytes(&self) -> u64 {
        self.used_bytes
    }

    /// Takes an area of at least `bytes`; `None` if there is no room for it.
    pub(crate) fn allocate(&mut self, bytes: usize) -> Option<Area> {
        let units = (bytes as u64).div_ceil(SMALLEST).next_power_of_two();
        let class = usize::try_from(units.trailing_zeros()).ok().filter(|class| *class < CLASSES)?;
        let length = SMALLEST << class;
        if self.used_bytes + length > self.most_bytes {
            return None;
        }
        let block = self.take_free(class).or_else(|| self.extend(class)).or_else(|| {
            self.merge_free();
            self.take_free(class)
        })?;
        self.used_bytes += length;
        Some(Area { block, class: class as u8 })
    }

    /// Takes a free area, or the first part of a longer one.
    fn take_free(&mut self, class: usize) -> Option<u32> {
        let from = (class..CLASSES).find(|from| !self.free[*from].is_empty())?;
        let block = self.free[from].pop()?;
        for rest in class..from {
            self.free[rest].push(block + (1 << rest));
        }
        Some(block)
    }

    /// Takes an area that was never used.
    fn extend(&mut self, class: usize) -> Option<u32> {
        let block = self.end.checked_next_multiple_of(1 << class)?;
        let end = block.checked_add(1 << class)?;
        // Areas that are in use may be far apart, and the memory ends somewhere.
        if u64::from(end) * SMALLEST > 4 * self.most_bytes {
            return None;
        }
        self.free_blocks(self.end, block);
        self.end = end;
        Some(block)
    }

    /// Merges free areas that follow one another.
    fn merge_free(&mut self) {
        let of_class = |(class, blocks): (usize, &mut Vec<u32>)| {
            std::mem::take(blocks)
                .into_iter()
                .map(move |block| (block, block + (1 << class)))
                .collect::<Vec<_>>()
        };
        let mut free: Vec<(u32, u32)> = self.free.iter_mut().enumerate().flat_map(of_class).collect();
        free.sort_unstable();
        let mut parts = free.into_iter();
        let Some((mut from, mut to)) = parts.next() else { return };
        for (next_from, next_to) in parts {
            if next_from != to {
                self.free_blocks(from, to);
                from = next_from;
            }
            to = next_to;
        }
        self.free_blocks(from, to);
    }

    /// Gives an area back.
    pub(crate) fn release(&mut self, area: Area) {
        self.used_bytes -= area.bytes();
        self.free[usize::from(area.class)].push(area.block);
    }

    /// Marks the blocks between two as free.
    fn free_blocks(&mut self, mut from: u32, to: u32) {
        while from < to {
            let aligned = from.trailing_zeros().min(CLASSES as u32 - 1);
            let class = aligned.min((to - from).ilog2());
            self.free[class as usize].push(from);
            from += 1 << class;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn areas_never_overlap_and_are_all_found_again() {
        let mut random = fastrand::Rng::with_seed(7);
        let mut table = AreaTable::new(Vec::new(), 64 << 20);
        let mut used: BTreeMap<u32, Area> = BTreeMap::new();
        for round in 0..20_000 {
            if random.bool() || used.is_empty() {
                let most = 1 << random.u32(1..22);
                let bytes = random.usize(1..=most);
                if let Some(area) = table.allocate(bytes) {
                    assert!(area.bytes() >= bytes as u64 && area.block.is_multiple_of(area.blocks()));
                    let before = used.range(..=area.block).next_back();
                    assert!(before.is_none_or(|(_, before)| before.block + before.blocks() <= area.block));
                    let after = used.range(area.block..).next();
                    assert!(after.is_none_or(|(_, after)| area.block + area.blocks() <= after.block));
                    used.insert(area.block, area);
                }
            } else {
                let nth = random.usize(..used.len());
                let block = *used.keys().nth(nth).expect("it is there");
                table.release(used.remove(&block).expect("it is there"));
            }
            assert_eq!(table.used_bytes(), used.values().map(|area| area.bytes()).sum::<u64>());
            if round % 1000 == 0 {
                // Another process knows the areas in use alone.
                table = AreaTable::new(used.values().copied().collect(), 64 << 20);
            }
        }
    }

    #[test]
    fn short_areas_become_long_ones_again() {
        let mut table = AreaTable::new(Vec::new(), 1 << 20);
        for _ in 0..20 {
            let short: Vec<Area> = std::iter::from_fn(|| table.allocate(512)).collect();
            assert_eq!(short.len(), 2048);
            short.into_iter().for_each(|area| table.release(area));
            let long = table.allocate(1 << 20).expect("all is free");
            table.release(long);
        }
    }

    #[test]
    fn the_memory_has_an_end() {
        let mut table = AreaTable::new(Vec::new(), 1 << 20);
        let all: Vec<Area> = std::iter::from_fn(|| table.allocate(1000)).collect();
        assert_eq!(all.len(), 1024);
        assert_eq!(table.allocate(1), None);
        all.into_iter().for_each(|area| table.release(area));
        assert_eq!(table.used_bytes(), 0);
        assert!(table.allocate(1 << 27).is_none(), "no area is so long");
    }
}
