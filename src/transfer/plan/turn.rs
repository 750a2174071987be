//! The number of a choice, and the holder whose turn it means.
//!
//! `turns.rs` counts the choices. Begin at [`Turn::among`].

use super::tiles::number;

/// The number of a choice.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Turn {
    pub(super) number: u32,
    /// Whose turn it is first.
    pub(super) from: u32,
}

impl Turn {
    /// Returns the first choice of a region of a tile on one host or in one task, if each makes so many. Which of them
    /// have to do with the host is not known; the first is another one for each tile, so that none is preferred by all.
    pub fn of(tile: u32, region: u32, each: usize) -> Self {
        Self { number: region * number(each), from: tile }
    }

    /// Returns the choice so many behind this one.
    pub fn then(self, choices: usize) -> Self {
        Self { number: self.number + number(choices), ..self }
    }

    /// Whose turn it is among so many, and the number of the choice among what that one has.
    pub fn among(self, many: usize) -> (usize, Self) {
        if many == 1 {
            return (0, self);
        }
        let many = number(many);
        let (mut next, mut rest) = (self.from, self.number);
        // Most often there are two, four or eight, and dividing costs ten times as much as this.
        if many.is_power_of_two() {
            while rest > 0 {
                (next, rest) = (next + (rest & (many - 1)), rest >> many.trailing_zeros());
            }
        } else {
            while rest > 0 {
                (next, rest) = (next + rest % many, rest / many);
            }
        }
        ((next % many) as usize, Self { number: self.number / many, ..self })
    }
}
