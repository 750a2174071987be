//! The order of the regions of a plan, computed by arithmetic.
//!
//! A *region* is the overlap of a tile of the source with a tile of the destination. Regions are ordered in rounds.
//! In each round, every destination tile that has regions left gets its next region. Neighbouring destination tiles
//! get regions of different source tiles in the same round. So a task that processes its steps in order does not send
//! to, or receive from, a device that all other tasks use at the same time. No region is stored. From the cuts of
//! each dimension, this module counts the regions of each tile. From these counts, it computes the region that has a
//! number, and the number of a region. `region_routing.rs` makes the steps of a region. Begin at
//! [`RegionOrder::region`].

use std::cmp::Reverse;

use super::tiles::{RegionBounds, TilePair, Tiling, saturating_u32};

/// The tiles of another tiling that overlap each tile of one.
#[derive(Debug, Clone)]
struct TileOverlap {
    dimensions: Vec<DimensionOverlap>,
    /// The number of overlapping tiles, for each tile.
    counts: Vec<u32>,
}

/// The overlap along one dimension.
#[derive(Debug, Clone)]
struct DimensionOverlap {
    /// For each place, the first overlapping place of the other tiling, and the number of overlapping places.
    places: Vec<(u32, u32)>,
    /// The number of places in each of the two tilings.
    own: u32,
    other: u32,
}

impl TileOverlap {
    /// Computes the overlap of two tilings of an array that has elements.
    fn of(tiling: &Tiling, other: &Tiling) -> Self {
        let mut counts = vec![1];
        let along = tiling.cuts.iter().zip(&other.cuts).map(|(mine, theirs)| {
            let places = (0..mine.count).map(|place| {
                let (first, last) = theirs.reaching(mine.interval(place));
                (first, last - first + 1)
            });
            let places: Vec<_> = places.collect();
            counts =
                counts.iter().flat_map(|outer| places.iter().map(move |(_, inner)| outer * inner)).collect();
            DimensionOverlap { places, own: mine.count, other: theirs.count }
        });
        Self { dimensions: along.collect(), counts }
    }

    fn overlap_count(&self, tile: u32) -> u32 {
        self.counts[tile as usize]
    }

    /// Returns the tile with this index, in row-major order, among those that overlap `tile`.
    fn nth_overlapping_tile(&self, mut tile: u32, mut ordinal: u32) -> u32 {
        let (mut found, mut apart) = (0, 1);
        for along in self.dimensions.iter().rev() {
            let (mut place, count) = along.places[(tile % along.own) as usize];
            tile /= along.own;
            if count > 1 {
                place += ordinal % count;
                ordinal /= count;
            }
            found += place * apart;
            apart *= along.other;
        }
        found
    }

    /// Returns the index of `reaching` among the tiles that overlap `tile`; `None` if it does not.
    fn ordinal(&self, mut tile: u32, mut reaching: u32) -> Option<u32> {
        let (mut ordinal, mut apart) = (0, 1);
        for along in self.dimensions.iter().rev() {
            let (first, count) = along.places[(tile % along.own) as usize];
            let place = (reaching % along.other).checked_sub(first).filter(|place| *place < count)?;
            ordinal += place * apart;
            apart *= count;
            (tile, reaching) = (tile / along.own, reaching / along.other);
        }
        Some(ordinal)
    }
}

/// Consecutive rounds in which equally many tiles get a region.
#[derive(Debug, Clone, Copy)]
struct EqualRounds {
    /// The first of these rounds.
    round: u32,
    /// The number of regions in earlier stages.
    regions: u32,
    /// The number of tiles that get a region in each of these rounds: the first ones in the order of tiles.
    tiles: u32,
}

/// The order of all regions.
#[derive(Debug, Clone)]
pub(super) struct RegionOrder {
    /// The source tiles that overlap each destination tile, and the reverse.
    sources: TileOverlap,
    destinations: TileOverlap,
    /// The destination tiles, those with the most regions first, and the position of each tile in that order.
    order: Vec<u32>,
    positions: Vec<u32>,
    stages: Vec<EqualRounds>,
    regions: u32,
}

impl RegionOrder {
    /// Returns the number of regions. It is at most the product of both numbers of tiles, so it cannot
    /// overflow.
    pub fn count(source: &Tiling, destination: &Tiling) -> u64 {
        if destination.has_no_elements() {
            return 0;
        }
        let along = destination.cuts.iter().zip(&source.cuts).map(|(wanted, held)| {
            let reaching = (0..wanted.count).map(|place| held.reaching(wanted.interval(place)));
            reaching.map(|(first, last)| u64::from(last - first + 1)).sum::<u64>()
        });
        along.product()
    }

    /// Numbers the regions of two tilings, after the caller has checked that they are not too many.
    pub fn of(source: &Tiling, destination: &Tiling) -> Self {
        let none = || TileOverlap { dimensions: Vec::new(), counts: Vec::new() };
        let (sources, destinations) = match destination.has_no_elements() {
            true => (none(), none()),
            false => (TileOverlap::of(destination, source), TileOverlap::of(source, destination)),
        };
        let mut order: Vec<u32> = (0..saturating_u32(sources.counts.len())).collect();
        order.sort_by_key(|&tile| Reverse(sources.overlap_count(tile)));
        let mut positions = vec![0; order.len()];
        for (position, &tile) in (0..).zip(&order) {
            positions[tile as usize] = position;
        }
        let (mut stages, mut round, mut regions, mut active) = (Vec::new(), 0, 0, order.len());
        while let Some(&last) = order[..active].last() {
            let tiles = saturating_u32(active);
            stages.push(EqualRounds { round, regions, tiles });
            let count = sources.overlap_count(last);
            regions += (count - round) * tiles;
            round = count;
            active = order[..active].partition_point(|&tile| sources.overlap_count(tile) > count);
        }
        Self { sources, destinations, order, positions, stages, regions }
    }

    /// Returns the number of regions.
    pub fn region_count(&self) -> u32 {
        self.regions
    }

    /// Returns the region with this number, which must exist.
    pub fn region(&self, region: u32) -> TilePair {
        let later = self.stages.partition_point(|stage| stage.regions <= region);
        let stage = self.stages[later - 1];
        let rest = region - stage.regions;
        let round = stage.round + rest / stage.tiles;
        let wanted = self.order[(rest % stage.tiles) as usize];
        let turn = wanted + round;
        let held = self.sources.nth_overlapping_tile(wanted, turn % self.sources.overlap_count(wanted));
        TilePair { held, wanted, turn }
    }

    /// Returns the number of the region that a destination tile gets in a round; it must get one.
    fn region_in_round(&self, wanted: u32, round: u32) -> u32 {
        let later = self.stages.partition_point(|stage| stage.round <= round);
        let stage = self.stages[later - 1];
        stage.regions + (round - stage.round) * stage.tiles + self.positions[wanted as usize]
    }

    /// Returns the numbers of all regions of a destination tile.
    pub fn regions_of_destination_tile(&self, wanted: u32) -> impl Iterator<Item = u32> {
        (0..self.sources.overlap_count(wanted)).map(move |round| self.region_in_round(wanted, round))
    }

    /// Returns the numbers of all regions of a source tile.
    pub fn regions_of_source_tile(&self, held: u32) -> impl Iterator<Item = u32> {
        (0..self.destinations.overlap_count(held)).filter_map(move |which| {
            let wanted = self.destinations.nth_overlapping_tile(held, which);
            let count = self.sources.overlap_count(wanted);
            let ordinal = self.sources.ordinal(wanted, held)?;
            Some(self.region_in_round(wanted, (ordinal + count - wanted % count) % count))
        })
    }

    /// Returns the number of regions of a source tile.
    pub fn source_region_count(&self, held: u32) -> u32 {
        self.destinations.overlap_count(held)
    }

    /// Returns the index of the region with a destination tile among the regions of a source tile, if they
    /// overlap.
    pub fn index_in_source_tile(&self, held: u32, wanted: u32) -> Option<u32> {
        self.destinations.ordinal(held, wanted)
    }

    /// Returns whether a region is the whole of both of its tiles.
    pub fn covers_both_tiles(&self, pair: TilePair) -> bool {
        self.sources.overlap_count(pair.wanted) == 1 && self.destinations.overlap_count(pair.held) == 1
    }

    /// Calls `visit` with every region and its bounds, by destination tile, which takes less work than by
    /// number.
    pub fn for_each_region(
        &self,
        source: &Tiling,
        destination: &Tiling,
        mut visit: impl FnMut(TilePair, &RegionBounds),
    ) {
        let dimensions = &self.sources.dimensions;
        let mut along = vec![0; dimensions.len()];
        let mut reaching = vec![(0, 0); dimensions.len()];
        let mut apart = vec![1; dimensions.len()];
        for dimension in (1..dimensions.len()).rev() {
            apart[dimension - 1] = apart[dimension] * dimensions[dimension].other;
        }
        let mut lies = RegionBounds::default();
        for wanted in 0..saturating_u32(self.order.len()) {
            let pair = TilePair { held: self.sources.nth_overlapping_tile(wanted, 0), wanted, turn: wanted };
            lies.set_pair(source, destination, pair);
            let mut rest = wanted;
            for (reaching, along) in reaching.iter_mut().zip(dimensions).rev() {
                *reaching = along.places[(rest % along.own) as usize];
                rest /= along.own;
            }
            along.fill(0);
            let mut held = pair.held;
            let count = self.sources.overlap_count(wanted);
            let mut round = (count - wanted % count) % count;
            for _ in 0..count {
                visit(TilePair { held, wanted, turn: wanted + round }, &lies);
                round = if round + 1 == count { 0 } else { round + 1 };
                for dimension in (0..dimensions.len()).rev() {
                    let (first, count) = reaching[dimension];
                    if count == 1 {
                        continue;
                    }
                    let next = if along[dimension] + 1 == count { 0 } else { along[dimension] + 1 };
                    held = held + next * apart[dimension] - along[dimension] * apart[dimension];
                    along[dimension] = next;
                    lies.replace_source_bounds(dimension, source.cuts[dimension].interval(first + next));
                    if next > 0 {
                        break;
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::super::{ArrayDescription, Dtype, Mesh, PartitionSpec, Sharding};
    use super::*;

    /// Returns the tiling of an array over a grid of devices, with each dimension divided in so many ways.
    fn tiling(shape: &[u64], ways: &[u64]) -> Tiling {
        let names: Vec<String> = (0..ways.len()).map(|axis| format!("a{axis}")).collect();
        let axes: Vec<(&str, u64)> = names.iter().map(String::as_str).zip(ways.iter().copied()).collect();
        let entries: Vec<[&str; 1]> = names.iter().map(|name| [name.as_str()]).collect();
        let entries: Vec<&[&str]> = entries.iter().map(<[_; 1]>::as_slice).collect();
        let devices = u32::try_from(ways.iter().product::<u64>()).unwrap();
        let sharding = Sharding { mesh: Mesh::new(&axes, 0..devices), spec: PartitionSpec::new(&entries) };
        Tiling::of(&ArrayDescription { shape: shape.to_vec(), dtype: Dtype::Uint8, sharding })
    }

    #[test]
    fn every_region_has_one_number_and_is_found_by_it_and_by_its_tiles() {
        let mut random = fastrand::Rng::with_seed(1);
        for case in 0..3000 {
            let rank = random.usize(0..4);
            let mut pick =
                |from: u64, to: u64| -> Vec<u64> { (0..rank).map(|_| random.u64(from..to)).collect() };
            let shape = pick(if case % 20 == 0 { 0 } else { 1 }, 14);
            let (source, destination) = (tiling(&shape, &pick(1, 6)), tiling(&shape, &pick(1, 6)));
            let region_order = RegionOrder::of(&source, &destination);
            assert_eq!(RegionOrder::count(&source, &destination), u64::from(region_order.region_count()));

            // All pairs of tiles that have elements in common, found by comparison.
            let mut lies = RegionBounds::default();
            let mut wanted = BTreeSet::new();
            let pairs = (0..destination.tile_count())
                .flat_map(|one| (0..source.tile_count()).map(move |other| (one, other)));
            for (tile, held) in pairs {
                source.intervals(held, &mut lies.held);
                destination.intervals(tile, &mut lies.wanted);
                if lies.held.iter().zip(&lies.wanted).all(|(a, b)| a.0.max(b.0) < a.1.min(b.1)) {
                    wanted.insert((tile, held));
                }
            }
            let numbered: Vec<TilePair> =
                (0..region_order.region_count()).map(|number| region_order.region(number)).collect();
            let found: BTreeSet<_> = numbered.iter().map(|pair| (pair.wanted, pair.held)).collect();
            assert_eq!((found.len(), &found), (numbered.len(), &wanted));

            // In each round every tile that has regions left gets one; rounds have consecutive numbers.
            let of_round = |pair: &TilePair| (pair.turn - pair.wanted, pair.wanted);
            let in_rounds: BTreeSet<_> = numbered.iter().map(of_round).collect();
            assert_eq!(in_rounds.len(), numbered.len());
            assert!(numbered.is_sorted_by_key(|pair| pair.turn - pair.wanted));

            let of = |own: &dyn Fn(&TilePair) -> bool| -> Vec<u32> {
                (0..).zip(&numbered).filter(|(_, pair)| own(pair)).map(|(number, _)| number).collect()
            };
            if region_order.region_count() > 0 {
                for tile in 0..destination.tile_count() {
                    let told: Vec<u32> = region_order.regions_of_destination_tile(tile).collect();
                    assert_eq!(told, of(&|pair| pair.wanted == tile));
                }
                for tile in 0..source.tile_count() {
                    let mut told: Vec<u32> = region_order.regions_of_source_tile(tile).collect();
                    told.sort_unstable();
                    assert_eq!(told, of(&|pair| pair.held == tile));
                    assert_eq!(told.len(), region_order.source_region_count(tile) as usize);
                }
            }

            let mut seen = Vec::new();
            region_order.for_each_region(&source, &destination, |pair, there| {
                lies.set_pair(&source, &destination, pair);
                assert_eq!(
                    (&there.held, &there.wanted, &there.common),
                    (&lies.held, &lies.wanted, &lies.common)
                );
                let whole = lies.common == lies.held && lies.common == lies.wanted;
                assert_eq!(region_order.covers_both_tiles(pair), whole);
                seen.push((pair.wanted, pair.held, pair.turn));
            });
            let mut all: Vec<_> = numbered.iter().map(|pair| (pair.wanted, pair.held, pair.turn)).collect();
            all.sort_unstable();
            assert!(seen.is_sorted_by_key(|(wanted, held, _)| (*wanted, *held)));
            assert_eq!(seen, all);
        }
    }
}
