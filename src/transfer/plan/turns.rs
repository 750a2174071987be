//! Chooses the sender of a region that several devices hold.
//!
//! It does not record which device sent what before. Instead all choices of all regions are numbered: those
//! of tiles that the same hosts hold one after the other, and those of each tile in the order of its regions.
//! `n` hosts take them in turns of `n`, and the first host advances with every turn, and once more with every
//! `n` turns, and so on: the sum of the digits of the choice's number, in base `n`, is the host. So all hosts
//! send equally many regions, and choices at equal distances, as those of a round are, fall to different
//! hosts too. The choices of a host rotate through its tasks in the same way, and those of a task through its
//! devices.
//!
//! A region makes no choice for a host that holds it already. So that no holder is skipped for that, such
//! regions are found beforehand, host by host, and the later choices have numbers that are smaller by the
//! choices not made. Begin at [`Turns::of`].

use std::ops::Range;

use super::holders::{Holders, Parties};
use super::rounds::Rounds;
use super::tiles::number;
use super::turn::Turn;

/// The most pairs of a held and a wanted tile of one host that are examined for each device. There are more
/// only if hosts have more devices than this; then so many regions are on the right host already that few are
/// sent from elsewhere.
const LOOKED_AT: usize = 64;

/// The choices of a source tile.
#[derive(Debug, Clone, Default)]
struct Choices {
    first: Turn,
    /// The number of choices that each region makes.
    each: u32,
    /// The range of `Turns::fewer` with the regions that make fewer.
    fewer: Range<u32>,
}

/// The choices of all regions.
#[derive(Debug, Clone, Default)]
pub(super) struct Turns {
    /// The choices of each source tile; empty if no region has a choice.
    tiles: Vec<Choices>,
    /// The regions of a tile that a host which needs them holds already: the region's index in the tile, and
    /// the number of choices saved up to and including it.
    fewer: Vec<(u32, u32)>,
}

impl Turns {
    /// Numbers all choices.
    pub fn of(
        parties: &Parties,
        rounds: &Rounds,
        holders: &Holders,
        receivers: &Holders,
        fan_out: u32,
    ) -> Self {
        let mut turns = Self::default();
        if rounds.regions() == 0 || holders.are_single() {
            return turns;
        }
        let mut on_host = vec![Vec::new(); parties.host_names.len()];
        let mut most = 0;
        for wanted in 0..receivers.tiles() {
            let spans = receivers.spans(wanted);
            most = most.max(spans.len());
            spans.iter().for_each(|span| on_host[span.host as usize].push(wanted));
        }
        let pairs = (0..holders.tiles()).flat_map(|tile| holders.spans(tile));
        let pairs: usize = pairs.map(|span| on_host[span.host as usize].len()).sum();
        let are_few = pairs <= LOOKED_AT * parties.ids.len();
        turns.tiles = vec![Choices::default(); holders.tiles() as usize];
        let mut turn = Turn::default();
        let (mut before, mut found) = (None, Vec::new());
        for tile in holders.alike() {
            let spans = holders.spans(tile);
            if before.is_none_or(|before| holders.hosts(before).ne(holders.hosts(tile))) {
                turn = Turn { number: 0, from: turn.from + turn.number };
            }
            before = Some(tile);
            found.clear();
            if are_few && spans.len() > 1 {
                let near = spans.iter().flat_map(|span| &on_host[span.host as usize]);
                found.extend(near.filter_map(|&wanted| Some((rounds.find(tile, wanted)?, wanted))));
                found.sort_unstable();
            }
            let each = number(most.min(spans.len().saturating_mul(fan_out as usize)));
            let begin = number(turns.fewer.len());
            let mut fewer = 0;
            for near in found.chunk_by(|one, other| one == other) {
                let (ordinal, wanted) = near[0];
                fewer += each - each.min(number(receivers.spans(wanted).len() - near.len()));
                turns.fewer.push((ordinal, fewer));
            }
            turns.tiles[tile as usize] =
                Choices { first: turn, each, fewer: begin..number(turns.fewer.len()) };
            // The sum is at most the number of steps.
            turn.number += rounds.count_held(tile) * each - fewer;
        }
        turns
    }

    /// Returns whether no region has a choice.
    pub fn are_none(&self) -> bool {
        self.tiles.is_empty()
    }

    /// Returns the first choice among hosts of the region with index `ordinal` of a source tile.
    pub fn anywhere(&self, held: u32, ordinal: u32) -> Turn {
        let Some(Choices { first, each, fewer }) = self.tiles.get(held as usize) else {
            return Turn::default();
        };
        let fewer = &self.fewer[fewer.start as usize..fewer.end as usize];
        let before = fewer.partition_point(|(region, _)| *region < ordinal);
        let less = if before == 0 { 0 } else { fewer[before - 1].1 };
        Turn { number: first.number + ordinal * each - less, ..*first }
    }
}
