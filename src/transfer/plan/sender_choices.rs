//! Chooses the sender of a region that several devices hold.
//!
//! This module keeps no record of which device has sent what. Instead, it numbers the choices of senders. The numbers
//! run through the regions of a tile in order, and then through the next tile that the same hosts hold. If `n` hosts
//! hold a tile, the number of the choice is written in base `n`, and the sum of its digits modulo `n` selects the
//! host. So all hosts send equally many regions. Within one round, the numbers of successive choices differ by a
//! constant. Because the digits are summed, these choices select different hosts too. In the same way, the choices of
//! a host rotate through its tasks, and the choices of a task through its devices.
//!
//! If a receiving host holds a region already, no sender is chosen for that host. Such regions are counted beforehand
//! for each tile, unless there are too many, and the numbers of later choices are reduced by the count. So no holder
//! is skipped because of them. Begin at [`SenderChoices::of`].

use std::ops::Range;

use super::holders::{DeviceTable, TileHolders};
use super::region_order::RegionOrder;
use super::round_robin::RoundRobinIndex;
use super::tiles::saturating_u32;

/// The most pairs of a held and a wanted tile of one host that are examined for each device. There are more
/// only if hosts have more devices than this; then so many regions are on the right host already that few are
/// sent from elsewhere.
const LOOKED_AT: usize = 64;

/// The choices of a source tile.
#[derive(Debug, Clone, Default)]
struct ChoiceNumbers {
    first: RoundRobinIndex,
    /// The number of choices that each region makes.
    each: u32,
    /// The range of `SenderChoices::fewer` with the regions that make fewer.
    fewer: Range<u32>,
}

/// The choices of all regions.
#[derive(Debug, Clone, Default)]
pub(super) struct SenderChoices {
    /// The choices of each source tile; empty if no region has a choice.
    tiles: Vec<ChoiceNumbers>,
    /// The regions of a tile that a host which needs them holds already: the region's index in the tile, and
    /// the number of choices saved up to and including it.
    fewer: Vec<(u32, u32)>,
}

impl SenderChoices {
    /// Numbers all choices.
    pub fn of(
        device_table: &DeviceTable,
        region_order: &RegionOrder,
        holders: &TileHolders,
        receivers: &TileHolders,
        fan_out: u32,
    ) -> Self {
        let mut choices = Self::default();
        if region_order.region_count() == 0 || holders.is_unreplicated() {
            return choices;
        }
        let mut on_host = vec![Vec::new(); device_table.host_names.len()];
        let mut most = 0;
        for wanted in 0..receivers.tile_count() {
            let spans = receivers.hosts_holding_tile(wanted);
            most = most.max(spans.len());
            spans.iter().for_each(|span| on_host[span.host as usize].push(wanted));
        }
        let pairs = (0..holders.tile_count()).flat_map(|tile| holders.hosts_holding_tile(tile));
        let pairs: usize = pairs.map(|span| on_host[span.host as usize].len()).sum();
        let are_few = pairs <= LOOKED_AT * device_table.ids.len();
        choices.tiles = vec![ChoiceNumbers::default(); holders.tile_count() as usize];
        let mut turn = RoundRobinIndex::default();
        let (mut before, mut found) = (None, Vec::new());
        for tile in holders.tiles_sorted_by_holders() {
            let spans = holders.hosts_holding_tile(tile);
            if before.is_none_or(|before| holders.hosts(before).ne(holders.hosts(tile))) {
                turn = RoundRobinIndex { number: 0, from: turn.from + turn.number };
            }
            before = Some(tile);
            found.clear();
            if are_few && spans.len() > 1 {
                let near = spans.iter().flat_map(|span| &on_host[span.host as usize]);
                found.extend(
                    near.filter_map(|&wanted| {
                        Some((region_order.index_in_source_tile(tile, wanted)?, wanted))
                    }),
                );
                found.sort_unstable();
            }
            let each = saturating_u32(most.min(spans.len().saturating_mul(fan_out as usize)));
            let begin = saturating_u32(choices.fewer.len());
            let mut fewer = 0;
            for near in found.chunk_by(|one, other| one == other) {
                let (ordinal, wanted) = near[0];
                fewer +=
                    each - each.min(saturating_u32(receivers.hosts_holding_tile(wanted).len() - near.len()));
                choices.fewer.push((ordinal, fewer));
            }
            choices.tiles[tile as usize] =
                ChoiceNumbers { first: turn, each, fewer: begin..saturating_u32(choices.fewer.len()) };
            // The sum is at most the number of steps.
            turn.number += region_order.source_region_count(tile) * each - fewer;
        }
        choices
    }

    /// Returns whether no region has a choice.
    pub fn has_no_alternatives(&self) -> bool {
        self.tiles.is_empty()
    }

    /// Returns the first choice among hosts of the region with index `ordinal` of a source tile.
    pub fn first_choice(&self, held: u32, ordinal: u32) -> RoundRobinIndex {
        let Some(ChoiceNumbers { first, each, fewer }) = self.tiles.get(held as usize) else {
            return RoundRobinIndex::default();
        };
        let fewer = &self.fewer[fewer.start as usize..fewer.end as usize];
        let before = fewer.partition_point(|(region, _)| *region < ordinal);
        let less = if before == 0 { 0 } else { fewer[before - 1].1 };
        RoundRobinIndex { number: first.number + ordinal * each - less, ..*first }
    }
}
