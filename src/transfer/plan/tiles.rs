//! A sharding as arithmetic: computes the tile of the array that each device holds, and its bounds.
//!
//! Tiles do not depend on tasks. Begin at [`Tiling`].

use super::{ArrayDescription, DeviceId, PlanError, ShardRegion};

/// The value for no tile, no step or no device.
pub(super) const NONE: u32 = u32::MAX;

/// The division of one dimension into tiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct DimensionTiling {
    /// The size of the dimension, in elements.
    pub size: u64,
    /// The number of tiles that are not empty.
    pub count: u32,
    /// The size of a tile: the quotient rounded up. The last one may be smaller.
    pub tile: u64,
}

impl DimensionTiling {
    /// Returns the bounds of the tile at `place`.
    pub fn interval(self, place: u32) -> (u64, u64) {
        let place = u64::from(place);
        // Less than 2^62 + 65,536, so it cannot overflow.
        ((place * self.tile).min(self.size), ((place + 1) * self.tile).min(self.size))
    }

    /// Returns the first and the last tile that overlap an interval, which must not be empty.
    pub fn reaching(self, (start, end): (u64, u64)) -> (u32, u32) {
        let place = |element: u64| u32::try_from(element / self.tile).unwrap_or(NONE);
        (place(start), place(end - 1))
    }
}

/// A sharding of an array of known shape: the array is a grid of tiles in row-major order, and each device
/// holds one tile, or [`NONE`] if its part lies beyond the array. Shardings that put the same elements on the
/// same devices have the same tiling.
#[derive(Debug, Clone)]
pub(super) struct Tiling {
    pub cuts: Vec<DimensionTiling>,
    /// The devices in the order of their ids, each with its tile.
    pub devices: Vec<(DeviceId, u32)>,
}

impl Tiling {
    /// Computes the tiling of a description that has been checked.
    pub fn of(array: &ArrayDescription) -> Self {
        let mesh = &array.sharding.mesh;
        // The distance of neighbours along each axis in the list of devices.
        let mut strides = vec![1_u64; mesh.axes.len()];
        for axis in (1..mesh.axes.len()).rev() {
            strides[axis - 1] = strides[axis] * mesh.axes[axis].size;
        }
        // For each dimension, the size and the stride of the axes that divide it, the major one first.
        let find = |name: &String| mesh.axes.iter().position(|axis| axis.name == *name);
        let divided: Vec<Vec<(u64, u64)>> = (0..array.shape.len())
            .map(|dimension| {
                let axes = array.sharding.spec.0.get(dimension).map_or(&[][..], |entry| entry.axes());
                axes.iter().filter_map(find).map(|axis| (mesh.axes[axis].size, strides[axis])).collect()
            })
            .collect();
        let cut = |(&size, axes): (&u64, &Vec<(u64, u64)>)| {
            let tile = size.div_ceil(axes.iter().map(|(ways, _)| ways).product());
            DimensionTiling {
                size,
                // The number of tiles is at most the number of devices.
                count: if tile == 0 { 1 } else { u32::try_from(size.div_ceil(tile)).unwrap_or(NONE) },
                tile,
            }
        };
        let cuts: Vec<DimensionTiling> = array.shape.iter().zip(&divided).map(cut).collect();
        // The number of tiles is at most the number of devices, because no axis divides two dimensions.
        let tile_at = |place: u64| {
            let mut tile = 0;
            for (cut, axes) in cuts.iter().zip(&divided) {
                let along =
                    axes.iter().fold(0, |along, &(ways, stride)| along * ways + place / stride % ways);
                match along {
                    _ if cut.size == 0 => {}
                    along if along >= u64::from(cut.count) => return NONE,
                    along => tile = tile * u64::from(cut.count) + along,
                }
            }
            u32::try_from(tile).unwrap_or(NONE)
        };
        let mut devices: Vec<_> =
            (0..).zip(&mesh.devices).map(|(place, &device)| (device, tile_at(place))).collect();
        devices.sort_unstable();
        Self { cuts, devices }
    }

    /// Returns the number of tiles.
    pub fn tile_count(&self) -> u32 {
        self.cuts.iter().map(|cut| cut.count).product()
    }

    /// Returns whether the array has no elements. Otherwise no tile is empty.
    pub fn has_no_elements(&self) -> bool {
        self.cuts.iter().any(|cut| cut.size == 0)
    }

    /// Returns the number of devices that hold each tile of an array that has elements. It is equal for all
    /// tiles: a holder has one place along the axes that divide, and any place along the others.
    pub fn copies(&self) -> u32 {
        let holding = self.devices.iter().filter(|(_, tile)| *tile != NONE).count();
        saturating_u32(holding) / self.tile_count()
    }

    /// Writes the bounds of a tile in each dimension to `into`; empty ones for [`NONE`].
    pub fn intervals(&self, tile: u32, into: &mut Vec<(u64, u64)>) {
        into.clear();
        into.resize(self.cuts.len(), (0, 0));
        if tile == NONE {
            return;
        }
        let mut rest = tile;
        for (cut, interval) in self.cuts.iter().zip(into.iter_mut()).rev() {
            *interval = cut.interval(rest % cut.count);
            rest /= cut.count;
        }
    }
}

/// The two tiles whose intersection is a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TilePair {
    /// The tile of the source.
    pub held: u32,
    /// The tile of the destination.
    pub wanted: u32,
    /// The sum of the destination tile and the round: it differs between the regions of a destination tile,
    /// and between the tiles of a round.
    pub turn: u32,
}

/// The bounds of a region and of its two tiles, in each dimension.
#[derive(Debug, Default)]
pub(super) struct RegionBounds {
    pub held: Vec<(u64, u64)>,
    pub wanted: Vec<(u64, u64)>,
    pub common: Vec<(u64, u64)>,
}

impl RegionBounds {
    /// Computes the bounds of a pair.
    pub fn set_pair(&mut self, source: &Tiling, destination: &Tiling, pair: TilePair) {
        source.intervals(pair.held, &mut self.held);
        destination.intervals(pair.wanted, &mut self.wanted);
        self.common.clear();
        self.common
            .extend(self.held.iter().zip(&self.wanted).map(|(held, wanted)| intersection(*held, *wanted)));
    }

    /// Replaces the source tile by one that differs in one dimension.
    pub fn replace_source_bounds(&mut self, dimension: usize, held: (u64, u64)) {
        self.held[dimension] = held;
        self.common[dimension] = intersection(held, self.wanted[dimension]);
    }

    /// Returns the number of elements of the region. The array is bounded, so it cannot overflow.
    pub fn element_count(&self) -> u64 {
        self.common.iter().map(|(start, end)| end - start).product()
    }
}

/// Returns the overlap of two intervals that do overlap.
fn intersection(one: (u64, u64), other: (u64, u64)) -> (u64, u64) {
    (one.0.max(other.0), one.1.min(other.1))
}

/// Converts a count that is known to be far below 2^32.
pub(super) fn saturating_u32(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(NONE)
}

/// Returns the length of each interval.
pub(super) fn interval_lengths(stretches: &[(u64, u64)]) -> Vec<u64> {
    stretches.iter().map(|(start, end)| end - start).collect()
}

impl ArrayDescription {
    /// Returns the part of the array that each device holds, in the order of the devices' ids: JAX's
    /// `devices_indices_map`. A shard that lies beyond the array is empty in every dimension.
    ///
    /// # Errors
    /// Returns the errors of [`ArrayDescription::check`].
    pub fn shards(&self) -> Result<Vec<(DeviceId, ShardRegion)>, PlanError> {
        self.check()?;
        let tiling = Tiling::of(self);
        let mut intervals = Vec::new();
        let shard = |&(device, tile): &(DeviceId, u32)| {
            tiling.intervals(tile, &mut intervals);
            let (start, extent) = intervals.iter().map(|(start, end)| (start, end - start)).unzip();
            (device, ShardRegion { start, extent })
        };
        Ok(tiling.devices.iter().map(shard).collect())
    }
}
