//! A sharding as arithmetic: which tile of the array each device holds, and which tiles of another sharding a tile overlaps.

use super::{ArrayDescription, DeviceId, PlanError};

/// How one dimension is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Cut {
    /// The size of the dimension, in elements.
    pub size: u64,
    /// Into how many tiles it is cut.
    pub count: u64,
    /// The size of a tile: the quotient rounded up. The last tiles may be smaller, or empty.
    pub tile: u64,
}

impl Cut {
    /// Where the tile at `place` begins and ends.
    pub fn interval(self, place: u64) -> (u64, u64) {
        // Below 2^62 + 65,536 at most.
        ((place * self.tile).min(self.size), ((place + 1) * self.tile).min(self.size))
    }

    /// The first and the last tile that reach into a stretch, which must not be empty.
    pub fn reaching(self, (start, end): (u64, u64)) -> (u64, u64) {
        (start / self.tile, (end - 1) / self.tile)
    }
}

/// A sharding of an array of a known shape: the array is a grid of tiles, counted in row-major order, and each device holds one.
#[derive(Debug, Clone)]
pub(super) struct Tiling {
    pub cuts: Vec<Cut>,
    /// The devices in the order of their ids, each with its tile.
    pub devices: Vec<(DeviceId, u32)>,
}

impl Tiling {
    /// Of a description that has been checked.
    pub fn of(array: &ArrayDescription) -> Self {
        let mesh = &array.sharding.mesh;
        // For each axis: how far apart its neighbours lie in the list of devices.
        let mut strides = vec![1_usize; mesh.axes.len()];
        for axis in (1..mesh.axes.len()).rev() {
            strides[axis - 1] = strides[axis] * to_usize(mesh.axes[axis].size);
        }
        let position = |name: &String| mesh.axes.iter().position(|axis| axis.name == *name);
        let divided: Vec<Vec<usize>> = (0..array.shape.len())
            .map(|dimension| {
                let axes = array.sharding.spec.0.get(dimension).map_or(&[][..], |entry| entry.axes());
                axes.iter().filter_map(position).collect()
            })
            .collect();
        let cuts: Vec<Cut> = array.shape.iter().zip(&divided).map(|(&size, axes)| {
            let count = axes.iter().map(|&axis| mesh.axes[axis].size).product::<u64>();
            Cut { size, count, tile: size.div_ceil(count) }
        }).collect();
        // Their number is at most that of the devices, since no axis divides twice.
        let tile_at = |place: usize| {
            let mut tile = 0;
            for axis in divided.iter().flatten() {
                let size = to_usize(mesh.axes[*axis].size);
                tile = tile * size + place / strides[*axis] % size;
            }
            u32::try_from(tile).unwrap_or(u32::MAX)
        };
        let mut devices: Vec<_> =
            mesh.devices.iter().enumerate().map(|(place, &device)| (device, tile_at(place))).collect();
        devices.sort_unstable();
        Self { cuts, devices }
    }

    /// How many tiles there are, empty ones included.
    pub fn tiles(&self) -> u32 {
        u32::try_from(self.cuts.iter().map(|cut| cut.count).product::<u64>()).unwrap_or(u32::MAX)
    }

    /// Where a tile begins and ends in each dimension.
    pub fn intervals(&self, tile: u32, into: &mut Vec<(u64, u64)>) {
        into.clear();
        into.resize(self.cuts.len(), (0, 0));
        let mut rest = u64::from(tile);
        for (cut, interval) in self.cuts.iter().zip(into.iter_mut()).rev() {
            *interval = cut.interval(rest % cut.count);
            rest /= cut.count;
        }
    }

    /// How many pairs there are of a tile of this and a tile of `other` that have elements in common; `None` beyond 64 bits.
    pub fn overlaps(&self, other: &Self) -> Option<u64> {
        self.cuts.iter().zip(&other.cuts).try_fold(1_u64, |pairs, (mine, theirs)| {
            let along = (0..mine.count).map(|place| mine.interval(place)).filter(|(start, end)| start < end);
            let along: u64 = along.map(|interval| theirs.reaching(interval)).map(|(first, last)| last - first + 1).sum();
            pairs.checked_mul(along)
        })
    }
}

/// Goes through the tiles of a tiling that reach into a stretch of each dimension.
#[derive(Debug, Default)]
pub(super) struct Reach {
    /// In each dimension the first and last place, and the present one.
    places: Vec<(u64, u64, u64)>,
}

impl Reach {
    /// Begins; the stretches must not be empty. Returns the first tile.
    pub fn begin(&mut self, tiling: &Tiling, stretches: &[(u64, u64)]) -> u32 {
        self.places.clear();
        self.places.extend(tiling.cuts.iter().zip(stretches).map(|(cut, &stretch)| {
            let (first, last) = cut.reaching(stretch);
            (first, last, first)
        }));
        self.tile(tiling)
    }

    /// The next tile.
    pub fn next(&mut self, tiling: &Tiling) -> Option<u32> {
        for (first, last, place) in self.places.iter_mut().rev() {
            if *place < *last {
                *place += 1;
                return Some(self.tile(tiling));
            }
            *place = *first;
        }
        None
    }

    fn tile(&self, tiling: &Tiling) -> u32 {
        let tile = self.places.iter().zip(&tiling.cuts).fold(0, |tile, (&(_, _, place), cut)| tile * cut.count + place);
        u32::try_from(tile).unwrap_or(u32::MAX)
    }
}

/// What two tiles have in common, in each dimension.
pub(super) fn intersect(one: &[(u64, u64)], other: &[(u64, u64)], into: &mut Vec<(u64, u64)>) {
    into.clear();
    into.extend(one.iter().zip(other).map(|(a, b)| (a.0.max(b.0), a.1.min(b.1))));
}

/// How many elements lie in a stretch of each dimension. The array is bounded, so it cannot overflow.
pub(super) fn volume(stretches: &[(u64, u64)]) -> u64 {
    stretches.iter().map(|(start, end)| end.saturating_sub(*start)).product()
}

/// For what is known to be no more than the number of devices.
fn to_usize(size: u64) -> usize {
    usize::try_from(size).unwrap_or(usize::MAX)
}

/// Refuses a plan of too many steps before any work is done: each device of the destination takes one step for each tile of the source that reaches
/// into its own.
pub(super) fn count_steps(source: &Tiling, destination: &Tiling, limit: u64) -> Result<usize, PlanError> {
    let copies = destination.devices.len() as u64 / u64::from(destination.tiles());
    let steps = destination.overlaps(source).and_then(|pairs| pairs.checked_mul(copies)).unwrap_or(u64::MAX);
    if steps > limit {
        return Err(PlanError::TooMany { what: "steps of the plan", count: steps, limit });
    }
    Ok(to_usize(steps))
}
