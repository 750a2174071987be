//! Chooses which of several holders of a region sends it. The holders take turns.
//!
//! `sender_choices.rs` gives each choice a number, which decides whose turn it is. Begin at
//! [`RoundRobinIndex::choose`].

use super::tiles::saturating_u32;

/// The number of a choice among several holders.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct RoundRobinIndex {
    pub(super) number: u32,
    /// The holder with which the numbering begins.
    pub(super) from: u32,
}

impl RoundRobinIndex {
    /// Returns the first choice of a region of a tile on one host or in one task, if each region makes `each`
    /// choices. Which regions concern the host is not known; the numbering begins at another holder for each
    /// tile, so that not all tiles prefer the same one.
    pub fn first_choice_of_region(tile: u32, region: u32, each: usize) -> Self {
        Self { number: region * saturating_u32(each), from: tile }
    }

    /// Returns the choice that is `choices` later.
    pub fn advanced_by(self, choices: usize) -> Self {
        Self { number: self.number + saturating_u32(choices), ..self }
    }

    /// Returns the index of the chosen one among `many`, and the number of the choice among those of that
    /// one.
    pub fn choose(self, many: usize) -> (usize, Self) {
        if many == 1 {
            return (0, self);
        }
        let many = saturating_u32(many);
        let (mut next, mut rest) = (self.from, self.number);
        // The count is most often a power of two, and a division costs ten times as much as a shift.
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
