//! A sharding as arithmetic: which tile of the array each device holds, and which tiles of another sharding a tile
//! overlaps.

use super::{ArrayDescription, DeviceId, PlanError};

/// No tile, no step, nobody.
pub(super) const NONE: u32 = u32::MAX;

/// How one dimension is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Cut {
    /// The size of the dimension, in elements.
    pub size: u64,
    /// Into how many tiles it is cut; empty ones do not count.
    pub count: u64,
    /// The size of a tile: the quotient rounded up. The last one may be smaller.
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

/// A sharding of an array of a known shape: the array is a grid of tiles, counted in row-major order, and each device
/// holds one, or [`NONE`] if its part lies beyond the array. Shardings that put the same elements on the same devices
/// are the same tiling.
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
        // How far apart neighbours along each axis lie in the list of devices.
        let mut strides = vec![1_u64; mesh.axes.len()];
        for axis in (1..mesh.axes.len()).rev() {
            strides[axis - 1] = strides[axis] * mesh.axes[axis].size;
        }
        // For each dimension the size and the stride of the axes that divide it, the major one first.
        let find = |name: &String| mesh.axes.iter().position(|axis| axis.name == *name);
        let divided: Vec<Vec<(u64, u64)>> = (0..array.shape.len())
            .map(|dimension| {
                let axes = array.sharding.spec.0.get(dimension).map_or(&[][..], |entry| entry.axes());
                axes.iter().filter_map(find).map(|axis| (mesh.axes[axis].size, strides[axis])).collect()
            })
            .collect();
        let cut = |(&size, axes): (&u64, &Vec<(u64, u64)>)| {
            let tile = size.div_ceil(axes.iter().map(|(ways, _)| ways).product());
            Cut {
                size,
                count: size.checked_div(tile).map_or(1, |whole| whole + u64::from(size % tile > 0)),
                tile,
            }
        };
        let cuts: Vec<Cut> = array.shape.iter().zip(&divided).map(cut).collect();
        // Their number is at most that of the devices, since no axis divides twice.
        let tile_at = |place: u64| {
            let mut tile = 0;
            for (cut, axes) in cuts.iter().zip(&divided) {
                let along =
                    axes.iter().fold(0, |along, &(ways, stride)| along * ways + place / stride % ways);
                match along {
                    _ if cut.size == 0 => {}
                    along if along >= cut.count => return NONE,
                    along => tile = tile * cut.count + along,
                }
            }
            u32::try_from(tile).unwrap_or(NONE)
        };
        let mut devices: Vec<_> =
            (0..).zip(&mesh.devices).map(|(place, &device)| (device, tile_at(place))).collect();
        devices.sort_unstable();
        Self { cuts, devices }
    }

    /// How many tiles there are.
    pub fn tiles(&self) -> u32 {
        u32::try_from(self.cuts.iter().map(|cut| cut.count).product::<u64>()).unwrap_or(NONE)
    }

    /// Where a tile begins and ends in each dimension; nowhere, for [`NONE`].
    pub fn intervals(&self, tile: u32, into: &mut Vec<(u64, u64)>) {
        into.clear();
        into.resize(self.cuts.len(), (0, 0));
        if tile == NONE {
            return;
        }
        let mut rest = u64::from(tile);
        for (cut, interval) in self.cuts.iter().zip(into.iter_mut()).rev() {
            *interval = cut.interval(rest % cut.count);
            rest /= cut.count;
        }
    }

    /// How many pairs there are of a tile of this and a tile of `other` that have elements in common; `None` beyond
    /// 64 bits.
    pub fn overlaps(&self, other: &Self) -> Option<u64> {
        self.cuts.iter().zip(&other.cuts).try_fold(1_u64, |pairs, (mine, theirs)| {
            let along = (0..mine.count).map(|place| mine.interval(place)).filter(|(start, end)| start < end);
            let along: u64 =
                along.map(|interval| theirs.reaching(interval)).map(|(first, last)| last - first + 1).sum();
            pairs.checked_mul(along)
        })
    }
}

/// The tiles of a tiling that reach into a stretch of each dimension, in row-major order.
#[derive(Debug, Default)]
pub(super) struct Reach(Vec<(u64, u64)>);

impl Reach {
    /// Finds them; the stretches must not be empty. Returns how many there are.
    pub fn find(&mut self, tiling: &Tiling, stretches: &[(u64, u64)]) -> u64 {
        self.0.clear();
        self.0.extend(tiling.cuts.iter().zip(stretches).map(|(cut, &stretch)| cut.reaching(stretch)));
        self.0.iter().map(|(first, last)| last - first + 1).product()
    }

    /// The one of this number.
    pub fn nth(&self, tiling: &Tiling, mut number: u64) -> u32 {
        let (mut tile, mut apart) = (0, 1);
        for (&(first, last), cut) in self.0.iter().zip(&tiling.cuts).rev() {
            let count = last - first + 1;
            tile += (first + number % count) * apart;
            number /= count;
            apart *= cut.count;
        }
        u32::try_from(tile).unwrap_or(NONE)
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

/// Refuses a plan of too many steps before any work is done: each device of the destination takes one step for each
/// tile of the source that reaches into its own.
pub(super) fn count_steps(source: &Tiling, destination: &Tiling, limit: u64) -> Result<usize, PlanError> {
    let holding = destination.devices.iter().filter(|(_, tile)| *tile != NONE).count() as u64;
    let copies = holding / u64::from(destination.tiles());
    let steps = destination.overlaps(source).and_then(|pairs| pairs.checked_mul(copies)).unwrap_or(u64::MAX);
    if steps > limit {
        return Err(PlanError::TooMany { what: "steps of the plan", count: steps, limit });
    }
    Ok(to_usize(steps))
}
